"""Operations in a row: what TransformerEngine calls te.ops, on Cadre's operators.

    mlp = cadre.ops.Sequential(
        cadre.ops.GroupedLinear(E, H, 2 * F), cadre.ops.ScaledSwiGLU(),
        cadre.ops.GroupedLinear(E, F, H))
    y = mlp(x, splits, prob, splits)

Operations take extra inputs, such as the rows of each expert, in the order of the row. A linear, an
activation and a linear run as one `grouped_mlp` where they can; `Sequential.plan` says so.
"""

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .dtypes import kind_of, require_factor, require_float, require_rows
from .grouped_linear import GroupedLinear as _GroupedLinear
from .grouped_mlp import activation_text, is_gated
from .operations import Offsets, RoutingOffsets
from .recipe import active_recipe, words_for
from .splits import Splits, offsets_of, offsets_of_all_rows

OUTPUT_BUFFER_KEY: str = "output"
GRAD_INPUT_BUFFER_KEY: str = "grad_input"

__all__ = [
    "GRAD_INPUT_BUFFER_KEY", "OUTPUT_BUFFER_KEY", "Activation", "ClampedSwiGLU", "GroupedLinear",
    "SReLU", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSwiGLU", "Sequential", "Step", "SwiGLU"]

_LAYOUTS = {None: "concat", 0: "concat", 1: "interleave1", 32: "interleave32"}


class GroupedLinear(_GroupedLinear):
    """A linear layer per expert as an operation. Extra inputs: split_sizes, the rows of each expert
    (see `cadre.GroupedLinear`), and, with scale_bias, scales fp32 [R], a factor of each row's bias.

    op_kwargs: "output", a buffer [R, N] for its result; "grad_input", one [R, K] for the gradient
    of its input.

    num_groups: E. in_features: K. out_features: N. dtype: f32, bf16, f16; None: torch's default.
    accumulate_into_main_grad: as fuse_wgrad_accumulation of `cadre.GroupedLinear`.
    Weights begin as those of torch.nn.Linear, biases at zero.

    Errors: ValueError for sizes, TypeError for dtypes.
    """

    op_keys: tuple[str, ...] = (OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY)
    input_name: str = "input"
    splits_name: str = "split_sizes"
    experts_name: str = "num_groups"
    marks_biases: bool = False

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, bias: bool = True,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None,
                 rng_state_tracker_function: Callable[[], Any] | None = None,
                 accumulate_into_main_grad: bool = False, single_grouped_weight: bool = False,
                 single_grouped_bias: bool = False, delay_wgrad_compute: bool = False,
                 scale_bias: bool = False) -> None:
        if dtype is not None:
            require_float("dtype", dtype)
        super().__init__(
            num_groups, in_features, out_features, bias=bias, device=device, params_dtype=dtype,
            get_rng_state_tracker=rng_state_tracker_function,
            init_method=functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute, scale_bias=scale_bias)

    @property
    def num_groups(self) -> int:
        return self.num_gemms

    @property
    def num_extra_inputs(self) -> int:
        return 2 if self.scale_bias else 1

    def forward(self, input: Tensor, split_sizes: Splits, scales: Tensor | None = None, *,
                output: Tensor | None = None, grad_input: Tensor | None = None) -> Tensor:
        """[..., N] for input [..., K]. Errors: as `cadre.GroupedLinear`."""
        return super().forward(input, split_sizes, None, output, grad_input,
                               bias_scale=_probabilities(scales))

    if TYPE_CHECKING:
        __call__ = forward


class Activation(nn.Module):
    """h = act(z) [* scales] for z [..., 2F] (ungated [..., F]); h [..., F]. The classes below are
    the ones to use.

    Those that are scaled take an extra input: scales [R], a factor of each row, fp32 throughout;
    other types are converted.

    glu_interleave_size: None: [gates | ups]; 1: gate and up alternate; 32: in blocks of 32.
    activation_recompute_in_mlp: a grouped_mlp always computes the activation again in backward;
        True makes it an error where the operation is not part of one.
    """

    op_keys: tuple[str, ...] = ()
    scaled: bool = False

    def __init__(self, activation: str, glu_interleave_size: int | None = None,
                 activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        if isinstance(glu_interleave_size, bool) or glu_interleave_size not in (*_LAYOUTS,):
            raise NotImplementedError(
                f"glu_interleave_size is {glu_interleave_size}, must be None, 1 or 32; gate and up "
                "come in two halves, alternate, or alternate in blocks of 32")
        self.glu_interleave_size = glu_interleave_size
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self.activation: str = activation_text(activation, _LAYOUTS[glu_interleave_size])
        self.gated: bool = is_gated(activation)

    @property
    def num_extra_inputs(self) -> int:
        return int(self.scaled)

    def forward(self, z: Tensor, scales: Tensor | None = None, *,
                offsets: Offsets | RoutingOffsets | None = None) -> Tensor:
        """h [..., F]. offsets: rows beyond them are zero; None: there are none.

        Errors: ValueError for scales that are missing, surplus or of another length.
        """
        if (scales is not None) != self.scaled:
            raise ValueError(f"scales is {'missing' if scales is None else 'given'}, must be "
                             f"{'given' if self.scaled else 'left out'}; the operation is "
                             f"{type(self).__name__}")
        require_rows("z", z)
        if z.dim() < 1:
            raise ValueError("z has shape [], must be [..., columns]")
        rows = z.reshape(-1, z.shape[-1])
        if offsets is not None and not isinstance(offsets, (Offsets, RoutingOffsets)):
            raise TypeError(f"offsets is {kind_of(offsets)}, must be cadre.Offsets or None")
        starts = offsets_of_all_rows(rows) if offsets is None else offsets.offsets
        h = torch.ops.cadre.activation(rows, starts, _probabilities(scales), self.activation)
        return h if z.dim() == 2 else h.view(*z.shape[:-1], h.shape[-1])

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return repr(self.activation)


def _probabilities(scales: Tensor | None) -> Tensor | None:
    require_factor("scales", scales)
    return None if scales is None else scales.reshape(-1).to(torch.float32)


def _clamped(limit: float, alpha: float, offset: float) -> str:
    for name, value in (("limit", limit), ("alpha", alpha), ("glu_linear_offset", offset)):
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is {kind_of(value)}, must be a number")
    return (f"clamped_swiglu limit={float(limit)!r} alpha={float(alpha)!r} "
            f"offset={float(offset)!r}")


class SwiGLU(Activation):
    """silu(gate) * up."""

    def __init__(self, glu_interleave_size: int | None = None, *,
                 activation_recompute_in_mlp: bool = False) -> None:
        super().__init__("swiglu", glu_interleave_size, activation_recompute_in_mlp)


class ClampedSwiGLU(Activation):
    """g * sigmoid(alpha * g) * u with g = min(gate, limit) and u = clamp(up, -limit, limit) +
    glu_linear_offset."""

    def __init__(self, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, *,
                 glu_interleave_size: int | None = None,
                 activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(_clamped(limit, alpha, glu_linear_offset), glu_interleave_size,
                         activation_recompute_in_mlp)


class SReLU(Activation):
    """max(z, 0) squared."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__("relu_squared", None, activation_recompute_in_mlp)


class ScaledSwiGLU(SwiGLU):
    """silu(gate) * up * scales."""

    scaled: bool = True


class ScaledClampedQGeGLU(Activation):
    """`ClampedSwiGLU` times scales."""

    scaled: bool = True

    def __init__(self, glu_interleave_size: int | None = None, *, limit: float = 7.0,
                 alpha: float = 1.702, glu_linear_offset: float = 1.0,
                 activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(_clamped(limit, alpha, glu_linear_offset), glu_interleave_size,
                         activation_recompute_in_mlp)


class ScaledSReLU(SReLU):
    """max(z, 0) squared, times scales."""

    scaled: bool = True


_Op = GroupedLinear | Activation


class Step(NamedTuple):
    """What one operator call of a row does."""

    name: str  # "grouped_linear", "activation", "grouped_mlp", or the class of another module
    modules: tuple[nn.Module, ...]
    not_fused: str  # why a linear, activation, linear that begins here is no grouped_mlp, or ""


class _Bound(NamedTuple):
    """An operation or another module with what this call gives it."""

    module: nn.Module
    extra: tuple[Any, ...]
    arguments: Mapping[str, Tensor]


class Sequential(nn.Sequential):
    """Operations and other modules in a row: `Sequential(GroupedLinear(...), ScaledSwiGLU(), ...)`.
    Modules that are no operations of `cadre.ops` run as they are.

    A linear, an activation and a linear on the same splits run as one grouped_mlp, with the same
    bits, unless one of them has buffers or hooks, writes main_grad or delays weight gradients.
    """

    def forward(self, input: Tensor, *extra_inputs: Any,
                op_kwargs: Mapping[nn.Module | int, Mapping[str, Tensor]] | None = None) -> Tensor:
        """The result of the last module.

        extra_inputs: what the operations take, in their order: the splits of a GroupedLinear (rows
            of each expert), then its scales if it has scale_bias; the scales of a scaled
            activation. The same splits object may be given to all.
        op_kwargs: arguments of single operations: {operation: {key: value}}, the operation itself
            or its index among the modules of the row, as in `self[index]`, negative from the end.
            A GroupedLinear takes OUTPUT_BUFFER_KEY and GRAD_INPUT_BUFFER_KEY.

        Errors: ValueError for a wrong number of extra inputs, a target that is no operation of the
        row, and a key that it does not take; RuntimeError for activation_recompute_in_mlp where
        the three are not one grouped_mlp; and what the operations raise.
        """
        row = self._bind(extra_inputs, op_kwargs)
        ready: list[tuple[Any, Offsets]] = []
        x, at, offsets = input, 0, None
        for step in _steps(row):
            bound = row[at:at + len(step.modules)]
            at += len(step.modules)
            if step.name == "grouped_mlp":
                offsets = _offsets(bound[0], x, ready)
                x = _run_mlp(bound, x, offsets)
            elif step.name == "grouped_linear":
                offsets = _offsets(bound[0], x, ready)
                x = bound[0].module(x, offsets, *bound[0].extra[1:], **bound[0].arguments)
            elif step.name == "activation":
                _refuse_recompute(bound[0].module, row, at)
                x = bound[0].module(x, *bound[0].extra, offsets=offsets)
            else:
                x, offsets = bound[0].module(x), None
        return x

    def plan(self, *extra_inputs: Any,
             op_kwargs: Mapping[nn.Module | int, Mapping[str, Tensor]] | None = None) -> list[Step]:
        """The steps that `forward` runs with these arguments, and why three operations are not one.
        Errors: ValueError as `forward`."""
        return _steps(self._bind(extra_inputs, op_kwargs))

    def _bind(self, extra_inputs: Sequence[Any],
              op_kwargs: Mapping[nn.Module | int, Mapping[str, Tensor]] | None) -> list[_Bound]:
        """The modules, each with its extra inputs and arguments."""
        ops = [m for m in self if isinstance(m, _Op)]
        arguments = _arguments(list(self), op_kwargs or {})
        wanted = sum(op.num_extra_inputs for op in ops)
        if len(extra_inputs) != wanted:
            each = ", ".join(f"{type(op).__name__} {op.num_extra_inputs}" for op in ops)
            raise ValueError(f"{len(extra_inputs)} extra inputs are given, must be {wanted}; the "
                             f"operations take {each}")
        row, used = [], 0
        for module, given in zip(self, arguments):
            end = used + (module.num_extra_inputs if isinstance(module, _Op) else 0)
            row.append(_Bound(module, tuple(extra_inputs[used:end]), given))
            used = end
        return row


def _arguments(row: list[nn.Module], op_kwargs: Mapping[Any, Mapping[str, Tensor]]
               ) -> list[dict[str, Tensor]]:
    """What op_kwargs says to each module."""
    found: list[dict[str, Tensor]] = [{} for _ in row]
    for what in (op_kwargs, *(op_kwargs.values() if isinstance(op_kwargs, Mapping) else ())):
        if not isinstance(what, Mapping):
            raise TypeError(f"op_kwargs is or has {kind_of(what)}, must be dicts: "
                            "{operation: {key: tensor}}")
    for target, given in op_kwargs.items():
        index = _index(row, target)
        op = row[index]
        for key, value in given.items():
            if key not in op.op_keys:
                takes = ", ".join(map(repr, op.op_keys)) or "none"
                raise ValueError(f"op_kwargs: key of module {index} ({type(op).__name__}) is "
                                 f"{key!r}, must be one that it takes: {takes}")
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"op_kwargs: {key!r} of module {index} is a "
                                f"{type(value).__name__}, must be a tensor")
            if key in found[index]:
                raise ValueError(f"op_kwargs: key {key!r} of module {index} is given twice, must "
                                 "be once; the operation and its index are both targets")
            found[index][key] = value
    return found


def _index(row: list[nn.Module], target: Any) -> int:
    """Where in the row the target of op_kwargs stands."""
    what, index = kind_of(target), None
    if isinstance(target, int) and not isinstance(target, bool):
        if not -len(row) <= target < len(row):
            raise ValueError(f"op_kwargs: target is {target}, must be an index from {-len(row)} to "
                             f"{len(row) - 1}; the row has {len(row)} modules")
        index = target % len(row)
        what = f"{target}, {kind_of(row[index])}"
    elif isinstance(target, nn.Module):
        index = next((i for i, module in enumerate(row) if module is target), None)
    if index is not None and isinstance(row[index], _Op):
        return index
    why = "it is not" if index is None else "it is in the row, but no operation"
    raise ValueError(f"op_kwargs: target is {what}, must be an operation of the row or the index "
                     f"of one; {why}")


def _steps(row: list[_Bound]) -> list[Step]:
    """Three operations as one where they fit."""
    steps, at = [], 0
    while at < len(row):
        three, why = row[at:at + 3], ""
        if _is_mlp(three):
            why = _why_not_fused(three)
            if not why:
                steps.append(Step("grouped_mlp", tuple(b.module for b in three), ""))
                at += 3
                continue
        steps.append(Step(_name(row[at].module), (row[at].module,), why))
        at += 1
    return steps


def _name(module: nn.Module) -> str:
    if isinstance(module, GroupedLinear):
        return "grouped_linear"
    return "activation" if isinstance(module, Activation) else type(module).__name__


def _is_mlp(three: list[_Bound]) -> bool:
    kinds = (GroupedLinear, Activation, GroupedLinear)
    return len(three) == 3 and all(isinstance(b.module, kind) for b, kind in zip(three, kinds))


def _why_not_fused(three: list[_Bound]) -> str:
    """Why a linear, an activation and a linear are not one grouped_mlp; "" if they are."""
    first, activation, second = (b.module for b in three)
    columns = second.in_features * (2 if activation.gated else 1)
    reasons = [
        (three[0].extra[0] is not three[2].extra[0], "the linears are given different splits"),
        (first.num_groups != second.num_groups, "the linears have different numbers of experts"),
        (first.out_features != columns, "the activation does not lead from one to the other"),
        (first.scale_bias, "the first linear scales its bias"),
        (not _alike(first, second), "parameters of the linears differ in packing, dtype or order"),
        (any(b.arguments for b in three), "an operation has buffers of the caller"),
        (any(_has_hooks(b.module) for b in three), "an operation has hooks"),
    ]
    for linear in (first, second):
        reasons += [(linear.fuse_wgrad_accumulation, "a linear writes main_grad"),
                    (linear.delay_wgrad_compute, "a linear delays its weight gradients")]
    return "; ".join(dict.fromkeys(why for holds, why in reasons if holds))


def _alike(first: GroupedLinear, second: GroupedLinear) -> bool:
    """Whether grouped_mlp takes both together: packed or discrete alike, of one dtype, transposed
    or not."""
    one, two = ([(len(own) == 1, own[0].dim(), own[0].dtype) for own in linear.operands() if own]
                for linear in (first, second))
    majors = {linear.operands()[0][0].stride(-1) == 1 for linear in (first, second)}
    return len(majors) == 1 and all(a == b for a, b in zip(one, two))


def _has_hooks(op: nn.Module) -> bool:
    """Hooks that calling the operation would run, such as those that gather sharded parameters."""
    return bool(op._forward_pre_hooks or op._forward_hooks or op._backward_pre_hooks
                or op._backward_hooks)


def _refuse_recompute(activation: Activation, row: list[_Bound], next_at: int) -> None:
    if activation.activation_recompute_in_mlp:
        why = _why_not_fused(row[next_at - 2:next_at + 1]) if _is_mlp(
            row[max(next_at - 2, 0):next_at + 1]) else "it stands between no two linears"
        raise RuntimeError("activation_recompute_in_mlp is True, must be False here; only a "
                           f"grouped_mlp computes the activation again in backward, and {why}")


def _offsets(linear: _Bound, x: Tensor, ready: list[tuple[Any, Offsets]]) -> Offsets:
    """Of the splits of a linear, built once for each object that is given as splits."""
    splits = linear.extra[0]
    for known, offsets in ready:
        if known is splits:
            return offsets
    require_rows("input", x)
    rows = x.reshape(-1, x.shape[-1])
    counts = linear.module.num_groups, rows, linear.module.splits_name
    offsets = Offsets(offsets_of(splits, *counts), None)
    ready.append((splits, offsets))
    return offsets


def _run_mlp(three: list[_Bound], x: Tensor, offsets: Offsets) -> Tensor:
    first, activation, second = (b.module for b in three)
    require_rows("input", x)
    if x.shape[-1] != first.in_features:
        raise ValueError(f"input has shape {list(x.shape)}, must be [..., {first.in_features}]; "
                         "in_features of the first linear is its last dimension")
    prob = _probabilities(three[1].extra[0]) if three[1].extra else None
    scale = _probabilities(three[2].extra[1]) if second.scale_bias else None
    y, _ = torch.ops.cadre.grouped_mlp(
        x.reshape(-1, first.in_features), offsets.offsets, prob, *first.operands(),
        *second.operands(), scale, activation=activation.activation,
        recipe=words_for(active_recipe(), x))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
