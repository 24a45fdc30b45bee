"""Computation in full precision: autocast disabled, as a context or a decorator, and tensors in float32 at least.

A covariance is a difference of products, which loses all its digits in half precision.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def autocast_disabled(like: Tensor) -> AbstractContextManager[Any]:
    """Context in which operations on the device of `like` run without autocast."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return nullcontext()  # entering a context costs more than a small product
    return nullcontext() if like.device.type == "meta" else torch.autocast(like.device.type, enabled=False)


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function to run without autocast.   Law: tests/laws/test_autocast_does_not_matter_to_filters.py."""

    @functools.wraps(function)
    def wrapped(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
            return function(*arguments, **options)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*arguments, **options)

    return wrapped


def wide(tensor: Tensor) -> Tensor:
    """Convert to float32, or keep float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
