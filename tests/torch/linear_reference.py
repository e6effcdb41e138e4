"""Linear layers of experts in plain torch and fp64, to compare with."""

import torch
from conftest import slices_of

import cadre


def linear(x, weight, bias, counts, bias_scale=None):
    """y [R, N] in fp64 with a graph; zero in the tail."""
    y = torch.zeros(x.shape[0], weight[0].shape[0], dtype=torch.float64, device=x.device)
    parts = []
    for e, rows in enumerate(slices_of(counts)):
        part = x[rows].double() @ weight[e].double().t()
        if bias is not None:
            scale = 1 if bias_scale is None else bias_scale[rows, None].double()
            part = part + bias[e].double() * scale
        parts.append(part)
    return torch.cat([*parts, y[sum(counts):]])


def experts_of(module: cadre.GroupedLinear, stem: str) -> list[torch.Tensor]:
    """The parameters of every expert, packed or discrete."""
    packed = module._parameters.get(stem)
    if packed is not None:
        return list(packed.unbind())
    return [module._parameters[f"{stem}{e}"] for e in range(module.num_gemms)]


def gradients(module: cadre.GroupedLinear, stem: str) -> torch.Tensor:
    """[E, ...]: .grad of every expert."""
    packed = module._parameters.get(stem)
    if packed is not None:
        return packed.grad
    return torch.stack([module._parameters[f"{stem}{e}"].grad for e in range(module.num_gemms)])


def module(device, experts=5, k=24, n=40, *, packed=True, dtype=torch.float32, **options):
    """A layer with biases that are not zero; the numbers do not depend on the layout."""
    made = cadre.GroupedLinear(experts, k, n, params_dtype=dtype, device=device,
                               single_grouped_weight=packed, single_grouped_bias=packed, **options)
    fill(made)
    return made


@torch.no_grad()
def fill(module: cadre.GroupedLinear) -> None:
    generator = torch.Generator().manual_seed(3)
    for stem in ("weight", "bias") if module.use_bias else ("weight",):
        for parameter in experts_of(module, stem):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)


def kept_bytes(call) -> int:
    """What `call()` keeps for backward as raw bytes: copies in a recipe's format, and the like."""
    sizes = []

    def pack(t):
        sizes.append(t.numel() if t.dtype == torch.uint8 else 0)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return sum(sizes)
