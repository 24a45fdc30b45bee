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
    with_clutter,
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
    (
        ValueError,
        "SwitchingModel.of: models",
        "continuous=True",
        lambda: SwitchingModel.of([KalmanModel(1.0, 1.0, 1.0, 1.0)], transition=Generator(0 * rate[:1, :1])),
    ),
    (
        ValueError,
        "SwitchingFilter.step: dt",
        "missing",
        lambda: SwitchingFilter(continuous).step(SwitchingFilter(continuous).init(start), torch.zeros(1, dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingFilter.predict: dt",
        "missing",
        lambda: SwitchingFilter(continuous).predict(SwitchingFilter(continuous).init(start)),
    ),
    (ValueError, "with_clutter: model", "Generator", lambda: with_clutter(continuous, 0.1, torch.eye(1, dtype=F64))),
    (ValueError, "with_clutter: probability", "1.5", lambda: with_clutter(discrete, 1.5, torch.eye(1, dtype=F64))),
    (ValueError, "with_clutter: covariance", "[1, 1]", lambda: with_clutter(discrete, 0.1, torch.eye(2, dtype=F64))),
    (
        ValueError,
        "with_clutter: mean",
        "[1]",
        lambda: with_clutter(discrete, 0.1, torch.eye(1, dtype=F64), mean=torch.zeros(2, dtype=F64)),
    ),
    (
        ValueError,
        "with_clutter: mean",
        "got shape",
        lambda: with_clutter(discrete, 0.1, torch.eye(1, dtype=F64), mean=torch.zeros((), dtype=F64)),
    ),
    (
        ValueError,
        "with_clutter: covariance",
        "semidefinite",
        lambda: with_clutter(discrete, 0.1, -torch.eye(1, dtype=F64)),
    ),
    (TypeError, "Generator: rate", "a tensor", lambda: Generator([[0.0]])),
    (TypeError, "SwitchingModel: F", "a tensor", lambda: SwitchingModel(stay, *[None] * 4)),
    (
        ValueError,
        "SwitchingModel: rate",
        "nonnegative",
        lambda: SwitchingModel(transition=Generator(stay), **fields),
    ),
    (
        ValueError,
        "SwitchingModel: rate",
        "nonnegative",
        lambda: SwitchingModel(transition=Generator(-rate), **fields),
    ),
    (
        ValueError,
        "SwitchingModel.of: models",
        "matrix",
        lambda: SwitchingModel.of([stepping, flowing], transition=stay),
    ),
    (
        ValueError,
        "SwitchingModel.of: models",
        "continuous",
        lambda: SwitchingModel.of([stepping, stepping], transition=Generator(rate)),
    ),
    (
        ValueError,
        "SwitchingModel.of: models",
        "observation size",
        lambda: SwitchingModel.of([stepping, wide], transition=stay),
    ),
    (
        ValueError,
        "SwitchingModel.of: components",
        "model",
        lambda: SwitchingModel.of(pair, transition=stay, components=[(0, 1), (0, 1)]),
    ),
    (
        ValueError,
        "SwitchingModel: components",
        "modes",
        lambda: SwitchingModel.of(pair, transition=stay, components=[(0, 1), (0, 1, 3)]),
    ),
    (
        ValueError,
        "SwitchingModel: components",
        "modes",
        lambda: SwitchingModel(stay, **fields, components=((0, 0), (0, 1))),
    ),
    (
        ValueError,
        "SwitchingModel: fill",
        "modes",
        lambda: SwitchingModel(stay, **fields, fill="mean"),
    ),
    (
        ValueError,
        "SwitchingModel.at: model",
        "continuous",
        lambda: discrete.at(times),
    ),
    (
        ValueError,
        "SwitchingModel.still_first: model",
        "discrete",
        lambda: continuous.still_first(4),
    ),
    (
        ValueError,
        "constant_velocity: derivatives",
        "without",
        lambda: constant_velocity(1, derivatives=3, **NOISE),
    ),
    (
        ValueError,
        "imm: times",
        "continuous",
        filtered(),
    ),
    (
        ValueError,
        "imm: times",
        "continuous",
        filtered(discrete, times=times),
    ),
    (
        ValueError,
        "Series: times",
        "observation",
        filtered(times=times[:3]),
    ),
    (
        ValueError,
        "imm: times",
        "decrease",
        filtered(times=torch.tensor([-1.0, 2.0, 1.0, 3.0], dtype=F64)),
    ),
    (
        ValueError,
        "imm: times",
        "finite",
        filtered(times=torch.tensor([0.0, torch.nan, 1.0, 3.0], dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingFilter.step: times",
        "decrease",
        lambda: SwitchingFilter(continuous).step(SwitchingFilter(continuous).init(start), y[0], dt=-1.0),
    ),
    (
        ValueError,
        "enumerate_modes: model",
        "component",
        lambda: enumerate_modes(unequal, y, Prior(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))),
    ),
    (
        ValueError,
        "NonlinearModel: move",
        "function",
        bent(move=[torch.sin]),
    ),
    (
        ValueError,
        "NonlinearModel: observe",
        "function",
        bent(observe=[torch.sin, 3]),
    ),
    (
        ValueError,
        "NonlinearModel: method",
        "positive",
        bent(method="ukf", kappa=-1),
    ),
    (
        ValueError,
        "NonlinearModel: alpha",
        "covariance",
        bent(method="ukf", beta=0.0, kappa=-0.5),
    ),
    (
        ValueError,
        "NonlinearModel: alpha",
        "float64",
        bent(method="ukf", alpha=1e-6),
    ),
    (
        ValueError,
        "imm: observe",
        "derivative",
        at_the_sensor,
    ),
    (
        ValueError,
        "NonlinearModel: observe",
        "state",
        bent(observe=lambda x: torch.cat((x, x))),
    ),
    (
        ValueError,
        "NonlinearModel: transition",
        "nonnegative",
        bent(transition=stay.mT),
    ),
    (
        ValueError,
        "NonlinearModel: Q",
        "positive semidefinite",
        bent(Q=-noise),
    ),
    (
        ValueError,
        "NonlinearModel: R",
        "finite",
        bent(R=torch.nan * noise),
    ),
    (
        ValueError,
        "NonlinearModel: R",
        "[t, k=2",
        bent(R=torch.ones(3, 1, 1, dtype=F64)),
    ),
    (
        TypeError,
        "NonlinearModel.of: models",
        "NonlinearMode",
        lambda: NonlinearModel.of([discrete], transition=stay),
    ),
    (
        ValueError,
        "NonlinearModel.of: observe",
        "given together",
        lambda: NonlinearModel.of([stepping, stepping], transition=stay, R=noise[0]),
    ),
    (
        ValueError,
        "NonlinearModel.of: models",
        "time-varying",
        lambda: NonlinearModel.of([stepping._replace(F=stepping.F.expand(3, 2, 2))], transition=stay[:1, :1]),
    ),
    (
        ValueError,
        "NonlinearModel.of: models",
        "matrix",
        lambda: NonlinearModel.of([stepping, flowing], transition=stay),
    ),
    (
        ValueError,
        "NonlinearModel.of: models",
        "continuous",
        lambda: NonlinearModel.of([unknown_turn(2, **TURN), flowing], transition=Generator(rate)),
    ),
    (
        ValueError,
        "NonlinearModel: dt",
        "transition",
        bent(transition=Generator(rate), dt=times),
    ),
    (TypeError, "NonlinearModel: Q", "a tensor", bent(Q=None)),
    (
        ValueError,
        "NonlinearModel: rate",
        "nonnegative",
        bent(transition=Generator(stay), move=lambda x, dt: x),
    ),
    (
        ValueError,
        "NonlinearModel: move",
        "leave",
        bent(transition=Generator(rate), move=lambda x, dt: x + 1),
    ),
    (
        ValueError,
        "NonlinearModel.at: model",
        "continuous",
        lambda: bent()().at(times),
    ),
    (
        ValueError,
        "imm: times",
        "continuous",
        lambda: imm(bent(transition=Generator(rate), move=lambda x, dt: x)(), y, Prior(noise[0, 0], noise[0])),
    ),
    (ValueError, "follow_drift: steps", "least", lambda: follow_drift(torch.sin, steps=0)),
    (
        ValueError,
        "unknown_turn: spectral_density",
        "negative",
        lambda: unknown_turn(2, **{**TURN, "spectral_density": -1.0}),
    ),
    (ValueError, "unknown_turn: dimensions", "or", lambda: unknown_turn(1, **TURN)),
    (
        ValueError,
        "unknown_turn: dt",
        "negative",
        lambda: unknown_turn(2, **{**TURN, "dt": torch.ones(2)}),
    ),
    (
        ValueError,
        "imm: inputs",
        "input_size",
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
