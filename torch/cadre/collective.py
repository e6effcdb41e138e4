"""The route "collective" of `ExpertParallel`: rows that torch.distributed moves, and counts of the
choices of all ranks on the host."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .dtypes import kind_of
from .operations import RoutingOffsets, offsets_of_routing, permute

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def process_group(group: Any) -> "ProcessGroup":
    """The process group that `group` is, or a mesh of one dimension has; None is that of all ranks.
    """
    group = dist.group.WORLD if group is None else group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"mesh has {group.ndim} dimensions, must have 1; take the one of the "
                             'experts, such as mesh["ep"]')
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {kind_of(group)}, must be a ProcessGroup with this process, or "
                        "a DeviceMesh")
    return group


class Exchange(NamedTuple):
    """Rows of this rank's tokens, in the order of all experts <-> rows of this rank's experts."""

    group: "ProcessGroup"
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    order: RoutingOffsets  # of n rows that arrive: row_of [n, 1] of each, slot_of [n] the inverse

    def to_experts(self, rows: Tensor) -> Tensor:
        offsets, row_of, slot_of, _ = self.order
        return permute(self._moved(rows, self.sent, self.received), offsets, row_of, slot_of)[0]

    def to_tokens(self, rows: Tensor) -> Tensor:
        offsets, row_of, slot_of, _ = self.order
        leaving = permute(rows, offsets, slot_of[:, None], row_of.view(-1))[0]
        return self._moved(leaving, self.received, self.sent)

    def _moved(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self.group)
        return arrived


class Moved(torch.autograd.Function):
    """`there` of each tensor, and `back` of each gradient. All tensors are one node of the graph,
    so backward exchanges in the same order on every rank."""

    @staticmethod
    def forward(ctx: Any, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor],
                *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        moved = tuple(there(t) for t in tensors)
        ctx.mark_non_differentiable(*(m for m, t in zip(moved, tensors) if not t.requires_grad))
        return moved

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(ctx.back(grad) if wanted else None
                             for grad, wanted in zip(grads, ctx.needs_input_grad[2:]))


def exchanged(exchange: Any, order: RoutingOffsets, x: Tensor, prob: Tensor | None
              ) -> tuple[Tensor, Tensor]:
    """Rows of tokens at their experts, and the probability of each, [0] without prob."""
    rows, row_prob = permute(x, order, prob=prob)
    parts = [rows if x.requires_grad else rows.detach()]
    if prob is not None:
        column = row_prob[:, None]
        parts.append(column if prob.requires_grad else column.detach())
    rows, *moved_prob = Moved.apply(exchange.to_experts, exchange.to_tokens, *parts)
    return rows, moved_prob[0].view(-1) if moved_prob else row_prob


def nan_rows(rows: int) -> Callable[[Tensor], Tensor]:
    """That many rows of NaN, like those of a tensor."""
    return lambda t: t.new_full((rows, *t.shape[1:]), math.nan)


def on_device(device: torch.device, numbers: Tensor) -> Tensor:
    """The host's numbers there, without a wait for a GPU."""
    if device.type != "cuda" or numbers.device == device:
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def kept_of(counts: Tensor, capacity: int) -> Tensor:
    """Choices [P, P, E] without those whose row would be `capacity` or more. A rank's rows stand by
    expert, then by the rank of the token."""
    ranks, _, experts = counts.shape
    by_row = counts.permute(1, 2, 0).flatten(1)
    kept = (capacity + by_row - by_row.cumsum(1)).clamp(min=0).minimum(by_row)
    return kept.view(ranks, experts, ranks).permute(2, 0, 1)


def without_late(order: RoutingOffsets, experts: Tensor, kept: Tensor) -> RoutingOffsets:
    """The order of those choices alone that are among the first kept[e] of their expert e."""
    at = experts.long().clamp(0, kept.numel() - 1)
    late = order.row_of - order.offsets[at] >= on_device(experts.device, kept)[at]
    return offsets_of_routing(experts.masked_fill(late, -1), kept.numel(), experts.numel())
