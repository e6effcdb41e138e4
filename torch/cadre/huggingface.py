"""Experts of Hugging Face transformers models on Cadre.

    import cadre.huggingface

registers the experts implementation "cadre" with transformers 5, from where any of these takes it:

    AutoModelForCausalLM.from_pretrained(name, experts_implementation="cadre")
    AutoModelForCausalLM.from_config(config, experts_implementation="cadre")
    cadre.huggingface.use(model)

The weights stay as transformers keeps them: concatenated or interleaved gate and up, [E, 2F, H] or
transposed [E, H, 2F], with or without biases. Nothing is repacked and nothing waits for the device.

The routers of most models run on Cadre then, too: those whose forward has code that routers.py
knows. Their choices are those of the lowest experts where logits are equal.

Experts that transformers does not dispatch run on Cadre all the same where foreign_experts.py has
a forward for them, as it has for Llama 4, DBRX, JetMoE, LongCat-Flash and Aria. Others run their
own code whatever is asked for. Importing this makes it a warning where a model that was asked for
"cadre" is built or switched.
"""

import functools
import inspect
import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import (
    expert_ranks, expert_state, foreign_experts, fp8_experts, quantized_experts, routers)
from .dtypes import kind_of, working_dtype
from .expert_activations import activation_of
from .quantized_experts import first_weight_of
from .recipe import active_recipe, words_for

try:
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as _error:
    raise ImportError("cadre.huggingface: transformers cannot be imported, must be version 5 or "
                      f"later; install it with `pip install 'transformers>=5'` ({_error})"
                      ) from _error

try:
    from .expert_plans import move_rows
except ImportError:  # transformers before it had styles for this; experts of other ranks are masked
    def move_rows(model: nn.Module) -> None:
        pass

__all__ = ["NAME", "experts_forward", "explain", "load_quantized", "use"]

NAME = "cadre"

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .expert_parallel import ExpertParallel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor,
                    top_k_weights: Tensor) -> Tensor:
    """What an experts module of transformers computes, as its implementation "cadre".

    y[t] = sum over k of top_k_weights[t, k] * expert top_k_index[t, k] of hidden_states[t]. An
    expert outside [0, E), as expert parallelism marks the experts of other ranks, adds nothing.
    Where ranks share the experts, E is that of all of them, and rows travel.

    Shapes: hidden_states and the result [T, H]; top_k_index and top_k_weights [T, top_k].
    Dtypes: hidden_states fp32, bf16 or fp16, as the weights are; top_k_index int32 or int64;
        top_k_weights any floating point, computed with in fp32. The result has the dtype of
        hidden_states.
    Errors: NotImplementedError for an activation that Cadre does not have; ValueError for shapes
        and dtypes that do not fit.
    """
    own = quantized_experts.codes_of(self)
    sharing = expert_ranks.sharing_of(self)
    if sharing is not None:
        if not torch.compiler.is_compiling():
            expert_state.require_apart(self, sharing.ep)
        # Products of codes take rows as they are, under autocast too.
        x = hidden_states if own is not None else hidden_states.to(working_dtype(hidden_states))
        y = sharing.forward(functools.partial(_of_rows, self), x, top_k_index,
                            top_k_weights.float())
        return y.to(hidden_states.dtype)
    if own is not None:
        return quantized_experts.of_tokens(self, own, hidden_states, top_k_index,
                                           top_k_weights.float(), activation_of(self))
    weight1, weight2 = _weights(self)
    bias1, bias2 = _biases(self)
    out: Tensor = torch.ops.cadre.routed_experts(
        hidden_states, top_k_index, top_k_weights.float(), self.num_experts, [weight1], bias1,
        [weight2], bias2, activation=activation_of(self),
        recipe=words_for(active_recipe(), hidden_states))[0]
    return out.to(hidden_states.dtype)


def _of_rows(self: nn.Module, rows: Tensor, offsets: Tensor, prob: Tensor) -> Tensor:
    """Of rows in the order of the experts, each weighted by its prob."""
    own = quantized_experts.codes_of(self)
    if own is not None:
        return quantized_experts.forward(self, own, rows, offsets, prob, activation_of(self))
    weight1, weight2 = _weights(self)
    bias1, bias2 = _biases(self)
    y: Tensor = torch.ops.cadre.grouped_mlp(
        rows, offsets, prob, [weight1], bias1, [weight2], bias2, prob if bias2 else None,
        activation=activation_of(self), recipe=words_for(active_recipe(), rows))[0]
    return y


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
fp8_experts.register(NAME, experts_forward)


_EXPERTS_CLASS = re.compile(r"Experts|Expert[A-Z]")
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _foreign(model: nn.Module) -> dict[str, nn.Module]:
    """The experts that transformers does not dispatch, by name: outermost modules that are called
    so and have parameters."""
    found: dict[str, nn.Module] = {}
    known = [*_experts(model), *foreign_experts.ported(model)]
    for name, module in model.named_modules():
        inside = any(name == k or name.startswith(k + ".") for k in [*found, *known])
        kind = type(module).__name__
        called = _EXPERTS_CLASS.search(kind) and "Shared" not in kind or (
            isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts")
        around = any(k.startswith(name + ".") for k in known)
        if called and not inside and not around and next(module.parameters(), None) is not None:
            found[name] = module
    return found


def _configured(module: nn.Module, config: Any) -> Iterator[tuple[nn.Module, Any]]:
    """The modules within, each with the config of the model of transformers that it is of: of the
    innermost one."""
    config = module.config if isinstance(module, PreTrainedModel) else config
    yield module, config
    for child in module.children():
        yield from _configured(child, config)


def _say_what_is_asked(model: nn.Module, asked: Any) -> None:
    """In the configs of models whose experts transformers does not dispatch, which its own setter
    leaves out."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_experts_implementation():
            config, now, wanted = part.config, part.config._experts_implementation, asked
            if isinstance(asked, dict):
                keys = (key for key in model.config.sub_configs
                        if getattr(model.config, key, None) is config)
                wanted = asked.get(next(keys, ""), now)
            if NAME in (wanted, now):
                config._experts_implementation_internal = NAME if wanted == NAME else "eager"


def _reach_foreign(model: nn.Module) -> None:
    """Switches the experts that have a forward of Cadre, and the routers. Where "cadre" is asked
    for, a UserWarning names those that it does not reach."""
    reached = set()
    foreign_experts.patch()
    for module, config in _configured(model, None):
        on = getattr(config, "_experts_implementation", None) == NAME
        foreign_experts.switch(module, on)
        routers.switch(module, on)
        if on:
            reached.add(module)
    if not reached:
        return
    move_rows(model)
    found = {name: m for name, m in _foreign(model).items() if m in reached and m not in _warned}
    if found:
        _warned.update(found.values())
        kinds = ", ".join(sorted({type(module).__name__ for module in found.values()}))
        warnings.warn(
            f"huggingface: experts_implementation is {NAME!r}, but {kinds} of "
            f"{type(model).__name__} takes none: {len(found)} modules, the first "
            f"{next(iter(found))!r}, run the code of transformers, not Cadre; leave "
            "experts_implementation out", UserWarning, stacklevel=4)


def _then_reach(method: Callable) -> Callable:
    """A method of PreTrainedModel, called without arguments or with an implementation, after which
    a model may have been asked for "cadre"."""

    @functools.wraps(method)
    def wrapped(self, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        for asked in (*args, *kwargs.values()):
            _say_what_is_asked(self, asked)
        _reach_foreign(self)
        return result

    return wrapped


def _unless_bound(method: Callable) -> Callable:
    """set_experts_implementation, for models whose experts ranks may share, or are codes."""

    @functools.wraps(method)
    def wrapped(self, experts_implementation: Any) -> Any:
        asked = experts_implementation
        wanted = asked.values() if isinstance(asked, dict) else (asked,)
        why = expert_ranks.why_bound(self) or quantized_experts.why_bound(self)
        if why and any(each != NAME for each in wanted):
            raise ValueError(f"set_experts_implementation: implementation is {asked!r}, must be "
                             f"{NAME!r}; {why}")
        return method(self, asked)

    return wrapped


def _as_released(method: Callable) -> Callable:
    """save_pretrained. Files of models whose experts are codes are as they were."""
    parameters = inspect.signature(method)

    @functools.wraps(method)
    def wrapped(self, *args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(self, *args, **kwargs)
        state = given.arguments.get("state_dict")
        if not given.arguments.get("distributed_checkpoint"):
            expert_ranks.require_whole(self, state)
        elif quantized_experts.has_codes(self):
            raise ValueError("save_pretrained: distributed_checkpoint is True, must be False for "
                             "codes")
        if not quantized_experts.has_codes(self):
            return method(self, *args, **kwargs)
        state = self.state_dict() if state is None else state
        given.arguments["state_dict"] = quantized_experts.released(self, state)
        given.arguments["save_original_format"] = False  # the names are the original ones
        return method(*given.args, **given.kwargs)

    return wrapped


def _then_know(method: Callable) -> Callable:
    """Of a copy, whose classes nobody may have asked for "cadre" in this process."""

    @functools.wraps(method)
    def wrapped(self, state: Any) -> Any:
        result = method(self, state)
        foreign_experts.patch()
        routers.patch(self)
        return result

    return wrapped


PreTrainedModel.post_init = _then_reach(PreTrainedModel.post_init)
PreTrainedModel.__setstate__ = _then_know(PreTrainedModel.__setstate__)
PreTrainedModel.set_experts_implementation = _unless_bound(_then_reach(
    PreTrainedModel.set_experts_implementation))
PreTrainedModel.save_pretrained = _as_released(PreTrainedModel.save_pretrained)


def use(model: nn.Module, ep: "ExpertParallel | ProcessGroup | DeviceMesh | None" = None, *,
        batch: str | None = None) -> nn.Module:
    """Switches the experts of a loaded transformers model to Cadre; returns the model.

    ep: an `ExpertParallel`, or the group or DeviceMesh of one, whose P ranks share the experts:
        each keeps E / P of them, those from rank * E / P on, and rows travel to them. All ranks
        call it, with the whole model. docs/layers/expert_parallel.md has training and generating.
    batch: "own": each rank computes tokens of its own; "same": all ranks have the same tokens, of
        which each computes a part, and have all results. By default "own"; "same" where
        transformers has spread the experts, by enable_expert_parallel.

    Errors: ValueError if the model has no experts that transformers dispatches or that Cadre has a
        forward for, or if these cannot be switched, or shared; NotImplementedError if Cadre cannot
        run one of them. The model is then as it was.
    """
    _require_module("use", model)
    if isinstance(inner := getattr(model, "module", None), PreTrainedModel):
        raise ValueError(f"use: model is {kind_of(model)} around {kind_of(inner)}, must be that "
                         "alone, before it is wrapped; wrappers know the parameters there were")
    found, ported = _experts(model), foreign_experts.ported(model)
    if not (found or ported) or not hasattr(model, "set_experts_implementation"):
        raise ValueError(f"use: model is {type(model).__name__} with {len(found)} experts modules, "
                         "must be a transformers model whose experts modules have "
                         "@use_experts_implementation; build others with cadre.GroupedMLP")
    for name, module in _foreign(model).items():
        raise ValueError(f"use: {name} is {kind_of(module)}, must be an experts module "
                         "with @use_experts_implementation; transformers does not dispatch it")
    for name, module in (found | ported).items():
        _about(name, module)
    spread = [s for m in found.values() if (s := expert_ranks.sharing_of(m)) is not None]
    expert_ranks.require_batch(batch, ep is not None or bool(spread))
    planned = {} if ep is None else expert_ranks.plan(found, ported, ep)
    before = model.get_experts_implementation()
    model.set_experts_implementation(NAME)
    for name, module in found.items():
        if module.config._experts_implementation != NAME:
            implementation = module.config._experts_implementation
            model.set_experts_implementation(before)
            raise ValueError(f"use: implementation of {name} is {implementation!r} after "
                             f"set_experts_implementation, must be {NAME!r}; "
                             f"{type(model).__name__} does not pass it on")
    if ep is not None:
        expert_ranks.share(found, planned, batch or "own")
    for sharing in spread:
        sharing.batch = batch or sharing.batch
    if ep is not None or spread:
        expert_ranks.generate_together(model)
    return model


def load_quantized(folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16,
                   device: torch.device | str | None = None) -> nn.Module:
    """A causal language model from a released checkpoint whose experts have quantised weights: they
    stay the codes and scales of the files, which Cadre multiplies as they are. For inference.

    folder: config.json and safetensors files. quant_method is "mxfp4", as of gpt-oss, or "fp8" with
        one scale for 128 x 128 codes, as of DeepSeek-V3: experts quantise their rows then, too.
        `cadre.autocast` changes neither.
    dtype: of all else, fp32, bf16 or fp16; weights outside of experts that are codes are decoded.
        With mxfp4 experts multiply rows of that type, on GPUs in bf16 the fastest.
    device: of the model; by default that of torch.set_default_device, or the current GPU.

    Errors: ValueError for a folder, a method or tensors that do not fit; TypeError for a dtype.
    """
    return quantized_experts.load(folder, dtype, device, _experts, NAME)


def _require_module(function: str, model: Any) -> None:
    """Errors: TypeError, of that function, for what is no model, such as the name of one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model is {kind_of(model)}, must be a transformers model")


def explain(model: nn.Module) -> str:
    """One line for each experts module: its name, class and sizes, the implementation it runs, and
    the activation that Cadre runs or would run, or why Cadre cannot. Experts that transformers does
    not dispatch have a line too, and so have routers that Cadre knows."""
    _require_module("explain", model)
    lines = []
    rows = _dtype_of_rows(model)
    for name, module in (_experts(model) | foreign_experts.ported(model)).items():
        try:
            text = _about(name, module)
        except NotImplementedError as error:
            text = f"not for cadre: {error}"
        lines.append(f"{name}: {_sizes(module, rows)}; runs {_implementation(module)}; {text}")
    for name, module in _foreign(model).items():
        lines.append(f"{name}: {type(module).__name__}; runs its own code; not for cadre: it takes "
                     "no experts_implementation")
    for name, module in model.named_modules():
        if port := routers.port_of(module):
            runs = NAME if foreign_experts.runs_cadre(module) else "eager"
            lines.append(f"{name}: {type(module).__name__}; runs {runs}; router {port.score}")
    return "\n".join(lines) or f"{type(model).__name__} has no experts modules"


def _experts(model: nn.Module) -> dict[str, nn.Module]:
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
    return {
        name: module
        for name, module in model.named_modules() if all(hasattr(module, mark) for mark in marks)
    }


def _weights(self: nn.Module) -> tuple[Tensor, Tensor]:
    """w1 [E, 2F, H] or [E, F, H] and w2 [E, H, F]; views where they are stored transposed."""
    weight1, weight2 = getattr(self, first_weight_of(self)), self.down_proj
    if self.is_transposed:
        return weight1.transpose(-2, -1), weight2.transpose(-2, -1)
    return weight1, weight2


def _biases(self: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    if not self.has_bias:
        return [], []
    return [getattr(self, first_weight_of(self) + "_bias")], [self.down_proj_bias]


def _dtype_of_rows(model: nn.Module) -> torch.dtype:
    """Of what experts are given: the type of the first numbers that are no codes, an embedding."""
    return next((p.dtype for p in model.parameters() if p.dtype in _DTYPES), torch.bfloat16)


def _sizes(module: nn.Module, rows: torch.dtype) -> str:
    kind = type(module).__name__
    if foreign_experts.port_of(module):
        weight = next(module.parameters())
        return f"{kind} {str(weight.dtype).removeprefix('torch.')} {weight.device}"
    bias = " bias" if module.has_bias else ""
    if own := quantized_experts.codes_of(module):
        codes = own.weight(module, own.second)[0]
        features = codes.shape[2] * own.kind.codes_a_byte
        return (f"{kind} E={module.num_experts} H={codes.shape[1]} F={features} "
                f"{quantized_experts.recipe_of(own, rows)} {codes.device}{bias}")
    weight1, weight2 = _weights(module)
    stored = " transposed" if module.is_transposed else ""
    return (f"{kind} E={module.num_experts} H={weight2.shape[1]} F={weight2.shape[2]} "
            f"{str(weight1.dtype).removeprefix('torch.')} {weight1.device}{stored}{bias}")


def _implementation(module: nn.Module) -> str:
    if foreign_experts.port_of(module):
        return NAME if foreign_experts.runs_cadre(module) else "eager"
    return module.config._experts_implementation


def _about(name: str, module: nn.Module) -> str:
    """What of the module Cadre runs. Errors: NotImplementedError if it cannot."""
    port = foreign_experts.port_of(module)
    own = quantized_experts.codes_of(module)
    if own is not None:
        quantized_experts.require_fit(module, own)
        return f"activation {activation_of(module)}"
    weights = module.named_parameters() if port else (
        (first_weight_of(module), _weights(module)[0]), ("down_proj", module.down_proj))
    for what, weight in weights:
        if weight.dtype not in _DTYPES:
            raise NotImplementedError(
                f"huggingface: {name}.{what} is {weight.dtype}, must be float32, bfloat16 or "
                "float16; load the model without weight quantization, or by load_quantized")
    return port.about(module) if port and port.about else f"activation {activation_of(module)}"
