"""Many Gaussians to one, and the weights by which they count.

    weigh      log sum_i w_ij exp a_ij   and   w_ij exp a_ij / sum_i w_ij exp a_ij
    collapse   m = sum_i r_i m_i,   P = sum_i r_i (P_i + (m_i - m)(m_i - m)^T)         moments are kept: M-projection

The averages are those of attention (../measures/gating.py): r is a softmax, m its mean, P its covariance.

Read next: gaussian/switching.py, where the filters differ by what they collapse when.
"""

import math
from typing import NamedTuple

import torch

from .._typing import Bool, Float, Tensor
from ..measures.gating import gated_mean, gated_spread
from ..special.log_domain import log_sum_exp


class Weighed(NamedTuple):
    """A sum over i in the log domain, and how much each i has in it."""

    log_sum: Float[Tensor, "*b j"]
    shares: Float[Tensor, "*b i j"]


def weigh(weight: Float[Tensor, "*#b i #j"], logarithm: Float[Tensor, "*#b i #j"]) -> Weighed:
    """log sum_i w_ij exp a_ij, and the shares w_ij exp a_ij / sum_i w_ij exp a_ij.

    Weights of 0 are legal and have their derivative, as they have none in log w. A column j without mass has the sum
    -inf, no gradient, and the shares that its logarithms alone would give (equal ones if these are all -inf).
    """
    weight, logarithm = torch.broadcast_tensors(weight, logarithm)
    possible = logarithm > -torch.inf
    alive = (possible & (weight > 0)).any(-2, keepdim=True)
    weight = torch.where(alive, weight, 1.0)
    logarithm = torch.where(alive | possible.any(-2, keepdim=True), logarithm, 0.0)
    top = logarithm.detach().masked_fill(weight <= 0, -torch.inf).amax(-2, keepdim=True)
    # What has no weight may lie far above the rest: its exponential must not overflow before it is multiplied by 0, nor
    # may the derivatives in which it stays (1e51 is where they end, 1e6 in float32).
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
    """log p(y | j) = log sum_i w_ij p_i L_ij - log c_j, from histories i; log c_j and shares before y are given.

    Shares w_ij p_i / c_j would be 0 for histories that only this observation brings back: the sum is one of logarithms.
    Of a mode without mass, it is what the shares give that it would have.
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
    """The moments of sum_n r_n N(m_n, P_n): the Gaussian nearest to it, argmin_q KL(mixture‖q)."""
    m = gated_mean(share, mean)
    inside = gated_mean(share, covariance.flatten(-2)).unflatten(-1, covariance.shape[-2:])
    return GaussianMoments(m, symmetric(inside + gated_spread(share, mean, m)))


def mix(
    share: Float[Tensor, "*b j i"],
    mean: Float[Tensor, "*b i s"],
    covariance: Float[Tensor, "*b i s s"],
    has: Bool[Tensor, "i s"] | None = None,
) -> GaussianMoments:
    """The collapse of the same Gaussians i by several sets j of shares, without a copy of them for each set.

    Where Gaussians lack components, each set fills them first.
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
    """Gaussians i of which some lack components, each with those filled in from the others, for sets j of shares r.

        W_c    = sum_i r_i,    f_c = sum_i r_i m_ic / W_c                                          over i that have c
        Phi_cd = sum_i r_i (P_icd + (m_ic - f_c)(m_id - f_d)) / sqrt(W_c W_d)                  over i that have c, d
        i with what it lacks:  N((m_i, f), diag(P_i, Phi))

    What is filled in is independent of what was there. It is a covariance however the components overlap, and where
    one mode alone has a component, the unbiased mixing of [yuan12]: its own mean and covariance. Where none that has
    it has a share, all that have it count alike.
    """
    r, own = share.unsqueeze(-1), has.to(mean.dtype)
    W = (r * own).sum(-2)  # [*b, j, s]
    alive = W > torch.finfo(W.dtype).tiny ** 0.5
    some = torch.where(alive, W, 1.0).unsqueeze(-2)
    part = torch.where(alive.unsqueeze(-2), r / some, 1 / own.sum(-2)) * own  # [*b, j, i, s]
    f = (part * mean.unsqueeze(-3)).sum(-2, keepdim=True)
    away = (mean.unsqueeze(-3) - f) * own
    both = own.unsqueeze(-1) * own.unsqueeze(-2)
    second = (covariance * both).unsqueeze(-4) + away.unsqueeze(-1) * away.unsqueeze(-2)  # [*b, j, i, s, s]
    # Components that have shares by these, the others by equal ones; between the two kinds there is no covariance.
    D = torch.where(alive, some.squeeze(-2).rsqrt(), 0.0)
    D_alike = torch.where(alive, 0.0, own.sum(-2).rsqrt())
    Phi = (r.unsqueeze(-1) * second).sum(-3) * (D.unsqueeze(-1) * D.unsqueeze(-2))
    Phi = Phi + second.sum(-3) * (D_alike.unsqueeze(-1) * D_alike.unsqueeze(-2))
    lacks = 1 - own
    filled = (covariance * both).unsqueeze(-4) + Phi.unsqueeze(-3) * (lacks.unsqueeze(-1) * lacks.unsqueeze(-2))
    return GaussianMoments(mean.unsqueeze(-3) * own + f * lacks, filled)


def to_one(
    share: Float[Tensor, "*b i"],
    mean: Float[Tensor, "*b i s"],
    covariance: Float[Tensor, "*b i s s"],
    has: Bool[Tensor, "i s"] | None = None,
) -> GaussianMoments:
    """The collapse of Gaussians of which some may lack components."""
    if has is None:
        return collapse(share, mean, covariance)
    m, P = mix(share.unsqueeze(-2), mean, covariance, has)
    return GaussianMoments(m.squeeze(-2), P.squeeze(-3))


def symmetric(matrix: Float[Tensor, "*b s s"]) -> Float[Tensor, "*b s s"]:
    """(A + A^T) / 2, equal to its transpose to the last bit."""
    return (matrix + matrix.mT) / 2


def posterior(
    log_prior: Float[Tensor, "*b k"], log_likelihood: Float[Tensor, "*b k"]
) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b"], Bool[Tensor, "*b"]]:
    """Log probabilities after an observation, log p(observation), and whether it was possible at all.

    What is impossible under every mode says nothing about them: the prior stays.
    """
    joint = log_prior + log_likelihood
    total = log_sum_exp(joint)
    possible = total > -torch.inf
    # log_softmax takes the largest away first: probabilities sum to one however unlikely the observation was.
    log_pi = joint.masked_fill(~possible.unsqueeze(-1), 0.0).log_softmax(-1)
    return torch.where(possible.unsqueeze(-1), log_pi, log_prior), total, possible


def apart(branches: Tensor, oldest: int, ending: int) -> Tensor:
    """[*b, histories, k, ...] as [*b, oldest, all that is kept of a history, ...]."""
    at = branches.ndim - ending - 2
    return branches.unflatten(at, (oldest, -1)).flatten(at + 1, at + 2)
