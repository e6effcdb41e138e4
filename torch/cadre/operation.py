"""What the operations of `cadre.ops` have in common, and those that compute next to nothing."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .devices import default_device
from .dtypes import require_bools, require_float, require_rows, require_sizes
from .fakes import require_one_device
from .layouts import EmptyExtraState


class Operation(EmptyExtraState):
    """A module of a row of operations: `forward(input, *extra_inputs)` gives the main output, or a
    tuple of it and of num_extra_outputs others."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    op_keys: tuple[str, ...] = ()  # what op_kwargs may give it

    def __init__(self) -> None:
        super().__init__()

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


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
    nobody else may need; one that is not contiguous, as of `sum()`, is left as it is."""

    num_extra_outputs: int = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        require_bools(in_place=in_place)
        self.in_place = in_place

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return _Twice.apply(input) if self.in_place else (input, input.view_as(input))


class AddExtraInput(Operation):
    """The sum of its input and of an extra input, in the extra input's place if in_place."""

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
        if not self.in_place:
            return extra_input + input
        if extra_input.dtype != input.dtype:
            raise TypeError(f"extra_input is {extra_input.dtype}, must be {input.dtype}, the type "
                            "of the input, which is added in place")
        return _AddInto.apply(extra_input, input)


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
