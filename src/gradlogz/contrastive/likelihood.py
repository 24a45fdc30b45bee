"""The likelihood behind every contrastive loss: the probability of the positive among the candidates of an anchor.

    h         = sum_j w_j delta_{x_j}                      the candidates, a measure
    eta       = anchor / temperature                       the natural parameter
    p(j)      = w_j exp(<eta, x_j> - G(eta))               [theory 6.6]
    loss      = -log p(+) = G(eta) - <eta, x_+> - log w_+
    ∇ loss    = attention - x_+,   ∇² loss = Cov_eta[x]    in eta   [theory 3.5, E31]
    I(a; x)   >= G(0) - G(eta) + <eta, x_+> = log n - loss         on average, counting measure   [oord18]

The loss is invariant to a common shift of all candidates. Their mean is subtracted first, to reduce rounding errors.

Read next: losses/ (the losses), ../kernels/losses/pairwise_log_sum_exp.py (the sums in linear memory).
"""

import dataclasses
import math
from typing import Any

import torch

from .._autocast import without_autocast
from .._errors import InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor
from ..kernels.attention import reference
from ..kernels.losses.logit_losses import DENSE, compiled_sum, each_row, sum_of_rows
from ..kernels.losses.pairwise_log_sum_exp import log_add, log_sum_exp, pairs
from ..kernels.losses.softmax_losses import OnePositive, softplus
from ..kernels.losses.visible_pairs import VisiblePairs
from ..measures.empirical import Empirical
from ..special import log_domain
from .validation import (
    REDUCTIONS,
    Ids,
    check_choice,
    check_device,
    check_indices,
    check_integers,
    check_log_weights,
    check_numbers,
    check_precision,
    check_rows,
    check_temperature,
    check_vectors,
    in_dtype_of,
    promoted,
    readable,
    reduced,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Likelihood:
    """An exponential family over common candidates for every anchor, with one candidate as the positive.

    Attributes:
        anchor: anchors, [m, d].
        candidates: candidates of every anchor, [n, d].
        temperature: positive number, or a tensor with one element.
        positive: None if the positive of anchor i is candidate i; indices [m]; or vectors [m, d], each of which is an
            additional candidate of its anchor only (for example with a queue, which holds only negatives; there may
            then be no other candidates).
        log_weights: log w of each candidate, for example minus the log probability with which it was sampled. -inf
            excludes it.
        exclude_self: the anchors are the candidates, and an anchor is not a candidate for itself.
        ids: identities of anchors and candidates, one tensor if they are the same. A candidate with the id of the
            anchor (a duplicate or false negative) is excluded, except the positive.
        mask: True where candidate j may be a negative of anchor i. The positive is never excluded.
        precision: torch.bfloat16 or torch.float16 for the products of anchors and candidates, several times as fast on
            a GPU. The error of a logit is about 2^-9 / sqrt(d) times |anchor| |candidate| / temperature in bfloat16 and
            an eighth of that in float16.
        bias: number added to the logit of each pair, [m, n]: corrections for popularity or hardness of single pairs.
        call: function name at the beginning of error messages.
        names: names of anchors and candidates in error messages.

    Tensors of different dtypes are converted to the widest of them, and to float32 at least, also inside autocast.

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
    ids: Ids | None = None
    mask: Bool[Tensor, "m n"] | None = None
    bias: Float[Tensor, "m n"] | None = None
    precision: torch.dtype | None = None
    call: str = "Likelihood"
    names: tuple[str, str] = ("anchor", "candidates")

    def __post_init__(self) -> None:
        call, positive, (anchor_name, name) = self.call, self.positive, self.names
        outside = positive if isinstance(positive, Tensor) and positive.is_floating_point() else None
        vectors = {anchor_name: self.anchor, name: self.candidates, "positive": outside}
        check_vectors(call, may_be_empty=None if outside is None else name, **vectors)
        m, n = self.anchor.shape[0], self.candidates.shape[0]
        if self.exclude_self and positive is None:
            problem = "positive must be passed with exclude_self=True, since candidate i is excluded"
            raise InputValueError(call, "positive", problem, "Pass the index of the positive of each anchor.")
        if self.exclude_self:
            check_rows(call, name, self.candidates, m, anchor_name)
        if positive is None and n != m:
            problem = f"{name} must have {m} rows like {anchor_name}, got shape {shape_of(self.candidates)}"
            remedy = "Pass the index of the positive of each anchor as positive=, or as many candidates as anchors."
            raise InputValueError(call, name, problem, remedy)
        if outside is not None:
            check_rows(call, "positive", outside, m, anchor_name)
        elif positive is not None:
            check_integers(call, "positive", positive, (m,), self.anchor)
            check_indices(call, "positive", positive, n)
        if not (self.log_weights is self.bias is self.ids is self.mask is None):
            self._check_options(m, n)
        check_temperature(call, self.temperature, self.anchor)
        check_precision(call, self.precision)
        floating = self.anchor, self.candidates, outside, self.log_weights, self.bias
        if any(t is not None and t.dtype is not torch.float32 for t in floating):
            names = "anchor", "candidates", "positive", "log_weights", "bias"
            fields = {name: t for name, t in zip(names, floating, strict=True) if t is not None}
            self._set(**dict(zip(fields, promoted(*fields.values()), strict=True)))
        if isinstance(self.temperature, Tensor):
            self._set(temperature=in_dtype_of(self.anchor, self.temperature))

    def _check_options(self, m: int, n: int) -> None:
        """Check log weights, bias, ids and mask."""
        call, (anchor_name, name) = self.call, self.names
        if self.log_weights is not None:
            check_log_weights(call, self.log_weights, **{name: self.candidates})
        if self.bias is not None:
            remedy = "Pass one number for each anchor and candidate."
            check_numbers(call, "bias", self.bias, (m, n), remedy, **{name: self.candidates})
        if self.ids is not None:
            of_anchors, of_candidates = self.ids if isinstance(self.ids, tuple) else (self.ids, self.ids)
            check_integers(call, "ids", of_anchors, (m,), self.anchor)
            check_integers(call, "ids", of_candidates, (n,), self.anchor)
            self._set(ids=(of_anchors, of_candidates))
        if self.mask is not None:
            if self.mask.dtype != torch.bool or tuple(self.mask.shape) != (m, n):
                fact = f"{self.mask.dtype} of shape {shape_of(self.mask)}"
                problem = f"mask must be bool of shape ({m}, {n}), got {fact}"
                raise InputValueError(call, "mask", problem, "Pass True where a candidate may be a negative.")
            check_device(call, **{anchor_name: self.anchor, "mask": self.mask})

    # The family ------------------------------------------------------------------------------------------------------

    @property
    def eta(self) -> Float[Tensor, "m d"]:
        """Natural parameter of every anchor, anchor / temperature."""
        return self.anchor / self.temperature

    @property
    def measure(self) -> Empirical:
        """The measure of all candidates, before ids, masks and bias."""
        return Empirical(self.candidates, self.log_weights, validate=False)

    @without_autocast
    def log_normalizer(self) -> Float[Tensor, " m"]:
        """G(eta) = log sum_j w_j exp<eta, x_j> over the candidates of each anchor, including its positive."""
        return self._log_normalizer(self.eta, self._center()) + (self.eta * self._center()).sum(-1)

    @without_autocast
    def log_density(self) -> Float[Tensor, " m"]:
        """Log density <eta, x_+> - G(eta) of the positive with respect to h."""
        probability = self.log_probability()
        w = None if self._outside or self.log_weights is None else self.log_weights[self.index_of_positive()]
        return probability if w is None else probability - w

    @without_autocast
    def log_probability(self) -> Float[Tensor, " m"]:
        """log p(+), the log density plus the log weight of the positive; the loss is its negative."""
        return -self._losses(decoupled=False)

    @without_autocast
    def log_odds(self) -> Float[Tensor, " m"]:
        """log p(+) - log(1 - p(+)), the log odds of the positive against its negatives; +inf if it has none."""
        return -self._losses(decoupled=True)

    @without_autocast
    def loss(self, reduction: str = "mean", *, decoupled: bool = False, margin: float = 0.0) -> Tensor:
        """Loss -log p(+), reduced by "mean", "sum" or "none".

            log(1 + exp(N - s_+)),   N = log sum over the negatives of w_j exp s_j

        It is computed from the log odds, since G - s_+ has no correct digit where the loss is small.

        Args:
            decoupled: exclude the positive from the denominator: N - s_+. Every anchor then needs a negative.
            margin: number subtracted from <anchor, positive>, in the units of this product.
        """
        check_choice(self.call, "reduction", reduction, REDUCTIONS)
        m, n = self.anchor.shape[0], self.candidates.shape[0]
        if decoupled or (margin and isinstance(self.temperature, Tensor)):  # a margin has a gradient in the temperature
            return self.loss_of_log_odds(self.log_odds(), reduction, decoupled=decoupled, margin=margin)
        if reduction != "none" and not self._outside:
            learned = isinstance(self.temperature, Tensor)
            eta, factor = (self.eta, 1.0) if learned else (self.anchor, 1 / self.temperature)
            rows, options = self._rows(decoupled=False, margin=margin), {"factor": factor, "precision": self.precision}
            sums: Any = sum_of_rows if m * n <= DENSE else compiled_sum
            coefficient = 1 / m if reduction == "mean" else 1.0
            total = sums(rows, eta, self.candidates, self._bias(), coefficient, **options)
            if total is not None:
                return total
        return reduced(self.call, self._losses(decoupled=False, margin=margin), reduction)

    def loss_of_log_odds(
        self, log_odds: Float[Tensor, " m"], reduction: str, *, decoupled: bool = False, margin: float = 0.0
    ) -> Tensor:
        """`loss` from log odds of the positives that were computed elsewhere."""
        losses = margin / self.temperature - log_odds if margin else -log_odds
        if decoupled:
            self._check_negatives(losses)
        return reduced(self.call, losses if decoupled else softplus(losses), reduction)

    @without_autocast
    def log_mass(self, labels: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Log probability of the label of each anchor, if the anchors are the candidates and exclude themselves."""
        check_integers(self.call, "labels", labels, (self.anchor.shape[0],), self.anchor)
        eta, x = self.eta, self.candidates - self._center()
        same = VisiblePairs(itself=False, labels=(labels, labels))
        positives, negatives = (log_sum_exp(eta, x, self._bias(), same._replace(same=which)) for which in (True, False))
        some = positives != -torch.inf
        return torch.where(some, -softplus(negatives - positives.where(some, 0.0)), -torch.inf)

    @without_autocast
    def mean(self) -> Float[Tensor, "m d"]:
        """E_eta[x], the attention of every anchor to its candidates."""
        center = self._center()
        return self._attention(center) + center

    @without_autocast
    def gradient(self) -> Float[Tensor, "m d"]:
        """Gradient of the loss in eta, attention minus the positive; divide by the temperature for the anchor."""
        center = self._center()
        return self._attention(center) - (self.chosen() - center)

    @without_autocast
    def fisher(self) -> Float[Tensor, "m d d"]:
        """Cov_eta[x], the Fisher information of eta and the second derivative of the loss."""
        return self._second(self._center())

    @without_autocast
    def fisher_product(self, vector: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """Cov_eta[x] v, without forming the d x d matrix."""
        check_vectors(self.call, anchor=self.anchor, vector=vector)
        check_rows(self.call, "vector", vector, self.anchor.shape[0], "anchor")
        return self._second(self._center(), vector.to(self.anchor))

    @without_autocast
    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Int[Tensor, "..."]:
        """Indices [*shape, m] of negatives drawn with the probabilities of the family, so hard ones are more likely.

        Every anchor must have a negative.
        """
        eta, x, negatives = self.eta.detach(), (self.candidates - self._center()).detach(), self._negatives()
        bias = self._bias()
        bias = None if bias is None else bias.detach()
        alive = log_sum_exp(eta, x, bias, negatives) > -torch.inf
        if not bool(alive.all()):
            call = f"{self.call}.sample"
            problem = f"candidates leave {int((~alive).sum())} anchors without a negative to draw"
            raise InputValueError(call, "candidates", problem, "Use a larger batch, or exclude fewer pairs.")

        def draw(s: Tensor, _: Tensor) -> Tensor:
            return log_domain.draw(s, (*shape,), generator).movedim(-1, 0)

        return pairs(draw, eta, x, bias, negatives).movedim(0, -1)

    @without_autocast
    def information_bound(self) -> Float[Tensor, ""]:
        """log n minus the mean loss (in general G(0) for log n): in expectation a lower bound on mutual information."""
        visible = self._visible()
        if visible.plain and visible.itself and not self._outside and self.bias is None:
            w = self.log_weights  # equal for all anchors: no sum over pairs
            zero = math.log(self.candidates.shape[0]) if w is None else w.logsumexp(0)
        else:
            zero = self._log_normalizer(torch.zeros_like(self.anchor), torch.zeros_like(self.anchor[0]))
        return (zero + self.log_density()).mean()

    def chosen(self) -> Float[Tensor, "m d"]:
        """The positive x_+ of every anchor, [m, d]."""
        if self.positive is None:
            return self.candidates
        return self.positive if self._outside else self.candidates[self.index_of_positive()]

    # Implementation --------------------------------------------------------------------------------------------------

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def _outside(self) -> bool:
        """True if positives are vectors and not indices of candidates."""
        return self.positive is not None and self.positive.is_floating_point()

    def index_of_positive(self) -> Int[Tensor, " m"]:
        """Index of the positive of each anchor among the candidates."""
        if self.positive is None:
            return torch.arange(self.anchor.shape[0], device=self.anchor.device)
        return self.positive.long()

    def _center(self) -> Float[Tensor, " d"]:
        if self.candidates.shape[0] == 0:
            return torch.zeros_like(self.anchor[0])
        return self.candidates.detach().mean(0)

    def _bias(self) -> Float[Tensor, " n"] | Float[Tensor, "m n"] | None:
        """Log weights and bias, added to the logits."""
        if self.bias is None or self.log_weights is None:
            return self.log_weights if self.bias is None else self.bias
        return self.bias + self.log_weights

    def weight_of_positive(self) -> Float[Tensor, " m"] | None:
        """Number added to the logit of each positive; None for 0."""
        bias, index = self._bias(), self.index_of_positive() if not self._outside else None
        if bias is None or index is None:
            return None
        return bias[index] if bias.ndim == 1 else bias.gather(1, index.unsqueeze(-1)).squeeze(-1)

    def _visible(self) -> VisiblePairs:
        """The candidates of each anchor, without positives passed as vectors."""
        ids = self.ids if isinstance(self.ids, tuple) else None  # a pair since __post_init__
        positive = None if self._outside or (ids is None and self.mask is None) else self.index_of_positive()
        return VisiblePairs(not self.exclude_self, ids, False, positive, None, self.mask)

    def _negatives(self) -> VisiblePairs:
        """The candidates of each anchor without its positive."""
        visible = self._visible()._replace(included=None)
        if self._outside:
            return visible
        if self.positive is None and visible.plain:
            return visible._replace(itself=False)
        return visible._replace(excluded=self.index_of_positive())

    def _losses(self, *, decoupled: bool, margin: float = 0.0) -> Float[Tensor, " m"]:
        """Loss of every anchor."""
        m, n = self.anchor.shape[0], self.candidates.shape[0]
        eta, bias = self.eta, self._bias()
        if not self._outside and m * n <= DENSE:
            rows = self._rows(decoupled=decoupled, margin=margin)
            return each_row(rows, eta, self.candidates, bias, precision=self.precision)
        center = self._center()
        positive = (eta * (self.chosen() - center)).sum(-1)
        weight = self.weight_of_positive()
        positive = positive if weight is None else positive + weight
        N = log_sum_exp(eta, self.candidates - center, bias, self._negatives(), precision=self.precision)
        losses = N - positive
        if margin:
            losses = losses + margin / self.temperature
        return losses if decoupled else softplus(losses)

    def _rows(self, *, decoupled: bool, margin: float) -> OnePositive:
        """The loss as a function of rows of logits, for positives among the candidates."""
        ids = self.ids if isinstance(self.ids, tuple) else None  # a pair since __post_init__
        visible = VisiblePairs(not self.exclude_self, ids, same=False, mask=self.mask)
        in_logits = margin / float(self.temperature) if margin else 0.0
        return OnePositive(self.anchor.shape[0], self.positive, visible, margin=in_logits, decoupled=decoupled)

    def _check_negatives(self, losses: Tensor) -> None:
        """Check that every anchor has a negative: its decoupled loss is -inf otherwise."""
        if readable(losses) and bool((losses.detach() == -torch.inf).any()):
            problem = f"{self.names[1]} leave some anchors without a negative"
            raise InputValueError(self.call, self.names[1], problem, "Use a larger batch, or exclude fewer pairs.")

    def _log_normalizer(self, eta: Tensor, center: Tensor) -> Tensor:
        """G of the centred candidates."""
        G = log_sum_exp(eta, self.candidates - center, self._bias(), self._visible(), precision=self.precision)
        return log_add(G, (eta * (self.chosen() - center)).sum(-1)) if self._outside else G

    def _attention(self, center: Tensor) -> Tensor:
        """E_eta[x] - centre."""
        eta, x, visible = self.eta, self.candidates - center, self._visible()
        if visible.plain and visible.itself and not self._outside and self.bias is None:
            return Empirical(x, self.log_weights, validate=False).mean(eta)
        mean = pairs(lambda s, k: log_domain.softmax(s) @ k, eta, x, self._bias(), visible)
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
        within = pairs(matrix if vector is None else product, eta, x, self._bias(), self._visible(), *rows)
        if not self._outside:
            return within
        # Covariance of a sum of two measures: within and between them.   [theory 3.8]
        share, positive = self._share(eta, center)
        apart = pairs(lambda s, k: log_domain.softmax(s) @ k, eta, x, self._bias(), self._visible()) - positive
        between = share * (1 - share)
        if vector is not None:
            return (1 - share) * within + between * apart * (apart * vector).sum(-1, keepdim=True)
        return (1 - share).unsqueeze(-1) * within + between.unsqueeze(-1) * apart.unsqueeze(-1) * apart.unsqueeze(-2)
