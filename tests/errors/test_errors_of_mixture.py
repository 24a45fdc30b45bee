"""Mixture says what is wrong with its weights, its components and its gates."""

import math

import torch

from gradlogz import Gaussian, Mixture
from support.error_form import each_of, refused

half = torch.full((2,), math.log(0.5))
components = Gaussian.diagonal(torch.zeros(2, 3), torch.ones(2, 3))
mixture, eta = Mixture(half, components), torch.zeros(3)
dtypes = "tensors must share one dtype; got"

ERRORS = [
    (TypeError, "Mixture: components must be a measure; got list.", lambda: Mixture(half, [components])),
    (TypeError, "Mixture: log_weights must be a tensor; got list.", lambda: Mixture([0.0], components)),
    (
        TypeError,
        "Mixture: log_weights must be float32 or float64; got torch.int64.",
        lambda: Mixture(half.long(), components),
    ),
    (
        TypeError,
        f"Mixture: {dtypes} log_weights torch.float64, components torch.float32.",
        lambda: Mixture(half.double(), components),
    ),
    (
        ValueError,
        "Mixture: tensors must be on one device; got log_weights on meta, components on cpu.",
        lambda: Mixture(half.to("meta"), components),
    ),
    (
        ValueError,
        "Mixture: log_weights must be [*b, k] with k >= 1; got shape ().",
        lambda: Mixture(torch.zeros(()), components),
    ),
    (
        ValueError,
        "Mixture: log_weights must be [*b, k] with k >= 1; got shape (0,).",
        lambda: Mixture(torch.zeros(0), components),
    ),
    (
        ValueError,
        "Mixture: components must have the last batch dimension k=2, one for each weight; got batch shape ().",
        lambda: Mixture(half, Gaussian.diagonal(eta, eta)),
    ),
    (
        ValueError,
        "Mixture: components must have the last batch dimension k=1, one for each weight; got batch shape (2,).",
        lambda: Mixture(torch.zeros(1), components),
    ),
    (
        ValueError,
        "Mixture: batch dimensions must agree; got (2,) and (4, 2).",
        lambda: Mixture(half, Gaussian.diagonal(torch.zeros(4, 2, 3), torch.ones(4, 2, 3))),
    ),
    (
        ValueError,
        "Mixture: batch dimensions must agree; got (3, 2) and (4, 2).",
        lambda: Mixture(half.expand(3, 2), Gaussian.diagonal(torch.zeros(4, 2, 3), torch.ones(4, 2, 3))),
    ),
    (
        ValueError,
        "Mixture: log_weights must be finite or -inf; got 2 of 2 entries that are NaN or +inf.",
        lambda: Mixture(half + torch.nan, components),
    ),
    (
        ValueError,
        "Mixture: exp(log_weights) must sum to one; got a log sum of 0.693 at worst.",
        lambda: Mixture(torch.zeros(2), components),
    ),
    (
        ValueError,
        "Mixture: eta must have m=4 queries, one for each row of log_weights; got 3 queries.",
        lambda: Mixture(half.expand(4, 2), components).mean(torch.zeros(3, 3)),
    ),
    # gates
    (
        TypeError,
        "Mixture.lower_bound: log_gates must be a tensor; got list.",
        lambda: mixture.lower_bound(eta, [0.0, 0.0]),
    ),
    (
        TypeError,
        f"Mixture.lower_bound: {dtypes} eta torch.float32, log_gates torch.float64.",
        lambda: mixture.lower_bound(eta, half.double()),
    ),
    (
        ValueError,
        "Mixture.lower_bound: eta must end in d=3, the dimension of the measure; got shape (2,).",
        lambda: mixture.lower_bound(half),
    ),
    (
        ValueError,
        "Mixture.lower_bound: log_gates must be [*b, k=2], the shape of log_weights; got shape (3,).",
        lambda: mixture.lower_bound(eta, torch.zeros(3)),
    ),
    (
        ValueError,
        "Mixture.lower_bound: log_gates must be finite or -inf; got 2 of 2 entries that are NaN or +inf.",
        lambda: mixture.lower_bound(eta, half + torch.inf),
    ),
    (
        ValueError,
        "Mixture.lower_bound: exp(log_gates) must sum to one; got a log sum of 0.693 at worst.",
        lambda: mixture.lower_bound(eta, torch.zeros(2)),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
