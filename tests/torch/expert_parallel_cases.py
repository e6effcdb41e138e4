"""What the tests of expert parallelism share: tokens and choices of all ranks, what one process
computes of them, and a rank's part of that."""

import random
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from processes import on_gpus

import cadre

WORLD = next((n for n in (4, 3, 2) if on_gpus(n)), 4)
H, F = 24, 16
GROUPS = {}  # of this process, by ranks


def group_of(ranks):
    """The group of the first so many ranks; all processes ask for it."""
    if ranks not in GROUPS:
        GROUPS[ranks] = dist.new_group(list(range(ranks)))
    return GROUPS[ranks]


@dataclass
class Case:
    """Tokens of all ranks, one after another, and the weights of all experts."""

    ranks: int
    experts: int  # E of each rank
    tokens: list[int]  # of each rank
    chosen: torch.Tensor
    x: torch.Tensor
    prob: torch.Tensor
    dout: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor

    def of_rank(self, rank):
        """(x, chosen, prob, dout, w1, w2) of one rank, with leaves of its own."""
        end = sum(self.tokens[:rank + 1])
        mine = slice(end - self.tokens[rank], end)
        its = slice(rank * self.experts, (rank + 1) * self.experts)
        return (leaf(self.x[mine]), self.chosen[mine], leaf(self.prob[mine]), self.dout[mine],
                leaf(self.w1[its]), leaf(self.w2[its]))


def leaf(t):
    return t.detach().clone().requires_grad_()


def draw_routing(chance, kind, tokens, top_k, experts, ranks):
    """Choices int64 [T, top_k] of all ranks' tokens by P * E experts; some are no expert."""
    chosen = torch.randint(0, experts * ranks, (tokens, top_k))
    if kind == "one expert":
        chosen[:] = chance.randrange(experts * ranks)
    elif kind == "one rank":
        chosen = chosen % experts + chance.randrange(ranks) * experts
    elif kind == "none":
        chosen[:] = -1
    elif kind == "out of range":
        wrong = torch.tensor([-1, -2**31, experts * ranks, 2**31 - 1])
        away = torch.rand(tokens, top_k) < 0.4
        chosen = chosen.where(~away, wrong[torch.randint(0, 4, (tokens, top_k))])
    return chosen


def draw_case(seed, ranks, device, kind=None, dtype=None, experts=None, top_k=None):
    """What is not given is drawn: many ranks have no tokens, or no rows."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kinds = ["any"] * 4 + ["one expert", "one rank", "none", "out of range", "out of range"]
    experts, top_k = experts or chance.choice([1, 2, 3, 5]), top_k or chance.choice([1, 2, 3])
    tokens = [chance.choice([0, 1, 2, chance.randrange(30)]) for _ in range(ranks)]
    if chance.random() < 0.3:
        tokens = [chance.randrange(30)] * ranks
    total = sum(tokens)
    dtype = dtype or chance.choice([torch.float32, torch.bfloat16, torch.float16])
    chosen = draw_routing(chance, kind or chance.choice(kinds), total, top_k, experts, ranks)
    chosen = chosen.to(chance.choice([torch.int32, torch.int64])).to(device)

    def numbers(*shape):
        return draw(*shape, dtype=dtype, device=device)

    return Case(ranks, experts, tokens, chosen, numbers(total, H),
                torch.rand(total, top_k).to(device), numbers(total, H),
                numbers(experts * ranks, 2 * F, H), numbers(experts * ranks, H, F))


def answers_to(uses, names, behind=lambda: None):
    """(use, what it raises) of each line of `uses`, for docs/errors.md. behind: called after each.
    """
    given = []
    for use in uses.strip().splitlines():
        with pytest.raises(Exception) as error:
            eval(use, names)
        given.append((use, f"{error.type.__name__}: {str(error.value).splitlines()[0]}"))
        behind()
    return given


def mlp(rows, offsets, row_prob, w1, w2):
    return torch.ops.cadre.grouped_mlp(rows, offsets, row_prob, [w1], [], [w2], [])[0]


def rows_needed(case):
    """Of each rank."""
    return [int(((case.chosen >= r * case.experts) & (case.chosen < (r + 1) * case.experts)).sum())
            for r in range(case.ranks)]


def dropped_choices(case, rows):
    """True for choices of any token whose row of their expert's rank would be `rows` or more."""
    late = torch.zeros_like(case.chosen, dtype=torch.bool)
    for rank in range(case.ranks):
        local = case.chosen.long() - rank * case.experts
        within = (local >= 0) & (local < case.experts)
        where = cadre.offsets_of_routing(local, case.experts, rows)
        late |= within & (where.row_of < 0)
    return late


def one_process(case, rows=None):
    """What one process with all tokens and experts computes: out, dx, dprob, dw1, dw2, and offsets
    of all experts. rows: of each rank, beyond which choices are dropped."""
    chosen = case.chosen.long()
    if rows is not None:
        chosen = chosen.masked_fill(dropped_choices(case, rows), -1)
    x, prob, w1, w2 = map(leaf, (case.x, case.prob, case.w1, case.w2))
    where = cadre.offsets_of_routing(chosen, case.experts * case.ranks, chosen.numel())
    order = where.offsets, where.row_of, where.slot_of
    sorted_rows, row_prob = cadre.permute(x, *order, prob)
    out = cadre.combine(mlp(sorted_rows, where.offsets, row_prob, w1, w2), *order)
    return (out.detach(), *torch.autograd.grad(out, (x, prob, w1, w2), case.dout), where.offsets)


def parallel(ep, case, rank):
    """The same of this rank, and the number of choices dropped at each."""
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
    rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
    out = ep.collect(mlp(rows, offsets, row_prob, w1, w2), handle)
    grads = torch.autograd.grad(out, (x, prob, w1, w2), dout)
    return (out.detach(), *grads, offsets), handle


def same_bits(got, want):
    """The sign of zero, too."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return got.shape == want.shape and torch.equal(got.contiguous().view(integers),
                                                   want.contiguous().view(integers))


def part_of(case, rank, all_of_it):
    """What of one process' results is this rank's."""
    end = sum(case.tokens[:rank + 1])
    tokens, first = slice(end - case.tokens[rank], end), rank * case.experts
    its = slice(first, first + case.experts)
    out, dx, dprob, dw1, dw2, offsets = all_of_it
    offsets = offsets[first:first + case.experts + 1] - offsets[first]
    return out[tokens], dx[tokens], dprob[tokens], dw1[its], dw2[its], offsets


NAMES = ("out", "dx", "dprob", "dw1", "dw2", "offsets")


def assert_same(case, rank, got, want, what):
    for name, a, b in zip(NAMES, got, part_of(case, rank, want)):
        assert same_bits(a, b), f"{what}: {name} of rank {rank} is not that of one process"


def exchanges_of_step(ep, given, x, prob):
    """How many exchanges there are in forward and backward of an MLP, and how many when its rows
    are dispatched again. given: a rank's part of a case."""
    _, chosen, _, dout, w1, w2 = given
    with counted() as moved:
        rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
        assert rows.requires_grad == (x.requires_grad and torch.is_grad_enabled())
        out = ep.collect(mlp(rows, offsets, None if prob is None else row_prob, w1, w2), handle)
        if out.requires_grad:
            out.backward(dout)
    with counted() as moved_again:
        again = ep._dispatch_again(handle, x.detach(), chosen, prob)
    assert same_bits(again, rows.detach())
    return len(moved), len(moved_again)


class counted:
    """The exchanges of rows while it is entered: shapes of what leaves, in their order."""

    def __enter__(self):
        self.rows, whole = [], dist.all_to_all_single

        def count(output, rows, *rest, **named):
            self.rows.append(tuple(rows.shape))
            return whole(output, rows, *rest, **named)

        self.patch = mock.patch.object(dist, "all_to_all_single", count)
        self.patch.start()
        return self.rows

    def __exit__(self, *_):
        self.patch.stop()
