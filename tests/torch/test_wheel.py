"""The wheel: built by pip as a user builds it, installed into an environment that has torch, where
the doctor is content and a program of the README runs."""
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import zipfile

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITE = sysconfig.get_path("purelib")


def clean_environment():
    """What a user's shell has: nothing that leads to the build tree."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Without CUDA, whose kernels take minutes to compile. The compiler's name, its flags and the
    folder's depth are those of the build that is tested, so that its cache has the objects."""
    folder = tmp_path_factory.mktemp("wheel")
    requires = re.search(r'^requires = \["([^"]+)"\]', (ROOT / "pyproject.toml").read_text(), re.M)
    asked = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                            "--dest", folder / "asked", requires.group(1)], capture_output=True)
    if asked.returncode and os.environ.get("CADRE_REQUIRE") != "1":
        pytest.skip(f"PyPI could not be had for {requires.group(1)}")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder),
        "--config-settings=cmake.define.CADRE_CUDA=OFF",
        "--config-settings=cmake.define.CMAKE_CXX_COMPILER=c++",
        "--config-settings=cmake.define.CADRE_WERROR=ON",
        f"--config-settings=build-dir={ROOT}/build/wheel", str(ROOT), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with torch and the wheel. It borrows torch."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", str(folder), cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(SITE + "\n")
    program = str(folder / "bin/python")
    run(program, "-m", "pip", "install", "--no-index", "--no-deps", str(wheel), cwd=folder)
    return program


def test_its_tag_and_files(wheel):
    project = (ROOT / "CMakeLists.txt").read_text()
    version = re.search(r"^project\(cadre VERSION (\S+)", project, re.M).group(1)
    minor = ".".join(torch.__version__.split(".")[:2])
    version += f"+torch{minor}.cpu"
    assert wheel.name == f"cadre-{version}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"cadre-{version}.dist-info/METADATA").decode()
    in_source = {f"cadre/{path.name}" for path in (ROOT / "torch/cadre").glob("*.py*")
                 if path.suffix in (".py", ".typed")}
    assert in_source <= names
    assert {"cadre/_build.py", "cadre/libcadre_torch.so"} <= names
    assert all(name.startswith(("cadre/", f"cadre-{version}.dist-info/")) for name in names)
    assert f"Version: {version}\n" in metadata
    assert re.findall(r"^Requires-Dist: (torch.*)$", metadata, re.M) == [f"torch=={minor}.*"]


def test_the_doctor_is_content(python, tmp_path):
    report = run(python, "-m", "cadre", "doctor", cwd=tmp_path)
    assert report.endswith("all is well\n")
    assert "no CUDA" in report and "site-packages/cadre/libcadre_torch.so" in report


@pytest.mark.parametrize("words", [["mypy", "--strict", "--config-file=", "--python-executable"],
                                   ["pyright", "--pythonpath"]], ids=["mypy", "pyright"])
def test_a_users_program_is_typed(python, words, tmp_path):
    """Of the package as it is installed, with all of torch read; test_typing.py has the rest. No
    settings are looked for in the folders above."""
    pytest.importorskip(words[0])
    program = ROOT / "tests/torch/typed_program.py"
    (tmp_path / "program.py").write_text(program.read_text())
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    run("env", "PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT=1", "PYRIGHT_PYTHON_IGNORE_WARNINGS=1",
        sys.executable, "-m", *words, python, "program.py", cwd=tmp_path)


LOADED = """
import cadre
lines = open("/proc/self/maps").read().splitlines()
print(*dict.fromkeys(line.split()[-1] for line in lines if "/lib" in line), sep="\\n")
"""


def test_it_brings_its_libraries_and_takes_torch_s_openmp(python, tmp_path):
    paths = [pathlib.Path(line) for line in run(python, "-c", LOADED, cwd=tmp_path).splitlines()]
    (onednn,) = [path for path in paths if path.name.startswith("libdnnl.so")]
    assert onednn.parent.name == "cadre"
    (openmp,) = [path for path in paths if path.name.startswith("libgomp")]
    assert openmp.parent.parent.name == "torch" or openmp.parent.name == "torch.libs"


def test_the_library_asks_its_own_onednn_first(wheel, tmp_path):
    """torch has another inside; a few inline functions of the two bear the same names."""
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("cadre/libcadre_torch.so", tmp_path)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library, cwd=tmp_path))
    assert needed.index("libdnnl.so.2") < needed.index("libtorch_cpu.so")


def test_the_first_block_of_the_readme_runs(python, tmp_path):
    """Every other block of the pages runs in test_examples.py, beside the same package."""
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "block.py").write_text(re.search(r"^```python\n(.*?)^```$", readme, re.M | re.S)[1])
    assert run(python, "block.py", cwd=tmp_path)
