"""Filters of functions that a user compiled with numba are those of the same functions in torch."""

import math
import pickle

import numpy as np
import pytest
import torch

from gradlogz import Prior, SwitchingFilter, smooth
from gradlogz.filters import NonlinearMode, NonlinearModel, constant_velocity, range_bearing, unknown_turn, wrap_angles
from gradlogz.kernels.filters import dispatch
from support.recorded_kernel import alike, recorded
from support.scales import close

kernel = pytest.importorskip("gradlogz.kernels.filters.functions", reason="needs numba")
njit = pytest.importorskip("numba").njit

F64 = torch.float64
NOISE = {"dt": 1.0, "spectral_density": 0.05, "observation_variance": 0.5, "dtype": F64}
STAYING = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
METHODS = {"imm": ("imm", 2), "gpb1": ("gpb", 1), "gpb2": ("gpb", 2)}


@njit
def straight(x):
    return np.array([x[0] + x[1], x[1], x[2] + x[3], x[3]])


@njit
def turned(x):
    x[0] += 0.0  # a function may write to its argument
    w = x[4]
    forward, aside = (math.sin(w) / w, (1 - math.cos(w)) / w) if abs(w) > 1e-6 else (1.0, w / 2)
    cos, sin = math.cos(w), math.sin(w)
    return np.array(
        [
            x[0] + forward * x[1] - aside * x[3],
            cos * x[1] - sin * x[3],
            x[2] + aside * x[1] + forward * x[3],
            sin * x[1] + cos * x[3],
            w,
        ]
    )


@njit
def polar(x):
    return math.hypot(x[0] + 3.0, x[2] + 50.0), math.atan2(x[2] + 50.0, x[0] + 3.0)


def radar(*, own: bool) -> NonlinearModel:
    """Modes of four and five components; functions of a user, or built-in ones."""
    modes = [constant_velocity(2, **NOISE), unknown_turn(2, rate_density=1e-3, **NOISE)]
    if own:
        line, turn = modes
        observe = range_bearing(0, 2)  # replaced by that of all modes
        modes = [NonlinearMode(straight, line.Q, observe, line.R), NonlinearMode(turned, turn.Q, observe, turn.R)]
    return NonlinearModel.of(
        modes,
        transition=STAYING,
        components=[range(4), range(5)],
        observe=polar if own else range_bearing(0, 2, origin=(-3.0, -50.0)),
        R=torch.diag(torch.tensor([0.5, 1e-3], dtype=F64)),
        method="ukf",
        residual=wrap_angles(1),
    )


def observed(steps: int = 12) -> torch.Tensor:
    x, model, y = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.1], dtype=F64), radar(own=False), []
    noise = torch.randn(steps, 2, dtype=F64, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.7, 0.03])
    for e in noise:
        x = model.functions("move")[1](x)
        y.append(model.functions("observe")[0](x) + e)
    series = torch.stack(y)
    series[3, 0], series[7] = math.nan, math.nan
    return series


PRIOR = Prior(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.05], dtype=F64), torch.eye(5, dtype=F64))


@pytest.fixture
def calls(monkeypatch):
    return recorded(monkeypatch, kernel)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_kernel_calls_functions_of_users(method, calls, monkeypatch):
    y = observed()
    ours = SwitchingFilter(radar(own=True), *method).filter(y, PRIOR)
    assert len(calls) == 1
    assert calls[0] is not None
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", math.inf)
    alike(ours, SwitchingFilter(radar(own=False), *method).filter(y, PRIOR))


def test_steps_are_those_of_the_series(calls):
    chosen, y = SwitchingFilter(radar(own=True)), observed()
    series, state = chosen.filter(y, PRIOR), chosen.init(PRIOR)
    for time, observation in enumerate(y):
        state, now = chosen.step(state, observation)
        close(now.mean, series.mean[time], scale=100.0)
    assert all(result is not None for result in calls)


def test_what_is_not_compiled_is_evaluated_by_torch():
    y = observed()
    ours, theirs = (smooth(radar(own=own), y, PRIOR, method="imm") for own in (True, False))
    close(ours.mean, theirs.mean, scale=100.0)
    close(ours.covariance, theirs.covariance, scale=100.0)
    for batch in ((2, 3), (0,)):
        chosen = [SwitchingFilter(radar(own=own)) for own in (True, False)]
        ours, theirs = (each.predict(each.init(PRIOR, batch_shape=batch)) for each in chosen)
        assert ours.expected_observation.shape == (*batch, 2)
        close(ours.expected_observation, theirs.expected_observation, scale=100.0)


def test_exceptions_of_functions_arrive(calls):
    @njit
    def bounded(x):
        if x[0] > 2.0:
            raise ValueError("beyond the map")
        return x[:1].copy()

    model = NonlinearModel(
        torch.ones(1, 1, dtype=F64), straight, 0.1 * torch.eye(4, dtype=F64)[None], bounded,
        torch.ones(1, 1, 1, dtype=F64), method="ukf",
    )  # fmt: skip
    start = Prior(torch.ones(4, dtype=F64), torch.eye(4, dtype=F64))
    with pytest.raises(ValueError, match="beyond the map"):
        SwitchingFilter(model).filter(torch.ones(9, 1, dtype=F64), start)
    assert calls == [None]


def test_results_without_one_type_are_left_to_torch(calls):
    @njit
    def mixed(x):
        return x[0], 1

    @njit
    def uniform(x):
        return x[0], 1.0

    ours, theirs = (
        NonlinearModel(
            torch.ones(1, 1, dtype=F64), straight, 0.1 * torch.eye(4, dtype=F64)[None], f,
            torch.eye(2, dtype=F64)[None], method="ukf",
        )
        for f in (mixed, uniform)
    )  # fmt: skip
    y, prior = torch.ones(3, 2, dtype=F64), Prior(torch.ones(4, dtype=F64), torch.eye(4, dtype=F64))
    close(SwitchingFilter(ours).filter(y, prior).mean, SwitchingFilter(theirs).filter(y, prior).mean, scale=10.0)
    assert len(calls) == 1


def test_addresses_do_not_leave_the_process():
    Q = 0.1 * torch.eye(4, dtype=F64)[None]
    model = NonlinearModel(torch.ones(1, 1, dtype=F64), straight, Q, straight, Q, method="ukf")
    assert model.packed is not None
    assert "packed" not in pickle.loads(pickle.dumps(model)).__dict__
