"""Looking at counts and offsets that the host has at hand. Nobody looks at those on a GPU, or in a
graph that is being compiled."""

from collections.abc import Sequence

from torch import Tensor
from torch._C import DispatchKey, _dispatch_keys, _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling


def may_look(numbers: Tensor) -> bool:
    """Whether the host has the numbers at hand: nobody waits for a device to look at them."""
    return (numbers.is_cpu and not is_compiling()
            and (type(numbers) is Tensor or not _dispatch_keys(numbers).has(DispatchKey.Python))
            and _len_torch_dispatch_stack() == 0 and not is_functorch_wrapped_tensor(numbers)
            and _has_memory(numbers))


def _has_memory(numbers: Tensor) -> bool:
    """Whether nobody has freed or shrunk it; operators say so where that is an error."""
    last = numbers.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(numbers.shape, numbers.stride()))
    return numbers.untyped_storage().nbytes() >= (last + 1) * numbers.element_size()


def require_ends(ends: Sequence[int], rows: int, name: str) -> None:
    """Errors: ValueError unless the numbers, of the host, ascend from 0 or more to `rows`."""
    if any(b < a for a, b in zip([0, *ends], ends)) or (ends and ends[-1] > rows):
        raise ValueError(f"{name} is {short(ends)}, must ascend from 0 or more to {rows} at most; "
                         "there are so many rows")


def require_offsets(offsets: Tensor, rows: int, name: str, *, made_here: bool) -> None:
    """`made_here`: by the library, which makes good ones, if perhaps of another number of rows.

    Errors: ValueError unless offsets that may be looked at ascend from 0 to `rows` at most.
    """
    if not may_look(offsets):
        return
    ends = offsets.tolist()
    if not made_here:
        require_ends(ends, rows, name)
        require_begin(ends, name)
    elif ends[-1] > rows:
        raise ValueError(f"{name} ends with {ends[-1]}, must end with {rows} at most; the input "
                         "has so many rows")


def require_begin(offsets: Sequence[int], name: str) -> None:
    """Errors: ValueError unless the first, of the host, is 0."""
    if offsets[0] != 0:
        raise ValueError(f"{name} begins with {offsets[0]}, must begin with 0; the rows before it "
                         "would be nobody's, and their results left unwritten")


def short(numbers: Sequence[int]) -> str:
    """As a list, with the middle of a long one left out."""
    if is_compiling():  # which prints no numbers that may change
        return f"a list of {len(numbers)}"
    texts = [str(n) for n in numbers]
    return f"[{', '.join(texts if len(texts) <= 16 else [*texts[:8], '...', *texts[-8:]])}]"
