"""CUDA graphs and compiled code: recorded once, right for all counts of rows that come after."""

import copy

import pytest
import torch
from conftest import assert_close, assert_seen, captured, draw, offsets_of, slices_of
from torch.utils._pytree import tree_leaves

import cadre

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")
K, N, R = 64, 96, 80


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def counts_of_steps(experts, rows=R):
    """All rows anyhow, a tail, all in one expert, none, all rows again."""
    def anyhow(live):
        return torch.randint(experts, (live,)).bincount(minlength=experts).tolist()

    def all_in(expert):
        return [rows if e == expert else 0 for e in range(experts)]

    return [anyhow(rows), anyhow(rows // 2), all_in(0), all_in(experts - 1), [0] * experts,
            anyhow(rows)]


def linear(device, dtype, experts=5, packed=True, **options):
    """A layer whose biases are not zero."""
    return filled(cadre.GroupedLinear(experts, K, N, device=device, params_dtype=dtype,
                                      single_grouped_weight=packed, single_grouped_bias=packed,
                                      **options))


def moe(device, dtype, top_k=2):
    """A layer whose buffer expert_bias moves tokens."""
    return filled(cadre.MoE(5, K, N, top_k=top_k, normalize=top_k > 1, expert_bias=True, bias=True,
                            device=device, dtype=dtype))


@torch.no_grad()
def filled(layer):
    for p in layer.parameters():
        p.copy_(draw(*p.shape) * 0.2)
    return layer


def weights_of(layer):
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def gradients(layer):
    """Of each parameter: where it accumulates."""
    return [getattr(p, "main_grad", p.grad) for p in layer.parameters()]


def fill_nan(tensors):
    for t in tensors:
        t.detach().fill_(float("nan"))


def assert_same_bits(got, want, what):
    assert len(got) == len(want)
    for index, (g, w) in enumerate(zip(got, want)):
        assert torch.equal(g, w), f"{what}: result {index} differs from the eager one"


class Step:
    """Forward, backward, and what backward left; all that is read or written stays in place."""

    def __init__(self, layer, dtype, first=None):
        self.layer, self.first = layer, first
        self.x = draw(R, K, dtype=dtype, device=CUDA, grad=True)
        self.dy = draw(R, N, dtype=dtype, device=CUDA)
        self.counts = torch.zeros(layer.num_gemms, dtype=torch.int64, device=CUDA)
        self.y = None
        if layer.fuse_wgrad_accumulation:
            for w in weights_of(layer):
                w.main_grad = torch.zeros(w.shape, device=CUDA)

    def run(self):
        self.y = self.layer(self.x, self.counts, self.first)
        self.y.backward(self.dy)
        self.layer.backward_dw()

    def forget(self):
        self.layer.zero_grad()
        self.x.grad = None

    def results(self):
        return [self.y.detach(), self.x.grad, *gradients(self.layer)]

    @torch.no_grad()
    def change(self, counts):
        """Other inputs, weights and content of main_grad; returns the latter."""
        self.counts.copy_(torch.tensor(counts))
        fill_nan(self.results())
        for t in (self.x, self.dy, *self.layer.parameters()):
            t.normal_()
        for w in weights_of(self.layer):
            if hasattr(w, "main_grad"):
                w.main_grad.normal_()
        return [w.main_grad.clone() for w in weights_of(self.layer) if hasattr(w, "main_grad")]

    def eager(self, main_grads):
        """The same of copies, never captured."""
        twin = copy.copy(self)
        twin.layer = copy.deepcopy(self.layer)
        twin.x = self.x.detach().clone().requires_grad_()
        for w, main_grad in zip(weights_of(twin.layer), main_grads):
            w.main_grad = main_grad.clone()
        twin.layer.zero_grad()
        twin.run()
        return twin.results()


WAYS = {
    "plain": {},
    "late": {"delay_wgrad_compute": True},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "main_grad, late": {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
}


def replay_changed(step):
    """Every kind of counts, with all else changed too: the bits of eager."""
    step.counts.copy_(torch.tensor(counts_of_steps(step.layer.num_gemms)[0]))
    graph = captured(step.run, step.forget)
    for counts in counts_of_steps(step.layer.num_gemms):
        main_grads = step.change(counts)
        want = step.eager(main_grads)
        graph.replay()
        got = step.results()
        assert_same_bits(got, want, f"counts {counts}")
        assert torch.all(got[0][sum(counts):] == 0) and torch.all(got[1][sum(counts):] == 0)
        if sum(counts):
            assert_seen(got[0]), assert_seen(got[1])
        elif main_grads and not step.first:
            assert_same_bits([w.main_grad for w in weights_of(step.layer)], main_grads, "no rows")


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("way", list(WAYS))
def test_captured_step_of_a_linear(dtype, packed, way):
    replay_changed(Step(linear(CUDA, dtype, packed=packed, **WAYS[way]), dtype))


@gpu
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_block", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("way", ["plain", "main_grad, late"])
def test_captured_step_in_a_recipe(recipe, way):
    layer = linear(CUDA, torch.bfloat16, recipe=recipe, **WAYS[way])
    replay_changed(Step(layer, torch.bfloat16))


@gpu
@pytest.mark.parametrize("packed", [True, False])
def test_captured_first_microbatch(packed):
    """main_grad is overwritten at every replay."""
    layer = linear(CUDA, torch.bfloat16, packed=packed, **WAYS["main_grad, late"])
    replay_changed(Step(layer, torch.bfloat16, first=True))


@gpu
def test_copies_of_weights_that_a_graph_writes():
    """They are not memory that an eager call made, which others get once the layer is gone."""
    layer, x = linear(CUDA, torch.bfloat16, recipe="mxfp8"), draw(R, K, dtype=torch.bfloat16)
    x, counts = x.to(CUDA), torch.full((5,), R // 5, device=CUDA)

    def microbatches():
        return [layer(x, counts, is_first_microbatch=first) for first in (True, False)]

    with torch.no_grad():
        want = microbatches()
        graph, read = torch.cuda.CUDAGraph(), list(layer.parameters())
        with torch.cuda.graph(graph):
            got = microbatches()
        del layer
        sizes = [1 << bits for bits in range(8, 18)]
        others = [torch.full((size,), 85, dtype=torch.uint8, device=CUDA) for size in sizes * 4]
        graph.replay()
    assert_same_bits(got, want, "replay")
    assert read and all(bool((other == 85).all()) for other in others)


@gpu
@pytest.mark.parametrize("way", ["plain", "main_grad, late"])
@pytest.mark.parametrize("experts", [70, 200])
def test_captured_step_of_many_discrete_experts(experts, way):
    """The addresses of all experts are in the graph."""
    layer = linear(CUDA, torch.bfloat16, experts, packed=False, **WAYS[way])
    replay_changed(Step(layer, torch.bfloat16))


@pytest.mark.parametrize("experts", [70, 200])
@pytest.mark.parametrize("packed", [True, False])
def test_many_experts(device, experts, packed):
    layer = linear(device, torch.float32, experts, packed)
    weight, bias = (torch.cat([p.detach().double().view(-1, *shape)
                               for name, p in layer.named_parameters() if name.startswith(stem)])
                    for stem, shape in (("weight", (N, K)), ("bias", (N,))))
    for counts in counts_of_steps(experts):
        x = draw(R, K, device=device)
        want = [x[rows].double() @ weight[e].t() + bias[e]
                for e, rows in enumerate(slices_of(counts))]
        y = layer(x, torch.tensor(counts, device=device))
        assert_close(y, torch.cat([*want, y.new_zeros(R - sum(counts), N)]), terms=K)


# make_graphed_callables


def learned(call, layer, inputs, dout):
    """All results, and the gradients of the first input and of all parameters."""
    layer.zero_grad()
    x = inputs[0].detach().clone().requires_grad_()
    results = tree_leaves(call(x, *inputs[1:]))
    results[0].backward(dout)
    return [t.detach().clone() for t in (*results, x.grad, *(p.grad for p in layer.parameters()))]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
def test_graphed_linear(dtype, packed):
    layer = linear(CUDA, dtype, packed=packed)
    plain = copy.deepcopy(layer)
    sample = (draw(R, K, dtype=dtype, device=CUDA, grad=True),
              torch.full((5,), R // 5, device=CUDA))
    graphed = torch.cuda.make_graphed_callables(layer, sample)
    for counts in counts_of_steps(5):
        inputs = (draw(R, K, dtype=dtype, device=CUDA), torch.tensor(counts, device=CUDA))
        dy = draw(R, N, dtype=dtype, device=CUDA)
        got, want = (learned(call, layer, inputs, dy)
                     for call, layer in ((graphed, layer), (plain, plain)))
        assert_same_bits(got, want, f"counts {counts}")
        if sum(counts):
            assert_seen(got[0]), assert_seen(got[1])


def push_tokens(layer, step):
    """Which experts get rows: as it comes, all choose one, nobody chooses two, as it comes."""
    moved = [{}, {3: 100.0}, {0: -100.0, 2: -100.0}, {}][step]
    layer.expert_bias.zero_()
    for expert, by in moved.items():
        layer.expert_bias[expert] = by


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2])
def test_graphed_moe(dtype, top_k):
    layer = moe(CUDA, dtype, top_k)
    plain = copy.deepcopy(layer)
    sample = (draw(R, K, dtype=dtype, device=CUDA, grad=True),)
    graphed = torch.cuda.make_graphed_callables(layer, sample)
    loads = set()
    for step in range(4):
        inputs, dout = (draw(R, K, dtype=dtype, device=CUDA),), draw(R, K, dtype=dtype, device=CUDA)
        push_tokens(layer, step), push_tokens(plain, step)
        got, want = (learned(call, layer, inputs, dout)
                     for call, layer in ((graphed, layer), (plain, plain)))
        assert_same_bits(got, want, f"step {step}")
        assert_seen(got[0])
        loads.add(tuple(plain(*inputs)[1].tokens_per_expert.tolist()))
    assert len(loads) == 4
    assert top_k > 1 or (0, 0, 0, R, 0) in loads


@gpu
def test_captured_training_of_a_moe():
    """Forward, backward and a step of gradient descent in one graph, replayed on other tokens."""
    layer = moe(CUDA, torch.bfloat16)
    x, dout = (draw(R, K, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    x.requires_grad_()

    def step(layer, x):
        layer.zero_grad()
        x.grad = None
        out, router = layer(x)
        ((out.float() * dout).mean() + router.load_balancing_loss()).backward()
        with torch.no_grad():
            for p in layer.parameters():
                p.sub_(p.grad)
        return out, x.grad

    made = []

    def run():
        made[:] = step(layer, x)

    graph = captured(run)
    for index in range(4):
        x.detach().normal_(), dout.normal_()
        push_tokens(layer, index)
        plain = copy.deepcopy(layer)
        before = [p.clone() for p in plain.parameters()]
        want = step(plain, x.detach().requires_grad_())
        assert all(p.isfinite().all() for p in plain.parameters())
        assert not any(map(torch.equal, before, plain.parameters()))
        fill_nan([*made, *gradients(layer)])
        graph.replay()
        assert_same_bits([*made, *gradients(layer), *layer.parameters()],
                         [*want, *gradients(plain), *plain.parameters()], f"step {index}")


@gpu
def test_counts_on_the_host_are_refused_in_a_capture():
    layer, x = linear(CUDA, torch.float32), draw(R, K, device=CUDA)
    layer(x, [R // 5] * 5)
    with pytest.raises(ValueError, match="m_splits is on the host, must be a tensor on cuda:0; a "
                       "CUDA graph being captured would replay these very counts for ever"):
        captured(lambda: layer(x, [R // 5] * 5) if torch.cuda.is_current_stream_capturing() else 0)


# Two streams


@gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_two_streams_at_once(graphs, packed):
    """Layers that run at the same time share nothing."""
    steps, runs = [], []
    for counts in counts_of_steps(5)[:2]:
        step = Step(linear(CUDA, torch.bfloat16, packed=packed, **WAYS["main_grad, late"]),
                    torch.bfloat16)
        step.counts.copy_(torch.tensor(counts))
        runs.append(captured(step.run, step.forget).replay if graphs else step.run)
        for w in weights_of(step.layer):
            w.main_grad.zero_()
        step.zeros = [torch.zeros_like(w.main_grad) for w in weights_of(step.layer)]
        steps.append(step)
    wanted = [step.eager(step.zeros) for step in steps]
    streams, results = [torch.cuda.Stream() for _ in steps], [[] for _ in steps]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(30_000_000)  # meanwhile the host fills both queues
    for _ in range(20):
        for step, run, stream, kept in zip(steps, runs, streams, results):
            with torch.cuda.stream(stream):
                for w in weights_of(step.layer):
                    w.main_grad.zero_()
                if not graphs:
                    step.forget()
                run()
                kept.append([t.clone() for t in step.results()])
    torch.cuda.synchronize()
    for kept, want in zip(results, wanted):
        for round_, got in enumerate(kept):
            assert_same_bits(got, want, f"round {round_}")


# torch.compile


def backend_of(name, device):
    if name == "inductor" and device.type == "cpu":
        pytest.skip("inductor compiles C++ for the CPU, which takes long")
    return name


CASES = {  # layer, and whether it is given counts
    "linear": (linear, True),
    "discrete linear": (lambda *where: linear(*where, packed=False), True),
    "mlp": (lambda device, dtype: filled(cadre.GroupedMLP(5, K, N, bias=True, device=device,
                                                          dtype=dtype)), True),
    "moe": (moe, False),
}


def run_compiled(call, layer, takes_counts, rows, dtype, device):
    """Results and gradients, compiled and eager, of new rows and counts."""
    counts = torch.randint(5, (rows // 2,)).bincount(minlength=5).to(device)
    inputs = (draw(rows, K, dtype=dtype, device=device), *([counts] if takes_counts else []))
    with torch.no_grad():
        shape = tree_leaves(layer(*inputs))[0].shape
    dout = draw(*shape, dtype=dtype, device=device)
    return learned(call, layer, inputs, dout), learned(layer, layer, inputs, dout)


def assert_like_eager(got, want, kind):
    """Bits where the graph holds one operator; elsewhere the compiler fuses what is around it."""
    assert len(got) == len(want)
    for g, w in zip(got, want):
        if kind == "moe":
            torch.testing.assert_close(g, w, rtol=3e-2 if g.dtype == torch.bfloat16 else 1e-4,
                                       atol=3e-2 if g.dtype == torch.bfloat16 else 1e-4)
        else:
            assert torch.equal(g, w)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", list(CASES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_once(device, backend, kind, dtype):
    """Another compilation is an error here."""
    make, takes_counts = CASES[kind]
    layer = make(device, dtype)
    call = torch.compile(layer, fullgraph=True, dynamic=True,
                         backend=backend_of(backend, device))
    for step, rows in enumerate((80, 33, 128, 2, 80)):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            got, want = run_compiled(call, layer, takes_counts, rows, dtype, device)
        assert_like_eager(got, want, kind)
        assert rows == 2 or got[0].abs().max() > 0


def test_another_compilation_is_seen(device):
    """What the test above relies on."""
    layer = linear(device, torch.float32)
    call = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    run_compiled(call, layer, True, 80, torch.float32, device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with pytest.raises(torch._dynamo.exc.RecompileError):
            run_compiled(call, layer, True, 33, torch.float32, device)


@gpu
@pytest.mark.parametrize("kind", list(CASES))
def test_compiled_into_graphs(kind):
    """mode="reduce-overhead": compiled once, a graph for every number of rows, any counts."""
    make, takes_counts = CASES[kind]
    layer = make(CUDA, torch.bfloat16)
    call = torch.compile(layer, fullgraph=True, dynamic=True, mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()
    for step, rows in enumerate((80,) * 4 + (48,) * 4 + (80,) * 2):
        torch.compiler.cudagraph_mark_step_begin()
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            got, want = run_compiled(call, layer, takes_counts, rows, torch.bfloat16, CUDA)
        assert_like_eager(got, want, kind)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@gpu
def test_a_captured_op_of_the_caller_buffers():
    """grouped_gemm.out: nothing is allocated, the tail keeps what it held."""
    counts = counts_of_steps(5)
    x, w = (draw(*shape, dtype=torch.bfloat16, device=CUDA) for shape in ((R, K), (5, N, K)))
    y = torch.full((R, N), 7.0, dtype=torch.bfloat16, device=CUDA)
    offsets = offsets_of(counts[0], CUDA)

    def run():
        torch.ops.cadre.grouped_gemm.out(x, [w], offsets, "fprop", out=[y])

    graph = captured(run)
    for live in counts:
        x.normal_(), y.fill_(7.0)
        offsets.copy_(offsets_of(live, CUDA))
        graph.replay()
        want = torch.ops.cadre.grouped_gemm(x, [w], offsets, "fprop")
        assert torch.equal(y[:sum(live)], want[:sum(live)])
        assert torch.all(y[sum(live):] == 7.0)
