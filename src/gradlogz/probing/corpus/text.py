"""Named documents of text.

    documents     names and texts from Python's help topics, a file, a folder, standard input or a list

Read next: batching.py (batches of their tokens), images.py (inputs other than text).
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ..._errors import InputTypeError, InputValueError
from ..._paths import user_path
from .smiles import reactions

PART = 20_000  # characters after which a long file is continued as another document, at the next blank line
SURROGATES = re.compile("[\ud800-\udfff]")  # halves of characters, which JSON can write and UTF-8 cannot
BY_LINE = (".smi", ".smiles", ".rsmi")  # one document per line


class Document(NamedTuple):
    """A text and its name, which appears in results and is hashed to assign the document to a group."""

    name: str
    text: str


Source = str | os.PathLike[str] | Iterable[str | tuple[str, str]] | None


def documents(source: Source = None, *, reads: str = "text") -> Iterator[Document]:
    """Iterate over the documents of a source; None selects Python's help topics, "-" standard input.

    With reads="reactions", a value that `load` reports in its facts, None selects the reactions of smiles.py.

    A path is a file or a folder; a folder is read with its subfolders, in the order of names. A file is one document. A
    long file is split at blank lines into several, so that a single book suffices for a confidence interval. A .jsonl
    file has one document in the "text" field of each line, a .smi file one per line. An iterable holds texts or pairs
    (name, text).
    """
    if source is None:
        if reads not in DEFAULTS:
            problem = f"there is no default source for a model that reads {reads}"
            raise InputValueError("documents", "source", problem, "Pass batches of inputs.")
        return _some(DEFAULTS[reads](), f"the {reads} of this package")
    if isinstance(source, str) and source == "-":
        return _some(_decoded("standard input", _parts("standard input", sys.stdin)), "standard input")
    if isinstance(source, str | os.PathLike):
        path = user_path("documents", "source", source)
        if not path.exists():
            problem = f"source must be an existing file or folder, got {os.fspath(source)[:80]!r}"
            raise InputValueError("documents", "source", problem, "Pass texts as a list of strings.")
        return _some(_files(path), os.fspath(source))
    if not isinstance(source, Iterable):
        problem = f"source must be a path or an iterable of texts, got {type(source).__name__}"
        raise InputTypeError("documents", "source", problem, "Pass a path, or a list of texts.")
    return _some(_named(source), "the texts")


# Sources ------------------------------------------------------------------------------------------------------------


def _some(documents: Iterator[Document], where: str) -> Iterator[Document]:
    """Yield the documents that are not blank; raise if there is none."""
    count = 0
    for document in documents:
        if document.text.strip():
            count += 1
            yield document
    if not count:
        remedy = "Pass a file, a folder or a list that contains text."
        raise InputValueError("documents", "source", f"{where} contains no text", remedy)


def _topics() -> Iterator[Document]:
    """Yield the topics of Python's built-in help, a language reference in English."""
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
            problem = (
                f"every text must be a string or a pair (name, text), but entry {number} is {type(entry).__name__}"
            )
            raise InputTypeError("documents", "source", problem, "Pass strings; their position becomes their name.")
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
        problem, remedy = f"{name} is not readable ({type(error).__name__})", "Change its permissions, or remove it."
        raise InputValueError("documents", "source", problem, remedy) from None


def _decoded(name: str, documents: Iterator[Document]) -> Iterator[Document]:
    """Yield the documents of a file; raise if its bytes are not text (UTF-8 without NUL)."""
    text = True
    try:
        for document in documents:
            if not (text := "\0" not in document.text and not SURROGATES.search(document.text)):
                break
            yield document
    except UnicodeDecodeError:
        text = False
    if not text:
        remedy = "Convert it to UTF-8, or remove it."
        raise InputValueError("documents", "source", f"{name} is not UTF-8 text", remedy)


def _lines(name: str, lines: TextIO) -> Iterator[Document]:
    for number, line in enumerate(lines, start=1):
        yield Document(f"{name}:{number}", line.strip())


def _records(name: str, lines: TextIO) -> Iterator[Document]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            problem = f'line {number} of {name} is not a JSON object with a string "text"'
            raise InputValueError("documents", "source", problem, "Correct or remove that line.")
        yield Document(f"{name}:{number}", text)


def _parts(name: str, lines: TextIO) -> Iterator[Document]:
    """Yield a text as one document, or a long text as several, split at blank lines where there are any."""
    part: list[str] = []
    size, number = 0, 1
    while line := lines.readline(PART):
        part.append(line)
        size += len(line)
        if (size >= PART and not line.strip()) or size >= 2 * PART:
            yield Document(name if number == 1 else f"{name}#{number}", "".join(part))
            part, size, number = [], 0, number + 1
    yield Document(name if number == 1 else f"{name}#{number}", "".join(part))
