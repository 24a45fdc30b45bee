"""Steps of `imm` for few targets: the lanes of a vector are the modes of one target.

    mix        one vector for each previous mode, with one lane for each next mode
    the rest   as in targets_in_lanes.py, with a different model in every lane
    together   sums over modes are sums over lanes

Lanes beyond the modes repeat the last mode and have weight 0 in sums.

Read next: cpu.py (the caller).
"""

import math

from ..simd import read_integer
from ..workers import compiled
from .fields import BEFORE_TOGETHER, COVARIANCE, INNOVATION, MEAN
from .lanes import (
    all_between,
    exp,
    gather,
    gather_bytes,
    lanes,
    larger,
    load,
    log,
    number,
    size,
    size_of,
    spread,
    store,
    together,
    where_positive,
)
from .targets_in_lanes import (
    CHANGING,
    ENDS,
    FINITE,
    INITIAL,
    LEAST,
    MODEL,
    MOST,
    RESULT_BYTES,
    FilterProblem,
    Memory,
    Size,
    Vector,
    expect,
    fetch,
    predict,
    update,
    weigh,
)


@compiled
def advance(zero: Vector, single: Vector, state: Size, observation: Size, w: Memory, p: FilterProblem) -> Vector:
    """One step of imm; returns log p(y | past), NaN if a density is not finite.   [theory 7.3]"""
    mix(zero, single, state, w, p)
    predict(zero, zero, w.mixed_m, w.mixed_P, w.F, w.Q, w.b, w.A, w.predicted_m, w.predicted_P, state)
    m, P = w.predicted_m, w.predicted_P
    expect(zero, zero, m, P, w.H, w.R, w.d, w.HP, w.expected, w.S, state, observation)
    log_density = update(zero, zero, w, m, P, w.H, w.R, w.expected, w.S, w.new_m, w.new_P, state, observation)
    if not all_between(log_density, -FINITE, FINITE):
        return number(single, math.nan)
    store(log_density, w.likelihood, 0)
    store(log_density + load(zero, w.log_c, 0), w.weight, 0)
    return normalize(zero, single, w, p)


@compiled
def mix(zero: Vector, single: Vector, state: Size, w: Memory, p: FilterProblem) -> None:
    """Predict mode probabilities c_j = sum_i pi_i T_ij, and collapse the modes i with shares pi_i T_ij / c_j."""
    k, s, width = p.modes, size(state), lanes(zero)
    total = zero
    for i in range(k):
        mass = load(zero, w.T, i) * load(single, w.h, i)
        store(mass, w.prior_share, i)
        total = total + mass
    if all_between(total, LEAST, MOST):
        inverse = load(zero, w.ones, 0) / total
        for i in range(k):
            store(load(zero, w.prior_share, i) * inverse, w.prior_share, i)
        store(log(total), w.log_c, 0)
        store(total, w.c, 0)
    else:
        for i in range(k):
            store(zero + load(single, w.log_h, i), w.weight, i)
        log_c = weigh(zero, w.T, w.weight, k, w.prior_share)
        store(log_c, w.log_c, 0)
        store(exp(log_c), w.c, 0)
    for a in range(s):
        total = zero
        for i in range(k):
            total = total + load(zero, w.prior_share, i) * load(single, w.m, a * width + i)
        store(total, w.mixed_m, a)
        for i in range(k):
            store(load(single, w.m, a * width + i) - total, w.apart, i * s + a)
    for a in range(s):
        for c in range(a + 1):
            total = zero
            for i in range(k):
                inside = load(zero, w.apart, i * s + a) * load(zero, w.apart, i * s + c)
                inside = inside + load(single, w.P, (a * s + c) * width + i)
                total = total + load(zero, w.prior_share, i) * inside
            store(total, w.mixed_P, a * s + c)
            store(total, w.mixed_P, c * s + a)


@compiled
def normalize(zero: Vector, single: Vector, w: Memory, p: FilterProblem) -> Vector:
    """Store filtered mode probabilities and their logarithms; returns log p(observation)."""
    top = load(single, w.weight, 0)
    for i in range(1, p.modes):
        top = larger(top, load(single, w.weight, i))
    mass = exp(load(zero, w.weight, 0) - top) * load(zero, w.real, 0)
    total = together(mass)
    log_total = log(total)
    store(load(zero, w.weight, 0) - top - log_total, w.log_h, 0)
    store(mass / total, w.h, 0)
    return top + log_total


@compiled
def collapse(
    zero: Vector, share: Vector, m: int, P: int, apart: int, new_m: int, new_P: int, state: Size, has_P: bool
) -> None:
    """Collapse all modes to one Gaussian."""
    s = size(state)
    for a in range(s):
        total = together(share * load(zero, m, a))
        store(total, new_m, a)
        store(load(zero, m, a) - total, apart, a)
    if has_P:
        for a in range(s):
            for c in range(a + 1):
                inside = load(zero, P, a * s + c) + load(zero, apart, a) * load(zero, apart, c)
                total = together(share * inside)
                store(total, new_P, a * s + c)
                store(total, new_P, c * s + a)


@compiled
def combine(
    zero: Vector, single: Vector, state: Size, observation: Size, w: Memory, p: FilterProblem, log_density: Vector
) -> None:
    """Compute the fields of all modes combined, and the innovations."""
    o = size(observation)
    pi, c = load(zero, w.h, 0), load(zero, w.c, 0) * load(zero, w.real, 0)
    if p.needs & MEAN:
        has_P = p.needs & COVARIANCE != 0
        collapse(zero, pi, w.new_m, w.new_P, w.apart, w.combined_m, w.combined_P, state, has_P)
    if p.needs & BEFORE_TOGETHER:
        m, P = w.combined_predicted_m, w.combined_predicted_P
        collapse(zero, c, w.predicted_m, w.predicted_P, w.apart, m, P, state, True)
    if p.needs & INNOVATION:
        collapse(zero, c, w.expected, w.S, w.apart, w.innovation, w.combined_S, observation, True)
        for r in range(o):
            y = where_positive(load(zero, w.observed, r), load(zero, w.y, r), number(zero, math.nan))
            store(y - load(zero, w.expected, r), w.expected, r)
            first = r * lanes(zero)
            y = where_positive(load(single, w.observed, first), load(single, w.y, first), number(single, math.nan))
            store(y - load(single, w.innovation, r), w.innovation, r)
    store(log_density, w.step, 0)


@compiled
def put(
    zero: Vector,
    single: Vector,
    table: int,
    combined: int,
    results: int,
    written: int,
    base: int,
    is_odd: bool,
    entry: int,
    count: int,
) -> None:
    """Write results to rows of tensors [targets, times, ...]: combined fields first, then those of each mode."""
    for f in range(results):
        at = table + f * RESULT_BYTES
        start = written + read_integer(at, 0) + entry * read_integer(at, 1)
        items, source = read_integer(at, 2), base + read_integer(at, 5 if is_odd else 4)
        if f < combined:
            spread(single, source, items, start, 0, 1)
        else:
            spread(zero, source, items, start, read_integer(at, 3), count)


@compiled
def begin(zero: Vector, single: Vector, w: Memory, p: FilterProblem) -> None:
    """Mark the lanes that are modes, and initialise the mode probabilities."""
    one, nothing = number(single, 1.0), number(single, 0.0)
    for i in range(lanes(zero)):
        store(one if i < p.modes else nothing, w.real, i)
    store(number(zero, 1.0), w.ones, 0)
    store(exp(load(zero, w.log_h, 0)) * load(zero, w.real, 0), w.h, 0)
    for r in range(p.observation):
        store(number(zero, 1.0), w.observed, r)


@compiled
def filter_alone(
    zero: Vector,
    single: Vector,
    state: Size,
    observation: Size,
    p: FilterProblem,
    task: int,
    base: int,
    even: Memory,
    odd: Memory,
) -> bool:
    """Run all steps of one target; returns True if every number was finite."""
    k, o = p.modes, p.observation
    fetch(zero, p.fields, INITIAL, base, 0, task, k)
    begin(zero, single, even, p)
    total = gather(single, p.start_log_likelihood + task * size_of(single), 0, 1)
    for time in range(p.steps):
        w = even if time % 2 == 0 else odd
        fetch(zero, p.fields, MODEL, base, time, task, k)
        fetch(zero, p.fields, CHANGING, base, time, task, k)
        if p.observed != 0:
            for r in range(o):
                store(gather_bytes(zero, p.observed + task * p.observed_row + time * o + r, 0, 1), w.observed, r)
        log_density = advance(zero, single, state, observation, w, p)
        if not all_between(log_density, -FINITE, FINITE):
            return False
        total = total + log_density
        if time >= p.first_reported:
            combine(zero, single, state, observation, w, p, log_density)
            entry = task * (p.steps - p.first_reported) + time - p.first_reported
            put(zero, single, p.results, p.combined, p.reported, p.written, base, time % 2 == 1, entry, k)
    store(total, even.step, 0)
    put(zero, single, p.results + p.reported * RESULT_BYTES, 1, ENDS, p.written, base, False, task, k)
    return True
