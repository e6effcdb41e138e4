"""Types that layers do not take: a TypeError that names the caller's argument."""

import inspect

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


SWITCHES = [(make, name) for make in (
    lambda **o: cadre.GroupedLinear(3, 16, 8, device="cpu", **o),
    lambda **o: cadre.ops.GroupedLinear(3, 16, 8, device="cpu", **o),
    lambda **o: cadre.GroupedMLP(3, 16, 8, device="cpu", **o),
    lambda **o: cadre.MoE(3, 16, 8, top_k=2, device="cpu", **o),
    cadre.ops.SwiGLU, cadre.ops.ClampedSwiGLU, cadre.ops.SReLU, cadre.ops.SiTUGLU,
) for name, parameter in inspect.signature(type(make()).__init__).parameters.items()
    if type(parameter.default) is bool]


@pytest.mark.parametrize(("make", "name"), SWITCHES)
def test_switches_that_are_no_bool(make, name):
    """A word such as "no" would count as True."""
    own = {"accumulate_into_main_grad": "fuse_wgrad_accumulation"}.get(name, name)
    for given in ("no", 0, None, torch.ones(3)):
        kind = type(given).__name__
        with pytest.raises(TypeError, match=f"^{own} is an? {kind}, must be a bool"):
            make(**{name: given})


def test_switches_of_functions():
    x, w, ends = torch.ones(6, 16), torch.ones(3, 16, 8), torch.tensor([2, 4, 6], dtype=torch.int32)
    with pytest.raises(TypeError, match="^accumulate is a str, must be a bool"):
        cadre.grouped_mm(x, w, offs=ends, out=torch.zeros(6, 8), accumulate="no")
    for given in (torch.zeros(6, 8), 1):  # such as `out`, one place too early
        with pytest.raises(TypeError, match="^is_first_microbatch is .*, must be a bool"):
            LAYERS["inp"]()(x, COUNTS, given)
    with pytest.raises(TypeError, match="^scale is a bool, must be a number"):
        cadre.MoE(3, 16, 8, top_k=2, device="cpu", scale=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_biases_of_another_type(dtype):
    """In each of the four forms."""
    x, w, ends = torch.ones(6, 16), torch.ones(3, 16, 8), torch.tensor([2, 4, 6], dtype=torch.int32)
    for a, b, offs, width in ((x, w, ends, 8), (w, torch.ones(8, 6), ends, 16),
                              (x.t(), torch.ones(6, 8), ends, 8), (w.mT, w, None, 8)):
        cadre.grouped_mm(a, b, offs=offs, bias=torch.ones(3, width))
        with pytest.raises(TypeError, match=f"^grouped_mm: bias is {dtype}, must be torch.float32"):
            cadre.grouped_mm(a, b, offs=offs, bias=torch.ones(3, width, dtype=dtype))


def test_losses_of_what_is_no_tensor():
    scores, counts = torch.rand(4, 3), torch.tensor([2, 1, 1])
    for given in ((None, counts), (scores, None), (scores, [2, 1, 1])):
        with pytest.raises(TypeError, match="^(scores|tokens_per_expert) is .*, must be a tensor"):
            cadre.load_balancing_loss(*given)
    with pytest.raises(ValueError, match="^tokens_per_expert is on meta, must be on cpu"):
        cadre.load_balancing_loss(scores, counts.to("meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_losses_are_fp32(dtype):
    """Of more tokens than fp16 counts, and of scores that are all zero."""
    tokens = 200_000
    scores, counts = torch.full((tokens, 2), 0.5, dtype=dtype), torch.tensor([tokens, tokens])
    scores[0] = 0
    loss = cadre.load_balancing_loss(scores, counts)
    assert loss.dtype == torch.float32 and abs(loss.item() - 1) < 1e-4


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_router_has_no_other_default(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        moe = cadre.MoE(4, 8, 8, top_k=2, dtype=torch.float32, device="cpu")
    finally:
        torch.set_default_dtype(before)
    assert moe.router.dtype == torch.float32 and moe(torch.randn(3, 8))[0].shape == (3, 8)
