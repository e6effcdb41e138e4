"""What the ranks of an `ExpertParallel` tell each other before they make something together: what
one of them refuses is an error on all, and none waits for the others."""

from itertools import count
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_numbers = count(1)


def agree(group: "ProcessGroup", refusal: Exception | None, problem: str, window: int = 0) -> int:
    """All ranks call it. refusal: what does not fit on this one. problem: what is made, in words.
    window: the number of the one that it is to be made of, 0 for none. Returns the number for a
    window that is made of it: the same on all ranks, and that of no other window of the group.

    Errors: the refusal; ValueError for that of another rank, and where problems or windows differ.
    """
    words = "" if refusal is None else str(refusal) or type(refusal).__name__
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (words, problem, window, next(_numbers)), group=group)
    if refusal is not None:
        raise refusal
    for rank, (words, *_) in enumerate(said):
        if words:
            raise ValueError(f"expert_parallel: rank {rank} was given what does not fit, must be "
                             f"what fits: {words}")
    _, first, first_window, number = said[0]
    for rank, (_, problem, window, _) in enumerate(said):
        if problem != first:
            raise ValueError(f"expert_parallel: the problem of rank {rank} is {problem!r}, must be "
                             f"that of rank 0, {first!r}")
        if window != first_window:
            raise ValueError(f"expert_parallel: the window of rank {rank} is {_named(window)}, "
                             f"must be that of rank 0, {_named(first_window)}; all of them share "
                             "the same one, or none")
    return int(number)


def _named(window: int) -> str:
    return f"number {window}" if window else "a new one"
