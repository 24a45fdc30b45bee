"""Distribution functions and quantiles of Student's t and of chi-square.

    P(|T| >= t)  = I_s(nu / 2, 1 / 2),   s = nu / (nu + t²)        Student's t with nu degrees of freedom
    P(X <= q)    = P(nu / 2, q / 2)                                chi-square, P the regularised incomplete gamma

torch has the incomplete gamma function but neither the incomplete beta function nor either quantile, and scipy is an
optional package. Results are float64-accurate in both tails: small probabilities keep their relative precision.

Law: tests/agreement/test_distributions_agree_with_scipy_and_mpmath.py.
"""

import math
from functools import lru_cache

import torch

from .._typing import Float, Tensor

LARGE = 1e6  # larger degrees of freedom are replaced by this number: Student's t is then normal to 1e-6


def student_p(t: Float[Tensor, "*s"], freedom: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Two-sided p-value P(|T| >= t) with `freedom` >= 1 degrees of freedom; NaN below."""
    nu, t = freedom.double().clamp(max=LARGE).unsqueeze(-1), t.double().abs().unsqueeze(-1)
    nodes, weights = (part.to(t.device) for part in _gauss_legendre(64))
    # Below 1 by integrating the body, where the density has no pole nearby; above 1 the tail, u = s exp(-2 y² / nu).
    x = t.clamp(max=1.0) * (nodes + 1) / 2
    body = (weights * (-(nu + 1) / 2 * (x.square() / nu).log1p()).exp()).sum(-1) * t.squeeze(-1)
    y = 3.5 * (nodes + 1)
    share = (t.square() / nu).clamp(min=1 / nu)  # s = 1 / (1 + share)
    root = (-torch.expm1(-2 * y.square() / nu - share.log1p())).sqrt()
    tail = (weights * (-y.square()).exp() * 2 * y / root).sum(-1) * 3.5
    nu, share = nu.squeeze(-1), share.squeeze(-1)
    log_beta = -_log_density_at_zero(nu) - nu.log() / 2
    tail = tail * (2 / nu) * (-nu / 2 * share.log1p() - log_beta).exp()
    p = torch.where(t.squeeze(-1) < 1, 1 - _log_density_at_zero(nu).exp() * body, tail)
    p = torch.where(t.squeeze(-1) == torch.inf, 0.0, p)
    return torch.where((freedom >= 1) & ~t.squeeze(-1).isnan(), p, torch.nan)


def student_quantile(freedom: Float[Tensor, "*s"], level: float = 0.95) -> Float[Tensor, "*s"]:
    """Two-sided quantile of Student's t: the t with P(|T| <= t) = level, for `freedom` >= 1; NaN below."""
    values, places = freedom.double().cpu().flatten().unique(return_inverse=True)
    quantiles = torch.tensor(_student_quantiles(tuple(values.tolist()), level), dtype=torch.float64)
    return quantiles[places].reshape(freedom.shape).to(freedom.device)


def chi_square_quantile(probability: float, degrees: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Quantile of chi-square: the q with P(X <= q) = probability; 0 for no degrees of freedom.

    Bisection of log q, once for each distinct number of degrees of freedom.
    """
    occurring, index = degrees.double().unique(return_inverse=True)
    half = occurring.clamp(min=1) / 2
    low, high = torch.full_like(half, -80.0), (half + 1).log() + 6.0
    # In logarithms: small probabilities at few degrees of freedom have quantiles near 0, which keep their digits.
    for _ in range(64):
        middle = (low + high) / 2
        if probability > 0.5:  # the smaller tail is more precise
            below = torch.special.gammaincc(half, middle.exp()) > 1 - probability
        else:
            below = torch.special.gammainc(half, middle.exp()) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    quantile = torch.where(occurring > 0, 2 * ((low + high) / 2).exp(), 0.0)
    return quantile[index].to(degrees.dtype)


@lru_cache(maxsize=4096)
def _student_quantiles(freedom: tuple[float, ...], level: float) -> list[float]:
    """Cached quantiles of numbers: confidence intervals share their degrees of freedom."""
    nu = torch.tensor(freedom, dtype=torch.float64).clamp(max=LARGE)
    t = torch.full_like(nu, math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))))
    # Newton's method: P is concave in t > 0 and the normal quantile lies to the left, so that no step overshoots.
    for _ in range(40):
        density = 2 * (_log_density_at_zero(nu) - (nu + 1) / 2 * (t.square() / nu).log1p()).exp()
        step = (student_p(t, nu) - (1 - level)) / density
        t = t + step
        if not bool((step.abs() > 1e-15 * t).any()):
            break
    return torch.where(nu >= 1, t, torch.nan).tolist()


def _log_density_at_zero(nu: Tensor) -> Tensor:
    """Logarithm of the density of Student's t at 0."""
    return torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - (nu * math.pi).log() / 2


@lru_cache
def _gauss_legendre(order: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1], from the eigenvectors of the Jacobi matrix."""
    k = torch.arange(1, order, dtype=torch.float64)
    off = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, 2 * vectors[0].square()
