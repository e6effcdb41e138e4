"""The product of tokens and router that makes the logits of a mixture of experts."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from .dtypes import FLOATS
from .fakes import register_fake


def router_logits(x: Tensor, weight: Tensor, in_fp32: bool = False) -> Tensor:
    """logits fp32 [T, E] = x weight^T, whatever torch.autocast says.

    x: [T, H]. weight: [E, H]. Where x is bf16 and not in_fp32, the grouped GEMM of one expert
    multiplies in bf16 and sums in fp32, so that the logits of a token do not depend on the others.
    The 24 bits of an fp32 weight are those of three bf16 numbers, so that the products are exact:

        |logits - exact| <= (H + 3) 2^-23 sum_h |x[t, h] weight[e, h]|

    for weights, and products, of 2^-100 or more. An fp32 weight that rounds to no finite bf16
    number (of 3.3961e38 or more) makes logits that are NaN. Backward then rounds the weight and
    dlogits to bf16, once. Else torch multiplies in fp32.
    """
    return tokens_and_logits(x, weight, in_fp32)[1]


def tokens_and_logits(x: Tensor, weight: Tensor, in_fp32: bool = False) -> tuple[Tensor, Tensor]:
    """x, for its other readers, and its `router_logits`.

    Where the grouped GEMM makes these, backward adds the gradient of x that the readers make to the
    product dlogits weight in fp32, and rounds the sum once. Else x has two gradients, which
    autograd adds.
    """
    if x.dtype == torch.bfloat16 and weight.dtype in FLOATS and not in_fp32:
        tokens, logits = torch.ops.cadre._router(x, weight)
        return tokens, logits
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return x, functional.linear(x.float(), weight.float())


@register_fake("_router_logits")
def _fake(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@register_fake("_router_logits_backward")
def _fake(dlogits, x, weight, other_dx, wants):
    return tuple(t.new_empty(tuple(t.shape) if wanted else (0,))
                 for t, wanted in zip((x, weight), wants))
