"""GPB1, GPB2, IMM and deeper filters beside every history of modes: where they are exact, and how near elsewhere.

[theory 7.4]
"""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from gradlogz import Prior, Series, SwitchingModel, gpb1, gpb2, imm
from gradlogz.filters import Filtered, enumerate_modes, gpb
from gradlogz.kernels.filters import dispatch
from support.switching_oracles import F64, beginning, by_definition, observed, positive, same, system

FILTERS = {"gpb1": gpb1, "gpb2": gpb2, "imm": imm}


@pytest.mark.parametrize("k", [2, 3])
def test_gpb2_is_exact_for_one_step_from_a_gaussian_for_each_mode(k):
    model, start = system(k), beginning(k)
    y = observed(model, 1)
    same(gpb2(model, y, start), by_definition(model, y, start))


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
def test_all_are_exact_for_one_step_from_one_gaussian(filter):
    model, start = system(3), beginning(3, shared=True)
    y = observed(model, 1)
    same(filter(model, y, start), by_definition(model, y, start))


def test_imm_is_not_exact_for_one_step_from_several():
    model, start = system(3), beginning(3)
    y = observed(model, 1)
    found, true = imm(model, y, start), by_definition(model, y, start)
    assert (found.mean - true.mean).norm() > 1e-3
    assert (found.log_mode_probability.exp() - true.log_mode_probability.exp()).norm() > 1e-4
    # Before the observation it is.
    for name in Filtered._fields:
        if "predicted" in name or "innovation" in name:
            torch.testing.assert_close(getattr(found, name), getattr(true, name), rtol=0, atol=1e-11)


@pytest.mark.parametrize("filter", [imm, gpb2], ids=["imm", "gpb2"])
def test_without_observations_they_are_exact_for_ever(filter):
    model, start = system(2), beginning(2)
    y = torch.full((8, 2), torch.nan, dtype=F64)
    same(filter(model, y, start), enumerate_modes(model, y, start).filtered)
    short = y[:4]
    same(filter(model, short, start), by_definition(model, short, start))


def test_without_observations_gpb1_keeps_the_mean_of_models_that_agree_in_it_alone():
    model, start = system(2), beginning(2)
    y = torch.full((4, 2), torch.nan, dtype=F64)
    found, true = gpb1(model, y, start), enumerate_modes(model, y, start).filtered
    torch.testing.assert_close(found.log_mode_probability, true.log_mode_probability, rtol=0, atol=1e-12)
    assert (found.mean - true.mean)[-1].norm() > 1e-3


@pytest.mark.parametrize("filter", [imm, gpb2], ids=["imm", "gpb2"])
def test_modes_that_never_switch_are_a_bank_of_kalman_filters(filter):
    k = 3
    model, start = system(k, transition=torch.eye(k, dtype=F64)), beginning(k)
    y = observed(model, 6)
    found = filter(model, y, start)
    # Kalman filters in numpy, weighed by Bayes' rule.
    log_w = start.log_mode_probability.numpy()
    m, P = start.mean.numpy().copy(), start.covariance.numpy().copy()
    F, Q, H, R, b, d = (getattr(model, n).numpy() for n in ("F", "Q", "H", "R", "b", "d"))
    for t, z in enumerate(y.numpy()):
        for j in range(k):
            m[j], P[j] = F[j] @ m[j] + b[j], F[j] @ P[j] @ F[j].T + Q[j]
            S = H[j] @ P[j] @ H[j].T + R[j]
            log_w[j] += scipy.stats.multivariate_normal.logpdf(z, H[j] @ m[j] + d[j], S)
            K = P[j] @ H[j].T @ np.linalg.inv(S)
            m[j], P[j] = m[j] + K @ (z - H[j] @ m[j] - d[j]), P[j] - K @ S @ K.T
        log_pi = log_w - scipy.special.logsumexp(log_w)
        torch.testing.assert_close(found.log_mode_probability[t].numpy(), log_pi, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found.mode_mean[t].numpy(), m, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found.mode_covariance[t].numpy(), P, rtol=1e-11, atol=1e-11)
    assert math.isclose(float(found.log_likelihood), scipy.special.logsumexp(log_w), rel_tol=1e-12)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("T", [[[0.9, 0.1], [0.1, 0.9]], [[0.9, 0.1], [1.0, 0.0]]], ids=["ergodic", "zero"])
def test_histories_that_were_given_up_and_come_back_have_their_weight(monkeypatch, T, is_compiled):
    """An outlier leaves one mode exp(-1e5) of the mass; the next says that it was right."""
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 0 if is_compiled else math.inf)
    F, Q, H, R = torch.tensor([[1.0, 0.5], [0.01, 0.01], [1.0, 1.0], [0.01, 1.0]], dtype=F64)[..., None, None]
    model = SwitchingModel(torch.tensor(T, dtype=F64), F, Q, H, R)
    start = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    y = torch.tensor([[300.0], [300.0]], dtype=F64)
    expected = by_definition(model, y, start)
    for found in (gpb2(model, y, start), gpb(model, y, start, depth=3), enumerate_modes(model, y, start).filtered):
        same(found, expected, tolerance=1e-10)  # logarithms of 1e5 have eleven digits after the point
    slopes = []
    for filter in (gpb2, lambda *a, **more: enumerate_modes(*a, **more).filtered):
        leaf = y.clone().requires_grad_()
        slopes.append(torch.autograd.grad(filter(model, leaf, start).log_likelihood, leaf)[0])
    nudged = [by_definition(model, y + e * torch.tensor([[1.0], [0.0]], dtype=F64), start) for e in (0.5, -0.5)]
    slope = nudged[0].log_likelihood - nudged[1].log_likelihood  # of what is quadratic there
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-10, atol=0.0)
    torch.testing.assert_close(slopes[0][0, 0], slope, rtol=1e-8, atol=0.0)


@pytest.mark.parametrize("depth", [7, 30])
def test_filters_deeper_than_the_series_need_no_more_than_it(depth):
    model, start = system(2, 1, 1), beginning(2, 1)
    y = observed(model, 5)
    found = gpb(model, y.expand(80, 5, 1), start, depth=depth)
    same(Filtered(*(part[7] for part in found)), by_definition(model, y, start))


def test_deeper_filters_come_nearer_and_are_exact_at_last():
    model, start = system(3), beginning(3)
    y = observed(model, 6)
    true = enumerate_modes(model, y, start).filtered
    errors = []
    for depth in range(1, 8):
        found = gpb(model, y, start, depth=depth)
        errors.append(float((found.mean - true.mean).norm(dim=-1).amax()))
    assert errors[0] > 10 * errors[1] > 100 * errors[3] > 1000 * errors[5]
    same(gpb(model, y, start, depth=7), true, 10.0)
    same(gpb(model, y, start, depth=9), true, 10.0)
    same(gpb(model, y, start, depth=1), gpb1(model, y, start))
    same(gpb(model, y, start, depth=2), gpb2(model, y, start))


@pytest.mark.parametrize("filter", [gpb1, gpb2, imm, lambda *a, **o: gpb(*a, depth=3, **o)])
def test_gaps_inputs_and_zero_transitions_reach_every_filter(filter):
    """Of a model whose modes agree in all but their inputs of 0, every filter is exact."""
    one = system(1)
    T = torch.tensor([[0.3, 0.7, 0.0], [0.0, 0.4, 0.6], [1.0, 0.0, 0.0]], dtype=F64)
    alike = {n: getattr(one, n).expand(3, *getattr(one, n).shape[1:]) for n in ("F", "Q", "H", "R", "b", "d")}
    B, u = torch.randn(1, 2, 2, dtype=F64), torch.randn(5, 2, dtype=F64)
    model = SwitchingModel(T, **alike, B=B.expand(3, 2, 2))
    single = SwitchingModel(torch.ones(1, 1, dtype=F64), one.F, one.Q, one.H, one.R, one.b, one.d, B)
    start = beginning(1, shared=True)
    y = observed(model, 5)
    y[1], y[3, 0] = torch.nan, torch.nan
    begins = Prior(start.mean, start.covariance)
    found, true = filter(model, Series(y, inputs=u), begins), by_definition(single, y, begins, u)
    for name in ("mean", "covariance", "predicted_mean", "predicted_covariance", "innovation_covariance"):
        torch.testing.assert_close(getattr(found, name), getattr(true, name), rtol=0, atol=1e-11)
    torch.testing.assert_close(found.log_likelihood, true.log_likelihood, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        found.log_mode_probability[-1], (torch.full((3,), 1 / 3, dtype=F64) @ T.matrix_power(5)).log()
    )


def test_gpb2_is_nearer_than_imm_on_sixty_models():
    """Fast switching, 60 random models of 3 modes as one batch, errors to the exact mean after 6 steps.

    Theory measured 0.256, 0.252 and 0.062 for GPB1, IMM and GPB2 on its models; the order is what is held here.
    """
    n, k, steps = 60, 3, 6
    T = torch.rand(n, 1, k, k, dtype=F64) + 0.3
    model = SwitchingModel(
        T / T.sum(-1, keepdim=True),
        torch.randn(n, 1, k, 2, 2, dtype=F64),
        positive(n, 1, k, 2, scale=0.5),
        torch.randn(n, 1, k, 1, 2, dtype=F64),
        positive(n, 1, k, 1, scale=0.3),
        torch.randn(n, 1, k, 2, dtype=F64),
    )
    y = 2 * torch.randn(n, steps, 1, dtype=F64)
    start = Prior(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
    true = enumerate_modes(model, y, start).filtered
    error = {}
    for name, filter in FILTERS.items():
        found = filter(model, y, start)
        error[name] = float((found.mean - true.mean)[:, -1].norm(dim=-1).mean())
    assert error["gpb2"] < error["imm"] / 2
    assert error["gpb2"] < error["gpb1"] / 2
