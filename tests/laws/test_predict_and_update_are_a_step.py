"""Predict, then update, is a step: for all filters, linear and nonlinear, in discrete and continuous time."""

import pytest
import torch

from gradlogz import Prior, SwitchingFilter
from gradlogz.filters import (
    Filtered,
    Generator,
    NonlinearModel,
    SwitchingModel,
    constant_velocity,
    coordinated_turn,
    range_bearing,
    unknown_turn,
    wrap_angles,
)
from support.scales import close
from support.switching_oracles import F64, beginning, by_definition, observed, positive, same, system

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
NOISE = {"spectral_density": 0.05, "observation_variance": 1.0, "dtype": F64}
rate = torch.tensor([[-0.1, 0.1], [0.3, -0.3]], dtype=F64)


def agree(model, method, start, y, **more):
    """Steps and their halves agree in every field; `more` holds arguments of each step."""
    online = SwitchingFilter(model, *method)
    state = other = online.init(start, batch_shape=tuple(y.shape[:-2]))
    for t in range(y.shape[-2]):
        options = {name: value(t) if callable(value) else value for name, value in more.items()}
        state, whole = online.step(state, y[..., t, :], **options)
        predicted = online.predict(other, **options)
        other, halves = online.update(predicted, y[..., t, :])
        same(Filtered(*halves), whole, 100.0)
        for one, two in zip(other, state, strict=True):
            close(one, two, 100.0)
        same_prediction(predicted, whole, y[..., t, :])
    return predicted


def same_prediction(predicted, whole, y):
    """Fields of Predicted are those that a step reports."""
    for name in ("mean", "covariance", "mode_mean", "mode_covariance", "log_mode_probability"):
        assert torch.equal(getattr(predicted, name).isfinite(), getattr(whole, f"predicted_{name}").isfinite())
        close(getattr(predicted, name), getattr(whole, f"predicted_{name}"), 100.0)
    close(predicted.innovation_covariance, whole.innovation_covariance, 100.0)
    close(predicted.mode_innovation_covariance, whole.mode_innovation_covariance, 100.0)
    there = ~y.isnan().expand_as(whole.innovation)
    v = torch.where(there, y - predicted.expected_observation, 0.0)
    close(torch.sin(v), torch.sin(torch.where(there, whole.innovation, 0.0)), 100.0)  # angles are wrapped
    apart = (y.unsqueeze(-2) - predicted.mode_expected_observation).sin()
    close(apart.nan_to_num(), whole.mode_innovation.sin().nan_to_num(), 100.0)


@each
def test_linear_models(method):
    y = observed(model := system(), 5, 3)
    y[0, 2], y[1, 3, 0] = torch.nan, torch.nan
    agree(model, method, beginning(), y)


@each
def test_models_that_vary_with_time_and_target(method):
    model = system(k=2, lead=(3, 4))
    agree(model, method, beginning(2), observed(model, 4, 3), time=lambda t: t)


@each
def test_inputs(method):
    base = system(k=2)
    model = SwitchingModel(*(getattr(base, n) for n in ("transition", "F", "Q", "H", "R", "b", "d")),
                           B=torch.randn(2, 2, 1, dtype=F64), D=torch.randn(2, 2, 1, dtype=F64))  # fmt: skip
    u = torch.randn(4, 3, 1, dtype=F64)
    agree(model, method, beginning(2), observed(model, 4, 3), inputs=lambda t: u[t])


@each
def test_continuous_time(method):
    parts = [constant_velocity(2, **NOISE), coordinated_turn(2, rate=0.3, **NOISE)]
    model = SwitchingModel.of(parts, transition=Generator(rate))
    start = Prior(torch.randn(4, dtype=F64), positive(4))
    agree(model, method, start, observed(model, 4, 3), dt=lambda t: 0.3 + torch.rand(3, dtype=F64))
    agree(model, method, start, observed(model, 4, 3), dt=0.7)


@each
@pytest.mark.parametrize("way", ["ekf", "ukf"])
@pytest.mark.parametrize("dt", [0.5, None])
def test_functions_and_modes_with_fewer_components(method, way, dt):
    noise = NOISE | ({} if dt is None else {"dt": dt})
    T = Generator(rate) if dt is None else torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
    model = NonlinearModel.of(
        [constant_velocity(2, **noise), unknown_turn(2, rate_density=0.01, **noise)],
        transition=T,
        components=[range(4), range(5)],
        observe=range_bearing(0, 2),
        R=torch.diag(torch.tensor([0.1, 0.001], dtype=F64)),
        residual=wrap_angles(1),
        method=way,
    )
    start = Prior(torch.tensor([20.0, -2.0, 3.0, 0.0, 0.1], dtype=F64), 0.1 * positive(5))
    y = torch.tensor([20.0, 0.1], dtype=F64) + 0.1 * torch.randn(2, 2, 2, dtype=F64)
    agree(model, method, start, y, **({"dt": 0.5} if dt is None else {}))


@pytest.mark.parametrize("method", ["gpb1", "gpb2", "imm"])
def test_the_expected_observation_is_that_of_the_joint_gaussian(method):
    """One step from one Gaussian is exact."""
    model, start = system(), beginning(shared=True)
    y = observed(model, 1)
    online = SwitchingFilter(model, *METHODS[method])
    predicted, exact = online.predict(online.init(start)), by_definition(model, y, start)
    close(y[0] - predicted.expected_observation, exact.innovation[0], 100.0)
    close(predicted.innovation_covariance, exact.innovation_covariance[0], 100.0)


@each
def test_the_halves_have_gradients(method):
    model, y = system(), observed(system(), 1)[0]
    y.requires_grad_(True)
    online = SwitchingFilter(model, *method)
    state = online.init(beginning())
    gradients = []
    for result in (online.step(state, y)[1], online.update(online.predict(state), y)[1]):
        gradients.append(torch.autograd.grad(result.log_likelihood + result.mean.sum(), y)[0])
    close(*gradients, 100.0)


def test_a_masked_observation_is_a_missing_one():
    model = system()
    y, online = observed(model, 1, 2)[:, 0], SwitchingFilter(model)
    predicted = online.predict(online.init(beginning(), batch_shape=(2,)))
    mask = torch.tensor([[True, False], [False, False]])
    one, other = online.update(predicted, y, mask=mask)[1], online.update(predicted, torch.where(mask, y, torch.nan))[1]
    same(one, other)
    close(one.log_mode_probability[1], predicted.log_mode_probability[1])


def test_observations_may_be_numpy_arrays():
    y = observed(model := system(), 2, 3)
    online = SwitchingFilter(model)
    state = online.init(beginning(), batch_shape=(3,))
    same(online.step(state, y[:, 0].numpy())[1], online.step(state, y[:, 0])[1])
    predicted = online.predict(state)
    same(online.update(predicted, y[:, 0].numpy())[1], online.update(predicted, y[:, 0])[1])
    assert torch.equal(online.log_density(predicted, y.numpy()), online.log_density(predicted, y))
    beta = torch.full((3, 3), 1 / 3, dtype=F64)
    associated = online.update(predicted, y.numpy(), association=beta.numpy())[1]
    same(associated, online.update(predicted, y, association=beta)[1])
    with pytest.raises(TypeError, match="observation"):
        online.step(state, y[:, 0].tolist())
