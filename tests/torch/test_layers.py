"""torch.ops.cadre.grouped_linear and grouped_mlp: all directions against a row of plain products,
on adversarial counts; what a compiler, autocast and a caller with buffers of his own rely on."""

import pytest
import torch
import torch.nn.functional as F
from conftest import (assert_close, assert_outputs_lie_apart, assert_seen, assert_types_are_told,
                      assert_versions_grow, deferred_dw, draw, experts_of_rows, offsets_of,
                      poisoned, slices_of)
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import cadre  # noqa: F401  registers the operators

OPS = torch.ops.cadre
E, N, K = 5, 24, 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def opcheck_out(op, args, kwargs):
    opcheck(op, args, kwargs)
    assert_versions_grow(op, args, kwargs)
    assert_outputs_lie_apart(op, args, kwargs)
    assert_types_are_told(op, args, kwargs)


def parameters(shape, dtype, device, packed, grad=True):
    """One tensor [E, ...], or E of them."""
    if packed:
        return [draw(E, *shape, dtype=dtype, device=device, grad=grad)]
    return [draw(*shape, dtype=dtype, device=device, grad=grad) for _ in range(E)]


def stacked(tensors):
    """[E, ...] in fp64, differentiable."""
    return (tensors[0] if len(tensors) == 1 else torch.stack(tensors)).double()


def linear(x, counts, weight, bias=None, bias_scale=None):
    """In fp64, tail zero."""
    w = stacked(weight)
    rows = [x.double()[part] @ w[e].t() for e, part in enumerate(slices_of(counts))]
    live = torch.cat(rows)
    if bias:
        added = stacked(bias)[experts_of_rows(counts, x.device)]
        if bias_scale is not None:
            added = added * bias_scale.double()[:len(live), None]
        live = live + added
    return F.pad(live, (0, 0, 0, len(x) - len(live)))


def compare(got, want, inputs, *, terms):
    """Outputs, and gradients of all inputs for one random gradient of the output."""
    dtype = got.dtype
    assert_close(got, want, terms=terms)
    dout = draw(*got.shape, dtype=dtype, device=got.device)
    wanted = torch.autograd.grad(want, inputs, dout.double())
    for g, w in zip(torch.autograd.grad(got, inputs, dout), wanted):
        assert_close(g, w, steps=1 if g.dtype == torch.float32 else 4, terms=8 * terms)


class TestLinear:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("packed", [True, False])
    def test_all_directions(self, device, case, dtype, packed):
        counts, rows = case
        x = draw(rows, K, dtype=dtype, device=device, grad=True)
        w = parameters((N, K), dtype, device, packed)
        b = parameters((N,), dtype, device, not packed)
        scale = torch.rand(rows).to(device).requires_grad_()
        offsets = offsets_of(counts, device)
        y, _ = OPS.grouped_linear(x, offsets, w, b, scale)
        if sum(counts):
            assert_seen(y)
        compare(y, linear(x, counts, w, b, scale), [x, *w, *b, scale], terms=K)

    def test_transposed_weights_are_read_where_they_lie(self, device):
        counts = [3, 8, 1, 6, 2]
        x = draw(20, K, device=device, grad=True)
        stored = draw(E, K, N, device=device, grad=True)
        y, _ = OPS.grouped_linear(x, offsets_of(counts, device), [stored.transpose(1, 2)], [])
        compare(y, linear(x, counts, [stored.transpose(1, 2)]), [x, stored], terms=K)

    def test_unaligned_and_odd(self, device):
        counts, k, n = [3, 8, 1, 6, 2], 13, 7
        for dtype in DTYPES:
            x = draw(20 * k + 1, dtype=dtype, device=device)[1:].view(20, k).requires_grad_()
            w = draw(E * n * k + 1, dtype=dtype, device=device)[1:].view(E, n, k).requires_grad_()
            y, _ = OPS.grouped_linear(x, offsets_of(counts, device), [w], [])
            compare(y, linear(x, counts, [w]), [x, w], terms=k)

    def test_one_row_of_a_wider_tensor(self, device):
        x = draw(1, K + 3, dtype=torch.bfloat16, device=device)[:, :K].requires_grad_()
        w = draw(1, N, K, dtype=torch.bfloat16, device=device, grad=True)
        y, _ = OPS.grouped_linear(x, offsets_of([1], device), [w], [])
        compare(y, linear(x, [1], [w]), [x, w], terms=K)

    def test_gradients_that_autograd_expands(self, device):
        counts = [3, 8, 1, 6, 2]
        x = draw(20, K, device=device, grad=True)
        w = parameters((N, K), torch.float32, device, True)
        y, _ = OPS.grouped_linear(x, offsets_of(counts, device), w, [])
        y.sum().backward()
        want = torch.autograd.grad(linear(x, counts, w).sum(), [x, *w])
        assert_close(x.grad, want[0], terms=N)
        assert_close(w[0].grad, want[1], terms=20)

    def test_frozen_tensors_get_no_gradient_and_keep_nothing(self, device):
        counts = [3, 8, 1, 6, 2]
        offsets = offsets_of(counts, device)
        x = draw(20, K, device=device, grad=True)
        w = draw(E, N, K, device=device)
        OPS.grouped_linear(x, offsets, [w], [])[0].sum().backward()
        assert_seen(x.grad)
        assert w.grad is None
        x.grad, frozen = None, x.detach()
        w.requires_grad_()
        OPS.grouped_linear(frozen, offsets, [w], [])[0].sum().backward()
        assert_seen(w.grad)
        assert x.grad is None

    def test_an_expert_without_rows_has_a_gradient_of_zero(self, device):
        w = parameters((N, K), torch.float32, device, False)
        x = draw(9, K, device=device)
        OPS.grouped_linear(x, offsets_of([9, 0, 0, 0, 0], device), w, [])[0].sum().backward()
        assert_seen(w[0].grad)
        assert all(one.grad.abs().max() == 0 for one in w[1:])

    @pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "nvfp4", "mxfp8,wgrad=bf16"])
    def test_recipes(self, recipe):
        counts, dtype = [33, 0, 61, 2, 9], torch.bfloat16
        x = draw(110, 64, dtype=dtype, grad=True)
        w = [draw(E, 48, 64, dtype=dtype, grad=True)]
        y, _ = OPS.grouped_linear(x, offsets_of(counts, "cpu"), w, [], recipe=recipe)
        want = linear(x, counts, w)
        assert (y.double() - want).norm() < 0.2 * want.norm()
        dy = draw(110, 48, dtype=dtype)
        wanted = torch.autograd.grad(want, [x, *w], dy.double())
        for g, g64 in zip(torch.autograd.grad(y, [x, *w], dy), wanted):
            assert_seen(g)
            assert (g.double() - g64).norm() < 0.25 * g64.norm()

    @pytest.mark.parametrize("recipe", ["", "mxfp8"])
    def test_deferred_wgrad_equals_immediate(self, device, recipe):
        counts, dtype = [3, 8, 0, 6, 2], torch.bfloat16
        offsets = offsets_of(counts, device)
        x, dy = (draw(22, c, dtype=dtype, device=device) for c in (K, N))
        w = [draw(E, N, K, dtype=dtype, device=device)]
        _, saved = OPS.grouped_linear(x, offsets, w, [], recipe=recipe,
                                      wants=(True, True, False, False))
        args = (dy, x, saved, offsets, w, [], None)
        now = OPS.grouped_linear_backward(*args, recipe=recipe)
        later = OPS.grouped_linear_backward(*args, recipe=recipe, deferred=True)
        assert torch.equal(now[0], later[0]) and later[1] == []
        (dw,), = deferred_dw("grouped_linear", dy, x, saved, later[4], offsets, w, recipe=recipe)
        assert_seen(dw)
        assert torch.equal(dw, now[1][0])

    @pytest.mark.parametrize("packed", [True, False])
    def test_wgrad_into_fp32_buffers(self, device, packed):
        counts = [3, 8, 0, 6, 2]
        offsets = offsets_of(counts, device)
        x, dy = (draw(19, c, dtype=torch.bfloat16, device=device) for c in (K, N))
        w = [draw(E, N, K, dtype=torch.bfloat16, device=device)]
        want = torch.stack([dy.double()[part].t() @ x.double()[part] for part in slices_of(counts)])
        empty = x.new_empty(0, dtype=torch.uint8)

        def wgrad(out, **options):
            OPS.grouped_linear_wgrad.out(dy, x, empty, empty, offsets, w, dweight=out, **options)

        def fresh(value):
            made = torch.full((E, N, K), value, device=device)
            return made, [made] if packed else list(made.unbind())

        whole, out = fresh(float("nan"))
        wgrad(out)
        assert_close(whole, want, terms=8)
        whole, out = fresh(0.25)
        wgrad(out, accumulate="yes")
        assert_close(whole, want + 0.25, terms=8)
        assert (whole[2] == 0.25).all()
        flags = torch.tensor([0, 1, 0, 1, 0], dtype=torch.int32, device=device)
        whole, out = fresh(0.25)
        whole[0] = whole[2] = whole[4] = float("nan")
        wgrad(out, accumulate="per_expert", accumulate_flags=flags)
        assert_close(whole, want + 0.25 * flags.view(E, 1, 1), terms=8)

    def test_buffers_keep_their_tail(self, device):
        counts, rows = [3, 8, 0, 6, 2], 24
        offsets = offsets_of(counts, device)
        x, w = draw(rows, K, device=device), [draw(E, N, K, device=device)]
        y = torch.full((rows, N), 7.0, device=device)
        saved = OPS._memory(x, 0)
        OPS.grouped_linear.out(x, offsets, w, [], y=y, saved=saved, weight_cache=None)
        assert torch.equal(y[:19], OPS.grouped_linear(x, offsets, w, [])[0][:19])
        assert (y[19:] == 7).all()
        OPS.grouped_linear.out(x, offsets, w, [], y=y, saved=saved, weight_cache=None,
                               zero_tail=True)
        assert (y[19:] == 0).all()

    def test_many_discrete_experts(self, device):
        experts = 500
        counts = torch.randint(0, 4, (experts,)).tolist()
        w = [draw(8, 8, device=device, grad=True) for _ in range(experts)]
        x = draw(sum(counts), 8, device=device, grad=True)
        y, _ = OPS.grouped_linear(x, offsets_of(counts, device), w, [])
        compare(y, linear(x, counts, w), [x, *w], terms=8)

    def test_autocast(self, device):
        counts = [3, 8, 0, 6, 2]
        x = draw(19, K, device=device, grad=True)
        w, b = [draw(E, N, K, device=device, grad=True)], [draw(E, N, device=device, grad=True)]
        with torch.autocast(device.type, torch.bfloat16):
            y, _ = OPS.grouped_linear(x, offsets_of(counts, device), w, b)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        assert x.grad.dtype == w[0].grad.dtype == b[0].grad.dtype == torch.float32
        assert_seen(w[0].grad)

    def test_saved_memory_that_a_hook_has_moved(self):
        counts, dtype = [33, 0, 61, 2, 9], torch.bfloat16
        x, w = draw(105, 64, dtype=dtype, grad=True), draw(E, 48, 64, dtype=dtype, grad=True)

        def moved(t):
            return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

        grads = []
        for unpack in (lambda t: t, moved):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                y, _ = OPS.grouped_linear(x, offsets_of(counts, "cpu"), [w], [], recipe="mxfp8")
            grads.append(torch.autograd.grad(y.float().square().sum(), [x, w]))
        assert all(torch.equal(a, b) for a, b in zip(*grads))

    def test_opcheck(self, device):
        counts = [3, 8, 0, 6, 2]
        offsets = offsets_of(counts, device)
        x, dy = draw(19, K, device=device, grad=True), draw(19, N, device=device)
        for packed in (True, False):
            w, b = (parameters(s, torch.float32, device, packed) for s in ((N, K), (N,)))
            opcheck(OPS.grouped_linear.default, (x, offsets, w, b))
            plain = [t.detach() for t in w]
            empty = OPS._memory(x, 0)
            opcheck(OPS.grouped_linear_backward.default,
                    (dy, x.detach(), empty, offsets, plain, [t.detach() for t in b], None))
            late = (dy, x.detach(), empty, empty, offsets, plain)
            opcheck_out(OPS.grouped_linear_wgrad.out, late,
                    dict(dweight=[torch.zeros_like(t) for t in plain], accumulate="yes"))
            opcheck_out(OPS.grouped_linear.out, (x.detach(), offsets, plain, []),
                    dict(y=poisoned(19, N, device=device), saved=empty, weight_cache=None))
            opcheck_out(OPS.grouped_linear_backward.out,
                    (dy, x.detach(), empty, offsets, plain, [], None),
                    dict(dx=poisoned(19, K, device=device), dbias=[], dbias_scale=None,
                         pending=empty))
        if device.type == "cpu":
            opcheck(OPS.grouped_linear.default, (x, offsets, w, []), dict(recipe="mxfp8"))


ACTIVATIONS = {
    "swiglu": lambda z: F.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
    "geglu": lambda z: F.gelu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
    "relu_squared": lambda z: F.relu(z).square(),
    "swiglu layout=interleave1": lambda z: F.silu(z[..., ::2]) * z[..., 1::2],
    "clamped_swiglu layout=interleave1 limit=1 alpha=1.5 offset=0.5": lambda z: (
        z[..., ::2].clamp(max=1) * torch.sigmoid(1.5 * z[..., ::2].clamp(max=1))
        * (z[..., 1::2].clamp(-1, 1) + 0.5)),
}


class TestMlp:
    H, FEATURES = 16, 32

    def tensors(self, rows, dtype, device, packed, gated):
        columns = 2 * self.FEATURES if gated else self.FEATURES
        x = draw(rows, self.H, dtype=dtype, device=device, grad=True)
        prob = torch.rand(rows).to(device).requires_grad_()
        shapes = ((columns, self.H), (columns,), (self.H, self.FEATURES), (self.H,))
        return x, prob, *(parameters(s, dtype, device, packed) for s in shapes)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("packed", [True, False])
    def test_all_directions(self, device, case, activation, packed):
        counts, rows = case
        gated = activation != "relu_squared"
        x, prob, w1, b1, w2, b2 = self.tensors(rows, torch.float32, device, packed, gated)
        y, _ = OPS.grouped_mlp(x, offsets_of(counts, device), prob, w1, b1, w2, b2, prob,
                               activation=activation)
        h = ACTIVATIONS[activation](linear(x, counts, w1, b1)) * prob.double()[:, None]
        want = linear(h, counts, w2, b2, prob)
        inputs = [x, prob, *w1, *b1, *w2, *b2]
        compare(y, want, inputs, terms=4 * self.FEATURES)

    def test_bf16_is_as_exact_as_its_parts(self, device):
        counts = [3, 8, 0, 6, 2]
        x, prob, w1, b1, w2, b2 = self.tensors(24, torch.bfloat16, device, True, True)
        offsets = offsets_of(counts, device)
        y, _ = OPS.grouped_mlp(x, offsets, prob, w1, b1, w2, b2)
        z, _ = OPS.grouped_linear(x, offsets, w1, b1)
        h = ACTIVATIONS["swiglu"](z.float()) * prob[:, None]
        want, _ = OPS.grouped_linear(h.bfloat16(), offsets, w2, b2)
        assert_seen(y)
        assert (y - want).float().norm() < 0.01 * want.float().norm()

    def test_keeping_h_and_deferring_change_no_bit(self, device):
        counts = [3, 8, 0, 6, 2]
        offsets = offsets_of(counts, device)
        x, prob, w1, b1, w2, b2 = self.tensors(24, torch.bfloat16, device, True, True)
        with torch.no_grad():
            dy = draw(24, self.H, dtype=torch.bfloat16, device=device)
            results = []
            for keep_h in (False, True):
                wants = dict(wants=(True,) * 6, keep_h=keep_h)
                y, saved = OPS.grouped_mlp(x, offsets, prob, w1, b1, w2, b2, **wants)
                args = (dy, x, saved, offsets, prob, w1, b1, w2, b2, None)
                dx, dprob, dw1, db1, dw2, db2, _, _ = OPS.grouped_mlp_backward(*args, **wants)
                results.append([y, dx, dprob, *dw1, *db1, *dw2, *db2])
                late = OPS.grouped_mlp_backward(*args, deferred=True, **wants)
                dw1, dw2 = deferred_dw("grouped_mlp", dy, x, saved, late[7], offsets, prob, w1, w2,
                                       biases=(True, True), **wants)
                results.append([y, late[0], late[1], *dw1, *late[3], *dw2, *late[5]])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other))
        assert_seen(results[0][1])

    def test_frozen_parts(self, device):
        counts = [3, 8, 0, 6, 2]
        offsets = offsets_of(counts, device)
        full = self.tensors(19, torch.float32, device, True, True)
        flat = [full[0], full[1], *(p[0] for p in full[2:])]
        dy = draw(19, self.H, device=device)

        def run(offsets, x, prob, w1, b1, w2, b2):
            return OPS.grouped_mlp(x, offsets, prob, [w1], [b1], [w2], [b2])

        whole = torch.autograd.grad(run(offsets, *flat)[0], flat, dy)
        for kept in range(6):
            parts = [offsets, *(t if i == kept else t.detach() for i, t in enumerate(flat))]
            y, saved = run(*parts)
            got, = torch.autograd.grad(y, [flat[kept]], dy)
            assert_seen(got)
            assert torch.equal(got, whole[kept])
            with FakeTensorMode() as mode:
                assert run(*map(mode.from_tensor, parts))[1].shape == saved.shape

    def test_opcheck(self, device):
        counts = [3, 8, 0, 6, 2]
        offsets = offsets_of(counts, device)
        x, prob, w1, b1, w2, b2 = self.tensors(19, torch.float32, device, True, True)
        # Between its parts `saved` holds what was there: nothing on the CPU, anything on a GPU.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(OPS.grouped_mlp.default, (x, offsets, prob, w1, b1, w2, b2),
                test_utils="ALL" if device.type == "cpu" else checks)
        with torch.no_grad():
            _, saved = OPS.grouped_mlp(x, offsets, prob, w1, b1, w2, b2, wants=(True,) * 6)
        dy = draw(19, self.H, device=device)
        plain = [[t.detach() for t in p] for p in (w1, b1, w2, b2)]
        args = (dy, x.detach(), saved, offsets, prob.detach(), *plain, None)
        opcheck(OPS.grouped_mlp_backward.default, args)
        *_, pending = OPS.grouped_mlp_backward(*args, deferred=True)
        late = (dy, x.detach(), saved, pending, offsets, prob.detach(), plain[0], plain[2])
        opcheck_out(OPS.grouped_mlp_wgrad.out, late,
                dict(biases=(True, True), dweight1=[torch.zeros_like(plain[0][0])],
                     dweight2=[torch.zeros_like(plain[2][0])]))
        y = poisoned(19, self.H, device=device)
        opcheck_out(OPS.grouped_mlp.out, (x.detach(), offsets, prob.detach(), *plain),
                dict(y=y, saved=saved))
        opcheck_out(OPS.grouped_mlp_backward.out, args,
                dict(dx=torch.zeros_like(y), dprob=torch.zeros_like(prob),
                     dbias1=[torch.zeros_like(plain[1][0])],
                     dbias2=[torch.zeros_like(plain[3][0])], dbias2_scale=None, pending=pending))


class TestCompile:
    def test_rows_and_counts_change_without_compiling_again(self, device):
        w1 = draw(E, 2 * N, K, device=device, grad=True)
        w2 = draw(E, K, N, device=device, grad=True)

        def step(x, offsets, prob):
            y, _ = OPS.grouped_linear(x, offsets, [w1], [])
            y = y[:, :K] + OPS.grouped_mlp(x, offsets, prob, [w1], [], [w2], [])[0]
            return y.sin()

        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for counts in ([3, 8, 0, 6, 2], [0, 0, 0, 0, 23], [9, 9, 9, 9, 9]):
                x = draw(sum(counts) + 3, K, device=device, grad=True)
                prob = torch.rand(len(x)).to(device).requires_grad_()
                offsets = offsets_of(counts, device)
                grads = []
                for run in (step, compiled):
                    y = run(x, offsets, prob)
                    grads.append((y, *torch.autograd.grad(y.sum(), [x, prob, w1, w2])))
                for got, want in zip(*grads):
                    assert_seen(want)
                    assert torch.equal(got, want)


class TestErrors:
    def call(self, x=None, offsets=None, weight=None, bias=(), **options):
        x = draw(20, K) if x is None else x
        offsets = offsets_of([3, 8, 1, 6, 2], "cpu") if offsets is None else offsets
        weight = [draw(E, N, K)] if weight is None else weight
        return OPS.grouped_linear(x, offsets, weight, list(bias), **options)

    @pytest.mark.parametrize("arguments, message", [
        (dict(x=draw(2, 10, K)), r"x has shape \[2, 10, 16\], must have two dimensions"),
        (dict(x=draw(20, 15)), r"x has shape \[20, 15\], must be \[R, 16\]"),
        (dict(x=draw(20, K).double()), "x is torch.float64, must be torch.float32, "),
        (dict(weight=[]), "weight has no tensors, must have one or 5"),
        (dict(weight=[draw(E, 1, N, K)]), "must have 2 dimensions for each expert or 3 for all"),
        (dict(weight=[draw(N, K)] * 4), "weight has 4 tensors, must have 5"),
        (dict(weight=[draw(4, N, K)]), r"weight has shape \[4, 24, 16\], must have 5 experts"),
        (dict(weight=[draw(N, K)] * 4 + [draw(N, K).half()]), "weight is torch.float16, must"),
        (dict(bias=[draw(E, 7)]), r"bias has shape \[5, 7\], must end in 24"),
        (dict(bias=[draw(E, N)], bias_scale=draw(3)), r"bias_scale has shape \[3\], must be"),
        (dict(bias=[draw(E, N)], bias_scale=draw(20).half()),
         "bias_scale is torch.float16, must be torch.float32"),
        (dict(offsets=torch.zeros(6)), "offsets is torch.float32, must be torch.int32"),
        (dict(offsets=torch.zeros(6, 1, dtype=torch.int32)), r"must be \[E \+ 1\]"),
        (dict(offsets=torch.zeros(12, dtype=torch.int32)[::2]), "offsets has strides"),
        (dict(recipe="mxfp9"), "mxfp9"),
        (dict(recipe="nvfp4", rng=torch.zeros(3, dtype=torch.int64), wants=(True,) * 4),
         r"rng has shape \[3\] .* must be \[2\]"),
    ])
    def test_of_linear(self, arguments, message):
        with pytest.raises(TypeError if " is torch." in message else ValueError, match=message):
            self.call(**arguments)

    def test_of_devices(self, device):
        if device.type == "cpu":
            pytest.skip("needs a second device")
        with pytest.raises(ValueError, match="weight is on cuda:0, must be on cpu"):
            self.call(weight=[draw(E, N, K, device=device)])
        with pytest.raises(ValueError, match="offsets is on cpu, must be on cuda:0"):
            self.call(x=draw(20, K, device=device), weight=[draw(E, N, K, device=device)])

    def test_of_wgrad(self):
        x, dy, w = draw(20, K), draw(20, N), [draw(E, N, K)]
        empty, offsets = OPS._memory(x, 0), offsets_of([3, 8, 1, 6, 2], "cpu")
        args = (dy, x, empty, empty, offsets, w)
        with pytest.raises(ValueError, match=r"dweight has shape \[5, 24, 15\], must end in"):
            OPS.grouped_linear_wgrad.out(*args, dweight=[draw(E, N, 15)])
        with pytest.raises(ValueError, match="accumulate is 'maybe', must be no, yes, device"):
            OPS.grouped_linear_wgrad.out(*args, dweight=[draw(E, N, K)], accumulate="maybe")
        with pytest.raises(TypeError, match="accumulate_flags is torch.float32, must be"):
            OPS.grouped_linear_wgrad.out(*args, dweight=[draw(E, N, K)], accumulate="per_expert",
                                         accumulate_flags=draw(E))
        with pytest.raises(ValueError, match="accumulate is null"):
            OPS.grouped_linear_wgrad.out(*args, dweight=[draw(E, N, K)], accumulate="per_expert")

    def mlp(self, x=None, prob=None, w1=None, b1=(), w2=None, b2=(), **options):
        x = draw(20, 16) if x is None else x
        w1 = [draw(E, 64, 16)] if w1 is None else w1
        w2 = [draw(E, 16, 32)] if w2 is None else w2
        return OPS.grouped_mlp(x, offsets_of([3, 8, 1, 6, 2], "cpu"), prob, w1, list(b1), w2,
                               list(b2), **options)

    @pytest.mark.parametrize("arguments, message", [
        (dict(x=draw(20, 17)), r"must end in \[R, H\], \[64, H\] and \[H, 32\]; swiglu is gated"),
        (dict(activation="relu"), r"\[32, H\] and \[H, 32\]; relu is not gated"),
        (dict(activation="swish"), "swish"),
        (dict(activation="swiglu layout=spiral"), "spiral"),
        (dict(w2=[draw(16, 32)] * 5), "weight2 is discrete, must be packed as weight1"),
        (dict(w2=[draw(E, 32, 16).transpose(1, 2)]), "weight2 has strides .* must lie as weight1"),
        (dict(b1=[draw(E, 64)], b2=[draw(E, 16).half()]), "bias2 is torch.float16, must be torch."),
        (dict(prob=draw(7)), r"prob has shape \[7\], must be \[20\]"),
        (dict(b2=[draw(E, 16)], bias2_scale=draw(7)), r"bias2_scale has shape \[7\], must be"),
    ])
    def test_of_mlp(self, arguments, message):
        with pytest.raises(TypeError if " is torch." in message else ValueError, match=message):
            self.mlp(**arguments)

    def test_of_mlp_gradients_of_two_kinds(self):
        x, w1, w2 = draw(20, 16), [draw(E, 64, 16)], [draw(E, 16, 32)]
        offsets, empty = offsets_of([3, 8, 1, 6, 2], "cpu"), OPS._memory(x, 0)
        with pytest.raises(TypeError, match="dweight2 is torch.float16, must be torch.float32"):
            OPS.grouped_mlp_wgrad.out(draw(20, 16), x, empty, empty, offsets, None, w1, w2,
                                      biases=(False, False), dweight1=[draw(E, 64, 16)],
                                      dweight2=[draw(E, 16, 32).half()])
        with pytest.raises(ValueError, match="dweight2 is discrete, must be packed as dweight1"):
            OPS.grouped_mlp_wgrad.out(draw(20, 16), x, empty, empty, offsets, None, w1, w2,
                                      biases=(False, False), dweight1=[draw(E, 64, 16)],
                                      dweight2=[draw(16, 32) for _ in range(E)])

    def test_backward_of_backward_is_an_error(self):
        x, w = draw(20, K, grad=True), draw(E, N, K, grad=True)
        y, _ = self.call(x=x, weight=[w])
        dx, = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivatives"):
            dx.sum().backward()
