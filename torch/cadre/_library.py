"""Loads libcadre_torch.so, which registers torch.ops.cadre.*"""

from pathlib import Path

import torch


def load() -> None:
    """Errors: ImportError if the library was not built, or for another torch."""
    path = Path(__file__).parent / "libcadre_torch.so"
    if not path.exists():
        raise ImportError(f"cadre: {path} is missing; build it with `pip install .`")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"cadre: {path} cannot be loaded beside torch {torch.__version__} "
                          f"({error}); build it again with `pip install .`") from error
