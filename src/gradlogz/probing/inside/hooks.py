"""A pass through a model, followed: which modules run, where tensors are summed, what is switched off meanwhile.

Read next: discovery.py and capturing.py, which follow passes.
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
from .architecture import SumSite

SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)


def without_cache(model: nn.Module) -> dict[str, Any]:
    """The option by which a model computes its keys anew, where it has one."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """The model without dropout, and as it was afterwards."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Running:
    """Which modules run, and how often each ran in this pass."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []
        self.times: dict[str, int] = defaultdict(int)
        self.sums: dict[tuple[str, int], int] = defaultdict(int)

    def clear(self) -> None:
        """Begin a pass."""
        self.stack.clear()
        self.times.clear()
        self.sums.clear()

    def enter(self, name: str) -> None:
        """A module begins."""
        self.times[name] += 1
        self.stack.append((name, self.times[name]))

    def leave(self, name: str) -> tuple[str, int]:
        """A module has ended; its name and which call of it that was."""
        while self.stack and self.stack[-1][0] != name:
            self.stack.pop()  # left by an error that was caught
        return self.stack.pop()

    def summed(self) -> SumSite:
        """The place of the sum that is made now."""
        here = self.stack[-1] if self.stack else ("", 1)
        self.sums[here] += 1
        return SumSite(*here, self.sums[here])


def operands(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """The two tensors of a sum of tensors of one shape."""
    if func not in SUMS or len(args) < 2:
        return None
    a, b = args[:2]
    whole = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.ndim >= 2
    return (a, b) if whole and a.is_floating_point() else None


def writes(func: Any) -> bool:
    """Whether a function writes into its first argument, by torch's way of naming."""
    return (
        re.fullmatch(r"__setitem__|__i(add|sub|mul|truediv|pow|and|or)__|.*[a-z]_", getattr(func, "__name__", ""))
        is not None
    )


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)


@contextmanager
def watched(model: nn.Module, follower: Any) -> Iterator[None]:
    """Tell `follower` when each module of a model begins, with its arguments, and when it ends, with its result."""
    hooks = []
    for name, module in model.named_modules():  # a tied module has the name under which it comes first

        def enter(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            follower.enter(name, m, args, kwargs)

        def leave(m: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
            follower.leave(name, m, next(tensors((args, kwargs)), None), next(tensors(result), None))

        hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
