"""gradlogz: attention is the gradient of a log normaliser.

    h          a measure on R^d (the keys)       G(eta) = log ∫ exp<x, eta> h(dx)     log normaliser
    query      the natural parameter eta         ∇G(eta)                              attention
    residual   convolution with the Dirac at x   ∇²G(eta)                             Fisher information

The most used names are available here; all others are public in their subpackage, such as gradlogz.filters.singer. The
list of names is __init__.pyi, which type checkers read too. Names are imported on first use, so that the command line
starts quickly.
"""

import ast
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # log messages are shown where a program asks for them


def _imports() -> list[ast.ImportFrom]:
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return [node for node in stub.body if isinstance(node, ast.ImportFrom)]


_CHAPTERS = [name.name for node in _imports() if node.module is None for name in node.names]
_HOME = {name.name: node.module for node in _imports() if node.module is not None for name in node.names}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _CHAPTERS:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'gradlogz' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_CHAPTERS, "__version__"])
