"""Documents of text, by name.

    documents     names and texts: the prose that comes with Python, a file, a folder, standard input, a list

Read next: batching.py (batches of their tokens), images.py (inputs that are no text).
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..._errors import InputTypeError, InputValueError
from .smiles import reactions

PART = 20_000  # characters after which a long file goes on as another document, at the next blank line
BY_LINE = (".smi", ".smiles", ".rsmi")  # one document a line


class Document(NamedTuple):
    """A text and the name that it is known by, in results and in the hash that places it."""

    name: str
    text: str


Source = str | os.PathLike[str] | Iterable[str | tuple[str, str]] | None


def documents(source: Source = None, *, reads: str = "text") -> Iterator[Document]:
    """The documents of a source: None is the prose that comes with Python, - is standard input.

    For a model that `reads` reactions, as `load` says in its facts, None is those of smiles.py.

    A path is a file or a folder, read to the bottom in the order of names. A file is one document, and a long one a
    sequence of them, cut at blank lines, so that a single book has parts enough for an interval. A .jsonl file has one
    document in the "text" of each line, a .smi file one in each line. An iterable holds texts or (name, text).
    """
    if source is None:
        if reads not in DEFAULTS:
            fact, remedy = "none", "Pass the inputs themselves, batch by batch."
            raise InputValueError(
                "documents", "source", f"source must be given for a model that reads {reads}, got {fact}", remedy
            )
        return _some(DEFAULTS[reads](), f"the {reads} of this package")
    if isinstance(source, str) and source == "-":
        return _some(_decoded("standard input", _parts("standard input", sys.stdin)), "standard input")
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        if not path.exists():
            fact, remedy = f"{os.fspath(source)[:80]!r}", "Pass texts themselves as a list of strings."
            raise InputValueError(
                "documents", "source", f"source must be a file or a folder that exists, got {fact}", remedy
            )
        return _some(_files(path), os.fspath(source))
    if not isinstance(source, Iterable):
        remedy = "Pass a path, or a list of texts."
        raise InputTypeError("documents", "source", f"source must hold texts, got {type(source).__name__}", remedy)
    return _some(_named(source), "the texts")


# Sources ------------------------------------------------------------------------------------------------------------


def _some(found: Iterator[Document], where: str) -> Iterator[Document]:
    """The documents that are not blank, at least one."""
    count = 0
    for document in found:
        if document.text.strip():
            count += 1
            yield document
    if not count:
        remedy = "Pass a file, a folder or a list that has text in it."
        raise InputValueError("documents", "source", f"source must hold text, got none in {where}", remedy)


def _topics() -> Iterator[Document]:
    """The topics of Python's own help, a language reference in English."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"python: {name}", topics[name])


def _reactions() -> Iterator[Document]:
    for name, smiles in reactions():
        yield Document(f"reaction: {name}", smiles)


DEFAULTS = {"text": _topics, "reactions": _reactions}


def _named(source: Iterable[Any]) -> Iterator[Document]:
    for number, entry in enumerate(source, start=1):
        pair = (f"text {number}", entry) if isinstance(entry, str) else entry
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            remedy = "A text alone is named by its place."
            condition = "every text must be a string or a pair of name and text"
            raise InputTypeError("documents", "source", f"{condition}, got {type(entry).__name__} at {number}", remedy)
        yield Document(*pair)


def _files(path: Path) -> Iterator[Document]:
    if path.is_file():
        yield from _file(path, path.name)
        return
    hidden = {".git", "__pycache__"}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.relative_to(path)
        if not hidden & set(name.parts) and not name.name.startswith("."):
            yield from _file(file, name.as_posix())


def _file(path: Path, name: str) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8") as lines:
            reader = _records if path.suffix == ".jsonl" else _lines if path.suffix in BY_LINE else _parts
            yield from _decoded(name, reader(name, lines))
    except OSError as error:
        fact, remedy = f"{type(error).__name__} from {name}", "Change its permissions, or leave it out."
        raise InputValueError("documents", "source", f"every file must be readable, got {fact}", remedy) from None


def _decoded(name: str, found: Iterator[Document]) -> Iterator[Document]:
    """The documents of a file, if its bytes are text: UTF-8 without NUL."""
    text = True
    try:
        for document in found:
            if not (text := "\0" not in document.text):
                break
            yield document
    except UnicodeDecodeError:
        text = False
    if not text:
        condition, remedy = "every file must be text in UTF-8", "Convert it to UTF-8, or leave it out."
        raise InputValueError("documents", "source", f"{condition}, got other bytes in {name}", remedy)


def _lines(name: str, lines: TextIO) -> Iterator[Document]:
    for number, line in enumerate(lines, start=1):
        yield Document(f"{name}:{number}", line.strip())


def _records(name: str, lines: TextIO) -> Iterator[Document]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            condition, fact = 'every line of a .jsonl file must be an object with a "text"', f"{name}, line {number}"
            raise InputValueError("documents", "source", f"{condition}, got {fact}", "Leave that line out.")
        yield Document(f"{name}:{number}", text)


def _parts(name: str, lines: TextIO) -> Iterator[Document]:
    """A text as one document, or several if it is long, cut at blank lines if there are any."""
    part: list[str] = []
    size, number = 0, 1
    while line := lines.readline(PART):
        part.append(line)
        size += len(line)
        if (size >= PART and not line.strip()) or size >= 2 * PART:
            yield Document(name if number == 1 else f"{name}#{number}", "".join(part))
            part, size, number = [], 0, number + 1
    yield Document(name if number == 1 else f"{name}#{number}", "".join(part))
