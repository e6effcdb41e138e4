"""torch.library.opcheck of every operator and overload: schema, autograd, fake kernels, tracing."""

import pytest
import torch

import cadre  # noqa: F401
from conftest import (assert_outputs_lie_apart, assert_types_are_told, assert_versions_grow, draw,
                      draw_routing, offsets_of, poisoned)

ops = torch.ops.cadre
T, TOP_K, E, R, H = 7, 2, 3, 16, 6


def samples(device):
    """For every operator, and every overload, arguments and keywords."""
    def f(*shape, grad=False):
        return draw(*shape, device=device, grad=grad)

    def blank(*shape, dtype=torch.float32):
        return poisoned(*shape, dtype=dtype, device=device)

    def whole(*shape):
        return blank(*shape, dtype=torch.int32)

    chosen = draw_routing(T, TOP_K, E, device)
    map_ = [t.clone() for t in ops.offsets_of_routing(chosen, E, R)[:3]]
    offsets = offsets_of([5, 0, 8], device)
    counts = torch.tensor([5, 0, 8], device=device)
    w, ws = f(E, 4, H, grad=True), [f(4, H, grad=True) for _ in range(E)]
    logits = f(T, E, grad=True)
    experts = ops.routing(logits.detach(), TOP_K)[0]
    prob = torch.rand(T, TOP_K, device=device, requires_grad=True)
    plain = dict(device=device)
    yield ops.offsets.default, (counts, "counts", R), {}
    yield ops.offsets.out, (counts, "ends", R), dict(offsets=whole(E + 1), status=whole(1))
    yield ops.offsets_of_routing.default, (chosen, E, R), {}
    yield ops.offsets_of_routing.out, (chosen, E, R), dict(
        offsets=whole(E + 1), row_of=whole(T, TOP_K), slot_of=whole(R), status=whole(1))
    yield ops.routing.default, (logits, TOP_K, "sigmoid", True, 2.0, f(E)), {}
    yield ops.routing.out, (f(T, E), TOP_K), dict(
        experts=whole(T, TOP_K), prob=blank(T, TOP_K), scores=blank(T, E))
    yield ops.routing_backward.default, (f(T, E), experts, f(T, TOP_K), None, TOP_K), {}
    yield ops.routing_backward.out, (f(T, E), experts, f(T, TOP_K), f(T, E), TOP_K), dict(
        dlogits=blank(T, E))
    yield ops.permute.default, (f(T, H, grad=True), *map_, prob), {}
    yield ops.permute.default, (f(T, H, grad=True), *map_), {}
    yield ops.permute.out, (f(T, H), *map_, prob.detach()), dict(rows=blank(R, H),
                                                                row_prob=blank(R))
    yield ops.permute_backward.default, (f(R, H), f(R), *map_[:2]), {}
    yield ops.permute_backward.default, (f(R, H), None, *map_[:2]), {}
    yield ops.permute_backward.out, (f(R, H), f(R), *map_[:2]), dict(
        dtokens=blank(T, H), dprob=blank(T, TOP_K))
    yield ops.combine.default, (f(R, H, grad=True), *map_, prob), {}
    yield ops.combine.default, (f(R, H, grad=True), *map_), {}
    yield ops.combine.out, (f(R, H), *map_, prob.detach()), dict(tokens=blank(T, H))
    yield ops.combine_backward.default, (f(T, H), f(R, H), *map_, prob.detach(), True), {}
    yield ops.combine_backward.default, (f(T, H), None, *map_, prob.detach(), False), {}
    yield ops.combine_backward.out, (f(T, H), f(R, H), *map_, prob.detach(), True), dict(
        drows=blank(R, H), dprob=blank(T, TOP_K))
    row_prob = torch.rand(R, **plain)
    yield ops.activation.default, (f(R, H, grad=True), offsets, row_prob, "swiglu"), {}
    yield ops.activation.default, (f(R, H, grad=True), offsets, None, "relu"), {}
    yield ops.activation.out, (f(R, H), offsets, row_prob, "swiglu"), dict(h=blank(R, H // 2))
    yield ops.activation_backward.default, (f(R, 3), f(R, H), offsets, row_prob, "swiglu"), {}
    yield ops.activation_backward.out, (f(R, 3), f(R, H), offsets, row_prob, "swiglu"), dict(
        dz=blank(R, H), dprob=blank(R))
    yield ops.bias_grad.default, (f(R, H), offsets), dict(dtype=torch.bfloat16)
    yield ops.bias_grad.default, (f(R, H), offsets, f(R), f(E, H)), {}
    yield ops.bias_grad.out, (f(R, H), offsets, f(R), f(E, H)), dict(
        dbias=blank(E, H), dbias_scale=blank(R))
    x, dy = f(R, H, grad=True), f(R, 4, grad=True)
    yield ops.grouped_gemm.default, (x, [w], offsets, "fprop"), dict(
        bias=f(E, 4, grad=True), bias_scale=torch.rand(R, requires_grad=True, **plain), alpha=f(E))
    yield ops.grouped_gemm.default, (x, ws, offsets, "fprop"), dict(bias=f(E, 4, grad=True))
    yield ops.grouped_gemm.default, (x, [f(E, H, 4, grad=True).transpose(1, 2)], offsets,
                                     "fprop"), {}
    yield ops.grouped_gemm.default, (dy, [w], offsets, "dgrad"), dict(out_dtype=torch.bfloat16)
    yield ops.grouped_gemm.default, (dy, [x], offsets, "wgrad"), {}
    yield ops.grouped_gemm.out, (f(R, H), [f(E, 4, H)], offsets, "fprop"), dict(
        beta=f(E), c=f(R, 4), out=[blank(R, 4)])
    yield ops.grouped_gemm.out, (f(R, 4), [f(R, H)], offsets, "wgrad"), dict(
        accumulate="per_expert", accumulate_flags=torch.ones(E, dtype=torch.int32, **plain),
        out=[f(4, H) for _ in range(E)])
    format = "mxfp8" if device.type == "cpu" else "bf16"
    for format, axis in ((format, "along_k"), (format, "along_rows"), ("f16", "along_k")):
        yield ops.quantize.default, (f(R, H), offsets, format, axis), {}
        parts = ops.quantize(f(R, H), offsets, format, axis)
        yield ops.quantize.out, (f(R, H), offsets, format, axis), dict(
            zip(("codes", "scales", "expert_scale"), parts))
        yield ops.dequantize.default, (*parts, offsets, format, axis, [R, H], torch.float32), {}
        yield ops.dequantize.out, (*parts, offsets, format, axis, [R, H]), dict(out=blank(R, H))
    codes = (f(R, 32).to(torch.float8_e4m3fn), f(E, 8, 32).to(torch.float8_e4m3fn).mT, f(R),
             f(E, 8), offsets)
    yield ops.scaled_grouped_mm.default, codes, dict(out_dtype=torch.bfloat16)
    yield ops.scaled_grouped_mm.default, codes, dict(bias=f(E, 8), out_dtype=torch.float32)
    yield ops.scaled_grouped_mm.out, codes, dict(bias=f(E, 8), out=blank(R, 8))
    if device.type == "cpu":
        yield ops.quantize.default, (f(E, 7, 37), None, "nvfp4:2d", "along_rows"), {}
        yield ops.quantize.default, (f(R, 37), offsets, "nvfp4:rht", "along_rows"), {}
        yield ops.quantize.default, (f(R, 37), offsets, "fp8_tensor", "along_k"), {}
        parts = ops.quantize(f(R, 38), offsets, "nvfp4:rht", "along_rows")
        yield ops.dequantize.default, (*parts, offsets, "nvfp4:rht", "along_rows", [R, 38],
                                       torch.float16), {}


NAMES = ["offsets", "offsets_of_routing", "routing", "routing_backward", "permute",
         "permute_backward", "combine", "combine_backward", "activation", "activation_backward",
         "bias_grad", "grouped_gemm", "quantize", "dequantize", "scaled_grouped_mm"]


@pytest.mark.parametrize("overload", ["default", "out"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name, overload):
    chosen = [s for s in samples(device) if s[0] == getattr(getattr(ops, name), overload)]
    assert chosen, f"no sample of {name}.{overload}"
    for op, args, kwargs in chosen:
        torch.library.opcheck(op, args, kwargs, test_utils=checks_of(op, args, kwargs))
        if overload == "out":
            assert_versions_grow(op, args, kwargs)
            assert_outputs_lie_apart(op, args, kwargs)
            assert_types_are_told(op, args, kwargs)


def checks_of(op, args, kwargs) -> list[str]:
    """All that opcheck can do here: it compares no tensors of eight-bit floats, and its loss adds
    to the first output, which must not be of integers (test_compiled_chain has that)."""
    every = ["test_schema", "test_autograd_registration", "test_faketensor",
             "test_aot_dispatch_dynamic"]
    parts = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    if "quantize" in op.name() and op._overloadname == "default":
        parts += op(*args, **kwargs) if "dequantize" not in op.name() else []
    if any(t.is_floating_point() and t.element_size() == 1 for t in parts):
        every.remove("test_schema")
        every.remove("test_aot_dispatch_dynamic")
    if op is ops.routing.default:
        every.remove("test_aot_dispatch_dynamic")
    return every


def test_every_operator_is_checked():
    """Those of this file; layers have a file of their own."""
    mine = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cadre::")}
    mine = {name.removeprefix("cadre::") for name in mine
            if not name.startswith(("cadre::grouped_linear", "cadre::grouped_mlp", "cadre::moe",
                                    "cadre::routed_experts", "cadre::_"))}
    assert mine == set(NAMES) | {f"{name}.out" for name in NAMES}
