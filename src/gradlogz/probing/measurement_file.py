"""Measurement on disk: written before it is judged, and read if judging did not end.

    statistics.safetensors    the statistics of all predictions and the facts of model and text: engine/state_file.py

Read next: measurement.py (the record), ../commands/probe.py (which writes and reads it).
"""

import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._errors import InputValueError
from .._output_files import hidden, reason_of
from .._paths import is_plain_file
from .._typing import Tensor
from ..engine.state_file import Encoded, Modules, NotStorableError, read_state
from .corpus.batching import Report
from .corpus.read_documents import ReadDocuments
from .inside.architecture import Architecture
from .measurement import Measurement, MergeData
from .passes.matched_draws import Window
from .prediction import Baseline, Prediction, Probed
from .runs.records import Token
from .runs.run_folder import STATISTICS as STATISTICS

FORMAT = 3  # of the statistics of predictions
_PROBED = ("name", "architecture", "weights", "seed", "words")  # the cache of results is not written
_TOKEN = (str, str, str, int, int | None, int | float, str, int, str)  # its fields


def write_measurement(folder: Path, measured: Measurement, facts: Mapping[str, str]) -> str:
    """Write a measurement into a folder, whole or not at all; return "", or the reason why it is not written.

    facts: those that must be equal for `read_measurement`, such as the hashes of weights, text and settings.

    Law: tests/faults/test_judging_continues_from_written_statistics.py.
    """
    if find_spec("safetensors") is None:
        return "safetensors is not installed"
    try:
        state = Encoded(_plain(measured))
    except NotStorableError:
        return "the state of a prediction has parts that are not statistics"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if 2 * state.nbytes > shutil.disk_usage(folder).free:
            return f"the disk has less than twice the {state.nbytes / 2**30:.1f} GiB that they need"
        with hidden(folder / STATISTICS) as part:
            state.write(part, {"statistics": FORMAT, **facts})
            part.replace(folder / STATISTICS)
    except OSError as error:
        return f"{type(error).__name__}: {reason_of(error)}"
    return ""


def read_measurement(folder: Path, facts: Mapping[str, str], predictions: Sequence[Prediction]) -> Measurement | None:
    """Return the measurement in a folder; None if there is none with these facts, or if it is damaged."""
    path = folder / STATISTICS
    if not is_plain_file(path) or find_spec("safetensors") is None:
        return None
    return _read(path, predictions, {"statistics": FORMAT, **facts})  # None: the corpus is read again


def kept_measurement(folder: Path, predictions: Sequence[Prediction]) -> Measurement:
    """Return the measurement that a run keeps (--keep-statistics); raise if there is none, or if it is damaged."""
    path = folder / STATISTICS
    remedy = "Probe the text again with --keep-statistics."
    if not is_plain_file(path):
        raise InputValueError("merge", "runs", f"the run {folder} has no statistics", remedy)
    measured = _read(path, predictions)
    if measured is None or not _can_be_merged(measured):
        problem = f"the statistics of the run {folder} are damaged, or of another version or prediction"
        raise InputValueError("merge", "runs", problem, remedy)
    return measured


def _read(path: Path, predictions: Sequence[Prediction], facts: Mapping[str, Any] | None = None) -> Measurement | None:
    """Return the measurement in a file; None if it is damaged, of another version, or has fields of other types."""
    try:
        measured = _measurement(*read_state(path, modules_of(predictions), facts=facts))
    except (NotStorableError, TypeError, ValueError, LookupError, AttributeError):
        return None
    probed, merge_data = measured.probed, measured.merge_data
    typed = (
        _are([
            (probed.name, str), (probed.architecture, Architecture), (probed.weights, dict), (probed.seed, int),
            (probed.words, dict), (measured.facts, dict), (measured.state, dict), (measured.matched, dict),
            (measured.rescaled, dict), (measured.report, Report), (measured.tokens, list), (measured.seconds, dict),
            (measured.complete, bool), (merge_data, MergeData),
        ])
        and _are([
            (merge_data.documents, ReadDocuments), (merge_data.windows, list), (merge_data.options, dict),
            *((number, int | float) for number in measured.report), *((token, Token) for token in measured.tokens),
            *((seconds, float | int) for seconds in measured.seconds.values()),
        ])
        and _are([
            *((window, Window) for window in merge_data.windows),
            *(field for token in measured.tokens for field in zip(token, _TOKEN, strict=True)),
        ])
    )  # fmt: skip
    return measured if typed else None


def _can_be_merged(measured: Measurement) -> bool:
    """Return True if the facts and options that a merge reads are there, and of their types."""
    facts, options, documents = measured.facts, measured.merge_data.options, measured.merge_data.documents
    predictions = options.get("predictions")
    return isinstance(predictions, list) and _are([
        (facts.get("weights_sha256"), str), (facts.get("config_sha256"), str), (documents.keys, Tensor),
        (documents.tokens, Tensor), (options.get("seed"), int), (options.get("draws"), int),
        (options.get("baseline"), float | int), (options.get("model"), str), (options.get("dtype"), str | None),
        (options.get("revision"), str | None), *((name, str) for name in predictions),
    ])  # fmt: skip


def _are(values: Sequence[tuple[Any, Any]]) -> bool:
    """Return True if every value is of its type."""
    return all(isinstance(value, kind) for value, kind in values)


def modules_of(predictions: Sequence[Prediction]) -> Modules:
    """Return the names in the modules of predictions, whose states may be records of their own."""
    return {p.statistics.__module__: p.statistics.__globals__ for p in predictions}  # type: ignore[attr-defined]


def _plain(measured: Measurement) -> tuple[Any, ...]:
    """Return the fields, with the dataclasses `Probed` and `Baseline` as tuples."""
    other = measured.baseline
    baseline = None if other is None else (other.state, _fields(other.model))
    return (_fields(measured.probed), *measured[1:3], baseline, *measured[4:])


def _measurement(probed: Any, facts: Any, state: Any, other: Any, *rest: Any) -> Measurement:
    baseline = None if other is None else Baseline(other[0], _probed(other[1]))
    return Measurement(_probed(probed), facts, state, baseline, *rest)


def _probed(fields: Sequence[Any]) -> Probed:
    return Probed(**dict(zip(_PROBED, fields, strict=True)))


def _fields(probed: Probed) -> tuple[Any, ...]:
    fields = [getattr(probed, name) for name in _PROBED]
    return tuple(dict(field) if isinstance(field, Mapping) else field for field in fields)
