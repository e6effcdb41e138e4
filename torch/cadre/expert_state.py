"""Parameters of experts of which each rank has its own: in state dicts they are one tensor of all
ranks' experts, so that a checkpoint of some ranks loads onto any other number of them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .expert_parallel import ExpertParallel


def mark(experts: nn.Module) -> None:
    """Says of each parameter that it is not the same on all ranks, as Megatron asks."""
    for parameter in experts.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]


def keep_whole(experts: nn.Module, ep: ExpertParallel) -> None:
    """From now on `state_dict` gives the parameters [E, ...] of this module as DTensors [P * E,
    ...] that are sharded over the ranks, and `load_state_dict` takes those, or whole tensors.

    Errors, of `state_dict`: NotImplementedError where FSDP2 has sharded them.
    """
    experts.register_state_dict_post_hook(partial(_widen, ep))
    experts.register_load_state_dict_pre_hook(partial(_narrow, ep))


def _widen(ep: ExpertParallel, experts: nn.Module, state: dict[str, Any], prefix: str,
           _: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard
    for key, value in _entries(experts, state, prefix):
        if isinstance(value, DTensor):
            raise NotImplementedError(f"{key} is a DTensor over replicas, must be a plain tensor; "
                                      "the state of experts that FSDP2 shards is not there yet")
        if not isinstance(value, nn.Parameter):  # with keep_vars they are this rank's own
            mesh = DeviceMesh.from_group(ep.group, value.device.type)
            state[key] = DTensor.from_local(value, mesh, [Shard(0)], run_check=False)


def _narrow(ep: ExpertParallel, experts: nn.Module, state: dict[str, Any], prefix: str,
            *_: Any) -> None:
    from torch.distributed.tensor import DTensor
    for key, value in _entries(experts, state, prefix):
        if isinstance(value, DTensor):
            state[key] = value.to_local()
        elif isinstance(value, Tensor) and value.shape[:1] == (ep.experts * ep.ranks,):
            state[key] = value.narrow(0, ep.experts * ep.rank, ep.experts)


def _entries(experts: nn.Module, state: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, _ in experts.named_parameters():
        if prefix + name in state:
            yield prefix + name, state[prefix + name]
