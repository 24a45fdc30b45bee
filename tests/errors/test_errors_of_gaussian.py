"""Gaussian says what is wrong with its mean and the parts of its covariance."""

import torch

from gradlogz import Gaussian
from support.error_form import each_of, refused

nan = torch.nan
loc, eye = torch.zeros(3), torch.eye(3)
batched = torch.zeros(2, 3)
beside = "beside loc of shape"

ERRORS = [
    (TypeError, "Gaussian: loc", "a tensor", lambda: Gaussian(0.0)),
    (TypeError, "Gaussian: loc", "a tensor", lambda: Gaussian(None, eye)),
    (TypeError, "Gaussian: loc", "float32", lambda: Gaussian(loc.long(), eye)),
    (TypeError, "Gaussian: covariance_matrix", "a tensor", lambda: Gaussian(loc, [[1.0]])),
    (
        TypeError,
        "Gaussian: cov_diag",
        "float32",
        lambda: Gaussian.diagonal(loc, loc.half()),
    ),
    (
        TypeError,
        "Gaussian: None",
        "share",
        lambda: Gaussian(loc, eye.double()),
    ),
    (
        ValueError,
        "Gaussian: None",
        "device",
        lambda: Gaussian.low_rank(loc, torch.zeros(3, 1, device="meta")),
    ),
    (ValueError, "Gaussian: loc", "[*b, d]", lambda: Gaussian(torch.zeros(()), eye)),
    (ValueError, "Gaussian: covariance_matrix", "missing", lambda: Gaussian(torch.zeros(3))),
    (
        ValueError,
        "Gaussian: covariance_matrix",
        "loc of shape",
        lambda: Gaussian(loc, torch.eye(2)),
    ),
    (
        ValueError,
        "Gaussian: covariance_matrix",
        "loc of shape",
        lambda: Gaussian(loc, torch.ones(3)),
    ),
    # Batches broadcast against size 1, never from the right.
    (
        ValueError,
        "Gaussian: covariance_matrix",
        "loc of shape",
        lambda: Gaussian(batched, eye),
    ),
    (
        ValueError,
        "Gaussian: cov_diag",
        "loc of shape",
        lambda: Gaussian.diagonal(batched, loc),
    ),
    (
        ValueError,
        "Gaussian: cov_factor",
        "loc of shape",
        lambda: Gaussian.low_rank(loc, torch.ones(2, 3)),
    ),
    (
        ValueError,
        "Gaussian: None",
        "agree",
        lambda: Gaussian(batched, eye.expand(4, 3, 3)),
    ),
    (
        ValueError,
        "Gaussian: loc",
        "finite",
        lambda: Gaussian(loc + nan, eye),
    ),
    (
        ValueError,
        "Gaussian: covariance_matrix",
        "finite",
        lambda: Gaussian(loc, eye + torch.inf),
    ),
    (
        ValueError,
        "Gaussian: cov_factor",
        "finite",
        lambda: Gaussian.low_rank(loc, torch.full((3, 1), nan)),
    ),
    (
        ValueError,
        "Gaussian: covariance_matrix",
        "symmetric",
        lambda: Gaussian(loc, torch.ones(3, 3).triu()),
    ),
    (
        ValueError,
        "Gaussian: covariance_matrix",
        "positive semidefinite",
        lambda: Gaussian(loc, torch.diag(torch.tensor([1.0, -2.0, 3.0]))),
    ),
    (
        ValueError,
        "Gaussian: cov_diag",
        "nonnegative",
        lambda: Gaussian.diagonal(loc, torch.tensor([1.0, -2.0, 0.0])),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)


def test_a_singular_covariance_and_one_indefinite_by_rounding_are_allowed():
    for covariance in (torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 0.5, -1e-7]))):
        assert torch.equal(Gaussian(loc, covariance).covariance(torch.zeros(3)), covariance)
