"""Attention returns a convex combination of its values; of its keys only where the values are the keys.   [theory E14]

The paper says "of the keys" (3.3). In general the output lies in W_O conv(values).
"""

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions())
def test_with_values_equal_to_keys_no_direction_separates_the_output_from_the_keys(attention):
    keys, query, s = attention
    h = gz.Empirical(keys)
    directions = s.normal(20, len(query))
    slack = 1e-12 * scale_of(h, query) * directions.norm(dim=-1)
    assert bool((directions @ h.mean(query) <= (directions @ keys.mT).amax(-1) + slack).all())


@given(attentions())
def test_in_general_it_is_a_convex_combination_of_projected_values(attention):
    keys, query, s = attention
    values, W = s.normal(len(keys), 3), s.normal(2, 3)
    weights = (keys @ query).softmax(-1)
    h = gz.Empirical(keys)
    close(
        h.expect(values @ W.mT, query), (weights @ values) @ W.mT, scale_of(h, query, 0) * (values @ W.mT).abs().max()
    )
    assert float(weights.min()) >= 0.0
    assert abs(float(weights.sum()) - 1) < 1e-12


def test_values_of_their_own_leave_the_hull_of_the_keys():
    keys, values = torch.eye(2), torch.tensor([[3.0, 3.0], [4.0, 2.0]])
    out = gz.Empirical(keys).expect(values, torch.zeros(2))
    direction = torch.ones(2)
    assert float(out @ direction) > float((keys @ direction).max()) + 4.0
