"""Batches of the tokens of documents.

    batches       windows of tokens, padded on the right; every batch is of documents of one group

Which documents are read, and in which group, follows from hashes of their names: neither the order of files nor the
way a corpus is cut into shards plays a part. A limit on tokens takes documents in the order of their hashes, equally
from all groups as far as they go. Memory does not grow with the corpus.

Read next: text.py (where documents come from), ../statistics/hashing.py (keys and groups), ../run_probe.py (what
happens to a batch).
"""

import hashlib
import heapq
import math
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..._errors import InputTypeError, InputValueError
from ..._typing import Int, Tensor
from ..statistics.hashing import GROUPS, group_of, hash_of
from .text import Document

LENGTH = 1024  # tokens of a window at most, unless another length is asked for
PADDED = 8192  # tokens of a batch at most, padding included, unless another number is asked for
SHORTEST = 0.75  # of the longest row of such a batch: padding is computed with and thrown away
BUFFER = 1 << 17  # tokens of a group that are sorted by length together


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

    def rows(self, places: Iterable[int]) -> "Batch":
        """Some rows of the batch."""
        at = list(places)
        inputs = {name: t[at] for name, t in self.inputs.items()}
        return Batch(inputs, self.keys[at], self.group, [self.names[row] for row in at], self.starts[at])


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
        raise InputTypeError("batches", "tokenizer", f"tokenizer must turn text into tokens, got {fact}", remedy)
    for name, number in (("tokens", tokens), ("size", size), ("padded", padded)):
        if number is not None and number < 1:
            raise InputValueError("batches", name, f"{name} must be 1 or more, got {number}", "None leaves it open.")
    special = tokenizer.num_special_tokens_to_add(pair=False)
    context = min(tokenizer.model_max_length, 10**9)
    if length is not None and not special + 2 <= length <= context:
        remedy = "None takes 1024, or the context if that is less."
        condition = f"length must be from {special + 2} to the context of the model, {context}"
        raise InputValueError("batches", "length", f"{condition}, got {length}", remedy)
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
            raise InputValueError(
                "batches", "documents", f"some document must have two tokens or more, got {fact}", remedy
            )

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
