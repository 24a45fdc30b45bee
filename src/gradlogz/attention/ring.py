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

Read next: ring_parts.py (keys that a query sees), result.py (joining blocks), ../_process_ring.py (sending).
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, SupportsIndex

import torch
from torch import distributed
from torch.nn.functional import pad
from torch.overrides import handle_torch_function, has_torch_function

from .._errors import InputNotImplementedError, InputRuntimeError, InputTypeError, InputValueError, shape_of
from .._process_ring import Exchange, FirstError, agree, announced_errors, ranks_of_blocks
from .._typing import Bool, Float, Int, Tensor
from . import masks
from .functional import attend, with_sinks
from .result import Attention
from .ring_parts import Layout, Pair, Placement, each_field, empty_rows, rows_of

# Variances and the means about which they are taken.
MEAN_OF = {"logit_variance": "mean_logit", "key_variance": "key_mean", "value_variance": "output"}


def ring_attend(
    query: Float[Tensor, "*b m d"],
    key: Float[Tensor, "*b n d"],
    value: Float[Tensor, "*b n v"],
    *,
    group: "distributed.ProcessGroup | None" = None,
    placement: Placement = "contiguous",
    attn_mask: Bool[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Float[Tensor, "..."] | None = None,
    softcap: float | None = None,
    window: tuple[SupportsIndex | None, SupportsIndex | None] | None = None,
    segments: Int[Tensor, "..."] | None = None,
    statistics: Literal["none", "scalar", "moments"] = "scalar",
) -> Attention:
    """Attention of the local queries to the keys of all processes, with all statistics: `attend` on the whole sequence.

    Each process holds an equal part of the sequence and returns the rows of its queries. Memory is linear in the local
    part. Every process must make the same calls, forward and backward. First derivatives only. Blocks of keys that no
    local query sees are not computed, and keys beyond every window are not sent. An error in one process is raised in
    all of them, with its rank.

    Args:
        group: the processes that share the sequence; all of them by default.
        placement: "contiguous": rank r holds the r-th part; with `is_causal` the first process then computes one block
            and the last one all. "zigzag": the sequence is cut into twice as many chunks as ranks, rank r holds chunk r
            and the r-th from the end (`ring_positions`), and the work is equal.
        attn_mask: bool mask of the local keys, [*b, 1, 1, n], True = attend.
        dropout_p: must be 0.
        scale: as in `attend`.
        enable_gqa: as in `attend`.
        sinks: as in `attend`. Its gradient is that of the local rows: add up those of the processes.
        softcap: as in `attend`.
        window: as in `attend`, in positions of the whole sequence.
        segments: integers of the local tokens, [*b, n]: the documents of the whole sequence, which ranks may divide.
        statistics: as in `attend`.

    Law: tests/laws/test_a_sequence_may_be_split_over_processes.py.
    """
    tensors = query, key, value
    if has_torch_function(tensors):  # an intercepted model must not take blocks of keys for calls of attend
        return handle_torch_function(
            ring_attend, tensors, *tensors, group=group, placement=placement, attn_mask=attn_mask, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, sinks=sinks, softcap=softcap, window=window,
            segments=segments, statistics=statistics,
        )  # fmt: skip
    with announced_errors("ring_attend", group):
        _check(query, key, value, placement, attn_mask, dropout_p, segments)
        band = masks.band(is_causal, window)
        _check_sizes(query, key, value, attn_mask, segments, band, placement, group)
        if (
            torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64
        ):  # backward runs without autocast
            query, key, value = (t.to(torch.get_autocast_dtype(query.device.type)) for t in tensors)
        layout = Layout(distributed.get_world_size(group), placement, query.shape[-2], key.shape[-2], band)
        options = {"scale": scale, "enable_gqa": enable_gqa, "softcap": softcap, "statistics": statistics}
        result = Attention(*_Ring.apply(query, key, value, attn_mask, segments, layout, options, group))
        if sinks is not None:
            result = _joined_with_sinks(result, sinks)
        return Attention(result.output.to(query.dtype), *result[1:])


def ring_positions(
    tokens: int, *, group: "distributed.ProcessGroup | None" = None, placement: Placement = "contiguous"
) -> Int[Tensor, " n"]:
    """Positions in the whole sequence of the tokens that this process holds, for example to cut its part.

    Args:
        tokens: number of tokens of the whole sequence.
        group: as in `ring_attend`.
        placement: as in `ring_attend`.
    """
    _check_placement("ring_positions", placement)
    _check_group("ring_positions")
    ranks = distributed.get_world_size(group)
    parts = ranks if placement == "contiguous" else 2 * ranks
    if tokens % parts:
        problem = f"tokens must be a multiple of {parts}, got {tokens}"
        raise InputValueError("ring_positions", "tokens", problem, "Pad the sequence.")
    layout = Layout(ranks, placement, tokens // ranks, tokens // ranks, (None, None))
    return layout.positions(distributed.get_rank(group))


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    placement: str,
    attn_mask: Tensor | None,
    dropout_p: float,
    segments: Tensor | None,
) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor) or t.ndim < 2:
            fact = f"{t.ndim} dimensions" if isinstance(t, Tensor) else type(t).__name__
            problem = f"{name} must be a tensor [*b, tokens, features], got {fact}"
            raise InputTypeError("ring_attend", name, problem, "Pass the part of this process.")
    _check_placement("ring_attend", placement)
    n = key.shape[-2]
    if dropout_p:
        problem = f"dropout_p must be 0, got {dropout_p}"
        remedy = "Apply torch.nn.functional.dropout to the output instead, or use attend in one process."
        raise InputNotImplementedError("ring_attend", "dropout_p", problem, remedy)
    if attn_mask is not None and not _is_mask_of_keys(attn_mask, n):
        fact = f"{attn_mask.dtype} {shape_of(attn_mask)}" if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        problem = f"attn_mask must be a bool mask of the local keys, [*b, 1, 1, n={n}], got {fact}"
        remedy = "Use is_causal, window and segments for masks of pairs, and attend in one process for a bias."
        raise InputNotImplementedError("ring_attend", "attn_mask", problem, remedy)
    if segments is not None and not (isinstance(segments, Tensor) and segments.ndim and segments.shape[-1] == n):
        fact = f"shape {shape_of(segments)}" if isinstance(segments, Tensor) else type(segments).__name__
        problem = f"segments must have one integer for each of the n={n} local keys, got {fact}"
        raise InputValueError("ring_attend", "segments", problem, "Pass the segments of the part of this process.")
    _check_group("ring_attend")


def _check_placement(call: str, placement: str) -> None:
    if placement not in ("contiguous", "zigzag"):
        problem = f'placement must be "contiguous" or "zigzag", got {placement!r}'
        raise InputValueError(call, "placement", problem, "Leave it out for contiguous parts.")


def _check_group(call: str) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        remedy = "Call torch.distributed.init_process_group first, or use attend for one process."
        raise InputRuntimeError(call, "group", "torch.distributed has no process group", remedy)


def _is_mask_of_keys(attn_mask: Any, n: int) -> bool:
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool or not attn_mask.ndim:
        return False
    return attn_mask.shape[-1] == n and (attn_mask.ndim == 1 or attn_mask.shape[-2] == 1)


def _check_sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    segments: Tensor | None,
    band: tuple[int | None, int | None],
    placement: str,
    group: Any,
) -> None:
    """Check that all processes have tensors of the same sizes, and that positions of queries and keys agree."""
    m, n = query.shape[-2], key.shape[-2]
    kinds = ", ".join(
        "none" if t is None else f"{t.dtype} {[*t.shape[:-2], t.shape[-1]] if index < 3 else [*t.shape[:-1]]}"
        for index, t in enumerate((query, key, value, attn_mask, segments))
    )
    call = "ring_attend"
    queries = agree(call, group, m, f"query, key, value, attn_mask, segments {kinds}; band {band}, {placement}")
    parts = list(zip(queries, agree(call, group, n), strict=True))
    positioned = segments is not None or band != (None, None)
    if any(part != parts[0] for part in parts) or (positioned and m != n):
        fact = ", ".join(f"{left} queries and {right} keys" for left, right in parts)
        condition = "all processes must hold equal parts, with is_causal, window or segments as many queries as keys"
        remedy = "Pad the sequence to a multiple of the number of processes; without these, gather and call attend."
        raise InputValueError("ring_attend", "key", f"{condition}, got {fact}", remedy)
    if placement == "zigzag" and n % 2:
        problem = f"key must have an even number of tokens with placement='zigzag', got {n}"
        remedy = "Pad the sequence to a multiple of twice the number of processes."
        raise InputValueError("ring_attend", "key", problem, remedy)


def _joined_with_sinks(result: Attention, sinks: Tensor) -> Attention:
    lead = result.log_normalizer.shape[:-2]
    flat = (None if t is None else t.reshape(math.prod(lead), *t.shape[len(lead) :]) for t in result)
    joined = with_sinks(Attention(*flat), sinks, lead)  # type: ignore[arg-type]
    return Attention(*(None if t is None else t.reshape(*lead, *t.shape[1:]) for t in joined))  # type: ignore[arg-type]


class KeyBlock(NamedTuple):
    """Keys of a rank with their values, mask and segments, and the pairs of local queries that see some of them."""

    rank: int
    pairs: list[Pair]
    key: Tensor
    value: Tensor
    mask: Tensor | None
    segments: Tensor | None


class _Ring(torch.autograd.Function):
    """Attention to the blocks of all processes; one value per field of `Attention`, in the precision of statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        layout: Layout,
        options: dict[str, Any],
        group: Any,
    ) -> tuple[Tensor | None, ...]:
        total: Attention
        largest: Tensor  # number of the pair with the largest logit of each row
        number, failure = 0, FirstError()
        for block in around(key, value, mask, segments, layout, group):
            with failure:
                for pair in block.pairs:
                    part = _attend(query, segments, pair, block, options)
                    if number == 0:
                        total = empty_rows(part, layout.m)
                        largest = torch.full_like(total.log_normalizer, -1, dtype=torch.int32)
                    before = rows_of(total, pair.rows)
                    if part.max_logit is not None and before.max_logit is not None:
                        largest[..., pair.rows].masked_fill_(part.max_logit > before.max_logit, number)
                    for t, joined in zip(before, before.joined(part), strict=True):
                        if t is not None:
                            t.copy_(joined)  # type: ignore[arg-type]
                    number += 1
        failure.raised()
        ctx.layout, ctx.options, ctx.group = layout, options, group
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, mask, segments, largest, *total)
        return tuple(total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, mask, segments, largest, *fields = ctx.saved_tensors
        total, gradient = Attention(*fields), Attention(*gradients)  # type: ignore[arg-type]
        wide = total.log_normalizer.dtype
        of_query, *of_block = (torch.zeros_like(t, dtype=wide) for t in (query, key, value))
        arriving: Exchange | None = None
        number, steps, failure = 0, ctx.layout.steps(), FirstError()
        with announced_errors("backward pass of ring_attend", ctx.group):
            for step, block in enumerate(around(key, value, mask, segments, ctx.layout, ctx.group)):
                terms: Any = None
                with failure, torch.enable_grad():
                    leaves = [t.detach().requires_grad_() for t in (query, block.key, block.value)]
                    share = total.log_normalizer.new_zeros(())
                    block = block._replace(key=leaves[1], value=leaves[2])
                    for pair in block.pairs:
                        part = _attend(leaves[0], segments, pair, block, ctx.options)
                        here = rows_of(total, pair.rows), rows_of(gradient, pair.rows)
                        share = share + _share(part, *here, largest[..., pair.rows] == number)
                        number += 1
                    if block.pairs:
                        terms = torch.autograd.grad(share, leaves, materialize_grads=True)
                if arriving is not None:
                    of_block = arriving.received()
                if terms is not None:
                    of_query += terms[0]
                    of_block = [a + b for a, b in zip(of_block, terms[1:], strict=True)]
                # Gradients follow their block, and return to its owner after the last step.
                arriving = Exchange(of_block, ctx.group, distance=1 if step + 1 < steps else 1 - steps)
            of_block = of_block if arriving is None else arriving.received()
            failure.raised()
        return (*(g.to(t.dtype) for g, t in zip((of_query, *of_block), (query, key, value), strict=True)), *[None] * 5)


def around(
    key: Tensor, value: Tensor, mask: Tensor | None, segments: Tensor | None, layout: Layout, group: Any
) -> Iterator[KeyBlock]:
    """Yield the block of each step, first the local one; it is sent on in the meantime."""
    mask = None if mask is None else mask.to(torch.uint8)  # not every backend sends bools
    travelling = [t for t in (key, value, mask, segments) if t is not None]
    ranks = ranks_of_blocks(group)[: layout.steps()]
    for step, rank in enumerate(ranks):
        exchange = Exchange(travelling, group) if step + 1 < len(ranks) else None
        each = iter(travelling)
        yield KeyBlock(
            rank, list(layout.pairs(ranks[0], rank)), next(each), next(each),
            None if mask is None else next(each).bool(), None if segments is None else next(each),
        )  # fmt: skip
        if exchange is not None:
            travelling = exchange.received()


def _attend(query: Tensor, segments: Tensor | None, pair: Pair, block: KeyBlock, options: dict[str, Any]) -> Attention:
    """Attention of the queries of a pair to its keys, with an output in the precision of the statistics."""
    q, k, v = query[..., pair.rows, :], block.key[..., pair.keys, :], block.value[..., pair.keys, :]
    mask = None if block.mask is None else block.mask[..., pair.keys]
    of_keys = None if block.segments is None else block.segments[..., pair.keys]
    left, right = pair.window
    reverse = False
    if segments is not None and of_keys is not None and not pair.same:
        # `attend` takes the last segments for those of the queries: hidden keys are appended for them. A limit on the
        # right, which excludes keys before these, is one on the left if all tokens are reversed.
        of_queries, reverse = segments[..., pair.rows], right is not None
        mask = torch.ones(k.shape[-2], dtype=torch.bool, device=k.device) if mask is None else mask
        if reverse:
            q, k, v = (t.flip(-2) for t in (q, k, v))
            mask, of_queries, of_keys = (t.flip(-1) for t in (mask, of_queries, of_keys))
            left, right = right, None
        added = q.shape[-2]
        k, v, mask = pad(k, (0, 0, 0, added)), pad(v, (0, 0, 0, added)), pad(mask, (0, added), value=False)
        of_keys, left = torch.cat((of_keys, of_queries), -1), None if left is None else left + added
    window = None if left is right is None else (left, right)
    result = attend(q, k, v, attn_mask=mask, segments=of_keys, window=window, **options)
    if reverse:
        result = each_field(result, lambda t, rows: t.flip(rows))
    return Attention(result.output.to(result.log_normalizer.dtype), *result[1:])


def _share(part: Attention, total: Attention, gradient: Attention, largest: Tensor) -> Float[Tensor, ""]:
    """Scalar whose derivative is that of the loss through this block; `largest` marks rows with their maximum in it."""
    G = total.log_normalizer
    weight = (part.log_normalizer - G.masked_fill(G == -torch.inf, 0.0)).exp()  # 0 in a row that sees no key
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
