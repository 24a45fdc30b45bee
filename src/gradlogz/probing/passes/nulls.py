"""Options of the null models: the random-weights baseline, and the draws of the matched baseline.

Read next: baseline_rows.py, matched_draws.py (what they read).
"""

from collections.abc import Sequence

from ..._errors import InputValueError
from ..prediction import Prediction


def check_nulls(baseline: float, draws: int) -> None:
    """Raise unless the share of the baseline and the number of matched draws are possible."""
    if not 0.0 <= baseline <= 1.0:
        problem = f"baseline must be a share of the windows between 0 and 1, got {baseline}"
        raise InputValueError("probe", "baseline", problem, "Pass 0.1 for a tenth.")
    if draws < 0 or draws == 1:
        problem = f"draws must be 0 or at least 2, got {draws}"
        raise InputValueError("probe", "draws", problem, "Pass 20; their variance gives the band.")


def matched_of(predictions: Sequence[Prediction], *, draws: int, baseline: float) -> list[Prediction]:
    """Return the predictions that matched draws measure; none without draws or without random models."""
    return [p for p in predictions if p.baseline == "matched" and draws and baseline]


def untrained_of(predictions: Sequence[Prediction], *, baseline: float) -> list[Prediction]:
    """Return the predictions that an untrained model measures; none of those of this package."""
    return [p for p in predictions if p.baseline == "statistics" and baseline]


def baseline_name(model: str) -> str:
    """Return the name of the random-weights baseline of a model."""
    return f"{model} with random weights"
