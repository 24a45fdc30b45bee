"""The digamma function, and inverses for moment matching of Gamma, Dirichlet and Wishart distributions.

    gap(x)    = log x - digamma(x) > 0                   log E[x] - E[log x] of a Gamma distribution of shape x
              = sum_{j<10} 1/(x+j) - log(1 + 10/x) + 1/(2z) + sum_j B_2j / (2j z^2j),   z = x + 10
    gap(a)    = g               a decreases from infinity to 0 as g goes from 0 to infinity
    digamma(a_i) - digamma(sum a) = u_i                   E[log p_i] of a Dirichlet distribution

Plain arithmetic, as in gamma.py, has derivatives of every order. For large x the relative error of the gap stays at
1e-15, where the difference of log x and digamma(x) has lost all digits.

Inverses are computed by Newton's method without autograd. Two more steps with autograd make the first and second
derivative of the result correct: a step turns an error of order n into one of order 2n.
"""

from collections.abc import Callable

import torch

from .._errors import has_values
from .._typing import Float, Tensor

SHIFT = 10
COEFFICIENTS = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)  # B_2j / 2j
EULER = 0.5772156649015329
MOST = 24  # steps at most; four to twelve are usual, and all are taken where values cannot be read


def digamma_gap(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Gap log x - digamma(x) for x > 0."""
    square = (x + SHIFT) ** -2
    tail = torch.full_like(x, COEFFICIENTS[-1])
    for c in COEFFICIENTS[-2::-1]:
        tail = tail * square + c
    return _shifted(x, 1) - torch.log1p(SHIFT / x) + 0.5 / (x + SHIFT) + tail * square


def digamma_gap_slope(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Derivative of the gap, 1/x - trigamma(x) < 0."""
    inverse = 1 / (x + SHIFT)
    square = inverse * inverse
    tail = torch.full_like(x, 2 * len(COEFFICIENTS) * COEFFICIENTS[-1])
    for j in range(len(COEFFICIENTS) - 1, 0, -1):
        tail = tail * square + 2 * j * COEFFICIENTS[j - 1]
    return SHIFT / x * inverse - _shifted(x, 2) - 0.5 * square - tail * square * inverse


def digamma(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Derivative of log_gamma, for x > 0."""
    return x.log() - digamma_gap(x)


def trigamma(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Derivative of digamma, for x > 0."""
    return 1 / x - digamma_gap_slope(x)


def inverse_digamma_gap(gap: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Solve log a - digamma(a) = gap for a > 0, with gap > 0: the shape of a Gamma distribution.

    1/gap(a) is convex and has slopes from 1 to 2, so that Newton's method from the right, a = 1/gap, stays there.
    """
    g = gap.detach()

    def step(a: Tensor) -> Tensor:
        once, twice = _scaled(a)
        return a + (a / once - 1 / g) * once**2 / twice

    a = _settled(step, 1 / g)
    for _ in range(2):
        once, twice = _scaled(a)
        a = a * torch.exp((gap * a - once) / twice)
    return a


def inverse_digamma_gaps(gap: Float[Tensor, "..."], p: int) -> Float[Tensor, "..."]:
    """Solve sum_{i<p} [log(n/2) - digamma((n-i)/2)] = gap for n > p - 1, the degrees of freedom of a Wishart."""
    g, lowest = gap.detach(), p - 1

    def step(n: Tensor) -> Tensor:
        value = _gaps(n, p)
        new = n + (1 / value - 1 / g) * value**2 / _gaps_slope(n, p)
        return torch.maximum(new, lowest + (n - lowest) / 8)

    n = _settled(step, lowest + p * (p + 1) / (2 * g))
    for _ in range(2):
        room = n - lowest
        n = lowest + room * torch.exp((gap - _gaps(n, p)) / (room * _gaps_slope(n, p)))
    return n


def concentration(log_mean: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c"]:
    """Solve digamma(a_i) - digamma(a_1 + ... + a_c) = log_mean_i: a Dirichlet distribution with these E[log p_i].

    For a given sum s every a_i follows; log(sum a_i(s) / s) is concave and increasing in 1/s, so that Newton's method
    from the left, 1/s = 2 gap / (c - 1), stays there.
    """
    u = log_mean.detach()
    gap = -torch.logsumexp(u, -1, keepdim=True)

    def step(v: Tensor) -> Tensor:
        a = _inverse_digamma(u + torch.digamma(1 / v))
        total = a.sum(-1, keepdim=True)
        weight = (1 / torch.polygamma(1, a)).sum(-1, keepdim=True) / total
        slope = 1 / v - torch.polygamma(1, 1 / v) / v**2 * weight
        return torch.maximum(v - torch.log(total * v) / slope, v / 8)

    v = _settled(step, 2 * gap / (u.shape[-1] - 1))
    a = _inverse_digamma(u + torch.digamma(1 / v))
    for _ in range(2):
        total = a.sum(-1, keepdim=True)
        residual = log_mean - digamma(a) + digamma(total)
        q, z = trigamma(a), trigamma(total)
        correction = (residual / q).sum(-1, keepdim=True) / (1 - z * (1 / q).sum(-1, keepdim=True))
        a = a * torch.exp((residual + z * correction) / (q * a))
    return a


def _scaled(a: Tensor) -> tuple[Tensor, Tensor]:
    """Products a gap(a) and a² gap'(a), which neither overflow nor vanish: from 1 and -1 to 1/2 and -1/2."""
    steps = torch.arange(1, SHIFT, dtype=a.dtype, device=a.device)
    z = a + SHIFT
    part, last = a.unsqueeze(-1) / (a.unsqueeze(-1) + steps), a / z
    square = z**-2
    tail, slope = torch.full_like(a, COEFFICIENTS[-1]), torch.full_like(a, 2 * len(COEFFICIENTS) * COEFFICIENTS[-1])
    for j in range(len(COEFFICIENTS) - 1, 0, -1):
        tail = tail * square + COEFFICIENTS[j - 1]
        slope = slope * square + 2 * j * COEFFICIENTS[j - 1]
    once = 1 + part.sum(-1) - a * torch.log1p(SHIFT / a) + last * (0.5 + tail / z)
    twice = SHIFT * last - 1 - (part**2).sum(-1) - last**2 * (0.5 + slope / z)
    return once, twice


def _shifted(x: Tensor, power: int) -> Tensor:
    """sum_{j<10} (x + j)^-power."""
    steps = torch.arange(SHIFT, dtype=x.dtype, device=x.device)
    return ((x.unsqueeze(-1) + steps) ** -power).sum(-1)


def _gaps(n: Tensor, p: int) -> Tensor:
    """sum_{i<p} [log(n/2) - digamma((n-i)/2)], each as a gap and log(n / (n-i))."""
    less = torch.arange(p, dtype=n.dtype, device=n.device)
    m = n.unsqueeze(-1) - less
    return (digamma_gap(m / 2) + torch.log1p(less / m)).sum(-1)


def _gaps_slope(n: Tensor, p: int) -> Tensor:
    less = torch.arange(p, dtype=n.dtype, device=n.device)
    m = n.unsqueeze(-1) - less
    return (digamma_gap_slope(m / 2) / 2 - less / (m * n.unsqueeze(-1))).sum(-1)


def _inverse_digamma(y: Tensor) -> Tensor:
    """Solve digamma(x) = y for x > 0, to rounding error after five steps of Newton's method [minka00]."""
    x = torch.where(y >= -2.22, y.exp() + 0.5, -1 / (y + EULER))
    for _ in range(5):
        x = x - (torch.digamma(x) - y) / torch.polygamma(1, x)
    return x


def _settled(step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Iterate until half of the digits are correct (two more steps complete them); MOST steps if values are hidden."""
    readable = has_values(x) and x.device.type == "cpu"
    for _ in range(MOST):
        new = step(x)
        still = readable and bool(((new - x).abs() <= torch.finfo(x.dtype).eps ** 0.5 * x.abs()).all())
        x = new
        if still:
            break
    return x
