"""Expectation maximisation (EM): a smoother for the hidden states, and closed-form updates of the parameters.

    E   P(s_t-1 = i, s_t = j | y), E[x_t x_t^T | s_t = j, y], E[x_t x_t-1^T | s_t = j, y]            `smooth`
    M   T_ij ∝ sum_t P(s_t-1 = i, s_t = j | y)
        [F_j b_j] = (sum g_tj E[x_t z_t-1^T]) (sum g_tj E[z_t-1 z_t-1^T])⁻¹,  z = (x, 1),  g_tj = P(s_t = j | y)
        Q_j = sum g_tj E[r r^T] / sum g_tj,   r = x_t - F_j x_t-1 - b_j;    H, d and R likewise from y
        rate_ij = expected number of switches from i to j / expected time in mode i               [hobolth11]

With outliers the E step has twice as many modes (../gaussian/clutter.py): the motion is learned from all of them, H, d
and R from those of inliers, and the probability of outliers is their expected share of the observed steps.

Missing components of an observation are hidden variables too; they enter by their conditional mean and covariance. With
one mode, or with an exact smoother, every iteration increases the likelihood; with approximate smoothers nearly every
iteration does, and the best model is returned.

Read next: ../gaussian/smoother.py (the E step), learning.py.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._pytree import replaced
from ..._typing import Float, Tensor
from ...kernels.filters.dispatch import moments_kernel
from ..gaussian.smoother import Method, Smoothed, smooth
from ..models.switching_model import Generator, Parameters, SwitchingModel
from ..moment_matching import symmetric
from ..prior_and_series import Prior, Series
from ..validation import intervals, prepared
from .parametrization import MATRICES, PLAIN, FitPlan, with_zero_rows
from .training_data import CELLS, FitRun, System, chunks, observed_entries, valid_steps

# Fields of `Smoothed` that the M step needs.
MOMENTS = (
    "mode_mean",
    "mode_covariance",
    "log_mode_probability",
    "log_pair_probability",
    "previous_mean",
    "previous_covariance",
    "lag_covariance",
)


class SufficientStatistics(NamedTuple):
    """Sums over all series for each mode: weights, and moments of x, (x, previous x), (y, x) and x_0."""

    pairs: Float[Tensor, "k k"]
    weight: Float[Tensor, "k"]
    x: Float[Tensor, "k s"]
    xx: Float[Tensor, "k s s"]
    p: Float[Tensor, "k s"]
    xp: Float[Tensor, "k s s"]
    pp: Float[Tensor, "k s s"]
    y: Float[Tensor, "k o"]
    yx: Float[Tensor, "k o s"]
    yy: Float[Tensor, "k o o"]
    Q_error: Float[Tensor, "k"]
    Q_count: Float[Tensor, "k"]
    R_error: Float[Tensor, "k"]
    R_count: Float[Tensor, "k"]
    weight_0: Float[Tensor, "k"]
    x_0: Float[Tensor, "k s"]
    xx_0: Float[Tensor, "k s s"]
    observed: Float[Tensor, "k"]
    log_likelihood: Float[Tensor, ""]

    def of_inliers(self) -> "SufficientStatistics":
        """Sums of the first half of the modes."""
        k = len(self.weight) // 2
        return self._each(lambda t: t[:k], lambda t: t[:k, :k])

    def of_motion(self) -> "SufficientStatistics":
        """Sums over inliers and outliers of each mode of the motion."""
        return self._each(lambda t: t.unflatten(0, (2, -1)).sum(0), without_outliers)

    def _each(self, fold: Callable[[Tensor], Tensor], fold_pairs: Callable[[Tensor], Tensor]) -> "SufficientStatistics":
        parts = {name: fold(t) for name, t in self._asdict().items() if t.ndim and name != "pairs"}
        return self._replace(pairs=fold_pairs(self.pairs), **parts)


class Expectations(NamedTuple):
    """Result of the E step: sums, the starts of all series, and expected numbers of switches and times in modes."""

    sums: SufficientStatistics
    initial_weight: Float[Tensor, "b k"]
    initial_mean: Float[Tensor, "b k s"]
    switches: Float[Tensor, "k k"] | None

    @classmethod
    def joined(cls, parts: "Sequence[Expectations]") -> "Expectations":
        """Expectations of several groups of series."""
        sums = SufficientStatistics(*(sum(t[1:], t[0]) for t in zip(*(p.sums for p in parts), strict=True)))
        weight, mean = (torch.cat(t) for t in zip(*(p[1:3] for p in parts), strict=True))
        switches = None if parts[0].switches is None else torch.stack([p.switches for p in parts]).sum(0)  # type: ignore[misc]
        return cls(sums, weight, mean, switches)


def without_outliers(pairs: Float[Tensor, "*b k2 k2"]) -> Float[Tensor, "*b k k"]:
    """Sum over inliers and outliers of pairs of modes."""
    return pairs.unflatten(-1, (2, -1)).sum(-2).unflatten(-2, (2, -1)).sum(-3)


def run_em(
    system: System,
    series: Series,
    plan: FitPlan,
    smoother: Method,
    max_iterations: int,
    enough: float,
    report: Callable[[int, float], None],
) -> FitRun:
    """Iterate E and M steps until at most `enough` is left to gain."""
    best, history, converged = system, [], False
    with torch.no_grad():
        for i in range(max_iterations + 1):
            expected = _expected(system, series, plan, smoother)
            history.append(float(expected.sums.log_likelihood))
            if history[-1] >= max(history):
                best = system
            report(i, history[-1])
            converged = remaining_gain(history) <= enough
            if converged or i == max_iterations:
                break
            system = _maximum(system, expected, plan)
    return FitRun(best, max(history), history, converged)


def remaining_gain(history: Sequence[float]) -> float:
    """Estimate the log likelihood that further iterations of EM would gain; inf if nothing is known yet.

    EM converges linearly: near its end the gains shrink by a factor c, and what is left is their geometric series
    gain (c + c² + ...) = gain c / (1 - c), Aitken's extrapolation [bohning94]. A small gain alone says little: with
    c = 0.99, common where noise covariances are learned, 99 times as much is left. c is the largest of the last three
    ratios, since early gains are dominated by directions that converge fast. Near a maximum l* - l = δ²/2, where δ is
    the distance in standard errors: 0.005 nats are 0.1 standard errors.

    With an approximate smoother the fixed point is not the maximum, and the likelihood may pass a maximum on the way.
    """
    if len(history) < 5:
        return math.inf
    gains = [abs(b - a) for a, b in itertools.pairwise(history[-5:])]
    if gains[-1] <= 1e-14 * abs(history[-1]):
        return 0.0
    c = max(b / a if a > 0 else math.inf for a, b in itertools.pairwise(gains))
    return gains[-1] * c / (1 - c) if c < 1 else math.inf


def _expected(system: System, series: Series, plan: FitPlan, smoother: Method) -> Expectations:
    """E step: sums over all series, in chunks."""
    k = system.model.modes * (1 if system.clutter is None else 2)
    t, s = series.observations.shape[1], system.model.state_size
    size = max(1, CELLS // (t * k * k * 4 * s * s))
    parts = chunks(series, size)
    return Expectations.joined([_expected_of(system.of_series(rows), part, plan, smoother) for part, rows in parts])


def _expected_of(system: System, original: Series, plan: FitPlan, smoother: Method) -> Expectations:
    known = _of_one_mode(system, original, plan, smoother)
    if known is not None:
        return known
    model, prior, series = system.as_filtered(original)
    smoothed = smooth(model, series, prior, method=smoother, fields=MOMENTS)
    now, y, _ = prepared("fit", model, series, validate=False)
    inside, observed = valid_steps(series), observed_entries(series).unsqueeze(-2)
    g = smoothed.log_mode_probability.exp() * inside.unsqueeze(-1)  # [b, t, k]
    m, before, s = smoothed.mode_mean, smoothed.previous_mean, model.state_size

    def summed(value: Tensor) -> Tensor:
        return torch.einsum("btk,btk...->k...", g, value.expand(*g.shape, *value.shape[3:]))

    # Moments of states, successive states and observations: z = (x, previous x, 1, y) ------------------------------
    has_gaps = not bool((observed.squeeze(-2) | ~inside.unsqueeze(-1)).all())
    parts = [m, before, torch.ones_like(m[..., :1])]
    if not has_gaps:
        parts.append(y.unsqueeze(-2).expand(*g.shape, -1))
    z = torch.cat(parts, -1)
    zz = torch.einsum("btka,btkc->kac", g.unsqueeze(-1) * z, z)
    weight = zz[:, 2 * s, 2 * s]
    if has_gaps:
        y_sum, yx, yy = _observation_moments(smoothed, now, y, observed, summed)
    else:
        y_sum, yx, yy = zz[:, 2 * s + 1 :, 2 * s], zz[:, 2 * s + 1 :, :s], zz[:, 2 * s + 1 :, 2 * s + 1 :]
    nothing = torch.zeros_like(weight)
    is_scaled = {name: name in plan.learn and plan.structure[name] == "scale" for name in MATRICES}
    Q_error, Q_count = nothing, nothing
    if is_scaled["Q"]:
        Q_error, Q_count = _motion_error(smoothed, now, g, summed)
    R_error, R_count = (
        _observation_error(smoothed, now, y, observed, g, summed) if is_scaled["R"] else (nothing, nothing)
    )
    g_0 = smoothed.initial_log_mode_probability.exp()
    pairs = smoothed.log_pair_probability.exp() * inside[..., None, None]
    sums = SufficientStatistics(
        pairs.sum((0, 1)),
        weight,
        x=zz[:, :s, 2 * s],
        xx=zz[:, :s, :s] + summed(smoothed.mode_covariance),
        p=zz[:, s : 2 * s, 2 * s],
        xp=zz[:, :s, s : 2 * s] + summed(smoothed.lag_covariance),
        pp=zz[:, s : 2 * s, s : 2 * s] + summed(smoothed.previous_covariance),
        y=y_sum,
        yx=yx,
        yy=yy,
        Q_error=Q_error,
        Q_count=Q_count,
        R_error=R_error,
        R_count=R_count,
        weight_0=g_0.sum(0),
        x_0=torch.einsum("bk,bks->ks", g_0, smoothed.initial_mode_mean),
        xx_0=torch.einsum("bk,bkse->kse", g_0, _second(smoothed.initial_mode_mean, smoothed.initial_mode_covariance)),
        observed=torch.einsum("btk,bt->k", g, observed.any(-1).squeeze(-1).to(g.dtype)),
        log_likelihood=smoothed.filtered.log_likelihood.sum(),
    )
    switches = None
    if "rate" in plan.learn:
        motion = pairs if system.clutter is None else without_outliers(pairs)
        switches = _switches(system.model, original, motion)
    k = system.model.modes  # outliers do not occur at time 0
    return Expectations(sums, g_0[:, :k], smoothed.initial_mode_mean[:, :k], switches)


def _of_one_mode(system: System, series: Series, plan: FitPlan, smoother: Method) -> Expectations | None:
    """Expectations in one compiled pass, for a constant model of one mode and series without gaps; None otherwise."""
    model, prior, clutter = system
    y, o = series.observations, model.observation_size
    is_scaled = any(name in plan.learn and plan.structure[name] == "scale" for name in MATRICES)
    is_plain = model.modes == 1 and clutter is None and not model.continuous and model.steps is None and not is_scaled
    has_gaps = series.mask is not None or series.lengths is not None
    if not is_plain or has_gaps or smoother == "kim" or bool(y.isnan().any()):
        return None
    zero = y.new_zeros(1)
    fields = (model.F[0], model.Q[0], model.H[0], model.R[0])
    offsets = (
        zero.expand(model.state_size) if model.b is None else model.b[0],
        zero.expand(o) if model.d is None else model.d[0],
    )
    b, s = len(y), model.state_size
    tensors = (*fields, *offsets, prior.mean.expand(b, 1, s)[:, 0], prior.covariance.expand(b, 1, s, s)[:, 0], y)
    kernel = moments_kernel(tensors)
    moments = None if kernel is None else kernel.moments(tensors[:6], *tensors[6:])
    if moments is None:
        return None
    count = y.new_full((1,), float(y.shape[:-1].numel()))
    sums = SufficientStatistics(
        pairs=count.view(1, 1),
        weight=count,
        **{name: getattr(moments, name).unsqueeze(0) for name in ("x", "xx", "p", "xp", "pp", "yx")},
        y=y.sum((0, 1)).unsqueeze(0),
        yy=torch.einsum("bto,btq->oq", y, y).unsqueeze(0),
        Q_error=zero,
        Q_count=zero,
        R_error=zero,
        R_count=zero,
        weight_0=y.new_full((1,), float(b)),
        x_0=moments.initial_mean.sum(0, keepdim=True),
        xx_0=moments.initial_second.unsqueeze(0),
        observed=count,
        log_likelihood=moments.log_likelihood,
    )
    return Expectations(sums, y.new_ones(b, 1), moments.initial_mean.unsqueeze(1), None)


def _switches(model: SwitchingModel, series: Series, pairs: Float[Tensor, "b t k k"]) -> Float[Tensor, "k k"]:
    """Expected numbers of switches of the modes between observations, and on the diagonal the expected times in modes.

    Given modes i and j at the ends of an interval, the expected time in mode a and number of switches from a to b are
    integrals of P_ia(u) P_aj(dt - u) and rate_ab P_ia(u) P_bj(dt - u), divided by P_ij(dt): the derivatives of P_ij in
    the entries of the generator, each by itself, times 1 or rate_ab.
    """
    assert isinstance(model.transition, Generator)  # checked by fit
    rate, dt = model.transition.rate, intervals("fit", model, series, validate=False)
    assert dt is not None  # continuous time
    with torch.enable_grad():
        entries = rate.detach().clone().requires_grad_()
        P = torch.linalg.matrix_exp(entries * dt[..., None, None])
        ratio = torch.where(pairs > 0, pairs / P.detach().clamp(min=1e-300), 0.0)
        (slope,) = torch.autograd.grad((ratio * P).sum(), entries)
    return torch.where(torch.eye(len(rate), dtype=torch.bool, device=rate.device), slope, rate * slope)


def _observation_moments(
    smoothed: Smoothed, now: Parameters, y: Tensor, observed: Tensor, summed: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of y, y x^T and y y^T where components of y are missing: their conditional moments take their places."""
    m, P = smoothed.mode_mean, smoothed.mode_covariance
    A, a, C = _complete(y.unsqueeze(-2), observed, now.H, now.R, now.d)
    Ax = (A @ m.unsqueeze(-1)).squeeze(-1)
    yx = A @ _second(m, P) + a.unsqueeze(-1) * m.unsqueeze(-2)
    return summed(Ax + a), summed(yx), summed(A @ P @ A.mT + _outer(Ax + a) + C)


def _motion_error(
    smoothed: Smoothed, now: Parameters, g: Tensor, summed: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Squared errors of the motion relative to Q, and their number, for structure "scale"."""
    F, Q, before = now.F, now.Q, smoothed.previous_mean
    r = smoothed.mode_mean - (F @ before.unsqueeze(-1)).squeeze(-1)
    r = r if now.b is None else r - now.b
    cross = F @ smoothed.lag_covariance.mT
    S = smoothed.mode_covariance - cross - cross.mT + F @ smoothed.previous_covariance @ F.mT + _outer(r)
    rank = torch.linalg.matrix_rank(Q, hermitian=True).to(g.dtype)
    inverse = torch.linalg.pinv(Q, hermitian=True)
    return summed((inverse * S).sum((-2, -1))), summed(rank.expand(g.shape))


def _observation_error(
    smoothed: Smoothed, now: Parameters, y: Tensor, observed: Tensor, g: Tensor, summed: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Squared errors of the observations relative to R, and their number, for structure "scale"."""
    H, R, m = now.H, now.R, smoothed.mode_mean
    e = y.unsqueeze(-2) - (H @ m.unsqueeze(-1)).squeeze(-1)
    e = e if now.d is None else e - now.d
    both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
    eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    weight = torch.linalg.inv(torch.where(both, R, eye)) * both
    error = (weight * (H @ smoothed.mode_covariance @ H.mT + _outer(e))).sum((-2, -1))
    return summed(error), summed(observed.sum(-1).to(m.dtype).expand(g.shape))


def _complete(
    y: Tensor, observed: Tensor, H: Tensor, R: Tensor, d: Tensor | None
) -> tuple[Float[Tensor, "b t k o s"], Float[Tensor, "b t k o"], Float[Tensor, "b t k o o"]]:
    """Distribution N(A x + a, C) of y given its observed part, x and the mode; A = 0, a = y, C = 0 without gaps."""
    k, o, s = H.shape[-3:]
    offset = y.new_zeros(k, o) if d is None else d
    missing = ~observed
    eye = torch.eye(o, dtype=R.dtype, device=R.device)
    both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
    gain = (R * (missing.unsqueeze(-1) & observed.unsqueeze(-2))) @ (torch.linalg.inv(torch.where(both, R, eye)) * both)
    A = missing.unsqueeze(-1) * H - gain @ (observed.unsqueeze(-1) * H)
    rest = torch.where(observed, y - offset, 0.0)
    a = torch.where(observed, y, offset + (gain @ rest.unsqueeze(-1)).squeeze(-1))
    C = R * (missing.unsqueeze(-1) & missing.unsqueeze(-2)) - gain @ (
        R * (observed.unsqueeze(-1) & missing.unsqueeze(-2))
    )
    shape = (*y.shape[:2], k)
    return A.expand(*shape, o, s), a.expand(*shape, o), C.expand(*shape, o, o)


def _maximum(system: System, expected: Expectations, plan: FitPlan) -> System:
    """M step. A mode of total weight 0 keeps its parameters."""
    model, prior, clutter = system
    fields: dict[str, Any] = {}
    sums = inliers = expected.sums
    if clutter is not None:
        sums, inliers = expected.sums.of_motion(), expected.sums.of_inliers()
    live, live_inliers = sums.weight > 1e-8, inliers.weight > 1e-8
    if "transition" in plan.learn:
        assert isinstance(model.transition, Tensor)  # checked by fit
        rows = sums.pairs.sum(-1, keepdim=True)
        fields["transition"] = torch.where(rows > 1e-8, sums.pairs / rows.clamp(min=1e-300), model.transition)
    if expected.switches is not None:
        assert isinstance(model.transition, Generator)  # checked by fit
        times = expected.switches.diagonal().unsqueeze(-1)
        rates = torch.where(times > 0, expected.switches / times.clamp(min=1e-300), model.transition.rate)
        fields["transition"] = Generator(with_zero_rows(rates))
    pooled = {name: name in plan.shared for name in (*MATRICES, *PLAIN)}
    # State: regress x on (previous x, 1) -----------------------------------------------------------------------------
    state_fit = _regress(
        (model.F, model.b),
        (sums.xp, sums.x),
        (sums.pp, sums.p, sums.weight),
        sums.xx,
        ("F" in plan.learn, "b" in plan.learn),
        (pooled["F"], pooled["b"], pooled["Q"]),
    )
    fields |= {
        name: _update_live(live, new, getattr(model, name))
        for name, new in zip(("F", "b"), state_fit, strict=False)
        if name in plan.learn
    }
    # Observation: regress y on (x, 1) --------------------------------------------------------------------------------
    observation_fit = _regress(
        (model.H, model.d),
        (inliers.yx, inliers.y),
        (inliers.xx, inliers.x, inliers.weight),
        inliers.yy,
        ("H" in plan.learn, "d" in plan.learn),
        (pooled["H"], pooled["d"], pooled["R"]),
    )
    fields |= {
        name: _update_live(live_inliers, new, getattr(model, name))
        for name, new in zip(("H", "d"), observation_fit, strict=False)
        if name in plan.learn
    }
    # Noise covariances -----------------------------------------------------------------------------------------------
    for name, spread, error, count, alive in (
        ("Q", state_fit[2], sums.Q_error, sums.Q_count, live),
        ("R", observation_fit[2], inliers.R_error, inliers.R_count, live_inliers),
    ):
        if name not in plan.learn:
            continue
        current = getattr(model, name)
        if plan.structure[name] == "scale":
            if pooled[name]:
                error, count = (
                    error.sum(-1, keepdim=True).expand_as(error),
                    count.sum(-1, keepdim=True).expand_as(count),
                )
            factor = torch.where(count > 1e-8, error / count.clamp(min=1e-300), 1.0)
            fields[name] = factor[:, None, None] * current
            continue
        if plan.structure[name] == "diagonal":
            spread = torch.diag_embed(spread.diagonal(dim1=-2, dim2=-1))
        fields[name] = _update_live(alive, spread, current)
    if "initial" in plan.learn:
        prior = _maximum_of_prior(prior, sums)
    if "initial_mean" in plan.learn:
        prior = replaced(prior, mean=_maximum_of_mean(prior, expected, plan.one_mean))
    if clutter is not None and "clutter" in plan.learn:
        outliers = expected.sums.observed[model.modes :].sum()
        clutter = clutter._replace(probability=outliers / expected.sums.observed.sum())
    return System(dataclasses.replace(model, **fields, validate=False), prior, clutter)


def _regress(
    current: tuple[Tensor, Tensor | None],
    cross: tuple[Tensor, Tensor],
    inner: tuple[Tensor, Tensor, Tensor],
    outer: Tensor,
    learned: tuple[bool, bool],
    pooled: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Least-squares map and offset, and the residual covariance, from sums over time for each mode.

    Uses pseudo-inverses: sums may be singular, and torch solves rank-deficient least squares on the CPU only.

    Args:
        current: current map and offset.
        cross: sums of response times regressor, and of the response.
        inner: sums of regressor times regressor, of the regressor, and of 1.
        outer: sums of response times response.
        learned: whether the map and the offset are learned.
        pooled: whether modes share the map, the offset and the noise.
    """
    M, c = current
    yx, y = cross
    xx, x, n = inner
    c = y.new_zeros(y.shape) if c is None else c
    M, c = M.expand(len(n), *M.shape[-2:]), c.expand(len(n), c.shape[-1])

    def together(value: Tensor, whether: bool) -> Tensor:
        return value.sum(0, keepdim=True).expand_as(value) if whether else value

    n_ = n.clamp(min=1e-300)
    if all(learned):
        pool = pooled[0] or pooled[1]
        big = torch.cat((torch.cat((xx, x.unsqueeze(-1)), -1), torch.cat((x, n.unsqueeze(-1)), -1).unsqueeze(-2)), -2)
        both = torch.cat((yx, y.unsqueeze(-1)), -1)
        solved = together(both, pool) @ torch.linalg.pinv(together(big, pool), hermitian=True)
        M, c = solved[..., :-1], solved[..., -1]
    elif learned[0]:
        right = yx - c.unsqueeze(-1) * x.unsqueeze(-2)
        M = together(right, pooled[0]) @ torch.linalg.pinv(together(xx, pooled[0]), hermitian=True)
    elif learned[1]:
        right = y - (M @ x.unsqueeze(-1)).squeeze(-1)
        c = together(right, pooled[1]) / together(n_, pooled[1]).unsqueeze(-1)
    left = outer - M @ yx.mT - yx @ M.mT + M @ xx @ M.mT
    shift = c.unsqueeze(-1) * (y - (M @ x.unsqueeze(-1)).squeeze(-1)).unsqueeze(-2)
    left = left - shift - shift.mT + n[:, None, None] * _outer(c)
    return M, c, symmetric(together(left, pooled[2]) / together(n_, pooled[2])[:, None, None])


def _maximum_of_prior(prior: Prior, sums: SufficientStatistics) -> Prior:
    live = sums.weight_0 > 1e-8
    weight = sums.weight_0.clamp(min=1e-300)
    mean = sums.x_0 / weight.unsqueeze(-1)
    covariance = symmetric(sums.xx_0 / weight[:, None, None] - _outer(mean))
    return Prior(
        _update_live(live, mean, prior.mean),
        _update_live(live, covariance, prior.covariance),
        sums.weight_0.log().log_softmax(-1),
        per="mode",
    )


def _maximum_of_mean(prior: Prior, expected: Expectations, one_mean: bool) -> Float[Tensor, "*b k s"]:
    """Mean that maximises the expected density of x_0; directions in which the covariance is 0 keep their values."""
    weight, mean, old = expected.initial_weight, expected.initial_mean, prior.mean
    precision = weight[..., None, None] * torch.linalg.pinv(prior.covariance, hermitian=True)  # [b, k, s, s]
    excess = (precision @ (mean - old).unsqueeze(-1)).squeeze(-1)
    if old.ndim == 2:  # one for all series
        precision, excess = precision.sum(0), excess.sum(0)
    if one_mean:
        precision, excess = precision.sum(-3, keepdim=True), excess.sum(-2, keepdim=True)
    return old + (torch.linalg.pinv(precision, hermitian=True) @ excess.unsqueeze(-1)).squeeze(-1)


def _update_live(live: Tensor, new: Tensor, old: Tensor | None) -> Tensor:
    """New parameters of modes with positive weight, old ones of the others."""
    old = torch.zeros_like(new) if old is None else old
    return torch.where(live.unflatten(0, (-1, *[1] * (new.ndim - 1))), new, old)


def _second(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance + _outer(mean)


def _outer(vector: Tensor) -> Tensor:
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)
