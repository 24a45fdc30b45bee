"""Log normalisers, tilted moments and log densities agree with scipy.   [shim22, Prop. 1b, Cor. 1; theory 3.4]

Z(eta) = ∫ exp(eta x) h(dx) by quadrature or summation against scipy's density of h; the tilted law under its own name.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

import gradlogz as gz
from support.measure_registry import Source


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


# name: the measure on the line, scipy's law of it, and scipy's law of the tilt by eta.
ON_THE_LINE = {
    "gamma": (
        gz.Gamma(column(2.3), column(1.7)),
        stats.gamma(2.3, scale=1 / 1.7),
        lambda eta: stats.gamma(2.3, scale=1 / (1.7 - eta)),
    ),
    "inverse gaussian": (
        gz.InverseGaussian(column(0.8), column(1.9)),
        stats.invgauss(0.8 / 1.9, scale=1.9),
        lambda eta: stats.invgauss(0.8 / math.sqrt(1 - 2 * 0.64 * eta / 1.9) / 1.9, scale=1.9),
    ),
    "gaussian": (
        gz.Gaussian(column(-0.4), column(2.1).reshape(1, 1)),
        stats.norm(-0.4, math.sqrt(2.1)),
        lambda eta: stats.norm(-0.4 + 2.1 * eta, math.sqrt(2.1)),
    ),
    "poisson": (gz.Poisson(column(3.1)), stats.poisson(3.1), lambda eta: stats.poisson(3.1 * math.exp(eta))),
}
TILTS = [-2.0, -0.3, 0.0, 0.5, 1.2]
lines = pytest.mark.parametrize("name", ON_THE_LINE)
tilts = pytest.mark.parametrize("eta", TILTS)


def integral(law, f):
    """∫ f(x) law(dx): a sum over counts, or quadrature in pieces that the peak of the integrand cannot hide in."""
    if hasattr(law, "pmf"):
        x = np.arange(400.0)
        return math.fsum(f(x) * law.pmf(x))
    low, high = law.support()
    ends = [max(low, -60.0), -8.0, -2.0, 0.3, 1.0, 3.0, 8.0, 25.0, min(high, 400.0)]
    ends = [e for e in ends if low <= e] if low == -math.inf else [0.0, *(e for e in ends if e > 0)]
    return math.fsum(
        integrate.quad(lambda x: f(x) * law.pdf(x), a, b, epsabs=1e-14, epsrel=1e-13, limit=200)[0]
        for a, b in itertools.pairwise(ends)
    )


@lines
@tilts
def test_the_log_normalizer_is_the_logarithm_of_the_laplace_transform(name, eta):
    h, law, _ = ON_THE_LINE[name]
    Z = integral(law, lambda x: np.exp(eta * x))
    assert float(h.log_normalizer(column(eta))) == pytest.approx(math.log(Z), rel=1e-12, abs=1e-12)


@lines
@tilts
def test_mean_and_covariance_are_the_moments_of_the_tilted_law(name, eta):
    h, law, tilted = ON_THE_LINE[name]
    mean, variance = (float(x) for x in tilted(eta).stats("mv"))
    assert float(h.mean(column(eta))) == pytest.approx(mean, rel=1e-12)
    assert float(h.covariance(column(eta))) == pytest.approx(variance, rel=1e-12)
    Z, first, second = (integral(law, lambda x, j=j: x**j * np.exp(eta * x)) for j in range(3))
    assert float(h.mean(column(eta))) == pytest.approx(first / Z, rel=1e-12)
    # The variance as a difference of moments costs the digits of their ratio.
    assert float(h.covariance(column(eta))) == pytest.approx(second / Z - (first / Z) ** 2, abs=1e-12 * second / Z)


@lines
@tilts
def test_the_log_density_is_the_ratio_of_the_tilted_law_to_the_law(name, eta):
    h, law, tilted = ON_THE_LINE[name]
    discrete = hasattr(law, "pmf")
    x = np.array([1.0, 2.0, 5.0]) if discrete else np.array([0.2, 1.0, 3.7])
    log = (lambda p: p.logpmf(x)) if discrete else (lambda p: p.logpdf(x))
    actual = h.log_density(torch.from_numpy(x).unsqueeze(-1), column(eta).expand(3, 1))
    np.testing.assert_allclose(actual, log(tilted(eta)) - log(law), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("structure", ["dense", "diagonal", "low rank"])
def test_a_gaussian_in_several_dimensions(structure):
    s = Source(3)
    mu, Sigma, diagonal, factor = s.normal(4), s.covariance(4), s.positive(4), s.normal(4, 2)
    h, Sigma = {
        "dense": (gz.Gaussian(mu, Sigma), Sigma),
        "diagonal": (gz.Gaussian.diagonal(mu, diagonal), diagonal.diag()),
        "low rank": (gz.Gaussian.low_rank(mu, factor, diagonal), factor @ factor.mT + diagonal.diag()),
    }[structure]
    eta, x = s.normal(4), s.normal(5, 4)
    law = stats.multivariate_normal(mu.numpy(), Sigma.numpy())
    tilted = stats.multivariate_normal((mu + Sigma @ eta).numpy(), Sigma.numpy())
    np.testing.assert_allclose(
        h.log_density(x, eta.expand(5, 4)), tilted.logpdf(x.numpy()) - law.logpdf(x.numpy()), rtol=0, atol=1e-11
    )
    np.testing.assert_allclose(h.mean(eta), tilted.mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(h.covariance(eta), tilted.cov, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kappa", [0.1, 2.0, 30.0])
def test_the_circle_tilts_to_the_von_mises_law(kappa):
    h, law = gz.Sphere(2, column(1.0)[0]), stats.vonmises(kappa, loc=0.7)
    eta = kappa * column(math.cos(0.7), math.sin(0.7))
    angle = np.array([-1.0, 0.5, 2.0])
    x = torch.from_numpy(np.stack((np.cos(angle), np.sin(angle)), -1))
    uniform = -math.log(2 * math.pi)
    np.testing.assert_allclose(h.log_density(x, eta.expand(3, 2)), law.logpdf(angle) - uniform, rtol=0, atol=1e-12 * 60)
    moment = special.ive(1, kappa) / special.ive(0, kappa)
    np.testing.assert_allclose(h.mean(eta), moment * eta / kappa, rtol=1e-12)


@pytest.mark.parametrize("kappa", [0.1, 2.0, 30.0])
@pytest.mark.parametrize("d", [3, 6])
def test_the_sphere_tilts_to_the_von_mises_fisher_law(d, kappa):
    s = Source(d)
    axis, x = (torch.nn.functional.normalize(t, dim=-1) for t in (s.normal(d), s.normal(5, d)))
    h, radius = gz.Sphere(d, column(2.5)[0]), 2.5
    eta = kappa * axis / radius  # k = radius |eta|
    law = stats.vonmises_fisher(axis.numpy(), kappa)
    area = math.log(2) + d / 2 * math.log(math.pi) - special.gammaln(d / 2)
    expected = law.logpdf(x.numpy()) + area
    np.testing.assert_allclose(h.log_density(radius * x, eta.expand(5, d)), expected, rtol=0, atol=1e-12 * (1 + kappa))


@pytest.mark.parametrize("d", [2, 3, 7])
def test_the_log_normalizer_of_the_sphere_is_the_laplace_transform_of_one_coordinate(d):
    # One coordinate of a uniform point has t = cos(angle), density sin(angle)^(d-2) of the angle.
    mass = integrate.quad(lambda a: math.sin(a) ** (d - 2), 0, math.pi, epsrel=1e-13)[0]
    for k in (0.5, 3.0, 20.0):
        Z = integrate.quad(lambda a, k=k: math.exp(k * math.cos(a)) * math.sin(a) ** (d - 2), 0, math.pi, epsrel=1e-13)
        eta = k * torch.eye(d, dtype=torch.float64)[0]
        actual = float(gz.Sphere(d, column(1.0)[0]).log_normalizer(eta))
        assert actual == pytest.approx(math.log(Z[0] / mass), rel=1e-12)


def test_the_wishart_measure_tilts_to_wishart_laws():
    s = Source(5)
    df, V = column(5.5)[0], s.covariance(3)
    h, T = gz.Wishart(df, V), -s.covariance(3) / 2
    eta, x = gz.measures.svec(T), s.covariance(4, 3)
    S = np.linalg.inv(np.linalg.inv(V.numpy()) - 2 * T.numpy())
    law, tilted = stats.wishart(5.5, V.numpy()), stats.wishart(5.5, (S + S.T) / 2)
    expected = [tilted.logpdf(m) - law.logpdf(m) for m in x.numpy()]
    np.testing.assert_allclose(h.log_density(gz.measures.svec(x), eta.expand(4, 6)), expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(
        gz.measures.smat(h.mean(eta)), tilted.mean(), rtol=0, atol=1e-12 * np.abs(tilted.mean()).max()
    )
    sign, logdet = np.linalg.slogdet(np.eye(3) - 2 * V.numpy() @ T.numpy())
    assert sign == 1
    assert float(h.log_normalizer(eta)) == pytest.approx(-5.5 / 2 * logdet, rel=1e-12)
    off_diagonal = gz.measures.svec(1 - torch.eye(3, dtype=torch.float64)) > 0  # svec scales those by sqrt 2
    entries = torch.from_numpy(tilted.var())[*torch.triu_indices(3, 3)]
    np.testing.assert_allclose(h.covariance(eta).diagonal(), entries * (1 + off_diagonal.double()), rtol=1e-11)


def test_spins_and_one_hot_vectors_are_bernoulli_and_multinomial_laws():
    h, eta = gz.Spins(column(0.3)), column(-0.9)
    p, q = special.expit(2 * 0.3), special.expit(2 * (0.3 - 0.9))
    assert float(h.mean(eta)) == pytest.approx(2 * q - 1, rel=1e-12)
    assert float(h.covariance(eta)) == pytest.approx(4 * stats.bernoulli(q).var(), rel=1e-12)
    ratio = stats.bernoulli(q).logpmf(1) - stats.bernoulli(p).logpmf(1)
    assert float(h.log_density(column(1.0), eta)) == pytest.approx(ratio, rel=1e-12)
    log_p, eta = Source(6).log_simplex(4), Source(7).normal(4)
    law = stats.multinomial(1, special.softmax((log_p + eta).numpy()))
    np.testing.assert_allclose(gz.OneHot(log_p).mean(eta), law.mean(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(gz.OneHot(log_p).covariance(eta), law.cov(), rtol=0, atol=1e-12)
