"""cadre.ExpertParallel: what one rank is refused is an error on all of them, and none waits for
another. The CPU, where every rank has the same libraries."""

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from torch.nn.parallel import DistributedDataParallel

import cadre

GLOO = []  # the group of all processes on the CPU, of this process


def group_on_cpu():
    if not GLOO:
        GLOO.append(dist.new_group(backend="gloo"))
    return GLOO[0]


# What the processes run


def compiled_in_ddp(rank, device, by_window):
    """DDP that takes experts for the same on all ranks is refused in compiled code, also in code
    that was compiled before there was one; what DDP leaves alone goes on as one graph."""
    group, x = group_on_cpu(), draw(5, 8)
    window = {"route": "window", "tokens": 5, "hidden": 8, "dtype": torch.float32, "device": "cpu"}

    def layer():
        ep = cadre.ExpertParallel(group, 2, 2, **window) if by_window else group
        return cadre.MoE(2 * group.size(), 8, 16, top_k=2, device="cpu", ep=ep)

    def compiled(module, **options):
        torch.compiler.reset()
        return torch.compile(module, backend="aot_eager", **options)

    def in_place(module, **options):
        torch.compiler.reset()
        module.compile(backend="aot_eager", **options)
        return module

    def run_before(module):
        run = compiled(module)
        run(x)
        return run

    for around in (lambda m: DistributedDataParallel(compiled(m), process_group=group),
                   lambda m: compiled(DistributedDataParallel(m, process_group=group)),
                   lambda m: DistributedDataParallel(in_place(m), process_group=group),
                   lambda m: DistributedDataParallel(run_before(m), process_group=group)):
        with pytest.raises(ValueError, match="DistributedDataParallel keeps .*experts.w1 alike"):
            around(layer())(x)
    moe = layer()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        moe, [name for name, p in moe.named_parameters() if not getattr(p, "allreduce", True)])
    apart = DistributedDataParallel(moe, process_group=group)
    want = apart(x)[0].detach()
    in_place(moe, fullgraph=by_window)
    out = apart(x)[0]
    out.sum().backward()
    assert torch.equal(out, want)


# The tests


@pytest.mark.parametrize("by_window", [False, True])
def test_ddp_around_compiled_experts(ranks, by_window):
    ranks.run(compiled_in_ddp, by_window)
