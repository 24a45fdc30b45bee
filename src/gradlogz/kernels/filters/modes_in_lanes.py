"""Steps of `imm` for targets that are alone: the modes are in the lanes.

    mix        a vector for each mode that was, with a lane for each mode that is
    the rest   as for many targets (targets_in_lanes.py), where every lane has a model of its own
    together   sums over modes are sums over lanes

Lanes without a mode repeat the last one, and count nothing in sums.

Read next: cpu.py, who calls.
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
    BELIEFS,
    CHANGING,
    ENDS,
    FINITE,
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
    """[theory 7.3]; log p(y | past) is returned, NaN where it cannot be told."""
    mix(zero, single, state, w, p)
    predict(zero, zero, w.mixed_m, w.mixed_P, w.F, w.Q, w.b, w.A, w.predicted_m, w.predicted_P, state)
    m, P = w.predicted_m, w.predicted_P
    expect(zero, zero, m, P, w.H, w.R, w.d, w.HP, w.expected, w.S, state, observation)
    told = update(zero, zero, w, m, P, w.H, w.R, w.expected, w.S, w.new_m, w.new_P, state, observation)
    if not all_between(told, -FINITE, FINITE):
        return number(single, math.nan)
    store(told, w.likelihood, 0)
    store(told + load(zero, w.log_c, 0), w.weight, 0)
    return normalize(zero, single, w, p)


@compiled
def mix(zero: Vector, single: Vector, state: Size, w: Memory, p: FilterProblem) -> None:
    """c_j = sum_i pi_i T_ij, and the collapse of the modes i by pi_i T_ij / c_j."""
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
    """Log probabilities of the modes after an observation, and themselves; log p(observation) is returned."""
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
    """All modes as one Gaussian."""
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
    zero: Vector, single: Vector, state: Size, observation: Size, w: Memory, p: FilterProblem, told: Vector
) -> None:
    """What all modes say together, and what they did not expect."""
    o = size(observation)
    pi, c = load(zero, w.h, 0), load(zero, w.c, 0) * load(zero, w.real, 0)
    if p.needs & MEAN:
        has_P = p.needs & COVARIANCE != 0
        collapse(zero, pi, w.new_m, w.new_P, w.apart, w.whole_m, w.whole_P, state, has_P)
    if p.needs & BEFORE_TOGETHER:
        m, P = w.whole_predicted_m, w.whole_predicted_P
        collapse(zero, c, w.predicted_m, w.predicted_P, w.apart, m, P, state, True)
    if p.needs & INNOVATION:
        collapse(zero, c, w.expected, w.S, w.apart, w.innovation, w.whole_S, observation, True)
        for r in range(o):
            y = where_positive(load(zero, w.seen, r), load(zero, w.y, r), number(zero, math.nan))
            store(y - load(zero, w.expected, r), w.expected, r)
            first = r * lanes(zero)
            y = where_positive(load(single, w.seen, first), load(single, w.y, first), number(single, math.nan))
            store(y - load(single, w.innovation, r), w.innovation, r)
    store(told, w.step, 0)


@compiled
def put(
    zero: Vector,
    single: Vector,
    table: int,
    whole: int,
    results: int,
    written: int,
    base: int,
    is_odd: bool,
    entry: int,
    count: int,
) -> None:
    """Results to rows of tensors [targets, times, ...]: first those of all modes together, then those of each."""
    for f in range(results):
        at = table + f * RESULT_BYTES
        start = written + read_integer(at, 0) + entry * read_integer(at, 1)
        items, source = read_integer(at, 2), base + read_integer(at, 5 if is_odd else 4)
        if f < whole:
            spread(single, source, items, start, 0, 1)
        else:
            spread(zero, source, items, start, read_integer(at, 3), count)


@compiled
def begin(zero: Vector, single: Vector, w: Memory, p: FilterProblem) -> None:
    """Which lanes are modes, and what is believed at time 0."""
    one, nothing = number(single, 1.0), number(single, 0.0)
    for i in range(lanes(zero)):
        store(one if i < p.modes else nothing, w.real, i)
    store(number(zero, 1.0), w.ones, 0)
    store(exp(load(zero, w.log_h, 0)) * load(zero, w.real, 0), w.h, 0)
    for r in range(p.observation):
        store(number(zero, 1.0), w.seen, r)


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
    """All steps of one target; whether every number was finite."""
    k, o = p.modes, p.observation
    fetch(zero, p.fields, BELIEFS, base, 0, task, k)
    begin(zero, single, even, p)
    total = gather(single, p.start_log_likelihood + task * size_of(single), 0, 1)
    for time in range(p.steps):
        w = even if time % 2 == 0 else odd
        fetch(zero, p.fields, MODEL, base, time, task, k)
        fetch(zero, p.fields, CHANGING, base, time, task, k)
        if p.seen != 0:
            for r in range(o):
                store(gather_bytes(zero, p.seen + task * p.seen_row + time * o + r, 0, 1), w.seen, r)
        told = advance(zero, single, state, observation, w, p)
        if not all_between(told, -FINITE, FINITE):
            return False
        total = total + told
        if time >= p.first_reported:
            combine(zero, single, state, observation, w, p, told)
            entry = task * (p.steps - p.first_reported) + time - p.first_reported
            put(zero, single, p.results, p.whole, p.reported, p.written, base, time % 2 == 1, entry, k)
    store(total, even.step, 0)
    put(zero, single, p.results + p.reported * RESULT_BYTES, 1, ENDS, p.written, base, False, task, k)
    return True
