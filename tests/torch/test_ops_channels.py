"""cadre.ops: extra outputs that operations behind them take as extra inputs."""

import copy
import pickle

import pytest
import torch
from conftest import draw
from linear_reference import fill

from cadre import ops

E, H, F, R = 3, 16, 32, 11
COUNTS = [4, 0, 5]


def ends(to_caller=True, in_place=False):
    """An extra output and an extra input of one channel."""
    return (ops.MakeExtraOutput(in_place=in_place).set_extra_output_channel(
                0, "around", output_to_caller=to_caller),
            ops.AddExtraInput(in_place=in_place).set_extra_input_channel(0, "around"))


class Choice(ops.Operation):
    """Its input, the rows of each expert, and a factor of each row."""

    num_extra_outputs = 2

    def forward(self, x):
        return x, torch.tensor(COUNTS, device=x.device), x.square().mean(-1)


def experts(device, *channels):
    """linear, activation, linear, whose counts and factors come from channels, or from the caller
    where there are none."""
    counts, prob = channels or (None, None)
    up, down = (ops.GroupedLinear(E, *sizes, device=device) for sizes in ((H, 2 * F), (F, H)))
    fill(up)
    fill(down)
    return (up.set_extra_input_channel(0, counts),
            ops.ScaledSwiGLU().set_extra_input_channel(0, prob),
            down.set_extra_input_channel(0, counts))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("to_caller", [False, True])
def test_a_way_around(device, in_place, to_caller):
    """Nothing is written in place: others read what is in a channel."""
    first, last = ends(to_caller, in_place)
    bias = ops.Bias(H, device=device)
    with torch.no_grad():
        bias.bias.copy_(draw(H))
    row = ops.Sequential(first, bias, last)
    x, dy, dextra = (draw(R, H, device=device) for _ in range(3))
    leaf, before = x.clone().requires_grad_(), dy.clone()
    y = row(leaf)
    assert isinstance(y, tuple) == to_caller
    if to_caller:
        y, extra = y
        assert torch.equal(extra, x)
    assert torch.equal(y, x + (x + bias.bias)) and torch.equal(leaf, x)
    gave = [(y, dy)] + ([(extra, dextra)] if to_caller else [])
    torch.autograd.backward(*zip(*gave))
    torch.testing.assert_close(leaf.grad, 2 * dy + (dextra if to_caller else 0))
    torch.testing.assert_close(bias.bias.grad, dy.sum(0))
    assert torch.equal(dy, before)


@pytest.mark.parametrize("in_place", [False, True])
def test_two_readers_of_one_channel(device, in_place):
    first, last = ends(to_caller=False, in_place=in_place)
    another = ops.AddExtraInput(in_place=in_place).set_extra_input_channel(0, "around")
    x = draw(R, H, grad=True, device=device)
    y = ops.Sequential(first, last, torch.nn.Identity(), another)(x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(y.detach(), 3 * x.detach())
    torch.testing.assert_close(x.grad, torch.full_like(x, 3))


def test_others_come_from_the_caller(device):
    first, last = ends()
    row = ops.Sequential(first, last, ops.AddExtraInput())
    x, more = draw(R, H, device=device), draw(R, H, device=device)
    y, extra = row(x, more)
    assert torch.equal(y, x + x + more) and torch.equal(extra, x)
    with pytest.raises(ValueError, match="^2 extra inputs are given, must be 1; the operations tak"
                                         "e MakeExtraOutput 0, AddExtraInput 0, AddExtraInput 1$"):
        row(x, more, more)
    last.set_extra_input_channel(0, None)
    assert torch.equal(row(x, more, x)[0], x + more + x)
    first.set_extra_output_channel(0, "around", output_to_caller=False)
    assert torch.equal(row(x, more, more), x + more + more)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_told_by_an_operation(device, fused):
    """Counts and factors from an operation ahead, with the bits of those that the caller gives."""
    choice = Choice()
    for index, name in enumerate(("counts", "prob")):
        choice.set_extra_output_channel(index, name, output_to_caller=False)
    mlp = experts(device, "counts", "prob")
    if not fused:
        mlp[1].register_forward_hook(lambda *_: None)
    row, plain = ops.Sequential(choice, *mlp), ops.Sequential(*experts(device))
    names = [step.name for step in row.plan()]
    apart = ["grouped_linear", "activation", "grouped_linear"]
    assert names == ["Choice", *(["grouped_mlp"] if fused else apart)]
    x, dy = draw(R, H, grad=True, device=device), draw(R, H, device=device)
    same = x.detach().clone().requires_grad_()
    row(x).backward(dy)
    _, counts, prob = Choice()(same)
    plain(same, counts, prob, counts).backward(dy)
    assert torch.equal(x.grad, same.grad)
    for got, want in zip(row.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad)


def test_compiled(device):
    row = ops.Sequential(*ends(to_caller=False))
    run = torch.compile(row, fullgraph=True, backend="aot_eager")
    x = draw(R, H, device=device)
    assert torch.equal(run(x), row(x))


def test_channels_that_nobody_fills():
    first, last = ends()
    x = torch.zeros(R, H)
    with pytest.raises(ValueError, match=r"^channel of an extra input of module 0 \(AddExtraInput"
                                         r"\) is 'around', must be that of an extra output ahead "
                                         "of it: none$"):
        ops.Sequential(last, first)(x)
    with pytest.raises(ValueError, match="is 'around', must be .* ahead of it: 'other'$"):
        ops.Sequential(ops.MakeExtraOutput().set_extra_output_channel(0, "other"), last)(x)


def test_channels_that_two_fill():
    first, last = ends()
    with pytest.raises(ValueError, match=r"^channel of an extra output of module 1 \(MakeExtraOutp"
                                         r"ut\) is 'around', must be its own; another extra outpu"):
        ops.Sequential(first, ends()[0], last)(torch.zeros(R, H))
    choice = Choice().set_extra_output_channel(0, "around").set_extra_output_channel(1, "around")
    with pytest.raises(ValueError, match=r"module 0 \(Choice\) is 'around', must be its own"):
        ops.Sequential(choice, last).plan()


@pytest.mark.parametrize("index", [-1, 1])
def test_indices_that_are_not_there(index):
    for set_channel, slots in ((ops.MakeExtraOutput().set_extra_output_channel, "outputs"),
                               (ops.AddExtraInput().set_extra_input_channel, "inputs")):
        with pytest.raises(IndexError, match=f"^index is {index}, must be less than 1 and not "
                                             rf"negative; \w+ has 1 extra {slots}$"):
            set_channel(index, "around")


@pytest.mark.parametrize("name", ["", 3])
def test_names_that_are_none(name):
    for set_channel in (ops.MakeExtraOutput().set_extra_output_channel,
                        ops.AddExtraInput().set_extra_input_channel):
        with pytest.raises(ValueError, match=f"^channel is {name!r}, must be a name or None$"):
            set_channel(0, name)
        with pytest.raises(TypeError, match="^index is a float, must be an int$"):
            set_channel(0.0, "around")
        with pytest.raises(TypeError, match="^index is a bool, must be an int$"):
            set_channel(False, "around")
    with pytest.raises(TypeError, match="^output_to_caller is an int, must be a bool$"):
        ops.MakeExtraOutput().set_extra_output_channel(0, "around", output_to_caller=1)


def test_copies_keep_their_channels(device):
    row = copy.deepcopy(ops.Sequential(*ends(to_caller=False)))
    x = draw(R, H, device=device)
    assert torch.equal(row(x), 2 * x)
    assert torch.equal(pickle.loads(pickle.dumps(row))(x), 2 * x)
    assert torch.equal(ops.Sequential(ops.AddExtraInput())(x, x), 2 * x)  # others have none
    assert len(ops.Sequential(ops.MakeExtraOutput())(x)) == 2
