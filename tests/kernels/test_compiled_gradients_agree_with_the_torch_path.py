"""Gradients of the compiled log likelihood are those of automatic differentiation of the torch path."""

import dataclasses
import math

import pytest
import torch

from gradlogz import Prior, Series, SwitchingFilter, SwitchingModel
from gradlogz.filters import Generator, constant_velocity
from gradlogz.filters.gaussian.likelihood import log_likelihood
from gradlogz.filters.validation import initial_state, prepared
from gradlogz.kernels.filters import dispatch
from support.switching_oracles import F64, beginning, chain, observed, system

backward = pytest.importorskip("gradlogz.kernels.filters.backward", reason="needs numba")

each = pytest.mark.parametrize("method", ["imm", "gpb"])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


def slopes(model, start, series, method, worth, monkeypatch):
    """Log likelihoods, the gradient of their weighted sum in every field, and whether the kernel computed it."""
    fields = {name: t.detach().clone().requires_grad_() for name, t in model.fields().items() if name != "rate"}
    names = ("mean", "covariance", "log_mode_probability")
    initial = {name: getattr(start, name).detach().clone().requires_grad_() for name in names}
    y = series.observations
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "WORTH_FILTERING", worth)
        made = dataclasses.replace(model, **fields, validate=False)
        state = initial_state("law", made, Prior(**initial, per="mode"), y.shape[:-2])
        values = log_likelihood("law", SwitchingFilter(made, method), prepared("law", made, series), state)
    weights = torch.linspace(1, 2, values.numel(), dtype=y.dtype).view(values.shape)
    (values * weights).sum().backward()
    results = {name: t.grad for name, t in (fields | initial).items()}
    for name in ("Q", "R", "covariance"):  # of symmetric matrices
        results[name] = (results[name] + results[name].mT) / 2
    return values.detach(), results, type(values.grad_fn).__name__ == "_KnownBackward"


def alike(monkeypatch, model, start, series, method, tolerance=1e-12):
    values, gradients, is_compiled = slopes(model, start, series, method, 0, monkeypatch)
    expected, wanted, is_torch = slopes(model, start, series, method, math.inf, monkeypatch)
    assert is_compiled
    assert not is_torch
    torch.testing.assert_close(values, expected, rtol=1e-11, atol=1e-11)
    for name, slope in wanted.items():
        size = 1 + float(slope.abs().max())
        atol = tolerance * size
        torch.testing.assert_close(gradients[name], slope, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@each
@pytest.mark.parametrize(("k", "s", "o"), [(3, 4, 2), (2, 1, 1), (1, 3, 2), (4, 2, 3)])
@pytest.mark.parametrize("targets", [1, 11])
def test_gradients_in_every_field_are_those_of_autograd(monkeypatch, method, k, s, o, targets):
    model, start = system(k, s, o), beginning(k, s)
    y = observed(model, 7, targets)
    y[:5, 2, 0] = torch.nan
    y[3:9, 4] = torch.nan
    series = Series(y, mask=torch.rand(targets, 7) > 0.2, lengths=torch.randint(1, 8, (targets,)))
    alike(monkeypatch, model, start, series, method)


@each
@pytest.mark.parametrize("lead", [(6,), (1, 6), (3, 1), (3, 6)], ids=str)
def test_models_may_change_in_time_and_from_target_to_target(monkeypatch, method, lead):
    T = torch.stack([chain(3) for _ in range(math.prod(lead))]).reshape(*lead, 3, 3)
    model, start = system(3, 2, 2, lead=lead, transition=T), beginning(3, 2)
    alike(monkeypatch, model, start, Series(observed(model, 6, 3)), method)


@each
def test_transitions_and_modes_of_probability_zero_have_gradients(monkeypatch, method):
    T = torch.tensor([[0.7, 0.3, 0.0], [0.4, 0.6, 0.0], [0.0, 0.5, 0.5]], dtype=F64)
    model = system(3, 2, 2, transition=T)
    start = beginning(3, 2)
    alike(monkeypatch, model, start, Series(observed(model, 6, 9)), method)


def test_times_may_be_irregular(monkeypatch):
    modes = [constant_velocity(1, spectral_density=q, observation_variance=0.5, dtype=F64) for q in (0.1, 3.0)]
    model = SwitchingModel.of(modes, transition=Generator(torch.tensor([[-0.2, 0.2], [0.5, -0.5]], dtype=F64)))
    series = Series(torch.randn(5, 8, 1, dtype=F64), times=torch.rand(5, 8, dtype=F64).cumsum(-1))
    start = Prior(
        torch.zeros(2, 2, dtype=F64), torch.eye(2, dtype=F64).expand(2, 2, 2), torch.zeros(2, dtype=F64).log_softmax(-1)
    )
    alike(monkeypatch, model, start, series, "imm")


def test_what_the_kernel_cannot_do_takes_the_torch_path():
    """Gradients in the observations, and observations of density 0."""
    model, start = system(2, 2, 1), beginning(2, 2)
    for y in (observed(model, 6).requires_grad_(), torch.full((6, 1), 1e200, dtype=F64)):
        R = model.R.clone().requires_grad_()
        made = dataclasses.replace(model, R=R, validate=False)
        ready, state = prepared("law", made, Series(y), validate=False), initial_state("law", made, start, ())
        value = log_likelihood("law", SwitchingFilter(made), ready, state)
        assert type(value.grad_fn).__name__ != "_KnownBackward"
