"""The report of one run: which claims hold for the model, where in it, and how that was measured.

    What holds          a table of claims: value, interval, null, verdict, a sentence
    Layers and heads    a map, and all that is said of the head that is chosen on it
    one section each    the claim by head and by layer, beside its null
    Tokens, data, model, methods

Read next: findings_sections.py (what is in them), ../page (how it looks).
"""

from collections.abc import Sequence
from typing import Any

from .. import __version__
from .._errors import MissingPackageError
from ..page import Chip, Page, Section, Table, VerdictBanner, render
from ..probing.runs.findings_file import plain_record
from ..probing.runs.run_folder import DESCRIBED, Run
from .citations import cited, keys_in
from .findings_sections import choices_of, sections_of
from .findings_wording import groups, keys_cited, title_of, verdict_sentence
from .formatting import model_sentence
from .run_contents import RunContents

ABOUT = "What this transformer says about the theory that attention is the gradient of a log normaliser."


def rendered(page: Page, call: str) -> str:
    """The page as HTML; without its extra, an error that says how to install it."""
    try:
        return render(page)
    except ModuleNotFoundError as missing:
        condition, fact = "jinja2 and plotly must be installed to make a page", f"no {missing.name}"
        remedy = "Install them with: pip install 'gradlogz[report]'."
        raise MissingPackageError(call, None, f"{condition}, got {fact}", remedy) from None


def page_of_run(contents: RunContents) -> Page:
    """The page of a run."""
    name, run, declarations = contents.name, contents.run, contents.declarations
    claims = [s for s in contents.findings.summary() if s.model == name]
    measured = [claim.prediction for claim in claims]
    absent = [title_of(declarations, each) for each in declarations if each not in measured]
    notes = (*run.notes, *((f"Not measured in this run: {', '.join(absent)}.",) if absent else ()))
    warned = (Chip("incomplete", "undecided"),) if run.notes else ()
    methods, sections = _methods(run), sections_of(contents, claims)
    return Page(
        name=f"gradlogz-{name}",
        title=name,
        subtitle=f"{ABOUT} {model_sentence(contents.facts)}",
        verdict=VerdictBanner(verdict_sentence(name, claims), warned, notes, groups(declarations, claims)),
        sections=sections,
        methods=methods,
        reproduce=reproduced(run),
        references=cited([*keys_in(methods), *keys_cited(declarations, measured)]),
        data=data_of(contents, sections),
        made_by="gradlogz probe",
        choices=choices_of(contents.findings.rows),
        chosen="layer or head",
    )


def reproduced(run: Run) -> dict[str, str]:
    """Version, seed, text and command line, as far as they are known."""
    lines = {
        "version": f"gradlogz {run.version}" if run.version else f"gradlogz {__version__} (the page)",
        "seed": run.seed,
        "text": run.text.get("source"),
        "command": run.command or None,
    }
    return {name: str(value) for name, value in lines.items() if value is not None}


def data_of(contents: RunContents, sections: Sequence[Section]) -> dict[str, Any]:
    """Everything on the page as plain data; the rows are those of its table."""
    rows = [part for section in sections for part in section.parts if isinstance(part, Table) and part.name == "rows"]
    findings, run = contents.findings, contents.run
    described = {name: getattr(run, name) for name in DESCRIBED} if run.command or run.version else {}
    return {
        "version": __version__,
        "run": described,
        "missing": run.notes,
        "facts": contents.facts,
        "claims": [plain_record(claim) for claim in findings.claims],
        "tokens": [token._asdict() for token in findings.tokens],
        "rows": rows[0] if rows else [],
    }


def _methods(run: Run) -> tuple[str, ...]:
    source = f" ({run.text['source']})" if run.text.get("source") else ""
    return (
        f"The model read the text{source} once, and every head was looked at while it did. Intervals are of 95 %, from "
        "the Poisson bootstrap over documents [efron79] [hanley06] or the jackknife over eight groups of documents "
        "[busing99]. A null is the same number where the claim says nothing: of the same architecture with random "
        "weights, of rotated matrices or of permuted tokens, as each section says.",
        "A head supports a claim if its interval lies beyond the bound of the claim, refutes it if beyond the bound on "
        "the other side, and is inconclusive else, at FDR 5 % over all heads (Benjamini–Hochberg) "
        "[benjamini95]. The model follows the majority of its heads or layers, unless a section says otherwise. The "
        "theory is that of [shim22], corrected.",
    )
