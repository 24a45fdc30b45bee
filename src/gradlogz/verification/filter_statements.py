"""Switching filters, compared with sums over a grid of states.   [note 2, Eq. 4-8; theory 7.1-7.4; E42-E47]

    P(A' = j | A = i) = T_ij,   X' = F_j X + b_j + N(0, Q_j),   O = H_j X' + d_j + N(0, R_j)

The right-hand sides have no Kalman gain. States are numbers on a grid, and the distribution of mode and state is a
table p[i, x] of masses, moved by the transition and multiplied by the likelihood of the observation. Moment matching
replaces a row of the table by the Gaussian with the mean and variance of the row.

Read next: ../filters/gaussian/switching.py (the filters), conjugate_statements.py (other families).
"""

import itertools
from typing import NamedTuple

import torch

from .._typing import Float, Tensor
from ..filters.gaussian import enumeration, smoother, switching
from ..filters.models.switching_model import KalmanModel, SwitchingModel
from ..filters.prior_and_series import Prior
from ..filters.results import Filtered
from .definition import FLOAT, line, normal, number, power, spread, uniform
from .statement import Outcome, gap, statement

GRID, LOG_STEP = line(-11.0, 11.0, 151)
STEP = LOG_STEP.exp()


class _Message(NamedTuple):
    """Probability, mean and variance of the state in each mode: the message of Eq. 6."""

    probability: Float[Tensor, "k"]
    mean: Float[Tensor, "k"]
    variance: Float[Tensor, "k"]


class _System(NamedTuple):
    """A switching system with a state and an observation of one dimension."""

    T: Float[Tensor, "k k"]
    F: Float[Tensor, "k"]
    Q: Float[Tensor, "k"]
    H: Float[Tensor, "k"]
    R: Float[Tensor, "k"]
    b: Float[Tensor, "k"]
    d: Float[Tensor, "k"]

    def model(self) -> SwitchingModel:
        """Model of the library with these parameters."""
        F, Q, H, R = (field.reshape(2, 1, 1) for field in (self.F, self.Q, self.H, self.R))
        return SwitchingModel(self.T, F, Q, H, R, b=self.b.reshape(2, 1), d=self.d.reshape(2, 1))

    def joint(self, p: Float[Tensor, "i x"], y: Tensor | None) -> Float[Tensor, "i j x"]:
        """Masses of (A, A', X'), multiplied by the density of the observation y if there is one."""
        moved = self.F.reshape(-1, 1, 1) * GRID.unsqueeze(-1) + self.b.reshape(-1, 1, 1)
        kernel = _density(GRID, moved, self.Q.reshape(-1, 1, 1)) * STEP  # [j, x, x']
        after = self.T.unsqueeze(-1) * torch.einsum("ix,jxz->ijz", p, kernel)
        if y is None:
            return after
        expected = self.H.unsqueeze(-1) * GRID + self.d.unsqueeze(-1)
        return after * _density(y, expected, self.R.unsqueeze(-1))


def _density(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return (-((x - mean) ** 2) / (2 * variance)).exp() / (2 * torch.pi * variance).sqrt()


def _table(message: _Message) -> Float[Tensor, "k x"]:
    """Masses p[i, x] of a message on the grid."""
    density = _density(GRID, message.mean.unsqueeze(-1), message.variance.unsqueeze(-1))
    return message.probability.unsqueeze(-1) * density * STEP


def _moments(p: Float[Tensor, "*b x"]) -> _Message:
    """Probability, mean and variance of each row of a table, as shares of its total."""
    mass = p.sum(-1)
    mean = (p * GRID).sum(-1) / mass
    variance = (p * (GRID - mean.unsqueeze(-1)) ** 2).sum(-1) / mass
    return _Message(mass / mass.sum(), mean, variance)


def _setting(seed: int = 1) -> tuple[_System, _Message, Tensor]:
    """A system with two modes, one Gaussian for each of them, and three observations."""
    T = torch.softmax(normal(2, 2, seed=seed), -1)
    bounds = ((0.4, 0.9), (0.2, 0.5), (0.7, 1.3), (0.3, 0.6), (-0.5, 0.5), (-0.5, 0.5))
    fields = (uniform(low, high, 2, seed=seed + i) for i, (low, high) in enumerate(bounds, 1))
    pi = torch.softmax(normal(2, seed=seed + 7), 0)
    message = _Message(pi, uniform(-1.5, 1.5, 2, seed=seed + 8), uniform(0.3, 0.8, 2, seed=seed + 9))
    return _System(T, *fields), message, uniform(-1.5, 1.5, 3, seed=seed + 10)


def _prior(message: _Message, *, traced: bool = False) -> Prior:
    """The message as a prior; `traced` for gradients, which keeps the filters from compiling a kernel."""
    mean = message.mean.reshape(2, 1).clone().requires_grad_(traced)
    return Prior(mean, message.variance.reshape(2, 1, 1), message.probability.log())


def _by_mode(filtered: Filtered, t: int) -> _Message:
    """Filtered modes and the moments of the state in each of them, at step t."""
    at_t = filtered.log_mode_probability[t].exp(), filtered.mode_mean[t, :, 0], filtered.mode_covariance[t, :, 0, 0]
    return _Message(*at_t)


def _difference(actual: _Message, expected: _Message) -> float:
    return max(gap(a, e, 10.0) for a, e in zip(actual, expected, strict=True))


def _report(filtered: Filtered, t: int, joint: Float[Tensor, "i j x"]) -> float:
    """Residual of every filtered quantity at step t against a table of (A, A', X')."""
    total = _moments(joint.sum((0, 1)))
    return max(
        _difference(_by_mode(filtered, t), _moments(joint.sum(0))),
        gap(filtered.mean[t, 0], total.mean, 10.0),
        gap(filtered.covariance[t, 0, 0], total.variance, 10.0),
        gap(filtered.step_log_likelihood[t], joint.sum().log(), 10.0),
    )


# Note 2, Eq. 4-8 ----------------------------------------------------------------------------------------------------


@statement(
    "N2 Eq. 4",
    "note 2 3",
    corrected="σ'(A',X') = P(A',X'|O) ∝ P(O|X',A') Σ_A ∫ P(X'|X,A') P(A'|A) σ(A,X) dX: all mode histories",
)
def exact_recursion() -> Outcome:
    system, message, y = _setting()
    filtered = enumeration.enumerate_modes(system.model(), y.unsqueeze(-1), _prior(message)).filtered
    p, worst = _table(message), 0.0
    for t in range(3):
        joint = system.joint(p / p.sum(), y[t])
        worst, p = max(worst, _report(filtered, t, joint)), joint.sum(0)
    return Outcome(worst)


@statement(
    "E42",
    "note 2 3",
    printed="conditions on A^(t-k:t+1): M^(k+2) histories",
    corrected="modes t-k+2 ... t+1: M^k Gaussians before the collapse, M^(k-1) after it",
)
def depth_of_the_collapse() -> Outcome:
    system, message, y = _setting()
    worst, start = 0.0, _prior(message, traced=True)
    for depth in (2, 3):
        table: dict[tuple[int, ...], Tensor] = {(i,): row for i, row in enumerate(_table(message))}  # by last modes
        online = switching.SwitchingFilter(system.model(), "gpb", depth)
        state = online.init(start)
        for t in range(3):
            longer: dict[tuple[int, ...], Tensor] = {}
            for history, j in itertools.product(table, range(2)):
                recent = (*history, j)[-(depth - 1) :]
                row = torch.zeros(2, len(GRID), dtype=FLOAT)
                row[history[-1]] = table[history]
                longer[recent] = longer.get(recent, 0.0) + system.joint(row, y[t])[history[-1], j]
            matched = _table(_moments(torch.stack(list(longer.values()))))
            table = dict(zip(longer, matched, strict=True))
            state, now = online.step(state, y[t : t + 1])
            by_mode = [torch.stack([row for h, row in table.items() if h[-1] == j]).sum(0) for j in range(2)]
            actual = now.log_mode_probability.exp(), now.mode_mean[:, 0], now.mode_covariance[:, 0, 0]
            worst = max(worst, _difference(_Message(*actual), _moments(torch.stack(by_mode))))
        components = state.mean.shape[-2]
        worst = max(worst, float(components != 2 ** (depth - 1)))
    return Outcome(worst, 2 ** (depth + 2) / (2 * components) - 1)  # two new modes for each component


@statement(
    "N2 Eq. 5", "note 2 3", corrected="lines 1, 2: P(A,A') = P(A'|A) σ(A), and σ(X|A) is one Gaussian for each mode"
)
def pairs_of_modes() -> Outcome:
    system, message, _ = _setting()
    nothing = torch.full((1, 1), torch.nan, dtype=FLOAT)
    smoothed = smoother.smooth(system.model(), nothing, _prior(message))
    pairs = message.probability.unsqueeze(-1) * system.T
    initial = smoothed.initial_log_mode_probability.exp(), smoothed.initial_mode_mean[:, 0]
    first = _Message(*initial, smoothed.initial_mode_covariance[:, 0, 0])
    return Outcome(max(gap(smoothed.log_pair_probability[0].exp(), pairs), _difference(first, message)))


@statement(
    "N2 Eq. 5, E43",
    "note 2 3",
    printed="σ(A') = ∫ P(A'|A) σ(A) dA",
    corrected="a sum with the likelihood: π'_j = Σ_i w_ij, w_ij ∝ π_i T_ij L_ij",
)
def modes_are_weighed_by_the_likelihood() -> Outcome:
    system, message, y = _setting()
    filtered = switching.gpb2(system.model(), y[:1].unsqueeze(-1), _prior(message))
    weights = system.joint(_table(message), y[0]).sum(-1)
    modes, predicted = filtered.log_mode_probability[0].exp(), message.probability @ system.T
    corrected = max(
        gap(modes, weights.sum(0) / weights.sum()),
        gap(filtered.predicted_log_mode_probability[0].exp(), predicted),
        gap(filtered.mode_log_likelihood[0], (weights.sum(0) / predicted).log(), 10.0),
    )
    return Outcome(corrected, gap(predicted, weights.sum(0) / weights.sum()))


@statement(
    "N2 Eq. 5, E44",
    "note 2 3",
    printed="P(X,X'|A,A') = P(X'|A') σ(X|A)",
    corrected="P(X,X'|A,A') = P(X'|X,A') σ(X|A): the dynamics condition on the state",
)
def dynamics_condition_on_the_state() -> Outcome:
    system, message, y = _setting()
    smoothed = smoother.smooth(system.model(), y[:1].unsqueeze(-1), _prior(message))
    p = _table(message)
    joint, with_x, with_square = (system.joint(p * f, y[0]).sum(0) for f in (1.0, GRID, GRID**2))
    mass = joint.sum(-1)
    x, x_after = with_x.sum(-1) / mass, (joint * GRID).sum(-1) / mass
    lag = (with_x * GRID).sum(-1) / mass - x * x_after
    pairs = system.joint(p, y[0]).sum(-1)
    corrected = max(
        gap(smoothed.lag_covariance[0, :, 0, 0], lag, 10.0),
        gap(smoothed.previous_mean[0, :, 0], x, 10.0),
        gap(smoothed.previous_covariance[0, :, 0, 0], with_square.sum(-1) / mass - x**2, 10.0),
        gap(smoothed.log_pair_probability[0].exp(), pairs / pairs.sum()),
    )
    return Outcome(corrected, float(lag.abs().min()))  # as printed X and X' would be uncorrelated


@statement(
    "N2 Eq. 5, E45",
    "note 2 3",
    printed="σ(X'|A) = ∫dA ∫ P(X'|A') σ(X|A) P(O|X') dX",
    corrected="σ(X'|A'=j) = M-proj Σ_i (w_ij/π'_j) p_ij, p_ij the posterior of the pair of modes",
)
def pairs_are_weighed_before_the_collapse() -> Outcome:
    system, message, y = _setting()
    filtered = switching.gpb2(system.model(), y[:1].unsqueeze(-1), _prior(message))
    joint = system.joint(_table(message), y[0])
    even = _table(message._replace(probability=torch.ones(2, dtype=FLOAT)))  # no weights of the modes, as printed
    printed = _moments(system._replace(T=torch.ones(2, 2, dtype=FLOAT)).joint(even, y[0]).sum(0))
    return Outcome(_report(filtered, 0, joint), gap(printed.mean, _moments(joint.sum(0)).mean))


@statement(
    "N2 Eq. 5 (6)", "note 2 3", corrected="line 6: M-proj(p) = argmax ∫ p log N(m,P): the moments of the mixture"
)
def projection_on_gaussians() -> Outcome:
    system, message, y = _setting()
    filtered = switching.gpb2(system.model(), y[:1].unsqueeze(-1), _prior(message))
    p = system.joint(_table(message), y[0]).sum(0)
    p = p / p.sum(-1, keepdim=True)

    def fit(m: Tensor, P: Tensor) -> Tensor:
        return (p * _density(GRID, m.unsqueeze(-1), P.unsqueeze(-1)).log()).sum()

    m, P = filtered.mode_mean[0, :, 0], filtered.mode_covariance[0, :, 0, 0]
    slopes = torch.func.grad(fit, argnums=(0, 1))(m, P)
    curvature = torch.func.hessian(lambda t: fit(t[:2], t[2:]))(torch.cat((m, P)))
    is_maximum = bool((torch.linalg.eigvalsh(curvature) < 0).all())
    zero = torch.zeros(2, dtype=FLOAT)
    return Outcome(max(*(gap(slope, zero, 10.0) for slope in slopes), 0.0 if is_maximum else float("inf")))


@statement("N2 Eq. 6", "note 2 3.1", corrected="σ(A=a_k) = π_k, σ(X|A=a_k) = N(μ_k,Σ_k): one message, and its mixture")
def message_of_gaussians() -> Outcome:
    _, message, _ = _setting()
    one, zero = torch.ones(2, dtype=FLOAT), torch.zeros(2, dtype=FLOAT)
    still = _System(torch.eye(2, dtype=FLOAT), one, zero, one, one, zero, zero)
    filtered = switching.gpb2(still.model(), torch.full((1, 1), torch.nan, dtype=FLOAT), _prior(message))
    mixture = _moments(_table(message).sum(0))
    corrected = max(
        _difference(_by_mode(filtered, 0), message),
        gap(filtered.mean[0, 0], mixture.mean, 10.0),
        gap(filtered.covariance[0, 0, 0], mixture.variance, 10.0),
    )
    return Outcome(corrected)


@statement("N2 Eq. 7", "note 2 3.1", corrected="X' = WX + N(0,Q): X' ~ N(Wμ, WΣW^T + Q)")
def linear_gaussian_prediction() -> Outcome:
    mu, Sigma, Q, W = normal(2, seed=1), spread(2, seed=2), spread(2, seed=3), normal(2, 2, seed=4)
    corners = torch.cartesian_prod(*(number(-1.0, 1.0),) * 4)  # mean 0 and covariance I in four dimensions
    x = corners[:, :2] @ power(Sigma, 0.5) + mu
    after = x @ W.T + corners[:, 2:] @ power(Q, 0.5)
    H, R = torch.eye(2, dtype=FLOAT), torch.eye(2, dtype=FLOAT)
    model = SwitchingModel.of([KalmanModel(W, Q, H, R)], transition=torch.ones(1, 1, dtype=FLOAT))
    filtered = switching.gpb1(model, torch.full((1, 2), torch.nan, dtype=FLOAT), Prior(mu, Sigma))
    expected = after.mean(0), torch.cov(after.T, correction=0)
    actual = filtered.predicted_mode_mean[0, 0], filtered.predicted_mode_covariance[0, 0]
    return Outcome(max(gap(a, e, 10.0) for a, e in zip(actual, expected, strict=True)))


@statement(
    "N2 Eq. 8, E47",
    "note 2 3.1",
    printed="P(X'|A'=k) = Σ_k' π_k' N(W_k μ_k', ...)",
    corrected="with backward probabilities π_k' T_k'k / Σ_l π_l T_lk in place of π_k'",
)
def mixing_weights_are_backward_probabilities() -> Outcome:
    system, message, _ = _setting()
    nothing = torch.full((1, 1), torch.nan, dtype=FLOAT)
    truth = _moments(system.joint(_table(message), None).sum(0))
    worst = 0.0
    for filter_ in (switching.imm, switching.gpb2):
        filtered = filter_(system.model(), nothing, _prior(message))
        actual = filtered.predicted_mode_mean[0, :, 0], filtered.predicted_mode_covariance[0, :, 0, 0]
        worst = max(worst, _difference(_Message(filtered.predicted_log_mode_probability[0].exp(), *actual), truth))
    independent = torch.ones(2, 2, dtype=FLOAT)
    printed = _moments(system._replace(T=independent).joint(_table(message), None).sum(0))
    return Outcome(worst, gap(printed.mean, truth.mean))


# The filters, step by step ------------------------------------------------------------------------------------------


@statement(
    "7.1 GPB1", "theory", corrected="one Gaussian by every mode; π'_j ∝ c_j L_j; all modes collapse to one Gaussian"
)
def gpb1() -> Outcome:
    system, message, y = _setting(seed=20)
    filtered = switching.gpb1(system.model(), y.unsqueeze(-1), _prior(message))
    one = _moments(_table(message).sum(0))
    pi, worst = message.probability, 0.0
    for t in range(3):
        joint = system.joint(_table(_Message(pi, one.mean.expand(2), one.variance.expand(2))), y[t])
        worst = max(worst, _report(filtered, t, joint))
        pi, one = _moments(joint.sum(0)).probability, _moments(joint.sum((0, 1)))
    return Outcome(worst)


@statement(
    "7.2 GPB2",
    "theory",
    corrected="every mode's Gaussian by every mode; w_ij ∝ π_i T_ij L_ij; collapse over i for each j",
)
def gpb2() -> Outcome:
    system, message, y = _setting(seed=20)
    filtered, worst = switching.gpb2(system.model(), y.unsqueeze(-1), _prior(message)), 0.0
    for t in range(3):
        joint = system.joint(_table(message), y[t])
        worst, message = max(worst, _report(filtered, t, joint)), _moments(joint.sum(0))
    return Outcome(worst)


@statement(
    "7.3 IMM",
    "theory",
    corrected="Gaussians mix for each next mode, π_i T_ij / c_j; then one filter for each mode; π'_j ∝ c_j L_j",
)
def imm() -> Outcome:
    system, message, y = _setting(seed=20)
    filtered, worst = switching.imm(system.model(), y.unsqueeze(-1), _prior(message)), 0.0
    for t in range(3):
        mixed = torch.einsum("ij,ix->jx", system.T, _table(message))
        by_itself = system._replace(T=torch.eye(2, dtype=FLOAT))
        joint = by_itself.joint(_table(_moments(mixed)), y[t])
        worst, message = max(worst, _report(filtered, t, joint)), _moments(joint.sum(0))
    return Outcome(worst)


@statement(
    "7.4 exact",
    "theory",
    corrected="from a single Gaussian GPB1, GPB2 and IMM are exact for one step, with the likelihood",
)
def one_step_is_exact() -> Outcome:
    system, message, y = _setting(seed=20)
    single = message._replace(mean=message.mean[:1].expand(2), variance=message.variance[:1].expand(2))
    joint = system.joint(_table(single), y[0])
    filters = (switching.gpb1, switching.gpb2, switching.imm)
    return Outcome(max(_report(f(system.model(), y[:1].unsqueeze(-1), _prior(single)), 0, joint) for f in filters))


@statement(
    "7.4 prediction",
    "theory",
    corrected="without observations IMM = GPB2 = exact: means and covariances of all M^(t+1) histories",
)
def filters_without_observations() -> Outcome:
    k, s, steps = 2, 2, 3
    T, pi = torch.softmax(normal(k, k, seed=1), -1), torch.softmax(normal(k, seed=2), 0)
    F, b, m = 0.6 * normal(k, s, s, seed=3), normal(k, s, seed=4), normal(k, s, seed=5)
    Q, P = (torch.stack([spread(s, seed=seed + j) for j in range(k)]) for seed in (6, 10))
    H, R = torch.eye(s, dtype=FLOAT).expand(k, s, s), torch.eye(s, dtype=FLOAT).expand(k, s, s)
    model, prior = SwitchingModel(T, F, Q, H, R, b=b), Prior(m, P, pi.log())
    sums = torch.zeros(k, dtype=FLOAT), torch.zeros(k, s, dtype=FLOAT), torch.zeros(k, s, s, dtype=FLOAT)
    for history in itertools.product(range(k), repeat=steps + 1):
        w, mean, cov = pi[history[0]], m[history[0]], P[history[0]]
        for i, j in itertools.pairwise(history):
            w, mean, cov = w * T[i, j], F[j] @ mean + b[j], F[j] @ cov @ F[j].T + Q[j]
        for total, term in zip(sums, (w, w * mean, w * (cov + torch.outer(mean, mean))), strict=True):
            total[history[-1]] += term
    mean = sums[1] / sums[0].unsqueeze(-1)
    cov = sums[2] / sums[0].reshape(-1, 1, 1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    nothing = torch.full((steps, s), torch.nan, dtype=FLOAT)
    worst = 0.0
    for filter_ in (switching.imm, switching.gpb2):
        filtered = filter_(model, nothing, prior)
        worst = max(
            worst,
            gap(filtered.log_mode_probability[-1].exp(), sums[0]),
            gap(filtered.mode_mean[-1], mean, 10.0),
            gap(filtered.mode_covariance[-1], cov, 100.0),
        )
    return Outcome(worst)
