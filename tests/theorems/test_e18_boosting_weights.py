"""Boosting weights are w_i = exp(-y_i F(x_i)), and AdaBoost descends the G that attention ascends.   [theory E18, 6.4]

The paper prints w_i = exp(-eta_n(x_i)) without the label (section 4). With labels, Z(lambda) is the exponential loss.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

sizes = {"seed": seeds, "n": st.integers(6, 20), "learners": st.integers(2, 5)}


def problem(seed, n, learners):
    """Labels, weak answers that are right and wrong at least once each, and scores of a model so far."""
    s = Source(seed)
    y, f = s.normal(n).sign(), s.normal(n, learners).sign()
    f[0], f[1] = y[0], -y[1]
    return y, f, s.normal(n), s


@given(**sizes)
def test_the_normalizer_is_the_exponential_loss(seed, n, learners):
    y, f, F, s = problem(seed, n, learners)
    step = s.normal(learners)
    h = gz.margin_measure(y, f, F)
    loss = torch.exp(-y * (F + f @ step)).sum()
    close(h.log_normalizer(step), loss.log(), scale_of(h, step, 0) + F.abs().max())


def test_without_the_label_a_model_that_is_right_would_have_a_large_loss():
    y, f, _, _ = problem(0, 12, 3)
    F, zero = 2 * y, torch.zeros(3, dtype=torch.float64)
    unlabelled = torch.exp(-F).sum().log()
    assert float(gz.margin_measure(y, f, F).log_normalizer(zero)) < float(unlabelled) - 1.0


@given(**sizes)
def test_rounds_of_boosting_are_those_of_adaboost(seed, n, learners):
    y, f, _, _ = problem(seed, n, learners)
    h, w, F = gz.margin_measure(y, f), torch.full((n,), 1 / n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for _ in range(3):
        error = torch.stack([w[f[:, j] != y].sum() for j in range(learners)])
        j = int((error - 0.5).abs().argmax())
        alpha = 0.5 * torch.log((1 - error[j]) / error[j])
        found = gz.boost(h, learner=j)
        close(found.weight, alpha, 1 / (error[j] * (1 - error[j])))
        F = F + alpha * f[:, j]
        w = w * torch.exp(-alpha * y * f[:, j])
        w = w / w.sum()
        zero = torch.zeros(learners, dtype=torch.float64)
        close(found.h.log_normalizer(zero), torch.exp(-y * F).sum().log(), 1 + F.abs().max())
        close(found.h.probabilities(zero), w, 1 + F.abs().max())
        assert float(found.h.log_normalizer(zero)) <= float(h.log_normalizer(zero)) + 1e-12
        h = found.h


@given(**sizes)
def test_the_weight_of_a_round_minimises_the_log_normalizer_along_its_learner(seed, n, learners):
    y, f, F, _ = problem(seed, n, learners)
    w = torch.exp(-y * F)
    right, wrong = w[f[:, 0] == y].sum(), w[f[:, 0] != y].sum()
    found = gz.boost(gz.margin_measure(y, f, F), learner=0)
    close(found.weight, (right / wrong).log() / 2, (1 + F.abs().max()) * w.sum() / torch.minimum(right, wrong))

    def loss(step):
        return torch.exp(-y * (F + step * f[:, 0])).sum()

    assert float(loss(found.weight)) <= min(float(loss(found.weight + 0.01)), float(loss(found.weight - 0.01)))


@given(**sizes)
def test_reweighting_after_a_round_is_tilting(seed, n, learners):
    y, f, F, s = problem(seed, n, learners)
    h = gz.margin_measure(y, f, F)
    found = gz.boost(h, learner=0)
    tilt, step = torch.zeros(learners, dtype=torch.float64), s.normal(learners)
    tilt[0] = found.weight
    weights = torch.exp(-y * F - found.weight * y * f[:, 0] - y * (f @ step))
    expected = -(weights / weights.sum()) @ (y.unsqueeze(-1) * f)
    for next_round in (found.h, gz.tilt(h, tilt)):
        close(next_round.mean(step), expected, scale_of(h, step) + F.abs().max() + found.weight.abs())


def test_attention_would_raise_the_loss_that_boosting_lowers():
    y, f, F, _ = problem(0, 12, 3)
    h, zero = gz.margin_measure(y, f, F), torch.zeros(3, dtype=torch.float64)
    up = h.log_normalizer(zero + h.mean(zero)) - h.log_normalizer(zero)
    down = gz.boost(h).h.log_normalizer(zero) - h.log_normalizer(zero)
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
    best = gz.mean_to_natural(h, torch.zeros(2, dtype=torch.float64))
    p = w * torch.exp(u @ best)
    divergence = (p * (p / w).log() - p + w).sum()
    close(p @ u, torch.zeros(2, dtype=torch.float64), w.sum() * u.abs().max(), tolerance=1e-8)
    lowest = h.log_normalizer(best).exp()
    close(h.log_normalizer(torch.zeros(2).double()).exp() - lowest, divergence, w.sum(), tolerance=1e-8)
