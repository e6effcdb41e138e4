"""Experts whose rows ranks send each other again in backward, so that forward keeps none."""

from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from .derivatives import without_second_derivatives

_ops = torch.ops.cadre


class RowsAgain(NamedTuple):
    """What the rows of a dispatch are made of. Every rank sends them again where its experts'
    backward begins, whether it has rows or not, so that exchanges come in one order."""

    send: Callable[[Tensor, Tensor, Tensor], Tensor]
    x: Tensor
    experts: Tensor
    prob: Tensor

    def mlp(self, rows: Tensor, offsets: Tensor, prob: Tensor | None, weights: list[Tensor | None],
            bias2_scale: Tensor | None, options: dict[str, Any]) -> Tensor:
        """`GroupedMLP` of the rows in a recipe that reads them as they are. weights: w1, bias1, w2
        and bias2. options: words of the operator."""
        sent = self.x.detach(), self.experts, self.prob.detach()
        w1, bias1, w2, bias2 = weights
        dtype = None
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows = rows.to(dtype)
            bias1, bias2 = (None if t is None else t.to(dtype) for t in (bias1, bias2))
        y: Tensor = _Experts.apply(self.send, offsets, options, dtype, rows, prob, bias2_scale, w1,
                                   bias1, w2, bias2, *sent)
        return y


class _Experts(torch.autograd.Function):
    """Autograd keeps what was sent, and says so if it was modified in place since. dtype: of copies
    of the weights that are multiplied in their place, torch.autocast's."""

    @staticmethod
    def forward(ctx: Any, send: Any, offsets: Tensor, options: dict[str, Any],
                dtype: torch.dtype | None, rows: Tensor, prob: Tensor | None,
                bias2_scale: Tensor | None, w1: Tensor, bias1: Tensor | None, w2: Tensor,
                bias2: Tensor | None, *sent: Tensor) -> Tensor:
        of_rows, of_prob, of_scale, of_w1, of_bias1, of_w2, of_bias2 = ctx.needs_input_grad[4:11]
        ctx.send, ctx.options = send, options
        ctx.dweight_dtype = w1.dtype
        w1, w2 = (w.to(dtype or w.dtype) for w in (w1, w2))
        ctx.wants = [of_rows, of_prob, of_w1, of_w2, of_bias1 or of_bias2, of_scale]
        y, saved = _ops.grouped_mlp(rows, offsets, prob, *_lists(w1, bias1, w2, bias2), bias2_scale,
                                    wants=ctx.wants, **options)
        ctx.save_for_backward(offsets, saved, prob, bias2_scale, w1, bias1, w2, bias2, *sent)
        made: Tensor = y
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        offsets, saved, prob, bias2_scale, w1, bias1, w2, bias2, *sent = ctx.saved_tensors
        reads_rows = ctx.wants[2]
        with torch.no_grad():
            rows = ctx.send(*sent) if reads_rows else dy.new_empty(dy.shape[0], w1.shape[-1])
            dx, dprob, *lists, dscale, _ = _ops.grouped_mlp_backward(
                dy, rows, saved, offsets, prob, *_lists(w1, bias1, w2, bias2), bias2_scale,
                wants=ctx.wants, dweight_dtype=ctx.dweight_dtype, **ctx.options)
        made = dx, dprob, dscale, *(grads[0] if grads else None for grads in lists)
        grads = without_second_derivatives(
            "MoE with dispatch_again", (dy, prob, bias2_scale, w1, bias1, w2, bias2, *sent),
            tuple(grad if wanted else None for grad, wanted in
                  zip(made, ctx.needs_input_grad[4:])))
        return (None,) * 4 + grads + (None,) * 3


def _lists(*weights: Tensor | None) -> list[list[Tensor]]:
    """As the operators take them."""
    return [[] if t is None else [t] for t in weights]
