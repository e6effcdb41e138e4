"""Models of transformers whose experts take no experts_implementation: Cadre runs those that it has
a forward for, equal to eager, and nobody shall believe that it runs the others."""

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from conftest import assert_seen
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.0")
import cadre.huggingface as huggingface  # noqa: E402
from cadre.recipe import autocast  # noqa: E402

transformers.logging.set_verbosity_error()
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             pad_token_id=0, bos_token_id=1, eos_token_id=None)
FAMILIES = {
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=24, intermediate_size_mlp=24,
        num_local_experts=4, num_experts_per_tok=2, interleave_moe_layer_step=1),
    "dbrx": lambda: transformers.DbrxConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2,
                    "hidden_size": 32}),
    "jetmoe": lambda: transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
        intermediate_size=24, num_local_experts=4, num_experts_per_tok=2),
    "longcat_flash": lambda: transformers.LongcatFlashConfig(
        **SIZES, num_layers=1, ffn_hidden_size=24, expert_ffn_hidden_size=24, n_routed_experts=4,
        zero_expert_num=2, moe_topk=3, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, head_dim=8),
    "aria": lambda: transformers.AriaTextConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=24, moe_num_experts=4, moe_topk=2),
}
# How often a layer calls which operator.
CALLS = {"llama4": ("grouped_mlp", 1), "dbrx": ("grouped_linear", 3),
         "jetmoe": ("grouped_linear", 4), "longcat_flash": ("routed_experts", 1),
         "aria": ("grouped_linear", 2)}
KINDS = {"aria": "AriaTextForCausalLM", "llama4": "Llama4ForCausalLM"}


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


def make(family, implementation="eager"):
    """A model whose weights are large enough that every part of it is seen in the logits."""
    config, kind = FAMILIES[family](), KINDS.get(family)
    model = (getattr(transformers, kind)._from_config if kind else
             transformers.AutoModelForCausalLM.from_config)(
                 config, experts_implementation=implementation)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                size = 2.0 if "experts" in name or "linear" in name else 1.0
                tensor.normal_(std=size * (32 if tensor.dim() > 1 else 10)**-0.5)
    return model


def tokens():
    return torch.randint(2, 64, (2, 9))


def step(model, ids):
    """The logits, and the gradient of every parameter."""
    model.zero_grad()
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    return {"logits": result.logits.detach(),
            **{name: x.grad for name, x in model.named_parameters() if x.grad is not None}}


def assert_equal_steps(got, want, bound):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert_seen(x)
        error = (got[name] - x).abs().max() / x.abs().max()
        assert error <= bound, f"{name}: relative difference {error:.2g}"


class Called(TorchDispatchMode):
    """The operators of Cadre that are called inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cadre":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def calls(model, ids):
    with Called() as called, torch.no_grad():
        model(input_ids=ids)
    return called.names


def test_logits_and_gradients_equal_the_eager_experts(family):
    model, ids = make(family), tokens()
    want = step(model, ids)
    assert not calls(model, ids)
    assert huggingface.use(model) is model
    name, times = CALLS[family]
    layers = 1 if family == "longcat_flash" else 2
    assert calls(model, ids).count(name) == times * layers
    assert_equal_steps(step(model, ids), want, 2e-5)
    model.set_experts_implementation("eager")
    again = step(model, ids)
    assert all(torch.equal(again[name], x) for name, x in want.items())


@pytest.mark.parametrize("mode", ["bf16", "autocast"])
def test_narrow_types_are_as_near_to_fp32_as_the_eager_experts(family, mode):
    if (family, mode) == ("dbrx", "autocast"):
        pytest.skip("the eager experts of transformers do not run under autocast")
    exact, ids = make(family), tokens()
    model = copy.deepcopy(exact)
    if mode == "bf16":
        model.bfloat16()
    errors = []
    with torch.no_grad():
        want = exact(input_ids=ids).logits
        for implementation in ("eager", "cadre"):
            model.set_experts_implementation(implementation)
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                got = model(input_ids=ids).logits
            errors.append(((got.float() - want).norm() / want.norm()).item())
    assert errors[1] < 1.5 * errors[0] + 0.01, errors


def test_models_that_are_asked_for_it_when_built_or_later(family):
    ids = tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        built = make(family, "cadre")
        later = make(family)
        assert all("; runs eager; " in line for line in huggingface.explain(later).splitlines())
        later.set_experts_implementation("cadre")
    later.load_state_dict(built.state_dict())
    for model in (built, later):
        lines = huggingface.explain(model).splitlines()
        assert lines and all("; runs cadre; " in line and "not for cadre" not in line
                             for line in lines)
    assert torch.equal(built(input_ids=ids).logits, later(input_ids=ids).logits)


def test_copies_and_pickles_run_what_the_model_runs(family):
    model, ids = make(family, "cadre"), tokens()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert calls(other, ids) == calls(model, ids) != []
        other.set_experts_implementation("eager")
        assert calls(other, ids) == [] != calls(model, ids)


def test_the_recipe_of_the_context_counts(family):
    model, ids = make(family, "cadre").bfloat16(), tokens()
    with torch.no_grad(), autocast(recipe="fp8_block"):
        if family in ("llama4", "dbrx", "aria"):  # they store weights transposed
            with pytest.raises(ValueError, match="must be row; the recipe copies the weights"):
                model(input_ids=ids)
            return
        rough = model(input_ids=ids).logits.float()
    plain = model(input_ids=ids).logits.float()
    assert 0 < (rough - plain).norm() < 0.5 * plain.norm()


@pytest.mark.parametrize("family", ["llama4", "dbrx", "longcat_flash"])
def test_experts_compile_as_one_graph(family):
    name = {"llama4": "Llama4TextMoe", "dbrx": "DbrxExperts",
            "longcat_flash": "LongcatFlashExperts"}[family]
    module = next(m for m in make(family, "cadre").modules() if type(m).__name__ == name)
    x = torch.randn(9, 32, requires_grad=True)
    chosen = () if family == "llama4" else (torch.rand(9, 4).topk(2).indices, torch.rand(9, 2))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for run in (module, compiled):
        y = run(x, *chosen)
        y = y[0] if isinstance(y, tuple) else y
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for got, want in zip(*results):
        assert_seen(want)
        torch.testing.assert_close(got, want)


def test_llama4_experts_alone():
    """The forward of the experts takes as many rows for each, as that of transformers does; hooks
    on it run when the layer does."""
    model = make("llama4")
    layer = model.model.layers[0].feed_forward
    x, seen = torch.randn(4 * 5, 32), []
    want = layer.experts(x)
    huggingface.use(model)
    torch.testing.assert_close(layer.experts(x), want, rtol=1e-4, atol=1e-4)
    layer.experts.register_forward_pre_hook(lambda *_: seen.append("hook"))
    layer(torch.randn(2, 3, 32))
    assert seen == ["hook"]


def test_jetmoe_is_exported():
    """Its counts are numbers that nobody knows."""
    model = make("jetmoe", "cadre").eval()
    ids = torch.randint(2, 64, (2, 2, 9))
    with torch.no_grad():
        program = torch.export.export(model, (ids[0],), dict(use_cache=False), strict=False)
        for each in ids:
            got = program.module()(each, use_cache=False).logits
            torch.testing.assert_close(got, model(each, use_cache=False).logits)


def test_longcat_without_routed_experts():
    module = next(m for m in make("longcat_flash", "cadre").modules()
                  if type(m).__name__ == "LongcatFlashExperts")
    module.num_routed_experts, module.gate_up_proj = 0, None
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    index = torch.randint(0, 2, (5, 2))
    got = module(x, index, weights)
    module._runs_cadre = False
    torch.testing.assert_close(got, module(x, index, weights))


def test_use_refuses_what_it_cannot_run():
    model = make("llama4")
    experts = model.model.layers[1].feed_forward.experts
    experts.act_fn = torch.nn.Mish()
    with pytest.raises(NotImplementedError, match="activation of Llama4TextExperts .*=Mish"):
        huggingface.use(model)
    assert "not for cadre: " in huggingface.explain(model).splitlines()[1]
    experts.act_fn = torch.nn.SiLU()
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), False)
    with pytest.raises(NotImplementedError, match="feed_forward.experts.down_proj is torch.float8"):
        huggingface.use(model)


def switch_transformers(implementation):
    return transformers.SwitchTransformersForConditionalGeneration._from_config(
        transformers.SwitchTransformersConfig(
            vocab_size=64, d_model=32, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2,
            num_heads=4, num_experts=4, num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1), experts_implementation=implementation)


def test_a_model_that_is_not_reached_says_so():
    name = "SwitchTransformersExperts"
    text = f"experts_implementation is 'cadre', but {name} of .* takes none: .* not Cadre"
    with pytest.warns(UserWarning, match=text):
        model = switch_transformers("cadre")
    lines = huggingface.explain(model).splitlines()
    assert lines and all(line.endswith(
        f": {name}; runs its own code; not for cadre: it takes no experts_implementation")
        for line in lines)
    with pytest.raises(ValueError, match="^use: "):
        huggingface.use(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other = switch_transformers("eager")
    with pytest.warns(UserWarning, match=text):
        other.set_experts_implementation("cadre")


def test_models_that_are_reached_or_have_no_experts_say_nothing():
    sizes = dict(**SIZES, num_key_value_heads=2, intermediate_size=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for config in (transformers.MixtralConfig(**sizes, num_local_experts=4),
                       transformers.LlamaConfig(**sizes)):
            model = transformers.AutoModelForCausalLM.from_config(
                config, experts_implementation="cadre")
            assert "own code" not in huggingface.explain(model)
            assert torch.isfinite(model(torch.ones(1, 3, dtype=torch.long)).logits).all()


def llama4_with_images(asked):
    """transformers writes what is asked into the config of the text alone."""
    text = dict(**SIZES, num_key_value_heads=2, intermediate_size=24, intermediate_size_mlp=32,
                num_local_experts=4, head_dim=8)
    vision = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1,
                  image_size=28, patch_size=14, vision_output_dim=16, projector_input_dim=16,
                  projector_output_dim=16)
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration._from_config(
        config, experts_implementation=asked)


def running(model):
    return {line.split("; runs ")[1].split(";")[0]
            for line in huggingface.explain(model).splitlines()}


def test_parts_of_a_model_are_asked_for_by_name():
    model = llama4_with_images({"text_config": "cadre"})
    assert running(model) == {"cadre"}
    for asked, runs in (({}, "cadre"), ({"vision_config": "eager"}, "cadre"),
                        ({"text_config": "eager"}, "eager"), ("cadre", "cadre"),
                        ("eager", "eager"), ({"text_config": "cadre"}, "cadre")):
        model.set_experts_implementation(asked)
        assert running(model) == {runs}, asked


@pytest.mark.parametrize("family", ["dbrx", "llama4", "jetmoe"])
def test_what_is_read_can_be_set_again(family):
    model = huggingface.use(make(family))
    before = model.get_experts_implementation()
    assert running(model) == {"cadre"}
    model.set_experts_implementation(before)
    assert running(model) == {"cadre"}
    model.set_experts_implementation("eager")
    assert running(model) == {"eager"}
    assert "cadre" not in model.get_experts_implementation().values()


def test_a_model_around_another_leaves_it_as_it_is():
    class Around(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, inner):
            super().__init__(transformers.PretrainedConfig())
            self.inner = inner
            self.post_init()

    for family in ("llama4", "dbrx"):
        assert running(Around(make(family, "cadre"))) == {"cadre"}
    sizes = dict(**SIZES, num_key_value_heads=2, intermediate_size=24, num_local_experts=4)
    mixtral = transformers.AutoModelForCausalLM.from_config(
        transformers.MixtralConfig(**sizes), experts_implementation="cadre")
    assert running(Around(mixtral)) == {"cadre"}


UNPICKLED = """
import sys, torch, transformers, cadre.huggingface
from torch.utils._python_dispatch import TorchDispatchMode
class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cadre":
            print(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})
model = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad(), Counted():
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
"""


@pytest.mark.parametrize("family, operator",
                         [("llama4", "grouped_mlp"), ("dbrx", "grouped_linear")])
def test_pickles_run_cadre_in_another_process(tmp_path, family, operator):
    """Where nobody has asked for "cadre" yet."""
    torch.save(make(family, "cadre"), tmp_path / "model.pt")
    done = subprocess.run([sys.executable, "-c", UNPICKLED, tmp_path / "model.pt"],
                          text=True, capture_output=True, check=True)
    assert operator in done.stdout.split()
