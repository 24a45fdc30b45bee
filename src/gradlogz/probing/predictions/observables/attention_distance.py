"""How far heads look: the weight that they give to keys at each distance.

    w(d) = mean over queries i of the weight on key i - d         d < 0: keys behind the query
    sum_d w(d) (cos, sin)(d t)                                     what a turn by d t becomes on the average

Of the rows with small hashes. Distances are counted one by one up to FINE, then by bins of which an octave has EIGHTH:
within one, all distances are taken to have the same weight. Several predictions want this of one event: it is computed
once.

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
OVER = ", over distances"  # behind the names of quantities of the average form
STILL = "share without rotation"
OVER_KEY = "over_distances"  # of the detail and of the remark
OVER_DETAILS = {OVER_KEY: Label("median with rotations averaged over the attended distances", null="null")}
OVER_REMARKS = {OVER_KEY: "No average over distances in {layers}: queries and keys do not rotate by fixed angles."}


def distances(event: Attended, batch_pass: BatchPass) -> dict[int, Sums] | None:
    """The weights of every head [h, 1 + 2 * bins] summed over rows: how many, then on keys up to the query and behind.

    By the group of the batch, so that the jackknife can leave one out. None of a layer without queries and keys, whose
    keys are other tokens, or of whose rows none is chosen.
    """
    if event.crosses or not applies(event, batch_pass) or event.key.shape[2] != event.query.shape[2]:
        return None
    found = batch_pass.once(event.attention.log_normalizer, "distances", lambda: _weights(event, batch_pass))
    return None if found is None else {batch_pass.batch.group: found}


def by_group(counted: Mapping[int, Sums] | None) -> Float[Tensor, "g h k"] | None:
    """The merged distances of a layer, group by group; None if nothing was counted."""
    if counted is None:
        return None
    sums = {group: each.totals[0].cpu() for group, each in counted.items()}
    nothing = torch.zeros_like(next(iter(sums.values())))
    return torch.stack([sums.get(g, nothing) for g in range(GROUPS)])


def mean_rotations(
    counted: Mapping[int, Sums] | None, weights: HeadWeights, groups: Sequence[int] = ()
) -> Float[Tensor, "v h d d"] | None:
    """R̄ of every head, over all rows, [0], and without each of these groups, as the jackknife wants them.

    None where the layer turns by no known angles, or nothing was counted.
    """
    found = by_group(counted)
    if found is None or not isinstance(weights.turning, Turning):
        return None
    whole = found.sum(0)
    left = list(groups) if len(groups) > 1 else []
    return averaged(weights.turning, torch.cat((whole.unsqueeze(0), whole - found[left]))[..., 1:])


def over_distances(findings: Sequence[Finding], quantity: str) -> tuple[tuple[Detail, ...], tuple[Remark, ...]]:
    """Median of a quantity over distances, and the layers without fixed angles; both empty for other models."""
    rows = [f for f in findings if f.quantity == quantity]
    value, missing = median(f.value for f in rows), tuple(sorted({f.layer for f in rows if math.isnan(f.value)}))
    details = () if math.isnan(value) else (Detail(OVER_KEY, value, null=median(f.null for f in rows)),)
    return details, (Remark(OVER_KEY, layers=missing),) if missing else ()


def averaged(turning: Turning, weights: Float[Tensor, "*b h bins"]) -> Float[Tensor, "*b h d d"]:
    """R̄ of every head: its rotations, averaged over the distances that it attends to."""
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
    p = (s - rows.of(event.attention.log_normalizer).unsqueeze(-1)).exp()  # a sink takes its part
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
    """The least distance of each bin, and the first that is beyond it."""
    ends = [*range(FINE + 1), *(round(FINE * 2 ** (k / EIGHTH)) for k in range(1, EIGHTH * OCTAVES + 1))]
    return torch.tensor(ends[:-1]), torch.tensor(ends[1:])
