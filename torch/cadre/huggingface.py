"""Experts of Hugging Face transformers models on Cadre.

    import cadre.huggingface

registers the experts implementation "cadre" with transformers 5, from where any of these takes it:

    AutoModelForCausalLM.from_pretrained(name, experts_implementation="cadre")
    AutoModelForCausalLM.from_config(config, experts_implementation="cadre")
    cadre.huggingface.use(model)

The weights stay as transformers keeps them: concatenated or interleaved gate and up, [E, 2F, H] or
transposed [E, H, 2F], with or without biases. Nothing is repacked and nothing waits for the device.

Experts that transformers does not dispatch run their own code whatever is asked for. Importing this
makes it a warning where a model that was asked for "cadre" is built or switched.
"""

import functools
import itertools
import re
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from .recipe import active_recipe, words_for

try:
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as _error:
    raise ImportError("cadre.huggingface: transformers cannot be imported, must be version 5 or "
                      f"later; install it with `pip install 'transformers>=5'` ({_error})"
                      ) from _error

__all__ = ["NAME", "experts_forward", "explain", "use"]

NAME = "cadre"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor,
                    top_k_weights: Tensor) -> Tensor:
    """What an experts module of transformers computes, as its implementation "cadre".

    y[t] = sum over k of top_k_weights[t, k] * expert top_k_index[t, k] of hidden_states[t]. An
    expert outside [0, E), as expert parallelism marks the experts of other ranks, adds nothing.

    Shapes: hidden_states and the result [T, H]; top_k_index and top_k_weights [T, top_k].
    Dtypes: hidden_states fp32, bf16 or fp16, as the weights are; top_k_index int32 or int64;
        top_k_weights any floating point, computed with in fp32. The result has the dtype of
        hidden_states.
    Errors: NotImplementedError for an activation that Cadre does not have; ValueError for shapes
        and dtypes that do not fit.
    """
    ops = torch.ops.cadre
    weight1, weight2 = _weights(self)
    bias1, bias2 = _biases(self)
    tokens, top_k = top_k_index.shape
    offsets, row_of, slot_of, _ = ops.offsets_of_routing(top_k_index, self.num_experts,
                                                         tokens * top_k)
    rows, prob = ops.permute(hidden_states, offsets, row_of, slot_of, top_k_weights.float())
    y, _ = ops.grouped_mlp(rows, offsets, prob, [weight1], bias1, [weight2], bias2,
                           prob if bias2 else None, activation=_activation(self),
                           recipe=words_for(active_recipe(), rows))
    return ops.combine(y, offsets, row_of, slot_of).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


_EXPERTS_CLASS = re.compile(r"Experts|Expert[A-Z]")
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _foreign(model: nn.Module) -> dict[str, nn.Module]:
    """The experts that transformers does not dispatch, by name: outermost modules that are called
    so and have parameters."""
    found: dict[str, nn.Module] = {}
    known = list(_experts(model))
    for name, module in model.named_modules():
        inside = any(name == k or name.startswith(k + ".") for k in [*found, *known])
        kind = type(module).__name__
        called = _EXPERTS_CLASS.search(kind) and "Shared" not in kind or (
            isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts")
        around = any(k.startswith(name + ".") for k in known)
        if called and not inside and not around and next(module.parameters(), None) is not None:
            found[name] = module
    return found


def _warn_of_foreign(model: nn.Module, *asked: Any) -> None:
    """A UserWarning that names experts which "cadre" does not reach, where it is asked for."""
    wanted = asked or (getattr(model.config, "_experts_implementation", None),)
    if NAME not in (list(wanted[0].values()) if isinstance(wanted[0], dict) else wanted):
        return
    found = {name: m for name, m in _foreign(model).items() if m not in _warned}
    if found:
        _warned.update(found.values())
        kinds = ", ".join(sorted({type(module).__name__ for module in found.values()}))
        warnings.warn(
            f"huggingface: experts_implementation is {NAME!r}, but {kinds} of "
            f"{type(model).__name__} takes none: {len(found)} modules, the first "
            f"{next(iter(found))!r}, run the code of transformers, not Cadre; leave "
            "experts_implementation out", UserWarning, stacklevel=4)


def _then_warn(method: Callable) -> Callable:
    """A method of PreTrainedModel, called without arguments or with an implementation, after which
    a model may have been asked for "cadre"."""

    @functools.wraps(method)
    def wrapped(self, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        _warn_of_foreign(self, *args, *kwargs.values())
        return result

    return wrapped


PreTrainedModel.post_init = _then_warn(PreTrainedModel.post_init)
PreTrainedModel.set_experts_implementation = _then_warn(
    PreTrainedModel.set_experts_implementation)


def use(model: nn.Module) -> nn.Module:
    """Switches the experts of a loaded transformers model to Cadre; returns the model.

    Errors: ValueError if the model has no experts that transformers dispatches, or if these cannot
        be switched; NotImplementedError if Cadre cannot run one of them. The model is then as it
        was.
    """
    found = _experts(model)
    if not found or not hasattr(model, "set_experts_implementation"):
        raise ValueError(f"use: model is {type(model).__name__} with {len(found)} experts modules, "
                         "must be a transformers model whose experts modules have "
                         "@use_experts_implementation; build others with cadre.GroupedMLP")
    for name, module in _foreign(model).items():
        raise ValueError(f"use: {name} is a {type(module).__name__}, must be an experts module "
                         "with @use_experts_implementation; transformers does not dispatch it")
    for name, module in found.items():
        _require_supported(name, module)
    before = model.get_experts_implementation()
    model.set_experts_implementation(NAME)
    for name, module in found.items():
        if module.config._experts_implementation != NAME:
            implementation = module.config._experts_implementation
            model.set_experts_implementation(before)
            raise ValueError(f"use: implementation of {name} is {implementation!r} after "
                             f"set_experts_implementation, must be {NAME!r}; "
                             f"{type(model).__name__} does not pass it on")
    return model


def explain(model: nn.Module) -> str:
    """One line for each experts module: its name, class and sizes, the implementation it runs, and
    the activation that Cadre runs or would run, or why Cadre cannot. Experts that transformers does
    not dispatch have a line too."""
    lines = []
    for name, module in _experts(model).items():
        implementation = module.config._experts_implementation
        try:
            _require_supported(name, module)
            cadre_text = f"activation {_activation(module)}"
        except NotImplementedError as error:
            cadre_text = f"not for cadre: {error}"
        lines.append(f"{name}: {_sizes(module)}; runs {implementation}; {cadre_text}")
    for name, module in _foreign(model).items():
        lines.append(f"{name}: {type(module).__name__}; runs its own code; not for cadre: it takes "
                     "no experts_implementation")
    return "\n".join(lines) or f"{type(model).__name__} has no experts modules"


def _experts(model: nn.Module) -> dict[str, nn.Module]:
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
    return {
        name: module
        for name, module in model.named_modules() if all(hasattr(module, mark) for mark in marks)
    }


def _first(self: nn.Module) -> str:
    return "gate_up_proj" if self.has_gate else "up_proj"


def _weights(self: nn.Module) -> tuple[Tensor, Tensor]:
    """w1 [E, 2F, H] or [E, F, H] and w2 [E, H, F]; views where they are stored transposed."""
    weight1, weight2 = getattr(self, _first(self)), self.down_proj
    if self.is_transposed:
        return weight1.transpose(-2, -1), weight2.transpose(-2, -1)
    return weight1, weight2


def _biases(self: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    if not self.has_bias:
        return [], []
    return [getattr(self, _first(self) + "_bias")], [self.down_proj_bias]


def _sizes(module: nn.Module) -> str:
    weight1, weight2 = _weights(module)
    stored = " transposed" if module.is_transposed else ""
    bias = " bias" if module.has_bias else ""
    return (f"{type(module).__name__} E={module.num_experts} H={weight2.shape[1]} "
            f"F={weight2.shape[2]} {str(weight1.dtype).removeprefix('torch.')} "
            f"{weight1.device}{stored}{bias}")


def _require_supported(name: str, module: nn.Module) -> None:
    _activation(module)
    for what, weight in ((_first(module), _weights(module)[0]), ("down_proj", module.down_proj)):
        if weight.dtype not in _DTYPES:
            raise NotImplementedError(
                f"huggingface: {name}.{what} is {weight.dtype}, must be float32, bfloat16 or "
                "float16; load the model without weight quantization")


# Which activation a module runs is measured, not guessed from names: its own gate function is
# called on a few numbers and compared with what Cadre has. That happens once for a class, an
# activation function and constants; torch.compile takes the answer as a constant.

_POINTWISE = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
_LAYOUTS = {
    "": lambda z: z.chunk(2, -1),
    " layout=interleave1": lambda z: (z[..., ::2], z[..., 1::2]),
    " layout=interleave32": lambda z: (z.unflatten(-1, (-1, 2, 32))[..., 0, :].flatten(-2),
                                       z.unflatten(-1, (-1, 2, 32))[..., 1, :].flatten(-2)),
}


def _activation(self: nn.Module) -> str:
    """The words of Cadre for what stands between the two linears of the module."""
    constants = tuple((name, getattr(self, name, None)) for name in _names_of_gate(type(self)))
    # As text: torch.compile may keep a float symbolic, and this makes it a guarded constant.
    numbers = tuple((name, float(x).hex()) for name, x in constants if isinstance(x, (int, float)))
    act = getattr(self, "act_fn", None)
    if isinstance(act, nn.GELU):
        act, argument = nn.GELU, act.approximate
    else:
        act, argument = type(act) if isinstance(act, nn.Module) else act, None
    text = _measured_activation(type(self), act, argument, self.has_gate, numbers)
    if text is None:
        gate = f"{type(self).__name__}._apply_gate with " if self.has_gate else ""
        found = getattr(act, "__name__", str(act))
        must = [*_GATED, "clamped_swiglu"] if self.has_gate else list(_POINTWISE)
        raise NotImplementedError(
            f"huggingface: activation of {type(self).__name__} is {gate}act_fn={found} "
            f"{_parsed(numbers)}, must equal one of {', '.join(must)}; choose another "
            "experts_implementation for this model")
    return text


@torch.compiler.assume_constant_result
def _names_of_gate(cls: type) -> tuple[str, ...]:
    return _names_in_code(cls)


@functools.cache
def _names_in_code(cls: type) -> tuple[str, ...]:
    code = getattr(getattr(cls, "_apply_gate", None), "__code__", None)
    return tuple(name for name in code.co_names
                 if name != "act_fn" and not hasattr(Tensor, name)) if code else ()


@torch.compiler.assume_constant_result
def _measured_activation(*key) -> str | None:
    return _measure(*key)


def _parsed(numbers) -> dict[str, float]:
    return {name: float.fromhex(x) for name, x in numbers}


@functools.cache
def _measure(cls: type, act, argument, gated: bool, numbers) -> str | None:
    with _disable_current_modes(), torch.no_grad():
        numbers = _parsed(numbers)
        largest = max([30.0] + [3 * abs(x) for x in numbers.values()])
        wave = torch.arange(16 * 128, dtype=torch.float64, device="cpu").mul(1.7).sin()
        z = torch.cat([wave.view(16, 128) * size for size in (1.0, 4.0, largest)])
        try:
            if isinstance(act, type):
                act = act(argument) if argument else act()
            got = cls._apply_gate(SimpleNamespace(act_fn=act, **numbers), z) if gated else act(z)
        except Exception:  # whatever the gate needs, it is nothing that Cadre has
            return None
        for text, want in _candidates(z, gated, sorted(set(numbers.values()))):
            if got.shape == want.shape and torch.allclose(got, want, rtol=1e-6, atol=1e-9):
                return text
    return None


def _candidates(z: Tensor, gated: bool, numbers: list[float]):
    """(words, value on z [rows, 2F], or [rows, F] ungated) of all that Cadre has."""
    if not gated:
        yield from ((name, function(z)) for name, function in _POINTWISE.items())
        return
    for layout, split in _LAYOUTS.items():
        gate, up = split(z)
        for name, pointwise in _GATED.items():
            yield name + layout, _POINTWISE[pointwise](gate) * up
        for limit, alpha, offset in itertools.product(numbers, {1.0, *numbers}, (0.0, 1.0)):
            clamped = gate.clamp(max=limit)
            h = clamped * torch.sigmoid(alpha * clamped) * (up.clamp(-limit, limit) + offset)
            yield f"clamped_swiglu{layout} limit={limit:.9g} alpha={alpha:.9g} offset={offset:g}", h
