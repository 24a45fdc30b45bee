"""Draws of the matched baseline: the windows of the corpus that each reads, and the values in it.

    windows      those with the smallest hashes of the corpus, at most MOST for each draw
    dealt        an equal share of the windows to each draw; several draws read a window if there are few

Read next: rotated_heads.py (the layers of a draw), ../run_probe.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..corpus.batching import Batch, joined
from ..prediction import Prediction
from ..runs.judgement import Measured
from ..statistics import token_hashes

MOST = 32  # windows that a draw of the matched baseline reads

ByPrediction = dict[str, tuple[list[Measured], ...]]  # {prediction: its values in each draw}


class Window(NamedTuple):
    """A row for the matched baseline, the hash that selects it, and the number of its batch, whose rows are alike."""

    hash: int
    batch: int
    row: Batch


class Draw(NamedTuple):
    """Values of each prediction in one draw.

    rescaled: those of random queries of equal logit variance, as differences to the model itself.
    """

    rotated: dict[str, list[Measured]]
    rescaled: dict[str, list[Measured]]


def with_windows(windows: list[Window], batch: Batch, draws: int) -> list[Window]:
    """Add the rows of a batch to the windows of the matched baseline; those with the smallest hashes are kept."""
    number = windows[-1].batch + 1 if windows else 0
    hashes = token_hashes(batch.keys, batch.starts.unsqueeze(-1)).squeeze(-1).tolist()
    return least(windows + [Window(value, number, batch.rows([row])) for row, value in enumerate(hashes)], draws)


def least(windows: list[Window], draws: int) -> list[Window]:
    """Return the windows with the smallest hashes, as many as the draws read."""
    most = sorted(window.hash for window in windows)[: MOST * draws][-1]
    return [window for window in windows if window.hash <= most]


def dealt(windows: list[Window], draws: int) -> Iterator[tuple[list[Batch], list[int]]]:
    """Yield batches with the numbers of the draws that read them.

    Each draw reads an equal share of the windows. If there are fewer windows than draws, several draws read a window.
    """
    ranked = sorted(windows, key=lambda window: window.hash)
    k = max(1, len(ranked) // draws)
    for first in range(0, min(draws * k, len(ranked)), k):
        rows: dict[int, list[Batch]] = {}
        for window in ranked[first : first + k]:
            rows.setdefault(window.batch, []).append(window.row)
        yield [joined(rows[number]) for number in sorted(rows)], list(range(first // k, draws, len(ranked)))


def by_prediction(draws: Iterable[Draw], predictions: Sequence[Prediction]) -> tuple[ByPrediction, ByPrediction]:
    """Return the values of each prediction in all draws, and those of random queries of equal logit variance."""
    every = list(draws)
    rotated = {p.name: tuple(draw.rotated[p.name] for draw in every) for p in predictions}
    return rotated, {p.name: tuple(draw.rescaled[p.name] for draw in every) for p in predictions if p.rescaled}
