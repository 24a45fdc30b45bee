"""P(K | Q) = h(K) exp(<K, Q> - log Z(Q)), with h the COUNTING measure of the keys.   [theory E40]

Eq. 3 of the note on filters prints log G(Q) where G is already log Z, and calls h uniform.
"""

import math

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions(scales=(1e-3, 1.0)))
def test_the_exponential_of_the_log_density_is_the_softmax(attention):
    keys, query, _ = attention
    h = gz.Empirical(keys)
    Z = torch.exp(keys @ query).sum()
    close(h.log_density(keys, query.expand_as(keys)).exp(), torch.exp(keys @ query) / Z, scale_of(h, query, 0))


def test_dividing_by_the_log_normalizer_instead_does_not_give_a_probability():
    keys, query = torch.eye(3, dtype=torch.float64), torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    G = gz.Empirical(keys).log_normalizer(query)
    printed = torch.exp(keys @ query - G.log())
    assert abs(float(printed.sum()) - 1) > 3.0


def test_with_the_probability_measure_the_normalizer_is_not_the_softmax_denominator():
    keys, query = torch.eye(3, dtype=torch.float64), torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    uniform = gz.Empirical(keys, torch.full((3,), -math.log(3), dtype=torch.float64))
    denominator = torch.exp(keys @ query).sum()
    assert abs(float(uniform.log_normalizer(query).exp() - denominator)) > 5.0
    close(gz.Empirical(keys).log_normalizer(query).exp(), denominator, denominator)
