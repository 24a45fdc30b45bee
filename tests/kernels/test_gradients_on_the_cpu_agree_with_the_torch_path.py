"""The gradient of a log likelihood by the kernel is that of automatic differentiation, to second order and batched."""

import dataclasses
import math

import pytest
import torch

from gradlogz import Prior, Series, SwitchingFilter, SwitchingModel
from gradlogz.filters import Generator, constant_velocity
from gradlogz.kernels.filters import dispatch
from support.switching_oracles import F64, beginning, chain, observed, system

cpu_gradients = pytest.importorskip("gradlogz.kernels.filters.cpu_gradients", reason="needs numba")
each = pytest.mark.parametrize("method", ["imm", "gpb"])
FIELDS = ("transition", "F", "Q", "H", "R", "b", "d")
INITIAL = ("mean", "covariance", "log_mode_probability")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


@pytest.fixture
def calls(monkeypatch):
    """Let the kernel take short series, and count what it finished."""
    finished = []
    differentiate = cpu_gradients.differentiate

    def counted(*arguments):
        slopes = differentiate(*arguments)
        finished.append(slopes is not None)
        return slopes

    monkeypatch.setattr(cpu_gradients, "differentiate", counted)
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", 0)
    return finished


def gradients(model, start, series, method, learned=None):
    """Log likelihoods, and the gradient of their weighted sum in the inputs that are learned, all by default."""

    def leaf(name, tensor):
        return tensor.detach().clone().requires_grad_(learned is None or name in learned)

    fields = {n: leaf(n, t) for n in FIELDS if (t := getattr(model, n)) is not None}
    initial = {n: leaf(n, getattr(start, n)) for n in INITIAL}
    y = leaf("y", series.observations)
    placed = Series(y, mask=series.mask, lengths=series.lengths)
    made, prior = SwitchingModel(**fields, validate=False), Prior(**initial, per="mode")
    total = SwitchingFilter(made, method).filter(placed, prior, fields=()).log_likelihood
    (total * torch.linspace(1, 2, total.numel(), dtype=total.dtype).view(total.shape)).sum().backward()
    slopes = {n: t.grad for n, t in {**fields, **initial, "y": y}.items() if t.grad is not None}
    for name in {"Q", "R", "covariance"} & slopes.keys():  # of symmetric matrices
        slopes[name] = (slopes[name] + slopes[name].mT) / 2
    return total.detach(), slopes


def alike(monkeypatch, model, start, series, method, **more):
    total, slopes = gradients(model, start, series, method, **more)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "WORTH_FILTERING", math.inf)
        expected, wanted = gradients(model, start, series, method, **more)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    assert slopes.keys() == wanted.keys()
    for name, slope in wanted.items():
        atol = 1e-12 * (1 + float(slope.abs().max()))
        torch.testing.assert_close(slopes[name], slope, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@each
@pytest.mark.parametrize(("k", "s", "o"), [(3, 4, 2), (1, 3, 2)])
@pytest.mark.parametrize("targets", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("offsets", [True, False], ids=["offsets", "plain"])
def test_gradients_in_every_input_are_those_of_autograd(calls, monkeypatch, method, k, s, o, targets, offsets):
    model, start = system(k, s, o, offsets=offsets), beginning(k, s)
    y = observed(model, 7, *targets)
    y[..., 2, 0] = torch.nan
    y[..., 4, :] = torch.nan
    more = {"mask": torch.rand(*targets, 7) > 0.2, "lengths": torch.randint(1, 8, targets)} if targets else {}
    alike(monkeypatch, model, start, Series(y, **more), method)
    assert calls == [True]


@each
@pytest.mark.parametrize("lead", [(6,), (1, 6), (3, 1), (3, 6)], ids=str)
def test_models_may_change_in_time_and_from_target_to_target(calls, monkeypatch, method, lead):
    T = torch.stack([chain(3) for _ in range(math.prod(lead))]).reshape(*lead, 3, 3)
    model, start = system(3, 2, 2, lead=lead, transition=T), beginning(3, 2)
    alike(monkeypatch, model, start, Series(observed(model, 6, 3)), method)
    assert calls == [True]


@each
@pytest.mark.parametrize("name", ["transition", "R", "d", "mean", "log_mode_probability", "y"])
def test_some_inputs_may_need_no_gradient(calls, monkeypatch, method, name):
    model, start = system(2, 2, 1), beginning(2, 2)
    alike(monkeypatch, model, start, Series(observed(model, 5, 4)), method, learned=(name,))
    assert calls == [True]


@each
def test_modes_and_transitions_of_probability_zero_have_gradients(calls, monkeypatch, method):
    model, start = system(3, 2, 2, transition=torch.eye(3, dtype=F64)), beginning(3, 2)
    start = dataclasses.replace(start, log_mode_probability=torch.tensor([0.0, -torch.inf, -torch.inf], dtype=F64))
    alike(monkeypatch, model, start, Series(observed(model, 6, 9)), method)
    assert calls == [True]


@each
def test_second_derivatives_and_several_gradients_take_the_torch_path(calls, monkeypatch, method):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 5, 4)

    def value(R):
        made = dataclasses.replace(model, R=R, validate=False)
        return SwitchingFilter(made, method).filter(y, start, fields=()).log_likelihood

    def derivatives():
        hessian = torch.autograd.functional.hessian(lambda R: value(R).sum(), model.R)
        return hessian, torch.autograd.functional.jacobian(value, model.R, vectorize=True)

    found = derivatives()
    assert calls == []
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", math.inf)
    for slope, expected in zip(found, derivatives(), strict=True):
        torch.testing.assert_close(slope, expected, rtol=0, atol=1e-11 * float(expected.abs().max()))


def test_the_gradient_in_the_last_state_takes_the_torch_path(calls, monkeypatch):
    """The parts of a long series in continuous time pass it on."""
    modes = [constant_velocity(1, spectral_density=q, observation_variance=0.5, dtype=F64) for q in (0.1, 3.0)]
    model = SwitchingModel.of(modes, transition=Generator(torch.tensor([[-0.2, 0.2], [0.5, -0.5]], dtype=F64)))
    series = Series(torch.randn(2, 70, 1, dtype=F64), times=torch.rand(2, 70, dtype=F64).cumsum(-1))
    start = beginning(2, 2)

    def slopes():
        R, mean = model.R.clone().requires_grad_(), start.mean.clone().requires_grad_()
        made, prior = dataclasses.replace(model, R=R, validate=False), dataclasses.replace(start, mean=mean)
        total = SwitchingFilter(made).filter(series, prior, keep="last", fields=()).log_likelihood.sum()
        return torch.autograd.grad(total, (R, mean))

    found = slopes()
    assert sorted(calls) == [False, True]  # the part that has a next one, and the last
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", math.inf)
    for slope, expected in zip(found, slopes(), strict=True):
        torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12 * (1 + float(expected.abs().max())))


def test_fields_are_computed_with_their_gradients_by_the_torch_path(calls):
    model, start = system(2, 2, 1), beginning(2, 2)
    y = observed(model, 5, 4).requires_grad_()
    filtered = SwitchingFilter(model).filter(y, start)
    (filtered.mean.sum() + filtered.log_likelihood.sum()).backward()
    assert y.grad.isfinite().all()
    assert calls == []
