"""The attention weights exp<k_j, q_i> / Z(q_i) are the exponential family of the counting measure of the keys.

[shim22, Eq. 3] For self-attention the queries are the keys themselves (Eq. 5 of the companion note).
"""

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions(scales=(1e-3, 1.0)))
def test_weights_are_exponentials_over_their_sum(attention):
    keys, query, _ = attention
    numerator = (keys @ query).exp()
    h = gz.Empirical(keys)
    close(h.probabilities(query), numerator / numerator.sum(), scale_of(h, query, 0))


@given(attentions())
def test_weights_are_the_density_of_the_counting_measure_at_the_keys(attention):
    keys, query, _ = attention
    h = gz.Empirical(keys)
    density = h.log_density(keys, query.expand_as(keys)).exp()
    close(density, (keys @ query).softmax(-1), scale_of(h, query, 0))


@given(attentions(scales=(0.1, 1.0)))
def test_in_self_attention_tokens_are_keys_and_natural_parameters(attention):
    tokens, _, _ = attention
    h = gz.Empirical(tokens)
    similarity = torch.stack([torch.stack([(x * y).sum() for y in tokens]) for x in tokens]).exp()
    close(h.probabilities(tokens), similarity / similarity.sum(-1, keepdim=True), scale_of(h, tokens, 0))


@given(attentions())
def test_the_log_odds_of_two_keys_are_linear_in_the_query(attention):
    keys, query, _ = attention
    h = gz.Empirical(keys)
    log_p = h.log_density(keys, query.expand_as(keys))
    close(log_p - log_p[:1], (keys - keys[:1]) @ query, scale_of(h, query, 0))
