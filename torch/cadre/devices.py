"""Where new parameters go that nobody gave a device."""

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def default_device(*, real: bool = False) -> torch.device:
    """The device of the innermost `with torch.device(...)` or of `torch.set_default_device`, else
    CUDA if there is one, else the CPU. real: "meta", which has no memory, does not count."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            chosen = torch.device(mode.device)
            if not (real and chosen.type == "meta"):
                return chosen
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
