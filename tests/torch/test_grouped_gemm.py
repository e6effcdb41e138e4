"""torch.ops.cadre.grouped_gemm: every pass, storage, dtype and epilogue; gradients; autocast."""

import pytest
import torch

import cadre
from conftest import (assert_close, assert_seen, draw, experts_of_rows, offsets_of, poisoned,
                      slices_of)

ops = torch.ops.cadre
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
E, N, K = 5, 7, 11


def reference(lhs, w, counts, which):
    """Plain products, expert by expert; rows of the tail are zero. wgrad: w is x."""
    slices = slices_of(counts)
    if which == "wgrad":
        return torch.stack([lhs[s].T @ w[s] for s in slices])
    w = w if which == "dgrad" else w.transpose(1, 2)
    tail = torch.zeros(lhs.shape[0] - sum(counts), w.shape[2], dtype=lhs.dtype, device=lhs.device)
    return torch.cat([lhs[s] @ w[e] for e, s in enumerate(slices)] + [tail])


def operands(counts, rows, which, dtype, device, grad=False):
    """lhs and rhs whose tail is NaN, since nobody reads it."""
    lhs = poisoned(rows, K if which == "fprop" else N, dtype=dtype, device=device)
    lhs[:sum(counts)] = draw(sum(counts), lhs.shape[1])
    if which == "wgrad":
        rhs = poisoned(rows, K, dtype=dtype, device=device)
        rhs[:sum(counts)] = draw(sum(counts), K)
    else:
        rhs = draw(E, N, K, dtype=dtype, device=device)
    return lhs.requires_grad_(grad), rhs.requires_grad_(grad)


def without_tail(t, counts):
    """In fp64, with a tail of zeros for the reference, which does multiply it."""
    return torch.cat([t[:sum(counts)].double(), t[sum(counts):].double().nan_to_num() * 0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("which", ["fprop", "dgrad", "wgrad"])
def test_values(device, case, which, dtype):
    counts, rows = case
    offsets = offsets_of(counts, device)
    lhs, rhs = operands(counts, rows, which, dtype, device)
    got = cadre.grouped_gemm(lhs, rhs, offsets, which)
    wide = rhs.double() if which != "wgrad" else without_tail(rhs, counts)
    want = reference(without_tail(lhs, counts), wide, counts, which)
    assert got.dtype == dtype
    assert_close(got, want, terms=20)
    wide_out = cadre.grouped_gemm(lhs, rhs, offsets, which, out_dtype=torch.float32)
    assert_close(wide_out, want, terms=20)
    if sum(counts):
        assert_seen(got)


def layouts(w):
    """The same weights, stored in other ways."""
    yield "column", w.transpose(1, 2).contiguous().transpose(1, 2)
    padded = poisoned(E, N + 1, K + 3, dtype=w.dtype, device=w.device)
    padded[:, 1:, 2:-1] = w
    yield "slice", padded[:, 1:, 2:-1]
    yield "every second expert", torch.stack([w, w * 0], 1)[:, 0]
    strided = torch.stack([w, w * 0], 3)[..., 0]
    assert strided.stride(2) == 2
    yield "no stride of 1", strided


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("which", ["fprop", "dgrad"])
def test_strides_and_storage(device, which, dtype):
    counts, rows = [3, 0, 6, 1, 4], 16
    offsets = offsets_of(counts, device)
    lhs, w = operands(counts, rows, which, dtype, device)
    want = reference(without_tail(lhs, counts), w.double(), counts, which)
    for name, same in layouts(w):
        assert torch.equal(same, w), name
        assert_close(cadre.grouped_gemm(lhs, same, offsets, which), want, terms=20)
        alone = list(same)
        assert_close(cadre.grouped_gemm(lhs, alone, offsets, which), want, terms=20)
    for odd in (torch.stack([lhs, lhs], 2)[..., 0], lhs.T.contiguous().T,
                torch.cat([lhs[:, :1], lhs], 1)[:, 1:]):
        assert not odd.is_contiguous()
        assert_close(cadre.grouped_gemm(odd, w, offsets, which), want, terms=20)


@pytest.mark.parametrize("widths", [(8, 16), (64, 32), (3, 1), (1, 5), (128, 24)])
@pytest.mark.parametrize("shift", [0, 1])
def test_alignment(device, widths, shift):
    """Widths that a fast kernel takes, at addresses that it does not take, and the reverse."""
    n, k = widths
    counts, rows = [5, 0, 9], 16
    offsets = offsets_of(counts, device)
    def at(*shape):
        memory = draw(shift + int(torch.tensor(shape).prod()), dtype=torch.bfloat16, device=device)
        return memory[shift:].view(*shape)
    x, w, dy = at(rows, k), at(3, n, k), at(rows, n)
    for which, lhs, rhs in (("fprop", x, w), ("dgrad", dy, w), ("wgrad", dy, x)):
        want = reference(without_tail(lhs, counts), rhs.double(), counts, which)
        assert_close(cadre.grouped_gemm(lhs, rhs, offsets, which), want, terms=20)
        out = at(*want.shape)
        ops.grouped_gemm.out(lhs, [rhs], offsets, which, out=[out])
        end = sum(counts) if which != "wgrad" else 3
        assert_close(out[:end], want[:end], terms=20)


def test_an_addend_at_any_address(device):
    """A fast kernel takes the product, but for what is added to it."""
    counts, rows, n, k = [5, 0, 9], 16, 64, 32
    offsets = offsets_of(counts, device)
    x, w = (draw(*s, dtype=torch.bfloat16, device=device) for s in ((rows, k), (3, n, k)))
    memory = draw(1 + rows * n, dtype=torch.bfloat16, device=device)
    c, beta = memory[1:].view(rows, n), torch.full((3,), 2.0, device=device)
    out = draw(rows, n, dtype=torch.bfloat16, device=device)
    ops.grouped_gemm.out(x, [w], offsets, "fprop", beta=beta, c=c, out=[out])
    want = reference(without_tail(x, counts), w.double(), counts, "fprop")
    assert_close(out[:14], want[:14] + 2 * c[:14].double(), terms=20)


def test_one_expert_in_a_list(device):
    x, w = draw(4, K, device=device), draw(N, K, device=device)
    got = cadre.grouped_gemm(x, [w], offsets_of([3], device))
    assert_close(got[:3], x[:3].double() @ w.T.double(), terms=20)


@pytest.mark.parametrize("n,k", [(8, 16), (1, 16), (8, 1), (1, 1)])
def test_dimensions_of_one(device, n, k):
    """Their strides mean nothing, and may be anything."""
    x, w = (draw(*s, dtype=torch.bfloat16, device=device) for s in ((1, k), (1, n, k)))
    offsets = offsets_of([1], device)
    want = x.double() @ w[0].double().T
    odd_x = x.as_strided((1, k), (5, 1 if k > 1 else 3))
    odd_w = w.as_strided((1, n, k), (7, k if n > 1 else 3, 1 if k > 1 else 9))
    assert torch.equal(odd_x, x) and torch.equal(odd_w, w)
    assert_close(cadre.grouped_gemm(odd_x, odd_w, offsets), want, terms=20)
    assert_close(cadre.grouped_gemm(odd_x, [odd_w[0]], offsets), want, terms=20)
    column = w.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(cadre.grouped_gemm(odd_x, column, offsets), want, terms=20)


def test_expanded_experts(device):
    """One weight for all experts, by a stride of zero."""
    counts = [3, 0, 2]
    x, w = draw(5, K, device=device), draw(N, K, device=device)
    got = cadre.grouped_gemm(x, w.expand(3, N, K), offsets_of(counts, device))
    assert_close(got, x.double() @ w.T.double(), terms=20)


# epilogues and out


@pytest.mark.parametrize("dtype", FLOATS)
def test_bias_scale_and_alpha(device, case, dtype):
    counts, rows = case
    x, w = operands(counts, rows, "fprop", dtype, device)
    bias, scale, alpha = (draw(E, N, dtype=dtype, device=device), draw(rows, device=device),
                          draw(E, device=device))
    offsets, owner = offsets_of(counts, device), experts_of_rows(counts, device)
    plain = reference(without_tail(x, counts), w.double(), counts, "fprop")[:len(owner)]
    got = cadre.grouped_gemm(x, w, offsets, bias=bias)
    assert_close(got[:len(owner)], plain + bias.double()[owner], terms=20)
    assert got[len(owner):].abs().sum() == 0
    got = cadre.grouped_gemm(x, w, offsets, bias=bias, bias_scale=scale, alpha=alpha)
    want = plain * alpha.double()[owner, None] + (bias.double()[owner]
                                                  * scale.double()[:len(owner), None])
    assert_close(got[:len(owner)], want, terms=40)


@pytest.mark.parametrize("which", ["fprop", "dgrad"])
def test_out_keeps_the_tail_and_adds_c(device, which):
    counts, rows = [3, 0, 6, 1, 4], 17
    offsets, owner = offsets_of(counts, device), experts_of_rows(counts, device)
    lhs, w = operands(counts, rows, which, torch.bfloat16, device)
    want = reference(without_tail(lhs, counts), w.double(), counts, which)
    width = want.shape[1]
    for out in (poisoned(rows, width, device=device), poisoned(width, rows, device=device).t()):
        ops.grouped_gemm.out(lhs, [w], offsets, which, out=[out])
        assert_close(out[:14], want[:14], terms=20)
        assert out[14:].isnan().all()
    c, beta = draw(rows, width, device=device), draw(E, device=device)
    both = want[:14] + c[:14].double() * beta.double()[owner, None]
    out = poisoned(rows, width, device=device)
    ops.grouped_gemm.out(lhs, [w], offsets, which, beta=beta, c=c, out=[out])
    assert_close(out[:14], both, terms=40)
    ops.grouped_gemm.out(lhs, [w], offsets, which, beta=beta, c=c, out=[c])
    assert torch.equal(c[:14], out[:14])
    if which == "fprop":  # c may be the output, and nothing else may
        bias = c.view(-1)[:E * width].view(E, width)
        with pytest.raises(ValueError, match="out shares memory with bias, must not"):
            ops.grouped_gemm.out(lhs, [w], offsets, which, bias=bias, beta=beta, c=c, out=[c])


@pytest.mark.parametrize("storage", ["packed", "column", "discrete", "discrete column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wgrad_accumulates(device, storage, dtype):
    counts, rows = [3, 0, 6, 0, 4], 15
    offsets = offsets_of(counts, device)
    dy, x = operands(counts, rows, "wgrad", torch.bfloat16, device)
    dw = reference(without_tail(dy, counts), without_tail(x, counts), counts, "wgrad")
    old = draw(E, N, K, dtype=dtype, device=device)

    def stored(values):
        column = (lambda t: t.transpose(-2, -1).contiguous().transpose(-2, -1)
                  ) if "column" in storage else torch.clone
        return [column(t) for t in values] if "discrete" in storage else [column(values)]

    def read(out):
        return torch.stack(out) if "discrete" in storage else out[0]

    flags = torch.tensor([0, 1, 1, 0, 0], dtype=torch.int32, device=device)
    on = torch.ones(1, dtype=torch.int32, device=device)
    for accumulate, words, adds in (("no", None, flags * 0), ("yes", None, flags * 0 + 1),
                                    ("device", on, flags * 0 + 1), ("device", on * 0, flags * 0),
                                    ("per_expert", flags, flags)):
        keep = adds.bool()[:, None, None]
        out = stored(torch.where(keep, old, float("nan")))
        ops.grouped_gemm.out(dy, [x], offsets, "wgrad", accumulate=accumulate,
                             accumulate_flags=words, out=out)
        assert_close(read(out), torch.where(keep, dw + old, dw), terms=20)


# gradients


@pytest.mark.parametrize("storage", ["packed", "column", "discrete"])
@pytest.mark.parametrize("which", ["fprop", "dgrad"])
def test_gradients(device, case, which, storage):
    counts, rows = case
    offsets = offsets_of(counts, device)
    lhs, values = operands(counts, rows, which, torch.float32, device)
    lhs = lhs.detach().nan_to_num(5.0).requires_grad_()
    wide_lhs = lhs.detach().double().requires_grad_()
    wide_w = values.detach().double().requires_grad_()
    if storage == "column":
        w = [values.transpose(1, 2).contiguous().requires_grad_()]
        given = [w[0].transpose(1, 2)]
    else:
        w = [values.requires_grad_()] if storage == "packed" else [
            one.detach().clone().requires_grad_() for one in values]
        given = w
    alpha = draw(E, device=device)
    got = ops.grouped_gemm(lhs, given, offsets, which, alpha=alpha)
    want = reference(wide_lhs, wide_w * alpha.double()[:, None, None], counts, which)
    d = draw(*got.shape, device=device)
    got.backward(d)
    want.backward(d.double())
    assert_close(lhs.grad, wide_lhs.grad, terms=20)
    dw = {"packed": lambda: w[0].grad, "column": lambda: w[0].grad.transpose(1, 2),
          "discrete": lambda: torch.stack([one.grad for one in w])}[storage]()
    assert_close(dw, wide_w.grad, terms=20)
    if sum(counts):
        assert_seen(dw)
        assert_seen(lhs.grad)


def test_gradients_of_wgrad(device, case):
    counts, rows = case
    dy, x = draw(rows, N, device=device, grad=True), draw(rows, K, device=device, grad=True)
    wide = [t.detach().double().requires_grad_() for t in (dy, x)]
    got = cadre.grouped_gemm(dy, x, offsets_of(counts, device), "wgrad")
    want = reference(*wide, counts, "wgrad")
    d = draw(E, N, K, device=device)
    got.backward(d)
    want.backward(d.double())
    assert_close(dy.grad, wide[0].grad, terms=20)
    assert_close(x.grad, wide[1].grad, terms=20)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_scale", [False, True])
def test_gradients_of_the_bias(device, case, dtype, with_scale):
    counts, rows = case
    owner = experts_of_rows(counts, device)
    x, w = operands(counts, rows, "fprop", dtype, device)
    bias = draw(E, N, dtype=dtype, device=device, grad=True)
    scale = draw(rows, device=device, grad=True) if with_scale else None
    got = cadre.grouped_gemm(x, w, offsets_of(counts, device), bias=bias, bias_scale=scale)
    wide = bias.detach().double().requires_grad_()
    wide_scale = (torch.ones(rows, device=device) if scale is None else scale.detach()
                  ).double().requires_grad_()
    d = draw(rows, N, dtype=dtype, device=device)
    got.backward(d)
    (wide[owner] * wide_scale[:len(owner), None]).backward(d[:len(owner)].double())
    assert_close(bias.grad, wide.grad, terms=20)
    if with_scale:
        assert_close(scale.grad, wide_scale.grad, terms=20)


def test_second_gradients(device):
    """Every product's gradient is a product: gradients of gradients are those of torch."""
    counts = [3, 0, 4]
    offsets = offsets_of(counts, device)
    x, w = draw(8, K, device=device, grad=True), draw(3, N, K, device=device, grad=True)
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, w))

    def second(y, x, w, v):
        dx, dw = torch.autograd.grad((y * v).sin().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(dx.square().sum() + dw.cos().sum(), (x, w))

    v = draw(8, N, device=device)
    got = second(cadre.grouped_gemm(x, w, offsets), x, w, v)
    want = second(reference(wide_x, wide_w, counts, "fprop"), wide_x, wide_w, v.double())
    for a, b in zip(got, want):
        assert_seen(a)
        assert_close(a, b, steps=64, terms=200)


def test_fp32_output_of_bf16(device):
    counts = [3, 0, 4]
    x, w = (draw(*s, dtype=torch.bfloat16, device=device, grad=True) for s in ((7, K), (3, N, K)))
    y = cadre.grouped_gemm(x, w, offsets_of(counts, device), out_dtype=torch.float32)
    d = draw(7, N, device=device)
    y.backward(d)
    assert x.grad.dtype == w.grad.dtype == torch.bfloat16
    assert_close(x.grad, reference(d.double(), w.detach().double(), counts, "dgrad"), terms=20)
    assert_close(w.grad, reference(d.double(), x.detach().double(), counts, "wgrad"), terms=20)


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_frozen_operands(device, frozen):
    """Nothing is kept for a gradient that nobody wants."""
    x, w = draw(7, K, device=device), draw(3, N, K, device=device)
    (w if frozen == "x" else x).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t,
                                                  lambda t: t):
        y = cadre.grouped_gemm(x, w, offsets_of([3, 0, 4], device))
    y.sum().backward()
    assert (x.data_ptr() in kept) == (frozen == "x") and (w.data_ptr() in kept) == (frozen == "w")
    assert (x.grad is None) == (frozen == "x") and (w.grad is None) == (frozen == "w")
    assert_seen(w.grad if frozen == "x" else x.grad)


def test_column_weights_get_their_gradient_without_a_copy(device):
    """The gradient of weights stored [E, K, N] lies as they do."""
    w = draw(3, K, N, device=device, grad=True)
    seen = []
    w.register_hook(lambda g: seen.append(g.stride()))
    cadre.grouped_gemm(draw(7, K, device=device), w.transpose(1, 2),
                       offsets_of([3, 0, 4], device)).sum().backward()
    assert seen == [w.stride()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    counts = [3, 0, 4]
    offsets = offsets_of(counts, device)
    x, w = draw(7, K, device=device, grad=True), draw(3, N, K, device=device, grad=True)
    bias = draw(3, N, device=device, grad=True)
    with torch.autocast(device.type, dtype):
        y = cadre.grouped_gemm(x, w, offsets, bias=bias)
        alone = cadre.grouped_gemm(x, list(w.unbind(0)), offsets, bias=bias)
    want = cadre.grouped_gemm(x.to(dtype), w.to(dtype), offsets, bias=bias)
    assert y.dtype == dtype and torch.equal(y, want) and torch.equal(alone, want)
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == bias.grad.dtype == torch.float32
    assert_seen(w.grad)


def test_a_budget_of_units(device):
    counts = [3, 0, 4]
    x, w = draw(7, K, device=device), draw(3, N, K, device=device)
    offsets = offsets_of(counts, device)
    assert torch.equal(cadre.grouped_gemm(x, w, offsets, unit_budget=1),
                       cadre.grouped_gemm(x, w, offsets))


# errors


def call(device, which="fprop", **changes):
    given = dict(lhs=draw(4, K, device=device), rhs=[draw(2, N, K, device=device)],
                 offsets=offsets_of([1, 2], device), which=which)
    out = changes.pop("out", None)
    given |= {k: v for k, v in changes.items() if k in given}
    rest = {k: v for k, v in changes.items() if k not in given}
    op = ops.grouped_gemm if out is None else ops.grouped_gemm.out
    return op(*given.values(), **rest, **({} if out is None else dict(out=out)))


FAULTS = [
    (dict(which="forward"), ValueError, "which is 'forward', must be fprop, dgrad or wgrad"),
    (dict(lhs=torch.ones(4)), ValueError, r"lhs has shape \[4\], must have 2 dimensions"),
    (dict(lhs=torch.ones(4, K).double()), TypeError,
     "lhs is torch.float64, must be torch.float32, torch.bfloat16 or"),
    (dict(lhs=torch.ones(4, K + 1)), ValueError, r"w is f32\[2, 7, 11\], must be f32\[2, 7, 12\]"),
    (dict(rhs=[]), ValueError, "rhs has no tensors, must have 1 or more"),
    (dict(rhs=[torch.ones(3)]), ValueError, r"rhs has shape \[3\], must have 2 or 3 dimensions"),
    (dict(rhs=[torch.ones(1, 2, 3, 4)]), ValueError, r"must be \[E, N, K\] or E of \[N, K\]"),
    (dict(rhs=[torch.ones(2, N, K).int()]), TypeError, "rhs is torch.int32, must be torch.float32"),
    (dict(rhs=[torch.ones(N, K), torch.ones(N, K + 1)]), ValueError,
     r"rhs of an expert is torch.float32\[7, 12\] .*, must be as that of the first: .*\[7, 11\] "),
    (dict(rhs=[torch.ones(N, K)] * 3), ValueError, r"must be f32\[2, 7, 11\]"),
    (dict(offsets=torch.zeros(3).long()), TypeError, "offsets is torch.int64, must be"),
    (dict(offsets=torch.zeros(1, 3).int()), ValueError, r"offsets has shape \[1, 3\]"),
    (dict(bias=torch.ones(3, N)), ValueError, r"bias is f32\[3, 7\], must be f32\[2, 7\]"),
    (dict(bias=torch.ones(2, N).int()), TypeError, "bias is torch.int32, must be torch.float32"),
    (dict(bias=torch.ones(2, N), bias_scale=torch.ones(5)), ValueError,
     r"bias_scale has shape \[5\], must be \[4\]"),
    (dict(bias_scale=torch.ones(4)), ValueError, "bias_scale is yes, must be no; there is no bias"),
    (dict(alpha=torch.ones(3)), ValueError, r"alpha has shape \[3\], must be \[2\]"),
    (dict(alpha=torch.ones(2).half()), TypeError,
     "alpha is torch.float16, must be torch.float32"),
    (dict(which="dgrad", lhs=torch.ones(4, N), bias=torch.ones(2, N)), ValueError,
     "bias is yes, must be no; only fprop adds a bias"),
    (dict(which="wgrad"), ValueError, "rhs has 1 tensors of 3 dimensions, must be one of 2"),
    (dict(unit_budget=-1), ValueError, "unit_budget is -1, must be 0 or more"),
    (dict(out=[torch.ones(4, N)] * 2), ValueError, "out has 2 tensors, must have 1"),
    (dict(out=[torch.ones(4, N + 1)]), ValueError, r"y is f32\[4, 8\], must be f32\[4, 7\]"),
    (dict(out=[torch.ones(4, N, 2)[..., 0]]), ValueError,
     r"out has strides \[14, 2\], must have stride 1 in one dimension"),
    (dict(out=[torch.ones(4, N)], accumulate="maybe"), ValueError, "accumulate is 'maybe', must"),
    (dict(out=[torch.ones(4, N)], accumulate="yes"), ValueError, "only wgrad accumulates"),
    (dict(out=[torch.ones(4, N)], beta=torch.ones(2)), ValueError,
     "beta is given, must be None; beta is the factor of c"),
    (dict(out=[torch.ones(4, N)], c=torch.ones(4, N)), ValueError, "beta is None, must be given"),
    (dict(which="wgrad", lhs=torch.ones(4, N), rhs=[torch.ones(4, K)], accumulate="device",
          out=[torch.ones(2, N, K)]), ValueError, "accumulate_flags is None, must be given"),
    (dict(which="wgrad", lhs=torch.ones(4, N), rhs=[torch.ones(4, K)],
          accumulate_flags=torch.ones(1).int(), out=[torch.ones(2, N, K)]), ValueError,
     "accumulate_flags is given, must be None; accumulate is no"),
    (dict(which="wgrad", lhs=torch.ones(4, N), rhs=[torch.ones(4, K)],
          out=[torch.ones(N, K), torch.ones(K, N).T]), ValueError,
     r"out of an expert is .* with strides \[1, 7\] .* as that of the first: .* strides \[11, 1\]"),
    (dict(which="wgrad", lhs=torch.ones(4, N), rhs=[torch.ones(4, K)],
          out=[torch.ones(N, K, 2)[..., 0]] * 2), ValueError,
     r"out has strides \[22, 2\], must have stride 1 in a dimension of an expert, and experts"),
    (dict(rhs=[torch.ones(1, N, K)] * 2), ValueError, r"must be \[E, N, K\] or E of \[N, K\]"),
]


@pytest.mark.parametrize("changes,error,words", FAULTS, ids=[fault[2][:40] for fault in FAULTS])
def test_errors(device, changes, error, words):
    def as_it_lies(one):  # .to() would close gaps
        there = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)
        return there.copy_(one)

    def move(value):
        if isinstance(value, torch.Tensor):
            return as_it_lies(value)
        return [as_it_lies(one) for one in value] if isinstance(value, list) else value

    with pytest.raises(error, match=words):
        call(device, **{name: move(value) for name, value in changes.items()})


def test_alpha_has_no_gradient(device):
    with pytest.raises(NotImplementedError, match="alpha requires a gradient, must not"):
        call(device, alpha=torch.ones(2, device=device, requires_grad=True))
