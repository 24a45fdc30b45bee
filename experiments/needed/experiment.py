"""Models without some of their weights, or with another attention, and the decisions (plan.md).

Read next: ../parts.py (`fix_maps`), ../text.py (the text), ../intervals.py.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import text_settings
from ..exporting import load_checkpoint
from ..intervals import Interval, student
from ..tasks import TextTask, generator_of
from ..text import TokenisedText
from ..text_settings import TextSettings, without_decay
from ..training import train
from ..transformer import Transformer
from ..workers import Workers

COST, FAIRLY_WELL, CONTROL = 0.1, 0.5, 0.05
MOVED, DRAWS = 0.3, 5  # size of random moves relative to the norm of a matrix, and their number
ARMS: dict[str, dict[str, Any]] = {
    "free": {},
    **{f"identity {maps}": {"identity": maps} for maps in ("q", "k", "qk", "v", "o", "vo", "qkvo")},
    **{f"random {maps}": {"frozen": maps} for maps in ("qk", "vo", "qkvo")},
    **{kind: {"attention": kind} for kind in ("linear", "sigmoid", "cosine", "gated", "link", "mixture")},
    "tied feed-forward": {"feed_forward": "tied"},
    "no attention": {"attention": "none"},
}
GROUPS = {"qk": ("in_proj_weight",), "vo": ("in_proj_weight", "out_proj.weight"), "feed-forward": ("feed_forward.",)}


@dataclass(frozen=True, kw_only=True)
class Settings(TextSettings):
    """Size of the experiment."""

    arms: tuple[str, ...] = tuple(ARMS)


# Weights that are held do not decay.
REDUCED = Settings(**without_decay(text_settings.REDUCED) | {"seeds": 3})
EXTENDED = Settings(**without_decay(text_settings.EXTENDED) | {"first_seed": 3})
FULL = Settings(**without_decay(text_settings.FULL))


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train all arms; return their losses and the decisions. Finished runs are read."""
    settings.text(folder)  # written once, before the workers read it
    items = {name_of(arm, seed): (arm, seed) for seed in settings.every_seed for arm in settings.arms}
    rows = workers.rows(partial(row_of, settings, folder), items, settings, folder)
    return settings.results(decisions(rows), rows)


def name_of(arm: str, seed: int) -> str:
    """Name of a run."""
    return f"{arm}-{seed}".replace(" ", "_")


def row_of(settings: Settings, folder: Path, item: tuple[str, int]) -> dict[str, Any]:
    """Row of one run."""
    return trained(*item, settings, settings.text(folder), folder / name_of(*item))


def trained(arm: str, seed: int, settings: Settings, text: TokenisedText, folder: Path) -> dict[str, Any]:
    """Held-out loss of an arm; for the free model its sensitivities, too."""
    model = replace(settings.model, **ARMS[arm])
    task = settings.task(text)
    run_folder = train(Transformer(model, seed=seed), task, settings.training, seed=seed, folder=folder)
    row: dict[str, Any] = {"arm": arm, "seed": seed, "held-out loss": run_folder.curves[-1]["held_out_loss"]}
    if arm == "free":
        checkpoints = run_folder.checkpoints()
        row["sensitivity"] = sensitivities(load_checkpoint(checkpoints[max(checkpoints)], model), task)
    return row


@torch.no_grad()
def sensitivities(model: Transformer, task: TextTask) -> dict[str, float]:
    """Mean rise of the held-out loss when the matrices of a group move by MOVED of their norm."""
    before = task.evaluate(model)["held_out_loss"]
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    generator, rises = generator_of(0, 0), {}
    for group in GROUPS:
        losses = []
        for _ in range(DRAWS):
            for name, parameter in model.named_parameters():
                for part in matrices(group, name, parameter):
                    noise = torch.randn(part.shape, generator=generator)
                    part += MOVED * part.norm() * noise / noise.norm()
            losses.append(task.evaluate(model)["held_out_loss"])
            model.load_state_dict(weights)
        rises[group] = math.fsum(losses) / DRAWS - before
    return rises


def matrices(group: str, name: str, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Views of the matrices of a parameter that belong to a group."""
    if parameter.ndim != 2 or not any(part in name for part in GROUPS[group]):
        return []
    if name.endswith("in_proj_weight"):
        q, k, v = parameter.chunk(3)
        return [q, k] if group == "qk" else [v]
    return [parameter.data]


# Decisions ------------------------------------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide which parts are needed."""
    seeds = sorted({row["seed"] for row in rows})
    loss = {(row["arm"], row["seed"]): row["held-out loss"] for row in rows}
    answer: dict[str, Any] = {"status": text_settings.status(seeds)}
    gap = student([loss["no attention", s] - loss["free", s] for s in seeds])
    answer["control: cost of no attention"] = {"passed": gap.low > CONTROL, "nats": gap._asdict()}
    if not gap.low > CONTROL:
        return answer | {"verdict": "not judged"}

    def relative(arm: str) -> Interval:
        scale = [loss["no attention", s] - loss["free", s] for s in seeds]
        return student([(loss[arm, s] - loss["free", s]) / g for s, g in zip(seeds, scale, strict=True)])

    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm not in ("free", "no attention")]
    for arm in arms:
        cost = relative(arm)
        verdict = "needed" if cost.low > COST else "not needed" if cost.high < COST else "inconclusive"
        if not arm.startswith(("identity", "random")):
            verdict = {"needed": "worse", "not needed": "not worse"}.get(verdict, verdict)
        answer[arm] = {"verdict": verdict, "relative cost": cost._asdict()}
    if "identity qkvo" in arms:
        none = relative("identity qkvo")
        verdict = "supported" if none.high < FAIRLY_WELL else "refuted" if none.low > FAIRLY_WELL else "inconclusive"
        answer["H8 no weights do fairly well"] = {"verdict": verdict, "relative cost": none._asdict()}
    if {"random qk", "random vo"} <= set(arms):
        answer["H9 queries and keys are easier"] = _easier(rows, loss, seeds)
    return answer


def _easier(rows: list[dict[str, Any]], loss: dict[tuple[str, int], float], seeds: list[int]) -> dict[str, Any]:
    rises = [row["sensitivity"] for row in rows if row["arm"] == "free"]
    ratio = student([math.log(max(r["vo"], 1e-6) / max(r["qk"], 1e-6)) for r in rises])
    gains = student([loss["random vo", s] - loss["random qk", s] for s in seeds])
    verdict = "inconclusive"
    if ratio.low > 0 and gains.low > 0:
        verdict = "supported"
    elif ratio.high < 0 and gains.high < 0:
        verdict = "refuted"
    return {"verdict": verdict, "log ratio of sensitivities": ratio._asdict(), "difference of gains": gains._asdict()}
