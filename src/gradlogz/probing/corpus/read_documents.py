"""The documents of a pass, by their keys: which were read, and how many tokens of each.

Read next: batching.py (batches and the report), ../measurement_merge.py (which joins those of two runs).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..._typing import Int, Tensor
from ..statistics.hashing import group_of
from .batching import Batch, Report


class ReadDocuments(NamedTuple):
    """Keys of the documents in ascending order, and the number of tokens read of each; rows and tokens of batches."""

    keys: Int[Tensor, " n"]
    tokens: Int[Tensor, " n"]
    rows: int
    padded: int

    def report(self, report: Report) -> Report:
        """Return a report with the counts of these documents."""
        tokens = self.tokens.tolist()
        squares = sum(n**2 for n in tokens)
        return report._replace(
            documents=len(self.keys),
            rows=self.rows,
            tokens=sum(tokens),
            padded=self.padded,
            groups=len(set(map(group_of, self.keys.tolist()))),
            effective=sum(tokens) ** 2 / squares if squares else float(len(self.keys)),
            fingerprint=sum(self.keys.tolist()) % 2**63,
        )


def documents_in(batch: Batch) -> ReadDocuments:
    """Return the documents of a batch; those of inputs other than text have no tokens."""
    mask, keys = batch.inputs.get("attention_mask"), batch.keys.cpu()
    tokens = torch.zeros_like(keys) if mask is None else mask.sum(-1).cpu()
    return _summed(keys, tokens, len(keys), 0 if mask is None else mask.numel())


def joined_documents(parts: Sequence[ReadDocuments]) -> ReadDocuments:
    """Return the documents of all parts; of a document in several, the tokens of all."""
    none = torch.empty(0, dtype=torch.int64)
    keys, tokens = (torch.cat([none, *(getattr(part, name) for part in parts)]) for name in ("keys", "tokens"))
    return _summed(keys, tokens, sum(part.rows for part in parts), sum(part.padded for part in parts))


def _summed(keys: Tensor, tokens: Tensor, rows: int, padded: int) -> ReadDocuments:
    distinct, places = keys.unique(return_inverse=True)
    return ReadDocuments(distinct, torch.zeros_like(distinct).index_add_(0, places, tokens), rows, padded)
