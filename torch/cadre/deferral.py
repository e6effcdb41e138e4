"""Weight gradients that backward leaves for later."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class Memory:
    """What a linear remembers between its calls: gradients left for later, copies of weights.
    Copies and pickles of it are new and empty."""

    def __init__(self) -> None:
        self.own: Any = torch.classes.cadre.LinearMemory()
        self.handle: Any = self.own.handle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, ()


class DeferredGradients(nn.Module):
    """A module that leaves the gradients of its weights to `backward_dw` if delay_wgrad_compute."""

    delay_wgrad_compute: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._wgrad_hooks: list[Callable[[], Any]] = []

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Marks what is attached later, too: trainers look for the mark where they install
        hooks."""
        super().register_parameter(name, param)
        self._mark(name, param)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
               ) -> "DeferredGradients":
        """`to`, `to_empty` and the like, which may put other parameters in the place of these."""
        super()._apply(fn, recurse)
        for name, param in self._parameters.items():
            self._mark(name, param)
        return self

    def _mark(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and self.delay_wgrad_compute and self._is_marked(name):
            param.skip_backward_post_hook = True

    def _is_marked(self, name: str) -> bool:
        """Whether a parameter gets its gradient from `backward_dw`, as trainers are told."""
        return name in ("w1", "w2")

    def _memories(self) -> Sequence[Memory]:
        """Of its linears, the last first."""
        raise NotImplementedError

    def need_backward_dw(self) -> bool:
        """True if weight gradients are left to `backward_dw`."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the oldest weight gradient that backward left, once for each forward and
        backward: into main_grad, or added to .grad. Then the registered hooks run. Nothing happens
        where nothing is pending. Biases have had their gradients since backward.

        It works on the current stream, which has to wait for that of backward if it is another; and
        who uses the gradients waits for it.

        Errors: RuntimeError if a weight was changed since backward, or was replaced and is gone.
        """
        owing = [memory.own for memory in self._memories() if memory.own.pending()]
        for linear in owing:
            linear.run_next()
        if owing:
            self._trigger_wgrad_accumulation_and_reduce_hooks()

    def discard_wgrad(self) -> None:
        """Drops all weight gradients that are pending, say after an error in a step."""
        for memory in self._memories():
            memory.own.discard()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs after every `backward_dw` that computed something, in the order of
        registration."""
        self._wgrad_hooks.append(hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self._wgrad_hooks:
            hook()
