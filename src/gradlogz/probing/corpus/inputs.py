"""Batches of whatever a model takes, as they are: each row a document of its own, divided into groups.

Read next: images.py (one kind of such inputs), batching.py (batches of text).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..._errors import InputValueError
from ..._typing import Tensor
from ..statistics.hashing import group_of, hash_of
from .batching import Batch, Report


class Inputs(Iterator[Batch]):
    """Batches of one group each, out of inputs of any; an iterator whose `report` says what was read so far.

    An entry is the keyword arguments of the model, tensors with the rows first, or a pair of names of rows and these.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        self._report = Report(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._groups: set[int] = set()
        self._pass = self._by_group(given)

    @property
    def report(self) -> Report:
        """What became of the inputs so far; tokens are not counted, since only the model knows them."""
        return self._report._replace(groups=len(self._groups))

    def __next__(self) -> Batch:
        return next(self._pass)

    def _by_group(self, given: Iterable[Any]) -> Iterator[Batch]:
        for number, entry in enumerate(given, start=1):
            names, inputs = entry if isinstance(entry, tuple) else (None, entry)
            whole = isinstance(inputs, Mapping) and inputs and all(isinstance(t, Tensor) for t in inputs.values())
            rows = {len(t) if t.ndim else 0 for t in inputs.values()} if whole else set()
            if len(rows) != 1 or 0 in rows or (names is not None and len(names) != max(rows)):
                fact = f"{type(inputs).__name__} at {number}" if not whole else f"rows {sorted(rows)} at {number}"
                remedy = "Pass dictionaries such as {'pixel_values': images}, or a tokenizer with texts."
                condition = "without a tokenizer every entry must hold tensors of equally many rows"
                raise InputValueError("probe", "source", f"{condition}, got {fact}", remedy)
            names = [f"row {number}.{i}" for i in range(rows.pop())] if names is None else list(names)
            keys = [hash_of(name) for name in names]
            groups: dict[int, list[int]] = {}
            for row, key in enumerate(keys):
                groups.setdefault(group_of(key), []).append(row)
            for group, of in sorted(groups.items()):
                self._groups.add(group)
                self._report = self._report._replace(
                    documents=self._report.documents + len(of), rows=self._report.rows + len(of)
                )
                cut = {name: t[of] for name, t in inputs.items()}
                starts = torch.zeros(len(of), dtype=torch.int64)
                yield Batch(cut, torch.tensor([keys[i] for i in of]), group, [names[i] for i in of], starts)
        if not self._report.rows:
            remedy = "Pass dictionaries such as {'pixel_values': images}."
            raise InputValueError("probe", "source", "without a tokenizer there must be inputs, got none", remedy)
