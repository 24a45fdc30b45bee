"""Noise levels of an earlier run, from the JSON that it wrote.

    gradlogz track some.csv --fit --json some.json
    gradlogz track others.csv --levels some.json             the same levels for other detections

Read next: noise_levels.py (Levels), run_tracking.py.
"""

import json
import math
import os
from typing import Any

from .._errors import InputValueError
from .detections import Detections
from .noise_levels import Levels
from .settings import TrackingSettings

REMEDY = "Pass the results that gradlogz track --json has written."


def read_levels(path: str | os.PathLike[str]) -> Levels:
    """Levels in the results of a run; raise an error if there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InputValueError("track", "levels", f"{path} cannot be read: {reason}", REMEDY) from None
    fields = data.get("levels") if isinstance(data, dict) else None
    if not isinstance(fields, dict) or set(fields) != set(Levels._fields):
        raise InputValueError("track", "levels", f"{path} has no noise levels of this version", REMEDY)
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return Levels(**values)


def checked_levels(levels: Levels, settings: TrackingSettings, detections: Detections) -> Levels:
    """The levels; raise an error if they belong to another model or to other coordinates."""
    fields = levels._asdict()
    several = {name: fields.pop(name) for name in ("ratios", "durations")}
    numbers = [*fields.values(), *(x for values in several.values() if isinstance(values, tuple) for x in values)]
    if not all(isinstance(values, tuple) for values in several.values()) or not all(map(_is_level, numbers)):
        raise InputValueError("track", "levels", "levels must be finite numbers, none negative", REMEDY)
    used = ["sigma", "noise", "manoeuvre", "step", "speed"]
    used += {"cv3": ["moderate"], "turn": ["turn_rate"]}.get(settings.model, [])
    used += ["late_jitter", "late_sigma"] if levels.late else []
    zero = [name for name in used if fields[name] == 0] + [name for name in several if 0 in several[name]]
    if zero or levels.late >= 1:
        problem = f"levels must have a positive {zero[0]}" if zero else "levels must have a share `late` below 1"
        raise InputValueError("track", "levels", problem, REMEDY)
    modes, axes = len(settings.modes), len(detections.axes)
    if (len(levels.durations), len(levels.ratios)) != (modes, axes):
        problem = (
            f"levels are those of {len(levels.durations)} modes and {len(levels.ratios)} coordinates, but the model "
            f"has {modes} modes and the detections have {axes} coordinates"
        )
        raise InputValueError("track", "levels", problem, "Choose the model and the columns of the earlier run.")
    return levels


def _is_level(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
