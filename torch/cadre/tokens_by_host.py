"""Tokens that cross once to each host that has rows of them, by the route "collective": to the rank
there that has the sender's place in its host, and from it once to each rank of that host with rows
of them, as in tokens_once.py. Numbers that go along say which of the tokens are for which rank.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .collective import Exchange, moved, on_device
from .dtypes import kind_of
from .operations import RoutingOffsets
from .tokens_once import FirstRows, TokensOnce, sources

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def host_named(host: str | None, cross: str) -> str | None:
    """The host of this rank, where `cross` asks for one; by default as windows know it, the boot of
    its kernel and the network of this process. Errors: TypeError and ValueError for what does not
    fit; OSError where the kernel does not say."""
    if host is not None and not isinstance(host, str):
        raise TypeError(f"host is {kind_of(host)}, must be a str")
    if cross == "host":
        boot = Path("/proc/sys/kernel/random/boot_id")
        return host if host is not None else (
            f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/net')}")
    if host is not None:
        raise ValueError(f"host is {host!r}, must be left out where cross is {cross!r}; tokens "
                         "cross by host where cross is 'host'")
    return None


class Hosts(NamedTuple):
    """Which ranks of a group share a host, as one of them sees it. Ranks in lists ascend."""

    rank: int  # who sees it
    within: list[int]  # the ranks of its host
    across: list[int]  # the rank of each host that has the same place in it, itself too
    place: list[int]  # of each rank: which of its host's it is
    host: list[int]  # of each rank: which of `across` is of its host

    @classmethod
    def gathered(cls, group: "ProcessGroup", host: str | None) -> "Hosts | None":
        """All ranks call it, each with its host."""
        names: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, host, group=group)
        return cls.of(names, dist.get_rank(group))

    @classmethod
    def of(cls, names: list[str], rank: int) -> "Hosts | None":
        """names: the host of each rank. None where they are one host, or have one rank each: then
        hosts say nothing that ranks do not. Errors: ValueError for hosts of other numbers of ranks.
        """
        ranks_of = {name: [r for r, n in enumerate(names) if n == name] for name in names}
        each = len(ranks_of[names[0]])
        for name, ranks in ranks_of.items():
            if len(ranks) != each:
                raise ValueError(
                    f"expert_parallel: the ranks of host {name!r} are {len(ranks)}, must be {each} "
                    f"as those of host {names[0]!r}; where cross is 'host' each exchanges with the "
                    "one at its place in every other host")
        if each in (1, len(names)):
            return None
        place = [ranks_of[name].index(r) for r, name in enumerate(names)]
        across = [r for r in range(len(names)) if place[r] == place[rank]]
        host = [across.index(ranks_of[name][place[rank]]) for name in names]
        return cls(rank, ranks_of[names[rank]], across, place, host)

    def sizes(self, of: list[int], numbers: Tensor) -> list[int]:
        """Of the messages with all ranks: those numbers with the ranks `of`, 0 with the others."""
        every = numbers.new_zeros(len(self.host)).scatter_(0, torch.tensor(of), numbers)
        sizes: list[int] = every.tolist()
        return sizes

    def sums(self, numbers: Tensor, by: list[int], length: int) -> Tensor:
        """Numbers [P] added up where `by`, the place or the host, is the same."""
        return numbers.new_zeros(length).index_add_(0, torch.tensor(by), numbers)


def _begin(length: Tensor) -> Tensor:
    """Where each begins, if they lie one behind the other."""
    return length.cumsum(0) - length


def _repeated(numbers: Tensor, times: Tensor, on: torch.device) -> Tensor:
    """Numbers of the host on a device, each so many times."""
    return on_device(on, numbers).repeat_interleave(on_device(on, times),
                                                    output_size=int(times.sum()))


def _runs(begin: Tensor, length: Tensor, on: torch.device) -> Tensor:
    """begin[i] and what follows it, length[i] numbers, one run behind the other."""
    shift = _repeated(begin - _begin(length), length, on)
    return shift + torch.arange(shift.numel(), device=on)


class TokensForHosts(NamedTuple):
    """This rank's tokens for each rank and for each host; those for a host stand in their order."""

    hosts: Hosts
    first: FirstRows  # those for each rank
    tokens: Tensor  # int64 [P + N]: how many for each rank; for the host of each of across
    leaving: Tensor  # int64 [T * N + 1]: which, one host's behind the other's; the rest is 0
    number: Tensor  # int64 [T, N]: which of those for a host a token is

    @classmethod
    def of(cls, hosts: Hosts, experts: Tensor, order: RoutingOffsets) -> "TokensForHosts":
        """experts: [T, top_k]. order: of all of them among all experts."""
        ranks, ends, on = len(hosts.host), len(hosts.across), experts.device
        first = FirstRows.of(experts, order, ranks)
        each, has_row = (order.offsets.numel() - 1) // ranks, order.row_of >= 0
        host = on_device(on, torch.tensor([*hosts.host, ends]))
        host = host[(experts.long() // each).where(has_row, ranks)]
        goes = has_row.new_zeros((experts.shape[0], ends + 1)).scatter_(1, host, True)
        goes = goes[:, :ends].t().reshape(-1)
        at = goes.cumsum(0) - 1
        own = torch.arange(experts.shape[0], device=on).repeat(ends)
        leaving = at.new_zeros(goes.numel() + 1)
        leaving.scatter_(0, at.where(goes, goes.numel()), own)
        tokens = goes.view(ends, -1).sum(1)
        number = (at.view(ends, -1) - _begin(tokens)[:, None]).t()
        return cls(hosts, first, torch.cat([first.tokens, tokens]), leaving, number)

    def planned(self, exchange: Exchange, order: RoutingOffsets, told: Tensor, rows: Tensor
                ) -> "TokensByHost":
        """What crosses in the place of the exchange's rows. All ranks call it.

        order: of the rows that this rank sends. told: int64 [P, P + N], `tokens` of each rank,
        without regard to late rows; tokens that have no others cross all the same. rows: [P, P] of
        each rank for each."""
        hosts, group, ranks, on = self.hosts, exchange.group, len(rows), self.leaving.device
        for_ranks, for_hosts = told[:, :ranks].minimum(rows), told[:, ranks:]
        sent = hosts.sizes(hosts.across, for_hosts[hosts.rank])
        arriving = for_hosts[hosts.across, hosts.host[hosts.rank]]
        # By sender and then by receiver they are told, by receiver and then by sender they leave.
        passed = for_ranks[hosts.across][:, hosts.within]
        numbers = self._numbers(group, told[hosts.rank, :ranks], for_ranks[hosts.rank], passed)
        numbers += _repeated(_begin(arriving), passed.sum(1), on)
        begin = _begin(passed.flatten()).view_as(passed)
        numbers = numbers[_runs(begin.t().flatten(), passed.t().flatten(), on)]
        # What comes stands by the place of its rank, then by that rank.
        here = for_ranks[:, hosts.rank]
        coming = hosts.sums(here, hosts.place, len(hosts.within))
        by_place = torch.tensor(sorted(range(ranks), key=lambda r: hosts.place[r]))
        begin = here.new_zeros(ranks).scatter_(0, by_place, _begin(here[by_place]))
        source = sources(exchange, self.first.number[order.slot_of.long()], begin)
        within = TokensOnce(group, hosts.sizes(hosts.within, passed.sum(0)),
                            hosts.sizes(hosts.within, coming), numbers, source)
        return TokensByHost(group, sent, hosts.sizes(hosts.across, arriving),
                            self.leaving[:sum(sent)], within)

    def _numbers(self, group: "ProcessGroup", told: Tensor, sent: Tensor, passed: Tensor) -> Tensor:
        """Of the tokens that this rank passes on, for each of its host, which of a rank's they are.

        told, sent: [P] tokens of this rank for each, without and with regard to late rows. passed:
        [N, P / N] of hosts.across for hosts.within."""
        hosts, on = self.hosts, self.leaving.device
        by_host = torch.tensor(sorted(range(len(sent)), key=lambda r: hosts.host[r]))
        length = sent[by_host]
        token = self.first.leaving[_runs(_begin(told)[by_host], length, on)]
        host = _repeated(torch.tensor(hosts.host)[by_host], length, on)
        leaving = hosts.sizes(hosts.across, hosts.sums(sent, hosts.host, len(hosts.across)))
        coming = hosts.sizes(hosts.across, passed.sum(1))
        number = self.number[token, host].int()[:, None]
        return moved(group, number, leaving, coming).flatten().long()


class TokensByHost(NamedTuple):
    """Tokens of this rank -> rows of this rank's experts."""

    group: "ProcessGroup"
    sent: list[int]  # tokens to each rank, which it passes on in its host
    received: list[int]  # tokens from each rank, for this host
    leaving: Tensor  # those that are sent
    within: TokensOnce  # of those that arrive

    def to_experts(self, x: Tensor) -> Tensor:
        tokens = moved(self.group, x.index_select(0, self.leaving), self.sent, self.received)
        return self.within.to_experts(tokens)
