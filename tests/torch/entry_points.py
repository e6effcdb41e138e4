"""Every entry point of the door as a function of named tensors, for tests that spoil one."""

from types import SimpleNamespace

import torch
from torch import nn

import cadre

E, R, H, F, TOKENS, TOP_K = 3, 6, 16, 8, 6, 2
COUNTS = [2, 1, 3]


def _draw(*shape):
    return torch.randn(*shape)


def _with_parameters(module, tensors):
    """The module with those of the tensors as its parameters that bear their names. They stay what
    they are: gradients and tangents are theirs."""
    for name, _ in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = tensors[name]
    return module


def _linear(packed, **options):
    def call(t):
        layer = cadre.GroupedLinear(E, H, F, device="meta", single_grouped_weight=packed,
                                    single_grouped_bias=packed, scale_bias="bias_scale" in t,
                                    **options)
        given = {name: t[name] for name in ("out", "dgrad_out", "bias_scale") if name in t}
        return _with_parameters(layer, t)(t["inp"], t["m_splits"], **given)

    return call


def _mlp(t):
    mlp = cadre.GroupedMLP(E, H, F, bias=True, device="meta")
    return _with_parameters(mlp, t)(t["x"], t["counts"], t["prob"], t["bias2_scale"])


def _moe(t):
    moe = cadre.MoE(E, H, F, top_k=TOP_K, bias=True, device="meta")
    return _with_parameters(moe, t)(t["x"])[0]


def _sequential(activation):
    def call(t):
        row = cadre.ops.Sequential(cadre.ops.GroupedLinear(E, H, 2 * F, device="meta"), activation,
                                   cadre.ops.GroupedLinear(E, F, H, device="meta"))
        return _with_parameters(row, t)(t["input"], t["split_sizes"], t["split_sizes"])

    return call


def _experts(t):
    from cadre.huggingface import experts_forward
    module = SimpleNamespace(gate_up_proj=t["gate_up_proj"], down_proj=t["down_proj"],
                             num_experts=E, has_gate=True, has_bias=False, is_transposed=False,
                             act_fn=nn.SiLU(), __class__=_Gate)
    return experts_forward(_Gate(**vars(module)), t["hidden_states"], t["top_k_index"],
                           t["top_k_weights"])


class _Gate(SimpleNamespace):

    def _apply_gate(self, z):
        gate, up = z.chunk(2, -1)
        return self.act_fn(gate) * up


def _named(operation, *fixed, **keywords):
    """An operation whose arguments, in their order, are the tensors."""
    return lambda t: operation(*t.values(), *fixed, **keywords)


def _discrete(shape_of, width):
    made = {f"{name}{e}": _draw(*shape) for e in range(E) for name, shape in shape_of.items()}
    return {"inp": _draw(R, width), **made, "m_splits": torch.tensor(COUNTS)}


def _row_tensors():
    tensors = {"input": _draw(R, H)}
    for at, (n, k) in ((0, (2 * F, H)), (2, (H, F))):
        for e in range(E):
            tensors |= {f"{at}.weight{e}": _draw(n, k), f"{at}.bias{e}": _draw(n)}
    return tensors | {"split_sizes": torch.tensor(COUNTS)}


def _mapped():
    experts = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]], dtype=torch.int32)
    made = cadre.offsets_of_routing(experts, E, TOKENS * TOP_K)
    return {"offsets": made.offsets, "row_of": made.row_of, "slot_of": made.slot_of}


def entry_points():
    """{name: (function of a dict of tensors, that dict)}. The gradient of the first matters."""
    offsets = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    ends = offsets[1:].clone()
    packed = {"inp": _draw(R, H), "weight": _draw(E, F, H), "bias": _draw(E, F),
              "bias_scale": torch.rand(R), "m_splits": torch.tensor(COUNTS)}
    buffers = {"out": torch.empty(R, F), "dgrad_out": torch.empty(R, H)}
    discrete = _discrete({"weight": (F, H), "bias": (F,)}, H)
    mlp = {"x": _draw(R, H), "w1": _draw(E, 2 * F, H), "w2": _draw(E, H, F),
           "bias1": _draw(E, 2 * F), "bias2": _draw(E, H), "prob": torch.rand(R),
           "bias2_scale": torch.rand(R), "counts": torch.tensor(COUNTS)}
    moe = {"x": _draw(TOKENS, H), "router": _draw(E, H),
           **{f"experts.{name}": mlp[name] for name in ("w1", "w2", "bias1", "bias2")}}
    experts = {"hidden_states": _draw(TOKENS, H), "gate_up_proj": _draw(E, 2 * F, H),
               "down_proj": _draw(E, H, F), "top_k_index": torch.randint(E, (TOKENS, TOP_K)),
               "top_k_weights": torch.rand(TOKENS, TOP_K)}
    product = {"a": _draw(R, H), "b": _draw(E, H, F)}
    codes = cadre.quantize(_draw(E, 32, 32), None, "mxfp8")
    return {
        "linear": (_linear(False), discrete),
        "packed linear": (_linear(True), packed),
        "linear with buffers": (_linear(False), discrete | buffers),
        "deferred linear": (_linear(False, delay_wgrad_compute=True), discrete),
        "mlp": (_mlp, mlp),
        "moe": (_moe, moe),
        "moe in bf16": (_moe, {n: t if n == "router" else t.bfloat16() for n, t in moe.items()}),
        "fused row": (_sequential(cadre.ops.SwiGLU()), _row_tensors()),
        "row": (_sequential(nn.Sequential(cadre.ops.SwiGLU())), _row_tensors()),
        "experts": (_experts, experts),
        "grouped_mm": (_named(cadre.grouped_mm),
                       product | {"offs": ends, "bias": _draw(E, F)}),
        "stacked grouped_mm": (_named(cadre.grouped_mm),
                               {"a": _draw(E, R, H), "b": _draw(E, H, F)}),
        "grouped_gemm": (lambda t: cadre.grouped_gemm(
            t["lhs"], [t["rhs0"], t["rhs1"], t["rhs2"]], t["offsets"], bias=t["bias"],
            bias_scale=t["bias_scale"], alpha=t["alpha"]),
            {"lhs": _draw(R, H), **{f"rhs{e}": _draw(F, H) for e in range(E)}, "offsets": offsets,
             "bias": _draw(E, F), "bias_scale": torch.rand(R), "alpha": torch.rand(E)}),
        "activation": (_named(cadre.activation),
                       {"z": _draw(R, 2 * F), "offsets": offsets, "prob": torch.rand(R)}),
        "routing": (lambda t: cadre.routing(t["logits"], TOP_K, expert_bias=t["expert_bias"])[1],
                    {"logits": _draw(TOKENS, E), "expert_bias": _draw(E)}),
        "permute": (lambda t: cadre.permute(*t.values())[0],
                    {"tokens": _draw(TOKENS, H), **_mapped(),
                     "prob": torch.rand(TOKENS, TOP_K)}),
        "combine": (_named(cadre.combine), {"rows": _draw(TOKENS * TOP_K, H), **_mapped(),
                                            "prob": torch.rand(TOKENS, TOP_K)}),
        "bias_grad": (lambda t: cadre.bias_grad(*t.values())[0],
                      {"dy": _draw(R, F), "offsets": offsets, "bias_scale": torch.rand(R),
                       "bias": _draw(E, F)}),
        "quantize": (lambda t: cadre.quantize(*t.values(), "mxfp8").codes,
                     {"source": _draw(R, 32), "offsets": offsets}),
        "dequantize": (lambda t: cadre.dequantize(
            cadre.operations.Quantized(t["codes"], t["scales"], t["expert_scale"]), None, "mxfp8",
            shape=(E, 32, 32)), codes._asdict()),
        "offsets": (lambda t: cadre.offsets(t["source"], "counts", R).offsets,
                    {"source": torch.tensor(COUNTS)}),
    }


NAMES = list(entry_points())
# Whose gradient is computed by Cadre.
DIFFERENTIABLE = [name for name in NAMES
                  if name not in ("bias_grad", "quantize", "dequantize", "offsets")]
# Numbers that may be on the host whatever the rest is on.
HOST = ("m_splits", "counts", "split_sizes")
