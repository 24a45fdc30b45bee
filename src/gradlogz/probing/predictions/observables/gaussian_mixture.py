"""Mixtures of 1, 2, 4 and 8 Gaussians fitted to whitened points, all heads at once.

    h            = sum_k pi_k N(mu_k, Sigma_k)
    E step       r_nk = pi_k N(x_n; mu_k, Sigma_k) / sum_j pi_j N(x_n; mu_j, Sigma_j)
    M step       N_k = sum_n r_nk,  mu_k = sum_n r_nk x_n / N_k,  pi_k = (N_k + 1) / (N + K)
                 Sigma_k = (N_k S_k + nu I) / (N_k + nu)         S_k: weighted covariance; I: that of all points

The pseudo-observations nu of the common covariance keep every Sigma_k positive definite, and one component is exactly
the Gaussian. K components become 2 K: each is split along the axis on which its points are least Gaussian, the
eigenvector of E |z|² z zᵀ (z: whitened points of the component) whose eigenvalue is farthest from its Gaussian value
r + 2. No random number is used, and an orthogonal change of coordinates changes nothing but coordinates.

Read next: ../mixture.py, which fits them to keys.
"""

import math
from typing import NamedTuple

import torch

from ...._typing import Float, Tensor
from ....measures.gaussian import Gaussian
from ....measures.mixture import Mixture

COMPONENTS = (1, 2, 4, 8)
ITERATIONS = 20
NU = 2.0  # pseudo-observations of the common covariance


class FittedMixture(NamedTuple):
    """Weights, means and covariances of the components, in descending order of weight."""

    weights: Float[Tensor, "h k"]
    means: Float[Tensor, "h k r"]
    covariances: Float[Tensor, "h k r r"]

    @property
    def measure(self) -> Mixture:
        """The mixture as a measure with a closed log normaliser."""
        return Mixture(self.weights.log(), Gaussian(self.means, self.covariances, validate=False), validate=False)

    def log_density(self, features: Float[Tensor, "h n f"]) -> Float[Tensor, "h n"]:
        """Logarithm of the density at points with these features, in nats."""
        return _log_joint(features, self).logsumexp(1)

    def drawn(self, uniform: Float[Tensor, "*s n"], normal: Float[Tensor, "*s n r"]) -> Float[Tensor, "h *s n r"]:
        """Points drawn from every head's mixture with the same random numbers."""
        h, K = self.weights.shape
        lead = (1,) * uniform.ndim
        steps = self.weights.cumsum(-1)[:, :-1].reshape(h, *lead, K - 1)
        component = (uniform.unsqueeze(-1) >= steps).sum(-1)  # [h, *s, n]
        roots = torch.linalg.cholesky(self.covariances)
        points = normal.new_empty(h, *normal.shape)
        for k in range(K):
            each = self.means[:, k].reshape(h, *lead, -1) + torch.einsum("...r,hsr->h...s", normal, roots[:, k])
            points = torch.where((component == k).unsqueeze(-1), each, points)
        return points

    def to(self, dtype: torch.dtype) -> "FittedMixture":
        """Return the mixtures in another precision."""
        return FittedMixture(*(t.to(dtype) for t in self))


def fit_mixtures(x: Float[Tensor, "h n r"]) -> dict[int, FittedMixture]:
    """Mixtures of each number of components, fitted to points of mean 0 and covariance I."""
    h, _, r = x.shape
    features = features_of(x)
    identity = torch.eye(r, dtype=x.dtype, device=x.device)
    fitted = FittedMixture(x.new_ones(h, 1), x.new_zeros(h, 1, r), identity.expand(h, 1, r, r))
    mixtures = {1: fitted}
    for K in COMPONENTS[1:]:
        fitted = _split(x, features, fitted)
        for _ in range(ITERATIONS):
            fitted = _maximized(features, _log_joint(features, fitted).softmax(1), identity)
        order = fitted.weights.argsort(-1, descending=True)
        fitted = FittedMixture(*(t.take_along_dim(order.reshape(h, K, *(1,) * (t.ndim - 2)), 1) for t in fitted))
        mixtures[K] = fitted
    return mixtures


def features_of(x: Float[Tensor, "h n r"]) -> Float[Tensor, "h n f"]:
    """(1, x, x_a x_b for a <= b): log densities and weighted moments are linear in them."""
    a, b = torch.triu_indices(x.shape[-1], x.shape[-1])
    return torch.cat((torch.ones_like(x[..., :1]), x, x[..., a] * x[..., b]), -1)


def _log_joint(features: Float[Tensor, "h n f"], fitted: FittedMixture) -> Float[Tensor, "h k n"]:
    """log pi_k + log N(x_n; mu_k, Sigma_k); points are last, because a softmax over few contiguous numbers is slow."""
    weights, mu, Sigma = fitted
    r = mu.shape[-1]
    L = torch.linalg.cholesky(Sigma)
    P = torch.cholesky_inverse(L)
    linear = (P @ mu.unsqueeze(-1)).squeeze(-1)
    half_log_det = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    constant = weights.log() - half_log_det - r / 2 * math.log(2 * math.pi) - (mu * linear).sum(-1) / 2
    a, b = torch.triu_indices(r, r)
    quadratic = P[..., a, b] * torch.where(a == b, -0.5, -1.0).to(P)
    coefficients = torch.cat((constant.unsqueeze(-1), linear, quadratic), -1)
    return coefficients @ features.mT


def _maximized(features: Float[Tensor, "h n f"], r_kn: Float[Tensor, "h k n"], identity: Tensor) -> FittedMixture:
    """Parameters of largest posterior density, given the responsibilities."""
    r = identity.shape[-1]
    K, n = r_kn.shape[1:]
    moments = r_kn @ features  # [h, k, f]
    count = moments[..., :1].clamp(min=torch.finfo(features.dtype).tiny)
    mu = moments[..., 1 : r + 1] / count
    second = features.new_empty(*moments.shape[:2], r, r)
    a, b = torch.triu_indices(r, r)
    second[..., a, b] = second[..., b, a] = moments[..., r + 1 :]
    count = count.unsqueeze(-1)
    scatter = second - count * mu.unsqueeze(-1) * mu.unsqueeze(-2)
    return FittedMixture((moments[..., 0] + 1) / (n + K), mu, (scatter + NU * identity) / (count + NU))


def _split(x: Float[Tensor, "h n r"], features: Float[Tensor, "h n f"], fitted: FittedMixture) -> FittedMixture:
    """Twice as many components: each becomes two, apart along the axis on which its points are least Gaussian."""
    r_kn = _log_joint(features, fitted).softmax(1)
    r = x.shape[-1]
    L = torch.linalg.cholesky(fitted.covariances)
    means = []
    for k in range(r_kn.shape[1]):
        away = x - fitted.means[:, k : k + 1]
        z = torch.linalg.solve_triangular(L[:, k], away.mT, upper=False).mT
        weight = r_kn[:, k].unsqueeze(-1)
        fourth = ((weight * z.square().sum(-1, keepdim=True)) * z).mT @ z / weight.sum(1, keepdim=True)
        values, vectors = torch.linalg.eigh(fourth)
        farthest = (values - (r + 2)).abs().argmax(-1)
        axis = vectors.take_along_dim(farthest[:, None, None], -1)  # [h, r, 1]
        step = (L[:, k] @ axis).squeeze(-1) / 2  # half a standard deviation
        means += [fitted.means[:, k] - step, fitted.means[:, k] + step]
    twice = [t.repeat_interleave(2, 1) for t in (fitted.weights / 2, fitted.covariances)]
    return FittedMixture(twice[0], torch.stack(means, 1), twice[1])
