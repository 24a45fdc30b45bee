"""Attention distances: the attention weight of heads at each distance between query and key.

    w(d) = mean over queries i of the weight on key i - d         d < 0: keys after the query
    sum_d w(d) (cos, sin)(d t)                                     average rotation by angles d t

From a random sample of rows. Distances up to FINE have one bin each, larger ones EIGHTH bins per octave, within which
the weight is taken to be constant. The result is cached, because several predictions need it for the same event.

Read next: ../../inside/rotary.py, ../tie.py.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from ...._typing import Float, Tensor
from ...batch_pass import BatchPass
from ...hypothesis_tests import median
from ...inside.events import Attended
from ...inside.head_weights import HeadWeights, Turning
from ...runs.records import Detail, Finding, Label, Remark
from ...statistics import GROUPS, Sums
from .attention_rows import applies, rows_of

FINE, EIGHTH, OCTAVES = 64, 8, 9  # distances of 2 ** 15 and more are one bin
OVER = ", over distances"  # suffix of quantities with averaged rotations
STILL = "share without rotation"
OVER_KEY = "over_distances"  # of the detail and of the remark
OVER_DETAILS = {OVER_KEY: Label("median with rotations averaged over distances, weighted by attention", null="null")}
OVER_METHOD = (
    "Only for models with rotary embeddings: the QK matrix is taken without rotation, as for a token that attends to "
    "itself. "
    'Quantities named "over distances" use W_q R̄ W_kᵀ instead, where R̄ is the rotation averaged over the attended '
    "distances of the head. With partial rotary embeddings the share of the squared norm in unrotated coordinates is "
    "reported as well."
)
OVER_REMARKS = {OVER_KEY: "No average over distances in {layers}: queries and keys do not rotate by fixed angles."}


def distances(event: Attended, batch_pass: BatchPass) -> dict[int, Sums] | None:
    """Row count and weights of every head in bins before and after the query, summed over rows, [h, 1 + 2 * bins].

    By the group of the batch, for the jackknife. None for cross-attention, for a layer without queries and keys, and
    without sampled rows.
    """
    if event.crosses or not applies(event, batch_pass) or event.key.shape[2] != event.query.shape[2]:
        return None
    sums = batch_pass.once(event.attention.log_normalizer, "distances", lambda: _weights(event, batch_pass))
    return None if sums is None else {batch_pass.batch.group: sums}


def by_group(counted: Mapping[int, Sums] | None) -> Float[Tensor, "g h k"] | None:
    """Merged distances of a layer for each group, [g, h, k]; None if nothing was counted."""
    if counted is None:
        return None
    sums = {group: each.totals[0].cpu() for group, each in counted.items()}
    nothing = torch.zeros_like(next(iter(sums.values())))
    return torch.stack([sums.get(g, nothing) for g in range(GROUPS)])


def mean_rotations(
    counted: Mapping[int, Sums] | None, weights: HeadWeights, groups: Sequence[int] = ()
) -> Float[Tensor, "v h d d"] | None:
    """Mean rotation of every head: over all rows, then without each of these groups, for the jackknife.

    None if the layer has no fixed rotation angles, or nothing was counted.
    """
    weight_sums = by_group(counted)
    if weight_sums is None or not isinstance(weights.turning, Turning):
        return None
    total = weight_sums.sum(0)
    left = list(groups) if len(groups) > 1 else []
    return averaged(weights.turning, torch.cat((total.unsqueeze(0), total - weight_sums[left]))[..., 1:])


def over_distances(findings: Sequence[Finding], quantity: str) -> tuple[tuple[Detail, ...], tuple[Remark, ...]]:
    """Median of a quantity over distances, and the layers without fixed angles; both empty for other models."""
    rows = [f for f in findings if f.quantity == quantity]
    value, missing = median(f.value for f in rows), tuple(sorted({f.layer for f in rows if math.isnan(f.value)}))
    details = () if math.isnan(value) else (Detail(OVER_KEY, value, null=median(f.null for f in rows)),)
    return details, (Remark(OVER_KEY, layers=missing),) if missing else ()


def averaged(turning: Turning, weights: Float[Tensor, "*b h bins"]) -> Float[Tensor, "*b h d d"]:
    """Rotations of every head, averaged over its attended distances, [*b, h, d, d]."""
    w = weights / weights.sum(-1, keepdim=True)
    start, end = _bins()
    size, centre = end - start, (start + end - 1) / 2
    half = turning.angle.unsqueeze(-1) / 2
    # The mean of cos and sin over the whole numbers of a bin: those of its centre, shrunk by Dirichlet's kernel.
    small = half.sin().abs() < 1e-12
    shrunk = torch.where(small, 1.0, (size * half).sin() / torch.where(small, 1.0, size * half.sin()))
    cosine, sine = ((2 * half * centre).cos() * shrunk, (2 * half * centre).sin() * shrunk)
    return turning.matrix(w @ torch.cat((cosine, cosine), -1).mT, w @ torch.cat((sine, -sine), -1).mT)


def _weights(event: Attended, batch_pass: BatchPass) -> Sums | None:
    rows = rows_of(event, batch_pass)
    if rows is None:
        return None
    s = rows.logits
    h, n = s.shape[1], s.shape[-1]
    p = (s - rows.of(event.attention.log_normalizer).unsqueeze(-1)).exp()  # includes the weight of a sink
    p = p.masked_fill(~rows.valid[:, None, :, None], 0.0)
    apart = rows.places.unsqueeze(-1) - torch.arange(n, device=s.device)
    start, _ = _bins()
    start = start.to(s.device, non_blocking=True)
    place = torch.bucketize(apart.abs(), start, right=True) - 1 + len(start) * (apart < 0)
    sums = torch.zeros(2 * len(start), h, dtype=s.dtype, device=s.device)
    sums.index_add_(0, place.flatten(), p.movedim(1, -1).reshape(-1, h))
    count = rows.valid.sum().double().expand(h, 1)
    return Sums(torch.cat((count, sums.mT.double()), -1).unsqueeze(0))


@lru_cache
def _bins() -> tuple[Tensor, Tensor]:
    """First distance of each bin, and the first distance after it."""
    ends = [*range(FINE + 1), *(round(FINE * 2 ** (k / EIGHTH)) for k in range(1, EIGHTH * OCTAVES + 1))]
    return torch.tensor(ends[:-1]), torch.tensor(ends[1:])
