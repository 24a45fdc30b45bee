"""The sections of the page of one run.

Read next: findings_page.py (the page), findings_figures.py (the figures).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import dedent
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
from ..probing.runs.records import BEYOND, PREDICTED, TESTED, Declaration, Finding, Summary, Token
from .findings_figures import (
    Labels,
    blocks_of,
    by_layer,
    head_map,
    joined,
    key_of,
    label_of,
    labels_of,
    layer_name,
    null_text,
    value_text,
    verdict_map,
)
from .findings_wording import (
    Declarations,
    chip,
    claim_of,
    facts_of,
    graded_groups,
    kind_of,
    method_of,
    quantity_label,
    sentences_of,
    title_of,
    unit_and_formula,
)
from .formatting import interval, known
from .run_contents import RunContents

SHOWN = 12  # rows of a long table before it is expanded
BOUNDS = 10  # steps of the table on the sensitivity to the bound
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w|\.\d)")  # in a condition of a claim


def sections_of(contents: RunContents, claims: Sequence[Summary]) -> tuple[Section, ...]:
    """All sections of the page that are not empty."""
    rows, declarations = contents.findings.rows, contents.declarations
    by_claim = {claim.prediction: [row for row in rows if row.prediction == claim.prediction] for claim in claims}
    blocks = blocks_of(rows)
    sections = [
        Section("Results", (_claims(claims, declarations),), name="claims"),
        *_map(claims, by_claim, blocks, declarations),
        *(_claim(claim, by_claim[claim.prediction], blocks, declarations) for claim in claims),
        *_tokens(contents.findings.tokens, rows, blocks),
        *_data(rows, blocks, declarations),
        Section("Model and text", (Facts(_card(contents)),), folded=True, name="model"),
    ]
    return tuple(sections)


def choices_of(rows: Sequence[Finding]) -> tuple[Choice, ...]:
    """Every block and every head in it, by its short name."""
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
            Choice(label, layer_name(label)),
            *(Choice(f"{label}/{head}", f"{layer_name(label)}, head {head}", label) for head in sorted(numbers)),
        )
    )


# Claims --------------------------------------------------------------------------------------------------------------

CAPTION = (
    "Value: the statistic of the model, for most claims a median over heads or layers. Null: the same statistic under "
    "the null model. Support / refute: number of heads or layers that support and refute the claim, of all that were "
    "tested, at FDR 5 % where the statistic has a confidence interval. –: not available; statistics of weights alone "
    "have no confidence interval. Each claim links to its section."
)


def _claims(claims: Sequence[Summary], declarations: Declarations) -> Table:
    columns = (
        Column("claim"), Column("kind"), Column("verdict"), Column("statistic", "unit"), Column("value"),
        Column("95 % CI"), Column("null"), Column("support / refute"),
    )  # fmt: skip
    rows = [
        (
            Link(title_of(declarations, claim.prediction), claim.prediction),
            kind_of(declarations, claim.prediction),
            chip(claim.verdict),
            statistic(claim, declarations),
            known(claim.value),
            interval(claim.low, claim.high) or None,
            known(claim.null),
            counts(claim, declarations),
        )
        for _, _, group in graded_groups(declarations, claims)
        for claim in group
    ]
    return Table("claims", "Claims by kind and verdict", columns, tuple(rows), CAPTION, stacked=True)


def judged(claim: Summary, rows: Sequence[Finding]) -> list[Finding]:
    """Rows that decide or describe a claim: those of its quantity that have a verdict, else all that have one."""
    decided = [row for row in rows if row.verdict]
    return [row for row in decided if row.quantity == claim.quantity] or decided


def statistic(claim: Summary, declarations: Declarations) -> str | None:
    """Name of the statistic of a claim, with its unit."""
    declared = _declared(claim, declarations)
    name = quantity_label(declarations, claim.prediction, claim.quantity) if declared is None else declared.statistic
    unit, _ = unit_and_formula(declarations, claim.prediction, claim.quantity)
    return f"{name} [{unit}]" if claim.quantity and unit != "1" else name or None


def counts(claim: Summary, declarations: Declarations) -> str | None:
    """Numbers of heads or layers that support and refute a claim, of all that were tested; None if none was."""
    if not claim.judged:
        return None
    counts = "" if claim.verdict == "described" else f"{claim.supported} / {claim.refuted} of "
    return f"{counts}{_tested(claim, declarations)}"


def _declared(claim: Summary, declarations: Declarations) -> Declaration | None:
    """Declaration with a named statistic; None for runs of earlier formats, which have no names."""
    declared = declarations.get(claim.prediction)
    default = Declaration._field_defaults["statistic"]
    return None if declared is None or declared.statistic == default else declared


def _tested(claim: Summary, declarations: Declarations) -> str:
    """Number of the heads or layers that were tested, "72 heads"."""
    declared = _declared(claim, declarations)
    unit = "" if declared is None or not declared.unit else f" {declared.unit}{'s' if claim.judged != 1 else ''}"
    return f"{claim.judged}{unit}"


def _claim(claim: Summary, rows: Sequence[Finding], blocks: Labels, declarations: Declarations) -> Section:
    """One claim: its result, then each of its quantities by head and by layer, the decisive one first."""
    decisive = judged(claim, rows)
    words = sentences_of(declarations, claim) or "The run contains no summary of this claim."
    quantities = [q for q in dict.fromkeys(row.quantity for row in (*decisive, *rows)) if _drawable(rows, q)]
    views = tuple(
        View(
            quantity_label(declarations, claim.prediction, quantity),
            _figures(_drawable(rows, quantity), blocks, declarations, _null_name(claim, quantity, declarations)),
        )
        for quantity in quantities
    )
    parts: list[Part] = [Text((words,)), Facts(_definition(claim, declarations))]
    parts += [Views(claim.prediction, "quantity", views)] if views else []
    parts += _sensitivity(claim, decisive, declarations)
    listed = decisive or list(rows)
    parts += [_table(claim.prediction, listed, blocks, declarations)] if listed else []
    method = method_of(declarations, claim.prediction)
    parts += [Text(tuple(map(dedent, method)), "Method")] if method else []
    return Section(
        claim_of(declarations, claim),
        tuple(parts),
        folded=True,
        name=claim.prediction,
        chips=(chip(claim.verdict),),
    )


def _sensitivity(claim: Summary, rows: Sequence[Finding], declarations: Declarations) -> list[Part]:
    """Table of the number of heads or layers beyond other bounds than the declared ones; none if nothing is tested."""
    values = [row.value for row in rows if row.verdict in TESTED and math.isfinite(row.value)]
    if len(set(values)) < 2 or claim.verdict not in TESTED:
        return []
    low, high = min(values), max(values)
    declared = declarations.get(claim.prediction)
    stated = {float(n) for n in NUMBER.findall(f"{declared.supports} {declared.refutes}")} if declared else set()
    multiples = {sign * share * b for b in stated for share in (0.5, 1.0, 2.0) for sign in (-1, 1)}
    bounds = sorted(
        {low + (high - low) * i / BOUNDS for i in range(BOUNDS + 1)} | {b for b in multiples if low < b < high}
    )
    ends = [
        (row.value, row.value) if math.isnan(row.low) else (row.low, row.high) for row in rows if row.verdict in TESTED
    ]
    cells = tuple((b, sum(e[0] > b for e in ends), sum(e[1] < b for e in ends)) for b in bounds)
    noun = "rows" if declared is None or not declared.unit else f"{declared.unit}s"
    columns = (Column("bound"), Column(f"{noun} above"), Column(f"{noun} below"))
    caption = (
        f"Number of {noun} whose 95 % confidence interval lies above or below a bound on the value, for bounds over "
        f"the range of the values, and for half, once and twice those of the claim; the rest of the {len(ends)} "
        "overlap it. Without correction for multiple tests."
    )
    return [Table(f"{claim.prediction} bounds", "sensitivity to the bound", columns, cells, caption, wide=False)]


def _definition(claim: Summary, declarations: Declarations) -> dict[str, str]:
    """Short name, statistic, null, definition, conditions and decision rule of a claim."""
    facts = {"short name": title_of(declarations, claim.prediction)}
    declared = _declared(claim, declarations)
    if declared is not None:
        tested = f", of {_tested(claim, declarations)}" if claim.judged and declared.unit else ""
        facts["statistic"] = f"{statistic(claim, declarations)}{tested}"
        facts |= {} if math.isnan(claim.null) else {"null": declared.null}
    return facts | (facts_of(declarations, claim.prediction) or {"definition": "not declared in this run"})


def _null_name(claim: Summary, quantity: str, declarations: Declarations) -> str:
    """Name of the null of a quantity: that of the claim for its own quantity, else "null"."""
    declared = _declared(claim, declarations)
    return declared.null if declared is not None and quantity == claim.quantity else "null"


def _drawable(rows: Sequence[Finding], quantity: str) -> list[Finding]:
    """Rows of a quantity; none if fewer than two have a value."""
    selected = [row for row in rows if row.quantity == quantity]
    return selected if sum(math.isfinite(row.value) for row in selected) > 1 else []


def _figures(rows: Sequence[Finding], blocks: Labels, declarations: Declarations, null_name: str) -> tuple[Figure, ...]:
    labels = labels_of(rows)
    layers = by_layer(rows, labels, declarations, blocks, null_name)
    if all(row.head is None for row in rows):
        return (replace(layers, wide=True),)
    return (head_map(rows, labels, declarations, blocks), layers)


def _table(name: str, rows: Sequence[Finding], blocks: Labels, declarations: Declarations) -> Table:
    labels = labels_of(rows)
    several = len({row.quantity for row in rows}) > 1
    columns = (
        Column("layer"), Column("head"), *((Column("quantity"),) if several else ()), Column("value"),
        Column("95 % CI"), Column("null"), Column("95 % band of the null"), Column("tokens"), Column("verdict"),
    )  # fmt: skip
    cells = [
        (
            labels[row.layer, row.call] or "model", row.head, *((label_of(row, declarations),) if several else ()),
            row.value, interval(row.low, row.high) or None, row.null,
            interval(row.null_low, row.null_high) or None, row.tokens or None,
            chip(row.verdict) if row.verdict else None,
        )
        for row in rows
    ]  # fmt: skip
    keys = tuple(key_of(row, blocks) for row in rows)
    title = "table of values" if several else f"{label_of(rows[0], declarations)}, table of values"
    return Table(name, title, columns, tuple(cells), keys=keys, shown=SHOWN)


# The map -------------------------------------------------------------------------------------------------------------


def _map(
    claims: Sequence[Summary], by_claim: Mapping[str, Sequence[Finding]], blocks: Labels, declarations: Declarations
) -> tuple[Section, ...]:
    """Heat maps of the number of supported predictions and of each verdict, and a table of the verdicts.

    Descriptive claims and self-checks have no verdicts on heads that could support the theory and are left out.
    """
    tested = [claim for claim in claims if kind_of(declarations, claim.prediction) in (PREDICTED, BEYOND)]
    decisive = {claim.prediction: judged(claim, by_claim[claim.prediction]) for claim in tested}
    heads = {name: [row for row in rows if row.head is not None] for name, rows in decisive.items()}
    heads = {name: rows for name, rows in heads.items() if rows}
    if not any(decisive.values()):
        return ()
    table = _verdicts(decisive, blocks, declarations)
    if not heads:
        return (Section("Layers", (table,), name="map"),)
    labels = labels_of([row for rows in heads.values() for row in rows])
    predicted = {name: rows for name, rows in heads.items() if kind_of(declarations, name) == PREDICTED}
    views = []
    if len(predicted) > 1:
        views.append(View("number of supported predictions", (_support(predicted, labels, blocks, declarations),)))
    for name, rows in heads.items():
        correction = declarations[name].correction if name in declarations else ""
        views.append(View(title_of(declarations, name), (verdict_map(rows, labels, declarations, blocks, correction),)))
    words = Text(("Click a head, or choose one from the list above, to filter every section.",))
    return (Section("Layers and heads", (words, Views("map", "map of", tuple(views), wide=False), table), name="map"),)


def _support(
    heads: Mapping[str, Sequence[Finding]], labels: Labels, blocks: Labels, declarations: Declarations
) -> Figure:
    """Heat map of the number of predictions that each head supports."""
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
                f"{layer_name(layers[i])}, head {j}",
                *(f"{titles[r.prediction]}: {joined(r.verdict, value_text(r), null_text(r))}" for r in p),
            ])
            for j, p in enumerate(line)
        ]
        for i, line in enumerate(places)
    ]  # fmt: skip
    keys = [["" if p is None else key_of(p[0], blocks) for p in line] for line in places]
    heat = Heat("claims", range(width), range(len(layers)), values, hover, keys=keys)
    return Figure(
        "map of claims",
        "number of predictions that each head supports",
        Axis("head", "number"),
        Axis("layer", "number", names=tuple(layers)),
        (heat,),
        f"Colour: number of supported predictions among the {len(heads)} that are tested head by head: "
        f"{', '.join(titles.values())}. n = {len(at)} heads.",
    )


def _verdicts(decisive: Mapping[str, Sequence[Finding]], blocks: Labels, declarations: Declarations) -> Table:
    """Table of all verdicts on heads and layers."""
    columns = (
        Column("layer"), Column("head"), Column("claim"), Column("verdict"), Column("value"), Column("null"),
    )  # fmt: skip
    order = {block: i for i, block in enumerate(dict.fromkeys(blocks.values()))}
    titles = {name: title_of(declarations, name) for name in decisive}
    rows = [row for each in decisive.values() for row in each]
    rows.sort(key=lambda r: (order[blocks[r.layer, r.call]], -1 if r.head is None else r.head))
    cells = [
        (
            blocks[r.layer, r.call] or "model", r.head, Link(titles[r.prediction], r.prediction), chip(r.verdict),
            r.value, r.null,
        )
        for r in rows
    ]  # fmt: skip
    keys = [key_of(row, blocks) for row in rows]
    caption = "Head –: the verdict is on the whole layer, or on the model."
    title = "verdicts by layer and head"
    return Table("places", title, columns, tuple(cells), caption, tuple(keys), shown=SHOWN, wide=False)


# Tokens, data, model -------------------------------------------------------------------------------------------------

# Names of facts, for readers; others are shown as they are.
LABELS = {
    "heads": "heads per layer",
    "vocabulary": "vocabulary size",
    "format": "format of the weights",
    "dequantised": "weights dequantised",
    "reads": "input",
    "context": "context length [tokens]",
    "tokens": "tokens read",
    "documents": "documents read",
    "effective_documents": "effective number of documents (Kish)",
    "groups": "groups of documents",
    "fingerprint": "fingerprint of the documents",
    "synthetic_text": "synthetic text",
    "matched": "matched baseline",
    "without_matched": "no matched baseline",
    "twin": "random-weights baseline",  # of earlier versions; plain-words: ok
    "without_twin": "no random-weights baseline",  # of earlier versions; plain-words: ok
    "baseline": "random-weights baseline",
    "without_baseline": "no random-weights baseline",
}


def _tokens(tokens: Sequence[Token], rows: Sequence[Finding], blocks: Labels) -> tuple[Section, ...]:
    """Table of extreme tokens with their context."""
    if not tokens:
        return ()
    columns = (
        Column("selected for"), Column("layer"), Column("head"), Column("value"), Column("context of the [token]"),
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
    caption = (
        "Tokens with extreme values, in brackets within their context. Largest variance: trace of the covariance of "
        "the attended values. Position: index of the token in its document."
    )
    table = Table("tokens", "extreme tokens", columns, tuple(cells), caption, tuple(keys), shown=SHOWN)
    return (Section("Tokens of interest", (table,), folded=True, name="tokens"),)


def _data(rows: Sequence[Finding], blocks: Labels, declarations: Declarations) -> tuple[Section, ...]:
    """Table of every row of the run."""
    if not rows:
        return ()
    columns = (Column("claim"), *(Column(name.replace("_", " ")) for name in Finding._fields[2:]))
    titles = {name: title_of(declarations, name) for name in {row.prediction for row in rows}}
    cells = tuple((titles[row.prediction], *row._replace(quantity=label_of(row, declarations))[2:]) for row in rows)
    keys = tuple(key_of(row, blocks) for row in rows)
    caption = (
        "low and high: ends of the 95 % confidence interval; null low and null high: ends of the 95 % band of the "
        "null; freedom and null freedom: degrees of freedom of both; call: index of the call, if the model uses the "
        "layer several times; head –: the whole layer; layer empty: the model."
    )
    table = Table("rows", f"all {len(rows):,} rows", columns, cells, caption, keys, shown=SHOWN)
    return (Section("Data", (table,), folded=True, name="data"),)


def _card(contents: RunContents) -> dict[str, str]:
    """Names and values of the facts on the model and its text."""
    run = contents.run
    facts: dict[str, Any] = {"model": contents.name, **contents.facts}
    facts |= {"text": run.text.get("source"), "window length [tokens]": run.text.get("length")} if run.text else {}
    facts |= {f"time, {LABELS.get(name, name)} [s]": f"{t:.1f}" for name, t in run.times.items() if _is_number(t)}
    return {
        LABELS.get(name, name.replace("_", " ")): _shown(value)
        for name, value in facts.items()
        if value not in (None, "", [])
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
