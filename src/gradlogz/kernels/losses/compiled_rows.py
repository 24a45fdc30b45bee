"""Losses of rows of logits on a CPU, compiled by numba: logits, losses, slopes and gradients of one problem.

    centre    c = k - mean k                                    once, with factor c^T in panels of LANES keys
    rows      s = factor q c^T,  W = dL / d<q, c>,  dq = W c    blocks of BLOCK rows, each row while it is in the cache
    keys      dk = W^T q                                        blocks of BLOCK keys

    clip_sums, clip_merge, clip_rows                            the rows of a loss of rows and columns: see clip_sums

W is the only matrix: all of it up to MATRIX numbers, beyond that some rows at a time. Threads take blocks from one
counter; results are bitwise equal for any number of threads. float32 only; everything that is not in a `Problem` is
torch code in logit_losses.py, and softmax_losses.py has the definitions.

Read next: row_vectors.py (the rows), ../simd.py (the products).
"""

import zlib
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn.functional import pad

from ..._typing import Float, Tensor
from .. import simd, workers
from ..simd import BYTES, LANES, ROWS, WIDTH, put, read, read_integer, take
from ..workers import compile_worker, compiled, team
from . import row_fields, row_losses, row_products, row_vectors
from .row_fields import (
    BASE,
    BIAS,
    BIAS_STEP,
    BLOCK,
    CENTRED,
    DECOUPLED,
    FIRST,
    FIRST_STAGE,
    GRAD_BIAS,
    GRAD_KEY,
    GRAD_QUERY,
    ITSELF,
    KEY,
    KEY_LABELS,
    KEY_ROW,
    KIND,
    LAST_STAGE,
    LOSSES,
    MASK,
    MEMORY,
    NEXT_TASK,
    NEXT_THREAD,
    NUMBERS,
    POSITIVE,
    QUERY,
    QUERY_LABELS,
    QUERY_ROW,
    SCRATCH,
    SETTINGS,
    SLOPE_ROW,
    SUM,
    SUMS,
    D,
    M,
    N,
    place,
    round_up,
    up,
)
from .row_loss import CLIP, Problem
from .row_losses import clip_merge, clip_rows, clip_sums, rows_of_block
from .row_products import centre_keys, key_gradients, transpose_panel

MATRIX = 1 << 22  # numbers of W: 16 MiB
WORTH_A_THREAD = 1 << 21  # multiplications, about 20 microseconds
CENTRE, PANELS, EACH_ROW, CLIP_SUMS, CLIP_MERGE, CLIP_ROWS, EACH_KEY, TOTAL = range(8)


@compiled
def add_losses(p: int) -> None:
    """Sum of all losses."""
    losses, total = place(p, LOSSES), 0.0
    for i in range(read_integer(p, FIRST) + read_integer(p, M)):
        total += numpy.float64(read(losses, i))
    put(read_integer(p, SUM), 0, numpy.float32(total))


@compiled
def tasks_of(p: int, stage: int) -> int:
    """Number of tasks of a stage."""
    if stage in (CENTRE, CLIP_MERGE, TOTAL):
        return 1
    if stage == PANELS:
        return up(read_integer(p, N), LANES) // LANES
    return up(read_integer(p, N) if stage == EACH_KEY else read_integer(p, M), BLOCK) // BLOCK


@compiled
def run_task(p: int, stage: int, task: int, scratch: int) -> None:
    """Run one task of a stage."""
    first = task * BLOCK
    if stage == CENTRE:
        centre_keys(p)
    elif stage == PANELS:
        transpose_panel(p, task)
    elif stage == EACH_ROW:
        rows_of_block(p, first, min(first + BLOCK, read_integer(p, M)), scratch)
    elif stage == CLIP_SUMS:
        clip_sums(p, first, min(first + BLOCK, read_integer(p, M)))
    elif stage == CLIP_MERGE:
        clip_merge(p)
    elif stage == CLIP_ROWS:
        clip_rows(p, first, min(first + BLOCK, read_integer(p, M)), scratch)
    elif stage == EACH_KEY:
        key_gradients(p, first, min(first + BLOCK, read_integer(p, N)))
    else:
        add_losses(p)


SOURCES = simd, workers, row_fields, row_vectors, row_products, row_losses


@cache
def edition() -> int:
    """Checksum of the sources, enclosed by the worker so that numba's disk cache notices changes in them."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in SOURCES))


@cache
def worker() -> Any:
    """Run tasks until none is left; alone, one stage after the other. Compiled at the first call."""
    enclosed = edition()

    def run_tasks(p: int) -> None:
        _ = enclosed
        thread = take(p + 8 * NEXT_THREAD)
        scratch = place(p, SCRATCH) + 2 * thread * read_integer(p, SLOPE_ROW) * BYTES
        first, last = read_integer(p, FIRST_STAGE), read_integer(p, LAST_STAGE)
        if first == last:
            task = take(p)
            while task < tasks_of(p, first):
                run_task(p, first, task, scratch)
                task = take(p)
            return
        is_clip = read_integer(p, KIND) == CLIP
        for stage in range(first, last + 1):
            if stage != EACH_ROW if is_clip else not CLIP_SUMS <= stage <= CLIP_ROWS:
                for task in range(tasks_of(p, stage)):
                    run_task(p, stage, task, scratch)

    return compile_worker(run_tasks)


class RowPlan(NamedTuple):
    """Sizes, threads and the array of numbers of a problem, before its addresses."""

    numbers: "array[int]"
    size: int  # of the memory
    part: int  # number of rows of W
    threads: int
    rows: int  # of the gradients, whole ROWS
    keys: int


@lru_cache(maxsize=256)
def layout(m: int, n: int, d: int, is_clip: bool, max_threads: int) -> RowPlan:
    """Sizes and places in the memory of a call."""
    stride = round_up(n, LANES) + WIDTH  # not a power of 2, whose rows would share a place in the cache
    part = m if is_clip else min(m, round_up(MATRIX // stride, BLOCK) or BLOCK)
    threads = max_threads if m * n * d > WORTH_A_THREAD else 1
    blocks, keys = -(-part // BLOCK) if is_clip else 0, round_up(n, LANES) * d
    sizes = keys + d, keys, ROWS * d, 2 * threads * stride, round_up(part, ROWS) * stride, round_up(m, WIDTH)
    places = accumulate((*sizes, 4 * round_up(m, WIDTH) if is_clip else 0, blocks * stride), initial=0)
    numbers = array("q", bytes(8 * NUMBERS))
    numbers[M], numbers[N], numbers[D], numbers[SLOPE_ROW] = m, n, d, stride
    *starts, size = places
    for index, start in zip(MEMORY, starts, strict=True):
        numbers[index] = start * BYTES
    return RowPlan(numbers, size, part, threads, round_up(m, ROWS), round_up(n, ROWS))


def sum_and_gradients(
    query: Float[Tensor, "m d"],
    key: Float[Tensor, "n d"],
    bias: Float[Tensor, " n"] | None,
    problem: Problem,
    coefficient: float,
    factor: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]] | None:
    """Sum over rows of coefficient times the loss of factor <q, k> + bias, and its gradients.

    None if the sum of a column has lost digits, which only a loss of rows and columns has.
    """
    width = query.shape[1]
    query, key = _rows(query), _rows(key)
    (m, d), n = query.shape, key.shape[0]
    is_clip = problem.kind == CLIP
    template, size, part, threads, rows, keys = layout(m, n, d, is_clip, torch.get_num_threads())
    memory, total = query.new_empty(size), query.new_empty(())
    dq = query.new_empty(rows, d) if wanted[0] else None
    dk = query.new_zeros(keys, d) if wanted[1] else None
    dbias = query.new_zeros(n) if bias is not None and wanted[2] else None
    settings = array("d", (coefficient, factor, problem.margin, *problem.constants))
    numbers = template[:]
    numbers[KIND], numbers[DECOUPLED], numbers[CENTRED] = problem.kind, problem.decoupled, problem.centred
    numbers[SETTINGS], numbers[SUM] = settings.buffer_info()[0], total.data_ptr()
    numbers[QUERY], numbers[QUERY_ROW] = query.data_ptr(), query.stride(0)
    numbers[KEY], numbers[KEY_ROW] = key.data_ptr(), key.stride(0)
    if bias is not None:
        numbers[BIAS], numbers[BIAS_STEP] = bias.data_ptr(), bias.stride(0)
    # `held` has all tensors whose addresses are passed, so that they live until the threads have ended.
    held, (query_labels, key_labels) = [], problem.labels
    indices = (POSITIVE, problem.positive), (ITSELF, problem.itself)
    for index, tensor in (*indices, (QUERY_LABELS, query_labels), (KEY_LABELS, key_labels)):
        if tensor is not None:
            held.append(tensor.long().contiguous())
            numbers[index] = held[-1].data_ptr()
    if problem.without_own_number:
        numbers[ITSELF] = 1
    if problem.mask is not None:
        held.append(problem.mask.contiguous())
        numbers[MASK] = held[-1].data_ptr()
    numbers[BASE] = memory.data_ptr()
    for index, gradient in ((GRAD_QUERY, dq), (GRAD_KEY, dk), (GRAD_BIAS, dbias)):
        if gradient is not None:
            numbers[index] = gradient.data_ptr()
    if threads == 1 and part == m:
        _run(numbers, CENTRE, TOTAL, 1)
    else:
        _run_stages(numbers, part, threads)
    if is_clip and memory[numbers[SUMS] // BYTES + numbers[SLOPE_ROW] - 1] == 0:
        return None
    return total, [_cut(dq, m, width), _cut(dk, n, width), dbias]


def _run(numbers: "array[int]", first: int, last: int, threads: int) -> None:
    """Run stages in one thread, or one stage in several."""
    numbers[NEXT_TASK], numbers[NEXT_THREAD], numbers[FIRST_STAGE], numbers[LAST_STAGE] = 0, 0, first, last
    team().run(worker(), threads, numbers.buffer_info()[0])


def _run_stages(numbers: "array[int]", part: int, threads: int) -> None:
    """Run stage by stage, and for each part of the rows."""
    rows, query, grad_query = numbers[M], numbers[QUERY], numbers[GRAD_QUERY]
    for stage in (CENTRE, PANELS):
        _run(numbers, stage, stage, threads)
    for first in range(0, rows, part):
        numbers[FIRST], numbers[M] = first, min(part, rows - first)
        numbers[QUERY] = query + first * numbers[QUERY_ROW] * BYTES
        numbers[GRAD_QUERY] = grad_query and grad_query + first * numbers[D] * BYTES
        for stage in (CLIP_SUMS, CLIP_MERGE, CLIP_ROWS, EACH_KEY) if numbers[KIND] == CLIP else (EACH_ROW, EACH_KEY):
            _run(numbers, stage, stage, threads)
    _run(numbers, TOTAL, TOTAL, 1)


def _rows(tensor: Tensor) -> Tensor:
    """Vectors with contiguous rows of whole vectors of WIDTH numbers."""
    rest = tensor.shape[1] % WIDTH
    tensor = pad(tensor, (0, WIDTH - rest)) if rest else tensor
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _cut(gradient: Tensor | None, rows: int, width: int) -> Tensor | None:
    """The gradient without the rows and columns that were added; resizing in place takes less time than a view."""
    if gradient is None or gradient.shape[1] == width:
        return None if gradient is None else gradient.resize_(rows, width)
    return gradient[:rows, :width]
