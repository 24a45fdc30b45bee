"""The probe: a model over a corpus, every prediction measured in the same pass, then judged.

    state      = merge over batches of statistics(event)        in memory that does not grow with the corpus
    findings   = evaluate(state), null(state), verdict          without the model

A random twin of the model, of the same architecture, passes a part of the same tokens for the nulls that need one.

Read next: prediction.py (the five names), findings.py (what comes out), run_folder.py (on disk).
"""

import gc
import inspect
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._errors import InputRuntimeError, InputValueError, sentence
from .._typing import Tensor
from .corpus.images import Inputs, images, reads_images
from .corpus.text import PADDED, Batch, Batches, Report, Source, batches, documents
from .extreme_tokens import Candidates, Standing, candidates, greatest, resolved
from .findings import Claim, Finding, Findings, Token
from .inside.architecture import Layout
from .inside.capturing import Attended, Event, follow
from .inside.discovery import trace
from .inside.hooks import without_cache
from .inside.loading import describe, random_twin
from .inside.weights import weights_of
from .prediction import Finished, Judgement, Measured, Prediction, Probed, Twin, real, split
from .predictions import PREDICTIONS
from .predictions.observables.batch_moments import bytes_of
from .statistics import merge, token_hashes

TOKENS = 20_000  # read unless another number is asked for
SHARE = 0.1  # of their windows the twin reads
OF_WEIGHTS = {"tie", "qk_geometry", "symmetry"}  # whose nulls ask for the weights of the twin, not for what it read
LARGE = 2**30  # bytes of matrices that are told beforehand
ROOM, MOST = 2**34, 8  # bytes of a GPU for each 8192 tokens of a batch, and how many times these are enough


class Measurement(NamedTuple):
    """What a pass over a corpus leaves: enough for all findings, and for merging with other passes.

    state: {prediction: its statistics}; twin: that of the random twin.
    complete: whether the corpus was read to its end.
    """

    probed: Probed
    facts: dict[str, Any]
    state: dict[str, Any]
    twin: Twin | None
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
    predictions: Sequence[str | Prediction] | None = None,
    twin: float = SHARE,
    seed: int = 0,
    progress: bool = False,
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
        progress: show a bar on standard error.

    Law: tests/laws/test_the_probe_reads_a_corpus_once.py.
    """
    found: Any = texts
    if reads_images(tokenizer) and isinstance(texts, str | os.PathLike):
        found = images(texts, tokenizer)
    elif tokenizer is not None and not reads_images(tokenizer):
        found = documents(texts)  # type: ignore[arg-type]
    measured = measure(
        model, tokenizer, found, name=name, tokens=tokens, length=length, predictions=predictions, twin=twin, seed=seed,
        progress=progress,
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
    predictions: Sequence[str | Prediction] | None = None,
    twin: float = SHARE,
    seed: int = 0,
    progress: bool = False,
) -> Measurement:
    """One pass of a model over documents, or inputs without a tokenizer, and of its twin over a part of them.

    Ctrl-C ends the pass after the batch that is under way, and that of the twin after its first.
    """
    wanted = chosen(predictions)
    if not 0.0 <= twin <= 1.0:
        raise InputValueError(
            sentence("probe", "twin must be a part of the tokens, 0 to 1", f"{twin}", "0.1 is a tenth.")
        )
    reading: Batches | Inputs
    if tokenizer is None or reads_images(tokenizer):
        reading = Inputs(texts)
    else:
        reading = batches(texts, tokenizer, tokens=tokens, length=length, padded=_padded(model), seed=seed)
    first = next(reading)
    layout = trace(model, _placed(first, model).inputs)
    large = _check_memory(model, layout, wanted, twin)
    weights = weights_of(model, layout, _placed(first, model).inputs)
    probed = Probed(name or type(model).__name__, layout, weights, seed)
    bar = _Bar(tokens if progress else None, progress)
    bar.tell(large)
    kept: list[Batch] = []
    state: dict[str, Any] = {}
    standing: list[Standing] = []
    begun = time.perf_counter()
    with _patient() as asked:
        for batch in chain([first], reading):
            found, others = passed(model, layout, _placed(batch, model), wanted)
            state = merge(state, found)
            standing = greatest([*standing, *others])
            part = _part(batch, twin, met={each.group for each in kept})
            if part is not None:
                kept.append(part)
            bar.show(reading.report.tokens)
            if asked():
                break
        seconds = {"model": time.perf_counter() - begun}
        begun = time.perf_counter()
        other = None if not kept or not twin else _twin(model, kept, wanted, probed, asked)
        seconds["twin"] = time.perf_counter() - begun
    bar.close()
    said = {**describe(model), **(facts or {}), "tokens": reading.report.tokens, "documents": reading.report.documents}
    if isinstance(other, str):
        said["without_twin"], other = other, None
    stood = [each.token(probed.name, tokenizer) for each in standing]
    return Measurement(probed, said, state, other, reading.report, stood, seconds, not asked())


def evaluate(measured: Measurement, *, predictions: Sequence[str | Prediction] | None = None) -> Findings:
    """The findings of a measurement, without the model."""
    rows: list[Finding] = []
    claims: list[Claim] = []
    model = measured.probed.name
    for prediction in chosen(predictions):
        key = name_of(prediction)
        if key not in measured.state:
            continue
        state = measured.state[key]
        values = prediction.evaluate(state, measured.probed)
        other = measured.twin
        nulls = prediction.null(state, measured.probed, other and other._replace(state=other.state.get(key, {})))
        judged = prediction.verdict(_joined(model, key, values, nulls))
        rows += judged.findings
        low, high = _ends(judged)
        number = (judged.quantity, judged.value, low, high, judged.null)
        claims.append(Claim(model, key, prediction.claim, *number, judged.verdict, judged.words, judged.note))
    return Findings({model: measured.facts}, rows, claims, measured.tokens)


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


def name_of(prediction: Prediction) -> str:
    """The name of a prediction: that of its file."""
    return prediction.__name__.rpartition(".")[2]


def passed(
    model: nn.Module, layout: Layout, batch: Batch, predictions: Sequence[Prediction]
) -> tuple[dict[str, Any], list[Standing]]:
    """What one batch adds to every prediction, and its tokens that stand out.

    A batch that does not fit into memory is passed in halves.
    """
    found = _fitting(model, layout, batch, predictions)
    if found is not None:
        return found
    rows = len(batch.keys)
    if rows == 1:
        fact = f"one row of {next(iter(batch.inputs.values())).shape[-1]} tokens that does not"
        remedy = "Pass a smaller length=, or another device."
        raise InputRuntimeError(sentence("probe", "a batch must fit into memory", fact, remedy))
    gc.collect()  # what the pass that failed has left may hold itself
    if batch.keys.is_cuda:
        torch.cuda.empty_cache()
    halves = [_rows(batch, list(range(rows // 2))), _rows(batch, list(range(rows // 2, rows)))]
    one, other = (passed(model, layout, half, predictions) for half in halves)
    return merge(one[0], other[0]), [*one[1], *other[1]]


def _fitting(
    model: nn.Module, layout: Layout, batch: Batch, predictions: Sequence[Prediction]
) -> tuple[dict[str, Any], list[Standing]] | None:
    """The same of a batch as it is; None if it does not fit into memory, with nothing of it left there."""
    state: dict[str, Any] = {name_of(p): {} for p in predictions}
    memory: dict[str, dict[str, Any]] = {name_of(p): {} for p in predictions}
    faults: dict[str, Tensor] = {}
    standing: list[Candidates] = []

    def tell(event: Event | Finished) -> None:
        if isinstance(event, Attended):
            rows = real(batch, event).unsqueeze(1)
            bad = torch.isnan(event.attention.log_normalizer) | torch.isposinf(event.attention.log_normalizer)
            faults[event.layer] = (bad & rows).any(-1).any(0)
            standing.extend(candidates(event, batch))
        for prediction in predictions:
            key = name_of(prediction)
            found = prediction.statistics(event, batch, memory[key])
            if found:
                state[key] = merge(state[key], found)

    try:
        with follow(model, layout, tell), torch.no_grad():
            output = model(**batch.inputs, **without_cache(model))
        with torch.no_grad():
            tell(Finished(output, batch.inputs))
    except torch.OutOfMemoryError:
        return None
    _check_numbers(faults)
    return state, resolved(standing, batch)


def _check_memory(model: nn.Module, layout: Layout, predictions: Sequence[Prediction], twin: float) -> str:
    """The matrices of the stream will fit; a sentence about them if they are large."""
    names = {name_of(p) for p in predictions}
    size = bytes_of(layout, names) + (bytes_of(layout, names - OF_WEIGHTS) if twin else 0)
    if size < LARGE:
        return ""
    whole, words = _memory(next(model.parameters()).device), f"{size / 2**30:.1f} GiB of matrices of the stream"
    if whole is not None and size > whole:
        fact, there = f"{words}, of width {layout.width}", f"There are {whole / 2**30:.1f}"
        remedy = f"{there}: choose predictions without tie, qk_geometry and linearity, or twin=0, or another device."
        raise InputValueError(sentence("probe", "statistics must fit into memory", fact, remedy))
    return f"{words} will be kept."


def _padded(model: nn.Module) -> int:
    """Tokens of a batch: as many more on a GPU as it has room for, since there a batch costs the host the same time."""
    device = next(model.parameters()).device
    room = (_memory(device) or 0) // ROOM if device.type == "cuda" else 1
    return PADDED * min(max(room, 1), MOST)


def _memory(device: torch.device) -> int | None:
    """The bytes of memory of a device; None if it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    known = device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else None


def _check_numbers(faults: dict[str, Tensor]) -> None:
    """Every log normaliser was a number; asked once for a batch, since a GPU waits for the answer."""
    if not faults or not bool(torch.stack([bad.any() for bad in faults.values()]).any()):
        return
    layer = next(layer for layer, bad in faults.items() if bool(bad.any()))
    head = int(faults[layer].nonzero()[0, 0])
    remedy = "Look for NaN in the weights; in half precision, load the model in float32."
    raise InputValueError(sentence("probe", "log normalisers must be numbers", f"NaN in {layer}, head {head}", remedy))


def _twin(
    model: nn.Module,
    kept: list[Batch],
    predictions: Sequence[Prediction],
    probed: Probed,
    asked: Callable[[], bool],
) -> Twin | str:
    """The same tokens through random weights of the same architecture, or why the model cannot be made anew."""
    predictions = [p for p in predictions if name_of(p) not in OF_WEIGHTS]
    try:
        other = random_twin(model, seed=probed.seed)
    except ValueError as refusal:
        return str(refusal)
    layout = trace(other, _placed(kept[0], other).inputs)
    state: dict[str, Any] = {}
    for batch in kept:
        state = merge(state, passed(other, layout, _placed(batch, other), predictions)[0])
        if asked():
            break
    weights = weights_of(other, layout, _placed(kept[0], other).inputs)
    return Twin(state, Probed(f"{probed.name} with random weights", layout, weights, probed.seed))


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


def chosen(wanted: Sequence[str | Prediction] | None) -> list[Prediction]:
    """The predictions of these names, or these themselves; all that there are if None."""
    known = {name_of(p): p for p in PREDICTIONS}
    found = []
    for each in known if wanted is None else wanted:
        if isinstance(each, str) and each not in known:
            remedy = f"They are {', '.join(known)}."
            raise InputValueError(sentence("probe", "predictions must be names of predictions", f"{each!r}", remedy))
        found.append(known[each] if isinstance(each, str) else each)
    return found


def _placed(batch: Batch, model: nn.Module) -> Batch:
    """The batch where the model is; a decoder beside an encoder reads the same text, shifted by its start."""
    device = next(model.parameters()).device
    inputs = {name: t.to(device, non_blocking=True) for name, t in batch.inputs.items()}
    config = getattr(model, "config", None)
    asks = "decoder_input_ids" in inspect.signature(model.forward).parameters and "input_ids" in inputs
    if asks and getattr(config, "is_encoder_decoder", False):
        ids = inputs["input_ids"]
        given = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "pad"))
        start = next((token for token in given if token is not None), 0)
        inputs["decoder_input_ids"] = torch.cat((torch.full_like(ids[:, :1], start), ids[:, :-1]), 1)
    return batch._replace(inputs=inputs, keys=batch.keys.to(device))


def _rows(batch: Batch, rows: list[int]) -> Batch:
    inputs = {name: t[rows] for name, t in batch.inputs.items()}
    names = [batch.names[row] for row in rows]
    return Batch(inputs, batch.keys[rows], batch.group, names, batch.starts[rows])


def _part(batch: Batch, share: float, met: set[int]) -> Batch | None:
    """The rows of a batch that the twin reads, by their hash; of a group that was not met yet one at least."""
    hashes = token_hashes(batch.keys, batch.starts.unsqueeze(-1)).squeeze(-1)
    rows = (hashes.double() < share * 2.0**63).nonzero().squeeze(-1).tolist()
    if not rows and share > 0 and batch.group not in met:
        rows = [0]
    return _rows(batch, rows) if rows else None


@contextmanager
def _patient() -> Iterator[Callable[[], bool]]:
    """Within this context Ctrl-C is a question, asked by the function given; a second one interrupts as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)
    asked: list[bool] = []

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        asked.append(True)
        signal.signal(signal.SIGINT, before)
        sys.stderr.write("\nFinishing this batch; once more to stop at once.\n")

    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


class _Bar:
    """Progress on standard error: tokens, tokens per second, time left."""

    def __init__(self, tokens: int | None, shown: bool) -> None:
        self._tokens, self._shown, self._begun = tokens, shown, time.perf_counter()

    def tell(self, words: str) -> None:
        """Something to know before it begins."""
        if self._shown and words:
            sys.stderr.write(f"{words}\n")

    def show(self, done: int) -> None:
        """So many tokens are read."""
        if not self._shown:
            return
        rate = done / max(time.perf_counter() - self._begun, 1e-9)
        text = f"{done:,} tokens, {rate:,.0f} per second"
        if self._tokens is not None:
            filled = min(40 * done // self._tokens, 40)
            left = max(self._tokens - done, 0) / max(rate, 1e-9)
            text = f"{'█' * filled}{'·' * (40 - filled)} {text}, {left:,.0f} s left"
        sys.stderr.write(f"\r{text:<100}")
        sys.stderr.flush()

    def close(self) -> None:
        """The line ends."""
        if self._shown:
            sys.stderr.write("\n")
