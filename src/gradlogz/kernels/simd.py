"""Vector primitives for the compiled CPU path, written as LLVM instructions through numba.

    product     o_i = [a] o_i + sum_t k_it x_t                  ROWS rows of o in registers, x_t and o_i vectors
    turned      y_ji = x_ij                                     a square of WIDTH x WIDTH numbers by shuffles
    absorb      m, z, e, c <- merged with a tile of logits      running maximum, mass, first and centred second sum
    weigh       s -> p = exp(s - G), dp -> ds                   the tile of a backward pass
    cap         u -> c tanh(u / c), 1 - tanh²(u / c)            soft cap of logits and its slope

A tile holds LANES queries side by side in the lanes of vectors and one key per row: maxima and sums over keys then
never cross lanes. Memory is passed as integer addresses, since numba's arrays test every index for wraparound, which
prevents LLVM from vectorising. No fast-math flag is set: NaN and -inf keep their meaning.

    2^x = 2^round(x) P(x - round(x)),   x clamped at -127       adding MAGIC rounds, and leaves round(x) + 127 in the
                                                                low bits: shifted by 23, the number 2^round(x)

P is the minimax polynomial of degree 6; the relative error of 2^x is 8e-8, and 2^-inf is exactly 0.

Read next: attention/cpu.py, the attention made of these.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

# The features for which numba compiles; its settings may exclude some of this machine's.
FEATURES = frozenset((getattr(config, "CPU_FEATURES", None) or get_host_cpu_features()).split(","))
IS_X86 = "+sse2" in FEATURES
IS_WIDE = "+avx512f" in FEATURES  # 32 registers of 16 numbers each
WIDTH = 16 if IS_WIDE else 8 if "+avx" in FEATURES else 4  # numbers per vector
HAS_FMA = "+fma" in FEATURES or not IS_X86  # otherwise llvm.fma would call a library function per lane
COLUMNS = 4  # vectors side by side: 64 lanes with AVX512, so that lengths that are powers of 2 leave no lane idle
ROWS = 6 if IS_WIDE or not IS_X86 else 3  # ROWS x COLUMNS sums and COLUMNS + 1 factors fit the registers
LANES = WIDTH * COLUMNS
BYTES = 4  # per number

MAGIC = 12582912.0 + 127.0  # 1.5 x 2^23: the spacing of floats there is 1
POLYNOMIAL = (1.53533605e-4, 1.339887502e-3, 9.618436918e-3, 5.550332367e-2, 2.402264774e-1, 6.931471825e-1, 1.0)
LOG2E = 1.4426950408889634
TINY = 1e-37  # replaces a mass of 0 in a denominator
# tanh x = x P(x²) / Q(x²) for |x| < TANH_END and constant beyond: the rational function of Eigen, relative error 3e-7
TANH_END = 7.90531110763549805
TANH_ABOVE = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
TANH_BELOW = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)

INT64, INT32, INT8, FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()
VECTOR, WHOLE, OCTETS = (ir.VectorType(element, WIDTH) for element in (FLOAT, INT32, INT8))
Value = Any  # of llvmlite: an instruction, argument or constant


def whole(number: int) -> Value:
    """An integer constant."""
    return ir.Constant(INT64, number)


def lanes(number: float) -> Value:
    """A constant vector of equal numbers, rounded to float32."""
    return ir.Constant(VECTOR, [float(numpy.float32(number))] * WIDTH)


class Writer:
    """Appends vector instructions to the function being compiled."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context = context
        self.builder = builder

    def pointer(self, address: Value, index: Value, element: Any = VECTOR) -> Value:
        return self.builder.gep(self.builder.inttoptr(address, element.as_pointer()), [index])

    def load(self, address: Value, index: Value, element: Any = VECTOR) -> Value:
        loaded = self.builder.load(self.pointer(address, index, element))
        loaded.align = 1 if element is OCTETS else BYTES
        return loaded

    def store(self, vector: Value, address: Value, index: Value) -> None:
        self.builder.store(vector, self.pointer(address, index)).align = BYTES

    def row_address(self, address: Value, row: Value, stride: Value) -> Value:
        """Address of a row, for rows that are `stride` numbers apart."""
        return self.builder.add(address, self.builder.mul(row, self.builder.mul(stride, whole(BYTES))))

    def splat(self, number: Value) -> Value:
        nothing = ir.Constant(VECTOR, ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(WHOLE, [0] * WIDTH))

    def variable(self, start: Value) -> Value:
        """Allocate a vector that loops may change; LLVM keeps it in a register."""
        place = cgutils.alloca_once(self.builder, VECTOR)
        self.builder.store(start, place)
        return place

    def add(self, x: Value, y: Value) -> Value:
        return self.builder.fadd(x, y)

    def subtract(self, x: Value, y: Value) -> Value:
        return self.builder.fsub(x, y)

    def multiply(self, x: Value, y: Value) -> Value:
        return self.builder.fmul(x, y)

    def divide(self, x: Value, y: Value) -> Value:
        return self.builder.fdiv(x, y)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """Compute x y + z."""
        if not HAS_FMA:
            return self.add(self.multiply(x, y), z)
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        name = f"llvm.fma.v{WIDTH}f32"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [x, y, z])

    def larger(self, x: Value, y: Value) -> Value:
        """max(x, y); y where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def increase(self, place: Value, vector: Value) -> None:
        self.builder.store(self.add(self.builder.load(place), vector), place)

    def increase_by_product(self, place: Value, x: Value, y: Value) -> None:
        self.builder.store(self.fma(x, y, self.builder.load(place)), place)

    def horner(self, x: Value, coefficients: Sequence[float]) -> Value:
        total = lanes(coefficients[0])
        for coefficient in coefficients[1:]:
            total = self.fma(total, x, lanes(coefficient))
        return total

    def exponent(self, s: Value, reference: Value) -> Value:
        """Compute (s - reference) / log 2, at least -127; NaN where s is NaN."""
        return self.larger(lanes(-127.0), self.multiply(self.subtract(s, reference), lanes(LOG2E)))

    def exp2(self, x: Value) -> Value:
        """Compute 2^x for -127 <= x < 128."""
        rounded = self.add(x, lanes(MAGIC))
        fraction = self.subtract(x, self.subtract(rounded, lanes(MAGIC)))
        power = self.builder.shl(self.builder.bitcast(rounded, WHOLE), ir.Constant(WHOLE, [23] * WIDTH))
        return self.multiply(self.horner(fraction, POLYNOMIAL), self.builder.bitcast(power, VECTOR))

    def tanh(self, x: Value) -> Value:
        x = self.larger(lanes(-TANH_END), x)
        x = self.builder.select(self.builder.fcmp_ordered(">", x, lanes(TANH_END)), lanes(TANH_END), x)
        square = self.multiply(x, x)
        return self.divide(self.multiply(x, self.horner(square, TANH_ABOVE)), self.horner(square, TANH_BELOW))

    def transpose(self, rows: list[Value]) -> list[Value]:
        """Transpose a square: log2(WIDTH) times, interleave the first half of the rows with the second."""
        half = WIDTH // 2
        low = ir.Constant(WHOLE, [i // 2 + (i % 2) * WIDTH for i in range(WIDTH)])
        high = ir.Constant(WHOLE, [half + i // 2 + (i % 2) * WIDTH for i in range(WIDTH)])
        step = WIDTH
        while step > 1:
            rows = [
                self.builder.shuffle_vector(rows[i], rows[i + half], order)
                for i in range(half)
                for order in (low, high)
            ]
            step //= 2
        return rows


def instruction(result: Any = types.void, last: Any = types.int64) -> Callable[[Callable], Any]:
    """Make a function that writes LLVM code callable from compiled code; operands but the last are integers."""

    def decorate(code: Callable[..., Value | None]) -> Any:
        operand_signature = inspect.signature(code)  # numba matches operands by its names
        operands = len(operand_signature.parameters) - 1

        def define(typing: Any, *kinds: Any) -> Any:  # noqa: ARG001
            def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:  # noqa: ARG001
                written = code(Writer(context, builder), *arguments)
                return context.get_dummy_value() if written is None else written

            return result(*[types.int64] * (operands - 1), last), emit

        vars(define).update(__signature__=operand_signature, __name__=code.__name__, __doc__=code.__doc__)
        return intrinsic(define)

    return decorate


def product(columns: int, keep: str) -> Any:
    """Product o_i = start + sum_t k_it x_t for ROWS rows i; by `keep` the start is 0, o_i ("all") or a o_i ("scaled").

    Row i of o begins o_row i numbers after o, x_t begins x_row t numbers after x, and k_it lies at k_row i + k_term t.
    """

    @instruction()
    def code(
        write: Writer,
        o: Value,
        o_row: Value,
        a: Value,
        x: Value,
        x_row: Value,
        k: Value,
        k_row: Value,
        k_term: Value,
        terms: Value,
    ) -> None:
        builder = write.builder
        sums = [[write.variable(lanes(0.0)) for _ in range(columns)] for _ in range(ROWS)]
        starts = [write.row_address(k, whole(i), k_row) for i in range(ROWS)]
        with cgutils.for_range(builder, terms) as loop:
            row = write.row_address(x, loop.index, x_row)
            term = builder.mul(loop.index, k_term)
            # The fewer of vectors and factors are held in registers; the others are loaded one at a time.
            if columns <= ROWS:
                vectors = [write.load(row, whole(c)) for c in range(columns)]
                for i in range(ROWS):
                    factor = write.splat(write.load(starts[i], term, FLOAT))
                    for c in range(columns):
                        write.increase_by_product(sums[i][c], factor, vectors[c])
            else:
                factors = [write.splat(write.load(starts[i], term, FLOAT)) for i in range(ROWS)]
                for c in range(columns):
                    vector = write.load(row, whole(c))
                    for i in range(ROWS):
                        write.increase_by_product(sums[i][c], factors[i], vector)
        for i in range(ROWS):
            row = write.row_address(o, whole(i), o_row)
            for c in range(columns):
                total = builder.load(sums[i][c])
                if keep == "all":
                    total = write.add(write.load(row, whole(c)), total)
                if keep == "scaled":
                    total = write.fma(write.load(row, whole(c)), write.load(a, whole(c)), total)
                write.store(total, row, whole(c))

    return code


def turned(action: str) -> Any:
    """Transpose a square x of WIDTH x WIDTH numbers into y: "set" y, "add" to y, or "hide" y where byte mask x is 0.

    Rows of y and x are y_row and x_row numbers apart (bytes for a mask).
    """

    @instruction()
    def code(write: Writer, y: Value, y_row: Value, x: Value, x_row: Value) -> None:
        builder = write.builder
        if action == "hide":
            starts = [builder.add(x, builder.mul(whole(i), x_row)) for i in range(WIDTH)]
            octets = [write.load(start, whole(0), OCTETS) for start in starts]
            is_visible = [builder.icmp_unsigned("!=", row, ir.Constant(OCTETS, [0] * WIDTH)) for row in octets]
            square = [builder.select(row, lanes(0.0), lanes(-1.0)) for row in is_visible]
        else:
            square = [write.load(write.row_address(x, whole(i), x_row), whole(0)) for i in range(WIDTH)]
        for i, column in enumerate(write.transpose(square)):
            address = write.row_address(y, whole(i), y_row)
            if action == "add":
                column = write.add(write.load(address, whole(0)), column)
            if action == "hide":
                hidden = builder.fcmp_ordered("<", column, lanes(0.0))
                column = builder.select(hidden, lanes(-numpy.inf), write.load(address, whole(0)))
            write.store(column, address, whole(0))

    return code


@instruction()
def absorb(write: Writer, s: Value, keys: Value, rows: Value) -> None:
    """Merge a tile of logits s into the rows m, z, e, c of running sums, write a into the row after, and s <- 2^x.

        m  maximum so far               x = (s - m) / log 2 <= 0, the exponent
        z  sum 2^x                      a = 2^((old m - m) / log 2), the factor of old sums
        e  sum 2^x x
        c  sum 2^x (x - e/z)²           summed about a guess within a tile, then about its mean, then merged [Chan]

    A tile is summed separately before it is added, so that errors grow with the number of tiles and not of keys.
    """
    builder = write.builder

    def at(row: int, c: int) -> Value:
        return whole(row * COLUMNS + c)

    old_top = [write.load(rows, at(0, c)) for c in range(COLUMNS)]
    tops = [write.variable(top) for top in old_top]
    with cgutils.for_range(builder, keys) as loop:
        row = write.row_address(s, loop.index, whole(LANES))
        for c in range(COLUMNS):
            builder.store(write.larger(write.load(row, whole(c)), builder.load(tops[c])), tops[c])
    past, sums, top = [], [], [builder.load(place) for place in tops]
    for c in range(COLUMNS):
        fall = write.exponent(old_top[c], top[c])
        factor = write.exp2(fall)
        z, e, centred = (write.load(rows, at(row, c)) for row in (1, 2, 3))
        mass = write.multiply(factor, z)
        first = write.multiply(factor, write.fma(fall, z, e))
        # Any guess of the tile's mean is correct; the old mean, discounted as the maximum rises, is close.
        guess = write.multiply(factor, write.divide(e, write.larger(z, lanes(TINY))))
        past.append((mass, first, write.multiply(factor, centred), guess))
        sums.append([write.variable(lanes(0.0)) for _ in range(3)])
        write.store(top[c], rows, at(0, c))
        write.store(factor, rows, at(4, c))
    for c in range(COLUMNS):  # one column at a time: all sums and constants would not fit the registers
        with cgutils.for_range(builder, keys) as loop:
            row = write.row_address(s, loop.index, whole(LANES))
            x = write.exponent(write.load(row, whole(c)), top[c])
            p = write.exp2(x)
            write.store(p, row, whole(c))
            y = write.subtract(x, past[c][3])
            weighted = write.multiply(p, y)
            write.increase(sums[c][0], p)
            write.increase(sums[c][1], weighted)
            write.increase_by_product(sums[c][2], weighted, y)
    for c in range(COLUMNS):
        z, below_guess, about_guess = (builder.load(place) for place in sums[c])
        old_z, old_e, old_centred, guess = past[c]
        total = write.add(old_z, z)
        e = write.fma(guess, z, below_guess)
        off = write.divide(below_guess, write.larger(z, lanes(TINY)))
        apart = write.subtract(write.add(off, guess), write.divide(old_e, write.larger(old_z, lanes(TINY))))
        centred = write.subtract(about_guess, write.multiply(z, write.multiply(off, off)))
        share = write.divide(write.multiply(old_z, z), write.larger(total, lanes(TINY)))
        centred = write.fma(write.multiply(apart, apart), share, write.add(old_centred, centred))
        for i, merged in enumerate((total, write.add(old_e, e), centred), 1):
            write.store(merged, rows, at(i, c))


def weigh(*, curved: bool) -> Any:
    """Replace a tile of logits s by p = exp(s - G) and a tile dp by ds = p (dp + c0 + y (c1 + c2 y)), y = s - E.

    `rows` holds G, c0 and, if `curved`, E, c1, c2. Where p is 0, y may be infinite and is replaced by 0.
    """

    @instruction()
    def code(write: Writer, s: Value, dp: Value, keys: Value, rows: Value) -> None:
        builder = write.builder
        G, c0, E, c1, c2 = ([write.load(rows, whole(row * COLUMNS + c)) for c in range(COLUMNS)] for row in range(5))
        with cgutils.for_range(builder, keys) as loop:
            row, slope_row = (write.row_address(tile, loop.index, whole(LANES)) for tile in (s, dp))
            for c in range(COLUMNS):
                logit = write.load(row, whole(c))
                p = write.exp2(write.exponent(logit, G[c]))
                slope = write.add(write.load(slope_row, whole(c)), c0[c])
                if curved:
                    y = write.subtract(logit, E[c])
                    y = builder.select(builder.fcmp_ordered("==", p, lanes(0.0)), lanes(0.0), y)
                    slope = write.fma(y, write.fma(c2[c], y, c1[c]), slope)
                write.store(p, row, whole(c))
                write.store(write.multiply(p, slope), slope_row, whole(c))

    return code


@instruction(last=types.float64)
def cap(write: Writer, s: Value, slope: Value, keys: Value, softcap: Value) -> None:
    """Soft cap of a tile, s <- softcap tanh(s / softcap); its slope 1 - tanh² goes to `slope` unless that is 0."""
    builder = write.builder
    limit = write.splat(builder.fptrunc(softcap, FLOAT))
    with cgutils.for_range(builder, builder.mul(keys, whole(COLUMNS))) as loop:
        t = write.tanh(write.divide(write.load(s, loop.index), limit))
        write.store(write.multiply(limit, t), s, loop.index)
        with builder.if_then(builder.icmp_signed("!=", slope, whole(0))):
            one = lanes(1.0)
            write.store(write.multiply(write.subtract(one, t), write.add(one, t)), slope, loop.index)


@instruction()
def multiply(write: Writer, s: Value, factor: Value, keys: Value) -> None:
    """Multiply two tiles: s <- s factor."""
    with cgutils.for_range(write.builder, write.builder.mul(keys, whole(COLUMNS))) as loop:
        write.store(write.multiply(write.load(s, loop.index), write.load(factor, loop.index)), s, loop.index)


@instruction()
def move(write: Writer, to: Value, source: Value, count: Value) -> None:
    """Copy numbers."""
    builder = write.builder
    vectors = builder.sdiv(count, whole(WIDTH))
    with cgutils.for_range(builder, vectors) as loop:
        write.store(write.load(source, loop.index), to, loop.index)
    with cgutils.for_range(builder, count, start=builder.mul(vectors, whole(WIDTH))) as loop:
        builder.store(write.load(source, loop.index, FLOAT), write.pointer(to, loop.index, FLOAT))


def _reader(element: Any, kind: Any) -> Any:
    @instruction(result=kind)
    def code(write: Writer, address: Value, index: Value) -> Value:
        return write.builder.load(write.pointer(address, index, element))

    return code


read = _reader(FLOAT, types.float32)  # the number at an index from an address
read_byte = _reader(INT8, types.int8)
read_integer = _reader(INT64, types.int64)
read_double = _reader(ir.DoubleType(), types.float64)


@instruction(last=types.float32)
def put(write: Writer, address: Value, index: Value, number: Value) -> None:
    """Write a number at an index from an address."""
    write.builder.store(number, write.pointer(address, index, FLOAT))


@instruction(result=types.int64)
def take(write: Writer, counter: Value) -> Value:
    """Return the integer at an address and increase it by one, atomically: no two threads get the same."""
    return write.builder.atomic_rmw("add", write.pointer(counter, whole(0), INT64), whole(1), "monotonic")
