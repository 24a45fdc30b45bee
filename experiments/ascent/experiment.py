"""Runs of the experiment on free and tied value maps, and its decisions (plan.md).

Read next: ensembles.py (models trained together), ../text.py (the text), ../exporting.py (models for the probe),
../costs.py (equal parameters, equal compute).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gradlogz import probe
from gradlogz.probing.inside.loading import load

from .. import text_settings
from ..costs import cost, matched
from ..ensembles import Ensemble, Member, train_together
from ..exporting import export, load_checkpoint
from ..intervals import student
from ..tasks import Batch, TextTask
from ..text import MASK_ID, TokenisedText
from ..text_settings import TextSettings, without_decay
from ..training import TrainSettings, train
from ..transformer import ModelSettings, Objective, Placement, Transformer
from ..workers import Workers
from .ensembles import TextEnsemble

ValueMap = Literal["free", "tied, equal parameters", "tied, equal compute"]
PREDICTIONS = ["ascent", "tie", "symmetry"]
LOSS_OF_INTEREST, ASCENT_OF_INTEREST = 0.02, 0.02


KINDS: tuple[tuple[Objective, Placement], ...] = tuple(product(get_args(Objective), get_args(Placement)[:2]))


class Cell(NamedTuple):
    """A model of the experiment, but its seed."""

    objective: Objective
    placement: Placement
    value_map: ValueMap


@dataclass(frozen=True, kw_only=True)
class Settings(TextSettings):
    """Size of the experiment.

    Attributes:
        probe_tokens: tokens that the probe reads.
        probed_tied: number of seeds of tied models that are probed, as a control; None for all.
        kinds: objectives and placements, in the order in which they are trained.
    """

    probe_tokens: int
    every_checkpoint: bool = False
    value_maps: tuple[ValueMap, ...] = get_args(ValueMap)
    probed_tied: int | None = None
    kinds: tuple[tuple[Objective, Placement], ...] = KINDS


REDUCED = Settings(
    model=ModelSettings(vocabulary=1024, context=64, width=64, heads=4, layers=2, hidden=256),
    training=TrainSettings(steps=300, learning_rate=3e-3, warm_up=30, record_every=50, save_every=100),
    batch_size=16,
    megabytes=4,
    seeds=2,
    probe_tokens=2048,
)
EXTENDED = Settings(
    **without_decay(text_settings.EXTENDED) | {"first_seed": 3},
    probe_tokens=4096,
    value_maps=("free", "tied, equal parameters"),
)
GPU = replace(EXTENDED, seeds=8, first_seed=10, value_maps=get_args(ValueMap), probed_tied=2)  # ../on_gpu.py
REPLICATION = replace(
    EXTENDED, first_seed=20, value_maps=("free", "tied, equal compute"), probed_tied=0, kinds=KINDS[::-1]
)
FULL = Settings(**vars(text_settings.FULL), probe_tokens=20_000, every_checkpoint=True)


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train and probe all models; return their rows and the decisions. Finished runs are read."""
    settings.text(folder)  # written once, before the workers read it
    every = product(cells(settings.value_maps, settings.kinds), settings.every_seed)
    items = {place(folder, *item).name: item for item in every}
    rows = workers.rows(partial(row_of, settings, folder), items, settings, folder)
    return settings.results(decisions(rows), rows) | {"training FLOPs": training_flops(settings)}


def row_of(settings: Settings, folder: Path, item: tuple[Cell, int]) -> dict[str, Any]:
    """Row of one run."""
    return trained_and_probed(*item, settings, settings.text(folder), place(folder, *item))


def cells(
    value_maps: tuple[ValueMap, ...] = get_args(ValueMap), kinds: tuple[tuple[Objective, Placement], ...] = KINDS
) -> Iterator[Cell]:
    """All combinations of objective, placement and value map."""
    return (Cell(*kind, value_map) for kind, value_map in product(kinds, value_maps))


def model_of(cell: Cell, reference: ModelSettings) -> ModelSettings:
    """Settings of the model of a cell, of the cost of the free one."""
    free = replace(reference, objective=cell.objective, placement=cell.placement)
    if cell.value_map == "free":
        return free
    by: Literal["parameters", "multiplications"] = (
        "parameters" if cell.value_map == "tied, equal parameters" else "multiplications"
    )
    return matched(replace(free, attention="tied"), free, by)


def training_flops(settings: Settings) -> float:
    """Floating-point operations of all training runs."""
    tokens = settings.training.steps * settings.batch_size * settings.model.context
    models = [model_of(cell, settings.model) for cell in cells(settings.value_maps, settings.kinds)]
    return settings.seeds * sum(cost(model).training_flops(tokens) for model in models)


def member(cell: Cell, seed: int, settings: Settings, text: TokenisedText, folder: Path) -> Member:
    """A model, its task and its training."""
    model = model_of(cell, settings.model)
    mask = MASK_ID if cell.objective == "masked" else None
    return Member(Transformer(model, seed=seed), settings.task(text, mask=mask), settings.training, seed, folder)


def place(folder: Path, cell: Cell, seed: int) -> Path:
    """Folder of a run."""
    return folder / "-".join((*cell, str(seed))).replace(", ", "_").replace(" ", "_")


def train_cell(
    cell: Cell, settings: Settings, text: TokenisedText, folder: Path, batches: Batch, seconds: float = math.inf
) -> bool:
    """Train the models of a cell together, keep their last checkpoint, and return whether they are complete.

    batches: those of `batches_of` with the objective of the cell.
    """
    members = [member(cell, seed, settings, text, place(folder, cell, seed)) for seed in settings.every_seed]
    device, task = batches.tokens.device, members[0].task
    assert isinstance(task, TextTask)
    held_out = [Batch(*(t.to(device).expand(len(members), -1, -1) for t in part)) for part in task.held_out_batches()]

    def observe(ensemble: Ensemble) -> dict[str, Tensor]:
        return {"held_out_loss": torch.stack([ensemble.losses(batch) for batch in held_out]).mean(0)}

    return train_together(members, TextEnsemble, batches, observe, device, seconds=seconds, all_checkpoints=False)


def batches_of(objective: Objective, settings: Settings, text: TokenisedText, device: torch.device) -> Batch:
    """Batches [steps + 1, s, b, n] of all seeds; models with the same objective read the same."""
    task = member(Cell(objective, "pre", "free"), 0, settings, text, Path()).task
    steps = [[task.batch(seed, step) for seed in settings.every_seed] for step in range(settings.training.steps + 1)]
    tokens, targets = (torch.stack([torch.stack([each[i] for each in step]) for step in steps]) for i in (0, 1))
    return Batch(tokens.to(device), targets.to(device))


def trained_and_probed(cell: Cell, seed: int, settings: Settings, text: TokenisedText, folder: Path) -> dict[str, Any]:
    """Held-out loss of a model, and what the probe measures on it."""
    each = member(cell, seed, settings, text, folder)
    model = each.model.settings
    run_folder = train(each.model, each.task, settings.training, seed=seed, folder=folder)
    checkpoints = run_folder.checkpoints()
    probed = {}
    if cell.value_map == "free" or settings.probed_tied is None or seed - settings.first_seed < settings.probed_tied:
        networks = {0: Transformer(model, seed=seed).eval()}
        for step in checkpoints if settings.every_checkpoint else (max(checkpoints),):
            networks[step] = load_checkpoint(checkpoints[step], model)
        for step, network in networks.items():
            probed[step] = claims(network, text, settings.probe_tokens, run_folder.path / "exported" / f"step-{step}")
    return {
        **cell._asdict(),
        "seed": seed,
        "hidden": model.hidden,
        "parameters": cost(model).parameters,
        "held-out loss": run_folder.curves[-1]["held_out_loss"],
        "probe": probed,
    }


def claims(network: Transformer, text: TokenisedText, tokens: int, folder: Path) -> dict[str, Any]:
    """Values of the probe on held-out text, without a random-weights baseline: the untrained model is a checkpoint.

    folder: where the exported model is written, for `gradlogz probe` and `gradlogz compare`.
    """
    export(network, folder, text.folder / "tokenizer.json")
    n = network.settings.context
    windows = text.held_out[: tokens // n * n].long().reshape(-1, n)
    batches = [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in windows.split(16)]
    loaded = load(folder)
    findings = probe(loaded.model, None, batches, predictions=PREDICTIONS, baseline=0.0, draws=0)
    return {
        claim.prediction: {"value": _finite(claim.value), "null": _finite(claim.null), "verdict": claim.verdict}
        for claim in findings.claims
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# Decisions ------------------------------------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the cost of the tie, and the effects of objective and placement on ascent."""
    return {"status": text_settings.status(seeds_of(rows)), **costs(rows), **effects(rows)}


def seeds_of(rows: list[dict[str, Any]]) -> list[int]:
    """Seeds of the models."""
    return sorted({row["seed"] for row in rows})


def costs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the cost of the tie, from losses paired by seed."""
    losses = {(row["objective"], row["placement"], row["value_map"], row["seed"]): row["held-out loss"] for row in rows}
    answer = {}
    for objective, placement, value_map in dict.fromkeys(name[:3] for name in losses):
        if value_map != "free":
            interval = student(
                [
                    losses[objective, placement, value_map, s] - losses[objective, placement, "free", s]
                    for s in seeds_of(rows)
                ]
            )
            if interval.low > LOSS_OF_INTEREST:
                verdict = "costs"
            elif interval.high < -LOSS_OF_INTEREST:
                verdict = "gains"
            elif abs(interval.low) < LOSS_OF_INTEREST > abs(interval.high):
                verdict = "no cost of interest"
            else:
                verdict = "inconclusive"
            answer[f"{value_map}: {objective}, {placement}"] = {"verdict": verdict, "nats": interval._asdict()}
    return answer


def effects(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the effects of objective and placement on the ascent of free models."""
    values = {}
    for row in rows:
        if row["value_map"] == "free":
            last = row["probe"][max(row["probe"], key=int)]
            values[row["objective"], row["placement"], row["seed"]] = last["ascent"]["value"]
    contrasts = {
        "objective (masked - causal)": [
            sum(values["masked", place, s] - values["causal", place, s] for place in ("pre", "post")) / 2
            for s in seeds_of(rows)
        ],
        "placement (post - pre)": [
            sum(values[objective, "post", s] - values[objective, "pre", s] for objective in ("causal", "masked")) / 2
            for s in seeds_of(rows)
        ],
    }
    answer = {}
    for name, differences in contrasts.items():
        interval = student(differences)
        effect = (interval.low > 0 or interval.high < 0) and abs(interval.mean) > ASCENT_OF_INTEREST
        verdict = "effect" if effect else "inconclusive"
        answer[f"ascent: {name}"] = {"verdict": verdict, "difference": interval._asdict()}
    return answer
