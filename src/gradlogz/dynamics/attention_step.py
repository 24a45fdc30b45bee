"""An attention step of a cloud: its parameters, its direction, and its affine form on Gaussian keys.

    eta_i   = beta B^T x_i                              natural parameter of token i
    ∇G(eta) = sum_j a_ij k_j,  a_ij = softmax_j(beta <x_i, B k_j>)      attention; G the log normaliser of the keys
    x_i'    = x_i + tau W_v ∇G(eta_i)                   gradient step for W_v = B              [shim22, section 3.3]
    x_i'    = x_i + tau (beta B F B^T)^+ B ∇G(eta_i)    natural-gradient step, F = ∇²G(eta_i)  [theory 3.6]
    x_i'    = x_i + tau W_v (k_1 + ... + k_m) / m       keys drawn with probabilities a_ij: resampling

The keys are the tokens themselves, a fixed set, or any `Measure`: h.mean(eta) in place of the sum. On N(mu, Sigma) the
step is the affine map A x + b, A = I + tau beta W_v Sigma B^T and b = tau W_v mu              [shim22, Cor. 1].

Read next: evolution.py (`Ascent`, and steps repeated), gaussian_cloud.py (the affine form on a Gaussian cloud).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, has_values
from .._typing import Bool, Float, Tensor
from ..kernels.attention.reference import covariance as covariance_of
from ..measures.gaussian import Gaussian
from ..measures.measure import Measure
from ..special import log_domain
from ..special.pseudo_inverse import pseudo_inverse
from .contraction import InverseStep, Whitening
from .observables import AttentionRecord
from .trained_heads import TrainedHeads

BLOCK = 1 << 22  # attention weights held at once by the steps that need them as a matrix


class AffineStep(NamedTuple):
    """A step x -> matrix x + shift + e on Gaussian keys; e has mean 0 and this covariance, None without draws."""

    matrix: Float[Tensor, "*b d d"]
    shift: Float[Tensor, "*b d"]
    noise: Float[Tensor, "*b d d"] | None


@dataclass(frozen=True)
class AttentionStep(ABC):
    """Parameters of an attention step, see `Ascent`, and what follows from them without a kernel for points."""

    tau: float | Tensor = 1.0
    beta: float | Tensor = 1.0
    B: Tensor | None = None
    W_v: Tensor | None = None
    keys: Tensor | Measure | None = None
    causal: bool = False
    residual: bool = True
    feed_forward: Callable[[Tensor], Tensor] | None = None
    precision: torch.dtype | None = None
    natural: bool = False
    draws: int | None = None
    generator: torch.Generator | None = None
    heads: TrainedHeads | None = None

    def direction(self, cloud: Float[Tensor, "*b n d"], *, statistics: bool = False) -> tuple[Tensor, AttentionRecord]:
        """The update of every token before the step size, [*b, n, d], and the statistics of its attention call."""
        attended, record = self.attended(cloud, statistics=statistics)
        if self.natural:
            return self._natural_gradient(cloud), record
        if self.draws is not None:
            return self._drawn(cloud, self.draws), record
        return attended, record

    def attended(self, cloud: Float[Tensor, "*b n d"], *, statistics: bool = False) -> tuple[Tensor, AttentionRecord]:
        """Attention output W_v sum_j a_ij k_j of every token, and the statistics of the call."""
        if self.heads is not None:
            return self._attended_by(self.heads, cloud, statistics=statistics)
        if isinstance(self.keys, Measure):
            return self._attended_to_measure(cloud, self.keys, statistics=statistics)
        return self._attended_to_points(cloud, cloud if self.keys is None else self.keys, statistics=statistics)

    @abstractmethod
    def _attended_to_points(self, cloud: Tensor, keys: Tensor, *, statistics: bool) -> tuple[Tensor, AttentionRecord]:
        """Attention to these points, by a kernel."""

    @abstractmethod
    def _attended_by(self, heads: TrainedHeads, cloud: Tensor, *, statistics: bool) -> tuple[Tensor, AttentionRecord]:
        """Attention of the heads of a trained layer, by a kernel."""

    # Gaussian keys -------------------------------------------------------------------------------------------------

    def affine(self, mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]) -> AffineStep:
        """The step on keys N(mean, covariance), an affine map of tokens.   [shim22, Cor. 1]"""
        mu, Sigma = mean[..., None, :, None], covariance.unsqueeze(-3)  # Shorthand, with a dimension for heads
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        tau, beta = (torch.as_tensor(t, dtype=mean.dtype, device=mean.device)[..., None, None] for t in self._numbers)
        skip = eye if self.residual else torch.zeros_like(eye)
        B, W = self._forms(eye)
        if self.natural:
            metric = beta * (B @ Sigma @ B.mT).mean(-3)
            inverse = pseudo_inverse(metric)
            return AffineStep(skip + tau * inverse @ metric, (tau * inverse @ (B @ mu).mean(-3)).squeeze(-1), None)
        noise = None
        if self.draws is not None:
            # Keys are drawn once for each head of B; value matrices of one such head act on the same keys.
            shared = self.B is None or self.B.numel() == eye.numel()
            drawn = W.mean(0, keepdim=True) if shared else W
            noise = tau.square() * (drawn @ Sigma @ drawn.mT).mean(-3) / (len(drawn) * self.draws)
        slope = (W @ Sigma @ B.mT).mean(-3)
        return AffineStep(skip + tau * beta * slope, (tau * (W @ mu).mean(-3)).squeeze(-1), noise)

    def inverse_step(self) -> InverseStep:
        """The contraction that undoes this step on fixed Gaussian keys; its resolvent, for a gradient step."""
        step = self.affine(*gaussian_moments(self._gaussian_keys("inverse_step")))
        return InverseStep(step.matrix, step.shift)

    def recoloring(self) -> Whitening:
        """ZCA to the moments of Theorem 1 on fixed Gaussian keys: eta = beta B^T x has N(Sigma^-1 mu, Sigma^-1)."""
        mean, Sigma = gaussian_moments(self._gaussian_keys("recoloring"))
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        if self.B is not None and self.B.ndim > 2 and len(self.B) > 1:
            problem = "recoloring needs one head, because several heads have several natural parameters"
            raise InputValueError("Ascent.recoloring", "B", problem, "Pass B of shape [d, d], or use inverse_step.")
        beta = torch.as_tensor(self.beta, dtype=mean.dtype, device=mean.device)[..., None, None]
        B = eye if self.B is None else self.B.reshape(eye.shape)
        key_map = Sigma @ (beta * B.mT)  # from tokens to the keys Sigma eta
        _, info = torch.linalg.inv_ex(key_map)
        if has_values(info) and bool((info != 0).any()):
            problem = "recoloring needs a regular covariance of the keys, a regular B and beta other than 0"
            raise InputValueError(
                "Ascent.recoloring", "keys", problem, "Use inverse_step, which needs no inverse of them."
            )
        target = torch.linalg.solve(key_map, mean.unsqueeze(-1)).squeeze(-1)
        covariance = torch.linalg.inv(beta * B @ key_map)
        return Whitening("zca", target, (covariance + covariance.mT) / 2)

    def _gaussian_keys(self, name: str) -> Gaussian:
        if not isinstance(self.keys, Gaussian):
            fact = "the tokens as keys" if self.keys is None else f"keys of type {type(self.keys).__name__}"
            remedy = "Pass keys=Gaussian(mean, covariance) to Ascent."
            raise InputTypeError(f"Ascent.{name}", "keys", f"{name} needs fixed Gaussian keys, got {fact}", remedy)
        return self.keys

    # Steps that need a measure -------------------------------------------------------------------------------------

    def _attended_to_measure(self, cloud: Tensor, h: Measure, *, statistics: bool) -> tuple[Tensor, AttentionRecord]:
        eta, inside = self._natural_parameters(cloud, h)
        out = torch.where(inside.unsqueeze(-1), h.mean(eta), torch.nan)  # outside the domain: a blow-up
        G = torch.where(inside, h.log_normalizer(eta), torch.nan)
        # Minus KL(P_eta to h): the Shannon entropy of the weights if h counts points.
        entropy = G - (eta * out).sum(-1) if statistics else None
        return self._values(out).mean(-3), AttentionRecord(G, entropy, None)

    def _natural_gradient(self, cloud: Tensor) -> Tensor:
        """(beta M)^+ g, g = mean over heads of B ∇G and M = mean over heads of B ∇²G B^T."""
        B, _ = self._forms(torch.eye(cloud.shape[-1], dtype=cloud.dtype, device=cloud.device))
        beta = torch.as_tensor(self.beta, dtype=cloud.dtype, device=cloud.device)[..., None, None, None]
        parts = []
        for rows, h in self._blocks(cloud):
            eta, inside = self._natural_parameters(cloud[..., rows, :], h)
            heads = eta.unbind(-3)
            gradient = torch.stack([h.mean(at) for at in heads], -3) @ B.mT
            metric = B.unsqueeze(-3) @ torch.stack([h.covariance(at) for at in heads], -4) @ B.mT.unsqueeze(-3)
            inverse = pseudo_inverse(beta * metric.mean(-4))
            ascent = (inverse @ gradient.mean(-3).unsqueeze(-1)).squeeze(-1)
            parts.append(torch.where(inside.all(-2).unsqueeze(-1), ascent, torch.nan))
        return torch.cat(parts, -2)

    def _drawn(self, cloud: Tensor, count: int) -> Tensor:
        """W_v times the mean of drawn keys, averaged over heads; not differentiable in the weights."""
        parts = []
        for rows, h in self._blocks(cloud):
            eta, inside = self._natural_parameters(cloud[..., rows, :], h)
            means = [h.sample(at, (count,), generator=self.generator).mean(0) for at in eta.unbind(-3)]
            parts.append(torch.where(inside.unsqueeze(-1), torch.stack(means, -3), torch.nan))
        return self._values(torch.cat(parts, -2)).mean(-3)

    def _blocks(self, cloud: Tensor) -> Iterator[tuple[slice, "Measure | _VisiblePoints"]]:
        """Rows of the cloud and what they attend to; few enough rows for a matrix of their weights."""
        n, keys = cloud.shape[-2], cloud if self.keys is None else self.keys
        if isinstance(keys, Measure):
            yield slice(0, n), keys
            return
        points = keys.expand(*cloud.shape[:-2], *keys.shape[-2:])
        size = max(1, BLOCK // max(1, points.numel() // points.shape[-1]))
        for first in range(0, n, size):
            rows = slice(first, min(first + size, n))
            index = torch.arange(n, device=cloud.device)
            yield rows, _VisiblePoints(points, index > index[rows].unsqueeze(-1) if self.causal else None)

    def _natural_parameters(self, cloud: Tensor, h: "Measure | _VisiblePoints") -> tuple[Tensor, Tensor]:
        """eta = beta B^T x [*b, h, n, d], 0 outside the domain of h, and where it is inside."""
        form = torch.eye(cloud.shape[-1], dtype=cloud.dtype, device=cloud.device) if self.B is None else self.B
        eta = cloud.unsqueeze(-3) @ form.reshape(-1, *form.shape[-2:])
        eta = eta * torch.as_tensor(self.beta, dtype=eta.dtype, device=eta.device)[..., None, None, None]
        finite = torch.isfinite(eta).all(-1)
        eta = torch.where(finite.unsqueeze(-1), eta, 0.0)
        inside = finite & h.in_domain(eta)
        return torch.where(inside.unsqueeze(-1), eta, 0.0), inside

    def _values(self, attended: Tensor) -> Tensor:
        """W_v times the output of each head, [..., h, n, d]."""
        map_ = self.B if self.W_v is None else self.W_v
        return attended if map_ is None else attended @ map_.reshape(-1, *map_.shape[-2:]).mT

    def _forms(self, eye: Tensor) -> tuple[Tensor, Tensor]:
        """B and W_v of all heads, [h, d, d]."""
        B = eye.unsqueeze(0) if self.B is None else self.B.reshape(-1, *eye.shape)
        W = B if self.W_v is None else self.W_v.reshape(-1, *eye.shape)
        count = max(len(B), len(W))
        return B.expand(count, -1, -1), W.expand(count, -1, -1)

    @property
    def _numbers(self) -> tuple[float | Tensor, float | Tensor]:
        return self.tau, self.beta


class _VisiblePoints(NamedTuple):
    """Points that a block of tokens attends to, with the methods of a measure: sums over a matrix of weights."""

    points: Float[Tensor, "*b k d"]
    hidden: Bool[Tensor, "m k"] | None

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return self._logits(eta).softmax(-1) @ self.points

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        p = self._logits(eta).softmax(-1)
        return covariance_of(p, p @ self.points, self.points)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...], *, generator: torch.Generator | None
    ) -> Float[Tensor, "*s m d"]:
        index = log_domain.draw(self._logits(eta), shape, generator)
        points = self.points.expand(*shape, *self.points.shape)
        return points.take_along_dim(index.unsqueeze(-1), -2)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return torch.ones(eta.shape[:-1], dtype=torch.bool, device=eta.device)

    def _logits(self, eta: Tensor) -> Tensor:
        s = eta @ self.points.mT
        return s if self.hidden is None else s.masked_fill(self.hidden, -torch.inf)


def gaussian_moments(h: Gaussian) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
    """Mean and covariance of a Gaussian measure, with its covariance as a matrix."""
    zero = h.loc.new_zeros(*h.batch_shape, h.dim)
    return h.mean(zero), h.covariance(zero)
