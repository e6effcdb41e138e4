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
from .operations import RoutingOffsets, combine, offsets_of_routing, permute

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .tokens_by_host import TokensByHost
    from .tokens_once import TokensOnce


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


def moved(group: "ProcessGroup", rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class Exchange(NamedTuple):
    """Rows of this rank's tokens, in the order of all experts <-> rows of this rank's experts."""

    group: "ProcessGroup"
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    order: RoutingOffsets  # of n rows that arrive: row_of [n, 1] of each, slot_of [n] the inverse
    once: "TokensOnce | TokensByHost | None" = None  # where tokens cross once

    @classmethod
    def planned(cls, group: "ProcessGroup", counts: Tensor, device: torch.device) -> "Exchange":
        """counts: choices [P, P, E] of each rank by expert, on the host."""
        rank, (ranks, _, experts) = dist.get_rank(group), counts.shape
        arriving = counts[:, rank]
        received = arriving.sum(1).tolist()
        chosen = torch.arange(experts, device=device).repeat(ranks)
        chosen = chosen.repeat_interleave(on_device(device, arriving.flatten()),
                                          output_size=sum(received))
        order = offsets_of_routing(chosen[:, None], experts, sum(received))
        return cls(group, counts[rank].sum(1).tolist(), received, order)

    def to_experts(self, rows: Tensor) -> Tensor:
        offsets, row_of, slot_of, _ = self.order
        arrived = moved(self.group, rows, self.sent, self.received)
        return permute(arrived, offsets, row_of, slot_of)[0]

    def to_tokens(self, rows: Tensor) -> Tensor:
        offsets, row_of, slot_of, _ = self.order
        leaving = permute(rows, offsets, slot_of[:, None], row_of.view(-1))[0]
        return moved(self.group, leaving, self.received, self.sent)


class Way(NamedTuple):
    """Of a tensor there, and of its gradient back."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


class Moved(torch.autograd.Function):
    """Each tensor by its way. All are one node of the graph, so backward exchanges in the same
    order on every rank."""

    @staticmethod
    def forward(ctx: Any, ways: tuple[Way, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ways = ways
        moved = tuple(way.there(t) for way, t in zip(ways, tensors))
        ctx.mark_non_differentiable(*(m for m, t in zip(moved, tensors) if not t.requires_grad))
        return moved

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(way.back(grad) if wanted else None
                       for way, grad, wanted in zip(ctx.ways, grads, ctx.needs_input_grad[1:]))


def by_token(exchange: Any, order: RoutingOffsets) -> Way | None:
    """Tokens [T, H] to rows of their experts, and sums of these back, where tokens cross once."""
    if not isinstance(exchange, Exchange) or exchange.once is None:
        return None
    return Way(exchange.once.to_experts, lambda rows: combine(exchange.to_tokens(rows), order))


def exchanged(exchange: Any, order: RoutingOffsets, x: Tensor, prob: Tensor | None
              ) -> tuple[Tensor, Tensor]:
    """Rows of tokens at their experts, and the probability of each, [0] without prob."""
    way = Way(exchange.to_experts, exchange.to_tokens)
    if (tokens := by_token(exchange, order)) is None:
        rows, row_prob = permute(x, order, prob=prob)
    else:  # a permute of a column, for its probabilities, which refuses a tangent of x
        column = x[:, :1]
        rows = x
        row_prob = permute(column.detach() if x.requires_grad else column, order, prob=prob)[1]
    parts = [rows if x.requires_grad else rows.detach()]
    if prob is not None:
        column = row_prob[:, None]
        parts.append(column if prob.requires_grad else column.detach())
    rows, *moved_prob = Moved.apply((tokens or way, way), *parts)
    return rows, moved_prob[0].view(-1) if moved_prob else row_prob


def collected(exchange: Any, order: RoutingOffsets, y: Tensor) -> Tensor:
    """The sum of the rows of each token, [T, H]."""
    tokens = by_token(exchange, order)
    way = tokens or Way(exchange.to_experts, exchange.to_tokens)
    y, = Moved.apply((Way(way.back, way.there),), y)
    return y if tokens else combine(y, order)


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
