"""Systems of continuous time that are looked at now and then: steps join, and filters see only what lies between.

P(dt) = exp(rate dt), F = exp(A dt), Q = ∫ exp(A u) C exp(A u)^T du.   [vanloan78]
"""

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.autograd import gradcheck
from torch.utils._pytree import tree_map

from gradlogz import KalmanModel, Prior, Series, SwitchingFilter, SwitchingModel, imm
from gradlogz.filters import (
    Filtered,
    Generator,
    constant_acceleration,
    constant_velocity,
    coordinated_turn,
    discretize,
    discretize_chain,
    enumerate_modes,
    random_walk,
    singer,
)
from gradlogz.filters.gaussian.switching import STRETCH
from gradlogz.kernels.filters import dispatch
from support.scales import close
from support.switching_oracles import F64, beginning, observed, positive, same

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def rates(k, scale=1.0):
    """A random generator, far from symmetric."""
    G = scale * torch.rand(k, k, dtype=F64) ** 3
    G = G - torch.diag(G.diagonal())
    return G - torch.diag(G.sum(-1))


def flowing(k=3, s=2, o=2, *, u=0, **more):
    """A random switching model of continuous time."""
    return SwitchingModel(
        transition=Generator(rates(k)),
        F=0.5 * torch.randn(k, s, s, dtype=F64),
        Q=positive(k, s),
        H=torch.randn(k, o, s, dtype=F64),
        R=positive(k, o, scale=0.5),
        b=torch.randn(k, s, dtype=F64),
        d=torch.randn(k, o, dtype=F64),
        B=torch.randn(k, s, u, dtype=F64) if u else None,
        D=torch.randn(k, o, u, dtype=F64) if u else None,
        **more,
    )


def run(model, method, y, start, **more):
    return SwitchingFilter(model, method[0], depth=method[1]).filter(Series(y, **more), start)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_probabilities_of_a_chain_are_the_exponential_of_its_rates(k):
    dt = torch.tensor([0.0, 1e-9, 0.1, 1.0, 30.0, 1e4], dtype=F64)
    G = rates(k)
    found = discretize_chain(G, dt)
    for P, t in zip(found, dt, strict=True):
        close(P, torch.as_tensor(scipy.linalg.expm(G.numpy() * float(t))), tolerance=1e-12)
        assert (P >= 0).all()
        close(P.sum(-1), torch.ones(k, dtype=F64))
    assert torch.equal(found[0], torch.eye(k, dtype=F64))
    close((found[1] - torch.eye(k, dtype=F64)) / 1e-9, G, tolerance=2e-7)  # short steps keep their digits


def test_modes_that_cannot_be_reached_have_probability_zero_exactly():
    G = torch.tensor([[-1.0, 1.0, 0.0], [0.0, -2.0, 2.0], [0.0, 0.0, 0.0]], dtype=F64)  # one after the other
    P = discretize_chain(G, torch.tensor([1e-3, 1.0, 1e3], dtype=F64))
    assert (P[:, 1, 0] == 0).all()
    assert (P[:, 2, :2] == 0).all()
    assert (P[:2, 0, 2] > 0).all()
    close(P[1, 0, 1], torch.tensor(np.exp(-1) - np.exp(-2), dtype=F64))


def test_steps_join():
    """P(s) P(t) = P(s + t), F likewise, and Q(s + t) = F(t) Q(s) F(t)^T + Q(t)."""
    G, A, C = rates(4), torch.randn(3, 3, dtype=F64), positive(3)
    s, t = torch.tensor(0.7, dtype=F64), torch.tensor(2.1, dtype=F64)
    close(discretize_chain(G, s) @ discretize_chain(G, t), discretize_chain(G, s + t))
    (F_s, Q_s), (F_t, Q_t), (F, Q) = (discretize(A, C, x) for x in (s, t, s + t))
    close(F_t @ F_s, F, F.abs().amax())
    close(F_t @ Q_s @ F_t.mT + Q_t, Q, Q.abs().amax())


def test_long_steps_of_fast_decay_come_to_rest():
    """Many times the time in which it forgets: what is left is the law it comes to, 0 = 2 A Q + C."""
    A, C = torch.tensor([[-1.0]], dtype=F64), torch.tensor([[3.0]], dtype=F64)
    G = torch.tensor([[-1.0, 1.0], [3.0, -3.0]], dtype=F64)
    for dt in torch.tensor([100.0, 5e4, 1e9], dtype=F64):
        F, Q = discretize(A, C, dt)
        close(F, torch.zeros(1, 1, dtype=F64))
        close(Q, torch.full((1, 1), 1.5, dtype=F64))
        close(discretize_chain(G, dt), torch.tensor([[0.75, 0.25], [0.75, 0.25]], dtype=F64))
    F, Q = discretize(torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64), torch.zeros(2, 2, dtype=F64), 1e6 * dt)
    close(F, torch.tensor([[1.0, 1e15], [0.0, 1.0]], dtype=F64), 1e15)


def test_steps_that_cannot_be_looked_at_are_as_long_as_others():
    A, C = torch.randn(4, 4, dtype=F64) - 4 * torch.eye(4, dtype=F64), positive(4)
    rest = torch.as_tensor(scipy.linalg.solve_continuous_lyapunov(A.numpy(), -C.numpy()))  # what noise comes to
    dt = 10.0 ** torch.arange(-9, 10, dtype=F64)
    F, Q = torch.func.vmap(discretize, (None, None, 0))(A, C, dt)
    for f, q, t in zip(F, Q, dt, strict=True):
        expected = torch.as_tensor(scipy.linalg.expm(A.numpy() * float(t)))
        close(f, expected, tolerance=1e-12)
        close(q, rest - expected @ rest @ expected.mT, float(rest.abs().max()), tolerance=1e-12)
    G = rates(3)
    P = torch.func.vmap(discretize_chain, (None, 0))(G, dt)
    for p, t in zip(P, dt, strict=True):
        close(p, torch.as_tensor(scipy.linalg.expm(G.numpy() * min(float(t), 1e4))), tolerance=1e-12)


@pytest.mark.parametrize("t", [0.01, 0.7, 20.0])
def test_probabilities_have_derivatives_by_rates_whose_rows_sum_to_zero(t):
    G, weight = rates(3), torch.randn(3, 3, dtype=F64)
    dt = torch.tensor([t], dtype=F64)

    def total(rate, dt):
        return (weight * discretize_chain(rate, dt)).sum()

    G.requires_grad_()
    (slopes,) = torch.autograd.grad(total(G, dt), G)
    G = G.detach()
    mapped = torch.func.vmap(torch.func.grad(total), (None, 0))(G, dt.unsqueeze(-1)).squeeze(0)  # numbers are not read
    for i in range(3):
        for j in range(3):  # a rate is taken from the diagonal
            away = np.zeros((3, 3))
            away[i, j], away[i, i] = 1.0, away[i, i] - 1.0
            away = away if i != j else np.zeros((3, 3))
            moved = scipy.linalg.expm_frechet(G.numpy() * t, away * t, compute_expm=False)
            expected = (weight * torch.as_tensor(moved)).sum()
            close(slopes[i, j], expected, 1 + t, tolerance=1e-12)
            close(mapped[i, j], expected, 1 + t, tolerance=1e-12)


def test_offsets_and_inputs_are_integrals_over_a_step():
    model, dt = flowing(2, 3, 1, u=2), torch.tensor([0.3, 4.0], dtype=F64)
    steps = model.at(dt)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    for n, t in enumerate(dt.tolist()):
        for j in range(2):
            A = model.F[j].numpy()
            E = [scipy.linalg.expm(A * t * (1 + x) / 2) for x in nodes]
            held = sum(w * e for w, e in zip(weights, E, strict=True)) * t / 2
            noise = sum(w * e @ model.Q[j].numpy() @ e.T for w, e in zip(weights, E, strict=True)) * t / 2
            for found, expected in (
                (steps.F[n, j], scipy.linalg.expm(A * t)),
                (steps.Q[n, j], noise),
                (steps.b[n, j], held @ model.b[j].numpy()),
                (steps.B[n, j], held @ model.B[j].numpy()),
            ):
                expected = torch.as_tensor(expected)
                close(found, expected, 10 * (1 + expected.abs().amax()))
    assert steps.D is model.D
    assert steps.H is model.H
    still = model.at(torch.zeros(1, dtype=F64))
    assert torch.equal(still.F[0], torch.eye(3, dtype=F64).expand(2, 3, 3))
    assert not still.Q.any()
    assert not still.b.any()
    assert not still.B.any()


@each
def test_regular_times_are_regular_steps(method):
    """With the usual models of motion, in both of their forms."""
    dt, steps, noise = 0.4, 6, {"observation_variance": 0.3, "dtype": F64}

    def modes(**step):
        return [
            constant_velocity(2, spectral_density=0.2, **noise, **step),
            coordinated_turn(2, rate=0.8, spectral_density=0.1, **noise, **step),
        ]

    G = rates(2)
    continuous = SwitchingModel.of(modes(), transition=Generator(G))
    P = torch.as_tensor(scipy.linalg.expm(dt * G.numpy()))
    regular = SwitchingModel.of(modes(dt=dt), transition=P)
    y, start = observed(regular, steps), beginning(2, 4)
    times = dt * torch.arange(1, steps + 1, dtype=F64)
    same(run(continuous, method, y, start, times=times), run(regular, method, y, start), 10.0)


@pytest.mark.parametrize(
    ("build", "numbers"),
    [
        (random_walk, {"spectral_density": 0.7}),
        (constant_velocity, {"spectral_density": 0.7}),
        (constant_acceleration, {"spectral_density": 0.7}),
        (singer, {"correlation_time": 2.0, "acceleration_variance": 0.5}),
        (coordinated_turn, {"rate": 0.3, "spectral_density": 0.7}),
    ],
)
def test_models_of_motion_have_both_forms(build, numbers):
    numbers = {**numbers, "observation_variance": 0.3, "dtype": F64}
    flow, step = build(2, **numbers), build(2, dt=1.7, **numbers)
    assert flow.continuous
    assert not step.continuous
    A, C = flow.F.numpy(), flow.Q.numpy()
    close(step.F, torch.as_tensor(scipy.linalg.expm(1.7 * A)), 10.0)
    block = np.block([[-A, C], [np.zeros_like(A), A.T]])  # Van Loan's block the other way round, by scipy
    E = scipy.linalg.expm(1.7 * block)
    s = A.shape[0]
    close(step.Q, torch.as_tensor(E[s:, s:].T @ E[:s, s:]), 10.0)
    assert torch.equal(flow.H, step.H)
    assert torch.equal(flow.R, step.R)


@pytest.mark.parametrize("filter", [imm, lambda *a, **o: enumerate_modes(*a, **o).filtered], ids=["imm", "exact"])
def test_two_observations_at_one_time_are_one_of_both(filter):
    """A step of length 0 moves nothing and switches nothing: the second observation is a second sensor.

    Filters that collapse between the two are not exact there, as anywhere else.
    """
    model, start = flowing(3, 2, 1), beginning(3)
    y = observed(model, 4)
    times = torch.tensor([0.5, 1.1, 1.1, 2.0], dtype=F64)
    found = filter(model, Series(y, times=times), start)
    both = SwitchingModel(
        transition=model.transition,
        F=model.F,
        Q=model.Q,
        b=model.b,
        H=torch.cat((model.H, model.H), -2),
        R=torch.eye(2, dtype=F64) * model.R,
        d=torch.cat((model.d, model.d), -1),
    )
    gap = torch.full((1,), torch.nan, dtype=F64)
    joined = torch.stack((torch.cat((y[0], gap)), torch.cat((y[1], y[2])), torch.cat((y[3], gap))))
    expected = filter(both, Series(joined, times=times[[0, 1, 3]]), start)
    for name in ("mean", "covariance", "log_mode_probability", "mode_mean", "mode_covariance"):
        e = getattr(expected, name)
        close(getattr(found, name)[[0, 2, 3]], e, 10 * (1 + e.abs().amax()))
    close(found.log_likelihood, expected.log_likelihood, 100.0)


def test_one_mode_does_not_mind_being_looked_at_in_between():
    """Times at which nothing was observed change nothing, for a system that cannot switch between them."""
    model, start = flowing(1, 3, 2), beginning(1, 3, shared=True)
    begins = Prior(start.mean, start.covariance)
    times = torch.tensor([0.3, 0.4, 1.9, 2.0, 5.5], dtype=F64)
    y = observed(model, 5)
    y[[1, 2]] = torch.nan
    there = torch.tensor([0, 3, 4])
    found, expected = (
        imm(model, Series(y, times=times), begins),
        imm(model, Series(y[there], times=times[there]), begins),
    )
    close(found.mean[there], expected.mean, 100.0)
    close(found.covariance[there], expected.covariance, 100.0)
    close(found.log_likelihood, expected.log_likelihood, 100.0)


@each
def test_times_may_differ_between_targets_and_come_one_by_one(method):
    model, start = flowing(2, 2, 2, u=1), beginning(2)
    y, u = observed(model, 5, 3), torch.randn(3, 5, 1, dtype=F64)
    times = torch.rand(3, 5, dtype=F64).cumsum(-1)
    found = run(model, method, y, start, times=times, inputs=u)
    for i in range(3):
        alone = run(model, method, y[i], start, times=times[i], inputs=u[i])
        same(Filtered(*(part[i] for part in found)), alone, 10.0)
    online = SwitchingFilter(model, method[0], depth=method[1])
    state = online.init(start, batch_shape=(3,))
    dt = times.diff(dim=-1, prepend=torch.zeros(3, 1, dtype=F64))
    for t in range(5):
        state, now = online.step(state, y[:, t], inputs=u[:, t], dt=dt[:, t])
    close(now.mean, found.mean[:, -1], 100.0)
    close(state.log_likelihood, found.log_likelihood, 100.0)
    shared = run(model, method, y, start, times=times[0], inputs=u)
    same(Filtered(*(part[0] for part in shared)), Filtered(*(part[0] for part in found)), 10.0)


@each
def test_the_last_of_a_long_series_is_found_stretch_by_stretch(monkeypatch, method):
    """No more than a stretch of it is discretised at a time: memory does not grow with time."""
    model, start = flowing(3, 2, 2, u=2), beginning(3, 2)
    steps = 2 * STRETCH + 7
    y, u = observed(model, steps, 4), torch.randn(steps, 2, dtype=F64)
    y[1, 70, 0] = torch.nan
    times, ends = 0.1 * torch.rand(4, steps, dtype=F64).cumsum(-1), torch.tensor([steps, 70, 3, steps])
    series = Series(y, times=times, inputs=u, lengths=ends)
    chosen, lengths = SwitchingFilter(model, *method), []
    discretised = SwitchingModel.at
    monkeypatch.setattr(SwitchingModel, "at", lambda m, dt: (lengths.append(dt.shape[-1]), discretised(m, dt))[1])
    whole = chosen.filter(series, start)
    last = Filtered(*(field[:, -1] for field in whole[:-1]), whole.log_likelihood)
    for threshold in (0, torch.inf):  # compiled, and not
        monkeypatch.setattr(dispatch, "WORTH_FILTERING", threshold)
        same(chosen.filter(series, start, keep="last"), last, tolerance=1e-10)
    assert lengths == [steps, *[STRETCH, STRETCH, 7] * 2]


def test_the_exact_filter_is_told_times_too():
    model, start = flowing(2), beginning(2)
    y, times = observed(model, 3), torch.tensor([0.2, 1.5, 1.6], dtype=F64)
    dt = times.diff(prepend=torch.zeros(1, dtype=F64))
    same(
        enumerate_modes(model, Series(y, times=times), start).filtered, enumerate_modes(model.at(dt), y, start).filtered
    )


def test_beliefs_of_the_first_observations_time_have_a_first_step_of_length_zero():
    model, start = flowing(2), beginning(2)
    y, times = observed(model, 3), torch.tensor([7.0, 8.5, 8.6], dtype=F64)
    found = imm(model, Series(y, times=times - times[:1]), start)
    S = model.H @ start.covariance @ model.H.mT + model.R
    expected = (model.H @ start.mean.unsqueeze(-1)).squeeze(-1) + model.d
    log_density = torch.distributions.MultivariateNormal(expected, S).log_prob(y[0])
    close(found.log_mode_probability[0], (start.log_mode_probability + log_density).log_softmax(-1), 100.0)


@each
def test_rates_drifts_densities_and_times_have_gradients(method):
    model, start = flowing(2, 2, 1, u=1, validate=False), beginning(2)
    y, u = observed(model, 3), torch.randn(3, 1, dtype=F64)
    names = ("F", "Q", "b", "B")
    times = torch.tensor([0.3, 0.9, 2.0], dtype=F64, requires_grad=True)
    leaves = [t.clone().requires_grad_() for t in (model.transition.rate, *(getattr(model, n) for n in names))]
    fixed = {n: getattr(model, n) for n in ("H", "R", "d", "D")}

    def likelihood(times, rate, *fields):
        changed = SwitchingModel(Generator(rate), **dict(zip(names, fields, strict=True)), **fixed, validate=False)
        return run(changed, method, y, start, times=times, inputs=u).log_likelihood

    assert gradcheck(likelihood, (times, *leaves), fast_mode=True)


def test_vmap_over_models_of_continuous_time_is_a_loop():
    models, start = [flowing(2) for _ in range(3)], beginning(2)
    y, times = observed(models[0], 4), torch.tensor([0.1, 0.5, 0.5, 3.0], dtype=F64)
    stacked = tree_map(lambda *parts: torch.stack(parts), *models)
    mapped = torch.func.vmap(lambda model: imm(model, Series(y, times=times), start).log_likelihood)(stacked)
    close(mapped, torch.stack([imm(m, Series(y, times=times), start).log_likelihood for m in models]), 100.0)


def test_a_kalman_model_says_whether_it_is_continuous():
    eye = torch.eye(1, dtype=F64)
    assert not KalmanModel(eye, eye, eye, eye).continuous
