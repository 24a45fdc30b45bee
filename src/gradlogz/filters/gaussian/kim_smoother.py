"""Kim's smoother, which assumes that the next state is independent of the current mode given the next.   [kim94]

    x_t | s_t = j, all  ~  N(m_j, P_j)  for every s_{t-1} = i;           P(i | j, all) = P(i | j, past)
    x_{t-1} = m_i + J (x_t - m_ij) + N(0, C),   J = P_i F^T P_ij^+,   C = (I - J F) P_i (I - J F)^T + J Q J^T

where m_ij and P_ij are the moments of i moved by j. Covariances are sums of squares. A direction in which P_ij is 0
carries no information about x_{t-1}; eigenvalues below rounding error count as 0.

The functions have the names and roles of those in backward_messages.py.

Read next: smoother.py (the backward pass).
"""

from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ...special.log_domain import log_sum_exp
from ..moment_matching import GaussianMoments, collapse, symmetric, weigh
from .backward_messages import FilteredModes, ModePairs, SmoothingStep


class KimPairs(NamedTuple):
    """Smoothed moments of (x_t, x_{t-1}) for each pair, and its log evidence."""

    log_evidence: Float[Tensor, "*b i j"]
    mean: Float[Tensor, "*b i j s2"]
    covariance: Float[Tensor, "*b i j s2 s2"]


def pair_message(
    step: SmoothingStep, before: FilteredModes, pairs: ModePairs, _after: FilteredModes, later: FilteredModes
) -> KimPairs:
    """Smoothed moments of every pair i, j from those of x_t given j (`later`)."""
    log_c = weigh(step.parameters.transition, before.log_probability.unsqueeze(-1)).log_sum
    log_evidence = torch.where(log_c > -torch.inf, later.log_probability - log_c, -torch.inf).unsqueeze(-2)
    (m_i, P_i), (predicted, F, Q) = pairs.start, pairs.motion  # Shorthand
    J = P_i @ F.mT @ _inverse(predicted.covariance, F, before.variance_before)
    rest = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device) - J @ F
    C = symmetric(rest @ P_i @ rest.mT + J @ Q @ J.mT)
    m, P = later.mean.unsqueeze(-3).expand_as(m_i), later.covariance.unsqueeze(-4).expand_as(P_i)
    mean = torch.cat((m, m_i + (J @ (m - predicted.mean).unsqueeze(-1)).squeeze(-1)), -1)
    lag = J @ P
    covariance = torch.cat((torch.cat((P, lag.mT), -1), torch.cat((lag, symmetric(lag @ J.mT) + C), -1)), -2)
    return KimPairs(log_evidence.expand_as(m_i[..., 0]), mean, covariance)


def smoothed_pairs(_pairs: ModePairs, pair_moments: KimPairs) -> GaussianMoments:
    """Smoothed moments of (x_t, x_{t-1}) for each pair."""
    return GaussianMoments(pair_moments.mean, pair_moments.covariance)


def propagate(step: SmoothingStep, before: FilteredModes, _pairs: ModePairs, pair_moments: KimPairs) -> FilteredModes:
    """Smoothed moments of x_{t-1} given i, from the pairs of i."""
    s = before.mean.shape[-1]
    m, P = pair_moments.mean[..., s:], pair_moments.covariance[..., s:, s:]
    if (has := step.parameters.has) is not None:  # components filled in for j do not belong to i
        active = has.unsqueeze(-2)
        m, P = m * active, P * (active.unsqueeze(-1) & active.unsqueeze(-2))
    log_evidence, share = weigh(step.parameters.transition.mT, pair_moments.log_evidence.mT)
    logs = before.log_probability + log_evidence
    return FilteredModes(*collapse(share.mT, m, P), logs - log_sum_exp(logs).unsqueeze(-1), before.variance_before)


def final_message(filtered: FilteredModes) -> FilteredModes:
    """Smoothed moments at the last time: the filtered ones."""
    return filtered


def smoothed_initial(_filtered: FilteredModes, later: FilteredModes) -> tuple[GaussianMoments, Float[Tensor, "*b k"]]:
    """Smoothed moments and log mode probabilities at time 0, which has no pairs."""
    return GaussianMoments(later.mean, later.covariance), later.log_probability


def _inverse(
    covariance: Float[Tensor, "*b i j s s"], F: Float[Tensor, "*#b #i j s s"], variance_before: Float[Tensor, "*b i s"]
) -> Float[Tensor, "*b i j s s"]:
    """Pseudo-inverse of a covariance, with the rounding error of its computation as tolerance."""
    P = covariance  # Shorthand
    with torch.no_grad():
        scale = (F.abs() @ variance_before.clamp(min=0).sqrt()[..., None, :, None]).squeeze(-1)
        size = torch.maximum(scale, P.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt())
        unit = torch.where(size > 0, 1 / size, 0.0)
        least = 32 * P.shape[-1] * torch.finfo(P.dtype).eps
    scaled = symmetric(P * unit.unsqueeze(-1) * unit.unsqueeze(-2))
    inverse = torch.linalg.pinv(scaled, atol=least, rtol=0.0, hermitian=True)
    return inverse * unit.unsqueeze(-1) * unit.unsqueeze(-2)
