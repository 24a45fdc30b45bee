"""Boosting weights are w_i = exp(-y_i F(x_i)), and AdaBoost descends the G that attention ascends.   [theory E18, 6.4]

The paper prints w_i = exp(-eta_n(x_i)) without the label (section 4). With labels, Z(lambda) is the exponential loss.
"""

import torch
from hypothesis import given

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close

STATEMENTS = ("E18",)


def problem(seed, n, learners):
    """Labels, weak answers that are right and wrong at least once each, and scores of a model so far."""
    s = Source(seed)
    y, f = s.normal(n).sign(), s.normal(n, learners).sign()
    f[0], f[1] = y[0], -y[1]
    return y, f, s.normal(n), s


def test_attention_would_raise_the_loss_that_boosting_lowers():
    y, f, F, _ = problem(0, 12, 3)
    h, zero = gz.measures.margin_measure(y, f, F), torch.zeros(3, dtype=torch.float64)
    up = h.log_normalizer(zero + h.mean(zero)) - h.log_normalizer(zero)
    down = gz.measures.boost(h).h.log_normalizer(zero) - h.log_normalizer(zero)
    assert float(up) > 0.05
    assert float(down) < -0.01


@given(seeds)
def test_the_exponential_loss_is_dual_to_the_unnormalised_relative_entropy(seed):
    # min { sum p log(p/w) - p + w : sum p u = 0 } = Z(0) - min Z. Two sides of every learner keep the minimum finite.
    s = Source(seed)
    u, w = torch.cat((s.normal(6, 2), -s.positive(6, 2) * s.normal(6, 2))), s.positive(12)
    u = torch.cat((u, -u))
    w = torch.cat((w, w.flip(0)))
    h = gz.Empirical.weighted(u, w)
    best = gz.measures.mean_to_natural(h, torch.zeros(2, dtype=torch.float64))
    p = w * torch.exp(u @ best)
    divergence = (p * (p / w).log() - p + w).sum()
    close(p @ u, torch.zeros(2, dtype=torch.float64), w.sum() * u.abs().max(), tolerance=1e-8)
    lowest = h.log_normalizer(best).exp()
    close(h.log_normalizer(torch.zeros(2).double()).exp() - lowest, divergence, w.sum(), tolerance=1e-8)
