"""Quantities of a simulation with their confidence intervals, compared with theory: records without words.

    final state        share of the seeds, Wilson's interval                 theory: the preset
    observables        mean over seeds, Student's interval                   theory: the preset, or curves
    theorems           number of violations among the recorded intervals     theory: 0
    Gaussianity        mean over seeds, Student's interval                   null: Gaussian clouds of as many tokens

                   state or range                 last value of a curve
    supported      every seed meets it            it lies in the interval, or differs from the mean by at most 5 %
    refuted        no seed meets it               it lies outside the interval and differs by more than 5 %
    inconclusive   only some seeds meet it        it differs by more than 5 %, and one seed gives no interval

Curves for Gaussian clouds are compared only if every cloud is Gaussian at the end, or if they hold for every cloud.

Read next: theory_curves.py (the curves), ../reporting/simulation_terminal.py (the table).
"""

import math
from collections import Counter

import torch

from .._typing import Tensor
from ..dynamics.gaussian_null import mardia_band, null_band
from ..dynamics.intervals import ConfidenceBand, band_of_mean
from ..special.proportions import share_of
from . import theory_curves
from .presets import ExpectedOutcome, outcomes
from .records import Curve, FinalQuantity, Simulation, Verdict

OBSERVABLES = ("radius", "mean_fraction", "effective_rank", "self_weight")
GATHERED = ("clusters", "collapsed")
TOLERANCE = 0.05  # relative difference between a mean and a predicted value
ROUNDING = 1e-9


def final_quantities(simulation: Simulation) -> list[FinalQuantity]:
    """The quantities of a simulation, those with predictions first."""
    preset = simulation.preset
    parsed = [] if preset is None else outcomes(preset.expects)
    predicted = parsed[0] if len(parsed) == 1 else None  # alternatives have no single expected value
    rows = [*_states(simulation, predicted), *_clusters(simulation, predicted), *_observables(simulation, predicted)]
    names = {row.name for row in rows}
    rows += [*_theorems(simulation), *(row for row in _gaussianity(simulation) if row.name not in names)]
    rows = [row for row in rows if row.expected is not None or math.isfinite(row.value)]
    return sorted(rows, key=lambda row: row.reference != "theory")


def _states(simulation: Simulation, predicted: ExpectedOutcome | None) -> list[FinalQuantity]:
    counts = Counter(v.kind for v in simulation.verdicts)
    total = len(simulation.verdicts)
    state = predicted.name if predicted is not None and _is_state(simulation, predicted) else None
    if state is not None:
        counts[state] += 0  # a predicted state has its row even if no seed reached it
    rows = []
    for kind, count in counts.most_common():
        share = share_of(count, total)
        row = FinalQuantity(kind, "state", share.value, share.low, share.high, total)
        if kind == state:
            row = row._replace(expected=(1.0, 1.0), reference="theory", verdict=_by_seeds(count, total))
        rows.append(row)
    return rows


def _clusters(simulation: Simulation, predicted: ExpectedOutcome | None) -> list[FinalQuantity]:
    """The cluster count, if tokens have gathered in any cloud."""
    if not any(v.kind in GATHERED for v in simulation.verdicts):
        return []
    counts = simulation.trajectory.observed["clusters"][-1]
    row = _mean("clusters", counts)
    if predicted is not None and predicted.name == "clusters":
        return [_compared(row, predicted, simulation)]
    return [row]


def _observables(simulation: Simulation, predicted: ExpectedOutcome | None) -> list[FinalQuantity]:
    observed = simulation.trajectory.observed
    names = [name for name in OBSERVABLES if name in observed]
    gaussian = all(v.kind == "gaussian" for v in simulation.verdicts)
    curves = theory_curves.moments(simulation) if gaussian or theory_curves.exact(simulation.settings) else {}
    rows = [_with_curve(_mean(name, observed[name][-1]), curves.get(name), simulation) for name in names]
    if predicted is not None and not _is_state(simulation, predicted):
        at = 0 if predicted.name.startswith("start ") else -1
        row = _mean(predicted.name, observed[predicted.name.removeprefix("start ")][at])
        rows = [_compared(row, predicted, simulation), *(r for r in rows if r.name != predicted.name)]
    return rows


def _theorems(simulation: Simulation) -> list[FinalQuantity]:
    """Violations of the theorems on pair energy and diameter, where they apply."""
    violations: dict[str, tuple[int, int]] = {}
    if "log_pair_energy" in simulation.trajectory.observed and theory_curves.rising(simulation):
        decreases = theory_curves.energy_decreases(simulation)
        violations["log_pair_energy"] = int(decreases.sum()), decreases.numel()
    hull = theory_curves.hull(simulation)
    if hull is not None:
        diameters, bound = hull
        rounding = 1e-12 * diameters[0]
        above = sum(a > b + rounding for a, b in zip(diameters, bound.values, strict=True))
        violations["diameter"] = above, len(diameters) - 1
    return [
        FinalQuantity(name, "theorem", count, math.nan, math.nan, total, (0.0, 0.0), "theory", _no(count))
        for name, (count, total) in violations.items()
        if total
    ]


def _gaussianity(simulation: Simulation) -> list[FinalQuantity]:
    """Distance to a Gaussian and kurtosis beside their null values, unless tokens have gathered."""
    evidence = [v.evidence for v in simulation.verdicts if "sliced_wasserstein_null" in v.evidence]
    if not evidence:
        return []
    observed, s = simulation.trajectory.observed, simulation.settings
    limit = max(e["sliced_wasserstein_null"] for e in evidence)
    rows = [_mean("sliced_wasserstein", observed["sliced_wasserstein"][-1])._replace(expected=(0.0, limit))]
    if s.tokens > s.dim + 1:
        band = mardia_band("kurtosis", s.tokens, s.dim)
        rows.append(_mean("kurtosis", observed["kurtosis"][-1])._replace(expected=(float(band.low), float(band.high))))
    return [row._replace(reference="null") for row in rows]


# Comparison ----------------------------------------------------------------------------------------------------------


def _is_state(simulation: Simulation, predicted: ExpectedOutcome) -> bool:
    return predicted.name.removeprefix("start ") not in simulation.trajectory.observed or predicted.name == "clusters"


def _mean(name: str, values: Tensor) -> FinalQuantity:
    """Mean over seeds with Student's 95 % confidence interval; none for one seed."""
    values = values.double()
    low = high = math.nan
    if len(values) > 1 and bool(values.isfinite().all()):
        band = band_of_mean(values, level=0.95)
        low, high = float(band.low), float(band.high)
    return FinalQuantity(name, "observable", float(values.mean()), low, high, len(values))


def _compared(row: FinalQuantity, predicted: ExpectedOutcome, simulation: Simulation) -> FinalQuantity:
    """The quantity with the prediction of a preset, which each seed meets or not."""
    verdict = _by_seeds(sum(simulation.met), len(simulation.met))
    return row._replace(expected=(predicted.low, predicted.high), reference="theory", verdict=verdict)


def _with_curve(row: FinalQuantity, curve: Curve | None, simulation: Simulation) -> FinalQuantity:
    """The quantity with the last value of a predicted curve, if the curve reaches the end."""
    if curve is None or len(curve.values) < len(simulation.trajectory.times) or not math.isfinite(curve.values[-1]):
        return row
    value = curve.values[-1]
    near = abs(row.value - value) <= max(TOLERANCE * abs(value), ROUNDING)
    verdict: Verdict = "supported" if near or row.low <= value <= row.high else "refuted"
    if verdict == "refuted" and math.isnan(row.low):
        verdict = "inconclusive"
    return row._replace(expected=(value, value), reference="theory", verdict=verdict)


def _by_seeds(count: int, total: int) -> Verdict:
    return "supported" if count == total else "refuted" if count == 0 else "inconclusive"


def _no(violations: int) -> Verdict:
    return "refuted" if violations else "supported"


# Null distributions --------------------------------------------------------------------------------------------------


def gaussian_band(simulation: Simulation, name: str) -> ConfidenceBand | None:
    """95 % band of an observable for Gaussian clouds of as many tokens; None for observables without one."""
    s = simulation.settings
    if name in ("skewness", "kurtosis") and s.tokens > s.dim + 1:
        return mardia_band(name, s.tokens, s.dim)
    if name == "sliced_wasserstein" and s.tokens > s.dim + 1:
        return null_band(name, simulation.start[0], generator=torch.Generator().manual_seed(s.seed))
    return None
