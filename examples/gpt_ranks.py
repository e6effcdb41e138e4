"""Several ranks for examples/train_gpt.py: experts that are spread over some of them, and replicas
of all of it, by DistributedDataParallel or FSDP2. Every rank trains on its part of each batch, and
a step is that of one process with the whole batch."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import cadre

PARALLELS = ("ddp", "fsdp2")
ROUTES = ("window", "collective")
DDP_WARM_STEPS = 11  # as DistributedDataParallel wants before a step is captured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--replicas", type=int, default=1, help="of all of these")
    parser.add_argument("--parallel", choices=PARALLELS, default="ddp",
                        help="how ranks keep alike what is no expert (%(default)s)")
    parser.add_argument("--route", choices=ROUTES, default="window",
                        help="of rows between ranks (%(default)s)")


def refuse(options: argparse.Namespace) -> None:
    """Errors: ValueError for ranks that cannot be."""
    ranks = options.ep * options.replicas
    for name in ("ep", "replicas"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}, must be 1 or more")
    for name, parts in (("experts", options.ep), ("batch", ranks)):
        if getattr(options, name) % parts:
            raise ValueError(f"{name} is {getattr(options, name)}, must be a multiple of {parts}, "
                             "the ranks that share it")
    if ranks > 1 and (found := int(os.environ.get("WORLD_SIZE", ranks))) != ranks:
        raise ValueError(f"WORLD_SIZE is {found}, must be {ranks}, --ep times --replicas")
    for run in options.runs:
        if run.implementation == "torch" and options.ep > 1:
            raise ValueError("implementation is torch, must be cadre with --ep; torch's layer has "
                             "all experts")
        if run.mode == "graphed" and options.ep > 1 and options.route == "collective":
            raise ValueError("route is collective, must be window where mode is graphed; the host "
                             "reads counts in it")
        if run.mode == "graphed" and ranks > 1 and options.parallel == "fsdp2":
            raise ValueError("mode is graphed, must be eager or compiled with fsdp2; it waits for "
                             "the host")
    if torch.device(options.device).type == "cuda" and torch.cuda.device_count() < ranks > 1:
        raise ValueError(f"GPUs are {torch.cuda.device_count()}, must be {ranks}, one a rank")


def must_start(options: argparse.Namespace) -> bool:
    """Whether this process is none of the ranks yet, as it is under torchrun."""
    return options.ep * options.replicas > 1 and "WORLD_SIZE" not in os.environ


def start(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Runs the program once for each rank. Errors: SystemExit where one of them fails."""
    ranks = options.ep * options.replicas
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           "--nproc-per-node", str(ranks), *words], check=False)
    if done.returncode:
        raise SystemExit(f"a rank failed; the {ranks} ranks have ended")


@dataclass
class Ranks:
    """Of this program; one rank alone has no group."""

    count: int = 1
    rank: int = 0
    sharing: int = 1  # ranks that share the experts
    parallel: str = "ddp"
    mesh: DeviceMesh | None = None  # ("replicas", "ep")
    ep: cadre.ExpertParallel | None = None

    @staticmethod
    def join(options: argparse.Namespace, dtype: torch.dtype) -> "Ranks":
        """Sets options.device to that of this rank."""
        count = options.ep * options.replicas
        if count == 1:
            return Ranks()
        device = torch.device(options.device)
        if device.type == "cuda":
            options.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(options.device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                    timeout=timedelta(minutes=10))
        mesh = init_device_mesh(device.type, (options.replicas, options.ep),
                                mesh_dim_names=("replicas", "ep"))
        ranks = Ranks(count, dist.get_rank(), options.ep, options.parallel, mesh)
        if options.ep > 1:
            window = {} if options.route == "collective" else dict(
                tokens=options.batch // count * options.context, hidden=options.hidden,
                dtype=dtype, device=options.device, limit_s=600)  # a rank may compile for long
            ranks.ep = cadre.ExpertParallel(mesh["ep"], options.experts // options.ep,
                                            options.top_k, factor=options.ep, route=options.route,
                                            **window)
        return ranks

    def leave(self) -> None:
        if self.count > 1:
            dist.barrier()
            dist.destroy_process_group()

    def part(self, batch: Tensor) -> Tensor:
        """This rank's of [..., batch]."""
        return batch.tensor_split(self.count, -1)[self.rank]

    def mean(self, losses: Tensor) -> Tensor:
        """Over the ranks."""
        if self.count == 1:
            return losses
        total = losses.clone()
        dist.all_reduce(total)
        return total / self.count

    def groups(self, model: nn.Module) -> list[dict]:
        """Parameters for an optimizer: those of experts apart, which may be sharded otherwise."""
        own = {id(p) for p in experts_of(model)}
        return [{"params": [p for p in model.parameters() if (id(p) in own) == of_experts]}
                for of_experts in (False, True)]

    def spread(self, model: nn.Module, compiled: Callable | None) -> nn.Module:
        """The model to call: DDP leaves experts alone, FSDP2 shards them over the replicas.
        compiled: what makes compiled code of a function, if it is to be compiled."""
        if self.count > 1 and self.parallel == "fsdp2":
            for block in model.blocks:
                if compiled:  # FSDP2 works between the blocks
                    block.forward = compiled(block.forward)
                self._shard(block)
            self._shard(model)
            return model
        if compiled:
            model.forward = compiled(model.forward)
        if self.count == 1:
            return model
        if self.sharing > 1:
            own = {id(p) for p in experts_of(model)}
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                model, [name for name, p in model.named_parameters() if id(p) in own])
        device = next(model.parameters()).device
        return DistributedDataParallel(model, [device] if device.type == "cuda" else None)

    def _shard(self, module: nn.Module) -> None:
        """A block, or the model when its blocks are sharded."""
        whole = DeviceMesh.from_group(dist.group.WORLD, self.mesh.device_type)
        alone = self.sharing > 1 and self.mesh["replicas"].size() == 1
        if self.sharing > 1 and not alone and hasattr(module, "moe"):
            fully_shard(module.moe.experts, mesh=self.mesh["replicas"])
        fully_shard(module, mesh=whole, ignored_params=set(experts_of(module) if alone else ()))

    @torch.no_grad()
    def finish_gradients(self, model: nn.Module, most: float) -> None:
        """The mean over all tokens of every gradient, clipped to a norm of `most`."""
        if self.count == 1:
            clip_grad_norm_(model.parameters(), most)
            return
        own = experts_of(model) if self.sharing > 1 else []
        replicas = self.mesh["replicas"]
        for p in own:
            if self.parallel == "ddp" and replicas.size() > 1:
                dist.all_reduce(p.grad, group=replicas.get_group())
            p.grad /= self.count if self.parallel == "ddp" else self.sharing  # FSDP2 did the rest
        ids = {id(p) for p in own}
        rest = [p for p in model.parameters() if id(p) not in ids]
        squares = norm(own) ** 2
        if own:
            dist.all_reduce(squares, group=self.mesh["ep"].get_group())
        total = (norm(rest) ** 2 + squares).sqrt()
        for parameters in (own, rest):
            clip_grads_with_norm_(parameters, most, total)


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if ".experts." in f".{name}"]


def norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Of the gradients, whole where FSDP2 has sharded them."""
    total = get_total_norm([p.grad for p in parameters])
    return total.full_tensor() if hasattr(total, "full_tensor") else total


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict:
    return {"model": get_model_state_dict(model), "steps": steps,
            "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(folder: os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
         ) -> None:
    """What any number of ranks can load. The optimizer has been given to cadre.keep_whole."""
    checkpoint.save(state_of(model, optimizer, steps), checkpoint_id=folder)


def load(folder: os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The steps that had been done."""
    state = state_of(model, optimizer, 0)
    rates = [group["lr"] for group in optimizer.param_groups]
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate  # the very tensor that a step fills
    return state["steps"]
