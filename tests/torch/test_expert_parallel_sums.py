"""cadre.ExpertParallel with sum="rank": each rank sums its own rows of a token, and sums travel."""

import random

import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import (
    H, WORLD, assert_same, draw_case, group_of, mlp, one_process, parallel, rows_needed, same_bits)

import cadre

# What the processes run


def layer(group, case, device, **options):
    on = {} if "share" in options else {"device": device}
    return cadre.ExpertParallel(group, case.experts, case.chosen.shape[1], route="window",
                                tokens=max(1, *case.tokens), hidden=H, dtype=case.x.dtype,
                                **on, **options)


def sums_of_ranks(ep, case, rank):
    """(out, dx) as ranks sum them: by exchanges of rows of which all but one rank's are zero."""
    x, chosen, prob, dout, w1, w2 = case.of_rank(rank)
    rows, row_prob, offsets, handle = ep.dispatch(x, chosen, prob)
    y = mlp(rows, offsets, row_prob, w1, w2)
    drows, = torch.autograd.grad(ep.collect(y, handle), rows, dout, retain_graph=True)
    out, dx = torch.zeros_like(dout, dtype=torch.float32), torch.zeros_like(x, dtype=torch.float32)
    for other in range(ep.ranks):
        mine = float(other == rank)
        out += ep.collect(y.detach().nan_to_num() * mine, handle)
        part, = torch.autograd.grad(rows, x, drows.nan_to_num() * mine, retain_graph=True)
        dx += part
    return out.to(x.dtype), dx.to(x.dtype)


def bits(rank, device, seeds):
    """All but out and dx are as of one process, and these are sums of ranks' sums; by any R."""
    ranks = min(3, WORLD)
    group = group_of(ranks)
    if rank >= ranks:
        return
    window = cadre.ExpertParallel(group, 5, 3, route="window", tokens=30, hidden=H, factor=4,
                                  dtype=torch.float32, device=device)
    for seed in seeds:
        case = draw_case(seed, ranks, device)
        rows = random.Random(seed).choice([2, 3]) * max(1, max(rows_needed(case)) // 2)
        exact, ep = (layer(group, case, device, rows=rows, overflow="drop", layer=seed,
                           share=window, sum=by) for by in ("choice", "rank"))
        got, handle = parallel(ep, case, rank)
        want, wanted = parallel(exact, case, rank)
        out, dx = sums_of_ranks(exact, case, rank)
        assert torch.equal(got[0], out) and torch.equal(got[1], dx), f"seed {seed}"
        for result, expected in zip(got[2:], want[2:]):
            assert torch.equal(result, expected), f"seed {seed}"
        assert handle.dropped.tolist() == wanted.dropped.tolist()
        assert all(map(same_bits, got, parallel(ep, case, rank)[0])), "another run, other bits"


def operators(rank, device):
    """Schemas, fake kernels and gradients of the operators agree."""
    group = dist.new_group([rank], use_local_synchronization=True)
    case = draw_case(3, 1, device, "any", torch.float32)
    x, chosen, prob, dout, *_ = case.of_rank(0)
    ops = torch.ops.cadre
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for by in ("choice", "rank"):
        window = layer(group, case, device, sum=by)._window
        rows, row_prob, _, *where = (t.detach() for t in ops._window_dispatch(
            window.name, x, chosen, prob))
        for op, given in ((ops._window_dispatch, (x, chosen, prob)),
                          (ops._window_dispatch_backward, (rows, row_prob, *where)),
                          (ops._window_collect, (rows.clone().requires_grad_(), *where)),
                          (ops._window_collect_backward, (dout, *where))):
            torch.library.opcheck(op.default, (window.name, *given), test_utils=tests)


def one_rank(rank, device):
    """Has the bits of a layer without ranks."""
    group = dist.new_group([rank], use_local_synchronization=True)
    for seed in range(10):
        case = draw_case(seed, 1, device)
        got, _ = parallel(layer(group, case, device, sum="rank"), case, 0)
        assert_same(case, 0, got, one_process(case), f"seed {seed}")


def whole_layer(rank, device):
    """cadre.MoE, eager and compiled; its gradients are those of rows but for roundings."""
    torch.manual_seed(4)
    options = {"route": "window", "tokens": 9, "hidden": H, "dtype": torch.float32,
               "factor": WORLD}
    exact = cadre.ExpertParallel(dist.group.WORLD, 2, 2, device=device, **options)
    ep = cadre.ExpertParallel(dist.group.WORLD, 2, 2, share=exact, sum="rank", **options)
    layers = [cadre.MoE(2 * WORLD, H, 16, ep=by, top_k=2, device=device, dtype=torch.float32)
              for by in (ep, exact)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = draw(9 - rank, H, device=device)
    results = []
    for run in (layers[0], torch.compile(layers[0], backend="aot_eager", fullgraph=True),
                layers[1]):
        tokens = x.clone().requires_grad_()
        out = run(tokens)[0]
        module = layers[1] if run is layers[1] else layers[0]
        grads = torch.autograd.grad(out.sin().sum(), (tokens, *module.parameters()))
        results.append((out.detach(), *grads))
    assert all(map(same_bits, results[0], results[1]))
    for got, want in zip(results[0], results[2]):
        torch.testing.assert_close(got, want)


# The tests


def test_operators(ranks):
    ranks.run(operators)


def test_sums_of_ranks(ranks):
    ranks.run(bits, range(30))


def test_one_rank_has_the_bits_of_none(ranks):
    ranks.run(one_rank)


def test_a_layer(ranks):
    ranks.run(whole_layer)
