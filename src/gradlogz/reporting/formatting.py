"""Numbers, intervals, verdicts and models as text, for terminals, notebooks, figures and pages.

    decimals(0.12345)   0.123      tables of a terminal or a notebook
    digits(0.12345)     0.123      figures and pages, three significant digits: 1234.5 is 1.23e+03
    interval(a, b)      a to b     empty without an interval
    STYLES              the colour of each verdict, on terminals and on pages

Read next: findings_wording.py (sentences), ../page/palette.py (colours).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..page.palette import LIGHT, STATUSES
from ..page.parts import Status
from ..probing.runs.records import Summary


class VerdictStyle(NamedTuple):
    """Style of a verdict: colour on a terminal, status on a page, colour in a figure."""

    terminal: str
    status: Status
    colour: str

    @property
    def hexadecimal(self) -> str:
        """The colour on a white background."""
        return LIGHT[self.colour]


# Colour-blind readers can distinguish these. Quantities that are not judged are blue.
STYLES = {
    "supported": VerdictStyle("green", "agrees", STATUSES["agrees"]),
    "refuted": VerdictStyle("red", "departs", STATUSES["departs"]),
    "inconclusive": VerdictStyle("yellow", "inconclusive", STATUSES["inconclusive"]),
    "described": VerdictStyle("blue", "silent", "blue"),
    "passed": VerdictStyle("green", "agrees", STATUSES["agrees"]),
    "failed": VerdictStyle("red", "departs", STATUSES["departs"]),
    "not applicable": VerdictStyle("bright_black", "silent", STATUSES["silent"]),
    "": VerdictStyle("", "silent", "blue"),
}


SYMBOLS = {
    "supported": "✓", "refuted": "✗", "inconclusive": "~", "described": "·", "passed": "✓", "failed": "✗",
    "not applicable": "–", "": "·",
}  # fmt: skip
ASCII = {
    "✓": "+", "✗": "x", "–": "-", "−": "-", "·": ".", "…": ".", "²": "2", "³": "3", "₂": "2", "≤": "<=", "≥": ">=",
    "×": "x", "°": "deg", "β": "beta", "τ": "tau", "σ": "sigma",
}  # fmt: skip


def encodable(text: str, encoding: str) -> str:
    """The text if it can be encoded, else with ASCII in place of symbols."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        for symbol, ascii_text in ASCII.items():
            text = text.replace(symbol, ascii_text)
        return text.encode("ascii", "replace").decode()
    return text


def decimals(value: float) -> str:
    """Three decimals, or two significant digits for very small and large numbers; empty for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:z.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.2g}"


def short_decimals(value: float) -> str:
    """Three decimals, or one significant digit for very small numbers, in at most six characters below 100."""
    return decimals(value) if value == 0 or abs(value) >= 0.001 or math.isnan(value) else f"{value:.0e}"


def p_value(p: float) -> str:
    """A p-value with three decimals, "<.001" below; empty for NaN."""
    return "" if math.isnan(p) else "<.001" if p < 0.001 else f"{p:.3f}".removeprefix("0") if p < 1 else "1"


def digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def interval(low: float, high: float, number: Callable[[float], str] = digits) -> str:
    """Both ends of an interval; empty if it is unknown or has width 0, as for functions of the weights alone."""
    return "" if math.isnan(low) or math.isnan(high) or low == high else f"{number(low)} to {number(high)}"


def counts_of(summary: Summary) -> str:
    """Numbers of heads or layers that support and refute a claim, "6/63 of 72"; only their number if it is described.

    Empty if none was measured.
    """
    counts = "" if summary.verdict == "described" else f"{summary.supported}/{summary.refuted} of "
    return f"{counts}{summary.judged}" if summary.judged else ""


def finite(value: float) -> float | None:
    """The number, or None for NaN and infinities, which figures cannot show."""
    return value if math.isfinite(value) else None


def known(value: float) -> float | None:
    """The number, or None for NaN, which is an empty cell of a table."""
    return None if math.isnan(value) else value


def measured_line(facts: Mapping[str, Any]) -> str:
    """Architecture, layers, heads, tokens and documents of a measurement in one line."""
    parts = _architecture({name: fact for name, fact in facts.items() if name != "parameters"})
    counts = {name: facts.get(name) for name in ("tokens", "documents")}
    parts += [f"{count:,} {name}" for name, count in counts.items() if isinstance(count, int) and count]
    effective = facts.get("effective_documents")
    parts += [f"{effective:g} effective"] if isinstance(effective, int | float) and effective else []
    parts += ["dequantised"] * bool(facts.get("dequantised"))
    return ", ".join(parts + ["without a random-weights baseline"] * bool(facts.get("without_baseline")))


def model_sentence(facts: Mapping[str, Any]) -> str:
    """Sentences on a model: architecture and amount of text, source, licence."""
    parts = _architecture(facts) + ([f"{facts['dtype']}"] if facts.get("dtype") else [])
    if isinstance(facts.get("tokens"), int):
        parts.append(f"measured on {facts['tokens']:,} tokens of {facts.get('documents', 'some')} documents")
    origin = [f"{name.capitalize()}: {facts[name]}" for name in ("source", "licence") if facts.get(name)]
    return ". ".join([", ".join(parts), *origin]) + "." if parts else "No facts are known."


def _architecture(facts: Mapping[str, Any]) -> list[str]:
    parts = [str(facts["architecture"])] if facts.get("architecture") else []
    if (count := facts.get("parameters")) and isinstance(count, int):
        parts.append(f"{count / 1e6:,.1f} M parameters" if count >= 1e5 else f"{count:,} parameters")
    counts = {name: facts[name] for name in ("layers", "heads") if facts.get(name)}
    return parts + [f"{number} {name if number != 1 else name[:-1]}" for name, number in counts.items()]
