"""The product that makes a router's logits."""

import pytest
import torch
from conftest import assert_seen, draw
from torch.library import opcheck
from torch.nn import functional

from cadre.router import router_logits

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


def test_logits_of_a_token_do_not_depend_on_the_others(device):
    x, weight = tokens(device, 700), spread(E, H, device=device)
    for learns in (weight, weight.bfloat16()):
        whole = router_logits(x, learns)
        for some in (slice(1), slice(3, 10), slice(64), slice(100, 613)):
            assert torch.equal(router_logits(x[some], learns), whole[some])
    assert router_logits(x[:0], weight).shape == (0, E)


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


def test_in_fp32_the_product_is_that_of_torch(device):
    x, weight = tokens(device), spread(E, H, device=device)
    want = functional.linear(x.float(), weight)
    assert torch.equal(router_logits(x, weight, in_fp32=True), want)
    assert torch.equal(router_logits(x.float(), weight), want)
    assert torch.equal(router_logits(x, weight.double()), want)
    assert not torch.equal(router_logits(x, weight), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(device, dtype):
    dlogits, results = draw(T, E, device=device), []
    x, weight = tokens(device, grad=True), spread(E, H, device=device).requires_grad_()
    for in_fp32 in (False, True):
        for on in (False, True):
            with torch.autocast(device.type, dtype=dtype, enabled=on):
                logits = router_logits(x, weight, in_fp32)
                # torch's own products take part in an autocast around their backward, too
                with torch.autocast(device.type, enabled=on and not in_fp32):
                    gradients = torch.autograd.grad(logits, [x, weight], dlogits)
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


def test_compiled(device):
    torch.compiler.reset()
    compiled = torch.compile(router_logits, backend="aot_eager", fullgraph=True, dynamic=True)
    weight = spread(E, H, device=device).requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (20, 7, 33):
            x = tokens(device, count, grad=True)
            dlogits = draw(count, E, device=device)
            results = [(y := run(x, weight), *torch.autograd.grad(y, [x, weight], dlogits))
                       for run in (router_logits, compiled)]
            assert all(map(torch.equal, *results))


def test_opcheck(device):
    weight, dlogits = draw(E, H, device=device, grad=True), draw(T, E, device=device)
    x = tokens(device)
    for w in (weight, weight.detach().bfloat16()):
        opcheck(torch.ops.cadre._router_logits.default, (x.clone().requires_grad_(), w))
        for wants in ([True, True], [True, False], [False, True]):
            opcheck(torch.ops.cadre._router_logits_backward.default,
                    (dlogits, x, w.detach(), wants))
