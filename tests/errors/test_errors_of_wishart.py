"""Wishart, svec and smat say what is wrong with degrees of freedom, matrices and vectors."""

import torch

from gradlogz import Wishart
from gradlogz.measures import smat, svec
from support.error_form import each_of, refused

df, V = torch.tensor(5.0), torch.eye(2)
shapes = "Wishart: covariance_matrix must be [*b, p, p] and df [*b]; got shapes"

ERRORS = [
    (TypeError, "Wishart: df must be a tensor; got list.", lambda: Wishart([5.0], V)),
    (TypeError, "Wishart: df must be float32 or float64; got torch.int64.", lambda: Wishart(df.long(), V)),
    (
        TypeError,
        "Wishart: tensors must share one dtype; got df torch.float32, covariance_matrix torch.float64.",
        lambda: Wishart(df, V.double()),
    ),
    (ValueError, f"{shapes} (2, 3) and ().", lambda: Wishart(df, torch.ones(2, 3))),
    (ValueError, f"{shapes} (2, 2) and (4,).", lambda: Wishart(df.expand(4), V)),
    (
        ValueError,
        "Wishart: batch dimensions must agree; got (4,) and (3,).",
        lambda: Wishart(df.expand(4), V.expand(3, 2, 2)),
    ),
    (
        ValueError,
        "Wishart: df must be finite; got 1 of 1 entries that are NaN or infinite.",
        lambda: Wishart(df * torch.nan, V),
    ),
    (
        ValueError,
        "Wishart: covariance_matrix must be symmetric; got an asymmetry of 1.",
        lambda: Wishart(df, torch.ones(2, 2).triu()),
    ),
    (
        ValueError,
        "Wishart: covariance_matrix must be positive semidefinite; got a smallest eigenvalue of -1.",
        lambda: Wishart(df, -V),
    ),
    (ValueError, "Wishart: covariance_matrix must be regular; got a singular one.", lambda: Wishart(df, 0 * V)),
    (ValueError, "Wishart: df must exceed p-1=1; got a smallest df of 0.5.", lambda: Wishart(df / 10, V)),
    (TypeError, "svec: matrix must be a tensor; got list.", lambda: svec([[1.0]])),
    (ValueError, "svec: matrix must be [*b, p, p]; got shape (4, 3).", lambda: svec(torch.ones(4, 3))),
    (ValueError, "svec: matrix must be [*b, p, p]; got shape (3,).", lambda: svec(torch.ones(3))),
    (TypeError, "smat: vector must be a tensor; got list.", lambda: smat([1.0])),
    (
        ValueError,
        "smat: vector must have p(p+1)/2 entries for some p; got shape (2, 4).",
        lambda: smat(torch.ones(2, 4)),
    ),
    (ValueError, "smat: vector must have p(p+1)/2 entries for some p; got shape ().", lambda: smat(torch.ones(()))),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
