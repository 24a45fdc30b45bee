"""The compiled E step of one mode: moments of the joint Gaussian of all states, and sums of smoothed fields."""

import numpy as np
import pytest
import torch

from gradlogz import Prior, SwitchingModel, fit, smooth
from gradlogz.kernels.filters import dispatch
from gradlogz.kernels.filters.one_mode import moments
from support.measure_registry import Source
from support.scales import close

F64 = torch.float64


def system(seed, n, t, *, s=3, o=2, is_singular=False):
    g = Source(seed)
    F = 0.9 * torch.linalg.qr(g.normal(s, s)).Q
    Q, P = 0.3 * g.covariance(s), g.covariance(n, s)
    if is_singular:
        Q[-1], Q[:, -1], P[:, 0], P[:, :, 0] = 0.0, 0.0, 0.0, 0.0
    return (F, Q, g.normal(o, s), g.covariance(o), g.normal(s), g.normal(o)), g.normal(n, s), P, g.normal(n, t, o)


@pytest.mark.parametrize("is_singular", [False, True])
def test_moments_are_those_of_the_joint_gaussian(is_singular):
    """All states and observations as one Gaussian vector, conditioned by solving one linear system."""
    (F, Q, H, R, b, d), mean, P, y = system(0, 1, 5, is_singular=is_singular)
    n, s, o = 5, 3, 2
    # States are a linear map of (x_0, w_1 ... w_5), which are independent
    maps = [np.eye(s, s * (n + 1))]
    shift = [mean[0].numpy()]
    for t in range(1, n + 1):
        drive = np.zeros((s, s * (n + 1)))
        drive[:, s * t : s * (t + 1)] = np.eye(s)
        maps.append(F.numpy() @ maps[-1] + drive)
        shift.append(F.numpy() @ shift[-1] + b.numpy())
    noise = np.kron(np.eye(n + 1), Q.numpy())
    noise[:s, :s] = P[0].numpy()
    A, c = np.concatenate(maps), np.concatenate(shift)
    C = A @ noise @ A.T
    G = np.kron(np.eye(n), H.numpy())
    seen = y[0].numpy().reshape(-1) - (G @ c[s:] + np.tile(d.numpy(), n))
    S = G @ C[s:, s:] @ G.T + np.kron(np.eye(n), R.numpy())
    gain = np.linalg.solve(S, G @ C[s:]).T
    m, V = c + gain @ seen, C - gain @ G @ C[s:]
    second = V + np.outer(m, m)
    block = lambda i, j: second[s * i : s * (i + 1), s * j : s * (j + 1)]  # noqa: E731
    x = m.reshape(n + 1, s)
    expected = {
        "x": x[1:].sum(0), "xx": sum(block(t, t) for t in range(1, n + 1)), "p": x[:-1].sum(0),
        "xp": sum(block(t, t - 1) for t in range(1, n + 1)), "pp": sum(block(t, t) for t in range(n)),
        "yx": y[0].numpy().T @ x[1:], "initial_mean": x[:1], "initial_second": block(0, 0),
        "log_likelihood": -(seen @ np.linalg.solve(S, seen) + np.linalg.slogdet(2 * np.pi * S)[1]) / 2,
    }  # fmt: skip
    result = moments((F, Q, H, R, b, d), mean, P, y)
    for name, value in expected.items():
        close(getattr(result, name), torch.as_tensor(value, dtype=F64), scale=100.0)
    assert o == 2


def test_long_series_whose_covariances_converge_have_the_moments_of_the_smoother():
    model, mean, P, y = system(1, 3, 400)
    result = moments(model, mean, P, y)
    F, Q, H, R, b, d = (t.unsqueeze(0) for t in model)
    switching = SwitchingModel(torch.ones(1, 1, dtype=F64), F, Q, H, R, b, d)
    whole = smooth(switching, y, Prior(mean, P, per="target"))
    m, before = whole.mode_mean.squeeze(-2), whole.previous_mean.squeeze(-2)

    def second(left, right, covariance):
        return torch.einsum("nts,ntr->sr", left, right) + covariance.squeeze(-3).sum((0, 1))

    close(result.x, m.sum((0, 1)), scale=1e3)
    close(result.xx, second(m, m, whole.mode_covariance), scale=1e4)
    close(result.xp, second(m, before, whole.lag_covariance), scale=1e4)
    close(result.pp, second(before, before, whole.previous_covariance), scale=1e4)
    close(result.yx, torch.einsum("nto,nts->os", y, m), scale=1e4)
    close(result.initial_mean, whole.initial_mode_mean.squeeze(-2), scale=10.0)
    close(result.log_likelihood, whole.filtered.log_likelihood.sum(), scale=1e4)


@pytest.mark.parametrize("learn", [["F", "Q", "H", "R"], ["b", "d", "initial"]])
def test_rounds_of_em_are_those_of_the_torch_path(learn, monkeypatch):
    model, mean, P, y = system(2, 2, 60)
    F, Q, H, R, b, d = (t.unsqueeze(0) for t in model)
    start = SwitchingModel(torch.ones(1, 1, dtype=F64), F, 2 * Q, H, 2 * R, b, d)
    options = {"learn": learn, "method": "em", "max_iterations": 3}
    prior = Prior(mean[0], P[0])
    one = fit(start, y, prior, **options)
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", float("inf"))
    other = fit(start, y, prior, **options)
    close(one.history, other.history, scale=1e3)
    for name in learn:
        if name != "initial":
            close(getattr(one.model, name), getattr(other.model, name), scale=10.0, tolerance=1e-11)
    close(one.prior.covariance, other.prior.covariance, scale=10.0, tolerance=1e-11)


def test_numbers_that_are_not_finite_are_left_to_the_smoother():
    (F, *rest), mean, P, y = system(3, 1, 30)
    assert moments((1e200 * F, *rest), mean, P, y) is None
