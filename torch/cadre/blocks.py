"""The route "collective" of `ExpertParallel` in blocks of a size that is known: a rank sends as
many rows to each rank, whatever its tokens chose, so the host reads no counts, and a CUDA graph may
have the exchange. Where rows go is worked out on the device, from the counts of all ranks.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .collective import kept_of
from .dtypes import require_sizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def require_block(block: int, rows: int | str | None, factor: float | None, route: str) -> None:
    """Errors: TypeError and ValueError for a block that is no size, and beside what it excludes."""
    require_sizes(block=block)
    for name, given in (("rows", "exact" if rows == "exact" else None), ("factor", factor)):
        if given is not None:
            raise ValueError(f"{name} is {given!r}, must be left out where block is given; R is "
                             "P * block, or a number of rows")
    if route != "collective":
        raise ValueError(f"block is {block}, must be left out where route is {route!r}; it is of "
                         "the route 'collective'")


def _taken(rows: Tensor, at: Tensor) -> Tensor:
    """The rows with these numbers, and zeros for -1."""
    if rows.shape[0] == 0:
        return rows.new_zeros((at.numel(), rows.shape[1]))
    return rows.index_select(0, at.clamp(min=0)).masked_fill_((at < 0)[:, None], 0)


def _inverse(at: Tensor, length: int) -> Tensor:
    """Where each of so many numbers stands in `at`, or -1."""
    found = at.new_full((length + 1,), -1)
    places = torch.arange(at.numel(), device=at.device)
    return found.scatter_(0, at.where(at >= 0, length), places)[:-1]


class BlockExchange(NamedTuple):
    """Rows of this rank's tokens, in the order of all experts <-> rows of this rank's experts. All
    are numbers of rows, int64, or -1 where none is."""

    group: "ProcessGroup"
    leaving: Tensor  # [P * block]: the row of a token at each place of the blocks that leave
    place_of: Tensor  # [n]: its inverse
    arrived: Tensor  # [R]: the place of each row here in the blocks that came
    row_of: Tensor  # [P * block]: its inverse
    late: Tensor | None  # bool []: whether all is NaN, since rows overflowed

    def to_experts(self, rows: Tensor) -> Tensor:
        return self._checked(_taken(self._moved(_taken(rows, self.leaving)), self.arrived))

    def to_tokens(self, rows: Tensor) -> Tensor:
        return self._checked(_taken(self._moved(_taken(rows, self.row_of)), self.place_of))

    def _moved(self, blocks: Tensor) -> Tensor:
        came = torch.empty_like(blocks)
        dist.all_to_all_single(came, blocks, group=self.group)
        return came

    def _checked(self, rows: Tensor) -> Tensor:
        return rows if self.late is None else rows.masked_fill_(self.late, math.nan)


class BlockRoute:
    """The exchanges of one layer in blocks of `block` rows, of which a rank keeps `rows`."""

    group: "ProcessGroup"
    block: int
    rows: int  # R
    drops: bool  # what overflows; else it is an error
    problem: str
    rank: int
    ranks: int

    def __init__(self, group: "ProcessGroup", block: int, rows: int, overflow: str,
                 problem: str) -> None:
        self.group, self.block, self.rows = group, block, rows
        self.drops, self.problem = overflow == "drop", problem
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # Of an overflow: the rank with most rows, how many, and most from one rank to another.
        self._note: Tensor | None = None

    def planned(self, chosen: Tensor, choices: int) -> tuple[Tensor, Tensor, BlockExchange]:
        """Choices int64 [P, P, E] of each rank by expert; those that are kept; and where rows go.
        chosen: of this rank by expert, [P * E]. choices: how many it has at most."""
        mine = chosen.long()
        counts = mine.new_empty(self.ranks * mine.numel())
        dist.all_gather_into_tensor(counts, mine, group=self.group)
        counts = counts.view(self.ranks, self.ranks, -1)
        kept = kept_of(self._in_blocks(counts), self.rows)
        leaving, arrived = self._leaving(kept[self.rank]), self._arrived(kept[:, self.rank])
        blocks = self.ranks * self.block
        return counts, kept, BlockExchange(
            self.group, leaving, _inverse(leaving, choices), arrived, _inverse(arrived, blocks),
            None if self.drops else self._noted(counts, kept))

    def offsets(self, kept: Tensor) -> Tensor:
        """int32 [E + 1] of the rows here."""
        rows = kept[:, self.rank].sum(0)
        return pad(rows.cumsum(0), (1, 0)).int()

    def check(self) -> None:
        """Waits for the current stream. Errors: RuntimeError, once, if rows overflowed."""
        if self._note is None:
            return
        rank, rows, most = self._note.tolist()
        if rows == 0:
            return
        self._note.zero_()
        raise RuntimeError(
            f"expert_parallel: the rows of rank {rank} are {rows}, must be at most {self.rows}, "
            f"and those from one rank to another {most}, at most {self.block}, the block; results "
            f"of that dispatch are NaN on all ranks; rows={rows} and block={most} fit "
            f"[{self.problem}]")

    def _in_blocks(self, counts: Tensor) -> Tensor:
        """Choices [P, P, E] without those beyond the block of their pair of ranks."""
        before = counts.cumsum(2) - counts
        return (self.block - before).clamp(min=0).minimum(counts)

    def _leaving(self, kept: Tensor) -> Tensor:
        """kept: [P, E] of this rank's tokens, whose rows stand one after another."""
        sent = kept.sum(1, keepdim=True)
        place = torch.arange(self.block, device=kept.device)
        return (sent.cumsum(0) - sent + place).where(place < sent, -1).flatten()

    def _arrived(self, kept: Tensor) -> Tensor:
        """kept: [P, E] of this rank's experts, whose rows stand by expert, then by rank."""
        by_row = kept.t().flatten()
        ends = by_row.cumsum(0)
        row = torch.arange(self.rows, device=kept.device)
        run = torch.searchsorted(ends, row, right=True).clamp(max=by_row.numel() - 1)
        first = torch.arange(self.ranks, device=kept.device)[:, None] * self.block
        place = (first + kept.cumsum(1) - kept).t().flatten()  # of the first row of each run
        return (place - ends + by_row)[run].add(row).where(row < ends[-1], -1)

    def _noted(self, counts: Tensor, kept: Tensor) -> Tensor:
        """Whether choices were left out, which is noted for the host."""
        late = (counts != kept).any()
        if self._note is None or self._note.device != counts.device:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("dispatch: a CUDA graph is being captured, must not be by the "
                                   "first dispatch with block; it makes what notes an overflow")
            self._note = counts.new_zeros(3)
        rows, rank = counts.sum((0, 2)).max(0)
        now = torch.stack([rank, rows, counts.sum(2).max()])
        self._note.copy_(now.where(late & (self._note[1] == 0), self._note))
        return late
