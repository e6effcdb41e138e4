"""cadre.MoE whose experts are on several ranks: its bits, DDP and FSDP2 around it, its state."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import WORLD, counted, group_of, same_bits
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cadre

H, F, E, TOP_K = 32, 48, 12, 2  # E of all ranks
TOKENS = [9, 0, 5, 14][:WORLD]


# What the processes run


def layer(device, dtype=torch.float32, ep=None, **options):
    """Of one seed on all ranks."""
    torch.manual_seed(4)
    return cadre.MoE(E, H, F, top_k=TOP_K, normalize=True, device=device, dtype=dtype, ep=ep,
                     **options)


def scaled(whole):
    """Weights that make the experts differ more than roundings do."""
    with torch.no_grad():
        for p in whole.parameters():
            p.copy_(draw(*p.shape) * 0.3)
    return whole


def tokens_of_all(device, dtype, seed=0):
    torch.manual_seed(50 + seed)
    return (draw(sum(TOKENS), H, dtype=dtype, device=device),
            draw(sum(TOKENS), H, dtype=dtype, device=device))


def part(t, rank):
    return t[sum(TOKENS[:rank]):sum(TOKENS[:rank + 1])]


def experts_of(t, rank):
    return t.tensor_split(WORLD)[rank]


def one_layer(rank, device, dtype, bias):
    """A copy of a layer of all ranks equals one of one process, whose state it loads. Tokens in
    bf16 have the same bits; the router's product of fp32 tokens is torch's."""
    whole = scaled(layer(device, dtype, bias=bias))
    own = layer(device, dtype, dist.group.WORLD, bias=bias)
    own.load_state_dict(whole.state_dict())
    own = copy.deepcopy(own)
    x, dout = tokens_of_all(device, dtype)
    mine, all_of_them = part(x, rank).clone().requires_grad_(), x.clone().requires_grad_()
    out, router = own(mine)
    out.backward(part(dout, rank))
    want, decided = whole(all_of_them)
    want.backward(dout)

    def assert_same(got, wanted):
        if dtype == torch.bfloat16:
            assert same_bits(got, wanted)
        else:
            torch.testing.assert_close(got, wanted)

    assert_same(out, part(want, rank))
    assert_same(mine.grad, part(all_of_them.grad, rank))
    for p, w in zip(own.experts.parameters(), whole.experts.parameters()):
        assert_same(p.grad, experts_of(w.grad, rank))
        assert p.allreduce is False and p.grad.abs().max() > 0
    router_grad = own.router.grad.float()
    dist.all_reduce(router_grad)
    torch.testing.assert_close(router_grad, whole.router.grad.float(), rtol=2e-2,
                               atol=2e-2 * float(router_grad.abs().max()))
    assert getattr(own.router, "allreduce", True)
    assert all(p.allreduce is False for p in copy.deepcopy(own.experts).parameters())
    counts = router.tokens_per_expert.clone()
    dist.all_reduce(counts)
    assert counts.tolist() == decided.tokens_per_expert.tolist()
    assert router.load_balancing_loss().isfinite()


def layer_with_a_shared_expert(rank, device):
    """All ranks have it whole, and add its result to their sums."""
    options = dict(shared_features=24, shared_gate=True)
    whole = scaled(layer(device, **options))
    own = layer(device, ep=dist.group.WORLD, **options)
    own.load_state_dict(whole.state_dict())
    x, dout = tokens_of_all(device, torch.float32)
    mine, all_of_them = part(x, rank).clone().requires_grad_(), x.clone().requires_grad_()
    out, want = own(mine)[0], whole(all_of_them)[0]
    out.backward(part(dout, rank))
    want.backward(dout)
    torch.testing.assert_close(out, part(want, rank))
    torch.testing.assert_close(mine.grad, part(all_of_them.grad, rank))
    for name in ("shared_w1", "shared_w2", "shared_gate"):
        own_grad = own.get_parameter(name).grad
        dist.all_reduce(own_grad)
        torch.testing.assert_close(own_grad, whole.get_parameter(name).grad)


class Dispatches:
    """What became of the rows that each dispatch of a layer gave."""

    def __init__(self, ep):
        self.rows = []
        within, again = ep._dispatch_within, ep._dispatch_again

        def recorded(rows):
            self.rows.append(StorageWeakRef(rows.untyped_storage()))
            return rows

        ep._dispatch_within = lambda *given: recorded((made := within(*given)).rows) is None or made
        ep._dispatch_again = lambda *given: recorded(again(*given))

    def alive(self):
        return [not rows.expired() for rows in self.rows]


def pushed_results(rank, device):
    """Experts push their results where nobody else sees them, and then only; every way the bits are
    those of results that are fetched. No other tensor may stand for what is pushed."""
    many = 4096  # tokens, since exchanges of few fetch their rows
    ep = cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K, route="window", tokens=many,
                              hidden=H, dtype=torch.bfloat16, device=device)
    said, within = [], ep._window.name_within
    ep._window.name_within = lambda can: said.append((name := within(can)).count("push")) or name
    x, dout = (part(t, rank) for t in tokens_of_all(device, torch.bfloat16))
    bias_is_pushed = device.type == "cpu"  # no kernel of Hopper adds one to rows that it scatters

    def step(change=lambda own: None, **options):
        own = layer(device, torch.bfloat16, ep, **options)
        change(own)
        leaf = x.clone().requires_grad_()
        out, _ = own(leaf)
        out.backward(dout)
        return [out.detach(), leaf.grad, *(p.grad for p in own.parameters() if p.grad is not None)]

    def fetched(own):
        own.experts._can_push = lambda *given: False

    def watched(own):
        own.experts.register_forward_hook(lambda module, given, made: made * 1)

    for options in ({}, dict(bias=True), dict(dispatch_again=True), dict(activation="silu")):
        results = [step(change, **options) for change in (lambda own: None, fetched, watched)]
        assert all(same_bits(a, b) for made in results[1:] for a, b in zip(results[0], made))
        assert said == ["bias" not in options or bias_is_pushed, 0, 0]
        said.clear()
    with pytest.raises(
            RuntimeError, match="push is True, must be None or False; these experts cannot push"):
        step(watched, push=True)

    def replaced(own):
        forward = own.experts.forward
        own.experts.forward = lambda *given: forward(*given) * 1

    def at_an_odd_place(own):
        w = own.experts.w1
        w.data = torch.empty(w.numel() + 1, dtype=w.dtype, device=device)[1:].copy_(
            w.data.flatten()).view(w.shape)

    want = step(push=True)
    assert all(map(same_bits, want, step(push=False)))
    for change in (replaced, at_an_odd_place):
        assert all(map(same_bits, want, step(change)))
    assert said == [1, 0, 0, 0]
    own, kept = layer(device, torch.bfloat16, ep), x.clone().requires_grad_()
    out = checkpoint(lambda t: own(t)[0], kept, use_reentrant=False,
                     context_fn=cadre.saved_exchanges)
    out.backward(dout)
    assert said[4:] == [0, 0] and all(map(same_bits, want, [out.detach(), kept.grad]))
    with torch.inference_mode():
        fresh = cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K, route="window",
                                     share=ep)
    own = layer(device, torch.bfloat16, fresh)
    own(x)[0].backward(dout)
    assert same_bits(own.router.grad, want[2])
    mxfp8 = [step(change, recipe="mxfp8") for change in (lambda own: None, fetched)]
    assert all(map(same_bits, *mxfp8))
    own = layer(device, torch.bfloat16, ep)
    own.experts._can_push = lambda *given: True
    own.experts.register_forward_hook(lambda module, given, made: made * 1)
    with pytest.raises(ValueError, match="y is a tensor of its own, must be what the experts"):
        own(x)
    ep.check()


def dispatched_again(rank, device, route, recipe, reads_rows, to_one_rank):
    """Rows that are sent again in backward: the bits of rows that are kept, of which there are
    none between forward and backward; the same of ranks without rows, and of a second backward."""
    options = dict(route=route)
    if route == "window":
        options |= dict(tokens=max(TOKENS), hidden=H, dtype=torch.bfloat16, device=device)
    ep = cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K, **options)
    dispatches = Dispatches(ep)
    x, dout = (part(t, rank) for t in tokens_of_all(device, torch.bfloat16))
    x = x.abs() if to_one_rank else x
    results = []
    for again in (False, True):
        own = layer(device, torch.bfloat16, ep, bias=True, dispatch_again=again, recipe=recipe)
        if to_one_rank:
            own.router.data[E // WORLD:] = -1
        dispatches.rows.clear()
        leaf = x.clone().requires_grad_()
        out, decided = own(leaf)
        assert not to_one_rank or bool((decided.experts < E // WORLD).all())
        sent_again = again and reads_rows
        assert dispatches.alive() == [reads_rows and not again]
        out.backward(dout, retain_graph=True)
        first = leaf.grad.clone()
        leaf.grad = None
        assert dispatches.alive() == [reads_rows and not again] + [False] * sent_again
        out.backward(dout)
        assert len(dispatches.rows) == 1 + 2 * sent_again
        assert same_bits(first, leaf.grad)
        results.append([out.detach(), first, *(p.grad for p in own.parameters())])
    assert all(map(same_bits, *results))


def dispatched_again_where_something_changed(rank, device):
    """In place since forward: weights, or the tokens, which autograd keeps for nothing else here.
    Frozen experts want no rows."""
    ep = cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K)
    dispatches = Dispatches(ep)
    x, dout = (part(t, rank) for t in tokens_of_all(device, torch.float32))
    own = layer(device, ep=ep, dispatch_again=True)
    own.router.requires_grad_(False)
    for change in (lambda h: own.experts.w2.mul_(2), lambda h: h.mul_(2)):
        h = x * 1
        out, _ = own(h)
        with torch.no_grad():
            change(h)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            out.backward(dout)
    own.experts.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    dispatches.rows.clear()
    own(leaf)[0].backward(dout)
    assert len(dispatches.rows) == 1 and own.experts.w1.grad is None


def dispatched_again_within(rank, device, around):
    """Autocast, a checkpoint, a hook on the experts: what is kept and dispatched is as without."""
    ep = cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K)
    dispatches = Dispatches(ep)
    x, dout = (part(t, rank) for t in tokens_of_all(device, torch.float32))
    results = []
    for again in (False, True):
        own = layer(device, ep=ep, dispatch_again=again)
        seen, kept = [], []
        own.experts.register_forward_hook(lambda *_: seen.append(1))
        leaf = x.clone().requires_grad_()
        dispatches.rows.clear()
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            if around == "checkpoint":
                out = checkpoint(lambda t: own(t)[0], leaf, use_reentrant=False)
            else:
                with torch.autocast(device.type, torch.bfloat16, enabled=around == "autocast"):
                    out = own(leaf)[0]
        if around == "checkpoint":
            assert len(kept) < 3  # what it needs to run again
        out.backward(dout.to(out.dtype))
        assert len(seen) == 1 + (around == "checkpoint")
        assert len(dispatches.rows) == len(seen) + again
        results.append([out.detach(), leaf.grad, *(p.grad for p in own.parameters())])
    assert all(map(same_bits, *results))


def dispatched_again_after_an_overflow(rank, device):
    """Gradients are NaN, and the next dispatch says it once, as without."""
    ep = cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K, rows=2)
    x, dout = (part(t, rank) for t in tokens_of_all(device, torch.float32))
    own = layer(device, ep=ep, dispatch_again=True)
    out, _ = own(x)
    out.backward(dout)
    assert own.experts.w1.grad.isnan().all()
    with pytest.raises(RuntimeError, match="must be at most"):
        ep.check()
    ep.check()


def compiled_layer(rank, device):
    group = group_of(2)
    if rank >= 2:
        return
    own = scaled(layer(device, ep=group))
    run = torch.compile(own, backend="aot_eager", dynamic=True)
    for seed in range(3):
        x, dout = (part(t, rank) for t in tokens_of_all(device, torch.float32, seed))
        results = []
        for call in (own, run):
            own.zero_grad()
            leaf = x.clone().requires_grad_()
            with counted() as moved:
                out, _ = call(leaf)
                out.backward(dout)
            results.append((moved, out.detach(), leaf.grad, own.experts.w1.grad.clone()))
        assert len(results[0][0]) == 6 and results[0][0] == results[1][0]
        assert all(map(same_bits, results[0][1:], results[1][1:]))


def beginnings(rank, device):
    """All ranks seed alike: one router, and experts of their own."""
    own = layer(device, ep=dist.group.WORLD)
    weights = [torch.empty_like(own.experts.w1) for _ in range(WORLD)]
    for again in range(2):
        dist.all_gather(weights, own.experts.w1.detach())
        assert not any(torch.equal(weights[0], w) for w in weights[1:])
        routers = [torch.empty_like(own.router) for _ in range(WORLD)]
        dist.all_gather(routers, own.router.detach())
        assert all(torch.equal(routers[0], r) for r in routers)
        own.reset_parameters()
    on_meta = cadre.MoE(E, H, F, top_k=TOP_K, device="meta", ep=dist.group.WORLD)
    on_meta.to_empty(device=device)
    assert all(p.allreduce is False for p in on_meta.experts.parameters())


def reseeding(rank, device):
    """torch.manual_seed would seed every GPU, also one that is used later."""
    own = layer(device, ep=dist.group.WORLD)
    before = own.experts.w1.detach().clone()
    with mock.patch.object(torch.cuda, "manual_seed_all") as seed_all:
        own.reset_parameters()
    assert not seed_all.called and not torch.equal(own.experts.w1, before)


class Checkpointed(nn.Sequential):
    """Its layer runs again in backward."""

    def forward(self, x):
        return checkpoint(self[0], x, use_reentrant=False)


def data_parallel(rank, device, around):
    """DDP leaves the experts alone; their gradients are divided as it divides the others."""
    whole = scaled(layer(device))
    own = around(layer(device, ep=dist.group.WORLD))
    own[0].load_state_dict(whole.state_dict())
    apart = [name for name, p in own.named_parameters() if not getattr(p, "allreduce", True)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(own, apart)
    parallel = DistributedDataParallel(own, device_ids=[rank] if device.type == "cuda" else None)
    for step in range(3):
        x, dout = tokens_of_all(device, torch.float32, step)
        parallel(part(x, rank))[0].backward(part(dout, rank))
        whole(x)[0].backward(dout / WORLD)
        with torch.no_grad():
            for p in own[0].experts.parameters():
                p.grad /= WORLD
            for (name, p), w in zip(own[0].named_parameters(), whole.parameters()):
                want = experts_of(w.grad, rank) if name.startswith("experts") else w.grad
                torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-4)
                p -= 0.1 * p.grad
            for w in whole.parameters():
                w -= 0.1 * w.grad
        parallel.zero_grad()
        whole.zero_grad()


def alike_on_replicas(rank, device):
    """DDP over replicas alone may keep experts alike; over all ranks it may not."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicas", "ep"))
    own = layer(device, ep=mesh["ep"])
    x = tokens_of_all(device, torch.float32)[0][:6]
    on = [rank] if device.type == "cuda" else None
    parallel = DistributedDataParallel(own, on, process_group=mesh["replicas"].get_group())
    parallel(x)[0].square().sum().backward()
    grads = [torch.empty_like(own.experts.w1) for _ in range(2)]
    dist.all_gather(grads, own.experts.w1.grad, group=mesh["replicas"].get_group())
    assert torch.equal(*grads) and grads[0].abs().max() > 0
    with pytest.raises(ValueError, match="keeps experts.w1 alike on ranks .0, 1, 2, 3., must leav"):
        DistributedDataParallel(own, on)(x)


def sharded_over_replicas(rank, device):
    """Two replicas of experts on two ranks each: FSDP2 takes the mean over the replicas."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicas", "ep"))
    plain = scaled(layer(device, ep=mesh["ep"]))
    own = copy.deepcopy(plain)
    fully_shard(own.experts, mesh=mesh["replicas"])
    x, dout = (part(t, rank) for t in tokens_of_all(device, torch.float32))
    out, _ = own(x)
    out.backward(dout)
    want, _ = plain(x)
    want.backward(dout)
    assert same_bits(out, want)
    for p, w in zip(own.experts.parameters(), plain.experts.parameters()):
        mean = w.grad.clone()
        dist.all_reduce(mean, group=mesh["replicas"].get_group())
        torch.testing.assert_close(p.grad.full_tensor(), mean / 2)


def resharded(rank, device, folder):
    """A checkpoint of two ranks loads onto one, onto all, and back onto two, with the same bits."""
    groups = {ranks: group_of(ranks) for ranks in (1, 2, WORLD)}
    want = scaled(layer(device, bias=True))
    weights = {name: p.detach() for name, p in want.named_parameters()}
    before = folder / "whole"
    if rank == 0:
        dcp.save({"model": want.state_dict()}, checkpoint_id=before, process_group=groups[1])
    dist.barrier()
    for ranks in (2, WORLD, 1, 2):
        if rank < ranks:
            own = layer(device, ep=groups[ranks], bias=True)
            state = {"model": own.state_dict()}
            dcp.load(state, checkpoint_id=before, process_group=groups[ranks])
            own.load_state_dict(state["model"])
            for name, p in own.named_parameters():
                w = weights[name]
                w = w.tensor_split(ranks)[rank] if name.startswith("experts") else w
                assert same_bits(p, w), f"{name} at {ranks} ranks"
            before = folder / f"of_{ranks}"
            dcp.save({"model": own.state_dict()}, checkpoint_id=before,
                     process_group=groups[ranks])
        before = folder / f"of_{ranks}"
        dist.barrier()
    if rank == 0:
        state = {"model": scaled(layer(device, bias=True)).state_dict()}
        dcp.load(state, checkpoint_id=before, process_group=groups[1])
        assert all(same_bits(state["model"][name], w) for name, w in weights.items())


# The tests


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_all_ranks(ranks, dtype, bias):
    ranks.run(one_layer, dtype, bias)


def test_a_shared_expert_on_all_ranks(ranks):
    ranks.run(layer_with_a_shared_expert)


def test_results_are_pushed(ranks):
    ranks.run(pushed_results)


@pytest.mark.parametrize("recipe, reads_rows", [(None, True), ("mxfp8", False)])
@pytest.mark.parametrize("route", ["collective", "window"])
@pytest.mark.parametrize("to_one_rank", [False, True])
def test_rows_that_are_dispatched_again(ranks, route, recipe, reads_rows, to_one_rank):
    ranks.run(dispatched_again, route, recipe, reads_rows, to_one_rank)


def test_rows_are_dispatched_again_of_what_did_not_change(ranks):
    ranks.run(dispatched_again_where_something_changed)


@pytest.mark.parametrize("around", ["nothing", "autocast", "checkpoint"])
def test_rows_are_dispatched_again_within(ranks, around):
    ranks.run(dispatched_again_within, around)


def test_rows_are_dispatched_again_after_an_overflow(ranks):
    ranks.run(dispatched_again_after_an_overflow)


def test_a_compiled_layer_exchanges_as_an_eager_one(ranks):
    ranks.run(compiled_layer)


def test_how_ranks_begin(ranks):
    ranks.run(beginnings)


def test_new_weights_seed_no_other_device(ranks):
    ranks.run(reseeding)


@pytest.mark.parametrize("around", [nn.Sequential, Checkpointed])
def test_data_parallel(ranks, around):
    ranks.run(data_parallel, around)


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
def test_data_parallel_over_replicas(ranks):
    ranks.run(alike_on_replicas)


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
def test_sharded_over_replicas(ranks):
    ranks.run(sharded_over_replicas)


def test_checkpoints_of_other_numbers_of_ranks(ranks, tmp_path):
    ranks.run(resharded, tmp_path)
