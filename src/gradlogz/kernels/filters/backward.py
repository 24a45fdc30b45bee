"""Backward passes over filtered series on the CPU, compiled by numba: vectors of targets, shared among threads.

    smooth      called by ../../filters/gaussian/smoother.py if no gradients are needed

A vector holds one target in each lane, as in cpu.py; a single target has vectors with one lane. Each thread needs
memory for one step of one vector of targets: the filtered modes of all steps are read from tensors.

Read next: smoothing_in_lanes.py (the compiled functions), cpu.py (the filters).
"""

import math
from array import array
from collections.abc import Callable
from functools import cache, lru_cache, reduce
from itertools import accumulate, chain
from operator import or_
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from zlib import crc32

import torch

from ..._typing import Bool, Float, Tensor
from ..simd import read_integer, take
from ..workers import LINE, compile_worker, team, workspace
from . import smoothing_in_lanes
from .cpu import (
    HEADER,
    NUMBERS,
    SMALL,
    WORTH_A_THREAD,
    WORTH_SIZES,
    edition,
    model_field,
    prefer_large_pages,
    reader,
    size_reader,
)
from .fields import MODEL_ENDS
from .lanes import Lanes, lanes_of, named, nothing
from .smoothing_in_lanes import (
    COMBINED,
    MODES,
    ONE_MODE,
    PREVIOUS,
    BackwardProblem,
    SmoothingMemory,
    smooth_block,
    smoothing_vectors,
)


class SmoothedField(NamedTuple):
    """A field of `Smoothed`: letters of its dimensions, its array in the memory of a thread, and what it needs."""

    shape: str
    array: str
    needs: int


# Fields of `Smoothed` in order, except the last; those from `initial` on have no time.
SMOOTHED = {
    "mean": SmoothedField("s", "combined_m", MODES | COMBINED),
    "covariance": SmoothedField("ss", "combined_P", MODES | COMBINED),
    "mode_mean": SmoothedField("ks", "smoothed_m", MODES),
    "mode_covariance": SmoothedField("kss", "smoothed_P", MODES),
    "log_mode_probability": SmoothedField("k", "log_pi", 0),
    "log_pair_probability": SmoothedField("kk", "log_pair", 0),
    "previous_mean": SmoothedField("ks", "previous_m", PREVIOUS),
    "previous_covariance": SmoothedField("kss", "previous_P", PREVIOUS),
    "lag_covariance": SmoothedField("kss", "previous_lag", MODES | PREVIOUS),
}
SMOOTHED_INITIAL = {
    "initial_mode_mean": SmoothedField("ks", "initial_m", 0),
    "initial_mode_covariance": SmoothedField("kss", "initial_P", 0),
    "initial_log_mode_probability": SmoothedField("k", "log_pi", 0),
}


class FilteredSeries(NamedTuple):
    """A filtered series: its model (T, F, Q, H, R, b, d), the modes at time 0 and at every time, the observations."""

    parameters: tuple[Tensor | None, ...]
    initial: tuple[Float[Tensor, "*b k s"], Float[Tensor, "*b k s s"], Float[Tensor, "*b k"]]
    filtered: tuple[Float[Tensor, "*b t k s"], Float[Tensor, "*b t k s s"], Float[Tensor, "*b t k"]]
    observations: Float[Tensor, "*b t o"]
    observed: Bool[Tensor, "*b t o"] | None


def smooth(series: FilteredSeries, wanted: frozenset[str]) -> dict[str, Tensor] | None:
    """Smoothed fields by name, those wanted and those of time 0; None if a number was not finite."""
    y, (k, s) = series.observations, series.parameters[2].shape[-3:-1]  # type: ignore[union-attr]
    form = _form(tuple(y.shape[:-2]), y.shape[-2], (k, s, y.shape[-1]), y.dtype, wanted)
    tensors = [y.new_empty(shape) for shape in form.shapes]
    for tensor in tensors:
        prefer_large_pages(tensor)
    results = array("q", chain(*((t.data_ptr(), *result) for t, result in zip(tensors, form.results, strict=True))))
    return dict(zip(form.names, tensors, strict=True)) if _run(form, series, results, smooth_worker) else None


class BackwardForm(NamedTuple):
    """Layout of a problem, which depends only on its sizes."""

    batch: tuple[int, ...]
    sizes: tuple[int, int, int]  # modes, state, observation
    width: int
    tasks: int
    space: int  # bytes of memory per thread
    places: dict[str, int]  # offsets of the model fields in the memory of a thread
    read: tuple[tuple[int, ...], ...]  # `Field` of observations, initial and filtered modes, without addresses
    names: tuple[str, ...]  # results
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]  # `Result` of each, without addresses
    plan: "array[int]"  # arguments of the kernel, without addresses

    @property
    def modes(self) -> int:
        """k."""
        return self.sizes[0]

    @property
    def is_alone(self) -> bool:
        """False: the lanes are targets."""
        return False


@lru_cache(maxsize=256)
def _form(
    batch: tuple[int, ...], steps: int, sizes: tuple[int, int, int], dtype: torch.dtype, wanted: frozenset[str]
) -> BackwardForm:
    k, s, o = sizes
    targets, number = math.prod(batch), dtype.itemsize
    width = 1 if targets == 1 else lanes_of(NUMBERS[dtype])
    counts = [count * width * number for count in smoothing_vectors(k, s, o)]
    places = SmoothingMemory(*accumulate(counts[:-1], initial=0))
    if k == 1:
        places = places._replace(**{name: getattr(places, other) for name, other in ONE_MODE.items()})
    space = -(-sum(counts) // LINE) * LINE
    letters = {"k": k, "s": s, "o": o}
    modes = {"m": "ks", "P": "kss", "log_h": "k"}

    def row(shape: str) -> int:
        return math.prod(letters[letter] for letter in shape) * number

    read = [_entry(row("o"), steps, number, places.y)]
    read += [_entry(row(shape), 1, number, getattr(places, name)) for name, shape in modes.items()]
    read += [_entry(row(shape), steps, number, getattr(places, name)) for name, shape in modes.items()]
    chosen = {name: field for name, field in SMOOTHED.items() if name in wanted}
    shapes, results = [], []
    for fields, times in ((chosen, (steps,)), (SMOOTHED_INITIAL, ())):
        for field in fields.values():
            shapes.append((*batch, *times, *(letters[letter] for letter in field.shape)))
            at, each = getattr(places, field.array), row(field.shape)
            results.append((each, each // number, math.prod(times) * each, at, at))
    problem = {
        "observed_row": steps * o,
        "targets": targets,
        "steps": steps,
        "modes": k,
        "state": s,
        "observation": o,
        "reported": len(chosen),
        "needs": reduce(or_, (field.needs for field in chosen.values()), 0),
    }
    return BackwardForm(
        batch=batch,
        sizes=sizes,
        width=width,
        tasks=-(-targets // width),
        space=space,
        places={name: getattr(places, name) for name in MODEL_ENDS},
        read=tuple(read),
        names=(*chosen, *SMOOTHED_INITIAL),
        shapes=tuple(shapes),
        results=tuple(results),
        plan=array("q", (0, 0, 0, space, 0, *(problem.get(name, 0) for name in BackwardProblem._fields), *places)),
    )


def _entry(row: int, steps: int, number: int, place: int) -> tuple[int, ...]:
    """`Field` of a tensor [targets, steps, row], without its address."""
    return (steps * row, steps * row, row if steps > 1 else 0, number, row // number, place)


def _run(form: BackwardForm, series: FilteredSeries, results: "array[int]", worker: Callable[..., Any]) -> bool:
    """Run a backward pass; False if a number was not finite."""
    y, observed, (k, s, o) = series.observations, series.observed, form.sizes
    b, d = (y.new_zeros(k, n) if t is None else t for t, n in zip(series.parameters[5:], (s, o), strict=True))
    fields = zip(MODEL_ENDS, (*series.parameters[:5], b, d), strict=True)
    model = [model_field(form, name, t) for name, t in fields]  # type: ignore[arg-type]
    tensors = [t.contiguous() for t in (y, *series.initial, *series.filtered)]
    mask = None if observed is None else observed.contiguous()
    read = ((t.data_ptr(), *where) for t, where in zip(tensors, form.read, strict=True))
    table = array("q", chain(*(field for _, field in model), *read))
    work = y.shape[:-1].numel() * k * k
    known = (s, o) if max(s, o) <= SMALL and work >= WORTH_SIZES else None
    width = form.width if any(field[1] for _, field in model[:5]) else 1
    kernel = worker(NUMBERS[y.dtype], form.width, width, known)
    threads = max(1, min(torch.get_num_threads(), form.tasks, work // WORTH_A_THREAD))
    plan = form.plan[:]
    plan[2] = workspace.reserve(threads * form.space)
    addresses = (table.buffer_info()[0], results.buffer_info()[0], 0 if mask is None else mask.data_ptr())
    plan[HEADER : HEADER + 3] = array("q", addresses)
    team().run(kernel, threads, plan.buffer_info()[0])
    return not plan[4]


problem_at = reader(BackwardProblem, HEADER)
smoothing_memory_at = reader(SmoothingMemory, HEADER + len(BackwardProblem._fields))


@cache
def backward_edition() -> int:
    """Checksum of the kernel sources, for the cache."""
    return crc32(Path(str(smoothing_in_lanes.__file__)).read_bytes(), edition())


@cache
def smooth_worker(number: str, width: int, model_width: int, sizes: tuple[int, int] | None) -> Any:
    """Function of a thread, which takes blocks of targets until none is left; compiled at the first call."""
    enclosed = (backward_edition(), number, width, model_width, sizes)

    def smooth_all(plan: int) -> None:
        _ = enclosed
        base = read_integer(plan, 2) + take(plan + 8) * read_integer(plan, 3)
        problem, memory = problem_at(plan, 0), smoothing_memory_at(plan, base)
        state, observation = state_of(problem), observation_of(problem)  # type: ignore[name-defined]
        tasks = (problem.targets + targets_each - 1) // targets_each  # type: ignore[name-defined]
        task = take(plan)
        while task < tasks:
            if not smooth_block(zeros(), coefficients(), state, observation, problem, task, base, memory):  # type: ignore[name-defined]
                take(plan + 32)
                task = tasks
            else:
                task = take(plan)

    # As in cpu.py: functions that differ between workers are globals of each worker, identified by `enclosed`.
    enclosed_globals = {
        "targets_each": width,
        "zeros": nothing(Lanes(number, width)),
        "coefficients": nothing(Lanes(number, model_width)),
        "state_of": size_reader("state", sizes and sizes[0]),
        "observation_of": size_reader("observation", sizes and sizes[1]),
    }
    closure = smooth_all.__closure__
    function = FunctionType(smooth_all.__code__, {**globals(), **enclosed_globals}, smooth_all.__name__, None, closure)
    function.__qualname__ = smooth_all.__name__
    return compile_worker(named(function, *enclosed[:-1], *(sizes or ())))
