"""torch.ops.cadre.* but for products: values, tails, gradients, and the out overloads."""

import pytest
import torch

import cadre
from conftest import (assert_close, assert_seen, draw, draw_routing, experts_of_rows, offsets_of,
                      poisoned, slices_of)

ops = torch.ops.cadre
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def isnan_all(t):
    return bool(t.isnan().all())


# offsets


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["counts", "ends"])
def test_offsets(device, case, index, kind):
    counts, rows = case
    source = torch.tensor(counts, dtype=index, device=device)
    if kind == "ends":
        source = source.cumsum(0).to(index)
    got = cadre.offsets(source, kind, rows)
    assert torch.equal(got.offsets, offsets_of(counts, device)) and got.offsets.dtype == torch.int32
    assert got.status.tolist() == [0]
    written, status = (poisoned(n, dtype=torch.int32, device=device) for n in (6, 1))
    ops.offsets.out(source, kind, rows, offsets=written, status=status)
    assert torch.equal(written, got.offsets) and status.tolist() == [0]


def test_broken_counts_are_clamped_and_told(device):
    got = cadre.offsets(torch.tensor([3, -2, 9], device=device), "counts", 7)
    assert got.offsets.tolist() == [0, 3, 3, 7]
    assert got.status.tolist() == [1 | 2]


def routed(device, tokens=13, top_k=2, experts=5, rows=30):
    chosen = draw_routing(tokens, top_k, experts, device)
    return chosen, cadre.offsets_of_routing(chosen, experts, rows)


def test_offsets_are_taken_bare_and_within_what_has_them(device):
    _, where = routed(device)
    tokens, z, w = (draw(*s, device=device) for s in ((13, 32), (30, 32), (5, 48, 32)))
    prob = draw(13, 2, device=device)
    order = where.row_of, where.slot_of
    uses = [
        lambda o: cadre.activation(z, o), lambda o: cadre.bias_grad(z, o)[0],
        lambda o: cadre.grouped_gemm(z, w, o), lambda o: cadre.grouped_gemm(z, z, o, "wgrad"),
        lambda o: cadre.dequantize(cadre.quantize(z, o, "mxfp8"), o, "mxfp8", shape=z.shape),
        lambda o: cadre.permute(tokens, o, *order, prob)[1],
        lambda o: cadre.combine(z, o, *order, prob)]
    for use in uses:
        want = use(where.offsets)
        assert torch.equal(use(cadre.Offsets(where.offsets)), want)
        assert torch.equal(use(where), want)
    for got, want in ((cadre.permute(tokens, where, prob=prob)[1], uses[-2](where)),
                      (cadre.combine(z, where, prob=prob), uses[-1](where)),
                      (cadre.grouped_mm(z, w.mT, offs=where), uses[2](where)),
                      (cadre.grouped_mm(z.t(), z, offs=cadre.Offsets(where.offsets)),
                       uses[3](where))):
        assert torch.equal(got, want)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_offsets_of_routing(device, index):
    chosen, _ = routed(device)
    got = cadre.offsets_of_routing(chosen.to(index), 5, 30)
    counts = [int((chosen == e).sum()) for e in range(5)]
    assert counts[1] == 0 and sum(counts) < 26
    assert torch.equal(got.offsets, offsets_of(counts, device))
    order = [(int(chosen.flatten()[s]), s) for s in range(26) if chosen.flatten()[s] >= 0]
    slots = [slot for _, slot in sorted(order)]
    assert got.slot_of.tolist() == slots + [-1] * (30 - len(slots))
    row_of = torch.full((26,), -1)
    row_of[slots] = torch.arange(len(slots))
    assert torch.equal(got.row_of.cpu(), row_of.view(13, 2).int())
    out = [poisoned(*t.shape, dtype=torch.int32, device=device) for t in got]
    ops.offsets_of_routing.out(chosen, 5, 30, offsets=out[0], row_of=out[1], slot_of=out[2],
                               status=out[3])
    assert torch.equal(out[0], got.offsets) and torch.equal(out[1], got.row_of)
    assert out[2].tolist() == slots + [-77] * (30 - len(slots))


def test_routing_beyond_the_rows_drops_choices(device):
    chosen, whole = routed(device)
    got = cadre.offsets_of_routing(chosen, 5, 9)
    assert got.status.tolist() == [2] and got.offsets[-1] == 9
    assert torch.equal(got.row_of, torch.where(whole.row_of < 9, whole.row_of, -1))


# routing


def routing_reference(logits, experts, score, normalize, scale):
    """Probabilities of the chosen experts, and all scores, in torch."""
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(1)
    if score == "topk_softmax":
        prob = logits.gather(1, experts.long()).softmax(1)
    else:
        prob = scores.gather(1, experts.long())
    if normalize:
        prob = prob / (prob.sum(1, keepdim=True) + 1e-20)
    return prob * scale, scores


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_routing_and_its_gradient(device, dtype, score, normalize):
    logits = draw(11, 6, dtype=dtype, device=device, grad=True)
    got = cadre.routing(logits, 3, score, normalize, 1.5)
    assert torch.equal(got.experts.long().sort(1).values,
                       logits.topk(3, 1).indices.sort(1).values)
    ref = logits.detach().double().requires_grad_()
    prob, scores = routing_reference(ref, got.experts, score, normalize, 1.5)
    assert_close(got.prob, prob, steps=8)
    assert_close(got.scores, scores, steps=8)
    dprob, dscores = draw(11, 3, device=device), draw(11, 6, device=device)
    for output, want, d in ((got.prob, prob, dprob), (got.scores, scores, dscores)):
        dlogits, = torch.autograd.grad(output, logits, d, retain_graph=True)
        want_dlogits, = torch.autograd.grad(want, ref, d.double(), retain_graph=True)
        assert_seen(dlogits)
        assert_close(dlogits, want_dlogits, steps=8, terms=8)
    both, = torch.autograd.grad((got.prob * dprob).sum() + (got.scores * dscores).sum(), logits)
    want, = torch.autograd.grad((prob * dprob).sum() + (scores * dscores).sum(), ref)
    assert_close(both, want, steps=8, terms=8)


def test_routing_with_bias_groups_and_out(device):
    logits, bias = draw(7, 8, device=device), draw(8, device=device)
    got = cadre.routing(logits, 2, "sigmoid", True, 2.0, bias, 4, 2)
    rank = (logits.sigmoid() + bias).view(7, 4, 2)
    best = rank.amax(2).topk(2, 1).indices
    open_ = torch.zeros(7, 4, dtype=torch.bool, device=device).scatter_(1, best, True)
    want = rank.masked_fill(~open_.unsqueeze(2), -9).view(7, 8).topk(2, 1).indices
    assert torch.equal(got.experts.long(), want)
    out = [poisoned(7, 2, dtype=torch.int32, device=device), poisoned(7, 2, device=device),
           poisoned(7, 8, device=device)]
    ops.routing.out(logits, 2, "sigmoid", True, 2.0, bias, 4, 2, experts=out[0], prob=out[1],
                    scores=out[2])
    assert all(torch.equal(a, b) for a, b in zip(out, got))
    dprob = draw(7, 2, device=device)
    dlogits = poisoned(7, 8, device=device)
    ops.routing_backward.out(logits, got.experts, dprob, None, 2, "sigmoid", True, 2.0, 4, 2,
                             dlogits=dlogits)
    assert torch.equal(dlogits, ops.routing_backward(logits, got.experts, dprob, None, 2, "sigmoid",
                                                     True, 2.0, 4, 2))
    assert_seen(dlogits)


def test_routing_without_tokens(device):
    got = cadre.routing(torch.empty(0, 4, device=device, requires_grad=True), 2)
    assert got.experts.shape == (0, 2) and got.scores.shape == (0, 4)
    got.prob.sum().backward()


# permute and combine


def gather(tokens, map_, prob=None):
    """permute in torch."""
    slots = map_.slot_of.long()
    top_k = map_.row_of.shape[1]
    rows = torch.where(slots[:, None] >= 0, tokens[(slots.clamp(min=0)) // top_k], 0)
    if prob is None:
        return rows, None
    return rows, torch.where(slots >= 0, prob.flatten()[slots.clamp(min=0)], 0)


def scatter(rows, map_, prob=None):
    """combine in torch."""
    row_of = map_.row_of.long()
    picked = torch.where(row_of[..., None] >= 0, rows[row_of.clamp(min=0)], 0)
    return (picked if prob is None else picked * prob[..., None]).sum(1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_prob", [False, True])
def test_permute_and_its_gradient(device, dtype, with_prob):
    _, map_ = routed(device)
    tokens = draw(13, 9, dtype=dtype, device=device, grad=True)
    prob = torch.rand(13, 2, device=device, requires_grad=True) if with_prob else None
    rows, row_prob = cadre.permute(tokens, *map_[:3], prob)
    ref = tokens.detach().double().requires_grad_()
    ref_prob = prob.detach().double().requires_grad_() if with_prob else None
    want, want_prob = gather(ref, map_, ref_prob)
    assert_seen(rows)
    assert torch.equal(rows.double(), want)
    drows, drow_prob = draw(30, 9, dtype=dtype, device=device), draw(30, device=device)
    loss = (rows * drows).sum()
    ref_loss = (want * drows.double()).sum()
    if with_prob:
        assert torch.equal(row_prob.double(), want_prob)
        loss = loss + (row_prob * drow_prob).sum()
        ref_loss = ref_loss + (want_prob * drow_prob.double()).sum()
    else:
        assert row_prob.shape == (0,)
    loss.backward()
    ref_loss.backward()
    assert_close(tokens.grad, ref.grad, terms=2)
    if with_prob:
        assert_close(prob.grad, ref_prob.grad)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_prob", [False, True])
def test_combine_and_its_gradient(device, dtype, with_prob):
    _, map_ = routed(device)
    rows = draw(30, 9, dtype=dtype, device=device, grad=True)
    prob = torch.rand(13, 2, device=device, requires_grad=True) if with_prob else None
    tokens = cadre.combine(rows, *map_[:3], prob)
    ref = rows.detach().double().requires_grad_()
    ref_prob = prob.detach().double().requires_grad_() if with_prob else None
    want = scatter(ref, map_, ref_prob)
    assert_seen(tokens)
    assert_close(tokens, want, terms=4)
    dtokens = draw(13, 9, dtype=dtype, device=device)
    tokens.backward(dtokens)
    want.backward(dtokens.double())
    assert_close(rows.grad, ref.grad, terms=2)
    assert rows.grad[int(map_.offsets[-1]):].abs().max() == 0
    if with_prob:
        assert_close(prob.grad, ref_prob.grad, terms=16)


def test_gradients_that_are_expanded(device):
    """The gradient of a sum has strides of zero."""
    _, map_ = routed(device)
    tokens = draw(13, 9, device=device, grad=True)
    rows, _ = cadre.permute(tokens, *map_[:3])
    cadre.combine(rows, *map_[:3]).sum().backward()
    kept = (map_.row_of >= 0).sum(1, keepdim=True).float()
    assert torch.equal(tokens.grad, kept.expand(13, 9))


def test_frozen_prob_keeps_no_rows(device):
    _, map_ = routed(device)
    rows, prob = draw(30, 9, device=device, grad=True), torch.rand(13, 2, device=device)
    cadre.combine(rows, *map_[:3], prob).sum().backward()
    assert_seen(rows.grad)


def test_permute_out_keeps_the_tail(device):
    _, map_ = routed(device)
    end = int(map_.offsets[-1])
    tokens, prob = draw(13, 9, device=device), torch.rand(13, 2, device=device)
    rows, row_prob = poisoned(30, 9, device=device), poisoned(30, device=device)
    ops.permute.out(tokens, *map_[:3], prob, rows=rows, row_prob=row_prob)
    want, want_prob = cadre.permute(tokens, *map_[:3], prob)
    assert torch.equal(rows[:end], want[:end]) and isnan_all(rows[end:])
    assert torch.equal(row_prob[:end], want_prob[:end]) and isnan_all(row_prob[end:])
    drows, drow_prob = poisoned(30, 9, device=device), poisoned(30, device=device)
    drows[:end], drow_prob[:end] = draw(end, 9), draw(end)  # nobody reads the tail
    got = [poisoned(13, 9, device=device), poisoned(13, 2, device=device)]
    ops.permute_backward.out(drows, drow_prob, *map_[:2], dtokens=got[0], dprob=got[1])
    want = ops.permute_backward(drows, drow_prob, *map_[:2])
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert_close(got[0], scatter(drows, map_).double(), terms=2)


def test_combine_out_keeps_the_tail(device):
    _, map_ = routed(device)
    end = int(map_.offsets[-1])
    rows, prob = poisoned(30, 9, device=device), torch.rand(13, 2, device=device)
    rows[:end] = draw(end, 9)
    tokens = poisoned(13, 9, device=device)
    ops.combine.out(rows, *map_[:3], prob, tokens=tokens)
    assert torch.equal(tokens, cadre.combine(rows, *map_[:3], prob))
    dtokens = draw(13, 9, device=device)
    drows, dprob = poisoned(30, 9, device=device), poisoned(13, 2, device=device)
    ops.combine_backward.out(dtokens, rows, *map_[:3], prob, True, drows=drows, dprob=dprob)
    want = ops.combine_backward(dtokens, rows, *map_[:3], prob, True)
    assert torch.equal(drows[:end], want[0][:end]) and isnan_all(drows[end:])
    assert torch.equal(dprob, want[1])
    assert_seen(dprob)


# activation


def swiglu(z):
    gate, up = z.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def clamped(z):
    gate, up = z.chunk(2, dim=1)
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS = {
    "swiglu": swiglu,
    "swiglu layout=interleave1": lambda z: swiglu(torch.cat([z[:, 0::2], z[:, 1::2]], 1)),
    "clamped_swiglu limit=1.5": clamped,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "relu_squared": lambda z: z.relu().square(),
}


@pytest.mark.parametrize("words", ACTIVATIONS)
@pytest.mark.parametrize("with_prob", [False, True])
def test_activation_and_its_gradient(device, case, words, with_prob):
    counts, rows = case
    offsets, end = offsets_of(counts, device), sum(counts)
    z = draw(rows, 12, device=device, grad=True)
    prob = torch.rand(rows, device=device, requires_grad=True) if with_prob else None
    h = cadre.activation(z, offsets, prob, words)
    ref = z.detach().double().requires_grad_()
    ref_prob = prob.detach().double().requires_grad_() if with_prob else None
    want = ACTIVATIONS[words](ref)
    want = want * ref_prob[:, None] if with_prob else want
    want = torch.cat([want[:end], want[end:] * 0])
    assert_close(h, want, steps=16)
    assert h[end:].abs().sum() == 0
    dh = draw(*h.shape, device=device)
    h.backward(dh)
    want.backward(dh.double())
    assert_close(z.grad, ref.grad, steps=32, terms=4)
    if with_prob:
        assert_close(prob.grad, ref_prob.grad, steps=16, terms=16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_activation_out_keeps_the_tail(device, dtype):
    counts, rows = [3, 0, 4], 9
    offsets = offsets_of(counts, device)
    z, prob = poisoned(rows, 8, dtype=dtype, device=device), poisoned(rows, device=device)
    z[:7], prob[:7] = draw(7, 8), torch.rand(7)
    h = poisoned(rows, 4, dtype=dtype, device=device)
    ops.activation.out(z, offsets, prob, "swiglu", h=h)
    want = cadre.activation(z, offsets, prob, "swiglu")
    assert torch.equal(h[:7], want[:7]) and isnan_all(h[7:])
    assert_close(want[:7], swiglu(z[:7].double()) * prob[:7, None], steps=2, terms=4)
    dh = draw(rows, 4, dtype=dtype, device=device)
    dz, dprob = poisoned(rows, 8, dtype=dtype, device=device), poisoned(rows, device=device)
    ops.activation_backward.out(dh, z, offsets, prob, "swiglu", dz=dz, dprob=dprob)
    want = ops.activation_backward(dh, z, offsets, prob, "swiglu")
    assert torch.equal(dz[:7], want[0][:7]) and isnan_all(dz[7:])
    assert torch.equal(dprob[:7], want[1][:7]) and isnan_all(dprob[7:])
    assert want[0][7:].abs().sum() == 0 and want[1][7:].abs().sum() == 0
    assert_seen(want[0])


# bias_grad


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_scale", [False, True])
def test_bias_grad(device, case, dtype, with_scale):
    counts, rows = case
    offsets, end = offsets_of(counts, device), sum(counts)
    dy = poisoned(rows, 7, dtype=dtype, device=device)
    dy[:end] = draw(end, 7)
    scale, bias = draw(rows, device=device), draw(5, 7, dtype=dtype, device=device)
    extra = (scale, bias) if with_scale else ()
    dbias, dscale = cadre.bias_grad(dy, offsets, *extra, dtype=torch.float32)
    wide = dy.double() * scale.double()[:, None] if with_scale else dy.double()
    want = torch.stack([wide[s].sum(0) for s in slices_of(counts)])
    assert_close(dbias, want, terms=20)
    out = [poisoned(5, 7, dtype=dtype, device=device),
           poisoned(rows if with_scale else 0, device=device)]
    ops.bias_grad.out(dy, offsets, *extra, dbias=out[0], dbias_scale=out[1])
    assert_close(out[0], want, terms=20)
    assert dscale.shape == out[1].shape
    if with_scale:
        want = (dy[:end].double() * bias.double()[experts_of_rows(counts, device)]).sum(1)
        assert_close(dscale[:end], want, terms=8)
        assert dscale[end:].abs().sum() == 0 and isnan_all(out[1][end:])
        assert torch.equal(out[1][:end], dscale[:end])


# quantize and dequantize


@pytest.mark.parametrize("format,axis,error", [
    ("mxfp8", "along_k", 2**-3), ("mxfp8", "along_rows", 2**-3), ("fp8_tensor", "along_k", 2**-3),
    ("fp8_block:2d", "along_k", 2**-3), ("nvfp4", "along_rows", 0.5), ("bf16", "along_k", 2**-8)])
def test_quantize_and_back(device, case, format, axis, error):
    counts, rows = case
    offsets, end = offsets_of(counts, device), sum(counts)
    x = poisoned(rows, 37, device=device)
    x[:end] = draw(end, 37)
    parts = cadre.quantize(x, offsets, format, axis)
    back = cadre.dequantize(parts, offsets, format, axis, shape=x.shape)
    assert back[end:].abs().sum() == 0 and torch.isfinite(back).all()
    if end:
        assert (back[:end] - x[:end]).abs().max() <= error * x[:end].abs().max()
        assert_seen(back)
    again = [torch.zeros_like(t) for t in parts]
    ops.quantize.out(x, offsets, format, axis, codes=again[0], scales=again[1],
                     expert_scale=again[2])
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(again, parts))
    out = poisoned(rows, 37, device=device)
    ops.dequantize.out(*parts, offsets, format, axis, [rows, 37], out=out)
    assert torch.equal(out[:end], back[:end]) and isnan_all(out[end:])


def test_quantize_weights(device):
    w = draw(3, 7, 37, dtype=torch.bfloat16, device=device)
    parts = cadre.quantize(w, None, "nvfp4:2d", "along_rows")
    assert parts.codes.shape == (3, 7, 19) and parts.codes.dtype == torch.uint8
    assert parts.scales.shape == (3, 1, 3) and parts.expert_scale.shape == (3,)
    back = cadre.dequantize(parts, None, "nvfp4:2d", "along_rows", shape=w.shape)
    assert (back - w).abs().max() <= 0.5 * w.abs().max()
    assert_seen(back)


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block", "mxfp8"])
def test_rows_without_columns_have_no_scales(device, format):
    offsets = offsets_of([2, 1], device)
    for columns in (0, 1):
        parts = cadre.quantize(draw(3, columns, device=device), offsets, format)
        assert parts.codes.shape == parts.scales.shape == (3, columns)


def test_stochastic_rounding_takes_a_seed(device):
    offsets, x = offsets_of([4, 5], device), draw(9, 32, device=device)
    first, second, third = (
        cadre.quantize(x, offsets, "nvfp4:sr", rng=torch.tensor([7, seed], device=device)).codes
        for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_transformed_rows_are_stored_by_block(device):
    offsets, x = offsets_of([4, 5], device), draw(9, 32, device=device)
    parts = cadre.quantize(x, offsets, "nvfp4:rht", "along_rows")
    assert parts.codes.shape == (16 * (9 // 16 + 2), 16)
    back = cadre.dequantize(parts, offsets, "nvfp4:rht", "along_rows", shape=x.shape)
    assert back.shape == (32, 32)
    # The transform keeps lengths.
    want = torch.stack([x[:4].square().sum(0), x[4:].square().sum(0)])
    got = back.view(2, 16, 32).square().sum(1)
    assert ((got - want).abs() <= 0.35 * want.max()).all()


def test_combine_without_tokens_has_a_gradient_of_zeros(device):
    """Where rows have room all the same."""
    order = cadre.offsets_of_routing(torch.empty(0, 2, dtype=torch.int32, device=device), 4, rows=3)
    rows = torch.randn(3, 8, device=device).requires_grad_()
    prob = torch.empty(0, 2, device=device).requires_grad_()
    cadre.combine(rows, order, prob=prob).sum().backward()
    assert rows.grad.tolist() == [[0] * 8] * 3 and prob.grad.shape == (0, 2)
