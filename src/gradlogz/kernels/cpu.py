"""Attention on the CPU, compiled by numba: who is asked, by how many threads, with what memory.

    forward, backward      what dispatch.py calls: tensors to addresses, a problem cut into tasks
    run                    threads take tasks from one counter until there are none

Results are the same to the bit for any number of threads. Kernels are compiled at the first call and kept on disk.

Read next: tiles.py (what a task does), simd.py (the vector instructions).
"""

import ctypes
import os
import threading
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy
import torch
from numba import cfunc, types

from .._typing import Float, Tensor
from . import simd, tiles
from .reference import Statistics
from .scoring import Scoring, Sight
from .simd import BYTES, INT64, LANES, ROWS, WIDTH, Writer, instruction, read_double, read_integer, take, whole
from .tiles import (
    CHUNK,
    NOWHERE,
    ROW_SUMS,
    TILE,
    Place,
    Problem,
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
PLACES = Problem._fields.index("rows")  # the fields before it are places
PLACE = types.NamedUniTuple(types.int64, len(Place._fields), Place)
PROBLEM = types.NamedTuple([PLACE] * PLACES + [types.int64] * (len(Problem._fields) - PLACES), Problem)


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


def run(worker: Any, problem: Problem, scoring: Scoring, threads: int, numbers: int) -> None:
    """Write the plan and have it worked off; `numbers` is the workspace of a thread."""
    threads = max(1, min(threads, problem.tasks))
    size = -(-numbers * BYTES // LINE) * LINE
    settings = array("d", (scoring.scale, scoring.softcap or 0.0))
    header = (0, 0, workspace.reserve(threads * size), size, settings.buffer_info()[0])
    plan = array("q", (*header, *chain.from_iterable(problem[:PLACES]), *problem[PLACES:]))  # type: ignore[arg-type, type-var]
    team().run(worker, threads, plan.buffer_info()[0])


# --------------------------------------------------------------------------------------------------------- drivers
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
    (b, h, m, d), v = query.shape, value.shape[-1]
    query, key, value, sight = _usable(query), _usable(key), _usable(value), _usable_sight(sight)
    output, rows = query.new_empty(b, h, m, v), query.new_empty(4, b, h, m)
    threads = _threads(query, key, v)
    if m <= FEW:  # slower by the multiplication: a second thread is worth it sooner
        threads = _threads(query, key, FEW * v)
        problem = _problem(query, key, value, sight, scoring, output, rows, 0, b * h * m)
        run(attend_worker(), problem, scoring, threads, d + v + ROW_SUMS * LANES + key.shape[2] + LANES)
        return Statistics(output, *rows.unbind(0))
    groups = GROUPS
    while groups > 1 and b * h * -(-m // (LANES * groups)) < 2 * threads:
        groups //= 2
    tasks = b * h * -(-m // (LANES * groups))
    problem = _problem(query, key, value, sight, scoring, output, rows, groups, tasks)
    numbers = groups * LANES * (d + v + ROWS + ROW_SUMS) + TILE * (LANES + d + v + ROWS)
    run(attend_worker(), problem, scoring, threads, numbers)
    return Statistics(output, *rows.unbind(0))


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

    threads = _threads(query, key, 2 * v + 2 * d)
    groups = max(1, min(GROUPS, GROUPS * 256 // (d + v)))
    blocks, chunks = -(-m // (LANES * groups)), -(-n // CHUNK)
    # Whole key heads cost five products a tile, queries and keys apart seven, but shared out evenly.
    is_whole = 5 * threads * -(-b * hk // threads) <= 7 * b * hk
    whole_tasks, query_tasks, key_tasks = (b * hk, 0, 0) if is_whole else (0, b * h * blocks, b * hk * chunks)
    tasks = whole_tasks + query_tasks + key_tasks + (0 if grad_bias is None else bias_b * bias_h * chunks)
    problem = _problem(query, key, value, sight, scoring, grad_output, of_rows, groups, tasks)._replace(
        grad_query=_place(grad_query),
        grad_key=_place(grad_key),
        grad_value=_place(grad_value),
        grad_bias=_place(grad_bias),
        curved=int(curved),
        bias_b=bias_b,
        bias_h=bias_h,
        whole_tasks=whole_tasks,
        query_tasks=query_tasks,
        key_tasks=key_tasks,
    )
    per_group = 3 * d + 2 * v + ROWS + 2 * WIDTH + ROW_SUMS
    numbers = groups * LANES * per_group + TILE * (3 * LANES + d + v + ROWS)
    run(differentiate_worker(), problem, scoring, threads, numbers)
    return grad_query, grad_key[..., :n, :d], grad_value[..., :n, :v], grad_bias


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Sight,
    scoring: Scoring,
    output: Tensor,
    rows: Tensor,
    groups: int,
    tasks: int,
) -> Problem:
    """What forward and backward share."""
    (b, h, m, d), (_, hk, n, v) = query.shape, value.shape
    segments = sight.segments
    return Problem(
        query=_place(query),
        key=_place(key),
        value=_place(value),
        bias=_place(sight.bias),
        mask=_place(sight.mask),
        segments=NOWHERE if segments is None else Place(segments.data_ptr(), n if segments.shape[0] > 1 else 0),
        output=_place(output),
        grad_query=NOWHERE,
        grad_key=NOWHERE,
        grad_value=NOWHERE,
        grad_bias=NOWHERE,
        rows=rows.data_ptr(),
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


def _threads(query: Tensor, key: Tensor, products: int) -> int:
    """As many as torch has, but one where a second would come too late."""
    b, h, m, d = query.shape
    return torch.get_num_threads() if b * h * m * key.shape[2] * (d + products) > WORTH_A_THREAD else 1


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


def _place(tensor: Tensor | None) -> Place:
    if tensor is None:
        return NOWHERE
    (b, h, rows, _), stride = tensor.shape, tensor.stride()
    return Place(tensor.data_ptr(), stride[0] if b > 1 else 0, stride[1] if h > 1 else 0, stride[2] if rows > 1 else 0)
