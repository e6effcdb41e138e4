"""Parameters of E experts in checkpoints: packed, one tensor `weight` [E, ...], or discrete,
`weight0` .. `weight{E-1}`."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .dtypes import kind_of
from .local_weights import placed_as, whole

_EXTRA_STATE = re.compile(r"_extra_state\d*")


class EmptyExtraState(nn.Module):
    """A module with an entry `_extra_state` in its state, as TransformerEngine's have one: an empty
    tensor, which says that nothing outlives a call. What a checkpoint has there is passed over, and
    may be missing, since scales come from the data here."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        pass

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in list(state_dict):
            if key.startswith(prefix) and _EXTRA_STATE.fullmatch(key[len(prefix):]):
                del state_dict[key]  # numbered, too: one for each expert in distributed checkpoints
        state_dict[f"{prefix}_extra_state"] = None
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Report:
    """What `Module._load_from_state_dict` collects."""

    def __init__(self, missing: list[str], errors: list[str]) -> None:
        self.missing = missing
        self.errors = errors

    def wrong_shape(self, key: str, got: Any, want: Sequence[int]) -> None:
        found = list(got.shape) if isinstance(got, Tensor) else f"that of {kind_of(got)}"
        self.errors.append(f"size mismatch for {key}: shape is {found} in the checkpoint, must be "
                           f"{list(want)}")


def relayout(state_dict: dict[str, Any], stem: str, own: Tensor, experts: int,
             report: Report) -> None:
    """Brings the entries under `stem` into this layer's layout.

    own: the packed parameter [E, ...], or the first of E discrete ones [...].
    Experts that are missing or have another shape are reported, and keep what they have; surplus
    entries stay, for `load_state_dict` to name.
    """
    names = [f"{stem}{e}" for e in range(experts)]
    packed = own.dim() == _packed_dims(stem)
    value = state_dict.get(stem)
    if isinstance(value, Tensor):
        if value.dim() == _packed_dims(stem) + 1 and value.shape[1] == 1:
            value = state_dict[stem] = value.squeeze(1)  # a bias [E, 1, N]
        if not packed:
            _unpack(state_dict, stem, names, own, report)
    elif value is None and packed and any(name in state_dict for name in names):
        _pack(state_dict, stem, names, own, report)
    for name in [stem] if packed else names:
        entry = state_dict.get(name)
        other = isinstance(entry, DTensor) != isinstance(own, DTensor)
        if isinstance(entry, Tensor) and other and entry.shape == own.shape:
            state_dict[name] = placed_as(own, whole(entry))


def _packed_dims(stem: str) -> int:
    return 3 if stem.endswith("weight") else 2


def _unpack(state_dict: dict[str, Any], stem: str, names: list[str], own: Tensor,
            report: Report) -> None:
    value = state_dict[stem]
    if tuple(value.shape) != (len(names), *own.shape):
        report.wrong_shape(stem, value, (len(names), *own.shape))
        del state_dict[stem]
        return
    if any(name in state_dict for name in names):
        return  # both layouts: the packed one is surplus
    del state_dict[stem]
    state_dict.update(zip(names, whole(value)))


def _pack(state_dict: dict[str, Any], stem: str, names: list[str], own: Tensor,
          report: Report) -> None:
    """An expert that is missing in a layer on "meta", which has no numbers to keep, is NaN."""
    experts: list[Tensor | None] = []
    for name in names:
        value = state_dict.pop(name, None)
        if value is None:
            report.missing.append(name)
        elif not isinstance(value, Tensor) or value.shape != own.shape[1:]:
            report.wrong_shape(name, value, own.shape[1:])
            value = None
        experts.append(None if value is None else whole(value))
    loaded = [expert for expert in experts if expert is not None]
    if not loaded:
        state_dict[stem] = own.detach()
        return
    device = loaded[0].device
    if len(loaded) < len(names):
        mine = (torch.full(own.shape, math.nan, dtype=own.dtype, device=device) if own.is_meta
                else whole(own.detach()))
        loaded = [old if new is None else new for old, new in zip(mine, experts)]
    state_dict[stem] = torch.stack([expert.to(device) for expert in loaded])
