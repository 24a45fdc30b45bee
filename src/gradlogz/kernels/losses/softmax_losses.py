"""Losses of logits, each with its slope: one positive, both directions, positives by label, targets, sigmoids.

    N = log-sum-exp over the negatives,   A = log-sum-exp over the positives
    one positive      softplus(N - s_+)                       slope  p_neg (softmax over negatives) - p_neg at +
    positives, mass   softplus(N - A)                         -log of the probability of all positives
    positives, mean   A - mean s_p + softplus(N - A)          -mean of the log probabilities of the positives
    positives, pair   mean of softplus(N - s_p)               each positive against the negatives alone

The positive is never part of the sum that it is compared with: N - s_+ has the relative error of a logit, while G - s_+
would lose all digits where the loss is small.

Read next: logit_losses.py (their sums over all rows), ../../contrastive/losses/.
"""

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from ..._typing import Float, Int, Tensor
from ...special import log_domain
from .row_loss import CLIP, MASS, MEAN, ONE, PAIR, SIGMOIDS, Problem, RowLoss
from .visible_pairs import VisiblePairs

EVERY_ROW = slice(None)
EVERY_KEY = slice(None)
NO_LABELS = (None, None)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp x), accurate for large x, where torch's softplus returns x above 20 (2e-9 too small)."""
    return -logsigmoid(-x)


def exponentials(s: Float[Tensor, "r n"]) -> tuple[Tensor, Tensor, Tensor]:
    """exp(s - top), which overwrites s, their sums z [r, 1], and log-sum-exp [r]; a row may be all -inf.

    Masks make such rows, and so do log weights and biases of -inf.
    """
    top = s.amax(1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    masses = s.sub_(top).exp_()
    total = masses.sum(1, keepdim=True)
    log_total = total.log().add_(top).squeeze(1)
    total.clamp_(min=torch.finfo(s.dtype).tiny)  # 0 / z is 0 in a row without mass
    return masses, total, log_total


class OnePositive(RowLoss):
    """softplus(N - s_+ + margin) of the positive of each row, or N - s_+ + margin if decoupled.

    Args:
        m: number of rows of the whole problem.
        positive: index of the positive of each row; None for its own number.
        negatives: pairs that may be negatives; positives are excluded in any case.
        margin: number subtracted from the logit of the positive.
        decoupled: exclude the positive from the denominator.
    """

    def __init__(
        self,
        m: int,
        positive: Int[Tensor, " m"] | None,
        negatives: VisiblePairs,
        *,
        margin: float = 0.0,
        decoupled: bool = False,
        rows: Any = EVERY_ROW,
    ) -> None:
        self.m, self.positive, self.negatives, self.rows = m, positive, negatives, rows
        self.margin, self.decoupled = margin, decoupled

    def at(self, rows: Any) -> "OnePositive":
        return type(self)(
            self.m, self.positive, self.negatives, margin=self.margin, decoupled=self.decoupled, rows=rows
        )

    def problem(self) -> Problem:
        _, labels, _, _, _, mask = self.negatives
        without = not self.negatives.itself
        return Problem(ONE, self.positive, labels or NO_LABELS, mask, None, without, float(self.margin), self.decoupled)

    def _index(self, s: Tensor) -> Tensor:
        every = torch.arange(self.m, device=s.device) if self.positive is None else self.positive.long()
        return every[self.rows].unsqueeze(-1)

    def _hidden(self, s: Tensor) -> Tensor | None:
        return self.negatives.hidden(self.rows, self.m, EVERY_KEY, s.shape[1], s.device)

    def value(self, s: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
        index, hidden = self._index(s), self._hidden(s)
        positive = s.gather(1, index).squeeze(1)
        s = s.scatter(1, index, -torch.inf)
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        behind = log_domain.log_sum_exp(s) - positive + self.margin
        return behind if self.decoupled else softplus(behind)

    def value_and_slope(self, s: Float[Tensor, "r n"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "r n"]]:
        hidden = self._hidden(s)
        if self.positive is None and isinstance(self.rows, slice):
            diagonal = s.diagonal(self.rows.start or 0)
            positive = diagonal.clone()
            diagonal.fill_(-torch.inf)
        else:
            index = self._index(s)
            positive = s.gather(1, index).squeeze(1)
            s.scatter_(1, index, -torch.inf)
        if hidden is not None:
            s.masked_fill_(hidden, -torch.inf)
        slope, total, negatives = exponentials(s)
        behind = negatives.sub_(positive)
        if not isinstance(self.margin, float) or self.margin:
            behind += self.margin
        share = torch.ones_like(behind) if self.decoupled else behind.sigmoid()
        slope *= share.unsqueeze(-1).div(total)
        if self.positive is None and isinstance(self.rows, slice):
            torch.neg(share, out=slope.diagonal(self.rows.start or 0))
        else:
            slope.scatter_(1, index, -share.unsqueeze(-1))
        return (behind if self.decoupled else softplus(behind)), slope


class BothDirections(RowLoss):
    """Mean of the losses of row i and of column i of square logits, whose positive is s_ii: the CLIP loss.

    It is a function of all rows together.
    """

    shift_invariant = False
    indivisible = True

    def __init__(self, negatives: VisiblePairs) -> None:
        self.negatives = negatives

    def at(self, rows: Any) -> "BothDirections":
        return self

    def problem(self) -> Problem:
        return Problem(CLIP, labels=self.negatives.labels or NO_LABELS, mask=self.negatives.mask, centred=False)

    def _masked(self, s: Tensor) -> Tensor:
        m = s.shape[0]
        hidden = self.negatives.hidden(EVERY_ROW, m, EVERY_KEY, m, s.device)
        return s if hidden is None else s.masked_fill(hidden, -torch.inf)

    def value(self, s: Float[Tensor, "m m"]) -> Float[Tensor, " m"]:
        same = torch.eye(s.shape[0], dtype=torch.bool, device=s.device)
        rest, positive = self._masked(s.masked_fill(same, -torch.inf)), s.diagonal()
        rows, columns = log_domain.log_sum_exp(rest), log_domain.log_sum_exp(rest.mT)
        return (softplus(rows - positive) + softplus(columns - positive)) / 2

    def value_and_slope(self, s: Float[Tensor, "m m"]) -> tuple[Float[Tensor, " m"], Float[Tensor, "m m"]]:
        diagonal = s.diagonal()
        positive = diagonal.clone()
        diagonal.fill_(-torch.inf)
        s = self._masked(s)
        rows, columns = s.logsumexp(1), s.logsumexp(0)
        by_row, by_column = rows - positive, columns - positive
        row_share, column_share = by_row.sigmoid().div_(2), by_column.sigmoid().div_(2)
        # Without negatives N = -inf: exp(s - inf) is 0, while exp(s - N) would be NaN.
        rows.masked_fill_(rows == -torch.inf, torch.inf)
        columns.masked_fill_(columns == -torch.inf, torch.inf)
        slope = (s - rows.unsqueeze(-1)).exp_().mul_(row_share.unsqueeze(-1))
        slope += s.sub_(columns).exp_().mul_(column_share)
        torch.neg(row_share + column_share, out=slope.diagonal())
        return (softplus(by_row) + softplus(by_column)).div_(2), slope


class SomePositives(RowLoss):
    """Loss of all positives of each row against its negatives, by one of three ways of averaging over positives.

    Args:
        m: number of rows of the whole problem.
        positives: the positives of each row.
        negatives: the negatives of each row, which are not positives.
        kind: "mean", "mass" or "pair", as at the top of this module.

    A row without positives has loss 0 and slope 0.
    """

    def __init__(
        self, m: int, positives: VisiblePairs, negatives: VisiblePairs, kind: str, *, rows: Any = EVERY_ROW
    ) -> None:
        self.m, self.sides, self.kind, self.rows = m, (positives, negatives), kind, rows

    def at(self, rows: Any) -> "SomePositives":
        return type(self)(self.m, *self.sides, self.kind, rows=rows)

    def problem(self) -> Problem | None:
        positives, _ = self.sides
        if positives.labels is None:
            return None
        kind = {"mean": MEAN, "mass": MASS, "pair": PAIR}[self.kind]
        itself = positives.excluded
        return Problem(kind, labels=positives.labels, itself=itself, without_own_number=not positives.itself)

    def _masks(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Masks of the pairs that are not positives and of those that are not negatives."""
        both = (pairs.hidden(self.rows, self.m, EVERY_KEY, s.shape[1], s.device) for pairs in self.sides)
        no_positive, no_negative = (torch.zeros_like(s, dtype=torch.bool) if mask is None else mask for mask in both)
        return no_positive, no_negative

    def value(self, s: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
        no_positive, no_negative = self._masks(s)
        negatives = log_domain.log_sum_exp(s.masked_fill(no_negative, -torch.inf))
        positives = s.masked_fill(no_positive, 0.0)
        number = s.shape[1] - no_positive.sum(-1)
        count, some = number.clamp(min=1), number > 0
        if self.kind == "pair":
            return (softplus(negatives.unsqueeze(-1) - positives) * ~no_positive).sum(-1) / count
        mass = log_domain.log_sum_exp(s.masked_fill(no_positive, -torch.inf)).masked_fill(~some, 0.0)
        losses = softplus(negatives - mass)
        if self.kind == "mean":
            losses = losses + (mass - positives.sum(-1) / count)  # exactly 0 for a single positive
        return losses.where(some, 0.0)

    def value_and_slope(self, s: Float[Tensor, "r n"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "r n"]]:
        no_positive, no_negative = self._masks(s)
        number = s.shape[1] - no_positive.sum(-1)
        count, some = number.clamp(min=1).to(s.dtype), number > 0
        below, below_total, negatives = exponentials(s.masked_fill(no_negative, -torch.inf))
        if self.kind == "pair":
            behind = torch.sub(negatives.unsqueeze(-1), s, out=s).masked_fill_(no_positive, -torch.inf)
            losses = softplus(behind).sum(-1).div_(count)
            share = behind.sigmoid_().div_(count.unsqueeze(-1))
            return losses, below.mul_(share.sum(-1, keepdim=True).div_(below_total)).sub_(share)
        mean = s.masked_fill(no_positive, 0.0).sum(-1).div_(count) if self.kind == "mean" else None
        above, above_total, mass = exponentials(s.masked_fill_(no_positive, -torch.inf))
        mass.masked_fill_(~some, 0.0)
        behind = negatives.sub_(mass)
        losses, share = softplus(behind), behind.sigmoid().masked_fill_(~some, 0.0).unsqueeze(-1)
        slope = below.mul_(share / below_total)
        if mean is None:
            slope -= above.mul_(share / above_total)
        else:
            losses += mass.sub_(mean)
            # p - 1/|P| of a positive is a - 1/|P| - share a, where a = 1 exactly for a single positive.
            above /= above_total
            slope -= above * share
            slope += above.sub_(1 / count.unsqueeze(-1)).masked_fill_(no_positive, 0.0)
        return losses.where(some, 0.0), slope


class Sigmoids(RowLoss):
    """Sum over j of softplus(s_ij) for negatives and softplus(-s_ij) for positives: each pair is classified alone.

    Args:
        m: number of rows of the whole problem.
        positive: index of the positive of each row; None for its own number.
        negatives: pairs that may be negatives; positives are counted in any case.
    """

    shift_invariant = False

    def __init__(
        self, m: int, positive: Int[Tensor, " m"] | None, negatives: VisiblePairs, *, rows: Any = EVERY_ROW
    ) -> None:
        self.m, self.positive, self.negatives, self.rows = m, positive, negatives, rows

    def at(self, rows: Any) -> "Sigmoids":
        return type(self)(self.m, self.positive, self.negatives, rows=rows)

    def problem(self) -> Problem:
        return Problem(SIGMOIDS, self.positive, self.negatives.labels or NO_LABELS, centred=False)

    def _index(self, s: Tensor) -> Tensor:
        every = torch.arange(self.m, device=s.device) if self.positive is None else self.positive.long()
        return every[self.rows].unsqueeze(-1)

    def value(self, s: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
        index = self._index(s)
        hidden = self.negatives.hidden(self.rows, self.m, EVERY_KEY, s.shape[1], s.device)
        negatives = s if hidden is None else s.masked_fill(hidden, -torch.inf)
        signed = negatives.scatter(1, index, -s.gather(1, index))
        return softplus(signed).sum(-1)

    def value_and_slope(self, s: Float[Tensor, "r n"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "r n"]]:
        index = self._index(s)
        positive = s.gather(1, index).neg_()
        hidden = self.negatives.hidden(self.rows, self.m, EVERY_KEY, s.shape[1], s.device)
        if hidden is not None:
            s.masked_fill_(hidden, -torch.inf)
        s.scatter_(1, index, positive)
        losses = softplus(s).sum(-1)
        slope = s.sigmoid_()
        return losses, slope.scatter_(1, index, -slope.gather(1, index))


class Targets(RowLoss):
    """Cross-entropy -sum_j t_ij log p_ij of rows of target probabilities, [m, n].

    Args:
        targets: nonnegative weights of the candidates of each row, of any sum.
        visible: candidates that enter the denominator.
    """

    def __init__(self, targets: Float[Tensor, "m n"], visible: VisiblePairs, *, rows: Any = EVERY_ROW) -> None:
        self.targets, self.visible, self.rows = targets, visible, rows

    def at(self, rows: Any) -> "Targets":
        return type(self)(self.targets, self.visible, rows=rows)

    def value(self, s: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
        t = self.targets[self.rows]
        hidden = self.visible.hidden(self.rows, self.targets.shape[0], EVERY_KEY, s.shape[1], s.device)
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        log_p = s.log_softmax(-1)
        return -(t * log_p.masked_fill(t == 0, 0.0)).sum(-1)
