"""Callbacks whose library is imported on first use of their name.

Read next: trainer_callback.py, lightning_callback.py, accelerate_loop.py.
"""

import sys
from importlib import import_module
from typing import Any

from .._errors import MissingPackageError

# The module of a callback, and the package that it needs.
CALLBACKS = {
    "AccelerateMonitor": ("accelerate_loop", "accelerate"),
    "LightningMonitor": ("lightning_callback", "lightning"),
    "TrainerMonitor": ("trainer_callback", "transformers"),
}


def callback(package: str, name: str) -> Any:
    """Class of a callback; AttributeError for any other name, as of every module."""
    if name not in CALLBACKS:
        return object.__getattribute__(sys.modules[package], name)
    module, library = CALLBACKS[name]
    try:
        return getattr(import_module(f".{module}", package), name)
    except ModuleNotFoundError as error:
        problem = f"{library} must be installed, but there is no module {error.name}"
    raise MissingPackageError(name, library, problem, f"Run pip install {library}.")
