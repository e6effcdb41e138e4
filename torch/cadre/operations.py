"""The operations of torch.ops.cadre: typed functions, and fake kernels with symbolic rows.

The operators, their gradients and their autocast rules are C++ (torch/csrc); docs/ops has the
formulas. Nothing here reads device memory or waits for it. Every operator has an overload `.out`,
torch.ops.cadre.NAME.out, that takes its outputs as keywords and leaves the tail of row-shaped ones
as it was; the functions here return new tensors, whose tail is zero.

Words: R rows, E experts, T tokens; `offsets` is int32 [E + 1] on the device, bare or within
`Offsets` or `RoutingOffsets`; rows offsets[e] to offsets[e + 1] belong to expert e, and rows at or
beyond offsets[E] are the tail.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from .dtypes import kind_of, require_bools, with_article
from .fakes import register_fake
from .host_numbers import may_look, require_offsets

_ops = torch.ops.cadre
_P = ParamSpec("_P")
_T = TypeVar("_T")


_WRONG_TYPE = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found "
                         r"type '(.+?)'")


def names_types(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Types that an operator does not take are a TypeError that names the argument."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            found = _WRONG_TYPE.search(str(error)) or _missing(function, args, kwargs)
            if found is None:
                raise
            must, name, got = found if isinstance(found, tuple) else found.groups()
            if name.endswith("dtype"):  # an operator has numbers for them
                must = must.replace("int", "torch.dtype")
            raise TypeError(f"{function.__name__}: {name} is {with_article(got)}, must be "
                            f"{with_article(must)}") from None

    return call


def _missing(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]
             ) -> tuple[str, str, str] | None:
    """What there must be, the argument that is None instead, and the type of that: operators take
    None for a tensor without elements or a device."""
    wanted = inspect.signature(function)
    for name, given in wanted.bind(*args, **kwargs).arguments.items():
        if given is None and wanted.parameters[name].annotation is Tensor:
            return "Tensor", name, "NoneType"
    return None


class Offsets(NamedTuple):
    """Of `offsets`: `offsets` int32 [E + 1]; `status` int32 [1], 0 if the counts were good, bit 1
    if one was negative or ends decreased, bit 2 if their sum was above R. Offsets that were made
    elsewhere have no status: Offsets(offsets). They begin at 0. Rows before a first offset above 0
    belong to no expert and, unlike the tail, are not made zero: products leave them unwritten."""

    offsets: Tensor
    status: Tensor | None = None


class RoutingOffsets(NamedTuple):
    """Of `offsets_of_routing`: `row_of` int32 [T, top_k] is the row of each choice, -1 where it was
    dropped; `slot_of` int32 [R] its inverse, t * top_k + choice, -1 in the tail."""

    offsets: Tensor
    row_of: Tensor
    slot_of: Tensor
    status: Tensor


for _kind in (Offsets, RoutingOffsets):  # for torch.export.save
    _register_namedtuple(_kind, serialized_type_name=f"cadre.{_kind.__name__}")

# What every function takes for offsets.
AnyOffsets = Tensor | Offsets | RoutingOffsets


def tensor_of(offsets: AnyOffsets, shape: Sequence[int]) -> Tensor:
    """int32 [E + 1], of rows of that shape. Errors: TypeError for None; ValueError for numbers on
    the host that are no offsets of these; other types and shapes are left to the operator."""
    made_here = False
    if isinstance(offsets, (Offsets, RoutingOffsets)):
        made_here, offsets = offsets.status is not None, offsets.offsets
    if offsets is None:
        raise TypeError("offsets is None, must be a tensor, cadre.Offsets or cadre.RoutingOffsets")
    if (isinstance(offsets, Tensor) and may_look(offsets) and offsets.dtype == torch.int32
            and offsets.dim() == 1 and offsets.shape[0] > 0
            and isinstance(shape, Sequence) and shape and shape[0] >= 0):
        require_offsets(offsets, shape[0], "offsets", made_here=made_here)
    return offsets


def _shape(x: Tensor) -> Sequence[int]:
    """None of what is no tensor, which is left to the operator."""
    return x.shape if isinstance(x, Tensor) else ()


def _row_map(offsets: AnyOffsets, row_of: Tensor | None, slot_of: Tensor | None,
             rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, row_of and slot_of, which come apart, or all in RoutingOffsets."""
    if isinstance(offsets, RoutingOffsets) and row_of is None and slot_of is None:
        row_of, slot_of = offsets.row_of, offsets.slot_of
    if row_of is None or slot_of is None:
        raise TypeError(f"{'row_of' if row_of is None else 'slot_of'} is None, must be a tensor; "
                        "only what offsets_of_routing gives has it besides")
    return tensor_of(offsets, _shape(slot_of if rows is None else rows)), row_of, slot_of


def _require_no_bools(**numbers: float) -> None:
    """Errors: TypeError for True and False, which torch takes for 1 and 0."""
    for name, number in numbers.items():
        if isinstance(number, bool):
            raise TypeError(f"{name} is a bool, must be a number")


class Routing(NamedTuple):
    """Of `routing`: `experts` int32 [T, top_k], `prob` fp32 [T, top_k], `scores` fp32 [T, E]."""

    experts: Tensor
    prob: Tensor
    scores: Tensor


class Quantized(NamedTuple):
    """Of `quantize`: value = code * block scale * expert scale. Parts that the format does not have
    are empty."""

    codes: Tensor
    scales: Tensor
    expert_scale: Tensor


@names_types
def offsets(source: Tensor, kind: str, rows: int) -> Offsets:
    """Makes offsets of the rows of each expert, or of where they end.

    source: int32 or int64 [E]. kind: "counts", or "ends" for inclusive prefix sums. rows: R.
    Broken counts are clamped into [0, R], and `status` reports them.
    Raises ValueError for another kind, shape or dtype."""
    _require_no_bools(rows=rows)
    return Offsets(*_ops.offsets(source, kind, rows))


@names_types
def offsets_of_routing(experts: Tensor, num_experts: int, rows: int) -> RoutingOffsets:
    """Sorts choices by expert, those of one expert in token order.

    experts: int32 or int64 [T, top_k]; a number outside [0, num_experts) drops the choice, as does
    a row of `rows` or more. Raises ValueError for another shape or dtype."""
    _require_no_bools(num_experts=num_experts, rows=rows)
    return RoutingOffsets(*_ops.offsets_of_routing(experts, num_experts, rows))


@names_types
def routing(logits: Tensor, top_k: int, score: str = "softmax", normalize: bool = False,
            scale: float = 1.0, expert_bias: Tensor | None = None, groups: int = 1,
            group_top_k: int = 1) -> Routing:
    """Chooses top_k experts of each token. Differentiable in logits, through prob and scores.

    logits: [T, E] fp32, bf16 or fp16. score: "softmax", "topk_softmax" or "sigmoid". expert_bias:
    fp32 [E], added for the choice only. Raises ValueError for shapes, dtypes and sizes that do not
    fit together."""
    if isinstance(scale, Tensor):
        raise TypeError("routing: scale is a Tensor, must be a float, which has no gradient")
    require_bools(normalize=normalize)
    _require_no_bools(top_k=top_k, scale=scale, groups=groups, group_top_k=group_top_k)
    return Routing(*_ops.routing(logits, top_k, score, normalize, scale, expert_bias, groups,
                                 group_top_k))


@names_types
def permute(tokens: Tensor, offsets: AnyOffsets, row_of: Tensor | None = None,
            slot_of: Tensor | None = None, prob: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows [R, H] in the order of the experts, and the probability of each, fp32 [R], empty without
    prob. Differentiable in tokens and prob.

    tokens: [T, H] fp32, bf16 or fp16. offsets: what `offsets_of_routing` gives, or the first of it
    with row_of and slot_of. prob: fp32 [T, top_k]. Raises ValueError for shapes and dtypes."""
    return _ops.permute(tokens, *_row_map(offsets, row_of, slot_of), prob)


@names_types
def combine(rows: Tensor, offsets: AnyOffsets, row_of: Tensor | None = None,
            slot_of: Tensor | None = None, prob: Tensor | None = None) -> Tensor:
    """Tokens [T, H]: the sum of the rows of each, times prob fp32 [T, top_k] if that is given.
    Differentiable in rows and prob.

    rows: [R, H] fp32, bf16 or fp16. offsets, row_of, slot_of: as in `permute`. Raises ValueError
    for shapes and dtypes."""
    return _ops.combine(rows, *_row_map(offsets, row_of, slot_of, rows), prob)


@names_types
def activation(z: Tensor, offsets: AnyOffsets, prob: Tensor | None = None,
               activation: str = "swiglu") -> Tensor:
    """h = act(z) * prob, in z's dtype. Differentiable in z and prob.

    z: [R, 2F] of a gated activation, else [R, F]; fp32, bf16 or fp16. prob: fp32 [R]. activation: a
    name with options, such as "swiglu layout=interleave32" or "clamped_swiglu limit=7 alpha=1.702
    offset=1". Raises ValueError for unknown words, shapes and dtypes."""
    return _ops.activation(z, tensor_of(offsets, _shape(z)), prob, activation)


@names_types
def bias_grad(dy: Tensor, offsets: AnyOffsets, bias_scale: Tensor | None = None,
              bias: Tensor | None = None, dtype: torch.dtype | None = None
              ) -> tuple[Tensor, Tensor]:
    """The gradient of a bias, [E, N] in `dtype` (by default that of bias, else of dy), and of the
    factor of each row that scaled it, fp32 [R], empty without.

    dy: [R, N]. bias_scale: fp32 [R], with bias [E, N]; both or none. Raises ValueError for shapes
    and dtypes."""
    return _ops.bias_grad(dy, tensor_of(offsets, _shape(dy)), bias_scale, bias, dtype)


@names_types
def grouped_gemm(lhs: Tensor, rhs: Tensor | Sequence[Tensor], offsets: AnyOffsets,
                 which: str = "fprop", *, bias: Tensor | None = None,
                 bias_scale: Tensor | None = None, alpha: Tensor | None = None,
                 out_dtype: torch.dtype | None = None, unit_budget: int = 0) -> Tensor:
    """Multiplies the rows of every expert with its weight. Differentiable in lhs, rhs, bias and
    bias_scale, twice too in lhs and rhs; under autocast lhs and rhs are cast.

    which: "fprop" lhs x [R, K], rhs w, gives y [R, N] = x w^T; "dgrad" lhs dy [R, N], rhs w, gives
    dx [R, K] = dy w; "wgrad" lhs dy [R, N], rhs x [R, K], gives dw [E, N, K] = dy^T x, expert by
    expert. w is one [E, N, K], transposed views too, or E tensors [N, K] of the same strides; all
    are fp32, bf16 or fp16. bias: [E, N], fprop only. bias_scale: fp32 [R], a factor of the bias for
    each row. alpha: fp32 [E], a factor for each expert, without a gradient. out_dtype: lhs's by
    default.
    unit_budget: SMs or threads to use at most, 0 for all.
    Raises TypeError for other dtypes of lhs and rhs, else ValueError."""
    _require_no_bools(unit_budget=unit_budget)
    return _ops.grouped_gemm(lhs, [rhs] if isinstance(rhs, Tensor) else rhs,
                             tensor_of(offsets, _shape(lhs)), which, bias=bias,
                             bias_scale=bias_scale, alpha=alpha, out_dtype=out_dtype,
                             unit_budget=unit_budget)


@names_types
def quantize(source: Tensor, offsets: AnyOffsets | None, format: str, axis: str = "along_k",
             rng: Tensor | None = None, amax_eps: float = 0.0) -> Quantized:
    """Codes and scales of routed rows [R, C], or of weights [E, N, K] where offsets is None.

    source: fp32, bf16 or fp16. format: "mxfp8", "nvfp4:rht+sr", ... (docs/formats.md). axis:
    "along_k" or "along_rows", the axis that a block of codes runs along. rng: int64 [2] seed and
    offset on the device, with option sr. amax_eps: a lower bound of the largest magnitude that a
    scale is of, where scales are fp32; of other formats 0. Codes of four bits are uint8, two a
    byte. Codes of the tail are zero. Raises ValueError; NotImplementedError where no implementation
    takes the format on the device."""
    _require_no_bools(amax_eps=amax_eps)
    given = None if offsets is None else tensor_of(offsets, _shape(source))
    return Quantized(*_ops.quantize(source, given, format, axis, rng, amax_eps))


@names_types
def dequantize(quantized: Quantized, offsets: AnyOffsets | None, format: str,
               axis: str = "along_k", *, shape: Sequence[int],
               dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes, in fp32, bf16 or fp16, with zeros in the tail. `shape` is that of what
    was quantised, [R, C] or [E, N, K]; a Hadamard transform is not undone, and its blocks come back
    whole. Raises ValueError or NotImplementedError as `quantize`."""
    if not isinstance(quantized, tuple) or len(quantized) != 3:
        found = kind_of(quantized)
        if isinstance(quantized, tuple):
            found += f" of {len(quantized)}"
        raise TypeError(f"dequantize: quantized is {found}, must be cadre.Quantized: codes, scales "
                        "and expert_scale")
    given = None if offsets is None else tensor_of(offsets, shape)
    return _ops.dequantize(*quantized, given, format, axis, shape, dtype)


# Fake kernels: shapes and dtypes alone. Rows may be symbolic everywhere. Those of activation,
# quantize and dequantize are C++, where the lists of activations and formats are.


def _floats(like: Tensor, *shape) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _ints(like: Tensor, *shape) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


@register_fake("offsets")
def _fake(source, kind, rows):
    return _ints(source, source.shape[0] + 1), _ints(source, 1)


@register_fake("_offsets")
def _fake(counts, rows):
    return _ints(counts, counts.shape[0] + 1)


@register_fake("offsets_of_routing")
def _fake(experts, num_experts, rows):
    return (_ints(experts, num_experts + 1), _ints(experts, *experts.shape), _ints(experts, rows),
            _ints(experts, 1))


@register_fake("routing")
def _fake(logits, top_k, *rest, **named):
    tokens = logits.shape[0]
    return (_ints(logits, tokens, top_k), _floats(logits, tokens, top_k),
            _floats(logits, *logits.shape))


@register_fake("routing_backward")
def _fake(logits, *rest, **named):
    return logits.new_empty(logits.shape)


@register_fake("permute")
def _fake(tokens, offsets, row_of, slot_of, prob=None):
    rows = slot_of.shape[0]
    return (tokens.new_empty((rows, tokens.shape[1])),
            _floats(tokens, 0 if prob is None else rows))


@register_fake("permute_backward")
def _fake(drows, drow_prob, offsets, row_of):
    dprob = _floats(drows, 0) if drow_prob is None else _floats(drows, *row_of.shape)
    return drows.new_empty((row_of.shape[0], drows.shape[1])), dprob


@register_fake("combine")
def _fake(rows, offsets, row_of, slot_of, prob=None):
    return rows.new_empty((row_of.shape[0], rows.shape[1]))


@register_fake("combine_backward")
def _fake(dtokens, rows, offsets, row_of, slot_of, prob, want_dprob):
    dprob = _floats(dtokens, *row_of.shape) if want_dprob else _floats(dtokens, 0)
    return dtokens.new_empty((slot_of.shape[0], dtokens.shape[1])), dprob


@register_fake("activation_backward")
def _fake(dh, z, offsets, prob, activation):
    return z.new_empty(z.shape), _floats(z, 0 if prob is None else z.shape[0])


@register_fake("bias_grad")
def _fake(dy, offsets, bias_scale=None, bias=None, dtype=None):
    dtype = dtype or (dy if bias is None else bias).dtype
    return (dy.new_empty((offsets.shape[0] - 1, dy.shape[1]), dtype=dtype),
            _floats(dy, 0 if bias_scale is None else dy.shape[0]))


@register_fake("grouped_gemm")
def _fake(lhs, rhs, offsets, which, *, bias=None, bias_scale=None, alpha=None, out_dtype=None,
      unit_budget=0):
    rows = lhs.shape[0]
    shape = {"fprop": lambda: (rows, rhs[0].shape[-2]),
             "dgrad": lambda: (rows, rhs[0].shape[-1]),
             "wgrad": lambda: (offsets.shape[0] - 1, lhs.shape[1], rhs[0].shape[1])}.get(which)
    if shape is None:
        raise ValueError(f"which is {which!r}, must be fprop, dgrad or wgrad")
    return lhs.new_empty(shape(), dtype=out_dtype or lhs.dtype)


@register_fake("scaled_grouped_mm")
def _fake(mat_a, mat_b, scale_a, scale_b, offsets, *, bias=None, out_dtype):
    return mat_a.new_empty((mat_a.shape[0], mat_b.shape[2]), dtype=out_dtype)


@register_fake("grouped_mlp_quantized")
def _fake(x, offsets, prob, weight1, bias1, weight2, bias2, bias2_scale=None, *, recipe,
          activation="swiglu", unit_budget=0):
    return x.new_empty(x.shape)


@register_fake("routed_experts_quantized")
def _fake(x, experts, prob, weight1, bias1, weight2, bias2, *, recipe, activation="swiglu"):
    return x.new_empty(x.shape)


for _name in ("offsets", "offsets_of_routing", "routing", "routing_backward", "permute",
              "permute_backward", "combine", "combine_backward", "activation",
              "activation_backward", "bias_grad", "grouped_gemm", "quantize", "dequantize",
              "scaled_grouped_mm"):
    register_fake(f"{_name}.out")(lambda *given, **named: None)
