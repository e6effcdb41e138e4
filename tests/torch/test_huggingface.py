"""Tiny random models of five families: Cadre's experts equal the eager experts of transformers."""

import copy
import subprocess
import sys

import pytest
import torch
from conftest import assert_seen
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.0")
import cadre.huggingface as huggingface  # noqa: E402
from cadre.recipe import autocast  # noqa: E402

transformers.logging.set_verbosity_error()

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=48, num_local_experts=5,
        num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=40, num_experts=6,
        num_experts_per_tok=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES, num_key_value_heads=4, intermediate_size=48, moe_intermediate_size=24,
        n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=40, num_local_experts=6,
        num_experts_per_tok=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"]),
}
ACTIVATIONS = dict.fromkeys(CONFIGS, "swiglu") | {
    "gpt_oss": "clamped_swiglu layout=interleave1 limit=7 alpha=1.702 offset=1"}


def make(family: str, device, implementation: str = "eager"):
    return model_of(CONFIGS[family](), device, implementation)


def model_of(config, device, implementation: str):
    """A model whose weights are large enough that every part of it is seen in the logits."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" not in name:
                fan_in = 32 if tensor.dim() > 1 else 10
                tensor.normal_(std=(2.0 if "experts" in name else 1.0) * fan_in**-0.5)
    return model.to(device)


def experts_of(model) -> nn.Module:
    return model.model.layers[-1].mlp.experts


def tokens(device) -> torch.Tensor:
    return torch.randint(2, 64, (2, 9)).to(device)


def step(model, ids) -> dict[str, torch.Tensor | None]:
    """The logits, and the gradient of every parameter."""
    model.zero_grad()
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    return {"logits": result.logits.detach(),
            **{name: x.grad for name, x in model.named_parameters()}}


def assert_equal_steps(got: dict, want: dict, bound: float) -> None:
    assert {name for name in got if got[name] is None} == {n for n in want if want[n] is None}
    for name, x in want.items():
        if x is not None:
            error = (got[name] - x).abs().max() / x.abs().max().clamp(min=1e-6)
            assert error <= bound, f"{name}: relative difference {error:.2g}"


@pytest.fixture(params=list(CONFIGS))
def family(request) -> str:
    return request.param


def test_logits_and_gradients_equal_the_eager_experts(family, device):
    model = make(family, device)
    ids = tokens(device)
    want = step(model, ids)
    got = step(huggingface.use(model), ids)
    assert_equal_steps(got, want, 2e-5)
    for name in [name for name, _ in model.named_parameters() if ".experts." in name]:
        assert_seen(want[name])


def test_generates_the_same_tokens(family, device):
    model = make(family, device).eval()
    ids = tokens(device)
    arguments = dict(max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    want = model.generate(ids, **arguments)
    got = huggingface.use(model).generate(ids, **arguments)
    assert want.shape[1] > ids.shape[1] and torch.equal(got, want)


def test_saved_and_loaded_with_cadre(family, device, tmp_path):
    model = make(family, device).eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="cadre").to(device)
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x), name
    assert "runs cadre" in huggingface.explain(loaded)
    ids = tokens(device)
    with torch.no_grad():
        assert_equal_steps({"": loaded(ids).logits}, {"": model(ids).logits}, 2e-5)


# Below this size of x no value comes near the limit of a clamp, where one rounding can cut a
# gradient off.
UNCLAMPED = 0.4


def routed(family: str, device, dtype=torch.float32, size: float = 2, count: int = 17):
    """An experts module, its inputs, and a dy; expert 1 gets no token."""
    experts = experts_of(make(family, device)).to(dtype)
    top_k = experts.config.num_experts_per_tok
    scores = torch.rand(count, experts.num_experts)
    scores[:, 1] = -1
    index = scores.topk(top_k).indices.to(device)
    x = (size * torch.randn(count, 32)).to(device, dtype).requires_grad_()
    weights = torch.rand(count, top_k).to(device, dtype).requires_grad_()
    return experts, (x, index, weights), torch.randn(count, 32).to(device, dtype)


def run(experts, inputs, dy, implementation: str) -> dict[str, torch.Tensor]:
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    x, index, weights = inputs
    x.grad = weights.grad = None
    y = experts(x, index, weights)
    assert y.dtype == x.dtype
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dprob": weights.grad,
            **{name: p.grad for name, p in experts.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision_is_as_near_to_fp32_as_eager(family, device, dtype):
    experts, inputs, dy = routed(family, device, dtype, UNCLAMPED)
    eager, got = run(experts, inputs, dy, "eager"), run(experts, inputs, dy, "cadre")
    exact = [x.detach().float().requires_grad_() if x.is_floating_point() else x for x in inputs]
    want = run(copy.deepcopy(experts).float(), exact, dy.float(), "eager")
    assert all(x.dtype == dtype for x in got.values())
    assert_as_near(got, eager, want, dtype)


def assert_as_near(got: dict, eager: dict, want: dict, dtype: torch.dtype) -> None:
    """To `want`, computed in fp32, as `eager` is, which rounds to `dtype` too."""
    for name, x in want.items():
        cadre_error, eager_error = ((y[name].float() - x).abs().max() for y in (got, eager))
        bound = 1.5 * eager_error + torch.finfo(dtype).eps * x.abs().max()
        assert cadre_error <= bound, f"{name}: {cadre_error:.3g}, must be at most {bound:.3g}"


def test_an_expert_without_tokens_has_a_zero_gradient(family, device):
    experts, inputs, dy = routed(family, device)
    got = run(experts, inputs, dy, "cadre")
    for name, parameter in experts.named_parameters():
        assert got[name].shape == parameter.shape
        assert not got[name][1].any(), name
        assert_seen(got[name][0])


def test_experts_of_other_ranks_add_nothing(family, device):
    experts, (x, index, weights), dy = routed(family, device)
    away = torch.rand(index.shape, device=device) < 0.4
    nothing = weights.detach().masked_fill(away, 0).requires_grad_()
    want = run(experts, (x, index, nothing), dy, "eager")
    for mark in (experts.num_experts, -1):
        got = run(experts, (x, index.masked_fill(away, mark), nothing), dy, "cadre")
        assert not got["dprob"][away].any()
        got["dprob"] = torch.where(away, want["dprob"], got["dprob"])
        assert_equal_steps(got, want, 2e-5)


def test_compiled_as_one_graph_without_compiling_again(family, device):
    experts, inputs, dy = routed(family, device)
    experts.config._experts_implementation = "cadre"
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (17, 23, 5):
        x, index, weights = (torch.cat([x, x])[:count].detach() for x in inputs)
        index = index.roll(count, 0).contiguous()
        grads = []
        for call in (experts, compiled):
            x.grad = weights.grad = None
            experts.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=count != 17):
                y = call(x.requires_grad_(), index, weights.requires_grad_())
            y.backward(torch.cat([dy, dy])[:count])
            grads.append({"y": y.detach(), "dx": x.grad, "dprob": weights.grad,
                          **{name: p.grad for name, p in experts.named_parameters()}})
        assert_equal_steps(grads[1], grads[0], 1e-6)


def test_takes_the_recipe_of_the_context(device):
    experts, inputs, dy = routed("olmoe", device, torch.bfloat16, UNCLAMPED)
    plain = run(experts, inputs, dy, "cadre")
    with autocast(recipe="mxfp8"):
        got = run(experts, inputs, dy, "cadre")
    assert (got["y"] - plain["y"]).norm() <= 0.1 * plain["y"].norm()
    assert (got["y"] != plain["y"]).any()


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16,dgrad=mxfp8", "f16"])
def test_transposed_weights_that_a_recipe_would_copy(device, recipe):
    experts, inputs, dy = routed("gpt_oss", device, torch.bfloat16, UNCLAMPED)
    with autocast(recipe="bf16"):
        assert_seen(run(experts, inputs, dy, "cadre")["y"])
    message = ("^grouped_linear: weight_major is column, must be row; the recipe copies the "
               rf"weights \[.* recipe={recipe} ")
    with autocast(recipe=recipe), pytest.raises(ValueError, match=message):
        run(experts, inputs, dy, "cadre")


class Calls(TorchDispatchMode):
    """What every operation below autograd is called with, in `calls`."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def test_weights_are_used_where_they_lie(family, device):
    experts, inputs, dy = routed(family, device)
    places = {p.untyped_storage().data_ptr() for p in experts.parameters()}
    with Calls() as seen:
        run(experts, inputs, dy, "cadre")
    assert places == {p.untyped_storage().data_ptr() for p in experts.parameters()}
    run_by = torch.ops.cadre.routed_experts.default
    layers = [args for function, args in seen.calls if function == run_by]
    assert len(layers) == 1
    given = [x for argument in layers[0] if isinstance(argument, (list, tuple)) for x in argument]
    assert {x.untyped_storage().data_ptr() for x in given} == places
    for function, args in seen.calls:
        if function.name().startswith(("aten::clone", "aten::copy", "aten::_to_copy", "aten::cat")):
            copied = [x for x in args if isinstance(x, torch.Tensor)]
            assert not {x.untyped_storage().data_ptr() for x in copied} & places, function


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA reports synchronisation")
def test_no_wait_for_the_device(family, device):
    experts, inputs, dy = routed(family, device)
    run(experts, inputs, dy, "cadre")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(experts, inputs, dy, "cadre")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_under_autocast(family, device):
    experts, inputs, dy = routed(family, device, size=UNCLAMPED)
    want = run(experts, inputs, dy, "eager")
    with torch.autocast(device.type, torch.bfloat16):
        eager, got = run(experts, inputs, dy, "eager"), run(experts, inputs, dy, "cadre")
    assert all(x.dtype == torch.float32 for x in got.values())
    assert_as_near(got, eager, want, torch.bfloat16)
    assert (got["y"] != want["y"]).any()


def test_what_models_of_transformers_run(family):
    model = make(family, "cpu", "cadre")
    lines = huggingface.explain(model).splitlines()
    experts = [line for line in lines if ".experts: " in line]
    assert len(experts) == (1 if family == "deepseek_v3" else 2)
    for line in experts:
        assert line.endswith(f"runs cadre; activation {ACTIVATIONS[family]}")
        assert ("transposed bias" in line) == (family == "gpt_oss")
    routers = [line for line in lines if line not in experts]
    assert len(routers) == (0 if family == "deepseek_v3" else 2)  # its groups are chosen otherwise
    assert all("TopKRouter; runs cadre; router " in line for line in routers)
    model.set_experts_implementation("eager")
    assert "runs eager; activation" in huggingface.explain(model)


def test_use_refuses_before_it_changes_anything():
    model = make("mixtral", "cpu")
    experts = experts_of(model)
    experts.act_fn = nn.Mish()
    with pytest.raises(NotImplementedError, match="act_fn=Mish"):
        huggingface.use(model)
    experts.act_fn = nn.SiLU()
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"^huggingface: model.layers.1.mlp.experts."
                       r"down_proj is torch.float8_e4m3fn, must be float32, bfloat16 or float16; "
                       r"load the model without weight quantization, or by load_quantized$"):
        huggingface.use(model)
    assert model.config._experts_implementation == "eager"


def test_use_refuses_models_without_such_experts(monkeypatch):
    llama = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=16))
    assert huggingface.explain(llama) == "LlamaForCausalLM has no experts modules"
    with pytest.raises(ValueError, match="^use: model is LlamaForCausalLM with 0 experts modules, "
                       "must be a transformers model"):
        huggingface.use(llama)
    model = make("mixtral", "cpu")
    monkeypatch.setattr(type(model), "set_experts_implementation", lambda self, name: None)
    with pytest.raises(ValueError, match="^use: implementation of model.layers.0.mlp.experts is 'ea"
                       "ger' after set_experts_implementation, must be 'cadre'; MixtralForCausalLM "
                       "does not pass it on$"):
        huggingface.use(model)


def test_transformers_is_imported_only_when_asked():
    code = ("import sys, cadre; assert 'transformers' not in sys.modules\n"
            "sys.modules['transformers'] = None\n"
            "try: import cadre.huggingface\n"
            "except ImportError as error: print(error)")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("cadre.huggingface: transformers cannot be imported, must be "
                                  "version 5 or later; install it with")
