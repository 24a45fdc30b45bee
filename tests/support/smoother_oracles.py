"""Posterior of every state given all observations, from one joint Gaussian per mode history, with numpy and scipy."""

import itertools
import math

import numpy as np
import scipy.special
import scipy.stats
import torch


def smoothed_by_definition(model, y, start, inputs=None, *, lag=None):
    """Compute all fields of a smoother's result from p(x_0 ... x_T, y_1 ... y_T | history), one Gaussian per history.

    States and observations are a linear map of independent variables (x_0, w_1 ... w_T, v_1 ... v_T); conditioning is
    the Schur complement. There is no recursion. With a lag, the state at time t is conditioned on y_1 ... y_{t + lag}.
    """
    k, s, steps = model.modes, model.state_size, y.shape[0]
    if lag is not None:
        ends = [min(t + lag, steps) for t in range(steps + 1)]
        tables = {end: _table(model, y[:end], start, inputs, steps) for end in set(ends)}
    else:
        ends = [steps] * (steps + 1)
        tables = {steps: _table(model, y, start, inputs, steps)}
    rows = []
    for t, end in enumerate(ends):
        histories, logs, means, covariances = tables[end]
        now = slice(t * s, t * s + s)
        current = np.array([h[t] for h in histories])
        row = dict(zip(("mean", "covariance"), _mixed(logs, means, covariances, now), strict=True))
        modes = [current == j for j in range(k)]
        row["log_mode_probability"] = np.array([_log_sum(logs[mode]) for mode in modes]) - _log_sum(logs)
        parts = [_mixed(logs[mode], means[mode], covariances[mode], now) for mode in modes]
        row["mode_mean"], row["mode_covariance"] = (np.stack(p) for p in zip(*parts, strict=True))
        if t:
            before = np.array([h[t - 1] for h in histories])
            row["log_pair_probability"] = np.array(
                [[_log_sum(logs[(before == i) & (current == j)]) for j in range(k)] for i in range(k)]
            ) - _log_sum(logs)
            both = slice(t * s - s, t * s + s)
            parts = [_mixed(logs[mode], means[mode], covariances[mode], both) for mode in modes]
            row["previous_mean"] = np.stack([m[:s] for m, _ in parts])
            row["previous_covariance"] = np.stack([P[:s, :s] for _, P in parts])
            row["lag_covariance"] = np.stack([P[s:, :s] for _, P in parts])
        rows.append(row)
    fields = {name: torch.as_tensor(np.stack([row[name] for row in rows[1:]])) for name in rows[1]}
    for name in ("mode_mean", "mode_covariance", "log_mode_probability"):
        fields[f"initial_{name}"] = torch.as_tensor(rows[0][name])
    fields["log_likelihood"] = torch.as_tensor(_log_sum(tables[steps][1]))
    return fields


def _table(model, y, start, inputs, steps):
    """Return every history s_0 ... s_steps with its log weight and the posterior of all states given y."""
    k, s, o = model.modes, model.state_size, model.observation_size
    y, u = y.numpy(), None if inputs is None else inputs.numpy()
    mean, covariance = start.mean.expand(k, s).numpy(), start.covariance.expand(k, s, s).numpy()
    log_pi = start.log_mode_probability
    log_pi = np.full(k, -math.log(k)) if log_pi is None else log_pi.numpy()

    def at(name, t, j):
        field = getattr(model, name)
        if field is None:
            return None
        ending = 2 if name in ("transition", "b", "d") else 3
        return (field if field.ndim == ending else field[t]).numpy()[j]

    histories, logs, means, covariances = list(itertools.product(range(k), repeat=steps + 1)), [], [], []
    for history in histories:
        i = history[0]
        size = s + steps * (s + o)
        noise = np.zeros((size, size))
        noise[:s, :s] = covariance[i]
        A, a, log_prior = np.eye(s, size), mean[i], log_pi[i]
        states, offsets, observed, seen_offsets = [A], [a], [], []
        for n, j in enumerate(history[1:]):
            with np.errstate(divide="ignore"):
                log_prior = log_prior + np.log(at("transition", n, history[n])[j])
            w = slice(s + n * s, 2 * s + n * s)
            v = slice(s + steps * s + n * o, s + steps * s + n * o + o)
            noise[w, w], noise[v, v] = at("Q", n, j), at("R", n, j)
            F, H, b, d, B, D = (at(name, n, j) for name in ("F", "H", "b", "d", "B", "D"))
            A, a = F @ A, F @ a + (0 if b is None else b) + (0 if B is None else B @ u[n])
            A[:, w] += np.eye(s)
            C = H @ A
            C[:, v] += np.eye(o)
            states.append(A)
            offsets.append(a)
            observed.append(C)
            seen_offsets.append(H @ a + (0 if d is None else d) + (0 if D is None else D @ u[n]))
        X, x, C, c = (np.concatenate(parts) for parts in (states, offsets, observed, seen_offsets))
        flat = np.full(steps * o, np.nan)
        flat[: y.size] = y.reshape(-1)
        there = ~np.isnan(flat)
        C, r = C[there], (flat - c)[there]
        P = X @ noise @ X.T
        if there.any():
            S = C @ noise @ C.T
            K = np.linalg.solve(S, C @ noise @ X.T).T
            log_prior = log_prior + scipy.stats.multivariate_normal.logpdf(r, None, S)
            x, P = x + K @ r, P - K @ S @ K.T
        logs.append(log_prior)
        means.append(x)
        covariances.append(P)
    return histories, np.array(logs), np.array(means), np.array(covariances)


def _log_sum(logs):
    return scipy.special.logsumexp(logs) if len(logs) and not np.isneginf(logs).all() else -np.inf


def _mixed(logs, means, covariances, part):
    """Return mean and covariance of some of the states under a mixture; NaN if it is empty."""
    if np.isneginf(logs).all():
        size = part.stop - part.start
        return np.full(size, np.nan), np.full((size, size), np.nan)
    w, means = scipy.special.softmax(logs), means[:, part]
    m = w @ means
    away = means - m
    return m, np.einsum("n,nab->ab", w, covariances[:, part, part]) + (w[:, None] * away).T @ away


def drawn(model, start, steps, count, seed=0):
    """Draw states [count, steps, s], modes and observations of a model; square roots of covariances by eigenvectors."""
    k, s = model.modes, model.state_size
    g = torch.Generator().manual_seed(seed)

    def noise(covariance):
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        return (root @ torch.randn(*root.shape[:-1], 1, dtype=root.dtype, generator=g)).squeeze(-1)

    j = torch.randint(k, (count,), generator=g)
    x = start.mean.expand(k, s)[j] + noise(start.covariance.expand(k, s, s)[j])
    states, modes, observations = [], [], []
    for _ in range(steps):
        j = torch.multinomial(model.transition[j], 1, generator=g).squeeze(-1)
        x = (model.F[j] @ x.unsqueeze(-1)).squeeze(-1) + noise(model.Q[j])
        x = x if model.b is None else x + model.b[j]
        y = (model.H[j] @ x.unsqueeze(-1)).squeeze(-1) + noise(model.R[j])
        states.append(x)
        modes.append(j)
        observations.append(y if model.d is None else y + model.d[j])
    return torch.stack(states, 1), torch.stack(modes, 1), torch.stack(observations, 1)


def near(actual, expected, *, but=()):
    """Return the largest difference of each field relative to its size; entries that are not finite are skipped."""
    errors = {}
    for name, e in expected.items():
        if name not in but:
            a = getattr(actual, name)
            assert a.shape == e.shape, f"{name}: {tuple(a.shape)} and {tuple(e.shape)}"
            asked = e.isfinite()
            assert torch.equal(a[e == -torch.inf], e[e == -torch.inf]), name
            size = 1 + float(e[asked].abs().max())
            errors[name] = float((a - e)[asked].abs().max()) / size
    return errors
