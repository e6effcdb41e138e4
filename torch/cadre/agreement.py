"""What the ranks of an `ExpertParallel` tell each other before they make something together: what
one of them refuses is an error on all, and none waits for the others."""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def agree(group: "ProcessGroup", refusal: Exception | None, problem: str) -> None:
    """All ranks call it. refusal: what does not fit on this one. problem: what is made, in words.

    Errors: the refusal; ValueError for that of another rank, and where problems differ.
    """
    words = "" if refusal is None else str(refusal) or type(refusal).__name__
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (words, problem), group=group)
    if refusal is not None:
        raise refusal
    for rank, (words, _) in enumerate(said):
        if words:
            raise ValueError(f"expert_parallel: rank {rank} was given what does not fit, must be "
                             f"what fits: {words}")
    first = said[0][1]
    for rank, (_, problem) in enumerate(said):
        if problem != first:
            raise ValueError(f"expert_parallel: the problem of rank {rank} is {problem!r}, must be "
                             f"that of rank 0, {first!r}")
