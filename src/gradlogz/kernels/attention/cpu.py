"""Attention on the CPU, compiled by numba: tasks, threads and memory.

    forward, backward      called by dispatch.py: convert tensors to addresses, divide a problem into tasks
    run                    threads take tasks from one counter until none is left

Results are bitwise equal for any number of threads. Kernels are compiled at the first call and cached on disk.

Read next: tiles.py (one task), ../simd.py (the vector instructions).
"""

import zlib
from array import array
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numba import types
from torch.autograd.profiler import record_function

from ..._typing import Float, Tensor
from .. import simd, workers
from ..simd import BYTES, INT64, LANES, ROWS, WIDTH, Writer, instruction, read_double, read_integer, take, whole
from ..workers import LINE, compile_worker, compiled, team, workspace
from . import tiles
from .reference import Statistics
from .scoring import Scoring, Sight
from .tiles import (
    CHUNK,
    NOWHERE,
    ROW_SUMS,
    TILE,
    AttentionProblem,
    RowAddress,
    attend,
    attend_row,
    differentiate_task,
)

GROUPS = 4  # groups of queries that share a tile of keys
FEW = 6  # number of queries up to which one task per row is faster than queries in the lanes
EVERYWHERE = 1 << 40  # an unlimited band
NO_PROFILER = nullcontext()
WORTH_A_THREAD = 1 << 21  # multiplications, about 50 microseconds
LARGE = 256.0  # log normaliser up to which its rounding changes the weights exp(s - G) by less than 2e-5

# --------------------------------------------------------------------------------------------------------- threads
HEADER = 5  # numbers before a problem: next task, next thread, workspace, its bytes per thread, address of two floats
PLACES = AttentionProblem._fields.index("rows")  # the fields before it are row addresses
PLACE = types.NamedUniTuple(types.int64, len(RowAddress._fields), RowAddress)
PROBLEM = types.NamedTuple(
    [PLACE] * PLACES + [types.int64] * (len(AttentionProblem._fields) - PLACES), AttentionProblem
)


@instruction(result=PROBLEM)
def problem_at(write: Writer, plan: Any) -> Any:
    """Read the problem that `run` has written at an address: its fields in order, a RowAddress as four numbers."""
    index = count(HEADER)

    def number() -> Any:
        return write.load(plan, whole(next(index)), INT64)

    def place() -> Any:
        return write.context.make_tuple(write.builder, PLACE, [number() for _ in PLACE])

    fields = [place() if kind is PLACE else number() for kind in PROBLEM]
    return write.context.make_tuple(write.builder, PROBLEM, fields)


@compiled
def setting(plan: int, index: int) -> float:
    """Scale (index 0) or soft cap (index 1)."""
    return read_double(read_integer(plan, 4), index)


@compiled
def memory_of_thread(plan: int) -> int:
    """Address of the workspace of the calling thread; each call returns another one."""
    return read_integer(plan, 2) + take(plan + 8) * read_integer(plan, 3)


@cache
def edition() -> int:
    """Checksum of the kernel sources, enclosed by the workers so that numba's disk cache notices changes in them."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in (tiles, simd, workers)))


@cache
def attend_worker() -> Any:
    """Worker of the forward pass: take tasks until none is left. Compiled at the first call."""
    enclosed = edition()

    def attend_all(plan: int) -> None:
        _ = enclosed
        problem, memory = problem_at(plan), memory_of_thread(plan)
        task = take(plan)
        while task < problem.tasks:
            if problem.groups == 0:
                attend_row(problem, setting(plan, 0), setting(plan, 1), task, memory)
            else:
                attend(problem, setting(plan, 0), setting(plan, 1), task, memory)
            task = take(plan)

    return compile_worker(attend_all)


@cache
def differentiate_worker() -> Any:
    """Worker of the backward pass: take tasks until none is left. Compiled at the first call."""
    enclosed = edition()

    def differentiate_all(plan: int) -> None:
        _ = enclosed
        problem, memory = problem_at(plan), memory_of_thread(plan)
        task = take(plan)
        while task < problem.tasks:
            differentiate_task(problem, setting(plan, 0), setting(plan, 1), task, memory)
            task = take(plan)

    return compile_worker(differentiate_all)


class ThreadPlan(NamedTuple):
    """Input of the threads except addresses: equal for all problems of one layout."""

    numbers: "array[int]"
    settings: "array[float]"
    threads: int
    size: int  # bytes of workspace of a thread


def planned(problem: AttentionProblem, scoring: Scoring, threads: int, numbers: int) -> ThreadPlan:
    """Plan of a problem; `numbers` is the size of the workspace of a thread."""
    size = -(-numbers * BYTES // LINE) * LINE
    settings = array("d", (scoring.scale, scoring.softcap or 0.0))
    header = (0, 0, 0, size, settings.buffer_info()[0])
    fields: tuple[Any, ...] = (*chain.from_iterable(problem[:PLACES]), *problem[PLACES:])  # type: ignore[arg-type]
    written = array("q", (*header, *fields))
    return ThreadPlan(written, settings, max(1, min(threads, problem.tasks)), size)


def run(worker: Any, plan: ThreadPlan, tensors: tuple[Tensor | None, ...], rows: Tensor) -> None:
    """Write the addresses of the tensors, in the order of the fields of a problem, and run the tasks."""
    written = plan.numbers[:]  # a copy: tasks and threads are counted in it
    written[2] = workspace.reserve(plan.threads * plan.size)
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            written[HEADER + 4 * index] = tensor.data_ptr()
    written[HEADER + 4 * PLACES] = rows.data_ptr()
    team().run(worker, plan.threads, written.buffer_info()[0])


# --------------------------------------------------------------------------------------------------------- drivers
Layout = tuple[torch.Size, tuple[int, ...]]  # shape and strides


def forward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    *,
    statistics: bool = True,  # noqa: ARG001  # they cost less than 5 %, so one kernel serves both
    by_rows: bool | None = None,
) -> Statistics:
    """Statistics of every row, float32; by rows, which is faster for few queries, or with the logits of `backward`."""
    output, rows = _forward(
        query, key, value, sight, scoring, by_rows=query.shape[2] <= FEW if by_rows is None else by_rows
    )
    return Statistics(output, *rows.unbind(0)[:4])


def _forward(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, scoring: Scoring, *, by_rows: bool
) -> tuple[Tensor, Tensor]:
    """Output, and rows [5, b, h, m]: G, entropy, variance, largest logit, and G above the largest logit."""
    query, key, value, sight = _usable(query), _usable(key), _usable(value), _usable_sight(sight)
    (b, h, m, _), value_shape = query.shape, value.shape
    output, rows = query.new_empty(b, h, m, value_shape[3]), query.new_empty(5, b, h, m)
    bias, mask, segments = sight
    sight_layouts = None if bias is None and mask is None and segments is None else tuple(map(_layout, sight))
    layouts = (query.shape, query.stride()), (key.shape, key.stride()), (value_shape, value.stride())
    plan = _forward_plan(layouts, sight_layouts, scoring, torch.get_num_threads(), by_rows)
    with _profiled("gradlogz::attention on a CPU"):
        run(attend_worker(), plan, (query, key, value, bias, mask, segments, output), rows)
    return output, rows


@lru_cache(maxsize=1024)
def _forward_plan(
    layouts: tuple[Layout, ...],
    sight_layouts: tuple[Layout | None, ...] | None,
    scoring: Scoring,
    max_threads: int,
    by_rows: bool,
) -> ThreadPlan:
    (b, h, m, d), (_, _, n, v) = layouts[0][0], layouts[2][0]
    if by_rows:  # each multiplication is slower, so a second thread pays off sooner
        groups, tasks, numbers = 0, b * h * m, d + v + ROW_SUMS * LANES + n + LANES
        threads = _threads(b * h * m * n * (d + FEW * v), max_threads)
    else:
        groups, threads = GROUPS, _threads(b * h * m * n * (d + v), max_threads)
        while groups > 1 and b * h * -(-m // (LANES * groups)) < 2 * threads:
            groups //= 2
        tasks = b * h * -(-m // (LANES * groups))
        numbers = groups * LANES * (d + v + ROWS + ROW_SUMS) + TILE * (LANES + d + v + ROWS)
    output = torch.Size((b, h, m, v)), (h * m * v, m * v, v, 1)
    return planned(_problem(layouts, sight_layouts, scoring, output, groups, tasks), scoring, threads, numbers)


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
    """Gradients of query, key, value and bias; rows without mass must have a log normaliser of +inf."""
    (b, h, m, d), (_, hk, n, v) = query.shape, value.shape
    query, key, value, sight = _usable(query), _usable(key), _usable(value), _usable_sight(sight)
    curved = c1 is not None or c2 is not None
    c1, c2 = (torch.zeros_like(c0) if c is None else c for c in (c1, c2))
    if (log_normalizer.abs() > LARGE).logical_and_(log_normalizer != torch.inf).any():
        # G and E are rounded to more than a weight can bear. About the largest logit t they are the small numbers log z
        # and e: p = exp(s - t) / z, and y = s - t - e. Gradients are linear in p / z and in powers of s - t.
        _, (_, entropy, _, top, log_z) = _forward(query, key, value[..., :1], sight, scoring, by_rows=False)
        e, over_z = log_z - entropy, torch.exp(-log_z)
        c0, c1, c2 = (c0 - e * (c1 - e * c2)) * over_z, (c1 - 2 * e * c2) * over_z, c2 * over_z
        grad_output = grad_output * over_z.unsqueeze(-1)
        log_normalizer = mean_logit = top.masked_fill(top == -torch.inf, torch.inf)
    grad_output = _usable(grad_output)
    rows = [log_normalizer, c0, mean_logit, c1, c2] if curved else [log_normalizer, c0]
    row_coefficients = torch.stack(rows)

    padded = -(-n // ROWS) * ROWS
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_key = query.new_zeros(b, hk, padded, -(-d // WIDTH) * WIDTH)
    grad_value = query.new_zeros(b, hk, padded, -(-v // WIDTH) * WIDTH)
    grad_bias = query.new_zeros(sight.bias.shape) if needs_bias and sight.bias is not None else None
    bias_b, bias_h = (1, 1) if grad_bias is None else grad_bias.shape[:2]

    threads = _threads(b * h * m * n * (2 * v + 3 * d), torch.get_num_threads())
    groups = max(1, min(GROUPS, GROUPS * 256 // (d + v)))
    blocks, chunks = -(-m // (LANES * groups)), -(-n // CHUNK)
    # Tasks of entire key heads need five products per tile; tasks of queries and of keys seven, but balance better.
    by_key_head = 5 * threads * -(-b * hk // threads) <= 7 * b * hk
    whole_tasks, query_tasks, key_tasks = (b * hk, 0, 0) if by_key_head else (0, b * h * blocks, b * hk * chunks)
    tasks = whole_tasks + query_tasks + key_tasks + (0 if grad_bias is None else bias_b * bias_h * chunks)
    read, written = (query, key, value, *sight, grad_output), (grad_query, grad_key, grad_value, grad_bias)
    query_layout, key_layout, value_layout, *sight_layouts, output_layout = map(_layout, read)
    layouts = query_layout, key_layout, value_layout
    problem = _problem(layouts, tuple(sight_layouts), scoring, output_layout, groups, tasks)._replace(  # type: ignore[arg-type]
        grad_query=_place(_layout(grad_query)),
        grad_key=_place(_layout(grad_key)),
        grad_value=_place(_layout(grad_value)),
        grad_bias=_place(_layout(grad_bias)),
        curved=int(curved),
        bias_b=bias_b,
        bias_h=bias_h,
        whole_tasks=whole_tasks,
        query_tasks=query_tasks,
        key_tasks=key_tasks,
    )
    per_group = 3 * d + 2 * v + ROWS + 2 * WIDTH + ROW_SUMS
    numbers = groups * LANES * per_group + TILE * (3 * LANES + d + v + ROWS)
    with _profiled("gradlogz::attention_backward on a CPU"):
        run(differentiate_worker(), planned(problem, scoring, threads, numbers), (*read, *written), row_coefficients)
    return grad_query, grad_key[..., :n, :d], grad_value[..., :n, :v], grad_bias


def _profiled(name: str) -> AbstractContextManager[Any]:
    """Context with a name in torch's profiler, which sees no operator in a compiled kernel."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else NO_PROFILER


def _layout(tensor: Tensor | None) -> Layout | None:
    return None if tensor is None else (tensor.shape, tensor.stride())


def _problem(
    layouts: tuple[Layout, ...],
    sight_layouts: tuple[Layout | None, ...] | None,
    scoring: Scoring,
    output: Layout,
    groups: int,
    tasks: int,
) -> AttentionProblem:
    """Problem with the fields that forward and backward share."""
    query, key, value = layouts
    bias, mask, segments = (None, None, None) if sight_layouts is None else sight_layouts
    (b, h, m, d), (_, hk, n, v) = query[0], value[0]
    return AttentionProblem(
        query=_place(query),
        key=_place(key),
        value=_place(value),
        bias=_place(bias),
        mask=_place(mask),
        segments=NOWHERE if segments is None else RowAddress(0, n if segments[0][0] > 1 else 0),
        output=_place(output),
        grad_query=NOWHERE,
        grad_key=NOWHERE,
        grad_value=NOWHERE,
        grad_bias=NOWHERE,
        rows=0,
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


def _threads(multiplications: int, max_threads: int) -> int:
    """Number of threads: that of torch, or one if starting a second would take too long."""
    return max_threads if multiplications > WORTH_A_THREAD else 1


def _usable(tensor: Tensor) -> Tensor:
    """Make rows contiguous and materialised: neither lazily negated nor a zero tensor without memory."""
    if tensor._is_zerotensor() or tensor.is_neg():
        tensor = tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _usable_sight(sight: Sight) -> Sight:
    bias, mask, segments = sight
    return Sight(
        None if bias is None else _usable(bias),
        None if mask is None else _usable(mask),
        None if segments is None else segments.to(torch.int64).contiguous(),
    )


def _place(layout: Layout | None) -> RowAddress:
    """Row address with the strides of a layout; `run` writes the address itself."""
    if layout is None:
        return NOWHERE
    (b, h, rows, _), stride = layout
    return RowAddress(0, stride[0] if b > 1 else 0, stride[1] if h > 1 else 0, stride[2] if rows > 1 else 0)
