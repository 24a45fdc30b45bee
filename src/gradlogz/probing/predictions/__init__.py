"""The claims of the theory about trained transformers, one file for each."""

from typing import cast

from ..prediction import Prediction
from . import identity, tie

PREDICTIONS = cast(
    tuple[Prediction, ...],
    (identity, tie),
)
