"""G*(u) = sup_eta <eta, u> - G(eta), and the dual variable of eta is the expected statistic.   [shim22, Eq. 6]

The conjugates of five families are checked against their closed forms, at random parameters.
"""

import pytest
import torch
from hypothesis import given

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close

STATEMENTS = ("Eq. 6",)


def gaussian(s):
    mu, Sigma, u = s.normal(3), s.covariance(3), s.normal(3)
    return gz.Gaussian(mu, Sigma), u, (u - mu) @ torch.linalg.solve(Sigma, u - mu) / 2


def poisson(s):
    r, u = s.positive(2), s.positive(2)
    return gz.Poisson(r), u, (u * (u / r).log() - u + r).sum()


def gamma(s):
    k, r, u = s.positive(2), s.positive(2), s.positive(2)
    return gz.Gamma(k, r), u, (r * u - k - k * (r * u / k).log()).sum()


def spins(s):
    u = s.normal(3).tanh()
    up, down = (1 + u) / 2, (1 - u) / 2
    b = s.normal(3)
    return (
        gz.Spins(b),
        u,
        (up * (up.log() - (2 * b).sigmoid().log()) + down * (down.log() - (-2 * b).sigmoid().log())).sum(),
    )


def simplex(s):
    log_p, u = s.log_simplex(4), s.log_simplex(4).exp()
    return gz.OneHot(log_p), u, (u * (u.log() - log_p)).sum()


@pytest.mark.parametrize("family", [gaussian, poisson, gamma, spins, simplex])
@given(seed=seeds)
def test_the_conjugate_has_its_closed_form(family, seed):
    h, u, expected = family(Source(seed))
    close(gz.dual(h, u).value, expected, 1 + expected.abs(), tolerance=1e-8)
