"""Gibbs says which pairs of measures have no joint law, or none that it can write down."""

import torch

from gradlogz import Empirical, Gaussian
from gradlogz.measures import Gibbs
from support.error_form import each_of, refused

two, three = torch.eye(2, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
unit = Gaussian(torch.zeros(2, dtype=torch.float64), two)

ERRORS = [
    (
        TypeError,
        "Gibbs: h",
        "measure",
        lambda: Gibbs(two, Empirical(two)),
    ),
    *(
        (ValueError, f"Gibbs.{name}: steps", "least 1", run)
        for name, run in (
            ("chain", lambda: Gibbs(Empirical(two), Empirical(two)).chain(two, 0)),
            ("mean_field", lambda: Gibbs(Empirical(two), Empirical(two)).mean_field(two, steps=0)),
        )
    ),
    (
        ValueError,
        "Gibbs: h",
        "batch",
        lambda: Gibbs(Empirical(two, torch.zeros(3, 2, dtype=torch.float64)), Empirical(two)).transition(),
    ),
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
