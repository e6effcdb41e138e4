"""What a layer keeps or owes dies with it: 200 layers are made, used and dropped, in every mode."""

import copy
import ctypes
import gc
import io
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cadre
from conftest import captured

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"),
                                reason="this C library does not count what is allocated")

COUNTS, ROWS, K, N = [3, 0, 8], 11, 32, 64
LAYERS, FIRST = 200, 20  # the first fill what is kept once, such as plans
RECIPES = ("fp8_tensor", "fp8_block", "mxfp8", "nvfp4", "mxfp4")


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """What is there already need not be looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def allocated_bytes() -> int:
    """Bytes that malloc has given away: no page of a freed block counts."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Counts
    counts = ask()
    return counts.uordblks + counts.hblkhd


def device_bytes() -> int:
    """Of tensors on the GPU, and of the segments that they and the pools of graphs lie in."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() + torch.cuda.memory_reserved()


def assert_dies(make_and_use, bytes_now=allocated_bytes) -> None:
    """`make_and_use()` returns what must die when its last name goes."""
    made = [weakref.ref(make_and_use()) for _ in range(FIRST)]
    before = bytes_now()
    made += [weakref.ref(make_and_use()) for _ in range(LAYERS)]
    grown = bytes_now() - before
    assert not any(ref() for ref in made)
    assert grown < LAYERS * 512, f"{grown} bytes more after {LAYERS} layers"


def rows(dtype=torch.bfloat16):
    return torch.randn(ROWS, K, dtype=dtype, requires_grad=True)


def linear(packed=True, **options):
    layer = cadre.GroupedLinear(3, K, N, params_dtype=torch.bfloat16, single_grouped_weight=packed,
                                init_method=torch.nn.init.zeros_, **{"device": "cpu"} | options)
    if options.get("fuse_wgrad_accumulation"):
        for name, p in layer.named_parameters():
            if name.startswith("weight"):
                p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
    return layer


def used(layer, **arguments):
    layer(rows(), COUNTS, **arguments).sum().backward()
    return layer


LINEARS = {
    "plain": ({}, {}),
    "discrete": ({"packed": False}, {}),
    "pending": ({"delay_wgrad_compute": True}, {}),
    "discrete, pending": ({"delay_wgrad_compute": True, "packed": False}, {}),
    "main_grad": ({"fuse_wgrad_accumulation": True}, {}),
    "main_grad, pending": ({"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}, {}),
    "cached, pending": ({"delay_wgrad_compute": True, "recipe": "mxfp8"},
                        {"is_first_microbatch": True}),
    "saved": ({"save_original_input": True, "recipe": "mxfp8"}, {}),
    **{f"cached {recipe}": ({"recipe": recipe}, {"is_first_microbatch": True})
       for recipe in RECIPES},
    "cached before it is asked for": ({"recipe": "mxfp8"}, {"is_first_microbatch": False}),
}


@pytest.mark.parametrize("mode", LINEARS)
def test_linear(mode):
    options, arguments = LINEARS[mode]
    assert_dies(lambda: used(linear(**options), **arguments))


def test_backward_that_never_comes():
    """What forward kept dies with y."""

    def use():
        layer = linear(delay_wgrad_compute=True, recipe="mxfp8")
        layer.last = layer(rows(), COUNTS, is_first_microbatch=True)
        return layer

    assert_dies(use)


def test_buffers():
    def use():
        layer, x = linear(), rows()
        layer(x, COUNTS, out=torch.empty(ROWS, N, dtype=x.dtype),
              dgrad_out=torch.empty(ROWS, K, dtype=x.dtype)).sum().backward()
        return layer

    assert_dies(use)


def test_errors_in_between():
    """Each leaves something: copies, a gradient that cannot be computed any more."""

    def use():
        layer = linear(delay_wgrad_compute=True, recipe="mxfp8")
        used(layer, is_first_microbatch=True)
        with pytest.raises(ValueError):
            layer(rows(), [100] * 3)
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError):
            layer.backward_dw()
        return layer

    assert_dies(use)


class Cycle:
    def __init__(self, layer):
        self.layer = layer


@pytest.mark.parametrize("how", ["attribute", "hook", "wgrad_hook"])
def test_cycles(how):
    """Trainers hang on parameters what leads back to the layer, while a gradient is pending."""

    def use():
        layer = linear(delay_wgrad_compute=True, recipe="mxfp8",
                       fuse_wgrad_accumulation=how == "hook")
        cycle = Cycle(layer)
        if how == "attribute":
            layer.weight.owner = cycle
        elif how == "hook":
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            layer.weight.register_hook(lambda grad: cycle.layer and grad)
        else:
            layer.register_wgrad_accumulation_and_reduce_hooks(lambda: cycle.layer)
        return used(layer, is_first_microbatch=True)

    assert_dies(use)


def test_copies_and_pickles():
    def use():
        layer = used(linear(delay_wgrad_compute=True, recipe="mxfp8"), is_first_microbatch=True)
        used(copy.deepcopy(layer), is_first_microbatch=False)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        return used(torch.load(file, weights_only=False), is_first_microbatch=True)

    assert_dies(use)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def use():
        layer = linear(delay_wgrad_compute=True)
        with cadre.autocast(recipe="mxfp8"):
            checkpoint(layer, rows(), COUNTS, use_reentrant=reentrant).sum().backward()
        return layer

    assert_dies(use)


@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}])
def test_compiled(options):
    torch.compiler.reset()
    compiled = torch.compile(lambda layer, x, counts: layer(x, counts, True), backend="aot_eager",
                             dynamic=False)
    counts = torch.tensor(COUNTS)

    def use():
        layer = linear(recipe="mxfp8", **options)
        compiled(layer, rows(), counts).sum().backward()
        return layer

    assert_dies(use)


@pytest.mark.parametrize("recipe", ["", "mxfp8"])
@pytest.mark.parametrize("keep_h", [True, False])
def test_mlp(recipe, keep_h):
    def use():
        mlp = cadre.GroupedMLP(3, K, N, bias=True, keep_h=keep_h, device="cpu", recipe=recipe,
                               dtype=torch.bfloat16)
        mlp(rows(), COUNTS, torch.rand(ROWS)).sum().backward()
        return mlp

    assert_dies(use)


def test_moe():
    def use():
        moe = cadre.MoE(3, K, N, top_k=2, expert_bias=True, bias=True, device="cpu",
                        dtype=torch.bfloat16, shared_expert=torch.nn.Identity())
        out, router = moe(rows())
        (out.sum() + router.load_balancing_loss()).backward()
        return moe

    assert_dies(use)


@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}])
def test_sequential(options):
    """One grouped_mlp, or three operations."""

    def use():
        row = cadre.ops.Sequential(cadre.ops.GroupedLinear(3, K, 2 * N, device="cpu", **options),
                                   cadre.ops.SwiGLU(),
                                   cadre.ops.GroupedLinear(3, N, K, device="cpu", **options))
        row(rows(torch.float32), COUNTS, COUNTS).sum().backward()
        return row

    assert_dies(use)


@pytest.mark.parametrize("family", ["Mixtral", "Llama4"])
def test_models_of_transformers(family):
    """Experts that transformers dispatches, and experts that it does not."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    import cadre.huggingface  # noqa: F401 (registers itself)
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class
    sizes = dict(vocab_size=16, hidden_size=K, intermediate_size=N, num_hidden_layers=1,
                 num_attention_heads=2, num_key_value_heads=1, num_local_experts=3)
    ids = torch.arange(ROWS).unsqueeze(0)

    def use():
        model = kind._from_config(config(**sizes), experts_implementation="cadre")
        model(input_ids=ids, labels=ids).loss.backward()
        return model

    assert_dies(use)


def test_functions():
    """Operators have no layer: what they keep for backward dies with the result."""

    def use():
        x, w = rows(), torch.randn(3, K, N, dtype=torch.bfloat16, requires_grad=True)
        y = cadre.grouped_mm(x, w, offs=torch.tensor(COUNTS).cumsum(0).int())
        y.sum().backward()
        return w

    assert_dies(use)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("delay", [True, False])
def test_cuda_graphs(packed, delay):
    """Captured, replayed, dropped: nothing of a graph's memory stays."""
    counts = torch.tensor(COUNTS, device="cuda")

    def use():
        layer = linear(packed, delay_wgrad_compute=delay, device="cuda")
        x = rows().detach().cuda().requires_grad_()

        def step():
            layer(x, counts).sum().backward()
            layer.backward_dw()

        layer.graph = captured(step)
        layer.graph.replay()
        return layer

    assert_dies(use, device_bytes)
