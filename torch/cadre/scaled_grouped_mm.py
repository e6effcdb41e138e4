"""scaled_grouped_mm with the arguments of torch._scaled_grouped_mm: rows of 8-bit codes times the
codes of every group's matrix, with a scale a row and a column."""

import torch
from torch import Tensor

from .counts import ends_of, require_offs
from .dtypes import kind_of, require_bools, require_float
from .operations import AnyOffsets, names_types

_ops = torch.ops.cadre


@names_types
def scaled_grouped_mm(mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor,
                      offs: AnyOffsets, bias: Tensor | None = None, *,
                      out_dtype: torch.dtype | None = torch.bfloat16,
                      use_fast_accum: bool = False) -> Tensor:
    """Products of the 8-bit rows of E groups with the matrix of each, [M, N]. Not differentiable;
    reads no device memory. For row r of group e

        y[r, n] = scale_a[r] * scale_b[e, n] * sum_k mat_a[r, k] * mat_b[e, k, n] + bias[e, n]

    mat_a: float8_e4m3fn or float8_e5m2 [M, K], row-major. mat_b: float8_e4m3fn [E, K, N], each of
    its matrices column-major, so w.transpose(-2, -1) of a contiguous w [E, N, K]. scale_a: fp32 [M]
    or [M, 1]. scale_b: fp32 [E, N] or [E, 1, N].
    offs: int32 [E] on the device, where the rows of each group end, without a leading zero, or
    `cadre.Offsets`. Rows at or beyond offs[-1] are no group's: the result is zero there. Ends that
    decrease or exceed M are a ValueError on the host; nobody looks at those on a GPU, or in a graph
    that is being compiled, and they are clamped.
    bias: fp32, bf16 or fp16 [E, N], added before the one rounding.
    out_dtype: bf16, also for None; fp32 or fp16.
    use_fast_accum: must be False. Hopper adds up sums of 128 codes in fp32, CPUs add up all in it.

    N, K and E are 1 or more. CPUs take all of these, and all results. GPUs of Hopper take K in
    multiples of 16, N in multiples of 8, addresses and strides in multiples of 16 bytes, and
    out_dtype bf16 or fp32.

    Raises TypeError for dtypes, ValueError for shapes and strides, NotImplementedError for operands
    that want a gradient, and for what no implementation takes on the device."""
    require_bools(use_fast_accum=use_fast_accum)
    if use_fast_accum:
        raise ValueError("scaled_grouped_mm: use_fast_accum is True, must be False; sums of 128 "
                         "codes are added up in fp32, which is the only way here")
    if isinstance(out_dtype, torch.dtype):
        require_float("out_dtype", out_dtype)
    offs = ends_of("scaled_grouped_mm", offs)
    _check({"mat_a": mat_a, "mat_b": mat_b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias})
    if mat_a.dim() != 2 or mat_b.dim() != 3:
        raise ValueError(f"scaled_grouped_mm: mat_a has {mat_a.dim()} and mat_b {mat_b.dim()} "
                         "dimensions, must have 2 and 3")
    rows, (groups, _, columns) = mat_a.shape[0], mat_b.shape
    require_offs("scaled_grouped_mm", offs, groups, rows, ("mat_a", mat_a))
    scales = (_lines(scale_a, "scale_a", (rows,), (rows, 1)),
              _lines(scale_b, "scale_b", (groups, columns), (groups, 1, columns)))
    return _ops.scaled_grouped_mm(mat_a, mat_b, *scales, _ops.offsets(offs, "ends", rows)[0],
                                  bias=bias, out_dtype=out_dtype or torch.bfloat16)


def _check(given: dict[str, Tensor | None]) -> None:
    device = None
    for name, t in given.items():
        if t is None and name == "bias":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"scaled_grouped_mm: {name} is {kind_of(t)}, must be a tensor")
        device = device or t.device
        if t.device != device:
            raise ValueError(f"scaled_grouped_mm: {name} is on {t.device}, must be on {device}, "
                             "where mat_a is")
        if t.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"scaled_grouped_mm: {name} requires a gradient, must not; "
                                      "it has none")


def _lines(scale: Tensor, name: str, shape: tuple[int, ...], kept: tuple[int, ...]) -> Tensor:
    """A scale a line, of either shape."""
    if tuple(scale.shape) not in (shape, kept):
        raise ValueError(f"scaled_grouped_mm: {name} has shape {list(scale.shape)}, must be "
                         f"{list(shape)} or {list(kept)}")
    return scale.reshape(shape)
