"""The claims of the theory about trained transformers, one file for each."""

from typing import cast

from ..prediction import Prediction
from . import ascent, entropy, identity, linearity, tie

PREDICTIONS = cast(
    tuple[Prediction, ...],
    (identity, ascent, tie, linearity, entropy),
)
