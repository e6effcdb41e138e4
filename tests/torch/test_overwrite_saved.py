"""Backward writes dz over the z that forward saved where nobody can read it again, and nowhere
else; the gradients are the same."""

import pytest
import torch
from conftest import assert_seen, draw
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cadre

OPS = torch.ops.cadre
E, H, F, T, TOP_K = 4, 32, 64, 24, 2


class Backwards(TorchDispatchMode):
    """Which backward of the experts ran, of each."""

    def __init__(self):
        super().__init__()
        self.overloads = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._schema.name.endswith(("moe_backward", "mlp_backward", "experts_backward")):
            self.overloads.append(op._overloadname)
        return op(*args, **(kwargs or {}))


def moe_case(device):
    """A function of the leaves, and the leaves."""
    weights = [draw(E, 2 * F, H, device=device, grad=True), draw(E, H, F, device=device, grad=True)]
    leaves = [draw(T, H, device=device, grad=True), draw(T, E, device=device, grad=True), *weights]

    def run(x, logits, w1, w2):
        return OPS.moe(x, logits, TOP_K, None, [w1], [], [w2], [])

    return run, leaves


def mlp_case(device):
    weights = [draw(E, 2 * F, H, device=device, grad=True), draw(E, H, F, device=device, grad=True)]
    offsets = torch.tensor([0, 5, 5, 20, T], dtype=torch.int32, device=device)
    leaves = [draw(T, H, device=device, grad=True), torch.rand(T, device=device).requires_grad_()]

    def run(x, prob, w1, w2):
        return OPS.grouped_mlp(x, offsets, prob, [w1], [], [w2], [])

    return run, leaves + weights


def routed_case(device):
    (x, logits, *weights), experts = moe_case(device)[1], torch.randint(0, E, (T, TOP_K))

    def run(x, prob, w1, w2):
        return OPS.routed_experts(x, experts.to(device), prob, E, [w1], [], [w2], [])

    return run, [x, torch.rand(T, TOP_K, device=device).requires_grad_(), *weights]


CASES = {"moe": moe_case, "grouped_mlp": mlp_case, "routed_experts": routed_case}


def gradients(run, leaves, **options):
    """Of the leaves, and which backward made them."""
    with Backwards() as seen:
        out = run(*leaves)[0]
        got = torch.autograd.grad(out.square().sum(), leaves, **options)
    assert_seen(got[0])
    return got, seen.overloads


@pytest.mark.parametrize("case", CASES)
def test_where_the_graph_is_let_go(case, device):
    run, leaves = CASES[case](device)
    want, kept = gradients(run, leaves, retain_graph=True)
    got, overwritten = gradients(run, leaves)
    assert kept == ["default"] and overwritten == ["overwrite_saved"]
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("case", CASES)
def test_a_graph_that_is_kept_gives_the_same_again(case, device):
    run, leaves = CASES[case](device)
    loss = run(*leaves)[0].square().sum()
    first, second, last = (torch.autograd.grad(loss, leaves, retain_graph=turn < 2)
                           for turn in range(3))
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, last))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_checkpoints(case, reentrant, device):
    run, leaves = CASES[case](device)
    want, _ = gradients(run, leaves)
    out = checkpoint(lambda *given: run(*given)[0], *leaves, use_reentrant=reentrant)
    out.square().sum().backward()
    assert all(torch.equal(leaf.grad, w) for leaf, w in zip(leaves, want))


@pytest.mark.parametrize("case", CASES)
def test_compiled_code_keeps_it(case, device):
    run, leaves = CASES[case](device)
    want, _ = gradients(run, leaves)
    graphs = []

    def recorded(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(lambda *given: run(*given)[0], fullgraph=True,
                             backend=aot_autograd(fw_compiler=recorded))
    compiled(*leaves).square().sum().backward()
    backwards = [str(node.target) for node in graphs[1].graph.nodes if "_backward" in node.name]
    assert backwards == [f"cadre.{case}_backward.default"]
    assert all(torch.equal(leaf.grad, w) for leaf, w in zip(leaves, want))


def test_the_schema_says_so(device):
    for name in CASES:
        schemas = [getattr(OPS, f"{name}_backward").default._schema,
                   getattr(OPS, f"{name}_backward").overwrite_saved._schema]
        written = [[a.name for a in s.arguments if a.alias_info and a.alias_info.is_write]
                   for s in schemas]
        assert written == [[], ["saved"]]


@pytest.mark.parametrize("case", CASES)
def test_what_somebody_holds_is_left_alone(case, device):
    run, leaves = CASES[case](device)
    want, _ = gradients(run, leaves)
    for hold in (lambda t: t, lambda t: t[3:], lambda t: t.detach()):
        held = []

        def holding(*given, held=held, hold=hold):
            out = run(*given)
            held.extend([hold(out[-1]), hold(out[-1]).clone()])
            return out

        got, overloads = gradients(holding, leaves)
        assert overloads == ["default"] and all(map(torch.equal, got, want))
        assert torch.equal(*held)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        got, overloads = gradients(run, leaves)
    assert overloads == ["default"] and all(map(torch.equal, got, want))


def test_the_overload_says_what_it_writes(device):
    run, leaves = moe_case(device)
    x, logits, w1, w2 = [t.detach() for t in leaves]
    wants = (True, True, True, True, False)
    out, experts, _, _, offsets, saved = OPS.moe(x, logits, TOP_K, None, [w1], [], [w2], [],
                                                 wants=wants)
    before, version = saved.clone(), saved._version
    args = draw(T, H, device=device), None, x, logits, experts, offsets
    rest = [w1], [], [w2], []
    want = OPS.moe_backward(*args, saved, *rest, wants=wants)
    assert torch.equal(saved, before) and saved._version == version
    got = OPS.moe_backward.overwrite_saved(*args, saved, *rest, wants=wants)
    assert not torch.equal(saved, before) and saved._version > version
    for g, w in zip(got, want):
        assert all(map(torch.equal, g, w)) if isinstance(g, list) else torch.equal(g, w)


def test_the_layers(device):
    for layer, given in ((cadre.MoE(E, H, F, top_k=TOP_K, device=device), ()),
                         (cadre.GroupedMLP(E, H, F, device=device), ([6, 6, 6, 6],))):
        x = draw(T, H, device=device, grad=True)
        with Backwards() as seen:
            out = layer(x, *given)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert seen.overloads == ["overwrite_saved"], layer
