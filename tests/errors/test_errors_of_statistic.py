"""Statistic says which families there are and what is wrong with a natural parameter."""

import torch

from gradlogz import Statistic
from support.error_form import each_of, refused

two = torch.tensor([1.0, -1.0])
known = "Statistic: family must be one of normal, gamma, beta, dirichlet, bernoulli; got"


def outside(family):
    return f"Statistic: natural must lie in the domain of the {family} family; got parameters outside it."


ERRORS = [
    (TypeError, "Statistic: natural", "a tensor", lambda: Statistic([0.0, -1.0], family="normal")),
    (
        TypeError,
        "Statistic: natural",
        "float32",
        lambda: Statistic(two.long(), family="normal"),
    ),
    (ValueError, "Statistic: family", "dirichlet", lambda: Statistic(two, family="cauchy")),
    (ValueError, "Statistic: family", "dirichlet", lambda: Statistic(two, family=None)),
    (
        ValueError,
        "Statistic: natural",
        "normal",
        lambda: Statistic(torch.ones(3), family="normal"),
    ),
    (
        ValueError,
        "Statistic: natural",
        "bernoulli",
        lambda: Statistic(two, family="bernoulli"),
    ),
    (
        ValueError,
        "Statistic: natural",
        "dirichlet",
        lambda: Statistic(torch.ones(()), family="dirichlet"),
    ),
    (
        ValueError,
        "Statistic: natural",
        "finite",
        lambda: Statistic(two * torch.nan, family="normal"),
    ),
    (ValueError, "Statistic: natural", "domain", lambda: Statistic(-two, family="normal")),
    (ValueError, "Statistic: natural", "domain", lambda: Statistic(-two, family="gamma")),
    (ValueError, "Statistic: natural", "domain", lambda: Statistic(two, family="beta")),
    (ValueError, "Statistic: natural", "dirichlet", lambda: Statistic(two, family="dirichlet")),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
