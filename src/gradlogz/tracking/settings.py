"""How detections are filtered: which filter, which models of motion, and which numbers are given rather than found.

    cv       constant velocity, quiet and manoeuvring
    cv-ca    constant velocity, and constant acceleration
    turn     constant velocity, and turns to the left and to the right

Read next: noise_levels.py (the numbers that are not given), run_tracking.py.
"""

import math
from dataclasses import dataclass

from .._errors import InputValueError

FILTERS = ("imm", "gpb2", "gpb1")
MODELS = {"cv": ("quiet", "manoeuvring"), "cv-ca": ("velocity", "acceleration"), "turn": ("straight", "left", "right")}


@dataclass(frozen=True)
class TrackingSettings:
    """The choices of a run.

    Args:
        filter: imm, gpb2 or gpb1.
        model: cv, cv-ca or turn.
        sigma: standard deviation of what is observed of a coordinate; None finds it.
        noise: spectral density of the quiet mode, length² / time³; None finds it.
        turn_rate: of the model turn, degrees a unit of time; None finds it.
        smooth: whether later detections speak of earlier states too.
        fit: whether the levels of noise are learned, from those given or found on.
        skip_bad: whether rows that cannot be read are left out rather than refused.
        seed: of the built-in scenario.
    """

    filter: str = "imm"
    model: str = "cv"
    sigma: float | None = None
    noise: float | None = None
    turn_rate: float | None = None
    smooth: bool = False
    fit: bool = False
    skip_bad: bool = False
    seed: int = 0

    @property
    def modes(self) -> tuple[str, ...]:
        """What the modes of the model are called."""
        return MODELS[self.model]


def check(settings: TrackingSettings) -> None:
    """Refuse what cannot be run."""
    s = settings
    levels = {"sigma": s.sigma, "noise": s.noise, "turn_rate": s.turn_rate}
    refusals = [
        (s.filter not in FILTERS, "filter must be known", f"{s.filter!r}", f"It is one of {', '.join(FILTERS)}."),
        (s.model not in MODELS, "model must be known", f"{s.model!r}", f"It is one of {', '.join(MODELS)}."),
        (s.fit and s.model == "cv-ca", "model must be cv or turn where levels are fitted", "cv-ca",
         "Its modes have states of two sizes, which fit does not learn: drop --fit, or take --model cv."),
        (s.smooth and s.filter == "gpb1", "filter must be imm or gpb2 where tracks are smoothed", "gpb1",
         "A smoother needs a Gaussian for each mode: take --filter imm."),
        (s.turn_rate is not None and s.model != "turn", "turn_rate must be given with the model turn alone",
         f"model {s.model!r}", "Add --model turn."),
    ]  # fmt: skip
    refusals += [
        (value is not None and not _is_positive(value), f"{name} must be positive and finite",
         f"{value}", "Leave it out, and it is found from the detections.")
        for name, value in levels.items()
    ]  # fmt: skip
    for wrong, condition, fact, remedy in refusals:
        if wrong:
            raise InputValueError("track", condition.split()[0], f"{condition}, got {fact}", remedy)


def _is_positive(value: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
