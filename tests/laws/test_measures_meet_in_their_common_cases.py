"""Where two measures are one law, or one is a limit of the other, they agree.   [theory 3.4, 6, 8.4]"""

import functools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy import stats

import gradlogz as gz
from support.measure_agreement import agree
from support.measure_registry import Source, inside, magnitudes, seeds
from support.scales import close

tensor = functools.partial(torch.tensor, dtype=torch.float64)


def corners(d):
    """The 2^d corners of the cube [-1, 1]^d."""
    return torch.cartesian_prod(*(tensor([-1.0, 1.0]) for _ in range(d)))


def pairs(s):
    """Measures that are the same law, built in two ways."""
    mu, S, x = s.normal(3), s.covariance(3), s.normal(5, 3)
    log_pi, log_p, bias = s.log_simplex(5), s.log_simplex(4), s.normal(3)
    rate, df, v = s.positive(1, low=1.0), s.positive(low=1.0, high=6.0), s.positive(low=0.1, high=0.5)
    xi, nu, logit = s.positive(3, low=1.0), s.positive(), s.normal(1)
    zero, covariances = tensor([0.0, 0.0, 0.0]), s.covariance(5, 3)
    gaussians = gz.Gaussian(x, covariances)
    parts = [gz.reweight(gz.Gaussian(x[k], covariances[k]), log_pi[k]) for k in range(5)]
    angles = 2 * math.pi * torch.arange(64, dtype=torch.float64) / 64
    circle = torch.stack((angles.cos(), angles.sin()), -1)
    counts = torch.arange(200, dtype=torch.float64)
    log_pmf = torch.from_numpy(stats.poisson.logpmf(np.arange(200), float(rate)))
    return {
        "mixture of one, gaussian": (gz.Mixture(zero[:1], gz.Gaussian(mu[None], S[None])), gz.Gaussian(mu, S)),
        "mixture of points, empirical": (
            gz.Mixture(log_pi, gz.Gaussian.diagonal(x, torch.zeros_like(x))),
            gz.Empirical(x, log_pi),
        ),
        "mixture, sum of its parts": (gz.Mixture(log_pi, gaussians), gz.add(*parts)),
        "gaussian, three forms of one covariance": (
            gz.Gaussian.low_rank(mu, torch.linalg.cholesky(S), 0.3 * tensor([1.0, 1.0, 1.0])),
            gz.Gaussian(mu, S + 0.3 * torch.eye(3, dtype=torch.float64)),
        ),
        "gaussian of no spread, point": (gz.Gaussian.diagonal(mu, zero), gz.Empirical(mu[None])),
        "one hot, corners of the simplex": (gz.OneHot(log_p), gz.Empirical(torch.eye(4, dtype=torch.float64), log_p)),
        "spins, corners of the cube": (
            gz.Spins(bias),
            gz.Empirical(corners(3), corners(3) @ bias - (2 * bias.cosh()).log().sum()),
        ),
        "coin, zero and one": (
            gz.measures.from_distribution(torch.distributions.Bernoulli(logits=logit.squeeze())),
            gz.Empirical(tensor([[0.0], [1.0]]), torch.log_softmax(torch.stack((0 * logit[0], logit[0])), 0)),
        ),
        "wishart of one dimension, gamma": (
            gz.Wishart(df, v.reshape(1, 1)),
            gz.Gamma(df.reshape(1) / 2, 1 / (2 * v.reshape(1))),
        ),
        "exponential, gamma of shape one": (
            gz.measures.from_distribution(torch.distributions.Exponential(rate.squeeze())),
            gz.Gamma(tensor([1.0]), rate),
        ),
        "beta, dirichlet of two": (
            gz.measures.from_distribution(torch.distributions.Beta(xi[0], xi[1])),
            gz.measures.from_distribution(torch.distributions.Dirichlet(xi[:2])),
        ),
        "poisson, counts up to 200": (gz.Poisson(rate), gz.Empirical(counts[:, None], log_pmf)),
        "circle, 64 points on it": (
            gz.Sphere(2, tensor(1.0)),
            gz.Empirical(circle, tensor(-math.log(64)).expand(64)),
        ),
        "conjugate prior of a gaussian, gaussian": (
            gz.ConjugatePrior(xi, nu, base="gaussian"),
            gz.Gaussian.diagonal(xi / nu, tensor([1.0, 1.0, 1.0]) / nu),
        ),
        "conjugate prior of an exponential, minus gamma": (
            gz.ConjugatePrior(xi, nu, base="exponential"),
            gz.pushforward(gz.Gamma((nu + 1).expand(3), xi), -1.0),
        ),
        "product of gammas, gamma": (
            gz.product(gz.Gamma(xi[:1], rate), gz.Gamma(xi[1:], rate.expand(2))),
            gz.Gamma(xi, rate.expand(3)),
        ),
    }


@pytest.mark.parametrize("name", list(pairs(Source(0))))
@settings(max_examples=8)
@given(seed=seeds, magnitude=magnitudes)
def test_two_names_of_one_law_agree(name, seed, magnitude):
    source = Source(seed)
    one, other = pairs(source)[name]
    truncated = name.startswith(("poisson", "circle"))  # points that stand in for the law within rounding, near 0
    eta = inside(other, source.normal(4, other.dim) * (min(magnitude, 1.0) if truncated else magnitude))
    agree(one, other, inside(one, eta), source.normal(4, other.dim), support=not truncated)


@settings(max_examples=5)
@given(seed=seeds)
def test_a_mixture_of_narrow_gaussians_tends_to_its_points(seed):
    source = Source(seed)
    x, log_pi, S, eta = source.normal(5, 3), source.log_simplex(5), source.covariance(5, 3), source.normal(4, 3)
    points, reach = gz.Empirical(x, log_pi), 10 * (1 + eta.norm(dim=-1).amax()) ** 2 * S.norm() * (1 + x.norm()) ** 2
    for s in (1e-3, 1e-6, 1e-9):
        narrow = gz.Mixture(log_pi, gz.Gaussian(x, s * S))
        close(narrow.log_normalizer(eta), points.log_normalizer(eta), reach, tolerance=s)
        close(narrow.mean(eta), points.mean(eta), reach, tolerance=s)
        close(narrow.covariance(eta), points.covariance(eta), reach, tolerance=s)


@settings(max_examples=5)
@given(seed=seeds)
def test_the_nodes_of_gauss_and_hermite_are_a_gaussian(seed):
    """40 nodes per dimension integrate exp<x, eta> to rounding for |eta| of order one."""
    source = Source(seed)
    nodes, weights = (torch.from_numpy(t) for t in np.polynomial.hermite_e.hermegauss(40))
    grid = torch.cartesian_prod(nodes, nodes)
    log_w = torch.cartesian_prod(weights, weights).log().sum(-1) - math.log(2 * math.pi)
    mu, S, eta = source.normal(2), source.covariance(2), source.normal(4, 2)
    eta = eta / eta.norm(dim=-1, keepdim=True)
    keys = gz.Empirical(mu + grid @ torch.linalg.cholesky(S).mT, log_w)
    agree(keys, gz.Gaussian(mu, S), eta, source.normal(4, 2), support=False)


@pytest.mark.parametrize("k", [1e-30, 1e-8, 1e-3, 0.5, 1.0, 2.4, 2.5, 5.0, 30.0, 300.0, 1e4])
def test_the_sphere_in_three_dimensions_is_log_sinh(k):
    """G = log(sinh k / k), mean coth k - 1/k, variance 1/k² - 1/sinh² k along the query and mean/k across."""
    with mpmath.workdps(50 + 2 * abs(int(math.log10(k)))):
        K = mpmath.mpf(k)
        G, length = tensor(mpmath.log(mpmath.sinh(K) / K)), tensor(mpmath.coth(K) - 1 / K)
        along, across = tensor(1 / K**2 - 1 / mpmath.sinh(K) ** 2), length / k
    h, eta = gz.Sphere(3, tensor(1.0)), tensor([0.0, k, 0.0])
    close(h.log_normalizer(eta), G, G)
    close(h.mean(eta), length * tensor([0.0, 1.0, 0.0]), length)
    close(h.covariance(eta), torch.diag(torch.stack((across, along, across))), torch.maximum(across, along))


def test_a_gamma_of_many_small_shocks_is_a_point():
    """Gamma(n m, n) has mean m and variance m/n: its log normaliser tends to <m, eta>."""
    m, eta = tensor([0.5, 2.0]), tensor([[0.3, -1.0], [2.0, 0.1]])
    for n in (1e4, 1e8):
        h = gz.Gamma(n * m, tensor([n, n]))
        close(h.log_normalizer(eta), eta @ m, tolerance=10 / n)
        close(h.mean(eta), m.expand_as(eta), tolerance=10 / n)
        close(h.covariance(eta), torch.diag_embed((m / n).expand_as(eta)), tolerance=10 / n**2)


@pytest.mark.parametrize("x", [-300.0, -40.0, -3.0, 0.0, 3.0, 40.0, 300.0])
def test_saturated_rows_keep_their_digits(x):
    """The variance p (1 - p) of a coin at log odds x, to twelve digits of its own, under each of its names."""
    with mpmath.workdps(300):
        p = 1 / (1 + mpmath.exp(-mpmath.mpf(x)))
        variance = tensor(p * (1 - p)).reshape(1, 1)
    coin = gz.Empirical(tensor([[0.0], [1.0]]))
    close(coin.covariance(tensor([x])), variance, variance)
    close(gz.Statistic(tensor([0.0]), family="bernoulli").covariance(tensor([x])), variance, variance)
    close(gz.Spins(tensor([0.0])).covariance(tensor([x / 2])), 4 * variance, variance)
    both = variance * tensor([[1.0, -1.0], [-1.0, 1.0]])
    one_hot, eta, vector = gz.OneHot(tensor([0.5, 0.5]).log()), tensor([0.0, x]), tensor([2.0, 5.0])
    close(one_hot.covariance(eta), both, variance)
    close(one_hot.covariance_product(eta, vector), both @ vector, 3 * variance.squeeze())
