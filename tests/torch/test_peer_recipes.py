"""Options of recipe objects of TransformerEngine: each has words here or is refused by its name."""

from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import draw
from linear_reference import module

import cadre
from cadre.recipe import recipe_text

COUNTS = [3, 0, 9, 1, 4]
METHODS = {"mxfp8": "mxfp8", "nvfp4": "nvfp4", "float8_block_scaling": "fp8_block",
           "float8_current_scaling": "fp8_tensor"}
Format = Enum("Format", ["E2M1", "E4M3", "E5M2", "HYBRID"])


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


FIELDS = {
    "fp8_tensor": {"use_power_2_scales": False, "fp8_format": Format.HYBRID},
    "fp8_block": {"use_f32_scales": False, "fp8_format": Format.E4M3, "x_block_scaling_dim": 1,
                  "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1},
    "mxfp8": {"margin": 0, "fp8_format": Format.E4M3, "enable_2d_quantization": False},
    "nvfp4": {"disable_rht": False, "disable_stochastic_rounding": False,
              "disable_2d_quantization": False, "row_scaled_activation": False,
              "nvfp4_4over6": "none", "nvfp4_4over6_err_mode": "MAE", "fp4_format": Format.E2M1,
              "fp8_format": Format.E4M3},
}
EVERY = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None, "quantize_forward": True,
         "quantize_backward": True, "new_knob": 0}


def peer(name: str, **options: Any) -> Any:
    """A recipe object as TransformerEngine makes it: a dataclass with methods."""
    says = {method: lambda self, mine=words == name: mine for method, words in METHODS.items()}
    says |= {"delayed": lambda self: False, "custom": lambda self: False}
    kind = make_dataclass("PeerRecipe", [(option, Any, field(default=value)) for option, value in
                                         (FIELDS[name] | EVERY).items()], namespace=says)
    known = {o: value for o, value in options.items() if "_quant_" not in o}
    made = kind(**known)
    for option in options.keys() - known.keys():
        setattr(made, option, options[option])
    return made


@pytest.mark.parametrize(("name", "options", "words"), [
    *((name, {}, "") for name in FIELDS),
    ("fp8_tensor", {"fp8_format": Format.E4M3},
     "dgrad=fp8_tensor*fp8_tensor,wgrad=fp8_tensor*fp8_tensor"),
    ("fp8_tensor", {"use_power_2_scales": True},
     "fprop=fp8_tensor:pow2*fp8_tensor:pow2,dgrad=fp8_tensor:e5m2+pow2*fp8_tensor:pow2,"
     "wgrad=fp8_tensor:e5m2+pow2*fp8_tensor:pow2"),
    ("fp8_tensor", {"fp8_quant_fwd_inp": QParams(power_2_scale=True)},
     "fprop=fp8_tensor:pow2*fp8_tensor,wgrad=fp8_tensor:e5m2*fp8_tensor:pow2"),
    ("fp8_block", {"fp8_format": Format.HYBRID},
     "dgrad=fp8_block:e5m2*fp8_block:2d,wgrad=fp8_block:e5m2*fp8_block"),
    ("fp8_block", {"use_f32_scales": True},
     "fprop=fp8_block:fp32*fp8_block:2d+fp32,dgrad=fp8_block:fp32*fp8_block:2d+fp32,"
     "wgrad=fp8_block:fp32*fp8_block:fp32"),
    ("fp8_block", {"w_block_scaling_dim": 1, "grad_block_scaling_dim": 2},
     "fprop=fp8_block*fp8_block,dgrad=fp8_block:2d*fp8_block,wgrad=fp8_block:2d*fp8_block"),
    ("fp8_block", {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1},
     "fprop=fp8_block:2d*fp8_block,dgrad=fp8_block*fp8_block,wgrad=fp8_block*fp8_block:2d"),
    ("mxfp8", {"fp8_format": Format.HYBRID}, "dgrad=mxfp8:e5m2*mxfp8,wgrad=mxfp8:e5m2*mxfp8"),
    ("mxfp8", {"enable_2d_quantization": True}, "fprop=mxfp8*mxfp8:2d,dgrad=mxfp8*mxfp8:2d"),
    ("nvfp4", {"disable_rht": True}, "wgrad=nvfp4:sr*nvfp4"),
    ("nvfp4", {"disable_stochastic_rounding": True},
     "dgrad=nvfp4*nvfp4:2d,wgrad=nvfp4:rht*nvfp4:rht"),
    ("nvfp4", {"disable_2d_quantization": True}, "fprop=nvfp4*nvfp4,dgrad=nvfp4:sr*nvfp4"),
    ("nvfp4", {f"fp4_quant_{which}": QParams() for which in ("fwd_inp", "fwd_weight", "bwd_grad")},
     "fprop=nvfp4*nvfp4,dgrad=nvfp4*nvfp4,wgrad=nvfp4*nvfp4"),
    ("mxfp8", {"backward_override": "high_precision"}, "dgrad=input,wgrad=input"),
    ("nvfp4", {"quantize_backward": False}, "dgrad=input,wgrad=input"),
    ("fp8_tensor", {"quantize_forward": False}, "fprop=input"),
    ("mxfp8", {"fp8_dpa": True, "fp8_mha": True}, ""),
])
def test_options_that_have_words(name, options, words):
    text = recipe_text(peer(name, **options))
    assert text == ",".join([name, words] if words else [name])
    layer = module("cpu", k=64, n=96, dtype=torch.bfloat16)
    x = draw(17, 64, dtype=torch.bfloat16, grad=True)
    with cadre.autocast(recipe=text):
        layer(x, COUNTS).square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_objects_without_options():
    says = {method: lambda: False for method in METHODS}
    for method, name in METHODS.items():
        assert recipe_text(SimpleNamespace(**says | {method: lambda: True})) == name


@pytest.mark.parametrize(("name", "options", "text"), [
    ("mxfp8", {"backward_override": "dequantized"},
     "backward_override of PeerRecipe is 'dequantized', must be None or 'high_precision'; "),
    ("mxfp8", {"fp8_format": Format.E5M2}, "fp8_format of .* is E5M2, must be E4M3 or HYBRID"),
    ("mxfp8", {"margin": 1}, "margin of PeerRecipe is 1, must be 0; Cadre has no such option"),
    ("nvfp4", {"fp8_format": Format.HYBRID}, "fp8_format of .* is HYBRID, must be E4M3"),
    ("nvfp4", {"fp4_format": Format.E4M3}, "fp4_format of .* is E4M3, must be E2M1"),
    ("nvfp4", {"row_scaled_activation": True}, "row_scaled_activation of .* is True, must be Fals"),
    ("nvfp4", {"nvfp4_4over6": "all"}, "nvfp4_4over6 of .* is 'all', must be 'none'"),
    ("nvfp4", {"new_knob": 3}, "new_knob of .* is 3, must be 0; Cadre has no such option"),
    ("fp8_block", {"w_block_scaling_dim": 3}, "w_block_scaling_dim of .* is 3, must be 1 or 2"),
    ("fp8_tensor", {"fp8_quant_bwd_grad": QParams(amax_epsilon=0.5)},
     "fp8_quant_bwd_grad.amax_epsilon of .* is 0.5, must be 0"),
    ("nvfp4", {"fp4_quant_fwd_inp": QParams(stochastic_rounding=True)},
     "fp4_quant_fwd_inp.stochastic_rounding of .* is True, must be False"),
    ("nvfp4", {"fp4_quant_fwd_inp": QParams()},
     "fp4_quant_fwd_inp.random_hadamard_transform of .* is False, must be True; wgrad transforms"),
])
def test_options_that_are_refused_by_name(name, options, text):
    with pytest.raises(NotImplementedError, match=f"^recipe:? {text}"):
        cadre.autocast(recipe=peer(name, **options))


def test_quantizers_of_the_caller_are_refused():
    with pytest.raises(NotImplementedError, match="qfactory of SimpleNamespace is a quantizer of"):
        recipe_text(SimpleNamespace(custom=lambda: True, nvfp4=lambda: False))


LAYERS = {
    "linear": lambda: cadre.GroupedLinear(5, 64, 64, device="cpu", bias=False),
    "mlp": lambda: cadre.GroupedMLP(5, 64, 32, device="cpu"),
    "row": lambda: cadre.ops.Sequential(cadre.ops.GroupedLinear(5, 64, 64, device="cpu"))}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(LAYERS))
def test_backward_in_high_precision(name, dtype, autocast):
    """The gradient of x has the bits of a layer that quantises in forward only, in its own type."""
    layer, x = LAYERS[name]().to(dtype), draw(17, 64, dtype=dtype)
    own = torch.bfloat16 if autocast else dtype
    word = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[own]
    grads = []
    for recipe in (peer("mxfp8", backward_override="high_precision"),
                   f"mxfp8,dgrad={word},wgrad={word}", "mxfp8"):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), cadre.autocast(recipe=recipe):
            layer(leaf, COUNTS).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])


def test_a_recipe_is_not_whether_there_is_one():
    """The first argument of autocast is TransformerEngine's `enabled`."""
    with pytest.raises(TypeError, match="^enabled is 'nvfp4', must be a bool; write recipe='nvfp4"):
        cadre.autocast("nvfp4")
    with pytest.raises(TypeError, match="^calibrating is 'nvfp4', must be a bool; write recipe="):
        cadre.autocast(True, "nvfp4")
    assert cadre.autocast(False, recipe="nvfp4").recipe == ""


def test_the_signature_of_the_peer():
    """Of autocast and of what it was called before."""
    recipe, group = peer("nvfp4"), object()
    for made in (cadre.autocast(True, False, recipe, group), cadre.autocast(recipe=recipe),
                 cadre.autocast(amax_reduction_group=group, recipe=recipe, calibrating=False),
                 cadre.fp8_autocast(True, False, recipe, group, False),
                 cadre.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)):
        assert made.recipe == "nvfp4"
    assert cadre.autocast().recipe == cadre.fp8_autocast(True, fp8_group=group).recipe == "mxfp8"
    with pytest.raises(NotImplementedError, match="^calibrating is True, must be False; it collec"):
        cadre.autocast(False, True)
    with pytest.raises(ValueError, match="^fp8_recipe is 'nvfp4', must be left out; recipe is"):
        cadre.autocast(recipe="mxfp8", fp8_recipe="nvfp4")
