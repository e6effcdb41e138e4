"""The experts that transformers' own FP8 quantizer makes (`FineGrainedFP8Config`): it stores codes
and scales as the files of fp8 checkpoints have them."""

from typing import Any

import torch
from torch import nn

try:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
except ImportError:  # transformers before it dispatched them; they run its own code there
    ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts = None, ()


def register(name: str, forward: Any) -> None:
    """Makes it an implementation of these experts."""
    if ALL_FP8_EXPERTS_FUNCTIONS is not None:
        ALL_FP8_EXPERTS_FUNCTIONS.register(name, forward)


def are_these(module: nn.Module) -> bool:
    return isinstance(module, FP8Experts)


def require_fit(module: nn.Module, first: str, block: int) -> None:
    """Errors: NotImplementedError for codes and scales that no product here reads."""
    weight1, weight2 = getattr(module, first), module.down_proj
    if weight1.dtype != torch.float8_e4m3fn:
        _refuse(module, f"{first} is {weight1.dtype}", "torch.float8_e4m3fn")
    if module.activation_scheme != "dynamic":
        _refuse(module, f"activation_scheme is {module.activation_scheme!r}", "'dynamic'")
    if list(module.block_size or ()) != [block, block]:
        _refuse(module, f"weight_block_size is {module.block_size}", f"({block}, {block})")
    features, hidden = weight2.shape[2], weight2.shape[1]
    if features % block or hidden % block:
        _refuse(module, f"an expert has {features} features of {hidden} inputs",
                f"multiples of {block}")


def _refuse(module: nn.Module, found: str, must: str) -> None:
    raise NotImplementedError(f"huggingface: {found} in {type(module).__name__}, must be {must}; "
                              "choose another experts_implementation for this model")
