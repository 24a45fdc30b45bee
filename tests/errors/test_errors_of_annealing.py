"""Particles say which sets, queries, schedules and schemes they cannot take."""

import torch

from gradlogz import Empirical, Gaussian
from gradlogz.measures import anneal, draw_particles, resample_ancestors
from support.error_form import each_of, refused

F64 = torch.float64
keys = Empirical(torch.eye(3, dtype=F64))
eta = torch.ones(3, dtype=F64)

ERRORS = [
    (ValueError, "draw_particles: count", "least", lambda: draw_particles(keys, 0)),
    (
        ValueError,
        "resample_ancestors: scheme",
        "multinomial",
        lambda: resample_ancestors(eta, scheme="residual"),
    ),
    (
        TypeError,
        "anneal: start",
        "Empirical",
        lambda: anneal(Gaussian(eta, torch.eye(3, dtype=F64)), eta),
    ),
    (
        TypeError,
        "anneal: start",
        "Empirical",
        lambda: anneal(Empirical(torch.eye(3, dtype=F64), torch.zeros(2, 3, dtype=F64)), eta),
    ),
    (ValueError, "anneal: eta", "shape (3,)", lambda: anneal(keys, eta.expand(2, 3))),
    (ValueError, "anneal: threshold", "in", lambda: anneal(keys, eta, threshold=2)),
    *(
        (
            ValueError,
            "anneal: schedule",
            f"{count} times",
            lambda schedule=schedule: anneal(keys, eta, schedule=schedule),
        )
        for schedule, count in ((0, 0), ([0.5, 0.4, 1.0], 3), ([0.0, 1.0], 2), ([0.5], 1))
    ),
    (
        ValueError,
        "anneal: move",
        "shape",
        lambda: anneal(keys, eta, move=lambda x, eta, generator: x[:2]),
    ),
]


@each_of(ERRORS)
def test_what_cannot_be_is_refused(refusal):
    refused(refusal)
