"""cadre.ExpertParallel with x=: tokens travel as codes and scales that their owner has made."""

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import WORLD, same_bits

import cadre

H, E, TOP_K = 256, 3, 2
FORMATS = ["fp8_row", "fp8_row:e5m2", "fp8_block", "fp8_block:fp32", "mxfp8"]


def whole(rows, device):
    """Offsets of one expert that has all rows."""
    return torch.tensor([0, rows], dtype=torch.int32, device=device)


def tokens_of(rank, device):
    """(x, choices, probabilities); some ranks have none, and some choices are of nobody."""
    torch.manual_seed(rank)
    count = 0 if rank == 1 else 7 + rank
    experts = torch.randint(-1, WORLD * E, (count, TOP_K), device=device)
    return (draw(count, H, dtype=torch.bfloat16, device=device), experts,
            torch.rand(count, TOP_K, device=device))


def layers_of(device, **options):
    """Of numbers, and through the same window of codes."""
    numbers = cadre.ExpertParallel(None, E, TOP_K, route="window", tokens=16, hidden=H,
                                   dtype=torch.bfloat16, device=device, factor=WORLD)
    return numbers, cadre.ExpertParallel(None, E, TOP_K, route="window", share=numbers,
                                         factor=WORLD, **options)


def bits(value):
    return value.reshape(-1).view(torch.uint8)


# What the processes run


def codes_of_rows(rank, device):
    """Those that quantize of the rows makes, in any order of scales."""
    x, experts, prob = tokens_of(rank, device)
    for format in FORMATS:
        for major in ("row", "column") if format.startswith("fp8") else ("row",):
            numbers, ep = layers_of(device, x=format, scales_major=major)
            rows, row_prob, offsets, handle = numbers.dispatch(x, experts, prob)
            want = cadre.quantize(rows, offsets, format)
            given = cadre.quantize(x, whole(len(x), device), format)
            got, got_prob, got_offsets, got_handle = ep.dispatch_codes(given, experts, prob)
            used = int(offsets[-1])
            assert torch.equal(got_offsets, offsets) and same_bits(got_prob, row_prob)
            assert torch.equal(bits(got.codes[:used]), bits(want.codes[:used])), format
            assert torch.equal(bits(got.scales[:used]), bits(want.scales[:used])), format
            assert got.scales.stride(0 if major == "column" else 1) == 1
            assert torch.equal(got_handle.tokens_per_expert, handle.tokens_per_expert)
            assert same_bits(ep.collect(rows, got_handle), numbers.collect(rows, handle))


def products(rank, device):
    """Rows of fp8_row are what scaled_grouped_mm reads; results have gradients."""
    x, experts, prob = tokens_of(rank, device)
    numbers, ep = layers_of(device, x="fp8_row")
    torch.manual_seed(9)
    w = cadre.quantize(draw(E, 64, H, dtype=torch.bfloat16, device=device), None, "fp8_row")

    def multiply(rows, offsets):
        y = cadre.scaled_grouped_mm(rows.codes, w.codes.transpose(-2, -1), rows.scales,
                                    w.scales.view(E, 64), offsets[1:])
        return y.repeat(1, H // 64)

    given = cadre.quantize(x, whole(len(x), device), "fp8_row")
    rows, _, offsets, handle = ep.dispatch_codes(given, experts, prob)
    y = multiply(rows, offsets).requires_grad_()
    out = ep.collect(y, handle)
    plain, _, offsets, handle = numbers.dispatch(x, experts, prob)
    y_of_numbers = multiply(cadre.quantize(plain, offsets, "fp8_row"), offsets).requires_grad_()
    want = numbers.collect(y_of_numbers, handle)
    assert same_bits(out, want)
    used = int(offsets[-1])
    got, wanted = (torch.autograd.grad(o.sin().sum(), of)[0][:used]
                   for o, of in ((out, y), (want, y_of_numbers)))
    assert same_bits(got, wanted)


def compiled(rank, device):
    """One graph, with the exchanges in it."""
    x, experts, prob = tokens_of(rank, device)
    _, ep = layers_of(device, x="mxfp8")
    given = cadre.quantize(x, whole(len(x), device), "mxfp8")

    def step(codes, scales, experts, prob):
        rows, row_prob, offsets, handle = ep.dispatch_codes(
            cadre.Quantized(codes, scales, codes.new_empty(0, dtype=torch.float32)), experts, prob)
        y = cadre.dequantize(rows, offsets, "mxfp8", shape=rows.codes.shape, dtype=torch.bfloat16)
        return ep.collect(y * row_prob[:, None].bfloat16(), handle)

    run = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert same_bits(run(given.codes, given.scales, experts, prob),
                     step(given.codes, given.scales, experts, prob))


def operator(rank, device):
    """Its fake kernel; torch does not compare codes, which its test of schemas does."""
    group = dist.new_group([rank], use_local_synchronization=True)
    for format, major in (("fp8_block", "column"), ("mxfp8", "row")):
        ep = cadre.ExpertParallel(group, E, TOP_K, route="window", tokens=16, hidden=H,
                                  dtype=torch.bfloat16, device=device, x=format, scales_major=major)
        x, experts, prob = tokens_of(0, device)
        given = cadre.quantize(x, whole(len(x), device), format)
        torch.library.opcheck(
            torch.ops.cadre._window_dispatch_codes.default,
            (ep._window.name, given.codes, given.scales, experts % E, prob),
            test_utils=("test_faketensor", "test_autograd_registration"))


@pytest.mark.parametrize("task", [codes_of_rows, products, compiled, operator],
                         ids=lambda task: task.__name__)
def test_codes(ranks, task):
    ranks.run(task)
