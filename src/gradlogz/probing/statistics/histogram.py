"""Counts between fixed edges, which add up over batches, and quantiles read from them.

counts_0           below the first edge         counts_e         from the last edge on
counts_i           edge_i-1 <= x < edge_i       counts_e+1       not a number
"""

from typing import NamedTuple

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Int, Tensor
from .validation import check_alike


class Histogram(NamedTuple):
    """How many values fell between each two edges, below, above, and were none."""

    edges: Float[Tensor, " e"]
    counts: Int[Tensor, "*s bins"]

    def merge(self, other: "Histogram") -> "Histogram":
        """The counts of both."""
        check_alike("Histogram.merge", self, other)
        if not torch.equal(self.edges, other.edges):
            fact, remedy = f"{len(self.edges)} edges that differ", "Fix the edges before the first batch."
            raise InputValueError("Histogram.merge", "both", f"both must have the same edges, got {fact}", remedy)
        return Histogram(self.edges, self.counts + other.counts)


def histogram_of(
    values: Float[Tensor, "*s t"], edges: Float[Tensor, " e"], *, valid: Bool[Tensor, "*#s t"] | None = None
) -> Histogram:
    """Counts the last dimension; edges ascend; `valid` leaves values out."""
    if edges.ndim != 1 or len(edges) < 2 or not bool((edges[1:] > edges[:-1]).all()):
        fact, remedy = f"shape {shape_of(edges)}", "torch.linspace gives them."
        raise InputValueError("histogram_of", "edges", f"edges must be two or more, ascending, got {fact}", remedy)
    values = values.detach().contiguous()
    places = edges.to(values.device, values.dtype, non_blocking=True)
    bins = torch.bucketize(values, places, right=True).masked_fill(values.isnan(), len(edges) + 1)
    one = torch.ones_like(bins) if valid is None else valid.to(bins.device, non_blocking=True).expand(bins.shape).long()
    counts = torch.zeros(*bins.shape[:-1], len(edges) + 2, dtype=torch.int64, device=bins.device)
    return Histogram(edges.cpu().double(), counts.scatter_add_(-1, bins, one))


def quantiles(histogram: Histogram, levels: Float[Tensor, " k"]) -> Float[Tensor, "*s k"]:
    """Values below which these shares lie, linear between edges and so off by less than the width of a bin.

    What lies outside the edges is put on the nearest of them. NaN where nothing was counted, or a NaN was.
    """
    edges, counts = histogram.edges.to(histogram.counts.device), histogram.counts
    below = counts[..., :-1].double().cumsum(-1)
    total = below[..., -1:]
    target = levels.to(below) * total
    bins = torch.searchsorted(below, target.contiguous()).clamp(max=len(edges))
    before = torch.nn.functional.pad(below, (1, 0)).gather(-1, bins)
    share = (target - before) / counts[..., :-1].gather(-1, bins).clamp(min=1)
    ends = torch.cat((edges[:1], edges, edges[-1:]))
    found = ends[bins] + share.clamp(0.0, 1.0) * (ends[bins + 1] - ends[bins])
    return torch.where((total > 0) & (counts[..., -1:] == 0), found, torch.nan)
