#!/usr/bin/env python3
"""Times cadre's products of fp8_block (sm90_fp8_rows) beside its own bf16 products of the decoded
operands, and DeepGEMM's of the same codes where it can be imported: one process, launches
interleaved, as torch_grouped_gemm.py, whose record it writes.

  torch_fp8_block.py --library build/cuda/bench/libcadre_bench_c.so \\
    --file bench/shapes/h200_fp8.txt --offsets uniform,gamma:1 --json record.json

Codes and scales are quantised once, before anything is timed. Every peer is compared with cadre.
"""
import torch

import cadre_c
import torch_grouped_gemm as peers

BLOCK = 128
DEVICE, ONLY = "cuda", "sm90_fp8_rows"
LARGEST = 448.0  # of e4m3


def ceil_div(a, b):
    return -(-a // b)


class Problem:
    """`grouped_gemm fprop R=.. N=.. K=.. E=.. format=fp8_block ...`, its orders as the kernel's."""

    accumulate, out = False, torch.bfloat16
    format, fprop, dgrad = "fp8_block", {"format": "fp8_block", "lhs_scales_major": "column"}, {
        "format": "fp8_block", "rhs_major": "column", "lhs_scales_major": "column"}

    def __init__(self, text):
        words = text.split()
        values = dict(word.split("=") for word in words[2:])
        wanted = {"fprop": self.fprop, "dgrad": self.dgrad}.get(words[1])
        rest = {name: value for name, value in values.items() if name not in "RNKE"}
        if words[0] != "grouped_gemm" or rest != wanted:
            raise SystemExit(f"'{text}': this file times fprop and dgrad of {self.format}, "
                             f"as {wanted or self.fprop}")
        self.text, self.which = text, words[1]
        self.rows, self.n, self.k, self.experts = (int(values[name]) for name in "RNKE")
        fprop = self.which == "fprop"
        self.cols, self.depth = (self.n, self.k) if fprop else (self.k, self.n)

    def plain(self):
        """The same product of bf16 operands, w [E, N, K] as it is."""
        sizes = f"R={self.rows} N={self.n} K={self.k} E={self.experts}"
        return f"grouped_gemm {self.which} {sizes} format=bf16"

    def flops(self, live):
        return 2.0 * live * self.n * self.k


def quantised(x, rows):
    """Codes of x [..., A, D] in blocks of `rows` by 128 and their scales, powers of two."""
    height, depth = x.shape[-2:]
    across, blocks = ceil_div(height, rows), ceil_div(depth, BLOCK)
    whole = torch.nn.functional.pad(
        x.float(), (0, blocks * BLOCK - depth, 0, across * rows - height))
    parts = whole.unflatten(-1, (blocks, BLOCK)).unflatten(-3, (across, rows))
    amax = parts.abs().amax(dim=(-1, -3)).clamp_min(1e-30)
    scales = torch.exp2(torch.ceil(torch.log2(amax / LARGEST)))
    codes = (parts / scales[..., None, :, None]).flatten(-4, -3).flatten(-2, -1)
    return codes[..., :height, :depth].to(torch.float8_e4m3fn).contiguous(), scales


def decoded(codes, scales, rows):
    spread = scales.repeat_interleave(rows, -2).repeat_interleave(BLOCK, -1)
    height, depth = codes.shape[-2:]
    return (codes.float() * spread[..., :height, :depth]).to(torch.bfloat16)


def columns(scales):
    """[R, B] as columns, each of a multiple of four."""
    rows, blocks = scales.shape
    lying = scales.new_zeros(blocks, ceil_div(rows, 4) * 4)
    lying[:, :rows] = scales.t()
    return lying


class Case:
    """One set of operands on the GPU; w as [E, columns of the output, contraction]."""

    def __init__(self, problem, counts, seed):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        self.problem, self.counts, self.live = problem, counts, sum(counts)
        self.codes, self.scales = quantised(normal(problem.rows, problem.depth), 1)
        weights = [quantised(normal(problem.cols, problem.depth), BLOCK)
                   for _ in range(problem.experts)]  # one by one: less memory
        self.w, self.w_scales = (torch.stack(part) for part in zip(*weights))
        self.lying_scales = columns(self.scales)
        fprop = problem.which == "fprop"
        self.w_scales_of_cadre = (
            self.w_scales if fprop else self.w_scales.transpose(1, 2).contiguous())
        self.out = torch.zeros(problem.rows, problem.cols, device=DEVICE, dtype=torch.bfloat16)
        ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int32, device=DEVICE), ends])

    def bytes(self):
        return sum(t.numel() * t.element_size() for t in (self.codes, self.w, self.out))

    def live_part(self, out):
        return out[:self.live]


def call_of(gemm, case, operands, scales):
    """Calls of cadre's; `operands` and `scales` are of the batch and of w."""
    out = torch.zeros_like(case.out)
    workspace = torch.empty(gemm.workspace_bytes + 256, dtype=torch.uint8, device=DEVICE)
    tensors = (*operands, case.offsets, out, workspace, *scales)
    args = cadre_c.Args(*(tensor.data_ptr() for tensor in tensors))
    args.workspace += -args.workspace % 256

    def call():
        gemm.run(args, torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else None)
        return out

    call.keep = tensors
    return call


def cadre_call(gemm, case):
    return call_of(gemm, case, (case.codes, case.w), (case.lying_scales, case.w_scales_of_cadre))


def bf16_call(gemm, case):
    w = torch.stack([decoded(codes, scales, BLOCK)
                     for codes, scales in zip(case.w, case.w_scales)])
    w = w if case.problem.which == "fprop" else w.transpose(1, 2).contiguous()
    return call_of(gemm, case, (decoded(case.codes, case.scales, 1), w), ())


def deepgemm_call(case):
    """Of padded rows; None where DeepGEMM is not here."""
    if peers.deep_gemm is None:
        return None
    places, owners = (torch.tensor(rows, dtype=torch.int32, device=DEVICE) for rows in
                      peers.padded_rows(case.counts, peers.deepgemm_alignment()))
    places = places.long()
    codes = torch.zeros(len(owners), case.problem.depth, dtype=torch.uint8, device=DEVICE)
    codes[places] = case.codes[:case.live].view(torch.uint8)
    scales = torch.ones(len(owners), case.scales.shape[1], device=DEVICE)
    scales[places] = case.scales[:case.live]
    for name in ("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor"):
        if hasattr(peers.deep_gemm, name):
            scales = getattr(peers.deep_gemm, name)(scales)
            break
    out = torch.zeros(len(owners), case.problem.cols, device=DEVICE, dtype=torch.bfloat16)
    lhs, rhs = (codes.view(torch.float8_e4m3fn), scales), (case.w, case.w_scales)

    def multiply():
        peers.deep_gemm.m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, owners)
        return out

    multiply.rows = places
    return multiply


def contestants_of(gemm, plain, cases, left_out):
    """{name: [a call for each copy]}, cadre first; why others fail is put into `left_out`."""
    calls = {"cadre": [cadre_call(gemm, case) for case in cases]}
    want = cases[0].live_part(calls["cadre"][0]()).float()
    others = [("cadre bf16", lambda case: bf16_call(plain, case)), ("deepgemm", deepgemm_call)]
    return calls | peers.agreeing(others, cases, want, left_out)


def measure(library, line, routing, options):
    text, _, layer = (part.strip() for part in line.partition("#"))
    problem = Problem(text)
    gemm = cadre_c.Gemm(library, problem.text, DEVICE, ONLY)
    plain = cadre_c.Gemm(library, problem.plain(), DEVICE)
    counts = peers.draw_counts(problem, routing, options.seed)
    cases = peers.copies_of(Case, problem, counts, options.seed)
    left_out = {}
    calls = contestants_of(gemm, plain, cases, left_out)
    samples = peers.time_calls(calls, options.repeat, options.load)
    return peers.row_of(problem, samples, cases[0].live,
                        {"routing": routing, "layer": layer, "plan": gemm.name,
                         "left_out": left_out})


def main():
    options = peers.parser_of(__doc__).parse_args()
    library = cadre_c.Library(options.library)
    if peers.deep_gemm is None:
        print(f"deepgemm {peers.WHY_NO_DEEPGEMM}")
    peers.measure_file(options, lambda line, routing: measure(library, line, routing, options))


if __name__ == "__main__":
    main()
