"""Detections filtered target by target, many targets at once.

    track     reads, finds the levels of noise, filters, perhaps smooths        -> Tracks
    Tracks    what was found: a row for each detection, its table, its page

Targets of about one length are one batch. What moves a state depends on the time that has passed alone, and is made
once for each time that occurs. Positions count from where a target was first seen, and the first belief about them is
so wide that the detection replaces it; what it is compared with is therefore nothing, and it has no innovation.

Read next: noise_levels.py (the model), table.py and reporting.py (what becomes of it).
"""

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._errors import InputValueError, sentence
from .._typing import Bool, Float, Int, Tensor
from ..filters.fitting.learning import fit
from ..filters.gaussian.consistency import normalized_innovation
from ..filters.gaussian.results import Filtered
from ..filters.gaussian.smoother import Smoothed, smooth
from ..filters.gaussian.switching import gpb1, gpb2, imm
from ..filters.models.switching_model import SwitchingModel
from ..filters.prior_and_series import Series
from . import scenario
from .detections import Detections, Source, grouped, read
from .noise_levels import Levels, belief_of, levels_of, model_of
from .settings import Settings, changed, flags

FILTERS = {"imm": imm, "gpb1": gpb1, "gpb2": gpb2}
ROWS = 1 << 16  # of a batch, padding included: what a smoother keeps of them is a few hundred MB
FITTED_ROWS, FITTED_STEPS = 4096, 256  # from which levels are learned
FIT: dict[str, Any] = {
    "learn": ["Q", "R"],
    "structure": {"Q": "scale", "R": "scale"},
    "max_iterations": 60,
    "tolerance": 1e-5,
}


class Estimate(NamedTuple):
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

    settings: Settings
    detections: Detections
    levels: Levels
    model: SwitchingModel
    filtered: Estimate
    smoothed: Estimate | None
    nis: Float[Tensor, "n"]
    nis_low: Float[Tensor, "n"]
    nis_high: Float[Tensor, "n"]
    degrees: Float[Tensor, "n"]
    log_likelihood: float
    rounds: int
    source: str

    @property
    def best(self) -> Estimate:
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
            return " ".join(["gradlogz track", shlex.quote(self.source), *flags(self.settings, Settings())])
        model = self.settings.model
        base = replace(scenario.settings_of(model), model="turn")
        return " ".join(["gradlogz track", *flags(self.settings, base)])

    def table(self) -> dict[str, Any]:
        """A row for each detection, by column; NaN where there is nothing to say."""
        from .table import table_of

        return table_of(self)

    def write_table(self, path: str | Path) -> Path:
        """Write the table as CSV, or as parquet if its suffix says so; whole or not at all."""
        from .table import write_table

        return write_table(path, self.table())

    def page(self) -> str:
        """All of it as one HTML page. Needs the extra [report]."""
        from .reporting import page_of, rendered

        return rendered(page_of(self))

    def save(self, path: str | Path) -> Path:
        """Write the page, whole or not at all."""
        from ..page import write

        return write(path, self.page())

    def _repr_html_(self) -> str:
        """The page inside a notebook, apart from the styles of the notebook."""
        return f'<iframe srcdoc="{escape(self.page())}" style="width:100%;height:48rem;border:0"></iframe>'


def track(
    detections: Source | None = None, *, progress: Callable[[str, int, int], None] | None = None, **options: Any
) -> Tracks:
    """Filter detections of moving targets, and say what is known of each.

    Args:
        detections: a CSV or parquet file with columns time, target, x, y and perhaps z, or a dictionary of such
            columns; None is the built-in scenario.
        progress: called with what is being done, how many rows are done, and how many there are.
        options: of `Settings`: filter, model, smooth, fit, sigma, noise, turn_rate, skip_bad, seed.

    Law: tests/tracking/test_tracks_are_what_the_filters_say.py.

    >>> found = track({"time": [0, 1, 2, 3], "x": [0.0, 1.1, 1.9, 3.0], "y": [0.0, 0.0, None, 0.1]}, sigma=0.1)
    >>> found.filtered.mean[-1].round(decimals=0)  # x, y and how fast they change
    tensor([3., 0., 1., 0.], dtype=torch.float64)
    """
    tell = progress or (lambda what, done, total: None)
    if detections is None:
        settings = changed(scenario.settings_of(options.get("model") or "turn"), options)
        found, source = scenario.flights(settings.seed), ""
    else:
        settings = changed(Settings(), options)
        tell("Reading", 0, 0)
        found = read(detections, skip_bad=settings.skip_bad)
        source = "FILE.csv" if isinstance(detections, dict) else str(detections)
    levels, dimensions, rounds = levels_of(found, settings), found.position.shape[-1], 0
    model = model_of(levels, settings, dimensions)
    if settings.fit:
        levels, rounds = _fitted(found, settings, levels, model, tell)
        model = model_of(levels, settings, dimensions)
    return _run(found, settings, levels, model, rounds, source, tell)


def share_of(number: int, total: int) -> Share:
    """A share with its interval, also of few."""
    if total == 0:
        return Share(0, 0, 0.0, 1.0)
    z, p = 1.959963984540054, number / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    arm = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return Share(number, total, middle - arm, middle + arm)


# Batches ------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Targets side by side, padded to the longest."""

    rows: Int[Tensor, "b t"]
    inside: Bool[Tensor, "b t"]
    dt: Float[Tensor, "b t"]
    origin: Float[Tensor, "b d"]
    observations: Float[Tensor, "b t d"]

    @property
    def counts(self) -> Int[Tensor, "b t d"]:
        """How often each coordinate has been seen."""
        return (~self.observations.isnan()).cumsum(1)


def batches(detections: Detections, most: int) -> Iterator[Batch]:
    """All targets, those of about one length together; none is padded to more than twice its length."""
    order, starts, lengths = grouped(detections.target)
    by_length = lengths.argsort(descending=True, stable=True)
    sizes = lengths[by_length]
    first = 0
    while first < len(sizes):
        longest = int(sizes[first])
        half = int((2 * sizes >= longest).sum())  # how many are long enough, as they descend
        end = min(half, first + max(1, most // longest))
        yield _batch(detections, order, starts[by_length[first:end]], sizes[first:end])
        first = end


def _batch(detections: Detections, order: Tensor, starts: Tensor, lengths: Tensor) -> Batch:
    at = torch.arange(int(lengths.max()))
    inside = at < lengths.unsqueeze(-1)
    rows = order[(starts.unsqueeze(-1) + at).clamp(max=len(order) - 1)]
    rows = torch.where(inside, rows, rows[:, :1])
    y = detections.position[rows].masked_fill(~inside.unsqueeze(-1), math.nan)
    time = detections.time[rows]
    dt = time.diff(dim=-1, prepend=time[:, :1]).masked_fill(~inside, 0.0)
    seen = ~y.isnan()
    origin = y.gather(1, seen.long().argmax(1, keepdim=True)).squeeze(1).nan_to_num()
    return Batch(rows, inside, dt, origin, y - origin.unsqueeze(1))


def _of_steps(model: SwitchingModel, dt: Tensor) -> SwitchingModel:
    """The model of steps of these lengths, each length made once if lengths are few."""
    occurring, place = dt.unique(return_inverse=True)
    if 2 * len(occurring) > dt.numel():
        return model.at(dt)
    of = model.at(occurring)
    assert isinstance(of.transition, Tensor)  # it is no longer continuous
    return dataclasses.replace(of, transition=of.transition[place], F=of.F[place], Q=of.Q[place])


def _run(
    detections: Detections,
    settings: Settings,
    levels: Levels,
    model: SwitchingModel,
    rounds: int,
    source: str,
    tell: Callable[[str, int, int], None],
) -> Tracks:
    """Batch after batch, put back into the order of rows."""
    n, d = detections.position.shape
    belief = belief_of(levels, model, d)
    model = dataclasses.replace(model, validate=False)
    shapes = ((2 * d,), (2 * d, 2 * d), (model.modes,))
    filtered = Estimate(*(torch.empty(n, *shape, dtype=torch.float64) for shape in shapes))
    smoothed = Estimate(*map(torch.empty_like, filtered)) if settings.smooth else None
    nis = torch.empty(4, n, dtype=torch.float64)
    log_likelihood, done = 0.0, 0
    for batch in batches(detections, ROWS):
        of, rows = _of_steps(model, batch.dt), batch.rows[batch.inside]
        if smoothed is not None:
            later = smooth(of, batch.observations, belief, method="imm" if settings.filter == "imm" else "gpb2")
            found = later.filtered
            _put(smoothed, rows, _estimate(later, batch, batch.counts[:, -1:]))
        else:
            found = FILTERS[settings.filter](of, batch.observations, belief)
        _put(filtered, rows, _estimate(found, batch, batch.counts))
        begins = (batch.counts == 1) & ~batch.observations.isnan()  # compared with nothing
        compared = normalized_innovation(found._replace(innovation=found.innovation.masked_fill(begins, math.nan)))
        nis[:, rows] = torch.stack([part[batch.inside] for part in compared[:4]])
        log_likelihood += float(found.log_likelihood.sum())
        done += len(rows)
        tell("Smoothing" if settings.smooth else "Filtering", done, n)
    value, low, high, degrees = nis
    return Tracks(
        settings, detections, levels, model, filtered, smoothed, value, low, high, degrees, log_likelihood, rounds,
        source,
    )  # fmt: skip


def _estimate(found: Filtered | Smoothed, batch: Batch, counts: Tensor) -> Estimate:
    """Positions and velocities of the rows that count, where they are known."""
    d = batch.observations.shape[-1]
    per = found.mean.shape[-1] // d
    places = [*range(0, per * d, per), *range(1, per * d, per)]
    mean = found.mean[..., places]
    mean[..., :d] += batch.origin.unsqueeze(1)
    known = torch.cat((counts >= 1, counts >= 2), -1).expand(mean.shape)
    mean = mean.masked_fill(~known, math.nan)
    covariance = found.covariance[..., places, :][..., places]
    inside = batch.inside
    return Estimate(mean[inside], covariance[inside], found.log_mode_probability[inside].exp())


def _put(whole: Estimate, rows: Tensor, part: Estimate) -> None:
    for all_, some in zip(whole, part, strict=True):
        all_[rows] = some


def _rms(error: Tensor) -> float:
    """Of all coordinates together, where there is something to compare."""
    return math.sqrt(float(error.square().nanmean()) * error.shape[-1])


# Learning -----------------------------------------------------------------------------------------------------------


def _fitted(
    detections: Detections,
    settings: Settings,
    levels: Levels,
    model: SwitchingModel,
    tell: Callable[[str, int, int], None],
) -> tuple[Levels, int]:
    """Levels that make what was seen likeliest, from some targets spread over all; and in how many rounds."""
    lengths = detections.target.bincount()
    who = (lengths >= 3).nonzero().flatten()
    if len(who) == 0:
        remedy = "Give --sigma and --noise in place of --fit."
        raise InputValueError(sentence("track", "a target must have three rows to fit levels", "fewer in each", remedy))
    wanted = max(1, FITTED_ROWS // int(lengths[who].double().mean().clamp(max=FITTED_STEPS)))
    who = who[:: math.ceil(len(who) / wanted)]
    chosen = torch.isin(detections.target, who)
    part = detections._replace(
        time=detections.time[chosen],
        target=detections.target[chosen].unique(return_inverse=True)[1],
        position=detections.position[chosen],
    )
    order, starts, sizes = grouped(part.target)
    batch = _batch(part, order, starts, sizes.clamp(max=FITTED_STEPS))
    shared = ["R"] if settings.model == "cv" else ["Q", "R"]
    found = fit(
        model,
        Series(batch.observations, times=batch.dt.cumsum(-1), lengths=batch.inside.sum(-1)),
        belief_of(levels, model, part.position.shape[-1]),
        **FIT,
        shared=shared,
        smoother="imm",
        progress=lambda done, _: tell("Rounds of learning", done, 0),
    )
    learned = found.model
    sigma = math.sqrt(float(learned.R[0, 0, 0]))
    levels = levels._replace(sigma=sigma, noise=float(learned.Q[0, 1, 1]), manoeuvre=float(learned.Q[1, 1, 1]))
    return levels, len(found.history) - 1
