#!/usr/bin/env python3
"""Times cadre's products of bf16 rows and packed weights (sm90_packed_rows) beside its own bf16
products of the decoded weights, whose bits it must have: one process, launches interleaved, as
torch_grouped_gemm.py, whose record it writes. Formats without scales of experts: mxfp4, mxfp8.

  torch_packed.py --library build/cuda/bench/libcadre_bench_c.so \\
    --file bench/shapes/h200_packed.txt --offsets uniform --json record.json

Codes and scales are drawn, not quantised: every code, and scales of 2^-11 to 2^-4, as weights of
models have them. With larger ones decoding takes a step more.
"""
import torch

import cadre_c
import torch_grouped_gemm as peers
from torch_fp8_block import call_of

DEVICE, ONLY = "cuda", "sm90_packed_rows"
BLOCK = 32
ONE = 127  # the code of the scale 1
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # of e2m1


class Problem:
    """`grouped_gemm fprop R=.. N=.. K=.. E=.. x=bf16 w=mxfp4`."""

    accumulate, out, which = False, torch.bfloat16, "fprop"

    def __init__(self, text):
        words = text.split()
        values = dict(word.split("=") for word in words[2:])
        rest = {name: value for name, value in values.items() if name not in "RNKE"}
        self.weights = rest.pop("w", None)
        if words[:2] != ["grouped_gemm", "fprop"] or rest != {"x": "bf16"} or self.weights not in (
                "mxfp4", "mxfp8"):
            raise SystemExit(f"'{text}': this file times fprop of x=bf16 and w=mxfp4 or w=mxfp8")
        self.text = text
        self.rows, self.n, self.k, self.experts = (int(values[name]) for name in "RNKE")

    def plain(self):
        """The same product of weights in bf16."""
        return self.text.replace(f"w={self.weights}", "w=bf16")

    def flops(self, live):
        return 2.0 * live * self.n * self.k


def drawn(problem, generator):
    """Codes of one expert's weight as they are stored, scales, and the numbers in bf16."""
    four = problem.weights == "mxfp4"

    def codes_below(end, *shape):
        return torch.randint(0, end, shape, generator=generator, device=DEVICE).to(torch.uint8)

    scales = codes_below(8, problem.n, problem.k // BLOCK) + (ONE - 11)
    if four:
        codes = codes_below(256, problem.n, problem.k // 2)
        values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device=DEVICE)
        parts = torch.stack([codes & 15, codes >> 4], -1).flatten(1)  # the first one is the lower
        numbers = values[parts.long()]
    else:
        codes = codes_below(256, problem.n, problem.k)
        codes[(codes & 0x7F) == 0x7F] = 0  # no NaN
        numbers = codes.view(torch.float8_e4m3fn).float()
    factors = torch.exp2(scales.float() - ONE).repeat_interleave(BLOCK, 1)
    return codes, scales, (numbers * factors).to(torch.bfloat16)


class Case:
    """One set of operands on the GPU."""

    def __init__(self, problem, counts, seed):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.problem, self.counts, self.live = problem, counts, sum(counts)
        self.x = torch.randn(problem.rows, problem.k, generator=generator, device=DEVICE,
                             dtype=torch.bfloat16)
        experts = [drawn(problem, generator) for _ in range(problem.experts)]
        self.codes, self.scales, self.w = (torch.stack(part) for part in zip(*experts))
        self.out = torch.zeros(problem.rows, problem.n, device=DEVICE, dtype=torch.bfloat16)
        ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int32, device=DEVICE), ends])

    def bytes(self):
        return sum(t.numel() * t.element_size() for t in (self.codes, self.w, self.x, self.out))

    def live_part(self, out):
        return out[:self.live]


def contestants_of(gemm, plain, cases):
    """{name: [a call for each copy]}, packed weights first; the others have the same bits."""
    none = torch.empty(0, device=DEVICE)
    calls = {
        "cadre": [call_of(gemm, case, (case.x, case.codes), (none, case.scales)) for case in cases],
        "cadre bf16": [call_of(plain, case, (case.x, case.w), ()) for case in cases]}
    first, second = (cases[0].live_part(peer[0]()) for peer in calls.values())
    if not torch.equal(first, second):
        raise RuntimeError(f"{gemm.name} and {plain.name} have other bits")
    return calls


def measure(library, line, routing, options):
    text, _, layer = (part.strip() for part in line.partition("#"))
    problem = Problem(text)
    gemm = cadre_c.Gemm(library, problem.text, DEVICE, ONLY)
    plain = cadre_c.Gemm(library, problem.plain(), DEVICE)
    counts = peers.draw_counts(problem, routing, options.seed)
    cases = peers.copies_of(Case, problem, counts, options.seed)
    samples = peers.time_calls(contestants_of(gemm, plain, cases), options.repeat, options.load)
    return peers.row_of(problem, samples, cases[0].live,
                        {"routing": routing, "layer": f"{layer} {problem.weights}".strip(),
                         "plan": gemm.name, "left_out": {}})


def main():
    options = peers.parser_of(__doc__).parse_args()
    library = cadre_c.Library(options.library)
    peers.measure_file(options, lambda line, routing: measure(library, line, routing, options))


if __name__ == "__main__":
    main()
