"""Gibbs says which pairs of measures have no joint law, or none that it can write down."""

import torch

from gradlogz import Empirical, Gaussian
from gradlogz.measures import Gibbs
from support.error_form import each_of, refused

two, three = torch.eye(2, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
unit = Gaussian(torch.zeros(2, dtype=torch.float64), two)

ERRORS = [
    (
        ValueError,
        "Gibbs: h",
        "equal dimensions",
        lambda: Gibbs(Empirical(two), Empirical(three)),
    ),
    (
        ValueError,
        "Gibbs: h",
        "Sigma",
        lambda: Gibbs(unit, unit),
    ),
    (
        TypeError,
        "Gibbs: h",
        "Empirical",
        lambda: Gibbs(unit, Empirical(two)).stationary(),
    ),
    (
        ValueError,
        "Gibbs: h",
        "batch",
        lambda: Gibbs(Empirical(two.expand(4, 2, 2)), Empirical(two)).transition(),
    ),
]


@each_of(ERRORS)
def test_what_has_no_joint_law_is_refused(refusal):
    refused(refusal)
