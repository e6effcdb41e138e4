"""Operations of the caller's own in a row of cadre.ops: what they are given, and what becomes of
rows."""

import pytest
import torch
from conftest import draw

import cadre
from cadre import ops

COUNTS = [2, 3]


def linear(columns, features, **options):
    return ops.GroupedLinear(2, columns, features, device="cpu", **options)


class Twice(ops.Operation):
    """More rows than it was given."""

    def forward(self, x):
        return torch.cat([x, x])


class Unpermute(ops.Operation):
    """Rows in token order again, fewer than it was given."""

    num_extra_inputs = 1

    def forward(self, rows, where):
        return cadre.combine(rows, where)


class Flipped(ops.Identity):
    """A subclass of an operation that keeps its rows."""

    def forward(self, input):
        return input.flip(0)


def test_rows_of_others_are_all_live():
    x = draw(7, 4)  # two of the tail
    first = linear(4, 8)
    z = first(x, COUNTS)
    for between, made in ((Twice(), torch.cat([z, z])), (Flipped(), z.flip(0)),
                          (torch.nn.Identity(), z)):
        want = ops.SwiGLU()(made)
        assert torch.equal(ops.Sequential(first, between, ops.SwiGLU())(x, COUNTS), want)
    between = ops.Identity()
    between.forward = lambda input: input.flip(0)
    assert torch.equal(ops.Sequential(first, between, ops.SwiGLU())(x, COUNTS),
                       ops.SwiGLU()(z.flip(0)))


def test_rows_of_operations_here_are_those_of_the_linear():
    """Classes that FSDP2 and parametrizations put in the place of theirs too."""
    x, first = draw(7, 4), linear(4, 8)
    parametrized = ops.Bias(4, device="cpu")
    torch.nn.init.ones_(parametrized.bias)
    torch.nn.utils.parametrize.register_parametrization(parametrized, "bias", torch.nn.Identity())
    for between in (ops.GLU(), ops.QGELU(), ops.SReLU(), ops.SwiGLU()):
        width = 4 if between.gated else 8
        bias = ops.Bias(width, device="cpu")
        torch.nn.init.ones_(bias.bias)
        for added in [bias] + [parametrized] * between.gated:
            y = ops.Sequential(first, between, added, ops.SiLU())(x, COUNTS)
            assert y[:5].all() and not y[5:].any()


def test_rows_go_back_to_tokens():
    where = cadre.offsets_of_routing(torch.tensor([[0, 1], [1, 0], [1, -1]]), 2, 6)
    rows, _ = cadre.permute(draw(3, 8), where)
    first = linear(8, 8)
    got = ops.Sequential(first, Unpermute(), ops.SiLU())(rows, where, where)
    assert torch.equal(got, ops.SiLU()(cadre.combine(first(rows, where), where)))


class Plain(ops.SwiGLU):

    def forward(self, z):
        return super().forward(z) * 2


class Knowing(ops.SwiGLU):

    def forward(self, z, *, offsets=None):
        assert isinstance(offsets, cadre.Offsets)
        return super().forward(z, offsets=offsets) * 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Plain, Knowing])
def test_an_activation_with_a_forward_of_its_own(kind, compiled):
    x, first, second = draw(5, 8), linear(8, 16), linear(8, 8)
    row = ops.Sequential(first, kind(), second)
    run = torch.compile(row, backend="aot_eager", fullgraph=True) if compiled else row
    want = second(ops.SwiGLU()(first(x, COUNTS)) * 2, COUNTS)
    assert torch.equal(run(x, COUNTS, COUNTS), want)
    patched = ops.SwiGLU()
    patched.forward = lambda z: z[:, :8] * 3
    assert torch.equal(ops.Sequential(first, patched)(x, COUNTS), first(x, COUNTS)[:, :8] * 3)


def test_a_linear_with_a_forward_of_its_own_has_the_counts_of_the_caller():

    class Counting(ops.GroupedLinear):

        def forward(self, input, split_sizes):
            assert sum(split_sizes) == 5
            return super().forward(input, split_sizes) * 2

    class Doubling(ops.GroupedLinear):

        def forward(self, input, split_sizes):
            return super().forward(torch.cat([input, input]), split_sizes)

    x, own = draw(5, 8), Doubling(2, 8, 8, device="cpu")
    assert torch.equal(ops.Sequential(own, ops.SiLU())(x, [4, 6]), ops.SiLU()(own(x, [4, 6])))
    own = Counting(2, 8, 8, device="cpu")
    assert torch.equal(ops.Sequential(own, ops.SiLU())(x, COUNTS),
                       ops.SiLU()(own(x, COUNTS)))


class One(ops.Operation):
    num_extra_outputs = 1

    def forward(self, x):
        return x


class Three(One):

    def forward(self, x):
        return x, x, x


class Few(Three):
    num_extra_outputs = 3


@pytest.mark.parametrize("op, found, wanted", [(One(), "a Tensor", 2), (Three(), 3, 2),
                                               (Few(), 3, 4)])
def test_extra_outputs_are_as_many_as_said(op, found, wanted):
    op.set_extra_output_channel(0, "name")
    with pytest.raises(ValueError) as error:
        ops.Sequential(op, ops.SwiGLU())(draw(6, 8))
    says = f" tensors; num_extra_outputs is {wanted - 1}"
    assert str(error.value) == (
        f"forward of {type(op).__name__} returned {found}, must return {wanted}{says}")


def test_outputs_made_in_place_are_compiled():
    row = ops.Sequential(ops.MakeExtraOutput(in_place=True), ops.MakeExtraOutput(in_place=True))
    results = []
    for run in (row, torch.compile(row, backend="aot_eager", fullgraph=True)):
        x = draw(6, 8).requires_grad_()
        y, one, two = run(x)
        (y * 2 + one * 3 + two * 5).sum().backward()
        results.append(x.grad)
    assert torch.equal(*results) and (results[0] == 10).all()


def test_scales_of_any_strides_serve_fused_rows():
    x, p = draw(5, 8), torch.rand(5, 2)[:, 0]
    first, second = linear(8, 16), linear(8, 8)
    fused = ops.Sequential(first, ops.ScaledSwiGLU(), second)
    apart = ops.Sequential(first, ops.ScaledSwiGLU(), ops.Identity(), second)
    given = COUNTS, p, COUNTS
    assert [s.name for s in fused.plan(*given)] == ["grouped_mlp"]
    assert torch.equal(fused(x, *given), apart(x, *given))
    scaled = linear(8, 8, scale_bias=True)
    assert torch.equal(ops.Sequential(scaled)(x, COUNTS, p), scaled(x, COUNTS, p.contiguous()))
