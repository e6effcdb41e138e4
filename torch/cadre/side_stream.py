"""Work on a second stream of a device, beside what the caller's own stream is given meanwhile.

The side stream begins behind all that the caller's was given before, and the caller's is told to
wait for its end; what the work reads is kept until then. So what either stream frees is used again
behind the other's last read of it, and no tensor needs `record_stream`, which in a CUDA graph would
keep its memory from being used again at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

_sides: dict[Any, Any] = {}  # by the stream beside which they are


def has_sides(x: Tensor) -> bool:
    """Whether what reads x can run beside other work: on GPUs. Compiled code has one stream, and a
    tensor that stands for others has none."""
    if torch.compiler.is_compiling() or not x.is_cuda:
        return False
    is_plain = type(x) in (Tensor, torch.nn.Parameter)
    return is_plain and not torch._C._are_functorch_transforms_active()


def side_of(stream: Any) -> Any:
    """The one side stream of that stream. Were it that of two, what it frees for one of them could
    be used again while the other reads it."""
    side = _sides.get(stream)
    while side is None or side == stream:  # torch gives out the same streams in turns
        side = _sides[stream] = torch.cuda.Stream(stream.device)
    return side


class SideWork:
    """Work beside the current stream of a device: begun, joined, and so again in backward."""

    side: Any

    def __init__(self, device: torch.device) -> None:
        self.side = side_of(torch.cuda.current_stream(device))
        self._read: tuple[Tensor | None, ...] = ()
        self._end: Any = None

    @contextmanager
    def begun(self, *read: Tensor | None) -> Iterator[None]:
        """The side stream is current, behind what was given to the one that is current outside.
        read: tensors of that one, which are kept until `join`."""
        self._read = read
        self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(self.side):
            try:
                yield
            finally:
                self._end = self.side.record_event()

    def join(self) -> None:
        """The current stream waits for what was begun last."""
        torch.cuda.current_stream(self.side.device).wait_event(self._end)
        self._read, self._end = (), None


@contextmanager
def joined_on_error(*begun: SideWork) -> Iterator[None]:
    """An error that leaves it still has the current stream wait for that work, whose memory the
    caller gives up."""
    try:
        yield
    except BaseException:
        for work in begun:
            with suppress(RuntimeError):  # as of a capture that the error has ended
                work.join()
        raise
