"""Experts of transformers models whose weights stay as codes and scales, as checkpoints have them.

A checkpoint of gpt-oss has 4-bit codes (mxfp4) of its experts, one of DeepSeek-V3 and others 8-bit
codes with one fp32 scale for 128 x 128 of them (fp8). `load` builds the model and gives its experts
these tensors; all else of the model has plain numbers, decoded where the file has codes.
"""

import json
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import fp8_experts
from .devices import default_device
from .dtypes import kind_of, require_float, working_dtype

_E8M0 = torch.float8_e8m0fnu
_BLOCK = 128  # rows and columns of an fp8 scale
_SINGLE = "model.safetensors"  # where one file has all tensors
_ops = torch.ops.cadre


class Kind(NamedTuple):
    """How a checkpoint stores weights of experts."""

    method: str  # as its config calls it
    recipe: str  # of the products that read them, of rows in bf16
    codes: torch.dtype
    codes_a_byte: int
    scales: torch.dtype
    scale_rows: int  # rows and columns of a scale
    scale_columns: int
    suffixes: tuple[str, str]  # of codes and scales, behind the name of the weight


KINDS = {
    "mxfp4": Kind("mxfp4", "mxfp4", torch.uint8, 2, torch.uint8, 1, 32, ("_blocks", "_scales")),
    "fp8": Kind("fp8", "bf16,fprop=fp8_block:fp32*fp8_block:2d+fp32", torch.float8_e4m3fn, 1,
                torch.float32, _BLOCK, _BLOCK, ("", "_scale_inv")),
}
# Of rows in other types, which mxfp4 would round to bf16.
_UNROUNDED = {torch.float32: "f32,fprop=f32*mxfp4", torch.float16: "f16,fprop=f16*mxfp4"}
# What its config may say beside, first what is meant where it says nothing.
_FP8_OPTIONS: dict[str, tuple[Any, ...]] = {
    "weight_block_size": ([_BLOCK, _BLOCK],), "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",), "scale_fmt": ("float", "ue8m0")}
# fp8 whose scales are powers of two, those of rows too, as DeepSeek-V3.1 has been trained.
_POWERS_OF_TWO = KINDS["fp8"]._replace(recipe="bf16,fprop=fp8_block*fp8_block:2d+fp32")


class Experts(NamedTuple):
    """What the operators read of a module."""

    kind: Kind
    first: str  # the names of both weights
    second: str
    apart: bool = False  # the files have a tensor for each expert

    def names(self) -> list[str]:
        """Of codes and scales, as parameters of the module."""
        return [name + suffix for name in (self.first, self.second)
                for suffix in self.kind.suffixes]

    def weight(self, module: nn.Module, name: str) -> list[Tensor]:
        """[E, N, K] as codes, and scales."""
        codes, scales = (getattr(module, name + suffix) for suffix in self.kind.suffixes)
        return [codes.flatten(2), scales.float() if scales.dtype == _E8M0 else scales]


def codes_of(module: nn.Module) -> Experts | None:
    """What a module has whose weights are codes: those of `load`, transformers' own FP8 experts."""
    if fp8_experts.are_these(module):
        first = first_weight_of(module)
        powers = getattr(module, first + "_scale_inv").dtype == _E8M0
        return Experts(_POWERS_OF_TWO if powers else KINDS["fp8"], first, "down_proj")
    return getattr(module, "_cadre_quantized", None)


def require_fit(module: nn.Module, own: Experts) -> None:
    """Errors: NotImplementedError for codes that no product here reads."""
    if fp8_experts.are_these(module):
        fp8_experts.require_fit(module, own.first, _BLOCK)


def first_weight_of(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def forward(module: nn.Module, own: Experts, rows: Tensor, offsets: Tensor, prob: Tensor,
            activation: str) -> Tensor:
    """What experts with quantised weights make of their rows [R, H], in expert order.

    Errors: NotImplementedError where a gradient is asked for.
    """
    parameters, recipe = _parameters(module, own, rows, prob)
    return _ops.grouped_mlp_quantized(rows, offsets, prob, *parameters,
                                      prob if module.has_bias else None, recipe=recipe,
                                      activation=activation)


def of_tokens(module: nn.Module, own: Experts, x: Tensor, chosen: Tensor, prob: Tensor,
              activation: str) -> Tensor:
    """The same of tokens [T, H], each with its choices [T, top_k]: their sums [T, H]."""
    parameters, recipe = _parameters(module, own, x, prob)
    return _ops.routed_experts_quantized(x, chosen, prob, *parameters, recipe=recipe,
                                         activation=activation)


def _parameters(module: nn.Module, own: Experts, x: Tensor, prob: Tensor
                ) -> tuple[list[list[Tensor]], str]:
    """Weights and biases, and the recipe that reads them."""
    require_fit(module, own)
    if torch.is_grad_enabled() and (x.requires_grad or prob.requires_grad):
        raise NotImplementedError(
            f"huggingface: {type(module).__name__} with weights in {own.kind.method} has no "
            "backward; run it under torch.no_grad(), or load the model without weight quantization")
    parts = [part for name in (own.first, own.second)
             for part in (own.weight(module, name),
                          [getattr(module, name + "_bias")] if module.has_bias else [])]
    return parts, recipe_of(own, working_dtype(x))


def recipe_of(own: Experts, rows: torch.dtype) -> str:
    """What reads the weights, for rows of that type."""
    recipe = own.kind.recipe
    return _UNROUNDED.get(rows, recipe) if recipe == "mxfp4" else recipe


def _blank(shape: tuple[int, int, int], kind: Kind, device: torch.device) -> list[nn.Parameter]:
    """Codes and scales of [E, N, K]; 4-bit codes as [E, N, K / 32, 16]."""
    experts, rows, columns = shape
    packed = [columns // kind.codes_a_byte]
    if kind.codes_a_byte > 1:
        packed = [columns // kind.scale_columns, kind.scale_columns // kind.codes_a_byte]
    blocks = [-(-rows // kind.scale_rows), -(-columns // kind.scale_columns)]
    return [nn.Parameter(torch.empty(experts, *size, dtype=dtype, device=device),
                         requires_grad=False)
            for size, dtype in (([rows, *packed], kind.codes), (blocks, kind.scales))]


def hold_codes(module: nn.Module, first: str, kind: Kind, dtype: torch.dtype,
               device: torch.device) -> None:
    """Puts codes and scales, still without numbers, in the place of the module's weights.

    Errors: ValueError where rows or columns are not whole blocks.
    """
    for name in (first, "down_proj"):
        experts, *shape = getattr(module, name).shape
        rows, columns = reversed(shape) if module.is_transposed else shape
        half = rows // 2 if name != "down_proj" and module.has_gate else rows
        if columns % kind.scale_columns or half % kind.scale_rows:
            raise ValueError(f"load_quantized: {name} of {type(module).__name__} is [{half}, "
                             f"{columns}] for an expert, must be whole blocks of "
                             f"{kind.scale_rows} x {kind.scale_columns}")
        delattr(module, name)
        for suffix, blank in zip(kind.suffixes,
                                 _blank((experts, rows, columns), kind, device)):
            module.register_parameter(name + suffix, blank)
        if module.has_bias:
            bias = torch.empty(experts, rows, dtype=dtype, device=device)
            module.register_parameter(name + "_bias", nn.Parameter(bias, requires_grad=False))
    module._cadre_quantized = Experts(kind, first, "down_proj")
    module._apply = _KeepsCodes(module)  # type: ignore[method-assign]


class _KeepsCodes:
    """`to` and the like, of a module with codes: they and their scales move, and stay what they
    are. Copies and pickles of it are of the copies of the module, which does not own itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _KeepsCodes, (self.module(),)

    def __call__(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module: Any = self.module()
        own = [getattr(module, name) for name in module._cadre_quantized.names()]

        def change_others(tensor: Tensor) -> Tensor:
            changed = change(tensor)
            if changed.dtype == tensor.dtype or not any(tensor is each for each in own):
                return changed
            return tensor.to(changed.device)

        return type(module)._apply(module, change_others, recurse)


def has_codes(model: nn.Module) -> bool:
    """Whether `load` made it."""
    return any(hasattr(module, "_cadre_quantized") for module in model.modules())


def why_bound(model: nn.Module) -> str:
    """Why its experts run no other code; empty where they may."""
    return "the experts' weights are codes, which nobody else reads" if has_codes(model) else ""


def released(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state of the model under the names that its files had."""
    named: dict[str, Any] = {}
    modules = dict(model.named_modules())
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        own = getattr(modules.get(path), "_cadre_quantized", None)
        apart = own is not None and own.apart and last in own.names()
        named.update(_of_each(name, tensor) if apart else [(name, tensor)])
    return named


def _of_each(name: str, experts: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parts of a tensor [E, ...] by the names that files with a tensor for each expert have:
    gate and up are one above the other."""
    path, _, last = name.rpartition(".")
    weight = last.removesuffix("_scale_inv")
    parts = ("gate_proj", "up_proj") if weight == "gate_up_proj" else (weight,)
    for e, of_expert in enumerate(experts):
        for part, place in zip(parts, of_expert.chunk(len(parts))):
            yield f"{path}.{e}.{part}.weight{last[len(weight):]}", place


def _index_of(folder: Path) -> dict[str, str]:
    """The file of each tensor; nothing where one file has all, beside which transformers leaves the
    index of an earlier model. Errors: ValueError."""
    index = folder / "model.safetensors.index.json"
    if (folder / _SINGLE).exists() or not index.exists():
        return {}
    try:
        file_of = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"load_quantized: {index} has no weight_map, must have one") from error
    return {tensor: str(file) for tensor, file in file_of.items()}


class Files:
    """The tensors of a folder of safetensors files, by name; read when they are asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open
        file_of = _index_of(folder)
        self._files: dict[str, Any] = {}
        for name in sorted(set(file_of.values())) or [_SINGLE]:
            if not (folder / name).exists():
                raise ValueError(f"load_quantized: {folder} has no {name}, must have {_SINGLE} or "
                                 "all files of its index")
            try:
                file = stack.enter_context(safe_open(folder / name, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"load_quantized: {folder / name} can't be read ({error}), must "
                                 "be a whole file of safetensors") from error
            self._files |= {key: file for key in file.keys() if file_of.get(key, name) == name}
        self.unread: set[str] = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str) -> Tensor:
        """Errors: ValueError where no file has it."""
        if name not in self._files:
            raise ValueError(f"load_quantized: {name} is in none of the files, must be in one")
        self.unread.discard(name)
        return self._files[name].get_tensor(name)

    def numbers(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor outside of experts: what codes stand for, or the tensor itself."""
        found = self.take(name)
        if found.dtype != torch.float8_e4m3fn:
            return found
        if found.dim() != 2:
            raise ValueError(f"load_quantized: {name} has shape {list(found.shape)}, must have 2 "
                             "dimensions, as its codes have scales of square blocks")
        scales = found.new_empty([-(-size // _BLOCK) for size in found.shape], dtype=torch.float32)
        _fill(name + "_scale_inv", scales, self.take(name + "_scale_inv"))
        return _ops.dequantize(found.unsqueeze(0), scales.unsqueeze(0), scales.new_empty(0), None,
                               "fp8_block:2d+fp32", "along_k", [1, *found.shape],
                               dtype).squeeze(0)

    def of_experts(self, name: str, target: Tensor) -> None:
        """Fills a tensor [E, ...] of the experts' module of that name, from one tensor or from
        those of each expert: gate and up, one above the other."""
        if name in self or not re.search(r"_proj(_scale_inv|)$", name):
            return _fill(name, target, self.take(name))
        for full, place in _of_each(name, target):
            _fill(full, place, self.take(full))


def _fill(name: str, target: Tensor, source: Tensor) -> None:
    if target.shape != source.shape:
        raise ValueError(f"load_quantized: {name} has shape {list(source.shape)}, must be "
                         f"{list(target.shape)}")
    if source.dtype == _E8M0 and target.dtype == torch.float32:
        source = source.float()
    is_codes = target.dtype.itemsize == 1
    as_bytes = is_codes and source.dtype == torch.uint8  # as scales of e8m0 are stored
    are_numbers = all(t.is_floating_point() and t.dtype.itemsize > 1 for t in (source, target))
    if not (are_numbers or as_bytes or source.dtype == target.dtype):
        raise ValueError(f"load_quantized: {name} is {source.dtype}, must be {target.dtype}")
    target.copy_(source.view(target.dtype) if as_bytes else source)


@contextmanager
def _built_on_meta(kinds: set[type[nn.Module]]) -> Iterator[None]:
    """Modules of these classes are built without memory."""
    own = {kind: kind.__init__ for kind in kinds}

    def without_memory(build: Any) -> Any:
        def init(self: nn.Module, *args: Any, **named: Any) -> None:
            with torch.device("meta"):
                build(self, *args, **named)
        return init

    try:
        for kind, build in own.items():
            kind.__init__ = without_memory(build)  # type: ignore[misc]
        yield
    finally:
        for kind, build in own.items():
            kind.__init__ = build  # type: ignore[misc]


def _take_about(config: Any) -> dict[str, Any]:
    """How the checkpoint is quantised, which its config says no longer then: models are built from
    it."""
    about = vars(config).pop("quantization_config", None)
    return about if isinstance(about, dict) else getattr(about, "to_dict", dict)()


def _about_saved(model: nn.Module, about: dict[str, Any]) -> dict[str, Any]:
    """What of it holds of the model, so of files that it is saved in: only experts have codes."""
    if about["quant_method"] != "fp8":
        return about
    plain = [name for name, module in model.named_modules()
             if isinstance(module, (nn.Linear, nn.Embedding))]
    beside = about.get("modules_to_not_convert") or []
    return about | {"modules_to_not_convert": list(dict.fromkeys([*beside, *plain]))}


def _kind_of(about: dict[str, Any], folder: Path) -> Kind:
    method = about.get("quant_method")
    if method not in KINDS:
        raise ValueError(f"load_quantized: quant_method of {folder} is {method!r}, must be one of "
                         f"{', '.join(KINDS)}")
    if method != "fp8":
        return KINDS[method]
    for name, allowed in _FP8_OPTIONS.items():
        given = about.get(name, allowed[0])
        if given is None and name != "weight_block_size":
            continue
        if (list(given) if isinstance(given, tuple) else given) not in allowed:
            raise ValueError(f"load_quantized: {name} of {folder} is {given!r}, must be "
                             f"{' or '.join(map(str, allowed))}")
    return _POWERS_OF_TWO if about.get("scale_fmt") == "ue8m0" else KINDS[method]


def load(folder: str | Path, dtype: torch.dtype, device: torch.device | str | None,
         experts_of: Any, name: str) -> nn.Module:
    """See huggingface.load_quantized. experts_of(model): its experts modules by name."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights
    require_float("dtype", dtype)
    if not isinstance(folder, (str, Path)):
        raise TypeError(f"load_quantized: folder is {kind_of(folder)}, must be a path")
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise ValueError(f"load_quantized: {folder} has no config.json, must be the folder of a "
                         "checkpoint")
    config = AutoConfig.from_pretrained(folder)
    about = _take_about(config)
    kind = _kind_of(about, folder)
    place = default_device() if device is None else torch.device(device)

    def build() -> nn.Module:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=name)

    with torch.device("meta"):
        classes = {type(module) for module in experts_of(build()).values()}
    if not classes:
        raise ValueError(f"load_quantized: {type(config).__name__} has no experts modules that "
                         "transformers dispatches, must have some")
    with torch.device(place), no_init_weights(), _built_on_meta(classes):
        model = build()
    experts = experts_of(model)
    for module in experts.values():
        hold_codes(module, first_weight_of(module), kind, dtype, place)
    with ExitStack() as stack, torch.no_grad():
        _keep_in_fp32(model, dtype)
        files = Files(folder, stack)
        _read(model, files, set(experts))
        for path, module in experts.items():
            own = module._cadre_quantized
            module._cadre_quantized = own._replace(apart=f"{path}.{own.names()[0]}" not in files)
    model.tie_weights()
    model.config.quantization_config = _about_saved(model, about)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """What transformers keeps in fp32 whatever the model's type is, such as the bias of a router's
    scores; more of it where that is fp16."""
    keep = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(re.search(rf"(^|\.){module}($|\.)", name) for module in keep):
            tensor.data = tensor.data.float()


def _read(model: nn.Module, files: Files, experts: set[str]) -> None:
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    tied = tied if model.config.tie_word_embeddings else set()
    for name, target in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[0] in experts:
            files.of_experts(name, target)
        elif name not in tied or name in files:
            _fill(name, target, files.numbers(name, target.dtype))
    layers = model.config.num_hidden_layers
    for name in sorted(files.unread):  # layers that predict further tokens are no part of the model
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if not layer or int(layer[1]) < layers:
            raise ValueError(f"load_quantized: {name} of the files belongs to nothing in "
                             f"{type(model).__name__}, must be a tensor of it")
