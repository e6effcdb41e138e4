"""tools/wheel/cadre_wheel.py, which finds the torch that a wheel is built for."""
import importlib
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOOKS = ["get_requires_for_build_wheel", "get_requires_for_build_editable",
         "prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable", "build_wheel",
         "build_editable", "build_sdist", "get_requires_for_build_sdist"]


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The module, with scikit-build-core's hooks returning what they were given; no torch but those
    that a test adds, and no nvcc."""
    hooks = types.SimpleNamespace(**{name: lambda *given: given for name in HOOKS})
    hooks.get_requires_for_build_wheel = lambda settings: ["ninja>=1.5"]
    monkeypatch.setitem(sys.modules, "scikit_build_core", types.SimpleNamespace(build=hooks))
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", hooks)
    monkeypatch.syspath_prepend(ROOT / "tools/wheel")
    monkeypatch.delitem(sys.modules, "cadre_wheel", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("cadre_wheel")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(module, "torch_folders", lambda: iter(module.test_folders))
    module.test_folders = []
    monkeypatch.setattr(module, "find_nvcc", lambda: None)
    module.asks = module.capabilities, module.cuda_release
    monkeypatch.setattr(module, "capabilities", set)
    monkeypatch.setattr(module, "cuda_release", lambda nvcc: "13.0")
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "2")
    return module


def torch_of(folder, version):
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text(f"debug = False\n__version__ = '{version}'\ncuda = None\n")
    return folder


def test_the_first_torch_that_will_do_is_taken(backend, tmp_path):
    old, new = torch_of(tmp_path / "a", "2.10.0"), torch_of(tmp_path / "b", "2.11.1+cu130")
    backend.test_folders = [old, new]
    assert backend.get_requires_for_build_wheel() == ["ninja>=1.5"]
    folder, given, metadata = backend.build_wheel("out", {"verbose": "1"}, "meta")
    assert (folder, metadata) == ("out", "meta")
    assert given == {"cmake.define.CADRE_TORCH_DIR": str(new), "cmake.define.CADRE_CUDA": "OFF",
                     "verbose": "1"}


@pytest.mark.parametrize("version, minor", [
    ("2.11.0+cu130", "2.11"), ("2.13.1", "2.13"), ("2.15.0a0+git1", "2.15")])
def test_a_wheel_carries_the_torch_that_is_here(backend, tmp_path, monkeypatch, version, minor):
    backend.test_folders = [torch_of(tmp_path / "torch", version)]
    plain = backend.dynamic_metadata("version", {})
    assert re.fullmatch("[0-9.]+", plain)
    assert backend.dynamic_metadata("dependencies", {}) == ["torch<2.16,>=2.11"]
    backend.build_wheel("out")
    assert backend.dynamic_metadata("version", {}) == f"{plain}+torch{minor}.cpu"
    assert backend.dynamic_metadata("dependencies", {}) == [f"torch=={minor}.*"]
    monkeypatch.setattr(backend, "find_nvcc", lambda: "/opt/nvcc")
    backend.prepare_metadata_for_build_wheel("meta")
    assert backend.dynamic_metadata("version", {}) == f"{plain}+torch{minor}.cu130"
    backend.prepare_metadata_for_build_wheel("meta", {"cmake.define.CADRE_CUDA": "OFF"})
    assert backend.dynamic_metadata("version", {}) == f"{plain}+torch{minor}.cpu"


@pytest.mark.parametrize("gpus, want", [
    (set(), "80-virtual;90a-real"), ({"9.0"}, "90a-real"), ({"8.0", "8.9"}, "80-real"),
    ({"10.0"}, "80-virtual"), ({"7.5"}, "80-virtual"), ({"12.0", "9.0"}, "80-virtual;90a-real"),
    ({"8.6", "9.0"}, "80-real;90a-real")])
def test_code_is_made_for_the_gpus_that_are_here(backend, tmp_path, monkeypatch, gpus, want):
    backend.test_folders = [torch_of(tmp_path / "torch", "2.11.0")]
    name = "cmake.define.CMAKE_CUDA_ARCHITECTURES"
    assert name not in backend.build_wheel("out")[1]
    monkeypatch.setattr(backend, "find_nvcc", lambda: "/opt/nvcc")
    monkeypatch.setattr(backend, "capabilities", lambda: gpus)
    assert backend.build_wheel("out")[1][name] == want
    assert backend.build_wheel("out", {name: "80"})[1][name] == "80"


def test_what_nvcc_and_the_driver_say(backend, tmp_path, monkeypatch):
    capabilities, cuda_release = backend.asks
    for name, says in (("nvcc", "Cuda compilation tools, release 13.2, V13.2.1"),
                       ("nvidia-smi", "9.0\n8.0\n9.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{says}\\n'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cuda_release("nvcc") == "13.2"
    assert capabilities() == {"9.0", "8.0"}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert capabilities() == set()
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert capabilities() == set()


@pytest.mark.parametrize("versions", [[], ["2.10.0"], ["2.16.0+cpu"]])
def test_without_one_it_is_required(backend, tmp_path, versions):
    backend.test_folders = [torch_of(tmp_path / v, v) for v in versions]
    requirements = backend.get_requires_for_build_wheel()
    assert requirements[0] == "ninja>=1.5" and requirements[1].startswith("torch")
    with pytest.raises(SystemExit) as error:
        backend.build_wheel("out")
    found = versions[0] if versions else "missing"
    assert str(error.value) == (
        f"cadre: torch is {found} for {sys.executable}, must be <2.16,>=2.11; install it, or build "
        "without --no-build-isolation")


def test_nvcc_turns_cuda_on_and_a_setting_of_the_user_wins(backend, tmp_path, monkeypatch):
    backend.test_folders = [torch_of(tmp_path / "torch", "2.11.0")]
    monkeypatch.setattr(backend, "find_nvcc", lambda: "/opt/nvcc")
    given = backend.build_wheel("out")[1]
    assert given["cmake.define.CADRE_CUDA"] == "ON"
    assert given["cmake.define.CMAKE_CUDA_COMPILER"] == "/opt/nvcc"
    given = backend.build_wheel("out", {"cmake.define.CADRE_CUDA": "OFF"})[1]
    assert given["cmake.define.CADRE_CUDA"] == "OFF"


def test_jobs_are_what_cores_and_memory_allow(backend, monkeypatch):
    monkeypatch.delenv("CMAKE_BUILD_PARALLEL_LEVEL")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if "SIZE" in name else (9 << 30) // 4096)
    assert backend.jobs() == 4
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    assert backend.jobs() == 1


def test_torch_is_found_behind_the_settings_of_an_isolated_build(tmp_path):
    """As pip does it: PYTHONPATH leads to a sitecustomize.py that hides the environment."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text("import site, sys\nhidden = set(site.getsitepackages())\n"
                    "sys.path[:] = [p for p in sys.path if p not in hidden]\n")
    program = ("import importlib.util, sys\n"
               "assert importlib.util.find_spec('torch') is None, 'it is not hidden'\n"
               "for name in 'packaging', 'packaging.requirements', 'scikit_build_core':\n"
               "    sys.modules[name] = importlib.util.module_from_spec(\n"
               "        importlib.util.spec_from_loader(name, None))\n"
               "sys.modules['packaging.requirements'].Requirement = str\n"
               "build = sys.modules['scikit_build_core'].build = sys.modules['scikit_build_core']\n"
               "build.build_sdist = build.get_requires_for_build_sdist = None\n"
               "sys.modules['scikit_build_core.build'] = build\n"
               f"sys.path.insert(0, {str(ROOT / 'tools/wheel')!r})\n"
               "import cadre_wheel\n"
               "print(*cadre_wheel.torch_folders())\n")
    done = subprocess.run([sys.executable, "-B", "-c", program], cwd=tmp_path, text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    spec = importlib.util.find_spec("torch")
    assert done.stdout.split() == [str(pathlib.Path(spec.origin).parent)]
