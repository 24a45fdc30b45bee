"""Losses of rows of logits and their slopes, one row at a time: the compiled form of torch code.

    one_positive     softplus(N - s_+ + margin)
    some_positives   by mean, mass or pair
    sigmoids         softplus of every negative and of minus the positive
    multi_similarity, circle                 the losses of similarity_losses.py, by label
    clip_sums, clip_merge, clip_rows         rows and columns together, in three stages

Read next: row_vectors.py (the loops over a row), softmax_losses.py and similarity_losses.py (the formulas).
"""

import math

import numpy

from ..simd import BYTES, WIDTH, move, put, read, read_byte, read_double, read_integer
from ..workers import compiled
from .row_fields import (
    BIAS,
    BIAS_STEP,
    BLOCK,
    DECOUPLED,
    FIRST,
    ITSELF,
    KEY_LABELS,
    KIND,
    LOSSES,
    MASK,
    POSITIVE,
    QUERY_LABELS,
    SETTINGS,
    SLOPE,
    SLOPE_ROW,
    SUMS,
    TOPS,
    M,
    N,
    place,
    up,
)
from .row_loss import CIRCLE, MASS, MULTI_SIMILARITY, ONE, PAIR, SIGMOIDS
from .row_products import block_logits, clear, query_gradients
from .row_vectors import accumulate, classify, combine, exponentiate, largest, scale

# A column sum below 2^-90 of the largest term has lost digits: terms below 2^-126 are 0.
COLUMN_SUM = 2.0**-90
INF = numpy.float32(numpy.inf)
TINY = float(numpy.finfo(numpy.float32).tiny)


# Rows ----------------------------------------------------------------------------------------------------------------
@compiled
def sigmoid(x: float) -> float:
    """1 / (1 + exp -x) without overflow."""
    e = math.exp(-abs(x))
    return (1.0 if x >= 0 else e) / (1.0 + e)


@compiled
def softplus(x: float) -> float:
    """log(1 + exp x) without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@compiled
def add_bias(p: int, s: int) -> None:
    """Add the bias of the keys to a row, and write -inf after its last number."""
    n, bias, step = read_integer(p, N), read_integer(p, BIAS), read_integer(p, BIAS_STEP)
    if bias != 0:
        if step == 1:
            for j in range(n):
                put(s, j, read(s, j) + read(bias, j))
        else:
            for j in range(n):
                put(s, j, read(s, j) + read(bias, j * step))
    for j in range(n, up(n, WIDTH)):
        put(s, j, -INF)


@compiled
def hide_labels(p: int, s: int, row: int, same: bool) -> None:
    """Set logits of keys with the label of the row (or with other labels) to -inf."""
    labels, label = read_integer(p, KEY_LABELS), read_integer(read_integer(p, QUERY_LABELS), row)
    for j in range(read_integer(p, N)):
        put(s, j, -INF if (read_integer(labels, j) == label) == same else read(s, j))


@compiled
def hide_masked(p: int, s: int, row: int) -> None:
    """Set logits to -inf where the mask is False."""
    n = read_integer(p, N)
    mask = read_integer(p, MASK) + row * n
    for j in range(n):
        put(s, j, read(s, j) if read_byte(mask, j) != 0 else -INF)


@compiled
def itself_of(p: int, row: int) -> int:
    """Index of the key that is neither positive nor negative, -1 if there is none."""
    itself = read_integer(p, ITSELF)
    return -1 if itself == 0 else row if itself == 1 else read_integer(itself, row)


@compiled
def hide_negatives(p: int, s: int, row: int) -> None:
    """Set the logits of all keys that cannot be negatives to -inf, apart from the positive."""
    if read_integer(p, QUERY_LABELS) != 0:
        hide_labels(p, s, row, True)
    if read_integer(p, MASK) != 0:
        hide_masked(p, s, row)
    itself = itself_of(p, row)
    if itself >= 0:
        put(s, itself, -INF)


@compiled
def log_sum(s: int, count: int, reference: float) -> tuple[float, float, float]:
    """Replace a row by exp(s - t), and return t, the sum z, and log z + t; a row may be all -inf."""
    top = float(largest(s, count))
    top = reference if top == -numpy.inf else top
    total = numpy.float64(exponentiate(s, count, top))
    return top, total, math.log(total) + top


@compiled
def positive_of(p: int, row: int) -> int:
    """Index of the positive of a row."""
    positive = read_integer(p, POSITIVE)
    return row if positive == 0 else read_integer(positive, row)


@compiled
def one_positive(p: int, s: int, row: int) -> float:
    """softplus(N - s_+ + margin), or without softplus if decoupled; the row becomes its slope."""
    count = up(read_integer(p, N), WIDTH) // WIDTH
    settings, index = read_integer(p, SETTINGS), positive_of(p, row)
    positive = numpy.float64(read(s, index))
    put(s, index, -INF)
    hide_negatives(p, s, row)
    _, total, negatives = log_sum(s, count, 0.0)
    behind = negatives - positive + read_double(settings, 2)
    coefficient, decoupled = read_double(settings, 0), read_integer(p, DECOUPLED) != 0
    share = coefficient * read_double(settings, 1) * (1.0 if decoupled else sigmoid(behind))
    scale(s, count, share / max(total, TINY))
    put(s, index, numpy.float32(-share))
    return coefficient * (behind if decoupled else softplus(behind))


@compiled
def sigmoids(p: int, s: int, row: int) -> float:
    """softplus of every negative and of minus the positive; the row becomes its slope."""
    count = up(read_integer(p, N), WIDTH) // WIDTH
    settings, index = read_integer(p, SETTINGS), positive_of(p, row)
    coefficient, weight = read_double(settings, 0), read_double(settings, 0) * read_double(settings, 1)
    positive = numpy.float64(read(s, index))
    put(s, index, -INF)
    hide_negatives(p, s, row)
    total = numpy.float64(classify(s, count)) + softplus(-positive)
    scale(s, count, weight)
    put(s, index, numpy.float32(-weight * sigmoid(-positive)))
    return coefficient * total


@compiled
def some_positives(p: int, s: int, row: int, above: int) -> float:
    """Loss of all keys with the label of the row against those with other labels; the row becomes its slope."""
    n, kind, settings = read_integer(p, N), read_integer(p, KIND), read_integer(p, SETTINGS)
    coefficient, weight = read_double(settings, 0), read_double(settings, 0) * read_double(settings, 1)
    count = up(n, WIDTH) // WIDTH
    move(above, s, count * WIDTH)
    hide_labels(p, above, row, False)
    but = itself_of(p, row)
    if but >= 0:
        put(above, but, -INF)
    hide_labels(p, s, row, True)
    labels, label = read_integer(p, KEY_LABELS), read_integer(read_integer(p, QUERY_LABELS), row)
    number, along = 0, 0.0
    for j in range(n):
        is_positive = (read_integer(labels, j) == label) & (j != but)
        number += is_positive
        along += numpy.float64(read(above, j)) if is_positive else 0.0
    if number == 0:
        clear(s, n)
        return 0.0
    _, below_total, negatives = log_sum(s, count, 0.0)
    if kind == PAIR:
        shares = loss = 0.0
        for j in range(n):
            if (read_integer(labels, j) == label) & (j != but):
                behind = negatives - numpy.float64(read(above, j))
                share = weight * sigmoid(behind) / number
                loss += softplus(behind)
                shares += share
                put(above, j, numpy.float32(-share))
            else:
                put(above, j, numpy.float32(0.0))
        scale(s, count, shares / max(below_total, TINY))
        accumulate(s, above, count, 1.0)
        return coefficient * loss / number
    _, above_total, positives = log_sum(above, count, 0.0)
    behind = negatives - positives
    share = sigmoid(behind)
    scale(s, count, weight * share / max(below_total, TINY))
    if kind == MASS:
        accumulate(s, above, count, -weight * share / above_total)
        return coefficient * softplus(behind)
    # p - 1/|P| of a positive is (a - 1/|P|) - share a, where a = 1 exactly for a single positive.
    over, each = numpy.float32(1.0 / above_total), numpy.float32(1.0 / number)
    c, share_of_a = numpy.float32(weight), numpy.float32(share)
    for j in range(n):
        a = read(above, j) * over
        is_positive = (read_integer(labels, j) == label) & (j != but)
        put(s, j, read(s, j) + (c * ((a - each) - share_of_a * a) if is_positive else numpy.float32(0.0)))
    return coefficient * (softplus(behind) + (positives - along / number))


@compiled
def hide_sides(p: int, below: int, above: int, row: int) -> None:
    """Set logits of pairs that are no negatives, or no positives, to -inf."""
    n = read_integer(p, N)
    hide_labels(p, below, row, True)
    hide_labels(p, above, row, False)
    itself = itself_of(p, row)
    if itself >= 0:
        put(above, itself, -INF)
    for j in range(n, up(n, WIDTH)):
        put(below, j, -INF)
        put(above, j, -INF)


@compiled
def multi_similarity(p: int, s: int, row: int, above: int) -> float:
    """softplus(A + a base) / a + softplus(N - b base) / b; the row becomes its slope."""
    count, settings = up(read_integer(p, N), WIDTH) // WIDTH, read_integer(p, SETTINGS)
    coefficient, weight = read_double(settings, 0), read_double(settings, 0) * read_double(settings, 1)
    alpha, beta, base = read_double(settings, 3), read_double(settings, 4), read_double(settings, 5)
    move(above, s, count * WIDTH)
    scale(above, count, -alpha)
    scale(s, count, beta)
    hide_sides(p, s, above, row)
    _, above_total, A = log_sum(above, count, 0.0)
    _, below_total, negatives = log_sum(s, count, 0.0)
    A, negatives = A + alpha * base, negatives - beta * base
    scale(s, count, weight * sigmoid(negatives) / max(below_total, TINY))
    accumulate(s, above, count, -weight * sigmoid(A) / max(above_total, TINY))
    return coefficient * (softplus(A) / alpha + softplus(negatives) / beta)


@compiled
def circle(p: int, s: int, row: int, above: int, similarity: int) -> float:
    """softplus(A + N), whose logits are similarities times weights; the row becomes its slope."""
    n, settings = read_integer(p, N), read_integer(p, SETTINGS)
    count = up(n, WIDTH) // WIDTH
    coefficient, weight = read_double(settings, 0), read_double(settings, 0) * read_double(settings, 1)
    r, over = numpy.float32(read_double(settings, 3)), numpy.float32(read_double(settings, 4))
    zero, one = numpy.float32(0.0), numpy.float32(1.0)
    move(similarity, s, count * WIDTH)
    for j in range(n):
        x = read(similarity, j)
        put(above, j, -over * max(one + r - x, zero) * (x - (one - r)))
        put(s, j, over * max(x + r, zero) * (x - r))
    hide_sides(p, s, above, row)
    _, above_total, A = log_sum(above, count, 0.0)
    _, below_total, negatives = log_sum(s, count, 0.0)
    behind = A + negatives  # -inf without positives or without negatives
    share = weight * sigmoid(behind)
    of_positives = numpy.float32(-share / max(above_total, TINY)) * over
    of_negatives = numpy.float32(share / max(below_total, TINY)) * over
    for j in range(n):
        x = read(similarity, j)
        slope = read(above, j) * of_positives * max(one + r - x, zero)
        put(s, j, slope + read(s, j) * of_negatives * max(x + r, zero))
    return coefficient * softplus(behind)


@compiled
def rows_of_block(p: int, first: int, last: int, scratch: int) -> None:
    """Losses, slopes and gradients of a block of rows."""
    block_logits(p, first, last)
    kind, slope, slope_row = read_integer(p, KIND), place(p, SLOPE), read_integer(p, SLOPE_ROW)
    start, losses = read_integer(p, FIRST), place(p, LOSSES)
    for i in range(first, last):
        s = slope + i * slope_row * BYTES
        add_bias(p, s)
        if kind == ONE:
            loss = one_positive(p, s, start + i)
        elif kind == SIGMOIDS:
            loss = sigmoids(p, s, start + i)
        elif kind == MULTI_SIMILARITY:
            loss = multi_similarity(p, s, start + i, scratch)
        elif kind == CIRCLE:
            loss = circle(p, s, start + i, scratch, scratch + slope_row * BYTES)
        else:
            loss = some_positives(p, s, start + i, scratch)
        put(losses, start + i, numpy.float32(loss))
    query_gradients(p, first, last)


# Rows and columns ----------------------------------------------------------------------------------------------------
@compiled
def clip_sums(p: int, first: int, last: int) -> None:
    """Exponentials of a block of rows about their maxima, and their column sums about the largest of these.

        e_ij = exp(s_ij - t_i),   z_i = sum_j e_ij,   c_j = sum_i e_ij exp(t_i - t),   t = max_i t_i

    One exponential of each pair gives both softmaxes, unless a column lies so far below t that its terms vanish.
    """
    n, slope, slope_row = read_integer(p, N), place(p, SLOPE), read_integer(p, SLOPE_ROW)
    count, m = up(n, WIDTH) // WIDTH, read_integer(p, M)
    tops, sums = place(p, TOPS), place(p, SUMS) + first // BLOCK * slope_row * BYTES
    block_logits(p, first, last)
    block_top = -INF
    for i in range(first, last):
        s = slope + i * slope_row * BYTES
        add_bias(p, s)
        put(tops, 2 * m + i, read(s, i))
        put(s, i, -INF)
        hide_negatives(p, s, i)
        top = largest(s, count)
        put(tops, i, top)
        block_top = max(block_top, top)
    block_top = numpy.float32(0.0) if block_top == -INF else block_top
    put(tops, m + first // BLOCK, block_top)
    clear(sums, slope_row)
    for i in range(first, last):
        s = slope + i * slope_row * BYTES
        top = read(tops, i)
        reference = 0.0 if top == -INF else numpy.float64(top)
        put(tops, 3 * m + i, exponentiate(s, count, reference))
        put(tops, i, numpy.float32(reference))
        accumulate(sums, s, count, math.exp(reference - numpy.float64(block_top)))


@compiled
def clip_merge(p: int) -> None:
    """Column sums of all blocks, then the factor of each column, and the losses.

    The number after the last column sum is 0 if one of them has lost digits.
    """
    m, slope_row = read_integer(p, M), read_integer(p, SLOPE_ROW)
    tops, sums, losses = place(p, TOPS), place(p, SUMS), place(p, LOSSES)
    blocks, count, settings = up(m, BLOCK) // BLOCK, up(m, WIDTH) // WIDTH, read_integer(p, SETTINGS)
    coefficient, weight = read_double(settings, 0), read_double(settings, 0) * read_double(settings, 1)
    top = -INF
    for block in range(blocks):
        top = max(top, read(tops, m + block))
    scale(sums, count, math.exp(numpy.float64(read(tops, m)) - numpy.float64(top)))
    for block in range(1, blocks):
        factor = math.exp(numpy.float64(read(tops, m + block)) - numpy.float64(top))
        accumulate(sums, sums + block * slope_row * BYTES, count, factor)
    sound = 1.0
    for j in range(m):
        column, positive = numpy.float64(read(sums, j)), numpy.float64(read(tops, 2 * m + j))
        if not column >= COLUMN_SUM:
            sound = 0.0
        row = numpy.float64(read(tops, 3 * m + j))
        by_row = math.log(row) + numpy.float64(read(tops, j)) - positive
        by_column = math.log(column) + numpy.float64(top) - positive
        row_share, column_share = sigmoid(by_row) * weight / 2, sigmoid(by_column) * weight / 2
        put(losses, j, numpy.float32(coefficient * (softplus(by_row) + softplus(by_column)) / 2))
        put(sums, j, numpy.float32(column_share / max(column, TINY)))
        put(tops, 2 * m + j, numpy.float32(-row_share - column_share))
        put(tops, 3 * m + j, numpy.float32(row_share / max(row, TINY)))
        put(tops, j, numpy.float32(math.exp(numpy.float64(read(tops, j)) - numpy.float64(top))))
    put(sums, slope_row - 1, numpy.float32(sound))


@compiled
def clip_rows(p: int, first: int, last: int, scratch: int) -> None:
    """Slopes and gradients of a block of rows."""
    slope, slope_row, m = place(p, SLOPE), read_integer(p, SLOPE_ROW), read_integer(p, M)
    tops, sums, count = place(p, TOPS), place(p, SUMS), up(m, WIDTH) // WIDTH
    for i in range(first, last):
        s = slope + i * slope_row * BYTES
        put(scratch, 0, read(tops, 3 * m + i))
        put(scratch, 1, read(tops, i))
        combine(s, sums, count, scratch)
        put(s, i, read(tops, 2 * m + i))
    query_gradients(p, first, last)
