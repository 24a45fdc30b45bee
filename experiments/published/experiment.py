"""Capacity of the Hopfield network, and linear regression in the context by linear attention (plan.md).

Read next: page.py.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradlogz.attention.linear import linear_attend
from gradlogz.dynamics import hebbian
from gradlogz.special.distributions import student_quantile

from ..intervals import Interval, student
from ..run_folders import environment
from ..tasks import generator_of
from ..training import TrainSettings
from ..workers import Workers

LOADS = (0.12, 0.13, 0.135, 0.14, 0.145, 0.15, 0.155, 0.16, 0.17, 0.18)
MORE_LOADS = {500: (0.19, 0.20, 0.21)}  # of small networks, which forget later
RETRIEVED, STARTS, SWEEPS = 0.8, 64, 40
PUBLISHED_CAPACITY, PUBLISHED_ERROR, THEORY = 0.145, 0.009, 0.138
SPECTRA = {"equal": (1.0,) * 5, "unequal": (2.0, 1.5, 1.0, 0.4, 0.1)}  # of the inputs
STARTS_OF_TRAINING = ("normal", "theorem")  # initial weights; of the second, the global minimum is proved to be reached
START_SIZE = 0.1
EXAMPLES = 20
REGRESSIONS = tuple(product(SPECTRA, STARTS_OF_TRAINING))


@dataclass(frozen=True)
class Settings:
    """Size of the experiment.

    Attributes:
        sets: numbers of sets of patterns by number of spins.
        first_seed: of sets, prompts and initial weights.
    """

    sets: tuple[tuple[int, int], ...]
    steps: dict[str, int]
    seeds: int
    prompts: int = 512
    tested: int = 100_000
    first_seed: int = 0


REDUCED = Settings(sets=((500, 8), (1000, 6), (2000, 4)), steps={"normal": 4000, "theorem": 1500}, seeds=5)
REPLICATION = replace(REDUCED, first_seed=100)


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Measure both numbers, and compare them with the published ones. Finished parts are read."""
    first = settings.first_seed
    networks = {f"{n}-spins-{seed}": (n, seed) for n, sets in settings.sets for seed in range(first, first + sets)}
    items: dict[str, tuple[int | str, ...]] = {**networks, **{f"regression-{s}-{t}": (s, t) for s, t in REGRESSIONS}}
    parts = dict(zip(items, workers.rows(partial(part, settings), items, settings, folder), strict=True))
    rows = [parts[name] for name in networks]
    regressions = {f"{s} spectrum, {t} start": parts[f"regression-{s}-{t}"] for s, t in REGRESSIONS}
    answer: dict[str, Any] = {"capacity": capacity(rows)}
    answer |= {name: compared(each, SPECTRA[name.split()[0]]) for name, each in regressions.items()}
    return {
        "answer": answer,
        "settings": asdict(settings),
        "environment": environment(torch.device("cpu")),
        "networks": rows,
        "null": shares_retrieved(500, first, stored=False),
        "regressions": regressions,
    }


def part(settings: Settings, item: tuple[Any, Any]) -> dict[str, Any]:
    """Shares of retrieved patterns of a set, or statistics of the regressions with a spectrum and a start."""
    if isinstance(item[0], str):
        return trained(SPECTRA[item[0]], item[1], settings)
    return {"spins": item[0], "seed": item[1], "shares": shares_retrieved(*item)}


# Capacity -------------------------------------------------------------------------------------------------------------


def shares_retrieved(spins: int, seed: int, *, stored: bool = True) -> list[float]:
    """Share of patterns that are retrieved, at each load; stored: the weights are those of the patterns."""
    generator = generator_of(seed, spins)
    loads = loads_of(spins)
    patterns = torch.randint(2, (round(loads[-1] * spins), spins), generator=generator).float() * 2 - 1
    others = torch.randint(2, patterns.shape, generator=generator).float() * 2 - 1
    shares = []
    for load in loads:
        number = round(load * spins)
        network = hebbian((patterns if stored else others)[:number])
        starts = patterns[: min(STARTS, number)]
        ends = network.settle(starts, max_iterations=SWEEPS, throw=False).state
        shares.append(float(((starts * ends).mean(-1) >= RETRIEVED).float().mean()))
    return shares


def loads_of(spins: int) -> tuple[float, ...]:
    """Patterns per spin of the networks of a size."""
    return LOADS + MORE_LOADS.get(spins, ())


def load_at_half(spins: int, shares: list[float]) -> float:
    """Load at which half of the patterns are retrieved, interpolated; NaN if no two loads enclose it.

    >>> load_at_half(1000, [1.0, 0.75, 0.25, *[0.0] * 7])
    0.1325
    """
    loads = loads_of(spins)
    for i in range(len(loads) - 1):
        if shares[i] >= 0.5 > shares[i + 1]:
            part = (shares[i] - 0.5) / (shares[i] - shares[i + 1])
            return round(loads[i] + part * (loads[i + 1] - loads[i]), 12)
    return math.nan


def capacity(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Intercept of the line in 1/N, compared with the published numbers."""
    points = [(1 / row["spins"], load_at_half(row["spins"], row["shares"])) for row in rows]
    if any(math.isnan(load) for _, load in points):
        return {"verdict": "not judged", "sets that do not cross one half": sum(math.isnan(load) for _, load in points)}
    interval = intercept(points)
    arm = interval.high - interval.mean
    low, high = PUBLISHED_CAPACITY - PUBLISHED_ERROR, PUBLISHED_CAPACITY + PUBLISHED_ERROR
    reproduced = interval.low <= high and interval.high >= low and arm <= PUBLISHED_ERROR
    return {
        "verdict": "reproduced" if reproduced else "not reproduced",
        "capacity": interval._asdict(),
        "contains the theory": interval.low <= THEORY <= interval.high,
        "by a line in the root of 1/N": intercept([(math.sqrt(x), y) for x, y in points])._asdict(),
    }


def intercept(points: list[tuple[float, float]]) -> Interval:
    """Intercept of the least-squares line, with Student's 95 % CI."""
    x, y = torch.tensor(points, dtype=torch.float64).unbind(1)
    design = torch.stack((torch.ones_like(x), x), 1)
    inverse = torch.linalg.inv(design.mT @ design)
    beta = inverse @ design.mT @ y
    freedom = len(points) - 2
    error = float(((y - design @ beta).square().sum() / freedom * inverse[0, 0]).sqrt())
    arm = float(student_quantile(torch.tensor(float(freedom), dtype=torch.float64))) * error
    return Interval(float(beta[0]), float(beta[0]) - arm, float(beta[0]) + arm, error, freedom, len(points))


# Linear regression ----------------------------------------------------------------------------------------------------


def drawn(spectrum: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Examples (x, y) [*shape, N, d + 1], queries (x, 0) [*shape, 1, d + 1] and the answers [*shape]."""
    d = len(spectrum)
    x = torch.randn(*shape, EXAMPLES + 1, d, generator=generator) * spectrum.sqrt()
    y = (x @ torch.randn(*shape, d, 1, generator=generator))[..., 0]
    query = torch.cat((x[..., -1:, :], torch.zeros(*shape, 1, 1)), -1)
    return torch.cat((x, y.unsqueeze(-1)), -1)[..., :-1, :], query, y[..., -1]


def predicted(key_query: Tensor, value: Tensor, examples: Tensor, query: Tensor) -> Tensor:
    """The y part of linear attention of the query to the examples and itself, [s, b]; weights are [s, d+1, d+1]."""
    tokens = torch.cat((examples, query), -2)
    result = linear_attend(
        query @ key_query.mT.unsqueeze(1), tokens, tokens @ value.mT.unsqueeze(1), feature_map="identity",
        scale=1 / EXAMPLES, statistics="none",
    )  # fmt: skip
    return result.output[..., 0, -1]


def preconditioner(spectrum: Tensor) -> Tensor:
    """Γ = (1 + 1/N) Λ + tr(Λ) / N, as its diagonal."""
    return (1 + 1 / EXAMPLES) * spectrum + spectrum.sum() / EXAMPLES


def initial_weights(start: str, seeds: int, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights [s, d+1, d+1] of keys and queries, and of values.

    "theorem": W^KQ = c Θ Θ^T in the x part and W^V = c in the y part, with |Θ Θ^T| = 1, and 0 elsewhere [zhang24].
    """
    if start == "normal":
        key_query, value = (START_SIZE * torch.randn(seeds, d + 1, d + 1, generator=generator) for _ in range(2))
        return key_query, value
    theta = torch.randn(seeds, d, d, generator=generator)
    square = theta @ theta.mT
    key_query, value = torch.zeros(2, seeds, d + 1, d + 1)
    key_query[:, :d, :d] = START_SIZE * square / square.norm(dim=(1, 2), keepdim=True)
    value[:, d, d] = START_SIZE
    return key_query, value


def trained(spectrum_of_inputs: tuple[float, ...], start: str, settings: Settings) -> dict[str, list[float]]:
    """Statistics of the plan for every seed."""
    spectrum = torch.tensor(spectrum_of_inputs)
    d, s = len(spectrum), settings.seeds
    generator = generator_of(settings.first_seed + 2 * STARTS_OF_TRAINING.index(start), d)
    key_query, value = initial_weights(start, s, d, generator)
    for weight in (key_query, value):
        weight.requires_grad_()
    training = TrainSettings(steps=settings.steps[start], learning_rate=0.01, last_rate=0.01, beta_2=0.999)
    optimizer = torch.optim.AdamW((key_query, value), weight_decay=0.0)
    for step in range(training.steps):
        examples, query, answers = drawn(spectrum, (s, settings.prompts), generator)
        loss = (predicted(key_query, value, examples, query) - answers).square().mean(1).sum()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = training.rate(step)
        optimizer.step()
    return statistics(key_query.detach(), value.detach(), spectrum, settings)


def statistics(key_query: Tensor, value: Tensor, spectrum: Tensor, settings: Settings) -> dict[str, list[float]]:
    """Error relative to that of the published prediction, slope and cosine, for every seed."""
    d, gamma = len(spectrum), preconditioner(spectrum)
    examples, query, answers = drawn(spectrum, (1, settings.tested), generator_of(settings.first_seed + 1, d))
    errors = [
        float((predicted(k.unsqueeze(0), v.unsqueeze(0), examples, query) - answers).square().mean())
        for k, v in zip(key_query, value, strict=True)
    ]
    sums = (examples[..., :-1] * examples[..., -1:]).mean(-2) / gamma  # Γ^-1 sum_i y_i x_i / N
    best = float(((query[..., 0, :-1] * sums).sum(-1) - answers).square().mean())
    maps = key_query[:, :d, :d] * value[:, -1:, -1:]
    slopes = (maps.diagonal(dim1=1, dim2=2) * gamma).mean(-1)
    wanted = torch.diag(1 / gamma).flatten()
    return {
        "error": errors,
        "published prediction": [best],
        "slope": slopes.tolist(),
        "cosine": torch.cosine_similarity(maps.flatten(1), wanted, dim=-1).tolist(),
    }


def compared(measured: dict[str, list[float]], spectrum: tuple[float, ...]) -> dict[str, Any]:
    """Compare with the published error and slope."""
    ratio = student([error / measured["published prediction"][0] for error in measured["error"]])
    slope = student(measured["slope"])
    eigenvalues = torch.tensor(spectrum)
    null = float((preconditioner(eigenvalues) / eigenvalues).mean())
    reproduced = 0.98 <= ratio.low <= ratio.high <= 1.02 and 0.95 <= slope.low <= slope.high <= 1.05 < null
    published = float(eigenvalues.sum() - (eigenvalues.square() / preconditioner(eigenvalues)).sum())
    return {
        "verdict": "reproduced" if reproduced else "not reproduced",
        "published error": published,
        "error relative to the published prediction": ratio._asdict(),
        "slope": slope._asdict(),
        "slope of the null": null,
        "cosine": student(measured["cosine"])._asdict(),
    }
