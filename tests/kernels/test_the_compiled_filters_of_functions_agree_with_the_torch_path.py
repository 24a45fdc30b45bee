"""The compiled filters of built-in functions give the numbers of the torch path, and step aside where they cannot."""

import math

import pytest
import torch

from gradlogz import Prior, SwitchingFilter, SwitchingModel
from gradlogz.filters import (
    Generator,
    NonlinearModel,
    constant_acceleration,
    constant_velocity,
    coordinated_turn,
    range_bearing,
    range_bearing_elevation,
    unknown_turn,
    wrap_angles,
)
from gradlogz.kernels.filters import dispatch
from support.recorded_kernel import alike, recorded
from support.scales import close

kernel = pytest.importorskip("gradlogz.kernels.filters.functions", reason="needs numba")

F64 = torch.float64
NOISE = {"dt": 1.0, "spectral_density": 0.05, "observation_variance": 0.5, "dtype": F64}
TURN = {"rate_density": 1e-3, **NOISE}
LEAVING = torch.tensor([[0.9, 0.1], [0.0, 1.0]], dtype=F64)
STAYING = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
METHODS = {"imm": ("imm", 2), "gpb1": ("gpb", 1), "gpb2": ("gpb", 2)}
STEPS = 60


def radar(method: str) -> NonlinearModel:
    return NonlinearModel.of(
        [unknown_turn(2, **TURN | {"dt": 0.5}), unknown_turn(2, **TURN)],
        transition=LEAVING,
        observe=range_bearing(0, 2, origin=(-3.0, -50.0)),
        R=torch.diag(torch.tensor([0.5, 1e-3], dtype=F64)),
        method=method,
        residual=wrap_angles(1),
    )


def radar_in_space(method: str) -> NonlinearModel:
    return NonlinearModel.of(
        [constant_velocity(3, **NOISE), unknown_turn(3, **TURN)],
        transition=STAYING,
        components=[(0, 1, 2, 3, 4, 5), range(7)],
        observe=range_bearing_elevation(0, 2, 4, origin=(-30.0, -2.0, 4.0)),
        R=1e-3 * torch.eye(3, dtype=F64),
        method=method,
        residual=wrap_angles(1, 2),
    )


def positions(method: str, fill: str = "modes") -> NonlinearModel:
    return NonlinearModel.of(
        [constant_velocity(2, **NOISE), unknown_turn(2, **TURN)],
        transition=STAYING,
        components=[(0, 1, 2, 3), range(5)],
        fill=fill,
        method=method,
        alpha=0.7,
        kappa=1.0,
    )


MODELS = {
    "radar, ekf": radar("ekf"),
    "radar, ukf": radar("ukf"),
    "radar in space, ekf": radar_in_space("ekf"),
    "radar in space, ukf": radar_in_space("ukf"),
    "positions, ukf": positions("ukf"),
    "positions, filled by zero": positions("ukf", fill="zero"),
}
by_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
by_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def start(model: NonlinearModel) -> torch.Tensor:
    line = [0.0, 1.0, 0.0, 1.0, 0.0, 0.2][: model.state_size - 1]
    return torch.tensor([*line, 0.05], dtype=F64)


def begin(model: NonlinearModel) -> Prior:
    return Prior(start(model), torch.eye(model.state_size, dtype=F64))


def simulated(model: NonlinearModel, steps: int = STEPS) -> torch.Tensor:
    """Observations of a turn, with some missing."""
    generator = torch.Generator().manual_seed(3)
    x, observations = start(model), []
    for _ in range(steps):
        x = model.functions("move")[1](x)
        noise = torch.randn(model.observation_size, dtype=F64, generator=generator)
        observations.append(model.functions("observe")[0](x) + torch.linalg.cholesky(model.R[0]) @ noise)
    y = torch.stack(observations)
    y[3, 0], y[7] = math.nan, math.nan
    return y


@pytest.fixture
def by_torch(monkeypatch):
    """Call a function on the torch path."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "WORTH_FILTERING", math.inf)
            return function()

    return call


@pytest.fixture
def calls(monkeypatch):
    return recorded(monkeypatch, kernel)


@by_model
@by_method
def test_series_agree(model, method, calls, by_torch):
    chosen, y, prior = SwitchingFilter(model, *method), simulated(model), begin(model)
    compiled = chosen.filter(y, prior)
    assert len(calls) == 1
    assert calls[0] is not None
    alike(compiled, by_torch(lambda: chosen.filter(y, prior)))
    last = chosen.filter(y, prior, keep="last")
    alike(
        last,
        compiled._make(t[-1] if t.ndim and name != "log_likelihood" else t for name, t in compiled._asdict().items()),
    )


@by_model
def test_steps_agree_with_the_series(model, calls):
    chosen, y, prior = SwitchingFilter(model), simulated(model)[:10], begin(model)
    series, state = chosen.filter(y, prior), chosen.init(prior)
    for time, observation in enumerate(y):
        state, now = chosen.step(state, observation)
        close(now.mean, series.mean[time], scale=100.0)
        close(now.innovation_covariance, series.innovation_covariance[time], scale=100.0)
    close(state.log_likelihood, series.log_likelihood, scale=100.0)
    assert len(calls) == 12  # a series, init and 10 steps
    assert all(result is not None for result in calls)


@by_method
def test_targets_are_independent(method, calls):
    model = positions("ukf")
    chosen, y = SwitchingFilter(model, *method), simulated(model)
    prior = Prior(start(model), torch.eye(5, dtype=F64))
    batch = torch.stack((y, y + 1.0, y - 2.0)).unsqueeze(1)
    together = chosen.filter(batch, prior)
    for i in range(3):
        alone = chosen.filter(batch[i, 0], prior)
        alike(alone, together._make(t[i, 0] for t in together))
    assert len(calls) == 4


@by_method
@pytest.mark.parametrize("fill", ["modes", "zero"])
def test_linear_modes_that_lack_components_agree(method, fill, calls, by_torch):
    noise = {name: value for name, value in NOISE.items() if name != "dt"}
    model = SwitchingModel.of(
        [constant_velocity(2, **noise), constant_acceleration(2, **noise), coordinated_turn(2, rate=0.1, **noise)],
        transition=Generator(torch.full((3, 3), 0.05, dtype=F64).fill_diagonal_(-0.1)),
        components=[(0, 1, 3, 4), range(6), (0, 1, 3, 4)],
        fill=fill,
    )
    chosen, prior = SwitchingFilter(model, *method), Prior(torch.zeros(6, dtype=F64), torch.eye(6, dtype=F64))
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(4, 20, 2, dtype=F64, generator=generator).cumsum(1)
    dt = torch.rand(20, 4, dtype=F64, generator=generator) + 0.5
    y[2, 5] = math.nan

    def stepped():
        state = chosen.init(prior, batch_shape=(4,))
        for observation, step in zip(y.unbind(1), dt, strict=True):
            state, now = chosen.step(state, observation, dt=step)
        return now

    compiled = stepped()
    assert len(calls) == (21 if fill == "modes" else 0)  # filled by zero, they are full modes for the other kernel
    alike(compiled, by_torch(stepped))


@by_method
@pytest.mark.parametrize("kind", ["ekf", "ukf"])
@pytest.mark.parametrize("shared", [True, False])
def test_continuous_time_agrees(method, kind, shared, calls, by_torch):
    noise = {name: value for name, value in TURN.items() if name != "dt"}
    straight = {name: value for name, value in noise.items() if name != "rate_density"}
    model = NonlinearModel.of(
        [constant_velocity(2, **straight), unknown_turn(2, **noise)],
        transition=Generator(torch.tensor([[-0.1, 0.1], [0.3, -0.3]], dtype=F64)),
        components=[(0, 1, 2, 3), range(5)],
        method=kind,
    )
    chosen, prior = SwitchingFilter(model, *method), begin(model)
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3, 8, 2, dtype=F64, generator=generator).cumsum(1)
    dt = torch.rand(8, 3, dtype=F64, generator=generator) + 0.3

    def stepped():
        state = chosen.init(prior, batch_shape=(3,))
        for observation, step in zip(y.unbind(1), dt, strict=True):
            state, now = chosen.step(state, observation, dt=step[0] if shared else step)
        return now

    compiled = stepped()
    assert len(calls) == 9  # init and 8 steps
    alike(compiled, by_torch(stepped))


def test_other_functions_and_gradients_are_left_to_torch(calls):
    model = positions("ukf")
    y, prior = simulated(model)[:5], Prior(start(model), torch.eye(5, dtype=F64))
    own = model.functions("observe")[0]
    for other in (
        NonlinearModel(STAYING, lambda x: 0.9 * x, model.Q, own, model.R, method="ukf"),
        NonlinearModel(STAYING, model.move, model.Q, own, model.R, residual=lambda a, b: a - b),
    ):
        SwitchingFilter(other).filter(y, prior)
    SwitchingFilter(model).filter(y.nan_to_num(0.0).requires_grad_(), prior)
    SwitchingFilter(model, "gpb", 3).filter(y, prior)
    assert calls == []


def test_built_in_functions_of_larger_states_are_left_to_torch(calls, by_torch):
    """A turn takes the last component for its rate, also where its mode had fewer components."""
    turn = unknown_turn(2, **TURN)
    Q = 0.1 * torch.eye(7, dtype=F64).expand(2, 7, 7)
    model = NonlinearModel(STAYING, turn.move, Q, range_bearing(), torch.stack([turn.R] * 2), method="ukf")
    chosen = SwitchingFilter(model)
    y, prior = torch.ones(4, 2, dtype=F64), Prior(torch.ones(7, dtype=F64), torch.eye(7, dtype=F64))
    alike(chosen.filter(y, prior), by_torch(lambda: chosen.filter(y, prior)))
    assert calls == []


def test_a_model_for_other_targets_is_refused_by_step(calls):
    model = positions("ukf")
    several = NonlinearModel(STAYING, model.move, torch.stack([model.Q] * 3), model.observe, model.R, per="target")
    chosen = SwitchingFilter(several)
    state = chosen.init(begin(model), batch_shape=(2,))
    with pytest.raises(ValueError, match="target dimensions"):
        chosen.step(state, torch.zeros(2, 2, dtype=F64))
    assert calls == []


def test_observations_without_density_are_left_to_torch(calls, by_torch):
    model = radar("ekf")
    chosen, prior = SwitchingFilter(model), Prior(start(model), torch.eye(5, dtype=F64))
    y = torch.full((3, 2), 1e200, dtype=F64)
    y[:, 1] = 0.0
    alike(chosen.filter(y, prior), by_torch(lambda: chosen.filter(y, prior)))
    assert calls == [None]
