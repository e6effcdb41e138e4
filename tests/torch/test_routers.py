"""Routers of transformers on Cadre choose and weigh as their own code does."""

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.0")
import cadre.huggingface as huggingface  # noqa: E402
from cadre import routers  # noqa: E402
from cadre.foreign_experts import runs_cadre  # noqa: E402
from test_huggingface import make  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: E402
from transformers.models.granitemoe import modeling_granitemoe  # noqa: E402
from transformers.models.granitemoe_swa import modeling_granitemoe_swa  # noqa: E402
from transformers.models.mixtral import modeling_mixtral  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe  # noqa: E402

HIDDEN, EXPERTS = 32, 16
SIZES = dict(hidden_size=HIDDEN, num_experts_per_tok=3)
# A class of each code that is known, and its config.
ROUTERS = {
    "deepseek": (modeling_deepseek_v3.DeepseekV3TopkRouter, lambda: transformers.DeepseekV3Config(
        hidden_size=HIDDEN, num_experts_per_tok=4, n_routed_experts=EXPERTS, n_group=4,
        topk_group=2, routed_scaling_factor=2.5)),
    "qwen": (modeling_qwen3_moe.Qwen3MoeTopKRouter, lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=EXPERTS, norm_topk_prob=False)),
    "qwen_normalized": (
        modeling_qwen3_vl_moe.Qwen3VLMoeTextTopKRouter,
        lambda: modeling_qwen3_vl_moe.Qwen3VLMoeTextConfig(**SIZES, num_experts=EXPERTS)),
    "mixtral": (modeling_mixtral.MixtralTopKRouter, lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=EXPERTS)),
    "gpt_oss": (modeling_gpt_oss.GptOssTopKRouter, lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=EXPERTS)),
    "granite": (modeling_granitemoe.GraniteMoeTopKRouter, lambda: transformers.GraniteMoeConfig(
        **SIZES, num_local_experts=EXPERTS)),
    "granite_swa": (
        modeling_granitemoe_swa.GraniteMoeSWATopKRouter,
        lambda: modeling_granitemoe_swa.GraniteMoeSWAConfig(**SIZES, num_local_experts=EXPERTS)),
}


@pytest.fixture(params=list(ROUTERS))
def name(request) -> str:
    return request.param


def router_of(name: str, device, dtype=torch.float32) -> nn.Module:
    cls, config = ROUTERS[name]
    router = cls(config())
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.normal_()
    return router.to(device, dtype)


def results(router: nn.Module, x: torch.Tensor, runs_cadre: bool) -> dict[str, torch.Tensor]:
    """Logits, weights of all experts, and gradients of x and the weight, of the same loss."""
    routers.switch(router, runs_cadre)
    x = x.clone().requires_grad_()
    router.zero_grad()
    made = router(x)
    chosen = next(t for t in made if not t.is_floating_point())
    weights = next(t for t in made if t.shape == chosen.shape and t is not chosen)
    logits = next(t for t in made if t.is_floating_point() and t is not weights)
    assert chosen.dtype == torch.int64 and logits.shape[-1] == EXPERTS
    dense = torch.zeros(logits.shape, dtype=weights.dtype, device=x.device)
    dense = dense.scatter(-1, chosen, weights)
    torch.manual_seed(3)
    scale = torch.randn(2, *dense.shape).to(x.device)
    ((dense * scale[0]).sum() + (logits * scale[1]).sum()).backward()
    return {"kinds": [(t.dtype, t.shape) for t in made], "logits": logits.detach(),
            "weights": dense.detach(), "dx": x.grad, "dweight": router.weight.grad}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_has_the_results_of_its_own_code(name, dtype, device):
    router = router_of(name, device, dtype)
    assert routers.port_of(router)
    x = torch.randn(4, 9, HIDDEN).to(device, dtype).view(-1, HIDDEN)
    own, here = (results(router, x, on) for on in (False, True))
    assert own.pop("kinds") == here.pop("kinds")
    bound = 2e-5 if dtype == torch.float32 else 0.02
    for what, want in own.items():
        assert want.abs().max() > 0
        error = (here[what] - want).abs().max() / want.abs().max()
        assert error <= bound, f"{what}: relative difference {error:.2g}"
    assert torch.equal(here["weights"] != 0, own["weights"] != 0)


def test_of_equal_logits_the_first_experts_are_chosen(name, device):
    router = router_of(name, device)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.zero_()
    routers.switch(router, True)
    made = router(torch.randn(2, HIDDEN, device=device))
    chosen = next(t for t in made if not t.is_floating_point())
    assert chosen.sort().values.tolist() == [list(range(router.top_k))] * 2


def test_every_code_that_is_known_is_that_of_a_class_here():
    found = {routers.digest_of(cls.forward) for cls, _ in ROUTERS.values()}
    found |= {routers.digest_of(cls.forward.__wrapped__) for cls, _ in ROUTERS.values()
              if hasattr(cls.forward, "__wrapped__")}
    assert set(routers.PORTS) <= found


def test_groups_that_are_chosen_otherwise_are_left_to_transformers():
    router = router_of("deepseek", "cpu")
    router.topk_group = 4
    assert routers.port_of(router) is None
    router.num_group = 1
    assert routers.port_of(router)


@pytest.mark.parametrize("top_k", [2, 4, 8])
def test_a_choice_that_is_changed_later(top_k, device):
    router = router_of("deepseek", device)
    routers.switch(router, True)
    router.top_k = top_k
    x = torch.randn(64, HIDDEN, device=device)
    here = router(x)[2]
    routers.switch(router, False)
    assert torch.equal(here.sort(-1).values, router(x)[2].sort(-1).values)


def test_another_code_keeps_running():
    class OtherTopKRouter(modeling_qwen3_moe.Qwen3MoeTopKRouter):
        def forward(self, hidden_states):
            return super().forward(hidden_states * 2)

    OtherTopKRouter.__module__ = "transformers.models.other"
    router = OtherTopKRouter(ROUTERS["qwen"][1]())
    routers.switch(router, True)
    assert routers.port_of(router) is None and not runs_cadre(router)
    assert routers.digest_of(len) is None  # no source
    assert routers.digest_of(lambda x: x) is None  # no function with a body


def test_a_parametrized_router_is_switched_back(device):
    """Its class is another one, of torch."""
    router = router_of("qwen", device)
    nn.utils.parametrize.register_parametrization(router, "weight", nn.Identity())
    for on in (True, False):
        routers.switch(router, on)
        assert routers.port_of(router) is not None and runs_cadre(router) == on


def test_models_switch_their_routers(device):
    model = make("qwen3_moe", device)
    gates = [layer.mlp.gate for layer in model.model.layers]
    for implementation, runs in (("cadre", True), ("eager", False), ("cadre", True)):
        model.set_experts_implementation(implementation)
        assert [runs_cadre(gate) for gate in gates] == [runs] * len(gates)
    assert runs_cadre(copy.deepcopy(model).model.layers[0].mlp.gate)
    lines = huggingface.explain(model).splitlines()
    assert "model.layers.0.mlp.gate: Qwen3MoeTopKRouter; runs cadre; router softmax" in lines
