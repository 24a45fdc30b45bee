"""Systems of functions: linear ones are Kalman's, others filterpy's EKF and UKF, moments those of quadrature."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from filterpy.kalman import ExtendedKalmanFilter, IMMEstimator, MerweScaledSigmaPoints, UnscentedKalmanFilter
from torch.func import jacrev

from gradlogz import KalmanModel, Prior, Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import (
    NonlinearMode,
    NonlinearModel,
    constant_velocity,
    coordinated_turn,
    enumerate_modes,
    range_bearing,
    range_bearing_elevation,
    unknown_turn,
    wrap_angles,
)
from gradlogz.filters.models.nonlinear_model import root
from support.scales import close
from support.switching_oracles import F64, beginning, chain, observed, positive, same, system

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
both = pytest.mark.parametrize("way", ["ekf", "ukf"])


def run(model, method, y, start, **more):
    return SwitchingFilter(model, method[0], depth=method[1]).filter(Series(y, **more), start)


def modes_of(model):
    """The Kalman model of each mode."""
    names = ("F", "Q", "H", "R", "b", "d", "B", "D")
    fields = {n: getattr(model, n) for n in names if getattr(model, n) is not None}
    return [KalmanModel(**{n: t[j] for n, t in fields.items()}) for j in range(model.modes)]


@each
@pytest.mark.parametrize(("way", "options"), [("ekf", {}), ("ukf", {}), ("ukf", {"alpha": 0.3, "kappa": -1.0})])
def test_linear_functions_are_the_kalman_filter(method, way, options):
    """All that is reported, with gaps, offsets and inputs, for many targets."""
    linear = system(3, 4, 2, B=torch.randn(3, 4, 1, dtype=F64), D=torch.randn(3, 2, 1, dtype=F64))
    model = NonlinearModel.of(modes_of(linear), transition=linear.transition, method=way, input_size=1, **options)
    y, u, start = observed(linear, 5, 4), torch.randn(4, 5, 1, dtype=F64), beginning(3, 4)
    y[0, 1], y[1, 2, 0] = torch.nan, torch.nan
    found, expected = run(model, method, y, start, inputs=u), run(linear, method, y, start, inputs=u)
    same(found, expected, 10.0, tolerance=1e-12 if way == "ekf" else 1e-10)


@both
def test_linear_functions_are_enumerated_as_matrices_are(way):
    linear, start = system(2), beginning(2)
    model = NonlinearModel.of(modes_of(linear), transition=linear.transition, method=way)
    y = observed(linear, 4)
    same(enumerate_modes(model, y, start).filtered, enumerate_modes(linear, y, start).filtered, 10.0)


@both
def test_noise_and_chains_may_change_in_time(way):
    linear, start = system(2, lead=(4,)), beginning(2)
    steps = [{n: getattr(linear, n)[t] for n in ("F", "Q", "H", "R", "b", "d")} for t in range(4)]
    T = torch.stack([chain(2) for _ in range(4)])
    fixed = {n: linear.F[0] if n == "F" else getattr(linear, n)[0] for n in ("F", "H", "b", "d")}
    changing = SwitchingModel(T, fixed["F"], linear.Q, fixed["H"], linear.R, fixed["b"], fixed["d"])
    parts = [KalmanModel(*(steps[0][n][j] for n in ("F", "Q", "H", "R", "b", "d"))) for j in range(2)]
    once = NonlinearModel.of(parts, transition=T[0], method=way)
    model = NonlinearModel(T, once.move, linear.Q, once.observe, linear.R, method=way)
    y = observed(linear, 4)
    same(imm(model, y, start), imm(changing, y, start), 10.0)
    online = SwitchingFilter(model)
    state = online.init(start)
    for t in range(4):
        state, now = online.step(state, y[t], time=t)
    close(now.mean, imm(changing, y, start).mean[-1], 100.0)


# A target that turns, seen by a radar -------------------------------------------------------------------------------

RADAR = range_bearing(0, 2, origin=(-3.0, 1.0))
NOISE = torch.diag(torch.tensor([0.2, 0.01], dtype=F64))
TURN = unknown_turn(2, dt=0.7, spectral_density=0.1, rate_density=0.02, observation_variance=1.0, dtype=F64)
START = Prior(
    torch.tensor([4.0, 1.0, 3.0, -0.5, 0.3], dtype=F64), torch.diag(torch.tensor([0.5, 0.2, 0.5, 0.2, 0.1], dtype=F64))
)


def seen(steps=12):
    """What the radar sees of a target on a circle."""
    t = torch.arange(1, steps + 1, dtype=F64)
    path = torch.stack((4 + 3 * torch.sin(0.3 * t), 0 * t, 3 * torch.cos(0.3 * t), 0 * t, 0 * t), -1)
    y = torch.stack([RADAR(x) for x in path])
    return y + torch.tensor([0.3, 0.05], dtype=F64) * torch.randn(steps, 2, dtype=F64)


def tracked(way, modes=1, **options):
    mode = TURN._replace(observe=RADAR, R=NOISE)
    louder = mode._replace(Q=4 * mode.Q, R=2 * mode.R)
    T = torch.ones(1, 1, dtype=F64) if modes == 1 else chain(2)
    return NonlinearModel.of([mode, louder][:modes], transition=T, method=way, residual=wrap_angles(1), **options)


def wrapped(a, b):
    return wrap_angles(1)(torch.as_tensor(a), torch.as_tensor(b)).numpy()


def of_numpy(f):
    return lambda x: f(torch.as_tensor(x)).numpy()


def test_the_tangent_is_filterpys_extended_kalman_filter():
    model, y = tracked("ekf"), seen()
    found = imm(model, y, START)
    other = ExtendedKalmanFilter(dim_x=5, dim_z=2)
    other.x, other.P = START.mean.numpy().copy(), START.covariance.numpy().copy()
    other.Q, other.R = model.Q[0].numpy(), model.R[0].numpy()
    for t, z in enumerate(y.numpy()):
        x = torch.as_tensor(other.x)
        other.F = jacrev(TURN.move)(x).numpy()
        other.x, other.P = TURN.move(x).numpy(), other.F @ other.P @ other.F.T + other.Q
        np.testing.assert_allclose(found.predicted_mean[t], other.x, rtol=0, atol=1e-10)
        other.update(z, lambda x: jacrev(RADAR)(torch.as_tensor(x)).numpy(), of_numpy(RADAR), residual=wrapped)
        np.testing.assert_allclose(found.mean[t], other.x, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.covariance[t], other.P, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.innovation[t], other.y, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.step_log_likelihood[t], other.log_likelihood, rtol=0, atol=1e-9)


def of_filterpy(model, j, alpha, beta, kappa):
    """Mode j as filterpy's unscented filter."""
    other = UnscentedKalmanFilter(
        5,
        2,
        0.7,
        hx=of_numpy(RADAR),
        fx=lambda x, dt: TURN.move(torch.as_tensor(x)).numpy(),
        points=MerweScaledSigmaPoints(5, alpha=alpha, beta=beta, kappa=kappa),
        residual_z=wrapped,
    )
    other.x, other.P = START.mean.numpy().copy(), START.covariance.numpy().copy()
    other.Q, other.R = model.Q[j].numpy(), model.R[j].numpy()
    return other


@pytest.mark.parametrize(("alpha", "beta", "kappa"), [(1.0, 2.0, 0.0), (0.5, 2.0, -2.0), (0.1, 1.0, 1.0)])
def test_sigma_points_are_filterpys_unscented_kalman_filter(alpha, beta, kappa):
    model, y = tracked("ukf", alpha=alpha, beta=beta, kappa=kappa), seen()
    found = imm(model, y, START)
    other = of_filterpy(model, 0, alpha, beta, kappa)
    for t, z in enumerate(y.numpy()):
        other.predict()
        np.testing.assert_allclose(found.predicted_mean[t], other.x, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.predicted_covariance[t], other.P, rtol=0, atol=1e-9)
        other.update(z)
        np.testing.assert_allclose(found.mean[t], other.x, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.covariance[t], other.P, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.innovation_covariance[t], other.S, rtol=0, atol=1e-9)


def test_imm_of_sigma_points_is_filterpys():
    model, y = tracked("ukf", modes=2), seen()
    found = imm(model, y, START)
    bank = [of_filterpy(model, j, 1.0, 2.0, 0.0) for j in range(2)]
    other = IMMEstimator(bank, np.array([0.5, 0.5]), model.transition.numpy())
    for t, z in enumerate(y.numpy()):
        other.predict()
        other.update(z)
        np.testing.assert_allclose(found.mean[t], other.x, rtol=0, atol=1e-8)
        np.testing.assert_allclose(found.covariance[t], other.P, rtol=0, atol=1e-8)
        np.testing.assert_allclose(found.log_mode_probability[t].exp(), other.mu, rtol=0, atol=1e-8)


# What sigma points are for -------------------------------------------------------------------------------------------


def moments(f, way, m, P, **options):
    """Mean and covariance of f(x), x ~ N(m, P), as a filter predicts them."""
    size = f(m).shape[-1]
    zero, T = torch.zeros(1, size, size, dtype=F64), torch.ones(1, 1, dtype=F64)
    model = NonlinearModel(T, f, zero, lambda x: x[:1], torch.ones(1, 1, 1, dtype=F64), method=way, **options)
    found = imm(model, torch.full((1, 1), torch.nan, dtype=F64), Prior(m, P))
    return found.predicted_mean[0], found.predicted_covariance[0]


def by_quadrature(f, m, P, nodes=12):
    """The same by a product of Gauss and Hermite's rules, exact for polynomials."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    w = w / w.sum()
    L = np.linalg.cholesky(P.numpy())
    grid = np.stack(np.meshgrid(*[x] * len(m), indexing="ij"), -1).reshape(-1, len(m))
    weights = np.prod(np.stack(np.meshgrid(*[w] * len(m), indexing="ij"), -1).reshape(-1, len(m)), -1)
    values = np.stack([f(torch.as_tensor(p)).numpy() for p in m.numpy() + grid @ L.T])
    mean = weights @ values
    return torch.as_tensor(mean), torch.as_tensor((weights[:, None] * (values - mean)).T @ (values - mean))


def cubic(x):
    a, b = x.unbind(-1)
    return torch.stack((a**3 - 2 * a * b + b, a * a * b + 3 * b * b + 1), -1)


def test_the_mean_of_a_cubic_is_exact_by_sigma_points_and_not_by_the_tangent():
    m, P = torch.randn(2, dtype=F64), positive(2)
    expected, _ = by_quadrature(cubic, m, P)
    for options in ({}, {"alpha": 0.5, "kappa": 1.0}):
        mean, _ = moments(cubic, "ukf", m, P, **options)
        close(mean, expected, 10 * expected.abs().amax())
    mean, _ = moments(cubic, "ekf", m, P)
    assert (mean - expected).abs().amax() > 0.1


def test_in_one_dimension_the_rule_is_that_of_gauss_and_hermite():
    """kappa = 2 has three nodes, exact to degree 5; beta = 2 makes the variance of a square exact in any case."""
    m, P = torch.tensor([0.4], dtype=F64), torch.tensor([[0.7]], dtype=F64)
    mean, _ = moments(lambda x: x**5 - x**4, "ukf", m, P, kappa=2.0)
    close(mean, by_quadrature(lambda x: x**5 - x**4, m, P)[0], 10.0)
    for alpha in (1.0, 0.1):
        mean, variance = moments(lambda x: x**2, "ukf", torch.zeros(1, dtype=F64), P, alpha=alpha)
        close(mean, P[0], 10.0)
        close(variance, 2 * P**2, 10.0, tolerance=1e-10)


@pytest.mark.parametrize(("alpha", "beta", "kappa"), [(1.0, 2.0, 0.0), (0.3, 1.0, 2.0), (1.0, 0.0, -1.5)])
def test_odd_and_even_parts_are_the_weighted_sums_of_the_definition(alpha, beta, kappa):
    """2 n + 1 points with weights lambda / (n + lambda), 1 / 2 (n + lambda), as published.   [wan00]"""
    n, m, P = 2, torch.randn(2, dtype=F64), positive(2)
    scale = alpha**2 * (n + kappa) - n
    L = np.linalg.cholesky((n + scale) * P.numpy())
    points = [m.numpy(), *(m.numpy() + c for c in L.T), *(m.numpy() - c for c in L.T)]
    w = np.full(2 * n + 1, 1 / (2 * (n + scale)))
    w_mean, w_covariance = w.copy(), w.copy()
    w_mean[0] = scale / (n + scale)
    w_covariance[0] = scale / (n + scale) + 1 - alpha**2 + beta
    values = np.stack([cubic(torch.as_tensor(p)).numpy() for p in points])
    mean = w_mean @ values
    covariance = (w_covariance[:, None] * (values - mean)).T @ (values - mean)
    found = moments(cubic, "ukf", m, P, alpha=alpha, beta=beta, kappa=kappa, validate=False)
    size = 1 + float(np.abs(covariance).max())
    close(found[0], torch.as_tensor(mean), size, tolerance=1e-11)
    close(found[1], torch.as_tensor(covariance), size, tolerance=1e-11)


def test_what_curvature_adds_is_a_covariance_up_to_the_border_that_models_have():
    """Of |x|² all points see the same: what it adds is 0 where alpha² kappa + n beta is, and negative beyond."""
    n, kappa = 4, -2.0
    m, P = torch.zeros(n, dtype=F64), torch.eye(n, dtype=F64)

    def square(x):
        return torch.cat(((x * x).sum(-1, keepdim=True), 0 * x[1:]))

    for beta, options in ((0.5, {}), (0.75, {}), (0.25, {"validate": False})):
        variance = moments(square, "ukf", m, P, beta=beta, kappa=kappa, **options)[1][0, 0]
        close(variance, torch.tensor(16 * (beta - 0.5), dtype=F64), scale=16)
    with pytest.raises(ValueError, match="alpha² kappa"):
        moments(square, "ukf", m, P, beta=0.25, kappa=kappa)


def test_the_likelihood_of_a_curved_sensor_is_better_by_sigma_points():
    """p(y) = ∫ N(y; x² / 2, R) N(x; m, P) dx by quadrature; no Gaussian has a higher mean log density than its moments.

    Sigma points have them, of squares; the tangent misses both.
    """
    m, P, R = torch.tensor([1.0], dtype=F64), torch.tensor([[0.3]], dtype=F64), torch.full((1, 1), 0.4, dtype=F64)
    x, y = torch.linspace(-3, 5, 2001, dtype=F64), torch.linspace(-5, 12, 1701, dtype=F64)
    prior = torch.distributions.Normal(m, P.sqrt().squeeze(-1)).log_prob(x)
    sensor = torch.distributions.Normal(x * x / 2, math.sqrt(0.4)).log_prob(y.unsqueeze(-1))
    density = (prior + sensor).exp().sum(-1) * (x[1] - x[0])
    weight = density * (y[1] - y[0])
    close(weight.sum(), torch.ones((), dtype=F64), tolerance=1e-8)
    mean = (weight * y).sum()
    best = torch.distributions.Normal(mean, (weight * (y - mean) ** 2).sum().sqrt()).log_prob(y)
    score = {}
    for way in ("ekf", "ukf"):
        still = NonlinearMode(lambda x: x, torch.zeros(1, 1, dtype=F64), lambda x: x * x / 2, R)
        model = NonlinearModel.of([still], transition=torch.ones(1, 1, dtype=F64), method=way)
        score[way] = (weight * imm(model, y[:, None, None], Prior(m, P)).log_likelihood).sum()
    close(score["ukf"], (weight * best).sum(), tolerance=1e-8)
    assert score["ekf"] < score["ukf"] - 1e-3


# Turns and angles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.05, -0.3, 2.0])
def test_a_turn_of_unknown_rate_turns_by_that_rate(rate):
    x = torch.cat((torch.randn(4, dtype=F64), torch.tensor([rate], dtype=F64)))
    A = np.array([[0, 1, 0, 0], [0, 0, 0, -rate], [0, 0, 0, 1], [0, rate, 0, 0]])
    close(TURN.move(x)[:4], torch.as_tensor(scipy.linalg.expm(0.7 * A)) @ x[:4], 10.0)
    # Its derivatives do not know where the series ends.
    h = 1e-4
    step = torch.tensor([0, 0, 0, 0, h], dtype=F64)
    slope = jacrev(jacrev(TURN.move))(x)[:, 4, 4]
    numeric = (TURN.move(x + step) - 2 * TURN.move(x) + TURN.move(x - step)) / h**2
    close(slope, numeric, 10.0, tolerance=1e-6)


def test_a_radar_in_space_sees_spherical_coordinates():
    """Numpy's vectors: the length, the angle in the plane as that of a complex number, the angle to the axis above."""
    observe = range_bearing_elevation(0, 3, 2, origin=(1.0, -2.0, 0.5))
    for _ in range(20):
        state = 10 * torch.randn(4, dtype=F64)
        p = state[[0, 3, 2]].numpy() - np.array([1.0, -2.0, 0.5])
        length = np.linalg.norm(p)
        expected = [length, np.angle(complex(p[0], p[1])), np.pi / 2 - np.arccos(p[2] / length)]
        close(observe(state), torch.tensor(expected, dtype=F64), scale=10, tolerance=1e-10)
        r, azimuth, elevation = observe(state).numpy()
        back = r * np.array(
            [np.cos(elevation) * np.cos(azimuth), np.cos(elevation) * np.sin(azimuth), np.sin(elevation)]
        )
        np.testing.assert_allclose(back, p, rtol=0, atol=1e-12 * length)


@pytest.mark.parametrize("way", ["ekf", "ukf"])
def test_a_target_in_space_is_followed_across_the_cut_of_the_bearing(way):
    """Seen without errors but those that the filter is told of: it ends where the target is."""
    noise = {"dt": 1.0, "spectral_density": 1e-4, "observation_variance": 1.0, "dtype": F64}
    radar = NonlinearModel.of(
        [constant_velocity(3, **noise)],
        transition=torch.ones(1, 1, dtype=F64),
        observe=range_bearing_elevation(),
        R=torch.diag(torch.tensor([1.0, 1e-4, 1e-4], dtype=F64)),
        residual=wrap_angles(1, 2),
        method=way,
    )
    t = torch.arange(1.0, 31.0, dtype=F64)
    path = torch.stack((-100.0 + 0 * t, 30.0 - 2.0 * t, 40.0 + 1.0 * t), -1)  # from the second quadrant to the third
    r = path.norm(dim=-1)
    y = torch.stack((r, torch.atan2(path[:, 1], path[:, 0]), torch.asin(path[:, 2] / r)), -1)
    start = Prior(torch.tensor([-95.0, 0, 35, 0, 45, 0], dtype=F64), 25 * torch.eye(6, dtype=F64))
    found = imm(radar, y, start)
    assert float((found.mean[-1, ::2] - path[-1]).norm()) < 0.5
    assert float((found.mean[-1, 1::2] - torch.tensor([0.0, -2.0, 1.0], dtype=F64)).norm()) < 0.1


def test_a_third_dimension_moves_on_a_line():
    numbers = {"dt": 0.7, "spectral_density": 0.1, "observation_variance": 0.3, "dtype": F64}
    space, rate = unknown_turn(3, rate_density=0.02, **numbers), 0.4
    x = torch.cat((torch.randn(6, dtype=F64), torch.tensor([rate], dtype=F64)))
    close(space.move(x)[:6], coordinated_turn(3, rate=rate, **numbers).F @ x[:6], 10.0)
    close(space.Q[:6, :6], constant_velocity(3, **numbers).Q)
    assert torch.equal(space.observe(x), x[[0, 2, 4]])
    assert space.R.shape == (3, 3)


@both
def test_a_turn_whose_rate_is_known_is_the_linear_one(way):
    """Its rate has no variance, and nothing diffuses: a singular covariance."""
    rate, quiet = 0.4, {"dt": 0.7, "spectral_density": 0.0, "observation_variance": 0.5, "dtype": F64}
    T = chain(2)
    linear = SwitchingModel.of(
        [coordinated_turn(2, rate=rate, **quiet), constant_velocity(2, **{**quiet, "spectral_density": 0.3})],
        transition=T,
    )
    turn = unknown_turn(2, rate_density=0.0, **quiet)
    straight = unknown_turn(2, rate_density=0.0, **{**quiet, "spectral_density": 0.3})
    straight = straight._replace(move=lambda x: torch.cat((linear.F[1] @ x[:4], x[4:])))
    model = NonlinearModel.of([turn, straight], transition=T, method=way)
    m, P = torch.randn(4, dtype=F64), positive(4)
    y = observed(linear, 6)
    more = torch.cat((m, torch.tensor([rate], dtype=F64)))
    found = imm(model, y, Prior(more, torch.block_diag(P, torch.zeros(1, 1, dtype=F64))))
    expected = imm(linear, y, Prior(m, P))
    close(found.mean[:, :4], expected.mean, 100.0)
    close(found.covariance[:, :4, :4], expected.covariance, 100.0)
    close(found.log_mode_probability, expected.log_mode_probability, 100.0)
    close(found.log_likelihood, expected.log_likelihood, 100.0)
    close(found.mean[:, 4], torch.full((6,), rate, dtype=F64))


@both
@each
def test_bearings_wrap(method, way):
    """A scene behind the radar is the scene before it, though bearings jump from pi to -pi there."""
    J = torch.diag(torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0], dtype=F64))  # half a turn
    mode = TURN._replace(observe=range_bearing(0, 2), R=NOISE)
    louder = mode._replace(Q=4 * mode.Q, R=2 * mode.R)
    model = NonlinearModel.of([mode, louder], transition=chain(2), method=way, residual=wrap_angles(1))
    y = torch.stack((torch.linspace(5, 6, 8, dtype=F64), torch.linspace(-0.1, 0.6, 8, dtype=F64)), -1)
    y[3, 0] = torch.nan
    turned = torch.stack((y[:, 0], (y[:, 1] + 2 * math.pi) % (2 * math.pi) - math.pi), -1)
    assert turned[:, 1].max() - turned[:, 1].min() > 6  # it jumps
    spread = torch.diag(torch.tensor([0.5, 0.2, 0.5, 0.2, 0.1], dtype=F64))
    m = torch.tensor([5.0, 0.1, 0.0, 0.5, 0.05], dtype=F64)
    straight = run(model, method, y, Prior(m, spread))
    around = run(model, method, turned, Prior(J @ m, J @ spread @ J.mT))
    close(around.mean, straight.mean @ J.mT, 100.0)
    close(around.covariance, J @ straight.covariance @ J.mT, 100.0)
    close(around.log_mode_probability, straight.log_mode_probability, 100.0)
    for name in ("innovation", "mode_innovation"):
        close(getattr(around, name)[..., 1], getattr(straight, name)[..., 1], 100.0)
    close(around.innovation_covariance, straight.innovation_covariance, 100.0)
    close(around.log_likelihood, straight.log_likelihood, 100.0)
    assert around.innovation[:, 1].abs().max() < 0.5


def test_the_root_is_choleskys_also_of_singular_covariances():
    P = positive(7, 4)
    close(root(P), torch.linalg.cholesky(P), 10.0)
    v = torch.randn(7, 4, 2, dtype=F64)
    P = v @ v.mT
    L = root(P)
    close(L @ L.mT, P, P.abs().amax())
    assert torch.equal(L, L.tril())
    assert not root(torch.zeros(3, 3, dtype=F64)).any()
