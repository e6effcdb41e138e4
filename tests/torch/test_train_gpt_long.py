"""examples/train_gpt.py, 300 steps: with experts on two ranks the final loss is within the spread
of the seeds of one process."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "examples/train_gpt.py"
LIMIT_S = 1400
ON_GPUS = torch.cuda.device_count() >= 2


def final_losses(folder, *words):
    """By implementation, seed and mode."""
    subprocess.run([sys.executable, PROGRAM, "--device", "cuda" if ON_GPUS else "cpu", "--out",
                    folder, *words], check=True, timeout=LIMIT_S)
    cases = json.loads((folder / "record.json").read_text())["cases"]
    assert all(len(case["loss"]) == 300 for case in cases)
    return [case["final_loss"] for case in cases]


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    return final_losses(tmp_path_factory.mktemp("one"), "--compare", "cadre:0", "cadre:1",
                        "cadre:2")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_losses_of_two_ranks(of_one_process, parallel, tmp_path):
    modes = ["cadre:0:eager", "cadre:0:compiled"]
    modes += ["cadre:0:graphed"] if ON_GPUS and parallel == "ddp" else []
    spread = max(of_one_process) - min(of_one_process)
    for loss in final_losses(tmp_path, "--ep", "2", "--parallel", parallel, "--compare", *modes):
        assert abs(loss - of_one_process[0]) <= spread
