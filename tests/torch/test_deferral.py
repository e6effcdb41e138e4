"""Gradients that are left to backward_dw: whoever waits for them in backward is told."""

import copy
import pickle

import pytest
import torch
from conftest import draw, offsets_of
from torch.nn.utils import parametrizations, prune

import cadre

E, H, F, R = 3, 16, 8, 6
COUNTS = [3, 1, 2]


def linear(device, **options):
    return cadre.GroupedLinear(E, H, F, device=device, delay_wgrad_compute=True, **options)


def mlp(device):
    return cadre.GroupedMLP(E, H, F, device=device, delay_wgrad_compute=True)


def moe(device):
    return cadre.MoE(E, H, F, top_k=2, device=device, delay_wgrad_compute=True)


def tokens(layer):
    return draw(R, H, device=next(layer.parameters()).device)


def learn(layer):
    layer(tokens(layer), COUNTS).square().sum().backward()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight(device, register):
    for layer, name in ((linear(device), "weight1"), (mlp(device), "w2")):
        handle = getattr(getattr(layer, name), register)(lambda grad: None)
        with pytest.raises(ValueError, match=f"^{name} has hooks, must have none with delay_wgrad"):
            learn(layer)
        with torch.no_grad():
            layer(tokens(layer), COUNTS)
        handle.remove()
        learn(layer)
        layer.backward_dw()
        assert getattr(layer, name).grad is not None


def test_weights_that_are_computed(device):
    pruned = linear(device)
    prune.random_unstructured(pruned, "weight0", 0.5)
    normed = linear(device, single_grouped_weight=True)
    parametrizations.weight_norm(normed, "weight")
    for layer, name in ((pruned, "weight0"), (normed, "weight")):
        with pytest.raises(ValueError, match=f"^{name} is computed from other tensors, must be a"):
            learn(layer)
    plain = mlp(device)
    leaf = plain.w1.detach().clone().requires_grad_()
    with pytest.raises(ValueError, match="^w1 is computed"):
        torch.func.functional_call(plain, {"w1": leaf * 2}, (tokens(plain), COUNTS))
    y = torch.func.functional_call(plain, {"w1": leaf}, (tokens(plain), COUNTS))
    y.sum().backward()
    plain.backward_dw()
    assert leaf.grad is not None and plain.w1.grad is None


@pytest.mark.parametrize("make", [linear, mlp])
def test_offsets_that_change_while_a_gradient_is_pending(device, make):
    layer = make(device)
    offsets = cadre.Offsets(offsets_of(COUNTS, device))
    layer(tokens(layer), offsets).sum().backward()
    offsets.offsets.copy_(offsets_of([1, 1, 4], device))
    with pytest.raises(RuntimeError, match="^backward_dw: version of offsets is 1, must be 0"):
        layer.backward_dw()
    layer.discard_wgrad()


def marked(layer):
    return {name for name, p in layer.named_parameters() if hasattr(p, "skip_backward_post_hook")}


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy,
                                    lambda layer: pickle.loads(pickle.dumps(layer)),
                                    lambda layer: copy.deepcopy(copy.deepcopy(layer)).bfloat16()])
@pytest.mark.parametrize("make", [linear, mlp, moe])
def test_copies_are_marked_as_the_layer_is(device, make, copied):
    """`Parameter.__deepcopy__` drops what was said of a parameter."""
    layer = make(device)
    assert len(marked(layer)) == (6 if make is linear else 2)
    assert marked(copied(layer)) == marked(layer)
    assert not marked(copied(cadre.GroupedMLP(E, H, F, device=device)))


def test_a_moe_does_what_its_experts_do(device):
    layer, plain = moe(device), cadre.MoE(E, H, F, top_k=2, device=device)
    assert layer.need_backward_dw() and not plain.need_backward_dw()
    said = []
    register = "register_wgrad_accumulation_and_reduce_hooks"
    for module in layer.modules():  # as trainers look for those that take hooks
        if hasattr(module, register):
            getattr(module, register)(lambda: said.append("computed"))
    layer(tokens(layer))[0].sum().backward()
    layer.discard_wgrad()
    layer.backward_dw()
    assert layer.experts.w1.grad is None and not said
    layer(tokens(layer))[0].sum().backward()
    layer.backward_dw()
    assert layer.experts.w1.grad is not None and said == ["computed"]
