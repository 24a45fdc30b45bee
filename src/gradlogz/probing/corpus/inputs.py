"""Batches of ready-made model inputs: each row is one document, and rows are divided into groups.

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
    """Iterator over batches of one group each, made from model inputs; `report` counts what has been read.

    An entry is a dictionary of keyword arguments of the model, tensors [rows, ...], or a pair (names of the rows, such
    a dictionary).
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        self._report = Report(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)
        self._groups: set[int] = set()
        self._pass = self._by_group(entries)

    @property
    def report(self) -> Report:
        """Counts of the inputs read so far; tokens are not counted, since only the model determines their number."""
        return self._report._replace(groups=len(self._groups), effective=float(self._report.documents))

    def __next__(self) -> Batch:
        return next(self._pass)

    def _by_group(self, entries: Iterable[Any]) -> Iterator[Batch]:
        for number, entry in enumerate(entries, start=1):
            names, inputs = entry if isinstance(entry, tuple) else (None, entry)
            tensors = isinstance(inputs, Mapping) and inputs and all(isinstance(t, Tensor) for t in inputs.values())
            rows = {len(t) if t.ndim else 0 for t in inputs.values()} if tensors else set()
            if len(rows) != 1 or 0 in rows or (names is not None and len(names) != max(rows)):
                fact = f"has tensors of {sorted(rows)} rows" if tensors else f"is {type(inputs).__name__}"
                problem = (
                    "without a tokenizer every entry must be a dictionary of tensors with equal numbers of rows, "
                    f"but entry {number} {fact}"
                )
                remedy = "Pass dictionaries such as {'pixel_values': images}, or a tokenizer with texts."
                raise InputValueError("probe", "texts", problem, remedy)
            names = [f"row {number}.{i}" for i in range(rows.pop())] if names is None else list(names)
            keys = [hash_of(name) for name in names]
            groups: dict[int, list[int]] = {}
            for row, key in enumerate(keys):
                groups.setdefault(group_of(key), []).append(row)
            for group, at in sorted(groups.items()):
                self._groups.add(group)
                self._report = self._report._replace(
                    documents=self._report.documents + len(at),
                    rows=self._report.rows + len(at),
                    fingerprint=(self._report.fingerprint + sum(keys[i] for i in at)) % 2**63,
                )
                part = {name: t[at] for name, t in inputs.items()}
                starts = torch.zeros(len(at), dtype=torch.int64)
                yield Batch(part, torch.tensor([keys[i] for i in at]), group, [names[i] for i in at], starts)
        if not self._report.rows:
            remedy = "Pass dictionaries such as {'pixel_values': images}."
            raise InputValueError("probe", "texts", "there are no inputs", remedy)
