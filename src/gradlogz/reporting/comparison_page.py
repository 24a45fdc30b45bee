"""Several runs side by side: models, or checkpoints of one training with trends over its steps.

A run has a step if its facts say so, or its name or folder does as those of checkpoints do ("step1000",
"checkpoint-500"). If all runs have one, they are ordered by it and drawn over it; else they stand in the order in which
they are given.

Read next: findings_page.py (one run), comparison_figures.py (the figures).
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from .. import __version__
from .._errors import InputValueError
from ..page import (
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
from ..probing.runs.findings_file import plain_record
from ..probing.runs.records import Finding, Summary
from .citations import cited
from .comparison_figures import RunSeries, by_depth, changes, over_heads, over_runs
from .findings_figures import Labels, blocks_of, key_of, labels_of
from .findings_page import rendered
from .findings_sections import SHOWN, choices_of, judged, measured
from .findings_wording import (
    Declarations,
    chip,
    claim_of,
    facts_of,
    keys_cited,
    sentences_of,
    title_of,
    unit_and_formula,
)
from .formatting import STYLES, digits, interval, known
from .run_contents import RunContents, Source, contents_of


class Runs(NamedTuple):
    """What is compared: runs under names that differ, with their steps if all have one."""

    contents: tuple[RunContents, ...]
    names: tuple[str, ...]
    steps: tuple[float, ...] | None
    claims: tuple[dict[str, Summary], ...]
    blocks: tuple[Labels, ...]

    @property
    def declarations(self) -> Declarations:
        """What predictions declare, in the first run that declares them."""
        return {name: each for run in reversed(self.contents) for name, each in run.declarations.items()}

    @property
    def predictions(self) -> list[str]:
        """All that any run measured, in the order of the first that did."""
        return list(dict.fromkeys(name for claims in self.claims for name in claims))

    def rows(self, prediction: str, quantity: str | None = None) -> list[list[Finding]]:
        """Of each run the rows of a prediction, and of a quantity if one is named."""
        return [
            [r for r in run.findings.rows if r.prediction == prediction and quantity in (None, r.quantity)]
            for run in self.contents
        ]


def compare(sources: Sequence[Source]) -> str:
    """The page of several run folders, or findings, side by side; one HTML file that needs no network.

    Needs jinja2 and plotly, the extra [report].
    """
    return rendered(page_of_runs(read_all(sources)), "compare")


def read_all(sources: Sequence[Source]) -> Runs:
    """The runs, in the order of their steps if all have one."""
    if isinstance(sources, str) or len(sources) < 2:
        fact = "a single name" if isinstance(sources, str) else f"{len(sources)}"
        raise InputValueError(
            "compare", "there", f"there must be two runs or more, got {fact}", "gradlogz report shows one."
        )
    runs = [contents_of(source, "compare") for source in sources]
    steps = [step for step in map(_step, runs) if step is not None]
    if len(set(steps)) == len(runs):
        runs = [each for _, each in sorted(zip(steps, runs, strict=True), key=lambda pair: pair[0])]
    ordered = tuple(sorted(steps)) if len(set(steps)) == len(runs) else None
    claims = tuple({s.prediction: s for s in each.findings.summary()} for each in runs)
    blocks = tuple(blocks_of(each.findings.rows) for each in runs)
    return Runs(tuple(runs), _names(runs, ordered), ordered, claims, blocks)


def _step(run: RunContents) -> float | None:
    """The step of a checkpoint: what its facts say, or its name, or its folder."""
    step = run.facts.get("step")
    if isinstance(step, int | float) and not isinstance(step, bool):
        return float(step)
    for name in (run.name, run.folder):
        found = re.search(r"(?:step|checkpoint)s?[-_ =]?(\d+)", name, re.IGNORECASE)
        if found:
            return float(found[1])
    return None


def _names(runs: Sequence[RunContents], steps: Sequence[float] | None) -> tuple[str, ...]:
    """Names that differ: of the models, else of the folders, else numbered."""
    for names in ([run.name for run in runs], [run.folder for run in runs]):
        if len(set(names)) == len(runs) and all(names):
            return tuple(names)
    if steps is not None:
        return tuple(f"{run.name}, step {step:g}" for run, step in zip(runs, steps, strict=True))
    return tuple(f"{run.name} ({i})" for i, run in enumerate(runs, 1))


def page_of_runs(runs: Runs) -> Page:
    """The page of what several runs say."""
    common = [p for p in runs.predictions if all(p in claims for claims in runs.claims)]
    same = [p for p in common if len({claims[p].verdict for claims in runs.claims}) == 1]
    differ = [p for p in common if p not in same]
    apart = [p for p in runs.predictions if p not in common]
    groups = (
        Group(Chip(f"{len(differ)} different", colour="blue"), _courses(runs, differ)),
        Group(Chip(f"{len(same)} the same in all", colour="grey"), _courses(runs, same)),
        Group(Chip(f"{len(apart)} not in all", colour="grey"), _courses(runs, apart)),
    )
    notes = [f"{name}: {note}" for name, each in zip(runs.names, runs.contents, strict=True) for note in each.run.notes]
    kind = "checkpoints" if runs.steps else "runs"
    alike = _alike(runs)
    return Page(
        name="gradlogz-compare",
        title=f"{len(runs.contents)} {kind} side by side",
        subtitle=", ".join(runs.names) + ".",
        verdict=VerdictBanner(
            _sentence(len(same), len(common)),
            notes=tuple(notes),
            groups=tuple(group for group in groups if group.entries),
        ),
        sections=(
            Section("What holds, run by run", (_claims(runs),), name="claims"),
            *_trends(runs, [*differ, *same, *apart]),
            *(_claim(runs, prediction, alike) for prediction in runs.predictions),
            Section("Runs", (_described(runs),), name="runs"),
        ),
        methods=(
            "Each run was measured by itself, as its own page says. Lines join the middle of all heads or layers of a "
            "run, bars hold the middle half of them; nulls are the middle ones. Verdicts are those of the runs; that "
            "two runs differ in theirs is no test of their difference.",
            _on_steps(runs),
        ),
        reproduce={
            "version": f"gradlogz {__version__}",
            **{name: each.run.command or "not known" for name, each in zip(runs.names, runs.contents, strict=True)},
        },
        references=cited(keys_cited(runs.declarations, runs.predictions)),
        data=_data(runs),
        made_by="gradlogz compare",
        choices=alike,
        chosen="layer or head",
    )


def _courses(runs: Runs, predictions: Sequence[str]) -> tuple[tuple[Link, str], ...]:
    """The verdicts on each claim, with the runs that have them."""
    return tuple(
        (Link(title_of(runs.declarations, prediction), prediction), _course(runs, prediction))
        for prediction in predictions
    )


def _course(runs: Runs, prediction: str) -> str:
    """Verdicts in the order of the runs, "refuted (step10), supported (step20 to step40)"; one word if all agree."""
    found = [claims.get(prediction) for claims in runs.claims]
    words = ["not measured" if claim is None else claim.verdict or "not judged" for claim in found]
    if len(set(words)) == 1:
        return words[0]
    if runs.steps is None:
        named = {word: [n for n, w in zip(runs.names, words, strict=True) if w == word] for word in words}
        return ", ".join(f"{word} ({', '.join(names)})" for word, names in named.items())
    parts = [
        (word, [name for _, name in of]) for word, of in groupby(zip(words, runs.names, strict=True), itemgetter(0))
    ]
    return ", ".join(
        f"{word} ({names[0] if len(names) == 1 else f'{names[0]} to {names[-1]}'})" for word, names in parts
    )


def _sentence(same: int, common: int) -> str:
    if not common:
        return "No claim was measured in every run."
    return f"Of {common} claims that were measured in every run, {same} have the same verdict in all."


def _on_steps(runs: Runs) -> str:
    if runs.steps is None:
        return (
            "The runs stand in the order in which they were given; not all of them say at which step they were taken."
        )
    return "The runs are ordered by their steps, which their facts, names or folders say."


def _alike(runs: Runs) -> tuple[Choice, ...]:
    """The heads to choose from, if all runs have the same; none of models that are built otherwise."""
    every = [choices_of(each.findings.rows) for each in runs.contents]
    return every[0] if all({c.key for c in each} == {c.key for c in every[0]} for each in every) else ()


# Sections ------------------------------------------------------------------------------------------------------------


def _claims(runs: Runs) -> Table:
    columns = (Column("claim"), *(Column(name) for name in runs.names))
    rows = []
    for prediction in runs.predictions:
        found = [claims.get(prediction) for claims in runs.claims]
        words = claim_of(runs.declarations, next(claim for claim in found if claim is not None))
        rows.append((Link(words, prediction), *(_cell(claim) for claim in found)))
    caption = "Verdict and value; a dash where a run did not measure it. Each claim leads to its section."
    return Table("claims", "Claims of the theory, and what the runs say", columns, tuple(rows), caption, stacked=True)


def _trends(runs: Runs, predictions: Sequence[str]) -> tuple[Section, ...]:
    """What was measured for each claim over all runs, one claim at a time; those whose verdicts differ first."""
    views = []
    for prediction in predictions:
        first = next(claims[prediction] for claims in runs.claims if prediction in claims)
        quantities = [first.quantity, *(row.quantity for rows in runs.rows(prediction) for row in judged(first, rows))]
        every = (_series(runs, prediction, quantity) for quantity in dict.fromkeys(quantities))
        series = max(
            every, key=lambda found: sum(len(s.rows) for s in found)
        )  # a claim on all has one row, its heads many
        if len(series) > 1:
            figure = over_runs(series)
            named = replace(figure, name=f"trend of {prediction}", title=claim_of(runs.declarations, first), wide=True)
            views.append(View(f"{title_of(runs.declarations, prediction)}: {series[0].rows[0].quantity}", (named,)))
    title = "Over training" if runs.steps else "Side by side"
    return (Section(title, (Views("trends", "claim", tuple(views)),), name="trends"),) if views else ()


def _cell(claim: Summary | None) -> Cell:
    if claim is None:
        return None
    number = "" if math.isnan(claim.value) else f" {digits(claim.value)}"
    return Chip(f"{claim.verdict or 'not judged'}{number}", STYLES[claim.verdict].status)


def _claim(runs: Runs, prediction: str, alike: tuple[Choice, ...]) -> Section:
    """One claim in all runs: the middle of each, the course over depth, and head by head if heads are the same."""
    found = [claims.get(prediction) for claims in runs.claims]
    first = next(claim for claim in found if claim is not None)
    rows = runs.rows(prediction)
    quantities = list(dict.fromkeys([first.quantity, *(row.quantity for each in rows for row in each)]))
    views = []
    for quantity in quantities:
        series = _series(runs, prediction, quantity)
        if len(series) > 0:
            heads = alike and len(series) > 1 and quantity == first.quantity
            figures = (over_runs(series), by_depth(series), *((*over_heads(series), *changes(series)) if heads else ()))
            views.append(View(quantity, figures))
    declared = facts_of(runs.declarations, prediction)
    parts: list[Part] = [Facts(declared)] if declared else []
    parts += [Views(prediction, "quantity", tuple(views))] if views else []
    parts.append(_values(runs, prediction, found))
    table = _heads(runs, prediction, first) if alike else None
    parts += [table] if table is not None else []
    verdicts = Counter(claim.verdict for claim in found if claim is not None)
    marks = tuple(
        replace(chip(verdict), label=f"{count} {verdict or 'not judged'}") for verdict, count in verdicts.items()
    )
    return Section(claim_of(runs.declarations, first), tuple(parts), folded=True, name=prediction, chips=marks)


def _series(runs: Runs, prediction: str, quantity: str) -> list[RunSeries]:
    """Of each run the rows of a quantity, those runs left out that have no number of it."""
    found = []
    for i, rows in enumerate(runs.rows(prediction, quantity)):
        numbers = tuple(row for row in rows if math.isfinite(row.value))
        if numbers:
            at = None if runs.steps is None else runs.steps[i]
            declared = unit_and_formula(runs.declarations, prediction, quantity)
            found.append(RunSeries(runs.names[i], i, at, numbers, labels_of(rows), runs.blocks[i], declared))
    return found


def _values(runs: Runs, prediction: str, found: Sequence[Summary | None]) -> Table:
    columns = (
        Column("run"), *((Column("step"),) if runs.steps else ()), Column("verdict"), Column("measured", "unit"),
        Column("value"), Column("interval", "95 %"), Column("null"), Column("for and against"),
        Column("what was found"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for i, (name, claim) in enumerate(zip(runs.names, found, strict=True)):
        step = (runs.steps[i],) if runs.steps else ()
        if claim is None:
            rows.append((name, *step, Chip("not measured", "silent"), *[None] * 6))
            continue
        split = f"{claim.supported} and {claim.refuted} of {claim.judged}" if claim.judged else None
        rows.append(
            (name, *step, chip(claim.verdict), measured(claim, runs.declarations), known(claim.value),
             interval(claim.low, claim.high) or None, known(claim.null), split, sentences_of(runs.declarations, claim))
        )  # fmt: skip
    return Table(f"{prediction} runs", "Run by run", columns, tuple(rows), stacked=True)


def _heads(runs: Runs, prediction: str, claim: Summary) -> Table | None:
    """The judged quantity of every head or layer, in all runs, and how far it went from first to last."""
    every = [judged(claim, rows) for rows in runs.rows(prediction)]
    quantity = next((row.quantity for rows in every for row in rows), "")
    every = [[row for row in rows if row.quantity == quantity] for rows in every]
    labels = [labels_of(rows) for rows in every]
    at = [{key_of(row, names): row for row in rows} for rows, names in zip(every, labels, strict=True)]
    places = {place: key_of(row, runs.blocks[i]) for i, each in enumerate(at) for place, row in each.items()}
    if not places:
        return None
    columns = (Column("layer"), Column("head"), *(Column(name) for name in runs.names), Column("change"))
    cells: list[tuple[Cell, ...]] = []
    for place in places:
        label, _, head = place.partition("/")
        values = [known(each[place].value) if place in each else None for each in at]
        first, last = values[0], values[-1]
        change = None if first is None or last is None else last - first
        cells.append((label or "model", int(head) if head else None, *values, change))
    title = f"{quantity}, one by one"
    return Table(f"{prediction} heads", title, columns, tuple(cells), keys=tuple(places.values()), shown=SHOWN)


def _described(runs: Runs) -> Table:
    names = ("architecture", "parameters", "layers", "heads", "dtype", "tokens", "documents", "source")
    columns = (Column("run"), *(Column(name) for name in names), Column("seed"), Column("version"))
    rows = [
        (
            name,
            *(_cell_of(each.facts.get(fact)) for fact in names),
            each.run.seed,
            each.run.version or None,
        )
        for name, each in zip(runs.names, runs.contents, strict=True)
    ]
    return Table("runs", "What was compared", columns, tuple(rows), stacked=True)


def _cell_of(value: Any) -> Cell:
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _data(runs: Runs) -> dict[str, Any]:
    """What each run says, as plain data."""
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
    }
