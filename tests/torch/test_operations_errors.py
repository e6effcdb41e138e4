"""The messages of the operations, each provoked; grouped_gemm and grouped_mm have theirs."""

import pytest
import torch

import cadre
from conftest import draw, offsets_of

ops = torch.ops.cadre
T, TOP_K, E, R, H = 4, 2, 3, 9, 6


def i32(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def f32(*shape):
    return torch.ones(*shape)


MAP = dict(offsets=i32(E + 1), row_of=i32(T, TOP_K), slot_of=i32(R))
GIVEN = {
    "offsets": dict(source=i32(E), kind="counts", rows=R),
    "offsets.out": dict(source=i32(E), kind="counts", rows=R, offsets=i32(E + 1), status=i32(1)),
    "offsets_of_routing": dict(experts=i32(T, TOP_K), num_experts=E, rows=R),
    "offsets_of_routing.out": dict(experts=i32(T, TOP_K), num_experts=E, rows=R,
                                   offsets=i32(E + 1), row_of=i32(T, TOP_K), slot_of=i32(R),
                                   status=i32(1)),
    "routing": dict(logits=f32(T, E), top_k=TOP_K),
    "routing.out": dict(logits=f32(T, E), top_k=TOP_K, experts=i32(T, TOP_K),
                        prob=f32(T, TOP_K), scores=f32(T, E)),
    "routing_backward": dict(logits=f32(T, E), experts=i32(T, TOP_K), dprob=f32(T, TOP_K),
                             dscores=None, top_k=TOP_K),
    "routing_backward.out": dict(logits=f32(T, E), experts=i32(T, TOP_K), dprob=None, dscores=None,
                                 top_k=TOP_K, dlogits=f32(T, E)),
    "permute": dict(tokens=f32(T, H), **MAP),
    "permute.out": dict(tokens=f32(T, H), **MAP, prob=f32(T, TOP_K), rows=f32(R, H),
                        row_prob=f32(R)),
    "permute_backward": dict(drows=f32(R, H), drow_prob=None, offsets=i32(E + 1),
                             row_of=i32(T, TOP_K)),
    "combine": dict(rows=f32(R, H), **MAP),
    "combine_backward": dict(dtokens=f32(T, H), rows=f32(R, H), **MAP, prob=f32(T, TOP_K),
                             want_dprob=True),
    "activation": dict(z=f32(R, H), offsets=i32(E + 1), prob=None, activation="swiglu"),
    "activation_backward": dict(dh=f32(R, 3), z=f32(R, H), offsets=i32(E + 1), prob=f32(R),
                                activation="swiglu"),
    "bias_grad": dict(dy=f32(R, H), offsets=i32(E + 1)),
    "bias_grad.out": dict(dy=f32(R, H), offsets=i32(E + 1), dbias=f32(E, H), dbias_scale=f32(0)),
    "quantize": dict(source=f32(R, H), offsets=i32(E + 1), format="bf16", axis="along_k"),
    "quantize.out": dict(source=f32(R, H), offsets=i32(E + 1), format="bf16", axis="along_k",
                         codes=f32(R, H).bfloat16(), scales=f32(0), expert_scale=f32(0)),
    "dequantize": dict(codes=f32(R, H).bfloat16(), scales=f32(0), expert_scale=f32(0),
                       offsets=i32(E + 1), format="bf16", axis="along_k", shape=[R, H],
                       dtype=torch.float32),
}

FAULTS = [
    ("offsets", dict(kind="sums"), "kind is sums, must be counts or ends"),
    ("offsets", dict(source=i32(2, 2)), r"source has shape \[2, 2\], must be \[E\]"),
    ("offsets", dict(source=f32(E)), "source is torch.float32, must be torch.int32 or torch.int64"),
    ("offsets", dict(source=i32(0)), "E is 0, must be 1 or more"),
    ("offsets", dict(rows=-1), "R is -1, must be 0 or more"),
    ("offsets.out", dict(offsets=i32(E)), r"offsets has shape \[3\], must be \[4\]"),
    ("offsets.out", dict(status=f32(1)), "status is torch.float32, must be torch.int32"),
    ("offsets_of_routing", dict(experts=i32(T)), r"experts has shape \[4\], must be \[T, top_k\]"),
    ("offsets_of_routing", dict(num_experts=0), "num_experts is 0, must be 1 or more"),
    ("offsets_of_routing", dict(num_experts=2**32 + 1), "num_experts is 4294967297, must be"),
    ("offsets_of_routing", dict(rows=-1), "rows is -1, must be 0 or more"),
    ("offsets_of_routing", dict(experts=f32(T, TOP_K)),
     "experts is torch.float32, must be torch.int32 or torch.int64"),
    ("offsets_of_routing.out", dict(row_of=i32(T)), r"row_of has shape \[4\], must be \[4, 2\]"),
    ("offsets_of_routing.out", dict(slot_of=i32(T)), r"slot_of has shape \[4\], must be \[9\]"),
    ("routing", dict(logits=f32(T)), r"logits has shape \[4\], must be \[T, E\]"),
    ("routing", dict(top_k=0), "top_k is 0, must be 1 or more"),
    ("routing", dict(top_k=4), "top_k is 4, must be at most E, 3"),
    ("routing", dict(top_k=2**32 + 1), "top_k is 4294967297, must be below 2.31"),
    ("routing", dict(groups=2**32 + 1), "groups is 4294967297, must be below 2.31"),
    ("routing", dict(group_top_k=2**32 + 1), "group_top_k is 4294967297, must be below 2.31"),
    ("routing", dict(score="max"), "score"),
    ("routing", dict(logits=f32(T, E).double()), "logits is torch.float64, must be torch.float32"),
    ("routing", dict(expert_bias=f32(2)), r"expert_bias has shape \[2\], must be \[3\]"),
    ("routing", dict(groups=2), "groups is 2, must divide E, 3"),
    ("routing.out", dict(experts=i32(T)), r"experts has shape \[4\], must be \[4, 2\]"),
    ("routing.out", dict(prob=f32(T, TOP_K).half()), "prob is torch.float16, must be torch."),
    ("routing_backward", dict(experts=i32(T)), r"experts has shape \[4\], must be \[4, 2\]"),
    ("routing_backward", dict(dscores=f32(T)), r"dscores has shape \[4\], must be \[4, 3\]"),
    ("routing_backward.out", dict(dlogits=f32(T, 2)), r"dlogits is f32\[4, 2\], must be"),
    ("permute", dict(tokens=f32(T)), r"tokens has shape \[4\], must have 2 dimensions"),
    ("permute", dict(tokens=f32(T + 1, H)), r"tokens is f32\[5, 6\], must be f32\[4, 6\]"),
    ("permute", dict(row_of=i32(T)), r"row_of has shape \[4\], must be \[T, top_k\]"),
    ("permute", dict(slot_of=i32(3, 3)), r"slot_of has shape \[3, 3\], must be \[9\]"),
    ("permute", dict(slot_of=i32(R).long()), "slot_of is torch.int64, must be torch.int32"),
    ("permute", dict(offsets=i32(1)), r"offsets has shape \[1\], must be \[E \+ 1\]"),
    ("permute", dict(offsets=f32(E)), "offsets is torch.float32, must be torch.int32"),
    ("permute", dict(prob=f32(T)), r"prob has shape \[4\], must be \[4, 2\]"),
    ("permute", dict(prob=f32(T, TOP_K).half()), "prob is torch.float16, must be torch.float32"),
    ("permute.out", dict(rows=f32(R, H).half()), "rows is torch.float16, must be torch.float32"),
    ("permute.out", dict(rows=f32(H, R).t()), "must have rows of stride 1 that do not overlap"),
    ("permute.out", dict(row_prob=f32(3)), r"row_prob has shape \[3\], must be \[9\]"),
    ("permute_backward", dict(drow_prob=f32(3)), r"drow_prob has shape \[3\], must be \[9\]"),
    ("permute_backward", dict(drows=f32(R)), r"drows has shape \[9\], must have 2 dimensions"),
    ("combine", dict(rows=f32(R)), r"rows has shape \[9\], must have 2 dimensions"),
    ("combine", dict(rows=f32(3, H)), "slot_of has 9 entries, must have 3, one for each row"),
    ("combine_backward", dict(rows=None), "want_dprob is true, must be false; it is made from"),
    ("combine_backward", dict(rows=f32(R, 2)), r"y is f32\[9, 2\], must be f32\[9, 6\]"),
    ("combine_backward", dict(dtokens=f32(T)), r"dtokens has shape \[4\], must have 2"),
    ("activation", dict(activation="tanh"), "swiglu"),
    ("activation", dict(z=f32(R)), r"z has shape \[9\], must be \[R, 2F\] for a gated"),
    ("activation", dict(z=f32(R, 5)), r"z has shape \[9, 5\], must have an even number of col"),
    ("activation", dict(prob=f32(2)), r"prob has shape \[2\], must be \[9\]"),
    ("activation", dict(z=f32(R, H).int()), "z is torch.int32, must be torch.float32, "),
    ("activation_backward", dict(dh=f32(R, 4)), r"dh is f32\[9, 4\], must be f32\[9, 3\]"),
    ("bias_grad", dict(dy=f32(R)), r"dy has shape \[9\], must be \[R, N\]"),
    ("bias_grad", dict(bias=f32(E, H)), "bias is given, must be None; the gradient of bias_scale"),
    ("bias_grad", dict(bias_scale=f32(R)), "bias is None, must be given"),
    ("bias_grad.out", dict(dbias=f32(E, 2)), r"dbias is f32\[3, 2\], must be f32\[3, 6\]"),
    ("quantize", dict(axis="rows"), "axis is 'rows', must be along_k or along_rows"),
    ("quantize", dict(format="fp6"), "nvfp4"),
    ("quantize", dict(source=f32(R)), r"source has 1 dimensions, must have 2"),
    ("quantize", dict(offsets=None), r"source has 2 dimensions, must have 3; rows \[R, C\] come"),
    ("quantize", dict(format="nvfp4:sr"), "rng is null, must point to 2 elements"),
    ("quantize", dict(rng=f32(2)), "rng is torch.float32, must be torch.int64"),
    ("quantize", dict(rng=i32(3)), r"rng has shape \[3\], must be \[2\]"),
    ("quantize.out", dict(codes=f32(R, H)), "codes is torch.float32, must be torch.bfloat16"),
    ("quantize.out", dict(codes=f32(R, H + 1).bfloat16()),
     r"codes has shape \[9, 7\], must be \[9, 6\], as of bf16\[9, 6\]"),
    ("dequantize", dict(shape=[R, H, 1]), "source has 3 dimensions, must have 2"),
    ("dequantize", dict(shape=[R, H + 1]), "codes has shape .*, must be \\[9, 7\\], as of bf16"),
    ("dequantize", dict(dtype=torch.int32), "dtype is torch.int32, must be torch.float32, "),
]


def run(name, given, device):
    op, _, overload = name.partition(".")
    outs = []
    if overload:
        schema = getattr(ops, op).out._schema
        outs = [a.name for a in schema.arguments if a.alias_info is not None]
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    call = getattr(getattr(ops, op), overload or "default")
    return call(**moved), outs


@pytest.mark.parametrize("name", GIVEN)
def test_nothing_is_wrong_without_a_fault(device, name):
    run(name, GIVEN[name], device)


@pytest.mark.parametrize("name,changes,words", FAULTS, ids=[f"{f[0]} {f[2][:30]}" for f in FAULTS])
def test_errors(device, name, changes, words):
    error = TypeError if " is torch." in words else ValueError
    with pytest.raises(error, match=words):
        run(name, GIVEN[name] | changes, device)


def test_tensors_that_are_elsewhere(device):
    if device.type == "cpu":
        pytest.skip("there is no other device")
    x, w = f32(R, H).to(device), f32(E, 4, H).to(device)
    for call in (lambda: cadre.activation(x, i32(E + 1)), lambda: cadre.grouped_gemm(x, w, i32(4))):
        with pytest.raises(ValueError, match="offsets is on cpu, must be on cuda:0"):
            call()
    with pytest.raises(ValueError, match="rhs is on cpu, must be on cuda:0"):
        cadre.grouped_gemm(x, w.cpu(), offsets_of([2, 3, 1], device))


def test_outputs_count_as_written(device):
    """Autograd sees that a tensor it kept was overwritten."""
    z = draw(5, 6, device=device, grad=True)
    kept = draw(5, 3, device=device)
    loss = (cadre.activation(z, offsets_of([2, 3], device)) * kept).sum()
    ops.activation.out(z.detach(), offsets_of([2, 3], device), None, "swiglu", h=kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_odd_strides_are_copied(device):
    """Inputs may lie anyhow; the result is that of a contiguous copy."""
    offsets = offsets_of([2, 3], device)
    z = draw(12, 5, device=device).t()
    prob = draw(5, 2, device=device)[:, 0]
    assert torch.equal(cadre.activation(z, offsets, prob),
                       cadre.activation(z.contiguous(), offsets, prob.contiguous()))
    logits = draw(8, 5, device=device).t()
    assert torch.equal(cadre.routing(logits, 2).prob, cadre.routing(logits.contiguous(), 2).prob)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: cadre.offsets([2, 3], "counts", 5), "offsets: source is a list, must be a Tensor"),
    (lambda: cadre.offsets(i32(E), "counts", 4.5), "offsets: rows is a float, must be an int"),
    (lambda: cadre.permute(f32(T, H), i32(E + 1), i32(T, TOP_K), i32(R), 0.5),
     r"permute: prob is a float, must be an Optional\[Tensor\]"),
    (lambda: cadre.grouped_gemm(f32(R, H), f32(E, 4, H), cadre.Offsets(3)),
     "grouped_gemm: offsets is an int, must be a Tensor"),
    (lambda: cadre.permute(f32(T, H), cadre.Offsets(i32(E + 1))),
     "row_of is None, must be a tensor; only what offsets_of_routing gives has it"),
    (lambda: cadre.combine(f32(R, H), i32(E + 1), i32(T, TOP_K)), "slot_of is None, must be a ten"),
    (lambda: cadre.quantize(f32(R, H), i32(E + 1), None), "quantize: format is a NoneType, must"),
])
def test_types_that_are_refused(call, words):
    with pytest.raises(TypeError, match=f"^{words}"):
        call()


def test_errors_inside_of_an_operator_stay_what_they_are():
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        cadre.dequantize(cadre.Quantized(f32(1), f32(1), f32(1)), i32(2), "bf16",
                         shape=[2**40, 2**10])
