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


def _like(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.empty_like(t, dtype=dtype) for t in tensors]


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
      recipe="", save_input=False, unit_budget=0, dweight_dtype=None):
    rows = x.shape[0]
    _, _, begin, row, _ = linear_bounds(x, offsets, weight, wants, recipe, save_input)
    has_dbias = bool(bias) and (wants[2] or wants[3])
    dx = x.new_empty(tuple(x.shape)) if wants[0] else _none(x)
    dweight = _like(weight, dweight_dtype) if wants[1] and not deferred else []
    scaled = has_dbias and bias_scale is not None
    return (dx, dweight, _like(bias) if has_dbias else [],
            x.new_empty((rows if scaled else 0,), dtype=torch.float32),
            _bytes(x, begin + row * rows if deferred else 0))


NO_MLP_WANTS = (False,) * 6
ALL_MLP_WANTS = (True,) * 6


@lru_cache(maxsize=256)
def _mlp_bounds(*key) -> tuple[int, ...]:
    return tuple(torch.ops.cadre._grouped_mlp_memory_bounds(*key))


def mlp_bounds(x: Tensor, offsets: Tensor, prob: Tensor | None, weight1: Sequence[Tensor],
               bias1: Sequence[Tensor], weight2: Sequence[Tensor], bias2: Sequence[Tensor], *,
               wants: Wants, activation: str, recipe: str, keep_h: bool,
               x_in_codes: bool = False) -> tuple[int, ...]:
    """Bytes that an expert MLP keeps. On R rows `saved` takes the first plus R times the second,
    `pending` the third plus R times the fourth."""
    return _mlp_bounds(_size_along(weight1[0], -1), _size_along(weight2[0], -1),
                       int(offsets.shape[0]) - 1, x.dtype, weight1[0].dtype,
                       (bool(bias1), bool(bias2)), prob is not None, tuple(wants), activation,
                       recipe, keep_h, x_in_codes, _device(x))


@register_fake("grouped_mlp")
def _fake(x, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale=None, *, rng=None,
      wants=NO_MLP_WANTS, activation="swiglu", recipe="", keep_h=False, unit_budget=0, window="",
      place_of=None, x_codes=None, x_scales=None):
    begin, row, _, _ = mlp_bounds(x, offsets, prob, weight1, bias1, weight2, bias2, wants=wants,
                                  activation=activation, recipe=recipe, keep_h=keep_h,
                                  x_in_codes=x_codes is not None or x_scales is not None)
    return x.new_empty(tuple(x.shape)), _bytes(x, begin + row * x.shape[0])


@register_fake("grouped_mlp_backward.overwrite_saved")
@register_fake("grouped_mlp_backward")
def _fake(dy, x, saved, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale, *, rng=None,
      wants=ALL_MLP_WANTS, deferred=False, activation="swiglu", recipe="", keep_h=False,
      unit_budget=0, window="", place_of=None, x_in_codes=False, dweight_dtype=None):
    rows = x.shape[0]
    _, _, begin, row = mlp_bounds(x, offsets, prob, weight1, bias1, weight2, bias2, wants=wants,
                                  activation=activation, recipe=recipe, keep_h=keep_h,
                                  x_in_codes=x_in_codes)
    dbias = wants[4] or wants[5]

    def row_floats(wanted):
        return x.new_empty((rows if wanted else 0,), dtype=torch.float32)

    dx = x.new_empty(tuple(x.shape)) if wants[0] else _none(x)
    return (dx, row_floats(prob is not None and wants[1]),
            _like(weight1, dweight_dtype) if wants[2] and not deferred else [],
            _like(bias1) if dbias else [],
            _like(weight2, dweight_dtype) if wants[3] and not deferred else [],
            _like(bias2) if dbias else [],
            row_floats(dbias and bool(bias2) and bias2_scale is not None),
            _bytes(x, begin + row * rows if deferred else 0))


NO_MOE_WANTS = (False,) * 5
ALL_MOE_WANTS = (True,) * 5


@lru_cache(maxsize=256)
def _moe_bounds(*key) -> tuple[int, ...]:
    return tuple(torch.ops.cadre._moe_memory_bounds(*key))


def moe_bounds(x: Tensor, experts: int, top_k: int, weight1: Sequence[Tensor],
               bias1: Sequence[Tensor], weight2: Sequence[Tensor], bias2: Sequence[Tensor], *,
               wants: Wants, activation: str, recipe: str, keep_h: bool, keep_rows: bool,
               shared_weight2: Tensor | None = None, shared_gate: Tensor | None = None
               ) -> tuple[int, ...]:
    """Bytes that an expert layer keeps beside x, logits, experts and offsets, whether it has made
    the routing or was given it. Of T tokens `saved` takes the first plus T times the second,
    `pending` the third plus T times the fourth."""
    return _moe_bounds(_size_along(weight1[0], -1), _size_along(weight2[0], -1),
                       experts, top_k, x.dtype, weight1[0].dtype,
                       (bool(bias1), bool(bias2)), tuple(wants), activation, recipe, keep_h,
                       keep_rows, 0 if shared_weight2 is None else _size_along(shared_weight2, 1),
                       shared_gate is not None, _device(x))


def _like_shared(wanted: bool, weight: Tensor | None, x: Tensor,
                 dtype: torch.dtype | None) -> Tensor:
    return torch.empty_like(weight, dtype=dtype) if wanted and weight is not None else _none(x)


@register_fake("moe")
def _fake(x, logits, top_k, expert_bias, weight1, bias1, weight2, bias2, *, shared_weight1=None,
      shared_weight2=None, shared_gate=None, rng=None, wants=NO_MOE_WANTS, routing="softmax",
      activation="swiglu", recipe="", keep_h=False, keep_rows=False):
    tokens, experts = logits.shape
    begin, row, _, _ = moe_bounds(x, _size_along(logits, 1), top_k, weight1, bias1, weight2, bias2,
                                  shared_weight2=shared_weight2, shared_gate=shared_gate,
                                  wants=wants, activation=activation, recipe=recipe,
                                  keep_h=keep_h, keep_rows=keep_rows)
    return (x.new_empty(tuple(x.shape)), x.new_empty((tokens, top_k), dtype=torch.int32),
            x.new_empty((tokens, top_k), dtype=torch.float32),
            x.new_empty((tokens, experts), dtype=torch.float32),
            x.new_empty((experts + 1,), dtype=torch.int32), _bytes(x, begin + row * x.shape[0]))


@register_fake("moe_backward.overwrite_saved")
@register_fake("moe_backward")
def _fake(dout, dscores, x, logits, experts, offsets, saved, weight1, bias1, weight2, bias2, *,
      shared_weight1=None, shared_weight2=None, shared_gate=None, rng=None, wants=ALL_MOE_WANTS,
      deferred=False, routing="softmax", activation="swiglu", recipe="", keep_h=False,
      keep_rows=False, dweight_dtype=None):
    _, _, begin, row = moe_bounds(x, _size_along(logits, 1), _size_along(experts, 1), weight1,
                                  bias1, weight2, bias2, shared_weight2=shared_weight2,
                                  shared_gate=shared_gate, wants=wants, activation=activation,
                                  recipe=recipe, keep_h=keep_h, keep_rows=keep_rows)

    def like(wanted, t):
        return t.new_empty(tuple(t.shape)) if wanted else _none(t)

    def all_like(wanted, tensors, dtype=None):
        return _like(tensors, dtype) if wanted else []

    return (like(wants[0], x), like(wants[1], logits),
            all_like(wants[2] and not deferred, weight1, dweight_dtype),
            all_like(wants[4], bias1),
            all_like(wants[3] and not deferred, weight2, dweight_dtype),
            all_like(wants[4], bias2),
            _bytes(x, begin + row * x.shape[0] if deferred else 0),
            _like_shared(wants[2] and not deferred, shared_weight1, x, dweight_dtype),
            _like_shared(wants[3] and not deferred, shared_weight2, x, dweight_dtype),
            x.new_empty((x.shape[0] if shared_gate is not None and wants[1] else 0,),
                        dtype=torch.float32))


@register_fake("routed_experts")
def _fake(x, experts, prob, num_experts, weight1, bias1, weight2, bias2, *, rng=None,
      wants=NO_MOE_WANTS, activation="swiglu", recipe="", keep_h=False, keep_rows=False):
    begin, row, _, _ = moe_bounds(x, num_experts, _size_along(experts, 1), weight1, bias1, weight2,
                                  bias2, wants=wants, activation=activation, recipe=recipe,
                                  keep_h=keep_h, keep_rows=keep_rows)
    return (x.new_empty(tuple(x.shape)), x.new_empty((num_experts + 1,), dtype=torch.int32),
            _bytes(x, begin + row * x.shape[0]))


@register_fake("routed_experts_backward.overwrite_saved")
@register_fake("routed_experts_backward")
def _fake(dout, x, offsets, saved, top_k, weight1, bias1, weight2, bias2, *, rng=None,
      wants=ALL_MOE_WANTS, activation="swiglu", recipe="", keep_h=False, keep_rows=False,
      dweight_dtype=None):
    def all_like(wanted, tensors, dtype=None):
        return _like(tensors, dtype) if wanted else []

    dprob = x.new_empty((x.shape[0] if wants[1] else 0, top_k), dtype=torch.float32)
    return (x.new_empty(tuple(x.shape)) if wants[0] else _none(x), dprob,
            all_like(wants[2], weight1, dweight_dtype), all_like(wants[4], bias1),
            all_like(wants[3], weight2, dweight_dtype), all_like(wants[4], bias2))


def _writes(*_args, **_kwargs) -> None:
    """Of an operator that writes what it was given: nothing is made."""


for _name in ("grouped_linear", "grouped_linear_backward", "grouped_linear_wgrad", "grouped_mlp",
              "grouped_mlp_backward", "grouped_mlp_wgrad", "moe", "moe_backward", "moe_wgrad"):
    register_fake(f"{_name}.out")(_writes)
