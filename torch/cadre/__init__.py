"""Expert layers of Mixture-of-Experts models on PyTorch: grouped GEMM, grouped linear layers, the
expert MLP, and what routes rows to them."""

from ._library import load as _load

_load()

from . import layers  # noqa: E402  registers fake kernels
