"""Counts of choices of all ranks, on the host, for the route "collective" of `ExpertParallel`."""

import torch
from torch import Tensor

from .operations import RoutingOffsets, offsets_of_routing


def on_device(device: torch.device, numbers: Tensor) -> Tensor:
    """The host's numbers there, without a wait for a GPU."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


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
