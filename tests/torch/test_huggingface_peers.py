"""bench/peers/huggingface.py on the CPU: what it times, what it lets pass, and what it refuses."""

import json
import pathlib
import re
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
import huggingface  # noqa: E402
import huggingface_models as models_of  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402
from wrong_gradients import GradientTimes  # noqa: E402

FAMILIES = list(models_of.RELEASED)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The record of a run with these words."""
    def main(*words, models="qwen3_moe"):
        record = tmp_path / "record.json"
        monkeypatch.setattr(sys, "argv", [
            "huggingface.py", "--device", "cpu", "--models", models, "--depths", "2,1", "--repeat",
            "1", "--commit", "c", "--json", str(record), *words])
        huggingface.main()
        return json.loads(record.read_text())

    return main


def test_every_call_is_timed_beside_those_of_transformers(run, capsys):
    record = run("--calls", "step,prefill,decode,graph", "--sequences", "1,3")
    assert [(case["call"], case.get("sequences")) for case in record["cases"]] == [
        ("step", None), ("prefill", None), ("decode", 1), ("decode", 3), ("graph", 1),
        ("graph", 3)]
    assert set(record["absent"]) == {"deepgemm", "sonicmoe"}  # kernels of a hub that is not there
    for case in record["cases"]:
        graph = case["call"] == "graph"
        assert set(case["us"]) == {"cadre", "grouped_mm", "batched_mm"} | (
            set() if graph else {"eager"})
        assert set(case["layer_us"]) == set(case["us"]) == {*case["speed_of_peer"], "cadre"}
        assert case["timed_by_host"] == (sorted(case["us"]) if case["call"] in ("step", "decode")
                                         else [])
        assert case["problem"].endswith(f"tokens={case['sequences']}x1" if "sequences" in case
                                        else "tokens=2x12")
    assert "no graph can be captured" in record["cases"][-1]["left_out"]["eager"]
    assert set(record["cases"][0]["losses"]) == set(record["cases"][0]["us"])
    assert record["cases"][2]["tokens_equal"]["eager"] == "128 of 128"
    assert record["commit"] == "c" and "transformers 5" in record["versions"]
    assert str(pathlib.Path.cwd()) not in record["command"]
    assert "qwen3_moe  decode of 3" in capsys.readouterr().out


def test_every_model(run):
    record = run("--calls", "graph", "--sequences", "2", "--peers", "grouped_mm",
                 models=",".join(FAMILIES))
    assert [case["layer"] for case in record["cases"]] == FAMILIES
    for case in record["cases"]:
        assert set(case["us"]) == {"cadre", "grouped_mm"}
        assert set(case["differences"]) == {"cadre", "grouped_mm"}


def test_a_compiled_step(run):
    case = run("--calls", "compiled", "--sequences", "2", "--peers", "eager")["cases"][0]
    assert set(case["us"]) == {"cadre"}  # eager's loop over experts is no single graph
    assert "data-dependent" in case["left_out"]["eager"]


def wrong(out):
    """One feature in eight is half of what it should be."""
    return torch.where(torch.arange(out.shape[-1]) % 8 == 0, 0.5 * out, out)


FAULTS = {
    "out": ("step", wrong, "^logits differ by "),
    "gradient": ("step", lambda out: GradientTimes.apply(out, 1.1),
                 "^gradients of down_proj differ by "),
    "decode": ("decode", wrong, "^logits of decode differ by "),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_experts_that_are_wrong_are_left_out(run, monkeypatch, fault):
    call, change, message = FAULTS[fault]
    right = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm",
                        lambda *args: change(right(*args)))
    case = run("--calls", call, "--sequences", "2", "--peers", "grouped_mm")["cases"][0]
    assert set(case["us"]) == {"cadre"}
    assert re.search(message, case["left_out"]["grouped_mm"])


def test_cadre_must_be_right(run, monkeypatch):
    right = ALL_EXPERTS_FUNCTIONS["cadre"]
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "cadre",
                        lambda *args: wrong(right(*args)))
    with pytest.raises(SystemExit, match="^cadre failed or is wrong: qwen3_moe prefill: logits "
                       "differ by .*; qwen3_moe decode: logits of decode differ by "):
        run("--calls", "prefill,decode", "--sequences", "1", "--peers", "eager")


@pytest.mark.parametrize("call, made", [("graph", "captured"), ("compiled", "compiled")])
def test_a_graph_must_do_what_the_model_does(run, monkeypatch, call, made):
    monkeypatch.setattr(models_of.Decoder, made, lambda self: lambda: self.step().roll(1, -1))
    with pytest.raises(SystemExit, match="from those of the same model outside of a graph$"):
        run("--calls", call, "--sequences", "2", "--peers", "grouped_mm")


def test_the_difference_of_two_depths_is_that_of_layers():
    row = huggingface.row_of({"deep": {"cadre": [90., 100., 110.], "eager": [400., 500., 600.]},
                              "shallow": {"cadre": [59., 60., 61.], "eager": [200.] * 3}}, (6, 2))
    assert row["us"] == {"cadre": 100, "eager": 500}
    assert row["layer_us"] == {"cadre": 10, "eager": 75}
    assert row["speed_of_peer"] == {"eager": 5}


def test_slow_ones_are_called_less_often(monkeypatch):
    models = models_of.Models("qwen3_moe", (2, 1), "cpu", 1)
    shape = huggingface.Shape(models, huggingface.Sizes("cpu"), "prefill", 0)
    clock = huggingface.Clock("cpu")
    monkeypatch.setattr(clock, "us", lambda name, run, steps: 1e6 if name[0] == "eager" else 1.0)
    samples = huggingface.time_runs(
        shape, dict.fromkeys([("cadre", "deep"), ("eager", "deep")]), clock, 9)["deep"]
    assert len(samples["cadre"]) == 9 and len(samples["eager"]) == huggingface.FEWEST


@pytest.mark.parametrize("family", FAMILIES)
def test_both_depths_are_one_model(family):
    models = models_of.Models(family, (3, 1), "cpu", 1)
    deep = {weight.data_ptr() for weight in models.deep.parameters()}
    shallow = {weight.data_ptr() for weight in models.shallow.parameters()}
    assert shallow < deep and len(models.shallow.model.layers) == 1
    models.take("cadre")
    for model in models.both.values():
        assert all(module.config._experts_implementation == "cadre"
                   for module in models_of.Routing(model).experts)
    tokens = models.words(2, 9)
    with torch.no_grad():
        got = models.shallow(tokens).logits
        models.deep.model.layers = models.deep.model.layers[:1]
        assert torch.equal(models.deep(tokens).logits, got)


def test_routing_is_replayed():
    models = models_of.Models("qwen3_moe", (2, 1), "cpu", 1)
    tokens, routing = models.words(2, 9), models_of.Routing(models.deep)
    with torch.no_grad(), routing.recorded():
        want = models.deep(tokens).logits
    for layer in models.deep.model.layers:
        layer.mlp.gate.weight.data.neg_()
    with torch.no_grad():
        with routing.replayed():
            assert torch.equal(models.deep(tokens).logits, want)
        assert not torch.equal(models.deep(tokens).logits, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_a_decode_step_are_those_of_transformers(family):
    model = models_of.Models(family, (2, 1), "cpu", 1).deep
    decoder = models_of.Decoder(model, torch.randint(128, (2, 10)), 4)
    assert (decoder.masks() is not None) == (family == "gpt_oss")
    for _ in range(3):
        with torch.no_grad():
            want = model(decoder.token, past_key_values=decoder.cache, use_cache=True).logits
        for layer in decoder.cache.layers:
            layer.cumulative_length.sub_(1)
        assert torch.equal(decoder.step(), want)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_grouped_attention_is_that_of_sdpa(family):
    tokens, logits = torch.randint(128, (2, 10)), {}
    for attention in (None, "grouped"):
        models = models_of.Models(family, (2, 1), "cpu", 1, attention)
        assert models.deep.config._attn_implementation == (
            "eager" if family == "gpt_oss" else attention or "sdpa")
        decoder = models_of.Decoder(models.deep.float(), tokens, 4)
        logits[attention] = decoder.step()
    torch.testing.assert_close(logits["grouped"], logits[None], rtol=1e-4, atol=1e-4)


def test_what_waits_for_the_gpu_is_timed_by_the_host():
    clock, calls = huggingface.Clock("cpu"), []

    def us(name, call):
        raise RuntimeError(f"{name} waits for the GPU")

    clock.timer.us = us
    clock.ready("slow", "prefill", lambda: calls.append(1))
    assert clock.by_host == {"slow"}
    calls.clear()
    assert clock.us("slow", lambda: calls.append(1), 4) > 0 and len(calls) == 4
    clock.forget()
    with pytest.raises(RuntimeError, match="slow waits"):
        clock.us("slow", lambda: None)


@pytest.mark.parametrize("words", [["--models", "gpt2"], ["--calls", "backward"],
                                   ["--peers", "none"], ["--depths", "2,2"], ["--depths", "2"]])
def test_words_that_are_wrong(run, capsys, words):
    with pytest.raises(SystemExit, match="2"):
        run(*words)
    assert "must be" in capsys.readouterr().err


def test_a_model_that_has_no_time_is_not_begun(run, capsys):
    with pytest.raises(FileNotFoundError):  # nothing was measured, so there is no record
        run("--seconds", "0")
    assert "qwen3_moe: not begun, 0 s are over" in capsys.readouterr().out
