"""torch.ops.cadre.routed_experts: the bits of its steps one after another, however it runs."""

from itertools import product

import pytest
import torch
from conftest import assert_seen, draw
from linear_reference import kept_bytes
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_map_only

import cadre

OPS = torch.ops.cadre
T, TOP_K, E, H, F = 23, 3, 8, 32, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(device, dtype, tokens=T, bias=True, packed=True, transposed=False):
    """x, experts, some of which are none, prob, and the parameters: all but experts learn."""
    def f(*shape):
        return draw(*shape, dtype=dtype, device=device, grad=True)

    def weight(*shape):
        if transposed:
            return f(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2).detach().requires_grad_()
        return f(*shape)

    def parameters(make, *shape):
        return [make(E, *shape)] if packed else [make(*shape) for _ in range(E)]

    experts = torch.randint(-1, E + 1, (tokens, TOP_K), device=device)
    prob = torch.rand(tokens, TOP_K, device=device).requires_grad_()
    return (f(tokens, H), experts, prob, parameters(weight, 2 * F, H),
            parameters(f, 2 * F) if bias else [], parameters(weight, H, F),
            parameters(f, H) if bias else [])


def leaves(given):
    x, _, prob, *lists = given
    return [x, prob, *(t for one in lists for t in one)]


def steps(given, **layer):
    """out and offsets, made by one operator after another."""
    x, experts, prob, *weights = given
    where = cadre.offsets_of_routing(experts, E, experts.numel())
    order = where.offsets, where.row_of, where.slot_of
    rows, row_prob = cadre.permute(x, *order, prob)
    y, _ = OPS.grouped_mlp(rows, where.offsets, row_prob, *weights,
                           row_prob if weights[3] else None, **layer)
    return cadre.combine(y, *order), where.offsets


def whole(given, **layer):
    x, experts, prob, *weights = given
    return OPS.routed_experts(x, experts, prob, E, *weights, **layer)[:2]


def assert_same(got, want, given):
    assert all(map(torch.equal, got, want))
    dout = draw(*got[0].shape, dtype=got[0].dtype).to(got[0].device)
    gradients = [torch.autograd.grad(o[0], leaves(given), dout) for o in (got, want)]
    assert_seen(gradients[0][0])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_has_the_bits_of_its_steps(device, dtype, packed, bias):
    given = tensors(device, dtype, packed=packed, bias=bias)
    for keep_rows in (False, True):
        for index in (torch.int32, torch.int64):
            chosen = given[0], given[1].to(index), *given[2:]
            assert_same(whole(chosen, keep_rows=keep_rows), steps(chosen), chosen)


def test_takes_weights_that_lie_as_in_gpt_oss(device):
    given = tensors(device, torch.bfloat16, transposed=True)
    for layout in ("concat", "interleave1"):
        words = dict(activation=f"swiglu layout={layout}")
        assert_same(whole(given, **words), steps(given, **words), given)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block", "mxfp8,wgrad=bf16", "f32"])
def test_has_the_bits_of_its_steps_in_every_recipe(device, recipe):
    given = tensors(device, torch.bfloat16)
    results = []
    for run in (whole, steps):
        torch.manual_seed(1)  # of what rounds stochastically
        out = run(given, recipe=recipe)
        results.append((*out, *torch.autograd.grad(out[0].float().square().sum(), leaves(given))))
    assert all(map(torch.equal, *results))


def test_dropped_choices_add_nothing(device):
    x, experts, prob, *weights = tensors(device, torch.float32, bias=False)
    none = torch.full_like(experts, E)
    out, offsets = whole((x, none, prob, *weights))
    dprob, dw1 = torch.autograd.grad(out.sum(), (prob, weights[0][0]))
    assert not offsets.any() and not out.any() and not dprob.any() and not dw1.any()


@pytest.mark.parametrize("learns", range(6))
def test_only_what_learns_has_a_gradient(device, learns):
    given = tensors(device, torch.bfloat16)
    want = torch.autograd.grad(whole(given)[0].sum(), leaves(given))
    frozen = [[t.detach() for t in part] if isinstance(part, list) else part.detach()
              for part in given]
    own = leaves(frozen)[learns].requires_grad_()
    assert torch.equal(torch.autograd.grad(whole(frozen)[0].sum(), own)[0], want[learns])


def test_keeps_x_and_not_its_rows(device):
    """Memory of a training forward: the rows of x would be top_k times x."""
    given = tensors(device, torch.bfloat16, tokens=512, bias=False)
    rows = given[0].numel() * TOP_K * 2
    kept = {keep: kept_bytes(lambda: whole(given, keep_rows=keep)) for keep in (False, True)}
    assert kept[True] - kept[False] >= rows - given[0].numel() * 2


QUANTISED = ["fp8_block,pinned", "fp8_tensor,pinned", "mxfp8", "nvfp4", "bf16,wgrad=mxfp8"]


@pytest.mark.parametrize("recipe", QUANTISED)
def test_no_recipe_keeps_more_than_bf16(device, recipe):
    """Tokens are quantised along rows again in backward, which gives the codes of forward."""
    given = tensors(device, torch.bfloat16, tokens=512, bias=False)
    logits = draw(512, E, device=device, grad=True)
    layers = {"routed": lambda **how: whole(given, **how)[0],
              "moe": lambda **how: OPS.moe(given[0], logits, TOP_K, None, *given[3:], **how)[0]}
    for call in layers.values():
        kept = {}
        for name, how in (("bf16", {}), (recipe, dict(recipe=recipe))):
            tensors_of = {}
            with torch.autograd.graph.saved_tensors_hooks(
                    lambda t: tensors_of.setdefault(t.data_ptr(), t), lambda t: t):
                call(**how)
            kept[name] = sum(t.nbytes for t in tensors_of.values())
        assert abs(kept[recipe] - kept["bf16"]) <= 64  # a seed, or an alignment
        learning = [given[0], given[3][0], given[5][0]]
        torch.manual_seed(1)
        again = torch.autograd.grad(call(recipe=recipe).float().square().sum(), learning)
        torch.manual_seed(1)
        codes = torch.autograd.grad(
            call(recipe=recipe, keep_rows=True).float().square().sum(), learning)
        assert all(map(torch.equal, again, codes))


def test_backward_makes_no_zeros_of_what_was_saved(device):
    given = tensors(device, torch.bfloat16)
    where = torch.tensor([0, 2, 4, 9, 9, 12, 20, 21, T], dtype=torch.int32, device=device)
    rows = given[0], where, torch.rand(T, device=device)
    for out, _, saved in (
            OPS.routed_experts(*given[:3], E, *given[3:]),
            (*(mlp := OPS.grouped_mlp(*rows, *given[3:], rows[2])), mlp[1])):
        dout = torch.ones_like(out)
        with torch.profiler.profile(record_shapes=True) as seen:
            out.backward(dout)
        made = [e.input_shapes for e in seen.events() if e.name in ("aten::zero_", "aten::fill_")]
        assert [saved.numel()] not in [shape[0] for shape in made if shape]


def test_nothing_flows_back_where_nothing_comes(device):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return None

    given = tensors(device, torch.float32)
    gradients = torch.autograd.grad(Nothing.apply(whole(given)[0]).sum(), leaves(given),
                                    allow_unused=True)
    assert all(g is None for g in gradients)


def test_takes_choices_that_lie_with_gaps(device):
    x, experts, prob, *weights = tensors(device, torch.bfloat16)
    wide = torch.zeros(T, 2 * TOP_K, device=device)
    wide[:, ::2] = prob.detach()
    got = OPS.routed_experts(x, experts.t().contiguous().t(), wide[:, ::2], E, *weights)[0]
    assert torch.equal(got, whole((x, experts, prob, *weights))[0])


@pytest.mark.parametrize("recipe", ["", "mxfp8", "nvfp4"])
def test_memory_is_enough_whatever_learns(device, recipe):
    """And fake tensors tell how much."""
    for tokens, learns in product((0, 1, 63, 700), (*range(6), None)):
        given = [[t.detach() for t in part] if isinstance(part, list) else part.detach()
                 for part in tensors(device, torch.bfloat16, tokens=tokens)]
        own = leaves(given) if learns is None else leaves(given)[learns:learns + 1]
        for t in own:
            t.requires_grad_()
        for keep_rows in (False, True):
            out = OPS.routed_experts(*given[:3], E, *given[3:], recipe=recipe, keep_rows=keep_rows)
            torch.autograd.grad(out[0].sum(), own)
            with FakeTensorMode() as mode:
                fake = tree_map_only(torch.Tensor, mode.from_tensor, given)
                told = OPS.routed_experts(*fake[:3], E, *fake[3:], recipe=recipe,
                                          keep_rows=keep_rows)
            assert [(t.shape, t.dtype) for t in told] == [(t.shape, t.dtype) for t in out]


@pytest.fixture
def filled_memory():
    """New memory has known bytes, so that what nobody reads can be compared."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_opcheck(device, filled_memory):
    x, experts, prob, *weights = tensors(device, torch.float32)
    opcheck(OPS.routed_experts.default, (x, experts, prob, E, *weights))
    out, offsets, saved = OPS.routed_experts(x.detach(), experts, prob.detach(), E, *weights,
                                             wants=[True] * 5)
    opcheck(OPS.routed_experts_backward.default,
            (draw(T, H).to(device), x.detach(), offsets, saved.detach(), TOP_K,
             *[[t.detach() for t in one] for one in weights]),
            test_utils=["test_schema", "test_faketensor"])


def test_compiles_with_any_number_of_tokens(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: whole(given)[0], fullgraph=True, dynamic=True,
                             backend="aot_eager")
    for tokens in (5, 40, 23):
        given = tensors(device, torch.bfloat16, tokens=tokens)
        got, want = compiled(*given), whole(given)[0]
        assert torch.equal(got, want)
        assert all(map(torch.equal, *(torch.autograd.grad(o.square().sum(), leaves(given))
                                      for o in (got, want))))


def test_autocast_casts_all_but_prob(device):
    given = tensors(device, torch.float32)
    half = [[t.bfloat16() for t in part] if isinstance(part, list) else part for part in given]
    half[0] = half[0].bfloat16()
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        got = whole(given)[0]
    assert got.dtype == torch.bfloat16 and torch.equal(got, whole(half)[0])


def test_has_no_second_derivatives(device):
    given = tensors(device, torch.float32)
    gradient, = torch.autograd.grad(whole(given)[0].sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cadre.routed_experts has no second derivatives"):
        gradient.sum().backward()
