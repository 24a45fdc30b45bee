"""Switching filters of functions on the CPU, compiled by numba: EKF, UKF, and modes that lack components.

    imm, gpb1, gpb2      all steps of all targets, one after the other, float64
    functions            linear maps; turns of unknown rate; range, bearing and elevation; for the UKF functions that
                         their user compiled with numba (`FunctionForm`)

The computation is that of ../../filters/gaussian/switching_steps.py with the linearisations of
../../filters/models/nonlinear_model.py and the filling of ../../filters/moment_matching.py, term by term. A linear mode
is the EKF of a linear function. At the first observation without a finite positive density the kernel gives up, and
the caller uses the torch path, which explains or handles it.

Read next: ../../filters/gaussian/switching.py (the caller), cpu.py (linear models, many targets in vectors).
"""

import math
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..._typing import Bool, Float, Tensor
from ..workers import CachedFunction
from .fields import FIELDS, KernelResult
from .forms import LINEAR, NODES, OWN, RANGE_BEARING_ELEVATION, TURN, WEIGHTS

LOG_2_PI = math.log(2 * math.pi)
EPS = numpy.finfo(numpy.float64).eps
TINY = numpy.finfo(numpy.float64).tiny ** 0.5
HIGHEST = math.log(numpy.finfo(numpy.float64).max) / 6  # as in moment_matching.weigh
SMALL_TURN = 0.1  # angle below which sin(z) / z is a series, as in nonlinear_motion.turned
CARRIED = {"mean": "gs", "covariance": "gss", "log_probability": "k", "log_likelihood": ""}


class FunctionProblem(NamedTuple):
    """A model as the kernel takes it: float64 tensors that start with a dimension of size 1 or of targets.

    Attributes:
        matrices: transition, F, Q, H, R, b, d.
        has: mask of the components of each mode.
        fill: whether components that a mode lacks are filled in from the others.
        move, observe: code and places of the function of each mode, [k, 9]; for OWN code and address.
        numbers: step of turns and origin of sensors, of each mode, [1 or targets, k, 4].
        is_flow: whether Q of a turn is a spectral density, whose noise turns too.
        angles: mask of the components of an observation that are angles.
        sigma: alpha, beta and kappa of the UKF; None for the EKF.
    """

    matrices: tuple[Tensor, ...]
    has: Bool[Tensor, "k s"]
    fill: bool
    move: Any
    observe: Any
    numbers: Any
    is_flow: bool
    angles: Any
    sigma: tuple[float, float, float] | None


def forward(
    depth: int,
    problem: FunctionProblem,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    observations: Float[Tensor, "*b t o"],
    observed: Bool[Tensor, "*b t o"] | None,
    *,
    last: bool,
    wanted: frozenset[str],
) -> KernelResult | None:
    """Filter a series; None if a density was not finite and positive. Arguments as in cpu.forward."""
    y, (k, s) = observations, problem.has.shape
    batch, (steps, o) = tuple(y.shape[:-2]), y.shape[-2:]
    targets, shapes, counts, offsets = _layout(batch, steps, (k, s, o, 1 if depth == 1 else k), last)
    buffer = y.new_empty(offsets[-1])
    mean, covariance, log_probability, log_likelihood = map(_as_array, state)
    fits = _kernel()(
        depth,
        tuple(map(_as_array, problem.matrices)),
        _as_array(problem.has),
        problem.fill,
        problem.move,
        problem.observe,
        problem.numbers,
        problem.is_flow,
        problem.angles,
        (1.0, 2.0, 0.0) if problem.sigma is None else problem.sigma,
        problem.sigma is not None,
        (
            mean.reshape(targets, *mean.shape[-2:]),
            covariance.reshape(targets, *covariance.shape[-3:]),
            log_probability.reshape(targets, k),
            log_likelihood.reshape(targets),
        ),
        _as_array(y).reshape(targets, steps, o),
        NOTHING if observed is None else _as_array(observed).reshape(targets, steps, o),
        last,
        buffer.numpy(),
        offsets,
    )
    if not fits:
        return None
    # Not views: writing to one view would bump the version counter of all.
    parts = torch.unsafe_split_with_sizes(buffer, counts)
    names = (*FIELDS, *CARRIED)
    tensors = [
        None if i < len(FIELDS) and name not in wanted else p if len(shape) == 1 else p.view(shape)
        for i, (name, p, shape) in enumerate(zip(names, parts, shapes, strict=True))
    ]
    return KernelResult(tuple(tensors[: len(FIELDS)]), *tensors[len(FIELDS) :])  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _layout(
    batch: tuple[int, ...], steps: int, sizes: tuple[int, int, int, int], last: bool
) -> tuple[int, list[tuple[int, ...]], list[int], Any]:
    """Number of targets, and shapes, sizes and offsets of the results in their buffer."""
    letters, times = dict(zip("ksog", sizes, strict=True)), () if last else (steps,)
    shapes = [(*batch, *times, *(letters[c] for c in field.shape)) for field in FIELDS.values()]
    shapes += [(*batch, *(letters[c] for c in shape)) for shape in CARRIED.values()]
    counts = [math.prod(shape) for shape in shapes]
    offsets = numpy.fromiter(accumulate(counts, initial=0), numpy.int64, len(counts) + 1)
    return math.prod(batch), shapes, counts, offsets


def _as_array(tensor: Tensor) -> Any:
    """Contiguous numpy array, without a copy where possible."""
    return (tensor.detach() if tensor.requires_grad else tensor).contiguous().numpy()


NOTHING: Any = numpy.empty((0, 0, 0), numpy.bool_)


@cache
def _kernel() -> Any:
    """The compiled filter."""
    return CachedFunction(_filter)


inner: Any = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


# ------------------------------------------------------------------------------------------------------- functions
@inner
def _sinc(z: float) -> float:
    """sin(z) / z."""
    if abs(z) >= SMALL_TURN:
        return math.sin(z) / z
    square = z * z
    return 1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))


@inner
def _sinc_slope(z: float) -> float:
    """Derivative of sin(z) / z."""
    if abs(z) >= SMALL_TURN:
        return (math.cos(z) - math.sin(z) / z) / z
    square = z * z
    return -z / 3 * (1 - square / 10 * (1 - square / 28 * (1 - square / 54)))


@inner
def _versine_slope(z: float) -> float:
    """Derivative of (1 - cos z) / z."""
    if abs(z) >= SMALL_TURN:
        return (z * math.sin(z) - 2 * math.sin(z / 2) ** 2) / (z * z)
    square = z * z
    return 0.5 - square / 8 * (1 - square / 18 * (1 - square / 40 * (1 - square / 70)))


@intrinsic
def _call(_: Any, address: Any, x: Any, out: Any) -> Any:
    """Call the C function at an address with the addresses of two arrays."""

    def write(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), (pointer, pointer)).as_pointer()
        called, *arrays = (builder.inttoptr(a, t) for a, t in zip(arguments, (kind, pointer, pointer), strict=True))
        builder.call(called, arrays)
        return context.get_dummy_value()

    return types.void(address, x, out), write


@inner
def _evaluate(code: Any, matrix: Any, offset: Any, numbers: Any, x: Any, out: Any) -> None:
    """Write f(x)."""
    if code[0] == LINEAR:
        for i in range(out.shape[0]):
            total = offset[i]
            for e in range(x.shape[0]):
                total += matrix[i, e] * x[e]
            out[i] = total
    elif code[0] == TURN:
        n, dt = code[1], numbers[0]
        px, vx, py, vy, w = x[code[2]], x[code[3]], x[code[4]], x[code[5]], x[code[n + 1]]
        z = w * dt
        forward, aside = dt * _sinc(z), dt * (z / 2) * _sinc(z / 2) ** 2
        cos, sin = math.cos(z), math.sin(z)
        out[:] = 0.0
        out[code[2]], out[code[3]] = px + forward * vx - aside * vy, cos * vx - sin * vy
        out[code[4]], out[code[5]] = py + aside * vx + forward * vy, sin * vx + cos * vy
        if n == 7:
            out[code[6]], out[code[7]] = x[code[6]] + dt * x[code[7]], x[code[7]]
        out[code[n + 1]] = w
    elif code[0] == OWN:
        _call(code[1], x.ctypes.data, out.ctypes.data)
    else:
        dx, dy = x[code[2]] - numbers[1], x[code[3]] - numbers[2]
        flat = math.hypot(dx, dy)
        out[0], out[1] = flat, math.atan2(dy, dx)
        if code[0] == RANGE_BEARING_ELEVATION:
            dz = x[code[4]] - numbers[3]
            out[0], out[2] = math.hypot(flat, dz), math.atan2(dz, flat)


@inner
def _differentiate(code: Any, matrix: Any, numbers: Any, x: Any, out: Any) -> None:
    """Write the Jacobian of f at x."""
    out[:] = 0.0
    if code[0] == LINEAR:
        out[:] = matrix
    elif code[0] == TURN:
        n, dt = code[1], numbers[0]
        vx, vy, w = x[code[3]], x[code[5]], x[code[n + 1]]
        z = w * dt
        forward, aside = dt * _sinc(z), dt * (z / 2) * _sinc(z / 2) ** 2
        forward_w, aside_w = dt * dt * _sinc_slope(z), dt * dt * _versine_slope(z)
        cos, sin = math.cos(z), math.sin(z)
        ix, iu, iy, iv, iw = code[2], code[3], code[4], code[5], code[n + 1]
        out[ix, ix] = out[iy, iy] = out[iw, iw] = 1.0
        out[ix, iu], out[ix, iv], out[ix, iw] = forward, -aside, forward_w * vx - aside_w * vy
        out[iu, iu], out[iu, iv], out[iu, iw] = cos, -sin, dt * (-sin * vx - cos * vy)
        out[iy, iu], out[iy, iv], out[iy, iw] = aside, forward, aside_w * vx + forward_w * vy
        out[iv, iu], out[iv, iv], out[iv, iw] = sin, cos, dt * (cos * vx - sin * vy)
        if n == 7:
            out[code[6], code[6]], out[code[6], code[7]], out[code[7], code[7]] = 1.0, dt, 1.0
    else:
        i, e = code[2], code[3]
        dx, dy = x[i] - numbers[1], x[e] - numbers[2]
        flat = math.hypot(dx, dy)
        out[1, i], out[1, e] = -dy / flat / flat, dx / flat / flat
        if code[0] == RANGE_BEARING_ELEVATION:
            h, dz = code[4], x[code[4]] - numbers[3]
            far = math.hypot(flat, dz)
            out[0, i], out[0, e], out[0, h] = dx / far, dy / far, dz / far
            out[2, h] = flat / far / far
            out[2, i], out[2, e] = -dz * (dx / flat) / far / far, -dz * (dy / flat) / far / far
        else:
            out[0, i], out[0, e] = dx / flat, dy / flat


@inner
def _subtract(left: Any, right: Any, angles: Any, out: Any) -> None:
    """Write left - right, with angles reduced to [-pi, pi)."""
    for i in range(out.shape[0]):
        away = left[i] - right[i]
        if angles.shape[0] > 0 and angles[i]:
            away = (away + math.pi) % (2 * math.pi) - math.pi
        out[i] = away


# --------------------------------------------------------------------------------------------------- linearisation
@inner
def _root(P: Any, L: Any) -> None:
    """Write the Cholesky factor; a singular covariance gives columns of 0."""
    n = P.shape[0]
    L[:] = 0.0
    for j in range(n):
        pivot = P[j, j]
        for h in range(j):
            pivot -= L[j, h] * L[j, h]
        if pivot > 8 * n * EPS * P[j, j] and pivot > 0:
            length = math.sqrt(pivot)
            L[j, j] = pivot / length
            for i in range(j + 1, n):
                rest = P[i, j]
                for h in range(j):
                    rest -= L[i, h] * L[j, h]
                L[i, j] = rest / length


@inner
def _linearize(
    code: Any,
    matrix: Any,
    offset: Any,
    numbers: Any,
    angles: Any,
    sigma: Any,
    is_unscented: bool,
    m: Any,
    P: Any,
    mean: Any,
    slope: Any,
    L: Any,
    W: Any,
) -> None:
    """Write f(m + e) ≈ mean + slope e, or mean + slope z + N(0, W) where e = L z."""
    n, o = m.shape[0], mean.shape[0]
    if not is_unscented:
        _evaluate(code, matrix, offset, numbers, m, mean)
        _differentiate(code, matrix, numbers, m, slope)
        return
    alpha, beta, kappa = sigma
    square = alpha**2 * (n + kappa)
    c = math.sqrt(square)
    center, first, point = numpy.empty(o), numpy.empty(o), numpy.empty(n)
    plus, minus = numpy.empty((n, o)), numpy.empty((n, o))
    _root(P, L)
    _evaluate(code, matrix, offset, numbers, m, center)
    for i in range(n):
        for h in range(n):
            point[h] = m[h] + c * L[h, i]
        _evaluate(code, matrix, offset, numbers, point, plus[i])
        for h in range(n):
            point[h] = m[h] - c * L[h, i]
        _evaluate(code, matrix, offset, numbers, point, minus[i])
        _subtract(plus[i], center, angles, plus[i])  # from here on relative to the centre
        _subtract(minus[i], center, angles, minus[i])
    for a in range(o):
        total = 0.0
        for i in range(n):
            total += plus[i, a] + minus[i, a]
        first[a] = -total / (2 * square)
        mean[a] = center[a] - first[a]
        for i in range(n):
            slope[a, i] = (plus[i, a] - minus[i, a]) / (2 * c)
            plus[i, a] = (plus[i, a] + minus[i, a]) / 2 + first[a]
    weight = 2 - n / square - alpha**2 + beta
    for a in range(o):
        for b in range(o):
            total = 0.0
            for i in range(n):
                total += plus[i, a] * plus[i, b]
            W[a, b] = total / square + weight * first[a] * first[b]


@inner
def _spread(slope: Any, P: Any, W: Any, is_unscented: bool, noise: Any, out: Any) -> None:
    """Write the covariance of a linearised function plus noise."""
    o, n = slope.shape
    if is_unscented:
        _times_transposed(slope, slope, out)
        for a in range(o):
            for b in range(o):
                out[a, b] += W[a, b] + noise[a, b]
    else:
        half = numpy.empty((o, n))
        _times(slope, P, half)
        _times_transposed(half, slope, out)
        for a in range(o):
            for b in range(o):
                out[a, b] += noise[a, b]
    _symmetrize(out)


@inner
def _process_noise(code: Any, numbers: Any, is_flow: bool, m: Any, Q: Any, out: Any) -> None:
    """Write Q, or for the flow of a turn ∫_0^dt Phi_u Q Phi_u^T du, Phi_u the Jacobian of the flow from u to dt."""
    if not is_flow or code[0] != TURN:
        out[:] = Q
        return
    s, dt = m.shape[0], numbers[0]
    x, part = numpy.empty(s), numpy.empty(4)
    Phi, half, term = numpy.empty((s, s)), numpy.empty((s, s)), numpy.empty((s, s))
    out[:] = 0.0
    for node, weight in zip(NODES, WEIGHTS):  # noqa: B905
        part[0] = node * dt
        _evaluate(code, Phi, m, part, m, x)
        part[0] = (1 - node) * dt
        _differentiate(code, Phi, part, x, Phi)
        _times(Phi, Q, half)
        _times_transposed(half, Phi, term)
        out += weight * dt * term


@inner
def _times(a: Any, b: Any, out: Any) -> None:
    """Write a b."""
    for i in range(out.shape[0]):
        for e in range(out.shape[1]):
            total = 0.0
            for h in range(b.shape[0]):
                total += a[i, h] * b[h, e]
            out[i, e] = total


@inner
def _times_transposed(a: Any, b: Any, out: Any) -> None:
    """Write a b^T."""
    for i in range(out.shape[0]):
        for e in range(out.shape[1]):
            total = 0.0
            for h in range(b.shape[1]):
                total += a[i, h] * b[e, h]
            out[i, e] = total


@inner
def _symmetrize(matrix: Any) -> None:
    for a in range(matrix.shape[0]):
        for b in range(a):
            matrix[a, b] = matrix[b, a] = (matrix[a, b] + matrix[b, a]) / 2


@inner
def _update(
    slope: Any,
    L: Any,
    W: Any,
    is_unscented: bool,
    R: Any,
    v: Any,
    is_observed: Any,
    m: Any,
    P: Any,
    new_m: Any,
    new_P: Any,
) -> float:
    """Condition a Gaussian on an innovation; returns the log density, NaN if there is none.

    In the coordinates z of e = L z for the UKF, where the covariance is the identity.
    """
    o, n = slope.shape
    H, N = numpy.zeros((o, n)), numpy.zeros((o, o))
    count = 0
    for a in range(o):
        if is_observed[a]:
            count += 1
            H[a] = slope[a]
            for b in range(o):
                if is_observed[b]:
                    N[a, b] = R[a, b] + (W[a, b] if is_unscented else 0.0)
        else:
            N[a, a] = 1.0
    HP = numpy.empty((o, n))
    for a in range(o):
        for i in range(n):
            if is_unscented:
                HP[a, i] = H[a, i]
            else:
                total = 0.0
                for h in range(n):
                    total += H[a, h] * P[h, i]
                HP[a, i] = total
    C = numpy.zeros((o, o))  # Cholesky factor of S
    for a in range(o):
        for b in range(a + 1):
            left, right = 0.0, 0.0
            for i in range(n):
                left += HP[a, i] * H[b, i]
                right += HP[b, i] * H[a, i]
            total = (left + N[a, b] + right + N[b, a]) / 2
            for h in range(b):
                total -= C[a, h] * C[b, h]
            if a == b:
                if not 0 < total < math.inf:
                    return math.nan
                C[a, a] = math.sqrt(total)
            else:
                C[a, b] = total / C[b, b]
    z, K = numpy.empty(o), numpy.empty((o, n))  # whitened innovation; transposed gain
    square, log_det = 0.0, 0.0
    for a in range(o):
        total = v[a] if is_observed[a] else 0.0
        for h in range(a):
            total -= C[a, h] * z[h]
        z[a] = total / C[a, a]
        square += z[a] * z[a]
        log_det += math.log(C[a, a])
        for i in range(n):
            rest = HP[a, i]
            for h in range(a):
                rest -= C[a, h] * K[h, i]
            K[a, i] = rest / C[a, a]
    for a in range(o - 1, -1, -1):
        for i in range(n):
            rest = K[a, i]
            for h in range(a + 1, o):
                rest -= C[h, a] * K[h, i]
            K[a, i] = rest / C[a, a]
    # Joseph's form
    A, B, step = numpy.empty((n, n)), numpy.empty((n, n)), numpy.empty(n)
    for i in range(n):
        total = 0.0
        for a in range(o):
            if is_observed[a]:
                total += K[a, i] * v[a]
        step[i] = total
        for e in range(n):
            total = 1.0 if i == e else 0.0
            for a in range(o):
                total -= K[a, i] * H[a, e]
            A[i, e] = total
    if is_unscented:
        _times_transposed(A, A, new_P)
    else:
        _times(A, P, B)
        _times_transposed(B, A, new_P)
    for i in range(n):
        for e in range(n):
            total = 0.0
            for a in range(o):
                for b in range(o):
                    total += K[a, i] * N[a, b] * K[b, e]
            new_P[i, e] += total
    _symmetrize(new_P)
    if is_unscented:
        _times(L, new_P, B)
        _times_transposed(B, L, new_P)
        _symmetrize(new_P)
        for i in range(n):
            total = m[i]
            for h in range(i + 1):
                total += L[i, h] * step[h]
            new_m[i] = total
    else:
        for i in range(n):
            new_m[i] = m[i] + step[i]
    return -(square + count * LOG_2_PI) / 2 - log_det


# ------------------------------------------------------------------------------------------------- moment matching
@inner
def _weigh(weight: Any, logarithm: Any, log_sum: Any, share: Any) -> None:
    """Write log sum_i w_ij exp a_ij and the shares; see moment_matching.weigh."""
    n, k = share.shape
    for j in range(k):
        alive, possible, top = False, False, -math.inf
        for i in range(n):
            possible = possible or logarithm[i, j] > -math.inf
            if logarithm[i, j] > -math.inf and weight[i, j] > 0:
                alive = True
                top = max(top, logarithm[i, j])
        if not alive:
            for i in range(n):
                top = max(top, logarithm[i, j]) if possible else 0.0
        total = 0.0
        for i in range(n):
            a = logarithm[i, j] if alive or possible else 0.0
            share[i, j] = (weight[i, j] if alive else 1.0) * math.exp(min(a - top, HIGHEST))
            total += share[i, j]
        for i in range(n):
            share[i, j] /= total
        log_sum[j] = top + math.log(total) if alive else -math.inf


@inner
def _collapse(share: Any, m: Any, P: Any, has: Any, fill: bool, mean: Any, covariance: Any) -> None:
    """Write the moments of a mixture; `fill` fills in what Gaussians lack (moment_matching.fill)."""
    n, s = m.shape
    if fill:
        filled_m, filled_P = numpy.empty((n, s)), numpy.empty((n, s, s))
        _fill(share, m, P, has, filled_m, filled_P)
        m, P = filled_m, filled_P
    for a in range(s):
        total = 0.0
        for i in range(n):
            total += share[i] * m[i, a]
        mean[a] = total
    for a in range(s):
        for b in range(s):
            total = 0.0
            for i in range(n):
                total += share[i] * (P[i, a, b] + (m[i, a] - mean[a]) * (m[i, b] - mean[b]))
            covariance[a, b] = total
    _symmetrize(covariance)


@inner
def _fill(share: Any, m: Any, P: Any, has: Any, filled_m: Any, filled_P: Any) -> None:
    """Write Gaussians with the components that they lack filled in from the others."""
    n, s = m.shape
    f, D, alike = numpy.zeros(s), numpy.zeros(s), numpy.zeros(s)
    for c in range(s):
        mass, many = 0.0, 0
        for i in range(n):
            if has[i, c]:
                mass += share[i]
                many += 1
        if mass > TINY:
            D[c] = 1 / math.sqrt(mass)
        else:
            alike[c] = 1 / math.sqrt(many)
        for i in range(n):
            if has[i, c]:
                f[c] += (share[i] / mass if mass > TINY else 1.0 / many) * m[i, c]
    for c in range(s):
        for d in range(s):
            by_share, by_number = 0.0, 0.0
            for i in range(n):
                if has[i, c] and has[i, d]:
                    second = P[i, c, d] + (m[i, c] - f[c]) * (m[i, d] - f[d])
                    by_share += share[i] * second
                    by_number += second
            Phi = by_share * D[c] * D[d] + by_number * alike[c] * alike[d]
            for i in range(n):
                if has[i, c] and has[i, d]:
                    filled_P[i, c, d] = P[i, c, d]
                else:
                    filled_P[i, c, d] = 0.0 if has[i, c] or has[i, d] else Phi
    for i in range(n):
        for c in range(s):
            filled_m[i, c] = m[i, c] if has[i, c] else f[c]


@inner
def _keep(has: Any, m: Any, P: Any) -> None:
    """Set the components that a mode lacks to 0."""
    for a in range(m.shape[0]):
        if not has[a]:
            m[a] = 0.0
            P[a, :] = 0.0
            P[:, a] = 0.0


# --------------------------------------------------------------------------------------------------------- filters
def _filter(
    depth: int,
    matrices: Any,
    has: Any,
    fill: bool,
    move: Any,
    observe: Any,
    numbers_all: Any,
    is_flow: bool,
    angles: Any,
    sigma: Any,
    is_unscented: bool,
    state: Any,
    y: Any,
    observed: Any,
    last: bool,
    buffer: Any,
    offsets: Any,
) -> bool:
    """Filter all targets; False if an observation has no finite positive density."""
    T_all, F_all, Q_all, H_all, R_all, b_all, d_all = matrices
    start_m, start_P, start_log_h, start_total = state
    k, s = has.shape
    targets, steps, o = y.shape
    g = start_m.shape[1]
    pairs = k if depth == 2 else 1  # Gaussians before the update, for each mode
    reported = 1 if last else steps
    no_angles = angles[:0]
    anything = False
    for a in range(angles.shape[0]):
        anything = anything or angles[a]
    wrapped = angles if anything else no_angles
    # Reported fields, in the order of FIELDS, then the state
    mean_out = buffer[offsets[0] : offsets[1]].reshape((targets, reported, s))
    covariance_out = buffer[offsets[1] : offsets[2]].reshape((targets, reported, s, s))
    mode_m_out = buffer[offsets[2] : offsets[3]].reshape((targets, reported, k, s))
    mode_P_out = buffer[offsets[3] : offsets[4]].reshape((targets, reported, k, s, s))
    log_pi_out = buffer[offsets[4] : offsets[5]].reshape((targets, reported, k))
    before_m_out = buffer[offsets[5] : offsets[6]].reshape((targets, reported, s))
    before_P_out = buffer[offsets[6] : offsets[7]].reshape((targets, reported, s, s))
    predicted_m_out = buffer[offsets[7] : offsets[8]].reshape((targets, reported, k, s))
    predicted_P_out = buffer[offsets[8] : offsets[9]].reshape((targets, reported, k, s, s))
    log_c_out = buffer[offsets[9] : offsets[10]].reshape((targets, reported, k))
    innovation_out = buffer[offsets[10] : offsets[11]].reshape((targets, reported, o))
    S_out = buffer[offsets[11] : offsets[12]].reshape((targets, reported, o, o))
    mode_innovation_out = buffer[offsets[12] : offsets[13]].reshape((targets, reported, k, o))
    mode_S_out = buffer[offsets[13] : offsets[14]].reshape((targets, reported, k, o, o))
    likelihood_out = buffer[offsets[14] : offsets[15]].reshape((targets, reported, k))
    step_out = buffer[offsets[15] : offsets[16]].reshape((targets, reported))
    end_m = buffer[offsets[16] : offsets[17]].reshape((targets, g, s))
    end_P = buffer[offsets[17] : offsets[18]].reshape((targets, g, s, s))
    end_log_h = buffer[offsets[18] : offsets[19]].reshape((targets, k))
    end_total = buffer[offsets[19] : offsets[20]]
    # Working memory
    log_c, share, columns = numpy.empty(k), numpy.empty((k, k)), numpy.empty((k, k))
    mixed_m, mixed_P = numpy.empty(s), numpy.empty((s, s))
    pair_m, pair_P = numpy.empty((pairs, k, s)), numpy.empty((pairs, k, s, s))
    after_m, after_P = numpy.empty((k, pairs, s)), numpy.empty((k, pairs, s, s))
    pair_likelihood = numpy.empty((pairs, k))
    filled_m, filled_P = numpy.empty((k, s)), numpy.empty((k, s, s))
    predicted_m, predicted_P = numpy.empty((k, s)), numpy.empty((k, s, s))
    expected, S, mode_expected = numpy.empty((k, o)), numpy.empty((k, o, o)), numpy.empty(o)
    likelihood, log_pi, pi = numpy.empty(k), numpy.empty(k), numpy.empty(k)
    log_w, column, spare = numpy.empty(k), numpy.empty(k), numpy.empty((k, k))
    slope, L, W = numpy.empty((s, s)), numpy.empty((s, s)), numpy.empty((s, s))
    slope_o, W_o = numpy.empty((o, s)), numpy.empty((o, o))
    mode_m, mode_P = numpy.empty((k, s)), numpy.empty((k, s, s))
    noise = numpy.empty((s, s))
    v, is_observed = numpy.empty(o), numpy.ones(o, numpy.bool_)
    overall, overall_S = numpy.empty(o), numpy.empty((o, o))
    m, P, log_h = numpy.empty((g, s)), numpy.empty((g, s, s)), numpy.empty(k)
    for target in range(targets):
        T = T_all[target if T_all.shape[0] > 1 else 0]
        F = F_all[target if F_all.shape[0] > 1 else 0]
        Q = Q_all[target if Q_all.shape[0] > 1 else 0]
        H = H_all[target if H_all.shape[0] > 1 else 0]
        R = R_all[target if R_all.shape[0] > 1 else 0]
        b = b_all[target if b_all.shape[0] > 1 else 0]
        d = d_all[target if d_all.shape[0] > 1 else 0]
        numbers = numbers_all[target if numbers_all.shape[0] > 1 else 0]
        m[:], P[:], log_h[:], total = start_m[target], start_P[target], start_log_h[target], start_total[target]
        for time in range(steps):
            now = 0 if last else time
            if observed.shape[0] > 0:
                is_observed[:] = observed[target, time]
            # Mix and predict, mode by mode --------------------------------------------------------------------------
            for i in range(k):
                columns[i, :] = log_h[i]
            _weigh(T, columns, log_c, share)
            for j in range(k):
                column[:] = share[:, j]
                if depth == 1:
                    mixed_m[:], mixed_P[:] = m[0], P[0]
                elif depth == 2 and fill:
                    _fill(column, m, P, has, filled_m, filled_P)
                    _collapse(column, filled_m, filled_P, has, False, mixed_m, mixed_P)
                else:
                    _collapse(column, m, P, has, fill, mixed_m, mixed_P)
                _linearize(
                    move[j], F[j], b[j], numbers[j], no_angles, sigma, is_unscented,
                    mixed_m, mixed_P, predicted_m[j], slope, L, W,
                )  # fmt: skip
                _process_noise(move[j], numbers[j], is_flow, mixed_m, Q[j], noise)
                _spread(slope, mixed_P, W, is_unscented, noise, predicted_P[j])
                _keep(has[j], predicted_m[j], predicted_P[j])
                for i in range(pairs):
                    if depth != 2:
                        pair_m[i, j], pair_P[i, j] = predicted_m[j], predicted_P[j]
                        continue
                    source_m, source_P = (filled_m[i], filled_P[i]) if fill else (m[i], P[i])
                    _linearize(
                        move[j], F[j], b[j], numbers[j], no_angles, sigma, is_unscented,
                        source_m, source_P, pair_m[i, j], slope, L, W,
                    )  # fmt: skip
                    _process_noise(move[j], numbers[j], is_flow, source_m, Q[j], noise)
                    _spread(slope, source_P, W, is_unscented, noise, pair_P[i, j])
                    _keep(has[j], pair_m[i, j], pair_P[i, j])
            # Update, mode by mode -----------------------------------------------------------------------------------
            for j in range(k):
                for i in range(pairs):
                    _linearize(
                        observe[j], H[j], d[j], numbers[j], wrapped, sigma, is_unscented,
                        pair_m[i, j], pair_P[i, j], mode_expected, slope_o, L, W_o,
                    )  # fmt: skip
                    _subtract(y[target, time], mode_expected, wrapped, v)
                    pair_likelihood[i, j] = _update(
                        slope_o, L, W_o, is_unscented, R[j], v, is_observed,
                        pair_m[i, j], pair_P[i, j], after_m[j, i], after_P[j, i],
                    )  # fmt: skip
                    if not -math.inf < pair_likelihood[i, j] < math.inf or not numpy.isfinite(mode_expected).all():
                        return False
                # Moments of the observation of each mode
                if depth == 2:
                    _linearize(
                        observe[j], H[j], d[j], numbers[j], wrapped, sigma, is_unscented,
                        predicted_m[j], predicted_P[j], mode_expected, slope_o, L, W_o,
                    )  # fmt: skip
                expected[j] = mode_expected
                _spread(slope_o, predicted_P[j], W_o, is_unscented, R[j], S[j])
            # Weights ------------------------------------------------------------------------------------------------
            if depth == 2:
                for i in range(k):
                    for j in range(k):
                        columns[i, j] = log_h[i] + pair_likelihood[i, j]
                _weigh(share, pair_likelihood, likelihood, spare)  # for modes of probability 0
                _weigh(T, columns, log_w, share)
                for j in range(k):
                    if log_c[j] > -math.inf:
                        likelihood[j] = log_w[j] - log_c[j]
                    column[:] = share[:, j]
                    _collapse(column, after_m[j], after_P[j], has, False, mode_m[j], mode_P[j])
            else:
                for j in range(k):
                    likelihood[j], mode_m[j], mode_P[j] = pair_likelihood[0, j], after_m[j, 0], after_P[j, 0]
            top, step = -math.inf, 0.0
            for j in range(k):
                log_pi[j] = log_c[j] + likelihood[j]
                top = max(top, log_pi[j])
            if not -math.inf < top < math.inf:
                return False
            for j in range(k):
                step += math.exp(log_pi[j] - top)
            step = top + math.log(step)
            for j in range(k):
                log_pi[j] -= step
                pi[j] = math.exp(log_pi[j])
            total += step
            # Collapse -----------------------------------------------------------------------------------------------
            log_h[:] = log_pi
            if depth == 1:
                _collapse(pi, mode_m, mode_P, has, fill, m[0], P[0])
            else:
                m[:], P[:] = mode_m, mode_P
            # Report -------------------------------------------------------------------------------------------------
            if last and time < steps - 1:
                continue
            _collapse(pi, mode_m, mode_P, has, fill, mean_out[target, now], covariance_out[target, now])
            mode_m_out[target, now], mode_P_out[target, now], log_pi_out[target, now] = mode_m, mode_P, log_pi
            for j in range(k):
                pi[j] = math.exp(log_c[j])
            _collapse(pi, predicted_m, predicted_P, has, fill, before_m_out[target, now], before_P_out[target, now])
            predicted_m_out[target, now], predicted_P_out[target, now] = predicted_m, predicted_P
            log_c_out[target, now] = log_c
            for j in range(k):  # angles of all modes relative to those of the first
                if anything:
                    _subtract(expected[j], expected[0], wrapped, v)
                    expected[j] = expected[0] + v
            _collapse(pi, expected, S, has, False, overall, overall_S)
            _subtract(y[target, time], overall, wrapped, innovation_out[target, now])
            S_out[target, now] = overall_S
            for j in range(k):
                _subtract(y[target, time], expected[j], wrapped, mode_innovation_out[target, now, j])
                for a in range(o):
                    if not is_observed[a]:
                        mode_innovation_out[target, now, j, a] = math.nan
            for a in range(o):
                if not is_observed[a]:
                    innovation_out[target, now, a] = math.nan
            mode_S_out[target, now], likelihood_out[target, now], step_out[target, now] = S, likelihood, step
        end_m[target], end_P[target], end_log_h[target], end_total[target] = m, P, log_h, total
    return True
