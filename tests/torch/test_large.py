"""Tensors of more than 2^31 elements: the last rows are where the first would be in 32 bits."""

import pytest
import torch
from conftest import assert_seen, draw, offsets_of, slices_of

import cadre

FREE_BYTES = 40 << 30
MANY = 1 << 31
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def free_bytes():
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


pytestmark = pytest.mark.skipif(free_bytes() < FREE_BYTES,
                                reason=f"needs {FREE_BYTES >> 30} GiB of free GPU memory")


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    torch.cuda.empty_cache()


def normal(*shape):
    """Too large to be drawn on the host."""
    return torch.empty(shape, dtype=BF16, device=CUDA).normal_()


def poison(*shapes):
    """Memory that torch keeps and gives to results of these shapes holds NaN."""
    held = [torch.full(shape, float("nan"), dtype=BF16, device=CUDA) for shape in shapes]
    del held


def assert_near(got, want):
    """bf16 results beside fp32 ones."""
    assert torch.isfinite(got).all()
    assert_seen(got)
    apart = (got.float() - want).abs()
    bound = 2.0**-7 * want.abs() + 1e-3 * want.abs().max()
    assert torch.all(apart <= bound), f"{apart.max():.3g} from a plain product"


def parts_of(counts):
    """The first and the last rows of every expert, so many that a plain product is small."""
    for e, rows in enumerate(slices_of(counts)):
        if rows.start == rows.stop:
            continue
        for at in (rows.start, max(rows.stop - 100, rows.start)):
            yield e, slice(at, min(at + 100, rows.stop))


def check_rows(result, operand, weight, counts, bias=None):
    """result[rows of e] is operand[rows of e] @ weight[e] (+ bias[e]), and zero in the tail."""
    for e, part in parts_of(counts):
        want = operand[part].float() @ weight[e].float()
        assert_near(result[part], want if bias is None else want + bias[e].float())
    assert torch.all(result[sum(counts):] == 0)


SHAPES = {  # counts, N, K
    "y": ([20_000, 0, 41_000, 5_000], 32_768, 64),
    "x": ([20_000, 0, 41_000, 5_000], 64, 32_768),
    "weight": ([100, 300, 0, 7, 260, 90, 40, 33, 170], 16_384, 16_384),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("large", list(SHAPES))
def test_grouped_linear(large, packed):
    counts, n, k = SHAPES[large]
    experts, rows = len(counts), sum(counts) + 36
    sizes = {"y": rows * n, "x": rows * k, "weight": experts * n * k}
    assert sizes[large] > MANY
    layer = cadre.GroupedLinear(experts, k, n, device=CUDA, params_dtype=BF16,
                                single_grouped_weight=packed, single_grouped_bias=True)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    weight = [p for name, p in layer.named_parameters() if name.startswith("weight")]
    w = weight[0].detach() if packed else [p.detach() for p in weight]
    x, dy = normal(rows, k).requires_grad_(), normal(rows, n)
    poison((rows, n), (rows, k))
    y = layer(x, torch.tensor(counts, device=CUDA))
    check_rows(y.detach(), x.detach(), [one.t() for one in w], counts, layer.bias.detach())
    poison((rows, k))
    y.backward(dy)
    check_rows(x.grad, dy, w, counts)
    dw = weight[0].grad if packed else [p.grad for p in weight]
    for e, part in enumerate(slices_of(counts)):
        if counts[e] == 0:
            assert torch.all(dw[e] == 0) and torch.all(layer.bias.grad[e] == 0)
            continue
        last = slice(-64, None)
        assert_near(dw[e][last], dy[part, last].t().float() @ x.detach()[part].float())
        assert_near(layer.bias.grad[e], dy[part].sum(0, dtype=torch.float32))


def test_permute_and_combine():
    """Rows of more than 2^31 elements, of tokens of fewer; every token weighs its rows alike."""
    tokens, top_k, hidden, experts = 16_500, 8, 16_384, 16
    rows = tokens * top_k
    assert rows * hidden > MANY
    x = normal(tokens, hidden)
    chosen = torch.rand(tokens, experts, device=CUDA).topk(top_k).indices.int()
    where = cadre.offsets_of_routing(chosen, experts, rows)
    order = (where.offsets, where.row_of, where.slot_of)
    prob = draw(tokens, top_k, device=CUDA)
    poison((rows, hidden))
    moved, row_prob = cadre.permute(x, *order, prob)
    last = slice(rows - 200, rows)
    assert torch.equal(moved[last], x[where.slot_of[last].long() // top_k])
    assert torch.equal(row_prob, prob.flatten()[where.slot_of.long()])
    out = cadre.combine(moved, *order, prob)
    for part in (slice(0, 200), slice(tokens - 200, tokens)):
        assert_near(out[part], x[part].float() * prob[part].sum(1, keepdim=True))


@pytest.mark.parametrize("which", ["fprop", "wgrad"])
def test_grouped_gemm(which):
    """fprop with a result of fp32; wgrad of operands that are both large."""
    counts = [30_000, 3, 0, 36_000]
    rows = sum(counts) + 5
    n, k = (32_768, 64) if which == "fprop" else (32_768, 32_768)
    x = normal(rows, k)
    offsets = offsets_of(counts, CUDA)
    if which == "fprop":
        w = normal(4, n, k)
        y = torch.ops.cadre.grouped_gemm(x, [w], offsets, "fprop", out_dtype=torch.float32)
        assert y.numel() > MANY
        check_rows(y, x, [one.t() for one in w], counts)
        return
    dy = normal(rows, n)
    assert min(x.numel(), dy.numel()) > MANY
    dw = torch.ops.cadre.grouped_gemm(dy, [x], offsets, "wgrad")
    for e, part in enumerate(slices_of(counts)):
        if counts[e] == 0:
            assert torch.all(dw[e] == 0)
            continue
        last = slice(-48, None)
        assert_near(dw[e][last], dy[part, last].t().float() @ x[part].float())
