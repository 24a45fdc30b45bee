"""Discretisation of linear systems and Markov chains for many steps, compiled by numba.

    F = exp(A dt),   Q = ∫_0^dt exp(A u) C exp(A u)^T du,   P = exp(G dt)             [vanloan78]

The computation is that of ../../filters/models/discretization.py: a Taylor series for a short step, then doublings.
Two properties of motion models are used. Components without drift and noise are left out. If A is nilpotent
(integrators: constant velocity, constant acceleration), both series are finite, and there are no doublings.

Steps are computed in groups of GROUP, which lie side by side in the innermost loops, so that LLVM makes vectors of
them; each group is doubled as often as its longest step needs.

Read next: ../../filters/models/discretization.py (the caller, and the same computation in torch).
"""

import math
from functools import cache
from typing import Any

import numpy
from numba import njit

from ..._typing import Float, Tensor
from ..workers import CachedFunction

GROUP = 16
TERMS = 18  # as in the caller


def discretize(
    drift: Float[Tensor, "n s s"], density: Float[Tensor, "n s s"], dt: Float[Tensor, "m"]
) -> tuple[Float[Tensor, "m n s s"], Float[Tensor, "m n s s"]]:
    """F and Q of every system for every step, float64."""
    shape = (dt.shape[0], *drift.shape)
    F, Q = drift.new_empty(shape), drift.new_empty(shape)
    _compiled(_systems)(*(t.detach().contiguous().numpy() for t in (drift, density, dt)), F.numpy(), Q.numpy())
    return F, Q


def discretize_chain(rate: Float[Tensor, "k k"], dt: Float[Tensor, "m"]) -> Float[Tensor, "m k k"]:
    """Transition matrix of every step, float64."""
    P = rate.new_empty((dt.shape[0], *rate.shape))
    _compiled(_chains)(*(t.detach().contiguous().numpy() for t in (rate, dt)), P.numpy())
    return P


@cache
def _compiled(function: Any) -> Any:
    """A compiled function."""
    return CachedFunction(function)


inner: Any = njit(error_model="numpy", inline="always")


@inner
def _doublings(size: float, longest: float) -> int:
    """Number of doublings after a step of norm at most 1/2."""
    scaled = 2 * size * longest
    return math.ceil(math.log2(scaled)) if 1 < scaled < math.inf else 0


@inner
def _multiply(a: Any, b: Any, out: Any, n: int) -> None:
    """Product of matrices [n, n, GROUP]."""
    for i in range(n):
        for j in range(n):
            for w in range(GROUP):
                out[i, j, w] = a[i, 0, w] * b[0, j, w]
            for e in range(1, n):
                for w in range(GROUP):
                    out[i, j, w] += a[i, e, w] * b[e, j, w]


def _systems(drift: Any, density: Any, dt: Any, F: Any, Q: Any) -> None:
    """Write F and Q of every system for every step."""
    s = drift.shape[1]
    A, C = numpy.empty((s, s)), numpy.empty((s, s))
    powers, moments = numpy.empty((TERMS, s, s)), numpy.empty((TERMS, s, s))
    E, V = numpy.empty((s, s, GROUP)), numpy.empty((s, s, GROUP))
    X, Y = numpy.empty((s, s, GROUP)), numpy.empty((s, s, GROUP))
    active, tau = numpy.empty(s, numpy.int64), numpy.empty(GROUP)
    for j in range(drift.shape[0]):
        # Components with drift or noise --------------------------------------------------------------------------
        n, size = 0, 0.0
        for i in range(s):
            row = 0.0
            other = 0.0
            for e in range(s):
                row += abs(drift[j, i, e])
                other += abs(drift[j, e, i]) + abs(density[j, i, e])
            size = max(size, row)
            if row + other != 0:
                active[n] = i
                n += 1
        size = size if size > 0 else 1.0
        for i in range(n):
            for e in range(n):
                A[i, e] = drift[j, active[i], active[e]] / size
                C[i, e] = density[j, active[i], active[e]] / size
        # Coefficients of the series ------------------------------------------------------------------------------
        terms, is_finite = 0, False
        for i in range(n):
            for e in range(n):
                powers[0, i, e], moments[0, i, e] = A[i, e], C[i, e]
        for term in range(1, TERMS):
            largest = 0.0
            for i in range(n):
                for e in range(n):
                    p, m = 0.0, 0.0
                    for h in range(n):
                        p += A[i, h] * powers[term - 1, h, e]
                        m += A[i, h] * moments[term - 1, h, e] + moments[term - 1, i, h] * A[e, h]
                    powers[term, i, e], moments[term, i, e] = p / (term + 1), m / (term + 1)
                    largest = max(largest, abs(p) + abs(m))
            if largest == 0:
                is_finite = True
                break
            terms = term
        # Groups of steps -----------------------------------------------------------------------------------------
        for start in range(0, dt.shape[0], GROUP):
            many = min(GROUP, dt.shape[0] - start)
            longest = 0.0
            for w in range(many):
                longest = max(longest, abs(dt[start + w]))
            doublings = 0 if is_finite else _doublings(size, longest)
            for w in range(GROUP):
                tau[w] = size * dt[start + min(w, many - 1)] / 2.0**doublings
            for i in range(n):
                for e in range(n):
                    for w in range(GROUP):
                        E[i, e, w] = V[i, e, w] = 0.0
                    for term in range(terms, -1, -1):
                        p, m = powers[term, i, e], moments[term, i, e]
                        for w in range(GROUP):
                            E[i, e, w] = (E[i, e, w] + p) * tau[w]
                            V[i, e, w] = (V[i, e, w] + m) * tau[w]
            for _ in range(doublings):
                # V <- F V F^T + V, then E <- 2 E + E E, where F = I + E
                _multiply(E, V, X, n)
                for i in range(n):
                    for e in range(n):
                        for w in range(GROUP):
                            X[i, e, w] += V[i, e, w]  # F V
                for i in range(n):
                    for e in range(n):
                        for w in range(GROUP):
                            Y[e, i, w] = E[i, e, w]
                for i in range(n):
                    for e in range(n):
                        for w in range(GROUP):
                            V[i, e, w] += X[i, e, w]
                        for h in range(n):
                            for w in range(GROUP):
                                V[i, e, w] += X[i, h, w] * Y[h, e, w]
                _multiply(E, E, X, n)
                for i in range(n):
                    for e in range(n):
                        for w in range(GROUP):
                            E[i, e, w] = 2 * E[i, e, w] + X[i, e, w]
            for w in range(many):
                F[start + w, j] = 0.0
                Q[start + w, j] = 0.0
                for i in range(s):
                    F[start + w, j, i, i] = 1.0
                for i in range(n):
                    for e in range(n):
                        F[start + w, j, active[i], active[e]] += E[i, e, w]
                        Q[start + w, j, active[i], active[e]] = (V[i, e, w] + V[e, i, w]) / 2


def _chains(rate: Any, dt: Any, P: Any) -> None:
    """Write the transition matrix of every step; rows of the exponent are kept at sum zero."""
    k = rate.shape[0]
    powers = numpy.empty((TERMS, k, k))
    E, X = numpy.empty((k, k, GROUP)), numpy.empty((k, k, GROUP))
    tau = numpy.empty(GROUP)
    size = 0.0
    for i in range(k):
        size = max(size, numpy.abs(rate[i]).sum())
    size = size if size > 0 else 1.0
    for i in range(k):
        for e in range(k):
            powers[0, i, e] = rate[i, e] / size
        powers[0, i, i] -= rate[i].sum() / size
    for term in range(1, TERMS):
        for i in range(k):
            for e in range(k):
                p = 0.0
                for h in range(k):
                    p += powers[0, i, h] * powers[term - 1, h, e]
                powers[term, i, e] = p / (term + 1)
    for start in range(0, dt.shape[0], GROUP):
        many = min(GROUP, dt.shape[0] - start)
        longest = 0.0
        for w in range(many):
            longest = max(longest, abs(dt[start + w]))
        doublings = _doublings(size, longest)
        for w in range(GROUP):
            tau[w] = size * dt[start + min(w, many - 1)] / 2.0**doublings
        for i in range(k):
            for e in range(k):
                for w in range(GROUP):
                    E[i, e, w] = 0.0
                for term in range(TERMS - 1, -1, -1):
                    p = powers[term, i, e]
                    for w in range(GROUP):
                        E[i, e, w] = (E[i, e, w] + p) * tau[w]
        for _ in range(doublings):
            _multiply(E, E, X, k)
            for i in range(k):
                for e in range(k):
                    for w in range(GROUP):
                        E[i, e, w] = 2 * E[i, e, w] + X[i, e, w]
                for w in range(GROUP):
                    total = 0.0
                    for e in range(k):
                        total += E[i, e, w]
                    E[i, i, w] -= total
        for w in range(many):
            for i in range(k):
                total = 0.0
                for e in range(k):
                    p = max(E[i, e, w] + (1.0 if i == e else 0.0), 0.0)
                    P[start + w, i, e] = p
                    total += p
                for e in range(k):
                    P[start + w, i, e] /= total
