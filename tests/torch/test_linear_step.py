"""One call of cadre.GroupedLinear: what it keeps for backward, what it remembers between calls, and
who may watch it."""

import concurrent.futures
import contextlib
import copy
import gc
import io
import weakref

import pytest
import torch
from conftest import draw, offsets_of
from linear_reference import gradients, module
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cadre
from cadre.layers import linear_cache_bytes, linear_pending_bytes, linear_saved_bytes

OPS = torch.ops.cadre
COUNTS, ROWS, K = [33, 0, 61, 2, 9], 107, 64


def kept_by(call):
    """The shapes of what autograd keeps in `call()` besides bytes."""
    shapes = []

    def pack(t):
        if t.dtype != torch.uint8:
            shapes.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return shapes


def layer_call(x, weight, recipe, save_input, **options):
    layer = cadre.GroupedLinear(5, K, 48, bias=False, params_dtype=x.dtype, device=x.device,
                                single_grouped_weight=True, recipe=recipe,
                                save_original_input=save_input, **options)
    layer.weight = torch.nn.Parameter(weight.detach(), weight.requires_grad)
    return layer(x, COUNTS)


CALLS = {
    "module": layer_call,
    "deferred": lambda *a: layer_call(*a, delay_wgrad_compute=True),
    "operator": lambda x, w, recipe, save_input: OPS.grouped_linear(
        x, offsets_of(COUNTS, x.device), [w], [], recipe=recipe, save_input=save_input)[0],
    "mlp": lambda x, w, recipe, _: OPS.grouped_mlp(
        x, offsets_of(COUNTS, x.device), None, [w], [],
        [torch.randn(5, K, 24).to(w).requires_grad_()], [], recipe=recipe)[0],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("recipe, save_input, learns, keeps", [
    ("", False, True, True),
    ("bf16", False, True, True),
    ("", False, False, False),  # frozen weights
    ("mxfp8", False, True, False),  # the copy is kept
    ("bf16,wgrad=mxfp8", False, True, False),
    ("mxfp8,wgrad=bf16", False, True, True),
    ("mxfp8", False, False, False),
    ("mxfp8", True, True, True),
    ("mxfp8", True, False, False),
])
def test_x_is_kept_where_it_is_read(name, recipe, save_input, learns, keeps):
    """On the CPU, which has all recipes."""
    if name == "mlp" and save_input:
        pytest.skip("an MLP has no such option")
    x = draw(ROWS, K, dtype=torch.bfloat16, grad=True)
    w = draw(5, 48, K, dtype=torch.bfloat16, grad=learns)
    shapes = kept_by(lambda: CALLS[name](x, w, recipe, save_input))
    assert ((ROWS, K) in shapes) == keeps


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "bf16,wgrad=mxfp8", "mxfp8,wgrad=bf16"])
@pytest.mark.parametrize("packed", [True, False])
def test_bits_of_the_operator(recipe, packed):
    """The module goes straight to the library; torch.compile and others use the operator."""
    x, dy = draw(ROWS, K, dtype=torch.bfloat16, grad=True), draw(ROWS, 48, dtype=torch.bfloat16)
    layer = module("cpu", k=K, n=48, packed=packed, dtype=torch.bfloat16, recipe=recipe)
    weight, bias = layer.operands()
    y, _ = OPS.grouped_linear(x, offsets_of(COUNTS, "cpu"), weight, bias, recipe=recipe)
    want = torch.autograd.grad(y, [x, *weight, *bias], dy)
    for options in ({}, {"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True},
                    {"save_original_input": True}):
        layer = module("cpu", k=K, n=48, packed=packed, dtype=torch.bfloat16, recipe=recipe,
                       **options)
        for w in layer.operands()[0]:
            w.main_grad = torch.full_like(w, float("nan"))
        leaf = x.detach().requires_grad_()
        got = layer(leaf, COUNTS, True)
        assert torch.equal(got, y)
        got.backward(dy)
        layer.backward_dw()
        weight, bias = layer.operands()
        found = [w.main_grad if "fuse_wgrad_accumulation" in options else w.grad for w in weight]
        for a, b in zip([leaf.grad, *found, *(b.grad for b in bias)], want):
            assert torch.equal(a, b)


def test_gradients_of_experts_are_their_own(device):
    """They come from one allocation, and none reaches into another."""
    layer = module(device, packed=False, k=3, n=7)
    x, dy = draw(20, 3, device=device), draw(20, 7, device=device)
    layer(x, [4] * 5).backward(dy)
    want = gradients(layer, "weight")
    layer.weight1.grad.fill_(9)
    layer.bias1.grad.fill_(9)
    assert torch.equal(gradients(layer, "weight")[[0, 2, 3, 4]], want[[0, 2, 3, 4]])
    for name, p in layer.named_parameters():
        assert p.grad.is_contiguous() and p.grad.data_ptr() % 64 == 0, name
    layer(x, [4] * 5).backward(dy)
    assert torch.equal(gradients(layer, "weight")[1], 9 + want[1])


def test_second_derivatives_are_refused(device):
    layer, x = module(device), draw(20, 24, device=device, grad=True)
    (dx,) = torch.autograd.grad(layer(x, [4] * 5).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cadre.GroupedLinear has no second derivatives"):
        dx.sum().backward()


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(op)
        return op(*args, **(kwargs or {}))


def test_modes_see_operators(device):
    layer, x = module(device), draw(20, 24, device=device, grad=True)
    counts = torch.tensor([4] * 5, device=device)
    want = layer(x, counts)
    with Watch() as watch:
        y = layer(x, counts, is_first_microbatch=True)
        y.sum().backward()
    assert torch.equal(y, want)
    assert {OPS.grouped_linear.default, OPS.grouped_linear_backward.default} <= set(watch.seen)


class Wrapped(torch.Tensor):
    """A tensor that has no memory of its own; operators see what is inside."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype,
                                                   device=inside.device, requires_grad=True)

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        def inside(t):
            return t.inside if isinstance(t, cls) else t

        return op(*torch.utils._pytree.tree_map(inside, args),
                  **torch.utils._pytree.tree_map(inside, kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_subclasses_see_operators(device, packed, which):
    layer, x = module(device, packed=packed), draw(20, 24, device=device)
    want = layer(x, [4] * 5)
    name = which if packed else f"{which}4"
    if which == "x":
        x = Wrapped(x)
    else:
        layer._parameters[name] = Wrapped(layer._parameters[name].detach())
    assert torch.equal(layer(x, [4] * 5), want)


def test_fake_tensors(device):
    layer = module("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer.to_empty(device=device)
        x = torch.empty(20, 24, device=device, requires_grad=True)
        y = layer(x, torch.empty(5, dtype=torch.int32, device=device))
        assert y.shape == (20, 40) and y.device.type == device.type
        y.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle"])
def test_copies_of_a_layer_remember_nothing(device, how):
    layer = module(device, delay_wgrad_compute=True)
    x, dy = draw(20, 24, device=device), draw(20, 40, device=device)
    layer(x, [4] * 5).backward(dy)
    if how == "pickle":
        file = io.BytesIO()
        torch.save(layer, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        other = getattr(copy, how)(layer)
    other.backward_dw()
    assert other.weight.grad is None
    other(x, [4] * 5).backward(2 * dy)
    layer.backward_dw()
    want = layer.weight.grad.clone()
    if how == "copy":  # the same parameters
        layer.weight.grad = None
    other.backward_dw()
    assert torch.equal(other.weight.grad, 2 * want)


@pytest.mark.parametrize("memory, what", [(None, "None"), (torch.zeros(3), "another tensor")])
def test_no_such_memory(device, memory, what):
    x, w = draw(20, 24, device=device), draw(5, 40, 24, device=device, grad=True)
    with pytest.raises(ValueError, match=rf"memory is {what}, must be the handle\(\) of a "):
        OPS._linear_step(x, offsets_of([4] * 5, device), False, [w], [], None, "", False, None,
                         False, True, None, None, None, memory)


def test_a_layer_that_is_gone_before_backward(device):
    layer, x = module(device, delay_wgrad_compute=True), draw(20, 24, device=device, grad=True)
    y = layer(x, [4] * 5)
    y.sum().backward(retain_graph=True)
    want, x.grad = x.grad, None
    del layer
    y.sum().backward()
    assert torch.equal(x.grad, want)


def test_what_is_pending_holds_no_graph(device):
    """The input of a pending gradient has no history, which would keep all layers before alive."""
    layer = module(device, delay_wgrad_compute=True)
    before = torch.nn.Linear(24, 24, device=device)
    alive = weakref.ref(before.weight)
    layer(before(draw(20, 24, device=device)), [4] * 5).sum().backward()
    del before
    gc.collect()
    assert alive() is None
    layer.backward_dw()


@pytest.mark.parametrize("other", [False, True])
def test_checkpoints_compute_either_way_again(device, other):
    """Forward and its repetition in backward, one of them watched by a mode."""
    layer, counts = module(device), torch.tensor([4] * 5, device=device)
    x = draw(20, 24, device=device, grad=True)
    layer(x, counts).sum().backward()
    want, x.grad = x.grad, None
    with Watch() if other else contextlib.nullcontext():
        y = checkpoint(layer, x, counts, use_reentrant=False)
    with contextlib.nullcontext() if other else Watch():
        y.sum().backward()
    assert torch.equal(x.grad, want)


def test_negative_views_and_no_gradient_at_all(device):
    """Tensors whose memory says something else than they are."""
    x, dy = draw(20, 24, device=device), draw(20, 40, device=device)
    for options in ({}, {"delay_wgrad_compute": True}):
        layer = module(device, **options)
        leaf = torch._neg_view(-x).requires_grad_()
        y = layer(leaf, [4] * 5)
        assert torch.equal(y, module(device)(x, [4] * 5))
        (want,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        (got,) = torch.autograd.grad(y, leaf, torch._neg_view(-dy), retain_graph=True)
        assert torch.equal(got, want)
        (none,) = torch.autograd.grad(y, leaf, torch._efficientzerotensor(20, 40, device=device))
        assert torch.all(none == 0)


def test_results_nobody_watched_and_gradients_somebody_does(device):
    """Forward went straight to the library; backward is the operator then."""
    layer, x = module(device), draw(20, 24, device=device, grad=True)
    dy, inputs = draw(20, 40, device=device), [x, *layer.parameters()]
    y = layer(x, [4] * 5)
    want = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    for watched in (torch._neg_view(-dy), Wrapped(dy)):
        got = torch.autograd.grad(y, inputs, watched, retain_graph=True)
        assert all(map(torch.equal, got, want))
    none = torch.autograd.grad(y, inputs, torch._efficientzerotensor(20, 40, device=device))
    assert all(torch.all(t == 0) for t in none)


@pytest.mark.parametrize("delay", [True, False])
def test_what_no_operator_has_refuses_fakes(device, delay):
    """A deferred gradient, or a buffer."""
    out = None if delay else torch.empty(20, 40, device=device)
    options = {"delay_wgrad_compute": delay}
    layer, x = module(device, **options), draw(20, 24, device=device)
    layer._parameters["weight"] = Wrapped(layer.weight.detach())
    refusal = "a tensor is fake, a subclass or transformed, must be plain with main_grad"
    with pytest.raises(NotImplementedError, match=refusal):
        layer(x, [4] * 5, out=out)
    layer = module("meta", **options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer.to_empty(device=device)
        counts = torch.empty(5, dtype=torch.int32, device=device)
        with pytest.raises(NotImplementedError, match="must be plain with main_grad"):
            layer(torch.empty(20, 24, device=device), counts,
                  out=None if out is None else torch.empty(20, 40, device=device))


def test_plain_tensors_where_new_ones_are_fake(device):
    """The operator gives a fake result, and a deferred gradient has no operator."""
    x, splits = draw(20, 24, device=device), cadre.Offsets(offsets_of([4] * 5, device))
    layer, deferred = module(device), module(device, delay_wgrad_compute=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(layer(x, splits), FakeTensor)
        with pytest.raises(NotImplementedError, match="must be plain with main_grad"):
            deferred(x, splits)


def test_an_input_that_is_plain_when_it_is_there(device):
    """As what collectives return: operators see what is inside, a copy of it is plain."""
    layer, x = module(device, delay_wgrad_compute=True), draw(20, 24, device=device)
    want = layer(x, [4] * 5)
    assert torch.equal(layer(Wrapped(x), [4] * 5), want)


@pytest.mark.parametrize("strict", [True, False])
def test_export(device, strict):
    layer = module(device)
    x, counts = draw(20, 24, device=device), torch.tensor([4] * 5, device=device)
    program = torch.export.export(layer, (x, counts), strict=strict)
    assert torch.equal(program.module()(x, counts), layer(x, counts))


def test_autocast_casts_weights_once():
    layer = module("cpu", packed=False, delay_wgrad_compute=True)
    kept = []
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append((t.data_ptr(), t.shape)) or t, lambda t: t):
        ys = [layer(draw(20, 24), [4] * 5) for _ in range(3)]
    assert ys[0].dtype == torch.bfloat16
    assert len({at for at, shape in kept if shape == (40, 24)}) == 5


@pytest.mark.parametrize("recipe", [
    "mxfp8", "mxfp8,fprop=bf16", "bf16,fprop=mxfp8", "bf16", "bf16,wgrad=mxfp8"])
def test_copies_of_weights_live_on_for_a_backward(recipe):
    layer = module("cpu", k=K, n=64, dtype=torch.bfloat16, recipe=recipe)
    x = draw(ROWS, K, dtype=torch.bfloat16, grad=True)
    y, again = (layer(x, COUNTS, is_first_microbatch=True) for _ in range(2))
    want, got = (torch.autograd.grad(each, x, torch.ones_like(y))[0] for each in (again, y))
    assert torch.equal(got, want)


def test_threads_share_a_layer():
    """Backward in three threads, what they leave in a fourth; every gradient is added once."""
    layer, rounds = module("cpu", delay_wgrad_compute=True, bias=False), 60
    x, dy = draw(20, 24), draw(20, 40)
    layer(x, [4] * 5).backward(dy)
    layer.backward_dw()
    want, layer.weight.grad = layer.weight.grad, None

    def work(_):
        for _ in range(rounds):
            layer(x, [4] * 5).backward(dy)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        works = [pool.submit(work, i) for i in range(3)]
        while not all(w.done() for w in works):
            layer.backward_dw()
        for w in works:
            w.result()
    while layer._memory.own.pending():
        layer.backward_dw()
    torch.testing.assert_close(layer.weight.grad, 3 * rounds * want, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True},
                                     {"fuse_wgrad_accumulation": True}])
@pytest.mark.parametrize("packed", [True, False])
def test_the_device_is_that_of_the_tensors(options, packed):
    """Not the current one: both GPUs are asked while the first one is current, in turns."""
    layers = [module(f"cuda:{i}", k=K, n=48, packed=packed, dtype=torch.bfloat16, **options)
              for i in range(2)]
    x, dy = draw(ROWS, K, dtype=torch.bfloat16), draw(ROWS, 48, dtype=torch.bfloat16)
    results = []
    for layer in (*layers, *layers):
        at = next(layer.parameters()).device
        for w in layer.operands()[0]:
            w.main_grad, w.grad = torch.zeros_like(w), None
        leaf = x.to(at).requires_grad_()
        assert torch.cuda.current_device() == 0
        y = layer(leaf, torch.tensor(COUNTS, device=at))
        y.backward(dy.to(at))
        layer.backward_dw()
        dw = [w.main_grad if "fuse_wgrad_accumulation" in options else w.grad
              for w in layer.operands()[0]]
        results.append([t.cpu() for t in (y, leaf.grad, *dw)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_whole_layers_on_the_second_gpu():
    moe = cadre.MoE(4, K, 96, top_k=2, dtype=torch.bfloat16, device="cpu")
    x = draw(ROWS, K, dtype=torch.bfloat16)
    results = []
    for i in range(2):
        copied = copy.deepcopy(moe).to(f"cuda:{i}")
        leaf = x.to(f"cuda:{i}").requires_grad_()
        y, _ = copied(leaf)
        y.float().square().sum().backward()
        results.append([t.cpu() for t in (y, leaf.grad, *(p.grad for p in copied.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_threads_take_what_is_pending():
    """Four at once: each gradient is taken by one of them, none by two."""
    layer = module("cpu", delay_wgrad_compute=True, bias=False)
    x, dy, memory = draw(20, 24), draw(20, 40), layer._memory.own
    for _ in range(1000):
        layer(x, [4] * 5).backward(dy)

    def take(_):
        while memory.pending():
            memory.run_next()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(4)))
    assert memory.pending() == 0 and layer.weight.grad is not None


@pytest.mark.parametrize("recipe", ["", "mxfp8", "mxfp8,wgrad=bf16"])
def test_memory_of_a_caller_of_the_out_overloads(recipe):
    """As large as the functions say, which plan nothing of the call itself; the same bits."""
    x, dy = draw(ROWS, K, dtype=torch.bfloat16), draw(ROWS, 64, dtype=torch.bfloat16)
    w, offsets = draw(5, 64, K, dtype=torch.bfloat16), offsets_of(COUNTS, "cpu")
    wants, words = (True, True, False, False), dict(recipe=recipe)
    want, kept = OPS.grouped_linear(x, offsets, [w], [], wants=wants, **words)
    dx, (dw,), *_ = OPS.grouped_linear_backward(dy, x, kept, offsets, [w], [], None, wants=wants,
                                                **words)

    def memory(count):
        return OPS._memory(x, count(x, offsets, [w], wants=wants, **words))

    y, saved, cache = torch.empty_like(want), memory(linear_saved_bytes), memory(linear_cache_bytes)
    assert (cache.numel() > 0) == ("mxfp8" in recipe) and saved.shape == kept.shape
    OPS.grouped_linear.out(x, offsets, [w], [], wants=wants, **words, zero_tail=True, y=y,
                           saved=saved, weight_cache=cache)
    got, late = torch.empty_like(dx), memory(linear_pending_bytes)
    OPS.grouped_linear_backward.out(dy, x, saved, offsets, [w], [], None, wants=wants, **words,
                                    weight_cache=cache, zero_tail=True, dx=got, dbias=[],
                                    dbias_scale=None, pending=late)
    dweight = torch.empty_like(w)
    OPS.grouped_linear_wgrad.out(dy, x, saved, late, offsets, [w], wants=wants, **words,
                                 dweight=[dweight])
    for one, other in ((y, want), (got, dx), (dweight, dw)):
        assert torch.equal(one, other)
