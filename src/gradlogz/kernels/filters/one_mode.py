"""Moments of the smoothed states of one mode, summed over time, for numba: the E step of EM for a linear system.

    forward     a_t = F m_t-1 + b,  P_t = F P F^T + Q,  S = H P_t H^T + R,  K = P_t H^T S^-1,  v = y_t - H a_t - d
    backward    g_t = H^T S^-1 v + (F A)^T g_t+1,   N_t = H^T S^-1 H + (F A)^T N_t+1 F A,   A = I - K H
    moments     x_t: a_t + P_t g_t, P_t - P_t N_t P_t;   with x_t-1: (I - P_t N_t) F P       Bryson-Frazier [bierman73]

No matrix but S is inverted. Covariances do not depend on observations: once P_t or N_t has converged to rounding, it
stays, and a step costs products of matrices with vectors only. Series have no gaps, and the model is constant.

Law: tests/kernels/test_moments_of_one_mode_are_those_of_the_smoother.py.
Read next: ../../filters/fitting/em.py (the caller), backward.py (the smoother for all models).
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy

from ..._typing import Float, Tensor
from ..workers import CachedFunction

SAME = 1.8e-15  # relative change from which on a covariance has converged: 8 units of rounding


class OneModeMoments(NamedTuple):
    """Sums over all series and times: moments of x_t, x_t-1 and y_t; those of x_0 for each series; log likelihood."""

    x: Float[Tensor, "s"]
    xx: Float[Tensor, "s s"]
    p: Float[Tensor, "s"]
    xp: Float[Tensor, "s s"]
    pp: Float[Tensor, "s s"]
    yx: Float[Tensor, "o s"]
    initial_mean: Float[Tensor, "b s"]
    initial_second: Float[Tensor, "s s"]
    log_likelihood: Float[Tensor, ""]


def moments(
    model: tuple[Tensor, ...], mean: Float[Tensor, "b s"], covariance: Float[Tensor, "b s s"], y: Float[Tensor, "b t o"]
) -> OneModeMoments | None:
    """Moments of a model F, Q, H, R, b, d of one mode; None if a number is not finite."""
    n, (o, s) = len(y), model[2].shape
    sizes = ((s,), (s, s), (s,), (s, s), (s, s), (o, s), (n, s), (s, s), ())
    sums = OneModeMoments(*(y.new_zeros(size) for size in sizes))
    arrays = (t.contiguous().numpy() for t in (*model, mean, covariance, y, *sums[:-1], sums[-1].view(1)))
    _kernel()(*arrays)
    return sums if math.isfinite(float(sums.log_likelihood)) else None


@cache
def _kernel() -> Any:
    return CachedFunction(_sum_moments)


def _sum_moments(
    F: Any, Q: Any, H: Any, R: Any, b: Any, d: Any, means: Any, covariances: Any, series: Any,
    x: Any, xx: Any, p: Any, xp: Any, pp: Any, yx: Any, x0: Any, xx0: Any, total: Any,
) -> None:  # fmt: skip
    """Add the moments of all series; results are written to the last arrays."""
    o, s = H.shape
    steps = series.shape[1]
    F_t, H_t = numpy.ascontiguousarray(F.T), numpy.ascontiguousarray(H.T)
    x[:], xx[:], p[:], xp[:], pp[:], yx[:], xx0[:], total[:] = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    a, e = numpy.empty((steps, s)), numpy.empty((steps, o))  # predicted means, and S^-1 v
    # Filtered P before a step, predicted P, K, S^-1: until they have converged
    before, ahead = numpy.empty((steps, s, s)), numpy.empty((steps, s, s))
    gains, inverses = numpy.empty((steps, s, o)), numpy.empty((steps, o, o))
    m, g, later, mean = numpy.empty(s), numpy.empty(s), numpy.empty(s), numpy.empty(s)
    v, S = numpy.empty(o), numpy.empty((o, o))
    for i in range(len(series)):
        y = series[i]
        m[:] = means[i]
        P = covariances[i].copy()
        last, log_determinant = -1, 0.0  # of the steps whose covariances are their own
        for t in range(steps):
            at = last
            if last < 0 or t == last + 1:
                at = t
                predicted = F @ P @ F_t + Q
                for r in range(s):
                    for c in range(r):
                        predicted[c, r] = predicted[r, c] = (predicted[r, c] + predicted[c, r]) / 2
                HP = H @ predicted
                S[:] = HP @ H_t + R
                determinant = numpy.linalg.det(S) if numpy.isfinite(S).all() else 0.0
                if not 0.0 < determinant < math.inf:
                    total[0] = math.nan
                    return
                log_determinant = math.log(determinant)
                inverse = numpy.linalg.inv(S)
                K = numpy.ascontiguousarray(HP.T) @ inverse
                same = t > 0
                if same:
                    for r in range(s):
                        for c in range(r + 1):
                            scale = math.sqrt(predicted[r, r] * predicted[c, c])
                            if abs(predicted[r, c] - ahead[t - 1, r, c]) > SAME * scale:
                                same = False
                if same:
                    at = t - 1
                else:
                    before[t], ahead[t], gains[t], inverses[t] = P, predicted, K, inverse
                    last = t
                    P = predicted - K @ HP
            K, inverse = gains[at], inverses[at]
            for r in range(s):
                value = b[r]
                for c in range(s):
                    value += F[r, c] * m[c]
                a[t, r] = value
            for r in range(o):
                value = y[t, r] - d[r]
                for c in range(s):
                    value -= H[r, c] * a[t, c]
                v[r] = value
            square = 0.0
            for r in range(o):
                value = 0.0
                for c in range(o):
                    value += inverse[r, c] * v[c]
                e[t, r] = value
                square += value * v[r]
            for r in range(s):
                value = a[t, r]
                for c in range(o):
                    value += K[r, c] * v[c]
                m[r] = value
            total[0] -= (log_determinant + square + o * math.log(2 * math.pi)) / 2
        # Backward ---------------------------------------------------------------------------------------------------
        later[:] = 0.0  # F^T g of the step after
        N = numpy.zeros((s, s))  # F^T N F of the step after
        is_steady, place = False, -1
        information, V, V_before, cross = N.copy(), N.copy(), N.copy(), N.copy()
        A = F.copy()
        for back in range(steps):
            t = steps - 1 - back
            at = min(t, last)
            K, predicted, P, inverse = gains[at], ahead[at], before[at], inverses[at]
            if at != place or not is_steady:
                if at != place:
                    A = numpy.eye(s) - K @ H
                is_new = at != place
                place = at
                updated = H_t @ inverse @ H + numpy.ascontiguousarray(A.T) @ N @ A
                is_steady = not is_new
                for r in range(s):
                    for c in range(s):
                        scale = math.sqrt(abs(updated[r, r] * updated[c, c]))
                        if abs(updated[r, c] - information[r, c]) > SAME * scale:
                            is_steady = False
                information = updated
                PN = predicted @ information
                V = predicted - PN @ predicted
                FP = F @ P
                cross = FP - PN @ FP
                N = F_t @ information @ F
                V_before = P - numpy.ascontiguousarray(FP.T) @ information @ FP
            for r in range(s):
                value = 0.0
                for c in range(o):
                    value += H[c, r] * e[t, c]
                for c in range(s):
                    value += A[c, r] * later[c]
                g[r] = value
            for r in range(s):
                value = a[t, r]
                for c in range(s):
                    value += predicted[r, c] * g[c]
                m[r] = value  # smoothed mean at t
            for r in range(s):
                value = 0.0
                for c in range(s):
                    value += F[c, r] * g[c]
                later[r] = value
            for r in range(s):
                x[r] += m[r]
                for c in range(s):
                    xx[r, c] += V[r, c] + m[r] * m[c]
                    xp[r, c] += cross[r, c]
                    pp[r, c] += V_before[r, c]
                    if t + 1 < steps:
                        xp[r, c] += mean[r] * m[c]  # mean: smoothed at t + 1
                if t + 1 < steps:
                    p[r] += m[r]
                    for c in range(s):
                        pp[r, c] += m[r] * m[c]
            for r in range(o):
                for c in range(s):
                    yx[r, c] += y[t, r] * m[c]
            mean[:] = m
        # Time 0 -----------------------------------------------------------------------------------------------------
        for r in range(s):
            value = means[i, r]
            for c in range(s):
                value += covariances[i, r, c] * later[c]
            x0[i, r] = value
        initial = covariances[i] - covariances[i] @ N @ covariances[i]
        for r in range(s):
            p[r] += x0[i, r]
            for c in range(s):
                xx0[r, c] += initial[r, c] + x0[i, r] * x0[i, c]
                pp[r, c] += x0[i, r] * x0[i, c]
                xp[r, c] += mean[r] * x0[i, c]
