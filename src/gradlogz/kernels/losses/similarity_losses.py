"""Losses of rows of similarities that are no likelihoods: multi-similarity and circle, each with its slope.

    A = log-sum-exp of f(s_p) over the positives,   N = log-sum-exp of g(s_n) over the negatives
    multi-similarity    softplus(A + a base) / a + softplus(N - b base) / b      f(s) = -a s,  g(s) = b s
    circle              softplus(A + N)                                          f(s) = -c u_p (s - 1 + r),
                                                                                 g(s) = c u_n (s - r)
    u_p = max(0, 1 + r - s) and u_n = max(0, s + r) are weights, which are not differentiated

Read next: logit_losses.py (their sums over all rows), ../../contrastive/losses/pair_weights.py.
"""

from typing import Any

from ..._typing import Bool, Float, Tensor
from ...special import log_domain
from .row_loss import CIRCLE, MULTI_SIMILARITY, Problem, RowLoss
from .softmax_losses import EVERY_KEY, EVERY_ROW, exponentials, softplus
from .visible_pairs import VisiblePairs


class _TwoSides(RowLoss):
    """A loss of the log-sum-exps over the positives and over the negatives of each row."""

    shift_invariant = False

    def __init__(self, m: int, positives: VisiblePairs, negatives: VisiblePairs, rows: Any = EVERY_ROW) -> None:
        self.m, self.sides, self.rows = m, (positives, negatives), rows

    def _problem(self, kind: int, constants: tuple[float, ...]) -> Problem | None:
        """The loss of positives and negatives by label; None for pairs of a miner."""
        positives, _ = self.sides
        if positives.labels is None:
            return None
        itself, without = positives.excluded, not positives.itself
        return Problem(kind, None, positives.labels, None, itself, without, centred=False, constants=constants)

    def _hidden(self, s: Tensor) -> tuple[Bool[Tensor, "r n"], ...]:
        """Where pairs are not positives, and where they are not negatives: both sides have labels or a mask."""
        masks = (pairs.hidden(self.rows, self.m, EVERY_KEY, s.shape[1], s.device) for pairs in self.sides)
        return tuple(mask for mask in masks if mask is not None)

    def _log_sums(self, s: Tensor, logits: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [
            log_domain.log_sum_exp(t.masked_fill(mask, -float("inf")))
            for t, mask in zip(logits, self._hidden(s), strict=True)
        ]


class MultiSimilarity(_TwoSides):
    """Multi-similarity loss of every row, with sharpness alpha over positives and beta over negatives."""

    def __init__(
        self,
        m: int,
        positives: VisiblePairs,
        negatives: VisiblePairs,
        settings: tuple[float, float, float],
        rows: Any = EVERY_ROW,
    ) -> None:
        super().__init__(m, positives, negatives, rows)
        self.settings = settings

    def at(self, rows: Any) -> "MultiSimilarity":
        return type(self)(self.m, *self.sides, self.settings, rows)

    def problem(self) -> Problem | None:
        return self._problem(MULTI_SIMILARITY, self.settings)

    def value(self, s: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
        alpha, beta, base = self.settings
        A, N = self._log_sums(s, (-alpha * s, beta * s))
        return softplus(A + alpha * base) / alpha + softplus(N - beta * base) / beta

    def value_and_slope(self, s: Float[Tensor, "r n"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "r n"]]:
        alpha, beta, base = self.settings
        no_positive, no_negative = self._hidden(s)
        above, above_total, A = exponentials((s * -alpha).masked_fill_(no_positive, -float("inf")))
        below, below_total, N = exponentials(s.mul_(beta).masked_fill_(no_negative, -float("inf")))
        A += alpha * base
        N -= beta * base
        slope = below.mul_(N.sigmoid().unsqueeze(1) / below_total)
        slope -= above.mul_(A.sigmoid().unsqueeze(1) / above_total)
        return softplus(A) / alpha + softplus(N) / beta, slope


class Circle(_TwoSides):
    """Circle loss of every row; 0 without positives or without negatives."""

    def __init__(
        self,
        m: int,
        positives: VisiblePairs,
        negatives: VisiblePairs,
        settings: tuple[float, float],
        rows: Any = EVERY_ROW,
    ) -> None:
        super().__init__(m, positives, negatives, rows)
        self.settings = settings

    def at(self, rows: Any) -> "Circle":
        return type(self)(self.m, *self.sides, self.settings, rows)

    def problem(self) -> Problem | None:
        return self._problem(CIRCLE, self.settings)

    def _weights(self, s: Float[Tensor, "r n"]) -> tuple[Float[Tensor, "r n"], Float[Tensor, "r n"]]:
        """Slopes of the logits of positives and negatives."""
        r, scale = self.settings
        return (1 + r - s).clamp_(min=0).mul_(-scale), (s + r).clamp_(min=0).mul_(scale)

    def value(self, s: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
        r, _ = self.settings
        to_positive, to_negative = self._weights(s.detach())
        A, N = self._log_sums(s, (to_positive * (s - 1 + r), to_negative * (s - r)))
        some = (A > -float("inf")) & (N > -float("inf"))
        return softplus(A.where(some, 0.0) + N.where(some, 0.0)).where(some, 0.0)

    def value_and_slope(self, s: Float[Tensor, "r n"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "r n"]]:
        r, _ = self.settings
        no_positive, no_negative = self._hidden(s)
        to_positive, to_negative = self._weights(s)
        above, above_total, A = exponentials((s - (1 - r)).mul_(to_positive).masked_fill_(no_positive, -float("inf")))
        below, below_total, N = exponentials(s.sub_(r).mul_(to_negative).masked_fill_(no_negative, -float("inf")))
        behind = A + N  # -inf without positives or without negatives
        share = behind.sigmoid().unsqueeze(1)
        slope = above.mul_(to_positive.mul_(share / above_total))
        slope.addcmul_(below, to_negative.mul_(share / below_total))
        return softplus(behind), slope
