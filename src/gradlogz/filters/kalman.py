"""One step of a linear Gaussian system: predict, then update.

    predict   m' = F m + b,   P' = F P F^T + Q
    update    v = y - H m - d,   S = H P H^T + R,   K = P H^T S^-1
              m' = m + K v,   P' = (I - K H) P (I - K H)^T + K R K^T                           Joseph's form
              log p(y) = log N(v; 0, S)

Joseph's form is a sum of squares: rounding cannot make it indefinite. A gap in an observation removes its row of H and
its row and column of R, which is the same as summing it out.

Read next: gaussian/switching.py (many of these at once).
"""

import math
from typing import NamedTuple

import torch

from .._typing import Bool, Float, Int, Tensor
from .moment_matching import GaussianMoments, symmetric


class Updated(NamedTuple):
    """Moments after an observation, its log density, and the code of a covariance S that has none (0: it has)."""

    mean: Float[Tensor, "*b s"]
    covariance: Float[Tensor, "*b s s"]
    log_likelihood: Float[Tensor, "*b"]
    failure: Int[Tensor, "*b"]


class Motion(NamedTuple):
    """A step that is linear, or taken for it: N(F m + b, F P F^T + Q), F with cov(x', x) = F P, and Q."""

    predicted: GaussianMoments
    F: Float[Tensor, "*#b s s"]
    Q: Float[Tensor, "*#b s s"]


class LinearizedObservation(NamedTuple):
    """An observation that is linear, or taken for it: v = H e + N(0, R), where e = x - m."""

    innovation: Float[Tensor, "*b o"]
    H: Float[Tensor, "*#b o s"]
    R: Float[Tensor, "*#b o o"]


def predict(
    mean: Float[Tensor, "*#b s"],
    covariance: Float[Tensor, "*#b s s"],
    *,
    F: Float[Tensor, "*#b s s"],
    Q: Float[Tensor, "*#b s s"],
    b: Float[Tensor, "*#b s"] | None = None,
) -> GaussianMoments:
    """N(F m + b, F P F^T + Q), the law of the state one step on."""
    moved = (F @ mean.unsqueeze(-1)).squeeze(-1)
    return GaussianMoments(moved if b is None else moved + b, symmetric(F @ covariance @ F.mT + Q))


def expect(
    mean: Float[Tensor, "*#b s"],
    covariance: Float[Tensor, "*#b s s"],
    *,
    H: Float[Tensor, "*#b o s"],
    R: Float[Tensor, "*#b o o"],
    d: Float[Tensor, "*#b o"] | None = None,
) -> GaussianMoments:
    """N(H m + d, H P H^T + R), the law of what will be observed."""
    seen = (H @ mean.unsqueeze(-1)).squeeze(-1)
    return GaussianMoments(seen if d is None else seen + d, symmetric(H @ covariance @ H.mT + R))


def update(
    mean: Float[Tensor, "*#b s"],
    covariance: Float[Tensor, "*#b s s"],
    observation: Float[Tensor, "*#b o"],
    *,
    H: Float[Tensor, "*#b o s"],
    R: Float[Tensor, "*#b o o"],
    d: Float[Tensor, "*#b o"] | None = None,
    seen: Bool[Tensor, "*#b o"] | None = None,
) -> Updated:
    """The law of the state given an observation y = H x + d + N(0, R), and log p(y).

    Args:
        seen: where there is something to see, None for everywhere; elsewhere y must be finite and is not looked at.

    An observation so far away that its squared distance overflows has the log density -inf and changes nothing.
    """
    v = observation - (H @ mean.unsqueeze(-1)).squeeze(-1)
    return correct(mean, covariance, v if d is None else v - d, H=H, R=R, seen=seen)


def correct(
    mean: Float[Tensor, "*#b s"],
    covariance: Float[Tensor, "*#b s s"],
    innovation: Float[Tensor, "*#b o"],
    *,
    H: Float[Tensor, "*#b o s"],
    R: Float[Tensor, "*#b o o"],
    seen: Bool[Tensor, "*#b o"] | None = None,
) -> Updated:
    """`update` by an innovation v, what an observation differs by from what was expected of it."""
    m, P, v, o = mean, covariance, innovation, innovation.shape[-1]
    count: Tensor | int = o
    if seen is not None:
        H = H * seen.unsqueeze(-1)
        both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
        R = torch.where(both, R, torch.eye(o, dtype=R.dtype, device=R.device))
        count = seen.sum(-1).to(m.dtype)  # whole numbers times log 2 pi would be float32
        v = torch.where(seen, v, 0.0)
    HP = H @ P
    L, failure = torch.linalg.cholesky_ex(symmetric(HP @ H.mT + R))
    whitened = torch.linalg.solve_triangular(L, torch.cat((HP, v.unsqueeze(-1)), -1), upper=False)
    W, z = whitened[..., :-1], whitened[..., -1]
    square = (z * z).sum(-1)
    near = square != torch.inf
    log_det = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    log_likelihood = torch.where(near, -(square + count * math.log(2 * math.pi)) / 2 - log_det, -torch.inf)
    K = torch.where(near[..., None, None], torch.linalg.solve_triangular(L.mT, W, upper=True).mT, 0.0)
    m = m + (K @ v.unsqueeze(-1)).squeeze(-1)
    A = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) - K @ H
    return Updated(m, symmetric(A @ P @ A.mT + K @ R @ K.mT), log_likelihood, failure)
