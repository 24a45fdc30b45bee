"""What was found: a row for each quantity of each head, a claim for each prediction, the tokens that stand out.

    Findings   rows, claims, tokens and declarations of one or several models: tables, a summary, a selection, a merge

It is a record: terminals, notebooks and pages are made by ../reporting.

Read next: records.py (what they are made of), run_folder.py (on disk), predictions/ (where rows come from).
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


@dataclass(frozen=True, repr=False)
class Findings:
    """Rows, claims and tokens of one or several models, whose facts are given by name.

    `facts` says of each model what `load` knows of it and what it read. `declarations` holds the texts of each
    prediction, with the units and formulas of its quantities, by its name. Nothing is changed in place; `merge` and
    `select` make other findings.
    """

    facts: Mapping[str, Mapping[str, Any]]
    rows: Sequence[Finding]
    claims: Sequence[Claim] = ()
    tokens: Sequence[Token] = field(default=())
    declarations: Mapping[str, Declaration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("rows", "claims", "tokens"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        entries: list[Any] = [*self.rows, *self.claims]
        for entry in entries:
            if entry.verdict not in ("", *VERDICTS):
                fact, remedy = f"{entry.verdict!r} of {entry.prediction}", "What is not judged has an empty one."
                raise InputValueError(
                    "Findings", "verdict", f"a verdict must be {', '.join(VERDICTS)}, got {fact}", remedy
                )
        for entry in (*entries, *self.tokens):
            if entry.model not in self.facts:
                remedy = "Pass facts for it, empty ones if need be."
                raise InputValueError("Findings", "facts", f"every model must have facts, got {entry.model!r}", remedy)
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
        """The rows that match, as dictionaries: of this prediction, this layer, this quantity."""
        return [row._asdict() for row in self._matching(prediction, layer, quantity)]

    def select(
        self, prediction: str | None = None, layer: str | None = None, quantity: str | None = None
    ) -> "Findings":
        """The same with the rows that match, their claims and declarations, and all tokens."""
        rows = list(self._matching(prediction, layer, quantity))
        kept = {row.prediction for row in rows}
        declarations = {name: declared for name, declared in self.declarations.items() if name in kept}
        claims = [claim for claim in self.claims if claim.prediction in kept]
        return Findings(self.facts, rows, claims, self.tokens, declarations)

    def frame(self) -> Any:
        """The rows as a DataFrame of polars, with numbers where there are numbers and null for no head."""
        try:
            import polars
        except ImportError:
            remedy = "Install it with: pip install 'gradlogz[tables]'; table() needs nothing."
            raise MissingPackageError(
                "Findings.frame", "polars", "polars must be installed, got none", remedy
            ) from None
        numbers = dict.fromkeys(("value", "low", "high", "null", "null_low", "null_high"), polars.Float64)
        counts = dict.fromkeys(("call", "head", "tokens"), polars.Int64)
        schema = {name: {**numbers, **counts}.get(name, polars.String) for name in Finding._fields}
        return polars.DataFrame([tuple(row) for row in self.rows], schema=schema, orient="row")

    def summary(self) -> list[Summary]:
        """One row for each prediction of each model, in the order in which they were made.

        A prediction without a claim of its own is summed up by its rows: the middle value of what is judged, and the
        verdict that all of them share.
        """
        claims = {(claim.model, claim.prediction): claim for claim in self.claims}
        rows: dict[tuple[str, str], list[Finding]] = {}
        for row in self.rows:
            rows.setdefault((row.model, row.prediction), []).append(row)
        places = {model: place for place, model in enumerate(self.facts)}
        keys = sorted({**rows, **claims}, key=lambda key: places[key[0]])  # stable within a model
        return [_sum_up(claims.get(key), rows.get(key, ()), key) for key in keys]

    def merge(self, *others: "Findings") -> "Findings":
        """All findings together; of one model, those of several predictions, each made once."""
        every = (self, *others)
        facts: dict[str, Mapping[str, Any]] = {}
        declarations: dict[str, Declaration] = {}
        for findings in every:
            for model, said in findings.facts.items():
                if dict(facts.setdefault(model, said)) != dict(said):
                    remedy = "Give one of the models another name."
                    condition = "facts of a model must be the same in all findings"
                    raise InputValueError("Findings.merge", "facts", f"{condition}, got two of {model!r}", remedy)
            for name, declared in findings.declarations.items():
                if declarations.setdefault(name, declared) != declared:
                    remedy = "Probe the models with the same version of the prediction."
                    condition = "the declaration of a prediction must be the same in all findings"
                    raise InputValueError("Findings.merge", "declarations", f"{condition}, got two of {name!r}", remedy)
        return Findings(
            facts,
            [row for findings in every for row in findings.rows],
            [claim for findings in every for claim in findings.claims],
            [token for findings in every for token in findings.tokens],
            declarations,
        )

    def _matching(self, prediction: str | None, layer: str | None, quantity: str | None) -> Iterator[Finding]:
        wanted = {"prediction": prediction, "layer": layer, "quantity": quantity}
        for name, value in wanted.items():
            known = {getattr(row, name) for row in self.rows}
            if value is not None and value not in known:
                remedy = f"There are: {', '.join(sorted(known)[:8])}." if known else "There are no rows."
                raise InputValueError("Findings", name, f"{name} must be one of the rows, got {value!r}", remedy)
        for row in self.rows:
            if all(value in (None, getattr(row, name)) for name, value in wanted.items()):
                yield row

    @staticmethod
    def _check_once(entries: Sequence[Any], names: Sequence[str]) -> None:
        seen = Counter(tuple(getattr(entry, name) for name in names) for entry in entries)
        twice = next((key for key, count in seen.items() if count > 1), None)
        if twice is not None:
            fact = "twice " + ", ".join(str(part) for part in twice)
            remedy = "Merge statistics, not findings, of one model over more text."
            raise InputValueError(
                "Findings", "entries", f"entries must differ in {' or '.join(names)}, got {fact}", remedy
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
        """A figure of plotly: the values of a prediction beside their nulls, layer after layer, or by layer and head.

        The quantity is the judged one if none is named.
        """
        return shown(self, "plot", prediction, quantity, model=model, by=by)

    def __str__(self) -> str:
        """The summary as plain lines."""
        return shown(self, "text")

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The summary as a table of rich, as wide as the terminal allows."""
        return shown(self, "terminal", console, options)

    def _repr_html_(self) -> str:
        """The summary as a table for notebooks, and below it maps of what is judged head by head."""
        return shown(self, "html")


def _sum_up(claim: Claim | None, rows: Sequence[Finding], key: tuple[str, str]) -> Summary:
    judged = [row for row in rows if row.verdict and (claim is None or row.quantity == claim.quantity)]
    counts = Counter(row.verdict for row in judged)
    number = len(judged) - counts["not applicable"]
    share = counts["supported"] / number if number else NAN
    if claim is None:
        verdict = next(iter(counts)) if len(counts) == 1 else "undecided" if counts else ""
        middle = [
            median(known) if (known := [v for v in column if not math.isnan(v)]) else NAN
            for column in ([getattr(row, name) for row in judged] for name in ("value", "null"))
        ]
        quantity = judged[0].quantity if len({row.quantity for row in judged}) == 1 else ""
        claim = Claim(*key, "", quantity, middle[0], NAN, NAN, middle[1], verdict, "")
    return Summary(
        **{name: getattr(claim, name) for name in Summary._fields if name in Claim._fields},
        judged=number,
        supported=counts["supported"],
        refuted=counts["refuted"],
        share=share,
    )
