"""Recipe objects of TransformerEngine, in the words of Cadre.

An object says by a method what it is, and by its options how it differs from the named recipe. An
option has words here, or means nothing to a linear layer, or is refused unless it is at its neutral
value: none is passed over in silence.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

# The methods by which a recipe object says what it is, and what that is here.
PREDICATES = (
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("float8_block_scaling", "fp8_block"),
    ("float8_current_scaling", "fp8_tensor"),
)

# What is said of attention and of how sums are held; sums are fp32 here.
_MEANS_NOTHING = {"fp8_dpa", "fp8_mha", "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad",
                  "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"}
_HAS_WORDS = {"fp8_format", "fp4_format", "backward_override", "quantize_forward",
              "quantize_backward", "disable_rht", "disable_stochastic_rounding",
              "disable_2d_quantization", "enable_2d_quantization", "use_power_2_scales",
              "use_f32_scales", "x_block_scaling_dim", "w_block_scaling_dim",
              "grad_block_scaling_dim"}
# Defaults may come from the environment of the peer, so the neutral values are said here.
_NEUTRAL = {"margin": 0, "row_scaled_activation": False, "nvfp4_4over6": "none",
            "per_token_rht": False, "per_token_sr": False, "per_token_weight_2d": False}

_OPERANDS = {"x": "fwd_inp", "w": "fwd_weight", "dy": "bwd_grad"}


def peer_words(recipe: Any) -> str | None:
    """The words of a recipe object, such as "mxfp8" or "nvfp4,wgrad=nvfp4:sr*nvfp4"; None if it is
    no such object. "input", of a pass, is the type that the layer works in.

    Errors: NotImplementedError for a recipe or an option of it that Cadre does not have.
    """
    if _says(recipe, "custom"):
        raise _refused(recipe, "qfactory", "a quantizer of the caller", "left out",
                       "write a cadre.Recipe instead, with formats for each pass")
    name = next((name for method, name in PREDICATES if _says(recipe, method)), None)
    if name is None:
        if _says(recipe, "delayed"):
            raise NotImplementedError(
                f"recipe is {type(recipe).__name__} (delayed scaling), must be mxfp8, "
                "nvfp4, fp8_block or fp8_tensor; Cadre takes scales from the data at hand and "
                "keeps no history of them, current scaling (fp8_tensor) is nearest")
        return None
    _require_neutral(recipe)
    usual, passes = _PASSES[name](_NoOptions()), _PASSES[name](recipe)
    passes |= _in_own_type(recipe)
    return ",".join([name, *(f"{which}={words}" for which, words in passes.items()
                             if words != usual[which])])


class _NoOptions:
    """A recipe object that leaves every option as it is."""


def _says(recipe: Any, predicate: str) -> bool:
    method = getattr(recipe, predicate, None)
    return callable(method) and bool(method())


def _refused(recipe: Any, option: str, value: Any, must: str, why: str) -> NotImplementedError:
    return NotImplementedError(f"recipe: {option} of {type(recipe).__name__} is {value}, must be "
                               f"{must}; {why}")


def _require_neutral(recipe: Any) -> None:
    """Errors: NotImplementedError for an option without words here, unless it changes nothing."""
    neutral = dict(_NEUTRAL)
    for field in dataclasses.fields(recipe) if dataclasses.is_dataclass(recipe) else ():
        if field.name not in _HAS_WORDS | _MEANS_NOTHING and not field.name.startswith("fp"):
            neutral.setdefault(field.name, field.default)
    for option, value in neutral.items():
        got = getattr(recipe, option, value)
        if got != value:
            raise _refused(recipe, option, repr(got), repr(value), "Cadre has no such option")
    if _says(recipe, "nvfp4_per_token"):
        raise _refused(recipe, "nvfp4_per_token", "True", "False", "a scale spans an expert here")


def _in_own_type(recipe: Any) -> dict[str, str]:
    """The passes that quantise nothing."""
    override = getattr(recipe, "backward_override", None)
    if override not in (None, "high_precision"):
        raise _refused(recipe, "backward_override", repr(override), "None or 'high_precision'",
                       "backward has the input and the weights, not what their codes stand for")
    backward = override is None and getattr(recipe, "quantize_backward", True)
    passes = {} if getattr(recipe, "quantize_forward", True) else {"fprop": "input"}
    return passes if backward else passes | {"dgrad": "input", "wgrad": "input"}


def _hybrid(recipe: Any, usual: str) -> bool:
    """Whether gradients are e5m2."""
    given = getattr(recipe, "fp8_format", usual)
    name = getattr(given, "name", given)
    if name not in ("E4M3", "HYBRID"):
        raise _refused(recipe, "fp8_format", name, "E4M3 or HYBRID", "inputs and weights are e4m3")
    return name == "HYBRID"


def _params(recipe: Any, bits: str, operand: str, wanted: dict[str, bool],
            fixed: tuple[str, ...] = ()) -> dict[str, bool]:
    """How an operand is quantised: what its QParams say of `wanted`, which has the values for an
    object without QParams.

    Errors: NotImplementedError where they say another thing of `fixed`, or have an amax_epsilon.
    """
    where = f"{bits}_quant_{_OPERANDS[operand]}"
    given = getattr(recipe, where, None)
    epsilon = getattr(given, "amax_epsilon", 0.0)
    if epsilon != 0:
        raise _refused(recipe, f"{where}.amax_epsilon", epsilon, "0", "recipes have none")
    found = {flag: bool(getattr(given, flag, value)) for flag, value in wanted.items()}
    for flag in fixed:
        if found[flag] != wanted[flag]:
            raise _refused(recipe, f"{where}.{flag}", found[flag], wanted[flag],
                           "Cadre has no such option for this operand")
    return found


def _text(name: str, **options: bool) -> str:
    on = [option.lstrip("_") for option, wanted in options.items() if wanted]
    return f"{name}:{'+'.join(on)}" if on else name


def _three(x: str, w: str, dy: str, wgrad: str) -> dict[str, str]:
    return {"fprop": f"{x}*{w}", "dgrad": f"{dy}*{w}", "wgrad": wgrad}


def _fp8_tensor(recipe: Any) -> dict[str, str]:
    usual = {"power_2_scale": bool(getattr(recipe, "use_power_2_scales", False))}
    pow2 = {o: _params(recipe, "fp8", o, usual)["power_2_scale"] for o in _OPERANDS}
    x, w = (_text("fp8_tensor", pow2=pow2[o]) for o in ("x", "w"))
    dy = _text("fp8_tensor", e5m2=_hybrid(recipe, "HYBRID"), pow2=pow2["dy"])
    return _three(x, w, dy, f"{dy}*{x}")


def _fp8_block(recipe: Any) -> dict[str, str]:
    usual = {"power_2_scale": not getattr(recipe, "use_f32_scales", False)}
    free = {o: not _params(recipe, "fp8", o, usual)["power_2_scale"] for o in _OPERANDS}
    square = {}
    for operand, option, usually in (("x", "x_block_scaling_dim", 1),
                                     ("w", "w_block_scaling_dim", 2),
                                     ("dy", "grad_block_scaling_dim", 1)):
        dim = getattr(recipe, option, usually)
        if dim not in (1, 2):
            raise _refused(recipe, option, repr(dim), "1 or 2", "blocks are 1 x 128 or 128 x 128")
        square[operand] = dim == 2
    e5m2 = {"x": False, "w": False, "dy": _hybrid(recipe, "E4M3")}
    x, w, dy = (_text("fp8_block", e5m2=e5m2[o], _2d=square[o], fp32=free[o]) for o in _OPERANDS)
    return _three(x, w, dy, f"{dy}*{x}")


def _mxfp8(recipe: Any) -> dict[str, str]:
    flag, on = "mxfp8_2d_quantization", bool(getattr(recipe, "enable_2d_quantization", False))
    square = _params(recipe, "fp8", "w", {flag: on})[flag]
    for operand in ("x", "dy"):
        _params(recipe, "fp8", operand, {flag: False}, fixed=(flag,))
    dy = _text("mxfp8", e5m2=_hybrid(recipe, "E4M3"))
    return _three("mxfp8", _text("mxfp8", _2d=square), dy, f"{dy}*mxfp8")


def _nvfp4(recipe: Any) -> dict[str, str]:
    if _hybrid(recipe, "E4M3"):
        raise _refused(recipe, "fp8_format", "HYBRID", "E4M3", "scales are e4m3")
    codes = getattr(recipe, "fp4_format", "E2M1")
    if getattr(codes, "name", codes) != "E2M1":
        raise _refused(recipe, "fp4_format", getattr(codes, "name", codes), "E2M1",
                       "codes are e2m1")
    rht, sr, square = "random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"
    transformed = not getattr(recipe, "disable_rht", False)
    no = {sr: False, square: False, rht: False}
    x = _params(recipe, "fp4", "x", no | {rht: transformed}, fixed=(sr, square))
    w = _params(recipe, "fp4", "w", no | {
        square: not getattr(recipe, "disable_2d_quantization", False)}, fixed=(sr, rht))
    dy = _params(recipe, "fp4", "dy", no | {
        rht: transformed, sr: not getattr(recipe, "disable_stochastic_rounding", False)},
        fixed=(square,))
    if x[rht] != dy[rht]:
        raise _refused(recipe, f"fp4_quant_fwd_inp.{rht}", x[rht], dy[rht],
                       f"wgrad transforms both operands or none, and that of bwd_grad is {dy[rht]}")
    wgrad = f"{_text('nvfp4', rht=dy[rht], sr=dy[sr])}*{_text('nvfp4', rht=x[rht])}"
    return _three("nvfp4", _text("nvfp4", _2d=w[square]), _text("nvfp4", sr=dy[sr]), wgrad)


_PASSES: dict[str, Callable[[Any], dict[str, str]]] = {
    "fp8_tensor": _fp8_tensor, "fp8_block": _fp8_block, "mxfp8": _mxfp8, "nvfp4": _nvfp4}
