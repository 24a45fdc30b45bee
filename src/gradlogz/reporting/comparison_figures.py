"""Figures of several runs.

    claim_values value of a claim with its confidence interval, run by run or against the training step
    over_runs    median and interquartile range over heads or layers, likewise
    by_depth     median over the heads of each layer against depth, one line per run
    over_heads   one line per head or layer
    changes      heat map of the change from the first run to the last

Read next: comparison_page.py.
"""

import math
from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

from ..page import Axis, Figure, Heat, Line, Mark, Points
from ..probing.runs.records import Finding, Quantity, Summary
from .findings_figures import Labels, hover_text, joined, key_of, null_text, unit_name, value_text
from .formatting import digits, interval

TONES = ("blue", "vermilion", "green", "purple", "orange", "sky", "yellow")


class RunSeries(NamedTuple):
    """The rows of one quantity in one run.

    place: index of the run among all. step: training step, None if unknown. labels, blocks: short names of layers and
    of their blocks. declared: unit and formula of the quantity. label: its readable name.
    """

    name: str
    place: int
    step: float | None
    rows: tuple[Finding, ...]
    labels: Labels
    blocks: Labels
    declared: Quantity
    label: str

    @property
    def at(self) -> float:
        """Position of the run on the axis of runs."""
        return float(self.place) if self.step is None else self.step


class ClaimValue(NamedTuple):
    """The value of a claim in one run; place and step as in `RunSeries`."""

    name: str
    place: int
    step: float | None
    claim: Summary

    @property
    def at(self) -> float:
        """Position of the run on the axis of runs."""
        return float(self.place) if self.step is None else self.step


def claim_values(values: Sequence[ClaimValue], title: str, label: str) -> Figure:
    """Value of a claim in every run with its 95 % confidence interval, and its null value."""
    at, claims = [v.at for v in values], [v.claim for v in values]
    trained = values[0].step is not None
    marks: list[Mark] = []
    nulls = [(v.at, v.claim.null) for v in values if math.isfinite(v.claim.null)]
    if nulls:
        x, y = [x for x, _ in nulls], [y for _, y in nulls]
        words = [f"null {digits(null)}" for null in y]
        line = Line("null", x, y, "grey", "dash", text=words)
        marks.append(line if trained else Points("null", x, y, "grey", "line-ew-open", words))
    if trained:
        marks.append(Line("value", at, [claim.value for claim in claims], "blue"))
    ends = [(c.low, c.high) if math.isfinite(c.low) and math.isfinite(c.high) else (c.value, c.value) for c in claims]
    hover = [
        "\n".join(filter(None, (v.name, f"value {digits(v.claim.value)}", _interval_text(v.claim), v.claim.verdict)))
        for v in values
    ]
    lows, highs = zip(*ends, strict=True)
    name = "95 % CI"
    marks.append(Points(name, at, [claim.value for claim in claims], "blue", text=hover, low=lows, high=highs))
    caption = f"Value of the claim ({label}); bars: 95 % confidence interval{'; grey: null' if nulls else ''}."
    axis = _axis_of_runs(values)
    prediction = claims[0].prediction
    return Figure(f"trend of {prediction}", title, axis, Axis(label, ""), tuple(marks), caption, wide=True)


def _interval_text(claim: Summary) -> str:
    ends = interval(claim.low, claim.high)
    return f"95 % CI {ends}" if ends else ""


def over_runs(series: Sequence[RunSeries]) -> Figure:
    """Median and interquartile range over the heads or layers of every run, with the median null."""
    values = [[row.value for row in s.rows] for s in series]
    medians = [median(v) for v in values]
    lows, highs = zip(*(_quartiles(v) for v in values), strict=True)
    at = [s.at for s in series]
    hover = [
        f"{s.name}\nmedian {digits(m)}, interquartile range {digits(low)} to {digits(high)}\nn = {_size([s])}"
        for s, m, low, high in zip(series, medians, lows, highs, strict=True)
    ]
    marks: list[Mark] = []
    nulls = [(s.at, median(known)) for s in series if (known := [r.null for r in s.rows if math.isfinite(r.null)])]
    x, y = [x for x, _ in nulls], [y for _, y in nulls]
    trained = series[0].step is not None
    if nulls:
        words = [f"null\nmedian {digits(null)}" for null in y]
        line = Line("median null", x, y, "grey", "dash", text=words)
        marks.append(line if trained else Points("median null", x, y, "grey", "line-ew-open", words))
    if trained:
        marks.append(Line("median", at, medians, "blue"))
    marks.append(Points("interquartile range", at, medians, "blue", text=hover, low=lows, high=highs))
    title = "over training" if trained else "run by run"
    grey = "; grey: median null" if nulls else ""
    caption = f"Median over {_size(series)} per run; bars: interquartile range{grey}."
    return _figure(series, title, _axis_of_runs(series), tuple(marks), caption)


def by_depth(series: Sequence[RunSeries]) -> Figure:
    """Median over the heads of each layer against depth, one line per run."""
    marks = []
    for s in series:
        layers: dict[tuple[str, int], list[float]] = {}
        for row in s.rows:
            layers.setdefault((row.layer, row.call), []).append(row.value)
        last = max(len(layers) - 1, 1)
        medians = [median(values) for values in layers.values()]
        places = [i / last for i in range(len(layers))]
        hover = [
            f"{s.name}\n{_place(s.labels[at])}\nmedian {digits(value)}, n = {len(values)}"
            for (at, values), value in zip(layers.items(), medians, strict=True)
        ]
        tone = TONES[s.place % len(TONES)]
        marks.append(Line(s.name, places, medians, tone, "solid" if s.place < len(TONES) else "dot", text=hover))
    axis = Axis("depth", "share of layers", "i / (L − 1)", range=(-0.03, 1.03))
    heads = any(row.head is not None for s in series for row in s.rows)
    caption = (
        f"{'Median over the heads' if heads else 'Value'} of each layer, from the first layer (0) to the last (1)."
    )
    return _figure(series, "by depth", axis, tuple(marks), f"{caption} One line per run; n = {_size(series)} per run.")


def over_heads(series: Sequence[RunSeries]) -> tuple[Figure, ...]:
    """One line per head or layer, over the runs."""
    courses: dict[tuple[str, str], list[tuple[RunSeries, Finding]]] = {}
    for s in series:
        for row in s.rows:
            courses.setdefault((key_of(row, s.labels), key_of(row, s.blocks)), []).append((s, row))
    lines = []
    for (name, key), course in courses.items():
        x, y = [s.at for s, _ in course], [row.value for _, row in course]
        hover = [f"{s.name}\n{hover_text(row, s.labels[row.layer, row.call], s.label)}" for s, row in course]
        lines.append(Line(_place(name), x, y, "blue", key=key or "model", text=hover))
    caption = f"One line per {unit_name(series[0].rows, 1)}; click a line to select it. n = {_size(series)} per run."
    return (_figure(series, "by head or layer", _axis_of_runs(series), tuple(lines), caption),)


def changes(series: Sequence[RunSeries]) -> tuple[Figure, ...]:
    """Heat map of the change of each head from the first run to the last; empty if the runs share no heads."""
    ends = [{key_of(row, s.labels): row for row in s.rows if row.head is not None} for s in (series[0], series[-1])]
    both = [key for key in ends[0] if key in ends[1]]
    if not both:
        return ()
    layers = list(dict.fromkeys(key.rpartition("/")[0] for key in both))
    width = 1 + max(int(key.rpartition("/")[2]) for key in both)
    places = [[f"{layer}/{head}" for head in range(width)] for layer in layers]
    pairs = {key: (ends[0][key], ends[1][key]) for key in both}
    values = [[pairs[p][1].value - pairs[p][0].value if p in pairs else None for p in line] for line in places]
    texts = {
        key: "\n".join((
            _place(key), f"change {digits(last.value - first.value)}",
            *(f"{s.name}: {joined(value_text(row), null_text(row))}"
              for s, row in ((series[0], first), (series[-1], last))),
        ))
        for key, (first, last) in pairs.items()
    }  # fmt: skip
    hover = [[texts.get(p, "") for p in line] for line in places]
    keys = [[key_of(ends[0][p], series[0].blocks) if p in pairs else "" for p in line] for line in places]
    unit, formula = series[0].declared
    heat = Heat(f"change [{unit}]", range(width), range(len(layers)), values, hover, keys=keys)
    first = series[0].rows[0]
    caption = f"Colour: change, by head, of {series[0].label}{f' ({formula})' if formula else ''}"
    return (
        Figure(
            f"{first.prediction} {first.quantity} changes",
            f"{series[0].label}: change from first to last run",
            Axis("head", "number"),
            Axis("layer", "number", names=tuple(layers)),
            (heat,),
            f"{caption}: {series[-1].name} minus {series[0].name}. n = {len(both)} heads.",
        ),
    )


def _figure(series: Sequence[RunSeries], title: str, x: Axis, marks: tuple[Mark, ...], caption: str) -> Figure:
    first = series[0].rows[0]
    label = series[0].label
    y = Axis(label, *series[0].declared)
    return Figure(f"{first.prediction} {first.quantity} {title}", f"{label} {title}", x, y, marks, caption)


def _axis_of_runs(series: Sequence[RunSeries] | Sequence[ClaimValue]) -> Axis:
    if series[0].step is not None:
        return Axis("training step", "steps", "t")
    names = [""] * (1 + max(s.place for s in series))
    for s in series:
        names[s.place] = s.name
    return Axis("run", "name", names=tuple(names), range=(-0.5, len(names) - 0.5))


def _size(series: Sequence[RunSeries]) -> str:
    """Number of heads, layers or values per run, as a range where runs differ."""
    sizes = sorted({len(s.rows) for s in series})
    numbers = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
    return f"{numbers} {unit_name([row for s in series for row in s.rows], sizes[-1])}"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, method="inclusive")
    return low, high


def _place(key: str) -> str:
    layer, _, head = key.partition("/")
    return (f"layer {layer}" if layer else "model") + (f", head {head}" if head else "")
