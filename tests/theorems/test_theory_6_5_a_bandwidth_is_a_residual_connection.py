"""Keys smoothed by N(0, S): attention + S eta, so that a branch "+ sigma² eta" is a bandwidth of the keys. [theory 6.5]

With S = I/beta and eta = beta x it is x + attention(x): a residual connection in the eta family.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of

STATEMENTS = ("3.8 smoothing, 6.5",)


@given(attentions(scales=(1.0,)), st.sampled_from([0.3, 1.0, 2.0]))
def test_a_bandwidth_of_one_over_beta_is_the_residual_connection(attention, beta):
    keys, x, _ = attention
    variance = torch.full_like(x, 1 / beta)
    h = gz.convolve(gz.Empirical(keys), gz.Gaussian.diagonal(torch.zeros_like(x), variance))
    expected = x + (beta * keys @ x).softmax(-1) @ keys
    close(h.mean(beta * x), expected, scale_of(h, beta * x))
