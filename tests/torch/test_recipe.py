"""Recipes: their words, and layers under one, from a context or of their own."""

import copy
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import draw
from linear_reference import kept_bytes, module
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import cadre
from cadre.recipe import active_recipe, recipe_text

COUNTS = [3, 0, 9, 1, 4]


def peer(**predicates):
    """A recipe object of TransformerEngine, as far as Cadre looks."""
    names = ("mxfp8", "nvfp4", "float8_block_scaling", "float8_current_scaling", "delayed")
    return SimpleNamespace(**{name: lambda on=predicates.get(name, False): on for name in names})


def wrapped(moe):
    moe.experts = checkpoint_wrapper(moe.experts)
    return moe


def compiled(moe):
    torch._dynamo.reset()
    return torch.compile(moe, backend="eager", fullgraph=True)


def test_words():
    assert str(cadre.Recipe("mxfp8")) == "mxfp8"
    assert str(cadre.Recipe("nvfp4", wgrad="bf16")) == "nvfp4,wgrad=bf16"
    assert str(cadre.Recipe("bf16", "mxfp8", "mxfp8", "fp8_block*fp8_block")) == (
        "bf16,fprop=mxfp8,dgrad=mxfp8,wgrad=fp8_block*fp8_block")
    assert str(cadre.Recipe("fp8_block,pinned", wgrad="bf16")) == "fp8_block,wgrad=bf16,pinned"
    assert str(cadre.Recipe("wgrad=bf16,fprop=f32,dgrad=mxfp8")) == (
        "fprop=f32,dgrad=mxfp8,wgrad=bf16")
    assert str(cadre.Recipe("mxfp8,pinned,wgrad=bf16", fprop="f32", dgrad="input")) == (
        "mxfp8,fprop=f32,dgrad=input,wgrad=bf16,pinned")
    assert recipe_text(None) == ""
    assert recipe_text(peer(mxfp8=True)) == "mxfp8"
    assert recipe_text(peer(nvfp4=True)) == "nvfp4"
    assert recipe_text(peer(float8_block_scaling=True)) == "fp8_block"
    assert recipe_text(peer(float8_current_scaling=True)) == "fp8_tensor"


def test_a_recipe_where_a_layer_keeps_words(device):
    layer = cadre.GroupedLinear(2, 32, 32, device=device)
    x, got = torch.randn(6, 32, device=device), []
    for layer.recipe in ("mxfp8,wgrad=bf16", cadre.Recipe("mxfp8", wgrad="bf16")):
        got.append(layer(x, [2, 4]))
    assert torch.equal(*got)
    layer.recipe = 3
    with pytest.raises(TypeError, match="^recipe is an int, must be words"):
        layer(x, [2, 4])


@pytest.mark.parametrize("change", [
    lambda moe: moe, copy.deepcopy, lambda moe: pickle.loads(pickle.dumps(moe)), wrapped, compiled])
def test_a_moe_whose_recipe_is_set(device, change):
    """Those that are made with it, copies and compiled ones have the same bits."""
    def make(recipe=None):
        torch.manual_seed(3)
        return cadre.MoE(4, 32, 48, top_k=2, recipe=recipe, shared_features=16, device=device)

    x = draw(9, 32, device=device)
    want = {recipe: make(recipe)(x)[0] for recipe in (None, "mxfp8", "fp8_tensor")}
    moe = make()
    names = list(moe.state_dict())
    assert moe.recipe is None and make("mxfp8").recipe == "mxfp8"
    for moe.recipe in ("mxfp8", cadre.Recipe("fp8_tensor"), None, "mxfp8"):
        key = None if moe.recipe is None else str(moe.recipe)
        assert torch.equal(moe(x)[0], want[key]) and list(moe.state_dict()) == names
    changed = change(moe)
    assert changed.recipe == "mxfp8" and torch.equal(changed(x)[0], want["mxfp8"])
    changed.recipe = "fp8_tensor"
    assert changed.recipe == "fp8_tensor" and torch.equal(changed(x)[0], want["fp8_tensor"])


def test_what_is_no_recipe():
    with pytest.raises(NotImplementedError, match="delayed scaling.*must be mxfp8"):
        cadre.autocast(recipe=peer(delayed=True))
    with pytest.raises(TypeError, match="recipe is an int, must be words, a cadre.Recipe or"):
        cadre.autocast(recipe=8)
    with pytest.raises(TypeError, match="recipe is a SimpleNamespace"):
        cadre.autocast(recipe=peer())


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_block", "mxfp8", "mxfp4",
                                    "nvfp4", "mxfp8,wgrad=bf16"])
def test_layers_follow_the_context(device, recipe):
    layer = module(device, k=64, n=96, dtype=torch.bfloat16)
    x = draw(17, 64, dtype=torch.bfloat16, device=device)
    plain = layer(x, COUNTS)
    with cadre.autocast(recipe=recipe):
        y = layer(x, COUNTS)
        own = module(device, k=64, n=96, dtype=torch.bfloat16, recipe="bf16")(x, COUNTS)
    assert torch.equal(y, plain) == (recipe == "bf16")
    assert torch.equal(own, plain)
    assert (y - plain).norm() < 0.2 * plain.norm()


NAMES = "f32, bf16, f16, fp8_tensor, fp8_block, mxfp8, nvfp4, mxfp4"
TAKERS = {
    "autocast": lambda recipe: cadre.autocast(recipe=recipe),
    "grouped_linear": lambda recipe: cadre.GroupedLinear(2, 8, 8, recipe=recipe, device="cpu"),
    "grouped_mlp": lambda recipe: cadre.GroupedMLP(2, 8, 8, recipe=recipe, device="cpu"),
    "moe": lambda recipe: cadre.MoE(2, 8, 8, top_k=1, recipe=recipe, device="cpu"),
}


@pytest.mark.parametrize("words, why", [
    ("mxfp9", f"name is 'mxfp9', must be one of {NAMES}"),
    ("MXFP8", f"name is 'MXFP8', must be one of {NAMES}"),
    ("input", f"name is 'input', must be one of {NAMES}"),
    ("mxfp8,wgrad=inputs", f"name is 'inputs', must be one of {NAMES}"),
    ("mxfp8, wgrad=bf16", "pass is ' wgrad', must be one of fprop, dgrad, wgrad; write "
                          "pass=formats, or pinned"),
    ("mxfp8,wgrad=bf16,wgrad=f32", "'mxfp8,wgrad=bf16,wgrad=f32' gives wgrad twice; give it once"),
    ("wgrad=bf16", "'wgrad=bf16' gives 1 passes, must be fprop, dgrad and wgrad; or begin with a "
                   "named recipe"),
    ("mxfp8,fprop=nvfp4:rht*nvfp4:rht", "fprop is nvfp4:rht*nvfp4:rht, must be without rht; only "
                                        "wgrad's operands are transformed"),
])
@pytest.mark.parametrize("taker", list(TAKERS))
def test_words_that_mean_nothing(taker, words, why):
    """Told where they are written, not by the first layer that is called."""
    with pytest.raises(ValueError) as error:
        TAKERS[taker](words)
    assert str(error.value) == f"recipe is {words!r}, must be words of a recipe; {why}"


@pytest.mark.parametrize("name", ["name", "fprop", "dgrad", "wgrad"])
def test_words_of_a_recipe_that_mean_nothing(name):
    must = "a recipe's name" if name == "name" else "a recipe's name, 'input' or formats 'lhs*rhs'"
    for words in ("i64", ""):
        with pytest.raises(ValueError) as error:
            cadre.Recipe(**{"name": "mxfp8", name: words})
        assert str(error.value) == (f"Recipe: {name} is {words!r}, must be {must}; name is "
                                    f"{words!r}, must be one of {NAMES}")
    with pytest.raises(TypeError, match=f"^Recipe: {name} is an int, must be {re.escape(must)}"):
        cadre.Recipe(**{"name": "mxfp8", name: 8})
    if name != "name":
        with pytest.raises(ValueError, match="; format: name is 'e4m3', must be one of .*mxfp8"):
            cadre.Recipe(**{"name": "mxfp8", name: "mxfp8*e4m3"})
        assert str(cadre.Recipe("mxfp8", **{name: "input"})) == f"mxfp8,{name}=input"


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "nvfp4", "mxfp8,wgrad=bf16"])
@pytest.mark.parametrize("options", [{"fuse_wgrad_accumulation": True},
                                     {"delay_wgrad_compute": True},
                                     {"delay_wgrad_compute": True, "save_original_input": True}])
def test_the_recipe_of_forward_holds_to_the_end(device, recipe, options):
    """backward and backward_dw run outside of the context, with the same bits."""
    x, dy = (draw(17, c, dtype=torch.bfloat16, device=device) for c in (64, 96))

    def run(**options):
        torch.manual_seed(5)
        layer = module(device, k=64, n=96, dtype=torch.bfloat16, **options)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        leaf = x.clone().requires_grad_()
        with cadre.autocast(recipe=recipe):
            y = layer(leaf, COUNTS)
        y.backward(dy)
        layer.backward_dw()
        dw = layer.weight.main_grad if "fuse_wgrad_accumulation" in options else layer.weight.grad
        return y.detach(), leaf.grad, dw, layer.bias.grad

    for got, want in zip(run(**options), run()):
        assert torch.equal(got, want)


def test_the_original_input_is_kept_instead_of_copies(device):
    x = draw(17, 64, dtype=torch.bfloat16, device=device)
    for options in ({}, {"delay_wgrad_compute": True}):
        kept = []
        for save in (False, True):
            layer = module(device, k=64, n=96, dtype=torch.bfloat16, save_original_input=save,
                           **options)
            with cadre.autocast(recipe="mxfp8"):
                kept.append(kept_bytes(lambda: layer(x, COUNTS)))
        assert kept[0] >= 17 * 64 and kept[1] == 0


@pytest.mark.parametrize("packed", [True, False])
def test_weights_are_quantised_once_a_step(device, packed):
    """The second microbatch uses the copies of the first, and has its numbers."""
    layer = module(device, k=64, n=96, packed=packed, dtype=torch.bfloat16)
    x = draw(17, 64, dtype=torch.bfloat16, device=device, grad=True)
    with cadre.autocast(recipe="mxfp8"):
        want = layer(x, COUNTS)
        want.sum().backward()
        dx, x.grad = x.grad, None
        assert torch.equal(layer(x, COUNTS, is_first_microbatch=False), want)  # none are kept yet
        first = layer(x, COUNTS, is_first_microbatch=True)
        second = layer(x, COUNTS, is_first_microbatch=False)
        second.sum().backward()
        with torch.no_grad():
            for p in layer.parameters():
                if p.dim() > 1 + packed:
                    p.mul_(2)
        third = layer(x, COUNTS, is_first_microbatch=True)
    assert torch.equal(first, want) and torch.equal(second, want)
    assert torch.equal(x.grad, dx)
    assert not torch.equal(third, want)
    with cadre.autocast(recipe="fp8_block"):  # copies of another recipe do not serve
        assert torch.equal(layer(x, COUNTS, is_first_microbatch=False), layer(x, COUNTS))


def test_activation_checkpointing_keeps_the_recipe(device):
    layer = module(device, k=64, n=96, dtype=torch.bfloat16)
    x = draw(17, 64, dtype=torch.bfloat16, device=device)
    grads = []
    for checkpointed in (False, True):
        leaf = x.clone().requires_grad_()
        with cadre.autocast(recipe="mxfp8"):
            y = torch.utils.checkpoint.checkpoint(
                layer, leaf, COUNTS, use_reentrant=False,
                context_fn=cadre.checkpoint_contexts) if checkpointed else layer(leaf, COUNTS)
        y.sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def checkpoint_steps(layer, call, x, recipe, around=""):
    """(y, gradients of x and of the weight) of `call` under a recipe, with backward under
    `around`."""
    torch.manual_seed(7)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    outer = cadre.autocast(recipe="bf16")
    with outer, outer, cadre.autocast(enabled=bool(recipe), recipe=recipe):
        y = call(leaf)
    with cadre.autocast(enabled=bool(around), recipe=around):
        y.sum().backward()
    return y.detach(), leaf.grad, layer.weight.grad


def reentrant(call):
    return lambda x: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=True)


def unpacked(call):
    return lambda x: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe, around", [
    ("mxfp8", ""), ("mxfp8,wgrad=bf16", "fp8_tensor"), ("", "fp8_tensor")])
@pytest.mark.parametrize("inner, outer", [
    (reentrant, None), (unpacked, None), (reentrant, reentrant), (unpacked, unpacked),
    (reentrant, unpacked), (unpacked, reentrant)])
def test_checkpointing_keeps_the_recipe(device, recipe, around, compiled, inner, outer):
    layer = module(device, k=64, n=64, dtype=torch.bfloat16)
    x = draw(17, 64, dtype=torch.bfloat16, device=device)

    def row(x):
        """Two layers, the first one under contexts of its own."""
        with cadre.autocast(recipe="fp8_tensor"):
            x = layer(x, COUNTS)
        with cadre.autocast(enabled=False):
            x = layer(x, COUNTS)
        return layer(x, COUNTS)

    for call in (lambda x: layer(x, COUNTS), row):
        want = checkpoint_steps(layer, call, x, recipe)
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(call, backend="aot_eager")
        checkpointed = inner(call)
        if outer is not None:
            checkpointed = outer(lambda x, call=checkpointed: call(x) * 1)
        got = checkpoint_steps(layer, checkpointed, x, recipe, around)
        assert all(map(torch.equal, got, want))


class Checkpoint(torch.autograd.Function):
    """A checkpoint that is not torch's."""

    @staticmethod
    def forward(ctx, call, x):
        ctx.call, ctx.x = call, x
        return call(x)

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            leaf = ctx.x.detach().requires_grad_()
            torch.autograd.backward(ctx.call(leaf), dy)
        return None, leaf.grad


class OtherNames(Checkpoint):
    @staticmethod
    def forward(node, call, x):
        node.call, node.x = call, x
        return call(x)


@pytest.mark.parametrize("checkpoint", [Checkpoint, OtherNames])
def test_reentrant_checkpoints_of_others_keep_the_recipe(device, checkpoint):
    layer = module(device, k=64, n=64, dtype=torch.bfloat16)
    x = draw(17, 64, dtype=torch.bfloat16, device=device)
    want = checkpoint_steps(layer, lambda x: layer(x, COUNTS), x, "mxfp8")
    got = checkpoint_steps(layer, lambda x: checkpoint.apply(lambda x: layer(x, COUNTS), x), x,
                           "mxfp8")
    assert all(map(torch.equal, got, want))


FIRST = """
import torch, cadre
from torch.utils.checkpoint import checkpoint
layer = cadre.GroupedLinear(2, 64, 64, device="cpu")
grads = []
for again in (False, True):
    torch.manual_seed(0)
    x = torch.randn(8, 64).requires_grad_()
    y = checkpoint(layer, x, [4, 4], use_reentrant=True) if again else layer(x, [4, 4])
    with cadre.autocast(recipe="fp8_tensor") if again else torch.enable_grad():
        y.square().sum().backward()
    grads.append(x.grad)
assert torch.equal(*grads)
"""


def test_forward_before_the_first_context_of_the_process():
    """Nothing was remembered then, and backward is inside of a context."""
    subprocess.run([sys.executable, "-c", FIRST], check=True)


def test_a_backward_that_is_no_checkpoint_sees_the_context(device):
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            seen.append(active_recipe())
            return dy

    x = torch.zeros(3, requires_grad=True)
    with cadre.autocast(recipe="mxfp8"):
        Function.apply(x).sum().backward()
    assert seen == ["mxfp8"]
