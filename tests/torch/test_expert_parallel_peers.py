"""bench/peers/torch_expert_parallel.py under torchrun on the CPU: what it times and leaves out."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
import torch_expert_parallel as peers  # noqa: E402

PROBLEM = "expert_parallel T=40 top_k=3 H=24 E=2 ranks=2 R=240 dtype=bf16"


def torchrun(tmp_path, line, *words):
    (tmp_path / "problems.txt").write_text(line + "\n")
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         peers.__file__, "--device", "cpu", "--file", str(tmp_path / "problems.txt"),
         "--repeat", "3", "--commit", "c", "--json", str(tmp_path / "record.json"), *words],
        capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})


def test_exchanges_are_timed_beside_all_to_all_single(tmp_path):
    done = torchrun(tmp_path, PROBLEM + "  # tiny", "--offsets", "gamma:1")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert [case["call"] for case in record["cases"]] == ["dispatch", "collect"]
    for case in record["cases"]:
        assert case["layer"] == "tiny" and case["routing"] == "gamma:1"
        assert set(case["us"]) == {"cadre", "cadre_sum_rank", "nccl"}
        assert min(case["speed_of_peer"].values()) > 0
        assert case["left_out"]["all_to_all_vdev_2d"].endswith("needs GPUs")
        assert case["left_out"]["deepep"]
        assert case["delivered_bytes"] == 2 * 40 * 3 * 24 * 2
        assert 0 < case["crossed_bytes"] < case["delivered_bytes"]
    assert record["commit"] == "c" and "deepep left out: rank 0: " in done.stdout


THREADS = """
import pathlib, torch_expert_parallel as peers
peers.main()
names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(*(name.strip() for name in names if "gloo" in name))
"""


def test_no_thread_outlives_the_group(tmp_path):
    """One that lets go of a tensor while Python ends aborts the process."""
    (tmp_path / "problems.txt").write_text(PROBLEM.replace("E=2 ranks=2", "E=4 ranks=1"))
    done = subprocess.run(
        [sys.executable, "-c", THREADS, "--device", "cpu", "--file", tmp_path / "problems.txt",
         "--repeat", "1"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo",
             "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
             "MASTER_PORT": "0"})
    assert done.returncode == 0 and done.stdout.endswith("\n\n"), done.stdout + done.stderr


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


def test_a_peer_with_other_sums_is_left_out(one_rank, monkeypatch):
    class Wrong(peers.AllToAll):
        """A row in ten is of its neighbour."""

        def dispatch(self):
            rows, counts = super().dispatch()
            rows[::10] = rows[1::10]
            return rows, counts

    monkeypatch.setitem(peers.CONTESTANTS, "wrong", Wrong)
    sizes = peers.sizes_of(PROBLEM.replace("E=2 ranks=2", "E=4 ranks=1"))
    tokens = peers.Tokens(sizes, "uniform", 1, torch.device("cpu"))
    assert tokens.bytes() == (40 * 3 * 48, 0)
    assert peers.made("nccl", tokens)[1] == ""
    contestant, why = peers.made("wrong", tokens)
    assert contestant is None and why.startswith("rank 0: its sums differ by 0.")


def test_files_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    file = tmp_path / "problems.txt"
    monkeypatch.setattr(sys, "argv", ["torch_expert_parallel.py", "--file", str(file)])
    file.write_text(PROBLEM)
    with pytest.raises(SystemExit, match="ranks must be 3, those that run"):
        peers.main()
    file.write_text(PROBLEM.replace("T=40", "T=many"))
    with pytest.raises(SystemExit, match="must be expert_parallel T=.. top_k=.. H=.."):
        peers.main()
