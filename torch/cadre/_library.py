"""Loads libcadre_torch.so, which registers torch.ops.cadre.*"""

import sys
from pathlib import Path

PATH = Path(__file__).parent / "libcadre_torch.so"
AGAIN = "build it again with `pip install .`"


def require_same_torch(built_with: str, found: str) -> None:
    """Both are versions, such as 2.11.0+cu130. Torch's C++ interface changes with every minor one.

    Errors: ImportError unless major and minor version agree.
    """
    if built_with.split(".")[:2] != found.split(".")[:2]:
        minor = ".".join(built_with.split(".")[:2])
        raise ImportError(f"cadre: torch is {found}, must be {minor}.*, with which this build of "
                          f"cadre was made; install torch=={minor}.*, or {AGAIN}")


def open_library(path: Path = PATH) -> None:
    """Errors: ImportError if torch or the library is missing, or they do not fit each other."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"cadre: torch cannot be imported ({error}); install it") from error
    try:
        from . import _build
    except ImportError as error:
        raise ImportError(f"cadre: {path.parent} was not built; build it with `pip install .`, or "
                          "take the folder torch of a build tree (CONTRIBUTING.md)") from error
    require_same_torch(_build.TORCH, torch.__version__)
    if not path.exists():
        raise ImportError(f"cadre: {path} is missing; {AGAIN}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # Of torch's own error the dynamic linker's words are the cause.
        raise ImportError(f"cadre: {path} cannot be loaded beside torch {torch.__version__} "
                          f"({error.__cause__ or error}); {AGAIN}") from error


def _is_command() -> bool:
    """Whether Python was started as `python -m cadre ...`."""
    words = sys.orig_argv
    return "-m" in words[1:] and words[words.index("-m", 1) + 1:][:1] == ["cadre"]


def load() -> None:
    """Errors: ImportError, which `python -m cadre` prints in place of a traceback."""
    try:
        open_library()
    except ImportError as error:
        if _is_command():
            from .doctor import broken
            sys.exit(broken(error))
        raise
