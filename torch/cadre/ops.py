"""Operations in a row: what TransformerEngine calls te.ops, on Cadre's operators.

    mlp = cadre.ops.Sequential(
        cadre.ops.GroupedLinear(E, H, 2 * F), cadre.ops.ScaledSwiGLU(),
        cadre.ops.GroupedLinear(E, F, H))
    y = mlp(x, counts, prob, counts)

Operations take extra inputs, such as the rows of each expert, in the order of the row. A linear, an
activation and a linear run as one `grouped_mlp` where they can; `Sequential.plan` says so.
"""

import functools
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from .counts import Counts, offsets_of, same_counts
from .dtypes import kind_of, require_bools, require_float, require_rows
from .grouped_linear import GroupedLinear as _GroupedLinear
from .op_activations import (
    GEGLU, GELU, QGEGLU, Activation, ClampedSwiGLU, ReGLU, ReLU, ScaledClampedQGeGLU, ScaledSReLU,
    ScaledSwiGLU, SiLU, SReLU, SwiGLU, probabilities)
from .op_formulas import GLU, QGELU, ScaledSiTUGLU, SiTUGLU, SReGLU
from .op_quantize import Quantize
from .operation import AddExtraInput, Bias, Identity, MakeExtraOutput, Operation
from .operations import Offsets
from .recipe import active_recipe, words_for

OUTPUT_BUFFER_KEY: str = "output"
GRAD_INPUT_BUFFER_KEY: str = "grad_input"

__all__ = [
    "GEGLU", "GELU", "GLU", "GRAD_INPUT_BUFFER_KEY", "OUTPUT_BUFFER_KEY", "Activation",
    "AddExtraInput", "Bias", "ClampedSwiGLU", "GroupedLinear", "Identity", "MakeExtraOutput",
    "Operation", "QGEGLU", "QGELU", "Quantize", "ReGLU", "ReLU", "SReGLU", "SReLU",
    "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU", "Sequential", "SiLU",
    "SiTUGLU", "Step", "SwiGLU"]


class GroupedLinear(_GroupedLinear, Operation):
    """A linear layer per expert as an operation. Extra inputs: split_sizes, the rows of each expert
    (see `cadre.GroupedLinear`), and, with scale_bias, scales fp32 [R], a factor of each row's bias.

    op_kwargs: "output", a buffer [R, N] for its result; "grad_input", one [R, K] for the gradient
    of its input.

    num_groups: E. in_features: K. out_features: N. dtype: f32, bf16, f16; None: torch's default.
    accumulate_into_main_grad: as fuse_wgrad_accumulation of `cadre.GroupedLinear`.
    scale_bias: means nothing without a bias.
    Weights begin as those of torch.nn.Linear, biases at zero.

    Errors: ValueError for sizes, TypeError for dtypes.
    """

    op_keys: tuple[str, ...] = (OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY)
    input_name: str = "input"
    counts_name: str = "split_sizes"
    experts_name: str = "num_groups"
    marks_biases: bool = False
    marks_shares: bool = False

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, bias: bool = True,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None,
                 rng_state_tracker_function: Callable[[], Any] | None = None,
                 accumulate_into_main_grad: bool = False, single_grouped_weight: bool = False,
                 single_grouped_bias: bool = False, delay_wgrad_compute: bool = False,
                 scale_bias: bool = False) -> None:
        require_bools(bias=bias, scale_bias=scale_bias)
        if dtype is not None:
            require_float("dtype", dtype)
        super().__init__(
            num_groups, in_features, out_features, bias=bias, device=device, params_dtype=dtype,
            get_rng_state_tracker=rng_state_tracker_function,
            init_method=functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute, scale_bias=scale_bias and bias)

    @property
    def has_bias(self) -> bool:
        return self.use_bias

    @property
    def num_groups(self) -> int:
        return self.num_gemms

    @property
    def num_extra_inputs(self) -> int:
        return 2 if self.scale_bias else 1

    def forward(self, input: Tensor, split_sizes: Counts, scales: Tensor | None = None, *,
                output: Tensor | None = None, grad_input: Tensor | None = None) -> Tensor:
        """[..., N] for input [..., K]. Errors: as `cadre.GroupedLinear`."""
        require_rows("input", input)
        return super().forward(input, split_sizes, None, output, grad_input,
                               bias_scale=probabilities(scales, input))

    if TYPE_CHECKING:
        __call__ = forward


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


class _Channel(NamedTuple):
    """In the place of an extra input that an operation ahead of it makes."""

    name: str


class _ExtraOutputs:
    """What the operations made so far beside their results."""

    def __init__(self) -> None:
        self.of_caller: list[Tensor] = []
        self._of_channels: dict[str, Tensor] = {}

    def take(self, op: Operation, made: Sequence[Tensor]) -> None:
        for index, tensor in enumerate(made):
            channel, to_caller = op._output_channels.get(index, ("", True))
            if channel:
                self._of_channels[channel] = tensor
            if to_caller:
                self.of_caller.append(tensor)

    def given_to(self, bound: _Bound) -> _Bound:
        """With tensors for channels."""
        if not any(isinstance(e, _Channel) for e in bound.extra):
            return bound
        return bound._replace(extra=tuple(
            self._of_channels[e.name] if isinstance(e, _Channel) else e for e in bound.extra))


class Sequential(nn.Sequential):
    """Operations and other modules in a row: `Sequential(GroupedLinear(...), ScaledSwiGLU(), ...)`,
    or a dict of them, by name. Modules that are no operations of `cadre.ops` run as they are.

    A linear, an activation and a linear on the same counts and in the same recipe, back to the
    width they come from, run as one grouped_mlp, with the same bits but for stochastic rounding,
    unless one of them has buffers, hooks or a forward of its own, writes main_grad or delays weight
    gradients.
    """

    def __init__(self, *modules: nn.Module | Mapping[str, nn.Module]) -> None:
        named = len(modules) == 1 and isinstance(modules[0], Mapping)
        super().__init__(*([OrderedDict(modules[0])] if named else modules))

    def append(self, module: nn.Module) -> "Sequential":
        """The module at the end, under a number that no other has."""
        numbers = [int(name) for name in self._modules if name.isdecimal()]
        self.add_module(str(max(numbers, default=-1) + 1), module)
        return self

    def insert(self, index: int, module: nn.Module) -> "Sequential":
        """The module before that of the index; those behind it move on by a name."""
        row = list(self)
        row.insert(index, module)
        self.append(row[-1])
        self._modules.update(zip(self._modules, row))
        return self

    def __add__(self, others: Iterable[nn.Module]) -> "Sequential":
        return Sequential(*self, *others)

    def __mul__(self, times: int) -> "Sequential":
        return Sequential(*super().__mul__(times))

    def __iadd__(self, others: Iterable[nn.Module]) -> "Sequential":
        return self.extend(list(others))

    def forward(
        self, input: Tensor, *extra_inputs: Any,
        op_kwargs: Mapping[nn.Module | int, Mapping[str, Tensor]] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """The result of the last module; with a MakeExtraOutput in the row (result, extra outputs
        in their order).

        extra_inputs: what the operations take, in their order, but for what has a channel: the
            counts of a GroupedLinear (rows of each expert), then its scales if it has scale_bias;
            the scales of a scaled activation; what an AddExtraInput adds. The same counts, one
            object or equal lists, may be given to all.
        op_kwargs: arguments of single operations: {operation: {key: value}}, the operation itself
            or its index among the modules of the row, as in `self[index]`, negative from the end.
            A GroupedLinear takes OUTPUT_BUFFER_KEY and GRAD_INPUT_BUFFER_KEY.

        Errors: ValueError for a wrong number of extra inputs, a channel that no operation ahead or
        more than one fills, a target that is no operation of the row, and a key that it does not
        take; RuntimeError for activation_recompute_in_mlp where the three are not one grouped_mlp;
        and what the operations raise.
        """
        row = self._bind(extra_inputs, op_kwargs)
        ready: list[tuple[Any, int, Offsets]] = []
        outputs = _ExtraOutputs()
        x, at, offsets = input, 0, None
        for step in _steps(row):
            bound = [outputs.given_to(b) for b in row[at:at + len(step.modules)]]
            at += len(step.modules)
            op = bound[0].module
            if step.name == "grouped_mlp":
                offsets = _offsets(bound[0], x, ready)
                x = _run_mlp(bound, x, offsets)
            elif step.name == "grouped_linear" and not _is_changed(op):
                offsets = _offsets(bound[0], x, ready)
                x = op(x, offsets, *bound[0].extra[1:], **bound[0].arguments)
            elif step.name == "grouped_linear":
                x = op(x, *bound[0].extra, **bound[0].arguments)
            elif step.name == "activation":
                _refuse_recompute(op, row, at)
                with_offsets = {"offsets": offsets} if _takes_offsets(op) else {}
                x = op(x, *bound[0].extra, **with_offsets)
            else:
                x = op(x, *bound[0].extra)
            if isinstance(op, Operation) and op.num_extra_outputs:
                x, *more = _outputs_of(op, x)
                outputs.take(op, more)
            if not _keeps_rows(op):
                offsets = None
        return (x, *outputs.of_caller) if outputs.of_caller else x

    def plan(self, *extra_inputs: Any,
             op_kwargs: Mapping[nn.Module | int, Mapping[str, Tensor]] | None = None) -> list[Step]:
        """The steps that `forward` runs with these arguments, and why three operations are not one.
        Errors: ValueError as `forward`."""
        return _steps(self._bind(extra_inputs, op_kwargs))

    def _bind(self, extra_inputs: Sequence[Any],
              op_kwargs: Mapping[nn.Module | int, Mapping[str, Tensor]] | None) -> list[_Bound]:
        """The modules, each with its extra inputs and arguments."""
        arguments = _arguments(list(self), op_kwargs or {})
        slots, free = _slots(list(self)), iter(extra_inputs)
        wanted = [sum(slot is None for slot in of_op) for of_op in slots]
        if len(extra_inputs) != sum(wanted):
            each = ", ".join(f"{type(op).__name__} {count}" for op, count in zip(self, wanted)
                             if isinstance(op, Operation))
            raise ValueError(f"{len(extra_inputs)} extra inputs are given, must be {sum(wanted)}; "
                             f"the operations take {each}")
        return [_Bound(module, tuple(next(free) if slot is None else slot for slot in of_op), given)
                for module, of_op, given in zip(self, slots, arguments)]


def _slots(row: list[nn.Module]) -> list[list[_Channel | None]]:
    """The extra inputs of each module: None where the caller gives them. One object stands for a
    channel, whoever reads it."""
    if not any(isinstance(op, Operation) and (op._input_channels or op._output_channels)
               for op in row):
        return [[None] * op.num_extra_inputs if isinstance(op, Operation) else [] for op in row]
    made: dict[str, _Channel] = {}
    found = []
    for index, op in enumerate(row):
        if not isinstance(op, Operation):
            found.append([])
            continue
        channels = [op._input_channels.get(slot) for slot in range(op.num_extra_inputs)]
        for name in channels:
            if name is not None and name not in made:
                raise ValueError(f"channel of an extra input of module {index} "
                                 f"({type(op).__name__}) is {name!r}, must be that of an extra "
                                 f"output ahead of it: {', '.join(map(repr, made)) or 'none'}")
        found.append([None if name is None else made[name] for name in channels])
        for name, _ in op._output_channels.values():
            if name in made:
                raise ValueError(f"channel of an extra output of module {index} "
                                 f"({type(op).__name__}) is {name!r}, must be its own; another "
                                 "extra output has it, too")
            made[name] = _Channel(name)
    return found


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
        places = [i for i, module in enumerate(row) if module is target]
        if len(places) > 1:
            raise ValueError(f"op_kwargs: target is {what}, must be an index; the row has it at "
                             f"{', '.join(map(str, places))}")
        index = places[0] if places else None
    if index is not None and isinstance(row[index], Operation):
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


def _is_changed(op: nn.Module) -> bool:
    """Whether a subclass, or who patched the instance, computes something else."""
    own = GroupedLinear if isinstance(op, GroupedLinear) else Activation
    return any(name in vars(op) or getattr(type(op), name) is not getattr(own, name)
               for name in ("forward", "_compute") if hasattr(own, name))


def _takes_offsets(op: Activation) -> bool:
    """A forward of its own need not."""
    own = vars(op).get("forward", type(op).forward)
    if own is Activation.forward:
        return True
    parameters = inspect.signature(own).parameters.values()
    return any(p.name == "offsets" or p.kind is p.VAR_KEYWORD for p in parameters)


_KEEP_ROWS = [kind.forward for kind in (
    GroupedLinear, Activation, Identity, Bias, Quantize, MakeExtraOutput, AddExtraInput)]


def _keeps_rows(op: nn.Module) -> bool:
    """Whether what it makes has the rows that it was given; the caller's own may do anything."""
    own = getattr(type(op), "forward", None)
    return "forward" not in vars(op) and any(own is forward for forward in _KEEP_ROWS)


def _outputs_of(op: Operation, made: Any) -> tuple[Any, ...]:
    """Errors: ValueError unless they are as many as the operation says."""
    wanted = 1 + op.num_extra_outputs
    if not isinstance(made, (tuple, list)) or len(made) != wanted:
        found = len(made) if isinstance(made, (tuple, list)) else kind_of(made)
        raise ValueError(f"forward of {type(op).__name__} returned {found}, must return {wanted} "
                         f"tensors; num_extra_outputs is {op.num_extra_outputs}")
    return tuple(made)


def _why_not_fused(three: list[_Bound]) -> str:
    """Why a linear, an activation and a linear are not one grouped_mlp; "" if they are."""
    first, activation, second = (b.module for b in three)
    columns = second.in_features * (2 if activation.gated else 1)
    reasons = [
        (not same_counts(three[0].extra[0], three[2].extra[0]),
         "the linears are given different counts"),
        (first.num_groups != second.num_groups, "the linears have different numbers of experts"),
        (first.out_features != columns, "the activation does not lead from one to the other"),
        (second.out_features != first.in_features, "the second linear leads to another width"),
        (first.scale_bias, "the first linear scales its bias"),
        (not _alike(first, second), "parameters of the linears differ in packing, dtype or order"),
        (any(b.arguments for b in three), "an operation has buffers of the caller"),
        (any(_has_hooks(b.module) for b in three), "an operation has hooks"),
        (not activation.activation, "the activation has no operator"),
        (_is_changed(first) or _is_changed(second) or
         bool(activation.activation) and _is_changed(activation),
         "an operation has a forward of its own"),
        (first.recipe != second.recipe, "the linears have different recipes"),
        (activation.cache_quantized_input, "the activation keeps its input in fp8"),
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
    """Hooks that calling the operation would run, such as those that gather sharded parameters, or
    those of all modules."""
    return bool(op._forward_pre_hooks or op._forward_hooks or op._backward_pre_hooks
                or op._backward_hooks or module._has_any_global_hook())


def _refuse_recompute(activation: Activation, row: list[_Bound], next_at: int) -> None:
    if activation.activation_recompute_in_mlp:
        why = _why_not_fused(row[next_at - 2:next_at + 1]) if _is_mlp(
            row[max(next_at - 2, 0):next_at + 1]) else "it stands between no two linears"
        raise RuntimeError("activation_recompute_in_mlp is True, must be False here; only a "
                           f"grouped_mlp computes the activation again in backward, and {why}")


def _offsets(linear: _Bound, x: Tensor, ready: list[tuple[Any, int, Offsets]]) -> Offsets:
    """Of the counts of a linear, built once for counts that are the same and of as many rows."""
    counts = linear.extra[0]
    require_rows("input", x)
    rows = x.reshape(-1, x.shape[-1])
    for known, count, offsets in ready:
        if count == rows.shape[0] and same_counts(known, counts):
            return offsets
    offsets = Offsets(offsets_of(counts, linear.module.num_groups, rows,
                                 linear.module.counts_name), None)
    ready.append((counts, rows.shape[0], offsets))
    return offsets


def _run_mlp(three: list[_Bound], x: Tensor, offsets: Offsets) -> Tensor:
    first, activation, second = (b.module for b in three)
    require_rows("input", x)
    if x.shape[-1] != first.in_features:
        raise ValueError(f"input has shape {list(x.shape)}, must be [..., {first.in_features}]; "
                         "in_features of the first linear is its last dimension")
    prob = probabilities(three[1].extra[0], x) if three[1].extra else None
    scale = probabilities(three[2].extra[1], x) if second.scale_bias else None
    y, _ = torch.ops.cadre.grouped_mlp(
        x.reshape(-1, first.in_features), offsets.offsets, prob, *first.operands(),
        *second.operands(), scale, activation=activation.activation,
        recipe=words_for(active_recipe() if first.recipe is None else first.recipe, x))
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
