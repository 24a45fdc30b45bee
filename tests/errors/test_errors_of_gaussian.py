"""Gaussian says what is wrong with its mean and the parts of its covariance."""

import torch

from gradlogz import Gaussian
from support.error_form import each_of, refused

nan = torch.nan
loc, eye = torch.zeros(3), torch.eye(3)
batched = torch.zeros(2, 3)
beside = "beside loc of shape"

ERRORS = [
    (TypeError, "Gaussian: loc must be a tensor; got float.", lambda: Gaussian(0.0)),
    (TypeError, "Gaussian: loc must be a tensor; got NoneType.", lambda: Gaussian(None, eye)),
    (TypeError, "Gaussian: loc must be float32 or float64; got torch.int64.", lambda: Gaussian(loc.long(), eye)),
    (TypeError, "Gaussian: covariance_matrix must be a tensor; got list.", lambda: Gaussian(loc, [[1.0]])),
    (
        TypeError,
        "Gaussian: cov_diag must be float32 or float64; got torch.float16.",
        lambda: Gaussian.diagonal(loc, loc.half()),
    ),
    (
        TypeError,
        "Gaussian: tensors must share one dtype; got loc torch.float32, covariance_matrix torch.float64.",
        lambda: Gaussian(loc, eye.double()),
    ),
    (
        ValueError,
        "Gaussian: tensors must be on one device; got loc on cpu, cov_factor on meta.",
        lambda: Gaussian.low_rank(loc, torch.zeros(3, 1, device="meta")),
    ),
    (ValueError, "Gaussian: loc must be [*b, d]; got shape ().", lambda: Gaussian(torch.zeros(()), eye)),
    (ValueError, "Gaussian: some part of the covariance must be given; got none.", lambda: Gaussian(torch.zeros(3))),
    (
        ValueError,
        f"Gaussian: covariance_matrix must be [*b, 3, 3] {beside} (3,); got shape (2, 2).",
        lambda: Gaussian(loc, torch.eye(2)),
    ),
    (
        ValueError,
        f"Gaussian: covariance_matrix must be [*b, 3, 3] {beside} (3,); got shape (3,).",
        lambda: Gaussian(loc, torch.ones(3)),
    ),
    # Batches broadcast against size 1, never from the right.
    (
        ValueError,
        f"Gaussian: covariance_matrix must be [*b, 3, 3] {beside} (2, 3); got shape (3, 3).",
        lambda: Gaussian(batched, eye),
    ),
    (
        ValueError,
        f"Gaussian: cov_diag must be [*b, 3] {beside} (2, 3); got shape (3,).",
        lambda: Gaussian.diagonal(batched, loc),
    ),
    (
        ValueError,
        f"Gaussian: cov_factor must be [*b, 3, r] {beside} (3,); got shape (2, 3).",
        lambda: Gaussian.low_rank(loc, torch.ones(2, 3)),
    ),
    (
        ValueError,
        "Gaussian: batch dimensions must agree; got (2,) and (4,).",
        lambda: Gaussian(batched, eye.expand(4, 3, 3)),
    ),
    (
        ValueError,
        "Gaussian: loc must be finite; got 3 of 3 entries that are NaN or infinite.",
        lambda: Gaussian(loc + nan, eye),
    ),
    (
        ValueError,
        "Gaussian: covariance_matrix must be finite; got 9 of 9 entries that are NaN or infinite.",
        lambda: Gaussian(loc, eye + torch.inf),
    ),
    (
        ValueError,
        "Gaussian: cov_factor must be finite; got 3 of 3 entries that are NaN or infinite.",
        lambda: Gaussian.low_rank(loc, torch.full((3, 1), nan)),
    ),
    (
        ValueError,
        "Gaussian: covariance_matrix must be symmetric; got an asymmetry of 1.",
        lambda: Gaussian(loc, torch.ones(3, 3).triu()),
    ),
    (
        ValueError,
        "Gaussian: covariance_matrix must be positive semidefinite; got a smallest eigenvalue of -2.",
        lambda: Gaussian(loc, torch.diag(torch.tensor([1.0, -2.0, 3.0]))),
    ),
    (
        ValueError,
        "Gaussian: cov_diag must be nonnegative; got 1 of 3 entries below 0.",
        lambda: Gaussian.diagonal(loc, torch.tensor([1.0, -2.0, 0.0])),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)


def test_a_singular_covariance_and_one_indefinite_by_rounding_are_allowed():
    for covariance in (torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 0.5, -1e-7]))):
        assert torch.equal(Gaussian(loc, covariance).covariance(torch.zeros(3)), covariance)
