"""torch.autocast: gradients of weights are those of its copies, in the weights' own type."""

import pytest
import torch
from conftest import DEVICES

import cadre

E, R, H, F = 3, 24, 32, 16
LAYERS = {
    "grouped_linear": lambda **k: cadre.GroupedLinear(E, H, F, **k),
    "grouped_mlp": lambda **k: cadre.GroupedMLP(E, H, F, **k),
    "moe": lambda **k: cadre.MoE(E, H, F, top_k=2, **k),
    "shared": lambda **k: cadre.MoE(E, H, F, top_k=2, shared_features=8, shared_gate=True, **k)}


def run(layer, x, dtype=torch.bfloat16, **options):
    x = x.clone().requires_grad_()
    given = () if hasattr(layer, "router") else ([8, 6, 10],)
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        y = layer(x, *given, **options)
        y = y[0] if isinstance(y, tuple) else y
    y.float().square().sum().backward()
    return {name: p.grad for name, p in layer.named_parameters()} | {"x": x.grad, "y": y.detach()}


def same_weights(layer, copy):
    copy.load_state_dict(layer.state_dict())
    return copy


@pytest.mark.parametrize("recipe", ["", "mxfp8"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_weights_are_not_rounded(device, name, recipe):
    torch.manual_seed(1)
    layer = LAYERS[name](device=device, recipe=recipe or None)
    x = torch.randn(R, H, device=device).bfloat16().float()
    found = run(layer, x)
    # In bf16 they are rounded once, and so is what is compared.
    rounded = same_weights(layer, LAYERS[name](device=device, recipe=recipe or None))
    for parameter_name, parameter in rounded.named_parameters():
        if "router" not in parameter_name and "gate" not in parameter_name:
            parameter.data = parameter.data.bfloat16()
    want = run(rounded, x.bfloat16(), None)
    for parameter_name, parameter in layer.named_parameters():
        got, expected = found[parameter_name], want[parameter_name]
        if parameter.dim() >= 2 and expected.dtype == torch.bfloat16:
            assert got.dtype == torch.float32 and torch.equal(got.bfloat16(), expected)
            assert not torch.equal(got, expected.float()), parameter_name
    assert torch.equal(found["y"], want["y"])
    if name.startswith("grouped"):  # a router's part of dx is added in the type of x
        assert torch.equal(found["x"].bfloat16(), want["x"])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device, name):
    torch.manual_seed(2)
    layer = LAYERS[name](device=device)
    x = torch.randn(R, H, device=device)
    want = run(layer, x)
    layer.zero_grad()
    got = run(torch.compile(layer, backend="aot_eager"), x)
    for parameter, gradient in want.items():
        found = got.get(parameter, got.get("_orig_mod." + parameter))
        if hasattr(layer, "router") and parameter in ("router", "x"):
            continue  # torch multiplies these gradients, in another type when compiled
        assert torch.equal(found, gradient) and found.dtype == gradient.dtype, parameter


@pytest.mark.parametrize("options", [dict(is_first_microbatch=True), dict(out=True)])
def test_options_change_no_bit(options):
    torch.manual_seed(3)
    layer = cadre.GroupedLinear(E, H, F, bias=False, device="cpu", recipe="mxfp8")
    x = torch.randn(R, H)
    want = run(layer, x)
    layer.zero_grad()
    if "out" in options:
        options = dict(out=torch.empty(R, F, dtype=torch.bfloat16))
    got = run(layer, x, **options)
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_lie_apart_and_are_partly_frozen(device):
    torch.manual_seed(4)
    layer = cadre.GroupedLinear(E, H, F, device=device)
    layer.weight1.requires_grad_(False)
    x = torch.randn(R, H, device=device)
    got = run(layer, x)
    assert got["weight1"] is None and got["weight0"].dtype == torch.float32
    layer.zero_grad()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert torch.equal(layer(x, [8, 6, 10]), got["y"])


def test_a_graph_that_is_kept():
    torch.manual_seed(5)
    layer = cadre.MoE(E, H, F, top_k=2, device="cpu")
    x = torch.randn(R, H)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(x)[0].float().square().sum()
    loss.backward(retain_graph=True)
    first = layer.experts.w1.grad.clone()
    layer.zero_grad()
    loss.backward()
    assert torch.equal(layer.experts.w1.grad, first)
