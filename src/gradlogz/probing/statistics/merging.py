"""Nested statistics, merged as wholes.

    state      = None | a statistic | a constant | {name: state} | a NamedTuple of states
    merge      statistic by statistic; None is neutral, names of one side only are kept, constants must be equal; what
               is the same statistic at two places on both sides is one of the result too, and takes no memory twice

A statistic is whatever has a method `merge`: Sums, Comoments, Histogram, Sample.

Read next: sums.py, comoments.py, histogram.py, sample.py.
"""

from typing import Any, TypeVar

import torch

from ..._errors import InputTypeError, InputValueError
from ..._typing import Tensor

State = TypeVar("State")
_CONSTANTS = (str, int, float, Tensor)


def merge(one: State, other: State) -> State:
    """The state of both, as if one pass had seen all; associative and commutative up to rounding.

    Law: tests/laws/test_statistics_merge.py.
    """
    merged: State = _merged(one, other, {})
    return merged


def _merged(one: Any, other: Any, known: dict[tuple[int, int], Any]) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _merged(one.get(name), other.get(name), known) for name in {**one, **other}}
    mergeable = hasattr(one, "merge") or hasattr(one, "_fields") or isinstance(one, _CONSTANTS)
    if type(one) is not type(other) or not mergeable:
        fact = f"{type(one).__name__} and {type(other).__name__}"
        remedy = "Statistics, constants, dictionaries and named tuples of them merge."
        raise InputTypeError("merge", "both", f"both must be states of one kind, got {fact}", remedy)
    if hasattr(one, "merge"):
        pair = (id(one), id(other))
        if pair not in known:
            known[pair] = one.merge(other)
        return known[pair]
    if hasattr(one, "_fields"):
        return type(one)(*(_merged(a, b, known) for a, b in zip(one, other, strict=True)))
    if not (torch.equal(one, other) if isinstance(one, Tensor) else one == other):
        fact = "two tensors that differ" if isinstance(one, Tensor) else f"{one!r} and {other!r}"
        remedy = "Only statistics of runs with the same settings merge."
        raise InputValueError("merge", "constants", f"constants must be equal, got {fact}", remedy)
    return one
