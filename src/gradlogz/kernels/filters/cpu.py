"""Switching filters on the CPU, compiled by numba: vectors of targets, shared among threads.

    forward      called by ../../filters/gaussian/switching.py if no gradients are needed
    prepare      compile or load the kernel of online steps

A vector holds one target in each lane; threads take vectors from a shared counter. With too few targets to fill
vectors, the lanes are the modes of one target for imm, and vectors have one lane for other filters. Each thread needs
memory for one step of one vector of targets. Kernels are compiled at the first call, once for each filter and vector
width, and again for fixed sizes if there is much work; they are cached on disk.

Read next: targets_in_lanes.py and modes_in_lanes.py (the compiled functions).
"""

import ctypes
import math
import sys
import zlib
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache, reduce
from itertools import accumulate, chain
from mmap import PAGESIZE
from operator import or_
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from numba import types

from ..._typing import Bool, Float, Tensor
from .. import simd, workers
from ..simd import INT64, Writer, instruction, read_integer, take, whole
from ..workers import LINE, compile_worker, compiled, team, workspace
from . import fields as field_table
from . import lanes, modes_in_lanes, targets_in_lanes
from .fields import FIELDS, MODEL_ENDS, KernelResult, in_one_piece
from .lanes import Lanes, counted, lanes_of, named, nothing
from .modes_in_lanes import filter_alone
from .targets_in_lanes import (
    FilterProblem,
    Memory,
    advance_gpb,
    advance_gpb1,
    advance_imm,
    block_of,
    vectors_of,
)

HEADER = 5  # integers before a problem: next task, next thread, workspace, its bytes per thread, failed blocks
WORTH_A_THREAD = 128  # Kalman filter steps per thread, about 50 microseconds
WORTH_SIZES = 1 << 15  # Kalman filter steps from which a kernel with fixed sizes is compiled
SMALL = 6  # largest state and observation for which loops are unrolled
NUMBERS = {torch.float64: "float64", torch.float32: "float32"}
ALONE = 3  # code of imm with modes in the lanes, after imm, gpb1 and gpb
# Array and shape of the state after the last step; fields of all modes combined come first.
CARRIED = {
    "log_likelihood": ("step", ""),
    "mean": ("m", "gs"),
    "covariance": ("P", "gss"),
    "log_probability": ("log_h", "h"),
}
ONE_PIECE = 1 << 12  # numbers up to which results are allocated together
LARGE = 1 << 22  # bytes from which pages of 2 MiB are worth asking for
ADVICE = 14  # of Linux, to take them


def forward(
    depth: int,
    parameters: tuple[Any, ...],
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    observations: Float[Tensor, "*b t o"],
    observed: Bool[Tensor, "*b t o"] | None,
    *,
    last: bool,
    wanted: frozenset[str],
) -> KernelResult | None:
    """Filter a series; None if a density was not finite and positive.

    Args:
        depth: depth of "gpb"; 0 is "imm".
        parameters: tensors transition, F, Q, H, R, b, d; the last two may be None.
        state: initial mean, covariance, log probability and log likelihood.
        observations: observations without NaN.
        observed: mask of observed entries, None for all.
        last: return only the last step, without time.
        wanted: names of the fields to compute.
    """
    y, (k, s) = observations, parameters[2].shape[-3:-1]
    batch, (steps, o), h = tuple(y.shape[:-2]), y.shape[-2:], state[2].shape[-1]
    form = _form(depth, batch, steps, (k, s, o, h), y.dtype, last, wanted)
    if form is None or any(t.shape != shape for t, shape in zip(state, form.state_shapes, strict=True)):
        return None
    # Inputs
    model_fields = (
        *parameters[:5],
        *(blank if t is None else t for t, blank in zip(parameters[5:], form.blank, strict=True)),
    )
    model = [model_field(form, name, t) for name, t in zip(MODEL_ENDS, model_fields, strict=True)]
    series, mask = [t.contiguous() for t in (y, *state)], None if observed is None else observed.contiguous()
    start_fields = ((t.data_ptr(), *where) for t, where in zip(series, form.read, strict=False))
    fields = array("q", chain(*(field for _, field in model), *start_fields))
    # Outputs
    start, results, tensors = _allocated(form, y)
    # Kernel and threads
    work = y.shape[:-1].numel() * k ** max(depth, 1)
    kernel = _worker(form, y.dtype, work, (s, o), per_target=any(field[1] for _, field in model[:5]))
    threads = max(1, min(torch.get_num_threads(), form.tasks, work // WORTH_A_THREAD))
    plan = form.plan[:]
    plan[2] = workspace.reserve(threads * form.space)
    addresses = (fields.buffer_info()[0], results.buffer_info()[0], start, series[-1].data_ptr())
    plan[HEADER : HEADER + 5] = array("q", (*addresses, 0 if mask is None else mask.data_ptr()))
    team().run(kernel, threads, plan.buffer_info()[0])
    if plan[4]:
        return None
    reported, ends = dict(zip(form.names, tensors, strict=False)), tensors[-len(CARRIED) :]
    return KernelResult(tuple(map(reported.get, FIELDS)), **dict(zip(CARRIED, ends, strict=True)))


def prepare(depth: int, sizes: tuple[int, int, int], targets: int, dtype: torch.dtype, *, per_target: bool) -> None:
    """Compile or load the kernel of online steps; sizes are those of modes, state and observation."""
    k, s, o = sizes
    form = _form(depth, (targets,), 1, (k, s, o, k), dtype, True, frozenset())
    if form is not None:
        _worker(form, dtype, targets * k ** max(depth, 1), (s, o), per_target=per_target)


def _worker(form: "Form", dtype: torch.dtype, work: int, sizes: tuple[int, int], *, per_target: bool) -> Any:
    """Kernel for a form and an amount of work; `per_target` says whether models differ between targets."""
    known = sizes if max(sizes) <= SMALL and work >= WORTH_SIZES else None
    width = form.width if per_target and not form.is_alone else 1
    return worker(form.method, NUMBERS[dtype], form.width, width, known)


class Form(NamedTuple):
    """Layout of a problem, which depends only on its sizes."""

    batch: tuple[int, ...]
    modes: int
    method: int  # imm, gpb1, gpb, or ALONE
    width: int
    tasks: int
    space: int  # bytes of memory per thread
    state_shapes: tuple[tuple[int, ...], ...]
    places: dict[str, int]  # offsets of the model fields in the memory of a thread
    blank: tuple[Tensor, Tensor]  # zeros for missing b and d
    read: tuple[tuple[int, ...], ...]  # `Field` of observations and initial state, without addresses
    names: tuple[str, ...]  # reported fields
    shapes: tuple[tuple[int, ...], ...]  # of the reported fields, then of the final state
    results: tuple[tuple[int, ...], ...]  # `Result` of each, without addresses
    counts: tuple[int, ...]  # number of elements of each
    in_one_piece: "array[int]"  # `Result` of each, with addresses relative to one buffer
    plan: "array[int]"  # arguments of the kernel, without addresses

    @property
    def is_alone(self) -> bool:
        """True if the lanes are modes instead of targets."""
        return self.method == ALONE


@lru_cache(maxsize=256)
def _form(
    depth: int,
    batch: tuple[int, ...],
    steps: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    last: bool,
    wanted: frozenset[str],
) -> Form | None:
    """Layout for the sizes of modes, state, observation and histories; None if the histories do not fit the filter."""
    k, s, o, h = sizes
    most = k if depth == 0 else k ** (depth - 1)
    if h % k or h > max(most, k):
        return None
    most = min(most, h * k ** min(steps, depth))  # largest number reached in these steps
    targets, number, register = math.prod(batch), dtype.itemsize, lanes_of(NUMBERS[dtype])
    is_alone = depth == 0 and 1 < k <= register and 2 * targets <= k * -(-targets // register)
    width = 1 << (k - 1).bit_length() if is_alone else 1 if targets == 1 else register
    even, odd, space = _layout(depth, most, k, s, o, width * number, is_alone)
    # Observations and initial state
    gaussians, row = 1 if depth == 1 else h, steps * o * number
    start_fields = {"m": (gaussians, s), "P": (gaussians, s, s), "log_h": (h,)}
    read = [(row, 0 if is_alone else row, o * number if steps > 1 else 0, number, o, even.y)]
    for name, shape in start_fields.items():
        row, items = math.prod(shape) * number, math.prod(shape) // (k if is_alone else 1)
        read.append((row, items * number if is_alone else row, 0, number, items, getattr(even, name)))
    # Reported fields, those of all modes combined first; then the final state
    after = even if steps % 2 == 0 else odd
    end_h = h if depth < 2 else min(h * k ** min(steps, depth), max(most, k))
    letters = {"k": k, "s": s, "o": o, "h": end_h, "g": 1 if depth == 1 else end_h}
    names = sorted((name for name in FIELDS if name in wanted), key=lambda name: FIELDS[name].shape.startswith("k"))
    chosen, series = [FIELDS[name] for name in names], () if last else (steps,)
    written = [(shape, series, getattr(even, at), getattr(odd, at)) for shape, at, _ in chosen]
    written += [(form, (), getattr(after, at), getattr(after, at)) for at, form in CARRIED.values()]
    shapes, results = [], []
    for form, times, *places in written:
        shape, of_modes = tuple(letters[letter] for letter in form), is_alone and form[:1] in ("k", "g", "h")
        row, items = math.prod(shape) * number, math.prod(shape) // (k if of_modes else 1)
        results.append((row, items, items * number if is_alone else math.prod(times) * row, *places))
        shapes.append((*batch, *times, *shape))
    counts = [math.prod(shape) for shape in shapes]
    starts = accumulate((n * number for n in counts[:-1]), initial=0)
    problem = {
        "observed_row": steps * o,
        "targets": targets,
        "steps": steps,
        "first_reported": steps - 1 if last else 0,
        "modes": k,
        "state": s,
        "observation": o,
        "histories": h,
        "most": most,
        "reported": len(chosen),
        "combined": sum(not field.shape.startswith("k") for field in chosen),
        "needs": reduce(or_, (field.needs for field in chosen), 0),
    }
    return Form(
        batch=batch,
        modes=k,
        method=ALONE if is_alone else min(depth, 2),
        width=width,
        tasks=targets if is_alone else -(-targets // width),
        space=space,
        state_shapes=(*((*batch, *shape) for shape in start_fields.values()), batch),
        places={name: getattr(even, name) for name in MODEL_ENDS},
        blank=(torch.zeros(k, s, dtype=dtype, device="cpu"), torch.zeros(k, o, dtype=dtype, device="cpu")),
        read=tuple(read),
        names=tuple(names),
        shapes=tuple(shapes),
        results=tuple(results),
        counts=tuple(counts),
        in_one_piece=array("q", chain(*((start, *result) for start, result in zip(starts, results, strict=True)))),
        plan=array("q", (0, 0, 0, space, 0, *(problem.get(name, 0) for name in FilterProblem._fields), *even, *odd)),
    )


@lru_cache(maxsize=256)
def _layout(depth: int, most: int, k: int, s: int, o: int, vector: int, is_alone: bool) -> tuple[Memory, Memory, int]:
    """Offsets of the arrays in the memory of a thread for even and odd steps, and its size in bytes.

    New arrays of one step are the old ones of the next. If histories are modes, their reported arrays are reused.
    """
    sizes = [size * vector for size in vectors_of(1 if is_alone else k, s, o, most)]
    even = Memory(*accumulate(sizes[:-1], initial=0))
    if most <= k:
        even = even._replace(log_pi=even.log_h, pi=even.h)
    odd = even._replace(m=even.new_m, P=even.new_P, new_m=even.m, new_P=even.P)
    if most <= k and depth != 1:
        even, odd = (memory._replace(mode_m=memory.new_m, mode_P=memory.new_P) for memory in (even, odd))
    return even, odd, -(-sum(sizes) // LINE) * LINE


def model_field(form: Any, name: str, field: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Contiguous model field and its `Field` entry, for a `Form` or a form of another pass (backward.py)."""
    number = field.element_size()
    field, row, time = in_one_piece(field, MODEL_ENDS[name], form.batch)
    items = field.shape[field.ndim - MODEL_ENDS[name] :].numel()
    row, time = row * number, time * number
    apart, each = row, number
    if form.is_alone:  # a lane is a mode; for the transition matrix, the next mode
        items //= form.modes
        apart, each = (number, form.modes * number) if name == "T" else (items * number, number)
    return field, (field.data_ptr(), row, apart, time, each, items, form.places[name])


def _allocated(form: Form, like: Tensor) -> "tuple[int, array[int], Sequence[Tensor]]":
    """Allocate the outputs: base address, table of `Result`, tensors; small outputs share one buffer."""
    if (total := sum(form.counts)) <= ONE_PIECE:
        buffer = like.new_empty(total)
        # Not views: writing to one view would bump the version counter of all.
        parts = torch.unsafe_split_with_sizes(buffer, form.counts)
        tensors = [p if len(shape) == 1 else p.view(shape) for p, shape in zip(parts, form.shapes, strict=True)]
        return buffer.data_ptr(), form.in_one_piece, tensors
    tensors = [like.new_empty(shape) for shape in form.shapes]
    for tensor in tensors:
        prefer_large_pages(tensor)
    table = chain(*((t.data_ptr(), *result) for t, result in zip(tensors, form.results, strict=True)))
    return 0, array("q", table), tensors


def prefer_large_pages(tensor: Tensor) -> None:
    """Request large pages for a new tensor; otherwise page faults cost more than the filter itself."""
    size = tensor.numel() * tensor.element_size()
    if size >= LARGE and sys.platform == "linux":
        start = -(-tensor.data_ptr() // PAGESIZE) * PAGESIZE
        end = (tensor.data_ptr() + size) // PAGESIZE * PAGESIZE
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ADVICE)  # failure is harmless


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def reader(kind: Any, start: int) -> Any:
    """Instruction that reads a tuple of integers from a plan and adds a base to each."""
    tuples = types.NamedUniTuple(types.int64, len(kind._fields), kind)

    @instruction(result=tuples)
    def code(write: Writer, plan: Any, base: Any) -> Any:
        numbers = [write.load(plan, whole(start + i), INT64) for i in range(len(kind._fields))]
        return write.context.make_tuple(write.builder, tuples, [write.builder.add(n, base) for n in numbers])

    return code


problem_at = reader(FilterProblem, HEADER)
even_at = reader(Memory, HEADER + len(FilterProblem._fields))
odd_at = reader(Memory, HEADER + len(FilterProblem._fields) + len(Memory._fields))


@cache
def edition() -> int:
    """Checksum of the kernel sources, for the cache: numba itself compares only this file and enclosed values."""
    return zlib.crc32(
        b"".join(
            Path(str(module.__file__)).read_bytes()
            for module in (modes_in_lanes, targets_in_lanes, field_table, lanes, simd, workers)
        )
    )


@cache
def worker(method: int, number: str, width: int, model_width: int, sizes: tuple[int, int] | None) -> Any:
    """Function of a thread, which takes blocks of targets until none is left; compiled at the first call."""
    enclosed = (edition(), method, number, width, model_width, sizes)

    def filter_all(plan: int) -> None:
        _ = enclosed
        base = read_integer(plan, 2) + take(plan + 8) * read_integer(plan, 3)
        problem, even, odd = problem_at(plan, 0), even_at(plan, base), odd_at(plan, base)
        state, observation = state_of(problem), observation_of(problem)  # type: ignore[name-defined]
        tasks = (problem.targets + targets_each - 1) // targets_each  # type: ignore[name-defined]
        task = take(plan)
        while task < tasks:
            if not filter_block(zeros(), coefficients(), state, observation, problem, task, base, even, odd):  # type: ignore[name-defined]
                take(plan + 32)
                task = tasks
            else:
                task = take(plan)

    # Enclosed values are part of numba's cache key, and compiled functions serialise differently in every process.
    # Functions that differ between workers are therefore globals of each worker, identified by `enclosed`.
    enclosed_globals = {
        "targets_each": 1 if method == ALONE else width,
        "zeros": nothing(Lanes(number, width)),
        "coefficients": nothing(Lanes(number, model_width)),
        "filter_block": filter_alone if method == ALONE else block_of((advance_imm, advance_gpb1, advance_gpb)[method]),
        "state_of": size_reader("state", sizes and sizes[0]),
        "observation_of": size_reader("observation", sizes and sizes[1]),
    }
    closure = filter_all.__closure__
    function = FunctionType(filter_all.__code__, {**globals(), **enclosed_globals}, filter_all.__name__, None, closure)
    # This names the cache index. Two processes that write to one index could exchange kernels unnoticed, so each kernel
    # has an index of its own.
    function.__qualname__ = filter_all.__name__
    return compile_worker(named(function, *enclosed[:-1], *(sizes or ())))


def size_reader(name: str, known: int | None) -> Any:
    """Function that returns a size of the problem, as a compile-time constant if it is known."""
    if known is not None:
        constant = counted(known)
        return compiled(named(lambda problem: constant(), known))
    read = (lambda problem: problem.state) if name == "state" else (lambda problem: problem.observation)
    return compiled(named(read, name))
