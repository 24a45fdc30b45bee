"""Grids of parameters: axes with their values, and the text by which the command line gives them.

    {"beta": [0.3, 0.8], "dim": [2, 8]}     one or two axes of beta, tau, dim, tokens, heads, contraction
    beta=0.1:4:12                           as text: from, to, count; of whole numbers each value once
    contraction=zca|center+rms_norm         or values apart from each other

Read next: parameter_sweep.py.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .._errors import InputTypeError, InputValueError

WHOLE = ("dim", "tokens", "heads")
NUMBERS = ("beta", "tau")
SWEPT = (*NUMBERS, *WHOLE, "contraction")
EXAMPLE = '"beta=0.1:4:12,tau=-0.5:1:8" or "contraction=zca|rms_norm"'
Grid = Mapping[str, Iterable[float] | Iterable[str]]


class Range(NamedTuple):
    """One axis of the grid."""

    name: str
    values: tuple[Any, ...]


def ranges_of(grid: Grid) -> tuple[Range, ...]:
    """The axes of a grid, refused where they cannot be swept."""
    if not isinstance(grid, Mapping):
        condition, remedy = "grid must map names of axes to values", 'Pass {"beta": [0.5, 1.0]}.'
        raise InputTypeError("sweep", "grid", f"{condition}, got {type(grid).__name__}", remedy)
    if not 1 <= len(grid) <= 2 or any(name not in SWEPT for name in grid):
        condition = f"the grid must have one or two axes of {', '.join(SWEPT)}"
        raise InputValueError(
            "sweep", "grid", f"{condition}" + ", got " + (", ".join(grid) or "none"), "Fix the others by options."
        )
    ranges = tuple(Range(name, _checked(name, values)) for name, values in grid.items())
    for name, values in ranges:
        if not values:
            condition = (
                f"values of {name} must be {'names' if name == 'contraction' else 'finite numbers'}, at least one"
            )
            raise InputValueError(
                "sweep", "grid", f"{condition}" + ", got " + (f"{grid[name]!r}"[:80]), "Pass a list of them."
            )
    return ranges


def _checked(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """The values of an axis; none if one of them cannot be used."""
    if name == "contraction":
        return () if isinstance(values, str) else tuple(map(str, values))
    try:
        numbers = tuple(map(float, values))
    except (ValueError, TypeError):
        return ()
    if not all(map(math.isfinite, numbers)):
        return ()
    return tuple(int(v) if v.is_integer() else v for v in numbers) if name in WHOLE else numbers


# As text -------------------------------------------------------------------------------------------------------------


def parse_grid(text: str) -> dict[str, tuple[Any, ...]]:
    """The grid that a text of the command line gives.

    >>> parse_grid("beta=0.5:1.5:3, contraction=zca|rms_norm")
    {'beta': (0.5, 1.0, 1.5), 'contraction': ('zca', 'rms_norm')}
    """
    grid: dict[str, tuple[Any, ...]] = {}
    for part in text.split(","):
        name, _, values = part.strip().partition("=")
        if name not in SWEPT or not values:
            condition, fact = f"an axis must be one of {', '.join(SWEPT)} with its values", f"{part.strip()!r}"
            raise InputValueError("sweep", "grid", f"{condition}, got {fact}", f"Write {EXAMPLE}.")
        read = _values(name, values)
        if not read:
            condition = "values must be from:to:count or one|other, and numbers but for contraction"
            raise InputValueError("sweep", "values", f"{condition}, got {values!r}", f"Write {EXAMPLE}.")
        if name in grid:
            condition, remedy = "there must be one or two different axes", "Write all values of an axis in one place."
            raise InputValueError("sweep", "there", f"{condition}, got {name} twice", remedy)
        grid[name] = read
    return grid


def _values(name: str, text: str) -> tuple[Any, ...]:
    """The values of an axis; none if they cannot be read."""
    if name == "contraction":
        return tuple(text.split("|"))
    try:
        if ":" in text:
            low, high, count = text.split(":")
            numbers = _spaced(float(low), float(high), int(count))
        else:
            numbers = [float(word) for word in text.split("|")]
    except ValueError:  # not numbers, or not three of them
        return ()
    if not all(map(math.isfinite, numbers)):
        return ()
    return tuple(dict.fromkeys(map(round, numbers))) if name in WHOLE else tuple(numbers)


def _spaced(low: float, high: float, count: int) -> list[float]:
    """Numbers at equal distances, of six digits."""
    return [float(f"{v:.6g}") for v in torch.linspace(low, high, count, dtype=torch.float64).tolist()]


def grid_text(ranges: Iterable[Range]) -> str:
    """The text from which `parse_grid` reads the same grid.

    >>> grid_text([Range("beta", (0.5, 1.0, 1.5)), Range("dim", (2, 8))])
    'beta=0.5:1.5:3,dim=2|8'
    """
    return ",".join(f"{name}={_written(name, values)}" for name, values in ranges)


def _written(name: str, values: tuple[Any, ...]) -> str:
    words = [f"{v!r}".removesuffix(".0") for v in values] if name != "contraction" else list(values)
    if name == "contraction" or len(values) < 3 or _spaced(values[0], values[-1], len(values)) != list(values):
        return "|".join(words)
    return f"{words[0]}:{words[-1]}:{len(values)}"
