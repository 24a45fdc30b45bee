"""Switching filters on the CPU, compiled by numba: tensors to addresses, targets to threads.

    forward      what ../filters/switching.py calls where nothing is to be differentiated

Targets are taken by the vector (one alone has vectors of one lane); threads take vectors from one counter.
Memory beside the results is that of one step of one vector of targets for each thread. Kernels are compiled at the
first call, once for each of imm, gpb1 and gpb whatever the sizes, and again for sizes with which there is much to do,
and kept on disk.

Read next: switching_steps.py (what is compiled).
"""

import ctypes
import math
import sys
import zlib
from array import array
from functools import cache, lru_cache, reduce
from itertools import accumulate, chain
from mmap import PAGESIZE
from operator import or_
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from numba import types

from .._typing import Bool, Float, Tensor
from . import lanes, simd, switching_steps
from .cpu import LINE, compile_worker, team, workspace
from .lanes import Lanes, counted, lanes_of, named, nothing
from .simd import INT64, Writer, instruction, read_integer, take, whole
from .switching_steps import (
    BEFORE,
    BEFORE_TOGETHER,
    COVARIANCE,
    INNOVATION,
    MEAN,
    MODES,
    Field,
    Memory,
    Problem,
    Result,
    advance_gpb,
    advance_gpb1,
    advance_imm,
    block_of,
    vectors_of,
)
from .tiles import compiled

HEADER = 5  # numbers before a problem: next task, next thread, workspace, bytes of it per thread, blocks that failed
WORTH_A_THREAD = 128  # steps of filters for each thread, some 50 microseconds
WORTH_SIZES = 1 << 15  # steps of filters from which a kernel for states and observations of given sizes is compiled
SMALL = 6  # states and observations of which loops are unrolled
STEP_ENDS = (2, 3, 3, 3, 3, 2, 2)  # dimensions of one step: transition, F, Q, H, R, b, d
NUMBERS = {torch.float64: "float64", torch.float32: "float32"}
# The fields of `Filtered`: where they lie in the memory of a thread, and what is computed for them.
REPORTED = {
    "mean": ("whole_m", MODES | MEAN),
    "covariance": ("whole_P", MODES | MEAN | COVARIANCE),
    "mode_mean": ("mode_m", MODES),
    "mode_covariance": ("mode_P", MODES),
    "log_mode_probability": ("log_pi", MODES),
    "predicted_mean": ("whole_predicted_m", BEFORE | BEFORE_TOGETHER),
    "predicted_covariance": ("whole_predicted_P", BEFORE | BEFORE_TOGETHER),
    "predicted_mode_mean": ("predicted_m", BEFORE),
    "predicted_mode_covariance": ("predicted_P", BEFORE),
    "predicted_log_mode_probability": ("log_c", BEFORE),
    "innovation": ("innovation", BEFORE | INNOVATION),
    "innovation_covariance": ("whole_S", BEFORE | INNOVATION),
    "mode_innovation": ("expected", BEFORE | INNOVATION),
    "mode_innovation_covariance": ("S", BEFORE),
    "mode_log_likelihood": ("likelihood", BEFORE),
    "step_log_likelihood": ("step", 0),
}
CARRIED = ("m", "P", "log_h", "step")
LARGE = 1 << 22  # bytes from which pages of 2 MiB are worth asking for
ADVICE = 14  # of Linux, to take them


class Finished(NamedTuple):
    """The fields of `Filtered` in their order, but for the last, None where not wanted; and what is carried on."""

    reported: tuple[Tensor | None, ...]
    mean: Float[Tensor, "*b g s"]
    covariance: Float[Tensor, "*b g s s"]
    log_probability: Float[Tensor, "*b h"]
    log_likelihood: Float[Tensor, "*b"]


def forward(
    depth: int,
    parameters: tuple[Any, ...],
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    observations: Float[Tensor, "*b t o"],
    seen: Bool[Tensor, "*b t o"] | None,
    *,
    last: bool,
    wanted: frozenset[str],
) -> Finished | None:
    """All steps of a series, or its last alone; None where a density was 0, infinite or none.

    Args:
        depth: of "gpb"; 0 is "imm".
        parameters: tensors transition, F, Q, H, R, b, d; the last two may be None.
        state: mean, covariance, log probability and log likelihood at the beginning.
        observations: without NaN.
        seen: where there are observations, None for everywhere.
        last: report the last step alone, without time.
        wanted: the fields to report, by name.
    """
    *batch, steps, o = observations.shape
    (k, s), h = parameters[2].shape[-3:-1], state[2].shape[-1]
    targets, number = math.prod(batch), NUMBERS[observations.dtype]
    most = k if depth == 0 else k ** (depth - 1)
    kept = 1 if depth == 1 else h
    believed = ((*batch, kept, s), (*batch, kept, s, s), (*batch, h), tuple(batch))
    if any(t.shape != form for t, form in zip(state, believed, strict=True)) or h % k or h > max(most, k):
        return None
    end_h = h if depth < 2 else min(h * k ** min(steps, depth), max(most, k))
    end_g = 1 if depth == 1 else end_h
    width = 1 if targets == 1 else lanes_of(number)

    even, odd, space = _layout(depth, most, k, s, o, width * observations.element_size())
    y, start_log_likelihood = observations, state[3].contiguous()
    looks = None if seen is None else seen.contiguous()
    b, d = (y.new_zeros(k, n) if t is None else t for t, n in zip(parameters[5:], (s, o), strict=True))
    read = [
        *(_field(t, ending, batch) for t, ending in zip((*parameters[:5], b, d), STEP_ENDS, strict=True)),
        _field(y, 1, batch),
        *(_field(t.unsqueeze(len(batch)), n, batch) for t, n in zip(state[:3], (2, 3, 1), strict=True)),
    ]
    time = () if last else (steps,)
    moments = [(s,), (s, s), (k, s), (k, s, s), (k,)]
    forms = [*moments, *moments, (o,), (o, o), (k, o), (k, o, o), (k,), ()]
    shapes = {name: form for name, form in zip(REPORTED, forms, strict=True) if name in wanted}
    reported = {name: y.new_empty((*batch, *time, *form)) for name, form in shapes.items()}
    end_shapes = [(end_g, s), (end_g, s, s), (end_h,), ()]
    ends = tuple(y.new_empty((*batch, *shape)) for shape in end_shapes)
    for t in reported.values():
        prefer_large_pages(t)

    places = (getattr(even, name) for name in ("T", "F", "Q", "H", "R", "b", "d", "y", "m", "P", "log_h"))
    fields = array("q", chain(*(f._replace(place=place) for (_, f), place in zip(read, places, strict=True))))
    after = even if steps % 2 == 0 else odd
    results, carried = (
        array("q", chain(*(_result(t, form, where, n) for t, form, n in zip(tensors, forms, names, strict=True))))
        for tensors, forms, names, where in (
            (reported.values(), shapes.values(), (REPORTED[name][0] for name in shapes), (even, odd)),
            (ends, end_shapes, CARRIED, (after, after)),
        )
    )
    problem = Problem(
        fields=fields.buffer_info()[0],
        results=results.buffer_info()[0],
        ends=carried.buffer_info()[0],
        reported=len(reported),
        needs=reduce(or_, (REPORTED[name][1] for name in shapes), 0),
        seen=0 if looks is None else looks.data_ptr(),
        seen_row=steps * o,
        start_log_likelihood=start_log_likelihood.data_ptr(),
        targets=targets,
        steps=steps,
        first_reported=steps - 1 if last else 0,
        modes=k,
        state=s,
        observation=o,
        histories=h,
        most=most,
    )
    is_shared = all(f.row == 0 for _, f in read[:5])
    work = targets * steps * k ** max(depth, 1)
    sizes = (s, o) if s <= SMALL and o <= SMALL and work >= WORTH_SIZES else None
    found = worker(min(depth, 2), number, width, 1 if is_shared else width, sizes)
    tasks = -(-targets // width)
    threads = max(1, min(torch.get_num_threads(), tasks, work // WORTH_A_THREAD))
    plan = array("q", (0, 0, workspace.reserve(threads * space), space, 0, *problem, *even, *odd))
    team().run(found, threads, plan.buffer_info()[0])
    return Finished(tuple(map(reported.get, REPORTED)), *ends) if plan[4] == 0 else None


def _field(field: Tensor, ending: int, batch: list[int]) -> tuple[Tensor, Field]:
    """A tensor in one piece whose last dimensions are those of a step; before them may be time, and targets."""
    *own, steps = field.shape[:-ending] or (1,)
    items = field.shape[-ending:].numel()
    is_shared = all(n == 1 or stride == 0 for n, stride in zip(own, field.stride(), strict=False))
    if is_shared:
        field = field[(0,) * len(own)]
    else:
        field = field.expand(*batch, *field.shape[-ending - 1 :])
    field, size = field.contiguous(), items * field.element_size()
    return field, Field(field.data_ptr(), 0 if is_shared else steps * size, size if steps > 1 else 0, items, 0)


def _result(tensor: Tensor, form: tuple[int, ...], where: tuple[Memory, Memory], name: str) -> Result:
    return Result(tensor.data_ptr(), math.prod(form), *(getattr(memory, name) for memory in where))


@lru_cache(maxsize=256)
def _layout(depth: int, most: int, k: int, s: int, o: int, vector: int) -> tuple[Memory, Memory, int]:
    """Where arrays lie in the memory of a thread in even steps and in odd ones, and its bytes.

    What is new after one step is old in the next. Where histories are modes, what is said of them is carried on.
    """
    sizes = [size * vector for size in vectors_of(k, s, o, most)]
    even = Memory(*accumulate(sizes[:-1], initial=0))
    if most <= k:
        even = even._replace(log_pi=even.log_h, pi=even.h)
    odd = even._replace(m=even.new_m, P=even.new_P, new_m=even.m, new_P=even.P)
    if most <= k and depth != 1:
        even, odd = (memory._replace(mode_m=memory.new_m, mode_P=memory.new_P) for memory in (even, odd))
    return even, odd, -(-sum(sizes) // LINE) * LINE


def prefer_large_pages(tensor: Tensor) -> None:
    """Ask for large pages below a tensor that has not been written yet: else its first use costs more than a filter."""
    size = tensor.numel() * tensor.element_size()
    if size >= LARGE and sys.platform == "linux":
        start = -(-tensor.data_ptr() // PAGESIZE) * PAGESIZE
        end = (tensor.data_ptr() + size) // PAGESIZE * PAGESIZE
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ADVICE)  # advice that may be refused


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _reader(kind: Any, start: int) -> Any:
    """A tuple of integers written in a plan, each moved by a base."""
    tuples = types.NamedUniTuple(types.int64, len(kind._fields), kind)

    @instruction(result=tuples)
    def code(write: Writer, plan: Any, base: Any) -> Any:
        numbers = [write.load(plan, whole(start + i), INT64) for i in range(len(kind._fields))]
        return write.context.make_tuple(write.builder, tuples, [write.builder.add(n, base) for n in numbers])

    return code


problem_at = _reader(Problem, HEADER)
even_at = _reader(Memory, HEADER + len(Problem._fields))
odd_at = _reader(Memory, HEADER + len(Problem._fields) + len(Memory._fields))


@cache
def edition() -> int:
    """A number that changes with the kernels: of what it keeps, numba compares this file and what a worker encloses."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in (switching_steps, lanes, simd)))


@cache
def worker(depth: int, number: str, width: int, model_width: int, sizes: tuple[int, int] | None) -> Any:
    """What a thread does: take blocks of targets until there are none. Compiled at the first call."""
    enclosed = (edition(), depth, number, width, model_width, sizes)

    def filter_all(plan: int) -> None:
        _ = enclosed
        base = read_integer(plan, 2) + take(plan + 8) * read_integer(plan, 3)
        problem, even, odd = problem_at(plan, 0), even_at(plan, base), odd_at(plan, base)
        state, observation = state_of(problem), observation_of(problem)  # type: ignore[name-defined]
        tasks = (problem.targets + lanes_each - 1) // lanes_each  # type: ignore[name-defined]
        task = take(plan)
        while task < tasks:
            if not filter_block(zeros(), coefficients(), state, observation, problem, task, base, even, odd):  # type: ignore[name-defined]
                take(plan + 32)
                task = tasks
            else:
                task = take(plan)

    # What is enclosed is part of the key under which numba keeps a kernel, and every process writes compiled functions
    # in another way: what differs between workers is global to each of them, and named by `enclosed`.
    own = {
        "lanes_each": width,
        "zeros": nothing(Lanes(number, width)),
        "coefficients": nothing(Lanes(number, model_width)),
        "filter_block": block_of((advance_imm, advance_gpb1, advance_gpb)[depth]),
        "state_of": _size("state", sizes and sizes[0]),
        "observation_of": _size("observation", sizes and sizes[1]),
    }
    closure = filter_all.__closure__
    function = FunctionType(filter_all.__code__, {**globals(), **own}, filter_all.__name__, None, closure)
    # An index of kept kernels is named by this. Two processes that write to one index can exchange kernels unnoticed:
    # each kernel has its own, in which there is nothing to exchange.
    function.__qualname__ = filter_all.__name__
    return compile_worker(named(function, *enclosed[:-1], *(sizes or ())))


def _size(name: str, known: int | None) -> Any:
    """A size of the problem, by its type where it is known."""
    if known is not None:
        constant = counted(known)
        return compiled(named(lambda problem: constant(), known))
    read = (lambda problem: problem.state) if name == "state" else (lambda problem: problem.observation)
    return compiled(named(read, name))
