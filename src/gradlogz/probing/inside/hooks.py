"""Hooks for a forward pass: running modules, sums of tensors, evaluation mode.

Read next: discovery.py and following.py, which use them.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..._typing import Tensor
from ...attention.in_models.uncompiled import uncompiled
from .architecture import SumSite

SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the keyword argument that disables a model's key-value cache, if it has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context with the model in evaluation mode and uncompiled; the training flags are restored at the end."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with uncompiled():
            yield
    finally:
        for module in training:
            module.training = True


class Running:
    """Stack of the running modules, and the number of calls of each in this pass."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []
        self.times: dict[str, int] = defaultdict(int)
        self.sums: dict[tuple[str, int], int] = defaultdict(int)

    def clear(self) -> None:
        """Reset the stack and the counts for a new pass."""
        self.stack.clear()
        self.times.clear()
        self.sums.clear()

    def enter(self, name: str) -> None:
        """Push a module that begins."""
        self.times[name] += 1
        self.stack.append((name, self.times[name]))

    def leave(self, name: str) -> tuple[str, int]:
        """Pop a module that has ended; return its name and the number of the call."""
        while self.stack and self.stack[-1][0] != name:
            self.stack.pop()  # left on the stack by a caught exception
        return self.stack.pop()

    def summed(self) -> SumSite:
        """Count a sum in the innermost running module, and return its site."""
        here = self.stack[-1] if self.stack else ("", 1)
        self.sums[here] += 1
        return SumSite(*here, self.sums[here])


def operands(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """Return the operands of a sum of two floating-point tensors of equal shape; None for any other call."""
    if func not in SUMS or len(args) < 2:
        return None
    a, b = args[:2]
    matching = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.ndim >= 2
    return (a, b) if matching and a.is_floating_point() else None


def writes(func: Any) -> bool:
    """Return whether a function modifies its first argument in place, by torch's naming convention."""
    return (
        re.fullmatch(r"__setitem__|__i(add|sub|mul|truediv|pow|and|or)__|.*[a-z]_", getattr(func, "__name__", ""))
        is not None
    )


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)


@contextmanager
def module_hooks(model: nn.Module, observer: Any) -> Iterator[None]:
    """Context that calls observer.enter (arguments) and observer.leave (argument, result) around each module call."""
    hooks = []
    for name, module in model.named_modules():  # a shared module has the name of its first occurrence

        def enter(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            observer.enter(name, m, args, kwargs)

        def leave(m: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
            observer.leave(name, m, next(tensors((args, kwargs)), None), next(tensors(result), None))

        hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
