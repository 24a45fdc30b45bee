"""The logits of attention and the keys that a query may see, defined once for all kernels.

    u_mn = scale <q_m, k_n>                                     product
    s_mn = softcap tanh(u_mn / softcap) + bias_mn               logit; -inf where n is not visible to m
    at_m = m + (n_keys - n_queries)                             the position of a query: the queries are the last m keys
    n visible to m:  at_m - left <= n <= at_m + right,  mask_mn,  segment_n = segment_at(m)

Heads are grouped: h query heads use hk key heads, head i uses key head i // (h / hk). Bias, mask and segments keep size
1 along shared dimensions. Only the requested block of logits has size rows x keys.

Read next: reference.py (sums over these logits), blocked.py (block by block).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor


class Scoring(NamedTuple):
    """Scale and soft cap of the logits, and the band of visible keys around a query; None is no limit."""

    scale: float
    softcap: float | None = None
    left: int | None = None
    right: int | None = None


class Sight(NamedTuple):
    """Bias and mask, which broadcast against [b, h, m, n], and segments, which broadcast against [b, n]."""

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
        """Number of queries."""
        return self.last_row - self.first_row

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.last_key - self.first_key


def blocks(m: int, n: int, scoring: Scoring, rows: int) -> Iterator[Block]:
    """Blocks of at most `rows` queries with the keys in their band, of width 0 if there are none."""
    for first in range(0, max(m, 1), rows):  # without queries: one empty block
        last = min(m, first + rows)
        low = 0 if scoring.left is None else min(n, max(0, first + n - m - scoring.left))
        high = n if scoring.right is None else max(low, min(n, last + n - m + scoring.right))
        yield Block(first, last, low, high)


def cut(tensor: Tensor, block: Block) -> Tensor:
    """Restrict a bias or mask [#b, #h, #m, n] to a block."""
    rows = tensor if tensor.shape[-2] == 1 else tensor.narrow(-2, block.first_row, block.rows)
    return rows.narrow(-1, block.first_key, block.keys)


def visible(sight: Sight, scoring: Scoring, block: Block, m: int, n: int, device: torch.device) -> Tensor | None:
    """Visible keys of a block, a mask that broadcasts against [b, h, rows, keys]; None if all are visible."""
    visible_keys = None if sight.mask is None else cut(sight.mask, block)
    if scoring.left is None and scoring.right is None and sight.segments is None:
        return visible_keys
    key = torch.arange(block.first_key, block.last_key, device=device)
    at = torch.arange(block.first_row + n - m, block.last_row + n - m, device=device).unsqueeze(-1)
    if scoring.left is not None:
        inside = key >= at - scoring.left
        visible_keys = inside if visible_keys is None else visible_keys & inside
    if scoring.right is not None:
        inside = key <= at + scoring.right
        visible_keys = inside if visible_keys is None else visible_keys & inside
    if sight.segments is not None:
        key_segments = sight.segments[:, None, None, block.first_key : block.last_key]
        query_segments = sight.segments[:, None, block.first_row + n - m : block.last_row + n - m, None]
        same = key_segments == query_segments
        visible_keys = same if visible_keys is None else visible_keys & same
    return visible_keys


def logits(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    bias: Float[Tensor, "#b #h #m n"] | None,
    visible_keys: Bool[Tensor, "..."] | None,
    scoring: Scoring,
) -> Float[Tensor, "b h m n"]:
    """Logits s_mn of one block, differentiable."""
    b, h, m, _ = query.shape
    s = grouped(query * scoring.scale, key.shape[1]) @ key.mT
    s = s.reshape(b, h, m, key.shape[2])
    if scoring.softcap is not None:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    if bias is not None:
        s = s + bias
    return s if visible_keys is None else s.masked_fill(~visible_keys, -torch.inf)


def grouped(per_query_head: Float[Tensor, "b h m d"], key_heads: int) -> Float[Tensor, "b hk gm d"]:
    """Concatenate the rows of all query heads of a key head, so that one matrix product reads each key head once."""
    b, h, m, d = per_query_head.shape
    return per_query_head.reshape(b, key_heads, h // key_heads * m, d)
