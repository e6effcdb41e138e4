"""Expert layers of Mixture-of-Experts models on PyTorch: grouped GEMM, grouped linear layers, the
expert MLP, and what routes rows to them. `cadre.huggingface` is imported by who wants it."""

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
from .recipe import Recipe, autocast, checkpoint_contexts, fp8_autocast  # noqa: E402
from .scaled_grouped_mm import scaled_grouped_mm  # noqa: E402
from .windows import saved_exchanges  # noqa: E402

__all__ = [
    "DispatchHandle", "DispatchedCodes", "DispatchedRows", "ExpertParallel", "GroupedLinear",
    "GroupedMLP", "MoE", "Offsets", "Quantized", "Recipe", "RouterOutput", "Routing",
    "RoutingOffsets", "activation", "autocast", "bias_grad", "checkpoint_contexts", "checkpoints",
    "combine", "dequantize", "fp8_autocast", "grouped_gemm", "grouped_mm", "keep_whole",
    "load_balancing_loss", "offsets", "offsets_of_routing", "ops", "permute", "quantize", "routing",
    "saved_exchanges", "scaled_grouped_mm"]
