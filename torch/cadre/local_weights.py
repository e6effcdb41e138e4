"""Weights that are DTensors."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from .dtypes import kind_of

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def local(name: str, weight: MaybeTensor) -> MaybeTensor:
    """The tensor of this rank, of a DTensor that all ranks have whole; others as they are.

    Errors: ValueError for a shard: layers multiply with whole weights.
    """
    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    for at, placement in enumerate(weight.placements):
        if mesh.size(at) > 1 and not placement.is_replicate():
            raise ValueError(f"{name} is {placement!r} of a DTensor, must be Replicate(); call the "
                             "module that gathers it, or gather it before")
    own: MaybeTensor = weight.to_local()
    return own


def require_plain(name: str, weight: Tensor) -> None:
    """Errors: NotImplementedError for a DTensor, of a layer that writes gradients itself."""
    if isinstance(weight, DTensor):
        raise NotImplementedError(
            f"{name} is {kind_of(weight)}, must be a plain tensor with fuse_wgrad_accumulation or "
            "delay_wgrad_compute, which write gradients where autograd does not see them")


def whole(tensor: Tensor) -> Tensor:
    """A plain tensor: of a DTensor all of it, for which its ranks call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_as(own: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, which all ranks have, stored over them as `own` is."""
    if not isinstance(own, DTensor):
        return tensor
    return distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)


def draw(weight: Tensor, fill: Callable[[Tensor], Any]) -> None:
    """`fill`, which draws numbers, of a weight [N, K], or one by one of the experts of a packed one
    [E, N, K]. Of a DTensor every rank draws all of it, an expert at a time, and keeps its part, so
    that ranks with the same seed have the numbers of one process.
    """
    if weight.is_meta:
        return
    if not isinstance(weight, DTensor):
        for each in weight.unbind() if weight.dim() == 3 else [weight]:
            fill(each)
    elif weight.dim() == 3:
        _draw_packed(weight, fill)
    else:
        drawn = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        fill(drawn)
        weight.to_local().copy_(_part_of(weight, drawn, weight.placements))


def _draw_packed(weight: DTensor, fill: Callable[[Tensor], Any]) -> None:
    replicate, dims = Replicate(), [getattr(p, "dim", None) for p in weight.placements]
    by_expert = [p if dim == 0 else replicate for p, dim in zip(weight.placements, dims)]
    within = [_of_one(p) if dim else replicate for p, dim in zip(weight.placements, dims)]
    kept = _part_of(weight, torch.arange(len(weight), device=weight.device), by_expert).tolist()
    drawn = torch.empty(weight.shape[1:], dtype=weight.dtype, device=weight.device)
    for e in range(len(weight)):
        fill(drawn)
        if e in kept:
            weight.to_local()[kept.index(e)].copy_(_part_of(weight, drawn, within))


def _part_of(weight: DTensor, tensor: Tensor, placements: Any) -> Tensor:
    part: Tensor = distribute_tensor(tensor, weight.device_mesh, placements,
                                     src_data_rank=None).to_local()
    return part


def _of_one(placement: Any) -> Any:
    """For an expert's weight what splits a dimension of the packed one."""
    split = getattr(placement, "split_factor", None)  # of FSDP2 beside tensor parallel ranks
    return type(placement)(placement.dim - 1, **({} if split is None else {"split_factor": split}))
