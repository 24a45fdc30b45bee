"""Rows as figures: by layer beside their nulls, and as a map of layers by heads.

    by_layer     value and interval of every head or layer, in the colour of its verdict; grey: the null and its band
    head_map     layers by heads, one colour for each value; first layers at the bottom
    verdict_map  the same with the verdicts
    plot         one of the first two as a figure of plotly: what Findings.plot returns

A figure is plain data of ../page: the report draws it with others, Findings.plot by itself.

Read next: findings_sections.py (where pages show them), ../page/marks.py.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any, Literal

from .._errors import InputValueError, MissingPackageError
from ..page import Axis, Figure, Heat, Mark, Points, drawn
from ..probing.runs.findings import Findings
from ..probing.runs.records import VERDICTS, Finding
from .findings_wording import Declarations, unit_and_formula
from .formatting import STYLES, digits, finite, interval

Labels = Mapping[tuple[str, int], str]
WIDTH = 0.7  # of a layer, over which its heads are spread
FENCE = 1.5  # times the middle eight tenths, on either side of them: what lies further out would flatten all the rest
MANY = 100  # rows for which half of a page is too narrow


def plot(
    findings: Findings,
    prediction: str,
    quantity: str | None = None,
    *,
    model: str | None = None,
    by: Literal["layer", "head"] = "layer",
) -> Any:
    """A figure of plotly: the values of a prediction beside their nulls, layer after layer, or by layer and head.

    The quantity is the judged one if none is named.
    """
    if by not in ("layer", "head"):
        remedy = "By layer there are intervals and nulls, by head a map."
        raise InputValueError("Findings.plot", "by", f"by must be 'layer' or 'head', got {by!r}", remedy)
    if (model is None and len(findings.facts) > 1) or model not in (None, *findings.facts):
        remedy = f"There are: {', '.join(findings.facts)}."
        raise InputValueError("Findings.plot", "model", f"model must name one of the models, got {model!r}", remedy)
    rows = [row for row in findings.select(prediction).rows if model in (None, row.model)]
    judged = [s.quantity for s in findings.summary() if s.prediction == prediction and model in (None, s.model)]
    wanted = quantity or next(filter(None, judged), rows[0].quantity)
    shown = [row for row in rows if row.quantity == wanted]
    if not shown or (by == "head" and all(row.head is None for row in shown)):
        fact = f"{wanted!r} of {prediction}" + (", which is of whole layers" if shown else "")
        remedy = f"There are: {', '.join(dict.fromkeys(row.quantity for row in rows))}."
        raise InputValueError("Findings.plot", "quantity", f"quantity must be one that a {by} has, got {fact}", remedy)
    try:
        return drawn((head_map if by == "head" else by_layer)(shown, labels_of(shown), findings.declarations))
    except ModuleNotFoundError:
        remedy = "Install it with: pip install 'gradlogz[report]'."
        raise MissingPackageError("Findings.plot", "plotly", "plotly must be installed, got none", remedy) from None


# Names of layers ------------------------------------------------------------------------------------------------------


def labels_of(rows: Sequence[Finding]) -> Labels:
    """A short name for each layer and call: what is not common to the names of all modules, "3" of "layers.3.attn"."""
    return _shortened({(row.layer, row.call): row.layer for row in rows})


def blocks_of(rows: Sequence[Finding]) -> Labels:
    """The same for the blocks that layers belong to, so that attention and feed-forward sublayers of one share it."""
    return _shortened({(row.layer, row.call): _block(row.layer) for row in rows})


def _block(layer: str) -> str:
    """The name of a module up to its first number."""
    parts = layer.split(".")
    end = next((i for i, part in enumerate(parts, 1) if part.isdigit()), len(parts))
    return ".".join(parts[:end])


def _shortened(names: Labels) -> Labels:
    every = {name: name.split(".") for name in names.values() if name}
    # An embedding before numbered layers, or a norm behind them, has nothing in common with their names.
    parts = {name: p for name, p in every.items() if any(map(str.isdigit, p))} or every
    first = last = 0
    if len(parts) > 1:
        shortest = min(map(len, parts.values()))
        while first < shortest and len({p[first] for p in parts.values()}) == 1:
            first += 1
        while last < shortest - first and len({p[-1 - last] for p in parts.values()}) == 1:
            last += 1
    short = {name: name for name in every}
    short |= {name: ".".join(p[first : len(p) - last]) or name for name, p in parts.items()}
    tied = any(call > 1 and name in parts for (_, call), name in names.items())
    alone = set(parts) if tied and len(parts) == 1 else set()  # one module, called again and again
    return {
        (layer, call): f"{call}" if name in alone else f"{short[name]}#{call}" if call > 1 else short.get(name, "")
        for (layer, call), name in names.items()
    }


def key_of(row: Finding, blocks: Labels) -> str:
    """What a reader chooses to see of this row: its head, its block, or nothing."""
    block = blocks[row.layer, row.call]
    return block if row.head is None else f"{block}/{row.head}"


# Figures --------------------------------------------------------------------------------------------------------------


def hover_text(row: Finding, label: str) -> str:
    """The text of a row where it is pointed at: place, value, null, verdict."""
    place = "the model" if not label else f"layer {label}" + ("" if row.head is None else f", head {row.head}")
    lines = [place, f"{row.quantity} {numbers(row)}", null_of(row)]
    return "\n".join([*lines, row.verdict] if row.verdict else lines)


def numbers(row: Finding) -> str:
    """A value with its interval."""
    return f"{digits(row.value)} ({interval(row.low, row.high) or 'no interval'})"


def null_of(row: Finding) -> str:
    """The null with its band."""
    band = interval(row.null_low, row.null_high)
    return "no null" if math.isnan(row.null) else f"null {digits(row.null)}" + (f" ({band})" if band else "")


def by_layer(
    rows: Sequence[Finding], labels: Labels, declarations: Declarations, blocks: Labels | None = None
) -> Figure:
    """The rows of one quantity, layer after layer, each beside its null.

    blocks: of which a reader may choose one.
    """
    blocks = blocks or labels
    names = _names(rows, labels)
    heads = 1 + max((row.head or 0) for row in rows)
    place = {name: i for i, name in enumerate(names)}

    def at(row: Finding) -> float:
        spread = 0.0 if row.head is None or heads == 1 else WIDTH * (row.head / (heads - 1) - 0.5)
        return place[labels[row.layer, row.call]] + spread

    marks: list[Mark] = []
    nulls = [row for row in rows if math.isfinite(row.null)]
    if nulls:
        marks.append(
            Points(
                "null", [at(r) for r in nulls], [r.null for r in nulls], "grey", "line-ew-open",
                [hover_text(r, labels[r.layer, r.call]) for r in nulls],
                [finite(r.null_low) for r in nulls], [finite(r.null_high) for r in nulls],
                [key_of(r, blocks) for r in nulls], 7,
            )
        )  # fmt: skip
    for verdict, style in STYLES.items():
        of = [row for row in rows if row.verdict == verdict and math.isfinite(row.value)]
        if of:
            marks.append(
                Points(
                    verdict or "value", [at(r) for r in of], [r.value for r in of], style.colour, "circle",
                    [hover_text(r, labels[r.layer, r.call]) for r in of],
                    [finite(r.low) for r in of], [finite(r.high) for r in of], [key_of(r, blocks) for r in of], 6,
                )
            )  # fmt: skip
    ends, outside = _window([v for r in rows for v in (r.value, r.null) if math.isfinite(v)])
    first = rows[0]
    unit, formula = unit_and_formula(declarations, first.prediction, first.quantity)
    spread = f" The {heads} heads of a layer from left to right." if heads > 1 else ""
    bars = "Bars are intervals of 95 %." if any(interval(r.low, r.high) for r in rows) else "There are no intervals."
    bars += " Grey is the null." if nulls else ""
    return Figure(
        f"{first.prediction} {first.quantity} by layer",
        f"{first.quantity} by layer",
        Axis("layer", "number", names=tuple(name or "model" for name in names)),
        Axis(first.quantity, unit, formula, range=ends),
        tuple(marks),
        f"{bars}{spread}{outside}",
        wide=len(rows) > MANY,
    )


def head_map(
    rows: Sequence[Finding], labels: Labels, declarations: Declarations, blocks: Labels | None = None
) -> Figure:
    """The values of one quantity, layers by heads."""
    first = rows[0]
    unit, formula = unit_and_formula(declarations, first.prediction, first.quantity)
    ends, outside = _window([row.value for row in rows if math.isfinite(row.value)])
    words = f"{first.quantity} [{unit}]"
    grid = _grid(rows, labels)
    values = [[None if row is None else finite(row.value) for row in line] for line in grid]
    hover, keys = _said(grid, labels, blocks or labels)
    heat = Heat(words, range(len(grid[0])), range(len(grid)), values, hover, keys=keys, range=ends)
    caption = (f"{formula}." if formula else "") + outside.replace("axis leaves", "colours leave")
    return _mapped(f"{first.prediction} {first.quantity} by head", first.quantity, rows, labels, heat, caption.strip())


def verdict_map(rows: Sequence[Finding], labels: Labels, blocks: Labels | None = None) -> Figure:
    """The verdicts on one quantity, layers by heads."""
    first, order = rows[0], list(VERDICTS)
    grid = _grid(rows, labels)
    values = [[None if row is None or not row.verdict else order.index(row.verdict) for row in line] for line in grid]
    categories = tuple((verdict, STYLES[verdict].colour) for verdict in VERDICTS)
    hover, keys = _said(grid, labels, blocks or labels)
    heat = Heat("", range(len(grid[0])), range(len(grid)), values, hover, categories, keys)
    return _mapped(f"{first.prediction} verdicts", first.quantity, rows, labels, heat, "")


def _mapped(name: str, title: str, rows: Sequence[Finding], labels: Labels, heat: Heat, caption: str) -> Figure:
    return Figure(
        name,
        title,
        Axis("head", "number"),
        Axis("layer", "number", names=tuple(_names(rows, labels))),
        (heat,),
        caption,
    )


Grid = list[list[Finding | None]]


def _grid(rows: Sequence[Finding], labels: Labels) -> Grid:
    names = _names([row for row in rows if row.head is not None], labels)
    heads = 1 + max(row.head for row in rows if row.head is not None)
    by = {(labels[row.layer, row.call], row.head): row for row in rows}
    return [[by.get((name, head)) for head in range(heads)] for name in names]


def _said(grid: Grid, labels: Labels, blocks: Labels) -> tuple[list[list[str]], list[list[str]]]:
    hover = [["" if row is None else hover_text(row, labels[row.layer, row.call]) for row in line] for line in grid]
    return hover, [["" if row is None else key_of(row, blocks) for row in line] for line in grid]


def _names(rows: Sequence[Finding], labels: Labels) -> list[str]:
    return list(dict.fromkeys(labels[row.layer, row.call] for row in rows))


def _window(values: Sequence[float]) -> tuple[tuple[float, float] | None, str]:
    """Where nearly all values lie, if some lie so far out that they would flatten the rest; and a word about those."""
    if len(values) < 8:
        return None, ""
    low, *_, high = quantiles(values, n=10, method="inclusive")
    reach = FENCE * (high - low)
    inside = [v for v in values if low - reach <= v <= high + reach]
    if len(inside) == len(values) or reach == 0:
        return None, ""
    pad = 0.05 * (max(inside) - min(inside))
    count, ends = len(values) - len(inside), (min(values), max(values))
    words = f" The axis leaves {count} of {len(values)} outside; they reach from {ends[0]:.3g} to {ends[1]:.3g}."
    return (min(inside) - pad, max(inside) + pad), words
