"""Kernels whose compiler may not be installed."""

import os
import tempfile
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType


@cache
def kernel_module(name: str, compiler: str) -> ModuleType | None:
    """Import the module of a compiled kernel by its full name; None where its compiler is not installed."""
    try:
        compiled_by = import_module(compiler)
    except ImportError:
        return None
    if compiler == "triton":
        use_own_cache(compiled_by)
    return import_module(name)


def use_own_cache(triton: ModuleType) -> None:
    """Replace a cache folder of Triton that another user owns, or in which every user can write: it contains code."""
    folder = Path(triton.knobs.cache.dir)
    if not folder.exists():
        return
    status = folder.stat()
    if (hasattr(os, "geteuid") and status.st_uid != os.geteuid()) or status.st_mode & 0o002:
        triton.knobs.cache.dir = tempfile.mkdtemp(prefix="gradlogz-triton-")
        text = f"Triton's cache {folder} is shared with other users and is not used. Set TRITON_CACHE_DIR to your own."
        warnings.warn(text, RuntimeWarning, stacklevel=3)
