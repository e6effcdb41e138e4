"""bench/peers/torch_moe.py on the CPU: what it times, what it lets pass, and what it refuses."""

import json
import pathlib
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
import moe_layers  # noqa: E402
import torch_moe  # noqa: E402
from wrong_gradients import GradientTimes  # noqa: E402

LAYERS = "moe T=96 top_k=2 H=64 F=48 E=8  # tiny\nmoe T=40 top_k=3 H=32 F=16 E=5  # odd\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The record of a run with these words."""
    (tmp_path / "layers.txt").write_text(LAYERS)

    def main(*words, layers="tiny"):
        record = tmp_path / "record.json"
        monkeypatch.setattr(sys, "argv", [
            "torch_moe.py", "--device", "cpu", "--file", str(tmp_path / "layers.txt"), "--layers",
            layers, "--repeat", "2", "--commit", "c", "--json", str(record), *words])
        torch_moe.main()
        return json.loads(record.read_text())

    return main


def test_every_call_from_every_start_is_timed_beside_torch(run, capsys):
    record = run("--offsets", "uniform,gamma:1", "--peers", "torch,sonicmoe")
    assert [(case["routing"], case["from"], case["call"]) for case in record["cases"]] == [
        (routing, source, call) for routing in ("uniform", "gamma:1")
        for source in ("logits", "router") for call in ("forward", "step")]
    for case in record["cases"]:
        assert case["layer"] == "tiny" and set(case["us"]) == {"cadre", "torch"}
        assert case["speed_of_peer"]["torch"] > 0
        assert case["left_out"]["sonicmoe"]  # neither installed nor for a CPU
    assert record["commit"] == "c" and str(pathlib.Path.cwd()) not in record["command"]
    said = capsys.readouterr().out
    assert "sonicmoe left out: " in said and "moe step from router" in said


def test_the_experts_alone_are_timed_from_their_rows(run):
    record = run("--from", "rows", "--peers", "torch")
    assert [(case["from"], case["call"]) for case in record["cases"]] == [
        ("rows", "forward"), ("rows", "step")]
    for case in record["cases"]:
        assert set(case["us"]) == {"cadre", "torch"}


def test_experts_that_are_wrong_are_left_out(run, monkeypatch):
    class Peer(moe_layers.Cadre):
        def mlp(self, rows, prob):
            return super().mlp(rows, 1.05 * prob)

    monkeypatch.setitem(moe_layers.CONTESTANTS, "torch", Peer)
    case = run("--from", "rows", "--peers", "torch")["cases"][0]
    assert case["left_out"]["torch"].startswith("out from rows differs from plain fp32 by ")


def test_layers_come_in_the_order_that_is_asked_for(run):
    cases = run("--calls", "forward", "--from", "router", "--peers", "torch", layers="odd,tiny")
    assert [case["layer"] for case in cases["cases"]] == ["odd", "tiny"]


@pytest.mark.parametrize("fault", ["out", "dx", "dlogits", "dw1", "dw2"])
def test_a_peer_that_is_wrong_is_left_out(run, monkeypatch, fault):
    class Peer(moe_layers.Cadre):
        def mix(self, x, logits):
            places = {"dx": x, "dlogits": logits, "dw1": self.weights[0], "dw2": self.weights[1]}
            x, logits, w1, w2 = (GradientTimes.apply(t, 1.05) if name == fault else t
                                 for name, t in places.items())
            own, self.weights = self.weights, [w1, w2]
            out = super().mix(x, logits)
            self.weights = own
            return 1.05 * out if fault == "out" else out

    monkeypatch.setitem(moe_layers.CONTESTANTS, "torch", Peer)
    case = run("--peers", "torch")["cases"][0]
    assert list(case["us"]) == ["cadre"]
    assert case["left_out"]["torch"].startswith(f"{fault} from logits differs from plain fp32 by ")


@pytest.mark.parametrize("late", [0, 2, 99])
def test_a_launch_that_the_gpu_did_not_wait_for_is_repeated_behind_more_products(monkeypatch, late):
    queries, calls, products = iter([True] * late + [False]), [], []

    class Event:
        def __init__(self, enable_timing):
            self.record = self.synchronize = lambda: None
            self.query, self.elapsed_time = lambda: next(queries), lambda stop: 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(out))
    timer = torch_moe.Timer("cpu")
    timer.on_gpu, timer.dense = True, [torch.zeros(1)] * 3
    if late > 5:
        with pytest.raises(RuntimeError, match="slow waits for the GPU"):
            timer.us("slow", lambda: calls.append(1))
        return
    assert timer.us("fast", lambda: calls.append(1)) == 2500
    assert len(calls) == late + 1
    assert len(products) == torch_moe.AHEAD * (2 ** (late + 1) - 1)


def test_torch_must_be_compiled(run, monkeypatch):
    moe_layers.compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(SystemExit, match="torch ran eager, must be compiled"):
        run("--peers", "torch")
    moe_layers.compiled.cache_clear()


@pytest.mark.parametrize("words, message", [
    (["--layers", "tiny,none"], "--layers: 'none' is not in "),
    (["--offsets", "lumpy"], "--offsets: 'lumpy', must be uniform, zipf:S or gamma:S"),
    (["--calls", "backward"], "2"), (["--peers", "none"], "2")])
def test_words_that_are_wrong(run, capsys, words, message):
    with pytest.raises(SystemExit, match=message):
        run(*words)


@pytest.mark.parametrize("problem", ["mlp T=4 top_k=1 H=8 F=8 E=2", "moe T=4 top_k=1 H=8 F=8",
                                     "moe T=4 top_k=1 H=8 F=8 E=two", "moe T=4 T=4 H=8 F=8 E=2"])
def test_problems_that_are_no_layer(problem):
    with pytest.raises(SystemExit, match="must be moe T=.. top_k=.. H=.. F=.. E=.."):
        torch_moe.sizes_of(problem)


def test_a_layer_that_has_no_time_is_not_begun(run, capsys):
    with pytest.raises(FileNotFoundError):  # nothing was measured, so there is no record
        run("--seconds", "0", "--peers", "torch")
    assert "tiny, uniform: not begun, 0 s are over" in capsys.readouterr().out
