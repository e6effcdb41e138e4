"""Models of transformers with the widths of released ones, few layers and random weights, and what
is called of them. huggingface.py times it.
"""
import contextlib
import copy

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache, StaticLayer

import grouped_attention

# Layers and words of the released model, then its widths.
RELEASED = {
    "qwen3_moe": (48, 151936, dict(  # Qwen3-30B-A3B
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)),
    "glm4_moe": (46, 151552, dict(  # GLM-4.5-Air
        hidden_size=4096, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
        moe_intermediate_size=1408, n_routed_experts=128, num_experts_per_tok=8,
        first_k_dense_replace=0, attention_bias=True)),
    "qwen2_moe": (24, 151936, dict(  # Qwen1.5-MoE-A2.7B
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=16,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
        num_experts_per_tok=4)),
    "gpt_oss": (24, 201088, dict(  # gpt-oss-20b
        hidden_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4, sliding_window=128)),
}
# In place of these for a CPU, where models only show that they run.
TINY = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
TINY_EXPERTS = {
    "qwen3_moe": dict(moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3),
    "glm4_moe": dict(moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=3),
    "qwen2_moe": dict(moe_intermediate_size=48, shared_expert_intermediate_size=40, num_experts=6,
                      num_experts_per_tok=2),
    "gpt_oss": dict(intermediate_size=56, num_local_experts=6, num_experts_per_tok=2,
                    sliding_window=8),
}
# Experts of transformers: `generate` takes batched_mm to decode where a model has grouped_mm.
PEERS = ("grouped_mm", "batched_mm", "eager", "deepgemm", "sonicmoe")


def config_of(family, layers, vocab, tiny):
    widths = RELEASED[family][2] | (TINY | TINY_EXPERTS[family] if tiny else {})
    return transformers.AutoConfig.for_model(
        family, **widths, num_hidden_layers=layers, vocab_size=vocab, pad_token_id=None,
        bos_token_id=None, eos_token_id=None)


def attention_of(family, attention):
    """What from_config takes: transformers' choice if None, or if the model has sinks."""
    if attention is None or family == "gpt_oss":
        return {}
    grouped_attention.use()
    return {"attn_implementation": attention}


@torch.no_grad()
def fill(model):
    """Numbers so large that the logits show every part of the model, the experts above all."""
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.normal_(0.0, 0.1)
        elif weight.dim() > 1:
            weight.normal_(0.0, (2.0 if weight.dim() == 3 else 1.0) * weight.shape[-1] ** -0.5)


class Models:
    """A model at two depths, which share all weights. Its words are so many that the head has the
    share of the work that it has in the released model."""

    def __init__(self, family, depths, device, seed, attention=None):
        self.attention = attention_of(family, attention)
        self.family, (deep, shallow), self.tiny = family, depths, device == "cpu"
        layers, words, _ = RELEASED[family]
        self.vocab = 128 if self.tiny else -(-words * deep // layers // 64) * 64
        torch.manual_seed(seed)
        self.deep = self.made(deep, device)
        self.shallow = self.made(shallow, "meta")
        inner, whole = self.shallow.model, self.deep.model
        inner.layers = whole.layers[:shallow]
        inner.embed_tokens, inner.norm, inner.rotary_emb = (
            whole.embed_tokens, whole.norm, whole.rotary_emb)
        self.shallow.lm_head = self.deep.lm_head
        fill(self.deep)

    def made(self, layers, device):
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                config_of(self.family, layers, self.vocab, self.tiny), dtype=torch.bfloat16,
                experts_implementation="eager", **self.attention)
        return model.eval()

    @property
    def both(self):
        return {"deep": self.deep, "shallow": self.shallow}

    def take(self, implementation):
        """For all experts, which have the config of the deep model."""
        self.deep.set_experts_implementation(implementation)

    def words(self, *shape):
        return torch.randint(self.vocab, shape, device=self.deep.device)

    @property
    def text(self):
        config, experts = self.deep.config, Routing(self.deep).experts[0].num_experts
        width = config.intermediate_size if self.family == "gpt_oss" else (
            config.moe_intermediate_size)
        return (f"huggingface model={self.family} layers={config.num_hidden_layers} "
                f"H={config.hidden_size} F={width} E={experts} "
                f"top_k={config.num_experts_per_tok} vocab={self.vocab}"
                + "".join(f" attention={name}" for name in self.attention.values()))


class Routing:
    """What the routers of a model chose, call by call. Replayed, so that contestants differ by
    their own roundings and by no token that chose otherwise for one."""

    def __init__(self, model):
        self.experts = [m for m in model.modules() if hasattr(m, "is_transposed")]
        self.choices = []

    @contextlib.contextmanager
    def recorded(self):
        self.choices.clear()
        with self.hooked(lambda module, args: self.choices.append(
                [choice.detach() for choice in args[1:]])):
            yield

    @contextlib.contextmanager
    def replayed(self):
        choices = iter(self.choices)
        with self.hooked(lambda module, args: (args[0], *next(choices))):
            yield

    @contextlib.contextmanager
    def hooked(self, hook):
        handles = [module.register_forward_pre_hook(hook) for module in self.experts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Decoder:
    """Steps of one token a sequence behind a prompt, each from the token before. The cache has a
    fixed size, and its length is on the device alone, for sliding windows too."""

    @torch.no_grad()
    def __init__(self, model, prompt, room):
        self.model, self.prompt = model, prompt.shape[1]
        self.cache = Cache(layers=[StaticLayer(self.prompt + room)
                                   for _ in range(model.config.num_hidden_layers)])
        logits = model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.first = logits.argmax(-1)
        self.token = self.first.clone()

    def next(self, token):
        logits = self.model(token, attention_mask=self.masks(), past_key_values=self.cache,
                            use_cache=True).logits
        return logits, logits.argmax(-1)

    def masks(self):
        """Of gpt-oss, whose own code takes a number of the host for them, which no graph can hold;
        None where the model makes them on the device."""
        config, length = self.model.config, self.cache.layers[0].cumulative_length
        if config._attn_implementation != "eager":
            return None
        behind = length - torch.arange(self.cache.layers[0].max_cache_len, device=length.device)
        seen = {"full_attention": behind >= 0,
                "sliding_attention": (behind >= 0) & (behind < config.sliding_window)}
        zeros = torch.zeros((1, 1, 1, len(behind)), dtype=self.model.dtype, device=length.device)
        return {kind: zeros.masked_fill(~places, torch.finfo(zeros.dtype).min)
                for kind, places in seen.items()}

    @torch.no_grad()
    def step(self):
        """The logits; `token` is then the next one."""
        logits, token = self.next(self.token)
        self.token.copy_(token)
        return logits

    def rewind(self):
        self.token.copy_(self.first)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.prompt)

    def compiled(self):
        """`step` as one graph of the compiler, which on a GPU is a CUDA graph."""
        how = {"backend": "aot_eager"} if self.token.device.type == "cpu" else {
            "mode": "reduce-overhead"}
        twin = copy.copy(self)
        twin.next = torch.compile(self.next, fullgraph=True, dynamic=False, **how)

        def step():
            torch.compiler.cudagraph_mark_step_begin()
            return twin.step()

        return step

    def captured(self):
        """`step` as a CUDA graph; on the CPU, which has none, itself.
        Errors: RuntimeError where the step reads numbers on the host."""
        with HostReads() as seen:
            self.step()
        if seen.names:
            raise RuntimeError(f"{', '.join(sorted(seen.names))} waits for the GPU, so that no "
                               "graph can be captured")
        if self.token.device.type == "cpu":
            return self.step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.step()

        def replay():
            graph.replay()
            return logits

        return replay


class HostReads(TorchDispatchMode):
    """Which operations read numbers of the device, in `names`."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names |= {"aten::nonzero", "aten::_local_scalar_dense"} & {function.name()}
        return function(*args, **(kwargs or {}))
