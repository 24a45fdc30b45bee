"""Losses that are functions of the rows of a matrix of logits: their sum over all rows, in bounded memory.

    s_ij = <q_i, k_j> + bias_ij                            logits
    L    = sum_i c f(s_i),     W_ij = dL / ds_ij           value and slope of a block of rows
    dq   = W k,   dk = W^T q,  dbias = W                   one product each; the slope is the only matrix

Up to DENSE logits all rows are one block, whose slope is kept for the backward pass. Above it blocks of rows are
evaluated one after the other, and their gradients are computed at once, since every row has the same cotangent c: three
products of matrices in all, as for a dense loss, in linear memory. Without a reduction, and for second derivatives,
the blocks are recomputed (rowwise.py). Inside torch.func transforms and under torch.compile the loss is ordinary torch
code.

Read next: softmax_losses.py (the functions), compiled_rows.py (on a CPU), tiled_rows.py (on a GPU),
pairwise_log_sum_exp.py (log-sum-exp by the kernels of attention).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..._autocast import autocast_disabled
from ..._typing import Float, Tensor
from ..attention.blocked import logits_at_once
from ..optional import kernel_module
from ..tracing import is_traced, under_transform
from .row_loss import Problem, RowLoss
from .rowwise import rowwise

# Number of logits up to which they are computed at once: 1 MiB of float32.
DENSE = 1 << 18
COMPILED = f"{__package__}.compiled_rows"
TILED = f"{__package__}.tiled_rows"


class _Sum(NamedTuple):
    """A sum of losses: the loss, its `Problem` for compiled code, its coefficient, factor of logits and precision.

    One argument of an autograd.Function, since torch examines each of them.
    """

    loss: RowLoss
    problem: Problem | None = None
    coefficient: float = 1.0
    factor: float = 1.0
    precision: torch.dtype | None = None


def is_special(*tensors: Tensor | None) -> bool:
    """True under torch.compile, inside torch.func transforms and in forward mode, where torch code is traced."""
    if torch.compiler.is_compiling() or under_transform() or forward_ad._current_level >= 0:
        return True
    return is_traced([t for t in tensors if t is not None])


def sum_of_rows(
    loss: RowLoss,
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | Float[Tensor, "m n"] | None,
    coefficient: float,
    *,
    factor: float = 1.0,
    precision: torch.dtype | None = None,
) -> Float[Tensor, ""]:
    """Sum over rows of coefficient times the loss of factor <q, k> + bias, with first and second derivatives."""
    if is_special(query, key, bias):
        return loss.value(logits(query * factor, key, bias, precision)).sum() * coefficient
    problem = _compiled_problem(loss, query, key, bias, precision)
    function: Any = _SumOfRows if problem is None else _CompiledSum
    return function.apply(query, key, bias, _Sum(loss, problem, coefficient, factor, precision))


def compiled_sum(
    loss: RowLoss,
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | Float[Tensor, "m n"] | None,
    coefficient: float,
    *,
    factor: float = 1.0,
    precision: torch.dtype | None = None,
) -> Float[Tensor, ""] | None:
    """`sum_of_rows` by compiled_rows.py or tiled_rows.py, in bounded memory; None if they do not serve the operands."""
    problem = None if is_special(query, key, bias) else _compiled_problem(loss, query, key, bias, precision)
    if problem is None:
        return None
    return _CompiledSum.apply(query, key, bias, _Sum(loss, problem, coefficient, factor, precision))


def is_compiled(loss: RowLoss, query: Tensor, key: Tensor, bias: Tensor | None, precision: torch.dtype | None) -> bool:
    """True if `compiled_sum` serves these operands."""
    return not is_special(query, key, bias) and _compiled_problem(loss, query, key, bias, precision) is not None


def _compiled_problem(
    loss: RowLoss, query: Tensor, key: Tensor, bias: Tensor | None, precision: torch.dtype | None
) -> Problem | None:
    """The loss as compiled code takes it; None if torch code computes it."""
    if not _may_be_compiled(query, key, bias, precision):
        return None
    problem = loss.problem()
    if problem is None or not query.is_cuda:
        return problem
    kernel: Any = kernel_module(TILED, "triton")
    return problem if kernel.serves(problem, bias is not None, query.device) else None


def _may_be_compiled(query: Tensor, key: Tensor, bias: Tensor | None, precision: torch.dtype | None) -> bool:
    if not query.dtype is key.dtype is torch.float32 or query.is_meta:
        return False
    if bias is not None and not (bias.ndim == 1 and bias.dtype is torch.float32):
        return False
    if query.is_cuda:
        return precision is torch.bfloat16 and _tiles_run_on(query.device)
    return (
        precision is None
        and query.device.type == "cpu"
        and not (query.is_neg() or key.is_neg() or query._is_zerotensor() or key._is_zerotensor())
        and kernel_module(COMPILED, "numba") is not None
    )


@cache
def _tiles_run_on(device: torch.device) -> bool:
    """True if a GPU multiplies bfloat16 by tiles, and Triton is installed."""
    return torch.cuda.get_device_capability(device)[0] >= 8 and kernel_module(TILED, "triton") is not None


def each_row(
    loss: RowLoss,
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | Float[Tensor, "m n"] | None,
    *,
    precision: torch.dtype | None = None,
) -> Float[Tensor, " m"]:
    """Loss of every row. Differentiable in query, key and bias, twice if needed."""
    if is_special(query, key, bias):
        return loss.value(logits(query, key, bias, precision))
    if query.shape[0] * key.shape[0] <= DENSE:
        return _DenseRows.apply(query, key, bias, _Sum(loss, precision=precision))
    return _blockwise(loss, query, key, bias, precision)


def logits(query: Tensor, key: Tensor, bias: Tensor | None, precision: torch.dtype | None = None) -> Tensor:
    """Logits of all pairs; operands are rounded to a half precision if there is one."""
    s = rounded(query, precision) @ rounded(key, precision).mT
    return s if bias is None else s + bias


def rounded(tensor: Tensor, precision: torch.dtype | None) -> Tensor:
    """The tensor with the digits of a half precision, in its own dtype."""
    return tensor if precision is None else tensor.to(precision).to(tensor.dtype)


def _blockwise(loss: RowLoss, query: Tensor, key: Tensor, bias: Tensor | None, precision: torch.dtype | None) -> Tensor:
    """Loss of every row by blocks, which are recomputed in the backward pass."""
    by_row = bias is not None and bias.ndim == 2

    def block(q: Tensor, at: Tensor, row_bias: Tensor | None, k: Tensor, key_bias: Tensor | None) -> Tensor:
        return loss.at(at).value(logits(q, k, row_bias if by_row else key_bias, precision))

    at = torch.arange(query.shape[0], device=query.device)
    rows, shared = (query, at, bias if by_row else None), (key, None if by_row else bias)
    return rowwise(block, rows, shared, width=key.shape[0])


def _centred(loss: RowLoss, key: Tensor) -> Tensor:
    """Keys minus their mean where that changes nothing but rounding errors."""
    return key - key.mean(0) if loss.shift_invariant else key


def _twice(ctx: Any, gradient: Tensor, per_row: bool) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again."""
    # Views, since operands may be functions of each other: the gradient of one has no path through another.
    query, key, bias = ctx.saved_tensors[:3]
    query, key, bias = query.view_as(query), key.view_as(key), None if bias is None else bias.view_as(bias)
    loss, _, coefficient, factor, precision = ctx.terms
    q = query * factor
    if loss.indivisible:
        losses = loss.value(logits(q, key, bias, precision))
    else:
        losses = _blockwise(loss, q, key, bias, precision)
    result = losses if per_row else losses.sum() * coefficient
    wanted = ctx.needs_input_grad[:3]
    inputs = [t for t, want in zip((query, key, bias), wanted, strict=True) if want]
    grads = iter(torch.autograd.grad(result, inputs, gradient, create_graph=True))
    return tuple(next(grads) if want else None for want in wanted)


class _SumOfRows(torch.autograd.Function):
    """The sum, with gradients from the forward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, terms: _Sum) -> Tensor:
        ctx.terms = terms
        loss, _, coefficient, factor, precision = terms
        q, k = rounded(query, precision), rounded(_centred(loss, key), precision)
        m, n = q.shape[0], k.shape[0]
        needed = any(ctx.needs_input_grad[:3])
        ctx.dense = m * n <= DENSE or loss.indivisible
        if ctx.dense:
            losses, slope = _evaluated(loss, q, k, bias, factor, needed)
            ctx.save_for_backward(query, key, bias, k, slope)
            return losses.sum() * coefficient
        total = q.new_zeros(())
        operands = (q, k, bias)
        wanted = ctx.needs_input_grad[:3]
        grads = [None if t is None or not w else torch.zeros_like(t) for t, w in zip(operands, wanted, strict=True)]
        size = max(1, logits_at_once(q.device) // n)
        for first in range(0, m, size):
            rows = slice(first, first + size)
            block_bias = bias[rows] if bias is not None and bias.ndim == 2 else bias
            losses, slope = _evaluated(loss.at(rows), q[rows], k, block_bias, factor, needed)
            total += losses.sum()
            if slope is None:
                continue
            if grads[0] is not None:
                torch.mm(slope, k, out=grads[0][rows])
            if grads[1] is not None:
                grads[1].addmm_(slope.mT, q[rows])
            if grads[2] is not None:
                grads[2][rows].copy_(slope) if grads[2].ndim == 2 else grads[2].add_(slope.sum(0))
        ctx.save_for_backward(query, key, bias, *grads)
        return total * coefficient

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_disabled(gradient):
            if torch.is_grad_enabled():
                return *_twice(ctx, gradient, per_row=False), None
            _, _, coefficient, factor, precision = ctx.terms
            scale = gradient * coefficient
            if ctx.dense:
                query, _, bias, k, slope = ctx.saved_tensors
                grads = _products(ctx.needs_input_grad, rounded(query, precision), k, bias, slope * scale, factor)
            else:
                inner = scale * factor
                scales = (inner, inner, scale)
                grads = tuple(None if t is None else t * c for t, c in zip(ctx.saved_tensors[3:], scales, strict=True))
            return *grads, None


class _CompiledSum(torch.autograd.Function):
    """The sum by compiled code, with gradients from the forward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, terms: _Sum) -> Tensor:
        ctx.terms = terms
        loss, problem, coefficient, factor, precision = terms
        wanted = ctx.needs_input_grad[:3]
        kernel: Any = kernel_module(COMPILED, "numba") if precision is None else kernel_module(TILED, "triton")
        arguments = query, key, bias, problem, coefficient, factor, wanted
        result = kernel.sum_and_gradients(*arguments, *(() if precision is None else (precision,)))
        if result is None:
            k = _centred(loss, key)
            losses, slope = _evaluated(loss, query, k, bias, factor, any(wanted))
            grads: Any = (None, None, None)
            if slope is not None:
                grads = _products(wanted, query, k, bias, slope.mul_(coefficient), factor)
            result = losses.sum() * coefficient, grads
        total, grads = result
        ctx.save_for_backward(query, key, bias, *grads)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            with autocast_disabled(gradient):
                return *_twice(ctx, gradient, per_row=False), None
        grads = ctx.saved_tensors[3:]
        if not gradient.is_cuda:
            return *[None if t is None else t * gradient for t in grads], None
        # One launch, which takes the host longer than the multiplication.
        scaled = iter(torch._foreach_mul([t for t in grads if t is not None], gradient))
        return *[None if t is None else next(scaled) for t in grads], None


class _DenseRows(torch.autograd.Function):
    """The loss of every row from one matrix of logits, whose slope is kept."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, bias: Tensor | None, terms: _Sum) -> Tensor:
        ctx.terms = terms
        q, k = rounded(query, terms.precision), rounded(_centred(terms.loss, key), terms.precision)
        losses, slope = _evaluated(terms.loss, q, k, bias, 1.0, any(ctx.needs_input_grad[:3]))
        ctx.save_for_backward(query, key, bias, k, slope)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_disabled(gradient):
            if torch.is_grad_enabled():
                return *_twice(ctx, gradient, per_row=True), None
            query, _, bias, k, slope = ctx.saved_tensors
            q = rounded(query, ctx.terms.precision)
            return *_products(ctx.needs_input_grad, q, k, bias, slope * gradient.unsqueeze(-1), 1.0), None


def _evaluated(
    loss: RowLoss, q: Tensor, k: Tensor, bias: Tensor | None, factor: float, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of a block of rows, and their slopes if they are needed."""
    s = torch.mm(q, k.mT)
    if factor != 1:
        s *= factor
    if bias is not None:
        s += bias
    return loss.value_and_slope(s) if slope else (loss.value(s), None)


def _products(
    wanted: Any, q: Tensor, k: Tensor, bias: Tensor | None, slope: Tensor, factor: float
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key and bias from the slope of the loss, which is overwritten."""
    bias_slope = None
    if wanted[2] and bias is not None:
        bias_slope = slope.clone() if bias.ndim == 2 else slope.sum(0)
    if factor != 1:
        slope *= factor
    return torch.mm(slope, k) if wanted[0] else None, torch.mm(slope.mT, q) if wanted[1] else None, bias_slope


def products(query: Float[Tensor, "m d"], key: Float[Tensor, "n d"]) -> Float[Tensor, "m n"]:
    """All dot products, whose gradients have full precision inside autocast too."""
    return query @ key.mT if is_special(query, key) else _Products.apply(query, key)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(query, key)
        return query @ key.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        query, key = ctx.saved_tensors
        with autocast_disabled(gradient):
            return gradient @ key, gradient.mT @ query
