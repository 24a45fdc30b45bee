"""Validation of the arguments of a measure, once, and their arrangement to one shape.

    eta [*b, *m, d]  ->  [*b, m, d]  ->  a method of a concrete measure  ->  [*b, m, ...]  ->  [*b, *m, ...]

Batch dimensions broadcast against size 1 and never from the right: equal sizes that meet by accident would otherwise be
silently wrong. Query dimensions, any number of them, are flattened to one and given back afterwards.

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

# The methods that are wrapped, and how many trailing dimensions the result of each has.
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
    """What validation needs to know of a measure."""

    @property
    def validate(self) -> bool: ...
    @property
    def batch_shape(self) -> torch.Size: ...
    @property
    def dim(self) -> int: ...
    def in_domain(self, eta: Any) -> Any: ...
    def _reference(self) -> Tensor | None: ...


def arrange(h: Validated, call: str, *, natural: tuple[str, ...] = (), **named: Tensor) -> tuple[list[Tensor], Restore]:
    """Check the arguments, bring each to [*b, m, d], and say how to give results their query dimensions back.

    Args:
        h: the measure.
        call: the name of the user's call, for messages.
        natural: the arguments that are natural parameters and must lie in the domain of h.
        named: the arguments, by the names that the user knows.
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
    # Contiguous, because torch.func.jvp refuses expanded tensors.
    flat = [t.reshape(*t.shape[: len(batch)], m, d).expand(*full, m, d).contiguous() for t in tensors]
    for name, t in zip(named, flat, strict=True):
        if name in natural:
            check_domain(call, h, t, name)
    return flat, functools.partial(_restore, tuple(queries))


def validated(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method of a concrete measure, written for [*b, m, d], opened to any number of query dimensions."""
    arguments = ("eta",) if name == "sample" else tuple(inspect.signature(method).parameters)[1:]
    natural = () if name in DEFINED_EVERYWHERE else ("eta",)

    @functools.wraps(method)
    def checked(self: Validated, *given: Any, **options: Any) -> Tensor:
        call = f"{type(self).__name__}.{name}"
        named = dict(zip(arguments, given, strict=False))
        for argument in arguments:
            if argument not in named:
                if argument not in options:
                    raise InputTypeError(
                        call, argument, f"{argument} must be given, got nothing", "Pass it by place or name."
                    )
                named[argument] = options.pop(argument)
        if name == "sample":
            shape = options.get("shape", given[1] if len(given) > 1 else ())
            if not isinstance(shape, tuple):
                raise InputTypeError(
                    call, "shape", f"shape must be a tuple of sizes, got {type(shape).__name__}", "Write (n,)."
                )
        flat, restore = arrange(self, call, natural=natural, **named)
        kind = flat[0].device.type
        if torch.is_autocast_enabled(kind):  # sums of exponentials in half precision would be worth nothing
            with torch.autocast(kind, enabled=False):
                return restore(method(self, *flat, *given[len(arguments) :], **options), TRAILING[name])
        return restore(method(self, *flat, *given[len(arguments) :], **options), TRAILING[name])

    return checked


def everywhere(in_domain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mark a domain as the whole space, so that no call looks whether it is in it."""
    setattr(in_domain, "everywhere", True)  # noqa: B010
    return in_domain


def check_domain(call: str, h: Validated, eta: Tensor, name: str = "eta") -> None:
    """Z(eta) is finite, where there are values to look at."""
    if not h.validate or getattr(type(h).in_domain, "everywhere", False) or not has_values(eta):
        return
    inside = h.in_domain(eta)
    if not has_values(inside):  # a measure inside vmap beside a plain eta
        return
    outside = int((~inside).sum())
    if outside:
        condition = f"{name} must lie in the domain of the measure, where Z is finite"
        fact = f"{outside} of {eta.shape[:-1].numel()} rows outside"
        remedy = f"{type(h).__name__}.in_domain tells which; scale {name} down."
        raise InputValueError(call, name, f"{condition}, got {fact}", remedy)


def common_batch(call: str, *shapes: torch.Size) -> torch.Size:
    """The batch shape of several tensors or measures: equal numbers of dimensions, broadcast against size 1."""
    if len({len(s) for s in shapes}) > 1 or any(len({*sizes} - {1}) > 1 for sizes in zip(*shapes, strict=False)):
        fact = " and ".join(str(tuple(s)) for s in shapes)
        remedy = "Batch dimensions broadcast against size 1 only; insert or expand them."
        raise InputValueError(call, "query", f"batch dimensions must agree, got {fact}", remedy)
    return torch.broadcast_shapes(*shapes)


def _check_shape(call: str, name: str, t: Tensor, batch: torch.Size, d: int) -> None:
    """t is [*b, *m, d], the batch first."""
    if t.ndim == 0 or t.shape[-1] != d:
        condition = f"{name} must end in d={d}, the dimension of the measure"
        remedy = f"Project it to dimension {d} first, or use a measure of its dimension."
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
    if t.ndim <= len(batch):
        condition = f"{name} must begin with the {len(batch)} batch dimensions {tuple(batch)} of the measure"
        remedy = "Insert size-1 dimensions in front: they broadcast, missing ones do not."
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
    if any(have != want and 1 not in (have, want) for have, want in zip(t.shape, batch, strict=False)):
        condition = f"{name} must begin with the batch {tuple(batch)} of the measure, or with 1 in its place"
        remedy = "Batch dimensions come first and query dimensions after them."
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)


def _restore(queries: tuple[int, ...], result: Tensor, trailing: int) -> Tensor:
    """A result [..., m, *trailing] with its query dimensions in the place of m."""
    at = result.ndim - trailing - 1
    return result.reshape((*result.shape[:at], *queries, *result.shape[at + 1 :]))
