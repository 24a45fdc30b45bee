"""Rows of the corpus that the random-weights baseline reads, independent of how rows are packed into batches.

    chosen     hash of the row < share      and in a group without such a row the one with the smallest hash

Read next: ../run_probe.py (the pass over all batches), ../statistics/hashing.py (the hashes).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..corpus.batching import Batch
from ..statistics import merge, token_hashes


class LeastRow(NamedTuple):
    """The row with the smallest hash of a group that has no chosen row."""

    hash: int
    row: Batch


class BaselineRows:
    """Rows chosen by hash from the batches of a pass: a share of all, and at least one of each group."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._least: dict[int, LeastRow] = {}
        self._groups: set[int] = set()

    def add(self, batch: Batch) -> Batch | None:
        """Return the chosen rows of a batch, None if there are none."""
        if self._share <= 0:
            return None
        hashes = token_hashes(batch.keys, batch.starts.unsqueeze(-1)).squeeze(-1)
        least, place = min((value, row) for row, value in enumerate(hashes.tolist()))
        if batch.group not in self._least or least < self._least[batch.group].hash:
            self._least[batch.group] = LeastRow(least, batch.rows([place]))
        rows = (hashes.double() < self._share * 2.0**63).nonzero().squeeze(-1).tolist()
        if not rows:
            return None
        self._groups.add(batch.group)
        return batch.rows(rows)

    def least(self) -> dict[int, LeastRow]:
        """Return the rows of the groups that have no chosen row."""
        return {group: row for group, row in sorted(self._least.items()) if group not in self._groups}


class LeastState(NamedTuple):
    """Statistics of the row with the smallest hash of a group."""

    hash: int
    state: dict[str, Any]


class BaselineState(NamedTuple):
    """Statistics of the random-weights baseline, such that those of two texts are joined exactly.

    chosen: statistics of the chosen rows, which are of these groups. least: those of one row of each other group.
    """

    chosen: dict[str, Any]
    groups: frozenset[int]
    least: dict[int, LeastState]

    @property
    def state(self) -> dict[str, Any]:
        """{prediction: its state} over all rows."""
        state = self.chosen
        for _, least in sorted(self.least.items()):
            state = merge(state, least.state)
        return state

    def merge(self, other: "BaselineState") -> "BaselineState":
        """Return the statistics over the rows that are chosen from both texts."""
        groups = self.groups | other.groups
        return BaselineState(merge(self.chosen, other.chosen), groups, _least(self.least, other.least, groups))


def _least(
    one: Mapping[int, LeastState], other: Mapping[int, LeastState], groups: frozenset[int]
) -> dict[int, LeastState]:
    both = {
        group: min((each[group] for each in (one, other) if group in each), key=lambda row: row.hash)
        for group in sorted({**one, **other})
    }
    return {group: row for group, row in both.items() if group not in groups}
