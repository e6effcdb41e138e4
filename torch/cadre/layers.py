"""The layers as operators: fake kernels, so that torch.compile traces them with any number of rows.

The operators themselves, their gradients and their autocast rules are C++ (torch/csrc)."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from . import _build
from .fakes import register_fake

Wants = Sequence[bool]
ALL = (True, True, True, True)
NONE = (False, False, False, False)


def _device(x: Tensor) -> str:
    """What planning calls the device; without the GPU at hand, the architecture that is meant."""
    if x.device.type == "cpu" or not _build.CUDA:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "sm_90"


def _size_along(x: Tensor, dim: int) -> int:
    return int(x.shape[dim])  # of a weight: never symbolic rows


def _bytes(x: Tensor, count) -> Tensor:
    return x.new_empty((count,), dtype=torch.uint8)


def _none(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty((0,), dtype=dtype or x.dtype)


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


@lru_cache(maxsize=256)
def _linear_bounds(*key) -> tuple[int, ...]:
    return tuple(torch.ops.cadre._grouped_linear_memory_bounds(*key))


def linear_bounds(x: Tensor, offsets: Tensor, weight: Sequence[Tensor], wants: Wants, recipe: str,
                 save_input: bool) -> tuple[int, ...]:
    """Bytes that a grouped linear layer keeps. On R rows `saved` takes the first plus R times the
    second, `pending` the third plus R times the fourth, and `weight_cache` the fifth."""
    return _linear_bounds(_size_along(weight[0], -2), _size_along(weight[0], -1),
                         int(offsets.shape[0]) - 1, x.dtype, weight[0].dtype, tuple(wants), recipe,
                         save_input, _device(x))


def linear_saved_bytes(x: Tensor, offsets: Tensor, weight: Sequence[Tensor], *, wants: Wants = ALL,
                       recipe: str = "", save_input: bool = False) -> int:
    """Bytes of `saved` of torch.ops.cadre.grouped_linear.out on the rows of x."""
    begin, row, *_ = linear_bounds(x, offsets, weight, wants, recipe, save_input)
    return begin + row * x.shape[0]


def linear_pending_bytes(x: Tensor, offsets: Tensor, weight: Sequence[Tensor], *,
                         wants: Wants = ALL, recipe: str = "", save_input: bool = False) -> int:
    """Bytes of `pending` of torch.ops.cadre.grouped_linear_backward.out on the rows of x."""
    _, _, begin, row, _ = linear_bounds(x, offsets, weight, wants, recipe, save_input)
    return begin + row * x.shape[0]


def linear_cache_bytes(x: Tensor, offsets: Tensor, weight: Sequence[Tensor], *, wants: Wants = ALL,
                       recipe: str = "") -> int:
    """Bytes of `weight_cache` of both; 0 where the recipe copies no weights."""
    return linear_bounds(x, offsets, weight, wants, recipe, False)[4]


@register_fake("grouped_linear")
def _fake(x, offsets, weight, bias, bias_scale=None, *, rng=None, wants=NONE, recipe="",
      save_input=False, unit_budget=0):
    begin, row, *_ = linear_bounds(x, offsets, weight, wants, recipe, save_input)
    y = x.new_empty((x.shape[0], weight[0].shape[-2]))
    return y, _bytes(x, begin + row * x.shape[0])


@register_fake("grouped_linear_backward")
def _fake(dy, x, saved, offsets, weight, bias, bias_scale, *, rng=None, wants=ALL, deferred=False,
      recipe="", save_input=False, unit_budget=0):
    rows = x.shape[0]
    _, _, begin, row, _ = linear_bounds(x, offsets, weight, wants, recipe, save_input)
    has_dbias = bool(bias) and (wants[2] or wants[3])
    dx = x.new_empty(tuple(x.shape)) if wants[0] else _none(x)
    dweight = _like(weight) if wants[1] and not deferred else []
    scaled = has_dbias and bias_scale is not None
    return (dx, dweight, _like(bias) if has_dbias else [],
            x.new_empty((rows if scaled else 0,), dtype=torch.float32),
            _bytes(x, begin + row * rows if deferred else 0))


@register_fake("grouped_linear_wgrad")
def _fake(dy, x, saved, pending, offsets, weight, *, wants=ALL, recipe="", save_input=False,
      unit_budget=0):
    return _like(weight)


NO_MLP_WANTS = (False,) * 6
ALL_MLP_WANTS = (True,) * 6


@lru_cache(maxsize=256)
def _mlp_bounds(*key) -> tuple[int, ...]:
    return tuple(torch.ops.cadre._grouped_mlp_memory_bounds(*key))


def mlp_bounds(x: Tensor, offsets: Tensor, prob: Tensor | None, weight1: Sequence[Tensor],
              weight2: Sequence[Tensor], *, wants: Wants, activation: str, recipe: str,
              keep_h: bool) -> tuple[int, ...]:
    """Bytes that an expert MLP keeps. On R rows `saved` takes the first plus R times the second,
    `pending` the third plus R times the fourth."""
    return _mlp_bounds(_size_along(weight1[0], -1), _size_along(weight2[0], -1),
                      int(offsets.shape[0]) - 1, x.dtype, weight1[0].dtype, prob is not None,
                      tuple(wants), activation, recipe, keep_h, _device(x))


@register_fake("grouped_mlp")
def _fake(x, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale=None, *, rng=None,
      wants=NO_MLP_WANTS, activation="swiglu", recipe="", keep_h=False, unit_budget=0):
    begin, row, _, _ = mlp_bounds(x, offsets, prob, weight1, weight2, wants=wants,
                                 activation=activation, recipe=recipe, keep_h=keep_h)
    return x.new_empty(tuple(x.shape)), _bytes(x, begin + row * x.shape[0])


@register_fake("grouped_mlp_backward")
def _fake(dy, x, saved, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale, *, rng=None,
      wants=ALL_MLP_WANTS, deferred=False, activation="swiglu", recipe="", keep_h=False,
      unit_budget=0):
    rows = x.shape[0]
    _, _, begin, row = mlp_bounds(x, offsets, prob, weight1, weight2, wants=wants,
                                 activation=activation, recipe=recipe, keep_h=keep_h)
    dbias = wants[4] or wants[5]

    def row_floats(wanted):
        return x.new_empty((rows if wanted else 0,), dtype=torch.float32)

    dx = x.new_empty(tuple(x.shape)) if wants[0] else _none(x)
    return (dx, row_floats(prob is not None and wants[1]),
            _like(weight1) if wants[2] and not deferred else [], _like(bias1) if dbias else [],
            _like(weight2) if wants[3] and not deferred else [], _like(bias2) if dbias else [],
            row_floats(dbias and bool(bias2) and bias2_scale is not None),
            _bytes(x, begin + row * rows if deferred else 0))


@register_fake("grouped_mlp_wgrad")
def _fake(dy, x, saved, pending, offsets, prob, weight1, weight2, *, wants=ALL_MLP_WANTS,
      activation="swiglu", recipe="", keep_h=False, unit_budget=0):
    return _like(weight1), _like(weight2)


def _writes(*_args, **_kwargs) -> None:
    """Of an operator that writes what it was given: nothing is made."""


for _name in ("grouped_linear", "grouped_linear_backward", "grouped_linear_wgrad", "grouped_mlp",
              "grouped_mlp_backward", "grouped_mlp_wgrad"):
    register_fake(f"{_name}.out")(_writes)
