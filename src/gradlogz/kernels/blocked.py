"""Attention block after block of queries, in plain torch: any dtype, any device, linear memory, every derivative.

    forward      the statistics of a block of rows, in place on one buffer of logits
    backward     ds = p (dp + c0 + y (c1 + c2 y)),  dp = <grad_output, v>,  y = s - E
                 c0 = gG - <grad_output, output> - gV V,   c1 = 2 gV - gH,   c2 = gV
    tangents     forward mode, as the transpose of the transpose of the definition
    second       the pullback of the pullback of the definition

The first two are the formulas, the last two are derived by torch from scoring.py and reference.py: first derivatives
are dear and worth a formula, higher ones must only be right and small.

Read next: attention.py, which joins the four to one differentiable operation.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from .._typing import Float, Int, Tensor
from .reference import Statistics, statistics
from .scoring import Block, Scoring, Sight, blocks, cut, grouped, logits, visible

# Logits held at once. On a CPU the buffer passes through the cache a few times; on a GPU it has to fill the machine.
LOGITS_ON_CPU = 1 << 19
LOGITS_ELSEWHERE = 1 << 26
# exp of this is 0 in float64 too, and its product with 0 is 0, where that of -inf is not a number.
FAR_BELOW = -1000.0
ROWS = 128


class Dropout(NamedTuple):
    """The probability of dropping a weight, and the seed [] of their fates.

    The fate of a weight is a hash of the seed and of its own place in [b, h, m, n]: every pass finds it again, however
    the pass is cut into blocks, and nothing is stored.
    """

    probability: float
    seed: Int[Tensor, ""]

    def factors(self, index: Int[Tensor, "*s"], dtype: torch.dtype) -> Float[Tensor, "*s"]:
        """0 for a dropped weight, 1 / (1 - probability) for a kept one."""
        x = index + self.seed
        for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # splitmix64's, signed
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
        x = (x >> 11) & ((1 << 53) - 1)
        kept = x >= int(self.probability * (1 << 53))
        return kept.to(dtype) / (1 - self.probability)


class Coefficients(NamedTuple):
    """What the gradient of a logit needs of its row; c1 and c2 are None where only output and log normaliser count.

    In a row without keys log_normalizer is +inf, so that p = 0 and its gradients vanish.
    """

    log_normalizer: Float[Tensor, "b h m"]
    mean_logit: Float[Tensor, "b h m"]
    c0: Float[Tensor, "b h m"]
    c1: Float[Tensor, "b h m"] | None
    c2: Float[Tensor, "b h m"] | None


class Gradients(NamedTuple):
    """The cotangents of Statistics; None is zero."""

    output: Float[Tensor, "b h m v"] | None
    log_normalizer: Float[Tensor, "b h m"] | None
    entropy: Float[Tensor, "b h m"] | None
    logit_variance: Float[Tensor, "b h m"] | None
    max_logit: Float[Tensor, "b h m"] | None


def coefficients(found: Statistics, gradients: Gradients) -> Coefficients:
    """c0, c1, c2 of every row from the statistics found and their cotangents."""
    G = found.log_normalizer
    dead = G == -torch.inf
    c0 = torch.zeros_like(G)
    if gradients.output is not None:
        c0 = c0 - (gradients.output.to(G.dtype) * found.output.to(G.dtype)).sum(-1)
    if gradients.log_normalizer is not None:
        c0 = c0 + gradients.log_normalizer.masked_fill(dead, 0.0)
    c1 = c2 = None
    if gradients.entropy is not None or gradients.logit_variance is not None:
        gH, gV = (torch.zeros_like(G) if g is None else g for g in (gradients.entropy, gradients.logit_variance))
        c0, c1, c2 = c0 - gV * found.logit_variance, 2 * gV - gH, gV
    return Coefficients(G.masked_fill(dead, torch.inf), (G - found.entropy).masked_fill(dead, 0.0), c0, c1, c2)


def forward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None = None,
) -> Statistics:
    """The statistics of every row."""
    b, h, m, _ = query.shape
    whole = Statistics(query.new_empty(b, h, m, value.shape[-1]), *(query.new_empty(b, h, m) for _ in range(4)))
    for at in _pieces(query, key, scoring):
        q, k, v, near = at.rows(query), at.keys(key), at.keys(value), at.near(sight)
        seen = visible(near, scoring, at.block, *at.size[2:], query.device)
        kept = None if dropout is None else at.kept(dropout, query.dtype)
        found = _rows(q, k, v, _cut(near.bias, at.block), seen, scoring, kept)
        for tensor, part in zip(whole, found, strict=True):
            at.rows(tensor).copy_(part)
    return whole


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
    for at in _pieces(query, key, scoring):
        q, k, v, near = at.rows(query), at.keys(key), at.keys(value), at.near(sight)
        seen, heads = visible(near, scoring, at.block, *at.size[2:], query.device), k.shape[1]
        s, slope = _logits(q, k, _cut(near.bias, at.block), seen, scoring)
        go, kept = at.rows(grad_output), None if dropout is None else at.kept(dropout, query.dtype)
        ds = (grouped(go, heads) @ v.mT).view(s.shape)
        if kept is not None:
            ds.mul_(kept)
        ds.add_(at.rows(row.c0).unsqueeze(-1))
        if row.c1 is not None and row.c2 is not None:
            y = (s - at.rows(row.mean_logit).unsqueeze(-1)).clamp_(min=FAR_BELOW)
            ds.addcmul_(y, at.rows(row.c1).unsqueeze(-1) + at.rows(row.c2).unsqueeze(-1) * y)
        p = s.sub_(at.rows(row.log_normalizer).unsqueeze(-1)).exp_()
        ds.mul_(p)
        if grad_bias is not None:
            slot = cut(at.shared(grad_bias), at.block)
            slot += ds.sum_to_size(slot.shape)
        if slope is not None:
            ds.mul_(slope)
        ds = grouped(ds, heads)
        at.rows(grad_query).copy_((ds @ k).view(q.shape)).mul_(scoring.scale)
        at.keys(grad_key).add_(ds.mT @ grouped(q, heads), alpha=scoring.scale)
        used = p if kept is None else p.mul_(kept)
        at.keys(grad_value).add_(grouped(used, heads).mT @ grouped(go, heads))
    return grad_query, grad_key, grad_value, grad_bias


def add_gradient_of_highest(
    whole: tuple[Tensor, Tensor, Tensor, Tensor | None],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    sight: Sight,
    scoring: Scoring,
    gradient: Float[Tensor, "b h m"],
) -> None:
    """Add the gradient of max_logit, all of which goes to one key with the highest logit, to those of the operands."""
    grad_query, grad_key, _, grad_bias = whole
    (b, h, m, _), (_, hk, _, _) = query.shape, key.shape
    index = query.new_full((b, h, m), -1, dtype=torch.long)
    for at in _pieces(query, key, scoring):
        near = at.near(sight)
        seen = visible(near, scoring, at.block, *at.size[2:], query.device)
        s, _ = _logits(at.rows(query), at.keys(key), _cut(near.bias, at.block), seen, scoring)
        if s.shape[-1]:
            top, at_top = s.max(-1)
            at.rows(index).copy_(torch.where(top == -torch.inf, -1, at_top + at.block.first_key))
    gradient = gradient.masked_fill(index < 0, 0.0)  # rows without keys
    index = index.clamp(min=0)
    batch, head, row = (
        torch.arange(size, device=query.device).view(-1, *[1] * i) for size, i in ((b, 2), (h, 1), (m, 0))
    )
    place = (batch, head // (h // hk), index)
    highest = key[place]
    if grad_bias is not None:
        shared = tuple(t * 0 if size == 1 else t for t, size in zip((batch, head, row), grad_bias.shape, strict=False))
        grad_bias.index_put_((*shared, index), gradient.to(grad_bias.dtype), accumulate=True)
    if scoring.softcap is not None:
        u = (query * highest).sum(-1) * scoring.scale
        gradient = gradient * (1 - (u / scoring.softcap).tanh().square())
    pull = (gradient * scoring.scale).unsqueeze(-1)
    grad_query.add_((pull * highest).to(query.dtype))
    grad_key.index_put_(tuple(t.expand_as(index) for t in place), (pull * query).to(key.dtype), accumulate=True)


def by_definition(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
) -> Statistics:
    """All rows as one block: quadratic memory, and torch sees every step."""
    m, n = query.shape[2], key.shape[2]
    step = _Step.of((query, key), sight, scoring, dropout, Block(0, m, 0, n))
    return definition(query, key, value, sight.bias, step.seen, scoring, step.kept)


# Pieces: so many batches, heads and rows that their logits stay in the cache. ----------------------------------------


class _Piece(NamedTuple):
    """Some batches, some key heads with their query heads, some rows with the keys in their band."""

    batches: slice
    key_heads: slice
    heads: slice
    block: Block
    size: tuple[int, int, int, int]  # b, h, m, n of the whole

    def rows(self, tensor: Tensor) -> Tensor:
        """Of a tensor [b, h, m, ...]."""
        return tensor[self.batches, self.heads, self.block.first_row : self.block.last_row]

    def keys(self, tensor: Tensor) -> Tensor:
        """Of a tensor [b, hk, n, ...]."""
        return tensor[self.batches, self.key_heads, self.block.first_key : self.block.last_key]

    def shared(self, tensor: Tensor) -> Tensor:
        """Of a tensor [#b, #h, ...], all its rows."""
        return tensor[
            slice(None) if tensor.shape[0] == 1 else self.batches, slice(None) if tensor.shape[1] == 1 else self.heads
        ]

    def near(self, sight: Sight) -> Sight:
        """The tensors beside queries and keys, for these batches and heads."""
        segments = sight.segments
        return Sight(
            None if sight.bias is None else self.shared(sight.bias),
            None if sight.mask is None else self.shared(sight.mask),
            segments if segments is None or segments.shape[0] == 1 else segments[self.batches],
        )

    def kept(self, dropout: Dropout, dtype: torch.dtype) -> Tensor:
        """The factors that dropout puts on the weights of this piece."""
        b, h, m, n = self.size
        index = torch.arange(b * h, device=dropout.seed.device).view(b, h, 1, 1)[self.batches, self.heads]
        row = torch.arange(self.block.first_row, self.block.last_row, device=index.device).unsqueeze(-1)
        key = torch.arange(self.block.first_key, self.block.last_key, device=index.device)
        return dropout.factors((index * m + row) * n + key, dtype)


def _pieces(query: Tensor, key: Tensor, scoring: Scoring) -> Iterator[_Piece]:
    (b, h, m, _), (_, hk, n, _) = query.shape, key.shape
    group, budget = h // hk, LOGITS_ON_CPU if query.device.type == "cpu" else LOGITS_ELSEWHERE
    # A product of fewer rows reads the keys too often; one of more heads gains nothing.
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


def _logits(
    q: Tensor, k: Tensor, bias: Tensor | None, seen: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """The logits of a piece in one buffer, and the slope of the soft cap where there is one."""
    s = (grouped(q * scoring.scale, k.shape[1]) @ k.mT).view(*q.shape[:-1], k.shape[-2])
    slope = None
    if scoring.softcap is not None:
        s.div_(scoring.softcap).tanh_()
        slope = 1 - s * s
        s.mul_(scoring.softcap)
    if bias is not None:
        s.add_(bias)
    if seen is not None:
        s.masked_fill_(~seen, -torch.inf)
    return s, slope


def _rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, scoring: Scoring, kept: Tensor | None
) -> Statistics:
    """The statistics of a piece, in place on its logits."""
    s, _ = _logits(q, k, bias, seen, scoring)
    if s.shape[-1] == 0:
        return statistics(s, v)
    top = s.amax(-1, keepdim=True)
    dead = top == -torch.inf
    s.sub_(top.masked_fill(dead, 0.0))
    if bias is not None or seen is not None:
        s.clamp_(min=FAR_BELOW)
    p = s.exp()
    total = p.sum(-1, keepdim=True).masked_fill_(dead, 1.0)
    mean_below = (p * s).sum(-1, keepdim=True).div_(total)
    log_total = total.log()
    variance = s.sub_(mean_below).square_().mul_(p).sum(-1, keepdim=True).div_(total)
    if kept is not None:
        p.mul_(kept)
    output = (grouped(p, k.shape[1]) @ v).view(*q.shape[:-1], v.shape[-1]).div_(total)
    return Statistics(output, *(t.squeeze(-1) for t in (top + log_total, log_total - mean_below, variance, top)))


# Derivatives of the definition, rows by rows and without writing in place: torch.func may be at work on the inputs. ---

Operands = tuple[Tensor, ...]  # query, key, value and, where there is one, bias: what can be differentiated


def definition(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    bias: Float[Tensor, "#b #h #m n"] | None,
    seen: Tensor | None,
    scoring: Scoring,
    kept: Tensor | None = None,
) -> Statistics:
    """The statistics by definition, in float32 or better: differentiable to any order, of quadratic memory."""
    wide = torch.promote_types(query.dtype, torch.float32)
    s = logits(query.to(wide), key.to(wide), None if bias is None else bias.to(wide), seen, scoring)
    found = statistics(s, value.to(wide), kept)
    return found._replace(output=found.output.to(query.dtype))


def tangents(
    operands: Operands, moves: Operands, sight: Sight, scoring: Scoring, dropout: Dropout | None
) -> Statistics:
    """Forward mode: how the statistics move where the operands move so."""
    parts = []
    for step in _steps(operands, sight, scoring, dropout):
        here, moved = step.cut(operands), step.cut(moves)
        parts.append(step.tangents(here, moved))
    return Statistics(*(torch.cat(rows, 2) for rows in zip(*parts, strict=True)))


def second(
    operands: Operands,
    gradients: Gradients,
    cotangents: Operands,
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
) -> tuple[Operands, Gradients]:
    """Double backward: the pullback, through the gradients of the operands, to the operands and the cotangents."""
    whole, rows = [], []
    for step in _steps(operands, sight, scoring, dropout):
        here = step.cut(operands)
        _, pull = _vjp(step.pullback, *here, *step.rows(gradients))
        found = pull(step.cut(cotangents))
        whole.append((step, found[: len(here)]))
        rows.append(found[len(here) :])
    return _joined(whole, operands), Gradients(*(torch.cat(parts, 2) for parts in zip(*rows, strict=True)))


def second_tangents(
    operands: Operands,
    gradients: Gradients,
    moves: Operands,
    moved_gradients: Gradients,
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
) -> Operands:
    """Forward over reverse: how the gradients of the operands move."""
    whole = []
    for step in _steps(operands, sight, scoring, dropout):
        at, toward = (
            (*step.cut(ops), *step.rows(grads)) for ops, grads in ((operands, gradients), (moves, moved_gradients))
        )
        whole.append((step, _transposed_twice(step.pullback, at, toward)))
    return _joined(whole, operands)


class _Step(NamedTuple):
    """One block of rows with the definition restricted to it."""

    block: Block
    seen: Tensor | None
    kept: Tensor | None
    scoring: Scoring

    @classmethod
    def of(cls, operands: Operands, sight: Sight, scoring: Scoring, dropout: Dropout | None, block: Block) -> "_Step":
        query, key = operands[:2]
        (b, h, m, _), n = query.shape, key.shape[2]
        piece = _Piece(slice(None), slice(None), slice(None), block, (b, h, m, n))
        kept = None if dropout is None else piece.kept(dropout, torch.promote_types(query.dtype, torch.float32))
        return cls(block, visible(sight, scoring, block, m, n, query.device), kept, scoring)

    def cut(self, operands: Operands) -> Operands:
        query, key, value, *bias = operands
        keys = (t.narrow(2, self.block.first_key, self.block.keys) for t in (key, value))
        rows = query.narrow(2, self.block.first_row, self.block.rows)
        return rows, *keys, *(cut(t, self.block) for t in bias)

    def rows(self, gradients: Gradients) -> tuple[Tensor, ...]:
        return tuple(t.narrow(2, self.block.first_row, self.block.rows) for t in gradients if t is not None)

    def statistics(self, query: Tensor, key: Tensor, value: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        return tuple(definition(query, key, value, bias[0] if bias else None, self.seen, self.scoring, self.kept))

    def tangents(self, operands: Operands, moves: Operands) -> tuple[Tensor, ...]:
        """sum_n p_n f_n ds_n with f = 1 for G, -y for H and y^2 - V + 2 y for V."""
        dtype, wide = operands[0].dtype, torch.promote_types(operands[0].dtype, torch.float32)
        q, k, v, *bias = (t.to(wide) for t in operands)
        dq, dk, dv, *dbias = (t.to(wide) for t in moves)
        _, G, H, V, _ = self.statistics(q, k, v, *bias)
        dead = (G == -torch.inf).unsqueeze(-1)
        s = logits(q, k, bias[0] if bias else None, self.seen, self.scoring)
        hidden, heads = s == -torch.inf, k.shape[1]
        u = (grouped(dq, heads) @ k.mT + grouped(q, heads) @ dk.mT).view(s.shape) * self.scoring.scale
        if self.scoring.softcap is not None:
            product = logits(q, k, None, None, self.scoring._replace(softcap=None))
            u = u * (1 - (product / self.scoring.softcap).tanh().square())
        ds = (u + dbias[0] if dbias else u).masked_fill(hidden, 0.0)
        p = (s - G.unsqueeze(-1).masked_fill(dead, 0.0)).exp()
        y = (s - (G - H).unsqueeze(-1).masked_fill(dead, 0.0)).masked_fill(hidden, 0.0)
        dG = (p * ds).sum(-1)
        used, change = p, p * (ds - dG.unsqueeze(-1))
        if self.kept is not None:
            used, change = used * self.kept, change * self.kept
        output = (grouped(change, heads) @ v + grouped(used, heads) @ dv).view(*s.shape[:-1], v.shape[-1])
        dV = (p * (y.square() - V.unsqueeze(-1) + 2 * y) * ds).sum(-1)
        top = ds.gather(-1, s.argmax(-1, keepdim=True)).squeeze(-1) if s.shape[-1] else dG
        return output.to(dtype), dG, -(p * y * ds).sum(-1), dV, top

    def pullback(self, *operands_and_gradients: Tensor) -> Operands:
        """The gradients of the operands, as a function of operands and cotangents."""
        operands, gradients = operands_and_gradients[:-5], operands_and_gradients[-5:]
        _, pull = _vjp(self.statistics, *operands)
        return pull(gradients)


def _steps(operands: Operands, sight: Sight, scoring: Scoring, dropout: Dropout | None) -> Iterator[_Step]:
    query, key = operands[:2]
    (b, h, m, _), n = query.shape, key.shape[2]
    budget = LOGITS_ON_CPU if query.device.type == "cpu" else LOGITS_ELSEWHERE
    for block in blocks(m, n, scoring, max(1, budget // max(1, b * h * n))):
        yield _Step.of(operands, sight, scoring, dropout, block)


def _joined(parts: list[tuple[_Step, Operands]], operands: Operands) -> Operands:
    """Gradients of the whole operands from those of the blocks: queries side by side, shared keys summed."""
    n = operands[1].shape[2]
    query = torch.cat([found[0] for _, found in parts], 2)
    shared = []
    for i in (1, 2):
        padded = [pad(found[i], (0, 0, step.block.first_key, n - step.block.last_key)) for step, found in parts]
        shared.append(torch.stack(padded).sum(0) if len(padded) > 1 else padded[0])
    for i in range(3, len(operands)):
        padded = [pad(found[i], (step.block.first_key, n - step.block.last_key)) for step, found in parts]
        shared.append(torch.stack(padded).sum(0) if operands[i].shape[2] == 1 else torch.cat(padded, 2))
    return query, *shared


def _vjp(function: Callable[..., Any], *at: Tensor) -> tuple[Any, Callable[..., Any]]:
    return torch.func.vjp(function, *at)  # type: ignore[return-value]  # of three values only with has_aux


def _transposed_twice(
    function: Callable[..., tuple[Tensor, ...]], at: Operands, toward: Operands
) -> tuple[Tensor, ...]:
    """The directional derivative by two reverse passes: forward mode cannot be nested in a Function's jvp."""
    found, pull = _vjp(function, *at)
    _, push = _vjp(lambda *cotangents: pull(cotangents), *(torch.zeros_like(t) for t in found))
    return push(tuple(toward))
