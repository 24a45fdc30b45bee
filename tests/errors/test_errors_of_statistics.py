"""The statistics of the probe say what is wrong with shapes, groups, and states that do not belong together."""

import torch

from gradlogz.probing.statistics import (
    affine_fit,
    comoments_of,
    histogram_of,
    merge,
    sample_of,
    sums_of,
)
from support.error_form import each_of, refused

keys, x, y = torch.arange(3), torch.ones(2, 5, 4), torch.ones(2, 5, 3)
edges = torch.tensor([0.0, 1.0])
sample = sample_of({"x": torch.ones(3, 2)}, keys)

ERRORS = [
    (
        ValueError,
        "sums_of: values must be [b, *s, k] beside keys [b]; got shapes (5, 2) and (3,).",
        lambda: sums_of(torch.ones(5, 2), keys),
    ),
    (
        ValueError,
        "sums_of: values must be [b, *s, k] beside keys [b]; got shapes (3,) and (3,).",
        lambda: sums_of(torch.ones(3), keys),
    ),
    (
        ValueError,
        "Sums.merge: both must have the same shapes; got (201, 1, 2) and (201, 4, 2).",
        lambda: merge(sums_of(torch.ones(3, 1, 2), keys), sums_of(torch.ones(3, 4, 2), keys)),
    ),
    (
        ValueError,
        "comoments_of: x must be [*h, t, p], and y [*h, t, q] if given; got shapes (2, 5, 4) and (5, 3).",
        lambda: comoments_of(x, y[0], group=0),
    ),
    (
        ValueError,
        "comoments_of: x must be [*h, t, p], and y [*h, t, q] if given; got shape (4,).",
        lambda: comoments_of(x[0, 0], group=0),
    ),
    (
        ValueError,
        "comoments_of: weights must be one for each of the 5 tokens; got shape (2, 5).",
        lambda: comoments_of(x, group=0, weights=torch.ones(2, 5)),
    ),
    (ValueError, "comoments_of: group must be 0 to 7; got 8.", lambda: comoments_of(x, group=8)),
    (ValueError, "Comoments.only: group must be 0 to 7; got -1.", lambda: comoments_of(x, group=0).only(-1)),
    (ValueError, "Comoments.without: group must be 0 to 7; got 9.", lambda: comoments_of(x, group=0).without(9)),
    (
        ValueError,
        "comoments_of: yy must be full, diagonal or trace; got 'none'.",
        lambda: comoments_of(x, y, group=0, yy="none"),
    ),
    (
        ValueError,
        "GroupMoments.merge: both must have the same shapes; got "
        "(), (2, 4), (2, 4, 4), None, None, None and (), (2, 3), (2, 3, 3), None, None, None.",
        lambda: merge(comoments_of(x, group=0), comoments_of(y, group=0)),
    ),
    (
        ValueError,
        "affine_fit: comoments must have products with y; got those of x alone.",
        lambda: affine_fit(comoments_of(x, group=0)),
    ),
    (
        ValueError,
        "histogram_of: edges must be two or more, ascending; got shape (2,).",
        lambda: histogram_of(x, edges.flip(0)),
    ),
    (
        ValueError,
        "histogram_of: edges must be two or more, ascending; got shape (1,).",
        lambda: histogram_of(x, edges[:1]),
    ),
    (
        ValueError,
        "Histogram.merge: both must have the same edges; got 2 edges that differ.",
        lambda: merge(histogram_of(x, edges), histogram_of(x, 2 * edges)),
    ),
    (
        ValueError,
        "Histogram.merge: both must have the same shapes; got (2,), (2, 5, 4) and (2,), (5, 4).",
        lambda: merge(histogram_of(x, edges), histogram_of(x[0], edges)),
    ),
    (
        ValueError,
        "sample_of: vectors must be [t, ...] beside hashes [t]; got shapes (4, 2) and (3,).",
        lambda: sample_of({"x": torch.ones(4, 2), "y": torch.ones(3)}, keys),
    ),
    (
        ValueError,
        "Sample.merge: both must have one size and vectors of the same names and shapes; "
        "got 4096 tokens of x and 4096 tokens of y.",
        lambda: merge(sample, sample_of({"y": torch.ones(3, 2)}, keys)),
    ),
    (
        ValueError,
        "Sample.merge: both must have one size and vectors of the same names and shapes; "
        "got 4096 tokens of x and 9 tokens of x.",
        lambda: merge(sample, sample._replace(size=9)),
    ),
    (TypeError, "merge: both must be states of one kind; got dict and Sample.", lambda: merge({}, sample)),
    (TypeError, "merge: both must be states of one kind; got list and list.", lambda: merge([], [])),
    (ValueError, "merge: constants must be equal; got 0.5 and 0.25.", lambda: merge({"a": 0.5}, {"a": 0.25})),
    (ValueError, "merge: constants must be equal; got two tensors that differ.", lambda: merge(edges, 2 * edges)),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
