"""The empirical measure, whose mean is softmax attention.

    h         = sum_n w_n delta_{x_n}
    G(eta)    = log sum_n w_n exp<x_n, eta>             [shim22, Eq. 5]
    ∇G(eta)   = sum_n p_n x_n,  p = softmax(<x, eta> + log w)      attention   [shim22, Prop. 1a]
    ∇²G(eta)  = sum_n p_n (x_n - mean)(x_n - mean)^T               the covariance of the attended keys
    entropy   = -sum_n p_n log p_n

Keys are the points, a query (times the scale) is eta, a mask or bias is the log weight. The counting measure
(no weights) and the probability measure (weights 1/n) differ only by log n in G.

Sums over few points and queries follow the definition; larger ones use the fused attention kernels, in linear memory.

Read next: ../kernels/attention/reference.py (the sums), algebra.py (heads, residuals and masks as operations on
measures).
"""

import math
from collections.abc import Callable

import torch

from .._errors import (
    InputValueError,
    check_finite,
    check_floats,
    check_logarithms,
    has_values,
    present,
    shape_of,
)
from .._typing import Bool, Float, Tensor
from ..kernels.attention import reference
from ..kernels.attention.operator import attention, directional
from ..kernels.attention.scoring import Scoring, Sight
from ..special import log_domain
from .measure import Measure, measure
from .validation import common_batch

# Number of logits from which a fused kernel is used: 8 MiB in float64.
MANY = 1 << 20


@measure
class Empirical(Measure):
    """sum_n w_n delta_{x_n}: finitely many points, weighted.

    Attributes:
        points: the keys.
        log_weights: None for the counting measure, [*b, n] shared by all queries, or [*b, m, n] per query (an additive
            attention mask or position bias). -inf removes a point. A bool tensor is a mask, True = attend.

    A query that may see no point has G = -inf, mean 0, covariance 0, entropy 0 and zero gradients, never NaN.

    >>> import torch
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> q, k = torch.randn(5, 8, dtype=torch.float64), torch.randn(7, 8, dtype=torch.float64)
    >>> attention = Empirical(points=k).mean(q / 8**0.5)
    >>> torch.allclose(attention, scaled_dot_product_attention(q, k, k))
    True
    """

    points: Float[Tensor, "*#b n d"]
    log_weights: Float[Tensor, "*#b n"] | Float[Tensor, "*#b m n"] | Bool[Tensor, "..."] | None = None

    def __post_init__(self) -> None:
        points, log_weights = self.points, self.log_weights
        check_floats("Empirical", points=points)
        if isinstance(log_weights, Tensor) and log_weights.dtype == torch.bool:
            log_weights = torch.where(log_weights, 0.0, -torch.inf).to(points.dtype)
            object.__setattr__(self, "log_weights", log_weights)
        check_floats("Empirical", points=points, **present(log_weights=log_weights))
        if points.ndim < 2:
            remedy = "Add the missing dimension with points.unsqueeze(-1) or points.unsqueeze(0)."
            raise InputValueError(
                "Empirical", "points", f"points must be [*b, n, d], got shape {shape_of(points)}", remedy
            )
        if points.shape[-2] == 0:
            fact = f"shape {shape_of(points)}"
            raise InputValueError(
                "Empirical", "points", f"points must have at least one point, got {fact}", "Mask a point to hide it."
            )
        if log_weights is not None:
            batch, n = points.ndim - 2, points.shape[-2]
            if log_weights.ndim not in (batch + 1, batch + 2) or log_weights.shape[-1] != n:
                condition = f"log_weights must be [*b, n] or [*b, m, n] with n={n} and {batch} batch dimensions"
                remedy = "Insert batch dimensions of size 1, or leave it out for equal weights."
                raise InputValueError(
                    "Empirical", "log_weights", f"{condition}, got shape {shape_of(log_weights)}", remedy
                )
            common_batch("Empirical", points.shape[:batch], log_weights.shape[:batch])
        if self.validate:
            check_finite("Empirical", points=points)
            if log_weights is not None:
                check_logarithms("Empirical", "log_weights", log_weights)

    @classmethod
    def weighted(
        cls,
        points: Float[Tensor, "*#b n d"],
        weights: Float[Tensor, "*#b n"] | Float[Tensor, "*#b m n"],
        *,
        validate: bool = True,
    ) -> "Empirical":
        """Measure with these masses, nonnegative and of any sum. A mass of 0 masks its point and has gradient 0."""
        check_floats("Empirical.weighted", points=points, weights=weights)
        if validate and has_values(weights):
            bad = int((~((weights >= 0) & (weights < torch.inf))).sum())
            if bad:
                condition, remedy = (
                    "weights must be finite and nonnegative",
                    "Pass masses, or pass log_weights to Empirical.",
                )
                fact = f"{bad} of {weights.numel()} entries are not"
                raise InputValueError("Empirical.weighted", "weights", f"{condition}, but {fact}", remedy)
        some = weights > 0
        return cls(points, torch.where(some, weights.where(some, 1.0).log(), -torch.inf), validate=validate)

    @property
    def batch_shape(self) -> torch.Size:
        batch = self.points.shape[:-2]
        return (
            batch
            if self.log_weights is None
            else common_batch("Empirical", batch, self.log_weights.shape[: len(batch)])
        )

    @property
    def dim(self) -> int:
        return self.points.shape[-1]

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        if self._many(eta):
            G = self._attended(eta, self.points[..., :16]).log_normalizer
        else:
            G = log_domain.log_sum_exp(self._logits(eta), maskable=self.log_weights is not None)
        return G + torch.where(G.detach() == -torch.inf, 0.0, (eta @ self._centre().mT).squeeze(-1))

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        centre = self._centre()
        if self._many(eta):
            result = self._attended(eta, self.points - centre)
            has_mass = (result.log_normalizer.detach() != -torch.inf).unsqueeze(-1)
            return result.output + torch.where(has_mass, centre, 0.0)
        p = self._p(eta)
        has_mass = p.detach().sum(-1, keepdim=True) > 0
        return p @ (self.points - centre) + torch.where(has_mass, centre, 0.0)

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        x = self.points - self._centre()
        p = self._p(eta)
        return reference.covariance(p, p @ x, x)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        x = self.points - self._centre()
        if self._many(eta):
            (q, k, direction), sight, restore = self._operands(eta, x, vector.expand(*eta.shape[:-1], -1))
            return restore(directional(q, k, sight, Scoring(1.0), direction))
        p = self._p(eta)
        along = vector @ x.mT
        signed = p * (along - (p * along).sum(-1, keepdim=True))
        # In a saturated row the rounding error of their sum exceeds these weights: subtract it in proportion to p.
        return (signed - p * signed.sum(-1, keepdim=True)) @ x

    def entropy(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """Shannon entropy -sum_n p_n log p_n, between 0 and log n.   [theory 3.5]"""
        if self._many(eta):
            return self._attended(eta, self.points[..., :16]).entropy
        return log_domain.entropy(self._logits(eta))

    def probabilities(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m n"]:
        """Attention weights p_n = w_n exp(<x_n, eta> - G(eta)), as a matrix."""
        return self._p(eta)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        s = direction @ self.points.mT
        log_weights = self._log_weights()
        return (s if log_weights is None else s.masked_fill(log_weights == -torch.inf, -torch.inf)).amax(-1)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        """Keys drawn with the attention weights; the zero vector where no key has mass."""
        s = self._logits(eta)
        index = log_domain.draw(s, shape, generator).unsqueeze(-1)
        points = self.points.detach().unsqueeze(-3).expand(*index.shape[:-1], *self.points.shape[-2:])
        drawn = points.take_along_dim(index.unsqueeze(-1), -2).squeeze(-2)
        return drawn.masked_fill((s.amax(-1) == -torch.inf).unsqueeze(-1), 0.0)

    def atoms(self, eta: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor]:
        return self.points, self._p(eta)

    def _many(self, eta: Float[Tensor, "*b m d"]) -> bool:
        """Return whether there are enough logits for a fused kernel."""
        return math.prod(eta.shape[:-1]) * self.points.shape[-2] >= MANY

    def _attended(self, eta: Float[Tensor, "*b m d"], values: Float[Tensor, "*#b n v"]) -> reference.Statistics:
        """Statistics of attention to the centred points, with these values."""
        (q, k, v), sight, restore = self._operands(eta, self.points - self._centre(), values)
        return reference.Statistics(*map(restore, attention(q, k, v, sight, Scoring(1.0))))

    def _operands(
        self, eta: Float[Tensor, "*b m d"], *others: Tensor
    ) -> tuple[tuple[Tensor, ...], Sight, Callable[[Tensor], Tensor]]:
        """Reshape to [b, 1, ..., ...], one head of the kernels; also return the inverse for results."""
        self._check_queries(eta)
        batch = torch.broadcast_shapes(eta.shape[:-2], self.batch_shape, *(t.shape[:-2] for t in others))

        def flat(t: Tensor) -> Tensor:
            return t.expand(*batch, *t.shape[-2:]).reshape(-1, 1, *t.shape[-2:])

        log_weights = self._log_weights()
        sight = Sight(None if log_weights is None else flat(log_weights))
        return tuple(flat(t) for t in (eta, *others)), sight, lambda t: t.reshape(*batch, *t.shape[2:])

    def _p(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m n"]:
        """The attention weights."""
        return log_domain.softmax(self._logits(eta), maskable=self.log_weights is not None)

    def _centre(self) -> Float[Tensor, "*b 1 d"]:
        """Average of the points with mass, subtracted first, because an offset would cost digits."""
        log_weights = self._log_weights()
        if log_weights is None:
            return self.points.detach().mean(-2, keepdim=True)
        alive = log_weights.detach().amax(-2) > -torch.inf
        count = alive.sum(-1, keepdim=True).clamp(min=1).unsqueeze(-1)
        return torch.where(alive.unsqueeze(-1), self.points.detach(), 0.0).sum(-2, keepdim=True) / count

    def _log_weights(self) -> Tensor | None:
        """Log weights as [*b, 1, n] or [*b, m, n]."""
        if self.log_weights is None or self.log_weights.ndim == self.points.ndim:
            return self.log_weights
        return self.log_weights.unsqueeze(-2)

    def _logits(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m n"]:
        """Logits <x_n - centre, eta> + log w_n."""
        self._check_queries(eta)
        return reference.logits(eta, self.points - self._centre(), self._log_weights())

    def _check_queries(self, eta: Float[Tensor, "*b m d"]) -> None:
        log_weights = self._log_weights()
        if log_weights is not None and log_weights.shape[-2] not in (1, eta.shape[-2]):
            condition = f"eta must have m={log_weights.shape[-2]} queries, one for each row of log_weights"
            remedy = "Flatten the queries to one dimension, or use log_weights with one row."
            raise InputValueError("Empirical", "eta", f"{condition}, got {eta.shape[-2]} queries", remedy)
