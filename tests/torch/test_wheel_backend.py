"""tools/wheel/cadre_wheel.py, which finds the torch that a wheel is built for."""
import importlib
import os
import pathlib
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


@pytest.mark.parametrize("versions", [[], ["2.10.0"], ["2.12.0+cpu"]])
def test_without_one_it_is_required(backend, tmp_path, versions):
    backend.test_folders = [torch_of(tmp_path / v, v) for v in versions]
    requirements = backend.get_requires_for_build_wheel()
    assert requirements[0] == "ninja>=1.5" and requirements[1].startswith("torch")
    with pytest.raises(SystemExit) as error:
        backend.build_wheel("out")
    found = versions[0] if versions else "missing"
    assert str(error.value) == (
        f"cadre: torch is {found} for {sys.executable}, must be <2.12,>=2.11; install it, or build "
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
