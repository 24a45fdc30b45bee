"""Kernels whose compiler may not be installed."""

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def kernel_module(name: str, compiler: str) -> ModuleType | None:
    """Import the module of a compiled kernel by its full name; None where its compiler is not installed."""
    try:
        import_module(compiler)
    except ImportError:
        return None
    return import_module(name)
