# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Losses of rows of logits on a GPU, by tiles: their statistics, and slopes in half precision.

    tile_statistics    largest negative logit and sum of exponentials of every row (and column) of a tile
    finish_lines       the same over all tiles; loss of every row, and the numbers from which slopes are computed
    tile_slopes        W = dL / ds of a tile, in half precision

    one positive      W_j = share exp(s_j - N),  W_+ = -share,          share = sigmoid(N - s_+ + margin)
    rows and columns  the sum of both, with half of each share
    positives         W_p = a - 1/|P| - share a ("mean"), -share a ("mass"),   a = softmax over the positives
    sigmoids          W_j = sigmoid(s_j),  W_+ = -sigmoid(-s_+);  no statistics are needed

Logits are in units of log 2, so that an exponential is one instruction. The products are computed twice, which takes no
longer than writing them in float32 and reading them again. Sums have a fixed order: results are bitwise reproducible.

Read next: tiled_rows.py (the launches), softmax_losses.py (the losses).
"""

import triton
import triton.language as tl

from . import row_loss

ONE, MEAN, MASS, SIGMOIDS, CLIP = (
    tl.constexpr(kind) for kind in (row_loss.ONE, row_loss.MEAN, row_loss.MASS, row_loss.SIGMOIDS, row_loss.CLIP)
)
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1e30)  # the least maximum, so that a row without logits has sum 0
GROUP = tl.constexpr(8)  # tiles of rows that are computed together, so that keys are read from the cache


@triton.jit
def _place(m, n, BM: tl.constexpr, BN: tl.constexpr):
    """Row and column of a tile."""
    down, along = tl.cdiv(m, BM), tl.cdiv(n, BN)
    index, width = tl.program_id(0), GROUP * along
    first = index // width * GROUP
    height = tl.minimum(down - first, GROUP)
    return first + index % width % height, index % width // height


@triton.jit
def _logits(
    query, key, bias, row, column, n, d, scale, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Logits of a tile in units of log 2."""
    total = tl.zeros([BM, BN], tl.float32)
    for first in range(0, d, BK):
        q, k = query.load([row, first]), key.load([column, first])
        total = tl.dot(q, k.T, total, input_precision="ieee")
    s = total * (scale * LOG2_E)
    if bias is not None:
        columns = column + tl.arange(0, BN)
        s += tl.load(bias + columns, columns < n, 0.0)[None, :] * LOG2_E
    return s


@triton.jit
def _sides(
    rows, columns, chosen, row_labels, key_labels, mask, m, n,
    KIND: tl.constexpr, CHOSEN: tl.constexpr, OTHERS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Index of the chosen key of each row, and where pairs are positives and negatives.

    The chosen key is the positive, or with several positives the row itself, which is neither.
    """
    if CHOSEN == "index":
        index = tl.load(chosen + rows, rows < m, -1)
    else:
        index = rows
    is_chosen = columns[None, :] == index[:, None]
    if KIND == MEAN or KIND == MASS:  # noqa: SIM109
        same = (
            tl.load(row_labels + rows, rows < m, 0)[:, None] == tl.load(key_labels + columns, columns < n, 0)[None, :]
        )
        negative = ~same
        positive = same
        if CHOSEN != "none":
            positive = same & ~is_chosen
            negative = negative & ~is_chosen
    else:
        positive = is_chosen
        negative = ~is_chosen
        if row_labels is not None:
            mine = tl.load(row_labels + rows, rows < m, 0)
            negative = negative & (mine[:, None] != tl.load(key_labels + columns, columns < n, 0)[None, :])
        if mask is not None:
            place = mask + rows.to(tl.int64)[:, None] * n + columns[None, :]
            negative = negative & (tl.load(place, (rows < m)[:, None] & (columns < n)[None, :], 0) != 0)
        if OTHERS:
            negative = negative & (columns[None, :] != rows[:, None])
    if EDGE:
        there = (columns < n)[None, :] & (rows < m)[:, None]
        negative = negative & there
        positive = positive & there
    return index, positive, negative


@triton.jit(do_not_specialize=["first", "lines", "m", "n", "d"])
def tile_statistics(
    query, key, parts, of_columns, results, bias, chosen, row_labels, key_labels, mask,
    first, lines, m, n, d, scale,
    KIND: tl.constexpr, CHOSEN: tl.constexpr, OTHERS: tl.constexpr, EDGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Statistics of a tile: parts of rows [fields, tiles, lines] and columns [2, 1 + tiles, n], logits of positives."""
    down, along = _place(lines, n, BM, BN)
    row, column = first + down * BM, along * BN
    s = _logits(query, key, bias, row, column, n, d, scale, BM, BN, BK)
    rows, columns, line = row + tl.arange(0, BM), column + tl.arange(0, BN), down * BM + tl.arange(0, BM)
    index, positive, negative = _sides(
        rows, columns, chosen, row_labels, key_labels, mask, m, n, KIND, CHOSEN, OTHERS, EDGE
    )  # fmt: skip
    plane = tl.cdiv(n, BN) * lines.to(tl.int64)
    place, there = parts + along * lines.to(tl.int64) + line, line < lines
    below = tl.where(negative, s, -float("inf"))
    top = tl.maximum(tl.max(below, 1), LOW)
    tl.store(place, top, there)
    if KIND == MEAN or KIND == MASS:  # noqa: SIM109
        above = tl.where(positive, s, -float("inf"))
        highest = tl.maximum(tl.max(above, 1), LOW)
        e = tl.exp2(tl.where(positive, s - highest[:, None], below - top[:, None]))
        tl.store(place + plane, tl.sum(tl.where(negative, e, 0.0), 1), there)
        tl.store(place + 2 * plane, highest, there)
        tl.store(place + 3 * plane, tl.sum(tl.where(positive, e, 0.0), 1), there)
        tl.store(place + 4 * plane, tl.sum(tl.where(positive, s, 0.0), 1), there)
        tl.store(place + 5 * plane, tl.sum(tl.where(positive, 1.0, 0.0), 1), there)
    else:
        tl.store(place + plane, tl.sum(tl.exp2(below - top[:, None]), 1), there)
        here = (index >= column) & (index < column + BN) & (rows < m)
        if tl.max(here.to(tl.int32), 0) > 0:
            tl.store(results + 3 * m.to(tl.int64) + rows, tl.sum(tl.where(positive, s, 0.0), 1), here)
    if KIND == CLIP:
        top = tl.maximum(tl.max(below, 0), LOW)
        place = of_columns + (1 + down) * n.to(tl.int64) + columns
        tl.store(place, top, columns < n)
        plane = (1 + tl.cdiv(lines, BM)) * n.to(tl.int64)
        tl.store(place + plane, tl.sum(tl.exp2(below - top[None, :]), 0), columns < n)


@triton.jit
def _sum_of_tiles(parts, plane, stride, lines, there, first, end, BT: tl.constexpr, BR: tl.constexpr):
    """Largest logit of rows over all tiles, and the sum of their exponentials."""
    top, total = tl.zeros([BR], tl.float32) + LOW, tl.zeros([BR], tl.float32)
    for begin in range(first, end, BT):
        tile = begin + tl.arange(0, BT)
        place = parts + tile.to(tl.int64)[:, None] * stride + lines[None, :]
        known = (tile < end)[:, None] & there[None, :]
        tops = tl.load(place, known, LOW)
        risen = tl.maximum(top, tl.max(tops, 0))
        sums = tl.load(place + plane, known, 0.0) * tl.exp2(tops - risen[None, :])
        total, top = total * tl.exp2(top - risen) + tl.sum(sums, 0), risen
    return top, total


@triton.jit
def _plain_sum(parts, stride, lines, there, end, BT: tl.constexpr, BR: tl.constexpr):
    total = tl.zeros([BR], tl.float32)
    for begin in range(0, end, BT):
        tile = begin + tl.arange(0, BT)
        place = parts + tile.to(tl.int64)[:, None] * stride + lines[None, :]
        total += tl.sum(tl.load(place, (tile < end)[:, None] & there[None, :], 0.0), 0)
    return total


@triton.jit
def _softplus_and_sigmoid(x):
    """log(1 + exp x), by log(1 + y) = 2 artanh(y / (2 + y)) with all digits where it is small, and its derivative."""
    y = tl.exp2(-tl.abs(x) * LOG2_E)
    z = y / (2.0 + y)  # at most 1/3
    w = z * z
    series = 1.0 + w * (1 / 3 + w * (1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2.0 * z * series, tl.where(x > 0.0, 1.0, y) / (1.0 + y)


@triton.jit(do_not_specialize=["first", "lines", "stride", "count", "end", "m"])
def finish_lines(
    parts, results, positives, first, lines, stride, count, end, m, margin, weight, coefficient,
    KIND: tl.constexpr, DECOUPLED: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Results of rows (or columns): loss, log normaliser of slopes, share, log mass and 1 / number of positives.

    With one positive the fourth line is its logit instead.
    """
    line = tl.program_id(0) * BR + tl.arange(0, BR)
    row = first + line
    there = (line < lines) & (row < m)
    plane = count * stride.to(tl.int64)
    top, total = _sum_of_tiles(parts, plane, stride, line, there, 0, end, BT, BR)
    empty = total == 0.0  # no negatives
    N = tl.where(empty, -float("inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    if KIND == MEAN or KIND == MASS:  # noqa: SIM109
        highest, above = _sum_of_tiles(parts + 2 * plane, plane, stride, line, there, 0, end, BT, BR)
        along = _plain_sum(parts + 4 * plane, stride, line, there, end, BT, BR)
        number = _plain_sum(parts + 5 * plane, stride, line, there, end, BT, BR)
        some = number > 0.0
        inverse = 1.0 / tl.where(some, number, 1.0)
        mass = tl.where(some, highest + tl.log2(tl.where(some, above, 1.0)), 0.0)
        behind = (N - mass) * LOG_2
        loss, share = _softplus_and_sigmoid(behind)
        share = tl.where(some, share, 0.0)
        if KIND == MEAN:
            loss += (mass - along * inverse) * LOG_2
        loss = tl.where(some, loss, 0.0)
        tl.store(results + 3 * m.to(tl.int64) + row, mass, there)
        tl.store(results + 4 * m.to(tl.int64) + row, inverse, there)
    else:
        behind = (N - tl.load(positives + row, there, 0.0)) * LOG_2 + margin
        loss, share = _softplus_and_sigmoid(behind)
        if DECOUPLED:
            share = tl.zeros_like(behind) + 1.0
            loss = behind
    share *= weight
    none = empty | (share == 0.0)
    log_normalizer = tl.where(none, float("inf"), N - tl.log2(tl.where(none, 1.0, share)))
    tl.store(results + m.to(tl.int64) + row, log_normalizer, there)
    tl.store(results + 2 * m.to(tl.int64) + row, share, there)
    tl.store(results + row, loss * (weight * coefficient), there)


@triton.jit(do_not_specialize=["n", "first", "count"])
def join_columns(parts, n, first, count, BT: tl.constexpr, BR: tl.constexpr):
    """Add tiles of columns, from the first on, into tile 0, which has those of earlier rows."""
    column = tl.program_id(0) * BR + tl.arange(0, BR)
    there, plane = column < n, count * n.to(tl.int64)
    top, total = _sum_of_tiles(parts, plane, n, column, there, first, count, BT, BR)
    tl.store(parts + column, top, there)
    tl.store(parts + plane + column, total, there)


@triton.jit(do_not_specialize=["first", "lines", "m", "n", "d"])
def tile_slopes(
    query, key, slopes, results, of_columns, losses, bias, chosen, row_labels, key_labels, mask,
    first, lines, m, n, d, scale, coefficient,
    KIND: tl.constexpr, CHOSEN: tl.constexpr, OTHERS: tl.constexpr, EDGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Slopes of a tile, and with sigmoids the losses of its rows."""
    down, along = _place(lines, n, BM, BN)
    row, column = first + down * BM, along * BN
    s = _logits(query, key, bias, row, column, n, d, scale, BM, BN, BK)
    rows, columns, line = row + tl.arange(0, BM), column + tl.arange(0, BN), down * BM + tl.arange(0, BM)
    _, positive, negative = _sides(
        rows, columns, chosen, row_labels, key_labels, mask, m, n, KIND, CHOSEN, OTHERS, EDGE
    )  # fmt: skip
    if KIND == SIGMOIDS:
        s = tl.where(positive, -s, tl.where(negative, s, -float("inf"))) * LOG_2
        loss, slope = _softplus_and_sigmoid(s)
        tl.store(losses + along * lines.to(tl.int64) + line, tl.sum(loss, 1) * coefficient, line < lines)
        slope = tl.where(positive, -slope, slope)
    else:
        there, plane = rows < m, m.to(tl.int64)
        N = tl.load(results + plane + rows, there, float("inf"))
        share = tl.load(results + 2 * plane + rows, there, 0.0)
        if KIND == MEAN or KIND == MASS:  # noqa: SIM109
            mass = tl.load(results + 3 * plane + rows, there, 0.0)
            e = tl.exp2(tl.where(positive, s - mass[:, None], tl.where(negative, s, -float("inf")) - N[:, None]))
            above = -share[:, None] * e
            if KIND == MEAN:
                inverse = tl.load(results + 4 * plane + rows, there, 0.0)
                above += e - inverse[:, None]  # exactly 0 for a single positive
            slope = tl.where(positive, above, e)
        else:
            below = tl.where(negative, s, -float("inf"))
            slope = tl.exp2(below - N[:, None])
            shares = share[:, None]
            if KIND == CLIP:
                within, plane = columns < n, n.to(tl.int64)
                slope += tl.exp2(below - tl.load(of_columns + plane + columns, within, float("inf"))[None, :])
                shares += tl.load(of_columns + 2 * plane + columns, within, 0.0)[None, :]
            slope = tl.where(positive, -shares, slope)
    slopes.store([down * BM, column], slope.to(slopes.dtype))
