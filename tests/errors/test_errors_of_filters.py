"""Models and filters say what is wrong with a chain, a covariance, a shape, a gap or an input."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gradlogz import ConjugateFilter, KalmanModel, Prior, Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import (
    Discount,
    FilterState,
    GammaPoisson,
    association_probability,
    constant_velocity,
    coordinated_turn,
    enumerate_modes,
    gpb,
    in_gate,
    innovation_scores,
    nees,
    normalized_innovation,
    singer,
)
from gradlogz.filters.validation import check_state
from support.error_form import each_of, refused

F64 = torch.float64
eye = torch.eye(2, dtype=F64)
good = {
    "transition": torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=F64),
    "F": eye.expand(2, 2, 2),
    "Q": eye.expand(2, 2, 2),
    "H": torch.ones(2, 1, 2, dtype=F64),
    "R": torch.ones(2, 1, 1, dtype=F64),
}
model = SwitchingModel(**good)
start = Prior(torch.zeros(2, dtype=F64), eye)
y = torch.zeros(4, 1, dtype=F64)
nan = torch.nan * torch.ones(2, 2, 2, dtype=F64)
third = torch.full((3,), 1 / 3, dtype=F64)
driven = SwitchingModel(**good, B=torch.ones(2, 2, 3, dtype=F64))
changing = SwitchingModel(**{**good, "F": eye.expand(5, 2, 2, 2)})
many = SwitchingModel(**{**good, "F": eye.expand(3, 1, 2, 2, 2)})
exploding = SwitchingModel(**{**good, "F": 1e60 * eye.expand(2, 2, 2)})
certain = SwitchingModel(**{**good, "Q": 0 * good["Q"], "R": 0 * good["R"]})


def built(**changes):
    return lambda: SwitchingModel(**{**good, **changes})


def filtered(y=y, m=model, prior=start):
    return lambda: imm(m, y, prior)


def series(y=y, **options):
    return lambda: Series(y, **options)


def updated(observation, m=model, **options):
    """Update a predicted state."""
    online = SwitchingFilter(m)
    return lambda: online.update(online.predict(online.init(start)), observation, **options)


def halves(observation, **options):
    """Update by another filter than the one that predicted."""
    online = SwitchingFilter(model)
    predicted = online.predict(online.init(start))
    return lambda: SwitchingFilter(model, "gpb", depth=2).update(predicted, observation, **options)


def prior(**changes):
    """What is left of a prior as it is, beside what is wrong."""
    return replace(start, **changes)


def velocity(dimensions=2, **changes):
    numbers = {"dt": 1.0, "spectral_density": 1.0, "observation_variance": 1.0}
    return lambda: constant_velocity(dimensions, **{**numbers, **changes})


ERRORS = [
    (TypeError, "Series: times", "seconds", lambda: Series(y, times=np.arange(4).astype("datetime64[ns]"))),
    (TypeError, "Series: observations", "numbers", lambda: Series(np.array([[0.0], [None]]))),
    (
        ValueError,
        "SwitchingModel: F",
        "[t, k=2",
        built(F=eye.expand(3, 2, 2)),
    ),
    (
        ValueError,
        "SwitchingModel: H",
        "[t, k=2",
        built(H=torch.ones(2, 1, 3, dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingModel: transition",
        "[t, k",
        built(transition=torch.ones(2, dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingModel: fields",
        "number",
        built(F=eye.expand(3, 2, 2, 2), Q=eye.expand(4, 2, 2, 2)),
    ),
    (
        ValueError,
        "SwitchingModel: Q",
        "finite",
        built(Q=nan),
    ),
    (
        ValueError,
        "SwitchingModel: transition",
        "nonnegative",
        built(transition=good["transition"].mT),
    ),
    (
        ValueError,
        "SwitchingModel: transition",
        "nonnegative",
        built(transition=torch.tensor([[1.1, -0.1], [0.0, 1.0]], dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingModel: Q",
        "positive semidefinite",
        built(Q=-eye.expand(2, 2, 2)),
    ),
    (
        ValueError,
        "SwitchingModel: Q",
        "symmetric",
        built(Q=torch.tensor([[2.0, 1.0], [0.0, 2.0]], dtype=F64).expand(2, 2, 2)),
    ),
    (
        TypeError,
        "SwitchingModel: None",
        "share",
        built(F=torch.eye(2).expand(2, 2, 2)),
    ),
    (
        TypeError,
        "SwitchingModel.of: models",
        "KalmanModel",
        lambda: SwitchingModel.of([], transition=eye),
    ),
    (
        ValueError,
        "SwitchingModel.of: models",
        "components",
        lambda: SwitchingModel.of([velocity()(), velocity(derivatives=3)()], transition=torch.eye(2)),
    ),
    (
        ValueError,
        "imm: observations",
        "[*b,",
        filtered(torch.zeros(4, 2, dtype=F64)),
    ),
    (
        ValueError,
        "Series: observations",
        "step",
        filtered(torch.zeros(0, 1, dtype=F64)),
    ),
    (
        ValueError,
        "imm: observations",
        "finite",
        filtered(y + torch.inf),
    ),
    (
        ValueError,
        "imm: observations",
        "steps",
        filtered(m=changing),
    ),
    (
        ValueError,
        "imm: F",
        "observations",
        filtered(y.expand(2, 4, 1), m=many),
    ),
    (
        ValueError,
        "Series: mask",
        "something",
        series(mask=torch.ones(4, dtype=F64)),
    ),
    (
        ValueError,
        "Series: lengths",
        "integers",
        series(lengths=torch.tensor([1, 2])),
    ),
    (
        ValueError,
        "Series: lengths",
        "integers",
        series(y.expand(2, 4, 1), lengths=torch.tensor([True, False])),
    ),
    (
        ValueError,
        "imm: lengths",
        "between",
        filtered(Series(y.expand(3, 4, 1), lengths=torch.tensor([-1, 5, 4]))),
    ),
    (TypeError, "Series: lengths", "a tensor", series(y.expand(2, 4, 1), lengths=[4, 3])),
    (TypeError, "Series: mask", "a tensor", series(mask=[True] * 4)),
    (
        TypeError,
        "SwitchingFilter.init: model",
        "SwitchingModel",
        lambda: SwitchingFilter(KalmanModel(eye, eye, eye[:1], eye[:1, :1])).init(start),
    ),
    (
        ValueError,
        "SwitchingFilter.step: state",
        "Gaussian",
        lambda: check_state("SwitchingFilter.step", model, FilterState(*SwitchingFilter(model).init(start)), depth=1),
    ),
    (
        ValueError,
        "SwitchingFilter.step: state",
        "Gaussian",
        lambda: check_state(
            "SwitchingFilter.step", model, FilterState(*SwitchingFilter(model, "gpb", depth=1).init(start)), depth=0
        ),
    ),
    (
        TypeError,
        "SwitchingFilter.step: None",
        "share",
        lambda: check_state(
            "SwitchingFilter.step",
            model,
            FilterState(*(t.float() for t in SwitchingFilter(model).init(start))),
            depth=0,
        ),
    ),
    (
        ValueError,
        "imm: prior.mean",
        "or",
        filtered(prior=prior(mean=torch.zeros(7, 2, dtype=F64))),
    ),
    (
        ValueError,
        "Series: None",
        "device",
        series(mask=torch.ones(4, dtype=torch.bool, device="meta")),
    ),
    (
        ValueError,
        "Series: None",
        "device",
        series(lengths=torch.tensor(2, device="meta")),
    ),
    (
        ValueError,
        "imm: inputs",
        "model",
        filtered(m=driven),
    ),
    (
        ValueError,
        "imm: inputs",
        "model",
        filtered(Series(y, inputs=torch.zeros(4, 3, dtype=F64))),
    ),
    (
        ValueError,
        "imm: inputs",
        "end",
        filtered(Series(y, inputs=torch.zeros(4, 2, dtype=F64)), m=driven),
    ),
    (
        ValueError,
        "Series: inputs",
        "observation",
        series(inputs=torch.zeros(3, 2, dtype=F64)),
    ),
    (
        ValueError,
        "Series: times",
        "observation",
        series(y.expand(2, 4, 1), times=torch.zeros(3, dtype=F64)),
    ),
    (
        TypeError,
        "Series: None",
        "share",
        series(times=torch.zeros(4)),
    ),
    (TypeError, "imm: prior", "a Prior", filtered(prior={"mean": y, "covariance": y})),
    (
        ValueError,
        "Prior: mean",
        "covariance",
        lambda: Prior(start.mean, torch.eye(3, dtype=F64)),
    ),
    (
        TypeError,
        "Prior: None",
        "share",
        lambda: Prior(start.mean, torch.eye(2)),
    ),
    (
        TypeError,
        "imm: None",
        "share",
        filtered(prior=Prior(torch.zeros(2), torch.eye(2))),
    ),
    (
        ValueError,
        "SwitchingFilter.step: mask",
        "something",
        lambda: SwitchingFilter(model).step(SwitchingFilter(model).init(start), y[0], mask=y[:3, 0] > 0),
    ),
    (
        ValueError,
        "imm: prior.mean",
        "or",
        filtered(y.expand(7, 4, 1), prior=prior(mean=torch.zeros(7, 2, dtype=F64))),
    ),
    (
        ValueError,
        "imm: prior.covariance",
        "positive semidefinite",
        filtered(prior=prior(covariance=-eye)),
    ),
    (
        ValueError,
        "imm: prior.mean",
        "finite",
        filtered(prior=prior(mean=nan[0, 0])),
    ),
    (
        ValueError,
        "imm: prior.log_mode_probability",
        "modes",
        filtered(prior=prior(log_mode_probability=torch.zeros(1, dtype=F64))),
    ),
    (
        ValueError,
        "imm: exp(prior.log_mode_probability)",
        "sum",
        filtered(prior=prior(log_mode_probability=torch.zeros(2, dtype=F64))),
    ),
    (
        ValueError,
        "imm: prior.log_mode_probability",
        "finite",
        filtered(prior=prior(log_mode_probability=nan[0, 0])),
    ),
    (
        ValueError,
        "imm: R",
        "positive",
        filtered(m=certain, prior=prior(covariance=0 * eye)),
    ),
    (
        ValueError,
        "gpb: method",
        "depth",
        lambda: gpb(model, y, start, depth=0),
    ),
    (
        ValueError,
        "imm: keep",
        "last",
        lambda: imm(model, y, start, keep="first"),
    ),
    (
        ValueError,
        "nees: filtered",
        "covariance",
        lambda: nees(imm(model, y, start, fields="mean"), y),
    ),
    (
        ValueError,
        "normalized_innovation: filtered",
        "innovation_covariance",
        lambda: normalized_innovation(imm(model, y, start, fields=())),
    ),
    (
        ValueError,
        "imm: fields",
        "Filtered",
        lambda: imm(model, y, start, fields=("means", "covariance")),
    ),
    (
        ValueError,
        "SwitchingFilter.predict: time",
        "step",
        lambda: SwitchingFilter(changing).predict(SwitchingFilter(changing).init(start), time=5),
    ),
    (ValueError, "SwitchingFilter.update: observation", "observation", updated(y)),
    (ValueError, "Prior: per", "mode", lambda: Prior(torch.zeros(2, 2), torch.eye(2), per="axis")),
    (ValueError, "SwitchingModel: per", "time", built(per="mode")),
    (ValueError, "imm: prior.mean", "modes or", filtered(y.expand(2, 4, 1), prior=prior(mean=eye))),
    (
        ValueError,
        "imm: prior.covariance",
        "modes or",
        filtered(y.expand(2, 4, 1), prior=prior(covariance=eye.expand(2, 2, 2))),
    ),
    (ValueError, "imm: F", "steps or", filtered(torch.zeros(5, 5, 1, dtype=F64), changing)),
    (
        ValueError,
        "SwitchingFilter.step: F",
        "steps or",
        lambda: SwitchingFilter(changing).step(
            SwitchingFilter(changing).init(start, batch_shape=(5,)), torch.zeros(5, 1, dtype=F64)
        ),
    ),
    (
        ValueError,
        "SwitchingFilter.step: state",
        "comes from imm",
        lambda: SwitchingFilter(model, "gpb", depth=2).step(SwitchingFilter(model).init(start), y[0]),
    ),
    (ValueError, "FilterState: index", "one target", lambda: SwitchingFilter(model).init(start)[0]),
    (
        ValueError,
        "FilterState.cat: states",
        "one filter",
        lambda: FilterState.cat(
            [f.init(start, batch_shape=(1,)) for f in (SwitchingFilter(model), SwitchingFilter(model, "gpb", depth=2))]
        ),
    ),
    (ValueError, "imm: model", "although R is", filtered(torch.zeros(9, 1, dtype=F64), exploding)),
    (
        TypeError,
        "SwitchingModel.of: None",
        "share one dtype",
        lambda: SwitchingModel.of(
            [
                KalmanModel(eye, eye, eye[:1], eye[:1, :1]),
                KalmanModel(*(t.float() for t in (eye, eye, eye[:1], eye[:1, :1]))),
            ],
            transition=good["transition"],
        ),
    ),
    (
        ValueError,
        "constant_velocity: observation_variance",
        "each axis",
        lambda: constant_velocity(2, dt=1.0, spectral_density=1.0, observation_variance=[1.0, 2.0, 3.0]),
    ),
    (ValueError, "SwitchingFilter.update: observation", "detections", updated(y[0], association=third)),
    (ValueError, "SwitchingFilter.update: association", "of none", updated(y[:3], association=third)),
    (ValueError, "SwitchingFilter.update: association", "negative", updated(y[:2], association=third - 0.5)),
    (ValueError, "SwitchingFilter.update: association", "one", updated(y[:2], association=third / 2)),
    (ValueError, "SwitchingFilter.update: association", "missing", updated(y[:2] * math.nan, association=third)),
    (
        ValueError,
        "SwitchingFilter.update: step_log_likelihood",
        "each target",
        updated(y[:2], association=third, step_log_likelihood=third),
    ),
    (ValueError, "SwitchingFilter.update: predicted", "got imm", halves(y[0])),
    (ValueError, "SwitchingFilter.update: mask", "combined", updated(y[:2], association=third, mask=y[:2, 0] > 0)),
    (ValueError, "SwitchingFilter.update: step_log_likelihood", "needs", updated(y[0], step_log_likelihood=third[0])),
    (
        TypeError,
        "SwitchingFilter.update: predicted",
        "Predicted",
        lambda: SwitchingFilter(model).update(SwitchingFilter(model).init(start), y[0]),
    ),
    (ValueError, "SwitchingFilter.update: mask", "bool", updated(y[0], mask=y[:3, 0] > 0)),
    (
        ValueError,
        "association_probability: gate_probability",
        "from 0 to 1",
        lambda: association_probability(
            third, detection_probability=0.9, log_clutter_density=0.0, gate_probability=1.1
        ),
    ),
    (
        ValueError,
        "association_probability: detection_probability",
        "always",
        lambda: association_probability(math.nan * third, detection_probability=1.0, log_clutter_density=0.0),
    ),
    (
        ValueError,
        "SwitchingFilter.step: time",
        "step",
        lambda: SwitchingFilter(changing).step(SwitchingFilter(changing).init(start), y[0], time=5),
    ),
    (
        ValueError,
        "SwitchingFilter.step: observation",
        "state",
        lambda: SwitchingFilter(model).step(SwitchingFilter(model).init(start, batch_shape=(3,)), y[0]),
    ),
    (
        ValueError,
        "enumerate_modes: histories",
        "max_histories",
        lambda: enumerate_modes(model, y.expand(10, 4, 1).reshape(40, 1), start),
    ),
    (ValueError, "constant_velocity: dimensions", "or", velocity(4)),
    (ValueError, "constant_velocity: derivatives", "least", velocity(derivatives=1)),
    (ValueError, "constant_velocity: dt", "positive", velocity(dt=0.0)),
    (
        ValueError,
        "constant_velocity: spectral_density",
        "nonnegative",
        velocity(spectral_density=-1.0),
    ),
    (
        ValueError,
        "constant_velocity: dt",
        "number",
        velocity(dt=torch.ones(2, 2)),
    ),
    (
        ValueError,
        "singer: correlation_time",
        "scalar",
        lambda: singer(1, dt=1.0, correlation_time=torch.ones(2), acceleration_variance=1.0, observation_variance=1.0),
    ),
    (
        ValueError,
        "coordinated_turn: dimensions",
        "or",
        lambda: coordinated_turn(1, dt=1.0, rate=1.0, spectral_density=1.0, observation_variance=1.0),
    ),
    (
        ValueError,
        "innovation_scores: filtered",
        "mode_innovation",
        lambda: innovation_scores(imm(model, y, start, fields=("mean",))),
    ),
    (
        ValueError,
        "innovation_scores: filtered",
        "singular",
        lambda: innovation_scores(
            (f := imm(model, y, start))._replace(mode_innovation_covariance=0 * f.mode_innovation_covariance)
        ),
    ),
    (
        ValueError,
        "normalized_innovation: level",
        "in",
        lambda: normalized_innovation(imm(model, y, start), level=95),
    ),
    (
        ValueError,
        "nees: truth",
        "mean",
        lambda: nees(imm(model, y, start), y),
    ),
    (
        ValueError,
        "nees: truth",
        "components",
        lambda: nees(imm(model, y, start), y.expand(4, 2), components=[1]),
    ),
    (
        ValueError,
        "nees: components",
        "different",
        lambda: nees(imm(model, y, start), y.expand(4, 2), components=(0, 2)),
    ),
    (
        ValueError,
        "in_gate: covariance",
        "innovation",
        lambda: in_gate(y, eye),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)


def test_a_filter_does_not_refuse_its_own_states():
    for depth in (0, 1, 2, 3, 4):
        own = SwitchingFilter(model) if depth == 0 else SwitchingFilter(model, "gpb", depth=depth)
        state = own.init(start)
        for seen in y:
            check_state("SwitchingFilter.step", model, state, depth=depth)
            state, _ = own.step(state, seen)
        check_state("SwitchingFilter.step", model, state, depth=depth)


def test_probabilities_that_are_no_logarithms_are_told_how_to_be():
    for call in (
        filtered(prior=prior(log_mode_probability=good["transition"][0])),
        lambda: counted(good["transition"][0]),
    ):
        with pytest.raises(ValueError, match=r"\.log\(\) of probabilities, or \.log_softmax\(-1\)"):
            call()


def counted(log_mode_probability):
    family = GammaPoisson()
    prior = family.prior(torch.ones((), dtype=F64), torch.ones((), dtype=F64))
    chosen = ConjugateFilter(family, transition=good["transition"], dynamics=[Discount(0.9), Discount(0.5)])
    return chosen.filter(y, prior=prior, log_mode_probability=log_mode_probability)


def test_what_is_nearly_right_is_not_refused():
    T = torch.tensor([[0.1] * 10, *[[0.1] * 10] * 9], dtype=F64)  # ten tenths do not sum to one exactly
    for dtype in (F64, torch.float32):
        model = SwitchingModel(T.to(dtype), *(torch.ones(10, 1, 1, dtype=dtype) for _ in range(4)))
        assert torch.equal(model.transition, T.to(dtype))  # and is not normalised either


@pytest.mark.parametrize("name", ["transition", "Q", "R"])
def test_without_validation_values_pass(name):
    bad = {"transition": good["transition"].mT, "Q": -good["Q"], "R": -good["R"]}
    with pytest.raises(ValueError, match=name):
        SwitchingModel(**{**good, name: bad[name]})
    SwitchingModel(**{**good, name: bad[name]}, validate=False)


@pytest.mark.parametrize(
    "filter", [imm, lambda *a, **o: gpb(*a, depth=2, **o), lambda *a, **o: enumerate_modes(*a, **o).filtered]
)
def test_an_impossible_observation_changes_nothing_but_the_likelihood(filter):
    """Its density is 0 in every mode, as far as numbers go: what was predicted stays."""
    far = torch.tensor([[1.0], [1e200], [2.0]], dtype=F64)
    gap = torch.tensor([[1.0], [math.nan], [2.0]], dtype=F64)
    found, other = filter(model, far, start), filter(model, gap, start)
    assert found.log_likelihood == -torch.inf
    assert found.step_log_likelihood[1] == -torch.inf
    assert (found.mode_log_likelihood[1] == -torch.inf).all()
    for name in ("mean", "covariance", "log_mode_probability", "mode_mean", "mode_covariance"):
        torch.testing.assert_close(getattr(found, name), getattr(other, name), rtol=0, atol=1e-13)


def test_kalman_models_are_tuples_of_their_fields():
    one = KalmanModel(eye, eye, eye[:1], eye[:1, :1])
    assert SwitchingModel.of([one], transition=torch.ones(1, 1, dtype=F64)).F.shape == (1, 2, 2)
