"""cadre.ExpertParallel by the route "collective" whose tokens cross once to each rank: the bits of
one process with all tokens, and what crosses. NCCL where each rank has a GPU, else gloo on the CPU.
"""

import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import (
    NAMES, WORLD, assert_same, counted, draw_case, exchanges_of_step, group_of, one_process,
    parallel, rows_needed)
from torch.autograd import forward_ad

import cadre
from cadre import tokens_once

# What the processes run


def tokens_for(case, rank, ranks):
    """For each rank its tokens of `rank`, and how many choices they have there."""
    there = case.of_rank(rank)[1].long().div(case.experts, rounding_mode="floor")
    return [(int((there == r).any(1).sum()), int((there == r).sum())) for r in range(ranks)]


def bits(rank, device, seeds):
    """Random routings, and capacities that half of them exceed; every token's zeros are negative.
    What crosses is a token for each rank, no more of them than rows with room."""
    for ranks in range(2, WORLD + 1):
        group_of(ranks)
    saved = 0
    for seed in seeds:
        ranks = 2 + seed % (WORLD - 1)
        case = draw_case(seed, ranks, device)
        case.x[:, 0], case.dout[:, 0] = -0.0, -0.0
        if rank >= ranks:
            continue
        top_k, needed = case.chosen.shape[1], rows_needed(case)
        rows = random.Random(seed).choice(["exact", max(1, max(needed) // 2), max(1, max(needed))])
        ep = cadre.ExpertParallel(group_of(ranks), case.experts, top_k, rows=rows, overflow="drop",
                                  cross="token")
        with counted() as moved:
            got, handle = parallel(ep, case, rank)
        limit = None if rows == "exact" else rows
        assert_same(case, rank, got, one_process(case, limit), f"seed {seed}")
        if handle.dropped.any():
            continue
        tokens, choices = map(sum, zip(*tokens_for(case, rank, ranks)))
        assert len(moved) in (6, 7)  # whether anybody has tokens at all
        if len(moved) == 7:
            width = case.x.shape[1]
            # Numbers of tokens, tokens, prob; y; dout; dx, dprob.
            assert moved[0] == (choices, 1) and moved[1] == (tokens, width), f"seed {seed}"
            assert moved[2] == (choices, 1) and moved[4] == (tokens, width), f"seed {seed}"
        saved += choices - tokens
    assert rank > 1 or saved > 100


def overflowing(rank, device):
    case = draw_case(11, WORLD, device, "one rank", torch.float32)
    rows = max(rows_needed(case)) - 1
    ep = cadre.ExpertParallel(dist.group.WORLD, case.experts, case.chosen.shape[1], rows=rows,
                              cross="token")
    with counted() as moved:
        got, _ = parallel(ep, case, rank)
    assert not moved
    for name, numbers in zip(NAMES, got[:-1]):
        assert numbers.isnan().all(), f"{name} is not all NaN"
    with pytest.raises(RuntimeError, match=f"must be at most {rows}, its capacity"):
        ep.check()


def some_ranks(rank, device, seeds):
    """Each rank by what it has: those of few tokens send a row for each choice, the others tokens;
    where all have few, no numbers cross."""
    for seed in seeds:
        case = draw_case(seed, WORLD, device, "any", top_k=3)
        case.tokens = [30 if seed % 2 == 0 and r % 2 == 0 else 2 for r in range(WORLD)]
        case = draw_tokens(case, seed, device)
        ep = cadre.ExpertParallel(dist.group.WORLD, case.experts, 3)
        row = case.x.shape[1] * case.x.element_size()
        with counted() as moved, mock.patch.object(
                tokens_once, "_WORTH_IT", 20 * 3 * (row * 2 // (WORLD + 2) - 4)):
            got, _ = parallel(ep, case, rank)
        assert_same(case, rank, got, one_process(case), f"seed {seed}")
        assert len(moved) == (7 if seed % 2 == 0 else 6), f"seed {seed}"
        tokens, choices = map(sum, zip(*tokens_for(case, rank, WORLD)))
        assert moved[-3] == (tokens if case.tokens[rank] == 30 else choices, case.x.shape[1])


def draw_tokens(case, seed, device):
    """The case with as many tokens as it says, which choose anyone."""
    torch.manual_seed(seed)
    total = sum(case.tokens)
    case.chosen = torch.randint(0, case.experts * case.ranks, (total, 3), device=device)
    case.x = torch.randn(total, case.x.shape[1]).to(device, case.x.dtype)
    case.dout = torch.randn(total, case.x.shape[1]).to(device, case.x.dtype)
    case.prob = torch.rand(total, 3).to(device)
    return case


def gradients(rank, device):
    """Backward moves what has a gradient, and a second dispatch moves tokens."""
    case = draw_tokens(draw_case(5, WORLD, device, "any", torch.float32, top_k=3), 5, device)
    given = case.of_rank(rank)
    x, _, prob = given[:3]
    ep = cadre.ExpertParallel(dist.group.WORLD, case.experts, 3, cross="token")

    def exchanges(x, prob):
        moved, moved_again = exchanges_of_step(ep, given, x, prob)
        assert moved_again == 1
        return moved

    assert exchanges(x, prob) == 4 + 3
    assert exchanges(x.detach(), prob) == 4 + 2
    assert exchanges(x, prob.detach()) == 4 + 2
    assert exchanges(x.detach(), prob.detach()) == 4 + 1
    assert exchanges(x, None) == 3 + 2
    with torch.no_grad():
        assert exchanges(x, prob) == 4


def with_tangents(rank, device, options):
    """No rows leave without them in silence."""
    ep = cadre.ExpertParallel(dist.group.WORLD, 2, 3, **options)
    chosen, prob = torch.randint(2 * WORLD, (9, 3), device=device), draw(9, 3, device=device)
    for learns in (False, True):
        with forward_ad.dual_level():
            x, tangent = draw(9, 16, device=device, grad=learns), draw(9, 16, device=device)
            x = forward_ad.make_dual(x, tangent)
            with pytest.raises((RuntimeError, NotImplementedError), match="jvp|tangent"):
                ep.dispatch(x, chosen, prob)


def of_another(rank, device):
    """A handle says itself who has the rows."""
    ep, own = (cadre.ExpertParallel(group, 2, 3) for group in (dist.group.WORLD, alone()))
    x = draw(9, 16, device=device)
    rows, _, _, handle = ep.dispatch(x, torch.randint(2 * WORLD, (9, 3), device=device))
    assert torch.equal(own.collect(rows, handle), ep.collect(rows, handle))


def alone():
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def differentiated_twice(rank, device):
    """By a tensor that backward read, since dy is a constant."""
    ep = cadre.ExpertParallel(dist.group.WORLD, 2, 3, cross="token")
    moe = cadre.MoE(2 * WORLD, 16, 8, top_k=3, device=device, ep=ep, dispatch_again=True)
    out = moe(torch.randn(9, 16, device=device, requires_grad=True))[0]
    of_w2, = torch.autograd.grad(out.sum(), moe.experts.w2, create_graph=True)
    with pytest.raises(RuntimeError, match="^MoE with dispatch_again has no second derivatives$"):
        of_w2.sum().backward()


# The tests


def test_bits_of_one_process(ranks):
    ranks.run(bits, range(60))


def test_overflow_is_nan_on_all_ranks(ranks):
    ranks.run(overflowing)


def test_each_rank_sends_tokens_or_rows(ranks):
    ranks.run(some_ranks, range(8))


def test_what_has_no_gradient_is_not_moved(ranks):
    ranks.run(gradients)


@pytest.mark.parametrize("options", [{"cross": "token"}, {"cross": "choice"}, {"block": 30}],
                         ids=["token", "choice", "block"])
def test_tangents_are_refused(ranks, options):
    ranks.run(with_tangents, options)


def test_handles_of_another(ranks):
    ranks.run(of_another)


def test_rows_that_are_sent_again_have_no_second_derivatives(ranks):
    ranks.run(differentiated_twice)


def test_what_is_expected_to_save_enough():
    """As the plan of C++ expects it (tests/parallel/collective_errors_test.cpp)."""
    assert not tokens_once.saves_enough(149796, 2, 96, 2)
    assert tokens_once.saves_enough(149797, 2, 96, 2)
    assert not tokens_once.saves_enough(100000, 1, 8192, 2)
    assert not tokens_once.saves_enough(8192, 2, 8192, 4096)
    assert tokens_once.saves_enough(8192, 8, 8192, 64)
