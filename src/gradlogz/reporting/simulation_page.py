"""The page of a simulation: results, animated tokens, observables with their predicted curves, seeds, settings.

Read next: simulation_wording.py (the texts), ../simulation/theory_curves.py (the curves), ../page (the layout).
"""

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from .. import __version__
from ..dynamics.observables import components
from ..page import (
    Axis,
    Cell,
    Chip,
    Column,
    Facts,
    Figure,
    Line,
    Mark,
    Page,
    Part,
    PointCloud,
    Points,
    Ribbon,
    Section,
    Table,
    Text,
    VerdictBanner,
)
from ..page.parts import Status
from ..simulation import theory_curves as curves
from ..simulation.final_quantities import final_quantities, gaussian_band
from ..simulation.records import Curve, FinalQuantity, Simulation
from .citations import cited
from .simulation_wording import (
    BY_SEEDS,
    BY_VALUE,
    INITIAL_NAMES,
    KINDS,
    NAMED,
    NULL_BAND,
    STATE_NAMES,
    agreement,
    curve_text,
    keys_text,
    normalisation_text,
    plateau_sentence,
    quantity_cells,
    quantity_name,
    quantity_unit,
    verdict_sentence,
)

TITLES = {
    "radius": "Radius of the cloud",
    "mean_fraction": "Share of the mean in the squared norm",
    "effective_rank": "Effective rank",
    "log_pair_energy": "Pair energy",
    "entropy": "Attention entropy",
    "self_weight": "Self-weight",
    "displacement": "Displacement per step",
    "skewness": "Skewness",
    "kurtosis": "Excess kurtosis",
    "sliced_wasserstein": "Sliced Wasserstein distance",
    "clusters": "Cluster count",
    "slope": "Slope of attention along the query",
    "harmonic": "Unstable mode",
}
AXES = {"mean_fraction": "share of the mean"}  # names that are too long for an axis
CAPTIONS = {
    "radius": "Root mean square norm of the tokens.",
    "mean_fraction": "Squared norm of the mean divided by the mean squared norm of the tokens.",
    "effective_rank": "Exponential of the entropy of the covariance eigenvalues, normalised to sum 1.",
    "entropy": "Entropy of the attention weights, averaged over tokens.",
    "self_weight": "Attention weight of a token on itself, averaged over tokens.",
    "displacement": "Root mean square displacement of the tokens in one step, divided by the radius.",
    "skewness": "Mardia's skewness; 0 for a Gaussian.",
    "kurtosis": "Mardia's excess kurtosis; 0 for a Gaussian.",
    "sliced_wasserstein": "Sliced Wasserstein distance W₂ of the whitened cloud to a standard Gaussian: the mean over "
    "one-dimensional projections.",
    "clusters": "Number of connected components when tokens closer to each other than 5 % of the radius are linked.",
    "slope": "Component of the attention output along the query, divided by the length of the query.",
    "harmonic": "Amplitude of the fastest-growing harmonic of the token density on the circle.",
}
ROUNDING = 1e-12
REFERENCES = ("shim22", "geshkovski23", "mardia74")


def page_of(simulation: Simulation) -> Page:
    """Page of a simulation."""
    s, preset = simulation.settings, simulation.preset
    name = "tokens under repeated attention" if preset is None else preset.name
    status, prediction = agreement(simulation)
    kinds = dict.fromkeys(v.kind for v in simulation.verdicts)
    chips = (*(Chip(STATE_NAMES.get(kind, kind), colour=KINDS[kind]) for kind in kinds), Chip(LABELS[status], status))
    description = "" if preset is None else f"{preset.description[0].upper()}{preset.description[1:]}. "
    clouds = f"{s.seeds} seeds × " if s.seeds > 1 else ""
    subtitle = (
        f"{description}{clouds}{s.tokens} tokens in {s.dim} dimension{'s' if s.dim > 1 else ''}, "
        f"{INITIAL_NAMES.get(s.initial, s.initial)} initial cloud, inverse temperature β\u00a0=\u00a0{s.beta:g}, step "
        f"size τ\u00a0=\u00a0{s.tau:g}, {normalisation_text(s.contraction, s.placement)}, {s.steps} steps."
    )
    return Page(
        name=f"gradlogz-{name}" if preset else "gradlogz-simulation",
        title=f"Simulation: {name}",
        subtitle=subtitle,
        verdict=VerdictBanner(verdict_sentence(simulation), chips, (prediction,)),
        sections=_sections(simulation),
        methods=_methods(),
        reproduce={
            "version": f"gradlogz {__version__}, torch {torch.__version__}",
            "seed": f"{s.seed} to {s.seed + s.seeds - 1}" if s.seeds > 1 else f"{s.seed}",
            "command": simulation.command,
        },
        references=cited((*REFERENCES, "karagodin24") if s.causal else REFERENCES),
        data=data_of(simulation),
        made_by="gradlogz simulate",
    )


def data_of(simulation: Simulation) -> dict[str, Any]:
    """Settings, verdicts and recorded observables as plain data."""
    return {
        "version": __version__,
        "command": simulation.command,
        "settings": asdict(simulation.settings),
        "preset": None if simulation.preset is None else simulation.preset.name,
        "expects": None if simulation.preset is None else simulation.preset.expects or None,
        "agreement": agreement(simulation)[0],
        "sentence": verdict_sentence(simulation),
        "verdicts": [{"kind": v.kind, "evidence": dict(v.evidence)} for v in simulation.verdicts],
        "times": simulation.trajectory.times.tolist(),
        "observed": {name: values.tolist() for name, values in simulation.trajectory.observed.items()},
    }


LABELS = {
    "agrees": "prediction supported",
    "departs": "prediction refuted",
    "inconclusive": "inconclusive",
    "silent": "no prediction",
}
STATUS_OF: dict[str, Status] = {
    "supported": "agrees",
    "refuted": "departs",
    "inconclusive": "inconclusive",
}


# Sections ------------------------------------------------------------------------------------------------------------


def _sections(simulation: Simulation) -> tuple[Section, ...]:
    observed = simulation.trajectory.observed
    theory = {**curves.moments(simulation), **curves.weights(simulation)}
    growth = curves.growth(simulation)
    unstable = "" if growth is None else growth[0]
    many = len(simulation.trajectory.times) > 1
    first: list[Part] = [cloud_of(simulation)]
    if many:
        count = _figure(simulation, "clusters", None)
        first.append(replace(count, caption=f"{count.caption} {plateau_sentence(simulation)}".strip()))
        first.append(_unstable(simulation, *growth) if growth else _figure(simulation, "displacement", None))
    names = [n for n in ("radius", "mean_fraction", "effective_rank", "self_weight", "slope") if n in observed]
    compared = [_figure(simulation, n, theory.get(n)) for n in names if n != unstable]
    compared += [_energy(simulation)] if "log_pair_energy" in observed else []
    compared += _hull(simulation)
    shape = [_figure(simulation, n, None) for n in ("sliced_wasserstein", "kurtosis", "skewness") if n in observed]
    shape = [f for f in shape if f.name != unstable]
    shown = {part.name for part in first if not isinstance(part, Text | Facts | VerdictBanner)}
    attention = [_figure(simulation, n, None) for n in ("entropy", "displacement") if n in observed and n not in shown]
    sections = [
        Section("Results", (Text((_HOW_TO_READ,), title="How to read this page"), _results(simulation))),
        Section("Tokens and clusters", tuple(first)),
    ]
    if many:
        sections += [
            Section("Comparison with theory", tuple(compared)),
            Section("Distance to a Gaussian", (Text((_ON_NULLS,)), *shape)),
            Section("Attention and normalisation", (*attention, *_spread_change(simulation)), folded=True),
        ]
    return (*sections, Section("Seeds", (_table(simulation),)), Section("Settings", (_facts(simulation),)))


_HOW_TO_READ = (
    "The banner gives the final state of all clouds and the state expected from theory or from earlier experiments. "
    "The first table lists each quantity at the end of the run with its 95 % confidence interval (CI) over seeds and, "
    "where one is expected, the expected value and a verdict. In the figures, blue lines are medians over seeds, blue "
    "bands the range of all seeds, dashed lines predictions of the theory (never fitted), and grey bands the 95 % "
    "range for Gaussian clouds with the same number of tokens (the null distribution). Time axes are logarithmic "
    "unless a recording interval was chosen."
)
_ON_NULLS = (
    "Grey band: 95 % range of the quantity for Gaussian clouds with the same number of tokens, whatever their mean and "
    "covariance. A collapsed or frozen cloud may have a value in this range; that is no evidence of a Gaussian "
    "equilibrium."
)


def _results(simulation: Simulation) -> Table:
    """The table of final quantities, as on the terminal."""
    columns = (Column("quantity"), Column("unit"), Column("value"), Column("95 % CI"), Column("n"), Column("expected"),
               Column("verdict"))  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    quantities = final_quantities(simulation)
    for row in quantities:
        value, interval, expected = quantity_cells(row)
        unjudged = "null band" if row.reference == "null" else None
        verdict: Cell = Chip(row.verdict, STATUS_OF[row.verdict]) if row.verdict else unjudged
        cells = (value, interval or None, row.total, expected or None, verdict)
        rows.append((quantity_name(row), quantity_unit(row), *cells))
    return Table("results", "Quantities at the end of the run", columns, tuple(rows), _rules(quantities), stacked=True)


def _rules(quantities: list[FinalQuantity]) -> str:
    """The statistics in the table of final quantities and the rules of its verdicts."""
    judged = [row for row in quantities if row.verdict and row.kind != "theorem"]
    sentences = [
        "Observables are means over n seeds with Student's 95 % CI; final states are shares of n seeds with Wilson's "
        "95 % CI.",
        *(
            f"“{quantity_name(row)}” counts the violations of a theorem among n recording intervals; one violation "
            "refutes it."
            for row in quantities
            if row.kind == "theorem"
        ),
        *([BY_SEEDS] if any(not _is_value(row) for row in judged) else []),
        *([BY_VALUE] if any(_is_value(row) for row in judged) else []),
        *([NULL_BAND] if any(row.reference == "null" for row in quantities) else []),
    ]
    return " ".join(sentences)


def _is_value(row: FinalQuantity) -> bool:
    """True if a single value of an observable is predicted."""
    return row.kind == "observable" and row.expected is not None and row.expected[0] == row.expected[1]


def cloud_of(simulation: Simulation) -> PointCloud:
    """The first cloud over time, in its coordinates for up to three dimensions, else in principal components."""
    s, frames = simulation.settings, simulation.frames.double()
    times = simulation.trajectory.times.tolist()
    sizes = frames.square().sum(-1).mean(-1).sqrt()
    grows = bool(sizes.max() > 10 * sizes.min())
    labels, _ = components(frames[-1:])
    _, group, counts = labels[0].unique(return_inverse=True, return_counts=True)
    order = counts.argsort(descending=True).argsort()
    final = f"{len(counts)} cluster{'s' * (len(counts) > 1)}" if len(counts) < len(group) / 5 else "no clusters"
    caption = f"{frames.shape[1]} of {s.tokens} tokens of seed {s.seed}, coloured by their final cluster ({final}). "
    if grows:
        frames = frames / sizes[:, None, None]
        caption += "Positions are divided by the radius at each time. "
    if s.dim == 1:
        rank = frames[0, :, 0].argsort().argsort().double()
        shown = torch.stack((frames[..., 0], rank.expand(frames.shape[:2])), -1)
        axes: tuple[Axis, ...] = (Axis("x", "1"), Axis("token", "initial rank"))
    elif s.dim <= 3:
        shown, axes = frames, tuple(Axis(f"x{i}", "1") for i in "₁₂₃"[: s.dim])
    else:
        flat = frames.reshape(-1, s.dim)
        values, vectors = torch.linalg.eigh(flat.mT @ flat / len(flat))
        shown = frames @ vectors[:, -3:].flip(-1)
        part = float(values[-3:].sum() / values.sum())
        axes = tuple(Axis(f"PC{i}", "1") for i in (1, 2, 3))
        caption += f"First three principal components over all times, {100 * part:.0f} % of the total variance. "
    return PointCloud(
        "cloud", "Tokens", axes, times, shown.tolist(), order[group].tolist(), caption.strip(), equal=s.dim > 1
    )  # fmt: skip


def _series(simulation: Simulation, name: str, colour: str = "blue", label: str = "simulation") -> list[Mark]:
    """Median over seeds, and the range of all seeds as a band."""
    values, times = simulation.trajectory.observed[name].double(), _times(simulation)
    marks: list[Mark] = []
    if values.shape[-1] > 1:
        low, high = values.amin(-1).tolist(), values.amax(-1).tolist()
        marks.append(Ribbon(f"range of {values.shape[-1]} seeds", times, low, high, colour))
    median = "median" if values.shape[-1] > 1 and label == "simulation" else label
    return [*marks, Line(median, times, values.nanmedian(-1).values.tolist(), colour)]


def _time(simulation: Simulation) -> Axis:
    """Time axis, logarithmic for the logarithmic recording schedule."""
    s = simulation.settings
    return Axis("time", "steps", "t") if s.every else Axis("time", "steps", "1 + t", scale="log")


def _times(simulation: Simulation) -> list[int]:
    return [int(t) + (not simulation.settings.every) for t in simulation.trajectory.times]


def _axis(name: str, scale: str = "linear") -> Axis:
    label, unit, formula = NAMED[name]
    return Axis(AXES.get(name, label), unit, formula, scale="log" if scale == "log" else "linear")


def _figure(simulation: Simulation, name: str, theory: Curve | None, scale: str = "linear") -> Figure:
    marks, times = _series(simulation, name), _times(simulation)
    caption = CAPTIONS[name]
    null = gaussian_band(simulation, name)
    if null is not None:
        ends = [times[0], times[-1]]
        low, high = (max(float(end), 1e-12) if scale == "log" else float(end) for end in (null.low, null.high))
        marks.insert(0, Ribbon("Gaussian cloud, 95 %", ends, [low] * 2, [high] * 2, "grey"))
    if theory is not None:
        values = theory.values[: len(times)]
        marks.append(Line("theory", times[: len(values)], values, "ink", "dash"))
        caption = f"{caption} Theory: {curve_text(theory)}."
    return Figure(name, TITLES[name], _time(simulation), _axis(name, scale), tuple(marks), caption)


def _unstable(simulation: Simulation, name: str, theory: Curve) -> Figure:
    title = "Unstable mode" if simulation.settings.tau > 0 else "Slowest mode"
    return replace(_figure(simulation, name, theory, "log"), title=f"{title}: {NAMED[name][0]}")


def _energy(simulation: Simulation) -> Figure:
    """The pair energy, with its decreases marked if the theorem excludes them."""
    values, times = simulation.trajectory.observed["log_pair_energy"].double(), _times(simulation)
    decreases = curves.energy_decreases(simulation)
    marks = _series(simulation, "log_pair_energy")
    applies, at = curves.rising(simulation), decreases.nonzero().tolist()
    if at and applies:
        heights = [float(values[t + 1, i]) for t, i in at]
        marks.append(Points("decrease", [times[t + 1] for t, _ in at], heights, "vermilion", "x"))
    summed = f"exp β⟨xᵢ, xⱼ⟩ over all pairs of {'a token and a key' if simulation.settings.keys else 'tokens'}"
    if simulation.settings.key_measure != "none":
        summed = "the normaliser of the keys over all tokens"
    intervals, seeds = decreases.shape
    each = f" ({intervals} for each of {seeds} seeds)" if seeds > 1 else ""
    theorem = "excludes decreases" if applies else "which excludes decreases, does not apply to these settings"
    caption = (
        f"Logarithm of the sum of {summed}. It decreases in {len(at)} of "
        f"{decreases.numel()} recording intervals{each}; [theory 5.3]{' ' if applies else ', '}{theorem}."
    )
    return Figure(
        "log_pair_energy",
        TITLES["log_pair_energy"],
        _time(simulation),
        _axis("log_pair_energy"),
        tuple(marks),
        caption,
    )


def _hull(simulation: Simulation) -> list[Figure]:
    """The diameter under attention without residual connection, with its bound."""
    hull = curves.hull(simulation)
    if hull is None:
        return []
    times, (diameters, bound) = _times(simulation), hull
    rounding = 1e-12 * diameters[0]
    above = [(t, a) for t, a, b in zip(times, diameters, bound.values, strict=True) if a > b + rounding]
    marks: list[Mark] = [Line("simulation", times, diameters), Line("bound", times, bound.values, "ink", "dash")]
    marks += (
        [Points("above the bound", [t for t, _ in above], [a for _, a in above], "vermilion", "x")] if above else []
    )
    axis = _axis("diameter", "log")
    caption = (
        f"Bound: {curve_text(bound)}. The simulation exceeds it at {len(above)} of {len(times) - 1} recorded times."
    )
    return [Figure("diameter", "Diameter of the convex hull", _time(simulation), axis, tuple(marks), caption)]


def _spread_change(simulation: Simulation) -> list[Figure]:
    """Change of the spread of the cloud by the attention step and by the normalisation."""
    observed = simulation.trajectory.observed
    if "expansion" not in observed or "contraction" not in observed:
        return []
    marks = [
        *_series(simulation, "expansion", "vermilion", "attention step"),
        *_series(simulation, "contraction", "green", "normalisation"),
    ]
    lines = tuple(mark for mark in marks if isinstance(mark, Line))
    axis = Axis("change of the log spread", "nats per step", "Δ log tr C")
    caption = (
        "Change of the log trace of the covariance by the attention step and by the normalisation, median over seeds. "
        "At an equilibrium the two changes cancel."
    )
    return [Figure("spread", "Change of the spread per step", _time(simulation), axis, lines, caption)]


def _table(simulation: Simulation) -> Table:
    evidence = list(dict.fromkeys(name for v in simulation.verdicts for name in v.evidence))
    expected = [Column("prediction met")] if simulation.met else []
    columns = (Column("seed"), Column("final state"), *expected, *(_column(name) for name in evidence))
    rows = []
    for i, v in enumerate(simulation.verdicts):
        met = [Chip("yes", "agrees") if simulation.met[i] else Chip("no", "departs")] if simulation.met else []
        numbers = [_number(v.evidence.get(name)) for name in evidence]
        rows.append(
            (simulation.settings.seed + i, Chip(STATE_NAMES.get(v.kind, v.kind), colour=KINDS[v.kind]), *met, *numbers)
        )
    caption = "Final state of the cloud of each seed, as defined under Methods, and observables at the end of the run."
    return Table("clouds", "Final state of each seed", columns, tuple(rows), caption, stacked=True)


def _column(name: str) -> Column:
    return Column(*NAMED.get(name, (name.replace("_", " "), "", "")))


def _number(value: float | None) -> float | int | None:
    """A cell; values below 1e-12 are rounding, and written as 0."""
    if value is not None and abs(value) < ROUNDING:
        return 0
    return value if value is None or not float(value).is_integer() or math.isinf(value) else int(value)


def _facts(simulation: Simulation) -> Facts:
    s = simulation.settings
    step = "x + τ A(x)" if s.residual else "τ A(x), no residual connection"
    output = "the natural gradient of the log normaliser" if s.natural else "the output of attention"
    return Facts({
        "tokens": f"{s.tokens} in {s.dim} dimension{'s' * (s.dim > 1)}",
        "initial distribution": INITIAL_NAMES.get(s.initial, s.initial),
        "keys": keys_text(s),
        "attention step": f"{step}; τ = {s.tau:g}, A(x) is {output} for the query x"
        + (f", estimated by {s.draws} drawn key{'s' * (s.draws > 1)}" if s.draws else ""),
        "attention weights": f"softmax over keys y of β⟨x, {'y' if s.qk_matrix == '1' else 'By'}⟩, β = {s.beta:g}"
        + (f", B = {s.qk_matrix}" if s.qk_matrix != "1" else "")
        + (f", values W y with W = {s.ov_matrix}" if s.ov_matrix != "qk" else "")
        + (", causal mask" if s.causal else "")
        + (f", {s.heads} heads of {s.dim // s.heads} coordinates" if s.heads > 1 else ""),
        "normalisation": normalisation_text(s.contraction, s.placement),
        "steps": f"{simulation.trajectory.step}, recorded {len(simulation.trajectory.times)} times",
    })  # fmt: skip


def _methods() -> tuple[str, ...]:
    return (
        "The output of softmax attention is the gradient of a log normaliser [shim22]: attention steps are an ascent "
        "if τ > 0, a descent if τ < 0. Weight matrices are identities unless given, there is no feed-forward layer, "
        "and the precision is double. Such dynamics on the sphere are studied in [geshkovski23].",
        "[theory N]: statement N in docs/theory.md; those of section 10 are results of experiments, not theorems. "
        "Predicted curves follow from the initial moments, or from the simulated radius and variance at each time; "
        "none is fitted.",
        "Clusters are the connected components when tokens closer to each other than 5 % of the radius are linked, "
        "among at most 600 tokens. Skewness and kurtosis are Mardia's [mardia74].",
        "Final states. Blow-up: values are no longer finite. Collapsed: one cluster. Clusters: several clusters, with "
        "at least 5 tokens each on average. Both states also require that the root mean square distance of a token "
        "from the mean of its cluster is less than 5 % of the radius of the cloud. Frozen: the mean self-weight "
        "exceeds 1/2. Gaussian: the sliced Wasserstein distance of the whitened cloud to a standard Gaussian is at "
        "most its 99 % quantile, and the excess kurtosis at most three standard deviations from 0; quantile and "
        "standard deviation are those of Gaussian samples with the same number of tokens. Other: none of these.",
    )  # fmt: skip
