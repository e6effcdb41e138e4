"""Which activation of Cadre stands between the two linears of a module of transformers.

It is measured, not guessed from names: the module's own gate function is called on a few numbers
and compared with what Cadre has. That happens once for a class, an `act_fn` and what both have
beside tensors; torch.compile takes the answer as a constant.
"""

import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import (
    BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace)
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
        if is_compiling() and type(act) is FunctionType and not _is_guarded(act, type(self)):
            _refuse_more_than_numbers(self)
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
    cls = type(act)
    state = _state_of(self, act, _names_of_class(cls), _as_constant)
    return _measured_activation(type(self), cls, state, self.has_gate, numbers)


_OF_MODULES: weakref.WeakKeyDictionary[nn.Module, dict[Any, str | None]] = (
    weakref.WeakKeyDictionary())


@torch.compiler.disable  # what is called outside of a graph is not traced either
def _activation_of_module(self: nn.Module, act: nn.Module, numbers: tuple[tuple[str, str], ...]
                          ) -> str | None:
    """Measured once for what the module has beside tensors."""
    own, names, of_class = act.__dict__, *_names_in_methods(type(act))
    others = [_frozen(act, x, _as_reference) for name, x in own.items()
              if name not in names and name not in _NAMES_OF_ALL]
    names = [name for name in names if name in own or name in of_class]
    key = (_gate_of(type(self)), self.has_gate, numbers,
           _state_of(self, act, names, _as_reference), *others)
    known = _OF_MODULES.setdefault(act, {})
    if key not in known:
        known[key] = _measure_between(_gate_of(type(self)), act, self.has_gate, numbers)
    return known[key]


def _require_plain(experts: nn.Module, act: nn.Module) -> None:
    """Errors: NotImplementedError where calling it does not run the forward of its class alone, and
    where it has what changes without a trace, or learns."""
    hooks = act._forward_hooks, act._forward_pre_hooks, act._backward_hooks, act._backward_pre_hooks
    if any(hooks) or "forward" in act.__dict__:
        raise NotImplementedError(
            f"huggingface: act_fn of {type(experts).__name__} has hooks or a forward of its own, "
            "must be as its class is; choose another experts_implementation for this model")
    if act._parameters or act._buffers or act._modules:
        _refuse_more_than_numbers(experts)


def _refuse_more_than_numbers(experts: nn.Module) -> None:
    raise NotImplementedError(
        f"huggingface: act_fn of {type(experts).__name__} has tensors, modules, lists or objects, "
        "must have numbers, words, functions and tuples of them alone, and in compiled code "
        "functions without a closure; choose another experts_implementation for this model")


_State = tuple[tuple[str, str, Any], ...]  # name, kind and value of an attribute


def _state_of(experts: nn.Module, act: nn.Module, names: Sequence[str],
              function_of: Callable[[Any, type], Any]) -> _State:
    """What the module has by these names. function_of(function, class): what stands for it, None
    for what is no function.

    Errors: NotImplementedError where it has lists and the like, whose changes nobody would see.
    """
    found = []
    for name in names:
        if hasattr(act, name):
            frozen = _frozen(act, getattr(act, name), function_of)
            if frozen is None:
                _refuse_more_than_numbers(experts)
            else:
                found.append((name, *frozen))
    return tuple(found)


def _frozen(act: nn.Module, x: Any, function_of: Callable[[Any, type], Any]
            ) -> tuple[str, Any] | None:
    """Kind and value; numbers as text, since torch.compile may keep one symbolic, and this makes it
    a guarded constant. None for what can be changed in its place."""
    kind = type(x)
    if kind in (bool, str, type(None), torch.dtype, torch.device):
        return kind.__name__, x
    if kind in (int, float):
        return kind.__name__, float(x).hex()
    if kind is tuple:
        parts = [_frozen(act, part, function_of) for part in x]
        return None if any(part is None for part in parts) else ("tuple", tuple(parts))
    if kind is functools.partial:
        given = x.func, tuple(x.args), tuple(x.keywords.items())
        parts = _frozen(act, given, function_of)
        return None if parts is None else ("partial", parts)
    bound = kind is MethodType
    if bound and x.__self__ is not act:
        return None
    function = function_of(x.__func__ if bound else x, type(act))
    return None if function is None else ("method" if bound else "function", function)


def _as_reference(x: Any, cls: type) -> Any:
    """Weak, since functions may hold the module that they are kept for."""
    return weakref.ref(x) if isinstance(x, FunctionType) or _is_builtin(x) else None


def _as_constant(x: Any, cls: type) -> Any:
    known = type(x) in (FunctionType, BuiltinFunctionType)
    return x if known and _is_guarded(x, cls) else None


def _is_builtin(x: Any) -> bool:
    """Not a method of an object."""
    return isinstance(x, BuiltinFunctionType) and isinstance(
        x.__self__, (ModuleType, type, type(None)))


@torch.compiler.assume_constant_result
def _is_guarded(function: Any, cls: type) -> bool:
    """Whether torch.compile sees when another takes its place: it looks at the code alone, which
    functions with other closures and defaults share."""
    if isinstance(function, BuiltinFunctionType):
        return _is_builtin(function)
    if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
        return True
    places = [*cls.__mro__]  # methods that call super() have a closure
    if not function.__closure__:
        places.append(sys.modules.get(function.__module__))
    return any(vars(place).get(function.__name__) is function for place in places if place)


def _numbers(module: nn.Module, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Those of its attributes that are numbers or None, as text: torch.compile may keep a float
    symbolic, and this makes it a guarded constant."""
    found = tuple((name, getattr(module, name)) for name in names if hasattr(module, name))
    return tuple((name, "None" if x is None else float(x).hex()) for name, x in found
                 if isinstance(x, (int, float, type(None))) and not isinstance(x, bool))


def _gate_of(cls: type) -> Any:
    """The function that stands between the linears, None where a class has none."""
    return getattr(cls, "_apply_gate", None)


@torch.compiler.assume_constant_result
def _names_of_gate(cls: type) -> tuple[str, ...]:
    return _names_in_code(_gate_of(cls))


@torch.compiler.assume_constant_result
def _names_of_class(cls: type) -> tuple[str, ...]:
    return _names_in_methods(cls)[0]


_NAMES_OF_ALL = vars(nn.Module()).keys() - {"training"}


@functools.cache
def _names_in_methods(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a module of that class may have by them, beside what all modules have; and those that
    the class has, but for methods."""
    members = [member for base in cls.__mro__ if not issubclass(nn.Module, base)
               for member in vars(base).values()]
    names = {name for member in members for name in _names_in(member)} | {"training", "forward"}
    found = {name: inspect.getattr_static(cls, name, None)
             for name in sorted(names - _NAMES_OF_ALL) if not name.startswith("__")}
    found = {name: x for name, x in found.items()
             if not isinstance(x, (property, classmethod, staticmethod))}
    return tuple(found), tuple(name for name, x in found.items()
                               if hasattr(cls, name) and not isinstance(x, FunctionType))


def _names_in(member: Any) -> Iterator[str]:
    """In the code of a method, a property, what they wrap, and functions within them."""
    for inner in ("fget", "__wrapped__"):
        if hasattr(member, inner):
            yield from _names_in(getattr(member, inner))
    codes = [member.__code__] if hasattr(member, "__code__") else []
    while codes:
        code = codes.pop()
        yield from code.co_names
        yield from _words_in(code)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]


def _words_in(code: CodeType) -> Iterator[str]:
    """Such as getattr takes."""
    return (x for x in code.co_consts if isinstance(x, str) and x.isidentifier())


@functools.cache
def _names_in_code(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return tuple(name for name in (*code.co_names, *_words_in(code))
                 if name != "act_fn" and not hasattr(Tensor, name)) if code else ()


@torch.compiler.assume_constant_result
def _measured_activation(cls: type, *key) -> str | None:
    return _measure(_gate_of(cls), *key)


def _parsed(numbers) -> dict[str, float | None]:
    return {name: None if x == "None" else float.fromhex(x) for name, x in numbers}


@functools.cache
def _measure(gate, act, state, gated: bool, numbers) -> str | None:
    function = _made(act, state) if isinstance(act, type) else act
    return _measure_between(gate, function, gated, numbers)


def _measure_between(gate, function: Callable[[Tensor], Tensor], gated: bool, numbers
                     ) -> str | None:
    numbers = _parsed(numbers)
    values = sorted({x for x in numbers.values() if x is not None})

    def between(z: Tensor) -> Tensor:
        if not gated:
            return function(z)
        return gate(SimpleNamespace(act_fn=function, **numbers), z)

    return words_of(between, gated, values, values, (0.0, 1.0))


def _made(cls: type, state: _State) -> nn.Module:
    """A module of that class with these attributes; its constructor may want other arguments."""
    module = object.__new__(cls)
    nn.Module.__init__(module)
    for name, *frozen in state:
        vars(module)[name] = _thawed(module, *frozen)
    return module


def _thawed(module: nn.Module, kind: str, value: Any) -> Any:
    """What `_frozen` was given."""
    if kind in ("int", "float"):
        number = float.fromhex(value)
        return int(number) if kind == "int" else number
    if kind == "tuple":
        return tuple(_thawed(module, *part) for part in value)
    if kind == "partial":
        function, given, keywords = _thawed(module, *value)
        return functools.partial(function, *given, **dict(keywords))
    return MethodType(value, module) if kind == "method" else value


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
