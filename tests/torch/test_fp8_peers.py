"""bench/peers/torch_fp8_block.py on the CPU: how operands are quantised, and lie for each peer."""

import os
import pathlib
import sys
import types

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
import cadre_c  # noqa: E402
import torch_fp8_block as fp8  # noqa: E402

PROBLEMS = {
    "fprop": "grouped_gemm fprop R=41 N=144 K=272 E=3 format=fp8_block lhs_scales_major=column",
    "dgrad": "grouped_gemm dgrad R=41 N=272 K=136 E=3 format=fp8_block rhs_major=column "
             "lhs_scales_major=column",
}


def library():
    build = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).parent
    return cadre_c.Library(str(build / "bench/libcadre_bench_c.so"))


def product_of_deepgemm(lhs, rhs, out, owners):
    """What DeepGEMM's function of that name computes, by its documentation."""
    x = fp8.decoded(lhs[0], lhs[1], 1).float()
    for expert, (codes, scales) in enumerate(zip(*rhs)):
        mine = owners == expert
        out[mine] = (x[mine] @ fp8.decoded(codes, scales, fp8.BLOCK).float().T).to(out.dtype)


@pytest.mark.parametrize("which", PROBLEMS)
def test_all_contestants_multiply_the_same_numbers(which, monkeypatch):
    deep_gemm = types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=product_of_deepgemm)
    monkeypatch.setattr(fp8.peers, "deep_gemm", deep_gemm)
    monkeypatch.setattr(fp8, "DEVICE", "cpu")
    problem = fp8.Problem(PROBLEMS[which])
    gemm = cadre_c.Gemm(library(), problem.text, "cpu", "cpu_reference")
    plain = cadre_c.Gemm(library(), problem.plain(), "cpu")
    case, left_out = fp8.Case(problem, [17, 0, 21], 1), {}
    calls = fp8.contestants_of(gemm, plain, [case], left_out)
    assert list(calls) == ["cadre", "cadre bf16", "deepgemm"] and not left_out
    want = case.live_part(calls["cadre"][0]())
    assert want.float().norm() > 1
    for name in ("cadre bf16", "deepgemm"):
        assert fp8.peers.difference(case, calls[name][0], want.float()) < 0.003, name


def test_a_quantised_block_is_near_what_it_was():
    x = torch.randn(150, 300) * torch.exp2(torch.arange(150.0) / 8)[:, None]
    codes, scales = fp8.quantised(x, 1)
    assert codes.shape == x.shape and scales.shape == (150, 3)
    assert ((fp8.decoded(codes, scales, 1).float() - x).norm(dim=1) < 0.04 * x.norm(dim=1)).all()
    assert (torch.log2(scales) % 1 == 0).all()


@pytest.mark.parametrize("words", [
    PROBLEMS["fprop"].replace("fp8_block", "bf16"), PROBLEMS["fprop"] + " alpha=yes",
    PROBLEMS["dgrad"].replace("rhs_major=column ", ""), "grouped_gemm wgrad R=8 N=8 K=8 E=1"])
def test_other_problems_are_refused(words):
    with pytest.raises(SystemExit, match="this file times fprop and dgrad of fp8_block"):
        fp8.Problem(words)
