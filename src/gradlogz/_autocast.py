"""Autocast off: as a context for a few lines, as a decorator for a whole function.

A covariance is a difference of products, and half precision leaves no digits of one.
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
    """Context in which tensors on the device of `like` keep their precision."""
    return nullcontext() if like.device.type == "meta" else torch.autocast(like.device.type, enabled=False)


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function to run with autocast off.   Law: tests/laws/test_autocast_does_not_matter_to_filters.py."""

    @functools.wraps(function)
    def alone(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
            return function(*arguments, **options)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*arguments, **options)

    return alone
