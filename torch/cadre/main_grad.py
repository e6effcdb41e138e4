"""Weight gradients that are accumulated into `main_grad`, as Megatron-LM and its kin expect it.

A trainer gives each weight a buffer, `weight.main_grad`, that outlives the microbatches and is
often fp32 where the weight is bf16. What else it may set on a weight, each expert for itself:

  __fsdp_param__             `get_main_grad()` gives the buffer; called at backward time, because
                             it may have moved since forward
  overwrite_main_grad        True: the gradient replaces what the buffer holds, NaN too
  grad_added_to_main_grad    exists: is set to True, and autograd sees a stand-in for the gradient,
                             so that hooks run; else autograd sees no gradient
  zero_out_wgrad             True: that stand-in is zero; else its content means nothing
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from .dtypes import kind_of, require_float

_library = torch.library.Library("cadre", "FRAGMENT")
_library.define("_main_grads(Tensor[] weight, bool first_microbatch) -> "
                "(Tensor[] into, str accumulate, Tensor? flags, Tensor?[] stand_ins)")


def _for_backward(weight: Sequence[Parameter], first_microbatch: bool
                  ) -> tuple[list[Tensor], str, Tensor | None, list[Tensor | None]]:
    """What backward needs of the weights' attributes, in one call from C++."""
    into = main_grads(weight)
    return into, *accumulation(weight, first_microbatch), mark_added(weight)


_library.impl("_main_grads", _for_backward, "CompositeExplicitAutograd")


def main_grads(weight: Sequence[Parameter]) -> list[Tensor]:
    """The buffers of packed or discrete weights, each in the shape of its weight. A frozen weight
    gets one that nobody reads.

    Errors: RuntimeError where a weight has none; ValueError where one is not contiguous, has
    neither the shape of its weight nor is flat, or is on another device; TypeError for its type,
    and for what is no tensor.
    """
    buffers = [_main_grad(w) if w.requires_grad else None for w in weight]
    dtypes = [buffer.dtype for buffer in buffers if buffer is not None]
    for dtype in dtypes:
        if dtype != dtypes[0]:
            raise TypeError(f"main_grad of one expert is {dtype}, must be {dtypes[0]} as that of "
                            "the first")
    if dtypes:
        require_float("main_grad", dtypes[0])
    return [torch.empty_like(w, dtype=dtypes[0] if dtypes else None) if buffer is None else buffer
            for w, buffer in zip(weight, buffers)]


def _main_grad(weight: Parameter) -> Tensor:
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        raise RuntimeError(f"main_grad of a weight {list(weight.shape)} is missing, must be a "
                           "tensor of its shape; fuse_wgrad_accumulation=True writes gradients "
                           "there, so set it before backward (fully_shard gathers weights that "
                           "have none)")
    if not isinstance(buffer, Tensor):
        raise TypeError(f"main_grad is {kind_of(buffer)}, must be a tensor of shape "
                        f"{list(weight.shape)}, that of its weight")
    same = buffer.shape == weight.shape
    if not (same or tuple(buffer.shape) == (weight.numel(),)) or not buffer.is_contiguous():
        raise ValueError(f"main_grad has shape {list(buffer.shape)} and strides "
                         f"{list(buffer.stride())}, must be contiguous and of shape "
                         f"{list(weight.shape)}, that of its weight, or flat")
    if buffer.is_neg():
        raise ValueError("main_grad is a negated view, must be numbers as they lie; give "
                         "resolve_neg()")
    if buffer.device != weight.device:
        raise ValueError(f"main_grad is on {buffer.device}, must be on {weight.device}, where its "
                         "weight is")
    return buffer if same else buffer.view(weight.shape)


def accumulation(weight: Sequence[Parameter],
                 first_microbatch: bool) -> tuple[str, Tensor | None]:
    """What happens to the content of main_grad: ("no", None): it is overwritten; ("yes", None): it
    is added to; ("per_expert", int32 [E]): added to where the flag is 1."""
    adds = [not (first_microbatch or getattr(w, "overwrite_main_grad", False)) for w in weight]
    if all(adds):
        return "yes", None
    if not any(adds):
        return "no", None
    return "per_expert", _flags(adds, weight[0].device)


def _flags(adds: list[bool], device: torch.device) -> Tensor:
    """int32 [E]. Filled on the device run by run, which neither waits nor needs host memory, so a
    CUDA graph may capture it."""
    flags = torch.ones(len(adds), dtype=torch.int32, device=device)
    at = 0
    for add, run in groupby(adds):
        end = at + len(list(run))
        if not add:
            flags[at:end].zero_()
        at = end
    return flags


def mark_added(weight: Sequence[Parameter]) -> list[Tensor | None]:
    """Sets grad_added_to_main_grad where a weight has it; returns what autograd gets."""
    return [_stand_in(w) if w.requires_grad else None for w in weight]


def _stand_in(weight: Parameter) -> Tensor | None:
    """New each time: autograd makes it the .grad, where it would copy a tensor that somebody else
    holds, too."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    wants_numbers = getattr(weight, "zero_out_wgrad", False) or torch.is_anomaly_enabled()
    make = torch.zeros if wants_numbers else torch.empty  # where NaN would be an anomaly
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
