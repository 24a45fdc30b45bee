"""The claims of the theory about trained transformers, one file for each."""

from typing import cast

from ..prediction import Prediction
from . import ascent, entropy, gaussian_measure, gaussianity, identity, linearity, qk_geometry, symmetry, tie

PREDICTIONS = cast(
    tuple[Prediction, ...],
    (identity, ascent, tie, qk_geometry, symmetry, gaussian_measure, gaussianity, linearity, entropy),
)
