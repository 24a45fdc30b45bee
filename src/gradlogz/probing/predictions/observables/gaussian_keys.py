"""Attention rows of Gaussian keys: what n Gaussian keys with the moments of a row would do, on average.

    k_j       n keys with mean mu and covariance Sigma (both of these keys), otherwise Gaussian;  q: a query, fixed
    u_j       = <q, k_j>,  v = Var u = <q, Sigma q>,  p = softmax(u),  a = E_p u - mean u,  y = log mean exp(u - mean u)

Mean and covariance are sufficient for a Gaussian. Given them, the centred keys are sqrt(n) V Sigma^½, V a random frame
of n - 1 dimensions: they depend on no unknown parameter, and u on no other direction than Sigma q. In any metric W:

    E |m - mu|²             = E a²/v² |Sigma q|² + E P (tr W Sigma - |Sigma q|²/v) / (n - 2)         m: attended mean
    E |m - mu - Sigma q|²   = E (a/v - 1)² |Sigma q|² + the same second term
    P                       = n sum_j p_j² - 1 - a²/v         the part of p that lies across u

The expectations over u depend on n and v alone. They are estimated on a grid of both, from standard normal numbers with
their mean and variance removed, and interpolated.

Read next: ../gaussian_measure.py, which compares the rows of a model with them.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ...._typing import Float, Tensor

DRAWS, NUMBERS = 1 << 14, 1 << 20  # rows, and numbers, drawn at each n at most; explained variances to about 0.003
LEAST = 4  # grid of n: 4, 8, 16, ...
DEVIATIONS = (0.05, *(i / 4 for i in range(1, 9)), 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 20.0, 64.0)  # of sqrt(v)


class GaussianRow(NamedTuple):
    """Expectations for n Gaussian keys with logit variance v.

    along: E a²/v². short: E (a/v - 1)². across: E P / v². normalizer: E y²/v². missed: E (y/v - 1/2)².
    """

    along: Float[Tensor, "*b"]
    short: Float[Tensor, "*b"]
    across: Float[Tensor, "*b"]
    normalizer: Float[Tensor, "*b"]
    missed: Float[Tensor, "*b"]


def gaussian_row(n: Float[Tensor, "*#b"], variance: Float[Tensor, "*#b"], longest: int) -> GaussianRow:
    """Expectations for n keys, n at most `longest` and at least 4, interpolated in log n and the standard deviation."""
    n, variance = torch.broadcast_tensors(n, variance)
    octaves = max(math.ceil(math.log2(longest / LEAST)), 1)
    table, deviations = _grid(octaves, variance.dtype, variance.device)
    size = (n / LEAST).log2().clamp(0, octaves - 0.001)
    s = variance.clamp(min=0.0).sqrt().clamp(DEVIATIONS[0], 0.999 * DEVIATIONS[-1])
    unknown = size.isnan() | s.isnan()  # NaN is no place of the table
    size, s = size.masked_fill(unknown, 0.0), s.masked_fill(unknown, DEVIATIONS[0])
    i = size.long()
    j = torch.bucketize(s, deviations, right=True) - 1
    x = (size - i).unsqueeze(-1)
    y = ((s - deviations[j]) / (deviations[j + 1] - deviations[j])).unsqueeze(-1)
    columns = (1 - x) * ((1 - y) * table[i, j] + y * table[i, j + 1])
    columns = columns + x * ((1 - y) * table[i + 1, j] + y * table[i + 1, j + 1])
    columns = columns.masked_fill(unknown.unsqueeze(-1), torch.nan)
    along, short, across, normalizer, missed = columns.unbind(-1)
    return GaussianRow(along, short, across.exp(), normalizer, missed)


@lru_cache
def _grid(octaves: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Expectations [sizes, deviations, 5], and deviations, on a device; copied once, because a copy waits for a GPU."""
    table = torch.stack([_of_size(LEAST << octave) for octave in range(octaves + 1)])
    return table.to(device, dtype), torch.tensor(DEVIATIONS).to(device, dtype)


@lru_cache
def _of_size(n: int) -> Float[Tensor, "deviations 5"]:
    """Expectations for n keys, `across` as its logarithm, which is smooth."""
    generator = torch.Generator().manual_seed(n)
    z = torch.randn(min(DRAWS // int(n**0.5), NUMBERS // n), n, generator=generator, dtype=torch.float64)
    z = z - z.mean(-1, keepdim=True)
    z = z / z.square().mean(-1, keepdim=True).sqrt()
    return torch.stack([_expectations(s * z, s * s) for s in DEVIATIONS])


def _expectations(u: Float[Tensor, "draws n"], v: float) -> Float[Tensor, "5"]:
    p = u.softmax(-1)
    a = (p * u).sum(-1)
    y = u.logsumexp(-1) - math.log(u.shape[-1])
    across = u.shape[-1] * p.square().sum(-1) - 1 - a.square() / v
    columns = ((a / v).square(), (a / v - 1).square(), across / v**2, (y / v).square(), (y / v - 0.5).square())
    means = torch.stack([column.mean() for column in columns])
    means[2] = means[2].log()
    return means
