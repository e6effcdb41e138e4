"""Tiny random models of every family of transformers whose experts can be exchanged: Cadre's equal
the eager ones."""

import copy
import importlib
import inspect
import pathlib
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
import cadre.huggingface as huggingface  # noqa: E402
from test_huggingface import UNCLAMPED, assert_as_near, run  # noqa: E402

transformers.logging.set_verbosity_error()

FOLDER = pathlib.Path(transformers.__file__).parent / "models"
FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/modeling_*.py")
                  if "@use_experts_implementation" in path.read_text(encoding="utf-8"))
# What a config gets if it has it: the names that families give to the same sizes.
SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, max_position_embeddings=64,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
    moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6,
    n_routed_experts=6, num_local_experts=6, moe_num_experts=6, num_experts_per_tok=2, moe_k=2,
    top_k_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    global_head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=None)
TURNED = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
GEMMA = dict(head_dim=8, layer_types=["sliding_attention", "full_attention"])
HYBRID = dict(layer_types=["linear_attention", "full_attention"])
DENSE_FIRST = dict(mlp_layer_types=["dense", "sparse"], num_key_value_heads=4)
OTHER_SIZES = {
    "deepseek_ocr2": DENSE_FIRST,
    "deepseek_v4": dict(mlp_layer_types=["hash_moe", "moe"]),
    "diffusion_gemma": GEMMA,
    "ernie4_5_vl_moe": dict(moe_intermediate_size=[24, 24], rope_parameters=TURNED),
    "gemma4": GEMMA | dict(enable_moe_block=True, hidden_size_per_layer_input=0),
    "glm4v_moe": dict(rope_parameters=TURNED | dict(partial_rotary_factor=1.0)),
    "glm5_next": DENSE_FIRST | dict(qk_rope_head_dim=0),
    "granitemoehybrid": HYBRID | dict(mamba_n_heads=4, mamba_d_head=16),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=0),
    "kimi_linear": HYBRID,
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mistral4": dict(head_dim=16),
    "nemotron_h": dict(layers_block_type=["moe", "full_attention"]),
    "qwen3_5_moe": HYBRID,
    "qwen3_next": HYBRID,
    "qwen4_exp": HYBRID | dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8,
                               indexer_budget=8, indexer_compress_ratio=2),
    "zaya": dict(num_experts_per_tok=1),
}


def class_of(family: str) -> type:
    """A model of text alone: with a head, if it has one."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [kind for name, kind in vars(module).items() if inspect.isclass(kind)
               and kind.__module__ == module.__name__ and getattr(kind, "config_class", None)
               and not re.search("PreTrained|Vision|Audio|Talker", name)]
    for ending in ("ForCausalLM", "TextModel", "Model"):
        for kind in classes:
            if kind.__name__.endswith(ending):
                return kind
    raise AssertionError(f"no model of text in {module.__name__}")


def config_of(family: str, kind: type):
    usual = kind.config_class()
    sizes = {name: value for name, value in SIZES.items()
             if name in type(usual).__dataclass_fields__ or name in usual.attribute_map}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return kind.config_class(**sizes | OTHER_SIZES.get(family, {}))


@torch.no_grad()
def model_of(family: str, device):
    """Its weights are so large that every part of it is seen in what it gives."""
    kind = class_of(family)
    model = kind._from_config(config_of(family, kind), experts_implementation="eager")
    for name, weight in model.named_parameters():
        if "norm" not in name:
            fan_in = 32 if weight.dim() > 1 else 10
            weight.normal_(std=(2.0 if "experts" in name else 1.0) * fan_in**-0.5)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # a token's experts
            table.copy_(torch.rand(table.shape[0], 6).topk(table.shape[1]).indices)
    return model.to(device).eval()


def experts_of(model) -> list[tuple[str, torch.nn.Module]]:
    return [(name, part) for name, part in model.named_modules() if hasattr(part, "is_transposed")]


def step(model, ids) -> dict[str, torch.Tensor]:
    """What it gives, and the gradients of all weights."""
    model.zero_grad()
    y = model(input_ids=ids, use_cache=False)[0]
    torch.manual_seed(5)
    y.backward(torch.randn(y.shape).to(y))
    return {"y": y.detach()} | {name: weight.grad for name, weight in model.named_parameters()
                                if weight.grad is not None}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def test_all_families_are_here():
    assert len(FAMILIES) >= 54


def test_logits_and_gradients_equal_the_eager_experts(family, device):
    model = model_of(family, device)
    ids = torch.randint(3, 60, (2, 9)).to(device)
    want = step(model, ids)
    got = step(huggingface.use(model), ids)
    assert "runs cadre" in huggingface.explain(model)
    assert got.keys() == want.keys()
    learned = [f"{name}.{weight}" for name, part in experts_of(model)
               for weight, _ in part.named_parameters() if f"{name}.{weight}" in want]
    assert learned and all(want[name].abs().max() > 1e-3 for name in learned)
    for name, x in want.items():
        error = (got[name] - x).abs().max() / x.abs().max().clamp(min=1e-3)
        assert error <= 5e-5, f"{name}: relative difference {error:.2g}"


def test_generates_the_same_tokens(family, device):
    model = model_of(family, device)
    if not model.can_generate():
        pytest.skip("it has no head")
    ids = torch.randint(3, 60, (2, 5)).to(device)
    arguments = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    want = model.generate(ids, **arguments)
    assert want.shape[1] > ids.shape[1]
    assert torch.equal(huggingface.use(model).generate(ids, **arguments), want)


def test_in_bf16_experts_are_as_near_to_fp32_as_the_eager_ones(family, device):
    for name, part in experts_of(model_of(family, device)):
        experts, top_k = part.bfloat16(), 2
        index = torch.rand(17, part.num_experts).topk(top_k).indices.to(device)
        x = (UNCLAMPED * torch.randn(17, 32)).to(device, torch.bfloat16).requires_grad_()
        prob = torch.rand(17, top_k).to(device, torch.bfloat16).requires_grad_()
        dy = torch.randn(17, 32).to(x)
        eager, got = (run(experts, (x, index, prob), dy, name) for name in ("eager", "cadre"))
        exact = (x.detach().float().requires_grad_(), index,
                 prob.detach().float().requires_grad_())
        want = run(copy.deepcopy(experts).float(), exact, dy.float(), "eager")
        assert_as_near(got, eager, want, torch.bfloat16)
