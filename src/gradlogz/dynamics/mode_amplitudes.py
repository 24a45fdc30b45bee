"""Amplitudes of small deviations from equilibrium, measured on the tokens of a cloud.

    hermite_mode    E He_n(z_a) / n!  of each standardised coordinate z_a      Gaussian                     [theory 4.4]
    harmonic_mode   sqrt(E P_l(<u_i, u_j>)) over pairs of directions           uniform on the sphere        [theory 4.5]

He_n are the probabilists' Hermite polynomials. P_l are the Gegenbauer polynomials with P_l(1) = 1: cos(l angle) on the
circle, Legendre polynomials on the sphere. One step multiplies an amplitude by hermite_growth or sphere_growth as long
as it is small but above its sampling noise, sqrt(1 / (n n!)) or sqrt(1 / n).

Read next: growth.py (the growth factors).
"""

import math

import torch

from .._errors import InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from .contraction import moments_of

BLOCK = 1 << 20  # largest number of pairs held at once


def hermite_mode(cloud: Float[Tensor, "*b n d"], order: int) -> Float[Tensor, "*b d"]:
    """Coefficient of He_n in the distribution of each standardised coordinate, [*b, d].

    Law: tests/theorems/test_theory_4_4_hermite_modes_grow_on_tokens.py.

    >>> import torch
    >>> x = torch.tensor([[-1.0], [-1.0], [2.0]])  # skewed: E z³ = 1 / sqrt(2)
    >>> bool(torch.isclose(hermite_mode(x, 3), torch.tensor(0.5**0.5 / 6)))
    True
    """
    _check("hermite_mode", cloud, "order", order)
    mean, covariance = moments_of(cloud)
    z = (cloud - mean.unsqueeze(-2)) * covariance.diagonal(dim1=-2, dim2=-1).rsqrt().unsqueeze(-2)
    before, now = torch.ones_like(z), z
    for k in range(1, order):
        before, now = now, z * now - k * before
    return now.mean(-2) / math.factorial(order)


def harmonic_mode(cloud: Float[Tensor, "*b n d"], degree: int) -> Float[Tensor, "*b"]:
    """Amplitude of the spherical harmonics of one degree in the distribution of token directions, from 0 to 1.

    By the addition theorem it is a mean over pairs of tokens, computed in linear memory. On the circle it is
    |E exp(i l angle)|.

    Law: tests/theorems/test_theory_4_5_harmonics_grow_on_tokens.py.

    >>> import torch
    >>> triangle = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]], dtype=torch.float64)
    >>> tuple(round(float(harmonic_mode(triangle, degree)), 6) for degree in (1, 2, 3))
    (0.0, 0.0, 1.0)
    """
    _check("harmonic_mode", cloud, "degree", degree)
    n, d = cloud.shape[-2:]
    if d < 2:
        problem = f"cloud must have two or more dimensions, got shape {shape_of(cloud)}"
        raise InputValueError("harmonic_mode", "cloud", problem, "Use hermite_mode for tokens on a line.")
    u = torch.nn.functional.normalize(cloud, dim=-1, eps=torch.finfo(cloud.dtype).tiny)
    if d == 2:
        angle = degree * torch.atan2(u[..., 1], u[..., 0])
        return (angle.cos().mean(-1).square() + angle.sin().mean(-1).square()).sqrt()
    total = torch.zeros_like(u[..., 0, 0])
    for rows in u.split(max(1, BLOCK // n), dim=-2):
        total = total + _gegenbauer(degree, d, rows @ u.mT).sum((-2, -1))
    return (total / n**2).clamp(min=0.0).sqrt()


def _gegenbauer(degree: int, d: int, t: Tensor) -> Tensor:
    """Gegenbauer polynomial P_l in d dimensions: (l + d - 2) P_{l+1} = (2 l + d - 2) t P_l - l P_{l-1}."""
    before, now = torch.ones_like(t), t
    for k in range(1, degree):
        before, now = now, ((2 * k + d - 2) * t * now - k * before) / (k + d - 2)
    return now


def _check(call: str, cloud: Tensor, name: str, count: int) -> None:
    check_floats(call, cloud=cloud)
    if cloud.ndim < 2 or count < 1:
        problem = f"cloud must be [*b, n, d] and {name} >= 1, got shape {shape_of(cloud)} and {name}={count}"
        raise InputValueError(call, "cloud", problem, f"Pass a {name} of at least 1; mode 0 is the total mass.")
