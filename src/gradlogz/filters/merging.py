"""Many Gaussians to one, and the weights by which they count.

    weigh      log sum_i w_ij exp a_ij   and   w_ij exp a_ij / sum_i w_ij exp a_ij
    collapse   m = sum_i r_i m_i,   P = sum_i r_i (P_i + (m_i - m)(m_i - m)^T)         moments are kept: M-projection

The averages are those of attention (../measures/gating.py): r is a softmax, m its mean, P its covariance.

Read next: switching.py, where the filters differ by what they collapse when.
"""

import math
from typing import NamedTuple

import torch

from .._typing import Bool, Float, Tensor
from ..kernels.reference import log_sum_exp
from ..measures.gating import gated_mean, gated_spread


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


class Moments(NamedTuple):
    """Mean and covariance."""

    mean: Float[Tensor, "*b s"]
    covariance: Float[Tensor, "*b s s"]


def collapse(
    share: Float[Tensor, "*b n"], mean: Float[Tensor, "*b n s"], covariance: Float[Tensor, "*b n s s"]
) -> Moments:
    """The moments of sum_n r_n N(m_n, P_n): the Gaussian nearest to it, argmin_q KL(mixture‖q)."""
    m = gated_mean(share, mean)
    inside = gated_mean(share, covariance.flatten(-2)).unflatten(-1, covariance.shape[-2:])
    return Moments(m, symmetric(inside + gated_spread(share, mean, m)))


def mix(
    share: Float[Tensor, "*b j i"], mean: Float[Tensor, "*b i s"], covariance: Float[Tensor, "*b i s s"]
) -> Moments:
    """The collapse of the same Gaussians i by several sets j of shares, without a copy of them for each set."""
    m = share @ mean
    inside = (share @ covariance.flatten(-2)).unflatten(-1, covariance.shape[-2:])
    alike = mean.unsqueeze(-3).expand(*share.shape, -1)
    return Moments(m, symmetric(inside + gated_spread(share, alike, m)))


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
