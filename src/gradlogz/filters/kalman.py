"""One step of a linear Gaussian system: predict, then update.

    predict   m' = F m + b,   P' = F P F^T + Q
    update    v = y - H m - d,   S = H P H^T + R,   K = P H^T S^-1
              m' = m + K v,   P' = (I - K H) P (I - K H)^T + K R K^T                           Joseph's form
              log p(y) = log N(v; 0, S)

Joseph's form is a sum of squares, so rounding cannot make it indefinite. A missing component of an observation removes
its row of H and its row and column of R; this marginalises it exactly.

Read next: gaussian/switching.py (the filters built from these steps).
"""

import math
from typing import NamedTuple

import torch

from .._typing import Bool, Float, Int, Tensor
from .moment_matching import GaussianMoments, symmetric


class Updated(NamedTuple):
    """Filtered moments, the log density of the observation, and the Cholesky error code of S (0: none)."""

    mean: Float[Tensor, "*b s"]
    covariance: Float[Tensor, "*b s s"]
    log_likelihood: Float[Tensor, "*b"]
    failure: Int[Tensor, "*b"]


class Motion(NamedTuple):
    """A linear or linearised step: the predicted moments, F with cov(x', x) = F P, and Q."""

    predicted: GaussianMoments
    F: Float[Tensor, "*#b s s"]
    Q: Float[Tensor, "*#b s s"]


class LinearizedObservation(NamedTuple):
    """A linear or linearised observation: v = H e + N(0, R), where e = x - m."""

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
    """Predicted moments of the next state, N(F m + b, F P F^T + Q)."""
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
    """Predicted moments of the observation, N(H m + d, H P H^T + R)."""
    expected = (H @ mean.unsqueeze(-1)).squeeze(-1)
    return GaussianMoments(expected if d is None else expected + d, symmetric(H @ covariance @ H.mT + R))


def update(
    mean: Float[Tensor, "*#b s"],
    covariance: Float[Tensor, "*#b s s"],
    observation: Float[Tensor, "*#b o"],
    *,
    H: Float[Tensor, "*#b o s"],
    R: Float[Tensor, "*#b o o"],
    d: Float[Tensor, "*#b o"] | None = None,
    observed: Bool[Tensor, "*#b o"] | None = None,
) -> Updated:
    """Condition the state on an observation y = H x + d + N(0, R); also returns log p(y).

    Args:
        observed: mask of the observed components, None for all; elsewhere y is ignored but must be finite.

    If the squared distance of the observation overflows, its log density is -inf and the state is unchanged.
    """
    v = observation - (H @ mean.unsqueeze(-1)).squeeze(-1)
    return correct(mean, covariance, v if d is None else v - d, H=H, R=R, observed=observed)


def correct(
    mean: Float[Tensor, "*#b s"],
    covariance: Float[Tensor, "*#b s s"],
    innovation: Float[Tensor, "*#b o"],
    *,
    H: Float[Tensor, "*#b o s"],
    R: Float[Tensor, "*#b o o"],
    observed: Bool[Tensor, "*#b o"] | None = None,
) -> Updated:
    """Condition the state on an innovation v = y - H m - d (see `update`)."""
    m, P, v, o = mean, covariance, innovation, innovation.shape[-1]
    count: Tensor | int = o
    if observed is not None:
        H = H * observed.unsqueeze(-1)
        both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
        R = torch.where(both, R, torch.eye(o, dtype=R.dtype, device=R.device))
        count = observed.sum(-1).to(m.dtype)  # an integer times log 2 pi would be float32
        v = torch.where(observed, v, 0.0)
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
