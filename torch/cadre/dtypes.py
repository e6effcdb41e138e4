"""The types that layers work in."""

import builtins
from typing import Any

import torch
from torch import Tensor

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


def with_article(noun: str) -> str:
    """"a list", "an int"."""
    return f"{'an' if noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


def kind_of(given: object) -> str:
    """What an error says of a thing of a wrong type."""
    kind = type(given)
    other = hasattr(builtins, kind.__name__) and kind.__module__ != "builtins"  # numpy's bool
    return with_article(f"{kind.__module__}.{kind.__name__}" if other else kind.__name__)


def require_float(name: str, dtype: torch.dtype) -> None:
    """Errors: TypeError, for the argument of that name, unless the type is fp32, bf16 or fp16."""
    if dtype not in FLOATS:
        raise TypeError(f"{name} is {dtype}, must be torch.float32, torch.bfloat16 or "
                        "torch.float16")


def working_dtype(x: Tensor) -> torch.dtype:
    """What layers compute in on x: the type of torch.autocast where it is on, else that of x."""
    on = x.device.type
    if on != "meta" and torch.is_autocast_enabled(on):  # "meta" has no autocast
        return torch.get_autocast_dtype(on)
    return x.dtype


def require_sizes(**sizes: Any) -> None:
    """Errors: TypeError for what is no int, ValueError for what is below 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} is {kind_of(size)}, must be an int")
        if size < 1:
            raise ValueError(f"{name} is {size}, must be 1 or more")


def require_bools(**options: Any) -> None:
    """Errors: TypeError for what is neither True nor False: "no" would be taken for True."""
    for name, option in options.items():
        if not isinstance(option, bool):
            raise TypeError(f"{name} is {kind_of(option)}, must be a bool")


def require_factor(name: str, given: Any) -> None:
    """Errors: TypeError, for the argument of that name, unless it is a tensor or None."""
    if given is not None and not isinstance(given, Tensor):
        raise TypeError(f"{name} is {kind_of(given)}, must be a tensor")


def contiguous(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.contiguous()


def require_rows(name: str, x: Any) -> None:
    """Errors: TypeError, for the argument of that name, unless it is a tensor that layers take."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {kind_of(x)}, must be a tensor")
    if x.dtype not in FLOATS:
        require_float(name, x.dtype)
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor, must be a dense one, whose rows come one "
                        "expert behind another")
