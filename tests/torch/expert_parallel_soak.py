#!/usr/bin/env python3
"""Exchanges by windows, over and over: of random size and routing, of layers that share a window,
behind random delays of hosts and GPUs; eager, and replayed from CUDA graphs with other routing.
Every row, sum and gradient is checked on the device, exactly: numbers are small integers that tell
tokens and choices apart.

  torchrun --nproc-per-node 2 tests/torch/expert_parallel_soak.py --exchanges 100000 --replays 10000

PYTHONPATH names the folder of the package cadre. It ends with 1 and the words of what is wrong, or
if --seconds were not enough. test_expert_parallel_soak.py makes some hundred.
"""
import argparse
import datetime
import os
import random
import sys
import time
from typing import NamedTuple

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # read when NCCL begins
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import cadre  # noqa: E402

NEVER = 2**62
EXCHANGES = ("dispatch", "collect", "collect_backward", "dispatch_backward")
LOOK = 128  # steps after which the host looks at what the device found
MOST_CYCLES = 400_000  # of a delay on a GPU
MOST_SECONDS = 0.002  # of a delay on a host
PATIENCE_S = 120  # with a rank that fails alone


class Sizes(NamedTuple):
    """Of an ExpertParallel; tokens on a CPU are fewer."""

    experts: int
    top_k: int
    hidden: int
    tokens: int
    dtype: torch.dtype
    share_of_rows: float = 0  # R of all rows that may come; 0: R holds them all


LAYERS = (Sizes(2, 1, 8, 4, torch.float32), Sizes(64, 8, 256, 256, torch.bfloat16),
          Sizes(16, 4, 512, 2048, torch.bfloat16), Sizes(3, 3, 72, 1500, torch.float16, 0.3),
          Sizes(5, 2, 40, 60, torch.bfloat16, 0.2))
LARGEST = Sizes(64, 8, 512, 2048, torch.float32)
GRAPHED = (1, 2)  # of LAYERS: an exchange that is one kernel, and one of several


def layers_of(group, device, limit_s):
    """An ExpertParallel for each of LAYERS, through one window."""
    fewer = 1 if device.type == "cuda" else 16
    ranks = dist.get_world_size(group)

    def made(sizes, **options):
        tokens = max(4, sizes.tokens // fewer)
        rows = ranks * tokens * sizes.top_k
        if sizes.share_of_rows:
            rows = int(rows * sizes.share_of_rows)
        return cadre.ExpertParallel(group, sizes.experts, sizes.top_k, route="window", rows=rows,
                                    tokens=tokens, hidden=sizes.hidden, dtype=sizes.dtype,
                                    overflow="drop", **options)

    largest = made(LARGEST, device=device, limit_s=limit_s)
    return [made(sizes, share=largest, layer=1 + n) for n, sizes in enumerate(LAYERS)]


class Batch:
    """What all ranks bring to a step, and what must come of it on this one. All of it is drawn on
    the device from one seed, so every rank knows it."""

    def __init__(self, ep, generator, chance, full=False):
        options = ep._window.options
        self.ep, self.device, self.generator = ep, generator.device, generator
        most, self.top_k, self.hidden = options.tokens, ep.top_k, options.hidden
        self.dtype, self.ranks, self.rank, self.rows = options.dtype, ep.ranks, ep.rank, ep.rows
        self.tokens = [most if full else chance.choice([0, 1, most, chance.randrange(most + 1)])
                       for _ in range(self.ranks)]
        self.chosen = self.choices(chance, most)
        self.x, self.dout = (self.integers(64, self.ranks * most, self.hidden).to(self.dtype)
                             for _ in range(2))
        self.prob = self.integers(1024, self.ranks * most, self.top_k).float()
        self.first = self.rank * most
        self.place_rows()

    def integers(self, end, *shape):
        return torch.randint(end, shape, generator=self.generator, device=self.device)

    def choices(self, chance, most):
        """Of all ranks' tokens [P * T, top_k]; many are of one expert or rank, or of nobody."""
        own, all_experts = self.ep.experts, self.ep.experts * self.ranks
        shape = self.ranks * most, self.top_k
        kind = chance.choice(["any"] * 4 + ["one expert", "one rank", "none", "some", "some"])
        if kind == "none":
            chosen = torch.full(shape, -1, device=self.device)
        elif kind == "one expert":
            chosen = torch.full(shape, chance.randrange(all_experts), device=self.device)
        elif kind == "one rank":
            chosen = self.integers(own, *shape) + chance.randrange(self.ranks) * own
        elif kind == "some":
            chosen = self.integers(2 * all_experts, *shape) - all_experts // 2
        else:
            chosen = self.integers(all_experts, *shape)
        for rank, tokens in enumerate(self.tokens):
            chosen[rank * most + tokens:(rank + 1) * most] = -1
        return chosen.to(chance.choice([torch.int32, torch.int64]))

    def place_rows(self):
        """Slots in the order of all experts, those of this rank's rows, and who has a row."""
        own, all_experts = self.ep.experts, self.ep.experts * self.ranks
        flat = self.chosen.reshape(-1).long()
        flat = flat.masked_fill((flat < 0) | (flat >= all_experts), all_experts)
        experts, slots = flat.sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(all_experts + 1, device=self.device))
        first = ends[::own][:self.ranks + 1]  # of each rank; the last: of nobody
        places = torch.arange(flat.numel(), device=self.device)
        row = torch.empty_like(slots).scatter_(0, slots, places - first[experts // own])
        self.kept = ((flat < all_experts) & (row < self.rows)).view(self.chosen.shape)
        self.scale = (1 + flat % 4).view(self.chosen.shape).float()
        mine = torch.arange(self.rows, device=self.device)
        self.is_row = mine < first[self.rank + 1] - first[self.rank]
        self.slot = slots[(first[self.rank] + mine).clamp(max=slots.numel() - 1)]
        begin = self.rank * own
        self.offsets = (ends[begin:begin + own + 1] - first[self.rank]).clamp(max=self.rows)

    def of_rank(self, t):
        return t[self.first:self.first + self.tokens[self.rank]]

    def of_rows(self, t, outside=0.0):
        """Something of tokens [P * T, ...] in the order of this rank's rows."""
        rows = t[self.slot // self.top_k]
        mask = self.is_row if t.dim() == 1 else self.is_row[:, None]
        return rows.masked_fill(~mask, outside)

    def of_slots(self, t, outside=0.0):
        return t.reshape(-1)[self.slot].masked_fill(~self.is_row, outside)

    def codes(self):
        """A number of each choice."""
        return torch.arange(self.chosen.numel(), device=self.device).float().view_as(self.chosen)

    def inputs(self):
        """Of this rank, in the order of `exchange`; rows that are none are NaN."""
        nan = float("nan")
        return [*map(self.of_rank, (self.x, self.chosen, self.prob, self.dout)),
                self.of_slots(self.scale, nan).to(self.dtype), self.of_slots(self.codes(), nan)]

    def sums(self, t):
        weights = (self.scale * self.kept).sum(1, keepdim=True)  # integers: in whatever order
        return self.of_rank(t.float() * weights).to(self.dtype)

    def wanted(self):
        """As `exchange` gives it."""
        return [(self.of_rows(self.x), self.of_slots(self.prob), self.offsets),
                (self.sums(self.x),), (self.of_rows(self.dout),),
                (self.sums(self.dout), self.of_rank(self.codes() * self.kept))]


def exchange(ep, x, chosen, prob, dout, scale, codes, pause=lambda: None, in_place=(False, False)):
    """All four: a list of what each gives. An expert multiplies rows by its scale."""
    ops, name = torch.ops.cadre, ep._window.name

    def tokens(t):
        return ep.empty_tokens(len(t)).copy_(t) if in_place[0] else t

    def rows_of(t):
        return ep.empty_rows().copy_(t) if in_place[1] else t

    pause()
    rows, row_prob, _, *where = ops._window_dispatch(name, tokens(x), chosen, prob)
    y = rows_of(rows * scale[:, None])
    pause()
    out = ops._window_collect(name, y, *where)
    pause()
    dy = ops._window_collect_backward(name, tokens(dout), *where)
    drows = rows_of(dy * scale[:, None])
    pause()
    dx, dprob = ops._window_dispatch_backward(name, drows, codes, *where)
    return [(rows, row_prob, where[0]), (out,), (dy,), (dx, dprob)]


class Again:
    """What stands for a graph on the CPU."""

    def __init__(self, make):
        self.make, self.results = make, make()

    def replay(self):
        for there, made in zip(sum(self.results, ()), sum(self.make(), ())):
            there.copy_(made)


class Soak:
    """The steps of one rank."""

    def __init__(self, group, device, seed, limit_s=60.0, make=exchange):
        self.device, self.seed, self.make, self.group = device, seed, make, group
        self.rank = dist.get_rank(group)
        self.layers = layers_of(group, device, limit_s)
        self.generator = torch.Generator(device)
        self.own_chance = random.Random(f"{seed} of {self.rank}")
        self.wrong = torch.full((len(EXCHANGES),), NEVER, device=device)

    def batch(self, number, layer=None):
        """That of a step; of any layer if none is named."""
        chance = random.Random(f"{self.seed} {number}")
        self.generator.manual_seed(self.seed * 2**32 + number)
        ep = self.layers[chance.randrange(len(LAYERS)) if layer is None else layer]
        return Batch(ep, self.generator, chance, full=layer is not None)

    def pause(self):
        """Seldom long, often not at all; other ranks pause elsewhere."""
        chance = self.own_chance
        if self.device.type == "cuda" and chance.random() < 0.2:
            torch.cuda._sleep(chance.randrange(1, MOST_CYCLES))
        if chance.random() < 0.02:
            time.sleep(MOST_SECONDS * chance.random())

    def compare(self, number, results, wanted):
        for which, (got, want) in enumerate(zip(results, wanted)):
            right = torch.stack([(g == w).all() for g, w in zip(got, want)]).all()
            first = torch.where(right, NEVER, number)
            self.wrong[which] = torch.minimum(self.wrong[which], first)

    def eager(self, number):
        batch = self.batch(number)
        in_place = self.own_chance.random() < 0.3, self.own_chance.random() < 0.3
        results = self.make(batch.ep, *batch.inputs(), pause=self.pause, in_place=in_place)
        self.compare(number, results, batch.wanted())

    def look(self, until=float("inf")):
        """Whether there is time left, by the clocks of all ranks. Errors: RuntimeError on all of
        them for what was wrong on any."""
        self.layers[0].check()
        over = torch.tensor([int(time.monotonic() > until)], device=self.device)
        own = torch.cat([self.wrong, over])
        said = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(said, own, group=self.group)
        said = torch.stack(said).tolist()
        wrong = [f"{name} of step {first} on rank {rank}" for rank, (*firsts, _) in enumerate(said)
                 for name, first in zip(EXCHANGES, firsts) if first < NEVER]
        if wrong:
            raise RuntimeError(f"seed {self.seed}, wrong: {', '.join(wrong)}")
        return not any(over for *_, over in said)

    def steps(self, count, until=float("inf"), first=0):
        """So many eager ones; how many were made."""
        for made in range(count):
            if made % LOOK == 0 and not self.look(until):
                return made
            self.eager(first + made)
        self.look()
        return count

    def replays(self, count, until=float("inf"), first=10**6):
        """So many of graphs of GRAPHED, in turns, with an eager step now and then; how many were
        made."""
        graphs = [self.captured(layer, first + n) for n, layer in enumerate(GRAPHED)]
        for made in range(count):
            if made % LOOK == 0 and not self.look(until):
                return made
            number = first + made
            layer, (graph, inputs, results) = list(zip(GRAPHED, graphs))[made % len(graphs)]
            batch = self.batch(number, layer)
            for there, given in zip(inputs, batch.inputs()):
                there.copy_(given)
            self.pause()
            graph.replay()
            self.compare(number, results, batch.wanted())
            if random.Random(number).random() < 0.05:  # on all ranks
                self.eager(number)
        self.look()
        return count

    def captured(self, layer, number):
        """(graph, what it reads, what it leaves)"""
        batch = self.batch(number, layer)
        inputs = [t.clone() for t in batch.inputs()]
        inputs[1] = inputs[1].long()
        if self.device.type == "cpu":
            again = Again(lambda: self.make(batch.ep, *inputs))
            return again, inputs, again.results
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.make(batch.ep, *inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = self.make(batch.ep, *inputs)
        return graph, inputs, results


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=100_000, help="eager; four are a step")
    parser.add_argument("--replays", type=int, default=10_000,
                        help="of graphs; on a CPU, of what stands for them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(arguments)


def run(options, device, until):
    """What is missing, or an empty text."""
    soak = Soak(dist.group.WORLD, device, options.seed)
    begun, steps = time.monotonic(), -(-options.exchanges // len(EXCHANGES))
    made = soak.steps(steps, until)
    replayed = soak.replays(options.replays, until) if made == steps else 0
    if dist.get_rank() == 0:
        print(f"{made * len(EXCHANGES)} exchanges, {replayed} replays of {len(EXCHANGES)}: all "
              f"right, {time.monotonic() - begun:.0f} s", flush=True)
    if made < steps or replayed < options.replays:
        return f"{options.seconds:.0f} s were over before all of it was made"
    return ""


def main():
    options = options_of(sys.argv[1:])
    until = time.monotonic() + options.seconds
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                            timeout=datetime.timedelta(seconds=PATIENCE_S))
    missing = run(options, device, until)
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    if missing and is_first:
        raise SystemExit(missing)


if __name__ == "__main__":
    main()
