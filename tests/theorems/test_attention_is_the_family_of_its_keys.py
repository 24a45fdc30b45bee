"""Weights, log normaliser, mean, covariance and entropy of keys of any number, dimension and scale, by definition.

[shim22, Eq. 3-5, Prop. 1a; theory 3.2, E10, E30, E40] The statements take seven keys of dimension 3 and scale 1.
"""

import mpmath
import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of

STATEMENTS = ("Eq. 3", "Eq. 5", "Prop. 1a", "3.2", "E10", "N2 Eq. 3, E40")


@given(attentions())
def test_all_statistics_are_sums_over_the_keys(attention):
    keys, query, s = attention
    log_w = s.normal(len(keys))
    for h, logits in ((gz.Empirical(keys), keys @ query), (gz.Empirical(keys, log_w), log_w + keys @ query)):
        scale = scale_of(h, query, 0)
        weight = (logits - logits.max()).exp()
        p = weight / weight.sum()
        away = keys - p @ keys
        close(h.probabilities(query), p, scale)
        close(h.log_normalizer(query), logits.max() + weight.sum().log(), scale)
        close(h.entropy(query), -torch.xlogy(p, p).sum(), scale)
        close(h.mean(query), p @ keys, scale_of(h, query))
        close(h.covariance(query), away.mT @ (p.unsqueeze(-1) * away), scale_of(h, query, 2))
        masses = 1.0 if h.log_weights is None else log_w.exp()
        close(masses * h.log_density(keys, query.expand_as(keys)).exp(), p, scale)


@given(attentions(max_keys=4, max_dim=2, scales=(1e4, 1e8)))
def test_the_log_sum_exp_holds_where_the_exponentials_overflow(attention):
    keys, query, _ = attention
    with mpmath.workdps(40):
        logits = [mpmath.fdot(k, query.tolist()) for k in keys.tolist()]
        peak = max(logits)
        exact = float(peak + mpmath.log(mpmath.fsum(mpmath.exp(s - peak) for s in logits)))
    h = gz.Empirical(keys)
    close(h.log_normalizer(query), torch.tensor(exact, dtype=torch.float64), scale_of(h, query, 0))
