"""Expert layers of Mixture-of-Experts models on PyTorch: grouped GEMM, grouped linear layers, the
expert MLP, and what routes rows to them. `cadre.huggingface` is imported by who wants it."""

import typing as _typing

from ._library import load as _load

_load()

from . import checkpoints, layers, ops  # noqa: E402,F401  layers registers fake kernels
from .dispatched import DispatchedCodes, DispatchedRows, DispatchHandle  # noqa: E402
from .expert_parallel import ExpertParallel  # noqa: E402
from .expert_state import keep_whole  # noqa: E402
from .grouped_linear import GroupedLinear  # noqa: E402
from .grouped_mlp import GroupedMLP  # noqa: E402
from .grouped_mm import grouped_mm  # noqa: E402
from .moe import MoE, RouterOutput, load_balancing_loss  # noqa: E402
from .operations import (  # noqa: E402
    Offsets, Quantized, Routing, RoutingOffsets, activation, bias_grad, combine, dequantize,
    grouped_gemm, offsets, offsets_of_routing, permute, quantize, routing)
from .recipe import (  # noqa: E402
    Recipe, autocast, checkpoint_contexts, fp8_autocast, fp8_model_init, quantized_model_init)
from .scaled_grouped_mm import scaled_grouped_mm  # noqa: E402
from .windows import saved_exchanges  # noqa: E402

__all__ = [
    "DispatchHandle", "DispatchedCodes", "DispatchedRows", "ExpertParallel", "GroupedLinear",
    "GroupedMLP", "MoE", "Offsets", "Quantized", "Recipe", "RouterOutput", "Routing",
    "RoutingOffsets", "activation", "autocast", "bias_grad", "checkpoint_contexts", "checkpoints",
    "combine", "dequantize", "fp8_autocast", "fp8_model_init", "grouped_gemm", "grouped_mm",
    "keep_whole", "load_balancing_loss", "offsets", "offsets_of_routing", "ops", "permute",
    "quantize", "quantized_model_init", "routing", "saved_exchanges", "scaled_grouped_mm"]

# Names of transformer_engine.pytorch that are other ones here, for who changes its import and has
# them as attributes.
_ELSEWHERE = {
    **dict.fromkeys(("moe_permute", "moe_permute_with_probs"),
                    "cadre.offsets_of_routing, then cadre.permute"),
    **dict.fromkeys(("moe_permute_and_pad_with_probs", "Fp8Padding", "Fp8Unpadding"),
                    "cadre.permute alone; nothing is padded"),
    "moe_unpermute": "cadre.combine",
    "fused_topk_with_score_function": "cadre.routing",
    "fused_moe_aux_loss": "cadre.load_balancing_loss",
}

if not _typing.TYPE_CHECKING:  # it would take any name for one that is here

    def __getattr__(name: str) -> object:
        hint = f"; use {_ELSEWHERE[name]} (docs/migration.md)" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'cadre' has no attribute {name!r}{hint}")
