"""Fits say converged only where little is left to gain: the distance to the maximum is small in standard errors."""

import dataclasses
import math

import pytest
import torch

from gradlogz import Prior, SwitchingModel, fit, gpb2
from gradlogz.filters.fitting.em import remaining_gain
from gradlogz.filters.fitting.lbfgs import ascend

F64 = torch.float64
PRIOR = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))


def walk(k=1, q=(0.02, 1.0), r=0.25):
    """Random walks with noise: k modes that differ in the variance of their steps."""
    one = torch.ones(k, 1, 1, dtype=F64)
    transition = torch.tensor([[1.0]] if k == 1 else [[0.9, 0.1], [0.2, 0.8]], dtype=F64)
    return SwitchingModel(transition, one, torch.tensor(q[:k], dtype=F64)[:, None, None], one, r * one)


def drawn(model, n, t):
    g = torch.Generator().manual_seed(4)
    mode, x, y = torch.randint(model.modes, (n,), generator=g), torch.zeros(n, dtype=F64), []
    for _ in range(t):
        mode = torch.multinomial(model.transition[mode], 1, generator=g).squeeze(-1)
        x = x + model.Q[mode, 0, 0].sqrt() * torch.randn(n, dtype=F64, generator=g)
        y.append(x + model.R[0, 0, 0].sqrt() * torch.randn(n, dtype=F64, generator=g))
    return torch.stack(y, -1).unsqueeze(-1)


def distance(model, y):
    """Distance to the maximum in standard errors, sqrt(g^T I^-1 g), in log q of each mode and log r, by autograd."""
    k = model.modes

    def value(log_noise):
        Q, R = log_noise[:k, None, None].exp(), log_noise[k:, None, None].exp().expand(k, 1, 1)
        return gpb2(dataclasses.replace(model, Q=Q, R=R, validate=False), y, PRIOR).log_likelihood.sum()

    at = torch.cat((model.Q[:, 0, 0], model.R[:1, 0, 0])).log()
    information = -torch.autograd.functional.hessian(value, at)
    gradient = torch.autograd.functional.jacobian(value, at)
    return float(gradient @ torch.linalg.solve(information, gradient)) ** 0.5


def test_em_of_one_mode_ends_near_the_maximum_where_small_gains_do_not():
    """A gain below the tolerance comes when twice the allowed distance is left: EM gains little in many rounds."""
    y = drawn(walk(), 12, 40)
    start, options = walk(q=(0.5,), r=2.0), {"learn": ["Q", "R"], "method": "em"}
    found = fit(start, y, PRIOR, **options, tolerance=1e-5, max_iterations=1000)
    assert found.converged
    assert distance(found.model, y) < 0.1
    gains = found.history.diff()
    early = int((gains <= 1e-5 * 12 * 40).nonzero()[0]) + 1
    stopped = fit(start, y, PRIOR, **options, max_iterations=early)
    assert not stopped.converged
    assert distance(stopped.model, y) > 0.2


@pytest.mark.parametrize(("series", "steps"), [(200, 30), (50, 120)])
def test_em_of_two_modes_ends_near_its_fixed_point(series, steps):
    """The best model of 2,000 further rounds is near. An approximate smoother's fixed point is not the maximum."""
    y = drawn(walk(2), series, steps)
    start, options = walk(2, q=(0.1, 2.0), r=0.5), {"shared": ["R"], "method": "em"}
    found = fit(start, y, PRIOR, **options, tolerance=1e-5, max_iterations=1000)
    assert found.converged
    later = fit(found.model, y, PRIOR, **options, tolerance=0.0, max_iterations=2000)
    maximum = fit(start, y, PRIOR, shared=["R"], errors=True)
    for name, error in maximum.standard_error.items():
        at, end = (getattr(fitted.model, name) for fitted in (found, later))
        assert torch.isfinite(error).all(), name
        assert ((at - end) / error).abs().max() < 0.1, name


@pytest.mark.parametrize("k", [1, 2])
def test_gradient_ascent_ends_near_the_maximum(k):
    y = drawn(walk(k), 20, 20)
    learn = {"learn": ["Q", "R"], "shared": ["R"]}
    found = fit(walk(k, q=(0.5, 2.0), r=2.0), y, PRIOR, **learn, tolerance=1e-5)
    assert found.converged
    assert distance(found.model, y) < 0.1
    stopped = fit(walk(k, q=(0.5, 2.0), r=2.0), y, PRIOR, **learn, max_iterations=2)
    assert not stopped.converged


def test_what_em_still_gains_is_the_rest_of_a_geometric_series():
    for c in (0.3, 0.9, 0.99):
        history = [-(c**n) for n in range(9)]
        assert remaining_gain(history) == pytest.approx(c**8, rel=1e-9)
    assert remaining_gain([-4.0, -3.0, -2.5]) == math.inf
    assert remaining_gain([-5.0, -4.0, -3.0, -2.0, -1.0]) == math.inf
    assert remaining_gain([-1.0] * 5) == 0.0


def test_ascents_find_the_maximum_of_a_bent_valley_and_avoid_what_is_not_finite():
    """Rosenbrock's function upside down, and a logarithm whose domain ends; gradients by hand."""

    def valley(x):
        a, b = 1 - x[0], x[1] - x[0] ** 2
        return float(-(a**2) - 100 * b**2), torch.stack((2 * a + 400 * x[0] * b, -200 * b))

    end = ascend(valley, torch.tensor([-1.2, 1.0], dtype=F64), enough=1e-12, max_iterations=200, report=lambda *_: None)
    assert end.converged
    torch.testing.assert_close(end.best.place, torch.ones(2, dtype=F64), rtol=0, atol=1e-5)
    assert all(b >= a for a, b in zip(end.history, end.history[1:], strict=False))

    def barrier(x):  # log x - x / 10, NaN below 0
        return float(x.log() - x / 10), 1 / x - 0.1

    end = ascend(barrier, torch.tensor([0.01], dtype=F64), enough=1e-12, max_iterations=100, report=lambda *_: None)
    assert end.converged
    torch.testing.assert_close(end.best.place, torch.tensor([10.0], dtype=F64), rtol=1e-5, atol=0)
