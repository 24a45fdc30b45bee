"""A loss of rows of logits as data, for compiled code: which keys are positives and negatives, and what is computed.

Read next: compiled_rows.py, softmax_losses.py (which make these).
"""

from typing import NamedTuple

from ..._typing import Bool, Int, Tensor

ONE, MEAN, MASS, PAIR, SIGMOIDS, CLIP = range(6)


class Problem(NamedTuple):
    """A loss of rows.

    Attributes:
        kind: ONE positive, several by MEAN, MASS or PAIR, SIGMOIDS, or rows and columns (CLIP).
        positive: index of the positive of each row; None for its own number.
        labels: labels of rows and keys. With ONE, SIGMOIDS and CLIP, equal labels are no negatives; else positives.
        mask: True where a key may be a negative.
        itself: index of a key for each row that is neither positive nor negative.
        without_own_number: this is key i for row i.
        margin: number subtracted from the logit of the positive.
        decoupled: exclude the positive from the denominator.
        centred: subtract the mean of the keys first, which does not change the loss.
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
