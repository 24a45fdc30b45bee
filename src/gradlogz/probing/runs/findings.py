"""Findings of a probe: a row for each quantity of each head, a claim for each prediction, extreme tokens.

    Findings   rows, claims, tokens and declarations of one or several models: tables, a summary, a selection, a merge

Findings are records; terminals, notebooks and pages are made by ../reporting.

Read next: records.py (the records), run_folder.py (on disk), predictions/ (the source of rows).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from ..._displays import shown
from ..._errors import InputValueError, MissingPackageError
from .records import NAN, VERDICTS, Declaration, Summary
from .records import Claim as Claim
from .records import Finding as Finding
from .records import Token as Token
from .replicates import Place, Replicates, place_of
from .row_table import COLUMNS, csv_text, table_rows


@dataclass(frozen=True, repr=False)
class Findings:
    """Rows, claims and tokens of one or several models. Immutable: `merge` and `select` return new findings.

    facts: architecture, source and amount of text of each model, by its name.
    declarations: texts of each prediction, with units and formulas of its quantities, by its name.
    replicates: values of judged rows in the replicates of documents, by the fields that identify a row.
    """

    facts: Mapping[str, Mapping[str, Any]]
    rows: Sequence[Finding]
    claims: Sequence[Claim] = ()
    tokens: Sequence[Token] = field(default=())
    declarations: Mapping[str, Declaration] = field(default_factory=dict)
    replicates: Mapping[Place, Replicates] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("rows", "claims", "tokens"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        entries: list[Any] = [*self.rows, *self.claims]
        for entry in entries:
            if entry.verdict not in ("", *VERDICTS):
                remedy = "Use an empty verdict for quantities that are not judged."
                raise InputValueError(
                    "Findings",
                    "verdict",
                    f"the verdict of {entry.prediction} must be {', '.join(VERDICTS)} or empty, got {entry.verdict!r}",
                    remedy,
                )
        for entry in (*entries, *self.tokens):
            if entry.model not in self.facts:
                remedy = "Pass facts for this model; they may be empty."
                raise InputValueError("Findings", "facts", f"facts of the model {entry.model!r} are missing", remedy)
        self._check_once(self.rows, ("model", "prediction", "layer", "call", "head", "quantity"))
        self._check_once(self.claims, ("model", "prediction"))

    def __repr__(self) -> str:
        predictions = len({row.prediction for row in self.rows})
        return f"Findings({', '.join(self.facts)}; {predictions} predictions, {len(self.rows)} rows)"

    def __len__(self) -> int:
        return len(self.rows)

    def table(
        self, prediction: str | None = None, layer: str | None = None, quantity: str | None = None
    ) -> list[dict[str, Any]]:
        """Rows of this prediction, layer and quantity, as dictionaries."""
        return [row._asdict() for row in self._matching(prediction, layer, quantity)]

    def select(
        self, prediction: str | None = None, layer: str | None = None, quantity: str | None = None
    ) -> "Findings":
        """Findings with the rows of this prediction, layer and quantity, their claims, and all tokens."""
        rows = list(self._matching(prediction, layer, quantity))
        predictions = {row.prediction for row in rows}
        declarations = {name: declared for name, declared in self.declarations.items() if name in predictions}
        claims = [claim for claim in self.claims if claim.prediction in predictions]
        replicates = {place_of(row): self.replicates[place_of(row)] for row in rows if place_of(row) in self.replicates}
        return Findings(self.facts, rows, claims, self.tokens, declarations, replicates)

    def frame(self) -> Any:
        """Rows as a polars DataFrame, with the columns of docs/probe.md; values that do not exist are null."""
        try:
            import polars
        except ImportError:
            remedy = "Install it with: pip install 'gradlogz[tables]'; table() needs nothing."
            raise MissingPackageError("Findings.frame", "polars", "polars is not installed", remedy) from None
        types = {str: polars.String, int: polars.Int64, float: polars.Float64}
        schema = {name: types[kind] for name, kind in COLUMNS.items()}
        return polars.DataFrame(table_rows(self.facts, self.rows, self.declarations), schema=schema, orient="row")

    def csv(self) -> str:
        """Rows as CSV, with the columns of `frame`; needs no other package."""
        return csv_text(self.facts, self.rows, self.declarations)

    def summary(self) -> list[Summary]:
        """One summary for each prediction of each model, in the order of computation.

        A prediction without a claim is summarised by its rows: the median of the judged values, and the verdict if it
        is the same for all rows.
        """
        claims = {(claim.model, claim.prediction): claim for claim in self.claims}
        rows: dict[tuple[str, str], list[Finding]] = {}
        for row in self.rows:
            rows.setdefault((row.model, row.prediction), []).append(row)
        places = {model: place for place, model in enumerate(self.facts)}
        keys = sorted({**rows, **claims}, key=lambda key: places[key[0]])  # stable within a model
        return [_sum_up(claims.get(key), rows.get(key, ()), key) for key in keys]

    def merge(self, *others: "Findings") -> "Findings":
        """Union of findings: of several models, or of several predictions about one model."""
        every = (self, *others)
        facts: dict[str, Mapping[str, Any]] = {}
        declarations: dict[str, Declaration] = {}
        for findings in every:
            for model, model_facts in findings.facts.items():
                if dict(facts.setdefault(model, model_facts)) != dict(model_facts):
                    problem = f"the facts of {model!r} differ between the findings"
                    raise InputValueError("Findings.merge", "facts", problem, "Rename one of the models.")
            for name, declared in findings.declarations.items():
                if declarations.setdefault(name, declared) != declared:
                    problem = f"the declarations of {name!r} differ between the findings"
                    remedy = "Probe the models with the same version of the prediction."
                    raise InputValueError("Findings.merge", "declarations", problem, remedy)
        return Findings(
            facts,
            [row for findings in every for row in findings.rows],
            [claim for findings in every for claim in findings.claims],
            [token for findings in every for token in findings.tokens],
            declarations,
            {place: each for findings in every for place, each in findings.replicates.items()},
        )

    def _matching(self, prediction: str | None, layer: str | None, quantity: str | None) -> Iterator[Finding]:
        wanted = {"prediction": prediction, "layer": layer, "quantity": quantity}
        for name, value in wanted.items():
            known = {getattr(row, name) for row in self.rows}
            if value is not None and value not in known:
                remedy = f"Choose from: {', '.join(sorted(known)[:8])}." if known else "The findings are empty."
                raise InputValueError("Findings", name, f"there are no rows with {name} {value!r}", remedy)
        for row in self.rows:
            if all(value in (None, getattr(row, name)) for name, value in wanted.items()):
                yield row

    @staticmethod
    def _check_once(entries: Sequence[Any], names: Sequence[str]) -> None:
        identities = Counter(tuple(getattr(entry, name) for name in names) for entry in entries)
        twice = next((key for key, count in identities.items() if count > 1), None)
        if twice is not None:
            duplicate = ", ".join(str(part) for part in twice)
            remedy = "To extend the text of a model, probe it again with all of the text."
            raise InputValueError(
                "Findings", "entries", f"two entries have the same {', '.join(names)}: {duplicate}", remedy
            )

    # Displays, which ../reporting registers -----------------------------------------------------------------------

    def plot(
        self,
        prediction: str,
        quantity: str | None = None,
        *,
        model: str | None = None,
        by: Literal["layer", "head"] = "layer",
    ) -> Any:
        """Plotly figure of the values and null values of a prediction by layer, or a map by layer and head.

        The quantity is the judged one by default.
        """
        return shown(self, "plot", prediction, quantity, model=model, by=by)

    def __str__(self) -> str:
        """Table of claims as plain text."""
        return shown(self, "text")

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Table of claims for a rich console, within its width."""
        return shown(self, "terminal", console, options)

    def _repr_html_(self) -> str:
        """Table of claims for notebooks, with maps of the verdicts on heads."""
        return shown(self, "html")


def _sum_up(claim: Claim | None, rows: Sequence[Finding], key: tuple[str, str]) -> Summary:
    judged = [row for row in rows if row.verdict and (claim is None or row.quantity == claim.quantity)]
    counts = Counter(row.verdict for row in judged)
    if claim is None:
        verdict = next(iter(counts)) if len(counts) == 1 else "inconclusive" if counts else ""
        medians = [
            median(numbers) if (numbers := [v for v in column if not math.isnan(v)]) else NAN
            for column in ([getattr(row, name) for row in judged] for name in ("value", "null"))
        ]
        quantity = judged[0].quantity if len({row.quantity for row in judged}) == 1 else ""
        claim = Claim(*key, "", quantity, medians[0], NAN, NAN, medians[1], verdict)
    number, supported, refuted = claim.judged, claim.supported, claim.refuted
    if not number:
        number = len(judged) - counts["not applicable"]
        supported, refuted = counts["supported"], counts["refuted"]
    common = {name: getattr(claim, name) for name in Summary._fields if name in Claim._fields}
    common |= {"judged": number, "supported": supported, "refuted": refuted}
    return Summary(**common, share=supported / number if number else NAN)
