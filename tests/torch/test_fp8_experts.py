"""The experts of transformers' own FP8 quantizer on Cadre: beside those of load_quantized, which
have the same codes and scales."""

import re
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
import cadre.huggingface as huggingface  # noqa: E402
from test_quantized_experts import TOKENS, loaded  # noqa: E402

ops = torch.ops.cadre
E, H, F = 4, 256, 128


def from_pretrained(folder):
    """By the quantizer, which decodes all weights where it finds no GPU, and asks for a package
    that it has no use for here."""
    from transformers.quantizers import quantizer_finegrained_fp8
    with mock.patch.object(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True), \
            mock.patch.object(torch.cuda, "is_available", lambda: True), \
            mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation="cadre", dtype=torch.bfloat16)


def test_a_model_of_from_pretrained_has_the_bits_of_load_quantized(tmp_path):
    model, _ = loaded("deepseek_v3", tmp_path)
    model.save_pretrained(tmp_path / "again")  # which has codes in its experts alone
    own = from_pretrained(tmp_path / "again")
    experts = own.model.layers[1].mlp.experts
    assert isinstance(experts, fp8.FP8Experts)
    recipe = re.escape("bf16,fprop=fp8_block:fp32*fp8_block:2d+fp32")
    assert re.search(rf"FP8Experts E=8 H=128 F=128 {recipe} cpu; runs cadre; activation swiglu",
                     huggingface.explain(own))
    with torch.no_grad():
        want = model(TOKENS).logits
        assert torch.equal(own(TOKENS).logits, want)
        own.set_experts_implementation("eager")  # other code reads these codes, too
        assert torch.equal(huggingface.use(own)(TOKENS).logits, want)


def experts_of(scales=torch.float32, block=(128, 128), scheme="dynamic", **sizes):
    """Random ones, and their weights as Cadre's operators take them."""
    config = transformers.Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E,
                                         num_experts_per_tok=2)
    vars(config).update(sizes)
    torch.manual_seed(0)
    kind = transformers.integrations.moe.use_experts_implementation(
        experts_class=fp8.FP8Experts, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS,
        has_bias=False, has_gate=True)
    experts = kind(config, block, scheme, "float" if scales == torch.float32 else "ue8m0")
    config._experts_implementation = "cadre"
    weights = []
    for name in ("gate_up_proj", "down_proj"):
        codes = getattr(experts, name)
        if codes.dtype != torch.float8_e4m3fn or block != (128, 128):
            continue
        format = "fp8_block:2d" + ("+fp32" if scales == torch.float32 else "")
        made = ops.quantize(torch.randn(codes.shape).bfloat16() / 8, None, format, "along_k")
        with torch.no_grad():
            codes.copy_(made[0].view(codes.dtype))
            getattr(experts, name + "_scale_inv").copy_(made[1])
        weights.append([made[0], made[1]])
    return experts, weights


def rows():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, H, generator=generator).bfloat16()
    return x, torch.randint(0, E + 1, (20, 2), generator=generator), torch.rand(
        20, 2, generator=generator)  # expert E is that of another rank


@pytest.mark.parametrize("sizes, activation", [
    ({}, "swiglu"), (dict(swiglu_limit=2.0), "clamped_swiglu limit=2 alpha=1 offset=0"),
    (dict(swiglu_limit=3.0, swiglu_alpha=1.5), "clamped_swiglu limit=3 alpha=1.5 offset=1")])
@pytest.mark.parametrize("scales, recipe", [
    (torch.float32, "bf16,fprop=fp8_block:fp32*fp8_block:2d+fp32"),
    (torch.float8_e8m0fnu, "bf16,fprop=fp8_block*fp8_block:2d+fp32")])
def test_experts_have_the_bits_of_the_operator(scales, recipe, sizes, activation):
    experts, (weight1, weight2) = experts_of(scales, **sizes)
    x, chosen, prob = rows()
    with torch.no_grad():
        want = ops.routed_experts_quantized(x, chosen, prob, weight1, [], weight2, [],
                                            recipe=recipe, activation=activation)
        assert torch.equal(experts(x, chosen, prob), want)
        assert want.any()
        compiled = torch.compile(experts, fullgraph=True)
        assert torch.equal(compiled(x, chosen, prob), want)


WRONG = {
    "gate_up_proj is torch.int8 in FP8Experts, must be torch.float8_e4m3fn":
        dict(expert_dtype="fp4"),
    "activation_scheme is 'static' in FP8Experts, must be 'dynamic'": dict(scheme="static"),
    "weight_block_size is (64, 128) in FP8Experts, must be (128, 128)": dict(block=(64, 128)),
    "an expert has 64 features of 256 inputs in FP8Experts, must be multiples of 128":
        dict(moe_intermediate_size=64),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_no_product_reads_is_said(words):
    experts, _ = experts_of(**WRONG[words])
    with torch.no_grad(), pytest.raises(NotImplementedError) as error:
        experts(*rows())
    says = f"huggingface: {words}; choose another experts_implementation for this model"
    assert str(error.value) == says
    assert huggingface.explain(experts).endswith(f"runs cadre; not for cadre: {says}")


def test_experts_in_fp8_have_no_backward():
    experts, _ = experts_of()
    x, chosen, prob = rows()
    with pytest.raises(NotImplementedError, match="FP8Experts with weights in fp8 has no backward; "
                       r"run it under torch.no_grad\(\)"):
        experts(x.requires_grad_(), chosen, prob)
