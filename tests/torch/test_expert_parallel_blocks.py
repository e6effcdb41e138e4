"""cadre.ExpertParallel(block=): ranks exchange blocks of a size, without a look at their counts."""

import json
import pathlib
import random
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import (
    H, NAMES, WORLD, answers_to, assert_same, draw_case, group_of, mlp, one_process, parallel,
    rows_needed, same_bits)

import cadre

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page  # noqa: E402


def choices_of(case):
    """(rank of the expert, expert, rank of the token, number) of each choice, as rows stand."""
    top_k = case.chosen.shape[1]
    owner = [rank for rank, tokens in enumerate(case.tokens) for _ in range(tokens * top_k)]
    experts = case.chosen.flatten().tolist()
    return sorted((e // case.experts, e, owner[i], i) for i, e in enumerate(experts)
                  if 0 <= e < case.experts * case.ranks)


def largest_block(case):
    """Most choices of one rank's tokens at another."""
    pairs = [(to, source) for to, _, source, _ in choices_of(case)]
    return max(map(pairs.count, set(pairs)), default=1)


def without_late(case, block, rows):
    """The case without choices beyond a block, then without those whose row would be `rows` or
    more; and how many were left out at each rank."""
    sent, here, late = {}, [0] * case.ranks, [0] * case.ranks
    chosen = case.chosen.flatten().clone()
    for to, _, source, choice in choices_of(case):
        sent[to, source] = sent.get((to, source), 0) + 1
        fits = sent[to, source] <= block
        here[to] += fits
        if not fits or here[to] > rows:
            chosen[choice], late[to] = -1, late[to] + 1
    case.chosen = chosen.view_as(case.chosen)
    return late


# What the processes run


def bits(rank, device, seeds):
    """Random routings; blocks, or rows, that half of them exceed."""
    for ranks in range(1, WORLD + 1):
        group_of(ranks)
    for seed in seeds:
        ranks = 1 + seed % WORLD
        case, chance = draw_case(seed, ranks, device), random.Random(seed)
        if rank >= ranks:
            continue
        most = largest_block(case)
        block = chance.choice([most, max(1, most // 2), most + 3])
        rows = chance.choice([None, max(1, max(rows_needed(case)) // 2)])
        ep = cadre.ExpertParallel(group_of(ranks), case.experts, case.chosen.shape[1], block=block,
                                  rows=rows, overflow="drop")
        got, handle = parallel(ep, case, rank)
        mine = case.of_rank(rank)[1]
        late = without_late(case, block, rows or ranks * block)
        assert_same(case, rank, got, one_process(case), f"seed {seed}")
        assert handle.dropped.tolist() == late, f"seed {seed}"
        assert handle.rows == (rows or ranks * block)
        counts = [int((mine == e).sum()) for e in range(ranks * case.experts)]
        assert handle.tokens_per_expert.tolist() == counts


def overflowing(rank, device):
    """One row too many of a pair, or of a rank: NaN on all ranks, then words, then well."""
    case = draw_case(11, WORLD, device, "one rank", torch.float32)
    needed, block = rows_needed(case), largest_block(case)
    worst, most = needed.index(max(needed)), max(needed)
    for room in ({"block": block - 1}, {"block": block, "rows": most - 1}):
        ep = cadre.ExpertParallel(None, case.experts, case.chosen.shape[1], **room)
        got, handle = parallel(ep, case, rank)
        for name, numbers in zip(NAMES[:3], got):
            assert numbers.isnan().all(), f"{name} is not all NaN"
        assert handle.dropped[worst] >= 1
        parallel(ep, case, rank)  # noted once
        with pytest.raises(RuntimeError, match=(
                rf"rows of rank {worst} are {most}, must be at most {handle.rows}, and those "
                rf"from one rank to another {block}, at most {room['block']}, the block; .*"
                rf"rows={most} and block={block} fit")):
            ep.check()
        ep.check()
    ep = cadre.ExpertParallel(None, case.experts, case.chosen.shape[1], block=block, rows=most)
    assert_same(case, rank, parallel(ep, case, rank)[0], one_process(case), "enough rows")
    ep.check()


def rows_are_whole(rank, device):
    """Beyond offsets[E] they are zero, and nobody reads what stands there in results."""
    case = draw_case(3, WORLD, device, "any", torch.float32, 3, 2)
    x, chosen, prob, *_ = case.of_rank(rank)
    ep = cadre.ExpertParallel(None, 3, 2, block=60)
    rows, row_prob, offsets, handle = ep.dispatch(x.detach(), chosen, prob.detach())
    used = int(offsets[-1])
    assert rows.shape[0] == row_prob.shape[0] == handle.rows == 60 * WORLD
    assert not rows[used:].any() and not row_prob[used:].any()
    y = rows.clone()
    want = ep.collect(y, handle)
    y[used:] = torch.nan
    assert same_bits(ep.collect(y, handle), want)


def layers(rank, device):
    """A whole layer has the bits of one that looks at its counts, with rows kept or sent again."""
    torch.manual_seed(5)
    tokens = [9, 0, 30, 2][rank % 4]
    x, dout = draw(tokens, H, device=device), draw(tokens, H, device=device)
    want = None
    for options in ({}, {"block": 90}):
        for again in (False, True):
            ep = cadre.ExpertParallel(None, 2, 3, **options)
            torch.manual_seed(7)
            moe = cadre.MoE(2 * WORLD, H, 8, top_k=3, device=device, ep=ep, dispatch_again=again)
            leaf = x.clone().requires_grad_()
            out, _ = moe(leaf)
            out.backward(dout)
            got = [out.detach(), leaf.grad, *(p.grad for p in moe.parameters())]
            want = want or got
            assert all(map(same_bits, got, want)), options


def replayed(rank, device):
    """A graph has the whole exchange, and is replayed with other choices."""
    if device.type != "cuda":
        return
    case = draw_case(8, WORLD, device, "any", torch.float32, 2, 2)
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
    ep = cadre.ExpertParallel(None, 2, 2, block=60)

    def step():
        rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
        out = ep.collect(mlp(rows, offsets, row_prob, w1, w2), handle)
        return out.detach(), *torch.autograd.grad(out, (x, prob, w1, w2), dout), offsets

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for seed in range(5):
        torch.manual_seed(seed)
        case.chosen.copy_(torch.randint_like(case.chosen, 0, 2 * WORLD))
        graph.replay()
        assert_same(case, rank, got, one_process(case), f"seed {seed}")


def first_in_a_graph(rank, device):
    """What it needs beyond the graph must be there before."""
    ep = cadre.ExpertParallel(None, 2, 2, block=8)
    x, experts = draw(3, H, device=device), torch.zeros(3, 2, dtype=torch.int32, device=device)
    with mock.patch("torch.cuda.is_initialized", return_value=True), \
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=True), \
            pytest.raises(RuntimeError, match="dispatch: a CUDA graph is being captured, must not "
                          "be by the first dispatch with block; it makes what notes an overflow"):
        ep.dispatch(x, experts)


USES = """
cadre.ExpertParallel(group, 2, 2, block=0)
cadre.ExpertParallel(group, 2, 2, block=4.0)
cadre.ExpertParallel(group, 2, 2, block=4, rows="exact")
cadre.ExpertParallel(group, 2, 2, block=4, factor=1)
cadre.ExpertParallel(group, 2, 2, block=4, route="window")
cadre.ExpertParallel(group, 2, 2, block=4 + rank)
tight.dispatch(x, experts), tight.check()
"""


def answers(rank, device, path):
    """The uses in docs/errors.md, of two ranks."""
    group = group_of(2)
    if rank >= 2:
        return
    experts = torch.zeros(3, 2, dtype=torch.int32, device=device)
    tight = cadre.ExpertParallel(group, 2, 2, block=5)
    known = {"cadre": cadre, "group": group, "rank": rank, "tight": tight, "experts": experts,
             "x": draw(3, 6, device=device)}
    given = answers_to(USES, known)
    if rank == 0:
        path.write_text(json.dumps(given))


# The tests


def test_bits_of_one_process(ranks):
    ranks.run(bits, range(60))


def test_overflow_is_nan_on_all_ranks_and_said_once(ranks):
    ranks.run(overflowing)


def test_rows_beyond_the_last_are_zero(ranks):
    ranks.run(rows_are_whole)


def test_layers(ranks):
    ranks.run(layers)


def test_the_first_dispatch_is_not_captured(ranks):
    ranks.run(first_in_a_graph)


def test_graphs(ranks):
    ranks.run(replayed)


# Of tensors without numbers, between ranks that are not there.
WITHOUT_NUMBERS = """
import torch, torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
import cadre
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
dist.all_gather_object = lambda all, own, group: all.__setitem__(slice(None), [own] * len(all))
for options, reads in (({"block": 8}, False), ({"block": 8, "overflow": "drop"}, False),
                       ({}, True)):
    ep = cadre.ExpertParallel(None, 2, 2, **options)
    with FakeTensorMode():
        x, prob = torch.randn(5, 6, requires_grad=True), torch.rand(5, 2, requires_grad=True)
        try:
            sent = ep.dispatch(x, torch.zeros(5, 2, dtype=torch.int32), prob)
            ep.collect(sent.rows, sent.handle).sum().backward()
            assert x.grad.shape == x.shape and sent.rows.shape == (32, 6)
            print("reads no numbers")
        except Exception as error:
            assert reads, error
            print("reads", type(error).__name__)
"""


def test_reads_no_numbers():
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*["reads no numbers"] * 2,
                                        "reads DataDependentOutputException"]


def test_errors(ranks, tmp_path):
    ranks.run(answers, tmp_path / "answers")
    errors_page.settle("door_expert_parallel_blocks",
                       json.loads((tmp_path / "answers").read_text()))
