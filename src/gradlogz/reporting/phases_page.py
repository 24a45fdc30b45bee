"""A phase diagram as a page: verdicts, clusters and ranks over the grid, theory's lines among them.

Read next: ../simulation/parameter_sweep.py (how it was made), ../simulation/theory_boundaries.py (the lines).
"""

from dataclasses import asdict
from typing import Any

import torch

from .. import __version__
from ..page import Axis, Cell, Chip, Column, Figure, Heat, Line, Page, Section, Table, VerdictBanner
from ..simulation.grid import Range
from ..simulation.records import GridPoint, Phases
from ..simulation.theory_boundaries import boundaries
from .citations import cited
from .simulation_wording import KINDS

ALL = {**KINDS, "undefined": "rule"}
LETTERS = {"beta": "β", "tau": "τ", "dim": "d", "tokens": "N", "heads": "h", "contraction": ""}
NAMES = {"beta": "inverse temperature", "tau": "step", "dim": "dimension"}
UNITS = {"beta": "1", "tau": "1", "dim": "dimensions", "tokens": "tokens", "heads": "heads", "contraction": "kind"}


def page_of(phases: Phases) -> Page:
    """The page of a phase diagram."""
    s, done = phases.settings, len(phases.points)
    kinds = [kind for kind in ALL if any(p.kind == kind for p in phases.points.values())]
    counts = {kind: sum(p.kind == kind for p in phases.points.values()) for kind in kinds}
    words = ", ".join(f"{counts[kind]} {kind}" for kind in kinds) or "nothing yet"
    partly = "" if phases.complete else " It was interrupted: empty places were not reached."
    others = (
        f"{s.tokens} tokens in {s.dim} dimensions, {s.initial} start, β = {s.beta:g}, τ = {s.tau:g}, {s.contraction}"
    )
    lines = _lines(phases)
    theory = f"Dashed: {', '.join(line.name for line in lines)}. " if lines else ""
    figures = [
        Figure("verdicts", "Verdicts", *_axes(phases), (_verdicts(phases, kinds), *lines),
               f"{theory}Point at a place for its evidence.", wide=True),
        Figure("clusters", "Number of clusters", *_axes(phases), (_numbers(phases, "clusters", "clusters"),),
               "Where tokens have gathered; empty elsewhere."),
        Figure("rank", "Effective rank", *_axes(phases), (_numbers(phases, "effective_rank", "dimensions"),)),
    ]  # fmt: skip
    return Page(
        name="gradlogz-phases",
        title=f"Phases over {' and '.join(r.name for r in phases.ranges)}",
        subtitle=f"{others}, {s.steps} steps, {s.seeds} seed{'s' * (s.seeds > 1)}, unless the grid says otherwise.",
        verdict=VerdictBanner(
            f"{done} places of the grid: {words}.{partly}", tuple(Chip(kind, colour=ALL[kind]) for kind in kinds)
        ),
        sections=(
            Section("The diagram", tuple(figures)),
            Section("Places, one by one", (_table(phases),), folded=True),
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


_HOW = (
    "Every place is a run of its own from the same start; its verdict is that of most of its seeds, its numbers their "
    "medians. Theory's lines are for Gaussian clouds of variance 1 and many tokens; they are drawn, not fitted. What a "
    "verdict means stands under Methods of a single simulation and in the documentation of evolve."
)


def data_of(phases: Phases) -> dict[str, Any]:
    """The diagram as plain data."""
    return {
        "version": __version__,
        "sweep": phases.grid,
        "settings": asdict(phases.settings),
        "complete": phases.complete,
        "axes": {r.name: list(r.values) for r in phases.ranges},
        "places": [
            {**{r.name: r.values[i] for r, i in zip(phases.ranges, place, strict=True)}, "kind": found.kind,
             "share": found.share, "evidence": found.evidence}
            for place, found in sorted(phases.points.items())
        ],
    }  # fmt: skip


def _axes(phases: Phases) -> tuple[Axis, Axis]:
    x = _axis(phases.ranges[0])
    return x, _axis(phases.ranges[1]) if len(phases.ranges) > 1 else Axis("", "one row", names=("",))


def _axis(r: Range) -> Axis:
    names = tuple(str(v) for v in r.values) if r.name == "contraction" else ()
    return Axis(NAMES.get(r.name, r.name), UNITS[r.name], LETTERS[r.name], names=names)


def _lines(phases: Phases) -> tuple[Line, ...]:
    """The lines of theory that cross the diagram."""
    colours = zip(("ink", "vermilion", "green", "orange"), boundaries(phases), strict=False)
    return tuple(Line(name, x, y, colour, "dash") for colour, (name, x, y) in colours if len(x) > 1)


def _grid(phases: Phases) -> list[list[GridPoint | None]]:
    """Rows along the second axis."""
    rows = range(len(phases.ranges[1].values)) if len(phases.ranges) > 1 else [None]
    columns = range(len(phases.ranges[0].values))
    return [[phases.points.get((i,) if j is None else (i, j)) for i in columns] for j in rows]


def _coordinates(phases: Phases) -> tuple[list[float], list[float]]:
    def of(r: Range) -> list[float]:
        return [float(i) for i in range(len(r.values))] if r.name == "contraction" else [float(v) for v in r.values]

    return of(phases.ranges[0]), of(phases.ranges[1]) if len(phases.ranges) > 1 else [0.0]


def _verdicts(phases: Phases, kinds: list[str]) -> Heat:
    values = [[None if p is None else kinds.index(p.kind) for p in row] for row in _grid(phases)]
    categories = tuple((kind, ALL[kind]) for kind in kinds)
    return Heat("verdict", *_coordinates(phases), values, _hover(phases), categories)


def _numbers(phases: Phases, name: str, unit: str) -> Heat:
    gathered = ("clusters", "collapsed")
    values = [
        [None if p is None or (name == "clusters" and p.kind not in gathered) else p.evidence.get(name) for p in row]
        for row in _grid(phases)
    ]
    return Heat(unit, *_coordinates(phases), values, _hover(phases))


def _hover(phases: Phases) -> list[list[str]]:
    found = []
    for j, row in enumerate(_grid(phases)):
        words = []
        for i, place in enumerate(row):
            at = [f"{r.name} {r.values[k]}" for r, k in zip(phases.ranges, (i, j), strict=False)]
            said = ["not reached"] if place is None else [f"{place.kind}, {place.share:.0%} of seeds"]
            numbers = [] if place is None else [f"{k.replace('_', ' ')} {_short(v)}" for k, v in place.evidence.items()]
            words.append("\n".join([", ".join(at), *said, *numbers]))
        found.append(words)
    return found


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(phases: Phases) -> Table:
    names = list(dict.fromkeys(name for p in phases.points.values() for name in p.evidence))
    heads = (*(Column(r.name) for r in phases.ranges), Column("verdict"), Column("share", "1"))
    rows: list[tuple[Cell, ...]] = []
    for place, found in sorted(phases.points.items()):
        at: list[Cell] = [r.values[i] for r, i in zip(phases.ranges, place, strict=True)]
        numbers: list[Cell] = [found.evidence.get(name) for name in names]
        rows.append((*at, Chip(found.kind, colour=ALL[found.kind]), found.share, *numbers))
    columns = (*heads, *(Column(name.replace("_", " ")) for name in names))
    return Table("places", "Every place of the grid", columns, tuple(rows))
