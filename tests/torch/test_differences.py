"""Gradients of the layers against differences of the operators, which compute in fp32."""

import torch
from conftest import draw, offsets_of

import cadre  # noqa: F401  registers the operators

OPS = torch.ops.cadre


def check(run, *inputs):
    def in_fp64(*tensors):
        return run(*(t.float() for t in tensors)).double()

    wide = [t.detach().double().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(in_fp64, wide, eps=1e-2, atol=2e-3, rtol=1e-2)


def test_linear(device):
    offsets = offsets_of([2, 0, 3], device)
    x, w, b = (draw(*s, device=device) for s in ((6, 4), (3, 5, 4), (3, 5)))
    scale = torch.rand(6).to(device)
    check(lambda x, w, b, s: OPS.grouped_linear(x, offsets, [w], [b], s)[0], x, w, b, scale)


def test_mlp(device):
    offsets = offsets_of([2, 0, 3], device)
    shapes = ((6, 4), (3, 6, 4), (3, 6), (3, 4, 3), (3, 4))
    x, w1, b1, w2, b2 = (draw(*s, device=device) for s in shapes)
    prob = torch.rand(6).to(device)
    check(lambda x, p, w1, b1, w2, b2: OPS.grouped_mlp(
        x, offsets, p, [w1], [b1], [w2], [b2], p)[0], x, prob, w1, b1, w2, b2)
