"""Batches of tokens from documents.

    batches       windows of tokens, padded on the right; all documents of a batch belong to one group

Hashes of the document names determine which documents are read and which group each belongs to. The order of files and
the division of a corpus into shards have no effect. A token limit takes documents in the order of their hashes, in
equal amounts from all groups as long as they last. Memory does not grow with the corpus.

Read next: text.py (sources of documents), ../statistics/hashing.py (keys and groups), ../run_probe.py (the pass over
all batches).
"""

import hashlib
import heapq
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..._errors import InputTypeError, InputValueError
from ..._typing import Int, Tensor
from ..statistics.hashing import GROUPS, group_of, hash_of
from .text import Document

LENGTH = 1024  # default maximum window length, in tokens
PADDED = 8192  # default maximum number of tokens in a batch, padding included
SHORTEST = 0.75  # minimum row length relative to the longest row of a batch; limits the computation spent on padding
BUFFER = 1 << 17  # tokens of a group that are sorted by length together


class Batch(NamedTuple):
    """Rows of tokens from documents of one group, padded on the right.

    `starts` is the position of each row in its document, counted in tokens of the preceding rows, special tokens
    included. The pair (key, position) is therefore unique to each token.
    """

    inputs: dict[str, Tensor]  # input_ids and attention_mask, [b, n]
    keys: Int[Tensor, " b"]  # hash of each row's document
    group: int
    names: list[str]
    starts: Int[Tensor, " b"]

    def rows(self, places: Iterable[int]) -> "Batch":
        """Return a batch of the rows at these indices."""
        at = list(places)
        inputs = {name: t[at] for name, t in self.inputs.items()}
        return Batch(inputs, self.keys[at], self.group, [self.names[row] for row in at], self.starts[at])


def joined(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the rows of several of equal length and one group."""
    first = batches[0]
    inputs = {name: torch.cat([b.inputs[name] for b in batches]) for name in first.inputs}
    keys, starts = (torch.cat([getattr(b, name) for b in batches]) for name in ("keys", "starts"))
    return Batch(inputs, keys, first.group, [name for b in batches for name in b.names], starts)


class Report(NamedTuple):
    """Counts of the documents, rows and tokens read so far."""

    documents: int  # documents that contributed rows
    rows: int
    tokens: int  # without padding
    padded: int  # with padding
    length: int  # maximum window length
    windowed: int  # documents longer than a window
    short: int  # documents skipped because they have fewer than two tokens
    left: int  # documents skipped or truncated because the token limit was reached
    groups: int  # groups with tokens

    def words(self) -> str:
        """Return the report as a few sentences."""
        amount = (
            f"{self.tokens:,} tokens from {self.documents:,} documents" if self.tokens else f"{self.documents:,} inputs"
        )
        text = f"{amount} in {self.groups} groups."
        if self.windowed:
            text += f" Documents longer than {self.length:,} tokens, split into windows: {self.windowed:,}."
        if self.short:
            text += f" Documents with fewer than two tokens, skipped: {self.short:,}."
        if self.left:
            text += f" Documents skipped or truncated at the token limit: {self.left:,}."
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
    """Iterate over batches with about `tokens` tokens in total; `report` of the iterator counts what has been read.

    Documents longer than `length` (default: 1024 or the context length of the model, whichever is smaller) are split
    into windows, and the tokenizer adds its special tokens to every window. A batch has `size` rows, or as many as fit
    into `padded` tokens with padding. With tokens=None the corpus is read to its end in one pass. Otherwise the
    documents with the smallest hashes under `seed` are read. This choice does not depend on the order of the corpus,
    and no window is truncated to reach the number exactly.

    Law: tests/laws/test_batches_do_not_depend_on_the_order_of_documents.py.
    """
    if not callable(tokenizer):
        problem = f"tokenizer must be a callable that maps text to tokens, got {type(tokenizer).__name__}"
        raise InputTypeError("batches", "tokenizer", problem, "Pass the tokenizer of the model.")
    for name, number in (("tokens", tokens), ("size", size), ("padded", padded)):
        if number is not None and number < 1:
            raise InputValueError("batches", name, f"{name} must be 1 or more, got {number}", "Pass None for no limit.")
    special = tokenizer.num_special_tokens_to_add(pair=False)
    context = min(tokenizer.model_max_length, 10**9)
    if length is not None and not special + 2 <= length <= context:
        problem = f"length must be between {special + 2} and the context length of the model, {context}, got {length}"
        remedy = "Pass None for the default, 1024 or the context length if that is smaller."
        raise InputValueError("batches", "length", problem, remedy)
    return Batches(documents, tokenizer, tokens, length or min(LENGTH, context), size, padded, seed)


class _Row(NamedTuple):
    key: int
    name: str
    start: int
    ids: array


class Batches(Iterator[Batch]):
    """Iterator returned by `batches`: one pass over the documents, and its report."""

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
        """Counts of the documents, rows and tokens read so far."""
        return self._report._replace(groups=len(self._groups))

    def __next__(self) -> Batch:
        return next(self._pass)

    def _count(self, **more: int) -> None:
        self._report = self._report._replace(**{n: getattr(self._report, n) + by for n, by in more.items()})

    def _rows(self, document: Document) -> list[_Row]:
        """Split a document into windows; windows of fewer than two tokens are skipped."""
        key, start, rows = hash_of(document.name), 0, []
        for ids in _windows(self._tokenizer, document.text, self._length, self._special):
            if len(ids) >= self._special + 2:
                rows.append(_Row(key, document.name, start, array("i", ids)))
            start += len(ids)
        self._count(short=not rows)
        return rows

    def _streamed(self) -> Iterator[tuple[int, list[_Row]]]:
        """Yield the group and the windows of every document, in corpus order."""
        for document in self._documents:
            if rows := self._rows(document):
                yield group_of(rows[0].key), rows

    def _chosen(self, tokens: int) -> Iterator[tuple[int, list[_Row]]]:
        """Yield the documents with the smallest hashes of each group, up to a common level that gives `tokens`."""
        groups: list[list[tuple[int, int, list[_Row]]]] = [[] for _ in range(GROUPS)]  # heaps, largest hash first
        totals = [0] * GROUPS
        for number, document in enumerate(self._documents):
            key = hash_of(document.name)
            g, rank = group_of(key), _rank(key, self._seed)
            heap = groups[g]
            if totals[g] >= tokens and rank > -heap[0][0]:
                self._count(left=1)  # not tokenized: documents with smaller hashes already provide enough tokens
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
                windows = []
                for row in rows:
                    if taken and taken + len(row.ids) / 2 > level:
                        break
                    windows.append(row)
                    taken += len(row.ids)
                self._count(left=len(windows) < len(rows))
                if windows:
                    yield g, windows

    def _packed(self, documents: Iterator[tuple[int, list[_Row]]]) -> Iterator[Batch]:
        """Pack rows of one group and of similar lengths into batches."""
        waiting: list[list[_Row]] = [[] for _ in range(GROUPS)]
        held = [0] * GROUPS  # tokens waiting in each group
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
            problem = f"all {self._report.short} documents have fewer than two tokens"
            remedy = "Pass longer texts, or texts in the language of the tokenizer."
            raise InputValueError("batches", "documents", problem, remedy)

    def _sorted(self, group: int, rows: list[_Row]) -> Iterator[Batch]:
        rows = sorted(rows, key=lambda row: (-len(row.ids), row.key, row.start))
        while rows:
            longest = len(rows[0].ids)
            similar = sum(len(row.ids) >= SHORTEST * longest for row in rows)
            count = self._size or max(1, min(self._padded // longest, similar))
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
    """Tokenize a text into windows of at most `length` tokens, special tokens included."""
    if getattr(tokenizer, "is_fast", False):
        options = {"truncation": True, "max_length": length, "return_overflowing_tokens": True}
        pieces: list[list[int]] = tokenizer(text, **options)["input_ids"]
        return pieces
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    step = length - special
    return [tokenizer.build_inputs_with_special_tokens(ids[i : i + step]) for i in range(0, len(ids), step)]


def _rank(key: int, seed: int) -> int:
    """Return the rank of a document in the order in which documents are chosen."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest(), "little")


def _size(rows: list[_Row]) -> int:
    return sum(len(row.ids) for row in rows)


def _level(totals: list[int], tokens: int) -> float:
    """Return the level for which the sum over groups of min(total, level) equals `tokens`."""
    for place, total in enumerate(sorted(totals)):
        share = tokens / (len(totals) - place)
        if total >= share:
            return share
        tokens -= total
    return math.inf
