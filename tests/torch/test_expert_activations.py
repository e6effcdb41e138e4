"""Which activation of Cadre an experts module of transformers has: gates, act_fn, refusals."""

import pytest
import torch
from torch import nn
from torch.nn import functional

transformers = pytest.importorskip("transformers", minversion="5.0")
from cadre import huggingface  # noqa: E402
from cadre.expert_activations import activation_of  # noqa: E402
from test_huggingface import assert_equal_steps, run  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

# Gates that models of transformers have, and all else that Cadre runs.

GATES = {
    "concat": lambda self, z: self.act_fn(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
    "interleave1": lambda self, z: self.act_fn(z[..., ::2]) * z[..., 1::2],
    "interleave32": lambda self, z: self.act_fn(
        torch.cat(z.split(32, -1)[::2], -1)) * torch.cat(z.split(32, -1)[1::2], -1),
}


def limited_silu(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate.clamp(max=self.bound)) * up.clamp(-self.bound, self.bound)


def limited_after(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate).clamp(max=self.bound) * up


def make_class(gate=None, **marks):
    class Experts(nn.Module):

        def __init__(self, config, act_fn):
            super().__init__()
            self.num_experts, self.act_fn, self.bound = 4, act_fn, 2.5
            gated, turned = marks.get("has_gate", True), marks.get("is_transposed", False)
            first = ("gate_up_proj", 128, 32) if gated else ("up_proj", 64, 32)
            for name, n, k in (first, ("down_proj", 32, 64)):
                shape = (4, k, n) if turned else (4, n, k)
                setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))
                if marks.get("has_bias"):
                    setattr(self, name + "_bias", nn.Parameter(torch.randn(4, n)))

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("not eager")

    if gate is not None:
        Experts._apply_gate = gate
    return use_experts_implementation(**marks)(Experts)


ACTS = {"silu": nn.SiLU, "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("tanh"), "relu": nn.ReLU}
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
MADE = [(f"{GATED[act]}{'' if layout == 'concat' else f' layout={layout}'}", gate, act, marks)
        for act in ACTS for layout, gate in GATES.items()
        for marks in [dict(has_bias=layout != "concat", is_transposed=act == "gelu")]]
MADE += [("clamped_swiglu limit=2.5 alpha=1 offset=0", limited_silu, "silu", {})]
MADE += [(act, None, act, dict(has_gate=False, has_bias=act == "relu")) for act in ACTS]


@pytest.mark.parametrize("text,gate,act,marks", MADE, ids=[made[0] for made in MADE])
def test_activations_and_layouts(text, gate, act, marks, device):
    experts = make_class(gate, **marks)(transformers.PretrainedConfig(), ACTS[act]()).to(device)
    assert activation_of(experts) == text
    x = torch.randn(11, 32).to(device).requires_grad_()
    index = torch.rand(11, 4).topk(2).indices.to(device)
    weights = torch.rand(11, 2).to(device).requires_grad_()
    dy = torch.randn(11, 32).to(device)
    want = run(experts, (x, index, weights), dy, "batched_mm")
    assert_equal_steps(run(experts, (x, index, weights), dy, "cadre"), want, 2e-5)


class Swish(nn.Module):
    def __init__(self, beta=2.0):
        super().__init__()
        self.beta = beta

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class Act(nn.Module):
    """What a class alone does not say: a flag, a function, a number by a name that tensors have."""

    def __init__(self, function=functional.silu, squares=False, max=1e9):
        super().__init__()
        self.function, self.squares, self.max = function, squares, max

    def forward(self, x):
        y = self.function(x).clamp(max=self.max)
        return y.square() if self.squares else y


@pytest.mark.parametrize("act,text", [
    (Act(), "swiglu"), (Act(functional.relu), "reglu"), (Act(squares=True), None),
    (Act(max=1.0), None), (Act(functional.tanh), None)])
def test_what_an_act_fn_has_beside_its_class(act, text):
    experts = make_class()(transformers.PretrainedConfig(), act)
    if text is not None:
        assert activation_of(experts) == text
        act.squares = True
    with pytest.raises(NotImplementedError, match="act_fn=Act"):
        activation_of(experts)


def test_an_act_fn_is_taken_as_it_is():
    """Not as a new one of its class would be."""
    changed = ("huggingface: act_fn of Experts"
               " has hooks or a forward of its own, must be as its class is; choose another "
               "experts_implementation for this model")
    experts = make_class()(transformers.PretrainedConfig(), Swish(1.0))
    assert activation_of(experts) == "swiglu"
    for beta in (2.0, 1.702):
        experts.act_fn = Swish(beta)
        with pytest.raises(NotImplementedError, match="act_fn=Swish"):
            activation_of(experts)
    experts.act_fn = nn.SiLU()
    experts.act_fn.forward = torch.tanh
    with pytest.raises(NotImplementedError, match=changed):
        activation_of(experts)
    experts.act_fn = nn.SiLU()
    handle = experts.act_fn.register_forward_hook(lambda *given: given[2] * 2)
    with pytest.raises(NotImplementedError, match=changed):
        activation_of(experts)
    handle.remove()
    assert activation_of(experts) == "swiglu"


class Scaled(nn.Module):
    """SiLU, for all that its numbers say, with a scale that they do not."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return functional.silu(x) * self.factor()

    def factor(self):
        return self.scale[0] if isinstance(self.scale, list) else self.scale


class Within(Scaled):

    def factor(self):
        return 1 if self.scale(torch.zeros(())) == 0 else 2


def test_an_act_fn_has_numbers_alone():
    buffered = Scaled(None)
    del buffered.scale
    buffered.register_buffer("scale", torch.ones(()))
    for act in (Scaled(nn.Parameter(torch.ones(()))), buffered, Scaled([1.0]),
                Scaled(torch.ones(())), Within(nn.ReLU())):
        experts = make_class()(transformers.PretrainedConfig(), act)
        for call in (activation_of, torch.compile(activation_of, backend="eager")):
            with pytest.raises(NotImplementedError, match="act_fn of Experts has tensors, modules"):
                call(experts)


class Capped(nn.Module):

    def __init__(self, cap):
        super().__init__()
        self.cap = cap

    def forward(self, x):
        return functional.silu(x).clamp(max=self.cap)


@pytest.mark.parametrize("cap", [40.0, 2e3, 2e5])
def test_an_act_fn_is_measured_far_away(cap):
    experts = make_class()(transformers.PretrainedConfig(), Capped(cap))
    with pytest.raises(NotImplementedError, match="act_fn=Capped"):
        activation_of(experts)


def test_a_gate_that_is_patched():
    cls = make_class()
    experts = cls(transformers.PretrainedConfig(), nn.SiLU())
    assert activation_of(experts) == "swiglu"
    cls._apply_gate = GATES["interleave1"]
    assert activation_of(experts) == "swiglu layout=interleave1"
    experts._apply_gate = cls._apply_gate.__get__(experts)
    with pytest.raises(NotImplementedError, match="Experts has an _apply_gate of its own, must"):
        activation_of(experts)


@pytest.mark.parametrize("gate,act,found", [
    (limited_after, nn.SiLU(), "act_fn=SiLU {'bound': 2.5}"),
    (None, nn.Mish(), "act_fn=Mish {}"),
    (lambda self, z: z @ self.missing, nn.SiLU(), "act_fn=SiLU {}"),
], ids=["order", "function", "needs_more"])
def test_refuses_an_activation_that_it_does_not_have(gate, act, found):
    experts = make_class(gate)(transformers.PretrainedConfig(experts_implementation="cadre"), act)
    message = (f"huggingface: activation of Experts is Experts._apply_gate with {found}, must "
               "equal one of swiglu, geglu, geglu_tanh, reglu, clamped_swiglu; choose another "
               "experts_implementation for this model")
    with pytest.raises(NotImplementedError) as error:
        experts(torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))
    assert str(error.value) == message
    lines = huggingface.explain(nn.ModuleDict({"experts": experts}))
    assert lines.endswith(f"; runs cadre; not for cadre: {message}")
