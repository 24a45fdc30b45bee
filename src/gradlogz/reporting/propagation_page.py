"""The pages of `propagate` and `iterate_layer`: observables by depth, or by repetition, one curve for each series.

Read next: propagation_wording.py (the texts), ../probing/propagation/records.py (the records), ../page (the layout).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import __version__
from .._typing import Tensor
from ..page import Axis, Cell, Column, Facts, Figure, Line, Mark, Page, Ribbon, Section, Table, Text, VerdictBanner
from ..probing.propagation.records import LayerIteration, Propagation, estimate
from .citations import cited
from .propagation_wording import (
    CAPTIONS,
    COLOURS,
    NAMES,
    headline,
    interval_text,
    iteration_headline,
    iteration_run_text,
    observable_name,
    run_text,
    series_name,
)

SECTIONS = {
    "Distance to a Gaussian": ("sliced_wasserstein", "kurtosis"),
    "Size and dimension": ("effective_rank", "mean_fraction", "radius"),
    "Expansion and contraction": ("expansion", "contraction", "displacement"),
    "Attention": ("entropy", "self_weight", "log_pair_energy"),
    "Clusters": ("clusters", "within"),
}
DASHES = {"text": "solid", "sampled": "solid", "untrained": "dash", "redrawn": "dot"}
REFERENCES = ("shim22", "mardia74")
HOW_TO_READ = (
    "Lines are means over seeds, bands their 95 % confidence intervals (Student). Green: tokens of a text in the "
    "trained model. Blue: sampled tokens in the trained model. Dashed and dotted: the same sampled tokens in models "
    "with random weights, untrained, or with the spectra of the trained matrices (redrawn). Depth 0 is where the "
    "layers begin."
)
METHODS = (
    "Sampled tokens replace the tokens of the text where the layers begin, window by window, under the same masks and "
    "positions. Each seed has its own windows, draw of tokens and draws of random weights. Padded tokens are left out.",
    "Observables are those of the simulator, of the tokens that a layer reads: the stream of a post-norm model; in a "
    "pre-norm model the stream after the norm, without gain and bias. Tokens of all windows of a seed form one cloud.",
    "The pair energy is not defined across layers, whose QK matrices differ; it is recorded where one layer is "
    "repeated.",
)
HOW_TO_READ_ITERATION = (
    "Lines are means over windows, bands their 95 % confidence intervals (Student). Green: windows of the text where "
    "the layer begins. Blue: sampled tokens."
)
ITERATION_METHODS = (
    "The layer is read from the model as QK matrices, OV matrices, biases, rotations, norms and feed-forward map, and "
    "repeated on its own output. One step was compared with the layer of the model itself.",
    "Each cloud is one window; sampled tokens have the moments of the text where the layer begins.",
)


def page_of(result: Propagation) -> Page:
    """Page of a propagation."""
    x, axis = list(range(result.depths)), Axis("depth", "layers", "l")
    figures = _sections(result.observed, result.settings.start, x, axis, result.null)
    table = _table(result.observed, result.settings.start)
    return Page(
        name=f"gradlogz-propagation-{result.settings.model}",
        title=f"{result.settings.model}: a distribution of tokens through its layers",
        subtitle=f"{run_text(result)}.",
        verdict=VerdictBanner(headline(result)),
        sections=(
            Section("Reading", (Text((HOW_TO_READ,)),)),
            *figures,
            Section("Numbers at both ends", (table,)),
            Section("Model", (_facts(result.facts),), folded=True),
        ),
        methods=METHODS,
        reproduce=_reproduce(result),
        references=cited(REFERENCES),
        data=data_of(result),
        made_by="gradlogz simulate --model",
    )


def page_of_iteration(result: LayerIteration) -> Page:
    """Page of a repeated layer."""
    axis = Axis("time", "repetitions", "t")
    figures = _sections(result.observed, result.settings.start, list(result.times), axis, {})
    return Page(
        name=f"gradlogz-layer-{result.settings.model}-{result.settings.layer}",
        title=f"{result.settings.model}: layer {result.settings.layer}, repeated",
        subtitle=f"{iteration_run_text(result)}.",
        verdict=VerdictBanner(iteration_headline(result)),
        sections=(
            Section("Reading", (Text((HOW_TO_READ_ITERATION,)),)),
            *figures,
            Section("Model", (_facts(result.facts),), folded=True),
        ),
        methods=ITERATION_METHODS,
        reproduce=_reproduce(result),
        references=cited(REFERENCES[:1]),
        data=data_of(result),
        made_by="gradlogz simulate --model",
    )


def data_of(result: Propagation | LayerIteration) -> dict[str, Any]:
    """The result as plain data, with version and command."""
    return {"version": __version__, "command": result.command, **result.data()}


def _reproduce(result: Propagation | LayerIteration) -> dict[str, str]:
    s = result.settings
    return {
        "version": f"gradlogz {__version__}, torch {torch.__version__}",
        "seed": f"{s.seed} to {s.seed + s.seeds - 1}" if s.seeds > 1 else f"{s.seed}",
        "command": result.command,
    }


def _facts(facts: Mapping[str, Any]) -> Facts:
    return Facts({name: f"{value:,}" if isinstance(value, int) else f"{value}" for name, value in facts.items()})


def _sections(
    observed: Mapping[str, Mapping[str, Tensor]],
    start: str,
    x: Sequence[int],
    axis: Axis,
    null: Mapping[str, tuple[float, float, float]],
) -> tuple[Section, ...]:
    known = set().union(*observed.values())
    return tuple(
        Section(
            title, tuple(_figure(observed, start, name, x, axis, null.get(name)) for name in names if name in known)
        )
        for title, names in SECTIONS.items()
        if known & set(names)
    )


def _figure(
    observed: Mapping[str, Mapping[str, Tensor]],
    start: str,
    name: str,
    x: Sequence[int],
    axis: Axis,
    null: tuple[float, float, float] | None,
) -> Figure:
    marks: list[Mark] = []
    if null is not None:
        ends = [x[0], x[-1]]
        marks.append(Ribbon("null, 95 %", ends, [null[0]] * 2, [null[2]] * 2, "grey"))
    for series, columns in observed.items():
        if name not in columns:
            continue
        estimates = [estimate(values) for values in columns[name].T]
        places = [i for i, e in enumerate(estimates) if e.value == e.value]  # not NaN
        at, label, colour = [x[i] for i in places], series_name(series, start, short=True), COLOURS[series]
        if all(estimates[i].low == estimates[i].low for i in places):
            low, high = [estimates[i].low for i in places], [estimates[i].high for i in places]
            marks.append(Ribbon(f"{label}, 95 % CI", at, low, high, colour, legend=False))
        dash = DASHES[series]
        marks.append(Line(label, at, [estimates[i].value for i in places], colour, dash))  # type: ignore[arg-type]
    label, unit, formula = NAMES[name]
    short = Axis("share of the mean" if name == "mean_fraction" else label, unit, formula)
    return Figure(name, label[0].upper() + label[1:], axis, short, tuple(marks), CAPTIONS[name])


def _ends(series: str) -> tuple[str, ...]:
    """Columns of a series in the table; baselines begin with the same tokens as the sampled series."""
    return ("last",) if series in ("untrained", "redrawn") else ("first", "last")


def _table(observed: Mapping[str, Mapping[str, Tensor]], start: str) -> Table:
    """Values where the layers begin and end, mean over seeds with 95 % confidence interval."""
    heads = (
        Column("quantity"),
        Column("unit"),
        *(Column(f"{series_name(s, start)}, {at}") for s in observed for at in _ends(s)),
    )
    rows: list[tuple[Cell, ...]] = []
    for name in (n for names in SECTIONS.values() for n in names if n in observed["text"]):
        cells: list[Cell] = [observable_name(name), NAMES[name][1]]
        for series, values in ((s, columns[name]) for s, columns in observed.items()):
            known = [i for i in range(values.shape[-1]) if bool(values[:, i].isfinite().all())]
            ends = {"first": known[0], "last": known[-1]}
            cells += [interval_text(estimate(values[:, ends[at]])) for at in _ends(series)]
        rows.append(tuple(cells))
    caption = (
        "First: where the layers begin, or after the first layer for what belongs to a layer. Last: after the last "
        "layer, or in it. Mean over seeds ± half of Student's 95 % CI."
    )
    return Table("results", "Where the layers begin and end", heads, tuple(rows), caption, stacked=True)
