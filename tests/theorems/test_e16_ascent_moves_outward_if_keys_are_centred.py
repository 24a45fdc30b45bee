"""With centred keys a step of ascent moves outward: |eta + tau ∇G|² >= |eta|² + tau² |∇G|².   [theory E16]

The paper (3.3) asks for a roughly radial cloud. Radial symmetry is not needed; mean zero of the keys is.
"""

from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import scale_of

STATEMENTS = ("E16",)


@given(attentions(min_keys=2), st.sampled_from([0.1, 1.0, 10.0]))
def test_with_centred_keys_every_query_moves_outward(attention, tau):
    keys, eta, _ = attention
    h = gz.Empirical(keys - keys.mean(0))
    gradient = h.mean(eta)
    slack = 1e-12 * (1 + tau) ** 2 * (1 + eta.norm()) ** 2 * scale_of(h, eta) * (1 + scale_of(h, eta))
    assert float((eta + tau * gradient).square().sum()) >= float(
        eta.square().sum() + tau**2 * gradient.square().sum() - slack
    )


@given(attentions())
def test_the_slope_along_the_query_is_least_at_the_origin(attention):
    keys, eta, _ = attention
    h = gz.Empirical(keys)
    assert float(eta @ h.mean(eta)) >= float(eta @ keys.mean(0) - 1e-12 * scale_of(h, eta) * (1 + eta.norm()))
