"""An operation of a row that rounds as quantising does (`cadre.ops`)."""

from typing import Any

import torch
from torch import Tensor

from .counts import offsets_of_all_rows
from .dtypes import require_bools, require_rows
from .operation import Operation
from .operations import dequantize, quantize
from .recipe import active_recipe, is_plain, words_for

# The formats of x in fprop and of dy in dgrad, of recipes where they are not the recipe's name.
_FORMATS = {"fp8_tensor": ("fp8_tensor", "fp8_tensor:e5m2"), "nvfp4": ("nvfp4", "nvfp4:sr"),
            "mxfp4": ("bf16", "bf16")}
_MOST = torch.iinfo(torch.int64).max


class Quantize(Operation):
    """Its input [..., columns], rounded to values of codes, in the format that the recipe has for x
    in fprop. The result is a plain tensor. Outside of `cadre.autocast` it is the input.

    forward: False: the input is not rounded. backward: the gradient is rounded, in the format that
    the recipe has for dy in dgrad. All rows are one expert's, the tail too.

    Errors: TypeError for what is no bool.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        require_bools(forward=forward, backward=backward)
        self.rounds_input = forward
        self.rounds_gradient = backward

    def forward(self, input: Tensor) -> Tensor:
        """Errors: TypeError and ValueError for what are no rows; NotImplementedError, with the
        reasons, for a format that the device does not have."""
        require_rows("input", input)
        if input.dim() < 1:
            raise ValueError("input has shape [], must be [..., columns]")
        x, dy = _formats(words_for(active_recipe(), input))
        x = x if self.rounds_input and not is_plain(x, input) else ""
        dy = dy if self.rounds_gradient and not is_plain(dy, input) else ""
        return _Rounded.apply(input, x, dy) if x or dy else input

    def extra_repr(self) -> str:
        return f"forward={self.rounds_input}, backward={self.rounds_gradient}"


def _formats(recipe: str) -> tuple[str, str]:
    """Of x in fprop and of dy in dgrad, by the words of a recipe; "" without one."""
    passes = {which: words for which, _, words in (
        part.rpartition("=") for part in recipe.split(",") if part != "pinned")}
    named = passes.get("", "")
    x, x_is_pair, _ = passes.get("fprop", named).partition("*")
    dy, dy_is_pair, _ = passes.get("dgrad", named).partition("*")
    return (x if x_is_pair else _FORMATS.get(x, (x, x))[0],
            dy if dy_is_pair else _FORMATS.get(dy, (dy, dy))[1])


def _rounded(x: Tensor, format: str) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    rng = None
    if "sr" in format.partition(":")[2].split("+"):
        rng = torch.randint(_MOST, (2,), device=x.device)
    all_rows = offsets_of_all_rows(rows)
    codes = quantize(rows, all_rows, format, rng=rng)
    return dequantize(codes, all_rows, format, shape=rows.shape, dtype=x.dtype).view(x.shape)


class _Rounded(torch.autograd.Function):
    """x in format x_format, "" for none, and its gradient in dy_format. Rounding has the slope one,
    in every derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, x_format: str, dy_format: str) -> Tensor:
        ctx.dy_format = dy_format
        return _rounded(x, x_format) if x_format else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (_Rounded.apply(dy, ctx.dy_format, "") if ctx.dy_format else dy), None, None
