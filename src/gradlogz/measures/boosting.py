"""Boosting weights as a measure: AdaBoost is coordinate descent on the log normaliser.

    u_i        = -y_i (f_1(x_i), ..., f_J(x_i))                     one point per example, J weak learners
    w_i        = exp(-y_i F(x_i))                                   the weights after the rounds so far
    Z(lambda)  = sum_i w_i exp<u_i, lambda> = exponential loss of F + <lambda, f>       [theory 6.4, E18]
    ∇G(lambda) = minus the weighted edges of the weak learners
    a round    = coordinate descent of G: lambda_j = (1/2) log(w_right / w_wrong), then tilt

Read next: empirical.py, algebra.py (tilt: re-weighting after a round is exponential tilting).
"""

from typing import NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, check_floats, has_values, present, shape_of
from .._typing import Float, Tensor
from .empirical import Empirical
from .measure import Measure


class Round(NamedTuple):
    """One round of boosting: the chosen learner, its weight, and the measure for the next round."""

    learner: Tensor
    weight: Float[Tensor, "*b"]
    h: Empirical


def margin_measure(
    labels: Float[Tensor, "*b n"], predictions: Float[Tensor, "*b n j"], scores: Float[Tensor, "*b n"] | None = None
) -> Empirical:
    """The measure of boosting: points -y_i f(x_i), log weights -y_i F(x_i), whose Z is the exponential loss.

    Args:
        labels: -1 or 1.
        predictions: predictions f_j(x_i) of the weak learners.
        scores: F(x_i) of the model so far; None for the first round.
    """
    check_floats("margin_measure", labels=labels, predictions=predictions, **present(scores=scores))
    if labels.shape != predictions.shape[:-1]:
        fact = f"shapes {shape_of(labels)} and {shape_of(predictions)}"
        remedy = "Pass one row of predictions for each label."
        raise InputValueError(
            "margin_measure", "labels", f"labels must be [*b, n] and predictions [*b, n, j], got {fact}", remedy
        )
    if scores is not None and scores.shape != labels.shape:
        condition = f"scores must have the shape of labels, {shape_of(labels)}"
        raise InputValueError(
            "margin_measure", "scores", f"{condition}, got shape {shape_of(scores)}", "Expand them first."
        )
    if has_values(labels) and not bool((labels.abs() == 1).all()):
        fact = f"{int((labels.abs() != 1).sum())} of {labels.numel()} are not"
        raise InputValueError(
            "margin_measure", "labels", f"labels must be -1 or 1, but {fact}", "Map classes to -1 and 1 first."
        )
    points = -labels.unsqueeze(-1) * predictions
    return Empirical(points, None if scores is None else -labels * scores)


def boost(h: Measure, learner: int | None = None) -> Round:
    """One round: the step along one weak learner that minimises G, and the measure re-weighted by it.

    The weak learners must predict -1 or 1. By default `learner` is the one with the largest edge, as in AdaBoost.
    A learner without errors gets an infinite weight; the re-weighted measure then has no mass.
    """
    if not isinstance(h, Empirical):
        remedy = "Build it with margin_measure."
        raise InputTypeError("boost", "h", f"h must be an Empirical of margins, got {type(h).__name__}", remedy)
    if learner is not None and not 0 <= learner < h.dim:
        condition = f"learner must be one of the {h.dim} weak learners, 0 to {h.dim - 1}"
        raise InputValueError(
            "boost", "learner", f"{condition}, got learner={learner}", "Leave it out to choose the best one."
        )
    if has_values(h.points) and not bool((h.points.abs() == 1).all()):
        fact = f"{int((h.points.abs() != 1).sum())} of {h.points.numel()} are not"
        remedy = "Pass their sign, or minimise G along the learner."
        raise InputValueError("boost", "predictions", f"predictions must be -1 or 1, but {fact}", remedy)
    zero = torch.zeros(*h.batch_shape, h.dim, dtype=h.points.dtype, device=h.points.device)
    edges = -h.mean(zero)  # E_w[y f_j], between -1 and 1: largest for the best learner
    chosen = edges.abs().argmax(-1) if learner is None else torch.full(edges.shape[:-1], learner, device=edges.device)
    along = h.points.take_along_dim(chosen[..., None, None], -1).squeeze(-1)  # -1 where the learner is correct
    log_w = torch.zeros_like(along) if h.log_weights is None else h.log_weights
    right = log_w.masked_fill(along > 0, -torch.inf).logsumexp(-1)
    wrong = log_w.masked_fill(along < 0, -torch.inf).logsumexp(-1)
    weight = (right - wrong) / 2  # not from the edge, which rounds to 1 long before the weight is infinite
    log_weights = weight.unsqueeze(-1) * along
    if h.log_weights is not None:  # an example without mass stays without mass, also under an infinite weight
        log_weights = torch.where(h.log_weights == -torch.inf, -torch.inf, h.log_weights + log_weights)
    return Round(chosen, weight, Empirical(h.points, log_weights))
