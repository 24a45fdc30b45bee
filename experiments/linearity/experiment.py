"""Feed-forward layers, heads and the stream of models through training, and the decisions (plan.md).

Read next: ../exporting.py (models for the probe), ../../docs/interventions.md.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gradlogz import intervene, probe
from gradlogz.probing.inside.loading import load

from ..exporting import export, load_checkpoint
from ..intervals import Interval, student
from ..needed import experiment as needed
from ..run_folders import environment
from ..tasks import TextTask
from ..text import TokenisedText, corpus
from ..training import TrainSettings, train
from ..transformer import ModelSettings, Transformer

LESS_AFFINE, MOST, NATS = -0.05, 0.5, -0.01
DOCUMENT = 4  # contexts of held-out text in a document


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; checkpoints: steps that are measured, None for all; tokens: of a measurement."""

    model: ModelSettings
    training: TrainSettings
    batch_size: int
    megabytes: float
    seeds: int
    checkpoints: tuple[int, ...] | None
    tokens: int
    first_seed: int = 0


REDUCED = Settings(
    model=ModelSettings(vocabulary=512, context=64, width=32, heads=4, layers=2, hidden=128),
    training=TrainSettings(steps=300, learning_rate=3e-3, warm_up=30, record_every=100, save_every=100),
    batch_size=16,
    megabytes=2,
    seeds=3,
    checkpoints=(0, 64, 300),
    tokens=2048,
)
EXTENDED = Settings(  # the free models of needed
    model=needed.EXTENDED.model,
    training=needed.EXTENDED.training,
    batch_size=needed.EXTENDED.batch_size,
    megabytes=needed.EXTENDED.megabytes,
    seeds=needed.EXTENDED.seeds,
    checkpoints=(0, 64, 256, 1024, 2000),
    tokens=4096,
    first_seed=needed.EXTENDED.first_seed,
)
FULL = Settings(
    model=ModelSettings(vocabulary=8192, context=256, width=384, heads=6, layers=6, hidden=1536),
    training=TrainSettings(
        steps=20_000, learning_rate=1e-3, warm_up=500, record_every=250, save_every=1000, bfloat16=True, compiled=True
    ),
    batch_size=64,
    megabytes=50,
    seeds=5,
    checkpoints=None,
    tokens=20_000,
)


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and measure all models; return their rows and the decisions. Finished runs are read."""
    text = corpus(folder / "text", megabytes=settings.megabytes, vocabulary=settings.model.vocabulary)
    rows = []
    for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
        task = TextTask(text.train, text.held_out, settings.model.context, settings.batch_size)
        model = Transformer(settings.model, seed=seed)
        run_folder = train(model, task, settings.training, seed=seed, folder=folder / f"seed-{seed}")
        for step, place in run_folder.checkpoints().items():
            if settings.checkpoints is None or step in settings.checkpoints:
                network = load_checkpoint(place, settings.model)
                exported = run_folder.path / "exported" / f"step-{step}"
                rows.append({"seed": seed, "step": step, **measured(network, text, settings.tokens, exported)})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"answer": decisions(rows), "settings": asdict(settings), "environment": environment(device), "models": rows}


def measured(network: Transformer, text: TokenisedText, tokens: int, folder: Path) -> dict[str, Any]:
    """Statistics of the plan for one checkpoint, which is exported to a folder."""
    export(network, folder, text.folder / "tokenizer.json")
    loaded, n = load(folder), network.settings.context
    documents = text.held_out.long()[: 2 * tokens // n * n].reshape(-1, DOCUMENT * n)
    texts = [loaded.tokenizer.decode(each) for each in documents]
    parts = ["feed_forward", "heads"]
    effects = intervene(
        loaded.model, loaded.tokenizer, texts, interventions=parts, tokens=tokens, fit_tokens=tokens, length=n
    )
    layers, heads = effects.select("affine", "mean").rows, effects.select("gaussian", "mean").rows
    found = probe(  # plain-words: ok
        loaded.model, loaded.tokenizer, texts, predictions=["linearity", "gaussianity"], baseline=0.0, draws=0,
        tokens=tokens, length=n,
    )  # fmt: skip
    claims = {claim.prediction: claim.value for claim in found.claims}
    return {
        "loss": effects.facts["loss_value"],
        "R2": _finite(claims["linearity"]),
        "trend": _finite(claims["gaussianity"]),
        "affine share": median(1 - row.value / row.control_value for row in layers),
        "closed form": math.fsum(row.difference for row in heads) / len(heads),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# Decisions ------------------------------------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the hypotheses of the plan."""
    seeds = sorted({row["seed"] for row in rows})
    steps = sorted({row["step"] for row in rows})
    value = {(row["seed"], row["step"]): row for row in rows}
    last = steps[-1]
    change = student([value[s, last]["R2"] - value[s, steps[0]]["R2"] for s in seeds])
    share, closed = (student([value[s, last][name] for s in seeds]) for name in ("affine share", "closed form"))
    trends = [value[s, last]["trend"] for s in seeds]
    unknown = {"verdict": "not judged"}  # too few depths for a trend
    return {
        "status": "final" if len(seeds) >= 5 else "preliminary: fewer than 5 seeds",
        "H1 less affine": _below(change, LESS_AFFINE),
        "H2 mostly affine": _below(share, MOST, reverse=True),
        "H3 closed form of heads": _below(closed, NATS),
        "H4 Gaussian with depth": unknown if None in trends else _below(student(trends), 0.0),
    }


def _below(interval: Interval, bound: float, *, reverse: bool = False) -> dict[str, Any]:
    below, above = interval.high < bound, interval.low > bound
    supported, refuted = (above, below) if reverse else (below, above)
    verdict = "supported" if supported else "refuted" if refuted else "inconclusive"
    return {"verdict": verdict, "value": interval._asdict()}
