"""Clusters under attention and whitening: which are equilibria, and which of these are stable.

    c_k, w_k                     centres and shares of K clusters, mean 0 and covariance I
    att(c_k) = b + A c_k         equilibrium: attention is affine on the centres; always for K = d + 1      [theory 4.6]
    S = I + tau A                the step on the centres, which whitening undoes up to a rotation
    S^-1 (I + tau beta F_k)      factor of a deviation inside cluster k, F_k the covariance of the attended keys at c_k;
                                 below 1 for every tau if beta F_k < A, A symmetric
    P S^-1 (I + tau D att)       factor of deviations of the centres; P removes affine functions of the centres, which
                                 whitening undoes, and leaves d (K - d - 1) dimensions: none for K = d + 1

For d + 1 clusters att(c) = alpha c, alpha = g / (1 + g) with g = w (exp(beta / w) - 1): A is symmetric, and nothing
turns. A stable cluster far out is small, so that it attends to itself: g is large. At small beta, whitened clouds
therefore end in a large cluster near the mean and small ones far away. If these are d, the large one balances them:
d + 1 clusters. If they are the d + 1 corners of a simplex, they balance each other, and the large cluster is at the
centre: d + 2.

Read next: evolution.py (how clouds get there), metastability.py (clusters on the sphere).
"""

import math
from typing import NamedTuple

import torch

from .._errors import InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from ..kernels.attention.reference import covariance as covariance_of
from .observables import components


class ClusterStability(NamedTuple):
    """Distance of clusters from an equilibrium of attention and whitening, and factors of small deviations in a step.

    Attributes:
        residual: largest distance of attention from an affine function on the centres; 0 at an equilibrium.
        within: spectral radius of deviations inside each cluster.
        shape: moduli of the factors of deviations of the centres, d (K - d - 1) of them, largest first.
    """

    residual: Float[Tensor, ""]
    within: Float[Tensor, " k"]
    shape: Float[Tensor, " s"]

    @property
    def stable(self) -> bool:
        """True if all deviations shrink."""
        return bool((self.within < 1).all()) and bool((self.shape < 1).all())


def cluster_centers(cloud: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]:
    """Means and shares of the clusters of a cloud, as the observable `clusters` counts them; largest first."""
    labels, tokens = components(cloud.unsqueeze(0))
    _, group, counts = labels[0].unique(return_inverse=True, return_counts=True)
    sums = cloud.new_zeros(len(counts), cloud.shape[-1]).index_add(0, group, tokens[0])
    order = counts.argsort(descending=True)
    return (sums / counts.unsqueeze(-1))[order], counts[order].to(cloud.dtype) / len(tokens[0])


def cluster_stability(
    centers: Float[Tensor, "k d"], weights: Float[Tensor, " k"], *, beta: float, tau: float
) -> ClusterStability:
    """Factors of small deviations from clusters with mean 0 and covariance I under attention and whitening.

    Law: tests/theorems/test_theory_4_6_points_rest_under_whitening.py.

    >>> import torch
    >>> c, w = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> cluster_stability(c, w, beta=0.4, tau=0.5).stable
    True
    """
    _check(centers, weights)
    c, w = centers, weights  # Shorthand
    K, d = c.shape
    eye = torch.eye(d, dtype=c.dtype, device=c.device)
    a = (beta * c @ c.mT + w.log()).softmax(-1)
    m = a @ c
    F = covariance_of(a, m, c)
    moved = c + tau * m
    affine = torch.cat((c, torch.ones_like(c[:, :1])), -1)
    # P removes affine functions of the centres, orthogonally in the weights: they are (c, 1) times a matrix.
    gram = affine.mT @ (w.unsqueeze(-1) * affine)
    P = torch.eye(K, dtype=c.dtype, device=c.device) - affine @ torch.linalg.solve(gram, affine.mT * w)
    S = (w.unsqueeze(-1) * moved).mT @ c
    within = torch.linalg.eigvals(torch.linalg.solve(S, eye + tau * beta * F)).abs().amax(-1)

    # Derivative of attention at c_k in c_l: F_k and the keys, with rows (k, i) and columns (l, j).
    keys = a[:, None, :, None] * (eye[:, None, :] + beta * (c - m[:, None]).mT[:, :, :, None] * c[:, None, None, :])
    queries = torch.einsum("kl,kij->kilj", torch.eye(K, dtype=c.dtype, device=c.device), beta * F)
    step = torch.einsum("kl,ij->kilj", torch.eye(K, dtype=c.dtype, device=c.device), eye) + tau * (queries + keys)
    step = torch.einsum("mk,in,knlj,lo->mioj", P, torch.linalg.inv(S), step, P).reshape(K * d, K * d)
    shape = torch.linalg.eigvals(step).abs().sort(descending=True).values[: d * max(0, K - d - 1)]
    return ClusterStability((P @ m).norm(dim=-1).amax(), within, shape)


class SimplexFactors(NamedTuple):
    """Factors in a step of deviations inside the cluster at the centre, inside a corner, and of the centre's place."""

    center: float
    corner: float
    shape: float


def centered_simplex_factors(dim: int, *, beta: float, tau: float, share: float) -> SimplexFactors:
    """Factors of small deviations from d + 2 clusters: a regular simplex, and a cluster of this share at its centre.

        alpha = p (e - f) / Z,  s = share / Z,  e = exp(beta R²), f = exp(-beta R² / d), Z = p e + d p f + share
        R² = d / (1 - share),  p = (1 - share) / (d + 1)                           att(c) = alpha c at a corner
        f1, f2                                         variance of the attended keys along and across a corner
        center  (1 + tau beta) / (1 + tau alpha)
        corner  (1 + tau beta max(f1, f2)) / (1 + tau alpha)
        shape   (1 + tau (beta (1 - share) + share - s + beta share (f2 + (f1 - f2) / d) + beta s alpha R² / d))
                / (1 + tau alpha)

    Each is below 1 or not whatever tau > 0. Since alpha < 1, there is no stable cluster at the centre for beta >= 1.
    """
    if dim < 2 or not 0 < share < 1 or not beta > 0 or not tau > 0:
        condition = "dim must be at least 2, share in (0, 1), beta and tau positive"
        fact = f"dim={dim}, share={share}, beta={beta} and tau={tau}"
        remedy = "Pass the share of the tokens that are in the cluster at the centre."
        raise InputValueError("centered_simplex_factors", "dim", f"{condition}, got {fact}", remedy)
    d, q = dim, share
    p, R2 = (1 - q) / (d + 1), d / (1 - q)
    # Weights of a corner on itself, on each other corner and on the centre, relative to the largest.
    logits = (math.log(p) + beta * R2, math.log(p) - beta * R2 / d, math.log(q))
    on_self, on_other, s = (math.exp(logit - max(logits)) for logit in logits)
    Z = on_self + d * on_other + s
    on_self, on_other, s = on_self / Z, on_other / Z, s / Z
    alpha = on_self - on_other
    f1 = R2 * (on_self + on_other / d - alpha**2)
    f2 = R2 * on_other * (d + 1) / d
    shape = beta * (1 - q) + q - s + beta * q * (f2 + (f1 - f2) / d) + beta * s * alpha * R2 / d
    rates = (beta, beta * max(f1, f2), shape)
    return SimplexFactors(*((1 + tau * rate) / (1 + tau * alpha) for rate in rates))


def _check(centers: Tensor, weights: Tensor) -> None:
    check_floats("cluster_stability", centers=centers, weights=weights)
    if centers.ndim != 2 or weights.shape != centers.shape[:1]:
        fact = f"shapes {shape_of(centers)} and {shape_of(weights)}"
        problem = f"centers must be [k, d] and weights [k], got {fact}"
        raise InputValueError("cluster_stability", "centers", problem, "Pass one share for each centre.")
    second = centers.mT @ (weights.unsqueeze(-1) * centers)
    eye = torch.eye(centers.shape[-1], dtype=centers.dtype, device=centers.device)
    off = float(torch.cat(((weights @ centers).abs(), (second - eye).abs().flatten())).max())
    if not off < 1e-6 or not abs(float(weights.sum()) - 1) < 1e-6:
        problem = f"centers must have mean 0 and covariance I with weights that sum to 1, but they differ by {off:.2g}"
        raise InputValueError("cluster_stability", "centers", problem, "Take them from a cloud that has been whitened.")
