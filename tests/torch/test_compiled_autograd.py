"""Layers whose backward torch compiles, by compiled autograd: the gradients of plain autograd."""

import pytest
import torch
from conftest import draw
from linear_reference import module

import cadre

E, H, F, TOP_K, T = 4, 32, 48, 2, 9
COUNTS = [4, 0, 3, 2]


class Routed(cadre.GroupedMLP):
    """As the experts of a Hugging Face model are called."""

    def forward(self, x):
        experts = torch.arange(T * TOP_K, device=x.device).view(T, TOP_K) % E
        prob = torch.full((T, TOP_K), 0.5, device=x.device)
        return torch.ops.cadre.routed_experts(
            x, experts, prob, E, [self.w1], [], [self.w2], [])[0]


MAKE = {
    "linear": lambda dtype, device, **options: module(
        device, E, H, F, dtype=dtype, **options),
    "mlp": lambda dtype, device, **options: cadre.GroupedMLP(
        E, H, F, dtype=dtype, device=device, **options),
    "moe": lambda dtype, device, **options: cadre.MoE(
        E, H, F, top_k=TOP_K, shared_features=F, dtype=dtype, device=device, **options),
    "routed": lambda dtype, device: Routed(E, H, F, dtype=dtype, device=device),
}


def gradients(layer, x):
    y = layer(x) if isinstance(layer, (cadre.MoE, Routed)) else layer(x, COUNTS)
    (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    learning = [*layer.parameters(), *([x] if x.requires_grad else [])]
    grads = [t.grad for t in learning]
    for t in learning:
        t.grad = None
    return grads


@pytest.mark.parametrize("which, options", [
    *((which, {}) for which in MAKE), ("linear", {"recipe": "mxfp8"}), ("mlp", {"recipe": "mxfp8"}),
    ("moe", {"recipe": "mxfp8"})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_learns", [True, False])
def test_gradients_are_those_of_plain_autograd(device, which, options, dtype, x_learns):
    layer = MAKE[which](dtype, device, **options)
    x = draw(T, H, dtype=dtype, device=device, grad=x_learns)
    want = gradients(layer, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        got = gradients(layer, x)
    assert all(g is not None for g in want)
    assert all(map(torch.equal, got, want))
