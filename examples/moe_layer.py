"""A mixture-of-experts layer out of Cadre's operations, trained for some steps:

    python examples/moe_layer.py [--device cuda] [--dtype bf16]

cadre.MoE is this layer, and more. Counts never reach the host, so all of it may be captured in a
CUDA graph or compiled.
"""

import argparse

import torch
from torch import Tensor, nn

import cadre


class MoELayer(nn.Module):
    """out[t] = sum over the top_k experts e of token t of prob[t, e] * MLP_e(x[t])."""

    def __init__(self, experts: int, hidden: int, features: int, top_k: int, **options) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Linear(hidden, experts, bias=False, device=options.get("device"))
        self.up = cadre.GroupedLinear(experts, hidden, 2 * features, bias=False, **options)
        self.down = cadre.GroupedLinear(experts, features, hidden, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] for x [T, H]."""
        chosen = cadre.routing(self.router(x.float()), self.top_k, normalize=True)
        where = cadre.offsets_of_routing(chosen.experts, self.experts, x.shape[0] * self.top_k)
        rows, prob = cadre.permute(x, where, prob=chosen.prob)  # [T * top_k, H], expert by expert
        h = cadre.activation(self.up(rows, where), where, prob, "swiglu")
        return cadre.combine(self.down(h, where), where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]

    torch.manual_seed(0)
    layer = MoELayer(8, 64, 96, top_k=2, params_dtype=dtype, device=options.device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = torch.randn(512, 64, device=options.device).to(dtype)
    target = torch.tanh(x.float() @ torch.randn(64, 64, device=options.device) / 8)
    for step in range(options.steps):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, options.steps // 2, options.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
