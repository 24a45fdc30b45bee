"""margin_measure and boost say what is wrong with labels, predictions and learners."""

import torch

from gradlogz import Gaussian
from gradlogz.measures import boost, margin_measure
from support.error_form import each_of, refused

labels, predictions = torch.ones(4), torch.ones(4, 2)
h = margin_measure(labels, predictions)

ERRORS = [
    (TypeError, "margin_measure: labels must be a tensor; got list.", lambda: margin_measure([1.0], predictions)),
    (
        TypeError,
        "margin_measure: labels must be float32 or float64; got torch.int64.",
        lambda: margin_measure(labels.long(), predictions),
    ),
    (
        TypeError,
        "margin_measure: tensors must share one dtype; got labels torch.float32, predictions torch.float64.",
        lambda: margin_measure(labels, predictions.double()),
    ),
    (
        ValueError,
        "margin_measure: labels must be [*b, n] beside predictions [*b, n, j]; got shapes (4,) and (4,).",
        lambda: margin_measure(labels, labels),
    ),
    (
        ValueError,
        "margin_measure: labels must be [*b, n] beside predictions [*b, n, j]; got shapes (3,) and (4, 2).",
        lambda: margin_measure(torch.ones(3), predictions),
    ),
    (
        ValueError,
        "margin_measure: labels must be -1 or 1; got 4 other labels.",
        lambda: margin_measure(0 * labels, predictions),
    ),
    (
        ValueError,
        "margin_measure: scores must have the shape of labels, (2, 4); got shape (4,).",
        lambda: margin_measure(labels.expand(2, 4), predictions.expand(2, 4, 2), labels),
    ),
    (
        TypeError,
        "boost: h must be an Empirical of margins; got Gaussian.",
        lambda: boost(Gaussian.diagonal(labels, labels**2)),
    ),
    (
        ValueError,
        "boost: learner must be one of the 2 weak learners, 0 to 1; got learner=2.",
        lambda: boost(h, 2),
    ),
    (
        ValueError,
        "boost: learner must be one of the 2 weak learners, 0 to 1; got learner=-1.",
        lambda: boost(h, -1),
    ),
    (
        ValueError,
        "boost: predictions must be -1 or 1; got 8 of 8 other answers.",
        lambda: boost(margin_measure(labels, predictions / 2)),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
