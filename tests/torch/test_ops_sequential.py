"""cadre.ops: operations, rows of them, and what is given to single ones."""

import inspect

import numpy as np
import pytest
import torch
from conftest import assert_close, draw, slices_of
from linear_reference import experts_of, fill, gradients

import cadre
from cadre.ops import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY, Sequential

E, H, F = 4, 32, 64
COUNTS, ROWS = [9, 0, 5, 7], 25
GATED = {
    "ScaledSwiGLU": {},
    "ScaledClampedQGeGLU": {"limit": 5.0, "alpha": 1.5, "glu_linear_offset": 0.5},
}


def row(device, activation=None, dtype=torch.float32, first=None, second=None, **both):
    """linear, activation, linear with numbers that do not depend on options."""
    activation = cadre.ops.ScaledSwiGLU() if activation is None else activation
    columns = 2 * F if activation.gated else F
    made = Sequential(
        cadre.ops.GroupedLinear(E, H, columns, device=device, dtype=dtype, **both, **(first or {})),
        activation,
        cadre.ops.GroupedLinear(E, F, H, device=device, dtype=dtype, **both, **(second or {})))
    fill(made[0])
    fill(made[2])
    return made


def inputs(device, dtype=torch.float32):
    return (draw(ROWS, H, dtype=dtype, device=device), torch.rand(ROWS, device=device),
            draw(ROWS, H, dtype=dtype, device=device), torch.tensor(COUNTS, device=device))


def learn(mlp, x, prob, dy, extra, **arguments):
    """(y, dx, dprob, gradients of the parameters)."""
    mlp.zero_grad()
    x, prob = x.detach().requires_grad_(), prob.detach().requires_grad_()
    y = mlp(x, *(prob if e is None else e for e in extra), **arguments)
    y.backward(dy)
    return [y.detach(), x.grad, prob.grad, *(p.grad for p in mlp.parameters())]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def names(mlp, *extra, **arguments):
    return [step.name for step in mlp.plan(*extra, **arguments)]


FUSED, UNFUSED = ["grouped_mlp"], ["grouped_linear", "activation", "grouped_linear"]


@pytest.mark.parametrize("interleave", [None, 1, 32])
@pytest.mark.parametrize("name", list(GATED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_as_one_have_the_same_bits(device, name, interleave, dtype):
    mlp = row(device, getattr(cadre.ops, name)(glu_interleave_size=interleave, **GATED[name]),
              dtype)
    x, prob, dy, counts = inputs(device, dtype)
    extra = (counts, None, counts)
    assert names(mlp, *extra) == FUSED
    other = (counts, None, counts.clone())
    assert names(mlp, *other) == UNFUSED
    fused, unfused = learn(mlp, x, prob, dy, extra), learn(mlp, x, prob, dy, other)
    assert_same(fused, unfused)
    assert fused[2].dtype == torch.float32 and torch.all(fused[0][21:] == 0)


def test_equals_plain_torch(device):
    mlp = row(device)
    x, prob, dy, counts = inputs(device)
    got = learn(mlp, x, prob, dy, (counts, None, counts))

    leaves = [t.detach().double().requires_grad_() for t in (x, prob)]
    w1, b1, w2, b2 = ([p.detach().double().requires_grad_() for p in experts_of(mlp[i], stem)]
                      for i in (0, 2) for stem in ("weight", "bias"))
    parts = []
    for e, rows in enumerate(slices_of(COUNTS)):
        gate, up = (leaves[0][rows] @ w1[e].t() + b1[e]).chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up * leaves[1][rows, None]
        parts.append(h @ w2[e].t() + b2[e])
    want = torch.cat([*parts, torch.zeros(4, H, dtype=torch.float64, device=device)])
    want.backward(dy.double())
    for g, w in zip(got[:3], (want, leaves[0].grad, leaves[1].grad)):
        assert_close(g, w, terms=300)
    for linear, stem, w in ((mlp[0], "weight", w1), (mlp[0], "bias", b1), (mlp[2], "weight", w2),
                            (mlp[2], "bias", b2)):
        assert_close(gradients(linear, stem), torch.stack([t.grad for t in w]), terms=300)


@pytest.mark.parametrize("activation", ["SReLU", "SwiGLU", "ClampedSwiGLU", "ScaledSReLU"])
def test_other_activations(device, activation):
    mlp = row(device, getattr(cadre.ops, activation)())
    x, prob, dy, counts = inputs(device)
    scaled = activation.startswith("Scaled")
    extra = (counts, None, counts) if scaled else (counts, counts)
    other = (*extra[:-1], counts.clone())
    assert names(mlp, *extra) == FUSED and names(mlp, *other) == UNFUSED
    got, want = learn_any(mlp, x, prob, dy, extra), learn_any(mlp, x, prob, dy, other)
    assert_same(got, want)


def learn_any(mlp, x, prob, dy, extra):
    mlp.zero_grad()
    x = x.detach().requires_grad_()
    y = mlp(x, *(prob if e is None else e for e in extra))
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in mlp.parameters())]


@pytest.mark.parametrize("packed", [True, False])
def test_scaled_second_bias(device, packed):
    mlp = row(device, second={"scale_bias": True}, single_grouped_weight=packed,
              single_grouped_bias=packed)
    x, prob, dy, counts = inputs(device)
    extra, other = (counts, None, counts, None), (counts, None, counts.clone(), None)
    assert names(mlp, *extra) == FUSED and names(mlp, *other) == UNFUSED
    assert_same(learn(mlp, x, prob, dy, extra), learn(mlp, x, prob, dy, other))


def test_probabilities_are_not_rounded(device):
    """A bf16 layer with fp32 probabilities; a gradient in fp32 comes back."""
    mlp = row(device, dtype=torch.bfloat16)
    x, prob, dy, counts = inputs(device, torch.bfloat16)
    near = prob * (1 + 2**-10)  # bf16 would not see the difference
    a, b = (learn(mlp, x, p, dy, (counts, None, counts)) for p in (prob, near))
    assert a[2].dtype == torch.float32
    h = [mlp[1](torch.ones(ROWS, 2 * F, device=device), p) for p in (prob, near)]
    assert not torch.equal(*h) and not torch.equal(a[1], b[1])


def test_why_three_are_not_one(device):
    counts = torch.tensor(COUNTS, device=device)
    prob, other = torch.rand(ROWS, device=device), counts.clone()
    buffer = {0: {GRAD_INPUT_BUFFER_KEY: torch.empty(ROWS, H, device=device)}}

    def why(mlp, *extra, **arguments):
        steps = mlp.plan(*extra, **arguments)
        assert [s.name for s in steps] == UNFUSED
        return steps[0].not_fused

    assert why(row(device), counts, prob, other) == "the linears are given different counts"
    assert why(row(device, accumulate_into_main_grad=True), counts, prob, counts) == (
        "a linear writes main_grad")
    assert why(row(device, delay_wgrad_compute=True), counts, prob, counts) == (
        "a linear delays its weight gradients")
    assert why(row(device, first={"scale_bias": True}), counts, prob, prob, counts) == (
        "the first linear scales its bias")
    assert why(row(device), counts, prob, counts, op_kwargs=buffer) == (
        "an operation has buffers of the caller")
    hooked, calls = row(device), []
    hooked[2].register_forward_pre_hook(lambda *_: calls.append("gather"))
    assert why(hooked, counts, prob, counts) == "an operation has hooks"
    hooked(torch.zeros(ROWS, H, device=device), counts, prob, counts)
    assert calls == ["gather"]
    with pytest.raises(RuntimeError, match="activation_recompute_in_mlp is True, must be False "
                       "here.*the linears are given different counts"):
        row(device, cadre.ops.ScaledSwiGLU(activation_recompute_in_mlp=True))(
            torch.zeros(ROWS, H, device=device), counts, prob, other)
    experts = Sequential(cadre.ops.GroupedLinear(E, H, F, device=device), cadre.ops.SReLU(),
                         cadre.ops.GroupedLinear(E + 1, 2 * F, H, device=device))
    assert why(experts, counts, counts) == (
        "the linears have different numbers of experts; "
        "the activation does not lead from one to the other")
    own = row(device)
    own[2].recipe = "mxfp8"
    assert why(own, counts, prob, counts) == "the linears have different recipes"
    own[0].recipe = "mxfp8"
    x = draw(ROWS, H, device=device)
    assert names(own, counts, prob, counts) == FUSED
    with cadre.autocast(recipe="mxfp8"):
        want = row(device)(x, counts, prob, counts)
    assert torch.equal(own(x, counts, prob, counts)[:sum(COUNTS)], want[:sum(COUNTS)])
    wider = Sequential(cadre.ops.GroupedLinear(E, H, F, device=device), cadre.ops.SReLU(),
                       cadre.ops.GroupedLinear(E, F, 2 * H, device=device))
    assert why(wider, counts, counts) == "the second linear leads to another width"
    assert wider(torch.zeros(ROWS, H, device=device), counts, counts).shape == (ROWS, 2 * H)


class Doubled(cadre.ops.GroupedLinear):
    def forward(self, *given, **named):
        return 2 * super().forward(*given, **named)


class Halved(cadre.ops.ScaledSwiGLU):
    def _compute(self, *given):
        return super()._compute(*given) / 2


@pytest.mark.parametrize("which", ["first", "activation", "second", "patched"])
def test_operations_that_are_not_what_their_class_was(device, which):
    made = row(device, Halved() if which == "activation" else None)
    if which == "patched":
        forward = made[0].forward
        made[0].forward = lambda *given, **named: 3 * forward(*given, **named)
    elif which != "activation":
        made[2 if which == "second" else 0].__class__ = Doubled
    x, prob, _, counts = inputs(device)
    assert made.plan(counts, prob, counts)[0].not_fused == "an operation has a forward of its own"
    one_by_one = made[2](made[1](made[0](x, counts), prob), counts)
    assert torch.equal(made(x, counts, prob, counts)[:sum(COUNTS)], one_by_one[:sum(COUNTS)])
    assert not torch.equal(made(x, counts, prob, counts), row(device)(x, counts, prob, counts))


class Half(torch.nn.Module):

    def forward(self, x):
        return x[:len(x) // 2]


@pytest.mark.parametrize("fused", [True, False])
def test_counts_that_serve_again_are_looked_at_again(fused):
    """Behind a module that leaves fewer rows."""
    def linear(k, n):
        return cadre.ops.GroupedLinear(2, k, n, device="cpu")

    made = cadre.ops.Sequential(linear(8, 8), Half(), linear(8, 16), cadre.ops.SwiGLU(),
                                linear(8, 8))
    counts = [2, 3]
    if not fused:
        made[3].register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match=r"^split_sizes is \[2, 3\], must be 0 or more each, and"):
        made(draw(5, 8), counts, counts, counts)


def test_hooks_of_all_modules_see_each_operation(device):
    mlp, seen = row(device), []
    x, prob, _, counts = inputs(device)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, result: seen.append(module))
    try:
        mlp(x, counts, prob, counts)
    finally:
        handle.remove()
    assert seen == [*mlp, mlp]


@pytest.mark.parametrize("targets", ["index", "negative", "module"])
def test_buffers_of_single_operations(device, targets):
    mlp = row(device)
    x, prob, dy, counts = inputs(device)
    want = learn(mlp, x, prob, dy, (counts, None, counts))
    out, dgrad = (torch.full((ROWS, H), 7.0, device=device) for _ in range(2))
    first, last = {"index": (0, 2), "negative": (-3, -1), "module": (mlp[0], mlp[2])}[targets]
    arguments = {last: {OUTPUT_BUFFER_KEY: out}, first: {GRAD_INPUT_BUFFER_KEY: dgrad}}
    got = learn(mlp, x, prob, dy, (counts, None, counts), op_kwargs=arguments)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == dgrad.data_ptr()
    assert torch.all(out[21:] == 7) and torch.all(dgrad[21:] == 7)
    for a, b in zip(got[:2], want[:2]):
        assert torch.equal(a[:21], b[:21])
    assert_same(got[2:], want[2:])


def test_main_grad_and_delay(device):
    """As Megatron-LM drives a row: backward, then backward_dw of the last and of the first."""
    x, prob, dy, counts = inputs(device)
    want = learn(row(device, single_grouped_weight=True), x, prob, dy, (counts, None, counts))
    mlp = row(device, single_grouped_weight=True, accumulate_into_main_grad=True,
              delay_wgrad_compute=True)
    for linear in (mlp[0], mlp[2]):
        linear.weight.main_grad = torch.zeros_like(linear.weight)
        assert linear.weight.skip_backward_post_hook
        assert not hasattr(linear.bias0, "skip_backward_post_hook")
    learn(mlp, x, prob, dy, (counts, None, counts))
    assert torch.all(mlp[2].weight.main_grad == 0)
    mlp[2].backward_dw()
    mlp[0].backward_dw()
    assert torch.equal(mlp[0].weight.main_grad, want[3 + E])
    assert torch.equal(mlp[2].weight.main_grad, want[3 + E + 1 + E])


def test_a_mixed_row(device):
    """Other modules run as they are; indices count them too."""
    mlp = Sequential(torch.nn.Linear(H, H, device=device), *row(device),
                     torch.nn.LayerNorm(H, device=device))
    x, prob, dy, counts = inputs(device)
    out = torch.zeros(ROWS, H, device=device)
    extra = (counts, prob, counts)
    assert names(mlp, *extra) == ["Linear", "grouped_mlp", "LayerNorm"]
    want = mlp[4](Sequential(*mlp[1:4])(mlp[0](x), *extra))
    assert torch.equal(mlp(x, *extra), want)
    assert torch.equal(mlp(x, *extra, op_kwargs={-2: {"output": out}}), want)
    assert torch.equal(mlp[4](out), want)


def test_indices_count_modules(device):
    """As the row itself counts them, whatever is no operation."""
    linears = [cadre.ops.GroupedLinear(E, H, H, device=device) for _ in range(3)]
    mixed = Sequential(linears[0], torch.nn.Identity(), linears[1], torch.nn.Identity(), linears[2])
    x, _, _, counts = inputs(device)
    extra, second = (counts,) * 3, linears[1](linears[0](x, counts), counts)
    for index in (2, -3):
        out = torch.full((ROWS, H), 7.0, device=device)
        y = mixed(x, *extra, op_kwargs={index: {OUTPUT_BUFFER_KEY: out}})
        assert torch.equal(out[:21], second[:21]) and torch.all(out[21:] == 7)
        assert torch.equal(y, linears[2](second, counts))
    with pytest.raises(ValueError, match="target is 1, an Identity, must be an operation of the "
                       "row or the index of one; it is in the row, but no operation"):
        mixed(x, *extra, op_kwargs={1: {OUTPUT_BUFFER_KEY: x}})
    with pytest.raises(ValueError, match="target is 5, must be an index from -5 to 4; the row has "
                       "5 modules"):
        mixed(x, *extra, op_kwargs={5: {OUTPUT_BUFFER_KEY: x}})


def test_leading_dimensions(device):
    mlp = row(device)
    x, prob, _, counts = inputs(device)
    want = mlp(x, counts, prob, counts)
    for other in (counts, counts.clone()):
        got = mlp(x.view(5, 5, H), counts, prob, other)
        assert torch.equal(got, want.view(5, 5, H))


def test_operations_by_themselves(device):
    mlp = row(device)
    x, prob, _, counts = inputs(device)
    z = mlp[0](x, COUNTS)
    h = mlp[1](z, prob)
    assert torch.equal(mlp[2](h, COUNTS), mlp(x, counts, prob, counts))
    assert h.shape == (ROWS, F)


@pytest.mark.parametrize(("arguments", "match"), [
    ({3: {}}, "target is 3, must be an index from -3 to 2; the row has 3 modules"),
    ({-4: {}}, "target is -4, must be"),
    ({True: {}}, "target is a bool, must be an operation of the row"),
    ({"0": {}}, "target is a str, must be an operation of the row or the index of one; it is not"),
    ({0: {"out": None}}, r"key of module 0 \(GroupedLinear\) is 'out', must be one that it "
     "takes: 'output', 'grad_input'"),
    ({1: {"output": None}}, r"key of module 1 \(ScaledSwiGLU\) is 'output', must be one that it "
     "takes: none"),
    ({0: {"output": None}, -3: {"output": None}}, "key 'output' of module 0 is given twice"),
])
def test_op_kwargs_that_are_refused(arguments, match):
    counts = torch.tensor(COUNTS)
    with pytest.raises(ValueError, match=match):
        row("cpu")(torch.zeros(ROWS, H), counts, torch.zeros(ROWS), counts, op_kwargs=arguments)


def test_targets_that_are_no_operation_of_the_row():
    norm = torch.nn.LayerNorm(H)
    mlp, counts = Sequential(*row("cpu"), norm), torch.tensor(COUNTS)
    call = (torch.zeros(ROWS, H), counts, torch.zeros(ROWS), counts)
    with pytest.raises(ValueError, match="a LayerNorm, must be .* in the row, but no operation"):
        mlp(*call, op_kwargs={norm: {}})
    with pytest.raises(ValueError, match="target is a SReLU, must be .*; it is not"):
        mlp(*call, op_kwargs={cadre.ops.SReLU(): {}})


def test_wrong_inputs():
    mlp, counts, x = row("cpu"), torch.tensor(COUNTS), torch.zeros(ROWS, H)
    with pytest.raises(ValueError, match="2 extra inputs are given, must be 3; the operations "
                       "take GroupedLinear 1, ScaledSwiGLU 1, GroupedLinear 1"):
        mlp(x, counts, counts)
    with pytest.raises(ValueError, match=r"input has shape \[25, 31\], must be \[..., 32\]"):
        mlp(x[:, 1:], counts, torch.zeros(ROWS), counts)
    with pytest.raises(ValueError, match="scales is missing, must be given"):
        cadre.ops.ScaledSwiGLU()(x)
    with pytest.raises(ValueError, match="scales is given, must be left out"):
        cadre.ops.SwiGLU()(x, torch.zeros(ROWS))
    with pytest.raises(NotImplementedError, match="glu_interleave_size is 16, must be None, 1 or"):
        cadre.ops.SwiGLU(16)
    with pytest.raises(TypeError, match="dtype is torch.float64, must be torch.float32"):
        cadre.ops.GroupedLinear(E, H, F, dtype=torch.float64)
    with pytest.raises(ValueError, match="num_groups is 0"):
        cadre.ops.GroupedLinear(0, H, F)


def test_constructors_say_what_they_take():
    for name in ("SwiGLU", "ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSReLU"):
        parameters = inspect.signature(getattr(cadre.ops, name)).parameters
        assert "activation_recompute_in_mlp" in parameters
    parameters = inspect.signature(cadre.ops.GroupedLinear).parameters
    assert list(parameters)[:3] == ["num_groups", "in_features", "out_features"]
    assert {"scale_bias", "accumulate_into_main_grad", "single_grouped_weight",
            "delay_wgrad_compute"} <= set(parameters)
    assert isinstance(cadre.ops.GroupedLinear(E, H, F, device="cpu"), cadre.GroupedLinear)


@pytest.mark.parametrize(("make", "error", "match"), [
    (lambda: cadre.ops.ClampedSwiGLU(-1.0), ValueError, "limit is -1, must be above 0 and finite$"),
    (lambda: cadre.ops.ClampedSwiGLU(float("nan")), ValueError, "limit is 'nan', must be finite$"),
    (lambda: cadre.ops.ClampedSwiGLU("7"), TypeError, "^limit is a str, must be a number"),
    (lambda: cadre.ops.ScaledClampedQGeGLU(glu_linear_offset=None), TypeError,
     "^glu_linear_offset is a NoneType, must be a number"),
    (lambda: cadre.ops.Activation("clamped_swiglu limit=x"), ValueError, "limit is 'x', must be a"),
    (lambda: cadre.ops.SwiGLU(True), NotImplementedError, "glu_interleave_size is True, must be"),
    (lambda: cadre.ops.SwiGLU([]), NotImplementedError, r"glu_interleave_size is \[\], must be"),
    (lambda: cadre.ops.SReLU()(np.ones((4, 8))), TypeError, "^z is a ndarray, must be a tensor"),
    (lambda: cadre.ops.SReLU()(torch.tensor(1.0)), ValueError, r"^z has shape \[\], must be \[..."),
    (lambda: cadre.ops.SReLU()(torch.ones(4, 8), offsets=torch.tensor([0, 4])), TypeError,
     "^offsets is a Tensor, must be cadre.Offsets or None"),
    (lambda: cadre.ops.ScaledSReLU()(torch.ones(4, 8), 0.5), TypeError,
     "^scales is a float, must be a tensor"),
    (lambda: row("cpu")(np.ones((ROWS, H)), COUNTS, torch.ones(ROWS), COUNTS), TypeError,
     "^input is a ndarray, must be a tensor"),
    (lambda: row("cpu").plan(COUNTS, None, COUNTS, op_kwargs=[1]), TypeError,
     "^op_kwargs is or has a list, must be dicts"),
    (lambda: row("cpu").plan(COUNTS, None, COUNTS, op_kwargs={0: torch.ones(1)}), TypeError,
     "^op_kwargs is or has a Tensor, must be dicts"),
    (lambda: row("cpu").plan(COUNTS, None, COUNTS, op_kwargs={0: {"output": [1]}}), TypeError,
     "^op_kwargs: 'output' of module 0 is a list, must be a tensor"),
])
def test_uses_that_are_refused(make, error, match):
    """Words and numbers of an activation when it is made, not when it is called."""
    with pytest.raises(error, match=match):
        make()


def test_numbers_of_numpy():
    activation = cadre.ops.ClampedSwiGLU(np.float32(5.0), np.int64(2))
    assert activation.activation == "clamped_swiglu limit=5.0 alpha=2.0 offset=1.0"
