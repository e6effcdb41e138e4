"""Weight gradients that backward leaves for later."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import forward_ad


class Memory:
    """What a linear remembers between its calls: gradients left for later, copies of weights.
    Copies and pickles of it are new and empty."""

    def __init__(self) -> None:
        self.own: Any = torch.classes.cadre.LinearMemory()
        self.handle: Any = self.own.handle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, ()


class DeferredGradients(nn.Module):
    """A module that leaves the gradients of its weights to `backward_dw` if delay_wgrad_compute."""

    delay_wgrad_compute: bool = False
    fuse_wgrad_accumulation: bool

    def __init__(self) -> None:
        super().__init__()
        self._wgrad_hooks: list[Callable[[], Any]] = []

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Marks what is attached later, too: trainers look for the mark where they install
        hooks."""
        super().register_parameter(name, param)
        self._mark(name, param)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
               ) -> "DeferredGradients":
        """`to`, `to_empty` and the like, which may put other parameters in the place of these."""
        super()._apply(fn, recurse)
        self._mark_all()
        return self

    def __setstate__(self, state: Any) -> None:
        """Of a copy, whose parameters come without what was said of them."""
        super().__setstate__(state)
        self._mark_all()

    def _mark_all(self) -> None:
        for name, param in self._parameters.items():
            self._mark(name, param)

    def _mark(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and self.delay_wgrad_compute and self._is_marked(name):
            param.skip_backward_post_hook = True

    def _is_marked(self, name: str) -> bool:
        """Whether a parameter gets its gradient from `backward_dw`, as trainers are told."""
        return name in ("w1", "w2")

    def _memories(self) -> Sequence[Memory]:
        """Of its linears, the last first."""
        raise NotImplementedError

    def _defers_grad(self) -> bool:
        """Whether `.grad` is what comes later. With main_grad autograd has a stand-in for it, and
        whoever reduces gradients knows."""
        return (self.delay_wgrad_compute and not self.fuse_wgrad_accumulation
                and torch.is_grad_enabled())

    def _require_own_gradients(self, weights: Sequence[Tensor], names: Sequence[str]) -> None:
        """Errors: ValueError for weights whose gradients others take from autograd, which does not
        see those of `backward_dw`."""
        for weight, name in zip(weights, names, strict=True):
            if (type(weight) is nn.Parameter and weight._backward_hooks is None
                    and weight._post_accumulate_grad_hooks is None or not weight.requires_grad):
                continue
            if not weight.is_leaf and forward_ad._current_level < 0:
                raise ValueError(f"{name} is computed from other tensors, must be a leaf with "
                                 f"delay_wgrad_compute, {_WHY}")
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                raise ValueError(f"{name} has hooks, must have none with delay_wgrad_compute, "
                                 f"{_WHY}; register_wgrad_accumulation_and_reduce_hooks takes some")
        if distributed.is_available() and distributed.is_initialized():
            self._require_nobody_reduces({w: n for w, n in zip(weights, names) if w.requires_grad})

    def _require_nobody_reduces(self, own: dict[Tensor, str]) -> None:
        """Looks again only where what it looked at is another."""
        around = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if around is not None and not (around.require_backward_grad_sync
                                       and around.process_group.size() > 1):
            around = None
        seen = id(around), len(_sharding_states()), tuple(own.values())
        if vars(self).get("_reduced_by_none_of") == seen:
            return
        for name in _sharded_parameters(self):
            if name in own.values():
                raise ValueError(f"{name} is sharded by fully_shard, must be whole with "
                                 "delay_wgrad_compute; FSDP2 reduces gradients while backward "
                                 "runs, and these come later")
        for path, parameter in around.module.named_parameters() if around is not None else ():
            if parameter in own and path not in around.parameters_to_ignore:
                raise ValueError(
                    f"{own[parameter]} is averaged by DistributedDataParallel while backward "
                    "runs, must be left alone with delay_wgrad_compute, since its gradient "
                    "comes later; name it in _set_params_and_buffers_to_ignore_for_model, or "
                    "call the model in no_sync(), and average it after backward_dw")
        vars(self)["_reduced_by_none_of"] = seen

    def need_backward_dw(self) -> bool:
        """True if weight gradients are left to `backward_dw`."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the oldest weight gradient that backward left, once for each forward and
        backward: into main_grad, or added to .grad. Then the registered hooks run. Nothing happens
        where nothing is pending. Biases have had their gradients since backward.

        It works on the current stream, which has to wait for that of backward if it is another; and
        who uses the gradients waits for it.

        Errors: RuntimeError if a weight, or what else the gradient is computed from, was changed
        since backward, or a weight was replaced and is gone.
        """
        owing = [memory.own for memory in self._memories() if memory.own.pending()]
        for linear in owing:
            linear.run_next()
        if owing:
            self._trigger_wgrad_accumulation_and_reduce_hooks()

    def discard_wgrad(self) -> None:
        """Drops all weight gradients that are pending, say after an error in a step."""
        for memory in self._memories():
            memory.own.discard()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs after every `backward_dw` that computed something, in the order of
        registration."""
        self._wgrad_hooks.append(hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self._wgrad_hooks:
            hook()


_WHY = "which writes .grad where autograd does not see it"


def _sharding_states() -> Mapping[Any, Any]:
    """What torch knows of modules that FSDP2 shards."""
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return {}
    return _module_state_mapping


def _sharded_parameters(module: nn.Module) -> Iterator[str]:
    """Names of parameters of the module that FSDP2 has, which are plain tensors while it runs."""
    for state in {reference() for reference in _sharding_states().values()}:
        group = getattr(state, "_fsdp_param_group", None)
        for parameter in group.fsdp_params if group is not None else ():
            if parameter._module_info.module is module:
                yield parameter._module_info.param_name
