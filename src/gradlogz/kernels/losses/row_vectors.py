"""Vector instructions on one row of logits, for compiled_rows.py: maximum, exponentials and sigmoids with their sums.

    largest        max_j s_j
    exponentiate   s_j <- exp(s_j - t),              sum_j exp(s_j - t)
    classify       s_j <- sigmoid(s_j),              sum_j log(1 + exp s_j)
    accumulate     x_j <- x_j + f s_j                column sums of several rows
    combine        s_j <- s_j (f + g x_j)            slope of rows and columns together

A row is `count` vectors at an integer address; lanes after its last number hold -inf, which adds nothing. The rules of
../simd.py hold: no fast-math flag, NaN and -inf keep their meaning.

    log(1 + e) = 2 artanh(e / (2 + e)),   0 <= e <= 1      series to t^13; its relative error is 2e-8 at e = 1, and
                                                            a small e keeps its digits

Read next: compiled_rows.py.
"""

from collections.abc import Callable

import numpy
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..simd import FLOAT, INT32, WHOLE, WIDTH, Value, Writer, instruction, lanes, whole

ARTANH = tuple(2 / power for power in range(13, 0, -2))


def _folded(write: Writer, vector: Value, merge: Callable[[Value, Value], Value]) -> Value:
    """Merge the lanes of a vector into one number."""
    half = WIDTH // 2
    while half:
        order = ir.Constant(WHOLE, [(i + half) % WIDTH for i in range(WIDTH)])
        vector = merge(vector, write.builder.shuffle_vector(vector, vector, order))
        half //= 2
    return write.builder.extract_element(vector, ir.Constant(INT32, 0))


def _number(write: Writer, number: Value) -> Value:
    """A float64 operand as a vector of equal float32 numbers."""
    return write.splat(write.builder.fptrunc(number, FLOAT))


@instruction(result=types.float32)
def largest(write: Writer, s: Value, count: Value) -> Value:
    """Largest number of a row, -inf for NaN alone."""
    builder, top = write.builder, write.variable(lanes(-numpy.inf))
    with cgutils.for_range(builder, count) as loop:
        builder.store(write.larger(write.load(s, loop.index), builder.load(top)), top)
    return _folded(write, builder.load(top), write.larger)


@instruction(result=types.float32, last=types.float64)
def exponentiate(write: Writer, s: Value, count: Value, top: Value) -> Value:
    """Replace a row by exp(s - top) and return its sum."""
    builder, total, reference = write.builder, write.variable(lanes(0.0)), _number(write, top)
    with cgutils.for_range(builder, count) as loop:
        mass = write.exp2(write.exponent(write.load(s, loop.index), reference))
        write.store(mass, s, loop.index)
        write.increase(total, mass)
    return _folded(write, builder.load(total), write.add)


@instruction(result=types.float32)
def classify(write: Writer, s: Value, count: Value) -> Value:
    """Replace a row by sigmoid(s) and return the sum of log(1 + exp s)."""
    builder, total, zero, one = write.builder, write.variable(lanes(0.0)), lanes(0.0), lanes(1.0)
    with cgutils.for_range(builder, count) as loop:
        logit = write.load(s, loop.index)
        is_positive = builder.fcmp_ordered(">", logit, zero)
        negative = builder.select(is_positive, write.subtract(zero, logit), logit)
        e = write.exp2(write.exponent(negative, zero))  # exp(-|s|)
        t = write.divide(e, write.add(lanes(2.0), e))
        log_one_plus = write.multiply(t, write.horner(write.multiply(t, t), ARTANH))
        write.increase(total, write.add(builder.select(is_positive, logit, zero), log_one_plus))
        above = builder.select(is_positive, one, e)
        write.store(write.divide(above, write.add(one, e)), s, loop.index)
    return _folded(write, builder.load(total), write.add)


@instruction(last=types.float64)
def scale(write: Writer, s: Value, count: Value, factor: Value) -> None:
    """Multiply a row by a number."""
    number = _number(write, factor)
    with cgutils.for_range(write.builder, count) as loop:
        write.store(write.multiply(write.load(s, loop.index), number), s, loop.index)


@instruction(last=types.float64)
def accumulate(write: Writer, x: Value, s: Value, count: Value, factor: Value) -> None:
    """Add a multiple of row s to x."""
    number = _number(write, factor)
    with cgutils.for_range(write.builder, count) as loop:
        added = write.fma(write.load(s, loop.index), number, write.load(x, loop.index))
        write.store(added, x, loop.index)


@instruction()
def combine(write: Writer, s: Value, x: Value, count: Value, pair: Value) -> None:
    """Multiply a row by f + g x; the two numbers f and g lie at the address `pair`."""
    f, g = (write.splat(write.load(pair, whole(part), FLOAT)) for part in (0, 1))
    with cgutils.for_range(write.builder, count) as loop:
        weight = write.fma(g, write.load(x, loop.index), f)
        write.store(write.multiply(write.load(s, loop.index), weight), s, loop.index)
