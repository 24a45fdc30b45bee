"""Cases far from the ordinary that once went wrong: each against a value known in closed form."""

import math

import pytest
import torch

import gradlogz as gz
from support.scales import close


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1e3, 1e6, 1e8, 1e12])
def test_von_mises_fisher_draws_are_right_at_every_concentration(dtype, k):
    """Across the axis, k times the squared distance is chi-square with d - 1 degrees of freedom, for large k."""
    h, eta = gz.Sphere(3, torch.ones((), dtype=dtype)), torch.tensor([k, 0.0, 0.0], dtype=dtype)
    x = h.sample(eta, (20_000,), generator=torch.Generator().manual_seed(0)).double()
    squares = k * (x[:, 1:] ** 2).sum(-1)
    assert abs(float(squares.mean()) - 2.0) < 6 * 2.0 / 20_000**0.5 + 4 / k
    assert abs(float(squares.var()) - 4.0) < 0.5


@pytest.mark.parametrize("k", [1e-3, 0.02, 0.5])
def test_statistics_of_small_gamma_laws_are_drawn_without_underflow(k):
    p = torch.distributions.Gamma(torch.tensor(k, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
    h = gz.measures.from_distribution(p)
    zero = torch.zeros(2, dtype=torch.float64)
    draws = h.sample(zero, (20_000,), generator=torch.Generator().manual_seed(0))
    spread = h.covariance(zero).diagonal().sqrt()
    assert bool(((draws.mean(0) - h.mean(zero)).abs() < 6 * spread / 20_000**0.5).all())


def test_a_nearly_perfect_learner_gets_a_finite_weight():
    h = gz.measures.margin_measure(torch.ones(3), torch.tensor([[1.0], [1.0], [-1.0]]), torch.tensor([0.0, 0.0, 50.0]))
    close(gz.measures.boost(h, 0).weight, torch.tensor((math.log(2) + 50) / 2), 25.0)


def test_the_dual_knows_a_direction_that_hardly_has_mass():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    h, eta = gz.Empirical(points, torch.tensor([0.0, 0.0, -34.0]).double()), torch.tensor([0.3, 34.5]).double()
    close(gz.dual(h, h.mean(eta)).eta, eta, 35.0, tolerance=1e-8)


@pytest.mark.parametrize("ratio", [1e-6, 1e-18, 1e-30])
def test_the_dual_and_the_natural_gradient_know_coordinates_of_any_scale(ratio):
    variance = torch.tensor([1.0, ratio], dtype=torch.float64)
    h, eta = gz.Gaussian.diagonal(torch.zeros(2).double(), variance), torch.tensor([0.5, 100.0]).double()
    close(gz.dual(h, h.mean(eta)).eta, eta, 100.0, tolerance=1e-8)
    close(h.natural_gradient(eta), eta, 100.0, tolerance=1e-8)


def test_a_direction_is_never_called_converged_when_the_mean_is_missed():
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    h = gz.Empirical(points, torch.tensor([0.0, 0.0, -200.0]).double())
    u = h.mean(torch.tensor([0.3, 200.5]).double())
    result = gz.dual(h, u, throw=False)
    assert not bool(result.converged) or float((h.mean(result.eta) - u).norm()) < 1e-8


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_the_dual_converges_in_single_precision(scale):
    generator = torch.Generator().manual_seed(0)
    h = gz.Empirical(torch.randn(32, 8, generator=generator))
    u = h.mean(scale * torch.randn(20, 8, generator=generator))
    close(h.mean(gz.dual(h, u).eta), u, 10.0)


def test_autocast_does_not_reach_inside():
    k, q = torch.randn(50, 8), torch.randn(6, 8)
    h = gz.Empirical(k)
    with torch.autocast("cpu", torch.bfloat16):
        inside = h.log_normalizer(q), h.mean(q), h.covariance(q), h.entropy(q)
    for a, b in zip(inside, (h.log_normalizer(q), h.mean(q), h.covariance(q), h.entropy(q)), strict=True):
        assert torch.equal(a, b)


def test_sums_and_mixtures_of_points_still_have_points():
    a, b = gz.Empirical(torch.randn(4, 3).double(), torch.randn(4).double()), gz.Empirical(torch.randn(2, 3).double())
    values, eta = torch.randn(6, 2).double(), torch.randn(5, 3).double()
    logits = torch.cat((eta @ a.points.T + a.log_weights, eta @ b.points.T), -1)
    close(gz.add(a, b).expect(values, eta), torch.softmax(logits, -1) @ values)
    keys = torch.randn(2, 3, 3).double()
    log_pi = torch.tensor([0.2, 0.8], dtype=torch.float64).log()
    mixture = gz.Mixture(log_pi, gz.Empirical(keys))
    logits = (eta @ keys.mT + log_pi[:, None, None]).movedim(0, 1).reshape(5, 6)
    close(mixture.expect(values, eta), torch.softmax(logits, -1) @ values)


def test_a_temperature_can_be_learned():
    k, q = torch.randn(7, 3).double(), torch.randn(4, 3).double()
    beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(gz.pushforward(gz.Empirical(k), beta).log_normalizer(q).sum(), beta)
    close(gradient, ((torch.softmax(0.7 * q @ k.T, -1) @ k) * q).sum())
