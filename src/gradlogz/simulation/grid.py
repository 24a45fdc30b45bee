"""Parameter grids, and their text form on the command line.

    {"beta": [0.3, 0.8], "dim": [2, 8]}     one or two axes of beta, tau, dim, tokens, heads, contraction
    beta=0.1:4:12                           text form: from, to, count; integers are rounded and kept once each
    contraction=zca|center+rms_norm         text form: a list of values

Read next: parameter_sweep.py.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .._errors import InputTypeError, InputValueError

INTEGERS = ("dim", "tokens", "heads")
NUMBERS = ("beta", "tau")
SWEPT = (*NUMBERS, *INTEGERS, "contraction")
LONGEST = 10_000  # values of an axis
EXAMPLE = '"beta=0.1:4:12,tau=-0.5:1:8" or "contraction=zca|rms_norm"'
Grid = Mapping[str, Iterable[float] | Iterable[str]]


class Range(NamedTuple):
    """One axis of a grid: a parameter and its values."""

    name: str
    values: tuple[Any, ...]


def ranges_of(grid: Grid) -> tuple[Range, ...]:
    """Validated axes of a grid."""
    if not isinstance(grid, Mapping):
        problem = f"grid must map parameter names to values, got {type(grid).__name__}"
        raise InputTypeError("sweep", "grid", problem, 'Pass a dictionary such as {"beta": [0.5, 1.0]}.')
    if not 1 <= len(grid) <= 2 or any(name not in SWEPT for name in grid):
        problem = f"grid must have one or two axes of {', '.join(SWEPT)}, got {', '.join(grid) or 'no axis'}"
        raise InputValueError("sweep", "grid", problem, "Set the other parameters by options.")
    ranges = tuple(Range(name, _converted(name, values)) for name, values in grid.items())
    for name, values in ranges:
        if not values:
            allowed = "names of contractions" if name == "contraction" else "finite numbers"
            problem = f"grid[{name!r}] must be a list of {allowed}, got " + f"{grid[name]!r}"[:80]
            raise InputValueError("sweep", "grid", problem, "Pass a list with at least one value.")
    return ranges


def _converted(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """Values of an axis; empty if one of them is invalid."""
    if name == "contraction":
        return () if isinstance(values, str) else tuple(map(str, values))
    try:
        numbers = tuple(map(float, values))
    except (ValueError, TypeError):
        return ()
    if not all(map(math.isfinite, numbers)):
        return ()
    return tuple(int(v) if v.is_integer() else v for v in numbers) if name in INTEGERS else numbers


# Text form -----------------------------------------------------------------------------------------------------------


def parse_grid(text: str) -> dict[str, tuple[Any, ...]]:
    """Parse the text form of a grid.

    >>> parse_grid("beta=0.5:1.5:3, contraction=zca|rms_norm")
    {'beta': (0.5, 1.0, 1.5), 'contraction': ('zca', 'rms_norm')}
    """
    grid: dict[str, tuple[Any, ...]] = {}
    for part in text.split(","):
        name, _, values = part.strip().partition("=")
        if name not in SWEPT or not values:
            problem = f"each axis of grid must be one of {', '.join(SWEPT)} with its values, got {part.strip()!r}"
            raise InputValueError("sweep", "grid", problem, f"Write {EXAMPLE}.")
        parsed = _values(name, values)
        if not parsed:
            problem = f"the values of {name} must be from:to:count or a list a|b|c of numbers, got {values!r}"
            raise InputValueError("sweep", "grid", problem, f"Write {EXAMPLE}.")
        if name in grid:
            problem = f"grid has the axis {name} twice"
            raise InputValueError("sweep", "grid", problem, "Write all values of an axis in one list.")
        grid[name] = parsed
    return grid


def _values(name: str, text: str) -> tuple[Any, ...]:
    """Values of an axis in text form; empty if they cannot be parsed."""
    if name == "contraction":
        return tuple(text.split("|"))
    try:
        if ":" in text:
            low, high, count = text.split(":")
            numbers = _spaced(float(low), float(high), int(count)) if 0 < int(count) <= LONGEST else []
        else:
            numbers = [float(word) for word in text.split("|")]
    except ValueError:  # not a number, or not three parts
        return ()
    if not all(map(math.isfinite, numbers)):
        return ()
    return tuple(dict.fromkeys(map(round, numbers))) if name in INTEGERS else tuple(numbers)


def _spaced(low: float, high: float, count: int) -> list[float]:
    """Equally spaced numbers, rounded to six significant digits."""
    return [float(f"{v:.6g}") for v in torch.linspace(low, high, count, dtype=torch.float64).tolist()]


def grid_text(ranges: Iterable[Range]) -> str:
    """Text form of a grid, the inverse of `parse_grid`.

    >>> grid_text([Range("beta", (0.5, 1.0, 1.5)), Range("dim", (2, 8))])
    'beta=0.5:1.5:3,dim=2|8'
    """
    return ",".join(f"{name}={_values_text(name, values)}" for name, values in ranges)


def _values_text(name: str, values: tuple[Any, ...]) -> str:
    words = [f"{v!r}".removesuffix(".0") for v in values] if name != "contraction" else list(values)
    if name == "contraction" or len(values) < 3 or _spaced(values[0], values[-1], len(values)) != list(values):
        return "|".join(words)
    return f"{words[0]}:{words[-1]}:{len(values)}"
