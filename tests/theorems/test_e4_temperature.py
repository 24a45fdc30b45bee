"""Attention at inverse temperature beta is the gradient in q of (1/beta) log Z(beta q).   [theory E4]

The paper has no temperature. Transformers have beta = 1/sqrt(d), and then ∇_q log Z(beta q) is beta times attention.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of

betas = st.sampled_from([0.01, 0.3, 1.0, 4.0])


@given(attentions(scales=(1e-3, 1.0)), betas)
def test_attention_is_the_gradient_of_the_scaled_log_normalizer(attention, beta):
    keys, query, _ = attention
    h = gz.Empirical(keys)
    gradient = torch.func.grad(lambda q: (beta * keys @ q).logsumexp(-1) / beta)(query)
    close(h.mean(beta * query), gradient, scale_of(h, beta * query))


@given(attentions(scales=(1e-3, 1.0)), betas)
def test_scaling_the_keys_gives_the_same_weights_and_a_scaled_mean(attention, beta):
    keys, query, _ = attention
    cooled = gz.pushforward(gz.Empirical(keys), beta)
    s = beta * keys @ query
    close(cooled.log_normalizer(query), s.logsumexp(-1), scale_of(cooled, query, 0))
    close(cooled.mean(query), beta * (s.softmax(-1) @ keys), scale_of(cooled, query))


@given(attentions(scales=(1e-3, 1.0)))
def test_transformers_use_one_over_the_root_of_the_dimension(attention):
    keys, query, _ = attention
    h, beta = gz.Empirical(keys), 1 / math.sqrt(keys.shape[-1])
    expected = torch.nn.functional.scaled_dot_product_attention(query[None], keys, keys)[0]
    close(h.mean(beta * query), expected, scale_of(h, beta * query))


def test_the_gradient_without_the_prefactor_is_not_attention():
    keys, query, beta = torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64), 0.5
    gradient = torch.func.grad(lambda q: gz.Empirical(keys).log_normalizer(beta * q))(query)
    attention = (beta * keys @ query).softmax(-1) @ keys
    close(gradient, beta * attention)
    assert float((gradient - attention).abs().min()) > 0.1
