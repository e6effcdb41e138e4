"""Expert layouts of checkpoints: round trips bit for bit, meanings, and every error."""

import itertools

import pytest
import torch
from cadre import checkpoints
from cadre.checkpoints import LAYOUTS, convert

E, H, F = 3, 40, 64
LAYERS = ("model.layers.0.mlp.", "model.layers.10.mlp.")
MLP = [name for name, layout in LAYOUTS.items() if "weight" not in layout.parts]
BIASED = [name for name in MLP if LAYOUTS[name].biases]
PAIRS = [(*pair, bias) for names, bias in ((MLP, False), (BIASED, True))
         for pair in itertools.product(names, names)]


def bits(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    """Any bits: NaN of all kinds, subnormal numbers, both zeros."""
    return torch.randint(-2**15, 2**15, shape, dtype=torch.int16).view(dtype)


def qwen(bias: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint with a tensor per expert, and what else there is."""
    state = {"model.embed_tokens.weight": bits(7, H)}
    for layer in LAYERS:
        state[layer + "gate.weight"] = bits(E, H)
        for e in range(E):
            for name, shape in (("gate_proj", (F, H)), ("up_proj", (F, H)), ("down_proj", (H, F))):
                state[f"{layer}experts.{e}.{name}.weight"] = bits(*shape)
                if bias:
                    state[f"{layer}experts.{e}.{name}.bias"] = bits(shape[0])
        state[layer + "shared_expert.gate_proj.weight"] = bits(F, H)
    return state | {"model.norm.weight": bits(H)}


def assert_same(got, want) -> None:
    assert set(got) == set(want)
    for name in want:
        assert got[name].shape == want[name].shape and got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name].contiguous().view(torch.int16),
                           want[name].contiguous().view(torch.int16)), name


@pytest.mark.parametrize("source,target,bias", PAIRS)
def test_round_trip(source, target, bias):
    start = qwen(bias)
    first = dict(convert(start, "qwen", source))
    second = dict(convert(first, source, target))
    assert_same(convert(second, target, source), first)
    assert_same(convert(second, target, "qwen"), start)


def test_what_the_layouts_mean():
    state = qwen(bias=True)
    layer = LAYERS[1]
    want = {name: torch.stack([state[f"{layer}experts.{e}.{name}"] for e in range(E)])
            for name in ("gate_proj.weight", "up_proj.weight", "down_proj.weight",
                         "gate_proj.bias", "up_proj.bias", "down_proj.bias")}
    gate, up, down, gate_bias, up_bias, down_bias = (x.float() for x in want.values())

    def get(target: str, name: str) -> torch.Tensor:
        return convert(state, "qwen", target)[layer + name].float()

    def equal(got: torch.Tensor, wanted: torch.Tensor) -> bool:
        return got.shape == wanted.shape and torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))

    assert equal(get("transformers", "experts.gate_up_proj"), torch.cat([gate, up], 1))
    assert equal(get("transformers", "experts.down_proj"), down)
    assert equal(get("llama4", "experts.gate_up_proj"), torch.cat([gate, up], 1).mT)
    assert equal(get("gpt_oss", "experts.gate_up_proj")[..., ::2], gate.mT)
    assert equal(get("gpt_oss", "experts.gate_up_proj")[..., 1::2], up.mT)
    assert equal(get("gpt_oss", "experts.gate_up_proj_bias")[:, 1::2], up_bias)
    assert equal(get("gpt_oss", "experts.down_proj"), down.mT)
    assert equal(get("gpt_oss", "experts.down_proj_bias"), down_bias)
    assert equal(get("cadre", "experts.w1"), torch.cat([gate, up], 1))
    assert equal(get("cadre", "experts.bias1"), torch.cat([gate_bias, up_bias], 1))
    assert equal(get("cadre", "experts.w2"), down)
    assert equal(get("megatron", "experts.linear_fc1.weight2"), torch.cat([gate[2], up[2]]))
    assert equal(get("megatron", "experts.linear_fc2.bias1"), down_bias[1])
    assert equal(get("megatron_local", "experts.local_experts.2.linear_fc2.weight"), down[2])
    blocks = get("megatron_interleave32", "experts.linear_fc1.weight0").split(32)
    assert equal(torch.cat(blocks[::2]), gate[0]) and equal(torch.cat(blocks[1::2]), up[0])
    assert equal(get("vllm", "experts.w13_weight"), torch.cat([gate, up], 1))
    mixtral = convert(state, "qwen", "mixtral")
    block = layer.replace("mlp", "block_sparse_moe")
    assert equal(mixtral[block + "experts.1.w3.weight"].float(), up[1])
    assert mixtral[block + "gate.weight"] is state[layer + "gate.weight"]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_transformer_engine_both_ways(bias):
    discrete = {f"weight{e}": bits(F, H) for e in range(12)}
    if bias:
        discrete |= {f"bias{e}": bits(F) for e in range(12)}
    packed = dict(convert(discrete, "te_discrete", "te_packed"))
    assert set(packed) == ({"weight", "bias"} if bias else {"weight"})
    assert_same({"": packed["weight"][11]}, {"": discrete["weight11"]})
    assert_same(convert(packed, "te_packed", "te_discrete"), discrete)
    model = {f"a.{name}": x for name, x in packed.items()} | {"b.weight": bits(4, 4)}
    assert_same(convert(model, "te_packed", "te_discrete", layers=["a"]),
                {f"a.{name}": x for name, x in discrete.items()} | {"b.weight": model["b.weight"]})


def test_extra_states_come_along():
    """Under the same name the same; where experts are joined or split an empty one; none where the
    source has none. Those of other modules are left alone."""
    layer = LAYERS[0]
    state = dict(convert(qwen(), "qwen", "megatron"))
    assert not [name for name in state if "_extra_state" in name]
    others = {layer + "router._extra_state": bits(3), "model.attention._extra_state": bits(3)}
    own = {layer + f"experts.linear_fc{i}._extra_state": bits(5) for i in (1, 2)}
    full = state | others | own

    same = convert(full, "megatron", "megatron_interleave32")
    assert all(same[name] is x for name, x in (others | own).items())
    assert set(same) == set(full)
    local = convert(full, "megatron", "megatron_local")
    each = {name for name in local if "local_experts" in name and name.endswith("_extra_state")}
    assert each == {f"{layer}experts.local_experts.{e}.linear_fc{i}._extra_state"
                    for e in range(E) for i in (1, 2)}
    assert all(local[name].shape == (0,) and local[name].dtype == torch.uint8 for name in each)
    assert all(local[name] is x for name, x in others.items())
    back = convert(local, "megatron_local", "megatron")
    assert set(back) == set(full) and all(back[name].shape == (0,) for name in own)

    one = {f"weight{e}": bits(F, H) for e in range(3)} | {"_extra_state": bits(5)}
    packed = convert(one | others, "te_discrete", "te_packed")
    assert packed["_extra_state"] is one["_extra_state"]
    assert set(packed) == {"weight", "_extra_state", *others}


def test_layouts_without_a_place_leave_extra_states_out():
    state = dict(convert(qwen(), "qwen", "megatron"))
    states = {LAYERS[0] + "experts.linear_fc1._extra_state": bits(3),
              "model.attention._extra_state": bits(3)}
    got = convert(state | states, "megatron", "qwen")
    assert_same(got, qwen_like(got, states))


def qwen_like(got, states):
    """What `got` must be: its experts, and of the extra states those of others."""
    kept = "model.attention._extra_state"
    assert LAYERS[0] + "experts.linear_fc1._extra_state" not in got
    return {name: states[kept] if name == kept else got[name] for name in [*got, kept]}


def test_nothing_else_is_copied():
    state = dict(convert(qwen(), "qwen", "transformers"))
    place = state[LAYERS[0] + "experts.gate_up_proj"].untyped_storage().data_ptr()
    for target in ("cadre", "llama4", "vllm", "qwen", "mixtral", "titan", "megatron"):
        got = convert(state, "transformers", target)
        assert got["model.norm.weight"] is state["model.norm.weight"]
        first = [name for name in got if "layers.0" in name and "expert" in name
                 and got[name].untyped_storage().data_ptr() == place]
        assert len(first) == {"cadre": 1, "llama4": 1, "vllm": 1, "titan": 2, "megatron": E}.get(
            target, 2 * E), target
    discrete = qwen()
    got = convert(discrete, "qwen", "lfm2")
    assert all(any(got[name] is x for x in discrete.values()) for name in got)


class Counting(dict):
    reads = 0

    def __getitem__(self, name):
        self.reads += 1
        return super().__getitem__(name)


def test_reads_only_what_is_asked_for():
    state = Counting(qwen())
    got = convert(state, "qwen", "transformers")
    assert state.reads == 0 and LAYERS[0] + "experts.down_proj" in got and state.reads == 0
    assert got[LAYERS[0] + "experts.down_proj"].shape == (E, H, F) and state.reads == E
    assert len(got) == len(list(got)) == 10
    assert list(got)[:3] == ["model.embed_tokens.weight", LAYERS[0] + "gate.weight",
                             LAYERS[0] + "experts.gate_up_proj"]


def test_shards_are_one_checkpoint():
    whole = qwen()
    names = list(whole)
    shards = [{name: whole[name] for name in names[i::3]} for i in range(3)]
    assert_same(convert(shards, "qwen", "cadre"), convert(whole, "qwen", "cadre"))
    shards[2]["model.norm.weight"] = shards[1]["model.norm.weight"] = bits(H)
    assert said(shards) == ("checkpoints: model.norm.weight are duplicate, must be in one shard")


def test_some_layers_only():
    state = qwen()
    got = convert(state, "qwen", "cadre", layers=["model.layers.10.mlp"])
    assert LAYERS[1] + "experts.w1" in got and LAYERS[0] + "experts.w1" not in got
    name = LAYERS[0] + "experts.0.up_proj.weight"
    assert got[name] is state[name]


@pytest.mark.parametrize("size", [0, 1, 8, 32])
def test_interleave_and_back(size):
    x = torch.arange(2 * F * 5).view(2 * F, 5)
    for dim, y in ((0, x), (-1, x.T), (1, x.expand(3, -1, -1))):
        there = checkpoints.interleave(y, size, dim)
        assert torch.equal(checkpoints.deinterleave(there, size, dim), y)
        assert size == 0 or torch.equal(there.narrow(dim, size, size), y.narrow(dim, F, size))


def test_interleave_errors():
    for turn in (checkpoints.interleave, checkpoints.deinterleave):
        with pytest.raises(ValueError, match="^checkpoints: size of gate and up is 96, must be a "
                           "multiple of 64; they lie in blocks of 32$"):
            turn(torch.zeros(96, 3))
        for dim in (2, -3):
            with pytest.raises(ValueError, match=f"checkpoints: dim is {dim}, must be -2 to 1; "):
                turn(torch.zeros(4, 4), 1, dim)
        with pytest.raises(ValueError, match="size of gate and up is 5, must be a multiple of 2"):
            turn(torch.zeros(5), 1)


def said(state, source="qwen", target="transformers", **keywords) -> str:
    with pytest.raises(ValueError) as error:
        dict(convert(state, source, target, **keywords))
    return str(error.value)


def without(state, *names):
    return {name: x for name, x in state.items() if name not in names}


L0 = LAYERS[0] + "experts."


def test_missing_experts():
    state = qwen()
    assert said(without(state, L0 + "1.up_proj.weight")) == (
        f"checkpoints: {L0}1.up_proj.weight are missing, must be there for 3 experts")
    last = [name for name in state if name.startswith(L0 + "2.")]
    assert "2.down_proj.weight, " in said(without(state, *last))
    more = said(state, experts=5)
    assert "3.up_proj.weight and 3 more are missing, must be there for 5 experts" in more
    half = without(qwen(bias=True), L0 + "0.down_proj.bias")
    assert f"{L0}0.down_proj.bias are missing, must be there for 3 experts" in said(half)
    packed = without(dict(convert(state, "qwen", "transformers")), L0 + "down_proj")
    assert f"{L0}down_proj are missing" in said(packed, "transformers", "qwen")
    assert "weight3 are missing" in said({f"weight{e}": bits(4, 4) for e in (0, 1, 2, 4)},
                                         "te_discrete", "te_packed")


def test_extra_experts():
    state = qwen()
    assert said(state, experts=2).startswith(
        f"checkpoints: {L0}2.down_proj.weight, {L0}2.gate_proj.weight, {L0}2.up_proj.weight are "
        "extra, must be none for 2 experts in layout qwen; ")
    name = L0 + "0.up_proj.weight_scale_inv"
    assert said(state | {name: bits(1)}) == (
        f"checkpoints: {name} are extra, must be none for 3 experts in layout qwen; quantized "
        "experts must be dequantized before")
    both = state | dict(convert(state, "qwen", "transformers"))
    assert f"{L0}down_proj, {L0}gate_up_proj are extra" in said(both)


def test_duplicate_experts():
    state = qwen()
    assert said(state | {L0 + "01.up_proj.weight": bits(F, H)}) == (
        f"checkpoints: {L0}1.up_proj.weight, {L0}01.up_proj.weight are duplicate, must be one")
    mixtral = dict(convert(state, "qwen", "mixtral")) | {LAYERS[0] + "gate.weight": bits(E, H)}
    assert said(mixtral, "mixtral") == (
        f"checkpoints: {LAYERS[0]}gate.weight is duplicate in the result, must be one; it is "
        "already in a checkpoint of layout mixtral")


def test_wrong_shapes_and_dtypes():
    state = qwen(bias=True)
    name = L0 + "1.up_proj.weight"
    assert said(state | {name: bits(F, H + 1)}) == (
        f"checkpoints: shape of {name} is (64, 41), must be [F, H] = (64, 40) as other experts of "
        "the layer have it")
    assert "down_proj.weight is (64, 40), must be [H, F] = (40, 64)" in said(
        state | {L0 + "0.down_proj.weight": bits(F, H)})
    assert "bias is (63,), must be [F] = (64,)" in said(
        state | {L0 + "2.gate_proj.bias": bits(F - 1)})
    assert "0.gate_proj.weight is (64,), must be [F, H]" in said(
        state | {L0 + "0.gate_proj.weight": bits(F)})
    assert said(state | {name: bits(F, H, dtype=torch.float16)}) == (
        f"checkpoints: dtype of {name} is torch.float16, must be torch.bfloat16; all experts of a "
        "layer have one")
    packed = dict(convert(state, "qwen", "gpt_oss"))
    assert f"{L0}gate_up_proj is (3, 40, 127), must be [E, H, 2F]" in said(
        packed | {L0 + "gate_up_proj": bits(E, H, 127)}, "gpt_oss")
    assert "down_proj is (2, 64, 40), must be [E, F, H] = (3, 64, 40)" in said(
        packed | {L0 + "down_proj": bits(2, F, H)}, "gpt_oss")
    narrow = {name: x[:48] if "gate" in name or "up_p" in name else x for name, x in qwen().items()}
    narrow = {name: x[:, :48] if "down" in name else x for name, x in narrow.items()}
    assert "size of gate and up is 96, must be a multiple of 64" in said(
        narrow, target="megatron_interleave32")


def test_wrong_layouts():
    state = qwen()
    assert said(state, "gwen") == f"checkpoints: source is 'gwen', must be {', '.join(LAYOUTS)}"
    assert said(state, "qwen", "te_packed") == (
        "checkpoints: target is 'te_packed', must be a layout of an MLP, as 'qwen' is")
    assert "must be a layout of one linear" in said(state, "te_packed", "qwen")
    assert said(state, "mixtral") == (
        "checkpoints: experts in layout mixtral are missing, must be named experts.{}.w1.weight, "
        "experts.{}.w2.weight, experts.{}.w3.weight; names fit qwen")
    assert "no layout has such names" in said({"a": bits(1)})
    assert "are missing in model.layers.9.mlp., must be" in said(state,
                                                                 layers=["model.layers.9.mlp"])
    assert said(qwen(bias=True), "qwen", "titan") == (
        "checkpoints: target is 'titan', must be a layout with biases; model.layers.0.mlp. has "
        "some")


def test_states_without_experts():
    """They were an empty result, or an error of Python."""
    for source, name in (("te_packed", "weight"), ("transformers", L0 + "gate_up_proj")):
        target = {"te_packed": "te_discrete"}.get(source, "qwen")
        state = {L0 + "down_proj": bits(0, H, F)} if source == "transformers" else {}
        for shape in (0, 4, 5), ():
            assert said({name: bits(*shape)} | state, source, target) == (
                f"checkpoints: shape of {name} is {shape}, must be [E, ...] of 1 expert or more")
    assert said({"other": bits(3)}, "te_packed", "te_discrete") == (
        "checkpoints: experts in layout te_packed are missing, must be named weight; no layout has "
        "such names")


def test_what_is_no_name():
    for wrong, what in ((3, "3, an int"), (None, "None, a NoneType")):
        for state in ({"weight": bits(2, 4, 4), wrong: bits(1)}, [{wrong: bits(1)}]):
            with pytest.raises(TypeError, match=f"^checkpoints: a name in state is {what}, must be "
                               "a str$"):
                convert(state, "te_packed", "te_discrete")
    assert said(qwen(), "qwen", ["mixtral"]).startswith(
        "checkpoints: target is ['mixtral'], must be transformers, gpt_oss")
    assert said(qwen(), {}, "qwen").startswith("checkpoints: source is {}, must be transformers")


FAMILIES = {"mixtral": "mixtral", "qwen3_moe": "qwen", "olmoe": "qwen", "deepseek_v3": "qwen",
            "gpt_oss": "gpt_oss"}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_files_of_transformers(family, tmp_path):
    """What transformers writes of a model is what this module makes of its memory, and back."""
    pytest.importorskip("transformers", minversion="5.0")
    from safetensors.torch import load_file
    from test_huggingface import make
    model = make(family, "cpu")
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    memory = "gpt_oss" if family == "gpt_oss" else "transformers"
    state = {name: x.bfloat16() for name, x in model.state_dict().items()}
    files = {name: x.bfloat16() for name, x in files.items()}
    assert_same(convert(state, memory, FAMILIES[family]), files)
    assert_same(convert(files, FAMILIES[family], memory), state)
    for target in ("cadre", "megatron"):
        assert_same(convert(convert(files, FAMILIES[family], target), target, memory), state)
    model.load_state_dict(convert(files, FAMILIES[family], memory))
