"""State dicts of cadre.GroupedLinear: packed and discrete load into each other."""

import copy
import io
import pickle

import pytest
import torch
from conftest import draw
from linear_reference import experts_of, module

import cadre

LAYOUTS = [(w, b) for w in (True, False) for b in (True, False)]


def made(weight, bias, device, **options):
    return cadre.GroupedLinear(5, 24, 40, device=device, single_grouped_weight=weight,
                               single_grouped_bias=bias, **options)


def assert_same(layer, want):
    for stem in ("weight", "bias"):
        for got, expected in zip(experts_of(layer, stem), experts_of(want, stem), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("assign", [True, False])
def test_every_layout_loads_every_layout(device, saved, loaded, assign):
    source, target = made(*saved, device), made(*loaded, device)
    with torch.no_grad():
        for p in source.parameters():
            p.normal_()
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    names = list(state)
    result = target.load_state_dict(state, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert list(state) == names  # the caller's dict is as it was
    assert_same(target, source)
    assert list(target.state_dict()) == list(made(*loaded, device).state_dict())


@pytest.mark.parametrize("loaded", [True, False])
def test_inside_another_module(device, loaded):
    source = torch.nn.Sequential(made(not loaded, not loaded, device), torch.nn.Linear(2, 2))
    target = torch.nn.Sequential(made(loaded, loaded, device), torch.nn.Linear(2, 2))
    target.load_state_dict(source.state_dict())
    assert_same(target[0], source[0])


@pytest.mark.parametrize("packed", [True, False])
def test_state_of_the_peer(device, packed):
    """A bias [E, 1, N], and extra state of formats that nothing here keeps."""
    source, target = module(device), made(packed, packed, device)
    state = source.state_dict()
    state["bias"] = state["bias"].unsqueeze(1)
    state["_extra_state"] = torch.zeros(16, dtype=torch.uint8)
    state["_extra_state3"] = torch.zeros(0, dtype=torch.uint8)
    target.load_state_dict(state)
    assert_same(target, source)
    assert target.state_dict()["_extra_state"].numel() == 0


@pytest.mark.parametrize("make", [
    lambda: cadre.GroupedLinear(2, 4, 6, device="cpu"),
    lambda: cadre.ops.Sequential(cadre.ops.GroupedLinear(2, 4, 6, device="cpu"),
                                 cadre.ops.SwiGLU(), cadre.ops.Bias(3, device="cpu"))])
def test_extra_states_are_those_of_the_peer(make):
    """Every module that TransformerEngine gives one has an empty uint8 tensor; states without them,
    and with None, load."""
    made = make()
    state = made.state_dict()
    ops = list(made) if isinstance(made, cadre.ops.Sequential) else [made]
    names = [name for name in state if name.endswith("_extra_state")]
    assert len(names) == len(ops)
    for name in names:
        assert state[name].dtype == torch.uint8 and state[name].shape == (0,)
    made.load_state_dict(state)
    made.load_state_dict({name: x for name, x in state.items() if name not in names})
    made.load_state_dict(state | dict.fromkeys(names))
    with pytest.raises(RuntimeError, match="Unexpected key.*_extra_states"):
        made.load_state_dict(state | {names[0] + "s": torch.zeros(1)})
    assert list(made.state_dict()) == list(state)


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


@pytest.mark.parametrize("packed", [True, False])
def test_missing_experts(device, packed):
    state = without(module(device, packed=False).state_dict(), "weight1", "weight4", "bias0")
    target = made(packed, packed, device)
    before = copy.deepcopy(target)
    missing = ["weight1", "weight4", "bias0"] if packed else ["bias0", "weight1", "weight4"]
    with pytest.raises(RuntimeError, match=rf"Missing key.*{str(missing)[1:-1]}".replace("'", '"')):
        target.load_state_dict(state)
    result = target.load_state_dict(state, strict=False)
    assert result.missing_keys == missing
    got = experts_of(target, "weight")
    assert torch.equal(got[0], state["weight0"])
    assert torch.equal(got[1], experts_of(before, "weight")[1])


@pytest.mark.parametrize("packed", [True, False])
def test_surplus_experts(device, packed):
    state = module(device, packed=False).state_dict()
    state["weight5"] = state["weight0"]
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"weight5"'):
        made(packed, packed, device).load_state_dict(state)


@pytest.mark.parametrize("packed", [True, False])
def test_both_layouts_at_once(device, packed):
    state = module(device).state_dict() | module(device, packed=False).state_dict()
    surplus = "weight0" if packed else "weight"
    with pytest.raises(RuntimeError, match=rf'Unexpected key.*"{surplus}"'):
        made(packed, packed, device).load_state_dict(state)


@pytest.mark.parametrize("packed", [True, False])
def test_nothing_to_load(device, packed):
    with pytest.raises(RuntimeError, match="Missing key.*bias"):
        made(packed, packed, device).load_state_dict(
            without(module(device).state_dict(), "bias"))


@pytest.mark.parametrize(("saved", "loaded"), [(s, t) for s in (True, False)
                                               for t in (True, False)])
def test_wrong_shapes(device, saved, loaded):
    other_width = module(device, n=48, packed=saved).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        made(loaded, loaded, device).load_state_dict(other_width)


def test_another_number_of_packed_experts(device):
    state = module(device, experts=6).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: shape is \[6, 40, 24\] in "
                       r"the checkpoint, must be \[5, 40, 24\]"):
        made(False, False, device).load_state_dict(state)


@pytest.mark.parametrize("packed", [True, False])
def test_copies(device, packed):
    layer = module(device, packed=packed, delay_wgrad_compute=True)
    x = draw(10, 24, device=device)
    layer(x, [2] * 5).sum().backward()
    layer.backward_dw()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same(twin, layer)
        assert torch.equal(twin(x, [2] * 5), layer(x, [2] * 5))
        assert list(twin.state_dict()) == list(layer.state_dict())


def test_meta_state_is_assigned(device):
    """As a large model is loaded: parameters on meta, the checkpoint's tensors in their place."""
    source = module(device, packed=False)
    target = made(True, True, "meta")
    target.load_state_dict(source.state_dict(), assign=True)
    assert_same(target, source)


@pytest.mark.parametrize("missing", [0, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_meta_state_without_an_expert(device, packed, missing):
    """The others are there; a packed weight has NaN in its place."""
    source = module(device, packed=False)
    state = without(source.state_dict(), f"weight{missing}")
    with pytest.raises(RuntimeError, match=f'Missing key.*"weight{missing}"'):
        made(packed, True, "meta").load_state_dict(state, assign=True)
    target = made(packed, True, "meta")
    result = target.load_state_dict(state, strict=False, assign=True)
    assert result.missing_keys == [f"weight{missing}"] and not result.unexpected_keys
    both = zip(experts_of(target, "weight"), experts_of(source, "weight"))
    for e, (got, want) in enumerate(both):
        if e != missing:
            assert got.device == want.device and torch.equal(got, want)
        elif packed:
            assert got.isnan().all()
        else:
            assert got.is_meta


def test_experts_that_all_have_another_shape(device):
    target = made(True, True, device)
    before = copy.deepcopy(target)
    with pytest.raises(RuntimeError, match="size mismatch for weight4") as error:
        target.load_state_dict(module(device, n=48, packed=False).state_dict())
    assert "Missing" not in str(error.value)
    assert_same(target, before)


@pytest.mark.parametrize("packed", [True, False])
def test_what_is_no_tensor(packed):
    """Packed or discrete, in a layer that keeps it so or not."""
    for name in ("weight", "weight1"):
        state = made(name == "weight", True, "cpu").state_dict()
        with pytest.raises(RuntimeError, match=f"{name}"):
            made(packed, True, "cpu").load_state_dict(state | {name: 3})
