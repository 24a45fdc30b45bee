"""The claims of the theory about trained transformers, one file for each."""

from typing import cast

from ..prediction import Prediction
from . import (
    ascent,
    coherence,
    dropped_covariance,
    entropy,
    expansion,
    gaussian_measure,
    gaussianity,
    hopfield,
    identity,
    linearity,
    pair_energy,
    qk_geometry,
    symmetry,
    tie,
)

PREDICTIONS = cast(
    tuple[Prediction, ...],
    (
        identity,
        ascent,
        tie,
        qk_geometry,
        symmetry,
        gaussian_measure,
        expansion,
        gaussianity,
        linearity,
        entropy,
        pair_energy,
        dropped_covariance,
        coherence,
        hopfield,
    ),
)
