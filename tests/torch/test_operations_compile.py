"""torch.compile over the operations: one graph, any rows, any counts."""

import pytest
import torch

import cadre
from conftest import COUNTS, draw, draw_routing, offsets_of

E, H, TOP_K = 5, 8, 2


def layer(tokens, logits, w1, w2, rows):
    """Experts of two products, from routing to combine, forward only on what the device knows."""
    chosen = cadre.routing(logits, TOP_K, "sigmoid", normalize=True)
    map_ = cadre.offsets_of_routing(chosen.experts, E, rows)
    x, row_prob = cadre.permute(tokens, map_, prob=chosen.prob)
    z = cadre.grouped_gemm(x, w1, cadre.Offsets(map_.offsets))
    h = cadre.activation(z, map_.offsets, row_prob, "swiglu")
    y = cadre.grouped_gemm(h, w2, map_)
    return cadre.combine(y, map_.offsets, map_.row_of, map_.slot_of)


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f):
    return torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)


def test_compiled_chain(device, fresh):
    """Values and gradients are those of eager; no recompile for other tokens and other choices."""
    fast = compiled(layer)
    w1 = draw(E, 12, H, device=device, grad=True)
    w2 = draw(E, H, 6, device=device, grad=True)
    for i, count in enumerate((7, 12, 33, 5)):
        tokens, logits = (draw(count, n, device=device, grad=True) for n in (H, E))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(tokens, logits, w1, w2, count * TOP_K)
        want = layer(tokens, logits, w1, w2, count * TOP_K)
        assert torch.equal(got, want) and want.abs().max() > 0
        inputs, d = (tokens, logits, w1, w2), draw(count, H, device=device)
        for x, y in zip(torch.autograd.grad(got, inputs, d), torch.autograd.grad(want, inputs, d)):
            assert torch.equal(x, y) and y.abs().max() > 0


@pytest.mark.parametrize("storage", ["packed", "column", "discrete"])
def test_compiled_product(device, fresh, storage):
    def f(x, w, bias, offsets):
        return cadre.grouped_gemm(x, w, offsets, bias=bias).sin()

    fast = compiled(f)
    leaf = draw(E, 7, H, device=device)
    w = {"packed": leaf, "column": leaf.transpose(1, 2).contiguous().transpose(1, 2),
         "discrete": list(leaf.unbind(0))}[storage]
    learned = list(w) if storage == "discrete" else [w]
    for one in learned:
        one.requires_grad_()
    bias = draw(E, 7, device=device, grad=True)
    for i, (counts, tail) in enumerate(COUNTS.values()):
        rows = max(sum(counts) + tail, 2)
        x, offsets = draw(rows, H, device=device, grad=True), offsets_of(counts, device)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(x, w, bias, offsets)
        want = f(x, w, bias, offsets)
        assert torch.equal(got, want)
        d = draw(rows, 7, device=device)
        for a, b in zip(torch.autograd.grad(got, (x, bias, *learned), d),
                        torch.autograd.grad(want, (x, bias, *learned), d)):
            assert torch.equal(a, b) and a.stride() == b.stride()


def test_compiled_out(device, fresh):
    """Overloads that write are seen to write."""
    def f(x, w, offsets, y):
        torch.ops.cadre.grouped_gemm.out(x, [w], offsets, "fprop", out=[y])
        return y * 2

    fast = compiled(f)
    w = draw(E, 7, H, device=device)
    for i, rows in enumerate((20, 25, 31)):
        offsets = offsets_of([3, 0, 8, 1, 6], device)
        x, y = draw(rows, H, device=device), draw(rows, 7, device=device)
        other = y.clone()
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(x, w, offsets, y)
        assert torch.equal(got, f(x, w, offsets, other)) and torch.equal(y, other)


@pytest.mark.parametrize("format,axis", [("mxfp8", "along_k"), ("nvfp4:rht", "along_rows"),
                                         ("bf16", "along_k")])
def test_compiled_quantize(device, fresh, format, axis):
    def f(x, offsets):
        parts = cadre.quantize(x, offsets, format, axis)
        return cadre.dequantize(parts, offsets, format, axis, shape=x.shape) * 2

    fast = compiled(f)
    for i, (rows, width) in enumerate(((20, 33), (37, 48), (55, 65))):
        x, offsets = draw(rows, width, device=device), offsets_of([3, 0, 8, 1, 6], device)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(x, offsets)
        assert torch.equal(got, f(x, offsets)) and got.abs().max() > 0


def test_compiled_offsets(device, fresh):
    def f(ends, experts, rows):
        made = cadre.offsets(ends, "ends", rows)
        map_ = cadre.offsets_of_routing(experts, E, rows)
        return made.offsets + map_.offsets, map_.slot_of * 2

    fast = compiled(f)
    for i, rows in enumerate((20, 30, 44)):
        ends = torch.tensor([3, 3, 9, 9, 20 + i], device=device, dtype=torch.int32)
        experts = draw_routing(9 + i, TOP_K, E, device)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = fast(ends, experts, rows)
        assert all(torch.equal(a, b) for a, b in zip(got, f(ends, experts, rows)))
