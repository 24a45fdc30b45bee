"""Models with eight contractions at two sizes of the data, and the decisions (plan.md).

Read next: ../parts.py (the contractions), ../text.py (the text), ../intervals.py.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from .. import text_settings
from ..exporting import load_checkpoint
from ..intervals import Interval, student
from ..parts import ContractionKind
from ..text import TokenisedText
from ..text_settings import TextSettings
from ..training import train
from ..transformer import Transformer
from ..workers import Workers

KINDS: tuple[ContractionKind, ...] = get_args(ContractionKind)
SIZES = {"little text": 1 / 32, "much text": 1.0}
INTEREST = 0.02  # nats
WINDOWS = 32  # of held-out text, on which budgets are measured


@dataclass(frozen=True, kw_only=True)
class Settings(TextSettings):
    """Size of the experiment."""

    kinds: tuple[ContractionKind, ...] = KINDS


REDUCED = Settings(**vars(text_settings.REDUCED) | {"seeds": 2})
EXTENDED = Settings(
    **vars(text_settings.EXTENDED) | {"first_seed": 2, "training": replace(text_settings.EXTENDED.training, steps=3000)}
)
FULL = Settings(**vars(text_settings.FULL))


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train all models; return their rows and the decisions. Finished runs are read."""
    settings.text(folder)  # written once, before the workers read it
    every = product(settings.every_seed, settings.kinds, SIZES)
    items = {name_of((kind, size, seed)): (kind, size, seed) for seed, kind, size in every}
    rows = workers.rows(partial(row_of, settings, folder), items, settings, folder)
    return settings.results(decisions(rows), rows)


def name_of(item: tuple[ContractionKind, str, int]) -> str:
    """Name of a run."""
    return "-".join(map(str, item)).replace(" ", "_")


def row_of(settings: Settings, folder: Path, item: tuple[ContractionKind, str, int]) -> dict[str, Any]:
    """Row of one run."""
    return trained(*item, settings, settings.text(folder), folder / name_of(item))


def trained(
    kind: ContractionKind, size: str, seed: int, settings: Settings, text: TokenisedText, folder: Path
) -> dict[str, Any]:
    """Held-out loss of a model, and its budget, also before training."""
    model = replace(settings.model, contraction=kind)
    task = settings.task(text, share=SIZES[size])
    run_folder = train(Transformer(model, seed=seed), task, settings.training, seed=seed, folder=folder)
    checkpoints = run_folder.checkpoints()
    windows = text.held_out.long()[: WINDOWS * model.context].reshape(WINDOWS, -1)
    return {
        "contraction": kind,
        "data": size,
        "seed": seed,
        "held-out loss": run_folder.curves[-1]["held_out_loss"],
        "budget": budget(load_checkpoint(checkpoints[max(checkpoints)], model), windows),
        "untrained budget": budget(load_checkpoint(checkpoints[0], model), windows),
    }


@torch.no_grad()
def budget(model: Transformer, windows: Tensor) -> dict[str, Any]:
    """Change of log tr Cov of the stream by each block, and the normalised entropy of the first block's attention."""
    states = [state.mean.flatten(0, 1).double() for state in model.states(windows)]
    spreads = [x.var(0).sum().log() for x in states]
    first: Any = model.blocks[0]
    x = first.before[0](model.embed(windows))
    entropy = first.attention.layer.attend(x, x, x, is_causal=True)[1].entropy
    visible = torch.arange(1, windows.shape[1] + 1).log()
    return {
        "log tr Cov": [float(after - before) for before, after in pairwise(spreads)],
        "normalised entropy": float((entropy[..., 1:] / visible[1:]).mean()),
    }


# Decisions ------------------------------------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the cost of each contraction at each size of the data, and its dependence on the size."""
    seeds = sorted({row["seed"] for row in rows})
    loss = {(row["contraction"], row["data"], row["seed"]): row["held-out loss"] for row in rows}
    answer: dict[str, Any] = {"status": text_settings.status(seeds)}
    for kind in dict.fromkeys(row["contraction"] for row in rows):
        if kind == "layer_norm":
            continue
        costs = {size: [loss[kind, size, s] - loss["layer_norm", size, s] for s in seeds] for size in SIZES}
        for size, values in costs.items():
            interval = student(values)
            answer[f"{kind}, {size}"] = {"verdict": _verdict(interval), "nats": interval._asdict()}
        regime = student([a - b for a, b in zip(costs["little text"], costs["much text"], strict=True)])
        effect = (regime.low > 0 or regime.high < 0) and abs(regime.mean) > INTEREST
        answer[f"{kind}, regime"] = {"verdict": "effect" if effect else "inconclusive", "nats": regime._asdict()}
    return answer


def _verdict(interval: Interval) -> str:
    if interval.low > INTEREST:
        return "costs"
    if interval.high < -INTEREST:
        return "gains"
    return "no cost of interest" if abs(interval.low) < INTEREST > abs(interval.high) else "inconclusive"
