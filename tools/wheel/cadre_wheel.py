"""The build backend of pyproject.toml: scikit-build-core's, told where torch lies and whether to
build for GPUs.

The library is compiled against the torch beside which it is installed. pip builds in an
environment that hides that torch; asked without pip's settings, the interpreter of the build still
shows it. Only where it has none that will do is torch a requirement of the build.

Choices are scikit-build-core's: `pip install . -C cmake.define.CADRE_CUDA=OFF`, or
`-C "cmake.define.CMAKE_CUDA_ARCHITECTURES=80;90a-real"`.
"""
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from packaging.requirements import Requirement
from scikit_build_core import build as base
from scikit_build_core.build import (build_sdist, get_requires_for_build_sdist)

__all__ = ["build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable",
           "get_requires_for_build_sdist", "get_requires_for_build_wheel",
           "prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel"]

BYTES_A_JOB = 2 << 30  # what a compiler takes for a file that includes torch, or for kernels
HIDDEN = {"PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME", "VIRTUAL_ENV"}  # what pip sets
SEARCH = """
import importlib.util as u
spec = u.find_spec("torch")
print(spec.origin if spec and spec.origin else "", end="")
"""


def wanted_torch():
    """The requirement of pyproject.toml, which lies where a build starts."""
    text = pathlib.Path("pyproject.toml").read_text()
    return Requirement(re.search(r'^dependencies = \["(torch[^"]*)"', text, re.M).group(1))


def torch_folders():
    """Where this environment has torch, then where its interpreter does but for pip's settings."""
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        yield pathlib.Path(spec.origin).parent
    # Started elsewhere, since the source's own folder `torch` is another thing.
    plain = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    found = subprocess.run([sys.executable, "-c", SEARCH], cwd=tempfile.gettempdir(), env=plain,
                           capture_output=True, text=True).stdout
    if found:
        yield pathlib.Path(found).parent


def torch_version(folder):
    text = (folder / "version.py").read_text()
    return re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.M).group(1)


def find_torch():
    """The folder of the first torch that will do, or None; and the versions that will not."""
    others = []
    for folder in torch_folders():
        version = torch_version(folder)
        if wanted_torch().specifier.contains(version.split("+")[0], prereleases=True):
            return folder, others
        others.append(version)
    return None, others


def find_nvcc():
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"),
                  *(os.path.join(folder, "bin/nvcc") for folder in folders if folder)]
    return next((path for path in candidates if path and shutil.which(path)), None)


def jobs():
    """As many as there are cores and memory for."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_A_JOB))


def settings(chosen):
    """`chosen` by the user, and what this machine says of the rest."""
    chosen = dict(chosen or {})
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs()))
    torch, others = find_torch()
    if torch is None and "cmake.define.CADRE_TORCH_DIR" not in chosen:
        found = " and ".join(others) or "missing"
        raise SystemExit(f"cadre: torch is {found} for {sys.executable}, must be "
                         f"{wanted_torch().specifier}; install it, or build without "
                         "--no-build-isolation")
    found = {"CADRE_TORCH_DIR": torch, "CADRE_CUDA": "OFF"}
    nvcc = find_nvcc()
    if nvcc:
        found |= {"CADRE_CUDA": "ON", "CMAKE_CUDA_COMPILER": nvcc}
    return {f"cmake.define.{name}": str(value) for name, value in found.items()} | chosen


def requirements(of_base):
    return of_base if find_torch()[0] else [*of_base, str(wanted_torch())]


def get_requires_for_build_wheel(config_settings=None):
    return requirements(base.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    return requirements(base.get_requires_for_build_editable(config_settings))


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return base.prepare_metadata_for_build_wheel(metadata_directory, settings(config_settings))


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return base.prepare_metadata_for_build_editable(metadata_directory, settings(config_settings))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return base.build_wheel(wheel_directory, settings(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return base.build_editable(wheel_directory, settings(config_settings), metadata_directory)
