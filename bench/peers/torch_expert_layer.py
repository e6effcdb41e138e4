#!/usr/bin/env python3
"""Times whole mixture-of-experts layers whose experts are on several ranks, from logits to sums, in
bf16: Cadre by windows, all_to_all_single with Cadre's permute and experts, and one GPU that has all
experts and the tokens of all ranks. The same tokens, calls in turns, device time. Rank 0 writes a
record like that of `cadre bench --json`.

  torchrun --nproc-per-node 2 bench/peers/torch_expert_layer.py \\
    --file bench/shapes/h200_moe.txt --layers qwen3_30b,olmoe --offsets uniform,gamma:1 \\
    --seconds 500 --json record.json

T of the file is that of a rank, E that of all. `forward` has nothing to learn; `step` is forward
and backward, with the gradients of x, logits and both weights. A call takes until the last rank is
through; the GPUs are kept busy until all of it is queued, and meet before it. What each contestant
computes is compared with one GPU, and that with plain fp32: Cadre's must be the same bits, or the
script ends with 1. Who cannot run is left out, with the reason. PYTHONPATH names the folder of the
package cadre. With --device cpu it runs over gloo, which only shows that it runs.
"""
import argparse
import datetime
import gc
import json
import os
import pathlib
import sys
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # read when NCCL begins
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are of one host

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import moe_layers  # noqa: E402
import torch_expert_parallel as exchanges  # noqa: E402
import torch_grouped_gemm as beside  # noqa: E402
import torch_moe  # noqa: E402
from expert_layers import (  # noqa: E402
    CALLS, PEERS, Cadre, Check, Graphed, Idle, OneGpu, Share, graphed)

NAMES = ("cadre", "cadre_graph", *PEERS, "one_gpu", "one_gpu_graph")


def words_of(error):
    kind = "cannot be imported: " if isinstance(error, ImportError) else ""
    return (kind + " ".join(str(error).split()))[:300] or type(error).__name__


def tried(what, action):
    """(what `action` gives or None, why it failed on any rank or ""). All ranks call it. A failure
    is told at once, since the others may wait for this rank until they give up."""
    result, why = None, ""
    try:
        result = action()
    except Exception as error:
        why = words_of(error)
        print(f"  rank {dist.get_rank()}: {what}: {why}", file=sys.stderr, flush=True)
    why = exchanges.first_words(why)
    return (None if why else result), why


class Clock:
    """Microseconds of a call on the GPU, which multiplies dense matrices until all of the call is
    queued. Behind these the ranks' GPUs meet, and the call begins."""

    def __init__(self, device):
        self.device, self.ahead = device, {}
        self.there = torch.zeros(1, device=device)
        if device.type == "cuda":
            side = torch_moe.AHEAD_SIDE
            self.dense = [torch.randn(side, side, device=device, dtype=torch.bfloat16)
                          for _ in range(3)]

    def us(self, name, contestant, call):
        """Of this rank; all ranks call it. 0 where this one has nothing to do."""
        while self.ahead.setdefault(name, torch_moe.AHEAD) <= torch_moe.MOST_AHEAD:
            late, us = torch.zeros(1), 0.0
            dist.all_reduce(late)  # of the hosts: nobody is still at work
            if not contestant.alone or dist.get_rank() == 0:
                us, late[0] = self.once(self.ahead[name], contestant, call)
            dist.all_reduce(late)
            if not late:
                return us
            self.ahead[name] *= 2
        raise RuntimeError(f"{name} waits for the GPU")

    def once(self, ahead, contestant, call):
        """(us, whether the GPU got to the call before all of it was queued)"""
        if self.device.type == "cpu":
            begun = time.perf_counter()
            call()
            return 1e6 * (time.perf_counter() - begun), False
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(ahead):
            torch.mm(*self.dense[:2], out=self.dense[2])
        if not contestant.alone:
            dist.all_reduce(self.there)
        start.record()
        call()
        stop.record()
        late = start.query() and not contestant.waits
        stop.synchronize()
        return 1000 * start.elapsed_time(stop), late


def free(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Layer:
    """One line of the file with one routing: who computes it, and who cannot, with the reason."""

    def __init__(self, line, routing, options, clock):
        self.line, self.routing, self.clock = line, routing, clock
        self.repeat, self.sizes = options.repeat, torch_moe.sizes_of(line[0])
        self.found, self.left_out, self.other_bits = {}, {}, {}
        ranks, rank = dist.get_world_size(), dist.get_rank()
        whole = moe_layers.Layer({**self.sizes, "T": ranks * self.sizes["T"]},
                                 torch_moe.weights_of(routing, self.sizes["E"], options.seed),
                                 options.seed, clock.device)
        share = Share(whole, ranks, rank)
        check, why = tried("one_gpu", lambda: Check(share, whole))
        if why:
            self.left_out["one_gpu"] = why
            return
        one_gpu = OneGpu(share, whole) if rank == 0 else Idle(share)
        del whole  # of which other ranks need no more
        makers = {"cadre": lambda: Cadre(share), "one_gpu": lambda: one_gpu,
                  **{name: lambda make=make: make(share) for name, make in PEERS.items()}}
        for name, make in makers.items():
            if name in options.contestants:
                self.enter(name, make, check)
        pool = torch.cuda.graph_pool_handle() if clock.device.type == "cuda" else None
        for name in ("cadre", "one_gpu"):
            if name in self.found and f"{name}_graph" in options.contestants:
                self.enter(f"{name}_graph", lambda: graphed(self.found[name], pool), check)

    def enter(self, name, make, check):
        """Makes it and compares its results."""
        free(self.clock.device)
        contestant, why = tried(name, make)
        if not why:
            bits, why = tried(name, lambda: check.other_bits(contestant))
        if why:
            self.left_out[name] = why
            return
        if isinstance(contestant, Graphed):
            contestant.forget_results()
        self.found[name] = contestant
        of_all = exchanges.first_words(", ".join(bits))
        if of_all:
            self.other_bits[name] = of_all

    def samples(self, call):
        """{name: [us of the slowest rank]}, in turns."""
        calls = {}
        for name, contestant in self.found.items():
            what, one = f"{name}, {call}", getattr(contestant, call)
            _, why = tried(what, lambda: self.clock.us(what, contestant, one))
            if why:
                self.left_out[name] = f"{call}: {why}"
            else:
                calls[name] = one
        samples = {name: [] for name in calls}
        for _ in range(self.repeat):
            for name, one in calls.items():
                samples[name].append(
                    self.clock.us(f"{name}, {call}", self.found[name], one))
        if not samples:
            return {}
        slowest = torch.tensor(list(samples.values()), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return dict(zip(samples, slowest.tolist()))

    def row(self, call):
        """Of the record."""
        problem, name = self.line
        samples = self.samples(call)
        row = {"problem": problem, "ranks": dist.get_world_size(), "routing": self.routing}
        row |= ({"layer": name} if name else {}) | {"call": call}
        for key, share in (("us", 0.5), ("us_p10", 0.1), ("us_p90", 0.9)):
            row[key] = {peer: round(beside.quantile(us, share), 3) for peer, us in samples.items()}
        row["speed_of_peer"] = {peer: ratio(samples[peer], samples["cadre"]) for peer in PEERS
                                if peer in samples and "cadre" in samples}
        row["two_over_one"] = {peer: ratio(samples[one], us) for peer, us in samples.items()
                               if (one := one_gpu_of(peer)) in samples and one != peer}
        row["tflops"] = {peer: round(self.flops(call, peer) / us / 1e6, 1)
                         for peer, us in row["us"].items()}
        for key in ("other_bits", "left_out"):
            row |= {key: getattr(self, key)} if getattr(self, key) else {}
        return row

    def flops(self, call, name):
        """Of a GPU: of as many rows as each has on average; backward has twice those of forward."""
        t, top_k, h, f = (self.sizes[key] for key in ("T", "top_k", "H", "F"))
        gpus_in_one = dist.get_world_size() if name.startswith("one_gpu") else 1
        return 6 * t * top_k * h * f * (3 if call == "step" else 1) * gpus_in_one


def one_gpu_of(name):
    return "one_gpu_graph" if name.endswith("_graph") else "one_gpu"


def ratio(over, under):
    return round(beside.quantile([a / b for a, b in zip(over, under)], 0.5), 3)


def shown(row):
    """A line of the table, and what there is to say of it."""
    cells = [f"{peer} {us / 1000:.3f} ({row['tflops'][peer]:.0f})"
             for peer, us in row["us"].items()]
    texts = [f"{row.get('layer') or row['problem']:12} {row['routing']:8} {row['call']:7} ms "
             f"(TFLOP/s a GPU) {'  '.join(cells)}"]
    for key, what in (("speed_of_peer", "speed over"), ("two_over_one", "two over one")):
        texts[0] += f" | {what} " + "  ".join(f"{k} {v:.3f}" for k, v in row[key].items())
    texts += [f"{name} left out: {why}" for name, why in row.get("left_out", {}).items()]
    texts += [f"{name} has other bits: {what}" for name, what in row.get("other_bits", {}).items()]
    return "\n  ".join(texts)


def is_good(row):
    """Whether Cadre is there, with the bits of one GPU."""
    return "cadre" in row["us"] and not {"cadre", "cadre_graph"} & set(row.get("other_bits", {}))


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="one problem a line; `# layer` behind it")
    parser.add_argument("--layers", type=lambda text: text.split(","), default=[],
                        help="of the file, by commas, in this order; all if left out")
    parser.add_argument("--offsets", default="uniform", help="uniform, zipf:S, gamma:S, by commas")
    parser.add_argument("--calls", type=torch_moe.words(CALLS), default=CALLS, help="forward,step")
    parser.add_argument("--contestants", type=torch_moe.words(NAMES), default=NAMES,
                        help=",".join(NAMES))
    torch_moe.add_run_options(parser, "layer")
    return parser.parse_args(arguments)


def work_of(options):
    """[(line, routing)], all of which this number of ranks can share."""
    lines = torch_moe.lines_of(options.file, options.layers)
    ranks = int(os.environ["WORLD_SIZE"])
    for problem, _ in lines:
        if torch_moe.sizes_of(problem)["E"] % ranks:
            raise SystemExit(f"'{problem}': E must be a multiple of {ranks}, the ranks that run")
    work = [(line, routing) for line in lines for routing in options.offsets.split(",")]
    for (problem, _), routing in work:
        torch_moe.weights_of(routing, torch_moe.sizes_of(problem)["E"], options.seed)
    return work


def begin(options):
    """The device of this rank, in a group of all."""
    device = torch.device(options.device)
    if device.type == "cuda":
        here, wanted = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
        if here < wanted:
            raise SystemExit(f"there are {here} GPUs, must be {wanted}, one a rank")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Hosts tell each other by gloo what GPUs need not wait for.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                            timeout=datetime.timedelta(seconds=exchanges.PATIENCE_S))
    return device


def is_over(until):
    """By the clock of any rank; all say the same."""
    over = torch.tensor([float(time.monotonic() > until)])
    dist.all_reduce(over, op=dist.ReduceOp.MAX)
    return bool(over)


def rows_of(work, options, clock, until):
    """The rows of the record, as they are measured."""
    for line, routing in work:
        if is_over(until):
            if dist.get_rank() == 0:
                print(f"{line[1] or line[0]}, {routing}: not begun, {options.seconds:.0f} s are "
                      "over", flush=True)
            continue
        layer = Layer(line, routing, options, clock)
        for call in options.calls:
            yield layer.row(call)
            if is_over(until):
                break
        del layer
        free(clock.device)


def main():
    options = options_of(sys.argv[1:])
    until = time.monotonic() + options.seconds
    work = work_of(options)
    device = begin(options)
    if device.type == "cuda":
        beside.warm()
    cases = []
    for row in rows_of(work, options, Clock(device), until):
        cases.append(row)
        if dist.get_rank() > 0:
            continue
        print(shown(row), flush=True)
        if options.json:
            pathlib.Path(options.json).write_text(
                json.dumps(exchanges.record(cases, options, device), indent=1) + "\n")
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return 1 if is_first and not all(map(is_good, cases)) else 0


if __name__ == "__main__":
    sys.exit(main())
