"""Small models of Megatron-Core with its experts and with Cadre's, on a GPU where there is one,
else on the CPU, with what Megatron asks of CUDA replaced."""

from contextlib import nullcontext

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker, model_parallel_cuda_manual_seed)
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed
from torch.nn import functional

from cadre.megatron import with_cadre

VOCABULARY, LENGTH, E = 64, 16, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """Megatron's groups of one process, nothing compiled, and a CPU where it wants a GPU."""
    patch = pytest.MonkeyPatch()
    backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if DEVICE == "cpu":
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(CudaRNGStatesTracker, "fork", lambda self, name=None: nullcontext())
    else:
        model_parallel_cuda_manual_seed(1)
    with torch.compiler.set_stance("force_eager"):
        yield
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    patch.undo()


def seed(number):
    """Of all generators that draw weights: on a GPU Megatron has some of its own."""
    torch.manual_seed(number)
    if DEVICE == "cuda":
        model_parallel_cuda_manual_seed(number)


def config_of(dtype=torch.bfloat16, **options):
    usual = dict(
        num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48,
        moe_ffn_hidden_size=48, num_moe_experts=E, moe_router_topk=2,
        moe_token_dispatcher_type="allgather", moe_router_load_balancing_type="none",
        gated_linear_unit=True, activation_func=functional.silu, add_bias_linear=False,
        use_cpu_initialization=DEVICE == "cpu", bf16=dtype == torch.bfloat16, params_dtype=dtype,
        hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False)
    return TransformerConfig(**usual | options)


def local_spec():
    return get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)


def model_of(config, spec):
    seed(1)
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY,
                     max_sequence_length=LENGTH, position_embedding_type="learned_absolute")
    return model.to(DEVICE, config.params_dtype)


def both(**options):
    """A model with Megatron's experts and one with Cadre's, with the same numbers."""
    config = config_of(**options)
    theirs, ours = model_of(config, local_spec()), model_of(config, with_cadre(local_spec()))
    copied = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert all(".experts." in name for name in copied.missing_keys + copied.unexpected_keys)
    copy_experts(theirs, ours)
    return theirs, ours


@torch.no_grad()
def copy_experts(theirs, ours):
    for a, b in zip(theirs.decoder.layers, ours.decoder.layers):
        for e, expert in enumerate(a.mlp.experts.local_experts):
            for name, parameter in expert.named_parameters():
                linear, kind = name.split(".")
                getattr(getattr(b.mlp.experts, linear), f"{kind}{e}").copy_(parameter)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    tokens[:, 1::2] = tokens[:, :-1:2]  # something to learn
    return tokens


def loss_of(model, step=0):
    tokens = batch(step).to(DEVICE)
    position = torch.arange(LENGTH, device=DEVICE).expand(4, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, device=DEVICE).tril() < 0.5
    return model(tokens[:, :-1], position, mask, labels=tokens[:, 1:]).float().mean()


def train(model, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def saved(model, folder):
    folder.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))
    return str(folder)


def load(model, folder):
    state = dist_checkpointing.load(model.sharded_state_dict(), folder)
    return model.load_state_dict(state)


def assert_same_experts(a, b):
    """Of two models with Cadre's experts, bit for bit."""
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def check_training(steps, tmp_path):
    theirs, ours = both()
    assert isinstance(theirs.decoder.layers[0].mlp.experts, SequentialMLP)
    want, got = train(theirs, steps), train(ours, steps)
    assert want[-1] < want[0] - 0.02 * steps ** 0.5
    # A loss is a mean over 64 tokens; each step rounds weights to bf16 on both sides.
    assert (got - want).abs().max() <= 2.0**-8 * want.max(), (got, want)

    fresh = model_of(config_of(), with_cadre(local_spec()))
    load(fresh, saved(ours, tmp_path / "ours"))  # its own
    assert_same_experts(fresh, ours)
    load(fresh, saved(theirs, tmp_path / "theirs"))  # that of Megatron's experts
    copy_experts(theirs, ours)
    for (name, p), (_, q) in zip(fresh.named_parameters(), ours.named_parameters()):
        if ".experts." in name:
            assert torch.equal(p, q), name
    other = model_of(config_of(), local_spec())
    load(other, str(tmp_path / "ours"))  # and Megatron's load ours
    load(fresh, str(tmp_path / "ours"))
    assert (train(other, 2, steps) - train(fresh, 2, steps)).abs().max() <= 2.0**-8 * want.max()
