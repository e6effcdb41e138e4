"""The route "window" of `ExpertParallel`: ranks of one host read each other's memory.

The operators torch.ops.cadre._window_* (torch/csrc/expert_parallel.cpp) name an exchange in words.
Torch is told that they have ordered effects, so a compiled step has every exchange of the program,
once, in its order. docs/windows.md says how a window works.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ContextManager, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .devices import default_device
from .dtypes import kind_of, require_bools, require_float, require_sizes
from .fakes import register_fake
from .operations import Quantized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .expert_parallel import ExpertParallel

_ops = torch.ops.cadre
_classes = torch.classes.cadre
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


_MOST_REACH = 2**36  # bytes of all windows in which products find the places of rows
_MOST_SECONDS = 10 * 365 * 86400  # of a limit of the library
CanPush = Callable[[int], bool] | None  # whether experts can push results of so many rows


class WindowOptions(NamedTuple):
    """What `ExpertParallel` is given for the route window alone."""

    tokens: int | None
    hidden: int | None
    dtype: torch.dtype | None
    prob: bool
    sum: str
    x: str | None
    scales_major: str
    layer: int
    share: "ExpertParallel | None"
    device: torch.device | str | None
    limit_s: float

    def refuse(self, route: str) -> None:
        """Errors: ValueError for any that is given."""
        for name in ("tokens", "hidden", "dtype", "x", "share", "device"):
            if (given := getattr(self, name)) is not None:
                raise ValueError(f"{name} is {given}, must be left out where route is {route!r}; "
                                 "it is of the route 'window'")
        for name, usual in (("sum", "choice"), ("scales_major", "row")):
            if (given := getattr(self, name)) != usual:
                raise ValueError(f"{name} is {given!r}, must be {usual!r} where route is "
                                 f"{route!r}; others are of the route 'window'")

    def completed(self) -> "WindowOptions":
        """With those of `share`. Errors: TypeError and ValueError for what does not fit."""
        usual = None if self.share is None else self._window_of(self.share).options
        found: dict[str, Any] = {}
        for name in ("tokens", "hidden", "dtype"):
            given = getattr(self, name)
            found[name] = getattr(usual, name, None) if given is None else given
            if found[name] is None:
                raise ValueError(f"{name} is None, must be given where route is 'window'; a window "
                                 "is made before any tokens come")
        require_sizes(tokens=found["tokens"], hidden=found["hidden"])
        require_float("dtype", found["dtype"])
        require_bools(prob=self.prob)
        if self.sum not in ("choice", "rank"):
            raise ValueError(f"sum is {self.sum!r}, must be one of choice, rank")
        for name in ("x", "scales_major"):
            given = getattr(self, name)
            if not isinstance(given, str) and (name, given) != ("x", None):
                raise TypeError(f"{name} is {kind_of(given)}, must be a str")
            if given is not None and not re.fullmatch(r"[\w:+]+", given):
                raise ValueError(f"{name} is {given!r}, must be one word, such as "
                                 f"{'fp8_block' if name == 'x' else 'column'}")
        if not isinstance(self.layer, int):
            raise TypeError(f"layer is {kind_of(self.layer)}, must be an int")
        if not (isinstance(self.limit_s, (int, float)) and 0 <= self.limit_s <= _MOST_SECONDS):
            raise ValueError(f"limit_s is {self.limit_s!r}, must be a number of seconds, at most "
                             f"{_MOST_SECONDS}, 0 for no limit")
        return self._replace(**found)

    def problem(self, experts: int, top_k: int, ranks: int, rows: int, overflow: str) -> str:
        """As the library reads it."""
        return (f"expert_parallel T={self.tokens} top_k={top_k} H={self.hidden} E={experts} "
                f"ranks={ranks} R={rows} dtype={_NAMES[self.dtype]} "
                f"prob={'yes' if self.prob else 'no'} overflow={overflow} tail=zero "
                f"{'sum=rank ' if self.sum == 'rank' else ''}{self._format()}"
                f"layer={self.layer}")

    def _format(self) -> str:
        x = "" if self.x is None else f"x={self.x} "
        return x if self.scales_major == "row" else f"{x}scales_major={self.scales_major} "

    def device_for(self, problem: str) -> Tensor:
        """A tensor on the window's device. Errors: ValueError and NotImplementedError as the
        library says them of the problem there."""
        device = default_device(real=True) if self.device is None else self.device
        try:
            on = torch.empty(0, device=device)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ValueError(f"device is {str(device)!r}, must be the CPU, or a CUDA device that "
                             "is there") from error
        _ops._window_bytes(problem, on)
        return on

    def shared(self, group: "ProcessGroup", problem: str) -> "WindowRoute":
        """Through the window of `share`. Errors: ValueError where it is of other ranks, or too
        small."""
        window = self._window_of(self.share)
        if window.group is not group:
            raise ValueError(f"share is {self.share}, must be of the same group")
        route = WindowRoute(problem, window.on, window.exchange.window(), window.group, self)
        route.number, route.memory = window.number, window.memory
        return route

    @staticmethod
    def _window_of(share: Any) -> "WindowRoute":
        window: WindowRoute | None = getattr(share, "_window", None)
        if window is None:
            raise ValueError(f"share is {share}, must be an ExpertParallel with a window")
        return window


class ExchangeMap(NamedTuple):
    """Where the rows of a dispatch came from, and where their results go."""

    offsets: Tensor  # int32 [E + 1]
    row_of: Tensor  # int32 [t, top_k]: rank * R + row, pushed: the place; -1: dropped
    slot_of: Tensor  # int32 [R]
    row_here: Tensor  # int32 [P, T, top_k]
    verdict: Tensor  # int32 [1]: 1 if rows overflowed and that is an error
    place_of: Tensor  # int32 [R], or [0] where results are not pushed: where they go
    sum_of: Tensor  # int32 [t, P], or [0, P] where no rank sums its own rows: where the sums lie


def places_to_push_to(name: str, where: ExchangeMap | None) -> Tensor | None:
    """int32 [R], if the experts of that exchange push their results."""
    return where.place_of if where is not None and "push=yes" in name else None


def addresses_of(memory: Any) -> list[int]:
    """Of each rank's part. Errors: TypeError for what has no addresses; ValueError for those that
    no process has."""
    found = getattr(memory, "buffer_ptrs", memory)
    behind = getattr(memory, "offset", 0)  # of a tensor in its buffer
    if not (isinstance(found, (list, tuple)) and found
            and all(type(number) is int for number in (*found, behind))):
        raise TypeError(f"memory is {kind_of(memory)}, must be symmetric memory of torch, or a "
                        "list of addresses, one a rank")
    for address in (addresses := [each + behind for each in found]):
        if not 0 <= address < 2**63:
            raise ValueError(f"memory is at {address}, must be at addresses of this process")
    return addresses


class WindowRoute:
    """The exchanges of one layer through a window, which layers may share."""

    on: Tensor  # any, on the device of the window
    group: "ProcessGroup"
    options: WindowOptions
    exchange: Any
    rows: int  # R
    name: str
    inner_name: str  # of the same exchange within a layer
    pushed_name: str  # and where experts push their results; empty: they cannot
    fetches_since: str  # why they cannot; empty: they can
    number: int = 0  # by which ranks know it, of those of the group
    memory: Any = None  # of others, in which the window lies, kept so that nobody uses it anew

    def __init__(self, problem: str, on: Tensor, window: Any, group: "ProcessGroup",
                 options: WindowOptions) -> None:
        self.on, self.group, self.options = on, group, options
        self.exchange = _classes.Exchange(window, problem, on)
        self.name = self.exchange.name()
        self._inner = _classes.Exchange(window, problem.replace("tail=zero", "tail=keep"), on)
        self.inner_name = self._inner.name()
        self.pushed_name = ""
        self.rows = _sizes(self.name)["R"]
        self.fetches_since = self._why_fetched(problem)
        if not self.fetches_since:
            self._pushed = _classes.Exchange(
                window, problem.replace("tail=zero", "tail=keep push=yes"), on)
            self.pushed_name = self._pushed.name()

    def _why_fetched(self, problem: str) -> str:
        size = _sizes(self.name)
        choices = size["T"] * size["top_k"]
        reach = _ops._window_bytes(problem, self.on) * size["ranks"]
        if self.options.sum == "rank":
            return "each rank sums its rows, sum='rank'"
        if self.exchange.route() != "window":
            return "exchanges of few tokens fetch their rows"
        if choices > self.rows:
            return f"R is {self.rows}, fewer than tokens * top_k, {choices}"
        return f"the windows have {reach} bytes, more than 2^36" if reach > _MOST_REACH else ""

    @staticmethod
    def made(problem: str, on: Tensor, group: "ProcessGroup", options: WindowOptions,
             addresses: Sequence[int] = ()) -> "WindowRoute":
        """With a window of its own, which all ranks make, at addresses of theirs if any are given.
        """
        limit_ms = math.ceil(1000 * options.limit_s)
        maker = _classes.WindowMaker(problem, on, dist.get_rank(group), limit_ms, list(addresses))
        while (words := maker.ask()) is not None:
            said: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(said, words, group=group)
            maker.answer(said)
        return WindowRoute(problem, on, maker.window(), group, options)

    def holds(self, x: Tensor) -> bool:
        """Whether autograd would keep an x that lies here. Of compiled code nobody knows."""
        if type(x) is not Tensor or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        memory: Tensor = self.exchange.tokens()
        return 0 <= x.data_ptr() - memory.data_ptr() < memory.nbytes

    def bytes(self) -> int:
        """Of a rank's window, for this problem."""
        return int(_ops._window_bytes(self.exchange.name().partition(" ")[2], self.on))

    def name_within(self, can_push: CanPush) -> str:
        """Of the exchange of a layer that keeps its rows to itself: experts that can push their
        results, of so many rows, push them into the windows of all ranks."""
        pushes = self.pushed_name and can_push is not None and can_push(self.rows)
        return self.pushed_name if pushes else self.inner_name

    def dispatch(self, name: str, x: Tensor, experts: Tensor, prob: Tensor | None
                 ) -> tuple[Tensor, Tensor, Tensor, ExchangeMap]:
        """Rows, their probabilities, the rows routed to each rank int32 [P], and the map. name: of
        the exchange, or the inner one, whose rows have tails that nobody reads."""
        if self.options.x is not None:
            raise ValueError(f"x is a tensor, must be codes of {self.options.x}, as this was made "
                             "for; dispatch_codes takes them")
        self._require_prob(prob)
        rows, row_prob, routed, *parts = _ops._window_dispatch(name, x, experts, prob)
        return rows, row_prob, routed, ExchangeMap(*parts)

    def dispatch_codes(self, name: str, x: Quantized, experts: Tensor, prob: Tensor | None,
                       numbers: Tensor | None = None, decode: bool = False
                       ) -> tuple[Quantized, Tensor, Tensor, ExchangeMap, Tensor]:
        """The same of codes and scales; last the numbers of the rows, through which gradients of
        `numbers` go, that x has the codes of. decode: they are what the codes say; else nobody may
        read them."""
        self._require_prob(prob)
        codes, scales, row_prob, routed, *parts, row_numbers = _ops._window_dispatch_codes(
            name, x.codes, x.scales, experts, prob, numbers, decode)
        rows = Quantized(codes, scales, row_prob.new_empty(0))
        return rows, row_prob, routed, ExchangeMap(*parts), row_numbers

    def require_tokens(self, tokens: Any) -> None:
        """Errors: TypeError and ValueError unless so many have room."""
        if not isinstance(tokens, int) or isinstance(tokens, bool):
            raise TypeError(f"tokens is {kind_of(tokens)}, must be an int")
        most = _sizes(self.name)["T"]
        if not 0 <= tokens <= most:
            raise ValueError(f"tokens is {tokens}, must be 0 to T, {most}, those of the window")

    def _require_prob(self, prob: Tensor | None) -> None:
        if (prob is not None) != self.options.prob:
            given, must = ("None", "a tensor") if prob is None else ("a tensor", "None")
            raise ValueError(f"prob is {given}, must be {must}; prob={self.options.prob} when this "
                             "was made")

    def collect(self, name: str, y: Tensor, where: ExchangeMap) -> Tensor:
        """Sums of the rows of each token."""
        out: Tensor = _ops._window_collect(name, y, *where)
        return out


# What torch.compile is told. A torch without ordered effects breaks its graph at an exchange.

_EXCHANGES = ("_window_dispatch", "_window_dispatch_codes", "_window_dispatch_backward",
              "_window_collect", "_window_collect_backward")
COMPILES = hasattr(torch.library, "_register_effectful_op")
if COMPILES:
    from torch._library.effects import EffectType
    for _name in _EXCHANGES:
        torch.library._register_effectful_op(f"cadre::{_name}", EffectType.ORDERED)
else:
    for _method in ("dispatch", "dispatch_codes", "collect"):
        setattr(WindowRoute, _method, torch.compiler.disable(getattr(WindowRoute, _method)))


def saved_exchanges() -> tuple[ContextManager[Any], ContextManager[Any]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False,
    context_fn=cadre.saved_exchanges)`: what exchanges by the route window gave is kept for
    backward, so that no rank makes them again. A checkpoint within compiled code must have it."""
    kept = [getattr(_ops, name).default for name in _EXCHANGES]
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(kept)
    return contexts


# Fake kernels. The problem is in the name of the exchange.


def _sizes(name: str) -> dict[str, int]:
    words = (word.partition("=") for word in name.split()[2:])
    return {key: int(value) for key, _, value in words if value.isdigit()}


def _ints(like: Tensor, *shape: Any) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _floats(like: Tensor, *shape: Any) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


@register_fake("_window_dispatch")
def _fake_dispatch(name, x, experts, prob):
    size = _sizes(name)
    rows, top_k = size["R"], size["top_k"]
    return (x.new_empty((rows, size["H"])), _floats(x, 0 if prob is None else rows),
            _ints(x, size["ranks"]), _ints(x, size["E"] + 1), _ints(x, x.shape[0], top_k),
            _ints(x, rows), _ints(x, size["ranks"], size["T"], top_k), _ints(x, 1),
            _ints(x, rows if "push=yes" in name else 0),
            _ints(x, x.shape[0] if "sum=rank" in name else 0, size["ranks"]))


@register_fake("_window_dispatch_codes")
def _fake_dispatch_codes(name, x, x_scales, experts, prob, numbers=None, decode=False):
    codes, *others = _fake_dispatch(name, x, experts, prob)
    rows, blocks = codes.shape[0], x_scales.shape[1]
    if "scales_major=column" in name:
        scales = x_scales.new_empty((blocks, rows + -rows % 4))[:, :rows].t()
    else:
        scales = x_scales.new_empty((rows, blocks))
    if numbers is None:
        return codes, scales, *others, _floats(x, 0)
    return codes, scales, *others, numbers.new_empty(tuple(codes.shape))


@register_fake("_window_dispatch_backward")
def _fake_dispatch_backward(name, drows, drow_prob, offsets, row_of, slot_of, row_here,
                            verdict, place_of, sum_of, wants_dx=True, wants_dprob=True):
    dprob = _floats(drows, 0) if drow_prob is None else _floats(drows, *row_of.shape)
    return drows.new_empty((row_of.shape[0], drows.shape[1])), dprob


@register_fake("_window_collect")
def _fake_collect(name, y, offsets, row_of, slot_of, row_here, verdict, place_of, sum_of):
    return y.new_empty((row_of.shape[0], y.shape[1]))


@register_fake("_window_collect_backward")
def _fake_collect_backward(name, dout, offsets, row_of, slot_of, row_here, verdict, place_of,
                           sum_of):
    return dout.new_empty((slot_of.shape[0], dout.shape[1]))
