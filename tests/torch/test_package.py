"""What a package says that cannot be used: built for another torch, or not built."""
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import cadre
from cadre import _build, _library

HERE = pathlib.Path(cadre.__file__).parent
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page  # noqa: E402


@pytest.fixture
def package(tmp_path):
    """A copy of the package that a test may break."""
    shutil.copytree(HERE, tmp_path / "cadre", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "cadre"


def python(package, *words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(package.parent)})


def doctor_says(package, message):
    """With the versions, and without a traceback."""
    done = python(package, "-m", "cadre", "doctor")
    assert done.returncode == 1
    assert message in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stdout


BROKEN = """
sed -i 's/^TORCH = .*/TORCH = "2.4.1+cpu"/' cadre/_build.py; python -c 'import cadre'
rm cadre/libcadre_torch.so; python -c 'import cadre'
echo no library > cadre/libcadre_torch.so; python -c 'import cadre'
rm cadre/_build.py; python -c 'import cadre'
echo 'raise ImportError("there is none")' > torch.py; python -c 'import cadre'
echo 'raise ImportError("there is none")' > transformers.py; python -c 'import cadre.huggingface'
echo 'raise ImportError("there is none")' > megatron.py; python -c 'import cadre.megatron'
"""


def answer(use, folder):
    """Of a command in a folder that has the package, and of which the page is not to know."""
    shutil.copytree(HERE, folder / "cadre", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(["bash", "-c", f"python() {{ {sys.executable} \"$@\"; }}; {use}"],
                          cwd=folder, capture_output=True, text=True,
                          env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    return last.replace(f"{folder}/", "").replace(torch.__version__, "VERSION")


def test_the_page_says_what_broken_packages_say(tmp_path):
    uses = BROKEN.strip().splitlines()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = threads.map(answer, uses, (tmp_path / str(at) for at in range(len(uses))))
        errors_page.settle("door_package", list(zip(uses, answers)))


def test_a_copy_works(package):
    done = python(package, "-c", "import cadre; print(cadre.__file__)")
    assert (done.returncode, done.stdout.strip()) == (0, str(package / "__init__.py")), done.stderr


def test_another_torch(package):
    build = package / "_build.py"
    build.write_text(build.read_text().replace(_build.TORCH, "2.4.1+cpu"))
    message = (f"torch is {torch.__version__}, must be 2.4.*, with which this build of cadre was "
               "made; install torch==2.4.*, or build it again with `pip install .`")
    report = doctor_says(package, message)
    assert "built for" in report and "torch 2.4.1+cpu" in report


@pytest.mark.parametrize("built_with, found", [
    ("2.11.0+cu130", "2.11.0+cpu"), ("2.11.0", "2.11.3"), ("2.11.0", "2.11.1a0+git0123abc")])
def test_torches_that_fit(built_with, found):
    _library.require_same_torch(built_with, found)


@pytest.mark.parametrize("found", ["2.1.0", "2.10.0", "2.12.0", "3.11.0"])
def test_torches_that_do_not(found):
    with pytest.raises(ImportError, match=f"torch is {found}, must be 2.11.*, with which"):
        _library.require_same_torch("2.11.0+cu130", found)


def test_no_torch(package):
    (package.parent / "torch.py").write_text("raise ImportError('there is none')\n")
    report = doctor_says(package, "torch cannot be imported (there is none); install it")
    assert "not importable: there is none" in report


BESIDE_TORCH = """
import ctypes
assert hasattr(ctypes.CDLL(None), "_ZN2at15get_num_threadsEv") == {wanted}
for dtype in (torch.float32, torch.bfloat16):
    layer = cadre.GroupedLinear(2, 64, 48, params_dtype=dtype, device="cpu",
                                single_grouped_weight=True)
    x = torch.randn(40, 64, dtype=dtype, requires_grad=True)
    y = layer(x, [25, 15])
    y.backward(torch.ones_like(y))
    for rows, weight, dw in zip((x[:25], x[25:]), layer.weight, layer.weight.grad):
        ones = torch.ones(len(rows), 48, dtype=dtype)
        torch.testing.assert_close(dw, ones.T @ rows, rtol=0.02, atol=0.02)
    torch.testing.assert_close(x.grad[25:], ones @ layer.weight[1], rtol=0.02, atol=0.02)
print(torch.nn.functional.linear(x, layer.weight[0]).sum().isfinite())
"""


@pytest.mark.parametrize("first, second", [("torch", "cadre"), ("cadre", "torch")])
@pytest.mark.parametrize("in_global_scope", [True, False])
def test_two_onednn_in_one_process(first, second, in_global_scope):
    """torch has one inside, whose symbols are everybody's with TORCH_USE_RTLD_GLOBAL: neither is to
    call the other."""
    program = f"import {first}, {second}\n" + BESIDE_TORCH.format(wanted=in_global_scope)
    environment = os.environ | ({"TORCH_USE_RTLD_GLOBAL": "1"} if in_global_scope else {})
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env=environment)
    assert (done.returncode, done.stdout) == (0, "tensor(True)\n"), done.stderr


def test_the_door_exports_nothing():
    """What is loaded later cannot take its symbols, nor they those of what came before."""
    done = subprocess.run(["nm", "-DC", "--defined-only", _library.PATH], capture_output=True,
                          text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_ctest_runs_every_file_of_this_folder():
    here = pathlib.Path(__file__).parent
    tests = re.findall(r"^cadre_torch_test\((\w+)(?:\s+FILES((?:\s+[a-z]\w*)+))?",
                       (here / "CMakeLists.txt").read_text(), re.M)
    named = [file for name, files in tests for file in files.split() or [name]]
    assert sorted(named) == sorted(path.stem[5:] for path in here.glob("test_*.py"))


def test_a_package_has_every_file_of_its_folder():
    source = pathlib.Path(__file__).resolve().parents[2] / "torch"
    listed = re.search(r"set\(python_files\n(.*?)\)", (source / "CMakeLists.txt").read_text(), re.S)
    files = {path.name for path in (source / "cadre").iterdir() if path.suffix in (".py", ".typed")}
    assert set(listed.group(1).split()) == files - {"_build.py"}


def test_names_of_the_peer_say_what_is_here_instead():
    assert not hasattr(cadre, "moe_permute")
    with pytest.raises(AttributeError, match="^module 'cadre' has no attribute 'moe_permute'; use "
                       "cadre.offsets_of_routing, then cadre.permute"):
        cadre.moe_permute
    with pytest.raises(AttributeError, match="^module 'cadre' has no attribute 'nothing'$"):
        cadre.nothing
    assert all(hasattr(cadre, name) for name in dir(cadre))
