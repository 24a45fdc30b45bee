"""Statistic says which families there are and what is wrong with a natural parameter."""

import torch

from gradlogz import Statistic
from support.error_form import each_of, refused

two = torch.tensor([1.0, -1.0])
known = "Statistic: family must be one of normal, gamma, beta, dirichlet, bernoulli; got"


def outside(family):
    return f"Statistic: natural must lie in the domain of the {family} family; got parameters outside it."


ERRORS = [
    (TypeError, "Statistic: natural must be a tensor; got list.", lambda: Statistic([0.0, -1.0], family="normal")),
    (
        TypeError,
        "Statistic: natural must be float32 or float64; got torch.int64.",
        lambda: Statistic(two.long(), family="normal"),
    ),
    (ValueError, f"{known} 'cauchy'.", lambda: Statistic(two, family="cauchy")),
    (ValueError, f"{known} None.", lambda: Statistic(two, family=None)),
    (
        ValueError,
        "Statistic: natural must be [*b, 2] for the normal family; got shape (3,).",
        lambda: Statistic(torch.ones(3), family="normal"),
    ),
    (
        ValueError,
        "Statistic: natural must be [*b, 1] for the bernoulli family; got shape (2,).",
        lambda: Statistic(two, family="bernoulli"),
    ),
    (
        ValueError,
        "Statistic: natural must be [*b, d] for the dirichlet family; got shape ().",
        lambda: Statistic(torch.ones(()), family="dirichlet"),
    ),
    (
        ValueError,
        "Statistic: natural must be finite; got 2 of 2 entries that are NaN or infinite.",
        lambda: Statistic(two * torch.nan, family="normal"),
    ),
    (ValueError, outside("normal"), lambda: Statistic(-two, family="normal")),
    (ValueError, outside("gamma"), lambda: Statistic(-two, family="gamma")),
    (ValueError, outside("beta"), lambda: Statistic(two, family="beta")),
    (ValueError, outside("dirichlet"), lambda: Statistic(two, family="dirichlet")),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
