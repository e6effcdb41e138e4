"""cadre.grouped_mm: four forms beside plain products and torch's own, out, gradients, errors."""

import warnings

import pytest
import torch

import cadre
from conftest import COUNTS, assert_close, assert_seen, draw, poisoned, slices_of

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["2d3d", "3d2d", "2d2d", "3d3d"]
E, M, N, K = 5, 6, 7, 11


def named(name):
    """Counts of COUNTS, and rows of the buffer."""
    counts, tail = COUNTS[name]
    return counts, sum(counts) + tail


def ends(counts, device):
    return torch.tensor(counts, device=device).cumsum(0).int()


def operands(form, rows, dtype=torch.float32, device="cpu", grad=False):
    a = {"2d3d": (rows, K), "3d2d": (E, M, K), "2d2d": (M, rows), "3d3d": (E, M, K)}[form]
    b = {"2d3d": (E, K, N), "3d2d": (K, rows), "2d2d": (rows, N), "3d3d": (E, K, N)}[form]
    return (draw(*a, dtype=dtype, device=device, grad=grad),
            draw(*b, dtype=dtype, device=device, grad=grad))


def reference(form, a, b, counts, bias=None):
    """Group by group."""
    groups = []
    for e, s in enumerate(slices_of(counts)):
        left = {"2d3d": lambda: a[s], "2d2d": lambda: a[:, s]}.get(form, lambda: a[e])()
        right = {"3d2d": lambda: b[:, s], "2d2d": lambda: b[s]}.get(form, lambda: b[e])()
        y = left @ right
        if bias is not None:
            y = y + (bias[e][:, None] if form == "3d2d" else bias[e])
        groups.append(y)
    if form in ("2d2d", "3d3d"):
        return torch.stack(groups)
    dim = 0 if form == "2d3d" else 1
    y = torch.cat(groups, dim)
    tail = (a.shape[0] if dim == 0 else b.shape[1]) - sum(counts)
    return torch.cat([y, y.new_zeros((tail, N) if dim == 0 else (M, tail))], dim)


def offs_of(form, counts, device):
    return None if form == "3d3d" else ends(counts, device)


def bias_of(form, dtype, device, grad=False):
    return draw(E, M if form == "3d2d" else N, dtype=dtype, device=device, grad=grad)


def arguments(form, case, dtype, bias_dtype, device):
    """(a, b, offs, bias), no bias where it has no dtype, and their product in fp64."""
    counts, rows = case
    a, b = operands(form, rows, dtype, device)
    bias = bias_of(form, bias_dtype, device) if bias_dtype else None
    want = reference(form, a.double(), b.double(), counts, bias.double() if bias_dtype else None)
    return (a, b, offs_of(form, counts, device), bias), want


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values(device, case, form, with_bias, dtype):
    given, want = arguments(form, case, dtype, dtype if with_bias else None, device)
    got = cadre.grouped_mm(*given)
    assert got.dtype == dtype
    assert_close(got, want, terms=30)
    if case[1] or form == "3d3d":
        assert_seen(given[0])
    wide = cadre.grouped_mm(*given, torch.float32)
    assert wide.dtype == torch.float32
    assert_close(wide, want, terms=30)


@pytest.mark.parametrize("form", FORMS)
def test_equals_torch(device, form):
    """torch's own wants bf16, row lengths of 16 bytes, and ends below the rows."""
    counts = [16, 0, 40, 8, 24]
    rows, (e, m, n, k) = 96, (5, 16, 24, 32)
    shapes = {"2d3d": ((rows, k), (e, k, n)), "3d2d": ((e, m, k), (k, rows)),
              "2d2d": ((m, rows), (rows, n)), "3d3d": ((e, m, k), (e, k, n))}[form]
    a, b = (draw(*shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    offs = offs_of(form, counts, device)
    want = torch.nn.functional.grouped_mm(a, b, offs=offs)
    got = cadre.grouped_mm(a, b, offs)
    assert got.shape == want.shape and got.dtype == want.dtype
    end = sum(counts)
    if form == "2d3d":
        got, want = got[:end], want[:end]
    if form == "3d2d":
        got, want = got[:, :end], want[:, :end]
    assert_seen(want)
    assert_close(got, want.double(), steps=2, terms=60)


@pytest.mark.parametrize("form", FORMS)
def test_tail_is_zero(device, form):
    counts, rows = named("tail")
    a, b = operands(form, rows, device=device)
    if form == "3d3d":
        return
    end = sum(counts)
    for t, dim in ((a, {"2d3d": 0, "2d2d": 1}.get(form)), (b, {"3d2d": 1, "2d2d": 0}.get(form))):
        if dim is not None:
            t.narrow(dim, end, rows - end).fill_(float("nan"))
    got = cadre.grouped_mm(a, b, ends(counts, device))
    assert torch.isfinite(got).all()
    if form != "2d2d":
        assert got.narrow(0 if form == "2d3d" else 1, end, rows - end).abs().sum() == 0
    assert_seen(got)


def strided(t):
    """The same values in other places."""
    yield t.transpose(-2, -1).contiguous().transpose(-2, -1)
    yield torch.stack([t, t], -1)[..., 0]
    yield torch.nn.functional.pad(t, (1, 2, 1, 0), value=float("nan"))[..., 1:, 1:-2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_strides(device, form, dtype):
    counts, rows = named("tail")
    a, b = operands(form, rows, dtype, device)
    offs = offs_of(form, counts, device)
    want = reference(form, a.double(), b.double(), counts)
    for other in strided(a):
        assert_close(cadre.grouped_mm(other, b, offs), want, terms=30)
    for other in strided(b):
        assert_close(cadre.grouped_mm(a, other, offs), want, terms=30)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_gradients(device, case, form, with_bias):
    counts, rows = case
    a, b = operands(form, rows, device=device, grad=True)
    bias = bias_of(form, torch.float32, device, grad=True) if with_bias else None
    inputs = [t for t in (a, b, bias) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    got = cadre.grouped_mm(a, b, offs_of(form, counts, device), bias)
    want = reference(form, *wide[:2], counts, *wide[2:])
    d = draw(*got.shape, device=device)
    got.backward(d)
    want.backward(d.double())
    for mine, theirs in zip(inputs, wide):
        assert_close(mine.grad, theirs.grad, terms=40)
        if sum(counts):
            assert_seen(mine.grad)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_fp32_results(device, form):
    counts, rows = named("ragged")
    a, b = operands(form, rows, torch.bfloat16, device, grad=True)
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    got = cadre.grouped_mm(a, b, offs_of(form, counts, device), out_dtype=torch.float32)
    want = reference(form, *wide, counts)
    d = draw(*got.shape, device=device)
    got.backward(d)
    want.backward(d.double())
    assert a.grad.dtype == b.grad.dtype == torch.bfloat16
    assert_close(a.grad, wide[0].grad, terms=40)
    assert_close(b.grad, wide[1].grad, terms=40)


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_out_and_accumulate(device, form, with_bias, out_dtype):
    counts, rows = case = named("tail")
    given, want = arguments(form, case, torch.bfloat16, torch.float32 if with_bias else None,
                            device)
    end = sum(counts)

    def owned(t):
        return {"2d3d": lambda: t[:end], "3d2d": lambda: t[:, :end]}.get(form, lambda: t)()

    out = poisoned(*want.shape, dtype=out_dtype, device=device)
    assert cadre.grouped_mm(*given, out=out) is out
    assert_close(owned(out), owned(want), terms=60)
    if form in ("2d3d", "3d2d"):
        assert out.isnan().sum() == (rows - end) * (N if form == "2d3d" else M)
    old = draw(*want.shape, dtype=out_dtype, device=device)
    out = old.clone()
    cadre.grouped_mm(*given, None, out, True)
    assert_close(owned(out), owned(want + old.double()), terms=60)
    if form == "2d3d":
        assert torch.equal(out[end:], old[end:])
    turned = poisoned(*want.shape[:-2], want.shape[-1], want.shape[-2], dtype=out_dtype,
                      device=device).transpose(-2, -1)
    cadre.grouped_mm(*given, out=turned)
    assert_close(owned(turned), owned(want), terms=60)


@pytest.fixture
def bf16_by_default():
    """What torch makes without a dtype is bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_default_dtype_changes_nothing(device, bf16_by_default, form, with_bias):
    given, want = arguments(form, named("ragged"), torch.float32,
                            torch.float32 if with_bias else None, device)
    got = cadre.grouped_mm(*given)
    assert got.dtype == torch.float32
    assert_close(got, want, terms=60)
    out = torch.ones_like(got)
    cadre.grouped_mm(*given, out=out, accumulate=True)
    assert_close(out, want + 1, terms=60)


def test_three_dimensions_without_rows(device):
    got = cadre.grouped_mm(torch.empty(E, 0, K, device=device), draw(E, K, N, device=device))
    assert got.shape == (E, 0, N)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMS)
def test_autocast_casts_nothing(device, form, dtype):
    """As torch's own, which keeps fp32 operands in fp32; in compiled code too."""
    counts, rows = named("tail")
    a, b = operands(form, rows, dtype, device, grad=True)
    offs = offs_of(form, counts, device)
    want = cadre.grouped_mm(a, b, offs)
    wants = torch.autograd.grad(want.float().square().sum(), (a, b))
    with torch.autocast(device.type, torch.bfloat16):
        got = cadre.grouped_mm(a, b, offs)
        gots = torch.autograd.grad(got.float().square().sum(), (a, b))  # within it, too
    assert got.dtype == dtype and torch.equal(got, want)
    assert all(map(torch.equal, gots, wants))
    torch._dynamo.reset()
    compiled = torch.compile(cadre.grouped_mm, backend="aot_eager", fullgraph=True)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(compiled(a, b, offs), want)
    with torch.autocast(device.type, torch.bfloat16), pytest.raises(TypeError, match="b is"):
        cadre.grouped_mm(a, b.to(torch.float32 if dtype != torch.float32 else torch.bfloat16), offs)


@pytest.mark.parametrize("form", FORMS)
def test_without_groups(device, form):
    """Results and gradients are zero; `out` keeps what it held."""
    a, b = operands(form, 9, device=device)
    a, b = ((t[:0] if t.dim() == 3 else t).requires_grad_() for t in (a, b))
    offs = offs_of(form, [], device)
    shape = {"2d3d": (9, N), "3d2d": (M, 9), "2d2d": (0, M, N), "3d3d": (0, M, N)}[form]
    got = cadre.grouped_mm(a, b, offs, out_dtype=torch.float16)
    assert got.shape == shape and got.dtype == torch.float16 and not got.any()
    if device.type == "cpu" and form == "2d3d":
        theirs = torch.nn.functional.grouped_mm(draw(9, 8), draw(0, 8, 8), offs=offs)
        assert theirs.shape == (9, 8)
    bias = torch.empty(0, M if form == "3d2d" else N, device=device, requires_grad=True)
    got = cadre.grouped_mm(a, b, offs, bias)
    for t, grad in zip((a, b, bias), torch.autograd.grad(got.float().sum(), (a, b, bias))):
        assert grad.shape == t.shape and not grad.any()
    out = draw(*shape, device=device)
    held = out.clone()
    with torch.no_grad():
        assert cadre.grouped_mm(a, b, offs, out=out) is out and torch.equal(out, held)


def test_compiled_with_changing_counts(device):
    """One graph for all counts, another for the first other number of rows, then none."""
    def f(a, b, offs):
        return cadre.grouped_mm(a, b, offs).relu()

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    b = draw(E, K, N, device=device, grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, name in enumerate(COUNTS):
            counts, rows = named(name)
            rows = max(rows, 2)
            a = draw(rows, K, device=device, grad=True)
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                got = compiled(a, b, ends(counts, device))
            want = f(a, b, ends(counts, device))
            assert torch.equal(got, want)
            d = draw(*want.shape, device=device)
            for x, y in zip(torch.autograd.grad(got, (a, b), d),
                            torch.autograd.grad(want, (a, b), d)):
                assert torch.equal(x, y)


@pytest.mark.parametrize("gap", [0, 3])
def test_compiled_into_an_output(device, gap):
    """One graph, but for gaps, which dynamo leaves to eager code."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b, out: cadre.grouped_mm(a, b, out=out),
                             backend="aot_eager", fullgraph=gap == 0, dynamic=True)
    a, b = draw(E, M, K, device=device), draw(E, K, N, device=device)
    out = draw(E, M, N + gap, device=device)[..., :N]
    compiled(a, b, out)
    assert torch.equal(out, cadre.grouped_mm(a, b))


# errors


A, B = torch.ones(6, K), torch.ones(E, K, N)
OFFS = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)
FAULTS = [
    ((torch.ones(4), B, OFFS), {}, ValueError, "a has 1 and b 3 dimensions, must have 2 or 3 each"),
    ((A.double(), B.double(), OFFS), {}, TypeError, "a is torch.float64, must be torch.float32"),
    ((A, B, OFFS), dict(out_dtype=torch.int8), TypeError, "out_dtype is torch.int8, must be torch"),
    ((A, B.half(), OFFS), {}, TypeError, "b is torch.float16, must be torch.float32, the dtype of"),
    ((A[:, 1:], B, OFFS), {}, ValueError, "a has 10 columns, must have 11, as many as b has rows"),
    ((A, B), {}, ValueError, "offs is None, must be given for 2D times 3D"),
    ((A, B, OFFS.long()), {}, TypeError, "offs is torch.int64, must be a tensor of torch.int32"),
    ((A, B, OFFS[None]), {}, ValueError, "offs has 2 dimensions, must have 1"),
    ((A, B, OFFS[1:]), {}, ValueError, "offs has 4 entries, must have 5, one a group"),
    ((torch.ones(E, M, K), B, OFFS), {}, ValueError, "offs is given, must be None; three"),
    ((torch.ones(2, M, K), B), {}, ValueError, "b has 5 groups, must have 2, as many as a"),
    ((A, B, OFFS, torch.ones(E, 8)), {}, ValueError, r"bias has shape \[5, 8\], must be \[5, 7\]"),
    ((A, B, OFFS), dict(accumulate=True), ValueError, "out is None, must be given; accum"),
    ((A, B, OFFS), dict(out=torch.ones(6, N), out_dtype=torch.float16), TypeError,
     "out is torch.float32, must be torch.float16, as out_dtype says"),
    ((A, B, OFFS), dict(out=torch.ones(6, 8)), ValueError, r"out has shape \[6, 8\], must be "),
    ((A, B, OFFS), dict(out=torch.ones(6, N, requires_grad=True)), ValueError,
     "out is given, must be None where a gradient is wanted"),
]


@pytest.mark.parametrize("args,kwargs,error,words", FAULTS, ids=[f[3][:40] for f in FAULTS])
def test_errors(device, args, kwargs, error, words):
    args = [t.to(device) for t in args]
    kwargs = {k: v.detach().to(device).requires_grad_(v.requires_grad)
              if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    with pytest.raises(error, match=words):
        cadre.grouped_mm(*args, **kwargs)


def test_what_is_no_tensor():
    for given in ({"a": None}, {"b": B.tolist()}, {"bias": "text"}, {"out": 3.0}):
        (name, value), = given.items()
        with pytest.raises(TypeError, match=f"{name} is a {type(value).__name__}, must be a tenso"):
            cadre.grouped_mm(**{"a": A, "b": B, "offs": OFFS, **given})


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_transposed_out_of_stacked_groups(device, groups, accumulate):
    """Of one group it is a matrix as it lies, of more it is written by way of a copy."""
    a, b = draw(groups, 6, K, device=device), draw(groups, K, N, device=device)
    out = draw(groups, N, 6, device=device).transpose(1, 2)
    want = a.double() @ b.double() + (out.double() if accumulate else 0)
    assert cadre.grouped_mm(a, b, out=out, accumulate=accumulate) is out
    assert_close(out, want, terms=K + 1)


@pytest.mark.parametrize("accumulate", [False, True])
def test_groups_among_each_other_in_out(device, accumulate):
    a, b = draw(6, K, device=device), draw(K, N, device=device)
    ends = torch.tensor([3, 3, K], dtype=torch.int32, device=device)
    out = draw(6, 3, N, device=device).transpose(0, 1)
    want = cadre.grouped_mm(a, b, ends, out=out.contiguous(), accumulate=accumulate)
    assert cadre.grouped_mm(a, b, ends, out=out, accumulate=accumulate) is out
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match="out has strides .* must have stride 1 in a dimension"):
        cadre.grouped_mm(a, b, ends, out=draw(3, 6, 2 * N, device=device)[:, :, ::2])


def test_out_that_is_read_meanwhile(device):
    a, b = draw(20, 16, device=device), draw(5, 16, 16, device=device)
    ends = torch.tensor([3, 11, 12, 18, 20], dtype=torch.int32, device=device)
    wide = draw(20, 32, device=device)
    for out, left, right in ((a, a, b), (a[:, :], a, b), (b.view(-1)[:320].view(20, 16), a, b),
                             (wide[:, :16], wide[:, :16], b)):
        with pytest.raises(ValueError, match="out shares memory with (lhs|rhs), must not"):
            cadre.grouped_mm(left, right, ends, out=out)
    want = cadre.grouped_mm(wide[:, :16], b, ends)
    assert torch.equal(cadre.grouped_mm(wide[:, :16], b, ends, out=wide[:, 16:]), want)


@pytest.mark.parametrize("form, widths", [
    ("2d3d", (0, 7)), ("2d3d", (11, 0)), ("3d2d", (0, 11)), ("3d2d", (6, 0)), ("2d2d", (0, 7)),
    ("2d2d", (6, 0)), ("3d3d", (0, 11, 7)), ("3d3d", (6, 0, 7)), ("3d3d", (6, 11, 0))])
def test_widths_of_zero(device, form, widths):
    counts, rows = named("tail")
    shapes = {"2d3d": lambda k, n: ((rows, k), (E, k, n)),
              "3d2d": lambda m, k: ((E, m, k), (k, rows)),
              "2d2d": lambda m, n: ((m, rows), (rows, n)),
              "3d3d": lambda m, k, n: ((E, m, k), (E, k, n))}[form](*widths)
    a, b = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    offs = None if form == "3d3d" else ends(counts, device)
    y = cadre.grouped_mm(a, b, offs=offs)
    y.sum().backward()
    groups = [E] if form in ("2d2d", "3d3d") else []
    assert list(y.shape) == groups + [a.shape[-2], b.shape[-1]] and not y.any()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape
    assert not a.grad.any() and not b.grad.any()
    out = torch.full_like(y.detach(), 3)
    with torch.no_grad():
        cadre.grouped_mm(a, b, offs=offs, out=out, accumulate=True)
        assert torch.all(out == 3)
        cadre.grouped_mm(a, b, offs=offs, out=out)
    used = sum(counts)
    tail = {"2d3d": lambda: out[used:], "3d2d": lambda: out[:, used:]}.get(form, lambda: out[:0])()
    assert torch.all(tail == 3) and out.sum() == tail.sum()
