"""Backward pass of the smoothers "imm" and "gpb2" for numba: the lanes of a vector are targets.

    pair           move mode i by mode j, condition on y_t, transfer the message of j to this pair
    step_back      all pairs of one step; results of time t, and the messages to time t - 1
    smooth_block   all steps of the targets of one vector, from the last to the first

The computation is that of ../../filters/gaussian/backward_messages.py, in its letters; the Kalman filter and the
weights are the functions of targets_in_lanes.py. With one mode nothing is transferred or collapsed, and the arrays of
pairs are those of the mode (`ONE_MODE`). At the first number that is not finite the kernel returns False, and the
caller uses the torch path.

Read next: backward.py (the caller).
"""

from typing import NamedTuple

from ..workers import compiled
from .lanes import (
    all_between,
    exp,
    gather_bytes,
    lanes,
    larger,
    load,
    log,
    number,
    size,
    size_of,
    store,
    where_positive,
)
from .targets_in_lanes import (
    CHANGING,
    FINITE,
    INITIAL,
    MODEL,
    RESULT_BYTES,
    Size,
    Vector,
    average,
    expect,
    fetch,
    gain,
    joseph,
    normalize,
    predict,
    put,
    scatter,
    weigh,
)

FILTERED = (11, 14)  # mean, covariance and log probability of each mode, filtered; entries of the table of fields
LEAST = 0.25  # share of the average information that the spread between modes must leave
ROUNDING = 1e-6  # of the average information, which may be singular
# Parts of the computation that requested fields need: moments of x_t given each mode, their combination, moments of
# x_{t-1} given the mode at t.
MODES, COMBINED, PREVIOUS = (1 << i for i in range(3))


# Arrays that share memory if there is one mode.
ONE_MODE = {
    "branch_m": "smoothed_m",
    "branch_P": "smoothed_P",
    "combined_m": "smoothed_m",
    "combined_P": "smoothed_P",
    "branch_previous_m": "previous_m",
    "branch_previous_P": "previous_P",
    "branch_lag": "previous_lag",
    "back_score": "score",
    "back_information": "information",
}


class BackwardProblem(NamedTuple):
    """Addresses and sizes of a problem."""

    fields: int  # address of the table of inputs; `results`: of reported fields and time 0 (backward.py)
    results: int
    observed: int  # address of the mask; 0 if all are observed
    observed_row: int
    targets: int
    steps: int
    modes: int
    state: int
    observation: int
    reported: int  # number of results that are written at every step
    ends: int  # number of results that are written after the first step
    needs: int  # bits of MODES, COMBINED, PREVIOUS for these


class SmoothingMemory(NamedTuple):
    """Addresses of the arrays of vectors of a step, including the model at that step."""

    m: int  # filtered at t - 1
    P: int
    log_h: int
    after_m: int  # filtered at t
    after_P: int
    evidence: int  # message of later observations to each mode at t: f, g, L and the average of L
    score: int
    information: int
    average: int
    pair_evidence: int  # and to each pair at t; `back`: to mode i at t - 1
    pair_score: int
    pair_information: int
    before_score: int  # to a pair before y_t
    before_information: int
    back_score: int
    back_information: int
    predicted_m: int
    predicted_P: int
    lag: int  # F P_i; `lag_after`: the same given y_t
    lag_after: int
    filtered_m: int
    filtered_P: int
    SH: int  # S^-1 H
    y_score: int  # H^T S^-1 v and H^T S^-1 H
    y_information: int
    system: int  # A = I - L D, beside L and r
    branch_m: int  # smoothed pairs of one j
    branch_P: int
    branch_previous_m: int
    branch_previous_P: int
    branch_lag: int
    smoothed_m: int
    smoothed_P: int
    previous_m: int
    previous_P: int
    previous_lag: int
    combined_m: int
    combined_P: int
    log_sum: int
    log_pi: int
    pi: int
    log_pair: int
    initial_m: int
    initial_P: int
    column: int
    weight: int
    share: int
    apart: int
    apart_previous: int
    X: int
    Y: int
    expected: int
    S: int
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
    ones: int


def smoothing_vectors(modes: int, state: int, observation: int) -> tuple[int, ...]:
    """Number of vectors of each array of `SmoothingMemory`."""
    k, s, o = modes, state, observation
    counts = {
        "log_h": k,
        "evidence": k,
        "log_sum": k,
        "log_pi": k,
        "pi": k,
        "column": k,
        "weight": k,
        "share": k,
        "pair_evidence": k * k,
        "log_pair": k * k,
        "back_score": k * k * s,
        "back_information": k * k * s * s,
        "pair_score": s,
        "before_score": s,
        "predicted_m": s,
        "filtered_m": s,
        "y_score": s,
        "combined_m": s,
        "system": s * (2 * s + 1),
        "SH": o * s,
        "apart": k * s,
        "apart_previous": k * s,
        "expected": o,
        "S": o * o,
        "y": o,
        "observed": o,
        "T": k * k,
        "H": k * o * s,
        "R": k * o * o,
        "d": k * o,
        "B": max(s, o) * s,
        "HP": o * s,
        "W": o * s,
        "z": o,
        "D": o * o,
        "K": o * s,
        "ones": 1,
    }
    square = (
        "pair_information",
        "before_information",
        "predicted_P",
        "lag",
        "lag_after",
        "filtered_P",
        "y_information",
        "combined_P",
    )
    counts.update(dict.fromkeys((*square, "X", "Y", "A"), s * s))
    of_modes = ("m", "after_m", "score", "branch_m", "branch_previous_m", "smoothed_m", "previous_m", "initial_m", "b")
    counts.update(dict.fromkeys(of_modes, k * s))
    return tuple(counts.get(name, k * s * s) for name in SmoothingMemory._fields)


# ------------------------------------------------------------------------------------------------ small matrices
@compiled
def times(zero: Vector, left: int, like: Vector, right: int, to: int, state: Size) -> None:
    """Product of two square matrices; `like` has the width of the right one."""
    s = size(state)
    for i in range(s):
        for j in range(s):
            total = zero
            for n in range(s):
                total = total + load(zero, left, i * s + n) * load(like, right, n * s + j)
            store(total, to, i * s + j)


@compiled
def subtract_product(zero: Vector, start: int, left: int, right: int, to: int, state: Size) -> None:
    """Store start - left^T right, a matrix."""
    s = size(state)
    for i in range(s):
        for j in range(s):
            total = load(zero, start, i * s + j)
            for n in range(s):
                total = total - load(zero, left, n * s + i) * load(zero, right, n * s + j)
            store(total, to, i * s + j)


@compiled
def subtract_square(zero: Vector, start: int, left: int, right: int, to: int, state: Size) -> None:
    """Store start - left^T right where this is symmetric."""
    s = size(state)
    for i in range(s):
        for j in range(i + 1):
            total = load(zero, start, i * s + j)
            for n in range(s):
                total = total - load(zero, left, n * s + i) * load(zero, right, n * s + j)
            store(total, to, i * s + j)
            store(total, to, j * s + i)


@compiled
def add_square(zero: Vector, start: int, like: Vector, left: int, right: int, to: int, state: Size) -> None:
    """Store start + left^T right where this is symmetric; `like` has the width of the left matrix."""
    s = size(state)
    for i in range(s):
        for j in range(i + 1):
            total = load(zero, start, i * s + j)
            for n in range(s):
                total = total + load(like, left, n * s + i) * load(zero, right, n * s + j)
            store(total, to, i * s + j)
            store(total, to, j * s + i)


@compiled
def add_times(zero: Vector, start: int, matrix: int, vector: int, to: int, state: Size) -> None:
    """Store start + matrix^T vector."""
    s = size(state)
    for i in range(s):
        total = load(zero, start, i)
        for n in range(s):
            total = total + load(zero, matrix, n * s + i) * load(zero, vector, n)
        store(total, to, i)


@compiled
def copy(zero: Vector, source: int, items: int, to: int) -> None:
    """Copy vectors."""
    for i in range(items):
        store(load(zero, source, i), to, i)


@compiled
def clear(zero: Vector, items: int, to: int) -> None:
    """Store zeros."""
    for i in range(items):
        store(zero, to, i)


# ----------------------------------------------------------------------------------------------------- messages
@compiled
def solve(zero: Vector, w: SmoothingMemory, X: int, columns: int, observation: Size) -> None:
    """Replace X by S^-1 X, with the factors L and D that `gain` leaves; X has one row for each observed component."""
    o = size(observation)
    for c in range(o):
        inverse = load(zero, w.ones, 0) / load(zero, w.D, c * o + c)
        for n in range(columns):
            row = load(zero, X, c * columns + n)
            for r in range(c + 1, o):
                store(load(zero, X, r * columns + n) - load(zero, w.D, c * o + r) * row, X, r * columns + n)
            store(row * inverse, X, c * columns + n)
    for c in range(1, o):
        r = o - 1 - c
        for q in range(r + 1, o):
            above = load(zero, w.D, r * o + q)
            for n in range(columns):
                store(load(zero, X, r * columns + n) - above * load(zero, X, q * columns + n), X, r * columns + n)


@compiled
def observation_message(
    zero: Vector, model: Vector, w: SmoothingMemory, H: int, state: Size, observation: Size
) -> None:
    """Message of y_t to the predicted state, H^T S^-1 v and H^T S^-1 H, from the factors that `gain` leaves.

    Also leaves S^-1 v in z and S^-1 H in SH.
    """
    s, o = size(state), size(observation)
    for r in range(o):
        observed = load(zero, w.observed, r)
        for n in range(s):
            store(observed * load(model, H, r * s + n), w.SH, r * s + n)
    solve(zero, w, w.SH, s, observation)
    for c in range(1, o):
        r = o - 1 - c
        for q in range(r + 1, o):
            store(load(zero, w.z, r) - load(zero, w.D, r * o + q) * load(zero, w.z, q), w.z, r)
    for i in range(s):
        total = zero
        for r in range(o):
            total = total + load(model, H, r * s + i) * load(zero, w.z, r)
        store(total, w.y_score, i)
        for j in range(i + 1):
            total = zero
            for r in range(o):
                # H^T times its mask: an unobserved row of S^-1 H is 0.
                total = total + load(model, H, r * s + i) * load(zero, w.SH, r * s + j)
            store(total, w.y_information, i * s + j)
            store(total, w.y_information, j * s + i)


@compiled
def make_proper(zero: Vector, w: SmoothingMemory, P: int, information: int, mean: int, state: Size) -> None:
    """Limit the spread of scores so that the information L keeps a quarter of its average M over the next modes.

    L = M - t spread, with t = 1 / max(1, trace B^-1 spread) and B = 3/4 M + 1e-6 diag M, without components of variance
    0. The trace is the sum of spread_cc / B_cc while both are reduced by the same eliminations, from both sides.
    """
    s = size(state)
    one = load(zero, w.ones, 0)
    for i in range(s):
        variance, M = load(zero, P, i * s + i), load(zero, mean, i * s + i)
        for j in range(i + 1):
            both = where_positive(load(zero, P, j * s + j), variance, zero)
            M_ij = load(zero, mean, i * s + j)
            store(where_positive(both, M_ij - load(zero, information, i * s + j), zero), w.X, i * s + j)
            store(where_positive(both, number(zero, 1 - LEAST) * M_ij, zero), w.Y, i * s + j)
        slack = number(zero, ROUNDING) * M
        is_counted = where_positive(variance, M, zero)
        store(where_positive(is_counted, load(zero, w.Y, i * s + i) + slack, one), w.Y, i * s + i)
    trace = zero
    for c in range(s):
        inverse = one / load(zero, w.Y, c * s + c)
        corner = load(zero, w.X, c * s + c)
        trace = trace + corner * inverse
        for r in range(c + 1, s):
            row = load(zero, w.Y, r * s + c) * inverse
            beside = load(zero, w.X, r * s + c) - row * corner
            for q in range(c + 1, r + 1):
                column = load(zero, w.Y, q * s + c)
                store(load(zero, w.Y, r * s + q) - row * column, w.Y, r * s + q)
                rest = load(zero, w.X, r * s + q) - row * load(zero, w.X, q * s + c) - column * inverse * beside
                store(rest, w.X, r * s + q)
    share = one / larger(one, trace)
    for i in range(s * s):
        M, L = load(zero, mean, i), load(zero, information, i)
        # With t = 1 the information stays as it is: M - spread would round.
        store(where_positive(trace - one, M - share * (M - L), L), information, i)


@compiled
def transfer(zero: Vector, w: SmoothingMemory, score: int, information: int, m: int, P: int, state: Size) -> Vector:
    """Transfer the message g, L from N(m, P) to the filtered pair; returns the change of log evidence.

    Solves (I - L D) (L', g') = (L, r) by elimination with the largest pivot of each lane.
    """
    s = size(state)
    one, half = load(zero, w.ones, 0), number(zero, 0.5)
    width = 2 * s + 1
    for i in range(s * s):
        store(load(zero, P, i) - load(zero, w.filtered_P, i), w.X, i)
    for i in range(s):
        store(load(zero, w.filtered_m, i) - load(zero, m, i), w.Y, i)
    change = zero
    for i in range(s):
        Ld = zero
        for n in range(s):
            Ld = Ld + load(zero, information, i * s + n) * load(zero, w.Y, n)
        g, d = load(zero, score, i), load(zero, w.Y, i)
        change = change + g * d - half * d * Ld
        store(g - Ld, w.system, i * width + 2 * s)
        store(g - Ld, w.pair_score, i)
        for j in range(s):
            store(load(zero, information, i * s + j), w.system, i * width + s + j)
            total = one if i == j else zero
            for n in range(s):
                total = total - load(zero, information, i * s + n) * load(zero, w.X, n * s + j)
            store(total, w.system, i * width + j)
    for c in range(s):
        for r in range(c + 1, s):
            top, low = load(zero, w.system, c * width + c), load(zero, w.system, r * width + c)
            is_larger = low * low - top * top
            for n in range(c, width):
                x, y = load(zero, w.system, c * width + n), load(zero, w.system, r * width + n)
                store(where_positive(is_larger, y, x), w.system, c * width + n)
                store(where_positive(is_larger, x, y), w.system, r * width + n)
        pivot = load(zero, w.system, c * width + c)
        inverse = one / pivot
        change = change - half * log(larger(pivot, zero - pivot))
        for r in range(c + 1, s):
            below = load(zero, w.system, r * width + c) * inverse
            for n in range(c + 1, width):
                rest = load(zero, w.system, r * width + n) - below * load(zero, w.system, c * width + n)
                store(rest, w.system, r * width + n)
        for n in range(s, width):
            store(load(zero, w.system, c * width + n) * inverse, w.system, c * width + n)
        for n in range(c + 1, s):
            store(load(zero, w.system, c * width + n) * inverse, w.system, c * width + n)
    for c in range(1, s):
        r = s - 1 - c
        for q in range(r + 1, s):
            above = load(zero, w.system, r * width + q)
            for n in range(s, width):
                rest = load(zero, w.system, r * width + n) - above * load(zero, w.system, q * width + n)
                store(rest, w.system, r * width + n)
    for i in range(s):
        Dg = zero
        for n in range(s):
            Dg = Dg + load(zero, w.X, i * s + n) * load(zero, w.system, n * width + 2 * s)
        change = change - half * load(zero, w.pair_score, i) * Dg
        for j in range(i + 1):
            total = load(zero, w.system, i * width + s + j) + load(zero, w.system, j * width + s + i)
            store(half * total, w.pair_information, i * s + j)
            store(half * total, w.pair_information, j * s + i)
    for i in range(s):
        store(load(zero, w.system, i * width + 2 * s), w.pair_score, i)
    return change


@compiled
def pair(
    zero: Vector,
    model: Vector,
    state: Size,
    observation: Size,
    w: SmoothingMemory,
    p: BackwardProblem,
    i: int,
    j: int,
) -> Vector:
    """Smooth one pair of modes and send its message back; returns its log evidence."""
    k, s, o = p.modes, size(state), size(observation)
    vector, single = size_of(zero), size_of(model)
    F, Q = w.F + j * s * s * single, w.Q + j * s * s * single
    H, R = w.H + j * o * s * single, w.R + j * o * o * single
    b, d = w.b + j * s * vector, w.d + j * o * vector
    m, P = w.m + i * s * vector, w.P + i * s * s * vector
    # Move mode i by mode j, and condition both states on the observation -------------------------------------------
    predict(zero, model, m, P, F, Q, b, w.lag, w.predicted_m, w.predicted_P, state)
    expect(zero, model, w.predicted_m, w.predicted_P, H, R, d, w.HP, w.expected, w.S, state, observation)
    log_density = gain(zero, model, w, w.predicted_m, H, w.expected, w.S, w.filtered_m, state, observation)
    observation_message(zero, model, w, H, state, observation)
    # Transfer the message of the later observations ----------------------------------------------------------------
    score, information = w.score + j * s * vector, w.information + j * s * s * vector
    after_m, after_P = w.after_m + j * s * vector, w.after_P + j * s * s * vector
    evidence = log_density
    if k == 1:  # the filtered Gaussian of the mode is that of its only pair
        filtered_P = after_P
    else:
        filtered_P = w.filtered_P
        joseph(zero, model, w, w.predicted_P, R, filtered_P, state, observation)
        evidence = evidence + load(zero, w.evidence, j)
        evidence = evidence + transfer(zero, w, score, information, after_m, after_P, state)
        score, information = w.pair_score, w.pair_information
    # Smoothed moments of x_t and x_{t-1} ---------------------------------------------------------------------------
    if p.needs & MODES:
        to_m, to_P = w.branch_m + i * s * vector, w.branch_P + i * s * s * vector
        add_times(zero, w.filtered_m, filtered_P, score, to_m, state)
        times(zero, information, zero, filtered_P, w.X, state)
        subtract_square(zero, filtered_P, filtered_P, w.X, to_P, state)
    if p.needs & PREVIOUS:
        to_m, to_P = w.branch_previous_m + i * s * vector, w.branch_previous_P + i * s * s * vector
        add_times(zero, m, w.lag, w.y_score, to_m, state)
        times(zero, w.y_information, zero, w.lag, w.X, state)
        subtract_square(zero, P, w.lag, w.X, to_P, state)
        times(zero, w.A, zero, w.lag, w.lag_after, state)
        add_times(zero, to_m, w.lag_after, score, to_m, state)
        times(zero, information, zero, w.lag_after, w.X, state)
        subtract_square(zero, to_P, w.lag_after, w.X, to_P, state)
        subtract_product(zero, w.lag_after, filtered_P, w.X, w.branch_lag + i * s * s * vector, state)
    # Message to x_{t-1} --------------------------------------------------------------------------------------------
    back, back_L = w.back_score + (i * k + j) * s * vector, w.back_information + (i * k + j) * s * s * vector
    add_times(zero, w.y_score, w.A, score, w.before_score, state)
    times(zero, information, zero, w.A, w.X, state)
    add_square(zero, w.y_information, zero, w.A, w.X, w.before_information, state)
    times(zero, w.before_information, model, F, w.X, state)
    for a in range(s):
        total = zero
        for n in range(s):
            total = total + load(model, F, n * s + a) * load(zero, w.before_score, n)
        store(total, back, a)
    clear(zero, s * s, back_L)
    add_square(zero, back_L, model, F, w.X, back_L, state)
    return evidence


@compiled
def combine_pairs(zero: Vector, model: Vector, w: SmoothingMemory, p: BackwardProblem, j: int, state: Size) -> None:
    """Collapse the pairs i, j to one Gaussian of (x_t, x_{t-1}) for mode j, and store log sum_i T_ij pi_i exp f_ij."""
    k, s, vector = p.modes, size(state), size_of(zero)
    for i in range(k):
        mass = zero + load(model, w.T, i * k + j)
        joint = load(zero, w.log_h, i) + load(zero, w.pair_evidence, i * k + j)
        store(mass, w.column, i)
        store(joint, w.weight, i)
        store(log(mass) + joint, w.log_pair, i * k + j)
    store(weigh(zero, w.column, w.weight, k, w.share), w.log_sum, j)
    if p.needs & MODES:
        average(zero, w.share, k, 1, w.branch_m, w.apart, w.smoothed_m + j * s * vector, state)
        scatter(zero, w.share, k, 1, w.branch_P, w.apart, w.smoothed_P + j * s * s * vector, state)
    if p.needs & PREVIOUS:
        lag = w.previous_lag + j * s * s * vector
        average(zero, w.share, k, 1, w.branch_previous_m, w.apart_previous, w.previous_m + j * s * vector, state)
        scatter(zero, w.share, k, 1, w.branch_previous_P, w.apart_previous, w.previous_P + j * s * s * vector, state)
        for a in range(s):
            for c in range(s):
                total = zero
                for i in range(k):
                    inside = load(zero, w.apart, i * s + a) * load(zero, w.apart_previous, i * s + c)
                    inside = inside + load(zero, w.branch_lag, (i * s + a) * s + c)
                    total = total + load(zero, w.share, i) * inside
                store(total, lag, a * s + c)


@compiled
def propagate(zero: Vector, model: Vector, w: SmoothingMemory, p: BackwardProblem, i: int, state: Size) -> None:
    """Message to mode i at t - 1: the average over the next modes j, and the spread of their scores."""
    k, s, vector = p.modes, size(state), size_of(zero)
    for j in range(k):
        store(zero + load(model, w.T, i * k + j), w.column, j)
        store(load(zero, w.pair_evidence, i * k + j), w.weight, j)
    store(weigh(zero, w.column, w.weight, k, w.share), w.evidence, i)
    back, back_L = w.back_score + i * k * s * vector, w.back_information + i * k * s * s * vector
    mean, information = w.average + i * s * s * vector, w.information + i * s * s * vector
    average(zero, w.share, k, 1, back, w.apart, w.score + i * s * vector, state)
    for a in range(s):
        for c in range(a + 1):
            total, spread = zero, zero
            for j in range(k):
                share = load(zero, w.share, j)
                total = total + share * load(zero, back_L, (j * s + a) * s + c)
                spread = spread + share * load(zero, w.apart, j * s + a) * load(zero, w.apart, j * s + c)
            store(total, mean, a * s + c)
            store(total, mean, c * s + a)
            store(total - spread, information, a * s + c)
            store(total - spread, information, c * s + a)


@compiled
def log_total(zero: Vector, a: int, b: int, items: int) -> Vector:
    """log sum_i exp(a_i + b_i)."""
    top = load(zero, a, 0) + load(zero, b, 0)
    for i in range(1, items):
        top = larger(top, load(zero, a, i) + load(zero, b, i))
    total = zero
    for i in range(items):
        total = total + exp(load(zero, a, i) + load(zero, b, i) - top)
    return top + log(total)


@compiled
def step_back(
    zero: Vector, model: Vector, state: Size, observation: Size, w: SmoothingMemory, p: BackwardProblem
) -> bool:
    """Results at time t, and the messages at t - 1 from those at t; False if a number is not finite."""
    k, s, vector = p.modes, size(state), size_of(zero)
    if k == 1:  # a pair is the result and its message; probabilities stay 1
        return all_between(pair(zero, model, state, observation, w, p, 0, 0), -FINITE, FINITE)
    for j in range(k):
        P, mean = w.after_P + j * s * s * vector, w.average + j * s * s * vector
        make_proper(zero, w, P, w.information + j * s * s * vector, mean, state)
        for i in range(k):
            evidence = pair(zero, model, state, observation, w, p, i, j)
            if not all_between(evidence, -FINITE, FINITE):
                return False
            store(evidence, w.pair_evidence, i * k + j)
        combine_pairs(zero, model, w, p, j, state)
    total = normalize(zero, w.log_sum, k, w.log_pi, w.pi)
    for n in range(k * k):
        store(load(zero, w.log_pair, n) - total, w.log_pair, n)
    if p.needs & COMBINED:
        average(zero, w.pi, k, 1, w.smoothed_m, w.apart, w.combined_m, state)
        scatter(zero, w.pi, k, 1, w.smoothed_P, w.apart, w.combined_P, state)
    for i in range(k):
        propagate(zero, model, w, p, i, state)
    total = log_total(zero, w.log_h, w.evidence, k)
    for i in range(k):
        store(load(zero, w.evidence, i) - total, w.evidence, i)
    return True


@compiled
def smooth_initial(zero: Vector, w: SmoothingMemory, p: BackwardProblem, state: Size) -> None:
    """Smoothed moments m + P g, P - P L P and log mode probabilities at time 0, which has no pairs."""
    s, vector = size(state), size_of(zero)
    for j in range(p.modes):
        m, P = w.m + j * s * vector, w.P + j * s * s * vector
        add_times(zero, m, P, w.score + j * s * vector, w.initial_m + j * s * vector, state)
        times(zero, w.information + j * s * s * vector, zero, P, w.X, state)
        subtract_square(zero, P, P, w.X, w.initial_P + j * s * s * vector, state)
        store(load(zero, w.log_h, j) + load(zero, w.evidence, j), w.log_pi, j)


@compiled
def load_step(
    zero: Vector, model: Vector, w: SmoothingMemory, p: BackwardProblem, base: int, time: int, first: int, count: int
) -> None:
    """Load the model and the observation of a step, and the filtered modes before it."""
    o = p.observation
    fetch(model, p.fields, MODEL, base, time, first, count)
    fetch(zero, p.fields, CHANGING, base, time, first, count)
    if time > 0:
        fetch(zero, p.fields, FILTERED, base, time - 1, first, count)
    else:
        fetch(zero, p.fields, INITIAL, base, 0, first, count)
    if p.observed != 0:
        for r in range(o):
            there = p.observed + first * p.observed_row + time * o + r
            store(gather_bytes(zero, there, p.observed_row, count), w.observed, r)


@compiled
def smooth_block(
    zero: Vector,
    model: Vector,
    state: Size,
    observation: Size,
    p: BackwardProblem,
    task: int,
    base: int,
    w: SmoothingMemory,
) -> bool:
    """Run all steps of the targets of one vector; returns True if every number was finite."""
    k, s = p.modes, size(state)
    first = task * lanes(zero)
    count = min(lanes(zero), p.targets - first)
    one = number(zero, 1.0)
    store(one, w.ones, 0)
    for r in range(p.observation):
        store(one, w.observed, r)
    fetch(model, p.fields, MODEL, base, 0, first, count)
    fetch(zero, p.fields, CHANGING, base, 0, first, count)
    # After the last observation the message is 0; the filtered modes at that time are fetched as those before it.
    fetch(zero, p.fields, FILTERED, base, p.steps - 1, first, count)
    clear(zero, k, w.evidence)
    clear(zero, k, w.log_pi)
    clear(zero, k * k, w.log_pair)
    clear(zero, k * s, w.score)
    clear(zero, k * s * s, w.information)
    clear(zero, k * s * s, w.average)
    for back in range(p.steps):
        time = p.steps - 1 - back
        copy(zero, w.m, k * s, w.after_m)
        copy(zero, w.P, k * s * s, w.after_P)
        load_step(zero, model, w, p, base, time, first, count)
        if not step_back(zero, model, state, observation, w, p):
            return False
        put(zero, p.results, p.reported, 0, base, False, first * p.steps + time, count)
    smooth_initial(zero, w, p, state)
    put(zero, p.results + p.reported * RESULT_BYTES, p.ends, 0, base, False, first, count)
    return True
