"""The probe: a model over a corpus, every prediction measured in the same pass, then judged.

    batches      text -> documents -> batches of tokens                      corpus/
    statistics   merged over the events of all batches                       passes/batch_statistics.py, predictions/
    findings     verdict(evaluate(statistics), null(statistics))             predictions/, hypothesis_tests.py

Memory does not grow with the corpus, and findings are made without the model. A random twin of the model, of the same
architecture, passes a part of the same tokens for the nulls that need one.

Read next: prediction.py (what a prediction is), runs/findings.py (what comes out), runs/run_folder.py (on disk).
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._errors import InputTypeError, InputValueError
from .._progress import Progress, reporter
from .._typing import Tensor
from .computed import Computed
from .corpus.batching import Batch, Batches, Report
from .corpus.readers import batches_of, corpus_of
from .corpus.text import Source
from .inside.discovery import discover
from .inside.loading import describe, random_twin
from .inside.weights import weights_of
from .passes.batch_statistics import statistics_of
from .passes.extreme_tokens import Standing, greatest
from .passes.interruption import interruptible
from .passes.memory_limits import check_memory, tokens_of_a_batch
from .passes.placement import placed
from .prediction import Baseline, Prediction, Probed
from .predictions import known_predictions
from .runs.findings import Findings
from .runs.judgement import Judgement, Measured, split
from .runs.records import Claim, Declaration, Finding, Token
from .statistics import merge, token_hashes

TOKENS = 20_000  # read unless another number is asked for
SHARE = 0.1  # of their windows the twin reads

Wanted = Sequence[str | Prediction | ModuleType] | None  # names of predictions, or files that define one; None: all


class Measurement(NamedTuple):
    """What a pass over a corpus leaves: enough for all findings, and for merging with other passes.

    state: {prediction: its statistics}; baseline: the random-weights baseline with its statistics.
    complete: whether the corpus was read to its end.
    """

    probed: Probed
    facts: dict[str, Any]
    state: dict[str, Any]
    baseline: Baseline | None
    report: Report
    tokens: list[Token]
    seconds: dict[str, float]
    complete: bool


def probe(
    model: nn.Module,
    tokenizer: Any,
    texts: Source | Iterable[Mapping[str, Tensor]] = None,
    *,
    name: str | None = None,
    tokens: int | None = TOKENS,
    length: int | None = None,
    predictions: Wanted = None,
    twin: float = SHARE,
    seed: int = 0,
    progress: Progress = False,
) -> Findings:
    """What a model says about the theory: every prediction, measured on a text, with nulls and intervals.

    The model may be in training: it is read without dropout and left as it was. Findings show themselves in a notebook
    and on a terminal (`rich.print`); `.table()` has the rows.

    Args:
        tokenizer: of a model of images its image processor; None if inputs are given in place of texts.
        texts: a file, a folder, - for standard input, or a list of texts; the prose that comes with Python if None. For
            images a folder; without a tokenizer batches, each a dictionary such as {"pixel_values": [b, 3, h, w]}, of
            which every row counts as a document and all are read.
        tokens: how many to read, None for all of them.
        length: of a window of tokens at most.
        predictions: names of those to measure, or files of your own (docs/adding_a_prediction.md); all by default.
        twin: the part of the windows that a twin with random weights reads too, one of each group at least; 0 for none.
        progress: True for a bar on standard error, or a function of the tokens read and the tokens to read.

    Law: tests/laws/test_the_probe_reads_a_corpus_once.py.
    """
    measured = measure(
        model, tokenizer, corpus_of(tokenizer, texts), name=name, tokens=tokens, length=length, predictions=predictions,
        twin=twin, seed=seed, progress=progress,
    )  # fmt: skip
    return evaluate(measured, predictions=predictions)


def measure(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[Any],
    *,
    name: str | None = None,
    facts: Mapping[str, Any] | None = None,
    tokens: int | None = TOKENS,
    length: int | None = None,
    predictions: Wanted = None,
    twin: float = SHARE,
    seed: int = 0,
    progress: Progress = False,
) -> Measurement:
    """One pass of a model over documents, or inputs without a tokenizer, and of its twin over a part of them.

    Ctrl-C ends the pass after the batch that is under way, and that of the twin after its first.
    """
    wanted = chosen(predictions)
    if not 0.0 <= twin <= 1.0:
        raise InputValueError(
            "probe", "twin", f"twin must be a part of the tokens, 0 to 1, got {twin}", "0.1 is a tenth."
        )
    padded = tokens_of_a_batch(model)
    reading = batches_of(tokenizer, texts, tokens=tokens, length=length, padded=padded, seed=seed)
    first = next(reading)
    inputs = placed(first, model).inputs
    architecture = discover(model, inputs)
    large = check_memory(model, architecture, wanted, twin=twin > 0)
    if progress is True and large:
        sys.stderr.write(f"{large}\n")
    probed = Probed(name or type(model).__name__, architecture, weights_of(model, architecture, inputs), seed)
    has_tokens = isinstance(reading, Batches)  # of other inputs only the model knows how many tokens they are
    show = reporter(progress, "tokens" if has_tokens else "rows")
    of_twin: list[Batch] = []
    state: dict[str, Any] = {}
    standing: list[Standing] = []
    begun = time.perf_counter()
    with interruptible() as interrupted:
        for batch in chain([first], reading):
            added, others = statistics_of(model, architecture, placed(batch, model), wanted)
            state = merge(state, added)
            standing = greatest([*standing, *others])
            part = _part(batch, twin, met={each.group for each in of_twin})
            if part is not None:
                of_twin.append(part)
            done = reading.report.tokens if has_tokens else reading.report.rows
            show(done, (tokens or 0) if has_tokens else 0)
            if interrupted():
                break
        show(done, done)
        seconds = {"model": time.perf_counter() - begun}
        begun = time.perf_counter()
        other = None if not of_twin or not twin else _twin(model, of_twin, wanted, probed, interrupted)
        seconds["baseline"] = time.perf_counter() - begun
    said = {**describe(model), **(facts or {}), "tokens": reading.report.tokens, "documents": reading.report.documents}
    if isinstance(other, str):
        said["without_baseline"], other = other, None
    stood = [each.token(probed.name, tokenizer) for each in standing]
    return Measurement(probed, said, state, other, reading.report, stood, seconds, not interrupted())


def evaluate(measured: Measurement, *, predictions: Wanted = None) -> Findings:
    """The findings of a measurement, without the model."""
    rows: list[Finding] = []
    claims: list[Claim] = []
    declarations: dict[str, Declaration] = {}
    model, other = measured.probed.name, measured.baseline
    for prediction in chosen(predictions):
        key = prediction.name
        if key not in measured.state:
            continue
        state, probed = measured.state[key], replace(measured.probed, computed=Computed())
        values = prediction.evaluate(state, probed)
        baseline = None if other is None else replace(other, state=other.state.get(key, prediction.empty()))
        judged = prediction.verdict(_joined(model, key, values, prediction.null(state, probed, baseline)))
        rows += judged.findings
        low, high = _ends(judged)
        numbers = {name: getattr(judged, name) for name in Judgement._fields if name in Claim._fields}
        numbers |= {"low": low, "high": high}
        claims.append(Claim(model, key, prediction.declaration.claim, **numbers))
        declarations[key] = prediction.declaration
    return Findings({model: measured.facts}, rows, claims, measured.tokens, declarations)


def chosen(wanted: Wanted) -> list[Prediction]:
    """The predictions of these names, those that files define, or these themselves; all that there are if None."""
    known = {p.name: p for p in known_predictions()}
    if wanted is None:
        return list(known.values())
    found = []
    for each in wanted:
        if isinstance(each, str) and each not in known:
            remedy = f"They are {', '.join(known)}."
            raise InputValueError(
                "probe", "predictions", f"predictions must be names of predictions, got {each!r}", remedy
            )
        prediction = known[each] if isinstance(each, str) else getattr(each, "PREDICTION", each)
        if not isinstance(prediction, Prediction):
            fact, remedy = type(each).__name__, "A file of your own defines PREDICTION."
            raise InputTypeError(
                "probe", "predictions", f"predictions must be names, files or Predictions, got {fact}", remedy
            )
        found.append(prediction)
    return found


def _ends(judged: Judgement) -> tuple[float, float]:
    """The interval of the number of a claim: its own, or that of the finding in the middle, whose value it is.

    Of an even number of findings the value is the mean of two, and so are the ends.
    """
    if not math.isnan(judged.low) or math.isnan(judged.value):
        return judged.low, judged.high
    of = [f for f in judged.findings if f.quantity == judged.quantity and f.verdict not in ("", "not applicable")]
    of = sorted((f for f in of if not math.isnan(f.value)), key=lambda f: f.value)
    two = of[(len(of) - 1) // 2 : len(of) // 2 + 1]
    return (fmean(f.low for f in two), fmean(f.high for f in two)) if two else (math.nan, math.nan)


def _joined(model: str, prediction: str, values: list[Measured], nulls: list[Measured]) -> list[Finding]:
    """Values beside their nulls."""
    by = {(n.layer, n.head, n.quantity): n for n in nulls}
    rows = []
    for m in values:
        n = by.get((m.layer, m.head, m.quantity))
        layer, call = split(m.layer)
        null = (torch.nan,) * 3 if n is None else (n.value, n.low, n.high)
        rows.append(
            Finding(model, prediction, layer, call, m.head, m.quantity, m.value, m.low, m.high, *null, m.tokens)
        )
    return rows


def _twin(
    model: nn.Module,
    of_twin: list[Batch],
    predictions: Sequence[Prediction],
    probed: Probed,
    interrupted: Callable[[], bool],
) -> Baseline | str:
    """The same tokens through random weights of the same architecture, or why the model cannot be made anew."""
    predictions = [p for p in predictions if p.baseline == "statistics"]
    try:
        other = random_twin(model, seed=probed.seed)
    except ValueError as refusal:
        return str(refusal)
    inputs = placed(of_twin[0], other).inputs
    architecture = discover(other, inputs)
    state: dict[str, Any] = {}
    for batch in of_twin:
        state = merge(state, statistics_of(other, architecture, placed(batch, other), predictions)[0])
        if interrupted():
            break
    weights = weights_of(other, architecture, inputs)
    return Baseline(state, Probed(f"{probed.name} with random weights", architecture, weights, probed.seed))


def _part(batch: Batch, share: float, met: set[int]) -> Batch | None:
    """The rows of a batch that the twin reads, by their hash; of a group that was not met yet one at least."""
    hashes = token_hashes(batch.keys, batch.starts.unsqueeze(-1)).squeeze(-1)
    rows = (hashes.double() < share * 2.0**63).nonzero().squeeze(-1).tolist()
    if not rows and share > 0 and batch.group not in met:
        rows = [0]
    return batch.rows(rows) if rows else None
