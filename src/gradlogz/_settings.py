"""Settings of a run as frozen dataclasses: some fields replaced, and the command line that gives the same settings.

Read next: simulation/settings.py, tracking/settings.py.
"""

from dataclasses import fields, replace
from typing import Any, TypeVar

S = TypeVar("S")  # a dataclass


def changed(settings: S, **options: Any) -> S:
    """The settings with the options given in place of their own; an option that is None leaves the field as it is."""
    return replace(settings, **{name: value for name, value in options.items() if value is not None})  # type: ignore[type-var]


def flags(settings: S, base: S) -> list[str]:
    """The options of the command line that turn `base` into `settings`: "--beta 2", "--causal", "--no-residual"."""
    words = []
    for field in fields(settings):  # type: ignore[arg-type]
        value, name = getattr(settings, field.name), field.name.replace("_", "-")
        if value == getattr(base, field.name):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name} {_shortest(value)}")
    return words


def _shortest(value: Any) -> str:
    """The value as text that reads back as the same number: 2 for 2.0, and all digits where they are needed."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else f"{value}"
