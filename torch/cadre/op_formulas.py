"""Activations of a row (`cadre.ops`) that operators of torch compute, in fp32."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .dtypes import require_bools
from .op_activations import Activation, number
from .operation import Operation


class _Formula(Activation):
    """An activation without an operator of its own, which is never part of a grouped_mlp. z alone
    is kept for backward. Zeros give zeros."""

    activation: str = ""
    gated: bool = True

    def __init__(self, glu_interleave_size: int | None = None, *,
                 activation_recompute_in_mlp: bool = False,
                 cache_quantized_input: bool = False) -> None:
        Operation.__init__(self)
        require_bools(activation_recompute_in_mlp=activation_recompute_in_mlp,
                      cache_quantized_input=cache_quantized_input)
        self._layout_of(glu_interleave_size)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self.cache_quantized_input = cache_quantized_input

    def _of(self, gate: Tensor, up: Tensor) -> Tensor:
        """h of fp32 numbers; without a gate both are z."""
        raise NotImplementedError

    def _compute(self, z: Tensor, offsets: Tensor, scales: Tensor | None) -> Tensor:
        unit = 2 * (self.glu_interleave_size or 1)
        if self.gated and (z.shape[-1] == 0 or z.shape[-1] % unit):
            raise ValueError(f"z has {z.shape[-1]} columns, must have a multiple of {unit}: gate "
                             "and up of every feature")
        if torch.compiler.is_compiling():  # what is computed again is the compiler's choice
            return self._formula(z, scales, offsets).to(z.dtype)
        return _Again.apply(self._formula, z, scales, offsets)

    def _formula(self, z: Tensor, scales: Tensor | None, offsets: Tensor) -> Tensor:
        """h in fp32. The tail is zero, whatever z and scales have there."""
        owned = (torch.arange(z.shape[0], device=z.device) < offsets[-1]).unsqueeze(1)
        h = self._of(*self._halves(torch.where(owned, z.float(), 0.0)))
        return h if scales is None else h * torch.where(owned, scales.unsqueeze(1), 0.0)

    def _halves(self, z: Tensor) -> tuple[Tensor, ...]:
        if not self.gated:
            return z, z
        size = 2 * (self.glu_interleave_size or z.shape[-1] // 2)
        return tuple(part.flatten(-2) for part in z.unflatten(-1, (-1, size)).chunk(2, -1))

    def extra_repr(self) -> str:
        return ""


class _PlainFormula(_Formula):
    """One without constants."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)


class GLU(_PlainFormula):
    """sigmoid(gate) * up, in fp32 by operators of torch: it is never part of a grouped_mlp."""

    def _of(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.sigmoid(gate) * up


class SReGLU(_PlainFormula):
    """max(gate, 0) squared * up, in fp32 by operators of torch: it is never part of a
    grouped_mlp."""

    def _of(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.relu(gate).square() * up


class QGELU(_PlainFormula):
    """z * sigmoid(1.702 * z), in fp32 by operators of torch: it is never part of a grouped_mlp."""

    gated: bool = False

    def _of(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.sigmoid(1.702 * gate) * up


class SiTUGLU(_Formula):
    """beta1 * tanh(gate / beta1) * sigmoid(gate) * beta2 * tanh(up / beta2), in fp32 by operators
    of torch: it is never part of a grouped_mlp.

    Errors: ValueError for a beta that is not finite and above 0.
    """

    def __init__(self, glu_interleave_size: int | None = None, *, beta1: float = 4.0,
                 beta2: float = 25.0, activation_recompute_in_mlp: bool = False,
                 cache_quantized_input: bool = False) -> None:
        super().__init__(glu_interleave_size,
                         activation_recompute_in_mlp=activation_recompute_in_mlp,
                         cache_quantized_input=cache_quantized_input)
        self._constants: dict[str, float] = {"beta1": number("beta1", beta1),
                                             "beta2": number("beta2", beta2)}
        for name, value in self._constants.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}, must be finite and above 0")

    @property
    def beta1(self) -> float:
        return self._constants["beta1"]

    @property
    def beta2(self) -> float:
        return self._constants["beta2"]

    def _of(self, gate: Tensor, up: Tensor) -> Tensor:
        capped = self.beta1 * torch.tanh(gate / self.beta1) * torch.sigmoid(gate)
        return capped * (self.beta2 * torch.tanh(up / self.beta2))

    def extra_repr(self) -> str:
        return f"beta1={self.beta1}, beta2={self.beta2}"


class ScaledSiTUGLU(SiTUGLU):
    """`SiTUGLU` times scales."""

    scaled: bool = True


class _Again(torch.autograd.Function):
    """formula(z, scales, offsets), which backward computes again: z alone is kept. Derivatives of
    any order are those of the formula."""

    @staticmethod
    def forward(ctx: Any, formula: Callable[..., Tensor], z: Tensor, scales: Tensor | None,
                offsets: Tensor) -> Tensor:
        ctx.formula = formula
        ctx.save_for_backward(z, scales, offsets)
        return formula(z, scales, offsets).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        z, scales, offsets = ctx.saved_tensors
        inputs = (z,) if scales is None else (z, scales)

        def again(z: Tensor, scales: Tensor | None = None) -> Tensor:
            return ctx.formula(z, scales, offsets)

        grads = (_vjp if torch.compiler.is_compiling() else _gradients)(again, inputs, dh)
        return None, *grads, *[None] * (3 - len(grads))


def _vjp(formula: Callable[..., Tensor], inputs: tuple[Tensor, ...], dh: Tensor
         ) -> tuple[Tensor, ...]:
    """What a compiler can trace."""
    h, gradients_of = torch.func.vjp(formula, *inputs)
    grads: tuple[Tensor, ...] = gradients_of(dh.to(h.dtype))
    return grads


def _gradients(formula: Callable[..., Tensor], inputs: tuple[Tensor, ...], dh: Tensor
               ) -> tuple[Tensor, ...]:
    """The same by autograd, which torch.func cannot use within hooks of saved tensors, such as
    save_on_cpu."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [t.view_as(t) if further and t.requires_grad else t.detach().requires_grad_()
               for t in inputs]
        h = formula(*own)
        return torch.autograd.grad(h, own, dh.to(h.dtype), create_graph=further)
