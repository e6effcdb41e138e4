"""cadre.ExpertParallel.adopt: windows in memory that the caller has shared. GPUs where each rank
has one, with symmetric memory of torch, else files that processes map."""

import json
import os
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import (
    H, WORLD, answers_to, assert_same, draw_case, one_process, parallel)

import cadre

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page  # noqa: E402

PAGE = os.sysconf("SC_PAGESIZE")
PART = 2**20  # of a rank, more than any window here
BUFFERS = []  # of this process, kept as long as it


class Mapped:
    """As symmetric memory of torch, of processes of the CPU: a file a rank, which all map."""

    def __init__(self, rank, folder, name, group=None):
        (folder / f"{name}{rank}").write_bytes(os.urandom(PART))
        dist.barrier(group)
        self.parts = [torch.from_file(str(folder / f"{name}{p}"), shared=True, size=PART,
                                      dtype=torch.uint8)
                      for p in range(dist.get_world_size(group))]
        self.buffer_ptrs = [part.data_ptr() for part in self.parts]


def memory_for(ep, rank, device, folder, name="memory"):
    assert ep.window_bytes <= PART
    if device.type == "cpu":
        return Mapped(rank, folder, name)
    import torch.distributed._symmetric_memory as symm_mem
    BUFFERS.append(symm_mem.empty(ep.window_bytes, dtype=torch.uint8, device=device))
    return symm_mem.rendezvous(BUFFERS[-1], dist.group.WORLD)


def largest(device):
    return cadre.ExpertParallel(None, 5, 3, route="window", tokens=30, hidden=H, factor=4,
                                dtype=torch.float32, device=device)


# What the processes run


def bits(rank, device, folder):
    """Random routings through one adopted window, which the layers share."""
    window = largest(device)
    window.adopt(memory_for(window, rank, device, folder))
    for seed in range(20):
        case = draw_case(seed, WORLD, device)
        ep = cadre.ExpertParallel(None, case.experts, case.chosen.shape[1], route="window",
                                  tokens=max(1, *case.tokens), hidden=H, dtype=case.x.dtype,
                                  share=window, factor=WORLD, layer=seed)
        got, _ = parallel(ep, case, rank)
        assert_same(case, rank, got, one_process(case), f"seed {seed}")
    window.check()


def in_the_memory(rank, device, folder):
    """What is written into the window stands in the caller's memory; its address list will do."""
    ep = largest(device)
    memory = memory_for(ep, rank, device, folder, "listed")
    ep.adopt(list(memory.buffer_ptrs))
    tokens = ep.empty_tokens()
    tokens.fill_(rank + 0.5)
    if device.type == "cpu":
        mine = memory.parts[rank][:ep.window_bytes // 4 * 4].view(torch.float32)
        assert (mine == rank + 0.5).sum() == tokens.numel()
    dist.barrier()


USES = """
by_collective.adopt(memory)
by_collective.window_bytes
ep.adopt("memory")
ep.adopt("memory" if rank == 0 else memory.buffer_ptrs)
larger(share=ep)
ep.adopt([])
ep.adopt([0.5] * ranks)
ep.adopt([2**70] * ranks)
ep.adopt(memory.buffer_ptrs[:1])
ep.adopt([heap.data_ptr() // page * page + page, *memory.buffer_ptrs[1:]])
ep.adopt(memory.buffer_ptrs[:1] * ranks)
ep.adopt([p + 64 for p in memory.buffer_ptrs])
ep.adopt([p + part - page for p in memory.buffer_ptrs])
"""


def answers(rank, device, folder, path):
    """The uses in docs/errors.md, of two ranks on the CPU. After them the window is that of
    `memory` still."""
    cpu, ranks = torch.device("cpu"), 2
    group = dist.new_group(list(range(ranks)), backend="gloo")
    if rank >= ranks:
        return
    by_collective = cadre.ExpertParallel(group, 5, 3)
    ep = cadre.ExpertParallel(group, 5, 3, route="window", tokens=30, hidden=H, factor=4,
                              dtype=torch.float32, device=cpu)
    memory, heap = Mapped(rank, folder, "errors", group), torch.zeros(PART, dtype=torch.uint8)
    ep.adopt(memory)

    def larger(share):
        return cadre.ExpertParallel(group, 5, 3, route="window", tokens=31, factor=4, share=share)

    known = {"ep": ep, "rank": rank, "larger": larger, "by_collective": by_collective,
             "memory": memory, "heap": heap, "page": PAGE, "part": PART, "ranks": ranks}
    given = answers_to(USES, known)
    case = draw_case(1, ranks, cpu, "any", torch.float32, 5, 3)
    parallel(ep, case, rank)
    if rank == 0:
        path.write_text(json.dumps(given))


def tensors_elsewhere(rank, device):
    """Of processes that share a GPU, each with a window there and tokens on the host."""
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    ep = cadre.ExpertParallel(alone, 2, 2, route="window", tokens=4, hidden=6, device="cuda:0",
                              dtype=torch.float32)
    x, experts, prob = draw(4, 6), torch.zeros(4, 2, dtype=torch.int32), torch.rand(4, 2)
    with pytest.raises(ValueError, match="x is on cpu, must be on cuda:0"):
        ep.dispatch(x, experts, prob)
    there = [t.cuda(0) for t in (x, experts, prob)]
    rows, _, _, handle = ep.dispatch(*there)
    with pytest.raises(ValueError, match="y is on cpu, must be on cuda:0"):
        ep.collect(rows.cpu(), handle)
    assert torch.equal(ep.collect(rows, handle), 2 * there[0])


# The tests


def test_bits_of_one_process(ranks, tmp_path):
    ranks.run(bits, tmp_path)


def test_the_window_is_the_memory(ranks, tmp_path):
    ranks.run(in_the_memory, tmp_path)


def test_errors(ranks, tmp_path):
    ranks.run(answers, tmp_path, tmp_path / "answers")
    errors_page.settle("door_expert_parallel_adopt", json.loads((tmp_path / "answers").read_text()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_not_where_the_window_is(ranks):
    ranks.run(tensors_elsewhere)
