#!/usr/bin/env python3
"""Times how rows travel to the ranks of their experts and back: cadre.ExpertParallel, without and
with sum="rank" (cadre_sum_rank, as DeepEP sums), all_to_all_single with Cadre's permute, torch's
all_to_all_vdev_2d over symmetric memory, and DeepEP. The same tokens, calls in turns. Rank 0 writes
a record like that of `cadre bench --json`.

  torchrun --nproc-per-node 2 bench/peers/torch_expert_parallel.py \\
    --file bench/shapes/h200_expert_parallel.txt --offsets uniform,gamma:1 --json record.json

`dispatch` ends with rows in the order of a rank's experts, `collect` with the sums of each token.
A call takes until the last rank is through. What each computes is checked first; who cannot run is
left out, with the reason. PYTHONPATH names the folder of the package cadre. With --device cpu it
runs over gloo, which only shows that it runs.
"""
import argparse
import datetime
import json
import os
import pathlib
import random
import re
import shlex
import sys
import time

import torch
import torch.distributed as dist

import cadre  # before any group: it imports what keeps the group of that time to the end
import torch_grouped_gemm as beside
from cadre import operations

CALLS = ("dispatch", "collect")
SIZES = ("T", "top_k", "H", "E", "ranks", "R")
MOST_DIFFERENCE = 0.02  # ||got - want|| / ||want||: a peer may round the sum of each rank
DEEPEP_BYTES = 1 << 30  # its buffer
PATIENCE_S = 120  # with a rank that fails alone


def sizes_of(text):
    """Of `expert_parallel T=.. top_k=.. H=.. E=.. ranks=.. R=.. dtype=bf16`, E of a rank."""
    words = text.split()
    values = dict(word.partition("=")[::2] for word in words[1:])
    if words[0] != "expert_parallel" or values.pop("dtype", "bf16") != "bf16" or (
            sorted(values) != sorted(SIZES)) or not all(
                re.fullmatch("[1-9][0-9]*", value) for value in values.values()):
        raise SystemExit(f"'{text}': must be expert_parallel "
                         f"{' '.join(name + '=..' for name in SIZES)} dtype=bf16")
    return {name: int(value) for name, value in values.items()}


class Tokens:
    """What each rank brings: x [T, H] in bf16 and the experts of each token, other ones a rank."""

    def __init__(self, sizes, routing, seed, device):
        self.sizes, self.rank, self.ranks = sizes, dist.get_rank(), sizes["ranks"]
        self.experts_here, self.top_k = sizes["E"], sizes["top_k"]
        self.experts_in_all = self.experts_here * self.ranks
        generator = torch.Generator(device).manual_seed(seed * self.ranks + self.rank)
        shape = sizes["T"], sizes["H"]
        self.x = torch.randn(shape, generator=generator, device=device).bfloat16()
        weights = torch.tensor(beside.weights_of(routing, self.experts_in_all, random.Random(seed)))
        self.experts = torch.multinomial(weights.clamp(min=1e-6).to(device).expand(shape[0], -1),
                                         self.top_k, generator=generator)

    def results_of_experts(self, rows, counts):
        """[R, H], which differ by expert: `counts` [E] of this rank's."""
        first = self.rank * self.experts_here
        factors = 1 + torch.arange(first, first + self.experts_here, device=rows.device) / 8
        rows[:int(counts.sum())] *= factors.repeat_interleave(counts.long())[:, None].to(rows.dtype)
        return rows

    def sums(self):
        """What collect must come to."""
        return self.x.float() * (1 + self.experts / 8).sum(1, keepdim=True)

    def bytes(self):
        """(delivered, crossed): rows of this rank's tokens that reach an expert, and those of them
        whose expert is on another rank."""
        row = self.x.shape[1] * self.x.element_size()
        crossed = (self.experts // self.experts_here != self.rank).sum().item()
        return self.experts.numel() * row, crossed * row


class Cadre:
    """cadre.ExpertParallel by windows, in which the experts write their rows."""

    sum = "choice"

    def __init__(self, tokens):
        self.tokens = tokens
        self.ep = cadre.ExpertParallel(None, tokens.experts_here, tokens.top_k, route="window",
                                       rows=tokens.sizes["R"], tokens=tokens.sizes["T"],
                                       hidden=tokens.sizes["H"], dtype=torch.bfloat16,
                                       prob=False, sum=self.sum, device=tokens.x.device)

    def of_experts(self, rows):
        y = self.ep.empty_rows()
        y[:len(rows)].copy_(rows)
        return y

    def dispatch(self):
        self.rows, _, self.offsets, self.handle = self.ep.dispatch(self.tokens.x,
                                                                   self.tokens.experts)
        return self.rows, self.offsets.diff()

    def collect(self, y):
        return self.ep.collect(y, self.handle)


class CadreSumRank(Cadre):
    """The same with sum="rank": experts write where they like, and sums of ranks cross."""

    sum = "rank"

    def of_experts(self, rows):
        return rows


class AllToAll:
    """all_to_all_single of counts and of rows, with Cadre's permute before and behind."""

    def __init__(self, tokens):
        self.tokens = tokens

    def dispatch(self):
        tokens = self.tokens
        self.order = operations.offsets_of_routing(tokens.experts, tokens.experts_in_all,
                                                 tokens.experts.numel())
        leaving = operations.permute(tokens.x, self.order)[0]
        sent = self.order.offsets.diff()
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent)
        both = torch.stack([sent, arriving]).view(2, tokens.ranks, -1)
        self.sent, self.received = both.sum(2).tolist()
        here = torch.arange(tokens.experts_here, device=sent.device).repeat(tokens.ranks)
        count = sum(self.received)
        self.arrival = operations.offsets_of_routing(
            here.repeat_interleave(arriving, output_size=count)[:, None], tokens.experts_here,
            count)
        return (operations.permute(self.moved(leaving, self.received, self.sent), self.arrival)[0],
                both[1].sum(0))

    def collect(self, y):
        leaving = operations.combine(y, self.arrival)  # each row is one choice's
        return operations.combine(self.moved(leaving, self.sent, self.received), self.order)

    def moved(self, rows, received, sent):
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, received, sent)
        return arrived


class SymmetricMemory:
    """all_to_all_vdev_2d of torch, whose counts stay on the device, with Cadre's permute."""

    def __init__(self, tokens):
        import torch.distributed._symmetric_memory as symm_mem
        if not tokens.x.is_cuda:
            raise RuntimeError("needs GPUs")
        symm_mem.set_backend("NVSHMEM")
        self.tokens, self.group = tokens, dist.group.WORLD.group_name
        symm_mem.enable_symm_mem_for_group(self.group)

        def empty(*shape, dtype):
            return symm_mem.empty(*shape, dtype=dtype, device=tokens.x.device)

        slots, hidden = tokens.experts.numel(), tokens.x.shape[1]
        self.leaving, self.back = (empty(slots, hidden, dtype=torch.bfloat16) for _ in range(2))
        self.rows = empty(tokens.sizes["R"], hidden, dtype=torch.bfloat16)
        self.counts = empty(tokens.experts_in_all, dtype=torch.int64)
        self.arrived, self.returned = (empty(2, tokens.experts_in_all, dtype=torch.int64)
                                       for _ in range(2))

    def dispatch(self):
        tokens = self.tokens
        self.order = operations.offsets_of_routing(tokens.experts, tokens.experts_in_all,
                                                 tokens.experts.numel())
        self.leaving.copy_(operations.permute(tokens.x, self.order)[0])
        self.counts.copy_(self.order.offsets.diff())
        torch.ops.symm_mem.all_to_all_vdev_2d(self.leaving, self.rows, self.counts, self.arrived,
                                              self.group)
        # By expert, then by rank.
        return self.rows, self.arrived[0].view(tokens.experts_here, tokens.ranks).sum(1)

    def collect(self, y):
        if y.data_ptr() != self.rows.data_ptr():
            self.rows.copy_(y)
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(self.rows, self.back, self.arrived,
                                                     self.returned, self.group)
        return operations.combine(self.back, self.order)


class DeepEP:
    """Its kernels of training, which bring a token once to a rank; Cadre's permute makes the rows,
    and sums those of a rank, rounded there."""

    def __init__(self, tokens):
        import deep_ep
        if not tokens.x.is_cuda:
            raise RuntimeError("needs GPUs")
        self.tokens = tokens
        self.buffer = deep_ep.Buffer(dist.group.WORLD, DEEPEP_BYTES, 0)
        self.weights = torch.ones(tokens.experts.shape, device=tokens.x.device)

    def dispatch(self):
        tokens = self.tokens
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            tokens.experts, tokens.experts_in_all)
        x, experts, _, counts, self.handle, _ = self.buffer.dispatch(
            tokens.x, topk_idx=tokens.experts, topk_weights=self.weights,
            num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert)
        self.order = operations.offsets_of_routing(experts, tokens.experts_here, sum(counts))
        return operations.permute(x, self.order)[0], self.order.offsets.diff()

    def collect(self, y):
        return self.buffer.combine(operations.combine(y, self.order), self.handle)[0]


CONTESTANTS = {"cadre": Cadre, "cadre_sum_rank": CadreSumRank, "nccl": AllToAll,
               "all_to_all_vdev_2d": SymmetricMemory, "deepep": DeepEP}


def first_words(said):
    """Of what all ranks said, that of the first who did; all return the same."""
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, said)
    return next((f"rank {rank}: {words}" for rank, words in enumerate(answers) if words), "")


def made(name, tokens):
    """A contestant, or why there is none, which all ranks know."""
    contestant, why = None, ""
    try:
        contestant = CONTESTANTS[name](tokens)
    except Exception as error:
        kind = "cannot be imported: " if isinstance(error, ImportError) else ""
        why = kind + " ".join(str(error).split())[:300]
    why = first_words(why)
    if why:
        return None, why
    try:
        rows, counts = contestant.dispatch()
        got = contestant.collect(tokens.results_of_experts(rows, counts)).float()
        want = tokens.sums()
        apart = float((got - want).norm() / want.norm())
        if not apart <= MOST_DIFFERENCE:
            why = f"its sums differ by {apart:.3g} of their norm"
    except Exception as error:
        why = " ".join(str(error).split())[:300]
    why = first_words(why)
    return (None if why else contestant), why


class Clock:
    """Microseconds of a call, from when all ranks are there until this one is through."""

    def __init__(self, device):
        self.device, self.there = device, torch.zeros(1, device=device)

    def us(self, call):
        dist.all_reduce(self.there)
        if self.device.type == "cpu":
            begun = time.perf_counter()
            result = call()
            return 1e6 * (time.perf_counter() - begun), result
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
        return 1000 * start.elapsed_time(stop), result


def time_in_turns(contestants, repeat, clock):
    """{call: {name: [us of the slowest rank]}}"""
    samples = {call: {name: [] for name in contestants} for call in CALLS}
    for _ in range(repeat):
        for name, contestant in contestants.items():
            us, (rows, _) = clock.us(contestant.dispatch)
            y = contestant.of_experts(rows) if hasattr(contestant, "of_experts") else rows
            samples["dispatch"][name].append(us)
            samples["collect"][name].append(clock.us(lambda: contestant.collect(y))[0])
    for call in CALLS:
        slowest = torch.tensor(list(samples[call].values()), device=clock.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        samples[call] = dict(zip(contestants, slowest.tolist()))
    return samples


def rows_of(line, routing, options, clock):
    """The rows of the record of one problem."""
    problem, name = line
    tokens = Tokens(sizes_of(problem), routing, options.seed, clock.device)
    contestants, left_out = {}, {}
    for peer in ("cadre", *options.peers):
        contestant, why = made(peer, tokens)
        if contestant:
            contestants[peer] = contestant
        elif peer == "cadre":
            raise SystemExit(f"cadre: {why}")
        else:
            left_out[peer] = why
    moved = torch.tensor(tokens.bytes(), device=clock.device)
    dist.all_reduce(moved)
    delivered, crossed = moved.tolist()
    for call, samples in time_in_turns(contestants, options.repeat, clock).items():
        row = {"problem": problem, "routing": routing} | ({"layer": name} if name else {})
        row["call"] = call
        for key, share in (("us", 0.5), ("us_p10", 0.1), ("us_p90", 0.9)):
            row[key] = {peer: round(beside.quantile(us, share), 3) for peer, us in samples.items()}
        row["speed_of_peer"] = {
            peer: round(beside.quantile([b / a for a, b in zip(samples["cadre"], us)], 0.5), 3)
            for peer, us in samples.items() if peer != "cadre"}
        row |= {"delivered_bytes": delivered, "crossed_bytes": crossed}
        yield row | ({"left_out": left_out} if left_out else {})


def shown(row):
    times = "  ".join(f"{peer} {us:.1f}" for peer, us in row["us"].items())
    absent = "".join(f"\n  {peer} left out: {why}" for peer, why in row.get("left_out", {}).items())
    return (f"{row.get('layer') or row['problem']:14} {row['routing']:8} {row['call']:8} us {times}"
            f" | {row['delivered_bytes']} bytes delivered, {row['crossed_bytes']} of them crossed"
            f"{absent}")


def record(cases, options, device):
    machine = "the CPU"
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        machine = f"{dist.get_world_size()} x {gpu.name}, {gpu.multi_processor_count} SMs"
    command = [pathlib.Path(word).name if word.startswith("/") else word for word in sys.argv]
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"command": shlex.join([pathlib.Path(command[0]).name, *command[1:]]),
            "machine": machine, "date": now, "commit": options.commit or beside.commit(),
            "versions": f"torch {torch.__version__}", "cases": cases}


def lines_of(path):
    """[(problem, layer)] of a file."""
    lines = [tuple(part.strip() for part in line.partition("#")[::2])
             for line in pathlib.Path(path).read_text().splitlines()]
    return [line for line in lines if line[0]]


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [name for name in CONTESTANTS if name != "cadre"]
    parser.add_argument("--file", required=True, help="one problem a line; `# layer` behind it")
    parser.add_argument("--offsets", default="uniform", help="uniform, zipf:S, gamma:S, by commas")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=peers,
                        help=",".join(peers))
    parser.add_argument("--repeat", type=int, default=20, help="calls of each contestant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="that the package was built from; else this file's")
    parser.add_argument("--json", help="write a record to this file, after each row")
    return parser.parse_args(arguments)


def main():
    options = options_of(sys.argv[1:])
    lines = lines_of(options.file)
    for problem, _ in lines:
        if sizes_of(problem)["ranks"] != int(os.environ["WORLD_SIZE"]):
            raise SystemExit(f"'{problem}': ranks must be {os.environ['WORLD_SIZE']}, those that "
                             "run")
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"])
                          if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                            timeout=datetime.timedelta(seconds=PATIENCE_S))
    clock, cases = Clock(device), []
    for line in lines:
        for routing in options.offsets.split(","):
            for row in rows_of(line, routing, options, clock):
                cases.append(row)
                if dist.get_rank() > 0:
                    continue
                print(shown(row), flush=True)
                if options.json:
                    pathlib.Path(options.json).write_text(
                        json.dumps(record(cases, options, device), indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
