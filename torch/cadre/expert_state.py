"""Parameters of experts of which each rank has its own: in state dicts they are one tensor of all
ranks' experts, so that a checkpoint of some ranks loads onto any other number of them. The state of
an optimizer is made so by `keep_whole`."""

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .dtypes import kind_of
from .expert_parallel import ExpertParallel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def mark(experts: nn.Module) -> None:
    """Says of each parameter that it is not the same on all ranks, as Megatron asks."""
    for parameter in experts.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]


def own(experts: nn.Module, parameter: nn.Parameter) -> None:
    """The same of one that FSDP2 puts in place of another.

    Errors: ValueError where it is sharded over ranks of other experts.
    """
    parameter.allreduce = False  # type: ignore[attr-defined]
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None and vars(experts).get("_replicas") is not mesh:
        _ranks_of_all(experts._ep, mesh)
        experts._replicas = mesh


class MarkedExperts(nn.Module):
    """Experts whose parameters are marked where ranks have their own, also those that FSDP2,
    `to_empty` and copies put in place of others."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "_ep" in vars(self) and isinstance(value, nn.Parameter):
            own(self, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_ep" in vars(self):
            mark(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if "_ep" in vars(self):
            mark(self)
        return self


@cache
def _watched(cls: type[nn.Module]) -> type[nn.Module]:
    about = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _reduced}
    return type(cls.__name__, (MarkedExperts, cls), about)


def _reduced(experts: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """For copies; pickles begin with ep, whose error says more than that of the class."""
    reduced: Any = nn.Module.__reduce_ex__(experts, protocol)
    make, given, *state = reduced
    return _made, (experts._ep, make, given), *state


def _made(_: ExpertParallel, make: Any, given: tuple[Any, ...]) -> Any:
    return make(*given)


def watch(experts: nn.Module) -> None:
    """Marks the parameters of a module, and those that are put there from now on.

    Errors, of whoever puts them: as `own`.
    """
    experts.__class__ = _watched(type(experts))
    mark(experts)


def keep_whole_parameters(experts: nn.Module, ep: ExpertParallel) -> None:
    """From now on `state_dict` gives the parameters [E, ...] of this module as DTensors [P * E,
    ...] that are sharded over the ranks, and over the replicas that FSDP2 has sharded them over.
    `load_state_dict` takes those, and whole tensors.

    Errors, of both: ValueError where FSDP2 has sharded them over ranks of other experts.
    """
    experts._ep = ep  # type: ignore[assignment]
    experts.register_state_dict_post_hook(_widen_parameters)
    experts.register_load_state_dict_pre_hook(_narrow_parameters)
    experts.register_load_state_dict_post_hook(_mark_loaded)


def keep_whole(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """From now on the state of this optimizer is that of all ranks' experts, as `state_dict` of the
    model gives their parameters: `optimizer.state_dict()` has DTensors [P * E, ...] in place of
    tensors [E, ...], and `load_state_dict` takes those, and whole tensors. What
    torch.distributed.checkpoint.state_dict gets and sets is so, too.

    model: has the layers with `ep`, and is sharded already where FSDP2 shards it. Call it once for
    an optimizer, and for a copy of it; without layers that have `ep` it changes nothing.

    Errors: TypeError for what is no optimizer or no module; ValueError where FSDP2 has sharded
        experts over ranks of other experts, for a ZeroRedundancyOptimizer of experts, and of
        `optimizer.state_dict()` for a tensor that is of several experts together, as Adafactor has
        of biases [E, N].
    """
    for name, given, kind in (("optimizer", optimizer, torch.optim.Optimizer),
                              ("model", model, nn.Module)):
        if not isinstance(given, kind):
            raise TypeError(f"{name} is {kind_of(given)}, must be a torch {kind.__name__}")
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    for parameter, ep in _owned(model):
        # Of ZeroRedundancyOptimizer, which takes a second to import.
        if parameter in stepped and hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(f"keep_whole: optimizer is {kind_of(optimizer)}, must be another for "
                             "experts; it copies them to all ranks of its group, and its "
                             "state_dict stays as it is")
        _whole(ep, parameter)
        parameter.allreduce = False  # type: ignore[attr-defined]  # FSDP2 has made others
    optimizer.register_state_dict_post_hook(partial(_widen_state, model))
    optimizer.register_load_state_dict_pre_hook(partial(_narrow_state, model))


def require_apart(experts: nn.Module, ep: ExpertParallel) -> None:
    """Errors: ValueError within a DistributedDataParallel that takes the experts of these ranks for
    the same on all of them."""
    around = DistributedDataParallel._active_ddp_module
    if around is None or vars(experts).get("_apart_in") == id(around):
        return
    if words := refusal_in_ddp(experts, ep):
        raise ValueError(words)
    experts._apart_in = id(around)  # type: ignore[assignment]


# torch.compile guards what an object has of its class, and not what the class itself has.
_ANY_DDP: Any = DistributedDataParallel.__new__(DistributedDataParallel)
nn.Module.__init__(_ANY_DDP)


def require_apart_in_graph(words: str | None) -> None:
    """The same while code is compiled, of what `refusal_in_ddp` gives then. A graph of a DDP serves
    outside of it, too, as activation checkpoints run it; a graph of none serves in none."""
    if words is None and _ANY_DDP._active_ddp_module is None:  # guarded
        return
    if words:
        raise ValueError(words)


def refusal_in_ddp(experts: nn.Module, ep: ExpertParallel) -> str | None:
    """What that error says, "" without one; None outside of a DDP."""
    around = DistributedDataParallel._active_ddp_module
    if around is None:
        return None
    alike = {dist.get_global_rank(around.process_group, at)
             for at in range(around.process_group.size())}
    if alike & set(dist.get_process_group_ranks(ep.group)) == {dist.get_rank()}:
        return ""
    own = set(experts.parameters())
    for name, parameter in around.module.named_parameters():
        if parameter in own and name not in around.parameters_to_ignore:
            return (f"experts: DistributedDataParallel keeps {name} alike on ranks "
                    f"{sorted(alike)}, must leave it alone, since they have other experts; name "
                    "it in _set_params_and_buffers_to_ignore_for_model before it is wrapped")
    return ""


def _widen_parameters(experts: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key, value, _parameter in _entries(experts, state, prefix):
        if not isinstance(value, nn.Parameter):  # with keep_vars they are this rank's own
            state[key] = _widened(experts._ep, value)


def _narrow_parameters(experts: nn.Module, state: dict[str, Any], prefix: str,
                       options: dict[str, Any], *_: Any) -> None:
    for key, value, parameter in _entries(experts, state, prefix):
        own = _narrowed(experts._ep, value, parameter)
        if own is not value and options.get("assign_to_params_buffers", False):
            own = own.detach().clone()  # a view would keep all experts
        state[key] = own


def _mark_loaded(experts: nn.Module, _: Any) -> None:
    mark(experts)  # they may be other parameters now


def _entries(experts: nn.Module, state: dict[str, Any], prefix: str
             ) -> Iterator[tuple[str, Any, nn.Parameter]]:
    for name, parameter in experts.named_parameters():
        if prefix + name in state:
            yield prefix + name, state[prefix + name], parameter


def _widen_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
                 ) -> dict[str, Any]:
    def change(ep: ExpertParallel, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if ep.ranks > 1:
            if value.shape == (ep.ranks * parameter.shape[0], *parameter.shape[1:]):
                return value  # by a call before this one
            _require_apart_by_expert(optimizer, value, parameter)
        return _widened(ep, value) if value.shape[:1] == parameter.shape[:1] else value

    return _mapped(model, optimizer, state, change)


def _require_apart_by_expert(optimizer: torch.optim.Optimizer, value: Tensor, parameter: Tensor
                             ) -> None:
    """One row for each expert. Of a parameter [E, N] that is all of it: what is [1, N] for one
    expert may be a sum over experts."""
    shape = parameter.shape
    if value.shape[:1] != shape[:1] or (len(shape) == 2 and value.shape != shape):
        must = f"must be {list(shape)}" if len(shape) == 2 else f"must begin with {shape[0]}"
        raise ValueError(
            f"keep_whole: {type(optimizer).__name__} has a tensor {list(value.shape)} of a "
            f"parameter {list(shape)}, {must}, a row for each expert; take an optimizer whose "
            "state is elementwise, or experts without biases")


def _narrow_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
                  ) -> dict[str, Any]:
    return _mapped(model, optimizer, state, _narrowed)


def _owned(model: nn.Module) -> Iterator[tuple[nn.Parameter, ExpertParallel]]:
    """The parameters of which each rank has its own."""
    for module in model.modules():
        if hasattr(module, "_ep"):
            for parameter in module.parameters():
                yield parameter, module._ep


def _mapped(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], change: Any
            ) -> dict[str, Any]:
    """The state of an optimizer, with what it has for parameters of experts changed."""
    owners = {id(parameter): ep for parameter, ep in _owned(model)}
    of_parameters = dict(state["state"])
    for group, saved in zip(optimizer.param_groups, state["param_groups"]):
        for parameter, key in zip(group["params"], saved["params"]):
            ep = owners.get(id(parameter))
            if ep is not None and key in of_parameters:
                of_parameters[key] = {name: change(ep, value, parameter)
                                      for name, value in of_parameters[key].items()}
    return state | {"state": of_parameters}


# A tensor of this rank's experts is plain, or where FSDP2 has sharded it a DTensor over replicas.
# One of all experts is split over the ranks, and each part over the replicas.


def _widened(ep: ExpertParallel, value: Tensor) -> "DTensor":
    """This rank's part of a tensor [E, ...] as a part of [P * E, ...]."""
    from torch.distributed.tensor import DTensor
    mesh, placements = _whole(ep, value)
    local = value.to_local() if isinstance(value, DTensor) else value
    shape = torch.Size((value.shape[0] * ep.ranks, *value.shape[1:]))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape,
                              stride=torch.empty(shape, device="meta").stride())


def _narrowed(ep: ExpertParallel, value: Any, like: Tensor) -> Any:
    """This rank's part of a tensor [P * E, ...], stored as `like` is, [E, ...]; what has another
    first dimension, as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    experts = like.shape[0]
    if not isinstance(value, Tensor) or value.shape[:1] != (experts * ep.ranks,):
        return value
    if isinstance(value, DTensor):
        mesh, placements = _whole(ep, like)
        if value.device_mesh == mesh and list(value.placements) == placements:
            local = value.to_local()
            return _stored(local, like, value.shape) if isinstance(like, DTensor) else local
        value = value.full_tensor()
    own = value.narrow(0, experts * ep.rank, experts)
    if not isinstance(like, DTensor):
        return own
    mesh, _ = _whole(ep, like)
    replicas = mesh[mesh.mesh_dim_names[1:]]  # in the order of their groups, as FSDP2 shards
    own = distribute_tensor(own, replicas, like.placements, src_data_rank=None)
    return _stored(own.to_local(), like, value.shape)


def _stored(local: Tensor, like: "DTensor", whole: torch.Size) -> "DTensor":
    """This replica's part of a tensor [P * E, ...] of that shape, stored as `like` is."""
    from torch.distributed.tensor import DTensor
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False,
                              shape=torch.Size((like.shape[0], *whole[1:])), stride=like.stride())


def _whole(ep: ExpertParallel, value: Tensor) -> tuple[DeviceMesh, list[Any]]:
    """The mesh and the placements of a tensor of all experts, of which this rank has `value`."""
    from torch.distributed.tensor import DTensor, Shard
    if not isinstance(value, DTensor):
        return DeviceMesh.from_group(ep.group, value.device.type), [Shard(0)]
    replicas = value.device_mesh
    ranks = _ranks_of_all(ep, replicas)
    names = "ep", *(f"replicas{at}" for at in range(replicas.ndim))
    on = replicas.device_type if value.is_meta else value.device.type
    mesh = DeviceMesh.from_group([ep.group, *replicas.get_all_groups()], on, ranks,
                                 mesh_dim_names=names)
    return mesh, [Shard(0), *value.placements]


def _ranks_of_all(ep: ExpertParallel, replicas: DeviceMesh) -> Tensor:
    """Of all experts: int [P, ...], those of ep by the replicas of each, in the order of groups."""
    places = _places(ep, replicas)
    ranks = torch.full((ep.ranks, *replicas.shape), -1, device="cpu")
    for number, sharing, at in places.values():
        if (number, len(sharing)) == (ep.rank, ep.ranks):
            ranks[(slice(None), *at)] = torch.tensor(sharing, device="cpu")
    if ranks.min() >= 0 and ranks.unique().numel() == ranks.numel():
        return ranks
    over, sharing = replicas.mesh.flatten().tolist(), dist.get_process_group_ranks(ep.group)
    if len(set(over) & set(sharing)) > 1:
        raise ValueError(f"experts are sharded over ranks {over}, must be over replicas, of ranks "
                         f"{sharing} this one alone; fully_shard("
                         'experts, mesh=mesh["replicas"]), or name them in ignored_params')
    parts = ", ".join(f"rank {rank} has part {number} of {len(sharing)}"
                      for rank, (number, sharing, _) in sorted(places.items()))
    raise ValueError(f"experts are sharded over ranks {over}, must be over replicas, which have "
                     f"the same part of them; {parts}, since groups number their ranks from the "
                     "lowest on: make the mesh of ranks that ascend")


_Place = tuple[int, list[int], tuple[int, ...]]


def _places(ep: ExpertParallel, replicas: DeviceMesh) -> dict[int, _Place]:
    """Of each replica's rank: its number among those that share its experts, these ranks, and its
    numbers in the groups of the mesh. All replicas call it, and tell each other once."""
    known: dict[int, _Place] | None = ep._places.get(replicas)
    if known is not None:
        return known
    rank, sharing = dist.get_rank(), dist.get_process_group_ranks(ep.group)
    groups = replicas.get_all_groups()
    places = {rank: (ep.rank, sharing, tuple(map(dist.get_rank, groups)))}
    for group in groups:
        said: list[dict[int, _Place]] = [places] * group.size()
        if group.size() > 1:
            dist.all_gather_object(said, places, group=group)
        places = {other: place for each in said for other, place in each.items()}
    if len(places) < replicas.size():  # of fake groups, by which nothing comes
        all_at = product(*map(range, replicas.shape))
        places = {other: (ep.rank, [other - rank + each for each in sharing], at)
                  for other, at in zip(replicas.mesh.flatten().tolist(), all_at)}
    ep._places[replicas] = places
    return places
