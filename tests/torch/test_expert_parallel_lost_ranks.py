"""A rank that is killed or raises, in each phase of the route window: the others are told which,
and when, have NaN, and work on with a new window. GPUs where each rank has one, else the CPU."""

import os
import random
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expert_parallel_soak import EXCHANGES, Batch, exchange
from processes import Processes, on_gpus

import cadre

VICTIM, RANKS = 1, 2
LIMIT_S = 3
GPU = pytest.mark.skipif(not on_gpus(RANKS), reason="needs a GPU for each rank")

# What the processes run


def window(group, device, **options):
    return cadre.ExpertParallel(group, 3, 2, route="window", tokens=40, hidden=24, rows=160,
                                dtype=torch.float32, device=device, **options)


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def batch_of(ep, device, number=1):
    generator = torch.Generator(device).manual_seed(number)
    return Batch(ep, generator, random.Random(number), full=True)


def assert_works(ep, device):
    batch = batch_of(ep, device)
    for got, want in zip(exchange(ep, *batch.inputs()), batch.wanted()):
        assert all(map(torch.equal, got, want))
    settle(device)
    ep.check()


def gloo(rank, device):
    """A group whose ranks hear of one that ends, and which works by now: what is loaded when it is
    first called takes none of LIMIT_S."""
    group = dist.new_group(backend="gloo")
    assert_works(window(group, device), device)
    dist.barrier(group)
    return group


def calls_of(ep, batch):
    """The four exchanges by their names, each of which takes the results of those before."""
    ops, name = torch.ops.cadre, ep._window.name
    x, chosen, prob, dout, scale, codes = batch.inputs()

    def where(done):
        return done["dispatch"][3:]

    return {
        "dispatch": lambda done: ops._window_dispatch(name, x, chosen, prob),
        "collect": lambda done: (ops._window_collect(name, done["dispatch"][0], *where(done)),),
        "collect_backward": lambda done: (
            ops._window_collect_backward(name, dout, *where(done)),),
        "dispatch_backward": lambda done: ops._window_dispatch_backward(
            name, done["collect_backward"][0], codes, *where(done))}


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class Failed(Exception):
    """Of the one that raises."""


def raise_failed():
    raise Failed


def told(phase):
    return (rf"rank {VICTIM} has not come to {phase.replace('_', ' ')}, exchange "
            rf"{1 + EXCHANGES.index(phase)}, within {1000 * LIMIT_S} ms; the window is of no more "
            "use")


def step_until(ep, batch, phase, then):
    """Exchanges until one fails, and what was done by then; `then` is called before `phase`."""
    done = {}
    for name, call in calls_of(ep, batch).items():
        if name == phase:
            then()
        done[name] = call(done)
        if name == phase:
            settle(batch.device)
            ep.check()
    return done


def survive(ep, device, phase):
    """What a rank sees whose peer does not come to `phase`."""
    done, begun = {}, time.monotonic()
    with pytest.raises(RuntimeError, match=told(phase)):
        for name, call in calls_of(ep, batch_of(ep, device)).items():
            done[name] = call(done)
            if name == phase:  # a GPU's exchange returns before it has failed
                settle(device)
                assert done[name][0].isnan().all()
                ep.check()
    assert list(done) == list(EXCHANGES[:EXCHANGES.index(phase) + (device.type == "cuda")])
    assert time.monotonic() - begun >= 0.9 * LIMIT_S
    for use in (ep.check, lambda: exchange(ep, *batch_of(ep, device).inputs())):
        with pytest.raises(RuntimeError, match=told(phase)):
            use()


def killed(rank, device, phase):
    ep = window(gloo(rank, device), device, limit_s=LIMIT_S)
    if rank == VICTIM:
        step_until(ep, batch_of(ep, device), phase, kill)
    survive(ep, device, phase)
    work_on(rank, device)


def work_on(rank, device):
    """While what is gone is still mapped, and after that."""
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    for _ in range(2):
        assert_works(window(alone, device), device)


def killed_behind_queued_work(rank, device, phase):
    """Its GPU was to come: the exchange stands in its queue, behind what takes seconds."""
    ep = window(gloo(rank, device), device, limit_s=LIMIT_S)
    if rank == VICTIM:
        done = {}
        for name, call in calls_of(ep, batch_of(ep, device)).items():
            if name == phase:
                torch.cuda._sleep(2**34)
            done[name] = call(done)
            if name == phase:
                kill()
    survive(ep, device, phase)
    work_on(rank, device)


def killed_in_a_graph(rank, device):
    """The one that lives replays a graph of all four."""
    ep = window(gloo(rank, device), device, limit_s=LIMIT_S)
    inputs = batch_of(ep, device).inputs()
    exchange(ep, *inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = exchange(ep, *inputs)
    for turn in range(3):
        if rank == VICTIM and turn == 2:
            kill()
        graph.replay()
        settle(device)
        is_whole = turn < 2
        assert all(bool(part[0].isnan().any()) != is_whole for part in results)
    with pytest.raises(RuntimeError, match=rf"rank {VICTIM} has not come to dispatch, exchange 13"):
        ep.check()
    work_on(rank, device)


def killed_while_a_window_is_made(rank, device, calls):
    """Before it takes part in so many gatherings."""
    group, gather, left = gloo(rank, device), dist.all_gather_object, [calls]

    def ending(*given, **named):
        if rank == VICTIM and not left[0]:
            kill()
        left[0] -= 1
        return gather(*given, **named)

    with mock.patch.object(dist, "all_gather_object", ending):
        with pytest.raises(Exception):
            window(group, device, limit_s=LIMIT_S)
    work_on(rank, device)


def raised(rank, device, phase):
    """Who raises is alive, and is told at its next exchange that the others have given up."""
    group = gloo(rank, device)
    ep = window(group, device, limit_s=LIMIT_S)
    if rank != VICTIM:
        survive(ep, device, phase)
        dist.barrier(group)
    else:
        with pytest.raises(Failed):
            step_until(ep, batch_of(ep, device), phase, raise_failed)
        dist.barrier(group)
        with pytest.raises(RuntimeError, match=told(phase)):
            exchange(ep, *batch_of(ep, device).inputs())
            settle(device)
            ep.check()
    assert_works(window(group, device), device)  # of both, again


# The tests


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    processes = Processes(tmp_path_factory.mktemp("pair"), RANKS)
    yield processes
    processes.finish()


@pytest.mark.parametrize("phase", EXCHANGES)
def test_a_rank_that_raises(pair, phase):
    pair.run(raised, phase)


@pytest.mark.parametrize("phase", EXCHANGES)
def test_a_rank_that_is_killed(pair, phase):
    pair.run_losing([VICTIM], killed, phase)


@GPU
@pytest.mark.parametrize("phase", EXCHANGES)
def test_a_rank_that_is_killed_behind_queued_work(pair, phase):
    pair.run_losing([VICTIM], killed_behind_queued_work, phase)


@GPU
def test_a_rank_that_is_killed_in_a_graph(pair):
    pair.run_losing([VICTIM], killed_in_a_graph)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_rank_that_is_killed_while_a_window_is_made(pair, calls):
    pair.run_losing([VICTIM], killed_while_a_window_is_made, calls)


def nothing(rank, device):
    pass


def test_ranks_that_do_not_end_as_they_must(pair):
    with pytest.raises(pytest.fail.Exception, match="rank 1: did not end"):
        pair.run_losing([VICTIM], nothing)
