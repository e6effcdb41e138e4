"""`python -m cadre doctor`."""
import re
import subprocess
import sys

import pytest
import torch

from cadre import _build, doctor


@pytest.fixture
def run(capsys):
    def main(*words):
        code = doctor.main(["doctor", *words])
        return code, *capsys.readouterr()
    return main


@pytest.fixture(scope="module")
def report():
    done = subprocess.run([sys.executable, "-m", "cadre", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_says_which_versions_meet(report):
    assert re.search(rf"^cadre +{re.escape(_build.VERSION)}, commit [0-9a-f]{{12}}", report, re.M)
    assert re.search(rf"^built for +torch {re.escape(_build.TORCH)}, ", report, re.M)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", report, re.M)
    assert re.search(r"^transformers +(\d+\.|not installed$)", report, re.M)
    assert report.endswith("all is well\n")


def test_it_names_every_device(report):
    assert re.search(r"^cpu +cpu +\d+$", report, re.M)
    for i in range(torch.cuda.device_count() if _build.CUDA else 0):
        assert re.search(rf"^cuda:{i} +sm_\d+ +\d+$", report, re.M)


def test_every_operation_and_layer_has_a_row_and_runs_on_the_cpu(report):
    names = [name for name, _ in doctor.problems()]
    assert {"offsets", "permute", "grouped_gemm nvfp4", "grouped_gemm fp8_row",
            "grouped_linear mxfp8", "grouped_mlp f32"} <= set(names)
    for name in names:
        row = re.search(rf"^{re.escape(name)}  +(\S+)", report, re.M)
        assert row and row.group(1).startswith("cpu"), name


def test_a_row_of_a_layer_names_the_implementations_of_its_steps():
    answer = doctor.explain("grouped_linear R=64 N=32 K=32 E=4 recipe=nvfp4", "cpu")
    used = doctor._implementations(answer).split(", ")
    assert len(used) == len(set(used)) >= 2
    assert all(f": {name}  [" in answer.steps for name in used)


def test_it_says_what_does_not_run_and_why(run):
    code, out, _ = run("--device", "sm_90", "--device", "cpu")
    assert code == 0
    assert re.search(r"^ +sm_90 +cpu$", out, re.M)
    assert re.search(r"^grouped_gemm nvfp4 +no +cpu", out, re.M)
    why = "takes bf16 or f16" if _build.CUDA else "this build has no CUDA backend"
    assert re.search(rf"^not on sm_90: [^:]*grouped_gemm\s+nvfp4[^:]*\n  \w+: .*{why}", out, re.M)
    decoded = "cuda_quantize, .*sm90_ragged_rows" if _build.CUDA else "no +cpu"
    assert re.search(rf"^grouped_mlp nvfp4 +.*{decoded}", out, re.M)


def test_a_problem_is_explained(run):
    code, out, _ = run("grouped_linear", "R=64", "N=32", "K=16", "E=4", "recipe=bf16")
    assert code == 0
    assert re.search(r"^plan +direct$", out, re.M)
    assert "multiply: cpu" in out


def test_a_problem_without_a_plan_is_told_by_the_exit_code(run):
    code, out, _ = run("grouped_gemm fprop R=64 N=64 K=64 E=4 format=nvfp4", "--device", "sm_90")
    assert code == 1
    assert re.search(r"^plan +none\nrefused +\w+: ", out, re.M)


@pytest.mark.parametrize("words, message", [
    (["matmul", "R=3"], "problem begins with 'matmul', must begin with the name of an operation"),
    (["grouped_gemm", "fprop", "R=3"], "grouped_gemm"),
    (["--device", "tpu"], "device: name is 'tpu', must be cpu"),
])
def test_errors(run, words, message):
    code, _, err = run(*words)
    assert code == 2
    assert message in err


def test_gpus_that_a_build_without_cuda_leaves_idle_are_wrong(run, monkeypatch):
    monkeypatch.setattr(_build, "CUDA", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, out, _ = run()
    assert code == 1
    assert "wrong: torch sees 2 GPUs, and this build of cadre has no CUDA; build it where" in out


@pytest.mark.parametrize("architectures, runs_on", [
    ("90a-real", {90}), ("80 90a-real", {80, 86, 90, 100, 103}), ("80-real 90a-real", {80, 86, 90}),
    ("80-virtual", {80, 86, 90, 100, 103}), ("100f-real", {100, 103}),
    ("native", {75, 80, 86, 90, 100, 103})])
def test_which_gpus_the_kernels_are_for(architectures, runs_on):
    assert {sm for sm in (75, 80, 86, 90, 100, 103) if doctor.covers(architectures, sm)} == runs_on


def test_gpus_without_kernels_are_wrong(monkeypatch):
    monkeypatch.setattr(_build, "CUDA", "13.0")
    monkeypatch.setattr(_build, "ARCHITECTURES", "90a-real")
    monkeypatch.setattr(torch.ops.cadre, "_devices", lambda: ["cpu cpu 8", "cuda:0 sm_86 84"])
    monkeypatch.setattr(doctor, "multiplies", lambda name: "")
    rows, wrong = doctor._devices()
    assert rows == [["cpu", "cpu", "8"], ["cuda:0", "sm_86", "84"]]
    assert wrong == ["cuda:0 is sm_86, and this build has kernels for 90a-real; build it with "
                     "--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=86-real"]


def test_every_device_is_tried(device, run, monkeypatch):
    assert doctor.multiplies(str(device)) == ""
    assert "RuntimeError: " in doctor.multiplies("nowhere")
    monkeypatch.setattr(torch.ops.cadre, "grouped_gemm", lambda x, *_: torch.zeros(1))
    assert doctor.multiplies("cpu") == "a product of ones is [0.0], must be 16"
    code, out, _ = run()
    assert code == 1
    assert "wrong: cpu runs no grouped_gemm: a product of ones is [0.0], must be 16\n" in out
