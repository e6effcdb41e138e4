"""Expert layers of Mixture-of-Experts models on PyTorch: grouped GEMM, grouped linear layers, the
expert MLP, and what routes rows to them."""

from ._library import load as _load

_load()

from . import layers  # noqa: E402  registers fake kernels
from .grouped_mm import grouped_mm  # noqa: E402
from .operations import (  # noqa: E402
    Offsets, Quantized, Routing, RoutingOffsets, activation, bias_grad, combine, dequantize,
    grouped_gemm, offsets, offsets_of_routing, permute, quantize, routing)
