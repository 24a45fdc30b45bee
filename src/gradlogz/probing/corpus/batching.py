"""Batches of tokens from documents.

    batches       windows of tokens, padded on the right; all documents of a batch belong to one group
    sample        the windows of the corpus in the order of their hashes, until they have N tokens          [--tokens N]
    effective     (sum_d n_d)² / sum_d n_d²,  n_d: tokens read of document d      effective number of documents [kish65]

Documents longer than a window are split into windows. The hash of a window depends on the name of its document, its
number in the document and the seed, so that all windows of the corpus have the same probability of being read: those
of long and of short documents, of beginnings and of ends. Sums over the windows read, divided by each other, therefore
estimate those of the whole corpus without weights. The window that reaches N is the last one and is read whole; since
the decision to stop after a window never depends on the windows that follow, no length is preferred (Wald's identity).
Windows of one document are not independent: confidence intervals take documents as sampling units.

The order of files and the division of a corpus into shards have no effect. Memory does not grow with the corpus.

Read next: text.py (sources of documents), ../statistics/hashing.py (keys and groups), ../run_probe.py (the pass over
all batches).
"""

import hashlib
import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
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
    left: int  # documents of which some windows were not read because of the token limit
    groups: int  # groups with tokens
    effective: float  # effective number of documents (Kish): smaller the more their numbers of tokens differ
    fingerprint: int  # sum of the keys of the documents modulo 2^63, equal for two runs that read the same ones

    def counts(self) -> dict[str, int]:
        """Return the counts that a run records."""
        return {n: getattr(self, n) for n in ("documents", "rows", "tokens", "padded", "windowed", "short")}

    def words(self) -> str:
        """Return the report as a few sentences."""
        documents = f"{self.documents:,} documents (effective number {self.effective:.1f})"
        amount = f"{self.tokens:,} tokens from {documents}" if self.tokens else f"{self.documents:,} inputs"
        text = f"{amount} in {self.groups} groups."
        if self.windowed:
            text += f" Documents longer than {self.length:,} tokens, split into windows: {self.windowed:,}."
        if self.short:
            text += f" Documents with fewer than two tokens, skipped: {self.short:,}."
        if self.left:
            text += f" Documents not read, or read in part, because of the token limit: {self.left:,}."
        return text


def facts_of_text(report: Report) -> dict[str, Any]:
    """Return the facts of the text that a run records."""
    return {
        "tokens": report.tokens,
        "documents": report.documents,
        "effective_documents": round(report.effective, 1),
        "groups": report.groups,
        "fingerprint": f"{report.fingerprint:016x}",
    }


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
    into `padded` tokens with padding. With tokens=None the corpus is read to its end in one pass. Otherwise the windows
    with the smallest hashes under `seed` are read, a sample in which every window of the corpus has the same
    probability. It does not depend on the order of the corpus, and no window is truncated to reach the number exactly.

    Laws: tests/laws/test_batches_do_not_depend_on_the_order_of_documents.py,
    tests/laws/test_samples_of_a_corpus_cover_the_whole.py.
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
    """A window of a document: its number among all windows, and how many the document has."""

    key: int
    name: str
    number: int
    windows: int
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
        self._report = Report(0, 0, 0, 0, length, 0, 0, 0, 0, 0.0, 0)
        self._groups: set[int] = set()
        self._sum, self._squares = 0, 0  # of the numbers of tokens of documents
        self._fingerprint = 0
        self._pass = self._packed(self._streamed() if tokens is None else self._sampled(tokens))

    @property
    def report(self) -> Report:
        """Counts of the documents, rows and tokens read so far."""
        effective = self._sum**2 / self._squares if self._squares else 0.0
        return self._report._replace(
            groups=len(self._groups), effective=effective, fingerprint=self._fingerprint % 2**63
        )

    def __next__(self) -> Batch:
        return next(self._pass)

    def _count(self, **more: int) -> None:
        self._report = self._report._replace(**{n: getattr(self._report, n) + by for n, by in more.items()})

    def _rows(self, document: Document) -> list[_Row]:
        """Split a document into windows; windows of fewer than two tokens are skipped."""
        key, start, rows = hash_of(document.name), 0, []
        windows = _windows(self._tokenizer, document.text, self._length, self._special)
        long_enough = sum(len(ids) >= self._special + 2 for ids in windows)
        for number, ids in enumerate(windows):
            if len(ids) >= self._special + 2:
                rows.append(_Row(key, document.name, number, long_enough, start, array("i", ids)))
            start += len(ids)
        self._count(short=not rows)
        return rows

    def _streamed(self) -> Iterator[list[_Row]]:
        """Yield the windows of every document, in corpus order."""
        return filter(None, map(self._rows, self._documents))

    def _sampled(self, tokens: int) -> Iterator[list[_Row]]:
        """Yield the windows with the smallest hashes that together have `tokens` tokens, document by document."""
        heap: list[tuple[int, int, _Row]] = []  # largest hash first
        total = 0
        for place, document in enumerate(self._documents):
            self._count(left=1)  # until all its windows are chosen
            key = hash_of(document.name)
            if total >= tokens and self._least(key, document.text) > -heap[0][0]:
                continue  # not tokenized: none of its windows is chosen
            for row in self._rows(document):
                heapq.heappush(heap, (-_rank(key, row.number, self._seed), -place, row))
                total += len(row.ids)
            while heap and total - len(heap[0][2].ids) >= tokens:
                total -= len(heapq.heappop(heap)[2].ids)
        self._count(left=-self._report.short)
        chosen = sorted((row for _, _, row in heap), key=lambda row: (row.key, row.start))
        for _, windows in groupby(chosen, key=lambda row: row.key):
            rows = list(windows)
            self._count(left=-(len(rows) == rows[0].windows))
            yield rows

    def _least(self, key: int, text: str) -> int:
        """Return a lower bound of the hashes of a document's windows; a window has at least one byte for each token."""
        most = 1 + len(text.encode("utf-8", "surrogatepass")) // (self._length - self._special)
        return min(_rank(key, number, self._seed) for number in range(most))

    def _packed(self, documents: Iterator[list[_Row]]) -> Iterator[Batch]:
        """Pack rows of one group and of similar lengths into batches."""
        waiting: list[list[_Row]] = [[] for _ in range(GROUPS)]
        held = [0] * GROUPS  # tokens waiting in each group
        for rows in documents:
            g, size = group_of(rows[0].key), _size(rows)
            self._count(documents=1, windowed=rows[0].windows > 1)
            self._sum, self._squares = self._sum + size, self._squares + size**2
            self._fingerprint += rows[0].key
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


def _rank(key: int, number: int, seed: int) -> int:
    """Return the hash of a window, which determines the order in which windows are chosen."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {key} {number}".encode(), digest_size=8).digest(), "little")


def _size(rows: list[_Row]) -> int:
    return sum(len(row.ids) for row in rows)
