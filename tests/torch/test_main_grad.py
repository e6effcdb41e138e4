"""cadre.GroupedLinear: gradients into main_grad, and gradients that are left for later."""

import pytest
import torch
from conftest import draw
from linear_reference import experts_of, gradients, module

COUNTS = [3, 0, 9, 1, 4]
ROWS = 20


@pytest.fixture
def data(device):
    return draw(ROWS, 24, device=device), draw(ROWS, 40, device=device)


def with_main_grad(layer, fill=0.25, dtype=torch.float32, announced=True):
    for w in weights_of(layer):
        w.main_grad = torch.full(w.shape, fill, dtype=dtype, device=w.device)
        if announced:
            w.grad_added_to_main_grad = False
    return layer


def weights_of(layer):
    return [p for name, p in layer.named_parameters() if name.startswith("weight")]


def main_grads(layer):
    return torch.stack([w.main_grad for w in weights_of(layer)]).reshape(5, 40, 24)


def step(layer, data, **arguments):
    x, dy = data
    layer(x, COUNTS, **arguments).backward(dy)


def wgrad(data, **options):
    layer = module(data[0].device, **options)
    step(layer, data)
    return gradients(layer, "weight"), gradients(layer, "bias")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("delay", [True, False])
def test_every_layout(data, packed, bias, fuse, delay):
    dw, dbias = wgrad(data)
    layer = with_main_grad(module(data[0].device, packed=packed, bias=bias,
                                  fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay))
    addresses = [w.main_grad.data_ptr() for w in weights_of(layer)]
    step(layer, data)
    if bias:  # never left for later
        assert torch.equal(gradients(layer, "bias"), dbias)
    if delay:
        assert torch.all(main_grads(layer) == 0.25)
        assert fuse or all(w.grad is None for w in weights_of(layer))
    assert layer.need_backward_dw() == delay
    layer.backward_dw()
    if fuse:
        assert torch.equal(main_grads(layer), 0.25 + dw)
        assert all(w.grad_added_to_main_grad for w in weights_of(layer))
    else:
        assert torch.equal(gradients(layer, "weight"), dw)
        assert torch.all(main_grads(layer) == 0.25)
        assert not any(w.grad_added_to_main_grad for w in weights_of(layer))
    assert addresses == [w.main_grad.data_ptr() for w in weights_of(layer)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_type_of_main_grad(device, packed, dtype):
    """bf16 weights; fp32 sums are not rounded on the way."""
    data = draw(ROWS, 24, dtype=torch.bfloat16, device=device), draw(
        ROWS, 40, dtype=torch.bfloat16, device=device)
    layer = with_main_grad(module(device, packed=packed, dtype=torch.bfloat16,
                                  fuse_wgrad_accumulation=True), 0.0, dtype)
    step(layer, data)
    exact = wgrad([t.float() for t in data])[0]
    assert main_grads(layer).dtype == dtype
    torch.testing.assert_close(main_grads(layer).float(), exact, rtol=2e-6 if
                               dtype == torch.float32 else 8e-3, atol=2e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_two_microbatches_then_a_new_step(data, packed):
    dw = wgrad(data)[0]
    layer = with_main_grad(module(data[0].device, packed=packed, fuse_wgrad_accumulation=True),
                           float("nan"))
    for _ in range(2):
        step(layer, data, is_first_microbatch=True)
        assert torch.equal(main_grads(layer), dw)
        step(layer, data, is_first_microbatch=False)
        torch.testing.assert_close(main_grads(layer), 2 * dw)


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_overwrite_main_grad(data, packed, delay):
    layer = with_main_grad(module(data[0].device, packed=packed, fuse_wgrad_accumulation=True,
                                  delay_wgrad_compute=delay), float("nan"))
    for w in weights_of(layer):
        w.overwrite_main_grad = True
    step(layer, data)
    layer.backward_dw()
    assert torch.equal(main_grads(layer), wgrad(data)[0])


def test_overwrite_main_grad_of_some_experts(data):
    layer = with_main_grad(module(data[0].device, packed=False, fuse_wgrad_accumulation=True))
    overwritten = [False, True, True, False, True]  # expert 1 has no rows
    for w, overwrite in zip(weights_of(layer), overwritten):
        w.overwrite_main_grad = overwrite
        if overwrite:
            w.main_grad.fill_(float("nan"))
    step(layer, data)
    dw = wgrad(data)[0]
    for got, want, overwrite in zip(main_grads(layer), dw, overwritten):
        assert torch.equal(got, want if overwrite else want + 0.25)


@pytest.mark.parametrize("packed", [True, False])
def test_what_autograd_gets(data, packed):
    layer = with_main_grad(module(data[0].device, packed=packed, fuse_wgrad_accumulation=True))
    weights = weights_of(layer)
    step(layer, data)
    assert all(w.grad is not None and w.grad.shape == w.shape for w in weights)

    for w in weights:
        w.zero_out_wgrad = True
    layer.zero_grad()
    step(layer, data)
    assert all(torch.all(w.grad == 0) for w in weights)

    for w in weights:
        del w.grad_added_to_main_grad
    layer.zero_grad()
    step(layer, data)
    assert all(w.grad is None for w in weights)


def test_stand_ins_are_not_one_tensor_with_a_gradient(data):
    """.grad is the weight's own: writing it changes no other."""
    layer = with_main_grad(module(data[0].device, packed=False, fuse_wgrad_accumulation=True))
    for w in weights_of(layer):
        w.zero_out_wgrad = True
    step(layer, data)
    layer.weight0.grad.fill_(5)
    assert torch.all(layer.weight1.grad == 0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("zero", [True, False])
def test_stand_ins_are_not_copied(data, packed, delay, zero):
    """Autograd makes the stand-in itself the .grad; a copy would cost the weights' bytes twice."""
    layer = with_main_grad(module(data[0].device, packed=packed, fuse_wgrad_accumulation=True,
                                  delay_wgrad_compute=delay))
    seen = {}
    for w in weights_of(layer):
        w.zero_out_wgrad = zero
        w.register_hook(lambda grad, w=w: seen.__setitem__(w, grad.data_ptr()))
    for _ in range(2):
        step(layer, data)
        if delay:
            layer.backward_dw()
        assert [w.grad.data_ptr() for w in weights_of(layer)] == [
            seen[w] for w in weights_of(layer)]
        layer.zero_grad()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_stand_ins_are_no_anomaly(data, packed, delay):
    """Torch fills new memory with NaN here, which anomaly mode took for a gradient."""
    layer = with_main_grad(module(data[0].device, packed=packed, fuse_wgrad_accumulation=True,
                                  delay_wgrad_compute=delay))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            step(layer, data)
        assert all(not w.grad.any() for w in weights_of(layer))
        layer.zero_grad()
        step(layer, data)
        assert all(w.grad.isnan().all() for w in weights_of(layer))
    finally:
        torch.use_deterministic_algorithms(False)


def test_main_grad_is_asked_for_in_backward(data):
    """Every expert of a sharded layer says where its buffer is now."""
    layer = module(data[0].device, packed=False, fuse_wgrad_accumulation=True)
    buffers, asked = {}, []

    def get(e):
        asked.append(e)
        return buffers[e]

    for e, w in enumerate(weights_of(layer)):
        setattr(w, "__fsdp_param__", True)
        w.get_main_grad = lambda e=e: get(e)
    y = layer(data[0], COUNTS)
    assert asked == []
    buffers.update({e: torch.zeros(40, 24, device=data[0].device) for e in range(5)})
    y.backward(data[1])
    assert asked == [0, 1, 2, 3, 4]
    assert all(w.main_grad is buffers[e] for e, w in enumerate(weights_of(layer)))
    assert torch.equal(main_grads(layer), wgrad(data)[0])


def test_main_grad_that_moved_since_forward(data):
    layer = with_main_grad(module(data[0].device, fuse_wgrad_accumulation=True))
    y = layer(data[0], COUNTS)
    old = layer.weight.main_grad
    layer.weight.main_grad = torch.zeros_like(old)
    y.backward(data[1])
    assert torch.all(old == 0.25)
    assert torch.equal(main_grads(layer), wgrad(data)[0])


def test_flat_main_grad(data):
    layer = module(data[0].device, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(5 * 40 * 24, device=data[0].device)
    step(layer, data)
    assert torch.equal(layer.weight.main_grad.view(5, 40, 24), wgrad(data)[0])


@pytest.mark.parametrize("delay", [True, False])
def test_autograd_sees_that_flat_main_grad_was_written(data, delay):
    layer = module(data[0].device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    layer.weight.main_grad = torch.zeros(5 * 40 * 24, device=data[0].device)
    before = layer.weight.main_grad._version
    step(layer, data)
    layer.backward_dw()
    assert layer.weight.main_grad._version > before


@pytest.mark.parametrize("delay", [True, False])
def test_autograd_sees_that_main_grad_was_written(data, delay):
    layer = with_main_grad(module(data[0].device, fuse_wgrad_accumulation=True,
                                  delay_wgrad_compute=delay))
    scale = torch.ones(24, device=data[0].device, requires_grad=True)
    norm = (layer.weight.main_grad * scale).sum()
    step(layer, data)
    layer.backward_dw()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        norm.backward()


def test_bad_main_grads(data):
    device = data[0].device
    layer = module(device, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"main_grad of a weight \[5, 40, 24\] is missing"):
        step(layer, data)
    layer.weight.main_grad = torch.zeros(5, 24, 40, device=device).transpose(1, 2)
    with pytest.raises(ValueError, match=r"shape \[5, 40, 24\] and strides \[960, 1, 40\]"):
        step(layer, data)
    layer.weight.main_grad = torch.zeros(5, 24, 40, device=device)
    with pytest.raises(ValueError, match=r"shape \[5, 24, 40\] and strides \[960, 40, 1\]"):
        step(layer, data)
    layer.weight.main_grad = torch.zeros(5, 40, 24, dtype=torch.float64, device=device)
    layer.weight.grad_added_to_main_grad = False
    with pytest.raises(TypeError, match="main_grad is torch.float64, must be torch.float32, tor"):
        step(layer, data)
    assert not layer.weight.grad_added_to_main_grad
    layer = with_main_grad(module(device, packed=False, fuse_wgrad_accumulation=True))
    layer.weight3.main_grad = layer.weight3.main_grad.bfloat16()
    with pytest.raises(TypeError, match="of one expert is torch.bfloat16, must be torch.float32"):
        step(layer, data)
    assert not layer.weight0.grad_added_to_main_grad


@pytest.mark.parametrize("delay", [True, False])
def test_main_grads_that_share_memory(data, delay):
    """Of neighbours in one buffer, in any order, the gradients are right."""
    device, size = data[0].device, 40 * 24
    layer = with_main_grad(module(device, packed=False, fuse_wgrad_accumulation=True,
                                  delay_wgrad_compute=delay))
    weights, memory = weights_of(layer), torch.zeros(5 * size, device=device)

    def refused(words):
        with pytest.raises(ValueError, match=words):
            step(layer, data)
        assert not memory.any()

    for e, w in enumerate(weights):
        w.main_grad = memory[(4 - e) * size:(5 - e) * size].view(40, 24)
    step(layer, data)
    layer.backward_dw()
    assert torch.equal(main_grads(layer), wgrad(data)[0])
    memory.zero_()
    own = weights[1].main_grad
    weights[1].main_grad = weights[4].main_grad
    refused("^main_grad of expert [14] shares memory with main_grad of expert [14], must not; both "
            "are written$")
    weights[1].main_grad = memory[7:7 + size]
    refused("main_grad of expert . shares memory with main_grad of expert ., must not")
    weights[1].main_grad = weights[2].detach()
    refused("^main_grad of expert 1 shares memory with weight of expert 2, must not; it is written "
            "while that is read$")
    weights[1].main_grad = own
    data = memory[20:20 + data[0].numel()].view_as(data[0]), data[1]
    refused("main_grad of expert 4 shares memory with the input, which the weights' gradient reads")


@pytest.mark.parametrize("packed", [True, False])
def test_weights_that_are_frozen_before_backward(data, packed):
    """Autograd leaves their .grad alone, and so is main_grad left."""
    layer = with_main_grad(module(data[0].device, packed=packed, fuse_wgrad_accumulation=True))
    x = data[0].clone().requires_grad_()
    y = layer(x, COUNTS)
    layer.requires_grad_(False)
    y.backward(data[1])
    assert torch.all(main_grads(layer) == 0.25)
    (want,) = torch.autograd.grad(layer(x, COUNTS), x, data[1])
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("delay", [True, False])
def test_experts_of_one_weight(data, delay):
    """Its gradient is the sum of theirs."""
    layer = module(data[0].device, packed=False, bias=False, delay_wgrad_compute=delay)
    layer.weight3 = layer.weight2
    plain = module(data[0].device, packed=False, bias=False)
    plain.load_state_dict(layer.state_dict())
    step(plain, data)
    want = plain.weight2.grad + plain.weight3.grad
    for times in (1, 2):
        step(layer, data)
        layer.backward_dw()
        torch.testing.assert_close(layer.weight2.grad, times * want)


def test_delayed_gradients_are_first_in_first_out(data):
    x, dy = data
    layer = module(x.device, delay_wgrad_compute=True, bias=False)
    want = []
    for factor in (1, 2):
        layer(x * factor, COUNTS).backward(dy)
        want.append(wgrad((x * factor, dy))[0])
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, want[0])
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, want[0] + want[1])
    layer.backward_dw()  # nothing is pending
    assert torch.equal(layer.weight.grad, want[0] + want[1])


@pytest.mark.parametrize("packed", [True, False])
def test_delayed_gradients_are_added_to_grad(data, packed):
    layer = module(data[0].device, packed=packed, delay_wgrad_compute=True)
    given = []
    for w in weights_of(layer):
        w.grad = torch.ones_like(w)
        given.append(w.grad)
    step(layer, data)
    layer.backward_dw()
    assert torch.equal(gradients(layer, "weight"), 1 + wgrad(data)[0])
    assert all(w.grad is g for w, g in zip(weights_of(layer), given))


def test_weights_that_changed_while_gradients_are_pending(data):
    layer = module(data[0].device, packed=False, delay_wgrad_compute=True)
    step(layer, data)
    with torch.no_grad():
        layer.weight3.add_(1)
    with pytest.raises(RuntimeError, match="version of weight 3 is .* must be .* as in backward"):
        layer.backward_dw()
    layer.discard_wgrad()
    layer.backward_dw()
    assert layer.weight0.grad is None


@pytest.mark.parametrize("fuse", [True, False])
def test_weights_that_are_gone_while_gradients_are_pending(data, fuse):
    """Nobody would find the gradient."""
    layer = with_main_grad(module(data[0].device, packed=False, delay_wgrad_compute=True,
                                  fuse_wgrad_accumulation=fuse))
    step(layer, data)
    layer.weight3 = torch.nn.Parameter(layer.weight3.detach().clone())
    with pytest.raises(RuntimeError, match="weight 3 is gone, must be the tensor of forward"):
        layer.backward_dw()
    layer.discard_wgrad()
    layer.backward_dw()


def test_hooks_of_delayed_gradients(data):
    layer = module(data[0].device, delay_wgrad_compute=True)
    seen = []
    layer.register_wgrad_accumulation_and_reduce_hooks(
        lambda: seen.append(layer.weight.grad is not None))
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append("second"))
    layer.backward_dw()
    step(layer, data)
    assert seen == []
    layer.backward_dw()
    assert seen == [True, "second"]
    layer._trigger_wgrad_accumulation_and_reduce_hooks()
    assert seen == [True, "second"] * 2


def test_marks_of_delayed_parameters(device):
    assert all(p.skip_backward_post_hook
               for p in module(device, delay_wgrad_compute=True).parameters())
    assert not any(hasattr(p, "skip_backward_post_hook") for p in module(device).parameters())


def test_without_delay_nothing_is_left(data):
    layer = module(data[0].device)
    step(layer, data)
    before = layer.weight.grad.clone()
    assert not layer.need_backward_dw()
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, before)


@pytest.mark.parametrize("delay", [True, False])
def test_second_derivatives_are_refused(data, delay):
    layer = module(data[0].device, delay_wgrad_compute=delay,
                   fuse_wgrad_accumulation=not delay)
    with_main_grad(layer)
    x = data[0].requires_grad_()
    (dx,) = torch.autograd.grad(layer(x, COUNTS).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cadre.GroupedLinear has no second derivatives"):
        dx.sum().backward()


@pytest.mark.parametrize("packed", [True, False])
def test_saved_tensors_that_come_back_as_others(data, packed):
    """As offloading does: what backward gets are copies without Python attributes."""
    layer = with_main_grad(module(data[0].device, packed=packed, fuse_wgrad_accumulation=True), 0.0)
    seen = []

    def pack(t):
        seen.append(t.shape)
        return t.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(data[0].requires_grad_(), COUNTS)
    y.backward(data[1])
    assert torch.equal(main_grads(layer), wgrad(data)[0])
    assert data[0].shape in seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
@pytest.mark.parametrize("fuse", [True, False])
def test_delayed_gradients_on_a_side_stream(fuse):
    device = torch.device("cuda")
    layer = with_main_grad(module(device, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True),
                           0.0)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    total = torch.zeros_like(layer.weight)
    for _ in range(20):
        data = draw(ROWS, 24, device=device), draw(ROWS, 40, device=device)
        step(layer, data)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            layer.backward_dw()
        total += wgrad(data)[0]
    main.wait_stream(side)
    got = layer.weight.main_grad if fuse else layer.weight.grad
    torch.testing.assert_close(got, total, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_delayed_gradients_in_a_cuda_graph(packed, fuse):
    """Replayed with other counts, other data and other content of main_grad."""
    device = torch.device("cuda")
    layer = module(device, packed=packed, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True)
    with_main_grad(layer)
    x, dy = draw(ROWS, 24, device=device), draw(ROWS, 40, device=device)
    counts = torch.tensor(COUNTS, device=device)

    def run():
        layer(x, counts).backward(dy)
        layer.backward_dw()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for other in ([0, 5, 5, 5, 5], [20, 0, 0, 0, 0], [0, 0, 0, 0, 0], COUNTS):
        counts.copy_(torch.tensor(other))
        x.normal_(), dy.normal_()
        for w in experts_of(layer, "weight") if not packed else [layer.weight]:
            w.main_grad.fill_(0.5)
        graph.replay()
        plain = module(device)
        plain(x, counts).backward(dy)
        got = main_grads(layer) - 0.5 if fuse else gradients(layer, "weight")
        torch.testing.assert_close(got, plain.weight.grad, rtol=1e-5, atol=1e-5)
