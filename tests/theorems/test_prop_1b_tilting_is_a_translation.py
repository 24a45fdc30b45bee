"""If h = p_0(. | eta1, eta2), then ∇ log ∫ exp<x, eta> h(dx) = E[x | eta1 + eta, eta2].   [shim22, Prop. 1b; theory E6]

Tilting by eta moves to another member of the same textbook family. The members, their densities and their means come
from scipy. The statement holds where eta1 + eta stays inside the natural domain of p_0.
"""

import math
from typing import NamedTuple

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from scipy import special, stats
from torch import Tensor

import gradlogz as gz
from gradlogz import Measure
from support.measure_registry import Source, inside, seeds
from support.scales import close, scale_of

STATEMENTS = ("Prop. 1b, E6",)


class Member(NamedTuple):
    """h = p_0, the parameter it is tilted by, log p_0 before and after at some points, and the mean after."""

    h: Measure
    eta: Tensor
    x: Tensor
    before: np.ndarray
    after: np.ndarray
    mean: np.ndarray


def gaussian(s):
    mu, Sigma, x = s.normal(3), s.covariance(3), s.normal(5, 3)
    eta = s.normal(3)
    before, after = (stats.multivariate_normal(m, Sigma) for m in (mu, mu + Sigma @ eta))
    return Member(gz.Gaussian(mu, Sigma), eta, x, before.logpdf(x), after.logpdf(x), after.mean)


def gamma(s):
    k, r, x = s.positive(1), s.positive(1), s.positive(5, 1)
    h = gz.Gamma(k, r)
    eta = inside(h, s.normal(1))
    before, after = (stats.gamma(k, scale=1 / rate) for rate in (r, r - eta))  # eta1 = -rate
    return Member(h, eta, x, before.logpdf(x)[:, 0], after.logpdf(x)[:, 0], after.mean())


def inverse_gaussian(s):
    m, l, x = s.positive(1), s.positive(1), s.positive(5, 1)
    h = gz.InverseGaussian(m, l)
    eta = inside(h, s.normal(1))
    eta1 = -l / (2 * m * m)
    before, after = (stats.invgauss((l / (-2 * e)).sqrt() / l, scale=l) for e in (eta1, eta1 + eta))
    return Member(h, eta, x, before.logpdf(x)[:, 0], after.logpdf(x)[:, 0], after.mean())


def poisson(s):
    r, eta, x = s.positive(1), s.normal(1), torch.arange(5.0, dtype=torch.float64).unsqueeze(-1)
    before, after = stats.poisson(r), stats.poisson((r.log() + eta).exp())
    return Member(gz.Poisson(r), eta, x, before.logpmf(x)[:, 0], after.logpmf(x)[:, 0], after.mean())


def von_mises_fisher(s):
    z, eta = s.normal(5, 4), 3 * s.normal(4)
    x, k = z / z.norm(dim=-1, keepdim=True), float(eta.norm())
    uniform = math.lgamma(2.0) - math.log(2 * math.pi**2)  # minus the log area of the sphere in R^4
    after = stats.vonmises_fisher((eta / k).numpy(), k)
    mean = special.ive(2, k) / special.ive(1, k) * (eta / k).numpy()
    return Member(gz.Sphere(4, torch.ones(()).double()), eta, x, np.full(5, uniform), after.logpdf(x.numpy()), mean)


def wishart(s):
    n, V = 4.5, s.covariance(2)
    h = gz.Wishart(torch.tensor(n, dtype=torch.float64), V)
    eta = inside(h, s.normal(3))
    a = s.normal(5, 2, 2)
    X = a @ a.mT + 0.5 * torch.eye(2, dtype=torch.float64)
    moved = np.linalg.inv(np.linalg.inv(V.numpy()) - 2 * gz.measures.smat(eta).numpy())
    before, after = (stats.wishart(n, scale) for scale in (V.numpy(), moved))
    stacked = np.moveaxis(X.numpy(), 0, -1)
    return Member(
        h,
        eta,
        gz.measures.svec(X),
        before.logpdf(stacked),
        after.logpdf(stacked),
        gz.measures.svec(torch.as_tensor(after.mean())).numpy(),
    )


def dirichlet(s):
    a = s.positive(3, low=1.0)
    h = gz.measures.from_distribution(torch.distributions.Dirichlet(a))
    eta = inside(h, s.normal(3))
    y = s.log_simplex(5, 3).exp()
    before, after = (stats.dirichlet(b.numpy()) for b in (a, a + eta))
    b = a + eta
    mean = (torch.digamma(b) - torch.digamma(b.sum())).numpy()  # E log y_i
    density = [[p.logpdf((row / row.sum()).numpy()) for row in y] for p in (before, after)]
    return Member(h, eta, y.log(), np.array(density[0]), np.array(density[1]), mean)


FAMILIES = [gaussian, gamma, inverse_gaussian, poisson, von_mises_fisher, wishart, dirichlet]


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=seeds)
def test_the_tilted_law_is_the_member_at_the_shifted_parameter(family, seed):
    h, eta, x, before, after, _ = family(Source(seed))
    size = 1 + np.abs(before).max() + np.abs(after).max()
    close(h.log_density(x, eta.expand_as(x)), torch.as_tensor(after - before), size * scale_of(h, eta, 0))


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=seeds)
def test_the_gradient_is_the_mean_of_that_member(family, seed):
    h, eta, _, _, _, mean = family(Source(seed))
    close(h.mean(eta), torch.as_tensor(mean), scale_of(h, eta))


@pytest.mark.parametrize("eta", [-30.0, -11.0, 9.0, 21.0])
def test_spins_and_coins_keep_their_digits_far_out(eta):
    at = torch.tensor([eta], dtype=torch.float64)
    spins, coin = gz.Spins(torch.zeros_like(at)), gz.Statistic(torch.zeros_like(at), family="bernoulli")
    with mpmath.workdps(40):
        log_cosh, log_sum = float(mpmath.log(mpmath.cosh(eta))), float(mpmath.log((1 + mpmath.exp(eta)) / 2))
        variance = float(mpmath.exp(eta) / (1 + mpmath.exp(eta)) ** 2)
    close(spins.log_normalizer(at), at.new_tensor(log_cosh), abs(eta))
    close(coin.log_normalizer(at), at.new_tensor(log_sum), abs(eta))
    close(coin.mean(at), at.sigmoid())
    close(coin.covariance(at), at.new_tensor([[variance]]), variance, tolerance=1e-6)  # 1 - mean has 7 digits
