"""A model with outliers is the mixture over all sets of observations that are outliers, and imm is the PDA filter."""

import itertools
import math

import numpy as np
import pytest
import torch

from gradlogz.filters import (
    KalmanModel,
    Prior,
    SwitchingModel,
    constant_velocity,
    enumerate_modes,
    gpb2,
    imm,
    prior_with_clutter,
    smooth,
    with_clutter,
    without_clutter,
)
from support.measure_registry import Source
from support.scales import close


def system(seed, *, modes=2, s=2, o=1, steps=None):
    g = Source(seed)
    lead = () if steps is None else (steps,)
    T = g.positive(modes, modes)
    R = g.covariance(*lead, modes, o)
    model = SwitchingModel(
        T / T.sum(-1, keepdim=True), g.normal(*lead, modes, s, s) / s**0.5, g.covariance(*lead, modes, s),
        g.normal(modes, o, s), R, b=g.normal(modes, s), d=g.normal(modes, o),
    )  # fmt: skip
    prior = Prior(g.normal(modes, s), g.covariance(modes, s), torch.log_softmax(g.normal(modes), -1))
    return model, prior, g


def log_normal(y, mean, covariance):
    e = np.asarray(y - mean)
    return float(-0.5 * (e @ np.linalg.solve(covariance, e) + np.linalg.slogdet(2 * np.pi * np.asarray(covariance))[1]))


@pytest.mark.parametrize("seed", range(3))
def test_the_exact_filter_is_a_mixture_over_sets_of_outliers(seed):
    """Each set of outliers leaves the other observations to the model without outliers."""
    model, prior, g = system(seed, o=2)
    y, p, centre, width = 3 * g.normal(4, 2), 0.2, g.normal(2), 10 * g.covariance(2)
    exact = enumerate_modes(with_clutter(model, p, width, mean=centre), y, prior_with_clutter(prior)).filtered
    terms, means, last = [], [], []
    for outliers in itertools.product((False, True), repeat=4):
        mask = torch.tensor(outliers)
        rest = enumerate_modes(model, y.masked_fill(mask[:, None], math.nan), prior).filtered
        clutter = sum(log_normal(y[t], centre, width) for t in range(4) if outliers[t])
        count = sum(outliers)
        terms.append(float(rest.log_likelihood) + clutter + count * math.log(p) + (4 - count) * math.log(1 - p))
        means.append(rest.mean[-1])
        last.append(outliers[-1])
    weight = torch.softmax(torch.tensor(terms, dtype=torch.float64), 0)
    close(exact.log_likelihood, torch.tensor(terms, dtype=torch.float64).logsumexp(0), scale=10.0)
    close(exact.mean[-1], torch.einsum("n,ns->s", weight, torch.stack(means)), scale=10.0)
    close(without_clutter(exact.log_mode_probability)[1][-1], weight[torch.tensor(last)].sum(), scale=10.0)


def test_with_one_mode_imm_is_the_filter_of_probabilistic_data_association():
    model, prior, g = system(5, modes=1, s=3, o=2)
    y, p, width = 4 * g.normal(6, 2), 0.1, 20 * g.covariance(2)
    found = imm(with_clutter(model, p, width), y, prior_with_clutter(prior))
    m, P = prior.mean[0].numpy(), prior.covariance[0].numpy()
    F, Q, H, R = (getattr(model, name)[0].numpy() for name in "FQHR")
    b, d, total = model.b[0].numpy(), model.d[0].numpy(), 0.0
    for t in range(6):
        m, P = F @ m + b, F @ P @ F.T + Q
        v, S = y[t].numpy() - H @ m - d, H @ P @ H.T + R
        K = P @ H.T @ np.linalg.inv(S)
        inlier = math.log(1 - p) + log_normal(y[t].numpy(), H @ m + d, S)
        outlier = math.log(p) + log_normal(y[t].numpy(), np.zeros(2), width.numpy())
        total += np.logaddexp(inlier, outlier)
        w = math.exp(inlier - np.logaddexp(inlier, outlier))
        updated = P - K @ S @ K.T
        P = w * updated + (1 - w) * P + w * (1 - w) * np.outer(K @ v, K @ v)
        m = m + w * K @ v
        close(found.mean[t], torch.from_numpy(m), scale=10.0)
        close(found.covariance[t], torch.from_numpy(P), scale=10.0)
        close(without_clutter(found.log_mode_probability)[1][t], torch.tensor(1 - w, dtype=torch.float64), scale=10.0)
    close(found.log_likelihood, torch.tensor(total, dtype=torch.float64), scale=10.0)


@pytest.mark.parametrize("method", [imm, gpb2, smooth])
def test_without_outliers_it_is_the_model_itself(method):
    model, prior, g = system(6, steps=9)
    y = g.normal(3, 9, 1)
    one, other = method(with_clutter(model, 0.0, torch.eye(1)), y, prior_with_clutter(prior)), method(model, y, prior)
    close(one.mean, other.mean, scale=10.0)
    close(one.covariance, other.covariance, scale=10.0)
    modes, outlier = without_clutter(one.log_mode_probability)
    close(modes.exp(), other.log_mode_probability.exp(), scale=10.0)
    assert float(outlier.max()) == 0.0


@pytest.mark.parametrize("modes", [1, 2])
@pytest.mark.parametrize("shape", ["s", "1 s", "k s", "b 1 s", "b k s", "1 1 s", "1 k s"])
@pytest.mark.parametrize("weights", ["", "k", "b k", "1 k"])
def test_priors_of_every_shape_are_those_of_the_model(modes, shape, weights):
    """Size 1 is shared: by all modes, with outliers and without."""
    model, _, g = system(9, modes=modes)
    y, sizes = g.normal(3, 5, 1), {"1": 1, "k": modes, "b": 3, "s": 2}
    lead = [sizes[name] for name in shape.split()[:-1]]
    log_p = torch.log_softmax(g.normal(*(sizes[name] for name in weights.split())), -1) if weights else None
    prior = Prior(g.normal(*lead, 2), g.covariance(*lead, 2), log_p)
    one, other = imm(with_clutter(model, 0.0, torch.eye(1)), y, prior_with_clutter(prior)), imm(model, y, prior)
    close(one.mean, other.mean, scale=10.0)
    close(one.covariance, other.covariance, scale=10.0)
    close(one.log_likelihood, other.log_likelihood, scale=10.0)


def test_an_outlier_of_any_size_moves_nothing():
    line = constant_velocity(1, dt=1.0, spectral_density=0.01, observation_variance=1.0, dtype=torch.float64)
    model = SwitchingModel.of([line, line], transition=torch.full((2, 2), 0.5, dtype=torch.float64))
    prior = prior_with_clutter(Prior(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)))
    y = torch.arange(30, dtype=torch.float64).unsqueeze(-1) + Source(7).normal(30, 1)
    robust = with_clutter(model, 0.01, 1e6 * torch.eye(1, dtype=torch.float64))
    missing = imm(robust, torch.where(torch.arange(30)[:, None] == 20, math.nan, y), prior)
    for size in (1e3, 1e9, 1e38):
        found = imm(robust, torch.where(torch.arange(30)[:, None] == 20, size, y), prior)
        close(found.mean, missing.mean, scale=100.0)
        assert float(without_clutter(found.log_mode_probability)[1][20]) > 0.999


def test_components_and_inputs_are_kept():
    g = Source(8)
    parts = [
        KalmanModel(g.normal(s, s), g.covariance(s), g.normal(1, s), g.covariance(1), D=g.normal(1, 2)) for s in (2, 3)
    ]
    T = torch.full((2, 2), 0.5, dtype=torch.float64)
    model = with_clutter(
        SwitchingModel.of(parts, transition=T, components=[(0, 1), (0, 1, 2)]), 0.1, torch.eye(1, dtype=torch.float64)
    )
    assert model.components == ((0, 1), (0, 1, 2), (0, 1), (0, 1, 2))
    assert model.D.shape == (4, 1, 2)
    assert not bool(model.D[2:].any())
