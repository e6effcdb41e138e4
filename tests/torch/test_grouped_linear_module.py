"""cadre.GroupedLinear: results and gradients."""

import pytest
import torch
from conftest import assert_close, assert_seen, draw
from linear_reference import experts_of, gradients, linear, module

import cadre

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [(w, b) for w in (True, False) for b in (None, True, False)]


def learn(layer, x, splits, dy, **arguments):
    """(y, dx, dw [E, N, K], dbias [E, N] or None) of one forward and backward."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x, splits, **arguments)
    y.backward(dy)
    dbias = gradients(layer, "bias").clone() if layer.use_bias else None
    return y.detach(), x.grad, gradients(layer, "weight").clone(), dbias


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_equals_a_linear_per_expert(device, case, dtype, packed):
    counts, rows = case
    layer = module(device, packed=packed, dtype=dtype)
    x, dy = draw(rows, 24, dtype=dtype, device=device), draw(rows, 40, dtype=dtype, device=device)
    dy[sum(counts):] = 0
    y, dx, dw, dbias = learn(layer, x, torch.tensor(counts, device=device), dy)

    x64 = x.double().requires_grad_()
    weight = [w.detach().double().requires_grad_() for w in experts_of(layer, "weight")]
    bias = [b.detach().double().requires_grad_() for b in experts_of(layer, "bias")]
    want = linear(x64, weight, bias, counts)
    want.backward(dy.double())
    assert_close(y, want, terms=24)
    assert_close(dx, x64.grad, terms=40)
    assert_close(dw, torch.stack([w.grad for w in weight]), terms=rows + 1)
    assert_close(dbias, torch.stack([b.grad for b in bias]), terms=rows + 1)


@pytest.mark.parametrize(("packed_weight", "packed_bias"), LAYOUTS)
def test_layouts_give_the_same_bits(device, packed_weight, packed_bias):
    counts = torch.tensor([3, 0, 9, 1, 4], device=device)
    x, dy = draw(20, 24, device=device), draw(20, 40, device=device)
    options = {"bias": packed_bias is not None}
    layer = module(device, **options)
    mixed = cadre.GroupedLinear(5, 24, 40, device=device, single_grouped_weight=packed_weight,
                                single_grouped_bias=bool(packed_bias), **options)
    mixed.load_state_dict(layer.state_dict())
    assert_same(learn(mixed, x, counts, dy), learn(layer, x, counts, dy))


@pytest.mark.parametrize("experts", [1, 70, 200])
@pytest.mark.parametrize("packed", [True, False])
def test_any_number_of_experts(device, experts, packed):
    counts = [e % 3 for e in range(experts)]
    layer = module(device, experts, 8, 16, packed=packed)
    x, dy = draw(sum(counts) + 2, 8, device=device), draw(sum(counts) + 2, 16, device=device)
    y, dx, dw, dbias = learn(layer, x, counts, dy)
    assert_close(y, linear(x, experts_of(layer, "weight"), experts_of(layer, "bias"), counts),
                 terms=8)
    for e, count in enumerate(counts):
        assert (dw[e].abs().max() > 0) == (count > 0)
        assert (dbias[e].abs().max() > 0) == (count > 0)


def test_experts_without_rows_have_zero_gradients(device):
    layer = module(device, packed=False)
    learn(layer, draw(4, 24, device=device), [0, 0, 4, 0, 0], draw(4, 40, device=device))
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.abs().max() > 0) == name.endswith("2"), name


def test_forms_of_splits(device):
    counts = [3, 0, 9, 1, 4]
    layer = module(device)
    x, dy = draw(20, 24, device=device), draw(20, 40, device=device)
    want = learn(layer, x, counts, dy)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert_same(learn(layer, x, torch.tensor(counts, dtype=dtype), dy), want)
        assert_same(learn(layer, x, torch.tensor(counts, dtype=dtype, device=device), dy), want)
    assert_same(learn(layer, x, tuple(counts), dy), want)
    ready = cadre.offsets(torch.tensor(counts, device=device), "counts", 20)
    assert_same(learn(layer, x, ready, dy), want)
    assert_same(learn(layer, x, cadre.Offsets(ready.offsets), dy), want)


def test_splits_beyond_the_rows_are_cut(device):
    layer = module(device)
    x = draw(10, 24, device=device)
    counts = torch.tensor([3, 0, 9, 1, 4], device=device)
    where = cadre.offsets(counts, "counts", 10)
    assert where.status.item() != 0
    assert torch.equal(layer(x, where), layer(x, [3, 0, 7, 0, 0]))
    if device.type == "cuda":  # counts on the host are looked at
        assert torch.equal(layer(x, counts), layer(x, where))


def test_leading_dimensions(device):
    layer = module(device, packed=False)
    x, dy = draw(2, 3, 4, 24, device=device), draw(2, 3, 4, 40, device=device)
    counts = [5, 5, 5, 5, 4]
    got = learn(layer, x, counts, dy)
    flat = learn(layer, x.reshape(24, 24), counts, dy.reshape(24, 40))
    assert got[0].shape == (2, 3, 4, 40) and got[1].shape == x.shape
    assert_same([t.reshape(w.shape) for t, w in zip(got, flat)], flat)


@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}])
def test_strides_of_input_and_gradient(device, options):
    layer = module(device, **options)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    counts = [3, 0, 9, 1, 4]
    wide, wide_dy = draw(24, 20, device=device), draw(20, 80, device=device)

    def run(x, dy):
        layer.zero_grad()
        layer.weight.main_grad.zero_()
        leaf = x.detach().requires_grad_()
        layer(leaf, counts).backward(dy)
        dw = layer.weight.main_grad.clone() if options else layer.weight.grad
        return leaf.grad, dw, layer.bias.grad

    want = run(wide.t().contiguous(), wide_dy[:, ::2].contiguous())
    assert_same(run(wide.t(), wide_dy[:, ::2]), want)


@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}])
def test_gradient_of_a_sum(device, options):
    """autograd gives it as one number with strides of zero."""
    layer = module(device, **options)
    counts = [3, 0, 9, 1, 4]
    x = draw(17, 24, device=device, grad=True)
    layer(x, counts).sum().backward()
    layer.backward_dw()
    got = x.grad, layer.weight.grad, layer.bias.grad
    want = learn(module(device), x, counts, torch.ones(17, 40, device=device))
    assert_same(got, want[1:])


@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}])
def test_gradient_of_a_sum_of_no_rows(device, options):
    layer = module(device, packed=False, **options)
    layer(torch.zeros(0, 24, device=device, requires_grad=True), [0] * 5).sum().backward()
    layer.backward_dw()
    assert all(torch.all(p.grad == 0) for p in layer.parameters())


@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True},
                                     {"delay_wgrad_compute": True}])
def test_frozen_parts(device, options):
    counts, x, dy = [3, 0, 9, 1, 4], draw(17, 24, device=device), draw(17, 40, device=device)
    want = learn(module(device), x, counts, dy)

    def run(frozen):
        layer = module(device, **options)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        leaf = x.detach().requires_grad_("x" not in frozen)
        for name in ("weight", "bias"):
            getattr(layer, name).requires_grad_(name not in frozen)
        y = layer(leaf, counts)
        assert torch.equal(y, want[0])
        if y.requires_grad:
            y.backward(dy)
            layer.backward_dw()
        dw = layer.weight.main_grad if "fuse_wgrad_accumulation" in options else layer.weight.grad
        return leaf.grad, dw if "weight" not in frozen else None, layer.bias.grad

    for frozen in ((), ("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "bias"),
                   ("weight", "bias"), ("x", "weight", "bias")):
        expected = [None if name in frozen else grad
                    for name, grad in zip(("x", "weight", "bias"), want[1:])]
        assert_same(run(frozen), expected)


def test_some_frozen_experts(device):
    for options in ({}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        layer = module(device, packed=False, **options)
        for e in range(5):
            layer._parameters[f"weight{e}"].requires_grad_(e != 2)
            if e != 2:
                layer._parameters[f"weight{e}"].main_grad = torch.zeros(40, 24, device=device)
        layer(draw(10, 24, device=device), [2] * 5).sum().backward()
        layer.backward_dw()
        assert layer.weight2.grad is None
        assert_seen(layer.weight1.main_grad if "fuse_wgrad_accumulation" in options
                    else layer.weight1.grad)


def test_return_bias(device):
    counts, x = [3, 0, 9, 1, 4], draw(17, 24, device=device)
    plain = module(device, bias=False)
    for packed in (True, False):
        layer = module(device, packed=packed, return_bias=True)
        y, bias = layer(x, counts)
        assert torch.equal(y, plain(x, counts))
        if packed:
            assert bias is layer.bias
        else:
            assert [id(b) for b in bias] == [id(b) for b in experts_of(layer, "bias")]
    y, bias = module(device, bias=False, return_bias=True)(x, counts)
    assert bias is None


@pytest.mark.parametrize("autocast", [False, True])
def test_a_returned_bias_has_the_type_of_the_result(device, autocast):
    """Each expert's, with a gradient; a packed one is the parameter."""
    counts, half = [3, 0, 9, 1, 4], torch.bfloat16
    x = draw(17, 24, dtype=torch.float32 if autocast else half, device=device)
    with torch.autocast(device.type, half, enabled=autocast):
        layer = module(device, packed=False, return_bias=True)
        y, bias = layer(x, counts)
        packed = module(device, return_bias=True)
        assert packed(x, counts)[1] is packed.bias
    assert y.dtype == half and all(b.dtype == half for b in bias) and len(bias) == 5
    bias[3].sum().backward()
    assert torch.equal(layer.bias3.grad, torch.ones(40, device=device))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}])
def test_scaled_bias(device, packed, options):
    counts = [3, 0, 9, 1, 4]
    layer = module(device, packed=packed, scale_bias=True, **options)
    x, dy = draw(20, 24, device=device, grad=True), draw(20, 40, device=device)
    scale = draw(20, device=device, grad=True)
    y = layer(x, counts, bias_scale=scale)
    y.backward(dy)

    scale64 = scale.detach().double().requires_grad_()
    bias = [b.detach().double().requires_grad_() for b in experts_of(layer, "bias")]
    want = linear(x.detach(), [w.detach() for w in experts_of(layer, "weight")], bias, counts,
                  scale64)
    want.backward(dy.double())
    assert_close(y, want, terms=24)
    assert_close(scale.grad, scale64.grad, terms=40)
    assert_close(gradients(layer, "bias"), torch.stack([b.grad for b in bias]), terms=20)


def test_gradients_add_up_over_microbatches(device):
    layer = module(device)
    counts, x = [3, 0, 9, 1, 4], draw(17, 24, device=device)
    dy = draw(17, 40, device=device)
    once = learn(layer, x, counts, dy)
    layer(x, counts).backward(dy)
    assert torch.equal(layer.weight.grad, 2 * once[2])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}])
def test_activation_checkpointing(device, reentrant, options):
    counts, x = torch.tensor([3, 0, 9, 1, 4], device=device), draw(17, 24, device=device)
    dy = draw(17, 40, device=device)
    want = learn(module(device), x, counts, dy)
    layer = module(device, **options)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    leaf = x.detach().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(layer, leaf, counts, use_reentrant=reentrant)
    y.backward(dy)
    dw = layer.weight.main_grad if options else layer.weight.grad
    assert_same((y.detach(), leaf.grad, dw, layer.bias.grad), want)


@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}])
def test_torch_autocast(device, options):
    counts, x = [3, 0, 9, 1, 4], draw(17, 24, device=device, grad=True)
    layer = module(device, packed=False, **options)
    for w in experts_of(layer, "weight"):
        w.main_grad = torch.zeros_like(w)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = layer(x, counts)
    y.float().sum().backward()
    cast = module(device, packed=False, dtype=torch.bfloat16)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, cast(x.bfloat16(), counts))
    dw = torch.stack([w.main_grad if options else w.grad for w in experts_of(layer, "weight")])
    assert dw.dtype == x.grad.dtype == layer.bias0.grad.dtype == torch.float32
    assert_seen(dw)


def test_no_grad(device):
    layer = module(device, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    with torch.no_grad():
        y = layer(draw(17, 24, device=device, grad=True), [3, 0, 9, 1, 4])
    assert not y.requires_grad
