"""The comparison page of several runs: models, or checkpoints of one training run.

The training step of a run is the entry "step" of its metadata, or a number in the name of its model or folder
("step1000", "checkpoint-500"), or one at the end of names that are otherwise equal. If every run has a step, runs are
ordered by it and figures have it as their axis; otherwise runs keep the order of the arguments.

Read next: findings_page.py (one run), comparison_figures.py (the figures), ../probing/runs/differences.py.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from .. import __version__
from .._errors import InputValueError
from ..page import (
    Axis,
    Cell,
    Chip,
    Choice,
    Column,
    Facts,
    Group,
    Link,
    Page,
    Part,
    Section,
    Table,
    VerdictBanner,
    View,
    Views,
)
from ..probing.inside.training_step import step_in
from ..probing.runs.differences import Difference, differences_of_claims, differences_of_rows
from ..probing.runs.findings_file import plain_record
from ..probing.runs.records import Finding, Summary
from .citations import cited
from .comparison_figures import ClaimValue, RunSeries, by_depth, changes, claim_values, over_heads, over_runs
from .findings_figures import Labels, blocks_of, key_of, labels_of
from .findings_page import GUIDE, rendered
from .findings_sections import SHOWN, choices_of, counts, judged, statistic
from .findings_wording import (
    Declarations,
    by_agreement,
    chip,
    claim_of,
    facts_of,
    keys_cited,
    kind_of,
    quantity_label,
    sentences_of,
    title_of,
    unit_and_formula,
)
from .formatting import STYLES, digits, interval, known, p_value
from .run_contents import RunContents, Source, contents_of

# Terms of this page beyond those of the page of one run.
TRENDS = {
    "figures": (
        "Trends: value of each claim; bars: 95 % confidence interval; grey: null. In the sections of claims, points "
        "and lines: median over heads or layers; bars: interquartile range over heads or layers, not confidence "
        "intervals."
    ),
    "change": "Value of a run minus that of the first run; of heads and layers, last run minus first.",
    "paired": (
        "Both runs read the same documents: the confidence interval is that of the differences in the same bootstrap "
        "samples or jackknife groups of documents. Otherwise it combines the intervals of both runs as if their "
        "documents were independent, and is wider."
    ),
    "significant": "A difference whose p-value is rejected at FDR 5 %, over all claims or over all heads of a claim.",
}


class Runs(NamedTuple):
    """The runs to compare, under distinct names, with their training steps if all have one."""

    contents: tuple[RunContents, ...]
    names: tuple[str, ...]
    steps: tuple[float, ...] | None
    claims: tuple[dict[str, Summary], ...]
    blocks: tuple[Labels, ...]

    @property
    def declarations(self) -> Declarations:
        """Declaration of each prediction, from the first run that has it."""
        return {name: each for run in reversed(self.contents) for name, each in run.declarations.items()}

    @property
    def differences(self) -> dict[str, Difference]:
        """Difference of the last run from the first, by prediction."""
        return differences_of_claims(self.contents[0].findings, self.contents[-1].findings)

    @property
    def predictions(self) -> list[str]:
        """Names of all predictions that any run measured, in order of first occurrence."""
        return list(dict.fromkeys(name for claims in self.claims for name in claims))

    def rows(self, prediction: str, quantity: str | None = None) -> list[list[Finding]]:
        """Rows of a prediction in each run; only those of `quantity` if it is not None."""
        return [
            [r for r in run.findings.rows if r.prediction == prediction and quantity in (None, r.quantity)]
            for run in self.contents
        ]


def compare(sources: Sequence[Source]) -> str:
    """HTML of the page that compares several runs, one self-contained file.

    Needs jinja2 and plotly, the extra [report].

    Args:
        sources: two or more run folders or findings.
    """
    return rendered(page_of_runs(read_all(sources)), "compare")


def read_all(sources: Sequence[Source]) -> Runs:
    """Read the runs, ordered by training step if all have one."""
    if isinstance(sources, str) or len(sources) < 2:
        count = "one name" if isinstance(sources, str) else len(sources)
        remedy = "Use gradlogz report for a single run."
        raise InputValueError("compare", "sources", f"sources must name two runs or more, got {count}", remedy)
    runs = [contents_of(source, "compare") for source in sources]
    steps = [step for step in map(_step, runs) if step is not None] or _numbered(runs)
    if len(set(steps)) == len(runs):
        runs = [each for _, each in sorted(zip(steps, runs, strict=True), key=lambda pair: pair[0])]
    ordered = tuple(sorted(steps)) if len(set(steps)) == len(runs) else None
    claims = tuple({s.prediction: s for s in each.findings.summary()} for each in runs)
    blocks = tuple(blocks_of(each.findings.rows) for each in runs)
    return Runs(tuple(runs), _names(runs, ordered), ordered, claims, blocks)


def _step(run: RunContents) -> float | None:
    """Training step of a checkpoint, from its metadata, its name or its folder; None if unknown."""
    step = run.facts.get("step")
    if isinstance(step, int | float) and not isinstance(step, bool):
        return float(step)
    named = (step_in(name) for name in (run.name, run.folder))
    return next((float(step) for step in named if step is not None), None)


def _numbered(runs: Sequence[RunContents]) -> list[float]:
    """Training steps if the names of all models, or of all folders, differ in a number at their end only: net-100."""
    for names in ([run.name for run in runs], [run.folder for run in runs]):
        parts = [re.fullmatch(r"(.*)[-@](\d+)", name) for name in names]
        if all(parts) and len({part[1] for part in parts if part}) == 1:
            return [float(part[2]) for part in parts if part]
    return []


def _names(runs: Sequence[RunContents], steps: Sequence[float] | None) -> tuple[str, ...]:
    """Distinct names: those of the models, else of the folders, else numbered."""
    for names in ([run.name for run in runs], [run.folder for run in runs]):
        if len(set(names)) == len(runs) and all(names):
            return tuple(names)
    if steps is not None:
        return tuple(f"{run.name}, step {step:g}" for run, step in zip(runs, steps, strict=True))
    return tuple(f"{run.name} ({i})" for i, run in enumerate(runs, 1))


def page_of_runs(runs: Runs) -> Page:
    """Comparison page of several runs, as data."""
    different, same, described, untested = by_agreement(runs.claims)
    groups = (
        Group(Chip(f"{len(different)} different", colour="blue"), _entries(runs, different)),
        Group(Chip(f"{len(same)} the same in all runs", colour="grey"), _entries(runs, same)),
        Group(Chip(f"{len(described)} descriptions and self-checks", colour="grey"), _entries(runs, described)),
        Group(Chip(f"{len(untested)} not tested in all runs", colour="grey"), _entries(runs, untested)),
    )
    notes = [f"{name}: {note}" for name, each in zip(runs.names, runs.contents, strict=True) for note in each.run.notes]
    kind = "checkpoints" if runs.steps else "runs"
    alike = _alike(runs)
    return Page(
        name="gradlogz-compare",
        title=f"Comparison of {len(runs.contents)} {kind}",
        subtitle=", ".join(runs.names) + ".",
        verdict=VerdictBanner(
            f"{_sentence(len(same), len(same) + len(different))}{_changed_values(runs)}",
            notes=tuple(notes),
            groups=tuple(group for group in groups if group.entries),
        ),
        sections=(
            Section("Results by run", (_claims(runs),), name="claims"),
            *_differences(runs),
            *_trends(runs, [*different, *same, *described, *untested]),
            *(_claim(runs, prediction, alike) for prediction in runs.predictions),
            Section("Runs", (_described(runs),), name="runs"),
        ),
        guide=GUIDE | TRENDS,
        methods=(
            "Every run was measured and tested separately; its own page describes the methods. A difference between "
            "the verdicts on two runs is not itself a test of the difference; the table of differences is.",
            "Bootstrap samples and jackknife groups depend on the names of documents alone. If two runs read the same "
            "documents, the difference of their values is computed in every replicate, and its 95 % confidence "
            "interval is that of these differences. Otherwise, or if a run of an earlier version has no replicates, "
            "the interval of d = v − u is d − √((v − v_low)² + (u_high − u)²) to d + √((v_high − v)² + (u − u_low)²) "
            "[zou08]. p-values invert the interval by Student's t distribution. Heads are tested at FDR 5 % within a "
            "claim, claims at FDR 5 % over all claims (Benjamini–Hochberg).",
            _order(runs),
        ),
        reproduce={
            "version": f"gradlogz {__version__}",
            **{name: each.run.command or "unknown" for name, each in zip(runs.names, runs.contents, strict=True)},
        },
        references=cited([*keys_cited(runs.declarations, runs.predictions), "zou08"]),
        data=_data(runs),
        made_by="gradlogz compare",
        choices=alike,
        chosen="layer or head",
    )


def _entries(runs: Runs, predictions: Sequence[str]) -> tuple[tuple[Link, str], ...]:
    """A link to each claim, with the verdict of each run."""
    return tuple(
        (Link(title_of(runs.declarations, prediction), prediction), verdicts_of(runs, prediction))
        for prediction in predictions
    )


def verdicts_of(runs: Runs, prediction: str) -> str:
    """Verdicts in the order of the runs, "refuted (step 10), supported (steps 20 to 40)"; one word if all agree."""
    summaries = [claims.get(prediction) for claims in runs.claims]
    words = ["not tested" if claim is None else claim.verdict or "no verdict" for claim in summaries]
    if len(set(words)) == 1:
        return words[0]
    if runs.steps is None:
        named = {word: [n for n, w in zip(runs.names, words, strict=True) if w == word] for word in words}
        return ", ".join(f"{word} ({', '.join(names)})" for word, names in named.items())
    parts = [
        (word, [f"{step:g}" for _, step in pairs])
        for word, pairs in groupby(zip(words, runs.steps, strict=True), itemgetter(0))
    ]
    return ", ".join(
        f"{word} ({f'step {steps[0]}' if len(steps) == 1 else f'steps {steps[0]} to {steps[-1]}'})"
        for word, steps in parts
    )


def _sentence(same: int, common: int) -> str:
    if not common:
        return "No claim was tested in every run."
    claims = "1 claim was" if common == 1 else f"{common} claims were"
    return f"{claims} tested in every run; the verdict on {same} of {common} is the same in all runs."


def _changed_values(runs: Runs) -> str:
    """Sentence on the values that differ significantly between the first run and the last."""
    tested = [d for d in runs.differences.values() if not math.isnan(d.p)]
    if not tested:
        return ""
    pairing = "paired over the same documents" if all(d.paired for d in tested) else "not all paired"
    count = sum(d.significant for d in tested)
    return (
        f" {count} of {len(tested)} values with a confidence interval differ significantly between {runs.names[0]} and "
        f"{runs.names[-1]} (FDR 5 %, {pairing})."
    )


def _order(runs: Runs) -> str:
    if runs.steps is None:
        return "Runs are in the order of the arguments, because not every run has a training step."
    return "Runs are ordered by training step, read from their metadata, names or folders."


def _alike(runs: Runs) -> tuple[Choice, ...]:
    """Layers and heads to select from; empty unless all runs have the same ones."""
    every = [choices_of(each.findings.rows) for each in runs.contents]
    return every[0] if all({c.key for c in each} == {c.key for c in every[0]} for each in every) else ()


# Sections ------------------------------------------------------------------------------------------------------------


def _claims(runs: Runs) -> Table:
    columns = (Column("claim"), Column("kind"), *(Column(name) for name in runs.names))
    rows = []
    for prediction in runs.predictions:
        summaries = [claims.get(prediction) for claims in runs.claims]
        words = claim_of(runs.declarations, next(claim for claim in summaries if claim is not None))
        kind = kind_of(runs.declarations, prediction)
        rows.append((Link(words, prediction), kind, *(_cell(claim) for claim in summaries)))
    caption = (
        "Verdict and value of the statistic, for most claims a median over heads or layers. –: not tested. Each claim "
        "links to its section."
    )
    return Table("claims", "Claims by run", columns, tuple(rows), caption, stacked=True)


def _differences(runs: Runs) -> tuple[Section, ...]:
    """The differences of every run from the first, claim by claim."""
    first, *others = (each.findings for each in runs.contents)
    rows: list[tuple[Cell, ...]] = []
    for name, other in zip(runs.names[1:], others, strict=True):
        for prediction, d in differences_of_claims(first, other).items():
            title = Link(title_of(runs.declarations, prediction), prediction)
            rows.append((title, *((name,) if len(others) > 1 else ()), *_difference_cells(d), _verdict_change(d)))
    if not rows:
        return ()
    columns = (
        Column("claim"), *((Column("run"),) if len(others) > 1 else ()), Column("first run"), Column("change"),
        Column("95 % CI"), Column("p"), Column("FDR 5 %"), Column("documents"), Column("verdict"),
    )  # fmt: skip
    last = runs.names[-1] if len(others) == 1 else "each run"
    caption = (
        f"Change: {last} minus {runs.names[0]}, in the unit of the claim's statistic. Without a CI: a quantity of the "
        "weights alone, or one whose interval is unknown."
    )
    table = Table("differences", "Differences of the claims' values", columns, tuple(rows), caption, stacked=True)
    return (Section("Differences between runs", (table,), name="differences"),)


def _difference_cells(d: Difference) -> tuple[Cell, ...]:
    """First value, change, confidence interval, p-value, significance and pairing of a difference."""
    tested = not math.isnan(d.p)
    significance = Chip("significant", colour="blue") if d.significant else "no" if tested else None
    pairing = ("paired" if d.paired else "not paired") if tested else None
    p = p_value(d.p) or None
    return known(d.first), known(d.value), interval(d.low, d.high) or None, p, significance, pairing


def _verdict_change(d: Difference) -> Cell:
    before, after = (verdict or "no verdict" for verdict in d.verdicts)
    return before if before == after else f"{before} → {after}"


def _trends(runs: Runs, predictions: Sequence[str]) -> tuple[Section, ...]:
    """The statistic of each claim over all runs, one claim at a time."""
    views = []
    for prediction in predictions:
        first = next(claims[prediction] for claims in runs.claims if prediction in claims)
        values = [
            ClaimValue(runs.names[i], i, None if runs.steps is None else runs.steps[i], claims[prediction])
            for i, claims in enumerate(runs.claims)
            if prediction in claims and math.isfinite(claims[prediction].value)
        ]
        if len(values) > 1:
            label = quantity_label(runs.declarations, prediction, first.quantity)
            unit, _ = unit_and_formula(runs.declarations, prediction, first.quantity)
            figure = claim_values(values, claim_of(runs.declarations, first), Axis(label, unit))
            views.append(View(f"{title_of(runs.declarations, prediction)}: {label}", (figure,)))
    title = "Trends over training" if runs.steps else "Comparison of runs"
    return (Section(title, (Views("trends", "claim", tuple(views)),), name="trends"),) if views else ()


def _cell(claim: Summary | None) -> Cell:
    if claim is None:
        return None
    number = "" if math.isnan(claim.value) else f" {digits(claim.value)}"
    return Chip(f"{claim.verdict or 'no verdict'}{number}", STYLES[claim.verdict].status)


def _claim(runs: Runs, prediction: str, alike: tuple[Choice, ...]) -> Section:
    """One claim in all runs: median by run, by depth, and head by head if all runs have the same heads."""
    summaries = [claims.get(prediction) for claims in runs.claims]
    first = next(claim for claim in summaries if claim is not None)
    rows = runs.rows(prediction)
    quantities = list(dict.fromkeys([first.quantity, *(row.quantity for each in rows for row in each)]))
    views = []
    for quantity in quantities:
        series = _series(runs, prediction, quantity)
        if len(series) > 0:
            heads = alike and len(series) > 1 and quantity == first.quantity
            figures = (over_runs(series), by_depth(series), *((*over_heads(series), *changes(series)) if heads else ()))
            views.append(View(quantity_label(runs.declarations, prediction, quantity), figures))
    declared = facts_of(runs.declarations, prediction)
    parts: list[Part] = [Facts(declared)] if declared else []
    parts += [Views(prediction, "quantity", tuple(views))] if views else []
    parts.append(_values(runs, prediction, summaries))
    table = _heads(runs, prediction, first) if alike else None
    parts += [table] if table is not None else []
    verdicts = Counter(claim.verdict for claim in summaries if claim is not None)
    chips = tuple(chip(verdict, count) for verdict, count in verdicts.items())
    return Section(claim_of(runs.declarations, first), tuple(parts), folded=True, name=prediction, chips=chips)


def _series(runs: Runs, prediction: str, quantity: str) -> list[RunSeries]:
    """The rows of a quantity in each run that has a finite value of it."""
    series = []
    for i, rows in enumerate(runs.rows(prediction, quantity)):
        valued = tuple(row for row in rows if math.isfinite(row.value))
        if valued:
            step = None if runs.steps is None else runs.steps[i]
            declared = unit_and_formula(runs.declarations, prediction, quantity)
            label = quantity_label(runs.declarations, prediction, quantity)
            layers, blocks = labels_of(rows), runs.blocks[i]
            series.append(RunSeries(runs.names[i], i, step, valued, layers, blocks, declared, label))
    return series


def _values(runs: Runs, prediction: str, summaries: Sequence[Summary | None]) -> Table:
    columns = (
        Column("run"), *((Column("step"),) if runs.steps else ()), Column("verdict"), Column("statistic", "unit"),
        Column("value"), Column("95 % CI"), Column("null"), Column("support / refute"), Column("result"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for i, (name, claim) in enumerate(zip(runs.names, summaries, strict=True)):
        step = (runs.steps[i],) if runs.steps else ()
        if claim is None:
            rows.append((name, *step, Chip("not tested", "silent"), *[None] * 6))
            continue
        rows.append(
            (name, *step, chip(claim.verdict), statistic(claim, runs.declarations), known(claim.value),
             interval(claim.low, claim.high) or None, known(claim.null), counts(claim, runs.declarations),
             sentences_of(runs.declarations, claim))
        )  # fmt: skip
    return Table(f"{prediction} runs", "results by run", columns, tuple(rows), stacked=True)


def _heads(runs: Runs, prediction: str, claim: Summary) -> Table | None:
    """Values of every head or layer in all runs, with the change from first to last; None if there are none."""
    every = [judged(claim, rows) for rows in runs.rows(prediction)]
    quantity = next((row.quantity for rows in every for row in rows), "")
    every = [[row for row in rows if row.quantity == quantity] for rows in every]
    labels = [labels_of(rows) for rows in every]
    at = [{key_of(row, names): row for row in rows} for rows, names in zip(every, labels, strict=True)]
    places = {place: key_of(row, runs.blocks[i]) for i, each in enumerate(at) for place, row in each.items()}
    if not places:
        return None
    ends = runs.contents[0].findings, runs.contents[-1].findings
    tested = {(d.layer, d.call, d.head, d.quantity): d for d in differences_of_rows(*ends, prediction)}
    columns = (
        Column("layer"), Column("head"), *(Column(name) for name in runs.names), Column("change"), Column("95 % CI"),
        Column("p"), Column("FDR 5 %"),
    )  # fmt: skip
    cells: list[tuple[Cell, ...]] = []
    for place in places:
        label, _, head = place.partition("/")
        values = [known(each[place].value) if place in each else None for each in at]
        first, last = values[0], values[-1]
        change = None if first is None or last is None else last - first
        d = tested.get(at[-1][place][2:6]) if place in at[-1] else None
        difference = (None, None, None) if d is None else _difference_cells(d)[2:5]
        cells.append((label or "model", int(head) if head else None, *values, change, *difference))
    unit = "head" if any("/" in place for place in places) else "layer"
    title = f"{quantity_label(runs.declarations, prediction, quantity)} by {unit}, values"
    caption = f"Change: {runs.names[-1]} minus {runs.names[0]}."
    return Table(f"{prediction} heads", title, columns, tuple(cells), caption, tuple(places.values()), shown=SHOWN)


def _described(runs: Runs) -> Table:
    names = (
        "architecture", "parameters", "layers", "heads", "dtype", "tokens", "documents", "effective_documents",
        "source",
    )  # fmt: skip
    labels = [name.replace("_", " ") for name in names]
    columns = (Column("run"), *(Column(label) for label in labels), Column("seed"), Column("version"))
    rows = [
        (
            name,
            *(_cell_of(each.facts.get(fact)) for fact in names),
            each.run.seed,
            each.run.version or None,
        )
        for name, each in zip(runs.names, runs.contents, strict=True)
    ]
    return Table("runs", "models and texts", columns, tuple(rows), stacked=True)


def _cell_of(value: Any) -> Cell:
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _data(runs: Runs) -> dict[str, Any]:
    """The data of the page, for download."""
    return {
        "version": __version__,
        "runs": [
            {
                "name": name,
                "step": None if runs.steps is None else runs.steps[i],
                "facts": each.facts,
                "missing": each.run.notes,
                "claims": [plain_record(claim) for claim in claims.values()],
            }
            for i, (name, each, claims) in enumerate(zip(runs.names, runs.contents, runs.claims, strict=True))
        ],
        "differences": {
            name: [plain_record(d) for d in differences_of_claims(runs.contents[0].findings, each.findings).values()]
            for name, each in zip(runs.names[1:], runs.contents[1:], strict=True)
        },
    }
