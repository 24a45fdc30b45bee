"""Curvature of the loss along the matrices of trained models (plan.md, "Curvature").

    c = mean over directions v of d²/dt² L(W + t v) at t = 0,   |v_M| = |M| for every matrix M of a group

so that L rises by about c t² / 2 when the matrices move by t of their norms.

    python -m experiments.needed.curvature runs/metric_training      about two minutes of one free core, with the models
                                                                     that metric/training.py has trained there

Read next: experiment.py (the groups), ../metric/training.py (the models).
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .. import text_settings
from ..__main__ import rounded
from ..ascent.experiment import Cell, Settings, member
from ..exporting import load_checkpoint
from ..intervals import student
from ..metric.training import MODELS
from ..tasks import Batch, generator_of
from ..training import train
from ..transformer import Transformer
from ..workers import Workers
from .experiment import GROUPS, matrices

STEPS = (64, 2000)
DIRECTIONS, MOVE = 20, 0.01  # of the norm of a matrix; differences are of float64
INTEREST = math.log(2)
RESULTS = Path(__file__).parent / "curvature.json"


def run(settings: Settings, steps: tuple[int, ...], folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train the models, measure them and decide; what is complete is read."""
    settings.text(folder)  # written once, before the workers read it
    items = {f"curvature-{seed}": seed for seed in settings.every_seed}
    rows = workers.rows(partial(rows_of, settings, steps, folder), items, settings, folder / "curvature")
    every = list(chain.from_iterable(rows))
    return settings.results(decisions(every), every)


def rows_of(settings: Settings, steps: tuple[int, ...], folder: Path, seed: int) -> list[dict[str, Any]]:
    """Curvatures of the checkpoints of one model."""
    each = member(Cell("causal", "pre", "free"), seed, settings, settings.text(folder), folder / f"seed-{seed}")
    checkpoints = train(each.model, each.task, each.training, seed=seed, folder=each.folder).checkpoints()
    models = {step: load_checkpoint(checkpoints[step], each.model.settings).double() for step in steps}
    batches = settings.task(settings.text(folder)).held_out_batches()
    return [
        {"seed": seed, "step": step, **curvatures(model, partial(held_out_loss, model, batches))}
        for step, model in models.items()
    ]


def held_out_loss(model: Transformer, batches: list[Batch]) -> float:
    """Mean cross-entropy in the precision of the model, float64, of which second differences need the digits."""
    losses = [cross_entropy(model(batch.tokens).flatten(0, -2), batch.targets.flatten()) for batch in batches]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def curvatures(model: nn.Module, loss: Callable[[], float]) -> dict[str, float]:
    """Mean curvature of a loss of the model along random directions of each group."""
    middle, generator = loss(), generator_of(0, 0)
    means = {}
    for group in GROUPS:
        parts = [part for name, p in model.named_parameters() for part in matrices(group, name, p)]
        values = []
        for _ in range(DIRECTIONS):
            noise = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in parts]
            moves = [MOVE * part.norm() * each / each.norm() for part, each in zip(parts, noise, strict=True)]
            losses = []
            for factor in (1, -2, 1):  # to one side, to the other, and back
                for part, move in zip(parts, moves, strict=True):
                    part += factor * move
                losses.append(loss())
            values.append((losses[0] + losses[1] - 2 * middle) / MOVE**2)
        means[group] = math.fsum(values) / DIRECTIONS
    return means


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide whether queries and keys lie in flatter directions than values and outputs."""
    seeds, last = sorted({row["seed"] for row in rows}), max(row["step"] for row in rows)
    ends = [row for row in rows if row["step"] == last]
    answer: dict[str, Any] = {"status": text_settings.status(seeds)}
    if any(row[group] <= 0 for row in ends for group in ("qk", "vo")):
        return answer | {"verdict": "not judged"}
    ratio = student([math.log(row["vo"] / row["qk"]) for row in ends])
    verdict = "supported" if ratio.low > INTEREST else "refuted" if ratio.high < INTEREST else "inconclusive"
    return answer | {"flatter": {"verdict": verdict, "log ratio of curvatures": ratio._asdict()}}


def main() -> None:
    """Measure, and write the results beside the plan."""
    parser = argparse.ArgumentParser(prog="python -m experiments.needed.curvature")
    parser.add_argument("folder", type=Path, help="of the runs of experiments.metric.training, or an empty one")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results = rounded(run(MODELS, STEPS, folder))
    RESULTS.write_text(json.dumps(results) + "\n")
    print(json.dumps(results["answer"], indent=1))


if __name__ == "__main__":
    main()
