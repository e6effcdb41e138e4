"""Counts and ends that are wrong: what the host can see of them is an error that names the caller's
argument, and nobody waits for a device to look."""

import numpy as np
import pytest
import torch
from conftest import draw

import cadre

E, K, N, ROWS = 3, 16, 8, 6


def linear(x, splits):
    return cadre.GroupedLinear(E, K, N, device=x.device)(x, splits)


def mlp(x, splits):
    return cadre.GroupedMLP(E, K, N, device=x.device)(x, splits)


def row(x, splits):
    return cadre.ops.Sequential(cadre.ops.GroupedLinear(E, K, N, device=x.device))(x, splits)


LAYERS = {"m_splits": linear, "counts": mlp, "split_sizes": row}


class Numbers(torch.Tensor):
    """Has its numbers in memory as any tensor on the host."""


@pytest.fixture(params=list(LAYERS))
def layer(request):
    """(what the layer calls the rows of each expert, a call of it)."""
    return request.param, LAYERS[request.param]


@pytest.mark.parametrize(("splits", "error", "text"), [
    ([1.9, 2.1, 2.0], TypeError, "{} has 1.9, a float, must be ints"),
    ([2, True, 2], TypeError, "{} has True, a bool, must be ints"),
    ("222", TypeError, r"{} is a str, must be 3 ints, a tensor \[3\] of an integer type"),
    ({1: 0, 2: 0, 3: 0}, TypeError, "{} is a dict, must be 3 ints"),
    ({1, 2, 3}, TypeError, "{} is a set, must be 3 ints"),
    ([torch.tensor(True)] * 3, TypeError, r"{} has tensor\(True\), a Tensor, must be ints"),
    ([torch.tensor(2.0)] * 3, TypeError, r"{} has tensor\(2.\), a Tensor, must be ints"),
    (np.array([2.0, 2.0, 2.0]), TypeError, "{} has np.float64"),
    (np.array([True, True, True]), TypeError, "{} has np.True_"),
    (np.array([[2, 2, 2]]), TypeError, "{} has array"),
    (cadre.Offsets([0, 2, 4, 6]), TypeError, "{}.offsets is a list, must be a tensor of torch.in"),
    (None, TypeError, "{} is a NoneType, must be 3 ints"),
    (6, TypeError, "{} is an int, must be 3 ints"),
    ([1, 2], ValueError, r"{} has shape \[2\], must be \[3\]"),
    ([2, -1, 2], ValueError, r"{} is \[2, -1, 2\], must be 0 or more each, and 6 at most together"),
    ([2**70, 0, 0], ValueError, r"{} is \[1180591620717411303424, 0, 0\], must be 0 or more each"),
    ([2, 4, 6], ValueError, r"so many rows; of ends cadre.offsets\(ends, 'ends', rows\) makes"),
    (torch.tensor([2, -1, 2]), ValueError, r"{} is \[2, -1, 2\], must be 0 or more each, and 6 at"),
    (torch.tensor([2, 3, 2], dtype=torch.int32), ValueError, r"{} is \[2, 3, 2\], must be 0 or"),
    (torch.tensor([2, 3, 2], dtype=torch.uint8), ValueError, r"{} is \[2, 3, 2\], must be 0 or"),
    (torch.tensor([2, 4, 6]), ValueError, r"so many rows; of ends cadre.offsets\(ends, 'ends'"),
    (torch.tensor([2**62, 2**62, 2**62]), ValueError, "must be 0 or more each, and 6 at most"),
    (torch.tensor([2.0, 2.0, 2.0]), TypeError, "{} is torch.float32, must be of an integer type"),
    (torch.tensor([2, -1, 2]).as_subclass(Numbers), ValueError, "must be 0 or more each, and 6 at"),
    (torch.nn.Parameter(torch.tensor([2, 3, 2]), False), ValueError, "must be 0 or more each"),
    (cadre.Offsets(torch.nn.Parameter(torch.tensor([0, 2, 1, 6], dtype=torch.int32), False)),
     ValueError, "must ascend from 0 or more to 6 at most"),
])
def test_numbers_on_the_host_that_are_refused(device, layer, splits, error, text):
    name, call = layer
    with pytest.raises(error, match=text.format(name)):
        call(draw(ROWS, K, device=device), splits)


@pytest.mark.parametrize("offsets", [[0, 2, 1, 6], [0, 2, 4, 7], [-1, 2, 4, 6]])
def test_offsets_of_the_caller_on_the_host(layer, offsets):
    name, call = layer
    with pytest.raises(ValueError, match=rf"{name}.offsets is \[.*\], must ascend from 0 or more to"
                       " 6 at most"):
        call(draw(ROWS, K), cadre.Offsets(torch.tensor(offsets, dtype=torch.int32)))


def test_offsets_of_the_caller_that_begin_later(layer):
    """The rows before would have no result: whatever the memory held."""
    name, call = layer
    with pytest.raises(ValueError, match=rf"^{name}.offsets begins with 1, must begin with 0; "):
        call(draw(ROWS, K), cadre.Offsets(torch.tensor([1, 2, 4, 6], dtype=torch.int32)))


def test_offsets_of_more_rows(layer):
    """Such as those of another batch: the last experts would have fewer rows."""
    name, call = layer
    ready = cadre.offsets(torch.tensor([1, 2, ROWS]), "counts", ROWS + 3)
    with pytest.raises(ValueError, match=f"^{name}.offsets ends with 9, must end with 6 at"):
        call(draw(ROWS, K), ready)


def test_numbers_that_are_right(layer):
    _, call = layer
    x = draw(ROWS, K)
    ready = cadre.offsets(torch.tensor([1, 0, 4]), "counts", ROWS)
    for splits in ([1, 0, 4], (1, 0, 4), torch.tensor([1, 0, 4]), ready,
                   [torch.tensor(1), torch.tensor(0), torch.tensor(4)],
                   torch.tensor([1, 0, 4], dtype=torch.int8), cadre.Offsets(ready.offsets)):
        assert torch.all(call(x, splits)[5] == 0)


def test_a_long_list_is_told_short():
    layer = cadre.GroupedLinear(100, K, N, device="cpu")
    with pytest.raises(ValueError, match=r"m_splits is \[1(, 1){7}, \.\.\.(, 1){8}\], must be"):
        layer(draw(ROWS, K), [1] * 100)


FORMS = {"rows": ((ROWS, K), (E, K, N)), "columns": ((E, N, K), (K, ROWS)),
         "sums": ((K, ROWS), (ROWS, N))}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(("offs", "error", "text"), [
    ([2, 4, 7], ValueError, r"offs is \[2, 4, 7\], must ascend from 0 or more to 6 at most"),
    ([4, 2, 6], ValueError, r"offs is \[4, 2, 6\], must ascend"),
    ([-4, 2, 6], ValueError, r"offs is \[-4, 2, 6\], must ascend"),
])
def test_ends_on_the_host_that_are_refused(form, offs, error, text):
    a, b = (draw(*shape) for shape in FORMS[form])
    with pytest.raises(error, match=f"grouped_mm: {text}"):
        cadre.grouped_mm(a, b, offs=torch.tensor(offs, dtype=torch.int32))


def test_ends_that_are_no_int32(device):
    a, b = (draw(*shape, device=device) for shape in FORMS["rows"])
    with pytest.raises(TypeError, match="offs is torch.int64, must be a tensor of torch.int32"):
        cadre.grouped_mm(a, b, offs=torch.tensor([2, 4, 6], device=device))
    with pytest.raises(TypeError, match="offs is a list, must be a tensor of torch.int32"):
        cadre.grouped_mm(a, b, offs=[2, 4, 6])
    with pytest.raises(ValueError, match="offs is on meta, must be on"):
        cadre.grouped_mm(a, b, offs=torch.tensor([2, 4, 6], dtype=torch.int32, device="meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nobody_waits_to_look(layer):
    _, call = layer
    x, counts = draw(ROWS, K, device="cuda"), torch.tensor([2, 4, 6], device="cuda")
    a, b = (draw(*shape, device="cuda") for shape in FORMS["rows"])
    ends = torch.tensor([2, 4, 7], dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(x, counts)
        cadre.grouped_mm(a, b, offs=ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
