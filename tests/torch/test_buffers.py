"""Caller's buffers of cadre.GroupedLinear: out and dgrad_out, and what main_grad held."""

import pytest
import torch
from conftest import draw
from linear_reference import module

import cadre

COUNTS, ROWS = [6, 0, 9, 1, 4], 26  # six rows of tail
SENTINEL = 7.0


def buffers(device, dtype=torch.float32):
    return (torch.full((ROWS, 40), SENTINEL, dtype=dtype, device=device),
            torch.full((ROWS, 24), SENTINEL, dtype=dtype, device=device))


def inputs(device, dtype=torch.float32):
    return draw(ROWS, 24, dtype=dtype, device=device), draw(ROWS, 40, dtype=dtype, device=device)


@pytest.mark.parametrize("given", [("out",), ("dgrad_out",), ("out", "dgrad_out")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True},
                                     {"fuse_wgrad_accumulation": True}])
def test_same_bits_and_untouched_tails(device, given, dtype, options):
    layer = module(device, dtype=dtype, **options)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x, dy = inputs(device, dtype)
    plain = module(device, dtype=dtype)
    want_x = x.clone().requires_grad_()
    want = plain(want_x, COUNTS)
    want.backward(dy)

    chosen = {name: b for name, b in zip(("out", "dgrad_out"), buffers(device, dtype))
              if name in given}
    leaf = x.clone().requires_grad_()
    y = layer(leaf, COUNTS, **chosen)
    y.backward(dy)
    layer.backward_dw()
    for name, got, expected in (("out", y, want), ("dgrad_out", leaf.grad, want_x.grad)):
        assert torch.equal(got[:20], expected[:20])
        assert torch.all(got[20:] == (SENTINEL if name in given else 0))
        if name in given:
            assert got.data_ptr() == chosen[name].data_ptr()
            assert not chosen[name].requires_grad
    dw = layer.weight.main_grad if "fuse_wgrad_accumulation" in options else layer.weight.grad
    assert torch.equal(dw, plain.weight.grad)
    assert torch.equal(layer.bias.grad, plain.bias.grad)


def test_a_buffer_serves_again(device):
    layer, (out, dgrad_out) = module(device), buffers(device)
    for _ in range(3):
        x, dy = inputs(device)
        leaf = x.requires_grad_()
        layer(leaf, COUNTS, out=out, dgrad_out=dgrad_out).backward(dy)
        assert leaf.grad.data_ptr() == dgrad_out.data_ptr()


def test_a_buffer_overwritten_before_backward_is_seen(device):
    """exp keeps the layer's result for its own backward."""
    layer, (out, _) = module(device), buffers(device)
    x, _ = inputs(device)
    h = layer(x, COUNTS, out=out).exp().sum() + (layer(x, COUNTS, out=out) ** 2).sum()
    h.backward()  # exp keeps its own result
    y = layer(x, COUNTS, out=out)
    square = (y * y).sum()
    layer(x, COUNTS, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_a_gradient_overwritten_by_the_next_backward_is_seen(device):
    layer, (_, dgrad_out) = module(device), buffers(device)
    leaf, dy = inputs(device)
    leaf.requires_grad_()
    w = torch.ones(24, device=device, requires_grad=True)
    layer(leaf, COUNTS, dgrad_out=dgrad_out).backward(dy)
    norm = (dgrad_out * w).sum()
    leaf.grad = None
    layer(leaf, COUNTS, dgrad_out=dgrad_out).backward(dy)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        norm.backward()


def test_a_buffer_used_again_while_a_gradient_is_pending_is_seen(device):
    """dgrad_out of one layer is dy of the layer before, which still needs it."""
    first = module(device, n=24, delay_wgrad_compute=True, bias=False)
    second, (_, buffer) = module(device), buffers(device)
    for factor in (1, 2):
        x, dy = inputs(device)
        second(first(x, COUNTS), COUNTS, dgrad_out=buffer).backward(factor * dy)
    with pytest.raises(RuntimeError, match="version of dy is .* must be .* as in backward"):
        first.backward_dw()
    first.discard_wgrad()


@pytest.mark.parametrize("delay", [True, False])
def test_addresses_of_no_special_alignment(device, delay):
    """Buffers, main_grad and dy begin one element behind an aligned address."""
    def behind(*shape, dtype=torch.bfloat16):
        return draw(torch.Size(shape).numel() + 1, dtype=dtype, device=device)[1:].view(shape)

    layer = module(device, dtype=torch.bfloat16, fuse_wgrad_accumulation=True,
                   delay_wgrad_compute=delay)
    plain = module(device, dtype=torch.bfloat16)
    x, dy = draw(ROWS, 24, dtype=torch.bfloat16, device=device), behind(ROWS, 40)
    layer.weight.main_grad = behind(5, 40, 24, dtype=torch.float32)
    before = layer.weight.main_grad.clone()
    leaf, want_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = layer(leaf, COUNTS, out=behind(ROWS, 40), dgrad_out=behind(ROWS, 24))
    y.backward(dy)
    layer.backward_dw()
    want = plain(want_x, COUNTS)
    want.backward(dy)
    for got, expected in ((y[:20], want[:20]), (leaf.grad[:20], want_x.grad[:20]),
                          (layer.weight.main_grad - before, plain.weight.grad)):
        torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_input_with_leading_dimensions(device):
    layer, (out, dgrad_out) = module(device), buffers(device)
    x, dy = inputs(device)
    leaf = x.view(2, 13, 24).requires_grad_()
    y = layer(leaf, COUNTS, out=out, dgrad_out=dgrad_out)
    y.backward(dy.view(2, 13, 40))
    assert y.shape == (2, 13, 40) and y.data_ptr() == out.data_ptr()
    assert leaf.grad.data_ptr() == dgrad_out.data_ptr()
    y = layer(leaf, COUNTS, dgrad_out=dgrad_out)
    with pytest.raises(RuntimeError, match="dgrad_out is x.grad since an earlier backward"):
        y.backward(dy.view(2, 13, 40))


def test_without_gradients(device):
    layer, (out, _) = module(device), buffers(device)
    x, _ = inputs(device)
    with torch.no_grad():
        y = layer(x, COUNTS, out=out)
    assert y.data_ptr() == out.data_ptr() and not y.requires_grad
    assert torch.equal(y[:20], layer(x, COUNTS)[:20])


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
def test_buffers_that_do_not_fit(device, name):
    layer = module(device)
    x, _ = inputs(device)
    good = dict(zip(("out", "dgrad_out"), buffers(device)))[name]
    columns = good.shape[1]

    def refused(buffer, match, error=ValueError):
        before = buffer.detach().clone()
        with pytest.raises(error, match=match):
            layer(x, COUNTS, **{name: buffer})
        assert torch.equal(buffer.detach(), before)

    with pytest.raises(TypeError, match=f"{name} is a list, must be a tensor"):
        layer(x, COUNTS, **{name: [1.0]})
    refused(good.new_ones(ROWS + 1, columns), rf"{name} has shape \[27, {columns}\], must be \[26")
    refused(good.new_ones(2, 13, columns), rf"{name} has shape \[2, 13, {columns}\]")
    refused(good.to(torch.float64), rf"{name} is torch.float64, must be torch.float32",
            TypeError)
    refused(good.new_ones(columns, ROWS).t(), rf"{name} has strides \[1, 26\], must be contiguous")
    refused(good.clone().requires_grad_(), rf"{name} requires grad, must not")
    with pytest.raises(ValueError, match=f"{name} is on meta, must be on {device.type}"):
        layer(x, COUNTS, **{name: torch.empty_like(good, device="meta")})


def test_a_buffer_that_is_read_meanwhile(device):
    """One that nobody reads any more may be used again."""
    layer = module(device, k=24, n=24)
    x, dy = draw(ROWS, 24, device=device), draw(ROWS, 24, device=device)
    memory = draw(2 * ROWS, 24, device=device)
    for taken, out in ((x, x), (memory[:ROWS], memory[1:ROWS + 1])):
        with torch.no_grad(), pytest.raises(ValueError, match="out shares memory with the input"):
            layer(taken, COUNTS, out=out)
    over_weight = layer.weight.detach().view(-1)[:ROWS * 24].view(ROWS, 24)
    with torch.no_grad(), pytest.raises(ValueError, match="out shares memory with weight, must"):
        layer(x, COUNTS, out=over_weight)
    with pytest.raises(ValueError, match="dgrad_out shares memory with weight, must not"):
        layer(x.clone().requires_grad_(), COUNTS, dgrad_out=over_weight).backward(dy)
    scaled = module(device, k=24, n=24, bias=True, scale_bias=True)
    shared = torch.zeros(ROWS * 24, device=device)
    scaled.bias.data = shared[:scaled.bias.numel()].view_as(scaled.bias)
    with pytest.raises(ValueError, match="dgrad_out shares memory with bias, must not"):
        scaled(x.clone().requires_grad_(), COUNTS, bias_scale=torch.ones(ROWS, device=device),
               dgrad_out=shared.view(ROWS, 24)).backward(dy)
    leaf = x.clone().requires_grad_()
    given = dy.clone()
    with pytest.raises(ValueError, match="dgrad_out shares memory with the gradient of the result"):
        layer(leaf, COUNTS, dgrad_out=given).backward(given)
    with pytest.raises(ValueError, match="dgrad_out shares memory with the input, which"):
        layer(leaf, COUNTS, dgrad_out=leaf.detach()).backward(dy)
    (want,) = torch.autograd.grad(layer(leaf, COUNTS), leaf, dy)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    buffer = leaf.detach()
    layer(leaf, COUNTS, dgrad_out=buffer).backward(dy)
    assert torch.equal(buffer[:20], want[:20])


def test_buffers_side_by_side_in_one_memory(device):
    """Neighbours are two buffers; those that meet would have the gradient where the result is."""
    layer, (x, dy) = module(device), inputs(device)
    leaf, sizes = x.clone().requires_grad_(), (ROWS * 40, ROWS * 24)
    for first, second, meets in ((0, sizes[0], False), (sizes[1], 0, False),
                                 (0, sizes[0] - 1, True), (sizes[1] - 1, 0, True)):
        memory = torch.full((sum(sizes),), SENTINEL, device=device)
        out = memory[first:first + sizes[0]].view(ROWS, 40)
        dgrad_out = memory[second:second + sizes[1]].view(ROWS, 24)
        if meets:
            with pytest.raises(ValueError, match="^dgrad_out shares memory with out, must not"):
                layer(leaf, COUNTS, out=out, dgrad_out=dgrad_out)
            assert (memory == SENTINEL).all()
        else:
            y = layer(leaf, COUNTS, out=out, dgrad_out=dgrad_out)
            y.backward(dy)
            assert torch.equal(y[:20], layer(x, COUNTS)[:20])
            assert torch.equal(dgrad_out[:20],
                               torch.autograd.grad(layer(leaf, COUNTS), leaf, dy)[0][:20])


@pytest.mark.parametrize("rows", [64, 2048])  # of the larger expert TMA adds the gradients
def test_subnormal_gradients_stay(device, rows):
    layer = cadre.GroupedLinear(1, 64, 128, bias=False, device=device, params_dtype=torch.bfloat16,
                                fuse_wgrad_accumulation=True)
    weight, = layer.parameters()
    weight.main_grad = torch.full(weight.shape, 1e-40, device=device)
    old = weight.main_grad.clone()
    y = layer(torch.zeros(rows, 64, device=device, dtype=torch.bfloat16), [rows])
    y.backward(torch.randn(y.shape).to(y))
    assert torch.equal(weight.main_grad, old) and old.all()
