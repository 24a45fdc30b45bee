"""Microseconds of one step of one target whose observations arrive one by one, float64, one thread, all in one run.

filterpy     its IMMEstimator of Kalman filters or of UKFs: predict and update. With a step length of its own for every
             step, F, Q and the transition matrix are computed anew: polynomials for constant velocity and acceleration,
             scipy's matrix exponential for the turn and the chain
gradlogz     `SwitchingFilter.step`: all fields, or mean and covariance only

The problems: a fixed step length; a step length for every step; the same with modes of 4 and 6 components, filled in
from each other; a UKF of constant velocity and a turn of unknown rate, with a fixed step length and with one for every
step; the same UKF with functions that are not built in, compiled by numba or evaluated by torch.

Seconds are processor time, medians over rounds. The last estimates of filterpy and gradlogz are compared before timing.
"""

import time
import warnings

import numpy as np
import scipy.linalg
import torch
from filterpy.kalman import IMMEstimator, KalmanFilter, MerweScaledSigmaPoints, UnscentedKalmanFilter
from numba import njit

from filters import assembled, filterpy_imm, patched, tracks
from gradlogz import Prior, SwitchingFilter, SwitchingModel
from gradlogz.filters import (
    Generator,
    NonlinearModel,
    constant_acceleration,
    constant_velocity,
    coordinated_turn,
    unknown_turn,
)
from timing import compare

F64 = torch.float64
STEPS = 200
TARGETS = 10_000
DENSITY, VARIANCE, RATE = 0.05, 0.5, 0.1
NOISE = {"spectral_density": DENSITY, "observation_variance": VARIANCE, "dtype": F64}
GENERATOR = torch.tensor([[-0.1, 0.05, 0.05], [0.05, -0.1, 0.05], [0.05, 0.05, -0.1]], dtype=F64)
INTERVALS = (torch.rand(STEPS, generator=torch.Generator().manual_seed(1), dtype=F64) + 0.5).tolist()
VELOCITY = [0, 1, 3, 4]  # components x, x', y, y' of x, x', x'', y, y', y''


# ------------------------------------------------------------------------------------------------------------ models
def irregular(*, full: bool) -> SwitchingModel:
    """Constant velocity, constant acceleration and a turn in continuous time, all of 6 components or as they are."""
    modes = [constant_velocity(2, **NOISE), constant_acceleration(2, **NOISE), coordinated_turn(2, rate=RATE, **NOISE)]
    if not full:
        return SwitchingModel.of(modes, transition=Generator(GENERATOR), components=[VELOCITY, range(6), VELOCITY])
    E = torch.eye(6, dtype=F64)[:, VELOCITY]
    for j in (0, 2):
        modes[j] = modes[j]._replace(F=E @ modes[j].F @ E.mT, Q=E @ modes[j].Q @ E.mT, H=modes[j].H @ E.mT)
    return SwitchingModel.of(modes, transition=Generator(GENERATOR))


def turning(kind: str) -> NonlinearModel:
    """A UKF of a straight line and a turn of unknown rate: "built in", "continuous", "torch" or "numba"."""
    dt = {} if kind == "continuous" else {"dt": 1.0}
    line, turn = constant_velocity(2, **NOISE, **dt), unknown_turn(2, rate_density=1e-3, **NOISE, **dt)
    E = torch.eye(5, 4, dtype=F64)
    F, Q = E @ line.F @ E.mT, E @ line.Q @ E.mT
    F[4, 4], Q[4, 4] = 0.0 if kind == "continuous" else 1.0, 1e-3
    line = line._replace(F=F, Q=Q, H=line.H @ E.mT)
    chain = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=F64)
    transition = Generator(chain - torch.eye(2, dtype=F64)) if kind == "continuous" else chain
    model = NonlinearModel.of([line, turn], transition=transition, method="ukf")
    functions = model.functions("move")
    if kind == "torch":
        move = tuple(lambda x, f=f: f(x) for f in functions)
        return NonlinearModel(chain, move, model.Q, lambda x: x[:-1:2], model.R, method="ukf")
    if kind == "numba":
        along = functions[0].form.matrix.numpy()
        move = njit(lambda x: along @ x), njit(lambda x: turn_by_hand(x, 1.0))
        return NonlinearModel(chain, move, model.Q, njit(lambda x: x[:-1:2]), model.R, method="ukf")
    return model


@njit
def turn_by_hand(x, dt):
    w = x[4]
    z = w * dt
    forward, aside = (np.sin(z) / w, (1 - np.cos(z)) / w) if abs(w) > 1e-6 else (dt, w * dt**2 / 2)
    cos, sin, vx, vy = np.cos(z), np.sin(z), x[1], x[3]
    position = x[0] + forward * vx - aside * vy, x[2] + aside * vx + forward * vy
    return np.array([position[0], cos * vx - sin * vy, position[1], sin * vx + cos * vy, w])


# ---------------------------------------------------------------------------------------------------------- filterpy
def van_loan(A: np.ndarray, C: np.ndarray, dt: float) -> tuple[np.ndarray, np.ndarray]:
    n = len(A)
    block = scipy.linalg.expm(np.block([[-A, C], [np.zeros_like(A), A.T]]) * dt)
    F = block[n:, n:].T
    return F, F @ block[:n, n:]


def rebuilt(dt: float, A: np.ndarray, C: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """F and Q of the three modes; A and C are those of the turn."""
    eye, q = np.eye(2), DENSITY
    velocity = np.zeros((3, 3)), np.zeros((3, 3))
    velocity[0][:2, :2] = [[1, dt], [0, 1]]
    velocity[1][:2, :2] = [[q * dt**3 / 3, q * dt**2 / 2], [q * dt**2 / 2, q * dt]]
    velocity[0][2, 2] = 1
    acceleration = (
        np.array([[1, dt, dt**2 / 2], [0, 1, dt], [0, 0, 1]]),
        q
        * np.array(
            [
                [dt**5 / 20, dt**4 / 8, dt**3 / 6],
                [dt**4 / 8, dt**3 / 3, dt**2 / 2],
                [dt**3 / 6, dt**2 / 2, dt],
            ]
        ),
    )
    return [*(tuple(np.kron(eye, M) for M in pair) for pair in (velocity, acceleration)), van_loan(A, C, dt)]


def filterpy_irregular(y: np.ndarray) -> np.ndarray:
    model = irregular(full=True)
    A, C = model.F[2].numpy(), model.Q[2].numpy()
    bank = []
    for j in range(3):
        kalman = KalmanFilter(dim_x=6, dim_z=2)
        kalman.x, kalman.P, kalman.H, kalman.R = np.zeros(6), np.eye(6), model.H[j].numpy(), model.R[j].numpy()
        bank.append(kalman)
    other = IMMEstimator(bank, np.full(3, 1 / 3), np.eye(3))
    for z, dt in zip(y, INTERVALS, strict=True):
        for kalman, (F, Q) in zip(bank, rebuilt(dt, A, C), strict=True):
            kalman.F, kalman.Q = F, Q
        other.M = scipy.linalg.expm(GENERATOR.numpy() * dt)
        other._compute_mixing_probabilities()
        other.predict()
        other.update(z)
    return other.x


def filterpy_turning(y: np.ndarray) -> np.ndarray:
    model = turning("built in")
    F = model.functions("move")[0].form.matrix.numpy()

    bank = []
    for j, move in enumerate((lambda x, dt: F @ x, turn_by_hand.py_func)):
        points = MerweScaledSigmaPoints(5, alpha=1.0, beta=2.0, kappa=0.0)
        ukf = UnscentedKalmanFilter(5, 2, 1.0, hx=lambda x: x[:-1:2], fx=move, points=points)
        ukf.x, ukf.P, ukf.Q, ukf.R = np.zeros(5), np.eye(5), model.Q[j].numpy(), model.R[j].numpy()
        bank.append(ukf)
    other = IMMEstimator(bank, np.full(2, 1 / 2), model.transition.numpy())
    for z in y:
        other.predict()
        other.update(z)
    return other.x


# ------------------------------------------------------------------------------------------------------------- table
def rows() -> list[dict[str, object]]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="filterpy")
    y = tracks(1, STEPS)[0]
    single = y.numpy()
    fixed = assembled(3)
    problems = {
        "imm, 3 modes": (fixed, None, lambda: filterpy_imm(fixed, single)[-1]),
        "imm, 3 modes, own dt for every step": (irregular(full=True), INTERVALS, lambda: filterpy_irregular(single)),
        "the same, modes of 4 and 6 components": (irregular(full=False), INTERVALS, None),
        "imm, 2 modes, UKF": (turning("built in"), None, lambda: filterpy_turning(single)),
        "the same, own dt for every step": (turning("continuous"), INTERVALS, None),
        "imm, 2 modes, UKF, own functions in numba": (turning("numba"), None, lambda: filterpy_turning(single)),
        "imm, 2 modes, UKF, own functions in torch": (turning("torch"), None, lambda: filterpy_turning(single)),
    }
    return [row(name, *problem, y) for name, problem in problems.items()] + [own_intervals()]


def row(name, model, intervals, alternative, y):
    chosen, s = SwitchingFilter(model), model.state_size
    begin = chosen.init(Prior(torch.zeros(s, dtype=F64), torch.eye(s, dtype=F64)))
    options = [{}] * STEPS if intervals is None else [{"dt": dt} for dt in intervals]

    def stepping(fields):
        state = begin
        for observation, option in zip(y.unbind(0), options, strict=True):
            state, now = chosen.step(state, observation, fields=fields, **option)
        return now

    alternatives = {
        "gradlogz": lambda: stepping(None),
        "gradlogz, mean and covariance": lambda: stepping(("mean", "covariance")),
    }
    if alternative is not None:
        alternatives |= {"filterpy": alternative, "filterpy, quick logpdf": patched(alternative)}
        np.testing.assert_allclose(alternative(), stepping(None).mean, atol=1e-8)
    seconds = compare(alternatives, rounds=7, clock=time.process_time)
    again = seconds.pop("A/A")
    return {
        "problem": name,
        "microseconds": {name: round(1e6 * t / STEPS, 1) for name, t in seconds.items()},
        "ratios": {"A/A": round(again / seconds["gradlogz"], 3)},
    }


def own_intervals() -> dict[str, object]:
    """Milliseconds of a step of many targets: one dt for all, or one for each."""
    chosen = SwitchingFilter(irregular(full=True))
    state = chosen.init(Prior(torch.zeros(6, dtype=F64), torch.eye(6, dtype=F64)), batch_shape=(TARGETS,))
    z = torch.randn(TARGETS, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    each = torch.rand(TARGETS, dtype=F64, generator=torch.Generator().manual_seed(1)) + 0.5
    seconds = compare(
        {"one dt": lambda: chosen.step(state, z, dt=1.0), "own dt": lambda: chosen.step(state, z, dt=each)},
        clock=time.process_time,
    )
    again = seconds.pop("A/A")
    return {
        "problem": f"imm, 3 modes, {TARGETS} targets",
        "milliseconds": {name: round(1e3 * t, 1) for name, t in seconds.items()},
        "ratios": {
            "own dt": round(seconds["own dt"] / seconds["one dt"], 2),
            "A/A": round(again / seconds["one dt"], 3),
        },
    }
