"""Derivatives that autograd alone does not give: forward mode, second ones, functorch's transforms.
Each is right or an error, never zero, and never silently left out."""

import pytest
import torch
from entry_points import COUNTS, DIFFERENTIABLE, E, F, H, R, entry_points
from torch.autograd import forward_ad

import cadre

LAYERS = ["linear", "packed linear", "deferred linear", "linear with buffers", "mlp", "moe",
          "moe in bf16", "fused row", "row", "experts"]
REFUSED = (NotImplementedError, RuntimeError)
FIXED = {"alpha", "expert_bias"}  # have no gradient


@pytest.fixture(params=DIFFERENTIABLE)
def entry(request):
    return entry_points()[request.param]


def floats(tensors):
    return [n for n, t in tensors.items() if t.is_floating_point() and "out" not in n]


def learning(tensors, but=()):
    return {n: t.detach().clone().requires_grad_(n in floats(tensors) and n not in but)
            for n, t in tensors.items()}


def frozen(call):
    """Of a layer whose parameters require no gradient."""

    def run(t):
        with torch.no_grad():
            return call(t)

    return run


# Forward mode


def tangent_of(call, tensors, name):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        return forward_ad.unpack_dual(call(tensors | {name: dual})).tangent


@pytest.mark.parametrize("records", [True, False])
def test_forward_mode_is_refused(entry, records):
    """By each tensor that has a derivative, be it a parameter."""
    call, tensors = entry
    for name in set(floats(tensors)) - FIXED:
        with torch.set_grad_enabled(records), pytest.raises(REFUSED, match="tangent|jvp is not"):
            tangent_of(call, tensors, name)
            pytest.fail(f"the tangent of {name} was lost")
        with torch.set_grad_enabled(records), pytest.raises(REFUSED, match="tangent|jvp is not"):
            tangent_of(call, learning(tensors, but=FIXED), name)
            pytest.fail(f"the tangent of {name} was lost beside gradients")


@pytest.mark.parametrize("transform", [
    lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    lambda f, x: torch.func.jacfwd(f)(x),
    lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
])
def test_functorch_s_forward_mode_is_refused(entry, transform):
    call, tensors = entry
    name = next(iter(tensors))
    for run in (call, frozen(call)):
        with pytest.raises(REFUSED, match="tangent|functorch|jvp is not|must be plain"):
            transform(lambda x: run(tensors | {name: x}), tensors[name])
            pytest.fail("a derivative was lost")


# Reverse mode of functorch, and vmap


@pytest.mark.parametrize("transform", [
    lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    lambda f, x: torch.func.jacrev(f)(x),
    lambda f, x: torch.func.hessian(lambda t: f(t).square().sum())(x),
    lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(f(x)))[0],
])
def test_functorch_s_reverse_mode_is_refused(entry, transform):
    """By torch: it transforms no autograd function that is C++."""
    call, tensors = entry
    name = next(iter(tensors))
    with pytest.raises(REFUSED, match="functorch|tangent|must be plain"):
        transform(lambda x: call(tensors | {name: x}), tensors[name])


def test_vmap_is_right_or_refused(entry):
    call, tensors = entry
    name = next(iter(tensors))
    run = frozen(lambda x: call(tensors | {name: x}))
    batch = torch.stack([tensors[name], 2 * tensors[name] + 1])
    want = torch.stack([run(x) for x in batch])
    try:
        got = torch.func.vmap(run)(batch)
    except REFUSED as error:
        assert "vmap" in str(error) or "Batching rule" in str(error) or "transformed" in str(error)
    else:
        assert torch.equal(got, want)


# Second derivatives


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("which", ["the input alone", "everything"])
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()])
def test_a_gradient_penalty_of_a_layer_is_refused(name, which, loss):
    """Also where weights are frozen, the loss is linear, and only some gradients are asked for."""
    call, tensors = entry_points()[name]
    first = next(iter(tensors))
    fixed = [] if which == "everything" else [n for n in tensors if n != first]
    given = learning(tensors, but=fixed)
    y = call(given)
    (g,) = torch.autograd.grad(loss(y), given[first], create_graph=True)
    for inputs in ([given[first]], [t for t in given.values() if t.requires_grad]):
        with pytest.raises(RuntimeError, match="no second derivatives|not implemented"):
            torch.autograd.grad(g.square().sum(), inputs, allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives|not implemented"):
        (loss(y) + g.square().sum()).backward()


@pytest.mark.parametrize("packed", [True, False])
def test_a_gradient_penalty_by_the_weights_alone(packed):
    """Which the penalty does not lead to but through what is refused."""
    layer = cadre.GroupedLinear(E, H, F, single_grouped_weight=packed, device="cpu")
    x = torch.randn(R, H, requires_grad=True)
    (g,) = torch.autograd.grad(layer(x, COUNTS).sum(), x, create_graph=True)
    for parameter in layer.parameters():
        with pytest.raises(RuntimeError, match="GroupedLinear has no second derivatives"):
            torch.autograd.grad(g.square().sum(), parameter, allow_unused=True)


@pytest.mark.parametrize("function", [
    lambda f, x: torch.autograd.functional.hessian(lambda t: f(t).square().sum(), x),
    lambda f, x: torch.autograd.functional.jvp(f, x, torch.ones_like(x)),
    lambda f, x: torch.autograd.functional.hvp(lambda t: f(t).square().sum(), x,
                                               torch.ones_like(x)),
])
@pytest.mark.parametrize("name", LAYERS)
def test_torch_autograd_functional_is_refused(name, function):
    """It takes a missing second derivative for zero unless told otherwise."""
    call, tensors = entry_points()[name]
    first = next(iter(tensors))
    with pytest.raises(RuntimeError, match="no second derivatives|not implemented"):
        function(lambda x: call(tensors | {first: x}), tensors[first])


def test_second_derivatives_of_products_are_right():
    call, tensors = entry_points()["grouped_mm"]
    a, b, ends, bias = (t.clone() for t in tensors.values())

    def loop(a, b, bias):
        begins = [0, *ends.tolist()]
        return torch.cat([a[i:j] @ b[e] + bias[e]
                          for e, (i, j) in enumerate(zip(begins, begins[1:]))])

    def penalties(f, dtype):
        x, w = a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()
        found = []
        for wrt in (x, w):
            (g,) = torch.autograd.grad(f(x, w, bias.to(dtype)).pow(3).sum(), wrt, create_graph=True)
            found += torch.autograd.grad(g.square().sum(), (x, w))
        return found

    got = penalties(lambda x, w, c: cadre.grouped_mm(x, w, ends, c), torch.float32)
    for g, w in zip(got, penalties(loop, torch.float64)):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-4 * float(w.abs().max()))


# Gradients in parts, again, and of what changed


def gradients(y, inputs, **options):
    return torch.autograd.grad(y, inputs, torch.ones_like(y), **options)


def test_gradients_one_at_a_time(entry):
    """As those taken together, and again from a graph that is kept."""
    call, tensors = entry
    if "out" in tensors:
        pytest.skip("its buffers hold one gradient")
    given = learning(tensors, but=FIXED)
    names = [n for n, t in given.items() if t.requires_grad]
    inputs = [given[n] for n in names]
    y = call(given)
    together = gradients(y, inputs, retain_graph=True, allow_unused=True)
    for name, one, want in zip(names, inputs, together):
        for _ in range(2):
            (got,) = gradients(y, [one], retain_graph=True, allow_unused=True)
            assert got is want is None or torch.equal(got, want), name


def test_what_changed_since_forward(entry):
    """A gradient that would be of other numbers is an error: it is right or refused for each tensor
    written in place."""
    call, tensors = entry
    if "dgrad_out" in tensors:
        pytest.skip("its buffers hold one gradient")
    for name, t in tensors.items():
        given = learning(tensors, but=FIXED)
        inputs = [v for v in given.values() if v.requires_grad]
        want = gradients(call(given), inputs, allow_unused=True)
        y = call(given)
        with torch.no_grad():
            given[name].copy_(given[name] + 1 if t.is_floating_point() else given[name].flip(0))
        try:
            got = gradients(y, inputs, allow_unused=True)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), name
        else:
            assert all(g is w is None or torch.equal(g, w) for g, w in zip(got, want)), name
