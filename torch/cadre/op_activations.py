"""Activations as operations of a row (`cadre.ops`)."""

import numbers
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ContextManager

import torch
from torch import Tensor

from .counts import offsets_of_all_rows
from .dtypes import kind_of, require_bools, require_factor, require_rows
from .grouped_mlp import activation_text, is_gated
from .operation import Operation
from .operations import (
    Offsets, Quantized, RoutingOffsets, dequantize, quantize, tensor_of)

_LAYOUTS = {None: "concat", 0: "concat", 1: "interleave1", 32: "interleave32"}
_CACHE = "fp8_tensor"  # the format of cache_quantized_input
_FP32_MAX = torch.finfo(torch.float32).max


class Activation(Operation):
    """h = act(z) [* scales] for z [..., 2F] (ungated [..., F]); h [..., F]. The classes below are
    the ones to use. Their constants cannot be changed.

    Those that are scaled take an extra input: scales [R], a factor of each row, fp32 throughout;
    other types are converted.

    glu_interleave_size: None: [gates | ups]; 1: gate and up alternate; 32: in blocks of 32.
    activation_recompute_in_mlp: a grouped_mlp always computes the activation again in backward;
        True makes it an error where the operation is not part of one.
    cache_quantized_input: keep z for backward in fp8, with one scale: half the memory of bf16, and
        a gradient that knows z to two digits. Such an activation is never part of a grouped_mlp.
    """

    scaled: bool = False
    activation: str  # the words of torch.ops.cadre; "" where it has none

    def __init__(self, activation: str, glu_interleave_size: int | None = None,
                 activation_recompute_in_mlp: bool = False,
                 cache_quantized_input: bool = False) -> None:
        super().__init__()
        require_bools(activation_recompute_in_mlp=activation_recompute_in_mlp,
                      cache_quantized_input=cache_quantized_input)
        self.activation = activation_text(activation, self._layout_of(glu_interleave_size))
        self.gated: bool = is_gated(activation)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
        self.cache_quantized_input = cache_quantized_input

    def _layout_of(self, glu_interleave_size: int | None) -> str:
        if isinstance(glu_interleave_size, bool) or glu_interleave_size not in (*_LAYOUTS,):
            raise NotImplementedError(
                f"glu_interleave_size is {glu_interleave_size}, must be None, 1 or 32; gate and up "
                "come in two halves, alternate, or alternate in blocks of 32")
        self._glu_interleave_size = glu_interleave_size
        return _LAYOUTS[glu_interleave_size]

    @property
    def glu_interleave_size(self) -> int | None:
        return self._glu_interleave_size

    @property
    def num_extra_inputs(self) -> int:
        return int(self.scaled)

    def forward(self, z: Tensor, scales: Tensor | None = None, *,
                offsets: Offsets | RoutingOffsets | None = None) -> Tensor:
        """h [..., F]. offsets: rows beyond them are zero; None: there are none.

        Errors: ValueError for scales that are missing, surplus or of another length, and for
        offsets on the host that decrease, exceed the rows or do not begin at 0.
        """
        if (scales is not None) != self.scaled:
            raise ValueError(f"scales is {'missing' if scales is None else 'given'}, must be "
                             f"{'given' if self.scaled else 'left out'}; the operation is "
                             f"{type(self).__name__}")
        require_rows("z", z)
        if z.dim() < 1:
            raise ValueError("z has shape [], must be [..., columns]")
        rows = z.reshape(-1, z.shape[-1])
        starts = offsets_of_all_rows(rows) if offsets is None else _starts(offsets, rows)
        with _keeping_fp8(rows, starts) if self.cache_quantized_input else nullcontext():
            h = self._compute(rows, starts, probabilities(scales, rows))
        return h if z.dim() == 2 else h.view(*z.shape[:-1], h.shape[-1])

    def _compute(self, z: Tensor, offsets: Tensor, scales: Tensor | None) -> Tensor:
        return torch.ops.cadre.activation(z, offsets, scales, self.activation)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return repr(self.activation)


def _starts(offsets: Offsets | RoutingOffsets, rows: Tensor) -> Tensor:
    """As operators take them: int32 [E + 1], which begin at 0 and do not exceed the rows."""
    if not isinstance(offsets, (Offsets, RoutingOffsets)):
        raise TypeError(f"offsets is {kind_of(offsets)}, must be cadre.Offsets or None")
    starts = offsets.offsets
    if not isinstance(starts, Tensor) or starts.dtype != torch.int32 or starts.dim() != 1:
        found = (f"{starts.dtype} {list(starts.shape)}" if isinstance(starts, Tensor)
                 else kind_of(starts))
        raise TypeError(f"offsets.offsets is {found}, must be a tensor [E + 1] of torch.int32")
    return tensor_of(offsets, rows.shape)


def probabilities(scales: Tensor | None, x: Tensor) -> Tensor | None:
    """As operators take them: fp32 [R], for x [..., columns] of R rows.

    Errors: TypeError for what is no tensor of real numbers; ValueError for another number of them.
    """
    require_factor("scales", scales)
    if scales is not None and scales.is_complex():
        raise TypeError(f"scales is {scales.dtype}, must be of a real type")
    rows = x.shape[:-1].numel()
    if scales is not None and scales.numel() != rows:
        raise ValueError(f"scales has {scales.numel()} elements, must have {rows}, one a row")
    return None if scales is None else scales.reshape(-1).to(torch.float32).contiguous()


def _keeping_fp8(z: Tensor, starts: Tensor) -> ContextManager[Any]:
    """A context in which autograd keeps codes in place of z, of all rows but the tail."""

    def pack(saved: Tensor) -> Tensor | tuple[Quantized, Tensor]:
        if saved.shape != z.shape or saved.data_ptr() != z.data_ptr():
            return saved
        rows = starts if len(starts) == 2 else torch.cat([starts[:1], starts[-1:]])
        return quantize(saved.detach(), rows, _CACHE), rows

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return dequantize(*kept, _CACHE, shape=z_shape, dtype=z_dtype)

    z_shape, z_dtype = z.shape, z.dtype
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {kind_of(value)}, must be a number")
    return float(value)


class SwiGLU(Activation):
    """silu(gate) * up."""

    def __init__(self, glu_interleave_size: int | None = None, *,
                 activation_recompute_in_mlp: bool = False,
                 cache_quantized_input: bool = False) -> None:
        super().__init__("swiglu", glu_interleave_size, activation_recompute_in_mlp,
                         cache_quantized_input)


class _Clamped(Activation):
    """g * sigmoid(alpha * g) * u with g = min(gate, limit) and u = clamp(up, -limit, limit) +
    glu_linear_offset."""

    def __init__(self, constants: dict[str, Any], glu_interleave_size: int | None, *,
                 activation_recompute_in_mlp: bool, cache_quantized_input: bool = False) -> None:
        constants = {name: number("glu_linear_offset" if name == "offset" else name, value)
                     for name, value in constants.items()}
        words = " ".join(f"{name}={value!r}" for name, value in constants.items())
        super().__init__(f"clamped_swiglu {words}", glu_interleave_size,
                         activation_recompute_in_mlp, cache_quantized_input)
        self._constants: dict[str, float] = constants

    @property
    def limit(self) -> float:
        return self._constants["limit"]

    @property
    def alpha(self) -> float:
        return self._constants["alpha"]

    @property
    def glu_linear_offset(self) -> float:
        return self._constants["offset"]


class ClampedSwiGLU(_Clamped):
    __doc__ = _Clamped.__doc__

    def __init__(self, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, *,
                 glu_interleave_size: int | None = None,
                 activation_recompute_in_mlp: bool = False,
                 cache_quantized_input: bool = False) -> None:
        super().__init__({"limit": limit, "alpha": alpha, "offset": glu_linear_offset},
                         glu_interleave_size,
                         activation_recompute_in_mlp=activation_recompute_in_mlp,
                         cache_quantized_input=cache_quantized_input)


class QGEGLU(Activation):
    """gate * sigmoid(1.702 * gate) * up."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(f"clamped_swiglu limit={_FP32_MAX!r} alpha=1.702 offset=0.0",
                         cache_quantized_input=cache_quantized_input)


class _Plain(Activation):
    """An activation of one or two numbers, without constants."""

    _words: str

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(self._words, cache_quantized_input=cache_quantized_input)


class GELU(_Plain):
    """gelu(z), made of tanh."""

    _words = "gelu_tanh"


class GEGLU(_Plain):
    """gelu(gate) * up, made of tanh."""

    _words = "geglu_tanh"


class ReLU(_Plain):
    """max(z, 0) of each number."""

    _words = "relu"


class ReGLU(_Plain):
    """max(gate, 0) * up."""

    _words = "reglu"


class SiLU(_Plain):
    """z * sigmoid(z)."""

    _words = "silu"


class SReLU(Activation):
    """max(z, 0) squared."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False,
                 cache_quantized_input: bool = False) -> None:
        super().__init__("relu_squared", None, activation_recompute_in_mlp, cache_quantized_input)


class ScaledSwiGLU(SwiGLU):
    """silu(gate) * up * scales."""

    scaled: bool = True


class ScaledClampedQGeGLU(_Clamped):
    """`ClampedSwiGLU` times scales."""

    scaled: bool = True

    def __init__(self, glu_interleave_size: int | None = None, *, limit: float = 7.0,
                 alpha: float = 1.702, glu_linear_offset: float = 1.0,
                 activation_recompute_in_mlp: bool = False) -> None:
        super().__init__({"limit": limit, "alpha": alpha, "offset": glu_linear_offset},
                         glu_interleave_size,
                         activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledSReLU(SReLU):
    """max(z, 0) squared, times scales."""

    scaled: bool = True
