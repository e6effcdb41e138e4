"""How many rows each expert has: what callers give, and the offsets that the operators read."""

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from .dtypes import kind_of
from .host_numbers import may_look, require_begin, require_ends, require_offsets, short
from .operations import Offsets, RoutingOffsets

_offsets = torch.ops.cadre._offsets.default  # of the overloads, without a search


# Offsets that are ready serve every layer on the same rows.
Counts = Sequence[int] | Tensor | Offsets | RoutingOffsets


def offsets_of(counts: Counts, experts: int, x: Tensor, name: str = "m_splits") -> Tensor:
    """Offsets int32 [E + 1] on the device of `x` [R, ...], for `counts`, the rows of each of E
    experts. Numbers on the device never reach the host, numbers on the host are copied to the
    device without waiting.

    counts: E ints; a tensor [E] of any integer type, on the host or beside `x`; or what
        `cadre.offsets` or `cadre.offsets_of_routing` made.
    name: what the caller calls them, for errors.
    Numbers on the host are looked at. Nobody looks at those on a GPU, or in a graph that is being
    compiled: where they add up to more than R, the last experts have fewer rows or none.

    Errors: ValueError for another length, another device, numbers on the host that are negative or
    exceed R together, and host numbers in the capture of a CUDA graph; TypeError for what is no
    integer.
    """
    ready, counted = counts_or_offsets(counts, experts, x, name)
    return _offsets(ready, x.shape[0]) if counted else ready


def counts_or_offsets(counts: Counts, experts: int, x: Tensor, name: str = "m_splits"
              ) -> tuple[Tensor, bool]:
    """Of `offsets_of` all but its launch: counts on the device of `x` and True, or offsets and
    False."""
    if isinstance(counts, (Offsets, RoutingOffsets)):
        return _ready(counts, experts, x, name), False
    looked = not isinstance(counts, Tensor)
    if looked:
        counts = _from_ints(counts, experts, x.shape[0], name)
    if counts.shape != (experts,):
        raise ValueError(f"{name} has shape {list(counts.shape)}, must be [{experts}]: the rows "
                         "of each expert; give offsets as cadre.Offsets(offsets)")
    if counts.dtype not in (torch.int32, torch.int64):
        if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
            raise TypeError(f"{name} is {counts.dtype}, must be of an integer type")
        counts = counts.to(torch.int64)
    if not looked and may_look(counts):
        _require_counts(counts.tolist(), x.shape[0], name)
    if counts.device != x.device:
        counts = _beside(counts, x, name)
    return counts, True


def same_counts(one: Any, other: Any) -> bool:
    """Whether both are one object, or lists or tuples of equal ints, of which a compiler does not
    know whether they are one."""
    if not torch.compiler.is_compiling() and one is other:
        return True
    if not (_is_ints(one) and _is_ints(other)):
        return one is other
    return len(one) == len(other) and all(a == b for a, b in zip(one, other))


def _is_ints(counts: Any) -> bool:
    return isinstance(counts, (list, tuple)) and all(isinstance(each, int) for each in counts)


def ends_of(function: str, offs: Any) -> Any:
    """Where groups end, of offsets; whatever else is given as it is. Errors: ValueError, of that
    function, where offsets on the host do not begin at 0; TypeError for what is no tensor."""
    if not isinstance(offs, (Offsets, RoutingOffsets)):
        return offs
    offsets = offs.offsets
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{function}: offs.offsets is {kind_of(offsets)}, must be a tensor of "
                        "torch.int32")
    if may_look(offsets) and offsets.dim() == 1 and len(offsets):
        require_begin(offsets[:1].tolist(), f"{function}: offs.offsets")
    return offsets[1:]


def require_offs(function: str, offs: Any, groups: int | None, rows: int,
                 beside: tuple[str, Tensor]) -> None:
    """Errors: TypeError or ValueError, of that function, unless `offs` are the ends of so many
    groups, or of any where that is None, as torch has them: int32 [E] on the device of `beside`, an
    argument and its name."""
    if not isinstance(offs, Tensor) or offs.dtype != torch.int32:
        found = offs.dtype if isinstance(offs, Tensor) else kind_of(offs)
        raise TypeError(f"{function}: offs is {found}, must be a tensor of torch.int32")
    if offs.dim() != 1:
        raise ValueError(f"{function}: offs has {offs.dim()} dimensions, must have 1")
    if groups is not None and groups != offs.shape[0]:
        raise ValueError(f"{function}: offs has {offs.shape[0]} entries, must have {groups}, one a "
                         "group")
    name, tensor = beside
    if offs.device != tensor.device:
        raise ValueError(f"{function}: offs is on {offs.device}, must be on {tensor.device}, where "
                         f"{name} is")
    if may_look(offs):
        require_ends(offs.tolist(), rows, f"{function}: offs")


def offsets_of_all_rows(x: Tensor) -> Tensor:
    """Offsets int32 [2] of one expert that has all rows of `x`."""
    return torch.ops.cadre.offsets(
        torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device), "counts", x.shape[0])[0]


def _ready(given: Offsets | RoutingOffsets, experts: int, x: Tensor, name: str) -> Tensor:
    offsets = given.offsets
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name}.offsets is {kind_of(offsets)}, must be a tensor of "
                        "torch.int32")
    if tuple(offsets.shape) != (experts + 1,) or offsets.dtype != torch.int32:
        raise ValueError(f"{name}.offsets is {offsets.dtype} {list(offsets.shape)}, must be "
                         f"torch.int32 [{experts + 1}]; cadre.offsets builds them from counts")
    if offsets.device != x.device:
        raise ValueError(f"{name}.offsets is on {offsets.device}, must be on {x.device}, where the "
                         "rows are")
    require_offsets(offsets, x.shape[0], f"{name}.offsets", made_here=given.status is not None)
    return offsets


def _from_ints(given: Sequence[int], experts: int, rows: int, name: str) -> Tensor:
    if isinstance(given, (str, bytes, Mapping, Set)) or not hasattr(type(given), "__iter__"):
        raise TypeError(f"{name} is {kind_of(given)}, must be {experts} ints, a tensor "
                        f"[{experts}] of an integer type or cadre.Offsets")
    given = list(given)
    if any([isinstance(count, torch.SymInt) for count in given]):  # tolist() under torch.export
        return torch.stack([torch.full((), count, dtype=torch.int64, device="cpu")
                            for count in given])
    counts = [_integer(count, name) for count in given]
    if len(counts) == experts:  # else its shape is told
        _require_counts(counts, rows, name)
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def _integer(count: Any, name: str) -> int:
    """Of a number of any library; True and a tensor of it have an index, too, and are none."""
    if type(count) is int:
        return count
    if not (isinstance(count, bool) or isinstance(count, Tensor) and count.dtype == torch.bool):
        try:
            return operator.index(count)
        except TypeError:
            pass
    raise TypeError(f"{name} has {count!r}, {kind_of(count)}, must be ints")


def _holds(condition: Any) -> bool:
    """Whether it is known to: of what tolist() gives a compiler nothing is."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which takes sympy
    return guard_or_false(condition)


def _require_counts(counts: Sequence[int], rows: int, name: str) -> None:
    if not (any([_holds(count < 0) for count in counts]) or _holds(sum(counts) > rows)):
        return
    ends = len(counts) > 1 and counts[-1] <= rows and all(
        0 <= a <= b for a, b in zip(counts, counts[1:]))
    hint = "; of ends cadre.offsets(ends, 'ends', rows) makes offsets" if ends else ""
    raise ValueError(f"{name} is {short(counts)}, must be 0 or more each, and {rows} at most "
                     f"together; the input has so many rows{hint}")


def _beside(counts: Tensor, x: Tensor, name: str) -> Tensor:
    """Host numbers on the device of x. By pinned memory, so that nobody waits."""
    if counts.device.type != "cpu":
        raise ValueError(f"{name} is on {counts.device}, must be on {x.device} or on the host; "
                         "reading it on the host would wait for the device")
    if x.device.type != "cuda":
        return counts.to(x.device)
    if torch.compiler.is_compiling():
        copied: Tensor = _compiled_copy(counts, device=x.device, name=name)
        return copied
    return _copied(counts, device=x.device, name=name)


def _copied(counts: Tensor, *, device: torch.device, name: str) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{name} is on the host, must be a tensor on {device}; a CUDA graph "
                         "being captured would replay these very counts for ever")
    pinned = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(counts).to(device, non_blocking=True)  # the caller may write into counts


# An operator, since a graph that is compiled can ask neither for a capture nor for pinned memory.
_library = torch.library.Library("cadre", "FRAGMENT")
_library.define("_counts_beside(Tensor counts, *, Device device, str name) -> Tensor")
_library.impl("_counts_beside", _copied, "CompositeExplicitAutograd")
_compiled_copy = torch.ops.cadre._counts_beside.default


@torch.library.register_fake("cadre::_counts_beside")
def _(counts: Tensor, *, device: torch.device, name: str) -> Tensor:
    return torch.empty_like(counts, device=device)
