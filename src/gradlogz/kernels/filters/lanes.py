"""SIMD vectors as a numba type: each lane is one target, and code reads as for a single target.

    Lanes(number, width)     numba type of `width` float32 or float64 numbers
    x + y, x - y, x * y, x / y        elementwise; a vector with one lane is broadcast
    load, store              at an address, with an index in vectors of the type of `like`
    gather, spread           from and to separate rows, one for each lane
    together                 sum over the lanes of a vector
    exp, log                 accurate to two units in the last place

Products may be fused with additions; no other fast-math flag is set, so NaN and -inf behave as in IEEE arithmetic.

    exp x = 2^n sum_i r^i / i!,            x = n log 2 + r,   |r| <= log(2) / 2
    log x = n log 2 + 2 artanh s,          x = 2^n (1 + f),   s = f / (2 + f),   artanh s = s + s³/3 + s^5/5 + ...

Read next: targets_in_lanes.py (the filters).
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from ..simd import FEATURES, INT32, IS_X86, whole

REGISTER = 64 if "+avx512f" in FEATURES else 32 if "+avx" in FEATURES else 16  # bytes
LINE = 64  # bytes of a cache line
FUSED = ("contract",)
LOG_2_HIGH, LOG_2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # 33 bits, and the remainder
Value = Any  # llvmlite value


class Format(NamedTuple):
    """Floating-point format, and the number of terms of its series."""

    kind: Any
    integer: Any
    bits: int
    mantissa: int
    bias: int
    exp_terms: int
    log_terms: int
    lowest: float  # argument below which exp is 0
    highest: float  # largest argument of exp


FORMATS = {
    "float64": Format(ir.DoubleType(), ir.IntType(64), 64, 52, 1023, 14, 11, -708.0, 709.0),
    "float32": Format(ir.FloatType(), ir.IntType(32), 32, 23, 127, 9, 6, -87.0, 88.0),
}


class Lanes(types.Type):
    """Numba type of a vector of numbers."""

    def __init__(self, number: str, width: int) -> None:
        self.number, self.width = number, width
        super().__init__(name=f"Lanes({number}, {width})")

    @property
    def format(self) -> Format:
        return FORMATS[self.number]

    @property
    def vector(self) -> Any:
        """LLVM type of the vector."""
        return ir.VectorType(self.format.kind, self.width)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.width * self.format.bits // 8


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """Represent `Lanes` as an LLVM vector."""

    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.vector)


class Count(types.Type):
    """Type of a compile-time integer constant."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Count({count})")


register_model(Count)(models.OpaqueModel)


def named(function: Any, *enclosed: object) -> Any:
    """Append enclosed values to the name of a function, and return it.

    A process may load kernels that different processes cached, and among functions of the same name it uses the first.
    Numba's names contain the place of definition and the types, not the enclosed values; without this, one filter could
    run the steps of another.
    """
    function.__qualname__ = "_".join((function.__qualname__, *map(str, enclosed)))
    return function


def counted(count: int) -> Any:
    """Compiled function that returns a compile-time constant."""

    @intrinsic
    def code(typing: Any) -> Any:  # noqa: ARG001
        return Count(count)(), lambda context, builder, signature, arguments: context.get_dummy_value()

    return code


@intrinsic
def size(typing: Any, count: Any) -> Any:  # noqa: ARG001
    """Value of a size; a constant if it is known at compile time, so that loops over it can be unrolled."""
    if isinstance(count, Count):
        return types.int64(count), lambda context, builder, signature, arguments: whole(count.count)
    return types.int64(types.int64), lambda context, builder, signature, arguments: arguments[0]


def lanes_of(number: str) -> int:
    """Number of lanes of a full register."""
    return REGISTER * 8 // FORMATS[number].bits


def nothing(kind: Lanes) -> Any:
    """Compiled function that returns a vector of zeros, which other functions take to infer the type."""

    @intrinsic
    def zeros(typing: Any) -> Any:  # noqa: ARG001
        return kind(), lambda context, builder, signature, arguments: ir.Constant(kind.vector, [0.0] * kind.width)

    return zeros


def same(number: float, kind: Lanes) -> Value:
    """Vector with a constant in every lane."""
    return ir.Constant(kind.vector, [number] * kind.width)


def same_bits(number: int, kind: Lanes) -> Value:
    """Vector with an integer in every lane."""
    return ir.Constant(ir.VectorType(kind.format.integer, kind.width), [number] * kind.width)


def wide(builder: Any, vector: Value, kind: Lanes, to: Lanes) -> Value:
    """Broadcast one lane to the width of `to`."""
    if kind.width == to.width:
        return vector
    order = ir.Constant(ir.VectorType(INT32, to.width), [0] * to.width)
    return builder.shuffle_vector(vector, ir.Constant(kind.vector, ir.Undefined), order)


def place(builder: Any, kind: Lanes, address: Value, index: Value) -> Value:
    """Pointer to a vector."""
    start = builder.add(address, builder.mul(index, whole(kind.size)))
    return builder.inttoptr(start, kind.vector.as_pointer())


# ---------------------------------------------------------------------------------------------------- arithmetic
def _binary(operation: Any, name: str) -> Any:
    """Implement a Python operator by an LLVM instruction."""

    @intrinsic
    def code(typing: Any, x: Any, y: Any) -> Any:  # noqa: ARG001
        kind = x if x.width >= y.width else y

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
            a, b = (wide(builder, v, operand, kind) for v, operand in zip(arguments, (x, y), strict=True))
            return getattr(builder, name)(a, b, flags=FUSED)

        return kind(x, y), emit

    def of_operator(x: Any, y: Any) -> Any:
        of_lanes = isinstance(x, Lanes) and isinstance(y, Lanes)
        return named(lambda x, y: code(x, y), name) if of_lanes else None

    overload(operation, strict=False)(of_operator)
    return code


for _operation, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _binary(_operation, _name)
_binary(operator.truediv, "fdiv")


def _of_lanes(write: Callable[..., Value]) -> Any:
    """Make an intrinsic with operands broadcast to the widest; `write` takes the builder, the type and the operands."""
    operands = write.__code__.co_argcount - 2

    def define(kinds: tuple[Any, ...]) -> Any:
        kind = max(kinds, key=lambda operand: operand.width)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
            return write(builder, kind, *(wide(builder, v, k, kind) for v, k in zip(arguments, kinds, strict=True)))

        return kind(*kinds), emit

    if operands == 1:
        return intrinsic(lambda typing, x: define((x,)))
    if operands == 2:
        return intrinsic(lambda typing, x, y: define((x, y)))
    return intrinsic(lambda typing, x, y, z: define((x, y, z)))


@_of_lanes
def larger(builder: Any, kind: Lanes, x: Value, y: Value) -> Value:  # noqa: ARG001
    """Elementwise max(x, y); y where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@_of_lanes
def where_positive(builder: Any, kind: Lanes, x: Value, y: Value, z: Value) -> Value:
    """Select y where x > 0, else z."""
    return builder.select(builder.fcmp_ordered(">", x, same(0.0, kind)), y, z)


@_of_lanes
def where_possible(builder: Any, kind: Lanes, x: Value, y: Value, z: Value) -> Value:
    """Select y where the logarithm x is above -inf, else z."""
    return builder.select(builder.fcmp_ordered(">", x, same(-math.inf, kind)), y, z)


@_of_lanes
def exp(builder: Any, kind: Lanes, x: Value) -> Value:
    """Exponential; results below the smallest normal number are 0."""
    form = kind.format
    magic = 1.5 * 2.0**form.mantissa + form.bias  # the spacing of numbers there is 1
    low = builder.fcmp_unordered("<", x, same(form.lowest, kind))  # also true of NaN
    x_in = builder.select(builder.fcmp_ordered(">", x, same(form.highest, kind)), same(form.highest, kind), x)
    x_in = builder.select(low, same(form.lowest, kind), x_in)
    rounded = builder.fadd(builder.fmul(x_in, same(1 / math.log(2), kind)), same(magic, kind))
    n = builder.fsub(rounded, same(magic, kind))
    high, low_part = _log_2(form)
    r = builder.fsub(x_in, builder.fmul(n, same(high, kind), flags=FUSED), flags=FUSED)
    r = builder.fsub(r, builder.fmul(n, same(low_part, kind), flags=FUSED), flags=FUSED)
    total = _series(builder, kind, r, [1 / math.factorial(i) for i in range(form.exp_terms)])
    shift = ir.Constant(ir.VectorType(form.integer, kind.width), [form.mantissa] * kind.width)
    power = builder.shl(builder.bitcast(rounded, shift.type), shift)
    scaled = builder.fmul(total, builder.bitcast(power, kind.vector))
    unsure = builder.fcmp_unordered("uno", x, x)
    return builder.select(unsure, x, builder.select(low, same(0.0, kind), scaled))


@_of_lanes
def log(builder: Any, kind: Lanes, x: Value) -> Value:
    """Logarithm, also of subnormal numbers; -inf for 0, NaN for negative numbers."""
    form = kind.format
    smallest, lift = 2.0 ** (1 - form.bias), form.mantissa + 2
    small = builder.fcmp_ordered("<", x, same(smallest, kind))
    normal = builder.select(small, builder.fmul(x, same(2.0**lift, kind)), x)
    bits_type = ir.VectorType(form.integer, kind.width)
    bits = builder.bitcast(normal, bits_type)
    # The exponent as a float: put it into the low bits of 2^mantissa, then subtract 2^mantissa.
    exponent = builder.lshr(bits, same_bits(form.mantissa, kind))
    anchor = (form.bias + form.mantissa) << form.mantissa
    n = builder.bitcast(builder.or_(exponent, same_bits(anchor, kind)), kind.vector)
    n = builder.fsub(n, same(2.0**form.mantissa + form.bias, kind))
    n = builder.select(small, builder.fsub(n, same(float(lift), kind)), n)
    fraction = builder.and_(bits, same_bits((1 << form.mantissa) - 1, kind))
    m = builder.bitcast(builder.or_(fraction, same_bits(form.bias << form.mantissa, kind)), kind.vector)
    above = builder.fcmp_ordered(">", m, same(math.sqrt(2), kind))
    m = builder.select(above, builder.fmul(m, same(0.5, kind)), m)
    n = builder.select(above, builder.fadd(n, same(1.0, kind)), n)
    f = builder.fsub(m, same(1.0, kind))
    s = builder.fdiv(f, builder.fadd(f, same(2.0, kind)))
    square = builder.fmul(s, s)
    tail = builder.fmul(square, _series(builder, kind, square, [2 / (2 * i + 3) for i in range(form.log_terms)]))
    high, low = _log_2(form)
    # f - s (f - tail) is 2 artanh s, with an exact leading term.
    inner = builder.fsub(builder.fmul(s, builder.fsub(f, tail)), builder.fmul(n, same(low, kind)))
    total = builder.fsub(builder.fmul(n, same(high, kind)), builder.fsub(inner, f))
    infinite = builder.fcmp_unordered("==", x, same(math.inf, kind))  # or NaN
    total = builder.select(infinite, x, total)
    total = builder.select(builder.fcmp_ordered("==", x, same(0.0, kind)), same(-math.inf, kind), total)
    return builder.select(builder.fcmp_ordered("<", x, same(0.0, kind)), same(math.nan, kind), total)


def _log_2(form: Format) -> tuple[float, float]:
    """Split log 2 into a number with few bits, whose integer multiples are exact, and the rest."""
    return (LOG_2_HIGH, LOG_2_LOW) if form.bits == 64 else (0.693359375, -2.12194440e-4)


def _series(builder: Any, kind: Lanes, x: Value, coefficients: list[float]) -> Value:
    """Evaluate sum_i c_i x^i by Horner's rule."""
    total = same(coefficients[-1], kind)
    for coefficient in coefficients[-2::-1]:
        total = builder.fadd(builder.fmul(total, x, flags=FUSED), same(coefficient, kind), flags=FUSED)
    return total


# -------------------------------------------------------------------------------------------------------- memory
@intrinsic
def load(typing: Any, like: Any, address: Any, index: Any) -> Any:  # noqa: ARG001
    """Load the vector at an index from an address."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
        loaded = builder.load(place(builder, like, *arguments[1:]))
        loaded.align = like.format.bits // 8
        return loaded

    return like(like, types.int64, types.int64), emit


@intrinsic
def store(typing: Any, vector: Any, address: Any, index: Any) -> Any:  # noqa: ARG001
    """Store a vector at an index from an address."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        kind = signature.args[0]
        builder.store(arguments[0], place(builder, kind, *arguments[1:])).align = kind.format.bits // 8
        return context.get_dummy_value()

    return types.void(vector, types.int64, types.int64), emit


@intrinsic
def together(typing: Any, x: Any) -> Any:  # noqa: ARG001
    """Sum of all lanes, as a vector with one lane."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
        total, width = arguments[0], x.width
        while width > 1:
            width //= 2
            halves = [
                ir.Constant(ir.VectorType(INT32, width), [first + i for i in range(width)]) for first in (0, width)
            ]
            total = builder.fadd(*(builder.shuffle_vector(total, total, half) for half in halves))
        return total

    return Lanes(x.number, 1)(x), emit


@intrinsic
def size_of(typing: Any, like: Any) -> Any:  # noqa: ARG001
    """Size of a vector in bytes."""
    return types.int64(like), lambda context, builder, signature, arguments: whole(like.size)


@intrinsic
def lanes(typing: Any, like: Any) -> Any:  # noqa: ARG001
    """Number of lanes."""
    return types.int64(like), lambda context, builder, signature, arguments: whole(like.width)


@intrinsic
def number(typing: Any, like: Any, x: Any) -> Any:  # noqa: ARG001
    """Vector with a float64 number in every lane."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
        single = arguments[1] if like.format.bits == 64 else builder.fptrunc(arguments[1], like.format.kind)
        one = Lanes(like.number, 1)
        blank = ir.Constant(one.vector, ir.Undefined)
        return wide(builder, builder.insert_element(blank, single, ir.Constant(INT32, 0)), one, like)

    return like(like, types.float64), emit


def _gather(element: Any, convert: Callable[[Any, Value, Lanes], Value]) -> Any:
    @intrinsic
    def code(typing: Any, like: Any, address: Any, apart: Any, count: Any) -> Any:  # noqa: ARG001
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
            _, start, stride, rows = arguments
            kind = element or like.format.kind
            total = ir.Constant(like.vector, ir.Undefined)
            last = builder.sub(rows, whole(1))
            for lane in range(like.width):
                row = builder.select(builder.icmp_signed("<", last, whole(lane)), last, whole(lane))
                there = builder.inttoptr(builder.add(start, builder.mul(row, stride)), kind.as_pointer())
                read = convert(builder, builder.load(there), like)
                total = builder.insert_element(total, read, ir.Constant(INT32, lane))
            return total

        return like(like, types.int64, types.int64, types.int64), emit

    return code


# Read rows with a stride of `apart` bytes, one for each lane; lanes beyond `count` repeat the last row.
gather = _gather(None, lambda builder, read, like: read)
gather_bytes = _gather(ir.IntType(8), lambda builder, read, like: builder.uitofp(read, like.format.kind))


@intrinsic
def spread(typing: Any, like: Any, source: Any, items: Any, to: Any, apart: Any, count: Any) -> Any:  # noqa: ARG001
    """Write item i of lane l to position i of row l, for `count` rows with a stride of `apart` bytes."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
        _, start, many, address, stride, rows = arguments
        width, step = like.width, whole(like.format.bits // 8)
        one = Lanes(like.number, 1)

        def vector(item: Value) -> Value:
            loaded = builder.load(place(builder, like, start, item))
            loaded.align = like.size
            return loaded

        def write(value: Value, kind: Any, lane: int, item: Value, *, is_passing: bool = False) -> None:
            with builder.if_then(builder.icmp_signed(">", rows, whole(lane))):
                row = builder.add(address, builder.mul(whole(lane), stride))
                there = builder.inttoptr(builder.add(row, builder.mul(item, step)), kind.as_pointer())
                written = builder.store(value, there)
                written.align = like.size if is_passing else like.format.bits // 8
                if is_passing:
                    written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(INT32, 1)]))

        def write_squares(*, is_passing: bool) -> None:
            """Write transposed squares; the last square overlaps the previous one instead of leaving single items."""
            squares = builder.sdiv(builder.add(many, whole(width - 1)), whole(width))
            with cgutils.for_range(builder, squares) as loop:
                item, end = builder.mul(loop.index, whole(width)), builder.sub(many, whole(width))
                item = builder.select(builder.icmp_signed("<", end, item), end, item)
                columns = [vector(builder.add(item, whole(i))) for i in range(width)]
                for lane, row in enumerate(_transposed(builder, width, columns)):
                    write(row, like.vector, lane, item, is_passing=is_passing)

        # Rows of complete cache lines are written with nontemporal stores, so that the cache need not read them first.
        lines = builder.or_(builder.or_(address, stride), builder.mul(many, step))
        is_aligned = builder.icmp_signed("==", builder.and_(lines, whole(LINE - 1)), whole(0))
        is_wide = builder.icmp_signed(">=", many, whole(width))
        with builder.if_else(is_wide) as (then, otherwise):
            with then:
                if IS_X86 and like.size == LINE:
                    with builder.if_else(is_aligned) as (aligned, others):
                        with aligned:
                            write_squares(is_passing=True)
                        with others:
                            write_squares(is_passing=False)
                else:
                    write_squares(is_passing=False)
            with otherwise, cgutils.for_range(builder, many) as loop:
                read = vector(loop.index)
                for lane in range(width):
                    single = builder.extract_element(read, ir.Constant(INT32, lane))
                    write(single, one.format.kind, lane, loop.index)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 5), emit


def _transposed(builder: Any, width: int, rows: list[Value]) -> list[Value]:
    """Transpose a square by interleaving the two halves of the rows log2(width) times."""
    half, step = width // 2, width
    order = ir.VectorType(INT32, width)
    low = ir.Constant(order, [i // 2 + (i % 2) * width for i in range(width)])
    high = ir.Constant(order, [half + i // 2 + (i % 2) * width for i in range(width)])
    while step > 1:
        rows = [builder.shuffle_vector(rows[i], rows[i + half], o) for i in range(half) for o in (low, high)]
        step //= 2
    return rows


@intrinsic
def all_between(typing: Any, x: Any, low: Any, high: Any) -> Any:  # noqa: ARG001
    """Return True if every lane lies strictly between two numbers; False for NaN."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
        kind, vector = signature.args[0], arguments[0]
        limits = [a if kind.format.bits == 64 else builder.fptrunc(a, kind.format.kind) for a in arguments[1:]]
        inside = None
        for sign, limit in zip((">", "<"), limits, strict=True):
            blank = ir.Constant(kind.vector, ir.Undefined)
            first = builder.insert_element(blank, limit, ir.Constant(INT32, 0))
            order = ir.Constant(ir.VectorType(INT32, kind.width), [0] * kind.width)
            bound = builder.fcmp_ordered(sign, vector, builder.shuffle_vector(first, blank, order))
            inside = bound if inside is None else builder.and_(inside, bound)
        bits = ir.IntType(kind.width)
        return builder.icmp_unsigned("==", builder.bitcast(inside, bits), ir.Constant(bits, -1))

    return types.boolean(x, types.float64, types.float64), emit
