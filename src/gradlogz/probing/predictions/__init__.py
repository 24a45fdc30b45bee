"""Predictions of the theory about trained transformers, one file for each.

Every file of this folder defines PREDICTION; adding a file adds a prediction. No other file names them.

Read next: ../prediction.py (the form of a file), entropy.py (the simplest).
"""

from importlib import import_module
from pkgutil import iter_modules

from ..prediction import Prediction


def known_predictions() -> tuple[Prediction, ...]:
    """Predictions of all files of this folder, in their declared order."""
    files = [info.name for info in iter_modules(__path__) if not info.ispkg]
    predictions: list[Prediction] = [import_module(f"{__name__}.{name}").PREDICTION for name in files]
    return tuple(sorted(predictions, key=lambda prediction: (prediction.order, prediction.name)))
