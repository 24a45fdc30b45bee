"""Pythagoras: KL(q‖h) = KL(q‖P_eta) + G*(u) if E_q x = u = ∇G(eta), for any q, far from the family.   [theory 3.5]

The statement takes a q near the family; keys of any number and dimension, fewer than their dimension too.
"""

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close

STATEMENTS = ("E11",)


def kl(q, log_p):
    return (torch.xlogy(q, q) - q * log_p).sum(-1)


@given(attentions(scales=(1.0,)))
def test_pythagoras(attention):
    keys, _, s = attention
    log_h, q = s.normal(len(keys)), s.log_simplex(len(keys)).exp()
    found = gz.dual(gz.Empirical(keys, log_h), q @ keys)
    log_p = (log_h + keys @ found.eta).log_softmax(-1)
    close(kl(q, log_p) + found.value, kl(q, log_h), 1 + log_h.abs().max() + found.eta.norm(), tolerance=1e-8)
