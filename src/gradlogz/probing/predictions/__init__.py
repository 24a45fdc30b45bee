"""The claims of the theory about trained transformers, one file for each.

Every file of this folder defines PREDICTION; adding a file adds a prediction. Nothing else names them.

Read next: ../prediction.py (what a file defines), entropy.py (the plainest).
"""

from importlib import import_module
from pkgutil import iter_modules

from ..prediction import Prediction


def known_predictions() -> tuple[Prediction, ...]:
    """The predictions of all files of this folder, in the order that they declare."""
    files = [info.name for info in iter_modules(__path__) if not info.ispkg]
    found: list[Prediction] = [import_module(f"{__name__}.{name}").PREDICTION for name in files]
    return tuple(sorted(found, key=lambda prediction: (prediction.order, prediction.name)))
