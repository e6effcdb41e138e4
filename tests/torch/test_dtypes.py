"""Types that layers do not take: a TypeError that names the caller's argument."""

import pytest
import torch

import cadre

COUNTS = [2, 2, 2]
LAYERS = {
    "inp": lambda: cadre.GroupedLinear(3, 16, 8, device="cpu"),
    "input": lambda: cadre.ops.GroupedLinear(3, 16, 8, device="cpu"),
    "x": lambda: cadre.GroupedMLP(3, 16, 8, device="cpu")}
CONSTRUCTORS = {
    "params_dtype": lambda dtype: cadre.GroupedLinear(3, 16, 8, device="cpu", params_dtype=dtype),
    "dtype": lambda dtype: cadre.GroupedMLP(3, 16, 8, device="cpu", dtype=dtype),
    "dtype of an operation": lambda dtype: cadre.ops.GroupedLinear(3, 16, 8, dtype=dtype),
    "dtype of experts": lambda dtype: cadre.MoE(3, 16, 8, top_k=2, device="cpu", dtype=dtype)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", list(LAYERS))
def test_rows_of_another_type(name, dtype):
    text = f"^{name} is {dtype}, must be torch.float32, torch.bfloat16 or torch.float16$"
    with pytest.raises(TypeError, match=text):
        LAYERS[name]()(torch.ones(6, 16).to(dtype), COUNTS)
    if name == "x":
        with pytest.raises(TypeError, match=text):
            cadre.MoE(3, 16, 8, top_k=2, device="cpu")(torch.ones(6, 16).to(dtype))
    if name == "input":
        row = cadre.ops.Sequential(LAYERS[name](), cadre.ops.SReLU(),
                                   cadre.ops.GroupedLinear(3, 8, 4, device="cpu"))
        with pytest.raises(TypeError, match=text):
            row(torch.ones(6, 16).to(dtype), COUNTS, COUNTS)


@pytest.mark.parametrize("name", list(LAYERS))
def test_rows_that_are_no_tensor(name):
    with pytest.raises(TypeError, match=f"^{name} is a list, must be a tensor$"):
        LAYERS[name]()([[1.0] * 16], COUNTS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
@pytest.mark.parametrize("name", list(CONSTRUCTORS))
def test_parameters_of_another_type(name, dtype):
    with pytest.raises(TypeError, match=f"^{name.split()[0]} is {dtype}, must be torch.float32"):
        CONSTRUCTORS[name](dtype)


@pytest.mark.parametrize("size", [3.0, "3", None])
def test_sizes_that_are_no_integers(size):
    kind = type(size).__name__
    with pytest.raises(TypeError, match=f"num_gemms is a {kind}, must be an int"):
        cadre.GroupedLinear(size, 16, 8, device="cpu")
    with pytest.raises(TypeError, match=f"num_experts is a {kind}, must be an int"):
        cadre.GroupedMLP(size, 16, 8, device="cpu")


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
def test_buffers_of_another_type(name):
    buffer = torch.empty(6, 16, dtype=torch.bfloat16)
    layer = cadre.GroupedLinear(3, 16, 16, device="cpu")
    with pytest.raises(TypeError, match=f"{name} is torch.bfloat16, must be torch.float32"):
        layer(torch.ones(6, 16), COUNTS, **{name: buffer})
