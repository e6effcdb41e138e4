"""What the operations of `cadre.ops` have in common, and those that compute next to nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from .devices import default_device
from .dtypes import kind_of, require_bools, require_float, require_rows, require_sizes
from .fakes import require_one_device
from .layouts import EmptyExtraState

_Op = TypeVar("_Op", bound="Operation")


class Operation(EmptyExtraState):
    """A module of a row of operations: `forward(input, *extra_inputs)` gives the main output, or a
    tuple of it and of num_extra_outputs others.

    In a `Sequential`, an extra output may have a channel, and extra inputs of operations behind it
    the same one: they are then given what it gives, and not what the caller gives.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    op_keys: tuple[str, ...] = ()  # what op_kwargs may give it
    _input_channels: Mapping[int, str] = {}
    _output_channels: Mapping[int, tuple[str, bool]] = {}  # and whether the caller gets it, too

    def __init__(self) -> None:
        super().__init__()

    def set_extra_input_channel(self: _Op, index: int, channel: str | None) -> _Op:
        """Takes the extra input from a channel; None: from the caller again. Returns self.

        Errors: IndexError for an index that is not there; ValueError for a channel that is no
        name; TypeError for an index that is no int."""
        _require_channel("inputs", self, index, self.num_extra_inputs, channel)
        self._input_channels = _with(self._input_channels, index, channel)
        return self

    def set_extra_output_channel(self: _Op, index: int, channel: str | None, *,
                                 output_to_caller: bool = True) -> _Op:
        """Gives the extra output to a channel, and to the caller, too, unless output_to_caller is
        False; None: to the caller alone. Returns self.

        Errors: as set_extra_input_channel, and TypeError for what is no bool."""
        _require_channel("outputs", self, index, self.num_extra_outputs, channel)
        require_bools(output_to_caller=output_to_caller)
        named = None if channel is None else (channel, output_to_caller)
        self._output_channels = _with(self._output_channels, index, named)
        return self

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _require_channel(slots: str, op: Operation, index: int, there: int, channel: Any) -> None:
    if not isinstance(index, int) or isinstance(index, bool):
        raise TypeError(f"index is {kind_of(index)}, must be an int")
    if not 0 <= index < there:
        raise IndexError(f"index is {index}, must be less than {there} and not negative; "
                         f"{type(op).__name__} has {there} extra {slots}")
    if channel is not None and not (isinstance(channel, str) and channel):
        raise ValueError(f"channel is {channel!r}, must be a name or None")


def _with(channels: Mapping[int, Any], index: int, channel: Any) -> Mapping[int, Any]:
    others = {i: other for i, other in channels.items() if i != index}
    return others if channel is None else others | {index: channel}


class Identity(Operation):
    """Its input, unchanged."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class Bias(Operation):
    """input + bias, for input [..., size] and one bias [size] of all rows, which begins at zero.

    device: None: as for `cadre.GroupedLinear`. dtype: f32, bf16, f16; None: torch's default.
    tensor_parallel: size is that of all ranks of tensor_parallel_group (None: all there are)
        together; nothing is communicated.

    Errors: ValueError for sizes, TypeError for dtypes.
    """

    bias: nn.Parameter

    def __init__(self, size: int, *, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None, tensor_parallel: bool = False,
                 tensor_parallel_group: Any = None) -> None:
        super().__init__()
        require_sizes(size=size)
        require_bools(tensor_parallel=tensor_parallel)
        require_float("dtype", dtype or torch.get_default_dtype())
        self.tensor_parallel = tensor_parallel
        self.tensor_parallel_group = tensor_parallel_group
        ranks = (torch.distributed.get_world_size(tensor_parallel_group) if tensor_parallel else 1)
        if size % ranks:
            raise ValueError(f"size is {size}, must be a multiple of {ranks}, the ranks of "
                             "tensor_parallel_group")
        self.local_size: int = size // ranks
        device = default_device() if device is None else device
        self.bias = nn.Parameter(torch.empty(self.local_size, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero. On "meta" it has no values before `to_empty(device=...)`."""
        self.bias.zero_()

    def forward(self, input: Tensor) -> Tensor:
        """[..., size]. Errors: ValueError for another last dimension; TypeError for dtypes."""
        require_rows("input", input)
        if input.shape[-1:] != self.bias.shape:
            raise ValueError(f"input has shape {list(input.shape)}, must be "
                             f"[..., {self.local_size}]; the bias has so many elements")
        return input + self.bias

    def extra_repr(self) -> str:
        return str(self.local_size)


class MakeExtraOutput(Operation):
    """Its input, and the same once more as an extra output of the row. The input's gradient is the
    sum of both. in_place: the sum is written into the gradient of the extra output, which
    nobody else may need, unless that output has a channel, or its gradient is not contiguous."""

    num_extra_outputs: int = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        require_bools(in_place=in_place)
        self.in_place = in_place

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        in_place = (self.in_place and not self._output_channels
                    and not torch.compiler.is_compiling())  # which adds where it likes
        return _Twice.apply(input) if in_place else (input, input.view_as(input))


class AddExtraInput(Operation):
    """The sum of its input and of an extra input, in the extra input's place if in_place and it has
    no channel. In place the extra input is added to each time it runs: twice under an activation
    checkpoint, with wrong gradients, as operations of torch in place."""

    num_extra_inputs: int = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        require_bools(in_place=in_place)
        self.in_place = in_place

    def forward(self, input: Tensor, extra_input: Tensor) -> Tensor:
        """Errors: ValueError for an extra input of another shape or device; TypeError for what is
        no tensor of fp32, bf16 or fp16, and, in_place, for one of another type."""
        require_rows("input", input)
        require_rows("extra_input", extra_input)
        if extra_input.device != input.device:
            require_one_device({"input": input, "extra_input": extra_input})
        if extra_input.shape != input.shape:
            raise ValueError(f"extra_input has shape {list(extra_input.shape)}, must be "
                             f"{list(input.shape)}, that of the input, to which it is added")
        if not self.in_place or self._input_channels:
            return extra_input + input
        if extra_input.dtype != input.dtype:
            raise TypeError(f"extra_input is {extra_input.dtype}, must be {input.dtype}, the type "
                            "of the input, which is added in place")
        if not torch.compiler.is_compiling():
            return _AddInto.apply(extra_input, input)
        result = extra_input + input  # compiled code would lose the way back of an alias
        with torch.no_grad():
            extra_input.detach().copy_(result)
        return result


class _Twice(torch.autograd.Function):
    """The input as two outputs; backward adds the first gradient to the second in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dextra: Tensor | None) -> Tensor | None:
        if dy is None or dextra is None:
            return dextra if dy is None else dy
        return dextra.add_(dy) if dextra.is_contiguous() else dextra + dy


class _AddInto(torch.autograd.Function):
    """extra += x, of a leaf too: autograd is not told that the extra input changes, since its old
    value is nobody's."""

    @staticmethod
    def forward(ctx: Any, extra: Tensor, x: Tensor) -> Tensor:
        return extra.detach().add_(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, dy
