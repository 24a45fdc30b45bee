"""Sizes of the experiments that train language models, and what their runs have in common.

    REDUCED     two layers of width 32, 300 steps on 2 MB       two cores, under ten minutes
    EXTENDED    two layers of width 32, 2000 steps on 8 MB      one core, at most an hour
    FULL        six layers of width 384, 20 000 steps on 50 MB  a GPU

Read next: text.py (the text); experiment.py of ascent, contraction, linearity and needed.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .run_folders import environment
from .tasks import TextTask
from .text import TokenisedText, corpus
from .training import TrainSettings
from .transformer import ModelSettings


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Size of an experiment; first_seed: the others follow it."""

    model: ModelSettings
    training: TrainSettings
    batch_size: int
    megabytes: float
    seeds: int = 5
    first_seed: int = 0

    @property
    def every_seed(self) -> range:
        """Seeds of a model."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def text(self, folder: Path) -> TokenisedText:
        """The text in a run folder, which is collected if it is not there."""
        return corpus(folder / "text", megabytes=self.megabytes, vocabulary=self.model.vocabulary)

    def task(self, text: TokenisedText, *, share: float = 1.0, mask: int | None = None) -> TextTask:
        """The task of predicting text; share: first part of the training text that is read."""
        part = text.train[: round(share * len(text.train))]
        return TextTask(part, text.held_out, self.model.context, self.batch_size, mask=mask)

    def results(self, answer: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Results as they are written."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return {"answer": answer, "settings": asdict(self), "environment": environment(device), "models": rows}


REDUCED = TextSettings(
    model=ModelSettings(vocabulary=512, context=64, width=32, heads=4, layers=2, hidden=128),
    training=TrainSettings(steps=300, learning_rate=3e-3, warm_up=30, record_every=100, save_every=100),
    batch_size=16,
    megabytes=2,
)
EXTENDED = replace(
    REDUCED,
    training=replace(REDUCED.training, steps=2000, warm_up=100, record_every=250, save_every=1000),
    megabytes=8,
)
FULL = TextSettings(
    model=ModelSettings(vocabulary=8192, context=256, width=384, heads=6, layers=6, hidden=1536),
    training=TrainSettings(
        steps=20_000, learning_rate=1e-3, warm_up=500, record_every=250, save_every=1000, bfloat16=True, compiled=True
    ),
    batch_size=64,
    megabytes=50,
)


def without_decay(settings: TextSettings) -> dict[str, Any]:
    """Fields of settings, with a training without weight decay."""
    return vars(replace(settings, training=replace(settings.training, weight_decay=0.0)))


def status(seeds: list[int]) -> str:
    """Status of an answer: fewer than five seeds are not enough for a final one."""
    return "final" if len(seeds) >= 5 else "preliminary: fewer than 5 seeds"
