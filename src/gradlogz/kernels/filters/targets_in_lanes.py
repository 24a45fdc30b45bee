"""Steps of switching filters for numba: the lanes of a vector are targets, and formulas read as for one target.

    advance_imm, advance_gpb1, advance_gpb     one transition and one observation, in parallel form
    combine, put                               combined fields of a step, and output to the rows of its targets
    filter_block                               all steps of the targets of one vector

Arrays are addresses of vectors (lanes.py). `zero` has their width and `model` the width of the model fields: one lane
if targets share a model, else all lanes. Covariances are stored in full and computed by lower triangles.

The computation is that of ../../filters/gaussian/switching.py, term by term: log weights, Joseph's form, columns of
weight 0. At the first number that is not finite (no density, or density 0 under a mode) the kernel returns False, and
the caller uses the torch path.

Read next: cpu.py (the caller).
"""

import math
from typing import Any, NamedTuple

from ..simd import read_integer
from ..workers import compiled
from .fields import BEFORE, BEFORE_TOGETHER, COVARIANCE, INNOVATION, MEAN, MODES
from .lanes import (
    all_between,
    exp,
    gather,
    gather_bytes,
    lanes,
    larger,
    load,
    log,
    named,
    number,
    size,
    size_of,
    spread,
    store,
    where_positive,
    where_possible,
)

Vector = Any  # one number for each target (lanes.py)
Size = Any  # an integer, or a compile-time constant (lanes.py)
LOG_2_PI = math.log(2 * math.pi)
LEAST, MOST = 1e-30, 1e30  # total weights in this range are summed directly, others in the log domain
FINITE = 3e38


class FilterProblem(NamedTuple):
    """Addresses and sizes of a problem."""

    fields: int  # address of the table of inputs; `results`: of reported fields and final state (cpu.py)
    results: int
    written: int  # base address of results that share one buffer; 0 if addresses are absolute
    start_log_likelihood: int
    observed: int  # address of the mask; 0 if all are observed
    observed_row: int
    targets: int
    steps: int
    first_reported: int
    modes: int
    state: int
    observation: int
    histories: int  # initial number of histories
    most: int  # largest number of histories
    reported: int  # number of reported fields
    combined: int  # number of these, the first ones, that combine all modes
    needs: int  # bits of MEAN, COVARIANCE, ... for these


class Field(NamedTuple):
    """A tensor whose rows are read into lanes."""

    address: int
    row: int  # bytes from target to target
    apart: int  # bytes from lane to lane
    time: int  # bytes from step to step
    each: int  # bytes from item to item
    items: int
    place: int  # offset in the memory of a thread


class Result(NamedTuple):
    """A tensor whose rows are written from lanes."""

    address: int
    row: int  # bytes of one step of one target
    items: int
    apart: int  # bytes from lane to lane
    even: int  # offset in the memory of a thread after even steps
    odd: int  # and after odd steps


class Memory(NamedTuple):
    """Addresses of the arrays of vectors of a step, including the model at that step."""

    m: int
    P: int
    log_h: int
    h: int  # exp log_h
    new_m: int
    new_P: int
    new_log_h: int
    mixed_m: int
    mixed_P: int
    predicted_m: int  # mode by mode, before the observation
    predicted_P: int
    expected: int
    S: int
    log_c: int
    c: int
    likelihood: int  # log p(y | mode)
    mode_m: int  # mode by mode, after the observation
    mode_P: int
    log_pi: int
    pi: int
    branch_m: int  # histories that differ only in their oldest mode
    branch_P: int
    branch_expected: int
    branch_S: int
    branch_likelihood: int
    column: int
    weight: int
    share: int
    prior_share: int
    y: int
    observed: int
    T: int
    F: int
    Q: int
    H: int
    R: int
    b: int
    d: int
    A: int
    B: int
    HP: int
    W: int
    z: int
    D: int
    K: int
    apart: int
    combined_m: int
    combined_P: int
    combined_predicted_m: int
    combined_predicted_P: int
    innovation: int
    combined_S: int
    step: int
    ones: int
    real: int  # 1 for lanes that hold a mode, 0 for padding


def vectors_of(modes: int, state: int, observation: int, most: int) -> tuple[int, ...]:
    """Number of vectors of each array of `Memory`."""
    k, s, o, g = modes, state, observation, max(modes, most)
    counts = {
        "m": g * s,
        "P": g * s * s,
        "log_h": g,
        "h": g,
        "mixed_m": s,
        "mixed_P": s * s,
        "predicted_m": k * s,
        "predicted_P": k * s * s,
        "expected": k * o,
        "S": k * o * o,
        "mode_m": k * s,
        "mode_P": k * s * s,
        "branch_m": k * s,
        "branch_P": k * s * s,
        "branch_expected": o,
        "branch_S": o * o,
        "y": o,
        "observed": o,
        "T": k * k if k > 1 else g,  # if lanes are modes, one vector for each previous mode
        "F": k * s * s,
        "Q": k * s * s,
        "H": k * o * s,
        "R": k * o * o,
        "b": k * s,
        "d": k * o,
        "A": s * s,
        "B": max(s, o) * s,
        "HP": o * s,
        "W": o * s,
        "z": o,
        "D": o * o,
        "K": o * s,
        "apart": g * max(s, o),
        "combined_m": s,
        "combined_P": s * s,
        "combined_predicted_m": s,
        "combined_predicted_P": s * s,
        "innovation": o,
        "combined_S": o * o,
    }
    counts.update(new_m=counts["m"], new_P=counts["P"], new_log_h=g)
    return tuple(counts.get(name, g) for name in Memory._fields)


# ------------------------------------------------------------------------------------------------- the Kalman filter
@compiled
def predict(
    zero: Vector, model: Vector, m: int, P: int, F: int, Q: int, b: int, A: int, new_m: int, new_P: int, state: Size
) -> None:
    """Predict the state: m' = F m + b, P' = F P F^T + Q."""
    s = size(state)
    for i in range(s):
        total = load(zero, b, i)
        for n in range(s):
            total = total + load(model, F, i * s + n) * load(zero, m, n)
        store(total, new_m, i)
        for j in range(s):
            total = zero
            for n in range(s):
                total = total + load(model, F, i * s + n) * load(zero, P, n * s + j)
            store(total, A, i * s + j)
    for i in range(s):
        for j in range(i + 1):
            total = zero + load(model, Q, i * s + j)
            for n in range(s):
                total = total + load(zero, A, i * s + n) * load(model, F, j * s + n)
            store(total, new_P, i * s + j)
            store(total, new_P, j * s + i)


@compiled
def expect(
    zero: Vector,
    model: Vector,
    m: int,
    P: int,
    H: int,
    R: int,
    d: int,
    HP: int,
    expected: int,
    S: int,
    state: Size,
    observation: Size,
) -> None:
    """Predict the observation: H m + d, H P and S = H P H^T + R."""
    s, o = size(state), size(observation)
    for r in range(o):
        total = load(zero, d, r)
        for n in range(s):
            total = total + load(model, H, r * s + n) * load(zero, m, n)
        store(total, expected, r)
        for j in range(s):
            total = zero
            for n in range(s):
                total = total + load(model, H, r * s + n) * load(zero, P, n * s + j)
            store(total, HP, r * s + j)
    for r in range(o):
        for q in range(r + 1):
            total = zero + load(model, R, r * o + q)
            for n in range(s):
                total = total + load(zero, HP, r * s + n) * load(model, H, q * s + n)
            store(total, S, r * o + q)
            store(total, S, q * o + r)


@compiled
def update(
    zero: Vector,
    model: Vector,
    w: Memory,
    m: int,
    P: int,
    H: int,
    R: int,
    expected: int,
    S: int,
    new_m: int,
    new_P: int,
    state: Size,
    observation: Size,
) -> Vector:
    """Update to m + K v and Joseph's form of P, after `expect`; returns log N(v; 0, S)."""
    log_density = gain(zero, model, w, m, H, expected, S, new_m, state, observation)
    joseph(zero, model, w, P, R, new_P, state, observation)
    return log_density


@compiled
def gain(
    zero: Vector,
    model: Vector,
    w: Memory,
    m: int,
    H: int,
    expected: int,
    S: int,
    new_m: int,
    state: Size,
    observation: Size,
) -> Vector:
    """Update the mean to m + K v, and store K^T and A = I - K H; returns log N(v; 0, S).

    S = L D L^T with ones on the diagonal of L: W = L^-1 H P, z = L^-1 v, K^T = L^-T D^-1 W. Below the diagonal the
    array D holds the rest of S, above it L^T. A missing component has a row of the identity in S and zeros elsewhere.
    """
    s, o = size(state), size(observation)
    one = load(zero, w.ones, 0)
    count = zero
    for r in range(o):
        observed = load(zero, w.observed, r)
        count = count + observed
        store(observed * (load(zero, w.y, r) - load(zero, expected, r)), w.z, r)
        for n in range(s):
            store(observed * load(zero, w.HP, r * s + n), w.W, r * s + n)
        for q in range(r):
            store(observed * load(zero, w.observed, q) * load(zero, S, r * o + q), w.D, r * o + q)
        store(observed * load(zero, S, r * o + r) + (one - observed), w.D, r * o + r)
    square, log_det = zero, zero
    for c in range(o):
        pivot = load(zero, w.D, c * o + c)
        inverse = one / pivot
        log_det = log_det + log(pivot)
        z = load(zero, w.z, c)
        square = square + z * z * inverse
        for r in range(c + 1, o):
            below = load(zero, w.D, r * o + c) * inverse
            store(below, w.D, c * o + r)
            for q in range(c + 1, r + 1):
                rest = load(zero, w.D, r * o + q) - below * load(zero, w.D, q * o + c)
                store(rest, w.D, r * o + q)
            store(load(zero, w.z, r) - below * z, w.z, r)
            for n in range(s):
                store(load(zero, w.W, r * s + n) - below * load(zero, w.W, c * s + n), w.W, r * s + n)
        store(z * inverse, w.z, c)
        for n in range(s):
            store(load(zero, w.W, c * s + n) * inverse, w.K, c * s + n)
    # m' = m + W^T D^-1 z, with W not yet divided by D
    for n in range(s):
        total = load(zero, m, n)
        for r in range(o):
            total = total + load(zero, w.W, r * s + n) * load(zero, w.z, r)
        store(total, new_m, n)
    for c in range(1, o):
        r = o - 1 - c
        for n in range(s):
            total = load(zero, w.K, r * s + n)
            for q in range(r + 1, o):
                total = total - load(zero, w.D, r * o + q) * load(zero, w.K, q * s + n)
            store(total, w.K, r * s + n)
    for i in range(s):
        for j in range(s):
            total = one if i == j else zero
            for r in range(o):
                total = total - load(zero, w.K, r * s + i) * load(model, H, r * s + j)
            store(total, w.A, i * s + j)
    return number(zero, -0.5) * (square + count * number(zero, LOG_2_PI) + log_det)


@compiled
def joseph(zero: Vector, model: Vector, w: Memory, P: int, R: int, new_P: int, state: Size, observation: Size) -> None:
    """Joseph's form P' = A P A^T + K R K^T, after `gain`."""
    s, o = size(state), size(observation)
    for i in range(s):
        for j in range(s):
            total = zero
            for n in range(s):
                total = total + load(zero, w.A, i * s + n) * load(zero, P, n * s + j)
            store(total, w.B, i * s + j)
    for i in range(s):
        for j in range(i + 1):
            total = zero
            for n in range(s):
                total = total + load(zero, w.B, i * s + n) * load(zero, w.A, j * s + n)
            store(total, new_P, i * s + j)
    for r in range(o):
        for i in range(s):
            total = zero
            for q in range(o):
                total = total + load(model, R, r * o + q) * load(zero, w.K, q * s + i)
            store(total, w.B, r * s + i)
    for i in range(s):
        for j in range(i + 1):
            total = load(zero, new_P, i * s + j)
            for r in range(o):
                total = total + load(zero, w.B, r * s + i) * load(zero, w.K, r * s + j)
            store(total, new_P, i * s + j)
            store(total, new_P, j * s + i)


# --------------------------------------------------------------------------------------- weights and moment matching
@compiled
def weigh(zero: Vector, weight: int, a: int, items: int, share: int) -> Vector:
    """Store the shares of log sum_i w_i exp a_i, and return the sum.

    With total weight 0 the sum is -inf and the shares are those of exp a_i, uniform if these are all 0.
    """
    never = number(zero, -math.inf)
    one = number(zero, 1.0)
    top, any_top = never, never
    for i in range(items):
        x = load(zero, a, i)
        any_top = larger(any_top, x)
        top = larger(top, where_positive(load(zero, weight, i), x, never))
    reference = where_possible(top, top, where_possible(any_top, any_top, zero))
    total = zero
    for i in range(items):
        x = where_possible(any_top, load(zero, a, i), zero) - reference
        mass = where_possible(top, load(zero, weight, i), one)
        mass = where_positive(mass, mass * exp(x), zero)
        store(mass, share, i)
        total = total + mass
    inverse = one / total
    for i in range(items):
        store(load(zero, share, i) * inverse, share, i)
    return where_possible(top, top + log(total), never)


@compiled
def weigh_column(zero: Vector, model: Vector, w: Memory, j: int, k: int, items: int) -> None:
    """Store log c_j, c_j and the shares T_ij pi_i / c_j of histories i, whose newest mode is i modulo k."""
    total = zero
    for i in range(items):
        mass = load(model, w.T, (i % k) * k + j) * load(zero, w.h, i)
        store(mass, w.prior_share, i)
        total = total + mass
    if all_between(total, LEAST, MOST):
        inverse = load(zero, w.ones, 0) / total
        for i in range(items):
            store(load(zero, w.prior_share, i) * inverse, w.prior_share, i)
        store(log(total), w.log_c, j)
        store(total, w.c, j)
    else:
        for i in range(items):
            store(zero + load(model, w.T, (i % k) * k + j), w.column, i)
        log_c = weigh(zero, w.column, w.log_h, items, w.prior_share)
        store(log_c, w.log_c, j)
        store(exp(log_c), w.c, j)


@compiled
def collapse(
    zero: Vector, share: int, items: int, step: int, m: int, P: int, apart: int, new_m: int, new_P: int, state: Size
) -> None:
    """Collapse every `step`-th Gaussian: m = sum_i r_i m_i, P = sum_i r_i (P_i + (m_i - m)(m_i - m)^T)."""
    average(zero, share, items, step, m, apart, new_m, state)
    scatter(zero, share, items, step, P, apart, new_P, state)


@compiled
def average(zero: Vector, share: int, items: int, step: int, m: int, apart: int, new_m: int, state: Size) -> None:
    """Mean of a collapse, and the deviations from it."""
    s = size(state)
    for a in range(s):
        total = zero
        for i in range(items):
            total = total + load(zero, share, i) * load(zero, m, i * step * s + a)
        store(total, new_m, a)
        for i in range(items):
            store(load(zero, m, i * step * s + a) - total, apart, i * s + a)


@compiled
def scatter(zero: Vector, share: int, items: int, step: int, P: int, apart: int, new_P: int, state: Size) -> None:
    """Covariance of a collapse, from the deviations of `average`."""
    s = size(state)
    for a in range(s):
        for c in range(a + 1):
            total = zero
            for i in range(items):
                inside = load(zero, P, (i * step * s + a) * s + c)
                inside = inside + load(zero, apart, i * s + a) * load(zero, apart, i * s + c)
                total = total + load(zero, share, i) * inside
            store(total, new_P, a * s + c)
            store(total, new_P, c * s + a)


@compiled
def normalize(zero: Vector, a: int, items: int, b: int, p: FilterProblem) -> Vector:
    """Store b = a - log sum exp a and p = exp b; returns the log sum."""
    top = load(zero, a, 0)
    for i in range(1, items):
        top = larger(top, load(zero, a, i))
    total = zero
    for i in range(items):
        mass = exp(load(zero, a, i) - top)
        store(mass, p, i)
        total = total + mass
    log_total = log(total)
    inverse = number(zero, 1.0) / total
    for i in range(items):
        store(load(zero, a, i) - top - log_total, b, i)
        store(load(zero, p, i) * inverse, p, i)
    return top + log_total


# ----------------------------------------- the filters in parallel form: mix, predict, update, collapse
@compiled
def advance_imm(
    zero: Vector,
    model: Vector,
    state: Size,
    observation: Size,
    w: Memory,
    p: FilterProblem,
    histories: int,  # noqa: ARG001
    needs: int,  # noqa: ARG001
) -> Vector:
    """One step of imm; returns log p(y | past), NaN if a density is not finite.   [theory 7.3]"""
    k, s, o = p.modes, size(state), size(observation)
    vector, single = size_of(zero), size_of(model)
    for j in range(k):
        F, Q = w.F + j * s * s * single, w.Q + j * s * s * single
        H, R = w.H + j * o * s * single, w.R + j * o * o * single
        m, P = w.predicted_m + j * s * vector, w.predicted_P + j * s * s * vector
        expected, S = w.expected + j * o * vector, w.S + j * o * o * vector
        new_m, new_P = w.new_m + j * s * vector, w.new_P + j * s * s * vector
        # Mix: the modes that may precede mode j ----------------------------------------------------------------------
        weigh_column(zero, model, w, j, k, k)
        collapse(zero, w.prior_share, k, 1, w.m, w.P, w.apart, w.mixed_m, w.mixed_P, state)
        # Predict and update ------------------------------------------------------------------------------------------
        predict(zero, model, w.mixed_m, w.mixed_P, F, Q, w.b + j * s * vector, w.A, m, P, state)
        expect(zero, model, m, P, H, R, w.d + j * o * vector, w.HP, expected, S, state, observation)
        log_density = update(zero, model, w, m, P, H, R, expected, S, new_m, new_P, state, observation)
        if not all_between(log_density, -FINITE, FINITE):
            return number(zero, math.nan)
        store(log_density, w.likelihood, j)
        store(log_density + load(zero, w.log_c, j), w.weight, j)
    # Collapse: nothing -----------------------------------------------------------------------------------------------
    return normalize(zero, w.weight, k, w.log_h, w.h)


@compiled
def advance_gpb1(
    zero: Vector,
    model: Vector,
    state: Size,
    observation: Size,
    w: Memory,
    p: FilterProblem,
    histories: int,  # noqa: ARG001
    needs: int,  # noqa: ARG001
) -> Vector:
    """One step of gpb1; returns log p(y | past), NaN if a density is not finite.   [theory 7.1]"""
    k, s, o = p.modes, size(state), size(observation)
    vector, single = size_of(zero), size_of(model)
    for j in range(k):
        F, Q = w.F + j * s * s * single, w.Q + j * s * s * single
        H, R = w.H + j * o * s * single, w.R + j * o * o * single
        m, P = w.predicted_m + j * s * vector, w.predicted_P + j * s * s * vector
        expected, S = w.expected + j * o * vector, w.S + j * o * o * vector
        # Mix: nothing, there is one Gaussian -------------------------------------------------------------------------
        weigh_column(zero, model, w, j, k, k)
        # Predict and update ------------------------------------------------------------------------------------------
        predict(zero, model, w.m, w.P, F, Q, w.b + j * s * vector, w.A, m, P, state)
        expect(zero, model, m, P, H, R, w.d + j * o * vector, w.HP, expected, S, state, observation)
        mode_m, mode_P = w.mode_m + j * s * vector, w.mode_P + j * s * s * vector
        log_density = update(zero, model, w, m, P, H, R, expected, S, mode_m, mode_P, state, observation)
        if not all_between(log_density, -FINITE, FINITE):
            return number(zero, math.nan)
        store(log_density, w.likelihood, j)
        store(log_density + load(zero, w.log_c, j), w.weight, j)
    # Collapse: all modes to one --------------------------------------------------------------------------------------
    step = normalize(zero, w.weight, k, w.log_h, w.h)
    collapse(zero, w.h, k, 1, w.mode_m, w.mode_P, w.apart, w.new_m, w.new_P, state)
    return step


@compiled
def advance_gpb(
    zero: Vector, model: Vector, state: Size, observation: Size, w: Memory, p: FilterProblem, histories: int, needs: int
) -> Vector:
    """One step of gpb; returns log p(y | past), NaN if a density is not finite.   [theory 7.2]"""
    k, s, o = p.modes, size(state), size(observation)
    vector, single = size_of(zero), size_of(model)
    oldest = k if histories * k > p.most else 1
    rests = histories // oldest  # histories without their oldest mode
    for j in range(k):
        F, Q, b = w.F + j * s * s * single, w.Q + j * s * s * single, w.b + j * s * vector
        H, R, d = w.H + j * o * s * single, w.R + j * o * o * single, w.d + j * o * vector
        # Mix: nothing; the mixture is computed only to report the prediction of each mode ----------------------------
        if needs & BEFORE:
            m, P = w.predicted_m + j * s * vector, w.predicted_P + j * s * s * vector
            weigh_column(zero, model, w, j, k, histories)
            collapse(zero, w.prior_share, histories, 1, w.m, w.P, w.apart, w.mixed_m, w.mixed_P, state)
            predict(zero, model, w.mixed_m, w.mixed_P, F, Q, b, w.A, m, P, state)
            expect(
                zero,
                model,
                m,
                P,
                H,
                R,
                d,
                w.HP,
                w.expected + j * o * vector,
                w.S + j * o * o * vector,
                state,
                observation,
            )
        for rest in range(rests):
            # Predict and update: all histories that collapse to one --------------------------------------------------
            for i in range(oldest):
                history = i * rests + rest
                m, P = w.m + history * s * vector, w.P + history * s * s * vector
                new_m, new_P = w.branch_m + i * s * vector, w.branch_P + i * s * s * vector
                predict(zero, model, m, P, F, Q, b, w.A, w.mixed_m, w.mixed_P, state)
                expect(
                    zero, model, w.mixed_m, w.mixed_P, H, R, d, w.HP, w.branch_expected, w.branch_S, state, observation
                )
                log_density = update(
                    zero,
                    model,
                    w,
                    w.mixed_m,
                    w.mixed_P,
                    H,
                    R,
                    w.branch_expected,
                    w.branch_S,
                    new_m,
                    new_P,
                    state,
                    observation,
                )
                if not all_between(log_density, -FINITE, FINITE):
                    return number(zero, math.nan)
                store(log_density, w.branch_likelihood, history)
                store(log_density + load(zero, w.log_h, history), w.weight, i)
                store(zero + load(model, w.T, (history % k) * k + j), w.column, i)
            # Collapse: the oldest mode, with weights that include the observation ------------------------------------
            slot = rest * k + j
            store(weigh(zero, w.column, w.weight, oldest, w.share), w.new_log_h, slot)
            new_m, new_P = w.new_m + slot * s * vector, w.new_P + slot * s * s * vector
            collapse(zero, w.share, oldest, 1, w.branch_m, w.branch_P, w.apart, new_m, new_P, state)
        if needs & BEFORE:
            # Sum in the log domain: histories that only this observation makes likely have prior shares that
            # underflow. A mode of probability 0 gets the value of its hypothetical shares.
            for rest in range(rests):
                store(load(zero, w.ones, 0), w.column, rest)
                store(load(zero, w.new_log_h, rest * k + j), w.weight, rest)
            joint = weigh(zero, w.column, w.weight, rests, w.share)
            without = weigh(zero, w.prior_share, w.branch_likelihood, histories, w.share)
            log_c = load(zero, w.log_c, j)
            store(where_possible(log_c, joint - log_c, without), w.likelihood, j)
    step = normalize(zero, w.new_log_h, rests * k, w.log_h, w.h)
    if needs & MODES and p.most > k:
        to_modes(zero, state, w, p, rests)
    return step


@compiled
def to_modes(zero: Vector, state: Size, w: Memory, p: FilterProblem, rests: int) -> None:
    """Collapse the histories of each mode."""
    k, s, vector = p.modes, size(state), size_of(zero)
    for rest in range(rests):
        store(load(zero, w.ones, 0), w.prior_share, rest)
    for j in range(k):
        for rest in range(rests):
            store(load(zero, w.log_h, rest * k + j), w.weight, rest)
        log_pi = weigh(zero, w.prior_share, w.weight, rests, w.share)
        store(log_pi, w.log_pi, j)
        store(exp(log_pi), w.pi, j)
        m, P = w.new_m + j * s * vector, w.new_P + j * s * s * vector
        new_m, new_P = w.mode_m + j * s * vector, w.mode_P + j * s * s * vector
        collapse(zero, w.share, rests, k, m, P, w.apart, new_m, new_P, state)


# ------------------------------------------------------------------------------------------------ from and to tensors
MODEL, CHANGING, INITIAL = (0, 5), (5, 8), (8, 11)  # T, F, Q, H, R; b, d, y; mean, covariance, log probability
ENDS = 4
FIELD_BYTES, RESULT_BYTES = 8 * len(Field._fields), 8 * len(Result._fields)


@compiled
def fetch(zero: Vector, table: int, chosen: tuple[int, int], base: int, time: int, first: int, count: int) -> None:
    """Load the fields of the targets from `first` on, at the first step or if they vary with time."""
    for f in range(chosen[0], chosen[1]):
        entry = table + f * FIELD_BYTES
        step = read_integer(entry, 3)
        if time == 0 or step != 0:
            start = read_integer(entry, 0) + first * read_integer(entry, 1) + time * step
            apart, each, place = read_integer(entry, 2), read_integer(entry, 4), base + read_integer(entry, 6)
            for i in range(read_integer(entry, 5)):
                store(gather(zero, start + i * each, apart, count), place, i)


@compiled
def put(zero: Vector, table: int, results: int, written: int, base: int, is_odd: bool, entry: int, count: int) -> None:
    """Write results to rows of tensors [targets, times, items]; `entry` is the index of the first row."""
    for f in range(results):
        at = table + f * RESULT_BYTES
        source = base + read_integer(at, 5 if is_odd else 4)
        start = written + read_integer(at, 0) + entry * read_integer(at, 1)
        spread(zero, source, read_integer(at, 2), start, read_integer(at, 3), count)


@compiled
def combine(zero: Vector, state: Size, observation: Size, w: Memory, p: FilterProblem, log_density: Vector) -> None:
    """Compute the fields of all modes combined, and the innovations."""
    k, o = p.modes, size(observation)
    if p.needs & MEAN:
        average(zero, w.pi, k, 1, w.mode_m, w.apart, w.combined_m, state)
    if p.needs & COVARIANCE:
        scatter(zero, w.pi, k, 1, w.mode_P, w.apart, w.combined_P, state)
    if p.needs & BEFORE_TOGETHER:
        m, P = w.combined_predicted_m, w.combined_predicted_P
        collapse(zero, w.c, k, 1, w.predicted_m, w.predicted_P, w.apart, m, P, state)
    if p.needs & INNOVATION:
        collapse(zero, w.c, k, 1, w.expected, w.S, w.apart, w.innovation, w.combined_S, observation)
        unknown = number(zero, math.nan)
        for r in range(o):
            y = where_positive(load(zero, w.observed, r), load(zero, w.y, r), unknown)
            store(y - load(zero, w.innovation, r), w.innovation, r)
            for j in range(k):
                store(y - load(zero, w.expected, j * o + r), w.expected, j * o + r)
    store(log_density, w.step, 0)


@compiled
def begin(zero: Vector, w: Memory, p: FilterProblem) -> None:
    """Initialise the remaining arrays at time 0."""
    for i in range(p.histories):
        store(exp(load(zero, w.log_h, i)), w.h, i)
    one = number(zero, 1.0)
    store(one, w.ones, 0)
    for r in range(p.observation):
        store(one, w.observed, r)


def block_of(advance: Any) -> Any:
    """Compiled function for all steps of the targets of one vector; it returns True if every number was finite."""

    def filter_block(
        zero: Vector,
        model: Vector,
        state: Size,
        observation: Size,
        p: FilterProblem,
        task: int,
        base: int,
        even: Memory,
        odd: Memory,
    ) -> bool:
        first = task * lanes(zero)
        count = min(lanes(zero), p.targets - first)
        single = size_of(zero) // lanes(zero)
        o, histories = p.observation, p.histories
        fetch(zero, p.fields, INITIAL, base, 0, first, count)
        begin(zero, even, p)
        total = gather(zero, p.start_log_likelihood + first * single, single, count)
        for time in range(p.steps):
            w = even if time % 2 == 0 else odd
            is_reported = time >= p.first_reported
            fetch(model, p.fields, MODEL, base, time, first, count)
            fetch(zero, p.fields, CHANGING, base, time, first, count)
            if p.observed != 0:
                for r in range(o):
                    there = p.observed + first * p.observed_row + time * o + r
                    store(gather_bytes(zero, there, p.observed_row, count), w.observed, r)
            log_density = advance(zero, model, state, observation, w, p, histories, p.needs if is_reported else 0)
            if not all_between(log_density, -FINITE, FINITE):
                return False
            total = total + log_density
            histories = min(histories * p.modes, max(p.most, p.modes))
            if is_reported:
                combine(zero, state, observation, w, p, log_density)
                entry = first * (p.steps - p.first_reported) + time - p.first_reported
                put(zero, p.results, p.reported, p.written, base, time % 2 == 1, entry, count)
        store(total, even.step, 0)
        put(zero, p.results + p.reported * RESULT_BYTES, ENDS, p.written, base, False, first, count)
        return True

    return compiled(named(filter_block, advance.__name__))
