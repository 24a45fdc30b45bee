"""Figures of several runs: the middle of each, the course over depth, every head over training, what has changed.

Read next: comparison_page.py.
"""

import math
from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

from ..page import Axis, Figure, Heat, Line, Mark, Points
from ..probing.runs.records import Finding, Quantity
from .findings_figures import Labels, hover_text, key_of, null_of, numbers
from .formatting import digits

TONES = ("blue", "vermilion", "green", "purple", "orange", "sky", "yellow")


class RunSeries(NamedTuple):
    """The rows of one quantity in one run, with the place of the run among all, its step if it has one, the short names
    of its layers and of their blocks, and the unit and formula of the quantity."""

    name: str
    place: int
    step: float | None
    rows: tuple[Finding, ...]
    labels: Labels
    blocks: Labels
    declared: Quantity

    @property
    def at(self) -> float:
        """Where the run stands on an axis of runs."""
        return float(self.place) if self.step is None else self.step


def over_runs(series: Sequence[RunSeries]) -> Figure:
    """The middle of the heads or layers of every run, with their middle half, beside the middle null."""
    values = [[row.value for row in s.rows] for s in series]
    middles = [median(v) for v in values]
    lows, highs = zip(*(_half(v) for v in values), strict=True)
    at = [s.at for s in series]
    hover = [
        f"{s.name}\nmiddle {digits(m)}, middle half {digits(low)} to {digits(high)}\nof {len(s.rows)}"
        for s, m, low, high in zip(series, middles, lows, highs, strict=True)
    ]
    marks: list[Mark] = []
    nulls = [(s.at, median(known)) for s in series if (known := [r.null for r in s.rows if math.isfinite(r.null)])]
    x, y = [x for x, _ in nulls], [y for _, y in nulls]
    trained = series[0].step is not None
    if nulls:
        words = [f"null\nmiddle {digits(null)}" for null in y]
        course = Line("null", x, y, "grey", "dash", text=words)
        marks.append(course if trained else Points("null", x, y, "grey", "line-ew-open", words))
    if trained:
        marks.append(Line("middle", at, middles, "blue"))
    marks.append(Points("middle half", at, middles, "blue", text=hover, low=lows, high=highs))
    title = "over training" if trained else "run by run"
    caption = "The middle of all heads or layers; bars hold the middle half of them."
    return _figure(series, title, _axis_of_runs(series), tuple(marks), caption)


def by_depth(series: Sequence[RunSeries]) -> Figure:
    """The middle head of every layer, from the first layer to the last, one line for each run."""
    marks = []
    for s in series:
        layers: dict[tuple[str, int], list[float]] = {}
        for row in s.rows:
            layers.setdefault((row.layer, row.call), []).append(row.value)
        last = max(len(layers) - 1, 1)
        middles = [median(values) for values in layers.values()]
        places = [i / last for i in range(len(layers))]
        said = [
            f"{s.name}\nlayer {s.labels[at] or 'of the model'}\nmiddle {digits(middle)} of {len(values)}"
            for (at, values), middle in zip(layers.items(), middles, strict=True)
        ]
        tone = TONES[s.place % len(TONES)]
        marks.append(Line(s.name, places, middles, tone, "solid" if s.place < len(TONES) else "dot", text=said))
    axis = Axis("depth", "share of layers", "i / (L − 1)", range=(-0.03, 1.03))
    return _figure(series, "by depth", axis, tuple(marks), "The middle head of each layer.")


def over_heads(series: Sequence[RunSeries]) -> tuple[Figure, ...]:
    """Every head or layer by itself, over the runs."""
    courses: dict[tuple[str, str], list[tuple[RunSeries, Finding]]] = {}
    for s in series:
        for row in s.rows:
            courses.setdefault((key_of(row, s.labels), key_of(row, s.blocks)), []).append((s, row))
    lines = []
    for (name, key), course in courses.items():
        x, y = [s.at for s, _ in course], [row.value for _, row in course]
        said = [f"{s.name}\n{hover_text(row, s.labels[row.layer, row.call])}" for s, row in course]
        lines.append(Line(_place(name), x, y, "blue", key=key or "model", text=said))
    caption = "One line for each head or layer; a click on it chooses it."
    return (_figure(series, "one by one", _axis_of_runs(series), tuple(lines), caption),)


def changes(series: Sequence[RunSeries]) -> tuple[Figure, ...]:
    """How far each head went from the first run to the last, layers by heads."""
    ends = [{key_of(row, s.labels): row for row in s.rows if row.head is not None} for s in (series[0], series[-1])]
    both = [key for key in ends[0] if key in ends[1]]
    if not both:
        return ()
    layers = list(dict.fromkeys(key.rpartition("/")[0] for key in both))
    width = 1 + max(int(key.rpartition("/")[2]) for key in both)
    places = [[f"{layer}/{head}" for head in range(width)] for layer in layers]
    found = {key: (ends[0][key], ends[1][key]) for key in both}
    values = [[found[p][1].value - found[p][0].value if p in found else None for p in line] for line in places]
    said = {
        key: f"{_place(key)}\nchange {digits(last.value - first.value)}\n"
        f"{series[0].name}: {numbers(first)}, {null_of(first)}\n{series[-1].name}: {numbers(last)}, {null_of(last)}"
        for key, (first, last) in found.items()
    }
    hover = [[said.get(p, "") for p in line] for line in places]
    keys = [[key_of(ends[0][p], series[0].blocks) if p in found else "" for p in line] for line in places]
    unit, formula = series[0].declared
    heat = Heat(f"change [{unit}]", range(width), range(len(layers)), values, hover, keys=keys)
    first = series[0].rows[0]
    return (
        Figure(
            f"{first.prediction} {first.quantity} changes",
            f"{first.quantity}: change",
            Axis("head", "number"),
            Axis("layer", "number", names=tuple(layers)),
            (heat,),
            f"{series[-1].name} less {series[0].name}." + (f" {formula}." if formula else ""),
        ),
    )


def _figure(series: Sequence[RunSeries], title: str, x: Axis, marks: tuple[Mark, ...], caption: str) -> Figure:
    first = series[0].rows[0]
    y = Axis(first.quantity, *series[0].declared)
    return Figure(f"{first.prediction} {first.quantity} {title}", f"{first.quantity} {title}", x, y, marks, caption)


def _axis_of_runs(series: Sequence[RunSeries]) -> Axis:
    if series[0].step is not None:
        return Axis("step", "steps of training", "t")
    names = [""] * (1 + max(s.place for s in series))
    for s in series:
        names[s.place] = s.name
    return Axis("run", "name", names=tuple(names), range=(-0.5, len(names) - 0.5))


def _half(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, method="inclusive")
    return low, high


def _place(key: str) -> str:
    layer, _, head = key.partition("/")
    return (f"layer {layer}" if layer else "model") + (f", head {head}" if head else "")
