"""Measurements of one model on different texts, joined into that of all texts.

    statistics            merged: sums, products, histograms and samples by hash do not depend on how a text is divided
    random baseline       rows are chosen by hash; a group without a chosen row has one that both texts agree on
    matched draws         each reads the windows with the smallest hashes of all texts: they are measured again

Joined is what one pass over all texts would have measured, up to rounding: batches are packed differently.

Read next: measurement.py (the record), ../commands/merge.py (the command).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from .._errors import InputValueError
from .corpus.batching import facts_of_text
from .corpus.read_documents import joined_documents
from .measurement import Measurement, MergeData
from .passes.extreme_tokens import EACH
from .passes.matched_draws import Window, least
from .runs.records import Token
from .statistics import merge

OF_TEXT = ("text_sha256", "settings_sha256", "tokens", "documents", "effective_documents", "groups", "fingerprint")
OF_NULLS = ("without_baseline", "without_matched")  # reasons why a null is missing: draws are measured again
ABOUT_PLACE = ("model", "revision")  # options that say where the model is, not what it is


def merged(names: Sequence[str], measurements: Sequence[Measurement]) -> Measurement:
    """Return the measurement of all texts, without matched draws; `merge_data.windows` are those that they read.

    names: names of the measurements in errors.

    Law: tests/laws/test_merged_runs_are_one_run.py.
    """
    first = measurements[0]
    for name, measured in zip(names, measurements, strict=True):
        _check_whole(name, measured)
    for name, measured in zip(names[1:], measurements[1:], strict=True):
        _check_alike(names[0], first, name, measured)
    _check_distinct(names, measurements)
    documents = joined_documents([m.merge_data.documents for m in measurements])
    counts = {n: sum(getattr(m.report, n) for m in measurements) for n in ("windowed", "short", "left")}
    report = documents.report(first.report._replace(**counts))
    rows = [m.merge_data.baseline for m in measurements]
    baseline = reduce(lambda a, b: a.merge(b), rows) if all(rows) else None  # type: ignore[union-attr, arg-type, return-value]
    reasons = [m.facts["without_baseline"] for m in measurements if "without_baseline" in m.facts]
    facts = {name: value for name, value in first.facts.items() if name not in (*OF_TEXT, *OF_NULLS)}
    facts |= {"without_baseline": reasons[0]} if reasons else {}
    draws = int(first.merge_data.options.get("draws", 0))
    return Measurement(
        first.probed,
        facts | facts_of_text(report),
        reduce(merge, [m.state for m in measurements]),
        None if baseline is None or first.baseline is None else replace(first.baseline, state=baseline.state),
        {},
        {},
        report,
        _extreme([token for m in measurements for token in m.tokens]),
        {name: sum(m.seconds.get(name, 0.0) for m in measurements) for name in first.seconds},
        True,
        MergeData(documents, _windows(measurements, draws), baseline, first.merge_data.options),
    )


def _check_whole(name: str, measured: Measurement) -> None:
    if not measured.complete:
        problem = f"{name} stopped before the end of its text"
        raise InputValueError("merge", "runs", problem, "Run its command again.")
    if measured.report.left:
        problem = f"{name} is a sample: {measured.report.left:,} of its documents were not read, or read in part"
        remedy = "Probe all of its text with --tokens 0; samples of different texts are no sample of all."
        raise InputValueError("merge", "runs", problem, remedy)


def _check_alike(name: str, one: Measurement, other_name: str, other: Measurement) -> None:
    """Raise unless two measurements are of the same model with the same options; the error names the differences."""
    facts = [
        {**{n: m.facts.get(n) for n in ("weights_sha256", "config_sha256", "device")}, "name": m.probed.name,
         "window length": m.report.length, **m.merge_data.options}
        for m in (one, other)
    ]  # fmt: skip
    differ = [
        n for n in sorted({**facts[0], **facts[1]}) if n not in ABOUT_PLACE and facts[0].get(n) != facts[1].get(n)
    ]
    if differ:
        texts = ", ".join(f"{n} is {facts[0].get(n)!r} and {facts[1].get(n)!r}" for n in differ)
        problem = f"{name} and {other_name} differ in more than their text: {texts}"
        raise InputValueError("merge", "runs", problem, "Merge runs of one model with the same options.")


def _check_distinct(names: Sequence[str], measurements: Sequence[Measurement]) -> None:
    """Raise if a document is in two texts."""
    origin: dict[int, str] = {}
    for name, measured in zip(names, measurements, strict=True):
        keys = measured.merge_data.documents.keys.tolist()
        twice = [key for key in keys if key in origin]
        if twice:
            problem = f"{origin[twice[0]]} and {name} overlap: {len(twice):,} documents have the same names in both"
            remedy = "Merge runs over different documents; names are those of files, with the number of the line."
            raise InputValueError("merge", "runs", problem, remedy)
        origin |= dict.fromkeys(keys, name)


def _windows(measurements: Sequence[Measurement], draws: int) -> list[Window]:
    """Return the windows that the draws read, with numbers of batches that are unique."""
    windows: list[Window] = []
    for measured in measurements:
        offset = 1 + max((window.batch for window in windows), default=-1)
        windows += [window._replace(batch=offset + window.batch) for window in measured.merge_data.windows]
    return least(windows, draws) if windows and draws else []


def _extreme(tokens: list[Token]) -> list[Token]:
    """Return the few tokens with the largest values of each kind, layer and call."""
    by_layer: dict[tuple[Any, ...], list[Token]] = {}
    for token in tokens:
        by_layer.setdefault((token.kind, token.layer, token.call), []).append(token)
    return [token for each in by_layer.values() for token in sorted(each, key=lambda t: -t.value)[:EACH]]
