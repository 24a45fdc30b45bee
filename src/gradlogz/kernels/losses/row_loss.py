"""A loss of rows of logits: as a function of a row with its slope, and as data for compiled code.

Read next: softmax_losses.py (the losses), logit_losses.py (their sums), compiled_rows.py (compiled).
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Float, Int, Tensor

ONE, MEAN, MASS, PAIR, SIGMOIDS, CLIP, MULTI_SIMILARITY, CIRCLE = range(8)


class Problem(NamedTuple):
    """A loss of rows.

    Attributes:
        kind: ONE positive, several by MEAN, MASS or PAIR, SIGMOIDS, rows and columns (CLIP), or a loss of metric
            learning (MULTI_SIMILARITY, CIRCLE).
        positive: index of the positive of each row; None for its own number.
        labels: labels of rows and keys. With ONE, SIGMOIDS and CLIP, equal labels are no negatives; else positives.
        mask: True where a key may be a negative.
        itself: index of a key for each row that is neither positive nor negative.
        without_own_number: this is key i for row i.
        margin: number subtracted from the logit of the positive.
        decoupled: exclude the positive from the denominator.
        centred: subtract the mean of the keys first, which does not change the loss.
        constants: alpha, beta and base of MULTI_SIMILARITY; relaxation and scale of CIRCLE.
    """

    kind: int
    positive: Int[Tensor, " m"] | None = None
    labels: tuple[Int[Tensor, " m"] | None, Int[Tensor, " n"] | None] = (None, None)
    mask: Bool[Tensor, "m n"] | None = None
    itself: Int[Tensor, " m"] | None = None
    without_own_number: bool = False
    margin: float = 0.0
    decoupled: bool = False
    centred: bool = True
    constants: tuple[float, ...] = ()


class RowLoss(ABC):
    """A function of each row of logits, with tensors of row parameters that have no gradients.

    `shift_invariant` is True if adding a number to a row of logits does not change its loss. `indivisible` is True if
    the loss is a function of all rows together, so that they cannot be evaluated by blocks.
    """

    shift_invariant = True
    indivisible = False

    @abstractmethod
    def value(self, s: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
        """Loss of every row, differentiable."""

    @abstractmethod
    def at(self, rows: Any) -> "RowLoss":
        """The loss of some rows, by a slice or by indices."""

    def problem(self) -> Problem | None:
        """The loss as compiled code takes it; None if it does not."""
        return None

    def value_and_slope(self, s: Float[Tensor, "r n"]) -> tuple[Float[Tensor, " r"], Float[Tensor, "r n"]]:
        """Loss of every row and its derivative in the logits, which may be overwritten."""
        with torch.enable_grad():
            s = s.detach().requires_grad_()
            losses = self.value(s)
            (slope,) = torch.autograd.grad(losses.sum(), s)
        return losses.detach(), slope
