"""Gradient of the log likelihood of imm and gpb2 for numba: their steps in reverse, the lanes of a vector are targets.

    x_bar = dl/dx of everything that follows;   u = S^-1 v,   g = H^T u,   L = H^T S^-1 H,   A = I - K H

    update    m_bar' = A^T m_bar + l_bar g
              P_bar' = A^T P_bar A + sym(A^T m_bar g^T) + l_bar (g g^T - L) / 2
              d_bar  = l_bar u - K^T m_bar
              R_bar  = K^T P_bar K - sym(K^T m_bar u^T) + l_bar (u u^T - S^-1) / 2
              H_bar  = u (P m_bar)^T - K^T (m_bar m^T + 2 P_bar P) + l_bar (u m^T - K^T),   m and P after the update
    predict   m_bar = F^T m_bar',   P_bar = F^T P_bar' F
              F_bar = m_bar' m^T + 2 P_bar' F P,   Q_bar = P_bar',   b_bar = m_bar'
    collapse  r_i_bar = <m_bar, e_i> + <P_bar, P_i - P + e_i e_i^T>,   e_i = m_i - m
              m_i_bar = r_i (m_bar + 2 P_bar e_i),   P_i_bar = r_i P_bar

With one mode m_bar and -2 P_bar + m_bar m_bar^T are the score and the information of the smoother. The filtered modes
are read from tensors, and everything between them is computed again. The first number that is not finite ends the pass.

Read next: backward.py (the caller), smoothing_in_lanes.py (the smoothers).
"""

from typing import Any, NamedTuple

from ..simd import read_integer
from ..workers import compiled
from .lanes import (
    all_between,
    exp,
    lanes,
    load,
    named,
    number,
    size,
    size_of,
    store,
    where_possible,
)
from .smoothing_in_lanes import (
    FILTERED,
    BackwardProblem,
    add_square,
    clear,
    copy,
    load_step,
    observation_message,
    solve,
    times,
)
from .targets_in_lanes import (
    CHANGING,
    FINITE,
    MODEL,
    RESULT_BYTES,
    Size,
    Vector,
    collapse,
    expect,
    fetch,
    gain,
    joseph,
    predict,
    put,
    weigh,
)

OF_F, OF_H, OF_R = (1 << i for i in range(3))  # gradients that cost extra


class GradientMemory(NamedTuple):
    """Addresses of the arrays of vectors of a step, including the model at that step and its gradient."""

    m: int  # filtered at t - 1
    P: int
    log_h: int
    after_m: int  # filtered at t
    after_P: int
    after_log_h: int
    bar_m: int  # gradients in these: at t, `before_bar` at t - 1
    bar_P: int
    bar_log_h: int
    before_bar_m: int
    before_bar_P: int
    before_bar_log_h: int
    one_bar_m: int  # gradients of one Kalman filter, after the update, before it, before the motion
    one_bar_P: int
    predicted_bar_m: int
    predicted_bar_P: int
    start_bar_m: int
    start_bar_P: int
    T_bar: int
    F_bar: int
    Q_bar: int
    H_bar: int
    R_bar: int
    b_bar: int
    d_bar: int
    mixed_m: int
    mixed_P: int
    predicted_m: int
    predicted_P: int
    filtered_m: int
    branch_m: int
    branch_P: int
    likelihood: int
    lag: int
    y_score: int
    y_information: int
    SH: int
    S_inverse: int
    Km: int  # K^T m_bar
    KP: int  # K^T P_bar
    column: int
    weight: int
    share: int
    apart: int
    X: int
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


def gradient_vectors(modes: int, state: int, observation: int) -> tuple[int, ...]:
    """Number of vectors of each array of `GradientMemory`."""
    k, s, o = modes, state, observation
    of_pairs = dict.fromkeys(("T", "T_bar"), k * k)
    of_modes = dict.fromkeys(("log_h", "after_log_h", "bar_log_h", "before_bar_log_h", "column", "weight", "share"), k)
    means = dict.fromkeys(("m", "after_m", "bar_m", "before_bar_m", "branch_m", "b", "b_bar", "apart"), k * s)
    one = ("one_bar_m", "predicted_bar_m", "start_bar_m", "mixed_m", "predicted_m", "filtered_m", "y_score")
    square = ("one_bar_P", "predicted_bar_P", "start_bar_P", "mixed_P", "predicted_P", "lag", "y_information", "X", "A")
    observing = dict.fromkeys(("SH", "KP", "HP", "W", "K"), o * s) | dict.fromkeys(("S_inverse", "S", "D"), o * o)
    counts = {
        **of_pairs,
        **of_modes,
        **means,
        **dict.fromkeys(one, s),
        **dict.fromkeys(square, s * s),
        **observing,
        **dict.fromkeys(("Km", "expected", "y", "observed", "z"), o),
        **dict.fromkeys(("H", "H_bar"), k * o * s),
        **dict.fromkeys(("R", "R_bar"), k * o * o),
        **dict.fromkeys(("d", "d_bar"), k * o),
        "likelihood": k,
        "B": max(s, o) * s,
        "ones": 1,
    }
    return tuple(counts.get(name, k * s * s) for name in GradientMemory._fields)


@compiled
def condition(
    zero: Vector,
    model: Vector,
    state: Size,
    observation: Size,
    w: GradientMemory,
    m: int,
    P: int,
    j: int,
) -> Vector:
    """Move a Gaussian by mode j and find the gain of the observation; returns its log density."""
    s, o, vector, single = size(state), size(observation), size_of(zero), size_of(model)
    F, Q, b = w.F + j * s * s * single, w.Q + j * s * s * single, w.b + j * s * vector
    H, R, d = w.H + j * o * s * single, w.R + j * o * o * single, w.d + j * o * vector
    predict(zero, model, m, P, F, Q, b, w.lag, w.predicted_m, w.predicted_P, state)
    expect(zero, model, w.predicted_m, w.predicted_P, H, R, d, w.HP, w.expected, w.S, state, observation)
    return gain(zero, model, w, w.predicted_m, H, w.expected, w.S, w.filtered_m, state, observation)


@compiled
def reverse_kalman(
    zero: Vector,
    model: Vector,
    state: Size,
    observation: Size,
    w: GradientMemory,
    p: BackwardProblem,
    m: int,
    filtered_m: int,
    filtered_P: int,
    j: int,
    l_bar: Vector,
) -> None:
    """Reverse of update and predict, from `one_bar` to `start_bar`; adds to the gradient of mode j."""
    s, o, vector, single = size(state), size(observation), size_of(zero), size_of(model)
    F, H = w.F + j * s * s * single, w.H + j * o * s * single
    half, two = number(zero, 0.5), number(zero, 2.0)
    observation_message(zero, model, w, H, state, observation)
    # Gradient of the observation model -----------------------------------------------------------------------------
    for r in range(o):
        total = zero
        for n in range(s):
            total = total + load(zero, w.K, r * s + n) * load(zero, w.one_bar_m, n)
        store(total, w.Km, r)
        at = w.d_bar + (j * o + r) * vector
        store(load(zero, at, 0) + l_bar * load(zero, w.z, r) - total, at, 0)
        if p.needs & (OF_H | OF_R):
            for i in range(s):
                total = zero
                for n in range(s):
                    total = total + load(zero, w.K, r * s + n) * load(zero, w.one_bar_P, n * s + i)
                store(total, w.KP, r * s + i)
    if p.needs & OF_R:
        for r in range(o):
            for q in range(o):
                store(load(zero, w.observed, r) if r == q else zero, w.S_inverse, r * o + q)
        solve(zero, w, w.S_inverse, o, observation)
        for r in range(o):
            for q in range(r + 1):
                u, other = load(zero, w.z, r), load(zero, w.z, q)
                total = l_bar * (u * other - load(zero, w.S_inverse, r * o + q))
                total = half * (total - load(zero, w.Km, r) * other - load(zero, w.Km, q) * u)
                for n in range(s):
                    total = total + load(zero, w.KP, r * s + n) * load(zero, w.K, q * s + n)
                at = w.R_bar + (j * o + r) * o * vector
                store(load(zero, at, q) + total, at, q)
                if q < r:
                    at = w.R_bar + (j * o + q) * o * vector
                    store(load(zero, at, r) + total, at, r)
    if p.needs & OF_H:
        for i in range(s):
            moved = zero  # P m_bar
            for n in range(s):
                moved = moved + load(zero, filtered_P, i * s + n) * load(zero, w.one_bar_m, n)
            mean = load(zero, filtered_m, i)
            for r in range(o):
                u = load(zero, w.z, r)
                total = u * moved - load(zero, w.Km, r) * mean + l_bar * (u * mean - load(zero, w.K, r * s + i))
                for n in range(s):
                    total = total - two * load(zero, w.KP, r * s + n) * load(zero, filtered_P, n * s + i)
                at = w.H_bar + (j * o + r) * s * vector
                store(load(zero, at, i) + total, at, i)
    # Reverse of the update -----------------------------------------------------------------------------------------
    times(zero, w.one_bar_P, zero, w.A, w.X, state)
    for i in range(s):
        total = zero
        for n in range(s):
            total = total + load(zero, w.A, n * s + i) * load(zero, w.one_bar_m, n)
        store(total, w.predicted_bar_m, i)
    for i in range(s):
        g, moved = load(zero, w.y_score, i), load(zero, w.predicted_bar_m, i)
        for c in range(i + 1):
            other = load(zero, w.y_score, c)
            total = l_bar * (g * other - load(zero, w.y_information, i * s + c))
            total = half * (total + moved * other + load(zero, w.predicted_bar_m, c) * g)
            store(total, w.predicted_bar_P, i * s + c)
            store(total, w.predicted_bar_P, c * s + i)
    add_square(zero, w.predicted_bar_P, zero, w.A, w.X, w.predicted_bar_P, state)
    for i in range(s):
        store(load(zero, w.predicted_bar_m, i) + l_bar * load(zero, w.y_score, i), w.predicted_bar_m, i)
    # Gradient of the motion model, and reverse of the motion -------------------------------------------------------
    for i in range(s):
        slope = load(zero, w.predicted_bar_m, i)
        at = w.b_bar + j * s * vector
        store(load(zero, at, i) + slope, at, i)
        for c in range(s):
            at = w.Q_bar + (j * s + i) * s * vector
            store(load(zero, at, c) + load(zero, w.predicted_bar_P, i * s + c), at, c)
            if p.needs & OF_F:
                total = slope * load(zero, m, c)
                for n in range(s):
                    total = total + two * load(zero, w.predicted_bar_P, i * s + n) * load(zero, w.lag, n * s + c)
                at = w.F_bar + (j * s + i) * s * vector
                store(load(zero, at, c) + total, at, c)
    times(zero, w.predicted_bar_P, model, F, w.X, state)
    for i in range(s):
        total = zero
        for n in range(s):
            total = total + load(model, F, n * s + i) * load(zero, w.predicted_bar_m, n)
        store(total, w.start_bar_m, i)
    clear(zero, s * s, w.start_bar_P)
    add_square(zero, w.start_bar_P, model, F, w.X, w.start_bar_P, state)


@compiled
def share_slope(
    zero: Vector,
    bar_m: int,
    bar_P: int,
    m_i: int,
    P_i: int,
    m: int,
    P: int,
    share: Vector,
    to_m: int,
    to_P: int,
    state: Size,
) -> Vector:
    """Reverse of a collapse for Gaussian i: adds m_i_bar and P_i_bar to `to`, and returns r_i_bar."""
    s = size(state)
    two = number(zero, 2.0)
    slope = zero
    for i in range(s):
        e = load(zero, m_i, i) - load(zero, m, i)
        total = zero
        for n in range(s):
            e_n = load(zero, m_i, n) - load(zero, m, n)
            bar = load(zero, bar_P, i * s + n)
            total = total + bar * e_n
            slope = slope + bar * (load(zero, P_i, i * s + n) - load(zero, P, i * s + n))
            store(load(zero, to_P, i * s + n) + share * bar, to_P, i * s + n)
        slope = slope + e * (load(zero, bar_m, i) + total)
        store(load(zero, to_m, i) + share * (load(zero, bar_m, i) + two * total), to_m, i)
    return slope


@compiled
def mode_slope(zero: Vector, w: GradientMemory, k: int, j: int) -> Vector:
    """Gradient in the joint log weight of mode j, where log pi_j = weight_j - log sum exp weight."""
    rest = load(zero, w.ones, 0)
    for i in range(k):
        rest = rest - load(zero, w.bar_log_h, i)
    return exp(load(zero, w.after_log_h, j)) * rest + load(zero, w.bar_log_h, j)


@compiled
def add(zero: Vector, x: Vector, array: int, index: int) -> None:
    """Add to an entry of an array."""
    store(load(zero, array, index) + x, array, index)


@compiled
def reverse_imm(
    zero: Vector, model: Vector, state: Size, observation: Size, w: GradientMemory, p: BackwardProblem
) -> bool:
    """Reverse of one step of imm; False if a number is not finite."""
    k, s, vector = p.modes, size(state), size_of(zero)
    for j in range(k):
        l_bar = mode_slope(zero, w, k, j)
        copy(zero, w.bar_m + j * s * vector, s, w.one_bar_m)
        copy(zero, w.bar_P + j * s * s * vector, s * s, w.one_bar_P)
        for i in range(k):
            store(zero + load(model, w.T, i * k + j), w.column, i)
        log_c = weigh(zero, w.column, w.log_h, k, w.share)
        collapse(zero, w.share, k, 1, w.m, w.P, w.apart, w.mixed_m, w.mixed_P, state)
        log_density = condition(zero, model, state, observation, w, w.mixed_m, w.mixed_P, j)
        if not all_between(log_density, -FINITE, FINITE):
            return False
        after_m, after_P = w.after_m + j * s * vector, w.after_P + j * s * s * vector
        reverse_kalman(zero, model, state, observation, w, p, w.mixed_m, after_m, after_P, j, l_bar)
        for i in range(k):
            m, P = w.m + i * s * vector, w.P + i * s * s * vector
            to_m, to_P = w.before_bar_m + i * s * vector, w.before_bar_P + i * s * s * vector
            share = load(zero, w.share, i)
            slope = l_bar + share_slope(
                zero, w.start_bar_m, w.start_bar_P, m, P, w.mixed_m, w.mixed_P, share, to_m, to_P, state
            )
            add(zero, share * slope, w.before_bar_log_h, i)
            ratio = where_possible(log_c, exp(load(zero, w.log_h, i) - log_c), zero)  # pi_i / c_j
            add(zero, ratio * slope, w.T_bar, i * k + j)
    return True


@compiled
def reverse_gpb2(
    zero: Vector, model: Vector, state: Size, observation: Size, w: GradientMemory, p: BackwardProblem
) -> bool:
    """Reverse of one step of gpb2; False if a number is not finite."""
    k, s, o = p.modes, size(state), size(observation)
    vector, single = size_of(zero), size_of(model)
    for j in range(k):
        h_bar = mode_slope(zero, w, k, j)
        R = w.R + j * o * o * single
        after_m, after_P = w.after_m + j * s * vector, w.after_P + j * s * s * vector
        # Weights of the pairs ----------------------------------------------------------------------------------------
        for i in range(k):
            m, P = w.m + i * s * vector, w.P + i * s * s * vector
            log_density = condition(zero, model, state, observation, w, m, P, j)
            if not all_between(log_density, -FINITE, FINITE):
                return False
            copy(zero, w.filtered_m, s, w.branch_m + i * s * vector)
            joseph(zero, model, w, w.predicted_P, R, w.branch_P + i * s * s * vector, state, observation)
            store(log_density + load(zero, w.log_h, i), w.weight, i)
            store(zero + load(model, w.T, i * k + j), w.column, i)
        log_w = weigh(zero, w.column, w.weight, k, w.share)
        # Reverse of the collapse, then of each pair ------------------------------------------------------------------
        for i in range(k):
            m, P = w.m + i * s * vector, w.P + i * s * s * vector
            branch_m, branch_P = w.branch_m + i * s * vector, w.branch_P + i * s * s * vector
            share = load(zero, w.share, i)
            clear(zero, s, w.one_bar_m)
            clear(zero, s * s, w.one_bar_P)
            bar_m, bar_P = w.bar_m + j * s * vector, w.bar_P + j * s * s * vector
            slope = h_bar + share_slope(
                zero,
                bar_m,
                bar_P,
                branch_m,
                branch_P,
                after_m,
                after_P,
                share,
                w.one_bar_m,
                w.one_bar_P,
                state,
            )
            add(zero, share * slope, w.before_bar_log_h, i)
            ratio = where_possible(log_w, exp(load(zero, w.weight, i) - log_w), zero)
            add(zero, ratio * slope, w.T_bar, i * k + j)
            condition(zero, model, state, observation, w, m, P, j)
            reverse_kalman(zero, model, state, observation, w, p, m, branch_m, branch_P, j, share * slope)
            for n in range(s):
                add(zero, load(zero, w.start_bar_m, n), w.before_bar_m, i * s + n)
            for n in range(s * s):
                add(zero, load(zero, w.start_bar_P, n), w.before_bar_P, i * s * s + n)
    return True


def gradient_block(reverse: Any) -> Any:
    """Compiled function for all steps of the targets of one vector; it returns True if every number was finite."""

    def differentiate_block(
        zero: Vector,
        model: Vector,
        state: Size,
        observation: Size,
        p: BackwardProblem,
        task: int,
        base: int,
        w: GradientMemory,
    ) -> bool:
        k, s, o = p.modes, size(state), size(observation)
        first = task * lanes(zero)
        count = min(lanes(zero), p.targets - first)
        one = number(zero, 1.0)
        store(one, w.ones, 0)
        for r in range(o):
            store(one, w.observed, r)
        fetch(model, p.fields, MODEL, base, 0, first, count)
        fetch(zero, p.fields, CHANGING, base, 0, first, count)
        fetch(zero, p.fields, FILTERED, base, p.steps - 1, first, count)
        clear(zero, k * s, w.bar_m)
        clear(zero, k * s * s, w.bar_P)
        clear(zero, k, w.bar_log_h)
        clear(zero, k * k, w.T_bar)
        clear(zero, k * s * s, w.F_bar)
        clear(zero, k * s * s, w.Q_bar)
        clear(zero, k * o * s, w.H_bar)
        clear(zero, k * o * o, w.R_bar)
        clear(zero, k * s, w.b_bar)
        clear(zero, k * o, w.d_bar)
        for back in range(p.steps):
            time = p.steps - 1 - back
            copy(zero, w.m, k * s, w.after_m)
            copy(zero, w.P, k * s * s, w.after_P)
            copy(zero, w.log_h, k, w.after_log_h)
            load_step(zero, model, w, p, base, time, first, count)
            clear(zero, k * s, w.before_bar_m)
            clear(zero, k * s * s, w.before_bar_P)
            clear(zero, k, w.before_bar_log_h)
            if not reverse(zero, model, state, observation, w, p):
                return False
            copy(zero, w.before_bar_m, k * s, w.bar_m)
            copy(zero, w.before_bar_P, k * s * s, w.bar_P)
            copy(zero, w.before_bar_log_h, k, w.bar_log_h)
            # Gradients of fields that vary with time are written at every step and start again from 0.
            put(zero, p.results, p.reported, 0, base, False, first * p.steps + time, count)
            for f in range(p.reported):
                at = p.results + f * RESULT_BYTES
                clear(zero, read_integer(at, 2), base + read_integer(at, 4))
        put(zero, p.results + p.reported * RESULT_BYTES, p.ends, 0, base, False, first, count)
        return True

    return compiled(named(differentiate_block, reverse.__name__))
