"""Tensors on "meta" or on another device, and tensors whose memory was freed: no entry point reads
or returns what is not there."""

import cadre
import pytest
import torch
from conftest import DEVICES
from entry_points import DIFFERENTIABLE, HOST, NAMES, entry_points

# Of two experts on two devices, with the layout.
ELSEWHERE = r"(is|has shape .*|with strides .*) on (meta|cpu|cuda)"
OTHERS = ["meta", *(d for d in DEVICES if d != "cpu")]


@pytest.fixture(params=NAMES)
def entry(request):
    return entry_points()[request.param]


def moved(tensors, device, only=None, but=None):
    return {name: t.to(device) if name != but and only in (None, name) else t
            for name, t in tensors.items()}


@pytest.mark.parametrize("elsewhere", OTHERS)
def test_one_tensor_elsewhere(entry, elsewhere):
    call, tensors = entry
    call(tensors)
    for name in tensors:
        if len(tensors) > 1:
            with pytest.raises(ValueError, match=ELSEWHERE):
                call(moved(tensors, elsewhere, only=name))
                pytest.fail(f"{name} on {elsewhere} was taken")


@pytest.mark.parametrize("elsewhere", OTHERS)
def test_all_but_one_elsewhere(entry, elsewhere):
    call, tensors = entry
    for name in tensors:
        if len(tensors) > 1 and name not in HOST:
            with pytest.raises(ValueError, match=ELSEWHERE):
                call(moved(tensors, elsewhere, but=name))
                pytest.fail(f"{name} on cpu was taken")


@pytest.mark.parametrize("name", NAMES)
def test_everything_on_meta(name):
    """Shapes and dtypes alone."""
    call, tensors = entry_points()[name]
    if name in ("linear with buffers", "deferred linear"):
        with pytest.raises(NotImplementedError, match="must be plain"):
            call(moved(tensors, "meta"))
        return
    want = call(tensors)
    for but in (None, *set(HOST) & set(tensors)):
        got = call(moved(tensors, "meta", but=but))
        assert got.is_meta and (got.shape, got.dtype) == (want.shape, want.dtype)


# Of numbers on the host torch itself reads what is left; backward alone touches a dgrad_out, and
# combine reads no slot_of.
UNREAD = {"dgrad_out", "slot_of"}


@pytest.mark.parametrize("kept", ["nothing", "all but a byte"])
def test_freed_memory(entry, kept):
    """Torch's own error where torch reads first."""
    call, tensors = entry
    for name, t in tensors.items():
        if t.numel() == 0 or name in UNREAD or (kept != "nothing" and name in (*HOST, "offs")):
            continue
        spoiled = t.clone()
        storage = spoiled.untyped_storage()
        storage.resize_(0 if kept == "nothing" else storage.nbytes() - 1)
        with pytest.raises((ValueError, RuntimeError), match="storage|not allocated"):
            call(tensors | {name: spoiled})
            pytest.fail(f"{name} without memory was taken")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_memory_freed_before_backward(name):
    """Of each tensor that requires a gradient. One that backward does not read may be gone."""
    _, tensors = entry_points()[name]
    seen = 0
    for spoiled in [n for n, t in tensors.items() if t.is_floating_point()]:
        call, given = entry_points()[name]
        for n, t in given.items():
            t.requires_grad_(t.is_floating_point() and n not in ("alpha", "out", "dgrad_out"))
        y = call(given)
        storage = given[spoiled].untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        try:
            y.backward(torch.ones_like(y))
        except (ValueError, RuntimeError) as error:
            assert "storage" in str(error) or "not allocated" in str(error)
            seen += 1
        storage.resize_(size)
    assert seen > 0 or name == "permute"  # whose backward reads no number of its input


@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "mkldnn"])
@pytest.mark.parametrize("which", ["x", "one weight", "all weights"])
def test_layouts_without_strides(layout, which):
    layer = cadre.GroupedLinear(3, 16, 8, bias=False, device="cpu")
    x, spoil = torch.randn(6, 16), lambda t: getattr(t, f"to_{layout}")()
    if which == "x":
        x = spoil(x)
    for e in {"x": (), "one weight": (1,), "all weights": range(3)}[which]:
        setattr(layer, f"weight{e}", torch.nn.Parameter(spoil(torch.randn(8, 16)), False))
    with pytest.raises(ValueError, match="has layout (Sparse|SparseCsr|Mkldnn), must be dense"):
        layer(x, [2, 2, 2])


def test_views_lie_within_their_memory(device):
    """At the end of the storage, where a check that counts from its beginning would pass them."""
    base = torch.randn(3 * 8 * 16 + 4, device=device)
    call, tensors = entry_points()["packed linear"]
    tensors = {name: t.to(device) for name, t in tensors.items()}
    weight = base[4:].view(3, 8, 16)
    want = call(tensors | {"weight": weight.clone()})
    assert torch.equal(call(tensors | {"weight": weight}), want)
    base.untyped_storage().resize_(base.untyped_storage().nbytes() - 4)
    with pytest.raises(ValueError, match="weight has a storage of 1548 bytes, must have 1552; it"):
        call(tensors | {"weight": weight})
