"""Losses of distances: triplets, alignment and uniformity.

Read next: ../scaling.py (distances as dot products).
"""

import math

from ..._autocast import without_autocast
from ..._errors import InputValueError, shape_of
from ..._typing import Float, Tensor
from ...kernels.losses.pairwise_log_sum_exp import log_sum_exp
from ...kernels.losses.softmax_losses import softplus
from ...kernels.losses.visible_pairs import VisiblePairs
from ..validation import (
    check_choice,
    check_rows,
    check_temperature,
    check_vectors,
    in_dtype_of,
    promoted,
    reduced,
    unit,
    wide,
)
from .options import Temperature


@without_autocast
def triplet_loss(
    anchor: Float[Tensor, "m d"],
    positive: Float[Tensor, "m d"],
    negative: Float[Tensor, "m d"],
    *,
    margin: float = 0.0,
    similarity: str = "squared_distance",
    temperature: Temperature | None = None,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Triplet loss max(0, margin + |a - x_+|² - |a - x_-|²), the limit T -> 0 of the loss below.   [schroff15]

        loss_i = T log(1 + exp((margin + s_- - s_+) / T)),   s = -|a - x|², at temperature T

    Denominator: the positive and one negative. temperature=None is the limit.

    Args:
        similarity: s is "squared_distance" -|a - x|², "distance" -|a - x| or "dot" <a, x>. On the unit sphere squared
            distances are 2 - 2 <a, x>, so margin and loss of dot products are half of those of squared distances.
    """
    check_vectors("triplet_loss", anchor=anchor, positive=positive, negative=negative)
    check_choice("triplet_loss", "similarity", similarity, ("dot", "squared_distance", "distance"))
    for name, vectors in (("positive", positive), ("negative", negative)):
        check_rows("triplet_loss", name, vectors, anchor.shape[0], "anchor")
    a, x, y = (unit(t) if normalize else t for t in promoted(anchor, positive, negative))
    if similarity == "dot":
        violation = margin + (a * (y - x)).sum(-1)
    elif similarity == "squared_distance":
        violation = margin + (a - x).square().sum(-1) - (a - y).square().sum(-1)
    else:
        violation = margin + _length(a - x) - _length(a - y)
    if temperature is None:
        return reduced("triplet_loss", violation.clamp(min=0.0), reduction)
    check_temperature("triplet_loss", temperature, anchor)
    temperature = in_dtype_of(a, temperature)
    return reduced("triplet_loss", temperature * softplus(violation / temperature), reduction)


@without_autocast
def alignment_loss(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    exponent: float = 2.0,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Alignment loss |a_i - b_i|^exponent, the distance of positive pairs.   [wang20]

    On the unit sphere with exponent 2 it is 2 - 2 <a_i, b_i>, the attractive term of info_nce. Equal vectors have
    gradient 0.
    """
    check_vectors("alignment_loss", a=a, b=b)
    check_rows("alignment_loss", "b", b, a.shape[0], "a")
    a, b = (unit(t) if normalize else t for t in promoted(a, b))
    return reduced("alignment_loss", _length(a - b, exponent), reduction)


@without_autocast
def uniformity_loss(
    vectors: Float[Tensor, "m d"], *, sharpness: float = 2.0, normalize: bool = False
) -> Float[Tensor, ""]:
    """Uniformity loss: log of the mean of exp(-sharpness |x_i - x_j|²) over all pairs.   [wang20]

    The repulsive term of info_nce. The sum is over all other vectors, with eta = 2 sharpness x_i and log weights
    -sharpness |x_j|².
    """
    check_vectors("uniformity_loss", vectors=vectors)
    m = vectors.shape[0]
    if m < 2:
        remedy = "Pass a larger batch."
        raise InputValueError(
            "uniformity_loss", "vectors", f"vectors must have at least two rows, got shape {shape_of(vectors)}", remedy
        )
    x = unit(wide(vectors)) if normalize else wide(vectors)
    x = x - x.detach().mean(0)
    log_weights = -sharpness * x.square().sum(-1)
    G = log_sum_exp(2 * sharpness * x, x, log_weights, VisiblePairs(itself=False))
    return (G + log_weights).logsumexp(0) - math.log(m) - math.log(m - 1)


def _length(x: Float[Tensor, "m d"], exponent: float = 1.0) -> Float[Tensor, " m"]:
    """|x|^exponent with gradient 0 at x = 0, where that of an exponent below 2 does not exist."""
    square = x.square().sum(-1)
    if exponent == 2:
        return square
    some = square > 0
    return square.where(some, 1.0).pow(exponent / 2).where(some, 0.0 if exponent > 0 else 1.0)
