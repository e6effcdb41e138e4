"""Tiny random models that generate through "cadre" with a cache of fixed size: compiled once, in a
CUDA graph, and with the tokens of the eager experts."""

import pathlib
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
import cadre.huggingface as huggingface  # noqa: E402
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers"))
from huggingface_models import Decoder, HostReads  # noqa: E402
from test_huggingface import CONFIGS, SIZES, model_of  # noqa: E402
from transformers.cache_utils import Cache, StaticLayer  # noqa: E402

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILIES = {
    "qwen3_moe": CONFIGS["qwen3_moe"],
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3,
        first_k_dense_replace=1),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=48, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2),
    "gpt_oss": CONFIGS["gpt_oss"],
}
PROMPT, NEW = 9, 16  # more than the sliding window of gpt_oss


@pytest.fixture(params=list(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def make(family: str, device, implementation: str = "eager"):
    return model_of(FAMILIES[family](), device, implementation).eval()


def prompts(batch: int, device) -> torch.Tensor:
    return torch.randint(2, 64, (batch, PROMPT)).to(device)


def cache_of(model) -> Cache:
    """Of fixed size, whose length is on the device alone, for sliding windows too."""
    return Cache(layers=[StaticLayer(PROMPT + NEW) for _ in range(model.config.num_hidden_layers)])


def generated(model, ids, **arguments) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False,
                          attention_mask=torch.ones_like(ids), **arguments)


def compiled(model, ids, cache) -> torch.Tensor:
    """What a model generates whose decode step is one graph, compiled once."""
    how = transformers.CompileConfig(fullgraph=True, dynamic=None, backend="aot_eager", mode=None)
    how._compile_all_devices = True
    with torch._dynamo.config.patch(error_on_recompile=True):
        return generated(model, ids, past_key_values=cache, compile_config=how)


@pytest.mark.parametrize("batch", [1, 16])
def test_generates_the_tokens_of_eager_compiled_once(family, batch, device):
    model, ids = make(family, device), prompts(batch, device)
    want = generated(model, ids)
    assert want[:, PROMPT:].unique().numel() > 2
    huggingface.use(model)
    assert torch.equal(generated(model, ids, cache_implementation="static", disable_compile=True),
                       want)
    assert torch.equal(compiled(model, ids, cache_of(model)), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_cache_that_counts_on_the_host_compiles_again(device):
    """As that of transformers does for sliding windows; the test above would see it."""
    model, ids = make("gpt_oss", device, "cadre"), prompts(1, device)
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
    with pytest.raises(torch._dynamo.exc.RecompileError, match="cumulative_length_int"):
        compiled(model, ids, cache)


@pytest.mark.parametrize("implementation", ["cadre", "eager"])
def test_a_decode_step_reads_nothing_on_the_host(family, device, implementation):
    decoder = Decoder(make(family, device, implementation), prompts(2, device), NEW)
    with HostReads() as seen:
        decoder.step()
    assert ("aten::nonzero" in seen.names) == bool(seen.names) == (implementation == "eager")


@gpu
@pytest.mark.parametrize("batch", [1, 16])
def test_a_captured_step_generates_the_same_tokens(family, batch):
    decoder = Decoder(make(family, "cuda", "cadre"), prompts(batch, "cuda"), NEW)
    tokens = []
    for _ in range(NEW):
        decoder.step()
        tokens.append(decoder.token.clone())
    decoder.rewind()
    replay = decoder.captured()
    decoder.rewind()
    for want in tokens:
        replay()
        assert torch.equal(decoder.token, want)


@gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_generate_compiles_into_graphs(family):
    """As `generate` does by itself where a cache has a fixed size."""
    model, ids = make(family, "cuda"), prompts(16, "cuda")
    want = generated(model, ids)
    cache = cache_of(huggingface.use(model))
    for _ in range(3):
        cache.reset()
        assert torch.equal(generated(model, ids, past_key_values=cache), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
