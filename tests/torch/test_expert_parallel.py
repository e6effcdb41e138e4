"""cadre.ExpertParallel: ranks that exchange rows have the bits of one process with all tokens. NCCL
where each rank has a GPU, else gloo on the CPU."""

import json
import pathlib
import random
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import (
    NAMES, WORLD, assert_same, counted, draw_case, group_of, mlp, one_process, parallel, part_of,
    rows_needed, same_bits)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cadre

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page  # noqa: E402

# What the processes run


def bits(rank, device, seeds):
    """Random routings, and capacities that half of them exceed."""
    for ranks in range(2, WORLD + 1):
        group_of(ranks)
    for seed in seeds:
        ranks = 2 + seed % (WORLD - 1)
        case = draw_case(seed, ranks, device)
        if rank >= ranks:
            continue
        top_k, needed = case.chosen.shape[1], rows_needed(case)
        rows = random.Random(seed).choice(["exact", max(1, max(needed) // 2), max(1, max(needed))])
        ep = cadre.ExpertParallel(group_of(ranks), case.experts, top_k, rows=rows, overflow="drop")
        got, handle = parallel(ep, case, rank)
        limit = None if rows == "exact" else rows
        assert_same(case, rank, got, one_process(case, limit), f"seed {seed}")
        beyond = [max(0, n - (limit or n)) for n in needed]
        assert handle.dropped.tolist() == beyond, f"seed {seed}"
        mine = case.of_rank(rank)[1]
        counts = [int((mine == e).sum()) for e in range(ranks * case.experts)]
        assert handle.tokens_per_expert.tolist() == counts


def overflowing(rank, device):
    """One row too many, at each capacity that says so: NaN on all ranks, then words, then well."""
    case = draw_case(11, WORLD, device, "one rank", torch.float32)
    case.chosen[:, 0] = case.chosen[0, 0]  # some expert has rows, and most have none
    top_k, needed = case.chosen.shape[1], rows_needed(case)
    worst, most = needed.index(max(needed)), max(case.tokens) * case.chosen.shape[1]
    factor = -(-100 * needed[worst] // most) / 100
    want = one_process(case)
    for room in ({"rows": needed[worst] - 1}, {"factor": (needed[worst] - 1.5) / most}):
        ep = cadre.ExpertParallel(dist.group.WORLD, case.experts, top_k, **room)
        for again in (ep.check, lambda: parallel(ep, case, rank)):
            ep.check()
            with counted() as moved:
                got, handle = parallel(ep, case, rank)
            assert not moved
            for name, numbers in zip(NAMES, got[:-1]):
                assert numbers.isnan().all(), f"{name} is not all NaN"
            assert [a.shape for a in got] == [b.shape for b in part_of(case, rank, want)]
            assert handle.dropped[worst] == 1 and handle.dropped.sum() == 1
            with pytest.raises(RuntimeError, match=(
                    rf"rows of rank {worst} are {needed[worst]}, must be at most "
                    rf"{needed[worst] - 1}, its capacity.*factor={factor} or rows={needed[worst]} "
                    r"fits \[expert_parallel E=")):
                again()
    for room in ({"rows": needed[worst]}, {"factor": factor}):
        ep = cadre.ExpertParallel(dist.group.WORLD, case.experts, top_k, **room)
        got, _ = parallel(ep, case, rank)
        assert_same(case, rank, got, want, str(room))
        ep.check()


def two_ranks_cannot_overflow(rank, device):
    group = group_of(2)
    if rank >= 2:
        return
    for seed in range(8):
        case = draw_case(seed, 2, device, "one expert")
        case.tokens = [case.x.shape[0], 0] if seed % 2 else case.tokens
        ep = cadre.ExpertParallel(group, case.experts, case.chosen.shape[1])
        assert_same(case, rank, parallel(ep, case, rank)[0], one_process(case), f"seed {seed}")
        ep.check()


def exchanges_of_gradients(rank, device):
    """Forward moves rows there and back, and probabilities there; backward what has a gradient."""
    case = draw_case(5, WORLD, device, "any", torch.float32)
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
    ep = cadre.ExpertParallel(dist.group.WORLD, case.experts, chosen.shape[1])

    def exchanges(x, prob):
        with counted() as moved:
            rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
            assert row_prob.shape == (0 if prob is None else handle.rows,)
            assert rows.requires_grad == (x.requires_grad and torch.is_grad_enabled())
            y = mlp(rows, offsets, None if prob is None else row_prob, w1, w2)
            out = ep.collect(y, handle)
            if out.requires_grad:
                out.backward(dout)
        return len(moved)

    assert exchanges(x, prob) == 3 + 3  # dout, dx, dprob
    assert exchanges(x.detach(), prob) == 3 + 2
    assert exchanges(x, prob.detach()) == 3 + 2
    assert exchanges(x.detach(), prob.detach()) == 3 + 1
    assert exchanges(x, None) == 2 + 2
    with torch.no_grad():
        assert exchanges(x, prob) == 3


def compiled(rank, device):
    """A compiled step, and one that is checkpointed, exchange as often as an eager one, which
    computes its forward once or twice; the bits are the same."""
    group = group_of(2)
    if rank >= 2:
        return
    ep = cadre.ExpertParallel(group, 2, 2)

    def step(x, chosen, prob, w1, w2):
        x = x * 2
        rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
        y = mlp(rows, offsets, row_prob, w1, w2)
        unused = ep.collect(rows * 3, handle)  # noqa: F841  results that nobody reads are no reason
        return (x + ep.collect(y, handle)).sin()

    def again(*given):
        return checkpoint(step, *given, use_reentrant=False)

    run = torch.compile(step, backend="aot_eager", dynamic=True)
    for seed in range(3):
        case = draw_case(seed, 2, device, "any", torch.float32, experts=2, top_k=2)
        x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
        results, order = [], []
        for call in (step, run, again, torch.compile(again, backend="aot_eager")):
            with counted() as moved:
                out = call(x, chosen, prob, w1, w2)
                grads = torch.autograd.grad(out, (x, prob, w1, w2), dout)
            results.append((out, *grads))
            order.append(moved)
        for other in results[1:]:
            assert all(map(same_bits, other, results[0]))
        assert len(order[0]) == 4 + 3
        assert order[1] == order[0]
        assert order[3] == order[2] and len(order[2]) == 4 + 4 + 3


USES = """
cadre.ExpertParallel(2, 2, 2)
cadre.ExpertParallel(mesh, 2, 2)
cadre.ExpertParallel(group, 0, 2)
cadre.ExpertParallel(group, 2, 2, rows="many")
cadre.ExpertParallel(group, 2, 2, rows=8, factor=2)
cadre.ExpertParallel(group, 2, 2, factor="2")
cadre.ExpertParallel(group, 2, 2, factor=-1)
cadre.ExpertParallel(group, 2, 2, factor=1e300)
cadre.ExpertParallel(group, 2, 2, rows=2**31)
cadre.ExpertParallel(group, 2, 2, block=2**30)
cadre.ExpertParallel(group, 2, 2, overflow="wait")
cadre.ExpertParallel(group, 2, 2, route="ring")
cadre.ExpertParallel(group, 2, 2, cross="row")
cadre.ExpertParallel(group, 2, 2, block=4, cross="token")
cadre.ExpertParallel(group, 2, 2, route="window", cross="choice")
cadre.ExpertParallel(group, 2, 2, cross="token" if rank == 1 else "auto")
cadre.ExpertParallel(group, 2, top_k=0 if rank == 1 else 2)
cadre.ExpertParallel(group, 2, top_k=2 + rank)
ep.dispatch(x[0], experts, prob)
ep.dispatch(x.double(), experts, prob)
ep.dispatch(x.to("meta"), experts, prob)
ep.dispatch(x.to_sparse(), experts, prob)
ep.dispatch(replicated(x, ep), experts, prob)
ep.dispatch(x, None, prob)
ep.dispatch(x, experts.float(), prob)
ep.dispatch(x, experts[:, :1], prob)
ep.dispatch(x, experts, prob[1:])
ep.dispatch(x, experts, prob.double())
ep.dispatch(x, experts, prob.to("meta"))
capturing(ep.dispatch, x, experts, prob)
ep.dispatch(x[0] if rank == 1 else x, experts, prob)
ep.dispatch(x[:, :4 + rank], experts, prob)
ep.dispatch(x, experts, prob.requires_grad_(rank == 1))
ep.collect(None, ep.dispatch(x, experts, prob).handle)
ep.collect(x[1:], ep.dispatch(x, experts, prob).handle)
ep.collect(x, ep.dispatch(x, experts, prob))
cadre.MoE(5, 6, 8, top_k=2, device="cpu", ep=group)
cadre.MoE(4, 6, 8, top_k=1, device="cpu", ep=ep)
sharded(cadre.MoE(4, 6, 8, top_k=2, device="cpu", ep=ep))
DistributedDataParallel(cadre.MoE(4, 6, 8, top_k=2, device="cpu", ep=ep), process_group=group)(x)
few.dispatch(x, experts, prob), few.check()
few.dispatch(x, experts, prob), few.dispatch(x, experts, prob)
"""


def answers(rank, device, path):
    """Rank 0 writes what each use answers there; each is an error on all ranks, and none keeps the
    next from working. All of them on the CPU, as the page has it."""
    group = dist.new_group([0, 1], backend="gloo")
    mesh, device = init_device_mesh(device.type, (WORLD, 1)), torch.device("cpu")
    if rank >= 2:
        return
    ep = cadre.ExpertParallel(group, 2, 2)
    few = cadre.ExpertParallel(group, 2, 2, rows=6)
    given = []
    for use in USES.strip().splitlines():
        x, prob = draw(4, 6, device=device), torch.rand(4, 2).to(device)
        experts = torch.tensor([[0, 1], [1, 2], [0, 3], [1, -1]], device=device)
        with pytest.raises(Exception) as error:
            eval(use, globals() | locals())
        given.append((use, f"{error.type.__name__}: {str(error.value).splitlines()[0]}"))
        rows, _, _, handle = ep.dispatch(x, experts, prob.detach())
        assert torch.equal(ep.collect(rows, handle), x * (experts >= 0).sum(1, keepdim=True))
    if rank == 0:
        path.write_text(json.dumps(given))


def sharded(moe):
    """Experts that FSDP2 shards over both ranks."""
    fully_shard(moe.experts, mesh=DeviceMesh.from_group(moe.ep.group, "cpu"))
    return moe


def replicated(x, ep):
    mesh = DeviceMesh.from_group(ep.group, "cpu")
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def capturing(run, *given):
    with (mock.patch.object(torch.cuda, "is_initialized", lambda: True),
          mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)):
        return run(*given)


def one_rank(rank, device):
    case = draw_case(3, 1, device, "any")
    ep = cadre.ExpertParallel(dist.new_group([rank], use_local_synchronization=True), case.experts,
                              case.chosen.shape[1])
    with counted() as moved:
        got, _ = parallel(ep, case, 0)
    assert_same(case, 0, got, one_process(case), "one rank")
    assert not moved


def all_to_one_rank(rank, device):
    """A layer that is given a group has no capacity."""
    torch.manual_seed(4)
    whole = cadre.MoE(WORLD * 2, 16, 24, top_k=2, device=device)
    own = cadre.MoE(WORLD * 2, 16, 24, top_k=2, device=device, ep=dist.group.WORLD)
    with torch.no_grad():
        whole.router.zero_()[:2, 0] = 1.0
    own.load_state_dict(whole.state_dict())
    x = draw(WORLD * 5, 16, device=device).abs()
    torch.testing.assert_close(own(x[5 * rank:][:5])[0], whole(x)[0][5 * rank:][:5])
    own.ep.check()


# The tests


def test_bits_of_one_process(ranks):
    ranks.run(bits, range(100))


def test_one_rank_is_the_plain_layer(ranks):
    ranks.run(one_rank)


def test_overflow_is_nan_on_all_ranks_and_said_once(ranks):
    ranks.run(overflowing)


def test_two_ranks_cannot_overflow(ranks):
    ranks.run(two_ranks_cannot_overflow)


def test_all_tokens_of_all_ranks_may_go_to_one(ranks):
    ranks.run(all_to_one_rank)


def test_what_has_no_gradient_is_not_moved(ranks):
    ranks.run(exchanges_of_gradients)


def test_compiled_and_checkpointed_steps_exchange_as_eager_ones(ranks):
    ranks.run(compiled)


def test_errors(ranks, tmp_path):
    ranks.run(answers, tmp_path / "answers")
    errors_page.settle("door_expert_parallel", json.loads((tmp_path / "answers").read_text()))
