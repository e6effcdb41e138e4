"""What trainers rely on of cadre.GroupedLinear besides numbers: arguments, attributes, errors."""

import copy
import inspect
from contextlib import contextmanager

import pytest
import torch
from conftest import draw
from linear_reference import experts_of, module

import cadre

PEER = [
    ("num_gemms", inspect.Parameter.empty), ("in_features", inspect.Parameter.empty),
    ("out_features", inspect.Parameter.empty), ("sequence_parallel", False),
    ("fuse_wgrad_accumulation", False), ("tp_group", None), ("tp_size", 1),
    ("get_rng_state_tracker", None), ("rng_tracker_name", None), ("init_method", None),
    ("bias", True), ("return_bias", False), ("params_dtype", None), ("parallel_mode", None),
    ("device", None), ("ub_overlap_rs", False), ("ub_overlap_ag", False), ("ub_name", None),
    ("delay_wgrad_compute", False), ("save_original_input", False),
    ("single_grouped_weight", False), ("single_grouped_bias", False), ("name", None),
    ("use_grouped_tensor", None),
]


def test_arguments_come_in_the_order_of_the_peer():
    parameters = inspect.signature(cadre.GroupedLinear).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == PEER
    forward = inspect.signature(cadre.GroupedLinear.forward).parameters.values()
    assert [p.name for p in forward if p.kind == p.POSITIONAL_OR_KEYWORD] == [
        "self", "inp", "m_splits", "is_first_microbatch", "out", "dgrad_out"]


def test_attributes(device):
    layer = cadre.GroupedLinear(5, 24, 40, device=device, save_original_input=True,
                                use_grouped_tensor=True, ub_name="fc1", name="expert")
    assert (layer.num_gemms, layer.in_features, layer.out_features, layer.tp_size) == (5, 24, 40, 1)
    assert layer.use_bias and layer.save_original_input and layer.use_grouped_tensor
    assert not (layer.fp8 or layer.fp8_calibration or layer.single_grouped_weight
                or layer.single_grouped_bias or layer.fuse_wgrad_accumulation
                or layer.delay_wgrad_compute)
    assert layer.fp8_meta == {"recipe": None, "fp8_checkpoint": False}
    layer.init_fp8_metadata(num_gemms=5)
    group = torch.distributed.ProcessGroup(0, 1)
    layer.set_tensor_parallel_group(group)
    assert layer.tp_group is group
    assert "5, in_features=24, out_features=40" in repr(layer)


@pytest.mark.parametrize(("packed", "order"), [
    ("", "weight0 bias0 weight1 bias1 weight2 bias2"), ("weight", "bias0 bias1 bias2 weight"),
    ("bias", "weight0 weight1 weight2 bias"), ("weight bias", "weight bias")])
@pytest.mark.parametrize("kind", [cadre.GroupedLinear, cadre.ops.GroupedLinear])
def test_parameters_come_in_the_order_of_the_peer(kind, packed, order):
    """States of optimizers are kept by number."""
    layer = kind(3, 24, 40, device="cpu", **{f"single_grouped_{stem}": True
                                             for stem in packed.split()})
    assert [name for name, _ in layer.named_parameters()] == order.split()


def test_a_state_of_an_optimizer_loads_onto_the_same_parameters(device):
    """Of TransformerEngine's module, whose parameters are weight0, bias0, weight1, ..."""
    peer = {f"{stem}{e}": draw(*shape, device=device, grad=True) for e in range(3)
            for stem, shape in (("weight", (40, 24)), ("bias", (40,)))}
    theirs = torch.optim.Adam(peer.values())
    for p in peer.values():
        p.grad = torch.randn_like(p)
    theirs.step()
    layer = cadre.GroupedLinear(3, 24, 40, device=device)
    ours = torch.optim.Adam(layer.parameters())
    ours.load_state_dict(theirs.state_dict())
    for name, p in layer.named_parameters():
        assert torch.equal(ours.state[p]["exp_avg"], theirs.state[peer[name]]["exp_avg"])


def test_sizes_of_packed_parameters(device):
    layer = module(device)
    assert {n: list(p.shape) for n, p in layer.named_parameters()} == {
        "weight": [5, 40, 24], "bias": [5, 40]}
    assert list(module(device, bias=False).state_dict()) == ["weight", "_extra_state"]
    assert module(device, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("mode", "k", "n"), [(None, 24, 40), ("column", 24, 10), ("row", 6, 40)])
def test_tensor_parallel_shares(mode, k, n):
    layer = cadre.GroupedLinear(2, 24, 40, tp_size=4, parallel_mode=mode, bias=False, device="cpu")
    assert tuple(layer.weight0.shape) == (n, k)
    assert layer(torch.zeros(3, k), [1, 2]).shape == (3, n)


@pytest.mark.parametrize(("arguments", "error", "match"), [
    ({"num_gemms": 0}, ValueError, "num_gemms is 0, must be 1 or more"),
    ({"in_features": -1}, ValueError, "in_features is -1, must be 1 or more"),
    ({"out_features": 0}, ValueError, "out_features is 0, must be 1 or more"),
    ({"tp_size": 0}, ValueError, "tp_size is 0, must be 1 or more"),
    ({"tp_size": 2}, ValueError, "tp_size is 2, must be 1 with bias=True"),
    ({"tp_size": 7, "parallel_mode": "row", "bias": False}, ValueError,
     "in_features is 24, must be a multiple of tp_size 7"),
    ({"tp_size": 7, "parallel_mode": "column", "bias": False}, ValueError,
     "out_features is 40, must be a multiple of tp_size 7"),
    ({"parallel_mode": "rows"}, ValueError, "parallel_mode is 'rows', must be None"),
    ({"ub_overlap_rs": True}, ValueError, "ub_overlap_rs is True, must be False"),
    ({"ub_overlap_ag": True}, ValueError, "ub_overlap_ag is True, must be False"),
    ({"use_grouped_tensor": 1}, TypeError, "use_grouped_tensor is 1, must be a bool or None"),
    ({"scale_bias": True, "bias": False}, ValueError, "scale_bias is True with bias=False"),
    ({"scale_bias": True, "return_bias": True}, ValueError, "and return_bias=True, must be False"),
    ({"recipe": 3}, TypeError, "recipe is an int, must be words"),
])
def test_arguments_that_are_refused(arguments, error, match):
    given = {"num_gemms": 5, "in_features": 24, "out_features": 40, "device": "cpu"} | arguments
    with pytest.raises(error, match=match):
        cadre.GroupedLinear(**given)


@pytest.mark.parametrize(("shape", "splits", "error", "match"), [
    ((17, 23), [3, 0, 9, 1, 4], ValueError,
     r"inp has shape \[17, 23\], must be \[..., 24\]"),
    ((17, 24), [3, 0, 9, 1], ValueError, r"m_splits has shape \[4\], must be \[5\]"),
    ((17, 24), torch.zeros(6, dtype=torch.int32), ValueError, "give offsets as cadre.Offsets"),
    ((17, 24), [3, -1, 9, 1, 4], ValueError, r"m_splits is \[3, -1, 9, 1, 4\], must be 0 or more"),
    ((16, 24), [3, 0, 9, 1, 4], ValueError, "and 16 at most together"),
    ((17, 24), torch.zeros(5), TypeError, "m_splits is torch.float32, must be of an integer type"),
    ((17, 24), torch.zeros(5, dtype=torch.bool), TypeError, "m_splits is torch.bool"),
    ((17, 24), cadre.Offsets(torch.zeros(5, dtype=torch.int32)), ValueError,
     r"offsets is torch.int32 \[5\], must be torch.int32 \[6\]"),
    ((17, 24), cadre.Offsets(torch.zeros(6, dtype=torch.int64)), ValueError,
     r"offsets is torch.int64 \[6\]"),
    ((17, 24), cadre.Offsets(torch.zeros(6, dtype=torch.int32, device="meta")), ValueError,
     "offsets is on meta, must be on"),
    ((17, 24), torch.zeros(5, dtype=torch.int32, device="meta"), ValueError,
     "m_splits is on meta, must be on"),
])
def test_calls_that_are_refused(device, shape, splits, error, match):
    with pytest.raises(error, match=match):
        module(device)(torch.zeros(shape, device=device), splits)


def test_bias_scale_and_layer_must_agree(device):
    x, scale = draw(17, 24, device=device), draw(17, device=device)
    with pytest.raises(ValueError, match="bias_scale is given, must be left out"):
        module(device)(x, [3, 0, 9, 1, 4], bias_scale=scale)
    with pytest.raises(ValueError, match="bias_scale is missing, must be given"):
        module(device, scale_bias=True)(x, [3, 0, 9, 1, 4])
    with pytest.raises(TypeError, match="^bias_scale is a float, must be a tensor$"):
        module(device, scale_bias=True)(x, [3, 0, 9, 1, 4], bias_scale=0.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_host_splits_are_refused_in_a_capture():
    layer = module("cuda")
    x = torch.zeros(17, 24, device="cuda")
    layer(x, [3, 0, 9, 1, 4])
    with pytest.raises(ValueError, match="m_splits is on the host, must be a tensor on cuda"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(x, [3, 0, 9, 1, 4])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True},
                                     {"delay_wgrad_compute": True}])
def test_nothing_waits_for_the_device(options):
    layer = module("cuda", packed=False, **options)
    for e, w in enumerate(experts_of(layer, "weight")):
        w.main_grad = torch.zeros_like(w)
        w.overwrite_main_grad = e % 2 == 0
    x = draw(17, 24, device="cuda", grad=True)
    counts = torch.tensor([3, 0, 9, 1, 4], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for splits in (counts, [3, 0, 9, 1, 4]):
            layer(x, splits).sum().backward()
            layer.backward_dw()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_initial_values(device):
    torch.manual_seed(1)
    packed = cadre.GroupedLinear(5, 240, 400, device=device, single_grouped_weight=True)
    torch.manual_seed(1)
    discrete = cadre.GroupedLinear(5, 240, 400, device=device)
    for got, want in zip(experts_of(packed, "weight"), experts_of(discrete, "weight")):
        assert torch.equal(got, want)
    assert abs(packed.weight.std().item() - 0.023) < 1e-3
    assert all(torch.all(b == 0) for b in experts_of(packed, "bias"))


def test_init_method_and_random_state_tracker():
    entered = []

    class Tracker:
        @contextmanager
        def fork(self, name="default"):
            entered.append(name)
            yield

    layer = cadre.GroupedLinear(3, 4, 6, device="cpu", init_method=torch.nn.init.ones_,
                                single_grouped_weight=True, get_rng_state_tracker=Tracker,
                                rng_tracker_name="experts")
    assert entered == ["experts"] and torch.all(layer.weight == 1)
    cadre.GroupedLinear(3, 4, 6, device="cpu", get_rng_state_tracker=Tracker)
    assert entered == ["experts", "default"]


@pytest.mark.parametrize("packed", [True, False])
def test_meta(device, packed):
    layer = cadre.GroupedLinear(5, 24, 40, device="meta", single_grouped_weight=packed,
                                delay_wgrad_compute=True)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device=device).reset_parameters()
    assert all(p.device.type == device.type for p in layer.parameters())
    y = layer(draw(10, 24, device=device), [2] * 5)
    assert torch.isfinite(y).all() and y.abs().max() > 0

    lazy = cadre.GroupedLinear(5, 24, 40, device="meta", delay_wgrad_compute=True)
    lazy.reset_parameters()
    assert not any(p.is_meta for p in lazy.parameters())
    assert all(p.skip_backward_post_hook for p in lazy.parameters())


def test_parameters_may_be_exchanged(device):
    """As sharded training does between steps; nothing is kept of the old memory."""
    layer, other = module(device), module(device)
    x = draw(17, 24, device=device)
    before = layer(x, [3, 0, 9, 1, 4])
    layer.weight.data = layer.weight.data.clone() * 2
    layer.bias = torch.nn.Parameter(layer.bias.detach() * 2)
    torch.testing.assert_close(layer(x, [3, 0, 9, 1, 4]), 2 * before)
    shell = cadre.GroupedLinear(5, 24, 40, device="meta")
    for name in list(shell._parameters):
        shell.register_parameter(name, None)
    shell.register_parameter("weight", other.weight)
    shell.register_parameter("bias", other.bias)
    assert torch.equal(shell(x, [3, 0, 9, 1, 4]), before)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_tensors(one_rank):
    from torch.distributed.tensor import Shard, distribute_tensor
    x, counts = draw(17, 24), [3, 0, 9, 1, 4]
    plain = module("cpu")
    plain(x, counts).sum().backward()
    for options in ({}, {"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}):
        layer = module("cpu", **options)
        for name in ("weight", "bias"):
            sharded = distribute_tensor(getattr(layer, name).detach(), one_rank, [Shard(0)])
            layer.register_parameter(name, torch.nn.Parameter(sharded))
        if options:
            with pytest.raises(NotImplementedError, match="weight is a DTensor, must be a plain"):
                layer(x, counts)
            continue
        layer(x, counts).sum().backward()
        assert torch.equal(layer.weight.grad.to_local(), plain.weight.grad)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["GroupedLinear", "GroupedMLP", "MoE"])
def test_distributed_tensors_of_all_layers(one_rank, kind, compiled):
    from torch.distributed.tensor import DTensor, distribute_tensor
    options = dict(top_k=2, shared_features=8, shared_gate=True) if kind == "MoE" else {}
    plain = getattr(cadre, kind)(5, 24, 40, bias=True, device="cpu", **options)
    counts = torch.tensor([3, 0, 9, 1, 4])
    arguments = (draw(17, 24),) if kind == "MoE" else (draw(17, 24), counts)
    layer = copy.deepcopy(plain)
    for of in layer.modules():
        for name, p in list(of.named_parameters(recurse=False)):
            of.register_parameter(name, torch.nn.Parameter(distribute_tensor(p.detach(), one_rank)))
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    for call in (plain, run):
        result = call(*arguments)
        (result[0] if kind == "MoE" else result).square().sum().backward()
    for (name, p), own in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p.grad, DTensor), name
        torch.testing.assert_close(p.grad.to_local(), own.grad, msg=name)


def test_distributed_tensors_whose_gradients_autograd_does_not_see(one_rank):
    from torch.distributed.tensor import distribute_tensor
    for option in ("delay_wgrad_compute", "fuse_wgrad_accumulation"):
        layer = cadre.GroupedMLP(5, 24, 40, device="cpu", **{option: True})
        layer.w2 = torch.nn.Parameter(distribute_tensor(layer.w2.detach(), one_rank))
        with pytest.raises(NotImplementedError, match="^w2 is a DTensor, must be a plain tensor "):
            layer(draw(17, 24), [3, 0, 9, 1, 4])


@pytest.mark.parametrize("delay", [True, False])
def test_marks_of_parameters_that_are_attached_later(device, delay):
    """A weight that a trainer shares with the layer, or that takes the place of E others."""
    layers = [module(device, delay_wgrad_compute=delay),
              cadre.GroupedMLP(5, 24, 40, device=device, delay_wgrad_compute=delay),
              cadre.ops.GroupedLinear(5, 24, 40, device=device, delay_wgrad_compute=delay,
                                      single_grouped_weight=True)]
    for layer, weight in zip(layers, ("weight", "w2", "weight")):
        setattr(layer, weight, torch.nn.Parameter(getattr(layer, weight).detach().clone()))
        assert hasattr(getattr(layer, weight), "skip_backward_post_hook") == delay
    shell = module("meta", packed=False, delay_wgrad_compute=delay)
    for e in range(5):
        shell.register_parameter(f"weight{e}", None)
    shell.register_parameter("weight", layers[0].weight)
    assert hasattr(shell.weight, "skip_backward_post_hook") == delay
    layers[2].bias0 = torch.nn.Parameter(torch.zeros(40, device=device))
    assert not hasattr(layers[2].bias0, "skip_backward_post_hook")


@pytest.mark.parametrize("delay", [True, False])
def test_marks_of_parameters_that_a_conversion_makes(device, delay):
    """Anew on a device, and of another type."""
    for layer, marked in (
            (module("meta", delay_wgrad_compute=delay), {"weight", "bias"}),
            (cadre.GroupedMLP(5, 24, 40, device="meta", delay_wgrad_compute=delay), {"w1", "w2"})):
        layer.wg = torch.nn.Parameter(torch.empty(5, 24, device="meta"))  # a subclass's own
        found = {name for name, p in layer.to_empty(device=device).bfloat16().named_parameters()
                 if hasattr(p, "skip_backward_post_hook")}
        assert found == (marked if delay else set())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("mode", "dim"), [(None, 0), ("column", 0), ("row", 1)])
def test_parameters_say_how_ranks_divide_them(mode, dim, packed):
    """Megatron's norm of gradients counts a weight that does not on the first rank alone."""
    layer = cadre.GroupedLinear(3, 24, 40, parallel_mode=mode, device="cpu",
                                single_grouped_weight=packed, single_grouped_bias=packed)
    for name, p in layer.named_parameters():
        marks = [getattr(p, mark, None)
                 for mark in ("tensor_model_parallel", "partition_dim", "partition_stride")]
        marked = name.startswith("weight") or mode == "column"
        assert marks == ([True, dim, 1] if marked else [None] * 3), name
        assert hasattr(p, "sequence_parallel") == (name.startswith("bias") and mode == "row")
    late = cadre.GroupedLinear(3, 24, 40, device="meta")
    assert not hasattr(late.weight0, "partition_dim")
    late.to_empty(device="cpu").reset_parameters()
    assert late.weight2.tensor_model_parallel
    of_operations = cadre.ops.GroupedLinear(3, 24, 40, device="cpu")
    assert not hasattr(of_operations.weight0, "partition_dim")


def test_scale_bias_means_nothing_without_a_bias():
    linear = cadre.ops.GroupedLinear(2, 8, 4, bias=False, scale_bias=True, device="cpu")
    assert (linear.num_extra_inputs, linear.has_bias) == (1, False)
    assert linear(torch.zeros(3, 8), [1, 2]).shape == (3, 4)


def test_quantised_parameters_can_be_left_off():
    with cadre.quantized_model_init(enabled=False), cadre.fp8_model_init(False):
        cadre.GroupedLinear(2, 8, 4, device="cpu")
