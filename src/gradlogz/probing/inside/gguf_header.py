"""Header of a GGUF file, walked from its beginning before any library trusts the sizes that it declares.

    "GGUF", version, number of tensors, number of fields
    field     name, type, value; an array has a type, a length and that many values
    tensor    name, number of dimensions, dimensions, type, offset of its data

A reader that believes a length of 2^60 does not end. Here every length is compared with the bytes that are left.
Without a field of REQUIRED transformers would take the value of its default model, in silence where the shapes of the
weights do not depend on it. The number of key heads is not among them: another one does not fit the weights.

Read next: checkpoint_files.py (the other files of a model), loading.py.
"""

import mmap
import struct
from collections.abc import Set
from pathlib import Path

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
STRING, ARRAY = 8, 9
REQUIRED = {  # fields that every writer of language models writes, by what they are
    "block_count": "the number of layers",
    "context_length": "the number of positions",
    "embedding_length": "the width",
    "feed_forward_length": "the width of the feed-forward maps",
    "attention.head_count": "the number of heads",
}
EXPERTS = ("expert_count", "expert_used_count")  # one needs the other
NORMS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # one of them is needed
DEPTH = 4  # arrays within arrays
DIMENSIONS = 8
LONGEST_NAME = 1024


class _DamagedError(Exception):
    """A header that is not as the format demands; private, since callers get a reason."""


def gguf_problem(path: Path) -> tuple[str, int]:
    """Return the reason why a header is damaged, empty if it is not, and the number of tensors."""
    if path.stat().st_size < 24:
        return "it is shorter than a header", 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return "", _Walk(data).header()
        except _DamagedError as error:
            return str(error), 0


class _Walk:
    """Position in a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> int:
        """Walk over the header; return the number of tensors."""
        if self._take(4) != b"GGUF":
            raise _DamagedError("it does not begin with GGUF")
        if (version := self._number("<I")) not in (2, 3):
            raise _DamagedError(f"its version is {version}, not 2 or 3")
        tensors, fields = self._number("<Q"), self._number("<Q")
        for count, size, kind in ((tensors, 24, "tensors"), (fields, 13, "fields")):
            self._check(count, size, kind)
        names, architecture = set[bytes](), b""
        for _ in range(fields):
            names.add(name := self._text())
            type_of_value = self._number("<I")
            if name == b"general.architecture" and type_of_value == STRING:
                architecture = self._text()
            else:
                self._value(type_of_value)
        prefix = architecture + b"."
        _check_fields({name.removeprefix(prefix) for name in names if name.startswith(prefix)})
        for _ in range(tensors):
            self._tensor()
        return tensors

    def _tensor(self) -> None:
        self._string()
        if (dimensions := self._number("<I")) > DIMENSIONS:
            raise _DamagedError(f"a tensor has {dimensions} dimensions")
        self._take(8 * dimensions + 4)
        if (offset := self._number("<Q")) > len(self._data):
            raise _DamagedError(f"a tensor begins at byte {offset} of {len(self._data)}")

    def _value(self, kind: int, depth: int = 0) -> None:
        if kind in SIZES:
            self._take(SIZES[kind])
        elif kind == STRING:
            self._string()
        elif kind == ARRAY and depth < DEPTH:
            inner, count = self._number("<I"), self._number("<Q")
            self._check(count, SIZES.get(inner, 8), "values of an array")
            if inner in SIZES:
                self._take(count * SIZES[inner])
            else:
                for _ in range(count):
                    self._value(inner, depth + 1)
        else:
            raise _DamagedError(f"a field has the unknown type {kind}")

    def _string(self) -> None:
        self._take(self._number("<Q"))

    def _text(self) -> bytes:
        """Return a string, the name of a field or of an architecture."""
        if (size := self._number("<Q")) > LONGEST_NAME:
            raise _DamagedError(f"a name has {size} bytes")
        start = self._at
        self._take(size)
        return self._data[start : self._at]

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _take(self, size: int) -> bytes:
        """Return the next bytes; of long ones only the position is moved."""
        self._check(size, 1, "bytes")
        start, self._at = self._at, self._at + size
        return self._data[start : self._at] if size <= 8 else b""

    def _check(self, count: int, size: int, kind: str) -> None:
        if count * size > len(self._data) - self._at:
            raise _DamagedError(f"it declares {count} {kind}, but has {len(self._data) - self._at} more bytes")


def _check_fields(names: Set[bytes]) -> None:
    """Raise if the fields of the architecture, by name, do not describe a model."""
    missing = [(name, what) for name, what in REQUIRED.items() if name.encode() not in names]
    experts = [name for name in EXPERTS if name.encode() in names]
    if len(experts) == 1:
        missing += [(name, "the number of experts") for name in EXPERTS if name not in experts]
    if not any(name.encode() in names for name in NORMS):
        missing.append((NORMS[0], "the epsilon of the norms"))
    if missing:
        raise _DamagedError("it has no field " + " and no field ".join(f"ARCHITECTURE.{n}, {w}" for n, w in missing))
