"""cadre.megatron: experts of Megatron-Core's MoE layer."""

import pathlib
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron_models import (  # noqa: F401 (a fixture)
    DEVICE, E, both, check_training, config_of, local_spec, loss_of, model_of, one_process, seed,
    train)
from torch.nn import functional

import cadre
from cadre.megatron import Experts, experts_spec, with_cadre

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page  # noqa: E402


def test_training_and_checkpoints(tmp_path):
    """Fifty steps, and checkpoints both ways."""
    check_training(50, tmp_path)


ACTIVATIONS = {
    "swiglu": {},
    "quick geglu, clamped": {"activation_func": quick_gelu, "activation_func_clamp_value": 0.05,
                             "glu_linear_offset": 1.0},
    "swiglu, offset": {"glu_linear_offset": 0.5},
    "geglu": {"activation_func": functional.gelu},
    "relu squared": {"activation_func": squared_relu, "gated_linear_unit": False},
    "probabilities on the input": {"moe_router_topk": 1, "moe_router_pre_softmax": True,
                                   "moe_apply_probs_on_input": True},
}


@pytest.mark.parametrize("options", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_fp32_has_the_same_losses(options):
    """To the rounding of fp32, through two updates of all weights."""
    theirs, ours = both(dtype=torch.float32, **options)
    want, got = train(theirs, 3), train(ours, 3)
    assert (got - want).abs().max() < 1e-5 * want.max() and want[2] != want[1]


def layer_of(**options):
    """An MoE layer alone, since other layers want APEX for main_grad."""
    config = config_of()
    for name, value in options.items():  # Megatron looks when it is made, and at more
        setattr(config, name, value)
    seed(2)
    made = MoELayer(config, with_cadre(local_spec()).submodules.mlp.submodules, layer_number=1)
    return made.to(DEVICE, config.params_dtype)


def test_biases():
    """As Megatron means them: the second times the probability. Its own SequentialMLP fails in
    backward, so the formula stands here."""
    layer = layer_of(params_dtype=torch.float32, add_bias_linear=True)
    x = torch.randn(40, 1, 32, device=DEVICE)
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.normal_()
    got, none = layer(x)
    prob, chosen = layer.router(x)
    want = torch.zeros_like(x)
    for e in range(E):
        w1, b1, w2, b2 = (getattr(linear, f"{kind}{e}")
                          for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2)
                          for kind in ("weight", "bias"))
        gate, up = functional.linear(x, w1, b1).chunk(2, -1)
        p = (prob * chosen)[:, e].view(-1, 1, 1)
        want += functional.linear(functional.silu(gate) * up, w2, b2) * p
    assert none is None and torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"gradient_accumulation_fusion": True},
                                     {"delay_wgrad_compute": True}, {}])
def test_gradients_where_trainers_want_them(options):
    """Into main_grad, and when backward_dw is called, with the same bits; else in one operator."""
    layer, plain = layer_of(**options), layer_of()
    experts, names = layer.experts, [f"linear_fc{i}.weight{e}" for i in (1, 2) for e in range(E)]
    for name in names:
        weight = experts.get_parameter(name)
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=DEVICE)
    counts = torch.zeros(E)
    assert len(experts._row[0].plan(counts, None, counts)) == (3 if options else 1)
    x = torch.randn(40, 1, 32, dtype=torch.bfloat16, device=DEVICE)
    for each in (layer, plain):
        each(x)[0].float().square().sum().backward()
    if "delay_wgrad_compute" in options:
        assert experts.linear_fc1.weight0.grad is None
        experts.backward_dw()
    for name in names:
        weight, want = experts.get_parameter(name), plain.experts.get_parameter(name).grad
        got = weight.main_grad if "gradient_accumulation_fusion" in options else weight.grad
        assert torch.equal(got.to(want.dtype), want) and want.any()


def test_specs():
    """Of a layer, a block and an MoE layer; what is no MoE layer stays."""
    layer = local_spec()
    ours = with_cadre(layer)
    assert ours.submodules.mlp.submodules.experts.module is Experts
    assert ours.submodules.self_attention is layer.submodules.self_attention
    assert layer.submodules.mlp.submodules.experts.module is not Experts  # a new one
    moe = with_cadre(layer.submodules.mlp)
    built = MoELayer(config_of(), moe.submodules, layer_number=1)
    assert isinstance(built.experts, Experts)
    assert with_cadre(moe.submodules).experts.module is Experts
    config = config_of(num_layers=3, moe_layer_freq=[0, 1, 1])
    block = with_cadre(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    kinds = [getattr(getattr(spec.submodules.mlp.submodules, "experts", None), "module", None)
             for spec in block.layer_specs]
    assert kinds == [None, Experts, Experts]
    assert experts_spec().module is Experts
    with pytest.raises(ValueError, match="^with_cadre: spec is a ModuleSpec without an MoE layer"):
        with_cadre(block.layer_specs[0])


def test_parameters_are_marked_for_the_trainer():
    experts = MoELayer(config_of(), with_cadre(local_spec()).submodules.mlp.submodules,
                       layer_number=1).experts
    marks = {name: (p.allreduce, p.tensor_model_parallel, p.partition_dim)
             for name, p in experts.named_parameters()}
    assert marks == {f"linear_fc{i}.weight{e}": (True, True, i - 1)
                     for i in (1, 2) for e in range(E)}
    assert str(experts.linear_fc1.weight0.dtype) == "torch.bfloat16"
    assert not experts.linear_fc1.weight0.equal(experts.linear_fc1.weight1)
    meta = MoELayer(config_of(use_cpu_initialization=False, init_model_with_meta_device=True),
                    with_cadre(local_spec()).submodules.mlp.submodules, layer_number=1).experts
    assert meta.linear_fc2.weight3.is_meta


REFUSED = """
with_cadre(GPTModel)
experts(activation_func=torch.tanh)
experts(fp8="e4m3")
experts(fine_grained_activation_offloading=True, offload_modules=["moe_act"])
experts(recompute_granularity="selective", recompute_modules=["moe_act"], delay_wgrad_compute=True)
experts(add_bias_linear=True, pg_collection=two_ranks)
experts(moe_apply_probs_on_input=True, moe_router_topk=2)
experts(activation_func_fp8_input_store=True)
"""


def test_the_page_says_what_is_refused():
    def experts(pg_collection=None, **options):
        config = config_of()
        for name, value in options.items():
            setattr(config, name, value)
        Experts(E, config, pg_collection=pg_collection)

    group = SimpleNamespace(size=lambda: 2)
    made = {"experts": experts, "two_ranks": SimpleNamespace(expt_tp=group, ep=group),
            "with_cadre": with_cadre, "torch": torch, "GPTModel": GPTModel}
    rows = []
    for use in REFUSED.strip().splitlines():
        with pytest.raises((ValueError, NotImplementedError)) as error:
            eval(use, made)
        words = str(error.value).split(" when instantiating")[0]  # Megatron adds where
        rows.append((use, f"{type(error.value).__name__}: {words}"))
    errors_page.settle("door_megatron", rows)


def test_a_recipe_around_the_model():
    model = model_of(config_of(), with_cadre(local_spec()))
    exact = loss_of(model)
    with cadre.autocast(recipe="mxfp8"):
        loss = loss_of(model)
    loss.backward()
    assert 0 < (loss - exact).abs() < 0.01 * exact


class Adapter(torch.nn.Module):
    """Around a linear of the experts, which learns nothing itself."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, torch.nn.Parameter(torch.ones((), device=DEVICE))
        self.bias_left = None

    def forward(self, x, counts, *rest):
        return self.base(x, counts, *rest) * self.scale, self.bias_left


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", [["linear_fc1"], ["linear_fc2"], ["linear_fc1", "linear_fc2"]])
def test_linears_may_be_wrapped(names, bias):
    layer = layer_of(add_bias_linear=bias, params_dtype=torch.float32)
    experts = layer.experts
    x = torch.randn(3, 4, layer.config.hidden_size, device=DEVICE)
    want = layer(x)[0]
    wrapped = [Adapter(getattr(experts, name)) for name in names]
    for name, adapter in zip(names, wrapped):
        setattr(experts, name, adapter)
    torch.testing.assert_close(layer(x)[0], want)
    layer(x)[0].square().sum().backward()
    assert all(adapter.scale.grad.abs() > 0 for adapter in wrapped)


class Doubled(torch.nn.Module):
    """Around a linear of the experts, whose rows it writes in place."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, rows, *rest):
        return self.base(rows.mul_(2), *rest)


def moe_act_layer(wrapped):
    layer = layer_of(recompute_granularity="selective", recompute_modules=["moe_act"])
    layer.experts.linear_fc2 = wrapped(layer.experts.linear_fc2)
    return layer


def test_rows_that_a_wrapped_linear_writes_in_place():
    layer, plain = moe_act_layer(Doubled), layer_of()
    plain.experts.linear_fc2 = Doubled(plain.experts.linear_fc2)
    x = torch.randn(40, 1, 32, dtype=torch.bfloat16, device=DEVICE)
    for each in (layer, plain):
        each(x)[0].float().square().sum().backward()
    for p, want in zip(layer.parameters(), plain.parameters()):
        assert torch.equal(p.grad, want.grad)


def test_weights_that_are_written_before_backward():
    layer = moe_act_layer(Adapter)
    y = layer(torch.randn(40, 1, 32, dtype=torch.bfloat16, device=DEVICE))[0]
    with torch.no_grad():
        layer.experts.linear_fc2.base.weight0.mul_(2)
    with pytest.raises(RuntimeError, match="megatron: a tensor that linear_fc2 saved was written "
                       "in place, must be left alone until backward"):
        y.float().sum().backward()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("change", ["fc1", "fc2", "hook"])
def test_wrapped_linears_and_moe_act(change, recomputes, bias):
    """What the activation made is not kept, but made again, with the same bits."""
    options = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    layer = layer_of(add_bias_linear=bias, **(options if recomputes else {}))
    plain, experts = layer_of(add_bias_linear=bias), layer.experts
    if change == "fc1":
        experts.linear_fc1 = Adapter(experts.linear_fc1)
    seen = []

    def note(module, given):
        seen.append(weakref.ref(given[0]))

    if change == "fc2":
        experts.linear_fc2 = torch.nn.Sequential(experts.linear_fc2)
        experts.linear_fc2.forward = experts.linear_fc2[0].forward
    experts.linear_fc2.register_forward_pre_hook(note)
    x = torch.randn(40, 1, 32, dtype=torch.bfloat16, device=DEVICE)
    y = layer(x)[0]
    assert (seen[0]() is None) == recomputes
    y.float().square().sum().backward()
    plain(x)[0].float().square().sum().backward()
    want = [p.grad for name, p in plain.named_parameters()]
    got = [p.grad for name, p in layer.named_parameters() if not name.endswith(".scale")]
    assert len(got) == len(want) and all(map(torch.equal, got, want))


def test_what_is_put_in_the_place_of_parts():
    experts = layer_of().experts
    rows, counts = torch.ones(3, experts.config.hidden_size, device=DEVICE), [3] + [0] * (E - 1)
    given = rows.bfloat16(), torch.tensor(counts, device=DEVICE), torch.ones(3, device=DEVICE)
    experts.linear_fc1 = Adapter(experts.linear_fc1)
    experts.linear_fc1.bias_left = torch.ones(1)
    with pytest.raises(NotImplementedError, match=(
            "megatron: a linear of the experts returns a bias, must add it")):
        experts(*given)
    experts.activation_func = torch.tanh
    with pytest.raises(NotImplementedError, match=(
            "megatron: activation_func of the experts was replaced, must be that of the config; it "
            "is measured when they are made")):
        experts(*given)
