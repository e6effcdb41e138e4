"""Experts of transformers that it does not dispatch, on Cadre: a forward in place of the one that
their class has, with the same arguments, parameters and results.

The forward of a class asks the module whether it is switched on, so that `switch` works at any
time, and copies and pickles of a module do what it does.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .counts import offsets_of
from .expert_activations import activation_of
from .recipe import active_recipe, words_for

_ops = torch.ops.cadre


class Port(NamedTuple):
    """Of a class of transformers, `transformers.models.<model>.modeling_<model>.<name>`."""

    model: str
    name: str
    forward: Callable[..., Any]
    about: Callable[[Any], str] | None  # what of a module Cadre runs; None: its parts say


def switch(module: nn.Module, on: bool) -> None:
    """Cadre for experts that have a forward here, or their own code."""
    if port_of(module):
        module._runs_cadre = on


def ported(model: nn.Module) -> dict[str, nn.Module]:
    """The experts of the model that have a forward here, by name."""
    patch()
    return {name: module for name, module in model.named_modules()
            if (port := port_of(module)) and port.about}


def port_of(module: nn.Module) -> Port | None:
    return getattr(type(module).forward, "cadre_port", None)


def runs_cadre(module: nn.Module) -> bool:
    return getattr(module, "_runs_cadre", False)


def patch() -> None:
    """Gives their forward to those of the classes that are imported by now."""
    for port in PORTS:
        code = sys.modules.get(f"transformers.models.{port.model}.modeling_{port.model}")
        cls = getattr(code, port.name, None)
        if cls is not None and not hasattr(cls.forward, "cadre_port"):
            cls.forward = either(cls.forward, port.forward)
            cls.forward.cadre_port = port


def either(own: Callable[..., Any], here: Callable[..., Any]) -> Any:
    """A forward that asks the module which of both it runs."""

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (here if runs_cadre(self) else own)(self, *args, **kwargs)

    return forward


# What the forwards share.


class _Routed(NamedTuple):
    rows: Tensor  # [R, H], in the order of the experts
    prob: Tensor  # fp32 [R]
    offsets: Tensor  # int32 [E + 1]
    back: tuple[Tensor, Tensor, Tensor]  # what `combine` takes


def _routed(x: Tensor, experts: int, chosen: Tensor, prob: Tensor) -> _Routed:
    """The rows of tokens [T, H]; a choice outside [0, experts) has none."""
    offsets, row_of, slot_of, _ = _ops.offsets_of_routing(chosen, experts, chosen.numel())
    back = offsets, row_of, slot_of
    rows, row_prob = _ops.permute(x, *back, prob.float())
    return _Routed(rows, row_prob, offsets, back)


def _linear(x: Tensor, offsets: Tensor, weight: Tensor) -> Tensor:
    """x [R, K], weight [E, N, K], of any strides."""
    return _ops.grouped_linear(x, offsets, [weight], [], recipe=words_for(active_recipe(), x))[0]


def _mlp(x: Tensor, offsets: Tensor, prob: Tensor | None, weights: Sequence[Tensor], text: str
         ) -> Tensor:
    return _ops.grouped_mlp(x, offsets, prob, [weights[0]], [], [weights[1]], [], None,
                            activation=text, recipe=words_for(active_recipe(), x))[0]


class _Gate:
    """Of experts whose gate comes before up: what `activation_of` measures."""

    has_gate = True

    def __init__(self, act_fn: Any) -> None:
        self.act_fn = act_fn

    def _apply_gate(self, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def _activation(experts: Any) -> str:
    return f"activation {activation_of(_gate_named(type(experts).__name__)(experts.act_fn))}"


@functools.cache
def _gate_named(name: str) -> type[_Gate]:
    """By the name of the experts' class, for errors."""
    return type(name, (_Gate,), {})


# Llama 4: a token's rows are scaled before the experts. transformers gives every token to every
# expert, scaled by zero where the router has not chosen it.


def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    chosen = torch.topk(logits, self.top_k, dim=1).indices  # as the router has it
    routed = _routed(x, self.num_experts, chosen, scores.gather(1, chosen))
    rows = routed.rows * routed.prob.to(routed.rows.dtype).unsqueeze(1)
    y = self.experts(rows, routed.offsets)  # a call, since trainers hang hooks there
    return self.shared_expert(x) + _ops.combine(y, *routed.back), logits


def _llama4_experts(self: Any, hidden_states: Tensor, offsets: Tensor | None = None) -> Tensor:
    """offsets: None: every expert has as many rows, as its own forward takes them."""
    if offsets is None:
        each = hidden_states.shape[0] // self.num_experts
        offsets = torch.arange(self.num_experts + 1, dtype=torch.int32,
                               device=hidden_states.device) * each
    weights = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
    return _mlp(hidden_states, offsets, None, weights, activation_of(_Gate(self.act_fn)))


# LongCat-Flash: choices of num_routed_experts and more leave the token as it is.


def _longcat(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
             ) -> Tensor:
    count = self.num_routed_experts
    unchanged = torch.where(top_k_index >= count, top_k_weights, 0).sum(-1, keepdim=True)
    y = (hidden_states * unchanged).to(hidden_states.dtype)
    if count == 0:
        return y
    weights = [self.gate_up_proj[:count]], [], [self.down_proj], []
    routed: Tensor = _ops.routed_experts(
        hidden_states, top_k_index, top_k_weights.float(), count, *weights,
        activation=activation_of(_Gate(self.act_fn)),
        recipe=words_for(active_recipe(), hidden_states))[0]
    return y + routed.to(y.dtype)


# DBRX: gate w1, up v1 and down w2 are [E F, H] each.


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    own = self.mlp
    routed = _routed(hidden_states.reshape(-1, self.hidden_size), self.num_experts, top_k_index,
                     top_k_weights)
    w1, v1, w2 = (w.view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
                  for w in (own.w1, own.v1, own.w2))
    gate, up = (_linear(routed.rows, routed.offsets, w) for w in (w1, v1))
    y = _linear(own.activation_fn(gate) * up, routed.offsets, w2.transpose(1, 2))
    out = _ops.combine(y, *routed.back, top_k_weights.float())
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


# JetMoE and Aria: a linear layer for each expert, on rows that are in order.


def _jetmoe(self: Any, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
    offsets = offsets_of(expert_size, self.num_experts, inputs, "expert_size")
    return _linear(inputs, offsets, self.weight)


def _aria(self: Any, input: Tensor, tokens_per_expert: Tensor) -> Tensor:
    offsets = offsets_of(tokens_per_expert, self.groups, input, "tokens_per_expert")
    return _linear(input, offsets, self.weight.transpose(1, 2))


def _linears(module: Any) -> str:
    return "linear layers"


PORTS = (
    Port("llama4", "Llama4TextMoe", _llama4, None),
    Port("llama4", "Llama4TextExperts", _llama4_experts, _activation),
    Port("dbrx", "DbrxExperts", _dbrx, _linears),
    Port("jetmoe", "JetMoeParallelExperts", _jetmoe, _linears),
    Port("longcat_flash", "LongcatFlashExperts", _longcat, _activation),
    Port("aria", "AriaGroupedExpertsGemm", _aria, _linears),
)
