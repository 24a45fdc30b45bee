"""What holds for filters of functions: batches, gaps, fewer components, inputs, derivatives, positive covariances."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._pytree import tree_map

from gradlogz import Prior, Series, SwitchingFilter, gpb2, imm
from gradlogz.filters import (
    Filtered,
    NonlinearMode,
    NonlinearModel,
    constant_velocity,
    discretize_chain,
    range_bearing,
    unknown_turn,
    wrap_angles,
)
from gradlogz.filters.models.nonlinear_motion import turned
from support.scales import close
from support.switching_oracles import F64, beginning, chain, positive, same

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
both = pytest.mark.parametrize("way", ["ekf", "ukf"])


def run(model, method, y, start, **more):
    return SwitchingFilter(model, method[0], depth=method[1]).filter(Series(y, **more), start)


def swing(x):
    return torch.stack((x[0] + 0.3 * x[1], x[1] - 0.3 * torch.sin(x[0])), -1)


def fall(x):
    return torch.stack((x[0] + 0.3 * x[1], 0.8 * x[1] + 0.1 * x[0] * x[1]), -1)


def look(x):
    return torch.stack((torch.sin(x[0]) + 0.2 * x[1] ** 2,), -1)


def curved(way, **changes):
    """A pendulum that may lose its string."""
    parts = {
        "transition": chain(2),
        "move": (swing, fall),
        "Q": positive(2, 2, scale=0.1),
        "observe": look,
        "R": positive(2, 1, scale=0.2),
    }
    return NonlinearModel(**{**parts, **changes}, method=way)


def flying(way, **options):
    """Straight in four components or on an arc in five, seen by a radar."""
    noise = {"dt": 0.5, "spectral_density": 0.05, "observation_variance": 1.0, "dtype": F64}
    return NonlinearModel.of(
        [constant_velocity(2, **noise), unknown_turn(2, rate_density=0.01, **noise)],
        transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64),
        components=[range(4), range(5)],
        observe=range_bearing(0, 2),
        R=torch.diag(torch.tensor([0.1, 0.001], dtype=F64)),
        residual=wrap_angles(1),
        method=way,
        **options,
    )


@both
def test_a_loop_may_begin_without_targets(way):
    online = SwitchingFilter(flying(way))
    nobody = online.init(Prior(torch.zeros(5, dtype=F64), torch.eye(5, dtype=F64)), batch_shape=(0,))
    predicted, z = online.predict(nobody), torch.ones(0, 2, dtype=F64)
    assert predicted.expected_observation.shape == (0, 2)
    assert online.log_density(predicted, z.unsqueeze(1)).shape == (0, 1)
    state, found = online.update(predicted, z)
    assert state.mean.shape == (0, 2, 5)
    assert found.covariance.shape == (0, 5, 5)


@each
@both
def test_targets_do_not_see_each_other(method, way):
    model = curved(way)
    start = Prior(torch.randn(3, 1, 2, dtype=F64), positive(3, 1, 2))
    y = torch.randn(3, 6, 1, dtype=F64)
    y[1, 2] = torch.nan
    found = run(model, method, y, start)
    for i in range(3):
        alone = tree_map(lambda t, i=i: t[i], start)
        same(Filtered(*(part[i] for part in found)), run(model, method, y[i], alone), 10.0)
    online = SwitchingFilter(model, method[0], depth=method[1])
    state = online.init(start, batch_shape=(3,))
    for t in range(6):
        state, now = online.step(state, y[:, t])
    close(now.mean, found.mean[:, -1], 100.0)


@each
@both
def test_covariances_are_covariances(method, way):
    model, start = curved(way), beginning(2)
    found = run(model, method, 3 * torch.randn(40, 1, dtype=F64), start)
    for name in Filtered._fields:
        if name.endswith("covariance"):
            P = getattr(found, name)
            assert torch.equal(P, P.mT), name
            assert (torch.linalg.eigvalsh(P) > 0).all(), name


@both
def test_one_function_for_all_modes_is_that_function_for_each(way):
    Q, start = positive(2, 2, scale=0.1), beginning(2)
    y, T = torch.randn(5, 1, dtype=F64), chain(2)
    R = positive(2, 1)
    once = NonlinearModel(T, swing, Q, look, R, method=way)
    twice = NonlinearModel(T, (swing, lambda x: swing(x)), Q, (look, lambda x: look(x)), R, method=way)
    same(imm(once, y, start), imm(twice, y, start))


@pytest.mark.parametrize("method", [METHODS[m] for m in ("gpb2", "gpb3", "imm")], ids=["gpb2", "gpb3", "imm"])
@both
def test_a_straight_flight_and_an_arc_of_another_size_are_told_apart(method, way):
    """The turn begins at step 15; the rate that the arc alone has is found, and reported from it."""
    rate, steps = 0.5, 40
    dt, states = torch.tensor(0.5, dtype=F64), [torch.tensor([20.0, -2.0, 3.0, 0.0, 0.0], dtype=F64)]
    for t in range(steps):
        before = states[-1].clone()
        before[4] = rate if t >= 15 else 0.0
        states.append(turned(before, dt))
    path = torch.stack(states[1:])
    generator = torch.Generator().manual_seed(0)
    y = torch.stack([range_bearing(0, 2)(x) for x in path])
    y = y + torch.tensor([0.1, 0.01], dtype=F64) * torch.randn(steps, 2, dtype=F64, generator=generator)
    start = Prior(states[0], torch.diag(torch.tensor([1, 1, 1, 1, 0.05], dtype=F64)))
    found = run(flying(way), method, y, start)
    assert found.log_mode_probability[14].argmax() == 0
    assert (found.log_mode_probability[22:].argmax(-1) == 1).all()
    assert (found.mean[25:, 4] - rate).abs().max() < 0.15
    assert (found.mean[5:, [0, 2]] - path[5:, [0, 2]]).norm(dim=-1).max() < 1.0
    assert not found.mode_mean[:, 0, 4].any()  # what a mode lacks is 0


@both
def test_functions_of_inputs_are_told_of_time(way):
    """Irregular steps: the length of each is an input, chain and noise are stacked."""
    rate = torch.tensor([[-0.2, 0.2], [0.3, -0.3]], dtype=F64)
    dt = torch.tensor([0.3, 1.1, 0.0, 0.7], dtype=F64)
    Q = dt[:, None, None, None] * positive(2, 5, scale=0.1)
    R = positive(2, 2)
    model = NonlinearModel(
        discretize_chain(rate, dt),
        lambda x, u: turned(x, u[0]),
        Q,
        lambda x, u: x[[0, 2]],
        R,
        method=way,
        input_size=1,
    )
    y, start = torch.randn(4, 2, dtype=F64), Prior(torch.randn(5, dtype=F64), positive(5))
    found = imm(model, Series(y, inputs=dt[:, None]), start)
    # The same with one model for each step.
    one = SwitchingFilter(model).init(start)
    for t in range(4):
        now = NonlinearModel(
            discretize_chain(rate, dt[t]), lambda x, t=t: turned(x, dt[t]), Q[t], lambda x: x[[0, 2]], R, method=way
        )
        one, step = SwitchingFilter(now).step(one, y[t])
    close(found.mean[-1], step.mean, 100.0)
    close(found.log_likelihood, one.log_likelihood, 100.0)


@each
@both
def test_derivatives_in_every_tensor_and_in_what_functions_hold(method, way):
    strength = torch.tensor(0.3, dtype=F64)
    T, Q, R, start = chain(2), positive(2, 2, scale=0.1), positive(2, 1, scale=0.2), beginning(2)
    y = torch.randn(3, 1, dtype=F64)

    def likelihood(strength, T, Q, R, y, mean, covariance):
        def pulled(x):
            return torch.stack((x[0] + 0.3 * x[1], x[1] - strength * torch.sin(x[0])), -1)

        model = NonlinearModel(T, (pulled, fall), Q, look, R, method=way, validate=False)
        found = run(model, method, y, Prior(mean, covariance))
        return found.log_likelihood, found.mean.sum(), found.innovation.sum()

    given = [strength, T, Q, R, y, start.mean, start.covariance]
    leaves = [t.detach().clone().requires_grad_() for t in given]
    assert gradcheck(likelihood, leaves, fast_mode=True)


@both
def test_second_derivatives_and_vmap(way):
    start, Q, T = beginning(2), positive(2, 2, scale=0.1), chain(2)
    R, y = positive(2, 1), torch.randn(2, 1, dtype=F64)

    def likelihood(Q, y):
        model = NonlinearModel(T, (swing, fall), Q, look, R, method=way, validate=False)
        return imm(model, y, start).log_likelihood

    assert gradgradcheck(likelihood, (Q.clone().requires_grad_(), y.clone().requires_grad_()), fast_mode=True)
    many = torch.randn(3, 2, 1, dtype=F64)
    mapped = torch.func.vmap(lambda y: likelihood(Q, y))(many)
    close(mapped, torch.stack([likelihood(Q, one) for one in many]), 100.0)


def test_certain_beginnings_leave_gradients_finite():
    """A covariance of zeros has a root, and the root a gradient."""
    mode = NonlinearMode(swing, torch.zeros(2, 2, dtype=F64), look, torch.eye(1, dtype=F64))
    m = torch.randn(2, dtype=F64, requires_grad=True)
    model = NonlinearModel.of([mode, mode], transition=chain(2), method="ukf")
    out = gpb2(model, torch.randn(3, 1, dtype=F64), Prior(m, torch.zeros(2, 2, dtype=F64))).log_likelihood
    assert torch.autograd.grad(out, m)[0].isfinite().all()


@both
def test_float32_is_float64_rounded(way):
    start, T, Q, R = beginning(2), chain(2), positive(2, 2, scale=0.1), positive(2, 1)
    y = torch.randn(10, 1, dtype=F64)
    high = imm(NonlinearModel(T, (swing, fall), Q, look, R, method=way), y, start)
    low = NonlinearModel(T.float(), (swing, fall), Q.float(), look, R.float(), method=way)
    found = imm(low, y.float(), tree_map(lambda t: t.float(), start))
    close(found.mean, high.mean.float(), 100.0)
    close(found.log_likelihood, high.log_likelihood.float(), 100.0)


@each
@both
def test_an_impossible_observation_changes_nothing_but_the_likelihood(method, way):
    model, start = curved(way), beginning(2)
    far = torch.tensor([[1.0], [1e200], [0.5]], dtype=F64)
    gap = torch.tensor([[1.0], [torch.nan], [0.5]], dtype=F64)
    found, other = run(model, method, far, start), run(model, method, gap, start)
    assert found.step_log_likelihood[1] == -torch.inf
    for name in ("mean", "covariance", "log_mode_probability"):
        close(getattr(found, name), getattr(other, name), 10.0)


@both
def test_functions_stay_out_of_compiled_graphs(way):
    """A step compiles around them, and is the same."""
    model, start = curved(way), beginning(2)
    online = SwitchingFilter(model)
    state, y = online.init(start, batch_shape=(3,)), torch.randn(3, 1, dtype=F64)
    compiled = torch.compile(lambda s, y: online.step(s, y), backend="eager")
    same(Filtered(*compiled(state, y)[1]), online.step(state, y)[1], 10.0)
