"""Attention for transformers that decodes without copies of keys and values. With a mask, as a
cache of fixed size has, transformers' "sdpa" repeats both for each query head that shares them,
which moves many times what is read. Here the query heads that share a head of keys are the rows of
one product. All but steps of one token is sdpa's.

    grouped_attention.use()
    AutoModelForCausalLM.from_pretrained(..., attn_implementation="grouped")
"""
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "grouped"


def use():
    """Makes it known to transformers."""
    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **others):
    """query [B, heads, tokens, D]; key and value [B, heads that are shared, places, D]; mask
    [B or 1, 1, tokens, places], True where it is seen. Returns [B, tokens, heads, D]."""
    batch, heads, tokens, width = query.shape
    shared = key.shape[1]
    if tokens != 1 or heads == shared or dropout:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout,
                                      scaling=scaling, **others)
    rows = query.reshape(batch, shared, heads // shared, width)
    scores = torch.matmul(rows, key.transpose(2, 3)).float() * (
        width ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    seen = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    return seen.reshape(batch, 1, heads, width), None
