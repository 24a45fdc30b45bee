"""Results of tracking as plain records.

    Tracks            estimates and innovations of every detection, and the errors relative to a known truth
    StateEstimate     means, covariances and mode probabilities
    TrackQuantity     value, confidence interval, expected value and verdict on consistency

Read next: run_tracking.py (which makes them), track_quantities.py (values with confidence intervals), table.py (rows
for CSV and parquet), ../reporting/tracks_page.py (the page).
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from .._displays import shown
from .._settings import flags
from .._typing import Bool, Float, Tensor
from ..filters.models.switching_model import SwitchingModel
from ..special.proportions import Share, share_of
from . import scenario
from .detections import Detections
from .noise_levels import Levels
from .settings import TrackingSettings

Verdict = Literal["consistent", "inconsistent", ""]
LEVEL = 0.95  # of the band
TOLERANCE = 0.02  # difference of a share from LEVEL that is irrelevant in practice


class StateEstimate(NamedTuple):
    """Estimated states of all rows: positions, then velocities; NaN before there is an estimate.

    A position is estimated from the first detection of its coordinate on, a velocity from the second.
    """

    mean: Float[Tensor, "n e"]
    covariance: Float[Tensor, "n e e"]
    probability: Float[Tensor, "n k"]

    @property
    def deviation(self) -> Float[Tensor, "n e"]:
        """Standard deviations, [n, e]."""
        variance = self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        return variance.sqrt().masked_fill(self.mean.isnan(), math.nan)


@dataclass(frozen=True)
class Tracks:
    """Result of `track`: one row per detection, in the order of the input.

    Attributes:
        settings: filter, motion model and noise levels of the call.
        detections: the input.
        levels: the noise levels that were used.
        model: the switching model.
        filtered: estimates given the detections so far.
        smoothed: estimates given all detections, if requested.
        nis: normalised innovations squared (those of the scores of all modes); NaN without an innovation.
        nis_low, nis_high: their 95 % band.
        degrees: their degrees of freedom.
        log_likelihood: log likelihood of all detections.
        evaluations: number of likelihoods that the fit of the noise levels computed; 0 without a fit.
        converged: whether the fit converged.
        source: path of the input.
        innovation: innovations by coordinate; NaN without one.
        innovation_deviation: their predicted standard deviations.
        score: the innovations as standard normal scores of their predicted distribution, each coordinate alone.
        log_score: log density of each detection given the ones before it; NaN without an innovation.
        failures: {batch of targets: text of the error}, if an engine divided the work; their rows are NaN.
        interrupted: whether Ctrl-C ended divided work.
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
    evaluations: int
    converged: bool
    source: str
    innovation: Float[Tensor, "n d"]
    innovation_deviation: Float[Tensor, "n d"]
    score: Float[Tensor, "n d"]
    log_score: Float[Tensor, "n"]
    failures: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def best(self) -> StateEstimate:
        """The smoothed estimates if available, else the filtered ones."""
        return self.filtered if self.smoothed is None else self.smoothed

    @property
    def inside(self) -> Bool[Tensor, "n"]:
        """Rows whose NIS lies inside its 95 % band."""
        return (self.nis_low <= self.nis) & (self.nis <= self.nis_high)

    @cached_property
    def consistency(self) -> Share:
        """Share of the innovations whose NIS lies inside its 95 % band."""
        return share_of(int(self.inside.sum()), int((~self.nis.isnan()).sum()))

    @cached_property
    def poorly_smoothed(self) -> list[str]:
        """Targets whose smoothed positions are farther from their detections (RMS) than the predictions were.

        If the model is right, the residual of a smoothed position has less than the variance of the detection, and the
        innovation has more. Smoothers of several modes fail where the model is nearly without noise and wrong.
        """
        if self.smoothed is None:
            return []
        z, target = self.detections.used, self.detections.target
        squares = [(self.smoothed.mean[:, : z.shape[-1]] - z).square(), self.innovation.square()]
        known = ~(squares[0] + squares[1]).isnan()
        zeros = z.new_zeros(len(self.detections.names))
        residual, innovation = (zeros.index_add(0, target, t.where(known, 0.0).sum(-1)) for t in squares)
        return [
            name for name, poor in zip(self.detections.names, (residual > innovation).tolist(), strict=True) if poor
        ]

    @cached_property
    def errors(self) -> dict[str, float]:
        """RMS errors and NEES per degree of freedom relative to the truth of a scenario; empty without a truth."""
        truth = self.detections.truth
        if truth is None:
            return {}
        d = self.detections.position.shape[-1]
        errors = {"error of detections": _rms(self.detections.position - truth[:, :d])}
        for name, estimate in (("filtered", self.filtered), ("smoothed", self.smoothed)):
            if estimate is not None:
                e = estimate.mean - truth
                errors |= {f"{name} position": _rms(e[:, :d]), f"{name} velocity": _rms(e[:, d:])}
                complete = ~e.isnan().any(-1)
                squared = torch.linalg.solve(estimate.covariance[complete], e[complete]) * e[complete]
                errors[f"{name} NEES"] = float(squared.sum(-1).mean() / e.shape[-1])
        return errors

    @property
    def command(self) -> str:
        """Command that reproduces the page."""
        if self.detections.truth is None:
            return " ".join(["gradlogz track", shlex.quote(self.source), *flags(self.settings, TrackingSettings())])
        model = self.settings.model
        base = replace(scenario.settings_of(model), model="turn")
        return " ".join(["gradlogz track", *flags(self.settings, base)])

    def _repr_html_(self) -> str:
        """The page for a notebook, isolated from its styles."""
        html: str = shown(self, "html")
        return html


class TrackQuantity(NamedTuple):
    """A quantity of all tracks.

    Attributes:
        name: "nis", "innovation", "innovation_rms", "mode", a noise level, or an error.
        part: coordinate, mode, or kind of estimate; empty if there is none.
        value: share, length or noise level.
        low, high: 95 % confidence interval; NaN if there is none.
        total: number of innovations or rows.
        expected: value for a consistent filter; NaN if there is none.
        verdict: verdict on consistency; empty if there is none.
    """

    name: str
    part: str
    value: float
    low: float = math.nan
    high: float = math.nan
    total: int = 0
    expected: float = math.nan
    verdict: Verdict = ""


def consistency_verdict(share: Share) -> Verdict:
    """Verdict on a share of innovations inside their 95 % band; empty without innovations."""
    if share.total == 0:
        return ""
    near = abs(share.value - LEVEL) <= TOLERANCE
    return "consistent" if near or share.low <= LEVEL <= share.high else "inconsistent"


def _rms(error: Tensor) -> float:
    """Root mean square length of an error vector; missing coordinates are left out."""
    return math.sqrt(float(error.square().nanmean()) * error.shape[-1])
