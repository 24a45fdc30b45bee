"""Options of gradlogz simulate --model, checked.

Read next: simulate.py (the command).
"""

from typing import Any, NamedTuple

from .._input_errors import InputValueError


class ModelOptions(NamedTuple):
    """Options of `simulate --model`; None for the default."""

    model: str
    start: str | None
    text: str | None
    tokens: int | None
    length: int | None
    seeds: int | None
    seed: int | None
    layer: int | None
    steps: int | None

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of the Python functions that are given."""
        names = ("start", "tokens", "length", "seeds", "seed")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def check_options(options: ModelOptions, others: dict[str, Any]) -> None:
    """Raise for options of clouds with identity weights, and for --steps without --layer."""
    unused = [name for name, value in others.items() if value is not None]
    if unused:
        flag = unused[0].replace("_", "-")
        problem = f"--{flag} sets a simulation with identity weights, but --model takes the weights of {options.model}"
        raise InputValueError("simulate", f"--{flag}", problem, f"Drop --{flag}, or --model.")
    if options.steps is not None and options.layer is None:
        problem = "--steps repeats one layer of a model, but --layer is missing"
        raise InputValueError("simulate", "--steps", problem, "Add --layer 0, or drop --steps.")
