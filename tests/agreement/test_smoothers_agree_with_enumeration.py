"""Smoothers beside every history of modes: where they are exact, and how near elsewhere."""

import math

import filterpy.kalman
import numpy as np
import pytest
import torch

from gradlogz import Prior, Series, SwitchingModel, gpb2, imm, smooth
from gradlogz.filters import Smoothed, constant_acceleration, constant_velocity, enumerate_modes
from gradlogz.kernels.filters import dispatch
from support.scales import close
from support.smoother_oracles import near, smoothed_by_definition
from support.switching_oracles import F64, beginning, chain, observed, positive, same, system

METHODS = ("imm", "gpb2", "kim")
each = pytest.mark.parametrize("method", METHODS)
ours = pytest.mark.parametrize("method", ["imm", "gpb2"])


@pytest.fixture(autouse=True, params=[0, math.inf], ids=["compiled", "torch"])
def path(monkeypatch, request):
    """Run every law by the compiled kernels, where they apply, and by the torch path."""
    monkeypatch.setattr(dispatch, "WORTH_FILTERING", request.param)


def agrees(found, expected, *, tolerance=1e-11, but=()):
    for name, error in near(found, expected, but=("log_likelihood", *but)).items():
        assert error <= tolerance, f"{name}: {error:.3g}"


@pytest.mark.parametrize(("k", "s", "o", "steps"), [(1, 2, 1, 5), (2, 1, 1, 6), (3, 2, 2, 4), (2, 3, 2, 4)])
def test_exact_is_conditioning_of_one_gaussian_for_each_history(k, s, o, steps):
    model, start = system(k, s, o), beginning(k, s)
    y = observed(model, steps)
    y[1], y[2, 0] = torch.nan, torch.nan
    found = smooth(model, y, start, method="enumerate")
    expected = smoothed_by_definition(model, y, start)
    agrees(found, expected)
    torch.testing.assert_close(found.filtered.log_likelihood, expected["log_likelihood"], rtol=1e-12, atol=0)


@each
def test_one_mode_is_conditioning(method):
    model, start = system(1, 3, 2), beginning(1, 3)
    y = observed(model, 6)
    y[2], y[3, 1] = torch.nan, torch.nan
    agrees(smooth(model, y, start, method=method), smoothed_by_definition(model, y, start))


@each
def test_one_mode_is_the_smoother_of_filterpy(method):
    model, start = system(1, 4, 2, offsets=False), beginning(1, 4, shared=True)
    y = observed(model, 20)
    begins = Prior(start.mean, start.covariance)
    found = smooth(model, y, begins, method=method)
    F, Q = model.F[0].numpy(), model.Q[0].numpy()
    forward = imm(model, y, begins)
    kalman = filterpy.kalman.KalmanFilter(dim_x=4, dim_z=2)
    kalman.F, kalman.Q = F, Q
    m, P, _, _ = kalman.rts_smoother(forward.mean.numpy(), forward.covariance.numpy())
    np.testing.assert_allclose(found.mean, m, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.covariance, P, rtol=0, atol=1e-10)


@each
def test_modes_that_never_switch_are_a_bank_of_smoothers(method):
    k = 3
    model, start = system(k, transition=torch.eye(k, dtype=F64)), beginning(k)
    y = observed(model, 5)
    expected = smoothed_by_definition(model, y, start)
    found = smooth(model, y, start, method=method)
    agrees(found, expected)
    for j in range(k):
        fields = {f: getattr(model, f)[j : j + 1] for f in ("F", "Q", "H", "R", "b", "d")}
        alone = SwitchingModel(torch.ones(1, 1, dtype=F64), **fields)
        one = smooth(alone, y, Prior(start.mean[j], start.covariance[j]), method=method)
        torch.testing.assert_close(found.mode_mean[:, j], one.mean, rtol=0, atol=1e-11)
        torch.testing.assert_close(found.mode_covariance[:, j], one.covariance, rtol=0, atol=1e-11)


@ours
def test_without_observations_what_was_believed_stays(method):
    model, start = system(2), beginning(2)
    y = torch.full((5, 2), torch.nan, dtype=F64)
    found = smooth(model, y, start, method=method)
    agrees(found, smoothed_by_definition(model, y, start))
    torch.testing.assert_close(found.mean, found.filtered.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.initial_mode_mean, start.mean)


@ours
@pytest.mark.parametrize("k", [2, 3])
def test_from_a_gaussian_for_each_mode_one_observation_is_smoothed_exactly(method, k):
    """Both times of it, both modes and all moments of pairs: also where the filter "imm" is not exact."""
    model, start = system(k), beginning(k)
    y = observed(model, 1)
    agrees(smooth(model, y, start, method=method), smoothed_by_definition(model, y, start))


@ours
def test_gaps_after_one_observation_change_nothing(method):
    model, start = system(2), beginning(2)
    y = torch.cat((observed(model, 1), torch.full((3, 2), torch.nan, dtype=F64)))
    agrees(smooth(model, y, start, method=method), smoothed_by_definition(model, y, start), but=_rest())


def _rest():
    """All but time 0: the filters collapse what the first observation has told them."""
    return tuple(name for name in Smoothed._fields if not name.startswith("initial"))


def test_inputs_and_models_that_change():
    steps = 5
    model = system(1, 2, 1, lead=(steps,), B=torch.randn(1, 2, 3, dtype=F64), D=torch.randn(steps, 1, 1, 3, dtype=F64))
    y, u, start = observed(model, steps), torch.randn(steps, 3, dtype=F64), beginning(1)
    for method in (*METHODS, "enumerate"):
        agrees(smooth(model, Series(y, inputs=u), start, method=method), smoothed_by_definition(model, y, start, u))
    chains = torch.stack([chain(2) for _ in range(steps)])
    model = system(2, 2, 1, lead=(steps,), transition=chains, B=torch.randn(2, 2, 3, dtype=F64))
    start = beginning(2)
    expected = smoothed_by_definition(model, y, start, u)
    agrees(smooth(model, Series(y, inputs=u), start, method="enumerate"), expected)
    # GPB2 approximates: over five steps the mean is off by 0.007 of its size, moments of a mode and of a pair by 0.26.
    found = smooth(model, Series(y, inputs=u), start, method="gpb2")
    agrees(found, {name: expected[name] for name in ("mean", "covariance")}, tolerance=0.05)
    agrees(found, expected, tolerance=0.3)


@each
@pytest.mark.parametrize("lag", [0, 1, 3, 9])
def test_a_lag_is_a_shorter_series(method, lag):
    """Time t with a lag is time t of the series that ends at t + lag."""
    model, start = system(2), beginning(2)
    y = observed(model, 6)
    y[3, 0] = torch.nan
    found = smooth(model, y, start, method=method, lag=lag)
    for t in range(6):
        alone = smooth(model, y[: t + 1 + lag], start, method=method)
        for name in Smoothed._fields[:9]:
            torch.testing.assert_close(getattr(found, name)[t], getattr(alone, name)[t], rtol=0, atol=1e-10)
    begun = smooth(model, y[: max(lag, 1)], start, method=method)
    if lag:
        for name in Smoothed._fields[9:12]:
            torch.testing.assert_close(getattr(found, name), getattr(begun, name), rtol=0, atol=1e-10)
    else:
        torch.testing.assert_close(found.initial_mode_mean, start.mean)
    same(found.filtered, smooth(model, y, start, method=method).filtered)


def test_a_lag_beside_enumeration():
    model, start = system(1, 2, 1), beginning(1)
    y = observed(model, 5)
    for lag in (0, 1, 2):
        agrees(smooth(model, y, start, lag=lag), smoothed_by_definition(model, y, start, lag=lag))


def test_the_last_time_of_gpb2_is_its_filter_and_that_of_imm_is_nearer_to_exact():
    n = 40
    model, start = several(n)
    y = 2 * torch.randn(n, 5, 1, dtype=F64)
    found = smooth(model, y, start, method="gpb2")
    torch.testing.assert_close(found.mean[:, -1], gpb2(model, y, start).mean[:, -1], rtol=0, atol=1e-10)
    true = enumerate_modes(model, y, start).filtered.mean[:, -1]
    forward = (imm(model, y, start).mean[:, -1] - true).norm(dim=-1).mean()
    back = (smooth(model, y, start, method="imm").mean[:, -1] - true).norm(dim=-1).mean()
    assert back < forward


def several(n, k=3):
    """Random models that switch fast, a target for each."""
    T = torch.rand(n, 1, k, k, dtype=F64) + 0.3
    model = SwitchingModel(
        T / T.sum(-1, keepdim=True),
        torch.randn(n, 1, k, 2, 2, dtype=F64),
        positive(n, 1, k, 2, scale=0.5),
        torch.randn(n, 1, k, 1, 2, dtype=F64),
        positive(n, 1, k, 1, scale=0.3),
        torch.randn(n, 1, k, 2, dtype=F64),
    )
    return model, Prior(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))


def test_they_come_nearer_to_exact_than_kim_and_than_any_filter():
    """30 random models of 3 modes as one batch, 5 steps; errors in deviations of the exact law."""
    n = 30
    model, start = several(n)
    y = 2 * torch.randn(n, 5, 1, dtype=F64)
    true = smooth(model, y, start, method="enumerate")
    deviation = true.covariance.diagonal(dim1=-2, dim2=-1).sqrt()

    def errors(found):
        state = ((found.mean - true.mean) / deviation).abs().mean()
        return float(state), float((found.log_mode_probability.exp() - true.log_mode_probability.exp()).abs().mean())

    found = {name: errors(smooth(model, y, start, method=name)) for name in METHODS}
    forward = errors(gpb2(model, y, start))
    for part in range(2):  # the state, the mode
        assert 2 * found["gpb2"][part] < found["kim"][part]
        assert found["gpb2"][part] < found["imm"][part] < found["kim"][part] < forward[part]


def test_singular_covariances_are_smoothed_like_others():
    """Accelerations that one mode holds at 0, states that are known, a step that moves nothing at random."""
    options = {"dt": 0.5, "observation_variance": 0.3, "dtype": F64}
    slow = constant_velocity(1, spectral_density=0.1, derivatives=3, **options)
    fast = constant_acceleration(1, spectral_density=1.0, **options)
    model = SwitchingModel.of([slow, fast], transition=torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=F64))
    P = torch.diag(torch.tensor([1.0, 0.5, 0.0], dtype=F64))
    start = Prior(torch.tensor([0.0, 1.0, 0.0], dtype=F64), P)
    y = torch.tensor([[0.4], [1.1], [2.3], [4.0]], dtype=F64)
    expected = smoothed_by_definition(model, y, start)
    agrees(smooth(model, y, start, method="enumerate"), expected)
    agrees(smooth(model, y, start, method="gpb2"), expected, tolerance=0.05)
    agrees(smooth(model, y[:1], start, method="imm"), smoothed_by_definition(model, y[:1], start))
    still = SwitchingModel.of([slow._replace(Q=0 * slow.Q)], transition=torch.ones(1, 1, dtype=F64))
    for method in METHODS:
        agrees(smooth(still, y, start, method=method), smoothed_by_definition(still, y, start))


def by_kim(model, y, start):
    """The published recursions, forward and back, as a textbook has them: numpy, one pair of modes at a time."""
    k, inverse, dot = model.modes, np.linalg.inv, np.einsum
    T, F, Q, H, R = (getattr(model, name).numpy() for name in ("transition", "F", "Q", "H", "R"))
    m, P = start.mean.expand(k, -1).numpy(), start.covariance.expand(k, -1, -1).numpy()
    p = np.full(k, 1 / k)
    known, steps = [(m, P, p)], []
    pairs = [(i, j) for i in range(k) for j in range(k)]
    for seen in y.numpy():
        predicted_m, predicted_P, means, covariances = {}, {}, {}, {}
        weight = np.zeros((k, k))
        for i, j in pairs:
            predicted_m[i, j], predicted_P[i, j] = F[j] @ m[i], F[j] @ P[i] @ F[j].T + Q[j]
            S = H[j] @ predicted_P[i, j] @ H[j].T + R[j]
            K, v = predicted_P[i, j] @ H[j].T @ inverse(S), seen - H[j] @ predicted_m[i, j]
            means[i, j], covariances[i, j] = predicted_m[i, j] + K @ v, predicted_P[i, j] - K @ S @ K.T
            weight[i, j] = p[i] * T[i, j] * np.exp(-v @ inverse(S) @ v / 2) / np.sqrt(np.linalg.det(2 * np.pi * S))
        weight /= weight.sum()
        laws = [[(means[i, j], covariances[i, j]) for i in range(k)] for j in range(k)]
        m, P = together(weight.T / weight.sum(0)[:, None], laws)
        steps.append((predicted_m, predicted_P, p[:, None] * T / (p @ T)))
        p = weight.sum(0)
        known.append((m, P, p))
    rows = [known[-1]]
    for (m, P, _), (predicted_m, predicted_P, past) in zip(known[-2::-1], steps[::-1], strict=True):
        later_m, later_P, later_p = rows[-1]
        both = later_p * past  # P(i, j | all) = P(j | all) P(i | j, past)
        laws = [[] for _ in range(k)]
        for i, j in pairs:
            J = P[i] @ F[j].T @ inverse(predicted_P[i, j])
            moved = m[i] + J @ (later_m[j] - predicted_m[i, j])
            laws[i].append((moved, P[i] + J @ (later_P[j] - predicted_P[i, j]) @ J.T))
        rows.append((*together(both / both.sum(1)[:, None], laws), both.sum(1)))
    m, P, p = (np.stack(part) for part in zip(*rows[::-1], strict=True))
    mean = dot("tj,tjs->ts", p, m)
    away = m - mean[:, None]
    return mean, dot("tj,tjsr->tsr", p, P) + dot("tj,tjs,tjr->tsr", p, away, away), m, P, p


def together(shares, laws):
    """Mean and covariance of each row of laws, by its shares."""
    rows = []
    for share, row in zip(shares, laws, strict=True):
        mean = sum(w * m for w, (m, _) in zip(share, row, strict=True))
        away = [np.outer(m - mean, m - mean) for m, _ in row]
        rows.append((mean, sum(w * (P + e) for w, (_, P), e in zip(share, row, away, strict=True))))
    return [np.stack(part) for part in zip(*rows, strict=True)]


@pytest.mark.parametrize(("k", "s", "o"), [(1, 2, 1), (2, 3, 1), (3, 2, 2)])
def test_kim_is_the_published_smoother(k, s, o):
    model, start = system(k, s, o, offsets=False), beginning(k, s)
    y = observed(model, 6)
    begins = Prior(start.mean, start.covariance)
    found = smooth(model, y, begins, method="kim")
    mean, covariance, means, covariances, p = by_kim(model, y, begins)
    close(found.mean, torch.as_tensor(mean[1:]), scale=10, tolerance=1e-11)
    close(found.covariance, torch.as_tensor(covariance[1:]), scale=10, tolerance=1e-11)
    close(found.mode_mean, torch.as_tensor(means[1:]), scale=10, tolerance=1e-11)
    close(found.mode_covariance, torch.as_tensor(covariances[1:]), scale=10, tolerance=1e-11)
    close(found.log_mode_probability.exp(), torch.as_tensor(p[1:]))
    close(found.initial_mode_mean, torch.as_tensor(means[0]), scale=10, tolerance=1e-11)
    close(found.initial_mode_covariance, torch.as_tensor(covariances[0]), scale=10, tolerance=1e-11)


@each
@pytest.mark.parametrize("lag", [None, 1])
def test_noise_along_one_oblique_direction_from_a_known_start(method, lag):
    """50 models as one batch. Covariances of rank one, two, ... are covariances, however precise observations are."""
    n, k, s = 50, 2, 3
    along = 100 * torch.randn(n, 1, k, s, 1, dtype=F64)
    model = SwitchingModel(
        torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64),
        F=torch.eye(s, dtype=F64) + 0.3 * torch.randn(n, 1, k, s, s, dtype=F64),
        Q=along @ along.mT,
        H=torch.randn(n, 1, k, 1, s, dtype=F64),
        R=torch.ones(k, 1, 1, dtype=F64),
    )
    start = Prior(torch.zeros(s, dtype=F64), torch.zeros(s, s, dtype=F64))
    found = smooth(model, torch.randn(n, 4, 1, dtype=F64), start, method=method, lag=lag)
    for P in (found.covariance, found.mode_covariance, found.previous_covariance):
        eigenvalues = torch.linalg.eigvalsh(P)
        assert float((eigenvalues[..., 0] / eigenvalues[..., -1].clamp(min=1e-300)).min()) > -1e-10
        assert bool(P.isfinite().all())
    one = SwitchingModel(torch.ones(1, 1, dtype=F64), *(getattr(model, f)[..., :1, :, :] for f in "FQHR"))
    y = torch.randn(n, 4, 1, dtype=F64)
    found = smooth(one, y, start, method=method)
    for i in range(5):
        alone = SwitchingModel(
            torch.ones(1, 1, dtype=F64), *(getattr(one, f).expand(n, 1, 1, -1, -1)[i, 0] for f in "FQHR")
        )
        true = smoothed_by_definition(alone, y[i], start)
        close(found.mean[i], true["mean"], scale=true["mean"].abs().max(), tolerance=1e-8)
        close(found.covariance[i], true["covariance"], scale=true["covariance"].abs().max(), tolerance=1e-8)


def test_pruned_histories_are_the_likeliest():
    model, start = system(2), beginning(2)
    y = observed(model, 6)
    whole = smooth(model, y, start, method="enumerate")
    errors = []
    for keep in (1, 8, 32, 128):
        found = smooth(model, y, start, method="enumerate", max_histories=keep)
        errors.append(float((found.mean - whole.mean).norm()))
    assert errors[3] < 1e-12
    assert errors[0] > errors[1] > errors[2] > errors[3]
