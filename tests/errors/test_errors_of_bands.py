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
        "Trajectory.band: name must be observed and of be \"mean\" or \"cloud\"; got 'entropy' and 'mean'.",
        lambda: trajectory(3).band("entropy"),
    ),
    (
        ValueError,
        "band_of_mean: level must be in (0, 1) and draws at least 2; got 0.95 and 1 draws.",
        lambda: trajectory().band("radius"),
    ),
    (
        ValueError,
        "band_of_draws: level must be in (0, 1) and draws at least 2 / (1 - level) - 1; got 0.95 and 8 draws.",
        lambda: trajectory(8).band("radius", of="cloud"),
    ),
    (
        ValueError,
        "band_of_draws: level must be in (0, 1) and draws at least 2 / (1 - level) - 1; got 1.0 and 199 draws.",
        lambda: null_band("radius", x, level=1.0),
    ),
    (
        ValueError,
        "bootstrap_clouds: cloud must be [n, d] and draws positive; got shape (2, 9, 3) and 5.",
        lambda: bootstrap_clouds(x.expand(2, 9, 3), 5),
    ),
    (ValueError, "null_band: name must be that of an observable; got 'energy'.", lambda: null_band("energy", x)),
    (
        ValueError,
        "null_band: cloud must be [*b, n, d] with n above 1; got shape (1, 3).",
        lambda: null_band("radius", x[:1]),
    ),
    (TypeError, "null_band: ascent must be given for entropy; got none.", lambda: null_band("entropy", x)),
    (
        ValueError,
        'mardia_band: name must be "skewness" or "kurtosis", level in (0, 1) and n above dim + 1; '
        "got 'kurtosis', 0.95, n=3 and dim=2.",
        lambda: mardia_band("kurtosis", 3, 2),
    ),
    (
        ValueError,
        "plateaus: counts and times must be [t], and times increase; got (3, 2) and (3,).",
        lambda: plateaus(torch.ones(3, 2).int(), torch.arange(3)),
    ),
    (
        ValueError,
        "plateaus: counts and times must be [t], and times increase; got (3,) and (3,).",
        lambda: plateaus(torch.ones(3).int(), torch.tensor([0, 2, 1])),
    ),
    (
        ValueError,
        "renyi_centers: cloud must be [*b, n, d] and radius >= 0; got shape (3,) and 1.0.",
        lambda: renyi_centers(x[0], radius=1.0),
    ),
    (
        ValueError,
        "escape_time: n, beta and variance must be positive; got 0, 1.0 and 1.0.",
        lambda: escape_time(0, beta=1.0, tau=1.0),
    ),
    (
        ValueError,
        "hermite_mode: cloud must be [*b, n, d] and order >= 1; got shape (9, 3) and 0.",
        lambda: hermite_mode(x, 0),
    ),
    (
        ValueError,
        "harmonic_mode: cloud must have two dimensions or more; got shape (9, 1).",
        lambda: harmonic_mode(x[:, :1], 1),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
