#!/usr/bin/env python3
"""Times whole mixture-of-experts layers in bf16: Cadre through its PyTorch door, torch with all but
grouped_mm compiled, and SonicMoE and triton_kernels where they can be imported. One process, the
same numbers, launches in turns, device time. Writes a record like that of `cadre bench --json`.

  torch_moe.py --file bench/shapes/h200_moe.txt --layers sonic_7b,qwen3_30b \\
    --offsets uniform,gamma:1 --json record.json
  torch_moe.py --file bench/shapes/h200_moe_few.txt --calls forward --json few.json

`forward` has nothing to learn; `step` is forward and backward, with the gradients of weights. Both
start once from logits and once from the product of tokens and router, each contestant's own; with
--from rows they are of the experts alone, whose rows are in order already, of Cadre and torch. What
all of them compute is compared with plain fp32 first. PYTHONPATH names the folder of the package
cadre. On the CPU it only shows that it runs.
"""
import argparse
import datetime
import functools
import json
import pathlib
import random
import re
import shlex
import sys
import time

import torch

import moe_layers
import torch_grouped_gemm as beside

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import digest  # noqa: E402

CHECKED_TOKENS = 64
MOST_DIFFERENCE = 0.02  # ||got - want|| / ||want||, some roundings to bf16 behind each other
AHEAD, MOST_AHEAD = 2, 64  # products of AHEAD_SIDE cubed, while which the host queues one call
AHEAD_SIDE = 8192
CALLS, SOURCES_OF_LAYERS = ("forward", "step"), ("logits", "router")
SOURCES = (*SOURCES_OF_LAYERS, "rows")
SIZES = ("T", "top_k", "H", "F", "E")


def sizes_of(text):
    words = text.split()
    values = dict(word.partition("=")[::2] for word in words[1:])
    if words[0] != "moe" or sorted(values) != sorted(SIZES) or not all(
            re.fullmatch("[1-9][0-9]*", value) for value in values.values()):
        raise SystemExit(f"'{text}': must be moe {' '.join(name + '=..' for name in SIZES)}")
    return {name: int(value) for name, value in values.items()}


def lines_of(path, names):
    """[(problem, layer)] of a file, those of `names` in their order."""
    lines = [tuple(part.strip() for part in line.partition("#")[::2])
             for line in pathlib.Path(path).read_text().splitlines()]
    lines = [line for line in lines if line[0]]
    for name in names:
        if name not in [layer for _, layer in lines]:
            raise SystemExit(f"--layers: '{name}' is not in {path}")
    return [line for name in names for line in lines if line[1] == name] if names else lines


def weights_of(routing, experts, seed):
    """How likely a token chooses each expert, without its other choices. Above 0: their logarithms
    are logits."""
    return [max(weight, 1e-6)
            for weight in beside.weights_of(routing, experts, random.Random(seed))]


class Contestant:
    """Calls of one contestant by (call, source)."""

    def __init__(self, make, layer):
        self.made, self.layer = make(layer), layer

    def start(self, source):
        """What computes, its inputs, and the gradient of its output."""
        layer = self.layer
        if source == "rows":
            rows, prob, dout = layer.rows
            return self.made.mlp, (rows, prob), dout
        if source == "router":
            return self.made.route_and_mix, (layer.x, layer.router), layer.dout
        return self.made.mix, (layer.x, layer.logits), layer.dout

    @property
    def learns(self):
        return bool(self.made.weights)

    def forward(self, source):
        mix, inputs, _ = self.start(source)
        with torch.no_grad():
            return mix(*inputs)

    def step(self, source, between=lambda: None):
        """out, dx, dlogits, drouter or dprob, dw1, dw2."""
        mix, inputs, dout = self.start(source)
        inputs = [moe_layers.leaf(tensor) for tensor in inputs]
        out = mix(*inputs)
        between()
        return out.detach(), *torch.autograd.grad(out, [*inputs, *self.made.weights], dout)

    def among(self, calls, source):
        """Those that it has."""
        if source == "rows" and not hasattr(self.made, "mlp"):
            return []
        return [call for call in calls if call == "forward" or self.learns]

    def call(self, what, source):
        return functools.partial(getattr(self, what), source)


class Check:
    """What plain fp32 says of some tokens of a layer, and of one expert's weights."""

    def __init__(self, layer):
        self.tokens = layer.clear_tokens(CHECKED_TOKENS)
        if not len(self.tokens):
            raise SystemExit("no token chooses clearly, so nothing can be checked")
        chosen = layer.prob(layer.logits) > 0
        self.expert = int(chosen.sum(0).sort().indices[layer.experts // 2])  # as busy as most are
        its = chosen[:, self.expert].nonzero().flatten()
        out, dx, dlogits = layer.reference(self.tokens, range(layer.experts))
        dw1, dw2 = layer.reference(its, [self.expert])[3:]
        self.wanted = {
            "logits": {"out": out, "dx": dx, "dlogits": dlogits, "dw1": dw1, "dw2": dw2},
            # Of a rounded router other tokens may come to this expert.
            "router": {"out": out, "dx": dx + dlogits @ layer.router.float()},
            "rows": {"out": out, "dx": dx, "dw1": dw1, "dw2": dw2}}
        self.rows = layer.in_order.row_of_choice[self.tokens]

    def of_tokens(self, tensor, source):
        """What it has of the tokens: of rows, the sums."""
        return tensor[self.rows].float().sum(1) if source == "rows" else tensor[self.tokens]

    def results(self, contestant, source, calls):
        """[(name in `wanted`, the part of what it computes)]."""
        found = []
        if calls:
            found.append(("out", self.of_tokens(contestant.forward(source), source)))
        if "step" in calls:
            out, dx, dstart, dw1, dw2 = contestant.step(source)
            found += [("out", self.of_tokens(out, source)), ("dx", self.of_tokens(dx, source))]
            if source == "logits":
                found.append(("dlogits", dstart[self.tokens]))
            if source != "router":
                found += [("dw2", dw2[self.expert]),
                          ("dw1", contestant.made.gates_first(dw1[self.expert]))]
        return found

    def require(self, contestant, source, calls):
        """Raises where something differs."""
        for name, got in self.results(contestant, source, calls):
            want = self.wanted[source][name]
            apart = float((got.float() - want).norm() / want.norm().clamp_min(1e-30))
            if not apart <= MOST_DIFFERENCE:
                raise RuntimeError(f"{name} from {source} differs from plain fp32 by {apart:.3g} "
                                   "of its norm")


def memory_of(contestant, source):
    """(bytes that live from forward to backward, out among them; the most of a step), beyond what
    lived before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = []
    contestant.step(source, lambda: kept.append(torch.cuda.memory_allocated() - before))
    torch.cuda.synchronize()
    return kept[0], torch.cuda.max_memory_allocated() - before


class Timer:
    """Times of calls on the GPU. Before each the GPU multiplies dense matrices, so that the host is
    ahead, the clock is that of a long run and L2 holds nothing of the case."""

    def __init__(self, device):
        self.on_gpu, self.ahead, self.state = device == "cuda", {}, {}
        if self.on_gpu:
            self.dense = [torch.randn(AHEAD_SIDE, AHEAD_SIDE, device="cuda", dtype=torch.bfloat16)
                          for _ in range(3)]

    def us(self, name, call):
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return 1e6 * (time.perf_counter() - start)
        while self.ahead.setdefault(name, AHEAD) <= MOST_AHEAD:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(self.ahead[name]):
                torch.mm(*self.dense[:2], out=self.dense[2])
            start.record()
            call()
            stop.record()
            late = start.query()
            if name not in self.state:
                self.look(name)
            stop.synchronize()
            if not late:
                return 1000 * start.elapsed_time(stop)
            self.ahead[name] *= 2
        raise RuntimeError(f"{name} waits for the GPU")

    def look(self, name):
        """The clock and the power while the GPU works, where its driver can be asked."""
        try:
            self.state[name] = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1000
        except Exception:  # pynvml is no part of torch
            pass


def time_calls(calls, repeat, timer):
    """{name: [us]} of calls in turns."""
    samples = {name: [] for name in calls}
    timer.state.clear()
    for _ in range(repeat):
        for name, call in calls.items():
            samples[name].append(timer.us(name, call))
    return samples


def contestants_of(layer, options, timer, left_out):
    """{name: Contestant}; why a peer cannot run, is wrong or cannot be timed is put into
    `left_out`."""
    found, check = {}, Check(layer)
    for name in ("cadre", *options.peers):
        begun = time.monotonic()
        try:
            contestant = Contestant(moe_layers.CONTESTANTS[name], layer)
            for source in options.sources:
                mine = contestant.among(options.calls, source)
                check.require(contestant, source, mine)
                for call in mine:
                    timer.us(name, contestant.call(call, source))
        except Exception as error:
            if name == "cadre":
                raise
            kind = "cannot be imported: " if isinstance(error, ImportError) else ""
            left_out[name] = (kind + " ".join(str(error).split()))[:300]
            print(f"  {name} left out: {left_out[name]}", flush=True)
            continue
        print(f"  {name} ready in {time.monotonic() - begun:.1f} s", flush=True)
        found[name] = contestant
    return found


def row_of(samples, contestants, call, source, timer):
    row = {"call": call, "from": source}
    for key, share in (("us", 0.5), ("us_p10", 0.1), ("us_p90", 0.9)):
        row[key] = {name: round(beside.quantile(us, share), 3) for name, us in samples.items()}
    row["speed_of_peer"] = {
        name: round(beside.quantile([b / a for a, b in zip(samples["cadre"], us)], 0.5), 3)
        for name, us in samples.items() if name != "cadre"}
    if timer.state:
        for key, values in zip(("sm_mhz", "watts"), zip(*(timer.state[name] for name in samples))):
            row[key] = dict(zip(samples, values))
    if call == "step" and timer.on_gpu:
        memory = {name: memory_of(contestants[name], source) for name in samples}
        row["kept_bytes"] = {name: kept for name, (kept, _) in memory.items()}
        row["peak_bytes"] = {name: peak for name, (_, peak) in memory.items()}
    return row


def shown(row):
    """A line of the table."""
    names = [name for name in moe_layers.CONTESTANTS if name in row["us"]]

    def cells(of, scale, form):
        return "  ".join(f"{name} {of[name] * scale:{form}}" for name in names if name in of)

    text = (f"{row.get('layer') or row['problem']:14} {row['routing']:8} {row['call']:7} from "
            f"{row['from']}: ms {cells(row['us'], 1e-3, '.3f')} | speed over "
            f"{cells(row['speed_of_peer'], 1, '.3f')}")
    for key in ("kept_bytes", "peak_bytes"):
        if key in row:
            text += f" | {key.split('_')[0]} MiB {cells(row[key], 2 ** -20, '.0f')}"
    return text + (f" | MHz {cells(row['sm_mhz'], 1, '.0f')}" if "sm_mhz" in row else "")


def rows_of(line, routing, options, timer):
    """The rows of one layer, as they are measured."""
    problem, name = line
    sizes = sizes_of(problem)
    layer = moe_layers.Layer(sizes, weights_of(routing, sizes["E"], options.seed), options.seed,
                             options.device)
    print(f"{name or problem}, {routing}", flush=True)
    left_out = {}
    contestants = contestants_of(layer, options, timer, left_out)
    for source in options.sources:
        for call in options.calls:
            calls = {peer: contestant.call(call, source)
                     for peer, contestant in contestants.items()
                     if contestant.among([call], source)}
            samples = time_calls(calls, options.repeat, timer)
            yield ({"problem": problem, "routing": routing} | ({"layer": name} if name else {})
                   | row_of(samples, contestants, call, source, timer)
                   | ({"left_out": left_out} if left_out else {}))


def record(cases, options):
    machine = "the CPU"
    if options.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        machine = f"{gpu.name}, {gpu.multi_processor_count} SMs"
    versions = [f"torch {torch.__version__}"] + [
        f"{name} {module.__version__}" for name, module in sys.modules.items()
        if name in ("sonicmoe", "quack", "cutlass", "triton") and hasattr(module, "__version__")]
    command = [pathlib.Path(word).name if word.startswith("/") else word for word in sys.argv]
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"command": shlex.join([pathlib.Path(command[0]).name, *command[1:]]),
            "machine": machine, "date": now, "commit": options.commit or beside.commit(),
            "versions": ", ".join(versions), "cases": cases}


def words(known):
    def parse(text):
        found = text.split(",")
        if any(word not in known for word in found):
            raise argparse.ArgumentTypeError(f"'{text}', must be of {', '.join(known)}, by commas")
        return found
    return parse


def add_run_options(parser, what):
    """How long it is timed, where, and what becomes of it; in rows of a `what` each."""
    parser.add_argument("--repeat", type=int, default=15, help="calls of each contestant")
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help=f"no {what} is begun, and no row measured, after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="that the package was built from; else this file's")
    parser.add_argument("--json", help="write a record to this file, after each row")


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [name for name in moe_layers.CONTESTANTS if name != "cadre"]
    parser.add_argument("--file", required=True, help="one problem a line; `# layer` behind it")
    parser.add_argument("--layers", type=lambda text: text.split(","), default=[],
                        help="of the file, by commas, in this order; all if left out")
    parser.add_argument("--offsets", default="uniform", help="uniform, zipf:S, gamma:S, by commas")
    parser.add_argument("--calls", type=words(CALLS), default=CALLS, help="forward,step")
    parser.add_argument("--from", dest="sources", type=words(SOURCES), default=SOURCES_OF_LAYERS,
                        help="logits,router; or rows")
    parser.add_argument("--peers", type=words(peers), default=peers, help=",".join(peers))
    add_run_options(parser, "layer")
    return parser.parse_args(arguments)


def main():
    options = options_of(sys.argv[1:])
    until = time.monotonic() + options.seconds
    work = [(line, routing) for line in lines_of(options.file, options.layers)
            for routing in options.offsets.split(",")]
    for (problem, _), routing in work:
        weights_of(routing, sizes_of(problem)["E"], options.seed)
    timer, cases = Timer(options.device), []
    if timer.on_gpu:
        beside.warm()
    for line, routing in work:
        if time.monotonic() > until:
            print(f"{line[1] or line[0]}, {routing}: not begun, {options.seconds:.0f} s are over")
            continue
        for row in rows_of(line, routing, options, timer):
            cases.append(row)
            print(shown(row), flush=True)
            if options.json:
                pathlib.Path(options.json).write_text(
                    json.dumps(record(cases, options), indent=1) + "\n")
            if time.monotonic() > until:
                break
    print("\n".join(digest.ratios(record(cases, options))))


if __name__ == "__main__":
    main()
