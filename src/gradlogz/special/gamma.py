"""The logarithm of the gamma function, accurate in all its derivatives.

    log Gamma(x) = Stirling(x + 10) - log[x (x + 1) ... (x + 9)]
    Stirling(z)  = (z - 1/2) log z - z + log(2 pi)/2 + sum_j B_2j / (2j (2j-1) z^(2j-1))

torch.lgamma is as accurate, but its second derivative (torch's trigamma) has an error of 5e-10. Plain arithmetic is
differentiable to every order, and here the second and higher derivatives have an error of 1e-15.
"""

import math

import torch

from .._typing import Float, Tensor

SHIFT = 10
# B_2j / (2j (2j - 1)) for j = 1 ... 8; the next term is below 1e-16 for z >= 10.
COEFFICIENTS = (
    1 / 12,
    -1 / 360,
    1 / 1260,
    -1 / 1680,
    1 / 1188,
    -691 / 360360,
    1 / 156,
    -3617 / 122400,
)


def log_gamma(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log Gamma(x) for x > 0."""
    z = x + SHIFT
    inverse = 1 / z
    square = inverse * inverse
    tail = torch.full_like(x, COEFFICIENTS[-1])
    for c in COEFFICIENTS[-2::-1]:
        tail = tail * square + c
    stirling = (z - 0.5) * z.log() - z + 0.5 * math.log(2 * math.pi) + tail * inverse
    steps = torch.arange(SHIFT, dtype=x.dtype, device=x.device)
    return stirling - (x.unsqueeze(-1) + steps).log().sum(-1)


def log_gamma_draw(concentration: Float[Tensor, "..."], generator: torch.Generator | None) -> Float[Tensor, "..."]:
    """Log of a standard Gamma draw, exact where the draw itself would underflow: Gamma(k) = Gamma(k+1) U^(1/k)."""
    x = torch._standard_gamma((concentration + 1).contiguous(), generator=generator).log()
    u = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return x + torch.log1p(-u) / concentration
