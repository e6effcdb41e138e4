"""Expert parallelism: every rank has some of the experts, and rows travel to them and back.

The route "collective" works with any backend of torch.distributed. A rank permutes its tokens in
the order of all experts, so the rows for another rank are one segment, and all_to_all_single moves
them. One more permutation brings what arrives, by rank, into the order of this rank's experts.
Tokens may cross once to each rank (tokens_once.py), or to each host (tokens_by_host.py).
The route "window", by which ranks of one host read each other's memory, is in windows.py.
docs/layers/expert_parallel.md has the formulas and an example.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import agree
from .blocks import BlockRoute, require_block
from .collective import (
    Exchange, Moved, Way, by_token, collected, exchanged, kept_of, nan_rows, on_device,
    process_group, without_late)
from .dispatched import (
    Call, DispatchedCodes, DispatchedRows, DispatchHandle, nan_dispatched, require_choices,
    require_handle)
from .dtypes import kind_of, require_rows, require_sizes
from .operations import Quantized, RoutingOffsets, combine, offsets_of_routing, permute
from .tokens_by_host import Hosts, TokensForHosts, host_named
from .tokens_once import FirstRows, planned_tokens, require_cross, saves_enough
from .windows import CanPush, ExchangeMap, WindowOptions, WindowRoute, addresses_of

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

_MOST_ROWS = 2**31 - 1  # rows are numbered in int32
_Leaving = FirstRows | TokensForHosts | None  # tokens that cross once
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _eager(reason: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator, with types: torch.compile breaks its graph there."""
    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        return torch.compiler.disable(function, reason=reason)
    return decorate


_HOST_READS = ("the host reads how many rows each rank sends, and ranks exchange equally often, in "
               "the same order; what lies between dispatch and collect compiles")
_IN_BLOCKS = "ranks exchange equally often, in the same order"
_IN_WINDOW = "tensors that lie in a window are not the compiler's to make"


class ExpertParallel:
    """Brings rows to the ranks of their experts, and their results back.

    Expert e of all P * E belongs to rank e // E. A rank's rows of an expert stand in the order
    (rank, token, choice), as in one process that has all ranks' tokens one after another, and
    results and gradients have the bits of that process.

    group: a process group, or a DeviceMesh of one dimension. None: all ranks.
    experts: E, those of this rank. top_k: choices of a token.
    rows: R, the rows that a rank takes at most; "exact" for as many as come. factor: R as a
        multiple of T * top_k, T of the rank with most tokens; by default min(P, 2), with which two
        ranks cannot overflow.
    block: by the route collective, the rows that a rank sends to another at most. As many then
        travel whatever is chosen, the host reads no counts, and a CUDA graph may have exchanges. R
        is P * block, or rows=. All ranks ask for the same H, type and gradients, and none raises.
    overflow: "error": results and gradients of that dispatch are NaN on all ranks, and the next
        one, or `check`, raises. "drop": choices whose row would be R or more are dropped.
    route: "collective", by torch.distributed: the host waits for the counts, once a dispatch.
        "window": ranks of one host read each other's memory, and the host waits for nothing. The
        options below are of this route, which is made for sizes that are known.
    cross: by the route collective, "token": a token crosses once to each rank that has rows of it,
        in dispatch and in backward of collect, where some token has several choices there;
        "host": once to each host that has, and then to the ranks there; "choice": for each choice;
        "auto": "token" where that is expected to save enough, else "choice".
    host: with cross="host", any name of the host of this rank, by default what its kernel says.
        Hosts must have equally many of the ranks, which need not be neighbours.
    tokens, hidden, dtype: T of the rank with most tokens; H; of x. By default those of `share`.
    prob: whether probabilities travel, as they do in `MoE`.
    sum: "choice": results of a token are summed in the order of top_k, with the bits of one rank.
        "rank": each rank sums its own rows of a token first, and at most one sum a rank crosses;
        the bits of results, and of dx, depend on P then.
    x, scales_major: a format whose scales are of one row each, "fp8_row", "fp8_block" or "mxfp8":
        tokens travel as its codes, which `dispatch_codes` takes and `MoE` makes; scales of rows lie
        "row" by row, or "column" by column, as Hopper's products of fp8_block read them.
    layer: any number from 0 on; ranks at layers of other numbers find that out.
    share: an ExpertParallel whose window this one uses too, which must be large enough.
    device: of the window; by default the current CUDA device, or the CPU where there is none.
    limit_s: how long an exchange waits for another rank before it fails on all of them, ten years
        at most; 0: for ever.

    All ranks make it. Errors: ValueError and TypeError, on all ranks, for what does not fit or is
    not the same on all of them.
    """

    group: "ProcessGroup"
    ranks: int
    rank: int
    experts: int
    top_k: int
    rows: int | str | None
    factor: float | None
    block: int | None
    overflow: str
    route: str
    cross: str
    host: str | None
    problem: str

    def __init__(self, group: "ProcessGroup | DeviceMesh | None", experts: int, top_k: int, *,
                 rows: int | str | None = None, factor: float | None = None,
                 block: int | None = None, overflow: str = "error", route: str = "collective",
                 cross: str = "auto", host: str | None = None, tokens: int | None = None,
                 hidden: int | None = None, dtype: torch.dtype | None = None, prob: bool = True,
                 sum: str = "choice", x: str | None = None, scales_major: str = "row",
                 layer: int = 0, share: "ExpertParallel | None" = None,
                 device: torch.device | str | None = None, limit_s: float = 60.0) -> None:
        self.group = process_group(group)
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.experts, self.top_k, self.rows = experts, top_k, rows
        self.factor, self.block, self.overflow = factor, block, overflow
        self.route, self.cross, self.host = route, cross, host
        if rows is None and factor is None and block is None:
            self.factor = min(self.ranks, 2)
        room = f"factor={self.factor}" if rows is None else f"R={rows}"
        if block is not None:
            room = f"block={block}" if rows is None else f"R={rows} block={block}"
        self.problem = (f"expert_parallel E={experts} top_k={top_k} ranks={self.ranks} {room} "
                        f"overflow={overflow} route={route}"
                        + (f" cross={cross}" if cross != "auto" else ""))
        self._overflowed = ""
        self._places: dict[DeviceMesh, Any] = {}  # of replicas, see expert_state.py
        self._window: WindowRoute | None = None
        self._blocks: BlockRoute | None = None
        self._agree(WindowOptions(tokens, hidden, dtype, prob, sum, x, scales_major, layer, share,
                                  device, limit_s))
        self._hosts = Hosts.gathered(self.group, self.host) if cross == "host" else None

    def __deepcopy__(self, *_: Any) -> "ExpertParallel":
        """Itself: the copy of a model is of the same group."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("ExpertParallel is pickled, must not be; save the state_dict of its model")

    def __repr__(self) -> str:
        return f"<{self.problem}>"

    def check(self) -> None:
        """All ranks call it at the same place of their program: an error that one of them raises
        here alone leaves the others waiting for it.

        Errors: RuntimeError, once, if a rank had more rows than it takes in the last dispatch; by
        the route window also if a rank failed, and every time.
        """
        if self._window is not None:
            self._window.exchange.check()
        if self._blocks is not None:
            self._blocks.check()
        words, self._overflowed = self._overflowed, ""
        if words:
            raise RuntimeError(words)

    def dispatch(self, x: Tensor, experts: Tensor, prob: Tensor | None = None) -> DispatchedRows:
        """The rows of this rank's experts, of all ranks' tokens. Differentiable in x and prob.

        x: [T, H] fp32, bf16 or fp16; T may be another on each rank, 0 too. experts: int32 or int64
        [T, top_k]; a number outside [0, P * E) drops the choice. prob: fp32 [T, top_k].

        All ranks call it, in the same order. Errors: RuntimeError for an overflow before, and where
        another rank raised an error or asks for something else; ValueError and TypeError for what
        does not fit.
        """
        if self._window is not None:
            return self._dispatch_by_window(self._window, self._window.name, x, experts, prob)
        if self._blocks is not None:
            return self._dispatch_in_blocks(self._blocks, x, experts, prob)
        return self._dispatch_by_collective(x, experts, prob)

    def dispatch_codes(self, x: Quantized, experts: Tensor, prob: Tensor | None = None
                       ) -> DispatchedCodes:
        """As dispatch, of codes: those that `quantize` of the rows would have made. Not
        differentiable.

        x: codes [T, H] and scales [T, H / block] along K of the format that this was made with,
        as `quantize` makes them. Errors: ValueError without a format, or where prob wants a
        gradient; else as dispatch.
        """
        if (own := self._window) is None or own.options.x is None:
            raise ValueError("dispatch_codes: x is None, must be a format when this is made")
        if not isinstance(x, Quantized):
            raise TypeError(f"x is {kind_of(x)}, must be what quantize returns")
        if prob is not None and prob.requires_grad and torch.is_grad_enabled():
            raise ValueError("prob wants a gradient, must not; dispatch_codes has none, so detach "
                             "it, or call under torch.no_grad()")
        require_choices(x.codes, experts, prob, self.top_k)
        rows, row_prob, routed, where, _ = own.dispatch_codes(own.name, x, experts, prob)
        handle = self._handle(own.name, x.codes, experts, rows.codes, routed, where)
        return DispatchedCodes(rows, row_prob, where.offsets, handle)

    def _handle(self, name: str, x: Tensor, experts: Tensor, rows: Tensor, routed: Tensor,
                where: ExchangeMap) -> DispatchHandle:
        return DispatchHandle(experts, self.ranks * self.experts, routed, rows.shape[0], x.shape[0],
                              rows.shape[0], where=where, window=name)

    def _dispatch_within(self, x: Tensor, experts: Tensor, prob: Tensor | None,
                         can_push: CanPush = None, read: bool = False) -> DispatchedRows:
        """As dispatch, for a layer that keeps the rows to itself, unless somebody reads them there:
        by a window nobody else may read their tail, and experts put their results into that of the
        handle."""
        if (own := self._window) is None:
            return self.dispatch(x, experts, prob)
        return self._dispatch_by_window(own, self._name_within(own, can_push, read), x, experts,
                                        prob)

    def _name_within(self, window: WindowRoute, can_push: CanPush, read: bool) -> str:
        """Of a layer's exchange. Who reads rows is given zeros for a tail."""
        name = window.name_within(can_push)
        return window.name if read and name == window.inner_name else name

    def _dispatch_by_window(self, window: WindowRoute, name: str, x: Tensor, experts: Tensor,
                            prob: Tensor | None) -> DispatchedRows:
        Call.of(x, experts, prob, self.top_k)
        rows, row_prob, routed, where = window.dispatch(name, x, experts, prob)
        return DispatchedRows(rows, row_prob, where.offsets,
                              self._handle(name, x, experts, rows, routed, where))

    def _dispatch_again(self, of: DispatchHandle, x: Tensor, *routing: Tensor) -> Tensor:
        """The rows of that dispatch, for backward. All ranks call it."""
        if self._window is not None:
            return self._window.dispatch(of.window, x, *routing)[0]
        if of.order is None or of.exchange is None:
            return nan_rows(of.rows)(x)
        if (tokens := by_token(of.exchange, of.order)) is not None:
            return tokens.there(x)
        return of.exchange.to_experts(permute(x, of.order)[0])

    @_eager(_HOST_READS)
    def _dispatch_by_collective(self, x: Tensor, experts: Tensor, prob: Tensor | None
                                ) -> DispatchedRows:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("dispatch: a CUDA graph is being captured, must not be; the route "
                               "collective reads counts on the host")
        self.check()
        order, first, tokens, told, counts = self._routed(x, experts, prob)
        capacity = self._capacity(max(tokens))
        handle = DispatchHandle(experts, self.ranks * self.experts, counts.sum((0, 2)), capacity,
                                x.shape[0], counted=order.offsets.diff())
        if handle.dropped.any():
            if self.overflow == "error":
                self._overflowed = self._overflow_text(counts, capacity, max(tokens))
                return nan_dispatched(x, prob, self.experts, handle)
            counts = kept_of(counts, capacity)
            order = without_late(order, experts, counts[self.rank].flatten())
        exchange = Exchange.planned(self.group, counts, x.device)
        order = order._replace(slot_of=order.slot_of[:sum(exchange.sent)])
        if told.any():
            exchange = exchange._replace(
                once=first.planned(exchange, order, told, counts.sum(2))
                if isinstance(first, TokensForHosts) else
                planned_tokens(exchange, order, first, told, self.rank))
        if self.ranks > 1:
            rows, row_prob = exchanged(exchange, order, x, prob)
        else:
            rows, row_prob = permute(x, order, prob=prob)
        handle = replace(handle, rows=rows.shape[0], order=order, exchange=exchange)
        return DispatchedRows(rows, row_prob, exchange.order.offsets, handle)

    @_eager(_IN_BLOCKS)
    def _dispatch_in_blocks(self, blocks: BlockRoute, x: Tensor, experts: Tensor,
                            prob: Tensor | None) -> DispatchedRows:
        Call.of(x, experts, prob, self.top_k)
        order = offsets_of_routing(experts, self.ranks * self.experts, experts.numel())
        chosen = order.offsets.diff()
        counts, kept, exchange = blocks.planned(chosen, experts.numel())
        if self.overflow == "drop":
            order = without_late(order, experts, kept[self.rank].flatten())
        rows, row_prob = exchanged(exchange, order, x, prob)
        handle = DispatchHandle(experts, self.ranks * self.experts, counts.sum((0, 2)),
                                kept.sum((0, 2)), x.shape[0], blocks.rows, order, exchange,
                                counted=chosen)
        return DispatchedRows(rows, row_prob, blocks.offsets(kept), handle)

    def collect(self, y: Tensor, handle: DispatchHandle) -> Tensor:
        """out[t] = sum over the choices of token t of their rows of y, in fp32, in the order of
        top_k, rounded once: [T, H]. Differentiable in y. With sum="rank" each rank's rows first.

        y: [R, H], results for the rows that `dispatch` gave. All ranks call it, in the same order.
        Errors: ValueError and TypeError for what does not fit. The other ranks do not hear of that,
        and wait as long as their group does.
        """
        require_rows("y", y)
        require_handle(handle, has_window=self._window is not None)
        if y.dim() != 2 or y.shape[0] != handle.rows:
            raise ValueError(f"y has shape {list(y.shape)}, must be [{handle.rows}, H], a row for "
                             "each that dispatch gave")
        if self._window is not None and handle.where is not None:
            return self._window.collect(handle.window, y, handle.where)
        return self._collect_by_collective(y, handle)

    @_eager(_IN_WINDOW)
    def empty_tokens(self, tokens: int | None = None) -> Tensor:
        """Memory for x or dout in the window, from where it is not copied again: [T, H], or that of
        the first `tokens` of them. It waits until the other ranks have read what lies there, so ask
        anew for each exchange.

        Errors: ValueError for another route, and for tokens outside 0 to T; TypeError for what is
        no int; RuntimeError if a rank failed.
        """
        if tokens is not None:
            self._own_window().require_tokens(tokens)
        memory: Tensor = self._ready_window().exchange.tokens()
        return memory if tokens is None else memory[:tokens]

    @_eager(_IN_WINDOW)
    def empty_rows(self) -> Tensor:
        """Memory for y [R, H] in the window, likewise."""
        memory: Tensor = self._ready_window().exchange.rows()
        return memory

    @property
    def window_bytes(self) -> int:
        """Of a rank's window. Errors: ValueError for another route."""
        return self._own_window().bytes()

    @_eager(_HOST_READS)
    def adopt(self, memory: Any) -> None:
        """Has its window in memory that others have shared and mapped, instead of its own:

            buffer = symm_mem.empty(ep.window_bytes, dtype=torch.uint8, device="cuda")
            ep.adopt(symm_mem.rendezvous(buffer, group))

        memory: with `buffer_ptrs` as symmetric memory of torch has them, or their list: addresses,
            in this process, of `window_bytes` of each rank. Each is the first of an allocation of
            CUDA's virtual memory; on the CPU, of a page of a shared mapping.

        All ranks call it, before they exchange or share the window; it is kept as long as this.
        Errors: ValueError for another route; on all ranks, TypeError and ValueError for what is no
        memory on one of them, and RuntimeError for memory that is too small, is not that of the
        other ranks, or cannot be mapped again. Its first bytes are written even then.
        """
        own = self._own_window()
        refusal, addresses = None, []
        try:
            addresses = addresses_of(memory)
        except Exception as error:
            refusal = error
        number = agree(self.group, refusal, self.problem, own.number)
        self._window = WindowRoute.made(self.problem, own.on, self.group, own.options, addresses)
        self._window.number, self._window.memory = number, memory

    def _own_window(self) -> WindowRoute:
        if self._window is None:
            raise ValueError(f"route is {self.route!r}, must be 'window'; others have no window")
        return self._window

    def _ready_window(self) -> WindowRoute:
        own = self._own_window()
        own.exchange.await_readers()
        return own

    @_eager(_HOST_READS)
    def _collect_by_collective(self, y: Tensor, handle: DispatchHandle) -> Tensor:
        order, exchange = handle.order, handle.exchange
        if order is None or exchange is None:
            return Moved.apply((Way(nan_rows(handle.tokens), nan_rows(handle.rows)),), y)[0]
        if isinstance(exchange, Exchange) and len(exchange.sent) == 1:  # of one rank
            return combine(y, order)
        return collected(exchange, order, y)

    def _agree(self, options: WindowOptions) -> None:
        """Errors: of what this rank was given, or of how it differs from other ranks."""
        refusal, on = None, None
        try:
            self._require_sense()
            on = self._planned(options)
        except Exception as error:  # of any kind: the others wait for this rank
            refusal = error
        number = agree(self.group, refusal, self.problem,
                       0 if self._window is None else self._window.number)
        if on is not None and self._window is None:
            self._window = WindowRoute.made(self.problem, on, self.group, options)
            self._window.number = number

    def _planned(self, options: WindowOptions) -> Tensor | None:
        """A tensor on the device of the window, where there is to be one. A shared one is there
        then. Errors: for options that do not fit."""
        if self.route != "window":
            options.refuse(self.route)
            if self.block is not None:
                self._blocks = BlockRoute(self.group, self.block, self._capacity(0), self.overflow,
                                          self.problem)
            return None
        if self.rows == "exact":
            raise ValueError("rows is 'exact', must be a number where route is 'window'; a window "
                             "is made before any rows come")
        options = options.completed()
        self.problem = options.problem(self.experts, self.top_k, self.ranks,
                                       self._capacity(options.tokens or 0), self.overflow)
        if options.share is None:
            return options.device_for(self.problem)
        self._window = options.shared(self.group, self.problem)
        return self._window.on

    def _require_sense(self) -> None:
        require_sizes(experts=self.experts, top_k=self.top_k)
        if self.block is not None:
            require_block(self.block, self.rows, self.factor, self.route)
        if self.rows is not None and self.factor is not None:
            raise ValueError(f"factor is {self.factor}, must be left out where rows are given; "
                             "both say the capacity")
        if self.rows is not None and self.rows != "exact":
            require_sizes(rows=self.rows)
        if self.factor is not None and not isinstance(self.factor, (int, float)):
            raise TypeError(f"factor is {kind_of(self.factor)}, must be a number")
        if self.factor is not None and not 0 < self.factor < math.inf:
            raise ValueError(f"factor is {self.factor}, must be above 0 and finite")
        rows = None if self.rows == "exact" else self.rows
        for name, given, most in (("factor", self.factor, _MOST_ROWS), ("rows", rows, _MOST_ROWS),
                                  ("block", self.block, _MOST_ROWS // self.ranks)):
            if given is not None and given > most:
                raise ValueError(f"{name} is {given}, must be at most {most}; rows are numbered in "
                                 "int32")
        for name, words in (("overflow", ("error", "drop")), ("route", ("collective", "window"))):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be one of "
                                 f"{', '.join(words)}")
        require_cross(self.cross, self.block, self.route)
        self.host = host_named(self.host, self.cross)

    def _capacity(self, tokens: int) -> int:
        """R, where the rank with most tokens has that many."""
        if self.rows is not None:
            return _MOST_ROWS if self.rows == "exact" else int(self.rows)
        if self.block is not None:
            return self.ranks * self.block
        return math.ceil(self.factor * tokens * self.top_k)

    def _overflow_text(self, counts: Tensor, capacity: int, tokens: int) -> str:
        needed = counts.sum((0, 2)).tolist()
        most = max(needed)
        factor = math.ceil(100 * most / (tokens * self.top_k)) / 100
        return (f"expert_parallel: the rows of rank {needed.index(most)} are {most}, must be at "
                f"most {capacity}, its capacity; results of that dispatch are NaN on all ranks; "
                f"factor={factor} or rows={most} fits [{self.problem}]")

    def _routed(self, x: Tensor, experts: Tensor, prob: Tensor | None
                ) -> tuple[RoutingOffsets, _Leaving, list[int], Tensor, Tensor]:
        """Where the choices of this rank's tokens are in the order of all experts; which of its
        tokens leave, where they cross once; the tokens of each rank; and on the host, int64, those
        that cross from each to each, [P, P] or [P, P + N] with N hosts, and the choices of each by
        expert, [P, P, E]."""
        ranks, width = self.ranks, self.ranks * self.experts
        words = ranks + (0 if self._hosts is None else len(self._hosts.across))
        try:
            call = Call.of(x, experts, prob, self.top_k)
            order = offsets_of_routing(experts, width, experts.numel())
            first = self._leaving(x, experts, order)
        except Exception:  # the others wait for this rank's counts
            on = x.device if isinstance(x, Tensor) and not x.is_meta else self._device()
            self._gathered([-1] * (1 + len(Call._fields)), torch.zeros(words + width, device=on))
            raise
        chosen = order.offsets.diff()
        told = chosen.new_zeros(words) if first is None else first.tokens
        table = self._gathered([x.shape[0], *call], torch.cat([told, chosen]))
        head = table[:, :-words - width].tolist()
        for rank, (tokens, *asked) in enumerate(head):
            if tokens < 0:
                raise RuntimeError(f"dispatch: rank {rank} raised an error, must raise none; it "
                                   "says which")
            if asked != head[0][1:]:
                raise RuntimeError(f"dispatch: rank {rank} asks for {Call(*asked)}, must ask for "
                                   f"{Call(*head[0][1:])} as rank 0 does")
        told, counts = table[:, -words - width:-width], table[:, -width:].view(ranks, ranks, -1)
        return order, first, [row[0] for row in head], told, counts

    def _leaving(self, x: Tensor, experts: Tensor, order: RoutingOffsets) -> _Leaving:
        if self._hosts is not None:
            return TokensForHosts.of(self._hosts, experts, order)
        once = self.cross in ("token", "host")
        if self.cross == "auto":
            once = saves_enough(x.shape[0], self.top_k, x.shape[1] * x.element_size(), self.ranks)
        return FirstRows.of(experts, order, self.ranks) if once and self.ranks > 1 else None

    def _device(self) -> torch.device:
        """Where this group surely exchanges."""
        return torch.device("cuda" if "nccl" in dist.get_backend_config(self.group) else "cpu")

    def _gathered(self, head: list[int], chosen: Tensor) -> Tensor:
        """head and the choices of each expert of every rank, int64 [P, ...] on the host."""
        mine = torch.cat([on_device(chosen.device, torch.tensor(head)), chosen.long()])
        table = mine.new_empty(self.ranks * mine.numel())
        dist.all_gather_into_tensor(table, mine, group=self.group)
        return table.view(self.ranks, -1).cpu()
