"""Validation of the arguments of a measure, and their arrangement to one shape.

    eta [*b, *m, d]  ->  [*b, m, d]  ->  a method of a concrete measure  ->  [*b, m, ...]  ->  [*b, *m, ...]

Batch dimensions broadcast against size 1 and never from the right: sizes that agree by accident would otherwise give
silently wrong results. Any number of query dimensions is flattened to one and restored afterwards.

Read next: measure.py (the class whose methods are wrapped).
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from .._errors import (
    InputTypeError,
    InputValueError,
    check_finite,
    check_floats,
    has_values,
    present,
    shape_of,
)
from .._typing import Tensor

Restore = Callable[[Tensor, int], Tensor]

# The wrapped methods, and the number of trailing dimensions of their results.
TRAILING = {
    "log_normalizer": 0,
    "mean": 1,
    "covariance": 2,
    "covariance_product": 1,
    "sample": 1,
    "support": 0,
    "in_domain": 0,
    "entropy": 0,
    "probabilities": 1,
    "responsibilities": 1,
}
DEFINED_EVERYWHERE = {"support", "in_domain"}


@runtime_checkable
class Validated(Protocol):
    """Attributes of a measure that validation reads."""

    @property
    def validate(self) -> bool: ...
    @property
    def batch_shape(self) -> torch.Size: ...
    @property
    def dim(self) -> int: ...
    def in_domain(self, eta: Any) -> Any: ...
    def _reference(self) -> Tensor | None: ...


def arrange(h: Validated, call: str, *, natural: tuple[str, ...] = (), **named: Tensor) -> tuple[list[Tensor], Restore]:
    """Check the arguments, reshape each to [*b, m, d], and return a function that restores the query dimensions.

    Args:
        h: the measure.
        call: name of the public call, for messages.
        natural: names of the natural parameters, which must lie in the domain of h.
        named: the arguments, by their public names.
    """
    check_floats(call, **named, **present(measure=h._reference()))
    batch, d = h.batch_shape, h.dim
    for name, t in named.items():
        _check_shape(call, name, t, batch, d)
    tensors = list(named.values())
    queries = tensors[0].shape[len(batch) : -1]
    if any(t.shape[len(batch) : -1] != queries for t in tensors):
        condition = f"{' and '.join(named)} must have the same query dimensions"
        fact = "shapes " + " and ".join(str(shape_of(t)) for t in tensors)
        raise InputValueError(call, " and ".join(named), f"{condition}, got {fact}", "Expand them to one shape.")
    if h.validate:
        check_finite(call, **named)
    full = common_batch(call, batch, *(t.shape[: len(batch)] for t in tensors))
    m = math.prod(queries)
    # Contiguous, since torch.func.jvp does not support expanded tensors.
    flat = [t.reshape(*t.shape[: len(batch)], m, d).expand(*full, m, d).contiguous() for t in tensors]
    for name, t in zip(named, flat, strict=True):
        if name in natural:
            check_domain(call, h, t, name)
    return flat, functools.partial(_restore, tuple(queries))


def validated(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a method written for [*b, m, d] to check its arguments and accept any number of query dimensions."""
    arguments = ("eta",) if name == "sample" else tuple(inspect.signature(method).parameters)[1:]
    natural = () if name in DEFINED_EVERYWHERE else ("eta",)

    @functools.wraps(method)
    def checked(self: Validated, *positional: Any, **options: Any) -> Tensor:
        call = f"{type(self).__name__}.{name}"
        named = dict(zip(arguments, positional, strict=False))
        for argument in arguments:
            if argument not in named:
                if argument not in options:
                    raise InputTypeError(call, argument, f"{argument} is missing", "Pass it by position or by name.")
                named[argument] = options.pop(argument)
        if name == "sample":
            shape = options.get("shape", positional[1] if len(positional) > 1 else ())
            if not isinstance(shape, tuple):
                raise InputTypeError(
                    call, "shape", f"shape must be a tuple of sizes, got {type(shape).__name__}", "Write (n,)."
                )
        flat, restore = arrange(self, call, natural=natural, **named)
        kind = flat[0].device.type
        if torch.is_autocast_enabled(kind):  # half precision is too coarse for sums of exponentials
            with torch.autocast(kind, enabled=False):
                return restore(method(self, *flat, *positional[len(arguments) :], **options), TRAILING[name])
        return restore(method(self, *flat, *positional[len(arguments) :], **options), TRAILING[name])

    return checked


def everywhere(in_domain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mark a domain as the entire space, so that no call checks it."""
    setattr(in_domain, "everywhere", True)  # noqa: B010
    return in_domain


def check_domain(call: str, h: Validated, eta: Tensor, name: str = "eta") -> None:
    """Check that Z(eta) is finite, if values can be read."""
    if not h.validate or getattr(type(h).in_domain, "everywhere", False) or not has_values(eta):
        return
    inside = h.in_domain(eta)
    if not has_values(inside):  # a measure inside vmap with a plain eta
        return
    outside = int((~inside).sum())
    if outside:
        condition = f"{name} must lie in the domain of the measure, where Z is finite"
        fact = f"{outside} of {eta.shape[:-1].numel()} rows are outside"
        remedy = f"Scale {name} down; {type(h).__name__}.in_domain shows the rows."
        raise InputValueError(call, name, f"{condition}, but {fact}", remedy)


def common_batch(call: str, *shapes: torch.Size) -> torch.Size:
    """Common batch shape of tensors or measures: equal numbers of dimensions, broadcast against size 1."""
    if len({len(s) for s in shapes}) > 1 or any(len({*sizes} - {1}) > 1 for sizes in zip(*shapes, strict=False)):
        fact = " and ".join(str(tuple(s)) for s in shapes)
        remedy = "Insert or expand batch dimensions: they broadcast against size 1 only."
        raise InputValueError(call, None, f"batch dimensions must agree, got {fact}", remedy)
    return torch.broadcast_shapes(*shapes)


def _check_shape(call: str, name: str, t: Tensor, batch: torch.Size, d: int) -> None:
    """Check that t is [*b, *m, d], the batch first."""
    if t.ndim == 0 or t.shape[-1] != d:
        condition = f"{name} must end in d={d}, the dimension of the measure"
        remedy = f"Project it to dimension {d} first, or use a measure of its dimension."
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
    if t.ndim <= len(batch):
        condition = f"{name} must begin with the {len(batch)} batch dimensions {tuple(batch)} of the measure"
        remedy = "Insert dimensions of size 1 in front; missing dimensions do not broadcast."
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
    if any(have != want and 1 not in (have, want) for have, want in zip(t.shape, batch, strict=False)):
        condition = f"{name} must begin with the batch dimensions {tuple(batch)} of the measure, or with size 1"
        remedy = "Put batch dimensions first and query dimensions after them."
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)


def _restore(queries: tuple[int, ...], result: Tensor, trailing: int) -> Tensor:
    """Restore the query dimensions of a result [..., m, *trailing] in place of m."""
    at = result.ndim - trailing - 1
    return result.reshape((*result.shape[:at], *queries, *result.shape[at + 1 :]))
