"""Which activation of Cadre an experts module of transformers has: gates, act_fn, refusals."""

import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
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
    for register in ("register_forward_hook", "register_forward_pre_hook",
                     "register_full_backward_hook", "register_full_backward_pre_hook"):
        experts.act_fn = nn.SiLU()
        getattr(experts.act_fn, register)(lambda *given: None)
        with pytest.raises(NotImplementedError, match=changed):
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


# In compiled code, where a new module of the class stands for the act_fn.

BOTH = pytest.mark.parametrize("call", ["eager", "compiled"])
REFUSALS = NotImplementedError, Unsupported  # the other with the first in its text


def caller(call, act):
    """activation_of of experts with the act_fn; a guard that fails compiles it again."""
    experts = make_class()(transformers.PretrainedConfig(), act)
    if call == "eager":
        return lambda: activation_of(experts)
    torch._dynamo.reset()
    step = torch.compile(lambda x: (x + 1, activation_of(experts)), backend="aot_eager",
                         fullgraph=True)
    return lambda: step(torch.ones(1))[1]


class Chosen(nn.Module):

    def __init__(self, chosen=functional.silu):
        super().__init__()
        self.chosen = chosen

    def forward(self, x):
        if callable(self.chosen):
            return self.chosen(x)
        if isinstance(self.chosen, str):
            return functional.gelu(x, approximate=self.chosen)
        if isinstance(self.chosen, tuple):
            scale = self.chosen[0]
            return functional.silu(x) * (scale[0] if isinstance(scale, tuple) else scale)
        return functional.silu(x) if self.chosen in (True, 3) else functional.relu(x)

    def squared(self, x):
        return self._square(functional.silu(x))

    def gelu(self, x):
        return functional.gelu(x)

    @staticmethod
    def _square(x):
        return x * x


def scaled_by(scale):
    return lambda x: functional.silu(x) * scale


def scaled_with(factor):
    def scaled(x, scale=factor):
        return functional.silu(x) * scale
    return scaled


def closed(factor):
    def closed_here(x):
        return functional.silu(x) * factor
    return closed_here


closed_here = closed(1.0)  # found by its name, but others have its code
GELU = functools.partial(functional.gelu, approximate="tanh")
CHOICES = {
    "function": (functional.relu, "reglu", torch.tanh, None),
    "builtin": (torch.relu, "reglu", functional.silu, "swiglu"),
    "partial": (GELU, "geglu_tanh", functools.partial(GELU, approximate="none"), "geglu"),
    "flag": (False, "reglu", True, "swiglu"),
    "number": (2, "reglu", 3, "swiglu"),
    "word": ("tanh", "geglu_tanh", "none", "geglu"),
    "none": (None, "reglu", "none", "geglu"),
    "type": (torch.float64, "reglu", 3, "swiglu"),
    "tuple": ((1.0,), "swiglu", (2.0,), None),
    "tuple in a tuple": (((1, "a"), True), "swiglu", ((2, "a"), True), None),
}


@BOTH
@pytest.mark.parametrize("first,text,second,other", CHOICES.values(), ids=CHOICES)
def test_what_an_act_fn_has_is_measured(first, text, second, other, call):
    act = Chosen(first)
    measured = caller(call, act)
    assert measured() == text
    act.chosen = second
    if other is not None:
        assert measured() == other
    else:
        with pytest.raises(REFUSALS, match="act_fn=Chosen"):
            measured()


@BOTH
def test_methods_of_its_own(call):
    act = Chosen()
    act.chosen = act.gelu
    measured = caller(call, act)
    assert measured() == "geglu"
    act.chosen = act.squared
    with pytest.raises(REFUSALS, match="act_fn=Chosen"):
        measured()


class Mode(nn.Module):
    scale = 1.0

    def forward(self, x):
        return (functional.silu if getattr(self, "training") else functional.relu)(x) * self.scale


@BOTH
def test_modes_and_forwards_that_come_later(call, monkeypatch):
    act = Mode()
    measured = caller(call, act)
    assert measured() == "swiglu"
    act.eval()
    assert measured() == "reglu"
    monkeypatch.setattr(Mode, "scale", 2.0)
    with pytest.raises(REFUSALS, match="act_fn=Mode"):
        measured()
    monkeypatch.undo()
    assert measured() == "reglu"
    act.forward = torch.tanh
    with pytest.raises(REFUSALS, match="has hooks or a forward of its own"):
        measured()


def decorated(function):
    @functools.wraps(function)
    def wrapper(*given):
        return function(*given)
    return wrapper


class Hidden(nn.Module):
    """What its methods do not name themselves, by names that all modules have, too."""

    def __init__(self, type, one):
        super().__init__()
        vars(self).update(type=type, one=one, other=1.0)

    @property
    def scale(self):
        return self.one

    @decorated
    def forward(self, x):
        scales = [(lambda: self.other)() for _ in range(1)]
        return functional.gelu(x, approximate=self.type) * self.scale * scales[0]


@BOTH
def test_an_act_fn_whose_constructor_wants_arguments(call):
    act = Hidden("tanh", 1.0)
    measured = caller(call, act)
    assert measured() == "geglu_tanh"
    act.type = "none"
    assert measured() == "geglu"
    for name in ("one", "other"):
        setattr(act, name, 2.0)
        with pytest.raises(REFUSALS, match="act_fn=Hidden"):
            measured()
        setattr(act, name, 1.0)
    assert caller(call, Scaled(1.0))() == "swiglu"


CHANGING = (Swish(1.0).forward, SimpleNamespace(scale=1.0), (1.0, [1.0]),
            functools.partial(scaled_by, [1.0]), {1.0: functional.silu}.get)


@pytest.mark.parametrize("call,chosen", [
    ("compiled", scaled_by(1.0)), ("compiled", scaled_with(1.0)), ("compiled", closed_here),
    *(("eager", chosen) for chosen in CHANGING), *(("compiled", chosen) for chosen in CHANGING)])
def test_what_may_change_in_its_place_is_refused(call, chosen):
    with pytest.raises(REFUSALS, match="act_fn of Experts has tensors, modules, lists or objects"):
        caller(call, Chosen(chosen))()


def test_a_function_with_a_closure_in_place_of_a_module():
    assert caller("eager", scaled_by(1.0))() == "swiglu"
    with pytest.raises(NotImplementedError, match="act_fn=<lambda>"):
        caller("eager", scaled_by(2.0))()
    with pytest.raises(REFUSALS, match="act_fn of Experts has tensors, modules, lists or objects"):
        caller("compiled", scaled_by(1.0))()
    assert caller("compiled", functional.silu)() == "swiglu"


class Optional(nn.Module):

    def forward(self, x):
        return functional.silu(x) * getattr(self, "more", 1.0)


@BOTH
def test_what_an_act_fn_asks_for_with_a_default(call):
    act = Optional()
    measured = caller(call, act)
    assert measured() == "swiglu"
    act.more = 2.0
    with pytest.raises(REFUSALS, match="act_fn=Optional"):
        measured()


def test_functions_with_a_closure_are_measured_outside_of_the_graph():
    act = Chosen(scaled_by(1.0))
    experts = make_class()(transformers.PretrainedConfig(), act)
    for call in (activation_of, torch.compile(activation_of, backend="eager")):
        act.chosen = scaled_by(1.0)
        assert call(experts) == "swiglu"
        act.chosen = scaled_by(2.0)
        with pytest.raises(NotImplementedError, match="act_fn=Chosen"):
            call(experts)


def test_what_was_measured_holds_no_act_fn():
    for function_of in (lambda act: act.gelu, lambda act: lambda x: act.gelu(x)):
        act = Chosen()
        act.chosen = function_of(act)
        assert caller("eager", act)() == "geglu"
        gone = weakref.ref(act)
        del act
        gc.collect()
        assert gone() is None


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
