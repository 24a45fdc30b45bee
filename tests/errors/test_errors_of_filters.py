"""Models and filters say what is wrong with a chain, a covariance, a shape, a gap or an input."""

import math
from dataclasses import replace

import pytest
import torch

from gradlogz import ConjugateFilter, KalmanModel, Prior, Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import (
    Discount,
    FilterState,
    GammaPoisson,
    constant_velocity,
    coordinated_turn,
    enumerate_modes,
    gpb,
    in_gate,
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
driven = SwitchingModel(**good, B=torch.ones(2, 2, 3, dtype=F64))
changing = SwitchingModel(**{**good, "F": eye.expand(5, 2, 2, 2)})
many = SwitchingModel(**{**good, "F": eye.expand(3, 1, 2, 2, 2)})
certain = SwitchingModel(**{**good, "Q": 0 * good["Q"], "R": 0 * good["R"]})


def built(**changes):
    return lambda: SwitchingModel(**{**good, **changes})


def filtered(y=y, m=model, prior=start):
    return lambda: imm(m, y, prior)


def series(y=y, **options):
    return lambda: Series(y, **options)


def prior(**changes):
    """What is left of a prior as it is, beside what is wrong."""
    return replace(start, **changes)


def velocity(dimensions=2, **changes):
    numbers = {"dt": 1.0, "spectral_density": 1.0, "observation_variance": 1.0}
    return lambda: constant_velocity(dimensions, **{**numbers, **changes})


ERRORS = [
    (
        ValueError,
        "SwitchingModel: F must be [*b, t, k=2, s=2, s=2] or without what comes before the modes; got shape (3, 2, 2).",
        built(F=eye.expand(3, 2, 2)),
    ),
    (
        ValueError,
        "SwitchingModel: H must be [*b, t, k=2, o=1, s=2] or without what comes before the modes; got shape (2, 1, 3).",
        built(H=torch.ones(2, 1, 3, dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingModel: transition must be [*b, t, k, k] or without what comes before the modes; got shape (2,).",
        built(transition=torch.ones(2, dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingModel: fields that change in time must share one number of steps; got [3, 4].",
        built(F=eye.expand(3, 2, 2, 2), Q=eye.expand(4, 2, 2, 2)),
    ),
    (
        ValueError,
        "SwitchingModel: Q must be finite; got 8 of 8 entries that are NaN or infinite.",
        built(Q=nan),
    ),
    (
        ValueError,
        "SwitchingModel: transition must be nonnegative with rows that sum to one; "
        "got a smallest entry of 0.1 and sums that miss one by 0.3.",
        built(transition=good["transition"].mT),
    ),
    (
        ValueError,
        "SwitchingModel: transition must be nonnegative with rows that sum to one; "
        "got a smallest entry of -0.1 and sums that miss one by 0.",
        built(transition=torch.tensor([[1.1, -0.1], [0.0, 1.0]], dtype=F64)),
    ),
    (
        ValueError,
        "SwitchingModel: Q must be positive semidefinite; got a smallest eigenvalue of -1.",
        built(Q=-eye.expand(2, 2, 2)),
    ),
    (
        ValueError,
        "SwitchingModel: Q must be symmetric; got an asymmetry of 1.",
        built(Q=torch.tensor([[2.0, 1.0], [0.0, 2.0]], dtype=F64).expand(2, 2, 2)),
    ),
    (
        TypeError,
        "SwitchingModel: tensors must share one dtype; got transition torch.float64, F torch.float32, "
        "Q torch.float64, H torch.float64, R torch.float64.",
        built(F=torch.eye(2).expand(2, 2, 2)),
    ),
    (
        TypeError,
        "SwitchingModel.of: models must be one KalmanModel or more; got 0 of types [].",
        lambda: SwitchingModel.of([], transition=eye),
    ),
    (
        ValueError,
        "SwitchingModel.of: models must have states of one size, or components; got 4 and 6.",
        lambda: SwitchingModel.of([velocity()(), velocity(derivatives=3)()], transition=torch.eye(2)),
    ),
    (
        ValueError,
        "imm: observations must be [*b, t, o=1]; got shape (4, 2).",
        filtered(torch.zeros(4, 2, dtype=F64)),
    ),
    (
        ValueError,
        "Series: observations must be [*b, t, o] with one step or more; got shape (0, 1).",
        filtered(torch.zeros(0, 1, dtype=F64)),
    ),
    (
        ValueError,
        "imm: observations must be finite; got 4 of 4 entries that are NaN or infinite.",
        filtered(y + torch.inf),
    ),
    (
        ValueError,
        "imm: observations must have t=5, the steps of the model; got shape (4, 1).",
        filtered(m=changing),
    ),
    (
        ValueError,
        "imm: F must begin with the targets (2,) of the observations, or 1 in their place; got shape (3, 1, 2, 2, 2).",
        filtered(y.expand(2, 4, 1), m=many),
    ),
    (
        ValueError,
        "Series: mask must be bool, (4, 1) or (4,), true where something was observed; "
        "got torch.float64 of shape (4,).",
        series(mask=torch.ones(4, dtype=F64)),
    ),
    (
        ValueError,
        "Series: lengths must be whole numbers of shape (), one for each target; got torch.int64 of shape (2,).",
        series(lengths=torch.tensor([1, 2])),
    ),
    (
        ValueError,
        "Series: lengths must be whole numbers of shape (2,), one for each target; got torch.bool of shape (2,).",
        series(y.expand(2, 4, 1), lengths=torch.tensor([True, False])),
    ),
    (
        ValueError,
        "imm: lengths must be in 0 ... t=4; got 2 that are not.",
        filtered(Series(y.expand(3, 4, 1), lengths=torch.tensor([-1, 5, 4]))),
    ),
    (TypeError, "Series: lengths must be a tensor; got list.", series(y.expand(2, 4, 1), lengths=[4, 3])),
    (TypeError, "Series: mask must be a tensor; got list.", series(mask=[True] * 4)),
    (
        TypeError,
        "SwitchingFilter.init: model must be a SwitchingModel or a NonlinearModel; got KalmanModel.",
        lambda: SwitchingFilter(KalmanModel(eye, eye, eye[:1], eye[:1, :1])).init(start),
    ),
    (
        ValueError,
        "SwitchingFilter.step: state must be one of this filter, with 1 Gaussian of s=2 components; "
        "got shapes (2, 2) and (2,).",
        lambda: check_state("SwitchingFilter.step", model, SwitchingFilter(model).init(start), depth=1),
    ),
    (
        ValueError,
        "SwitchingFilter.step: state must be one of this filter, with k=2 Gaussians of s=2 components; "
        "got shapes (1, 2) and (2,).",
        lambda: check_state("SwitchingFilter.step", model, SwitchingFilter(model, "gpb", depth=1).init(start), depth=0),
    ),
    (
        TypeError,
        "SwitchingFilter.step: tensors must share one dtype; got state.mean torch.float32, model torch.float64.",
        lambda: check_state(
            "SwitchingFilter.step",
            model,
            FilterState(*(t.float() for t in SwitchingFilter(model).init(start))),
            depth=0,
        ),
    ),
    (
        ValueError,
        "imm: prior.mean must be [2] or [2, 2]; got shape (7, 2).",
        filtered(prior=prior(mean=torch.zeros(7, 2, dtype=F64))),
    ),
    (
        ValueError,
        "Series: tensors must be on one device; got mask on meta, observations on cpu.",
        series(mask=torch.ones(4, dtype=torch.bool, device="meta")),
    ),
    (
        ValueError,
        "Series: tensors must be on one device; got lengths on meta, observations on cpu.",
        series(lengths=torch.tensor(2, device="meta")),
    ),
    (
        ValueError,
        "imm: inputs must be given if and only if the model has B or D; got no inputs but B or D.",
        filtered(m=driven),
    ),
    (
        ValueError,
        "imm: inputs must be given if and only if the model has B or D; got inputs but neither B nor D.",
        filtered(Series(y, inputs=torch.zeros(4, 3, dtype=F64))),
    ),
    (
        ValueError,
        "imm: inputs must end in u=3; got shape (4, 2).",
        filtered(Series(y, inputs=torch.zeros(4, 2, dtype=F64)), m=driven),
    ),
    (
        ValueError,
        "Series: inputs must be (4,) or (4,), one for each observation; got shape (3,).",
        series(inputs=torch.zeros(3, 2, dtype=F64)),
    ),
    (
        ValueError,
        "Series: times must be (2, 4) or (4,), one for each observation; got shape (3,).",
        series(y.expand(2, 4, 1), times=torch.zeros(3, dtype=F64)),
    ),
    (
        TypeError,
        "Series: tensors must share one dtype; got observations torch.float64, times torch.float32.",
        series(times=torch.zeros(4)),
    ),
    (TypeError, "imm: prior must be a Prior; got dict.", filtered(prior={"mean": y, "covariance": y})),
    (
        ValueError,
        "Prior: mean must end in [s] and covariance in [s, s]; got shapes (2,) and (3, 3).",
        lambda: Prior(start.mean, torch.eye(3, dtype=F64)),
    ),
    (
        TypeError,
        "Prior: tensors must share one dtype; got mean torch.float64, covariance torch.float32.",
        lambda: Prior(start.mean, torch.eye(2)),
    ),
    (
        TypeError,
        "imm: tensors must share one dtype; got prior.mean torch.float32, model torch.float64.",
        filtered(prior=Prior(torch.zeros(2), torch.eye(2))),
    ),
    (
        ValueError,
        "SwitchingFilter.step: mask must be bool, (1,) or (), true where something was observed; "
        "got torch.bool of shape (3,).",
        lambda: SwitchingFilter(model).step(SwitchingFilter(model).init(start), y[0], mask=y[:3, 0] > 0),
    ),
    (
        ValueError,
        "imm: prior.mean must be [2], [2, 2] or [7, 2, 2]; got shape (7, 2).",
        filtered(y.expand(7, 4, 1), prior=prior(mean=torch.zeros(7, 2, dtype=F64))),
    ),
    (
        ValueError,
        "imm: prior.covariance must be positive semidefinite; got a smallest eigenvalue of -1.",
        filtered(prior=prior(covariance=-eye)),
    ),
    (
        ValueError,
        "imm: prior.mean must be finite; got 2 of 2 entries that are NaN or infinite.",
        filtered(prior=prior(mean=nan[0, 0])),
    ),
    (
        ValueError,
        "imm: prior.log_mode_probability must end in k=2, the modes; got shape (1,).",
        filtered(prior=prior(log_mode_probability=torch.zeros(1, dtype=F64))),
    ),
    (
        ValueError,
        "imm: exp(prior.log_mode_probability) must sum to one; got a log sum of 0.693 at worst.",
        filtered(prior=prior(log_mode_probability=torch.zeros(2, dtype=F64))),
    ),
    (
        ValueError,
        "imm: prior.log_mode_probability must be finite or -inf; got 2 of 2 entries that are NaN or +inf.",
        filtered(prior=prior(log_mode_probability=nan[0, 0])),
    ),
    (
        ValueError,
        "imm: H P H^T + R must be positive definite, so that what is observed has a density; got 8 of 8 that are not.",
        filtered(m=certain, prior=prior(covariance=0 * eye)),
    ),
    (
        ValueError,
        'gpb: method must be "imm" or "gpb" and depth at least 1; got \'gpb\' and 0.',
        lambda: gpb(model, y, start, depth=0),
    ),
    (
        ValueError,
        'imm: keep must be "all" or "last"; got \'first\'.',
        lambda: imm(model, y, start, keep="first"),
    ),
    (
        ValueError,
        "nees: filtered must have mean and covariance; got no covariance.",
        lambda: nees(imm(model, y, start, fields="mean"), y),
    ),
    (
        ValueError,
        "normalized_innovation: filtered must have innovation and innovation_covariance; got no innovation and no "
        "innovation_covariance.",
        lambda: normalized_innovation(imm(model, y, start, fields=())),
    ),
    (
        ValueError,
        "imm: fields must be names of Filtered; got ['means'].",
        lambda: imm(model, y, start, fields=("means", "covariance")),
    ),
    (
        ValueError,
        "SwitchingFilter.step: time must be a step of the model, below 5; got 5.",
        lambda: SwitchingFilter(changing).step(SwitchingFilter(changing).init(start), y[0], time=5),
    ),
    (
        ValueError,
        "SwitchingFilter.step: observation must be (3, 1), as state and model are; got shape (1,).",
        lambda: SwitchingFilter(model).step(SwitchingFilter(model).init(start, batch_shape=(3,)), y[0]),
    ),
    (
        ValueError,
        "enumerate_modes: histories must be at most 1048576, or max_histories at least 1; "
        "got 2^41 histories and max_histories=None.",
        lambda: enumerate_modes(model, y.expand(10, 4, 1).reshape(40, 1), start),
    ),
    (ValueError, "constant_velocity: dimensions must be 1, 2 or 3; got 4.", velocity(4)),
    (ValueError, "constant_velocity: derivatives must be at least 2; got 1.", velocity(derivatives=1)),
    (ValueError, "constant_velocity: dt must be positive; got a smallest one of 0.", velocity(dt=0.0)),
    (
        ValueError,
        "constant_velocity: spectral_density must be nonnegative; got a smallest one of -1.",
        velocity(spectral_density=-1.0),
    ),
    (
        ValueError,
        "constant_velocity: dt must be a number or one for each step; got shape (2, 2).",
        velocity(dt=torch.ones(2, 2)),
    ),
    (
        ValueError,
        "singer: correlation_time must be a number; got shape (2,).",
        lambda: singer(1, dt=1.0, correlation_time=torch.ones(2), acceleration_variance=1.0, observation_variance=1.0),
    ),
    (
        ValueError,
        "coordinated_turn: dimensions must be 2 or 3; got 1.",
        lambda: coordinated_turn(1, dt=1.0, rate=1.0, spectral_density=1.0, observation_variance=1.0),
    ),
    (
        ValueError,
        "normalized_innovation: level must be in (0, 1); got 95.",
        lambda: normalized_innovation(imm(model, y, start), level=95),
    ),
    (
        ValueError,
        "nees: truth must be (4, 2), as the mean is; got shape (4, 1).",
        lambda: nees(imm(model, y, start), y),
    ),
    (
        ValueError,
        "nees: truth must be (4, 1), of them; got shape (4, 2).",
        lambda: nees(imm(model, y, start), y.expand(4, 2), components=[1]),
    ),
    (
        ValueError,
        "nees: components must be different ones of 0 ... 1, one or more; got [0, 2].",
        lambda: nees(imm(model, y, start), y.expand(4, 2), components=(0, 2)),
    ),
    (
        ValueError,
        "in_gate: covariance must end in the size of innovation (4, 1), twice; got shape (2, 2).",
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
