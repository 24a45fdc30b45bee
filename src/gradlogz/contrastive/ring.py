"""Sums over the candidates of all processes, which pass around a ring: no process holds more than two blocks.

    total_i = log sum over blocks of exp part_i      log-sum-exp over the negatives, or over the positives
    total_i = sum over blocks of part_i              sums, such as those of sigmoids

    forward     each process adds the part of the block that it holds to the totals of its rows, and passes it on
    backward    the blocks pass once more; their gradients travel with them, and every process adds its term

The part of a block is torch code, computed again in the backward pass, so that memory is linear in the batch of one
process. First derivatives only. Batches may have different sizes. A process whose part raises an error passes the other
blocks on first, since the others wait for them.

Read next: distributed.py (all candidates on every process), losses/ (`ring=True`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import distributed

from .._autocast import autocast_disabled
from .._errors import InputValueError
from .._process_ring import Exchange, ranks_of_blocks
from .._typing import Float, Int, Tensor
from ..kernels.losses.pairwise_log_sum_exp import log_add, log_sum_exp
from ..kernels.losses.visible_pairs import VisiblePairs
from .distributed import check_group, padded, sizes_of_batches
from .likelihood import Likelihood


class CandidateBlock(NamedTuple):
    """Candidates of one process, with what belongs to them."""

    candidates: Float[Tensor, "n d"]
    log_weights: Float[Tensor, " n"] | None
    labels: Int[Tensor, " n"] | None
    is_local: bool


Part = Callable[..., tuple[Tensor, ...]]  # (block, *rows) -> one number for each row and total


def ring_totals(
    part: Part,
    log_domain: tuple[bool, ...],
    rows: tuple[Tensor, ...],
    candidates: Float[Tensor, "n d"],
    log_weights: Float[Tensor, " n"] | None,
    labels: Int[Tensor, " n"] | None,
    group: "distributed.ProcessGroup | None",
) -> tuple[Float[Tensor, " m"], ...]:
    """Totals of every row, differentiable; `log_domain` is True for those whose parts are logarithms."""
    sizes = sizes_of_batches(candidates, group)
    return _RingTotals.apply(part, log_domain, sizes, group, len(rows), *rows, candidates, log_weights, labels)


def ring_negatives(
    eta: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    log_weights: Float[Tensor, " n"] | None,
    ids: tuple[Int[Tensor, " m"], Int[Tensor, " n"]] | None,
    positive: Int[Tensor, " m"] | None,
    group: "distributed.ProcessGroup | None",
    *,
    itself: bool = True,
    precision: torch.dtype | None = None,
) -> Float[Tensor, " m"]:
    """Log-sum-exp over the negatives of every anchor on all processes.

    Args:
        ids: of the anchors and of the candidates of this process; candidates with the id of an anchor are no negatives.
        positive: candidate of this process for each anchor that is its positive; None if there is none.
        itself: False if candidate i of this process is no negative of anchor i either.
    """
    of_anchors, of_candidates = (None, None) if ids is None else ids

    def part(block: CandidateBlock, query: Tensor) -> tuple[Tensor]:
        labels = None if of_anchors is None or block.labels is None else (of_anchors, block.labels)
        visible = VisiblePairs(labels=labels, same=False)
        if block.is_local:
            visible = visible._replace(excluded=positive, itself=itself)
        return (log_sum_exp(query, block.candidates, block.log_weights, visible, precision=precision),)

    return ring_totals(part, (True,), (eta,), candidates, log_weights, of_candidates, group)[0]


def behind_on_ring(
    family: Likelihood, group: "distributed.ProcessGroup | None", *, itself: bool = True
) -> Float[Tensor, " m"]:
    """N - s_+ of every anchor, with N over the negatives of all processes; `family` is that of this process."""
    check_group(family.call, {"mask": family.mask, "bias": family.bias})
    ids: Any = family.ids  # a pair
    outside = family.positive is not None and family.positive.is_floating_point()
    positive = None if outside else family.index_of_positive()
    options: Any = {"itself": itself, "precision": family.precision}
    N = ring_negatives(family.eta, family.candidates, family.log_weights, ids, positive, group, **options)
    behind = N - (family.eta * family.chosen()).sum(-1)
    weight = family.weight_of_positive()
    return behind if weight is None else behind - weight


def check_ring(call: str, ring: bool, group: "distributed.ProcessGroup | None") -> None:
    """Check that a ring has processes."""
    if ring and group is None:
        problem, remedy = "ring=True needs a process group", "Pass group=torch.distributed.group.WORLD."
        raise InputValueError(call, "ring", problem, remedy)


class _RingTotals(torch.autograd.Function):
    """Totals of the rows of this process over the blocks of all."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, log_domain: tuple[bool, ...], sizes: list[int], group: Any, count: int, *tensors: Any
    ) -> tuple[Tensor, ...]:
        rows, operands = tensors[:count], tensors[count:]
        ctx.part, ctx.log_domain, ctx.sizes, ctx.group, ctx.count = part, log_domain, sizes, group, count
        totals: list[Tensor] = []
        failure = FirstError()
        moving = [None if t is None else padded(t, max(sizes)) for t in operands]
        for here in ranks_of_blocks(group):
            with failure:
                parts = part(_block(moving, sizes, here, group), *rows)
                add = zip(totals, parts, log_domain, strict=True) if totals else ()
                totals = [log_add(t, p) if is_log else t + p for t, p, is_log in add] or list(parts)
            moving = _passed_on(moving, group)
        failure.raise_if_any()
        ctx.save_for_backward(*tensors, *totals)
        return tuple(totals)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        sizes, group, count = ctx.sizes, ctx.group, ctx.count
        saved = ctx.saved_tensors
        tensors, totals = saved[: count + 3], saved[count + 3 :]
        moving = [None if t is None else padded(t, max(sizes)) for t in tensors[count:]]
        collected = [None if t is None else torch.zeros_like(t) for t in moving[:2]]
        row_gradients = [torch.zeros_like(t) for t in tensors[:count]]
        failure = FirstError()
        for here in ranks_of_blocks(group):
            with failure:
                block = _block([None if t is None else t.detach() for t in moving], sizes, here, group)
                slopes = _slopes(ctx.part, ctx.log_domain, block, tensors[:count], totals, gradients)
                sums = [*row_gradients, *(c[: sizes[here]] for c in collected if c is not None)]
                for total, slope in zip(sums, slopes, strict=True):
                    total += 0 if slope is None else slope
            *moving, dx, dw = _passed_on([*moving, *collected], group)
            collected = [dx, dw]
        failure.raise_if_any()
        local = tensors[count].shape[0]
        return *[None] * 5, *row_gradients, *(None if c is None else c[:local] for c in collected), None


def _slopes(
    part: Part,
    log_domain: tuple[bool, ...],
    block: CandidateBlock,
    rows: tuple[Tensor, ...],
    totals: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the rows, the candidates and the log weights, from the part of one block."""
    with torch.enable_grad(), autocast_disabled(gradients[0]):
        rows = tuple(t.detach().requires_grad_() for t in rows)
        x = block.candidates.detach().requires_grad_()
        w = None if block.log_weights is None else block.log_weights.detach().requires_grad_()
        parts = part(block._replace(candidates=x, log_weights=w), *rows)
        inputs = [*rows, x] if w is None else [*rows, x, w]
        weights = [
            g * (p.detach() - t.masked_fill(t == -torch.inf, 0.0)).exp() if is_log else g
            for g, p, t, is_log in zip(gradients, parts, totals, log_domain, strict=True)
        ]
        pulled = [(p, w) for p, w in zip(parts, weights, strict=True) if p.requires_grad]
        return torch.autograd.grad([p for p, _ in pulled], inputs, [w for _, w in pulled], allow_unused=True)


class FirstError(AbstractContextManager["FirstError"]):
    """Context for each step around a ring, which goes on after an error; the first one is raised at the end."""

    error: Exception | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True

    def raise_if_any(self) -> None:
        if self.error is not None:
            raise self.error


def _block(moving: list[Tensor | None], sizes: list[int], here: int, group: Any) -> CandidateBlock:
    candidates, log_weights, labels = (None if t is None else t[: sizes[here]] for t in moving)
    return CandidateBlock(candidates, log_weights, labels, here == distributed.get_rank(group))  # type: ignore[arg-type]


def _passed_on(tensors: list[Tensor | None], group: Any) -> list[Tensor | None]:
    """The tensors of the preceding process, in exchange for these."""
    received = iter(Exchange([t for t in tensors if t is not None], group).received())
    return [None if t is None else next(received) for t in tensors]
