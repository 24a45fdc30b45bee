"""Documents and batches of tokens.

    documents     names and texts: the prose that comes with Python, a file, a folder, standard input, a list
    batches       windows of tokens, padded on the right; every batch is of documents of one group

Which documents are read, and in which group, follows from hashes of their names: neither the order of files nor the
way a corpus is cut into shards plays a part. A limit on tokens takes documents in the order of their hashes, equally
from all groups as far as they go. Memory does not grow with the corpus.

Read next: ../statistics/hashing.py (keys and groups), ../run_probe.py (what happens to a batch).
"""

import hashlib
import heapq
import json
import math
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from ..._errors import InputTypeError, InputValueError, sentence
from ..._typing import Int, Tensor
from ..statistics.hashing import GROUPS, group_of, hash_of
from .smiles import reactions

PART = 20_000  # characters after which a long file goes on as another document, at the next blank line
LENGTH = 1024  # tokens of a window at most, unless another length is asked for
PADDED = 8192  # tokens of a batch at most, padding included, unless another number is asked for
SHORTEST = 0.75  # of the longest row of such a batch: padding is computed with and thrown away
BUFFER = 1 << 17  # tokens of a group that are sorted by length together
BY_LINE = (".smi", ".smiles", ".rsmi")  # one document a line


class Document(NamedTuple):
    """A text and the name that it is known by, in results and in the hash that places it."""

    name: str
    text: str


class Batch(NamedTuple):
    """Rows of tokens from documents of one group, padded on the right.

    A row starts at `starts` in its document, counted in tokens of the rows before it, special ones included, so that
    (key, position) is another pair for every token.
    """

    inputs: dict[str, Tensor]  # input_ids and attention_mask, [b, n]
    keys: Int[Tensor, " b"]  # hash of the document of each row
    group: int
    names: list[str]
    starts: Int[Tensor, " b"]


class Report(NamedTuple):
    """What became of the documents so far."""

    documents: int  # of which rows were made
    rows: int
    tokens: int  # without padding
    padded: int  # with padding
    length: int  # of a window at most
    windowed: int  # documents longer than a window
    short: int  # documents left out because they have fewer than two tokens
    left: int  # documents left out, whole or from some window on, because there were tokens enough
    groups: int  # that have tokens

    def words(self) -> str:
        """The report as one or two sentences."""
        of = f"{self.tokens:,} tokens of {self.documents:,} documents" if self.tokens else f"{self.documents:,} inputs"
        text = f"{of} in {self.groups} groups."
        if self.windowed:
            text += f" {self.windowed:,} were longer than {self.length:,} tokens and were cut into windows."
        if self.short:
            text += f" {self.short:,} of fewer than two tokens were left out."
        if self.left:
            text += f" {self.left:,} were left out or cut short, once there were tokens enough."
        return text


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
                sentence("documents", f"source must be given for a model that reads {reads}", fact, remedy)
            )
        return _some(DEFAULTS[reads](), f"the {reads} of this package")
    if isinstance(source, str) and source == "-":
        return _some(_decoded("standard input", _parts("standard input", sys.stdin)), "standard input")
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        if not path.exists():
            fact, remedy = f"{os.fspath(source)[:80]!r}", "Pass texts themselves as a list of strings."
            raise InputValueError(sentence("documents", "source must be a file or a folder that exists", fact, remedy))
        return _some(_files(path), os.fspath(source))
    if not isinstance(source, Iterable):
        remedy = "Pass a path, or a list of texts."
        raise InputTypeError(sentence("documents", "source must hold texts", type(source).__name__, remedy))
    return _some(_named(source), "the texts")


def batches(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    tokens: int | None,
    length: int | None = None,
    size: int | None = None,
    padded: int = PADDED,
    seed: int = 0,
) -> "Batches":
    """Batches of about `tokens` tokens, an iterator whose `report` says what was read so far.

    Documents longer than `length` (1024, or the context of the model if that is less) are cut into windows, and
    special tokens stand in every window as the tokenizer puts them. A batch has `size` rows, or as many as make
    `padded` tokens with padding. With tokens=None everything is read, in one pass; else the documents of least hash
    under `seed` are, the same for every order of the corpus, and no window is cut short to meet the number.

    Law: tests/laws/test_batches_do_not_depend_on_the_order_of_documents.py.
    """
    if not callable(tokenizer):
        fact, remedy = type(tokenizer).__name__, "Pass the one that belongs to the model."
        raise InputTypeError(sentence("batches", "tokenizer must turn text into tokens", fact, remedy))
    for name, number in (("tokens", tokens), ("size", size), ("padded", padded)):
        if number is not None and number < 1:
            raise InputValueError(sentence("batches", f"{name} must be 1 or more", f"{number}", "None leaves it open."))
    special = tokenizer.num_special_tokens_to_add(pair=False)
    context = min(tokenizer.model_max_length, 10**9)
    if length is not None and not special + 2 <= length <= context:
        remedy = "None takes 1024, or the context if that is less."
        condition = f"length must be from {special + 2} to the context of the model, {context}"
        raise InputValueError(sentence("batches", condition, f"{length}", remedy))
    return Batches(documents, tokenizer, tokens, length or min(LENGTH, context), size, padded, seed)


class _Row(NamedTuple):
    key: int
    name: str
    start: int
    ids: array


class Batches(Iterator[Batch]):
    """The iterator that `batches` returns: one pass over the documents, and the report of it."""

    def __init__(
        self,
        documents: Iterable[Document],
        tokenizer: Any,
        tokens: int | None,
        length: int,
        size: int | None,
        padded: int,
        seed: int,
    ) -> None:
        self._documents, self._tokenizer = documents, tokenizer
        self._tokens, self._length, self._size, self._padded, self._seed = tokens, length, size, padded, seed
        self._special = tokenizer.num_special_tokens_to_add(pair=False)
        self._report = Report(0, 0, 0, 0, length, 0, 0, 0, 0)
        self._groups: set[int] = set()
        self._pass = self._packed(self._streamed() if tokens is None else self._chosen(tokens))

    @property
    def report(self) -> Report:
        """What became of the documents so far."""
        return self._report._replace(groups=len(self._groups))

    def __next__(self) -> Batch:
        return next(self._pass)

    def _count(self, **more: int) -> None:
        self._report = self._report._replace(**{n: getattr(self._report, n) + by for n, by in more.items()})

    def _rows(self, document: Document) -> list[_Row]:
        """The windows of a document; none if it has fewer than two tokens, or where one has."""
        key, start, rows = hash_of(document.name), 0, []
        for ids in _windows(self._tokenizer, document.text, self._length, self._special):
            if len(ids) >= self._special + 2:
                rows.append(_Row(key, document.name, start, array("i", ids)))
            start += len(ids)
        self._count(short=not rows)
        return rows

    def _streamed(self) -> Iterator[tuple[int, list[_Row]]]:
        """Every document in its turn, with its group."""
        for document in self._documents:
            if rows := self._rows(document):
                yield group_of(rows[0].key), rows

    def _chosen(self, tokens: int) -> Iterator[tuple[int, list[_Row]]]:
        """The documents of least hash in each group, up to the level at which all groups together have the tokens."""
        groups: list[list[tuple[int, int, list[_Row]]]] = [[] for _ in range(GROUPS)]  # heaps, the greatest hash first
        totals = [0] * GROUPS
        for number, document in enumerate(self._documents):
            key = hash_of(document.name)
            g, rank = group_of(key), _rank(key, self._seed)
            heap = groups[g]
            if totals[g] >= tokens and rank > -heap[0][0]:
                self._count(left=1)  # unread: every one before it has a smaller hash, and they are enough
                continue
            if rows := self._rows(document):
                heapq.heappush(heap, (-rank, -number, rows))
                totals[g] += _size(rows)
            while heap and totals[g] - _size(heap[0][2]) >= tokens:
                totals[g] -= _size(heapq.heappop(heap)[2])
                self._count(left=1)
        level = _level(totals, tokens)
        for g, heap in enumerate(groups):
            taken = 0
            for _, _, rows in sorted(heap, reverse=True):
                kept = []
                for row in rows:
                    if taken and taken + len(row.ids) / 2 > level:
                        break
                    kept.append(row)
                    taken += len(row.ids)
                self._count(left=len(kept) < len(rows))
                if kept:
                    yield g, kept

    def _packed(self, documents: Iterator[tuple[int, list[_Row]]]) -> Iterator[Batch]:
        """Rows of one group, of similar lengths, together."""
        waiting: list[list[_Row]] = [[] for _ in range(GROUPS)]
        held = [0] * GROUPS
        for g, rows in documents:
            self._count(documents=1, windowed=len(rows) > 1)
            for row in rows:
                waiting[g].append(row)
                held[g] += len(row.ids)
                if held[g] >= BUFFER:
                    yield from self._sorted(g, waiting[g])
                    waiting[g], held[g] = [], 0
        for g, rows in enumerate(waiting):
            yield from self._sorted(g, rows)
        if not self._report.rows:
            fact = f"{self._report.short} that are shorter"
            remedy = "Pass longer texts, or those that this tokenizer reads."
            raise InputValueError(sentence("batches", "some document must have two tokens or more", fact, remedy))

    def _sorted(self, group: int, rows: list[_Row]) -> Iterator[Batch]:
        rows = sorted(rows, key=lambda row: (-len(row.ids), row.key, row.start))
        while rows:
            longest = len(rows[0].ids)
            alike = sum(len(row.ids) >= SHORTEST * longest for row in rows)
            count = self._size or max(1, min(self._padded // longest, alike))
            yield self._batch(group, rows[:count])
            rows = rows[count:]

    def _batch(self, group: int, rows: list[_Row]) -> Batch:
        longest = len(rows[0].ids)
        padding = next((n for n in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id) if n is not None), 0)
        ids = torch.full((len(rows), longest), padding)
        mask = torch.zeros((len(rows), longest), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
            mask[i, : len(row.ids)] = 1
        self._groups.add(group)
        self._count(rows=len(rows), tokens=_size(rows), padded=ids.numel())
        return Batch(
            {"input_ids": ids, "attention_mask": mask},
            torch.tensor([row.key for row in rows]),
            group,
            [row.name for row in rows],
            torch.tensor([row.start for row in rows]),
        )


def _windows(tokenizer: Any, text: str, length: int, special: int) -> list[list[int]]:
    """The tokens of a text, cut so that each piece has at most `length` with its special ones."""
    if getattr(tokenizer, "is_fast", False):
        options = {"truncation": True, "max_length": length, "return_overflowing_tokens": True}
        pieces: list[list[int]] = tokenizer(text, **options)["input_ids"]
        return pieces
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    step = length - special
    return [tokenizer.build_inputs_with_special_tokens(ids[i : i + step]) for i in range(0, len(ids), step)]


def _rank(key: int, seed: int) -> int:
    """The place of a document in the order in which documents are taken."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest(), "little")


def _size(rows: list[_Row]) -> int:
    return sum(len(row.ids) for row in rows)


def _level(totals: list[int], tokens: int) -> float:
    """The level to which groups are filled to have this many tokens together: the sum of min(total, level)."""
    for place, total in enumerate(sorted(totals)):
        share = tokens / (len(totals) - place)
        if total >= share:
            return share
        tokens -= total
    return math.inf


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
        raise InputValueError(sentence("documents", "source must hold text", f"none in {where}", remedy))


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
            raise InputTypeError(sentence("documents", condition, f"{type(entry).__name__} at {number}", remedy))
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
        raise InputValueError(sentence("documents", "every file must be readable", fact, remedy)) from None


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
        raise InputValueError(sentence("documents", condition, f"other bytes in {name}", remedy))


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
            raise InputValueError(sentence("documents", condition, fact, "Leave that line out."))
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
