"""cadre.MoE whose tokens travel as codes that their owner has made: the bits of a layer that
quantises rows of numbers, and what its weight gradients read."""

import json
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from expert_parallel_cases import WORLD, answers_to, same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cadre
from cadre.grouped_mlp import RankRows
from cadre.moved_codes import sent

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page  # noqa: E402

H, F, E, TOP_K = 192, 48, 12, 2  # E of all ranks; H is no whole number of blocks of fp8_block
TOKENS = [9, 0, 5, 14][:WORLD]

# (format on the way, its recipe, how scales of rows lie)
CASES = [("mxfp8", "mxfp8", "row"),
         ("mxfp8", "mxfp8,wgrad=bf16", "row"),
         ("mxfp8:e5m2", "bf16,fprop=mxfp8:e5m2*mxfp8", "row"),
         ("fp8_block", "fp8_block", "column"),
         ("fp8_block", "fp8_block,wgrad=bf16", "row"),
         ("fp8_block:fp32", "bf16,fprop=fp8_block:fp32*fp8_block:2d+fp32", "column"),
         ("fp8_row", "bf16,fprop=fp8_row*fp8_row", "row")]


# What the processes run


def layers_of(device, x, major="row", tokens=max(TOKENS), **options):
    """Of numbers, and through the same window of codes."""
    numbers = cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K, route="window", hidden=H,
                                   tokens=tokens, dtype=torch.bfloat16, device=device, **options)
    return numbers, cadre.ExpertParallel(dist.group.WORLD, E // WORLD, TOP_K, route="window",
                                         share=numbers, x=x, scales_major=major, **options)


def layer(device, ep=None, recipe=None, **options):
    """Of one seed on all ranks, with experts that differ by more than roundings do."""
    torch.manual_seed(4)
    whole = cadre.MoE(E, H, F, top_k=TOP_K, normalize=True, device=device, dtype=torch.bfloat16,
                      bias=True, recipe=recipe)
    with torch.no_grad():
        for p in whole.parameters():
            p.copy_(draw(*p.shape) * 0.3)
    if ep is None:
        return whole
    own = cadre.MoE(E, H, F, top_k=TOP_K, normalize=True, device=device, dtype=torch.bfloat16,
                    bias=True, recipe=recipe, ep=ep, **options)
    own.load_state_dict(whole.state_dict(), strict=False)
    return own


def tokens_of_all(device):
    torch.manual_seed(50)
    return (draw(sum(TOKENS), H, dtype=torch.bfloat16, device=device),
            draw(sum(TOKENS), H, dtype=torch.bfloat16, device=device))


def part(t, rank):
    return t[sum(TOKENS[:rank]):sum(TOKENS[:rank + 1])]


def whole_of(x):
    """Offsets of one expert that has all rows."""
    return torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device)


def decoded(x, format):
    codes = cadre.quantize(x, whole_of(x), format)
    return cadre.dequantize(codes, whole_of(x), format, shape=x.shape, dtype=x.dtype)


def step(own, x, dout, call=None):
    """(out, dx, {gradients})."""
    own.zero_grad()
    leaf = x.clone().requires_grad_()
    out = (call or (lambda t: own(t)[0]))(leaf)
    out.backward(dout)
    return out.detach(), leaf.grad, {n: p.grad.clone() for n, p in own.named_parameters()}


def assert_same(got, want, but=()):
    assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])
    for name, grad in want[2].items():
        assert name in but or same_bits(got[2][name], grad), name


def bits(rank, device, format, recipe, major):
    """Of one process with all tokens, and of the same layer that sends numbers. dw1 reads what the
    codes say, which is x itself where that is powers of two."""
    numbers, codes = layers_of(device, format, major)
    x, dout = tokens_of_all(device)
    whole = layer(device, recipe=recipe)
    for exact in (False, True):
        if exact:
            x = x.sign() * x.abs().log2().round().clamp(-3, 0).exp2()
            assert same_bits(decoded(x, format), x)
        want = step(whole, x, dout)
        results = []
        for ep in (numbers, codes):
            own = layer(device, ep, recipe)
            results.append(step(own, part(x, rank), part(dout, rank)))
            assert same_bits(results[-1][0], part(want[0], rank))
            assert same_bits(results[-1][1], part(want[1], rank))
            with torch.no_grad():
                assert same_bits(own(part(x, rank))[0], results[-1][0])
        assert_same(results[1], results[0], but=() if exact else ("experts.w1",))
        of_w1 = [grads["experts.w1"] for _, _, grads in results]
        torch.testing.assert_close(*of_w1, rtol=0.1, atol=0.1 * float(of_w1[0].abs().max()))
    codes.check()


def gradients_of_the_first_weights(rank, device, format, recipe, major):
    """They read what the codes say, as experts do whose tokens are just that."""
    numbers, codes = layers_of(device, format, major)
    x = part(tokens_of_all(device)[0], rank)
    said = decoded(x, format)
    assert not same_bits(said, x) or len(x) == 0
    assert same_bits(decoded(said, format), said)
    torch.manual_seed(rank)
    experts = torch.randint(0, E, (len(x), TOP_K), device=device)
    prob = torch.rand(len(x), TOP_K, device=device)
    torch.manual_seed(7)
    mlp = cadre.GroupedMLP(E // WORLD, H, F, device=device, dtype=torch.bfloat16, recipe=recipe)
    grads = []
    for ep, given in ((codes, x), (numbers, said)):  # so that no memory holds said by chance
        (rows, row_prob, offsets, handle), with_codes = sent(ep, mlp, given, (experts, prob), None)
        y = mlp(rows, RankRows(offsets, handle.window, None, None, with_codes), row_prob)
        out = ep.collect(y, handle)
        grads.append((out, *torch.autograd.grad(out.sin().sum(), (mlp.w1, mlp.w2))))
    assert all(map(same_bits, *grads))
    assert grads[0][1].abs().max() > 0


class Calls(TorchDispatchMode):
    """The operators that move or quantise x, with what is said of them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("cadre.").removesuffix(".default")
        if name == "quantize":
            self.seen.append((name, tuple(args[0].shape)))
        elif name.startswith("_window_dispatch"):
            self.seen.append((name, args[1].element_size()))
        elif name == "grouped_mlp":
            self.seen.append((name, (kwargs or {}).get("x_codes", args[-1]) is not None))
        return function(*args, **(kwargs or {}))


def what_is_sent(rank, device):
    """Bytes, of what each owner quantises once a token; gradients travel as numbers."""
    _, codes = layers_of(device, "mxfp8")
    own = layer(device, codes, "mxfp8", dispatch_again=True)
    x, dout = (part(t, rank) for t in tokens_of_all(device))
    leaf = x.clone().requires_grad_()
    with Calls() as calls:
        out, _ = own(leaf)
        out.backward(dout)
    assert calls.seen == [("quantize", tuple(x.shape)), ("_window_dispatch_codes", 1),
                          ("grouped_mlp", True), ("_window_dispatch_backward", 2)]


def frozen(rank, device):
    """Weights that do not learn, and a router alone that does."""
    numbers, codes = layers_of(device, "fp8_block", "column")
    x, dout = (part(t, rank) for t in tokens_of_all(device))
    results = []
    for ep in (numbers, codes):
        own = layer(device, ep, "fp8_block")
        own.experts.requires_grad_(False)
        leaf = x.clone().requires_grad_()
        out, _ = own(leaf)
        out.backward(dout)
        router = own.router.grad.clone()
        own.zero_grad()
        own(x)[0].backward(dout)
        results.append((out.detach(), leaf.grad, router, own.router.grad))
        with torch.inference_mode():
            assert same_bits(own(x)[0], out.detach())
    assert all(map(same_bits, *results))


class Adapted(cadre.GroupedMLP):
    """With an adapter, which reads x itself."""

    def forward(self, x, counts, prob=None, bias2_scale=None):
        return super().forward(x, counts, prob, bias2_scale) + x / 2


def read_by_others(rank, device):
    """Hooks and subclasses read what the codes say, whatever learns."""
    _, codes = layers_of(device, "mxfp8")
    x = part(tokens_of_all(device)[0], rank)
    seen = []
    for kind, learns in ((cadre.GroupedMLP, True), (Adapted, True), (Adapted, False)):
        own = layer(device, codes, "mxfp8")
        own.experts.__class__ = kind
        if kind is cadre.GroupedMLP:
            own.experts.register_forward_hook(lambda mlp, given, made: made + given[0] / 2)
        own.experts.w1.requires_grad_(learns)
        seen.append(own(x)[0].detach())
        with torch.no_grad():
            seen.append(own(x)[0])
            seen.append(torch.compile(own, backend="aot_eager")(x)[0])
    torch._dynamo.reset()  # other tests of these processes compile such layers, too
    assert all(same_bits(out, seen[0]) for out in seen)
    assert seen[0].isfinite().all()


def pushed(rank, device):
    """Experts push results of codes as they do of numbers."""
    numbers, codes = layers_of(device, "mxfp8", tokens=4096)  # exchanges of few fetch their rows
    x, dout = (part(t, rank) for t in tokens_of_all(device))
    want = step(layer(device, numbers, "mxfp8,wgrad=bf16", push=False), x, dout)
    said, within = [], codes._window.name_within
    codes._window.name_within = lambda can: said.append((name := within(can)).count("push")) or name
    for push in (None, False):
        got = step(layer(device, codes, "mxfp8,wgrad=bf16", push=push), x, dout)
        assert_same(got, want, but=("experts.w1",))
    assert said == [device.type == "cpu", 0]  # no kernel of Hopper adds a bias to what it pushes


def around(rank, device):
    """A recipe of the context, checkpoints, compiled code, autocast, FSDP2: as without. Sums by
    rank and a shared expert: as of numbers."""
    numbers, codes = layers_of(device, "mxfp8")
    x, dout = (part(t, rank) for t in tokens_of_all(device))
    own = layer(device, codes)
    with cadre.autocast(recipe="mxfp8"):
        want = step(own, x, dout)
        assert_same(step(layer(device, numbers), x, dout), want, but=("experts.w1",))
        for options in ({}, dict(context_fn=cadre.saved_exchanges)):
            again = step(own, x, dout, lambda t: checkpoint(
                lambda u: own(u)[0], t, use_reentrant=False, **options))
            assert_same(again, want)
        run = torch.compile(own, backend="aot_eager", fullgraph=True)
        assert_same(step(own, x, dout, lambda t: run(t)[0]), want)
        with torch.no_grad():
            assert same_bits(run(x)[0], want[0])
    with torch.autocast(device.type, torch.bfloat16), cadre.autocast(recipe="mxfp8"):
        assert same_bits(own(x.float())[0], want[0])
    summed = [step(layer(device, ep, "mxfp8"), x, dout)
              for ep in layers_of(device, "mxfp8", sum="rank")]
    assert_same(*summed, but=("experts.w1",))
    mesh = init_device_mesh(device.type, (WORLD, 1), mesh_dim_names=("ep", "replicas"))
    fully_shard(own.experts, mesh=mesh["replicas"])  # hands on other tensors of the same memory
    assert own.experts._is_watched() and not own.experts._is_read()
    hook = own.experts.register_forward_hook(lambda *_: None)
    assert own.experts._is_read()
    hook.remove()
    with cadre.autocast(recipe="mxfp8"):
        sharded = own(leaf := x.clone().requires_grad_())[0]
        sharded.backward(dout)
    assert same_bits(sharded, want[0]) and same_bits(leaf.grad, want[1])
    assert same_bits(own.experts.w1.grad.full_tensor(), want[2]["experts.w1"])
    shared = [step(layer(device, ep, "mxfp8", shared_features=24), x, dout)[:2]
              for ep in (numbers, codes)]
    assert all(map(same_bits, *shared))


def operators(rank, device):
    """Their fake kernels and gradients; torch does not compare codes, which more tests do."""
    checks = ("test_faketensor", "test_autograd_registration")
    group = dist.new_group([rank], use_local_synchronization=True)
    for format, major in (("fp8_block", "column"), ("mxfp8", "row")):
        ep = cadre.ExpertParallel(group, 3, TOP_K, route="window", tokens=16, hidden=H, x=format,
                                  dtype=torch.bfloat16, device=device, scales_major=major)
        x = draw(7, H, dtype=torch.bfloat16, device=device, grad=True)
        prob = torch.rand(7, TOP_K, device=device, requires_grad=True)
        experts = torch.randint(3, (7, TOP_K), device=device)
        codes, scales, _ = cadre.quantize(x.detach(), whole_of(x), format)
        for decode in (False, True):
            given = ep._window.name, codes, scales, experts, prob, x, decode
            torch.library.opcheck(torch.ops.cadre._window_dispatch_codes.default, given,
                                  test_utils=checks)
        weights = [[draw(1, *shape, dtype=torch.bfloat16, device=device, grad=True)]
                   for shape in ((2 * F, H), (H, F))]
        given = x, whole_of(x), None, weights[0], [], weights[1], []
        torch.library.opcheck(torch.ops.cadre.grouped_mlp.default, given,
                              dict(recipe=f"{format},wgrad=bf16", x_codes=codes, x_scales=scales),
                              test_utils=checks)


def too_many_rows(rank, device):
    """NaN on all ranks, then words; or dropped, as numbers are."""
    x, dout = (part(t, rank) for t in tokens_of_all(device))
    _, codes = layers_of(device, "mxfp8", rows=3)
    out, dx, grads = step(layer(device, codes, "mxfp8,wgrad=bf16"), x, dout)
    assert all(t.isnan().all() for t in (out, dx))
    if device.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="must be at most R, 3"):
        codes.check()
    results = [step(layer(device, ep, "mxfp8"), x, dout)
               for ep in layers_of(device, "mxfp8", rows=3, overflow="drop")]
    assert_same(*results, but=("experts.w1",))


USES = """
moe(None)(x)
moe("bf16", push=True)(x)
moe("fp8_block")(x)
moe("mxfp8", delay_wgrad_compute=True)
moe("mxfp8", ep=sending(prob=False))(x)
moe("mxfp8")(x.float())
moe("mxfp8", change=lambda m: setattr(m, "experts", nn.Linear(64, 64)))(x)
moe("mxfp8", change=lambda m: m.experts.register_forward_pre_hook(doubled))(x)
moe("mxfp8", change=lambda m: m.experts.register_forward_pre_hook(doubled_in_place))(x)
mlp("mxfp8", x_codes=codes.codes)
mlp("mxfp8", x_scales=codes.scales)
mlp("bf16", x_codes=codes.codes, x_scales=codes.scales)
mlp("mxfp8", x_codes=codes.codes, x_scales=codes.scales[:, :1])
mlp("fp8_block", x_codes=codes.codes, x_scales=codes.scales)
"""


def answers(rank, device, path):
    """The uses in docs/errors.md, of one rank on the CPU."""
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)

    def sending(**options):
        return cadre.ExpertParallel(alone, 4, 2, route="window", tokens=2048, hidden=64, x="mxfp8",
                                    dtype=torch.bfloat16, device="cpu", **options)

    def moe(recipe, change=lambda made: None, **options):
        made = cadre.MoE(4, 64, 32, top_k=2, device="cpu", dtype=torch.bfloat16, recipe=recipe,
                         **{"ep": sending(), **options})
        change(made)
        return made

    def doubled(module, given):
        return given[0] * 2, *given[1:]

    @torch.no_grad()
    def doubled_in_place(module, given):
        given[0].mul_(2)

    def mlp(recipe, **in_codes):
        w1, w2 = (draw(1, *shape, dtype=torch.bfloat16) for shape in ((64, 64), (64, 32)))
        return torch.ops.cadre.grouped_mlp(x, offsets, None, [w1], [], [w2], [], recipe=recipe,
                                           **in_codes)

    x = draw(5, 64, dtype=torch.bfloat16, device="cpu")
    offsets = whole_of(x)
    codes = cadre.quantize(x, offsets, "mxfp8")
    given = answers_to(USES, globals() | locals())
    if rank == 0:
        path.write_text(json.dumps(given))


# The tests


@pytest.mark.parametrize("format, recipe, major", CASES)
def test_bits(ranks, format, recipe, major):
    ranks.run(bits, format, recipe, major)


@pytest.mark.parametrize("format, recipe, major", [CASES[i] for i in (0, 1, 3, 4)])
def test_what_gradients_of_the_first_weights_read(ranks, format, recipe, major):
    ranks.run(gradients_of_the_first_weights, format, recipe, major)


@pytest.mark.parametrize("task", [what_is_sent, frozen, read_by_others, pushed, around, operators,
                                  too_many_rows], ids=lambda task: task.__name__)
def test_codes_of_a_layer(ranks, task):
    ranks.run(task)


def test_errors(ranks, tmp_path):
    ranks.run(answers, tmp_path / "answers")
    errors_page.settle("door_expert_parallel_moved_codes",
                       json.loads((tmp_path / "answers").read_text()))
