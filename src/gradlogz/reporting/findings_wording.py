"""Sentences and chips for the findings of a run, from numbers and declared texts.

    verdict_sentences                   the result of a claim: value, null value, counts, details, remarks
    title_of, claim_of, method_of       texts of a prediction, by its declaration; its name where there is none
    unit_and_formula                    unit and formula of a quantity
    by_agreement                        claims of several runs: different verdicts, the same verdict, not tested in all
    quantity_label, places_of           readable name of a quantity, and noun of the rows that are not of heads
    verdict_sentence, graded_groups     the headline, which counts predictions only, and claims by kind and verdict
    profile, cautions                   values by layer; limits of the text

This is the one place that words a result: predictions return numbers and declare names.

Read next: findings_terminal.py, findings_page.py (where they appear), ../probing/runs/records.py (Declaration).
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ..page import Chip, Group, Link
from ..probing.runs.records import (
    BEYOND,
    DESCRIPTIVE,
    PREDICTED,
    SELF_CHECK,
    TESTED,
    Declaration,
    Detail,
    Finding,
    Quantity,
    Remark,
    Summary,
)
from .citations import keys_in
from .formatting import STYLES

Declarations = Mapping[str, Declaration]
NAMED = 3  # layers that a sentence names; the rest are counted
FEW_DOCUMENTS = 16  # effective documents below which intervals and verdicts are uncertain
HALF = ("bfloat16", "float16")
KINDS_EXPLAINED = {
    PREDICTED: "prediction of the theory",
    BEYOND: "test beyond the theory, of a statement that the theory does not make; not counted for or against it",
    DESCRIPTIVE: "description: values, confidence intervals and nulls without a test",
    SELF_CHECK: "self-check of the measurement, true of every model; no evidence for the theory",
}
# Formats and templates come from runs, which may be damaged: only these fields are replaced.
NUMBER = re.compile(r"([^{}]*)\{:\.(\d)([fge%])\}([^{}]*)")
FIELD = re.compile(r"\{(\w+)(?::\.(\d)([fge%]))?\}")


def verdict_sentences(claim: Summary, declaration: Declaration | None) -> tuple[str, ...]:
    """Sentences for the result of a claim, each with its numbers.

        Median cosine −0.05 (random-rotation null 0.00).
        6 of 72 heads support the claim, 63 refute it (FDR 5 %, Benjamini–Hochberg).

    A text that a run has stored with the claim is returned as it is. Without a declaration there are no sentences
    unless there is such a text.
    """
    if claim.text:
        return (claim.text,)
    if declaration is None:
        return ()
    sentences = []
    if not math.isnan(claim.value):
        sentences.append(_valued(declaration.statistic, claim.value, claim.null, declaration.null, declaration.number))
    if claim.judged and declaration.unit:
        sentences.append(_counts(claim, declaration))
    details = "; ".join(filter(None, (_detail(each, declaration) for each in claim.details)))
    sentences.append(details)
    texts = [f"{_capitalised(text)}." for text in sentences if text]
    return (*texts, *(_remark(each, declaration) for each in claim.remarks))


def sentences_of(declarations: Declarations, claim: Summary) -> str:
    """All sentences for the result of a claim, in one paragraph."""
    return " ".join(verdict_sentences(claim, declarations.get(claim.prediction)))


def written(value: float | int, number: str = "{:.2f}") -> str:
    """A number in a declared format, with a minus sign and without a negative zero.

    The format has one field such as `{:.2f}`; a format without one, as of a damaged run, is replaced by `{:.3g}`.
    """
    match = NUMBER.fullmatch(number)
    before, digits, kind, after = ("", "3", "g", "") if match is None else match.groups()
    text = f"{value:z.{digits}{kind}}"
    return f"{before}−{text[1:]}{after}" if text.startswith("-") else f"{before}{text}{after}"


def _valued(name: str, value: float, null: float, null_name: str, number: str) -> str:
    comparison = "" if math.isnan(null) else f" ({null_name} {written(null, number)})"
    return f"{_before_number(name)}{written(value, number)}{comparison}"


def _before_number(name: str) -> str:
    """The name with a space, or with a colon if it ends with a number itself."""
    return f"{name}: " if name[-1:].isdigit() else f"{name} "


def _counts(claim: Summary, declaration: Declaration) -> str:
    if claim.verdict == "described":
        return f"measured in {claim.judged} {declaration.unit}{'s' * (claim.judged != 1)}"
    support, refute = declaration.outcomes
    correction = f" ({declaration.correction})" if declaration.correction else ""
    objects = declaration.unit + "s" * (claim.judged != 1)
    if declaration.refutes and not declaration.supports and not claim.supported:  # a claim that can only be refuted
        return f"{claim.refuted} of {claim.judged} {objects} {refute.replace(' it', ' the claim')}{correction}"
    return f"{claim.supported} of {claim.judged} {objects} {support}, {claim.refuted} {refute}{correction}"


def _detail(detail: Detail, declaration: Declaration) -> str:
    label = declaration.details.get(detail.key)
    text, number, null, counted = label or (detail.key.replace("_", " "), "{:.2f}", "null", "above the null")
    total = "" if detail.total is None else f" of {detail.total}"
    if math.isnan(detail.value):
        return "" if detail.count is None else f"{text}: {detail.count}{total}"
    parts = [] if math.isnan(detail.null) else [f"{null} {written(detail.null, number)}"]
    parts += [] if detail.count is None else [f"{detail.count}{total} {declaration.unit}s {counted}"]
    parts += [detail.layer] if detail.layer else []
    return f"{_before_number(text)}{written(detail.value, number)}" + (f" ({'; '.join(parts)})" if parts else "")


def _remark(remark: Remark, declaration: Declaration) -> str:
    layers = ", ".join(remark.layers[:NAMED])
    if len(remark.layers) > NAMED:
        layers += f" and {len(remark.layers) - NAMED} more"

    def filled(field: re.Match[str]) -> str:
        name, digits, kind = field.groups()
        if name == "layers":
            return layers
        value = remark.numbers.get(name)
        return field[0] if value is None else written(value, f"{{:.{digits or 0}{kind or 'f'}}}")

    template = declaration.remarks.get(remark.key, "")
    return FIELD.sub(filled, template) or f"{_capitalised(remark.key.replace('_', ' '))}."


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def chip(verdict: str, count: int | None = None) -> Chip:
    """Chip with a verdict in its colour, and the number of claims with it."""
    word = verdict or "not judged"
    return Chip(word if count is None else f"{count} {word}", STYLES[verdict].status)


def title_of(declarations: Declarations, prediction: str) -> str:
    """Title of a prediction; its name in words if it is not declared."""
    declared = declarations.get(prediction)
    return prediction.replace("_", " ") if declared is None else declared.title


def claim_of(declarations: Declarations, claim: Summary) -> str:
    """The claim in words; its title if there are none."""
    return _words(declarations, claim) or title_of(declarations, claim.prediction)


def _words(declarations: Declarations, claim: Summary) -> str:
    """The claim in words, from the claim or else from its declaration; empty if neither has them."""
    declared = declarations.get(claim.prediction)
    return claim.claim or ("" if declared is None else declared.claim)


def facts_of(declarations: Declarations, prediction: str) -> dict[str, str]:
    """Kind, definition of the statistic, conditions, decision rule, bounds and power; empty if it is not declared."""
    declared = declarations.get(prediction)
    if declared is None:
        return {}
    conditions = {"supported if": declared.supports, "refuted if": declared.refutes}
    texts = {
        "kind": KINDS_EXPLAINED.get(declared.kind, declared.kind),
        "definition": declared.formula,
        "reason for the null": declared.null_reason,
        **({} if declared.kind == DESCRIPTIVE else conditions),
        "decision rule": declared.decision_rule,
        "bounds": " ".join(f"{number}: {reason}" for number, reason in declared.bounds.items()),
        "smallest interesting effect": declared.interesting,
        "power": declared.power or ("not measured" if declared.kind in (PREDICTED, BEYOND) else ""),
    }
    return {name: text for name, text in texts.items() if text}


def method_of(declarations: Declarations, prediction: str) -> tuple[str, ...]:
    """Paragraphs on the measurement of a prediction."""
    declared = declarations.get(prediction)
    return () if declared is None else tuple(declared.method)


def unit_and_formula(declarations: Declarations, prediction: str, quantity: str) -> Quantity:
    """Unit and formula of a quantity by its name in findings; unit "1" and no formula if it is not declared.

    Qualified names fall back to the part before the first comma, then to the part before " without ": "gain, permuted"
    is a gain, "excess of log trace without first tokens" an excess of log trace.
    """
    declared = declarations.get(prediction)
    for name in (quantity, quantity.partition(",")[0], quantity.partition(" without ")[0]):
        if declared is not None and name in declared.quantities:
            return declared.quantities[name]
    return Quantity("1", "")


def quantity_label(declarations: Declarations, prediction: str, quantity: str) -> str:
    """Declared label of a quantity; its name in the rows if it has none.

    Qualified names keep their qualifier: "symmetry, over distances" is "symmetry score, over distances".
    """
    declared = declarations.get(prediction)
    labels: Mapping[str, str] = {} if declared is None else declared.labels
    name, comma, qualifier = quantity.partition(",")
    return labels.get(quantity) or f"{labels.get(name, name)}{comma}{qualifier}"


def places_of(declarations: Declarations, prediction: str, quantity: str) -> str:
    """Plural noun of what the rows of a quantity without a head describe: "layers", "blocks", "sublayers"."""
    declared = declarations.get(prediction)
    if declared is None:
        return "layers"
    default = "layers" if declared.unit in ("", "head") else f"{declared.unit}s"
    return declared.places.get(quantity) or declared.places.get(quantity.partition(",")[0]) or default


def keys_cited(declarations: Declarations, predictions: Iterable[str]) -> list[str]:
    """Bibliography keys that predictions cite in their texts or list as references."""
    declared = [declarations[name] for name in predictions if name in declarations]
    texts = [
        text
        for each in declared
        for text in (*each.method, each.decision_rule, each.claim, each.supports, each.refutes, *each.bounds.values())
    ]
    return [*keys_in(texts), *(key for each in declared for key in each.references)]


def kind_of(declarations: Declarations, prediction: str) -> str:
    """Kind of a claim; a prediction of the theory if it is not declared."""
    declared = declarations.get(prediction)
    return PREDICTED if declared is None else declared.kind


def verdict_sentence(model: str, claims: Sequence[Summary], declarations: Declarations) -> str:
    """Numbers of supported, refuted and inconclusive predictions of a model, for the first screen of its page.

    Only predictions of the theory are counted. Tests beyond it, descriptions and self-checks follow by their numbers.
    """
    by_kind: dict[str, list[Summary]] = {}
    for claim in claims:
        by_kind.setdefault(kind_of(declarations, claim.prediction), []).append(claim)
    counts = Counter(claim.verdict for claim in by_kind.get(PREDICTED, ()))
    tested = sum(counts[verdict] for verdict in TESTED)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in TESTED)
    noun = "prediction" if tested == 1 else "predictions"
    sentences = [
        f"{tested} {noun} of the theory tested on {model}: {parts}."
        if tested
        else f"No prediction of the theory could be tested on {model}."
    ]
    if absent := counts["not applicable"]:
        sentences.append(f"{absent} more {'is' if absent == 1 else 'are'} not applicable.")
    beyond = Counter(claim.verdict for claim in by_kind.get(BEYOND, ()))
    if any(beyond[verdict] for verdict in TESTED):
        outcomes = ", ".join(f"{beyond[verdict]} {verdict}" for verdict in TESTED if beyond[verdict])
        sentences.append(f"Tests beyond the theory: {outcomes}.")
    if (number := tested + sum(beyond[verdict] for verdict in TESTED)) > 1:
        sentences.append(
            f"{number} verdicts are counted; the probability of a false one is at most 5 % for all claims of a model "
            "together, if their nulls hold. Several models are not corrected for."
        )
    if described := sum(claim.verdict == "described" for claim in claims):
        sentences.append(f"Described without a test: {described}.")
    for check in by_kind.get(SELF_CHECK, ()):
        sentences.append(f"Self-check “{title_of(declarations, check.prediction)}”: {check.verdict}.")
    if failed := [c for c in claims if c.verdict == "failed" and kind_of(declarations, c.prediction) != SELF_CHECK]:
        titles = ", ".join(title_of(declarations, claim.prediction) for claim in failed)
        sentences.append(f"Failed with an error: {titles}.")
    return " ".join(sentences)


def cautions(facts: Mapping[str, object]) -> tuple[str, ...]:
    """Sentences on the limits of the text that a model read, and of its precision."""
    sentences = []
    documents = facts.get("effective_documents")
    if isinstance(documents, int | float) and documents < FEW_DOCUMENTS:
        sentences.append(
            f"Few documents: the text is worth {documents:.3g} documents of equal length, fewer than {FEW_DOCUMENTS}. "
            "Confidence intervals and verdicts are uncertain."
        )
    if facts.get("synthetic_text"):
        sentences.append(
            "Synthetic text: the reactions bundled with the package are made from templates. Pass real reactions "
            "(--text) before drawing conclusions on a chemical model."
        )
    if (dtype := facts.get("dtype")) in HALF:
        sentences.append(
            f"Half precision: the model ran in {dtype}, and its rounding errors are part of all values. Statistics of "
            "small differences (explained variances, deficits, gains) may change verdicts; compare with --dtype "
            "float32."
        )
    return tuple(sentences)


def profile(claim: Summary, rows: Iterable[Finding], declaration: Declaration | None) -> str:
    """Values of a claim by layer, in the order of depth; medians over the heads of a layer. Empty for one layer.

    A layer without a value has a dash, so that the place in the list is the layer.
    """
    layers: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row.quantity == claim.quantity and row.verdict:
            values = layers.setdefault((row.layer, row.call), [])
            if row.verdict != "not applicable" and not math.isnan(row.value):
                values.append(row.value)
    if sum(map(bool, layers.values())) < 2:
        return ""
    number = NUMBER.fullmatch(declaration.number) if declaration is not None else None
    digits = "{:.3g}" if number is None else f"{{:.{number[2]}{number[3]}}}"
    return f"By layer: {', '.join(written(median(v), digits) if v else '–' for v in layers.values())}."


class Agreement(NamedTuple):
    """Predictions of several runs: with different verdicts, with the same verdict, descriptions and self-checks.

    untested: not tested in every run.
    """

    different: list[str]
    same: list[str]
    described: list[str]
    untested: list[str]


def by_agreement(runs: Sequence[Mapping[str, Summary]]) -> Agreement:
    """Group the predictions of runs; a claim that is absent, not applicable or without verdict is not tested.

    Descriptions and self-checks that all runs pass are no tests, so that their agreement is not counted.
    """
    agreement = Agreement([], [], [], [])
    for prediction in dict.fromkeys(name for claims in runs for name in claims):
        verdicts = {claims[prediction].verdict if prediction in claims else "" for claims in runs}
        if verdicts <= {"described"} or verdicts <= {"passed"}:
            agreement.described.append(prediction)
        elif not verdicts <= {*TESTED, "described"} and verdicts != {"passed", "failed"}:
            agreement.untested.append(prediction)
        elif len(verdicts) == 1:
            agreement.same.append(prediction)
        else:
            agreement.different.append(prediction)
    return agreement


def graded_groups(declarations: Declarations, claims: Sequence[Summary]) -> list[tuple[str, str, list[Summary]]]:
    """Heading, verdict for its colour, and claims of each group: predictions by verdict, then the other kinds.

    Claims that failed or are not applicable come last, whatever their kind.
    """
    unmeasured = ("failed", "not applicable", "")
    groups: dict[tuple[str, str], list[Summary]] = {(verdict, verdict): [] for verdict in TESTED}
    groups |= {(BEYOND, ""): [], ("described", "described"): [], (SELF_CHECK, ""): []}
    groups |= {(verdict or "not judged", verdict): [] for verdict in unmeasured}
    for claim in claims:
        kind, verdict = kind_of(declarations, claim.prediction), claim.verdict
        if kind == SELF_CHECK and verdict in ("passed", "failed", "supported", "refuted"):
            key = (SELF_CHECK, "")
        elif verdict in (*unmeasured, "described"):
            key = (verdict or "not judged", verdict)
        else:
            key = (BEYOND, "") if kind == BEYOND else (verdict, verdict)
        groups.setdefault(key, []).append(claim)
    return [(heading, verdict, entries) for (heading, verdict), entries in groups.items() if entries]


def groups(declarations: Declarations, claims: Sequence[Summary]) -> tuple[Group, ...]:
    """Claims by kind and verdict, each with its title and words."""
    return tuple(
        Group(
            Chip(f"{len(entries)} {heading}", STYLES[verdict].status),
            tuple(
                (Link(title_of(declarations, claim.prediction), claim.prediction), _words(declarations, claim))
                for claim in entries
            ),
        )
        for heading, verdict, entries in graded_groups(declarations, claims)
    )
