"""cadre.ExpertParallel: what one rank is refused is an error on all of them, and none waits for
another. The CPU, where every rank has the same libraries."""

from datetime import timedelta
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import WORLD
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import cadre

GLOO = []  # the group of all processes on the CPU, of this process


def group_on_cpu():
    if not GLOO:
        GLOO.append(dist.new_group(backend="gloo", timeout=timedelta(seconds=30)))
    return GLOO[0]


def by_window(**options):
    sizes = {"tokens": 4, "hidden": 6, "dtype": torch.float32, "factor": 4}
    return cadre.ExpertParallel(group_on_cpu(), 2, 2, route="window",
                                **sizes | {"device": "cpu"} | options)


def refused(rank, words, use, kind=ValueError):
    """`use` is refused on rank 1 with these words, and on all others since it is there; then all
    are at the same collective."""
    others = "rank 1 was given what does not fit, must be what fits: .*"
    with pytest.raises(kind if rank == 1 else ValueError, match=(
            words if rank == 1 else others + words)):
        use()
    seen = torch.ones(1)
    dist.all_reduce(seen, group=group_on_cpu())
    assert seen == group_on_cpu().size()


# What the processes run


def wanting_other_gradients(rank, device):
    """Rank 1 wants none of x, or of prob: what others want would lack that of its rows, or, where
    results are pushed, hold what an exchange before has left."""
    experts = torch.tensor([[0, 1], [1, 2], [0, 3], [1, 2]], dtype=torch.int32)
    words = "at another exchange than dispatch backward, exchange 4; the window is of no more use"
    for which in range(2):
        x, prob = (t.requires_grad_(rank != 1 or i != which)
                   for i, t in enumerate((draw(4, 6), torch.rand(4, 2))))
        ep = by_window()
        rows, row_prob, _, handle = ep.dispatch(x, experts, prob)
        out = ep.collect(rows * row_prob[:, None], handle)
        with pytest.raises(RuntimeError, match=words):
            out.sum().backward()
    moe = cadre.MoE(2 * WORLD, 6, 8, top_k=2, device="cpu", ep=by_window(), push=True)
    out, _ = moe(draw(4, 6).requires_grad_(rank != 1))
    with pytest.raises(RuntimeError, match=words):
        out.sum().backward()


def transformed(rank, device):
    """Transforms of torch.func are refused as of a layer without ranks: nobody asks where an x lies
    that has no memory."""
    moe = cadre.MoE(2 * WORLD, 6, 8, top_k=2, device="cpu", ep=by_window())
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: moe(x)[0].sum())(draw(4, 6))


def compiled_in_ddp(rank, device, route):
    """DDP that takes experts for the same on all ranks is refused in compiled code, also in code
    that was compiled before there was one; what DDP leaves alone goes on as one graph."""
    group, x = group_on_cpu(), draw(5, 8)

    def layer():
        ep = by_window(tokens=5, hidden=8) if route == "window" else group
        return cadre.MoE(2 * group.size(), 8, 16, top_k=2, device="cpu", ep=ep)

    def compiled(module, **options):
        torch.compiler.reset()
        return torch.compile(module, backend="aot_eager", **options)

    def in_place(module, **options):
        torch.compiler.reset()
        module.compile(backend="aot_eager", **options)
        return module

    def run_before(module):
        run = compiled(module)
        run(x)
        return run

    for around in (lambda m: DistributedDataParallel(compiled(m), process_group=group),
                   lambda m: compiled(DistributedDataParallel(m, process_group=group)),
                   lambda m: DistributedDataParallel(in_place(m), process_group=group),
                   lambda m: DistributedDataParallel(run_before(m), process_group=group)):
        with pytest.raises(ValueError, match="DistributedDataParallel keeps .*experts.w1 alike"):
            around(layer())(x)
    moe = layer()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        moe, [name for name, p in moe.named_parameters() if not getattr(p, "allreduce", True)])
    apart = DistributedDataParallel(moe, process_group=group)
    want = apart(x)[0].detach()
    in_place(moe, fullgraph=route == "window")
    out = apart(x)[0]
    out.sum().backward()
    assert torch.equal(out, want)
    with torch.compiler.set_stance("fail_on_recompile"):  # as checkpoints do while backward runs
        assert torch.equal(moe(x)[0], want)


def options_of_one(rank, device):
    """A device that is not there, and a limit that no clock has."""
    for given in ("nonsense", "cuda:99", "xpu", [], "mps"):
        refused(rank, r"device is .*, must be the CPU, or a CUDA device that is there",
                lambda: by_window(device=given if rank == 1 else "cpu"))
    for given in (1e17, 1e9, 10**400):
        refused(rank, r"limit_s is 1.*, must be a number of seconds, at most 315360000, 0 for no",
                lambda: by_window(limit_s=given if rank == 1 else 60.0))
    refused(rank, ".", lambda: by_window(x="\ud800" if rank == 1 else None), Exception)


def limits(rank, device):
    """A limit below a millisecond is one, too, and none beside 0, which is no limit."""
    with pytest.raises(ValueError, match="limit of rank 1 is 1 ms, must be that of rank 0: 0"):
        by_window(limit_s=0.0 if rank == 0 else 0.0004)


def memory_of_one(rank, device):
    """Addresses that no process has, and what raises when it is asked for them."""
    ep, ranks = by_window(), group_on_cpu().size()

    class Silent:
        @property
        def buffer_ptrs(self):
            raise NotImplementedError

    for given, kind, words in (
            ([2**70] * ranks, ValueError, f"memory is at {2**70}, must be at addresses of this pr"),
            (SimpleNamespace(buffer_ptrs=[1] * ranks, offset=2**63), ValueError, "memory is at"),
            (SimpleNamespace(buffer_ptrs=[1] * ranks, offset="0"), TypeError, "memory is a "),
            (Silent(), NotImplementedError, "NotImplementedError" if rank != 1 else "")):
        refused(rank, words, lambda: ep.adopt(given if rank == 1 else [4096] * ranks), kind)


def other_windows(rank, device):
    """Ranks that share a window beside ranks that make one, or share another of the same sizes; and
    ranks that have other windows adopt memory."""
    one, two = by_window(), by_window()
    again = by_window(share=one, layer=1)
    for use in (lambda: by_window(share=one if rank == 1 else None),
                lambda: by_window(share=None if rank == 1 else one),
                lambda: by_window(share=one if rank == 1 else two),
                lambda: (one if rank == 1 else two).adopt([4096] * group_on_cpu().size())):
        with pytest.raises(ValueError, match=(
                r"the window of rank 1 is (a new one|number \d+), must be that of rank 0, (a new "
                r"one|number \d+); all of them share the same one, or none")):
            use()
    x, prob = draw(4, 6), torch.rand(4, 2)
    experts = torch.tensor([[0, 1], [1, 2], [0, 3], [1, -1]], dtype=torch.int32)
    for ep in (by_window(share=again if rank == 1 else one, layer=2), two):
        rows, _, _, handle = ep.dispatch(x, experts, prob)
        assert torch.equal(ep.collect(rows, handle), x * (experts >= 0).sum(1, keepdim=True))


def tokens_in_the_window(rank, device):
    """As many as it has room for, and none."""
    ep = by_window()
    assert [list(ep.empty_tokens(tokens).shape) for tokens in (None, 4, 1, 0)] == [
        [4, 6], [4, 6], [1, 6], [0, 6]]
    for tokens in (5, 1000, -1):
        with pytest.raises(ValueError, match=(
                f"tokens is {tokens}, must be 0 to T, 4, those of the window")):
            ep.empty_tokens(tokens)
    for tokens, kind in ((True, "a bool"), (2.0, "a float"), ("2", "a str")):
        with pytest.raises(TypeError, match=f"tokens is {kind}, must be an int"):
            ep.empty_tokens(tokens)


def tensors_of_one(rank, device, options):
    """A rank whose tokens, choices or probabilities are no plain tensor."""
    ep = cadre.ExpertParallel(group_on_cpu(), 2, 2, **options)
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    mesh = DeviceMesh.from_group(alone, "cpu")
    plain = {"x": draw(4, 6), "experts": torch.tensor([[0, 1], [1, 2], [0, 3], [1, -1]]),
             "prob": torch.rand(4, 2)}

    def distributed(t):
        return DTensor.from_local(t, mesh, [Replicate()], run_check=False)

    kinds = ((torch.Tensor.to_sparse, ValueError, "layout torch.sparse_coo, must be torch.strided"),
             (torch.Tensor.to_sparse_csr, ValueError, "layout torch.sparse_csr, must be torch.str"),
             (distributed, TypeError, "is a DTensor, must be a plain tensor, of this rank's tok"))
    for name, (made, kind, words) in product(plain, kinds):
        given = plain | {name: made(plain[name])} if rank == 1 else plain
        with pytest.raises(kind if rank == 1 else RuntimeError, match=(
                f"{name} .*{words}" if rank == 1 else "rank 1 raised an error, must raise none")):
            ep.dispatch(**given)
    rows, _, _, handle = ep.dispatch(**plain)
    assert torch.equal(ep.collect(rows, handle),
                       plain["x"] * (plain["experts"] >= 0).sum(1, keepdim=True))


# The tests


@pytest.mark.parametrize("route", ["collective", "window"])
def test_ddp_around_compiled_experts(ranks, route):
    ranks.run(compiled_in_ddp, route)


def test_options_of_one_rank(ranks):
    ranks.run(options_of_one)


def test_windows_that_not_all_ranks_share(ranks):
    ranks.run(other_windows)


def test_limits_below_a_millisecond(ranks):
    ranks.run(limits)


def test_memory_of_one_rank(ranks):
    ranks.run(memory_of_one)


def test_tokens_in_the_window(ranks):
    ranks.run(tokens_in_the_window)


@pytest.mark.parametrize("options", [{"rows": "exact"}, {"rows": "exact", "cross": "token"}],
                         ids=["choices", "tokens"])
def test_tensors_of_one_rank(ranks, options):
    ranks.run(tensors_of_one, options)


def test_transforms(ranks):
    ranks.run(transformed)


def test_ranks_that_want_other_gradients(ranks):
    ranks.run(wanting_other_gradients)
