"""Small departures from equilibrium, measured on the tokens of a cloud.

    hermite_mode    E He_n(z_a) / n!  of each coordinate of the standardised tokens    from the Gaussian    [theory 4.4]
    harmonic_mode   sqrt(E P_l(<u_i, u_j>)) over pairs of directions                   from the uniform law [theory 4.5]

He_n are the Hermite polynomials of probabilists, P_l those of Gegenbauer with P_l(1) = 1: cos l angle on the circle,
Legendre's on the sphere. From one step to the next they grow by hermite_growth and sphere_growth while they are small,
and larger than what chance puts there: sqrt(1 / (n n!)) and sqrt(1 / n).

Read next: growth.py (what theory says of them).
"""

import math

import torch

from .._errors import InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from .contraction import moments_of

BLOCK = 1 << 20  # pairs that are held at once


def hermite_mode(cloud: Float[Tensor, "*b n d"], order: int) -> Float[Tensor, "*b d"]:
    """The coefficient of He_n in the law of each coordinate, the tokens having been given mean 0 and variance 1.

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
    """The size of the harmonics of one degree in the law of the directions of the tokens, between 0 and 1.

    By the addition theorem it is a mean over pairs, in linear memory; on the circle |E exp(i l angle)|, over tokens.

    Law: tests/theorems/test_theory_4_5_harmonics_grow_on_tokens.py.

    >>> import torch
    >>> triangle = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]], dtype=torch.float64)
    >>> tuple(round(float(harmonic_mode(triangle, degree)), 6) for degree in (1, 2, 3))
    (0.0, 0.0, 1.0)
    """
    _check("harmonic_mode", cloud, "degree", degree)
    n, d = cloud.shape[-2:]
    if d < 2:
        condition, remedy = "cloud must have two dimensions or more", "On the line there is no sphere."
        raise InputValueError("harmonic_mode", "cloud", f"{condition}, got shape {shape_of(cloud)}", remedy)
    u = torch.nn.functional.normalize(cloud, dim=-1, eps=torch.finfo(cloud.dtype).tiny)
    if d == 2:
        angle = degree * torch.atan2(u[..., 1], u[..., 0])
        return (angle.cos().mean(-1).square() + angle.sin().mean(-1).square()).sqrt()
    total = torch.zeros_like(u[..., 0, 0])
    for rows in u.split(max(1, BLOCK // n), dim=-2):
        total = total + _gegenbauer(degree, d, rows @ u.mT).sum((-2, -1))
    return (total / n**2).clamp(min=0.0).sqrt()


def _gegenbauer(degree: int, d: int, t: Tensor) -> Tensor:
    """P_l on the sphere in d dimensions: (l + d - 2) P_{l+1} = (2 l + d - 2) t P_l - l P_{l-1}."""
    before, now = torch.ones_like(t), t
    for k in range(1, degree):
        before, now = now, ((2 * k + d - 2) * t * now - k * before) / (k + d - 2)
    return now


def _check(call: str, cloud: Tensor, name: str, count: int) -> None:
    check_floats(call, cloud=cloud)
    if cloud.ndim < 2 or count < 1:
        condition, fact = f"cloud must be [*b, n, d] and {name} >= 1", f"shape {shape_of(cloud)} and {count}"
        raise InputValueError(call, "cloud", f"{condition}, got {fact}", "Order and degree 0 are the mass, which is 1.")
