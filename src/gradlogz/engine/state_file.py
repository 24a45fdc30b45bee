"""Nested states on disk: tensors and plain values, without pickle.

    FILE            safetensors: all tensors, by number; everything else as JSON in the metadata of the file

    JSON            null, true, 1, 2.5, "text"
    [...]           a list                                   {"tuple": [...]}, {"set": [...]}
    {"dict": [[key, value], ...]}                            {"tensor": number}
    {"record": [number of the class, field, ...]}            a NamedTuple, classes listed as "module:name"

The reader constructs NamedTuples of this package and of modules that the caller names, and nothing else, so that a
foreign file cannot run code.

Read next: work_folder.py (states of items), ../probing/measurement_file.py (statistics of a probe).
"""

import ctypes
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
PACKAGE = __name__.partition(".")[0]

Modules = Mapping[str, Mapping[str, Any]]  # names in modules outside of this package, by module


class NotStorableError(Exception):
    """A value that the file cannot have, or must not."""


class Encoded:
    """A state as JSON, with its tensors; a tensor that occurs several times is written once."""

    def __init__(self, state: Any) -> None:
        self.tensors: list[Tensor] = []
        self._classes: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._content = self._plain(state)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the state with these facts (JSON) to a file, one tensor after the other.

        safetensors writes to a file of another name first, which a kill leaves for ever, and copies all tensors
        (before 0.8).
        """
        described = {"format": FORMAT, "facts": dict(facts), "classes": list(self._classes), "content": self._content}
        header: dict[str, Any] = {"__metadata__": {PACKAGE: json.dumps(described)}}
        order = sorted(range(len(self.tensors)), key=lambda n: -self.tensors[n].element_size())  # so all are aligned
        end = 0
        for number in order:
            tensor = self.tensors[number]
            begin, end = end, end + tensor.nbytes
            named = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            header[str(number)] = named
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for number in order:
                stored = self.tensors[number].detach().cpu().contiguous()
                if stored.nbytes:
                    file.write((ctypes.c_char * stored.nbytes).from_address(stored.data_ptr()))

    def _plain(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._number(value)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            name = f"{type(value).__module__}:{type(value).__qualname__}"
            return {"record": [self._classes.setdefault(name, len(self._classes)), *map(self._plain, value)]}
        if isinstance(value, list):
            return [self._plain(each) for each in value]
        if isinstance(value, tuple):
            return {"tuple": [self._plain(each) for each in value]}
        if isinstance(value, frozenset | set):
            return {"set": sorted(value)}
        if isinstance(value, Mapping):
            return {"dict": [[self._plain(key), self._plain(each)] for key, each in value.items()]}
        raise NotStorableError(f"a state cannot contain a {type(value).__name__}")

    def _number(self, tensor: Tensor) -> int:
        if tensor.dtype not in DTYPES:
            raise NotStorableError(f"a state cannot contain a tensor of {tensor.dtype}")
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]


def read_state(path: Path, modules: Modules | None = None, *, facts: Mapping[str, Any] | None = None) -> Any:
    """Read a state.

    Raises NotStorableError if the file is damaged, of another format, or was written with other facts than these.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {}).get(PACKAGE, "{}"))
            if described.get("format") != FORMAT or (facts is not None and described.get("facts") != dict(facts)):
                raise NotStorableError
            return _Decoder(file, described["classes"], modules or {}).value(described["content"])
    except (OSError, SafetensorError, ValueError, TypeError, LookupError, AttributeError, ImportError, RecursionError):
        raise NotStorableError from None  # a truncated or changed file fails in any of these ways


class _Decoder:
    """Values from their JSON and the tensors of an open file."""

    def __init__(self, file: Any, classes: Sequence[str], modules: Modules) -> None:
        self._classes = [_record_class(name, modules) for name in classes]
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


def _record_class(name: str, modules: Modules) -> Any:
    """Return the NamedTuple of this name, from this package or from these modules."""
    module, _, attribute = name.partition(":")
    if module.startswith(f"{PACKAGE}."):
        record = getattr(import_module(module), attribute)
    else:
        record = modules[module][attribute]
    if not (isinstance(record, type) and issubclass(record, tuple) and hasattr(record, "_fields")):
        raise NotStorableError
    return record
