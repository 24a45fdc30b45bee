"""Attention on the CPU, compiled by numba: who is asked, by how many threads, with what memory.

    forward, backward      what dispatch.py calls: tensors to addresses, a problem cut into tasks
    run                    threads take tasks from one counter until there are none

Results are the same to the bit for any number of threads. Kernels are compiled at the first call and kept on disk.

Read next: tiles.py (what a task does), ../simd.py (the vector instructions).
"""

import ctypes
import os
import threading
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numba import cfunc, types

from ..._typing import Float, Tensor
from .. import simd
from ..simd import BYTES, INT64, LANES, ROWS, WIDTH, Writer, instruction, read_double, read_integer, take, whole
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
    compiled,
    differentiate_task,
)

GROUPS = 4  # groups of queries that share a tile of keys
FEW = 6  # queries up to which one after the other is faster than all in the lanes
EVERYWHERE = 1 << 40  # a band without an end
LINE = 64  # bytes of a cache line
WORTH_A_THREAD = 1 << 21  # multiplications, about 50 microseconds

# --------------------------------------------------------------------------------------------------------- threads
HEADER = 5  # numbers before a problem in memory: next task, next thread, workspace, bytes of it per thread, two floats
PLACES = AttentionProblem._fields.index("rows")  # the fields before it are places
PLACE = types.NamedUniTuple(types.int64, len(RowAddress._fields), RowAddress)
PROBLEM = types.NamedTuple(
    [PLACE] * PLACES + [types.int64] * (len(AttentionProblem._fields) - PLACES), AttentionProblem
)


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
    """A number that changes with the kernels: of what it keeps, numba compares this file and what a worker encloses."""
    return zlib.crc32(Path(tiles.__file__).read_bytes() + Path(simd.__file__).read_bytes())


@cache
def attend_worker() -> Any:
    """What a thread does forward: take tasks until there are none. Compiled at the first call."""
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

    memory: Any = numpy.zeros(0, numpy.uint8)
    address = 0  # its first cache line

    def reserve(self, size: int) -> int:
        if self.memory.size < size + LINE:
            self.memory = numpy.zeros(size + LINE, numpy.uint8)
            self.address = -(-self.memory.ctypes.data // LINE) * LINE
        return self.address


team = cache(Team)
workspace = Workspace()


class ThreadPlan(NamedTuple):
    """What is written for the threads, but for addresses: the same for all problems of one layout."""

    numbers: "array[int]"
    settings: "array[float]"
    threads: int
    size: int  # bytes of workspace of a thread


def planned(problem: AttentionProblem, scoring: Scoring, threads: int, numbers: int) -> ThreadPlan:
    """The plan of a problem; `numbers` is the workspace of a thread."""
    size = -(-numbers * BYTES // LINE) * LINE
    settings = array("d", (scoring.scale, scoring.softcap or 0.0))
    header = (0, 0, 0, size, settings.buffer_info()[0])
    of_problem: tuple[Any, ...] = (*chain.from_iterable(problem[:PLACES]), *problem[PLACES:])  # type: ignore[arg-type]
    written = array("q", (*header, *of_problem))
    return ThreadPlan(written, settings, max(1, min(threads, problem.tasks)), size)


def run(worker: Any, plan: ThreadPlan, tensors: tuple[Tensor | None, ...], rows: Tensor) -> None:
    """Write down where the tensors are, in the order of the fields of a problem, and have the plan worked off."""
    written = plan.numbers[:]  # tasks and threads are counted in it
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
    statistics: bool = True,  # noqa: ARG001  # they cost under 5 %, so one kernel serves both
) -> Statistics:
    """All statistics of every row, float32."""
    query, key, value, sight = _usable(query), _usable(key), _usable(value), _usable_sight(sight)
    (b, h, m, _), of_value = query.shape, value.shape
    output, rows = query.new_empty(b, h, m, of_value[3]), query.new_empty(4, b, h, m)
    bias, mask, segments = sight
    near = None if bias is None and mask is None and segments is None else tuple(map(_layout, sight))
    layouts = (query.shape, query.stride()), (key.shape, key.stride()), (of_value, value.stride())
    plan = _forward_plan(layouts, near, scoring, torch.get_num_threads())
    run(attend_worker(), plan, (query, key, value, bias, mask, segments, output), rows)
    return Statistics(output, *rows.unbind(0))


@lru_cache(maxsize=1024)
def _forward_plan(
    layouts: tuple[Layout, ...], near: tuple[Layout | None, ...] | None, scoring: Scoring, most: int
) -> ThreadPlan:
    (b, h, m, d), (_, _, n, v) = layouts[0][0], layouts[2][0]
    if m <= FEW:  # slower by the multiplication: a second thread is worth it sooner
        groups, tasks, numbers = 0, b * h * m, d + v + ROW_SUMS * LANES + n + LANES
        threads = _threads(b * h * m * n * (d + FEW * v), most)
    else:
        groups, threads = GROUPS, _threads(b * h * m * n * (d + v), most)
        while groups > 1 and b * h * -(-m // (LANES * groups)) < 2 * threads:
            groups //= 2
        tasks = b * h * -(-m // (LANES * groups))
        numbers = groups * LANES * (d + v + ROWS + ROW_SUMS) + TILE * (LANES + d + v + ROWS)
    output = torch.Size((b, h, m, v)), (h * m * v, m * v, v, 1)
    return planned(_problem(layouts, near, scoring, output, groups, tasks), scoring, threads, numbers)


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

    threads = _threads(b * h * m * n * (2 * v + 3 * d), torch.get_num_threads())
    groups = max(1, min(GROUPS, GROUPS * 256 // (d + v)))
    blocks, chunks = -(-m // (LANES * groups)), -(-n // CHUNK)
    # Whole key heads cost five products a tile, queries and keys apart seven, but shared out evenly.
    is_whole = 5 * threads * -(-b * hk // threads) <= 7 * b * hk
    whole_tasks, query_tasks, key_tasks = (b * hk, 0, 0) if is_whole else (0, b * h * blocks, b * hk * chunks)
    tasks = whole_tasks + query_tasks + key_tasks + (0 if grad_bias is None else bias_b * bias_h * chunks)
    read, written = (query, key, value, *sight, grad_output), (grad_query, grad_key, grad_value, grad_bias)
    of_query, of_key, of_value, *near, of_output = map(_layout, read)
    layouts = of_query, of_key, of_value
    problem = _problem(layouts, tuple(near), scoring, of_output, groups, tasks)._replace(  # type: ignore[arg-type]
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
    run(differentiate_worker(), planned(problem, scoring, threads, numbers), (*read, *written), of_rows)
    return grad_query, grad_key[..., :n, :d], grad_value[..., :n, :v], grad_bias


def _layout(tensor: Tensor | None) -> Layout | None:
    return None if tensor is None else (tensor.shape, tensor.stride())


def _problem(
    layouts: tuple[Layout, ...],
    near: tuple[Layout | None, ...] | None,
    scoring: Scoring,
    output: Layout,
    groups: int,
    tasks: int,
) -> AttentionProblem:
    """What forward and backward share: query, key and value, the tensors beside them, the output."""
    query, key, value = layouts
    bias, mask, segments = (None, None, None) if near is None else near
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


def _threads(multiplications: int, most: int) -> int:
    """As many as torch has, but one where a second would come too late."""
    return most if multiplications > WORTH_A_THREAD else 1


def _usable(tensor: Tensor) -> Tensor:
    """With its rows in one piece, and in memory: neither negated on reading nor zeros that are nowhere."""
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
    """The strides; the address comes with the tensor."""
    if layout is None:
        return NOWHERE
    (b, h, rows, _), stride = layout
    return RowAddress(0, stride[0] if b > 1 else 0, stride[1] if h > 1 else 0, stride[2] if rows > 1 else 0)
