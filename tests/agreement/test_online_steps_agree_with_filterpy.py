"""Online steps, compiled where numba is installed, agree with filterpy: a step length for every step, and the UKF."""

import numpy as np
import pytest
import scipy.linalg
import torch
from filterpy.kalman import IMMEstimator, KalmanFilter, MerweScaledSigmaPoints, UnscentedKalmanFilter

from gradlogz import Prior, SwitchingFilter, SwitchingModel
from gradlogz.filters import Generator, NonlinearModel, constant_velocity, coordinated_turn, unknown_turn
from support.scales import close

F64 = torch.float64
NOISE = {"spectral_density": 0.05, "observation_variance": 0.5, "dtype": F64}
pytestmark = pytest.mark.filterwarnings("ignore:::filterpy")


def van_loan(A: np.ndarray, C: np.ndarray, dt: float) -> tuple[np.ndarray, np.ndarray]:
    n = len(A)
    block = scipy.linalg.expm(np.block([[-A, C], [np.zeros_like(A), A.T]]) * dt)
    F = block[n:, n:].T
    return F, F @ block[:n, n:]


def test_a_step_length_for_every_step():
    rate = torch.tensor([[-0.2, 0.2], [0.3, -0.3]], dtype=F64)
    model = SwitchingModel.of(
        [constant_velocity(2, **NOISE), coordinated_turn(2, rate=0.2, **NOISE)], transition=Generator(rate)
    )
    random = np.random.default_rng(0)
    y, intervals = random.normal(size=(30, 2)).cumsum(0), random.uniform(0.2, 2.0, 30)
    bank = []
    for j in range(2):
        kalman = KalmanFilter(dim_x=4, dim_z=2)
        kalman.x, kalman.P, kalman.H, kalman.R = np.zeros(4), np.eye(4), model.H[j].numpy(), model.R[j].numpy()
        bank.append(kalman)
    other = IMMEstimator(bank, np.full(2, 0.5), np.eye(2))
    online = SwitchingFilter(model)
    state = online.init(Prior(torch.zeros(4, dtype=F64), torch.eye(4, dtype=F64)))
    for z, dt in zip(y, intervals, strict=True):
        for j, kalman in enumerate(bank):
            kalman.F, kalman.Q = van_loan(model.F[j].numpy(), model.Q[j].numpy(), dt)
        other.M = scipy.linalg.expm(rate.numpy() * dt)
        other._compute_mixing_probabilities()  # with the new transition matrix
        other.predict()
        other.update(z)
        state, now = online.step(state, torch.tensor(z), dt=float(dt))
        close(now.mean, torch.tensor(other.x), scale=10 * float(np.abs(other.x).max()) + 10)
        close(now.covariance, torch.tensor(other.P), scale=100.0)
        close(now.log_mode_probability.exp(), torch.tensor(other.mu), scale=10.0)


def test_the_unscented_filter():
    E = torch.eye(5, 4, dtype=F64)
    line, turn = constant_velocity(2, dt=1.0, **NOISE), unknown_turn(2, dt=1.0, rate_density=1e-3, **NOISE)
    F, Q = E @ line.F @ E.mT, E @ line.Q @ E.mT
    F[4, 4], Q[4, 4] = 1.0, 1e-3
    transition = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
    modes = [line._replace(F=F, Q=Q, H=line.H @ E.mT), turn]
    model = NonlinearModel.of(modes, transition=transition, method="ukf")

    def turned(x, dt):
        w, z = x[4], x[4] * dt
        forward, aside, cos, sin = np.sin(z) / w, (1 - np.cos(z)) / w, np.cos(z), np.sin(z)
        velocity = cos * x[1] - sin * x[3], sin * x[1] + cos * x[3]
        position = x[0] + forward * x[1] - aside * x[3], x[2] + aside * x[1] + forward * x[3]
        return np.array([position[0], velocity[0], position[1], velocity[1], w])

    start = np.array([0.0, 1.0, 0.0, 0.5, 0.3])
    bank = []
    for j, move in enumerate((lambda x, dt: F.numpy() @ x, turned)):
        points = MerweScaledSigmaPoints(5, alpha=1.0, beta=2.0, kappa=0.0)
        ukf = UnscentedKalmanFilter(5, 2, 1.0, hx=lambda x: x[:-1:2], fx=move, points=points)
        ukf.x, ukf.P, ukf.Q, ukf.R = start.copy(), 0.1 * np.eye(5), model.Q[j].numpy(), model.R[j].numpy()
        bank.append(ukf)
    other = IMMEstimator(bank, np.full(2, 0.5), transition.numpy())
    online = SwitchingFilter(model)
    state = online.init(Prior(torch.tensor(start), 0.1 * torch.eye(5, dtype=F64)))
    for z in np.random.default_rng(0).normal(size=(20, 2)).cumsum(0):
        other.predict()
        other.update(z)
        state, now = online.step(state, torch.tensor(z))
        close(now.mean, torch.tensor(other.x), scale=100.0)
        close(now.covariance, torch.tensor(other.P), scale=100.0)
        close(now.log_mode_probability.exp(), torch.tensor(other.mu), scale=10.0)
