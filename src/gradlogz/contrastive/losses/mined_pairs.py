"""Pairs that a miner has chosen, as masks of positives and negatives.

    (a, p, a', n)     pairs: vector p is a positive of a, vector n a negative of a'
    (a, p, n)         triplets: both at once

These are the index tuples of pytorch-metric-learning's miners. Pairs that occur several times count once.
"""

import torch

from ..._errors import InputTypeError, InputValueError
from ..._typing import Bool, Int, Tensor
from ...kernels.losses.visible_pairs import VisiblePairs
from ..validation import check_indices, check_integers

Indices = Int[Tensor, " k"]
Others = Int[Tensor, " l"]
MinedPairs = tuple[Indices, Indices, Others, Others] | tuple[Indices, Indices, Indices]


def visible_pairs(call: str, labels: Int[Tensor, " m"], pairs: MinedPairs | None) -> tuple[VisiblePairs, VisiblePairs]:
    """Positives and negatives of every vector among the others: by label, or those of a miner."""
    if pairs is None:
        return VisiblePairs(itself=False, labels=(labels, labels)), VisiblePairs(labels=(labels, labels), same=False)
    if not isinstance(pairs, tuple | list) or len(pairs) not in (3, 4):
        got = f"{len(pairs)} tensors" if isinstance(pairs, tuple | list) else type(pairs).__name__
        problem = (
            f"pairs must be (anchors, positives, anchors, negatives) or (anchors, positives, negatives), got {got}"
        )
        raise InputTypeError(call, "pairs", problem, "Pass the tuple that a miner returns.")
    m, (first, positive, *rest) = labels.shape[0], pairs
    second, negative = rest if len(rest) == 2 else (first, *rest)
    masks = (_mask(call, labels, m, *side) for side in ((first, positive), (second, negative)))
    positives, negatives = (VisiblePairs(mask=mask) for mask in masks)
    return positives, negatives


def _mask(call: str, labels: Tensor, m: int, row: Indices, column: Indices) -> Bool[Tensor, "m m"]:
    for indices in (row, column):
        shape = tuple(indices.shape[:1]) if isinstance(indices, Tensor) else ()
        check_integers(call, "pairs", indices, shape, labels)
        check_indices(call, "pairs", indices, m, "vectors")
    if row.shape != column.shape:
        fact = f"{row.shape[0]} and {column.shape[0]}"
        problem = f"pairs must have as many anchors as positives or negatives, got {fact}"
        raise InputValueError(call, "pairs", problem, "Pass the tuple that a miner returns.")
    mask = torch.zeros(m, m, dtype=torch.bool, device=labels.device)
    mask[row.long(), column.long()] = True
    return mask
