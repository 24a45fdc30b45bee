"""The Helmholtz free energy is -(1/beta) log Z = <E> - S/beta.   [theory E20]

The paper (2.4) calls log Z itself the free energy. The energy of a key is minus its logit, E_n = -<x_n, q>.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions(scales=(1e-3, 1.0)), st.sampled_from([0.2, 1.0, 3.0]))
def test_free_energy_is_energy_minus_temperature_times_entropy(attention, beta):
    keys, query, _ = attention
    h, energy = gz.Empirical(keys), -keys @ query
    boltzmann = torch.exp(-beta * energy) / torch.exp(-beta * energy).sum()
    entropy = -torch.xlogy(boltzmann, boltzmann).sum()
    helmholtz = -h.log_normalizer(beta * query) / beta
    close(helmholtz, boltzmann @ energy - entropy / beta, scale_of(h, beta * query, 0) / beta)
    close(h.entropy(beta * query), entropy, scale_of(h, beta * query, 0))


@given(attentions(scales=(1e-3, 1.0)))
def test_no_other_law_has_less_of_it(attention):
    keys, query, s = attention
    h, energy = gz.Empirical(keys), -keys @ query
    other = s.log_simplex(len(keys))
    assert float(other.exp() @ (energy + other)) >= float(-h.log_normalizer(query) - 1e-12 * scale_of(h, query, 0))


def test_the_log_normalizer_itself_is_another_number():
    keys, query, beta = torch.eye(3), torch.ones(3), 2.0
    G = float(gz.Empirical(keys).log_normalizer(beta * query))
    assert abs(G - -G / beta) > 3.0
