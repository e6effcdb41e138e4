"""bench/peers/torch_packed.py on the CPU: packed weights are the numbers that bf16 has."""

import json
import os
import pathlib
import sys
import types

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
import cadre_c  # noqa: E402
import torch_fp8_block  # noqa: E402
import torch_packed as packed  # noqa: E402


def library():
    build = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).parent
    return cadre_c.Library(str(build / "bench/libcadre_bench_c.so"))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    for module in (packed, torch_fp8_block):
        monkeypatch.setattr(module, "DEVICE", "cpu")


def contestants(weights, spoil=None):
    problem = packed.Problem(f"grouped_gemm fprop R=41 N=72 K=96 E=3 x=bf16 w={weights}")
    plans = [cadre_c.Gemm(library(), text, "cpu", "cpu_reference")
             for text in (problem.text, problem.plain())]
    case = packed.Case(problem, [17, 0, 21], 1)
    if spoil:
        spoil(case)
    return packed.contestants_of(*plans, [case])


@pytest.mark.parametrize("weights", ["mxfp4", "mxfp8"])
def test_both_multiply_the_same_numbers(weights):
    calls = contestants(weights)
    assert list(calls) == ["cadre", "cadre bf16"]
    assert calls["cadre"][0]().float().norm() > 1


def test_other_bits_are_not_timed():
    def spoil(case):
        case.scales[2, 7, 1] += 1

    with pytest.raises(RuntimeError, match="have other bits"):
        contestants("mxfp4", spoil)


@pytest.mark.parametrize("words", ["grouped_gemm fprop R=9 N=8 K=32 E=3 x=bf16 w=nvfp4",
                                   "grouped_gemm dgrad R=9 N=8 K=32 E=3 x=bf16 w=mxfp4",
                                   "grouped_gemm fprop R=9 N=8 K=32 E=3 format=mxfp4"])
def test_problems_of_others_are_refused(words):
    with pytest.raises(SystemExit, match="this file times fprop of x=bf16"):
        packed.Problem(words)


def test_every_problem_of_a_file_is_measured_and_kept(tmp_path, monkeypatch):
    peers = packed.peers
    monkeypatch.setattr(peers, "warm", lambda: None)
    monkeypatch.setattr(peers, "record", lambda cases, options: {"cases": list(cases)})
    (tmp_path / "file").write_text("# words\n\none  # a layer\ntwo\n")
    kept = tmp_path / "record.json"
    options = types.SimpleNamespace(file=tmp_path / "file", offsets="uniform,gamma:1", json=kept)
    seen = []

    def measure(line, routing):
        assert not seen or json.loads(kept.read_text())["cases"] == seen
        seen.append(f"{line} {routing}")
        return seen[-1]

    peers.measure_file(options, measure)
    assert seen == ["one  # a layer uniform", "one  # a layer gamma:1", "two uniform",
                    "two gamma:1"]
    assert json.loads(kept.read_text())["cases"] == seen
