"""Copies of weights that is_first_microbatch=False uses are never those of other content."""

import inspect

import pytest
import torch
from conftest import draw
from linear_reference import module

import cadre

COUNTS, ROWS, K, N = [3, 0, 9, 1, 4], 17, 64, 96


@pytest.fixture(params=[True, False], ids=["packed", "discrete"])
def layer(request):
    return module("cpu", k=K, n=N, packed=request.param, dtype=torch.bfloat16, recipe="mxfp8")


def weights(layer):
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def results(layer, first):
    """y and dx."""
    x = torch.linspace(-2, 2, ROWS * K).view(ROWS, K).bfloat16().requires_grad_()
    y = layer(x, COUNTS, is_first_microbatch=first)
    y.sum().backward()
    return y.detach(), x.grad


def assert_not_stale(layer, change):
    old = results(layer, True)
    before = [w.detach().clone() for w in weights(layer)]
    change(layer)
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(layer)))
    got, want = results(layer, False), results(layer, None)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert not torch.equal(got[0], old[0])


def storage_swap(w):
    """As sharded training: memory freed, made again, filled where autograd does not count."""
    held, storage = w.detach().clone(), w.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
        w.copy_(held * 2)


def swap_data_twice(w):
    """The second memory may lie where the first one did."""
    w.data = w.data * 2
    w.data = w.data * 2


@torch.no_grad()
def one_element(w):
    w.view(-1)[-1].add_(4)


CHANGES = {
    "in place": lambda w: w.detach().mul_(2),
    "copy_": lambda w: torch.no_grad()(lambda: w.copy_(w * 2))(),
    "one element": one_element,
    "data": lambda w: w.data.mul_(2),
    "view of data": lambda w: w.data.view(-1)[:7].mul_(2),
    "numpy": lambda w: w.detach().view(torch.int16).numpy().__ixor__(-2**15),
    "other data": swap_data_twice,
    "set_": lambda w: torch.no_grad()(lambda: w.set_((w * 2).clone()))(),
    "memory swapped": storage_swap,
    "signs": lambda w: w.data.neg_(),
    "rows exchanged": lambda w: w.data.copy_(w.data.flip(-2)),
}


def test_other_strides_of_the_same_memory():
    """Experts and rows have changed places, which no call takes."""
    layer = module("cpu", experts=5, k=K, n=5, packed=True, dtype=torch.bfloat16, recipe="mxfp8")
    x = torch.ones(ROWS, K, dtype=torch.bfloat16)
    layer(x, COUNTS, is_first_microbatch=True)
    layer.weight.data = layer.weight.data.transpose(0, 1)
    for first in (False, None):
        with pytest.raises(ValueError, match="w is .* strides"):
            layer(x, COUNTS, is_first_microbatch=first)


@pytest.mark.parametrize("how", CHANGES)
def test_writes(layer, how):
    assert_not_stale(layer, lambda layer: CHANGES[how](weights(layer)[-1]))


def load(layer, assign=False, **changed):
    state = {name: p * 2 for name, p in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


def there_and_back(layer):
    """Rounded on the way."""
    layer.to(torch.float64).to(torch.float8_e5m2).to(torch.bfloat16)


def exchange_parameters(layer):
    for name, p in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(p.detach() * 2))


MODULE_CHANGES = {
    "load_state_dict": load,
    "assign": lambda layer: load(layer, assign=True),
    "to": there_and_back,
    "exchanged": exchange_parameters,
    "reset": lambda layer: layer.reset_parameters(),
    "foreach": lambda layer: torch.no_grad()(torch._foreach_mul_)(weights(layer), 2),
    "as a vector": lambda layer: torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(layer.parameters()) * 2, layer.parameters()),
}


@pytest.mark.parametrize("how", MODULE_CHANGES)
def test_changes_of_the_module(layer, how):
    assert_not_stale(layer, MODULE_CHANGES[how])


OPTIMIZERS = [name for name, found in vars(torch.optim).items()
              if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)
              and name not in ("Optimizer", "SparseAdam")]
WAYS = {"one by one": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, way):
    """Fused ones write without counting versions."""
    made, options = getattr(torch.optim, name), WAYS[way]
    if not options.keys() <= inspect.signature(made).parameters.keys():
        if way != "one by one":
            pytest.skip("the optimizer has no such way")
        options = {}
    layer = module("cpu", k=K, n=N, packed=False, recipe="mxfp8")

    def step(layer):
        opt = made(weights(layer), lr=0.5, **options)
        for w in weights(layer):
            w.grad = torch.ones_like(w)
        opt.step(lambda: torch.zeros(()))

    assert_not_stale(layer, step)


def copies_of(layer, first, gradient=True):
    """Where the copies lie that a call uses, and what would have to be there for its backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t) or t, lambda t: t):
        y = layer(draw(ROWS, K, dtype=torch.bfloat16).requires_grad_(gradient), COUNTS,
                  is_first_microbatch=first)
    return max((t for t in kept if t.dtype == torch.uint8), key=lambda t: t.numel()).data_ptr(), y


def test_unchanged_weights_are_not_quantised_again(layer):
    at, first = copies_of(layer, True)
    again, second = copies_of(layer, False)
    assert at == again
    first.sum().backward()  # its copies were not written again
    second.sum().backward()


def test_memory_of_copies_is_used_again_every_step(layer):
    at, y = copies_of(layer, True)
    y.sum().backward()
    weights(layer)[0].data.mul_(2)
    assert copies_of(layer, True)[0] == at


def test_copies_of_an_earlier_microbatch_are_left_alone(layer):
    """Its backward reads them."""
    x = draw(ROWS, K, dtype=torch.bfloat16).requires_grad_()
    (want,) = torch.autograd.grad(layer(x, COUNTS).sum(), x)
    first = layer(x, COUNTS, is_first_microbatch=True)
    weights(layer)[0].data.mul_(2)
    layer(x, COUNTS, is_first_microbatch=False)
    (got,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(got, want)


@pytest.mark.parametrize("inference", [True, False])
def test_inference(layer, inference):
    """Tensors of inference mode have no version counter."""
    x = draw(ROWS, K, dtype=torch.bfloat16)
    with torch.inference_mode(inference), torch.no_grad():
        layer.load_state_dict({name: p * 1 for name, p in layer.state_dict().items()}, assign=True)
        layer(x, COUNTS, is_first_microbatch=True)
        weights(layer)[0].mul_(2)
        got = layer(x, COUNTS, is_first_microbatch=False)
        assert torch.equal(got, layer(x, COUNTS))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_copies_of_inference_serve_training(layer, first, then):
    x = torch.ones(ROWS, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        layer(x, COUNTS, is_first_microbatch=first)
    for when in (then, False):
        assert all(map(torch.equal, results(layer, when), results(layer, None)))


def test_a_backward_keeps_the_copies_of_its_forward(layer):
    """Those of the next step are made while it is pending."""
    x = torch.ones(ROWS, K, dtype=torch.bfloat16).requires_grad_()
    y = layer(x, COUNTS, is_first_microbatch=True)
    want, = torch.autograd.grad(y.sum(), x, retain_graph=True)
    for weight in weights(layer):
        weight.data.mul_(2)
    doubled = layer(x, COUNTS, is_first_microbatch=True)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
    assert torch.equal(torch.autograd.grad(doubled.sum(), x)[0], want * 2)


@pytest.mark.parametrize("dtype, first, second", [
    (torch.float32, 1, 8), (torch.bfloat16, 3, 17), (torch.float16, 3, 17)])
def test_changes_that_would_meet_in_a_sum_of_products(dtype, first, second):
    """The highest bit of a word, and the bit where a product and a rotation take it."""
    layer = cadre.GroupedLinear(1, 64, 64, bias=False, device="cpu", recipe="mxfp8",
                                params_dtype=dtype)
    x = torch.randn(4, 64, dtype=dtype)
    flat = layer.weight0.data.view(-1)
    flat[first], flat[second] = 1.0, 0.0
    layer(x, [4], True)
    with torch.no_grad():
        layer.weight0.view(-1)[first] = -1.0
        layer.weight0.view(-1)[second] = 2.0
    assert torch.equal(layer(x, [4], False), layer(x, [4]))
