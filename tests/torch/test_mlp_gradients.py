"""GroupedMLP and MoE whose weight gradients go into main_grad, or wait for backward_dw."""

import copy
from itertools import product

import pytest
import torch
from conftest import deferred_dw, draw, offsets_of

import cadre

E, H, F, COUNTS, ROWS = 4, 32, 48, [9, 0, 5, 7], 25
OPTIONS = [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True},
           {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}]


def made(device, cls=cadre.GroupedMLP, **options):
    """A layer with the numbers that it has without options; main_grad is fp32 and not zero."""
    torch.manual_seed(5)
    choice = {"top_k": 2} if cls is cadre.MoE else {}
    layer = cls(E, H, F, device=device, bias=True, **choice, **options)
    experts = layer.experts if cls is cadre.MoE else layer
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw(*parameter.shape) / 4)
    for weight in (experts.w1, experts.w2):
        weight.main_grad = torch.full(weight.shape, 0.5, device=device)
    return layer, experts


def check(layer, experts, plain, plain_experts, options, run):
    """Both after `run`: the same bits, where they belong."""
    assert torch.equal(run(layer), run(plain))
    delayed = options.get("delay_wgrad_compute", False)
    if delayed:
        assert experts.w1.grad is None and (experts.w1.main_grad == 0.5).all()
        assert layer.backward_dw() is None
        assert not experts._memories()[0].own.pending()
    theirs = dict(plain.named_parameters())
    for name, parameter in layer.named_parameters():
        want = theirs[name].grad
        assert want.any(), name
        if name.endswith(("w1", "w2")) and "fuse_wgrad_accumulation" in options:
            assert torch.equal(parameter.main_grad, want + 0.5) and parameter.grad is None
        else:
            assert torch.equal(parameter.grad, want), name


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mlp(device, dtype, options):
    x, prob = draw(ROWS, H, dtype=dtype, device=device), torch.rand(ROWS, device=device)
    dy = draw(ROWS, H, dtype=dtype, device=device)

    def run(layer):
        leaves = [t.clone().requires_grad_() for t in (x, prob)]
        y = layer(leaves[0], COUNTS, leaves[1], prob)
        y.backward(dy)
        return torch.cat([y.float(), leaves[0].grad.float(), leaves[1].grad[:, None].expand(-1, H)])

    layer, experts = made(device, **options)
    plain, _ = made(device)
    if dtype == torch.float32:
        check(layer, experts, plain, plain, options, run)
    else:  # weights in fp32, rows in bf16
        with torch.autocast(device.type, torch.bfloat16):
            assert torch.equal(run(layer), run(plain))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("options", OPTIONS)
def test_moe(device, options, score):
    x = draw(17, H, device=device)
    words = dict(score=score, normalize=True, scale=1.5, groups=2, group_top_k=1, expert_bias=True)

    def run(layer):
        leaf = x.clone().requires_grad_()
        out, router = layer(leaf)
        (out.square().sum() + router.load_balancing_loss()).backward()
        return torch.cat([out, leaf.grad, router.prob.expand(17, 2),
                          router.tokens_per_expert.expand(17, E)], dim=1)

    layer, experts = made(device, cadre.MoE, **words, **options)
    plain, _ = made(device, cadre.MoE, **words)
    check(layer, experts, plain, plain.experts, options, run)


@pytest.mark.parametrize("keep_h", [False, True])
@pytest.mark.parametrize("biases", list(product((False, True), repeat=2)))
def test_wgrad_finds_what_forward_kept(device, biases, keep_h):
    """What that is, and where it lies, depends on all that is wanted and on the biases."""
    ops, like = torch.ops.cadre, dict(dtype=torch.bfloat16, device=device)
    x, dy, prob = draw(ROWS, H, **like), draw(ROWS, H, **like), torch.rand(ROWS, device=device)
    w1, w2 = [draw(E, 2 * F, H, **like)], [draw(E, H, F, **like)]
    b1, b2 = ([draw(E, n, **like)] if has else [] for has, n in zip(biases, (2 * F, H)))
    given, offsets = (w1, b1, w2, b2), offsets_of(COUNTS, device)
    for wants in product((False, True), repeat=6):
        if not any(wants[2:4]):
            continue
        options = dict(wants=wants, keep_h=keep_h)
        _, saved = ops.grouped_mlp(x, offsets, prob, *given, **options)
        args = dy, x, saved, offsets, prob, *given, None
        want = ops.grouped_mlp_backward(*args, **options)[2:5:2]
        pending = ops.grouped_mlp_backward(*args, deferred=True, **options)[7]
        got = deferred_dw("grouped_mlp", dy, x, saved, pending, offsets, prob, w1, w2,
                          biases=biases, **options)
        assert all(torch.equal(g[0], w[0])
                   for g, w, wanted in zip(got, want, wants[2:4]) if wanted), wants


def test_oldest_first_then_hooks(device):
    """One call for each forward and backward; hooks run after both linears."""
    layer, _ = made(device, delay_wgrad_compute=True)
    plain, _ = made(device)
    assert layer.need_backward_dw() and not plain.need_backward_dw()
    assert layer.w1.skip_backward_post_hook and layer.w2.skip_backward_post_hook
    x, seen = [draw(ROWS, H, device=device) for _ in range(2)], []
    layer.register_wgrad_accumulation_and_reduce_hooks(
        lambda: seen.append((layer.w1.grad.clone(), layer.w2.grad.clone())))
    layer.backward_dw()
    assert not seen
    for each in x:
        layer(each, COUNTS).square().sum().backward()
    for at, each in enumerate(x):
        plain(each, COUNTS).square().sum().backward()
        layer.backward_dw()
        assert len(seen) == at + 1
        assert torch.equal(seen[at][0], plain.w1.grad) and torch.equal(seen[at][1], plain.w2.grad)
    layer(x[0], COUNTS).sum().backward()
    layer.discard_wgrad()
    layer.backward_dw()
    assert len(seen) == 2


def test_copies_owe_nothing(device):
    layer, _ = made(device, delay_wgrad_compute=True)
    layer(draw(ROWS, H, device=device), COUNTS).sum().backward()
    for other in (copy.copy(layer), copy.deepcopy(layer)):
        other.backward_dw()
        assert other.w1.grad is None
    layer.backward_dw()
    assert layer.w1.grad.any()


def test_no_main_grad(device):
    layer, _ = made(device, fuse_wgrad_accumulation=True)
    del layer.w2.main_grad
    with pytest.raises(RuntimeError, match=r"^main_grad of a weight \[4, 32, 48\] is missing"):
        layer(draw(ROWS, H, device=device), COUNTS).sum().backward()


def test_compiled(device):
    layer, _ = made(device, fuse_wgrad_accumulation=True)
    plain, _ = made(device)
    x = draw(ROWS, H, device=device)
    for each, call in ((layer, torch.compile(layer, backend="eager")), (plain, plain)):
        call(x, torch.tensor(COUNTS, device=device)).square().sum().backward()
    assert torch.equal(layer.w1.main_grad, plain.w1.grad + 0.5)
