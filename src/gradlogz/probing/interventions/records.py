"""Results of interventions, as records.

    Effect          the change of the loss by one intervention on one head or layer, and that of its control
    Interventions   all effects on one model, with facts about the model, the text and the loss

Read next: run_interventions.py (the measurement), ../../reporting/interventions_page.py (figures and tables).
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ..._displays import shown
from ..._errors import InputValueError
from ..._foreign_text import table_cell

NAN = math.nan


class Effect(NamedTuple):
    """The change of the loss by an intervention, that of its control, and their difference, with 95 % CIs.

    Attributes:
        intervention: the name of the group: gradient, steps, layers, heads or feed_forward.
        variant: what is done: "gradient removed", "gaussian", "affine", ...
        control: what is done instead in the control; several effects differ in the control alone.
        layer, call, head: the attention layer or feed-forward sublayer; head None if all heads are concerned.
        value, low, high: loss with the intervention - loss of the model, per token.
        control_value: loss with the control - loss of the model; the mean over draws of a random control.
        difference, difference_low, difference_high: value - control_value, paired over documents.
        p: p-value of difference = 0, two-sided.
        outcome: "above" or "below" the control at FDR 5 % over all rows with this variant and control; else empty.
        tokens: number of tokens with a loss.
    """

    intervention: str
    variant: str
    control: str
    layer: str
    call: int
    head: int | None
    value: float
    low: float
    high: float
    control_value: float
    difference: float
    difference_low: float
    difference_high: float
    p: float
    outcome: str
    tokens: int


class Comparison(NamedTuple):
    """Effects of one variant of an intervention beside one control, over heads or layers."""

    intervention: str
    variant: str
    control: str
    rows: tuple[Effect, ...]

    def median(self, name: str) -> float:
        """Return the median of a number of the effects over heads or layers."""
        return median(getattr(row, name) for row in self.rows)

    def outcomes(self, outcome: str) -> int:
        """Return the number of effects above, or below, the control."""
        return sum(row.outcome == outcome for row in self.rows)


@dataclass(frozen=True, repr=False)
class Interventions:
    """Effects of interventions on one model.

    Attributes:
        facts: name and architecture of the model, kind of the loss ("loss"), its value ("loss_value", "loss_low",
            "loss_high"), numbers of tokens and documents, and tokens of the fits.
    """

    model: str
    facts: Mapping[str, Any]
    rows: Sequence[Effect]

    def __repr__(self) -> str:
        return f"Interventions({self.model}; {len(self.rows)} effects)"

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, variant: str | None = None, control: str | None = None) -> "Interventions":
        """Return the effects with this variant and control."""
        rows = [r for r in self.rows if variant in (None, r.variant) and control in (None, r.control)]
        return Interventions(self.model, self.facts, rows)

    def table(self, variant: str | None = None, control: str | None = None) -> list[dict[str, Any]]:
        """Return the effects with this variant and control as dictionaries."""
        return [row._asdict() for row in self.select(variant, control).rows]

    def comparisons(self) -> "list[Comparison]":
        """Return the effects by intervention, variant and control, in the order of measurement."""
        keys = dict.fromkeys(row[:3] for row in self.rows)
        return [Comparison(*key, tuple(row for row in self.rows if row[:3] == key)) for key in keys]

    def to_csv(self) -> str:
        """Return the effects as CSV with a header."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(Effect._fields)
        writer.writerows([table_cell(cell) for cell in row] for row in self.rows)
        return text.getvalue()

    def to_json(self) -> str:
        """Return facts and effects as JSON; NaN is null."""
        rows = [{name: _plain(value) for name, value in row._asdict().items()} for row in self.rows]
        facts = {name: _plain(value) for name, value in self.facts.items()}
        return json.dumps({"model": self.model, "facts": facts, "rows": rows}, indent=1, allow_nan=False)

    def _repr_html_(self) -> str:
        return str(shown(self, "html"))


def interventions_from_json(text: str) -> Interventions:
    """Return the interventions of `Interventions.to_json`."""
    try:
        content = json.loads(text)
        rows = [Effect(*(_number(name, row[name]) for name in Effect._fields)) for row in content["rows"]]
        return Interventions(content["model"], content["facts"], rows)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"the text is not that of interventions ({type(error).__name__})"
        remedy = "Measure them again: gradlogz probe MODEL --intervene all."
        raise InputValueError("interventions_from_json", "text", problem, remedy) from None


def _number(name: str, value: Any) -> Any:
    return NAN if value is None and name != "head" else value


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
