"""What holds for smoothers of functions: targets, gaps, lags, components, angles, derivatives, and what they gain."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils._pytree import tree_leaves, tree_map

from gradlogz import Prior, Series, SwitchingModel, smooth
from gradlogz.filters import (
    NonlinearModel,
    Smoothed,
    constant_acceleration,
    constant_velocity,
    nees,
    range_bearing,
    unknown_turn,
    wrap_angles,
)
from gradlogz.filters.models.nonlinear_motion import turned
from support.scales import close
from support.switching_oracles import F64, beginning, chain, positive

METHODS = ("imm", "gpb2", "kim")
each = pytest.mark.parametrize("method", METHODS)
ours = pytest.mark.parametrize("method", ["imm", "gpb2"])
both = pytest.mark.parametrize("way", ["ekf", "ukf"])


def swing(x, *_):
    return torch.stack((x[0] + 0.3 * x[1], x[1] - 0.3 * torch.sin(x[0])), -1)


def fall(x, *_):
    return torch.stack((x[0] + 0.3 * x[1], 0.8 * x[1] + 0.1 * x[0] * x[1]), -1)


def look(x, *_):
    return torch.stack((torch.sin(x[0]) + 0.2 * x[1] ** 2,), -1)


def curved(way, **options):
    """A pendulum that may lose its string."""
    Q, R = positive(2, 2, scale=0.1), positive(2, 1, scale=0.2)
    return NonlinearModel(chain(2), (swing, fall), Q, look, R, method=way, **options)


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


def alike(found, expected, scale=100.0):
    for name, a, e in zip(Smoothed._fields[:-1], found[:-1], expected[:-1], strict=True):
        size = scale * (1 + float(e[e.isfinite()].abs().max()))
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12 * size, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", [{"method": m} for m in (*METHODS, "enumerate")] + [{"lag": 1}], ids=str)
@both
def test_targets_do_not_see_each_other(options, way):
    """Beliefs, inputs and gaps of their own."""
    Q, R = positive(2, 2, scale=0.1), positive(2, 1, scale=0.2)
    model = NonlinearModel(chain(2), (lambda x, u: swing(x) + u, fall), Q, look, R, method=way, input_size=2)
    start = Prior(torch.randn(3, 1, 2, dtype=F64), positive(3, 1, 2))
    y, u = torch.randn(3, 4, 1, dtype=F64), torch.randn(3, 4, 2, dtype=F64)
    y[1, 2] = torch.nan
    found = smooth(model, Series(y, inputs=u), start, **options)
    for i in range(3):
        alone = smooth(model, Series(y[i], inputs=u[i]), tree_map(lambda t, i=i: t[i], start), **options)
        alike(Smoothed(*(part[i] for part in found[:-1]), found.filtered), alone)


@each
@both
def test_masks_gaps_and_lengths_say_the_same(method, way):
    model, start = curved(way), beginning(2)
    y, lengths = torch.randn(3, 5, 1, dtype=F64), torch.tensor([5, 2, 0])
    inside = torch.arange(5) < lengths[:, None]
    by_gap = smooth(model, y.masked_fill(~inside.unsqueeze(-1), torch.nan), start, method=method)
    alike(smooth(model, Series(y, lengths=lengths), start, method=method), by_gap)
    alike(smooth(model, Series(y, mask=inside), start, method=method), by_gap)
    if method == "gpb2":  # of nothing nothing is learned
        close(by_gap.mode_mean[2], by_gap.filtered.mode_mean[2], 100.0)


@each
@both
def test_a_lag_is_a_shorter_series(method, way):
    model, start = curved(way), beginning(2)
    y = torch.randn(3, 1, dtype=F64)
    found = smooth(model, y, start, method=method, lag=1)
    for t in range(3):
        alone = smooth(model, y[: t + 2], start, method=method)
        for name in Smoothed._fields[:9]:
            torch.testing.assert_close(getattr(found, name)[t], getattr(alone, name)[t], rtol=0, atol=1e-10)


@both
def test_noise_and_chains_may_change_in_time(way):
    """Only the last step is looked at: of the first ones, fields of all steps are those of one."""
    T = torch.stack([chain(2) for _ in range(4)])
    Q, R, start = positive(4, 2, 2, scale=0.1), positive(4, 2, 1, scale=0.2), beginning(2)
    y = torch.randn(4, 1, dtype=F64)
    whole = smooth(NonlinearModel(T, (swing, fall), Q, look, R, method=way), y, start, method="gpb2")
    known = Prior(
        whole.filtered.mode_mean[2], whole.filtered.mode_covariance[2], whole.filtered.log_mode_probability[2]
    )
    last = smooth(NonlinearModel(T[3], (swing, fall), Q[3], look, R[3], method=way), y[3:], known, method="gpb2")
    for name in Smoothed._fields[:9]:
        close(getattr(whole, name)[3], getattr(last, name)[0], 100.0)


@ours
@both
def test_covariances_are_covariances(method, way):
    model, start = curved(way), beginning(2)
    found = smooth(model, 3 * torch.randn(12, 1, dtype=F64), start, method=method)
    for P in (found.covariance, found.mode_covariance, found.previous_covariance):
        close(P, P.mT, 10.0)
        assert (torch.linalg.eigvalsh(P) > 0).all()


def tracks(count, steps=30):
    """Targets that fly straight and from step 15 on turn, each at its own rate, and what the radar sees of them."""
    g = torch.Generator().manual_seed(0)
    rate = 0.3 + 0.4 * torch.rand(count, dtype=F64, generator=g)
    state = torch.tensor([20.0, -2.0, 3.0, 0.0, 0.0], dtype=F64).expand(count, 5)
    path = []
    for t in range(steps):
        before = torch.cat((state[:, :4], (rate if t >= 15 else 0 * rate).unsqueeze(-1)), -1)
        state = turned(before, torch.tensor(0.5, dtype=F64))
        path.append(state)
    path = torch.stack(path, 1)
    y = torch.stack((path[..., [0, 2]].norm(dim=-1), torch.atan2(path[..., 2], path[..., 0])), -1)
    noise = torch.tensor([0.1, 0.001], dtype=F64).sqrt() * torch.randn(count, steps, 2, dtype=F64, generator=g)
    start = Prior(
        torch.tensor([20.0, -2.0, 3.0, 0.0, 0.0], dtype=F64), torch.diag(torch.tensor([1, 1, 1, 1, 0.05], dtype=F64))
    )
    return path, y + noise, start


@ours
@both
def test_on_a_turn_looking_back_is_surer_than_filtering(method, way):
    """Ranges and bearings of 12 targets: errors of position and velocity, and the mode, with a lag between the two."""
    path, y, start = tracks(12)
    model = flying(way)
    found = smooth(model, y, start, method=method)
    late = smooth(model, y, start, method=method, lag=4)

    def error(estimate, parts):
        return float((estimate.mean[..., parts] - path[..., parts]).square().mean().sqrt())

    def right(estimate):
        true = (torch.arange(path.shape[1]) >= 15).long()
        return float((estimate.log_mode_probability.argmax(-1) == true).double().mean())

    for parts in ([0, 2], [1, 3]):
        assert error(found, parts) < 0.75 * error(found.filtered, parts)
        assert error(found, parts) < error(late, parts) < error(found.filtered, parts)
    assert right(found) > right(found.filtered) + 0.02


@both
def test_what_is_drawn_from_a_model_lies_where_its_smoother_says(way):
    """NEES of 400 pendulums with little noise: chi-square as far as the tangent is the function."""
    Q, R = 0.002 * torch.eye(2, dtype=F64), torch.full((1, 1), 0.01, dtype=F64)
    model = NonlinearModel(torch.ones(1, 1, dtype=F64), swing, Q[None], lambda x: torch.sin(x[:1]), R[None], method=way)
    g, n = torch.Generator().manual_seed(1), 400
    m, P = torch.tensor([0.5, 0.0], dtype=F64), 0.02 * torch.eye(2, dtype=F64)
    x = m + P.sqrt().diagonal() * torch.randn(n, 2, dtype=F64, generator=g)
    path, y = [], []
    for _ in range(10):
        x = torch.func.vmap(swing)(x) + 0.002**0.5 * torch.randn(n, 2, dtype=F64, generator=g)
        path.append(x)
        y.append(torch.sin(x[:, :1]) + 0.1 * torch.randn(n, 1, dtype=F64, generator=g))
    found = smooth(model, torch.stack(y, 1), Prior(m, P))
    measured = nees(found, torch.stack(path, 1), level=0.9999)
    for t in range(10):
        assert bool(type(measured)(*(part[:, t] for part in measured[:4]), measured.level).mean().holds), t


@both
@ours
def test_bearings_wrap(method, way):
    """A scene behind the radar is the scene before it, though bearings jump from pi to -pi there."""
    J = torch.diag(torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0], dtype=F64))  # half a turn
    model = flying(way)
    y = torch.stack((torch.linspace(5, 6, 8, dtype=F64), torch.linspace(-0.1, 0.6, 8, dtype=F64)), -1)
    y[3, 0] = torch.nan
    opposite = torch.stack((y[:, 0], (y[:, 1] + 2 * math.pi) % (2 * math.pi) - math.pi), -1)
    assert opposite[:, 1].max() - opposite[:, 1].min() > 6  # it jumps
    spread = torch.diag(torch.tensor([0.5, 0.2, 0.5, 0.2, 0.1], dtype=F64))
    m = torch.tensor([5.0, 0.1, 0.0, 0.5, 0.05], dtype=F64)
    straight = smooth(model, y, Prior(m, spread), method=method)
    around = smooth(model, opposite, Prior(J @ m, J @ spread @ J.mT), method=method)
    close(around.mean, straight.mean @ J.mT, 100.0)
    close(around.covariance, J @ straight.covariance @ J.mT, 100.0)
    close(around.log_pair_probability, straight.log_pair_probability, 100.0)


@pytest.mark.parametrize(
    ("method", "fill"), [("imm", "modes"), ("gpb2", "modes"), ("gpb2", "zero"), ("enumerate", "zero")]
)
@both
def test_modes_of_unequal_sizes_are_smoothed_as_those_of_matrices(method, way, fill):
    """With functions of their own components, and with functions of the whole state that say more than is asked."""
    noise = {"dt": 0.5, "spectral_density": 0.3, "observation_variance": 0.4, "dtype": F64}
    modes = [constant_velocity(1, **noise), constant_acceleration(1, **noise)]
    options = {"transition": chain(2), "components": [(0, 1), (0, 1, 2)], "fill": fill}
    linear = SwitchingModel.of(modes, **options)
    start, y = beginning(2, 3), torch.randn(4, 1, dtype=F64)
    expected = smooth(linear, y, start, method=method)
    alike(smooth(NonlinearModel.of(modes, method=way, **options), y, start, method=method), expected, 1000.0)

    def louder(x):
        return torch.cat((linear.F[0, :2, :2] @ x[:2], x[:1] + 3))  # the last is not looked at

    options["components"] = ((0, 1), (0, 1, 2))
    Q, R = linear.Q, linear.R
    whole = NonlinearModel(
        move=(louder, lambda x: linear.F[1] @ x), Q=Q, observe=lambda x: x[:1], R=R, method=way, **options
    )
    alike(smooth(whole, y, start, method=method), expected, 1000.0)


@pytest.mark.parametrize(
    ("way", "options"),
    [("ekf", {"method": "imm"}), ("ukf", {"method": "imm"}), ("ekf", {"method": "enumerate"}), ("ukf", {"lag": 1})],
    ids=str,
)
def test_every_output_has_its_derivative_in_every_argument(options, way):
    given = [torch.tensor(0.3, dtype=F64), chain(2), positive(2, 2, scale=0.1), positive(2, 1, scale=0.2)]
    given += [torch.randn(3, 1, dtype=F64), *tree_leaves(beginning(2))]

    def run(strength, T, Q, R, y, mean, covariance, log_pi):
        def pulled(x):
            return torch.stack((x[0] + 0.3 * x[1], x[1] - strength * torch.sin(x[0])), -1)

        model = NonlinearModel(T, (pulled, fall), Q, look, R, method=way, validate=False)
        return smooth(model, y, Prior(mean, covariance, log_pi), **options)[:-1]

    weights = [torch.randn_like(part) for part in run(*given)]

    def projected(*values):
        return tuple((w * part).sum() for w, part in zip(weights, run(*values), strict=True))

    assert gradcheck(projected, [t.detach().clone().requires_grad_() for t in given], fast_mode=True)


@ours
def test_certain_beginnings_leave_gradients_finite(method):
    """A covariance of zeros: nothing is to be learned of the beginning, and nothing is divided by it."""
    Q, R = torch.zeros(2, 2, 2, dtype=F64), torch.ones(2, 1, 1, dtype=F64)
    m = torch.randn(2, dtype=F64, requires_grad=True)
    model = NonlinearModel(chain(2), (swing, fall), Q, look, R, method="ukf")
    found = smooth(model, torch.randn(3, 1, dtype=F64), Prior(m, torch.zeros(2, 2, dtype=F64)), method=method)
    close(found.initial_mode_mean, m.detach().expand(2, 2))
    assert torch.autograd.grad(found.mean.sum() + found.covariance.sum(), m)[0].isfinite().all()


@ours
@both
def test_an_impossible_observation_changes_nothing(method, way):
    model, start = curved(way), beginning(2)
    far = torch.tensor([[1.0], [1e200], [0.5]], dtype=F64)
    gap = torch.tensor([[1.0], [torch.nan], [0.5]], dtype=F64)
    found, expected = smooth(model, far, start, method=method), smooth(model, gap, start, method=method)
    close(found.mean, expected.mean, 100.0)
    close(found.log_mode_probability, expected.log_mode_probability, 100.0)


@each
@both
def test_float32_is_float64_rounded(method, way):
    start, T, Q, R = beginning(2), chain(2), positive(2, 2, scale=0.1), positive(2, 1)
    y = torch.randn(10, 1, dtype=F64)
    high = smooth(NonlinearModel(T, (swing, fall), Q, look, R, method=way), y, start, method=method)
    low = NonlinearModel(T.float(), (swing, fall), Q.float(), look, R.float(), method=way)
    found = smooth(low, y.float(), tree_map(lambda t: t.float(), start), method=method)
    assert found.mean.dtype == torch.float32
    close(found.mean, high.mean.float(), 100.0)


@both
def test_vmap_is_a_loop(way):
    model, start = curved(way, validate=False), beginning(2)
    many = torch.randn(3, 4, 1, dtype=F64)
    mapped = torch.func.vmap(lambda y: smooth(model, y, start).mean)(many)
    close(mapped, torch.stack([smooth(model, y, start).mean for y in many]), 100.0)
