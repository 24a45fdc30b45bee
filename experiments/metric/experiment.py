"""Runs of the metric experiment, and its decisions (plan.md).

Read next: estimation.py (task and heads), alignment.py (statistics).
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..intervals import Interval, student
from ..run_folders import environment
from ..workers import Workers
from .alignment import cosine, positive_cosine, rotation_null, traceless
from .estimation import FAMILIES, HEADS, Distributions, Family, HeadKind, Heads, Prompts, risk

PRECISION, COVARIANCE = "noise precision", "noise covariance"
QUERIES, KEYS, FISHER = "inverse covariance of the queries", "inverse covariance of the keys", "attended Fisher"
TARGETS = (PRECISION, COVARIANCE, QUERIES, KEYS, FISHER)
SUPPORTS, INTEREST, GAP = 0.9, 0.05, 0.01
CONTROL_COSINE, CONTROL_RISK = 0.99, 0.01
EVALUATION_SEED = 1 << 40  # prompts that no step of training draws
MOMENT_SIZES = {"prompts": 32, "symbols": 64, "queries": 62}  # for moments of keys and queries


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; seeds: for each distribution, by dimension."""

    seeds: dict[int, int]
    distributions: int
    steps: int
    rate: float = 0.01
    prompts: int = 8
    queries: int = 32
    symbols: int = 64
    lengths: tuple[int, ...] = (16, 64, 256)


FULL = Settings(seeds={8: 5, 32: 2}, distributions=10, steps=1000)
REDUCED = Settings(seeds={8: 2}, distributions=5, steps=800)


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train every head in every family and dimension; return the rows and the decisions.

    A cell (family, head, dimension) that is in the folder is read, so that a killed run continues.
    """
    items = {
        f"{family}-{head.replace(', ', '-').replace(' ', '_')}-{d}": (family, head, d)
        for d, family, head in product(settings.seeds, FAMILIES, HEADS)
    }
    cells = workers.rows(partial(cell_of, settings), items, settings, folder)
    return {
        "answer": decisions(cells),
        "settings": asdict(settings),
        "environment": environment(torch.device("cpu")),
        "cells": [summary(cell) for cell in cells],
    }


def cell_of(settings: Settings, item: tuple[Family, HeadKind, int]) -> dict[str, Any]:
    """Values of the runs of one cell."""
    return trained_cell(*item, settings)


def trained_cell(family: Family, head: HeadKind, d: int, settings: Settings) -> dict[str, Any]:
    """Train the heads of all distributions and seeds together; return the values of each run."""
    numbers = [number for number in range(settings.distributions) for _ in range(settings.seeds[d])]
    seeds = list(range(len(numbers)))
    distributions = Distributions.drawn(family, numbers, d)
    heads = Heads(head, distributions, seeds)
    optimizer = torch.optim.Adam(heads.parameters(), lr=settings.rate)
    sizes = {"prompts": settings.prompts, "symbols": settings.symbols, "queries": settings.queries}
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * (1 + math.cos(math.pi * step / settings.steps)) / 2
        prompts = distributions.prompts(step, **sizes)
        optimizer.zero_grad()
        # A sum over runs: each run has gradients of its own loss alone.
        risk(heads(prompts), prompts).sum().backward()
        optimizer.step()
    return {"family": family, "head": head, "d": d, "distribution": numbers, **measured(heads, settings)}


@torch.no_grad()
def measured(heads: Heads, settings: Settings) -> dict[str, Any]:
    """Alignments and risks of each run."""
    distributions, B = heads.distributions, heads.qk_matrices()
    prompts = distributions.prompts(EVALUATION_SEED, prompts=16, symbols=settings.symbols, queries=64)
    values: dict[str, Any] = {"positive cosine": positive_cosine(B).tolist()}
    for name, T in targets(distributions, heads.fisher_information(prompts)).items():
        null = rotation_null(B, T)
        values[name] = {
            "cosine": cosine(B, T).tolist(),
            "null": null.mean.tolist(),
            "null deviation": null.deviation.tolist(),
            "traceless cosine": cosine(traceless(B), traceless(T)).nan_to_num().tolist(),
        }
    values["excess risk"] = {}
    for n in settings.lengths:
        prompts = distributions.prompts(EVALUATION_SEED + n, prompts=32, symbols=n, queries=64)
        values["excess risk"][str(n)] = excess_risk(heads, prompts).tolist()
    return values


def targets(distributions: Distributions, fisher: Tensor) -> dict[str, Tensor]:
    """Matrices with which the QK matrix is compared, [r, d, d]; moments of keys and queries from many prompts."""
    R = distributions.noise.double()
    moments = _moments(distributions)
    return {
        PRECISION: torch.linalg.inv(R),
        COVARIANCE: R,
        QUERIES: torch.linalg.inv(moments[1]),
        KEYS: torch.linalg.inv(moments[0]),
        FISHER: fisher,
    }


def _moments(distributions: Distributions) -> tuple[Tensor, Tensor]:
    """Covariances of keys and queries [r, d, d]: closed forms for the Gaussian, otherwise from samples."""
    if distributions.family == "gaussian":
        S = torch.diag_embed(distributions.scale.double().square().expand_as(distributions.centre))
        return S, S + distributions.noise.double()
    parts = distributions.prompts(EVALUATION_SEED - 1, **MOMENT_SIZES)
    # Coordinates are independent: the covariances are diagonal.
    keys, queries = (t.double().flatten(1, 2).var(1) for t in (parts.symbols, parts.queries))
    return torch.diag_embed(keys), torch.diag_embed(queries)


def excess_risk(heads: Heads, prompts: Prompts) -> Tensor:
    """(Risk − Bayes risk) / (risk of the mean symbol of the prompt − Bayes risk), [r]."""
    bayes = risk(heads.distributions.bayes(prompts), prompts)
    constant = risk(prompts.symbols.mean(2, keepdim=True), prompts)
    return (risk(heads(prompts), prompts) - bayes) / (constant - bayes)


# Decisions ------------------------------------------------------------------------------------------------------------


def over_distributions(cell: dict[str, Any], values: list[float]) -> Interval:
    """Mean and 95 % CI over distributions, of means over seeds."""
    numbers = torch.tensor(cell["distribution"])
    column = torch.tensor(values, dtype=torch.float64)
    return student([float(column[numbers == number].mean()) for number in numbers.unique()])


def summary(cell: dict[str, Any]) -> dict[str, Any]:
    """Means and intervals of a cell."""
    row: dict[str, Any] = {name: cell[name] for name in ("family", "head", "d")}
    row["positive cosine"] = over_distributions(cell, cell["positive cosine"])._asdict()
    for name in TARGETS:
        row[name] = {
            quantity: over_distributions(cell, cell[name][quantity])._asdict()
            for quantity in ("cosine", "null", "traceless cosine")
        }
        row[name]["largest of the null"] = over_distributions(cell, _upper(cell[name]))._asdict()
    row["excess risk"] = {n: over_distributions(cell, values)._asdict() for n, values in cell["excess risk"].items()}
    return row


def _upper(columns: dict[str, list[float]]) -> list[float]:
    """Upper 95 % points of the rotation null."""
    return [m + 1.645 * s for m, s in zip(columns["null"], columns["null deviation"], strict=True)]


def _difference(cell: dict[str, Any], first: str, second: str) -> Interval:
    pairs = zip(cell[first]["cosine"], cell[second]["cosine"], strict=True)
    return over_distributions(cell, [a - b for a, b in pairs])


def decisions(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide every hypothesis of the plan, for each dimension."""
    by_name = {(cell["family"], cell["head"], cell["d"]): cell for cell in cells}
    answer: dict[str, Any] = {}
    for d in sorted({cell["d"] for cell in cells}):
        n = "64"
        control = by_name["gaussian", "exact", d]
        control_cosine = over_distributions(control, control[PRECISION]["cosine"])
        control_risk = over_distributions(control, control["excess risk"][n])
        passed = control_cosine.mean > CONTROL_COSINE and control_risk.mean < CONTROL_RISK
        rows: dict[str, Any] = {
            "control": {"passed": passed, "cosine": control_cosine._asdict(), "excess risk": control_risk._asdict()}
        }
        rows["H1 metric head"] = _precision_claim(by_name["gaussian", "metric", d])
        rows["H2 dot product"] = _precision_claim(by_name["gaussian", "dot product", d])
        difference = _difference(by_name["gaussian", "dot product, identity", d], QUERIES, PRECISION)
        rows["H3 inverse covariance of the queries"] = {
            "verdict": _sign(difference),
            "difference": difference._asdict(),
        }
        for family in ("bernoulli", "poisson"):
            gaussian, other = by_name["gaussian", "metric", d], by_name[family, "metric", d]
            first, second = (over_distributions(c, c["excess risk"][n]) for c in (other, gaussian))
            gap = first.minus(second)
            verdict = _sign(gap) if gap.mean > GAP or gap.high < 0 else "inconclusive"
            rows[f"H4 gap, {family}"] = {"verdict": verdict, "difference of excess risks": gap._asdict()}
        for family in FAMILIES:
            for head in HEADS[:-1]:
                difference = _difference(by_name[family, head, d], FISHER, PRECISION)
                name = f"H5 attended Fisher, {family}, {head}"
                rows[name] = {"verdict": _sign(difference), "difference": difference._asdict()}
        if not passed:
            rows = {name: row | {"verdict": "not judged"} for name, row in rows.items()}
        answer[f"d = {d}"] = rows
    return answer


def _precision_claim(cell: dict[str, Any]) -> dict[str, Any]:
    """Judge cos(B, R^-1) > 0.9."""
    value = over_distributions(cell, cell[PRECISION]["cosine"])
    null = over_distributions(cell, _upper(cell[PRECISION]))
    others = {name: _difference(cell, name, PRECISION) for name in TARGETS if name != PRECISION}
    best = max(others, key=lambda name: others[name].mean)
    if value.low > max(SUPPORTS, null.mean):
        verdict = "supported"
    elif value.high < SUPPORTS and others[best].mean > INTEREST:
        verdict = "refuted"
    else:
        verdict = "inconclusive"
    return {
        "verdict": verdict,
        "cosine": value._asdict(),
        "upper point of the rotation null": null.mean,
        "best other target": best,
        "difference of its cosine": others[best]._asdict(),
    }


def _sign(difference: Interval) -> str:
    if difference.low > 0:
        return "supported"
    return "refuted" if difference.high < 0 else "inconclusive"
