"""What type checkers say of a user's program, and that the public names are those that the page
documents."""

import importlib
import inspect
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types

import pytest

import cadre

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = HERE / "typed_program.py"

# What a checker would read of torch for half a minute, with no say in tensors and modules.
UNREAD = ("transformers", "sympy", "numpy", *(f"torch.{name}" for name in (
    "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "ao", "cuda",
    "distributed", "export", "fx", "onnx", "testing")))
MYPY = f"""
[mypy]
strict = True
[mypy-{",".join(f"{name}.*" for name in UNREAD)}]
follow_imports = skip
follow_imports_for_stubs = True
"""

# Uses that have to be errors, or the checker has not seen the types.
WRONG = """
import torch
import cadre

x = torch.randn(4, 8)
cadre.grouped_mm(x, "w")
cadre.offsets([4], "counts", 4)
cadre.GroupedLinear(1, 8, 8, params_dtype="f32")
cadre.GroupedLinear(1, 8, 8).forward(x, 4)
cadre.GroupedMLP(1, 8, 8).forward(x, [4], recipe="bf16")
cadre.GroupedMLP(1, 8, 8).forward(x, [4]).no_tensor_has_it
cadre.MoE(2, 8, 8, top_k=1).forward(x)[1].no_router_has_it
cadre.ops.SReLU().forward(x, scale=x)
cadre.ops.GroupedLinear(1, 8, 8).forward(x, [4], output="y")
cadre.ops.Sequential(cadre.ops.SReLU()).plan(op_kwargs=3)
cadre.Recipe("bf16", fwd="mxfp8")
cadre.Recipe(8)
cadre.checkpoints.convert({}, 1, "cadre")
cadre.load
"""


def environment():
    """Nothing is fetched: what the packages brought is used."""
    return os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
                         "PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT": "1",
                         "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def said(request, tmp_path_factory):
    """What a checker prints in its strict mode. The programs lie in a folder of their own, where
    nothing but installed packages is found."""
    pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "program.py").write_text(PROGRAM.read_text())
    (folder / "wrong.py").write_text(WRONG)
    (folder / "mypy.ini").write_text(MYPY)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    words = {"mypy": ["--cache-dir", "/dev/null"], "pyright": ["--pythonpath", sys.executable]}
    done = subprocess.run([sys.executable, "-m", request.param, *words[request.param], "program.py",
                           "wrong.py"], cwd=folder, env=environment(), capture_output=True,
                          text=True)
    assert done.returncode == 1 and "wrong.py" in done.stdout, done.stdout + done.stderr
    return done.stdout


def lines_of(program, said):
    """Where in the program the checker sees errors."""
    return {int(line) for line in re.findall(rf"{program}:(\d+):.*?error:? ", said)}


def test_a_users_program_is_clean(said):
    assert not lines_of("program.py", said), said


def test_wrong_uses_are_seen(said):
    assert lines_of("wrong.py", said) == set(range(6, len(WRONG.split("\n")))), said


def test_every_public_type_is_known():
    """Also of what no program above uses."""
    pytest.importorskip("pyright")
    done = subprocess.run([sys.executable, "-m", "pyright", "--verifytypes", "cadre",
                           "--ignoreexternal"], env=environment(), capture_output=True, text=True)
    assert "Type completeness score: 100%" in done.stdout, done.stdout + done.stderr
    assert "Path of py.typed file" in done.stdout


def test_the_program_runs(capsys):
    pytest.importorskip("transformers")
    runpy.run_path(str(PROGRAM), run_name="__main__")
    assert "grouped_mlp" in capsys.readouterr().out


def documented():
    """{module: its public names}, from docs/torch.md."""
    page = (HERE.parents[1] / "docs/torch.md").read_text()
    section = re.search(r"^## Public names\n(.*?)^## ", page, re.M | re.S)[1]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", section, re.M)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def test_the_public_names_are_those_that_are_documented():
    pytest.importorskip("transformers")
    found = documented()
    assert sorted(found) == ["cadre", "cadre.checkpoints", "cadre.huggingface", "cadre.megatron",
                             "cadre.ops"]
    for module, names in found.items():
        exported = importlib.import_module(module).__all__
        assert sorted(exported) == sorted(names), module
        assert len(set(exported)) == len(exported)


def test_all_is_all_that_looks_public():
    """What `import cadre` alone leaves there without an underscore, but for modules."""
    public = {name for name, value in vars(cadre).items()
              if not name.startswith("_") and not isinstance(value, types.ModuleType)}
    assert public == {name for name in cadre.__all__ if name not in ("checkpoints", "ops")}


def test_all_public_names_are_used_by_the_program():
    text = PROGRAM.read_text()
    missing = [f"{module}.{name}" for module, names in documented().items() for name in names
               if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_public_calls_name_their_options():
    """help() shows every one, and a word that is none of them is an error that says it."""
    pytest.importorskip("transformers")
    for module, names in documented().items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if not callable(value) or isinstance(value, types.ModuleType):
                continue
            kinds = {p.kind for p in inspect.signature(value).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, f"{module}.{name}"
            with pytest.raises(TypeError, match="normalise"):
                value(normalise=True)


def test_public_names_have_docstrings():
    pytest.importorskip("transformers")
    for module, names in documented().items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if callable(value) or isinstance(value, types.ModuleType):
                assert value.__doc__ and len(value.__doc__.split()) >= 3, f"{module}.{name}"
