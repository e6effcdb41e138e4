"""Folders that load_quantized refuses, and tensors of checkpoints that it reads as they are."""

import json
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
from safetensors.torch import load_file, save_file  # noqa: E402

import cadre.huggingface as huggingface  # noqa: E402
from test_quantized_experts import (  # noqa: E402
    deepseek, gpt_oss, randomised, released_deepseek, released_gpt_oss, write)


class Wrong:
    """Files with one thing that does not fit."""

    def __init__(self, folder):
        self.folder, self.config = folder, gpt_oss()
        self.tensors, self.about = released_gpt_oss(randomised(self.config))

    def says(self):
        write(self.folder, self.config, self.tensors, self.about)
        with pytest.raises((ValueError, TypeError)) as error:
            huggingface.load_quantized(self.folder, device="cpu")
        return str(error.value).replace(str(self.folder), "FOLDER")


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


def test_errors(tmp_path):
    wrong = Wrong(tmp_path)
    wrong.about = {"quant_method": "awq"}
    assert wrong.says() == ("load_quantized: quant_method of FOLDER is 'awq', must be one of "
                            "mxfp4, fp8")
    wrong.about = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    assert wrong.says() == ("load_quantized: weight_block_size of FOLDER is [64, 64], must be "
                            "[128, 128]")
    for option, given, must in (("weight_block_size", None, "[128, 128]"),
                                ("fmt", "e5m2", "e4m3 or float8_e4m3fn"),
                                ("activation_scheme", "static", "dynamic"),
                                ("scale_fmt", "e4m3", "float or ue8m0")):
        wrong.about = {"quant_method": "fp8", option: given}
        assert wrong.says() == (f"load_quantized: {option} of FOLDER is {given!r}, must be {must}")
    wrong.about = {"quant_method": "mxfp4"}
    blocks = wrong.tensors.pop(BLOCKS)
    assert wrong.says() == f"load_quantized: {BLOCKS} is in none of the files, must be in one"
    wrong.tensors[BLOCKS] = blocks[:3]
    assert wrong.says() == (f"load_quantized: {BLOCKS} has shape [3, 64, 3, 16], must be "
                            "[6, 64, 3, 16]")
    wrong.tensors[BLOCKS] = blocks
    wrong.tensors["model.layers.0.mlp.more"] = torch.zeros(2)
    assert wrong.says() == ("load_quantized: model.layers.0.mlp.more of the files belongs to "
                            "nothing in GptOssForCausalLM, must be a tensor of it")
    del wrong.tensors["model.layers.0.mlp.more"]
    norm = wrong.tensors["model.norm.weight"]
    wrong.tensors["model.norm.weight"] = norm.to(torch.int8)
    assert wrong.says() == ("load_quantized: model.norm.weight is torch.int8, must be "
                            "torch.bfloat16")
    wrong.tensors["model.norm.weight"] = norm
    wrong.tensors[BLOCKS] = blocks.view(torch.int8)
    assert wrong.says() == f"load_quantized: {BLOCKS} is torch.int8, must be torch.uint8"
    wrong.tensors[BLOCKS] = blocks
    wrong.config = transformers.GptOssConfig(**wrong.config.to_dict() | {"intermediate_size": 72})
    assert wrong.says() == ("load_quantized: down_proj of GptOssExperts is [64, 72] for an expert, "
                            "must be whole blocks of 1 x 32")


EXPERT, OUTSIDE = "1.mlp.experts.0.up_proj.weight", "0.self_attn.o_proj.weight"
SCALES = "_scale_inv"


@pytest.mark.parametrize("last, dtype, want", [
    (EXPERT, torch.float8_e5m2, torch.float8_e4m3fn), (EXPERT, torch.int8, torch.float8_e4m3fn),
    (EXPERT, torch.bfloat16, torch.float8_e4m3fn), (EXPERT + SCALES, torch.int32, torch.float32),
    (OUTSIDE + SCALES, torch.uint8, torch.float32), (OUTSIDE, torch.float8_e5m2, torch.bfloat16)])
def test_codes_of_another_type_are_refused(tmp_path, last, dtype, want):
    """They were read as if they were of the type that is wanted."""
    name = f"model.layers.{last}"
    with pytest.raises(ValueError, match=f"{name} is {dtype}, must be {want}$"):
        load_changed(tmp_path, name, lambda t: t.float().to(dtype))


def load_changed(folder, name, change):
    """A DeepSeek checkpoint of which one tensor is another."""
    tensors, about = released_deepseek(randomised(deepseek()))
    tensors[name] = change(tensors[name])
    return huggingface.load_quantized(write(folder, deepseek(), tensors, about), device="cpu")


@pytest.mark.parametrize("last, change, words", [
    (SCALES, torch.Tensor.flatten, "has shape [1], must be [1, 1]"),
    (SCALES, lambda t: t.expand(2, 2), "has shape [2, 2], must be [1, 1]"),
    ("", lambda t: t[None], "has shape [1, 128, 32]"
     ", must have 2 dimensions, as its codes have scales of square blocks")])
def test_weights_outside_of_experts_have_scales_of_their_blocks(tmp_path, last, change, words):
    name = f"model.layers.{OUTSIDE}{last}"
    with pytest.raises(ValueError, match=re.escape(f"load_quantized: {name} {words}") + "$"):
        load_changed(tmp_path, name, change)


def test_errors_of_arguments(tmp_path):
    def says(*given, **named):
        with pytest.raises((ValueError, TypeError)) as error:
            huggingface.load_quantized(*given, **named)
        return str(error.value).replace(str(tmp_path), "FOLDER")

    assert says(7) == "load_quantized: folder is an int, must be a path"
    assert says(tmp_path) == ("load_quantized: FOLDER has no config.json, must be the folder of a "
                              "checkpoint")
    assert says(tmp_path, dtype=torch.int8) == ("dtype is torch.int8, must be torch.float32, "
                                                "torch.bfloat16 or torch.float16")
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2,
                                      intermediate_size=32, vocab_size=16)
    write(tmp_path, config, {"lm_head.weight": torch.zeros(1)}, {"quant_method": "fp8"})
    assert says(tmp_path) == ("load_quantized: LlamaConfig has no experts modules that "
                              "transformers dispatches, must have some")


def test_whole_numbers_stay_what_they_are(tmp_path):
    """DeepSeek-V4 has experts of tokens in a table."""
    config = transformers.DeepseekV4Config(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2, q_lora_rank=32,
        head_dim=32, o_lora_rank=16, o_groups=2, index_n_heads=2, index_head_dim=16, hc_mult=2,
        layer_types=["sliding_attention"] * 2, mlp_layer_types=["hash_moe", "moe"],
        sliding_window=16, max_position_embeddings=64, pad_token_id=0)
    tensors, about = released_deepseek(randomised(config))
    name = "model.layers.0.mlp.gate.tid2eid"
    tensors[name] = torch.arange(tensors[name].numel()).view_as(tensors[name]) % 8
    model = huggingface.load_quantized(write(tmp_path, config, tensors, about), device="cpu")
    assert torch.equal(model.state_dict()[name], tensors[name])
    tensors[name] = tensors[name].int()
    write(tmp_path, config, tensors, about)
    with pytest.raises(ValueError, match=f"{name} is torch.int32, must be torch.int64$"):
        huggingface.load_quantized(tmp_path, device="cpu")


def test_files_and_their_index(tmp_path):
    """Which file of a folder a tensor comes from, and what is said of files that have none."""
    config = deepseek()
    tensors, about = released_deepseek(randomised(config))
    norm = tensors["model.norm.weight"]

    def found():
        model = huggingface.load_quantized(tmp_path, device="cpu")
        return model.model.norm.weight

    def refusal():
        with pytest.raises(ValueError) as error:
            huggingface.load_quantized(tmp_path, device="cpu")
        return str(error.value).replace(str(tmp_path), "FOLDER")

    write(tmp_path, config, tensors, about, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    other = {"model-0.safetensors": "model-1.safetensors",
             "model-1.safetensors": "model-0.safetensors"}[places["model.norm.weight"]]
    rest = load_file(tmp_path / other)
    save_file(rest | {"model.norm.weight": norm + 1}, tmp_path / other)
    assert torch.equal(found(), norm)  # that of the index
    for text in ("{}", "no json", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        assert refusal() == ("load_quantized: FOLDER/model.safetensors.index.json has no "
                             "weight_map, must have one")
    index.write_text(json.dumps({"weight_map": places | {"more": "more.safetensors"}}))
    assert refusal() == ("load_quantized: FOLDER has no more.safetensors, must have "
                         "model.safetensors or all files of its index")
    index.write_text(json.dumps({"weight_map": places}))
    whole = (tmp_path / other).read_bytes()
    for left in (0, 5, len(whole) - 1):
        (tmp_path / other).write_bytes(whole[:left])
        first = f"load_quantized: FOLDER/{other} can't be read ("
        said = refusal()
        assert said.startswith(first) and said.endswith("), must be a whole file of safetensors")
    # One file of all comes first, as for transformers.
    write(tmp_path, config, tensors | {"model.norm.weight": norm + 2}, about)
    assert torch.equal(found(), norm + 2)
