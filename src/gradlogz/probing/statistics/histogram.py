"""Histograms with fixed edges, which add up over batches, and their quantiles.

counts_0           below the first edge         counts_e         from the last edge on
counts_i           edge_i-1 <= x < edge_i       counts_e+1       not a number
"""

from typing import NamedTuple

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Int, Tensor
from .validation import check_alike


class Histogram(NamedTuple):
    """Counts of the values between neighbouring edges, below, above, and NaN."""

    edges: Float[Tensor, " e"]
    counts: Int[Tensor, "*s bins"]

    def merge(self, other: "Histogram") -> "Histogram":
        """Return the sum of both histograms."""
        check_alike("Histogram.merge", self, other)
        if not torch.equal(self.edges, other.edges):
            remedy = "Fix the edges before the first batch."
            raise InputValueError("Histogram.merge", "other", "the histograms have different edges", remedy)
        return Histogram(self.edges, self.counts + other.counts)


def histogram_of(
    values: Float[Tensor, "*s t"], edges: Float[Tensor, " e"], *, valid: Bool[Tensor, "*#s t"] | None = None
) -> Histogram:
    """Return the histogram over the last dimension; edges must ascend, and values that are not `valid` are skipped."""
    if edges.ndim != 1 or len(edges) < 2 or not bool((edges[1:] > edges[:-1]).all()):
        problem = f"edges must be a vector of at least two ascending values, got shape {shape_of(edges)}"
        raise InputValueError("histogram_of", "edges", problem, "Make them with torch.linspace.")
    values = values.detach().contiguous()
    places = edges.to(values.device, values.dtype, non_blocking=True)
    bins = torch.bucketize(values, places, right=True).masked_fill(values.isnan(), len(edges) + 1)
    one = torch.ones_like(bins) if valid is None else valid.to(bins.device, non_blocking=True).expand(bins.shape).long()
    counts = torch.zeros(*bins.shape[:-1], len(edges) + 2, dtype=torch.int64, device=bins.device)
    return Histogram(edges.cpu().double(), counts.scatter_add_(-1, bins, one))


def quantiles(histogram: Histogram, levels: Float[Tensor, " k"]) -> Float[Tensor, "*s k"]:
    """Return quantiles, interpolated linearly between edges and so exact to the width of a bin.

    Values outside the edges count as the nearest edge. The result is NaN if nothing or a NaN was counted.
    """
    edges, counts = histogram.edges.to(histogram.counts.device), histogram.counts
    below = counts[..., :-1].double().cumsum(-1)
    total = below[..., -1:]
    target = levels.to(below) * total
    bins = torch.searchsorted(below, target.contiguous()).clamp(max=len(edges))
    before = torch.nn.functional.pad(below, (1, 0)).gather(-1, bins)
    share = (target - before) / counts[..., :-1].gather(-1, bins).clamp(min=1)
    ends = torch.cat((edges[:1], edges, edges[-1:]))
    interpolated = ends[bins] + share.clamp(0.0, 1.0) * (ends[bins + 1] - ends[bins])
    return torch.where((total > 0) & (counts[..., -1:] == 0), interpolated, torch.nan)
