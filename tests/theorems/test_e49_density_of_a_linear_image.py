"""For an invertible W the density of W X is p'(x') = p(W⁻¹x')/|det W|, and its parameter W^-T eta.   [theory E49]

Eq. 9 of the note on filters divides P(X) by |W| at the wrong point.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("N2 Eq. 9, E49",)


@given(seeds, st.integers(1, 3))
def test_an_invertible_matrix_gives_the_density_of_the_change_of_variables(seed, d):
    s = Source(seed)
    mu, Sigma, W, x, eta = (
        s.normal(d),
        s.covariance(d),
        s.normal(d, d) + 2 * torch.eye(d).double(),
        s.normal(d),
        s.normal(d),
    )
    p0 = torch.distributions.MultivariateNormal(mu, Sigma)
    member = torch.distributions.MultivariateNormal(mu + Sigma @ eta, Sigma)
    back, log_volume = torch.linalg.solve(W, x), torch.linalg.slogdet(W).logabsdet
    # dP'/dh' = exp(<x', W^-T eta> - G'(W^-T eta)), and h' has the density p0(W⁻¹x')/|det W|.
    h, dual_eta = gz.pushforward(gz.Gaussian(mu, Sigma), W), torch.linalg.solve(W.mT, eta)
    log_density = h.log_density(x, dual_eta) + p0.log_prob(back) - log_volume
    expected = member.log_prob(back) - log_volume
    size = torch.linalg.cond(W) * torch.linalg.cond(Sigma) * (1 + expected.abs() + p0.log_prob(back).abs())
    close(log_density, expected, size * scale_of(h, dual_eta, 0))
