#!/usr/bin/env python3
"""Times cadre's products of fp8_tensor (sm90_fp8_rows) beside its own of these codes in fp8_block
and of the decoded operands in bf16, and torch._scaled_grouped_mm of the same codes: one process,
launches interleaved, as torch_grouped_gemm.py, whose record it writes.

  torch_fp8_tensor.py --library build/cuda/bench/libcadre_bench_c.so \\
    --file bench/shapes/h200_fp8_tensor.txt --offsets uniform,gamma:1 --json record.json

Codes and scales are quantised once, before anything is timed. torch takes a scale a row and a scale
a column of the output, which are filled with the expert's: `torch` adds up sums in fp32, as cadre
does, `torch fast` (use_fast_accum) does not. Every peer is compared with cadre.
"""
import torch

import cadre_c
import torch_fp8_block as fp8
import torch_grouped_gemm as peers

ONLY = "sm90_fp8_rows"


class Problem(fp8.Problem):
    """`grouped_gemm fprop R=.. N=.. K=.. E=.. format=fp8_tensor`; of dgrad both operands in e4m3,
    since torch multiplies no other."""

    format, fprop, dgrad = "fp8_tensor", {"format": "fp8_tensor"}, {
        "dy": "fp8_tensor", "w": "fp8_tensor", "rhs_major": "column"}

    def in_blocks(self):
        """The same product of codes with scales of blocks."""
        words = {"fprop": fp8.Problem.fprop, "dgrad": fp8.Problem.dgrad}[self.which]
        sizes = f"R={self.rows} N={self.n} K={self.k} E={self.experts}"
        return " ".join([f"grouped_gemm {self.which} {sizes}",
                         *(f"{name}={value}" for name, value in words.items())])


def quantised(x):
    """Codes of all of x and their one scale."""
    scale = x.float().abs().amax().clamp_min(1e-30) / fp8.LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn).contiguous(), scale


class Case:
    """One set of operands on the GPU; w as [E, columns of the output, contraction]."""

    def __init__(self, problem, counts, seed):
        generator = torch.Generator(fp8.DEVICE).manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=fp8.DEVICE,
                               dtype=torch.bfloat16)

        def experts(matrices):
            parts = [quantised(matrix) if matrix.numel() else (
                matrix.to(torch.float8_e4m3fn), matrix.new_ones((), dtype=torch.float32))
                for matrix in matrices]  # one by one: less memory
            return [part[0] for part in parts], torch.stack([part[1] for part in parts])

        self.problem, self.counts, self.live = problem, counts, sum(counts)
        rows = normal(problem.rows, problem.depth)
        codes, self.scales = experts(rows[:self.live].split(counts))
        tail = rows[self.live:].to(torch.float8_e4m3fn)
        self.codes = torch.cat([part.view(torch.uint8) for part in (*codes, tail)]).view(
            torch.float8_e4m3fn)
        weights, self.w_scales = experts(
            normal(problem.cols, problem.depth) for _ in range(problem.experts))
        self.w = torch.stack(weights)
        self.out = torch.zeros(problem.rows, problem.cols, device=fp8.DEVICE,
                               dtype=torch.bfloat16)
        self.ends = torch.tensor(counts, device=fp8.DEVICE).cumsum(0).to(torch.int32)
        self.offsets = torch.cat([self.ends.new_zeros(1), self.ends])

    def scales_of_rows(self):
        """[R], of the expert of each row."""
        of_rows = self.scales.new_ones(self.problem.rows)
        sizes = torch.tensor(self.counts, device=fp8.DEVICE)
        of_rows[:self.live] = self.scales.repeat_interleave(sizes)
        return of_rows

    def bytes(self):
        return sum(t.numel() * t.element_size() for t in (self.codes, self.w, self.out))

    def live_part(self, out):
        return out[:self.live]


def cadre_call(gemm, case):
    return fp8.call_of(gemm, case, (case.codes, case.w), (case.scales, case.w_scales))


def blocks_call(gemm, case):
    """Every block of an expert has the expert's scale."""
    across, blocks = (fp8.ceil_div(size, fp8.BLOCK) for size in (case.problem.cols,
                                                                 case.problem.depth))
    shape = (across, blocks) if case.problem.which == "fprop" else (blocks, across)
    of_rows = fp8.columns(case.scales_of_rows()[:, None].expand(-1, blocks))
    of_w = case.w_scales[:, None, None].expand(-1, *shape).contiguous()
    return fp8.call_of(gemm, case, (case.codes, case.w), (of_rows, of_w))


def bf16_call(gemm, case):
    x = (case.codes.float() * case.scales_of_rows()[:, None]).to(torch.bfloat16)
    w = torch.stack([(codes.float() * scale).to(torch.bfloat16)
                     for codes, scale in zip(case.w, case.w_scales)])
    w = w if case.problem.which == "fprop" else w.transpose(1, 2).contiguous()
    return fp8.call_of(gemm, case, (x, w), ())


def torch_call(case, fast):
    of_rows = case.scales_of_rows()
    of_columns = case.w_scales[:, None].expand(-1, case.problem.cols).contiguous()
    return lambda: torch._scaled_grouped_mm(
        case.codes, case.w.transpose(1, 2), of_rows, of_columns, offs=case.ends,
        out_dtype=torch.bfloat16, use_fast_accum=fast)


def contestants_of(gemms, cases, left_out):
    """{name: [a call for each copy]}, cadre first; why others fail is put into `left_out`. `gemms`
    are cadre's: of experts' scales, of blocks' scales and of bf16."""
    gemm, in_blocks, plain = gemms
    calls = {"cadre": [cadre_call(gemm, case) for case in cases]}
    want = cases[0].live_part(calls["cadre"][0]()).float()
    others = [("cadre fp8_block", lambda case: blocks_call(in_blocks, case)),
              ("cadre bf16", lambda case: bf16_call(plain, case)),
              ("torch", lambda case: torch_call(case, False)),
              ("torch fast", lambda case: torch_call(case, True))]
    return calls | peers.agreeing(others, cases, want, left_out)


def measure(library, line, routing, options):
    text, _, layer = (part.strip() for part in line.partition("#"))
    problem = Problem(text)
    gemms = (cadre_c.Gemm(library, problem.text, fp8.DEVICE, ONLY),
             cadre_c.Gemm(library, problem.in_blocks(), fp8.DEVICE, ONLY),
             cadre_c.Gemm(library, problem.plain(), fp8.DEVICE))
    counts = peers.draw_counts(problem, routing, options.seed)
    cases = peers.copies_of(Case, problem, counts, options.seed)
    left_out = {}
    samples = peers.time_calls(contestants_of(gemms, cases, left_out), options.repeat, options.load)
    return peers.row_of(problem, samples, cases[0].live,
                        {"routing": routing, "layer": layer, "plan": gemms[0].name,
                         "left_out": left_out})


def main():
    options = peers.parser_of(__doc__).parse_args()
    library = cadre_c.Library(options.library)
    peers.measure_file(options, lambda line, routing: measure(library, line, routing, options))


if __name__ == "__main__":
    main()
