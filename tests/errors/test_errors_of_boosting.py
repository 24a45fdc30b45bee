"""margin_measure and boost say what is wrong with labels, predictions and learners."""

import torch

from gradlogz import Gaussian
from gradlogz.measures import boost, margin_measure
from support.error_form import each_of, refused

labels, predictions = torch.ones(4), torch.ones(4, 2)
h = margin_measure(labels, predictions)

ERRORS = [
    (TypeError, "margin_measure: labels", "a tensor", lambda: margin_measure([1.0], predictions)),
    (
        TypeError,
        "margin_measure: labels",
        "float32",
        lambda: margin_measure(labels.long(), predictions),
    ),
    (
        TypeError,
        "margin_measure: None",
        "share",
        lambda: margin_measure(labels, predictions.double()),
    ),
    (
        ValueError,
        "margin_measure: labels",
        "predictions",
        lambda: margin_measure(labels, labels),
    ),
    (
        ValueError,
        "margin_measure: labels",
        "predictions",
        lambda: margin_measure(torch.ones(3), predictions),
    ),
    (
        ValueError,
        "margin_measure: labels",
        "or",
        lambda: margin_measure(0 * labels, predictions),
    ),
    (
        ValueError,
        "margin_measure: scores",
        "labels",
        lambda: margin_measure(labels.expand(2, 4), predictions.expand(2, 4, 2), labels),
    ),
    (
        TypeError,
        "boost: h",
        "Empirical",
        lambda: boost(Gaussian.diagonal(labels, labels**2)),
    ),
    (
        ValueError,
        "boost: learner",
        "learners",
        lambda: boost(h, 2),
    ),
    (
        ValueError,
        "boost: learner",
        "learners",
        lambda: boost(h, -1),
    ),
    (
        ValueError,
        "boost: predictions",
        "or",
        lambda: boost(margin_measure(labels, predictions / 2)),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
