"""Random switching systems, and their posteriors from the joint Gaussian of every mode history (numpy, scipy)."""

import itertools
import math

import numpy as np
import scipy.special
import scipy.stats
import torch

from gradlogz import Prior, SwitchingModel
from gradlogz.filters import Filtered

F64 = torch.float64


def positive(*shape, scale=1.0):
    """Return random covariances."""
    A = torch.randn(*shape, shape[-1], dtype=F64)
    return scale * (A @ A.mT / shape[-1] + 0.2 * torch.eye(shape[-1], dtype=F64))


def chain(k):
    """Return a random transition matrix, neither symmetric nor doubly stochastic."""
    T = torch.rand(k, k, dtype=F64) ** 3 + 0.02
    return T / T.sum(-1, keepdim=True)


def system(k=3, s=2, o=2, *, lead=(), transition=None, offsets=True, **more):
    """Return a random switching model, each field with the requested leading dimensions."""
    return SwitchingModel(
        transition=chain(k) if transition is None else transition,
        F=0.7 * torch.randn(*lead, k, s, s, dtype=F64),
        Q=positive(*lead, k, s),
        H=torch.randn(*lead, k, o, s, dtype=F64),
        R=positive(*lead, k, o, scale=0.5),
        b=torch.randn(*lead, k, s, dtype=F64) if offsets else None,
        d=torch.randn(*lead, k, o, dtype=F64) if offsets else None,
        **more,
    )


def beginning(k=3, s=2, *, shared=False):
    """Return a random prior: one Gaussian per mode, or one for all modes."""
    lead = () if shared else (k,)
    mean, covariance = torch.randn(*lead, s, dtype=F64), positive(*lead, s)
    return Prior(mean, covariance, torch.randn(k, dtype=F64).log_softmax(-1), per=None if shared else "mode")


def observed(model, steps, *batch):
    """Return random observations of about the scale of the model."""
    return 3 * torch.randn(*batch, steps, model.observation_size, dtype=F64)


def by_definition(model, y, start, inputs=None):
    """Compute all fields of a filter's result from p(x_t, y_1 ... y_t | history), one Gaussian per mode history.

    State and observations are a linear map of independent variables (x_0, w_1 ... w_t, v_1 ... v_t).
    There is no recursion and no Kalman gain: conditioning is the Schur complement of the joint covariance.
    """
    k, s, o, steps = model.modes, model.state_size, model.observation_size, y.shape[0]
    y = y.numpy()
    u = None if inputs is None else inputs.numpy()
    mean, covariance = start.mean.expand(k, s).numpy(), start.covariance.expand(k, s, s).numpy()
    log_pi = start.log_mode_probability
    log_pi = np.full(k, -math.log(k)) if log_pi is None else log_pi.numpy()

    def at(name, t, j):
        field = getattr(model, name)
        if field is None:
            return None
        ending = 2 if name in ("transition", "b", "d") else 3
        return (field if field.ndim == ending else field[t]).numpy()[j]

    rows = {name: [] for name in Filtered._fields}
    for t in range(1, steps + 1):
        before, after = (
            [],
            [],
        )  # (mode, log weight, mean, covariance, expected observation, its covariance) of histories
        for history in itertools.product(range(k), repeat=t + 1):
            i = history[0]
            size = s + t * s + t * o
            noise = np.zeros((size, size))
            noise[:s, :s] = covariance[i]
            A, a = np.eye(s, size), mean[i]
            seen_rows, seen_offsets, log_prior = [], [], log_pi[i]
            for n, j in enumerate(history[1:]):
                with np.errstate(divide="ignore"):
                    log_prior = log_prior + np.log(at("transition", n, history[n])[j])
                w, v = slice(s + n * s, 2 * s + n * s), slice(s + t * s + n * o, s + t * s + n * o + o)
                noise[w, w], noise[v, v] = at("Q", n, j), at("R", n, j)
                F, H, b, d = (at(name, n, j) for name in ("F", "H", "b", "d"))
                A, a = F @ A, F @ a
                A[:, w] += np.eye(s)
                a = a + (0 if b is None else b)
                offset = 0 if d is None else d
                if u is not None:
                    B, D = at("B", n, j), at("D", n, j)
                    a = a + (0 if B is None else B @ u[n])
                    offset = offset + (0 if D is None else D @ u[n])
                C = H @ A
                C[:, v] += np.eye(o)
                seen_rows.append(C)
                seen_offsets.append(H @ a + offset)
            C, c = np.concatenate(seen_rows), np.concatenate(seen_offsets)
            flat = y[:t].reshape(-1)
            last = np.arange(t * o) >= (t - 1) * o
            there = ~np.isnan(flat)
            for table, known in ((before, there & ~last), (after, there)):
                M, r = C[known], flat[known] - c[known]
                S = M @ noise @ M.T
                K = A @ noise @ M.T @ np.linalg.inv(S) if known.any() else np.zeros((s, 0))
                weight = log_prior
                if known.any():
                    weight = weight + scipy.stats.multivariate_normal.logpdf(flat[known], c[known], S)
                G = C[last] @ noise @ M.T @ np.linalg.inv(S) if known.any() else np.zeros((o, 0))
                expected = c[last] + G @ r
                spread = C[last] @ noise @ C[last].T - G @ M @ noise @ C[last].T
                table.append((history[-1], weight, a + K @ r, A @ noise @ A.T - K @ M @ noise @ A.T, expected, spread))
        total_before = scipy.special.logsumexp([row[1] for row in before])
        total_after = scipy.special.logsumexp([row[1] for row in after])
        b_mean, b_cov, b_mode_mean, b_mode_cov, b_log = _moments(before, k, 2, 3)
        a_mean, a_cov, a_mode_mean, a_mode_cov, a_log = _moments(after, k, 2, 3)
        e_mean, e_cov, e_mode_mean, e_mode_cov, _ = _moments(before, k, 4, 5)
        joint = np.array([scipy.special.logsumexp([r[1] for r in after if r[0] == j]) for j in range(k)])
        prior = np.array([scipy.special.logsumexp([r[1] for r in before if r[0] == j]) for j in range(k)])
        values = {
            "mean": a_mean,
            "covariance": a_cov,
            "mode_mean": a_mode_mean,
            "mode_covariance": a_mode_cov,
            "log_mode_probability": a_log,
            "predicted_mean": b_mean,
            "predicted_covariance": b_cov,
            "predicted_mode_mean": b_mode_mean,
            "predicted_mode_covariance": b_mode_cov,
            "predicted_log_mode_probability": b_log,
            "innovation": y[t - 1] - e_mean,
            "innovation_covariance": e_cov,
            "mode_innovation": y[t - 1] - e_mode_mean,
            "mode_innovation_covariance": e_mode_cov,
            "mode_log_likelihood": joint - prior,
            "step_log_likelihood": total_after - total_before,
            "log_likelihood": total_after,
        }
        for name, value in values.items():
            rows[name].append(torch.as_tensor(np.asarray(value)))
    stacked = {name: torch.stack(parts) for name, parts in rows.items()}
    return Filtered(**{**stacked, "log_likelihood": stacked["log_likelihood"][-1]})


def _moments(table, k, mean, covariance):
    """Return mean and covariance of a mixture, and those of each mode."""
    logs = np.array([row[1] for row in table])
    log_modes = np.array([scipy.special.logsumexp([r[1] for r in table if r[0] == j]) for j in range(k)])
    parts = [_mixed([r for r in table if r[0] == j], mean, covariance) for j in range(k)]
    mixture = _mixed(table, mean, covariance)
    log_modes = log_modes - scipy.special.logsumexp(logs)
    return *mixture, np.stack([p[0] for p in parts]), np.stack([p[1] for p in parts]), log_modes


def _mixed(table, mean, covariance):
    logs = np.array([row[1] for row in table])
    if np.isneginf(logs).all():  # an impossible mode has no defined moments
        return np.full_like(table[0][mean], np.nan), np.full_like(table[0][covariance], np.nan)
    w = scipy.special.softmax(logs)
    m = sum(a * row[mean] for a, row in zip(w, table, strict=True))
    away = [row[mean] - m for row in table]
    P = sum(a * (r[covariance] + np.outer(e, e)) for a, r, e in zip(w, table, away, strict=True))
    return m, P


def same(actual, expected, scale=1.0, *, tolerance=None):
    """Assert that all fields of two results agree (NaN equals NaN), relative to the scale of each field."""
    for name, a, e in zip(Filtered._fields, actual, expected, strict=True):
        assert a.shape == e.shape, f"{name}: {tuple(a.shape)} and {tuple(e.shape)}"
        size = scale * (1 + float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 1.0)
        torch.testing.assert_close(
            a, e, rtol=0, atol=(tolerance or 1e-12) * size, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
