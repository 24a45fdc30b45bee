"""Every output of a filter has its derivative in every parameter, in the beginning and in the observations."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils._pytree import tree_leaves

from gradlogz import Prior, Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import (
    Filtered,
    constant_velocity,
    coordinated_turn,
    enumerate_modes,
    normalized_innovation,
    singer,
)
from support.scales import close
from support.switching_oracles import F64, beginning, observed, same, system

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
NAMES = ("transition", "F", "Q", "H", "R", "b", "d", "B", "D", "y", "u", "mean", "covariance", "log_mode_probability")


def inputs(k=2, s=2, o=1, steps=3):
    """All that a filter is given, as leaves."""
    model = system(k, s, o, B=torch.randn(k, s, 1, dtype=F64), D=torch.randn(k, o, 1, dtype=F64))
    start = beginning(k, s)
    given = {name: getattr(model, name) for name in NAMES[:9]}
    given |= {"y": observed(model, steps), "u": torch.randn(steps, 1, dtype=F64)}
    given |= dict(zip(NAMES[11:], tree_leaves(start), strict=True))
    return {name: t.detach().clone().requires_grad_() for name, t in given.items()}


def run(method, given):
    """A filter of tensors that need not be probabilities or symmetric, as finite differences are not."""
    model = SwitchingModel(**{name: given[name] for name in NAMES[:9]}, validate=False)
    begins = Prior(*(given[name] for name in NAMES[11:]))
    if method == "exact":
        return enumerate_modes(model, Series(given["y"], inputs=given["u"]), begins).filtered
    return SwitchingFilter(model, method[0], depth=method[1]).filter(Series(given["y"], inputs=given["u"]), begins)


@pytest.mark.parametrize("method", [*METHODS.values(), "exact"], ids=[*METHODS, "exact"])
def test_every_output_in_every_argument(method):
    """One random projection of each output: its gradient along every entry of every argument."""
    given = inputs()
    weights = [torch.randn_like(part) for part in run(method, given)]

    def projected(*values):
        found = run(method, dict(zip(NAMES, values, strict=True)))
        return tuple((w * part).sum() for w, part in zip(weights, found, strict=True))

    assert gradcheck(projected, tuple(given[name] for name in NAMES), fast_mode=True)


@each
def test_forward_mode_and_second_order(method):
    given = inputs(steps=2)

    def likelihood(*values):
        return run(method, dict(zip(NAMES, values, strict=True))).log_likelihood

    values = tuple(given[name] for name in NAMES)
    assert gradgradcheck(likelihood, values, fast_mode=True)
    direction = tuple(torch.randn_like(v) for v in values)
    forward = jvp(likelihood, tuple(v.detach() for v in values), direction)[1]
    backward = torch.autograd.grad(likelihood(*values), values)
    close(forward, sum((b * d).sum() for b, d in zip(backward, direction, strict=True)), 1e3)


@pytest.mark.parametrize("method", [METHODS[m] for m in ("gpb1", "gpb2", "imm")], ids=["gpb1", "gpb2", "imm"])
def test_transitions_of_probability_zero_have_their_derivative(method):
    """Where T_ij = 0, as by a one-sided difference; not the NaN of 0 times infinity."""
    given = {name: t.detach() for name, t in inputs(3, 1, 1).items()}
    T = torch.tensor([[0.7, 0.3, 0.0], [0.2, 0.8, 0.0], [0.0, 0.4, 0.6]], dtype=F64)

    def likelihood(T):
        return run(method, {**given, "transition": T}).log_likelihood

    slope = grad(likelihood)(T)
    assert slope.isfinite().all()
    h = 1e-6
    for i, j in ((0, 2), (1, 2), (2, 0)):
        E = torch.zeros_like(T)
        E[i, j] = h
        expected = (4 * likelihood(T + E) - 3 * likelihood(T) - likelihood(T + 2 * E)) / (2 * h)
        assert expected.abs() > 1e-9
        torch.testing.assert_close(slope[i, j], expected, rtol=1e-4, atol=1e-7)


@each
def test_gaps_outliers_and_dead_modes_leave_gradients_finite(method):
    given = inputs(3, 2, 2, steps=5)
    T = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=F64)  # mode 2 cannot be
    y = given["y"].detach().clone()
    y[1], y[2, 0], y[3] = torch.nan, torch.nan, 1e6
    given = {**given, "transition": T.requires_grad_(), "y": y.requires_grad_()}
    found = run(method, given)
    out = found.log_likelihood + found.mean.sum() + found.covariance.sum() + found.log_mode_probability[:, :2].sum()
    for name, slope in zip(NAMES, torch.autograd.grad(out, [given[name] for name in NAMES]), strict=True):
        assert slope.isfinite().all(), name
    assert (torch.autograd.grad(run(method, given).log_likelihood, given["y"])[0][1] == 0).all()


@each
def test_an_impossible_observation_leaves_gradients_finite(method):
    given = inputs(2, 2, 1, steps=3)
    y = given["y"].detach().clone()
    y[1] = 1e200
    given["y"] = y.requires_grad_()
    found = run(method, given)
    out = found.mean.sum() + found.covariance.sum() + found.step_log_likelihood[2]
    assert all(s.isfinite().all() for s in torch.autograd.grad(out, [given[name] for name in NAMES]))


@each
def test_vmap_is_a_loop(method):
    """Over models, beginnings and observations at once."""
    many = [{name: t.detach() for name, t in inputs().items()} for _ in range(3)]
    stacked = {name: torch.stack([one[name] for one in many]) for name in NAMES}
    mapped = vmap(lambda given: tuple(run(method, given)))(stacked)
    for i, one in enumerate(many):
        same(Filtered(*(part[i] for part in mapped)), run(method, one), 10.0)


def test_models_are_pytrees():
    """vmap and grad take a model as an argument; what it lacks is no leaf."""
    model, start = system(2, offsets=False), beginning(2)
    y = observed(model, 3, 4)
    shared = vmap(lambda m, y: imm(m, y, start).log_likelihood, in_dims=(None, 0))(model, y)
    close(shared, imm(model, y, start).log_likelihood, 100.0)
    slope = grad(lambda m: imm(m, y, start).log_likelihood.sum())(model)
    assert slope.F.shape == model.F.shape
    assert slope.b is None


def test_the_score_of_the_exact_likelihood_has_mean_zero():
    """E[d log p(y) / d theta] = 0 over y of the model, by quadrature over one observation."""
    model, start = system(2, 1, 1), beginning(2, 1)
    x = torch.linspace(-60, 60, 12_001, dtype=F64)

    def logs(R):
        changed = SwitchingModel(model.transition, model.F, model.Q, model.H, R, model.b, model.d, validate=False)
        return enumerate_modes(changed, x[:, None, None], start).filtered.log_likelihood

    density = logs(model.R).exp() * (x[1] - x[0])
    score = jacfwd(logs)(model.R)
    close(torch.einsum("x,xkab->kab", density, score), torch.zeros(2, 1, 1, dtype=F64), tolerance=1e-8)


def test_models_of_motion_and_consistency_have_gradients():
    def built(dt, rate, q, r, tau):
        turn = coordinated_turn(2, dt=dt, rate=rate, spectral_density=q, observation_variance=r)
        straight = constant_velocity(2, dt=dt, spectral_density=q, observation_variance=r)
        other = singer(1, dt=dt, correlation_time=tau, acceleration_variance=q, observation_variance=r)
        return torch.cat([part.flatten() for m in (turn, straight, other) for part in m[:4]])

    numbers = [torch.tensor(v, dtype=F64, requires_grad=True) for v in (0.7, 0.0, 0.4, 0.2, 1.5)]
    assert gradcheck(built, numbers)
    model, start = system(2), beginning(2)
    y = observed(model, 4).requires_grad_()
    assert gradcheck(lambda y: normalized_innovation(imm(model, y, start)).value, (y,))
