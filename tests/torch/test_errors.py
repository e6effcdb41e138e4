"""The tables of docs/errors.md that are of the door: every use is run, and its error is the page's.
CADRE_WRITE_ERRORS=1 writes the page. Every message of the sources is in a table, or ELSEWHERE."""

import ast
import pathlib
import re
import sys

import pytest
from error_uses import TABLES, models, names

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import errors_page  # noqa: E402


def uses(name: str) -> list[str]:
    """A line each; what is indented belongs to the line before."""
    return re.sub(r"\n +", " ", TABLES[name].strip()).splitlines()


def answer(use: str, made: dict) -> str:
    try:
        eval(use, made)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}"
    pytest.fail(f"no error: {use}")


@pytest.mark.parametrize("name", TABLES)
def test_the_page_says_what_the_door_says(name):
    make = models if name == "door_transformers" else names
    errors_page.settle(name, [(use, answer(use, make())) for use in uses(name)])


def test_articles_are_chosen_in_one_place():
    """kind_of says "an int"."""
    for path in (ROOT / "torch/cadre").glob("*.py"):
        assert not re.search(r"\ban? \{type\(", path.read_text()), path.name


# Messages that Python provokes on no machine without a GPU, and the file of the test that does.
ELSEWHERE = {
    "scores are of a reentrant checkpoint, which gives them no gradient, must be of one with "
    "use_reentrant=False; or compute the loss inside": "test_router.py",
    "; a CUDA graph being captured would replay these very counts for ever": "test_graphs.py",
    "dispatch: a CUDA graph is being captured, must not be by the first dispatch with block; it "
    "makes what notes an overflow": "test_expert_parallel_blocks.py",
    ", must be cpu or a CUDA device; this build of Cadre sees ": "linear_memory_test.cpp",
    "push is True, must be None or False; these experts cannot push": "test_expert_parallel_moe.py",
    "megatron: activation_func of the experts was replaced, must be that of the config; it is "
    "measured when they are made": "test_megatron.py",
    "megatron: a tensor that linear_fc2 saved was written in place, must be left alone until "
    "backward": "test_megatron.py",
    "megatron: a linear of the experts returns a bias, must add it": "test_megatron.py",
    " has hooks or a forward of its own, must be as its class is; choose another "
    "experts_implementation for this model": "test_expert_activations.py",
    ", those of the window": "test_expert_parallel_refusals.py",
    "; all of them share the same one, or none": "test_expert_parallel_refusals.py",
    "module 'cadre' has no attribute ": "test_package.py",
    " tensors; num_extra_outputs is ": "test_ops_own.py",
    "save_pretrained: each rank has a part of the experts, must have all; a quantizer of "
    "transformers saves no other state: save before `use`": "test_huggingface_ranks.py",
    " of a DTensor, must be Replicate(); call the module that gathers it, or gather it before":
        "test_distributed.py",
    " is sharded by fully_shard, must be whole with delay_wgrad_compute; FSDP2 reduces gradients "
    "while backward runs, and these come later": "test_distributed.py",
    " is averaged by DistributedDataParallel while backward runs, must be left alone with "
    "delay_wgrad_compute, since its gradient comes later; name it in "
    "_set_params_and_buffers_to_ignore_for_model, or call the model in no_sync(), and average it "
    "after backward_dw": "test_distributed.py",
    ", must be None; prompts of ranks with batches of their own have other numbers of chunks":
        "test_huggingface_ranks.py",
    " has no backward; run it under torch.no_grad(), or load the model without weight quantization":
        "test_quantized_experts.py",
    ", a row for each expert; take an optimizer whose state is elementwise, or experts without "
    "biases": "test_expert_parallel_state.py",
    ", must be another for experts; it copies them to all ranks of its group, and its state_dict "
    "stays as it is": "test_expert_parallel_state.py",
    ", since groups number their ranks from the lowest on: make the mesh of ranks that ascend":
        "test_expert_parallel_state.py",
    "ExpertParallel is pickled, must not be; save the state_dict of its model":
        "test_expert_parallel_state.py",
} | dict.fromkeys((  # of files on a disk
    "load_quantized: quant_method of ",
    " has no experts modules that transformers dispatches, must have some",
    "] for an expert, must be whole blocks of ", " is in none of the files, must be in one",
    " of the files belongs to nothing in ",
    ", must have 2 dimensions, as its codes have scales of square blocks",
    " has no weight_map, must have one", "), must be a whole file of safetensors",
), "test_wrong_checkpoints.py") | dict.fromkeys((
    "save_pretrained: distributed_checkpoint is True, must be False for codes",
    " or all files of its index",
), "test_quantized_copies.py")


def python_messages(path: pathlib.Path):
    """The longest literal of every exception that is raised."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            literals = [c.value for arg in node.exc.args for c in ast.walk(arg)
                        if isinstance(c, ast.Constant) and isinstance(c.value, str)]
            if literals:
                yield max(literals, key=len)


def cpp_messages(path: pathlib.Path):
    """The longest literal of every check."""
    source = path.read_text()
    for call in re.finditer(r"TORCH_CHECK\w*\(", source):
        end, depth = call.end(), 1
        while depth > 0:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        literals = re.findall(r'(?:"(?:[^"\\]|\\.)*"\s*)+', source[call.end():end])
        yield max(("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', each)) for each in literals), key=len)


def test_the_tables_have_every_message_of_the_sources():
    page = errors_page.PAGE.read_text()
    absent = {words for kind, messages in ((".py", python_messages), (".cpp", cpp_messages),
                                     (".h", cpp_messages))
              for path in (ROOT / "torch").rglob(f"*{kind}") for words in messages(path)
              if words.strip() not in page}
    assert absent == ELSEWHERE.keys()


@pytest.mark.parametrize("words", ELSEWHERE)
def test_what_is_elsewhere_is_there(words):
    test = (pathlib.Path(__file__).parent / ELSEWHERE[words]).read_text()
    assert words in re.sub(r'"\s*r?"', "", test).replace("\\", "")
