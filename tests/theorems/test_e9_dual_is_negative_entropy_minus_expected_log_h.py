"""G*(u) = -H(p) - E_p[log h], which is KL(p‖h).   [theory E9]

The paper prints -H(p - E log h). For the counting measure G* = -H; for weights 1/n it is log n - H.
"""

import math

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.densities import STEP, law
from support.measure_registry import seeds
from support.scales import close, scale_of


@given(attentions(scales=(1.0,)))
def test_the_dual_of_weighted_keys(attention):
    keys, eta, s = attention
    log_h = s.normal(len(keys))
    log_p = (log_h + keys @ eta).log_softmax(-1)
    p = log_p.exp()
    entropy, expected_log_h = -(p * log_p).sum(), p @ log_h
    h = gz.Empirical(keys, log_h)
    close(h.relative_entropy(eta), -entropy - expected_log_h, scale_of(h, eta, 0))
    close(h.entropy(eta), entropy, scale_of(h, eta, 0))
    close(gz.dual(h, p @ keys).value, -entropy - expected_log_h, scale_of(h, eta, 0), tolerance=1e-8)


@given(seeds)
def test_the_dual_of_a_density_on_the_line(seed):
    # Gamma in t = log x: H and E log h with respect to dt, whose difference does not depend on the coordinate.
    at = law("gamma", seed)
    h, x, log_mass, eta = at
    log_h = log_mass - math.log(STEP)
    log_p = (log_h + x @ eta) - (log_mass + x @ eta).logsumexp(-1)
    p = log_p.exp() * STEP
    entropy, expected_log_h = -(p * log_p).sum(), (p * log_h.clamp(min=-1e300)).sum()
    close(h.relative_entropy(eta), -entropy - expected_log_h, 1 + at.scale(0))


@given(attentions(scales=(1.0,)))
def test_it_is_minus_the_entropy_for_the_counting_measure_and_log_n_more_for_the_probability(attention):
    keys, eta, _ = attention
    log_p = (keys @ eta).log_softmax(-1)
    entropy, log_n = -(log_p.exp() * log_p).sum(), math.log(len(keys))
    counting = gz.Empirical(keys)
    probability = gz.reweight(counting, torch.tensor(-log_n, dtype=torch.float64))
    close(counting.relative_entropy(eta), -entropy, scale_of(counting, eta, 0))
    close(probability.relative_entropy(eta), log_n - entropy, scale_of(counting, eta, 0))


def test_with_the_minus_sign_over_both_terms_it_is_another_number():
    keys, log_h = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64), torch.tensor([0.5, -1.0, 2.0]).double()
    eta = torch.tensor([0.3], dtype=torch.float64)
    log_p = (log_h + keys @ eta).log_softmax(-1)
    p = log_p.exp()
    printed = (p * log_p).sum() + p @ log_h  # -(H - E log h)
    assert abs(float(gz.Empirical(keys, log_h).relative_entropy(eta) - printed)) > 1.0
