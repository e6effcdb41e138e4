"""Routers of transformers on Cadre, whose own code takes a dozen kernels and more: what makes the
choice of the logits, and of bf16 tokens in fp32 the product too.

A class of transformers is known by the code of its forward, whatever model it is of: by a digest of
its words. So a router whose code is another one, of another version as well, runs its own.
"""

import ast
import functools
import hashlib
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear

from .foreign_experts import either, runs_cadre
from .operations import Routing, routing
from .router import router_logits

_Router = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]  # of a router and tokens
_NAMED = re.compile(r"Router$|Gate$")
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


class Port(NamedTuple):
    """What stands for a forward of transformers."""

    forward: _Router
    score: str  # as `cadre.routing` has it
    fits: Callable[[Any], bool] = lambda router: True  # whether it is the same of that router


def digest_of(forward: Callable[..., Any]) -> str | None:
    """Of the code behind the signature and its docstring; None where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(forward))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(function, ast.FunctionDef):
        return None
    body = function.body[ast.get_docstring(function, clean=False) is not None:]
    names = [argument.arg for argument in function.args.args]
    code = "\n".join(ast.get_source_segment(source, statement, padded=True) or ""
                     for statement in body)
    words = [token.string for token in tokenize.generate_tokens(io.StringIO(code).readline)
             if token.type not in _LAYOUT]
    return hashlib.sha256(" ".join(names + words).encode()).hexdigest()[:16]


# What routers of transformers return: logits [T, E], weights and choices [T, top_k], for tokens
# [..., H].


def _chosen(choice: Routing, like: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, rounded as those of the model, and choices as torch.topk has them."""
    return choice.prob if like is None else choice.prob.to(like.dtype), choice.experts.long()


def _softmax(self: Any, x: Tensor, normalize: bool) -> tuple[Tensor, Routing]:
    logits = linear(x.reshape(-1, self.hidden_dim), self.weight)
    return logits, routing(logits, self.top_k, "softmax", normalize)


def _qwen(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, choice = _softmax(self, hidden_states, self.norm_topk_prob)
    return logits, *_chosen(choice, logits)


def _qwen_normalized(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, choice = _softmax(self, hidden_states, True)
    return logits, *_chosen(choice, logits)


def _mixtral(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, choice = _softmax(self, hidden_states, True)
    return logits, *_chosen(choice, None)


def _deepseek(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = router_logits(hidden_states.view(-1, self.hidden_dim), self.weight)
    choice = routing(logits, self.top_k, "sigmoid", self.norm_topk_prob,
                     float(self.routed_scaling_factor), self.e_score_correction_bias.float(),
                     self.num_group, self.topk_group)
    return logits, *_chosen(choice, None)


def _sums_of_two(self: Any) -> bool:
    """`cadre.routing` chooses groups by the sum of their best top_k / group_top_k experts, that
    code by the best two."""
    return self.num_group == 1 or self.top_k // self.topk_group == 2


def _gpt_oss(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = linear(hidden_states, self.weight, self.bias)
    return logits, *_chosen(routing(logits, self.top_k, "topk_softmax"), logits)


def _granite(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = linear(hidden_states, self.weight).float()
    weights, chosen = _chosen(routing(logits, self.top_k, "topk_softmax"), hidden_states)
    return chosen, weights, logits


def _granite_swa(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    chosen, weights, logits = _granite(self, hidden_states)
    return logits, weights, chosen


# By the digest of the forward; beside it one class that has it.
PORTS = {
    "478741f4b819d42a": Port(_deepseek, "sigmoid", _sums_of_two),  # DeepseekV3TopkRouter
    "d5806eeca2f4b677": Port(_qwen, "softmax"),  # Qwen3MoeTopKRouter
    "92e70af7c54983dc": Port(_qwen_normalized, "softmax"),  # Qwen3VLMoeTextTopKRouter
    "bcc925e4cbfbc986": Port(_mixtral, "softmax"),  # MixtralTopKRouter
    "724d75bf05caf891": Port(_gpt_oss, "topk_softmax"),  # GptOssTopKRouter
    "17511533c3f3880d": Port(_granite, "topk_softmax"),  # GraniteMoeTopKRouter
    "2b735d8eb1791df3": Port(_granite_swa, "topk_softmax"),  # GraniteMoeSWATopKRouter
}


def switch(module: nn.Module, on: bool) -> None:
    """Cadre for a router that is known, or its own code."""
    if _known(module):
        module._runs_cadre = on


def patch(model: nn.Module) -> None:
    """Gives their forward to the classes of those that run Cadre."""
    for module in model.modules():
        if runs_cadre(module):
            _known(module)


def port_of(module: nn.Module) -> Port | None:
    """Of a router that it fits."""
    port = _known(module)
    return port if port and port.fits(module) else None


def _known(module: nn.Module) -> Port | None:
    """Of a router of transformers, whose class then has a forward that asks who runs it; also of
    one of another class that has that forward, as a parametrized one has."""
    cls = next(each for each in type(module).__mro__ if "forward" in vars(each))
    if not (_NAMED.search(cls.__name__) and cls.__module__.startswith("transformers.")):
        return None
    port: Port | None = getattr(cls.forward, "cadre_router", None) or _patched(cls)
    return port


@functools.lru_cache(maxsize=None)
def _patched(cls: type[nn.Module]) -> Port | None:
    own = cls.forward
    port = PORTS.get(digest_of(own) or "")
    if port is None:
        return None

    def here(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (port.forward if port.fits(self) else own)(self, *args, **kwargs)

    forward = either(own, here)
    forward.cadre_router = port
    cls.forward = forward  # type: ignore[method-assign]
    return port
