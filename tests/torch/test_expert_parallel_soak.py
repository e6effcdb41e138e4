"""tests/torch/expert_parallel_soak.py in small: what it finds right, and faults that it must see.
GPUs where each rank has one, else the CPU."""

import pytest
import torch.distributed as dist
from expert_parallel_soak import EXCHANGES, LAYERS, Soak, exchange, options_of, run

STEPS, REPLAYS = 150, 60  # on a CPU

# What the processes run


def all_right(rank, device):
    more = 10 if device.type == "cuda" else 1
    soak = Soak(dist.group.WORLD, device, seed=3)
    assert soak.steps(more * STEPS) == more * STEPS
    assert soak.replays(more * REPLAYS) == more * REPLAYS
    soak.look()


class Planted:
    """Exchanges of which one result of rank 1 is off by one, once, behind some that are right."""

    def __init__(self, rank, which, part):
        self.rank, self.which, self.part, self.calls, self.done = rank, which, part, 0, False

    def __call__(self, *given, **named):
        results = exchange(*given, **named)
        result = results[self.which][self.part]
        self.calls += 1
        if self.rank == 1 and self.calls > 5 and result.numel() and not self.done:
            result.view(-1)[-1] += 1
            self.done = True
        return results


def planted(rank, device, faults):
    for which, part in faults:
        soak = Soak(dist.group.WORLD, device, 4, make=Planted(rank, which, part))
        with pytest.raises(RuntimeError, match=(
                rf"seed 4, wrong: {EXCHANGES[which]} of step \d+ on rank 1$")):
            soak.steps(30)


def replays_of_old_inputs(rank, device):
    """A rank whose graph leaves results as they were."""
    soak = Soak(dist.group.WORLD, device, 5)
    captured = soak.captured

    def forgetful(*given):
        graph, inputs, results = captured(*given)
        kept = [tuple(t.clone() for t in part) for part in results]
        return graph, inputs, kept if rank == 1 else results

    soak.captured = forgetful
    with pytest.raises(RuntimeError, match=r"wrong: dispatch of step \d+ on rank 1, collect of"):
        soak.replays(10)


def too_little_time(rank, device):
    options = options_of(["--exchanges", "4000", "--seconds", "7"])
    assert run(options, device, until=0) == "7 s were over before all of it was made"
    options = options_of(["--exchanges", "10", "--replays", "3"])
    assert run(options, device, until=float("inf")) == ""


def batches(rank, device):
    """Steps differ: many rows, none, dropped choices, and all layers."""
    soak = Soak(dist.group.WORLD, device, 3)
    drawn = [soak.batch(number) for number in range(STEPS)]
    assert len({id(batch.ep) for batch in drawn}) == len(LAYERS)
    rows = [int(batch.is_row.sum()) for batch in drawn]
    assert 0 in rows and max(rows) > 100 and len(set(rows)) > STEPS / 4
    dropped = [int((batch.scale > 0).sum() - batch.kept.sum()) for batch in drawn]
    assert sum(n > 0 for n in dropped) > STEPS / 4
    assert any(batch.tokens[rank] == 0 for batch in drawn)
    assert any(batch.x.any() and batch.wanted()[1][0].any() for batch in drawn)


# The tests


def test_all_is_right(ranks):
    ranks.run(all_right)


def test_batches_differ(ranks):
    ranks.run(batches)


def test_faults_are_found(ranks):
    ranks.run(planted, [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (3, 0), (3, 1)])


def test_a_graph_that_leaves_old_results_is_found(ranks):
    ranks.run(replays_of_old_inputs)


def test_time_that_is_over(ranks):
    ranks.run(too_little_time)
