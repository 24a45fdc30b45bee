"""Attention, its statistics and its gradients by tiles, compiled by numba: one pass over the keys.

    s_mn, G_m, H_m, V_m and the output                              as defined in scoring.py and reference.py
    p    = exp(s - G),  dp_mn = <do_m, v_n>,  y = s - E             recomputed tile by tile backward
    ds   = p (dp + c0 + y (c1 + c2 y)),  du = ds (1 - tanh²(u / softcap))
    dv_n = sum_m p do_m,  dk_n = scale sum_m du q_m,  dq_m = scale sum_n du k_n,  dbias = ds

The gradient of a loss L(o, G, H, V) has c0 = dL/dG - <dL/do, o> - V dL/dV,  c1 = 2 dL/dV - dL/dH,  c2 = dL/dV.

The lanes of vectors hold queries: LANES of them are a group, and a group is combined with TILE keys at a time,

    S^T = K Q^T             [keys, lanes]       every matrix product here is `product` of ../simd.py: rows of numbers
    O^T = a O^T + V^T P^T   [v, lanes]          times rows of vectors, where the factor a of the running maximum
    dV += P^T dO            [keys, v]           costs nothing
    dK += dU^T Q            [keys, d]
    dQ^T += K^T dU^T        [d, lanes]

so that maxima, sums and exponentials never cross lanes. No two tasks write the same memory. A forward task is a block
of queries; a backward task is an entire key head (five products per tile) or, if there are fewer heads than threads,
blocks of queries for dQ and then blocks of keys for dK, dV (seven). Both sum in the same order, and the edges of tiles
do not depend on tasks, so that results are bitwise equal for any number of threads. A few queries, as in decoding,
would leave most lanes empty: then the lanes hold keys, and a task is one row.

Read next: ../simd.py (the vector instructions), cpu.py (the distribution of tasks).
"""

import math
from typing import Any, NamedTuple

import numpy
from numba import njit

from ..simd import (
    BYTES,
    COLUMNS,
    LANES,
    ROWS,
    WIDTH,
    absorb,
    cap,
    move,
    multiply,
    product,
    put,
    read,
    read_byte,
    read_integer,
    turned,
    weigh,
)
from ..workers import compiled

TILE = 96  # keys per tile, a multiple of ROWS: a tile of logits (24 KiB with AVX512) stays in the nearest cache
CHUNK = 8 * TILE  # keys per task, where blocks of keys are tasks
LOWEST = float(numpy.finfo(numpy.float32).min)  # start of the running maximum: -inf - LOWEST is not NaN
LOG2 = math.log(2.0)
ROW_SUMS = 5  # rows m, z, e, c, a of `absorb`; G, c0, E, c1, c2 of `weigh`


class RowAddress(NamedTuple):
    """Address and strides of a tensor [b, h, rows, columns]; address 0: no tensor, stride 0: shared."""

    address: int
    batch: int = 0
    head: int = 0
    row: int = 0


NOWHERE = RowAddress(0)


class AttentionProblem(NamedTuple):
    """Arguments of a kernel, as integers."""

    query: RowAddress
    key: RowAddress
    value: RowAddress
    bias: RowAddress
    mask: RowAddress
    segments: RowAddress
    output: RowAddress  # forward: the output, written; backward: its gradient, read
    grad_query: RowAddress
    grad_key: RowAddress
    grad_value: RowAddress
    grad_bias: RowAddress
    rows: (
        int  # address of float32 [., b, h, m]: forward G, H, V, top, G - top; backward G, c0 and E, c1, c2 where curved
    )
    b: int
    h: int
    key_heads: int
    m: int
    n: int
    d: int
    v: int
    left: int
    right: int
    groups: int  # number per block of queries; 0 if every row is a task
    curved: int  # 1 if c1 and c2 are given
    bias_b: int
    bias_h: int
    tasks: int  # backward: of four kinds, the last for the bias
    whole_tasks: int
    query_tasks: int
    key_tasks: int


class Wanted(NamedTuple):
    """Which gradients a task writes."""

    query: bool
    key: bool
    bias: bool


# For sums whose terms may be reordered, so that LLVM can vectorise them; NaN and -inf keep their meaning.
summing: Any = njit(
    error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, fastmath={"reassoc", "contract"}
)
score, mix, gather = (product(COLUMNS, keep) for keep in ("nothing", "scaled", "all"))
gather_pair, gather_one = product(2, "all"), product(1, "all")
set_square, add_square, hide_square = (turned(action) for action in ("set", "add", "hide"))
weigh_straight, weigh_curved = weigh(curved=False), weigh(curved=True)


# ------------------------------------------------------------------------------------------------------- addresses
@compiled
def start(place: RowAddress, b: int, h: int, row: int, size: int) -> int:
    """Address of a row of a tensor with elements of `size` bytes."""
    return place.address + (b * place.batch + h * place.head + row * place.row) * size


@compiled
def up(number: int, step: int) -> int:
    """Round a number up to a multiple of step."""
    return (number + step - 1) // step * step


@compiled
def copy(to: int, to_row: int, source: int, source_row: int, rows: int, columns: int) -> None:
    """Copy rows: to[r, c] = source[r, c]."""
    for r in range(rows):
        move(to + r * to_row * BYTES, source + r * source_row * BYTES, columns)


@compiled
def fill(to: int, count: int, number: float) -> None:
    """Write `count` equal numbers."""
    for i in range(count):
        put(to, i, number)


@compiled
def scaled(to: int, count: int, factor: float) -> None:
    """Scale numbers in place: to[i] = factor to[i]."""
    for i in range(count):
        put(to, i, read(to, i) * numpy.float32(factor))


@compiled
def turn(to: int, to_row: int, source: int, source_row: int, rows: int, columns: int, adding: bool) -> None:
    """Transpose: to[c, r] = source[r, c], or += if `adding`; in squares, and element by element at the edges."""
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
def add_bias(
    problem: AttentionProblem, b: int, h: int, first_row: int, rows: int, first_key: int, keys: int, s: int
) -> None:
    """Add the bias to a tile: S^T += bias^T."""
    bias = start(problem.bias, b, h, first_row, BYTES) + first_key * BYTES
    if problem.bias.row != 0:
        turn(s, LANES, bias, problem.bias.row, rows, keys, True)
        return
    for j in range(keys):
        of_key = read(bias, j)
        for x in range(LANES):
            put(s + j * LANES * BYTES, x, read(s + j * LANES * BYTES, x) + of_key)


@compiled
def hide_masked(
    problem: AttentionProblem, b: int, h: int, first_row: int, rows: int, first_key: int, keys: int, s: int
) -> None:
    """Set S^T to -inf where the mask is False."""
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
def hide_outside(problem: AttentionProblem, first_row: int, rows: int, first_key: int, keys: int, s: int) -> None:
    """Set S^T to -inf except where j - right <= at <= j + left, for key j and the query at position `at`."""
    first_at = first_row + problem.n - problem.m
    if first_key + keys - 1 <= first_at + problem.right and first_key >= first_at + rows - 1 - problem.left:
        return
    for j in range(keys):
        begin = min(max(first_key + j - problem.right - first_at, 0), LANES)
        end = max(min(first_key + j + problem.left - first_at + 1, LANES), 0)
        fill(s + j * LANES * BYTES, begin, -numpy.inf)
        fill(s + (j * LANES + end) * BYTES, LANES - end, -numpy.inf)


@compiled
def hide_other_segments(
    problem: AttentionProblem, b: int, first_row: int, rows: int, first_key: int, keys: int, s: int
) -> None:
    """Set S^T to -inf where key and query differ in segment; positions before the first key have none."""
    segments, first_at = start(problem.segments, b, 0, 0, 8), first_row + problem.n - problem.m
    before = min(max(-first_at, 0), rows)
    for j in range(keys):
        of_key, row = read_integer(segments, first_key + j), s + j * LANES * BYTES
        fill(row, before, -numpy.inf)
        for x in range(before, rows):
            same = read_integer(segments, first_at + x) == of_key
            put(row, x, read(row, x) if same else numpy.float32(-numpy.inf))


@compiled
def is_hidden_tile(
    problem: AttentionProblem, b: int, h: int, first_row: int, rows: int, first_key: int, keys: int
) -> bool:
    """Return whether a tile can be skipped: a mask of keys hides all of it, or no query is in its segments."""
    if problem.mask.address != 0 and problem.mask.row == 0:
        mask, visible = start(problem.mask, b, h, 0, 1) + first_key, 0
        for j in range(keys):
            visible |= read_byte(mask, j)
        if visible == 0:
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
    problem: AttentionProblem,
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
    """Compute a tile S^T [keys, lanes] of scaled queries Q^T and keys k, and the slope of the soft cap."""
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
def band(problem: AttentionProblem, first_row: int, last_row: int, low: int, high: int) -> tuple[int, int]:
    """Range of the keys low <= n < high that rows first_row <= m < last_row may see; starts at a multiple of ROWS."""
    offset = problem.n - problem.m
    begin = max(low, first_row + offset - problem.left)
    return begin // ROWS * ROWS, min(high, last_row + offset + problem.right)


# --------------------------------------------------------------------------------------------------------- forward
@compiled
def attend(problem: AttentionProblem, scale: float, softcap: float, task: int, memory: int) -> None:
    """Forward task: one block of queries with all keys that it sees."""
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
            if keys <= 0 or is_hidden_tile(problem, b, h, row, rows, first_key, keys):
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
def conclude(problem: AttentionProblem, b: int, h: int, first_row: int, x: int, sums: int) -> float:
    """Write the statistics of row first_row + x from the sums in lane x; return 1 / z, the factor of its output.

    A row without mass has z = 0.
    """
    to = problem.rows + ((b * problem.h + h) * problem.m + first_row) * BYTES
    size = problem.b * problem.h * problem.m
    top, z, e, centred = read(sums, x), read(sums, LANES + x), read(sums, 2 * LANES + x), read(sums, 3 * LANES + x)
    log_mass, inverse = numpy.log(z), numpy.float32(1.0) / z
    G, H, V = top + log_mass, log_mass - e * inverse * LOG2, centred * inverse * (LOG2 * LOG2)
    if z == 0.0:
        top, inverse, G, H, V, log_mass = -numpy.inf, 0.0, -numpy.inf, 0.0, 0.0, 0.0
    if numpy.isnan(z):
        top = z
    put(to, x, G)
    put(to, size + x, 0.0 if H < 0.0 else H)
    put(to, 2 * size + x, 0.0 if V < 0.0 else V)
    put(to, 3 * size + x, top)
    put(to, 4 * size + x, log_mass)
    return inverse


@compiled
def finish(problem: AttentionProblem, b: int, h: int, first_row: int, rows: int, sums: int, outputs: int) -> None:
    """Write the statistics and output of a group from its sums."""
    over_mass = sums + 4 * LANES * BYTES
    for x in range(rows):
        put(over_mass, x, conclude(problem, b, h, first_row, x, sums))
    for i in range(problem.v):
        output = outputs + i * LANES * BYTES
        for x in range(LANES):
            put(output, x, read(output, x) * read(over_mass, x))
    turn(start(problem.output, b, h, first_row, BYTES), problem.output.row, outputs, LANES, problem.v, rows, False)


# ----------------------------------------------------------------------------------------------------- few queries
@summing
def dot(x: int, y: int, size: int) -> Any:
    """Inner product <x, y>."""
    total = numpy.float32(0.0)
    for i in range(size):
        total += read(x, i) * read(y, i)
    return total


@compiled
def add_multiples(to: int, weights: int, rows: int, row: int, size: int) -> None:
    """Add four weighted rows: to += w_0 x_0 + w_1 x_1 + w_2 x_2 + w_3 x_3; four at a time, to write `to` less often."""
    a, b, c, d = read(weights, 0), read(weights, 1), read(weights, 2), read(weights, 3)
    x, y, z, w = rows, rows + row * BYTES, rows + 2 * row * BYTES, rows + 3 * row * BYTES
    for i in range(size):
        put(to, i, read(to, i) + (a * read(x, i) + b * read(y, i)) + (c * read(z, i) + d * read(w, i)))


@compiled
def attend_row(problem: AttentionProblem, scale: float, softcap: float, task: int, memory: int) -> None:
    """Forward task: one query with all keys that it sees; logits in the lanes, sums merged over the lanes."""
    n, d, v = problem.n, problem.d, problem.v
    b, h, row = task // problem.m // problem.h, task // problem.m % problem.h, task % problem.m
    key_head, at = h // (problem.h // problem.key_heads), row + n - problem.m
    low, high = max(0, at - problem.left), min(n, at + problem.right + 1)
    keys = max(0, high - low)
    rows = up(keys, LANES) // LANES

    query, output = memory, memory + d * BYTES
    sums = output + v * BYTES
    s = sums + ROW_SUMS * LANES * BYTES
    move(query, start(problem.query, b, h, row, BYTES), d)
    scaled(query, d, scale)
    of_key = start(problem.key, b, key_head, low, BYTES)
    for j in range(keys):
        put(s, j, dot(query, of_key + j * problem.key.row * BYTES, d))
    fill(s + keys * BYTES, rows * LANES - keys, 0.0)
    if softcap > 0.0:
        cap(s, 0, rows, softcap)
    if problem.bias.address != 0:
        bias = start(problem.bias, b, h, row, BYTES) + low * BYTES
        for j in range(keys):
            put(s, j, read(s, j) + read(bias, j))
    if problem.mask.address != 0:
        mask = start(problem.mask, b, h, row, 1) + low
        for j in range(keys):
            put(s, j, read(s, j) if read_byte(mask, j) != 0 else numpy.float32(-numpy.inf))
    if problem.segments.address != 0:
        segments = start(problem.segments, b, 0, 0, 8)
        for j in range(keys):
            same = at >= 0 and read_integer(segments, low + j) == read_integer(segments, max(at, 0))
            put(s, j, read(s, j) if same else numpy.float32(-numpy.inf))
    fill(s + keys * BYTES, rows * LANES - keys, -numpy.inf)

    top = numpy.float32(LOWEST)
    for j in range(keys):
        top = max(top, read(s, j))
    fill(sums, LANES, top)
    fill(sums + LANES * BYTES, (ROW_SUMS - 1) * LANES, 0.0)
    for tile in range(0, rows, TILE):
        absorb(s + tile * LANES * BYTES, min(TILE, rows - tile), sums)
    mass, e, centred = 0.0, 0.0, 0.0
    for x in range(LANES):
        mass += read(sums, LANES + x)
        e += read(sums, 2 * LANES + x)
    for x in range(LANES):
        z = read(sums, LANES + x)
        if z != 0.0:
            away = read(sums, 2 * LANES + x) / z - e / mass
            centred += read(sums, 3 * LANES + x) + z * away * away
    fill(sums, LANES, top)
    put(sums, LANES, mass)
    put(sums, 2 * LANES, e)
    put(sums, 3 * LANES, centred)

    fill(output, v, 0.0)
    values, whole_keys = start(problem.value, b, key_head, low, BYTES), keys - keys % 4
    for j in range(0, whole_keys, 4):
        add_multiples(output, s + j * BYTES, values + j * problem.value.row * BYTES, problem.value.row, v)
    for j in range(whole_keys, keys):
        weight, value = read(s, j), values + j * problem.value.row * BYTES
        for i in range(v):
            put(output, i, read(output, i) + weight * read(value, i))
    over_mass = conclude(problem, b, h, row, 0, sums)
    scaled(output, v, over_mass)
    move(start(problem.output, b, h, row, BYTES), output, v)


# -------------------------------------------------------------------------------------------------------- backward
@compiled
def gather_rows(to: int, to_row: int, weights: int, keys: int, vectors: int, row: int, rows: int, columns: int) -> None:
    """Add to[j, :] += sum_x weights[j, x] vectors[x, :] over `rows` lanes x; widths are multiples of WIDTH."""
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
    problem: AttentionProblem, b: int, h: int, first_row: int, rows: int, first_key: int, keys: int, ds: int
) -> None:
    """Add ds to dbias, summed over the queries if they share the bias."""
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
    problem: AttentionProblem,
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
    """Gradients from the block of queries at `first` and the keys low <= n < high; low is a multiple of TILE."""
    d, v, d_rows = problem.d, problem.v, up(problem.d, ROWS)
    d_wide, v_wide = up(d, WIDTH), up(v, WIDTH)
    last = min(first + LANES * problem.groups, problem.m)
    groups = up(last - first, LANES) // LANES
    key_head = h // (problem.h // problem.key_heads)
    low, high = band(problem, first, last, low, high)
    if low >= high and not wanted.query:
        return

    query_t = memory  # per group: Q^T, dO^T, dQ^T, Q, dO, rows
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
            if keys <= 0 or is_hidden_tile(problem, b, h, row, rows, first_key, keys):
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
                # Rows up to the next multiple of ROWS are written too, and get zeros added.
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
def differentiate_task(problem: AttentionProblem, scale: float, softcap: float, task: int, memory: int) -> None:
    """Backward task, from four consecutive lists: entire key heads, blocks of queries, of keys, of the bias."""
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
