"""cadre.GroupedMLP and cadre.MoE."""

import copy
import inspect

import pytest
import torch
from conftest import assert_close, assert_seen, draw, slices_of
from linear_reference import kept_bytes
from torch.distributed.utils import _apply_to_tensors
from torch.nn import functional
from torch.utils._pytree import tree_map

import cadre

E, H, F = 5, 32, 64
UNGATED = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu,
           "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
           "relu_squared": lambda z: functional.relu(z) ** 2}
GATED = {"swiglu": functional.silu, "geglu": functional.gelu, "reglu": functional.relu,
         "geglu_tanh": lambda z: functional.gelu(z, approximate="tanh")}


def activate(activation, layout, z):
    """In plain torch."""
    name, *words = activation.split()
    if name in UNGATED:
        return UNGATED[name](z)
    if layout == "concat":
        gate, up = z.chunk(2, -1)
    else:
        width = int(layout.removeprefix("interleave"))
        gate, up = z.unflatten(-1, (-1, 2, width)).unbind(-2)
        gate, up = gate.flatten(-2), up.flatten(-2)
    if name in GATED:
        return GATED[name](gate) * up
    value = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
    value |= {word.split("=")[0]: float(word.split("=")[1]) for word in words}
    gate = gate.clamp(max=value["limit"])
    up = up.clamp(-value["limit"], value["limit"]) + value["offset"]
    return gate * torch.sigmoid(value["alpha"] * gate) * up


def experts(device, **options):
    made = cadre.GroupedMLP(E, H, F, device=device, **options)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(draw(*p.shape) * 0.2)
    return made


def in_fp64(mlp, activation, layout, x, counts, prob=None, scale=None):
    """y [R, H], and a copy of the parameters that it depends on."""
    p = {name: t.detach().double().requires_grad_() for name, t in mlp.named_parameters()}
    parts = []
    for e, rows in enumerate(slices_of(counts)):
        z = x[rows] @ p["w1"][e].t() + (p["bias1"][e] if "bias1" in p else 0)
        h = activate(activation, layout, z) * (1 if prob is None else prob[rows, None])
        bias = p["bias2"][e] if "bias2" in p else 0
        parts.append(h @ p["w2"][e].t() + bias * (1 if scale is None else scale[rows, None]))
    return torch.cat([*parts, x.new_zeros(x.shape[0] - sum(counts), H)]), p


@pytest.mark.parametrize(("activation", "layout"), [
    ("swiglu", "concat"), ("swiglu", "interleave1"), ("swiglu", "interleave32"),
    ("geglu", "concat"), ("geglu_tanh", "interleave1"), ("reglu", "interleave32"),
    ("clamped_swiglu", "interleave1"),
    ("clamped_swiglu limit=0.5 alpha=1.5 offset=0.25", "concat"),
    *((name, "concat") for name in UNGATED)])
def test_experts_equal_plain_torch(device, case, activation, layout):
    counts, rows = case
    mlp = experts(device, activation=activation, layout=layout, bias=True)
    x, dy = draw(rows, H, device=device, grad=True), draw(rows, H, device=device)
    prob, scale = (torch.rand(rows, device=device).requires_grad_() for _ in range(2))
    y = mlp(x, torch.tensor(counts, device=device), prob, scale)
    y.backward(dy)

    x64, prob64, scale64 = (t.detach().double().requires_grad_() for t in (x, prob, scale))
    want, parameters = in_fp64(mlp, activation, layout, x64, counts, prob64, scale64)
    want.backward(dy.double())
    assert_close(y, want, terms=200)
    for got, expected in ((x, x64), (prob, prob64), (scale, scale64),
                          *((p, parameters[name]) for name, p in mlp.named_parameters())):
        assert_close(got.grad, expected.grad, terms=400)


@pytest.mark.parametrize("bias", [True, False])
def test_experts_without_probabilities(device, bias):
    mlp = experts(device, bias=bias)
    x = draw(2, 5, H, device=device)
    want, _ = in_fp64(mlp, "swiglu", "concat", x.view(10, H).double(), [2] * 5)
    y = mlp(x, [2] * 5)
    assert y.shape == x.shape
    assert_close(y.view(10, H), want, terms=200)


def test_kept_and_computed_again_are_the_same_bits(device):
    mlp = experts(device)
    x, prob = draw(11, H, device=device), torch.rand(11, device=device)
    grads, kept = [], []
    for mlp.keep_h in (True, False):
        mlp.zero_grad()
        mlp(x, [2] * 5, prob).square().sum().backward()
        grads.append([p.grad for p in mlp.parameters()])
        kept.append(kept_bytes(lambda: mlp(x, [2] * 5, prob)))
    assert all(map(torch.equal, *grads))
    assert kept[0] >= kept[1] + 11 * F * 4


@pytest.mark.parametrize(("options", "match"), [
    ({"activation": "mish"}, "activation is 'mish', must be one of swiglu, geglu"),
    ({"activation": ""}, "activation is '', must be one of"),
    ({"layout": "interleave2"}, "layout is 'interleave2', must be one of concat, interleave1"),
    ({"activation": "relu", "layout": "interleave1"}, "must be 'concat'; relu has no gate"),
    ({"activation": "clamped_swiglu limit=x"}, "limit=x', must be words of an activation of .* fea"
                                               "tures; limit is 'x', must be a number of fp32$"),
    ({"activation": "clamped_swiglu limit=-1"}, "; limit is -1, must be above 0 and finite$"),
    ({"activation": "swiglu limit=7"}, "must be without limit; only clamped_swiglu has constants"),
    ({"activation": "swiglu geglu"}, "; 'geglu' is not name=value; write name=value$"),
    ({"layout": "interleave32", "features": 24}, "of 24 features; F is 24, must be a multiple of"),
])
def test_experts_that_are_refused(options, match):
    """When they are made, not when they are first called."""
    with pytest.raises(ValueError, match=match):
        cadre.GroupedMLP(**{"num_experts": E, "hidden": H, "features": F, "device": "cpu"}
                         | options)


def test_layers_take_arguments_in_one_order():
    """E, widths, then options by name; MoE has those of its experts, with the same defaults."""
    mlp, moe = (inspect.signature(layer).parameters for layer in (cadre.GroupedMLP, cadre.MoE))
    for layer in mlp, moe:
        assert list(layer)[:3] == ["num_experts", "hidden", "features"]
        assert {p.kind for p in list(layer.values())[3:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert {name: moe[name] for name in mlp} == dict(mlp)
    with pytest.raises(TypeError, match="positional arguments"):
        cadre.MoE(H, F, E, 2)


def test_types_that_are_refused():
    for name, value in (("num_experts", True), ("features", 2.0), ("activation", None)):
        with pytest.raises(TypeError, match=f"^{name} is a {type(value).__name__}, must be "):
            cadre.GroupedMLP(**{"num_experts": E, "hidden": H, "features": F, name: value})
    mlp, x = experts("cpu"), torch.zeros(3, H)
    for name in ("prob", "bias2_scale"):
        with pytest.raises(TypeError, match=f"^{name} is a float, must be a tensor$"):
            mlp(x, [3, 0, 0, 0, 0], **{name: 0.5})
    plain = cadre.GroupedMLP(E, H, F, device="cpu")
    with pytest.raises(ValueError, match="^bias2_scale is given, must be left out; the layer has"):
        plain(x, [3, 0, 0, 0, 0], None, torch.ones(3))


@pytest.mark.parametrize(("options", "error", "match"), [
    ({"top_k": 2.0}, TypeError, "^top_k is a float, must be an int"),
    ({"top_k": True}, TypeError, "^top_k is a bool, must be an int"),
    ({"score": "soft"}, ValueError, "score is 'soft', must be one of softmax, topk_softmax, sigm"),
    ({"score": None}, TypeError, "^score is a NoneType, must be a str"),
    ({"normalize": "yes"}, TypeError, "^normalize is a str, must be a bool"),
    ({"scale": "2"}, TypeError, "^scale is a str, must be a number"),
    ({"scale": float("nan")}, ValueError, "scale is nan, must be finite"),
    ({"groups": 0}, ValueError, "^groups is 0, must be 1 or more"),
    ({"groups": 3}, ValueError, "groups is 3, must divide E, 5"),
    ({"group_top_k": 2}, ValueError, "group_top_k is 2, must be at most groups, 1"),
    ({"shared_expert": 3}, TypeError, "^shared_expert is an int, must be a module or None"),
    ({"activation": "mish"}, ValueError, "^activation is 'mish', must be one of"),
])
def test_layers_that_are_refused(options, error, match):
    """When they are made, not when they are first called."""
    with pytest.raises(error, match=match):
        cadre.MoE(**{"hidden": H, "features": F, "num_experts": E, "top_k": 2, "device": "cpu"}
                  | options)


@pytest.mark.parametrize(("shared", "found"), [
    (torch.nn.Linear(H, 1), rf"\[3, 1\]"), (torch.nn.LSTM(H, H), "tuple")])
def test_a_shared_expert_that_does_not_fit(shared, found):
    """One column would be added to all."""
    moe = cadre.MoE(E, H, F, top_k=2, shared_expert=shared, device="cpu")
    with pytest.raises(ValueError, match=rf"^shared_expert\(x\) is {found}, must be a tensor of"):
        moe(torch.zeros(3, H))


def test_a_router_of_another_number_of_experts():
    """Tokens of experts that are not there would be dropped."""
    moe = cadre.MoE(E, H, F, top_k=2, device="cpu")
    moe.router = torch.nn.Parameter(torch.zeros(E + 1, H))
    with pytest.raises(ValueError, match=r"^router has shape \[6, 32\], must be \[5, 32\]: a row"):
        moe(torch.zeros(3, H))


@pytest.mark.parametrize(("scores", "counts"), [((4, 3), (1,)), ((4, 3), (2,)), ((3,), (3,)),
                                                ((4, 3), (4, 3))])
def test_losses_of_other_shapes(scores, counts):
    """One number of tokens would count for every expert."""
    with pytest.raises(ValueError, match=r"^scores and tokens_per_expert have shapes .*, must be"):
        cadre.load_balancing_loss(torch.rand(scores), torch.ones(counts, dtype=torch.int64))


def test_wrong_sizes():
    for name in ("num_experts", "hidden", "features"):
        with pytest.raises(ValueError, match=f"{name} is 0, must be 1 or more"):
            cadre.GroupedMLP(**{"num_experts": E, "hidden": H, "features": F, name: 0})
    with pytest.raises(ValueError, match=r"x has shape \[3, 31\], must be \[..., 32\]"):
        experts("cpu")(torch.zeros(3, 31), [3, 0, 0, 0, 0])
    for top_k in (0, 6):
        with pytest.raises(ValueError, match=f"top_k is {top_k}, must be 1"):
            cadre.MoE(E, H, F, top_k=top_k, device="cpu")
    with pytest.raises(ValueError, match=r"x has shape \[3, 31\], must be \[..., 32\]"):
        cadre.MoE(E, H, F, top_k=2, device="cpu")(torch.zeros(3, 31))


def moe(device, **options):
    layer = cadre.MoE(E, H, F, top_k=2, device=device, **options)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(draw(*p.shape) * 0.3)
    return layer


def dense(layer, tokens, prob, chosen):
    """Every expert on every token, weighted: fp64 [T, H]."""
    weights = torch.zeros(tokens.shape[0], E, dtype=torch.float64, device=tokens.device)
    weights = weights.scatter(1, chosen.long(), prob.double())
    parts = []
    for e in range(E):
        counts = [0] * e + [tokens.shape[0]] + [0] * (E - e - 1)
        y, _ = in_fp64(layer.experts, "swiglu", "concat", tokens.double(), counts)
        parts.append(y * weights[:, e, None])
    return sum(parts)


@pytest.mark.parametrize("options", [
    {}, {"normalize": True}, {"score": "topk_softmax"}, {"bias": True},
    {"score": "sigmoid", "normalize": True, "scale": 2.5, "expert_bias": True}])
def test_moe_equals_every_expert_on_every_token(device, options):
    layer = moe(device, **options)
    if layer.expert_bias is not None:
        layer.expert_bias.copy_(draw(E))
    x = draw(3, 7, H, device=device)
    out, router = layer(x)
    tokens = x.view(21, H)
    logits = tokens.double() @ layer.router.double().t()
    assert_close(router.logits, logits, terms=H)
    scores = logits.sigmoid() if options.get("score") == "sigmoid" else logits.softmax(-1)
    assert_close(router.scores, scores, terms=50)
    rank = scores if layer.expert_bias is None else scores + layer.expert_bias
    assert torch.equal(router.experts.sort().values.long(), rank.topk(2).indices.sort().values)
    chosen = router.experts.flatten().bincount(minlength=E)
    assert torch.equal(router.tokens_per_expert.long(), chosen)
    assert_close(out.view(21, H), dense(layer, tokens, router.prob, router.experts), terms=2000)
    if options.get("normalize"):
        torch.testing.assert_close(router.prob.sum(-1),
                                   torch.full((21,), options.get("scale", 1.0), device=device))


def test_gradients_of_moe(device):
    layer = moe(device, normalize=True)
    x = draw(21, H, device=device, grad=True)
    out, router = layer(x)
    dout = draw(21, H, device=device)
    (out * dout).sum().backward()

    leaf = x.detach().double().requires_grad_()
    w = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    scores = (leaf @ w["router"].t()).softmax(-1)
    prob = scores.gather(1, router.experts.long())
    weights = torch.zeros_like(scores).scatter(1, router.experts.long(),
                                               prob / prob.sum(-1, keepdim=True))
    gate, up = torch.einsum("th,efh->tef", leaf, w["experts.w1"]).chunk(2, -1)
    y = torch.einsum("tef,ehf->teh", functional.silu(gate) * up, w["experts.w2"])
    ((y * weights[..., None]).sum(1) * dout.double()).sum().backward()
    assert_close(x.grad, leaf.grad, terms=2000)
    for name, p in layer.named_parameters():
        assert_seen(p.grad)
        assert_close(p.grad, w[name].grad, terms=2000)


def test_shared_expert(device):
    shared = torch.nn.Linear(H, H, device=device)
    layer = moe(device, shared_expert=shared)
    x = draw(21, H, device=device)
    with_shared, _ = layer(x)
    layer.shared_expert = None
    assert torch.equal(with_shared, layer(x)[0] + shared(x))


@pytest.mark.parametrize("options", [
    {}, {"shared_gate": True}, {"shared_gate": True, "activation": "gelu"}, {"keep_rows": True}])
def test_a_shared_expert_beside_the_others(device, options):
    """Against torch in fp64, all gradients too; and it adds itself to what is there without it."""
    layer = moe(device, shared_features=40, **options)
    names = {"router", "experts.w1", "experts.w2", "shared_w1", "shared_w2"}
    if "shared_gate" in options:
        names.add("shared_gate")
    assert set(layer.state_dict()) == names
    gated = "activation" not in options
    assert layer.shared_w1.shape == (80 if gated else 40, H) and layer.shared_w2.shape == (H, 40)
    x, dout = draw(3, 7, H, device=device, grad=True), draw(3, 7, H, device=device)
    out, _ = layer(x)
    (out * dout).sum().backward()

    without = cadre.MoE(E, H, F, top_k=2, device=device, keep_rows=bool(options.get("keep_rows")),
                        activation=options.get("activation", "swiglu"))
    without.load_state_dict({name: t for name, t in layer.state_dict().items() if name in
                             ("router", "experts.w1", "experts.w2")})
    routed = x.detach().requires_grad_()
    sums, _ = without(routed)
    (sums * dout).sum().backward()
    leaf = x.detach().double().requires_grad_()
    w = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    z = leaf @ w["shared_w1"].t()
    h = functional.silu(z[..., :40]) * z[..., 40:] if gated else functional.gelu(z)
    own = h @ w["shared_w2"].t()
    if "shared_gate" in w:
        own = own * (leaf @ w["shared_gate"].t()).sigmoid()
    (own * dout.double()).sum().backward()
    assert_close(out, sums.double() + own, terms=2000)
    assert_close(x.grad, routed.grad.double() + leaf.grad, terms=2000)
    for name, p in layer.named_parameters():
        assert_seen(p.grad)
        want = w[name].grad if name.startswith("shared") else without.get_parameter(name).grad
        assert_close(p.grad, want, terms=2000)


def test_a_shared_expert_as_a_part_of_a_module(device):
    """Its parameters are drawn anew, told, moved and compiled as the others."""
    layer = cadre.MoE(E, H, F, top_k=2, device="meta", shared_features=16, shared_gate=True)
    assert layer.shared_w1.is_meta and layer.shared_gate.is_meta
    layer.to_empty(device=device).reset_parameters()
    for name in ("shared_w1", "shared_w2", "shared_gate"):
        assert 0.005 < layer.get_parameter(name).std() < 0.05
    assert "shared_features=16, shared_gate=True" in repr(layer)
    assert "shared" not in repr(cadre.MoE(E, H, F, top_k=2, device=device))
    x = draw(9, H, device=device)
    want = layer(x)[0]
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0], want)
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(x)[0]
    assert out.dtype == torch.bfloat16
    assert (out - want).abs().max() <= 0.05 * want.abs().max()
    layer.shared_gate = None
    assert not torch.equal(layer(x)[0], want)


@pytest.mark.parametrize(("options", "error", "match"), [
    ({"shared_features": 1.5}, TypeError, "^shared_features is a float, must be an int"),
    ({"shared_features": 8, "layout": "interleave32"}, ValueError,
     "^activation is 'swiglu layout=interleave32', must be words of an activation of 8 features"),
    ({"shared_features": -1}, ValueError, "^shared_features is -1, must be 1 or more"),
    ({"shared_gate": True}, ValueError, "^shared_gate is True, must be False; shared_features is"),
    ({"shared_features": 8, "delay_wgrad_compute": True}, ValueError,
     "^shared_features is 8, must be 0 with fuse_wgrad_accumulation or delay_wgrad_compute; give"),
    ({"shared_features": 8, "fuse_wgrad_accumulation": True}, ValueError,
     "^shared_features is 8, must be 0 with fuse_wgrad_accumulation or delay_wgrad_compute; give"),
])
def test_shared_experts_that_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        cadre.MoE(E, H, F, top_k=2, device="cpu", **options)


def test_expert_groups(device):
    layer = cadre.MoE(8, H, F, top_k=2, device=device, groups=4, group_top_k=1)
    _, router = layer(draw(50, H, device=device))
    assert torch.all(router.experts[:, 0] // 2 == router.experts[:, 1] // 2)


def test_router_works_in_fp32(device):
    """Where it is asked to."""
    layer = moe(device, dtype=torch.bfloat16, fp32_router=True)
    x = draw(21, H, dtype=torch.bfloat16, device=device)
    logits = functional.linear(x.float(), layer.router)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        _, router = layer(x)
    assert router.logits.dtype == router.prob.dtype == torch.float32
    assert torch.equal(router.logits, logits)
    out, router = layer.bfloat16()(x)
    assert out.dtype == torch.bfloat16 and router.logits.dtype == torch.float32


@pytest.mark.parametrize("name", ["prob", "bias2_scale"])
def test_a_choice_has_its_own_probabilities(device, name):
    layer, x = cadre.MoE(E, H, F, top_k=2, bias=True, device=device), draw(7, H, device=device)
    with pytest.raises(ValueError, match=f"^{name} is given, must be left out; the probabilities"):
        layer.experts(*layer._choice(x), **{name: torch.rand(7, device=device)})


def test_options_of_the_routing_are_read_at_every_call(device):
    layer, x = cadre.MoE(E, H, F, top_k=2, device=device), draw(7, H, device=device)
    layer.routing |= dict(top_k=3, score="sigmoid")
    want = cadre.MoE(E, H, F, top_k=3, score="sigmoid", device=device)
    want.load_state_dict(layer.state_dict())
    assert layer.top_k == 3 and layer(x)[1].experts.shape == (7, 3)
    assert torch.equal(layer(x)[0], want(x)[0])


def test_hooks_of_the_experts_run_and_cast_no_logits(device):
    """As wrappers of modules cast whatever they see of a call."""
    layer, x, seen = moe(device), draw(21, H, device=device), []

    def cast(module, given):
        seen.append(module)
        given = tree_map(lambda t: t.bfloat16() if torch.is_tensor(t) else t, given)
        return _apply_to_tensors(torch.Tensor.bfloat16, given)  # what FSDP does

    want = layer(x)[1]
    layer.experts.bfloat16().register_forward_pre_hook(cast)
    out, router = layer(x)
    assert seen == [layer.experts] and out.dtype == torch.bfloat16
    assert all(map(torch.equal, want, router))


def test_rows_are_permuted_again_or_kept(device):
    """Of each token top_k rows more, to the same bits."""
    layer, grads, kept = moe(device), [], []
    x = draw(64, H, device=device, grad=True)
    for layer.keep_rows in (False, True):
        layer.zero_grad()
        layer(x)[0].square().sum().backward()
        grads.append([p.grad for p in layer.parameters()])
        kept.append(kept_bytes(lambda: layer(x)[0]))
    assert all(map(torch.equal, *grads))
    assert kept[1] - kept[0] >= 64 * (2 - 1) * H * 4


def test_load_balancing_loss(device):
    layer = moe(device)
    _, router = layer(draw(400, H, device=device))
    loss = router.load_balancing_loss()
    share = router.tokens_per_expert.double() / 800
    torch.testing.assert_close(loss.double(), E * (share * router.scores.double().mean(0)).sum())
    loss.backward()
    assert_seen(layer.router.grad)
    even = torch.full((10, E), 1 / E, device=device)
    assert cadre.load_balancing_loss(even, torch.full((E,), 4, device=device)).item() == (
        pytest.approx(1))
    one = torch.eye(E, device=device)[:1].expand(10, E)
    assert cadre.load_balancing_loss(one, torch.tensor([20, 0, 0, 0, 0], device=device)).item() == (
        pytest.approx(E))
    assert cadre.load_balancing_loss(even[:0], torch.zeros(E, device=device)).item() == 0


def test_no_tokens(device):
    layer = moe(device)
    out, router = layer(torch.zeros(0, H, device=device))
    (out.sum() + router.load_balancing_loss()).backward()
    assert out.shape == (0, H) and router.tokens_per_expert.sum() == 0
    assert all(torch.all(p.grad == 0) for p in layer.parameters())


def test_meta_and_copies(device):
    layer = cadre.MoE(E, H, F, top_k=2, device="meta", expert_bias=True, bias=True)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device=device).reset_parameters()
    x = draw(21, H, device=device)
    out, _ = layer(x)
    assert_seen(out)
    assert torch.equal(copy.deepcopy(layer)(x)[0], out)
    assert {n for n, _ in layer.named_parameters()} == {
        "router", "experts.w1", "experts.w2", "experts.bias1", "experts.bias2"}
    assert "num_experts" not in repr(layer) and "top_k=2" in repr(layer)
    assert "5, hidden=32, features=64, activation='swiglu'" in repr(layer.experts)


CONVERSIONS = {
    "bfloat16": lambda layer: layer.bfloat16(), "half": lambda layer: layer.half(),
    "double": lambda layer: layer.double(), "to": lambda layer: layer.to(torch.bfloat16),
    "to_device": lambda layer: layer.to(layer.router.device, torch.float16),
    "around": lambda layer: torch.nn.Sequential(layer).bfloat16()[0]}


@pytest.mark.parametrize("conversion", list(CONVERSIONS))
def test_the_bias_of_experts_stays_exact(device, conversion):
    """A step that bf16 would round away moves it still."""
    layer = cadre.MoE(E, H, F, top_k=2, device=device, expert_bias=True)
    values = 1 + draw(E).to(device) * 2**-12
    layer.expert_bias.copy_(values)
    layer = CONVERSIONS[conversion](layer)
    assert layer.router.dtype != torch.float32 and layer.expert_bias.dtype == torch.float32
    assert torch.equal(layer.expert_bias, values) and layer.expert_bias.device == values.device
    layer.expert_bias += 2**-10
    assert torch.equal(layer.expert_bias, values + 2**-10)
    if conversion != "double":
        layer(draw(7, H, dtype=layer.router.dtype, device=device))


def test_the_bias_of_experts_is_fp32_from_the_beginning():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = cadre.MoE(E, H, F, top_k=2, device="cpu", expert_bias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.expert_bias.dtype == torch.float32
    state = layer.state_dict() | {"expert_bias": torch.ones(E, dtype=torch.bfloat16)}
    layer.load_state_dict(state, assign=True)
    assert layer.expert_bias.dtype == torch.float32 and torch.all(layer.expert_bias == 1)
    assert layer.to("meta").bfloat16().expert_bias.dtype == torch.float32
