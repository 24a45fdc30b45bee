"""Attention, its statistics and its gradients on the CPU: compiled by numba, one pass over the keys, linear memory.

    s_mn, G_m, H_m, V_m and the output                              as defined in scoring.py and reference.py
    p    = exp(s - G),  dp_mn = <do_m, v_n>,  y = s - E             recomputed tile by tile backward
    ds   = p (dp + c0 + y (c1 + c2 y)),  du = ds (1 - tanh²(u / softcap))
    dv_n = sum_m p do_m,  dk_n = scale sum_m du q_m,  dq_m = scale sum_n du k_n,  dbias = ds

The gradient of a loss L(o, G, H, V) has c0 = dL/dG - <dL/do, o> - V dL/dV,  c1 = 2 dL/dV - dL/dH,  c2 = dL/dV.

Queries sit in the lanes of vectors: LANES of them are a group, and a group meets TILE keys at a time,

    S^T = K Q^T             [keys, lanes]       every matrix product here is `product` of simd.py: rows of numbers
    O^T = a O^T + V^T P^T   [v, lanes]          times rows of vectors, where the factor a of the running maximum
    dV += P^T dO            [keys, v]           costs nothing
    dK += dU^T Q            [keys, d]
    dQ^T += K^T dU^T        [d, lanes]

so that maxima, sums and exponentials never cross lanes. Threads take tasks from one counter. A task owns what it
writes: a block of queries forward; backward all of a key head (five products per tile) or, when heads are fewer than
threads, blocks of queries for dQ and then blocks of keys for dK, dV (seven). Both sum in the same order, and the edges
of tiles do not depend on tasks, so results are the same to the bit for any number of threads.

Read next: simd.py (the vector instructions), scoring.py (which keys are seen).
"""

import ctypes
import math
import os
import threading
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numba import cfunc, njit, types

from .._typing import Float, Tensor
from . import simd
from .reference import Statistics
from .scoring import Scoring, Sight
from .simd import (
    BYTES,
    COLUMNS,
    INT64,
    LANES,
    ROWS,
    WIDTH,
    Writer,
    absorb,
    cap,
    instruction,
    move,
    multiply,
    product,
    put,
    read,
    read_byte,
    read_double,
    read_integer,
    take,
    turned,
    weigh,
    whole,
)

TILE = 96  # keys per tile, a multiple of ROWS: a tile of logits (24 KiB with AVX512) stays in the nearest cache
GROUPS = 4  # groups of queries that share a tile of keys
CHUNK = 8 * TILE  # keys per task, where blocks of keys are tasks
EVERYWHERE = 1 << 40  # a band without an end
LOWEST = float(numpy.finfo(numpy.float32).min)  # where the maximum starts: -inf - LOWEST is no NaN
LOG2 = math.log(2.0)
ROW_SUMS = 5  # rows m, z, e, c, a of `absorb`; G, c0, E, c1, c2 of `weigh`
LINE = 64  # bytes of a cache line
WORTH_A_THREAD = 1 << 21  # multiplications, about 50 microseconds


class Place(NamedTuple):
    """Where the rows of a tensor [b, h, rows, columns] lie: address 0 is no tensor, stride 0 is shared."""

    address: int
    batch: int = 0
    head: int = 0
    row: int = 0


NOWHERE = Place(0)


class Problem(NamedTuple):
    """All a kernel has to know, as integers."""

    query: Place
    key: Place
    value: Place
    bias: Place
    mask: Place
    segments: Place
    output: Place  # forward: written; backward: its gradient, read
    grad_query: Place
    grad_key: Place
    grad_value: Place
    grad_bias: Place
    rows: int  # address of float32 [., b, h, m]: forward G, H, V, maximum; backward G, c0 and E, c1, c2 where curved
    b: int
    h: int
    key_heads: int
    m: int
    n: int
    d: int
    v: int
    left: int
    right: int
    groups: int  # per block of queries
    curved: int  # whether c1 and c2 are given
    bias_b: int
    bias_h: int
    tasks: int  # backward of four kinds, the rest of them for the bias
    whole_tasks: int
    query_tasks: int
    key_tasks: int


class Wanted(NamedTuple):
    """Which gradients a task writes."""

    query: bool
    key: bool
    bias: bool


# Called by compiled code alone; what Python calls are the two workers below, and they are what is kept on disk.
compiled: Any = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]
score, mix, gather = (product(COLUMNS, keep) for keep in ("nothing", "scaled", "all"))
gather_pair, gather_one = product(2, "all"), product(1, "all")
set_square, add_square, hide_square = (turned(action) for action in ("set", "add", "hide"))
weigh_straight, weigh_curved = weigh(curved=False), weigh(curved=True)


# ------------------------------------------------------------------------------------------------------- addresses
@compiled
def start(place: Place, b: int, h: int, row: int, size: int) -> int:
    """The address of a row of a tensor whose numbers are `size` bytes."""
    return place.address + (b * place.batch + h * place.head + row * place.row) * size


@compiled
def up(number: int, step: int) -> int:
    """The least multiple of step that is not below the number."""
    return (number + step - 1) // step * step


@compiled
def copy(to: int, to_row: int, source: int, source_row: int, rows: int, columns: int) -> None:
    """to[r, c] = source[r, c]."""
    for r in range(rows):
        move(to + r * to_row * BYTES, source + r * source_row * BYTES, columns)


@compiled
def fill(to: int, count: int, number: float) -> None:
    """`count` equal numbers."""
    for i in range(count):
        put(to, i, number)


@compiled
def scaled(to: int, count: int, factor: float) -> None:
    """to[i] = factor to[i]."""
    for i in range(count):
        put(to, i, read(to, i) * numpy.float32(factor))


@compiled
def turn(to: int, to_row: int, source: int, source_row: int, rows: int, columns: int, adding: bool) -> None:
    """to[c, r] = source[r, c], added to what is there if `adding`: in squares, and number by number at the edges."""
    square_rows, square_columns = rows - rows % WIDTH, columns - columns % WIDTH
    for r in range(0, square_rows, WIDTH):
        for c in range(0, square_columns, WIDTH):
            target, origin = to + (c * to_row + r) * BYTES, source + (r * source_row + c) * BYTES
            if adding:
                add_square(target, to_row, origin, source_row)
            else:
                set_square(target, to_row, origin, source_row)
    for r in range(rows):
        for c in range(square_columns if r < square_rows else 0, columns):
            before = read(to, c * to_row + r) if adding else numpy.float32(0.0)
            put(to, c * to_row + r, before + read(source, r * source_row + c))


# ---------------------------------------------------------------------------------------------------------- logits
@compiled
def add_bias(problem: Problem, b: int, h: int, first_row: int, rows: int, first_key: int, keys: int, s: int) -> None:
    """S^T += bias^T."""
    bias = start(problem.bias, b, h, first_row, BYTES) + first_key * BYTES
    if problem.bias.row != 0:
        turn(s, LANES, bias, problem.bias.row, rows, keys, True)
        return
    for j in range(keys):
        of_key = read(bias, j)
        for x in range(LANES):
            put(s + j * LANES * BYTES, x, read(s + j * LANES * BYTES, x) + of_key)


@compiled
def hide_masked(problem: Problem, b: int, h: int, first_row: int, rows: int, first_key: int, keys: int, s: int) -> None:
    """S^T = -inf where the mask is False."""
    mask, row = start(problem.mask, b, h, first_row, 1) + first_key, problem.mask.row
    if row == 0:
        for j in range(keys):
            if read_byte(mask, j) == 0:
                fill(s + j * LANES * BYTES, LANES, -numpy.inf)
        return
    square_rows, square_keys = rows - rows % WIDTH, keys - keys % WIDTH
    for x in range(0, square_rows, WIDTH):
        for j in range(0, square_keys, WIDTH):
            hide_square(s + (j * LANES + x) * BYTES, LANES, mask + x * row + j, row)
    for x in range(rows):
        for j in range(square_keys if x < square_rows else 0, keys):
            if read_byte(mask, x * row + j) == 0:
                put(s, j * LANES + x, -numpy.inf)


@compiled
def hide_outside(problem: Problem, first_row: int, rows: int, first_key: int, keys: int, s: int) -> None:
    """S^T = -inf where key j and the query at position `at` do not have j - right <= at <= j + left."""
    first_at = first_row + problem.n - problem.m
    if first_key + keys - 1 <= first_at + problem.right and first_key >= first_at + rows - 1 - problem.left:
        return
    for j in range(keys):
        begin = min(max(first_key + j - problem.right - first_at, 0), LANES)
        end = max(min(first_key + j + problem.left - first_at + 1, LANES), 0)
        fill(s + j * LANES * BYTES, begin, -numpy.inf)
        fill(s + (j * LANES + end) * BYTES, LANES - end, -numpy.inf)


@compiled
def hide_other_segments(problem: Problem, b: int, first_row: int, rows: int, first_key: int, keys: int, s: int) -> None:
    """S^T = -inf where key and query are of different segments; positions before the first key are of none."""
    segments, first_at = start(problem.segments, b, 0, 0, 8), first_row + problem.n - problem.m
    before = min(max(-first_at, 0), rows)
    for j in range(keys):
        of_key, row = read_integer(segments, first_key + j), s + j * LANES * BYTES
        fill(row, before, -numpy.inf)
        for x in range(before, rows):
            same = read_integer(segments, first_at + x) == of_key
            put(row, x, read(row, x) if same else numpy.float32(-numpy.inf))


@compiled
def unseen(problem: Problem, b: int, h: int, first_row: int, rows: int, first_key: int, keys: int) -> bool:
    """Whether a tile can be left out: a mask over keys hides all of it, or none of the queries is of its segments."""
    if problem.mask.address != 0 and problem.mask.row == 0:
        mask, seen = start(problem.mask, b, h, 0, 1) + first_key, 0
        for j in range(keys):
            seen |= read_byte(mask, j)
        if seen == 0:
            return True
    if problem.segments.address != 0:
        segments, first_at = start(problem.segments, b, 0, 0, 8), first_row + problem.n - problem.m
        low = high = read_integer(segments, first_key)
        for j in range(first_key, first_key + keys):
            low, high = min(low, read_integer(segments, j)), max(high, read_integer(segments, j))
        meeting = 0
        for at in range(max(first_at, 0), first_at + rows):
            meeting += low <= read_integer(segments, at) <= high
        return meeting == 0
    return False


@compiled
def logits(
    problem: Problem,
    softcap: float,
    b: int,
    h: int,
    first_row: int,
    rows: int,
    first_key: int,
    keys: int,
    queries: int,
    k: int,
    k_row: int,
    s: int,
    slope: int,
) -> None:
    """A tile S^T [keys, lanes] of queries Q^T, with the scale in them, and keys k; and the slope of the soft cap."""
    for j in range(0, keys, ROWS):
        score(s + j * LANES * BYTES, LANES, 0, queries, LANES, k + j * k_row * BYTES, k_row, 1, problem.d)
    if softcap > 0.0:
        cap(s, slope, keys, softcap)
    if problem.bias.address != 0:
        add_bias(problem, b, h, first_row, rows, first_key, keys, s)
    if problem.mask.address != 0:
        hide_masked(problem, b, h, first_row, rows, first_key, keys, s)
    if problem.segments.address != 0:
        hide_other_segments(problem, b, first_row, rows, first_key, keys, s)
    hide_outside(problem, first_row, rows, first_key, keys, s)


@compiled
def band(problem: Problem, first_row: int, last_row: int, low: int, high: int) -> tuple[int, int]:
    """The keys low <= n < high that rows first_row <= m < last_row may see; the first one on the grid of ROWS."""
    offset = problem.n - problem.m
    begin = max(low, first_row + offset - problem.left)
    return begin // ROWS * ROWS, min(high, last_row + offset + problem.right)


# --------------------------------------------------------------------------------------------------------- forward
@compiled
def attend(problem: Problem, scale: float, softcap: float, task: int, memory: int) -> None:
    """One block of queries against all keys it sees."""
    d, v, v_rows = problem.d, problem.v, up(problem.v, ROWS)
    block = LANES * problem.groups
    blocks = up(problem.m, block) // block
    b, h, first = task // blocks // problem.h, task // blocks % problem.h, task % blocks * block
    key_head = h // (problem.h // problem.key_heads)
    last = min(first + block, problem.m)
    groups = up(last - first, LANES) // LANES

    query_size, output_size, sums_size = d * LANES * BYTES, v_rows * LANES * BYTES, ROW_SUMS * LANES * BYTES
    queries = memory
    outputs = queries + problem.groups * query_size
    sums = outputs + problem.groups * output_size
    s = sums + problem.groups * sums_size
    k = s + TILE * LANES * BYTES
    values = k + TILE * d * BYTES

    for g in range(groups):
        row = first + g * LANES
        rows = min(LANES, last - row)
        to = queries + g * query_size
        turn(to, LANES, start(problem.query, b, h, row, BYTES), problem.query.row, rows, d, False)
        scaled(to, d * LANES, scale)
        fill(sums + g * sums_size, LANES, LOWEST)
        fill(sums + g * sums_size + LANES * BYTES, (ROW_SUMS - 1) * LANES, 0.0)
        fill(outputs + g * output_size, v_rows * LANES, 0.0)

    low, high = band(problem, first, last, 0, problem.n)
    for tile in range(low // TILE * TILE, high, TILE):
        end = min(tile + TILE, high)
        copy(k, d, start(problem.key, b, key_head, tile, BYTES), problem.key.row, end - tile, d)
        copy(values, v_rows, start(problem.value, b, key_head, tile, BYTES), problem.value.row, end - tile, v)
        for g in range(groups):
            row = first + g * LANES
            rows = min(LANES, last - row)
            first_key, last_key = band(problem, row, row + rows, tile, end)
            keys, skipped = last_key - first_key, first_key - tile
            if keys <= 0 or unseen(problem, b, h, row, rows, first_key, keys):
                continue
            of_query, of_key, of_sums = queries + g * query_size, k + skipped * d * BYTES, sums + g * sums_size
            logits(problem, softcap, b, h, row, rows, first_key, keys, of_query, of_key, d, s, 0)
            absorb(s, keys, of_sums)
            factor = of_sums + 4 * LANES * BYTES
            for i in range(0, v_rows, ROWS):
                output = outputs + g * output_size + i * LANES * BYTES
                mix(output, LANES, factor, s, LANES, values + (skipped * v_rows + i) * BYTES, 1, v_rows, keys)

    for g in range(groups):
        row = first + g * LANES
        finish(problem, b, h, row, min(LANES, last - row), sums + g * sums_size, outputs + g * output_size)


@compiled
def finish(problem: Problem, b: int, h: int, first_row: int, rows: int, sums: int, outputs: int) -> None:
    """From the sums of a group to its statistics and output. A row without mass is known by z = 0."""
    to = problem.rows + ((b * problem.h + h) * problem.m + first_row) * BYTES
    size = problem.b * problem.h * problem.m
    over_mass = sums + 4 * LANES * BYTES
    for x in range(rows):
        top, z, e, centred = read(sums, x), read(sums, LANES + x), read(sums, 2 * LANES + x), read(sums, 3 * LANES + x)
        log_mass, inverse = numpy.log(z), numpy.float32(1.0) / z
        G, H, V = top + log_mass, log_mass - e * inverse * LOG2, centred * inverse * (LOG2 * LOG2)
        if z == 0.0:
            top, inverse, G, H, V = -numpy.inf, 0.0, -numpy.inf, 0.0, 0.0
        if numpy.isnan(z):
            top = z
        put(over_mass, x, inverse)
        put(to, x, G)
        put(to, size + x, 0.0 if H < 0.0 else H)
        put(to, 2 * size + x, 0.0 if V < 0.0 else V)
        put(to, 3 * size + x, top)
    for i in range(problem.v):
        output = outputs + i * LANES * BYTES
        for x in range(LANES):
            put(output, x, read(output, x) * read(over_mass, x))
    turn(start(problem.output, b, h, first_row, BYTES), problem.output.row, outputs, LANES, problem.v, rows, False)


# -------------------------------------------------------------------------------------------------------- backward
@compiled
def gather_rows(to: int, to_row: int, weights: int, keys: int, vectors: int, row: int, rows: int, columns: int) -> None:
    """to[j, :] += sum_x weights[j, x] vectors[x, :] over `rows` lanes x; widths are multiples of WIDTH."""
    for j in range(0, keys, ROWS):
        weight = weights + j * LANES * BYTES
        c = 0
        while c + LANES <= columns:
            target, vector = to + (j * to_row + c) * BYTES, vectors + c * BYTES
            gather(target, to_row, 0, vector, row, weight, LANES, 1, rows)
            c += LANES
        while c + 2 * WIDTH <= columns:
            target, vector = to + (j * to_row + c) * BYTES, vectors + c * BYTES
            gather_pair(target, to_row, 0, vector, row, weight, LANES, 1, rows)
            c += 2 * WIDTH
        if c < columns:
            target, vector = to + (j * to_row + c) * BYTES, vectors + c * BYTES
            gather_one(target, to_row, 0, vector, row, weight, LANES, 1, rows)


@compiled
def gather_bias(
    problem: Problem, b: int, h: int, first_row: int, rows: int, first_key: int, keys: int, ds: int
) -> None:
    """dbias += ds, over the queries too where they share the bias."""
    to = start(problem.grad_bias, b, h, first_row, BYTES) + first_key * BYTES
    if problem.grad_bias.row != 0:
        turn(to, problem.grad_bias.row, ds, LANES, keys, rows, True)
        return
    for j in range(keys):
        total = numpy.float32(0.0)
        for x in range(rows):
            total += read(ds, j * LANES + x)
        put(to, j, read(to, j) + total)


@compiled
def differentiate(
    problem: Problem,
    scale: float,
    softcap: float,
    b: int,
    h: int,
    first: int,
    low: int,
    high: int,
    wanted: Wanted,
    memory: int,
) -> None:
    """The block of queries that begins at `first` against the keys low <= n < high; low is on the grid of TILE."""
    d, v, d_rows = problem.d, problem.v, up(problem.d, ROWS)
    d_wide, v_wide = up(d, WIDTH), up(v, WIDTH)
    last = min(first + LANES * problem.groups, problem.m)
    groups = up(last - first, LANES) // LANES
    key_head = h // (problem.h // problem.key_heads)
    low, high = band(problem, first, last, low, high)
    if low >= high and not wanted.query:
        return

    query_t = memory  # one group after the other: Q^T, dO^T, dQ^T, Q, dO, rows
    output_t = query_t + d * LANES * BYTES
    grad_t = output_t + v * LANES * BYTES
    query_rows = grad_t + d_rows * LANES * BYTES
    output_rows = query_rows + d_wide * LANES * BYTES
    constants = output_rows + v_wide * LANES * BYTES
    group_size = constants + ROW_SUMS * LANES * BYTES - memory
    s = memory + problem.groups * group_size
    ds = s + TILE * LANES * BYTES
    slope = ds + TILE * LANES * BYTES
    k = slope + TILE * LANES * BYTES
    values = k + TILE * d_rows * BYTES

    size = problem.b * problem.h * problem.m
    for g in range(groups):
        row, at = first + g * LANES, g * group_size
        rows = min(LANES, last - row)
        query, output = start(problem.query, b, h, row, BYTES), start(problem.output, b, h, row, BYTES)
        turn(query_t + at, LANES, query, problem.query.row, rows, d, False)
        turn(output_t + at, LANES, output, problem.output.row, rows, v, False)
        copy(query_rows + at, d_wide, query, problem.query.row, rows, d)
        copy(output_rows + at, v_wide, output, problem.output.row, rows, v)
        scaled(query_t + at, d * LANES, scale)
        scaled(query_rows + at, d_wide * LANES, scale)
        fill(grad_t + at, d_rows * LANES, 0.0)
        of_rows = problem.rows + ((b * problem.h + h) * problem.m + row) * BYTES
        copy(constants + at, LANES, of_rows, size, ROW_SUMS if problem.curved != 0 else 2, rows)

    for tile in range(low // TILE * TILE, high, TILE):
        end = min(tile + TILE, high)
        copy(k, d_rows, start(problem.key, b, key_head, tile, BYTES), problem.key.row, end - tile, d)
        copy(values, v, start(problem.value, b, key_head, tile, BYTES), problem.value.row, end - tile, v)
        for g in range(groups):
            row, at = first + g * LANES, g * group_size
            rows = min(LANES, last - row)
            first_key, last_key = band(problem, row, row + rows, tile, end)
            keys, skipped = last_key - first_key, first_key - tile
            if keys <= 0 or unseen(problem, b, h, row, rows, first_key, keys):
                continue
            of_key, of_value = k + skipped * d_rows * BYTES, values + skipped * v * BYTES
            logits(problem, softcap, b, h, row, rows, first_key, keys, query_t + at, of_key, d_rows, s, slope)
            for j in range(0, keys, ROWS):
                score(ds + j * LANES * BYTES, LANES, 0, output_t + at, LANES, of_value + j * v * BYTES, v, 1, v)
            if problem.curved != 0:
                weigh_curved(s, ds, keys, constants + at)
            else:
                weigh_straight(s, ds, keys, constants + at)
            if wanted.bias:
                gather_bias(problem, b, h, row, rows, first_key, keys, ds)
            if softcap > 0.0:
                multiply(ds, slope, keys)
            if wanted.query:
                for i in range(0, d_rows, ROWS):
                    to = grad_t + at + i * LANES * BYTES
                    gather(to, LANES, 0, ds, LANES, of_key + i * BYTES, 1, d_rows, keys)
            if wanted.key:
                # Rows up to the next multiple of ROWS are written too, with nothing to add.
                beyond = (up(keys, ROWS) - keys) * LANES
                fill(s + keys * LANES * BYTES, beyond, 0.0)
                fill(ds + keys * LANES * BYTES, beyond, 0.0)
                to = start(problem.grad_value, b, key_head, first_key, BYTES)
                gather_rows(to, problem.grad_value.row, s, keys, output_rows + at, v_wide, rows, v_wide)
                to = start(problem.grad_key, b, key_head, first_key, BYTES)
                gather_rows(to, problem.grad_key.row, ds, keys, query_rows + at, d_wide, rows, d_wide)

    if wanted.query:
        for g in range(groups):
            row, grad = first + g * LANES, grad_t + g * group_size
            scaled(grad, d * LANES, scale)
            to = start(problem.grad_query, b, h, row, BYTES)
            turn(to, problem.grad_query.row, grad, LANES, d, min(LANES, last - row), False)


@compiled
def differentiate_task(problem: Problem, scale: float, softcap: float, task: int, memory: int) -> None:
    """A task from four lists, one after the other: whole key heads, blocks of queries, of keys, of the bias."""
    block = LANES * problem.groups
    blocks, chunks = up(problem.m, block) // block, up(problem.n, CHUNK) // CHUNK
    in_group = problem.h // problem.key_heads
    first, last, low, high = 0, problem.m, 0, problem.n
    if task < problem.whole_tasks:
        wanted = Wanted(True, True, False)
        b, h = task // problem.key_heads, task % problem.key_heads * in_group
        last_b, last_h = b + 1, h + in_group
    elif task < problem.whole_tasks + problem.query_tasks:
        wanted = Wanted(True, False, False)
        task -= problem.whole_tasks
        b, h, first = task // blocks // problem.h, task // blocks % problem.h, task % blocks * block
        last_b, last_h, last = b + 1, h + 1, first + 1
    elif task < problem.whole_tasks + problem.query_tasks + problem.key_tasks:
        wanted = Wanted(False, True, False)
        task -= problem.whole_tasks + problem.query_tasks
        b, h = task // chunks // problem.key_heads, task // chunks % problem.key_heads * in_group
        low = task % chunks * CHUNK
        last_b, last_h, high = b + 1, h + in_group, min(low + CHUNK, problem.n)
    else:
        wanted = Wanted(False, False, True)
        task -= problem.whole_tasks + problem.query_tasks + problem.key_tasks
        b, h, low = task // chunks // problem.bias_h, task // chunks % problem.bias_h, task % chunks * CHUNK
        high = min(low + CHUNK, problem.n)
        last_b = b + 1 if problem.bias_b == problem.b else problem.b
        last_h = h + 1 if problem.bias_h == problem.h else problem.h
    for each_b in range(b, last_b):
        for each_h in range(h, last_h):
            for row in range(first, last, block):
                differentiate(problem, scale, softcap, each_b, each_h, row, low, high, wanted, memory)


# --------------------------------------------------------------------------------------------------------- threads
HEADER = 5  # numbers before a problem in memory: next task, next thread, workspace, bytes of it per thread, two floats
PLACES = Problem._fields.index("rows")  # the fields before it are places
PLACE = types.NamedUniTuple(types.int64, len(Place._fields), Place)
PROBLEM = types.NamedTuple([PLACE] * PLACES + [types.int64] * (len(Problem._fields) - PLACES), Problem)


@instruction(result=PROBLEM)
def problem_at(write: Writer, plan: Any) -> Any:
    """The problem written at an address, as `run` writes it: field after field, places as four numbers."""
    index = count(HEADER)

    def number() -> Any:
        return write.load(plan, whole(next(index)), INT64)

    def place() -> Any:
        return write.context.make_tuple(write.builder, PLACE, [number() for _ in PLACE])

    fields = [place() if kind is PLACE else number() for kind in PROBLEM]
    return write.context.make_tuple(write.builder, PROBLEM, fields)


@compiled
def setting(plan: int, index: int) -> float:
    """Scale or soft cap."""
    return read_double(read_integer(plan, 4), index)


@compiled
def memory_of_thread(plan: int) -> int:
    """Each thread that asks has its own."""
    return read_integer(plan, 2) + take(plan + 8) * read_integer(plan, 3)


def compile_worker(function: Callable[[int], None]) -> Any:
    """A C function, kept on disk where any folder for it can be written."""
    kind = types.void(types.int64)
    try:
        return cfunc(kind, error_model="numpy", cache=True)(function)
    except RuntimeError:
        return cfunc(kind, error_model="numpy")(function)


@cache
def edition() -> int:
    """A number that changes with simd.py: of what it keeps, numba compares this file and what a worker encloses."""
    return zlib.crc32(Path(simd.__file__).read_bytes())


@cache
def attend_worker() -> Any:
    """What a thread does forward: take tasks until there are none. Compiled at the first call."""
    enclosed = edition()

    def attend_all(plan: int) -> None:
        _ = enclosed
        problem, memory = problem_at(plan), memory_of_thread(plan)
        task = take(plan)
        while task < problem.tasks:
            attend(problem, setting(plan, 0), setting(plan, 1), task, memory)
            task = take(plan)

    return compile_worker(attend_all)


@cache
def differentiate_worker() -> Any:
    """The same backward."""
    enclosed = edition()

    def differentiate_all(plan: int) -> None:
        _ = enclosed
        problem, memory = problem_at(plan), memory_of_thread(plan)
        task = take(plan)
        while task < problem.tasks:
            differentiate_task(problem, setting(plan, 0), setting(plan, 1), task, memory)
            task = take(plan)

    return compile_worker(differentiate_all)


class Team:
    """The threads of this process: those of torch where its OpenMP library can be asked, else a pool of our own.

    Threads of torch spin for a while after an operation of torch: others would wait for the cores they hold.
    A forked child has none of its parent's threads, and OpenMP does not notice: there, the pool is used.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.of_torch = _parallel_of_torch()
        self.pool: ThreadPoolExecutor | None = None

    def run(self, worker: Any, threads: int, plan: int) -> None:
        """Let `worker(plan)` be run by so many threads, this one among them, and wait."""
        if self.pid != os.getpid():
            self.pid, self.of_torch, self.pool = os.getpid(), None, None
        if threads == 1:
            worker.ctypes(plan)
        elif self.of_torch is not None:
            self.of_torch(worker.address, plan, threads, 0)
        else:
            self.pool = self.pool or ThreadPoolExecutor(os.cpu_count(), "gradlogz")
            others = [self.pool.submit(worker.ctypes, plan) for _ in range(threads - 1)]
            worker.ctypes(plan)
            for other in others:
                other.cancel() or other.result()  # no tasks are left: who has not begun need not


def _parallel_of_torch() -> Any:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP library that torch has loaded, if any."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        libraries = {line.split()[-1] for line in lines if "libgomp" in line or "libiomp5" in line}
        # Other packages bring an OpenMP of their own, with threads of its own.
        (library,) = [name for name in libraries if Path(torch.__file__).parent in Path(name).parents] or libraries
        parallel = ctypes.CDLL(library).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


class Workspace(threading.local):
    """Memory kept from call to call by each thread that calls: fresh pages cost more than a small problem."""

    memory = numpy.zeros(0, numpy.uint8)
    address = 0  # its first cache line

    def reserve(self, size: int) -> int:
        if self.memory.size < size + LINE:
            self.memory = numpy.zeros(size + LINE, numpy.uint8)
            self.address = -(-self.memory.ctypes.data // LINE) * LINE
        return self.address


team = cache(Team)
workspace = Workspace()


def run(worker: Any, problem: Problem, scoring: Scoring, threads: int, numbers: int) -> None:
    """Write the plan and have it worked off; `numbers` is the workspace of a thread."""
    threads = max(1, min(threads, problem.tasks))
    size = -(-numbers * BYTES // LINE) * LINE
    settings = array("d", (scoring.scale, scoring.softcap or 0.0))
    header = (0, 0, workspace.reserve(threads * size), size, settings.buffer_info()[0])
    plan = array("q", chain(header, *problem[:PLACES], problem[PLACES:]))  # type: ignore[arg-type, type-var]
    team().run(worker, threads, plan.buffer_info()[0])


# --------------------------------------------------------------------------------------------------------- drivers
def forward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    *,
    statistics: bool = True,  # noqa: ARG001  # they cost under 5 %, so one kernel serves both
) -> Statistics:
    """All statistics of every row, float32."""
    (b, h, m, d), v = query.shape, value.shape[-1]
    query, key, value, sight = _usable(query), _usable(key), _usable(value), _usable_sight(sight)
    output, rows = query.new_empty(b, h, m, v), query.new_empty(4, b, h, m)
    threads = _threads(query, key, v)
    groups = GROUPS
    while groups > 1 and b * h * -(-m // (LANES * groups)) < 2 * threads:
        groups //= 2
    tasks = b * h * -(-m // (LANES * groups))
    problem = _problem(query, key, value, sight, scoring, output, rows, groups, tasks)
    numbers = groups * LANES * (d + v + ROWS + ROW_SUMS) + TILE * (LANES + d + v + ROWS)
    run(attend_worker(), problem, scoring, threads, numbers)
    return Statistics(output, *rows.unbind(0))


def backward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    log_normalizer: Float[Tensor, "b h m"],
    mean_logit: Float[Tensor, "b h m"],
    grad_output: Float[Tensor, "b h m v"],
    c0: Float[Tensor, "b h m"],
    c1: Float[Tensor, "b h m"] | None,
    c2: Float[Tensor, "b h m"] | None,
    *,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias; rows without mass come with a log normaliser of +inf."""
    (b, h, m, d), (_, hk, n, v) = query.shape, value.shape
    query, key, value, sight = _usable(query), _usable(key), _usable(value), _usable_sight(sight)
    grad_output = _usable(grad_output)
    curved = c1 is not None or c2 is not None
    rows = [log_normalizer, c0]
    if curved:
        nothing = torch.zeros_like(c0)
        rows += [mean_logit, nothing if c1 is None else c1, nothing if c2 is None else c2]
    of_rows = torch.stack(rows)

    padded = -(-n // ROWS) * ROWS
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_key = query.new_zeros(b, hk, padded, -(-d // WIDTH) * WIDTH)
    grad_value = query.new_zeros(b, hk, padded, -(-v // WIDTH) * WIDTH)
    grad_bias = query.new_zeros(sight.bias.shape) if needs_bias and sight.bias is not None else None
    bias_b, bias_h = (1, 1) if grad_bias is None else grad_bias.shape[:2]

    threads = _threads(query, key, 2 * v + 2 * d)
    groups = max(1, min(GROUPS, GROUPS * 256 // (d + v)))
    blocks, chunks = -(-m // (LANES * groups)), -(-n // CHUNK)
    # Whole key heads cost five products a tile, queries and keys apart seven, but shared out evenly.
    is_whole = 5 * threads * -(-b * hk // threads) <= 7 * b * hk
    whole_tasks, query_tasks, key_tasks = (b * hk, 0, 0) if is_whole else (0, b * h * blocks, b * hk * chunks)
    tasks = whole_tasks + query_tasks + key_tasks + (0 if grad_bias is None else bias_b * bias_h * chunks)
    problem = _problem(query, key, value, sight, scoring, grad_output, of_rows, groups, tasks)._replace(
        grad_query=_place(grad_query),
        grad_key=_place(grad_key),
        grad_value=_place(grad_value),
        grad_bias=_place(grad_bias),
        curved=int(curved),
        bias_b=bias_b,
        bias_h=bias_h,
        whole_tasks=whole_tasks,
        query_tasks=query_tasks,
        key_tasks=key_tasks,
    )
    per_group = 3 * d + 2 * v + ROWS + 2 * WIDTH + ROW_SUMS
    numbers = groups * LANES * per_group + TILE * (3 * LANES + d + v + ROWS)
    run(differentiate_worker(), problem, scoring, threads, numbers)
    return grad_query, grad_key[..., :n, :d], grad_value[..., :n, :v], grad_bias


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    scoring: Scoring,
    output: Tensor,
    rows: Tensor,
    groups: int,
    tasks: int,
) -> Problem:
    """What forward and backward share."""
    (b, h, m, d), (_, hk, n, v) = query.shape, value.shape
    segments = sight.segments
    return Problem(
        query=_place(query),
        key=_place(key),
        value=_place(value),
        bias=_place(sight.bias),
        mask=_place(sight.mask),
        segments=NOWHERE if segments is None else Place(segments.data_ptr(), n if segments.shape[0] > 1 else 0),
        output=_place(output),
        grad_query=NOWHERE,
        grad_key=NOWHERE,
        grad_value=NOWHERE,
        grad_bias=NOWHERE,
        rows=rows.data_ptr(),
        b=b,
        h=h,
        key_heads=hk,
        m=m,
        n=n,
        d=d,
        v=v,
        left=EVERYWHERE if scoring.left is None else min(scoring.left, EVERYWHERE),
        right=EVERYWHERE if scoring.right is None else min(scoring.right, EVERYWHERE),
        groups=groups,
        curved=0,
        bias_b=1,
        bias_h=1,
        tasks=tasks,
        whole_tasks=0,
        query_tasks=0,
        key_tasks=0,
    )


def _threads(query: Tensor, key: Tensor, products: int) -> int:
    """As many as torch has, but one where a second would come too late."""
    b, h, m, d = query.shape
    return torch.get_num_threads() if b * h * m * key.shape[2] * (d + products) > WORTH_A_THREAD else 1


def _usable(tensor: Tensor) -> Tensor:
    """With its rows in one piece."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _usable_sight(sight: Sight) -> Sight:
    bias, mask, segments = sight
    return Sight(
        None if bias is None else _usable(bias),
        None if mask is None else _usable(mask),
        None if segments is None else segments.to(torch.int64).contiguous(),
    )


def _place(tensor: Tensor | None) -> Place:
    if tensor is None:
        return NOWHERE
    (b, h, rows, _), stride = tensor.shape, tensor.stride()
    return Place(tensor.data_ptr(), stride[0] if b > 1 else 0, stride[1] if h > 1 else 0, stride[2] if rows > 1 else 0)
