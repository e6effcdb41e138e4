"""torch.ops.cadre.moe: the bits of its steps one after another, however it runs."""

import io
import logging
from itertools import product

import pytest
import torch
from conftest import STEP, assert_close, assert_seen, deferred_dw, draw, poisoned
from linear_reference import kept_bytes
from test_layers import opcheck_out
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

import cadre

OPS = torch.ops.cadre
T, TOP_K, E, H, F = 23, 3, 8, 32, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUTINGS = {
    "softmax": {},
    "softmax normalize=yes": dict(normalize=True),
    "topk_softmax scale=0.5": dict(score="topk_softmax", scale=0.5),
    "sigmoid normalize=yes scale=2.5 groups=4 group_top_k=2": dict(
        score="sigmoid", normalize=True, scale=2.5, groups=4, group_top_k=2)}


def tensors(device, dtype, tokens=T, packed=True, bias=True):
    """x, logits, and the parameters: all learn."""
    def f(*shape):
        return draw(*shape, dtype=dtype, device=device, grad=True)

    def parameters(*shape):
        return [f(E, *shape)] if packed else [f(*shape) for _ in range(E)]

    return (f(tokens, H), draw(tokens, E, device=device, grad=True), parameters(2 * F, H),
            parameters(2 * F) if bias else [], parameters(H, F), parameters(H) if bias else [])


def shared_tensors(device, dtype, gate=True, features=48):
    """Both weights of a shared expert, and its gate: all learn."""
    return ([draw(2 * features, H, dtype=dtype, device=device, grad=True),
             draw(H, features, dtype=dtype, device=device, grad=True)],
            torch.rand(T, device=device).requires_grad_() if gate else None)


def named(shared, gate):
    return dict(shared_weight1=shared[0], shared_weight2=shared[1], shared_gate=gate)


def leaves(given):
    return [t for part in given for t in (part if isinstance(part, list) else [part])]


def steps(given, expert_bias, options, **layer):
    """out, experts, prob, scores, offsets, made by one operator after another."""
    x, logits, *weights = given
    experts, prob, scores = cadre.routing(logits, TOP_K, expert_bias=expert_bias, **options)
    where = cadre.offsets_of_routing(experts, E, experts.numel())
    order = where.offsets, where.row_of, where.slot_of
    rows, row_prob = cadre.permute(x, *order, prob)
    y, _ = OPS.grouped_mlp(rows, where.offsets, row_prob, *weights,
                           row_prob if weights[3] else None, **layer)
    return cadre.combine(y, *order), experts, prob, scores, where.offsets


def whole(given, expert_bias, words, **layer):
    x, logits, *weights = given
    return OPS.moe(x, logits, TOP_K, expert_bias, *weights, routing=words, **layer)[:5]


def assert_same(got, want, given):
    """Outputs, and all gradients through the sums and the scores."""
    assert all(map(torch.equal, got, want))
    dout, dscores = draw(*got[0].shape, dtype=got[0].dtype), draw(*got[3].shape)
    gradients = [torch.autograd.grad((o[0], o[3]), leaves(given),
                                     (dout.to(o[0].device), dscores.to(o[0].device)))
                 for o in (got, want)]
    assert_seen(gradients[0][0])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("words", ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
def test_has_the_bits_of_its_steps(device, words, dtype, packed):
    given = tensors(device, dtype, packed=packed, bias=dtype != torch.float16)
    expert_bias = draw(E, device=device) if "sigmoid" in words else None
    for keep_rows in (False, True):
        assert_same(whole(given, expert_bias, words, keep_rows=keep_rows),
                    steps(given, expert_bias, ROUTINGS[words]), given)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block", "mxfp8,wgrad=bf16", "f32"])
def test_has_the_bits_of_its_steps_in_every_recipe(device, recipe):
    given = tensors(device, torch.bfloat16)
    results = []
    for run, routing in ((whole, "softmax"), (steps, {})):
        torch.manual_seed(1)  # of what rounds stochastically
        out = run(given, None, routing, recipe=recipe)
        results.append((*out, *torch.autograd.grad(out[0].float().square().sum(), leaves(given))))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("recipe", ["", "mxfp8", "nvfp4"])
def test_memory_is_enough_whatever_learns(device, recipe):
    """And fake tensors tell how much."""
    for tokens in (0, 1, 2, 63, 700):
        for learns in range(6):
            x, logits, *weights = [
                [t.requires_grad_(i == learns) for t in part] if isinstance(part, list)
                else part.requires_grad_(i == learns)
                for i, part in enumerate(tensors(device, torch.bfloat16, tokens))]
            given = x, logits, TOP_K, None, *weights
            options = dict(recipe=recipe, keep_rows=tokens % 2 == 0)
            out, *_, saved = OPS.moe(*given, **options)
            out.sum().backward()
            with FakeTensorMode() as mode:
                fake = tree_map_only(torch.Tensor, mode.from_tensor, given)
                assert OPS.moe(*fake, **options)[5].shape == saved.shape


def test_frozen_parts_change_nothing(device):
    given = tensors(device, torch.float32)
    dout, flat = draw(T, H, device=device), leaves(given)
    want = torch.autograd.grad(whole(given, None, "softmax")[0], flat, dout)
    for kept in range(len(flat)):
        x, logits, *weights = (t if i == kept else t.detach() for i, t in enumerate(flat))
        out = OPS.moe(x, logits, TOP_K, None, *([w] for w in weights))[0]
        got, = torch.autograd.grad(out, [flat[kept]], dout)
        assert torch.equal(got, want[kept])


def test_losses_of_the_router(device):
    """One of scores and probabilities alone runs no expert; with the sums it adds up."""
    given = tensors(device, torch.float32)
    flat, dout = leaves(given), draw(T, H, device=device)
    dprob, dscores = draw(T, TOP_K, device=device), draw(T, E, device=device)
    results = []
    for run, routing in ((whole, "softmax normalize=yes"), (steps, dict(normalize=True))):
        out, _, prob, scores, _ = run(given, None, routing)
        loss = (prob * dprob).sum() + (scores * dscores).sum()
        alone = torch.autograd.grad(loss, flat, allow_unused=True, retain_graph=True)
        assert [g is not None for g in alone] == [i == 1 for i in range(len(flat))]
        results.append((alone[1], *torch.autograd.grad(loss + (out * dout).sum(), flat)))
    assert torch.equal(results[0][0], results[1][0])
    for got, want in zip(*results):
        assert_close(got, want, terms=8)
    prob = whole(given, None, "softmax normalize=yes")[2]
    assert torch.autograd.grad(prob[:, 0].sum(), flat[0], allow_unused=True) == (None,)


def test_keeps_no_permuted_rows(device):
    """Of bf16: z, the probability of a row, and where it comes from; and x, once."""
    given = tensors(device, torch.bfloat16, tokens=512)
    rows, rounding = 512 * TOP_K, 8192
    for keep_rows, more in ((False, 0), (True, 2 * H)):
        kept = kept_bytes(lambda: whole(given, None, "softmax", keep_rows=keep_rows))
        assert 0 <= kept - rows * (4 * F + 3 * 4 + more) <= rounding
    with torch.no_grad():
        assert OPS.moe(*given[:2], TOP_K, None, *given[2:])[5].numel() == 0


def assert_sum(got, one, two):
    """Of two results, of which either was rounded or not before they were added."""
    one, two = one.detach().double(), two.detach().double()
    bound = 2 * STEP[got.dtype] * (one.abs() + two.abs())
    assert ((got.detach().double() - one - two).abs() <= bound).all()


def test_a_gradient_may_lie_anywhere(device):
    """Also where products gather it."""
    tokens, experts = 1100, 2
    given = (draw(tokens, H, dtype=torch.bfloat16, device=device, grad=True),
             draw(tokens, experts, device=device, grad=True),
             [draw(experts, 2 * F, H, dtype=torch.bfloat16, device=device, grad=True)], [],
             [draw(experts, H, F, dtype=torch.bfloat16, device=device, grad=True)], [])
    x, logits, *weights = given
    out = OPS.moe(x, logits, 1, None, *weights)[0]
    dout = draw(tokens * H + 1, dtype=torch.bfloat16, device=device)
    apart = dout[1:].view(tokens, H)
    got, want = (torch.autograd.grad(out, leaves(given), d, retain_graph=True)
                 for d in (apart, apart.clone()))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_expert_is_an_mlp_whose_result_is_added_last(device, dtype, packed, gate):
    """Its result as it is stored, to the sums before they are rounded."""
    given = tensors(device, dtype, packed=packed)
    shared, factor = shared_tensors(device, dtype, gate)
    learns = [*leaves(given), *shared, *([factor] if gate else [])]
    x, logits, *weights = given
    out = OPS.moe(x, logits, TOP_K, None, *weights, **named(shared, factor))[0]
    rows = torch.tensor([0, T], dtype=torch.int32, device=device)
    alone, _ = OPS.grouped_mlp(x, rows, factor, [shared[0][None]], [], [shared[1][None]], [])
    routed = whole(given, None, "softmax")[0]
    if dtype == torch.float32:
        assert torch.equal(out, routed + alone)
    assert_sum(out, routed, alone)
    dout = draw(T, H, dtype=dtype, device=device)
    got = torch.autograd.grad(out, learns, dout)
    want = torch.autograd.grad(routed + alone, learns, dout, retain_graph=True)
    for g, w, t in zip(got, want, learns):
        assert_seen(g)
        assert g.shape == t.shape and g.dtype == t.dtype
        if t is x:  # its parts meet in fp32, and are rounded once
            assert_sum(g, *(torch.autograd.grad(y, x, dout, retain_graph=True)[0]
                            for y in (routed, alone)))
        else:
            assert torch.equal(g, w)


@pytest.mark.parametrize("recipe", ["", "mxfp8"])
def test_memory_is_enough_with_a_shared_expert(device, recipe):
    for learns in range(9):
        parts = [*leaves(tensors(device, torch.bfloat16)),
                 *(lambda s, g: (*s, g))(*shared_tensors(device, torch.bfloat16))]
        x, logits, w1, b1, w2, b2, s1, s2, gate = (
            t.detach().requires_grad_(i == learns) for i, t in enumerate(parts))
        given = x, logits, TOP_K, None, [w1], [b1], [w2], [b2]
        options = dict(recipe=recipe, keep_rows=learns % 2 == 0, **named([s1, s2], gate))
        out, *_, saved = OPS.moe(*given, **options)
        out.sum().backward()
        learner = (x, logits, w1, b1, w2, b2, s1, s2, gate)[learns]
        assert_seen(learner.grad)
        with FakeTensorMode() as mode:
            fake, fakes = tree_map_only(torch.Tensor, mode.from_tensor, (given, options))
            assert OPS.moe(*fake, **fakes)[5].shape == saved.shape


def test_deferring_changes_no_bit_of_a_shared_expert(device):
    given = [t.detach() for t in leaves(tensors(device, torch.bfloat16, bias=False))]
    (x, logits), (w1, w2) = given[:2], ([t] for t in given[2:])
    shared, gate = shared_tensors(device, torch.bfloat16)
    options = dict(wants=(True, True, True, True, False),
                   **named([t.detach() for t in shared], gate.detach()))
    _, experts, _, _, offsets, saved = OPS.moe(x, logits, TOP_K, None, w1, [], w2, [], **options)
    routed = x, logits, experts, offsets, saved
    dout = draw(T, H, dtype=x.dtype, device=device)
    args = dout, None, *routed, w1, [], w2, []
    want = OPS.moe_backward(*args, **options)
    late = OPS.moe_backward(*args, deferred=True, **options)
    assert late[7].numel() == 0 and torch.equal(late[9], want[9])
    assert torch.equal(late[0], want[0])
    options |= dict(biases=(False, False), dout=dout)
    got = deferred_dw("moe", *routed, late[6], w1, w2, **options)
    got, want = [*got[0], *got[1], *got[2:]], [*want[2], *want[4], *want[7:9]]
    assert all(map(torch.equal, got, want))
    into = [torch.full_like(t, 0.25, dtype=torch.float32) for t in got]
    to = dict(dweight1=into[:1], dweight2=into[1:2], dshared_weight1=into[2],
              dshared_weight2=into[3])
    flag = torch.ones(1, dtype=torch.int32, device=device)
    OPS.moe_wgrad.out(*routed, late[6], w1, w2, **options, accumulate="device",
                      accumulate_flags=flag, **to)
    for added, dw in zip(into, got):
        assert_close(added.bfloat16(), dw.double() + 0.25, steps=2, terms=8)
    for change, match in (
            (dict(dout=None), "^dout, dshared_weight1 and dshared_weight2 are None, must be given"),
            (dict(accumulate="per_expert", accumulate_flags=torch.ones(E, dtype=torch.int32)),
             "^accumulate is 'per_expert', must be no, yes or device; there is no flag")):
        with pytest.raises(ValueError, match=match):
            OPS.moe_wgrad.out(*routed, late[6], w1, w2, **options | change, **to)


def test_opcheck_of_a_shared_expert(device):
    given = tensors(device, torch.float32, bias=False)
    own = named(*shared_tensors(device, torch.float32))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(OPS.moe.default, (*given[:2], TOP_K, None, *given[2:]), own,
            test_utils="ALL" if device.type == "cpu" else checks)
    x, logits, w1, _, w2, _ = ([t.detach() for t in part] if isinstance(part, list)
                               else part.detach() for part in given)
    own = {name: t.detach() for name, t in own.items()} | dict(wants=(True,) * 4 + (False,))
    _, experts, _, _, offsets, saved = OPS.moe(x, logits, TOP_K, None, w1, [], w2, [], **own)
    routed, dout = (x, logits, experts, offsets, saved), draw(T, H, device=device)
    args = dout, None, *routed, w1, [], w2, []
    opcheck(OPS.moe_backward.default, args, own)
    pending = OPS.moe_backward(*args, deferred=True, **own)[6]
    opcheck_out(OPS.moe_backward.out, args,
                own | dict(dx=torch.zeros_like(x), dlogits=torch.zeros_like(logits), dbias1=[],
                           dbias2=[], pending=pending, dshared_gate=torch.zeros(T, device=device)))
    own |= dict(biases=(False, False), dout=dout)
    opcheck_out(OPS.moe_wgrad.out, (*routed, pending, w1, w2),
                own | dict(dweight1=[torch.zeros_like(w1[0])], dweight2=[torch.zeros_like(w2[0])],
                           dshared_weight1=torch.zeros_like(own["shared_weight1"]),
                           dshared_weight2=torch.zeros_like(own["shared_weight2"])))


@pytest.mark.parametrize(("change", "match"), [
    (dict(shared_weight1=draw(8, H)), "^shared_weight1 and shared_weight2 are given and Non"),
    (named([draw(8, H), draw(H, 5)], None), r"^shared_weight1 has shape \[8, 32\], must be "),
    (named([draw(8, H), draw(9, 4)], None), r"^shared_weight2 has shape \[9, 4\], must be \["),
    (named([draw(8, H), draw(1, H, 4)], None), r"^shared_weight2 has shape .*, must be \[H, F\]"),
    (named([draw(H, 8).t(), draw(H, 4)], None), r"^shared_weight1 has strides \[1, 8\], must "),
    (dict(shared_gate=draw(T)), "^shared_gate is given, must be None; there is no shared expert"),
    (named([draw(8, H), draw(H, 4)], draw(T - 1)), r"^shared_gate has shape \[22\], must be "),
])
def test_shared_experts_that_do_not_fit(change, match):
    x, logits, *weights = tensors("cpu", torch.float32)
    with pytest.raises(ValueError, match=match):
        OPS.moe(x, logits, TOP_K, None, *weights, **change)


def arguments_of_backward(device, **options):
    """Of moe_backward and moe_wgrad, after a forward."""
    x, logits, *weights = (
        [t.detach() for t in part] if isinstance(part, list) else part.detach()
        for part in tensors(device, torch.bfloat16))
    wants = dict(wants=(True,) * 5, **options)
    out, experts, _, _, offsets, saved = OPS.moe(x, logits, TOP_K, None, *weights, **wants)
    routed = x, logits, experts, offsets, saved
    dout = draw(T, H, dtype=torch.bfloat16, device=device)
    return (dout, draw(T, E, device=device), *routed, *weights), routed, weights


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("keep_h", [False, True])
def test_deferring_changes_no_bit(device, keep_rows, keep_h):
    options = dict(keep_rows=keep_rows, keep_h=keep_h)
    args, routed, weights = arguments_of_backward(device, **options)
    dx, dlogits, dw1, db1, dw2, db2, *_ = OPS.moe_backward(*args, **options)
    late = OPS.moe_backward(*args, deferred=True, **options)
    assert torch.equal(late[0], dx) and torch.equal(late[1], dlogits)
    assert torch.equal(late[3][0], db1[0]) and torch.equal(late[5][0], db2[0])
    assert late[2] == late[4] == []
    pending = late[6], weights[0], weights[2]
    options |= dict(biases=(True, True))
    later = deferred_dw("moe", *routed, *pending, **options)
    assert torch.equal(later[0][0], dw1[0]) and torch.equal(later[1][0], dw2[0])
    flags = torch.arange(E, dtype=torch.int32, device=device) % 2
    for mode, adds in (("yes", 1), ("no", 0), ("per_expert", flags.view(E, 1, 1))):
        into = [torch.full_like(w[0], 0.25, dtype=torch.float32) for w in (dw1, dw2)]
        OPS.moe_wgrad.out(*routed, *pending, **options, accumulate=mode, dweight1=[into[0]],
                          dweight2=[into[1]],
                          accumulate_flags=flags if mode == "per_expert" else None)
        for got, want in zip(into, (dw1[0], dw2[0])):
            assert_close(got.bfloat16(), want.double() + 0.25 * adds, steps=2, terms=8)


@pytest.mark.parametrize("keep_h", [False, True])
@pytest.mark.parametrize("biases", list(product((False, True), repeat=2)))
def test_wgrad_finds_what_forward_kept(device, biases, keep_h):
    """What that is, and where it lies, depends on all that is wanted and on the biases."""
    given = [t.detach() for t in leaves(tensors(device, torch.bfloat16))]
    (x, logits), (w1, b1, w2, b2) = given[:2], ([t] for t in given[2:])
    weights = w1, b1 if biases[0] else [], w2, b2 if biases[1] else []
    dout = draw(T, H, dtype=x.dtype, device=device)
    for wants in product((False, True), repeat=5):
        _, dlogits, *dw, dbias = wants
        if not any(dw) or (biases[1] and dlogits and not dbias):
            continue
        options = dict(wants=wants, keep_h=keep_h)
        _, experts, _, _, offsets, saved = OPS.moe(x, logits, TOP_K, None, *weights, **options)
        routed = x, logits, experts, offsets, saved
        args = dout, None, *routed, *weights
        want = OPS.moe_backward(*args, **options)[2:5:2]
        pending = OPS.moe_backward(*args, deferred=True, **options)[6]
        got = deferred_dw("moe", *routed, pending, w1, w2, biases=biases, **options)
        assert all(torch.equal(g[0], w[0]) for g, w, wanted in zip(got, want, dw) if wanted), wants


def test_buffers_of_the_caller(device):
    args, (x, logits, experts, offsets, saved), weights = arguments_of_backward(device)
    out = dict(out=poisoned(T, H, dtype=x.dtype, device=device),
               experts=poisoned(T, TOP_K, dtype=torch.int32, device=device),
               prob=poisoned(T, TOP_K, device=device), scores=poisoned(T, E, device=device),
               offsets=poisoned(E + 1, dtype=torch.int32, device=device), saved=saved.clone())
    OPS.moe.out(x, logits, TOP_K, None, *weights, **out)
    want = OPS.moe(x, logits, TOP_K, None, *weights)[:5]
    assert all(map(torch.equal, list(out.values())[:5], want))
    dx, dlogits, _, db1, _, db2, *_ = OPS.moe_backward(*args)
    pending = OPS.moe_backward(*args, deferred=True)[6]
    into = dict(dx=poisoned(T, H, dtype=x.dtype, device=device),
                dlogits=poisoned(T, E, device=device), dbias1=[torch.zeros_like(db1[0])],
                dbias2=[torch.zeros_like(db2[0])], pending=torch.zeros_like(pending))
    OPS.moe_backward.out(*args, **into)
    assert torch.equal(into["dx"], dx) and torch.equal(into["dlogits"], dlogits)
    assert torch.equal(into["dbias1"][0], db1[0]) and torch.equal(into["dbias2"][0], db2[0])


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch's own
def test_an_exported_layer_is_saved_and_loaded(device, monkeypatch):
    """With a named tuple in its results; and one in its arguments, of which torch writes a line
    into its log that has no argument for its %s."""
    log = logging.getLogger("torch._export.serde.serialize")
    monkeypatch.setattr(log, "disabled", True)
    x = draw(20, 24, device=device)
    where = cadre.offsets(torch.tensor([9, 0, 11], device=device), "counts", 20)
    layers = ((cadre.MoE(3, 24, 32, top_k=2, device=device), (x,)),
              (cadre.GroupedMLP(3, 24, 32, device=device), (x, where)))
    for layer, given in layers:
        file = io.BytesIO()
        torch.export.save(torch.export.export(layer, given), file)
        file.seek(0)
        got, want = torch.export.load(file).module()(*given), layer(*given)
        assert type(got) is type(want)
        if isinstance(want, tuple):
            assert type(got[1]) is type(want[1]) is cadre.RouterOutput
            assert torch.equal(got[1].scores, want[1].scores)
            got, want = got[0], want[0]
        assert torch.equal(got, want)


def test_autocast(device):
    given = tensors(device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        out, _, prob, scores, _ = whole(given, None, "softmax")
    assert out.dtype == torch.bfloat16 and prob.dtype == scores.dtype == torch.float32
    cast = [[t.detach().bfloat16() for t in p] if isinstance(p, list) else p.detach().bfloat16()
            for p in given]
    cast[1] = given[1].detach()
    assert torch.equal(out, whole(cast, None, "softmax")[0])
    out.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves(given))


def test_opcheck(device):
    given = tensors(device, torch.float32)
    # As of grouped_mlp: between its parts `saved` holds what was there.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(OPS.moe.default, (*given[:2], TOP_K, draw(E, device=device), *given[2:]),
            test_utils="ALL" if device.type == "cpu" else checks)
    args, routed, weights = arguments_of_backward(device)
    x, logits, experts, offsets, saved = routed
    opcheck(OPS.moe_backward.default, args)
    pending = OPS.moe_backward(*args, deferred=True)[6]
    late = (*routed, pending, weights[0], weights[2])
    opcheck_out(OPS.moe_wgrad.out, late,
                dict(biases=(True, True), dweight1=[torch.zeros_like(weights[0][0])],
                     dweight2=[torch.zeros_like(weights[2][0])]))
    opcheck_out(OPS.moe.out, (x, logits, TOP_K, None, *weights),
                dict(out=poisoned(T, H, dtype=x.dtype, device=device), experts=experts.clone(),
                     prob=poisoned(T, TOP_K, device=device), scores=poisoned(T, E, device=device),
                     offsets=offsets.clone(), saved=saved))
    opcheck_out(OPS.moe_backward.out, args,
                dict(dx=torch.zeros_like(x), dlogits=torch.zeros_like(logits),
                     dbias1=[torch.zeros_like(weights[1][0])],
                     dbias2=[torch.zeros_like(weights[3][0])], pending=pending))


@pytest.mark.parametrize(("change", "match"), [
    (dict(x=draw(2, T, H)), r"x has shape \[2, 23, 32\], must have two dimensions"),
    (dict(x=draw(T, H - 1)), r"x, weight1 and weight2 have shapes \[23, 31\], "),
    (dict(logits=draw(T - 1, E)), r"logits has shape \[22, 8\], must be \[23, 8\]"),
    (dict(logits=draw(T, E - 1)), "weight1 has shape .*, must have 7 experts"),
    (dict(top_k=0), "top_k is 0, must be 1 or more"),
    (dict(top_k=E + 1), "routing: top_k is 9, must be at most E, 8"),
    (dict(expert_bias=draw(E + 1)), r"expert_bias has shape \[9\], must be \[8\]"),
    (dict(routing="median"), "'median', must be one of"),
    (dict(routing="softmax speed=3"), "speed"),
    (dict(routing="softmax expert_bias=yes"),
     "routing is 'softmax expert_bias=yes', must be without expert_bias; it may name normalize, "),
    (dict(routing="softmax scale=2 logits=bf16"), "must be without logits; it may name normalize,"),
    (dict(activation="swiglu keep_h=yes"), "must be without keep_h; it may name layout, limit, "),
    (dict(routing="softmax groups=3"), "groups is 3, must divide E, 8"),
    (dict(activation="mish"), "activation: name is 'mish', must be one of"),
    (dict(recipe="fp7"), "fp7"),
])
def test_errors(change, match):
    x, logits, *weights = tensors("cpu", torch.float32)
    given = dict(x=x, logits=logits, top_k=TOP_K, expert_bias=None) | change
    operands = [given.pop(name) for name in ("x", "logits", "top_k", "expert_bias")]
    with pytest.raises(ValueError, match=match):
        OPS.moe(*operands, *weights, **given)
