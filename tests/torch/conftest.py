"""What the tests of the PyTorch door share: the device, adversarial counts, random data, graphs,
bounds."""

import pytest
import torch
from torch.utils._pytree import tree_flatten_with_path, tree_map, tree_unflatten

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request) -> torch.device:
    """Every device of this machine; the CPU always."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Processes that exchange rows."""
    from expert_parallel_cases import WORLD
    from processes import Processes
    processes = Processes(tmp_path_factory.mktemp("ranks"), WORLD)
    yield processes
    processes.finish()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20240607)


# Rows of each expert, and how many rows the buffer has beyond them. Each case has E = 5.
COUNTS = {
    "even": ([4, 4, 4, 4, 4], 0),
    "ragged": ([3, 8, 1, 6, 2], 0),
    "tail": ([3, 8, 1, 6, 2], 5),
    "empty_first": ([0, 7, 3, 5, 2], 2),
    "empty_middle": ([6, 0, 0, 9, 1], 0),
    "empty_last": ([5, 2, 9, 0, 0], 3),
    "all_in_one": ([0, 0, 17, 0, 0], 0),
    "none": ([0, 0, 0, 0, 0], 6),
    "no_rows": ([0, 0, 0, 0, 0], 0),
}


@pytest.fixture(params=list(COUNTS))
def case(request) -> tuple[list[int], int]:
    """(counts of five experts, rows of the buffer): empty first, middle, last, all in one, none,
    a tail, no rows at all."""
    counts, tail = COUNTS[request.param]
    return counts, sum(counts) + tail


def offsets_of(counts: list[int], device) -> torch.Tensor:
    """Exclusive prefix sums int32 [E + 1]."""
    return torch.tensor([0] + counts, dtype=torch.int32).cumsum(0).int().to(device)


def experts_of_rows(counts: list[int], device) -> torch.Tensor:
    """The expert of every row that has one, int64 [sum of counts]."""
    return torch.repeat_interleave(torch.tensor(counts)).to(device)


def slices_of(counts: list[int]) -> list[slice]:
    """The rows of every expert."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts)]


def draw(*shape: int, dtype=torch.float32, device="cpu", grad: bool = False) -> torch.Tensor:
    """Normal numbers; on every device the same."""
    return torch.randn(*shape).to(dtype).to(device).requires_grad_(grad)


def poisoned(*shape: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    """What an output looks like before it is written: NaN, or -77 for integers."""
    fill = float("nan") if dtype.is_floating_point else -77
    return torch.full(shape, fill, dtype=dtype, device=device)


def draw_routing(tokens: int, top_k: int, experts: int, device, dropped: float = 0.2):
    """Distinct experts of every token int64 [T, top_k], some of them -1; expert 1 gets none."""
    scores = torch.rand(tokens, experts)
    scores[:, 1 % experts] = -1.0 if experts > top_k else 1.0
    chosen = scores.topk(top_k, dim=1).indices
    chosen[torch.rand(tokens, top_k) < dropped] = -1
    return chosen.to(device)


def captured(run, forget=lambda: None):
    """A graph of `run`, which runs twice before on another stream, as capturing wants."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


# The relative size of one rounding.
STEP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def assert_close(got: torch.Tensor, want: torch.Tensor, *, steps: float = 1,
                 terms: int = 1) -> None:
    """`want` in fp64 or fp32. Each element may differ by `steps` roundings of got's type of its own
    size, and by fp32 roundings of a sum of `terms` parts as large as the largest element."""
    assert got.shape == want.shape, f"shape is {tuple(got.shape)}, must be {tuple(want.shape)}"
    if got.numel() == 0:
        return
    got64, want64 = got.detach().double().cpu(), want.detach().double().cpu()
    assert torch.isfinite(got64).all(), "holds NaN or infinity"
    largest = want64.abs().max()
    bound = steps * STEP[got.dtype] * want64.abs() + 4 * terms * 2.0**-23 * largest
    worst = (got64 - want64).abs() - bound
    at = int(worst.argmax())
    assert worst.max() <= 0, (f"element {at} is {got64.flatten()[at]:.8g}, must be "
                              f"{want64.flatten()[at]:.8g} within {bound.flatten()[at]:.3g}")


def deferred_dw(layer: str, *args, **options) -> list:
    """What the operator LAYER_wgrad.out writes into tensors like the weights, which hold NaN."""
    op = getattr(torch.ops.cadre, f"{layer}_wgrad").out
    names = [a.name for a in op._schema.arguments]
    given, written = dict(zip(names, args)) | options, {}
    for name in names:
        weight = given.get(name[1:]) if name.startswith("d") else None  # dweight1 is of weight1
        if weight is not None:
            written[name] = tree_map(lambda t: torch.full_like(t, float("nan")), weight)
    op(*args, **options, **written)
    return list(written.values())


def assert_versions_grow(op, args, kwargs) -> None:
    """Autograd sees that the operator writes what its schema says."""
    written = [t for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
               for t in (kwargs[a.name] if isinstance(kwargs.get(a.name), list)
                         else [kwargs.get(a.name)])
               if t is not None]
    assert written
    before = [t._version for t in written]
    op(*args, **kwargs)
    assert all(t._version > version for t, version in zip(written, before))


def assert_outputs_lie_apart(op, args, kwargs) -> None:
    """One that shares memory with any other tensor of the call is refused."""
    schema = op._schema.arguments
    paths, spec = tree_flatten_with_path(dict(zip((a.name for a in schema), args)) | kwargs)
    names, leaves = [path[0].key for path, _ in paths], [leaf for _, leaf in paths]
    written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
    tensors = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.numel()]
    pairs = [(i, j) for i in tensors for j in tensors
             if names[i] in written and i != j and names[j] != "c"]  # c may be out itself
    assert pairs
    for pair in pairs:
        memory = torch.zeros(max(leaves[at].nbytes for at in pair), dtype=torch.uint8,
                             device=leaves[pair[0]].device)
        shared = list(leaves)
        for at in pair:
            like = leaves[at]
            shared[at] = memory[:like.nbytes].view(like.dtype).view(like.shape)
        with pytest.raises(ValueError, match=f"({names[pair[0]]}|{names[pair[1]]}).* shares mem"):
            op(**tree_unflatten(shared, spec))


def assert_types_are_told(op, args, kwargs) -> None:
    """An output of another type is one that the operator takes, or an error that names the type, or
    the problem that no kernel of a GPU takes."""
    for a in op._schema.arguments:
        if a.alias_info is None or not a.alias_info.is_write or kwargs.get(a.name) is None:
            continue
        for other in (torch.float16, torch.float64, torch.int64):
            given = tree_map(lambda t: t.to(other), kwargs[a.name])
            try:
                op(*args, **kwargs | {a.name: given})
            except TypeError as error:
                assert str(other) in str(error)
            except NotImplementedError as error:
                assert given.is_cuda and "no implementation on sm_" in str(error)


def assert_seen(got: torch.Tensor) -> None:
    """A comparison of zeros would prove nothing."""
    assert got.numel() == 0 or got.detach().abs().max() > 0, "all elements are zero"
