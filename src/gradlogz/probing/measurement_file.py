"""Measurement on disk: written before it is judged, and read if judging did not end.

    statistics.safetensors    all tensors, by number; everything else as JSON in the metadata of the file

    JSON            null, true, 1, 2.5, "text"
    [...]           a list                                   {"tuple": [...]}, {"set": [...]}
    {"dict": [[key, value], ...]}                            {"tensor": number}
    {"record": [number of the class, field, ...]}            a NamedTuple, classes listed as "module:name"

The reader constructs NamedTuples of this package and of the files of the user's own predictions, and nothing else, so
that a foreign file cannot run code.

Read next: measurement.py (the record), ../commands/probe.py (which writes and reads it).
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .._typing import Tensor
from .measurement import Measurement
from .prediction import Baseline, Prediction, Probed
from .runs.run_folder import STATISTICS as STATISTICS

FORMAT = 2
_PACKAGE = __name__.rpartition(".")[0]
_PROBED = ("name", "architecture", "weights", "seed", "words")  # the cache of results is not written


def write_measurement(folder: Path, measured: Measurement, facts: Mapping[str, str]) -> str:
    """Write a measurement into a folder, whole or not at all; return "", or the reason why it is not written.

    facts: those that must be equal for `read_measurement`, such as the hashes of weights, text and settings.

    Law: tests/faults/test_judging_continues_from_written_statistics.py.
    """
    if find_spec("safetensors") is None:
        return "safetensors is not installed"
    from safetensors.torch import save_file

    encoder = _Encoder()
    try:
        content = encoder.plain(_plain(measured))
    except _NotStorableError:
        return "the state of a prediction has parts that are not statistics"
    tensors = {str(number): tensor for number, tensor in enumerate(encoder.tensors)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    described = {"format": FORMAT, "facts": dict(facts), "classes": list(encoder.classes), "content": content}
    part = folder / f".{STATISTICS}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if 2 * size > shutil.disk_usage(folder).free:
            return f"the disk has less than twice the {size / 2**30:.1f} GiB that they need"
        save_file(tensors, part, {"gradlogz": json.dumps(described)})
        part.replace(folder / STATISTICS)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"
    finally:
        part.unlink(missing_ok=True)
    return ""


def read_measurement(folder: Path, facts: Mapping[str, str], predictions: Sequence[Prediction]) -> Measurement | None:
    """Return the measurement in a folder; None if there is none with these facts, or if it is damaged."""
    path = folder / STATISTICS
    if not path.is_file() or find_spec("safetensors") is None:
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {}).get("gradlogz", "{}"))
            if described.get("format") != FORMAT or described.get("facts") != dict(facts):
                return None
            decoder = _Decoder(file, described["classes"], predictions)
            return _measurement(*decoder.value(described["content"]))
    except (
        _NotStorableError,
        OSError,
        SafetensorError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ImportError,
    ):
        return None  # written by another version, or damaged: the corpus is read again


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


class _NotStorableError(Exception):
    """A value that the file cannot have, or must not."""


class _Encoder:
    """Values as JSON, with their tensors and classes collected; a tensor that occurs several times is written once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.classes: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._referenced: list[Tensor] = []  # so that an id is not reused
        self._memory: set[int] = set()

    def plain(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._number(value)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            name = f"{type(value).__module__}:{type(value).__qualname__}"
            return {"record": [self.classes.setdefault(name, len(self.classes)), *map(self.plain, value)]}
        if isinstance(value, list):
            return [self.plain(each) for each in value]
        if isinstance(value, tuple):
            return {"tuple": [self.plain(each) for each in value]}
        if isinstance(value, frozenset | set):
            return {"set": sorted(value)}
        if isinstance(value, Mapping):
            return {"dict": [[self.plain(key), self.plain(each)] for key, each in value.items()]}
        raise _NotStorableError

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self._referenced.append(tensor)
            stored = tensor.detach().cpu().contiguous()
            # safetensors writes no two tensors of one storage, and no part of a storage
            if stored.untyped_storage().nbytes() != stored.nbytes or stored.data_ptr() in self._memory:
                stored = stored.clone()
            self._memory.add(stored.data_ptr())
            self.tensors.append(stored)
        return self._numbers[id(tensor)]


class _Decoder:
    """Values from their JSON and the tensors of an open file."""

    def __init__(self, file: Any, classes: Sequence[str], predictions: Sequence[Prediction]) -> None:
        known = {p.statistics.__module__: p.statistics.__globals__ for p in predictions}  # type: ignore[attr-defined]
        self._classes = [_record_class(name, known) for name in classes]
        self._file = file
        self._tensors: dict[int, Tensor] = {}

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(each) for each in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, content),) = plain.items()
        if kind == "tensor":
            if content not in self._tensors:
                self._tensors[content] = self._file.get_tensor(str(content))
            return self._tensors[content]
        if kind == "record":
            number, *fields = content
            return self._classes[number](*map(self.value, fields))
        if kind == "dict":
            return {self.value(key): self.value(each) for key, each in content}
        values = [self.value(each) for each in content]
        return {"tuple": tuple, "set": frozenset}[kind](values)


def _record_class(name: str, known: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the NamedTuple of this name, from this package or from the files of these predictions."""
    module, _, attribute = name.partition(":")
    if module == _PACKAGE or module.startswith(f"{_PACKAGE}."):
        record = getattr(import_module(module), attribute)
    else:
        record = known[module][attribute]
    if not (isinstance(record, type) and issubclass(record, tuple) and hasattr(record, "_fields")):
        raise _NotStorableError
    return record
