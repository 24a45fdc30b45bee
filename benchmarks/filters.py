"""Target-steps per second of switching filters, float64, state 4, observation 2, one thread, all in one run.

filterpy     its IMMEstimator, and a GPB2 built from its Kalman filters; scipy's logpdf takes about two thirds of its
             time, so that it is also measured with a few lines of numpy in place of logpdf
jax          a scan over time, vmapped over targets, written by hand with 2 x 2 inverses and without Joseph's form; it
             returns means and mode probabilities only, or all the fields of `Filtered`. If jax is not installed (extra
             [bench]) its columns are empty
torch        the differentiable path of gradlogz, step by step: eager, and with a compiled step
gradlogz     means and mode probabilities only, all fields of every step, and all fields of the last step only

Online steps: filters_online.py.

Seconds are processor time summed over threads, which depends little on other processes. Every alternative computes as
many steps as it can in a fraction of a second. The first estimates of all alternatives are compared before timing.
"""

import math
import os
import time
import warnings

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import filterpy.kalman.kalman_filter
import numpy as np
import torch
from filterpy.kalman import IMMEstimator, KalmanFilter

from gradlogz import Prior, SwitchingFilter, SwitchingModel
from gradlogz.filters import constant_velocity, coordinated_turn
from gradlogz.kernels.filters import dispatch
from timing import compare

try:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
except ImportError:
    jax = None

F64 = torch.float64
PROBLEMS = (("imm", 3, 1), ("imm", 3, 1000), ("gpb2", 3, 1000), ("imm", 8, 1000), ("gpb2", 8, 1000))
STEPS = {  # numbers of steps for gradlogz, jax, torch and filterpy
    ("imm", 3, 1): (20_000, 5000, 40, 60),
    ("imm", 3, 1000): (100, 100, 10, 60),
    ("gpb2", 3, 1000): (50, 50, 10, 20),
    ("imm", 8, 1000): (40, 40, 5, 20),
    ("gpb2", 8, 1000): (10, 10, 2, 4),
}
COMPILED = (("imm", 3, 1), ("imm", 3, 1000), ("gpb2", 3, 1000))
CHECKED = 20
MEANS = ("mean", "log_mode_probability")
MEAN, COVARIANCE = torch.zeros(4, dtype=F64), torch.eye(4, dtype=F64)
START = Prior(MEAN, COVARIANCE)


def assembled(k: int) -> SwitchingModel:
    """Return a model with one constant-velocity mode and coordinated turns of different rates."""
    noise = {"dt": 1.0, "spectral_density": 0.05, "observation_variance": 0.5, "dtype": F64}
    turns = [coordinated_turn(2, rate=0.1 * (i // 2 + 1) * (-1) ** i, **noise) for i in range(k - 1)]
    transition = torch.full((k, k), 0.1 / (k - 1), dtype=F64).fill_diagonal_(0.9)
    return SwitchingModel.of([constant_velocity(2, **noise), *turns], transition=transition)


def tracks(targets: int, steps: int) -> torch.Tensor:
    """Return noisy positions of moving targets, [targets, steps, 2]."""
    generator = torch.Generator().manual_seed(0)
    speed = torch.randn(targets, steps, 2, dtype=F64, generator=generator).cumsum(1) * 0.2
    return speed.cumsum(1) + torch.randn(targets, steps, 2, dtype=F64, generator=generator) * 0.7


# --------------------------------------------------------------------------------------------------------- filterpy
def kalman_of(model: SwitchingModel, j: int) -> KalmanFilter:
    kalman = KalmanFilter(dim_x=4, dim_z=2)
    kalman.x, kalman.P = MEAN.numpy().copy(), COVARIANCE.numpy().copy()
    kalman.F, kalman.Q, kalman.H, kalman.R = (getattr(model, n)[j].numpy() for n in "FQHR")
    return kalman


def filterpy_imm(model: SwitchingModel, y: np.ndarray) -> np.ndarray:
    k = model.modes
    other = IMMEstimator([kalman_of(model, j) for j in range(k)], np.full(k, 1 / k), model.transition.numpy())
    means = []
    for z in y:
        other.predict()
        other.update(z)
        means.append(other.x.copy())
    return np.stack(means)


def filterpy_gpb2(model: SwitchingModel, y: np.ndarray) -> np.ndarray:
    k, T = model.modes, model.transition.numpy()
    bank = [kalman_of(model, j) for j in range(k)]
    m, P, pi = np.stack([f.x for f in bank]), np.stack([f.P for f in bank]), np.full(k, 1 / k)
    means = []
    for z in y:
        log_likelihood, xs, Ps = np.empty((k, k)), np.empty((k, k, 4)), np.empty((k, k, 4, 4))
        for i in range(k):
            for j, kalman in enumerate(bank):
                kalman.x, kalman.P = m[i].copy(), P[i].copy()
                kalman.predict()
                kalman.update(z)
                log_likelihood[i, j], xs[i, j], Ps[i, j] = kalman.log_likelihood, kalman.x, kalman.P
        w = pi[:, None] * T * np.exp(log_likelihood - log_likelihood.max())
        pi = w.sum(0) / w.sum()
        share = w / w.sum(0)
        m = np.einsum("ij,ija->ja", share, xs)
        d = xs - m
        P = np.einsum("ij,ijab->jab", share, Ps) + np.einsum("ij,ija,ijb->jab", share, d, d)
        means.append(pi @ m)
    return np.stack(means)


def quick_logpdf(x: np.ndarray, mean: np.ndarray | None = None, cov: np.ndarray | None = None) -> float:
    """Compute the normal log density that filterpy takes from scipy, by an LU factorisation."""
    v = np.asarray(x).ravel() - (0.0 if mean is None else np.asarray(mean).ravel())
    return -0.5 * (v @ np.linalg.solve(cov, v) + np.linalg.slogdet(cov)[1] + len(v) * math.log(2 * math.pi))


def patched(call):
    def run():
        module = filterpy.kalman.kalman_filter
        original, module.logpdf = module.logpdf, quick_logpdf
        try:
            return call()
        finally:
            module.logpdf = original

    return run


# ------------------------------------------------------------------------------------------------------------- jax
def jax_filter(model: SwitchingModel, method: str, *, all_fields: bool = False):
    """Return a jax filter: mean and mode probabilities [b, t, 4] and [b, t, k], or all the fields of `Filtered`."""
    T, F, Q, H, R = (jnp.asarray(getattr(model, n).numpy()) for n in ("transition", "F", "Q", "H", "R"))
    k = model.modes

    def kalman(m, P, F, Q, H, R, y):
        m, P = F @ m, F @ P @ F.T + Q
        HP = H @ P
        S = HP @ H.T + R
        det = S[0, 0] * S[1, 1] - S[0, 1] * S[1, 0]
        inverse = jnp.array([[S[1, 1], -S[0, 1]], [-S[1, 0], S[0, 0]]]) / det
        v = y - H @ m
        K = HP.T @ inverse
        log_likelihood = -0.5 * (v @ inverse @ v + jnp.log(det)) - math.log(2 * math.pi)
        return m + K @ v, P - K @ HP, log_likelihood

    def collapse(share, m, P):
        mean = share @ m
        d = m - mean
        return mean, jnp.einsum("i,iab->ab", share, P) + jnp.einsum("i,ia,ib->ab", share, d, d)

    def rest(c, mixed_m, mixed_P, m, P, pi, log_likelihood, y):
        """Return predictions, innovations and covariances of every mode and of the mixture."""
        predicted_m, predicted_P = jnp.einsum("jab,jb->ja", F, mixed_m), F @ mixed_P @ F.mT + Q
        expected, S = jnp.einsum("joa,ja->jo", H, predicted_m), H @ predicted_P @ H.mT + R
        mixture_m, mixture_P = collapse(c, predicted_m, predicted_P)
        mixture_y, mixture_S = collapse(c, expected, S)
        of_modes = m, P, jnp.log(pi), predicted_m, predicted_P, jnp.log(c), y - expected, S, log_likelihood
        return collapse(pi, m, P)[1], *of_modes, mixture_m, mixture_P, y - mixture_y, mixture_S

    def imm(carry, y):
        m, P, pi = carry
        c = pi @ T
        mixed = jax.vmap(collapse, (1, None, None))(T * pi[:, None] / c, m, P)
        m, P, log_likelihood = jax.vmap(kalman, (0, 0, 0, 0, 0, 0, None))(*mixed, F, Q, H, R, y)
        pi = jax.nn.softmax(jnp.log(c) + log_likelihood)
        more = rest(c, *mixed, m, P, pi, log_likelihood, y) if all_fields else ()
        return (m, P, pi), (pi @ m, pi, *more)

    def gpb2(carry, y):
        m, P, pi = carry
        c = pi @ T
        mixed = jax.vmap(collapse, (1, None, None))(T * pi[:, None] / c, m, P)
        pair = jax.vmap(jax.vmap(kalman, (None, None, 0, 0, 0, 0, None)), (0, 0, None, None, None, None, None))
        m, P, log_likelihood = pair(m, P, F, Q, H, R, y)
        w = pi[:, None] * T * jnp.exp(log_likelihood - log_likelihood.max())
        pi = w.sum(0) / w.sum()
        m, P = jax.vmap(collapse, (1, 1, 1))(w / w.sum(0), m, P)
        of_modes = log_likelihood.max() + jnp.log(w.sum(0) / c)
        more = rest(c, *mixed, m, P, pi, of_modes, y) if all_fields else ()
        return (m, P, pi), (pi @ m, pi, *more)

    def series(y):
        start = jnp.zeros((k, 4)), jnp.broadcast_to(jnp.eye(4), (k, 4, 4)), jnp.full(k, 1 / k)
        return jax.lax.scan(imm if method == "imm" else gpb2, start, y)[1]

    return jax.jit(jax.vmap(series))


# ----------------------------------------------------------------------------------------------------------- torch
def by_torch(chosen: SwitchingFilter, y: torch.Tensor):
    """Return a call of the differentiable path."""

    def run():
        bound, dispatch.WORTH_FILTERING = dispatch.WORTH_FILTERING, math.inf
        try:
            return chosen.filter(y, START)
        finally:
            dispatch.WORTH_FILTERING = bound

    return run


def by_compiled_torch(chosen: SwitchingFilter, y: torch.Tensor):
    """Return a loop over the compiled step of the differentiable path; results are discarded."""
    step = torch.compile(lambda state, observation: chosen.step(state, observation))
    state = chosen.init(START, batch_shape=y.shape[:-2])

    def run():
        now = state
        for observation in y.unbind(-2):
            now, filtered = step(now, observation)
        return filtered

    return run


# ------------------------------------------------------------------------------------------------------------ table
def rows() -> list[dict[str, object]]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="filterpy")
    table: list[dict[str, object]] = []
    for problem in PROBLEMS:
        method, k, targets = problem
        ours, of_jax, of_torch, of_filterpy = STEPS[problem]
        model = assembled(k)
        chosen = SwitchingFilter(model, "imm" if method == "imm" else "gpb", 2)
        y = tracks(targets, max(ours, of_jax))
        single = y[0, :of_filterpy].numpy()
        alone = filterpy_imm if method == "imm" else filterpy_gpb2
        check = chosen.filter(y[:, :CHECKED], START).mean
        steps = dict.fromkeys(("gradlogz", "gradlogz, means", "gradlogz, last step"), ours * targets)
        steps["torch"] = of_torch * targets
        alternatives = {
            "gradlogz": lambda c=chosen, y=y[:, :ours].contiguous(): c.filter(y, START),
            "gradlogz, means": lambda c=chosen, y=y[:, :ours].contiguous(): c.filter(y, START, fields=MEANS),
            "gradlogz, last step": lambda c=chosen, y=y[:, :ours].contiguous(): c.filter(y, START, keep="last"),
            "torch": by_torch(chosen, y[:, :of_torch].contiguous()),
            "filterpy": lambda f=alone, m=model, z=single: f(m, z),
        }
        if problem in COMPILED:
            fields = {n: getattr(model, n) for n in ("transition", "F", "Q", "H", "R")}
            plain = chosen._replace(model=SwitchingModel(**fields, validate=False))
            alternatives["torch, compiled"] = by_compiled_torch(plain, y[:, :of_torch].contiguous())
            steps["torch, compiled"] = of_torch * targets
        alternatives["filterpy, quick logpdf"] = patched(alternatives["filterpy"])
        steps["filterpy"] = steps["filterpy, quick logpdf"] = len(single)
        np.testing.assert_allclose(alternatives["filterpy"]()[:CHECKED], check[0, : len(single)], atol=1e-8)
        np.testing.assert_allclose(alternatives["torch"]().mean[:, :CHECKED], check[:, :of_torch], atol=1e-10)
        if jax is not None:
            filtered, data = jax_filter(model, method), jnp.asarray(y[:, :of_jax].numpy())
            np.testing.assert_allclose(filtered(data)[0][:, :CHECKED], check[:, :of_jax], atol=1e-8)
            alternatives["jax, means"] = lambda f=filtered, d=data: jax.block_until_ready(f(d))
            complete = jax_filter(model, method, all_fields=True)
            alternatives["jax, all fields"] = lambda f=complete, d=data: jax.block_until_ready(f(d))
            steps["jax, means"] = steps["jax, all fields"] = of_jax * targets
        steps["A/A"] = steps["gradlogz"]
        seconds = compare(alternatives, rounds=7, clock=time.process_time)
        rates = {name: steps[name] / t for name, t in seconds.items()}
        rate = rates["gradlogz"]
        table.append(
            {
                "problem": f"{method}, {k} modes, {targets} target{'s' if targets > 1 else ''}",
                "rates": {name: round(r) for name, r in rates.items() if name != "A/A"},
                "ratios": {name: round(rate / r, 3) for name, r in rates.items() if name != "gradlogz"},
            }
        )
    return table
