"""Phase diagrams: one simulation for each point of a parameter grid.

    sweep({"beta": [0.5, 1.0], "tau": [-0.2, 0.5]})     one final state per grid point     -> Phases

Points that differ only in beta and tau are one batch of `evolve`; batches run in parallel processes. After an interrupt
the completed points are returned.

Read next: records.py (the results), theory_boundaries.py (the phase boundaries of the theory).
"""

import itertools
import math
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from .._progress import Progress, reporter
from .._settings import changed
from ..dynamics.evolution import evolve
from .grid import Grid, Range, ranges_of
from .initial_clouds import ascent_of, starts
from .matrix_text import MatrixLike, text_of
from .records import GridPoint, Phases, base_of
from .run_simulation import placement_of
from .settings import SimulationSettings, check

BATCH = 1 << 21  # attention weights of the clouds evolved in one call


def sweep(
    grid: Grid,
    *,
    preset: str | None = None,
    processes: int | None = None,
    tokens: int | None = None,
    dim: int | None = None,
    beta: float | None = None,
    tau: float | None = None,
    contraction: str | None = None,
    initial: str | None = None,
    steps: int | None = None,
    placement: str | None = None,
    causal: bool | None = None,
    residual: bool | None = None,
    heads: int | None = None,
    keys: int | None = None,
    key_measure: str | None = None,
    key_mean: MatrixLike | None = None,
    key_covariance: MatrixLike | None = None,
    qk_matrix: MatrixLike | None = None,
    ov_matrix: MatrixLike | None = None,
    natural: bool | None = None,
    draws: int | None = None,
    seeds: int | None = None,
    seed: int | None = None,
    every: int | None = None,
    progress: Progress = False,
) -> Phases:
    """Simulate every point of a grid, on all cores.

    The other arguments are fields of `SimulationSettings` and replace those of the preset.

    Args:
        grid: one or two axes of beta, tau, dim, tokens, heads, contraction, with the values of each.
        preset: preset of the parameters outside the grid (default: 200 Gaussian tokens, 300 steps, one seed).
        processes: number of processes (default: number of cores); 1 runs in this process.
        progress: True shows a bar on standard error; a function is called with the completed and the total number of
            grid points.

    >>> phases = sweep({"tau": [-0.2, 0.5]}, processes=1, dim=1, beta=0.5, tokens=150)
    >>> [phases.points[i,].kind for i in (0, 1)]
    ['gaussian', 'clusters']
    """
    settings = changed(
        base_of(preset), tokens=tokens, dim=dim, beta=beta, tau=tau, contraction=contraction, initial=initial,
        steps=steps, placement=placement, causal=causal, residual=residual, heads=heads, keys=keys,
        key_measure=key_measure, key_mean=text_of("key_mean", key_mean),
        key_covariance=text_of("key_covariance", key_covariance), qk_matrix=text_of("qk_matrix", qk_matrix),
        ov_matrix=text_of("ov_matrix", ov_matrix), natural=natural, draws=draws, seeds=seeds, seed=seed, every=every,
    )  # fmt: skip
    check(settings)
    ranges = ranges_of(grid)
    indices = list(itertools.product(*(range(len(r.values)) for r in ranges)))
    for index in indices:
        check(_at(settings, ranges, index))
    work = list(_batches(settings, ranges, indices))
    points: dict[tuple[int, ...], GridPoint] = {}
    workers = min(processes or os.cpu_count() or 1, len(work))
    show = reporter(progress, "points")
    try:
        for completed in _run_batches(work, workers):
            points |= completed
            show(len(points), len(indices))
    except KeyboardInterrupt:
        pass  # return the completed points
    return Phases(settings, ranges, points, preset)


def _at(settings: SimulationSettings, ranges: tuple[Range, ...], index: tuple[int, ...]) -> SimulationSettings:
    return replace(settings, **{r.name: r.values[i] for r, i in zip(ranges, index, strict=True)})


GridBatch = tuple[SimulationSettings, list[tuple[tuple[int, ...], float, float]]]


def _batches(
    settings: SimulationSettings, ranges: tuple[Range, ...], indices: list[tuple[int, ...]]
) -> Iterator[GridBatch]:
    """Batches of grid points that differ in beta and tau only."""
    groups: dict[SimulationSettings, list[tuple[tuple[int, ...], float, float]]] = {}
    for index in indices:
        at = _at(settings, ranges, index)
        groups.setdefault(replace(at, beta=1.0, tau=1.0), []).append((index, at.beta, at.tau))
    for common, points in groups.items():
        pairs = common.seeds * common.tokens * max(common.keys, common.tokens)
        size = max(1, min(BATCH // pairs, math.ceil(len(points) / (os.cpu_count() or 1))))
        for first in range(0, len(points), size):
            yield common, points[first : first + size]


def _run_batches(work: list[GridBatch], workers: int) -> Iterator[dict[tuple[int, ...], GridPoint]]:
    if workers <= 1:
        yield from map(run_batch, work)
        return
    with multiprocessing.get_context("spawn").Pool(workers, _initialise_worker) as pool:
        yield from pool.imap_unordered(run_batch, work)


def _initialise_worker() -> None:
    """Ignore interrupts, which the parent process handles, and use one core."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def run_batch(batch: GridBatch) -> dict[tuple[int, ...], GridPoint]:
    """Grid points of one batch; points are run separately if a contraction fails for some of them."""
    settings, points = batch
    try:
        verdicts = _final_verdicts(settings, points)
    except ValueError as error:
        if len(points) == 1:
            return {points[0][0]: GridPoint("undefined", 1.0, {"reason": str(error)})}  # type: ignore[dict-item]
        return {k: v for one in points for k, v in run_batch((settings, [one])).items()}
    completed = {}
    for i, (index, _, _) in enumerate(points):
        finals = verdicts[i * settings.seeds : (i + 1) * settings.seeds]
        kind, count = Counter(v.kind for v in finals).most_common(1)[0]
        evidence = [v.evidence for v in finals if v.kind == kind]
        medians = {name: float(torch.tensor([e[name] for e in evidence]).median()) for name in evidence[0]}
        completed[index] = GridPoint(kind, count / settings.seeds, medians)
    return completed


def _final_verdicts(settings: SimulationSettings, points: list[tuple[tuple[int, ...], float, float]]) -> list[Any]:
    shape = (len(points), settings.seeds)
    beta, tau = (torch.tensor([p[i] for p in points], dtype=torch.float64)[:, None].expand(shape) for i in (1, 2))
    ascent = replace(ascent_of(settings), beta=beta, tau=tau)
    cloud = starts(settings).expand(*shape, settings.tokens, settings.dim)
    where = placement_of(settings.placement)
    return evolve(cloud, ascent, contraction=settings.contraction_names, steps=settings.steps, placement=where).verdicts
