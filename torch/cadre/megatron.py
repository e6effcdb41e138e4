"""Experts of Megatron-Core's MoE layer on Cadre, in one line:

    spec = get_gpt_layer_local_spec(num_experts=64, moe_grouped_gemm=False)  # or that with TE
    model = GPTModel(config, cadre.megatron.with_cadre(spec), ...)

Router, dispatcher and shared experts stay Megatron's. Experts are one `grouped_mlp` on counts that
stay on the device; with gradient_accumulation_fusion (main_grad) and delay_wgrad_compute two
`GroupedLinear` with the same bits. Their distributed checkpoints are those of SequentialMLP and
TEGroupedMLP, both ways. TransformerEngine need not be installed.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ContextManager, TypeVar

import torch
from torch import Tensor, nn

from .counts import offsets_of
from .dtypes import kind_of
from .expert_activations import words_of
from .grouped_linear import GroupedLinear as _GroupedLinear
from .operations import Offsets
from .ops import Activation, GroupedLinear, Sequential

try:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name)
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts, moe_utils
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import (
        ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint)
except ImportError as _error:
    raise ImportError("cadre.megatron: megatron.core cannot be imported, must be version 0.16; "
                      f"install it with `pip install megatron-core` ({_error})") from _error

__all__ = ["Experts", "experts_spec", "with_cadre"]

_Spec = TypeVar("_Spec")
_TEGroupedMLP = nn.Module if TYPE_CHECKING else experts.TEGroupedMLP  # Megatron has no types

# Its router asks whether there is a product of TransformerEngine by a name that it defines only
# where that is installed.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


def with_cadre(spec: _Spec) -> _Spec:
    """The same spec, of a layer, a block or an MoE layer, with Cadre for the experts of every MoE
    layer in it.

    Errors: ValueError for a spec without an MoE layer.
    """
    if not _moe_layers(spec):
        raise ValueError(f"with_cadre: spec is {kind_of(spec)} without an MoE layer, must have "
                         "one; make it with num_experts")
    return _replaced(spec)


def experts_spec() -> Any:
    """The ModuleSpec of `Experts`: what MoESubmodules takes as experts."""
    return ModuleSpec(module=Experts, submodules=_linears())


def _linears() -> Any:
    return MLPSubmodules(linear_fc1=_Column, linear_fc2=_Row)


def _moe_layers(spec: Any) -> int:
    if isinstance(spec, MoESubmodules):
        return 1
    return sum(map(_moe_layers, _parts(spec)))


def _parts(spec: Any) -> list[Any]:
    if isinstance(spec, (list, tuple)):
        return list(spec)
    return [getattr(spec, f.name) for f in fields(spec)] if _holds_parts(spec) else []


def _holds_parts(spec: Any) -> bool:
    return is_dataclass(spec) and not isinstance(spec, type)


def _replaced(spec: Any) -> Any:
    if isinstance(spec, MoESubmodules):
        return replace(spec, experts=experts_spec())
    if isinstance(spec, (list, tuple)):
        return type(spec)(map(_replaced, spec))
    if _holds_parts(spec) and _moe_layers(spec):
        return replace(spec, **{f.name: _replaced(getattr(spec, f.name)) for f in fields(spec)})
    return spec


class _Linear(GroupedLinear):
    """A GroupedLinear as Megatron builds one: of all experts of a rank, a weight each, parallel
    over the experts' tensor parallel group, whose ranks the dispatcher brings together."""

    split: int  # the dimension of a weight that the ranks divide

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any,
                 init_method: Callable[[Tensor], Any], bias: bool, skip_bias_add: bool,
                 is_expert: bool = True, tp_comm_buffer_name: str | None = None,
                 pg_collection: Any = None) -> None:
        self._groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        ranks = self._groups.expt_tp.size()
        if bias and ranks > 1:
            raise ValueError(f"expert_tensor_parallel_size is {ranks}, must be 1 with "
                             "add_bias_linear; every rank would add the bias")
        sizes = [output_size, input_size]
        sizes[self.split] //= ranks  # Megatron's config has looked whether it divides
        tracker = get_cuda_rng_tracker()
        _GroupedLinear.__init__(
            self, num_gemms, sizes[1], sizes[0], bias=bias, params_dtype=config.params_dtype,
            device=_device(config), init_method=_init_of(config, init_method),
            get_rng_state_tracker=get_cuda_rng_tracker if tracker.is_initialized() else None,
            rng_tracker_name=get_expert_parallel_rng_tracker_name(),
            fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
            delay_wgrad_compute=config.delay_wgrad_compute, scale_bias=skip_bias_add and bias)
        for name, parameter in self.named_parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1
            if name.startswith("weight") or self.split == 0:
                set_tensor_model_parallel_attributes(parameter, True, self.split, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (),
                           metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Of every expert what its own linear layer would have, under the same names."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups, found = self._groups, {}
        for e in range(self.num_gemms):
            number = groups.ep.rank() * self.num_gemms + e
            key, offsets = f"{number}.{prefix}", sharded_offsets
            if not metadata.get("singleton_local_shards", False):
                everyone = groups.ep.size() * self.num_gemms
                key, offsets = prefix, (*sharded_offsets,
                                        (len(sharded_offsets), number, everyone))
            own = {stem: getattr(self, f"{stem}{e}")
                   for stem in (("weight", "bias") if self.use_bias else ("weight",))}
            own["_extra_state"] = self.get_extra_state()
            axes = {"weight": self.split} | ({"bias": 0} if self.split == 0 else {})
            sharded = make_sharded_tensors_for_checkpoint(
                own, key, axes, offsets, tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"])
            for stem in own:
                part = sharded[key + stem]
                split = getattr(part, "is_data_parallel_fully_shard", False)
                part.replica_id = (*part.replica_id[:2], 0 if split else groups.expt_dp.rank())
                found[prefix + (stem if (stem, e) == ("_extra_state", 0) else f"{stem}{e}")] = part
        return found


class _Column(_Linear):
    split: int = 0


class _Row(_Linear):
    split: int = 1


def _device(config: Any) -> Any:
    if config.use_cpu_initialization:
        return "cpu"
    return "meta" if config.init_model_with_meta_device else torch.cuda.current_device()


def _init_of(config: Any, init_method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return init_method if config.perform_initialization else lambda weight: weight


class Experts(_TEGroupedMLP):
    """The experts of a rank, in place of TEGroupedMLP and SequentialMLP. `experts_spec` has it.

    Errors: NotImplementedError for an activation and options that Cadre does not have; ValueError
    for biases with tensor parallel experts.
    """

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None,
                 pg_collection: Any = None) -> None:
        _require_options(config)
        activation = _activation_of(config)
        super().__init__(num_local_experts, config, submodules or _linears(), pg_collection)
        # In tuples, so that states have no linear twice.
        self._between: tuple[Any, ...] = (activation, self.activation_func)
        row = Sequential(self.linear_fc1, activation, self.linear_fc2)
        self._row: tuple[Any, ...] = (row, self.linear_fc1, self.linear_fc2)
        self._scales_bias: bool = self.linear_fc2.scale_bias
        self._recomputes: bool = _recomputes(config)

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor,
                permuted_probs: Tensor) -> tuple[Tensor, None]:
        """(y [R, H], no bias that is left to add) for rows in the order of the experts."""
        x, prob = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x, prob = (x * prob.unsqueeze(-1)).to(x.dtype), torch.ones_like(prob)
        counts = tokens_per_expert
        biases = (prob,) if self._scales_bias else ()
        activation, known = self._between
        if self.activation_func is not known:
            raise NotImplementedError("megatron: activation_func of the experts was replaced, must "
                                      "be that of the config; it is measured when they are made")
        row, fc1, fc2 = self._row
        given = counts, prob, counts, *biases
        if self.linear_fc1 is fc1 and self.linear_fc2 is fc2 and (
                not self._recomputes or len(row.plan(*given)) == 1):
            return row(x, *given), None
        z = _result(self.linear_fc1(x, counts))  # somebody has wrapped one, or hung a hook there
        offsets = Offsets(offsets_of(counts, self.num_local_experts, z), None)
        h = activation(z, prob, offsets=offsets)
        z, prob = z.detach(), prob.detach()
        make = functools.partial(activation, z, prob, offsets=offsets)
        with _making_again(h, make) if self._recomputes else nullcontext():
            return _result(self.linear_fc2(h, counts, *biases)), None


def _making_again(h: Tensor, make: Callable[[], Tensor]) -> ContextManager[Any]:
    """A context in which autograd keeps no h, which backward makes again, unless it was written in
    place. Tensors behind hooks are not looked at by autograd, so this asks whether the others
    changed."""

    def look_of(t: Tensor) -> tuple[Any, ...]:
        return t.data_ptr(), t.shape, t.stride(), t.dtype, t._version

    look = look_of(h)

    def pack(saved: Tensor) -> tuple[Tensor, int] | None:
        if look_of(saved) == look:
            return None
        kept = saved if saved.is_leaf else saved.detach()  # a result would hold what made it
        return kept, kept._version

    def unpack(kept: tuple[Tensor, int] | None) -> Tensor:
        if kept is None:
            with torch.no_grad():
                return make()
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError("megatron: a tensor that linear_fc2 saved was written in place, "
                               "must be left alone until backward")
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _result(given: Any) -> Tensor:
    """Of a linear, which may come with a bias that is left to add, as Megatron's do."""
    if not isinstance(given, tuple):
        return given
    result, bias = given
    if bias is not None:
        raise NotImplementedError("megatron: a linear of the experts returns a bias, must add it")
    return result


class _Scaled(Activation):
    scaled: bool = True


def _activation_of(config: Any) -> Activation:
    """What Megatron computes between the linears; found by calling it."""
    function, gated = config.activation_func, config.gated_linear_unit
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset

    def gate_and_up(z: Tensor) -> Tensor:
        gate, up = z.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return function(gate) * (up + offset)

    with torch.compiler.set_stance("force_eager"):  # some are decorated with torch.compile
        words = words_of(gate_and_up if gated else function, gated,
                         [1.702] if limit is None else [1.702, limit],
                         [1e38 if limit is None else limit], [offset])
    if words is None:
        raise NotImplementedError(
            f"megatron: activation_func is {getattr(function, '__name__', function)} with "
            f"gated_linear_unit={gated}, must be one that cadre.GroupedMLP has")
    return _Scaled(words, getattr(config, "moe_mlp_glu_interleave_size", None))


def _recomputes(config: Any) -> bool:
    selective: bool = config.recompute_granularity == "selective"
    return selective and "moe_act" in config.recompute_modules


def _require_options(config: Any) -> None:
    """Errors: NotImplementedError for what would be left out in silence."""
    apart = config.gradient_accumulation_fusion or config.delay_wgrad_compute
    offloads = config.fine_grained_activation_offloading and {"expert_fc1", "moe_act"} & {
        *config.offload_modules}
    for wanted, option, why in (
        (config.fp8 or config.fp4, "fp8 or fp4",
         "write `with cadre.autocast(recipe=...)` around the model"),
        (offloads, "offload_modules", "experts keep what backward needs on the device"),
        (config.moe_apply_probs_on_input and config.moe_router_topk != 1,
         "moe_apply_probs_on_input beside a moe_router_topk that is not 1",
         "scaling the input is not scaling the result; Megatron's own experts refuse it, too"),
        (config.activation_func_fp8_input_store, "activation_func_fp8_input_store",
         "the activation's input is kept as it is"),
        (_recomputes(config) and apart, "moe_act of recompute_modules beside "
         "gradient_accumulation_fusion or delay_wgrad_compute",
         "such linears keep what they are given"),
    ):
        if wanted:
            raise NotImplementedError(f"megatron: {option} is on, must be off; {why}")
