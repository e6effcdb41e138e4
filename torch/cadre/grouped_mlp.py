"""The expert MLP: linear, activation, linear for the rows of every expert."""

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils._python_dispatch import _disable_current_modes

from .counts import Counts, offsets_of
from .deferral import DeferredGradients, Memory
from .devices import default_device
from .dtypes import (
    contiguous, kind_of, require_bools, require_factor, require_float, require_rows, require_sizes)
from .expert_state import MarkedExperts
from .local_weights import draw, local, require_plain
from .operations import combine, offsets_of_routing, permute, routing
from .recipe import active_recipe, is_plain, recipe_text, words_for
from .rows_again import RowsAgain

GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
UNGATED = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
LAYOUTS = ("concat", "interleave1", "interleave32")


def is_gated(activation: str) -> bool:
    """True if the activation takes a gate and an up column for each feature.

    activation: a name, or a name with constants: "clamped_swiglu limit=7 alpha=1.702 offset=1".

    Errors: ValueError for a name that is not in the list; TypeError for what is no word.
    """
    if not isinstance(activation, str):
        raise TypeError(f"activation is {kind_of(activation)}, must be words")
    name = (activation.split() or [""])[0]
    if name not in GATED + UNGATED:
        raise ValueError(f"activation is {name!r}, must be one of {', '.join(GATED + UNGATED)}")
    return name in GATED


def activation_text(activation: str, layout: str, features: int = 32) -> str:
    """The words that torch.ops.cadre takes, for F features.

    Errors: ValueError for an unknown name, constant or layout, for a layout without a gate, and for
    features that a layout does not divide; TypeError for what is no word.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, must be one of {', '.join(LAYOUTS)}")
    gated = is_gated(activation)
    if layout != "concat" and not gated:
        raise ValueError(f"layout is {layout!r}, must be 'concat'; {activation} has no gate")
    constant = re.search(r"\b(limit|alpha|offset)=", activation)
    if constant and not activation.startswith("clamped"):
        raise ValueError(f"activation is {activation!r}, must be without {constant[1]}; only "
                         "clamped_swiglu has constants")
    words = activation if layout == "concat" else f"{activation} layout={layout}"
    complaint = _complaint(words, features * (2 if gated else 1))
    if complaint:
        raise ValueError(f"activation is {words!r}, must be words of an activation of {features} "
                         f"features; {complaint}")
    return words


@functools.lru_cache(maxsize=256)
def _complaint(words: str, columns: int) -> str:
    """What the library says of words that are no activation; "" of those that are."""
    try:
        with _disable_current_modes():  # fake tensors know less, and this is kept
            torch.ops.cadre.activation(
                torch.empty(0, columns, dtype=torch.float32, device="cpu"),
                torch.zeros(2, dtype=torch.int32, device="cpu"), None, words)
    except ValueError as error:
        return re.sub(r"^(problem|activation): | \[.*", "", str(error))
    return ""


def draw_small(weight: Tensor) -> None:
    weight.normal_(0.0, 0.02)


class TokenChoice:
    """How tokens choose their experts: what `MoE` calls its experts with in place of counts. It is
    no tuple or dataclass, since wrappers of modules cast the tensors of those."""

    logits: Tensor  # [T, E]
    expert_bias: Tensor | None  # fp32 [E]
    top_k: int
    routing: str  # "sigmoid normalize=yes", as torch.ops.cadre.moe has it
    keep_rows: bool
    shared1: Tensor | None  # the weights of a shared expert: [2F, H] and [H, F]
    shared2: Tensor | None
    shared_gate: Tensor | None  # fp32 [T], the factor of its result

    def __init__(self, logits: Tensor, expert_bias: Tensor | None, top_k: int, routing: str,
                 keep_rows: bool, shared1: Tensor | None = None,
                 shared2: Tensor | None = None, shared_gate: Tensor | None = None) -> None:
        self.logits, self.expert_bias = logits, expert_bias
        self.top_k, self.routing, self.keep_rows = top_k, routing, keep_rows
        self.shared1, self.shared2, self.shared_gate = shared1, shared2, shared_gate


class RowCodes(NamedTuple):
    """Rows that come as codes and scales along K, for the first product."""

    codes: Tensor  # [R, H]
    scales: Tensor  # [R, H / block]
    numbers: Tensor  # [R, H]: for the product of dw1, what the codes say; gradients go through it
    version: int | None  # of the numbers as they came, where tensors count their changes

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, numbers: Tensor) -> "RowCodes":
        return cls(codes, scales, numbers, version_of(numbers))

    def require_beside(self, x: Tensor) -> None:
        """Errors: ValueError unless x is what the codes came with, as it came."""
        if x.untyped_storage()._cdata != self.numbers.untyped_storage()._cdata:
            raise ValueError("x is a tensor of its own, must be what came with its codes; ep "
                             "moves codes, which the first product reads instead of x")
        if self.version != version_of(self.numbers):
            raise ValueError("x was changed, must be what came with its codes; ep moves codes, "
                             "which the first product reads instead of x")


def version_of(tensor: Tensor) -> int | None:
    """How often it was changed in place; None where torch does not count that."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def require_together(format: str, fuse_wgrad_accumulation: bool, delay_wgrad_compute: bool) -> None:
    """Errors: ValueError where a layer whose rows come in codes cannot be one operator."""
    if fuse_wgrad_accumulation or delay_wgrad_compute:
        raise ValueError(f"ep moves codes of {format}, must move numbers with "
                         "fuse_wgrad_accumulation or delay_wgrad_compute")


class RankRows:
    """Whose rows the experts of `MoE` have where these come from other ranks: what it calls them
    with in place of counts. By a window, results go into the one from which the exchange sends them
    back, and the tails of rows, results and gradients are neither read nor written. No tuple
    either, so that FSDP2 looks for nothing to cast in it."""

    offsets: Tensor  # int32 [E + 1]
    window: str  # the name of the exchange; empty: results go into no window
    again: RowsAgain | None  # they are not kept for backward
    place_of: Tensor | None  # int32 [R], of a window to whose places results are pushed
    codes: RowCodes | None  # what comes with x
    prob: Tensor | None  # fp32 [R], as it was before FSDP2 cast what a module is given

    def __init__(self, offsets: Tensor, window: str, again: RowsAgain | None,
                 place_of: Tensor | None, codes: RowCodes | None, prob: Tensor | None = None
                 ) -> None:
        self.offsets, self.window, self.again, self.place_of = offsets, window, again, place_of
        self.codes, self.prob = codes, prob

    def uncast(self, factor: Tensor | None) -> Tensor | None:
        """Either factor of rows, which both are `prob`, in fp32."""
        is_cast = factor is not None and self.prob is not None and (
            factor.dtype != self.prob.dtype)
        return self.prob if is_cast else factor


@functools.lru_cache(maxsize=256)
def _can_push(*of_mlp: Any) -> bool:
    can: bool = torch.ops.cadre._grouped_mlp_scatters(*of_mlp)
    return can


def _is_of_fsdp(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


def _all_are_watched() -> bool:
    """Whether somebody may see what any module is given and gives."""
    return (module._has_any_global_hook() or torch._C._len_torch_dispatch_stack() > 0
            or torch.is_anomaly_enabled())


class MixedTokens(NamedTuple):
    """What experts make of tokens that choose."""

    out: Tensor  # [T, H], the sums over their experts
    experts: Tensor  # int32 [T, top_k]
    prob: Tensor  # fp32 [T, top_k]
    scores: Tensor  # fp32 [T, E]
    offsets: Tensor  # int32 [E + 1]


class GroupedMLP(MarkedExperts, DeferredGradients):
    """y[r] = (act(x[r] w1_e^T + bias1_e) * prob[r]) w2_e^T + bias2_e [* bias2_scale[r]] for the
    rows r of every expert e, as one operator.

    num_experts: E. hidden: H. features: F, the columns after the activation.
    activation: swiglu, geglu, geglu_tanh, reglu, clamped_swiglu (gated), silu, gelu, gelu_tanh,
        relu, relu_squared; constants as words: "clamped_swiglu limit=7 alpha=1.702 offset=1".
    layout: how gate and up share the 2F columns: "concat" (gates first), "interleave1" (gate, up,
        gate, up, ...), "interleave32" (blocks of 32).
    device: None: that of `with torch.device(...)` or `torch.set_default_device`, else CUDA if there
        is one, else the CPU. "meta" leaves memory and values to
        `to_empty(device=...)` and `reset_parameters`.
    dtype: f32, bf16 or f16; None: torch's default.
    keep_h: keep the activation's result for backward instead of computing it again.
    recipe: of this layer, whatever the context says; see `cadre.autocast`.
    fuse_wgrad_accumulation, delay_wgrad_compute: add the gradients of w1 and w2 into their
        `main_grad`, leave them to `backward_dw`: as `cadre.GroupedLinear`. The layer is then two
        linears and an activation, with the same bits but for stochastic rounding.

    Parameters: w1 [E, 2F, H] (ungated [E, F, H]), w2 [E, H, F]; with bias=True bias1 [E, 2F],
    bias2 [E, H].

    Errors: ValueError for sizes, and for what is not in these lists; TypeError for dtype.
    """

    num_experts: int
    hidden: int
    features: int
    columns: int
    activation: str
    fuse_wgrad_accumulation: bool
    recipe: str | None
    w1: nn.Parameter
    w2: nn.Parameter
    bias1: nn.Parameter | None
    bias2: nn.Parameter | None

    def __init__(self, num_experts: int, hidden: int, features: int, *,
                 activation: str = "swiglu", layout: str = "concat", bias: bool = False,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None,
                 keep_h: bool = False, recipe: Any = None, fuse_wgrad_accumulation: bool = False,
                 delay_wgrad_compute: bool = False) -> None:
        super().__init__()
        require_sizes(num_experts=num_experts, hidden=hidden, features=features)
        require_bools(bias=bias, keep_h=keep_h, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                      delay_wgrad_compute=delay_wgrad_compute)
        require_float("dtype", dtype or torch.get_default_dtype())
        self.num_experts, self.hidden, self.features = num_experts, hidden, features
        self.columns = features * (2 if is_gated(activation) else 1)
        self.activation = activation_text(activation, layout, features)
        self.keep_h = keep_h
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self._memory1, self._memory2 = Memory(), Memory()
        self.recipe = None if recipe is None else recipe_text(recipe)
        device = default_device() if device is None else device
        shapes = {"w1": (num_experts, self.columns, hidden), "w2": (num_experts, hidden, features),
                  "bias1": (num_experts, self.columns), "bias2": (num_experts, hidden)}
        for name, shape in shapes.items():
            wanted = bias or name.startswith("w")
            self.register_parameter(name, nn.Parameter(
                torch.empty(shape, device=device, dtype=dtype)) if wanted else None)
        if not self.w1.is_meta:
            self.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._memory1, self._memory2 = Memory(), Memory()  # of a shallow copy, too

    def _memories(self) -> Sequence[Memory]:
        return self._memory2, self._memory1

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights of deviation 0.02, one expert after the other; biases zero."""
        draw(self.w1, draw_small)
        draw(self.w2, draw_small)
        for bias in (self.bias1, self.bias2):
            if bias is not None:
                bias.zero_()

    @overload
    def forward(self, x: Tensor, counts: Counts | RankRows, prob: Tensor | None = None,
                bias2_scale: Tensor | None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, counts: TokenChoice) -> MixedTokens: ...

    def forward(self, x: Tensor, counts: Counts | RankRows | TokenChoice,
                prob: Tensor | None = None, bias2_scale: Tensor | None = None
                ) -> Tensor | MixedTokens:
        """y [..., H] for x [..., H], whose leading dimensions are R rows in expert order.

        counts: rows of each expert: E ints, a tensor [E] of any integer type on the host or the
            device, or `cadre.Offsets`. Rows beyond their sum are the tail: not read, zero in y.
        prob: fp32 [R], a factor of each row after the activation.
        bias2_scale: fp32 [R], a factor of bias2 in each row.

        Errors: ValueError and TypeError for what does not fit, before anything is launched;
        NotImplementedError, with the reasons, for a recipe that the device does not have.
        """
        require_rows("x", x)
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {list(x.shape)}, must be [..., {self.hidden}]; hidden "
                             "is its last dimension")
        if isinstance(counts, RankRows):
            prob, bias2_scale = counts.uncast(prob), counts.uncast(bias2_scale)
        require_factor("prob", prob)
        require_factor("bias2_scale", bias2_scale)
        if bias2_scale is not None and self.bias2 is None:
            raise ValueError("bias2_scale is given, must be left out; the layer has bias=False")
        if isinstance(counts, TokenChoice):
            for name, given in (("prob", prob), ("bias2_scale", bias2_scale)):
                if given is not None:
                    raise ValueError(f"{name} is given, must be left out; the probabilities of a "
                                     "TokenChoice are its own")
        prob, bias2_scale = contiguous(prob), contiguous(bias2_scale)
        rows = x.reshape(-1, self.hidden)
        w1, bias1, w2, bias2 = self.operands()
        weights = ([w1], [] if bias1 is None else [bias1], [w2], [] if bias2 is None else [bias2])
        recipe = self._words_for(x)
        apart = self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        if isinstance(counts, TokenChoice):
            choice = counts
            if apart:
                return self._mixed(rows, choice, recipe)
            *made, _ = torch.ops.cadre.moe(
                rows, choice.logits, choice.top_k, choice.expert_bias, *weights,
                shared_weight1=choice.shared1, shared_weight2=choice.shared2,
                shared_gate=choice.shared_gate, routing=choice.routing,
                activation=self.activation, recipe=recipe, keep_h=self.keep_h,
                keep_rows=choice.keep_rows)
            return MixedTokens(*made)
        again, window, place_of, codes = None, "", None, None
        if isinstance(counts, RankRows):
            offsets, window, again = counts.offsets, counts.window, counts.again
            place_of, codes = counts.place_of, counts.codes
        else:
            offsets = offsets_of(counts, self.num_experts, rows, "counts")
        if apart:
            return self._apart(rows, offsets, prob, bias2_scale, recipe).view(x.shape)
        options = dict(activation=self.activation, keep_h=self.keep_h, recipe=recipe, window=window,
                       place_of=place_of)
        if codes is not None:
            if not torch.compiler.is_compiling():
                codes.require_beside(x)
            options |= dict(x_codes=codes.codes, x_scales=codes.scales)
        if again is not None and is_plain(recipe, rows):
            y = again.mlp(rows, offsets, prob, [w1, bias1, w2, bias2], bias2_scale, options)
        else:
            y, _ = torch.ops.cadre.grouped_mlp(rows, offsets, prob, *weights, bias2_scale,
                                               **options)
        return y if x.dim() == 2 else y.view(x.shape)

    def operands(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """w1, bias1, w2 and bias2, as this rank multiplies with them; None for what is not there.
        """
        w1, bias1, w2, bias2 = self.w1, self.bias1, self.w2, self.bias2
        if type(w1) is type(w2) is nn.Parameter and not torch.compiler.is_compiling():
            return w1, bias1, w2, bias2
        return local("w1", w1), local("bias1", bias1), local("w2", w2), local("bias2", bias2)

    def _words_for(self, x: Tensor) -> str:
        """Of the recipe, "" for that of the type of x."""
        return words_for(active_recipe() if self.recipe is None else self.recipe, x)

    def _is_other(self) -> bool:
        """Whether its forward is not the one of this class."""
        return (type(self).forward is not GroupedMLP.forward or "forward" in vars(self)
                or self._compiled_call_impl is not None)

    def _hooks(self) -> list[Any]:
        return [*self._forward_hooks.values(), *self._forward_pre_hooks.values(),
                *self._backward_hooks.values(), *self._backward_pre_hooks.values()]

    def _is_watched(self) -> bool:
        """Whether somebody else may see what it is given and gives, and keep it."""
        return bool(self._is_other() or self._hooks() or _all_are_watched())

    def _is_read(self) -> bool:
        """The same of those who look at the rows it is given. FSDP2's hooks do not: they gather
        parameters and may cast rows."""
        if torch.compiler.is_compiling():
            return self._is_other() or bool(self._hooks())
        return bool(self._is_other() or not all(_is_of_fsdp(hook) for hook in self._hooks())
                    or _all_are_watched())

    def _can_push(self, like: Tensor, ranks: int, in_codes: bool, rows: int) -> bool:
        """Whether results can leave for the ranks of their tokens while they are computed: nobody
        else may want to see them, and what they go to must come behind them, which a checkpoint may
        have kept."""
        if self._is_watched() or self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            return False
        if any(w.data_ptr() % 16 for w in (self.w1, self.w2)):
            return False
        casts = torch.is_autocast_enabled(like.device.type)
        weight_dtype = torch.get_autocast_dtype(like.device.type) if casts else self.w1.dtype
        return _can_push(rows, self.hidden, self.features, self.num_experts, ranks, like.dtype,
                         weight_dtype, (self.bias1 is not None, self.bias2 is not None),
                         self.activation, self._words_for(like), in_codes, str(like.device))

    def _mixed(self, tokens: Tensor, choice: TokenChoice, recipe: str) -> MixedTokens:
        score, *words = choice.routing.split()
        options = dict(word.split("=") for word in words)
        chosen = routing(choice.logits, choice.top_k, score, options["normalize"] == "yes",
                         float(options["scale"]), choice.expert_bias, int(options["groups"]),
                         int(options["group_top_k"]))
        where = offsets_of_routing(chosen.experts, self.num_experts, chosen.experts.numel())
        rows, prob = permute(tokens, where, prob=chosen.prob)
        y = self._apart(rows, where.offsets, prob, None if self.bias2 is None else prob, recipe)
        return MixedTokens(combine(y, where), *chosen, where.offsets)

    @torch.compiler.disable(reason="main_grad and deferred gradients are no part of a graph")
    def _apart(self, rows: Tensor, offsets: Tensor, prob: Tensor | None,
               bias2_scale: Tensor | None, recipe: str) -> Tensor:
        """As two linears and an activation: what autograd alone does not do is theirs."""
        for name in ("w1", "w2"):
            require_plain(name, getattr(self, name))
        if self._defers_grad():
            self._require_own_gradients((self.w1, self.w2), ("w1", "w2"))

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
                   memory: Memory) -> Tensor:
            return torch.ops.cadre._linear_step(
                x, offsets, False, [weight], [] if bias is None else [bias], scale, recipe, False,
                None, self.fuse_wgrad_accumulation, self.delay_wgrad_compute, None, None, None,
                memory.handle if self.delay_wgrad_compute else None)

        z = linear(rows, self.w1, self.bias1, None, self._memory1)
        h = torch.ops.cadre.activation(z, offsets, prob, self.activation)
        return linear(h, self.w2, self.bias2, bias2_scale, self._memory2)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return (f"{self.num_experts}, hidden={self.hidden}, features={self.features}, "
                f"activation={self.activation!r}, bias={self.bias1 is not None}")
