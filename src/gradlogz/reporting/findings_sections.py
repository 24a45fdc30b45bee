"""The sections of a report, from the rows of a run.

Read next: findings_page.py (their order), findings_figures.py (rows, drawn).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..page import (
    Axis,
    Cell,
    Choice,
    Column,
    Facts,
    Figure,
    Heat,
    Link,
    Part,
    Section,
    Table,
    Text,
    View,
    Views,
)
from ..probing.runs.records import Finding, Summary, Token
from .findings_figures import (
    Labels,
    blocks_of,
    by_layer,
    head_map,
    key_of,
    labels_of,
    null_of,
    numbers,
    verdict_map,
)
from .findings_wording import (
    Declarations,
    chip,
    claim_of,
    facts_of,
    method_of,
    sentences_of,
    title_of,
    unit_and_formula,
)
from .formatting import interval, known
from .run_contents import RunContents

SHOWN = 12  # rows of a long table before all are asked for


def sections_of(contents: RunContents, claims: Sequence[Summary]) -> tuple[Section, ...]:
    """All sections, those that have something to say."""
    rows, declarations = contents.findings.rows, contents.declarations
    of = {claim.prediction: [row for row in rows if row.prediction == claim.prediction] for claim in claims}
    blocks = blocks_of(rows)
    sections = [
        Section("What holds", (_claims(claims, declarations),), name="claims"),
        *_map(claims, of, blocks, declarations),
        *(_claim(claim, of[claim.prediction], blocks, declarations) for claim in claims),
        *_tokens(contents.findings.tokens, rows, blocks),
        *_data(rows, blocks),
        Section("Model and text", (Facts(_card(contents)),), folded=True, name="model"),
    ]
    return tuple(sections)


def choices_of(rows: Sequence[Finding]) -> tuple[Choice, ...]:
    """Every block and every head in it, by short names."""
    heads: dict[str, set[int]] = {}
    blocks = blocks_of(rows)
    for row in rows:
        label = blocks[row.layer, row.call]
        if label:
            heads.setdefault(label, set()).update(() if row.head is None else (row.head,))
    return tuple(
        choice
        for label, numbers in heads.items()
        for choice in (
            Choice(label, f"layer {label}"),
            *(Choice(f"{label}/{head}", f"layer {label}, head {head}", label) for head in sorted(numbers)),
        )
    )


# The claims ----------------------------------------------------------------------------------------------------------


def _claims(claims: Sequence[Summary], declarations: Declarations) -> Table:
    columns = (
        Column("claim"), Column("verdict"), Column("measured", "unit"), Column("value"), Column("interval", "95 %"),
        Column("null"), Column("for and against"), Column("what was found"),
    )  # fmt: skip
    rows = [
        (
            Link(claim_of(declarations, claim), claim.prediction),
            chip(claim.verdict),
            measured(claim, declarations),
            known(claim.value),
            interval(claim.low, claim.high) or None,
            known(claim.null),
            f"{claim.supported} and {claim.refuted} of {claim.judged}" if claim.judged else None,
            sentences_of(declarations, claim),
        )
        for claim in claims
    ]
    caption = (
        "The value is that of the middle head or layer unless the words say otherwise, the null the same where the "
        "claim says nothing; for and against it are heads or layers. A dash: there is none, as there is no interval of "
        "what weights alone decide. Each claim leads to its section."
    )
    return Table("claims", "Claims of the theory, and what the model says", columns, tuple(rows), caption, stacked=True)


def judged(claim: Summary, rows: Sequence[Finding]) -> list[Finding]:
    """The rows that the verdict on a claim is about; all that are judged where it has another quantity than they."""
    found = [row for row in rows if row.verdict]
    return [row for row in found if row.quantity == claim.quantity] or found


def measured(claim: Summary, declarations: Declarations) -> str | None:
    """The quantity that was measured, with its unit."""
    unit, _ = unit_and_formula(declarations, claim.prediction, claim.quantity)
    return f"{claim.quantity} [{unit}]" if claim.quantity and unit != "1" else claim.quantity or None


def _claim(claim: Summary, rows: Sequence[Finding], blocks: Labels, declarations: Declarations) -> Section:
    """One claim: what was found, by head and by layer, for each of its quantities, the judged one first."""
    found = judged(claim, rows)
    words = sentences_of(declarations, claim) or "This run has no text for this claim."
    declared = facts_of(declarations, claim.prediction) or {"formula": "not declared in this run"}
    quantities = [q for q in dict.fromkeys(row.quantity for row in (*found, *rows)) if _of(rows, q)]
    views = tuple(View(quantity, _figures(_of(rows, quantity), blocks, declarations)) for quantity in quantities)
    parts: list[Part] = [Text((words,)), Facts({"name": title_of(declarations, claim.prediction), **declared})]
    parts += [Views(claim.prediction, "quantity", views)] if views else []
    found = found or list(rows)
    parts += [_table(claim.prediction, found, blocks)] if found else []
    method = method_of(declarations, claim.prediction)
    parts += [Text(method, "How it is measured")] if method else []
    return Section(
        claim_of(declarations, claim),
        tuple(parts),
        folded=True,
        name=claim.prediction,
        chips=(chip(claim.verdict),),
    )


def _of(rows: Sequence[Finding], quantity: str) -> list[Finding]:
    """The rows of a quantity, if there are two numbers or more to draw."""
    found = [row for row in rows if row.quantity == quantity]
    return found if sum(math.isfinite(row.value) for row in found) > 1 else []


def _figures(rows: Sequence[Finding], blocks: Labels, declarations: Declarations) -> tuple[Figure, ...]:
    labels = labels_of(rows)
    drawn = by_layer(rows, labels, declarations, blocks)
    if all(row.head is None for row in rows):
        return (replace(drawn, wide=True),)
    return (head_map(rows, labels, declarations, blocks), drawn)


def _table(name: str, rows: Sequence[Finding], blocks: Labels) -> Table:
    labels = labels_of(rows)
    several = len({row.quantity for row in rows}) > 1
    columns = (
        Column("layer"), Column("head"), *((Column("quantity"),) if several else ()), Column("value"),
        Column("interval", "95 %"), Column("null"),
        Column("its band", "95 %"), Column("tokens"), Column("verdict"),
    )  # fmt: skip
    cells = [
        (
            labels[row.layer, row.call] or "model", row.head, *((row.quantity,) if several else ()),
            row.value, interval(row.low, row.high) or None, row.null,
            interval(row.null_low, row.null_high) or None, row.tokens, chip(row.verdict) if row.verdict else None,
        )
        for row in rows
    ]  # fmt: skip
    keys = tuple(key_of(row, blocks) for row in rows)
    title = "One by one" if several else f"{rows[0].quantity}, one by one"
    return Table(name, title, columns, tuple(cells), keys=keys, shown=SHOWN)


# The map -------------------------------------------------------------------------------------------------------------


def _map(
    claims: Sequence[Summary], of: Mapping[str, Sequence[Finding]], blocks: Labels, declarations: Declarations
) -> tuple[Section, ...]:
    """Where claims hold: all of them together, and one by one; and beside the map what is said of each place."""
    found = {claim.prediction: judged(claim, of[claim.prediction]) for claim in claims}
    heads = {name: [row for row in rows if row.head is not None] for name, rows in found.items()}
    heads = {name: rows for name, rows in heads.items() if rows}
    if not any(found.values()):
        return ()
    table = _said(found, blocks, declarations)
    if not heads:
        return (Section("Layers", (table,), name="map"),)
    labels = labels_of([row for rows in heads.values() for row in rows])
    views = [View("how many claims hold", (_counts(heads, labels, blocks, declarations),))] if len(heads) > 1 else []
    views += [View(title_of(declarations, name), (verdict_map(rows, labels, blocks),)) for name, rows in heads.items()]
    words = Text(("Choose a head here, by a click or from the list above: every section then speaks of it.",))
    return (Section("Layers and heads", (words, Views("map", "map of", tuple(views), wide=False), table), name="map"),)


def _counts(
    heads: Mapping[str, Sequence[Finding]], labels: Labels, blocks: Labels, declarations: Declarations
) -> Figure:
    """For each head, how many of the claims that judge heads it supports."""
    at: dict[tuple[str, int], list[Finding]] = {}
    for row in (row for rows in heads.values() for row in rows):
        at.setdefault((labels[row.layer, row.call], row.head or 0), []).append(row)
    layers = list(dict.fromkeys(label for label, _ in at))
    width = 1 + max(head for _, head in at)
    places = [[at.get((layer, head)) for head in range(width)] for layer in layers]
    values = [[None if p is None else sum(row.verdict == "supported" for row in p) for p in line] for line in places]
    titles = {name: title_of(declarations, name) for name in heads}
    hover = [
        [
            "" if p is None else "\n".join([
                f"layer {layers[i]}, head {j}",
                *(f"{titles[row.prediction]}: {row.verdict}, {numbers(row)}, {null_of(row)}" for row in p),
            ])
            for j, p in enumerate(line)
        ]
        for i, line in enumerate(places)
    ]  # fmt: skip
    keys = [["" if p is None else key_of(p[0], blocks) for p in line] for line in places]
    heat = Heat("claims", range(width), range(len(layers)), values, hover, keys=keys)
    return Figure(
        "map of claims",
        "How many claims each head supports",
        Axis("head", "number"),
        Axis("layer", "number", names=tuple(layers)),
        (heat,),
        f"Of {len(heads)} that judge heads: {', '.join(titles.values())}.",
    )


def _said(found: Mapping[str, Sequence[Finding]], blocks: Labels, declarations: Declarations) -> Table:
    """All that is judged, place by place."""
    columns = (
        Column("layer"), Column("head"), Column("claim"), Column("verdict"), Column("value"), Column("null"),
    )  # fmt: skip
    order = {block: i for i, block in enumerate(dict.fromkeys(blocks.values()))}
    titles = {name: title_of(declarations, name) for name in found}
    rows = [row for of in found.values() for row in of]
    rows.sort(key=lambda r: (order[blocks[r.layer, r.call]], -1 if r.head is None else r.head))
    cells = [
        (
            blocks[r.layer, r.call] or "model", r.head, Link(titles[r.prediction], r.prediction), chip(r.verdict),
            r.value, r.null,
        )
        for r in rows
    ]  # fmt: skip
    keys = [key_of(row, blocks) for row in rows]
    return Table("places", "What is judged there", columns, tuple(cells), keys=tuple(keys), shown=SHOWN, wide=False)


# Tokens, data, model -------------------------------------------------------------------------------------------------


def _tokens(tokens: Sequence[Token], rows: Sequence[Finding], blocks: Labels) -> tuple[Section, ...]:
    """The tokens that stand out, in their text."""
    if not tokens:
        return ()
    columns = (
        Column("what"), Column("layer"), Column("head"), Column("value"), Column("text about the [token]"),
        Column("document"), Column("position"),
    )  # fmt: skip
    labels = labels_of([row for row in rows if row.head is not None] or rows)
    cells: list[tuple[Cell, ...]] = []
    keys = []
    for t in tokens:
        label = labels.get((t.layer, t.call), t.layer)
        cells.append((t.kind, label, t.head, t.value, t.text, t.document, t.position))
        block = blocks.get((t.layer, t.call), t.layer)
        keys.append(block if t.head is None else f"{block}/{t.head}")
    table = Table("tokens", "Tokens that stand out", columns, tuple(cells), keys=tuple(keys), shown=SHOWN)
    return (Section("Tokens of interest", (table,), folded=True, name="tokens"),)


def _data(rows: Sequence[Finding], blocks: Labels) -> tuple[Section, ...]:
    """Every row, to be taken along."""
    if not rows:
        return ()
    columns = tuple(Column(name.replace("_", " ")) for name in Finding._fields[1:])
    cells = tuple(tuple(row[1:]) for row in rows)
    keys = tuple(key_of(row, blocks) for row in rows)
    table = Table("rows", f"All {len(rows):,} rows", columns, cells, keys=keys, shown=SHOWN)
    return (Section("Data", (table,), folded=True, name="data"),)


def _card(contents: RunContents) -> dict[str, str]:
    """All that is known of the model and of what it read."""
    run = contents.run
    facts: dict[str, Any] = {"model": contents.name, **contents.facts}
    facts |= {"text": run.text.get("source"), "tokens of a window": run.text.get("length")} if run.text else {}
    facts |= {f"seconds for the {name}": f"{value:.1f}" for name, value in run.times.items() if _is_number(value)}
    return {name.replace("_", " "): _shown(value) for name, value in facts.items() if value not in (None, "", [])}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
