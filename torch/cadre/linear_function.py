"""The gradient of a grouped linear layer where autograd alone does not do: weight gradients that go
into main_grad or are left for later, the caller's buffers, and cached copies of the weights."""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from . import main_grad
from .layers import linear_pending_bytes, linear_saved_bytes

_ops = torch.ops.cadre
_forward, _backward, _wgrad = (  # of the overloads, without a search
    op.out for op in (_ops.grouped_linear, _ops.grouped_linear_backward, _ops.grouped_linear_wgrad))
_DX, _DW, _DBIAS, _DBIAS_SCALE = range(4)  # of wants


class Given(NamedTuple):
    """Tensors of one call that have no gradient here."""

    offsets: Tensor  # int32 [E + 1]
    operands: list[Tensor]  # the weights in the type that the products read: one packed, or E
    bias: list[Tensor]  # none, one packed, or E
    rng: Tensor | None  # int64 [2], of a recipe that rounds stochastically
    weight_cache: Tensor | None  # bytes


@dataclass(slots=True)
class Options:
    """One call of a layer: what is no tensor of forward."""

    weight: list[Parameter]  # one packed, or E
    wants: tuple[bool, bool, bool, bool]  # dx, dw, dbias, dbias_scale
    recipe: str
    save_input: bool
    out: Tensor | None  # [R, N]
    dgrad_out: Tensor | None  # [R, K]
    refresh_weights: bool
    into_main_grad: bool
    first_microbatch: bool
    queue: "WgradQueue | None"  # dw is left to it

    @property
    def sizes(self) -> dict[str, Any]:
        return {"wants": self.wants, "recipe": self.recipe, "save_input": self.save_input}


class GroupedLinearFunction(torch.autograd.Function):
    """apply(x [R, K], bias_scale [R] or None, Given, Options, *weight, *bias) -> y [R, N]."""

    @staticmethod
    def forward(ctx, x, bias_scale, given: Given, options: Options, *parameters):
        g, o = given, options
        leaf = weakref.ref(x) if o.dgrad_out is not None and x.is_leaf else None
        x = x.contiguous()
        y = x.new_empty((x.shape[0], g.operands[0].shape[-2])) if o.out is None else o.out
        saved = _ops._memory(x, linear_saved_bytes(x, g.offsets, g.operands, **o.sizes))
        _forward(x, g.offsets, g.operands, g.bias, bias_scale, rng=g.rng, **o.sizes, y=y,
                 saved=saved, weight_cache=g.weight_cache, refresh_weights=o.refresh_weights,
                 zero_tail=o.out is None)
        if g.weight_cache is not None and o.refresh_weights:
            increment_version(g.weight_cache)
        ctx.options, ctx.weights, ctx.leaf = o, len(g.operands), leaf
        ctx.save_for_backward(x if o.wants[_DW] else None, saved, bias_scale, g.offsets, g.rng,
                              g.weight_cache, *g.operands, *g.bias)
        if o.out is None:
            return y
        increment_version(o.out)
        return o.out.detach()  # autograd marks what is returned, not the caller's buffer

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        o: Options = ctx.options
        if ctx.leaf is not None:
            _require_new_gradient(ctx.leaf(), o.dgrad_out)
        x, saved, bias_scale, offsets, rng, cache, *parameters = ctx.saved_tensors
        weight, bias = parameters[:ctx.weights], parameters[ctx.weights:]
        into = main_grad.main_grads(o.weight) if o.wants[_DW] and o.into_main_grad else None
        dy = dy.contiguous()  # once for backward and wgrad
        shape = (dy.shape[0], weight[0].shape[-1])
        dx = None
        if o.wants[_DX]:
            dx = dy.new_empty(shape) if o.dgrad_out is None else o.dgrad_out.detach()
        if x is None:  # frozen weights: its content is not read, only its shape
            x = dy.new_empty(shape) if dx is None else dx
        dbias = _empty_like(bias) if o.wants[_DBIAS] or o.wants[_DBIAS_SCALE] else []
        scaled = bool(dbias) and bias_scale is not None
        dbias_scale = torch.empty_like(bias_scale) if scaled else None
        pending = _ops._memory(x, linear_pending_bytes(x, offsets, weight, **o.sizes))
        _backward(dy, x, saved, offsets, weight, bias, bias_scale, rng=rng, **o.sizes,
                  weight_cache=cache, dx=dx, dbias=dbias, dbias_scale=dbias_scale,
                  pending=pending, zero_tail=o.dgrad_out is None)
        if o.dgrad_out is not None and dx is not None:
            increment_version(o.dgrad_out)
        dweight = [None] * len(weight)
        if o.wants[_DW]:
            operands = (dy, x, saved, pending, offsets)
            dweight = _weight_gradients(o, Wgrad.of(o, operands, weight, into))
        return (dx, dbias_scale if o.wants[_DBIAS_SCALE] else None, None, None, *dweight,
                *(dbias if o.wants[_DBIAS] else [None] * len(bias)))


def _require_new_gradient(x: Tensor | None, dgrad_out: Tensor) -> None:
    """A leaf's .grad may be the buffer, which backward would overwrite and then add to itself."""
    if x is not None and x.grad is not None and x.grad.data_ptr() == dgrad_out.data_ptr():
        raise RuntimeError("dgrad_out is x.grad since an earlier backward, must be another buffer; "
                           "set x.grad = None where that gradient is done with")


def _empty_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As the given ones lie; of many, slices of one allocation."""
    if len(tensors) == 1 or not tensors[0].is_contiguous():
        return [torch.empty_like(t) for t in tensors]
    first = tensors[0]
    return list(first.new_empty((len(tensors), *first.shape)).unbind())


@dataclass(slots=True)
class Wgrad:
    """A weight gradient that has everything it needs."""

    operands: tuple[Tensor, ...]  # dy, x, saved, pending, offsets
    weight: list[Tensor]  # as the products read it
    sizes: dict[str, Any]
    parameters: list[Parameter]
    versions: list[int]  # of the parameters, then of dy and x
    into: list[Tensor] | None  # main_grad; None: .grad
    accumulate: str
    flags: Tensor | None
    stream: torch.cuda.Stream | None  # that the operands were made on

    @staticmethod
    def of(o: Options, operands: tuple[Tensor, ...], weight: list[Tensor],
           into: list[Tensor] | None) -> "Wgrad":
        accumulate, flags = "no", None
        if o.into_main_grad:
            accumulate, flags = main_grad.accumulation(o.weight, o.first_microbatch)
        dy = operands[0]
        stream = torch.cuda.current_stream(dy.device) if dy.is_cuda else None
        return Wgrad(operands, weight, o.sizes, o.weight, _versions(o.weight, operands), into,
                     accumulate, flags, stream)

    def run(self) -> list[Tensor]:
        """The gradients, written into main_grad or new."""
        self._keep_for_this_stream()
        dweight = _empty_like(self.parameters) if self.into is None else self.into
        _wgrad(*self.operands, self.weight, **self.sizes, dweight=dweight,
               accumulate=self.accumulate, accumulate_flags=self.flags)
        return dweight

    def _keep_for_this_stream(self) -> None:
        """Memory that another stream read last is not given away before this one has read it."""
        if self.stream is None:
            return
        here = torch.cuda.current_stream(self.stream.device)
        if here != self.stream:
            for t in self.operands if self.flags is None else (*self.operands, self.flags):
                t.record_stream(here)


def _weight_gradients(o: Options, wgrad: Wgrad) -> list[Tensor | None]:
    """Computes them, or leaves them to the queue; what autograd gets."""
    if o.queue is not None:
        o.queue.push(wgrad)
        return main_grad.announce(o.weight) if o.into_main_grad else [None] * len(o.weight)
    dweight = wgrad.run()
    if o.into_main_grad:
        return main_grad.announce(o.weight)
    return [d if w.requires_grad else None for d, w in zip(dweight, o.weight)]


def _versions(weight: Sequence[Tensor], operands: tuple[Tensor, ...]) -> list[int]:
    return [t._version for t in (*weight, *operands[:2])]


class WgradQueue:
    """Weight gradients that backward left for later, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[Wgrad] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, wgrad: Wgrad) -> None:
        self._waiting.append(wgrad)

    def clear(self) -> None:
        self._waiting.clear()

    @torch.no_grad()
    def run_next(self) -> None:
        """Computes the oldest into main_grad, or adds it to .grad as autograd would have.

        Errors: RuntimeError if a weight, or dy or x, changed since backward; the gradient stays in
        the queue then.
        """
        wgrad = self._waiting[0]
        names = [f"weight {e}" for e in range(len(wgrad.parameters))] + ["dy", "x"]
        now = _versions(wgrad.parameters, wgrad.operands)
        for name, version, kept in zip(names, now, wgrad.versions):
            if version != kept:
                raise RuntimeError(
                    f"backward_dw: version of {name} is {version}, must be {kept} as in "
                    "backward; it was changed while the gradient was pending, so call "
                    "backward_dw before (the optimizer steps, a buffer is used again), or "
                    "discard_wgrad to drop it")
        self._waiting.popleft()
        dweight = wgrad.run()
        if wgrad.into is not None:
            return
        sums, parts = [], []
        for w, d in zip(wgrad.parameters, dweight):
            if not w.requires_grad:
                continue
            if w.grad is None:
                w.grad = d
            else:
                sums.append(w.grad)
                parts.append(d)
        if sums:
            torch._foreach_add_(sums, parts)
