"""Models with eight contractions at two sizes of the data, and the decisions (plan.md).

Read next: ../parts.py (the contractions), ../text.py (the text), ../intervals.py.
"""

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ..exporting import load_checkpoint
from ..intervals import Interval, student
from ..parts import ContractionKind
from ..run_folders import environment
from ..tasks import TextTask
from ..text import TokenisedText, corpus
from ..training import TrainSettings, train
from ..transformer import ModelSettings, Transformer

KINDS: tuple[ContractionKind, ...] = get_args(ContractionKind)
SIZES = {"little text": 1 / 32, "much text": 1.0}
INTEREST = 0.02  # nats
WINDOWS = 32  # of held-out text, on which budgets are measured


@dataclass(frozen=True)
class Settings:
    """Size of the experiment."""

    model: ModelSettings
    training: TrainSettings
    batch_size: int
    megabytes: float
    seeds: int
    first_seed: int = 0
    kinds: tuple[ContractionKind, ...] = KINDS


REDUCED = Settings(
    model=ModelSettings(vocabulary=512, context=64, width=32, heads=4, layers=2, hidden=128),
    training=TrainSettings(steps=300, learning_rate=3e-3, warm_up=30, record_every=100, save_every=100),
    batch_size=16,
    megabytes=2,
    seeds=2,
)
EXTENDED = replace(
    REDUCED,
    training=replace(REDUCED.training, steps=3000, warm_up=100, record_every=250, save_every=1000),
    megabytes=8,
    seeds=5,
    first_seed=2,
)
FULL = Settings(
    model=ModelSettings(vocabulary=8192, context=256, width=384, heads=6, layers=6, hidden=1536),
    training=TrainSettings(
        steps=20_000, learning_rate=1e-3, warm_up=500, record_every=250, save_every=1000, bfloat16=True, compiled=True
    ),
    batch_size=64,
    megabytes=50,
    seeds=5,
)


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train all models; return their rows and the decisions. Finished runs are read."""
    text = corpus(folder / "text", megabytes=settings.megabytes, vocabulary=settings.model.vocabulary)
    rows = [
        trained(kind, size, seed, settings, text, folder / f"{kind}-{size}-{seed}".replace(" ", "_"))
        for seed in range(settings.first_seed, settings.first_seed + settings.seeds)
        for kind in settings.kinds
        for size in SIZES
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"answer": decisions(rows), "settings": asdict(settings), "environment": environment(device), "models": rows}


def trained(
    kind: ContractionKind, size: str, seed: int, settings: Settings, text: TokenisedText, folder: Path
) -> dict[str, Any]:
    """Held-out loss of a model, and its budget, also before training."""
    model = replace(settings.model, contraction=kind)
    part = text.train[: round(SIZES[size] * len(text.train))]
    task = TextTask(part, text.held_out, model.context, settings.batch_size)
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
    answer: dict[str, Any] = {"status": "final" if len(seeds) >= 5 else "preliminary: fewer than 5 seeds"}
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
