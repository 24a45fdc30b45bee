"""The log normaliser of the unit sphere, and with it the modified Bessel functions, to machine precision.

    g(s)  = log E exp(k t),   s = k²,   t one coordinate of a uniform point on the unit sphere of R^d
          = log[Gamma(d/2) (2/k)^(d/2-1) I_{d/2-1}(k)]                      [theory 3.4]
    a(s)  = 2 g'(s) = A(k) / k,   A = I_{d/2} / I_{d/2-1}                   norm of the mean, divided by k
    b(s)  = 2 a'(s) = (Var t - a) / k²

Two formulas, each used where it is exact. For s <= 2d, the power series of Z - 1 in s. Beyond, with t = tanh u,
Z is proportional to ∫ exp(k tanh u) cosh(u)^(1-d) du, an analytic integrand with one peak and fast tails, for which
the trapezoidal rule converges exponentially: 181 nodes, centred on the peak and scaled to its width, give 1e-13.
Both are plain sums, hence differentiable to every order, by every transform of torch.
"""

import math
from typing import NamedTuple

import torch

from .._errors import InputValueError
from .._typing import Float, Tensor

TERMS = 24  # terms of the power series: (s/2d)^j / j! < 1e-23 at s = 2d
STEP, REACH = 0.2, 18.0  # spacing and extent of the nodes, in widths of the peak
TAIL = 57.0  # widths after which the slowest tail, exp(-(d-1) u), is below 1e-17 for d = 2


class Radial(NamedTuple):
    """g, 2 g' and 4 g'' of the unit sphere as functions of s = k²."""

    log_normalizer: Float[Tensor, "..."]
    first: Float[Tensor, "..."]
    second: Float[Tensor, "..."]


def radial(s: Float[Tensor, "..."], dim: int) -> Radial:
    """(g, a, b) at s = k² >= 0 for the unit sphere of R^dim, dim >= 2."""
    near = s <= 2.0 * dim
    # Each branch gets arguments from its own range, so that the unused one has no NaN gradients.
    series = _by_series(s.where(near, 1.0), dim)
    nodes = _by_nodes(s.where(~near, 4.0 * dim), dim)
    return Radial(*(torch.where(near, x, y) for x, y in zip(series, nodes, strict=True)))


def log_bessel(order: float, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log I_order(x) for x > 0 and order 0, 1/2, 1, 3/2, ...; -inf at x = 0 unless the order is 0."""
    G = radial(x * x, _dim_of("log_bessel", order)).log_normalizer
    return G + torch.xlogy(x.new_tensor(order), x / 2) - math.lgamma(order + 1)


def bessel_ratio(order: float, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """I_{order+1}(x) / I_order(x), between 0 and 1."""
    return x * radial(x * x, _dim_of("bessel_ratio", order)).first


def _by_series(s: Tensor, dim: int) -> Radial:
    """Z - 1 = sum_{j>=1} c_j s^j with c_j = c_{j-1} / (4 j (dim/2 + j - 1)), and its first two derivatives."""
    c = [1.0]
    for j in range(1, TERMS + 1):
        c.append(c[-1] / (4 * j * (dim / 2 + j - 1)))
    excess = s * _horner(s, c[1:])
    first = _horner(s, [j * c[j] for j in range(1, TERMS + 1)]) / (1 + excess)
    second = _horner(s, [j * (j - 1) * c[j] for j in range(2, TERMS + 1)]) / (1 + excess)
    return Radial(excess.log1p(), 2 * first, 4 * (second - first**2))


def _by_nodes(s: Tensor, dim: int) -> Radial:
    """The trapezoidal rule in u, t = tanh u, around the peak t0 of k t + (dim-1)/2 log(1 - t²)."""
    p, k = dim - 1, s.sqrt()
    half = p / (2 * k)
    t0 = 1 / ((half * half + 1).sqrt() + half)  # the root of k (1 - t²) = p t in (0, 1)
    sech2 = p * t0 / k  # 1 - t0², without cancellation
    width = (sech2 * (2 * k * t0 + p)).rsqrt()

    # Nodes: evenly spaced near the peak, cubically stretched outside for the slow tails of low dimensions.
    count = round(REACH / STEP)
    y = torch.arange(-count, count + 1, dtype=s.dtype, device=s.device) * STEP
    stretch = max(0.0, TAIL / math.sqrt(p) - REACH) / REACH**3
    u = width.unsqueeze(-1) * (y * (1 + stretch * y * y))

    # cosh(u0 + u) / cosh(u0) and t - t0 = sinh(u) / (cosh(u0 + u) cosh(u0)), both without cancellation.
    up, down = (1 + t0).unsqueeze(-1), (sech2 / (1 + t0)).unsqueeze(-1)
    ratio = (up * u.exp() + down * (-u).exp()) / 2
    shift = u.sinh() * sech2.unsqueeze(-1) / ratio
    logit = k.unsqueeze(-1) * shift - p * ratio.log() + (1 + 3 * stretch * y * y).log()

    peak = logit.detach().amax(-1, keepdim=True)
    mass = (logit - peak).exp()
    total = mass.sum(-1)
    integral = k * t0 + p / 2 * sech2.log() + peak.squeeze(-1) + (total * STEP * width).log()
    mean = (mass * shift).sum(-1) / total
    variance = (mass * (shift - mean.unsqueeze(-1)) ** 2).sum(-1) / total
    first = (t0 + mean) / k
    return Radial(integral + _log_normalizing_constant(dim), first, (variance - first) / s)


def _log_normalizing_constant(dim: int) -> float:
    """log[Gamma(dim/2) / (Gamma((dim-1)/2) sqrt(pi))], the mass of the density of t."""
    x = (dim - 1) / 2
    if x < 16:
        return math.lgamma(x + 0.5) - math.lgamma(x) - math.log(math.pi) / 2
    # The two log gammas of a large dimension agree in most digits; a series computes their difference.
    odd = (-1 / 8, 1 / 192, -1 / 640, 17 / 14336, -31 / 18432, 691 / 180224)
    return math.log(x) / 2 + sum(c / x ** (2 * i + 1) for i, c in enumerate(odd)) - math.log(math.pi) / 2


def _horner(s: Tensor, coefficients: list[float]) -> Tensor:
    total = torch.full_like(s, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = total * s + c
    return total


def _dim_of(call: str, order: float) -> int:
    dim = round(2 * order + 2)
    if order < 0 or dim != 2 * order + 2:
        condition = "order must be one of 0, 1/2, 1, 3/2, ..."
        raise InputValueError(call, "order", f"{condition}, got order={order}", "Round it to a multiple of 1/2.")
    return dim
