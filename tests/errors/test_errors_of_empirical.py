"""Empirical says what is wrong with its points and weights."""

import torch

from gradlogz import Empirical
from support.error_form import each_of, refused

nan, inf = torch.nan, torch.inf
points, batched = torch.ones(4, 3), torch.ones(2, 4, 3)
zeros, meta = torch.zeros(4), torch.zeros(4, device="meta")
shared = "Empirical: log_weights must be [*b, n] or [*b, m, n] with n=4 and"
masses = "Empirical.weighted: weights must be finite and nonnegative; got 1 of 4 entries below 0, NaN or infinite."


def first(x):
    return torch.tensor([x, 0.0, 0.0, 0.0])


ERRORS = [
    # points
    (TypeError, "Empirical: points", "a tensor", lambda: Empirical([[1.0]])),
    (TypeError, "Empirical: points", "a tensor", lambda: Empirical([[1.0]], torch.tensor([True]))),
    (TypeError, "Empirical: points", "a tensor", lambda: Empirical(None)),
    (TypeError, "Empirical: points", "float32", lambda: Empirical(points.long())),
    (TypeError, "Empirical: points", "float32", lambda: Empirical(points.half())),
    (
        TypeError,
        "Empirical: points",
        "float32",
        lambda: Empirical(points.bfloat16()),
    ),
    (ValueError, "Empirical: points", "[*b,", lambda: Empirical(torch.ones(3))),
    (ValueError, "Empirical: points", "[*b,", lambda: Empirical(torch.ones(()))),
    (
        ValueError,
        "Empirical: points",
        "point",
        lambda: Empirical(torch.ones(2, 0, 3)),
    ),
    (
        ValueError,
        "Empirical: points",
        "finite",
        lambda: Empirical(points.clone().fill_diagonal_(nan)),
    ),
    (
        ValueError,
        "Empirical: points",
        "finite",
        lambda: Empirical(points * inf),
    ),
    # log_weights
    (TypeError, "Empirical: log_weights", "a tensor", lambda: Empirical(points, [0.0] * 4)),
    (
        TypeError,
        "Empirical: log_weights",
        "float32",
        lambda: Empirical(points, zeros.long()),
    ),
    (
        TypeError,
        "Empirical: None",
        "share",
        lambda: Empirical(points, zeros.double()),
    ),
    (
        ValueError,
        "Empirical: None",
        "device",
        lambda: Empirical(points, meta),
    ),
    (ValueError, "Empirical: log_weights", "dimensions", lambda: Empirical(points, torch.zeros(5))),
    (ValueError, "Empirical: log_weights", "dimensions", lambda: Empirical(points, torch.zeros(5) == 0)),
    (
        ValueError,
        "Empirical: log_weights",
        "dimensions",
        lambda: Empirical(points, zeros.expand(2, 5, 4)),
    ),
    # Batches broadcast against size 1, never from the right.
    (ValueError, "Empirical: log_weights", "dimensions", lambda: Empirical(batched, zeros)),
    (
        ValueError,
        "Empirical: None",
        "agree",
        lambda: Empirical(batched, torch.zeros(3, 4)),
    ),
    (
        ValueError,
        "Empirical: log_weights",
        "finite",
        lambda: Empirical(points, first(nan)),
    ),
    (
        ValueError,
        "Empirical: log_weights",
        "finite",
        lambda: Empirical(points, first(inf)),
    ),
    (
        ValueError,
        "Empirical: eta",
        "log_weights",
        lambda: Empirical(points, torch.zeros(5, 4)).mean(torch.zeros(2, 3)),
    ),
    # weighted
    (TypeError, "Empirical.weighted: points", "a tensor", lambda: Empirical.weighted([[1.0]], zeros)),
    (TypeError, "Empirical.weighted: weights", "a tensor", lambda: Empirical.weighted(points, 1)),
    (
        TypeError,
        "Empirical.weighted: weights",
        "float32",
        lambda: Empirical.weighted(points, zeros.long()),
    ),
    (ValueError, "Empirical.weighted: weights", "nonnegative", lambda: Empirical.weighted(points, first(-1.0))),
    (ValueError, "Empirical.weighted: weights", "nonnegative", lambda: Empirical.weighted(points, first(nan))),
    (ValueError, "Empirical.weighted: weights", "nonnegative", lambda: Empirical.weighted(points, first(inf))),
    (ValueError, "Empirical: log_weights", "dimensions", lambda: Empirical.weighted(points, torch.ones(5))),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
