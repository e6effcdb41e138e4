"""bench/peers/torch_fp8_tensor.py on the CPU: how operands are quantised, and lie for each peer."""

import os
import pathlib
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
import cadre_c  # noqa: E402
import torch_fp8_block as fp8  # noqa: E402
import torch_fp8_tensor as tensor  # noqa: E402

PROBLEMS = {
    "fprop": "grouped_gemm fprop R=41 N=144 K=272 E=3 format=fp8_tensor",
    "dgrad": "grouped_gemm dgrad R=41 N=272 K=136 E=3 dy=fp8_tensor w=fp8_tensor rhs_major=column",
}


def library():
    build = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).parent
    return cadre_c.Library(str(build / "bench/libcadre_bench_c.so"))


def product_of_torch(x, w, of_rows, of_columns, offs, out_dtype, use_fast_accum):
    """What torch's function computes on a GPU, and what it asks for."""
    assert x.dtype == w.dtype == torch.float8_e4m3fn and x.is_contiguous()
    assert w.transpose(1, 2).is_contiguous() and use_fast_accum in (False, True)
    assert of_rows.shape == x.shape[:1] and of_columns.shape == (w.shape[0], w.shape[2])
    out, first = torch.zeros(x.shape[0], w.shape[2], dtype=out_dtype), 0
    for expert, end in enumerate(offs.tolist()):
        sums = x[first:end].float() @ w[expert].float()
        out[first:end] = (sums * of_rows[first:end, None] * of_columns[expert]).to(out_dtype)
        first = end
    return out


@pytest.mark.parametrize("which", PROBLEMS)
def test_all_contestants_multiply_the_same_numbers(which, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_grouped_mm", product_of_torch)
    monkeypatch.setattr(fp8, "DEVICE", "cpu")
    problem = tensor.Problem(PROBLEMS[which])
    gemms = [cadre_c.Gemm(library(), problem.text, "cpu", "cpu_reference"),
             cadre_c.Gemm(library(), problem.in_blocks(), "cpu", "cpu_reference"),
             cadre_c.Gemm(library(), problem.plain(), "cpu")]
    case, left_out = tensor.Case(problem, [17, 0, 21], 1), {}
    case.scales[2] *= 4  # an expert's own
    case.w_scales[0] *= 2
    calls = tensor.contestants_of(gemms, [case], left_out)
    assert list(calls) == ["cadre", "cadre fp8_block", "cadre bf16", "torch", "torch fast"]
    assert not left_out
    want = case.live_part(calls["cadre"][0]())
    assert want.float().norm() > 1
    for name, calls_of in calls.items():
        most = 0.004 if name == "cadre bf16" else 0.002
        assert fp8.peers.difference(case, calls_of[0], want.float()) < most, name


def test_codes_are_near_what_they_were():
    x = torch.randn(150, 300) * 100
    codes, scale = tensor.quantised(x)
    assert codes.shape == x.shape and scale.shape == ()
    assert codes.float().abs().max() == fp8.LARGEST
    assert (codes.float() * scale - x).norm() < 0.04 * x.norm()


@pytest.mark.parametrize("words", [
    PROBLEMS["fprop"].replace("fp8_tensor", "fp8_block"), PROBLEMS["fprop"] + " alpha=yes",
    PROBLEMS["dgrad"].replace(" rhs_major=column", ""), "grouped_gemm wgrad R=8 N=8 K=8 E=1"])
def test_other_problems_are_refused(words):
    with pytest.raises(SystemExit, match="this file times fprop and dgrad of fp8_tensor"):
        tensor.Problem(words)
