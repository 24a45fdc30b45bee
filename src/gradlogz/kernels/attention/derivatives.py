"""Derivatives of attention that torch computes from the definition: forward mode and second order.

    tangents          dG = sum_n p_n ds_n,   dH = -sum_n p_n y_n ds_n,   dV = sum_n p_n (y_n^2 - V + 2 y_n) ds_n
    second            the pullback of the pullback of the definition
    second_tangents   the tangents of the pullback of the definition

First derivatives in reverse mode have kernels, for speed; these are exact to any order in linear memory. They process
blocks of queries and write nothing in place, since a torch.func transform may act on the inputs.

Read next: operator.py, which combines them with the kernels in one operation.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ..._typing import Float, Tensor
from .blocked import logits_at_once
from .dropout import Dropout
from .reference import Gradients, Statistics, statistics, weights
from .scoring import Block, Scoring, Sight, blocks, cut, grouped, logits, visible

Operands = tuple[Tensor, ...]  # the differentiable tensors: query, key, value and, if there is one, bias


def definition(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    bias: Float[Tensor, "#b #h #m n"] | None,
    visible_keys: Tensor | None,
    scoring: Scoring,
    factors: Tensor | None = None,
) -> Statistics:
    """Statistics by definition, in float32 or float64: differentiable to any order, quadratic memory."""
    wide = torch.promote_types(query.dtype, torch.float32)
    s = logits(query.to(wide), key.to(wide), None if bias is None else bias.to(wide), visible_keys, scoring)
    result = statistics(s, value.to(wide), factors)
    return result._replace(output=result.output.to(query.dtype))


def by_definition(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
) -> Statistics:
    """Statistics of all rows as one block, in plain torch: quadratic memory."""
    m, n = query.shape[2], key.shape[2]
    step = _Step.of((query, key), sight, scoring, dropout, Block(0, m, 0, n))
    return definition(query, key, value, sight.bias, step.visible_keys, scoring, step.factors)


def tangents(
    operands: Operands, operand_tangents: Operands, sight: Sight, scoring: Scoring, dropout: Dropout | None
) -> Statistics:
    """Tangents of the statistics for tangents of the operands (forward mode)."""
    parts = []
    for step in _steps(operands, sight, scoring, dropout):
        primals, block_tangents = step.cut(operands), step.cut(operand_tangents)
        parts.append(step.tangents(primals, block_tangents))
    return Statistics(*(torch.cat(rows, 2) for rows in zip(*parts, strict=True)))


def second(
    operands: Operands,
    gradients: Gradients,
    cotangents: Operands,
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
) -> tuple[Operands, Gradients]:
    """Pull cotangents of the gradients back to the operands and to the gradients of the rows (double backward)."""
    grads, rows = [], []
    for step in _steps(operands, sight, scoring, dropout):
        primals = step.cut(operands)
        _, pull = _vjp(step.pullback, *primals, *step.rows(gradients))
        pulled = pull(step.cut(cotangents))
        grads.append((step, pulled[: len(primals)]))
        rows.append(pulled[len(primals) :])
    return _joined(grads, operands), Gradients(*(torch.cat(parts, 2) for parts in zip(*rows, strict=True)))


def second_tangents(
    operands: Operands,
    gradients: Gradients,
    operand_tangents: Operands,
    gradient_tangents: Gradients,
    sight: Sight,
    scoring: Scoring,
    dropout: Dropout | None,
) -> Operands:
    """Tangents of the gradients of the operands (forward over reverse)."""
    parts = []
    for step in _steps(operands, sight, scoring, dropout):
        at, toward = (
            (*step.cut(ops), *step.rows(grads))
            for ops, grads in ((operands, gradients), (operand_tangents, gradient_tangents))
        )
        parts.append((step, _transposed_twice(step.pullback, at, toward)))
    return _joined(parts, operands)


class _Step(NamedTuple):
    """The definition restricted to one block of rows."""

    block: Block
    visible_keys: Tensor | None
    factors: Tensor | None
    scoring: Scoring

    @classmethod
    def of(cls, operands: Operands, sight: Sight, scoring: Scoring, dropout: Dropout | None, block: Block) -> "_Step":
        query, key = operands[:2]
        (b, h, m, _), n = query.shape, key.shape[2]
        wide = torch.promote_types(query.dtype, torch.float32)
        factors = None if dropout is None else dropout.factors((b, h, m, n), block, wide)
        return cls(block, visible(sight, scoring, block, m, n, query.device), factors, scoring)

    def cut(self, operands: Operands) -> Operands:
        query, key, value, *bias = operands
        keys = (t.narrow(2, self.block.first_key, self.block.keys) for t in (key, value))
        rows = query.narrow(2, self.block.first_row, self.block.rows)
        return rows, *keys, *(cut(t, self.block) for t in bias)

    def rows(self, gradients: Gradients) -> tuple[Tensor, ...]:
        return tuple(t.narrow(2, self.block.first_row, self.block.rows) for t in gradients if t is not None)

    def statistics(self, query: Tensor, key: Tensor, value: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            definition(query, key, value, bias[0] if bias else None, self.visible_keys, self.scoring, self.factors)
        )

    def tangents(self, operands: Operands, tangents: Operands) -> tuple[Tensor, ...]:
        """Sums sum_n p_n f_n ds_n with f = 1 for G, -y for H and y^2 - V + 2 y for V."""
        dtype, wide = operands[0].dtype, torch.promote_types(operands[0].dtype, torch.float32)
        q, k, v, *bias = (t.to(wide) for t in operands)
        dq, dk, dv, *dbias = (t.to(wide) for t in tangents)
        s = logits(q, k, bias[0] if bias else None, self.visible_keys, self.scoring)
        hidden, heads = s == -torch.inf, k.shape[1]
        u = (grouped(dq, heads) @ k.mT + grouped(q, heads) @ dk.mT).view(s.shape) * self.scoring.scale
        if self.scoring.softcap is not None:
            product = logits(q, k, None, None, self.scoring._replace(softcap=None))
            u = u * (1 - (product / self.scoring.softcap).tanh().square())
        ds = (u + dbias[0] if dbias else u).masked_fill(hidden, 0.0)
        p, y = weights(s)
        dG, V = (p * ds).sum(-1), (p * y.square()).sum(-1)
        used, change = p, p * (ds - dG.unsqueeze(-1))
        if self.factors is not None:
            used, change = used * self.factors, change * self.factors
        output = (grouped(change, heads) @ v + grouped(used, heads) @ dv).view(*s.shape[:-1], v.shape[-1])
        dV = (p * (y.square() - V.unsqueeze(-1) + 2 * y) * ds).sum(-1)
        top = ds.gather(-1, s.argmax(-1, keepdim=True)).squeeze(-1) if s.shape[-1] else dG
        return output.to(dtype), dG, -(p * y * ds).sum(-1), dV, top

    def pullback(self, *operands_and_gradients: Tensor) -> Operands:
        """Gradients of the operands as a function of operands and cotangents."""
        operands, gradients = operands_and_gradients[:-5], operands_and_gradients[-5:]
        _, pull = _vjp(self.statistics, *operands)
        return pull(gradients)


def _steps(operands: Operands, sight: Sight, scoring: Scoring, dropout: Dropout | None) -> Iterator[_Step]:
    query, key = operands[:2]
    (b, h, m, _), n = query.shape, key.shape[2]
    for block in blocks(m, n, scoring, max(1, logits_at_once(query.device) // max(1, b * h * n))):
        yield _Step.of(operands, sight, scoring, dropout, block)


def _joined(parts: list[tuple[_Step, Operands]], operands: Operands) -> Operands:
    """Gradients of the operands from those of the blocks: queries concatenated, shared keys summed."""
    n = operands[1].shape[2]
    query = torch.cat([grads[0] for _, grads in parts], 2)
    shared = []
    for i in (1, 2):
        padded = [pad(grads[i], (0, 0, step.block.first_key, n - step.block.last_key)) for step, grads in parts]
        shared.append(torch.stack(padded).sum(0) if len(padded) > 1 else padded[0])
    for i in range(3, len(operands)):
        padded = [pad(grads[i], (step.block.first_key, n - step.block.last_key)) for step, grads in parts]
        shared.append(torch.stack(padded).sum(0) if operands[i].shape[2] == 1 else torch.cat(padded, 2))
    return query, *shared


def _vjp(function: Callable[..., Any], *at: Tensor) -> tuple[Any, Callable[..., Any]]:
    return torch.func.vjp(function, *at)  # type: ignore[return-value]  # three values only with has_aux


def _transposed_twice(
    function: Callable[..., tuple[Tensor, ...]], at: Operands, toward: Operands
) -> tuple[Tensor, ...]:
    """Directional derivative by two reverse passes: forward mode cannot be nested in the jvp of a Function."""
    values, pull = _vjp(function, *at)
    _, push = _vjp(lambda *cotangents: pull(cotangents), *(torch.zeros_like(t) for t in values))
    return push(tuple(toward))
