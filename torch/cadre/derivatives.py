"""Gradients that have no derivatives of their own."""

from typing import Any

import torch
from torch import Tensor


class _Refusal(torch.autograd.Function):
    """Gradients as they are. Whoever differentiates them, by a gradient or a tensor that they were
    made of, meets an error."""

    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.what = what
        return tuple(grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(f"{ctx.what} has no second derivatives")


def without_second_derivatives(what: str, made_of: tuple[Tensor | None, ...],
                               grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """What backward returns, which was computed without autograd, of the tensors `made_of`.

    Errors: RuntimeError in a backward of these, if autograd records.
    """
    if not torch.is_grad_enabled():
        return grads
    there = [grad for grad in grads if grad is not None]
    refused = iter(_Refusal.apply(what, len(there), *there,
                                  *(t for t in made_of if t is not None)) if there else ())
    return tuple(None if grad is None else next(refused) for grad in grads)
