"""A linear layer per expert."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import main_grad  # noqa: F401 (backward calls it)
from .counts import Counts, counts_or_offsets
from .deferral import DeferredGradients, Memory
from .devices import default_device
from .dtypes import (
    kind_of, require_bools, require_factor, require_float, require_rows, require_sizes,
    working_dtype)
from .layouts import EmptyExtraState, Report, relayout
from .local_weights import draw, local, require_plain
from .recipe import active_recipe, recipe_text, words_for

_offsets = torch.ops.cadre._offsets.default
_linear = torch.ops.cadre.grouped_linear.default  # of the overloads, without a search
_linear_step = torch.ops.cadre._linear_step.default
_PLAIN = ("", "f32", "bf16", "f16")  # recipes that certainly keep no copies of weights


class GroupedLinear(DeferredGradients, EmptyExtraState):
    """y[r] = x[r] w_e^T + bias_e [* bias_scale[r]] for the rows r of every expert e.

    A drop-in for TransformerEngine's module of this name: same arguments, same protocols. Rows per
    expert may be any numbers, on the device or the host, without padding.

    num_gemms: E, 1 or more. in_features: K. out_features: N.
    fuse_wgrad_accumulation: add the weights' gradients into `main_grad` (see main_grad.py).
    get_rng_state_tracker, rng_tracker_name: `get_rng_state_tracker().fork(rng_tracker_name)` is the
        random state that weights are drawn under.
    init_method: fills one expert's weight [N, K]; None: normal of deviation 0.023. Experts are
        drawn in order, so packed and discrete weights begin alike. Biases are zero.
    return_bias: do not add the bias, but return it: (y, the packed parameter, or a list of E in the
        type of y).
    params_dtype: f32, bf16 or f16; None: torch's default.
    parallel_mode, tp_size, tp_group: "column" divides N by tp_size, "row" divides K. Nothing is
        communicated. sequence_parallel is a mark of the biases of a "row" layer, nothing else.
    device: None: that of `with torch.device(...)` or `torch.set_default_device`, else CUDA if there
        is one, else the CPU. "meta" leaves memory and values to
        `reset_parameters`.
    delay_wgrad_compute: leave the weights' gradients to `backward_dw`.
    save_original_input: keep x itself for the weights' gradients, not its copy in the recipe's
        format.
    single_grouped_weight, single_grouped_bias: one parameter `weight` [E, N, K] (`bias` [E, N])
        instead of `weight0`.. [N, K] (`bias0`.. [N]). Checkpoints of each load into the other.
        `parameters()` come in TransformerEngine's order: weight0, bias0, weight1, ..., then those
        that are packed, so that a state of an optimizer over them loads.
    use_grouped_tensor, ub_name: accepted; every call is grouped here.
    scale_bias: the bias is scaled per row; forward takes `bias_scale`.
    recipe: of this layer, whatever the context says; see `cadre.autocast`.

    Errors: ValueError for sizes, tp_size that does not divide, bias with tp_size > 1, ub_overlap_*;
    TypeError for params_dtype, and for use_grouped_tensor that is neither bool nor None.
    """

    input_name: str = "inp"  # of the arguments, for errors
    counts_name: str = "m_splits"
    experts_name: str = "num_gemms"
    marks_biases: bool = True  # delay_wgrad_compute marks them, too, with skip_backward_post_hook
    marks_shares: bool = True  # tells trainers how ranks divide the parameters

    in_features: int
    out_features: int
    params_dtype: torch.dtype
    recipe: str | None
    tp_group: Any
    tp_size: int

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """weight0, bias0 and so on, which are there by number."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int,
        sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False, ub_overlap_ag: bool = False, ub_name: str | None = None,
        delay_wgrad_compute: bool = False, save_original_input: bool = False,
        single_grouped_weight: bool = False, single_grouped_bias: bool = False,
        name: str | None = None, use_grouped_tensor: bool | None = None, *,
        scale_bias: bool = False, recipe: Any = None,
    ) -> None:
        super().__init__()
        require_sizes(**{self.experts_name: num_gemms}, in_features=in_features,
                      out_features=out_features, tp_size=tp_size)
        require_bools(
            sequence_parallel=sequence_parallel, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            bias=bias, return_bias=return_bias, ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag, delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input, single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias, scale_bias=scale_bias)
        _check_choices(parallel_mode, ub_overlap_rs, ub_overlap_ag, use_grouped_tensor)
        self.num_gemms = num_gemms
        self.set_tensor_parallel_group(tp_group)
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel
        self.in_features = self._share("in_features", in_features, "row")
        self.out_features = self._share("out_features", out_features, "column")
        if bias and self.tp_size > 1:
            raise ValueError(f"tp_size is {self.tp_size}, must be 1 with bias=True; every rank "
                             "would add the bias, so add it after the sum over ranks")
        if scale_bias and (return_bias or not bias):
            raise ValueError(f"scale_bias is True with bias={bias} and return_bias={return_bias}, "
                             "must be False; only a bias that is added here is scaled here")
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self.init_method = init_method
        self.use_bias = bias
        self.return_bias = return_bias
        self.scale_bias = scale_bias
        self.params_dtype = params_dtype or torch.get_default_dtype()
        require_float("params_dtype", self.params_dtype)
        self.ub_name = ub_name
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias
        self.name = name
        self.use_grouped_tensor = use_grouped_tensor
        self.recipe = None if recipe is None else recipe_text(recipe)
        self.fp8_meta: dict[str, Any] = {"recipe": None, "fp8_checkpoint": False}
        self.fp8 = False
        self.fp8_calibration = False
        self._names = {stem: [f"{stem}{e}" for e in range(num_gemms)]
                       for stem in ("weight", "bias")}
        self._memory = Memory()
        self._make_parameters(device)
        self.reset_parameters(defer_init=self._on_meta())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._memory = Memory()  # of a shallow copy, too

    # Parameters

    def _share(self, what: str, features: int, split_by: str) -> int:
        """This rank's part of the features."""
        if self.parallel_mode != split_by:
            return features
        if features % self.tp_size:
            raise ValueError(f"{what} is {features}, must be a multiple of tp_size "
                             f"{self.tp_size}; parallel_mode is {split_by!r}")
        return features // self.tp_size

    def _make_parameters(self, device: torch.device | str | None) -> None:
        device = default_device() if device is None else device
        shapes = {"weight": (self.out_features, self.in_features)}
        if self.use_bias:
            shapes["bias"] = (self.out_features,)
        packed = {"weight": self.single_grouped_weight, "bias": self.single_grouped_bias}
        # In TransformerEngine's order, by which states of optimizers are kept: weight0, bias0,
        # weight1, ...; then what is packed.
        for e in range(self.num_gemms):
            for stem, shape in shapes.items():
                if not packed[stem]:
                    self._register(f"{stem}{e}", shape, device)
        for stem, shape in shapes.items():
            if packed[stem]:
                self._register(stem, (self.num_gemms, *shape), device)

    def _register(self, name: str, shape: tuple[int, ...], device: Any) -> None:
        self.register_parameter(name, nn.Parameter(
            torch.empty(shape, dtype=self.params_dtype, device=device)))

    def _is_marked(self, name: str) -> bool:
        stem = name.rstrip("0123456789")
        return stem == "weight" or self.marks_biases and stem == "bias"

    def _parameters_of(self, stem: str) -> list[Tensor]:
        """One packed, or E: whatever is registered now, because trainers exchange parameters."""
        own, names = self._parameters, self._names[stem]
        packed = own.get(stem)
        if packed is None and own.get(names[0]) is None:
            packed = getattr(self, stem, None)  # sharded training may make it a plain attribute
        if packed is not None:
            return [packed]
        return [own[name] if name in own else getattr(self, name) for name in names]

    def _on_meta(self) -> bool:
        return any(p.is_meta for p in self.parameters())

    @torch.no_grad()
    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draws new weights and zeroes the biases. Parameters on "meta" get memory first, where
        torch's default device is, else on CUDA if there is one, else on the CPU;
        `to_empty(device=...)` before says where instead."""
        if defer_init:
            return
        self._leave_meta()
        with self._random_state():
            for weight in self._parameters_of("weight"):
                draw(weight, self._fill)
        if self.use_bias:
            for bias in self._parameters_of("bias"):
                bias.zero_()
        self.set_tensor_parallel_attributes()

    def set_tensor_parallel_attributes(self, defer_init: bool = False) -> None:
        """Marks the parameters as TransformerEngine does: tensor_model_parallel, partition_dim and
        partition_stride of weights, and of biases of a "column" layer; sequence_parallel of those
        of a "row" layer. A dimension is that of an expert's weight, of packed ones too. Trainers
        that find no mark take a weight for one that all tensor parallel ranks have, and leave it
        out of the gradients' norm on all but the first."""
        if defer_init or not self.marks_shares:
            return
        divided = self._parameters_of("weight")
        biases = self._parameters_of("bias") if self.use_bias else []
        for parameter in divided + (biases if self.parallel_mode == "column" else []):
            parameter.tensor_model_parallel = True
            parameter.partition_dim = 1 if self.parallel_mode == "row" else 0
            parameter.partition_stride = 1
        for bias in biases if self.parallel_mode == "row" else []:
            bias.sequence_parallel = self.sequence_parallel

    def _fill(self, weight: Tensor) -> None:
        if self.init_method is None:
            weight.normal_(0.0, 0.023)
        else:
            self.init_method(weight)

    def _leave_meta(self) -> None:
        device = default_device(real=True)
        for name, old in list(self._parameters.items()):
            if old is not None and old.is_meta:
                new = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
                new.__dict__.update(old.__dict__)
                self.register_parameter(name, new)

    def _random_state(self) -> Any:
        if self.get_rng_state_tracker is None:
            return nullcontext()
        tracker = self.get_rng_state_tracker()
        return tracker.fork(self.rng_tracker_name) if self.rng_tracker_name else tracker.fork()

    # Forward

    def forward(
        self,
        inp: Tensor,
        m_splits: Counts,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        *,
        bias_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | list[Tensor] | None]:
        """y [..., N] for inp [..., K], whose leading dimensions are R rows in expert order; with
        return_bias, (y, bias).

        m_splits: rows of each expert: E ints, a tensor [E] of any integer type on the host or the
            device, or `cadre.Offsets`. Rows beyond their sum are the tail: not read, zero in y and
            in the gradient, and untouched in the caller's buffers.
        is_first_microbatch: True: quantise the weights anew, keep the copies, and overwrite
            main_grad; False: use the copies, unless the weights hold something else since, which
            on a GPU nobody knows, so that there they are made anew; None: keep none.
        out, dgrad_out: buffers [R, N] and [R, K] of inp's type for y and for inp's gradient. The
            results alias them. Autograd copies a gradient that it has to add to another.
        bias_scale: fp32 [R], with scale_bias=True. Its gradient is computed.

        Errors: ValueError and TypeError for what does not fit, before anything is launched;
        NotImplementedError, with the reasons, for a recipe that the device does not have.
        """
        require_rows(self.input_name, inp)
        if inp.dim() < 1 or inp.shape[-1] != self.in_features:
            raise ValueError(f"{self.input_name} has shape {list(inp.shape)}, must be "
                             f"[..., {self.in_features}]; in_features is its last dimension")
        if (bias_scale is not None) != self.scale_bias:
            raise ValueError(f"bias_scale is {'missing' if bias_scale is None else 'given'}, must "
                             f"be {'given' if self.scale_bias else 'left out'}; the layer has "
                             f"scale_bias={self.scale_bias}")
        if bias_scale is not None:
            require_factor("bias_scale", bias_scale)
            bias_scale = bias_scale.contiguous()
        if is_first_microbatch is not None:
            require_bools(is_first_microbatch=is_first_microbatch)
        x = inp if inp.dim() == 2 else inp.reshape(-1, self.in_features)
        counts = counts_or_offsets(m_splits, self.num_gemms, x, self.counts_name)
        weight, bias = self.operands()
        recipe = words_for(active_recipe() if self.recipe is None else self.recipe, x)
        added = [] if self.return_bias else bias
        call = self._in_graph if is_compiling() else self._step
        y = call(x, counts, weight, added, bias_scale, recipe, is_first_microbatch, out,
                 dgrad_out, inp)
        y = y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)
        if not self.return_bias:
            return y
        return y, _returned(bias, working_dtype(x)) if bias else None

    def operands(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases as torch.ops.cadre takes them: one packed tensor, or E; no biases
        where there are none."""
        return self._local("weight"), self._local("bias") if self.use_bias else []

    def _local(self, stem: str) -> list[Tensor]:
        parameters = self._parameters_of(stem)
        if type(parameters[0]) is nn.Parameter and not is_compiling():
            return parameters
        return [local(stem, p) for p in parameters]

    def _step(
        self, x: Tensor, counts: tuple[Tensor, bool], weight: list[Tensor], bias: list[Tensor],
        bias_scale: Tensor | None, recipe: str, first_microbatch: bool | None,
        out: Tensor | None, dgrad_out: Tensor | None, inp: Tensor,
    ) -> Tensor:
        if out is not None or dgrad_out is not None:
            _check_buffer("out", out, (x.shape[0], self.out_features), x)
            _check_buffer("dgrad_out", dgrad_out, (x.shape[0], self.in_features), x)
            if out is not None and dgrad_out is not None:
                _require_apart(out, dgrad_out)
        writes_gradients = self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        if writes_gradients and type(weight[0]) is not nn.Parameter:
            require_plain("weight", self._parameters_of("weight")[0])
        remembers = self.delay_wgrad_compute or first_microbatch is not None
        if self._defers_grad():
            packed = weight[0].dim() == 3
            self._require_own_gradients(weight, ["weight"] if packed else self._names["weight"])
        return _linear_step(
            x, *counts, weight, bias, bias_scale, recipe, self.save_original_input,
            first_microbatch, self.fuse_wgrad_accumulation, self.delay_wgrad_compute, out,
            dgrad_out, None if dgrad_out is None else inp,
            self._memory.handle if remembers else None)

    def _in_graph(
        self, x: Tensor, counts: tuple[Tensor, bool], weight: list[Tensor], bias: list[Tensor],
        bias_scale: Tensor | None, recipe: str, first_microbatch: bool | None,
        out: Tensor | None, dgrad_out: Tensor | None, inp: Tensor,
    ) -> Tensor:
        """For torch.compile: an operator. What autograd alone does not do is outside of a graph."""
        cached = first_microbatch is not None and recipe not in _PLAIN
        if (self.fuse_wgrad_accumulation or self.delay_wgrad_compute or cached or out is not None
                or dgrad_out is not None):
            return self._outside_of_graphs(x, counts, weight, bias, bias_scale, recipe,
                                           first_microbatch, out, dgrad_out, inp)
        offsets = _offsets(counts[0], x.shape[0]) if counts[1] else counts[0]
        return _linear(x, offsets, weight, bias, bias_scale, recipe=recipe,
                       save_input=self.save_original_input)[0]

    @torch.compiler.disable(reason="main_grad, deferred gradients, the caller's buffers and cached "
                                   "weights are no part of a graph")
    def _outside_of_graphs(self, *arguments: Any) -> Tensor:
        return self._step(*arguments)

    def _memories(self) -> Sequence[Memory]:
        return [self._memory]

    # What trainers call

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Remembers the group; this layer communicates nothing."""
        if tp_group is not None and not isinstance(tp_group, torch.distributed.ProcessGroup):
            raise TypeError(f"tp_group is {kind_of(tp_group)}, must be a ProcessGroup")
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing to do: no scale outlives a call."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:
        """Takes packed and discrete parameters, whatever this layer has."""
        report = Report(missing_keys, error_msgs)
        for stem in ("weight", "bias") if self.use_bias else ("weight",):
            relayout(state_dict, prefix + stem, self._parameters_of(stem)[0], self.num_gemms,
                     report)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)

    def extra_repr(self) -> str:
        return (f"{self.num_gemms}, in_features={self.in_features}, "
                f"out_features={self.out_features}, bias={self.use_bias}")


def _returned(bias: list[Tensor], dtype: torch.dtype) -> Tensor | list[Tensor]:
    """Of return_bias: what is packed as it is, experts each in the type of the result."""
    return bias[0] if bias[0].dim() == 2 else [b.to(dtype) for b in bias]


def _check_choices(parallel_mode: str | None, ub_overlap_rs: bool, ub_overlap_ag: bool,
                   use_grouped_tensor: bool | None) -> None:
    if parallel_mode not in (None, "column", "row"):
        raise ValueError(f"parallel_mode is {parallel_mode!r}, must be None, 'column' or 'row'")
    for name, overlap in (("ub_overlap_rs", ub_overlap_rs), ("ub_overlap_ag", ub_overlap_ag)):
        if overlap:
            raise ValueError(f"{name} is True, must be False; a grouped linear layer communicates "
                             "nothing, so there is nothing to overlap")
    if use_grouped_tensor is not None and not isinstance(use_grouped_tensor, bool):
        raise TypeError(f"use_grouped_tensor is {use_grouped_tensor!r}, must be a bool or None")


def _require_apart(out: Tensor, dgrad_out: Tensor) -> None:
    """Errors: ValueError if buffers of the caller, which are contiguous, share memory."""
    if out.untyped_storage()._cdata != dgrad_out.untyped_storage()._cdata:
        return
    y, dx = out.storage_offset(), dgrad_out.storage_offset()
    if y < dx + dgrad_out.numel() and dx < y + out.numel():
        raise ValueError("dgrad_out shares memory with out, must not; backward would write the "
                         "input's gradient over the result")


def _check_buffer(name: str, buffer: Tensor | None, shape: tuple[int, int], x: Tensor) -> None:
    """Errors: ValueError unless the caller's buffer can take a result of that shape."""
    if buffer is None:
        return
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{name} is {kind_of(buffer)}, must be a tensor")
    if tuple(buffer.shape) != shape:
        raise ValueError(f"{name} has shape {list(buffer.shape)}, must be {list(shape)}: a row for "
                         "each row of inp, the tail too")
    if buffer.dtype != working_dtype(x):
        raise TypeError(f"{name} is {buffer.dtype}, must be {working_dtype(x)}, the type of the "
                        "input")
    if buffer.device != x.device:
        raise ValueError(f"{name} is on {buffer.device}, must be on {x.device}, where the input is")
    if not buffer.is_contiguous():
        raise ValueError(f"{name} has strides {list(buffer.stride())}, must be contiguous")
    if buffer.requires_grad:
        raise ValueError(f"{name} requires grad, must not; it is written in place, so give "
                         f"{name}.detach()")
