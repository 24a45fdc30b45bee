"""A function of rows, evaluated by blocks in memory linear in their number.

    forward           f(rows, shared) of each block; only the arguments are saved
    backward          the pullback of f, recomputed for each block; gradients of shared arguments are summed
    double backward   the pullback of that pullback

It serves sums over all pairs for which there is no compiled kernel. Inside torch.func transforms, under torch.compile
and in forward mode the function is called once, on all rows.

Read next: pairwise_log_sum_exp.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from ..._autocast import autocast_disabled
from ..._typing import Tensor
from ..attention.blocked import logits_at_once
from ..tracing import is_traced, under_transform

Part = Tensor | None
Function = Callable[..., Tensor]  # f(*rows, *shared) -> one row of the result for each row


def rowwise(function: Function, rows: tuple[Part, ...], shared: tuple[Part, ...], *, width: int) -> Tensor:
    """Evaluate function(*rows, *shared) by blocks of rows, at most logits_at_once numbers if a row has `width`."""
    tensors = tuple(t for t in (*rows, *shared) if t is not None)
    if under_transform() or torch.compiler.is_compiling() or forward_ad._current_level >= 0 or is_traced(tensors):
        return function(*rows, *shared)
    size = max(1, logits_at_once(tensors[0].device) // max(1, width))
    plan = _RowBlocks(function, len(rows), size, next(t for t in rows if t is not None).shape[0])
    return _Rowwise.apply(plan, *rows, *shared)


class _RowBlocks:
    """The function, and the division of the rows into blocks."""

    def __init__(self, function: Function, rows: int, size: int, total: int) -> None:
        self.function, self.rows, self.size, self.total = function, rows, size, total

    def blocks(self) -> Iterator[slice]:
        """Rows of each block; without rows one empty block."""
        for first in range(0, max(1, self.total), self.size):
            yield slice(first, first + self.size)

    def cut(self, tensors: tuple[Part, ...], block: slice) -> tuple[Part, ...]:
        """Arguments of one block."""
        return *(None if t is None else t[block] for t in tensors[: self.rows]), *tensors[self.rows :]

    def gathered(self, total: list[Part] | None, grads: tuple[Part, ...], block: slice) -> list[Part]:
        """Add the gradients of a block to those of all arguments: rows are copied, shared arguments summed."""
        if total is None:
            total = [
                None
                if t is None
                else t.new_empty(self.total, *t.shape[1:])
                if index < self.rows
                else torch.zeros_like(t)
                for index, t in enumerate(grads)
            ]
        for index, (t, part) in enumerate(zip(total, grads, strict=True)):
            if t is not None and part is not None:
                t[block].copy_(part) if index < self.rows else t.add_(part)
        return total

    def pullback(self, block: slice, tensors: tuple[Part, ...], gradient: Tensor, wanted: tuple[bool, ...]) -> Any:
        """Leaf tensors equal to the arguments of a block, and their gradients as functions of the leaves."""
        leaves = tuple(
            t.detach().requires_grad_() if t is not None and t.is_floating_point() else t
            for t in self.cut(tensors, block)
        )
        inputs = [t for t, want in zip(leaves, wanted, strict=True) if want and t is not None]
        result = self.function(*leaves)
        gradients = iter(
            torch.autograd.grad(
                result, inputs, gradient, create_graph=gradient.requires_grad, allow_unused=True, materialize_grads=True
            )
        )
        return leaves, tuple(next(gradients) if want else None for want in wanted)


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _RowBlocks, *tensors: Part) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        return torch.cat([plan.function(*plan.cut(tensors, block)) for block in plan.blocks()])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Part, ...]:
        wanted = tuple(ctx.needs_input_grad[1:])
        with autocast_disabled(gradient):  # blocks are recomputed as in the forward pass
            return None, *_RowwiseBackward.apply(ctx.plan, wanted, gradient, *ctx.saved_tensors)


class _RowwiseBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: _RowBlocks, wanted: tuple[bool, ...], gradient: Tensor, *tensors: Part
    ) -> tuple[Part, ...]:
        ctx.plan, ctx.wanted = plan, wanted
        ctx.save_for_backward(gradient, *tensors)
        ctx.set_materialize_grads(False)
        total = None
        for block in plan.blocks():
            with torch.enable_grad():
                _, grads = plan.pullback(block, tensors, gradient[block].detach(), wanted)
            total = plan.gathered(total, grads, block)
        return tuple(total or ())

    @staticmethod
    def backward(ctx: Any, *cotangents: Part) -> tuple[Part, ...]:
        with autocast_disabled(ctx.saved_tensors[0]):
            return _RowwiseBackward.pulled_back(ctx, *cotangents)

    @staticmethod
    def pulled_back(ctx: Any, *cotangents: Part) -> tuple[Part, ...]:
        """Gradients of the gradients."""
        plan, (gradient, *tensors) = ctx.plan, ctx.saved_tensors
        total, rows = None, []
        for block in plan.blocks():
            toward = plan.cut(cotangents, block)
            with torch.enable_grad():
                block_gradient = gradient[block].detach().requires_grad_()
                leaves, grads = plan.pullback(block, tuple(tensors), block_gradient, ctx.wanted)
                pairs = [(f, c) for f, c in zip(grads, toward, strict=True) if f is not None and c is not None]
                free = [t for t in leaves if t is not None and t.requires_grad]
                pulled = torch.autograd.grad(
                    [f for f, _ in pairs],
                    [block_gradient, *free],
                    [c for _, c in pairs],
                    allow_unused=True,
                    materialize_grads=True,
                )
            rest = iter(pulled[1:])
            parts = tuple(next(rest) if t is not None and t.requires_grad else None for t in leaves)
            rows.append(pulled[0])
            total = plan.gathered(total, parts, block)
        return None, None, torch.cat(rows), *(total or ())
