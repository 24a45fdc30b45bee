"""Texts of simulations: names and units of quantities, cells of tables, sentences.

Read next: simulation_page.py and simulation_terminal.py, which show them; ../simulation/final_quantities.py (records).
"""

import math
from collections import Counter

from ..dynamics.metastability import plateaus
from ..dynamics.observables import SAMPLE
from ..page.parts import Status
from ..simulation.presets import Preset, outcomes
from ..simulation.records import Curve, FinalQuantity, Phases, Simulation
from ..simulation.settings import SimulationSettings

KINDS = {  # final states and their colours
    "gaussian": "blue",
    "clusters": "sky",
    "collapsed": "purple",
    "frozen": "yellow",
    "blow-up": "ink",
    "other": "soft",
}
STATES = {
    "gaussian": ("is indistinguishable from a Gaussian", "are indistinguishable from Gaussians"),
    "collapsed": ("has collapsed to one cluster", "have collapsed to one cluster each"),
    "clusters": ("has formed clusters", "have formed clusters"),
    "frozen": ("is frozen: tokens attend mostly to themselves", "are frozen: tokens attend mostly to themselves"),
    "blow-up": ("has diverged", "have diverged"),
    "other": ("is neither Gaussian nor clustered nor frozen", "are neither Gaussian nor clustered nor frozen"),
}
STATE_NAMES = {"gaussian": "Gaussian"}  # the others are words
INITIAL_NAMES = {
    "gaussian": "Gaussian",
    "laplace": "Laplace",
    "sphere": "spherical",
    "circle": "circular",
    "given": "custom",
}
NAMED = {  # name, unit, formula
    "radius": ("radius", "1", "√E|x|²"),
    "mean_fraction": ("share of the mean in the squared norm", "1", "|E x|² / E|x|²"),
    "effective_rank": ("effective rank", "dimensions", "exp H(λ)"),
    "log_pair_energy": ("log pair energy", "nats", "log Σᵢⱼ exp β⟨xᵢ, xⱼ⟩"),
    "entropy": ("attention entropy", "nats", "−Σⱼ aᵢⱼ log aᵢⱼ"),
    "self_weight": ("self-weight", "1", "aᵢᵢ"),
    "displacement": ("displacement", "radii per step", "√(E|x′ − x|² / E|x|²)"),
    "expansion": ("change by attention", "nats", "log tr C(x + τA) − log tr C(x)"),
    "contraction": ("change by normalisation", "nats", "log tr C(x′) − log tr C(x + τA)"),
    "skewness": ("skewness", "1", "E (zᵢ·zⱼ)³"),
    "kurtosis": ("excess kurtosis", "1", "E|z|⁴ − d(d + 2)"),
    "sliced_wasserstein": ("sliced W₂ to Gaussian", "standard deviations", "E_u W₂(u·z, N(0,1))"),
    "clusters": ("cluster count", "clusters", ""),
    "within": ("spread within clusters", "radii", "√(E|x − centre|² / E|x|²)"),
    "slope": ("slope of attention", "1", "⟨A(x), x⟩ / |x|²"),
    "harmonic": ("fastest harmonic", "1", "|E exp(ilθ)|"),
    "diameter": ("diameter", "1", "max |xᵢ − xⱼ|"),
    "step": ("step of divergence", "steps", "t"),
    "sliced_wasserstein_null": ("sliced W₂, Gaussian limit", "standard deviations", "99 % quantile"),
}
SHORT = {"mean_fraction": "share of mean in |x|²"}  # names that are too long for a terminal
CONTRACTIONS = {
    "none": "none",
    "center": "centring",
    "scalar": "centring and a common scale",
    "batch_norm": "batch norm",
    "zca": "whitening (ZCA)",
    "pca": "whitening (PCA)",
    "cholesky": "whitening (Cholesky)",
    "monge": "whitening (Monge map)",
    "sphere": "projection onto the unit sphere",
    "rms_norm": "RMS norm",
    "layer_norm": "layer norm",
    "shrinkage": "division by 1 + τ",
    "inverse_step": "inverse of the step (resolvent)",
    "recoloring": "ZCA to the moments of Theorem 1",
}
PLACEMENTS = {"post": "after each step", "pre": "before attention", "peri": "before and after attention"}
THEOREMS = {"log_pair_energy": "decreases of pair energy", "diameter": "diameters above bound"}
SELF_WEIGHT = "sigmoid(β d c − β² r² c / 2 − log n)".replace(" ", "\u00a0")  # no line breaks in formulas
SLOPE = "s + (1 − s)(β c + m)".replace(" ", "\u00a0")
FORMULAS = {
    "closed form": "Gaussian cloud with the initial moments, in closed form; valid while the cloud is Gaussian",
    "exact": "affine steps on Gaussian keys, in closed form from the initial moments; valid for every cloud",
    "moment closure": "Gaussian cloud with the initial moments, by moment closure; valid while the cloud is Gaussian",
    "harmonic": "the fastest harmonic has degree {degree} and is multiplied by {factor:.4g} per step while its "
    "amplitude is small",
    "sphere mean": "while the mean is small, each step multiplies it by {factor:.4g} and its share in the squared norm "
    "by {square:.4g}",
    "hermite": "while the Hermite mode of order {degree} of the token density is small, each step multiplies it by "
    "{factor:.4g}. The skewness is quadratic in this mode and is multiplied by {square:.4g}. Whitening holds the "
    "modes of order 1 and 2 at zero",
    "self-weight": f"{SELF_WEIGHT} for a large number n of Gaussian tokens in d dimensions; r is the radius of the "
    "cloud and c its variance per coordinate, both as simulated at each time",
    "slope": f"{SLOPE} for many Gaussian tokens; s is the self-weight predicted by theory, c the variance per "
    "coordinate and m the share of the mean in the squared norm, both as simulated at each time",
    "slope, fixed keys": "β c for many Gaussian keys with variance c per coordinate: 1, or 1/d on the unit sphere",
    "dobrushin": "(1 − Σⱼ minᵢ aᵢⱼ) times the previous diameter over one step, the previous diameter over several",
}  # fmt: skip
NULL_BAND = (
    "The verdict “null band” means that nothing is tested; the column “expected” then gives the 95 % range for "
    "Gaussian clouds with the same number of tokens (for the sliced W₂ distance, the range up to the 99 % quantile)."
)
BY_SEEDS = (
    "A predicted final state or range is supported if every seed meets it, refuted if none does, and otherwise "
    "inconclusive."
)
BY_VALUE = (
    "A predicted single value is supported if it lies in the CI or differs from the mean by at most 5 %, and otherwise "
    "refuted (inconclusive with one seed, which gives no CI)."
)
NO_PREDICTION = "No theoretical prediction for these settings; theory curves are shown where available."


# Cells of tables -----------------------------------------------------------------------------------------------------


def quantity_name(row: FinalQuantity, *, short: bool = False) -> str:
    """Name of a quantity: "final state: clusters", "self-weight, start"; at most 26 characters if `short`."""
    if row.kind == "state":
        return f"final state: {STATE_NAMES.get(row.name, row.name)}"
    if row.kind == "theorem":
        return THEOREMS[row.name]
    name = row.name.removeprefix("start ")
    return (short_name(name) if short else NAMED[name][0]) + (", start" if name != row.name else "")


def short_name(observable: str) -> str:
    """Name of an observable, of at most 26 characters."""
    return SHORT.get(observable, NAMED[observable][0])


def quantity_unit(row: FinalQuantity) -> str:
    """Unit of a quantity."""
    if row.kind == "observable":
        return NAMED[row.name.removeprefix("start ")][1]
    return "% of seeds" if row.kind == "state" else "intervals"


def quantity_cells(row: FinalQuantity, digits: int = 3) -> tuple[str, str, str]:
    """Value, 95 % confidence interval (with so many digits) and expected value; empty where there is none."""
    if row.kind == "state":
        expected = "" if row.expected is None else f"{row.expected[0]:.0%}".replace("%", " %")
        return f"{100 * row.value:.0f} %", f"{100 * row.low:.0f}–{100 * row.high:.0f} %", expected
    if row.kind == "theorem":
        return f"{row.value:.0f}/{row.total}", "", "0"
    null = row.reference == "null"
    expected = "" if row.expected is None else bounds(*row.expected, digits=2 if null else 3)
    interval = (
        "" if math.isnan(row.low) or math.isnan(row.high) else bounds(row.low, row.high, both=True, digits=digits)
    )
    return number(row.value), interval, expected


def number(value: float, digits: int = 3) -> str:
    """A number with so many significant digits; one below 1e-12 is rounding, and written as 0."""
    return "" if math.isnan(value) else "0" if abs(value) < 1e-12 else f"{value:.{digits}g}".replace("-", "−")


def bounds(low: float, high: float, *, both: bool = False, digits: int = 3) -> str:
    """A range: "4–5", "−0.7 to 0.6", one number if the ends are equal, "≤ 0.01" if it begins at 0 (unless `both`)."""
    first, last = number(low, digits), number(high, digits)
    if not both and low == high:
        return first
    if not both and low == 0:
        return "≥ 0" if math.isinf(high) else f"≤ {last}"
    return f"{first} to {last}" if first.startswith("−") else f"{first}–{last}"


# Sentences -----------------------------------------------------------------------------------------------------------


def verdict_sentence(simulation: Simulation) -> str:
    """Final states of the clouds, with their numbers."""
    kinds = Counter(v.kind for v in simulation.verdicts)
    total, steps = len(simulation.verdicts), simulation.trajectory.step
    after = f"After {steps} step{'' if steps == 1 else 's'}"
    if total == 1:
        kind = simulation.verdict.kind
        return f"{after} the cloud {STATES[kind][0]}{_evidence(simulation, kind)}."
    parts = []
    for kind, count in kinds.most_common():
        clouds = f"all {total} clouds" if count == total else f"{count} of {total} clouds"
        parts.append(f"{clouds} {STATES[kind][count > 1]}{_evidence(simulation, kind)}")
    return f"{after} {', and '.join(parts)}."


def _evidence(simulation: Simulation, kind: str) -> str:
    evidence = [v.evidence for v in simulation.verdicts if v.kind == kind]
    if kind == "clusters":
        return f" (cluster count {_range([e['clusters'] for e in evidence], '.0f')})"
    if kind == "frozen":
        return f" (self-weight {_range([e['self_weight'] for e in evidence], '.2f')})"
    if kind == "blow-up":
        return f" (at step {_range([e['step'] for e in evidence], '.0f')})"
    if kind in ("gaussian", "other"):
        limit = max(e["sliced_wasserstein_null"] for e in evidence)
        distance = _range([e["sliced_wasserstein"] for e in evidence], ".3f")
        return (
            f" (sliced W₂ distance of the whitened cloud to a standard Gaussian {distance}; 99 % quantile for Gaussian "
            f"clouds {limit:.3f})"
        )
    return ""


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}–{high}"


def prediction_text(preset: Preset) -> str:
    """The prediction of a preset in words: "4–5 clusters", "self-weight 0.6–0.66 at the start"."""
    parts = []
    for name, low, high in outcomes(preset.expects):
        observable = name.removeprefix("start ")
        if name == "clusters" and math.isfinite(high):
            parts.append(f"{bounds(low, high)} clusters")
        elif observable in NAMED and name != "clusters":
            at = " at the start" if observable != name else ""
            parts.append(f"{NAMED[observable][0]} {bounds(low, high)}{at}")
        else:
            parts.append(f"final state {STATE_NAMES.get(name, name)}")
    return " or ".join(parts)


def agreement(simulation: Simulation) -> tuple[Status, str]:
    """Comparison with the prediction of the preset: a status and a sentence."""
    preset = simulation.preset
    if preset is None or not preset.expects:
        return "silent", NO_PREDICTION
    met, total = sum(simulation.met), len(simulation.met)
    status: Status = "agrees" if met == total else "departs" if met == 0 else "inconclusive"
    basis = "Expected from experiments" if preset.source.startswith("[theory 10") else "Prediction"
    return status, f"{basis} {preset.source}: {prediction_text(preset)}. Met by {met} of {total} seeds."


def plateau_sentence(simulation: Simulation) -> str:
    """Plateaus of the cluster count of the first cloud; empty if there are none."""
    counts, times = simulation.trajectory.observed["clusters"][:, 0].long(), simulation.trajectory.times
    least = simulation.trajectory.step / 20
    most = min(simulation.settings.tokens, SAMPLE) / 5  # more components are no clusters, as in the final state
    lasting = [p for p in plateaus(counts, times, flicker=least / 2, least=least) if 0 < p.clusters <= most]
    if not lasting:
        return ""
    parts = [
        f"{p.clusters} cluster{'s' * (p.clusters > 1)} from step {p.start:.0f} to "
        f"{'the end' if p.censored else f'step {p.end:.0f}'}"
        for p in lasting
    ]
    return f"Plateaus of the cluster count (seed {simulation.settings.seed}): {'; '.join(parts)}."


def curve_text(curve: Curve) -> str:
    """The formula of a predicted curve."""
    return FORMULAS[curve.formula].format(factor=curve.factor, square=curve.factor**2, degree=curve.degree)


def normalisation_text(contraction: str, placement: str) -> str:
    """The normalisation and its place: "whitening (ZCA) after each step"."""
    if contraction == "none":
        return "no normalisation"
    names = ", then ".join(CONTRACTIONS.get(name, name) for name in contraction.split("+"))
    return f"{names} {PLACEMENTS[placement]}"


def keys_text(settings: SimulationSettings) -> str:
    """The keys: tokens, fixed points, or a measure with its moments."""
    s = settings
    if s.key_measure == "gaussian":
        return f"Gaussian measure of mean {s.key_mean} and covariance {s.key_covariance} (rows joined by /)"
    if s.key_measure == "sphere":
        return "uniform measure on a sphere"
    return f"{s.keys} fixed keys" if s.keys else "the tokens themselves"


def run_text(simulation: Simulation) -> str:
    """Parameters of the run: seeds, tokens, dimension, attention, normalisation, steps."""
    s, preset = simulation.settings, simulation.preset
    name = "" if preset is None else f"{preset.name}, "
    return (
        f"{name}{s.seeds} seed{'s' * (s.seeds > 1)} × {s.tokens} tokens in {s.dim} dimension{'s' * (s.dim > 1)}, "
        f"β = {s.beta:g}, τ = {s.tau:g}, {normalisation_text(s.contraction, s.placement)}, "
        f"{simulation.trajectory.step} steps"
    )


def grid_run_text(phases: Phases) -> str:
    """Parameters of a sweep: the grid, tokens, steps, seeds."""
    s = phases.settings
    total = math.prod(len(r.values) for r in phases.ranges)
    return (
        f"grid {phases.grid}, {len(phases.points)} of {total} points, {s.seeds} seed{'s' * (s.seeds > 1)} × {s.tokens} "
        f"tokens each, {s.steps} steps"
    )
