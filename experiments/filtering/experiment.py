"""Transformers and filters on switching systems, and their decisions (plan.md).

Read next: systems.py (the data and the filters), decoding.py (read-outs), ../intervals.py.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exporting import load_checkpoint
from ..intervals import Interval, student
from ..parts import AttentionKind
from ..run_folders import environment
from ..training import TrainSettings, train
from ..transformer import ModelSettings, Transformer
from ..workers import Workers
from .decoding import attention_features, decoded, quadratic_window
from .systems import FIRST, STEPS, SYSTEMS, FilteringTask, Reference, reference

ERROR, R2, COEFFICIENT = 0.02, 0.05, 0.5  # smallest effects of interest
FILTERS = ("gpb1", "imm", "gpb2")


class Arm(NamedTuple):
    """A model on a system, but its seed."""

    system: str
    attention: AttentionKind
    layers: int


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; series: reference series, of which `fitted` fit the read-outs."""

    arms: tuple[Arm, ...]
    seeds: int
    steps: int
    series: int
    fitted: int
    width: int = 32
    batch_size: int = 64


FULL = Settings(
    arms=(
        *(Arm(system, "softmax", 2) for system in SYSTEMS),
        Arm("one coordinate", "softmax", 4),
        Arm("outliers", "moment", 2),
    ),
    seeds=5,
    steps=4000,
    series=1000,
    fitted=600,
)
REDUCED = Settings(arms=(Arm("one coordinate", "softmax", 2),), seeds=2, steps=1000, series=200, fitted=120)


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train all models; return filters, models and decisions. Finished runs and references are read."""
    systems = dict.fromkeys(arm.system for arm in settings.arms)
    references = {name: reference_of(name, settings, folder) for name in systems}
    filters = {
        name: {key: measured(p, each) for key, p in each.predictions.items() if key != "exact"}
        | {
            "quadratic read-out": decoded(
                *_judged(each, quadratic_window(each.observations)), settings.fitted
            )._asdict()
        }
        for name, each in references.items()
    }
    items = {name_of(arm, seed): (arm, seed) for arm in settings.arms for seed in range(settings.seeds)}
    rows = workers.rows(partial(row_of, settings, folder), items, settings, folder)
    return {
        "answer": decisions(rows, filters),
        "settings": asdict(settings),
        "environment": environment(torch.device("cpu")),
        "filters": filters,
        "models": rows,
    }


def reference_of(system: str, settings: Settings, folder: Path) -> Reference:
    """Reference series of a system and the predictions of filters, computed once."""
    return reference(system, settings.series, folder / f"{system}-{settings.series}.safetensors")


def name_of(arm: Arm, seed: int) -> str:
    """Name of a run."""
    return f"{arm.system}-{arm.attention}-{arm.layers}-{seed}".replace(" ", "_")


def row_of(settings: Settings, folder: Path, item: tuple[Arm, int]) -> dict[str, Any]:
    """Row of one run."""
    arm, seed = item
    return trained(arm, seed, settings, reference_of(arm.system, settings, folder), folder / name_of(arm, seed))


def trained(arm: Arm, seed: int, settings: Settings, known: Reference, folder: Path) -> dict[str, Any]:
    """Errors and read-outs of a trained model, and the read-outs of the model before training."""
    model = ModelSettings(
        vocabulary=known.observations.shape[-1], context=STEPS - 1, width=settings.width, heads=4, layers=arm.layers,
        hidden=4 * settings.width, attention=arm.attention, numbers=True,
    )  # fmt: skip
    training = TrainSettings(
        steps=settings.steps, learning_rate=3e-3, weight_decay=0.0, warm_up=100, last_rate=0.01, record_every=500,
        save_every=500,
    )  # fmt: skip
    task = FilteringTask(arm.system, settings.batch_size)
    complete = train(Transformer(model, seed=seed), task, training, seed=seed, folder=folder, device="cpu")
    checkpoints = complete.checkpoints()
    first, last = (load_checkpoint(checkpoints[step], model) for step in (min(checkpoints), max(checkpoints)))
    with torch.no_grad():
        predictions = torch.full_like(known.observations, torch.nan)
        predictions[:, 1:] = last(known.observations[:, :-1].float()).double()
        return {
            **arm._asdict(),
            "seed": seed,
            **measured(predictions, known),
            "read-outs": read_outs(last, known, settings.fitted),
            "random weights": read_outs(first, known, settings.fitted),
        }


def measured(predictions: Tensor, known: Reference) -> dict[str, Any]:
    """Relative error of predictions [n, t, o], and its regression on the errors of filters."""
    p, exact, *others = (
        each[:, FIRST:].flatten(0, 1).double()
        for each in (predictions, *(known.predictions[name] for name in ("exact", "linear", "gpb1", "imm")))
    )
    errors = torch.stack([(other - exact).flatten() for other in others], -1)
    coefficients = torch.linalg.lstsq(errors, (p - exact).flatten().unsqueeze(-1)).solution.flatten()
    relative = (p - exact).square().sum() / (others[0] - exact).square().sum()
    names = ("linear", "gpb1", "imm")
    return {
        "relative error": float(relative),
        "errors": dict(zip(names, coefficients.tolist(), strict=True)),
    }


def read_outs(model: Transformer, known: Reference, fitted: int) -> dict[str, Any]:
    """R² of mode probabilities and of predictive log variances from the parts of a model."""
    tokens = known.observations[:, :-1].float()
    states = model.states(tokens)
    features = {f"stream {i}": state.mean for i, state in enumerate(states)}
    if states[-1].variance is not None:
        features |= {
            f"variance {i}": state.variance.clamp(min=1e-9).log()
            for i, state in enumerate(states)
            if state.variance is not None
        }
    else:
        features["weights"], features["dropped variance"] = attention_features(model, tokens)
    rows = {}
    for name, X in features.items():
        modes, uncertainty = ((X[:, FIRST - 1 :], y[:, FIRST - 1 :]) for y in _targets(known))
        rows[name] = {
            "modes": decoded(*modes, fitted)._asdict(),
            "uncertainty": decoded(*uncertainty, fitted)._asdict(),
        }
    return rows


def _targets(known: Reference) -> tuple[Tensor, Tensor]:
    """Quantities that a token can know: the mode at its time, and the log variance of the next observation."""
    return known.probability[:, :-1], known.variance[:, 1:].log()


def _judged(known: Reference, features: Tensor) -> tuple[Tensor, Tensor]:
    return features[:, FIRST - 1 : -1], known.probability[:, FIRST - 1 : -1]


# Decisions ------------------------------------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]], filters: dict[str, Any]) -> dict[str, Any]:
    """Decide the hypotheses of the plan for every arm, and the question."""
    seeds = {row["seed"] for row in rows}
    answer: dict[str, Any] = {"status": "final" if len(seeds) >= 5 else "preliminary: fewer than 5 seeds"}
    arms = dict.fromkeys(Arm(row["system"], row["attention"], row["layers"]) for row in rows)
    by_arm = {arm: [row for row in rows if Arm(row["system"], row["attention"], row["layers"]) == arm] for arm in arms}
    for arm, runs in by_arm.items():
        answer[_name(arm)] = _of_arm(arm, runs, filters[arm.system])
    for label, arm, other in (
        ("H6 depth", Arm("one coordinate", "softmax", 4), Arm("one coordinate", "softmax", 2)),
        ("H7 moments", Arm("outliers", "moment", 2), Arm("outliers", "softmax", 2)),
    ):
        if arm in by_arm and other in by_arm:
            first, second = (student([row["relative error"] for row in by_arm[each]]) for each in (arm, other))
            difference = first.minus(second)
            answer[label] = {"verdict": _compared(difference), "difference": difference._asdict()}
    basic = [answer[_name(arm)] for arm in arms if arm.attention == "softmax" and arm.layers == 2]
    learned = sum(each["H2 errors of IMM"]["verdict"] == "learned" for each in basic)
    accurate = sum(each["H1 against imm"]["verdict"] in ("equal", "better") for each in basic)
    refuted = sum(each["H2 errors of IMM"]["verdict"] == "not learned" for each in basic)
    verdict = "inconclusive"
    if 2 * learned > len(basic) and 2 * accurate > len(basic):
        verdict = "yes"
    elif 2 * refuted > len(basic):
        verdict = "no"
    return answer | {"The transformer learns IMM": verdict}


def _name(arm: Arm) -> str:
    return f"{arm.system}, {arm.attention}, {arm.layers} layers"


def _of_arm(arm: Arm, runs: list[dict[str, Any]], filters: dict[str, Any]) -> dict[str, Any]:
    error = student([row["relative error"] for row in runs])
    answer: dict[str, Any] = {"seeds": len(runs), "relative error": error._asdict()}
    for name in FILTERS:
        difference = student([row["relative error"] - filters[name]["relative error"] for row in runs])
        answer[f"H1 against {name}"] = {"verdict": _compared(difference), "difference": difference._asdict()}
    coefficient = student([row["errors"]["imm"] for row in runs])
    verdict = "inconclusive"
    if coefficient.low > COEFFICIENT or coefficient.high < COEFFICIENT:
        verdict = "learned" if coefficient.low > COEFFICIENT else "not learned"
    answer["H2 errors of IMM"] = {"verdict": verdict, "coefficient": coefficient._asdict()}
    stream = f"stream {arm.layers}"
    answer["H3 modes in the stream"] = _decodable(runs, stream, "modes")
    against = student([_r2(row, stream, "modes") - filters["quadratic read-out"]["r2"] for row in runs])
    sign = "more" if against.low > 0 else "less" if against.high < 0 else "inconclusive"
    answer["H3 against the quadratic read-out"] = {"verdict": sign, "difference": against._asdict()}
    if arm.attention == "softmax":
        answer["H4 modes in the attention weights"] = _decodable(runs, "weights", "modes")
    spread = "dropped variance" if arm.attention == "softmax" else f"variance {arm.layers}"
    answer["H5 uncertainty"] = _decodable(runs, spread, "uncertainty")
    beyond = student([_r2(row, spread, "uncertainty") - _r2(row, stream, "uncertainty") for row in runs])
    sign = "more" if beyond.low > 0 else "less" if beyond.high < 0 else "inconclusive"
    answer["H5 against the stream"] = {"verdict": sign, "difference": beyond._asdict()}
    return answer


def _r2(row: dict[str, Any], part: str, target: str, weights: str = "read-outs") -> float:
    return row[weights][part][target]["r2"]


def _decodable(runs: list[dict[str, Any]], part: str, target: str) -> dict[str, Any]:
    value = student([_r2(row, part, target) for row in runs])
    gain = student([_r2(row, part, target) - _r2(row, part, target, "random weights") for row in runs])
    above = all(_r2(row, part, target) > row["read-outs"][part][target]["null"] for row in runs)
    verdict = "inconclusive"
    if gain.low > R2 and above:
        verdict = "supported"
    elif gain.high < R2:
        verdict = "refuted"
    return {"verdict": verdict, "R2": value._asdict(), "R2 minus random weights": gain._asdict()}


def _compared(difference: Interval) -> str:
    if difference.high < -ERROR:
        return "better"
    if difference.low > ERROR:
        return "worse"
    return "equal" if difference.low > -ERROR and difference.high < ERROR else "inconclusive"
