"""Words for interventions: titles, places, units and the numbers of an effect.

Read next: interventions_terminal.py and interventions_page.py, which use them.
"""

from collections.abc import Sequence

from ..probing.interventions.records import Comparison, Effect, Interventions
from .findings_figures import Labels, blocks_of
from .findings_wording import FEW_DOCUMENTS
from .formatting import digits, interval

UNITS = {
    "next token": "nats per token",
    "masked token": "nats per masked token",
    "representation": "cosine distance",
}
LOSSES = {
    "next token": "cross-entropy of the next token",
    "masked token": "cross-entropy of masked tokens",
    "representation": "cosine distance of the final representation of a token to that of the unedited model",
}
SUBJECTS = {"layers": "all heads", "heads": "one head", "feed_forward": "feed-forward"}


def title_of_variant(intervention: str, variant: str) -> str:
    """Title of an intervention: "one head: gaussian", "gradient step +0.1"."""
    subject = SUBJECTS.get(intervention)
    return variant if subject is None else f"{subject}: {variant}"


def unit_of(interventions: Interventions) -> str:
    """Unit of the effects."""
    return UNITS.get(str(interventions.facts.get("loss")), "1")


def layer_labels(rows: Sequence[Effect]) -> Labels:
    """Short names of the layers, by name and call."""
    return blocks_of(rows)  # type: ignore[arg-type]  # it reads layer and call alone


def place_of(row: Effect, labels: Labels) -> str:
    """Layer and head of an effect: "3.5" is head 5 of layer 3."""
    label = labels[row.layer, row.call]
    return label if row.head is None else f"{label} head {row.head}"


def difference_of(row: Effect) -> str:
    """Difference to the control with its 95 % confidence interval."""
    ends = interval(row.difference_low, row.difference_high)
    return digits(row.difference) + (f" ({ends})" if ends else "")


def headline(interventions: Interventions) -> str:
    """Loss of the model, with the amount of text, and a caution if it is small."""
    facts = interventions.facts
    loss = "" if facts["loss"] == "representation" else (
        f" {digits(facts['loss_value'])} {unit_of(interventions)}"
        f" (95 % CI {interval(facts['loss_low'], facts['loss_high'])})"
    )  # fmt: skip
    text = f"{facts['tokens']:,} tokens of {facts['documents']} documents"
    few = facts["documents"] < FEW_DOCUMENTS
    caution = f" Few documents, fewer than {FEW_DOCUMENTS}: only large effects can be found." if few else ""
    return f"Loss of {interventions.model}, {LOSSES[facts['loss']]}:{loss or ' 0 by definition'}; {text}.{caution}"


def sentence_of(comparison: Comparison, unit: str) -> str:
    """Medians over heads or layers, and the counts of those above and below the control."""
    places = "heads" if comparison.intervention == "heads" else "layers"
    title = title_of_variant(comparison.intervention, comparison.variant)
    return (
        f"{title}: median change of the loss {digits(comparison.median('value'))} {unit} "
        f"({comparison.control} {digits(comparison.median('control_value'))}); above the control in "
        f"{comparison.outcomes('above')} of {len(comparison.rows)} {places}, below in {comparison.outcomes('below')} "
        "(FDR 5 %)."
    )
