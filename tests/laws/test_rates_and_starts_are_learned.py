"""Rates of a generator, and initial means of all series or of each, are learned by both methods."""

import dataclasses

import numpy as np
import pytest
import scipy.linalg
import torch

from gradlogz import Prior, Series, SwitchingModel, fit
from gradlogz.filters import Clutter, Generator, enumerate_modes
from support.measure_registry import Source
from support.scales import close

F64 = torch.float64
RATE = torch.tensor([[-0.7, 0.5, 0.2], [0.3, -0.3, 0.0], [0.4, 0.6, -1.0]], dtype=F64)


def switching_levels(seed, n, t, *, rate=RATE):
    """A model whose observations show the mode nearly, and series of it at irregular times, by its definition."""
    g, draw = Source(seed), np.random.default_rng(seed)
    k = len(rate)
    one = torch.ones(k, 1, 1, dtype=F64)
    model = SwitchingModel(
        Generator(rate), F=-1.0 * one, Q=0.3 * one, H=one, R=0.2 * one, d=3.0 * torch.arange(k, dtype=F64).unsqueeze(-1)
    )
    dt = 0.2 + torch.rand(n, t, dtype=F64, generator=torch.Generator().manual_seed(seed))
    mode, x, series = draw.integers(k, size=n), np.zeros(n), []
    for step in dt.T.numpy():
        P = [scipy.linalg.expm(rate.numpy() * h) for h in step]
        mode = np.array([draw.choice(k, p=p[i]) for p, i in zip(P, mode, strict=True)])
        x = np.exp(-step) * x + np.sqrt(0.15 * (1 - np.exp(-2 * step))) * draw.normal(size=n)
        series.append(x + 3.0 * mode + np.sqrt(0.2) * draw.normal(size=n))
    y = torch.from_numpy(np.stack(series, 1)).unsqueeze(-1)
    prior = Prior(torch.zeros(1, dtype=F64), 0.15 * torch.eye(1, dtype=F64))
    return model, Series(y, times=dt.cumsum(-1)), prior, dt, g


def test_a_round_of_em_is_expected_switches_over_expected_times():
    """Integrals over each interval by quadrature; pairs of modes from derivatives of the exact likelihood."""
    model, series, prior, dt, _ = switching_levels(0, 3, 3)
    steps = model.at(dt)
    P = steps.transition.clone().requires_grad_()
    exact = enumerate_modes(dataclasses.replace(steps, transition=P, validate=False), series.observations, prior)
    (slope,) = torch.autograd.grad(exact.filtered.log_likelihood.sum(), P)
    pairs = (P * slope).detach().numpy()
    nodes, weights = np.polynomial.legendre.leggauss(20)
    switches, rate = np.zeros((3, 3)), RATE.numpy()
    for h, pair in zip(dt.flatten().numpy(), pairs.reshape(-1, 3, 3), strict=True):
        ratio = pair / np.maximum(scipy.linalg.expm(rate * h), 1e-300)
        for u, w in zip((nodes + 1) * h / 2, weights * h / 2, strict=True):
            before, after = scipy.linalg.expm(rate * u), scipy.linalg.expm(rate * (h - u))
            switches += w * np.einsum("ij,ia,bj->ab", ratio, before, after)
    want = np.where(np.eye(3), 0.0, rate * switches / np.diag(switches)[:, None])
    want -= np.diag(want.sum(1))
    options = {"learn": ["rate"], "method": "em", "smoother": "enumerate", "max_iterations": 1}
    found = fit(model, series, prior, **options)
    close(found.model.transition.rate, torch.from_numpy(want), tolerance=1e-11)
    assert float(found.history.diff()) > 0
    assert float(found.model.transition.rate[1, 2]) == 0.0
    never = fit(model, series, prior, clutter=Clutter(0.0, torch.eye(1)), **options)
    close(never.model.transition.rate, torch.from_numpy(want), tolerance=1e-11)


def test_both_methods_find_the_rates_within_their_standard_errors():
    rate = torch.tensor([[-0.2, 0.2], [0.6, -0.6]], dtype=F64)
    truth, series, prior, *_ = switching_levels(1, 60, 40, rate=rate)
    start = dataclasses.replace(truth, transition=Generator(torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=F64)))
    scales = {"structure": {"R": "scale"}, "tolerance": 1e-6}
    ends = [fit(start, series, prior, learn=["rate", "R"], method=m, errors=True, **scales) for m in ("em", "gradient")]
    for found in ends:
        assert found.converged
        error = (found.model.transition.rate - rate).abs()
        assert bool((error < 4 * found.standard_error["rate"]).all())
        assert float(found.standard_error["rate"].max()) < 0.1
    em, gradient = (found.model.transition.rate for found in ends)
    assert bool(((em - gradient).abs() < 0.3 * ends[1].standard_error["rate"]).all())


def path(seed, n, t):
    """A random walk that is observed with noise, from a start of its own for each series."""
    g = Source(seed)
    one = torch.ones(1, 1, 1, dtype=F64)
    model = SwitchingModel(torch.ones(1, 1, dtype=F64), one, 0.5 * one, one, 0.3 * one)
    begin = 10 * g.normal(n, 1)
    x = begin + 0.5**0.5 * g.normal(n, t).cumsum(-1)
    return model, (x + 0.3**0.5 * g.normal(n, t)).unsqueeze(-1), begin


def joint(model, t, variance):
    """Covariance of the observations of one series about its initial mean."""
    q, r = float(model.Q), float(model.R)
    at = np.arange(1, t + 1)
    return variance + q * np.minimum.outer(at, at) + r * np.eye(t)


@pytest.mark.parametrize("method", ["em", "gradient"])
def test_starts_of_each_series_are_those_of_weighted_least_squares(method):
    """Known noise: the initial mean of a series is (1^T C^-1 y) / (1^T C^-1 1), with that variance."""
    n, t = 4, 6
    model, y, begin = path(2, n, t)
    prior = Prior(torch.zeros(n, 1, dtype=F64), 0.2 * torch.eye(1, dtype=F64), per="target")
    options = {"method": method, "tolerance": 1e-14, "max_iterations": 3000}
    found = fit(model, y, prior, learn=["initial_mean"], errors=True, **options)
    weight = np.linalg.solve(joint(model, t, 0.2), np.ones(t))
    close(found.prior.mean.flatten(), torch.from_numpy(y[..., 0].numpy() @ weight / weight.sum()), 10.0, tolerance=1e-6)
    errors = found.standard_error["initial_mean"].flatten()
    close(errors, torch.full((n,), weight.sum() ** -0.5, dtype=F64), tolerance=1e-6)
    assert bool(((found.prior.mean[:, 0] - begin).abs().flatten() < 4 * errors).all())
    shared = Prior(torch.zeros(1, dtype=F64), 0.2 * torch.eye(1, dtype=F64))
    one = fit(model, y, shared, learn=["initial_mean"], **options)
    close(one.prior.mean.flatten(), found.prior.mean.mean(0).flatten(), 10.0, tolerance=1e-6)


def test_series_may_begin_in_different_places():
    """A prior for each series: the likelihood, and what is learned, are those of shifted series with one prior."""
    g = Source(3)
    one = torch.ones(2, 1, 1, dtype=F64)
    T = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
    model = SwitchingModel(T, one, one * torch.tensor([0.1, 2.0], dtype=F64)[:, None, None], one, 0.3 * one)
    y = g.normal(2, 6, 15, 1).cumsum(-2)
    shift = 100 * g.normal(2, 6, 1)
    zero, unit = torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64)
    for method in ("em", "gradient"):
        options = {"method": method, "learn": ["transition", "Q", "R"], "max_iterations": 4}
        together = fit(model, y, Prior(zero, unit), **options)
        apart = fit(model, y + shift.unsqueeze(-2), Prior(shift, unit, per="target"), **options)
        close(apart.history, together.history, 100.0, tolerance=1e-9)
        for name in ("transition", "Q", "R"):
            close(getattr(apart.model, name), getattr(together.model, name), tolerance=1e-7)
        assert apart.prior.mean.shape == (2, 6, 2, 1)


def test_standard_errors_of_enumeration_are_those_of_the_exact_likelihood():
    """Second derivatives of the enumerated likelihood in log R, by finite differences of its values."""
    g = Source(4)
    one = torch.ones(2, 1, 1, dtype=F64)
    T = torch.tensor([[0.6, 0.4], [0.5, 0.5]], dtype=F64)
    model = SwitchingModel(T, 0.9 * one, one * torch.tensor([0.1, 16.0], dtype=F64)[:, None, None], one, 0.5 * one)
    y, prior = 2 * g.normal(3, 6, 1), Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    options = {"learn": ["R"], "shared": ["R"], "structure": {"R": "scale"}, "method": "em", "errors": True}
    ends = {
        m: fit(model, y, prior, smoother=m, tolerance=1e-12, max_iterations=500, **options)
        for m in ("enumerate", "gpb2")
    }
    found = ends["enumerate"]

    def value(shift):
        moved = dataclasses.replace(found.model, R=found.model.R * np.exp(shift))
        return float(enumerate_modes(moved, y, prior).filtered.log_likelihood.sum())

    h = 1e-3
    curvature = -(value(h) - 2 * value(0.0) + value(-h)) / h**2
    want = float(found.model.R[0]) / curvature**0.5
    assert float(found.standard_error["R"][0]) == pytest.approx(want, rel=1e-4)
    assert float(ends["gpb2"].standard_error["R"][0]) != pytest.approx(want, rel=1e-3)
