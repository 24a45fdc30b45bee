"""Moment matching: replace a mixture of Gaussians by one Gaussian with its mean and covariance.

    weigh      log sum_i w_ij exp a_ij   and   w_ij exp a_ij / sum_i w_ij exp a_ij
    collapse   m = sum_i r_i m_i,   P = sum_i r_i (P_i + (m_i - m)(m_i - m)^T)                         M-projection

As in attention (../measures/gating.py), r is a softmax, m its mean and P its covariance.

Read next: gaussian/switching.py (the filters differ in what they collapse, and when).
"""

import math
from typing import NamedTuple

import torch

from .._errors import has_values
from .._typing import Bool, Float, Tensor
from ..measures.gating import gated_mean, gated_spread
from ..special.log_domain import log_sum_exp


class Weighed(NamedTuple):
    """A sum over i in the log domain, and the share of each i."""

    log_sum: Float[Tensor, "*b j"]
    shares: Float[Tensor, "*b i j"]


def weigh(weight: Float[Tensor, "*#b i #j"], logarithm: Float[Tensor, "*#b i #j"]) -> Weighed:
    """Return log sum_i w_ij exp a_ij and the shares w_ij exp a_ij / sum_i w_ij exp a_ij.

    Weights of 0 are allowed and have a derivative, which log w would not have. A column j of total weight 0 has the sum
    -inf, no gradient, and the shares softmax_i(a_ij), uniform if these logarithms are all -inf.
    """
    weight, logarithm = torch.broadcast_tensors(weight, logarithm)
    possible = logarithm > -torch.inf
    alive = (possible & (weight > 0)).any(-2, keepdim=True)
    weight = torch.where(alive, weight, 1.0)
    logarithm = torch.where(alive | possible.any(-2, keepdim=True), logarithm, 0.0)
    top = logarithm.detach().masked_fill(weight <= 0, -torch.inf).amax(-2, keepdim=True)
    # A logarithm of weight 0 may lie far above the others. The clamp keeps its exponential, and the derivatives that
    # contain it, from overflowing before they are multiplied by 0 (limit 1e51, in float32 1e6).
    highest = math.log(torch.finfo(logarithm.dtype).max) / 6
    mass = weight * (logarithm - top).clamp(max=highest).exp()
    total = mass.sum(-2, keepdim=True)
    log_sum = torch.where(alive, top + total.log(), -torch.inf).squeeze(-2)
    return Weighed(log_sum, mass / total)


def likelihood_of_modes(
    weight: Float[Tensor, "*#b i #j"],
    log_prior: Float[Tensor, "*#b i 1"],
    log_likelihood: Float[Tensor, "*#b i j"],
    before: Weighed,
) -> Float[Tensor, "*b j"]:
    """Log likelihood of each mode j, log sum_i w_ij p_i L_ij - log c_j, summed over histories i.

    `before` holds log c_j and the shares before the observation. The sum is taken in the log domain, because shares
    w_ij p_i / c_j underflow for histories that only this observation makes likely. A mode of probability 0 gets the
    value that its hypothetical shares give.
    """
    alive = before.log_sum > -torch.inf
    joint = weigh(weight, log_prior + log_likelihood).log_sum - torch.where(alive, before.log_sum, 0.0)
    return torch.where(alive, joint, weigh(before.shares, log_likelihood).log_sum)


class GaussianMoments(NamedTuple):
    """Mean and covariance."""

    mean: Float[Tensor, "*b s"]
    covariance: Float[Tensor, "*b s s"]


def collapse(
    share: Float[Tensor, "*b n"], mean: Float[Tensor, "*b n s"], covariance: Float[Tensor, "*b n s s"]
) -> GaussianMoments:
    """Mean and covariance of sum_n r_n N(m_n, P_n): the closest Gaussian, argmin_q KL(mixture‖q)."""
    m = gated_mean(share, mean)
    inside = gated_mean(share, covariance.flatten(-2)).unflatten(-1, covariance.shape[-2:])
    return GaussianMoments(m, symmetric(inside + gated_spread(share, mean, m)))


def mix(
    share: Float[Tensor, "*b j i"],
    mean: Float[Tensor, "*b i s"],
    covariance: Float[Tensor, "*b i s s"],
    has: Bool[Tensor, "i s"] | None = None,
) -> GaussianMoments:
    """Collapse the Gaussians i with several sets j of shares, without a copy of the Gaussians for each set.

    Where Gaussians lack components (`has`), these are filled in first.
    """
    if has is not None:
        return collapse(share, *fill(share, mean, covariance, has))
    m = share @ mean
    inside = (share @ covariance.flatten(-2)).unflatten(-1, covariance.shape[-2:])
    alike = mean.unsqueeze(-3).expand(*share.shape, -1)
    return GaussianMoments(m, symmetric(inside + gated_spread(share, alike, m)))


def fill(
    share: Float[Tensor, "*b j i"],
    mean: Float[Tensor, "*b i s"],
    covariance: Float[Tensor, "*b i s s"],
    has: Bool[Tensor, "i s"],
) -> GaussianMoments:
    """Fill in the components that a Gaussian i lacks from the other Gaussians, for each set j of shares r.

        W_c    = sum_i r_i,    f_c = sum_i r_i m_ic / W_c                                          over i that have c
        Phi_cd = sum_i r_i (P_icd + (m_ic - f_c)(m_id - f_d)) / sqrt(W_c W_d)                  over i that have c, d
        filled Gaussian i:  N((m_i, f), diag(P_i, Phi))

    The filled components are independent of the others. The result is a covariance however the components overlap. If
    only one mode has a component, its mean and covariance are used: the unbiased mixing of [yuan12]. If all modes with
    a component have share 0, they are weighted equally.
    """
    r, present = share.unsqueeze(-1), has.to(mean.dtype)
    W = (r * present).sum(-2)  # [*b, j, s]
    alive = W > torch.finfo(W.dtype).tiny ** 0.5
    some = torch.where(alive, W, 1.0).unsqueeze(-2)
    part = torch.where(alive.unsqueeze(-2), r / some, 1 / present.sum(-2)) * present  # [*b, j, i, s]
    f = (part * mean.unsqueeze(-3)).sum(-2, keepdim=True)
    away = (mean.unsqueeze(-3) - f) * present
    both = present.unsqueeze(-1) * present.unsqueeze(-2)
    second = (covariance * both).unsqueeze(-4) + away.unsqueeze(-1) * away.unsqueeze(-2)  # [*b, j, i, s, s]
    # Shares where they are positive, equal weights elsewhere; no covariance between the two kinds of components.
    D = torch.where(alive, some.squeeze(-2).rsqrt(), 0.0)
    D_alike = torch.where(alive, 0.0, present.sum(-2).rsqrt())
    Phi = (r.unsqueeze(-1) * second).sum(-3) * (D.unsqueeze(-1) * D.unsqueeze(-2))
    Phi = Phi + second.sum(-3) * (D_alike.unsqueeze(-1) * D_alike.unsqueeze(-2))
    lacks = 1 - present
    filled = (covariance * both).unsqueeze(-4) + Phi.unsqueeze(-3) * (lacks.unsqueeze(-1) * lacks.unsqueeze(-2))
    return GaussianMoments(mean.unsqueeze(-3) * present + f * lacks, filled)


def to_one(
    share: Float[Tensor, "*b i"],
    mean: Float[Tensor, "*b i s"],
    covariance: Float[Tensor, "*b i s s"],
    has: Bool[Tensor, "i s"] | None = None,
) -> GaussianMoments:
    """Collapse Gaussians of which some may lack components."""
    if has is None:
        return collapse(share, mean, covariance)
    m, P = mix(share.unsqueeze(-2), mean, covariance, has)
    return GaussianMoments(m.squeeze(-2), P.squeeze(-3))


def symmetric(matrix: Float[Tensor, "*b s s"]) -> Float[Tensor, "*b s s"]:
    """(A + A^T) / 2, exactly symmetric."""
    return (matrix + matrix.mT) / 2


def symmetrized(matrix: Tensor) -> Tensor:
    """(A + A^T) / 2 if A is symmetric up to rounding, sqrt(eps) of its largest entry; else A, for checks to refuse."""
    if not isinstance(matrix, Tensor) or not has_values(matrix) or matrix.numel() == 0:
        return matrix
    asymmetry = (matrix.detach() - matrix.detach().mT).abs().amax((-2, -1))
    largest = matrix.detach().abs().amax((-2, -1))
    is_rounding = asymmetry <= torch.finfo(matrix.dtype).eps ** 0.5 * largest
    return symmetric(matrix) if bool(asymmetry.any()) and bool(is_rounding.all()) else matrix


def posterior(
    log_prior: Float[Tensor, "*b k"], log_likelihood: Float[Tensor, "*b k"]
) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b"], Bool[Tensor, "*b"]]:
    """Return log posterior probabilities, log p(observation), and whether the observation has positive density.

    An observation of density 0 under every mode leaves the prior unchanged.
    """
    joint = log_prior + log_likelihood
    total = log_sum_exp(joint)
    possible = total > -torch.inf
    # log_softmax subtracts the maximum, so probabilities sum to one however unlikely the observation is.
    log_pi = joint.masked_fill(~possible.unsqueeze(-1), 0.0).log_softmax(-1)
    return torch.where(possible.unsqueeze(-1), log_pi, log_prior), total, possible


def apart(branches: Tensor, oldest: int, ending: int) -> Tensor:
    """Reshape [*b, histories, k, ...] to [*b, oldest mode, remaining modes, ...]."""
    at = branches.ndim - ending - 2
    return branches.unflatten(at, (oldest, -1)).flatten(at + 1, at + 2)
