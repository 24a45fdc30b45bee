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
    (TypeError, "Empirical: points must be a tensor; got list.", lambda: Empirical([[1.0]])),
    (TypeError, "Empirical: points must be a tensor; got list.", lambda: Empirical([[1.0]], torch.tensor([True]))),
    (TypeError, "Empirical: points must be a tensor; got NoneType.", lambda: Empirical(None)),
    (TypeError, "Empirical: points must be float32 or float64; got torch.int64.", lambda: Empirical(points.long())),
    (TypeError, "Empirical: points must be float32 or float64; got torch.float16.", lambda: Empirical(points.half())),
    (
        TypeError,
        "Empirical: points must be float32 or float64; got torch.bfloat16.",
        lambda: Empirical(points.bfloat16()),
    ),
    (ValueError, "Empirical: points must be [*b, n, d]; got shape (3,).", lambda: Empirical(torch.ones(3))),
    (ValueError, "Empirical: points must be [*b, n, d]; got shape ().", lambda: Empirical(torch.ones(()))),
    (
        ValueError,
        "Empirical: points must hold at least one point; got shape (2, 0, 3).",
        lambda: Empirical(torch.ones(2, 0, 3)),
    ),
    (
        ValueError,
        "Empirical: points must be finite; got 3 of 12 entries that are NaN or infinite.",
        lambda: Empirical(points.clone().fill_diagonal_(nan)),
    ),
    (
        ValueError,
        "Empirical: points must be finite; got 12 of 12 entries that are NaN or infinite.",
        lambda: Empirical(points * inf),
    ),
    # log_weights
    (TypeError, "Empirical: log_weights must be a tensor; got list.", lambda: Empirical(points, [0.0] * 4)),
    (
        TypeError,
        "Empirical: log_weights must be float32 or float64; got torch.int64.",
        lambda: Empirical(points, zeros.long()),
    ),
    (
        TypeError,
        "Empirical: tensors must share one dtype; got points torch.float32, log_weights torch.float64.",
        lambda: Empirical(points, zeros.double()),
    ),
    (
        ValueError,
        "Empirical: tensors must be on one device; got points on cpu, log_weights on meta.",
        lambda: Empirical(points, meta),
    ),
    (ValueError, f"{shared} 0 batch dimensions; got shape (5,).", lambda: Empirical(points, torch.zeros(5))),
    (ValueError, f"{shared} 0 batch dimensions; got shape (5,).", lambda: Empirical(points, torch.zeros(5) == 0)),
    (
        ValueError,
        f"{shared} 0 batch dimensions; got shape (2, 5, 4).",
        lambda: Empirical(points, zeros.expand(2, 5, 4)),
    ),
    # Batches broadcast against size 1, never from the right.
    (ValueError, f"{shared} 1 batch dimensions; got shape (4,).", lambda: Empirical(batched, zeros)),
    (
        ValueError,
        "Empirical: batch dimensions must agree; got (2,) and (3,).",
        lambda: Empirical(batched, torch.zeros(3, 4)),
    ),
    (
        ValueError,
        "Empirical: log_weights must be finite or -inf; got 1 of 4 entries that are NaN or +inf.",
        lambda: Empirical(points, first(nan)),
    ),
    (
        ValueError,
        "Empirical: log_weights must be finite or -inf; got 1 of 4 entries that are NaN or +inf.",
        lambda: Empirical(points, first(inf)),
    ),
    (
        ValueError,
        "Empirical: eta must have m=5 queries, one for each row of log_weights; got 2 queries.",
        lambda: Empirical(points, torch.zeros(5, 4)).mean(torch.zeros(2, 3)),
    ),
    # weighted
    (TypeError, "Empirical.weighted: points must be a tensor; got list.", lambda: Empirical.weighted([[1.0]], zeros)),
    (TypeError, "Empirical.weighted: weights must be a tensor; got int.", lambda: Empirical.weighted(points, 1)),
    (
        TypeError,
        "Empirical.weighted: weights must be float32 or float64; got torch.int64.",
        lambda: Empirical.weighted(points, zeros.long()),
    ),
    (ValueError, masses, lambda: Empirical.weighted(points, first(-1.0))),
    (ValueError, masses, lambda: Empirical.weighted(points, first(nan))),
    (ValueError, masses, lambda: Empirical.weighted(points, first(inf))),
    (ValueError, f"{shared} 0 batch dimensions; got shape (5,).", lambda: Empirical.weighted(points, torch.ones(5))),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
