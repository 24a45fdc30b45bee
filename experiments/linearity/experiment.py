"""Feed-forward layers, heads and the stream of models through training, and the decisions (plan.md).

Read next: ../exporting.py (models for the probe), ../../docs/interventions.md.
"""

import math
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from gradlogz import intervene, probe
from gradlogz.probing.inside.loading import load

from .. import text_settings
from ..exporting import export, load_checkpoint
from ..intervals import Interval, student
from ..needed import experiment as needed
from ..text import TokenisedText
from ..text_settings import TextSettings
from ..training import train
from ..transformer import Transformer
from ..workers import Workers

LESS_AFFINE, MOST, NATS = -0.05, 0.5, -0.01
DOCUMENT = 4  # contexts of held-out text in a document


@dataclass(frozen=True, kw_only=True)
class Settings(TextSettings):
    """Size of the experiment; checkpoints: steps that are measured, None for all; tokens: of a measurement."""

    checkpoints: tuple[int, ...] | None
    tokens: int


REDUCED = Settings(**vars(text_settings.REDUCED) | {"seeds": 3}, checkpoints=(0, 64, 300), tokens=2048)
EXTENDED = Settings(  # the free models of needed
    **{field.name: getattr(needed.EXTENDED, field.name) for field in fields(TextSettings)},
    checkpoints=(0, 64, 256, 1024, 2000),
    tokens=4096,
)
FULL = Settings(**vars(text_settings.FULL), checkpoints=None, tokens=20_000)


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train and measure all models; return their rows and the decisions. Finished runs are read."""
    settings.text(folder)  # written once, before the workers read it
    items = {f"seed-{seed}": seed for seed in settings.every_seed}
    rows = list(chain.from_iterable(workers.rows(partial(rows_of, settings, folder), items, settings, folder)))
    return settings.results(decisions(rows), rows)


def rows_of(settings: Settings, folder: Path, seed: int) -> list[dict[str, Any]]:
    """Rows of the checkpoints of one run."""
    text, model = settings.text(folder), Transformer(settings.model, seed=seed)
    run_folder = train(model, settings.task(text), settings.training, seed=seed, folder=folder / f"seed-{seed}")
    rows = []
    for step, place in run_folder.checkpoints().items():
        if settings.checkpoints is None or step in settings.checkpoints:
            network = load_checkpoint(place, settings.model)
            exported = run_folder.path / "exported" / f"step-{step}"
            rows.append({"seed": seed, "step": step, **measured(network, text, settings.tokens, exported)})
    return rows


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
        "status": text_settings.status(seeds),
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
