"""Runs of the specific-heat experiment, and its decisions (plan.md).

Read next: ensembles.py (runs trained together), ../tasks.py (modular addition), ../training.py (the loop).
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradlogz.attention.layers.multihead import MultiheadAttention

from ..intervals import Interval, mean_of, student
from ..run_folders import environment
from ..tasks import ModularAddition
from ..training import TrainSettings, train
from ..transformer import ModelSettings, Transformer
from .ensembles import Ensemble, Member, stacked, train_together

ONSET, MEMORISED = 0.9, 0.99
TIME, PROMINENCE = 1.0, 0.25  # smallest effects of interest, log2
DRAWS = 10_000  # of the permutation test


class Kind(NamedTuple):
    """Weight decay and share of the pairs of a kind of runs, and whether its runs are to generalise."""

    weight_decay: float
    share: float
    generalises: bool


KINDS = {
    "generalising": Kind(1.0, 0.6, True),
    "no decay": Kind(0.0, 0.6, False),
    "few pairs": Kind(1.0, 0.25, False),
}


@dataclass(frozen=True)
class Settings:
    """Size of the experiment."""

    primes: tuple[int, ...]
    seeds: int
    steps: int
    first_seed: int = 200
    record_every: int = 20
    width: int = 32
    together: bool = False

    @property
    def every_seed(self) -> range:
        """Seeds of the runs of a kind."""
        return range(self.first_seed, self.first_seed + self.seeds)


FULL = Settings(primes=(47, 53, 59, 83, 113), seeds=10, steps=6000, first_seed=400, together=True)
EXTENDED = Settings(primes=(59, 83), seeds=10, steps=800, first_seed=300, together=True)
REDUCED = Settings(primes=(59,), seeds=5, steps=800)


class Landmarks(NamedTuple):
    """Steps and sizes of one run; onset is None for a run that does not generalise."""

    peak: int
    prominence: float
    memorised: int | None
    onset: int | None
    accuracy: float

    @property
    def lag(self) -> float | None:
        """log2(onset / peak)."""
        return None if self.onset is None else math.log2(max(self.onset, 1) / max(self.peak, 1))


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train all runs; return landmarks and decisions. Finished runs are read."""
    rows = []
    for p in settings.primes:
        if settings.together:
            train_prime(p, settings, folder)
        for kind, seed in product(KINDS, settings.every_seed):
            curves = trained(p, kind, seed, settings, place(folder, p, kind, seed))
            rows.append({"p": p, "kind": kind, "seed": seed, **landmarks(curves)._asdict()})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "answer": decisions(rows),
        "settings": asdict(settings),
        "environment": environment(device),
        "runs": rows,
    }


def trained(p: int, kind: str, seed: int, settings: Settings, folder: Path) -> list[dict[str, float]]:
    """Curves of one run."""
    each = member(p, kind, seed, settings, folder)
    return train(each.model, each.task, each.training, seed=seed, folder=folder, observe=heat_of(each.task)).curves


def member(p: int, kind: str, seed: int, settings: Settings, folder: Path) -> Member:
    """A model, its task and its training."""
    model = ModelSettings(
        vocabulary=p + 1, context=3, width=settings.width, heads=4, layers=1, hidden=4 * settings.width,
        contraction="none", objective="masked", separate=True,
    )  # fmt: skip
    training = TrainSettings(
        steps=settings.steps, learning_rate=0.003, weight_decay=KINDS[kind].weight_decay, last_rate=1.0,
        clip=None, record_every=settings.record_every, save_every=500,
    )  # fmt: skip
    task = ModularAddition(p, KINDS[kind].share, split_seed=seed)
    return Member(Transformer(model, seed=seed), task, training, seed, folder)


def place(folder: Path, p: int, kind: str, seed: int) -> Path:
    """Folder of a run."""
    return folder / f"{kind.replace(' ', '_')}-{p}-{seed}"


def heat_of(task: ModularAddition) -> Callable[[Transformer], dict[str, float]]:
    """Statistics of the row of "=": mean logit variance and entropy over heads and all pairs."""
    tokens = torch.cat((task.train.tokens, task.test.tokens))

    def observe(model: Transformer) -> dict[str, float]:
        block: Any = model.blocks[0]
        layer: MultiheadAttention = block.attention.layer
        x = block.before[0](model.embed(tokens.to(model.positions.device)))
        heads = layer.attend(x, x, x)[1]
        rows: Any = {"heat": heads.logit_variance, "entropy": heads.entropy}
        return {name: float(t[..., -1].mean()) for name, t in rows.items()}

    return observe


def train_prime(p: int, settings: Settings, folder: Path) -> None:
    """Train all runs with one prime, those with equally many training pairs together."""
    for share in sorted({kind.share for kind in KINDS.values()}):
        kinds = [name for name, kind in KINDS.items() if kind.share == share]
        members = [
            member(p, kind, seed, settings, place(folder, p, kind, seed))
            for kind, seed in product(kinds, settings.every_seed)
        ]
        train_together(members, observe_all(members))


def observe_all(members: list[Member]) -> Callable[[Ensemble], dict[str, Tensor]]:
    """The evaluation of `ModularAddition` and the statistics of `heat_of`, for all models of an ensemble."""
    train, test = (stacked(part) for part in zip(*((m.task.train, m.task.test) for m in members), strict=True))

    def observe(ensemble: Ensemble) -> dict[str, Tensor]:
        row = {"test_loss": ensemble.losses(test)}
        for name, batch in (("train", train), ("test", test)):
            right = ensemble.logits(batch.tokens).argmax(-1) == batch.targets[:, :, -1]
            row[f"{name}_accuracy"] = right.float().mean(1)
        logits = ensemble.attention_logits(ensemble.embed(torch.cat((train.tokens, test.tokens), 1)))
        weights = logits.softmax(-1)
        means = (weights * logits).sum(-1, keepdim=True)
        heat, entropy = (weights * (logits - means) ** 2).sum(-1), -(weights * logits.log_softmax(-1)).sum(-1)
        return row | {"heat": heat.flatten(1).mean(1), "entropy": entropy.flatten(1).mean(1)}

    return observe


def landmarks(curves: list[dict[str, float]]) -> Landmarks:
    """Peak, prominence, memorisation and onset of a run."""
    heat = [row["heat"] for row in curves]
    smooth = [math.fsum(heat[max(0, i - 1) : i + 2]) / len(heat[max(0, i - 1) : i + 2]) for i in range(len(heat))]
    peak = max(range(len(smooth)), key=smooth.__getitem__)
    last = smooth[-max(1, len(smooth) // 10) :]
    return Landmarks(
        peak=int(curves[peak]["step"]),
        prominence=math.log2(smooth[peak] / (math.fsum(last) / len(last))),
        memorised=_first(curves, "train_accuracy", MEMORISED),
        onset=_first(curves, "test_accuracy", ONSET),
        accuracy=curves[-1]["test_accuracy"],
    )


def _first(curves: list[dict[str, float]], quantity: str, value: float) -> int | None:
    return next((int(row["step"]) for row in curves if row[quantity] >= value), None)


# Decisions ------------------------------------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the hypotheses of the plan."""
    fits = [row for row in rows if (row["onset"] is not None) == KINDS[row["kind"]].generalises]
    by_kind = {kind: [row for row in fits if row["kind"] == kind] for kind in KINDS}
    counts = {kind: f"{len(by_kind[kind])} of {sum(row['kind'] == kind for row in rows)}" for kind in KINDS}
    answer: dict[str, Any] = {"runs that are as their kind expects": counts}
    runs = by_kind["generalising"]
    if not _enough(runs):
        return answer | {"verdict": "not judged"}
    lag = over_primes(runs, lambda row: math.log2(max(row["onset"], 1) / max(row["peak"], 1)))
    answer["H1 peak before onset"] = {"verdict": _sign(lag), "lag (log2)": lag._asdict()}
    for kind in ("no decay", "few pairs"):
        if _enough(by_kind[kind]):
            answer[f"H2 specific, against {kind}"] = specificity(runs, by_kind[kind])
    if len(runs) >= 10:
        peaks, onsets = ([float(row[name]) for row in runs] for name in ("peak", "onset"))
        correlation, p_value = rank_correlation(peaks, onsets)
        verdict = "supported" if p_value < 0.05 and correlation > 0 else "inconclusive"
        answer["H3 peak predicts onset"] = {"verdict": verdict, "rank correlation": correlation, "p-value": p_value}
    return answer | {"verdict": _verdict(answer)}


def over_primes(rows: list[dict[str, Any]], measure: Callable[[dict[str, Any]], float]) -> Interval:
    """Mean over primes of the means over seeds, with its CI; a prime with one run is left out."""
    groups = [[measure(row) for row in rows if row["p"] == p] for p in sorted({row["p"] for row in rows})]
    return mean_of([student(values) for values in groups if len(values) >= 2])


def specificity(runs: list[dict[str, Any]], null_runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the peaks of generalising runs with those of runs that never generalise."""
    time, prominence = (
        over_primes(runs, measure).minus(over_primes(null_runs, measure))
        for measure in (lambda row: math.log2(max(row["peak"], 1)), lambda row: row["prominence"])
    )
    differs = any(
        (interval.low > 0 or interval.high < 0) and abs(interval.mean) > interest
        for interval, interest in ((time, TIME), (prominence, PROMINENCE))
    )
    equal = abs(time.low) < TIME > abs(time.high) and abs(prominence.low) < PROMINENCE > abs(prominence.high)
    verdict = "supported" if differs else "not specific" if equal else "inconclusive"
    return {
        "verdict": verdict,
        "difference of log2 peak": time._asdict(),
        "difference of prominence": prominence._asdict(),
    }


def _enough(rows: list[dict[str, Any]]) -> bool:
    """Return whether a prime has two runs, so that there is a CI."""
    primes = [row["p"] for row in rows]
    return any(primes.count(p) >= 2 for p in primes)


def rank_correlation(first: list[float], second: list[float]) -> tuple[float, float]:
    """Spearman's rank correlation and its two-sided p-value by permutations."""
    x, y = (_standard_ranks(values) for values in (first, second))
    observed = float(x @ y)
    generator = torch.Generator().manual_seed(0)
    orders = torch.rand(DRAWS, len(x), generator=generator).argsort(-1)
    extreme = int(((x[orders] @ y).abs() >= abs(observed) - 1e-12).sum())
    return observed, (1 + extreme) / (1 + DRAWS)


def _standard_ranks(values: list[float]) -> torch.Tensor:
    v = torch.tensor(values, dtype=torch.float64)
    ranks = (v.unsqueeze(-1) > v).double().sum(-1) + (v.unsqueeze(-1) == v).double().sum(-1) / 2  # ties: mean rank
    centred = ranks - ranks.mean()
    return centred / centred.norm().clamp(min=1e-12)


def _sign(interval: Interval) -> str:
    if interval.low > 0:
        return "supported"
    return "refuted" if interval.high < 0 else "inconclusive"


def _verdict(answer: dict[str, Any]) -> str:
    first = answer["H1 peak before onset"]["verdict"]
    second = [answer[name]["verdict"] for name in answer if name.startswith("H2")]
    if first == "refuted" or "not specific" in second:
        return "no precursor"
    if first == "supported" and second and all(verdict == "supported" for verdict in second):
        return "precursor"
    return "inconclusive"
