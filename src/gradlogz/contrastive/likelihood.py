"""The likelihood behind every contrastive loss: the probability of the positive among the candidates of an anchor.

    h         = sum_j w_j delta_{x_j}                      the candidates, a measure
    eta       = anchor / temperature                       the natural parameter
    p(j)      = w_j exp(<eta, x_j> - G(eta))               [theory 6.6]
    loss      = -log p(+) = G(eta) - <eta, x_+> - log w_+
    ∇ loss    = attention - x_+,   ∇² loss = Cov_eta[x]    in eta   [theory 3.5, E31]
    I(a; x)   >= G(0) - G(eta) + <eta, x_+> = log n - loss         on average, counting measure   [oord18]

The loss is invariant to a common shift of all candidates. Their mean is subtracted first, to reduce rounding errors.

Read next: losses.py (the losses), ../kernels/losses/pairwise_log_sum_exp.py (the sums in linear memory).
"""

import dataclasses
import math
from typing import Any

import torch

from .._errors import InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor
from ..kernels.attention import reference
from ..kernels.losses.pairwise_log_sum_exp import VisiblePairs, log_add, log_sum_exp, pairs
from ..measures import Empirical
from ..special import log_domain
from .validation import (
    check_alike,
    check_indices,
    check_integers,
    check_precision,
    check_rows,
    check_temperature,
    check_vectors,
    wide,
)

Labels = Int[Tensor, " m"] | tuple[Int[Tensor, " m"], Int[Tensor, " n"]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Likelihood:
    """An exponential family over common candidates for every anchor, with one candidate as the positive.

    Attributes:
        anchor: anchors, [m, d].
        candidates: candidates of every anchor, [n, d].
        temperature: positive number, or a tensor with one element.
        positive: None if the positive of anchor i is candidate i; indices [m]; or vectors [m, d], each of which is an
            additional candidate of its anchor only (for example with a queue, which holds only negatives).
        log_weights: log w of each candidate, for example minus the log probability with which it was sampled. -inf
            excludes it.
        exclude_self: the anchors are the candidates, and an anchor is not a candidate for itself.
        labels: labels of anchors and candidates, one tensor if they are the same. A candidate with the label of the
            anchor (a duplicate or false negative) is excluded, except the positive.
        mask: True where candidate j may be a negative of anchor i. The positive is never excluded.
        precision: torch.bfloat16 or torch.float16 for the products of anchors and candidates, several times as fast on
            a GPU. The error of a logit is about 2^-9 / sqrt(d) times |anchor| |candidate| / temperature in bfloat16 and
            an eighth of that in float16. Ignored with labels or masks.
        call: function name at the beginning of error messages.

    Half-precision inputs are converted to float32.

    >>> import torch
    >>> a, b = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    >>> family = Likelihood(a, b, temperature=0.1)
    >>> torch.allclose(-family.log_density().mean(), torch.nn.functional.cross_entropy(a @ b.mT / 0.1, torch.arange(4)))
    True
    """

    anchor: Float[Tensor, "m d"]
    candidates: Float[Tensor, "n d"]
    _: dataclasses.KW_ONLY
    temperature: float | Float[Tensor, ""] = 1.0
    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None = None
    log_weights: Float[Tensor, " n"] | None = None
    exclude_self: bool = False
    labels: Labels | None = None
    mask: Bool[Tensor, "m n"] | None = None
    precision: torch.dtype | None = None
    call: str = "Likelihood"

    def __post_init__(self) -> None:
        call, positive = self.call, self.positive
        outside = positive if isinstance(positive, Tensor) and positive.is_floating_point() else None
        check_vectors(call, anchor=self.anchor, candidates=self.candidates, positive=outside)
        m, n = self.anchor.shape[0], self.candidates.shape[0]
        if self.exclude_self or positive is None:
            check_rows(call, "candidates", self.candidates, m, "anchor")
        if outside is not None:
            check_rows(call, "positive", outside, m, "anchor")
        elif positive is not None:
            check_integers(call, "positive", positive, (m,), self.anchor)
            check_indices(call, "positive", positive, n)
        if self.log_weights is not None:
            if tuple(self.log_weights.shape) != (n,):
                fact, remedy = f"shape {shape_of(self.log_weights)}", "Pass one log weight for each candidate."
                raise InputValueError(call, "log_weights", f"log_weights must have shape ({n},), got {fact}", remedy)
            check_alike(call, candidates=self.candidates, log_weights=self.log_weights)
        if self.labels is not None:
            of_anchors, of_candidates = self.labels if isinstance(self.labels, tuple) else (self.labels, self.labels)
            check_integers(call, "labels", of_anchors, (m,), self.anchor)
            check_integers(call, "labels", of_candidates, (n,), self.anchor)
            self._set(labels=(of_anchors, of_candidates))
        if self.mask is not None:
            if self.mask.dtype != torch.bool or tuple(self.mask.shape) != (m, n):
                fact, remedy = (
                    f"{self.mask.dtype} of shape {shape_of(self.mask)}",
                    "Pass True where a candidate may be a negative.",
                )
                raise InputValueError(call, "mask", f"mask must be bool of shape ({m}, {n}), got {fact}", remedy)
            check_alike(call, anchor=self.anchor, mask=self.mask)
        check_temperature(call, self.temperature, self.anchor)
        check_precision(call, self.precision)
        self._set(anchor=wide(self.anchor), candidates=wide(self.candidates))
        if isinstance(self.temperature, Tensor):  # a 0-dimensional tensor does not promote the dtype of the vectors
            self._set(temperature=self.temperature.reshape(()))
        if outside is not None:
            self._set(positive=wide(outside))
        if self.log_weights is not None:
            self._set(log_weights=wide(self.log_weights))

    # The family ------------------------------------------------------------------------------------------------------

    @property
    def eta(self) -> Float[Tensor, "m d"]:
        """Natural parameter of every anchor, anchor / temperature."""
        return self.anchor / self.temperature

    @property
    def measure(self) -> Empirical:
        """The measure of all candidates, before labels and masks."""
        return Empirical(self.candidates, self.log_weights, validate=False)

    def log_normalizer(self) -> Float[Tensor, " m"]:
        """G(eta) = log sum_j w_j exp<eta, x_j> over the candidates of each anchor, including its positive."""
        return self._log_normalizer(self.eta, self._center()) + self.eta @ self._center()

    def log_density(self) -> Float[Tensor, " m"]:
        """Log density <eta, x_+> - G(eta) of the positive with respect to h."""
        eta, center = self.eta, self._center()
        return (eta * (self.chosen() - center)).sum(-1) - self._log_normalizer(eta, center)

    def log_probability(self) -> Float[Tensor, " m"]:
        """log p(+), the log density plus the log weight of the positive; the loss is its negative."""
        density = self.log_density()
        return density if self.log_weights is None or self._outside else density + self.log_weights[self._index()]

    def log_odds(self) -> Float[Tensor, " m"]:
        """log p(+) - log(1 - p(+)), the log odds of the positive against its negatives; +inf if it has none."""
        eta, center = self.eta, self._center()
        logit = (eta * (self.chosen() - center)).sum(-1)
        if self.log_weights is not None and not self._outside:
            logit = logit + self.log_weights[self._index()]
        x, visible = self.candidates - center, self._negatives()
        return logit - log_sum_exp(eta, x, self.log_weights, visible, precision=self.precision)

    def log_mass(self, labels: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Log probability of the label of each anchor, if the anchors are the candidates and exclude themselves."""
        check_integers(self.call, "labels", labels, (self.anchor.shape[0],), self.anchor)
        eta, center = self.eta, self._center()
        same_label = VisiblePairs(itself=False, labels=(labels, labels))
        x = self.candidates - center
        return log_sum_exp(eta, x, self.log_weights, same_label) - self._log_normalizer(eta, center)

    def mean(self) -> Float[Tensor, "m d"]:
        """E_eta[x], the attention of every anchor to its candidates."""
        center = self._center()
        return self._attention(center) + center

    def gradient(self) -> Float[Tensor, "m d"]:
        """Gradient of the loss in eta, attention minus the positive; divide by the temperature for the anchor."""
        center = self._center()
        return self._attention(center) - (self.chosen() - center)

    def fisher(self) -> Float[Tensor, "m d d"]:
        """Cov_eta[x], the Fisher information of eta and the second derivative of the loss."""
        return self._second(self._center())

    def fisher_product(self, vector: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """Cov_eta[x] v, without forming the d x d matrix."""
        check_vectors(self.call, anchor=self.anchor, vector=vector)
        check_rows(self.call, "vector", vector, self.anchor.shape[0], "anchor")
        return self._second(self._center(), wide(vector))

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Int[Tensor, "..."]:
        """Indices [*shape, m] of negatives drawn with the probabilities of the family, so hard ones are more likely."""
        eta, x, visible = self.eta.detach(), (self.candidates - self._center()).detach(), self._negatives()
        log_weights = None if self.log_weights is None else self.log_weights.detach()

        def draw(s: Tensor, _: Tensor) -> Tensor:
            return log_domain.draw(s, (*shape,), generator).movedim(-1, 0)

        return pairs(draw, eta, x, log_weights, visible).movedim(0, -1)

    def information_bound(self) -> Float[Tensor, ""]:
        """log n minus the mean loss (in general G(0) for log n): in expectation a lower bound on mutual information."""
        visible = self._visible()
        if visible.plain and visible.itself and not self._outside:  # equal for all anchors: no sum over pairs
            w = self.log_weights
            zero = math.log(self.candidates.shape[0]) if w is None else w.logsumexp(0)
        else:
            zero = self._log_normalizer(torch.zeros_like(self.anchor), torch.zeros_like(self.candidates[0]))
        return (zero + self.log_density()).mean()

    def chosen(self) -> Float[Tensor, "m d"]:
        """The positive x_+ of every anchor, [m, d]."""
        if self.positive is None:
            return self.candidates
        return self.positive if self._outside else self.candidates[self.positive]

    # Implementation --------------------------------------------------------------------------------------------------

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def _outside(self) -> bool:
        """True if positives are vectors and not indices of candidates."""
        return self.positive is not None and self.positive.is_floating_point()

    def _index(self) -> Int[Tensor, " m"]:
        """Index of the positive of each anchor among the candidates."""
        if self.positive is None:
            return torch.arange(self.anchor.shape[0], device=self.anchor.device)
        return self.positive.long()

    def _center(self) -> Float[Tensor, " d"]:
        return self.candidates.detach().mean(0)

    def _visible(self) -> VisiblePairs:
        """The candidates of each anchor, without positives passed as vectors."""
        labels = self.labels if isinstance(self.labels, tuple) else None  # a pair since __post_init__
        positive = None if self._outside or (labels is None and self.mask is None) else self._index()
        return VisiblePairs(not self.exclude_self, labels, False, positive, None, self.mask)

    def _negatives(self) -> VisiblePairs:
        """The candidates of each anchor without its positive."""
        visible = self._visible()._replace(included=None)
        if self._outside:
            return visible
        if self.positive is None and visible.plain:
            return visible._replace(itself=False)
        return visible._replace(excluded=self._index())

    def _log_normalizer(self, eta: Tensor, center: Tensor) -> Tensor:
        """G of the centred candidates."""
        G = log_sum_exp(eta, self.candidates - center, self.log_weights, self._visible(), precision=self.precision)
        return log_add(G, (eta * (self.chosen() - center)).sum(-1)) if self._outside else G

    def _attention(self, center: Tensor) -> Tensor:
        """E_eta[x] - centre."""
        eta, x, visible = self.eta, self.candidates - center, self._visible()
        if visible.plain and visible.itself and not self._outside:
            return Empirical(x, self.log_weights, validate=False).mean(eta)
        mean = pairs(lambda s, k: log_domain.softmax(s) @ k, eta, x, self.log_weights, visible)
        if not self._outside:
            return mean
        share, positive = self._share(eta, center)
        return torch.lerp(mean, positive, share)

    def _share(self, eta: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
        """p(+) as [m, 1] for a positive passed as a vector, and that vector, centred."""
        positive = self.chosen() - center
        return ((eta * positive).sum(-1) - self._log_normalizer(eta, center)).exp().unsqueeze(-1), positive

    def _second(self, center: Tensor, vector: Tensor | None = None) -> Tensor:
        """Cov_eta[x], or its product with a vector."""
        eta, x = self.eta, self.candidates - center

        def matrix(s: Tensor, k: Tensor) -> Tensor:
            p = log_domain.softmax(s)
            return reference.covariance(p, p @ k, k)

        def product(s: Tensor, k: Tensor, v: Tensor) -> Tensor:
            p = log_domain.softmax(s)
            along = v @ k.mT
            signed = p * (along - (p * along).sum(-1, keepdim=True))
            return (signed - p * signed.sum(-1, keepdim=True)) @ k  # the weights sum to 0 up to rounding

        rows = () if vector is None else (vector,)
        within = pairs(matrix if vector is None else product, eta, x, self.log_weights, self._visible(), *rows)
        if not self._outside:
            return within
        # Covariance of a sum of two measures: within and between them.   [theory 3.8]
        share, positive = self._share(eta, center)
        apart = pairs(lambda s, k: log_domain.softmax(s) @ k, eta, x, self.log_weights, self._visible()) - positive
        between = share * (1 - share)
        if vector is not None:
            return (1 - share) * within + between * apart * (apart * vector).sum(-1, keepdim=True)
        return (1 - share).unsqueeze(-1) * within + between.unsqueeze(-1) * apart.unsqueeze(-1) * apart.unsqueeze(-2)
