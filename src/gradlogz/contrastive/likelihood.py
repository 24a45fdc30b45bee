"""The likelihood behind every contrastive loss: which candidate belongs to this anchor?

    h         = sum_j w_j delta_{x_j}                      the candidates, a measure
    eta       = anchor / temperature                       the natural parameter
    p(j)      = w_j exp(<eta, x_j> - G(eta))               [theory 6.6]
    loss      = -log p(+) = G(eta) - <eta, x_+> - log w_+
    ∇ loss    = attention - x_+,   ∇² loss = Cov_eta[x]    in eta   [theory 3.5, E31]
    I(a; x)   >= G(0) - G(eta) + <eta, x_+> = log n - loss         on average, counting measure   [oord18]

The loss does not change if one vector is added to all candidates; their mean is taken away first, which saves digits.

Read next: losses.py, each loss in a few lines; ../kernels/losses/pairwise_log_sum_exp.py, the sums in linear memory.
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
    """A family for every anchor, all on the same candidates, with one of them named as the positive.

    Attributes:
        anchor: what looks for its positive.
        candidates: what it may choose from.
        temperature: one number above 0, or a tensor of one.
        positive: None if the positive of anchor i is candidate i; the index of each; or vectors [m, d], which then are
            one more candidate for their anchor alone (a queue holds only negatives).
        log_weights: log w of each candidate, for example minus the log probability with which it was sampled. -inf
            takes it away.
        exclude_self: anchors are the candidates, and none is a candidate for itself.
        labels: of anchors and candidates, one tensor if they are the same. A candidate with the label of the anchor
            is no negative of it: duplicates, false negatives. The positive stays.
        mask: True where candidate j may be a negative of anchor i. The positive stays.
        precision: torch.bfloat16 or torch.float16 to let anchors meet candidates in it: on a GPU several times as fast;
            logits err by about 2^-9 / sqrt(d) of |anchor| |candidate| / temperature in bfloat16, an eighth in float16.
            Not where labels or masks are compared.
        call: the name that messages begin with.

    Half precision is computed in float32.

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
                fact, remedy = f"shape {shape_of(self.log_weights)}", "Pass one for each candidate."
                raise InputValueError(call, "log_weights", f"log_weights must have shape ({n},), got {fact}", remedy)
            check_alike(call, candidates=self.candidates, log_weights=self.log_weights)
        if self.labels is not None:
            own, others = self.labels if isinstance(self.labels, tuple) else (self.labels, self.labels)
            check_integers(call, "labels", own, (m,), self.anchor)
            check_integers(call, "labels", others, (n,), self.anchor)
            self._set(labels=(own, others))
        if self.mask is not None:
            if self.mask.dtype != torch.bool or tuple(self.mask.shape) != (m, n):
                fact, remedy = f"{self.mask.dtype} of shape {shape_of(self.mask)}", "True is a possible negative."
                raise InputValueError(call, "mask", f"mask must be bool of shape ({m}, {n}), got {fact}", remedy)
            check_alike(call, anchor=self.anchor, mask=self.mask)
        check_temperature(call, self.temperature, self.anchor)
        check_precision(call, self.precision)
        self._set(anchor=wide(self.anchor), candidates=wide(self.candidates))
        if isinstance(self.temperature, Tensor):  # a number of any dtype leaves the dtype of the vectors alone
            self._set(temperature=self.temperature.reshape(()))
        if outside is not None:
            self._set(positive=wide(outside))
        if self.log_weights is not None:
            self._set(log_weights=wide(self.log_weights))

    # The family ------------------------------------------------------------------------------------------------------

    @property
    def eta(self) -> Float[Tensor, "m d"]:
        """The natural parameter of every anchor."""
        return self.anchor / self.temperature

    @property
    def measure(self) -> Empirical:
        """All candidates, before anything is hidden from anyone."""
        return Empirical(self.candidates, self.log_weights, validate=False)

    def log_normalizer(self) -> Float[Tensor, " m"]:
        """G(eta) = log sum_j w_j exp<eta, x_j> over the candidates of each anchor, its positive among them."""
        return self._log_normalizer(self.eta, self._center()) + self.eta @ self._center()

    def log_density(self) -> Float[Tensor, " m"]:
        """<eta, x_+> - G(eta): of the positive, with respect to h."""
        eta, center = self.eta, self._center()
        return (eta * (self.chosen() - center)).sum(-1) - self._log_normalizer(eta, center)

    def log_probability(self) -> Float[Tensor, " m"]:
        """log p(+): the log density and the log weight of the positive. Minus this is the loss."""
        density = self.log_density()
        return density if self.log_weights is None or self._outside else density + self.log_weights[self._index()]

    def log_odds(self) -> Float[Tensor, " m"]:
        """log p(+) - log(1 - p(+)): the positive against its negatives alone; +inf where it has none."""
        eta, center = self.eta, self._center()
        logit = (eta * (self.chosen() - center)).sum(-1)
        if self.log_weights is not None and not self._outside:
            logit = logit + self.log_weights[self._index()]
        x, seen = self.candidates - center, self._negatives()
        return logit - log_sum_exp(eta, x, self.log_weights, seen, precision=self.precision)

    def log_mass(self, labels: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
        """log P(a candidate of the label of the anchor), where anchors are the candidates and do not see themselves."""
        check_integers(self.call, "labels", labels, (self.anchor.shape[0],), self.anchor)
        eta, center = self.eta, self._center()
        own = VisiblePairs(itself=False, labels=(labels, labels))
        x = self.candidates - center
        return log_sum_exp(eta, x, self.log_weights, own) - self._log_normalizer(eta, center)

    def mean(self) -> Float[Tensor, "m d"]:
        """E_eta[x]: attention of every anchor to its candidates."""
        center = self._center()
        return self._attention(center) + center

    def gradient(self) -> Float[Tensor, "m d"]:
        """Of the loss in eta: attention minus the positive. With respect to the anchor it is 1/temperature of this."""
        center = self._center()
        return self._attention(center) - (self.chosen() - center)

    def fisher(self) -> Float[Tensor, "m d d"]:
        """Cov_eta[x], the Fisher information of eta: the second derivative of the loss."""
        return self._second(self._center())

    def fisher_product(self, vector: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """Cov_eta[x] v, without the d x d matrix."""
        check_vectors(self.call, anchor=self.anchor, vector=vector)
        check_rows(self.call, "vector", vector, self.anchor.shape[0], "anchor")
        return self._second(self._center(), wide(vector))

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Int[Tensor, "..."]:
        """Indices [*shape, m] of negatives, drawn with the probabilities of the family: the hard ones more often."""
        eta, x, seen = self.eta.detach(), (self.candidates - self._center()).detach(), self._negatives()
        log_weights = None if self.log_weights is None else self.log_weights.detach()

        def draw(s: Tensor, _: Tensor) -> Tensor:
            return log_domain.draw(s, (*shape,), generator).movedim(-1, 0)

        return pairs(draw, eta, x, log_weights, seen).movedim(0, -1)

    def information_bound(self) -> Float[Tensor, ""]:
        """log n - loss on average, G(0) + log density in general: at most the mutual information, in expectation."""
        seen = self._seen()
        if seen.plain and seen.itself and not self._outside:  # the same for all anchors, and no sum over pairs
            w = self.log_weights
            zero = math.log(self.candidates.shape[0]) if w is None else w.logsumexp(0)
        else:
            zero = self._log_normalizer(torch.zeros_like(self.anchor), torch.zeros_like(self.candidates[0]))
        return (zero + self.log_density()).mean()

    def chosen(self) -> Float[Tensor, "m d"]:
        """x_+ of every anchor."""
        if self.positive is None:
            return self.candidates
        return self.positive if self._outside else self.candidates[self.positive]

    # What it is made of ----------------------------------------------------------------------------------------------

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def _outside(self) -> bool:
        """Whether positives are vectors of their own."""
        return self.positive is not None and self.positive.is_floating_point()

    def _index(self) -> Int[Tensor, " m"]:
        """The positive of each anchor among the candidates."""
        if self.positive is None:
            return torch.arange(self.anchor.shape[0], device=self.anchor.device)
        return self.positive.long()

    def _center(self) -> Float[Tensor, " d"]:
        return self.candidates.detach().mean(0)

    def _seen(self) -> VisiblePairs:
        """The candidates of each anchor, without a positive that is a vector of its own."""
        labels = self.labels if isinstance(self.labels, tuple) else None  # made a pair at the beginning
        kept = None if self._outside or (labels is None and self.mask is None) else self._index()
        return VisiblePairs(not self.exclude_self, labels, False, kept, None, self.mask)

    def _negatives(self) -> VisiblePairs:
        """The same without the positive."""
        seen = self._seen()._replace(kept=None)
        if self._outside:
            return seen
        if self.positive is None and seen.plain:
            return seen._replace(itself=False)
        return seen._replace(dropped=self._index())

    def _log_normalizer(self, eta: Tensor, center: Tensor) -> Tensor:
        """G of the candidates moved by -centre."""
        G = log_sum_exp(eta, self.candidates - center, self.log_weights, self._seen(), precision=self.precision)
        return log_add(G, (eta * (self.chosen() - center)).sum(-1)) if self._outside else G

    def _attention(self, center: Tensor) -> Tensor:
        """E_eta[x] - centre."""
        eta, x, seen = self.eta, self.candidates - center, self._seen()
        if seen.plain and seen.itself and not self._outside:
            return Empirical(x, self.log_weights, validate=False).mean(eta)
        mean = pairs(lambda s, k: log_domain.softmax(s) @ k, eta, x, self.log_weights, seen)
        if not self._outside:
            return mean
        share, positive = self._share(eta, center)
        return torch.lerp(mean, positive, share)

    def _share(self, eta: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
        """p(+) as [m, 1], where the positive is a vector of its own, and that vector."""
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
            return (signed - p * signed.sum(-1, keepdim=True)) @ k  # they sum to 0 but for rounding

        rows = () if vector is None else (vector,)
        found = pairs(matrix if vector is None else product, eta, x, self.log_weights, self._seen(), *rows)
        if not self._outside:
            return found
        # Two measures, merged: what is within each, and what is between them.   [theory 3.8]
        share, positive = self._share(eta, center)
        apart = pairs(lambda s, k: log_domain.softmax(s) @ k, eta, x, self.log_weights, self._seen()) - positive
        between = share * (1 - share)
        if vector is not None:
            return (1 - share) * found + between * apart * (apart * vector).sum(-1, keepdim=True)
        return (1 - share).unsqueeze(-1) * found + between.unsqueeze(-1) * apart.unsqueeze(-1) * apart.unsqueeze(-2)
