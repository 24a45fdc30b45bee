"""The report of one run: which claims hold for the model, where in it, and how that was measured.

    What holds          a table of claims: value, interval, null, verdict, a sentence
    Layers and heads    a map, and all that is said of the head that is chosen on it
    one section each    the claim by head and by layer, beside its null
    Tokens, data, model, methods

Read next: sections.py (what is in them), ../page (how it looks).
"""

from collections.abc import Sequence
from typing import Any

from .. import __version__
from .._errors import MissingPackageError, sentence
from ..page import Chip, Page, Section, Table, Verdict, render
from .citations import cited, keys_in
from .reading import Told
from .sections import choices_of, sections_of
from .wording import KNOWN, described, explained, groups, title_of, verdict_sentence

ABOUT = "What this transformer says about the theory that attention is the gradient of a log normaliser."


def rendered(page: Page, call: str) -> str:
    """The page as HTML; without its extra, an error that says how to install it."""
    try:
        return render(page)
    except ModuleNotFoundError as missing:
        condition, fact = "jinja2 and plotly must be installed to make a page", f"no {missing.name}"
        remedy = "Install them with: pip install 'gradlogz[report]'."
        raise MissingPackageError(sentence(call, condition, fact, remedy)) from None


def page_of(told: Told) -> Page:
    """The page of what a run says."""
    claims = [s for s in told.findings.summary() if s.model == told.name]
    absent = [title_of(name) for name in KNOWN if name not in {claim.prediction for claim in claims}]
    notes = (*told.missing, *((f"Not measured in this run: {', '.join(absent)}.",) if absent else ()))
    warned = (Chip("incomplete", "undecided"),) if told.missing else ()
    methods, sections = _methods(told), sections_of(told, claims)
    return Page(
        name=f"gradlogz-{told.name}",
        title=told.name,
        subtitle=f"{ABOUT} {described(told.facts)}",
        verdict=Verdict(verdict_sentence(told.name, claims), warned, notes, groups(claims)),
        sections=sections,
        methods=methods,
        reproduce=reproduced(told),
        references=cited(keys_in([*methods, *(p for claim in claims for p in explained(claim.prediction))])),
        data=data_of(told, sections),
        made_by="gradlogz probe",
        choices=choices_of(told.findings.rows),
        chosen="layer or head",
    )


def reproduced(told: Told) -> dict[str, str]:
    """Version, seed, text and command line, as far as they are known."""
    run = told.run
    text = run.get("text") if isinstance(run.get("text"), dict) else {}
    said = {
        "version": f"gradlogz {run['version']}" if run.get("version") else f"gradlogz {__version__} (the page)",
        "seed": run.get("seed"),
        "text": text.get("source") if isinstance(text, dict) else None,
        "command": run.get("command"),
    }
    return {name: str(value) for name, value in said.items() if value is not None}


def data_of(told: Told, sections: Sequence[Section]) -> dict[str, Any]:
    """Everything on the page as plain data; the rows are those of its table."""
    rows = [part for section in sections for part in section.parts if isinstance(part, Table) and part.name == "rows"]
    return {
        "version": __version__,
        "run": {name: value for name, value in told.run.items() if name != "files"},
        "missing": told.missing,
        "facts": told.facts,
        "claims": [claim._asdict() for claim in told.findings.claims],
        "tokens": [token._asdict() for token in told.findings.tokens],
        "rows": rows[0] if rows else [],
    }


def _methods(told: Told) -> tuple[str, ...]:
    text = told.run.get("text")
    source = f" ({text['source']})" if isinstance(text, dict) and text.get("source") else ""
    return (
        f"The model read the text{source} once, and every head was looked at while it did. Intervals are of 95 %, from "
        "the Poisson bootstrap over documents [efron79] [hanley06] or the jackknife over eight groups of documents "
        "[busing99]. A null is the same number where the claim says nothing: of the same architecture with random "
        "weights, of rotated matrices or of permuted tokens, as each section says.",
        "A head supports a claim if its interval lies beyond the bound of the claim, refutes it if beyond the bound on "
        "the other side, and is undecided else, after the correction of Benjamini and Hochberg at 5 % over all heads "
        "[benjamini95]. The model follows the majority of its heads or layers, unless a section says otherwise. The "
        "theory is that of [shim22], corrected.",
    )
