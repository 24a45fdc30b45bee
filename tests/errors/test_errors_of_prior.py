"""ConjugatePrior says which base families there are and what is wrong with xi, nu and an observation."""

import torch

from gradlogz import ConjugatePrior
from support.error_form import each_of, refused

xi, nu = torch.ones(2), torch.tensor(3.0)
known = "ConjugatePrior: base must be one of gaussian, poisson, exponential, bernoulli, categorical; got"


def improper(base):
    return f"ConjugatePrior: (xi, nu) must give a proper {base} prior; got one that has infinite mass."


def prior(base, xi=xi, nu=nu):
    return ConjugatePrior(xi, nu, base=base)


ERRORS = [
    (TypeError, "ConjugatePrior: xi", "a tensor", lambda: prior("gaussian", [1.0])),
    (TypeError, "ConjugatePrior: nu", "a tensor", lambda: prior("gaussian", nu=[3.0])),
    (
        TypeError,
        "ConjugatePrior: nu",
        "float32",
        lambda: prior("gaussian", nu=nu.long()),
    ),
    (
        TypeError,
        "ConjugatePrior: None",
        "share",
        lambda: prior("gaussian", nu=nu.double()),
    ),
    (ValueError, "ConjugatePrior: base", "exponential", lambda: prior("cauchy")),
    (
        ValueError,
        "ConjugatePrior: xi",
        "and",
        lambda: prior("gaussian", nu=xi),
    ),
    (
        ValueError,
        "ConjugatePrior: None",
        "agree",
        lambda: prior("gaussian", xi.expand(4, 2), nu.expand(3)),
    ),
    (
        ValueError,
        "ConjugatePrior: xi",
        "finite",
        lambda: prior("gaussian", xi * torch.inf),
    ),
    (
        ValueError,
        "ConjugatePrior: nu",
        "positive",
        lambda: prior("gaussian", nu=-nu),
    ),
    (ValueError, "ConjugatePrior: xi", "poisson", lambda: prior("poisson", -xi)),
    (ValueError, "ConjugatePrior: xi", "exponential", lambda: prior("exponential", 0 * xi)),
    (ValueError, "ConjugatePrior: xi", "bernoulli", lambda: prior("bernoulli", 4 * xi)),
    (ValueError, "ConjugatePrior: xi", "categorical", lambda: prior("categorical", 2 * xi)),
    # posterior
    (
        TypeError,
        "ConjugatePrior.posterior: statistic",
        "a tensor",
        lambda: prior("gaussian").posterior([1.0, 1.0]),
    ),
    (
        ValueError,
        "ConjugatePrior.posterior: statistic",
        "shape",
        lambda: prior("gaussian").posterior(torch.ones(1)),
    ),
    (
        ValueError,
        "ConjugatePrior.posterior: statistic",
        "shape",
        lambda: prior("gaussian", xi.expand(4, 2), nu.expand(4)).posterior(xi),
    ),
    (
        ValueError,
        "ConjugatePrior.posterior: count",
        "least",
        lambda: prior("gaussian").posterior(xi, -1),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
