"""Functions that are told how long they move a state: flows, the noise that they carry along, and times of any kind.

m' = f(m, dt),   P' = Phi P Phi^T + ∫ Phi_u C Phi_u^T du,   P(dt) = exp(rate dt)
"""

import numpy as np
import pytest
import scipy.integrate
import torch
from torch.autograd import gradcheck
from torch.utils._pytree import tree_map

from gradlogz import KalmanModel, Prior, Series, SwitchingFilter, SwitchingModel, imm, smooth
from gradlogz.filters import (
    Filtered,
    Generator,
    NonlinearMode,
    NonlinearModel,
    Smoothed,
    constant_acceleration,
    constant_velocity,
    discretize_chain,
    enumerate_modes,
    follow_drift,
    range_bearing,
    rao_blackwell_filter,
    unknown_turn,
    wrap_angles,
)
from support.scales import close
from support.switching_oracles import F64, beginning, observed, positive, same

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
both = pytest.mark.parametrize("way", ["ekf", "ukf"])
FIELDS = ("F", "Q", "H", "R", "b", "d", "B", "D")
NOISE = {"spectral_density": 0.1, "observation_variance": 0.3, "dtype": F64}
RATE = torch.tensor([[-0.2, 0.2], [0.5, -0.5]], dtype=F64)


def flowing(k=2, s=2, o=2, *, u=0):
    """A random switching model of continuous time, and its modes."""
    model = SwitchingModel(
        transition=Generator(RATE[:k, :k] if k == 2 else torch.zeros(1, 1, dtype=F64)),
        F=0.5 * torch.randn(k, s, s, dtype=F64),
        Q=positive(k, s),
        H=torch.randn(k, o, s, dtype=F64),
        R=positive(k, o, scale=0.5),
        b=torch.randn(k, s, dtype=F64),
        d=torch.randn(k, o, dtype=F64),
        B=torch.randn(k, s, u, dtype=F64) if u else None,
        D=torch.randn(k, o, u, dtype=F64) if u else None,
    )
    fields = {n: getattr(model, n) for n in FIELDS if getattr(model, n) is not None}
    return model, [KalmanModel(**{n: t[j] for n, t in fields.items()}, continuous=True) for j in range(k)]


def run(model, method, y, start, **more):
    return SwitchingFilter(model, method[0], depth=method[1]).filter(Series(y, **more), start)


def alike(found, expected, tolerance):
    for name, a, e in zip(Smoothed._fields[:-1], found[:-1], expected[:-1], strict=True):
        size = 1 + float(e[e.isfinite()].abs().max())
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}")


# Linear flows --------------------------------------------------------------------------------------------------------


@both
def test_linear_flows_are_systems_of_matrices(way):
    """Filters, smoothers, every history and particles; offsets and inputs are held, and some times are equal."""
    linear, modes = flowing(2, 3, 2, u=1)
    model = NonlinearModel.of(modes, transition=linear.transition, method=way, input_size=1)
    y, u, start = observed(linear, 4, 3), torch.randn(3, 4, 1, dtype=F64), beginning(2, 3)
    y[0, 1], y[1, 2, 0] = torch.nan, torch.nan
    times = torch.rand(3, 4, dtype=F64).cumsum(-1)
    times[0, 2] = times[0, 1]
    given = {"times": times, "inputs": u}
    series = Series(y, **given)
    for method in METHODS.values():
        same(run(model, method, y, start, **given), run(linear, method, y, start, **given), 10.0, tolerance=1e-10)
    for options in ({"method": "imm"}, {"method": "gpb2"}, {"method": "enumerate"}, {"lag": 1}):
        alike(smooth(model, series, start, **options), smooth(linear, series, start, **options), 1e-10)
    drawn = [
        rao_blackwell_filter(m, series, start, particles=20, generator=torch.Generator().manual_seed(0))
        for m in (model, linear)
    ]
    close(*(d.filtered.mean for d in drawn), tolerance=1e-9)


@both
def test_flows_of_fewer_components_are_systems_of_matrices(way):
    """Velocities and accelerations, whose exponentials are polynomials; and long steps of them."""
    modes = [constant_velocity(1, **NOISE), constant_acceleration(1, **NOISE)]
    options = {"transition": Generator(RATE), "components": [(0, 1), (0, 1, 2)]}
    linear, model = SwitchingModel.of(modes, **options), NonlinearModel.of(modes, method=way, **options)
    y, start = torch.randn(4, 1, dtype=F64), beginning(2, 3)
    times = torch.tensor([0.1, 0.9, 21.0, 21.5], dtype=F64)
    found, expected = imm(model, Series(y, times=times), start), imm(linear, Series(y, times=times), start)
    same(found, expected, 10.0, tolerance=1e-10)


def test_a_linear_drift_is_followed_to_the_fourth_order():
    """As a SwitchingModel moves it, to 1e-8 with 32 steps; twice as many have a sixteenth of the error."""
    linear, modes = flowing(1, 3, 1)
    A, b = linear.F[0], linear.b[0]
    y, start = observed(linear, 3), beginning(1, 3, shared=True)
    begins = Prior(start.mean, start.covariance)
    times = torch.tensor([0.3, 1.0, 1.8], dtype=F64)
    expected, errors = imm(linear, Series(y, times=times), begins), []
    for steps in (2, 4, 32):
        seen = NonlinearModel.of(modes, transition=linear.transition).functions("observe")[0]
        mode = NonlinearMode(
            follow_drift(lambda x: A @ x + b, steps=steps), linear.Q[0], seen, linear.R[0], continuous=True
        )
        found = imm(NonlinearModel.of([mode], transition=linear.transition), Series(y, times=times), begins)
        errors.append(max(float((a - e).abs().max()) for a, e in zip(found[:2], expected[:2], strict=True)))
    assert 10 < errors[0] / errors[1] < 25
    assert errors[2] < 1e-8


# Other flows ---------------------------------------------------------------------------------------------------------


def pendulum(x):
    return torch.stack((x[1], -2 * torch.sin(x[0]) - 0.1 * x[1]), -1)


def circle(x):
    """The drift of which `turned` is the flow."""
    return torch.stack((x[1], -x[4] * x[3], x[3], x[4] * x[1], 0 * x[4]), -1)


TURN = unknown_turn(2, rate_density=0.05, **NOISE)
SWING = NonlinearMode(
    follow_drift(pendulum, steps=60), positive(2, scale=0.3), lambda x: x[:1], torch.eye(1, dtype=F64), continuous=True
)


@pytest.mark.parametrize(("mode", "drift", "s"), [(TURN, circle, 5), (SWING, pendulum, 2)], ids=["turn", "pendulum"])
@pytest.mark.parametrize("dt", [0.3, 1.0])
def test_moments_go_as_their_differential_equations_say(mode, drift, s, dt):
    """dm = f(m) dt and dP = (f' P + P f'^T + C) dt, by scipy's integrator."""
    m, P, C = torch.randn(s, dtype=F64), positive(s, scale=0.5), mode.Q.numpy()

    def slope(_, z):
        x, S = torch.as_tensor(z[:s]), z[s:].reshape(s, s)
        A = torch.func.jacrev(drift)(x).numpy()
        return np.concatenate((drift(x).numpy(), (A @ S + S @ A.T + C).reshape(-1)))

    begin = np.concatenate((m.numpy(), P.numpy().reshape(-1)))
    end = scipy.integrate.solve_ivp(slope, (0, dt), begin, method="DOP853", rtol=1e-12, atol=1e-12).y[:, -1]
    model = NonlinearModel.of([mode], transition=Generator(torch.zeros(1, 1, dtype=F64)))
    gap = torch.full((1, model.observation_size), torch.nan, dtype=F64)
    found = imm(model, Series(gap, times=torch.tensor([dt], dtype=F64)), Prior(m, P))
    close(found.mean[0], torch.as_tensor(end[:s]), 10.0, tolerance=1e-9)
    size = 1 + found.covariance.abs().amax()
    close(found.covariance[0], torch.as_tensor(end[s:].reshape(s, s)), size, tolerance=1e-8)


def radar(way, modes):
    noise = torch.diag(torch.tensor([0.2, 0.01], dtype=F64))
    options = {"observe": range_bearing(0, 2, origin=(-9.0, 1.0)), "R": noise, "residual": wrap_angles(1)}
    return NonlinearModel.of(
        modes, transition=Generator(RATE if len(modes) == 2 else 0 * RATE[:1, :1]), method=way, **options
    )


START = Prior(
    torch.tensor([4.0, 1.0, 3.0, -0.5, 0.3], dtype=F64), torch.diag(torch.tensor([0.5, 0.2, 0.5, 0.2, 0.1], dtype=F64))
)


def test_one_mode_does_not_mind_being_looked_at_in_between():
    """Times at which nothing was observed change nothing: tangents of a flow join, and so does what they carry."""
    model, times = radar("ekf", [TURN]), torch.tensor([0.3, 0.4, 1.9, 2.0, 3.5], dtype=F64)
    y = torch.tensor([13.0, 0.2], dtype=F64) + 0.3 * torch.randn(5, 2, dtype=F64)
    y[[1, 2]] = torch.nan
    there = torch.tensor([0, 3, 4])
    found, expected = imm(model, Series(y, times=times), START), imm(model, Series(y[there], times=times[there]), START)
    close(found.mean[there], expected.mean, 1000.0)
    close(found.covariance[there], expected.covariance, 1000.0)
    close(found.log_likelihood, expected.log_likelihood, 1000.0)
    back, other = (
        smooth(model, Series(y, times=times), START),
        smooth(model, Series(y[there], times=times[there]), START),
    )
    close(back.mean[there], other.mean, 1000.0)
    close(back.covariance[there], other.covariance, 1000.0)


@both
def test_no_time_moves_nothing(way):
    model = radar(way, [unknown_turn(2, rate_density=0.0, **NOISE), TURN])
    y = torch.tensor([[13.0, 0.2], [13.1, 0.3]], dtype=F64)
    found = imm(model, Series(y, times=torch.tensor([0.0, 0.0], dtype=F64)), START)
    close(found.predicted_mode_mean[0], START.mean.expand(2, 5), 10.0)
    close(found.predicted_mode_covariance[0], START.covariance.expand(2, 5, 5), 10.0)
    close(found.predicted_mode_mean[1], found.mode_mean[0], 10.0)
    close(found.predicted_mode_covariance[1], found.mode_covariance[0], 10.0)
    close(found.predicted_log_mode_probability[1], found.log_mode_probability[0], 10.0)


@each
@both
def test_times_may_differ_between_targets_and_come_one_by_one(method, way):
    """And a model of steps of those lengths is the same: `at`, or dt= beside transition=."""
    model = radar(way, [unknown_turn(2, rate_density=0.0, **NOISE), TURN])
    y = torch.tensor([13.0, 0.2], dtype=F64) + 0.3 * torch.randn(2, 3, 2, dtype=F64)
    times = torch.rand(2, 3, dtype=F64).cumsum(-1)
    found = run(model, method, y, START, times=times)
    dt = times.diff(dim=-1, prepend=torch.zeros(2, 1, dtype=F64))
    online = SwitchingFilter(model, method[0], depth=method[1])
    state = online.init(START, batch_shape=(2,))
    for t in range(3):
        state, now = online.step(state, y[:, t], dt=dt[:, t])
    close(now.mean, found.mean[:, -1], 100.0)
    close(state.log_likelihood, found.log_likelihood, 100.0)
    alone = run(model, method, y[1], START, times=times[1])
    same(Filtered(*(part[1] for part in found)), alone, 10.0)
    same(run(model.at(dt), method, y, START), found, 10.0)
    told = NonlinearModel(
        discretize_chain(RATE, dt[1]),
        model.move,
        model.Q,
        model.observe,
        model.R,
        dt=dt[1],
        residual=model.residual,
        method=way,
    )
    same(run(told, method, y[1], START), alone, 10.0)


def test_every_history_is_told_the_time():
    model = radar("ekf", [unknown_turn(2, rate_density=0.0, **NOISE), TURN])
    y = torch.tensor([13.0, 0.2], dtype=F64) + 0.3 * torch.randn(3, 2, dtype=F64)
    times = torch.tensor([0.4, 0.5, 1.9], dtype=F64)
    whole = smooth(model, Series(y, times=times), START, method="enumerate")
    close(whole.filtered.mean, enumerate_modes(model, Series(y, times=times), START).filtered.mean)
    near = smooth(model, Series(y, times=times), START)
    assert (near.mean - whole.mean).norm() < 0.05 * (whole.filtered.mean - whole.mean).norm()


def test_times_of_what_does_not_count_need_not_be_any():
    model = radar("ekf", [TURN])
    y = torch.tensor([13.0, 0.2], dtype=F64).expand(2, 3, 2)
    garbage = torch.tensor([[1.0, torch.nan, 0.0], [0.5, 0.6, 0.7]], dtype=F64)
    found = imm(model, Series(y, lengths=torch.tensor([1, 3]), times=garbage), START)
    assert found.mean.isfinite().all()
    close(found.mean[0, :1], imm(model, Series(y[0, :1], times=garbage[0, :1]), START).mean, 100.0)


@both
@pytest.mark.parametrize("back", [False, True], ids=["imm", "smooth"])
def test_rates_drifts_densities_and_times_have_gradients(way, back):
    times = torch.tensor([0.3, 0.9], dtype=F64)
    A = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64)  # its series ends, that of its derivative does not
    given = [times, RATE, positive(2, 2), torch.tensor(1.5, dtype=F64), A]
    y, R = torch.randn(2, 1, dtype=F64), positive(2, 1)
    start = beginning(2)

    def likelihood(times, rate, Q, strength, A):
        def pulled(x):
            return torch.stack((x[1], -strength * torch.sin(x[0])), -1)

        straight = KalmanModel(A, Q[1], torch.eye(1, 2, dtype=F64), R[1], continuous=True)
        mode = NonlinearMode(follow_drift(pulled, steps=2), Q[0], lambda x: x[:1], R[0], continuous=True)
        model = NonlinearModel.of([mode, straight], transition=Generator(rate), method=way, validate=False)
        if back:
            return smooth(model, Series(y, times=times), start, method="imm").mean.sum()
        return imm(model, Series(y, times=times), start).log_likelihood

    assert gradcheck(likelihood, [t.detach().clone().requires_grad_() for t in given], fast_mode=True)


def test_float32_is_float64_rounded():
    """And stays float32."""
    modes = [unknown_turn(2, rate_density=0.1, **NOISE), TURN]
    low = [NonlinearMode(m.move, m.Q.float(), m.observe, m.R.float(), continuous=True) for m in modes]
    y, times = torch.randn(3, 2, dtype=F64), torch.tensor([0.4, 0.5, 1.9], dtype=F64)
    high = imm(NonlinearModel.of(modes, transition=Generator(RATE)), Series(y, times=times), START)
    found = imm(
        NonlinearModel.of(low, transition=Generator(RATE.float())),
        Series(y.float(), times=times.float()),
        tree_map(lambda t: t.float(), START),
    )
    assert found.mean.dtype == torch.float32
    close(found.mean, high.mean.float(), 100.0)
