"""Which activation of Cadre stands between the two linears of a module of transformers.

It is measured, not guessed from names: the module's own gate function is called on a few numbers
and compared with what Cadre has. That happens once for a class, a module or function `act_fn` and
constants; torch.compile takes the answer as a constant.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

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


def activation_of(self: nn.Module) -> str:
    """The words of Cadre for what stands between the two linears of the module."""
    numbers = _numbers(self, _names_of_gate(type(self)))
    act = getattr(self, "act_fn", None)
    if "_apply_gate" in vars(self):
        raise NotImplementedError(
            f"huggingface: {type(self).__name__} has an _apply_gate of its own, must have that of "
            "its class; choose another experts_implementation for this model")
    if not isinstance(act, nn.Module):
        text = _measured_activation(type(self), act, (), self.has_gate, numbers)
    else:
        _require_plain(self, act)
        measured = _activation_of_class if is_compiling() else _activation_of_module
        text = measured(self, act, numbers)
        act = type(act)
    if text is None:
        gate = f"{type(self).__name__}._apply_gate with " if self.has_gate else ""
        found = getattr(act, "__name__", str(act))
        must = [*_GATED, "clamped_swiglu"] if self.has_gate else list(_POINTWISE)
        raise NotImplementedError(
            f"huggingface: activation of {type(self).__name__} is {gate}act_fn={found} "
            f"{_parsed(numbers)}, must equal one of {', '.join(must)}; choose another "
            "experts_implementation for this model")
    return text


def _activation_of_class(self: nn.Module, act: nn.Module, numbers: tuple[tuple[str, str], ...]
                         ) -> str | None:
    """Of a new module like this one: torch.compile takes no module for a constant."""
    _require_numbers(self, act)
    cls, argument = type(act), getattr(act, "approximate", None)
    if cls is not nn.GELU:
        argument = _numbers(act, _names_of_class(cls))
    return _measured_activation(type(self), cls, argument, self.has_gate, numbers)


_OF_MODULES: weakref.WeakKeyDictionary[nn.Module, dict[Any, str | None]] = (
    weakref.WeakKeyDictionary())


def _activation_of_module(self: nn.Module, act: nn.Module, numbers: tuple[tuple[str, str], ...]
                          ) -> str | None:
    """Measured once for what the module has beside tensors."""
    own = tuple((name, x) for name, x in act.__dict__.items()
                if isinstance(x, (int, float, str)) or callable(x))
    key = _gate_of(type(self)), self.has_gate, numbers, own
    known = _OF_MODULES.setdefault(act, {})
    if key not in known:
        _require_numbers(self, act)
        known[key] = _measure_between(_gate_of(type(self)), act, self.has_gate, numbers)
    return known[key]


def _require_plain(experts: nn.Module, act: nn.Module) -> None:
    """Errors: NotImplementedError where calling it does not run the forward of its class alone, and
    where it has what changes without a trace, or learns."""
    if act._forward_hooks or act._forward_pre_hooks or "forward" in act.__dict__:
        raise NotImplementedError(
            f"huggingface: act_fn of {type(experts).__name__} has hooks or a forward of its own, "
            "must be as its class is; choose another experts_implementation for this model")
    if act._parameters or act._buffers or act._modules:
        _refuse_more_than_numbers(experts)


def _require_numbers(experts: nn.Module, act: nn.Module) -> None:
    """Errors: NotImplementedError where it has lists and the like, which are in no key."""
    if any(isinstance(getattr(act, name, None), (list, dict, set, Tensor))
           for name in _names_of_class(type(act))):
        _refuse_more_than_numbers(experts)


def _refuse_more_than_numbers(experts: nn.Module) -> None:
    raise NotImplementedError(
        f"huggingface: act_fn of {type(experts).__name__} has tensors, modules or lists, must have "
        "numbers alone; choose another experts_implementation for this model")


def _numbers(module: nn.Module, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Those of its attributes that are numbers, as text: torch.compile may keep a float symbolic,
    and this makes it a guarded constant."""
    found = tuple((name, getattr(module, name, None)) for name in names)
    return tuple((name, float(x).hex()) for name, x in found
                 if isinstance(x, (int, float)) and not isinstance(x, bool))


def _gate_of(cls: type) -> Any:
    """The function that stands between the linears, None where a class has none."""
    return getattr(cls, "_apply_gate", None)


@torch.compiler.assume_constant_result
def _names_of_gate(cls: type) -> tuple[str, ...]:
    return _names_in_code(_gate_of(cls))


@torch.compiler.assume_constant_result
def _names_of_class(cls: type) -> tuple[str, ...]:
    return _names_in_methods(cls)


@functools.cache
def _names_in_methods(cls: type) -> tuple[str, ...]:
    """What a module of that class may have by them, beside what all modules have."""
    methods = [method for base in cls.__mro__ if not issubclass(nn.Module, base)
               for method in vars(base).values() if hasattr(method, "__code__")]
    names = {name for method in methods for name in method.__code__.co_names}
    return tuple(sorted(name for name in names if not hasattr(nn.Module, name)))


@functools.cache
def _names_in_code(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return tuple(name for name in code.co_names
                 if name != "act_fn" and not hasattr(Tensor, name)) if code else ()


@torch.compiler.assume_constant_result
def _measured_activation(cls: type, *key) -> str | None:
    return _measure(_gate_of(cls), *key)


def _parsed(numbers) -> dict[str, float]:
    return {name: float.fromhex(x) for name, x in numbers}


@functools.cache
def _measure(gate, act, argument, gated: bool, numbers) -> str | None:
    function = _made(act, argument) if isinstance(act, type) else act
    return _measure_between(gate, function, gated, numbers)


def _measure_between(gate, function: Callable[[Tensor], Tensor], gated: bool, numbers
                     ) -> str | None:
    numbers = _parsed(numbers)
    values = sorted(set(numbers.values()))

    def between(z: Tensor) -> Tensor:
        if not gated:
            return function(z)
        return gate(SimpleNamespace(act_fn=function, **numbers), z)

    return words_of(between, gated, values, values, (0.0, 1.0))


def _made(cls: type, argument) -> Callable[[Tensor], Tensor]:
    """A module of that class with these numbers, or what its forward makes of them alone."""
    if isinstance(argument, str):
        return cls(argument)
    try:
        module = cls()
    except TypeError:
        if not argument:
            raise
        return functools.partial(cls.forward, SimpleNamespace(**_parsed(argument)))
    for name, x in _parsed(argument).items():
        setattr(module, name, x)
    return module


_SIZES = (1.0, 4.0, 30.0, 1e3, 1e6)  # at which functions are measured; some are cut off far away


def words_of(function: Callable[[Tensor], Tensor], gated: bool, numbers: Sequence[float],
             limits: Sequence[float], offsets: Sequence[float]) -> str | None:
    """The words of Cadre for a function of z [rows, 2F], or [rows, F] ungated; None if there are
    none. numbers: the constants that it may have; limits, offsets: those of clamped swiglu."""
    with _disable_current_modes(), torch.no_grad():
        sizes = [*_SIZES, *(3 * abs(x) for x in numbers)]
        wave = torch.arange(16 * 128, dtype=torch.float64, device="cpu").mul(1.7).sin()
        z = torch.cat([wave.view(16, 128) * size for size in sizes])
        try:
            got = function(z)
        except Exception:  # whatever the gate needs, it is nothing that Cadre has
            return None
        for text, want in _candidates(z, gated, limits, numbers, offsets):
            if got.shape == want.shape and torch.allclose(got, want, rtol=1e-6, atol=1e-9):
                return text
    return None


def _candidates(z: Tensor, gated: bool, limits: Sequence[float], alphas: Sequence[float],
                offsets: Sequence[float]):
    """(words, value on z) of all that Cadre has."""
    if not gated:
        yield from ((name, function(z)) for name, function in _POINTWISE.items())
        return
    for layout, split in _LAYOUTS.items():
        gate, up = split(z)
        for name, pointwise in _GATED.items():
            yield name + layout, _POINTWISE[pointwise](gate) * up
        for limit, alpha, offset in itertools.product(limits, {1.0, *alphas}, offsets):
            clamped = gate.clamp(max=limit)
            h = clamped * torch.sigmoid(alpha * clamped) * (up.clamp(-limit, limit) + offset)
            constants = f"limit={limit:.9g} alpha={alpha:.9g} offset={offset:.9g}"
            yield f"clamped_swiglu{layout} {constants}", h
