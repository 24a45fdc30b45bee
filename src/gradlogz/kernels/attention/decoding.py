# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention of few queries to many keys on a GPU, as in decoding: the keys are split and the parts joined.

    one program per key head and part of the keys               all queries of all heads that share them, one tile
        z, a, b, o of gpu.py about the top of the part          sums over its keys, in one pass
    the last of them to finish, for a head with few parts,      join the parts i of every row
    or one program per query, in a second launch
        top = max_i top_i,  r_i = top_i - top
        z = sum_i e^r_i z_i                                     o likewise
        a = sum_i e^r_i (a_i + r_i z_i)
        b = sum_i e^r_i (b_i + 2 r_i a_i + r_i^2 z_i)

Each key is needed once per query, so that the time is that of reading keys and values. Reading at the full memory rate
takes all multiprocessors, while one program per head would use few: the keys are split into enough parts to occupy all.
The heads of a group read their keys together. Joining is exact and in the order of the parts, so that results are
bitwise reproducible.

A call takes about 40 microseconds on the device, less than Triton's lookup of two kernels. The lookup is avoided here:
strides are in units of 16 bytes and no other integer is specialised, so that one compiled kernel serves a cache of any
length and its handle is cached. The arguments of a launch are cached too, since the layers of a model share them, and
so is the memory for the parts in the default stream, where calls run one after the other.

Read next: gpu.py (many queries; also the backward pass of few).
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ..._typing import Float, Tensor
from .gpu import (
    PRECISION,
    START,
    UNMASKED,
    _kind,
    _logit,
    _padded,
    _span,
    _store_statistics,
    _strided,
    _tile,
    backward,
    coefficients,
)
from .launching import Kernel, aligned, current_stream, on_its_device
from .reference import Statistics, StatisticsAndMean
from .scoring import Scoring, Sight, blocks

__all__ = ["backward", "coefficients", "forward"]


class Tiling(NamedTuple):
    """Numbers of keys in a tile, of warps, of pipeline stages, and of programs per multiprocessor."""

    keys: int
    warps: int
    stages: int
    programs: int


# The fastest of those tried on an H200, for head sizes up to 64, 128 and 256: the pipelined tiles fill the memory of a
# multiprocessor. A mask is not pipelined; while one program waits for it another one reads.
TILINGS = {
    "half": (Tiling(128, 4, 3, 2), Tiling(128, 4, 3, 1), Tiling(64, 4, 3, 1)),
    "half, masked": (Tiling(64, 4, 3, 4), Tiling(64, 4, 3, 2), Tiling(32, 4, 3, 2)),
    "float32": (Tiling(64, 4, 3, 2), Tiling(64, 4, 3, 1), Tiling(32, 4, 2, 1)),
}
# Parts joined at a time; largest numbers of parts and of rows that the last program joins itself.
PARTS = 8
FEW_PARTS = 16
FEW_ROWS = 16
# Integers that Triton must not specialise, so that one handle serves all values.
INTEGERS = [f"{name}_{axis}" for name in ("query", "key", "value") for axis in ("batch", "head", "row")]
INTEGERS += ["key_heads", "m", "n", "lines", "splits"]


# One part of the keys -------------------------------------------------------------------------------------------------


@triton.jit
def _points(first, stride, index, limit, ALL: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Rows of keys or values; 0 outside the tensor."""
    column = tl.arange(0, PADDED)
    place = first + index[:, None] * stride + column[None, :]
    if ALL and SIZE == PADDED:
        return tl.load(place)
    else:
        return tl.load(place, (index < limit)[:, None] & (column < SIZE)[None, :], 0.0)


@triton.jit
def _absorb(
    state, q, key, key_row, value, value_row, row, batch, head, span, sight, scoring, m, n,
    EDGE: tl.constexpr, STATISTICS: tl.constexpr, BN: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, SIZE_V: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tiles of keys inside the band, or those at its edge, to the running sums."""
    o, top, z, a, b = state
    begin, inner, outer, end = span
    for step in tl.range(0, end - begin - (outer - inner) if EDGE else outer - inner):
        column = _tile(step, begin, inner, outer, EDGE) * BN + tl.arange(0, BN)
        k = _points(key, key_row, column, n, not EDGE, SIZE, D)
        v = _points(value, value_row, column, n, not EDGE, SIZE_V, DV)
        t = tl.dot(q, k.T, input_precision=PRECISION)
        s, _ = _logit(t, row[:, None], column[None, :], batch, head[:, None], sight, scoring, m, n, EDGE)
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
        o = tl.dot(p.to(v.dtype), v, o * fade[:, None], input_precision=PRECISION)
        top = risen
    return o, top, z, a, b


@triton.jit
def _store(
    state, output, statistics, line, lines, there,
    STATISTICS: tl.constexpr, SIZE_V: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Store the output and the statistics of rows."""
    rows = statistics, statistics + lines, statistics + 2 * lines, statistics + 3 * lines, statistics + 4 * lines
    o = _store_statistics(state, rows, line, there, STATISTICS)
    column = tl.arange(0, DV)
    place = output + line.to(tl.int64)[:, None] * SIZE_V + column[None, :]
    tl.store(place, o.to(output.dtype.element_ty), there[:, None] & (column < SIZE_V)[None, :])


@triton.jit
def _joined(
    parts, line, lines, splits, there,
    STATISTICS: tl.constexpr, BM: tl.constexpr, SIZE_V: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Join the sums of rows from their parts, which other programs stored: bypass the nearest cache."""
    column = tl.arange(0, DV)
    nothing = tl.zeros([BM], tl.float32)
    o, top, z, a, b = tl.zeros([BM, DV], tl.float32), nothing + START, nothing, nothing, nothing
    for split in tl.range(0, splits, loop_unroll_factor=4):
        at = line * splits + split
        place = parts + (lines * splits * SIZE_V + at)
        top_i = tl.load(place, there, START, cache_modifier=".cg")
        z_i = tl.load(place + lines * splits, there, 0.0, cache_modifier=".cg")
        risen = tl.maximum(top, top_i)
        fade = tl.exp2(top - risen)
        fade_i = tl.exp2(top_i - risen)
        if STATISTICS:
            a_i = tl.load(place + 2 * lines * splits, there, 0.0, cache_modifier=".cg")
            b_i = tl.load(place + 3 * lines * splits, there, 0.0, cache_modifier=".cg")
            r = tl.where(top == START, 0.0, top - risen)
            r_i = tl.where(top_i == START, 0.0, top_i - risen)
            b = fade * (b + r * (2.0 * a + r * z)) + fade_i * (b_i + r_i * (2.0 * a_i + r_i * z_i))
            a = fade * (a + r * z) + fade_i * (a_i + r_i * z_i)
        z = fade * z + fade_i * z_i
        visible = there[:, None] & (column < SIZE_V)[None, :]
        o_i = tl.load(parts + at[:, None] * SIZE_V + column[None, :], visible, 0.0, cache_modifier=".cg")
        o = o * fade[:, None] + o_i * fade_i[:, None]
        top = risen
    return o, top, z, a, b


@triton.jit(do_not_specialize=INTEGERS)
def _split(
    query, key, value, output, statistics, parts, ended, sight, scoring,
    query_batch: tl.int64, query_head: tl.int64, query_row: tl.int64,
    key_batch: tl.int64, key_head: tl.int64, key_row: tl.int64,
    value_batch: tl.int64, value_head: tl.int64, value_row: tl.int64,
    key_heads: tl.int32, m: tl.int32, n: tl.int32, lines: tl.int32, splits: tl.int32,
    STATISTICS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, SIZE_V: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) % splits
    shared = tl.program_id(0) // splits
    batch = shared // key_heads
    head = shared % key_heads
    index = tl.arange(0, BM)
    rows = GROUP * m
    there = index < rows
    row = tl.where(there, index % m, m)
    head_of_row = head * GROUP + tl.where(there, index // m, 0)

    begin, inner, outer, end = _span(n - m, n - 1, scoring.left, scoring.right, n, sight, 0, 0, BN)
    each = tl.cdiv(end - begin, splits)
    end = tl.minimum(end, begin + (split + 1) * each)
    begin = tl.minimum(end, begin + split * each)
    inner = tl.minimum(tl.maximum(inner, begin), end)
    outer = tl.minimum(tl.maximum(outer, inner), end)
    span = begin, inner, outer, end

    column = tl.arange(0, D)
    place = query + batch * (query_batch * UNIT)
    place = place + (head_of_row * (query_head * UNIT) + row * (query_row * UNIT))[:, None] + column[None, :]
    q = tl.load(place, there[:, None] & (column < SIZE)[None, :], 0.0)
    key += batch * (key_batch * UNIT) + head * (key_head * UNIT)
    value += batch * (value_batch * UNIT) + head * (value_head * UNIT)
    nothing = tl.zeros([BM], tl.float32)
    state = tl.zeros([BM, DV], tl.float32), nothing + START, nothing, nothing, nothing
    if sight.bias is None and sight.mask is None and sight.segments is None:
        state = _absorb(
            state, q, key, key_row * UNIT, value, value_row * UNIT, row, batch, head_of_row, span, sight, scoring, m, n,
            False, STATISTICS, BN, SIZE, D, SIZE_V, DV, PRECISION,
        )  # fmt: skip
    state = _absorb(
        state, q, key, key_row * UNIT, value, value_row * UNIT, row, batch, head_of_row, span, sight, scoring, m, n,
        True, STATISTICS, BN, SIZE, D, SIZE_V, DV, PRECISION,
    )  # fmt: skip

    line = shared * rows + index
    if parts is None:
        _store(state, output, statistics, line, lines, there, STATISTICS, SIZE_V, DV)
    else:
        o, top, z, a, b = state
        line = line * splits + split
        column = tl.arange(0, DV)
        tl.store(parts + line[:, None] * SIZE_V + column[None, :], o, there[:, None] & (column < SIZE_V)[None, :])
        place = parts + (lines * splits * SIZE_V + line)
        tl.store(place, top, there)
        tl.store(place + lines * splits, z, there)
        if STATISTICS:
            tl.store(place + 2 * lines * splits, a, there)
            tl.store(place + 3 * lines * splits, b, there)
        if ended is not None:
            tl.debug_barrier()  # all threads have stored before one of them counts
            if tl.atomic_add(ended + shared, 1) == splits - 1:
                tl.store(ended + shared, 0)  # reset for the next launch
                line = shared * rows + index
                state = _joined(parts, line, lines, splits, there, STATISTICS, BM, SIZE_V, DV)
                _store(state, output, statistics, line, lines, there, STATISTICS, SIZE_V, DV)


# All parts ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["lines", "splits"])
def _join(
    parts, output, statistics, lines: tl.int32, splits: tl.int32,
    STATISTICS: tl.constexpr, PARTS: tl.constexpr, SIZE_V: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    column = tl.arange(0, DV)
    nothing = tl.zeros([1], tl.float32)
    o, top, z, a, b = tl.zeros([1, DV], tl.float32), nothing + START, nothing, nothing, nothing
    for first in tl.range(0, splits, PARTS):
        split = first + tl.arange(0, PARTS)
        there = split < splits
        at = line * splits + split
        place = parts + (lines * splits * SIZE_V + at)
        top_i = tl.load(place, there, START)
        z_i = tl.load(place + lines * splits, there, 0.0)
        risen = tl.maximum(top, tl.max(top_i, 0))
        fade = tl.exp2(top - risen)
        fade_i = tl.exp2(top_i - risen)
        if STATISTICS:
            a_i = tl.load(place + 2 * lines * splits, there, 0.0)
            b_i = tl.load(place + 3 * lines * splits, there, 0.0)
            r = tl.where(top == START, 0.0, top - risen)
            r_i = tl.where(top_i == START, 0.0, top_i - risen)
            b = fade * (b + r * (2.0 * a + r * z)) + tl.sum(fade_i * (b_i + r_i * (2.0 * a_i + r_i * z_i)), 0)
            a = fade * (a + r * z) + tl.sum(fade_i * (a_i + r_i * z_i), 0)
        z = fade * z + tl.sum(fade_i * z_i, 0)
        o_i = tl.load(parts + at[:, None] * SIZE_V + column[None, :], there[:, None] & (column < SIZE_V)[None, :], 0.0)
        o = o * fade[:, None] + tl.sum(fade_i[:, None] * o_i, 0)[None, :]
        top = risen
    one = tl.arange(0, 1)
    _store((o, top, z, a, b), output, statistics, line + one, lines, one == 0, STATISTICS, SIZE_V, DV)


# Arguments of the kernels ---------------------------------------------------------------------------------------------


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
    """Attention and the statistics of its rows, as in gpu.py."""
    layout = query.stride(), key.stride(), value.stride()
    masked = sight.bias is not None or sight.mask is not None or sight.segments is not None
    call = _call(query.dtype, query.device, query.shape, value.shape, layout, scoring, statistics, masked)
    if call is None or (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16:
        return forward(
            aligned(query), aligned(key), aligned(value), sight, scoring, statistics=statistics, separate=separate
        )
    split, join, programs, lines, splits, workspace, shape, rows, numbers, _, _ = call
    stream = current_stream(query.device)
    output = torch.empty_like(query) if shape is None else query.new_empty(shape)
    statistics_rows = torch.empty_strided(*rows, dtype=torch.float32, device=query.device)
    parts = ended = None
    if splits > 1:
        parts, ended = (_shared_workspace if stream == 0 else _new_workspace)(query.device, workspace, programs)
    if masked:
        strided = _strided(sight)
        split = _kernel(_split, split.constants, call.options, (*call.kind, _kind(strided)))
        numbers = (strided, *numbers[1:])
    pointers = query, key, value, output, statistics_rows, parts, ended if join is None else None
    split.launch(programs, stream, (), pointers, numbers)
    if join is not None:
        join.launch(lines, stream, (), (parts, output, statistics_rows), (lines, splits))
    *four, mean_logit = (row.clone() for row in statistics_rows) if separate else statistics_rows.unbind()
    result = StatisticsAndMean(output, *four)
    result.mean_logit = mean_logit
    return result


_WORKSPACES: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _shared_workspace(device: torch.device, size: int, programs: int) -> tuple[Tensor, Tensor]:
    """Workspace shared by all calls in the default stream of a device, which run one after the other.

    Other streams do not share it: a graph captured in one may be replayed in several.
    """
    workspace = _WORKSPACES.get(device)
    if workspace is None or workspace[0].numel() < size or workspace[1].numel() < programs:
        _WORKSPACES[device] = workspace = _new_workspace(device, size, programs)
    return workspace


def _new_workspace(device: torch.device, size: int, programs: int) -> tuple[Tensor, Tensor]:
    """Memory for the parts, and counters of finished parts, which are 0 before and after each launch."""
    parts = torch.empty(size, device=device, dtype=torch.float32)
    return parts, torch.zeros(programs, device=device, dtype=torch.int32)


@cache
def _kernel(function: Any, constants: tuple[Any, ...], options: tuple[int, int], _kind: tuple[Any, ...]) -> Kernel:
    warps, stages = options
    return Kernel(function, constants, {"num_warps": warps, "num_stages": stages})


class _Call(NamedTuple):
    """Kernels, sizes and arguments shared by all calls with operands of equal sizes and strides."""

    split: Kernel
    join: Kernel | None  # None: the last program joins the parts, or there is only one
    programs: int
    lines: int
    splits: int
    workspace: int
    output: tuple[int, ...] | None  # None: like the query
    rows: tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides of the statistics
    numbers: tuple[Any, ...]
    options: tuple[int, int]
    kind: tuple[Any, ...]


@lru_cache(maxsize=1024)
def _call(
    dtype: torch.dtype,
    device: torch.device,
    query_shape: torch.Size,
    value_shape: torch.Size,
    layout: tuple[tuple[int, ...], ...],
    scoring: Scoring,
    statistics: bool,
    masked: bool,
) -> _Call | None:
    """Prepare a call; None for strides that are not multiples of 16 bytes."""
    (b, h, m, d), (_, hk, n, v) = query_shape, value_shape
    unit = 16 // dtype.itemsize
    strides = [stride for strides in layout for stride in strides[:3]]
    if any(strides[3] != 1 for strides in layout) or any(stride % unit for stride in strides):
        return None
    tiling, rows = _tiling(dtype, h // hk * m, max(d, v), masked)
    scoring = _without_idle_limits(scoring, m, n)
    lines, splits = b * h * m, _splits(b * hk, m, n, scoring, tiling, device)
    joins_itself = splits <= FEW_PARTS and rows == FEW_ROWS
    constants = statistics, h // hk, unit, rows, tiling.keys, d, _padded(d), v, _padded(v), PRECISION
    kind = device, dtype, splits == 1, joins_itself, scoring.softcap is None, scoring.left, scoring.right
    split = _kernel(_split, constants, (tiling.warps, tiling.stages), kind)
    join = (
        None
        if joins_itself or splits == 1
        else _kernel(_join, (statistics, PARTS, v, _padded(v)), (1, 1), (device, dtype))
    )
    numbers = (UNMASKED, scoring, *(stride // unit for stride in strides), hk, m, n, lines, splits)
    like_query = v == d and layout[0] == (h * m * d, m * d, d, 1)
    output = None if like_query else (b, h, m, v)
    statistics_layout = (5, b, h, m), (lines, h * m, m, 1)
    workspace, options = lines * splits * (v + 4), (tiling.warps, tiling.stages)
    return _Call(
        split, join, b * hk * splits, lines, splits, workspace, output, statistics_layout, numbers, options, kind
    )


def _tiling(dtype: torch.dtype, queries: int, size: int, masked: bool) -> tuple[Tiling, int]:
    """Tiling for the queries of a key head and the larger head size, and the number of rows of its tiles."""
    few, kind = queries <= FEW_ROWS, "float32" if dtype is torch.float32 else "half"
    tiling = TILINGS["half, masked" if masked and few and kind == "half" else kind][(size > 64) + (size > 128)]
    if few:
        return tiling, FEW_ROWS
    # Hopper multiplies 64 rows at once, which need shared memory too.
    return tiling._replace(keys=tiling.keys // 2), max(64, _padded(queries))


def _splits(groups: int, m: int, n: int, scoring: Scoring, tiling: Tiling, device: torch.device) -> int:
    """Number of parts of the keys: enough to occupy the device, each with at least one tile."""
    if scoring.left is not None or scoring.right is not None:
        n = next(blocks(m, n, scoring, m)).keys
    return max(1, min(tiling.programs * _multiprocessors(device) // groups, n // tiling.keys))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _without_idle_limits(scoring: Scoring, m: int, n: int) -> Scoring:
    """Remove the sides of the band that hide no key: in decoding, causality is no restriction."""
    scale, softcap, left, right = scoring
    if left is not None:
        left = None if left >= n - 1 else max(left, -m - n)
    if right is not None:
        right = None if right >= m - 1 else max(right, -m - n)
    return Scoring(float(scale), None if softcap is None else float(softcap), left, right)
