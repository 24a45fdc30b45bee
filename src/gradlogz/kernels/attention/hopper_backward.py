# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005 (Gluon does not know *)
"""Gradients of attention and of its statistics on a Hopper GPU (H100, H200), in Gluon: five products per tile.

    S^T  = K Q^T      x = unit S^T - G,  p = exp x              tiles [keys, queries]: a row of a tile is a key
    dP^T = V dO^T     ds = p (dP^T + k0 + x (k1 + k2 x))        the polynomial is the start value of the product
    dV += p dO        dK += ds Q                                in the registers of the consumer of these keys
    dQ += ds^T K                                                summed over tiles of keys in global memory

    producer      one warp           brings tiles of queries, their output gradients and coefficients of rows
    consumers     two warpgroups     64 keys each: the five products
    writer        one warp           adds dQ to the sums in global memory

    consumer      step t             S, weights, dP + exponentials, ds | dQ of step t - 1, dV, dK
    barrier       done[t]            both consumers have ended step t: ds of step t and dQ of step t - 1 can be read

gpu.py computes S and dP twice, once for dK and dV and once for dQ, so that each sum has one writer. Here dQ of a tile
of queries has one writer for each tile of keys. They add in an order that is fixed on the host, so that results are
bitwise reproducible: a counter for each tile of queries has the number of tiles that have been added, and a writer
waits for its number. The plan gives every program a list of steps (tile of queries, tile of keys) in an order in which
no program waits long (backward_plan.py). A waiting program needs the others to run, hence a cooperative launch.

The kernel takes half-precision operands with as many queries as keys, equal head sizes up to 128, and bands; gpu.py
computes the rest. Logits are in units of log 2.

Read next: backward_plan.py, hopper.py (the forward pass), gpu.py (the formulas, and the coefficients k of a row).
"""

from functools import lru_cache
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..._typing import Float, Tensor
from . import backward_plan
from .gpu import COUNTED, coefficients, recorded_coefficients
from .hopper_tiles import LOG2_E, by_rows, exp2, hide_columns, multiprocessors
from .launching import Kernel, RecordedLaunch, aligned, current_stream, dense, empty_output, kept, on_its_device
from .scoring import Scoring, Sight

__all__ = ["backward", "coefficients", "recorded", "recorded_coefficients", "takes"]

# x of a hidden key: 2^-200 is 0 in float32.
NO_MASS = gl.constexpr(-200.0)

CONSUMERS = gl.constexpr(2)
WARPGROUP = gl.constexpr(64)  # keys of a consumer
KEYS = gl.constexpr(backward_plan.KEYS)  # keys of a tile: WARPGROUP * CONSUMERS
PIECE = gl.constexpr(64)  # queries whose logits are computed together
SLOTS = gl.constexpr(2)  # tiles of queries in shared memory
# Registers of a thread of a consumer, and of producer and writer: together the 65536 of a multiprocessor.
CONSUMER_REGISTERS = gl.constexpr(240)
HELPER_REGISTERS = gl.constexpr(24)

# A step of the plan is an entry of four numbers: tile of queries, -1 after the last step; tile of keys and flags; query
# head in its group; how many have added to the tile of queries before.
ENTRY = gl.constexpr(4)
FIRST = gl.constexpr(backward_plan.FIRST)
LAST = gl.constexpr(backward_plan.LAST)
TILE = gl.constexpr(backward_plan.FIRST - 1)


# Instructions that Gluon has no name for ------------------------------------------------------------------------------


@builtin
def _add_to_global(tensor_desc, coord, src, _semantic=None):
    """Add a tile in shared memory to one in global memory, asynchronously."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def _order_copies():
    """Order what other programs have written before the copies that follow."""
    CODE: gl.constexpr = "fence.proxy.async.global; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(CODE, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_until_written():
    """Wait until the copies of this thread have reached global memory (store_wait: have read shared memory)."""
    CODE: gl.constexpr = "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(CODE, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


# Producer, consumers, writer ------------------------------------------------------------------------------------------


@gluon.jit
def _masked(x, first_key, first_query, n, left, right):
    """Hide what is outside the band, and keys outside the tensor; most tiles need no mask."""
    edge = first_key + WARPGROUP > n
    if right is not None:
        edge = edge | (first_query < first_key + WARPGROUP - 1 - right)
    if left is not None:
        edge = edge | (first_query + PIECE - 1 > first_key + left)
    if edge:
        key = first_key + gl.arange(0, WARPGROUP, gl.SliceLayout(1, x.type.layout))
        lowest = gl.zeros_like(key)
        highest = gl.where(key < n, n - 1 - first_query, -1)
        if right is not None:
            lowest = gl.maximum(lowest, key - right - first_query)
        if left is not None:
            highest = gl.minimum(highest, key + left - first_query)
        x = hide_columns(x, lowest, highest, NO_MASS)
    return x


@gluon.jit
def _produce(
    inputs, buffers, barriers, plan, per_row, lines, n, heads, GROUP: gl.constexpr, COEFFICIENTS: gl.constexpr
):
    """Load queries, output gradients and coefficients of each step, and keys and values where they change."""
    query, key, value, grad_output = inputs
    k_buffer, v_buffer, q_ring, go_ring, row_ring = buffers
    kv_loaded, kv_released, loaded, done = barriers
    table, length, workers, groups, units = plan
    ROWS: gl.constexpr = q_ring.shape[3]
    LINE: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
    key_heads = heads // GROUP
    slot = 0
    turn = 0
    for unit in range(gl.program_id(0) // workers, units, groups):
        batch = unit // key_heads
        key_head = unit % key_heads
        entry = table + gl.program_id(0) % workers * length * ENTRY
        for _ in range(length):
            start = gl.load(entry) * ROWS
            key_tile = gl.load(entry + 1)
            head = key_head * GROUP + gl.load(entry + 2)
            entry += ENTRY
            if start >= 0:
                row = start + gl.arange(0, ROWS, LINE)
                place = per_row + (batch * heads + head) * n + row
                values = ()
                for k in gl.static_range(COEFFICIENTS):
                    values = values + (gl.load(place + k * lines, row < n, 0.0),)
                i = slot % SLOTS
                mbarrier.wait(done.index(i), ((slot // SLOTS) & 1) ^ 1)
                mbarrier.expect(loaded.index(i), query.block_type.nbytes + grad_output.block_type.nbytes)
                tma.async_copy_global_to_shared(query, [batch, head, start, 0], loaded.index(i), q_ring.index(i))
                tma.async_copy_global_to_shared(grad_output, [batch, head, start, 0], loaded.index(i), go_ring.index(i))
                if key_tile & FIRST:
                    mbarrier.wait(kv_released, (turn & 1) ^ 1)
                    mbarrier.expect(kv_loaded, CONSUMERS * (key.block_type.nbytes + value.block_type.nbytes))
                    for w in gl.static_range(CONSUMERS):
                        at = [batch, key_head, (key_tile & TILE) * KEYS + w * WARPGROUP, 0]
                        tma.async_copy_global_to_shared(key, at, kv_loaded, k_buffer.index(w))
                        tma.async_copy_global_to_shared(value, at, kv_loaded, v_buffer.index(w))
                    turn += 1
                for k in gl.static_range(COEFFICIENTS):
                    row_ring.index(i * COEFFICIENTS + k).store(values[k])
                mbarrier.arrive(loaded.index(i), count=1)
                slot += 1


@gluon.jit
def _query_gradient(ds_ring, k_buffer, step, CONSUMER: gl.constexpr, PIECES: gl.constexpr):
    """Start the product of ds and the keys of both consumers, for half of a tile of queries: columns, or rows."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq = gl.zeros([64, 64], gl.float32, HALF)
    for w in gl.static_range(CONSUMERS):
        k = k_buffer.index(w).reshape([WARPGROUP, k_buffer.shape[4]])
        if PIECES == 1:
            k = k.slice(CONSUMER * 64, 64, 1)
        piece = (step * CONSUMERS + w) * PIECES + (0 if PIECES == 1 else CONSUMER)
        dq = warpgroup_mma(ds_ring.index(piece).permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _send(dq, dq_ring, dq_released, sent, scale, CONSUMER: gl.constexpr):
    """Leave half of a tile of dQ to the writer."""
    DQ_SLOTS: gl.constexpr = dq_ring.shape[0] // CONSUMERS
    place = sent % DQ_SLOTS * CONSUMERS + CONSUMER
    mbarrier.wait(dq_released.index(sent % DQ_SLOTS), ((sent // DQ_SLOTS) & 1) ^ 1)
    dq_ring.index(place).reshape([64, 64]).store(dq * scale)


@gluon.jit
def _consume(
    outputs, buffers, ds_ring, dq_ring, barriers, dq_barriers, plan, n, unit_scale, scale, heads, left, right,
    CONSUMER: gl.constexpr, GROUP: gl.constexpr, EDGES: gl.constexpr, COEFFICIENTS: gl.constexpr,
):  # fmt: skip
    """Gradients of 64 keys and their values, and the part of these keys in the gradients of queries."""
    grad_key, grad_value = outputs
    k_buffer, v_buffer, q_ring, go_ring, row_ring = buffers
    kv_loaded, kv_released, loaded, done = barriers
    flushed, dq_released = dq_barriers
    table, length, workers, groups, units = plan
    D: gl.constexpr = q_ring.shape[4]
    ROWS: gl.constexpr = q_ring.shape[3]
    PIECES: gl.constexpr = ROWS // PIECE
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADIENT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LOGITS)
    k = k_buffer.index(CONSUMER).reshape([WARPGROUP, D])
    v = v_buffer.index(CONSUMER).reshape([WARPGROUP, D])
    dk = gl.zeros([WARPGROUP, D], gl.float32, GRADIENT)
    dv = gl.zeros([WARPGROUP, D], gl.float32, GRADIENT)
    slot = 0
    turn = 0
    sent = 0
    for unit in range(gl.program_id(0) // workers, units, groups):
        entry = table + gl.program_id(0) % workers * length * ENTRY
        for _ in range(length):
            start = gl.load(entry) * ROWS
            key_tile = gl.load(entry + 1)
            entry += ENTRY
            # With a loop over the steps alone, the compiler takes so much out of it that registers spill.
            if start >= 0:
                is_first = (key_tile & FIRST) != 0
                i = slot % SLOTS
                phase = (slot // SLOTS) & 1
                q = q_ring.index(i).reshape([ROWS, D])
                go = go_ring.index(i).reshape([ROWS, D])
                mbarrier.wait(kv_loaded, turn & 1, pred=is_first)
                mbarrier.wait(loaded.index(i), phase)

                # Logits; then the polynomial of each, from which dP starts, and under that product the exponentials.
                nothing = gl.zeros([WARPGROUP, PIECE], gl.float32, LOGITS)
                xs = ()
                for c in gl.static_range(PIECES):
                    q_columns = q.slice(c * PIECE, PIECE, 0).permute((1, 0))
                    xs = xs + (warpgroup_mma(k, q_columns, nothing, use_acc=False, is_async=True),)
                ps = ()
                weights = ()
                for c in gl.static_range(PIECES):
                    x = warpgroup_mma_wait(PIECES - 1, deps=[xs[c]])
                    G = row_ring.index(i * COEFFICIENTS).slice(c * PIECE, PIECE, 0).load(COLUMN)
                    k0 = row_ring.index(i * COEFFICIENTS + 1).slice(c * PIECE, PIECE, 0).load(COLUMN)
                    x = x * unit_scale - G[None, :]
                    if EDGES:
                        first_key = (key_tile & TILE) * KEYS + CONSUMER * WARPGROUP
                        x = _masked(x, first_key, start + c * PIECE, n, left, right)
                    weight = nothing + k0[None, :]
                    if COEFFICIENTS == 4:
                        k1 = row_ring.index(i * COEFFICIENTS + 2).slice(c * PIECE, PIECE, 0).load(COLUMN)
                        k2 = row_ring.index(i * COEFFICIENTS + 3).slice(c * PIECE, PIECE, 0).load(COLUMN)
                        weight = weight + x * (k1[None, :] + k2[None, :] * x)
                    go_columns = go.slice(c * PIECE, PIECE, 0).permute((1, 0))
                    weights = weights + (warpgroup_mma(v, go_columns, weight, is_async=True),)
                    ps = ps + (exp2(x),)

                # ds for both consumers. The other one has ended the last step, and reads this part of the ring no more.
                p16s = ()
                ds16s = ()
                for c in gl.static_range(PIECES):
                    weight = warpgroup_mma_wait(PIECES - 1 - c, deps=[weights[c]])
                    ds = (ps[c] * weight).to(q.dtype)
                    if c == 0:
                        mbarrier.wait(done.index(i ^ 1), phase ^ i ^ 1, pred=is_first == 0)
                    ds_ring.index((i * CONSUMERS + CONSUMER) * PIECES + c).store(ds)
                    p16s = p16s + (gl.convert_layout(ps[c].to(q.dtype), OPERAND, assert_trivial=True),)
                    ds16s = ds16s + (gl.convert_layout(ds, OPERAND, assert_trivial=True),)

                # In the first step of a tile of keys there is no last one, and its dq is not used.
                dq = _query_gradient(ds_ring, k_buffer, i ^ 1, CONSUMER, PIECES)
                for c in gl.static_range(PIECES):
                    add = is_first == 0 if c == 0 else True
                    dv = warpgroup_mma(p16s[c], go.slice(c * PIECE, PIECE, 0), dv, use_acc=add, is_async=True)
                for c in gl.static_range(PIECES):
                    add = is_first == 0 if c == 0 else True
                    dk = warpgroup_mma(ds16s[c], q.slice(c * PIECE, PIECE, 0), dk, use_acc=add, is_async=True)
                dq = warpgroup_mma_wait(2 * PIECES, deps=[dq])
                if is_first == 0:
                    _send(dq, dq_ring, dq_released, sent, scale, CONSUMER)
                    sent += 1
                if PIECES == 1:
                    dv, dk = warpgroup_mma_wait(0, deps=[dv, dk, p16s[0], ds16s[0]])[:2]
                else:
                    dv, dk = warpgroup_mma_wait(0, deps=[dv, dk, p16s[0], p16s[1], ds16s[0], ds16s[1]])[:2]
                fence_async_shared()
                mbarrier.arrive(done.index(i), count=1)
                slot += 1

                if key_tile & LAST:
                    mbarrier.wait(done.index(i), phase)
                    dq = _query_gradient(ds_ring, k_buffer, i, CONSUMER, PIECES)
                    dq = warpgroup_mma_wait(0, deps=[dq])
                    _send(dq, dq_ring, dq_released, sent, scale, CONSUMER)
                    sent += 1
                    fence_async_shared()
                    mbarrier.arrive(flushed, count=1)
                    # The values of this consumer are not needed any more: their place is that of the results.
                    first_key = (key_tile & TILE) * KEYS + CONSUMER * WARPGROUP
                    at = [unit // (heads // GROUP), unit % (heads // GROUP), first_key, 0]
                    v.store(dv.to(grad_value.dtype))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(grad_value, at, v_buffer.index(CONSUMER))
                    tma.store_wait(0)
                    v.store((dk * scale).to(grad_key.dtype))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(grad_key, at, v_buffer.index(CONSUMER))
                    tma.store_wait(0)
                    mbarrier.arrive(kv_released, count=1)
                    turn += 1


@gluon.jit
def _write(sums, dq_ring, done, dq_barriers, plan, counters, n, heads, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Add the gradients of queries, each when its turn has come."""
    flushed, dq_released = dq_barriers
    table, length, workers, groups, units = plan
    DQ_SLOTS: gl.constexpr = dq_ring.shape[0] // CONSUMERS
    tiles = gl.cdiv(n, ROWS)
    key_heads = heads // GROUP
    slot = 0
    turn = 0
    for unit in range(gl.program_id(0) // workers, units, groups):
        batch = unit // key_heads
        key_head = unit % key_heads
        entry = table + gl.program_id(0) % workers * length * ENTRY
        tile, is_last, head, rank, counter = _step(entry, key_head, batch, heads, tiles, counters, GROUP)
        added = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        for s in range(length):
            if tile >= 0:
                while added < rank:
                    added = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
                _order_copies()
                # dq is there at the end of the next step, or of the tile of keys.
                i = slot % DQ_SLOTS
                slot += 1
                mbarrier.wait(done.index(slot % SLOTS), (slot // SLOTS) & 1, pred=is_last == 0)
                mbarrier.wait(flushed, turn & 1, pred=is_last)
                turn += is_last.to(gl.int32)
                for w in gl.static_range(CONSUMERS):
                    half = dq_ring.index(i * CONSUMERS + w)
                    at = [batch, head, tile * ROWS, w * 64] if ROWS == 64 else [batch, head, tile * ROWS + w * 64, 0]
                    if rank == 0:
                        tma.async_copy_shared_to_global(sums, at, half)
                    else:
                        _add_to_global(sums, at, half)
                # The next step is looked up while the sums are on their way.
                here = counter
                entry += gl.where(s + 1 < length, ENTRY, 0)
                tile, is_last, head, rank, counter = _step(entry, key_head, batch, heads, tiles, counters, GROUP)
                tma.store_wait(0)
                mbarrier.arrive(dq_released.index(i), count=1)
                added = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
                _wait_until_written()
                gl.atomic_add(here, 1, sem="release", scope="gpu")


@gluon.jit
def _step(entry, key_head, batch, heads, tiles, counters, GROUP: gl.constexpr):
    """Tile of queries, whether its tile of keys ends, head, rank, and the counter of that tile of queries."""
    tile = gl.load(entry)
    is_last = (gl.load(entry + 1) & LAST) != 0
    head = key_head * GROUP + gl.load(entry + 2)
    counter = counters + (batch * heads + head) * tiles + gl.maximum(tile, 0)
    return tile, is_last, head, gl.load(entry + 3), counter


@gluon.jit
def _backward(
    query, key, value, grad_output, grad_key, grad_value, sums, per_row, table,
    length, workers, groups, units, n, unit_scale, scale, heads, lines, left, right,
    GROUP: gl.constexpr, EDGES: gl.constexpr, COEFFICIENTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = query.block_type.shape[2]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP, PIECE], query.dtype)
    k_buffer = gl.allocate_shared_memory(key.dtype, [CONSUMERS] + key.block_type.shape, key.layout)
    v_buffer = gl.allocate_shared_memory(value.dtype, [CONSUMERS] + value.block_type.shape, value.layout)
    q_ring = gl.allocate_shared_memory(query.dtype, [SLOTS] + query.block_type.shape, query.layout)
    go_ring = gl.allocate_shared_memory(query.dtype, [SLOTS] + grad_output.block_type.shape, grad_output.layout)
    row_ring = gl.allocate_shared_memory(gl.float32, [SLOTS * COEFFICIENTS, ROWS], PLAIN)
    ds_ring = gl.allocate_shared_memory(query.dtype, [SLOTS * CONSUMERS * ROWS // PIECE, WARPGROUP, PIECE], DS)
    dq_ring = gl.allocate_shared_memory(gl.float32, [DQ_SLOTS * CONSUMERS] + sums.block_type.shape, sums.layout)
    kv_loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_released = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    flushed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    dq_released = gl.allocate_shared_memory(gl.int64, [DQ_SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_loaded, count=1)
    mbarrier.init(kv_released, count=CONSUMERS)
    mbarrier.init(flushed, count=CONSUMERS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(loaded.index(i), count=2)  # the copies, and the coefficients
        mbarrier.init(done.index(i), count=CONSUMERS)
    for i in gl.static_range(DQ_SLOTS):
        mbarrier.init(dq_released.index(i), count=1)
    inputs = (query, key, value, grad_output)
    outputs = (grad_key, grad_value)
    buffers = (k_buffer, v_buffer, q_ring, go_ring, row_ring)
    barriers = (kv_loaded, kv_released, loaded, done)
    dq_barriers = (flushed, dq_released)
    plan = (table, length, workers, groups, units)
    counters = (per_row + COEFFICIENTS * lines).to(gl.pointer_type(gl.int32), bitcast=True)
    gl.warp_specialize([
        (_consume, (outputs, buffers, ds_ring, dq_ring, barriers, dq_barriers, plan, n, unit_scale, scale,
                    heads, left, right, 0, GROUP, EDGES, COEFFICIENTS)),
        (_consume, (outputs, buffers, ds_ring, dq_ring, barriers, dq_barriers, plan, n, unit_scale, scale,
                    heads, left, right, 1, GROUP, EDGES, COEFFICIENTS)),
        (_produce, (inputs, buffers, barriers, plan, per_row, lines, n, heads, GROUP, COEFFICIENTS)),
        (_write, (sums, dq_ring, done, dq_barriers, plan, counters, n, heads, ROWS, GROUP)),
    ], [4, 1, 1], [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS])  # fmt: skip


# Calls ----------------------------------------------------------------------------------------------------------------


def takes(dtype: torch.dtype, query_shape: torch.Size, value_shape: torch.Size, scoring: Scoring, masks: str) -> bool:
    """Return whether this kernel computes the gradients for these arguments."""
    _, softcap, left, right = scoring
    return (
        not masks
        and dtype is not torch.float32
        and query_shape[2] == value_shape[2]
        and query_shape[3] == value_shape[3] <= 128
        and 4 * query_shape[:3].numel() < 1 << 31
        and softcap is None
        and (left is None or left >= 0)
        and (right is None or right >= 0)
    )


@on_its_device
def backward(
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n d"],
    _sight: Sight,
    scoring: Scoring,
    per_row: Float[Tensor, "k b h n"],
    grad_output: Float[Tensor, "b h n d"],
    *,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Gradients of queries, keys and values, as in gpu.py, for arguments that `takes` accepts.

    The counters are the zeros that `coefficients` has left behind the coefficients: they serve once.
    """
    assert not needs_bias
    device, (b, h, n, d) = query.device, query.shape
    query, key, value, grad_output = map(aligned, (query, key, value, grad_output.to(value.dtype)))
    grad_query, grad_key, grad_value = (empty_output(t, d) for t in (query, key, value))
    layouts = tuple(t.stride() for t in (query, key, value, grad_output, grad_key, grad_value))
    kernel, programs, table, numbers = _call(
        query.dtype, device, query.shape, key.shape[1], layouts, scoring, len(per_row)
    )
    sums = torch.empty((b, h, n, -(-d // 4) * 4), dtype=torch.float32, device=device)
    tiled = query, key, value, grad_output, grad_key, grad_value, sums
    kernel.launch(programs, current_stream(device), tiled, (per_row, table), numbers)
    return dense(grad_query.copy_(sums[..., :d])), dense(grad_key), dense(grad_value), None


def recorded(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, scoring: Scoring, coefficients: int
) -> tuple[RecordedLaunch | None, Tensor]:
    """Launch of `backward` for aligned operands, and its plan; None before the first call."""
    operands = query, key, value, grad_output, torch.empty_like(key), torch.empty_like(value)
    layouts = tuple(t.stride() for t in operands)
    kernel, programs, table, numbers = _call(
        query.dtype, query.device, query.shape, key.shape[1], layouts, scoring, coefficients
    )
    return kernel.recorded(programs, 2, numbers), table


@lru_cache(maxsize=1024)
def _call(
    dtype: torch.dtype,
    device: torch.device,
    shape: torch.Size,
    key_heads: int,
    _layouts: tuple[tuple[int, ...], ...],
    scoring: Scoring,
    coefficients: int,
) -> tuple[Kernel, int, Tensor, tuple[Any, ...]]:
    """Kernel, number of programs, plan, and numbers of a call."""
    b, h, n, d = shape
    left = None if scoring.left is None or scoring.left >= n - 1 else scoring.left
    right = None if scoring.right is None or scoring.right >= n - 1 else scoring.right
    # As many queries and places of dq as shared memory has room for.
    rows, dq_slots = (COUNTED, 2) if d > 64 else (2 * COUNTED, 1)
    edges = left is not None or right is not None or n % KEYS.value != 0
    queries, keys = by_rows(rows, d, dtype), by_rows(WARPGROUP.value, d, dtype)
    constants = h // key_heads, edges, coefficients, dq_slots
    options = {"num_warps": 4, "launch_cooperative_grid": True}
    kernel = Kernel(_backward, constants, options, (queries, keys, keys, queries, keys, keys, _halves))
    programs, units = multiprocessors(device), b * key_heads
    shares = backward_plan.schedule(n, rows, left, right, programs, units)
    table = backward_plan.plan(shares, h // key_heads, -(-n // rows))
    workers = len(table)
    groups = min(units, programs // workers)
    numbers = (
        table.shape[1], workers, groups, units, n, scoring.scale * LOG2_E, scoring.scale, h, b * h * n, left, right
    )  # fmt: skip
    return kernel, workers * groups, kept(table, device), numbers


def _halves(sums: Tensor) -> TensorDescriptor:
    """Halves [64, 64] of tiles of the sums, which the two consumers compute."""
    return by_rows(64, 64, torch.float32)(sums)
