"""Rows of the corpus that the random-weights baseline reads, independent of how rows are packed into batches.

    chosen     hash of the row < share      and in a group without such a row the one with the smallest hash

Read next: ../run_probe.py (the pass over all batches), ../statistics/hashing.py (the hashes).
"""

from ..corpus.batching import Batch
from ..statistics import token_hashes


class BaselineRows:
    """Rows chosen by hash from the batches of a pass: a share of all, and at least one of each group."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._chosen: list[Batch] = []
        self._least: dict[int, tuple[int, Batch]] = {}  # smallest hash of each group, with its row

    def add(self, batch: Batch) -> None:
        """Choose rows of a batch."""
        if self._share <= 0:
            return
        hashes = token_hashes(batch.keys, batch.starts.unsqueeze(-1)).squeeze(-1)
        least, place = min((value, row) for row, value in enumerate(hashes.tolist()))
        if batch.group not in self._least or least < self._least[batch.group][0]:
            self._least[batch.group] = (least, batch.rows([place]))
        rows = (hashes.double() < self._share * 2.0**63).nonzero().squeeze(-1).tolist()
        if rows:
            self._chosen.append(batch.rows(rows))

    def batches(self) -> list[Batch]:
        """Return the chosen rows, each group at least once."""
        present = {batch.group for batch in self._chosen}
        return self._chosen + [row for group, (_, row) in sorted(self._least.items()) if group not in present]
