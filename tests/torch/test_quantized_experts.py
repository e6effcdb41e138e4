"""Experts whose weights come quantised, as checkpoints are released: the operator beside a layer
that quantises, and whole models beside the same numbers in plain experts."""

import copy
import json
import re

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.0")
save_file = pytest.importorskip("safetensors.torch").save_file
from safetensors.torch import load_file  # noqa: E402
import cadre  # noqa: E402
import cadre.huggingface as huggingface  # noqa: E402

transformers.logging.set_verbosity_error()
ops = torch.ops.cadre

E, H, F, R = 4, 96, 64, 30
FP8 = "bf16,fprop=fp8_block:fp32*fp8_block:2d+fp32"
RECIPES = {"mxfp4": "mxfp4", "bf16,fprop=bf16*nvfp4": "nvfp4", "bf16,fprop=bf16*mxfp8": "mxfp8",
           FP8: "fp8_block:2d+fp32", "fp8_tensor": "fp8_tensor"}


def copies(w, format):
    """Codes, scales and, where the format has them, scales of experts."""
    codes, scales, expert_scale = ops.quantize(w, None, format, "along_k")
    return [codes, scales] + ([expert_scale] if len(expert_scale) else [])


def layer(device, seed=0):
    torch.manual_seed(seed)
    counts = torch.tensor([7, 0, 12, 8])
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)
    plain = [torch.randn(R, H), torch.rand(R), torch.randn(E, 2 * F, H) / 8,
             torch.randn(E, H, F) / 8, torch.randn(E, 2 * F), torch.randn(E, H)]
    x, prob, w1, w2, b1, b2 = (t.to(device) for t in plain)
    bf16 = torch.bfloat16
    return (x.to(bf16), offsets.to(device), prob, w1.to(bf16), b1.to(bf16), w2.to(bf16),
            b2.to(bf16))


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu layout=interleave1 limit=2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_operator_has_the_bits_of_a_layer_that_quantises(device, recipe, activation):
    x, offsets, prob, w1, b1, w2, b2 = layer(device)
    want, _ = ops.grouped_mlp(x, offsets, prob, [w1], [b1], [w2], [b2], prob, recipe=recipe,
                              activation=activation)
    q1, q2 = copies(w1, RECIPES[recipe]), copies(w2, RECIPES[recipe])
    options = dict(recipe=recipe, activation=activation)
    got = ops.grouped_mlp_quantized(x, offsets, prob, q1, [b1], q2, [b2], prob, **options)
    assert torch.equal(got, want)
    assert want[: int(offsets[-1])].abs().sum() > 0
    q1, q2 = (list(ops.quantize(w, None, RECIPES[recipe], "along_k")) for w in (w1, w2))
    got = ops.grouped_mlp_quantized(x, offsets, prob, q1, [b1], q2, [b2], prob, **options)
    assert torch.equal(got, want)  # an empty tensor stands for scales that the format has not
    plain = ops.grouped_mlp_quantized(x, offsets, None, q1, [], q2, [], **options)
    assert not torch.equal(plain, want)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("begin", [1, 8])
def test_codes_lie_at_any_address(device, begin, which):
    """Nobody asks that they are aligned, and the problem does not promise it."""
    x, offsets, prob, w1, _, w2, _ = layer(device)
    q = [copies(w, "mxfp4") for w in (w1, w2)]

    def run(**options):
        return ops.grouped_mlp_quantized(x, offsets, prob, q[0], [], q[1], [], recipe="mxfp4",
                                         **options)

    want, codes = run(), q[which][0]
    memory = torch.zeros(codes.numel() + 16, dtype=torch.uint8, device=device)
    q[which][0] = memory[begin:][:codes.numel()].view(codes.shape).copy_(codes)
    got = run()
    assert torch.equal(got, want) or device.type == "cuda"  # another kernel, of other sums
    assert ((got - want).abs() <= 0.02 * want.abs().max()).all()
    with pytest.raises(ValueError, match=rf"unit_budget is -1, .* quantized_w=yes .*align={begin}"):
        run(unit_budget=-1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_that_have_chosen_have_the_bits_of_their_rows(device, recipe, bias):
    """Some of them nobody; in any integers."""
    x, _, _, w1, b1, w2, b2 = layer(device)
    q1, q2 = copies(w1, RECIPES[recipe]), copies(w2, RECIPES[recipe])
    b1, b2 = ([b1], [b2]) if bias else ([], [])
    experts, prob = torch.randint(-1, E + 1, (R, 2), device=device), torch.rand(R, 2, device=device)
    where = cadre.offsets_of_routing(experts, E, 2 * R)
    rows, row_prob = cadre.permute(x, where, prob=prob)
    y = ops.grouped_mlp_quantized(rows, where.offsets, row_prob, q1, b1, q2, b2,
                                  row_prob if bias else None, recipe=recipe)
    want = cadre.combine(y, where)
    for index in (torch.int32, torch.int64):
        got = ops.routed_experts_quantized(x, experts.to(index), prob, q1, b1, q2, b2,
                                           recipe=recipe)
        assert torch.equal(got, want) and want.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_keep_their_type(device, dtype):
    """Beside plain experts in fp32 with the numbers of the codes; in mxfp4 they become bf16."""
    x, _, prob, w1, _, w2, _ = layer(device)
    x = torch.randn(R, H, device=device).to(dtype)
    q1, q2 = copies(w1, "mxfp4"), copies(w2, "mxfp4")
    chosen = torch.randint(0, E, (R, 1), device=device)
    numbers = [decoded(*q[:2], "mxfp4", list(w.shape)).float() for q, w in ((q1, w1), (q2, w2))]
    want = ops.routed_experts(x.float(), chosen, prob[:, None], E, numbers[:1], [], numbers[1:],
                              [])[0]
    word, far = {torch.float32: ("f32", 1e-5), torch.float16: ("f16", 1e-3)}[dtype]

    def distance(recipe):
        got = ops.routed_experts_quantized(x, chosen, prob[:, None], q1, [], q2, [], recipe=recipe)
        assert got.dtype == dtype
        return float((got - want).norm() / want.norm())

    assert distance(f"{word},fprop={word}*mxfp4") < far < 2e-3 < distance("mxfp4")


def test_opcheck(device):
    x, offsets, prob, w1, b1, w2, b2 = layer(device)
    parts = [[t.view(torch.uint8) for t in copies(w, "mxfp4")] for w in (w1, w2)]
    chosen = torch.zeros(R, 1, dtype=torch.int32, device=device)
    torch.library.opcheck(ops.routed_experts_quantized.default,
                          (x, chosen, prob.view(R, 1), parts[0], [b1], parts[1], [b2]),
                          dict(recipe="mxfp4"), test_utils=["test_schema", "test_faketensor"])
    args = x, offsets, prob, parts[0], [b1], parts[1], [b2], prob
    torch.library.opcheck(ops.grouped_mlp_quantized.default, args, dict(recipe="mxfp4"),
                          test_utils=["test_schema", "test_faketensor"])


SIZES = dict(vocab_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=None)


def gpt_oss():
    return transformers.GptOssConfig(
        **SIZES, hidden_size=64, num_key_value_heads=2, head_dim=8, intermediate_size=96,
        num_local_experts=6, num_experts_per_tok=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"])


def deepseek(**sizes):
    return transformers.DeepseekV3Config(
        **SIZES | dict(hidden_size=128, num_key_value_heads=4, intermediate_size=128,
                       moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2,
                       n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=16,
                       kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
        | sizes)


def randomised(config) -> nn.Module:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" not in name and tensor.is_floating_point():
                tensor.normal_(std=(2.0 if "experts" in name else 1.0) / 8)
    return model


def decoded(codes, scales, format, shape):
    none = torch.empty(0, device=codes.device)
    return ops.dequantize(codes, scales, none, None, format, "along_k", shape, torch.bfloat16)


def released_gpt_oss(model):
    """The released tensors; the model is left with the numbers that they stand for."""
    tensors = {}
    for name, t in model.state_dict().items():
        if not re.search(r"experts\.\w+_proj$", name):
            tensors[name] = t.clone()
            continue
        codes, scales, _ = ops.quantize(t.mT.contiguous(), None, "mxfp4", "along_k")
        tensors[name + "_blocks"] = codes.unflatten(2, (-1, 16))
        tensors[name + "_scales"] = scales.view(torch.uint8)
        t.copy_(decoded(codes, scales, "mxfp4", list(t.mT.shape)).mT)
    return tensors, {"quant_method": "mxfp4"}


def coded(t):
    """8-bit codes and scales that are no powers of two, of a weight [N, K]."""
    codes, scales, _ = ops.quantize(t[None].contiguous(), None, "fp8_block:2d+fp32", "along_k")
    return codes[0], scales[0], decoded(codes, scales, "fp8_block:2d+fp32", [1, *t.shape])[0]


def released_deepseek(model):
    """As above; weights of attention and of dense layers are codes, too."""
    tensors = {}
    for name, t in model.state_dict().items():
        if re.search(r"experts\.\w+_proj$", name):
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for e, of_expert in enumerate(t):
                for part, own in zip(parts, of_expert.chunk(len(parts))):
                    path = f"{name.rpartition('.')[0]}.{e}.{part}.weight"
                    tensors[path], tensors[path + "_scale_inv"], numbers = coded(own)
                    own.copy_(numbers)
        elif re.search(r"_proj(_with_mqa|)\.weight$", name):
            tensors[name], tensors[name + "_scale_inv"], numbers = coded(t)
            t.copy_(numbers)
        else:
            tensors[name] = t.clone()
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(3)  # predicts further tokens
    return tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}


RELEASED = {"gpt_oss": (gpt_oss, released_gpt_oss), "deepseek_v3": (deepseek, released_deepseek)}


def write(folder, config, tensors, about, shards=1):
    config = json.loads(config.to_json_string(use_diff=False)) | {"quantization_config": about}
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files = [f"model-{i}.safetensors" for i in range(shards)] if shards > 1 else [
        "model.safetensors"]
    for i, file in enumerate(files):
        save_file({name: tensors[name].contiguous() for name in names[i::shards]}, folder / file)
    if shards > 1:
        weight_map = {name: files[i % shards] for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("family", RELEASED)
def test_a_released_checkpoint_computes_what_its_numbers_do(device, family, tmp_path):
    make, release = RELEASED[family]
    config = make()
    plain = randomised(config)
    tensors, about = release(plain)
    write(tmp_path, config, tensors, about, shards=3)
    model = huggingface.load_quantized(tmp_path, device=device)
    experts = dict(model.named_modules())["model.layers.1.mlp.experts"]
    assert not hasattr(experts, "gate_up_proj") or experts.gate_up_proj.itemsize == 1
    assert f"runs {huggingface.NAME}" in huggingface.explain(model)
    plain = huggingface.use(plain.to(device).eval())
    tokens = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(5)).to(device)
    with torch.no_grad():
        got, want = (m(tokens).logits.float() for m in (model, plain))
        first = model.generate(tokens, max_new_tokens=4, do_sample=False)
    # mxfp4: rows are bf16 in both; fp8: rows are rounded to codes of 3 bits, twice a layer.
    bound = 0.01 if family == "gpt_oss" else 0.08
    assert float((got - want).norm() / want.norm()) < bound
    assert first.shape == (3, 15)


def test_scales_that_are_powers_of_two(tmp_path):
    """As DeepSeek-V3.1 has them: in fp32 or as e8m0, and of rows too."""
    tensors, about = released_deepseek(randomised(deepseek()))
    scales = {name for name in tensors if name.endswith("_scale_inv")}
    for name in scales:
        tensors[name] = tensors[name].log2().round().exp2()
    made = []
    tokens = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(5))
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        for says in ({}, {"scale_fmt": "ue8m0"}):
            folder = tmp_path / f"{dtype}{len(says)}"
            folder.mkdir()
            stored = {name: t.to(dtype) if name in scales else t for name, t in tensors.items()}
            write(folder, deepseek(), stored, about | says)
            with torch.no_grad():
                made.append(huggingface.load_quantized(folder, device="cpu")(tokens).logits.float())
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3])
    difference = float((made[0] - made[1]).norm() / made[0].norm())
    assert 0 < difference < 0.08


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_experts_of_gpt_oss_have_the_bits_of_their_numbers(dtype, tmp_path):
    """Whatever type the rows have, which are not rounded, and whatever recipe a context asks for.
    """
    plain = randomised(gpt_oss())
    tensors, about = released_gpt_oss(plain)
    model = huggingface.load_quantized(write(tmp_path, gpt_oss(), tensors, about), device="cpu",
                                       dtype=dtype)
    experts = [m.model.layers[0].mlp.experts for m in (model, huggingface.use(plain.to(dtype)))]
    x = torch.randn(20, 64, dtype=dtype)
    chosen = torch.rand(20, 6).topk(2)
    with torch.no_grad():
        got, want = (module(x, chosen.indices, chosen.values) for module in experts)
        with cadre.autocast(recipe="fp8_tensor"):
            inside = experts[0](x, chosen.indices, chosen.values)
    assert torch.equal(got, want) and torch.equal(inside, want)
    runs = {torch.bfloat16: "mxfp4", torch.float32: "f32,fprop=f32*mxfp4",
            torch.float16: "f16,fprop=f16*mxfp4"}[dtype]
    assert f" F={experts[0].config.intermediate_size} {runs} cpu" in huggingface.explain(model)


def loaded(family, folder):
    """The model, and plain experts with the same numbers."""
    make, release = RELEASED[family]
    plain = randomised(make())
    tensors, about = release(plain)
    folder.mkdir(exist_ok=True)
    return huggingface.load_quantized(write(folder, make(), tensors, about), device="cpu"), plain


TOKENS = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", RELEASED)
def test_what_is_saved_is_a_checkpoint_as_released(family, tmp_path, monkeypatch):
    """transformers reads the same numbers, which were codes without their scales; on a CPU it
    decodes them."""
    model, plain = loaded(family, tmp_path / "released")
    with torch.no_grad():
        want, numbers = model(TOKENS).logits, plain.eval()(TOKENS).logits
        model.save_pretrained(tmp_path / "saved", max_shard_size="200KB")
        again = huggingface.load_quantized(tmp_path / "saved", device="cpu")
        assert torch.equal(again(TOKENS).logits, want)
    if torch.cuda.is_available():
        return
    for method in ("finegrained_fp8", "mxfp4"):
        monkeypatch.setattr(f"transformers.quantizers.quantizer_{method}.is_accelerate_available",
                            lambda: True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved",
                                                               dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(TOKENS).logits, numbers)


def test_saved_names_are_those_of_the_files(tmp_path):
    """Of experts that are packed there, too; and of a state that is given."""
    plain = randomised(deepseek())
    tensors, about = released_deepseek(plain)
    experts = "model.layers.1.mlp.experts."
    for name, parts in (("gate_up_proj", ["gate_proj", "up_proj"]), ("down_proj", ["down_proj"])):
        for suffix in ("", "_scale_inv"):
            tensors[experts + name + suffix] = torch.stack([
                torch.cat([tensors.pop(f"{experts}{e}.{part}.weight{suffix}") for part in parts])
                for e in range(8)])
    model = huggingface.load_quantized(write(tmp_path, deepseek(), tensors, about), device="cpu")
    model.save_pretrained(tmp_path / "saved", state_dict=model.state_dict())
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert torch.equal(saved[experts + "gate_up_proj"].view(torch.uint8),
                       tensors[experts + "gate_up_proj"].view(torch.uint8))
    apart, _ = loaded("deepseek_v3", tmp_path / "apart")
    apart.save_pretrained(tmp_path / "saved_apart", state_dict=apart.state_dict())
    saved = load_file(tmp_path / "saved_apart/model.safetensors")
    assert {name for name in saved if "mlp.experts" in name} == {
        f"{experts}{e}.{part}_proj.weight{suffix}" for e in range(8)
        for part in ("gate", "up", "down") for suffix in ("", "_scale_inv")}
    assert saved[experts + "3.up_proj.weight_scale_inv"].shape == (1, 1)


def saved_and_loaded(model, folder):
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


@pytest.mark.parametrize("family", RELEASED)
def test_codes_stay_codes_whatever_type_the_model_gets(family, tmp_path):
    model, _ = loaded(family, tmp_path)
    experts = model.model.layers[1].mlp.experts
    codes = {name: getattr(experts, name).clone() for name in experts._cadre_quantized.names()}
    for change in (lambda m: m.half(), lambda m: m.to(torch.float32), copy.deepcopy,
                   lambda m: m.type(torch.bfloat16), lambda m: m.to("cpu", torch.float16),
                   lambda m: saved_and_loaded(m, tmp_path)):
        changed = change(model)
        experts = [m for m in changed.modules() if hasattr(m, "_cadre_quantized")][-1]
        for name, want in codes.items():
            got = getattr(experts, name)
            assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8),
                                                           want.view(torch.uint8))
    model.to(torch.float16)
    assert model.lm_head.weight.dtype == torch.float16
    with torch.no_grad():
        assert model(TOKENS).logits.isfinite().all()
    twin = copy.deepcopy(model).half().to("meta")
    assert all(p.is_meta for p in twin.parameters())
    assert not any(p.is_meta for p in model.parameters())


def test_codes_run_on_cadre_alone(tmp_path):
    model, _ = loaded("gpt_oss", tmp_path)
    for asked in ("eager", {"": "grouped_mm"}, None):  # which is grouped_mm to transformers
        with pytest.raises(ValueError, match=re.escape(
                f"set_experts_implementation: implementation is {asked!r}, must be 'cadre'; the "
                "experts' weights are codes, which nobody else reads")):
            model.set_experts_implementation(asked)
    model.set_experts_implementation("cadre")
    with torch.no_grad():
        assert huggingface.use(model)(TOKENS).logits.isfinite().all()


@pytest.mark.parametrize("family, kind, width", [("gpt_oss", "GptOssExperts", 64),
                                                 ("deepseek_v3", "DeepseekV3Experts", 128)])
def test_quantised_experts_have_no_backward(family, kind, width, tmp_path):
    model, _ = loaded(family, tmp_path)
    experts = model.model.layers[1].mlp.experts
    method = {"gpt_oss": "mxfp4", "deepseek_v3": "fp8"}[family]
    x = torch.randn(3, width).bfloat16().requires_grad_()
    with pytest.raises(NotImplementedError) as error:
        experts(x, torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2))
    assert str(error.value) == (
        f"huggingface: {kind} with weights in {method} has no backward; run it under "
        "torch.no_grad(), or load the model without weight quantization")


def test_what_transformers_keeps_in_fp32_and_how_it_generates(tmp_path):
    """The bias of scores differs by less than a step of bf16."""
    plain = randomised(deepseek())
    tensors, about = released_deepseek(plain)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = 8 + torch.rand_like(tensors[name].float()) * 0.02
    write(tmp_path, deepseek(), tensors, about)
    asked = {"eos_token_id": [5, 7], "max_new_tokens": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    model = huggingface.load_quantized(tmp_path, device="cpu")
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32 and torch.equal(bias, tensors[name])
    assert model.model.layers[1].mlp.gate.weight.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [5, 7]
    assert model.generation_config.max_new_tokens == 3
