"""Ascent over fixed keys diverges iff it starts where ∇G is not zero.   [theory E34, 5.1]

    a   G(T eta) >= G(eta) + tau |∇G(eta)|²        b   |∇G(T eta)| >= |∇G(eta)|        c   |T a - T b| >= |a - b|

for T(eta) = eta + tau ∇G(eta), tau > 0. The note on exponential families states divergence without the condition.
"""

from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import scale_of

STATEMENTS = ("E34",)

taus = st.sampled_from([0.1, 1.0, 10.0])


def step(h, eta, tau):
    return eta + tau * h.mean(eta)


def slack(h, eta, tau, order):
    """Rounding of a statistic of this order after a step of this length."""
    return 1e-12 * (1 + tau) * scale_of(h, step(h, eta, tau), order) * (1 + scale_of(h, eta))


@given(attentions(), taus)
def test_a_a_step_gains_at_least_tau_times_the_squared_gradient(attention, tau):
    keys, eta, _ = attention
    h = gz.Empirical(keys)
    gain = (keys @ step(h, eta, tau)).logsumexp(-1) - (keys @ eta).logsumexp(-1)
    assert float(gain) >= float(tau * h.mean(eta).square().sum() - slack(h, eta, tau, 0))


@given(attentions(), taus)
def test_b_the_gradient_never_shortens(attention, tau):
    keys, eta, _ = attention
    h = gz.Empirical(keys)
    assert float(h.mean(step(h, eta, tau)).norm()) >= float(h.mean(eta).norm() - slack(h, eta, tau, 1))


@given(attentions(), taus)
def test_c_all_pairwise_distances_grow(attention, tau):
    keys, _, s = attention
    h, eta = gz.Empirical(keys), s.normal(5, keys.shape[-1])
    before, after = ((e.unsqueeze(1) - e).norm(dim=-1) for e in (eta, step(h, eta, tau)))
    rounding = slack(h, eta, tau, 1) + 1e-12 * eta.norm()  # small keys move a query by less than its last digit
    assert bool((after >= before - rounding).all())
