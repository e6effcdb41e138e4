"""A whole mixture-of-experts layer: the router, and the experts that tokens choose by it."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import _register_namedtuple

from . import expert_state
from .collective import process_group
from .counts import offsets_of_all_rows
from .dtypes import (
    kind_of, require_bools, require_float, require_rows, require_sizes, working_dtype)
from .expert_parallel import ExpertParallel
from .fakes import require_one_device
from .grouped_mlp import (
    GroupedMLP, RankRows, TokenChoice, activation_text, draw_small, require_together)
from .local_weights import draw, local
from .moved_codes import format_of, require_readers, sent
from .operations import routing
from .recipe import UNSEEN
from .router import tokens_and_logits
from .rows_again import RowsAgain
from .shared_experts import (
    GivenExpert, OwnExpert, can_be_given, can_be_own, run_beside)
from .side_stream import has_sides, joined_on_error
from .windows import places_to_push_to

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class RouterOutput(NamedTuple):
    """What a router decided, for losses and statistics. T is the number of tokens."""

    logits: Tensor  # fp32 [T, E]
    scores: Tensor  # fp32 [T, E], of all experts
    experts: Tensor  # int32 [T, top_k]
    prob: Tensor  # fp32 [T, top_k]
    tokens_per_expert: Tensor  # int32 [E], on the device

    def load_balancing_loss(self) -> Tensor:
        """See `load_balancing_loss`."""
        return load_balancing_loss(self.scores, self.tokens_per_expert)


_register_namedtuple(RouterOutput, serialized_type_name="cadre.RouterOutput")  # torch.export.save


def load_balancing_loss(scores: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """E * sum_e share_e * score_e, fp32 scalar: share_e is expert e's part of all choices, score_e
    the mean over tokens of its part of the token's scores. It is 1 where all experts are chosen
    alike, E where all tokens choose one. Its gradient goes through the scores.

    scores: [T, E], 0 or more. tokens_per_expert: [E], any integer type. Nothing waits for the
    device. Errors: ValueError for other shapes.
    """
    for name, given in (("scores", scores), ("tokens_per_expert", tokens_per_expert)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} is {kind_of(given)}, must be a tensor")
    require_one_device({"scores": scores, "tokens_per_expert": tokens_per_expert})
    if not torch.compiler.is_compiling() and getattr(scores, UNSEEN, False) and (
            torch.is_grad_enabled()):
        raise ValueError("scores are of a reentrant checkpoint, which gives them no gradient, must "
                         "be of one with use_reentrant=False; or compute the loss inside")
    if scores.dim() != 2 or tokens_per_expert.shape != scores.shape[1:]:
        raise ValueError(f"scores and tokens_per_expert have shapes {list(scores.shape)} and "
                         f"{list(tokens_per_expert.shape)}, must be [T, E] and [E]")
    chosen, scores = tokens_per_expert.float(), scores.float()
    share = chosen / chosen.sum().clamp(min=1)
    part = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    return scores.shape[-1] * (share * part.sum(0) / max(scores.shape[0], 1)).sum()


class MoE(nn.Module):
    """out[t] = sum over the top_k experts e of token t of prob[t, e] * MLP_e(x[t])
    [+ gate(x[t]) * MLP_shared(x[t])] [+ shared_expert(x[t])].

    The router is one matrix [E, H], made in fp32, and makes fp32 logits, also under torch.autocast:
    of bf16 tokens by products in bf16, for which an fp32 matrix is split in three bf16 parts;
    `router_logits` in router.py has the bound. No token is dropped. A biased expert's second bias
    is weighted like the rest of its result. For backward it keeps x, the routing and what the
    experts keep, and permutes x again, unless the product of dw gathers it.

    num_experts: E. hidden: H. features: F of each expert. top_k: experts of a token.
    score: "softmax" over all experts, "topk_softmax" over the chosen, or "sigmoid".
    normalize: divide the chosen probabilities by their sum. scale: their factor after that.
    expert_bias: keep a buffer `expert_bias` fp32 [E] that is added to the scores for the choice
        only; trainers move it to balance the load. It stays fp32 whatever the module is converted
        to, since bf16 would not feel their small steps.
    groups, group_top_k: experts come in equal groups, and only those of group_top_k groups may be
        chosen by a token.
    activation, layout, bias, device, dtype, recipe, keep_h, fuse_wgrad_accumulation,
    delay_wgrad_compute: of the experts, see `GroupedMLP`. `recipe` may be set later, too.
    fp32_router: multiply bf16 tokens with the router in fp32 all the same, which takes longer and
        keeps them in fp32.
    keep_rows: keep x in the order of the experts too, top_k times, so that backward need not
        permute it again; of recipes that quantise it for dw their codes.
    shared_features: F of an expert that every token visits, with the activation and layout of the
        others and no bias; 0: none. Its result joins the sums as they are written. Parameters
        shared_w1 [2F, H] (ungated [F, H]), shared_w2 [H, F].
    shared_gate: weigh its result by sigmoid(x shared_gate^T), a parameter [1, H].
    shared_expert: any other module [..., H] -> [..., H] that every token visits.
    overlap_shared: with ep on GPUs, run shared experts on a second stream, beside the exchange and
        the other experts; docs/layers/expert_parallel.md says when. False: behind them, as on CPUs
        and in compiled code. The bits are the same. A `shared_expert` that changes x, or takes part
        in an exchange of its own, wants False.
    dispatch_again: with ep, keep no rows [R, H] for dw of the experts, but send tokens again in
        backward: one exchange more. Code that is compiled, and recipes that quantise, keep what
        they keep otherwise.
    push: with ep by the route window, whether the experts write their results into the windows of
        all ranks while they compute them. None: where they can. True: a forward raises RuntimeError
        where they cannot, as compiled code cannot. The same on all ranks.
    ep: an `ExpertParallel`, or the group or DeviceMesh of one, whose P ranks have num_experts / P
        experts each, rank p those from p * num_experts / P on; of a group or a mesh it takes all
        rows that come. Tokens are this rank's, and so is what the router decides of them. Made with
        x=, it moves them as codes, which the recipe must read as x. docs/layers/expert_parallel.md
        has training and states.
    """

    hidden: int
    num_experts: int
    routing: dict[str, Any]
    fp32_router: bool
    keep_rows: bool
    overlap_shared: bool
    dispatch_again: bool
    push: bool | None
    ep: ExpertParallel | None
    experts: GroupedMLP
    router: nn.Parameter
    expert_bias: Tensor | None
    shared_features: int
    shared_w1: nn.Parameter | None
    shared_w2: nn.Parameter | None
    shared_gate: nn.Parameter | None

    def __init__(self, num_experts: int, hidden: int, features: int, *, top_k: int,
                 score: str = "softmax", normalize: bool = False, scale: float = 1.0,
                 expert_bias: bool = False, groups: int = 1, group_top_k: int = 1,
                 fp32_router: bool = False, keep_rows: bool = False,
                 shared_features: int = 0, shared_gate: bool = False,
                 shared_expert: nn.Module | None = None, overlap_shared: bool = True,
                 ep: "ExpertParallel | ProcessGroup | DeviceMesh | None" = None,
                 dispatch_again: bool = False, push: bool | None = None,
                 activation: str = "swiglu", layout: str = "concat", bias: bool = False,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None,
                 keep_h: bool = False, recipe: Any = None, fuse_wgrad_accumulation: bool = False,
                 delay_wgrad_compute: bool = False) -> None:
        super().__init__()
        require_sizes(num_experts=num_experts, hidden=hidden, features=features, top_k=top_k,
                      groups=groups, group_top_k=group_top_k)
        require_bools(normalize=normalize, expert_bias=expert_bias, fp32_router=fp32_router,
                      keep_rows=keep_rows, shared_gate=shared_gate, overlap_shared=overlap_shared,
                      dispatch_again=dispatch_again)
        if top_k > num_experts:
            raise ValueError(f"top_k is {top_k}, must be 1 to num_experts, {num_experts}")
        self.hidden, self.num_experts = hidden, num_experts
        self.routing = {"top_k": top_k, "score": score, "normalize": normalize, "scale": scale,
                        "groups": groups, "group_top_k": group_top_k}
        self.fp32_router, self.keep_rows = fp32_router, keep_rows
        self.overlap_shared, self.dispatch_again = overlap_shared, dispatch_again
        if dispatch_again and (ep is None or fuse_wgrad_accumulation or delay_wgrad_compute):
            raise ValueError("dispatch_again is True, must be False without ep, and with "
                             "fuse_wgrad_accumulation or delay_wgrad_compute")
        self._check_routing()
        if not isinstance(shared_expert, nn.Module | None):
            raise TypeError(f"shared_expert is {kind_of(shared_expert)}, must be a module "
                            "or None")
        self.ep = parallel_of(ep, num_experts, top_k)
        if (format := format_of(self.ep)) is not None:
            require_together(format, fuse_wgrad_accumulation, delay_wgrad_compute)
        self.push = push
        self._check_push()
        own_experts = num_experts if self.ep is None else self.ep.experts
        self.experts = GroupedMLP(
            own_experts, hidden, features, activation=activation, layout=layout, bias=bias,
            device=device, dtype=dtype, keep_h=keep_h, recipe=recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute)
        if self.ep is not None:
            expert_state.mark(self.experts)
            expert_state.keep_whole_parameters(self.experts, self.ep)
        device = self.experts.w1.device
        self.router = nn.Parameter(torch.empty(num_experts, hidden, device=device,
                                               dtype=torch.float32))
        self.register_buffer("expert_bias",
                             torch.empty(num_experts, dtype=torch.float32, device=device)
                             if expert_bias else None)
        self._make_shared(shared_features, shared_gate)
        self.shared_expert = shared_expert
        if not self.router.is_meta:
            self._reset_router()
            self._reset_shared()
            if self.ep is not None:
                self._reset_own_experts(self.ep.rank)

    def _check_push(self) -> None:
        if not isinstance(self.push, bool | None):
            raise TypeError(f"push is {kind_of(self.push)}, must be a bool or None")
        window = None if self.ep is None else self.ep._window
        if self.push is not None and window is None:
            raise ValueError(f"push is {self.push}, must be None without ep by the route window")
        if self.push and window is not None and window.fetches_since:
            raise ValueError(f"push is True, must be None or False; {window.fetches_since}")

    def _make_shared(self, features: int, gate: bool) -> None:
        """The parameters of the shared expert, or None where there is none."""
        if features != 0:
            require_sizes(shared_features=features)
            activation_text(self.experts.activation, "concat", features)
        own = self.experts
        if features and (own.fuse_wgrad_accumulation or own.delay_wgrad_compute):
            raise ValueError(f"shared_features is {features}, must be 0 with "
                             "fuse_wgrad_accumulation or delay_wgrad_compute; give shared_expert a "
                             "module that has them")
        if gate and not features:
            raise ValueError("shared_gate is True, must be False; shared_features is 0")
        self.shared_features = features
        columns = own.columns // own.features * features
        shapes = {"shared_w1": (columns, self.hidden), "shared_w2": (self.hidden, features),
                  "shared_gate": (1, self.hidden)}
        for name, shape in shapes.items():
            wanted = gate if name == "shared_gate" else features > 0
            self.register_parameter(name, nn.Parameter(own.w1.new_empty(shape)) if wanted else None)

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        top_k: int = self.routing["top_k"]
        return top_k

    @property
    def recipe(self) -> Any:
        """Of the experts, whatever the context says, as `GroupedMLP.recipe`; None: the context's.
        """
        return self._own_mlp().recipe

    @recipe.setter
    def recipe(self, recipe: Any) -> None:
        self._own_mlp().recipe = recipe

    def _own_mlp(self) -> Any:
        """The experts, whatever was put around them."""
        return next((part for part in self.experts.modules() if isinstance(part, GroupedMLP)),
                    self.experts)

    def _check_routing(self) -> None:
        """Errors: ValueError for words and numbers that do not fit, as from `routing`."""
        for name, kind, words in (("score", str, "a str"), ("scale", (int, float), "a number")):
            given = self.routing[name]
            if not isinstance(given, kind) or isinstance(given, bool):
                raise TypeError(f"{name} is {kind_of(given)}, must be {words}")
        routing(torch.empty(0, self.num_experts, dtype=torch.float32, device="cpu"), **self.routing)

    def reset_parameters(self) -> None:
        """New weights of router and experts; a module `shared_expert` is left as it is."""
        self._reset_router()
        self._reset_shared()
        if self.ep is None:
            self.experts.reset_parameters()
        else:
            self._reset_own_experts(self.ep.rank)

    @torch.no_grad()
    def _reset_router(self) -> None:
        draw(self.router, draw_small)
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    @torch.no_grad()
    def _reset_shared(self) -> None:
        for parameter in (self.shared_w1, self.shared_w2, self.shared_gate):
            if parameter is not None:
                draw(parameter, draw_small)

    def _reset_own_experts(self, rank: int) -> None:
        """Other numbers on each rank, also where all of them seed alike. Other devices' generators
        are left alone, which torch.manual_seed would seed too."""
        seed = int(torch.randint(2**62, (), device="cpu"))
        on = self.experts.w1.device
        on_gpu = on.type == "cuda"
        with torch.random.fork_rng([on] if on_gpu else []):
            generator = (torch.cuda.default_generators[on.index] if on_gpu
                         else torch.default_generator)
            generator.manual_seed(seed + rank)
            self.experts.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoE":
        """`to`, `bfloat16` and the like, which leave expert_bias in fp32."""
        exact = self.expert_bias
        super()._apply(fn, recurse)
        if exact is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()  # with assign=True it is what was loaded

    def _choice(self, tokens: Tensor) -> tuple[Tensor, TokenChoice]:
        """The tokens, as whatever reads them beside the router is to be given them, and what they
        choose their experts by."""
        router = local("router", self.router)
        require_one_device({"x": tokens, "router": router})
        require_float("router", router.dtype)
        if tuple(router.shape) != (self.num_experts, self.hidden):
            raise ValueError(f"router has shape {list(router.shape)}, must be "
                             f"{[self.num_experts, self.hidden]}: a row for each expert")
        options = self.routing
        words = (f"{options['score']} normalize={'yes' if options['normalize'] else 'no'} "
                 f"scale={float(options['scale'])} groups={options['groups']} "
                 f"group_top_k={options['group_top_k']}")
        tokens, logits = tokens_and_logits(tokens, router, self.fp32_router)
        return tokens, TokenChoice(
            logits, self.expert_bias, self.top_k, words, self.keep_rows,
            local("shared_w1", self.shared_w1), local("shared_w2", self.shared_w2),
            self._gate(tokens))

    def _gate(self, tokens: Tensor) -> Tensor | None:
        """The factor fp32 [T] of the shared expert's result."""
        if self.shared_gate is None:
            return None
        dtype = working_dtype(tokens)
        gate = local("shared_gate", self.shared_gate)
        return linear(tokens.to(dtype), gate.to(dtype)).float().sigmoid().view(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, RouterOutput]:
        """(out [..., H], what the router decided) for x [..., H].

        Errors: ValueError for another last dimension, and a recipe that does not read what `ep`
        moves; TypeError for another dtype, of x or of the router.
        """
        require_rows("x", x)
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {list(x.shape)}, must be [..., {self.hidden}]; hidden "
                             "is its last dimension")
        if self.ep is not None and self.ep._window is not None and self.ep._window.holds(x):
            x = x.clone()  # backward's exchange writes where it lies
        tokens, choice = self._choice(x.reshape(-1, self.hidden))
        own: tuple[OwnExpert, ...] = ()
        given: tuple[GivenExpert, ...] = ()
        if self.ep is None:
            mixed, experts, prob, scores, offsets = self.experts(tokens, choice)
            counts = offsets.diff()
        else:
            experts, prob, scores = routing(choice.logits, expert_bias=self.expert_bias,
                                            **self.routing)
            own, given = self._begun(x, tokens, choice)
            mixed, counts = run_beside((*own, *given), self._mixed_by_ranks, self.ep, tokens,
                                       experts, prob)
            if choice.shared1 is not None and choice.shared2 is not None:
                mixed = mixed + (own[0].result() if own else self._shared_alone(
                    tokens, choice.shared1, choice.shared2, choice.shared_gate))
        out = mixed if x.dim() == 2 else mixed.view(x.shape)
        if self.shared_expert is not None:
            shared = given[0].result() if given else self.shared_expert(x)
            if not isinstance(shared, Tensor) or shared.shape != x.shape:
                found = list(shared.shape) if isinstance(shared, Tensor) else type(shared).__name__
                raise ValueError(f"shared_expert(x) is {found}, must be a tensor of shape "
                                 f"{list(x.shape)}, that of x")
            out = out + shared
        return out, RouterOutput(choice.logits, scores, experts, prob, counts)

    def _begun(self, x: Tensor, tokens: Tensor, choice: TokenChoice
               ) -> tuple[tuple[OwnExpert, ...], tuple[GivenExpert, ...]]:
        """The shared experts that run beside the exchange; one of each kind, or none."""
        if not self.overlap_shared or not has_sides(x):
            return (), ()
        own: tuple[OwnExpert, ...] = ()
        options = self._options_for(tokens)
        if (choice.shared1 is not None and choice.shared2 is not None
                and can_be_own(tokens, options["recipe"])):
            own = OwnExpert(tokens, choice.shared_gate, (choice.shared1, choice.shared2), options),
        if self.shared_expert is None or not can_be_given(x):
            return own, ()
        with joined_on_error(*(one.work for one in own)):
            return own, (GivenExpert(self.shared_expert, x),)

    def _options_for(self, tokens: Tensor) -> dict[str, Any]:
        """Of the shared expert's operator."""
        own = self.experts
        return dict(activation=own.activation, keep_h=own.keep_h, recipe=own._words_for(tokens))

    def _mixed_by_ranks(self, ep: ExpertParallel, tokens: Tensor, experts: Tensor, prob: Tensor
                        ) -> tuple[Tensor, Tensor]:
        """(sums over the experts of each token, choices of each expert by this rank's tokens)."""
        is_eager = not torch.compiler.is_compiling()
        if is_eager:
            expert_state.require_apart(self.experts, ep)
        else:
            expert_state.require_apart_in_graph(self._refusal_in_ddp())
        tokens = tokens.to(working_dtype(tokens))
        require_readers(ep, self.experts, tokens)
        in_codes = format_of(ep) is not None
        can_push = (partial(self.experts._can_push, tokens, ep.ranks, in_codes)
                    if is_eager and isinstance(self.experts, GroupedMLP) and self.push is not False
                    else None)
        if self.push and ep._window is not None and (can_push is None
                                                     or not can_push(ep._window.rows)):
            raise RuntimeError("push is True, must be None or False; these experts cannot push")
        (rows, row_prob, offsets, handle), codes = sent(ep, self.experts, tokens, (experts, prob),
                                                        can_push)
        bias2_scale = None if self.experts.bias2 is None else row_prob
        # A compiler gives memory that was read to what comes next, while other ranks still read it.
        counts = RankRows(offsets, "", None, None, codes, row_prob)
        if is_eager:
            again = (RowsAgain(partial(ep._dispatch_again, handle), tokens, experts, prob)
                     if self.dispatch_again else None)
            place_of = places_to_push_to(handle.window, handle.where)
            # What collect finds in the window it need not copy; what somebody kept must stay.
            fetched = place_of is None and self.experts._is_watched()
            window = "" if fetched else handle.window
            counts = RankRows(offsets, window, again, place_of, codes, row_prob)
        y = self.experts(rows, counts, row_prob, bias2_scale)
        return ep.collect(y, handle), handle.tokens_per_expert

    @torch.compiler.assume_constant_result
    def _refusal_in_ddp(self) -> str | None:
        return None if self.ep is None else expert_state.refusal_in_ddp(self.experts, self.ep)

    def _shared_alone(self, tokens: Tensor, w1: Tensor, w2: Tensor, gate: Tensor | None) -> Tensor:
        """The shared expert's result where the sums are made of what other ranks send."""
        y: Tensor = torch.ops.cadre.grouped_mlp(
            tokens, offsets_of_all_rows(tokens), gate, [w1.unsqueeze(0)], [], [w2.unsqueeze(0)], [],
            None, **self._options_for(tokens))[0]
        return y

    def backward_dw(self) -> None:
        """Of the experts, see `GroupedMLP`; those of the router have been there since backward."""
        self.experts.backward_dw()

    def need_backward_dw(self) -> bool:
        """True if weight gradients are left to `backward_dw`."""
        return self.experts.need_backward_dw()

    def discard_wgrad(self) -> None:
        """Drops all weight gradients that are pending, say after an error in a step."""
        self.experts.discard_wgrad()

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        shown = dict(self.routing)
        if self.shared_features:
            shown |= {"shared_features": self.shared_features,
                      "shared_gate": self.shared_gate is not None}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def parallel_of(ep: Any, num_experts: int, top_k: int) -> ExpertParallel | None:
    """What `MoE` is given, as an ExpertParallel of its sizes, which takes all rows that come."""
    if ep is None:
        return None
    if not isinstance(ep, ExpertParallel):
        ranks = process_group(ep).size()
        if num_experts % ranks:
            raise ValueError(f"num_experts is {num_experts}, must be a multiple of {ranks}, the "
                             "ranks that share them")
        return ExpertParallel(ep, num_experts // ranks, top_k, rows="exact")
    if (ep.experts * ep.ranks, ep.top_k) != (num_experts, top_k):
        raise ValueError(f"ep is {ep}, must be of {num_experts} experts on all ranks and "
                         f"top_k={top_k}, as the layer is")
    return ep
