"""If X has the family (h, eta), then W X has the measure W_# h, the parameter W^-T eta and G'(s) = G(W^T s).

[theory E49] For any W, singular and rectangular too, log E exp<W X, s> = G(eta + W^T s) - G(eta) and E[W X] = W E[X].
Eq. 9 of the note on filters divides P(X) by |W| at the wrong point: p'(x') = p(W⁻¹x')/|det W|.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.measure_registry import Source, seeds
from support.scales import close, scale_of


@given(attentions(scales=(1.0,)), st.integers(1, 4))
def test_any_matrix_moves_points_and_keeps_their_weights(attention, e):
    keys, _, s = attention
    W, b, eta = s.normal(e, keys.shape[-1]), s.normal(e), s.normal(e)
    h, moved = gz.pushforward(gz.Empirical(keys), W, b), keys @ W.mT + b
    p = (moved @ eta).softmax(-1)
    close(h.log_normalizer(eta), (moved @ eta).logsumexp(-1), scale_of(h, eta, 0) * (1 + b.norm()))
    close(h.mean(eta), p @ moved, scale_of(h, eta) * (1 + b.norm()))
    away = moved - p @ moved
    close(h.covariance(eta), away.mT @ (p.unsqueeze(-1) * away), scale_of(h, eta, 2) * (1 + b.norm()))


@given(attentions(scales=(1.0,)), st.integers(1, 4))
def test_cumulants_of_the_image_of_a_tilted_law(attention, e):
    keys, eta, s = attention
    W, direction = s.normal(e, keys.shape[-1]), s.normal(e)
    p = (keys @ eta).softmax(-1)
    expected = (p * torch.exp(keys @ W.mT @ direction)).sum().log()
    image = gz.pushforward(gz.tilt(gz.Empirical(keys), eta), W)
    close(image.log_normalizer(direction), expected, scale_of(gz.Empirical(keys), eta + direction @ W, 0))
    close(image.mean(torch.zeros_like(direction)), W @ (p @ keys), scale_of(image, direction) * (1 + eta.norm()))


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


def test_the_printed_density_is_taken_at_the_wrong_point_and_has_the_wrong_mass():
    W, step = 2.0, 1 / 8
    x = torch.arange(-30, 30, step, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    assert abs(float((density / W).sum() * step) - 0.5) < 1e-9  # P(x')/|W|
    h = gz.pushforward(gz.Gaussian(torch.zeros(1).double(), torch.ones(1, 1).double()), W)
    right = torch.exp(-((x / W) ** 2) / 2) / math.sqrt(2 * math.pi) / W
    close(
        (right * torch.exp(0.3 * x)).sum() * step, h.log_normalizer(torch.tensor([0.3], dtype=torch.float64)).exp(), 2.0
    )
