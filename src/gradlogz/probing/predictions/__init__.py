"""The claims of the theory about trained transformers, one file for each."""

from typing import cast

from ..prediction import Prediction
from . import ascent, entropy, expansion, gaussian_measure, identity, linearity, qk_geometry, symmetry, tie

PREDICTIONS = cast(
    tuple[Prediction, ...],
    (identity, ascent, tie, qk_geometry, symmetry, gaussian_measure, expansion, linearity, entropy),
)
