"""Models of transformers whose experts take no experts_implementation: nobody shall believe that
Cadre runs them."""

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
import cadre.huggingface as huggingface  # noqa: E402

transformers.logging.set_verbosity_error()
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             pad_token_id=0, bos_token_id=1, eos_token_id=None)
FAMILIES = {
    "llama4": ("Llama4TextExperts", lambda: transformers.Llama4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=24, intermediate_size_mlp=24,
        num_local_experts=4, interleave_moe_layer_step=1)),
    "dbrx": ("DbrxExperts", lambda: transformers.DbrxConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2,
                    "hidden_size": 32})),
    "jetmoe": ("JetMoeParallelExperts", lambda: transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8,
        intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)),
    "longcat_flash": ("LongcatFlashExperts", lambda: transformers.LongcatFlashConfig(
        **(SIZES | {"num_hidden_layers": 1}), ffn_hidden_size=24, expert_ffn_hidden_size=24,
        n_routed_experts=4, zero_expert_num=1, moe_topk=2, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, head_dim=8)),
    "aria": ("AriaExperts", lambda: transformers.AriaTextConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=24, moe_num_experts=4, moe_topk=2)),
}


def make(family, implementation):
    kinds = {"aria": "AriaTextForCausalLM", "llama4": "Llama4ForCausalLM"}
    config = FAMILIES[family][1]()
    kind = getattr(transformers, kinds.get(family, "AutoModelForCausalLM"))
    if kind is transformers.AutoModelForCausalLM:
        return kind.from_config(config, experts_implementation=implementation)
    return kind._from_config(config, experts_implementation=implementation)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_model_that_is_not_reached_says_so(family):
    name = FAMILIES[family][0]
    text = f"experts_implementation is 'cadre', but {name} of .* takes none: .* not Cadre"
    with pytest.warns(UserWarning, match=text):
        model = make(family, "cadre")
    lines = huggingface.explain(model).splitlines()
    assert lines and all(line.endswith(
        f": {name}; runs its own code; not for cadre: it takes no experts_implementation")
        for line in lines)
    with pytest.raises(ValueError, match="^use: "):
        huggingface.use(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other = make(family, "eager")
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
