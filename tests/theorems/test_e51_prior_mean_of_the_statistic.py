"""The prior exp(<xi, theta> - nu G0(theta)) expects the statistic xi/nu: E[∇G0(theta)] = xi/nu.   [theory E51]

The note on filters calls the natural parameters of the prior the expected statistics; xi is nu times too large.
The statistics of the prior are (theta, -G0(theta)): dA/dxi = E theta, dA/dnu = -E G0(theta).
"""

import pytest
import torch
from hypothesis import given

import gradlogz as gz
from support.densities import PRIORS, law
from support.measure_registry import seeds
from support.scales import close

STATEMENTS = ("E51",)


@pytest.mark.parametrize("name", PRIORS)
@given(seed=seeds)
def test_the_expected_statistic_is_xi_over_nu(name, seed):
    at = law(name, seed)
    theta, p = at.x, at.log_mass.exp()
    statistic = torch.func.grad(lambda t: at.h.base_log_normalizer(t).sum())(theta)
    expected = at.h.xi / at.h.nu
    # Where exp(-nu G0) has underflowed p is 0 and the statistic may be infinite.
    close(p @ torch.where(p.unsqueeze(-1) > 0, statistic, 0.0), expected, 1 + expected.abs().max())


@pytest.mark.parametrize("name", PRIORS)
def test_matching_moments_needs_the_expected_log_normalizer_too(name):
    # Same E[theta] for another nu: the family moves along xi by link, and E[G0] is then another number.
    at = law(name)
    h, zero = at.h, torch.zeros_like(at.eta)
    other = gz.ConjugatePrior(h.xi * 1.5, h.nu * 1.5, base=h.base)
    shifted = gz.measures.mean_to_natural(other, h.mean(zero))

    def expected_G0(xi, nu):
        log_mass = at.log_mass + (xi - h.xi) * at.x[:, 0] - (nu - h.nu) * h.base_log_normalizer(at.x)
        return float(log_mass.softmax(-1) @ h.base_log_normalizer(at.x).clamp(max=1e300))

    close(other.mean(shifted), h.mean(zero), 1 + h.mean(zero).abs().max(), tolerance=1e-8)
    assert abs(expected_G0(other.xi + shifted, other.nu) - expected_G0(h.xi, h.nu)) > 0.01
