#!/usr/bin/env python3
"""Times Cadre through its PyTorch door beside torch.nn.functional.grouped_mm: one process, the same
operands, launches interleaved, device time by events, copies that exceed L2. Writes a
record like that of `cadre bench --json`.

  torch_door.py --file bench/shapes/h200_grouped_gemm.txt --offsets uniform,gamma:1 \\
    --host --json record.json

fprop is torch.ops.cadre.grouped_linear, dgrad and wgrad are grouped_linear_backward asked for that
gradient alone; torch multiplies the same operands. Both are compared with plain products first.
--host adds what the host needs for forward and backward of an eager GroupedLinear. PYTHONPATH names
the folder of the package cadre.
"""
import argparse
import functools
import json
import pathlib
import sys

import torch

import cadre
import torch_grouped_gemm as beside
from door_host_time import autograd_samples_us, host_samples_us

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import digest  # noqa: E402

OPS = torch.ops.cadre
WANTS = {"fprop": (False, False, False, False), "dgrad": (True, False, False, False),
         "wgrad": (False, True, False, False)}

# (what, arguments of GroupedLinear, rows); small, so that the GPU waits for the host.
HOST_LAYERS = [
    ("packed", {"num_gemms": 8, "in_features": 1024, "out_features": 1024,
                "single_grouped_weight": True, "single_grouped_bias": True}, 512),
    ("packed, no bias", {"num_gemms": 8, "in_features": 1024, "out_features": 1024,
                         "single_grouped_weight": True, "bias": False}, 512),
    ("packed, main_grad", {"num_gemms": 8, "in_features": 1024, "out_features": 1024,
                           "single_grouped_weight": True, "single_grouped_bias": True,
                           "fuse_wgrad_accumulation": True}, 512),
    ("discrete, main_grad", {"num_gemms": 8, "in_features": 1024, "out_features": 1024,
                             "fuse_wgrad_accumulation": True}, 512),
    ("discrete", {"num_gemms": 8, "in_features": 1024, "out_features": 1024}, 512),
    ("discrete", {"num_gemms": 64, "in_features": 256, "out_features": 256}, 512),
]
HOST_ROUNDS, HOST_BURSTS = 60, 10  # rounds of the whole row in a burst


def door_call(case):
    """fprop multiplies x with the weights, dgrad dy with them, wgrad dy with x."""
    problem, none = case.problem, torch.empty(0, dtype=torch.uint8, device="cuda")
    which, wants, offsets = problem.which, WANTS[problem.which], case.offsets
    if which == "fprop":
        return lambda: OPS.grouped_linear(case.lhs, offsets, [case.rhs], [])[0]
    # The passes read shapes of what they do not multiply, no content; bf16 keeps nothing else.
    if which == "dgrad":
        x = case.lhs.new_empty(problem.rows, problem.k)
        return lambda: OPS.grouped_linear_backward(case.lhs, x, none, offsets, [case.rhs], [], None,
                                                   wants=wants)[0]
    weight = [case.lhs.new_empty(problem.experts, problem.n, problem.k)]
    return lambda: OPS.grouped_linear_backward(case.lhs, case.rhs, none, offsets, weight, [], None,
                                               wants=wants)[1][0]


def plain_product(case):
    """Of the live rows, expert by expert in fp32."""
    ends, starts = case.ends.tolist(), [0, *case.ends.tolist()]
    rows = [slice(start, end) for start, end in zip(starts, ends)]
    if case.problem.which == "wgrad":
        return torch.stack([case.lhs[part].float().t() @ case.rhs[part].float() for part in rows])
    weight = case.rhs.transpose(1, 2) if case.problem.which == "fprop" else case.rhs
    return torch.cat([case.lhs[part].float() @ w.float() for part, w in zip(rows, weight)])


def contestants_of(cases):
    """({name: [a call for each copy]}, why others fail or are wrong)."""
    calls, left_out = {}, {}
    want = plain_product(cases[0])
    for name, make in (("cadre", door_call), ("torch", beside.torch_call)):
        try:
            peer = [make(case) for case in cases]
            apart = beside.difference(cases[0], peer[0], want)
            if not apart <= beside.MOST_DIFFERENCE:
                raise RuntimeError(f"differs from plain products by {apart:.3g} of their norm")
        except Exception as error:
            if name == "cadre":
                raise
            left_out[name] = " ".join(str(error).split())[:200]
            print(f"  {name} left out: {left_out[name]}")
            continue
        calls[name] = peer
    return calls, left_out


def measure(line, routing, options):
    text, _, layer = (part.strip() for part in line.partition("#"))
    problem = beside.Problem(text)
    if problem.accumulate or problem.out != torch.bfloat16:
        raise SystemExit(f"'{text}': this file times products in bf16 that add to nothing")
    counts = beside.draw_counts(problem, routing, options.seed)
    cases = beside.copies_of(beside.Case, problem, counts, options.seed)
    with torch.no_grad():
        calls, left_out = contestants_of(cases)
        samples = beside.time_calls(calls, options.repeat)
    row = {"problem": problem.text, "routing": routing} | ({"layer": layer} if layer else {})
    for key, share in (("us", 0.5), ("us_p10", 0.1), ("us_p90", 0.9)):
        row[key] = {name: round(beside.quantile(us, share), 3) for name, us in samples.items()}
    row["speed_of_peer"] = {
        name: round(beside.quantile([b / a for a, b in zip(samples["cadre"], us)], 0.5), 3)
        for name, us in samples.items() if name != "cadre"}
    row["flops"] = problem.flops(cases[0].live)
    if left_out:
        row["left_out"] = left_out
    rates = "  ".join(f"{name} {row['flops'] / us / 1e6:.0f}" for name, us in row["us"].items())
    print(f"{layer or text}  {problem.which}  {routing}  TFLOP/s: {rates}", flush=True)
    return row


def host_contestants():
    """(problem, layer, a burst of samples) of every line of HOST_LAYERS, and what autograd alone
    needs for the parameters of discrete ones."""
    for what, arguments, rows in HOST_LAYERS:
        layers = [cadre.GroupedLinear(**arguments, params_dtype=torch.bfloat16, device="cuda")
                  for _ in range(8)]
        for layer in layers:
            for p in layer.parameters():
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        experts, k, n = layers[0].num_gemms, layers[0].in_features, layers[0].out_features
        x, dy = (torch.randn(rows, width, dtype=torch.bfloat16, device="cuda") for width in (k, n))
        counts = torch.full((experts,), rows // experts, device="cuda")
        problem = f"GroupedLinear R={rows} N={n} K={k} E={experts} recipe=bf16"
        yield problem, what, functools.partial(
            host_samples_us, layers, x.requires_grad_(), dy, counts, HOST_ROUNDS)
        if what == "discrete":
            yield problem, "torch.stack of these", functools.partial(
                autograd_samples_us, layers, HOST_ROUNDS)


def host_rows():
    """Bursts in turns: for seconds at a time a machine's cores may be half as fast."""
    contestants = list(host_contestants())
    samples = [{"forward": [], "backward": []} for _ in contestants]
    for _ in range(HOST_BURSTS):
        for (_, _, burst), mine in zip(contestants, samples):
            for call, us in burst().items():
                mine[call] += us
    found = []
    for (problem, what, _), mine in zip(contestants, samples):
        for call, us in mine.items():
            row = {"problem": problem, "layer": f"{what}, of 8 in a row", "call": call}
            for key, share in (("host_us", 0.5), ("host_us_p10", 0.1), ("host_us_p90", 0.9)):
                row[key] = round(beside.quantile(us, share), 3)
            found.append(row | {"calls": len(us)})
            print(f"{problem}, {what}  {call}: {row['host_us']:.1f} us", flush=True)
    return found


def write(cases, options):
    """After each case, so that whoever stops this keeps what was measured."""
    made = beside.record(cases, options) | {"versions": f"torch {torch.__version__}"}
    made["command"] = " ".join(pathlib.Path(word).name if word.startswith("/") else word
                               for word in made["command"].split())
    del made["absent"]
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(made, indent=1) + "\n")
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", help="one problem a line; `# layer` behind it")
    parser.add_argument("--offsets", default="uniform",
                        help="uniform, zipf:S, gamma:S, several by commas")
    parser.add_argument("--host", action="store_true", help="host time of an eager GroupedLinear")
    parser.add_argument("--repeat", type=int, default=31, help="launches of each contestant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", help="that the package was built from; else this file's")
    parser.add_argument("--json", "--out", help="write a record to this file")
    options = parser.parse_args()
    if not options.file and not options.host:
        parser.error("nothing to do; give --file, --host or both")
    cases = []
    if options.host:
        cases += host_rows()
        write(cases, options)
    for line in pathlib.Path(options.file).read_text().splitlines() if options.file else []:
        if not line.partition("#")[0].strip():
            continue
        for routing in options.offsets.split(","):
            cases.append(measure(line, routing, options))
            write(cases, options)
    print("\n".join(digest.ratios(write(cases, options))))


if __name__ == "__main__":
    main()
