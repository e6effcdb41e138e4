"""Checkpoints of a model whose experts are on several ranks, and over replicas by FSDP2: parameters
and the state of the optimizer load onto any other number of ranks, with the same bits."""

import copy
import io
import pickle
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import WORLD, group_of, same_bits
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
    set_optimizer_state_dict)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import cadre
from cadre import checkpoints

H, F, TOP_K, T = 16, 24, 2, 10
FULL = StateDictOptions(full_state_dict=True)


# What the processes run


class Model(nn.Module):
    """A linear layer that is tied to the last one, and experts."""

    def __init__(self, experts, device, ep=None, replicas=None):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(H, H, device=device)
        self.moe = cadre.MoE(experts, H, F, top_k=TOP_K, device=device, ep=ep, bias=True)
        self.last = nn.Linear(H, H, bias=False, device=device)
        self.last.weight = self.first.weight
        if replicas is not None:
            fully_shard(self.moe.experts, mesh=replicas)

    def forward(self, x):
        return self.last(x + self.moe(self.first(x))[0])


def optimizer_of(model):
    """Two groups: parameters that are sharded cannot be updated in one call with others."""
    of_experts = {id(p) for p in model.moe.experts.parameters()}
    rest = [p for p in model.parameters() if id(p) not in of_experts]
    optimizer = torch.optim.AdamW([{"params": rest},
                                   {"params": list(model.moe.experts.parameters())}], lr=0.01)
    cadre.keep_whole(optimizer, model)
    return optimizer


def scaled(model):
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            torch.manual_seed(len(name))
            p.copy_(draw(*p.shape) * 0.3)
    return model


def learn(model, optimizer, seed, part):
    """A step on that part of the tokens; replicas see the same ones."""
    group, rank, ranks = part
    torch.manual_seed(seed)
    x = draw(ranks * T, H, device=model.first.weight.device)
    model(x.tensor_split(ranks)[rank]).square().sum().backward()
    for p in [*model.first.parameters(), model.moe.router]:
        dist.all_reduce(p.grad, group=group)
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def numbers_of(model, optimizer):
    """All tensors, whole, by name."""
    found = {name: whole(t).clone() for name, t in get_model_state_dict(model).items()}
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return found | {f"{name}:{what}": whole(t).clone() for name, of in state.items()
                    for what, t in of.items()}


def assert_same(got, want, what):
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert same_bits(got[name], w), f"{name} {what}"


def save(model, optimizer, folder, group):
    state = {"model": get_model_state_dict(model),
             "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder, process_group=group)


def load(model, optimizer, folder, group):
    state = {"model": get_model_state_dict(model),
             "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def over_replicas(rank, device, folder, experts, table):
    """Trained on two ranks, each with two replicas; then on four ranks, on two, on two with
    replicas again, and on one."""
    mesh = DeviceMesh(device.type, table, mesh_dim_names=("replicas", "ep"))
    ep, replicas = mesh["ep"], mesh["replicas"]
    model = Model(experts, device, ep, replicas)
    before = scaled(Model(experts, device)).state_dict()
    model.load_state_dict(before)
    optimizer = optimizer_of(model)
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError):
        state = model.state_dict()  # a rank may ask for it alone
    assert_same({name: whole(t) for name, t in state.items()}, dict(before), "loaded")
    learn(model, optimizer, 0, (ep.get_group(), ep.get_local_rank(), 2))
    want = numbers_of(model, optimizer)
    assert model.state_dict()["moe.experts.w1"].shape == (experts, 2 * F, H)
    assert want["moe.experts.w2:exp_avg"].shape == (experts, H, F)
    save(model, optimizer, folder / "first", None)
    full = get_model_state_dict(model, options=FULL)
    full_state = get_optimizer_state_dict(model, optimizer, options=FULL)

    kinds = {"two": (ep, None), "replicas": (ep, replicas), "one": (None, None)}
    if experts % WORLD == 0:
        kinds["four"] = (dist.group.WORLD, None)
    for name, sharing in kinds.items():
        other = Model(experts, device, *sharing)
        state = optimizer_of(other)
        load(other, state, folder / "first", None)
        assert_same(numbers_of(other, state), want, name)
        dist.barrier()
        save(other, state, folder / name, None)
        again = Model(experts, device, ep, replicas)
        state = optimizer_of(again)
        load(again, state, folder / name, None)
        assert_same(numbers_of(again, state), want, f"back from {name}")

        other = Model(experts, device, *sharing)
        state = optimizer_of(other)
        set_model_state_dict(other, dict(full), options=FULL)
        set_optimizer_state_dict(other, state, copy.deepcopy(full_state), options=FULL)
        assert_same(numbers_of(other, state), want, f"{name}, of whole tensors")


def goes_on(rank, device, folder):
    """Steps on two ranks, on one, and on two again are those of two ranks all along."""
    group, alone = group_of(2), group_of(1)
    if rank >= 2:
        return

    def trained(model, steps, part):
        state = optimizer_of(model)
        for seed in steps:
            learn(model, state, seed, part)
        return state

    part = group, rank, 2
    want = Model(6, device, group)
    want.load_state_dict(scaled(Model(6, device)).state_dict())
    got = copy.deepcopy(want)
    want_state = trained(want, range(3), part)
    save(got, trained(got, [0], part), folder / "two", group)
    if rank == 0:
        one = Model(6, device)
        state = optimizer_of(one)
        load(one, state, folder / "two", alone)
        save(one, state, folder / "one", alone)
    dist.barrier(group)
    again = Model(6, device, group)
    state = optimizer_of(again)
    load(again, state, folder / "one", group)
    for seed in (1, 2):
        learn(again, state, seed, part)
    assert_same(numbers_of(again, state), numbers_of(want, want_state), "after two more steps")


def plain_state(rank, device):
    """Without torch.distributed.checkpoint: what `state_dict` gives is loaded as it is, or whole;
    the optimizer's own tensors are not changed by being asked."""
    group = group_of(2)
    if rank >= 2:
        return
    model = Model(6, device, group)
    optimizer = optimizer_of(model)
    cadre.keep_whole(optimizer, model)  # once more changes nothing
    learn(model, optimizer, 0, (group, rank, 2))
    state, of_model = optimizer.state_dict(), model.state_dict()
    assert not any(isinstance(t, DTensor) for of in optimizer.state.values() for t in of.values())
    assert sum(isinstance(t, DTensor) for of in state["state"].values() for t in of.values()) == 8
    other = Model(6, device, group)
    another = optimizer_of(other)
    for loaded in (state, {"state": {key: {name: whole(t) for name, t in of.items()}
                                     for key, of in state["state"].items()},
                           "param_groups": state["param_groups"]}):
        other.load_state_dict({name: whole(t) for name, t in of_model.items()})
        another.load_state_dict(loaded)
        assert_same(numbers_of(other, another), numbers_of(model, optimizer), "loaded")
    kept = model.state_dict(keep_vars=True)
    assert kept["moe.experts.w1"] is model.moe.experts.w1


def converted(rank, device):
    """To the names of another library, of sharded tensors and of whole ones."""
    mesh = init_device_mesh(device.type, (WORLD // 2, 2), mesh_dim_names=("replicas", "ep"))
    plain = scaled(cadre.MoE(6, H, F, top_k=TOP_K, device=device))
    model = nn.ModuleDict({"mlp": cadre.MoE(6, H, F, top_k=TOP_K, device=device, ep=mesh["ep"])})
    model["mlp"].load_state_dict(plain.state_dict())
    fully_shard(model["mlp"].experts, mesh=mesh["replicas"])
    want = checkpoints.convert(nn.ModuleDict({"mlp": plain}).state_dict(), "cadre", "qwen")
    for state in (model.state_dict(), get_model_state_dict(model, options=FULL)):
        got = checkpoints.convert(state, "cadre", "qwen")
        assert_same({name: whole(t) for name, t in got.items()}, dict(want), "as qwen")


def assigned(rank, device):
    """Parameters that are what was loaded are marked as those before, and keep no other rank's
    experts in memory; of FSDP2, too, where it has not made others since."""
    mesh = init_device_mesh(device.type, (WORLD // 2, 2), mesh_dim_names=("replicas", "ep"))

    def layer(device, **options):
        return cadre.MoE(6, H, F, top_k=TOP_K, device=device, bias=True, **options)

    def assert_right(moe, what):
        assert_same({name: whole(t) for name, t in moe.state_dict().items()}, want, what)
        for p in moe.experts.parameters():
            own = p.to_local() if isinstance(p, DTensor) else p
            assert p.is_leaf and p.requires_grad and not getattr(p, "allreduce", True), what
            assert own.untyped_storage().nbytes() <= p.numel() * p.element_size(), what

    want = dict(scaled(layer(device)).state_dict())
    moe = layer(device, ep=mesh["ep"])
    moe.load_state_dict(want)
    assert_right(moe, "copied")
    of_parameters = dict(scaled(layer(device)).named_parameters())
    for state in (want, of_parameters, moe.state_dict(), moe.state_dict(keep_vars=True)):
        other = layer("meta", ep=mesh["ep"])
        other.load_state_dict(state, assign=True)
        assert_right(other, "assigned")
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        moe.load_state_dict(want)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_right(moe, "swapped")
    for on in (device, "meta"):
        moe = layer(on, ep=mesh["ep"])
        fully_shard(moe.experts, mesh=mesh["replicas"])
        moe.load_state_dict(want, assign=True)
        assert_right(moe, "assigned to FSDP2")
    fully_shard(other.experts, mesh=mesh["replicas"])
    cadre.keep_whole(torch.optim.SGD(other.parameters(), lr=0.1), other)
    assert_right(other, "in an optimizer")


def in_mixed_precision(rank, device):
    """FSDP2 casts what a module is given, but not the probabilities of rows: the bits of experts
    that are given them as they are."""
    mesh = init_device_mesh(device.type, (WORLD // 2, 2), mesh_dim_names=("replicas", "ep"))
    plain = scaled(cadre.MoE(6, H, F, top_k=TOP_K, device=device, bias=True)).state_dict()
    x = draw(T, H, dtype=torch.bfloat16, device=device)
    found = []
    for options in ({}, {"dispatch_again": True}, {"compiled": True}, {"cast": False}):
        moe = cadre.MoE(6, H, F, top_k=TOP_K, device=device, ep=mesh["ep"], bias=True,
                        dispatch_again=options.get("dispatch_again", False))
        moe.load_state_dict(plain)
        fully_shard(moe.experts, mesh=mesh["replicas"], mp_policy=MixedPrecisionPolicy(
            torch.bfloat16, cast_forward_inputs=options.get("cast", True)))
        call = torch.compile(moe, backend="aot_eager") if "compiled" in options else moe
        own = x.clone().requires_grad_()
        out, _ = call(own)
        out.float().square().sum().backward()
        found.append([out, own.grad, *(p.grad.to_local() for p in moe.experts.parameters())])
    for one in found[:-1]:
        assert all(map(same_bits, one, found[-1]))


def of_all_experts_together(rank, device):
    """What Adafactor has of a bias is a mean over this rank's experts."""
    for experts in (2, 1):
        model = Model(experts * WORLD, device, dist.group.WORLD)
        optimizer = torch.optim.Adafactor(model.parameters())
        cadre.keep_whole(optimizer, model)
        model(draw(T, H, device=device)).sum().backward()
        optimizer.step()
        words = re.escape(
            f"keep_whole: Adafactor has a tensor [{experts}, 1] of a parameter [{experts}, {2 * F}]"
            f", must be [{experts}, {2 * F}], a row for each expert; take an optimizer whose state "
            "is elementwise, or experts without biases")
        with pytest.raises(ValueError, match=f"^{words}$"):
            optimizer.state_dict()
    alone = dist.new_group([rank], use_local_synchronization=True)
    for kind in (torch.optim.Adafactor, torch.optim.AdamW):  # of one rank it is of all experts
        model = Model(2, device, alone)
        optimizer = kind(model.parameters())
        cadre.keep_whole(optimizer, model)
        model(draw(T, H, device=device)).sum().backward()
        optimizer.step()
        made = [t for of in optimizer.state_dict()["state"].values() for t in of.values()]
        assert sum(isinstance(t, DTensor) for t in made) >= 6


def sharded_over_other_experts(rank, device):
    """FSDP2 of the whole model would take experts of other ranks for parts of these."""
    for part in (lambda model: model, lambda model: model.moe, lambda model: model.moe.experts):
        model = Model(4, device, dist.group.WORLD)
        with pytest.raises(ValueError, match="experts are sharded over ranks .* must be over repl"):
            fully_shard(part(model), mesh=DeviceMesh.from_group(dist.group.WORLD, device.type))
    model = Model(4, device, dist.group.WORLD)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    experts = model.moe.experts
    experts.register_parameter("w1", nn.Parameter(DTensor.from_local(
        experts.w1.detach(), mesh, [Shard(0)])))  # by others than FSDP2
    with pytest.raises(ValueError, match="experts are sharded over ranks .* must be over replicas"):
        model.state_dict()
    with pytest.raises(ValueError, match="experts are sharded over ranks .* must be over replicas"):
        cadre.keep_whole(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model = Model(4, device, dist.group.WORLD)
    want = model.state_dict()["moe.experts.w1"].to_local()
    fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, device.type),
                ignored_params=set(model.moe.experts.parameters()))
    assert same_bits(model.state_dict()["moe.experts.w1"].to_local(), want)
    assert isinstance(model.first.weight, DTensor)


def over_ranks_with_another_part(rank, device):
    """Groups number their ranks from the lowest on, whatever the mesh: of some meshes replicas have
    other experts. All ranks refuse them, and none waits."""
    words = ("experts are sharded over ranks .*, must be over replicas, which have the same part "
             "of them; rank . has part . of ., .*, since groups number their ranks from the lowest "
             "on: make the mesh of ranks that ascend$")
    for table, names in (([[0, 3], [1, 2]], ("ep", "replicas")),
                         ([[0, 2], [3, 1]], ("replicas", "ep"))):
        mesh = DeviceMesh(device.type, table, mesh_dim_names=names)
        model = Model(4, device, mesh["ep"])
        with pytest.raises(ValueError, match=words):
            fully_shard(model.moe.experts, mesh=mesh["replicas"])
        if rank == 0:
            with pytest.raises(ValueError, match=words):
                model.state_dict()
        dist.barrier()
    alone = dist.new_group([rank], use_local_synchronization=True)
    for table in ([[0, 1], [2, 3]], [[0, 3], [2, 1]]):  # numbers in the latter are not of one rank
        mesh = DeviceMesh(device.type, table, mesh_dim_names=("copies", "parts"))
        model = Model(4, device, alone)
        if table[0][1] == 1:
            fully_shard(model.moe.experts, mesh=mesh)
            assert model.state_dict()["moe.experts.w1"].device_mesh.mesh.tolist() == [table]
            continue
        with pytest.raises(ValueError, match=words):
            fully_shard(model.moe.experts, mesh=mesh)


def copied_to_other_experts(rank, device):
    """By an optimizer that has all its ranks step a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = Model(4, device, dist.group.WORLD)
    with pytest.raises(ValueError, match="keep_whole: optimizer is a ZeroRedundancyOptimizer, must "
                       "be another for experts; it copies them to all ranks of its group, and its "
                       "state_dict stays as it is$"):
        cadre.keep_whole(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1), model)
    rest = ZeroRedundancyOptimizer(model.first.parameters(), torch.optim.SGD, lr=1)
    cadre.keep_whole(rest, model)


def pickled(rank, device):
    """Groups of processes are not; copies are of the same group."""
    model = Model(4, device, dist.group.WORLD)
    ep = model.moe.ep
    for part in (model, model.moe.experts, ep):
        for save in (pickle.dumps, lambda part: torch.save(part, io.BytesIO())):
            with pytest.raises(TypeError, match="^ExpertParallel is pickled, must not be; save the "
                               "state_dict of its model$"):
                save(part)
    assert copy.deepcopy(model).moe.ep is ep and copy.copy(ep) is ep


# The tests


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
@pytest.mark.parametrize("experts, table", [
    (8, [[0, 1], [2, 3]]), (6, [[0, 1], [2, 3]]), (6, [[0, 3], [1, 2]])])
def test_trained_over_replicas(ranks, tmp_path, experts, table):
    ranks.run(over_replicas, tmp_path, experts, table)


def test_training_goes_on_from_another_number_of_ranks(ranks, tmp_path):
    ranks.run(goes_on, tmp_path)


def test_states_without_a_checkpoint(ranks):
    ranks.run(plain_state)


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
def test_converted(ranks):
    ranks.run(converted)


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
def test_states_that_are_assigned(ranks):
    ranks.run(assigned)


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
def test_experts_in_mixed_precision(ranks):
    ranks.run(in_mixed_precision)


def test_state_that_is_not_of_one_expert(ranks):
    ranks.run(of_all_experts_together)


def test_sharded_over_ranks_of_other_experts(ranks):
    ranks.run(sharded_over_other_experts)


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
def test_sharded_over_ranks_with_another_part(ranks):
    ranks.run(over_ranks_with_another_part)


def test_copied_to_ranks_of_other_experts(ranks):
    ranks.run(copied_to_other_experts)


def test_pickles(ranks):
    ranks.run(pickled)


# By groups of processes that are not there.
FAKE = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import cadre
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ep"))
for device in ("cpu", "meta"):
    moe = cadre.MoE(4, 16, 24, top_k=2, device=device, ep=mesh["ep"])
    fully_shard(moe.experts, mesh=mesh["replicas"])
    print(moe.state_dict()["experts.w1"].device_mesh.mesh.tolist())
"""


def test_of_fake_groups():
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[0, 2], [1, 3]]"] * 2
