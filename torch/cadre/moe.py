"""A whole mixture-of-experts layer: router, permute, experts, combine."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .dtypes import kind_of, require_factor, require_rows, require_sizes
from .fakes import require_one_device
from .grouped_mlp import GroupedMLP
from .operations import combine, offsets_of_routing, permute, routing


class RouterOutput(NamedTuple):
    """What a router decided, for losses and statistics. T is the number of tokens."""

    logits: Tensor  # fp32 [T, E]
    scores: Tensor  # fp32 [T, E], of all experts
    experts: Tensor  # int32 [T, top_k]
    prob: Tensor  # fp32 [T, top_k]
    tokens_per_expert: Tensor  # int32 [E], on the device

    def load_balancing_loss(self) -> Tensor:
        """See `load_balancing_loss`."""
        return load_balancing_loss(self.scores, self.tokens_per_expert)


def load_balancing_loss(scores: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """E * sum_e share_e * score_e, fp32 scalar: share_e is expert e's part of all choices, score_e
    the mean over tokens of its part of the token's scores. It is 1 where all experts are chosen
    alike, E where all tokens choose one. Its gradient goes through the scores.

    scores: [T, E], 0 or more. tokens_per_expert: [E], any integer type. Nothing waits for the
    device. Errors: ValueError for other shapes.
    """
    require_factor("scores", scores)
    require_factor("tokens_per_expert", tokens_per_expert)
    if scores.dim() != 2 or tokens_per_expert.shape != scores.shape[1:]:
        raise ValueError(f"scores and tokens_per_expert have shapes {list(scores.shape)} and "
                         f"{list(tokens_per_expert.shape)}, must be [T, E] and [E]")
    chosen = tokens_per_expert.float()
    share = chosen / chosen.sum().clamp(min=1)
    part = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    return scores.shape[-1] * (share * part.sum(0) / max(scores.shape[0], 1)).sum()


class MoE(nn.Module):
    """out[t] = sum over the top_k experts e of token t of prob[t, e] * MLP_e(x[t])
    [+ shared(x[t])].

    The router is one matrix [E, H] and works in fp32, also under torch.autocast. No token is
    dropped. A biased expert's second bias is weighted like the rest of its result.

    hidden: H. features: F of each expert. num_experts: E.
    score: "softmax" over all experts, "topk_softmax" over the chosen, or "sigmoid".
    normalize: divide the chosen probabilities by their sum. scale: their factor after that.
    expert_bias: keep a buffer `expert_bias` fp32 [E] that is added to the scores for the choice
        only; trainers move it to balance the load. It stays fp32 whatever the module is converted
        to, since bf16 would not feel their small steps.
    groups, group_top_k: experts come in equal groups, and only those of group_top_k groups may be
        chosen by a token.
    activation, layout, bias, device, dtype, recipe, keep_h: of the experts, see `GroupedMLP`.
    shared_expert: a module [..., H] -> [..., H] that every token visits.
    """

    hidden: int
    num_experts: int
    top_k: int
    routing: dict[str, Any]
    experts: GroupedMLP
    router: nn.Parameter
    expert_bias: Tensor | None

    def __init__(self, hidden: int, features: int, num_experts: int, top_k: int, *,
                 score: str = "softmax", normalize: bool = False, scale: float = 1.0,
                 expert_bias: bool = False, groups: int = 1, group_top_k: int = 1,
                 shared_expert: nn.Module | None = None, device: torch.device | str | None = None,
                 **experts: Any) -> None:
        super().__init__()
        require_sizes(hidden=hidden, features=features, num_experts=num_experts, top_k=top_k,
                      groups=groups, group_top_k=group_top_k)
        if top_k > num_experts:
            raise ValueError(f"top_k is {top_k}, must be 1 to num_experts, {num_experts}")
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.routing = {"top_k": top_k, "score": score, "normalize": normalize, "scale": scale,
                        "groups": groups, "group_top_k": group_top_k}
        self._check_routing()
        if not isinstance(shared_expert, nn.Module | None):
            raise TypeError(f"shared_expert is {kind_of(shared_expert)}, must be a module "
                            "or None")
        self.experts = GroupedMLP(num_experts, hidden, features, device=device, **experts)
        device = self.experts.w1.device
        self.router = nn.Parameter(torch.empty(num_experts, hidden, device=device))
        self.register_buffer("expert_bias",
                             torch.empty(num_experts, dtype=torch.float32, device=device)
                             if expert_bias else None)
        self.shared_expert = shared_expert
        if not self.router.is_meta:
            self._reset_router()

    def _check_routing(self) -> None:
        """Errors: ValueError for words and numbers that do not fit, as from `routing`."""
        for name, kind in (("score", str), ("normalize", bool), ("scale", (int, float))):
            given = self.routing[name]
            if not isinstance(given, kind):
                raise TypeError(f"{name} is {kind_of(given)}, must be "
                                f"{'a number' if name == 'scale' else f'a {kind.__name__}'}")
        routing(torch.empty(0, self.num_experts, dtype=torch.float32, device="cpu"), **self.routing)

    def reset_parameters(self) -> None:
        """New weights of router and experts; the shared expert is left as it is."""
        self._reset_router()
        self.experts.reset_parameters()

    @torch.no_grad()
    def _reset_router(self) -> None:
        self.router.normal_(0.0, 0.02)
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoE":
        """`to`, `bfloat16` and the like, which leave expert_bias in fp32."""
        exact = self.expert_bias
        super()._apply(fn, recurse)
        if exact is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()  # with assign=True it is what was loaded

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logits fp32 [T, E], experts int32 [T, top_k], prob fp32 [T, top_k], scores fp32 [T, E])
        of tokens [T, H]."""
        require_one_device({"x": x, "router": self.router})
        if tuple(self.router.shape) != (self.num_experts, self.hidden):
            raise ValueError(f"router has shape {list(self.router.shape)}, must be "
                             f"{[self.num_experts, self.hidden]}: a row for each expert")
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            logits = functional.linear(x.float(), self.router.float())
        return logits, *routing(logits, expert_bias=self.expert_bias, **self.routing)

    def forward(self, x: Tensor) -> tuple[Tensor, RouterOutput]:
        """(out [..., H], what the router decided) for x [..., H].

        Errors: ValueError for another last dimension; TypeError for another dtype.
        """
        require_rows("x", x)
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {list(x.shape)}, must be [..., {self.hidden}]; hidden "
                             "is its last dimension")
        tokens = x.reshape(-1, self.hidden)
        logits, experts, prob, scores = self.route(tokens)
        where = offsets_of_routing(experts, self.num_experts, tokens.shape[0] * self.top_k)
        order = (where.offsets, where.row_of, where.slot_of)
        rows, row_prob = permute(tokens, *order, prob)
        biased = self.experts.bias2 is not None
        rows = self.experts(rows, where, row_prob, row_prob if biased else None)
        out = combine(rows, *order).view(x.shape)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if not isinstance(shared, Tensor) or shared.shape != x.shape:
                found = list(shared.shape) if isinstance(shared, Tensor) else type(shared).__name__
                raise ValueError(f"shared_expert(x) is {found}, must be a tensor of shape "
                                 f"{list(x.shape)}, that of x")
            out = out + shared
        return out, RouterOutput(logits, scores, experts, prob, where.offsets.diff())

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.routing.items())
