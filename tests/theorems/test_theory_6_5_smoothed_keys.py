"""Keys smoothed by N(0, S): attention + S eta, so that a branch "+ sigma² eta" is a bandwidth of the keys. [theory 6.5]

With S = I/beta and eta = beta x it is x + attention(x): a residual connection in the eta family.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions(scales=(1.0,)))
def test_a_kernel_density_of_keys_adds_s_eta_to_attention(attention):
    keys, eta, s = attention
    n, S = len(keys), s.covariance(len(eta))
    uniform = torch.full((n,), -math.log(n), dtype=torch.float64)
    p = (keys @ eta).softmax(-1)
    expected = p @ keys + S @ eta
    convolved = gz.convolve(gz.Empirical(keys, uniform), gz.Gaussian(torch.zeros_like(eta), S))
    mixture = gz.Mixture(uniform, gz.Gaussian(keys, S.expand(n, -1, -1)))
    for h in (convolved, mixture):
        close(h.mean(eta), expected, scale_of(h, eta))
        close(h.log_normalizer(eta), (keys @ eta).logsumexp(-1) - math.log(n) + eta @ S @ eta / 2, scale_of(h, eta, 0))
        away = keys - p @ keys
        close(h.covariance(eta), away.mT @ (p.unsqueeze(-1) * away) + S, scale_of(h, eta, 2))


@given(attentions(scales=(1.0,)), st.sampled_from([0.3, 1.0, 2.0]))
def test_a_bandwidth_of_one_over_beta_is_the_residual_connection(attention, beta):
    keys, x, _ = attention
    variance = torch.full_like(x, 1 / beta)
    h = gz.convolve(gz.Empirical(keys), gz.Gaussian.diagonal(torch.zeros_like(x), variance))
    expected = x + (beta * keys @ x).softmax(-1) @ keys
    close(h.mean(beta * x), expected, scale_of(h, beta * x))


def test_with_another_bandwidth_it_is_not():
    keys, x, beta = torch.eye(2), torch.tensor([1.0, -1.0]), 2.0
    h = gz.convolve(gz.Empirical(keys), gz.Gaussian.diagonal(torch.zeros(2), torch.ones(2)))
    assert float((h.mean(beta * x) - x - (beta * keys @ x).softmax(-1) @ keys).norm()) > 1.0
