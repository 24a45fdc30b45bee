"""Filters whose transition probabilities depend on the state, against each step written out and against enumeration."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from gradlogz import Prior, Series, SwitchingModel, gpb1, gpb2, imm
from gradlogz.filters import (
    attended_model,
    attentive_gpb1,
    attentive_gpb2,
    attentive_imm,
    fit_eta,
    smooth,
)
from support.scales import close
from support.switching_oracles import beginning, by_definition, chain, observed, system

F64 = torch.float64
FILTERS = {"gpb1": (attentive_gpb1, gpb1), "imm": (attentive_imm, imm), "gpb2": (attentive_gpb2, gpb2)}


def moments(weights, means, covariances):
    m = sum(w * x for w, x in zip(weights, means, strict=True))
    P = sum(w * (C + np.outer(x - m, x - m)) for w, x, C in zip(weights, means, covariances, strict=True))
    return m, P


def moved(model, j, m, P, y):
    """Predict and update with mode j: mean, covariance and density of y, by the information form of the update."""
    F, Q, H, R, b, d = (getattr(model, name)[j].numpy() for name in ("F", "Q", "H", "R", "b", "d"))
    m, P = F @ m + b, F @ P @ F.T + Q
    if np.isnan(y).any():
        return m, P, 1.0
    likelihood = stats.multivariate_normal.pdf(y, H @ m + d, H @ P @ H.T + R)
    after = np.linalg.inv(np.linalg.inv(P) + H.T @ np.linalg.inv(R) @ H)
    return after @ (np.linalg.inv(P) @ m + H.T @ np.linalg.inv(R) @ (y - d)), after, likelihood


def written_out(method, model, series, start, eta):
    """One pass of an attentive filter in numpy: mode probabilities, combined means and covariances, log likelihood."""
    k, T = model.modes, model.transition.numpy()
    pi, e = start.log_mode_probability.exp().numpy(), eta.numpy()
    means, covariances = list(start.mean.numpy()), list(start.covariance.numpy())
    if method == "gpb1":
        means, covariances = ([x] * k for x in moments(pi, means, covariances))
    rows, total = [], 0.0
    for y in series.numpy():
        A = np.array([[T[i, j] * math.exp(means[i] @ e[j]) for j in range(k)] for i in range(k)])
        A /= A.sum(-1, keepdims=True)
        joint = pi[:, None] * A
        if method == "imm":
            mixed = [moments(joint[:, j] / joint[:, j].sum(), means, covariances) for j in range(k)]
            each = [moved(model, j, *mixed[j], y) for j in range(k)]
            pi = joint.sum(0) * [L for _, _, L in each]
        else:
            pairs = [[moved(model, j, means[i], covariances[i], y) for i in range(k)] for j in range(k)]
            w = np.array([[joint[i, j] * pairs[j][i][2] for i in range(k)] for j in range(k)])
            each = [moments(w[j] / w[j].sum(), *[[p[n] for p in pairs[j]] for n in (0, 1)]) for j in range(k)]
            pi = w.sum(-1)
        total, pi = total + math.log(pi.sum()), pi / pi.sum()
        means, covariances = [x[0] for x in each], [x[1] for x in each]
        one = moments(pi, means, covariances)
        rows.append((np.log(pi), *one))
        if method == "gpb1":
            means, covariances = ([x] * k for x in one)
    return *(torch.tensor(np.array(x)) for x in zip(*rows, strict=True)), torch.tensor(total, dtype=F64)


@pytest.mark.parametrize("method", FILTERS)
def test_every_step_is_that_of_the_definition(method):
    torch.manual_seed(1)
    model, start, eta = system(3, 2, 2, transition=chain(3)), beginning(3, 2), torch.randn(3, 2, dtype=F64)
    y = observed(model, 7)
    y[3] = torch.nan
    log_pi, mean, covariance, log_likelihood = written_out(method, model, y, start, eta)
    ours = FILTERS[method][0](model, y, start, eta=eta)
    close(ours.log_mode_probability, log_pi, 1e3)
    close(ours.mean, mean, 1e2)
    close(ours.covariance, covariance, 1e3)
    close(ours.log_likelihood, log_likelihood, 1e3)


@pytest.mark.parametrize("method", FILTERS)
def test_without_a_pull_it_is_the_plain_filter(method):
    torch.manual_seed(8)
    model, start = system(3, 2, 2, transition=chain(3)), beginning(3, 2)
    y = observed(model, 9, 4)
    y[0, 3] = torch.nan
    series = Series(y, mask=torch.rand(4, 9) < 0.8, lengths=torch.tensor([9, 5, 9, 7]))
    attentive, plain = FILTERS[method]
    ours, theirs = attentive(model, series, start, eta=torch.zeros(3, 2, dtype=F64)), plain(model, series, start)
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert bool((a.isnan() == b.isnan()).all()), name
        close(a.nan_to_num(), b.nan_to_num(), 1 + b.nan_to_num(neginf=0.0).abs().max(), tolerance=1e-11)


@pytest.mark.parametrize("method", FILTERS)
def test_a_constant_pull_changes_nothing(method):
    torch.manual_seed(2)
    model, start, eta = system(3, 2, 2, transition=chain(3)), beginning(3, 2), torch.randn(3, 2, dtype=F64)
    y = observed(model, 5)
    ours, shifted = (FILTERS[method][0](model, y, start, eta=e) for e in (eta, eta + torch.randn(2, dtype=F64)))
    close(ours.mean, shifted.mean, 1e2)
    close(ours.log_likelihood, shifted.log_likelihood, 1e2)


def test_gpb2_is_exact_for_one_step():
    """The joint Gaussians of all pairs of modes, with T_ij ∝ T_ij exp<mu_i, eta_j> by hand."""
    torch.manual_seed(9)
    model, start, eta = system(3, 2, 2, transition=chain(3)), beginning(3, 2), torch.randn(3, 2, dtype=F64)
    y = observed(model, 1)
    T = model.transition * (start.mean @ eta.mT).exp()
    T = T / T.sum(-1, keepdim=True)
    exact = by_definition(SwitchingModel(T, model.F, model.Q, model.H, model.R, model.b, model.d), y, start)
    ours = attentive_gpb2(model, y, start, eta=eta)
    for name in ("mean", "covariance", "mode_mean", "mode_covariance", "log_mode_probability", "log_likelihood"):
        close(getattr(ours, name), getattr(exact, name), 1e2)


def test_without_observations_gpb2_is_imm():
    """Collapsing commutes with predicting, also if transitions depend on the means.   [theory 7.4]"""
    torch.manual_seed(3)
    model, start, eta = system(3, 2, 2, transition=chain(3)), beginning(3, 2), torch.randn(3, 2, dtype=F64)
    nothing = torch.full((6, 2), torch.nan, dtype=F64)
    pairs, mixed = (f(model, nothing, start, eta=eta) for f in (attentive_gpb2, attentive_imm))
    close(pairs.mode_mean, mixed.mode_mean, 1e2)
    close(pairs.mode_covariance, mixed.mode_covariance, 1e3)
    close(pairs.log_mode_probability, mixed.log_mode_probability, 1e2)


def test_mixing_is_attention_to_the_means_of_modes():
    """T constant, nothing observed: queries eta_j, keys mu_i, key biases log pi_i - log sum_j exp<mu_i, eta_j>."""
    torch.manual_seed(4)
    start, eta = beginning(4, 3), torch.randn(4, 3, dtype=F64)
    eye, zero = torch.eye(3, dtype=F64).expand(4, 3, 3), torch.zeros(4, 3, 3, dtype=F64)
    model = SwitchingModel(torch.full((4, 4), 0.25, dtype=F64), F=eye, Q=zero, H=eye, R=eye)
    ours = attentive_imm(model, torch.full((1, 3), torch.nan, dtype=F64), start, eta=eta)
    logits = eta @ start.mean.mT
    bias = start.log_mode_probability - logits.logsumexp(0)
    attention = torch.nn.functional.scaled_dot_product_attention(
        eta, start.mean, start.mean, attn_mask=bias.expand(4, 4), scale=1.0
    )
    close(ours.mode_mean[0], attention, 10.0)


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_the_attended_model_is_smoothed(method):
    """Its forward pass is the attentive filter; given its transitions, enumeration is exact at every time."""
    torch.manual_seed(5)
    model, start, eta = system(2, 2, 2, transition=chain(2)), beginning(2, 2), torch.randn(2, 2, dtype=F64)
    y = observed(model, 4, 3)
    attended = attended_model(model, y, start, eta=eta, method=method)
    assert attended.transition.shape == (3, 4, 2, 2)
    ours, smoothed = FILTERS[method][0](model, y, start, eta=eta), smooth(attended, y, start, method=method)
    close(smoothed.filtered.mean, ours.mean, 1e2)
    close(smoothed.filtered.log_likelihood, ours.log_likelihood, 1e2)
    exact = smooth(attended, y, start, method="enumerate")
    for b in range(3):  # the last time, from the joint Gaussians of all histories
        fields = (model.F, model.Q, model.H, model.R, model.b, model.d)
        varying = SwitchingModel(attended.transition[b], *(f.expand(4, *f.shape) for f in fields))
        last = by_definition(varying, y[b], start)
        close(exact.mean[b, -1], last.mean[-1], 1e2)
        close(exact.filtered.log_likelihood[b], last.log_likelihood, 1e2)
    errors = [(s.mean - exact.mean).norm() for s in (smoothed, smoothed.filtered)]
    assert float(errors[0]) < float(errors[1])  # later observations bring it nearer to the exact posterior


def walls(n, t, pull, rng):
    """Targets that go right or left and turn round the sooner the further out they are; most of the time unseen."""
    x, mode = rng.normal(size=n), rng.integers(0, 2, size=n)
    states, seen = [], []
    base = np.array([[0.9, 0.1], [0.1, 0.9]])
    for step in range(t):
        logits = np.log(base[mode]) + x[:, None] * np.array([-pull, pull])
        right = 1 / (1 + np.exp(logits[:, 1] - logits[:, 0]))
        mode = np.where(rng.random(n) < right, 0, 1)
        x = x + np.where(mode == 0, 1.0, -1.0) + 0.1 * rng.normal(size=n)
        states.append(x)
        seen.append(x + 0.5 * rng.normal(size=n) if step % 4 == 0 else np.full(n, np.nan))
    return np.stack(states, 1), np.stack(seen, 1)


def between_walls():
    one = torch.ones(2, 1, 1, dtype=F64)
    model = SwitchingModel(
        transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=F64),
        F=one,
        Q=0.01 * one,
        H=one,
        R=0.25 * one,
        b=torch.tensor([[1.0], [-1.0]], dtype=F64),
    )
    return model, Prior(torch.zeros(1, dtype=F64), torch.ones(1, 1, dtype=F64))


@pytest.mark.parametrize("method", FILTERS)
def test_it_beats_the_plain_filter_where_modes_depend_on_the_state(method):
    """200 targets between soft walls, one observation in four: log likelihood and error of the position."""
    pull = 0.6
    truth, seen = walls(200, 60, pull, np.random.default_rng(0))
    model, start = between_walls()
    y = torch.tensor(seen, dtype=F64).unsqueeze(-1)
    attentive, plain_filter = FILTERS[method]
    attended = attentive(model, y, start, eta=torch.tensor([[-pull], [pull]], dtype=F64))
    plain = plain_filter(model, y, start)
    gained = attended.log_likelihood - plain.log_likelihood
    assert float(gained.mean() - 4 * gained.std() / math.sqrt(200)) > 0
    error = [(f.mean.squeeze(-1) - torch.tensor(truth)).square().mean().sqrt() for f in (attended, plain)]
    assert float(error[0]) < 0.8 * float(error[1])


def test_the_pull_is_learned():
    """The estimate maximises the likelihood of the filter, and is near the pull of the data.

    It is not the same: modes of the data depend on the state, modes of the filter on its filtered mean.
    """
    pull = 0.6
    _, seen = walls(60, 24, pull, np.random.default_rng(1))
    model, start = between_walls()
    y = torch.tensor(seen, dtype=F64).unsqueeze(-1)
    fitted = fit_eta(model, y, start, method="imm")
    assert fitted.converged
    close(fitted.eta.sum(0), torch.zeros(1, dtype=F64), 10.0)
    close(fitted.history[0], imm(model, y, start).log_likelihood.sum(), 1e4)
    close(fitted.log_likelihood, attentive_imm(model, y, start, eta=fitted.eta).log_likelihood.sum(), 1e4)

    def per_series(e):
        return attentive_imm(model, y, start, eta=torch.tensor([[-e], [e]], dtype=F64)).log_likelihood

    grid = torch.stack([per_series(float(fitted.eta[1]) + h).sum() for h in (-0.02, 0.0, 0.02)])
    assert int(grid.argmax()) == 1
    assert abs(float(fitted.eta[1]) - pull) < pull / 3
