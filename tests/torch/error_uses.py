"""What the tables of docs/errors.md use of the door; test_errors.py runs it."""

from types import SimpleNamespace

import pytest
import torch

import cadre
from cadre import checkpoints
from cadre.ops import OUTPUT_BUFFER_KEY
from conftest import draw, offsets_of
from error_uses_functions import FUNCTIONS, OPERATORS


def names():
    """What the uses name; anew for each."""
    torch.manual_seed(0)
    E, N, K, R = 3, 8, 16, 6
    ops = torch.ops.cadre
    linear = cadre.GroupedLinear(E, K, N, device="cpu")
    deferred = cadre.GroupedLinear(E, K, N, device="cpu", delay_wgrad_compute=True)
    fused = cadre.GroupedLinear(E, K, N, device="cpu", fuse_wgrad_accumulation=True,
                                single_grouped_weight=True)
    apart = cadre.GroupedLinear(E, K, N, device="cpu", fuse_wgrad_accumulation=True, bias=False)
    types = torch.float32, torch.float32, torch.float16
    scaled = cadre.GroupedLinear(E, K, N, device="cpu", scale_bias=True)
    mlp = cadre.GroupedMLP(E, K, N, device="cpu")
    moe = cadre.MoE(E, K, N, top_k=2, device="cpu")
    row = cadre.ops.Sequential(cadre.ops.GroupedLinear(E, K, 2 * N, device="cpu"),
                               cadre.ops.SwiGLU(),
                               cadre.ops.GroupedLinear(E, N, K, device="cpu"))
    twice = cadre.ops.Sequential(cadre.ops.MakeExtraOutput(), cadre.ops.MakeExtraOutput())
    x, w, dw, z = draw(R, K), draw(E, N, K), draw(E, N, K), draw(R, 2 * N)
    w2 = draw(E, K, N // 2)
    shared = dict(shared_weight1=w[0], shared_weight2=w2[0])
    leaf, memory = draw(R, K, grad=True), torch.empty(R, K)
    where, row_of, slot_of, _ = cadre.offsets_of_routing(torch.tensor([[0, 1], [2, 0], [1, 2]]),
                                                         E, R)
    tokens, chosen = draw(3, K), draw(3, 2)
    dy, none = draw(R, N), torch.empty(0, dtype=torch.uint8)
    offs = torch.tensor([2, 4, 6], dtype=torch.int32)
    a8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    sa, sb = torch.rand(R), torch.rand(E, N)
    q1, q2 = (list(ops.quantize(weight, None, "mxfp4", "along_k")[:2]) for weight in (w, w2))
    choice = cadre.grouped_mlp.TokenChoice(draw(R, E), None, 2, "softmax", False)
    counts = [2, 2, 2]
    offsets = offsets_of(counts, "cpu")
    freed = draw(R, K)
    freed.untyped_storage().resize_(0)
    theirs = SimpleNamespace(delayed=lambda: True)
    two_ranks = SimpleNamespace(size=lambda: 2)
    qwen = {f"mlp.experts.{e}.{part}_proj.weight": w for e in range(E)
            for part, w in (("gate", draw(N, K)), ("up", draw(N, K)), ("down", draw(K, N)))}
    biases = qwen | {f"mlp.experts.{e}.{part}_proj.bias": draw(n) for e in range(E)
                     for part, n in (("gate", N), ("up", N), ("down", K))}
    mixtral = dict(checkpoints.convert(qwen, "qwen", "mixtral"))
    return dict(globals(), **locals())


def models():
    """What the uses of transformers name."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    import cadre.huggingface as huggingface
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2, intermediate_size=48)
    mixtral = transformers.MixtralForCausalLM._from_config(
        transformers.MixtralConfig(**sizes, num_local_experts=3), experts_implementation="eager")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    experts = mixtral.model.layers[0].mlp.experts
    other = type("OtherExperts", (torch.nn.Linear,), {})(8, 8)
    fp8 = torch.nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    group, plain = SimpleNamespace(size=lambda: 2), transformers.PretrainedConfig()
    plain._experts_implementation = "eager"
    shared = cadre.expert_ranks.Sharing(SimpleNamespace(ranks=2), "own")
    llama4 = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(
        **sizes, head_dim=8, intermediate_size_mlp=48, num_local_experts=3))
    return dict(globals(), **locals())


def sharded(layer):
    """The layer with weights that are DTensors, of one process."""
    from torch import distributed
    from torch.distributed.tensor import DTensor, init_device_mesh
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    for name, p in list(layer.named_parameters()):
        layer.register_parameter(name, torch.nn.Parameter(DTensor.from_local(p.detach(), mesh)))
    distributed.destroy_process_group()
    return layer


async def numbers():
    yield 1


def peer(kind, **options):
    """A recipe object of another library, of that kind."""
    return SimpleNamespace(**{kind: lambda: True}, **options)


def convert(state, source="qwen", target="cadre", **options):
    """Every tensor of the result."""
    return dict(checkpoints.convert(state, source, target, **options))


MODULES = """
cadre.GroupedLinear(0, K, N)
cadre.GroupedLinear(E, 1.5, N)
cadre.GroupedLinear(E, K, N, params_dtype=torch.float64)
cadre.GroupedLinear(E, K, N, parallel_mode="both")
cadre.GroupedLinear(E, K, N, parallel_mode="row", tp_size=3, bias=False)
cadre.GroupedLinear(E, K, N, tp_size=2)
cadre.GroupedLinear(E, K, N, tp_group=2)
cadre.GroupedLinear(E, K, N, ub_overlap_rs=True)
cadre.GroupedLinear(E, K, N, use_grouped_tensor=1)
cadre.GroupedLinear(E, K, N, scale_bias=True, bias=False)
cadre.GroupedLinear(E, K, N, recipe="fp9")
cadre.GroupedMLP(E, K, 0)
cadre.GroupedMLP(E, K, "N")
cadre.GroupedMLP(E, K, N, dtype=torch.int32)
cadre.GroupedMLP(E, K, N, activation="tanh")
cadre.GroupedMLP(E, K, N, layout="spiral")
cadre.GroupedMLP(E, K, N, activation="relu", layout="interleave1")
cadre.GroupedMLP(E, K, N, activation=3)
cadre.GroupedMLP(E, K, N, activation="swiglu limit=7")
cadre.GroupedMLP(E, K, N, activation="clamped_swiglu limit=x")
cadre.GroupedMLP(E, K, N, bias="no")
cadre.MoE(E, K, N, top_k=4)
cadre.MoE(E, K, N, top_k=2, shared_expert=3)
cadre.MoE(E, K, N, top_k=2, shared_features=-1)
cadre.MoE(E, K, N, top_k=2, shared_gate=True)
cadre.MoE(E, K, N, top_k=2, dispatch_again=True)
cadre.MoE(E, K, N, top_k=2, push=False)
cadre.MoE(E, K, N, top_k=2, push="no")
cadre.MoE(E, K, N, top_k=2, overlap_shared="no")
cadre.MoE(E, K, N, top_k=2, shared_features=8, delay_wgrad_compute=True)
cadre.keep_whole(mlp, mlp)
cadre.keep_whole(torch.optim.SGD(mlp.parameters()), x)
cadre.ops.SwiGLU(glu_interleave_size=8)
cadre.autocast("mxfp8")
cadre.autocast(True, "mxfp8")
cadre.autocast(calibrating=True)
cadre.autocast(recipe="mxfp8", fp8_recipe="nvfp4")
cadre.ops.Bias(0)
cadre.ops.Bias(K, device="cpu")(x[:, :5])
cadre.ops.Bias(5, tensor_parallel=True, tensor_parallel_group=two_ranks)
cadre.ops.AddExtraInput()(x, None)
cadre.ops.Bias(K, device="cpu", tensor_parallel="no")
cadre.ops.AddExtraInput(in_place="no")
cadre.ops.MakeExtraOutput(in_place="no")
cadre.ops.AddExtraInput()(x, x[:1])
cadre.ops.AddExtraInput()(x, x.long())
cadre.ops.AddExtraInput()(x, x.to("meta"))
cadre.ops.AddExtraInput(in_place=True)(x, x[0])
cadre.ops.AddExtraInput(in_place=True)(x, x.half())
cadre.ops.SiTUGLU(beta1=0)
cadre.ops.SiTUGLU(beta1=True)
cadre.ops.SiTUGLU()(z[:, :5])
cadre.ops.ScaledSiTUGLU()(z, z[:, 0][1:])
cadre.ops.ScaledSiTUGLU()(z, z[:, 0] * 1j)
cadre.autocast(recipe="fp9")
cadre.autocast(recipe=3)
cadre.autocast(recipe=theirs)
cadre.Recipe("mxfp8", wgrad="fp9")
cadre.Recipe("mxfp8,wgrad=bf16", wgrad="f32")
cadre.Recipe("mxfp8", dgrad="bf16,pinned")
cadre.autocast(recipe="mxfp8")(numbers)
cadre.Recipe(3)
"""

RECIPES = """
cadre.quantized_model_init()
cadre.autocast(recipe=peer("custom"))
cadre.autocast(recipe=peer("delayed"))
cadre.autocast(recipe=peer("nvfp4", per_token_rht=True))
cadre.autocast(recipe=peer("nvfp4", nvfp4_per_token=lambda: True))
cadre.autocast(recipe=peer("mxfp8", backward_override="dequantized"))
cadre.autocast(recipe=peer("mxfp8", fp8_format="E5M2"))
cadre.autocast(recipe=peer("float8_block_scaling", x_block_scaling_dim=3))
cadre.autocast(recipe=peer("nvfp4", fp8_format="HYBRID"))
cadre.autocast(recipe=peer("nvfp4", fp4_format="E3M0"))
cadre.autocast(recipe=peer("nvfp4", fp4_quant_fwd_inp=SimpleNamespace(amax_epsilon=1.0)))
cadre.autocast(recipe=peer("nvfp4",
    fp4_quant_fwd_inp=SimpleNamespace(random_hadamard_transform=True, stochastic_rounding=True)))
cadre.autocast(recipe=peer("nvfp4",
    fp4_quant_fwd_inp=SimpleNamespace(random_hadamard_transform=False)))
"""

CHECKPOINTS = """
convert(qwen, "gwen")
convert(qwen, "qwen", "te_packed")
convert(qwen, "mixtral")
convert(qwen, experts=5)
convert(qwen, experts=0)
convert("model.safetensors")
convert(qwen, experts=2)
convert([qwen, qwen])
convert(qwen | {"mlp.experts.01.up_proj.weight": w[0]})
convert(mixtral | {"block_sparse_moe.gate.weight": w[0], "mlp.gate.weight": w[1]}, "mixtral",
    "qwen")
convert(biases, target="titan")
convert(qwen | {"mlp.experts.1.up_proj.weight": draw(N, K + 1)})
convert(qwen | {"mlp.experts.1.up_proj.weight": draw(N, K).half()})
convert(qwen | {"mlp.experts.1.up_proj.weight": "draw(N, K)"})
convert({"mlp.experts.w1": None, "mlp.experts.w2": w}, "cadre", "qwen")
convert(qwen, layers="mlp")
convert({"weight": w[:0]}, "te_packed", "te_discrete")
convert(qwen | {3: w})
checkpoints.interleave(draw(96, 3))
checkpoints.interleave("w1")
checkpoints.deinterleave(draw(4, 4), 1, 2)
"""

TRANSFORMERS = """
huggingface.load_quantized(7)
huggingface.load_quantized("nowhere")
huggingface.use("mixtral")
huggingface.explain("mixtral")
huggingface.use(llama)
huggingface.use(torch.nn.DataParallel(mixtral))
setattr(mixtral, "others", other), huggingface.use(mixtral)
setattr(experts, "act_fn", torch.nn.Mish()), huggingface.use(mixtral)
setattr(experts, "act_fn", torch.nn.PReLU()), huggingface.use(mixtral)
setattr(experts, "_apply_gate", None), huggingface.use(mixtral)
setattr(experts, "down_proj", fp8), huggingface.use(mixtral)
setattr(mixtral, "set_experts_implementation", lambda name: None), huggingface.use(mixtral)
huggingface.use(mixtral, batch="own")
huggingface.use(mixtral, group, batch="mine")
huggingface.use(llama4, group)
sharded(experts), huggingface.use(mixtral, group)
setattr(experts, "config", plain), huggingface.use(mixtral, group)
setattr(experts, "_cadre_sharing", shared), huggingface.use(mixtral, group)
[setattr(experts, name, shared) for name in ("_cadre_sharing", "_ep")],
    mixtral.set_experts_implementation("eager")
[setattr(experts, name, shared) for name in ("_cadre_sharing", "_ep")],
    mixtral.save_pretrained("nowhere")
"""

CALLS = """
linear([1, 2], counts)
linear(x.double(), counts)
linear(x.long(), counts)
linear(torch.nested.nested_tensor([x]), counts)
linear(x[:, :8], counts)
linear(x.to("meta"), counts)
linear.to("meta")(x, counts)
linear(freed, counts)
linear(x.to_sparse(), counts)
linear(x, [2, 2])
linear(x, 6)
linear(x, [2.0, 2, 2])
linear(x, torch.tensor([2., 2., 2.]))
linear(x, [-1, 2, 2])
linear(x, [2, 2, 3])
linear(x, [2, 4, 6])
linear(x, torch.tensor(counts, device="meta"))
linear(x, cadre.Offsets(torch.tensor([0, 2, 4, 6])))
linear(x, cadre.Offsets(torch.tensor([0, 4, 2, 6], dtype=torch.int32)))
linear(x, cadre.Offsets(torch.tensor([1, 2, 4, 6], dtype=torch.int32)))
linear(x[:5], cadre.offsets(torch.tensor(counts), "counts", R))
linear(x, cadre.Offsets(offsets.to("meta")))
linear(x, counts, bias_scale=torch.rand(R))
scaled(x, counts)
scaled(x, counts, bias_scale=torch.rand(R + 1))
scaled(x, counts, bias_scale=torch.rand(R).half())
linear(x, counts, out=torch.empty(R, K))
linear(x, counts, out=torch.empty(R, N).half())
linear(x, counts, out=torch.empty(R, N, device="meta"))
linear(x, counts, out=torch.empty(N, R).t())
linear(x, counts, out=torch.empty(R, N, requires_grad=True))
linear(x, counts, out=x.view(-1)[:R * N].view(R, N))
linear(leaf, counts, out=memory.view(-1)[:R * N].view(R, N), dgrad_out=memory)
linear.double()(x, counts)
setattr(linear.weight1, "data", draw(N, K).half()), linear(x, counts)
setattr(linear.weight1, "data", draw(K, N).t()), linear(x, counts)
setattr(linear.bias0, "data", draw(2 * N)[::2]), linear(x, counts)
linear.weight0.untyped_storage().resize_(0), linear(x, counts)
setattr(linear, "weight0", torch.nn.Parameter(torch._neg_view(w[0]))),
    linear(x, counts, out=torch.empty(R, N))
setattr(linear, "bias0", torch.nn.Parameter(torch._neg_view(w[0, :, 0]))),
    cadre.autocast(recipe="mxfp8")(linear)(x, counts, is_first_microbatch=True)
mlp(x, counts, torch.rand(R - 1))
mlp(x, counts, torch.rand(R).double())
mlp(x, counts, [1.0] * R)
mlp(x, counts, bias2_scale=torch.rand(R))
mlp(x[:, :8], counts)
mlp(x, [2, 2])
mlp(x, choice, torch.rand(R))
moe(x[:, :8])
moe(x.int())
setattr(moe, "router", torch.nn.Parameter(draw(E + 1, K))), moe(x)
setattr(moe, "router", torch.nn.Parameter(draw(E, K).double())), moe(x)
setattr(moe, "shared_expert", torch.nn.Linear(K, N)), moe(x)
row(x, counts)
row(x, counts, counts, op_kwargs=[x])
row(x, counts, counts, op_kwargs={7: {OUTPUT_BUFFER_KEY: x}})
row(x, counts, counts, op_kwargs={linear: {OUTPUT_BUFFER_KEY: x}})
row(x, counts, counts, op_kwargs={0: {"input": x}})
cadre.ops.Sequential(row[1], row[1])(z, op_kwargs={row[1]: {OUTPUT_BUFFER_KEY: x}})
row(x, counts, counts, op_kwargs={0: {OUTPUT_BUFFER_KEY: z}, row[0]: {OUTPUT_BUFFER_KEY: z}})
row(x[:, :8], counts, counts)
row[0].set_extra_input_channel(1, "counts")
row[0].set_extra_input_channel(0.0, "counts")
row[0].set_extra_input_channel(0, "")
row[0].set_extra_input_channel(0, "counts"), row(x, counts)
[op.set_extra_output_channel(0, "z") for op in twice], twice(z)
cadre.ops.ScaledSwiGLU()(z, None)
cadre.ops.ScaledSwiGLU()(z, z[1:, 0])
cadre.ops.GroupedLinear(E, K, N, device="cpu", scale_bias=True)(x, counts, z[1:, 0])
cadre.ops.Sequential(row[0], cadre.ops.ScaledSwiGLU(), row[2])(x, counts, z[1:, 0], counts)
cadre.ops.SwiGLU()(z[0, 0])
cadre.ops.Quantize()(z[0, 0])
cadre.ops.SwiGLU()(z, offsets=offsets)
cadre.ops.SwiGLU()(z, offsets=cadre.Offsets(counts))
cadre.ops.SiTUGLU()(z, offsets=cadre.Offsets(offsets.long()))
cadre.ops.SiTUGLU()(z, offsets=cadre.Offsets(offsets * 2))
cadre.ops.Sequential(cadre.ops.SwiGLU(activation_recompute_in_mlp=True))(z)
"""

BACKWARD = """
fused(x, counts).sum().backward()
setattr(fused.weight, "main_grad", torch.zeros(E, K, N)), fused(x, counts).sum().backward()
setattr(fused.weight, "main_grad", torch._neg_view(fused.weight)), fused(x, counts).sum().backward()
setattr(fused.weight, "main_grad", [w]), fused(x, counts).sum().backward()
setattr(fused.weight, "main_grad", w.double()), fused(x, counts).sum().backward()
setattr(fused.weight, "main_grad", w.to("meta")), fused(x, counts).sum().backward()
[setattr(p, "main_grad", torch.zeros_like(p).to(t)) for p, t in zip(apart.parameters(), types)],
    apart(x, counts).sum().backward()
[setattr(p, "main_grad", w[0]) for p in apart.parameters()], apart(x, counts).sum().backward()
setattr(fused.weight, "main_grad", fused.weight.detach()), fused(x, counts).sum().backward()
deferred.to("meta")(x.to("meta"), counts)
sharded(deferred)(x, counts)
deferred(x, counts).sum().backward(), deferred.weight1.detach().add_(1), deferred.backward_dw()
deferred(x, counts).sum().backward(), x.zero_(), deferred.backward_dw()
deferred.weight1.register_hook(print), deferred(x, counts)
torch.func.functional_call(deferred, {"weight0": deferred.weight0 * 2}, (x, counts))
deferred(x, counts).sum().backward(), setattr(deferred, "weight2", torch.nn.Parameter(w[2])),
    deferred.backward_dw()
[linear(leaf, counts, dgrad_out=memory).sum().backward() for _ in range(2)]
torch.autograd.grad(linear(leaf, counts).square().sum(), leaf,
    create_graph=True)[0].sum().backward()
cadre.dequantize(cadre.quantize(leaf, offsets, "mxfp8"), offsets, "mxfp8",
    shape=leaf.shape).sum().backward()
ops.grouped_mlp_quantized(leaf, offsets, None, q1, [], q2, [], None,
    recipe="mxfp4")[0].sum().backward()
torch.autograd.grad(linear(leaf, counts), leaf, dy.expand(2, R, N), is_grads_batched=True)
torch.autograd.grad(linear(leaf, counts, dgrad_out=memory), leaf, dy.expand(2, R, N),
    is_grads_batched=True)
torch.autograd.grad(mlp(leaf, counts), leaf, x.expand(2, R, K), is_grads_batched=True)
torch.autograd.grad(moe(leaf)[0], leaf, x.expand(2, R, K), is_grads_batched=True)
torch.autograd.grad(ops.routed_experts(leaf, torch.zeros(R, 2, dtype=torch.int32), draw(R, 2), E,
    [w], [], [w2], [])[0], leaf, x.expand(2, R, K), is_grads_batched=True)
torch.func.jvp(lambda x: linear(x, counts), (x,), (x,))
torch.func.jvp(lambda x: mlp(x, counts), (x,), (x,))
"""

TABLES = {"door_operators": OPERATORS, "door_modules": MODULES, "door_calls": CALLS,
          "door_backward": BACKWARD, "door_functions": FUNCTIONS, "door_recipes": RECIPES,
          "door_checkpoints": CHECKPOINTS, "door_transformers": TRANSFORMERS}
