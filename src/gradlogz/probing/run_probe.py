"""The probe: one pass of a model over a corpus measures all predictions, which are then judged.

    batches      text -> documents -> batches of tokens                      corpus/
    statistics   merged over the events of all batches                       passes/batch_statistics.py, predictions/
    findings     verdict(evaluate(statistics), null(statistics))             predictions/, hypothesis_tests.py

Memory does not grow with the corpus, and findings are computed without the model. Each draw of the matched baseline,
the layers of the model with randomly rotated inputs, reads a small sample and is evaluated at once; all together read
at most as many windows as the model, or one each. An untrained model is measured only if a prediction asks for it.

Read next: prediction.py (the definition of a prediction), measurement.py (the record of a pass), runs/findings.py (the
results), runs/run_folder.py (on disk).
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .._errors import InputTypeError, InputValueError
from .._progress import Progress, reporter
from .._typing import Tensor
from .computed import Computed
from .corpus.batching import Batch, Batches, facts_of_text
from .corpus.read_documents import documents_in, joined_documents
from .corpus.readers import batches_of, corpus_of
from .corpus.text import Source
from .hypothesis_tests import median, median_interval
from .inside.discovery import discover
from .inside.embeddings import word_vectors_of
from .inside.loading import describe
from .inside.random_models import with_random_weights
from .inside.weights import weights_of
from .measurement import Measurement, MergeData
from .passes.baseline_rows import BaselineRows, BaselineState, LeastRow, LeastState
from .passes.batch_statistics import statistics_of
from .passes.extreme_tokens import ExtremeToken, greatest
from .passes.interruption import interruptible
from .passes.matched_draws import ByPrediction, Draw, Window, by_prediction, dealt, with_windows
from .passes.memory_limits import check_memory, tokens_of_a_batch
from .passes.nulls import baseline_name, check_nulls, matched_of, untrained_of
from .passes.placement import placed
from .passes.rotated_heads import drawn
from .prediction import Baseline, Prediction, Probed
from .predictions import known_predictions
from .runs.findings import Findings
from .runs.judgement import Judgement, Measured, graded, split
from .runs.records import SELF_CHECK, Claim, Finding
from .runs.replicates import Place, Replicates, replicates_of
from .statistics import stream_seed

LOGGER = logging.getLogger(__name__)
TOKENS = 20_000  # default number of tokens
SHARE = 0.1  # default share of the windows that the random-weights baseline reads
DRAWS = 20  # default number of draws of the matched baseline

Wanted = Sequence[str | Prediction | ModuleType] | None  # names of predictions, or files that define one; None: all


def probe(
    model: nn.Module,
    tokenizer: Any,
    texts: Source | Iterable[Mapping[str, Tensor]] = None,
    *,
    name: str | None = None,
    tokens: int | None = TOKENS,
    length: int | None = None,
    predictions: Wanted = None,
    baseline: float = SHARE,
    draws: int = DRAWS,
    seed: int = 0,
    baseline_seed: int | None = None,
    progress: Progress = False,
) -> Findings:
    """Measure the theory's predictions on a model and a text, with null values and 95 % confidence intervals.

    A model in training mode is evaluated without dropout and restored afterwards. Findings have displays for notebooks
    and terminals (`rich.print`); `.table()` returns their rows.

    Args:
        tokenizer: tokenizer of the model, or image processor of an image model; None if `texts` are batches of inputs.
        texts: a file, a folder, "-" for standard input, or a list of texts; the help topics of Python if None. For
            image models a folder. Without a tokenizer, batches such as {"pixel_values": [b, 3, h, w]}, all of which are
            read; every row counts as a document.
        name: name of the model in the findings; its class name by default.
        tokens: number of tokens to read, None for all.
        length: maximum window length in tokens; by default 1024 or the context length, whichever is smaller.
        predictions: names of predictions, or your own files (docs/adding_a_prediction.md); all by default.
        baseline: share of the windows that the random-weights baseline reads, at least one of each group, if a
            prediction of your own asks for it; 0 for no random models at all, also no draws.
        draws: number of draws of the matched baseline, whose heads have the spectra of the trained ones; 0 for none.
        seed: seed of the choice of documents.
        baseline_seed: seed of the random-weights baseline, of matched draws and of other random null models; `seed` if
            None. Documents, weights and draws have streams of their own.
        progress: True for a bar on standard error, or a function f(tokens read, total).

    Law: tests/laws/test_the_probe_reads_a_corpus_once.py.
    """
    measured = measure(
        model, tokenizer, corpus_of(tokenizer, texts), name=name, tokens=tokens, length=length, predictions=predictions,
        baseline=baseline, draws=draws, seed=seed, baseline_seed=baseline_seed, progress=progress,
    )  # fmt: skip
    return evaluate(measured, predictions=predictions, progress=progress is True)


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
    baseline: float = SHARE,
    draws: int = DRAWS,
    seed: int = 0,
    baseline_seed: int | None = None,
    progress: Progress = False,
) -> Measurement:
    """Run a model over documents, or over inputs without a tokenizer, and its random-weights baseline over a sample.

    Ctrl-C ends the pass of the model after the current batch, and that of the baseline after its first batch.
    """
    wanted = chosen(predictions)
    check_nulls(baseline, draws)
    padded = tokens_of_a_batch(model)
    reading = batches_of(tokenizer, texts, tokens=tokens, length=length, padded=padded, seed=seed)
    first = next(reading)
    inputs = placed(first, model).inputs
    architecture = discover(model, inputs)
    large = check_memory(model, architecture, wanted, baseline=baseline > 0)
    if progress is True and large:
        sys.stderr.write(f"{large}\n")
    words = word_vectors_of(model, architecture)
    weights = weights_of(model, architecture, inputs)
    of_nulls = seed if baseline_seed is None else baseline_seed
    probed = Probed(name or type(model).__name__, architecture, weights, of_nulls, words=words)
    has_tokens = isinstance(reading, Batches)  # the number of tokens of other inputs is unknown here
    show, total = reporter(progress, "tokens" if has_tokens else "rows"), (tokens or 0) if has_tokens else 0
    show(0, total)  # the time left counts the first batch, which may be most of the work
    sample, sampled = BaselineRows(baseline), list[Batch]()
    windows: list[Window] = []
    matched = matched_of(wanted, draws=draws, baseline=baseline)
    documents = []
    state: dict[str, Any] = {}
    extreme: list[ExtremeToken] = []
    begun = time.perf_counter()
    with interruptible() as interrupted:
        for batch in chain([first], reading):
            state, others = statistics_of(model, architecture, placed(batch, model), wanted, state)
            extreme = greatest([*extreme, *others])
            documents.append(documents_in(batch))
            if (rows := sample.add(batch)) is not None:
                sampled.append(rows)
            if matched:
                windows = with_windows(windows, batch, draws)
            done = reading.report.tokens if has_tokens else reading.report.rows
            show(done, total)
            if interrupted():
                break
        show(done, done)
        seconds = {"model": time.perf_counter() - begun}
        LOGGER.info("%s read %d rows in %.1f s", probed.name, reading.report.rows, seconds["model"])
        begun = time.perf_counter()
        needed = untrained_of(wanted, baseline=baseline)
        untrained = _baseline(model, sampled, sample.least(), needed, probed, interrupted) if needed else None
        seconds["baseline"] = time.perf_counter() - begun
        begun = time.perf_counter()
        show = reporter(progress is True, "draws of the matched baseline")
        values = matched_draws(model, windows, matched, probed, draws, interrupted, show) if matched else ({}, {})
        seconds["matched"] = time.perf_counter() - begun
        LOGGER.info("nulls: baseline %.1f s, matched draws %.1f s", seconds["baseline"], seconds["matched"])
    report = reading.report
    known = {**describe(model), **(facts or {}), **facts_of_text(report)}
    if isinstance(untrained, str):
        known["without_baseline"], untrained = untrained, None
    if isinstance(values, str):
        known["without_matched"], values = values, ({}, {})
    listed = [token.token(probed.name, tokenizer) for token in extreme]
    other, rows_state = (None, None) if untrained is None else untrained
    merge_data = MergeData(joined_documents(documents), windows, rows_state, {})
    return Measurement(probed, known, state, other, *values, report, listed, seconds, not interrupted(), merge_data)


def evaluate(measured: Measurement, *, predictions: Wanted = None, progress: Progress = False) -> Findings:
    """Return the findings of a measurement, without the model.

    Each prediction is evaluated by itself: one that raises has the verdict "failed" and the reason as its text.
    progress: True for a bar on standard error, or a function f(predictions judged, total).
    """
    rows: list[Finding] = []
    claims: list[Claim] = []
    replicates: dict[Place, Replicates] = {}
    wanted = [prediction for prediction in chosen(predictions) if prediction.name in measured.state]
    show = reporter(progress, "predictions judged", [prediction.name for prediction in wanted])
    model = measured.probed.name
    for number, prediction in enumerate(wanted):
        show(number, len(wanted))
        claim = partial(Claim, model, prediction.name, prediction.declaration.claim)
        begun = time.perf_counter()
        try:
            judged, values = _judged(measured, prediction)
        except Exception as error:  # any error of a prediction, also of a user's own
            text = f"{type(error).__name__}: {error}"
            LOGGER.warning("%s cannot be judged: %s", prediction.name, text)
            LOGGER.debug("%s", prediction.name, exc_info=True)
            claims.append(claim("", math.nan, math.nan, math.nan, math.nan, "failed", text))
            continue
        LOGGER.debug("%s judged in %.2f s", prediction.name, time.perf_counter() - begun)
        rows += judged.findings
        replicates |= replicates_of(model, prediction.name, values, judged)
        claims.append(claim(**{name: getattr(judged, name) for name in Judgement._fields if name in Claim._fields}))
    show(len(wanted), len(wanted))
    declarations = {prediction.name: prediction.declaration for prediction in wanted}
    return Findings({model: measured.facts}, rows, claims, measured.tokens, declarations, replicates)


def _judged(measured: Measurement, prediction: Prediction) -> tuple[Judgement, list[Measured]]:
    """Return the judgement of one prediction, with the interval of its median, and its values."""
    key, other = prediction.name, measured.baseline
    state, probed = measured.state[key], replace(measured.probed, computed=Computed())
    values = prediction.evaluate(state, probed)
    baseline = None if other is None else replace(other, state=other.state.get(key, prediction.empty()))
    if draws := measured.matched.get(key):
        rescaled = measured.rescaled.get(key, ())
        baseline = replace(baseline or Baseline(prediction.empty(), probed), matched=draws, rescaled=rescaled)
    judged = prediction.verdict(_joined(probed.name, key, values, prediction.null(state, probed, baseline)))
    low, high = _ends(judged, values)
    return graded(judged._replace(low=low, high=high), prediction.declaration.kind), values


def chosen(wanted: Wanted) -> list[Prediction]:
    """Return the predictions given by name, by file or as objects; all predictions if None.

    Self-checks are always among them, since their failure invalidates all other results.
    """
    known = {p.name: p for p in known_predictions()}
    if wanted is None:
        return list(known.values())
    selected = []
    for each in wanted:
        if isinstance(each, str) and each not in known:
            remedy = f"Choose from {', '.join(known)}."
            raise InputValueError("probe", "predictions", f"there is no prediction named {each!r}", remedy)
        prediction = known[each] if isinstance(each, str) else getattr(each, "PREDICTION", each)
        if not isinstance(prediction, Prediction):
            problem = f"predictions must be names, modules or Predictions, got {type(each).__name__}"
            raise InputTypeError("probe", "predictions", problem, "Define PREDICTION in your module.")
        selected.append(prediction)
    names = [prediction.name for prediction in selected]
    return selected + [p for p in known.values() if p.declaration.kind == SELF_CHECK and p.name not in names]


def _ends(judged: Judgement, values: list[Measured]) -> tuple[float, float]:
    """Return the confidence interval of a claim's value: its own, or that of the median of the judged values."""
    if not math.isnan(judged.low) or math.isnan(judged.value):
        return judged.low, judged.high
    rows = [f for f in judged.findings if f.quantity == judged.quantity and f.verdict not in ("", "not applicable")]
    places = {(f.layer, f.call, f.head) for f in rows}
    used = [m for m in values if m.quantity == judged.quantity and (*split(m.layer), m.head) in places]
    if median(m.value for m in used) != judged.value:  # another summary than the median
        return math.nan, math.nan
    return median_interval(used)


def _joined(model: str, prediction: str, values: list[Measured], nulls: list[Measured]) -> list[Finding]:
    """Combine values with their null values into findings."""
    by_place = {(n.layer, n.head, n.quantity): n for n in nulls}
    rows = []
    for m in values:
        n = by_place.get((m.layer, m.head, m.quantity))
        layer, call = split(m.layer)
        row = Finding(model, prediction, layer, call, m.head, m.quantity, m.value, m.low, m.high, tokens=m.tokens)
        row = row._replace(freedom=m.freedom)
        if n is not None:
            row = row._replace(null=n.value, null_low=n.low, null_high=n.high, null_freedom=n.freedom)
        rows.append(row)
    return rows


def _baseline(
    model: nn.Module,
    chosen_rows: Sequence[Batch],
    least: Mapping[int, LeastRow],
    predictions: Sequence[Prediction],
    probed: Probed,
    interrupted: Callable[[], bool],
) -> tuple[Baseline, BaselineState] | str:
    """Return the random-weights baseline on rows of the corpus, or the reason why it cannot be initialised."""
    try:
        other = with_random_weights(model, seed=stream_seed("weights", probed.seed))
    except ValueError as error:
        return str(error)
    inputs = placed([*chosen_rows, *(row.row for row in least.values())][0], other).inputs
    architecture = discover(other, inputs)
    state: dict[str, Any] = {}
    states: dict[int, LeastState] = {}
    for batch in chosen_rows:
        state, _ = statistics_of(other, architecture, placed(batch, other), predictions, state)
        if interrupted():
            break
    for group, (number, row) in least.items():
        if interrupted() and (state or states):
            break
        states[group] = LeastState(number, statistics_of(other, architecture, placed(row, other), predictions)[0])
    rows = BaselineState(state, frozenset(batch.group for batch in chosen_rows), states)
    weights = weights_of(other, architecture, inputs)
    return Baseline(rows.state, Probed(baseline_name(probed.name), architecture, weights, probed.seed)), rows


def matched_draws(
    model: nn.Module,
    windows: list[Window],
    predictions: Sequence[Prediction],
    probed: Probed,
    draws: int,
    interrupted: Callable[[], bool] = lambda: False,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[ByPrediction, ByPrediction] | str:
    """Return the values of each prediction in each draw of the matched baseline, or the reason why there are none."""
    every: list[Draw] = []
    try:
        for batches, numbers in dealt(windows, draws):
            if interrupted():
                break
            show(len(every), draws)
            every += drawn(model, batches, numbers, predictions, probed)
    except (ValueError, torch.OutOfMemoryError) as error:  # logits that overflow, or too little memory
        return str(error)
    show(draws, draws)
    return by_prediction(every, predictions)
