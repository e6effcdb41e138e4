"""The build backend of pyproject.toml: scikit-build-core's, told where torch lies, whether to build
for GPUs, and for which.

The library is compiled against the torch beside which it is installed. pip builds in an
environment that hides that torch; asked without pip's settings, the interpreter of the build still
shows it. Only where it has none that will do is torch a requirement of the build. The wheel carries
that torch in its version and requires it; a source distribution fits all.

With nvcc, code is made for the GPUs that are here (see architectures_of).

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
           "prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel",
           "dynamic_metadata"]

BYTES_A_JOB = 2 << 30  # what a compiler takes for a file that includes torch, or for kernels
HIDDEN = {"PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME", "VIRTUAL_ENV"}  # what pip sets
BUILD = {}  # what for, in a process that builds a wheel: "torch", such as 2.11, and "cuda"
SEARCH = """
import importlib.util as u
spec = u.find_spec("torch")
print(spec.origin if spec and spec.origin else "", end="")
"""


def wanted_torch():
    """The requirement of pyproject.toml, which lies where a build starts."""
    text = pathlib.Path("pyproject.toml").read_text()
    return Requirement("torch" + re.search(r'^torch = "([^"]*)"', text, re.M).group(1))


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


def cuda_release(nvcc):
    """Such as "13.0"."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([0-9]+\.[0-9]+)", said).group(1)


def capabilities():
    """Compute capabilities of the GPUs that are here, such as {"9.0"}."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(re.findall(r"^\d+\.\d+$", done.stdout, re.M)) if done.returncode == 0 else set()


def architectures_of(capabilities):
    """What to compile for: 8.x and 9.0 have their own code, all others PTX of sm_80, which the
    driver compiles when it first loads it. Where no GPU is, Hopper's code and that PTX."""
    own = {"8": "80-real", "9": "90a-real"}
    of = {own.get(one.split(".")[0], "80-virtual") for one in capabilities}
    return ";".join(sorted(of or {"80-virtual", "90a-real"}))


def jobs():
    """As many as there are cores and memory for."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_A_JOB))


def settings(chosen):
    """`chosen` by the user, and what this machine says of the rest."""
    chosen = dict(chosen or {})
    os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs()))
    torch, others = find_torch()
    if "cmake.define.CADRE_TORCH_DIR" in chosen:
        torch = pathlib.Path(chosen["cmake.define.CADRE_TORCH_DIR"])
    if torch is None:
        found = " and ".join(others) or "missing"
        raise SystemExit(f"cadre: torch is {found} for {sys.executable}, must be "
                         f"{wanted_torch().specifier}; install it, or build without "
                         "--no-build-isolation")
    found = {"CADRE_TORCH_DIR": torch, "CADRE_CUDA": "OFF"}
    nvcc = find_nvcc()
    if nvcc:
        found |= {"CADRE_CUDA": "ON", "CMAKE_CUDA_COMPILER": nvcc,
                  "CMAKE_CUDA_ARCHITECTURES": architectures_of(capabilities())}
    all_of_them = {f"cmake.define.{name}": str(value) for name, value in found.items()} | chosen
    remember(all_of_them)
    return all_of_them


def remember(chosen):
    cuda = chosen["cmake.define.CADRE_CUDA"].upper() in ("ON", "1", "TRUE", "YES")
    release = cuda_release(chosen["cmake.define.CMAKE_CUDA_COMPILER"]) if cuda else ""
    version = torch_version(pathlib.Path(chosen["cmake.define.CADRE_TORCH_DIR"]))
    BUILD.update(torch=".".join(version.split(".")[:2]),
                 cuda="cu" + release.replace(".", "") if cuda else "cpu")


def dynamic_metadata(field, settings):
    """The version and the requirements of what is built."""
    if field == "dependencies":
        return [f"torch=={BUILD['torch']}.*" if BUILD else str(wanted_torch())]
    text = pathlib.Path("CMakeLists.txt").read_text()
    version = re.search(r"project\(cadre VERSION ([0-9.]+)", text).group(1)
    return f"{version}+torch{BUILD['torch']}.{BUILD['cuda']}" if BUILD else version


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
