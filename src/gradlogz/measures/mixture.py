"""Mixture of measures, gated by their log normalisers.

    h         = sum_k pi_k h_k
    G(eta)    = log sum_k pi_k exp G_k(eta)                         [theory 6.1-6.2]
    r_k       = softmax_k(log pi_k + G_k)                           responsibilities
    ∇G(eta)   = sum_k r_k m_k,  m_k = ∇G_k(eta)
    ∇²G(eta)  = sum_k r_k (F_k + (m_k - mean)(m_k - mean)^T)
    G        >= sum_k q_k (G_k + log(pi_k / q_k))                   Jensen; the gap is KL(q‖r)

With Gaussian components this is attention whose keys carry covariances (Gaussian messages, theory 8.4): the logits are
log pi_k + <mu_k, eta> + <eta, Sigma_k eta> / 2, and it becomes softmax attention as Sigma_k -> 0. Where the covariances
share their axes, these logits are a dot product, and the mixture reduces to softmax attention to points:

    <mu, eta> + <eta, U diag(c) U^T eta> / 2 = <[mu, c], [eta, (U^T eta)² / 2]>             `GaussianMessages`

With empirical components the h_k are heads: the exact mixture gates heads by log Z, and ordinary multi-head attention,
with its fixed weights q, is the gradient of the Jensen bound.

Read next: gating.py (the merge), algebra.py (heads as a convolution instead).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .._errors import InputValueError, check_floats, check_logarithms, check_normalized, present, shape_of
from .._typing import Bool, Float, Tensor
from ..special import log_domain
from .gating import gate, gated_covariance, gated_covariance_product, gated_mean
from .measure import Measure, check_measures, measure
from .validation import arrange, common_batch


class LowerBound(NamedTuple):
    """Jensen bound of the log normaliser of a mixture, its gap, and its gradient."""

    value: Float[Tensor, "*bm"]
    gap: Float[Tensor, "*bm"]
    mean: Float[Tensor, "*bm d"]


@measure
class Mixture(Measure):
    """sum_k pi_k h_k, components of one kind: a measure whose last batch dimension is k.

    Attributes:
        log_weights: log pi, normalised to sum to one, [*b, k] shared by all queries or [*b, m, k] per query. For parts
            of any mass, or of several kinds, use `add`.
        components: a measure with batch shape [*b, k].

    >>> import torch
    >>> from gradlogz import Gaussian
    >>> one = Mixture(torch.zeros(1), Gaussian.diagonal(torch.ones(1, 2), torch.full((1, 2), 2.0)))
    >>> one.mean(torch.tensor([1.0, 0.0]))
    tensor([3., 1.])
    """

    log_weights: Float[Tensor, "*#b k"] | Float[Tensor, "*#b m k"]
    components: Measure

    def __post_init__(self) -> None:
        log_pi, components = self.log_weights, self.components
        check_measures("Mixture", components=components)
        check_floats("Mixture", log_weights=log_pi, **present(components=components._reference()))
        if log_pi.ndim == 0 or log_pi.shape[-1] == 0:
            fact = f"shape {shape_of(log_pi)}"
            raise InputValueError(
                "Mixture",
                "log_weights",
                f"log_weights must be [*b, k] with k >= 1, got {fact}",
                "Pass one log weight for each component.",
            )
        if not components.batch_shape or components.batch_shape[-1] != log_pi.shape[-1]:
            condition = f"components must have the last batch dimension k={log_pi.shape[-1]}, one for each weight"
            remedy = "Stack the components along their last batch dimension."
            raise InputValueError(
                "Mixture", "components", f"{condition}, got batch shape {tuple(components.batch_shape)}", remedy
            )
        common_batch("Mixture", self._shared_shape(), components.batch_shape)
        if self.validate:
            check_logarithms("Mixture", "log_weights", log_pi)
            check_normalized("Mixture", "exp(log_weights)", log_pi.logsumexp(-1))

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("Mixture", self._shared_shape(), self.components.batch_shape)[:-1]

    @property
    def dim(self) -> int:
        return self.components.dim

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return log_domain.log_sum_exp(self._log_joint(eta))

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return gated_mean(gate(self._log_joint(eta)), self._each(self.components.mean, eta))

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        r, means = gate(self._log_joint(eta)), self._each(self.components.mean, eta)
        return gated_covariance(r, means, gated_mean(r, means), self._each(self.components.covariance, eta))

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        r, means = gate(self._log_joint(eta)), self._each(self.components.mean, eta)
        products = self._each(self.components.covariance_product, eta, vector)
        return gated_covariance_product(r, means, gated_mean(r, means), products, vector)

    def responsibilities(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m k"]:
        """Responsibilities r_k = softmax_k(log pi_k + G_k(eta))."""
        return gate(self._log_joint(eta))

    def lower_bound(self, eta: Float[Tensor, "*#bm d"], log_gates: Float[Tensor, "*#b k"] | None = None) -> LowerBound:
        """L_q(eta) = sum_k q_k (G_k + log pi_k - log q_k) <= G(eta), its gap KL(q‖r) and its gradient sum_k q_k m_k.

        Fixed gates q (default: pi) turn the mixture into ordinary multi-head attention; the gap is the cost.
        Law: tests/laws/test_jensen_gap_is_a_relative_entropy.py.
        """
        call = "Mixture.lower_bound"
        (eta,), restore = arrange(self, call, natural=("eta",), eta=eta)
        log_q = self.log_weights if log_gates is None else log_gates
        check_floats(call, eta=eta, log_gates=log_q)
        if log_q.ndim != self.log_weights.ndim or log_q.shape[-1] != self.log_weights.shape[-1]:
            condition = f"log_gates must be [*b, k={self.log_weights.shape[-1]}], the shape of log_weights"
            raise InputValueError(
                call, "log_gates", f"{condition}, got shape {shape_of(log_q)}", "Pass one gate per component."
            )
        if self.validate:
            check_logarithms(call, "log_gates", log_q)
            check_normalized(call, "exp(log_gates)", log_q.logsumexp(-1))
        log_q = log_q if self._per_query() else log_q.unsqueeze(-2)
        s = self._log_joint(eta)
        q, log_r = log_q.exp(), s - log_domain.log_sum_exp(s).unsqueeze(-1)

        def averaged(values: Tensor) -> Tensor:  # sum_k q_k values_k, where gates of 0 exclude -inf
            return (q * values.masked_fill(q == 0, 0.0)).sum(-1)

        means = gated_mean(q.expand_as(s), self._each(self.components.mean, eta))
        return LowerBound(restore(averaged(s - log_q), 0), restore(averaged(log_q - log_r), 0), restore(means, 1))

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        reach = self._each(self.components.support, direction)
        return reach.masked_fill(self._rows() == -torch.inf, -torch.inf).amax(-1)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        """Draw a component by its responsibility, then a point from it. Cost: one draw from every component."""
        winner = log_domain.draw(self._log_joint(eta), shape, generator)[..., None, None]
        draws = self.components.sample(eta.unsqueeze(-3), shape, generator=generator).movedim(-3, -2)
        return draws.take_along_dim(winner, -2).squeeze(-2)

    def atoms(self, eta: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor] | None:
        atoms = self.components.atoms(
            eta.unsqueeze(-3).expand(*self.batch_shape, self.log_weights.shape[-1], *eta.shape[-2:])
        )
        if atoms is None:
            return None
        points, p = atoms  # [*b, k, n, d] and [*b, k, m, n]; points that components share may have size 1
        points = points.expand(*p.shape[:-2], *points.shape[-2:])
        r = gate(self._log_joint(eta)).movedim(-1, -2).unsqueeze(-1)
        return points.flatten(-3, -2), (r * p).movedim(-3, -2).flatten(-2)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return self._each(self.components.in_domain, eta).all(-1)

    def _each(self, method: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """Statistic of every component: arguments [*b, m, d] to results [*b, m, k, ...]."""
        at = len(self.batch_shape)
        return method(*(a.unsqueeze(-3) for a in arguments)).movedim(at, at + 1)

    def _log_joint(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m k"]:
        """log pi_k + G_k(eta)."""
        rows = self._rows()
        if rows.shape[-2] not in (1, eta.shape[-2]):
            condition = f"eta must have m={rows.shape[-2]} queries, one for each row of log_weights"
            remedy = "Flatten the queries to one dimension, or use log_weights with one row."
            raise InputValueError("Mixture", "eta", f"{condition}, got {eta.shape[-2]} queries", remedy)
        return rows + self._each(self.components.log_normalizer, eta)

    def _per_query(self) -> bool:
        return self.log_weights.ndim > len(self.components.batch_shape)

    def _rows(self) -> Float[Tensor, "*b m k"]:
        """Log weights as [*b, 1, k] or [*b, m, k]."""
        return self.log_weights if self._per_query() else self.log_weights.unsqueeze(-2)

    def _shared_shape(self) -> torch.Size:
        """Shape [*b, k] of log_weights without queries."""
        shape = self.log_weights.shape
        return shape[:-2] + shape[-1:] if self._per_query() else shape


class GaussianMessages(NamedTuple):
    """sum_n w_n N(mu_n, U diag(c_n) U^T), whose covariances share the axes U, as softmax attention to points.

    G of the mixture at eta is G of the points [mu, c] at [eta, (U^T eta)²/2]: masks, weights and kernels of attention
    apply, and no tensor of size m x n x d is formed.   [theory 6.1, 8.4]

        logits      = <keys(), queries(eta)>
        ∇G(eta)     = sum_n r_n (mu_n + U (c_n * U^T eta))                          mean
        ∇²G(eta)_ii = sum_n r_n c_ni + sum_n r_n (mu_n + c_n * eta - mean)_i²       variance, for U = I

    Attributes:
        loc: mu.
        variance: c, nonnegative, along each axis.
        directions: U, whose columns need not be orthonormal; None is the identity, for diagonal covariances.

    Law: tests/laws/test_gaussian_messages_are_attention_to_points.py.

    >>> import torch
    >>> from gradlogz import Empirical, Gaussian
    >>> mu, c = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    >>> eta, messages = torch.randn(2, 3, dtype=torch.float64), GaussianMessages(mu, c)
    >>> h = Mixture(torch.zeros(5, dtype=torch.float64).log_softmax(0), Gaussian.diagonal(mu, c))
    >>> G = Empirical(messages.keys()).log_normalizer(messages.queries(eta))
    >>> torch.allclose(G - torch.tensor(5.0).log(), h.log_normalizer(eta))
    True
    """

    loc: Float[Tensor, "*b n d"]
    variance: Float[Tensor, "*b n r"]
    directions: Float[Tensor, "*b d r"] | None = None

    def queries(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m dr"]:
        """Queries [eta, (U^T eta)² / 2]."""
        return torch.cat((eta, self._along(eta).square() / 2), -1)

    def keys(self) -> Float[Tensor, "*b n dr"]:
        """Keys [mu, c], which are also the values for `mean`."""
        return torch.cat((self.loc, self.variance), -1)

    def mean(self, eta: Float[Tensor, "*b m d"], attended: Float[Tensor, "*b m dr"]) -> Float[Tensor, "*b m d"]:
        """∇G(eta) from attention with values `keys()`."""
        mu, c = attended.split([self.loc.shape[-1], self.variance.shape[-1]], -1)
        moved = c * self._along(eta)
        return mu + (moved if self.directions is None else moved @ self.directions.mT)

    def values(self) -> Float[Tensor, "*b n dddd"]:
        """Values [x, y, x², x y, y²] for `moments`, with x = mu and y = c, centred to save digits."""
        x, y = self.loc - self._centre(self.loc), self.variance - self._centre(self.variance)
        return torch.cat((x, y, x.square(), x * y, y.square()), -1)

    def moments(
        self, eta: Float[Tensor, "*b m d"], attended: Float[Tensor, "*b m dddd"], nonempty: Bool[Tensor, "*b m"]
    ) -> tuple[Float[Tensor, "*b m d"], Float[Tensor, "*b m d"]]:
        """∇G(eta) and the diagonal of ∇²G(eta) from attention with `values()`; 0 on rows that see no key. U = I."""
        x, y, xx, xy, yy = attended.chunk(5, -1)
        mu, c = (
            self._centre(t).expand_as(x).masked_fill(~nonempty.unsqueeze(-1), 0.0) for t in (self.loc, self.variance)
        )
        offset = x + y * eta
        spread = xx + 2 * eta * xy + eta.square() * yy - offset.square()
        return offset + mu + c * eta, y + c + spread.clamp(min=0)

    def _along(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m r"]:
        """U^T eta."""
        return eta if self.directions is None else eta @ self.directions

    @staticmethod
    def _centre(tensor: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b 1 d"]:
        return tensor.detach().mean(-2, keepdim=True)
