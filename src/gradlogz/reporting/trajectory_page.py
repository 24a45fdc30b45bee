"""The page of a training run: the statistic of each claim against the training step, one small figure for each.

    Trajectories    value, 95 % confidence interval and null of every claim over the checkpoints; colour: verdict
    Values          the same numbers as a table
    Checkpoints     step, hash of the weights, checkpoints with the same weights

Checkpoints whose names have no step are drawn in the order of the arguments.

Read next: comparison_page.py (runs compared head by head), trajectory_terminal.py (on a terminal).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from .. import __version__
from ..page import (
    Axis,
    Cell,
    Chip,
    Column,
    Figure,
    Group,
    Line,
    Link,
    Mark,
    Page,
    Points,
    Section,
    Table,
    VerdictBanner,
)
from ..probing.runs.findings_file import plain_record
from ..probing.runs.records import VERDICTS, Summary
from .citations import cited
from .comparison_page import Runs, verdicts_of
from .findings_page import GUIDE
from .findings_sections import SHOWN, counts, statistic
from .findings_wording import by_agreement, chip, claim_of, keys_cited, title_of, unit_and_formula
from .formatting import STYLES, digits, finite, interval, known

DECADES = 100.0  # ratio of the last step to the first from which on the axis is logarithmic
DIGITS = 16  # of a hash in a table
TRAJECTORIES = {
    "figures": (
        "Line and points: value of the claim's statistic; bars: 95 % confidence interval; colour: verdict; dashed "
        "grey: null. Open diamonds: checkpoints whose weights are those of another checkpoint."
    ),
    "same weights": (
        "Checkpoints with the same sha256 of their weights. At most one of their steps is right, so that their points "
        "are no part of the trajectory until it is known which."
    ),
}


def duplicates(runs: Runs) -> list[list[int]]:
    """Return groups of runs, by index, whose weights have the same hash; runs without a hash are in none."""
    groups: dict[str, list[int]] = {}
    for i, each in enumerate(runs.contents):
        if isinstance(hashed := each.facts.get("weights_sha256"), str):
            groups.setdefault(hashed, []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def duplicate_sentences(runs: Runs) -> list[str]:
    """Return one sentence for each group of checkpoints with the same weights."""
    return [f"Same weights: {', '.join(runs.names[i] for i in group)}." for group in duplicates(runs)]


def page_of_trajectory(runs: Runs) -> Page:
    """Page of the checkpoints of a training run, as data."""
    different, same, described, untested = by_agreement(runs.claims)
    groups = (
        Group(Chip(f"{len(different)} with a change of verdict", colour="blue"), _entries(runs, different)),
        Group(Chip(f"{len(same)} with one verdict", colour="grey"), _entries(runs, same)),
        Group(Chip(f"{len(described)} descriptions and self-checks", colour="grey"), _entries(runs, described)),
        Group(Chip(f"{len(untested)} not tested in all checkpoints", colour="grey"), _entries(runs, untested)),
    )
    notes = [f"{name}: {note}" for name, each in zip(runs.names, runs.contents, strict=True) for note in each.run.notes]
    figures = tuple(_figures(runs))
    return Page(
        name="gradlogz-trajectory",
        title=f"Trajectory of {len(runs.names)} checkpoints",
        subtitle=f"{runs.names[0]} to {runs.names[-1]}.",
        verdict=VerdictBanner(
            f"The verdict on {len(different)} of {len(different) + len(same)} tested claims changes over the "
            "checkpoints.",
            notes=(*duplicate_sentences(runs), *notes),
            groups=tuple(group for group in groups if group.entries),
        ),
        sections=(
            Section("Trajectories", figures, name="trajectories"),
            Section("Values", (_values(runs),), folded=True, name="values"),
            Section("Checkpoints", (_checkpoints(runs),), name="checkpoints"),
        ),
        guide=GUIDE | TRAJECTORIES,
        methods=(
            "Every checkpoint was measured and tested separately on the same text; the page of its run (gradlogz "
            "report) describes the methods. Intervals are those of single checkpoints; differences between "
            "checkpoints are not tested here.",
            "Weights are identified by the sha256 of names, dtypes, shapes and bytes of all tensors, in the order of "
            "their names.",
        ),
        reproduce={"version": f"gradlogz {__version__}", "command": runs.contents[-1].run.command or "unknown"},
        references=cited(keys_cited(runs.declarations, runs.predictions)),
        data=_data(runs),
        made_by="gradlogz probe",
    )


def _entries(runs: Runs, predictions: Sequence[str]) -> tuple[tuple[Link, str], ...]:
    """A link to the figures for each claim, with its verdicts, and its first and last value."""
    entries = []
    for prediction in predictions:
        values = [v for claims in runs.claims if prediction in claims and math.isfinite(v := claims[prediction].value)]
        ends = f": {digits(values[0])} to {digits(values[-1])}" if values else ""
        words = f"{verdicts_of(runs, prediction)}{ends}"
        entries.append((Link(title_of(runs.declarations, prediction), "trajectories"), words))
    return tuple(entries)


# Figures -------------------------------------------------------------------------------------------------------------


def _figures(runs: Runs) -> Iterator[Figure]:
    """A figure for each claim that has a value at some checkpoint."""
    axis, places = _axis(runs)
    repeated = {i for group in duplicates(runs) for i in group}
    for prediction in runs.predictions:
        points = [
            (i, places[i], claims[prediction])
            for i, claims in enumerate(runs.claims)
            if prediction in claims and math.isfinite(claims[prediction].value)
        ]
        if not points:
            continue
        first = points[0][2]
        unit = unit_and_formula(runs.declarations, prediction, first.quantity).unit
        declared = runs.declarations.get(prediction)
        named = first.quantity if declared is None else declared.statistic
        single = [(x, claim) for i, x, claim in points if i not in repeated]
        marks: list[Mark] = []
        if nulls := [(x, claim.null) for x, claim in single if math.isfinite(claim.null)]:
            marks.append(Line("null", [x for x, _ in nulls], [y for _, y in nulls], "grey", "dash"))
        if single:
            marks.append(Line("value", [x for x, _ in single], [claim.value for _, claim in single], "blue"))
        for verdict in (*VERDICTS, ""):
            for again, symbol in ((False, "circle"), (True, "diamond-open")):
                group = [p for p in points if p[2].verdict == verdict and (p[0] in repeated) == again]
                if group:
                    name = f"{verdict or 'no verdict'}{', repeated weights' if again else ''}"
                    marks.append(_points(runs, name, group, STYLES[verdict].colour, symbol))
        yield Figure(
            f"trajectory of {prediction}",
            title_of(runs.declarations, prediction),
            axis,
            Axis(named, unit),
            tuple(marks),
            f"{claim_of(runs.declarations, first)} Bars: 95 % CI; n = {len(points)} checkpoints.",
        )


def _points(runs: Runs, name: str, group: Sequence[tuple[int, float, Summary]], colour: str, symbol: str) -> Points:
    hover = [_hover(runs.names[i], claim) for i, _, claim in group]
    claims = [claim for _, _, claim in group]
    return Points(
        name, [x for _, x, _ in group], [claim.value for claim in claims], colour, symbol, hover,
        [finite(claim.low) for claim in claims], [finite(claim.high) for claim in claims],
    )  # fmt: skip


def _hover(name: str, claim: Summary) -> str:
    ends = interval(claim.low, claim.high)
    lines = [name, f"{claim.verdict or 'no verdict'}, {digits(claim.value)}", f"95 % CI {ends}" if ends else ""]
    lines.append(f"null {digits(claim.null)}" if math.isfinite(claim.null) else "")
    return "\n".join(line for line in lines if line)


def _axis(runs: Runs) -> tuple[Axis, list[float]]:
    """The axis of checkpoints and the place of each: the step, logarithmic over decades, or the order."""
    if runs.steps is None:
        return Axis("checkpoint", "name", names=runs.names, range=(-0.5, len(runs.names) - 0.5)), [
            float(i) for i in range(len(runs.names))
        ]
    positive = [step for step in runs.steps if step > 0]
    if len(positive) < 2 or positive[-1] < DECADES * positive[0]:
        return Axis("training step", "steps", "t"), list(runs.steps)
    start = positive[0] / 2  # step 0 has no place on a logarithmic axis
    shown = f"t, 0 at {digits(start)}" if len(positive) < len(runs.steps) else "t"
    return Axis("training step", "steps", shown, scale="log"), [max(step, start) for step in runs.steps]


# Tables --------------------------------------------------------------------------------------------------------------


def _values(runs: Runs) -> Table:
    columns = (
        Column("claim"), Column("checkpoint"), Column("step"), Column("verdict"), Column("statistic", "unit"),
        Column("value"), Column("95 % CI"), Column("null"), Column("support / refute"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for prediction in runs.predictions:
        for i, (name, claims) in enumerate(zip(runs.names, runs.claims, strict=True)):
            if (claim := claims.get(prediction)) is None:
                continue
            rows.append(
                (title_of(runs.declarations, prediction), name, None if runs.steps is None else runs.steps[i],
                 chip(claim.verdict), statistic(claim, runs.declarations), known(claim.value),
                 interval(claim.low, claim.high) or None, known(claim.null), counts(claim, runs.declarations))
            )  # fmt: skip
    return Table("values", "results by claim and checkpoint", columns, tuple(rows), shown=SHOWN, stacked=True)


def _checkpoints(runs: Runs) -> Table:
    repeated = {i: [runs.names[j] for j in group if j != i] for group in duplicates(runs) for i in group}
    columns = (
        Column("checkpoint"), Column("step"), Column("weights", "sha256"), Column("same weights"), Column("tokens"),
        Column("documents"), Column("source"), Column("version"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for i, (name, each) in enumerate(zip(runs.names, runs.contents, strict=True)):
        facts, step = each.facts, None if runs.steps is None else runs.steps[i]
        rows.append(
            (name, step, _short(facts.get("weights_sha256")), ", ".join(repeated.get(i, ())) or None,
             facts.get("tokens"), facts.get("documents"), facts.get("source"), each.run.version or None)
        )  # fmt: skip
    return Table("checkpoints", "checkpoints", columns, tuple(rows), stacked=True)


def _short(hashed: Any) -> str | None:
    """Return the first digits of a hash, which tell weights apart; the data of the page have all of them."""
    return hashed[:DIGITS] if isinstance(hashed, str) else None


def _data(runs: Runs) -> dict[str, Any]:
    """The data of the page, for download."""
    return {
        "version": __version__,
        "same_weights": [[runs.names[i] for i in group] for group in duplicates(runs)],
        "checkpoints": [
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
