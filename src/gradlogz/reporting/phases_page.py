"""The page of a phase diagram: final states, cluster counts and effective ranks over the grid, with boundaries.

Read next: ../simulation/parameter_sweep.py (the simulations), ../simulation/theory_boundaries.py (the boundaries).
"""

from dataclasses import asdict
from typing import Any

import torch

from .. import __version__
from ..page import Axis, Cell, Chip, Column, Figure, Heat, Line, Page, Section, Table, Text, VerdictBanner
from ..simulation.grid import Range
from ..simulation.records import GridPoint, Phases
from ..simulation.theory_boundaries import boundaries
from .citations import cited
from .simulation_wording import INITIAL_NAMES, KINDS, NAMED, STATE_NAMES, normalisation_text

ALL = {**KINDS, "undefined": "rule"}
LETTERS = {"beta": "β", "tau": "τ", "dim": "d", "tokens": "N", "heads": "h", "contraction": ""}
NAMES = {"beta": "inverse temperature", "tau": "step size", "dim": "dimension"}
HOVER = "Hover over a cell for its numbers."
MEANINGS = {  # of the boundaries of the theory, by the beginning of their names
    "τ = 0": "ascent for larger τ, descent for smaller",
    "1 + τβ = 0": "one step maps a Gaussian cloud of variance 1 to a point",
    "γ of mode": "one step reverses the lowest mode that the normalisation leaves free; below it, descent overshoots",
    "self-weight 1/2": "frozen for larger β",
    "β diam² = 4": "for smaller β the fixed keys have one fixed point",
}
GATHERED = ("clusters", "collapsed")  # final states with a cluster count
UNITS = {"beta": "1", "tau": "1", "dim": "dimensions", "tokens": "tokens", "heads": "heads", "contraction": "kind"}


def page_of(phases: Phases) -> Page:
    """Page of a phase diagram."""
    s, completed = phases.settings, len(phases.points)
    kinds = kinds_of(phases)
    counts = {kind: sum(p.kind == kind for p in phases.points.values()) for kind in kinds}
    states = ", ".join(f"{counts[kind]} {STATE_NAMES.get(kind, kind)}" for kind in kinds) or "none completed"
    interrupted = "" if phases.complete else " Interrupted: empty cells were not computed."
    lines = _lines(phases)
    meanings = "; ".join(f"{line.name} ({_meaning(line.name)})" for line in lines)
    theory = f"Dashed lines, the boundaries of the theory: {meanings}. " if lines else ""
    seeds = f"{s.seeds} seed{'s' * (s.seeds > 1)}"
    median = f"Median over {seeds} per grid point" if s.seeds > 1 else "One seed per grid point"
    figures = [
        Figure("verdicts", "Final states", *_axes(phases), (_verdicts(phases, kinds), *lines),
               f"{'Most frequent final' if s.seeds > 1 else 'Final'} state of {seeds} per grid point. {theory}{HOVER}",
               wide=True),
        Figure("clusters", "Cluster count", *_axes(phases), (_numbers(phases, "clusters", "clusters"),),
               f"{median}, where clusters have formed; empty elsewhere."),
        Figure("rank", "Effective rank", *_axes(phases), (_numbers(phases, "effective_rank", "dimensions"),),
               f"{median}: exponential of the entropy of the covariance eigenvalues, normalised to sum 1."),
    ]  # fmt: skip
    return Page(
        name="gradlogz-phases",
        title=f"Phase diagram over {' and '.join(r.name for r in phases.ranges)}",
        subtitle=f"Outside the grid: {_others(phases)}, {seeds}.",
        verdict=VerdictBanner(
            f"Final states of {completed} grid points: {states}.{interrupted}",
            tuple(Chip(STATE_NAMES.get(kind, kind), colour=ALL[kind]) for kind in kinds),
        ),
        sections=(
            Section("Phase diagram", (Text((_HOW_TO_READ,), title="How to read this page"), *figures)),
            Section("Grid points", (_table(phases),), folded=True),
        ),
        methods=(_HOW,),
        reproduce={
            "version": f"gradlogz {__version__}, torch {torch.__version__}",
            "seed": f"{s.seed}",
            "command": phases.command,
            "settings": ", ".join(f"{name}={value}" for name, value in asdict(s).items()),
        },
        references=cited(("shim22", "geshkovski23")),
        data=data_of(phases),
        made_by="gradlogz simulate --sweep",
    )


_HOW_TO_READ = (
    "Each cell is one grid point: a simulation with its parameters. Colours give the final state of most of its seeds; "
    "dashed lines are the boundaries that the theory predicts. The table lists every grid point with its numbers."
)
_HOW = (
    "Every grid point is simulated from the same initial clouds; its final state is the most frequent one over seeds, "
    "its numbers are medians over the seeds with that state. Boundaries are those of Gaussian clouds of variance 1 "
    "with many tokens; none is fitted. The page of a single simulation defines the final states under Methods."
)


def _others(phases: Phases) -> str:
    """The parameters outside the grid."""
    s, swept = phases.settings, [r.name for r in phases.ranges]
    texts = {
        "tokens": f"{s.tokens} tokens",
        "dim": f"{s.dim} dimension{'s' * (s.dim > 1)}",
        "initial": f"{INITIAL_NAMES.get(s.initial, s.initial)} initial cloud",
        "beta": f"inverse temperature β\u00a0=\u00a0{s.beta:g}",
        "tau": f"step size τ\u00a0=\u00a0{s.tau:g}",
        "contraction": normalisation_text(s.contraction, s.placement),
        "steps": f"{s.steps} step{'s' * (s.steps != 1)}",
    }
    return ", ".join(text for name, text in texts.items() if name not in swept)


def _meaning(boundary: str) -> str:
    """Meaning of a boundary of the theory."""
    return next(text for name, text in MEANINGS.items() if boundary.startswith(name))


def kinds_of(phases: Phases) -> list[str]:
    """Final states that occur, in the order of the legend."""
    return [kind for kind in ALL if any(p.kind == kind for p in phases.points.values())]


def data_of(phases: Phases) -> dict[str, Any]:
    """Settings, axes and grid points as plain data."""
    return {
        "version": __version__,
        "command": phases.command,
        "sweep": phases.grid,
        "settings": asdict(phases.settings),
        "complete": phases.complete,
        "axes": {r.name: list(r.values) for r in phases.ranges},
        "places": [
            {**{r.name: r.values[i] for r, i in zip(phases.ranges, index, strict=True)}, "kind": point.kind,
             "share": point.share, "evidence": point.evidence}
            for index, point in sorted(phases.points.items())
        ],
    }  # fmt: skip


def _axes(phases: Phases) -> tuple[Axis, Axis]:
    x = _axis(phases.ranges[0])
    return x, _axis(phases.ranges[1]) if len(phases.ranges) > 1 else Axis("", "one row", names=("",))


def _axis(r: Range) -> Axis:
    names = tuple(str(v) for v in r.values) if r.name == "contraction" else ()
    return Axis(NAMES.get(r.name, r.name), UNITS[r.name], LETTERS[r.name], names=names)


def _lines(phases: Phases) -> tuple[Line, ...]:
    """Phase boundaries of the theory that cross the diagram."""
    colours = zip(("ink", "vermilion", "green", "orange"), boundaries(phases), strict=False)
    return tuple(Line(name, x, y, colour, "dash") for colour, (name, x, y) in colours if len(x) > 1)


def _grid(phases: Phases) -> list[list[GridPoint | None]]:
    """Grid points in rows along the second axis; None where not completed."""
    rows = range(len(phases.ranges[1].values)) if len(phases.ranges) > 1 else [None]
    columns = range(len(phases.ranges[0].values))
    return [[phases.points.get((i,) if j is None else (i, j)) for i in columns] for j in rows]


def _coordinates(phases: Phases) -> tuple[list[float], list[float]]:
    def positions(r: Range) -> list[float]:
        return [float(i) for i in range(len(r.values))] if r.name == "contraction" else [float(v) for v in r.values]

    return positions(phases.ranges[0]), positions(phases.ranges[1]) if len(phases.ranges) > 1 else [0.0]


def _verdicts(phases: Phases, kinds: list[str]) -> Heat:
    values = [[None if p is None else kinds.index(p.kind) for p in row] for row in _grid(phases)]
    categories = tuple((STATE_NAMES.get(kind, kind), ALL[kind]) for kind in kinds)
    return Heat("final state", *_coordinates(phases), values, _hover(phases), categories)


def _numbers(phases: Phases, name: str, unit: str) -> Heat:
    values = [
        [None if p is None or (name == "clusters" and p.kind not in GATHERED) else p.evidence.get(name) for p in row]
        for row in _grid(phases)
    ]
    return Heat(unit, *_coordinates(phases), values, _hover(phases))


def _hover(phases: Phases) -> list[list[str]]:
    """Text of each cell: parameters, final state and numbers."""
    texts = []
    for j, row in enumerate(_grid(phases)):
        cells = []
        for i, point in enumerate(row):
            at = [f"{r.name} {r.values[k]}" for r, k in zip(phases.ranges, (i, j), strict=False)]
            state = ["not computed"] if point is None else [f"{point.kind}, {100 * point.share:.0f} % of seeds"]
            numbers = [] if point is None else [f"{_label(k)} {_short(v)}" for k, v in point.evidence.items()]
            cells.append("\n".join([", ".join(at), *state, *numbers]))
        texts.append(cells)
    return texts


def _label(name: str) -> str:
    return NAMED[name][0] if name in NAMED else name.replace("_", " ")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(phases: Phases) -> Table:
    names = list(dict.fromkeys(name for p in phases.points.values() for name in p.evidence))
    heads = (
        *(Column(r.name, UNITS[r.name]) for r in phases.ranges),
        Column("final state"),
        Column("share of seeds", "1"),
    )
    rows: list[tuple[Cell, ...]] = []
    for index, point in sorted(phases.points.items()):
        at: list[Cell] = [r.values[i] for r, i in zip(phases.ranges, index, strict=True)]
        numbers: list[Cell] = [point.evidence.get(name) for name in names]
        rows.append((*at, Chip(STATE_NAMES.get(point.kind, point.kind), colour=ALL[point.kind]), point.share, *numbers))
    columns = (*heads, *(Column(*NAMED.get(name, (_label(name), "", ""))) for name in names))
    caption = "Most frequent final state over seeds, its share, and medians over the seeds with that state."
    return Table("places", "Grid points", columns, tuple(rows), caption, stacked=True)
