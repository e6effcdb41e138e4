"""What a dispatch of `ExpertParallel` is asked, and what it gives."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .blocks import BlockExchange
from .collective import Exchange, Moved, Way, nan_rows
from .dtypes import kind_of, require_factor, require_rows
from .fakes import require_one_device
from .operations import Quantized, RoutingOffsets, offsets_of_routing
from .windows import ExchangeMap

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """What all ranks ask alike of a `dispatch`, in integers."""

    columns: int  # H
    dtype: int  # of x, by its place in _DTYPES
    prob: int  # whether it is given
    dx: int  # whether x, and prob, wants a gradient
    dprob: int

    @classmethod
    def of(cls, x: Tensor, experts: Tensor, prob: Tensor | None, top_k: int) -> "Call":
        """Errors: for what does not fit on this rank."""
        require_rows("x", x)
        if x.dim() != 2:
            raise ValueError(f"x has shape {list(x.shape)}, must be [T, H]")
        if x.is_meta:
            raise ValueError("x is on meta, must be where the ranks' rows can travel")
        require_choices(x, experts, prob, top_k)
        grads = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, prob)]
        return cls(x.shape[1], _DTYPES.index(x.dtype), prob is not None, *grads)

    def __str__(self) -> str:
        words = [name for name in ("prob", "dx", "dprob") if getattr(self, name)]
        return " ".join([f"x[T, {self.columns}]", str(_DTYPES[self.dtype]), *words])


def require_choices(x: Tensor, experts: Tensor, prob: Tensor | None, top_k: int) -> None:
    """Errors: TypeError and ValueError for choices that do not fit the rows of x."""
    if not isinstance(experts, Tensor):
        raise TypeError(f"experts is {kind_of(experts)}, must be a tensor")
    require_factor("prob", prob)
    for name, given in (("experts", experts), ("prob", prob)):
        if given is not None and given.shape != (x.shape[0], top_k):
            raise ValueError(f"{name} has shape {list(given.shape)}, must be "
                             f"{[x.shape[0], top_k]}, top_k of each row of x")
    if prob is not None and prob.dtype != torch.float32:
        raise TypeError(f"prob is {prob.dtype}, must be torch.float32")
    for name, given in (("x", x), ("experts", experts), ("prob", prob)):
        if isinstance(given, DTensor):
            raise TypeError(f"{name} is {kind_of(given)}, must be a plain tensor, of this rank's "
                            "tokens alone")
        if given is not None and given.layout != torch.strided:
            raise ValueError(f"{name} has layout {given.layout}, must be {torch.strided}")
    require_one_device({"x": x, "experts": experts, "prob": prob})


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """What happened in a `dispatch`, for the caller and for `collect`. What not every caller wants
    is computed when it is asked for, of the choices as they are then."""

    choices: Tensor  # [T, top_k], as they were given
    experts: int  # P * E
    routed: Tensor  # int [P]: rows for each rank, dropped ones too
    kept: int | Tensor  # how many of them each has at most
    tokens: int  # T of this rank
    rows: int = 0  # R of this rank
    order: RoutingOffsets | None = None  # of the tokens' choices
    exchange: Exchange | BlockExchange | None = None  # None after an overflow: results are NaN
    where: ExchangeMap | None = None  # of the route window
    window: str = ""  # likewise: the name of the exchange
    counted: Tensor | None = None  # tokens_per_expert, where the dispatch has counted them

    @property
    def dropped(self) -> Tensor:
        """int64 [P]: choices beyond the capacity of each rank; on the host where it reads counts.
        """
        return (self.routed.long() - self.kept).clamp(min=0)

    @property
    def tokens_per_expert(self) -> Tensor:
        """int32 [P * E]: choices of this rank's tokens, dropped ones too."""
        if self.counted is not None:
            return self.counted
        return offsets_of_routing(self.choices, self.experts, self.choices.numel()).offsets.diff()


def require_handle(handle: Any, *, has_window: bool) -> None:
    """Errors: TypeError for what is no handle; ValueError for that of a dispatch by a window where
    there is none."""
    if not isinstance(handle, DispatchHandle):
        raise TypeError(f"handle is {kind_of(handle)}, must be the handle that dispatch gave")
    if handle.where is not None and not has_window:
        raise ValueError("handle is of a dispatch by the route 'window', must be of one by the "
                         "ExpertParallel that collects")


class DispatchedRows(NamedTuple):
    """What `ExpertParallel.dispatch` gives."""

    rows: Tensor  # [R, H] in the order of this rank's experts
    row_prob: Tensor  # fp32 [R], [0] without prob
    offsets: Tensor  # int32 [E + 1]
    handle: DispatchHandle


class DispatchedCodes(NamedTuple):
    """What `ExpertParallel.dispatch_codes` gives."""

    rows: Quantized  # codes [R, H] and scales [R, H / block] in the order of this rank's experts
    row_prob: Tensor  # fp32 [R], [0] without prob
    offsets: Tensor  # int32 [E + 1]
    handle: DispatchHandle


def nan_dispatched(x: Tensor, prob: Tensor | None, experts: int, handle: DispatchHandle
                   ) -> DispatchedRows:
    """A row for each expert, so that the gradient of every weight is NaN; none is moved."""
    there = nan_rows(experts)
    rows, = Moved.apply((Way(there, nan_rows(x.shape[0])),), x)
    row_prob = x.new_empty(0, dtype=torch.float32)
    if prob is not None:
        row_prob, = Moved.apply((Way(there, nan_rows(prob.numel())),), prob.reshape(-1))
    offsets = torch.arange(experts + 1, dtype=torch.int32, device=x.device)
    return DispatchedRows(rows, row_prob, offsets, replace(handle, rows=experts))
