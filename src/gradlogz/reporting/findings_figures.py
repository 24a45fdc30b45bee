"""Figures of one run.

    by_layer     value, 95 % confidence interval and null of every head or layer, in the colour of its verdict
    head_map     heat map of values, layers by heads; the first layer at the bottom
    verdict_map  heat map of verdicts, layers by heads
    plot         by_layer or head_map as a plotly figure, the result of Findings.plot

Captions stand alone: what is plotted, the error bars, the null and the number of heads or layers.

Read next: findings_sections.py (where pages show them), ../page/marks.py.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any, Literal

from .._errors import InputValueError, MissingPackageError
from ..page import Axis, Figure, Heat, Mark, Points, drawn
from ..probing.runs.findings import Findings
from ..probing.runs.records import TESTED, VERDICTS, Finding
from .findings_wording import Declarations, places_of, quantity_label, unit_and_formula
from .formatting import STYLES, digits, finite, interval

Labels = Mapping[tuple[str, int], str]
WIDTH = 0.7  # part of the distance between two layers over which the heads of one are spread
FENCE = 1.5  # values further than this times the range of deciles 1 to 9 outside it would flatten a figure
LINES = 2  # of an axis label; a longer formula is in the caption
END = "end"  # name of the last depth of the residual stream in the rows
MANY = 100  # rows above which a figure takes the full width of the page


def plot(
    findings: Findings,
    prediction: str,
    quantity: str | None = None,
    *,
    model: str | None = None,
    by: Literal["layer", "head"] = "layer",
) -> Any:
    """Plotly figure of one quantity of a prediction: values with nulls by layer, or a heat map by layer and head.

    quantity: by default the one that decides the claim.
    """
    if by not in ("layer", "head"):
        remedy = "Choose 'layer' for values with intervals and nulls, 'head' for a heat map."
        raise InputValueError("Findings.plot", "by", f"by must be 'layer' or 'head', got {by!r}", remedy)
    if (model is None and len(findings.facts) > 1) or model not in (None, *findings.facts):
        remedy = f"Choose from: {', '.join(findings.facts)}."
        raise InputValueError("Findings.plot", "model", f"model must name one of the models, got {model!r}", remedy)
    rows = [row for row in findings.select(prediction).rows if model in (None, row.model)]
    judged = [s.quantity for s in findings.summary() if s.prediction == prediction and model in (None, s.model)]
    wanted = quantity or next(filter(None, judged), rows[0].quantity)
    shown = [row for row in rows if row.quantity == wanted]
    if not shown or (by == "head" and all(row.head is None for row in shown)):
        problem = f"quantity {wanted!r} of {prediction} " + ("has no values by head" if shown else "does not exist")
        remedy = f"Choose from: {', '.join(dict.fromkeys(row.quantity for row in rows))}."
        raise InputValueError("Findings.plot", "quantity", problem, remedy)
    try:
        return drawn((head_map if by == "head" else by_layer)(shown, labels_of(shown), findings.declarations))
    except ModuleNotFoundError:
        remedy = "Install it with: pip install 'gradlogz[report]'."
        raise MissingPackageError("Findings.plot", "plotly", "plotly is not installed", remedy) from None


# Names of layers ------------------------------------------------------------------------------------------------------


def labels_of(rows: Sequence[Finding]) -> Labels:
    """Short name of each layer and call, without what all module names have in common: "3" for "layers.3.attn"."""
    return _shortened({(row.layer, row.call): row.layer for row in rows})


def blocks_of(rows: Sequence[Finding]) -> Labels:
    """Short name of the block of each layer and call; attention and feed-forward sublayers of a block share it."""
    return _shortened({(row.layer, row.call): _block(row.layer) for row in rows})


def _block(layer: str) -> str:
    """Name of a module up to its first number."""
    parts = layer.split(".")
    end = next((i for i, part in enumerate(parts, 1) if part.isdigit()), len(parts))
    return ".".join(parts[:end])


def _shortened(names: Labels) -> Labels:
    every = {name: name.split(".") for name in names.values() if name}
    # Names without a number, such as an embedding or a final norm, share no prefix with numbered layers.
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
    alone = set(parts) if tied and len(parts) == 1 else set()  # one module, called several times
    return {
        (layer, call): f"{call}" if name in alone else f"{short[name]}#{call}" if call > 1 else short.get(name, "")
        for (layer, call), name in names.items()
    }


def key_of(row: Finding, blocks: Labels) -> str:
    """Key of the choice that selects this row: its head, its block, or "" for the model."""
    block = blocks[row.layer, row.call]
    return block if row.head is None else f"{block}/{row.head}"


# Figures --------------------------------------------------------------------------------------------------------------


def layer_name(label: str) -> str:
    """Readable name of a layer: "layer 3", "module embeddings.LayerNorm" without a number, "end of the model"."""
    if not label:
        return "model"
    if label == END:
        return "end of the model"
    return f"{'layer' if any(map(str.isdigit, label)) else 'module'} {label}"


def hover_text(row: Finding, label: str, name: str) -> str:
    """Hover text of a row: place, value, null, number of tokens, verdict.

    label: the layer. name: the quantity.
    """
    place = layer_name(label) + ("" if row.head is None else f", head {row.head}")
    tokens = f"n = {row.tokens:,} tokens" if row.tokens else ""
    value = f"{name} {value_text(row)}"
    return "\n".join(filter(None, (place, value, null_text(row), tokens, row.verdict)))


def label_of(row: Finding, declarations: Declarations) -> str:
    """Readable name of the quantity of a row."""
    return quantity_label(declarations, row.prediction, row.quantity)


def value_text(row: Finding) -> str:
    """A value with its 95 % confidence interval."""
    ends = interval(row.low, row.high)
    return digits(row.value) + (f" (95 % CI {ends})" if ends else "")


def null_text(row: Finding) -> str:
    """The null value with its 95 % band; empty if there is none."""
    band = interval(row.null_low, row.null_high)
    return "" if math.isnan(row.null) else f"null {digits(row.null)}" + (f" (95 % band {band})" if band else "")


def joined(*texts: str) -> str:
    """The texts that are not empty, separated by commas."""
    return ", ".join(filter(None, texts))


def sample_size(rows: Sequence[Finding], declarations: Declarations | None = None) -> str:
    """Number of heads or layers in a caption, with the number of tokens per head or layer."""
    tokens = [row.tokens for row in rows if row.tokens]
    size = f"n = {len(rows)} {unit_name(rows, len(rows), declarations)}"
    if not tokens:
        return f"{size}; weights only" if rows and all(row.low == row.high for row in rows) else size
    low, high = min(tokens), max(tokens)
    return f"{size}, {low:,}{f' to {high:,}' if high > low else ''} tokens each"


def unit_name(rows: Sequence[Finding], count: int, declarations: Declarations | None = None) -> str:
    """Name of the units that rows describe: heads, layers, or values where they are mixed; singular if count is 1.

    declarations: those of the run, which name the units that are not heads: blocks, sublayers.
    """
    heads = {row.head is not None for row in rows}
    name = "head" if heads == {True} else "layer" if heads == {False} and all(row.layer for row in rows) else "value"
    if name == "layer" and declarations is not None and count != 1:
        return places_of(declarations, rows[0].prediction, rows[0].quantity)
    return name if count == 1 else f"{name}s"


def by_layer(
    rows: Sequence[Finding],
    labels: Labels,
    declarations: Declarations,
    blocks: Labels | None = None,
    null_name: str = "null",
) -> Figure:
    """Values and nulls of one quantity against the layer.

    blocks: short names of blocks, the keys that a reader selects by; labels by default.
    """
    blocks = blocks or labels
    names, quantity = _names(rows, labels), label_of(rows[0], declarations)
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
                [hover_text(r, labels[r.layer, r.call], quantity) for r in nulls],
                [finite(r.null_low) for r in nulls], [finite(r.null_high) for r in nulls],
                [key_of(r, blocks) for r in nulls], 7,
            )
        )  # fmt: skip
    for verdict, style in STYLES.items():
        judged = [row for row in rows if row.verdict == verdict and math.isfinite(row.value)]
        if judged:
            marks.append(
                Points(
                    verdict or "value", [at(r) for r in judged], [r.value for r in judged], style.colour, "circle",
                    [hover_text(r, labels[r.layer, r.call], quantity) for r in judged],
                    [finite(r.low) for r in judged], [finite(r.high) for r in judged],
                    [key_of(r, blocks) for r in judged], 6,
                )
            )  # fmt: skip
    first = rows[0]
    unit, formula = unit_and_formula(declarations, first.prediction, first.quantity)
    valued = [row for row in rows if math.isfinite(row.value)]
    shown = [row.value for row in valued] + [row.null for row in nulls]
    composition = f"{len(valued)} {unit_name(valued, len(valued), declarations)} with their nulls" if nulls else ""
    ends, outside = _window(shown, "axis", composition)
    axis = Axis(quantity, unit, formula, range=ends)
    defined = ""
    if len(axis.label.split("\n")) > LINES:  # the caption has more room for the formula
        axis, defined = Axis(quantity, unit, range=ends), formula
    sentences = (
        _plotted(valued, heads, quantity, defined, declarations),
        _bars(rows, nulls, null_name),
        f"{sample_size(valued, declarations)}.",
        outside,
    )
    return Figure(
        f"{first.prediction} {first.quantity} by layer",
        quantity,
        _places(tuple(name or "model" for name in names)),
        axis,
        tuple(marks),
        " ".join(filter(None, sentences)),
        wide=len(rows) > MANY,
    )


def _places(names: tuple[str, ...]) -> Axis:
    """Axis of numbered layers; of modules where sublayers of several kinds are shown."""
    modules = any("." in name for name in names)
    return Axis("module", "name in the model", names=names) if modules else Axis("layer", "number", names=names)


def _plotted(
    rows: Sequence[Finding], heads: int, quantity: str, formula: str = "", declarations: Declarations | None = None
) -> str:
    """The caption's sentences on the quantity, with its formula, and on the points."""
    quantity = _capitalized(quantity) + (f": {formula}" if formula else "")
    if all(row.head is None for row in rows):
        places = "layers" if declarations is None or not rows else unit_name(rows, len(rows), declarations)
        return f"{quantity}. Points: {places}."
    order = ", from left to right" if heads > 1 else ""
    return f"{quantity}. One point for each head, grouped by layer{order}."


def _bars(rows: Sequence[Finding], nulls: Sequence[Finding], null_name: str) -> str:
    """The caption's sentence on error bars and nulls."""
    bars = "Error bars: 95 % confidence intervals" if any(interval(r.low, r.high) for r in rows) else "No error bars"
    bands = any(interval(r.null_low, r.null_high) for r in nulls)
    return bars + (f"; grey: {null_name}{' and its 95 % band' if bands else ''}." if nulls else ".")


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def head_map(
    rows: Sequence[Finding], labels: Labels, declarations: Declarations, blocks: Labels | None = None
) -> Figure:
    """Heat map of the values of one quantity, layers by heads."""
    first, quantity = rows[0], label_of(rows[0], declarations)
    unit, formula = unit_and_formula(declarations, first.prediction, first.quantity)
    valued = [row for row in rows if math.isfinite(row.value)]
    ends, outside = _window([row.value for row in valued], "colour scale")
    grid = _grid(rows, labels)
    values = [[None if row is None else finite(row.value) for row in line] for line in grid]
    hover, keys = _hover_and_keys(grid, labels, blocks or labels, quantity)
    x, y, name = range(len(grid[0])), range(len(grid)), f"{quantity} [{unit}]"
    heat = Heat(name, x, y, values, hover, keys=keys, range=ends)
    plotted = f"Colour: {quantity}" + (f", {formula}." if formula else ".") + " One cell for each head."
    sample = sample_size([r for r in valued if r.head is not None], declarations)
    caption = " ".join(filter(None, (plotted, f"{sample}.", outside)))
    name, title = f"{first.prediction} {first.quantity} by head", f"{quantity}, heat map"
    return _mapped(name, title, rows, labels, heat, caption)


def verdict_map(
    rows: Sequence[Finding],
    labels: Labels,
    declarations: Declarations,
    blocks: Labels | None = None,
    correction: str = "",
) -> Figure:
    """Heat map of the verdicts on one quantity, layers by heads.

    correction: name of the multiple-testing correction, for the caption.
    """
    first, counts = rows[0], Counter(row.verdict for row in rows if row.verdict)
    order = [verdict for verdict in VERDICTS if counts[verdict] or verdict in TESTED]
    grid = _grid(rows, labels)
    values = [[None if row is None or not row.verdict else order.index(row.verdict) for row in line] for line in grid]
    categories = tuple((verdict, STYLES[verdict].colour) for verdict in order)
    label = label_of(first, declarations)
    hover, keys = _hover_and_keys(grid, labels, blocks or labels, label)
    heat = Heat("", range(len(grid[0])), range(len(grid)), values, hover, categories, keys)
    divided = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    tests = f" ({correction})" if correction else ""
    caption = f"Verdict on each head; statistic: {label}{tests}. {divided}; n = {sum(counts.values())} heads."
    return _mapped(f"{first.prediction} verdicts", f"verdicts on heads: {label}", rows, labels, heat, caption)


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


def _hover_and_keys(grid: Grid, labels: Labels, blocks: Labels, name: str) -> tuple[list[list[str]], list[list[str]]]:
    def text(row: Finding | None) -> str:
        return "" if row is None else hover_text(row, labels[row.layer, row.call], name)

    hover = [[text(row) for row in line] for line in grid]
    return hover, [["" if row is None else key_of(row, blocks) for row in line] for line in grid]


def _names(rows: Sequence[Finding], labels: Labels) -> list[str]:
    return list(dict.fromkeys(labels[row.layer, row.call] for row in rows))


def _window(values: Sequence[float], scale: str, composition: str = "") -> tuple[tuple[float, float] | None, str]:
    """Ends of a scale without its outliers, and a sentence on them; None and "" if there are no outliers.

    composition: objects that the values belong to, for the sentence.
    """
    if len(values) < 8:
        return None, ""
    low, *_, high = quantiles(values, n=10, method="inclusive")
    reach = FENCE * (high - low)
    inside = [v for v in values if low - reach <= v <= high + reach]
    if len(inside) == len(values) or reach == 0:
        return None, ""
    pad = 0.05 * (max(inside) - min(inside))
    count, ends = len(values) - len(inside), (min(values), max(values))
    total = f"{len(values)} values" + (f" ({composition})" if composition else "")
    number = f"{count} of the {total} {'is' if count == 1 else 'are'} outside the {scale}"
    return (min(inside) - pad, max(inside) + pad), f"{number} (full range {ends[0]:.3g} to {ends[1]:.3g})."
