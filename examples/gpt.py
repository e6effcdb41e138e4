"""A small GPT with mixture-of-experts blocks, for examples/train_gpt.py: once with cadre.MoE, once
with the same layer in plain torch. Both have parameters of the same names and shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional

import cadre

VOCABULARY = 256  # bytes
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """What a model is made of."""

    layers: int
    hidden: int
    experts: int
    top_k: int
    features: int
    context: int


def of_all_ranks(counts: Tensor) -> Tensor:
    """Their sums, where there are several."""
    if not distributed.is_initialized():
        return counts
    return all_reduce(counts, "sum", distributed.group.WORLD)


class CadreMoE(cadre.MoE):
    """(out [..., H], load-balancing loss of all ranks' choices) for x [..., H]."""

    def __init__(self, shape: Shape, device: torch.device,
                 ep: cadre.ExpertParallel | None = None) -> None:
        super().__init__(shape.experts, shape.hidden, shape.features, top_k=shape.top_k,
                         normalize=True, device=device, ep=ep)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, router = super().forward(x)
        counts = of_all_ranks(router.tokens_per_expert)
        return out, cadre.load_balancing_loss(router.scores, counts)


class TorchExperts(nn.Module):
    """w1 [E, 2F, H] and w2 [E, H, F]."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        experts, hidden, features = shape.experts, shape.hidden, shape.features
        self.w1 = nn.Parameter(torch.empty(experts, 2 * features, hidden, device=device))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, features, device=device))


class TorchMoE(nn.Module):
    """The same layer in torch: sort the choices by expert, multiply group by group, sort back."""

    def __init__(self, shape: Shape, device: torch.device, ep: None = None) -> None:
        super().__init__()
        self.top_k, self.num_experts = shape.top_k, shape.experts
        self.router = nn.Parameter(torch.empty(shape.experts, shape.hidden, device=device))
        self.experts = TorchExperts(shape, device)
        self.product = torch_product()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(tokens.float(), self.router).softmax(-1)
        prob, chosen = scores.topk(self.top_k)
        prob = prob / prob.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, chosen.flatten(), torch.ones_like(order))
        ends = counts.cumsum(0).to(torch.int32)

        rows = tokens.index_select(0, order // self.top_k)
        gate, up = self.product(rows, self.experts.w1, ends).chunk(2, -1)
        h = functional.silu(gate) * up * prob.flatten().index_select(0, order)[:, None].to(x.dtype)
        y = self.product(h, self.experts.w2, ends)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        out = y.index_select(0, back).view(-1, self.top_k, x.shape[-1]).sum(1)
        counts = of_all_ranks(counts)
        share = counts / counts.sum()
        balance = self.num_experts * (share * scores.mean(0)).sum()
        return out.view(x.shape), balance


def torch_product() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """rows [R, K], weight [E, N, K], ends int32 [E] -> [R, N]."""
    if hasattr(functional, "grouped_mm"):
        return lambda rows, weight, ends: functional.grouped_mm(
            rows, weight.to(rows.dtype).transpose(-2, -1), offs=ends)
    return _loop


def _loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = rows.tensor_split(ends[:-1].cpu())
    return torch.cat([part @ w.to(rows.dtype).t() for part, w in zip(parts, weight)])


MOES = {"cadre": CadreMoE, "torch": TorchMoE}


class Norm(nn.Module):
    """x / rms(x) * weight, in the type of x."""

    def __init__(self, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6).to(x.dtype)


class Block(nn.Module):
    """Causal attention, then experts, each beside a residual."""

    def __init__(self, shape: Shape, moe: nn.Module, device: torch.device) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = max(hidden // HEAD_WIDTH, 1)
        self.attention_norm = Norm(hidden, device)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, device=device)
        self.project = nn.Linear(hidden, hidden, bias=False, device=device)
        self.moe_norm = Norm(hidden, device)
        self.moe = moe

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, C, H] and the load-balancing loss."""
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2)).to(x.dtype)
        out, balance = self.moe(self.moe_norm(x))
        return x + out.to(x.dtype), balance


class GPT(nn.Module):
    """Predicts the next byte. Parameters are fp32; with dtype bf16 the products of `loss` run in
    bf16 under torch.autocast, and the residual is bf16."""

    def __init__(self, shape: Shape, implementation: str, dtype: torch.dtype, device: torch.device,
                 ep: cadre.ExpertParallel | None = None) -> None:
        super().__init__()
        self.dtype, self.device_type = dtype, device.type
        self.bytes = nn.Embedding(VOCABULARY, shape.hidden, device=device)
        self.places = nn.Embedding(shape.context, shape.hidden, device=device)
        moe = MOES[implementation]
        self.blocks = nn.ModuleList(Block(shape, moe(shape, device, ep), device)
                                    for _ in range(shape.layers))
        self.ep = ep
        self.norm = Norm(shape.hidden, device)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False, device=device)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Parameters that depend on names, shapes and the seed alone. Of experts that ranks share,
        each rank draws all and keeps its own."""
        generator = torch.Generator(self.head.weight.device).manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if "norm" in name:
                parameter.fill_(1)
            else:
                late = name.endswith(("project.weight", "w2"))  # what is added to the residual
                deviation = 0.02 / (2 * len(self.blocks)) ** 0.5 if late else 0.02
                shared = self.ep is not None and ".experts." in name
                ranks, rank = (self.ep.ranks, self.ep.rank) if shared else (1, 0)
                shape = ranks * parameter.shape[0], *parameter.shape[1:]
                drawn = parameter.new_empty(shape).normal_(0, deviation, generator=generator)
                parameter.copy_(drawn.tensor_split(ranks)[rank])

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy and mean load-balancing loss, fp32 scalars, of bytes int64 [B, C + 1]."""
        with torch.autocast(self.device_type, self.dtype, cache_enabled=False,
                            enabled=self.dtype != torch.float32):
            x = self.bytes(text[:, :-1]) + self.places.weight[:text.shape[1] - 1]
            x, balance = x.to(self.dtype), 0.0
            for block in self.blocks:
                x, of_block = block(x)
                balance = balance + of_block
            logits = self.head(self.norm(x))
        entropy = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        return entropy, balance / len(self.blocks)
