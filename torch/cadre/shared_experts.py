"""Shared experts of a layer whose other experts are on several ranks: they run beside the exchange,
which waits for other ranks and for links more than it computes.

The built-in one has a node of autograd at either end, both on the caller's stream. The one at the
end is the younger of the two, and younger than the exchange: so its backward is begun before that
of collect, and the older one joins it behind that of dispatch. A module's backward is autograd's:
torch runs it on the side stream, and begins it when the exchange's has been queued.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .counts import offsets_of_all_rows
from .side_stream import SideWork, joined_on_error

_ops = torch.ops.cadre
_P = ParamSpec("_P")
_T = TypeVar("_T")


class OwnExpert:
    """An MLP of one expert, begun on the side stream. Its bits, and those of its gradients, are of
    `torch.ops.cadre.grouped_mlp`."""

    work: SideWork
    options: dict[str, Any]
    wants: list[bool]

    def __init__(self, x: Tensor, gate: Tensor | None, weights: tuple[Tensor, Tensor],
                 options: dict[str, Any]) -> None:
        """gate: factors fp32 [T]. weights: w1 and w2. options: words of the operator."""
        inputs = x, gate, *weights
        self.work, self.options = SideWork(x.device), options
        of_x, of_gate, of_w1, of_w2 = (torch.is_grad_enabled() and t is not None and t.requires_grad
                                       for t in inputs)
        self.wants = [of_x, of_gate, of_w1, of_w2, False, False]
        self.inputs: Any = _Inputs.apply(self.work, *inputs) if any(self.wants) else inputs
        with joined_on_error(self.work), self.work.begun(*inputs), torch.no_grad():
            offsets = offsets_of_all_rows(x)
            y, saved = _ops.grouped_mlp(x, offsets, gate, *_lists(*weights), None, wants=self.wants,
                                        **options)
        self.made: Any = y, saved, offsets

    def result(self) -> Tensor:
        """y [T, H], which has been joined. Once."""
        inputs, made, self.inputs, self.made = self.inputs, self.made, None, None
        y: Tensor = made[0]
        if any(self.wants):
            y = _Result.apply(self.work, self.wants, self.options, made, *inputs)
        return y


class _Inputs(torch.autograd.Function):
    """What the expert reads. Its backward joins the side stream."""

    @staticmethod
    def forward(ctx: Any, work: SideWork, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.work = work
        return tuple(None if t is None else t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.work.join()
        return None, *grads


class _Result(torch.autograd.Function):
    """What the expert made. Its backward is begun on the side stream, for `_Inputs` to join."""

    @staticmethod
    def forward(ctx: Any, work: SideWork, wants: list[bool], options: dict[str, Any],
                made: tuple[Tensor, Tensor, Tensor], *inputs: Tensor | None) -> Tensor:
        y, saved, offsets = made
        ctx.work, ctx.wants, ctx.options = work, wants, options
        ctx.save_for_backward(*inputs, offsets, saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, gate, w1, w2, offsets, saved = ctx.saved_tensors  # a checkpoint makes them here
        with ctx.work.begun(dy, x, gate, w1, w2):
            dx, dgate, dw1, _, dw2, *_ = _ops.grouped_mlp_backward(
                dy, x, saved, offsets, gate, *_lists(w1, w2), None, wants=ctx.wants, **ctx.options)
            grads = (dx, dgate, *(dw[0][0] if dw else None for dw in (dw1, dw2)))
        return (None,) * 4 + tuple(g if wanted else None for g, wanted in zip(grads, ctx.wants))


def _lists(w1: Tensor, w2: Tensor) -> tuple[list[Tensor], ...]:
    """Weights and biases of one expert, as the operators take them."""
    return [w1.unsqueeze(0)], [], [w2.unsqueeze(0)], []


def can_be_own(x: Tensor, recipe: str) -> bool:
    """Whether `OwnExpert` computes that: autocast has a cache of weights that it does not see, and
    nvfp4, the one format that may round stochastically, has random numbers from forward on."""
    return not torch.is_autocast_enabled(x.device.type) and "nvfp4" not in recipe


class GivenExpert:
    """A module, called on the side stream."""

    work: SideWork

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.work = SideWork(x.device)
        if torch.is_grad_enabled():
            x = _Kept.apply(x)
        with joined_on_error(self.work), self.work.begun(x):
            self.made: Any = module(x)

    def result(self) -> Any:
        """What the module returned, which has been joined. Once."""
        made, self.made = self.made, None
        return made


def can_be_given(x: Tensor) -> bool:
    """Whether `GivenExpert` may read x: whoever waits for its backward does so for x's gradient."""
    return x.requires_grad or not torch.is_grad_enabled()


class _Kept(torch.autograd.Function):
    """x, of which backward has the gradient when the caller's stream waits for whoever reads x. It
    is kept until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def run_beside(begun: tuple[OwnExpert | GivenExpert, ...], call: Callable[_P, _T],
               *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """call(...), behind which what was begun is joined. Where nothing was, as in compiled code, the
    call is all there is."""
    if not begun:
        return call(*args, **kwargs)
    works = [one.work for one in begun]
    with joined_on_error(*works):
        made = call(*args, **kwargs)
    for work in works:
        work.join()
    return made
