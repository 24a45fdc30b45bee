"""The keys that enter the sum of each query: all, or those that labels, masks and excluded keys leave.

Read next: pairwise_log_sum_exp.py and softmax_losses.py, sums over these pairs.
"""

from typing import Any, NamedTuple

import torch

from ..._typing import Bool, Int, Tensor


class VisiblePairs(NamedTuple):
    """The keys that enter the sum of each query; by default all.

    Attributes:
        itself: True if key i enters the sum of query i.
        labels: labels of the queries and of the keys.
        same: True to sum over keys with the label of the query, False over keys with other labels.
        included: index of a key for each query that enters regardless of its label and of the mask.
        excluded: index of a key for each query that never enters.
        mask: True where key j enters the sum of query i.
    """

    itself: bool = True
    labels: tuple[Int[Tensor, " m"], Int[Tensor, " n"]] | None = None
    same: bool = True
    included: Int[Tensor, " m"] | None = None
    excluded: Int[Tensor, " m"] | None = None
    mask: Bool[Tensor, "m n"] | None = None

    @property
    def plain(self) -> bool:
        """True if no pairs have to be compared one by one."""
        return self.labels is None and self.mask is None and self.excluded is None

    def hidden(self, rows: Any, m: int, keys: slice, n: int, device: torch.device) -> Bool[Tensor, "r k"] | None:
        """Mask of the pairs of some queries (a slice or indices) and keys that do not enter; None if all do."""
        if self.plain and self.itself:
            return None
        key = torch.arange(n, device=device)[keys]
        hidden = None
        if self.labels is not None:
            query_labels, key_labels = self.labels[0][rows].unsqueeze(-1), self.labels[1][keys]
            hidden = query_labels != key_labels if self.same else query_labels == key_labels
        if self.mask is not None:
            masked = ~self.mask[rows, keys]
            hidden = masked if hidden is None else hidden | masked
        if hidden is not None and self.included is not None:
            hidden = hidden & (key != self.included[rows].unsqueeze(-1))
        if not self.itself:
            itself = key == torch.arange(m, device=device)[rows].unsqueeze(-1)
            hidden = itself if hidden is None else hidden | itself
        if self.excluded is not None:
            out = key == self.excluded[rows].unsqueeze(-1)
            hidden = out if hidden is None else hidden | out
        return hidden
