"""cadre.ops.Quantize: an operation that rounds as quantising does."""

import pytest
import torch
from conftest import assert_seen, draw
from linear_reference import fill

import cadre
from cadre import ops

R, K, N = 6, 40, 24

# The formats of x in fprop and of dy in dgrad.
FORMATS = {
    "f32": ("f32", "f32"), "bf16": ("bf16", "bf16"), "f16": ("f16", "f16"),
    "fp8_tensor": ("fp8_tensor", "fp8_tensor:e5m2"), "fp8_block": ("fp8_block", "fp8_block"),
    "mxfp8": ("mxfp8", "mxfp8"), "mxfp4": ("bf16", "bf16"), "f32,pinned": ("f32", "f32"),
    "fp8_block,wgrad=bf16,pinned": ("fp8_block", "fp8_block"),
    "nvfp4,dgrad=bf16": ("nvfp4", "bf16"), "mxfp8,fprop=nvfp4,dgrad=fp8_tensor": (
        "nvfp4", "fp8_tensor:e5m2"),
    "bf16,fprop=mxfp8:floor*mxfp8:2d,dgrad=mxfp8:e5m2*mxfp8:2d": ("mxfp8:floor", "mxfp8:e5m2"),
    "fprop=bf16,dgrad=mxfp8,wgrad=f32": ("bf16", "mxfp8")}
# Whose codes of what is rounded are the same codes. The expert's scale of nvfp4 may be another.
SURE = [recipe for recipe in FORMATS if "nvfp4" not in recipe]


def rounded(x, format):
    rows = x.reshape(-1, x.shape[-1])
    offsets = torch.tensor([0, len(rows)], dtype=torch.int32, device=x.device)
    codes = cadre.quantize(rows, offsets, format)
    return cadre.dequantize(codes, offsets, format, shape=rows.shape, dtype=x.dtype).view(x.shape)


def learn(op, x, dy):
    leaf = x.clone().requires_grad_()
    y = op(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True), (False, False)])
def test_what_it_rounds(device, which, dtype, recipe):
    x, dy = (draw(2, 3, K, dtype=dtype, device=device) for _ in range(2))
    before = x.clone()
    with cadre.autocast(recipe=recipe):
        y, dx = learn(ops.Quantize(*which), x, dy)  # backward outside, under the same recipe
    x_format, dy_format = FORMATS[recipe]
    assert torch.equal(y, rounded(x, x_format) if which[0] else x)
    assert torch.equal(dx, rounded(dy, dy_format) if which[1] else dy)
    assert torch.equal(x, before) and y.dtype == dtype
    assert_seen(y)
    assert_seen(dx)
    if dtype == torch.float32 and x_format != "f32":
        assert torch.equal(y, x) == (not which[0])


def test_outside_of_a_recipe(device):
    x = draw(R, K, device=device)
    assert ops.Quantize()(x) is x and ops.Quantize(backward=True)(x) is x
    with cadre.autocast(enabled=False):
        assert ops.Quantize()(x) is x
    with cadre.autocast(recipe="bf16"):
        assert ops.Quantize(backward=True)(half := x.bfloat16()) is half
        assert ops.Quantize(forward=False)(x) is x


@pytest.mark.parametrize("recipe", SURE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_rounds_alike(device, dtype, recipe):
    """The formats are those of the library: what it rounds is rounded there already."""
    linear = ops.GroupedLinear(1, K, N, device=device, dtype=dtype)
    fill(linear)
    counts = torch.tensor([R], device=device)
    x, dy = draw(R, K, dtype=dtype, device=device), draw(R, N, dtype=dtype, device=device)
    found = []
    for row in (ops.Sequential(linear), ops.Sequential(ops.Quantize(), linear),
                ops.Sequential(linear, ops.Quantize(forward=False, backward=True))):
        with cadre.autocast(recipe=recipe):
            found.append(learn(lambda leaf, row=row: row(leaf, counts), x, dy))
    for got in found[1:]:
        for g, want in zip(got, found[0], strict=True):
            assert torch.equal(g, want)
    assert_seen(found[0][0])


def test_gradients_that_round_at_random(device):
    """nvfp4 rounds dy without bias, with other numbers each time, which torch's seed decides."""
    x, dy = (draw(R, K, device=device) for _ in range(2))
    op = ops.Quantize(forward=False, backward=True)

    def gradient():
        with cadre.autocast(recipe="nvfp4"):
            return learn(op, x, dy)[1]

    torch.manual_seed(3)
    first, second = gradient(), gradient()
    torch.manual_seed(3)
    assert torch.equal(gradient(), first) and not torch.equal(first, second)
    many = torch.stack([gradient() for _ in range(400)]).double()
    spread = many.std(0) / 20  # of the mean
    # Codes at the end of the range are never beyond it, so the largest of a block may have a bias.
    off = ((many.mean(0) - dy.double()).abs() > 5 * spread + 1e-6).double().mean()
    assert off < 0.1 and (spread > 0).double().mean() > 0.5


def test_second_derivatives_are_straight_through(device):
    x = draw(R, K, grad=True, device=device)
    with cadre.autocast(recipe="mxfp8"):
        y = ops.Quantize(backward=True)(x ** 3)
        first, = torch.autograd.grad((y ** 2).sum() / 2, x, create_graph=True)
        second, = torch.autograd.grad(first.sum(), x)
    x, y = x.detach(), y.detach()
    torch.testing.assert_close(first.detach(), y * 3 * x ** 2)  # y is rounded already
    slope = 3 * x ** 2
    torch.testing.assert_close(second, rounded(slope, "mxfp8") * slope + y * 6 * x)


@pytest.mark.parametrize("shape", [(0, K), (0, 3, K), (3, 0), (5,)])
def test_shapes(device, shape):
    x = draw(*shape, device=device)
    with cadre.autocast(recipe="mxfp8"):
        y, dx = learn(ops.Quantize(backward=True), x, x)
    assert y.shape == dx.shape == x.shape
    if x.numel():
        assert torch.equal(y, rounded(x, "mxfp8")) and torch.equal(dx, y)


def test_in_a_compiled_graph(device):
    op = ops.Quantize(backward=True)
    x, dy = (draw(R, K, device=device) for _ in range(2))
    torch._dynamo.reset()
    fast = torch.compile(op, backend="aot_eager", fullgraph=True)
    for recipe in ("mxfp8", "fp8_tensor"):
        with cadre.autocast(recipe=recipe):
            for got, want in zip(learn(fast, x, dy), learn(op, x, dy), strict=True):
                assert torch.equal(got, want)
    torch._dynamo.reset()


def test_errors(device):
    for name in ("forward", "backward"):
        with pytest.raises(TypeError, match=f"^{name} is an int, must be a bool"):
            ops.Quantize(**{name: 1})
    with pytest.raises(TypeError, match="^input is torch.int64, must be torch.float32"):
        ops.Quantize()(torch.ones(3, 4, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match=r"^input has shape \[\], must be \[..., columns\]"):
        ops.Quantize()(torch.tensor(3.0, device=device))
    assert repr(ops.Quantize()) == "Quantize(forward=True, backward=False)"
