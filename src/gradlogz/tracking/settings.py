"""Settings of tracking: filter, motion model, noise levels.

    cv       constant velocity, with little process noise (quiet) or much (manoeuvring)
    cv3      the same with a third level between them (moderate)
    cv-ca    constant velocity, and constant acceleration
    turn     constant velocity, and coordinated turns to the left and to the right

Read next: noise_levels.py (estimation of the noise levels), run_tracking.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .._errors import InputValueError

FILTERS = ("imm", "gpb2", "gpb1")
MODELS = {
    "cv": ("quiet", "manoeuvring"),
    "cv3": ("quiet", "moderate", "manoeuvring"),
    "cv-ca": ("velocity", "acceleration"),
    "turn": ("straight", "left", "right"),
}


@dataclass(frozen=True)
class TrackingSettings:
    """Settings of `track`.

    Args:
        filter: "imm", "gpb2" or "gpb1".
        model: "cv", "cv3", "cv-ca" or "turn".
        columns: {quantity: "column" or "column:unit"}, for columns whose names do not say it (column_roles.py).
        sigma: standard deviation of a detected coordinate, or one for each; None takes it from the columns sigma or
            sigma_x, sigma_y, or estimates it.
        sigma_velocity: standard deviation of reported velocities (columns groundspeed and track) in each coordinate;
            None does not use them.
        noise: spectral density of the process noise in the first mode, length² / time³; None estimates it.
        jitter: standard deviation of the times of detections, which makes errors along the velocity; 0 for exact times.
            None estimates it, unless sigma is given.
        turn_rate: turn rate of the model "turn" in degrees per unit of time; None estimates it.
        outliers: probability that a detection is an outlier, before its position is known; 0 rejects none.
        levels: path of the results (--json) of an earlier run, whose noise levels are used; None estimates them.
        smooth: whether states are also smoothed, given all detections.
        fit: whether the noise levels are fitted by maximum likelihood, starting from the given or estimated ones.
        skip_bad: whether invalid rows are skipped; otherwise they raise an error.
        seed: seed of the built-in scenario.
    """

    filter: str = "imm"
    model: str = "cv"
    columns: Mapping[str, str] = field(default_factory=dict)
    sigma: float | tuple[float, ...] | None = None
    sigma_velocity: float | None = None
    noise: float | None = None
    jitter: float | None = None
    turn_rate: float | None = None
    outliers: float = 0.01
    levels: str | None = None
    smooth: bool = False
    fit: bool = False
    skip_bad: bool = False
    seed: int = 0

    @property
    def modes(self) -> tuple[str, ...]:
        """Names of the modes of the model."""
        return MODELS[self.model]


def check(settings: TrackingSettings) -> None:
    """Raise an error for settings that cannot be run."""
    s = settings
    sigmas = s.sigma if isinstance(s.sigma, tuple) else (s.sigma,)
    levels = [*(("sigma", value) for value in sigmas), ("noise", s.noise), ("turn_rate", s.turn_rate)]
    levels.append(("sigma_velocity", s.sigma_velocity))
    problems = [
        (s.filter not in FILTERS, "filter", f"there is no filter {s.filter!r}", f"Choose one of {', '.join(FILTERS)}."),
        (s.model not in MODELS, "model", f"there is no model {s.model!r}", f"Choose one of {', '.join(MODELS)}."),
        (s.fit and s.model == "cv-ca", "model", "model cv-ca cannot be fitted: it has no compiled filter",
         "Drop fit (--fit), or choose the model cv, cv3 or turn."),
        (s.levels is not None and any(x is not None for x in (s.sigma, s.noise, s.jitter, s.turn_rate)), "levels",
         "levels contains all noise levels, but sigma, noise, jitter or turn_rate is given, too", "Drop one of them."),
        (s.smooth and s.filter == "gpb1", "filter", "filter gpb1 has no smoother: it keeps one Gaussian for all modes",
         "Choose the filter imm or gpb2, or drop smooth (--smooth)."),
        (s.turn_rate is not None and s.model != "turn", "turn_rate",
         f"turn_rate needs the model turn, but the model is {s.model}", "Choose the model turn, or drop turn_rate."),
        (s.jitter is not None and not 0 <= s.jitter < math.inf, "jitter",
         f"jitter must be 0 or positive and finite, got {s.jitter}", "Pass 0 for exact times, or drop it."),
        (not 0 <= s.outliers < 1, "outliers", f"outliers must be a probability below 1, got {s.outliers}",
         "Pass such as 0.01, or 0 to reject no detection."),
    ]  # fmt: skip
    problems += [
        (value is not None and not _is_positive(value), name, f"{name} must be positive and finite, got {value}",
         "Pass a positive number, or drop it to estimate it from the detections.")
        for name, value in levels
    ]  # fmt: skip
    for wrong, argument, problem, remedy in problems:
        if wrong:
            raise InputValueError("track", argument, problem, remedy)


def _is_positive(value: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
