"""Attention over a sequence that is split over processes (context parallelism).

    w_b    = exp(G_b - G)                               weight of block b of the keys            [theory 3.8]
    output = sum_b w_b o_b                              and so on: result.py joins the blocks
    dG     = sum_b dw_b
    dE     = sum_b d[w_b (E_b - E)]                     output and key_mean likewise
    dV     = sum_b d[w_b (V_b + (E_b - E)^2 - V)]       variances of keys and values likewise
    dH     = dG - dE

Blocks of keys and values pass around the ring of processes, once forward and once backward. On the right, G, E and V
are constants: the total result. The derivative is thus a sum over blocks, and no process keeps the blocks of others.
The gradient of a block travels with it, and every process adds its term.

Read next: result.py (joining blocks), functional.py (attend), ../_process_ring.py (sending).
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import distributed
from torch.overrides import handle_torch_function, has_torch_function

from .._errors import InputRuntimeError, InputTypeError, InputValueError
from .._process_ring import Exchange, ranks_of_blocks
from .._typing import Float, Tensor
from .functional import attend
from .result import Attention

# Variances and the means about which they are taken.
MEAN_OF = {"logit_variance": "mean_logit", "key_variance": "key_mean", "value_variance": "output"}


def ring_attend(
    query: Float[Tensor, "*b m d"],
    key: Float[Tensor, "*b n d"],
    value: Float[Tensor, "*b n v"],
    *,
    group: "distributed.ProcessGroup | None" = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    statistics: Literal["none", "scalar", "moments"] = "scalar",
) -> Attention:
    """Attention of the local queries to the keys of all processes, with all statistics: `attend` on the whole sequence.

    Each process holds an equal, contiguous part of the sequence, in the order of ranks, and returns the rows of its
    queries. Memory is linear in the local part. Every process must make the same calls, forward and backward. First
    derivatives only. With `is_causal` blocks of later ranks are skipped, so that the first process computes one block
    and the last one all of them.

    Args:
        group: the processes that share the sequence; all of them by default.
        scale: as in `attend`.
        enable_gqa: as in `attend`.
        statistics: as in `attend`.

    Law: tests/laws/test_a_sequence_may_be_split_over_processes.py.
    """
    tensors = query, key, value
    if has_torch_function(tensors):  # an intercepted model must not take blocks of keys for calls of attend
        return handle_torch_function(
            ring_attend, tensors, *tensors, group=group, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            statistics=statistics,
        )  # fmt: skip
    _check(query, key, value, is_causal, group)
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:  # backward runs without autocast
        query, key, value = (t.to(torch.get_autocast_dtype(query.device.type)) for t in tensors)
    options = {"scale": scale, "enable_gqa": enable_gqa, "statistics": statistics}
    return Attention(*_Ring.apply(query, key, value, is_causal, options, group))


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, group: Any) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor) or t.ndim < 2:
            fact = f"{t.ndim} dimensions" if isinstance(t, Tensor) else type(t).__name__
            problem = f"{name} must be a tensor [*b, tokens, features], got {fact}"
            raise InputTypeError("ring_attend", name, problem, "Pass the part of this process.")
    if not (distributed.is_available() and distributed.is_initialized()):
        remedy = "Call torch.distributed.init_process_group first, or use attend for one process."
        raise InputRuntimeError("ring_attend", "group", "torch.distributed has no process group", remedy)
    m, n = query.shape[-2], key.shape[-2]
    local = torch.tensor([m, n, math.prod(key.shape), math.prod(value.shape)], device=query.device)
    sizes = [torch.empty_like(local) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, local, group=group)
    parts = torch.stack(sizes).tolist()
    if any(part != parts[0] for part in parts) or (is_causal and m != n):
        fact = ", ".join(f"{queries} queries and {keys} keys" for queries, keys, *_ in parts)
        problem = f"all processes must hold equal parts, and as many queries as keys with is_causal, got {fact}"
        remedy = "Pad the sequence to a multiple of the number of processes; without is_causal, gather and call attend."
        raise InputValueError("ring_attend", "key", problem, remedy)


class _Ring(torch.autograd.Function):
    """Attention to the blocks of all processes; one value per field of `Attention`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, options: dict[str, Any], group: Any
    ) -> tuple[Tensor | None, ...]:
        total: Attention
        largest: Tensor  # number of the step with the largest logit of each row
        for step, blocks, visible in _around(key, value, is_causal, group):
            if not visible:
                continue
            part = _wide(attend(query, *blocks, is_causal=is_causal and step == 0, **options))
            if step == 0:
                total, largest = part, torch.zeros_like(part.log_normalizer, dtype=torch.int32)
                continue
            if part.max_logit is not None and total.max_logit is not None:
                largest = largest.masked_fill(part.max_logit > total.max_logit, step)
            total = total.joined(part)
        ctx.is_causal, ctx.options, ctx.group = is_causal, options, group
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, largest, *total)
        return total.output.to(query.dtype), *total[1:]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, largest, *fields = ctx.saved_tensors
        total, gradient = Attention(*fields), Attention(*gradients)  # type: ignore[arg-type]
        wide = total.log_normalizer.dtype
        of_query, *of_blocks = (torch.zeros_like(t, dtype=wide) for t in (query, key, value))
        returning: Exchange
        for step, blocks, visible in _around(key, value, ctx.is_causal, ctx.group):
            terms = None
            if visible:
                with torch.enable_grad():
                    leaves = [t.detach().requires_grad_() for t in (query, *blocks)]
                    part = _wide(attend(*leaves, is_causal=ctx.is_causal and step == 0, **ctx.options))
                    share = _share(part, total, gradient, largest == step)
                    terms = torch.autograd.grad(share, leaves, materialize_grads=True)
            if step > 0:
                of_blocks = returning.received()
            if terms is not None:
                of_query += terms[0]
                of_blocks = [a + b for a, b in zip(of_blocks, terms[1:], strict=True)]
            returning = Exchange(of_blocks, ctx.group)
        of_blocks = returning.received()
        return (*(g.to(t.dtype) for g, t in zip((of_query, *of_blocks), (query, key, value), strict=True)), *[None] * 3)


def _around(
    key: Tensor, value: Tensor, is_causal: bool, group: Any
) -> Iterator[tuple[int, tuple[Tensor, Tensor], bool]]:
    """Yield step, keys and values, and whether the local queries see them; they are sent on in the meantime."""
    ranks = ranks_of_blocks(group)
    for step, rank in enumerate(ranks):
        exchange = Exchange([key, value], group) if step + 1 < len(ranks) else None
        yield step, (key, value), not is_causal or rank <= ranks[0]
        if exchange is not None:
            key, value = exchange.received()


def _wide(part: Attention) -> Attention:
    """The result with an output in the precision of the statistics, in which blocks are joined."""
    return Attention(part.output.to(part.log_normalizer.dtype), *part[1:])


def _share(part: Attention, total: Attention, gradient: Attention, largest: Tensor) -> Float[Tensor, ""]:
    """Scalar whose derivative is that of the loss through this block; `largest` marks rows with their maximum in it."""
    weight = (part.log_normalizer - total.log_normalizer).exp()
    of_G, of_E = gradient.log_normalizer, gradient.mean_logit
    if gradient.entropy is not None:  # H = G - E
        of_G = gradient.entropy if of_G is None else of_G + gradient.entropy
        of_E = -gradient.entropy if of_E is None else of_E - gradient.entropy

    def deviation(name: str) -> Tensor:
        """The block's mean minus the total one; 0 where the block has no weight, since it may be infinite there."""
        difference = getattr(part, name) - getattr(total, name)
        return difference.masked_fill(weight.reshape(weight.shape + (1,) * (difference.ndim - weight.ndim)) == 0, 0.0)

    def per_row(t: Tensor) -> Tensor:
        return t if t.ndim == weight.ndim else t.sum(-1)

    terms = [] if of_G is None else [of_G]
    for name, g in (("output", gradient.output), ("mean_logit", of_E), ("key_mean", gradient.key_mean)):
        if g is not None:
            terms.append(per_row(g * deviation(name)))
    for name, mean in MEAN_OF.items():
        g = getattr(gradient, name)
        if g is not None:
            squared = deviation(mean).square()
            squared = squared.sum(-1) if squared.ndim > g.ndim else squared
            terms.append(per_row(g * (getattr(part, name) + squared - getattr(total, name))))
    share = (weight * sum(terms)).sum()
    if gradient.max_logit is not None and part.max_logit is not None:
        share = share + (gradient.max_logit * part.max_logit).masked_fill(~largest, 0.0).sum()
    return share
