"""from_distribution and to_distribution say which laws they know."""

import torch
from torch import distributions as D

from gradlogz import Empirical, Gamma, Sphere
from gradlogz.measures import from_distribution, to_distribution
from support.error_form import each_of, refused

known = "p must be a Normal, Exponential, Gamma, Beta, Dirichlet, Bernoulli, Categorical or Poisson; got"
gamma, three = Gamma(torch.ones(1), torch.ones(1)), torch.zeros(3)
law = "to_distribution: the measure must be one whose tilted law torch has; got"

ERRORS = [
    (TypeError, "from_distribution: p", "Exponential", lambda: from_distribution(D.Cauchy(0.0, 1.0))),
    (TypeError, "from_distribution: p", "Exponential", lambda: from_distribution(D.Chi2(torch.ones(())))),
    (TypeError, "from_distribution: p", "Exponential", lambda: from_distribution(D.Laplace(0.0, 1.0))),
    (TypeError, "from_distribution: p", "Exponential", lambda: from_distribution(3)),
    (
        TypeError,
        "to_distribution: h",
        "a measure",
        lambda: to_distribution(D.Normal(0.0, 1.0), three),
    ),
    (TypeError, "to_distribution: measure", "tilted", lambda: to_distribution(Sphere(3), three)),
    (TypeError, "to_distribution: measure", "tilted", lambda: to_distribution(Empirical(torch.ones(2, 3)), three)),
    (TypeError, "to_distribution: eta", "a tensor", lambda: to_distribution(gamma, 0.5)),
    (
        ValueError,
        "to_distribution: eta",
        "dimension",
        lambda: to_distribution(gamma, three),
    ),
    (
        ValueError,
        "to_distribution: eta",
        "measure",
        lambda: to_distribution(gamma, torch.tensor([2.0])),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
