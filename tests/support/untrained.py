"""A prediction that measures the random-weights baseline, which none of the package does."""

from gradlogz.probing.prediction import Prediction
from gradlogz.probing.predictions import entropy


def _nothing(*_):
    return []


def _verdict(_):
    return entropy.verdict([])


PREDICTION = Prediction(
    __name__, entropy.DECLARATION, entropy.statistics, _nothing, _nothing, _verdict, baseline="statistics"
)
