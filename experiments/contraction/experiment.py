"""Models with eight contractions at two sizes of the data, and the decisions (plan.md).

Read next: ../parts.py (the contractions), ../text.py (the text), ../ensembles.py (seeds trained together).
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from gradlogz.dynamics.observables import AttentionRecord, sliced_wasserstein

from .. import text_settings
from ..ascent.ensembles import TextEnsemble
from ..ensembles import Ensemble, Member, train_together
from ..exporting import load_checkpoint
from ..intervals import Interval, student
from ..parts import ContractionKind
from ..tasks import Batch, TextTask, generator_of
from ..text import TokenisedText
from ..text_settings import TextSettings
from ..training import train
from ..transformer import Transformer
from ..workers import Workers

KINDS: tuple[ContractionKind, ...] = get_args(ContractionKind)
SIZES = ("little text", "much text")
INTEREST = 0.02  # nats
LOG_RATIO_OF_INTEREST = 0.1  # of variances: a tenth
WINDOWS = 32  # of held-out text, on which budgets are measured
NO_RECORD = AttentionRecord(torch.empty(0), None, None)  # sliced_wasserstein reads tokens alone


@dataclass(frozen=True, kw_only=True)
class Settings(TextSettings):
    """Size of the experiment.

    Attributes:
        little: share of the training text that is "little text".
        together: train the seeds of a contraction together, but for whitening.
    """

    kinds: tuple[ContractionKind, ...] = KINDS
    little: float = 1 / 32
    together: bool = False

    def share(self, size: str) -> float:
        """Share of the training text that is read."""
        return self.little if size == "little text" else 1.0


REDUCED = Settings(**vars(text_settings.REDUCED) | {"seeds": 2})
EXTENDED = Settings(
    **vars(text_settings.EXTENDED)
    | {
        "model": replace(text_settings.EXTENDED.model, embedding_scale=35.0),
        "training": replace(text_settings.EXTENDED.training, steps=1000),
        "batch_size": 8,
        "first_seed": 2,
    },
    little=1 / 128,
    together=True,
)
FULL = Settings(**vars(text_settings.FULL))


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train all models; return their rows and the decisions. Finished runs are read."""
    settings.text(folder)  # written once, before the workers read it
    items = {name_of(*item): item for item in product(settings.kinds, SIZES)}
    rows = list(chain.from_iterable(workers.rows(partial(rows_of, settings, folder), items, settings, folder)))
    return settings.results(decisions(rows), rows)


def name_of(*parts: str | int) -> str:
    """Name of a run, or of the runs of all seeds."""
    return "-".join(map(str, parts)).replace(" ", "_")


def rows_of(settings: Settings, folder: Path, item: tuple[ContractionKind, str]) -> list[dict[str, Any]]:
    """Rows of a contraction and a size of the data, for every seed."""
    text = settings.text(folder)
    members = [member(*item, seed, settings, text, folder / name_of(*item, seed)) for seed in settings.every_seed]
    if settings.together and item[0] != "whitening":
        together(members)
    return [{"contraction": item[0], "data": item[1], **row_of(each, text)} for each in members]


def member(
    kind: ContractionKind, size: str, seed: int, settings: Settings, text: TokenisedText, folder: Path
) -> Member:
    """A model, its task and its training."""
    model = Transformer(replace(settings.model, contraction=kind), seed=seed)
    return Member(model, settings.task(text, share=settings.share(size)), settings.training, seed, folder)


def together(members: list[Member]) -> None:
    """Train models that differ in their seeds; what is complete is read."""
    tasks = [each.task for each in members if isinstance(each.task, TextTask)]
    held_out = [Batch(*(part.expand(len(members), -1, -1) for part in batch)) for batch in tasks[0].held_out_batches()]
    steps = range(members[0].training.steps + 1)
    batches = [[task.batch(each.seed, step) for task, each in zip(tasks, members, strict=True)] for step in steps]
    joined = Batch(*(torch.stack([torch.stack([each[i] for each in step]) for step in batches]) for i in (0, 1)))

    def observe(ensemble: Ensemble) -> dict[str, Tensor]:
        return {"held_out_loss": torch.stack([ensemble.losses(batch) for batch in held_out]).mean(0)}

    train_together(members, TextEnsemble, joined, observe, torch.device("cpu"), all_checkpoints=False)


def row_of(each: Member, text: TokenisedText) -> dict[str, Any]:
    """Losses of a model, and its budget, also before training."""
    model = each.model.settings
    untrained = Transformer(model, seed=each.seed).eval()
    run_folder = train(each.model, each.task, each.training, seed=each.seed, folder=each.folder)
    checkpoints = run_folder.checkpoints()
    windows = text.held_out.long()[: WINDOWS * model.context].reshape(WINDOWS, -1)
    return {
        "seed": each.seed,
        "held-out loss": run_folder.curves[-1]["held_out_loss"],
        "lowest held-out loss": min(row["held_out_loss"] for row in run_folder.curves),
        "training loss": run_folder.curves[-1]["loss"],
        "budget": budget(load_checkpoint(checkpoints[max(checkpoints)], model), windows, each.seed),
        "untrained budget": budget(untrained, windows, each.seed),
    }


@torch.no_grad()
def budget(model: Transformer, windows: Tensor, seed: int = 0) -> dict[str, Any]:
    """Changes of the stream of a text by each block, and of Gaussian tokens of the same mean and covariance.

    The second is the prediction of the simulator: layers with the trained weights, tokens without a text. Gaussianity
    is the sliced Wasserstein distance of the last stream to a Gaussian; entropies are those of the first block.
    """
    embedded = model.embed(windows)
    flat = embedded.flatten(0, 1).double()
    values, vectors = torch.linalg.eigh(flat.mT.cov())
    root = vectors * values.clamp(min=0.0).sqrt()
    noise = torch.randn(flat.shape, dtype=torch.float64, generator=generator_of(seed, 0))
    sampled = (flat.mean(0) + noise @ root.mT).to(embedded.dtype).view_as(embedded)
    statistics: dict[str, Any] = {}
    for name, start in (("", embedded), (", Gaussian tokens", sampled)):
        states = [state.mean.flatten(0, 1).double() for state in model.states_from(start)]
        spreads = [x.var(0).sum().log() for x in states]
        statistics[f"log tr Cov{name}"] = [float(after - before) for before, after in pairwise(spreads)]
        statistics[f"distance to a Gaussian{name}"] = float(sliced_wasserstein(states[-1], NO_RECORD, None))
        statistics[f"normalised entropy{name}"] = _normalised_entropy(model, start)
    return statistics


def _normalised_entropy(model: Transformer, start: Tensor) -> float:
    """Mean entropy of the first block's attention over that of uniform attention."""
    first: Any = model.blocks[0]
    x = first.before[0](start)
    entropy = first.attention.layer.attend(x, x, x, is_causal=True)[1].entropy
    visible = torch.arange(1, start.shape[-2] + 1).log()
    return float((entropy[..., 1:] / visible[1:]).mean())


# Decisions ------------------------------------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the cost of each contraction at each size of the data, its dependence on the size, and the prediction."""
    seeds = sorted({row["seed"] for row in rows})
    of_run = {(row["contraction"], row["data"], row["seed"]): row for row in rows}
    answer: dict[str, Any] = {"status": text_settings.status(seeds)}
    for kind in dict.fromkeys(row["contraction"] for row in rows):
        ratios = [_log_ratio(of_run[kind, "much text", s]["budget"]) for s in seeds]
        answer[f"{kind}, prediction"] = _predicted(student(ratios))
        if kind == "layer_norm":
            continue
        costs = {
            size: [
                of_run[kind, size, s]["held-out loss"] - of_run["layer_norm", size, s]["held-out loss"] for s in seeds
            ]
            for size in SIZES
        }
        for size, values in costs.items():
            interval = student(values)
            answer[f"{kind}, {size}"] = {"verdict": _verdict(interval), "nats": interval._asdict()}
        regime = student([a - b for a, b in zip(costs["little text"], costs["much text"], strict=True)])
        effect = (regime.low > 0 or regime.high < 0) and abs(regime.mean) > INTEREST
        answer[f"{kind}, regime"] = {"verdict": "effect" if effect else "inconclusive", "nats": regime._asdict()}
    return answer


def _log_ratio(budget: dict[str, Any]) -> float:
    """Log growth of the variance of the text over all blocks, minus that of Gaussian tokens."""
    return sum(budget["log tr Cov"]) - sum(budget["log tr Cov, Gaussian tokens"])


def _predicted(interval: Interval) -> dict[str, Any]:
    within = max(-interval.low, interval.high) < LOG_RATIO_OF_INTEREST
    beyond = interval.low > LOG_RATIO_OF_INTEREST or interval.high < -LOG_RATIO_OF_INTEREST
    verdict = "predicted" if within else "not predicted" if beyond else "inconclusive"
    return {"verdict": verdict, "log ratio": interval._asdict()}


def _verdict(interval: Interval) -> str:
    if interval.low > INTEREST:
        return "costs"
    if interval.high < -INTEREST:
        return "gains"
    return "no cost of interest" if abs(interval.low) < INTEREST > abs(interval.high) else "inconclusive"
