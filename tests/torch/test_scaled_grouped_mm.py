"""cadre.scaled_grouped_mm: codes and scales beside fp64 of the numbers they mean, and errors."""

import pytest
import torch

import cadre
from conftest import STEP, assert_close, assert_seen, draw, poisoned, slices_of

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E, N, K = 5, 24, 32  # N and K that Hopper's kernel takes


def ends(counts, device="cpu"):
    return torch.tensor(counts, device=device).cumsum(0).int()


def operands(rows, device="cpu", type_a=E4M3, n=N, k=K):
    """Scales of several sizes, so that one taken for another is seen."""
    return (draw(rows, k, device=device).to(type_a),
            draw(E, n, k, device=device).to(E4M3).transpose(1, 2),
            torch.rand(rows, device=device) + 0.25, torch.rand(E, n, device=device) + 0.25)


def reference(given, counts, bias=None):
    """Group by group, in fp64; zeros in the tail."""
    a, b, scale_a, scale_b = (t.double() for t in given)
    y = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64, device=a.device)
    for e, s in enumerate(slices_of(counts)):
        y[s] = a[s] @ b[e] * scale_a[s, None] * scale_b[e]
        if bias is not None:
            y[s] += bias[e].double()
    return y


@pytest.mark.parametrize("type_a", [E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values(device, case, type_a, out_dtype, with_bias):
    if device.type == "cuda" and out_dtype == torch.float16:
        pytest.skip("GPUs write bf16 and fp32")
    counts, rows = case
    given = operands(rows, device, type_a)
    bias = draw(E, N, dtype=torch.bfloat16, device=device) if with_bias else None
    got = cadre.scaled_grouped_mm(*given, ends(counts, device), bias, out_dtype=out_dtype)
    want = reference(given, counts, bias)
    assert got.dtype == out_dtype
    compare(got, want, reference([t.double().abs() for t in given], counts))
    if sum(counts):
        assert_seen(want)


def compare(got, want, sizes):
    """`sizes` are the sums of the sizes of all terms. On a GPU sums of 128 codes may be short of
    bits (docs/numerics.md)."""
    if got.is_cpu:
        assert_close(got, want, steps=0.5, terms=K)
    else:
        bound = STEP[got.dtype] * want.abs() + 4 * 34 * 2.0**-13 * sizes + 1e-5
        assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("n, k", [(7, 11), (1, 1), (8, 300), (33, 129)])
def test_odd_shapes_on_the_host(n, k):
    counts = [2, 0, 5, 1, 3]
    given = operands(13, n=n, k=k)
    got = cadre.scaled_grouped_mm(*given, ends(counts), out_dtype=torch.float32)
    want = reference(given, counts)
    assert_close(got, want, terms=k)
    assert_seen(want)


def test_is_exact_where_sums_are(device):
    """Small integers and scales that are powers of two: a scale of a neighbour is off by 2."""
    counts = [3, 0, 8, 1, 4]
    a = torch.randint(-2, 3, (16, K), device=device).float()
    b = torch.randint(-2, 3, (E, N, K), device=device).float()
    scale_a = 2.0 ** (torch.arange(16, device=device) % 5)
    scale_b = 2.0 ** (torch.arange(E * N, device=device) % 7).view(E, N)
    given = a.to(E4M3), b.to(E4M3).transpose(1, 2), scale_a, scale_b
    got = cadre.scaled_grouped_mm(*given, ends(counts, device), out_dtype=torch.float32)
    assert torch.equal(got.double(), reference(given, counts))


def test_bf16_is_the_default(device):
    given = operands(8, device)
    offs = ends([1, 2, 0, 4, 1], device)
    got = cadre.scaled_grouped_mm(*given, offs)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, cadre.scaled_grouped_mm(*given, offs=offs, out_dtype=None))


def test_scales_of_either_shape(device):
    counts = [2, 0, 5, 1, 3]
    a, b, scale_a, scale_b = operands(11, device)
    offs = ends(counts, device)
    want = cadre.scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    for more_a in (scale_a, scale_a[:, None]):
        for more_b in (scale_b, scale_b[:, None], scale_b.t().contiguous().t()):
            got = cadre.scaled_grouped_mm(a, b, more_a, more_b, offs)
            assert torch.equal(got, want)
    gaps = torch.stack([scale_a, -scale_a], 1)[:, 0]
    assert torch.equal(cadre.scaled_grouped_mm(a, b, gaps, scale_b, offs), want)


def test_rows_and_matrices_with_room_between(device):
    """Slices of longer rows, and of longer matrices."""
    counts = [2, 0, 5, 1, 3]
    long = operands(11, device, k=2 * K)
    given = (long[0][:, :K], long[1][:, :K], *long[2:])
    assert not given[0].is_contiguous()
    got = cadre.scaled_grouped_mm(*given, ends(counts, device))
    compare(got, reference(given, counts), reference([t.double().abs() for t in given], counts))


def test_tail(device):
    """Zero in a new result, whatever lies there in mat_a; untouched in one of the caller."""
    counts, rows = [3, 8, 1, 0, 2], 19
    a, b, scale_a, scale_b = operands(rows, device)
    a[14:] = torch.full((5, K), float("nan"), device=device).to(E4M3)
    scale_a[14:] = float("nan")
    offs = ends(counts, device)
    got = cadre.scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    assert (got[14:] == 0).all() and torch.isfinite(got).all()
    out = poisoned(rows, N, device=device, dtype=torch.bfloat16)
    offsets = cadre.offsets(offs, "ends", rows)
    torch.ops.cadre.scaled_grouped_mm.out(a, b, scale_a, scale_b, offsets.offsets, out=out)
    assert torch.equal(out[:14], got[:14]) and out[14:].isnan().all()
    assert torch.equal(cadre.scaled_grouped_mm(a, b, scale_a, scale_b, offsets), got)


def test_what_quantize_makes(device):
    """Codes and scales of the format fp8_row are arguments as they are."""
    if device.type != "cpu":
        pytest.skip("the CPU has every format")
    counts, rows = [3, 8, 1, 0, 4], 16
    offs = ends(counts, device)
    x, w = draw(rows, K, device=device), draw(E, N, K, device=device)
    offsets = cadre.offsets(offs, "ends", rows)
    codes, scales, _ = cadre.quantize(x, offsets, "fp8_row")
    w_codes, w_scales, _ = cadre.quantize(w, None, "fp8_row")
    got = cadre.scaled_grouped_mm(codes, w_codes.mT, scales, w_scales.mT, offs,
                                  out_dtype=torch.float32)
    plain = torch.cat([x[s].double() @ w[e].double().t() for e, s in enumerate(slices_of(counts))])
    assert (got - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device, dynamic):
    def run(a, b, scale_a, scale_b, offs, bias):
        return cadre.scaled_grouped_mm(a, b, scale_a, scale_b, offs, bias) * 2

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for counts in ([2, 0, 5, 1, 3], [4, 4, 0, 0, 9]):
        given = (*operands(sum(counts), device), ends(counts, device), draw(E, N, device=device))
        assert torch.equal(compiled(*given), run(*given))
        assert_seen(run(*given))


def test_captured(device):
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    given = *operands(16, device), ends([2, 0, 5, 1, 3], device)
    want = cadre.scaled_grouped_mm(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cadre.scaled_grouped_mm(*given)
    graph.replay()
    assert torch.equal(got, want)
    given[4].copy_(ends([7, 0, 0, 8, 1], device))
    graph.replay()
    assert torch.equal(got, cadre.scaled_grouped_mm(*given))


def test_parameters_without_a_gradient(device):
    a, b, scale_a, scale_b = operands(11, device)
    scale_b = torch.nn.Parameter(scale_b)
    offs = ends([2, 0, 5, 1, 3], device)
    with pytest.raises(NotImplementedError, match="scale_b requires a gradient, must not"):
        cadre.scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    with torch.no_grad():
        assert_seen(cadre.scaled_grouped_mm(a, b, scale_a, scale_b, offs))


R = 11
A, B, SCALE_A, SCALE_B = operands(R)
OFFS = ends([2, 0, 5, 1, 3])
WRONG = [
    (dict(mat_a=A.float()), TypeError,
     "mat_a is torch.float32, must be torch.float8_e4m3fn or torch.float8_e5m2"),
    (dict(mat_b=B.to(E5M2)), TypeError, "mat_b is torch.float8_e5m2, must be torch.float8_e4m3fn"),
    (dict(mat_a=[1]), TypeError, "mat_a is a list, must be a tensor"),
    (dict(scale_a=None), TypeError, "scale_a is a NoneType, must be a tensor"),
    (dict(mat_a=A[0]), ValueError, "mat_a has 1 and mat_b 3 dimensions, must have 2 and 3"),
    (dict(mat_b=B[0]), ValueError, "mat_a has 2 and mat_b 2 dimensions, must have 2 and 3"),
    (dict(mat_a=A[:, :16]), ValueError, "mat_a has 16 columns, must have 32, as many as mat_b has"),
    (dict(mat_a=A.t().contiguous().t()), ValueError,
     r"mat_a has strides \[1, 11\], must be row-major"),
    (dict(mat_b=B.contiguous()), ValueError,
     r"mat_b has strides \[768, 24, 1\], must be column-major: w.transpose\(-2, -1\)"),
    (dict(scale_a=SCALE_A[1:]), ValueError,
     r"scale_a has shape \[10\], must be \[11\] or \[11, 1\]"),
    (dict(scale_a=SCALE_A[None]), ValueError, r"scale_a has shape \[1, 11\], must be \[11\] or"),
    (dict(scale_b=SCALE_B[:, 1:]), ValueError,
     r"scale_b has shape \[5, 23\], must be \[5, 24\] or \[5, 1, 24\]"),
    (dict(scale_b=SCALE_B.mT), ValueError, r"scale_b has shape \[24, 5\], must be \[5, 24\] or"),
    (dict(scale_a=SCALE_A.half()), TypeError, "torch.float16, must be torch.float32"),
    (dict(scale_b=SCALE_B.double()), TypeError, "torch.float64, must be torch.float32"),
    (dict(scale_b=SCALE_B.to("meta")), ValueError, "scale_b is on meta, must be on cpu, where mat"),
    (dict(mat_b=B.to("meta")), ValueError, "mat_b is on meta, must be on cpu, where mat_a is"),
    (dict(offs=OFFS.to("meta")), ValueError, "offs is on meta, must be on cpu, where mat_a is"),
    (dict(offs=None), TypeError, "offs is a NoneType, must be a tensor of torch.int32"),
    (dict(offs=OFFS.long()), TypeError, "offs is torch.int64, must be a tensor of torch.int32"),
    (dict(offs=OFFS[None]), ValueError, "offs has 2 dimensions, must have 1"),
    (dict(offs=OFFS[1:]), ValueError, "offs has 4 entries, must have 5, one a group"),
    (dict(offs=OFFS + 1), ValueError, r"offs is \[3, 3, 8, 9, 12\], must ascend from 0"),
    (dict(offs=OFFS.flip(0)), ValueError, r"offs is \[11, 8, 7, 2, 2\], must ascend from 0"),
    (dict(bias=draw(E, 3)), ValueError, r"bias is f32\[5, 3\], must be \S*\[5, 24\]"),
    (dict(bias=draw(E, N).double()), TypeError, "bias is torch.float64, must be torch.float32"),
    (dict(out_dtype=torch.int32), TypeError, "torch.int32, must be torch.float32, torch.bfloat16"),
    (dict(out_dtype=E4M3), TypeError, "torch.float8_e4m3fn, must be torch.float32, torch.bf"),
    (dict(use_fast_accum=True), ValueError, "use_fast_accum is True, must be False; sums of 128"),
    (dict(scale_a=SCALE_A.clone().requires_grad_()), NotImplementedError,
     "scale_a requires a gradient, must not; it has none"),
    (dict(bias=draw(E, N, grad=True)), NotImplementedError,
     "bias requires a gradient, must not; it has none"),
]


@pytest.mark.parametrize("changed, error, words", WRONG)
def test_errors(changed, error, words):
    good = dict(mat_a=A, mat_b=B, scale_a=SCALE_A, scale_b=SCALE_B, offs=OFFS)
    cadre.scaled_grouped_mm(**good)
    with pytest.raises(error, match=words):
        cadre.scaled_grouped_mm(**good | changed)


def test_the_operator_has_no_gradient():
    offsets = cadre.offsets(OFFS, "ends", R).offsets
    y = torch.ops.cadre.scaled_grouped_mm(A, B, SCALE_A.clone().requires_grad_(), SCALE_B, offsets,
                                          out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()
