"""The page of interventions, and their section on the page of a run.

    figures for each comparison       effect and control, and their difference, by layer; or a heat map of differences
    a table                           all effects, largest differences first

A run folder with the file interventions.json has the section on its page.

Read next: interventions_wording.py (the words), ../probing/interventions/records.py (the records).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import __version__
from .._errors import InputValueError
from .._paths import is_plain_file
from ..page import Axis, Column, Figure, Heat, Page, Part, Points, Section, Table, Text, VerdictBanner, View, Views
from ..probing.interventions.records import Comparison, Effect, Interventions, interventions_from_json
from ..probing.runs.run_folder import INTERVENTIONS
from .citations import cited, keys_in
from .findings_figures import Labels
from .formatting import digits, finite, interval, known, model_sentence
from .interventions_wording import (
    difference_of,
    headline,
    layer_labels,
    place_of,
    sentence_of,
    title_of_variant,
    unit_of,
)

FILE, TABLE = INTERVENTIONS  # in the folder of a run
SHOWN = 12  # rows of the table before it is expanded
OUTCOMES = {  # outcome: label and colour of its points
    "": ("no difference at FDR 5 %", "blue"),
    "above": ("above the control", "vermilion"),
    "below": ("below the control", "sky"),
}
METHODS = (
    "Each intervention replaces one tensor in a pass of the model: the update of an attention or feed-forward "
    "sublayer, or the outputs of heads. The change is the mean loss with the replacement minus that of the model, on "
    "the same tokens. The difference is that change minus the change by a control.",
    "Gradient: the gradient of the log normaliser of the layer in the residual stream, without its components along "
    "the token (and along the vector of ones, if the norm centres), which the norm removes. The component of the "
    "update along it is removed, or a multiple of the norm of the update is added along it. Controls: vectors of equal "
    "norm in random directions, and in the direction of the gradient of an earlier token.",
    "Heads: gaussian replaces the output of a head by E[v] + Cov(v, k) q, with mean and covariance over the visible "
    "keys of each row [shim22]. Controls: uniform attention over the visible keys, the mean output over other "
    "documents, and zero.",
    "Feed-forward: affine replaces the update by its least-squares affine map, fitted to other documents. Control: the "
    "mean update over other documents.",
    "95 % confidence intervals come from the Poisson bootstrap over documents [efron79] [hanley06], paired for "
    "differences. Above (below): the difference is positive (negative) at FDR 5 % over all heads or layers of the "
    "comparison [benjamini95].",
)


def page_of(interventions: Interventions) -> Page:
    """Page of interventions, as data."""
    return Page(
        name=f"gradlogz-interventions-{interventions.model}",
        title=f"Interventions on {interventions.model}",
        subtitle=f"Change of the loss when parts of a model are replaced. {model_sentence(interventions.facts)}",
        verdict=VerdictBanner(headline(interventions)),
        sections=(section_of(interventions),),
        methods=METHODS,
        reproduce={"version": f"gradlogz {__version__}", "seed": str(interventions.facts.get("seed"))},
        references=cited(keys_in(METHODS)),
        data=data_of(interventions),
        made_by="gradlogz probe --intervene",
    )


def with_interventions(page: Page, source: Any) -> Page:
    """The page of a run, with a section for its interventions if the run folder has them."""
    file = Path(source).expanduser() / FILE if isinstance(source, str | os.PathLike) else None
    if file is None or not is_plain_file(file):
        return page
    try:
        interventions = interventions_from_json(file.read_text(encoding="utf-8"))
    except (InputValueError, OSError, UnicodeDecodeError):
        unreadable = Section("Interventions", (Text((f"{FILE} cannot be read.",)),), name="interventions")
        return replace(page, sections=(*page.sections, unreadable))
    methods = (*page.methods, *METHODS)
    known_keys = {reference.key for reference in page.references}
    references = [r for r in cited(keys_in(METHODS)) if r.key not in known_keys]
    note = "Interventions changed the model: their effects are in the last section, Interventions."
    return replace(
        page,
        verdict=replace(page.verdict, notes=(*page.verdict.notes, note)),
        sections=(*page.sections, section_of(interventions, Text((headline(interventions),)))),
        methods=methods,
        references=(*page.references, *references),
        data={**page.data, "interventions": data_of(interventions)},
    )


def section_of(interventions: Interventions, *introduction: Text) -> Section:
    """The section: one figure for each comparison, and the table of all effects, below an introduction."""
    unit, labels = unit_of(interventions), layer_labels(interventions.rows)
    views = tuple(_view(i, comparison, labels, unit) for i, comparison in enumerate(interventions.comparisons()))
    parts: tuple[Part, ...] = ()
    if views:
        parts = (Views("interventions-views", "comparison", views), _table(interventions, labels, unit))
    return Section("Interventions", (*introduction, *parts), name="interventions")


def data_of(interventions: Interventions) -> dict[str, Any]:
    """Facts and effects as plain data."""
    rows = [{name: _plain(value) for name, value in row._asdict().items()} for row in interventions.rows]
    return {"facts": dict(interventions.facts), "rows": rows}


def _plain(value: Any) -> Any:
    return finite(value) if isinstance(value, float) else value


def _view(number: int, comparison: Comparison, labels: Labels, unit: str) -> View:
    title = f"{title_of_variant(comparison.intervention, comparison.variant)} / {comparison.control}"
    drawings = (_head_map,) if comparison.intervention == "heads" else (_by_layer, _differences)
    figures = [draw(f"interventions-{number}-{i}", title, comparison, labels, unit) for i, draw in enumerate(drawings)]
    return View(title, (Text((sentence_of(comparison, unit),)), *figures))


def _names(rows: tuple[Effect, ...], labels: Labels) -> list[str]:
    return list(dict.fromkeys(labels[row.layer, row.call] for row in rows))


def _by_layer(name: str, title: str, comparison: Comparison, labels: Labels, unit: str) -> Figure:
    rows = comparison.rows
    names = _names(rows, labels)
    x = [names.index(labels[row.layer, row.call]) for row in rows]
    hover = [_hover(row, labels, unit) for row in rows]
    effect = Points(
        "intervention", x, [finite(row.value) for row in rows], text=hover,
        low=[finite(row.low) for row in rows], high=[finite(row.high) for row in rows],
    )  # fmt: skip
    control = Points(
        comparison.control, x, [finite(row.control_value) for row in rows], colour="grey", symbol="diamond", text=hover
    )
    caption = (
        f"Change of the loss by the intervention (points with 95 % CI) and by its control, {comparison.control} "
        f"(diamonds); n = {len(rows)} layers, {rows[0].tokens:,} tokens."
    )
    return Figure(
        name, title, Axis("layer", "index", names=tuple(names)), Axis("change of the loss", unit), (control, effect),
        caption,
    )  # fmt: skip


def _differences(name: str, title: str, comparison: Comparison, labels: Labels, unit: str) -> Figure:
    rows = comparison.rows
    names = _names(rows, labels)
    marks = []
    for outcome, (label, colour) in OUTCOMES.items():
        some = [row for row in rows if row.outcome == outcome]
        if some:
            marks.append(Points(
                label, [names.index(labels[row.layer, row.call]) for row in some],
                [finite(row.difference) for row in some], colour=colour,
                text=[_hover(row, labels, unit) for row in some], low=[finite(row.difference_low) for row in some],
                high=[finite(row.difference_high) for row in some],
            ))  # fmt: skip
    caption = (
        f"Change of the loss by the intervention minus that by its control, {comparison.control}, on the same tokens; "
        f"bars: 95 % CI of this difference; n = {len(rows)} layers, {rows[0].tokens:,} tokens."
    )
    return Figure(
        name, f"Difference: {title}", Axis("layer", "index", names=tuple(names)), Axis("difference", unit),
        tuple(marks), caption,
    )  # fmt: skip


def _head_map(name: str, title: str, comparison: Comparison, labels: Labels, unit: str) -> Figure:
    rows = comparison.rows
    names = _names(rows, labels)
    heads = list(range(1 + max(row.head or 0 for row in rows)))
    effects = {(labels[row.layer, row.call], row.head): row for row in rows}
    grid = [[effects.get((layer, head)) for head in heads] for layer in names]
    values = [[None if row is None else finite(row.difference) for row in line] for line in grid]
    hover = [["" if row is None else _hover(row, labels, unit) for row in line] for line in grid]
    heat = Heat(f"difference [{unit}]", heads, list(range(len(names))), values, hover)
    caption = (
        f"Change of the loss by the intervention minus that by its control, {comparison.control}; the first layer at "
        f"the bottom; n = {len(rows)} heads, {rows[0].tokens:,} tokens."
    )
    return Figure(
        name, title, Axis("head", "index"), Axis("layer", "index", names=tuple(names)), (heat,), caption
    )  # fmt: skip


def _hover(row: Effect, labels: Labels, unit: str) -> str:
    return "\n".join(
        (
            f"layer {place_of(row, labels)}",
            f"change {digits(row.value)} {unit} (95 % CI {interval(row.low, row.high)})",
            f"{row.control} {digits(row.control_value)}",
            f"difference {difference_of(row)}",
            f"{row.outcome} the control (FDR 5 %)" if row.outcome else "not different from the control (FDR 5 %)",
        )
    )


def _table(interventions: Interventions, labels: Labels, unit: str) -> Table:
    columns = (
        Column("intervention"), Column("control"), Column("layer"), Column("head"), Column("change"),
        Column("95 % CI"), Column("control's change"), Column("difference"), Column("95 % CI of the difference"),
        Column("p-value"), Column("outcome"),
    )  # fmt: skip
    rows = sorted(interventions.rows, key=lambda row: (not row.outcome, -abs(row.difference)))
    cells = [
        (
            title_of_variant(r.intervention, r.variant), r.control, labels[r.layer, r.call], r.head, known(r.value),
            interval(r.low, r.high) or None, known(r.control_value), known(r.difference),
            interval(r.difference_low, r.difference_high) or None, known(r.p), r.outcome or None,
        )
        for r in rows
    ]  # fmt: skip
    caption = (
        f"Changes and differences in {unit}. Differences at FDR 5 % first, then by size. outcome: above or below the "
        "control at FDR 5 %; head –: all heads, or a feed-forward sublayer."
    )
    return Table("effects", f"all {len(rows):,} effects", columns, tuple(cells), caption, shown=SHOWN, stacked=True)
