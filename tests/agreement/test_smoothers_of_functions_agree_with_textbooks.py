"""Smoothers of functions: linear ones are those of matrices, others textbooks', filterpy's and near to quadrature."""

import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from filterpy.kalman import MerweScaledSigmaPoints, UnscentedKalmanFilter
from torch.func import jacrev
from torch.utils._pytree import tree_leaves

from gradlogz import KalmanModel, Prior, Series, smooth
from gradlogz.filters import NonlinearModel, Smoothed, range_bearing, unknown_turn, wrap_angles
from support.smoother_oracles import near, smoothed_by_definition
from support.switching_oracles import F64, beginning, chain, observed, positive, same, system

METHODS = ("imm", "gpb2", "kim")
each = pytest.mark.parametrize("method", METHODS)
ours = pytest.mark.parametrize("method", ["imm", "gpb2"])
both = pytest.mark.parametrize("way", ["ekf", "ukf"])


def modes_of(model):
    """The Kalman model of each mode."""
    fields = {n: getattr(model, n) for n in ("F", "Q", "H", "R", "b", "d", "B", "D") if getattr(model, n) is not None}
    return [KalmanModel(**{n: t[j] for n, t in fields.items()}) for j in range(model.modes)]


def alike(found, expected, tolerance):
    for name, a, e in zip(Smoothed._fields[:-1], found[:-1], expected[:-1], strict=True):
        size = 1 + float(e[e.isfinite()].abs().max())
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}")


# Linear functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"method": m} for m in (*METHODS, "enumerate")] + [{"lag": 2}], ids=str)
@pytest.mark.parametrize(("way", "more"), [("ekf", {}), ("ukf", {}), ("ukf", {"alpha": 0.5, "kappa": -1.0})])
def test_linear_functions_are_smoothed_as_matrices_are(options, way, more):
    """All that is reported, with gaps, offsets and inputs, for many targets."""
    linear = system(2, 3, 2, B=torch.randn(2, 3, 1, dtype=F64), D=torch.randn(2, 2, 1, dtype=F64))
    model = NonlinearModel.of(modes_of(linear), transition=linear.transition, method=way, input_size=1, **more)
    y, u, start = observed(linear, 5, 3), torch.randn(3, 5, 1, dtype=F64), beginning(2, 3)
    y[0, 1], y[1, 2, 0] = torch.nan, torch.nan
    found, expected = (smooth(m, Series(y, inputs=u), start, **options) for m in (model, linear))
    alike(found, expected, 1e-11 if way == "ekf" else 1e-10)
    same(found.filtered, expected.filtered, 10.0, tolerance=1e-12 if way == "ekf" else 1e-10)


@both
def test_linear_functions_without_noise_are_conditioned_on_all(way):
    """Covariances that stay singular: one direction is known from the beginning, and nothing diffuses."""
    linear = system(1, 3, 1, offsets=False)
    still = modes_of(linear)[0]._replace(Q=torch.zeros(3, 3, dtype=F64))
    model = NonlinearModel.of([still], transition=torch.ones(1, 1, dtype=F64), method=way)
    half = torch.randn(3, 2, dtype=F64)
    start, y = Prior(torch.randn(3, dtype=F64), half @ half.mT), observed(linear, 4)
    changed = {n: getattr(linear, n) for n in ("F", "H", "R")}
    expected = smoothed_by_definition(type(linear)(linear.transition, Q=0 * linear.Q, **changed), y, start)
    for method in ("imm", "gpb2"):
        for name, error in near(smooth(model, y, start, method=method), expected, but=("log_likelihood",)).items():
            assert error < 1e-10, f"{name}: {error:.3g}"


# Rauch, Tung and Striebel's smoother of functions, from a textbook, in numpy -----------------------------------------


def by_tangent(f, m, P, residual):
    """Mean of f, what its covariance is but for noise, and that of x with f."""
    x = torch.as_tensor(m)
    A = jacrev(f)(x).numpy()
    return f(x).numpy(), A @ P @ A.T, P @ A.T


def by_sigma_points(f, m, P, residual, alpha=1.0, beta=2.0, kappa=0.0):
    """The same by 2 n + 1 points and their weights.   [wan00]"""
    n = len(m)
    scale = alpha**2 * (n + kappa) - n
    L = np.linalg.cholesky((n + scale) * P)
    points = np.stack([m, *(m + L.T), *(m - L.T)])
    w = np.full(2 * n + 1, 1 / (2 * (n + scale)))
    w_mean, w_covariance = w.copy(), w.copy()
    w_mean[0], w_covariance[0] = scale / (n + scale), scale / (n + scale) + 1 - alpha**2 + beta
    values = np.stack([f(torch.as_tensor(p)).numpy() for p in points])
    values = values[0] + residual(values, values[0])
    mean = w_mean @ values
    away = values - mean
    return mean, (w_covariance[:, None] * away).T @ away, (w_covariance[:, None] * (points - m)).T @ away


MOMENTS = {"ekf": by_tangent, "ukf": by_sigma_points}


def textbook(model, history, y, mean, covariance, **options):
    """Smoothed means, covariances and lag covariances of times 0 ... T along one history of modes, and log p(y).

    Forward m' = E f, P' = cov f + Q, C = cov(x, f); then m + K v; back m + G (m^s - m'), P + G (P^s - P') G^T with
    G = C P'^-1, and cov(x_t, x_t-1) = P^s_t G^T.
    """
    through = MOMENTS[model.method]
    given = model.residual or (lambda a, b: a - b)

    def residual(a, b):
        a, b = np.broadcast_arrays(a, b)
        pairs = zip(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), strict=True)
        return np.stack([given(*map(torch.tensor, p)).numpy() for p in pairs]).reshape(a.shape)

    def difference(a, b):
        return a - b

    means, covariances, ahead, log_likelihood = [mean.numpy()], [covariance.numpy()], [], 0.0
    for j, z in zip(history, y.numpy(), strict=True):
        m, S, C = through(model.functions("move")[j], means[-1], covariances[-1], difference, **options)
        P = S + model.Q[j].numpy()
        ahead.append((m, P, C))
        if not np.isnan(z).any():
            e, S, D = through(model.functions("observe")[j], m, P, residual, **options)
            S = S + model.R[j].numpy()
            K, v = D @ np.linalg.inv(S), residual(z, e)
            log_likelihood += scipy.stats.multivariate_normal.logpdf(v, None, S)
            m, P = m + K @ v, P - K @ S @ K.T
        means.append(m)
        covariances.append(P)
    lags = []
    for t in range(len(ahead) - 1, -1, -1):
        m, P, C = ahead[t]
        G = C @ np.linalg.inv(P)
        lags.insert(0, covariances[t + 1] @ G.T)
        means[t] = means[t] + G @ (means[t + 1] - m)
        covariances[t] = covariances[t] + G @ (covariances[t + 1] - P) @ G.T
    return np.stack(means), np.stack(covariances), np.stack(lags), log_likelihood


RADAR = range_bearing(0, 2, origin=(-3.0, 1.0))
TURN = unknown_turn(2, dt=0.7, spectral_density=0.1, rate_density=0.02, observation_variance=1.0, dtype=F64)
NOISE = torch.diag(torch.tensor([0.2, 0.01], dtype=F64))
START = Prior(
    torch.tensor([4.0, 1.0, 3.0, -0.5, 0.3], dtype=F64), torch.diag(torch.tensor([0.5, 0.2, 0.5, 0.2, 0.1], dtype=F64))
)


def seen(steps=12):
    """What the radar sees of a target on a circle; half of it is behind the radar, where bearings jump."""
    t = torch.arange(1, steps + 1, dtype=F64)
    path = torch.stack((4 + 3 * torch.sin(0.3 * t), 0 * t, 3 * torch.cos(0.3 * t), 0 * t, 0 * t), -1)
    y = torch.stack([RADAR(x) for x in path])
    return y + torch.tensor([0.3, 0.05], dtype=F64) * torch.randn(steps, 2, dtype=F64)


def tracked(way, modes=1, **options):
    mode = TURN._replace(observe=RADAR, R=NOISE)
    louder = mode._replace(Q=4 * mode.Q, R=2 * mode.R)
    T = torch.ones(1, 1, dtype=F64) if modes == 1 else chain(2)
    return NonlinearModel.of([mode, louder][:modes], transition=T, method=way, residual=wrap_angles(1), **options)


@pytest.mark.parametrize("method", [*METHODS, "enumerate"])
@both
def test_one_mode_is_the_textbooks_smoother(method, way):
    model, y = tracked(way), seen()
    y[4] = torch.nan
    found = smooth(model, y, START, method=method)
    means, covariances, lags, log_likelihood = textbook(model, [0] * len(y), y, *tree_leaves(START))
    np.testing.assert_allclose(found.mean, means[1:], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.covariance, covariances[1:], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.previous_mean[:, 0], means[:-1], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.previous_covariance[:, 0], covariances[:-1], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.lag_covariance[:, 0], lags, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.initial_mode_mean[0], means[0], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.initial_mode_covariance[0], covariances[0], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.filtered.log_likelihood, log_likelihood, rtol=0, atol=1e-10)


def wrapped(a, b):
    return wrap_angles(1)(torch.as_tensor(a), torch.as_tensor(b)).numpy()


@pytest.mark.parametrize(("alpha", "beta", "kappa"), [(1.0, 2.0, 0.0), (0.5, 2.0, -2.0), (0.1, 1.0, 1.0)])
def test_sigma_points_are_smoothed_as_by_filterpy(alpha, beta, kappa):
    model, y = tracked("ukf", alpha=alpha, beta=beta, kappa=kappa), seen()
    other = UnscentedKalmanFilter(
        5,
        2,
        0.7,
        hx=lambda x: RADAR(torch.as_tensor(x)).numpy(),
        fx=lambda x, dt: TURN.move(torch.as_tensor(x)).numpy(),
        points=MerweScaledSigmaPoints(5, alpha=alpha, beta=beta, kappa=kappa),
        residual_z=wrapped,
    )
    other.x, other.P = START.mean.numpy().copy(), START.covariance.numpy().copy()
    other.Q, other.R = model.Q[0].numpy(), model.R[0].numpy()
    m, P = other.batch_filter(y.numpy())
    m, P, _ = other.rts_smoother(m, P)
    for method in METHODS:
        found = smooth(model, y, START, method=method)
        np.testing.assert_allclose(found.mean, m, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.covariance, P, rtol=0, atol=1e-9)


# Every history, by the textbook --------------------------------------------------------------------------------------


def swing(x):
    return torch.stack((x[0] + 0.3 * x[1], x[1] - 0.3 * torch.sin(x[0])), -1)


def fall(x):
    return torch.stack((x[0] + 0.3 * x[1], 0.8 * x[1] + 0.1 * x[0] * x[1]), -1)


def look(x):
    return torch.stack((torch.sin(x[0]) + 0.2 * x[1] ** 2,), -1)


def curved(way):
    """A pendulum that may lose its string."""
    Q, R = positive(2, 2, scale=0.1), positive(2, 1, scale=0.2)
    return NonlinearModel(chain(2), (swing, fall), Q, look, R, method=way)


def enumerated(model, y, start):
    """The mixture of all histories, each by the textbook: what `Smoothed` says of time t and t - 1."""
    k, T = model.modes, model.transition.numpy()
    rows = []
    for history in itertools.product(range(k), repeat=len(y) + 1):
        i = history[0]
        parts = textbook(model, history[1:], y, start.mean[i], start.covariance[i])
        prior = sum(np.log(T[a, b]) for a, b in itertools.pairwise(history))
        rows.append((history, float(start.log_mode_probability[i]) + prior + parts[3], *parts[:3]))
    logs = np.array([row[1] for row in rows])
    w = scipy.special.softmax(logs)
    found = {"log_likelihood": scipy.special.logsumexp(logs)}
    for name in ("mean", "mode_mean", "mode_covariance", "log_mode_probability", "previous_mean", "lag_covariance"):
        found[name] = []
    for t in range(1, len(y) + 1):
        modes = np.array([row[0][t] for row in rows])
        m, before = (np.stack([row[2][n] for row in rows]) for n in (t, t - 1))
        P, lag = np.stack([row[3][t] for row in rows]), np.stack([row[4][t - 1] for row in rows])
        shares = [np.where(modes == j, w, 0) / w[modes == j].sum() for j in range(k)]
        centers, earlier = [r @ m for r in shares], [r @ before for r in shares]
        found["mean"].append(w @ m)
        found["mode_mean"].append(np.stack(centers))
        found["previous_mean"].append(np.stack(earlier))
        found["log_mode_probability"].append(np.log([w[modes == j].sum() for j in range(k)]))
        found["mode_covariance"].append(
            [
                np.einsum("n,nab->ab", r, P) + (r[:, None] * (m - c)).T @ (m - c)
                for r, c in zip(shares, centers, strict=True)
            ]
        )
        found["lag_covariance"].append(
            [
                np.einsum("n,nab->ab", r, lag) + (r[:, None] * (m - c)).T @ (before - b)
                for r, c, b in zip(shares, centers, earlier, strict=True)
            ]
        )
    return {name: torch.as_tensor(np.asarray(part)) for name, part in found.items()}


@both
def test_every_history_is_smoothed_by_itself(way):
    model, start = curved(way), beginning(2)
    y = torch.randn(4, 1, dtype=F64)
    y[2] = torch.nan
    expected = enumerated(model, y, start)
    found = smooth(model, y, start, method="enumerate")
    for name, error in near(found, expected, but=("log_likelihood",)).items():
        assert error < 1e-10, f"{name}: {error:.3g}"
    torch.testing.assert_close(found.filtered.log_likelihood, expected["log_likelihood"], rtol=0, atol=1e-10)


@ours
@both
def test_one_observation_is_smoothed_as_by_every_history(method, way):
    """From a Gaussian for each mode: nothing is collapsed before it is asked for."""
    model, start = curved(way), beginning(2)
    y = torch.randn(1, 1, dtype=F64)
    expected = enumerated(model, y, start)
    for name, error in near(smooth(model, y, start, method=method), expected, but=("log_likelihood",)).items():
        assert error < 1e-10, f"{name}: {error:.3g}"


# The law itself, on a grid -------------------------------------------------------------------------------------------


def on_a_grid(model, y, mean, variance, cells=801, reach=6.0):
    """Filtered and smoothed means and mode probabilities of a scalar system of two modes, by sums over a grid.

    p(x_t, s_t | past) forward and p(future | x_t, s_t) back, both as densities on the grid: no Gaussian is assumed.
    """
    x = torch.linspace(-reach, reach, cells, dtype=F64)
    h, k = float(x[1] - x[0]), model.modes

    def normal(away, v):
        return torch.exp(-(away**2) / (2 * v)) / math.sqrt(2 * math.pi * v)

    K = [normal(x[None] - model.functions("move")[j](x[:, None]), float(model.Q[j])) * h for j in range(k)]
    see = [normal(y - model.functions("observe")[j](x[:, None])[:, 0], float(model.R[j])) for j in range(k)]  # [t, x]
    prior = normal(x - mean, variance) * h
    now = torch.stack([prior / k] * k)
    forward = []
    for t in range(len(y)):
        mixed = model.transition.mT @ now
        now = torch.stack([(mixed[j] @ K[j]) * see[j][t] for j in range(k)])
        now = now / now.sum()
        forward.append(now)
    back, later = [], torch.ones(k, cells, dtype=F64)
    for t in range(len(y) - 1, -1, -1):
        back.insert(0, later)
        heard = torch.stack([K[j] @ (see[j][t] * later[j]) for j in range(k)])
        later = model.transition @ heard
        later = later / later.max()

    def moments(weights):
        w = weights / weights.sum((-2, -1), keepdim=True)
        return (w * x).sum((-2, -1)), w.sum(-1)

    return moments(torch.stack(forward)), moments(torch.stack(forward) * torch.stack(back))


def bent(x):
    return x + 0.3 * torch.sin(x)


def damped(x):
    return 0.6 * x + 0.4 * torch.cos(x)


def cubed(x):
    return x + 0.05 * x**3


@both
@ours
def test_it_is_near_to_the_law_on_a_grid(method, way):
    """Less than a third of what later observations change is missed, in state and in mode.

    Here 0.024 (tangents) and 0.012 (sigma points) of 0.107, and 0.027 and 0.019 of 0.115.
    """
    Q, R = torch.tensor([0.05, 0.3], dtype=F64).view(2, 1, 1), torch.full((2, 1, 1), 0.2, dtype=F64)
    T = torch.tensor([[0.85, 0.15], [0.25, 0.75]], dtype=F64)
    model = NonlinearModel(T, (bent, damped), Q, cubed, R, method=way)
    g, x, j, y = torch.Generator().manual_seed(3), torch.zeros(1, dtype=F64), 0, []
    for _ in range(25):
        j = int(torch.multinomial(T[j], 1, generator=g))
        x = model.functions("move")[j](x) + Q[j, 0].sqrt() * torch.randn(1, dtype=F64, generator=g)
        y.append(cubed(x) + R[j, 0].sqrt() * torch.randn(1, dtype=F64, generator=g))
    y = torch.stack(y)
    (before, before_modes), (mean, modes) = on_a_grid(model, y, 0.0, 1.0)
    found = smooth(model, y, Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64)), method=method)

    def far(a, b):
        return float((a - b).square().mean().sqrt())

    assert 3 * far(found.mean[:, 0], mean) < far(before, mean)
    assert 3 * far(found.log_mode_probability.exp(), modes) < far(before_modes, modes)
