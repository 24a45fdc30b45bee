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
    (TypeError, "ConjugatePrior: xi must be a tensor; got list.", lambda: prior("gaussian", [1.0])),
    (TypeError, "ConjugatePrior: nu must be a tensor; got list.", lambda: prior("gaussian", nu=[3.0])),
    (
        TypeError,
        "ConjugatePrior: nu must be float32 or float64; got torch.int64.",
        lambda: prior("gaussian", nu=nu.long()),
    ),
    (
        TypeError,
        "ConjugatePrior: tensors must share one dtype; got xi torch.float32, nu torch.float64.",
        lambda: prior("gaussian", nu=nu.double()),
    ),
    (ValueError, f"{known} 'cauchy'.", lambda: prior("cauchy")),
    (
        ValueError,
        "ConjugatePrior: xi must be [*b, d] and nu [*b]; got shapes (2,) and (2,).",
        lambda: prior("gaussian", nu=xi),
    ),
    (
        ValueError,
        "ConjugatePrior: batch dimensions must agree; got (4,) and (3,).",
        lambda: prior("gaussian", xi.expand(4, 2), nu.expand(3)),
    ),
    (
        ValueError,
        "ConjugatePrior: xi must be finite; got 2 of 2 entries that are NaN or infinite.",
        lambda: prior("gaussian", xi * torch.inf),
    ),
    (
        ValueError,
        "ConjugatePrior: nu must be positive; got 1 of 1 entries at or below 0.",
        lambda: prior("gaussian", nu=-nu),
    ),
    (ValueError, improper("poisson"), lambda: prior("poisson", -xi)),
    (ValueError, improper("exponential"), lambda: prior("exponential", 0 * xi)),
    (ValueError, improper("bernoulli"), lambda: prior("bernoulli", 4 * xi)),
    (ValueError, improper("categorical"), lambda: prior("categorical", 2 * xi)),
    # posterior
    (
        TypeError,
        "ConjugatePrior.posterior: statistic must be a tensor; got list.",
        lambda: prior("gaussian").posterior([1.0, 1.0]),
    ),
    (
        ValueError,
        "ConjugatePrior.posterior: statistic must have the shape of xi; got shapes (1,) and (2,).",
        lambda: prior("gaussian").posterior(torch.ones(1)),
    ),
    (
        ValueError,
        "ConjugatePrior.posterior: statistic must have the shape of xi; got shapes (2,) and (4, 2).",
        lambda: prior("gaussian", xi.expand(4, 2), nu.expand(4)).posterior(xi),
    ),
    (
        ValueError,
        "ConjugatePrior.posterior: count must be at least 0; got count=-1.",
        lambda: prior("gaussian").posterior(xi, -1),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
