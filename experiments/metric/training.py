"""QK matrices of small language models through their training (plan.md, "Through the training of language models").

    python -m experiments.metric.training runs/metric_training       about three minutes of one free core

Read next: ../ascent/experiment.py (the models), ../exporting.py (the format), page.py.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gradlogz import probe
from gradlogz.probing.inside.loading import load

from .. import text_settings
from ..__main__ import rounded
from ..ascent.experiment import GPU, Cell, Settings, member
from ..exporting import export, load_checkpoint
from ..intervals import Interval, student
from ..training import train
from ..workers import Workers

MODELS = replace(GPU, first_seed=20, seeds=5)  # of the size of the extended form
STEPS = (0, 64, 256, 1024, 2000)
POSITIVE = "positive cosine"
TARGETS = ("covariance", "inverse covariance", "Fisher information")
INTEREST = 0.05  # of a cosine above its null
RESULTS = Path(__file__).parent / "training.json"


def run(settings: Settings, steps: tuple[int, ...], folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train the models, measure their checkpoints and decide; what is complete is read."""
    settings.text(folder)  # written once, before the workers read it
    items = {f"seed-{seed}": seed for seed in settings.every_seed}
    rows = workers.rows(partial(rows_of, settings, steps, folder), items, settings, folder)
    every = list(chain.from_iterable(rows))
    return settings.results(decisions(every), every)


def rows_of(settings: Settings, steps: tuple[int, ...], folder: Path, seed: int) -> list[dict[str, Any]]:
    """Rows of the checkpoints of one model."""
    text = settings.text(folder)
    each = member(Cell("causal", "pre", "free"), seed, settings, text, folder / f"seed-{seed}")
    run_folder = train(each.model, each.task, each.training, seed=seed, folder=each.folder)
    n = each.model.settings.context
    windows = text.held_out[: settings.probe_tokens // n * n].long().reshape(-1, n)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in windows.split(16)]
    rows = []
    for step in steps:
        exported = run_folder.path / "exported" / f"step-{step}"
        export(load_checkpoint(run_folder.checkpoints()[step], each.model.settings), exported)
        loaded = load(exported)
        findings = probe(loaded.model, None, batches, predictions=["qk_geometry"], baseline=0.0, draws=0)
        rows.append({"seed": seed, "step": step, **cosines(findings.claims[0])})
    return rows


def cosines(claim: Any) -> dict[str, list[float]]:
    """Median over heads of every cosine, and the mean of its null."""
    medians = {POSITIVE: [claim.value, claim.null]}
    details = {detail.key: detail for detail in claim.details}
    for target in TARGETS:
        detail = details[f"cosine with the {target}"]
        medians[target] = [detail.value, detail.null]
    return medians


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the hypotheses of the plan."""
    seeds, last = sorted({row["seed"] for row in rows}), max(row["step"] for row in rows)
    above = {
        (name, row["seed"], row["step"]): row[name][0] - row[name][1] for row in rows for name in (POSITIVE, *TARGETS)
    }
    gains = student([above[POSITIVE, s, last] - above[POSITIVE, s, 0] for s in seeds])
    answer = {"status": text_settings.status(seeds), "T1 more positive": _judged(gains)}
    for number, target in enumerate(TARGETS, 2):
        values = student([above[target, s, last] for s in seeds])
        answer[f"T{number} aligned with the {target}"] = _judged(values)
    return answer


def _judged(interval: Interval) -> dict[str, Any]:
    verdict = "supported" if interval.low > INTEREST else "refuted" if interval.high < INTEREST else "inconclusive"
    return {"verdict": verdict, "value": interval._asdict()}


def main() -> None:
    """Train, measure, and write the results beside the plan."""
    parser = argparse.ArgumentParser(prog="python -m experiments.metric.training")
    parser.add_argument("folder", type=Path, help="of the runs")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results = rounded(run(MODELS, STEPS, folder))
    RESULTS.write_text(json.dumps(results) + "\n")
    print(json.dumps(results["answer"], indent=1))


if __name__ == "__main__":
    main()
