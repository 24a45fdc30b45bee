"""One mode is the Kalman filter of filterpy and scipy; several are filterpy's IMM while that does not underflow."""

import mpmath
import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from filterpy.common import Q_continuous_white_noise
from filterpy.kalman import IMMEstimator, KalmanFilter

from gradlogz import KalmanModel, Prior, SwitchingModel, gpb1, gpb2, imm
from gradlogz.filters import (
    constant_acceleration,
    constant_velocity,
    coordinated_turn,
    discretize,
    gpb,
    random_walk,
    singer,
)
from gradlogz.filters.kalman import predict, update
from support.switching_oracles import F64, beginning, observed, positive, system


def of_filterpy(model, j, mean, covariance):
    """Mode j of a model without offsets as filterpy has it."""
    kalman = KalmanFilter(dim_x=model.state_size, dim_z=model.observation_size)
    kalman.x, kalman.P = mean.numpy().copy(), covariance.numpy().copy()
    kalman.F, kalman.Q, kalman.H, kalman.R = (getattr(model, n)[j].numpy() for n in "FQHR")
    return kalman


@pytest.mark.parametrize("filter", [gpb1, gpb2, imm, lambda *a, **o: gpb(*a, depth=4, **o)])
def test_one_mode_is_the_kalman_filter(filter):
    model, start = system(1, 4, 2, offsets=False), beginning(1, 4, shared=True)
    y = observed(model, 20)
    found = filter(model, y, Prior(start.mean, start.covariance))
    kalman = of_filterpy(model, 0, start.mean, start.covariance)
    total = 0.0
    for t, z in enumerate(y.numpy()):
        kalman.predict()
        S = kalman.H @ kalman.P @ kalman.H.T + kalman.R
        total += scipy.stats.multivariate_normal.logpdf(z, kalman.H @ kalman.x, S)
        kalman.update(z)
        np.testing.assert_allclose(found.mean[t], kalman.x, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.covariance[t], kalman.P, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.innovation[t], kalman.y, rtol=0, atol=1e-10)
        np.testing.assert_allclose(found.innovation_covariance[t], kalman.S, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.log_likelihood, total, rtol=1e-12)


def test_a_step_of_kalman_is_conditioning():
    m, P, F, Q = torch.randn(3, dtype=F64), positive(3), torch.randn(3, 3, dtype=F64), positive(3)
    H, R, b, d = torch.randn(2, 3, dtype=F64), positive(2), torch.randn(3, dtype=F64), torch.randn(2, dtype=F64)
    y = torch.randn(2, dtype=F64)
    m, P = predict(m, P, F=F, Q=Q, b=b)
    found = update(m, P, y, H=H, R=R, d=d)
    precision = torch.linalg.inv(P) + H.mT @ torch.linalg.inv(R) @ H  # the information form
    torch.testing.assert_close(found.covariance, torch.linalg.inv(precision), rtol=1e-11, atol=1e-11)
    pull = torch.linalg.inv(P) @ m + H.mT @ torch.linalg.inv(R) @ (y - d)
    torch.testing.assert_close(found.mean, torch.linalg.solve(precision, pull), rtol=1e-11, atol=1e-11)
    expected = scipy.stats.multivariate_normal.logpdf(y, H @ m + d, H @ P @ H.mT + R)
    np.testing.assert_allclose(found.log_likelihood, expected, rtol=1e-12)


@pytest.mark.parametrize(("k", "s", "o"), [(2, 2, 1), (3, 4, 2)])
def test_imm_is_that_of_filterpy(k, s, o):
    model, start = system(k, s, o, offsets=False), beginning(k, s)
    y = observed(model, 25)
    found = imm(model, y, start)
    bank = [of_filterpy(model, j, start.mean[j], start.covariance[j]) for j in range(k)]
    other = IMMEstimator(bank, start.log_mode_probability.exp().numpy(), model.transition.numpy())
    for t, z in enumerate(y.numpy()):
        other.predict()
        other.update(z)
        np.testing.assert_allclose(found.log_mode_probability[t].exp(), other.mu, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.mean[t], other.x, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.covariance[t], other.P, rtol=0, atol=1e-9)


def test_an_outlier_leaves_mode_probabilities_exact_where_filterpy_floors_them():
    """Two modes of standard deviations 1 and 2: after 1e2 of them only the second can be, to hundreds of digits."""
    modes = [KalmanModel(*(torch.full((1, 1), v, dtype=F64) for v in (1.0, 0.01, 1.0, r))) for r in (1.0, 4.0)]
    model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=F64))
    start = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    bank = [of_filterpy(model, j, start.mean, start.covariance) for j in range(2)]
    for size in (1e2, 1e6):
        found = imm(model, torch.tensor([[size]], dtype=F64), start)
        mpmath.mp.dps = 50
        log = []
        for c, r in ((mpmath.mpf("0.6"), 1), (mpmath.mpf("0.4"), 4)):
            S = mpmath.mpf(1) + mpmath.mpf("0.01") + r
            log.append(mpmath.log(c) - mpmath.log(2 * mpmath.pi * S) / 2 - mpmath.mpf(size) ** 2 / (2 * S))
        total = log[1] + mpmath.log1p(mpmath.exp(log[0] - log[1]))
        for j in range(2):
            expected = float(log[j] - total)
            assert abs(float(found.log_mode_probability[0, j]) - expected) <= 1e-14 * size**2
        assert abs(float(found.log_likelihood) - float(total)) <= 1e-15 * size**2
    other = IMMEstimator(bank, np.array([0.5, 0.5]), model.transition.numpy())
    other.predict()
    other.update(np.array([1e6]))
    assert other.mu[0] > 0.1  # where it is 0 to two hundred thousand million digits
    assert found.log_mode_probability[0, 0] < -1e11


@pytest.mark.parametrize(("build", "own"), [(random_walk, 1), (constant_velocity, 2), (constant_acceleration, 3)])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_models_of_motion_are_those_of_filterpy(build, own, dimensions):
    dt, q = 0.7, 1.3
    model = build(dimensions, dt=dt, spectral_density=q, observation_variance=0.2, dtype=F64)
    if own == 1:
        expected = np.eye(dimensions) * q * dt
    else:
        expected = Q_continuous_white_noise(own, dt, q, block_size=dimensions)
    np.testing.assert_allclose(model.Q, expected, rtol=1e-12, atol=1e-13)
    one = np.array([[1, dt, dt**2 / 2], [0, 1, dt], [0, 0, 1]])[:own, :own]
    np.testing.assert_allclose(model.F, np.kron(np.eye(dimensions), one), rtol=0, atol=1e-14)
    np.testing.assert_array_equal(model.H, np.kron(np.eye(dimensions), np.eye(1, own)))
    np.testing.assert_array_equal(model.R, 0.2 * np.eye(dimensions))


def quadrature(A, C, dt):
    """∫ exp(A u) C exp(A u)^T du by 40 Gauss-Legendre nodes."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    steps = [scipy.linalg.expm(A * dt * (1 + x) / 2) for x in nodes]
    return sum(w * E @ C @ E.T for w, E in zip(weights, steps, strict=True)) * dt / 2


@pytest.mark.parametrize("dt", [0.01, 1.0, 4.0])
def test_turns_and_forgetting_accelerations_are_integrals(dt):
    rate, tau = 0.9, 0.6
    turn = coordinated_turn(2, dt=dt, rate=rate, spectral_density=0.5, observation_variance=1.0, dtype=F64)
    A = np.array([[0, 1, 0, 0], [0, 0, 0, -rate], [0, 0, 0, 1], [0, rate, 0, 0]])
    C = np.diag([0, 0.5, 0, 0.5])
    np.testing.assert_allclose(turn.F, scipy.linalg.expm(A * dt), rtol=0, atol=1e-13 * (1 + dt))
    np.testing.assert_allclose(turn.Q, quadrature(A, C, dt), rtol=0, atol=1e-13 * (1 + dt**3))
    w = rate * dt
    np.testing.assert_allclose(turn.Q[0, 0], 2 * 0.5 * (w - np.sin(w)) / rate**3, rtol=1e-11, atol=1e-15)
    np.testing.assert_allclose(turn.Q[1, 1], 0.5 * dt, rtol=1e-12)  # a turn leaves the speed alone
    model = singer(1, dt=dt, correlation_time=tau, acceleration_variance=2.0, observation_variance=1.0, dtype=F64)
    A = np.array([[0, 1, 0], [0, 0, 1], [0, 0, -1 / tau]])
    C = np.diag([0, 0, 2 * 2.0 / tau])
    np.testing.assert_allclose(model.F, scipy.linalg.expm(A * dt), rtol=0, atol=1e-13 * (1 + dt**2))
    np.testing.assert_allclose(model.Q, quadrature(A, C, dt), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(model.Q[2, 2], 2.0 * -np.expm1(-2 * dt / tau), rtol=1e-12)


def test_long_steps_of_fast_decay_keep_their_digits():
    A, C = torch.tensor([[-50.0]], dtype=F64), torch.tensor([[100.0]], dtype=F64)
    F, Q = discretize(A, C, torch.tensor(2.0, dtype=F64))  # exp(100) would be there in one step
    np.testing.assert_allclose(F, np.exp(-100.0), rtol=0, atol=1e-15)
    np.testing.assert_allclose(Q, 1.0, rtol=1e-12)
