"""Experts of transformers models that several ranks share: rows travel to the ranks of their
experts, and back. `cadre.huggingface.use(model, ep=...)` spreads experts, or transformers does so,
see expert_plans.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import expert_state
from .dtypes import kind_of
from .expert_parallel import ExpertParallel
from .moe import parallel_of

BATCHES = ("own", "same")
_Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows, offsets, prob -> results of the rows


@dataclass
class Sharing:
    """How a module's experts are shared, in its attribute `_cadre_sharing`."""

    ep: ExpertParallel
    batch: str  # "own": each rank has tokens of its own; "same": all ranks have the same ones

    def forward(self, experts: _Experts, x: Tensor, chosen: Tensor, prob: Tensor) -> Tensor:
        """Results [T, H] of tokens [T, H], whose choices [T, top_k] are among all experts."""
        tokens = x.shape[0]
        if self.batch == "same":
            part = _part_of(self.ep, tokens)
            x, prob = _Part.apply(self.ep, x, prob)
            chosen = chosen[part]
        rows, row_prob, offsets, handle = self.ep.dispatch(x, chosen, prob)
        out = self.ep.collect(experts(rows, offsets, row_prob), handle)
        return _Whole.apply(self.ep, tokens, out) if self.batch == "same" else out


# One batch on all ranks: each takes a part of the tokens, and results are gathered. All ranks go on
# with the same numbers, so the gradient of the whole is on every rank, too.


def _part_of(ep: ExpertParallel, tokens: int) -> slice:
    each = -(-tokens // ep.ranks)
    return slice(min(each * ep.rank, tokens), min(each * (ep.rank + 1), tokens))


def _gathered(ep: ExpertParallel, tokens: int, part: Tensor) -> Tensor:
    """The parts of all ranks, [tokens, ...]."""
    each = -(-tokens // ep.ranks)
    if each == 0:
        return part
    padded = part.new_zeros((each, *part.shape[1:]))
    padded[:part.shape[0]] = part
    whole = part.new_empty((ep.ranks * each, *part.shape[1:]))
    dist.all_gather_into_tensor(whole, padded, group=ep.group)
    return whole[:tokens]


class _Part(torch.autograd.Function):
    """Both in one node, so that all ranks gather gradients in one order."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, x: Tensor, prob: Tensor) -> tuple[Tensor, Tensor]:
        ctx.ep, ctx.tokens = ep, x.shape[0]
        part = _part_of(ep, ctx.tokens)
        return x[part].clone(), prob[part].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_gathered(ctx.ep, ctx.tokens, grad) if wanted else None
                       for grad, wanted in zip(grads, ctx.needs_input_grad[1:]))


class _Whole(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, tokens: int, out: Tensor) -> Tensor:
        ctx.part = _part_of(ep, tokens)
        return _gathered(ep, tokens, out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, dout[ctx.part]


# `use(model, ep=...)`.


def sharing_of(module: nn.Module) -> Sharing | None:
    return getattr(module, "_cadre_sharing", None)


def require_batch(batch: str | None, shared: bool) -> None:
    """Errors: ValueError for another word, or where no ranks share the experts."""
    if batch is not None and batch not in BATCHES:
        raise ValueError(f"use: batch is {batch!r}, must be one of {', '.join(BATCHES)}")
    if batch is not None and not shared:
        raise ValueError(f"use: batch is {batch!r}, must be left out without ep; no ranks share "
                         "the experts")


def plan(found: Mapping[str, nn.Module], ported: Mapping[str, nn.Module], ep: Any
         ) -> dict[str, ExpertParallel]:
    """Of each experts module, those of a size sharing one. Errors: ValueError for modules that
    cannot be shared."""
    for name, module in ported.items():
        raise ValueError(f"use: {name} is {kind_of(module)}, must be an experts module with "
                         "@use_experts_implementation where ep is given")
    made: dict[tuple[int, int], ExpertParallel] = {}
    for name, module in found.items():
        if (sharing := sharing_of(module)) is not None:
            raise ValueError(f"use: {name} is shared by {sharing.ep.ranks} ranks, must be whole; "
                             "leave ep out to change the batch")
        for what, weight in module.named_parameters():
            if isinstance(weight, DTensor):
                raise ValueError(f"use: {name}.{what} is a DTensor, must be a whole tensor; the "
                                 "model is distributed already")
        sizes = module.num_experts, top_k_of(module, ep)
        if sizes not in made:
            made[sizes] = parallel_of(ep, *sizes)
    return {name: made[module.num_experts, top_k_of(module, ep)]
            for name, module in found.items()}


def top_k_of(module: nn.Module, ep: Any) -> int:
    """Experts of a token, as the model's config says, or else `ep`."""
    for name in ("num_experts_per_tok", "top_k_experts"):
        if isinstance(found := getattr(module.config, name, None), int):
            return found
    if isinstance(ep, ExpertParallel):
        return ep.top_k
    raise ValueError(f"use: {type(module.config).__name__} has no num_experts_per_tok, must say "
                     "how many experts a token chooses; give ep an ExpertParallel")


def share(found: Mapping[str, nn.Module], planned: Mapping[str, ExpertParallel], batch: str
          ) -> None:
    """Leaves each module this rank's experts. Parameters that modules have in common stay so."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in found.items():
        ep = planned[name]
        for what, weight in list(module.named_parameters(recurse=False)):
            if weight not in made:
                own = weight.detach().narrow(0, ep.rank * ep.experts, ep.experts).clone()
                made[weight] = nn.Parameter(own, weight.requires_grad)
            setattr(module, what, made[weight])
        module.num_experts = ep.experts
        module._cadre_sharing = Sharing(ep, batch)
        expert_state.watch(module)
        expert_state.keep_whole_parameters(module, ep)


def generate_together(model: nn.Module) -> None:
    """From now on `model.generate` goes on until all ranks have finished, unless they have one
    batch."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose type has no `generate`
    if hasattr(model, "generate"):
        model.generate = MethodType(_generate, model)


def _generate(model: Any, *args: Any, synced_gpus: bool | None = None, **named: Any) -> Any:
    own = any(sharing.batch == "own" for sharing in _sharings(model))
    given = named.get("generation_config", args[1] if len(args) > 1 else None)
    config = given or model.generation_config
    chunk = named.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))
    if own and chunk is not None:
        raise ValueError(f"generate: prefill_chunk_size is {chunk}, must be None; prompts of ranks "
                         "with batches of their own have other numbers of chunks")
    if synced_gpus is None and own:
        synced_gpus = True
    none = own and any(map(_has_no_row, (*args, *named.values())))
    if none:  # transformers takes no such batch, and the other ranks wait for this one
        args = tuple(map(_with_a_row, args))
        named = {name: _with_a_row(given) for name, given in named.items()}
    result = type(model).generate(model, *args, synced_gpus=synced_gpus, **named)
    return result[:0] if none and isinstance(result, Tensor) else result


def _has_no_row(given: Any) -> bool:
    return isinstance(given, Tensor) and given.dim() > 1 and given.shape[0] == 0


def _with_a_row(given: Any) -> Any:
    return given.new_ones((1, *given.shape[1:])) if _has_no_row(given) else given


def _sharings(model: nn.Module) -> list[Sharing]:
    return [s for m in model.modules() if (s := sharing_of(m)) is not None]


def require_whole(model: nn.Module, state: Mapping[str, Any] | None) -> None:
    """Of a state that is saved without gathering it; adapters have none of the experts. Errors:
    ValueError where it has parts of the experts that `use` has spread."""
    if not why_bound(model) or getattr(model, "_hf_peft_config_loaded", False):
        return
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("save_pretrained: each rank has a part of the experts, must have all; a "
                         "quantizer of transformers saves no other state: save before `use`")
    if state is None or any(isinstance(t, DTensor) for t in state.values()):
        raise ValueError(
            "save_pretrained: each rank has a part of the experts, must be given whole tensors; "
            "give it state_dict={n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in "
            "model.state_dict().items()}, which all ranks make and one saves")


def why_bound(model: nn.Module) -> str:
    """Why its experts run no other code: `use` has spread them. Empty where it has not."""
    spread = any(hasattr(m, "_ep") for m in model.modules() if sharing_of(m) is not None)
    return "each rank has a part of the experts" if spread else ""
