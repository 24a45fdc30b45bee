"""The operations on measures say what does not fit together."""

import torch

from gradlogz import Empirical, Gamma, Gaussian, add, convolve, merge, product, pushforward, reweight, tilt
from gradlogz.measures import PartialStatistics
from support.error_form import each_of, refused

h = Gaussian.diagonal(torch.zeros(3), torch.ones(3))
batch = Gaussian.diagonal(torch.zeros(2, 3), torch.ones(2, 3))
plane, double = Empirical(torch.ones(4, 2)), Empirical(torch.ones(4, 3).double())
one, two, three = torch.ones(()), torch.ones(2), torch.ones(3)
nan, meta = torch.nan, torch.ones(3, device="meta")
gamma = Gamma(torch.ones(1), torch.ones(1))

ERRORS = [
    # tilt
    (TypeError, "tilt: h", "a measure", lambda: tilt(3, three)),
    (TypeError, "tilt: by", "a tensor", lambda: tilt(h, [1.0, 1.0, 1.0])),
    (
        TypeError,
        "tilt: None",
        "share",
        lambda: tilt(h, three.double()),
    ),
    (ValueError, "tilt: None", "device", lambda: tilt(h, meta)),
    (ValueError, "tilt: by", "dimensions", lambda: tilt(h, two)),
    (
        ValueError,
        "tilt: by",
        "dimensions",
        lambda: tilt(batch, three),
    ),
    (
        ValueError,
        "tilt: None",
        "agree",
        lambda: tilt(batch, three.expand(4, 3)),
    ),
    (
        ValueError,
        "tilt: by",
        "finite",
        lambda: tilt(h, three * nan),
    ),
    (
        ValueError,
        "tilt: by",
        "measure",
        lambda: tilt(gamma, torch.tensor([2.0])),
    ),
    # convolve, add, product
    (ValueError, "convolve: measures", "empty", lambda: convolve()),
    (ValueError, "add: measures", "empty", lambda: add()),
    (ValueError, "product: measures", "empty", lambda: product()),
    (TypeError, "convolve: measure 1", "a measure", lambda: convolve(h, 3)),
    (TypeError, "add: measure 0", "a measure", lambda: add([h, h])),
    (
        TypeError,
        "convolve: None",
        "share",
        lambda: convolve(h, double),
    ),
    (
        ValueError,
        "add: None",
        "device",
        lambda: add(h, Gaussian.diagonal(meta, meta)),
    ),
    (ValueError, "convolve: measures", "space", lambda: convolve(h, plane)),
    (ValueError, "add: measures", "space", lambda: add(h, plane)),
    (ValueError, "convolve: None", "agree", lambda: convolve(h, batch)),
    (ValueError, "add: None", "agree", lambda: add(batch, h)),
    (ValueError, "product: None", "agree", lambda: product(plane, batch)),
    # pushforward
    (TypeError, "pushforward: h", "a measure", lambda: pushforward(3, 2.0)),
    (TypeError, "pushforward: matrix", "a tensor", lambda: pushforward(h, [[1.0]])),
    (TypeError, "pushforward: shift", "a tensor", lambda: pushforward(h, 2.0, 1.0)),
    (
        TypeError,
        "pushforward: None",
        "share",
        lambda: pushforward(h, torch.eye(3).double()),
    ),
    (
        ValueError,
        "pushforward: matrix",
        "dimensions",
        lambda: pushforward(h, torch.ones(3, 2)),
    ),
    (
        ValueError,
        "pushforward: matrix",
        "dimensions",
        lambda: pushforward(batch, torch.eye(3)),
    ),
    (
        ValueError,
        "pushforward: matrix",
        "dimensions",
        lambda: pushforward(h, three),
    ),
    (
        ValueError,
        "pushforward: shift",
        "[*b, e=2]",
        lambda: pushforward(h, torch.ones(2, 3), three),
    ),
    (
        ValueError,
        "pushforward: None",
        "agree",
        lambda: pushforward(batch, torch.eye(3).expand(4, 3, 3)),
    ),
    (
        ValueError,
        "pushforward: matrix",
        "finite",
        lambda: pushforward(h, nan),
    ),
    (
        ValueError,
        "pushforward: shift",
        "finite",
        lambda: pushforward(h, 1.0, three * nan),
    ),
    # reweight
    (TypeError, "reweight: h", "a measure", lambda: reweight(3, one)),
    (TypeError, "reweight: log_mass", "a tensor", lambda: reweight(h, [1.0])),
    (ValueError, "reweight: None", "agree", lambda: reweight(h, torch.ones(1))),
    (
        ValueError,
        "reweight: log_mass",
        "finite",
        lambda: reweight(h, one * nan),
    ),
    # merge
    (TypeError, "merge: mean", "a tensor", lambda: merge(PartialStatistics(two, [two, two]))),
    (
        ValueError,
        "merge: mean",
        "log_normalizer",
        lambda: merge(PartialStatistics(torch.ones(2, 3), torch.ones(3, 4))),
    ),
    (
        ValueError,
        "merge: covariance",
        "log_normalizer",
        lambda: merge(PartialStatistics(two, torch.ones(2, 4), torch.ones(4, 4))),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
