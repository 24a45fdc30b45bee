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
        "sums_of: values",
        "for keys",
        lambda: sums_of(torch.ones(5, 2), keys),
    ),
    (
        ValueError,
        "sums_of: values",
        "for keys",
        lambda: sums_of(torch.ones(3), keys),
    ),
    (
        ValueError,
        "Sums.merge: other",
        "shapes",
        lambda: merge(sums_of(torch.ones(3, 1, 2), keys), sums_of(torch.ones(3, 4, 2), keys)),
    ),
    (
        ValueError,
        "comoments_of: x",
        "shape",
        lambda: comoments_of(x, y[0], group=0),
    ),
    (
        ValueError,
        "comoments_of: x",
        "shape",
        lambda: comoments_of(x[0, 0], group=0),
    ),
    (
        ValueError,
        "comoments_of: weights",
        "token",
        lambda: comoments_of(x, group=0, weights=torch.ones(2, 5)),
    ),
    (ValueError, "comoments_of: group", "between", lambda: comoments_of(x, group=8)),
    (ValueError, "Comoments.only: group", "between", lambda: comoments_of(x, group=0).only(-1)),
    (ValueError, "Comoments.without: group", "between", lambda: comoments_of(x, group=0).without(9)),
    (
        ValueError,
        "comoments_of: yy",
        "diagonal",
        lambda: comoments_of(x, y, group=0, yy="none"),
    ),
    (
        ValueError,
        "GroupMoments.merge: other",
        "shapes",
        lambda: merge(comoments_of(x, group=0), comoments_of(y, group=0)),
    ),
    (
        ValueError,
        "affine_fit: comoments",
        "products",
        lambda: affine_fit(comoments_of(x, group=0)),
    ),
    (
        ValueError,
        "histogram_of: edges",
        "ascending",
        lambda: histogram_of(x, edges.flip(0)),
    ),
    (
        ValueError,
        "histogram_of: edges",
        "ascending",
        lambda: histogram_of(x, edges[:1]),
    ),
    (
        ValueError,
        "Histogram.merge: other",
        "edges",
        lambda: merge(histogram_of(x, edges), histogram_of(x, 2 * edges)),
    ),
    (
        ValueError,
        "Histogram.merge: other",
        "shapes",
        lambda: merge(histogram_of(x, edges), histogram_of(x[0], edges)),
    ),
    (
        ValueError,
        "sample_of: vectors",
        "for hashes",
        lambda: sample_of({"x": torch.ones(4, 2), "y": torch.ones(3)}, keys),
    ),
    (
        ValueError,
        "Sample.merge: other",
        "vectors",
        lambda: merge(sample, sample_of({"y": torch.ones(3, 2)}, keys)),
    ),
    (
        ValueError,
        "Sample.merge: other",
        "vectors",
        lambda: merge(sample, sample._replace(size=9)),
    ),
    (TypeError, "merge: other", "merged", lambda: merge({}, sample)),
    (TypeError, "merge: other", "merged", lambda: merge([], [])),
    (ValueError, "merge: other", "constants", lambda: merge({"a": 0.5}, {"a": 0.25})),
    (ValueError, "merge: other", "constants", lambda: merge(edges, 2 * edges)),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
