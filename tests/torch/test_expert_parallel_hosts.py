"""cadre.ExpertParallel by the route "collective" whose tokens cross once to each host, which is a
word here: the bits of one process with all tokens, what leaves a host, and errors. NCCL where each
rank has a GPU, else gloo on the CPU.
"""

import json
import os
import pathlib
import random
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import (
    NAMES, WORLD, assert_same, counted, draw_case, exchanges_of_step, group_of, mlp, one_process,
    parallel, rows_needed, same_bits)
from processes import Processes
from torch.utils.checkpoint import checkpoint

import cadre
from cadre.tokens_by_host import Hosts

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page  # noqa: E402

# The host of each rank, a letter
HOSTS = {2: ["ab", "aa"], 3: ["abc", "aaa"], 4: ["aabb", "abab", "abba", "baab", "abcd"],
         6: ["aabbcc", "abcabc", "abccab", "aaabbb", "ababab", "abbaba"]}


@pytest.fixture(scope="module")
def six_ranks(tmp_path_factory):
    processes = Processes(tmp_path_factory.mktemp("six_ranks"), 6)
    yield processes
    processes.finish()


# What the processes run


def both(ranks, rank, hosts, experts, top_k, **options):
    """Of the same group, tokens by host and by choice."""
    return [cadre.ExpertParallel(group_of(ranks), experts, top_k, cross=cross, **host, **options)
            for cross, host in (("host", dict(host=hosts[rank])), ("choice", {}))]


def bits(rank, device, sizes, seeds):
    """Random routings, and capacities that half of them exceed; every token's zeros are negative.
    A rank gets no more tokens than rows, whatever is routed to it.
    """
    for ranks in sizes:
        group_of(ranks)
    for seed in seeds:
        chance = random.Random(seed)
        ranks = sizes[seed % len(sizes)]
        hosts = chance.choice(HOSTS[ranks])
        case = draw_case(seed, ranks, device, top_k=chance.choice([1, 2, 3, 6]))
        case.x[:, 0], case.dout[:, 0] = -0.0, -0.0
        if rank >= ranks:
            continue
        top_k, needed = case.chosen.shape[1], rows_needed(case)
        rows = chance.choice(["exact", max(1, max(needed) // 2), max(1, max(needed))])
        by_host, by_choice = both(ranks, rank, hosts, case.experts, top_k, rows=rows,
                                  overflow="drop")
        what = f"seed {seed}, hosts {hosts}"
        limit = None if rows == "exact" else rows
        got, handle = parallel(by_host, case, rank)
        assert_same(case, rank, got, one_process(case, limit), what)
        beyond = [max(0, n - (limit or n)) for n in needed]
        assert handle.dropped.tolist() == beyond, what
        x, chosen, prob = case.of_rank(rank)[:3]
        with crossing() as exchanges:
            got = by_host.dispatch(x, chosen, prob)
        arrived = [received for columns, *_, received in exchanges if columns == case.x.shape[1]]
        assert not arrived or sum(arrived[-1]) <= handle.rows, what
        want = by_choice.dispatch(x, chosen, prob)
        for name, a, b in zip(("rows", "row_prob", "offsets"), got, want):
            assert same_bits(a, b), f"{what}: {name} of rank {rank} differ from cross='choice'"


class crossing:
    """While it is entered: (columns, bytes of a row, rows to each rank, rows from each) of each
    exchange."""

    def __enter__(self):
        self.all, whole = [], dist.all_to_all_single

        def note(output, rows, received, sent, **named):
            self.all.append((rows.shape[1], rows.shape[1] * rows.element_size(), sent,
                             received))
            return whole(output, rows, received, sent, **named)

        self.patch = mock.patch.object(dist, "all_to_all_single", note)
        self.patch.start()
        return self.all

    def __exit__(self, *_):
        self.patch.stop()


def bytes_out(exchanges, hosts, rank):
    """That leave the host of that rank."""
    return sum(row * n for _, row, sent, _ in exchanges
               for r, n in enumerate(sent) if hosts[r] != hosts[rank])


def crossings(rank, device, ranks):
    """A token leaves its host once for each other host that has rows of it, to the rank of its
    place there; dout likewise. All that leaves is less than where tokens cross to each rank."""
    group_of(ranks)
    if rank >= ranks:
        return
    for seed, hosts in enumerate(HOSTS[ranks]):
        case = draw_case(seed, ranks, device, "any", torch.float32, experts=2, top_k=6)
        case.tokens = [20 + r for r in range(ranks)]
        case = draw_tokens(case, device)
        by_host, _ = both(ranks, rank, hosts, 2, 6)
        by_token = cadre.ExpertParallel(group_of(ranks), 2, 6, cross="token")
        whole = dist.all_gather_into_tensor
        with crossing() as of_hosts, mock.patch.object(dist, "all_gather_into_tensor",
                                                       side_effect=whole) as gathers:
            parallel(by_host, case, rank)
        assert gathers.call_count == 1  # what the host waits for
        with crossing() as of_tokens:
            parallel(by_token, case, rank)
        if by_host._hosts is None:
            assert of_hosts == of_tokens
            continue
        width = case.x.shape[1]
        there = case.of_rank(rank)[1].long() // 2
        place = hosts[:rank].count(hosts[rank])
        want = [int(sum(there == r for r in range(ranks) if hosts[r] == hosts[peer]).any(1).sum())
                if hosts[:peer].count(hosts[peer]) == place else 0 for peer in range(ranks)]
        wide = [sent for columns, _, sent, _ in of_hosts if columns == width]
        assert len(wide) == 6  # x twice, y, dout twice, dx
        assert wide[0] == want and wide[3] == want, f"hosts {hosts}"
        for within in (wide[1], wide[4]):
            assert all(hosts[r] == hosts[rank] or n == 0 for r, n in enumerate(within))
        less, more = (bytes_out(e, hosts, rank) for e in (of_hosts, of_tokens))
        assert 0 < less < more, f"hosts {hosts}: {less} and {more} bytes"


def draw_tokens(case, device):
    """The case with as many tokens as it says, which choose anyone, twice as well."""
    total, top_k = sum(case.tokens), case.chosen.shape[1]
    case.chosen = torch.randint(0, case.experts * case.ranks, (total, top_k), device=device)
    case.x, case.dout = (draw(total, case.x.shape[1], dtype=case.x.dtype, device=device)
                         for _ in range(2))
    case.prob = torch.rand(total, top_k).to(device)
    return case


def overflowing(rank, device):
    case = draw_case(11, WORLD, device, "one rank", torch.float32)
    rows = max(rows_needed(case)) - 1
    by_host, _ = both(WORLD, rank, HOSTS[WORLD][0], case.experts, case.chosen.shape[1], rows=rows)
    with counted() as moved:
        got, _ = parallel(by_host, case, rank)
    assert not moved
    for name, numbers in zip(NAMES, got[:-1]):
        assert numbers.isnan().all(), f"{name} is not all NaN"
    with pytest.raises(RuntimeError, match=f"must be at most {rows}, its capacity.*cross=host"):
        by_host.check()


def gradients(rank, device):
    """Backward moves what has a gradient, and a second dispatch moves tokens alone."""
    case = draw_case(5, WORLD, device, "any", torch.float32, top_k=3)
    case.tokens = [4] * WORLD
    case = draw_tokens(case, device)
    given = case.of_rank(rank)
    x, _, prob = given[:3]
    ep, _ = both(WORLD, rank, HOSTS[WORLD][0], case.experts, 3)
    steps = 1 if ep._hosts is None else 2  # of tokens, and of numbers

    def exchanges(x, prob):
        moved, moved_again = exchanges_of_step(ep, given, x, prob)
        assert moved_again == steps
        return moved

    assert exchanges(x, prob) == 2 * steps + 2 + steps + 2
    assert exchanges(x.detach(), prob) == 2 * steps + 2 + steps + 1
    assert exchanges(x, prob.detach()) == 2 * steps + 2 + steps + 1
    assert exchanges(x.detach(), prob.detach()) == 2 * steps + 2 + steps
    assert exchanges(x, None) == 2 * steps + 1 + steps + 1
    with torch.no_grad():
        assert exchanges(x, prob) == 2 * steps + 2


def compiled(rank, device):
    """A compiled step, and one that is checkpointed, exchange as often as an eager one."""
    ep, _ = both(WORLD, rank, HOSTS[WORLD][0], 2, 3)

    def step(x, chosen, prob, w1, w2):
        rows, row_prob, offsets, handle = ep.dispatch(x * 2, chosen, prob)
        return ep.collect(mlp(rows, offsets, row_prob, w1, w2), handle).sin()

    def again(*given):
        return checkpoint(step, *given, use_reentrant=False)

    case = draw_case(2, WORLD, device, "any", torch.float32, experts=2, top_k=3)
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
    results, order = [], []
    for call in (step, torch.compile(step, backend="aot_eager", dynamic=True), again):
        with counted() as moved:
            out = call(x, chosen, prob, w1, w2)
            grads = torch.autograd.grad(out, (x, prob, w1, w2), dout)
        results.append((out, *grads))
        order.append(moved)
    for other in results[1:]:
        assert all(map(same_bits, other, results[0]))
    assert order[1] == order[0] and len(order[2]) > len(order[0])


def training(rank, device):
    """Steps of a layer, whose rows may be sent again."""
    torch.manual_seed(7 + rank)
    batches = [draw(9 - 2 * rank, 16, device=device) for _ in range(3)]
    for options in ({}, {"dispatch_again": True}, {"shared_features": 8}):
        trained = []
        for ep in both(WORLD, rank, HOSTS[WORLD][1], 3, 2, rows=WORLD * 4, overflow="drop"):
            torch.manual_seed(4)
            moe = cadre.MoE(3 * WORLD, 16, 8, top_k=2, device=device, ep=ep, **options)
            optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
            for x in batches:
                x = x.clone().requires_grad_()
                out = moe(x)[0]
                out.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            trained.append([out, x.grad, *moe.parameters()])
        assert all(map(same_bits, *trained)), f"{options}"


def several_groups(rank, device):
    """Overlapping groups whose ranks have other places in them than in the whole."""
    groups = [dist.new_group(members) for members in ([0, 1, 2, 3], [2, 3, 4, 5])]
    for seed in range(12):
        for group, members in zip(groups, ([0, 1, 2, 3], [2, 3, 4, 5])):
            case = draw_case(seed, 4, device, top_k=4)
            if rank not in members:
                continue
            own = members.index(rank)
            ep = cadre.ExpertParallel(group, case.experts, 4, rows="exact", cross="host",
                                      host=HOSTS[4][seed % 4][own])
            assert_same(case, own, parallel(ep, case, own)[0], one_process(case), f"seed {seed}")


def raising(rank, device):
    """One rank's error is one on all of them, and the next dispatch works."""
    case = draw_case(3, WORLD, device, "any", torch.float32)
    x, chosen, prob = case.of_rank(rank)[:3]
    ep, _ = both(WORLD, rank, HOSTS[WORLD][0], case.experts, chosen.shape[1])
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match=(
            "top_k of each row of x" if rank == 1 else "rank 1 raised an error")):
        ep.dispatch(x, chosen[:, :0] if rank == 1 else chosen, prob)
    assert_same(case, rank, parallel(ep, case, rank)[0], one_process(case), "after an error")


def one_host(rank, device):
    """By what the kernel says all ranks of a test are on one host: tokens cross once to each rank.
    """
    case = draw_case(3, WORLD, device, "any")
    by_kernel = cadre.ExpertParallel(dist.group.WORLD, case.experts, case.chosen.shape[1],
                                     cross="host")
    said = [None] * WORLD
    dist.all_gather_object(said, by_kernel.host)
    assert by_kernel.host and said == WORLD * [by_kernel.host] and by_kernel._hosts is None
    by_token = cadre.ExpertParallel(dist.group.WORLD, case.experts, case.chosen.shape[1],
                                    cross="token")
    moved = []
    for ep in (by_kernel, by_token):
        with counted() as rows:
            assert_same(case, rank, parallel(ep, case, rank)[0], one_process(case), ep.cross)
        moved.append(rows)
    assert moved[0] == moved[1]


def no_word_of_the_kernel(rank, device):
    """Of one rank, which is an error on all of them."""
    def readlink(path):
        raise FileNotFoundError(f"no {path}")

    with mock.patch.object(os, "readlink", readlink if rank == 1 else os.readlink):
        with pytest.raises(FileNotFoundError if rank == 1 else ValueError, match=(
                "no /proc/self/ns/net" if rank == 1 else "rank 1 was given what does not fit")):
            cadre.ExpertParallel(dist.group.WORLD, 2, 2, cross="host")
    cadre.ExpertParallel(dist.group.WORLD, 2, 2, cross="host")


USES = """
cadre.ExpertParallel(group, 2, 2, cross="host", host="ab"[rank // 2])
cadre.ExpertParallel(group, 2, 2, cross="host", host=rank)
cadre.ExpertParallel(group, 2, 2, host="a")
cadre.ExpertParallel(group, 2, 2, cross="host", block=4)
cadre.ExpertParallel(group, 2, 2, cross="host", route="window")
"""


def answers(rank, device, path):
    """Rank 0 writes what each use answers there; each is an error on all ranks."""
    group = dist.new_group([0, 1, 2], backend="gloo")
    if rank >= 3:
        return
    given = []
    for use in USES.strip().splitlines():
        with pytest.raises(Exception) as error:
            eval(use, globals() | locals())
        given.append((use, f"{error.type.__name__}: {str(error.value).splitlines()[0]}"))
    said = [None] * 3
    dist.all_gather_object(said, given[0], group=group)
    assert said == 3 * [given[0]]
    if rank == 0:
        path.write_text(json.dumps(given))


# The tests


def test_bits_of_one_process_and_by_choice(ranks):
    ranks.run(bits, [n for n in (4, 4, 4, 3, 2) if n <= WORLD], range(60))


def test_bits_of_three_hosts_and_of_three_ranks_a_host(six_ranks):
    six_ranks.run(bits, [6], range(24))


def test_what_leaves_a_host(ranks):
    ranks.run(crossings, WORLD)


def test_what_leaves_one_of_three_hosts(six_ranks):
    six_ranks.run(crossings, 6)


def test_overflow_is_nan_on_all_ranks(ranks):
    ranks.run(overflowing)


def test_what_has_no_gradient_is_not_moved(ranks):
    ranks.run(gradients)


def test_compiled_and_checkpointed_steps_exchange_as_eager_ones(ranks):
    ranks.run(compiled)


def test_training_has_the_bits_of_rows_by_choice(ranks):
    ranks.run(training)


def test_an_error_of_one_rank_is_one_on_all(ranks):
    ranks.run(raising)


def test_groups_of_some_ranks(six_ranks):
    six_ranks.run(several_groups)


def test_processes_of_one_kernel_are_one_host(ranks):
    ranks.run(one_host)


def test_a_kernel_that_says_nothing_is_an_error_on_all_ranks(ranks):
    ranks.run(no_word_of_the_kernel)


def test_errors(six_ranks, tmp_path):
    six_ranks.run(answers, tmp_path / "answers")
    errors_page.settle("door_expert_parallel_hosts",
                       json.loads((tmp_path / "answers").read_text()))


def test_ranks_of_hosts_need_not_be_neighbours():
    assert Hosts.of(list("aaaa"), 2) is None and Hosts.of(list("abcd"), 1) is None
    assert Hosts.of(list("abba"), 2) == Hosts(2, [1, 2], [2, 3], [0, 0, 1, 1], [1, 0, 0, 1])
    assert Hosts.of(list("abba"), 0) == Hosts(0, [0, 3], [0, 1], [0, 0, 1, 1], [0, 1, 1, 0])
