"""Tokens that a layer sends to the ranks of their experts as codes, made once by their owner."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .counts import offsets_of_all_rows
from .dispatched import DispatchedRows
from .dtypes import kind_of
from .expert_parallel import ExpertParallel
from .grouped_mlp import GroupedMLP, RowCodes, require_together
from .operations import quantize
from .windows import CanPush


class SentRows(NamedTuple):
    """What a dispatch gives a layer: by codes their rows beside the numbers that stand for them."""

    dispatched: DispatchedRows
    codes: RowCodes | None


def format_of(ep: ExpertParallel | None) -> str | None:
    """The format that it moves tokens in; None where it moves numbers."""
    return None if ep is None or ep._window is None else ep._window.options.x


@torch.compiler.assume_constant_result
def _reads(recipe: str, format: str) -> bool:
    return _reads_of_library(recipe, format)


@functools.lru_cache(maxsize=256)
def _reads_of_library(recipe: str, format: str) -> bool:
    reads: bool = torch.ops.cadre._reads_codes_of(recipe, format)
    return reads


def require_readers(ep: ExpertParallel, experts: GroupedMLP, x: Tensor) -> None:
    """Errors: TypeError and ValueError where `ep` moves codes, unless the experts read them."""
    if (format := format_of(ep)) is None:
        return
    if not isinstance(experts, GroupedMLP):
        raise TypeError(f"experts is {kind_of(experts)}, must be a GroupedMLP; ep moves codes of "
                        f"{format}")
    require_together(format, experts.fuse_wgrad_accumulation, experts.delay_wgrad_compute)
    recipe = experts._words_for(x)
    if not recipe or not _reads(recipe, format):
        raise ValueError(f"recipe is {recipe or None!r}, must be one whose fprop reads x in "
                         f"{format}; ep moves codes of that")


def sent(ep: ExpertParallel, experts: GroupedMLP, x: Tensor, routing: tuple[Tensor, Tensor],
         can_push: CanPush) -> SentRows:
    """The rows of the tokens x [T, H], in codes where `ep` moves these. routing: the choices and
    probabilities [T, top_k]. Differentiable in x and the probabilities.

    Errors: as of dispatch.
    """
    read = not isinstance(experts, GroupedMLP) or experts._is_read()
    if (format := format_of(ep)) is None or (own := ep._window) is None:
        return SentRows(ep._dispatch_within(x, *routing, can_push, read), None)
    codes = quantize(x.detach(), offsets_of_all_rows(x), format)
    # dw1 alone reads numbers, and whoever else is there.
    decode = read or torch.is_grad_enabled() and experts.w1.requires_grad
    name = ep._name_within(own, can_push, read)
    rows, row_prob, routed, where, numbers = own.dispatch_codes(name, codes, *routing, x, decode)
    handle = ep._handle(name, x, routing[0], numbers, routed, where)
    return SentRows(DispatchedRows(numbers, row_prob, where.offsets, handle),
                    RowCodes.of(rows.codes, rows.scales, numbers))
