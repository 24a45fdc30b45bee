"""The page of one run: which claims hold for the model, in which layers and heads, and how they were tested.

    Results             a table of claims: verdict, value, 95 % confidence interval, null, counts, result
    Layers and heads    heat maps and a table of verdicts
    one section each    the claim by head and by layer, with its null, decision rule and method
    Tokens, data, model, methods

Read next: findings_sections.py (the sections), ../page (the layout).
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
from .findings_wording import cautions, groups, keys_cited, title_of, verdict_sentence
from .formatting import model_sentence
from .run_contents import RunContents

ABOUT = "Tests, on one transformer, of the theory that softmax attention is the gradient of a log normaliser."

# "How to read this page": terms that tables, figures and sentences use, each defined once.
GUIDE = {
    "kind of a claim": (
        "Prediction: a statement of the theory; only predictions count for or against it. Beyond the theory: a test of "
        "a statement that the theory does not make. Descriptive: values, intervals and nulls without a test. "
        "Self-check: true of every model; it tests the measurement."
    ),
    "value": "Value of the named statistic for the model; for most claims a median over heads or layers.",
    "95 % CI": (
        "95 % confidence interval over documents: Poisson bootstrap, or a jackknife over eight groups of documents for "
        "statistics of covariance matrices. The interval of a median over heads is that of the medians of the "
        "replicates. Statistics of weights alone have no sampling error and no interval."
    ),
    "null": (
        "The same statistic under a null model: heads with the spectra of the trained QK matrices and random singular "
        "vectors (matched baseline), random queries of equal logit variance, randomly rotated matrices or updates, "
        "permuted tokens or hidden units, Gaussian samples. Each section names its null. Figures show "
        "it in grey, with its 95 % band where it has one. Above (below) the null: beyond the upper (lower) end of the "
        "band."
    ),
    "bound": (
        "Number that the value of a head must be beyond to support the claim, or to refute it; the section of the "
        "claim states both bounds. A bound is a constant or the null. Where a condition names two of them, the value "
        "must be beyond both if they are joined by “and”, beyond one of them if by “or”. The table “sensitivity to the "
        "bound” counts the heads beyond other bounds."
    ),
    "verdict on a head": (
        "Supported or refuted if its value is beyond the bound at a false discovery rate (FDR) of 5 % over all heads "
        "(Benjamini–Hochberg). Otherwise inconclusive, even if its own 95 % confidence interval excludes the bound: "
        "when many heads are tested, the threshold for a single p-value is stricter than 0.05. Statistics of weights "
        "alone are compared with the bound directly."
    ),
    "verdict on the model": (
        "Supported or refuted if more than half of its heads (or layers) are, by one test of this statement at a level "
        "of 5 % divided by the number of tested claims (Bonferroni); otherwise inconclusive. Described: a descriptive "
        "claim, which is not tested. Passed or failed: a "
        "self-check; failed also if the evaluation of a claim ended with an error. Not applicable: the model lacks "
        "what the claim needs, such as a feed-forward sublayer or a next-token loss."
    ),
    "detectable value": (
        "Minimal detectable effect: the value (or difference to the null) that gives a verdict with a probability of "
        "about 80 % or more if all heads have it, with the text and the width of this model. Smaller effects may be "
        "there and remain inconclusive."
    ),
    "QK matrix": "W_q W_kᵀ of a head: the logit of tokens x and y is x W_q W_kᵀ yᵀ, up to scale and rotary embedding.",
    "OV matrix": "W_v W_o of a head: with attention weights a_j it adds Σ_j a_j x_j W_v W_o to the residual stream.",
    "n": "Number of heads, layers, tokens or documents, as stated.",
    "–": "Not available.",
}


def rendered(page: Page, call: str) -> str:
    """HTML of a page; an error with the command to install the extra if a package is missing."""
    try:
        return render(page)
    except ModuleNotFoundError as missing:
        remedy = "Install the packages of pages with: pip install 'gradlogz[report]'."
        raise MissingPackageError(call, missing.name, f"{missing.name} is not installed", remedy) from None


def page_of_run(contents: RunContents) -> Page:
    """Page of one run, as data."""
    name, run, declarations = contents.name, contents.run, contents.declarations
    claims = [s for s in contents.findings.summary() if s.model == name]
    measured = [claim.prediction for claim in claims]
    absent = [title_of(declarations, each) for each in declarations if each not in measured]
    unmeasured = (f"Not measured in this run: {', '.join(absent)}.",) if absent else ()
    notes = (*run.notes, *cautions(contents.facts), *unmeasured)
    warned = (Chip("incomplete", "inconclusive"),) if run.notes else ()
    methods, sections = _methods(run), sections_of(contents, claims)
    return Page(
        name=f"gradlogz-{name}",
        title=name,
        subtitle=f"{ABOUT} {model_sentence(contents.facts)}",
        verdict=VerdictBanner(
            verdict_sentence(name, claims, declarations), warned, notes, groups(declarations, claims)
        ),
        sections=sections,
        guide=GUIDE,
        methods=methods,
        reproduce=reproduced(run),
        references=cited([*keys_in(methods), *keys_cited(declarations, measured)]),
        data=data_of(contents, sections),
        made_by="gradlogz probe",
        choices=choices_of(contents.findings.rows),
        chosen="layer or head",
    )


def reproduced(run: Run) -> dict[str, str]:
    """Version, seed, text and command line; without those that the run lacks."""
    lines = {
        "version": f"gradlogz {run.version}" if run.version else f"gradlogz {__version__} (the page)",
        "seed": run.seed,
        "text": run.text.get("source"),
        "command": run.command or None,
    }
    return {name: str(value) for name, value in lines.items() if value is not None}


def data_of(contents: RunContents, sections: Sequence[Section]) -> dict[str, Any]:
    """The data of the page, for download; the rows refer to its table."""
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
    source = f" Text: {run.text['source']}." if run.text.get("source") else ""
    return (
        "Data. The model read the text in one pass, during which queries, keys, values, the residual stream "
        "and the output of every sublayer were recorded. All quantities are statistics of these tensors and of the "
        f"weights.{source}",
        "Confidence intervals. Tokens of a document are not independent, so documents are the sampling unit: 95 % "
        "confidence intervals come from the Poisson bootstrap over documents [efron79] [hanley06], and for statistics "
        "of covariance matrices from the jackknife over eight groups of documents [busing99]. Replicates of all heads "
        "are of the same documents; the interval of a median over heads is that of the medians of the replicates.",
        "Null values. The null value is the same statistic under a null model: the matched baseline, random queries of "
        "equal logit variance, randomly rotated matrices or updates, permuted tokens or hidden units, or Gaussian "
        "samples, as named in each section. In the matched baseline queries and keys of a layer are computed from its "
        "inputs in random "
        "rotations, so that the QK matrix of every head keeps its singular values and has random singular vectors "
        "[mezzadri07]; its band is the 95 % prediction band of one more draw.",
        "Bounds. Each tested claim has a bound of support and a bound of refutation: a constant, the null, or both, "
        "joined by “and” or “or”. Where the bound is the matched baseline, the test includes the variance over "
        "its draws. For other bounds, the table on the sensitivity to the bound shows what hangs on it.",
        "Tests. Each head has two p-values, one for each bound, from a two-sided t test of the value against the "
        "bound. The standard error is the distance from the value to the end of the confidence interval that faces the "
        "bound, divided by the 97.5 % quantile of Student's t distribution with the degrees of freedom of the interval "
        "(effective number of documents, or number of groups, minus 1). The "
        "p-value is 1 unless the whole confidence interval is beyond the bound. The Benjamini–Hochberg procedure "
        "[benjamini95] decides which p-values are significant, separately for the two bounds, at FDR 5 % over all "
        "heads. Statistics of weights alone have no sampling error and are compared with the bounds directly.",
        "Multiplicity. The FDR of 5 % of the numbers of heads is about the sampling of documents, within one claim, "
        "one model and one direction (support, or refutation). It does not contain the choice of the null: where a "
        "bound is the end of a 95 % band, up to 5 % of random heads are beyond it. The verdict on the model is a "
        "test of its own: that more than half of its heads or layers are beyond the bound (partial conjunction "
        "[benjamini08]), at 5 % divided by the number of tested claims, so that a false verdict in any claim has a "
        "probability of at most 5 %. Several models are not corrected for. Error rates on random models are in "
        "docs/probe.md.",
        "Verdicts. A head supports (refutes) the claim if its value is significantly beyond the bound of support (of "
        "refutation). All other heads are inconclusive, also those whose 95 % confidence interval excludes the bound "
        "but whose p-value is too large for FDR 5 %. A model with a small majority of supporting heads may be "
        "inconclusive: its p-value is shown.",
        "Theory. The claims follow from [shim22], with corrections. [theory N] refers to statement N of "
        "docs/theory.md, E followed by a number to a correction in docs/errata.md.",
    )
