"""Sentences and chips for the findings of a run, from numbers and declared texts.

    verdict_sentences                   the result of a claim: value, null value, counts, details, remarks
    title_of, claim_of, method_of       texts of a prediction, by its declaration; its name where there is none
    unit_and_formula                    unit and formula of a quantity

This is the one place that words a result: predictions return numbers and declare names.

Read next: findings_terminal.py, findings_page.py (where they appear), ../probing/runs/records.py (Declaration).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..page import Chip, Group, Link
from ..probing.runs.records import VERDICTS, Declaration, Detail, Quantity, Remark, Summary
from .citations import keys_in
from .formatting import STYLES

Declarations = Mapping[str, Declaration]
NAMED = 3  # layers that a sentence names; the rest are counted


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


def written(value: float, number: str = "{:.2f}") -> str:
    """A number in a declared format, with a minus sign and without a negative zero."""
    text = number.replace("{:", "{:z").format(value) if "g}" not in number else number.format(value)
    return text.replace("-", "−", 1) if value < 0 and text.startswith("-") else text


def _valued(name: str, value: float, null: float, null_name: str, number: str) -> str:
    comparison = "" if math.isnan(null) else f" ({null_name} {written(null, number)})"
    return f"{_before_number(name)}{written(value, number)}{comparison}"


def _before_number(name: str) -> str:
    """The name with a space, or with a colon if it ends with a number itself."""
    return f"{name}: " if name[-1:].isdigit() else f"{name} "


def _counts(claim: Summary, declaration: Declaration) -> str:
    support, refute = declaration.outcomes
    correction = f" ({declaration.correction})" if declaration.correction else ""
    objects = declaration.unit + "s" * (claim.judged != 1)
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
    template = declaration.remarks.get(remark.key, "")
    try:
        text = template.format(**remark.numbers, layers=layers)
    except (LookupError, ValueError):  # a template of a damaged run, or of another version
        text = ""
    return text or f"{_capitalised(remark.key.replace('_', ' '))}."


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def chip(verdict: str, count: int | None = None) -> Chip:
    """A verdict in its colour, and how many claims have it."""
    word = verdict or "not judged"
    return Chip(word if count is None else f"{count} {word}", STYLES[verdict].status)


def title_of(declarations: Declarations, prediction: str) -> str:
    """The title of a prediction, or its name as words."""
    declared = declarations.get(prediction)
    return prediction.replace("_", " ") if declared is None else declared.title


def claim_of(declarations: Declarations, claim: Summary) -> str:
    """A claim in its words, else by its title."""
    return _words(declarations, claim) or title_of(declarations, claim.prediction)


def _words(declarations: Declarations, claim: Summary) -> str:
    """The words of a claim, or of its prediction where a run has lost them; none if it declares nothing."""
    declared = declarations.get(claim.prediction)
    return claim.claim or ("" if declared is None else declared.claim)


def facts_of(declarations: Declarations, prediction: str) -> dict[str, str]:
    """Formula, decision rule and what refutes a prediction; nothing if the run does not declare it."""
    declared = declarations.get(prediction)
    if declared is None:
        return {}
    texts = {
        "formula": declared.formula,
        "decision rule": declared.decision_rule,
        "refuted by": declared.refutes,
    }
    return {name: text for name, text in texts.items() if text}


def method_of(declarations: Declarations, prediction: str) -> tuple[str, ...]:
    """How a prediction is measured, in paragraphs."""
    declared = declarations.get(prediction)
    return () if declared is None else tuple(declared.method)


def unit_and_formula(declarations: Declarations, prediction: str, quantity: str) -> Quantity:
    """The unit and the formula of a quantity, by the name it has in findings; a bare number if it is not declared.

    A name that is not declared is looked for without what stands behind its first comma, then without what was left
    out: "gain, permuted" is a gain, "excess of log trace without first tokens" an excess of log trace.
    """
    declared = declarations.get(prediction)
    for name in (quantity, quantity.partition(",")[0], quantity.partition(" without ")[0]):
        if declared is not None and name in declared.quantities:
            return declared.quantities[name]
    return Quantity("1", "")


def keys_cited(declarations: Declarations, predictions: Iterable[str]) -> list[str]:
    """The keys of the works that predictions cite: those in their texts and those they list."""
    declared = [declarations[name] for name in predictions if name in declarations]
    texts = [text for each in declared for text in (*each.method, each.decision_rule, each.claim, each.refutes)]
    return [*keys_in(texts), *(key for each in declared for key in each.references)]


def verdict_sentence(model: str, claims: Sequence[Summary]) -> str:
    """Numbers of supported, refuted and inconclusive claims of a model."""
    counts = Counter(claim.verdict for claim in claims)
    parts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
    return f"{model}: {len(claims)} claims, {', '.join(parts)}." if parts else f"{model}: no claim could be judged."


def groups(declarations: Declarations, claims: Sequence[Summary]) -> tuple[Group, ...]:
    """The claims under their verdicts, each by its title and in its words."""
    verdict_groups = []
    for verdict in (*VERDICTS, ""):
        entries = tuple(
            (Link(title_of(declarations, claim.prediction), claim.prediction), _words(declarations, claim))
            for claim in claims
            if claim.verdict == verdict
        )
        if entries:
            verdict_groups.append(Group(chip(verdict, len(entries)), entries))
    return tuple(verdict_groups)
