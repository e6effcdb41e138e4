"""What the overloads `.out` write lies apart from what they read, also where a tensor has gaps."""

import random

import pytest
import torch
from conftest import draw, offsets_of

import cadre

OPS = torch.ops.cadre
R, N, K, E = 5, 4, 3, 2
OFFSETS = offsets_of([2, 3], "cpu")


def product(x, w, out, **options):
    OPS.grouped_gemm.out(x, w, OFFSETS, "fprop", out=[out], **options)


def places(t) -> set[int]:
    """The elements of its memory that a tensor has."""
    every = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    return set(every.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())


def somewhere(memory, shape, draws, first_step=1):
    """Of that shape, at any place of the memory, row- or column-major and with gaps or none."""
    orders = [(0, 1), (1, 0)] if len(shape) == 2 else [(0, 1, 2), (0, 2, 1)]
    order, strides, step = draws.choice(orders), [0] * len(shape), first_step
    for d in reversed(order):
        strides[d] = step
        step = step * shape[d] + draws.choice([0, 0, 1, 3, 8])
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    return memory.as_strided(shape, strides, draws.randrange(memory.numel() - last))


@pytest.mark.parametrize("seed", range(4))
def test_all_that_meets_is_refused_and_nothing_else(seed):
    """Against the sets of elements."""
    draws, seen = random.Random(seed), {True: 0, False: 0}
    for _ in range(500):
        memory = draw(260)
        x, out = somewhere(memory, (R, K), draws, draws.choice([1, 2])), somewhere(
            memory, (R, N), draws)
        w = somewhere(memory, (E, N, K), draws) if draws.random() < 0.5 else draw(E, N, K)
        read = places(x) | (places(w) if w.untyped_storage().data_ptr() == memory.data_ptr()
                            else set())
        meets = bool(places(out) & read)
        seen[meets] += 1
        want = cadre.grouped_gemm(x.clone(), w.clone(), OFFSETS)
        if meets:
            before = memory.clone()
            with pytest.raises(ValueError, match="^out shares memory with (lhs|rhs), must not; it"):
                product(x, [w], out)
            assert torch.equal(memory, before)
        else:
            product(x, [w], out)
            assert torch.equal(out, want)
    assert min(seen.values()) > 30


def test_columns_beside_each_other():
    """Results may be written beside the rows, and not over them."""
    memory, w = draw(600, 1024), draw(3, 512, 512)
    offs = torch.tensor([200, 300, 600], dtype=torch.int32)
    x, beside, over = memory[:, :512], memory[:, 512:], memory[:, 511:1023]
    want = cadre.grouped_mm(x.clone(), w, offs=offs)
    cadre.grouped_mm(x, w, offs=offs, out=beside)
    assert torch.equal(beside, want)
    with pytest.raises(ValueError, match="^out shares memory with lhs, must not; it is written"):
        cadre.grouped_mm(x, w, offs=offs, out=over)


def test_outputs_within_each_other():
    memory = draw(N, 8)
    with pytest.raises(ValueError, match="^out of expert [01] shares memory with out of expert"):
        OPS.grouped_gemm.out(draw(R, N), [draw(R, K)], OFFSETS, "wgrad",
                             out=[memory[:, :K], memory[:, 1:K + 1]])
    into = [memory[:, :K], memory[:, K:2 * K]]
    dy, x = draw(R, N), draw(R, K)
    OPS.grouped_gemm.out(dy, [x], OFFSETS, "wgrad", out=into)
    assert torch.equal(torch.stack(into), cadre.grouped_gemm(dy, x, OFFSETS, "wgrad"))


def test_an_addend_that_is_the_output():
    """As it lies; the same memory in another order is read while it is written."""
    x, w, beta = draw(R, K), draw(E, R, K), torch.ones(E)
    out = draw(R, R)
    want = cadre.grouped_gemm(x, w, OFFSETS) + out
    product(x, [w], out, c=out, beta=beta)
    torch.testing.assert_close(out, want)
    gaps = draw(R, R + 2)[:, :R]
    want = cadre.grouped_gemm(x, w, OFFSETS) + gaps
    product(x, [w], gaps, c=gaps, beta=beta)
    torch.testing.assert_close(gaps, want)
    with pytest.raises(ValueError, match="^out shares memory with c, must not"):
        product(x, [w], out, c=out.t(), beta=beta)
    with pytest.raises(ValueError, match="^out shares memory with c, must not"):
        product(x, [w], gaps, c=gaps.t(), beta=beta)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", ["2d2d", "3d3d"])
def test_places_of_an_output_that_are_one(form, biased):
    """grouped_mm writes where every element has a place of its own, and refuses the rest before it
    writes anything."""
    draws, seen = random.Random(0), {True: 0, False: 0}
    a, b = (draw(N, R), draw(R, K)) if form == "2d2d" else (draw(E, N, R), draw(E, R, K))
    rest = dict(offs=OFFSETS[1:] if form == "2d2d" else None, bias=draw(E, K) if biased else None)
    want = cadre.grouped_mm(a, b, **rest)
    for _ in range(200):
        strides = [draws.choice([0, 1, 2, K, K + 1, N * K, 20]) for _ in range(2)]
        out = draw(100).as_strided((E, N, K), (*strides, 1))
        before, is_whole = out.clone(), len(places(out)) == out.numel()
        seen[is_whole] += 1
        try:
            cadre.grouped_mm(a, b, **rest, out=out)
        except ValueError as error:
            assert not is_whole or "strides" in str(error)
            assert torch.equal(out, before)
        else:
            assert is_whole
            torch.testing.assert_close(out, want)
    assert min(seen.values()) > 20


def test_what_numbers_alone_do_not_say_is_refused():
    """A gradient that nobody computes, and a sign that torch remembers beside the numbers."""
    x, w, out = draw(R, K), draw(E, N, K), torch.empty(R, N)
    with pytest.raises(ValueError, match="^lhs requires grad, must not; what is written into out"):
        product(x.requires_grad_(), [w], out)
    with pytest.raises(ValueError, match="^out requires grad, must not"):
        product(draw(R, K), [w], torch.nn.Parameter(out))
    with torch.no_grad():
        product(x, [w], out)
    assert torch.equal(out, cadre.grouped_gemm(x.detach(), w, OFFSETS))
    z, before = draw(R, 2 * N), draw(R, K)
    kept = before.clone()
    negated = torch.zeros(R, N, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="^h is a negated view, must be numbers as they lie"):
        OPS.activation.out(z, OFFSETS, None, "swiglu", h=negated)
    with pytest.raises(ValueError, match="^z is a negated view"):
        OPS.activation.out(torch._neg_view(z), OFFSETS, None, "swiglu", h=torch.empty(R, N))
    assert before.shape == kept.shape and torch.equal(before, kept)
