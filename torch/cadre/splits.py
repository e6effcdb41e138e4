"""How many rows each expert has: what callers give, and the offsets that the operators read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .operations import Offsets, RoutingOffsets

_offsets = torch.ops.cadre._offsets.default  # of the overloads, without a search


# Offsets that are ready serve every layer on the same rows.
Splits = Sequence[int] | Tensor | Offsets | RoutingOffsets


def offsets_of(splits: Splits, experts: int, x: Tensor) -> Tensor:
    """Offsets int32 [E + 1] on the device of `x` [R, ...], for `splits`, the rows of each of E
    experts. Numbers on the device never reach the host, numbers on the host are copied to the
    device without waiting.

    splits: E ints; a tensor [E] of any integer type, on the host or beside `x`; or what
        `cadre.offsets` or `cadre.offsets_of_routing` made.
    Where they add up to more than R, the last experts have fewer rows or none.

    Errors: ValueError for another length, another device, ints that are negative or exceed R
    together (of a tensor nobody looks), and host numbers in the capture of a CUDA graph; TypeError
    for what is no integer.
    """
    ready, counted = splits_of(splits, experts, x)
    return _offsets(ready, x.shape[0]) if counted else ready


def splits_of(splits: Splits, experts: int, x: Tensor) -> tuple[Tensor, bool]:
    """Of `offsets_of` all but its launch: counts on the device of `x` and True, or offsets and
    False."""
    if isinstance(splits, (Offsets, RoutingOffsets)):
        return _ready(splits.offsets, experts, x), False
    if not isinstance(splits, Tensor):
        splits = _from_ints(splits, x)
    if splits.shape != (experts,):
        raise ValueError(f"m_splits has shape {list(splits.shape)}, must be [{experts}]: the rows "
                         "of each expert; give offsets as cadre.Offsets(offsets)")
    if splits.dtype not in (torch.int32, torch.int64):
        if splits.is_floating_point() or splits.is_complex() or splits.dtype == torch.bool:
            raise TypeError(f"m_splits is {splits.dtype}, must be of an integer type")
        splits = splits.to(torch.int64)
    if splits.device != x.device:
        splits = _beside(splits, x)
    return splits, True


def offsets_of_all_rows(x: Tensor) -> Tensor:
    """Offsets int32 [2] of one expert that has all rows of `x`."""
    return torch.ops.cadre.offsets(
        torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device), "counts", x.shape[0])[0]


def _ready(offsets: Tensor, experts: int, x: Tensor) -> Tensor:
    if tuple(offsets.shape) != (experts + 1,) or offsets.dtype != torch.int32:
        raise ValueError(f"offsets is {offsets.dtype} {list(offsets.shape)}, must be torch.int32 "
                         f"[{experts + 1}]; cadre.offsets builds them from counts")
    if offsets.device != x.device:
        raise ValueError(f"offsets is on {offsets.device}, must be on {x.device}, where the rows "
                         "are")
    return offsets


def _from_ints(splits: Sequence[int], x: Tensor) -> Tensor:
    counts = list(splits)
    if any(count < 0 for count in counts) or sum(counts) > x.shape[0]:
        raise ValueError(f"m_splits is {counts}, must be 0 or more each, and {x.shape[0]} at most "
                         "together; the input has so many rows")
    return torch.tensor(counts, dtype=torch.int64)


def _beside(splits: Tensor, x: Tensor) -> Tensor:
    """Host numbers on the device of x. Pinned memory, so that nobody waits."""
    if splits.device.type != "cpu":
        raise ValueError(f"m_splits is on {splits.device}, must be on {x.device} or on the host; "
                         "reading it on the host would wait for the device")
    if x.device.type != "cuda":
        return splits.to(x.device)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(f"m_splits is on the host, must be a tensor on {x.device}; a CUDA graph "
                         "being captured would replay these very counts for ever")
    return splits.pin_memory().to(x.device, non_blocking=True)
