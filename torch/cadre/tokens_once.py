"""Tokens that cross once to each rank that has rows of them, by the route "collective". Rows for a
rank stand in the order of (expert, token, choice), and its tokens in the order of their first rows.
So the first rows need the first tokens, no more of them than rows: late rows are the last ones.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .collective import Exchange, moved, on_device
from .operations import RoutingOffsets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WORTH_IT = 8 << 20  # bytes that are saved; docs/collective.md


def saves_enough(tokens: int, top_k: int, row_bytes: int, ranks: int) -> bool:
    """Whether that is to be expected of so many tokens: of top_k choices about (top_k - 1) /
    (P + top_k - 1) are of a rank to which the token goes anyway, and each takes four bytes."""
    saved = row_bytes * (top_k - 1) // (ranks + top_k - 1) - 4
    return tokens * top_k * saved >= _WORTH_IT


def require_cross(cross: str, block: int | None, route: str) -> None:
    """Errors: ValueError for another word, and beside what excludes it."""
    if cross not in ("auto", "token", "host", "choice"):
        raise ValueError(f"cross is {cross!r}, must be one of auto, token, host, choice")
    if cross in ("token", "host") and block is not None:
        raise ValueError(f"cross is {cross!r}, must be 'auto' or 'choice' where block is given; a "
                         "row crosses for each choice")
    if cross in ("host", "choice") and route != "collective":
        raise ValueError(f"cross is {cross!r}, must be 'auto' or 'token' where route is {route!r}; "
                         "it reads a token once")


class FirstRows(NamedTuple):
    """This rank's tokens for each rank, in the order of their first rows there."""

    tokens: Tensor  # int64 [P]: how many
    leaving: Tensor  # int64 [T * top_k + 1]: which, one rank's behind the other's; the rest is 0
    number: Tensor  # int64 [T * top_k]: of a choice, which of the tokens for its rank it has

    @classmethod
    def of(cls, experts: Tensor, order: RoutingOffsets, ranks: int) -> "FirstRows":
        """experts: [T, top_k]. order: of all of them among all experts."""
        row, each = order.row_of.long(), (order.offsets.numel() - 1) // ranks
        choices, has_row = row.numel(), row >= 0
        rank = (experts.long() // each).where(has_row, ranks)
        first_row = row.new_full((row.shape[0], ranks + 1), choices)
        first_row = first_row.scatter_reduce_(1, rank, row.where(has_row, choices),
                                              "amin").gather(1, rank)
        is_first = has_row & (row == first_row)
        flags = row.new_zeros(choices + 1)
        flags.scatter_(0, row.where(has_row, choices).flatten(), is_first.long().flatten())
        before = pad(flags[:-1].cumsum(0), (1, 0))  # tokens whose first row is before a row
        begin = before[order.offsets[::each].long()]
        token = before[first_row]
        leaving = row.new_zeros(choices + 1)
        own = torch.arange(row.shape[0], device=row.device)[:, None].expand_as(row)
        leaving.scatter_(0, token.where(is_first, choices).flatten(), own.flatten())
        return cls(begin.diff(), leaving, (token - begin[rank]).flatten())


class TokensOnce(NamedTuple):
    """Tokens of this rank -> rows of this rank's experts."""

    group: "ProcessGroup"
    sent: list[int]  # tokens to each rank
    received: list[int]  # tokens from each rank
    leaving: Tensor  # those that are sent
    source: Tensor  # [R]: the token of each row, among those that arrive

    def to_experts(self, x: Tensor) -> Tensor:
        tokens = moved(self.group, x.index_select(0, self.leaving), self.sent, self.received)
        return tokens.index_select(0, self.source)


def planned_tokens(exchange: Exchange, order: RoutingOffsets, first: FirstRows | None,
                   tokens: Tensor, rank: int) -> TokensOnce:
    """What crosses in the place of the exchange's rows. All ranks call it.

    order: of the rows that this rank sends. first: where it has counted its tokens, else each row
    is a token. tokens: int64 [P, P] of each rank for each, without regard to late rows; none of a
    rank that has not counted them."""
    on, rows = order.slot_of.device, torch.tensor([exchange.sent, exchange.received])
    told = torch.stack((tokens[rank], tokens[:, rank]))
    counted = torch.stack((tokens[rank].any().expand(len(tokens)), tokens.any(1)))
    sent, received = rows.where(~counted, told.minimum(rows)).tolist()
    if first is None:
        leaving = order.slot_of // order.row_of.shape[1]
        number = on_device(on, torch.cat([torch.arange(n) for n in sent]))
    else:
        begin = (tokens[rank].cumsum(0) - tokens[rank]).tolist()
        leaving = torch.cat([first.leaving[at:at + n] for at, n in zip(begin, sent)])
        number = first.number[order.slot_of.long()]
    arrived = torch.tensor(received)
    source = sources(exchange, number, arrived.cumsum(0) - arrived)
    return TokensOnce(exchange.group, sent, received, leaving, source)


def sources(exchange: Exchange, number: Tensor, begin: Tensor) -> Tensor:
    """[R]: the token of each row, among those that arrive. All ranks call it.

    number: of each row that leaves, which of the tokens for its rank it has. begin: int64 [P], on
    the host, where those of each rank begin."""
    came = moved(exchange.group, number.int()[:, None], exchange.sent, exchange.received)
    begin = on_device(number.device, begin.repeat_interleave(torch.tensor(exchange.received)))
    return (came.flatten().long() + begin)[exchange.order.slot_of.long()]
