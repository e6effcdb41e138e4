"""Where the parameters and buffers of modules go that are given no device, and what recipes compute
on a GPU."""

import pytest
import torch
from conftest import draw

import cadre

MODULES = {
    "linear": lambda **given: cadre.GroupedLinear(3, 16, 8, **given),
    "packed": lambda **given: cadre.GroupedLinear(3, 16, 8, single_grouped_weight=True, **given),
    "operation": lambda **given: cadre.ops.GroupedLinear(3, 16, 8, **given),
    "mlp": lambda **given: cadre.GroupedMLP(3, 16, 8, bias=True, **given),
    "moe": lambda **given: cadre.MoE(3, 16, 8, top_k=2, expert_bias=True, bias=True, **given)}


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
        moe = cadre.MoE(3, 16, 8, top_k=2, expert_bias=True)
    moe.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(moe(torch.randn(5, 16))[0]).all()


COUNTS = [3, 0, 9, 1, 4]
EXPERT_LAYERS = {
    "linear": lambda recipe: cadre.GroupedLinear(5, 64, 96, params_dtype=torch.bfloat16,
                                                 recipe=recipe, device="cpu"),
    "mlp": lambda recipe: cadre.GroupedMLP(5, 64, 96, dtype=torch.bfloat16, bias=True,
                                           recipe=recipe, device="cpu"),
}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4",
                                    "fp8_block,wgrad=bf16", "nvfp4,wgrad=bf16"])
@pytest.mark.parametrize("kind", list(EXPERT_LAYERS))
def test_recipes_on_a_gpu_are_near_those_of_the_cpu(device, kind, recipe):
    """Codes are the same to the bit; sums are not, and move a few codes behind the first layer.
    Gradients in nvfp4 are rounded by random bits, which each device draws for itself."""
    if device.type == "cpu":
        pytest.skip("it is what others are compared with")
    layer = EXPERT_LAYERS[kind](recipe)
    x = draw(17, 64, dtype=torch.bfloat16)

    def step(layer, x):
        layer.zero_grad()
        x = x.detach().requires_grad_()
        y = layer(x, COUNTS)
        y.float().square().sum().backward()
        return [t.cpu().double() for t in (y, x.grad, *(p.grad for p in layer.parameters()))]

    want = step(layer, x)
    got = step(layer.to(device), x.to(device))
    for i, (a, b) in enumerate(zip(got, want)):
        most = 0.25 if i > 0 and "nvfp4" in recipe else 2**-6
        assert (a - b).norm() <= most * b.norm(), i
