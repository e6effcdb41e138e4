"""transformers' expert parallelism, `DistributedConfig(enable_expert_parallel=True)`, on Cadre.

Its plans name a style for the router, which masks the choices of other ranks' experts, and one for
the experts, which adds up the results of all ranks. Models that are made with the implementation
"cadre" get the styles here: choices stay as they are, and rows travel to their experts' ranks.
"""

import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed import tensor_parallel

from .expert_parallel import ExpertParallel
from .expert_ranks import Sharing, sharing_of, top_k_of

_STYLES = {"ep_router": "cadre_ep_router", "moe_tp_experts": "cadre_ep_experts"}


def move_rows(model: nn.Module) -> None:
    """Has the model's plan of expert parallelism move rows. It is called when a model is made, and
    when it is switched to Cadre, where transformers may have spread it already."""
    named = getattr(model, "_ep_plan", None) or {}
    if not set(_STYLES) <= set(named.values()):
        return
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        model._ep_plan = _renamed(named)
    elif model.config.distributed_config.enable_expert_parallel:
        hooked = {module: style for name, module in model.named_modules()
                  if (style := named.get(re.sub(r"[.]\d+(?=[.]|$)", ".*", name))) in _STYLES}
        if all(_is_hooked(module) for module in hooked):
            model._ep_plan = _renamed(named)
            for module, style in hooked.items():
                del module.forward  # that of its class is seen again
                _HERE[_STYLES[style]].install_forward(module, mesh["tp"] if mesh.ndim > 1 else mesh)


def _renamed(named: dict[str, str]) -> dict[str, str]:
    return {part: _STYLES.get(style, style) for part, style in named.items()}


def _is_hooked(module: nn.Module) -> bool:
    """By transformers alone."""
    return getattr(module.__dict__.get("forward"), "__name__", "") == "tp_forward"


class _Router(tensor_parallel.TensorParallelLayer):
    """Leaves choices and their weights as they are, of all experts."""


class _ExpertsStyle(tensor_parallel.MoeExpertsParallel):
    """Cadre's experts move rows; others have choices masked here, and results added up."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
        if hasattr(module, "is_concatenated"):
            ep = ExpertParallel(mesh, module.num_experts, top_k_of(module, None), rows="exact")
            module._cadre_sharing = Sharing(ep, "same")
        return super().install_forward(module, mesh, **options)

    def transform_inputs_pre_forward(self, module: nn.Module, args: Any, kwargs: Any,
                                     mesh: DeviceMesh, **options: Any) -> Any:
        if _runs_cadre(module):
            args = tuple(a.to_local() if isinstance(a, DTensor) else a for a in args)
            return args, kwargs
        x, chosen, prob, *rest = args
        router = nn.Module()
        router.num_experts = module.num_experts * mesh.size()
        _, prob, chosen = tensor_parallel.EpRouterParallel().transform_output_post_forward(
            router, (None, prob, chosen), mesh)
        return super().transform_inputs_pre_forward(module, (x, chosen, prob, *rest), kwargs, mesh,
                                                    **options)

    def transform_output_post_forward(self, module: nn.Module, output: Any, mesh: DeviceMesh,
                                      **options: Any) -> Any:
        if _runs_cadre(module):
            return output
        return super().transform_output_post_forward(module, output, mesh, **options)


def _runs_cadre(module: nn.Module) -> bool:
    return sharing_of(module) is not None and module.config._experts_implementation == "cadre"


_HERE = {"cadre_ep_router": _Router(), "cadre_ep_experts": _ExpertsStyle()}
for _name, _style in _HERE.items():
    tensor_parallel.ALL_PARALLEL_STYLES.register(_name, _style)
