"""What autograd and others keep of memory in a window, which exchanges write anew."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import WORLD, same_bits
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cadre

H, F, E, TOP_K, T = 16, 24, 2 * WORLD, 2, 6


# What the processes run


def layers(device, count, ep, **options):
    torch.manual_seed(7)
    made = [cadre.MoE(E, H, F, top_k=TOP_K, device=device, ep=ep, **options) for _ in range(count)]
    for layer in made:
        torch.manual_seed(8 + dist.get_rank())
        for p in layer.experts.parameters():
            p.data.copy_(draw(*p.shape) * 0.5)
    return made


def window(device, dtype=torch.float32, tokens=T):
    return cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K, route="window", tokens=tokens,
                                hidden=H, dtype=dtype, device=device)


def step(made, run, x, dout):
    """out and all gradients."""
    leaf = x.detach().requires_grad_()
    out = run(made, leaf)
    out.backward(dout)
    return [out.detach().clone(), leaf.grad,
            *(p.grad for layer in made for p in layer.parameters())]


def same_as_by_messages(device, change, run, count=1, **options):
    torch.manual_seed(90 + dist.get_rank())
    x, dout = draw(T, H, device=device), draw(T, H, device=device)
    found = []
    for ep in (dist.group.WORLD, window(device)):
        made = layers(device, count, ep, **options)
        for layer in made:
            change(layer)
        found.append(step(made, run, x, dout))
    assert all(map(same_bits, *found))


def in_a_row(made, x):
    for layer in made:
        x = x + layer(x)[0]
    return x


class Squared(cadre.GroupedMLP):
    def forward(self, *given):
        y = super().forward(*given)
        return y + y * y


CHANGES = {
    "hook": lambda layer: layer.experts.register_forward_hook(lambda m, given, y: y + y * y),
    "norm": lambda layer: layer.experts.register_forward_hook(
        lambda m, given, y: functional.rms_norm(y, (H,))),
    "subclass": lambda layer: setattr(layer.experts, "__class__", Squared)}


def results_that_are_kept(rank, device, change):
    same_as_by_messages(device, CHANGES[change], in_a_row, 2)


class Adapted(cadre.GroupedMLP):
    """With an adapter, which multiplies all rows, and so do its gradients."""

    def forward(self, x, *given):
        return super().forward(x, *given) + functional.linear(x, self.adapter)


def rows_that_others_read(rank, device, frozen):
    """A window has room for more rows than come: hooks and subclasses find zeros there, in
    gradients, too."""
    torch.manual_seed(90 + rank)
    x, dout = draw(T, H, device=device), draw(T, H, device=device)
    seen, found = [], []
    for ep in (dist.group.WORLD, window(device)):
        layer, = layers(device, 1, ep)
        layer.experts.requires_grad_(not frozen)
        layer.experts.__class__ = Adapted
        layer.experts.adapter = torch.nn.Parameter(torch.eye(H, device=device))
        layer.experts.register_full_backward_hook(lambda m, dx, dy: seen.extend((dx[0], dy[0])))
        for run in (layer, layer, layer, torch.compile(layer, backend="aot_eager")):
            layer.zero_grad()
            found.append((*step([run], in_a_row, x, dout)[:2], layer.experts.adapter.grad))
    torch._dynamo.reset()  # other tests of these processes compile such layers, too
    assert seen and all(t.isfinite().all() for t in seen)
    for of_run in found:  # torch's product adds up in orders of its own
        torch.testing.assert_close(of_run, found[0], rtol=1e-5, atol=1e-5)


def anomalies(rank, device, tokens):
    """Who looks for NaN finds none in rows of nobody, though new memory is full of it."""
    torch.manual_seed(90 + rank)
    layer, = layers(device, 1, window(device, tokens=tokens), bias=True)
    fills = device.type == "cpu"  # of a GPU some operators would be refused
    torch.use_deterministic_algorithms(fills)
    try:
        assert not fills or torch.empty(1).isnan()
        with torch.autograd.detect_anomaly(check_nan=True):
            results = step([layer], in_a_row, draw(T, H, device=device), draw(T, H, device=device))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(t.isfinite().all() for t in results)


def results_that_a_checkpoint_keeps(rank, device):
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.cadre.grouped_mlp.default])

    def checkpointed(made, x):
        for layer in made:
            x = x + checkpoint(lambda t, layer=layer: layer(t)[0].square(), x,
                               use_reentrant=False, context_fn=kept)
        return x
    same_as_by_messages(device, lambda layer: None, checkpointed, 2)


def tokens_in_the_window(rank, device, again):
    torch.manual_seed(90 + rank)
    x, dout = draw(T, H, device=device), draw(T, H, device=device)
    ep = window(device)
    made = layers(device, 1, ep, dispatch_again=again)
    want = step(made, in_a_row, x, dout)
    for p in made[0].parameters():
        p.grad = None
    there = ep.empty_tokens(T).copy_(x).requires_grad_()
    out = made[0](there)[0]
    out.backward(dout)
    assert same_bits(out, want[0] - x) or torch.allclose(out, want[0] - x, atol=1e-5)
    assert all(same_bits(p.grad, w) for p, w in zip(made[0].parameters(), want[2:]))
    with torch.no_grad():  # nobody keeps it, so it is not copied
        there = ep.empty_tokens(T).copy_(x)
        assert ep._window.holds(there) is False and same_bits(made[0](there)[0], out)
    assert ep._window.holds(ep.empty_tokens(T)) and not ep._window.holds(x)


# The tests


@pytest.mark.parametrize("change", CHANGES)
def test_results_that_are_kept(ranks, change):
    ranks.run(results_that_are_kept, change)


@pytest.mark.parametrize("frozen", [False, True])
def test_rows_that_others_read(ranks, frozen):
    ranks.run(rows_that_others_read, frozen)


@pytest.mark.parametrize("tokens", [T, 4096])  # results of many are pushed
def test_anomalies(ranks, tokens):
    ranks.run(anomalies, tokens)


def test_results_that_a_checkpoint_keeps(ranks):
    ranks.run(results_that_a_checkpoint_keeps)


@pytest.mark.parametrize("again", [False, True])
def test_tokens_in_the_window(ranks, again):
    ranks.run(tokens_in_the_window, again)
