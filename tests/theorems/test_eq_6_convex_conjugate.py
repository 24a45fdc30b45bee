"""G*(u) = sup_eta <eta, u> - G(eta), and the dual variable of eta is the expected statistic.   [shim22, Eq. 6]

The conjugate is checked against closed forms, against a general optimiser, and against the supremum itself.
"""

import pytest
import torch
from hypothesis import given
from scipy.optimize import minimize

import gradlogz as gz
from support.attention_strategies import attentions
from support.densities import LAWS, law
from support.measure_registry import Source, seeds
from support.scales import close


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


@given(attentions(min_keys=2, scales=(1.0,)))
def test_the_conjugate_is_what_an_optimiser_finds(attention):
    keys, _, s = attention
    u = s.log_simplex(len(keys)).exp() @ keys

    def loss(eta):
        s_ = keys @ torch.from_numpy(eta)
        return float(s_.logsumexp(-1) - u @ torch.from_numpy(eta)), (s_.softmax(-1) @ keys - u).numpy()

    found = minimize(loss, torch.zeros_like(u).numpy(), jac=True, method="BFGS", options={"gtol": 1e-7})
    value = gz.dual(gz.Empirical(keys), u).value
    # An optimiser only ever finds less than the supremum, by about gradient²/curvature.
    close(value, torch.tensor(-found.fun, dtype=torch.float64), 1 + value.abs(), tolerance=1e-8)


@pytest.mark.parametrize("name", LAWS)
def test_no_other_parameter_does_better_and_the_mean_is_dual_to_its_own(name):
    at = law(name)
    h, x, log_mass, eta = at
    u = (log_mass + x @ eta).softmax(-1) @ x
    found = gz.dual(h, u)
    attained = eta @ u - (log_mass + x @ eta).logsumexp(-1)
    close(found.value, attained, at.scale(0), tolerance=1e-8)
    for other in (0.5 * eta, 0.9 * eta, 0.0 * eta):
        assert float(other @ u - (log_mass + x @ other).logsumexp(-1)) <= float(found.value) + 1e-8


def test_it_is_infinite_outside_the_hull_of_the_keys():
    h = gz.Empirical(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    assert gz.dual(h, torch.tensor([0.9, 0.9])).value == torch.inf
