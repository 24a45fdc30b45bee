# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Sums of the statistics of every head over its rows, and of norms over its keys, in two launches on a GPU.

    _sum_heads    one program for each head of each sequence     sum, sum of squares, least, greatest of every field
    _join         one program for each head                      the same over all sequences

Forty operations of torch compute the same: on few tokens they take longer than attention itself. Numbers are float32,
sums float64, in a fixed order.

Read next: ../../attention/in_models/head_summaries.py (the fields).
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..._typing import Float, Tensor
from .launching import Kernel, current_stream, on_its_device

# Entropy, log normaliser, variance, largest logit, weight on the first key, that weight if all were equal, weight on a
# learned sink, norm of the query. There is no learned sink here: its weight is 0.
ROW_FIELDS = tl.constexpr(8)
KEY_FIELDS = tl.constexpr(2)  # norms of key and value
SUMS = tl.constexpr(4)
TILE = 64  # rows that a program reads at a time


class Tables(NamedTuple):
    """For each head the count of rows with sums and sums of squares, and least numbers with negated greatest ones."""

    sums: Float[Tensor, "added h"]
    ends: Float[Tensor, "extreme h"]


@triton.jit
def _begin(BM: tl.constexpr):
    zero = tl.zeros([BM], tl.float64)
    return zero, zero, tl.zeros([BM], tl.float32) + float("inf"), tl.zeros([BM], tl.float32) - float("inf"), zero


@triton.jit
def _add(state, x, there):
    """Add the numbers of some rows to sum, sum of squares, least, greatest, and the count of NaN."""
    total, square, least, greatest, unknown = state
    wide = tl.where(there, x, 0.0).to(tl.float64)
    least = tl.minimum(least, tl.where(there, x, float("inf")))
    greatest = tl.maximum(greatest, tl.where(there, x, -float("inf")))
    return total + wide, square + wide * wide, least, greatest, unknown + tl.where(there & (x != x), 1.0, 0.0)


@triton.jit
def _store(place, state):
    total, square, least, greatest, unknown = state
    known = tl.sum(unknown, 0) == 0.0  # extremes ignore NaN
    tl.store(place, tl.sum(total, 0))
    tl.store(place + 1, tl.sum(square, 0))
    tl.store(place + 2, tl.where(known, tl.min(least, 0), float("nan")).to(tl.float64))
    tl.store(place + 3, tl.where(known, tl.max(greatest, 0), float("nan")).to(tl.float64))


@triton.jit
def _tile(tensor, place, row, row_stride, there, size, D: tl.constexpr):
    column = tl.arange(0, D)[None, :]
    inside = there[:, None] & (column < size)
    return tl.load(tensor + place + row.to(tl.int64)[:, None] * row_stride + column, inside, 0.0).to(tl.float32)


@triton.jit
def _sum_heads(
    query, key, value, entropy, log_normalizer, variance, highest, uniform, row_parts, key_parts,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    scale, batches, heads, m, n, left, size, value_size,
    GROUP: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    if index < batches * heads:
        batch, head = index // heads, index % heads
        column = tl.arange(0, D)
        first_key = key + batch * key_batch + head // GROUP * key_head
        k = tl.load(first_key + column, column < size, 0.0).to(tl.float32)
        s0, s1, s2, s3 = _begin(BM), _begin(BM), _begin(BM), _begin(BM)
        s4, s5, s7 = _begin(BM), _begin(BM), _begin(BM)
        for start in range(0, m, BM):
            row = start + tl.arange(0, BM)
            there = row < m
            line = index * m + row
            G = tl.load(log_normalizer + line, there, 0.0)
            q = _tile(query, batch * query_batch + head * query_head, row, query_row, there, size, D)
            weight = tl.exp(tl.sum(q * k[None, :], 1) * scale - G)
            weight = tl.where(G == -float("inf"), 0.0, weight)
            if left is not None:
                weight = tl.where(row + n - m - left > 0, 0.0, weight)
            s0 = _add(s0, tl.load(entropy + line, there, 0.0), there)
            s1 = _add(s1, G, there)
            s2 = _add(s2, tl.load(variance + line, there, 0.0), there)
            s3 = _add(s3, tl.load(highest + line, there, 0.0), there)
            s4 = _add(s4, weight, there)
            s5 = _add(s5, tl.load(uniform + row, there, 0.0).to(tl.float32), there)
            s7 = _add(s7, tl.sqrt(tl.sum(q * q, 1)), there)
        place = row_parts + index * (ROW_FIELDS * SUMS)
        _store(place, s0)
        _store(place + SUMS, s1)
        _store(place + 2 * SUMS, s2)
        _store(place + 3 * SUMS, s3)
        _store(place + 4 * SUMS, s4)
        _store(place + 5 * SUMS, s5)
        tl.store(place + 6 * SUMS + tl.arange(0, SUMS), tl.zeros([SUMS], tl.float64))
        _store(place + 7 * SUMS, s7)
    else:
        index -= batches * heads
        batch, head = index // (heads // GROUP), index % (heads // GROUP)
        of_keys, of_values = _begin(BM), _begin(BM)
        for start in range(0, n, BM):
            row = start + tl.arange(0, BM)
            there = row < n
            k = _tile(key, batch * key_batch + head * key_head, row, key_row, there, size, D)
            v = _tile(value, batch * value_batch + head * value_head, row, value_row, there, value_size, DV)
            of_keys = _add(of_keys, tl.sqrt(tl.sum(k * k, 1)), there)
            of_values = _add(of_values, tl.sqrt(tl.sum(v * v, 1)), there)
        place = key_parts + index * (KEY_FIELDS * SUMS)
        _store(place, of_keys)
        _store(place + SUMS, of_values)


@triton.jit
def _joined(parts, head, batches, heads, FIELDS: tl.constexpr):
    field = tl.arange(0, FIELDS)
    total = tl.zeros([FIELDS], tl.float64)
    square = total
    least = total + float("inf")
    greatest = total - float("inf")
    unknown = total
    for batch in range(batches):
        place = parts + ((batch * heads + head) * FIELDS + field) * SUMS
        total += tl.load(place)
        square += tl.load(place + 1)
        low, high = tl.load(place + 2), tl.load(place + 3)
        least = tl.minimum(least, low)
        greatest = tl.maximum(greatest, high)
        unknown += tl.where(low != low, 1.0, 0.0)
    least = tl.where(unknown > 0.0, float("nan"), least)
    return total, square, least, tl.where(unknown > 0.0, float("nan"), greatest)


@triton.jit
def _join_part(parts, sums, ends, head, batches, heads, rows, FIELDS: tl.constexpr):
    field = tl.arange(0, FIELDS)
    total, square, least, greatest = _joined(parts, head, batches, heads, FIELDS)
    tl.store(sums + head, tl.full((), rows, tl.float64))
    tl.store(sums + (1 + field) * heads + head, total)
    tl.store(sums + (1 + FIELDS + field) * heads + head, square)
    tl.store(ends + field * heads + head, least)
    tl.store(ends + (FIELDS + field) * heads + head, -greatest)


@triton.jit
def _join(row_parts, key_parts, row_sums, row_ends, key_sums, key_ends, batches, heads, m, n, GROUP: tl.constexpr):
    head = tl.program_id(0)
    if head < heads:
        _join_part(row_parts, row_sums, row_ends, head, batches, heads, batches * m, ROW_FIELDS)
    else:
        _join_part(key_parts, key_sums, key_ends, head - heads, batches, heads // GROUP, batches * n, KEY_FIELDS)


@on_its_device
def head_sums(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    statistics: tuple[Tensor, ...],
    uniform: Float[Tensor, "m"],
    scale: float,
    left: int | None,
) -> tuple[Tables, Tables]:
    """Tables of the rows and of the keys, for entropy, log normaliser, variance and largest logit [b, h, m].

    Every row sees a key; `left` is the number of keys before its own that a row sees.
    """
    (b, h, m, d), (_, hk, n, v), device = query.shape, value.shape, query.device
    pointers = query, key, value, *statistics, uniform
    strides = *query.stride()[:3], *key.stride()[:3], *value.stride()[:3]
    kinds = tuple((t.dtype, t.data_ptr() % 16 == 0) for t in pointers)
    each, join = _call(device, (b, h, m, d), (hk, n, v), strides, kinds, scale, left)
    fields, of_keys, sums = ROW_FIELDS.value, KEY_FIELDS.value, SUMS.value
    numbers = (2 * fields + 1) * h, 2 * fields * h, (2 * of_keys + 1) * hk, 2 * of_keys * hk
    sizes = b * h * fields * sums, b * hk * of_keys * sums, *(count + count % 2 for count in numbers)  # aligned
    memory = torch.empty(sum(sizes), dtype=torch.float64, device=device).split(sizes)
    places, tables = memory[:2], [each[:count] for each, count in zip(memory[2:], numbers, strict=True)]
    stream = current_stream(device)
    each.launch(b * (h + hk), stream, (), (*pointers, *places), (*strides, scale, b, h, m, n, left, d, v))
    join.launch(h + hk, stream, (), (*places, *tables), (b, h, m, n))
    row_sums, row_ends, key_sums, key_ends = tables
    return Tables(row_sums.view(-1, h), row_ends.view(-1, h)), Tables(key_sums.view(-1, hk), key_ends.view(-1, hk))


@lru_cache(maxsize=256)
def _call(
    _device: torch.device,
    query_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    _strides: tuple[int, ...],
    _kinds: tuple[Any, ...],
    _scale: float,
    _left: int | None,
) -> tuple[Kernel, Kernel]:
    """Kernels of a call."""
    h, d, (hk, _, v) = query_shape[1], query_shape[3], value_shape
    sizes = triton.next_power_of_2(max(16, d)), triton.next_power_of_2(max(16, v))
    return Kernel(_sum_heads, (h // hk, TILE, *sizes), {"num_warps": 4}), Kernel(_join, (h // hk,), {"num_warps": 1})
