"""grouped_mm with the arguments of torch.nn.functional.grouped_mm, and what that lacks: a bias,
fp32 results, a tensor to write or to add to, any shapes and strides."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .counts import ends_of, require_offs
from .dtypes import kind_of, require_bools, require_float
from .operations import AnyOffsets

_ops = torch.ops.cadre


def grouped_mm(a: Tensor, b: Tensor, offs: AnyOffsets | None = None, bias: Tensor | None = None,
               out_dtype: torch.dtype | None = None, out: Tensor | None = None,
               accumulate: bool = False) -> Tensor:
    """Matrix products of E groups. Differentiable in a, b and bias; reads no device memory.

    ==========  =========  ==========  =========================================  ========
    a           b          result      of group e                                 bias
    ==========  =========  ==========  =========================================  ========
    [R, K]      [E, K, N]  [R, N]      a[rows of e] @ b[e]                        [E, N]
    [E, M, K]   [K, R]     [M, R]      a[e] @ b[:, rows of e]                     [E, M]
    [M, R]      [R, N]     [E, M, N]   a[:, rows of e] @ b[rows of e]             [E, N]
    [E, M, K]   [E, K, N]  [E, M, N]   a[e] @ b[e]                                [E, N]
    ==========  =========  ==========  =========================================  ========

    offs: int32 [E] on the device, where the rows of each group end, without a leading zero, or
    `cadre.Offsets`; None in the last form. Rows at or beyond offs[-1] are no group's: a new result
    is zero there, `out` keeps what it held. Ends that decrease or exceed R are a ValueError on the
    host; nobody looks at those on a GPU, or in a graph that is being compiled, and they are
    clamped.
    a, b: fp32, bf16 or fp16, of one dtype, any strides: no copy where one of the last two
    dimensions has stride 1. Sums run in fp32.
    bias: fp32, bf16 or fp16, added to every row of a group in fp32, before the one rounding.
    out_dtype: fp32, bf16 or fp16, by default that of a. fp32 results have gradients too.
    out: written and returned; strides with a 1 in one of the last two dimensions, not
    differentiable. accumulate: adds to what `out` holds.
    The result of the second form is the transpose of a contiguous [R, M].

    Raises TypeError for dtypes, ValueError for shapes, a missing or surplus argument, and `out`
    where a gradient is wanted."""
    offs = ends_of("grouped_mm", offs)
    _check_tensors(a, {"b": b, "bias": bias, "out": out})
    require_bools(accumulate=accumulate)
    groups = _check(a, b, offs, bias, out_dtype)
    if out is not None:
        require_float("grouped_mm: out", out.dtype)
        _check_out(a, b, bias, out, out_dtype, groups)
        if not groups:
            return out
        if all(_widths(a, b)):
            _into(a, b, offs, bias, out, accumulate)
        elif not accumulate and out.numel():  # sums of no terms
            _clear(out, offs, a.dim() == 3)
        return out
    if accumulate:
        raise ValueError("grouped_mm: out is None, must be given; accumulate=True adds to it")
    with _without_autocast(a.device.type):
        made = _empty if groups == 0 else _new if all(_widths(a, b)) else _narrow
        return made(a, b, offs, bias, out_dtype or a.dtype)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """torch's own grouped_mm is none of the operations that autocast casts for."""
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _new(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, dtype: torch.dtype
         ) -> Tensor:
    """The four forms."""
    if a.dim() == 2 and b.dim() == 3:
        return _product(a, b.transpose(1, 2), _offsets(offs, a.shape[0]), bias, dtype)
    if a.dim() == 3 and b.dim() == 2:
        return _product(b.t(), a, _offsets(offs, b.shape[1]), bias, dtype).t()
    if a.dim() == 2:
        if bias is not None:
            return _stacked_sum(a, b, offs, bias).to(dtype)
        return _ops.grouped_gemm(a.t(), [b], _offsets(offs, b.shape[0]), "wgrad", out_dtype=dtype)
    rows, offsets = _stacked(a)
    return _product(rows, b.transpose(1, 2), offsets, bias, dtype).view(*a.shape[:2], b.shape[2])


def _empty(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, dtype: torch.dtype
           ) -> Tensor:
    """The four forms without groups: all rows are tail, and gradients are zero."""
    if a.dim() == b.dim():
        y = torch.bmm(a, b) if a.dim() == 3 else (a[:, :0] @ b[:0]).unsqueeze(0)[:0]
    elif a.dim() == 2:
        y = torch.cat([a[:0] @ b.sum(0), a.new_zeros(a.shape[0], b.shape[2])])
    else:
        y = torch.cat([b.t()[:0] @ a.sum(0).t(), b.new_zeros(b.shape[1], a.shape[1])]).t()
    return (y if bias is None else y + bias.sum()).to(dtype)


def _widths(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The sizes that are neither groups nor rows of groups."""
    if a.dim() == b.dim():
        return (a.shape[-2], b.shape[-1]) + ((a.shape[2],) if a.dim() == 3 else ())
    stacked = a if a.dim() == 3 else b
    return tuple(stacked.shape[1:])


def _narrow(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, dtype: torch.dtype
            ) -> Tensor:
    """The four forms where a width is 0: sums of no terms, or nothing."""
    if a.dim() == b.dim():
        y = torch.bmm(a, b) if a.dim() == 3 else (a @ b).expand(offs.shape[0], -1, -1)
    else:
        y = a @ b.sum(0) if a.dim() == 2 else a.sum(0) @ b
    return (y if bias is None else y + bias.sum()).to(dtype)


def _clear(out: Tensor, offs: Tensor | None, by_columns: bool) -> None:
    """All but the tail."""
    if offs is None:
        out.zero_()
        return
    rows = torch.arange(out.shape[1 if by_columns else 0], device=out.device) < offs[-1]
    out.masked_fill_(rows if by_columns else rows.unsqueeze(1), 0)


def _into(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, out: Tensor,
          accumulate: bool) -> None:
    """The four forms, into `out`."""
    if a.dim() == 2 and b.dim() == 3:
        _product_into(a, b.transpose(1, 2), _offsets(offs, a.shape[0]), bias, (out, accumulate))
    elif a.dim() == 3 and b.dim() == 2:
        _product_into(b.t(), a, _offsets(offs, b.shape[1]), bias, (out.t(), accumulate))
    elif a.dim() == 3:
        rows, offsets = _stacked(a)
        flat = out.reshape(rows.shape[0], b.shape[2])
        _product_into(rows, b.transpose(1, 2), offsets, bias, (flat, accumulate))
        is_view = out.stride(0) == out.shape[1] * out.stride(1) or 1 in out.shape[:2]
        if not is_view:  # a copy, for strides that no view has
            out.copy_(flat.view(out.shape))
    elif bias is not None:
        y = _stacked_sum(a, b, offs, bias)
        out.copy_(y + out if accumulate else y)
    else:  # rows of one group may lie between those of others
        packed = out.stride(0) >= out.shape[1] * out.shape[2]
        _ops.grouped_gemm.out(a.t(), [b], _offsets(offs, b.shape[0]), "wgrad",
                              accumulate="yes" if accumulate else "no",
                              out=[out] if packed else list(out.unbind()))


def _stacked_sum(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor) -> Tensor:
    """The third form with a bias, in fp32; wgrad has none of its own."""
    y = _ops.grouped_gemm(a.t(), [b], _offsets(offs, b.shape[0]), "wgrad", out_dtype=torch.float32)
    return y + bias.float().unsqueeze(1)


def _product(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, dtype: torch.dtype
             ) -> Tensor:
    return _ops.grouped_gemm(x, [w], offsets, "fprop", bias=bias, out_dtype=dtype)


def _product_into(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None,
                  target: tuple[Tensor, bool]) -> None:
    out, accumulate = target
    ones = torch.ones(w.shape[0], dtype=torch.float32, device=x.device) if accumulate else None
    _ops.grouped_gemm.out(x, [w], offsets, "fprop", bias=bias, beta=ones,
                          c=out if accumulate else None, out=[out])


def _offsets(offs: Tensor, rows: int) -> Tensor:
    return _ops.offsets(offs, "ends", rows)[0]


def _stacked(a: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices of a 3D tensor below each other, and the offsets of equal groups."""
    groups, rows, width = a.shape
    offsets = torch.arange(groups + 1, dtype=torch.int32, device=a.device) * rows
    return a.reshape(groups * rows, width), offsets


def _check_tensors(a: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, t in {"a": a, **others}.items():
        if not isinstance(t, Tensor) and (t is not None or name in "ab"):
            raise TypeError(f"grouped_mm: {name} is {kind_of(t)}, must be a tensor")
        if t is not None and t.device != a.device:
            raise ValueError(f"grouped_mm: {name} is on {t.device}, must be on {a.device}, where a "
                             "is")


def _check(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None,
           out_dtype: torch.dtype | None) -> int:
    """E."""
    if a.dim() not in (2, 3) or b.dim() not in (2, 3):
        raise ValueError(f"grouped_mm: a has {a.dim()} and b {b.dim()} dimensions, must have 2 or 3"
                         " each")
    for name, dtype in (("a", a.dtype), ("out_dtype", out_dtype or a.dtype),
                        ("bias", (a if bias is None else bias).dtype)):
        require_float(f"grouped_mm: {name}", dtype)
    if b.dtype != a.dtype:
        raise TypeError(f"grouped_mm: b is {b.dtype}, must be {a.dtype}, the dtype of a")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"grouped_mm: a has {a.shape[-1]} columns, must have {b.shape[-2]}, as "
                         "many as b has rows")
    groups = _check_groups(a, b, offs)
    if bias is not None and groups and a.dim() + b.dim() > 4 and a.shape[-1] == 0:
        raise ValueError("grouped_mm: bias is given, must be None where a has no columns")
    width = a.shape[1] if a.dim() == 3 and b.dim() == 2 else b.shape[-1]
    if bias is not None and tuple(bias.shape) != (groups, width):
        raise ValueError(f"grouped_mm: bias has shape {list(bias.shape)}, must be "
                         f"{[groups, width]}")
    return groups


def _check_groups(a: Tensor, b: Tensor, offs: Tensor | None) -> int:
    """E."""
    if a.dim() == 3 and b.dim() == 3:
        if offs is not None:
            raise ValueError("grouped_mm: offs is given, must be None; three dimensions have no "
                             "ragged one")
        if a.shape[0] != b.shape[0]:
            raise ValueError(f"grouped_mm: b has {b.shape[0]} groups, must have {a.shape[0]}, as "
                             "many as a")
        return a.shape[0]
    if offs is None:
        raise ValueError(f"grouped_mm: offs is None, must be given for {a.dim()}D times "
                         f"{b.dim()}D")
    stacked = a if a.dim() == 3 else b
    rows = b.shape[1] if a.dim() == 3 else a.shape[0] if b.dim() == 3 else b.shape[0]
    require_offs("grouped_mm", offs, stacked.shape[0] if stacked.dim() == 3 else None, rows,
                 ("a", a))
    return offs.shape[0]


def _check_out(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor,
               out_dtype: torch.dtype | None, groups: int) -> None:
    learns = any(t is not None and t.requires_grad for t in (a, b, bias, out))
    if learns and torch.is_grad_enabled():
        raise ValueError("grouped_mm: out is given, must be None where a gradient is wanted; it "
                         "has none")
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"grouped_mm: out is {out.dtype}, must be {out_dtype}, as out_dtype says")
    shape = ((groups,) if a.dim() == b.dim() else ()) + (a.shape[-2], b.shape[-1])
    if tuple(out.shape) != shape:
        raise ValueError(f"grouped_mm: out has shape {list(out.shape)}, must be {list(shape)}")
    if not (out.is_contiguous() or is_compiling()) and _overlaps(out):
        raise ValueError(f"grouped_mm: out has strides {list(out.stride())}, must have a place for "
                         "each element; some would be written twice")


def _overlaps(t: Tensor) -> bool:
    """Whether a dimension's step may lead into what those of smaller steps reach."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
