"""Scores of innovations are standard normal for observations of the model, and the NIS of one mode is their square."""

import math

import pytest
import torch
from scipy import integrate, stats

from gradlogz.filters import (
    KalmanModel,
    Prior,
    SwitchingModel,
    imm,
    innovation_scores,
    normalized_innovation,
)
from support.scales import close

MODES = ((0.01, 1.0), (1.0, 25.0), (4.0, 900.0))


def model_of(count: int) -> SwitchingModel:
    """A random walk in the plane whose modes have noises of very different size."""
    turn = torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    modes = [KalmanModel(eye, q * eye, eye, r * turn) for q, r in MODES[:count]]
    return SwitchingModel.of(modes, transition=torch.full((count, count), 1 / count, dtype=torch.float64))


def drawn(count: int, targets: int, steps: int) -> torch.Tensor:
    """Observations of the model, by its definition."""
    generator = torch.Generator().manual_seed(count)
    model = model_of(count)
    mode = torch.randint(count, (targets, steps), generator=generator)
    noise = torch.randn(2, targets, steps, 2, generator=generator, dtype=torch.float64)
    state = (model.Q[mode].diagonal(dim1=-2, dim2=-1).sqrt() * noise[0]).cumsum(1)
    return state + (torch.linalg.cholesky(model.R)[mode] @ noise[1].unsqueeze(-1)).squeeze(-1)


def filtered_of(count: int, y: torch.Tensor):
    return imm(model_of(count), y, Prior(torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)))


def test_the_squared_scores_of_one_mode_are_its_nis():
    y = drawn(1, 50, 6)
    y[3, 2, 0] = y[4, 1, 1] = y[5, 3] = math.nan
    y[6, 2] = 1e4  # a tail probability far below the smallest number
    filtered = filtered_of(1, y)
    expected, scored = (normalized_innovation(filtered, mixture=mixture) for mixture in (False, True))
    assert bool((expected.value.isnan() == scored.value.isnan()).all())
    assert bool((expected.degrees == scored.degrees).all())
    assert bool((expected.high.nan_to_num() == scored.high.nan_to_num()).all())
    ordinary = expected.value.nan_to_num()
    assert float(ordinary.max()) > 1e7
    close(scored.value.nan_to_num() / (1 + ordinary), ordinary / (1 + ordinary), scale=10.0)


def test_scores_of_one_step_are_those_of_numerical_integration():
    y = torch.tensor([[[3.0, -7.0]]], dtype=torch.float64)
    filtered = filtered_of(3, y)
    S = [(q * torch.eye(2, dtype=torch.float64) + r * model_of(1).R[0]).numpy() for q, r in MODES]
    first = sum(stats.norm.cdf(3.0, scale=s[0, 0] ** 0.5) for s in S) / 3
    second = sum(stats.norm.cdf(-7.0, scale=s[1, 1] ** 0.5) for s in S) / 3

    def density(b: float) -> float:
        return sum(stats.multivariate_normal.pdf([3.0, b], cov=s) for s in S)

    below, total = (
        integrate.quad(density, -400, end, points=[-50, 0], limit=400, epsabs=0, epsrel=1e-11)[0]
        for end in (-7.0, 400.0)
    )
    joint = innovation_scores(filtered)[0, 0].tolist()
    alone = innovation_scores(filtered, joint=False)[0, 0].tolist()
    assert joint[0] == alone[0] == pytest.approx(stats.norm.ppf(first), abs=1e-12)
    assert alone[1] == pytest.approx(stats.norm.ppf(second), abs=1e-12)
    assert joint[1] == pytest.approx(stats.norm.ppf(below / total), abs=1e-9)


def test_the_band_contains_95_percent_of_the_scores_where_that_of_the_moments_does_not():
    filtered = filtered_of(3, drawn(3, 4000, 1))  # imm is exact for one step
    scores = innovation_scores(filtered).flatten()
    assert stats.kstest(scores.numpy(), "norm").pvalue > 1e-3
    inside = normalized_innovation(filtered, mixture=True).holds.double().mean()
    assert abs(float(inside) - 0.95) < 4 * (0.95 * 0.05 / 4000) ** 0.5
    assert float(normalized_innovation(filtered).holds.double().mean()) < 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_far_observations_have_finite_scores(dtype):
    """Tail probabilities of 5 to 1000 standard deviations, many of which underflow; for one mode they are known."""
    one = torch.ones(1, 1, 1, dtype=dtype)
    model = SwitchingModel(transition=one[0], F=one, Q=0 * one, H=one, R=one)
    y = torch.tensor([5.0, -13.0, 14.0, -20.0, 37.0, -38.0, 50.0, 1000.0], dtype=dtype)
    filtered = imm(model, y[:, None, None], Prior(torch.zeros(1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)))
    close(innovation_scores(filtered).flatten(), y)
