"""Where the parameters and buffers of modules go that are given no device."""

import pytest
import torch

import cadre

MODULES = {
    "linear": lambda **given: cadre.GroupedLinear(3, 16, 8, **given),
    "packed": lambda **given: cadre.GroupedLinear(3, 16, 8, single_grouped_weight=True, **given),
    "operation": lambda **given: cadre.ops.GroupedLinear(3, 16, 8, **given),
    "mlp": lambda **given: cadre.GroupedMLP(3, 16, 8, bias=True, **given),
    "moe": lambda **given: cadre.MoE(16, 8, 3, 2, expert_bias=True, bias=True, **given)}


@pytest.fixture(params=list(MODULES))
def make(request):
    return MODULES[request.param]


def devices_of(module):
    return {t.device.type for t in (*module.parameters(), *module.buffers())}


def test_a_context_chooses_the_device(make, device):
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    for chosen in ("meta", device.type):
        with torch.device(chosen):
            assert devices_of(make()) == {chosen}
            assert devices_of(make(device=device)) == {device.type}
    assert devices_of(make()) == {usual}


def test_the_default_device_of_torch(make, device):
    for chosen in ("meta", device.type):
        torch.set_default_device(chosen)
        try:
            made = make()
        finally:
            torch.set_default_device(None)
        assert devices_of(made) == {chosen}


def test_a_layer_made_on_meta_gets_its_memory_later():
    with torch.device("meta"):
        layer = cadre.GroupedLinear(3, 16, 8)
        layer.reset_parameters()
    assert devices_of(layer) == {"cuda" if torch.cuda.is_available() else "cpu"}
    with torch.device("meta"):
        moe = cadre.MoE(16, 8, 3, 2, expert_bias=True)
    moe.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(moe(torch.randn(5, 16))[0]).all()
