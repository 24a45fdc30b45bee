"""Products of matrices for losses of rows: centred keys, logits, and gradients from slopes.

    centre_keys, transpose_panel    c = k - mean k, and factor c^T in panels of LANES keys side by side
    block_logits                    s = factor q c^T         a block of rows, panel by panel
    query_gradients                 dq = W c                 a block of rows
    key_gradients                   dk += W^T q              a block of keys

Read next: row_losses.py (from logits to slopes), ../simd.py (the product of a few rows).
"""

import numpy

from ..simd import BYTES, COLUMNS, LANES, ROWS, WIDTH, move, product, put, read, read_double, read_integer, turned
from ..workers import compiled
from .row_fields import (
    CENTRED,
    CENTRES,
    GRAD_BIAS,
    GRAD_KEY,
    GRAD_QUERY,
    KEY,
    KEY_ROW,
    PANEL,
    QUERY,
    QUERY_ROW,
    SETTINGS,
    SLOPE,
    SLOPE_ROW,
    TAIL,
    D,
    M,
    N,
    place,
    up,
)
from .row_vectors import accumulate, scale

TERMS = 256  # terms of a product that are added at a time, so that its operands stay in the cache

score, gather, gather_one = product(COLUMNS, "nothing"), product(COLUMNS, "all"), product(1, "all")
turn = turned("set")


@compiled
def add_products(o: int, o_row: int, x: int, x_row: int, k: int, k_row: int, k_term: int, terms: int, d: int) -> None:
    """Add sum_t k_it x_t to ROWS rows of d numbers."""
    wide = d // LANES * LANES
    for c in range(0, wide, LANES):
        gather(o + c * BYTES, o_row, 0, x + c * BYTES, x_row, k, k_row, k_term, terms)
    for c in range(wide, d, WIDTH):
        gather_one(o + c * BYTES, o_row, 0, x + c * BYTES, x_row, k, k_row, k_term, terms)


@compiled
def clear(address: int, count: int) -> None:
    """Set numbers to 0."""
    for i in range(count):
        put(address, i, numpy.float32(0.0))


@compiled
def centre_keys(p: int) -> None:
    """Write k - mean k, zeros after the last key, and the last rows of the queries padded to ROWS."""
    n, d, key, row = read_integer(p, N), read_integer(p, D), read_integer(p, KEY), read_integer(p, KEY_ROW)
    to = place(p, CENTRES)
    mean = to + up(n, LANES) * d * BYTES
    clear(mean, d)
    if read_integer(p, CENTRED):
        for j in range(n):
            accumulate(mean, key + j * row * BYTES, d // WIDTH, 1.0)
        scale(mean, d // WIDTH, -1.0 / n)
    for j in range(n):
        at = to + j * d * BYTES
        move(at, key + j * row * BYTES, d)
        accumulate(at, mean, d // WIDTH, 1.0)
    clear(to + n * d * BYTES, (up(n, LANES) - n) * d)
    m, query_row = read_integer(p, M), read_integer(p, QUERY_ROW)
    whole_rows, tail = m // ROWS * ROWS, place(p, TAIL)
    for i in range(whole_rows, m):
        move(tail + (i - whole_rows) * d * BYTES, read_integer(p, QUERY) + i * query_row * BYTES, d)
    clear(tail + (m - whole_rows) * d * BYTES, (ROWS - m + whole_rows) * d)


@compiled
def transpose_panel(p: int, panel: int) -> None:
    """Write factor times LANES centred keys side by side."""
    d = read_integer(p, D)
    source = place(p, CENTRES) + panel * LANES * d * BYTES
    to = place(p, PANEL) + panel * LANES * d * BYTES
    for j in range(0, LANES, WIDTH):
        for t in range(0, d, WIDTH):
            turn(to + (t * LANES + j) * BYTES, LANES, source + (j * d + t) * BYTES, d)
    scale(to, LANES * d // WIDTH, read_double(read_integer(p, SETTINGS), 1))


@compiled
def block_logits(p: int, first: int, last: int) -> None:
    """Logits of a block of rows."""
    n, d, slope, slope_row = read_integer(p, N), read_integer(p, D), place(p, SLOPE), read_integer(p, SLOPE_ROW)
    m, query, query_row = read_integer(p, M), read_integer(p, QUERY), read_integer(p, QUERY_ROW)
    for panel in range(up(n, LANES) // LANES):
        x = place(p, PANEL) + panel * LANES * d * BYTES
        for i in range(first, last, ROWS):
            o = slope + (i * slope_row + panel * LANES) * BYTES
            if i + ROWS <= m:
                score(o, slope_row, 0, x, LANES, query + i * query_row * BYTES, query_row, 1, d)
            else:
                score(o, slope_row, 0, x, LANES, place(p, TAIL), d, 1, d)


@compiled
def query_gradients(p: int, first: int, last: int) -> None:
    """Gradients dq = W c of a block of rows."""
    to = read_integer(p, GRAD_QUERY)
    if to == 0:
        return
    n, d, slope, slope_row = read_integer(p, N), read_integer(p, D), place(p, SLOPE), read_integer(p, SLOPE_ROW)
    clear(to + first * d * BYTES, (up(last, ROWS) - first) * d)
    for t in range(0, n, TERMS):
        x, terms = place(p, CENTRES) + t * d * BYTES, min(TERMS, n - t)
        for i in range(first, last, ROWS):
            k = slope + (i * slope_row + t) * BYTES
            add_products(to + i * d * BYTES, d, x, d, k, slope_row, 1, terms, d)


@compiled
def key_gradients(p: int, first: int, last: int) -> None:
    """Gradients of a block of keys, dk += W^T q, and of their bias, the column sums of W over factor."""
    m, d, slope, slope_row = read_integer(p, M), read_integer(p, D), place(p, SLOPE), read_integer(p, SLOPE_ROW)
    to, query, query_row = read_integer(p, GRAD_KEY), read_integer(p, QUERY), read_integer(p, QUERY_ROW)
    if to != 0:
        for t in range(0, m, TERMS):
            x, terms = query + t * query_row * BYTES, min(TERMS, m - t)
            for j in range(first, last, ROWS):
                k = slope + (t * slope_row + j) * BYTES
                add_products(to + j * d * BYTES, d, x, query_row, k, 1, slope_row, terms, d)
    bias = read_integer(p, GRAD_BIAS)
    if bias != 0:
        over = numpy.float32(1.0 / read_double(read_integer(p, SETTINGS), 1))
        for i in range(m):
            for j in range(first, last):
                put(bias, j, read(bias, j) + over * read(slope, i * slope_row + j))
