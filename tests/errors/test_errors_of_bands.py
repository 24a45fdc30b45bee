"""Bands, nulls, plateaus and modes of clouds say what is wrong with a name, a level, or a number of draws."""

import torch

from gradlogz import Ascent, evolve
from gradlogz.dynamics import (
    bootstrap_clouds,
    escape_time,
    harmonic_mode,
    hermite_mode,
    mardia_band,
    null_band,
    plateaus,
    renyi_centers,
)
from support.error_form import each_of, refused

F64 = torch.float64
x = torch.randn(9, 3, dtype=F64)


def trajectory(*batch):
    return evolve(torch.randn(*batch, 9, 3, dtype=F64), Ascent(), steps=1, observe=["radius"])


ERRORS = [
    (
        ValueError,
        "Trajectory.band: name",
        "recorded",
        lambda: trajectory(3).band("entropy"),
    ),
    (
        ValueError,
        "band_of_mean: level",
        "draws",
        lambda: trajectory().band("radius"),
    ),
    (
        ValueError,
        "band_of_draws: level",
        "draws",
        lambda: trajectory(8).band("radius", of="cloud"),
    ),
    (
        ValueError,
        "band_of_draws: level",
        "draws",
        lambda: null_band("radius", x, level=1.0),
    ),
    (
        ValueError,
        "bootstrap_clouds: cloud",
        "positive",
        lambda: bootstrap_clouds(x.expand(2, 9, 3), 5),
    ),
    (ValueError, "null_band: name", "observable", lambda: null_band("energy", x)),
    (
        ValueError,
        "null_band: cloud",
        "n >= 2",
        lambda: null_band("radius", x[:1]),
    ),
    (TypeError, "null_band: ascent", "entropy", lambda: null_band("entropy", x)),
    (
        ValueError,
        "mardia_band: name",
        "skewness",
        lambda: mardia_band("kurtosis", 3, 2),
    ),
    (
        ValueError,
        "plateaus: counts",
        "increase",
        lambda: plateaus(torch.ones(3, 2).int(), torch.arange(3)),
    ),
    (
        ValueError,
        "plateaus: counts",
        "increase",
        lambda: plateaus(torch.ones(3).int(), torch.tensor([0, 2, 1])),
    ),
    (
        ValueError,
        "renyi_centers: cloud",
        "radius",
        lambda: renyi_centers(x[0], radius=1.0),
    ),
    (
        ValueError,
        "escape_time: n",
        "positive",
        lambda: escape_time(0, beta=1.0, tau=1.0),
    ),
    (
        ValueError,
        "hermite_mode: cloud",
        "order",
        lambda: hermite_mode(x, 0),
    ),
    (
        ValueError,
        "harmonic_mode: cloud",
        "dimensions",
        lambda: harmonic_mode(x[:, :1], 1),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
