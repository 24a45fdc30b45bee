"""Merging of nested statistics.

    state      = None | a statistic | a constant | {name: state} | a NamedTuple of states
    merge      statistic by statistic; None is neutral, names present on one side only are retained, constants must be
               equal; a statistic that occurs twice in both states is merged once and shared in the result

A statistic is any object with a method `merge`: Sums, Comoments, Histogram, Sample.

Read next: sums.py, comoments.py, histogram.py, sample.py.
"""

from typing import Any, TypeVar

import torch

from ..._errors import InputTypeError, InputValueError
from ..._typing import Tensor

State = TypeVar("State")
_CONSTANTS = (str, int, float, Tensor)


def merge(one: State, other: State) -> State:
    """Return the state of a pass over both corpora; associative and commutative up to rounding.

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
        problem = f"states of types {type(one).__name__} and {type(other).__name__} cannot be merged"
        remedy = "Pass two statistics, constants, dictionaries or named tuples of the same type."
        raise InputTypeError("merge", "other", problem, remedy)
    if hasattr(one, "merge"):
        pair = (id(one), id(other))
        if pair not in known:
            known[pair] = one.merge(other)
        return known[pair]
    if hasattr(one, "_fields"):
        return type(one)(*(_merged(a, b, known) for a, b in zip(one, other, strict=True)))
    if not (torch.equal(one, other) if isinstance(one, Tensor) else one == other):
        problem = "the states have different constants" + (
            "" if isinstance(one, Tensor) else f", {one!r} and {other!r}"
        )
        raise InputValueError("merge", "other", problem, "Merge only statistics of runs with equal settings.")
    return one
