"""cadre.ops: operations that compute next to nothing, extra outputs, constants of activations, and
rows as containers."""

import math

import pytest
import torch
from conftest import assert_close, assert_seen, draw
from linear_reference import fill
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cadre
from cadre import ops

R, C = 12, 128


def learn(op, x, *extra, dy=None):
    """(result, gradients of x and of the extra inputs that are floats)."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *extra)]
    y = op(*leaves)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y.detach(), *(leaf.grad for leaf in leaves)


def test_identity_and_bias(device):
    x, dy = draw(3, R, C, device=device), draw(3, R, C, device=device)
    assert ops.Identity()(x) is x
    op = ops.Bias(C, device=device)
    assert op.bias.shape == (C,) and not op.bias.any() and op.local_size == C
    with torch.no_grad():
        op.bias.copy_(draw(C))
    y, dx = learn(op, x, dy=dy)
    assert torch.equal(y, x + op.bias) and torch.equal(dx, dy)
    assert_close(op.bias.grad, dy.double().sum((0, 1)), terms=100)
    assert ops.Bias(8, device="meta", dtype=torch.bfloat16).bias.dtype == torch.bfloat16
    assert str(op) == f"Bias({C})"


def test_errors_of_bias(device):
    op = ops.Bias(C, device=device)
    with pytest.raises(ValueError, match=r"^input has shape \[3, 5\], must be \[..., 128\]; the "):
        op(torch.zeros(3, 5, device=device))
    with pytest.raises(TypeError, match="^input is torch.int64, must be torch.float32"):
        op(torch.zeros(3, C, dtype=torch.int64, device=device))
    with pytest.raises(TypeError, match="^dtype is torch.float64, must be"):
        ops.Bias(C, dtype=torch.float64)
    with pytest.raises(ValueError, match="^size is 0, must be 1 or more"):
        ops.Bias(0)


def test_a_part_of_a_bias(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: {"four": 4}[group])
    split = {"tensor_parallel": True, "tensor_parallel_group": "four", "device": "cpu"}
    assert ops.Bias(8, **split).bias.shape == (2,)
    with pytest.raises(ValueError, match="^size is 6, must be a multiple of 4, the ranks of "):
        ops.Bias(6, **split)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_extra_output(device, in_place):
    x = draw(R, C, device=device, grad=True)
    a, b = draw(R, C, device=device), draw(R, C, device=device)
    y, extra = ops.MakeExtraOutput(in_place=in_place)(x)
    assert torch.equal(y, x) and torch.equal(extra, x)
    given = b.clone()
    torch.autograd.backward([y, extra], [a, given])
    assert torch.equal(x.grad, a + b) and torch.equal(given, a + b if in_place else b)
    for which in (0, 1):  # the other has no gradient
        leaf = x.detach().requires_grad_()
        ops.MakeExtraOutput(in_place=in_place)(leaf)[which].backward(a)
        assert torch.equal(leaf.grad, a)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_extra_output_whose_gradient_is_one_number(device, in_place):
    """sum() gives one number for all elements, to which nothing can be added in place."""
    leaf = draw(R, C, device=device, grad=True)
    y, extra = ops.MakeExtraOutput(in_place=in_place)(leaf)
    (2 * y.sum() + extra.sum()).backward()
    assert (leaf.grad == 3).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_extra_input(device, in_place):
    x, extra, dy = (draw(R, C, device=device) for _ in range(3))
    got = learn(ops.AddExtraInput(in_place=in_place), x, extra, dy=dy)
    for g, want in zip(got, (x + extra, dy, dy), strict=True):
        assert torch.equal(g, want)
    y = ops.AddExtraInput(in_place=in_place)(x, extra)
    assert (y.data_ptr() == extra.data_ptr()) == in_place


def test_an_extra_input_under_a_checkpoint_adds_again(device):
    """As its documentation says, and as add_ of torch does."""
    x = draw(R, C, device=device, grad=True)
    for in_place in (False, True):
        op, extra = ops.AddExtraInput(in_place=in_place), torch.zeros(R, C, device=device)
        y = checkpoint(lambda z, op=op, extra=extra: op(z, extra).square(), x, use_reentrant=False)
        y.sum().backward()
        assert torch.equal(extra, 2 * x.detach() if in_place else torch.zeros_like(x))


@pytest.mark.parametrize("of_leaf", [False, True])
def test_an_extra_input_in_compiled_code(device, of_leaf):
    """In place, of a leaf and of what is computed: gradients, and what is left in its memory."""
    x, extra, dy = (draw(R, C, device=device) for _ in range(3))
    op = ops.AddExtraInput(in_place=True)

    def call(x, extra):
        return op(x * 3, extra if of_leaf else extra * 2) * 1

    results = []
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        given = [t.clone().requires_grad_() for t in (x, extra)]
        y = run(*given)
        results.append([y, *torch.autograd.grad(y, given, dy), given[1]])
    assert all(map(torch.equal, *results))


def test_errors_of_extra_inputs(device):
    x = draw(R, C, device=device)
    for wrong in (3, None):
        with pytest.raises(TypeError, match="^extra_input is an? .*, must be a tensor"):
            ops.AddExtraInput()(x, wrong)
    for wrong in (x[:1], x[:, :1], x[None], x[0, 0]):  # which torch would broadcast
        with pytest.raises(ValueError, match=r"^extra_input has shape .*, must be \[12, 128\], "):
            ops.AddExtraInput()(x, wrong)
    assert ops.AddExtraInput()(x.bfloat16(), x).dtype == torch.float32
    op = ops.AddExtraInput(in_place=True)
    with pytest.raises(ValueError, match=r"^extra_input has shape \[128\], must be \[12, 128\], "):
        op(x, x[0])
    with pytest.raises(TypeError, match="^extra_input is torch.bfloat16, must be torch.float32, t"):
        op(x, x.bfloat16())


def test_a_row_with_extra_outputs(device):
    """Extra inputs and outputs in the order of the row; what stands between the linears ends the
    fusion, not the tail."""
    linear = [ops.GroupedLinear(3, C, C, device=device), ops.GroupedLinear(3, C // 2, C,
                                                                           device=device)]
    for each in linear:
        fill(each)
    x, more = draw(R, C, device=device), draw(R, C, device=device)
    counts = torch.tensor([4, 0, 5], device=device)
    mlp = ops.Sequential(ops.MakeExtraOutput(), linear[0], ops.MakeExtraOutput(), ops.SwiGLU(),
                         linear[1], ops.AddExtraInput(), ops.Identity())
    y, first, second = mlp(x, counts, counts, more)
    assert torch.equal(first, x) and torch.equal(second, linear[0](x, counts))
    h = ops.SwiGLU()(second)
    assert torch.equal(y, linear[1](h, counts) + more) and torch.equal(y[9:], more[9:])
    names = [step.name for step in mlp.plan(counts, counts, more)]
    assert names[2:4] == ["MakeExtraOutput", "activation"]
    with pytest.raises(ValueError, match="MakeExtraOutput 0.*AddExtraInput 1"):
        mlp(x, counts, counts)


def test_rows_by_name():
    named = {"b": ops.Identity(), "1": ops.Bias(4, device="cpu"), "a": torch.nn.Identity()}
    row = ops.Sequential(named)
    assert dict(row.named_children()) == named and list(row._modules) == list(named)
    last, first = ops.Identity(), torch.nn.Identity()
    assert row.append(last) is row and row[-1] is last and row[1] is named["1"]
    assert row.insert(0, first) is row
    assert list(row) == [first, *named.values(), last]
    assert list(row._modules) == ["b", "1", "a", "2", "3"]
    both = row + row[1:3]
    assert isinstance(both, ops.Sequential) and list(both) == [*row, named["b"], named["1"]]
    row += [first]
    assert len(row) == 6 and row[-1] is first and isinstance(row, ops.Sequential)
    assert row.pop(0) is first and len(row) == 5
    for twice in (row * 2, 2 * row):
        assert isinstance(twice, ops.Sequential) and list(twice) == [*row, *row]
    row *= 2
    assert isinstance(row, ops.Sequential) and list(row) == list(twice)
    assert len(ops.Sequential()) == 0 and len(ops.Sequential({})) == 0


def test_constants_of_activations():
    for cls in (ops.ClampedSwiGLU, ops.ScaledClampedQGeGLU):
        op = cls(limit=3, alpha=1.5, glu_linear_offset=0.5, glu_interleave_size=32)
        assert (op.limit, op.alpha, op.glu_linear_offset, op.glu_interleave_size) == (
            3.0, 1.5, 0.5, 32)
    op = ops.ScaledSiTUGLU(beta1=2, beta2=3, glu_interleave_size=1)
    assert (op.beta1, op.beta2, op.glu_interleave_size) == (2.0, 3.0, 1)
    for name in ("beta1", "glu_interleave_size"):
        with pytest.raises(AttributeError, match=name):
            setattr(op, name, 4)


def halves(z, interleave):
    if not interleave:
        return z.chunk(2, -1)
    blocks = z.unflatten(-1, (-1, 2, interleave))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleave", [None, 1, 32])
def test_situ(device, interleave, dtype):
    z, dh = draw(R, C, dtype=dtype, device=device), draw(R, C // 2, dtype=dtype, device=device)
    prob = torch.rand(R, device=device)
    gate, up = halves(leaf := z.double().requires_grad_(), interleave)
    scale = prob.double().requires_grad_()
    want = 2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * 3 * torch.tanh(up / 3) * scale[:, None]
    want.backward(dh.double())
    op = ops.ScaledSiTUGLU(interleave, beta1=2.0, beta2=3.0)
    for got, w in zip(learn(op, z, prob, dy=dh), (want, leaf.grad, scale.grad), strict=True):
        assert_close(got, w, terms=C)
    plain = ops.SiTUGLU(interleave, beta1=2.0, beta2=3.0)
    ones = learn(op, z, torch.ones_like(prob), dy=dh)
    for got, w in zip(learn(plain, z, dy=dh), ones):
        assert torch.equal(got, w)


@pytest.mark.parametrize("make", [ops.SiTUGLU, ops.ScaledSiTUGLU, ops.GLU, ops.SReGLU, ops.QGELU])
def test_formulas_in_a_row(device, make):
    """The tail is zero, whatever is there; and why it is no grouped_mlp."""
    op, offsets = make(), cadre.offsets(torch.tensor([3, 4], device=device), "counts", R)
    z = draw(R, C, device=device)
    scales = [torch.rand(R, device=device)] * op.num_extra_inputs
    for t in (z, *scales):
        t[7:] = math.nan
        t.requires_grad_()
    h = op(z, *scales, offsets=offsets)
    dh = torch.ones_like(h)
    dh[7:] = math.nan
    h.backward(dh)
    assert not h[7:].any()
    for t in (z, *scales):
        assert not t.grad[7:].any() and torch.isfinite(t.grad).all()
    mlp = ops.Sequential(ops.GroupedLinear(2, C, C, device=device), op,
                         ops.GroupedLinear(2, h.shape[-1], C, device=device))
    counts = torch.tensor([3, 4], device=device)
    steps = mlp.plan(counts, *scales, counts)
    assert [s.name for s in steps] == ["grouped_linear", "activation", "grouped_linear"]
    assert steps[0].not_fused == "the activation has no operator"
    assert mlp(z.detach(), counts, *scales, counts).shape == (R, C)


def test_errors_of_situ(device):
    for value in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"^beta2 is {float(value)}, must be finite and above"):
            ops.SiTUGLU(beta2=value)
    with pytest.raises(TypeError, match="^beta1 is a str, must be a number"):
        ops.ScaledSiTUGLU(beta1="4")
    with pytest.raises(NotImplementedError, match="^glu_interleave_size is 7, must be None, 1 or"):
        ops.SiTUGLU(7)
    with pytest.raises(ValueError, match="^z has 5 columns, must have a multiple of 2: gate and"):
        ops.SiTUGLU()(torch.zeros(3, 5, device=device))
    with pytest.raises(ValueError, match="^z has 32 columns, must have a multiple of 64: gate"):
        ops.SiTUGLU(32)(torch.zeros(3, 32, device=device))
    with pytest.raises(ValueError, match="^scales has 4 elements, must have 3, one a row"):
        ops.ScaledSiTUGLU()(torch.zeros(3, 32, device=device), torch.zeros(4, device=device))


def test_quick_gelu(device):
    z, dh = draw(R, C, device=device) * 5, draw(R, C // 2, device=device)
    gate, up = (leaf := z.double().requires_grad_()).chunk(2, -1)
    want = gate * torch.sigmoid(1.702 * gate) * up
    want.backward(dh.double())
    for got, w in zip(learn(ops.QGEGLU(), z, dy=dh), (want, leaf.grad), strict=True):
        assert_close(got, w, terms=4)


FORMULAS = {
    "GELU": lambda z: functional.gelu(z, approximate="tanh"),
    "GEGLU": lambda z: functional.gelu(z.chunk(2, -1)[0], approximate="tanh") * z.chunk(2, -1)[1],
    "ReLU": functional.relu,
    "ReGLU": lambda z: functional.relu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
    "SReGLU": lambda z: functional.relu(z.chunk(2, -1)[0]) ** 2 * z.chunk(2, -1)[1],
    "GLU": lambda z: torch.sigmoid(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
    "QGELU": lambda z: z * torch.sigmoid(1.702 * z),
    "SiLU": functional.silu}


@pytest.mark.parametrize("name", FORMULAS)
def test_plain_activations(device, name):
    z, leaf = (draw(9, 32, device=device, grad=True) for _ in range(2))
    leaf.data.copy_(z.data)
    h, want = getattr(ops, name)()(z), FORMULAS[name](leaf)
    dh = draw(*want.shape, device=device)
    assert_seen(want)
    torch.testing.assert_close(h, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(h, z, dh)[0],
                               torch.autograd.grad(want, leaf, dh)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [ops.SiTUGLU, ops.GLU, ops.SReGLU, ops.QGELU])
def test_formulas_have_second_derivatives(device, make):
    """They were lost, without an error, where dh is a constant. No z is near a kink."""
    z = draw(4, 8, device=device)
    z = (z + z.sign() * 0.1).requires_grad_()
    op, step = make(), 1e-2
    direction = draw(4, 8, device=device)

    def gradient(at):
        return torch.autograd.grad(op(at).sum(), at, create_graph=True)[0]

    got = torch.autograd.grad(gradient(z), z, direction)[0]
    two = [gradient((z.detach() + sign * step * direction).requires_grad_()).detach()
           for sign in (1, -1)]
    want = (two[0] - two[1]) / (2 * step)
    assert_seen(want)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("make", [ops.ScaledSiTUGLU, ops.GLU, ops.SReGLU, ops.QGELU])
def test_formulas_within_hooks_of_saved_tensors(device, make):
    """As where activations are moved to the host around a whole step. torch.func has none."""
    op, z = make(), draw(R, C, device=device)
    extra = [torch.rand(R, device=device)] if op.num_extra_inputs else []
    want = learn(op, z, *extra)
    with torch.autograd.graph.save_on_cpu():
        got = learn(op, z, *extra)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) and other.abs().max() > 0


@pytest.mark.parametrize("make", [ops.SiTUGLU, ops.GLU, ops.SReGLU, ops.QGELU])
def test_formulas_compile_as_one_graph(device, make):
    op, offsets = make(), cadre.offsets(torch.tensor([3, 4], device=device), "counts", R)
    z, leaf = (draw(R, C, device=device, grad=True) for _ in range(2))
    leaf.data.copy_(z.data)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    for h in (compiled(z, offsets=offsets), op(leaf, offsets=offsets)):
        h.square().sum().backward()
    torch.testing.assert_close(z.grad, leaf.grad)


@pytest.mark.parametrize("name", ["SwiGLU", "ClampedSwiGLU", "QGEGLU", "SReLU", "SiTUGLU", "GEGLU",
                                  "QGELU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_that_is_kept_in_fp8(device, name, dtype):
    """The result is that of z, gradients are those of what the codes stand for, and nothing of the
    size of z is kept."""
    z, kept = draw(R, C, dtype=dtype, device=device), []
    dh = draw(R, C if name in ("SReLU", "QGELU") else C // 2, dtype=dtype, device=device)
    all_rows = torch.tensor([0, R], dtype=torch.int32, device=device)
    codes = cadre.quantize(z, all_rows, "fp8_tensor")
    rounded = cadre.dequantize(codes, all_rows, "fp8_tensor", shape=z.shape, dtype=dtype)
    cls = getattr(ops, name)
    exact, _ = learn(cls(), z, dy=dh)
    _, want = learn(cls(), rounded, dy=dh)
    y, dx = learn(cls(cache_quantized_input=True), z, dy=dh)
    assert torch.equal(y, exact) and torch.equal(dx, want) and not torch.equal(dx, learn(
        cls(), z, dy=dh)[1])

    def unpack(kept):
        return kept

    row = ops.Sequential(cls(cache_quantized_input=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, unpack):
        row(z.detach().requires_grad_())
    assert not [t for t in kept if t.dtype == dtype and t.numel() >= z.numel()]


def test_a_row_that_keeps_inputs_in_fp8(device):
    counts = torch.tensor([3, 4], device=device)
    mlp = ops.Sequential(ops.GroupedLinear(2, C, C, device=device),
                         ops.SwiGLU(cache_quantized_input=True),
                         ops.GroupedLinear(2, C // 2, C, device=device))
    assert mlp.plan(counts, counts)[0].not_fused == "the activation keeps its input in fp8"
    y = mlp(x := draw(R, C, device=device, grad=True), counts, counts)
    y.sum().backward()
    assert x.grad[:7].any() and not x.grad[7:].any()


@pytest.mark.parametrize("tail", [float("nan"), 1e4])
def test_a_tail_has_no_say_in_what_is_kept_in_fp8(device, tail):
    z = draw(R, C, device=device) * 1e-4
    dh, live = draw(R, C // 2, device=device), R - 3
    offsets = cadre.offsets(torch.tensor([live // 2, live - live // 2], device=device), "counts", R)
    call = ops.SwiGLU(cache_quantized_input=True)
    _, want = learn(call, z[:live].clone(), dy=dh[:live])
    z[live:] = tail
    _, dz = learn(lambda z: call(z, offsets=offsets), z, dy=dh)
    assert torch.equal(dz[:live], want) and dz[:live].any() and not dz[live:].any()
