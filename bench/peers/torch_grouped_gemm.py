#!/usr/bin/env python3
"""Times cadre's grouped_gemm beside torch._grouped_mm, and DeepGEMM where it can be imported: one
process, the same operands, launches interleaved, device time by events, copies that exceed L2.
Writes a record like that of `cadre bench --json`.

  torch_grouped_gemm.py --library build/cuda/bench/libcadre_bench_c.so \\
    --file bench/shapes/h200_grouped_gemm.txt --offsets uniform,gamma:1 --json record.json

Every peer is compared with cadre first: ||got - want|| / ||want||, over live rows. A peer
that fails or differs is left out, and the output says so. --beside NAME=LIBRARY adds another build
of cadre, as it was before a change for example; its bits must be the same.
"""
import argparse
import datetime
import json
import pathlib
import random
import re
import shlex
import subprocess
import sys
import time

import torch

import cadre_c

try:
    import deep_gemm
    WHY_NO_DEEPGEMM = ""
except Exception as error:  # a build for another torch or CUDA fails in many ways
    deep_gemm = None
    WHY_NO_DEEPGEMM = f"cannot be imported: {' '.join(str(error).split())[:200]}"

ROTATED_BYTES = 192 << 20  # that the copies of a case exceed
MOST_COPIES = 8
MOST_DIFFERENCE = 0.02
CYCLES_TO_QUEUE = 300_000  # of the GPU, in which the host queues one launch at the slowest
WARM_SECONDS = 2  # of load before anything is timed: the clock then is a long run's
USUAL_ALIGNMENT = 128  # rows to which DeepGEMM wants every expert padded, unless it says otherwise


class Problem:
    """What this file needs to know of `grouped_gemm fprop R=.. N=.. K=.. E=.. format=bf16`."""

    def __init__(self, text):
        words = text.split()
        values = dict(word.split("=") for word in words[2:])
        if words[0] != "grouped_gemm" or values.get("format") != "bf16" or set(values) - {
                "R", "N", "K", "E", "format", "out", "accumulate"}:
            raise SystemExit(f"'{text}': this file times bf16 grouped_gemm without epilogue")
        self.text, self.which = text, words[1]
        self.rows, self.n, self.k, self.experts = (int(values[name]) for name in "RNKE")
        self.out = torch.float32 if values.get("out") == "f32" else torch.bfloat16
        self.accumulate = values.get("accumulate") == "yes"

    def shapes(self):
        """Of lhs, rhs and out."""
        x, dy = (self.rows, self.k), (self.rows, self.n)
        w = (self.experts, self.n, self.k)
        return {"fprop": (x, w, dy), "dgrad": (dy, w, x), "wgrad": (dy, x, w)}[self.which]

    def flops(self, live):
        return 2.0 * live * self.n * self.k


class Case:
    """One set of operands on the GPU."""

    def __init__(self, problem, counts, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        left, right, out = problem.shapes()

        def normal(shape):
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.problem, self.counts = problem, counts
        self.lhs, self.rhs = normal(left), normal(right)
        self.out = torch.zeros(out, device="cuda", dtype=problem.out)
        self.ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int32, device="cuda"), self.ends])
        self.live = sum(counts)

    def bytes(self):
        return sum(t.numel() * t.element_size() for t in (self.lhs, self.rhs, self.out))

    def live_part(self, out):
        return out if self.problem.which == "wgrad" else out[:self.live]


def weights_of(routing, experts, draw):
    """How likely each expert is chosen; what is random of it by `draw`, a random.Random."""
    if routing == "uniform":
        return [1.0] * experts
    if re.fullmatch(r"gamma:[\d.]+", routing):
        return [draw.gammavariate(float(routing[6:]), 1) for _ in range(experts)]
    if re.fullmatch(r"zipf:[\d.]+", routing):
        weights = [(i + 1) ** -float(routing[5:]) for i in range(experts)]
        draw.shuffle(weights)
        return weights
    raise SystemExit(f"--offsets: '{routing}', must be uniform, zipf:S or gamma:S")


def draw_counts(problem, routing, seed):
    draw = random.Random(seed)
    weights = weights_of(routing, problem.experts, draw)
    counts = [0] * problem.experts
    for expert in draw.choices(range(problem.experts), weights, k=problem.rows):
        counts[expert] += 1
    return counts


def cadre_call(gemm, case):
    workspace = torch.empty(max(gemm.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
    args = cadre_c.Args(case.lhs.data_ptr(), case.rhs.data_ptr(), case.offsets.data_ptr(),
                        case.out.data_ptr(), workspace.data_ptr())

    def call():
        gemm.run(args, torch.cuda.current_stream().cuda_stream)
        return case.out

    call.keep = workspace
    return call


def torch_call(case):
    """None where torch has no such product."""
    which = case.problem.which
    if case.problem.accumulate or case.problem.out != torch.bfloat16:
        return None
    if which == "fprop":
        return lambda: torch._grouped_mm(case.lhs, case.rhs.transpose(1, 2), offs=case.ends)
    if which == "dgrad":
        return lambda: torch._grouped_mm(case.lhs, case.rhs, offs=case.ends)
    return lambda: torch._grouped_mm(case.lhs.t(), case.rhs, offs=case.ends)


def deepgemm_alignment():
    """Rows that every expert is padded to: what it asks for, set where it can be set."""
    for name in ("get_theoretical_mk_alignment_for_contiguous_layout",
                 "get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout"):
        if hasattr(deep_gemm, name):
            rows = int(getattr(deep_gemm, name)())
            break
    else:
        rows = USUAL_ALIGNMENT
    if hasattr(deep_gemm, "set_mk_alignment_for_contiguous_layout"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(rows)
    return rows


def padded_counts(counts, alignment):
    return [-(-count // alignment) * alignment for count in counts]


def padded_rows(counts, alignment):
    """Where DeepGEMM wants each row, and the expert of each padded row (-1: none); on the host."""
    places, owners = [], []
    for expert, (count, whole) in enumerate(zip(counts, padded_counts(counts, alignment))):
        places += range(len(owners), len(owners) + count)
        owners += [expert] * count + [-1] * (whole - count)
    return places, owners


def deepgemm_call(case):
    """None where DeepGEMM has no such product. Its weight gradient adds to fp32. Rows are padded
    here, so no launch that is timed does it."""
    which = case.problem.which
    if deep_gemm is None or (which == "wgrad") != (case.problem.out == torch.float32):
        return None
    if which == "wgrad" and not case.problem.accumulate:
        return None
    alignment = deepgemm_alignment()
    if which == "wgrad":
        alignment = max(alignment, USUAL_ALIGNMENT)  # that product has no other on Hopper
    places, owners = (torch.tensor(rows, dtype=torch.int32, device="cuda")
                      for rows in padded_rows(case.counts, alignment))

    def padded(rows):
        whole = rows.new_zeros(len(owners), rows.shape[1])
        whole[places.long()] = rows[:case.live]
        return whole

    lhs = padded(case.lhs)
    if which == "wgrad":
        rhs = padded(case.rhs)
        sizes = padded_counts(case.counts, alignment)
        on_device = torch.tensor(sizes, dtype=torch.int32, device="cuda")
        out = torch.zeros_like(case.out)

        def accumulate():
            deep_gemm.k_grouped_bf16_gemm_tn_contiguous(lhs, rhs, out, sizes, on_device, out)
            return out

        return accumulate
    out = lhs.new_zeros(len(owners), case.out.shape[1])
    product = (deep_gemm.m_grouped_bf16_gemm_nt_contiguous
               if which == "fprop" else deep_gemm.m_grouped_bf16_gemm_nn_contiguous)

    def multiply():
        product(lhs, case.rhs, out, owners)
        return out

    multiply.rows = places.long()
    return multiply


def difference(case, call, want):
    got = call()
    rows = getattr(call, "rows", None)
    got = got[rows] if rows is not None else case.live_part(got)
    return float((got.float() - want).norm() / want.norm().clamp_min(1e-30))


def other_build_call(gemm, want):
    """Makes calls of another build of cadre; the first one's bits must be those of `want`."""

    def make(case):
        call = cadre_call(gemm, case)
        if not make.compared:
            make.compared = True
            case.out.zero_()
            if not torch.equal(case.live_part(call()), want):
                raise RuntimeError("has other bits than cadre")
            case.out.zero_()
        return call

    make.compared = False
    return make


def agreeing(peers, cases, want, left_out):
    """{name: [a call for each copy]} of the peers, pairs of a name and what makes a call of a case,
    that take these cases and come close to `want`; why others do not is put into `left_out`."""
    calls = {}
    for name, make in peers:
        try:
            peer = [make(case) for case in cases]
            if peer[0] is None:
                continue
            apart = difference(cases[0], peer[0], want)
            if not apart <= MOST_DIFFERENCE:
                raise RuntimeError(f"differs from cadre by {apart:.3g} of its norm")
        except Exception as error:  # a peer that cannot run is no reason to lose the others
            left_out[name] = " ".join(str(error).split())[:200]
            print(f"  {name} left out: {left_out[name]}")
            continue
        calls[name] = peer
    return calls


def contestants_of(gemms, cases, left_out):
    """{name: [a call for each copy]}, cadre first; why others fail or are wrong is put into
    `left_out`. `gemms` are cadre's own, by name: another build's after the first."""
    first = cases[0]
    calls = {"cadre": [cadre_call(gemms["cadre"], case) for case in cases]}
    bits = first.live_part(calls["cadre"][0]()).clone()  # onto zeros, where it adds
    want = bits.float()
    peers = [(name, other_build_call(gemm, bits)) for name, gemm in gemms.items()
             if name != "cadre"]
    peers += [("torch", torch_call), ("deepgemm", deepgemm_call)]
    return calls | agreeing(peers, cases, want, left_out)


def time_calls(calls, repeat, load=0.0):
    """{name: [us]}, of launches that alternate. Each takes the next copy of the case, so that none
    finds in the cache what the one before has read. The GPU spins until all of them are queued.
    Before stand so many seconds of the same launches, and all copies once at least."""
    copies = len(next(iter(calls.values())))
    end, is_first = time.monotonic() + load, True
    while is_first or time.monotonic() < end:
        for copy in range(copies):
            for peer in calls.values():
                peer[copy]()
        torch.cuda.synchronize()
        is_first = False
    events, launch = {name: [] for name in calls}, 0
    torch.cuda._sleep(repeat * len(calls) * CYCLES_TO_QUEUE)
    for _ in range(repeat):
        for name, peer in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            peer[launch % copies]()
            stop.record()
            launch += 1
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: [1000 * a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def warm():
    """Dense products until the clock is that of a long run."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    start = time.monotonic()
    while time.monotonic() - start < WARM_SECONDS:
        for _ in range(50):
            torch.mm(a, b)
        torch.cuda.synchronize()


def quantile(samples, share):
    ordered, place = sorted(samples), share * (len(samples) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def copies_of(case, problem, counts, seed):
    """Cases of one problem with other numbers, so many that they exceed ROTATED_BYTES."""
    first = case(problem, counts, seed)
    copies = min(MOST_COPIES, -(-ROTATED_BYTES // first.bytes()))
    return [first, *(case(problem, counts, seed + i) for i in range(1, copies))]


def measure(libraries, line, routing, options):
    text, _, layer = (part.strip() for part in line.partition("#"))
    problem = Problem(text)
    gemms = {name: cadre_c.Gemm(library, problem.text, "cuda")
             for name, library in libraries.items()}
    counts = draw_counts(problem, routing, options.seed)
    cases = copies_of(Case, problem, counts, options.seed)
    left_out = {}
    calls = contestants_of(gemms, cases, left_out)
    samples = time_calls(calls, options.repeat, options.load)
    return row_of(problem, samples, cases[0].live,
                  {"routing": routing, "layer": layer, "plan": gemms["cadre"].name,
                   "left_out": left_out})


def row_of(problem, samples, live, facts):
    """A case of the record, of times in us by name; of `facts` those that say something."""
    layer, routing, plan = facts["layer"], facts["routing"], facts["plan"]
    row = {"problem": problem.text, "routing": routing} | ({"layer": layer} if layer else {})
    for key, share in (("us", 0.5), ("us_p10", 0.1), ("us_p90", 0.9)):
        row[key] = {name: round(quantile(us, share), 3) for name, us in samples.items()}
    row["speed_of_peer"] = {
        name: round(quantile([b / a for a, b in zip(samples["cadre"], us)], 0.5), 3)
        for name, us in samples.items() if name != "cadre"}
    row["flops"] = problem.flops(live)
    row["plan"] = plan
    if facts["left_out"]:
        row["left_out"] = facts["left_out"]
    rates = "  ".join(f"{name} {row['flops'] / us / 1e6:.0f}" for name, us in row["us"].items())
    print(f"{layer or problem.text}  {problem.which}  {routing}  TFLOP/s: {rates}", flush=True)
    return row


def commit():
    folder = pathlib.Path(__file__).parent

    def git(*words):
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout

    return (git("rev-parse", "--short=12", "HEAD").strip() or "unknown") + (
        "-dirty" if git("status", "--porcelain") else "")


def record(cases, options):
    gpu = torch.cuda.get_device_properties(0)
    versions = f"torch {torch.__version__}" + (
        f", deep_gemm {getattr(deep_gemm, '__version__', '')}" if deep_gemm else "")
    absent = {} if deep_gemm else {"deepgemm": WHY_NO_DEEPGEMM}
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
            "machine": f"{gpu.name}, {gpu.multi_processor_count} SMs", "date": now,
            "commit": options.commit or commit(), "versions": versions, "absent": absent,
            "cases": cases}


def parser_of(description):
    """The options that every script of this kind has."""
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libcadre_bench_c.so of a CUDA build")
    parser.add_argument("--file", required=True, help="one problem a line; `# layer` behind it")
    parser.add_argument("--offsets", default="uniform",
                        help="uniform, zipf:S, gamma:S, several by commas")
    parser.add_argument("--repeat", type=int, default=31, help="launches of each contestant")
    parser.add_argument("--load", type=float, default=0.0,
                        help="seconds of launches before a case is timed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", help="that the library was built from; else this file's")
    parser.add_argument("--json", help="write a record to this file")
    return parser


def measure_file(options, measure):
    """The record of the file's problems, each with every routing, by `measure(line, routing)`."""
    warm()
    cases = []
    for line in pathlib.Path(options.file).read_text().splitlines():
        if not line.partition("#")[0].strip():
            continue
        for routing in options.offsets.split(","):
            cases.append(measure(line, routing))
            if options.json:  # after each, so that whoever stops this keeps what was measured
                pathlib.Path(options.json).write_text(
                    json.dumps(record(cases, options), indent=1) + "\n")


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=LIBRARY",
                        help="another build of cadre, as a peer of that name")
    options = parser.parse_args()
    libraries = {"cadre": cadre_c.Library(options.library)}
    for name, path in (words.split("=", 1) for words in options.beside):
        libraries[name] = cadre_c.Library(path)
    if deep_gemm is None:
        print(f"deepgemm {WHY_NO_DEEPGEMM}")
    measure_file(options, lambda line, routing: measure(libraries, line, routing, options))


if __name__ == "__main__":
    main()
