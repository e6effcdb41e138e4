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
])
def test_numbers_on_the_host_that_are_refused(device, layer, splits, error, text):
    name, call = layer
    with pytest.raises(error, match=text.format(name)):
        call(draw(ROWS, K, device=device), splits)


@pytest.mark.parametrize("offsets", [[0, 2, 1, 6], [0, 2, 4, 7], [-1, 2, 4, 6]])
def test_offsets_of_the_caller_on_the_host(layer, offsets):
    name, call = layer
    plain = torch.tensor(offsets, dtype=torch.int32)
    for given in (plain, torch.nn.Parameter(plain, False)):
        with pytest.raises(ValueError, match=rf"{name}.offsets is \[.*\], must ascend from 0 "
                           "or more to 6 at most"):
            call(draw(ROWS, K), cadre.Offsets(given))


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


FUNCTIONS = {
    "permute": lambda at, where: cadre.permute(draw(3, K), at, where.row_of, where.slot_of),
    "combine": lambda at, where: cadre.combine(draw(ROWS, K), at, where.row_of, where.slot_of),
    "activation": lambda at, where: cadre.activation(draw(ROWS, K), at),
    "bias_grad": lambda at, where: cadre.bias_grad(draw(ROWS, K), at),
    "grouped_gemm": lambda at, where: cadre.grouped_gemm(draw(ROWS, K), draw(E, N, K), at),
    "wgrad": lambda at, where: cadre.grouped_gemm(draw(ROWS, N), draw(ROWS, K), at, "wgrad"),
    "quantize": lambda at, where: cadre.quantize(draw(ROWS, K), at, "fp8_row"),
    "dequantize": lambda at, where: cadre.dequantize(
        cadre.quantize(draw(ROWS, K), where, "fp8_row"), at, "fp8_row", shape=(ROWS, K)),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_offsets_of_functions_on_the_host(name):
    """As of layers."""
    where = cadre.offsets_of_routing(torch.tensor([[0, 1], [2, 0], [1, 2]]), E, ROWS)
    call = FUNCTIONS[name]
    for good in (where.offsets, cadre.Offsets(where.offsets), where):
        if good is not where or name not in ("permute", "combine"):
            call(good, where)
    for numbers, text in (([0, 4, 2, 6], "is .*, must ascend from 0 or more to 6 at most"),
                          ([0, 2, 4, 7], "is .*, must ascend from 0 or more to 6 at most"),
                          ([-1, 2, 4, 6], "is .*, must ascend from 0 or more to 6 at most"),
                          ([1, 2, 4, 6], "begins with 1, must begin with 0; the rows before")):
        bare = torch.tensor(numbers, dtype=torch.int32)
        for given in (bare, cadre.Offsets(bare)):
            with pytest.raises(ValueError, match=f"^offsets {text}"):
                call(given, where)
    more = cadre.offsets(torch.tensor([1, 2, ROWS]), "counts", ROWS + 3)
    with pytest.raises(ValueError, match="^offsets ends with 9, must end with 6 at most; the inp"):
        call(more, where)


@pytest.mark.parametrize("missing", ["all", "a byte"])
def test_numbers_whose_memory_was_freed(layer, missing):
    """Nobody looks beyond it."""
    _, call = layer
    for numbers, within in ((torch.tensor([2, 2, 2]), False),
                            (torch.tensor([0, 2, 4, 6], dtype=torch.int32), True)):
        memory = numbers.untyped_storage()
        memory.resize_(0 if missing == "all" else memory.nbytes() - 1)
        with pytest.raises(ValueError, match="has a storage of .* bytes, must have"):
            call(draw(ROWS, K), cadre.Offsets(numbers) if within else numbers)


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


def test_offsets_for_ends_that_begin_later():
    """The rows before would be the first group's."""
    later = cadre.Offsets(torch.tensor([1, 2, 4, 6], dtype=torch.int32))
    for form, shapes in FORMS.items():
        with pytest.raises(ValueError, match="^grouped_mm: offs.offsets begins with 1, must beg"):
            cadre.grouped_mm(*(draw(*shape) for shape in shapes), offs=later)
    codes = [draw(*shape).to(torch.float8_e4m3fn) for shape in ((ROWS, K), (E, N, K))]
    with pytest.raises(ValueError, match="^scaled_grouped_mm: offs.offsets begins with 1, must"):
        cadre.scaled_grouped_mm(codes[0], codes[1].mT, torch.ones(ROWS), torch.ones(E, N), later)


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


@pytest.mark.parametrize("name", LAYERS)
def test_a_list_is_on_the_host_whatever_torch_takes_for_new_tensors(name):
    x = draw(ROWS, K)
    want = LAYERS[name](x, [1, 2, 3]).shape
    layer = {"m_splits": cadre.GroupedLinear, "counts": cadre.GroupedMLP}.get(name)
    if layer is not None:
        made = layer(E, K, N, device="cpu")
        with torch.device("meta"):
            assert made(x, [1, 2, 3]).device.type == "cpu"
    assert LAYERS[name](x, iter([1, 2, 3])).shape == want


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pinned_counts_that_the_caller_changes_behind_the_call(dtype):
    """The copy to the device waits for what runs there: the caller may be faster."""
    x, counts = draw(ROWS, K, device="cuda"), torch.tensor([1, 2, 3], dtype=dtype).pin_memory()
    layer = cadre.GroupedLinear(E, K, N, device="cuda")
    want = layer(x, counts.clone())
    torch.cuda._sleep(10**8)
    got = layer(x, counts)
    counts.copy_(torch.tensor([6, 0, 0]))
    assert torch.equal(got, want)


@pytest.mark.parametrize("layer", [
    lambda: cadre.GroupedLinear(3, 16, 8, device="cpu"),
    lambda: cadre.GroupedMLP(3, 16, 8, device="cpu"),
    lambda: cadre.ops.Sequential(cadre.ops.GroupedLinear(3, 16, 8, device="cpu"))])
def test_counts_of_tolist_are_one_graph(layer):
    module = layer()
    compiled = torch.compile(lambda x, counts: module(x, counts.tolist()), fullgraph=True,
                             backend="aot_eager")
    for counts in ([4, 0, 3], [1, 5, 1]):
        x = torch.randn(9, 16)
        assert torch.equal(compiled(x, torch.tensor(counts)), module(x, counts))


def test_factors_may_have_any_stride():
    weights = torch.rand(9, 2)
    mlp = cadre.GroupedMLP(3, 16, 8, device="cpu")
    linear = cadre.GroupedLinear(3, 16, 8, scale_bias=True, device="cpu")
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    x, counts = torch.randn(9, 16), [4, 0, 3]
    for factor in (weights[:, 0], weights[0, :1].expand(9)):
        whole = factor.contiguous()
        assert torch.equal(mlp(x, counts, factor), mlp(x, counts, whole))
        assert torch.equal(linear(x, counts, bias_scale=factor),
                           linear(x, counts, bias_scale=whole))


def test_wrong_constants_are_seen_by_the_compiler():
    linear = cadre.GroupedLinear(3, 16, 8, device="cpu")
    compiled = torch.compile(linear, backend="aot_eager")
    with pytest.raises(Exception, match="must be 0 or more each, and 9 at most together"):
        compiled(torch.randn(9, 16), [4, 0, 30])
