"""Pythagoras: KL(q‖h) = KL(q‖P_eta) + G*(u) if E_q x = u = ∇G(eta).  Gibbs: G(eta) = max_q <eta, E_q x> - KL(q‖h).

[theory 3.5] The gap in Gibbs' variational principle is KL(q‖P_eta), for any q. One call of attention therefore gives
the entropy G - <eta, mean>, its distance log n - H from uniform, and the loss of a key as KL(delta_n‖P_eta).
"""

import math

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


def kl(q, log_p):
    return (torch.xlogy(q, q) - q * log_p).sum(-1)


@given(attentions(scales=(1.0,)))
def test_pythagoras(attention):
    keys, _, s = attention
    log_h, q = s.normal(len(keys)), s.log_simplex(len(keys)).exp()
    found = gz.dual(gz.Empirical(keys, log_h), q @ keys)
    log_p = (log_h + keys @ found.eta).log_softmax(-1)
    close(kl(q, log_p) + found.value, kl(q, log_h), 1 + log_h.abs().max() + found.eta.norm(), tolerance=1e-8)


@given(attentions(scales=(1e-3, 1.0)))
def test_gibbs_with_its_gap(attention):
    keys, eta, s = attention
    log_h, q = s.normal(len(keys)), s.log_simplex(len(keys)).exp()
    h = gz.Empirical(keys, log_h)
    log_p = (log_h + keys @ eta).log_softmax(-1)
    value = eta @ (q @ keys) - kl(q, log_h)
    close(h.log_normalizer(eta) - value, kl(q, log_p), scale_of(h, eta, 0) + log_h.abs().max())
    assert float(value) <= float(h.log_normalizer(eta)) + 1e-12
    member = log_p.exp()
    attained = eta @ (member @ keys) - kl(member, log_h)
    close(h.log_normalizer(eta), attained, scale_of(h, eta, 0) + log_h.abs().max())


@given(attentions(scales=(1e-3, 1.0)))
def test_by_products_of_one_call_of_attention(attention):
    keys, eta, _ = attention
    h, p, n = gz.Empirical(keys), (keys @ eta).softmax(-1), len(keys)
    entropy = -torch.xlogy(p, p).sum()
    G, mean = h.log_normalizer(eta), h.mean(eta)
    close(G - eta @ mean, entropy, scale_of(h, eta, 0))
    close(h.entropy(eta), entropy, scale_of(h, eta, 0))
    close(math.log(n) - h.entropy(eta), kl(p, torch.full_like(p, -math.log(n))), scale_of(h, eta, 0))
    close(G - keys @ eta, -p.log(), scale_of(h, eta, 0))  # KL(delta_n‖P_eta)


def test_with_weights_shannon_entropy_is_not_minus_the_relative_entropy():
    keys, log_w = torch.eye(3, dtype=torch.float64), torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64)
    h, eta = gz.Empirical(keys, log_w), torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    logits = log_w + keys @ eta
    p = logits.softmax(-1)
    close(h.entropy(eta), h.log_normalizer(eta) - p @ logits, 3.0)
    assert abs(float(h.entropy(eta) + h.relative_entropy(eta))) > 0.5
