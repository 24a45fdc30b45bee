"""Values with confidence intervals, and many p-values at once.

    p = P(|T| >= t) = I_s(nu / 2, 1 / 2),   s = nu / (nu + t²)       Student's distribution, nu degrees of freedom

Read next: sums.py and comoments.py, where the intervals come from; ../testing.py, where p-values do.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Tensor

LEVEL = 0.95
_LARGE = 1e6  # degrees of freedom from which on Student's law is the normal one


class Estimate(NamedTuple):
    """A value with its interval of 95 % and the degrees of freedom behind it; ends are NaN where nothing is known."""

    value: Float[Tensor, "*s"]
    low: Float[Tensor, "*s"]
    high: Float[Tensor, "*s"]
    freedom: Float[Tensor, "*s"]


def student_quantile(freedom: Float[Tensor, "*s"], level: float = LEVEL) -> Float[Tensor, "*s"]:
    """The t with P(|T| <= t) = level, for any number of degrees of freedom from 1 on; NaN below."""
    values, places = freedom.double().cpu().flatten().unique(return_inverse=True)
    found = torch.tensor(_quantiles(tuple(values.tolist()), level), dtype=torch.float64)
    return found[places].reshape(freedom.shape).to(freedom.device)


@lru_cache(maxsize=4096)
def _quantiles(freedom: tuple[float, ...], level: float) -> list[float]:
    """The same for numbers, remembered: estimates share their degrees of freedom."""
    nu = torch.tensor(freedom, dtype=torch.float64).clamp(max=_LARGE)
    t = torch.full_like(nu, math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))))
    # Newton's method: P is concave in t > 0 and the normal quantile lies to the left, so that no step goes too far.
    for _ in range(40):
        density = 2 * (_log_density(nu) - (nu + 1) / 2 * (t.square() / nu).log1p()).exp()
        step = (student_p(t, nu) - (1 - level)) / density
        t = t + step
        if not bool((step.abs() > 1e-15 * t).any()):
            break
    return torch.where(nu >= 1, t, torch.nan).tolist()


def student_p(t: Float[Tensor, "*s"], freedom: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """P(|T| >= t), to full relative precision however small it is."""
    nu, t = freedom.double().clamp(max=_LARGE).unsqueeze(-1), t.double().abs().unsqueeze(-1)
    nodes, weights = (part.to(t.device) for part in _gauss_legendre(64))
    # Below 1 from the body, where the density has no pole nearby; above it from the tail, u = s exp(-2 y² / nu).
    x = t.clamp(max=1.0) * (nodes + 1) / 2
    body = (weights * (-(nu + 1) / 2 * (x.square() / nu).log1p()).exp()).sum(-1) * t.squeeze(-1)
    y = 3.5 * (nodes + 1)
    share = (t.square() / nu).clamp(min=1 / nu)  # s = 1 / (1 + share)
    root = (-torch.expm1(-2 * y.square() / nu - share.log1p())).sqrt()
    tail = (weights * (-y.square()).exp() * 2 * y / root).sum(-1) * 3.5
    nu, share = nu.squeeze(-1), share.squeeze(-1)
    log_beta = -_log_density(nu) - nu.log() / 2
    tail = tail * (2 / nu) * (-nu / 2 * share.log1p() - log_beta).exp()
    p = torch.where(t.squeeze(-1) < 1, 1 - _log_density(nu).exp() * body, tail)
    p = torch.where(t.squeeze(-1) == torch.inf, 0.0, p)
    return torch.where((freedom >= 1) & ~t.squeeze(-1).isnan(), p, torch.nan)


def benjamini_hochberg(p_values: Float[Tensor, "..."], level: float = 0.05) -> Bool[Tensor, "..."]:
    """Which of all hypotheses to reject so that at most `level` of the rejected are expected to be true  [benjamini95].

    Rejects the k smallest p-values, k the greatest with p_(k) <= level k / m. NaN is no test: it does not count in m.
    """
    p = p_values.flatten()
    tested = ~p.isnan()
    ordered = p.masked_fill(~tested, torch.inf).sort().values
    ranks = torch.arange(1, len(p) + 1, device=p.device, dtype=p.dtype)
    passed = ordered <= level * ranks / tested.sum().clamp(min=1)
    bound = ordered.masked_fill(~passed, -torch.inf).max() if len(p) else p.new_tensor(-torch.inf)
    return (tested & (p <= bound)).reshape(p_values.shape)


def _log_density(nu: Tensor) -> Tensor:
    """Of Student's law at 0."""
    return torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - (nu * math.pi).log() / 2


@lru_cache
def _gauss_legendre(order: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1], from the eigenvectors of the Jacobi matrix."""
    k = torch.arange(1, order, dtype=torch.float64)
    off = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, 2 * vectors[0].square()
