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

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._errors import InputTypeError, InputValueError
from .._progress import Progress, reporter
from .._typing import Tensor
from .computed import Computed
from .corpus.batching import Batch, Batches, facts_of_text, joined
from .corpus.readers import batches_of, corpus_of
from .corpus.text import Source
from .hypothesis_tests import median, median_interval
from .inside.discovery import discover
from .inside.embeddings import word_vectors_of
from .inside.loading import describe
from .inside.random_models import with_random_weights
from .inside.weights import weights_of
from .measurement import Measurement
from .passes.baseline_rows import BaselineRows
from .passes.batch_statistics import statistics_of
from .passes.extreme_tokens import ExtremeToken, greatest
from .passes.interruption import interruptible
from .passes.memory_limits import check_memory, tokens_of_a_batch
from .passes.placement import placed
from .passes.rotated_heads import DrawStates, rotated_statistics
from .prediction import Baseline, Prediction, Probed
from .predictions import known_predictions
from .runs.findings import Findings
from .runs.judgement import Judgement, Measured, graded, split
from .runs.records import SELF_CHECK, Claim, Finding
from .runs.replicates import Place, Replicates, replicates_of
from .statistics import merge, stream_seed, token_hashes

TOKENS = 20_000  # default number of tokens
SHARE = 0.1  # default share of the windows that the random-weights baseline reads
DRAWS = 20  # default number of draws of the matched baseline
MOST = 32  # windows that a draw of the matched baseline reads

Wanted = Sequence[str | Prediction | ModuleType] | None  # names of predictions, or files that define one; None: all


_Drawn = dict[str, tuple[list[Measured], ...]]  # {prediction: its values in each draw}


class _Window(NamedTuple):
    """A row for the matched baseline, the hash that selects it, and the number of its batch, whose rows are alike."""

    hash: int
    batch: int
    row: Batch


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
        baseline: share of the windows that the random-weights baseline reads, at least one of each group; 0 for no
            random models at all.
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
    if not 0.0 <= baseline <= 1.0:
        problem = f"baseline must be a share of the windows between 0 and 1, got {baseline}"
        raise InputValueError("probe", "baseline", problem, "Pass 0.1 for a tenth.")
    if draws < 0 or draws == 1:
        problem = f"draws must be 0 or at least 2, got {draws}"
        raise InputValueError("probe", "draws", problem, "Pass 20; their variance gives the band.")
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
    show = reporter(progress, "tokens" if has_tokens else "rows")
    sample = BaselineRows(baseline)
    windows: list[_Window] = []
    matched = [p for p in wanted if p.baseline == "matched" and draws and baseline]
    state: dict[str, Any] = {}
    extreme: list[ExtremeToken] = []
    begun = time.perf_counter()
    with interruptible() as interrupted:
        for batch in chain([first], reading):
            added, others = statistics_of(model, architecture, placed(batch, model), wanted)
            state = merge(state, added)
            extreme = greatest([*extreme, *others])
            sample.add(batch)
            if matched:
                windows = _with_windows(windows, batch, draws)
            done = reading.report.tokens if has_tokens else reading.report.rows
            show(done, (tokens or 0) if has_tokens else 0)
            if interrupted():
                break
        show(done, done)
        seconds = {"model": time.perf_counter() - begun}
        begun = time.perf_counter()
        described = [p for p in wanted if p.baseline == "statistics"]
        untrained = (
            _baseline(model, sample.batches(), described, probed, interrupted) if described and baseline else None
        )
        seconds["baseline"] = time.perf_counter() - begun
        begun = time.perf_counter()
        drawn = _matched(model, windows, matched, probed, draws, interrupted) if matched else ({}, {})
        seconds["matched"] = time.perf_counter() - begun
    report = reading.report
    known = {**describe(model), **(facts or {}), **facts_of_text(report)}
    if isinstance(untrained, str):
        known["without_baseline"], untrained = untrained, None
    if isinstance(drawn, str):
        known["without_matched"], drawn = drawn, ({}, {})
    listed = [token.token(probed.name, tokenizer) for token in extreme]
    return Measurement(probed, known, state, untrained, *drawn, report, listed, seconds, not interrupted())


def evaluate(measured: Measurement, *, predictions: Wanted = None, progress: Progress = False) -> Findings:
    """Return the findings of a measurement, without the model.

    Each prediction is evaluated by itself: one that raises has the verdict "failed" and the reason as its text.
    progress: True for a bar on standard error, or a function f(predictions judged, total).
    """
    show = reporter(progress, "predictions judged")
    rows: list[Finding] = []
    claims: list[Claim] = []
    replicates: dict[Place, Replicates] = {}
    wanted = [prediction for prediction in chosen(predictions) if prediction.name in measured.state]
    model = measured.probed.name
    for number, prediction in enumerate(wanted):
        show(number, len(wanted))
        claim = partial(Claim, model, prediction.name, prediction.declaration.claim)
        try:
            judged, values = _judged(measured, prediction)
        except Exception as error:  # any error of a prediction, also of a user's own
            text = f"{type(error).__name__}: {error}"
            claims.append(claim("", math.nan, math.nan, math.nan, math.nan, "failed", text))
            continue
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
    sample: list[Batch],
    predictions: Sequence[Prediction],
    probed: Probed,
    interrupted: Callable[[], bool],
) -> Baseline | str:
    """Return the random-weights baseline on a sample of the batches, or the reason why it cannot be initialised."""
    try:
        other = with_random_weights(model, seed=stream_seed("weights", probed.seed))
    except ValueError as error:
        return str(error)
    inputs = placed(sample[0], other).inputs
    architecture = discover(other, inputs)
    state: dict[str, Any] = {}
    for batch in sample:
        state = merge(state, statistics_of(other, architecture, placed(batch, other), predictions)[0])
        if interrupted():
            break
    weights = weights_of(other, architecture, inputs)
    return Baseline(state, Probed(f"{probed.name} with random weights", architecture, weights, probed.seed))


def _matched(
    model: nn.Module,
    windows: list[_Window],
    predictions: Sequence[Prediction],
    probed: Probed,
    draws: int,
    interrupted: Callable[[], bool],
) -> tuple[_Drawn, _Drawn] | str:
    """Return the values of each prediction in each draw of the matched baseline, or the reason why there are none.

    The second are those of random queries of equal logit variance, as differences to the model itself.
    """
    values: dict[str, list[list[Measured]]] = {p.name: [] for p in predictions}
    rescaled: dict[str, list[list[Measured]]] = {p.name: [] for p in predictions if p.rescaled}
    drawn = Probed(f"{probed.name}, matched", probed.architecture, {}, probed.seed)
    try:
        for batches, numbers in _dealt(windows, draws):
            if interrupted():
                break
            seeds = [stream_seed("draw", probed.seed, number) for number in numbers]
            for states in _states(model, batches, predictions, probed, seeds):
                for p in predictions:
                    values[p.name].append(_values(p, states.rotated[p.name], drawn))
                    if p.rescaled:
                        pair = (_values(p, state[p.name], drawn) for state in (states.rescaled, states.model))
                        rescaled[p.name].append(_differences(*pair))
    except (ValueError, torch.OutOfMemoryError) as error:  # logits that overflow, or too little memory
        return str(error)
    one, other = ({name: tuple(lists) for name, lists in each.items()} for each in (values, rescaled))
    return one, other


def _states(
    model: nn.Module, batches: list[Batch], predictions: Sequence[Prediction], probed: Probed, seeds: Sequence[int]
) -> list[DrawStates]:
    """Return the states of each draw over the batches that it reads."""
    states = [DrawStates({}, {}, {}) for _ in seeds]
    for batch in batches:
        added = rotated_statistics(model, probed.architecture, placed(batch, model), predictions, seeds)
        states = [merge(state, each) for state, each in zip(states, added, strict=True)]
    return states


def _values(prediction: Prediction, state: Any, drawn: Probed) -> list[Measured]:
    """Return the values of one draw, without replicates; none if their evaluation raises, which `evaluate` reports."""
    with suppress(Exception):
        return [m._replace(replicates=None) for m in prediction.evaluate(state, drawn)]
    return []


def _differences(values: list[Measured], others: list[Measured]) -> list[Measured]:
    """Return the differences of values to others of the same layers, heads and quantities."""
    known = {(m.layer, m.head, m.quantity): m.value for m in others}
    return [
        Measured(m.layer, m.head, m.quantity, m.value - known.get((m.layer, m.head, m.quantity), math.nan))
        for m in values
    ]


def _with_windows(windows: list[_Window], batch: Batch, draws: int) -> list[_Window]:
    """Add the rows of a batch to the windows of the matched baseline; those with the smallest hashes are kept."""
    number = windows[-1].batch + 1 if windows else 0
    hashes = _window_hashes(batch).tolist()
    windows = windows + [_Window(value, number, batch.rows([row])) for row, value in enumerate(hashes)]
    most = sorted(window.hash for window in windows)[: MOST * draws][-1]
    return [window for window in windows if window.hash <= most]


def _dealt(windows: list[_Window], draws: int) -> Iterator[tuple[list[Batch], list[int]]]:
    """Yield batches with the numbers of the draws that read them.

    Each draw reads an equal share of the windows. If there are fewer windows than draws, several draws read a window.
    """
    ranked = sorted(windows, key=lambda window: window.hash)
    k = max(1, len(ranked) // draws)
    for first in range(0, min(draws * k, len(ranked)), k):
        rows: dict[int, list[Batch]] = {}
        for window in ranked[first : first + k]:
            rows.setdefault(window.batch, []).append(window.row)
        yield [joined(rows[number]) for number in sorted(rows)], list(range(first // k, draws, len(ranked)))


def _window_hashes(batch: Batch) -> Tensor:
    return token_hashes(batch.keys, batch.starts.unsqueeze(-1)).squeeze(-1)
