"""bench/peers/torch_expert_layer.py under torchrun: what it times, checks and leaves out."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
import expert_layers  # noqa: E402
import torch_expert_layer as peers  # noqa: E402

LAYERS = "moe T=48 top_k=2 H=64 F=48 E=8  # tiny\nmoe T=32 top_k=3 H=32 F=16 E=6  # odd\n"
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.device_count() > 1 else [])
EAGER = {"cadre", "nccl", "nccl_known_counts", "one_gpu"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "layers.txt"
    path.write_text(LAYERS)
    return path


def words(file, *more):
    return ["--file", str(file), "--repeat", "2", "--commit", "c", *more]


@pytest.mark.parametrize("device", DEVICES)
def test_layers_are_timed_beside_all_to_all_single_and_one_gpu(tmp_path, file, device):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         peers.__file__, *words(file, "--device", device, "--offsets", "uniform,gamma:1",
                                "--layers", "odd", "--json", str(tmp_path / "record.json"))],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["commit"] == "c" and str(tmp_path) not in record["command"]
    assert [(case["routing"], case["call"]) for case in record["cases"]] == [
        (routing, call) for routing in ("uniform", "gamma:1") for call in ("forward", "step")]
    graphs = {"cadre_graph", "one_gpu_graph"}
    for case in record["cases"]:
        assert case["layer"] == "odd" and case["ranks"] == 2 and "other_bits" not in case
        assert set(case["us"]) == (EAGER if device == "cpu" else EAGER | graphs)
        assert set(case["speed_of_peer"]) == set(expert_layers.PEERS)
        assert set(case["two_over_one"]) == set(case["us"]) - {"one_gpu", "one_gpu_graph"}
        assert set(case.get("left_out", {})) == (graphs if device == "cpu" else set())
    assert "odd          uniform  step    ms " in done.stdout
    assert device != "cpu" or "cadre_graph left out: rank 0: needs GPUs" in done.stdout


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@pytest.fixture
def layer(one_rank, file):
    """A layer of the file, of one rank."""
    def made(*more):
        options = peers.options_of(words(file, "--device", "cpu", *more))
        line = peers.torch_moe.lines_of(options.file, ["tiny"])[0]
        return peers.Layer(line, "gamma:1", options, peers.Clock(torch.device("cpu")))

    return made


@pytest.mark.parametrize("result", expert_layers.RESULTS)
def test_who_computes_something_else_is_left_out(layer, monkeypatch, result):
    class Wrong(expert_layers.AllToAll):
        def step(self):
            return [2 * t if name == result else t
                    for name, t in zip(expert_layers.RESULTS, super().step())]

    monkeypatch.setitem(expert_layers.PEERS, "nccl", Wrong)
    found = layer()
    assert set(found.found) == EAGER - {"nccl"}
    assert found.left_out["nccl"] == (f"rank 0: {result} of step differs from that of one GPU by 1 "
                                      "of its norm")
    row = found.row("forward")
    assert set(row["speed_of_peer"]) == {"nccl_known_counts"} and peers.is_good(row)


def test_other_bits_of_cadre_are_told_and_fail_the_run(layer, monkeypatch):
    class Other(expert_layers.Cadre):
        def step(self):
            out, dx, *rest = super().step()
            dx.view(torch.int16)[7, 5] ^= 1
            return out, dx, *rest

    monkeypatch.setattr(peers, "Cadre", Other)
    found = layer("--contestants", "cadre,one_gpu")
    row = found.row("step")
    assert row["other_bits"] == {"cadre": "rank 0: dx of step"} and not peers.is_good(row)
    assert "cadre has other bits: rank 0: dx of step" in peers.shown(row)


def test_a_layer_without_cadre_fails_the_run(layer, monkeypatch):
    class Broken(expert_layers.Cadre):
        def __init__(self, share):
            raise RuntimeError("no\n  window")

    monkeypatch.setattr(peers, "Cadre", Broken)
    row = layer("--contestants", "cadre,nccl,one_gpu").row("forward")
    assert row["left_out"]["cadre"] == "rank 0: no window" and not peers.is_good(row)
    assert set(row["us"]) == {"nccl", "one_gpu"} and row["speed_of_peer"] == {}


def test_rates_and_ratios(layer, monkeypatch):
    found = layer("--contestants", "cadre,nccl,one_gpu")
    us = {"cadre, step": 40.0, "nccl, step": 80.0, "one_gpu, step": 60.0}
    monkeypatch.setattr(peers.Clock, "us", lambda self, what, contestant, call: us[what])
    row = found.row("step")
    assert row["us"] == {"cadre": 40, "nccl": 80, "one_gpu": 60}
    assert row["speed_of_peer"] == {"nccl": 2}
    assert row["two_over_one"] == {"cadre": 1.5, "nccl": 0.75}
    assert found.flops("forward", "cadre") == 6 * 48 * 2 * 64 * 48
    assert found.flops("step", "nccl") == 3 * found.flops("forward", "cadre")


@pytest.mark.parametrize("late", [0, 2, 99])
def test_a_call_that_the_gpu_did_not_wait_for_is_repeated(one_rank, monkeypatch, late):
    queries, calls, products = iter([True] * late + [False]), [], []

    class Event:
        def __init__(self, enable_timing):
            self.record = self.synchronize = lambda: None
            self.query, self.elapsed_time = lambda: next(queries), lambda stop: 2.5

    clock = peers.Clock(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(out))
    clock.device, clock.dense = torch.device("cuda", 0), [torch.zeros(1)] * 3
    contestant = expert_layers.Contestant.__new__(expert_layers.Contestant)
    if late > 5:
        with pytest.raises(RuntimeError, match="slow waits for the GPU"):
            clock.us("slow", contestant, lambda: calls.append(1))
        return
    assert clock.us("fast", contestant, lambda: calls.append(1)) == 2500
    assert len(calls) == late + 1
    assert len(products) == peers.torch_moe.AHEAD * (2 ** (late + 1) - 1)
    contestant.waits, queries = True, iter([True])  # it could never be queued before
    assert clock.us("waits", contestant, lambda: calls.append(1)) == 2500


@pytest.mark.parametrize("ranks, more, message", [
    (3, [], "'moe T=48 top_k=2 H=64 F=48 E=8': E must be a multiple of 3, the ranks that run"),
    (2, ["--offsets", "lumpy"], "--offsets: 'lumpy', must be uniform, zipf:S or gamma:S"),
    (2, ["--contestants", "cadre,deepep"], "2"), (2, ["--calls", "backward"], "2")])
def test_words_that_are_wrong(file, monkeypatch, ranks, more, message):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit, match=message):
        peers.work_of(peers.options_of(words(file, *more)))


def test_fewer_gpus_than_ranks(file, monkeypatch):
    here = torch.cuda.device_count()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here + 1))
    with pytest.raises(SystemExit, match=f"there are {here} GPUs, must be {here + 1}, one a rank"):
        peers.begin(peers.options_of(words(file)))


def test_a_layer_that_has_no_time_is_not_begun(one_rank, file, capsys):
    options = peers.options_of(words(file, "--device", "cpu", "--seconds", "0"))
    work = [(("moe T=48 top_k=2 H=64 F=48 E=8", "tiny"), "uniform")]
    assert not list(peers.rows_of(work, options, peers.Clock(torch.device("cpu")), 0))
    assert "tiny, uniform: not begun, 0 s are over" in capsys.readouterr().out
