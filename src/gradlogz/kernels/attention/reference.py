"""Sums over points by definition: the reference for every faster kernel.

    s_mn = <x_n, eta_m> + log w_mn                  logits
    G_m  = log sum_n exp s_mn                       log normaliser
    p_mn = exp(s_mn - G_m)                          attention weights
    H_m  = G_m - sum_n p_mn s_mn                    Shannon entropy of a row
    V_m  = sum_n p_mn (s_mn - E_m)^2                variance of the logits, E_m = sum_n p_mn s_mn = G_m - H_m

A row without mass (all its logits are -inf) has G = -inf, p = 0, H = 0 and zero gradients; NaN stays NaN. Points are
centred: the caller adds offsets back, where they cost no digits (shift equivariance).

Read next: ../../measures/empirical.py (the meaning of these sums), blocked.py (linear memory).
"""

import math
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ...special.log_domain import has_mass
from .scoring import grouped

# Numbers in the centred points of one block of queries: 2^24 are 128 MiB in float64.
BLOCK = 1 << 24
# exp(FAR_BELOW) is 0 even in float64, and its product with 0 is 0, while -inf times 0 is NaN.
FAR_BELOW = -1000.0


class Statistics(NamedTuple):
    """Output [b, h, m, v] of attention and four statistics [b, h, m] of its rows."""

    output: Float[Tensor, "b h m v"]
    log_normalizer: Float[Tensor, "b h m"]
    entropy: Float[Tensor, "b h m"]
    logit_variance: Float[Tensor, "b h m"]
    max_logit: Float[Tensor, "b h m"]


class StatisticsAndMean(Statistics):
    """Statistics with the mean logit G - H, 0 in a row without mass, from a kernel; not differentiable."""

    mean_logit: Float[Tensor, "b h m"] | None = (
        None  # an attribute, not a field: results made from the five fields lack it
    )


class Gradients(NamedTuple):
    """Cotangents of Statistics; None is zero."""

    output: Float[Tensor, "b h m v"] | None
    log_normalizer: Float[Tensor, "b h m"] | None
    entropy: Float[Tensor, "b h m"] | None
    logit_variance: Float[Tensor, "b h m"] | None
    max_logit: Float[Tensor, "b h m"] | None


def statistics(
    s: Float[Tensor, "b h m n"], value: Float[Tensor, "b hk n v"], factors: Float[Tensor, "b h m n"] | None = None
) -> Statistics:
    """Statistics of every row of logits, differentiable to any order; `factors` are those of dropout."""
    b, h, m, n = s.shape
    if n == 0:
        zero = s.sum(-1)
        output = zero.unsqueeze(-1) * value.sum(-2).repeat_interleave(h // value.shape[1], 1).unsqueeze(-2)
        return Statistics(output, zero - torch.inf, zero, zero, zero - torch.inf)
    alive, top = has_mass(s), s.amax(-1)
    below, mass, total = _masses(s, alive)
    p = mass / total
    mean_below = (p * below).sum(-1, keepdim=True)
    output = (grouped(p if factors is None else p * factors, value.shape[1]) @ value).reshape(b, h, m, value.shape[-1])
    log_total = total.log().squeeze(-1)
    return Statistics(
        output,
        torch.where(alive.squeeze(-1), s.masked_fill(~alive, 0.0).detach().amax(-1) + log_total, -torch.inf),
        log_total - mean_below.squeeze(-1),
        (p * (below - mean_below).square()).sum(-1),
        top,
    )


def weights(s: Float[Tensor, "*b m n"]) -> tuple[Float[Tensor, "*b m n"], Float[Tensor, "*b m n"]]:
    """Attention weights p, and logits less their mean in the row, which mean nothing where p = 0.

    The weights sum to one however large the logits, as exp(s - G) does not.
    """
    if s.shape[-1] == 0:  # amax of an empty row is an error
        return s, s
    below, mass, total = _masses(s, has_mass(s))
    p = mass / total
    return p, below - (p * below).sum(-1, keepdim=True)


def _masses(s: Tensor, alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits less the largest of their row, their exponentials, and the sums of these, 1 in a row without mass.

    A logit without mass becomes 0: models hide keys by numbers as low as -3e38, whose squares overflow.
    """
    below = s.masked_fill(~alive, 0.0)
    below = below - below.detach().amax(-1, keepdim=True)
    mass = below.exp() * alive
    return below.masked_fill(below < FAR_BELOW, 0.0), mass, mass.sum(-1, keepdim=True) + (~alive).to(s.dtype)


def logits(
    eta: Float[Tensor, "*#b m d"], points: Float[Tensor, "*#b n d"], log_weights: Float[Tensor, "*#b mn n"] | None
) -> Float[Tensor, "*#b m n"]:
    """Logits s_mn = <x_n, eta_m> + log w_mn."""
    s = eta @ points.mT
    return s if log_weights is None else s + log_weights


def covariance(
    p: Float[Tensor, "*#b m n"], mean: Float[Tensor, "*#b m d"], points: Float[Tensor, "*#b n d"]
) -> Float[Tensor, "*#b m d d"]:
    """Covariance sum_n p_mn (x_n - mean_m)(x_n - mean_m)^T, centred in each row: saturated rows keep their digits."""
    *batch, _, n = p.shape
    rows = max(1, BLOCK // max(1, n * points.shape[-1] * math.prod(batch)))
    blocks = []
    for p_, mean_ in zip(p.split(rows, -2), mean.split(rows, -2), strict=True):
        x = points.unsqueeze(-3) - mean_.unsqueeze(-2)
        blocks.append((p_.unsqueeze(-1) * x).mT @ x)
    return torch.cat(blocks, -3)
