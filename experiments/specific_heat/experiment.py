"""Runs of the specific-heat experiment, and its decisions (plan.md).

Read next: ensembles.py (runs trained together), ../tasks.py (modular addition), ../training.py (the loop).
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradlogz.attention.layers.multihead import MultiheadAttention

from ..ensembles import Ensemble, Member, Observe, train_together
from ..intervals import Interval, mean_of, student
from ..parts import Activation
from ..run_folders import RunFolder, environment
from ..tasks import Batch, ModularAddition
from ..training import TrainSettings, train
from ..transformer import ModelSettings, Transformer
from ..workers import Workers
from .ensembles import PairEnsemble

ONSET, MEMORISED = 0.9, 0.99
TIME, PROMINENCE = 1.0, 0.25  # smallest effects of interest, log2
DRAWS = 10_000  # of the permutation test
PUBLISHED_ONSET = (9400, 14000)  # steps in which the test loss falls [nanda23]
PUBLISHED_MEMORY = 1400  # step at which memorisation ends [nanda23]


class Kind(NamedTuple):
    """Weight decay and share of the pairs of a kind of runs, and whether its runs are to generalise."""

    weight_decay: float
    share: float
    generalises: bool


def kinds_of(share: float, few: float) -> dict[str, Kind]:
    """The three kinds of runs; the last two are nulls."""
    return {
        "generalising": Kind(1.0, share, True),
        "no decay": Kind(0.0, share, False),
        "few pairs": Kind(1.0, few, False),
    }


KINDS = kinds_of(0.6, 0.25)


@dataclass(frozen=True)
class Settings:
    """Size of the experiment.

    Attributes:
        null_seeds: number of seeds of the two null kinds, the first ones; None for all.
        published: initial weights are those of the code of [nanda23].
        together: runs with one prime and one share of the pairs are trained together.
        tf32: a GPU rounds the factors of matrix products to 11 bits, which is several times as fast.
        small_lags: H1 can be "no lag of interest", which the plan adds for the delayed and the full form.
    """

    primes: tuple[int, ...]
    seeds: int
    steps: int
    first_seed: int = 200
    record_every: int = 20
    width: int = 32
    together: bool = False
    shares: tuple[float, float] = (0.6, 0.25)
    learning_rate: float = 0.003
    null_seeds: int | None = None
    activation: Activation = "gelu"
    published: bool = False
    tf32: bool = False
    small_lags: bool = False

    @property
    def kinds(self) -> dict[str, Kind]:
        """Kinds of runs."""
        return kinds_of(*self.shares)

    def seeds_of(self, kind: str) -> range:
        """Seeds of the runs of a kind."""
        number = self.seeds if KINDS[kind].generalises or self.null_seeds is None else self.null_seeds
        return range(self.first_seed, self.first_seed + number)


FULL = Settings(primes=(47, 53, 59, 83, 113), seeds=10, steps=6000, first_seed=400, together=True, small_lags=True)
DELAYED = Settings(
    primes=(113,), seeds=10, steps=20_000, first_seed=500, record_every=50, width=128, together=True,
    shares=(0.3, 0.15), learning_rate=0.001, null_seeds=5, activation="relu", published=True, tf32=True,
    small_lags=True,
)  # fmt: skip
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


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train all runs; return landmarks and decisions. Finished runs are read."""
    every = [(p, *name) for p in settings.primes for name in names_of(settings)]
    if settings.together:
        items = {f"prime-{p}": [item for item in every if item[0] == p] for p in settings.primes}
    else:
        items = {place(folder, *item).name: [item] for item in every}
    rows = chain.from_iterable(workers.rows(partial(rows_of, settings, folder), items, settings, folder))
    return results_of(settings, list(rows))


def names_of(settings: Settings) -> list[tuple[str, int]]:
    """Kinds and seeds of the runs with one prime."""
    return [(kind, seed) for kind in settings.kinds for seed in settings.seeds_of(kind)]


def rows_of(settings: Settings, folder: Path, items: list[tuple[int, str, int]]) -> list[dict[str, Any]]:
    """Rows of some runs, of all with one prime if runs are trained together."""
    if settings.together:
        for share in settings.shares:
            train_share(items[0][0], share, settings, folder)
    rows = []
    for p, kind, seed in items:
        curves = trained(p, kind, seed, settings, place(folder, p, kind, seed))
        rows.append({"p": p, "kind": kind, "seed": seed, **landmarks(curves)._asdict()})
    return rows


def judge(settings: Settings, folder: Path) -> dict[str, Any]:
    """Landmarks and decisions of the primes whose runs are all complete; nothing is trained."""
    rows, complete = [], []
    for p in settings.primes:
        names = names_of(settings)
        runs = {name: RunFolder(place(folder, p, *name)) for name in names if place(folder, p, *name).exists()}
        if len(runs) < len(names) or any(run.complete is None for run in runs.values()):
            continue
        complete.append(p)
        for (kind, seed), run in runs.items():
            rows.append({"p": p, "kind": kind, "seed": seed, **landmarks(run.curves)._asdict()})
    return results_of(replace(settings, primes=tuple(complete)), rows)


def results_of(settings: Settings, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Results as they are written."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    answer = decisions(rows, small_lags=settings.small_lags)
    if settings.published and rows:
        answer["published onset"] = published_onset(rows)
    return {"answer": answer, "settings": asdict(settings), "environment": environment(device), "runs": rows}


def trained(p: int, kind: str, seed: int, settings: Settings, folder: Path) -> list[dict[str, float]]:
    """Curves of one run."""
    each = member(p, kind, seed, settings, folder)
    task: Any = each.task
    return train(each.model, task, each.training, seed=seed, folder=folder, observe=heat_of(task)).curves


def member(p: int, kind: str, seed: int, settings: Settings, folder: Path) -> Member:
    """A model, its task and its training."""
    model = ModelSettings(
        vocabulary=p + 1, context=3, width=settings.width, heads=4, layers=1, hidden=4 * settings.width,
        contraction="none", objective="masked", separate=True, activation=settings.activation,
    )  # fmt: skip
    weight_decay, share, _ = settings.kinds[kind]
    training = TrainSettings(
        steps=settings.steps, learning_rate=settings.learning_rate, weight_decay=weight_decay, last_rate=1.0,
        clip=None, record_every=settings.record_every, save_every=500,
    )  # fmt: skip
    network = Transformer(model, seed=seed)
    if settings.published:
        draw_as_published(network, seed)
    return Member(network, ModularAddition(p, share, split_seed=seed), training, seed, folder)


@torch.no_grad()
def draw_as_published(model: Transformer, seed: int) -> None:
    """Draw initial weights from the distributions of the code of [nanda23]: normal, and biases 0.

    The standard deviation is 1 / sqrt(width), that of the unembedding 1 / sqrt(vocabulary).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            size = model.settings.vocabulary if name == "unembedding.weight" else model.settings.width
            nn.init.normal_(parameter, std=size**-0.5, generator=generator)


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


def train_share(
    p: int, share: float, settings: Settings, folder: Path, seconds: float = math.inf, *, all_checkpoints: bool = True
) -> bool:
    """Train all runs with one prime and one share of the pairs together; return whether they are complete."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high" if settings.tf32 and device.type == "cuda" else "highest")
    members = members_of(p, share, settings, folder)
    batches, observe = batches_of(members, device), observe_all(members, device)
    return train_together(
        members, PairEnsemble, batches, observe, device, seconds=seconds, all_checkpoints=all_checkpoints
    )


def members_of(p: int, share: float, settings: Settings, folder: Path) -> list[Member]:
    """Runs with one prime and one share of the pairs."""
    return [
        member(p, kind, seed, settings, place(folder, p, kind, seed))
        for kind, each in settings.kinds.items()
        if each.share == share
        for seed in settings.seeds_of(kind)
    ]


def batches_of(members: list[Member], device: torch.device) -> Batch:
    """The training pairs of the members, [1, s, b, 3]."""
    return Batch(*(part.unsqueeze(0) for part in stacked(members, "train", device)))


def stacked(members: list[Member], part: str, device: torch.device) -> Batch:
    """Pairs of the tasks of the members, [s, b, 3]."""
    pairs = [getattr(each.task, part) for each in members]
    return Batch(*(torch.stack(each).to(device) for each in zip(*pairs, strict=True)))


def observe_all(members: list[Member], device: torch.device) -> Observe:
    """The evaluation of `ModularAddition` and the statistics of `heat_of`, for all models of an ensemble."""
    parts = {name: stacked(members, name, device) for name in ("train", "test")}

    def observe(ensemble: Ensemble) -> dict[str, Tensor]:
        assert isinstance(ensemble, PairEnsemble)
        row = {"test_loss": ensemble.losses(parts["test"])}
        for name, batch in parts.items():
            right = ensemble.logits(batch.tokens).argmax(-1) == batch.targets[:, :, -1]
            row[f"{name}_accuracy"] = right.double().mean(1)
        logits = ensemble.attention_logits(ensemble.table())
        p = ensemble.settings.vocabulary - 1
        first, second = logits[:, :p, None].expand(-1, -1, p, -1), logits[:, None, p : 2 * p].expand(-1, p, -1, -1)
        every = torch.stack((first, second, logits[:, -1:, None].expand_as(first)), -1)  # [s, p, p, h, 3]
        weights = every.softmax(-1)
        means = (weights * every).sum(-1, keepdim=True)
        heat, entropy = (weights * (every - means) ** 2).sum(-1), -(weights * every.log_softmax(-1)).sum(-1)
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


def decisions(rows: list[dict[str, Any]], *, small_lags: bool = False) -> dict[str, Any]:
    """Decide the hypotheses of the plan; small_lags as in the settings."""
    fits = [row for row in rows if (row["onset"] is not None) == KINDS[row["kind"]].generalises]
    by_kind = {kind: [row for row in fits if row["kind"] == kind] for kind in KINDS}
    counts = {kind: f"{len(by_kind[kind])} of {sum(row['kind'] == kind for row in rows)}" for kind in KINDS}
    answer: dict[str, Any] = {"runs that are as their kind expects": counts}
    runs = by_kind["generalising"]
    if not _enough(runs):
        return answer | {"verdict": "not judged"}
    lag = over_primes(runs, lambda row: math.log2(max(row["onset"], 1) / max(row["peak"], 1)))
    answer["H1 peak before onset"] = {"verdict": _before(lag, small_lags), "lag (log2)": lag._asdict()}
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


def published_onset(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare onsets of generalising runs with the published steps, by the 95 % prediction interval of one more run."""
    runs = [row for row in rows if row["kind"] == "generalising"]
    onsets = [math.log2(row["onset"]) for row in runs if row["onset"] is not None]
    if len(onsets) < len(runs):
        return {"verdict": "not judged", "runs that generalise": len(onsets)}
    interval = student(onsets)
    arm = (interval.high - interval.mean) * math.sqrt(1 + len(onsets))  # of one more run, not of the mean
    low, middle, high = (2.0 ** (interval.mean + sign * arm) for sign in (-1, 0, 1))
    overlaps = low <= PUBLISHED_ONSET[1] and high >= PUBLISHED_ONSET[0]
    memorised = [row["memorised"] for row in runs]
    in_time = all(step is not None and step <= PUBLISHED_MEMORY for step in memorised)
    reproduced = overlaps and in_time and high <= 4 * low
    return {
        "verdict": "reproduced" if reproduced else "not reproduced",
        "onset, geometric mean": middle,
        "onset, prediction interval": [low, high],
        "last step of memorisation": max(memorised) if None not in memorised else None,
    }


def _before(lag: Interval, small_lags: bool) -> str:
    if lag.low > 0:
        return "supported"
    if lag.high < 0:
        return "refuted"
    return "no lag of interest" if small_lags and abs(lag.low) < TIME > abs(lag.high) else "inconclusive"


def _verdict(answer: dict[str, Any]) -> str:
    first = answer["H1 peak before onset"]["verdict"]
    second = [answer[name]["verdict"] for name in answer if name.startswith("H2")]
    if first in ("refuted", "no lag of interest") or "not specific" in second:
        return "no precursor"
    if first == "supported" and second and all(verdict == "supported" for verdict in second):
        return "precursor"
    return "inconclusive"
