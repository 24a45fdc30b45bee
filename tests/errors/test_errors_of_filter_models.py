"""Models of continuous time, of unequal sizes and of functions say what is wrong with them."""

import pytest
import torch

from gradlogz import KalmanModel, Prior, Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import (
    Generator,
    NonlinearModel,
    constant_acceleration,
    constant_velocity,
    enumerate_modes,
    follow_drift,
    range_bearing,
    unknown_turn,
)
from support.error_form import each_of, refused

F64 = torch.float64
NOISE = {"spectral_density": 1.0, "observation_variance": 1.0, "dtype": F64}
stay = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=F64)
rate = torch.tensor([[-0.1, 0.1], [0.4, -0.4]], dtype=F64)
flowing = constant_velocity(1, **NOISE)
stepping = constant_velocity(1, dt=1.0, **NOISE)
continuous = SwitchingModel.of([flowing, flowing], transition=Generator(rate))
discrete = SwitchingModel.of([stepping, stepping], transition=stay)
start = Prior(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
y, times = torch.zeros(4, 1, dtype=F64), torch.tensor([0.0, 1.0, 1.0, 4.0], dtype=F64)
pair = [constant_velocity(1, dt=1.0, **NOISE), constant_acceleration(1, dt=1.0, **NOISE)]
unequal = SwitchingModel.of(pair, transition=stay, components=[(0, 1), (0, 1, 2)])
fields = {name: getattr(discrete, name) for name in ("F", "Q", "H", "R")}
wide = KalmanModel(*stepping[:2], torch.eye(2, dtype=F64), torch.eye(2, dtype=F64))

noise = torch.ones(2, 1, 1, dtype=F64)
TURN = {"dt": 1.0, "spectral_density": 1.0, "rate_density": 1.0, "observation_variance": 1.0}


def bent(**changes):
    """A model of functions, with something wrong."""
    parts = {"transition": stay, "move": torch.sin, "Q": noise, "observe": torch.cos, "R": noise}
    return lambda: NonlinearModel(**{**parts, **changes})


def filtered(model=continuous, **options):
    return lambda: imm(model, Series(y, **options), start)


def at_the_sensor():
    line = constant_velocity(2, dt=1.0, spectral_density=0.1, observation_variance=1.0, dtype=F64)
    radar = NonlinearModel.of(
        [line], transition=torch.ones(1, 1, dtype=F64), observe=range_bearing(), R=torch.eye(2, dtype=F64)
    )
    seen = torch.ones(2, 2, dtype=F64)
    return imm(radar, seen, Prior(torch.zeros(4, dtype=F64), torch.eye(4, dtype=F64)))


ERRORS = [
    (TypeError, "Generator: rate must be a tensor; got float.", lambda: Generator(0.1)),
    (TypeError, "SwitchingModel: F must be a tensor; got NoneType.", lambda: SwitchingModel(stay, *[None] * 4)),
    (
        ValueError,
        "SwitchingModel: rate must be nonnegative off the diagonal with rows that sum to zero; "
        "got a smallest rate of 0 and sums that miss zero by 1.",
        lambda: SwitchingModel(transition=Generator(stay), **fields),
    ),
    (
        ValueError,
        "SwitchingModel: rate must be nonnegative off the diagonal with rows that sum to zero; "
        "got a smallest rate of -0.4 and sums that miss zero by 0.",
        lambda: SwitchingModel(transition=Generator(-rate), **fields),
    ),
    (
        ValueError,
        "SwitchingModel.of: models must be of steps with a matrix; got 1 of 2 that are continuous.",
        lambda: SwitchingModel.of([stepping, flowing], transition=stay),
    ),
    (
        ValueError,
        "SwitchingModel.of: models must be continuous with a Generator; got 0 of 2 that are continuous.",
        lambda: SwitchingModel.of([stepping, stepping], transition=Generator(rate)),
    ),
    (
        ValueError,
        "SwitchingModel.of: models must have observations of one size; got 1 and 2.",
        lambda: SwitchingModel.of([stepping, wide], transition=stay),
    ),
    (
        ValueError,
        "SwitchingModel.of: components must be as many as each model has, [2, 3]; got [2, 2].",
        lambda: SwitchingModel.of(pair, transition=stay, components=[(0, 1), (0, 1)]),
    ),
    (
        ValueError,
        "SwitchingModel: components must name some of 0 ... 3 for each of 2 modes, and leave out none; "
        "got ((0, 1), (0, 1, 3)).",
        lambda: SwitchingModel.of(pair, transition=stay, components=[(0, 1), (0, 1, 3)]),
    ),
    (
        ValueError,
        "SwitchingModel: components must name some of 0 ... 1 for each of 2 modes, and leave out none; "
        "got ((0, 0), (0, 1)).",
        lambda: SwitchingModel(stay, **fields, components=((0, 0), (0, 1))),
    ),
    (
        ValueError,
        'SwitchingModel: fill must be "modes" or "zero"; got \'mean\'.',
        lambda: SwitchingModel(stay, **fields, fill="mean"),
    ),
    (
        ValueError,
        "SwitchingModel.at: the model must be one of continuous time; got one with a transition matrix.",
        lambda: discrete.at(times),
    ),
    (
        ValueError,
        "SwitchingModel.still_first: the model must be one of steps; got one of continuous time.",
        lambda: continuous.still_first(4),
    ),
    (
        ValueError,
        "constant_velocity: derivatives must be 2 without dt; got 3.",
        lambda: constant_velocity(1, derivatives=3, **NOISE),
    ),
    (
        ValueError,
        "imm: times must be given, as the model is one of continuous time; got none.",
        filtered(),
    ),
    (
        ValueError,
        "imm: times must come with a model of continuous time; got one with a transition matrix.",
        filtered(discrete, times=times),
    ),
    (
        ValueError,
        "Series: times must be (4,) or (4,), one for each observation; got shape (3,).",
        filtered(times=times[:3]),
    ),
    (
        ValueError,
        "imm: times must not go backwards; got 2 of 4 that are before the one before, or before 0.",
        filtered(times=torch.tensor([-1.0, 2.0, 1.0, 3.0], dtype=F64)),
    ),
    (
        ValueError,
        "imm: times must be finite; got 2 of 4 entries that are NaN or infinite.",
        filtered(times=torch.tensor([0.0, torch.nan, 1.0, 3.0], dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingFilter.step: times must not go backwards; got 1 of 1 that are before the one before, or before 0.",
        lambda: SwitchingFilter(continuous).step(SwitchingFilter(continuous).init(start), y[0], dt=-1.0),
    ),
    (
        ValueError,
        'enumerate_modes: model must say what a component is that a mode lacks; got components and fill="modes".',
        lambda: enumerate_modes(unequal, y, Prior(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))),
    ),
    (
        ValueError,
        "NonlinearModel: move must be a function for each of k=2 modes, or one for all; "
        "got 1, of which 1 can be called.",
        bent(move=[torch.sin]),
    ),
    (
        ValueError,
        "NonlinearModel: observe must be a function for each of k=2 modes, or one for all; "
        "got 2, of which 1 can be called.",
        bent(observe=[torch.sin, 3]),
    ),
    (
        ValueError,
        'NonlinearModel: method must be "ekf" or "ukf", and alpha² (s + kappa) positive; '
        "got 'ukf', alpha=1.0, kappa=-1.",
        bent(method="ukf", kappa=-1),
    ),
    (
        ValueError,
        'NonlinearModel: alpha² kappa + s beta must be 0 or more for "ukf", so that what it adds is a covariance; '
        "got alpha=1.0, beta=0.0, kappa=-0.5 and s=1.",
        bent(method="ukf", beta=0.0, kappa=-0.5),
    ),
    (
        ValueError,
        "NonlinearModel: alpha² (s + kappa) must be at least 2.2e-12 in torch.float64, so that points differ; "
        "got 1e-12.",
        bent(method="ukf", alpha=1e-6),
    ),
    (
        ValueError,
        "imm: observe and move must be finite, with finite derivatives, where the filter goes; "
        "got 2 of 2 that are not.",
        at_the_sensor,
    ),
    (
        ValueError,
        "NonlinearModel: observe must take a state [1] to [1]; got shape (2,).",
        bent(observe=lambda x: torch.cat((x, x))),
    ),
    (
        ValueError,
        "NonlinearModel: transition must be nonnegative with rows that sum to one; "
        "got a smallest entry of 0.1 and sums that miss one by 0.3.",
        bent(transition=stay.mT),
    ),
    (
        ValueError,
        "NonlinearModel: Q must be positive semidefinite; got a smallest eigenvalue of -1.",
        bent(Q=-noise),
    ),
    (
        ValueError,
        "NonlinearModel: R must be finite; got 2 of 2 entries that are NaN or infinite.",
        bent(R=torch.nan * noise),
    ),
    (
        ValueError,
        "NonlinearModel: R must be [*b, t, k=2, o=1, o=1] or without what comes before the modes; got shape (3, 1, 1).",
        bent(R=torch.ones(3, 1, 1, dtype=F64)),
    ),
    (
        TypeError,
        "NonlinearModel.of: models must be one NonlinearMode or KalmanModel or more; "
        "got 1 of types ['SwitchingModel'].",
        lambda: NonlinearModel.of([discrete], transition=stay),
    ),
    (
        ValueError,
        "NonlinearModel.of: observe and R must be given together; got R alone.",
        lambda: NonlinearModel.of([stepping, stepping], transition=stay, R=noise[0]),
    ),
    (
        ValueError,
        "NonlinearModel.of: linear models must not change from one step to the next; got one that changes in time.",
        lambda: NonlinearModel.of([stepping._replace(F=stepping.F.expand(3, 2, 2))], transition=stay[:1, :1]),
    ),
    (
        ValueError,
        "NonlinearModel.of: models must be of steps with a matrix; got 1 of 2 that are continuous.",
        lambda: NonlinearModel.of([stepping, flowing], transition=stay),
    ),
    (
        ValueError,
        "NonlinearModel.of: models must be continuous with a Generator; got 1 of 2 that are continuous.",
        lambda: NonlinearModel.of([unknown_turn(2, **TURN), flowing], transition=Generator(rate)),
    ),
    (
        ValueError,
        "NonlinearModel: dt must come with a transition matrix; got dt beside a Generator.",
        bent(transition=Generator(rate), dt=times),
    ),
    (TypeError, "NonlinearModel: Q must be a tensor; got NoneType.", bent(Q=None)),
    (
        ValueError,
        "NonlinearModel: rate must be nonnegative off the diagonal with rows that sum to zero; "
        "got a smallest rate of 0 and sums that miss zero by 1.",
        bent(transition=Generator(stay), move=lambda x, dt: x),
    ),
    (
        ValueError,
        "NonlinearModel: move must leave a state where it is for dt = 0; got a state 0 that moved.",
        bent(transition=Generator(rate), move=lambda x, dt: x + 1),
    ),
    (
        ValueError,
        "NonlinearModel.at: the model must be one of continuous time; got one with a transition matrix.",
        lambda: bent()().at(times),
    ),
    (
        ValueError,
        "imm: times must be given, as the model is one of continuous time; got none.",
        lambda: imm(bent(transition=Generator(rate), move=lambda x, dt: x)(), y, Prior(noise[0, 0], noise[0])),
    ),
    (ValueError, "follow_drift: steps must be at least 1; got 0.", lambda: follow_drift(torch.sin, steps=0)),
    (
        ValueError,
        "unknown_turn: spectral_density must be a number, not negative; got -1.",
        lambda: unknown_turn(2, **{**TURN, "spectral_density": -1.0}),
    ),
    (ValueError, "unknown_turn: dimensions must be 2 or 3; got 1.", lambda: unknown_turn(1, **TURN)),
    (
        ValueError,
        "unknown_turn: dt must be a number, not negative; got shape (2,).",
        lambda: unknown_turn(2, **{**TURN, "dt": torch.ones(2)}),
    ),
    (
        ValueError,
        "imm: inputs must be given if and only if the model has input_size; got inputs and none.",
        lambda: imm(bent()(), Series(y, inputs=y), Prior(noise[0, 0], noise[0])),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)


def test_times_of_what_does_not_count_need_not_be_any():
    """Ragged series: after its length a target has neither observations nor times."""
    garbage = torch.tensor([[1.0, 2.0, torch.nan, 0.0], [0.5, 0.6, 0.7, 5.0]], dtype=F64)
    found = imm(continuous, Series(y.expand(2, 4, 1), lengths=torch.tensor([2, 4]), times=garbage), start)
    assert found.mean.isfinite().all()
    alone = imm(continuous, Series(y[:2], times=garbage[0, :2]), start)
    torch.testing.assert_close(found.mean[0, :2], alone.mean, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", [SwitchingModel, NonlinearModel])
def test_fields_without_which_there_is_no_model_are_asked_for_by_python(kind):
    with pytest.raises(TypeError, match=r"missing 4 required positional arguments: .*'Q'.*'R'"):
        kind(stay)


def test_without_validation_times_and_rates_pass():
    loose = SwitchingModel(transition=Generator(stay), **fields, validate=False)
    assert loose.transition.rate is stay
    backwards = torch.tensor([1.0, 0.5, 0.6, 0.7], dtype=F64)
    with pytest.raises(ValueError, match="times"):
        imm(continuous, Series(y, times=backwards), start)
    unchecked = SwitchingModel(
        transition=Generator(rate), **{n: getattr(continuous, n) for n in ("F", "Q", "H", "R")}, validate=False
    )
    assert imm(unchecked, Series(y, times=backwards), start).mean.shape == (4, 2)
