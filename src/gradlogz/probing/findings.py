"""What was found: a row for each quantity of each head, a claim for each prediction, the tokens that stand out.

    Findings   rows, claims and tokens: tables, figures, a summary, several models together; shown by rich and notebooks

Read next: records.py (what they are made of), run_folder.py (on disk), predictions/ (where rows come from).
"""

import html
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from .._errors import InputValueError, MissingPackageError, sentence
from ..page import drawn
from .figures import by_layer, head_map, labels_of
from .maps import inline_maps
from .records import NAN, Summary
from .records import VERDICTS as VERDICTS
from .records import Claim as Claim
from .records import Declaration as Declaration
from .records import Finding as Finding
from .records import Token as Token

WIDE = 140  # columns from which on a table has one for what was found
NARROW = 100  # columns below which the null goes below the value, and the support into the words


@dataclass(frozen=True, repr=False)
class Findings:
    """Rows, claims and tokens of one or several models, whose facts are given by name.

    `declarations` holds the texts of each prediction, by its name. `facts` says of each model what `load` knows of it
    and what it read. Nothing is changed in place; `merge` and
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
                raise InputValueError(sentence("Findings", f"a verdict must be {', '.join(VERDICTS)}", fact, remedy))
        for entry in (*entries, *self.tokens):
            if entry.model not in self.facts:
                remedy = "Pass facts for it, empty ones if need be."
                raise InputValueError(sentence("Findings", "every model must have facts", f"{entry.model!r}", remedy))
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
        """The same with the rows that match, their claims, and all tokens."""
        rows = list(self._matching(prediction, layer, quantity))
        kept = {row.prediction for row in rows}
        return Findings(self.facts, rows, [c for c in self.claims if c.prediction in kept], self.tokens)

    def frame(self) -> Any:
        """The rows as a DataFrame of polars, with numbers where there are numbers and null for no head."""
        try:
            import polars
        except ImportError:
            remedy = "Install it with: pip install 'gradlogz[tables]'; table() needs nothing."
            raise MissingPackageError(sentence("Findings.frame", "polars must be installed", "none", remedy)) from None
        numbers = dict.fromkeys(("value", "low", "high", "null", "null_low", "null_high"), polars.Float64)
        counts = dict.fromkeys(("call", "head", "tokens"), polars.Int64)
        schema = {name: {**numbers, **counts}.get(name, polars.String) for name in Finding._fields}
        return polars.DataFrame([tuple(row) for row in self.rows], schema=schema, orient="row")

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
        if by not in ("layer", "head"):
            remedy = "By layer there are intervals and nulls, by head a map."
            raise InputValueError(sentence("Findings.plot", "by must be 'layer' or 'head'", f"{by!r}", remedy))
        if (model is None and len(self.facts) > 1) or model not in (None, *self.facts):
            remedy = f"There are: {', '.join(self.facts)}."
            raise InputValueError(sentence("Findings.plot", "model must name one of the models", f"{model!r}", remedy))
        rows = [row for row in self._matching(prediction, None, None) if model in (None, row.model)]
        judged = [s.quantity for s in self.summary() if s.prediction == prediction and model in (None, s.model)]
        wanted = quantity or next(filter(None, judged), rows[0].quantity)
        shown = [row for row in rows if row.quantity == wanted]
        if not shown or (by == "head" and all(row.head is None for row in shown)):
            fact = f"{wanted!r} of {prediction}" + (", which is of whole layers" if shown else "")
            remedy = f"There are: {', '.join(dict.fromkeys(row.quantity for row in rows))}."
            raise InputValueError(sentence("Findings.plot", f"quantity must be one that a {by} has", fact, remedy))
        try:
            return drawn((head_map if by == "head" else by_layer)(shown, labels_of(shown)))
        except ModuleNotFoundError:
            remedy = "Install it with: pip install 'gradlogz[report]'."
            raise MissingPackageError(sentence("Findings.plot", "plotly must be installed", "none", remedy)) from None

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
        for findings in every:
            for model, said in findings.facts.items():
                if dict(facts.setdefault(model, said)) != dict(said):
                    remedy = "Give one of the models another name."
                    condition = "facts of a model must be the same in all findings"
                    raise InputValueError(sentence("Findings.merge", condition, f"two of {model!r}", remedy))
        return Findings(
            facts,
            [row for findings in every for row in findings.rows],
            [claim for findings in every for claim in findings.claims],
            [token for findings in every for token in findings.tokens],
        )

    def _matching(self, prediction: str | None, layer: str | None, quantity: str | None) -> Iterator[Finding]:
        wanted = {"prediction": prediction, "layer": layer, "quantity": quantity}
        for name, value in wanted.items():
            known = {getattr(row, name) for row in self.rows}
            if value is not None and value not in known:
                remedy = f"There are: {', '.join(sorted(known)[:8])}." if known else "There are no rows."
                raise InputValueError(sentence("Findings", f"{name} must be one of the rows", f"{value!r}", remedy))
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
            raise InputValueError(sentence("Findings", f"entries must differ in {' or '.join(names)}", fact, remedy))

    # Shown --------------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The summary as a table of rich, as wide as the terminal allows."""
        from rich.markup import escape
        from rich.table import Table
        from rich.text import Text

        wide, narrow = options.max_width >= WIDE, options.max_width < NARROW
        for model, facts in self.facts.items():
            yield Text.from_markup(f"[bold]{escape(model)}[/]  [dim]{escape(_described(facts))}[/]")
            table = Table(box=None, pad_edge=False, header_style="bold")
            table.add_column("prediction", no_wrap=True)
            table.add_column("claim", overflow="fold", ratio=3)
            table.add_column("value", justify="right", no_wrap=True)
            if not narrow:
                table.add_column("null", justify="right", no_wrap=True)
                table.add_column("support", justify="right", no_wrap=True)
            if wide:
                table.add_column("what was found", overflow="fold", ratio=3)
            table.add_column("verdict", no_wrap=True)
            for s in (s for s in self.summary() if s.model == model):
                null, support = _number(s.null), _share(s)
                found = " ".join(filter(None, (s.words, s.note or (support and narrow and f"Support: {support}."))))
                claim = escape(s.claim) + ("" if wide or not found else f"\n[dim]{escape(found)}[/]")
                # The interval goes below its value: beside it, it would leave no room for the words.
                lines = (_number(s.value), _interval(s.low, s.high), null and narrow and f"null {null}")
                verdict = f"[{VERDICTS[s.verdict][0]}]{s.verdict}[/]" if s.verdict else ""
                beside = [] if narrow else [null, support, escape(found)] if wide else [null, support]
                table.add_row(escape(s.prediction), claim, "\n".join(filter(None, lines)), *beside, verdict)
            yield table

    def __str__(self) -> str:
        """The summary as plain lines."""
        lines = []
        for model, facts in self.facts.items():
            lines.append(f"{model}  {_described(facts)}".rstrip())
            for s in (s for s in self.summary() if s.model == model):
                parts = (s.prediction, s.verdict, _number(s.value), _interval(s.low, s.high), s.words, s.note)
                lines.append("  " + "  ".join(filter(None, parts)))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The summary as a table for notebooks, and below it maps of what is judged head by head."""
        tell = html.escape
        cells = ("prediction", "claim", "value", "interval", "null", "support", "what was found", "verdict")
        pieces = []
        for model, facts in self.facts.items():
            pieces.append(f"<p><b>{tell(model)}</b> {tell(_described(facts))}</p>")
            pieces.append("<table><thead><tr>" + "".join(f"<th>{name}</th>" for name in cells) + "</tr></thead><tbody>")
            for s in (s for s in self.summary() if s.model == model):
                colour = VERDICTS[s.verdict][1] if s.verdict else "inherit"
                found = " ".join(filter(None, (s.words, s.note)))
                texts = (s.prediction, s.claim, _number(s.value), _interval(s.low, s.high), _number(s.null), _share(s))
                row = "".join(f"<td>{tell(text)}</td>" for text in (*texts, found))
                pieces.append(f'<tr>{row}<td style="color:{colour};font-weight:600">{tell(s.verdict)}</td></tr>')
            pieces.append("</tbody></table>")
            pieces.append(inline_maps([row for row in self.rows if row.model == model]))
        return "\n".join(pieces)


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


def _described(facts: Mapping[str, Any]) -> str:
    """The facts of a model that a reader of its table wants, in one line."""
    said = [str(facts["architecture"])] if facts.get("architecture") else []
    if facts.get("parameters"):
        said.append(f"{facts['parameters'] / 1e6:,.1f} M parameters")
    said += [f"{facts[name]} {name}" for name in ("layers", "heads") if facts.get(name)]
    said += [f"{facts['tokens']:,} tokens"] if facts.get("tokens") else []
    said += ["dequantised"] * bool(facts.get("dequantised"))
    return ", ".join(said + ["without a random twin"] * bool(facts.get("without_twin")))


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:z.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.2g}"


def _interval(low: float, high: float) -> str:
    none = math.isnan(low) or math.isnan(high) or low == high  # as of what weights alone decide
    return "" if none else f"{_number(low)} to {_number(high)}"


def _share(summary: Summary) -> str:
    return f"{summary.supported} of {summary.judged}" if summary.judged else ""
