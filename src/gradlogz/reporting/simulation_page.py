"""A simulation as a page: the cloud, its curves beside theory's, the seeds in a table.

Read next: ../simulation/theory_curves.py (theory), ../page (how it looks).
"""

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from .. import __version__
from ..dynamics.metastability import plateaus
from ..dynamics.observables import components
from ..page import (
    Axis,
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
from ..simulation import theory_curves as curves
from ..simulation.records import Simulation
from ..simulation.theory_curves import Curve
from .citations import cited
from .simulation_wording import KINDS, agreement, verdict_sentence

NAMED = {
    "radius": ("radius", "1", "√E|x|²"),
    "mean_fraction": ("mean fraction", "1", "|E x|² / E|x|²"),
    "effective_rank": ("effective rank", "dimensions", "exp H(λ)"),
    "log_pair_energy": ("log pair energy", "nats", "log Σᵢⱼ exp β⟨xᵢ, xⱼ⟩"),
    "entropy": ("entropy of attention", "nats", "−Σⱼ aᵢⱼ log aᵢⱼ"),
    "self_weight": ("self weight", "1", "aᵢᵢ"),
    "displacement": ("displacement", "radii per step", "|x′ − x| / √E|x|²"),
    "expansion": ("by the ascent", "nats", "log tr C(x + τA) − log tr C(x)"),
    "contraction": ("by the contraction", "nats", "log tr C(x′) − log tr C(x + τA)"),
    "skewness": ("skewness", "1", "E (zᵢ·zⱼ)³"),
    "kurtosis": ("excess kurtosis", "1", "E|z|⁴ − d(d + 2)"),
    "sliced_wasserstein": ("distance to a Gaussian", "standard deviations", "E_u W₂(u·z, N(0,1))"),
    "clusters": ("clusters", "count", "linked at 5 % of √E|x|²"),
    "within": ("spread in clusters", "radii", "√E|x − middle|²"),
    "slope": ("slope of attention", "1", "⟨A(x), x⟩ / |x|²"),
    "harmonic": ("fastest harmonic", "1", "|E exp(ilθ)|"),
}
TITLES = {
    "radius": "Size of the cloud",
    "mean_fraction": "How much of it is its mean",
    "effective_rank": "In how many directions it extends",
    "log_pair_energy": "Pair energy",
    "entropy": "Entropy of attention",
    "self_weight": "Weight of a token on itself",
    "displacement": "How far tokens move",
    "skewness": "Skewness",
    "kurtosis": "Kurtosis",
    "sliced_wasserstein": "Distance to a Gaussian",
    "clusters": "Number of clusters",
    "slope": "How much of a query attention returns",
    "harmonic": "The unstable mode",
}
REFERENCES = ("shim22", "geshkovski23", "mardia74")


def page_of(simulation: Simulation) -> Page:
    """The page of a simulation."""
    s, preset = simulation.settings, simulation.preset
    name = "a cloud under attention" if preset is None else preset.name
    status, expected = agreement(simulation)
    kinds = dict.fromkeys(v.kind for v in simulation.verdicts)
    chips = (*(Chip(kind, colour=KINDS[kind]) for kind in kinds), Chip(_word(status), status))
    says = "" if preset is None else f"{preset.says[0].upper()}{preset.says[1:]}. "
    shape = f"{s.seeds} × " if s.seeds > 1 else ""
    subtitle = (
        f"{says}{shape}{s.tokens} tokens in {s.dim} dimension{'s' if s.dim > 1 else ''}, {s.initial} start, "
        f"β\u00a0=\u00a0{s.beta:g}, τ\u00a0=\u00a0{s.tau:g}, contraction {s.contraction}, {s.steps} steps."
    )
    return Page(
        name=f"gradlogz-{name}" if preset else "gradlogz-simulation",
        title=f"Simulation: {name}",
        subtitle=subtitle,
        verdict=VerdictBanner(verdict_sentence(simulation), chips, (f"{expected[0].upper()}{expected[1:]}.",)),
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
    """Everything that was seen, as plain data."""
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


def _word(status: str) -> str:
    words = {"agrees": "as theory expects", "departs": "not as theory expects", "undecided": "partly as theory expects"}
    return words.get(status, "no expectation")


# Sections ------------------------------------------------------------------------------------------------------------


def _sections(simulation: Simulation) -> tuple[Section, ...]:
    seen = simulation.trajectory.observed
    theory = {**curves.moments(simulation), **curves.weights(simulation)}
    grown = curves.growth(simulation)
    unstable = "" if grown is None else grown[0]
    many = len(simulation.trajectory.times) > 1
    first: list[Part] = [cloud_of(simulation)]
    if many:
        first.append(replace(_figure(simulation, "clusters", None), caption=_lasting(simulation)))
        first.append(_unstable(simulation, grown[0], grown[1]) if grown else _figure(simulation, "displacement", None))
    names = [n for n in ("radius", "mean_fraction", "effective_rank", "self_weight", "slope") if n in seen]
    beside = [_figure(simulation, n, theory.get(n)) for n in names if n != unstable]
    beside += [_energy(simulation)] if "log_pair_energy" in seen else []
    beside += _hull(simulation)
    shape = [_figure(simulation, n, None) for n in ("sliced_wasserstein", "kurtosis", "skewness") if n in seen]
    shape = [f for f in shape if f.name != unstable]
    shown = {part.name for part in first if not isinstance(part, Text | Facts | VerdictBanner)}
    attention = [_figure(simulation, n, None) for n in ("entropy", "displacement") if n in seen and n not in shown]
    sections = [Section("The cloud", tuple(first))]
    if many:
        sections += [
            Section("Beside theory", tuple(beside)),
            Section("How Gaussian it is", (Text((_ON_NULLS,)), *shape)),
            Section("Attention and normalisation", (*attention, *_both(simulation)), folded=True),
        ]
    return (*sections, Section("Clouds, one by one", (_table(simulation),)), Section("Settings", (_facts(simulation),)))


_ON_NULLS = (
    "The grey band holds a Gaussian cloud of as many tokens 95 times in 100, whatever its mean and covariance. A cloud "
    "that has collapsed or frozen may look Gaussian about its middle; that is no evidence of a Gaussian equilibrium."
)


def cloud_of(simulation: Simulation) -> PointCloud:
    """The first cloud, moving: in its own line, plane or space, or along the principal axes of all that was seen."""
    s, frames = simulation.settings, simulation.frames.double()
    times = simulation.trajectory.times.tolist()
    sizes = frames.square().sum(-1).mean(-1).sqrt()
    grows = bool(sizes.max() > 10 * sizes.min())
    labels, _ = components(frames[-1:])
    _, group, counts = labels[0].unique(return_inverse=True, return_counts=True)
    order = counts.argsort(descending=True).argsort()
    said = f"{len(counts)} cluster{'s' * (len(counts) > 1)}" if len(counts) < len(group) / 5 else "no clusters"
    about = f"Seed {s.seed}, {frames.shape[1]} of {s.tokens} tokens, coloured by their cluster at the end ({said}). "
    if grows:
        frames = frames / sizes[:, None, None]
        about += "Drawn relative to the radius at each time. "
    if s.dim == 1:
        rank = frames[0, :, 0].argsort().argsort().double()
        shown = torch.stack((frames[..., 0], rank.expand(frames.shape[:2])), -1)
        axes: tuple[Axis, ...] = (Axis("x", "1"), Axis("token", "rank at the start"))
    elif s.dim <= 3:
        shown, axes = frames, tuple(Axis(f"x{i}", "1") for i in "₁₂₃"[: s.dim])
    else:
        flat = frames.reshape(-1, s.dim)
        values, vectors = torch.linalg.eigh(flat.mT @ flat / len(flat))
        shown = frames @ vectors[:, -3:].flip(-1)
        part = float(values[-3:].sum() / values.sum())
        axes = tuple(Axis(f"PC{i}", "1") for i in (1, 2, 3))
        about += f"Projected to the first three principal axes of all times, which hold {part:.0%} of the squares. "
    return PointCloud(
        "cloud", "Tokens", axes, times, shown.tolist(), order[group].tolist(), about.strip(), equal=s.dim > 1
    )  # fmt: skip


def _series(simulation: Simulation, name: str, colour: str = "blue", label: str = "seen") -> list[Mark]:
    """The median over clouds, and all of them as a band."""
    values, times = simulation.trajectory.observed[name].double(), _times(simulation)
    marks: list[Mark] = []
    if values.shape[-1] > 1:
        low, high = values.amin(-1).tolist(), values.amax(-1).tolist()
        marks.append(Ribbon(f"all {values.shape[-1]} seeds", times, low, high, colour))
    middle = "median" if values.shape[-1] > 1 else label
    return [*marks, Line(middle if label == "seen" else label, times, values.nanmedian(-1).values.tolist(), colour)]


def _time(simulation: Simulation) -> Axis:
    """Logarithmic where looks are: what happens first happens fast."""
    s = simulation.settings
    return Axis("time", "steps", "t") if s.every else Axis("time", "steps", "1 + t", scale="log")


def _times(simulation: Simulation) -> list[int]:
    return [int(t) + (not simulation.settings.every) for t in simulation.trajectory.times]


def _axis(name: str, scale: str = "linear") -> Axis:
    words, unit, formula = NAMED[name]
    return Axis(words, unit, formula, scale="log" if scale == "log" else "linear")


def _figure(simulation: Simulation, name: str, theory: Curve | None, scale: str = "linear") -> Figure:
    marks, times = _series(simulation, name), _times(simulation)
    caption = ""
    null = curves.null(simulation, name)
    if null is not None:
        ends = [times[0], times[-1]]
        low, high = (max(float(end), 1e-12) if scale == "log" else float(end) for end in (null.low, null.high))
        marks.insert(0, Ribbon("a Gaussian cloud", ends, [low] * 2, [high] * 2, "grey"))
    if theory is not None:
        values = theory.values[: len(times)]
        marks.append(Line("theory", times[: len(values)], values, "ink", "dash"))
        caption = f"Theory: {theory.says}."
    return Figure(name, TITLES[name], _time(simulation), _axis(name, scale), tuple(marks), caption)


def _unstable(simulation: Simulation, name: str, theory: Curve) -> Figure:
    found = _figure(simulation, name, theory, "log")
    title = "The unstable mode" if simulation.settings.tau > 0 else "The slowest mode"
    return Figure(found.name, f"{title}: {NAMED[name][0]}", found.x, found.y, found.marks, found.caption)


def _energy(simulation: Simulation) -> Figure:
    """The pair energy, and where it fell by more than rounding."""
    values, times = simulation.trajectory.observed["log_pair_energy"].double(), _times(simulation)
    fell = values.diff(dim=0) < -1e-9 * values[:-1].abs().clamp(min=1.0)
    marks = _series(simulation, "log_pair_energy")
    must, at = curves.rising(simulation), fell.nonzero().tolist()
    if at and must:
        heights = [float(values[t + 1, i]) for t, i in at]
        marks.append(Points("fell", [times[t + 1] for t, _ in at], heights, "vermilion", "x"))
    count = f"It fell in {len(at) or 'none'} of {fell.numel()} intervals"
    law = "must not fall here [theory 5.3]" if must else "may fall here: the theorem needs ascent alone or on a sphere"
    return Figure(
        "log_pair_energy",
        TITLES["log_pair_energy"],
        _time(simulation),
        _axis("log_pair_energy"),
        tuple(marks),
        f"{count}; it {law}.",
    )


def _hull(simulation: Simulation) -> list[Figure]:
    """The diameter under attention alone, beside its bound."""
    found = curves.hull(simulation)
    if found is None:
        return []
    times, (diameters, bound) = _times(simulation), found
    rounding = 1e-12 * diameters[0]
    above = [(t, a) for t, a, b in zip(times, diameters, bound.values, strict=True) if a > b + rounding]
    marks: list[Mark] = [Line("seen", times, diameters), Line("bound", times, bound.values, "ink", "dash")]
    marks += [Points("above", [t for t, _ in above], [a for _, a in above], "vermilion", "x")] if above else []
    axis = Axis("diameter", "1", "max |xᵢ − xⱼ|", scale="log")
    caption = f"Bound: {bound.says}. It is exceeded at {len(above) or 'none'} of {len(times) - 1} looks."
    return [Figure("diameter", "Diameter of the hull", _time(simulation), axis, tuple(marks), caption)]


def _lasting(simulation: Simulation) -> str:
    """The counts of clusters that lasted, of the first cloud."""
    counts, times = simulation.trajectory.observed["clusters"][:, 0].long(), simulation.trajectory.times
    least = simulation.trajectory.step / 20
    found = [p for p in plateaus(counts, times, flicker=least / 2, least=least) if p.clusters > 0]
    words = [f"{p.clusters} for {p.lifetime:.0f}{' or more' if p.censored else ''}" for p in found]
    return f"Counts that last, of the first cloud: {', '.join(words)} steps." if words else ""


def _both(simulation: Simulation) -> list[Figure]:
    """What the ascent does to the spread of the cloud, and what the contraction does, apart."""
    seen = simulation.trajectory.observed
    if "expansion" not in seen or "contraction" not in seen:
        return []
    marks = [
        *_series(simulation, "expansion", "vermilion", "ascent"),
        *_series(simulation, "contraction", "green", "contraction"),
    ]
    lines = tuple(mark for mark in marks if isinstance(mark, Line))
    axis = Axis("change of the spread", "nats per step", "Δ log tr C")
    caption = "Medians. Where the two cancel the size of the cloud stays."
    return [Figure("spread", "What ascent and contraction do to the spread", _time(simulation), axis, lines, caption)]


def _table(simulation: Simulation) -> Table:
    evidence = list(dict.fromkeys(name for v in simulation.verdicts for name in v.evidence))
    expected = [Column("expected")] if simulation.met else []
    columns = (Column("seed"), Column("verdict"), *expected, *(_column(name) for name in evidence))
    rows = []
    for i, v in enumerate(simulation.verdicts):
        yes = [Chip("yes", "agrees") if simulation.met[i] else Chip("no", "departs")] if simulation.met else []
        numbers = [_number(v.evidence.get(name)) for name in evidence]
        rows.append((simulation.settings.seed + i, Chip(v.kind, colour=KINDS[v.kind]), *yes, *numbers))
    caption = "Every cloud at the end, and the numbers from which its verdict follows."
    return Table("clouds", "Verdicts and evidence", columns, tuple(rows), caption)


def _column(name: str) -> Column:
    words, unit, formula = NAMED.get(name, (name.replace("_", " "), "", ""))
    return Column(words, unit, formula)


def _number(value: float | None) -> float | int | None:
    return value if value is None or not float(value).is_integer() or math.isinf(value) else int(value)


def _facts(simulation: Simulation) -> Facts:
    s = simulation.settings
    keys = f"{s.keys} frozen keys" if s.keys else "the tokens themselves"
    return Facts({
        "tokens": f"{s.tokens}, in {s.dim} dimensions",
        "start": s.initial,
        "keys": keys,
        "step": f"x + τ A(x), τ = {s.tau:g}" if s.residual else f"τ A(x), τ = {s.tau:g}, without the token itself",
        "attention": f"softmax β⟨x, y⟩, β = {s.beta:g}" + (", causal" if s.causal else "")
        + (f", {s.heads} heads of {s.dim // s.heads} coordinates" if s.heads > 1 else ""),
        "contraction": f"{s.contraction}, placed {s.placement}",
        "steps": f"{simulation.trajectory.step}, with {len(simulation.trajectory.times)} looks",
    })  # fmt: skip


def _methods() -> tuple[str, ...]:
    return (
        "Each step moves every token along softmax attention to the cloud, the gradient of a log normaliser [shim22], "
        "and then contracts the cloud. Double precision, identity weights, no feed-forward layer; clouds of this kind "
        "on the sphere are studied in [geshkovski23].",
        "Lines are medians over seeds, bands all of them. Dashed lines are theory's, from the moments of the start or "
        "from the radius at each time, never fitted. Clusters are connected components of tokens nearer than 5 % of "
        "the radius, among at most 600 tokens. Skewness and kurtosis are Mardia's [mardia74].",
        "A cloud counts as collapsed or clustered if tokens lie within 5 % of the radius of the middle of their "
        "cluster, as frozen if tokens give themselves more than half of their weight, as Gaussian if its distance to "
        "one and its kurtosis are those of a Gaussian sample of the same size.",
    )  # fmt: skip
