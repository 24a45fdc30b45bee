"""Results of tracking as plain records.

    Tracks            what is known of every detection, whether it was expected, and the errors beside a known truth
    StateEstimate     means, covariances and mode probabilities
    Share             a proportion with its 95 % confidence interval

Read next: run_tracking.py (how they are made), table.py (rows for CSV and parquet), ../reporting/tracks_page.py (how
they are shown).
"""

import math
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from .._displays import shown
from .._settings import flags
from .._typing import Bool, Float, Tensor
from ..filters.models.switching_model import SwitchingModel
from . import scenario
from .detections import Detections
from .noise_levels import Levels
from .settings import TrackingSettings


class StateEstimate(NamedTuple):
    """What is known of each row: positions, then velocities; NaN where nothing is.

    A position is known once its coordinate has been seen, a velocity once it has been seen twice.
    """

    mean: Float[Tensor, "n e"]
    covariance: Float[Tensor, "n e e"]
    probability: Float[Tensor, "n k"]

    @property
    def deviation(self) -> Float[Tensor, "n e"]:
        """Standard deviations."""
        variance = self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        return variance.sqrt().masked_fill(self.mean.isnan(), math.nan)


class Share(NamedTuple):
    """How many of some lie where they should, and the interval of 95 % of their share.   [wilson27]"""

    number: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share; not a number of none."""
        return self.number / self.total if self.total else math.nan


@dataclass(frozen=True)
class Tracks:
    """What was found of every detection, in the order in which they were given.

    nis: squared distances of detections from what was expected, NaN where nothing was; beside the band of 95 %.
    smoothed: the same estimates given all detections, if asked for.
    source: what was read.
    """

    settings: TrackingSettings
    detections: Detections
    levels: Levels
    model: SwitchingModel
    filtered: StateEstimate
    smoothed: StateEstimate | None
    nis: Float[Tensor, "n"]
    nis_low: Float[Tensor, "n"]
    nis_high: Float[Tensor, "n"]
    degrees: Float[Tensor, "n"]
    log_likelihood: float
    rounds: int
    source: str

    @property
    def best(self) -> StateEstimate:
        """The smoothed estimates where there are any."""
        return self.filtered if self.smoothed is None else self.smoothed

    @property
    def inside(self) -> Bool[Tensor, "n"]:
        """Which detections lie in the band."""
        return (self.nis_low <= self.nis) & (self.nis <= self.nis_high)

    @cached_property
    def consistency(self) -> Share:
        """How many of the detections that can be compared lie in the band."""
        return share_of(int(self.inside.sum()), int((~self.nis.isnan()).sum()))

    @cached_property
    def errors(self) -> dict[str, float]:
        """Beside the truth of a scenario: root mean square errors, and NEES a degree; of nothing else."""
        truth = self.detections.truth
        if truth is None:
            return {}
        d = self.detections.position.shape[-1]
        found = {"error of detections": _rms(self.detections.position - truth[:, :d])}
        for name, estimate in (("filtered", self.filtered), ("smoothed", self.smoothed)):
            if estimate is not None:
                e = estimate.mean - truth
                found |= {f"{name} position": _rms(e[:, :d]), f"{name} velocity": _rms(e[:, d:])}
                whole = ~e.isnan().any(-1)
                squared = torch.linalg.solve(estimate.covariance[whole], e[whole]) * e[whole]
                found[f"{name} NEES"] = float(squared.sum(-1).mean() / e.shape[-1])
        return found

    @property
    def command(self) -> str:
        """The command line that makes the same page again."""
        if self.detections.truth is None:
            return " ".join(["gradlogz track", shlex.quote(self.source), *flags(self.settings, TrackingSettings())])
        model = self.settings.model
        base = replace(scenario.settings_of(model), model="turn")
        return " ".join(["gradlogz track", *flags(self.settings, base)])

    def _repr_html_(self) -> str:
        """The page inside a notebook, apart from the styles of the notebook."""
        html: str = shown(self, "html")
        return html


def share_of(number: int, total: int) -> Share:
    """A share with its interval, also of few."""
    if total == 0:
        return Share(0, 0, 0.0, 1.0)
    z, p = 1.959963984540054, number / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    arm = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return Share(number, total, middle - arm, middle + arm)


def _rms(error: Tensor) -> float:
    """Of all coordinates together, where there is something to compare."""
    return math.sqrt(float(error.square().nanmean()) * error.shape[-1])
