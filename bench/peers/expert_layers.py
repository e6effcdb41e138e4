"""One mixture-of-experts layer (moe_layers.py) whose experts and tokens are shared by ranks: Cadre
by windows, all_to_all_single, and one GPU that has all of it. torch_expert_layer.py times them.

A contestant is made for a rank's `Share`. `forward()` and `step()` give tuples: out, and RESULTS.
"""
import torch
import torch.distributed as dist

import cadre
import moe_layers
import torch_moe
from cadre import operations

CALLS = torch_moe.CALLS
RESULTS = ("out", "dx", "dlogits", "dw1", "dw2")  # of a step
SCORE = "topk_softmax"  # as moe_layers has it


class Share:
    """What a rank has of a moe_layers.Layer that holds the tokens of all ranks."""

    def __init__(self, whole, ranks, rank):
        self.ranks, self.rank, self.top_k = ranks, rank, whole.top_k
        self.tokens, self.experts = whole.tokens // ranks, whole.experts // ranks
        self.hidden, self.features = whole.hidden, whole.features
        self.x, self.logits, self.dout = map(self.of_tokens, (whole.x, whole.logits, whole.dout))
        self.w1, self.w2 = map(self.of_experts, (whole.w1, whole.w2))

    def of_tokens(self, t):
        return t[self.rank * self.tokens:(self.rank + 1) * self.tokens].clone()

    def of_experts(self, t):
        return t[self.rank * self.experts:(self.rank + 1) * self.experts].clone()

    def of_results(self, results):
        """This rank's part of what one GPU computes: out, or all of RESULTS."""
        parts = [self.of_tokens] * 3 + [self.of_experts] * 2
        return [part(t) for part, t in zip(parts, results)]


class Contestant:
    """Calls of one way to compute the layer: `mix(x, logits)` gives the sums of this rank's tokens,
    `weights` are its leaves."""

    alone = False  # rank 0 has all of it
    waits = False  # the host waits for the GPU in the midst of a call

    def __init__(self, share):
        self.share = share
        self.weights = [moe_layers.leaf(share.w1), moe_layers.leaf(share.w2)]

    def forward(self):
        with torch.no_grad():
            return (self.mix(self.share.x, self.share.logits),)

    def step(self):
        """RESULTS."""
        x, logits = moe_layers.leaf(self.share.x), moe_layers.leaf(self.share.logits)
        out = self.mix(x, logits)
        return out.detach(), *torch.autograd.grad(out, [x, logits, *self.weights], self.share.dout)


class Cadre(Contestant):
    """cadre.MoE(ep=...) by windows, from the logits on."""

    def __init__(self, share):
        self.share = share
        ep = cadre.ExpertParallel(None, share.experts, share.top_k, route="window",
                                  tokens=share.tokens, hidden=share.hidden, dtype=torch.bfloat16,
                                  device=share.x.device)
        self.layer = cadre.MoE(share.experts * share.ranks, share.hidden, share.features,
                               top_k=share.top_k, score=SCORE, ep=ep, device=share.x.device,
                               dtype=torch.bfloat16)
        self.weights = [self.layer.experts.w1, self.layer.experts.w2]
        with torch.no_grad():
            for weight, given in zip(self.weights, (share.w1, share.w2)):
                weight.copy_(given)

    def mix(self, x, logits):
        chosen = cadre.routing(logits, **self.layer.routing)
        return self.layer._mixed_by_ranks(self.layer.ep, x, chosen.experts, chosen.prob)[0]


class Moved(torch.autograd.Function):
    """Rows by all_to_all_single, so many to each rank and from each; gradients the other way."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = sent, received
        return Moved.moved(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.counts
        return Moved.moved(gradient, received, sent), None, None

    @staticmethod
    def moved(rows, sent, received):
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived


class AllToAll(Contestant):
    """all_to_all_single of counts, rows and probabilities, with Cadre's permute before and behind
    and Cadre's experts. The host reads the counts."""

    waits = True

    def counts(self, order):
        """(rows to each rank, rows from each, rows from each by expert [P * E] on the device)."""
        sent = order.offsets.diff()
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent)
        both = torch.stack([sent, arriving]).view(2, self.share.ranks, -1)
        return *both.sum(2).tolist(), arriving

    def mix(self, x, logits):
        share = self.share
        chosen = cadre.routing(logits, share.top_k, SCORE)
        order = operations.offsets_of_routing(chosen.experts, share.experts * share.ranks,
                                              chosen.experts.numel())
        leaving, prob = operations.permute(x, order, prob=chosen.prob)
        sent, received, arriving = self.counts(order)
        count = sum(received)
        here = torch.arange(share.experts, device=x.device).repeat(share.ranks)
        arrival = operations.offsets_of_routing(
            here.repeat_interleave(arriving, output_size=count)[:, None], share.experts, count)
        rows, row_prob = operations.permute(
            Moved.apply(leaving, sent, received), arrival,
            prob=Moved.apply(prob[:, None], sent, received))
        w1, w2 = self.weights
        y = torch.ops.cadre.grouped_mlp(rows, arrival.offsets, row_prob, [w1], [], [w2], [])[0]
        back = operations.combine(y, arrival)  # each row is one choice's
        return operations.combine(Moved.apply(back, received, sent), order)


class AllToAllOfKnownCounts(AllToAll):
    """The same with the counts of its first call, which no layer knows beforehand, so the host
    waits for nothing: the least that NCCL and these kernels need."""

    waits = False
    known = None

    def counts(self, order):
        self.known = self.known or super().counts(order)
        return self.known


class OneGpu(Contestant):
    """torch.ops.cadre.moe, as cadre.MoE calls it, with all tokens and all experts on rank 0."""

    alone = True

    def __init__(self, share, whole):
        self.share, self.layer = share, torch_moe.Contestant(moe_layers.Cadre, whole)

    def forward(self):
        return (self.layer.forward("logits"),)

    def step(self):
        return self.layer.step("logits")


class Graphed:
    """The calls of another contestant, captured; memory of all graphs is in one pool."""

    waits = False

    def __init__(self, other, pool):
        self.share, self.alone, self.graphs = other.share, other.alone, {}
        for call in CALLS:
            self.capture(call, getattr(other, call), pool)

    def capture(self, name, call, pool):
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL look at their events all the while.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            results = call()
        self.graphs[name] = [graph, results]

    def replay(self, name):
        graph, results = self.graphs[name]
        graph.replay()
        return results

    def forget_results(self):
        """Their memory is the next graph's then."""
        for kept in self.graphs.values():
            kept[1] = None

    def forward(self):
        return self.replay("forward")

    def step(self):
        return self.replay("step")


class Idle(Contestant):
    """What another rank computes alone."""

    alone = True

    def __init__(self, share):
        self.share = share

    forward = step = None


def graphed(other, pool):
    """Errors: RuntimeError on a CPU."""
    if not other.share.x.is_cuda:
        raise RuntimeError("needs GPUs")
    return other if isinstance(other, Idle) else Graphed(other, pool)


def same_bits(got, want):
    integers = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return torch.equal(got.contiguous().view(integers), want.contiguous().view(integers))


class Check:
    """What one GPU computes: this rank's part of it, by call."""

    def __init__(self, share, whole):
        contestant = torch_moe.Contestant(moe_layers.Cadre, whole)
        torch_moe.Check(whole).require(contestant, "logits", CALLS)
        self.wanted = {"forward": share.of_results([contestant.forward("logits")]),
                       "step": share.of_results(contestant.step("logits"))}
        self.share = share

    def other_bits(self, contestant):
        """Results whose bits are others. Raises where one differs by more than roundings do."""
        found = []
        for call in CALLS:
            if contestant.alone and self.share.rank > 0:
                continue
            got = getattr(contestant, call)()
            if contestant.alone:
                got = self.share.of_results(got)
            for name, mine, want in zip(RESULTS, got, self.wanted[call]):
                if same_bits(mine, want):
                    continue
                apart = float((mine.float() - want.float()).norm() / want.float().norm())
                if not apart <= torch_moe.MOST_DIFFERENCE:
                    raise RuntimeError(f"{name} of {call} differs from that of one GPU by "
                                       f"{apart:.3g} of its norm")
                found.append(f"{name} of {call}")
        return found


PEERS = {"nccl": AllToAll, "nccl_known_counts": AllToAllOfKnownCounts}
