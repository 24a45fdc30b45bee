"""Phase diagrams: one simulation for each point of a parameter grid.

    sweep({"beta": [0.5, 1.0], "tau": [-0.2, 0.5]})     one final state per grid point     -> Phases

Points that differ only in beta and tau are computed in batches of `evolve`. An engine computes the batches on the cores
of this machine, or on a cluster. With a folder, the same call continues where an earlier one stopped.

Read next: records.py (the results), theory_boundaries.py (the phase boundaries of the theory), ../engine (the engines).
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .._progress import Progress, reporter
from .._settings import changed
from ..dynamics.evolution import evolve
from ..engine import Engine, engine_of, run_items
from .grid import Grid, Range, ranges_of
from .initial_clouds import ascent_of, starts
from .matrix_text import MatrixLike, text_of
from .records import GridPoint, Phases, base_of
from .run_simulation import placement_of
from .settings import SimulationSettings, check

BATCH = 1 << 21  # attention weights of the clouds evolved in one call
MOST = 16  # grid points of a batch; not a function of the machine, on which results must not depend


def sweep(
    grid: Grid,
    *,
    preset: str | None = None,
    engine: str | Engine = "processes",
    workers: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    restart: bool = False,
    address: str | None = None,
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

    The other arguments are fields of `SimulationSettings` and replace those of the preset. After Ctrl-C the completed
    points are returned.

    Args:
        grid: one or two axes of beta, tau, dim, tokens, heads, contraction, with the values of each.
        preset: preset of the parameters outside the grid (default: 200 Gaussian tokens, 300 steps, one seed).
        engine: "process" (this one), "processes" of this machine, "slurm", "ray", or an `Engine`.
        workers: number of processes or jobs at a time (default: number of cores).
        folder: folder of finished batches, from which the same call continues (default: none).
        restart: begin again in a folder that has finished batches.
        address: address of the Ray cluster: "auto", or HOST:PORT (default: a new one on this machine).
        progress: True shows a bar on standard error; a function is called with the number of finished batches of grid
            points and their total.

    >>> phases = sweep({"tau": [-0.2, 0.5]}, engine="process", dim=1, beta=0.5, tokens=150)
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
    batches = {f"batch-{number:05d}": batch for number, batch in enumerate(_batches(settings, ranges, indices))}
    facts = {"version": __version__, "grid": [list(r) for r in ranges], **asdict(settings)}
    place = None if folder is None else Path(folder)
    if not isinstance(engine, Engine):
        engine = engine_of("sweep", engine, workers=workers, folder=place, address=address)
    show = reporter(progress, "batches of grid points")
    results = run_items(
        run_batch, batches, engine=engine, folder=folder, facts=facts, restart=restart, call="sweep", progress=show
    )
    points = {index: point for state in results.states.values() for index, point in state.items()}
    return Phases(settings, ranges, points, preset, results.failures, results.interrupted)


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
        size = max(1, min(BATCH // pairs, MOST))
        for first in range(0, len(points), size):
            yield common, points[first : first + size]


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
