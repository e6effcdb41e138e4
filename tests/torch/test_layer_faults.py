"""What the layers refuse because the library would read or write beside it: gaps that it does not
know of, lists and arrays of another length, words that say nothing."""

import copy
import itertools

import pytest
import torch
from conftest import deferred_dw, draw, offsets_of
from torch._subclasses.fake_tensor import FakeTensorMode

import cadre

OPS = torch.ops.cadre
E, N, K, R = 2, 4, 8, 5
OFFSETS = offsets_of([2, 3], "cpu")


def sliced(*shape):
    """A tensor with gaps between its rows."""
    return draw(*shape[:-1], 2 * shape[-1])[..., :shape[-1]]


def empty():
    return torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("weight", [[sliced(N, K), sliced(N, K)], [draw(1, K).expand(N, K)] * 2,
                                    [draw(N, 2 * K)[:, ::2]] * 2])
def test_discrete_weights_with_gaps(weight):
    with pytest.raises(ValueError, match="weight of an expert .* must lie without gaps"):
        OPS.grouped_linear(draw(R, K), OFFSETS, weight, [])


def test_discrete_biases_with_gaps():
    with pytest.raises(ValueError, match="bias of an expert .* must lie without gaps"):
        OPS.grouped_linear(draw(R, K), OFFSETS, [draw(N, K)] * 2, [draw(2 * N)[::2]] * 2)


@pytest.mark.parametrize("kind", ["GroupedLinear", "GroupedMLP"])
def test_packed_biases_with_gaps(kind):
    """They have gradients, which lie without."""
    options = dict(single_grouped_bias=True) if kind == "GroupedLinear" else dict(bias=True)
    layer = getattr(cadre, kind)(E, K, N, device="cpu", **options)
    want = copy.deepcopy(layer)
    x = draw(R, K)
    for name, p in list(layer.named_parameters()):
        if "bias" in name:
            gaps = torch.cat([p.detach(), p.detach()], 1)[:, :p.shape[1]]
            layer.register_parameter(name, torch.nn.Parameter(gaps))
    for one in (layer, want):
        one(x, [2, 3]).square().sum().backward()
    assert all(map(torch.equal, (p.grad for p in layer.parameters()),
                   (p.grad for p in want.parameters())))


def wgrad(dweight, weight=None, **options):
    OPS.grouped_linear_wgrad.out(draw(R, N), draw(R, K), empty(), empty(), OFFSETS,
                                 weight or [draw(N, K)] * 2, dweight=dweight, **options)


def test_gradients_of_weights():
    with pytest.raises(ValueError, match="dweight of an expert .* must lie without gaps"):
        wgrad([sliced(N, K), sliced(N, K)])
    with pytest.raises(ValueError, match="dweight has strides .* must lie as its weight"):
        wgrad([draw(N, K), draw(N, K)], [draw(K, N).t()] * 2)
    with pytest.raises(ValueError, match=r"accumulate_flags has shape \[1\], must be \[2\]"):
        wgrad([draw(N, K), draw(N, K)], accumulate="per_expert",
              accumulate_flags=torch.ones(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="accumulate_flags is given, must be None; accumulate is"):
        wgrad([draw(N, K), draw(N, K)], accumulate="yes",
              accumulate_flags=torch.ones(2, dtype=torch.int32))


@pytest.mark.parametrize("given, message", [
    (dict(dbias=[draw(1), draw(1)]), r"dbias is torch.float32\[1\] .* must be as its parameter"),
    (dict(dbias=[draw(N).bfloat16(), draw(N).bfloat16()]), "dbias is torch.bf.*must be torch."),
    (dict(dbias=[draw(N)]), "dbias has 1 tensors, must have 2"),
    (dict(dbias_scale=draw(1)), r"dbias_scale has shape \[1\], must be \[5\]"),
])
def test_gradients_of_biases(given, message):
    buffers = dict(dx=draw(R, K), dbias=[draw(N), draw(N)], dbias_scale=draw(R)) | given
    with pytest.raises(TypeError if "must be torch." in message else ValueError, match=message):
        OPS.grouped_linear_backward.out(draw(R, N), draw(R, K), empty(), OFFSETS, [draw(N, K)] * 2,
                                        [draw(N)] * 2, draw(R), pending=empty(), **buffers)


def test_factors_of_rows_have_one_dimension():
    with pytest.raises(ValueError, match=r"bias_scale has shape \[5, 1\], must be \[5\]"):
        OPS.grouped_linear(draw(R, K), OFFSETS, [draw(N, K)] * 2, [draw(N)] * 2, draw(R, 1))
    with pytest.raises(ValueError, match=r"prob has shape \[5, 1\], must be \[5\]"):
        OPS.grouped_mlp(draw(R, K), OFFSETS, draw(R, 1), [draw(E, 2 * N, K)], [],
                        [draw(E, K, N)], [])


def test_biases_of_another_width():
    def mlp(bias1, bias2):
        OPS.grouped_mlp(draw(R, K), OFFSETS, None, [draw(2 * N, K)] * 2, bias1, [draw(K, N)] * 2,
                        bias2)

    with pytest.raises(ValueError, match=r"bias1 has shape \[1\], must end in 8"):
        mlp([draw(1)] * 2, [draw(K)] * 2)
    with pytest.raises(ValueError, match=r"bias2 has shape \[2\], must end in 8"):
        mlp([draw(2 * N)] * 2, [draw(2)] * 2)


def mlp_parts():
    w1, b1, w2, b2 = [draw(E, 2 * N, K)], [draw(E, 2 * N)], [draw(E, K, N)], [draw(E, K)]
    x, prob = draw(R, K), torch.rand(R)
    _, saved = OPS.grouped_mlp(x, OFFSETS, prob, w1, b1, w2, b2, prob, wants=(True,) * 6)
    return (draw(R, K), x, saved, OFFSETS, prob, w1, b1, w2, b2, prob)


@pytest.mark.parametrize("given, message", [
    (dict(dprob=draw(1)), r"dprob has shape \[1\], must be \[5\]"),
    (dict(dbias2_scale=draw(1)), r"dbias2_scale has shape \[1\], must be \[5\]"),
    (dict(dbias1=[draw(E, K)[:, :1]]), "dbias1 is torch.float32"),
])
def test_gradients_of_an_mlp(given, message):
    args = mlp_parts()
    *_, pending = OPS.grouped_mlp_backward(*args, deferred=True)
    buffers = dict(dx=draw(R, K), dprob=draw(R), dbias1=[draw(E, 2 * N)], dbias2=[draw(E, K)],
                   dbias2_scale=draw(R)) | given
    with pytest.raises(ValueError, match=message):
        OPS.grouped_mlp_backward.out(*args, pending=pending, **buffers)


def test_a_frozen_expert_beside_one_with_fp32_main_grad():
    layer = cadre.GroupedLinear(2, K, N, bias=False, fuse_wgrad_accumulation=True,
                                params_dtype=torch.bfloat16, device="cpu")
    layer.weight0.main_grad = torch.zeros(N, K)
    layer.weight1.requires_grad_(False)
    layer(draw(R, K, dtype=torch.bfloat16), [2, 3]).sum().backward()
    assert layer.weight0.main_grad.abs().max() > 0


def test_main_grad_that_is_elsewhere():
    layer = cadre.GroupedLinear(2, K, N, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape, device="meta")
    with pytest.raises(ValueError, match="main_grad is on meta, must be on cpu"):
        layer(draw(R, K), [2, 3]).sum().backward()


def test_nothing_is_written_where_main_grad_is_missing():
    layer = cadre.GroupedLinear(2, K, N, fuse_wgrad_accumulation=True, device="cpu")
    x, buffer = draw(R, K, grad=True), torch.full((R, K), 7.0)
    with pytest.raises(RuntimeError, match="main_grad of a weight .* is missing"):
        layer(x, [2, 3], dgrad_out=buffer).sum().backward()
    assert (buffer == 7).all()


def test_an_input_that_changed_while_its_gradient_was_pending():
    layer = cadre.GroupedLinear(2, K, N, delay_wgrad_compute=True, device="cpu")
    x = draw(R, K)
    layer(x, [2, 3]).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="version of x is 1, must be 0"):
        layer.backward_dw()


def test_a_buffer_that_is_the_gradient_already():
    layer = cadre.GroupedLinear(2, K, N, device="cpu")
    x, buffer = draw(R, K, grad=True), draw(R, K)
    layer(x, [2, 3], dgrad_out=buffer).sum().backward()
    y = layer(x, [2, 3], dgrad_out=buffer)
    if x.grad.data_ptr() == buffer.data_ptr():
        with pytest.raises(RuntimeError, match="dgrad_out is x.grad since an earlier backward"):
            y.sum().backward()
        x.grad = None
    layer(x, [2, 3], dgrad_out=buffer).sum().backward()


def test_a_row_of_linears_that_differ_is_not_fused():
    row = cadre.ops.Sequential(
        cadre.ops.GroupedLinear(2, K, 2 * N, device="cpu", single_grouped_weight=True),
        cadre.ops.SwiGLU(), cadre.ops.GroupedLinear(2, N, K, device="cpu"))
    counts = torch.tensor([2, 3])
    assert row(draw(R, K), counts, counts).abs().max() > 0


def test_second_derivatives_of_operations():
    z = draw(R, 2 * N, grad=True)
    dz, = torch.autograd.grad(cadre.activation(z, OFFSETS).square().sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="activation_backward is not implemented"):
        dz.sum().backward()


@pytest.mark.parametrize("shape", [(1, K), (N, 1)])
def test_weights_of_one_row_or_column_lie_in_either_order(shape):
    n, k = shape
    dy, x, w = draw(R, n), draw(R, k), draw(E, k, n).transpose(1, 2)
    (dw,), = deferred_dw("grouped_linear", dy, x, empty(), empty(), OFFSETS, [w])
    into = torch.full((E, n, k), float("nan"))
    OPS.grouped_linear_wgrad.out(dy, x, empty(), empty(), OFFSETS, [w], dweight=[into])
    assert torch.equal(into, dw) and into.abs().max() > 0


def test_gradients_of_an_mlp_that_lie_otherwise():
    w1, w2 = [draw(E, 2 * N, K)], [draw(E, K, N)]
    args = (draw(R, K), draw(R, K), empty(), empty(), OFFSETS, None, w1, w2)
    biases = dict(biases=(False, False))
    with pytest.raises(ValueError, match="dweight1 has strides .* must lie as its weight"):
        OPS.grouped_mlp_wgrad.out(*args, **biases, dweight1=[draw(E, K, 2 * N).transpose(1, 2)],
                                  dweight2=[draw(E, K, N)])
    with pytest.raises(ValueError, match=r"dweight2 has shape \[2, 8, 5\], must end in \[8, 4\]"):
        OPS.grouped_mlp_wgrad.out(*args, **biases, dweight1=[draw(E, 2 * N, K)],
                                  dweight2=[draw(E, K, N + 1)])


def lying(shape, strides, begin):
    """A tensor of numbers with these strides, behind `begin` others."""
    length = begin + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    return draw(length).as_strided(shape, strides, begin)


@pytest.mark.parametrize("e, n, k", list(itertools.product((1, 3), (1, 4), (1, 4))))
def test_weights_that_lie_in_any_way(e, n, k):
    """A product takes them all, a layer takes them or refuses them by their strides; what one takes
    in place has one order and one alignment for both."""
    x, counts = draw(6, k), [6] if e == 1 else [2, 1, 3]
    offsets = offsets_of(counts, "cpu")
    taken = 0
    for strides in ((n * k, k, 1), (n * k, 1, n), (n * (k + 3), k + 3, 1), (k * (n + 3), 1, n + 3),
                    (2 * n * k, 2 * k, 2), (0, k, 1), (k, e * k, 1), (1, e * k, e), (n * k, 0, 1)):
        w = lying((e, n, k), strides, begin=len(strides) % 2)
        want = torch.cat([rows @ one.t() for rows, one in zip(x.split(counts), w)])
        for weight in ([w], list(w.unbind())):
            torch.testing.assert_close(OPS.grouped_gemm(x, weight, offsets, "fprop"), want)
            try:
                y, *_ = OPS.grouped_linear(x, offsets, weight, [])
            except ValueError as error:
                assert "strides" in str(error)
                continue
            torch.testing.assert_close(y, want)
            taken += 1
    assert taken >= 4


def forms_of_experts():
    """What takes a list of experts: a name, and a function of [N, K] tensors of two experts."""
    x, dy = draw(R, K), draw(R, N)
    w2, logits = list(draw(E, K, N // 2)), draw(R, E)
    none = torch.empty(0, dtype=torch.uint8)
    yield "rhs", lambda w: cadre.grouped_gemm(x, w, OFFSETS)
    yield "rhs", lambda w: cadre.grouped_gemm(dy, w, OFFSETS, "dgrad")
    yield "out", lambda w: OPS.grouped_gemm.out(dy, [x], OFFSETS, "wgrad", out=w)
    yield "weight", lambda w: OPS.grouped_linear(x, OFFSETS, w, [])
    yield "weight1", lambda w: OPS.grouped_mlp(x, OFFSETS, None, w, [], w2, [])
    yield "weight1", lambda w: OPS.moe(x, logits, 1, None, w, [], w2, [])
    yield "dweight", lambda w: OPS.grouped_linear_wgrad.out(
        dy, x, none, none, OFFSETS, [torch.stack(w)], dweight=w)


@pytest.mark.parametrize("at", range(len(list(forms_of_experts()))))
def test_experts_that_lie_otherwise(at):
    """Products and layers refuse them in the same words, and copy nothing."""
    name, call = list(forms_of_experts())[at]
    w = list(draw(E, N, K))
    call(w)
    w[1] = w[1].t().contiguous().t()
    with pytest.raises(ValueError, match=(
            rf"^{name} of an expert is torch.float32\[{N}, {K}\] with strides \[1, {N}\] on cpu, "
            rf"must be as that of the first: torch.float32\[{N}, {K}\] with strides \[{K}, 1\] on "
            r"cpu; contiguous\(\) makes both lie alike$")):
        call(w)


@pytest.mark.parametrize("shape", [(1, K), (N, 1)])
def test_strides_of_one_element_mean_nothing(shape):
    """Experts of one row, or of one column, lie alike whatever its stride is."""
    n, k = shape
    x, w = draw(R, k), draw(E, n, k)
    other = w[1].as_strided(shape, (k + 3, 1) if n == 1 else (1, 5), w[1].storage_offset())
    assert torch.equal(other, w[1]) and other.stride() != w[0].stride()
    want = OPS.grouped_linear(x, OFFSETS, [w], [])[0]
    assert torch.equal(OPS.grouped_linear(x, OFFSETS, [w[0], other], [])[0], want)
    assert torch.equal(cadre.grouped_gemm(x, [w[0], other], OFFSETS), want)


def test_a_single_row_promises_the_step_that_the_library_is_told():
    """TMA takes the stride of a dimension of one element, too: 24 bytes are no multiple of 16."""
    x, columns = draw(1, 12, dtype=torch.bfloat16), draw(E, 12, 16, dtype=torch.bfloat16)
    refused = columns[..., :8].transpose(1, 2)  # whose own strides are
    with pytest.raises(ValueError, match="weight_major=column .*align=8]"):
        OPS.grouped_linear(x, offsets_of([1, 0], "cpu"), [refused], [])


def test_a_layer_among_fake_tensors_is_looked_at_as_any():
    """Nor is what they say of it remembered."""
    with FakeTensorMode(), pytest.raises(ValueError, match="limit is -1, must be above 0"):
        cadre.GroupedMLP(2, 8, 8, device="cpu", activation="clamped_swiglu limit=-1")


@pytest.mark.parametrize("layer, rows", [("grouped_mlp", "R"), ("moe", "T")])
def test_a_problem_that_has_no_plan_is_told_with_its_rows(layer, rows):
    """Memory is planned once for any number of rows, which fake tensors alone may not have yet."""
    options = dict(device="cpu", dtype=torch.bfloat16, recipe="nvfp4,wgrad=nvfp4*nvfp4:sr")
    x = draw(R, 16, dtype=torch.bfloat16)
    made = (cadre.GroupedMLP(E, 16, 8, **options) if layer == "grouped_mlp" else
            cadre.MoE(E, 16, 8, top_k=2, **options))
    given = [[2, 3]] if layer == "grouped_mlp" else []
    words = rf"^{layer}: keep_h is no, must be yes; h is rounded .* \[{layer} {rows}="
    with pytest.raises(ValueError, match=rf"{words}{R} .*\]$"):
        made(x, *given)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=(
            rf"{words}0 .*\]; 0 rows or tokens stand for any number of them$")):
        made(x, *given)


@pytest.mark.parametrize("dim", [2, 3])
def test_results_of_tokens_in_two_dimensions_are_no_views(dim):
    x = torch.randn([1, 6, 16][-dim:]).requires_grad_()
    y = cadre.GroupedMLP(2, 16, 8, device="cpu")(x, [2, 4])
    out = cadre.MoE(4, 16, 8, top_k=2, device="cpu")(x)[0]
    assert [t._is_view() for t in (y, out)] == [dim == 3] * 2 and y.shape == out.shape == x.shape
