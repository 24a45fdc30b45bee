"""Wishart, svec and smat say what is wrong with degrees of freedom, matrices and vectors."""

import torch

from gradlogz import Wishart
from gradlogz.measures import smat, svec
from support.error_form import each_of, refused

df, V = torch.tensor(5.0), torch.eye(2)
shapes = "Wishart: covariance_matrix must be [*b, p, p] and df [*b]; got shapes"

ERRORS = [
    (TypeError, "Wishart: df", "a tensor", lambda: Wishart([5.0], V)),
    (TypeError, "Wishart: df", "float32", lambda: Wishart(df.long(), V)),
    (
        TypeError,
        "Wishart: None",
        "share",
        lambda: Wishart(df, V.double()),
    ),
    (ValueError, "Wishart: covariance_matrix", "and", lambda: Wishart(df, torch.ones(2, 3))),
    (ValueError, "Wishart: covariance_matrix", "and", lambda: Wishart(df.expand(4), V)),
    (
        ValueError,
        "Wishart: None",
        "agree",
        lambda: Wishart(df.expand(4), V.expand(3, 2, 2)),
    ),
    (
        ValueError,
        "Wishart: df",
        "finite",
        lambda: Wishart(df * torch.nan, V),
    ),
    (
        ValueError,
        "Wishart: covariance_matrix",
        "symmetric",
        lambda: Wishart(df, torch.ones(2, 2).triu()),
    ),
    (
        ValueError,
        "Wishart: covariance_matrix",
        "positive semidefinite",
        lambda: Wishart(df, -V),
    ),
    (ValueError, "Wishart: covariance_matrix", "regular", lambda: Wishart(df, 0 * V)),
    (ValueError, "Wishart: df", "exceed p-1=1", lambda: Wishart(df / 10, V)),
    (TypeError, "svec: matrix", "a tensor", lambda: svec([[1.0]])),
    (ValueError, "svec: matrix", "[*b,", lambda: svec(torch.ones(4, 3))),
    (ValueError, "svec: matrix", "[*b,", lambda: svec(torch.ones(3))),
    (TypeError, "smat: vector", "a tensor", lambda: smat([1.0])),
    (
        ValueError,
        "smat: vector",
        "entries",
        lambda: smat(torch.ones(2, 4)),
    ),
    (ValueError, "smat: vector", "entries", lambda: smat(torch.ones(()))),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
