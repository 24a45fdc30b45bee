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
    (TypeError, "tilt: h must be a measure; got int.", lambda: tilt(3, three)),
    (TypeError, "tilt: by must be a tensor; got list.", lambda: tilt(h, [1.0, 1.0, 1.0])),
    (
        TypeError,
        "tilt: tensors must share one dtype; got by torch.float64, measure torch.float32.",
        lambda: tilt(h, three.double()),
    ),
    (ValueError, "tilt: tensors must be on one device; got by on meta, measure on cpu.", lambda: tilt(h, meta)),
    (ValueError, "tilt: by must be [*b, d=3] with the 0 batch dimensions of h; got shape (2,).", lambda: tilt(h, two)),
    (
        ValueError,
        "tilt: by must be [*b, d=3] with the 1 batch dimensions of h; got shape (3,).",
        lambda: tilt(batch, three),
    ),
    (
        ValueError,
        "tilt: batch dimensions must agree; got (2,) and (4,).",
        lambda: tilt(batch, three.expand(4, 3)),
    ),
    (
        ValueError,
        "tilt: by must be finite; got 3 of 3 entries that are NaN or infinite.",
        lambda: tilt(h, three * nan),
    ),
    (
        ValueError,
        "tilt: by must lie in the domain of the measure, where Z is finite; got 1 of 1 rows outside.",
        lambda: tilt(gamma, torch.tensor([2.0])),
    ),
    # convolve, add, product
    (ValueError, "convolve: at least one measure must be given; got none.", lambda: convolve()),
    (ValueError, "add: at least one measure must be given; got none.", lambda: add()),
    (ValueError, "product: at least one measure must be given; got none.", lambda: product()),
    (TypeError, "convolve: measure 1 must be a measure; got int.", lambda: convolve(h, 3)),
    (TypeError, "add: measure 0 must be a measure; got list.", lambda: add([h, h])),
    (
        TypeError,
        "convolve: tensors must share one dtype; got measure 0 torch.float32, measure 1 torch.float64.",
        lambda: convolve(h, double),
    ),
    (
        ValueError,
        "add: tensors must be on one device; got measure 0 on cpu, measure 1 on meta.",
        lambda: add(h, Gaussian.diagonal(meta, meta)),
    ),
    (ValueError, "convolve: measures must live on one space; got d=3, d=2.", lambda: convolve(h, plane)),
    (ValueError, "add: measures must live on one space; got d=3, d=2.", lambda: add(h, plane)),
    (ValueError, "convolve: batch dimensions must agree; got () and (2,).", lambda: convolve(h, batch)),
    (ValueError, "add: batch dimensions must agree; got (2,) and ().", lambda: add(batch, h)),
    (ValueError, "product: batch dimensions must agree; got () and (2,).", lambda: product(plane, batch)),
    # pushforward
    (TypeError, "pushforward: h must be a measure; got int.", lambda: pushforward(3, 2.0)),
    (TypeError, "pushforward: matrix must be a tensor; got list.", lambda: pushforward(h, [[1.0]])),
    (TypeError, "pushforward: shift must be a tensor; got float.", lambda: pushforward(h, 2.0, 1.0)),
    (
        TypeError,
        "pushforward: tensors must share one dtype; got matrix torch.float64, measure torch.float32.",
        lambda: pushforward(h, torch.eye(3).double()),
    ),
    (
        ValueError,
        "pushforward: matrix must be [*b, e, d=3] with the 0 batch dimensions of h; got shape (3, 2).",
        lambda: pushforward(h, torch.ones(3, 2)),
    ),
    (
        ValueError,
        "pushforward: matrix must be [*b, e, d=3] with the 1 batch dimensions of h; got shape (3, 3).",
        lambda: pushforward(batch, torch.eye(3)),
    ),
    (
        ValueError,
        "pushforward: matrix must be [*b, e, d=3] with the 0 batch dimensions of h; got shape (3,).",
        lambda: pushforward(h, three),
    ),
    (
        ValueError,
        "pushforward: shift must be [*b, e=2]; got shape (3,).",
        lambda: pushforward(h, torch.ones(2, 3), three),
    ),
    (
        ValueError,
        "pushforward: batch dimensions must agree; got (2,) and (4,).",
        lambda: pushforward(batch, torch.eye(3).expand(4, 3, 3)),
    ),
    (
        ValueError,
        "pushforward: matrix must be finite; got 9 of 9 entries that are NaN or infinite.",
        lambda: pushforward(h, nan),
    ),
    (
        ValueError,
        "pushforward: shift must be finite; got 3 of 3 entries that are NaN or infinite.",
        lambda: pushforward(h, 1.0, three * nan),
    ),
    # reweight
    (TypeError, "reweight: h must be a measure; got int.", lambda: reweight(3, one)),
    (TypeError, "reweight: log_mass must be a tensor; got list.", lambda: reweight(h, [1.0])),
    (ValueError, "reweight: batch dimensions must agree; got () and (1,).", lambda: reweight(h, torch.ones(1))),
    (
        ValueError,
        "reweight: log_mass must be finite; got 1 of 1 entries that are NaN or infinite.",
        lambda: reweight(h, one * nan),
    ),
    # merge
    (TypeError, "merge: mean must be a tensor; got list.", lambda: merge(PartialStatistics(two, [two, two]))),
    (
        ValueError,
        "merge: mean must be [*b, k, d] beside log_normalizer of shape (2, 3); got shape (3, 4).",
        lambda: merge(PartialStatistics(torch.ones(2, 3), torch.ones(3, 4))),
    ),
    (
        ValueError,
        "merge: covariance must be [*b, k, d, d] beside log_normalizer of shape (2,); got shape (4, 4).",
        lambda: merge(PartialStatistics(two, torch.ones(2, 4), torch.ones(4, 4))),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
