"""A user's program that uses every public name, fully typed. test_typing.py runs it, and gives it
to mypy --strict and to pyright's strict mode."""

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import cadre
import cadre.huggingface
import cadre.megatron
from cadre import (
    DispatchedCodes, DispatchedRows, DispatchHandle, ExpertParallel, GroupedLinear, GroupedMLP, MoE,
    Offsets, Quantized, Recipe, RouterOutput, Routing, RoutingOffsets, checkpoints, ops)

E, H, F, TOP_K = 4, 16, 24, 2


class Block(nn.Module):
    """A module of the user around modules of cadre."""

    def __init__(self) -> None:
        super().__init__()
        self.up: GroupedLinear = GroupedLinear(E, H, 2 * F, params_dtype=torch.float32,
                                               single_grouped_weight=True, recipe="f32",
                                               device="cpu")
        self.mlp = GroupedMLP(E, H, F, activation="swiglu", layout="interleave1", bias=True,
                              device="cpu", recipe=Recipe("bf16", wgrad="f32"))
        self.moe = MoE(E, H, F, top_k=TOP_K, score="sigmoid", normalize=True, expert_bias=True,
                       shared_features=F, shared_gate=True, shared_expert=nn.Linear(H, H),
                       device="cpu")

    def forward(self, x: Tensor, counts: list[int] | Tensor) -> tuple[Tensor, Tensor]:
        y = self.mlp(x, counts)
        out, router = self.moe(x + y)
        chosen: RouterOutput = router
        return out, chosen.load_balancing_loss()


def layers(x: Tensor, counts: list[int]) -> Tensor:
    block = Block()
    out, loss = block.forward(x, counts)
    torch.autograd.backward(out.sum() + loss)
    weight: nn.Parameter = block.mlp.w1
    bias, kept = block.mlp.bias1, block.moe.expert_bias
    assert weight.grad is not None and bias is not None and kept is not None
    linear = GroupedLinear(E, H, F, delay_wgrad_compute=True, init_method=nn.init.ones_,
                           device="cpu")
    y: Tensor = linear(x, counts, is_first_microbatch=True)
    torch.autograd.backward(y.sum())
    linear.backward_dw()
    z: Tensor = block.up(x, counts)
    print(z.shape, linear.weight0.grad.shape, linear.in_features, linear.params_dtype)
    with_bias = linear.forward(x, torch.tensor(counts), out=torch.empty(x.shape[0], F))
    assert isinstance(with_bias, Tensor)
    return with_bias


def parallel(x: Tensor, logits: Tensor) -> Tensor:
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    ep = ExpertParallel(dist.group.WORLD, E, TOP_K, overflow="drop")
    chosen = cadre.routing(logits, TOP_K)
    sent: DispatchedRows = ep.dispatch(x, chosen.experts, chosen.prob)
    handle: DispatchHandle = sent.handle
    ep.check()
    print(ep.problem, handle.dropped.sum().item(), handle.tokens_per_expert.shape)
    y = GroupedMLP(E, H, F, device="cpu").forward(sent.rows, Offsets(sent.offsets), sent.row_prob)
    window = ExpertParallel(dist.group.WORLD, E, TOP_K, route="window", tokens=x.shape[0],
                            hidden=H, dtype=x.dtype, device="cpu", limit_s=5)
    again = ExpertParallel(dist.group.WORLD, E, TOP_K, route="window", share=window, layer=1)
    print(again.empty_tokens(2).shape, window.empty_rows().shape, len(cadre.saved_exchanges()))
    coded = ExpertParallel(dist.group.WORLD, E, TOP_K, route="window", share=window, prob=False,
                           x="fp8_row", sum="rank", layer=2)
    ends = torch.tensor([0, x.shape[0]], dtype=torch.int32)
    given = cadre.quantize(x, ends, "fp8_row")
    codes: DispatchedCodes = coded.dispatch_codes(given, chosen.experts)
    print(codes.rows.codes.dtype, codes.rows.scales.shape, codes.offsets.shape)
    moe = MoE(E, H, F, top_k=TOP_K, device="cpu", ep=ep)
    cadre.keep_whole(torch.optim.SGD(moe.parameters(), lr=0.1), moe)
    out, _ = moe.forward(ep.collect(y, handle))
    dist.destroy_process_group()
    return out


def rows(tokens: Tensor, logits: Tensor) -> Tensor:
    chosen: Routing = cadre.routing(logits, TOP_K, normalize=True)
    where: RoutingOffsets = cadre.offsets_of_routing(chosen.experts, E, tokens.shape[0] * TOP_K)
    order = where.offsets, where.row_of, where.slot_of
    x, prob = cadre.permute(tokens, *order, chosen.prob)
    z = cadre.grouped_gemm(x, torch.randn(E, 2 * F, H), where.offsets, out_dtype=torch.float32)
    h = cadre.activation(z, where.offsets, prob, "swiglu")
    dbias, _ = cadre.bias_grad(h, where.offsets)
    y = cadre.grouped_gemm(h, [torch.randn(H, F) for _ in range(E)], where.offsets)
    loss = cadre.load_balancing_loss(chosen.scores, where.offsets.diff())
    return cadre.combine(y, *order) + dbias.sum() + loss


def formats(x: Tensor, counts: list[int]) -> Tensor:
    offsets: Offsets = cadre.offsets(torch.tensor(counts), "counts", x.shape[0])
    status = offsets.status
    assert status is not None and int(status) == 0
    codes: Quantized = cadre.quantize(x, offsets.offsets, "mxfp8")
    back = cadre.dequantize(codes, offsets.offsets, "mxfp8", shape=list(x.shape))
    ends = torch.tensor(counts).cumsum(0).int()
    eight = torch.zeros(E, F, H, dtype=torch.float8_e4m3fn).transpose(1, 2)
    fp8: torch.Tensor = cadre.scaled_grouped_mm(
        back.to(torch.float8_e4m3fn), eight, torch.ones(back.shape[0]), torch.ones(E, F), ends,
        out_dtype=torch.float32, use_fast_accum=False)
    assert fp8.shape == (back.shape[0], F)
    return cadre.grouped_mm(back, torch.randn(E, H, F), offs=ends, bias=torch.zeros(E, F))


def operations(x: Tensor, counts: list[int]) -> Tensor:
    activations: list[ops.Activation] = [ops.GELU(), ops.GEGLU(), ops.ReLU(), ops.ReGLU(),
                                         ops.SiLU(), ops.SwiGLU(1), ops.SReLU(), ops.GLU(),
                                         ops.QGELU(), ops.SReGLU(),
                                         ops.ClampedSwiGLU(limit=5.0),
                                         ops.QGEGLU(), ops.SiTUGLU(beta1=2.0)]
    scaled: list[ops.Activation] = [ops.ScaledSwiGLU(), ops.ScaledClampedQGeGLU(32),
                                    ops.ScaledSReLU(), ops.ScaledSiTUGLU()]
    around: ops.MakeExtraOutput = ops.MakeExtraOutput().set_extra_output_channel(
        0, "around", output_to_caller=False)
    others: list[ops.Operation] = [
        ops.Identity(), ops.Quantize(backward=True), ops.Bias(H), around,
        ops.AddExtraInput(in_place=True),
        ops.AddExtraInput().set_extra_input_channel(0, "around"), *activations]
    print([activation.gated for activation in activations + scaled], len(others))
    up, down = (ops.GroupedLinear(E, H, 2 * F, device="cpu"), ops.GroupedLinear(E, F, H,
                                                                              device="cpu"))
    mlp = ops.Sequential(up, ops.ScaledSwiGLU(), down)
    splits, prob = torch.tensor(counts), torch.rand(x.shape[0])
    steps: list[ops.Step] = mlp.plan(splits, prob, splits)
    y: Tensor = mlp(x, splits, prob, splits, op_kwargs={
        0: {ops.GRAD_INPUT_BUFFER_KEY: torch.empty_like(x)},
        down: {ops.OUTPUT_BUFFER_KEY: torch.empty_like(x)}})
    print([step.name for step in steps], ops.SReLU()(up(x, splits)).shape)
    return y


@cadre.autocast(recipe="bf16")
def under_a_recipe(function: Callable[[Tensor, list[int]], Tensor], x: Tensor,
                   counts: list[int]) -> Tensor:
    return function(x, counts)


def recipes(x: Tensor, counts: list[int]) -> Tensor:
    recipe = Recipe("nvfp4", wgrad="input")
    with cadre.autocast(enabled=True, recipe=recipe) as context, cadre.fp8_autocast(False):
        first, second = cadre.checkpoint_contexts()
        print(context.recipe, recipe.wgrad)
    with cadre.quantized_model_init(enabled=False), cadre.fp8_model_init(False):
        print(cadre.GroupedLinear(2, 8, 4).in_features)
    with first, second:
        return under_a_recipe(layers, x, counts)


def models(model: nn.Module) -> nn.Module:
    layout: checkpoints.Layout = checkpoints.LAYOUTS["qwen"]
    gate_up = checkpoints.interleave(torch.randn(2 * F, H), 1)
    names = "gate_proj", "up_proj", "down_proj"
    parts = *checkpoints.deinterleave(gate_up, 1).chunk(2), torch.randn(H, F)
    state = {f"mlp.experts.0.{name}.weight": part for name, part in zip(names, parts)}
    packed = checkpoints.convert(state, layout.name, "cadre")
    print(sorted(packed)[0], cadre.huggingface.explain(model), cadre.huggingface.NAME,
          cadre.huggingface.experts_forward.__name__)
    if not sorted(packed):
        return cadre.huggingface.load_quantized("folder", dtype=torch.bfloat16, device="cpu")
    return cadre.huggingface.use(model) if "runs" in cadre.huggingface.explain(model) else model


def trainers(names: list[str]) -> list[str]:
    kind: type[nn.Module] = cadre.megatron.Experts
    assert cadre.megatron.experts_spec().module is kind
    return names + [cadre.megatron.with_cadre.__name__]


def main() -> None:
    x = torch.randn(12, H)
    counts = [3, 0, 5, 2]
    assert under_a_recipe(recipes, x, counts).shape == (12, F)
    assert operations(x, counts).shape == x.shape
    assert rows(x, torch.randn(12, E)).shape == x.shape
    assert parallel(x, torch.randn(12, E)).shape == x.shape
    assert formats(x, counts).shape == (12, F)
    models(nn.Linear(2, 2))
    print(trainers(["experts"]))


if __name__ == "__main__":
    main()
