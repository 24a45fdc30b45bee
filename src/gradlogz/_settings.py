"""Settings of a run as frozen dataclasses: replacement of fields, and the equivalent command-line options.

Read next: simulation/settings.py, tracking/settings.py.
"""

import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

S = TypeVar("S")  # a dataclass


def changed(settings: S, **options: Any) -> S:
    """Return the settings with the options replaced; an option that is None leaves its field unchanged."""
    return replace(settings, **{name: value for name, value in options.items() if value is not None})  # type: ignore[type-var]


def flags(settings: S, base: S) -> list[str]:
    """Return the command-line options that turn `base` into `settings`: "--beta 2", "--causal", "--column x=east"."""
    words = []
    for field in fields(settings):  # type: ignore[arg-type]
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        if value == getattr(base, field.name):
            continue
        if isinstance(value, Mapping):
            words += [f"--{name.removesuffix('s')} {shlex.quote(f'{key}={each}')}" for key, each in value.items()]
        elif isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name} {_shortest(value)}")
    return words


def _shortest(value: Any) -> str:
    """Return the shortest text that parses to the same number: 2 for 2.0, all digits where needed; tuples as 1,2."""
    if isinstance(value, tuple):
        return ",".join(map(_shortest, value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else f"{value}"
