"""Maps between the names and layouts that checkpoints give to the experts of a model.

    packed = checkpoints.convert(load_file("mixtral.safetensors"), "mixtral", "transformers")
    model.load_state_dict(packed)
    back = checkpoints.convert(model.state_dict(), "transformers", "mixtral")

`LAYOUTS` is the table of all layouts. E experts, H hidden width, F feed-forward width of an expert;
gate comes before up.
"""

import functools
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .dtypes import kind_of, require_sizes

__all__ = ["LAYOUTS", "Layout", "convert", "deinterleave", "interleave"]


@dataclass(frozen=True, eq=False)
class Layout:
    """How a kind of checkpoint stores the experts of a layer.

    parts: the name below the layer of gate, up [F, H], gate_up [2F, H], down [H, F] or, of a single
        linear, weight [N, K]. With {} for the number of the expert there is a tensor per expert;
        without, one with all of them, [E, ...].
    biases: the same for biases [F], [2F], [H], [N], which a layer may have or not.
    interleave: of gate_up: 0 is [gate | up], else they alternate in blocks of so many.
    extra: the name of the extra state of the module that has the weights, in TransformerEngine's.
    transposed: weights are stored [H, 2F] and [F, H].
    block: what the module around the experts is called here, where others call it mlp.
    """

    name: str
    about: str
    parts: Mapping[str, str]
    biases: Mapping[str, str]
    extra: Mapping[str, str] = field(default_factory=dict)
    interleave: int = 0
    transposed: bool = False
    block: str = ""

    @property
    def per_expert(self) -> bool:
        return "{}" in next(iter(self.parts.values()))

    @property
    def container(self) -> str:
        """Whatever else lies below this name is an error."""
        name, dot, _ = next(iter(self.parts.values())).partition(".")
        return name + dot if dot else ""


def _each(gate: str, up: str, down: str) -> tuple[dict[str, str], dict[str, str]]:
    names = {"gate": gate, "up": up, "down": down}
    return tuple({role: f"experts.{{}}.{name}.{kind}" for role, name in names.items()}
                 for kind in ("weight", "bias"))


def _fused(weights: str, biases: str, one: str, two: str) -> tuple[dict[str, str], dict[str, str]]:
    """`weights` and `biases` with the words of gate_up and of down in place of #."""
    return tuple({"gate_up": pattern.replace("#", one), "down": pattern.replace("#", two)}
                 for pattern in (weights, biases))


def _megatron(linear: str, expert: str) -> tuple[dict[str, str], ...]:
    """Names of what each linear has; `expert` is the number in the names of parameters."""
    roles = {"gate_up": "1", "down": "2"}
    return tuple({role: linear.replace("#", number) + what for role, number in roles.items()}
                 for what in (f".weight{expert}", f".bias{expert}", "._extra_state"))


_PACKED = _fused("experts.#_proj", "experts.#_proj_bias", "gate_up", "down")
_CADRE = _fused("experts.w#", "experts.bias#", "1", "2")
_MEGATRON = _megatron("experts.linear_fc#", "{}")
_LOCAL = _megatron("experts.local_experts.{}.linear_fc#", "")
_EXTRA = "_extra_state"

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("transformers", "transformers 5 in memory", *_PACKED),
        Layout("gpt_oss", "gpt-oss, files and memory", *_PACKED, interleave=1, transposed=True),
        Layout("llama4", "Llama 4, files and memory", *_PACKED, transposed=True),
        Layout("mixtral", "Mixtral, MiniMax", *_each("w1", "w3", "w2"), block="block_sparse_moe"),
        Layout("qwen", "Qwen 2 and 3, DeepSeek, OLMoE, GLM, Ernie, Jamba",
               *_each("gate_proj", "up_proj", "down_proj")),
        Layout("lfm2", "LFM2", *_each("w1", "w3", "w2")),
        Layout("cadre", "cadre.GroupedMLP called experts", *_CADRE),
        Layout("cadre_interleave32", "the same, interleaved", *_CADRE, interleave=32),
        Layout("vllm", "vLLM in memory",
               *_fused("experts.#_weight", "experts.#_bias", "w13", "w2")),
        Layout("titan", "torchtitan", dict(gate="experts.w1", up="experts.w3", down="experts.w2"),
               {}),
        Layout("megatron", "Megatron, TEGroupedMLP", *_MEGATRON),
        Layout("megatron_interleave32", "the same, interleaved", *_MEGATRON, interleave=32),
        Layout("megatron_local", "Megatron, SequentialMLP", *_LOCAL),
        Layout("te_discrete", "GroupedLinear of Cadre or TransformerEngine, a weight per expert",
               {"weight": "weight{}"}, {"weight": "bias{}"}, {"weight": _EXTRA}),
        Layout("te_packed", "GroupedLinear with single_grouped_weight and single_grouped_bias",
               {"weight": "weight"}, {"weight": "bias"}, {"weight": _EXTRA}),
    )
}

_SIZES = {"gate": "FH", "up": "FH", "gate_up": "2H", "down": "HF", "weight": "NK"}


def convert(state: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]], source: str, target: str,
            *, experts: int | None = None,
            layers: Sequence[str] | None = None) -> Mapping[str, Tensor]:
    """The same checkpoint with its experts in another layout, bit for bit.

    state: names and tensors; or several of these, the shards of one checkpoint.
    source, target: names in `LAYOUTS`.
    experts: E of every layer; None: the largest that is found. Give it where the last expert might
        be missing.
    layers: the modules around the experts (those that have the names of the table below them), such
        as "model.layers.0.mlp"; None: all that are found, or for the layouts of one linear
        (te_discrete, te_packed) `state` itself.

    Returns a mapping that computes a tensor when it is asked for and keeps none: other tensors are
    those of `state`, and experts are views of them where the layout allows. Formats that need
    contiguous tensors want `{name: x.contiguous() for name, x in result.items()}`. Where experts
    have extra states of TransformerEngine, so has the result, if its layout has a place for them:
    the same under the same name, else an empty one. Names above the layer stay as they are.

    Shapes, dtypes: of a layer all experts must have the same; any dtype is taken as it is.
    Errors: ValueError, naming tensors: at once for layouts, missing, extra and duplicate names;
        for shapes and dtypes when a tensor is asked for; TypeError for what is no tensor.
    """
    for what, name in (("source", source), ("target", target)):
        if not isinstance(name, str) or name not in LAYOUTS:
            raise ValueError(f"checkpoints: {what} is {name!r}, must be {', '.join(LAYOUTS)}")
    kinds = {name: "one linear" if "weight" in LAYOUTS[name].parts else "an MLP"
             for name in (source, target)}
    if kinds[source] != kinds[target]:
        raise ValueError(f"checkpoints: target is {target!r}, must be a layout of {kinds[source]}, "
                         f"as {source!r} is")
    if isinstance(layers, str):
        raise TypeError("checkpoints: layers is a str, must be a list of names")
    if experts is not None:
        require_sizes(**{"checkpoints: experts": experts})
    if layers is None and not LAYOUTS[source].container:
        layers = [""]
    return _Converted(_merged(state), LAYOUTS[source], LAYOUTS[target], experts, layers)


def interleave(gate_up: Tensor, size: int = 32, dim: int = 0) -> Tensor:
    """[gate F | up F] along `dim` -> blocks of `size`: [gate | up | gate | ...].

    Shapes: any with 2F along dim, F a multiple of size; ValueError else. Dtypes: any.
    """
    return _join(*_split(gate_up, 0, dim), size, dim)


def deinterleave(gate_up: Tensor, size: int = 32, dim: int = 0) -> Tensor:
    """Blocks of `size` along `dim`, [gate | up | gate | ...] -> [gate F | up F].

    Shapes: any with 2F along dim, F a multiple of size; ValueError else. Dtypes: any.
    """
    return _join(*_split(gate_up, size, dim), 0, dim)


def _split(gate_up: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Gate and up; views unless size is 2 or more."""
    if not isinstance(gate_up, Tensor):
        raise TypeError(f"checkpoints: gate_up is {kind_of(gate_up)}, must be a tensor")
    if not -gate_up.dim() <= dim < gate_up.dim():
        raise ValueError(f"checkpoints: dim is {dim}, must be {-gate_up.dim()} to "
                         f"{gate_up.dim() - 1}; gate_up has {gate_up.dim()} dimensions")
    dim %= gate_up.dim()
    _require_blocks(gate_up.shape[dim], size)
    if size == 0:
        return gate_up.chunk(2, dim)
    gate, up = gate_up.unflatten(dim, (-1, 2, size)).unbind(dim + 1)
    return gate.flatten(dim, dim + 1), up.flatten(dim, dim + 1)


def _join(gate: Tensor, up: Tensor, size: int, dim: int) -> Tensor:
    dim %= gate.dim()
    _require_blocks(2 * gate.shape[dim], size)
    if size == 0:
        return torch.cat([gate, up], dim)
    blocks = [x.unflatten(dim, (-1, size)) for x in (gate, up)]
    return torch.stack(blocks, dim + 1).flatten(dim, dim + 2)


def _require_blocks(features: int, size: int) -> None:
    if size < 0 or features % (2 * max(size, 1)):
        raise ValueError(f"checkpoints: size of gate and up is {features}, must be a multiple of "
                         f"{2 * max(size, 1)}; they lie in blocks of {size}")


def _merged(state: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    merged = state if isinstance(state, Mapping) else _of_shards(state)
    for name in merged:
        if not isinstance(name, str):
            raise TypeError(f"checkpoints: a name in state is {name!r}, {kind_of(name)}, must be "
                            "a str")
    return merged


def _of_shards(state: Iterable[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    shards, seen = list(state) if isinstance(state, Iterable) else [state], set()
    for shard in shards:
        if not hasattr(shard, "keys"):
            raise TypeError(f"checkpoints: state is or has {kind_of(shard)}, must be a dict of "
                            "tensors, or several")
        if twice := seen & shard.keys():
            raise ValueError(f"checkpoints: {_some(twice)} are duplicate, must be in one shard")
        seen.update(shard)
    return ChainMap(*reversed(shards))


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@functools.cache
def _patterns(layout: Layout) -> list[tuple[tuple[str, bool], re.Pattern]]:
    """((role, is a bias), pattern of the whole name) of all parts."""
    block = re.escape(layout.block + ".") if layout.block else ""
    return [((role, is_bias),
             re.compile(rf"((?:.*\.)?{block})" + re.escape(name).replace(r"\{\}", r"(\d+)")))
            for is_bias, names in ((False, layout.parts), (True, layout.biases))
            for role, name in names.items()]


@dataclass
class _Layer:
    """The experts of one layer in the source."""

    prefix: str
    experts: int = 0
    names: dict[tuple[str, bool], dict[int | None, str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    dtypes: dict[bool, torch.dtype] = field(default_factory=dict)
    has_extra_state: bool = False

    @property
    def has_bias(self) -> bool:
        return any(is_bias for _, is_bias in self.names)


class _Converted(Mapping):

    def __init__(self, state: Mapping[str, Tensor], source: Layout, target: Layout,
                 experts: int | None, layers: Sequence[str] | None):
        self._state, self._source, self._target = state, source, target
        only = None if layers is None else {f"{name}." if name else "" for name in layers}
        self._layers: dict[str, _Layer] = {}
        self._layer_of: dict[str, _Layer] = {}
        for name in state:
            self._find(name, only)
        absent = (only or set()) - self._layers.keys()
        if not self._layers or absent:
            where = f" in {_some(absent)}" if any(absent) else ""
            raise ValueError(f"checkpoints: experts in layout {source.name} are missing{where}, "
                             f"must be named {_some(source.parts.values())}; {self._hint()}")
        self._require_complete(experts)
        # Where a name of the result comes from: a name of the source, a part of a layer, or
        # nowhere, of an empty extra state.
        self._from: dict[str, str | tuple[_Layer, tuple[str, bool], int | None] | None] = {}
        self._name_results()

    def _find(self, name: str, only: set[str] | None) -> None:
        for part, pattern in _patterns(self._source):
            match = pattern.fullmatch(name)
            if not match or not (only is None or match[1] in only):
                continue
            layer = self._layers.setdefault(match[1], _Layer(match[1]))
            expert = int(match[2]) if self._source.per_expert else None
            known = layer.names.setdefault(part, {}).setdefault(expert, name)
            if known != name:
                raise ValueError(f"checkpoints: {known}, {name} are duplicate, must be one")
            self._layer_of[name] = layer

    def _hint(self) -> str:
        found = [layout.name for layout in LAYOUTS.values() if layout.container
                 and any(p.fullmatch(name) for _, p in _patterns(layout) for name in self._state)]
        return f"names fit {', '.join(found)}" if found else "no layout has such names"

    def _require_complete(self, experts: int | None) -> None:
        if self._source.per_expert:
            largest = max(expert for layer in self._layers.values()
                          for known in layer.names.values() for expert in known) + 1
        for layer in self._layers.values():
            if not self._source.per_expert:
                largest = self._packed_experts(next(iter(layer.names.values()))[None])
            layer.experts = experts or largest
            numbers = range(layer.experts) if self._source.per_expert else [None]
            missing = {_name(self._source, layer.prefix, part, number)
                       for part in _parts(self._source, layer)
                       for number in numbers if number not in layer.names.get(part, {})}
            if missing:
                raise ValueError(f"checkpoints: {_some(missing)} are missing, must be there for "
                                 f"{layer.experts} experts")
            extra = {name for known in layer.names.values() for number, name in known.items()
                     if number not in numbers}
            self._require_no_extra(layer, extra)

    def _packed_experts(self, name: str) -> int:
        shape = tuple(self._stored(name).shape)
        if not shape or shape[0] == 0:
            raise ValueError(f"checkpoints: shape of {name} is {shape}, must be [E, ...] of 1 "
                             "expert or more")
        return shape[0]

    def _require_no_extra(self, layer: _Layer, extra: set[str]) -> None:
        below = layer.prefix + self._source.container
        if self._source.container:
            extra |= {name for name in self._state if name.startswith(below)
                      and name not in self._layer_of and not _is_extra_state(name)}
        if extra:
            raise ValueError(f"checkpoints: {_some(extra)} are extra, must be none for "
                             f"{layer.experts} experts in layout {self._source.name}; quantized "
                             "experts must be dequantized before")

    def _is_of_experts(self, name: str, prefix: str) -> bool:
        """Whether it is an extra state of the experts of the layer."""
        below = name.removeprefix(prefix + self._source.container)
        here = prefix in self._layers and name.startswith(prefix + self._source.container)
        return here and _is_extra_state(name) and ("." not in below or bool(self._source.container))

    def _name_results(self) -> None:
        done = set()
        for name in self._state:
            prefix = next((p for p in self._layers if name.startswith(p)), "")
            if self._is_of_experts(name, prefix):
                self._layers[prefix].has_extra_state = True
        blocks = {layer.prefix: self._renamed(layer.prefix) for layer in self._layers.values()}
        for name in self._state:
            layer = self._layer_of.get(name)
            if layer is None:
                prefix = next((p for p in blocks if name.startswith(p)), "")
                if not self._is_of_experts(name, prefix):
                    self._put(blocks.get(prefix, "") + name.removeprefix(prefix), name)
            elif layer.prefix not in done:
                done.add(layer.prefix)
                self._name_layer(layer, blocks[layer.prefix])

    def _name_layer(self, layer: _Layer, prefix: str) -> None:
        if layer.has_bias and not self._target.biases:
            raise ValueError(f"checkpoints: target is {self._target.name!r}, must be a layout with "
                             f"biases; {layer.prefix} has some")
        for part in _parts(self._target, layer):
            for number in range(layer.experts) if self._target.per_expert else [None]:
                self._put(_name(self._target, prefix, part, number), (layer, part, number))
        for role, name in self._target.extra.items() if layer.has_extra_state else ():
            same = self._source.extra.get(role) == name
            for number in range(layer.experts) if "{}" in name else [None]:
                known = layer.prefix + name.format(number)
                self._put(prefix + name.format(number),
                          known if same and known in self._state else None)

    def _put(self, name: str, origin) -> None:
        if name in self._from:
            raise ValueError(f"checkpoints: {name} is duplicate in the result, must be one; it is "
                             f"already in a checkpoint of layout {self._source.name}")
        self._from[name] = origin

    def _renamed(self, prefix: str) -> str:
        """The prefix of a layer as the target has it."""
        here, there = self._source.block, self._target.block
        if here == there or not prefix:
            return prefix
        above, dot, _ = prefix[:-1].rpartition(".")
        return f"{above}{dot}{there or 'mlp'}."

    def __len__(self) -> int:
        return len(self._from)

    def __iter__(self) -> Iterator[str]:
        return iter(self._from)

    def __contains__(self, name: object) -> bool:
        return name in self._from

    def __getitem__(self, name: str) -> Tensor:
        origin = self._from[name]
        if origin is None:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if isinstance(origin, str):
            return self._state[origin]
        layer, part, number = origin
        if self._source.per_expert and not self._target.per_expert:
            return torch.stack([self._part(layer, part, e) for e in range(layer.experts)])
        return self._part(layer, part, number)

    def _part(self, layer: _Layer, part: tuple[str, bool], number: int | None) -> Tensor:
        """A part as the target has it, of one expert or of all."""
        role, is_bias = part
        source, target = self._source, self._target
        dim = -1 if is_bias or source.transposed else -2
        if role in source.parts:
            result = self._read(layer, part, number)
            if role == "gate_up" and source.interleave != target.interleave:
                result = _join(*_split(result, source.interleave, dim), target.interleave, dim)
        elif role == "gate_up":
            gate, up = (self._read(layer, (each, is_bias), number) for each in ("gate", "up"))
            result = _join(gate, up, target.interleave, dim)
        else:
            both = self._read(layer, ("gate_up", is_bias), number)
            result = _split(both, source.interleave, dim)[role == "up"]
        turned = source.transposed != target.transposed and not is_bias
        return result.transpose(-2, -1) if turned else result

    def _stored(self, name: str) -> Tensor:
        tensor = self._state[name]
        if not isinstance(tensor, Tensor):
            raise TypeError(f"checkpoints: {name} is {kind_of(tensor)}, must be a tensor")
        return tensor

    def _read(self, layer: _Layer, part: tuple[str, bool], number: int | None) -> Tensor:
        """A part as the source has it, checked; of one expert, or of all."""
        role, is_bias = part
        name = layer.names[part][number if self._source.per_expert else None]
        tensor = self._stored(name)
        order = -1 if self._source.transposed else 1
        letters = _SIZES[role][:1] if is_bias else _SIZES[role][::order]
        _require_shape(layer, name, tensor, ("" if self._source.per_expert else "E") + letters)
        dtype = layer.dtypes.setdefault(is_bias, tensor.dtype)
        if tensor.dtype != dtype:
            raise ValueError(f"checkpoints: dtype of {name} is {tensor.dtype}, must be {dtype}; "
                             "all experts of a layer have one")
        return tensor if self._source.per_expert or number is None else tensor[number]


def _require_shape(layer: _Layer, name: str, tensor: Tensor, letters: str) -> None:
    sizes, shape = layer.sizes, tuple(tensor.shape)
    sizes["E"] = layer.experts
    if len(shape) == len(letters):
        for letter, size in zip(letters, shape):
            sizes.setdefault("F" if letter == "2" else letter, size // (1 + (letter == "2")))
    want = tuple(2 * sizes.get("F", 0) if letter == "2" else sizes.get(letter, 0)
                 for letter in letters)
    if shape != want:
        meaning = ", ".join(letters).replace("2", "2F")
        values = f" = {want} as other experts of the layer have it" if all(want) else ""
        raise ValueError(f"checkpoints: shape of {name} is {shape}, must be [{meaning}]{values}")


def _parts(layout: Layout, layer: _Layer) -> list[tuple[str, bool]]:
    return ([(role, False) for role in layout.parts]
            + [(role, True) for role in layout.biases if layer.has_bias])


def _name(layout: Layout, prefix: str, part: tuple[str, bool], number: int | None) -> str:
    role, is_bias = part
    pattern = (layout.biases if is_bias else layout.parts)[role]
    return prefix + pattern.format(number)


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2].startswith("_extra_state")

