"""Backward passes over filtered series on the CPU, compiled by numba: vectors of targets, shared among threads.

    smooth           called by ../../filters/gaussian/smoother.py if no gradients are needed
    differentiate    called by ../../filters/gaussian/likelihood.py and cpu_gradients.py for that of a log likelihood

A vector holds one target in each lane, as in cpu.py; a single target has vectors with one lane. Each thread needs
memory for one step of one vector of targets: the filtered modes of all steps are read from tensors.

Read next: smoothing_in_lanes.py and gradients_in_lanes.py (the compiled functions), cpu.py (the filters).
"""

import math
from array import array
from functools import cache, lru_cache, reduce
from itertools import accumulate, chain
from operator import or_
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch

from ..._typing import Bool, Float, Tensor
from ..simd import read_integer, take
from ..workers import LINE, compile_worker, team, workspace
from . import gradients_in_lanes, smoothing_in_lanes
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
from .gradients_in_lanes import (
    OF_F,
    OF_H,
    OF_R,
    GradientMemory,
    gradient_block,
    gradient_vectors,
    reverse_gpb2,
    reverse_imm,
)
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

Pass = Literal["smooth", "imm", "gpb2"]  # smoothers, and the gradients of two filters


class BackwardField(NamedTuple):
    """A result: letters of its dimensions, its array in the memory of a thread, and bits of what it needs."""

    shape: str
    array: str
    needs: int = 0


# Fields of `Smoothed` in order: those of every step, and those of time 0.
SMOOTHED = {
    "mean": BackwardField("s", "combined_m", MODES | COMBINED),
    "covariance": BackwardField("ss", "combined_P", MODES | COMBINED),
    "mode_mean": BackwardField("ks", "smoothed_m", MODES),
    "mode_covariance": BackwardField("kss", "smoothed_P", MODES),
    "log_mode_probability": BackwardField("k", "log_pi"),
    "log_pair_probability": BackwardField("kk", "log_pair"),
    "previous_mean": BackwardField("ks", "previous_m", PREVIOUS),
    "previous_covariance": BackwardField("kss", "previous_P", PREVIOUS),
    "lag_covariance": BackwardField("kss", "previous_lag", MODES | PREVIOUS),
}
SMOOTHED_INITIAL = {
    "initial_mode_mean": BackwardField("ks", "initial_m"),
    "initial_mode_covariance": BackwardField("kss", "initial_P"),
    "initial_log_mode_probability": BackwardField("k", "log_pi"),
}
# Gradients in the fields of a model, and in the modes at time 0.
GRADIENTS = {
    "T": BackwardField("kk", "T_bar"),
    "F": BackwardField("kss", "F_bar", OF_F),
    "Q": BackwardField("kss", "Q_bar"),
    "H": BackwardField("kos", "H_bar", OF_H),
    "R": BackwardField("koo", "R_bar", OF_R),
    "b": BackwardField("ks", "b_bar"),
    "d": BackwardField("ko", "d_bar"),
}
GRADIENTS_INITIAL = {
    "mean": BackwardField("ks", "bar_m"),
    "covariance": BackwardField("kss", "bar_P"),
    "log_probability": BackwardField("k", "bar_log_h"),
}


class FilteredSeries(NamedTuple):
    """A filtered series: its model (T, F, Q, H, R, b, d), the modes at time 0 and at every time, the observations."""

    parameters: tuple[Any, ...]
    initial: tuple[Float[Tensor, "*b k s"], Float[Tensor, "*b k s s"], Float[Tensor, "*b k"]]
    filtered: tuple[Float[Tensor, "*b t k s"], Float[Tensor, "*b t k s s"], Float[Tensor, "*b t k"]]
    observations: Float[Tensor, "*b t o"]
    observed: Bool[Tensor, "*b t o"] | None


def smooth(series: FilteredSeries, wanted: frozenset[str]) -> dict[str, Tensor] | None:
    """Smoothed fields by name, those wanted and those of time 0; None if a number was not finite."""
    chosen = {name: field for name, field in SMOOTHED.items() if name in wanted}
    return _run("smooth", series, chosen, SMOOTHED_INITIAL)


def differentiate(series: FilteredSeries, filter_name: str, wanted: frozenset[str]) -> dict[str, Tensor] | None:
    """Gradient of the log likelihood of every target in some model fields and in the modes at time 0.

    Args:
        series: the filtered series.
        filter_name: "imm" or "gpb2"; with one mode they are the same.
        wanted: names of `GRADIENTS`. The result of a field that varies with time has time after the targets.
    """
    changing: dict[str, BackwardField] = {}
    constant: dict[str, BackwardField] = {}
    for (name, field), t in zip(GRADIENTS.items(), series.parameters, strict=True):
        if name in wanted:
            ending = MODEL_ENDS[name]
            varies = t is not None and t.ndim > ending and t.shape[-ending - 1] > 1
            (changing if varies else constant)[name] = field
    kind: Pass = "gpb2" if filter_name == "gpb2" and series.initial[2].shape[-1] > 1 else "imm"
    return _run(kind, series, changing, constant | GRADIENTS_INITIAL)


class BackwardForm(NamedTuple):
    """Layout of a problem, which depends only on its sizes."""

    batch: tuple[int, ...]
    modes: int
    width: int
    tasks: int
    space: int  # bytes of memory per thread
    places: dict[str, int]  # offsets of the model fields in the memory of a thread
    blank: tuple[Tensor, Tensor]  # zeros for missing b and d
    read: tuple[tuple[int, ...], ...]  # `Field` of observations, initial and filtered modes, without addresses
    shapes: tuple[tuple[int, ...], ...]  # of the results
    results: tuple[tuple[int, ...], ...]  # `Result` of each, without addresses
    plan: "array[int]"  # arguments of the kernel, without addresses

    @property
    def is_alone(self) -> bool:
        """False: the lanes are targets."""
        return False


@lru_cache(maxsize=256)
def _form(
    kind: Pass,
    batch: tuple[int, ...],
    steps: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    each: tuple[BackwardField, ...],
    ends: tuple[BackwardField, ...],
) -> BackwardForm:
    """Layout for the sizes of modes, state and observation, and the results of each step and of time 0."""
    k, s, o = sizes
    targets, number = math.prod(batch), dtype.itemsize
    width = 1 if targets == 1 else lanes_of(NUMBERS[dtype])
    memory, vectors = (SmoothingMemory, smoothing_vectors) if kind == "smooth" else (GradientMemory, gradient_vectors)
    counts = [count * width * number for count in vectors(k, s, o)]
    places: Any = memory(*accumulate(counts[:-1], initial=0))
    if kind == "smooth" and k == 1:
        places = places._replace(**{name: getattr(places, other) for name, other in ONE_MODE.items()})
    space = -(-sum(counts) // LINE) * LINE
    letters = {"k": k, "s": s, "o": o}
    modes = {"m": "ks", "P": "kss", "log_h": "k"}

    def row(shape: str) -> int:
        return math.prod(letters[letter] for letter in shape) * number

    read = [_entry(row("o"), steps, number, places.y)]
    for times in (1, steps):
        read += [_entry(row(shape), times, number, getattr(places, name)) for name, shape in modes.items()]
    shapes, results = [], []
    for fields, series in ((each, (steps,)), (ends, ())):
        for field in fields:
            shapes.append((*batch, *series, *(letters[letter] for letter in field.shape)))
            at, size = getattr(places, field.array), row(field.shape)
            results.append((size, size // number, math.prod(series) * size, at, at))
    problem = {
        "observed_row": steps * o,
        "targets": targets,
        "steps": steps,
        "modes": k,
        "state": s,
        "observation": o,
        "reported": len(each),
        "ends": len(ends),
        "needs": reduce(or_, (field.needs for field in (*each, *ends)), 0),
    }
    return BackwardForm(
        batch=batch,
        modes=k,
        width=width,
        tasks=-(-targets // width),
        space=space,
        places={name: getattr(places, name) for name in MODEL_ENDS},
        blank=(torch.zeros(k, s, dtype=dtype, device="cpu"), torch.zeros(k, o, dtype=dtype, device="cpu")),
        read=tuple(read),
        shapes=tuple(shapes),
        results=tuple(results),
        plan=array("q", (0, 0, 0, space, 0, *(problem.get(name, 0) for name in BackwardProblem._fields), *places)),
    )


def _entry(row: int, steps: int, number: int, place: int) -> tuple[int, ...]:
    """`Field` of a tensor [targets, steps, row], without its address."""
    return (steps * row, steps * row, row if steps > 1 else 0, number, row // number, place)


def _run(
    kind: Pass, series: FilteredSeries, each: dict[str, BackwardField], ends: dict[str, BackwardField]
) -> dict[str, Tensor] | None:
    """Run a backward pass and return its results by name; None if a number was not finite."""
    y, observed, (k, s) = series.observations, series.observed, series.initial[0].shape[-2:]
    steps, o = y.shape[-2:]
    form = _form(kind, tuple(y.shape[:-2]), steps, (k, s, o), y.dtype, tuple(each.values()), tuple(ends.values()))
    # Inputs
    offsets = (blank if t is None else t for t, blank in zip(series.parameters[5:], form.blank, strict=True))
    fields = zip(MODEL_ENDS, (*series.parameters[:5], *offsets), strict=True)
    model = [model_field(form, name, t) for name, t in fields]
    tensors = [t.contiguous() for t in (y, *series.initial, *series.filtered)]
    mask = None if observed is None else observed.contiguous()
    read = ((t.data_ptr(), *where) for t, where in zip(tensors, form.read, strict=True))
    table = array("q", chain(*(field for _, field in model), *read))
    # Outputs
    outputs = [y.new_empty(shape) for shape in form.shapes]
    for tensor in outputs:
        prefer_large_pages(tensor)
    results = array("q", chain(*((t.data_ptr(), *result) for t, result in zip(outputs, form.results, strict=True))))
    # Kernel and threads
    work = y.shape[:-1].numel() * k * k
    known = (s, o) if max(s, o) <= SMALL and work >= WORTH_SIZES else None
    width = form.width if any(field[1] for _, field in model[:5]) else 1
    kernel = backward_worker(kind, NUMBERS[y.dtype], form.width, width, known)
    threads = max(1, min(torch.get_num_threads(), form.tasks, work // WORTH_A_THREAD))
    plan = form.plan[:]
    plan[2] = workspace.reserve(threads * form.space)
    addresses = (table.buffer_info()[0], results.buffer_info()[0], 0 if mask is None else mask.data_ptr())
    plan[HEADER : HEADER + 3] = array("q", addresses)
    team().run(kernel, threads, plan.buffer_info()[0])
    return None if plan[4] else dict(zip((*each, *ends), outputs, strict=True))


problem_at = reader(BackwardProblem, HEADER)


@cache
def backward_edition() -> int:
    """Checksum of the kernel sources, for the cache."""
    sources = (Path(str(module.__file__)).read_bytes() for module in (smoothing_in_lanes, gradients_in_lanes))
    return crc32(b"".join(sources), edition())


@cache
def backward_worker(kind: Pass, number: str, width: int, model_width: int, sizes: tuple[int, int] | None) -> Any:
    """Function of a thread, which takes blocks of targets until none is left; compiled at the first call."""
    enclosed = (backward_edition(), kind, number, width, model_width, sizes)

    def go_back(plan: int) -> None:
        _ = enclosed
        base = read_integer(plan, 2) + take(plan + 8) * read_integer(plan, 3)
        problem, memory = problem_at(plan, 0), memory_at(plan, base)  # type: ignore[name-defined]
        state, observation = state_of(problem), observation_of(problem)  # type: ignore[name-defined]
        tasks = (problem.targets + targets_each - 1) // targets_each  # type: ignore[name-defined]
        task = take(plan)
        while task < tasks:
            if not block(zeros(), coefficients(), state, observation, problem, task, base, memory):  # type: ignore[name-defined]
                take(plan + 32)
                task = tasks
            else:
                task = take(plan)

    # As in cpu.py: functions that differ between workers are globals of each worker, identified by `enclosed`.
    reverse = reverse_imm if kind == "imm" else reverse_gpb2
    memory = SmoothingMemory if kind == "smooth" else GradientMemory
    enclosed_globals = {
        "targets_each": width,
        "zeros": nothing(Lanes(number, width)),
        "coefficients": nothing(Lanes(number, model_width)),
        "block": smooth_block if kind == "smooth" else gradient_block(reverse),
        "memory_at": reader(memory, HEADER + len(BackwardProblem._fields)),
        "state_of": size_reader("state", sizes and sizes[0]),
        "observation_of": size_reader("observation", sizes and sizes[1]),
    }
    closure = go_back.__closure__
    function = FunctionType(go_back.__code__, {**globals(), **enclosed_globals}, go_back.__name__, None, closure)
    function.__qualname__ = go_back.__name__
    return compile_worker(named(function, *enclosed[:-1], *(sizes or ())))
