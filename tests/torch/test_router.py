"""The product that makes a router's logits."""

import pytest
import torch
from conftest import assert_seen, draw
from torch.library import opcheck
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import cadre
from cadre.router import router_logits, tokens_and_logits

T, H, E = 50, 96, 16
U = 2.0**-23  # one step of fp32; sums in tensor cores are cut off, not rounded
HALF = 2.0**-8  # half a step of bf16, whose numbers have eight bits


def spread(*shape, device="cpu"):
    """Numbers of many sizes."""
    return draw(*shape, device=device) * torch.exp2(torch.randint(-12, 5, shape)).to(device)


def tokens(device, count=T, grad=False):
    return spread(count, H, device=device).bfloat16().requires_grad_(grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_parts_hold_all_bits_of_a_weight(device, dtype):
    """A token of one 1 gives back the weight."""
    most = 10 if dtype == torch.float16 else 100
    sizes = torch.exp2(torch.randint(-most, most, (E, H))).to(device)
    weight = ((1 + torch.rand(E, H)).to(device) * sizes).to(dtype)
    logits = router_logits(torch.eye(H, dtype=torch.bfloat16, device=device), weight)
    assert torch.equal(logits.t(), weight.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_bf16_tokens_are_as_exact_as_fp32(device, dtype):
    x, weight = tokens(device), spread(E, H, device=device).to(dtype)
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32 and logits.shape == (T, E)
    want = x.double() @ weight.double().t()
    bound = (H + 3) * U * (x.double().abs() @ weight.double().abs().t())
    assert ((logits - want).abs() <= bound).all()
    if dtype != torch.bfloat16:
        rounded = x.double() @ weight.bfloat16().double().t()
        assert ((rounded - want).abs() > bound).any()


@pytest.mark.parametrize("experts", (1, 3, 8, E, 40))
def test_logits_of_a_token_do_not_depend_on_the_others(experts, device):
    x, weight = tokens(device, 700), spread(experts, H, device=device)
    for learns in (weight, weight.bfloat16()):
        whole = router_logits(x, learns)
        for some in (slice(1), slice(3, 10), slice(64), slice(100, 613)):
            assert torch.equal(router_logits(x[some], learns), whole[some])
    assert router_logits(x[:0], weight).shape == (0, experts)


@pytest.mark.parametrize("count", [T, 1024, 2500, 40000])
def test_gradients_round_once(device, count):
    """Of many tokens too, whose sums are made in 32 stretches at most, of 1024 or more."""
    x, weight = tokens(device, count, grad=True), spread(E, H, device=device).requires_grad_()
    dlogits = spread(count, E, device=device)
    router_logits(x, weight).backward(dlogits)
    assert x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    d, xs, w = dlogits.double(), x.detach().double(), weight.detach().double()
    dx, dweight = d @ w, d.t() @ xs
    assert_seen(x.grad)
    once, twice = HALF * (1 + HALF), 2 * HALF * (1 + HALF)
    assert ((x.grad - dx).abs()
            <= (twice + E * U) * (1 + HALF) * (d.abs() @ w.abs()) + HALF * dx.abs()).all()
    assert ((weight.grad - dweight).abs() <= (once + count * U) * (d.abs().t() @ xs.abs())).all()
    for learns in (x, weight):
        given = [t if t is learns else t.detach() for t in (x, weight)]
        got, = torch.autograd.grad(router_logits(*given), [learns], dlogits)
        assert torch.equal(got, learns.grad)


def whole(*shape, most=16, device="cpu", grad=False):
    """Whole numbers, of which sums and products are exact in fp32."""
    made = torch.randint(-most, most + 1, shape).to(device)
    return made.bfloat16().requires_grad_(grad)


def laid_out(how, given):
    """The same numbers, elsewhere in memory."""
    if how == "column by column":
        return given.t().contiguous().t()
    return torch.cat([given, given], 1)[:, :H] if how == "with gaps" else given


@pytest.mark.parametrize("count", [0, T, 2500])
@pytest.mark.parametrize("how", ["as it is", "column by column", "with gaps", "one row"])
def test_gradients_of_x_meet_in_fp32(device, count, how):
    """What other readers of x make of it is added to the product, and the sum is rounded once. What
    they gave stays as it is."""
    x, weight = whole(count, H, device=device, grad=True), whole(E, H, device=device)
    dlogits = whole(count, E, device=device).float()
    other = laid_out(how, whole(count, H, most=255, device=device))
    if how == "one row" and count:
        other = other[:1].expand(count, H)
    before = other.clone()
    torch.autograd.backward(tokens_and_logits(x, weight), (other, dlogits))
    product = dlogits @ weight.float()
    assert torch.equal(x.grad, (product + before.float()).bfloat16())
    assert count == 0 or not torch.equal(x.grad, product.bfloat16() + before)
    assert torch.equal(other, before)


def test_gradients_of_x_alone(device):
    """Of either reader, where the other is not asked; and none is made for who wants none."""
    x, weight = tokens(device, grad=True), spread(E, H, device=device).requires_grad_()
    other, dlogits = tokens(device), draw(T, E, device=device)
    for given in (x, weight), (x, weight.detach()):
        same, logits = tokens_and_logits(*given)
        got = torch.autograd.grad(same, given[:1], other, retain_graph=True)
        assert torch.equal(got[0], other)
        alone, = torch.autograd.grad(logits, x, dlogits, retain_graph=True)
        assert torch.equal(alone, torch.autograd.grad(router_logits(*given), x, dlogits)[0])
        both, = torch.autograd.grad((same, logits), x, (other, dlogits))
        assert not torch.equal(both, alone) and not torch.equal(both, other)
    same, _ = tokens_and_logits(x, weight)
    assert torch.autograd.grad(same, weight, other, allow_unused=True) == (None,)
    same, logits = tokens_and_logits(x.detach(), weight)
    assert not same.requires_grad and logits.requires_grad
    want, = torch.autograd.grad(router_logits(x, weight), weight, dlogits)
    assert torch.equal(torch.autograd.grad(logits, weight, dlogits)[0], want)
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            same, logits = tokens_and_logits(x, weight)
            assert torch.equal(same, x) and torch.equal(logits, router_logits(x, weight))
            assert not same.requires_grad and not logits.requires_grad


class Operations(TorchDispatchMode):
    """The names of those that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("options", [{}, {"shared_features": 24}, {"fuse_wgrad_accumulation": True},
                                     {"fp32_router": True}])
def test_backward_of_a_layer_adds_no_gradients_of_x(device, options):
    """And a hook of x sees one."""
    layer = cadre.MoE(E, H, 32, top_k=2, device=device, dtype=torch.bfloat16, **options)
    for p in (layer.experts.w1, layer.experts.w2):
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    x, seen = tokens(device, grad=True), []
    x.register_hook(seen.append)
    out, _ = layer(x)
    with Operations() as ran:
        out.backward(tokens(device))
    adds = sum("aten.add" in name for name in ran.names)
    assert adds == (1 if options.get("fp32_router") else 0)
    assert len(seen) == 1 and torch.equal(seen[0], x.grad)
    assert_seen(x.grad)


def test_checkpoints_change_no_bit(device):
    layer = cadre.MoE(E, H, 32, top_k=2, shared_features=24, shared_gate=True, device=device,
                      dtype=torch.bfloat16)
    x, dout = tokens(device, grad=True), tokens(device)
    results = [torch.autograd.grad(run(x)[0], [x, *layer.parameters()], dout)
               for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False))]
    assert all(map(torch.equal, *results))


def test_offsets_take_one_kernel(device):
    """In backward, where the last number is cut off if the last of equal stretches is shorter;
    forward has none."""
    weight = spread(E, H, device=device).bfloat16().requires_grad_()
    for count, cuts in ((2048, 0), (2500, 1)):
        x = tokens(device, count, grad=True)
        with torch.autograd.profiler.profile() as profiled:
            logits = router_logits(x, weight)
        assert "aten::arange" not in {event.name for event in profiled.function_events}
        with torch.autograd.profiler.profile() as profiled:
            logits.sum().backward()
        names = [event.name for event in profiled.function_events]
        assert names.count("aten::clamp_max_") == cuts
        assert names.count("cadre::grouped_gemm") == 2


def test_in_fp32_the_product_is_that_of_torch(device):
    x, weight = tokens(device), spread(E, H, device=device)
    want = functional.linear(x.float(), weight)
    assert torch.equal(router_logits(x, weight, in_fp32=True), want)
    assert torch.equal(router_logits(x.float(), weight), want)
    assert torch.equal(router_logits(x, weight.double()), want)
    assert not torch.equal(router_logits(x, weight), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(device, dtype):
    other, dlogits, results = tokens(device), draw(T, E, device=device), []
    x, weight = tokens(device, grad=True), spread(E, H, device=device).requires_grad_()
    for in_fp32 in (False, True):
        for on in (False, True):
            with torch.autocast(device.type, dtype=dtype, enabled=on):
                same, logits = tokens_and_logits(x, weight, in_fp32)
                # torch's own products take part in an autocast around their backward, too
                with torch.autocast(device.type, enabled=on and not in_fp32):
                    gradients = torch.autograd.grad((same, logits), [x, weight], (other, dlogits))
            results.append((logits, *gradients))
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[2], results[3]))


def test_tokens_are_kept_as_they_are(device):
    x, weight = tokens(device, 500), spread(E, H, device=device).requires_grad_()
    for in_fp32, wanted in ((False, True), (True, False)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
            router_logits(x, weight, in_fp32)
        assert any(t is x for t in kept) == wanted
        assert (sum(t.nbytes for t in kept) < x.nbytes + 2 * weight.nbytes) == wanted


def test_a_frozen_router_keeps_no_tokens(device):
    """x is read for the weight's gradient alone; dx has the same bits."""
    x, weight = tokens(device, 500, grad=True), spread(E, H, device=device)
    other, dlogits = tokens(device, 500), draw(500, E, device=device)
    results = []
    for learns in (True, False):
        given, kept = weight.clone().requires_grad_(learns), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            made = tokens_and_logits(x, given)
        assert any(t.shape == x.shape for t in kept) == learns
        assert (sum(t.nbytes for t in kept) <= 2 * weight.nbytes) != learns
        results.append(torch.autograd.grad(made, x, (other, dlogits))[0])
    assert_seen(results[0])
    assert torch.equal(*results)


def test_a_frozen_router_within_a_layer(device):
    """And compiled, with gradients of x and of the experts."""
    layer = cadre.MoE(E, H, 32, top_k=2, device=device, dtype=torch.bfloat16)
    layer.router.requires_grad_(False)
    x, dout = tokens(device, grad=True), tokens(device)
    learn = [x, *(p for p in layer.parameters() if p.requires_grad)]
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    got = [torch.autograd.grad(run(x)[0], learn, dout) for run in (layer, compiled)]
    layer.router.requires_grad_(True)
    want = torch.autograd.grad(layer(x)[0], learn, dout)
    assert all(map(torch.equal, want, got[0])) and all(map(torch.equal, want, got[1]))


def test_compiled(device):
    def reads_x_twice(x, weight):
        same, logits = tokens_and_logits(x, weight)
        return same.neg(), logits

    weight = spread(E, H, device=device).requires_grad_()
    for reads in (reads_x_twice, lambda x, weight: (router_logits(x, weight),)):
        torch.compiler.reset()
        compiled = torch.compile(reads, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for count in (20, 7, 33):
                x = tokens(device, count, grad=True)
                douts = (tokens(device, count), draw(count, E, device=device))
                results = [(*(y := run(x, weight)), *torch.autograd.grad(
                    y, [x, weight], douts[-len(y):])) for run in (reads, compiled)]
                assert all(map(torch.equal, *results))


def test_opcheck(device):
    weight, dlogits = draw(E, H, device=device, grad=True), draw(T, E, device=device)
    x = tokens(device)
    for w in (weight, weight.detach().bfloat16()):
        opcheck(torch.ops.cadre._router_logits.default, (x, w.detach()))
        opcheck(torch.ops.cadre._router.default, (x.clone().requires_grad_(), w),
                test_utils=["test_schema", "test_autograd_registration", "test_faketensor"])
        for wants in ([True, True], [True, False], [False, True]):
            for other in (None, tokens(device)):
                opcheck(torch.ops.cadre._router_logits_backward.default,
                        (dlogits, x, w.detach(), other, wants))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_loss_behind_a_checkpoint_has_a_gradient_or_is_an_error(device, reentrant):
    """A reentrant one sees no tensor of a RouterOutput, and would leave it without a gradient."""
    moe = cadre.MoE(4, 16, 8, top_k=2, device=device)
    x = torch.randn(10, 16, device=device, requires_grad=True)
    _, decided = checkpoint(moe, x, use_reentrant=reentrant)
    if reentrant:
        words = ("scores are of a reentrant checkpoint, which gives them no gradient, must be of "
                 "one with use_reentrant=False; or compute the loss inside")
        with pytest.raises(ValueError, match=words):
            decided.load_balancing_loss()
        with torch.no_grad():
            assert decided.load_balancing_loss() > 0
        return
    decided.load_balancing_loss().backward()
    checkpointed = moe.router.grad
    moe.router.grad = None
    moe(x)[1].load_balancing_loss().backward()
    assert checkpointed.any() and torch.equal(checkpointed, moe.router.grad)


def test_a_loss_of_what_a_checkpoint_only_passes_on_has_a_gradient(device):
    moe = cadre.MoE(4, 16, 8, top_k=2, device=device)
    x = torch.randn(10, 16, device=device, requires_grad=True)
    _, decided = moe(x)
    checkpoint(lambda x: (2 * x, tuple(decided)), x, use_reentrant=True)
    decided.load_balancing_loss().backward()
    assert moe.router.grad.any()
