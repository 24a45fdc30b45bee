"""Milliseconds of smoothers, EM and maximum likelihood, float64, state 4, observation 2, one thread, all in one run.

filterpy      one mode, one series: its Kalman filter and its Rauch-Tung-Striebel smoother
dynamax       20 rounds of EM with one mode, jitted as a whole; compiling is not timed, but reported
statsmodels   maximum likelihood of the scales of Q and R by its MLEModel, with its default optimiser
gradlogz      `smooth` with all fields, and with means, covariances and mode probabilities only; `fit`

The filters `imm` and `gpb2` with all fields are given for comparison. If dynamax or statsmodels is not installed, its
columns are missing, and `missing` lists it. Milliseconds are processor time, medians of alternating rounds. Estimates
are compared before timing.
"""

import os
import time
import warnings
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import numpy as np
import torch

from filters import F64, START, assembled, kalman_of, tracks
from gradlogz import SwitchingModel, fit, gpb2, imm, smooth
from gradlogz.filters import Clutter
from timing import compare

try:
    import jax
    import jax.numpy as jnp
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    jax.config.update("jax_enable_x64", True)
except ImportError:
    jax = None
try:
    from statsmodels.tsa.statespace.mlemodel import MLEModel
except ImportError:
    MLEModel = object
ROUNDS = 20
ESTIMATES = ("mean", "covariance", "log_mode_probability")
SCALES = {"learn": ["Q", "R"], "structure": {"Q": "scale", "R": "scale"}}


def one_mode() -> SwitchingModel:
    """Return the constant-velocity mode alone."""
    model = assembled(3)
    return SwitchingModel(torch.ones(1, 1, dtype=F64), *(getattr(model, name)[:1] for name in "FQHR"))


def rows() -> list[dict[str, object]]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="filterpy|statsmodels|jax|dynamax")
    return [one_series(), many_series(), em(), maximum_likelihood(200), maximum_likelihood(1000), robust()]


def row(problem: str, alternatives: dict[str, object], missing: tuple[str, ...] = (), **facts: object):
    """Return milliseconds and their ratios to those of the first alternative."""
    seconds = compare(alternatives, rounds=9, clock=time.process_time)
    first = seconds[next(iter(alternatives))]
    return {
        "problem": problem,
        "milliseconds": {name: round(1e3 * t, 2) for name, t in seconds.items() if name != "A/A"},
        "ratios": {name: round(t / first, 3) for name, t in seconds.items() if t is not first},
        "missing": list(missing),
        **facts,
    }


def one_series() -> dict[str, object]:
    model, y = one_mode(), tracks(1, 1000)[0]

    def filterpy():
        kalman = kalman_of(model, 0)
        m, P, _, _ = kalman.batch_filter(list(y.numpy()))
        return kalman.rts_smoother(m, P)[:2]

    m, P = filterpy()
    smoothed = smooth(model, y, START)
    np.testing.assert_allclose(smoothed.mean, m, rtol=0, atol=1e-9)
    np.testing.assert_allclose(smoothed.covariance, P, rtol=0, atol=1e-9)
    alternatives = {
        "gradlogz": lambda: smooth(model, y, START),
        "gradlogz, estimates": lambda: smooth(model, y, START, fields=ESTIMATES),
        "filter imm": lambda: imm(model, y, START),
        "filterpy": filterpy,
    }
    return row("smoothing, 1 mode, 1 series of 1000", alternatives)


def many_series() -> dict[str, object]:
    model, y = assembled(3), tracks(1000, 100)
    alternatives = {}
    for method in ("imm", "gpb2"):
        alternatives[f"gradlogz, {method}"] = partial(smooth, model, y, START, method=method)
        few = partial(smooth, model, y, START, method=method, fields=ESTIMATES)
        alternatives[f"gradlogz, {method}, estimates"] = few
    alternatives["filter imm"] = partial(imm, model, y, START)
    alternatives["filter gpb2"] = partial(gpb2, model, y, START)
    return row("smoothing, 3 modes, 1000 series of 100", alternatives)


def em() -> dict[str, object]:
    """20 rounds that learn all matrices; dynamax has its prior at the first observation, one motion later."""
    model, y = one_mode(), tracks(1, 1000)
    learn = {"learn": ["F", "Q", "H", "R"], "method": "em", "max_iterations": ROUNDS, "tolerance": 0.0}
    alternatives = {"gradlogz": partial(fit, model, y, START, **learn)}
    if jax is None:
        return row("EM, 20 rounds, 1 mode, 1 series of 1000", alternatives, ("dynamax",))
    F, Q, H, R = (jnp.asarray(getattr(model, name)[0].numpy()) for name in "FQHR")
    other = LinearGaussianSSM(4, 2, has_dynamics_bias=False, has_emissions_bias=False)
    moved = F @ F.T + Q
    values, properties = other.initialize(
        jax.random.PRNGKey(0),
        initial_mean=jnp.zeros(4),
        initial_covariance=moved,
        dynamics_weights=F,
        dynamics_covariance=Q,
        emission_weights=H,
        emission_covariance=R,
    )
    data = jnp.asarray(y.numpy())
    run = jax.jit(lambda start: other.fit_em(start, properties, data, num_iters=ROUNDS, verbose=False))
    begin = time.process_time()
    log_likelihood = jax.block_until_ready(run(values))[1]
    compiling = time.process_time() - begin
    np.testing.assert_allclose(fit(model, y, START, **learn).history[0], log_likelihood[0], rtol=1e-9)
    alternatives["dynamax"] = lambda: jax.block_until_ready(run(values))
    facts = {"dynamax, first call": round(compiling, 2)}
    return row("EM, 20 rounds, 1 mode, 1 series of 1000", alternatives, seconds=facts)


def robust() -> dict[str, object]:
    """Estimation of two scales with outliers, by both methods, beside that without."""
    model, y, clutter = one_mode(), tracks(1, 1000), Clutter(0.01, 1e4 * torch.eye(2))
    rounds = {"method": "em", "max_iterations": ROUNDS, "tolerance": 0.0}
    alternatives = {
        "gradlogz, with outliers": partial(fit, model, y, START, **SCALES, clutter=clutter),
        "gradlogz": partial(fit, model, y, START, **SCALES),
        "gradlogz, with outliers, EM, 20 rounds": partial(fit, model, y, START, **SCALES, **rounds, clutter=clutter),
        "gradlogz, EM, 20 rounds": partial(fit, model, y, START, **SCALES, **rounds),
    }
    return row("two scales with outliers, 1 mode, 1 series of 1000", alternatives)


class Scales(MLEModel):
    """Constant velocity with factors of Q and R, as a model of statsmodels; its prior is one motion later."""

    def __init__(self, model: SwitchingModel, y: np.ndarray):
        super().__init__(y, k_states=4, k_posdef=4)
        self.Q, self.R, F = model.Q[0].numpy(), model.R[0].numpy(), model.F[0].numpy()
        self["transition"], self["design"], self["selection"] = F, model.H[0].numpy(), np.eye(4)
        self.moved = F @ F.T

    start_params = (0.0, 0.0)
    param_names = ("log q", "log r")

    def update(self, params, **options):
        q, r = np.exp(super().update(params, **options))
        self["state_cov"], self["obs_cov"] = q * self.Q, r * self.R
        self.initialize_known(np.zeros(4), self.moved + q * self.Q)


def maximum_likelihood(steps: int) -> dict[str, object]:
    model, y = one_mode(), tracks(1, steps)
    alternatives = {"gradlogz": partial(fit, model, y, START, **SCALES)}
    problem = f"maximum likelihood of two scales, 1 mode, 1 series of {steps}"
    if MLEModel is object:
        return row(problem, alternatives, ("statsmodels",))

    def statsmodels():
        return Scales(model, y[0].numpy()).fit(disp=0, cov_type="none")

    fitted = fit(model, y, START, **SCALES)
    assert fitted.converged
    np.testing.assert_allclose(float(fitted.log_likelihood), statsmodels().llf, rtol=0, atol=1e-3)
    alternatives["statsmodels"] = statsmodels
    return row(problem, alternatives)
