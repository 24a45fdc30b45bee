# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention with its statistics on a GPU, by tiles: the logits of scoring.py stay on the chip.

    forward                                                     one program per tile of queries
        x_mn = s_mn - top_m                                     top_m: the largest logit so far
        z    = sum_n exp x_mn                                   mass
        a    = sum_n x_mn exp x_mn                              first moment below the top
        b    = sum_n x_mn^2 exp x_mn                            second moment below the top
        G = top + log z,  H = log z - a / z,  V = b / z - (a / z)^2
    when the top rises, every x falls by r:  b <- e^-r (b - 2 r a + r^2 z),  a <- e^-r (a - r z),  z <- e^-r z

    backward                                                    one program per tile of keys, one per tile of queries
        p  = exp x,  x = s - G                                  dp_mn = <go_m, v_n>
        ds = p (dp + c0 + y (c1 + c2 y))                        y = s - E = x + H: the term of the statistics
           = p (dp + k0 + x (k1 + k2 x))                        a polynomial in x, with coefficients k per row
        dv = p^T go,   dk = scale du^T q,   dq = scale du k     du = ds (1 - tanh^2), the slope of the softcap

Logits are in units of log 2, so that an exponential is one instruction and the scale is part of a multiplication that
is needed anyway. A hidden key has the finite logit LOW, far below the start of `top`: its mass is exactly 0 and its
moments are 0 * LOW = 0, without a test per element. Tiles inside the band need no mask; only tiles that cross its edge,
and the ragged last one, are masked. Tiles are loaded through tensor descriptors, which fill elements outside the tensor
with zeros: any head size, any number of rows. Sums have a fixed order, so that results are bitwise reproducible.

The moments cost three instructions per element. Taken about the top they lose few digits, since the mean lies at most
log n below it: the relative error of V is 2e-5 over 16384 keys.

Read next: scoring.py (the definition of a logit), reference.py (attention by definition).
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

from ..._typing import Float, Tensor
from .launching import (
    Kernel,
    RecordedLaunch,
    aligned,
    current_stream,
    dense,
    empty_output,
    empty_rows,
    on_its_device,
)
from .reference import Gradients, Statistics, StatisticsAndMean
from .scoring import Scoring, Sight
from .segment_spans import SegmentSpans

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
# The logit of a hidden key, and the start of the running maximum: every visible logit is larger than both.
LOW = tl.constexpr(-1e30)
START = tl.constexpr(-1e29)
# 2^-200 is 0 in float32.
NO_MASS = tl.constexpr(-200.0)
# float32 is multiplied as three products of 19 bits: more accurate than plain float32, and 4 times as fast.
PRECISION = "tf32x3"
# Queries of a tile whose gradients several programs add up: the least of hopper_backward.py.
COUNTED = 64


class Tiling(NamedTuple):
    """Numbers of queries and keys in a tile, of warps, and of pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# The fastest of those tried on an H200, for head sizes up to 64, 128 and 256. With small tiles several programs share a
# multiprocessor, and one computes exponentials while another multiplies. Caution: in float32 with head size 256, Triton
# 3.6 compiles some tiles of 16 keys or queries with 8 warps to kernels that access memory out of bounds.
TILINGS = {
    "output": (Tiling(64, 128, 4, 2), Tiling(128, 64, 4, 2), Tiling(128, 64, 8, 2)),
    "statistics": (Tiling(64, 128, 4, 2), Tiling(128, 128, 8, 3), Tiling(128, 64, 8, 2)),
    "masked": (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2)),
    "grad key": (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 2)),
    "grad query": (Tiling(64, 64, 4, 2), Tiling(128, 64, 8, 3), Tiling(128, 32, 8, 2)),
    "moments grad key": (Tiling(32, 64, 4, 2), Tiling(32, 64, 4, 3), Tiling(32, 64, 8, 2)),
    "moments grad query": (Tiling(64, 64, 4, 2), Tiling(128, 64, 8, 3), Tiling(128, 32, 8, 2)),
    "masked grad key": (Tiling(32, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(32, 64, 8, 2)),
    "masked grad query": (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 32, 8, 2)),
    "float32": (Tiling(128, 64, 8, 2), Tiling(128, 64, 8, 2), Tiling(64, 16, 4, 2)),
    "float32 grad key": (Tiling(32, 128, 8, 2), Tiling(64, 64, 4, 1), Tiling(32, 64, 8, 1)),
    "float32 grad query": (Tiling(128, 32, 8, 2), Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 1)),
}


def tiling(kind: str, size: int) -> Tiling:
    """Tiling for a kind of kernel and the larger head size."""
    return TILINGS[kind][0 if size <= 64 else 1 if size <= 128 else 2]


# Logits ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _tanh(x):
    """Hyperbolic tangent by one exponential, or by its series where that would cancel."""
    y = x * x
    series = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    tail = 1.0 - 2.0 / (1.0 + tl.exp2(tl.abs(x) * (2.0 * LOG2_E)))
    return tl.where(y < 0.04, series, tl.where(x < 0.0, -tail, tail))


@triton.jit
def _logit(product, row, key, batch, head, sight, scoring, m, n, EDGE: tl.constexpr):
    """Logits of a tile in units of log 2, and their derivative with respect to scale * product."""
    s = product * (scoring.scale * LOG2_E)
    slope = 1.0
    if scoring.softcap is not None:
        tanh = _tanh(product * (scoring.scale / scoring.softcap))
        s = tanh * (scoring.softcap * LOG2_E)
        slope = 1.0 - tanh * tanh
    if EDGE:
        at = row + (n - m)
        visible = (row < m) & (key < n)
        if scoring.left is not None:
            visible = visible & (key >= at - scoring.left)
        if scoring.right is not None:
            visible = visible & (key <= at + scoring.right)
        if sight.mask is not None:
            start = sight.mask + (batch.to(tl.int64) * sight.mask_batch + head.to(tl.int64) * sight.mask_head)
            visible = visible & (_entry(start, sight.mask_row, row, key, m, n) != 0)
        if sight.segments is not None:
            start = sight.segments + batch.to(tl.int64) * sight.segments_batch
            known = (at >= 0) & (row < m)
            visible = visible & known & (tl.load(start + at, known, 0) == tl.load(start + key, key < n, 0))
        if sight.bias is not None:
            start = sight.bias + (batch.to(tl.int64) * sight.bias_batch + head.to(tl.int64) * sight.bias_head)
            s += _entry(start, sight.bias_row, row, key, m, n).to(tl.float32) * LOG2_E
            s = tl.where(s < LOW, LOW, s)
        s = tl.where(visible, s, LOW)
    return s, slope


@triton.jit
def _entry(start, stride, row, key, m, n):
    """A tile of a bias or a mask, or one row of it if all rows are equal."""
    place = start + key
    there = key < n
    if stride is not None:
        place += row.to(tl.int64) * stride
        there = there & (row < m)
    return tl.load(place, there, 0)


@triton.jit
def _span(first, last, before, after, limit, sight, batch, tile, SIZE: tl.constexpr):
    """Tiles [begin, end) that some of the positions first..last see, and [inner, outer) that all of them see entirely.

    A position sees from `before` below it to `after` above it, between 0 and limit, and only its own segment. The
    positions are the tile with this number, by which its spans are found (if there are any: decoding.py has none).
    """
    begin = 0
    end = tl.cdiv(limit, SIZE)
    inner = 0
    outer = limit // SIZE
    if before is not None:
        begin = tl.maximum(first - before, 0) // SIZE
        inner = tl.cdiv(tl.maximum(last - before, 0), SIZE)
    if after is not None:
        end = tl.minimum(end, tl.cdiv(tl.maximum(last + after + 1, 0), SIZE))
        outer = tl.minimum(outer, tl.maximum(first + after + 1, 0) // SIZE)
    if sight.spans is not None:
        place = sight.spans + batch * sight.spans_batch + tile * 4
        begin = tl.maximum(begin, tl.load(place))
        inner = tl.maximum(inner, tl.load(place + 1))
        outer = tl.minimum(outer, tl.load(place + 2))
        end = tl.minimum(end, tl.load(place + 3))
    if sight.bias is not None or sight.mask is not None or (sight.segments is not None and sight.spans is None):
        outer = 0
    end = tl.maximum(begin, end)
    inner = tl.minimum(inner, end)
    outer = tl.maximum(inner, tl.minimum(outer, end))
    return begin, inner, outer, end


@triton.jit
def _tile(step, begin, inner, outer, EDGE: tl.constexpr):
    """Index of the step-th inner tile, or of the step-th tile around them."""
    if EDGE:
        return begin + step + tl.where(begin + step < inner, 0, outer - inner)
    else:
        return inner + step


# Forward --------------------------------------------------------------------------------------------------------------


@triton.jit
def _absorb(
    state, q, key, value, row, batch, head, span, sight, scoring, m, n,
    EDGE: tl.constexpr, GROUP: tl.constexpr, STATISTICS: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys inside the band, or those at its edge, to the running sums."""
    o, top, z, a, b = state
    begin, inner, outer, end = span
    # Inside the band the scale is applied to the maximum of a row instead of to each of its elements.
    PLAIN: tl.constexpr = (not EDGE) and (scoring.softcap is None)
    unit = scoring.scale * LOG2_E
    for step in tl.range(0, end - begin - (outer - inner) if EDGE else outer - inner):
        start = _tile(step, begin, inner, outer, EDGE) * BN
        k = key.load([batch, head // GROUP, start, 0]).reshape([BN, D])
        t = tl.dot(q, k.T, input_precision=PRECISION)
        if PLAIN:
            risen = tl.maximum(top, tl.max(t, 1) * unit)
            x = t * unit - risen[:, None]
        else:
            s, _ = _logit(t, row[:, None], start + tl.arange(0, BN)[None, :], batch, head, sight, scoring, m, n, EDGE)
            risen = tl.maximum(top, tl.max(s, 1))
            x = s - risen[:, None]
        p = tl.exp2(x)
        fade = tl.exp2(top - risen)
        if STATISTICS:
            px = p * x
            r = tl.where(top == START, 0.0, top - risen)
            b = fade * (b + r * (2.0 * a + r * z)) + tl.sum(px * x, 1)
            a = fade * (a + r * z) + tl.sum(px, 1)
        z = fade * z + tl.sum(p, 1)
        v = value.load([batch, head // GROUP, start, 0]).reshape([BN, DV])
        o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision=PRECISION)
        top = risen
    return o, top, z, a, b


@triton.jit
def _forward(
    query, key, value, output, log_normalizer, entropy, logit_variance, max_logit, mean_logit,
    sight, scoring, heads, m, n,
    GROUP: tl.constexpr, STATISTICS: tl.constexpr, EDGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The last queries of a causal band have the most keys, and start first.
    tiles = tl.cdiv(m, BM)
    start = (tiles - 1 - tl.program_id(0) % tiles) * BM
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    row = start + tl.arange(0, BM)
    at = start + n - m
    span = _span(at, at + tl.minimum(BM, m - start) - 1, scoring.left, scoring.right, n, sight, batch, start // BM, BN)

    q = query.load([batch, head, start, 0]).reshape([BM, D])
    nothing = tl.zeros([BM], tl.float32)
    state = tl.zeros([BM, DV], tl.float32), nothing + START, nothing, nothing, nothing
    if sight.bias is None and sight.mask is None:
        state = _absorb(
            state, q, key, value, row, batch, head, span, sight, scoring, m, n,
            False, GROUP, STATISTICS, BN, D, DV, PRECISION,
        )  # fmt: skip
    if EDGES:
        state = _absorb(
            state, q, key, value, row, batch, head, span, sight, scoring, m, n,
            True, GROUP, STATISTICS, BN, D, DV, PRECISION,
        )  # fmt: skip
    o, top, z, a, b = state

    rows = log_normalizer, entropy, logit_variance, max_logit, mean_logit
    line = (batch * heads + head).to(tl.int64) * m + row
    o = _store_statistics((o, top, z, a, b), rows, line, row < m, STATISTICS)
    output.store([batch, head, start, 0], o.to(output.dtype).reshape([1, 1, BM, DV]))


@triton.jit
def _store_statistics(state, rows, line, there, STATISTICS: tl.constexpr):
    """Store log normaliser, entropy, variance, maximum and mean of rows; return their outputs."""
    log_normalizer, entropies, logit_variance, max_logit, mean_logits = rows
    o, top, z, a, b = state
    dead = z == 0.0
    z = tl.where(dead, 1.0, z)
    # A maximum ignores NaN, a sum does not.
    top = tl.where(dead, -float("inf"), tl.where(z == z, top, z))
    log_z = tl.log2(z)
    mean = a / z
    # Rounding may make them slightly negative; a comparison with NaN is false.
    entropy = log_z - mean
    entropy = tl.where(entropy < 0.0, 0.0, entropy)
    variance = b / z - mean * mean
    variance = tl.where(variance < 0.0, 0.0, variance)
    if not STATISTICS:
        entropy = tl.zeros_like(z)
        variance = entropy
    mean_logit = tl.where(dead, 0.0, top + log_z - entropy)
    tl.store(log_normalizer + line, (top + log_z) * LOG_2, there)
    tl.store(entropies + line, entropy * LOG_2, there)
    tl.store(logit_variance + line, variance * (LOG_2 * LOG_2), there)
    tl.store(max_logit + line, top * LOG_2, there)
    tl.store(mean_logits + line, mean_logit * LOG_2, there)
    return o / z[:, None]


@on_its_device
def forward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    *,
    statistics: bool = True,
    separate: bool = False,
) -> Statistics:
    """Attention and the statistics of its rows; without `statistics`, entropy and variance are 0.

    With `separate`, each of them has its own memory.
    """
    device = query.device
    if scoring.scale < 0:  # the largest product must have the largest logit
        scoring = scoring._replace(scale=-scoring.scale)
        return forward(-query, key, value, sight, scoring, statistics=statistics, separate=separate)
    query, key, value = aligned(query), aligned(key), aligned(value)
    strided = _strided(sight)
    layouts = query.stride(), key.stride(), value.stride()
    kernel, programs, spans, numbers = _forward_call(
        query.dtype, device, query.shape, value.shape, layouts, scoring, statistics, _kind(strided)
    )
    output = empty_output(query, value.shape[3])
    rows = empty_rows(query, separate=separate)
    if programs:
        stream = current_stream(device)
        kernel.launch(
            programs, stream, (query, key, value, output), rows, (_with_spans(strided, spans, stream), *numbers)
        )
    else:
        output.zero_()
        for row, nothing in zip(rows, (-torch.inf, 0.0, 0.0, -torch.inf, 0.0), strict=True):
            row.fill_(nothing)
    result = StatisticsAndMean(dense(output), *rows[:4])
    result.mean_logit = rows[4]
    return result


@lru_cache(maxsize=1024)
def _forward_call(
    dtype: torch.dtype,
    _device: torch.device,
    query_shape: torch.Size,
    value_shape: torch.Size,
    _layouts: tuple[tuple[int, ...], ...],
    scoring: Scoring,
    statistics: bool,
    masks: tuple[Any, ...],
) -> tuple[Kernel, int, SegmentSpans, tuple[Any, ...]]:
    """Kernel, number of programs, spans of segments and numbers of a call.

    Arguments that are not read distinguish kernels: handles are those of a device, and tensor maps contain strides.
    """
    (b, h, m, d), (_, hk, n, v) = query_shape, value_shape
    if dtype is torch.float32:
        kind = "float32"
    elif _is_dense(masks):
        kind = "masked"
    else:
        kind = "statistics" if statistics else "output"
    rows, keys, warps, stages = tiling(kind, max(d, v))
    edges = _has_edges(masks, scoring, n, keys)
    constants = h // hk, statistics, edges, rows, keys, _padded(d), _padded(v), PRECISION
    options = {"num_warps": warps, "num_stages": stages}
    kernel = Kernel(_forward, constants, options, (_by_rows(rows), _by_rows(keys), _by_rows(keys), _by_rows(rows)))
    programs = triton.cdiv(m, rows) * b * h if n else 0
    spans = SegmentSpans((n - m, m, rows), (0, n, keys))
    return kernel, programs, spans, (_clipped(scoring, m, n), h, m, n)


# Backward -------------------------------------------------------------------------------------------------------------


@triton.jit
def _coefficients(
    output, grad_output, log_normalizer, entropy, logit_variance,
    grad_log_normalizer, grad_entropy, grad_logit_variance, coefficients,
    output_batch, output_head, output_row, output_column, grad_batch, grad_head, grad_row, grad_column,
    lines, zeros, heads, m, v,
    MOMENTS: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """G, k0, k1 and k2 of every row, from its statistics and their gradients, which may be None; then zeros."""
    tiles = tl.cdiv(m, BM)
    index = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    there = row < m
    line = index * m + row
    batch = index // heads
    head = index % heads
    G = tl.load(log_normalizer + line, there, 0.0)
    dead = G == -float("inf")
    along = tl.zeros([BM], tl.float32)
    if grad_output is not None:
        o = output + (batch * output_batch + head * output_head) + row.to(tl.int64) * output_row
        go = grad_output + (batch * grad_batch + head * grad_head) + row.to(tl.int64) * grad_row
        for first in tl.range(0, v, BV):
            column = first + tl.arange(0, BV)
            inside = there[:, None] & (column < v)[None, :]
            x = tl.load(o[:, None] + (column * output_column)[None, :], inside, 0.0).to(tl.float32)
            y = tl.load(go[:, None] + (column * grad_column)[None, :], inside, 0.0).to(tl.float32)
            along += tl.sum(x * y, 1)
    k0 = -along
    if grad_log_normalizer is not None:
        k0 += tl.where(dead, 0.0, tl.load(grad_log_normalizer + line, there, 0.0))
    place = coefficients + line
    # The log normaliser is finite in rows without keys, whose mass is then 0.
    tl.store(place, tl.where(dead, -LOW, G * LOG2_E), there)
    if MOMENTS:
        c1 = tl.zeros([BM], tl.float32)
        c2 = tl.zeros([BM], tl.float32)
        if grad_entropy is not None:
            c1 = -tl.load(grad_entropy + line, there, 0.0)
        if grad_logit_variance is not None:
            c2 = tl.load(grad_logit_variance + line, there, 0.0)
            c1 += 2.0 * c2
            k0 -= c2 * tl.load(logit_variance + line, there, 0.0)
        c1 = tl.where(dead, 0.0, c1)
        c2 = tl.where(dead, 0.0, c2)
        H = tl.load(entropy + line, there, 0.0)
        k0 += H * (c1 + H * c2)
        tl.store(place + 2 * lines, (c1 + 2.0 * H * c2) * LOG_2, there)
        tl.store(place + 3 * lines, c2 * (LOG_2 * LOG_2), there)
    tl.store(place + lines, k0, there)
    if tl.program_id(0) < zeros:
        tl.store(coefficients + (4 if MOMENTS else 2) * lines + tl.program_id(0), 0.0)


@triton.jit
def _rows(coefficients, lines, first, row, m, MOMENTS: tl.constexpr):
    """Log normaliser, k0, k1 and k2 of a tile of queries."""
    place = coefficients + first + row
    G = tl.load(place, row < m, -LOW)
    k0 = tl.load(place + lines, row < m, 0.0)
    k1, k2 = k0, k0
    if MOMENTS:
        k1 = tl.load(place + 2 * lines, row < m, 0.0)
        k2 = tl.load(place + 3 * lines, row < m, 0.0)
    return G, k0, k1, k2


@triton.jit
def _mass(s, G, MOMENTS: tl.constexpr, EDGE: tl.constexpr):
    """x and p = exp x; without mass, x is clamped so that its square does not overflow."""
    x = s - G
    if MOMENTS and EDGE:
        x = tl.where(x < NO_MASS, NO_MASS, x)
    return x, tl.exp2(x)


@triton.jit
def _logit_gradient(p, dp, x, k0, k1, k2, MOMENTS: tl.constexpr):
    """Gradient of the logits, ds = p (dp + k0 + x (k1 + k2 x))."""
    weight = dp + k0
    if MOMENTS:
        weight += x * (k1 + k2 * x)
    return p * weight


@triton.jit
def _gather_key(
    state, k, v, query, grad_output, coefficients, key_index, batch, head, lines, heads, span, sight, scoring, m, n,
    MOMENTS: tl.constexpr, EDGE: tl.constexpr,
    BM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from tiles of queries inside the band, or at its edge, to a tile of keys; transposed."""
    dk, dv = state
    begin, inner, outer, end = span
    first = (batch * heads + head).to(tl.int64) * m
    for step in tl.range(0, end - begin - (outer - inner) if EDGE else outer - inner):
        start = _tile(step, begin, inner, outer, EDGE) * BM
        row = start + tl.arange(0, BM)
        q = query.load([batch, head, start, 0]).reshape([BM, D])
        G, k0, k1, k2 = _rows(coefficients, lines, first, row, m, MOMENTS)
        t = tl.dot(k, q.T, input_precision=PRECISION)
        s, slope = _logit(t, row[None, :], key_index[:, None], batch, head, sight, scoring, m, n, EDGE)
        x, p = _mass(s, G[None, :], MOMENTS, EDGE)
        go = grad_output.load([batch, head, start, 0]).reshape([BM, DV])
        dv = tl.dot(p.to(go.dtype), go, dv, input_precision=PRECISION)
        dp = tl.dot(v, go.T, input_precision=PRECISION)
        ds = _logit_gradient(p, dp, x, k0[None, :], k1[None, :], k2[None, :], MOMENTS)
        dk = tl.dot((ds * slope).to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _backward_key(
    query, key, value, grad_output, grad_key, grad_value, coefficients, sight, scoring, lines, heads, m, n,
    GROUP: tl.constexpr, MOMENTS: tl.constexpr, EDGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n, BN)
    start = tl.program_id(0) % tiles * BN
    key_heads = heads // GROUP
    batch = tl.program_id(0) // tiles // key_heads
    key_head = tl.program_id(0) // tiles % key_heads
    key_index = start + tl.arange(0, BN)
    # The band of queries around a key is that of keys around a query, with left and right exchanged.
    at = start - (n - m)
    span = _span(at, at + tl.minimum(BN, n - start) - 1, scoring.right, scoring.left, m, sight, batch, start // BN, BM)

    k = key.load([batch, key_head, start, 0]).reshape([BN, D])
    v = value.load([batch, key_head, start, 0]).reshape([BN, DV])
    state = tl.zeros([BN, D], tl.float32), tl.zeros([BN, DV], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        if sight.bias is None and sight.mask is None:
            state = _gather_key(
                state, k, v, query, grad_output, coefficients, key_index, batch, head, lines, heads, span,
                sight, scoring, m, n, MOMENTS, False, BM, D, DV, PRECISION,
            )  # fmt: skip
        if EDGES:
            state = _gather_key(
                state, k, v, query, grad_output, coefficients, key_index, batch, head, lines, heads, span,
                sight, scoring, m, n, MOMENTS, True, BM, D, DV, PRECISION,
            )  # fmt: skip
    dk, dv = state
    dk = (dk * scoring.scale).to(grad_key.dtype)
    grad_key.store([batch, key_head, start, 0], dk.reshape([1, 1, BN, D]))
    grad_value.store([batch, key_head, start, 0], dv.to(grad_value.dtype).reshape([1, 1, BN, DV]))


@triton.jit
def _gather_query(
    dq, q, go, key, value, grad_logit, rows, row, batch, head, heads, span, sight, scoring, m, n,
    MOMENTS: tl.constexpr, EDGE: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from tiles of keys inside the band, or at its edge, to a tile of queries."""
    G, k0, k1, k2 = rows
    begin, inner, outer, end = span
    for step in tl.range(0, end - begin - (outer - inner) if EDGE else outer - inner):
        start = _tile(step, begin, inner, outer, EDGE) * BN
        column = start + tl.arange(0, BN)
        k = key.load([batch, head // GROUP, start, 0]).reshape([BN, D])
        v = value.load([batch, head // GROUP, start, 0]).reshape([BN, DV])
        t = tl.dot(q, k.T, input_precision=PRECISION)
        s, slope = _logit(t, row[:, None], column[None, :], batch, head, sight, scoring, m, n, EDGE)
        x, p = _mass(s, G[:, None], MOMENTS, EDGE)
        dp = tl.dot(go, v.T, input_precision=PRECISION)
        ds = _logit_gradient(p, dp, x, k0[:, None], k1[:, None], k2[:, None], MOMENTS)
        if grad_logit is not None:
            line = ((batch * heads + head).to(tl.int64) * m + row) * n
            tl.store(grad_logit + line[:, None] + column[None, :], ds, (row < m)[:, None] & (column < n)[None, :])
        dq = tl.dot((ds * slope).to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _backward_query(
    query, key, value, grad_output, grad_query, grad_logit, coefficients, sight, scoring, lines, heads, m, n,
    GROUP: tl.constexpr, MOMENTS: tl.constexpr, EDGES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, BM)
    start = (tiles - 1 - tl.program_id(0) % tiles) * BM
    batch = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    row = start + tl.arange(0, BM)
    at = start + n - m
    span = _span(at, at + tl.minimum(BM, m - start) - 1, scoring.left, scoring.right, n, sight, batch, start // BM, BN)

    q = query.load([batch, head, start, 0]).reshape([BM, D])
    go = grad_output.load([batch, head, start, 0]).reshape([BM, DV])
    rows = _rows(coefficients, lines, (batch * heads + head).to(tl.int64) * m, row, m, MOMENTS)
    dq = tl.zeros([BM, D], tl.float32)
    if sight.bias is None and sight.mask is None:
        dq = _gather_query(
            dq, q, go, key, value, grad_logit, rows, row, batch, head, heads, span, sight, scoring, m, n,
            MOMENTS, False, GROUP, BN, D, DV, PRECISION,
        )  # fmt: skip
    if EDGES:
        dq = _gather_query(
            dq, q, go, key, value, grad_logit, rows, row, batch, head, heads, span, sight, scoring, m, n,
            MOMENTS, True, GROUP, BN, D, DV, PRECISION,
        )  # fmt: skip
    dq = (dq * scoring.scale).to(grad_query.dtype)
    grad_query.store([batch, head, start, 0], dq.reshape([1, 1, BM, D]))


@on_its_device
def coefficients(result: Statistics, gradients: Gradients) -> Float[Tensor, "k b h m"]:
    """Coefficients G and k0 of every row, and k1 and k2 if entropies or variances have gradients.

    Behind them in memory is a zero for every COUNTED queries of a head: the counters of hopper_backward.py.
    """
    kernel, programs, pointers, numbers = _prepared_coefficients(result, gradients)
    (b, h, m, _), device = result.output.shape, result.output.device
    rows = 2 if gradients.entropy is gradients.logit_variance is None else 4
    count = rows * b * h * m
    memory = torch.empty(count + b * h * triton.cdiv(m, COUNTED), dtype=torch.float32, device=device)
    if programs:
        kernel.launch(programs, current_stream(device), (), (*pointers, memory), numbers)
    return memory[:count].view(rows, b, h, m)


def recorded_coefficients(result: Statistics, gradients: Gradients) -> RecordedLaunch | None:
    """Launch of `coefficients` for gradients of this kind; None before the first call."""
    kernel, programs, pointers, numbers = _prepared_coefficients(result, gradients)
    return kernel.recorded(programs, len(pointers) + 1, numbers)


def _prepared_coefficients(
    result: Statistics, gradients: Gradients
) -> tuple[Kernel, int, tuple[Tensor | None, ...], tuple[int, ...]]:
    """Kernel of a call, number of programs, operands and numbers."""
    output, grad_output = result.output, gradients.output
    grads = [None if g is None else g.contiguous() for g in gradients[1:4]]
    pointers = output, grad_output, *result[1:4], *grads
    kinds = tuple(None if t is None else t.data_ptr() % 16 == 0 for t in pointers)
    layout = (*output.stride(), *(output if grad_output is None else grad_output).stride())
    grad_dtype = output.dtype if grad_output is None else grad_output.dtype
    kernel, programs, numbers = _coefficients_call(output.dtype, grad_dtype, output.device, output.shape, layout, kinds)
    return kernel, programs, pointers, numbers


@lru_cache(maxsize=1024)
def _coefficients_call(
    _dtype: torch.dtype,
    _grad_dtype: torch.dtype,
    _device: torch.device,
    shape: torch.Size,
    layout: tuple[int, ...],
    kinds: tuple[bool | None, ...],
) -> tuple[Kernel, int, tuple[int, ...]]:
    """Kernel for gradients that are missing (None), unaligned or aligned, number of programs, and numbers."""
    b, h, m, v = shape
    moments = kinds[6] is not None or kinds[7] is not None
    kernel = Kernel(_coefficients, (moments, 32, min(128, _padded(v))), {"num_warps": 4})
    return kernel, triton.cdiv(m, 32) * b * h, (*layout, b * h * m, b * h * triton.cdiv(m, COUNTED), h, m, v)


@on_its_device
def backward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    per_row: Float[Tensor, "k b h m"],
    grad_output: Float[Tensor, "b h m v"],
    *,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and bias, from the coefficients of every row."""
    device = query.device
    (b, h, m, _), n = query.shape, key.shape[2]
    query, key, value, grad_output = map(aligned, (query, key, value, grad_output.to(value.dtype)))
    grad_query, grad_key, grad_value = (empty_output(t, t.shape[3]) for t in (query, key, value))
    # A bias shared by heads or batches gets the sum, in a fixed order of torch.
    grad_logit = query.new_zeros((b, h, m, n), dtype=torch.float32) if needs_bias else None
    if 0 in (b, h, m, n):
        return grad_query.zero_(), grad_key.zero_(), grad_value.zero_(), _bias_gradient(grad_logit, sight)
    inputs, strided = (query, key, value, grad_output), _strided(sight)
    layouts = tuple(t.stride() for t in (*inputs, grad_query, grad_key, grad_value))
    by_key, by_query, programs, spans, numbers = _backward_call(
        query.dtype, device, query.shape, value.shape, layouts, scoring, len(per_row) == 4, _kind(strided), needs_bias
    )
    stream = current_stream(device)
    of_keys, of_queries = (_with_spans(strided, each, stream) for each in spans)
    by_key.launch(programs[0], stream, (*inputs, grad_key, grad_value), (per_row,), (of_keys, *numbers))
    by_query.launch(programs[1], stream, (*inputs, grad_query), (grad_logit, per_row), (of_queries, *numbers))
    return dense(grad_query), dense(grad_key), dense(grad_value), _bias_gradient(grad_logit, sight)


@lru_cache(maxsize=1024)
def _backward_call(
    dtype: torch.dtype,
    _device: torch.device,
    query_shape: torch.Size,
    value_shape: torch.Size,
    _layouts: tuple[tuple[int, ...], ...],
    scoring: Scoring,
    moments: bool,
    masks: tuple[Any, ...],
    _needs_bias: bool,
) -> tuple[Kernel, Kernel, tuple[int, int], tuple[SegmentSpans, SegmentSpans], tuple[Any, ...]]:
    """Kernels of keys and queries with their numbers of programs and spans of segments, and the numbers of a call."""
    (b, h, m, d), (_, hk, n, v) = query_shape, value_shape
    kind = "float32 " if dtype is torch.float32 else "masked " if _is_dense(masks) else "moments " if moments else ""
    shapes = _padded(d), _padded(v), PRECISION
    rows, keys, warps, stages = tiling(kind + "grad key", max(d, v))
    by_key = Kernel(
        _backward_key,
        (h // hk, moments, _has_edges(masks, scoring, m, rows), rows, keys, *shapes),
        {"num_warps": warps, "num_stages": stages},
        tuple(map(_by_rows, (rows, keys, keys, rows, keys, keys))),
    )
    programs_of_keys = triton.cdiv(n, keys) * b * hk
    spans_of_keys = SegmentSpans((0, n, keys), (n - m, m, rows))
    rows, keys, warps, stages = tiling(kind + "grad query", max(d, v))
    by_query = Kernel(
        _backward_query,
        (h // hk, moments, _has_edges(masks, scoring, n, keys), rows, keys, *shapes),
        {"num_warps": warps, "num_stages": stages},
        tuple(map(_by_rows, (rows, keys, keys, rows, rows))),
    )
    programs = programs_of_keys, triton.cdiv(m, rows) * b * h
    spans = spans_of_keys, SegmentSpans((n - m, m, rows), (0, n, keys))
    return by_key, by_query, programs, spans, (_clipped(scoring, m, n), b * h * m, h, m, n)


def _bias_gradient(grad_logit: Tensor | None, sight: Sight) -> Tensor | None:
    if grad_logit is None or sight.bias is None:
        return None
    return grad_logit.sum_to_size(sight.bias.shape).to(sight.bias.dtype)


# Arguments of the kernels ---------------------------------------------------------------------------------------------


class _Strided(NamedTuple):
    """Bias, mask and segments with their strides: 0 if shared, None if all rows are equal; spans of the segments."""

    bias: Tensor | None = None
    bias_batch: int = 0
    bias_head: int = 0
    bias_row: int | None = None
    mask: Tensor | None = None
    mask_batch: int = 0
    mask_head: int = 0
    mask_row: int | None = None
    segments: Tensor | None = None
    segments_batch: int = 0
    spans: Tensor | None = None
    spans_batch: int = 0


UNMASKED = _Strided()


def _strided(sight: Sight) -> _Strided:
    # One flat tuple: Triton 3.6 loses a stride of 1 in a tuple within a tuple.
    strided = UNMASKED
    for name, tensor in sight._asdict().items():
        if tensor is not None:
            tensor = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
            tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
            axes = zip(("batch", "head", "row"), tensor.shape[:-1], tensor.stride(), strict=False)
            strides = {f"{name}_{axis}": stride for axis, size, stride in axes if size > 1}
            strided = strided._replace(**{name: tensor}, **strides)
    return strided


def _with_spans(strided: _Strided, spans: SegmentSpans, stream: int) -> _Strided:
    """Masks with the spans of their segments, if there are any."""
    if strided.segments is None:
        return strided
    table, stride = spans.computed(strided.segments, stream)
    return strided._replace(spans=table, spans_batch=stride)


def _clipped(scoring: Scoring, m: int, n: int) -> Scoring:
    """Clip the band to numbers whose sums fit in 32 bits."""
    left, right = (None if reach is None else max(-m - n, min(reach, m + n)) for reach in (scoring.left, scoring.right))
    softcap = None if scoring.softcap is None else float(scoring.softcap)
    return Scoring(float(scoring.scale), softcap, left, right)


def _kind(strided: _Strided) -> tuple[Any, ...]:
    """Properties of masks and strides that Triton specialises: dtype, alignment, and numbers 1 or multiples of 16."""
    if strided is UNMASKED:
        return ()
    return tuple(
        (t.dtype, t.data_ptr() % 16 == 0) if isinstance(t, Tensor) else t and (t == 1, t % 16 == 0, t >> 31 == 0)
        for t in strided
    )


def _is_dense(masks: tuple[Any, ...]) -> bool:
    """Return whether every tile must be masked, because there is a bias or a mask."""
    return bool(masks) and not (_Strided(*masks).bias is _Strided(*masks).mask is None)


def _has_edges(masks: tuple[Any, ...], scoring: Scoring, size: int, tile: int) -> bool:
    """Return whether any tile needs a mask."""
    return bool(masks) or scoring.left is not None or scoring.right is not None or size % tile != 0


def _by_rows(rows: int) -> Callable[[Tensor], TensorDescriptor]:
    return partial(_tiles, rows=rows)


def _tiles(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of tiles [rows, d] of a tensor [b, h, m, d]."""
    return TensorDescriptor.from_tensor(tensor, [1, 1, rows, _padded(tensor.shape[-1])])


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
