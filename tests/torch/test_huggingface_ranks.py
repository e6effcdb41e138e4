"""Models of transformers whose experts two ranks share: their experts have the bits of one process,
and models train and generate as one process does, with batches of their own or one on all ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from conftest import draw
from processes import Processes

transformers = pytest.importorskip("transformers", minversion="5.0")
import cadre  # noqa: E402
import cadre.huggingface as huggingface  # noqa: E402
from expert_parallel_cases import leaf, same_bits  # noqa: E402
from test_fp8_experts import from_pretrained  # noqa: E402
from test_huggingface import SIZES, experts_of, make  # noqa: E402
from test_quantized_experts import loaded  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

transformers.logging.set_verbosity_error()
FAMILIES = ("qwen3_moe", "gpt_oss")
H = 32
TOKENS = {"own": (11, 0), "same": (11, 11)}


# What the processes run


def made(family, device, seed=0):
    torch.manual_seed(seed)
    return make(family, device, "cadre").eval()


def mesh_of(device):
    return init_device_mesh(device.type, (2,), mesh_dim_names=("ep",))["ep"]


def part(t, rank, batch):
    """This rank's rows of what one process has."""
    first = sum(TOKENS[batch][:rank]) if batch == "own" else 0
    return t[first:first + TOKENS[batch][rank]]


def whole(t):
    if not isinstance(t, DTensor):
        return t
    if t.dtype != torch.float8_e4m3fn:
        return t.full_tensor()
    codes = DTensor.from_local(t.to_local().view(torch.uint8), t.device_mesh, t.placements)
    return codes.full_tensor().view(t.dtype)  # gloo moves no fp8


def experts_alone(rank, device, family, batch, dtype, cast):
    """cast: under torch.autocast to bf16."""
    plain = made(family, device).to(dtype)
    shared = huggingface.use(copy.deepcopy(plain), mesh_of(device), batch=batch)
    wants, gots = experts_of(plain), experts_of(copy.deepcopy(shared))
    top_k = wants.config.num_experts_per_tok
    total = sum(TOKENS["own"])
    x, dout = draw(total, H, dtype=dtype, device=device), draw(total, H, dtype=dtype, device=device)
    chosen = torch.rand(total, wants.num_experts).topk(top_k).indices.to(device)
    prob = torch.rand(total, top_k).to(device, dtype)
    inputs = leaf(x), leaf(prob)
    mine = [leaf(part(t, rank, batch)) for t in (x, prob)]
    with torch.autocast(device.type, torch.bfloat16, enabled=cast):
        want = wants(inputs[0], chosen, inputs[1])
        got = gots(mine[0], part(chosen, rank, batch), mine[1])
    want.backward(dout)
    got.backward(part(dout, rank, batch))
    assert want.abs().max() > 0 and gots.num_experts == wants.num_experts // 2
    assert same_bits(got, part(want, rank, batch))
    for a, b in zip(mine, inputs):
        assert same_bits(a.grad, part(b.grad, rank, batch))
    for (name, p), w in zip(gots.named_parameters(), wants.parameters()):
        assert same_bits(p.grad, w.grad.tensor_split(2)[rank]), name
        assert p.allreduce is False


def compiled_experts(rank, device):
    """By a window as one graph, of own tokens; otherwise it may break."""
    for batch, route in (("own", "window"), ("same", "window"), ("own", "collective")):
        window = dict(tokens=11, hidden=H, dtype=torch.float32, device=device)
        ep = cadre.ExpertParallel(None, 4, 3, route=route, **(window if route == "window" else {}))
        experts = experts_of(huggingface.use(made("qwen3_moe", device), ep, batch=batch))
        torch.compiler.reset()
        run = torch.compile(experts, backend="aot_eager",
                            fullgraph=(batch, route) == ("own", "window"))
        results = []
        for call in (experts, run):
            torch.manual_seed(rank if batch == "own" else 0)
            x, prob = leaf(draw(11, H, device=device)), leaf(torch.rand(11, 3).to(device))
            out = call(x, torch.rand(11, 8).topk(3).indices.to(device), prob)
            out.square().sum().backward()
            results.append((out, x.grad, prob.grad))
        assert all(map(same_bits, *results)), (batch, route)


def train(rank, device, family, batch):
    """Two steps, one with checkpointed activations; gradients of what is no expert are a mean over
    ranks that have own batches, and those of experts are divided likewise."""
    plain = made(family, device)
    shared = huggingface.use(copy.deepcopy(plain), dist.group.WORLD, batch=batch)
    shared.gradient_checkpointing_enable()
    ids = torch.randint(2, 64, (4, 9), generator=torch.Generator().manual_seed(1)).to(device)
    mine = ids if batch == "same" else ids.tensor_split(2)[rank]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, shared)]
    for checkpointed in (False, True):
        shared.train(checkpointed)
        want = plain(input_ids=ids, labels=ids).loss
        want.backward()
        got = shared(input_ids=mine, labels=mine).loss
        got.backward()
        got = got.detach().clone()
        if batch == "own":
            dist.all_reduce(got)
            got /= 2
            for p in shared.parameters():
                if getattr(p, "allreduce", True):
                    dist.all_reduce(p.grad)
                p.grad /= 2
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-5)
        for (name, p), w in zip(shared.named_parameters(), plain.parameters()):
            want_grad = w.grad if p.shape == w.shape else w.grad.tensor_split(2)[rank]
            torch.testing.assert_close(p.grad, want_grad, rtol=1e-3,
                                       atol=1e-4 * float(w.grad.abs().max()), msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def spread_by_transformers(rank, device, family, switched):
    """As from_pretrained does it with DistributedConfig(enable_expert_parallel=True): one batch on
    all ranks. Logits and gradients are those of one process, and so are tokens of own batches."""
    plain = made(family, device)
    model = copy.deepcopy(plain)
    model.set_experts_implementation("grouped_mm" if switched else "cadre")
    config = transformers.distributed.DistributedConfig(tp_size=2, enable_expert_parallel=True)
    model = type(model).maybe_distribute_model(model, config, init_device_mesh(
        device.type, (2,), mesh_dim_names=("tp",)))
    if switched:
        huggingface.use(model)
    ids = prompts_of(device)["input_ids"]
    want, got = (m(input_ids=ids, labels=ids) for m in (plain, model))
    want.loss.backward()
    got.loss.backward()
    assert same_bits(got.logits, want.logits)
    for (name, p), w in zip(model.named_parameters(), plain.parameters()):
        assert same_bits(whole(p.grad), w.grad), name
    for batch, mine in (("same", prompts_of(device)), ("own", prompts_of(device, 1 + rank, 6))):
        huggingface.use(model, batch=batch)
        options = dict(do_sample=False, max_new_tokens=5 + rank * (batch == "own"))
        assert torch.equal(model.generate(**mine, **options), plain.generate(**mine, **options))
    model.set_experts_implementation("grouped_mm")  # masks, and adds up
    torch.testing.assert_close(model(ids).logits, want.logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="experts is shared by 2 ranks, must be whole"):
        huggingface.use(model, dist.group.WORLD)
    for module in model.modules():
        vars(module).pop("_cadre_sharing", None)
    with pytest.raises(ValueError, match="experts.gate_up_proj is a DTensor, must be a "):
        huggingface.use(model, dist.group.WORLD)


def refusals(rank, device):
    """A model that cannot be shared is as it was."""
    group = dist.group.WORLD

    def refused(words, model, *given, **named):
        before = {name: p.shape for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=words):
            huggingface.use(model, *given, **named)
        assert {name: p.shape for name, p in model.named_parameters()} == before

    refused("num_experts is 5, must be a multiple of 2", made("mixtral", device), group)
    refused("ep is .* must be of 8 experts on all ranks and top_k=3", made("qwen3_moe", device),
            cadre.ExpertParallel(group, 4, 2))
    llama4 = transformers.AutoModelForCausalLM.from_config(transformers.Llama4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=48, intermediate_size_mlp=48,
        num_local_experts=4))
    refused("is a Llama4TextExperts, must be an experts module with .* where ep is given", llama4,
            group)
    model = made("qwen3_moe", device)
    config = type("Config", (transformers.PretrainedConfig,), {})()
    experts_of(model).config = config
    refused("use: Config has no num_experts_per_tok, must say how many", model, group)

    shared = huggingface.use(made("qwen3_moe", device), group)
    with pytest.raises(TypeError, match="^ExpertParallel is pickled, must not be; save the "):
        pickle.dumps(shared)
    refused("experts is shared by 2 ranks, must be whole", shared, group)
    refused("batch is 'mine', must be one of own, same", shared, batch="mine")
    with pytest.raises(ValueError, match="set_experts_implementation: implementation is 'eager', mu"
                       "st be 'cadre'; each rank has a part of the experts"):
        shared.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="set_experts_implementation: implementation is None, mu"):
        shared.set_experts_implementation(None)
    shared.set_experts_implementation("cadre")
    for config in ({}, {"generation_config": transformers.GenerationConfig(prefill_chunk_size=4)}):
        chunk = {} if config else {"prefill_chunk_size": 4}
        with pytest.raises(ValueError, match="generate: prefill_chunk_size is 4, must be None; "
                           "prompts of ranks with batches of their own have other numbers of "
                           "chunks"):
            shared.generate(**prompts_of(device), max_new_tokens=2, **config, **chunk)
        with pytest.raises(ValueError, match="generate: prefill_chunk_size is 4, must be None"):
            shared.generate(prompts_of(device)["input_ids"], *config.values(), **chunk)


def sharded(rank, device):
    """By FSDP2: over replicas, where parameters stay marked, but not over ranks of others."""
    shared = huggingface.use(made("qwen3_moe", device), dist.group.WORLD)
    experts = experts_of(shared)
    assert type(experts).__name__ == type(experts_of(made("qwen3_moe", device))).__name__
    with pytest.raises(ValueError, match="experts are sharded over ranks .0, 1., must be over repl"
                       "icas, of ranks .0, 1. this one alone"):
        fully_shard(shared)
    plain = made("qwen3_moe", device)
    shared = huggingface.use(copy.deepcopy(plain), dist.group.WORLD)
    fully_shard(experts_of(shared),
                mesh=DeviceMesh(device.type, [[0], [1]], mesh_dim_names=("ep", "one"))["one"])
    tokens = prompts_of(device)
    for _ in range(2):
        assert all(p.allreduce is False for p in experts_of(shared).parameters())
        with torch.no_grad():
            assert torch.equal(shared(**tokens).logits, plain(**tokens).logits)
    again = huggingface.use(copy.deepcopy(plain), dist.group.WORLD).to_empty(device=device)
    assert all(p.allreduce is False for p in experts_of(again).parameters())


def wrapped(rank, device):
    """A DDP that was made before takes experts for the same on both ranks; generate of compiled
    models goes on until both have finished, too."""
    group, model = dist.group.WORLD, made("qwen3_moe", device)
    around = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="use: model is a DistributedDataParallel around a Qwen3Moe"
                       "ForCausalLM, must be that alone, before it is wrapped"):
        huggingface.use(around, group)
    huggingface.use(model, group)
    apart = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, apart)
    with pytest.raises(ValueError, match="keeps model.layers.0.mlp.experts.gate_up_proj alike on .*"
                       "_set_params_and_buffers_to_ignore_for_model before it is wrapped"):
        around(**prompts_of(device))
    ids = prompts_of(device)["input_ids"]
    DistributedDataParallel(model)(input_ids=ids, labels=ids).loss.backward()

    plain = made("qwen3_moe", device)
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    mine = prompts_of(device, 1 + rank)
    options = dict(do_sample=False, max_new_tokens=2 + 3 * rank)
    got = huggingface.use(compiled, group).generate(**mine, **options)
    assert torch.equal(got, plain.generate(**mine, **options))


def prompts_of(device, count=3, length=7):
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 64, (count, length), generator=drawn).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(rank, device, family):
    """Own batches, of which one ends early, and is smaller and shorter; then one batch on all
    ranks, of fewer rows than ranks, too."""
    plain = made(family, device)
    shared = huggingface.use(copy.deepcopy(plain), mesh_of(device))
    mine = [prompts_of(device, 2, 7), prompts_of(device, 1, 4)][rank]
    for options in (dict(max_new_tokens=9 if rank == 0 else 3), dict(max_new_tokens=2 + 5 * rank),
                    dict(max_new_tokens=4, num_beams=2), dict(max_new_tokens=4, use_cache=False)):
        options = dict(do_sample=False, **options)
        want = plain.generate(**mine, **options)
        assert torch.equal(shared.generate(**mine, **options), want)
    ends = plain.generate(**mine, do_sample=False, max_new_tokens=8)[0, -6].item()
    options = dict(do_sample=False, max_new_tokens=8, eos_token_id=ends if rank == 0 else None)
    assert torch.equal(shared.generate(**mine, **options), plain.generate(**mine, **options))

    mine = prompts_of(device, 2 * rank)  # rank 0 has none
    got = shared.generate(**mine, do_sample=False, max_new_tokens=4)
    assert got.shape == (2 * rank, 11)
    assert rank == 0 or torch.equal(got, plain.generate(**mine, do_sample=False, max_new_tokens=4))

    assert huggingface.use(shared, batch="same") is shared
    for count in (3, 1):
        asked = prompts_of(device, count)
        want = plain.generate(**asked, do_sample=False, max_new_tokens=6)
        twin = copy.deepcopy(copy.deepcopy(shared))
        got = twin.generate(**asked, do_sample=False, max_new_tokens=6)
        assert torch.equal(got, want)


def states(rank, device, family, folder):
    """To a model that nobody shares, and back, with the state of an optimizer."""
    mesh, plain = mesh_of(device), made(family, device)
    shared = huggingface.use(made(family, device), mesh)
    for name, t in plain.state_dict().items():
        assert same_bits(whole(shared.state_dict()[name]), t), name
    optimizer = torch.optim.AdamW(shared.parameters(), lr=0.01)
    cadre.keep_whole(optimizer, shared)
    ids = prompts_of(device)["input_ids"]
    shared(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()

    def state_of(model, optimizer):
        return {"model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer)}

    def through(folder, there):
        """Loads what is in the folder into a new model."""
        model = made(family, device, seed=1)
        model = huggingface.use(model, mesh) if there else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        cadre.keep_whole(optimizer, model)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return model, optimizer

    dcp.save(state_of(shared, optimizer), checkpoint_id=folder / "two")
    one = through(folder / "two", False)
    dcp.save(state_of(*one), checkpoint_id=folder / "one")
    again = through(folder / "one", True)
    want = state_of(shared, optimizer)
    for got in (one, again):
        got = state_of(*got)
        for name, t in want["model"].items():
            assert same_bits(whole(got["model"][name]), whole(t)), name
        for name, of in want["optimizer"]["state"].items():
            for what, t in of.items():
                assert same_bits(whole(got["optimizer"]["state"][name][what]), whole(t)), name
    with pytest.raises(ValueError, match="save_pretrained: each rank has a part of the experts, mu"
                       "st be given whole tensors; give it state_dict="):
        shared.save_pretrained(folder / "saved", state_dict=shared.state_dict())
    full = {name: whole(t) for name, t in shared.state_dict().items()}
    if rank == 0:
        shared.save_pretrained(folder / "saved", state_dict=dict(full))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved")
        assert all(same_bits(t.to(device), full[name]) for name, t in loaded.state_dict().items())
    dist.barrier()


def quantised(rank, device, family, folder):
    """Codes and scales are shared: bits of one process, and files of all experts."""
    plain = huggingface.load_quantized(folder, device=device)
    ids = torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(1)).to(device)
    for batch in ("own", "same"):
        shared = huggingface.load_quantized(folder, device=device)
        huggingface.use(shared, dist.group.WORLD, batch=batch)
        mine = ids if batch == "same" else ids[rank:rank + 1]
        with torch.no_grad():
            assert same_bits(shared(mine).logits, plain(mine).logits)
            tokens = [m.generate(mine, max_new_tokens=4, do_sample=False) for m in (shared, plain)]
        assert torch.equal(*tokens)
    bytes_of = [sum(p.nbytes for name, p in m.named_parameters() if ".experts." in name)
                for m in (shared, plain)]
    assert 2 * bytes_of[0] == bytes_of[1] > 0
    shared.load_state_dict({name: whole(t) for name, t in plain.state_dict().items()})
    full = {name: whole(t) for name, t in shared.state_dict().items()}
    if rank == 0:
        shared.save_pretrained(folder / "saved", state_dict=full)
        again = huggingface.load_quantized(folder / "saved", device=device)
        with torch.no_grad():
            assert same_bits(again(ids).logits, plain(ids).logits)
    dist.barrier()


def quantised_by_transformers(rank, device, folder):
    """The same of its quantizer's experts, whose states it saves itself."""
    plain, shared = (from_pretrained(folder).to(device) for _ in range(2))
    huggingface.use(shared, dist.group.WORLD)
    ids = torch.randint(2, 64, (2, 7), generator=torch.Generator().manual_seed(1)).to(device)
    mine = ids[rank:rank + 1]
    with torch.no_grad():
        assert same_bits(shared(mine).logits, plain(mine).logits)
    full = {name: whole(t) for name, t in shared.state_dict().items()}
    with pytest.raises(ValueError, match="save_pretrained: each rank has a part of the experts, mu"
                       "st have all; a quantizer of transformers saves no other state: save before "
                       "`use`"):
        shared.save_pretrained(folder / "saved", state_dict=full)


# The tests


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    both = Processes(tmp_path_factory.mktemp("two"), 2)
    yield both
    both.finish()


@pytest.mark.parametrize("dtype, cast", [
    (torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("batch", ["own", "same"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_have_the_bits_of_one_process(two, family, batch, dtype, cast):
    two.run(experts_alone, family, batch, dtype, cast)


def test_compiled_experts(two):
    two.run(compiled_experts)


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_spread_by_transformers(two, family, switched):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    two.run(spread_by_transformers, family, switched)


def test_wrapped_models(two):
    two.run(wrapped)


def test_refusals(two):
    two.run(refusals)


def test_fsdp2_shards_replicas_alone(two):
    two.run(sharded)


@pytest.mark.parametrize("batch", ["own", "same"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_train_as_in_one_process(two, family, batch):
    two.run(train, family, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_generate_as_in_one_process(two, family):
    two.run(generate, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_states(two, family, tmp_path):
    two.run(states, family, tmp_path)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_quantised_experts_are_shared(two, family, tmp_path):
    model, _ = loaded(family, tmp_path)
    two.run(quantised, family, tmp_path)
    if family == "deepseek_v3":
        model.save_pretrained(tmp_path / "again")
        two.run(quantised_by_transformers, tmp_path / "again")
