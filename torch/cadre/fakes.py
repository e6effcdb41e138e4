"""Fake kernels: what torch.compile, fake tensors and tensors on "meta" run for an operator."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def register_fake(name: str) -> Callable[[Callable], Callable]:
    """A decorator: the function gives the shapes and dtypes of torch.ops.cadre.<name>, as
    torch.library.register_fake has it. A fake kernel reads nothing, so it would as well take a
    tensor that is somewhere else, and leave real results unwritten; this asks before.

    Errors, of calls: ValueError naming the tensor that is not on the device of the first.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.cadre, packet), overload or "default")
    arguments = [argument.name for argument in op._schema.arguments]

    def register(kernel: Callable) -> Callable:
        def of_one_device(*given: Any, **named: Any) -> Any:
            require_one_device({**dict(zip(arguments, given)), **named})
            return kernel(*given, **named)

        torch.library.register_fake(f"cadre::{name}")(of_one_device)
        return kernel

    return register


def require_one_device(arguments: dict[str, Any]) -> None:
    """Errors: ValueError naming the tensor, alone or of a list, that is not where the first is."""
    first = None
    for name, tensor in _tensors(arguments):
        first = tensor if first is None else first
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, must be on {first.device}")


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Tensor):
                yield name, each
