"""Modules under torch.compile: one graph, no compilation again when counts and rows change."""

import pytest
import torch
from conftest import draw
from linear_reference import fill, module
from torch._dynamo.testing import CompileCounterWithBackend

import cadre

E, K = 5, 24
STEPS = [([3, 0, 9, 1, 4], 20), ([0, 0, 0, 0, 7], 20), ([4, 4, 4, 4, 4], 32), ([1, 0, 0, 0, 0], 9)]


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()


def compiled(layer):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(layer, fullgraph=True, backend=counter), counter


def learn(call, layer, x, *rest):
    """The result and all gradients."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    for rows in (x, *(t for t in rest if torch.is_tensor(t) and t.is_floating_point())):
        torch._dynamo.mark_dynamic(rows, 0)
    y = call(x, *rest)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def assert_same_without_compiling_again(device, layer, rest_of):
    call, counter = compiled(layer)
    for counts, rows in STEPS:
        x = draw(rows, K, device=device)
        rest = rest_of(torch.tensor(counts, device=device), rows)
        got = learn(call, layer, x, *rest)
        assert all(map(torch.equal, got, learn(layer, layer, x, *rest)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"save_original_input": True}])
def test_grouped_linear(device, packed, options):
    assert_same_without_compiling_again(device, module(device, packed=packed, **options),
                                        lambda counts, rows: (counts,))


def test_ready_offsets(device):
    assert_same_without_compiling_again(
        device, module(device), lambda counts, rows: (
            cadre.offsets(counts, "counts", rows),))


def test_grouped_mlp(device):
    layer = cadre.GroupedMLP(E, K, 40, bias=True, device=device)
    assert_same_without_compiling_again(
        device, layer, lambda counts, rows: (counts, torch.rand(rows, device=device)))


@pytest.mark.parametrize("fused", [True, False])
def test_sequential(device, fused):
    mlp = cadre.ops.Sequential(cadre.ops.GroupedLinear(E, K, 64, device=device),
                               cadre.ops.ScaledSwiGLU(),
                               cadre.ops.GroupedLinear(E, 32, K, device=device))
    fill(mlp[0])
    assert_same_without_compiling_again(
        device, mlp, lambda counts, rows: (counts, torch.rand(rows, device=device),
                                           counts if fused else counts.clone()))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_row_with_equal_counts_of_the_host(device, kind):
    """No compiler knows whether two lists are one; equal ones are one grouped_mlp."""
    mlp = cadre.ops.Sequential(cadre.ops.GroupedLinear(E, K, 64, device=device),
                               cadre.ops.SwiGLU(),
                               cadre.ops.GroupedLinear(E, 32, K, device=device))
    call = torch.compile(mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    for counts, rows in STEPS[:2]:
        x = draw(rows, K, device=device)
        given = kind(counts), kind(list(counts))
        assert [step.name for step in mlp.plan(*given)] == ["grouped_mlp"]
        assert torch.equal(call(x, *given), mlp(x, *given))
    others = kind([3, 0, 9, 1, 4]), kind([3, 0, 9, 4, 1])
    assert len(mlp.plan(*others)) == 3
    x = draw(20, K, device=device)
    assert torch.equal(call(x, *others), mlp(x, *others))


def test_wrong_counts_of_the_host(device):
    """A graph break ends with the error; without one, torch's own error has the words."""
    layer, x = module(device), draw(20, K, device=device)
    with pytest.raises(ValueError, match=r"^m_splits is \[3, 0, 9, 1, 40\], must be 0 or more "):
        torch.compile(layer, dynamic=True, backend="aot_eager")(x, [3, 0, 9, 1, 40])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="m_splits is a list of 5, must be 0"):
        torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")(
            x, [3, 0, 9, 1, 40])


def test_moe(device):
    layer = cadre.MoE(E, K, 40, top_k=2, normalize=True, device=device)
    call, counter = compiled(layer)
    for tokens in (20, 7, 33):
        x = draw(tokens, K, device=device)

        def loss(run, x=x):
            def output(x):
                out, router = run(x)
                return out + router.load_balancing_loss()
            return output

        got, want = learn(loss(call), layer, x), learn(loss(layer), layer, x)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_another_recipe_compiles_again(device):
    layer = module(device, k=64, dtype=torch.bfloat16)
    call, counter = compiled(layer)
    x, counts = draw(20, 64, dtype=torch.bfloat16, device=device), torch.tensor([4] * 5)
    plain = call(x, counts)
    with cadre.autocast(recipe="mxfp8"):
        assert torch.equal(call(x, counts), layer(x, counts))
        assert not torch.equal(call(x, counts), plain)
    assert torch.equal(call(x, counts), plain)
    assert counter.frame_count == 2


def test_a_context_inside_of_the_compiled_part(device):
    layer = module(device, k=64, dtype=torch.bfloat16)
    x, counts = draw(20, 64, dtype=torch.bfloat16, device=device), torch.tensor([4] * 5)

    def inside(x, counts):
        with cadre.autocast(recipe="mxfp8"):
            y = layer(x, counts)
        return y, layer(x, counts)

    call, _ = compiled(inside)
    for got, want in zip(call(x, counts), inside(x, counts)):
        assert torch.equal(got, want)


def test_what_is_not_compiled_says_so(device):
    """main_grad and delayed gradients are Python at backward time: a graph break, no surprise."""
    layer = module(device, delay_wgrad_compute=True)
    x, counts = draw(20, K, device=device), torch.tensor([4] * 5, device=device)
    call, _ = compiled(layer)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="are no part of a graph"):
        call(x, counts)
    torch._dynamo.reset()
    y = torch.compile(layer, backend="aot_eager")(x, counts)
    y.sum().backward()
    layer.backward_dw()
    assert layer.weight.grad is not None
