# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Keys with the largest and the smallest logit of a row, and the first key that it sees, on a GPU.

One pass over the visible tiles, with the logits of gpu.py; where logits are equal, the first key.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..._typing import Float, Int, Tensor
from .gpu import (
    LOW,
    PRECISION,
    _by_rows,
    _clipped,
    _kind,
    _logit,
    _padded,
    _span,
    _strided,
    _with_spans,
    tiling,
)
from .launching import Kernel, aligned, current_stream, on_its_device
from .scoring import Scoring, Sight
from .segment_spans import SegmentSpans


@triton.jit
def _extreme_keys(
    query, key, max_key, min_key, first_key, sight, scoring, heads, m, n,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, BM)
    start = (tiles - 1 - tl.program_id(0) % tiles) * BM
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    row = start + tl.arange(0, BM)
    at = start + n - m
    span = _span(at, at + tl.minimum(BM, m - start) - 1, scoring.left, scoring.right, n, sight, batch, start // BM, BN)
    q = query.load([batch, head, start, 0]).reshape([BM, D])
    highest = tl.zeros([BM], tl.float32) + LOW
    lowest = tl.zeros([BM], tl.float32) - LOW
    max_at = tl.zeros([BM], tl.int32) - 1
    min_at = max_at
    first = tl.zeros([BM], tl.int32) + n
    for tile in tl.range(span[0], span[3]):
        column = tile * BN + tl.arange(0, BN)[None, :]
        k = key.load([batch, head // GROUP, tile * BN, 0]).reshape([BN, D])
        t = tl.dot(q, k.T, input_precision=PRECISION)
        s = _logit(t, row[:, None], column, batch, head, sight, scoring, m, n, True)[0]
        hidden = s <= LOW
        high = tl.max(s, 1)
        max_at = tl.where(high > highest, tile * BN + tl.argmax(s, 1), max_at)
        highest = tl.maximum(highest, high)
        s = tl.where(hidden, -LOW, s)
        low = tl.min(s, 1)
        min_at = tl.where(low < lowest, tile * BN + tl.argmin(s, 1), min_at)
        lowest = tl.minimum(lowest, low)
        first = tl.minimum(first, tl.min(tl.where(hidden, n, column), 1))
    place = (batch * heads + head).to(tl.int64) * m + row
    tl.store(max_key + place, max_at.to(tl.int64), row < m)
    tl.store(min_key + place, min_at.to(tl.int64), row < m)
    tl.store(first_key + place, tl.where(first == n, -1, first).to(tl.int64), row < m)


@on_its_device
def extreme_keys(
    query: Float[Tensor, "b h m d"], key: Float[Tensor, "b hk n d"], sight: Sight, scoring: Scoring
) -> tuple[Int[Tensor, "b h m"], Int[Tensor, "b h m"], Int[Tensor, "b h m"]]:
    """Numbers of the keys with the largest logit, with the smallest one, and of the first key, for every row."""
    query, key, strided = aligned(query), aligned(key), _strided(sight)
    kernel, programs, spans, numbers = _call(
        query.dtype, query.device, query.shape, key.shape, (query.stride(), key.stride()), scoring, _kind(strided)
    )
    numbers_of_keys = [torch.empty(query.shape[:3], dtype=torch.long, device=query.device) for _ in range(3)]
    stream = current_stream(query.device)
    kernel.launch(programs, stream, (query, key), numbers_of_keys, (_with_spans(strided, spans, stream), *numbers))
    return numbers_of_keys[0], numbers_of_keys[1], numbers_of_keys[2]


@lru_cache(maxsize=256)
def _call(
    dtype: torch.dtype,
    _device: torch.device,
    query_shape: torch.Size,
    key_shape: torch.Size,
    _layouts: tuple[tuple[int, ...], ...],
    scoring: Scoring,
    _masks: tuple[Any, ...],
) -> tuple[Kernel, int, SegmentSpans, tuple[Any, ...]]:
    """Kernel, number of programs, spans of segments and numbers of a call."""
    (b, h, m, d), (_, hk, n, _) = query_shape, key_shape
    rows, keys, warps, stages = tiling("float32" if dtype is torch.float32 else "masked", d)
    constants = h // hk, rows, keys, _padded(d), PRECISION
    kernel = Kernel(
        _extreme_keys, constants, {"num_warps": warps, "num_stages": stages}, (_by_rows(rows), _by_rows(keys))
    )
    spans = SegmentSpans((n - m, m, rows), (0, n, keys))
    return kernel, triton.cdiv(m, rows) * b * h, spans, (_clipped(scoring, m, n), h, m, n)
