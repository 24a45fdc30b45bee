"""Parts of a sequence that is split over P processes, and the queries of one that see keys of another.

    contiguous    rank r holds the r-th of P parts
    zigzag        rank r holds the chunks r and 2 P - 1 - r of 2 P: under a causal mask every rank has equal work

    i + (a - b) - left <= j <= i + (a - b) + right      query a + i sees key b + j; a and b are the begins of two chunks

Two different chunks are at least one chunk apart, so that one of the limits excludes nothing. The tokens that the other
excludes from all of a chunk are cut off: the rest is a window on the diagonal.

Read next: ring.py, which passes the parts around.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch

from .._typing import Int, Tensor
from .result import Attention

Band = tuple[int | None, int | None]
Placement = Literal["contiguous", "zigzag"]
# Fields with a vector for each row; the others have a number.
VECTORS = ("output", "key_mean", "value_variance")


class Layout(NamedTuple):
    """A sequence over a number of ranks, each with m queries and n keys, and the band of keys that a query sees."""

    ranks: int
    placement: Placement
    m: int
    n: int
    band: Band  # (left, right); None is no limit

    def chunks(self, rank: int) -> list["Chunk"]:
        """Chunks of a rank's part of the sequence."""
        if self.placement == "contiguous":
            return [Chunk(rank * self.n, slice(0, self.n))]
        half = self.n // 2
        last = 2 * self.ranks - 1
        return [Chunk(rank * half, slice(0, half)), Chunk((last - rank) * half, slice(half, self.n))]

    def positions(self, rank: int) -> Int[Tensor, " n"]:
        """Positions in the sequence of the tokens of a rank."""
        sizes = [(chunk.begin, chunk.tokens.stop - chunk.tokens.start) for chunk in self.chunks(rank)]
        return torch.cat([torch.arange(begin, begin + size) for begin, size in sizes])

    def pairs(self, rank: int, other: int) -> Iterator["Pair"]:
        """Queries of a rank that see keys of another."""
        if self.band == (None, None):
            yield Pair(slice(0, self.m), slice(0, self.n), self.band, rank == other)
            return
        for query in self.chunks(rank):
            for key in self.chunks(other):
                pair = _pair(query, key, self.band)
                if pair is not None:
                    yield pair

    def steps(self) -> int:
        """Number of ranks, from its own on downward, whose keys a rank needs: the largest of all ranks."""
        distances = [
            (rank - other) % self.ranks
            for rank in range(self.ranks)
            for other in range(self.ranks)
            if any(self.pairs(rank, other))
        ]
        return 1 + max(distances)


class Chunk(NamedTuple):
    """Consecutive tokens of the sequence: the position of the first, and their place in the part of their rank."""

    begin: int
    tokens: slice


class Pair(NamedTuple):
    """Queries of a part that see keys of another, and the window between them."""

    rows: slice
    keys: slice
    window: Band
    same: bool  # the keys are the same tokens as the queries


def _pair(query: Chunk, key: Chunk, band: Band) -> Pair | None:
    (first, last), (low, high) = ((c.tokens.start, c.tokens.stop) for c in (query, key))
    distance, size = query.begin - key.begin, last - first
    if distance == 0:
        return Pair(query.tokens, key.tokens, band, same=True)
    limit = band[0] if distance > 0 else band[1]
    reach = (
        size if limit is None else limit - abs(distance)
    )  # tokens between a query's place in the chunk and its limit
    if reach <= -size:
        return None
    cut, window = max(0, -reach), None if reach >= size - 1 else max(0, reach)
    if distance > 0:
        return Pair(slice(first, last - cut), slice(low + cut, high), (window, None), same=False)
    return Pair(slice(first + cut, last), slice(low, high - cut), (None, window), same=False)


def rows_of(result: Attention, rows: slice) -> Attention:
    """Views of these rows of a result; a result may also hold gradients of one."""
    size = rows.stop - rows.start
    return each_field(result, lambda t, dim: t.narrow(dim, rows.start, size))


def empty_rows(like: Attention, m: int) -> Attention:
    """Result of m rows that see no key, with the fields of another."""
    fields = {}
    for name, t in like._asdict().items():
        if t is not None:
            shape = (*t.shape[:-2], m, t.shape[-1]) if name in VECTORS else (*t.shape[:-1], m)
            fields[name] = t.new_full(shape, -torch.inf if name in ("log_normalizer", "max_logit") else 0.0)
    return Attention(**fields)


def each_field(result: Attention, change: Callable[[Tensor, int], Tensor]) -> Attention:
    """Change every field, given the dimension of its rows."""
    fields = result._asdict().items()
    return Attention(*(None if t is None else change(t, -2 if name in VECTORS else -1) for name, t in fields))  # type: ignore[arg-type]
