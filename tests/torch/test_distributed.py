"""Two processes: DistributedDataParallel where an expert gets no rows, parameters sharded by FSDP2,
and activation checkpointing inside of both. NCCL with two GPUs, else gloo on the CPU."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from linear_reference import experts_of
from processes import Processes, on_gpus
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cadre

WORLD = 2
ON_GPUS = on_gpus(WORLD)

E, H, F, T = 5, 32, 48, 24


# What the processes run. Both do the same, on data of their own.


class Moe(nn.Module):
    """A buffer keeps tokens away from experts."""

    def __init__(self, device):
        super().__init__()
        self.inner = cadre.MoE(E, H, F, top_k=2, normalize=True, expert_bias=True, bias=True,
                               device=device)

    def starve(self, expert):
        self.inner.expert_bias[expert] = -100.0

    def gradient_of(self, expert):
        return self.inner.experts.w1.grad[expert]

    def forward(self, x):
        out, router = self.inner(x)
        return x + out, router.tokens_per_expert


class Linears(nn.Module):
    """A parameter an expert. The splits are a buffer."""

    def __init__(self, device):
        super().__init__()
        self.up = cadre.GroupedLinear(E, H, F, device=device)
        self.down = cadre.GroupedLinear(E, F, H, device=device, single_grouped_weight=True)
        self.register_buffer("counts", torch.tensor([6, 4, 7, 2, 3], device=device))  # a tail of 2

    def starve(self, expert):
        self.counts[expert] = 0

    def gradient_of(self, expert):
        return getattr(self.up, f"weight{expert}").grad

    def forward(self, x):
        h = nn.functional.silu(self.up(x, self.counts))
        return x + self.down(h, self.counts), self.counts


class Mlp(nn.Module):
    """As Linears, with all experts in one operator."""

    def __init__(self, device):
        super().__init__()
        self.inner = cadre.GroupedMLP(E, H, F, bias=True, device=device)
        self.register_buffer("counts", torch.tensor([6, 4, 7, 2, 3], device=device))

    def starve(self, expert):
        self.counts[expert] = 0

    def gradient_of(self, expert):
        return self.inner.w1.grad[expert]

    def forward(self, x):
        return x + self.inner(x, self.counts), self.counts


class Model(nn.Module):
    """Two blocks; forward gives the sum and the rows of each expert in the first block."""

    def __init__(self, block, device, checkpointed):
        super().__init__()
        self.blocks = nn.ModuleList([block(device), block(device)])
        self.checkpointed = checkpointed
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(draw(*p.shape) * 0.3)

    def forward(self, x):
        loads = None
        for block in self.blocks:
            if self.checkpointed:
                x, load = checkpoint(block, x, use_reentrant=False)
            else:
                x, load = block(x)
            loads = load.clone() if loads is None else loads
        return x, loads


def data_of(rank, device):
    torch.manual_seed(100 + rank)
    return draw(T, H, device=device), draw(T, H, device=device)


def gradients_alone(model, device, starved="no rank", dtype=torch.float32):
    """Each rank's result, and the mean over ranks of the gradients, computed by one process."""
    results, means = [], [0] * len(list(model.parameters()))
    for rank in range(WORLD):
        single = copy.deepcopy(model).to(dtype)
        starve(single, starved, rank)
        x, dy = (t.to(dtype) for t in data_of(rank, device))
        y, _ = single(x)
        grads = torch.autograd.grad(y, list(single.parameters()), dy)
        results.append(y.detach())
        means = [m + g.float() / WORLD for m, g in zip(means, grads)]
    return results, means


def starve(model, starved, rank):
    if starved == "all ranks" or (starved == "one rank" and rank == 0):
        for block in model.blocks:
            block.starve(2)


def data_parallel(rank, device, block, starved, static, checkpointed):
    """Three steps: after the second one a static graph is used, and a parameter without a gradient
    would be an error of the third at the latest."""
    torch.manual_seed(1)
    model = Model(block, device, checkpointed)
    want_y, want = gradients_alone(model, device, starved)
    starve(model, starved, rank)
    parallel = DistributedDataParallel(model, device_ids=[rank] if ON_GPUS else None,
                                       broadcast_buffers=False, static_graph=static)
    for _ in range(3):
        parallel.zero_grad()
        x, dy = data_of(rank, device)
        y, loads = parallel(x)
        y.backward(dy)
        starving = starved == "all ranks" or (starved == "one rank" and rank == 0)
        assert (int(loads[2]) == 0) == starving, f"expert 2 has {int(loads[2])} rows"
        torch.testing.assert_close(y, want_y[rank])
        for (name, p), w in zip(model.named_parameters(), want):
            assert p.grad is not None, f"{name} has no gradient"
            torch.testing.assert_close(p.grad, w, msg=lambda m, name=name: f"{name}: {m}")
    if starved == "all ranks":
        assert all(torch.all(one.gradient_of(2) == 0) for one in model.blocks)


def watch(model):
    """A list that gets the parameters of experts as forward reads them."""
    seen = []
    for module in model.modules():
        if isinstance(module, (cadre.GroupedLinear, cadre.GroupedMLP)):
            module.register_forward_pre_hook(lambda m, _: seen.extend(m.parameters()))
    return seen


def sharded(rank, device, block, checkpointed, dtype):
    """Two steps of descent. Whole parameters exist only in the forward and backward of their block,
    each time in other memory."""
    torch.manual_seed(1)
    model = Model(block, device, checkpointed)
    single = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (WORLD,))
    for one in (*model.blocks, model):
        fully_shard(one, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    seen = watch(model)
    near = 1e-4 if dtype == torch.float32 else 3e-2
    close = {"rtol": near, "atol": near}
    for _ in range(2):
        assert all(isinstance(p, DTensor) for p in model.parameters())
        want_y, want = gradients_alone(single, device, dtype=dtype)
        x, dy = data_of(rank, device)
        seen.clear()
        y, _ = model(x)
        assert seen and not any(isinstance(p, DTensor) for p in seen)
        assert all(p.untyped_storage().size() == 0 for p in seen), "memory was not given back"
        torch.testing.assert_close(y, want_y[rank], **close)
        y.backward(dy.to(y.dtype))
        for (name, p), w in zip(model.named_parameters(), want):
            assert p.grad is not None, f"{name} has no gradient"
            got = p.grad.full_tensor()
            assert got.abs().max() > 0, f"the gradient of {name} is zero"
            torch.testing.assert_close(got, w, msg=lambda m, name=name: f"{name}: {m}", **close)
        with torch.no_grad():
            for p, s, w in zip(model.parameters(), single.parameters(), want):
                p.sub_(p.grad, alpha=1e-5)  # more would drive the router into one choice
                s.sub_(w, alpha=1e-5)
        model.zero_grad()


AVERAGED = (
    " is averaged by DistributedDataParallel while backward runs, must be left alone with "
    "delay_wgrad_compute, since its gradient comes later; name it in "
    "_set_params_and_buffers_to_ignore_for_model, or call the model in no_sync(), and average it "
    "after backward_dw")
SHARDED = (
    " is sharded by fully_shard, must be whole with delay_wgrad_compute; FSDP2 reduces gradients "
    "while backward runs, and these come later")


def deferring(device, kind):
    if kind == "linear":
        return cadre.GroupedLinear(E, H, F, device=device, delay_wgrad_compute=True), "weight0"
    return cadre.GroupedMLP(E, H, F, device=device, delay_wgrad_compute=True), "w1"


def deferred_in_ddp(rank, device, kind):
    """Nobody averages a gradient that is not there when backward ends."""
    counts = [6, 4, 7, 2, 3]

    def learn(model):
        model(draw(22, H, device=device), counts).square().sum().backward()

    layer, name = deferring(device, kind)
    model = DistributedDataParallel(layer)
    with pytest.raises(ValueError, match=re.escape(name + AVERAGED)):
        learn(model)
    with model.no_sync():
        learn(model)
    layer.backward_dw()
    assert layer.get_parameter(name).grad is not None

    layer, name = deferring(device, kind)
    left_alone = [n for n, _ in layer.named_parameters() if not n.startswith("bias")]
    layer.own = nn.Parameter(torch.ones(1, device=device))  # it has to have something
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, left_alone)
    learn(DistributedDataParallel(layer, find_unused_parameters=True))
    layer.backward_dw()
    assert layer.get_parameter(name).grad is not None


def deferred_in_fsdp(rank, device, kind):
    mesh = init_device_mesh(device.type, (WORLD,))
    for inner in (True, False):
        layer, _ = deferring(device, kind)
        model = nn.Sequential(layer)
        fully_shard(layer if inner else model, mesh=mesh)
        if not inner:
            model.unshard()
        with pytest.raises(ValueError, match=re.escape(SHARDED)):
            layer(draw(22, H, device=device), [6, 4, 7, 2, 3])
    layer, _ = deferring(device, kind)
    layer.requires_grad_(False)  # so nothing comes later
    fully_shard(layer, mesh=mesh)
    layer(draw(22, H, device=device), [6, 4, 7, 2, 3])
    layer, name = deferring(device, kind)
    layer.own = nn.Parameter(torch.ones(WORLD, device=device))
    left_alone = {p for n, p in layer.named_parameters() if n != "own"}
    fully_shard(layer, mesh=mesh, ignored_params=left_alone)
    layer(draw(22, H, device=device), [6, 4, 7, 2, 3]).square().sum().backward()
    layer.backward_dw()
    assert layer.get_parameter(name).grad is not None


def beside_the_root(rank, device):
    """A module whose parameters nobody has gathered must not multiply with its shard."""
    x, counts = draw(E, H, device=device), torch.ones(E, dtype=torch.int32, device=device)
    layers = {"weight": [cadre.GroupedLinear(E, H, F, device=device, single_grouped_weight=packed)
                         for packed in (False, True)],
              "w1": [cadre.GroupedMLP(E, H, F, device=device)],
              "router": [cadre.MoE(E, H, F, top_k=2, device=device)]}
    for name, layer in ((name, layer) for name, all_of in layers.items() for layer in all_of):
        fully_shard(nn.Sequential(layer), mesh=init_device_mesh(device.type, (WORLD,)))
        with pytest.raises(ValueError, match=(
                rf"^{name} is Shard\(dim=0\) of a DTensor, must be Replicate\(\); call the module "
                "that gathers it, or gather it before")):
            layer(x, *([] if name == "router" else [counts]))


def drawn_on_ranks(rank, device):
    """A packed weight that is sharded before it has memory: the numbers of one process, in the
    memory of an expert."""
    def xavier(weight):
        nn.init.xavier_uniform_(weight)
        sizes.append(weight.untyped_storage().nbytes())

    for init, axis in (None, 0), (xavier, 0), (xavier, 1), (xavier, 2):
        def made():
            return cadre.GroupedLinear(2 * E + (axis == 0), H, F, device="meta",
                                       single_grouped_weight=True, init_method=init)

        sizes = []
        whole, linear = made().to_empty(device=device), made()
        fully_shard(linear, mesh=init_device_mesh(device.type, (WORLD,)),
                    shard_placement_fn=lambda p, axis=axis: Shard(axis if p.dim() == 3 else 0))
        linear.to_empty(device=device)
        for layer in (whole, linear):
            torch.manual_seed(7)
            layer.reset_parameters()
        assert torch.equal(linear.weight.full_tensor(), whole.weight)
        assert init is None or sizes[-1] == whole.weight[0].nbytes


def drawn_one_by_one(rank, device):
    """As above of all other parameters that are drawn."""
    mesh = init_device_mesh(device.type, (WORLD,))
    for make in (
            lambda: cadre.GroupedLinear(3, H, F + 1, device="meta"),
            lambda: cadre.GroupedMLP(E, H, F, device="meta", bias=True),
            lambda: cadre.MoE(E, H, F, top_k=2, device="meta", shared_features=F,
                              shared_gate=True, expert_bias=True)):
        whole, layer = make().to_empty(device=device), make()
        fully_shard(layer, mesh=mesh)
        layer.to_empty(device=device)
        for each in (whole, layer):
            torch.manual_seed(7)
            each.reset_parameters()
        for (name, want), got in zip(whole.named_parameters(), layer.parameters(), strict=True):
            assert isinstance(got, DTensor)
            assert torch.equal(got.full_tensor(), want), name
            assert "bias" in name or want.abs().max() > 0, name


def loaded_in_a_layout(rank, device, packed, same):
    """The other, or the same with a bias an expert. From a state that is sharded, also with an
    expert missing, and from a whole one; of a weight that is sharded between experts or within
    them, or not at all."""
    mesh = init_device_mesh(device.type, (WORLD,))

    def made(packed):
        return cadre.GroupedLinear(E, H, F, device=device, single_grouped_weight=packed,
                                   single_grouped_bias=packed and not same)

    def split(layer, axis=0):
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(min(axis, p.dim() - 1)))
        return layer

    torch.manual_seed(11)
    own = packed == same
    source = made(own)
    with torch.no_grad():
        for p in source.parameters():
            p.normal_()
    want = {f"{stem}{e}": expert.detach().clone() for stem in ("weight", "bias")
            for e, expert in enumerate(experts_of(source, stem))}
    whole_state = copy.deepcopy(source.state_dict())
    states = [whole_state, split(source).state_dict(), split(made(own), 1).state_dict()]
    states[2] = {name: distribute_tensor(whole_state[name], mesh, value.placements)
                 if isinstance(value, DTensor) else value for name, value in states[2].items()}
    for state in states:
        for axis in (None, 0, 1):
            target = made(packed) if axis is None else split(made(packed), axis)
            placements = [getattr(p, "placements", None) for p in target.parameters()]
            target.load_state_dict(dict(state))
            assert [getattr(p, "placements", None) for p in target.parameters()] == placements
            assert_numbers(target, want)
    if packed and not same:
        target = split(made(packed))
        first = target.weight.full_tensor()[0]
        without = {name: value for name, value in states[1].items() if name != "weight0"}
        assert target.load_state_dict(without, strict=False).missing_keys == ["weight0"]
        assert_numbers(target, want | {"weight0": first})


def assert_numbers(layer, want):
    for stem in ("weight", "bias"):
        got = [p.full_tensor() if isinstance(p, DTensor) else p for p in layer._parameters_of(stem)]
        for e, expert in enumerate(got[0] if len(got) == 1 else got):
            assert torch.equal(expert, want[f"{stem}{e}"]), f"{stem}{e}"


def unlike(rank, device):
    """Fails on one process, which the tests below must see."""
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == WORLD
    assert rank == 0, "planted"


# The tests


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    both = Processes(tmp_path_factory.mktemp("processes"), WORLD)
    yield both
    both.finish()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("starved", ["no rank", "one rank", "all ranks"])
@pytest.mark.parametrize("block", [Moe, Linears, Mlp])
def test_data_parallel(processes, block, starved, static, checkpointed):
    processes.run(data_parallel, block, starved, static, checkpointed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("block", [Moe, Linears, Mlp])
def test_sharded(processes, block, checkpointed, dtype):
    processes.run(sharded, block, checkpointed, dtype)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("task", [deferred_in_ddp, deferred_in_fsdp])
def test_gradients_that_come_later(processes, task, kind):
    processes.run(task, kind)


def test_a_shard_is_no_weight(processes):
    processes.run(beside_the_root)


def test_a_sharded_weight_is_drawn(processes):
    processes.run(drawn_on_ranks)


def test_other_sharded_weights_are_drawn(processes):
    processes.run(drawn_one_by_one)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_sharded_weights_load_either_layout(processes, packed, same):
    processes.run(loaded_in_a_layout, packed, same)


def test_failures_are_seen(processes):
    with pytest.raises(pytest.fail.Exception, match="(?s)rank 1: .*planted"):
        processes.run(unlike)
