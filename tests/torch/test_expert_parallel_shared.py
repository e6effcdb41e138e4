"""Shared experts of cadre.MoE(ep=) on a second stream: the bits of one stream, what is queued in
which order, and that no stream reads or frees too early. On CPUs streams are stood in for."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import WORLD, same_bits
from stream_watch import Stream, watched
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import cadre
from cadre.side_stream import SideWork, side_of

H, F, E, TOP_K = 64, 48, 4 * WORLD, 2  # E of all ranks
TOKENS, MANY = 40, 3000  # of a rank; exchanges of few are one kernel on GPUs
LAYERS = {"own": dict(shared_features=32), "gate": dict(shared_features=32, shared_gate=True),
          "recipe": dict(shared_features=32, shared_gate=True, recipe="mxfp8"), "module": dict(),
          "both": dict(shared_features=32)}


# What the processes run


class Mlp(nn.Module):
    """A shared expert of a caller, which remembers on which stream it ran."""

    def __init__(self, device, dtype):
        super().__init__()
        self.up = nn.Linear(H, F, device=device, dtype=dtype)
        self.down = nn.Linear(F, H, device=device, dtype=dtype)
        self.streams = []

    def forward(self, x):
        if x.is_cuda and not torch.compiler.is_compiling():
            self.streams.append(torch.cuda.current_stream())
        return self.down(self.up(x).relu())


def layer(kind, device, ep, dtype=torch.bfloat16, **options):
    """Of one seed on all ranks, with weights that tell results apart."""
    torch.manual_seed(4)
    module = Mlp(device, dtype) if kind in ("module", "both") else None
    moe = cadre.MoE(E, H, F, top_k=TOP_K, normalize=True, device=device, dtype=dtype, ep=ep,
                    shared_expert=module, **LAYERS[kind], **options)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(draw(*p.shape) * 0.2)
    return moe


def tokens_of(route, device):
    return MANY if route == "window" and device.type == "cuda" else TOKENS


def exchange(route, device, dtype=torch.bfloat16):
    """few: by a window. block: by the collective, without a look at counts."""
    options = {}
    if route in ("window", "few"):
        options = dict(route="window", tokens=tokens_of(route, device), hidden=H, dtype=dtype,
                       device=device)
    if route == "block":
        options = dict(block=TOKENS * TOP_K)
    return cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K, **options)


def numbers(rank, device, route="window", dtype=torch.bfloat16):
    torch.manual_seed(70 + rank)
    return [draw(tokens_of(route, device), H, dtype=dtype, device=device) for _ in range(2)]


def step(moe, x, dout, around=lambda moe, x: moe(x)[0], keep=False):
    """out and all gradients. Nobody but autograd has what the layer reads, and dy."""
    leaf = x.clone().requires_grad_()
    out = around(moe, leaf * 1) * 2
    out.backward(dout, retain_graph=keep)
    if keep:
        out.backward(dout)
    grads = [p.grad for p in moe.parameters()]
    assert all(g is not None for g in grads)
    return [out.detach(), leaf.grad, *grads]


def in_a_checkpoint(moe, x):
    return checkpoint(lambda t: moe(t)[0], x, use_reentrant=False)


def same_steps(rank, device, kind, route):
    """On and off: eager, backward twice, within a checkpoint, and with nothing to learn."""
    ep = exchange(route, device)
    x, dout = numbers(rank, device, route)
    for options in (dict(), dict(keep=True), dict(around=in_a_checkpoint)):
        results = [step(layer(kind, device, ep, overlap_shared=on), x, dout, **options)
                   for on in (True, False)]
        assert all(map(same_bits, *results)), options
    with torch.no_grad():
        results = [layer(kind, device, ep, overlap_shared=on)(x)[0] for on in (True, False)]
    assert same_bits(*results)
    ep.check()


def watched_steps(rank, device, kind, route):
    """The same of streams that a CPU stands in for, with nothing out of order."""
    if device.type != "cpu":
        return
    ep = exchange(route, device)
    x, dout = numbers(rank, device, route)
    for options in (dict(), dict(keep=True), dict(around=in_a_checkpoint)):
        want = step(layer(kind, device, ep, overlap_shared=False), x, dout, **options)
        moe = layer(kind, device, ep)
        with watched() as watch:
            got = step(moe, x, dout, **options)
            moe(x)
        assert not watch.wrong, watch.wrong
        assert {"main", "side"} == {stream for _, stream in watch.calls}
        assert all(map(same_bits, got, want)), options


def in_this_order(rank, device):
    """The shared expert is begun before dispatch, its backward before that of collect, and joined
    behind that of dispatch."""
    if device.type != "cpu":
        return
    ep, (x, dout) = exchange("window", device), numbers(rank, device)
    moe, joins = layer("gate", device, ep), []
    with watched() as watch:
        join = SideWork.join

        def noted(work):
            joins.append(len(watch.calls))
            join(work)

        with mock.patch.object(SideWork, "join", noted):
            step(moe, x, dout)
    names = [name for name, _ in watch.calls]
    side = [name for name, stream in watch.calls if stream == "side"]
    assert "grouped_mlp" in side and "grouped_mlp_backward" in side

    def place(name, stream="main"):
        return watch.calls.index((name, stream))

    assert place("grouped_mlp", "side") < place("_window_dispatch") < place("_window_collect")
    assert names.index("_window_collect") < joins[0]
    assert (place("grouped_mlp_backward", "side") < place("_window_collect_backward")
            < place("_window_dispatch_backward") < joins[1])
    assert len(joins) == 2


def beside_or_behind(rank, device):
    """What stays on one stream: a module that learns of an x that wants no gradient, since nobody
    would wait for its backward, and the built-in one under autocast, whose copies of weights it
    would not see, or in nvfp4, which draws random numbers."""
    if device.type != "cpu":
        return
    ep, (x, dout) = exchange("window", device), numbers(rank, device)
    autocast = torch.autocast("cpu", torch.bfloat16)
    for kind, options, within, on_side in (
            ("module", {}, nullcontext(), False), ("module", {}, torch.no_grad(), True),
            ("own", {}, nullcontext(), True), ("own", {}, autocast, False),
            ("own", dict(recipe="nvfp4"), nullcontext(), False)):
        moe = layer(kind, device, ep, **options)
        with watched() as watch, within:
            out = moe(x)[0]
            if out.requires_grad:
                out.backward(dout)
        assert not watch.wrong
        assert ("side" in {stream for _, stream in watch.calls}) == on_side, (kind, options)


def faults_are_seen(rank, device):
    """By the watch: streams that do not wait, and memory that nobody keeps."""
    if device.type != "cpu":
        return
    ep, (x, dout) = exchange("window", device), numbers(rank, device)
    begun = SideWork.begun

    def never_joined(work):
        work._read, work._end = (), None

    def keeping_nothing(work, *read):
        return begun(work)

    def wrong(where=None, name="", fault=None):
        moe = layer("gate", device, ep)
        with watched() as watch:
            with mock.patch.object(where, name, fault) if where else nullcontext():
                step(moe, x, dout)
        return watch.wrong

    assert not wrong()
    assert any("on main reads too early" in w for w in wrong(SideWork, "join", never_joined))
    assert any("on side reads too early" in w
               for w in wrong(Stream, "wait_stream", lambda own, other: None))
    assert any("on main takes memory" in w for w in wrong(SideWork, "begun", keeping_nothing))


def joined_where_something_raises(rank, device):
    """Of a module, and of what comes behind the shared experts: the caller's stream waits for what
    has been begun, whose memory goes back to it."""
    if device.type != "cpu":
        return
    ep, (x, _) = exchange("collective", device), numbers(rank, device, "collective")
    moe, leaf = layer("both", device, ep), x.requires_grad_()
    for where, name, begun in ((Mlp, "forward", 2), (cadre.MoE, "_mixed_by_ranks", 2)):
        with watched(), mock.patch.object(where, name, side_effect=ArithmeticError), \
                mock.patch.object(SideWork, "join") as join, pytest.raises(ArithmeticError):
            moe(leaf)
        assert join.call_count == begun


def compiled_as_a_whole(rank, device):
    """Its exchanges and shared experts are in one graph."""
    ep, (x, dout) = exchange("window", device), numbers(rank, device)
    moe = layer("both", device, ep)
    run = torch.compile(moe, backend="aot_eager", fullgraph=True)
    results = []
    for call in (moe, run):
        moe.zero_grad()
        results.append(step(moe, x, dout, lambda moe, x: call(x)[0]))
    assert all(map(same_bits, *results))


def captured_steps(rank, device, kind, route):
    """A graph of forward and backward, replayed with other tokens, and its bits without overlap."""
    if device.type != "cuda":
        return
    ep, (x, dout) = exchange(route, device), numbers(rank, device, route)
    inputs = x.clone().requires_grad_()
    layers = [layer(kind, device, ep, overlap_shared=on) for on in (True, False)]

    def run(moe):
        out = moe(inputs)[0]
        return [out.detach(), *torch.autograd.grad(out, [inputs, *moe.parameters()], dout)]

    graphs = [captured(lambda moe=moe: run(moe)) for moe in layers]
    for seed in range(3):
        with torch.no_grad():
            torch.manual_seed(seed)
            inputs.copy_(draw(*x.shape, dtype=x.dtype))
        results = []
        for graph, made in graphs:
            graph.replay()
            results.append(made)
        torch.cuda.synchronize()
        assert all(map(same_bits, *results)), seed
        assert all(map(same_bits, results[0], run(layers[1]))), seed
    ep.check()


def captured(run):
    """A graph of `run`, which runs twice before, and what it makes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL look at their events all the while.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        made = run()
    return graph, made


def on_another_stream(rank, device):
    """What the module sees, and the kernels that a profiler sees."""
    if device.type != "cuda":
        return
    ep, (x, dout) = exchange("window", device), numbers(rank, device)
    main = torch.cuda.current_stream()
    for on in (True, False):
        moe = layer("both", device, ep, overlap_shared=on)
        step(moe, x, dout)
        assert moe.shared_expert.streams == [side_of(main) if on else main]
        assert side_of(main) != main
        own = layer("own", device, ep, overlap_shared=on)
        step(own, x, dout)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step(own, x, dout)
            torch.cuda.synchronize()
        kernels = [e for e in seen.profiler.kineto_results.events()
                   if str(e.device_type()) == "DeviceType.CUDA" and "Memcpy" not in e.name()]
        streams = {e.device_resource_id() for e in kernels}
        assert len(streams) == 1 + on, streams


# The tests


@pytest.mark.parametrize("route", ["window", "few", "collective"])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_overlap_changes_no_bit(ranks, kind, route):
    ranks.run(same_steps, kind, route)


@pytest.mark.parametrize("route", ["window", "collective"])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_no_stream_reads_or_frees_too_early(ranks, kind, route):
    ranks.run(watched_steps, kind, route)


def test_what_runs_beside_and_what_behind(ranks):
    ranks.run(beside_or_behind)


def test_faults_of_streams_are_seen(ranks):
    ranks.run(faults_are_seen)


def test_what_is_queued_when(ranks):
    ranks.run(in_this_order)


def test_an_error_joins_what_was_begun(ranks):
    ranks.run(joined_where_something_raises)


@pytest.mark.parametrize("route", ["window", "few", "block"])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_overlap_in_a_graph(ranks, kind, route):
    ranks.run(captured_steps, kind, route)


def test_shared_experts_run_on_another_stream(ranks):
    ranks.run(on_another_stream)


def test_a_compiled_layer_is_one_graph(ranks):
    ranks.run(compiled_as_a_whole)


def test_the_option_is_a_bool():
    with pytest.raises(TypeError, match="^overlap_shared is a str, must be a bool"):
        cadre.MoE(E, H, F, top_k=2, overlap_shared="no", device="cpu")
