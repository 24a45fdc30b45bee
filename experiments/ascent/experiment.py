"""Runs of the experiment on free and tied value maps, and its decisions (plan.md).

Read next: ../text.py (the text), ../exporting.py (models for the probe), ../costs.py (equal parameters, equal compute).
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from gradlogz import probe
from gradlogz.probing.inside.loading import load

from ..costs import cost, matched
from ..exporting import export, load_checkpoint
from ..intervals import student
from ..run_folders import environment
from ..tasks import TextTask
from ..text import MASK_ID, TokenisedText, corpus
from ..training import TrainSettings, train
from ..transformer import ModelSettings, Objective, Placement, Transformer

ValueMap = Literal["free", "tied, equal parameters", "tied, equal compute"]
PREDICTIONS = ["ascent", "tie", "symmetry"]
LOSS_OF_INTEREST, ASCENT_OF_INTEREST = 0.02, 0.02


class Cell(NamedTuple):
    """A model of the experiment, but its seed."""

    objective: Objective
    placement: Placement
    value_map: ValueMap


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; probe_tokens: tokens that the probe reads."""

    model: ModelSettings
    training: TrainSettings
    batch_size: int
    megabytes: float
    seeds: int
    probe_tokens: int
    every_checkpoint: bool
    first_seed: int = 0
    value_maps: tuple[ValueMap, ...] = get_args(ValueMap)


REDUCED = Settings(
    model=ModelSettings(vocabulary=1024, context=64, width=64, heads=4, layers=2, hidden=256),
    training=TrainSettings(steps=300, learning_rate=3e-3, warm_up=30, record_every=50, save_every=100),
    batch_size=16,
    megabytes=4,
    seeds=2,
    probe_tokens=2048,
    every_checkpoint=False,
)
EXTENDED = Settings(
    model=ModelSettings(vocabulary=512, context=64, width=32, heads=4, layers=2, hidden=128),
    training=TrainSettings(
        steps=2000, learning_rate=3e-3, weight_decay=0.0, warm_up=100, record_every=250, save_every=1000
    ),
    batch_size=16,
    megabytes=8,
    seeds=5,
    probe_tokens=4096,
    every_checkpoint=False,
    first_seed=3,
    value_maps=("free", "tied, equal parameters"),
)
FULL = Settings(
    model=ModelSettings(vocabulary=8192, context=256, width=384, heads=6, layers=6, hidden=1536),
    training=TrainSettings(
        steps=20_000, learning_rate=1e-3, warm_up=500, record_every=250, save_every=1000, bfloat16=True, compiled=True
    ),
    batch_size=64,
    megabytes=50,
    seeds=5,
    probe_tokens=20_000,
    every_checkpoint=True,
)


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and probe all models; return their rows and the decisions. Finished runs are read."""
    text = corpus(folder / "text", megabytes=settings.megabytes, vocabulary=settings.model.vocabulary)
    rows = []
    for cell in cells(settings.value_maps):
        for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
            name = "-".join((*cell, str(seed))).replace(", ", "_").replace(" ", "_")
            rows.append(trained_and_probed(cell, seed, settings, text, folder / name))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "answer": decisions(rows),
        "settings": asdict(settings),
        "training FLOPs": training_flops(settings),
        "environment": environment(device),
        "models": rows,
    }


def cells(value_maps: tuple[ValueMap, ...] = get_args(ValueMap)) -> Iterator[Cell]:
    """All combinations of objective, placement and value map."""
    return (Cell(*parts) for parts in product(get_args(Objective), get_args(Placement)[:2], value_maps))


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
    models = [model_of(cell, settings.model) for cell in cells(settings.value_maps)]
    return settings.seeds * sum(cost(model).training_flops(tokens) for model in models)


def trained_and_probed(cell: Cell, seed: int, settings: Settings, text: TokenisedText, folder: Path) -> dict[str, Any]:
    """Held-out loss of a model, and what the probe measures on it."""
    model = model_of(cell, settings.model)
    mask = MASK_ID if cell.objective == "masked" else None
    task = TextTask(text.train, text.held_out, model.context, settings.batch_size, mask=mask)
    run_folder = train(Transformer(model, seed=seed), task, settings.training, seed=seed, folder=folder)
    checkpoints = run_folder.checkpoints()
    steps = list(checkpoints) if settings.every_checkpoint else [min(checkpoints), max(checkpoints)]
    probed = {}
    for step in steps:
        network = load_checkpoint(checkpoints[step], model)
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
    seeds = sorted({row["seed"] for row in rows})
    answer: dict[str, Any] = {"status": "final" if len(seeds) >= 5 else "preliminary: fewer than 5 seeds"}
    by_name = {(row["objective"], row["placement"], row["value_map"], row["seed"]): row for row in rows}

    def ascent(objective: str, placement: str, seed: int) -> float:
        probed = by_name[objective, placement, "free", seed]["probe"]
        return probed[max(probed, key=int)]["ascent"]["value"]

    for objective, placement, value_map in dict.fromkeys(name[:3] for name in by_name):
        if value_map != "free":
            differences = [
                by_name[objective, placement, value_map, s]["held-out loss"]
                - by_name[objective, placement, "free", s]["held-out loss"]
                for s in seeds
            ]
            interval = student(differences)
            if interval.low > LOSS_OF_INTEREST:
                verdict = "costs"
            elif interval.high < -LOSS_OF_INTEREST:
                verdict = "gains"
            elif abs(interval.low) < LOSS_OF_INTEREST > abs(interval.high):
                verdict = "no cost of interest"
            else:
                verdict = "inconclusive"
            answer[f"{value_map}: {objective}, {placement}"] = {"verdict": verdict, "nats": interval._asdict()}
    effects = {
        "objective (masked - causal)": [
            sum(ascent("masked", place, s) - ascent("causal", place, s) for place in ("pre", "post")) / 2 for s in seeds
        ],
        "placement (post - pre)": [
            sum(ascent(objective, "post", s) - ascent(objective, "pre", s) for objective in ("causal", "masked")) / 2
            for s in seeds
        ],
    }
    for name, values in effects.items():
        interval = student(values)
        effect = (interval.low > 0 or interval.high < 0) and abs(interval.mean) > ASCENT_OF_INTEREST
        verdict = "effect" if effect else "inconclusive"
        answer[f"ascent: {name}"] = {"verdict": verdict, "difference": interval._asdict()}
    return answer
