"""Ordinary multi-head attention costs nothing where all heads have one log normaliser.   [theory 6.2]

The paper calls multi-head attention incoherent (section 5); the cost is KL(q‖softmax(log pi + log Z_k)), per token.
"""

import torch
from hypothesis import given

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("6.2",)


@given(seeds)
def test_heads_of_equal_log_normalizer_cost_nothing(seed):
    # Heads that are rotations of one set of keys seen from eta: equal G_k, so r = pi.
    s = Source(seed)
    keys, eta = s.normal(5, 3), s.normal(3)
    axis = eta / eta.norm()
    mirror = torch.eye(3, dtype=torch.float64) - 2 * torch.outer(*(2 * [_across(s.normal(3), axis)]))
    h = gz.Mixture(s.log_simplex(2), gz.Empirical(torch.stack((keys, keys @ mirror))))
    close(h.lower_bound(eta).gap, torch.zeros((), dtype=torch.float64), scale_of(h, eta, 0))
    close(h.lower_bound(eta).mean, h.mean(eta), scale_of(h, eta))


def _across(v, axis):
    v = v - (v @ axis) * axis
    return v / v.norm()
