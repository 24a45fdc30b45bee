"""Draws from P_eta have its mean and covariance, and its distribution function where scipy has one."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch.utils._pytree import tree_map

import gradlogz as gz
from support.measure_registry import NAMES, case

N = 20000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def numbers(*x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_draws_have_the_mean_and_the_covariance(name):
    h, eta, _ = case(name, queries=(2,))
    mean, covariance = h.mean(eta), h.covariance(eta)
    away = h.sample(eta, (N,), generator=generator()) - mean
    products = away.unsqueeze(-1) * away.unsqueeze(-2)
    rounding = 1e-9 * (1 + mean.abs().max() ** 2 + covariance.abs().max())  # where a coordinate does not vary
    assert bool((away.mean(0).abs() <= 6 * away.std(0) / math.sqrt(N) + rounding).all())
    assert bool(((products.mean(0) - covariance).abs() <= 6 * products.std(0) / math.sqrt(N) + rounding).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_generator_in_the_same_state_gives_the_same_draws_and_leaves_the_global_one_alone(name):
    h, eta, _ = case(name, queries=(2, 1))
    before = torch.get_rng_state()
    draws = [h.sample(eta, (4, 3), generator=generator(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert draws[0].shape == (4, 3, *eta.shape)
    assert draws[0].dtype == eta.dtype
    assert torch.equal(draws[0], draws[1])
    assert name == "empirical, one point" or not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("name", NAMES)
def test_draws_are_constants_for_automatic_differentiation(name):
    h, eta, _ = case(name)
    h = tree_map(lambda t: t.clone().requires_grad_(), h)
    assert not h.sample(eta.requires_grad_(), (2,), generator=generator()).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_draws_in_single_precision_have_the_mean(name):
    h, eta, _ = case(name, queries=(), dtype=torch.float32)
    mean = h.mean(eta)
    draws = h.sample(eta, (N,), generator=generator())
    assert draws.dtype == torch.float32
    away = draws.double() - mean.double()
    assert bool((away.mean(0).abs() <= 6 * away.std(0) / math.sqrt(N) + 1e-4 * (1 + mean.abs().max())).all())


def von_mises_fisher_cosine(d, k):
    """The distribution function of <x, eta>/|eta| on the unit sphere, by quadrature in the angle."""
    angle = np.linspace(0, math.pi, 20001)
    density = np.exp(k * (np.cos(angle) - 1)) * np.sin(angle) ** (d - 2)
    mass = integrate.cumulative_simpson(density, x=angle, initial=0)
    return lambda t: 1 - np.interp(np.arccos(np.clip(t, -1, 1)), angle, mass / mass[-1])


def cosine(h, eta):
    return lambda x: x @ eta / (eta.norm() * h.radius)


def continuous_cases():
    """name: measure, eta, which number of the draw to look at, its distribution function."""
    first, negated = (lambda x: x[..., 0]), (lambda x: -x[..., 0])
    circle, sphere, high = (gz.Sphere(d, numbers(2.0)[0]) for d in (2, 3, 30))
    along = {d: torch.ones(d, dtype=torch.float64) * 0.4 for d in (2, 3, 30)}
    two, mixture = numbers(-3.0, 1.0).unsqueeze(-1), numbers(0.3, 0.7)
    tilted = special.softmax([math.log(0.3) - 0.3 * 3 + 0.045, math.log(0.7) + 0.3 + 0.045])  # r at eta = 0.3

    def prior(base, xi, nu):
        return gz.ConjugatePrior(numbers(*xi), numbers(nu)[0], base=base)

    return {
        "gamma": (gz.Gamma(numbers(0.4), numbers(2.0)), numbers(0.5), first, stats.gamma(0.4, scale=1 / 1.5).cdf),
        "inverse gaussian": (
            gz.InverseGaussian(numbers(1.0), numbers(2.0)),
            numbers(0.75),
            first,
            stats.invgauss(1.0, scale=2.0).cdf,  # its mean is 2 there
        ),
        "gaussian": (
            gz.Gaussian(numbers(1.0), numbers(2.0).unsqueeze(0)),
            numbers(0.5),
            first,
            stats.norm(2.0, math.sqrt(2)).cdf,
        ),
        "low rank gaussian": (
            gz.Gaussian.low_rank(numbers(1.0, 0.0), numbers(1.0, 2.0).unsqueeze(-1), numbers(0.5, 0.1)),
            numbers(0.0, 0.0),
            first,
            stats.norm(1.0, math.sqrt(1.5)).cdf,
        ),
        "mixture of gaussians": (
            gz.Mixture(mixture.log(), gz.Gaussian.diagonal(two, torch.ones_like(two))),
            numbers(0.3),
            first,
            lambda x: tilted[0] * stats.norm(-2.7).cdf(x) + tilted[1] * stats.norm(1.3).cdf(x),
        ),
        "circle": (circle, along[2], cosine(circle, along[2]), von_mises_fisher_cosine(2, 2 * 0.4 * math.sqrt(2))),
        "sphere": (sphere, along[3], cosine(sphere, along[3]), von_mises_fisher_cosine(3, 2 * 0.4 * math.sqrt(3))),
        "sphere in 30 dimensions": (
            high,
            10 * along[30],
            cosine(high, 10 * along[30]),
            von_mises_fisher_cosine(30, 2 * 4 * math.sqrt(30)),
        ),
        "untilted sphere": (sphere, 0 * along[3], lambda x: x[..., 1] / 2, lambda t: (1 + np.clip(t, -1, 1)) / 2),
        "normal statistic": (
            gz.measures.from_distribution(torch.distributions.Normal(numbers(1.0)[0], numbers(2.0)[0])),
            numbers(0.5, -0.375),
            first,
            stats.norm(0.75, 1.0).cdf,  # precision 1/4 + 3/4, natural mean 1/4 + 1/2
        ),
        "gamma statistic": (
            gz.measures.from_distribution(torch.distributions.Gamma(numbers(1.0)[0], numbers(2.0)[0])),
            numbers(0.5, -1.0),
            lambda x: x[..., 1],
            stats.gamma(1.5, scale=1 / 3).cdf,
        ),
        "beta statistic": (
            gz.measures.from_distribution(torch.distributions.Beta(numbers(1.0)[0], numbers(2.0)[0])),
            numbers(0.5, -1.0),
            lambda x: x[..., 0].exp(),
            stats.beta(1.5, 1.0).cdf,
        ),
        "gaussian prior": (prior("gaussian", (1.0,), 4.0), numbers(1.0), first, stats.norm(0.5, 0.5).cdf),
        "poisson prior": (
            prior("poisson", (0.01,), 3.0),
            numbers(0.0),
            lambda x: x[..., 0] + math.log(3.0),
            stats.loggamma(0.01).cdf,  # draws of exp(theta) would underflow
        ),
        "exponential prior": (
            prior("exponential", (2.0,), 1.5),
            numbers(0.5),
            negated,
            stats.gamma(2.5, scale=0.4).cdf,
        ),
        "bernoulli prior": (
            prior("bernoulli", (1.5,), 4.0),
            numbers(0.5),
            lambda x: x[..., 0].sigmoid(),
            stats.beta(2.0, 2.0).cdf,
        ),
        "categorical prior": (
            prior("categorical", (1.5, 1.0), 5.0),
            numbers(0.5, 0.0),
            lambda x: x[..., 0].sigmoid(),
            stats.beta(2.0, 2.0).cdf,  # p_1 / (p_1 + p_0)
        ),
    }


CONTINUOUS = continuous_cases()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_draws_follow_the_distribution_function(name):
    h, eta, look, cdf = CONTINUOUS[name]
    draws = look(h.sample(eta, (N,), generator=generator())).numpy()
    assert stats.kstest(draws, cdf).pvalue > 1e-6


DISCRETE = {
    "poisson": (
        gz.Poisson(numbers(3.0)),
        numbers(0.4),
        lambda x: x[..., 0],
        stats.poisson(3.0 * math.exp(0.4)).pmf(np.arange(13)),
    ),
    "spins": (gz.Spins(numbers(0.2)), numbers(-0.7), lambda x: (x[..., 0] + 1) / 2, special.softmax([0.5, -0.5])),
    "one hot": (
        gz.OneHot(numbers(0.2, 0.5, 0.3).log()),
        numbers(1.0, 0.0, -1.0),
        lambda x: x.argmax(-1),
        special.softmax(np.log([0.2, 0.5, 0.3]) + np.array([1, 0, -1])),
    ),
    "empirical": (
        gz.Empirical(numbers(0.0, 1.0, 2.0, 3.0).unsqueeze(-1), numbers(0.0, 1.0, -torch.inf, -0.5)),
        numbers(0.3),
        lambda x: x[..., 0],
        special.softmax([0, 1.3, -np.inf, 0.4]),
    ),
    "bernoulli statistic": (
        gz.measures.from_distribution(torch.distributions.Bernoulli(logits=numbers(0.4)[0])),
        numbers(-1.0),
        lambda x: x[..., 0],
        special.softmax([0.6, 0.0]),
    ),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_draws_have_the_probabilities(name):
    h, eta, look, probabilities = DISCRETE[name]
    draws = look(h.sample(eta, (N,), generator=generator())).long().numpy()
    counts = np.bincount(draws, minlength=len(probabilities))
    assert counts[len(probabilities) :].sum() <= N * max(0.0, 1 - probabilities.sum()) * 2  # the tail left out
    counts, expected = counts[: len(probabilities)], N * probabilities
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-6


ON_THE_LINE = {
    "gamma": (gz.Gamma(numbers(2.0), numbers(3.0)), lambda eta: stats.gamma(2.0, scale=1 / (3.0 - eta))),
    "gaussian": (
        gz.Gaussian(numbers(0.3), numbers(1.5).unsqueeze(0)),
        lambda eta: stats.norm(0.3 + 1.5 * eta, math.sqrt(1.5)),
    ),
    "inverse gaussian": (
        gz.InverseGaussian(numbers(1.0), numbers(2.0)),
        lambda eta: stats.invgauss(0.5 / math.sqrt(1 - eta), scale=2.0),
    ),
    "poisson": (gz.Poisson(numbers(2.0)), lambda eta: stats.poisson(2.0 * math.exp(eta))),
}


@pytest.mark.parametrize("name", ON_THE_LINE)
def test_an_average_over_draws_and_its_gradient_are_an_expectation_and_its_derivative(name):
    h, law = ON_THE_LINE[name]
    eta = numbers(0.4).requires_grad_()
    actual = h.expect(lambda x: torch.sin(2 * x), eta, samples=N, generator=generator())
    gradient = torch.autograd.grad(actual.sum(), eta)[0]
    tilted = law(0.4)
    mean = tilted.mean()

    def moments(f):
        first, second = (tilted.expect(lambda x, j=j: f(x) ** j) for j in (1, 2))
        return first, math.sqrt((second - first**2) / N)

    expected, error = moments(lambda x: np.sin(2 * x))
    assert abs(float(actual.detach()) - expected) < 6 * error
    expected, error = moments(lambda x: (x - mean) * np.sin(2 * x))  # d/d eta E f = Cov(x, f)
    assert abs(float(gradient) - expected) < 6 * error


def test_an_average_over_draws_has_one_row_a_query_and_a_measure():
    h, eta, _ = case("gaussian, batched", queries=(3,))
    actual = h.expect(lambda x: x[..., :2] ** 2, eta, samples=N, generator=generator())
    expected = (h.mean(eta) ** 2 + h.covariance(eta).diagonal(dim1=-2, dim2=-1))[..., :2]
    assert actual.shape == (2, 2, 3, 2)
    variance = h.covariance(eta).diagonal(dim1=-2, dim2=-1)[..., :2]
    error = (2 * variance**2 + 4 * variance * h.mean(eta)[..., :2] ** 2).sqrt() / math.sqrt(N)  # of a squared normal
    assert bool(((actual - expected).abs() < 6 * error).all())


def test_an_average_over_draws_has_no_gradient_in_the_measure():
    # The score of the measure's own parameters is not known: no gradient, rather than a wrong one.
    loc = numbers(0.3).requires_grad_()
    h, eta = gz.Gaussian.diagonal(loc, numbers(1.5)), numbers(0.4).requires_grad_()
    average = h.expect(lambda x: x**2, eta, samples=10, generator=generator())
    in_loc, in_eta = torch.autograd.grad(average.sum(), (loc, eta), allow_unused=True)
    assert in_loc is None or not bool(in_loc.any())
    assert bool(in_eta.any())
