"""Filters compute in the precision of their arguments: autocast does not reach into them.

A covariance is a difference of products, and half precision leaves no digits of one.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function with autocast off.   Law: tests/laws/test_autocast_does_not_matter_to_filters.py."""

    @functools.wraps(function)
    def alone(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
            return function(*arguments, **options)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*arguments, **options)

    return alone
