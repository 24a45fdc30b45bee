"""The published numbers themselves, statistics on known data, and decisions that can go either way."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import optimize, special, stats

from experiments.published import experiment
from experiments.published.experiment import (
    EXAMPLES,
    SPECTRA,
    Settings,
    capacity,
    compared,
    drawn,
    intercept,
    load_at_half,
    loads_of,
    preconditioner,
    shares_retrieved,
    statistics,
    trained,
)
from experiments.tasks import generator_of

SMALL = Settings(sets=(), steps={"normal": 3, "theorem": 3}, seeds=2, prompts=8, tested=20_000)


def test_the_theory_of_the_capacity_is_that_of_its_equations():
    """Replica-symmetric equations at temperature 0: alpha = (erf(y)/y - 2 exp(-y²)/sqrt(pi))² / 2 at its largest."""

    def load(y):
        return (special.erf(y) / y - 2 / math.sqrt(math.pi) * math.exp(-y * y)) ** 2 / 2

    y = optimize.minimize_scalar(lambda y: -load(y), bounds=(0.5, 3), method="bounded").x
    assert load(y) == pytest.approx(0.137905, abs=1e-6)  # [steffan94]
    assert experiment.THEORY == pytest.approx(load(y), abs=5e-4)
    assert special.erf(y) == pytest.approx(0.967, abs=5e-4)  # overlap at the capacity


def test_patterns_are_retrieved_at_a_small_load_alone(monkeypatch):
    monkeypatch.setattr(experiment, "LOADS", (0.05, 0.4))
    few, many = shares_retrieved(200, 1)
    assert few == 1.0
    assert many < 0.2
    assert shares_retrieved(200, 1, stored=False) == [0.0, 0.0]


def test_intercepts_are_those_of_scipy():
    points = [(1 / 500, 0.151), (1 / 500, 0.149), (1 / 1000, 0.146), (1 / 2000, 0.1425)]
    line = stats.linregress(*zip(*points, strict=True))
    interval = intercept(points)
    assert interval.mean == pytest.approx(line.intercept, rel=1e-9)
    arm = stats.t.ppf(0.975, 2) * line.intercept_stderr
    assert (interval.low, interval.high) == pytest.approx((line.intercept - arm, line.intercept + arm), rel=1e-6)


def row(spins, half):
    """A set whose share falls by one tenth for each .001 of the load, and is one half at a load."""
    return {"spins": spins, "shares": [min(1.0, max(0.0, 0.5 + 100 * (half - load))) for load in loads_of(spins)]}


def rows(limit, spread=0.0005):
    return [row(n, limit + 4 / n + spread * (-1) ** seed) for n in (500, 1000, 2000) for seed in range(4)]


def test_the_load_at_one_half_is_interpolated():
    assert load_at_half(500, row(500, 0.147)["shares"]) == pytest.approx(0.147)
    assert math.isnan(load_at_half(1000, [1.0] * 10))


def test_a_capacity_within_the_published_error_is_reproduced():
    answer = capacity(rows(0.1383))
    assert answer["verdict"] == "reproduced"
    assert answer["contains the theory"]
    assert capacity(rows(0.125))["verdict"] == "not reproduced"
    assert capacity(rows(0.145, spread=0.01))["verdict"] == "not reproduced"  # too uncertain
    assert capacity([*rows(0.14), row(500, 0.3)])["verdict"] == "not judged"


@pytest.mark.parametrize("name", SPECTRA)
def test_published_weights_have_the_published_error(name):
    """The theorem's weights, by the same function that judges trained ones, on prompts drawn here."""
    spectrum = torch.tensor(SPECTRA[name])
    key_query, value = torch.zeros(2, 6, 6), torch.zeros(2, 6, 6)
    for seed, map_of_x in enumerate((1 / preconditioner(spectrum), 1 / spectrum)):
        key_query[seed, :5, :5], value[seed, 5, 5] = torch.diag(map_of_x), 1.0
    measured = statistics(key_query, value, spectrum, SMALL)
    theirs = [
        compared({k: v if k == "published prediction" else [v[i]] * 2 for k, v in measured.items()}, SPECTRA[name])
        for i in (0, 1)
    ]
    assert theirs[0]["verdict"] == "reproduced"
    assert theirs[1]["verdict"] == "not reproduced"
    assert measured["slope"] == pytest.approx([1.0, theirs[0]["slope of the null"]], rel=1e-5)
    assert measured["error"][0] == pytest.approx(theirs[0]["published error"], rel=0.05)
    assert measured["error"][1] > 1.02 * measured["error"][0]


def test_published_weights_are_the_least_squares_solution():
    """E |x^T A s - y|² is quadratic in A, with x, s = sum_i y_i x_i / N and y as drawn: its minimum from moments."""
    spectrum = torch.tensor(SPECTRA["unequal"])
    examples, query, answers = drawn(spectrum, (200_000,), generator_of(3, 3))
    sums = (examples[..., :-1] * examples[..., -1:]).sum(-2) / EXAMPLES
    x = query[..., 0, :-1]
    features = x * sums  # by symmetry the minimum is diagonal
    solution = torch.linalg.lstsq(features.double(), answers.double().unsqueeze(-1)).solution[:, 0]
    torch.testing.assert_close(solution.float(), 1 / preconditioner(spectrum), rtol=0.05, atol=0.05)


def test_a_replication_has_other_prompts_and_weights_for_training_and_testing():
    first, again = (trained(SPECTRA["equal"], "normal", replace(SMALL, first_seed=seed)) for seed in (0, 100))
    assert first["published prediction"] != again["published prediction"]  # of the same weights, on other prompts
    assert not {*first["slope"]} & {*again["slope"]}


@pytest.mark.parametrize("start", experiment.STARTS_OF_TRAINING)
def test_a_short_training_is_judged(start):
    measured = trained(SPECTRA["equal"], start, SMALL)
    assert len(measured["error"]) == 2
    assert compared(measured, SPECTRA["equal"])["verdict"] == "not reproduced"
