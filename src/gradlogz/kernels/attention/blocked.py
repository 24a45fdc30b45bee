"""Attention by blocks of queries in plain torch: any dtype, any device, linear memory.

    forward      the statistics of a block of rows, in place on one buffer of logits
    backward     ds = p (dp + c0 + y (c1 + c2 y)),  dp = <grad_output, v>,  y = s - E, with p and E of the same rows
                 c0 = gG - <grad_output, output> - gV V,   c1 = 2 gV - gH,   c2 = gV

Read next: derivatives.py, derivatives beyond the first.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..._typing import Float, Int, Tensor
from .dropout import Dropout
from .reference import FAR_BELOW, Gradients, Statistics, statistics
from .scoring import Block, Scoring, Sight, blocks, cut, grouped, visible

# Logits per block. On a CPU the buffer should stay in the cache; on a GPU it must occupy the device.
LOGITS_ON_CPU = 1 << 20
LOGITS_ELSEWHERE = 1 << 26
# Fewer rows per block would read the keys too often.
ROWS = 128


def logits_at_once(device: torch.device) -> int:
    """Maximum number of logits in a block."""
    return LOGITS_ON_CPU if device.type == "cpu" else LOGITS_ELSEWHERE


class Coefficients(NamedTuple):
    """Row coefficients of the gradient of a logit; c1 and c2 are None if only output and log normaliser have gradients.

    In a row without keys log_normalizer is +inf, so that p = 0 and its gradients vanish.
    """

    log_normalizer: Float[Tensor, "b h m"]
    mean_logit: Float[Tensor, "b h m"]
    c0: Float[Tensor, "b h m"]
    c1: Float[Tensor, "b h m"] | None
    c2: Float[Tensor, "b h m"] | None


def coefficients(result: Statistics, gradients: Gradients, along: Float[Tensor, "b h m"] | None) -> Coefficients:
    """Coefficients of every row from the statistics, their cotangents and along = <grad_output, output>."""
    G = result.log_normalizer
    dead = G == -torch.inf
    c0 = torch.zeros_like(G) if along is None else -along
    if gradients.log_normalizer is not None:
        c0 = c0 + gradients.log_normalizer.masked_fill(dead, 0.0)
    c1 = c2 = None
    if gradients.entropy is not None or gradients.logit_variance is not None:
        gH, gV = (torch.zeros_like(G) if g is None else g for g in (gradients.entropy, gradients.logit_variance))
        c0, c1, c2 = c0 - gV * result.logit_variance, 2 * gV - gH, gV
    return Coefficients(G.masked_fill(dead, torch.inf), (G - result.entropy).masked_fill(dead, 0.0), c0, c1, c2)


def forward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None = None,
) -> Statistics:
    """Statistics of every row."""
    b, h, m, _ = query.shape
    pieces = list(_pieces(query, key, scoring))
    buffers = _Buffers(query, pieces)
    result = Statistics(query.new_empty(b, h, m, value.shape[-1]), *(query.new_empty(b, h, m) for _ in range(4)))
    for piece in pieces:
        q, k, v, local_sight = piece.rows(query), piece.keys(key), piece.keys(value), piece.restrict(sight)
        visible_keys = piece.visible(local_sight, scoring, query.device)
        rows = _rows(
            q,
            k,
            v,
            _cut(local_sight.bias, piece.block),
            visible_keys,
            scoring,
            piece.dropout_factors(dropout, query.dtype),
            buffers,
        )
        if len(pieces) == 1:  # decoding: avoid every call of torch that can be avoided
            return rows
        for tensor, part in zip(result, rows, strict=True):
            piece.rows(tensor).copy_(part)
    return result


def backward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    row: Coefficients,
    grad_output: Float[Tensor, "b h m v"],
    *,
    needs_bias: bool,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias."""
    grad_query, grad_key, grad_value = (torch.zeros_like(t) for t in (query, key, value))
    grad_bias = torch.zeros_like(sight.bias) if needs_bias and sight.bias is not None else None
    pieces = list(_pieces(query, key, scoring))
    buffers = _Buffers(query, pieces)
    for piece in pieces:
        q, k, v, local_sight = piece.rows(query), piece.keys(key), piece.keys(value), piece.restrict(sight)
        visible_keys, heads = piece.visible(local_sight, scoring, query.device), k.shape[1]
        if not piece.block.keys:
            continue
        s, slope = _logits(q, k, _cut(local_sight.bias, piece.block), visible_keys, scoring, buffers)
        # Not exp(s - G), since the rounding of a large G is larger than a weight can bear.
        curved = row.c1 is not None and row.c2 is not None
        _, p, total = _masses(s, curved or sight.bias is not None or visible_keys is not None, buffers)
        p.div_(total)
        go, factors = piece.rows(grad_output), piece.dropout_factors(dropout, query.dtype)
        ds = (grouped(go, heads) @ v.mT).view(s.shape)
        if factors is not None:
            ds.mul_(factors)
        ds.add_(piece.rows(row.c0).unsqueeze(-1))
        if row.c1 is not None and row.c2 is not None:
            y = s.sub_((p * s).sum(-1, keepdim=True))
            ds.addcmul_(y, piece.rows(row.c1).unsqueeze(-1) + piece.rows(row.c2).unsqueeze(-1) * y)
        ds.mul_(p)
        if grad_bias is not None:
            slot = cut(piece.shared(grad_bias), piece.block)
            slot += ds.sum_to_size(slot.shape)
        if slope is not None:
            ds.mul_(slope)
        ds = grouped(ds, heads)
        piece.rows(grad_query).copy_((ds @ k).view(q.shape)).mul_(scoring.scale)
        piece.keys(grad_key).add_(ds.mT @ grouped(q, heads), alpha=scoring.scale)
        used = p if factors is None else p.mul_(factors)
        piece.keys(grad_value).add_(grouped(used, heads).mT @ grouped(go, heads))
    return grad_query, grad_key, grad_value, grad_bias


def extreme_keys(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    sight: Sight,
    scoring: Scoring,
    *,
    only_largest: bool = False,
) -> tuple[Int[Tensor, "b h m"], Int[Tensor, "b h m"], Int[Tensor, "b h m"]]:
    """Keys with the largest and the smallest logit, and the first key that a row sees; -1 in a row without keys."""
    max_key, min_key, first_key = (query.new_full(query.shape[:3], -1, dtype=torch.long) for _ in range(3))
    pieces = list(_pieces(query, key, scoring))
    buffers = _Buffers(query, pieces)
    for piece in pieces:
        q, k, local_sight = piece.rows(query), piece.keys(key), piece.restrict(sight)
        visible_keys = piece.visible(local_sight, scoring, query.device)
        s, _ = _logits(q, k, _cut(local_sight.bias, piece.block), visible_keys, scoring, buffers)
        if not s.shape[-1]:
            continue
        top, at_top = s.max(-1)
        empty, numbers = top == -torch.inf, [at_top]
        if not only_largest:
            hidden = s == -torch.inf
            numbers += [s.masked_fill(hidden, torch.inf).argmin(-1), (~hidden).byte().argmax(-1)]
        for tensor, at in zip((max_key, min_key, first_key), numbers, strict=False):
            piece.rows(tensor).copy_((at + piece.block.first_key).masked_fill(empty, -1))
    return max_key, min_key, first_key


def add_gradient_of_highest(
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    scoring: Scoring,
    max_key: Int[Tensor, "b h m"],
    gradient: Float[Tensor, "b h m"],
) -> None:
    """Add the gradient of max_logit, which goes to one key that attains it, to the gradients of the operands."""
    grad_query, grad_key, _, grad_bias = grads
    (b, h, m, _), hk = query.shape, key.shape[1]
    wide_query, wide_key = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (query, key))
    gradient = gradient.masked_fill(max_key < 0, 0.0)  # rows without keys
    index = max_key.clamp(min=0)
    batch, head, row = (
        torch.arange(size, device=query.device).view(-1, *[1] * i) for size, i in ((b, 2), (h, 1), (m, 0))
    )
    place = (batch, head // (h // hk), index)
    highest = wide_key[place]
    if grad_bias is not None:
        shared = tuple(t * 0 if size == 1 else t for t, size in zip((batch, head, row), grad_bias.shape, strict=False))
        grad_bias.index_put_((*shared, index), gradient.to(grad_bias.dtype), accumulate=True)
    if scoring.softcap is not None:
        u = (wide_query * highest).sum(-1) * scoring.scale
        gradient = gradient * (1 - (u / scoring.softcap).tanh().square())
    pull = (gradient * scoring.scale).unsqueeze(-1)
    grad_query.add_((pull * highest).to(query.dtype))
    grad_key.index_put_(tuple(t.expand_as(index) for t in place), (pull * wide_query).to(key.dtype), accumulate=True)


# Pieces: batches, heads and rows whose logits fit the cache. ---------------------------------------------------------


class _Piece(NamedTuple):
    """A part of the batches, of the heads and of the rows, with the keys in their band."""

    batches: slice
    key_heads: slice
    heads: slice
    block: Block
    size: tuple[int, int, int, int]  # b, h, m, n of all pieces together

    @property
    def logits(self) -> int:
        """Number of logits."""
        batches, heads = (
            len(range(*s.indices(size))) for s, size in zip((self.batches, self.heads), self.size[:2], strict=True)
        )
        return batches * heads * self.block.rows * self.block.keys

    def rows(self, tensor: Tensor) -> Tensor:
        """Part of a tensor [b, h, m, ...]."""
        return tensor[self.batches, self.heads, self.block.first_row : self.block.last_row]

    def keys(self, tensor: Tensor) -> Tensor:
        """Part of a tensor [b, hk, n, ...]."""
        return tensor[self.batches, self.key_heads, self.block.first_key : self.block.last_key]

    def shared(self, tensor: Tensor) -> Tensor:
        """Part of a tensor [#b, #h, ...], with all rows."""
        return tensor[
            slice(None) if tensor.shape[0] == 1 else self.batches, slice(None) if tensor.shape[1] == 1 else self.heads
        ]

    def restrict(self, sight: Sight) -> Sight:
        """Bias, mask and segments of these batches and heads."""
        segments = sight.segments
        return Sight(
            None if sight.bias is None else self.shared(sight.bias),
            None if sight.mask is None else self.shared(sight.mask),
            segments if segments is None or segments.shape[0] == 1 else segments[self.batches],
        )

    def visible(self, local_sight: Sight, scoring: Scoring, device: torch.device) -> Tensor | None:
        """Mask of the keys that each query may see; None if all are visible."""
        return visible(local_sight, scoring, self.block, *self.size[2:], device)

    def dropout_factors(self, dropout: Dropout | None, dtype: torch.dtype) -> Tensor | None:
        """Factors of dropout on the weights of this piece."""
        if dropout is None:
            return None
        return dropout.factors(self.size, self.block, dtype, batches=self.batches, heads=self.heads)


def _pieces(query: Tensor, key: Tensor, scoring: Scoring) -> Iterator[_Piece]:
    (b, h, m, _), (_, hk, n, _) = query.shape, key.shape
    if query.shape[:3].numel() == 0:
        return
    group, budget = h // hk, logits_at_once(query.device)
    rows = max(1, min(m, max(ROWS // group, budget // (n * group))))
    heads = min(hk, max(1, budget // (rows * n * group)))
    batches = min(b, max(1, budget // (rows * n * group * hk)))
    for first_batch in range(0, b, batches):
        for first_head in range(0, hk, heads):
            last_head = min(hk, first_head + heads)
            for block in blocks(m, n, scoring, rows):
                yield _Piece(
                    slice(first_batch, first_batch + batches),
                    slice(first_head, last_head),
                    slice(first_head * group, last_head * group),
                    block,
                    (b, h, m, n),
                )


def _cut(bias: Tensor | None, block: Block) -> Tensor | None:
    return None if bias is None else cut(bias, block)


class _Buffers:
    """Two buffers shared by all pieces: allocating memory for each would cost more than the computation."""

    def __init__(self, like: Tensor, pieces: list[_Piece]) -> None:
        size = max((piece.logits for piece in pieces), default=0)
        self.logits, self.weights = like.new_empty(size), like.new_empty(size)

    def product(self, left: Tensor, right: Tensor, factor: float) -> Tensor:
        """Products factor <left, right> of rows [b, hk, m, d] and [b, hk, n, d], in the buffer of the logits."""
        left, right = left.flatten(0, 1) * factor, right.flatten(0, 1)
        out = self.logits[: left.shape[0] * left.shape[1] * right.shape[1]].view(*left.shape[:2], right.shape[1])
        return torch.bmm(left, right.mT, out=out)

    def exp(self, s: Tensor) -> Tensor:
        """Compute exp(s) in the buffer of the weights."""
        return torch.exp(s, out=self.weights[: s.numel()].view(s.shape))


def _logits(
    q: Tensor, k: Tensor, bias: Tensor | None, visible_keys: Tensor | None, scoring: Scoring, buffers: _Buffers
) -> tuple[Tensor, Tensor | None]:
    """Logits of a piece in their buffer, and the slope of the soft cap, if there is one."""
    s = buffers.product(grouped(q, k.shape[1]), k, scoring.scale).view(*q.shape[:-1], k.shape[-2])
    slope = None
    if scoring.softcap is not None:
        s.div_(scoring.softcap).tanh_()
        slope = 1 - s * s
        s.mul_(scoring.softcap)
    if bias is not None:
        s.add_(bias)
    if visible_keys is not None:
        s.masked_fill_(~visible_keys, -torch.inf)
    return s, slope


def _masses(s: Tensor, hidden_keys: bool, buffers: _Buffers) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit t, masses exp(s - t) and their sum; s becomes s - t, finite in spite of `hidden_keys`."""
    top = s.amax(-1, keepdim=True)
    dead = top == -torch.inf
    s.sub_(top.masked_fill(dead, 0.0))
    if hidden_keys:
        s.clamp_(min=FAR_BELOW)
    masses = buffers.exp(s)
    return top, masses, masses.sum(-1, keepdim=True).masked_fill_(dead, 1.0)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    visible_keys: Tensor | None,
    scoring: Scoring,
    factors: Tensor | None,
    buffers: _Buffers,
) -> Statistics:
    """Statistics of a piece, in as few passes over its logits as torch allows.

    Moments are taken about the largest logit: the mean lies at most log n below it, so that few digits cancel.
    """
    s, _ = _logits(q, k, bias, visible_keys, scoring, buffers)
    if s.shape[-1] == 0:
        return statistics(s, v)
    top, p, total = _masses(s, bias is not None or visible_keys is not None, buffers)
    used = p if factors is None else p * factors
    output = (grouped(used, k.shape[1]) @ v).view(*q.shape[:-1], v.shape[-1]).div_(total)
    mean_below = p.mul_(s).sum(-1, keepdim=True).div_(total)
    square_below = p.mul_(s).sum(-1, keepdim=True).div_(total)
    log_total, variance = total.log(), (square_below - mean_below.square()).clamp_(min=0.0)
    return Statistics(output, *(t.squeeze(-1) for t in (top + log_total, log_total - mean_below, variance, top)))
