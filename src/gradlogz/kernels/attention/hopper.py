# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# ruff: noqa: RUF005, SIM102 (Gluon does not know *, and joins only constants by `and`)
"""Attention with its statistics on a Hopper GPU (H100, H200), in Gluon: products and exponentials at the same time.

    producer      one warp           brings tiles of queries, keys and values into shared memory
    consumers     two warpgroups     64 queries each: logits, exponentials, sums, output

    consumer      | S_j = Q K_j^T    | max | exponentials and sums of S_j           | P_j = exponentials in 16 bits
    tensor cores  | S_j ------------ | O += P_{j-1} V_{j-1} --------------- |       | S_{j+1} ---

    A ring of slots brings the tiles, from the last keys to the first: K_0 are the last keys that the queries see. Each
    slot holds a tile of keys and the tile of values before it, also across two tiles of queries t and t + 1, here of
    four tiles of keys each; 0: a tile of zeros.

    t       [K_0, 0]  [K_1, V_0]  [K_2, V_1]  [K_3, V_2]
    t + 1   [K_0, V_3]  [K_1, V_0]  ...                      the last values of t are added here
    end     [0, V_3]

    Two barriers per slot: loaded (the tiles have arrived) and released (both consumers have read them).

    x = s - ref,  e = exp x,  z = sum e,  a = sum e x,  b = sum e x^2           moments about a reference, as in gpu.py
    G = ref + log z,  H = log z - a / z,  V = b / z - (a / z)^2

Tensor cores and exponentials take nearly the same time, so each must run while the other does. A consumer issues two
products at once: the logits of a tile and the output of the tile before it. It waits for the logits, and takes their
exponentials while the second product runs. The sums stay with the thread that holds the logits; four threads share a
row, and add their sums once per tile of queries. The reference is raised to the maximum of a row only when the maximum
is larger by more than LAZY, a factor 2^LAZY of the exponentials, so that the output is seldom rescaled. The host plans
which program computes which tiles of queries, so that all programs end at about the same time.

The compiler (ptxas) undoes the overlap unless _hold prevents it. tests/kernels/test_the_hopper_kernel_overlaps.py
compiles for this GPU on any machine and counts the overlapped instructions.
tests/kernels/test_every_wait_of_the_hopper_kernel_has_its_arrival.py runs this source and its barriers in Python.

The kernel takes half-precision operands with head sizes up to 128, bands (causal, windows) in which every query sees a
key, segments, and grouped heads; gpu.py computes the rest. Logits are in units of log 2.

Read next: hopper_backward.py (the backward pass), gpu.py (the same sums without overlap, and masks).
"""

import heapq
from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..._typing import Float, Tensor
from .hopper_tiles import LOG2_E, by_rows, exp2, hide_columns, multiprocessors
from .launching import (
    Kernel,
    RecordedLaunch,
    aligned,
    current_stream,
    dense,
    empty_output,
    empty_rows,
    kept,
    on_its_device,
)
from .reference import Statistics, StatisticsAndMean
from .scoring import Scoring, Sight
from .segment_spans import SegmentSpans

__all__ = ["forward", "recorded", "takes"]

LOG_2 = gl.constexpr(0.6931471805599453)
# The product of a hidden key, and the least reference.
LOW = gl.constexpr(-1e30)
START = gl.constexpr(-1e20)
# Scales for which LOW is far below every logit.
LEAST_SCALE = 1e-6

WARPGROUP = gl.constexpr(64)  # queries of a consumer
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(128)  # queries of a program: WARPGROUP * CONSUMERS
KEYS = gl.constexpr(128)  # keys of a tile
SLOTS = gl.constexpr(2)  # tiles of keys in shared memory
Q_SLOTS = gl.constexpr(2)  # tiles of queries in shared memory
PIECE = gl.constexpr(32)  # columns whose exponentials are taken together
LAZY = gl.constexpr(8.0)
# Registers of a thread of a consumer and of the producer: together the 65536 of a multiprocessor.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


# Instructions that Gluon has no name for ------------------------------------------------------------------------------


@gluon.jit
def _hold(sums):
    """Make the compiler compute what `sums` (two numbers per thread) depends on before this point.

    ptxas moves exponentials below the next wait for a product, where nothing runs beside them. It does not move them
    past a branch that depends on them. The branch is taken for one NaN that is no sum, and so never.
    """
    gl.inline_asm_elementwise("""{
        .reg .pred p, q;
        setp.eq.b32 p, $2, 0x7fabcdef;
        setp.eq.or.b32 p, $3, 0x7fabcdef, p;
        vote.sync.any.pred q, p, 0xffffffff;
        @q nanosleep.u32 1;
        mov.b32 $0, 0; mov.b32 $1, 0;
        }""", "=r,=r,r,r", [sums], dtype=gl.int32, is_pure=False, pack=2)  # fmt: skip


@gluon.constexpr_function
def _rescaling(count):
    """Instructions that multiply a thread's `count` accumulators by the factors of its two rows.

    A warp whose factors are all 1 skips them.
    """
    first, second = f"${2 * count}", f"${2 * count + 2}"
    lines = [
        "{ .reg .pred p, q;",
        f"setp.eq.f32 p, {first}, 0f3F800000;",
        f"setp.eq.and.f32 p, {second}, 0f3F800000, p;",
        "vote.sync.all.pred q, p, 0xffffffff;",
        "@q bra DONE;",
        *(f"mul.f32 ${i}, ${i}, {second if i & 2 else first};" for i in range(count)),
        "DONE: }",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def _rescaling_operands(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def _rescale(o, factor):
    """Multiply the rows of the output by their factors, which are nearly always 1."""
    COUNT: gl.constexpr = o.shape[1] // 2
    CODE: gl.constexpr = _rescaling(COUNT)
    OPERANDS: gl.constexpr = _rescaling_operands(COUNT)
    f = gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True)[:, None]
    return gl.inline_asm_elementwise(CODE, OPERANDS, [o, f], dtype=gl.float32, is_pure=False, pack=COUNT)


# A tile of logits [64, KEYS]: a thread holds two adjacent columns in every eight, of two rows -------------------------


@gluon.jit
def _sum_of_thread(t):
    """Sums over the columns that each thread holds: [64, columns] -> [64, 4], since four threads share a row."""
    R: gl.constexpr = t.shape[0]
    C: gl.constexpr = t.shape[1]
    return gl.sum(t.reshape([R, C // 8, 4, 2]).permute(0, 2, 1, 3).reshape([R, 4, C // 4]), 2)


@gluon.jit
def _pieces(s):
    """A tile as pieces of PIECE columns; every number stays in its thread."""
    if s.shape[1] == PIECE:
        return (gl.convert_layout(s, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16]), assert_trivial=True),)
    else:
        left, right = s.reshape([s.shape[0], 2, s.shape[1] // 2]).permute(0, 2, 1).split()
        return _pieces(left) + _pieces(right)


@gluon.jit
def _joined(pieces):
    """The tile of some pieces; every number stays in its thread."""
    if len(pieces) == 1:
        return pieces[0]
    else:
        left = _joined(pieces[: len(pieces) // 2])
        right = _joined(pieces[len(pieces) // 2 :])
        return gl.join(left, right).permute(0, 2, 1).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _masked(s, start, n, visible):
    """Give hidden keys the product LOW, in a tile of the keys from `start` on; columns are counted from there."""
    position, left, right, row_segment, segments = visible
    last = gl.zeros_like(position) + (n - 1 - start)
    if right is not None:
        last = gl.minimum(last, position + right - start)
    first = None
    if left is not None:
        first = position - left - start
    s = hide_columns(s, first, last, LOW)
    if segments is not None:
        s = _hide_other_segments(s, row_segment, segments, start, n)
    return s


@gluon.jit
def _hide_other_segments(s, row_segment, segments, start, n):
    """Give keys of other segments than that of the query the product LOW."""
    pieces = _pieces(s)
    L: gl.constexpr = pieces[0].type.layout
    mine = gl.convert_layout(row_segment, gl.SliceLayout(1, L), assert_trivial=True)[:, None]
    hidden = ()
    for i in gl.static_range(len(pieces)):
        key = start + i * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, L))
        other = gl.load(segments + key, key < n, 0)[None, :]
        hidden = hidden + (gl.where(mine == other, pieces[i], LOW),)
    return gl.convert_layout(_joined(hidden), s.type.layout, assert_trivial=True)


@gluon.jit
def _pairwise_maxima(pieces):
    if len(pieces) == 0:
        return ()
    else:
        return (gl.maximum(pieces[0], pieces[1]),) + _pairwise_maxima(pieces[2:])


@gluon.jit
def _largest(pieces, like):
    """Maximum of each row, in the layout of `like`.

    Between pieces first: a chain of maxima through all columns of a thread would be slow.
    """
    if len(pieces) == 1:
        return gl.convert_layout(gl.max(pieces[0], 1), like.type.layout, assert_trivial=True)
    else:
        return _largest(_pairwise_maxima(pieces), like)


@gluon.jit
def _exponentials(s, ref, unit, STATISTICS: gl.constexpr):
    """e = exp x of a piece, and the sums z, a and b of each thread."""
    x = s * unit - gl.convert_layout(ref, gl.SliceLayout(1, s.type.layout), assert_trivial=True)[:, None]
    e = exp2(x)
    z = _sum_of_thread(e)
    a, b = z, z
    if STATISTICS:
        ex = e * x
        a = _sum_of_thread(ex)
        b = _sum_of_thread(ex * x)
    return e, z, a, b


# Tiles of queries and their keys --------------------------------------------------------------------------------------
#
#   plan       the table of _plan, the length of its rows, the numbers of heads in a batch and in all batches
#   packing    segments and the step between their batches, spans (segment_spans.py) and the step between theirs;
#              segments and spans are None without packed documents
#   turn       number of tiles of queries that this program has begun before
#   slot       number of slots of the ring that have been filled before
#
# A wait names the parity of a phase of a barrier, and ends when that phase has ended. When a place in shared memory is
# loaded for the u-th time (u = 0, 1, ...), consumers wait for phase u of its `loaded`. Before that, the producer has
# waited for phase u - 1 of its `released`; for u = 0 this wait ends at once.


@gluon.jit
def _place(tile, plan):
    """First query, batch and head of a tile of queries with its number in a plan."""
    heads, all_heads = plan[2], plan[3]
    return tile // all_heads * ROWS, tile % all_heads // heads, tile % all_heads % heads


@gluon.jit
def _segment_span(tile, plan, packing):
    """Begin, inner, outer and end of the tiles of keys that a tile of queries meets, as defined in segment_spans.py."""
    start, batch, _ = _place(tile, plan)
    spans, spans_batch = packing[2], packing[3]
    begin, inner, outer, end = 0, 0, 0, 0
    if spans is not None:
        place = spans + batch * spans_batch + start // ROWS * 4
        begin, inner, outer, end = gl.load(place), gl.load(place + 1), gl.load(place + 2), gl.load(place + 3)
    return begin, inner, outer, end


@gluon.jit
def _tiles_of_keys(start, m, n, left, right, span, packing):
    """Tiles [begin, end) of keys that the queries from `start` on see."""
    begin = 0
    end = gl.cdiv(n, KEYS)
    if left is not None:
        begin = gl.maximum(start + (n - m) - left, 0) // KEYS
    if right is not None:
        end = gl.minimum(end, gl.cdiv(gl.minimum(start + ROWS, m) + (n - m) + right, KEYS))
    if packing[0] is not None:
        begin = gl.maximum(begin, span[0])
        end = gl.minimum(end, span[3])
    return begin, end


@gluon.jit
def _load(key, value, barriers, rings, slot, key_place, value_place, BYTES: gl.constexpr):
    """Load a tile of keys and the tile of values before it into the next slot."""
    loaded, released = barriers
    k_ring, v_ring = rings
    i = slot % SLOTS
    mbarrier.wait(released.index(i), ((slot // SLOTS) & 1) ^ 1)
    mbarrier.expect(loaded.index(i), BYTES)
    tma.async_copy_global_to_shared(key, key_place, loaded.index(i), k_ring.index(i))
    tma.async_copy_global_to_shared(value, value_place, loaded.index(i), v_ring.index(i))


@gluon.jit
def _produce(inputs, buffers, barriers, plan, m, n, left, right, packing, GROUP: gl.constexpr):
    """Load the queries of each tile, and its keys and values from the last to the first.

    Positions from n on are out of bounds and loaded as zeros: values before the first keys, keys after the last ones.
    """
    query, key, value = inputs
    q_buffer, k_ring, v_ring = buffers
    loaded, released, q_loaded, q_released = barriers
    table, width = plan[0], plan[1]
    BYTES: gl.constexpr = key.block_type.nbytes + value.block_type.nbytes
    slot = 0
    mine = table + gl.program_id(0) * width
    tile = gl.load(mine + 1)
    v_batch, v_head, v_first = 0, 0, n
    for turn in range(gl.load(mine)):
        start, batch, head = _place(tile, plan)
        span = _segment_span(tile, plan, packing)
        tile = gl.load(mine + 2 + turn)  # read long before it is needed
        begin, end = _tiles_of_keys(start, m, n, left, right, span, packing)
        for w in gl.static_range(CONSUMERS):
            q_slot = turn % Q_SLOTS * CONSUMERS + w
            mbarrier.wait(q_released.index(q_slot), ((turn // Q_SLOTS) & 1) ^ 1)
            mbarrier.expect(q_loaded.index(q_slot), query.block_type.nbytes)
            tma.async_copy_global_to_shared(
                query, [batch, head, start + w * WARPGROUP, 0], q_loaded.index(q_slot), q_buffer.index(q_slot)
            )
        head = head // GROUP
        for j in range(end - begin):
            first = (end - 1 - j) * KEYS
            _load(key, value, (loaded, released), (k_ring, v_ring), slot,
                  [batch, head, first, 0], [v_batch, v_head, v_first, 0], BYTES)  # fmt: skip
            v_batch, v_head, v_first = batch, head, first
            slot += 1
    _load(key, value, (loaded, released), (k_ring, v_ring), slot,
          [v_batch, v_head, n, 0], [v_batch, v_head, v_first, 0], BYTES)  # fmt: skip


@gluon.jit
def _step(
    state, q, k, v, start, n, unit, edge, visible, released, next_loaded, next_phase, complete, stored,
    EDGES: gl.constexpr, STATISTICS: gl.constexpr,
):  # fmt: skip
    """Add the tile of values before to the output, and take the exponentials of this tile of logits meanwhile.

    state        o, p: output so far, and the exponentials that v is multiplied with
                 top, ref: maximum and reference of each row, in units of log 2
                 z, a, b: sums of each thread
    edge         whether some query does not see a key of this tile
    complete     v is the last tile of values of a tile of queries, whose output is then stored
    """
    o, p, top, ref, z, a, b = state
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    s = warpgroup_mma(q, k, gl.zeros([WARPGROUP, KEYS], gl.float32, LOGITS), use_acc=False, is_async=True)
    o = warpgroup_mma(p, v, o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    if EDGES:
        if edge:
            s = _masked(s, start, n, visible)
    pieces = _pieces(s)
    here = _largest(pieces, top) * unit
    top = gl.maximum(top, here)
    new = gl.where(here > ref + LAZY, here, ref)
    # Sums about the former reference become those about the new one: x grows by r <= 0, and e by the factor `fade`.
    r = ref - new
    fade = exp2(r)
    r4 = gl.convert_layout(r, gl.SliceLayout(1, z.type.layout), assert_trivial=True)[:, None]
    fade4 = gl.convert_layout(fade, gl.SliceLayout(1, z.type.layout), assert_trivial=True)[:, None]
    if STATISTICS:
        b = fade4 * (b + r4 * (2.0 * a + r4 * z))
        a = fade4 * (a + r4 * z)
    z = fade4 * z
    es = ()
    # Pieces that are computed before the wait for the product with the values: all of them with statistics, whose sums
    # keep the consumer busy; half of them without.
    UNDER_PRODUCT: gl.constexpr = len(pieces) if STATISTICS else len(pieces) // 2
    for i in gl.static_range(len(pieces)):
        e, z_i, a_i, b_i = _exponentials(pieces[i], new, unit, STATISTICS)
        if i == 0:
            z_tile, a_tile, b_tile = z_i, a_i, b_i
        else:
            z_tile = z_tile + z_i
            if STATISTICS:
                a_tile = a_tile + a_i
                b_tile = b_tile + b_i
        es = es + (e,)
        if i == UNDER_PRODUCT - 1:
            _hold(b_tile if STATISTICS else z_tile)
            o, p = warpgroup_mma_wait(0, deps=[o, p])
            mbarrier.arrive(released, count=1)
            o = _rescale(o, gl.where(complete, 1.0, fade))  # a complete output has the reference of its own queries
    z = z + z_tile
    if STATISTICS:
        a = a + a_tile
        b = b + b_tile
    ps = ()
    for i in gl.static_range(len(pieces)):
        ps = ps + (es[i].to(p.dtype),)
    p = gl.convert_layout(_joined(ps), p.type.layout, assert_trivial=True)
    if complete:
        _store_output(o, stored)
        o = gl.zeros_like(o)
    mbarrier.wait(next_loaded, next_phase)
    return o, p, top, new, z, a, b


@gluon.jit
def _consume(
    output, rows, buffers, o_buffer, barriers, plan, m, n, unit, left, right, packing,
    CONSUMER: gl.constexpr, EDGES: gl.constexpr, STATISTICS: gl.constexpr,
):  # fmt: skip
    """Attention and statistics of 64 queries of each tile: the rows of one consumer.

    The first step of a tile of queries adds the last values of the tile before, which belong to that tile's output.
    """
    q_buffer, k_ring, v_ring = buffers
    loaded, released, q_loaded, q_released = barriers
    table, width, heads = plan[0], plan[1], plan[2]
    D: gl.constexpr = q_buffer.shape[4]
    DV: gl.constexpr = v_ring.shape[4]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    PIECE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    o_buffer = o_buffer.index(CONSUMER)
    no_sum = _sum_of_thread(gl.zeros([WARPGROUP, PIECE], gl.float32, PIECE_LAYOUT))
    least = gl.full([WARPGROUP], START, gl.float32, gl.SliceLayout(1, LOGITS))
    o = gl.zeros([WARPGROUP, DV], gl.float32, OUTPUT)
    p = gl.zeros([WARPGROUP, KEYS], q_buffer.dtype, gl.DotOperandLayout(0, OUTPUT, 2))
    inverse = least
    o_place = [0, 0, 0, 0]
    i = 0
    slot = 0
    mbarrier.wait(loaded.index(0), 0)
    mine = table + gl.program_id(0) * width
    tile = gl.load(mine + 1)
    span = _segment_span(tile, plan, packing)
    for turn in range(gl.load(mine)):
        start, batch, head = _place(tile, plan)
        tile = gl.load(mine + 2 + turn)
        begin, end = _tiles_of_keys(start, m, n, left, right, span, packing)
        start += CONSUMER * WARPGROUP
        row = start + gl.arange(0, WARPGROUP, gl.SliceLayout(1, LOGITS))
        position = row + (n - m)
        # Keys that all these queries see: only tiles across these bounds are masked.
        low, high = 0, n
        if left is not None:
            low = start + WARPGROUP - 1 + (n - m) - left
        if right is not None:
            high = gl.minimum(high, start + (n - m) + right + 1)
        segments, row_segment = packing[0], None
        if segments is not None:
            low = gl.maximum(low, span[1] * KEYS)
            high = gl.minimum(high, span[2] * KEYS)
            segments += batch.to(gl.int64) * packing[1]
            row_segment = gl.load(segments + position, row < m, 0)
        visible = (position, left, right, row_segment, segments)
        q_slot = turn % Q_SLOTS * CONSUMERS + CONSUMER
        q = q_buffer.index(q_slot).reshape([WARPGROUP, D])
        mbarrier.wait(q_loaded.index(q_slot), (turn // Q_SLOTS) & 1)
        top, ref, z, a, b = least, least, no_sum, no_sum, no_sum
        for j in range(end - begin):
            first = (end - 1 - j) * KEYS
            # The step before has waited for the tiles of this slot; this one waits for those of the next slot.
            slot += 1
            previous = i
            i = slot % SLOTS
            o, p, top, ref, z, a, b = _step(
                (o, p, top, ref, z, a, b), q, k_ring.index(previous).reshape([KEYS, D]).permute((1, 0)),
                v_ring.index(previous).reshape([KEYS, DV]), first, n, unit, (first < low) | (first + KEYS > high),
                visible, released.index(previous), loaded.index(i), (slot // SLOTS) & 1, (j == 0) & (turn > 0),
                (inverse, output, o_place, o_buffer), EDGES, STATISTICS,
            )  # fmt: skip
        mbarrier.arrive(q_released.index(q_slot), count=1)
        span = _segment_span(tile, plan, packing)  # of the next tile, read while the statistics are stored
        # Of this tile of queries, whose output is stored in the first step of the next one.
        inverse = _store_statistics(top, ref, z, a, b, rows, (batch * heads + head) * m, row, m, STATISTICS)
        o_place = [batch, head, start, 0]
    o = warpgroup_mma(p, v_ring.index(i).reshape([KEYS, DV]), o)
    _store_output(o, (inverse, output, o_place, o_buffer))
    tma.store_wait(0)


@gluon.jit
def _store_output(o, stored):
    """Divide the output by the sum of its weights, and store it when the output before it has left the buffer."""
    inverse, output, place, o_buffer = stored
    o = o * gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout), assert_trivial=True)[:, None]
    tma.store_wait(0)
    o_buffer.reshape([WARPGROUP, o.shape[1]]).store(o.to(output.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(output, place, o_buffer)


@gluon.jit
def _store_statistics(top, ref, z, a, b, rows, line, row, m, STATISTICS: gl.constexpr):
    """Store log normaliser, entropy, variance, maximum and mean of rows; return the inverse of the sum of weights."""
    log_normalizer, entropies, logit_variance, max_logit, mean_logits = rows
    ROW: gl.constexpr = row.type.layout
    z = gl.convert_layout(gl.sum(z, 1), ROW)
    dead = z == 0.0
    z = gl.where(dead, 1.0, z)
    # A maximum ignores NaN, a sum does not.
    top = gl.where(dead, -float("inf"), gl.where(z == z, top, z))
    ref = gl.where(dead, -float("inf"), ref)
    inverse = 1.0 / z
    log_z = gl.log2(z)
    entropy = gl.zeros_like(z)
    variance = gl.zeros_like(z)
    if STATISTICS:
        mean = gl.convert_layout(gl.sum(a, 1), ROW) * inverse
        square = gl.convert_layout(gl.sum(b, 1), ROW) * inverse
        entropy = log_z - mean
        # Rounding may make them slightly negative; a comparison with NaN is false.
        entropy = gl.where(entropy < 0.0, 0.0, entropy)
        variance = square - mean * mean
        variance = gl.where(variance < 0.0, 0.0, variance)
    place = line + row
    there = row < m
    gl.store(log_normalizer + place, (ref + log_z) * LOG_2, there)
    gl.store(entropies + place, entropy * LOG_2, there)
    gl.store(logit_variance + place, variance * (LOG_2 * LOG_2), there)
    gl.store(max_logit + place, top * LOG_2, there)
    gl.store(mean_logits + place, gl.where(dead, 0.0, (ref + log_z - entropy) * LOG_2), there)
    return inverse


@gluon.jit
def _attention(
    query, key, value, output, log_normalizer, entropy, logit_variance, max_logit, mean_logit,
    table, segments, spans, width, m, n, unit, heads, all_heads, left, right, segments_batch, spans_batch,
    GROUP: gl.constexpr, EDGES: gl.constexpr, STATISTICS: gl.constexpr,
):  # fmt: skip
    q_buffer = gl.allocate_shared_memory(query.dtype, [Q_SLOTS * CONSUMERS] + query.block_type.shape, query.layout)
    k_ring = gl.allocate_shared_memory(key.dtype, [SLOTS] + key.block_type.shape, key.layout)
    v_ring = gl.allocate_shared_memory(value.dtype, [SLOTS] + value.block_type.shape, value.layout)
    o_buffer = gl.allocate_shared_memory(output.dtype, [CONSUMERS] + output.block_type.shape, output.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_loaded = gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_released = gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(released.index(i), count=CONSUMERS)
    for i in gl.static_range(Q_SLOTS * CONSUMERS):
        mbarrier.init(q_loaded.index(i), count=1)
        mbarrier.init(q_released.index(i), count=1)
    inputs = (query, key, value)
    rows = (log_normalizer, entropy, logit_variance, max_logit, mean_logit)
    buffers = (q_buffer, k_ring, v_ring)
    barriers = (loaded, released, q_loaded, q_released)
    plan = (table, width, heads, all_heads)
    packing = (segments, segments_batch, spans, spans_batch)
    gl.warp_specialize([
        (_consume, (output, rows, buffers, o_buffer, barriers, plan, m, n, unit, left, right, packing,
                    0, EDGES, STATISTICS)),
        (_consume, (output, rows, buffers, o_buffer, barriers, plan, m, n, unit, left, right, packing,
                    1, EDGES, STATISTICS)),
        (_produce, (inputs, buffers, barriers, plan, m, n, left, right, packing, GROUP)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# Calls ----------------------------------------------------------------------------------------------------------------


def takes(dtype: torch.dtype, query_shape: torch.Size, value_shape: torch.Size, scoring: Scoring, masks: str) -> bool:
    """Return whether this kernel computes attention for these arguments."""
    scale, softcap, left, right = scoring
    return (
        masks != "dense"
        and dtype is not torch.float32
        and query_shape[2] <= value_shape[2]
        and max(query_shape[3], value_shape[3]) <= 128
        and softcap is None
        and scale >= LEAST_SCALE
        and (left is None or left >= 0)
        and (right is None or right >= 0)
    )


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
    """Attention and the statistics of its rows, as in gpu.py, for arguments that `takes` accepts."""
    device, v = query.device, value.shape[3]
    query, key, value = aligned(query), aligned(key), aligned(value)
    layouts = query.stride(), key.stride(), value.stride()
    segments = sight.segments
    packing = None
    if segments is not None:  # all that Triton specialises
        packing = segments.dtype, len(segments) > 1, segments.stride(), segments.data_ptr() % 16
    kernel, programs, table, spans, numbers = _call(
        query.dtype, device, query.shape, value.shape, layouts, scoring, statistics, packing
    )
    output = empty_output(query, v)
    rows = empty_rows(query, separate=separate)
    stream, of_tiles, steps = current_stream(device), None, (0, 0)
    if segments is not None:
        segments = segments if segments.stride(-1) == 1 else segments.contiguous()
        of_tiles, step = spans.computed(segments, stream)
        steps = segments.stride(0) if len(segments) > 1 else 0, step
    kernel.launch(programs, stream, (query, key, value, output), (*rows, table, segments, of_tiles), (*numbers, *steps))
    result = StatisticsAndMean(dense(output), *rows[:4])
    result.mean_logit = rows[4]
    return result


def recorded(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, statistics: bool
) -> tuple[RecordedLaunch | None, Tensor]:
    """Launch of `forward` for aligned operands without segments, and its plan; None before the first call."""
    layouts = query.stride(), key.stride(), value.stride()
    kernel, programs, table, _, numbers = _call(
        query.dtype, query.device, query.shape, value.shape, layouts, scoring, statistics, None
    )
    return kernel.recorded(programs, 8, (*numbers, 0, 0)), table


@lru_cache(maxsize=1024)
def _call(
    dtype: torch.dtype,
    device: torch.device,
    query_shape: torch.Size,
    value_shape: torch.Size,
    _layouts: tuple[tuple[int, ...], ...],
    scoring: Scoring,
    statistics: bool,
    packing: tuple[Any, ...] | None,
) -> tuple[Kernel, int, Tensor, SegmentSpans, tuple[Any, ...]]:
    """Kernel, number of programs, plan, spans of segments and numbers of a call."""
    (b, h, m, d), (_, hk, n, v) = query_shape, value_shape
    left = None if scoring.left is None or scoring.left >= n - 1 else scoring.left
    right = None if scoring.right is None or scoring.right >= m - 1 else scoring.right
    edges = left is not None or right is not None or packing is not None or n % KEYS.value != 0
    descriptors = (
        by_rows(WARPGROUP.value, d, dtype),
        by_rows(KEYS.value, d, dtype),
        by_rows(KEYS.value, v, dtype),
        by_rows(WARPGROUP.value, v, dtype),
    )
    kernel = Kernel(_attention, (h // hk, edges, statistics), {"num_warps": 4}, descriptors)
    # Tiles of packed documents cost the same, whatever their place in a causal band.
    table = _plan(m, n, b * h, left, right if packing is None else None, multiprocessors(device))
    spans = SegmentSpans((n - m, m, ROWS.value), (0, n, KEYS.value))
    numbers = table.shape[1], m, n, scoring.scale * LOG2_E, h, b * h, left, right
    return kernel, table.shape[0], kept(table, device), spans, numbers


def _plan(m: int, n: int, heads: int, left: int | None, right: int | None, programs: int) -> Tensor:
    """Tiles of queries of each program: their number, then tile * heads + head of each.

    Heads one after the other, so that their keys stay in the cache; of each head the last tile first, which has most
    keys in a causal band; each tile to the program that is the first to be free. A tile costs its tiles of keys, and
    one for its start.
    """
    costs = []
    for start in range(0, m, ROWS.value):
        low = 0 if left is None else max(0, start + n - m - left)
        high = n if right is None else min(n, min(start + ROWS.value, m) + n - m + right)
        costs.append(1 + -(-high // KEYS.value) - low // KEYS.value)
    programs = min(programs, len(costs) * heads)
    tiles: list[list[int]] = [[] for _ in range(programs)]
    free = [(0, program) for program in range(programs)]
    for head in range(heads):
        for tile in reversed(range(len(costs))):
            time, program = free[0]
            tiles[program].append(tile * heads + head)
            heapq.heapreplace(free, (time + costs[tile], program))
    width = max(map(len, tiles)) + 2
    return torch.tensor([[len(mine), *mine, *[0] * (width - 1 - len(mine))] for mine in tiles], dtype=torch.int32)
