"""examples/train_gpt.py on several ranks: the losses of one process with the whole batch, whatever
keeps the ranks alike, and as many exchanges in a compiled step as in an eager one."""

import math
import os
import pathlib
import sys

import pytest
import torch
from expert_parallel_cases import WORLD
from processes import Processes, on_gpus
from torch.distributed.tensor import DTensor

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import train_gpt  # noqa: E402
from gpt_ranks import Ranks  # noqa: E402
from test_expert_parallel_window import exchanges  # noqa: E402

TINY = ("--layers 2 --hidden 32 --features 16 --experts 8 --top-k 2 --batch 8 --context 32 "
        "--log-every 100 --rate 3e-3 --steps 6 --backend aot_eager --dtype fp32").split()
LINE = b"experts get the rows that the router gives them, and no others.\n"
TEXT = torch.frombuffer(bytearray(LINE * 40), dtype=torch.uint8)


def options_of(device, words):
    return train_gpt.parse_arguments([*TINY, "--device", device.type, *words.split()])


def train(options):
    """On whichever ranks there are."""
    ranks = Ranks.join(options, train_gpt.DTYPES[options.dtype])
    return train_gpt.train(options, options.runs[0], TEXT, ranks)["loss"]


def losses(rank, device, words, want):
    os.environ["LOCAL_RANK"] = str(rank)
    assert train(options_of(device, words)) == pytest.approx(want, rel=1e-3), words


def gradients_of(options):
    """Of the first batch, as the optimizer reads them, and the ranks."""
    ranks = Ranks.join(options, train_gpt.DTYPES[options.dtype])
    trainer = train_gpt.Trainer(options, options.runs[0], TEXT, ranks)
    trainer.batch.copy_(trainer.text[trainer.starts[0][:, None] + trainer.within])
    trainer.forward(trainer.batch)[0].backward()  # balance is of each rank's tokens, so without it
    ranks.finish_gradients(trainer.model, math.inf)
    return {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in trainer.model.named_parameters()}, ranks


def gradients(rank, device, words, want):
    os.environ["LOCAL_RANK"] = str(rank)
    got, ranks = gradients_of(options_of(device, words))
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        its = want[name]
        if ".experts." in name:
            its = its.chunk(ranks.sharing)[ranks.mesh["ep"].get_local_rank()]
        torch.testing.assert_close(gradient.cpu(), its, rtol=1e-3, atol=1e-6,
                                   msg=lambda what: f"{words}, {name}: {what}")


def exchanges_of_a_step(rank, device, words):
    """Of two layers, which dispatch and collect, forward and backward."""
    os.environ["LOCAL_RANK"] = str(rank)
    counted = {}
    for mode in ("eager", "compiled"):
        torch.compiler.reset()
        options = options_of(device, f"{words} --mode {mode}")
        ranks = Ranks.join(options, torch.float32)
        trainer = train_gpt.Trainer(options, options.runs[0], TEXT, ranks)
        for number in range(2):  # tracers call the operators, too
            trainer.step(number)
        _, counted[mode] = exchanges(trainer.step, 2)
    assert counted["compiled"] == counted["eager"]
    assert len(counted["eager"]) == 8


# The tests

# Where one process is: random weights are others on another device.
HERE = torch.device("cuda" if on_gpus(2) else "cpu")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    both = Processes(tmp_path_factory.mktemp("two"), 2)
    yield both
    both.finish()


@pytest.fixture(scope="module")
def one_process():
    got = train(options_of(HERE, ""))
    assert got[-1] < got[0] - 0.1
    return got


KINDS = ["--parallel ddp", "--parallel fsdp2", "--mode compiled --parallel ddp",
         "--mode compiled --parallel fsdp2"]


@pytest.mark.parametrize("words", [*KINDS, "--route collective",
                                   "--route collective --mode compiled"])
def test_two_ranks_share_the_experts(two, one_process, words):
    two.run(losses, f"--ep 2 {words}", one_process)


@pytest.fixture(scope="module")
def gradients_of_one():
    gradients, _ = gradients_of(options_of(HERE, ""))
    return {name: gradient.cpu() for name, gradient in gradients.items()}


@pytest.mark.parametrize("words", KINDS[:2])
def test_gradients_of_two_ranks(two, gradients_of_one, words):
    two.run(gradients, f"--ep 2 {words}", gradients_of_one)


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
@pytest.mark.parametrize("words", [f"--ep 2 --replicas 2 {words}" for words in KINDS[:2]])
def test_gradients_of_four_ranks(ranks, gradients_of_one, words):
    ranks.run(gradients, words, gradients_of_one)


@pytest.mark.skipif(WORLD < 4, reason="needs four ranks")
@pytest.mark.parametrize("words", ["--ep 4 --mode compiled", "--ep 1 --replicas 4",
                                   *(f"--ep 2 --replicas 2 {words}" for words in KINDS)])
def test_four_ranks(ranks, one_process, words):
    ranks.run(losses, words, one_process)


@pytest.mark.skipif(not on_gpus(2), reason="needs two GPUs")
def test_graphed(two):
    want = train(options_of(HERE, "--steps 20"))
    two.run(losses, "--ep 2 --mode graphed --steps 20", want)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_compiled_step_exchanges_as_an_eager_one(two, parallel):
    two.run(exchanges_of_a_step, f"--ep 2 --parallel {parallel}")


def test_a_checkpoint_of_any_number_of_ranks(two, one_process, tmp_path):
    two.run(losses, f"--ep 2 --until 2 --save {tmp_path}/two", one_process[:2])
    here = options_of(HERE, f"--load {tmp_path}/two --until 4 --save {tmp_path}/one")
    assert train(here) == pytest.approx(one_process[2:4], rel=1e-3)
    two.run(losses, f"--ep 2 --parallel fsdp2 --load {tmp_path}/one", one_process[4:])
    with pytest.raises(SystemExit, match="steps of the checkpoint are 4, must be below 3"):
        train(options_of(HERE, f"--load {tmp_path}/one --until 3"))


def test_ranks_that_torchrun_has_started(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        options_of(HERE, "--ep 2")
    assert "WORLD_SIZE is 3, must be 2, --ep times --replicas" in capsys.readouterr().err
