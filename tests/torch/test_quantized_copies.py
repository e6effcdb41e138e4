"""Copies of models whose experts have quantised weights: pickles, folders that are written again,
and what is left of them when they go."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
import cadre.huggingface as huggingface  # noqa: E402
from test_quantized_experts import RELEASED, TOKENS, loaded  # noqa: E402

UNPICKLED = """
import sys, torch, transformers, cadre.huggingface
model = torch.load(sys.argv[1], weights_only=False).half().bfloat16()
with torch.no_grad():
    torch.save(model(torch.ones(1, 4, dtype=torch.long)).logits, sys.argv[2])
"""


def test_a_pickle_keeps_its_codes_in_another_process(tmp_path):
    model, _ = loaded("deepseek_v3", tmp_path)
    torch.save(model, tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", UNPICKLED, tmp_path / "model.pt", tmp_path / "logits.pt"],
                   check=True)
    with torch.no_grad():
        want = model.half().bfloat16()(torch.ones(1, 4, dtype=torch.long)).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), want)


@pytest.mark.parametrize("release", [dict(max_shard_size="60KB"), dict(variant="other")])
def test_folders_in_which_files_are_left_behind(tmp_path, release):
    """transformers leaves the index of the shards that it removes."""
    model, _ = loaded("deepseek_v3", tmp_path)
    with pytest.raises(ValueError, match="save_pretrained: distributed_checkpoint is True, must be "
                       "False for codes"):
        model.save_pretrained(tmp_path, distributed_checkpoint=True)
    model.save_pretrained(tmp_path / "again", **release)
    if "variant" in release:
        with pytest.raises(ValueError, match="again has no model.safetensors, must have "
                           "model.safetensors or all files of its index"):
            huggingface.load_quantized(tmp_path / "again", device="cpu")
    model.save_pretrained(tmp_path / "again")
    again = huggingface.load_quantized(tmp_path / "again", device="cpu")
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("family", list(RELEASED))
def test_a_model_goes_when_its_last_owner_does(tmp_path, family):
    """At once, since it may be most of a GPU's memory: nothing in it holds itself."""
    model, _ = loaded(family, tmp_path)
    gc.collect()
    gc.disable()
    try:
        left = [weakref.ref(p) for p in model.parameters()]
        del model
        assert not any(ref() is not None for ref in left)
    finally:
        gc.enable()
