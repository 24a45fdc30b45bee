"""The logits of attention, and which keys a query may see: defined here once, for every kernel.

    u_mn = scale <q_m, k_n>                                     product
    s_mn = softcap tanh(u_mn / softcap) + bias_mn               logit; -inf where n is not visible to m
    at_m = m + (n_keys - n_queries)                             the position of a query: queries are the last ones
    n visible to m:  at_m - left <= n <= at_m + right,  mask_mn,  segment_n = segment_at(m)

Heads come grouped: h query heads read hk key heads, head i reads key head i // (h / hk). Bias, mask and segments keep
size 1 where they are shared, and nothing here is of size m x n but the block of logits that was asked for.

Read next: reference.py (what is summed over these logits), blocked.py (block after block).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor


class Scoring(NamedTuple):
    """What makes a logit of a product, and the band of keys around a query; None is no limit."""

    scale: float
    softcap: float | None = None
    left: int | None = None
    right: int | None = None


class Sight(NamedTuple):
    """The tensors beside queries and keys: all broadcast against [b, h, m, n], segments against [b, n]."""

    bias: Float[Tensor, "#b #h #m n"] | None = None
    mask: Bool[Tensor, "#b #h #m n"] | None = None
    segments: Int[Tensor, "#b n"] | None = None


class Block(NamedTuple):
    """Queries first_row <= m < last_row and the keys first_key <= n < last_key that any of them can see."""

    first_row: int
    last_row: int
    first_key: int
    last_key: int

    @property
    def rows(self) -> int:
        """The number of queries."""
        return self.last_row - self.first_row

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.last_key - self.first_key


def blocks(m: int, n: int, scoring: Scoring, rows: int) -> Iterator[Block]:
    """All queries, `rows` at a time, each with the keys that the band leaves; of no width where it leaves none."""
    for first in range(0, max(m, 1), rows):  # no queries are one block of none
        last = min(m, first + rows)
        low = 0 if scoring.left is None else min(n, max(0, first + n - m - scoring.left))
        high = n if scoring.right is None else max(low, min(n, last + n - m + scoring.right))
        yield Block(first, last, low, high)


def cut(tensor: Tensor, block: Block) -> Tensor:
    """A bias or mask [#b, #h, #m, n] restricted to a block."""
    rows = tensor if tensor.shape[-2] == 1 else tensor.narrow(-2, block.first_row, block.rows)
    return rows.narrow(-1, block.first_key, block.keys)


def visible(sight: Sight, scoring: Scoring, block: Block, m: int, n: int, device: torch.device) -> Tensor | None:
    """Which keys of the block each of its queries may see, broadcast against [b, h, rows, keys]; None is all."""
    seen = None if sight.mask is None else cut(sight.mask, block)
    if scoring.left is None and scoring.right is None and sight.segments is None:
        return seen
    key = torch.arange(block.first_key, block.last_key, device=device)
    at = torch.arange(block.first_row + n - m, block.last_row + n - m, device=device).unsqueeze(-1)
    if scoring.left is not None:
        inside = key >= at - scoring.left
        seen = inside if seen is None else seen & inside
    if scoring.right is not None:
        inside = key <= at + scoring.right
        seen = inside if seen is None else seen & inside
    if sight.segments is not None:
        of_key = sight.segments[:, None, None, block.first_key : block.last_key]
        of_query = sight.segments[:, None, block.first_row + n - m : block.last_row + n - m, None]
        same = of_key == of_query
        seen = same if seen is None else seen & same
    return seen


def logits(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    bias: Float[Tensor, "#b #h #m n"] | None,
    seen: Bool[Tensor, "..."] | None,
    scoring: Scoring,
) -> Float[Tensor, "b h m n"]:
    """s_mn of one block, differentiable."""
    b, h, m, _ = query.shape
    s = grouped(query * scoring.scale, key.shape[1]) @ key.mT
    s = s.reshape(b, h, m, key.shape[2])
    if scoring.softcap is not None:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    if bias is not None:
        s = s + bias
    return s if seen is None else s.masked_fill(~seen, -torch.inf)


def grouped(per_query_head: Float[Tensor, "b h m d"], key_heads: int) -> Float[Tensor, "b hk gm d"]:
    """The query heads of one key head one below the other: one matrix product reads each key head once."""
    b, h, m, d = per_query_head.shape
    return per_query_head.reshape(b, key_heads, h // key_heads * m, d)
