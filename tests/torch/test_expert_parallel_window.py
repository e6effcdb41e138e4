"""The route window of cadre.ExpertParallel: bits of one process; on GPUs if each rank has one."""

import json
import pathlib
import random
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import (
    H, NAMES, WORLD, answers_to, assert_same, draw_case, group_of, mlp, one_process, parallel,
    part_of, rows_needed, same_bits)
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import cadre

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page  # noqa: E402

# What the processes run


def layer(group, case, device, **options):
    """An ExpertParallel that fits the case."""
    shared = {"share": options.pop("share")} if "share" in options else {"device": device}
    return cadre.ExpertParallel(group, case.experts, case.chosen.shape[1], route="window",
                                tokens=max(1, *case.tokens), hidden=H, dtype=case.x.dtype,
                                **shared, **options)


def largest(group, device, **options):
    """Whose window fits every layer of these tests."""
    return cadre.ExpertParallel(group, 5, 3, route="window", tokens=30, hidden=H, factor=4,
                                dtype=torch.float32, device=device, **options)


def bits(rank, device, seeds):
    """Random routings and capacities that half of them exceed, all of them through one window for
    each number of ranks."""
    window = {}
    for ranks in range(2, WORLD + 1):
        group = group_of(ranks)
        if rank < ranks:
            window[ranks] = largest(group, device)
    for seed in seeds:
        ranks = 2 + seed % (WORLD - 1)
        case = draw_case(seed, ranks, device)
        if rank >= ranks:
            continue
        needed = rows_needed(case)
        rows = random.Random(seed).choice([max(1, max(needed) // 2), max(1, max(needed))])
        ep = layer(group_of(ranks), case, device, share=window[ranks], rows=rows, overflow="drop",
                   layer=seed)
        got, handle = parallel(ep, case, rank)
        assert_same(case, rank, got, one_process(case, rows), f"seed {seed}")
        assert handle.dropped.tolist() == [max(0, n - rows) for n in needed], f"seed {seed}"
        assert handle.rows == rows
        mine = case.of_rank(rank)[1]
        counts = [int((mine == e).sum()) for e in range(ranks * case.experts)]
        assert handle.tokens_per_expert.tolist() == counts


def overflowing(rank, device):
    """One row too many: NaN on all ranks, then words, then well."""
    case = draw_case(11, WORLD, device, "one rank", torch.float32)
    needed = rows_needed(case)
    worst, most = needed.index(max(needed)), max(needed)
    ep = layer(dist.group.WORLD, case, device, rows=most - 1)
    for again in (ep.check, lambda: parallel(ep, case, rank)):
        ep.check()
        got, handle = parallel(ep, case, rank)
        for name, numbers in zip(NAMES[:3], got):
            assert numbers.isnan().all(), f"{name} is not all NaN"
        assert handle.dropped[worst] == 1 and handle.dropped.sum() == 1
        settle(device)
        with pytest.raises(RuntimeError, match=(
                rf"rows of rank {worst} are {most}, must be at most R, {most - 1}; that step is "
                "NaN on every rank")):
            again()
    ep = layer(dist.group.WORLD, case, device, rows=most)
    assert_same(case, rank, parallel(ep, case, rank)[0], one_process(case), "enough rows")
    ep.check()


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def alternating(rank, device, steps):
    """Two layers of other experts and types that take turns on one window, forward and backward."""
    group = group_of(2)
    if rank >= 2:
        return
    big = largest(group, device)
    for step in range(steps):
        first = draw_case(100 + step, 2, device, "any", torch.float32, 3, 2)
        second = draw_case(200 + step, 2, device, "out of range", torch.bfloat16, 2, 3)
        work = []
        for number, case in enumerate((first, second)):
            x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
            ep = layer(group, case, device, share=big, layer=number)
            rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
            work.append((ep, handle, mlp(rows, offsets, row_prob, w1, w2), offsets, dout,
                         (x, prob, w1, w2)))
        outs = [ep.collect(y, handle) for ep, handle, y, *_ in work]
        for case, out, (_, _, _, offsets, dout, leaves) in zip((first, second), outs, work):
            got = (out.detach(), *torch.autograd.grad(out, leaves, dout), offsets)
            assert_same(case, rank, got, one_process(case), f"step {step}")
    big.check()


def in_place(rank, device):
    """Tokens and rows that are written where the others read them."""
    case = draw_case(21, WORLD, device, "any", torch.float32, 2, 2)
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
    ep = layer(dist.group.WORLD, case, device)
    for _ in range(3):
        with torch.no_grad():
            tokens = ep.empty_tokens(x.shape[0])
            tokens.copy_(x)
            rows, row_prob, offsets, handle = ep.dispatch(tokens, chosen, prob)
            y = mlp(rows, offsets, row_prob, w1, w2)
            there = ep.empty_rows()
            assert there.shape == y.shape
            there.copy_(y)
            out = ep.collect(there, handle)
        assert same_bits(out, part_of(case, rank, one_process(case))[0])


def choices_of_nobody(rank, device):
    """Numbers of int64 that are an expert's in their lower half."""
    ep = cadre.ExpertParallel(dist.group.WORLD, 2, 2, route="window", tokens=3, hidden=4,
                              dtype=torch.float32, device=device)
    x = draw(3, 4, device=device)
    chosen = torch.tensor([[2**32, 1], [-2**32 + 1, 2**62], [0, -2**63]], device=device)
    rows, _, _, handle = ep.dispatch(x, chosen, torch.ones(3, 2, device=device))
    assert torch.equal(ep.collect(rows, handle), x * torch.tensor([[1], [0], [1]], device=device))
    assert handle.tokens_per_expert.tolist() == [1, 1] + [0] * (2 * WORLD - 2)


def given_up(rank, device):
    """A window that is not made after all, on all ranks: what was to be gathered fails."""
    options = {"route": "window", "tokens": 3, "hidden": 4, "dtype": torch.float32}
    for calls in (1, 2):
        gather, left = dist.all_gather_object, [calls]  # the first is the comparison of problems

        def failing(*given, **named):
            if not left[0]:
                raise ConnectionError("no network")
            left[0] -= 1
            return gather(*given, **named)

        with mock.patch.object(dist, "all_gather_object", failing), pytest.raises(ConnectionError):
            cadre.ExpertParallel(dist.group.WORLD, 2, 2, device=device, **options)


def without_gradients(rank, device):
    """What has no gradient gets none, and probabilities may stay at home."""
    case = draw_case(5, WORLD, device, "any", torch.float32)
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
    ep = layer(dist.group.WORLD, case, device)
    plain = layer(dist.group.WORLD, case, device, prob=False, share=ep)
    for tokens, factors in ((x, prob), (x.detach(), prob), (x, prob.detach()), (x, None)):
        through = plain if factors is None else ep
        rows, row_prob, offsets, handle = through.dispatch(tokens, chosen, factors)
        assert rows.requires_grad == tokens.requires_grad
        assert row_prob.shape == (0 if factors is None else handle.rows,)
        y = mlp(rows, offsets, None if factors is None else row_prob, w1, w2)
        through.collect(y, handle).backward(dout)
        assert (x.grad is not None) == tokens.requires_grad
        assert (prob.grad is not None) == (factors is not None and factors.requires_grad)
        x.grad = prob.grad = None


def layer_of_all(rank, device):
    """A whole layer by either route has the same bits."""
    torch.manual_seed(4)
    options = dict(top_k=2, normalize=True, device=device, dtype=torch.bfloat16)
    ep = cadre.ExpertParallel(dist.group.WORLD, 2, 2, route="window", tokens=9, hidden=H,
                              dtype=torch.bfloat16, device=device)
    layers = [cadre.MoE(2 * WORLD, H, 16, ep=by, **options) for by in (dist.group.WORLD, ep)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].push = False
    x = draw(9 - rank, H, dtype=torch.bfloat16, device=device)
    results, made, places, tails = [], [], [], []

    within, collect = ep._dispatch_within, ep.collect

    def look(y, handle):
        """Where rows and their gradients lie, and what nobody may read."""
        rows, _, offsets, _ = made.pop()
        tails.extend(t.detach()[int(offsets[-1]):] for t in (rows, y))
        rows.register_hook(lambda drows: places.extend((y.data_ptr(), drows.data_ptr())))
        return collect(y, handle)
    ep.collect = look  # with hooks of the experts results would lie elsewhere
    ep._dispatch_within = lambda *given: made.append(within(*given)) or made[-1]
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is new holds NaN
    try:
        for moe in layers:
            ep.empty_rows().fill_(torch.nan)
            tokens = x.clone().requires_grad_()
            out, router = moe(tokens)
            assert all(len(tail) > 0 and tail.isnan().all() for tail in tails)
            out.sin().sum().backward()
            results.append((out, tokens.grad, router.tokens_per_expert.float(),
                            *(p.grad for p in moe.parameters())))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(same_bits, *results)) and places == [ep.empty_rows().data_ptr()] * 2


def compiled_layer(rank, device):
    """Compiled, experts write into memory of their own: a compiler gives it to what comes next when
    this rank has read it, others may not have."""
    torch.manual_seed(4)
    ep = cadre.ExpertParallel(dist.group.WORLD, 2, 2, route="window", tokens=9, hidden=H,
                              dtype=torch.bfloat16, device=device)
    moe = cadre.MoE(2 * WORLD, H, 16, top_k=2, ep=ep, device=device, dtype=torch.bfloat16)
    x = draw(9 - rank, H, dtype=torch.bfloat16, device=device)
    graphs, results = [], []

    def backend(graph, _):
        graphs.append(graph.graph)
        return graph

    for run in (moe, torch.compile(moe, backend=backend, fullgraph=True)):
        tokens = x.clone().requires_grad_()
        out = run(tokens)[0]
        results.append((out, *torch.autograd.grad(out.sin().sum(), (tokens, *moe.parameters()))))
    assert all(map(same_bits, *results))
    windows = [node.kwargs["window"] for graph in graphs for node in graph.nodes
               if str(node.target) == "cadre.grouped_mlp"]
    assert windows == [""]


def exchanges(run, *given):
    """What it gives, and the exchanges that it makes, in their order."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        results = run(*given)
    events = [e for e in seen.events() if e.name.startswith("cadre::_window")]
    outer = [e for e in events if e.cpu_parent is None or e.cpu_parent.name != e.name]
    return results, [e.name.removeprefix("cadre::_window_")
                     for e in sorted(outer, key=lambda e: e.time_range.start)]


def compiled(rank, device):
    """One graph, which exchanges as an eager step does: results that nobody reads are no reason to
    leave out an exchange, and one step may begin before the other has gone back."""
    group = group_of(2)
    if rank >= 2:
        return
    ep = cadre.ExpertParallel(group, 2, 2, route="window", tokens=30, hidden=H,
                              dtype=torch.float32, device=device)

    def step(x, chosen, prob, w1, w2):
        rows, row_prob, offsets, handle = ep.dispatch(x * 2, chosen, prob)
        unused = ep.collect(rows * 3, handle)  # noqa: F841
        return x + ep.collect(mlp(rows, offsets, row_prob, w1, w2), handle)

    def train(run, case):
        x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
        out = run(run(x, chosen, prob, w1, w2), chosen, prob, w1, w2)
        return (out, *torch.autograd.grad(out, (x, prob, w1, w2), dout))

    def saving(*given):
        return checkpoint(step, *given, use_reentrant=False, context_fn=cadre.saved_exchanges)

    one = ["dispatch", "collect", "collect"]
    back = ["collect_backward", "dispatch_backward"]
    run = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for seed in range(3):
        case = draw_case(seed, 2, device, "any", torch.float32, experts=2, top_k=2)
        want, order = exchanges(train, step, case)
        assert device.type == "cuda" or order == 2 * one + 2 * back
        train(run, case)  # tracers call the operators, too
        got, compiled_order = exchanges(train, run, case)
        assert device.type == "cuda" or compiled_order == order
        assert all(map(same_bits, got, want))
        for other in (lambda *given: checkpoint(step, *given, use_reentrant=False),
                      lambda *given: checkpoint(run, *given, use_reentrant=False), saving):
            assert all(map(same_bits, train(other, case), want))
        kept = torch.compile(saving, backend="aot_eager", fullgraph=True, dynamic=True)
        train(kept, case)
        got, kept_order = exchanges(train, kept, case)
        assert device.type == "cuda" or kept_order == order
        assert all(map(same_bits, got, want))
    ep.check()


LIMIT_S = 0.5


def a_rank_is_missing(rank, device):
    """One raises and comes no more: the others are told within the limit, and ever after."""
    case = draw_case(31, WORLD, device, "any", torch.float32)
    ep = layer(dist.group.WORLD, case, device, limit_s=LIMIT_S)
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
    rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(ValueError):
            ep.collect(rows[1:], handle)
        time.sleep(4 * LIMIT_S)
    else:
        for use in (lambda: settled(ep.collect(rows, handle), ep), ep.check,
                    lambda: ep.dispatch(x, chosen, prob)):
            with pytest.raises(RuntimeError, match="rank 0 has not come to collect, exchange 2"):
                use()
        assert time.monotonic() - begin < 10 * LIMIT_S
    if rank == 0:
        with pytest.raises(RuntimeError, match="has not come to collect, exchange 2"):
            ep.dispatch(x, chosen, prob)
            settled(x, ep)  # a GPU finds out by itself


def settled(result, ep):
    settle(result.device)
    ep.check()


def a_rank_is_elsewhere(rank, device):
    """One is at another layer than the others."""
    case = draw_case(32, WORLD, device, "any", torch.float32)
    ep = layer(dist.group.WORLD, case, device, limit_s=5)
    other = layer(dist.group.WORLD, case, device, share=ep, layer=7)
    x, chosen, prob, *_ = case.of_rank(rank)
    with pytest.raises(RuntimeError, match="is at another exchange than dispatch, exchange 1"):
        (other if rank == 1 else ep).dispatch(x, chosen, prob)
        settled(x, ep)
        ep.dispatch(x, chosen, prob)


def outlived(rank, device):
    """The gradients of an ExpertParallel that is gone, and a second derivative."""
    case = draw_case(33, WORLD, device, "any", torch.float32)
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)

    def forward():
        ep = layer(dist.group.WORLD, case, device)
        rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
        return ep.collect(mlp(rows, offsets, row_prob, w1, w2), handle)

    dx, = torch.autograd.grad(forward(), x, dout, create_graph=True)
    assert same_bits(dx, part_of(case, rank, one_process(case))[1])
    if x.numel():
        with pytest.raises(RuntimeError, match="has no second derivatives"):
            dx.sum().backward()


USES = """
cadre.ExpertParallel(group, 2, 2, tokens=4)
window(tokens=None)
window(hidden=0)
window(hidden=6.0)
window(dtype=torch.float64)
window(prob=1)
window(layer="first")
window(layer=rank)
window(rows="exact")
window(device="cpu:x")
window(limit_s=-1)
window(limit_s=1e17)
window(limit_s="60")
window(sum="all")
cadre.ExpertParallel(group, 2, 2, sum="rank")
window(share=few)
window(share=by_window, tokens=4096)
cadre.ExpertParallel(alone, 2, 2, route="window", share=by_window)
few.empty_rows()
window(sum="rank").empty_rows()
window(x=8)
window(x="fp8_row sum=rank")
window(hidden=64, x="nvfp4")
window(x="fp8_row", scales_major=0)
window(scales_major="column")
window(scales_major="sideways")
cadre.ExpertParallel(group, 2, 2, scales_major="column")
cadre.ExpertParallel(group, 2, 2, x="mxfp8")
window(x="fp8_row").dispatch(x, experts, prob)
window(x="fp8_row").dispatch_codes(x, experts, prob)
window(x="fp8_row").dispatch_codes(codes, None, prob)
window(x="fp8_row").dispatch_codes(codes, experts, leaf_prob)
window(x="fp8_row").dispatch_codes(codes, experts, None)
window(x="fp8_block").dispatch_codes(codes._replace(codes=x), experts, prob)
by_window.dispatch_codes(codes, experts, prob)
cadre.MoE(4, 6, 4, top_k=2, ep=window(sum="rank"), push=True)
cadre.MoE(4, 6, 4, top_k=2, ep=window(rows=7), push=True)
by_window.dispatch(x, experts, None)
few.collect(*by_window.dispatch(x, experts, prob)[::3])
torch.ops.cadre._window_collect("7 of nobody", x, *[experts] * 7)
torch.ops.cadre._window_collect(pushed, x, *[experts] * 7)
mlp(16, pushed)
mlp(3, pushed, torch.zeros(3, dtype=torch.int32))
mlp(16, fetched, torch.zeros(16, dtype=torch.int32))
torch.ops.cadre._window_dispatch(pushed, leaf, experts, leaf_prob)[1].sum().backward()
"""


def answers(rank, device, path):
    """Rank 0 writes what each use answers there; each is an error on both ranks, and none keeps the
    next from working."""
    group = dist.new_group([0, 1], backend="gloo")
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    if rank >= 2:
        return

    def window(**options):
        sizes = {"tokens": 4, "hidden": 6, "dtype": torch.float32}
        return cadre.ExpertParallel(group, 2, 2, route="window", device=options.pop("device", (
            None if "share" in options else "cpu")), **{**sizes, **options})

    few, by_window = cadre.ExpertParallel(group, 2, 2), window()
    fetched, pushed = by_window._window.inner_name, by_window._window.pushed_name

    def mlp(rows, exchange, place_of=None):
        w1, w2 = torch.ones(2, 8, 6), torch.ones(2, 6, 4)
        return torch.ops.cadre.grouped_mlp(
            torch.ones(rows, 6), torch.zeros(3, dtype=torch.int32), None, [w1], [], [w2], [],
            window=exchange, place_of=place_of)

    x, prob = draw(4, 6, device="cpu"), torch.rand(4, 2)
    codes = cadre.quantize(x, torch.tensor([0, 4], dtype=torch.int32), "fp8_row")
    leaf, leaf_prob = (t.clone().requires_grad_() for t in (x, prob))
    experts = torch.tensor([[0, 1], [1, 2], [0, 3], [1, -1]], dtype=torch.int32)

    def exchange():
        rows, _, _, handle = by_window.dispatch(x, experts, prob)
        sums = x * (experts >= 0).sum(1, keepdim=True)
        assert torch.equal(by_window.collect(rows, handle), sums)

    given = answers_to(USES, globals() | locals(), exchange)
    if rank == 0:
        path.write_text(json.dumps(given))


# The tests


def test_bits_of_one_process(ranks):
    ranks.run(bits, range(100))


def test_overflow_is_nan_on_all_ranks_and_said_once(ranks):
    ranks.run(overflowing)


def test_two_layers_take_turns_on_one_window(ranks):
    ranks.run(alternating, 20)


def test_tokens_and_rows_in_the_window(ranks):
    ranks.run(in_place)


def test_choices_of_nobody(ranks):
    ranks.run(choices_of_nobody)


def test_a_window_that_is_given_up(ranks):
    ranks.run(given_up)


def test_what_has_no_gradient(ranks):
    ranks.run(without_gradients)


def test_a_layer_has_the_bits_of_the_other_route(ranks):
    ranks.run(layer_of_all)


def test_compiled_steps_exchange_as_eager_ones(ranks):
    ranks.run(compiled)


def test_a_compiled_layer_leaves_the_window(ranks):
    ranks.run(compiled_layer)


def test_a_missing_rank_is_an_error_of_the_others(ranks):
    ranks.run(a_rank_is_missing)


def test_a_rank_at_another_layer_is_an_error(ranks):
    ranks.run(a_rank_is_elsewhere)


def test_gradients_outlive_what_dispatched(ranks):
    ranks.run(outlived)


def test_errors(ranks, tmp_path):
    ranks.run(answers, tmp_path / "answers")
    errors_page.settle("door_expert_parallel_window",
                       json.loads((tmp_path / "answers").read_text()))
