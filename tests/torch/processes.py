"""Processes that run tests together: NCCL where each has a GPU, else gloo on the CPU."""

import faulthandler
import os
import traceback
from datetime import timedelta
from multiprocessing import connection

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

PATIENCE_S = 900  # with an answer, which a busy machine may need; who is stuck has none


def on_gpus(world):
    """Whether each of so many processes has a GPU of its own."""
    return torch.cuda.device_count() >= world


def serve(rank, world, store, pipe):
    """Runs what comes through the pipe; answers with an empty text or a traceback."""
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank) if on_gpus(world) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank,
                            world_size=world, init_method=f"file://{store}",
                            timeout=timedelta(seconds=PATIENCE_S))
    pipe.send("")
    while (job := pipe.recv()) is not None:
        task, arguments = job
        try:
            task(rank, device, *arguments)
            pipe.send("")
        except Exception:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


class Processes:
    """`world` processes, started again after a failure: they no longer wait for each other then."""

    def __init__(self, folder, world):
        self.folder, self.world = folder, world
        self.starts, self.all, self.pipes = 0, [], []

    def start(self):
        self.starts += 1
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.world):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, daemon=True, args=(
                rank, self.world, str(self.folder / f"store{self.starts}"), theirs))
            process.start()
            theirs.close()
            self.all.append(process)
            self.pipes.append(mine)
        self.gather("start")

    def run(self, task, *arguments):
        if not self.all:
            self.start()
        for pipe in self.pipes:
            pipe.send((task, arguments))
        self.gather(task.__name__)

    def run_losing(self, lost, task, *arguments):
        """The ranks `lost` must end without an answer, and the others come through all the same.
        New processes serve what is next."""
        if not self.all:
            self.start()
        for pipe in self.pipes:
            pipe.send((task, arguments))
        self.gather(task.__name__, lost)
        self.stop()

    def gather(self, what, lost=()):
        """The answers of all; whoever has said nothing a little after a failure never will."""
        failures, waiting = [], {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            ready = connection.wait(list(waiting), 5 if failures else PATIENCE_S)
            if not ready:
                failures.append(f"{what}: no answer of ranks {list(waiting.values())}")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answer = pipe.recv()
                    if rank in lost:
                        answer = "did not end"
                except EOFError:
                    answer = "" if rank in lost else "ended"
                if answer:
                    failures.append(f"rank {rank}: {answer}")
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)

    def stop(self):
        for process in self.all:
            process.kill()
            process.join()
        self.all, self.pipes = [], []

    def finish(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.all:
            process.join(20)
        self.stop()
