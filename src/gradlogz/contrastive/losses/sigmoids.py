"""The SigLIP loss, which classifies each pair alone.

Read next: one_positive.py.
"""

from typing import TYPE_CHECKING, Any

import torch

from ..._autocast import without_autocast
from ..._typing import Float, Int, Tensor
from ...kernels.losses.logit_losses import each_row, sum_of_rows
from ...kernels.losses.pairwise_log_sum_exp import pairs
from ...kernels.losses.softmax_losses import Sigmoids, softplus
from ...kernels.losses.visible_pairs import VisiblePairs
from ..distributed import announces_errors, check_group, gathered, mean_over_processes
from ..likelihood import Likelihood
from ..ring import CandidateBlock, check_ring, ring_totals
from ..validation import (
    REDUCTIONS,
    Ids,
    check_choice,
    check_vectors,
    promoted,
    reduced,
    unit,
)
from .options import Temperature

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@announces_errors
@without_autocast
def siglip(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    *,
    temperature: Temperature = 1.0,
    offset: float | Float[Tensor, ""] = 0.0,
    positive: Int[Tensor, " m"] | None = None,
    ids: Ids | None = None,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    ring: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """SigLIP loss: binary classification of every pair with a sigmoid.   [zhai23b]

        loss_i = -log sigmoid(s_i+ + offset) - sum_{j != +} log sigmoid(-s_ij - offset)

    Denominator: none. The loss is a sum over candidates and a mean over anchors. `ids` exclude false negatives, and
    `group` and `ring` compare with the candidates of all processes, as in info_nce. `precision` is not used with ring.
    """
    call = "siglip"
    check_choice(call, "reduction", reduction, REDUCTIONS)
    if normalize:
        check_vectors(call, anchor=anchor, candidates=candidates)
        anchor, candidates = (unit(t) for t in promoted(anchor, candidates))
    options: Any = {"temperature": temperature, "positive": positive, "ids": ids, "precision": precision, "call": call}
    check_ring(call, ring, group)
    if group is not None and ring:
        family = Likelihood(anchor, candidates, **options)
        losses = _around_the_ring(family, offset, group)
        part = "sum" if reduction == "mean" else reduction
        loss = reduced(call, losses, part)
        return loss if part == reduction else mean_over_processes(loss, anchor.shape[0], anchor.device, group)
    if group is not None:
        candidates = gathered(anchor, candidates, group, options)
        positive = options["positive"]
    family = Likelihood(anchor, candidates, **options)
    eta, x = family.eta, family.candidates
    n = x.shape[0]  # a tensor made of a number would be copied to a GPU, for which the host waits
    shift = offset.to(eta).expand(n) if isinstance(offset, Tensor) else eta.new_full((n,), offset)
    pairs_of_ids = family.ids if isinstance(family.ids, tuple) else None
    rows = Sigmoids(eta.shape[0], positive, VisiblePairs(labels=pairs_of_ids, same=False))
    if reduction == "none":
        return each_row(rows, eta, x, shift, precision=precision)
    if group is not None and reduction == "mean":
        total = sum_of_rows(rows, eta, x, shift, 1.0, precision=precision)
        return mean_over_processes(total, eta.shape[0], eta.device, group)
    return sum_of_rows(rows, eta, x, shift, 1 / eta.shape[0] if reduction == "mean" else 1.0, precision=precision)


def _around_the_ring(
    family: Likelihood, offset: float | Float[Tensor, ""], group: "ProcessGroup"
) -> Float[Tensor, " m"]:
    """Loss of every anchor over the candidates of all processes."""
    check_group(family.call, {})
    ids: Any = family.ids  # a pair
    of_anchors, of_candidates = (None, None) if ids is None else ids
    eta, x, positive = family.eta, family.candidates, family.index_of_positive()
    shift = offset.to(eta) if isinstance(offset, Tensor) else eta.new_full((), offset)

    def part(block: CandidateBlock, query: Tensor, shift_of_rows: Tensor) -> tuple[Tensor]:
        labels = None if of_anchors is None or block.labels is None else (of_anchors, block.labels)
        negatives = VisiblePairs(labels=labels, same=False, excluded=positive if block.is_local else None)
        return (pairs(_softplus_of_negatives, query, block.candidates, None, negatives, shift_of_rows),)

    rows = (eta, shift.expand(eta.shape[0], 1))
    (others,) = ring_totals(part, (False,), rows, x, None, of_candidates, group)
    return others + softplus(-(eta * family.chosen()).sum(-1) - shift)


def _softplus_of_negatives(s: Tensor, _: Tensor, shift: Float[Tensor, "r 1"]) -> Float[Tensor, " r"]:
    """Sum of softplus(s + shift) over the negatives, whose other logits are -inf."""
    hidden = s == -torch.inf
    return softplus(s.masked_fill(hidden, 0.0) + shift).masked_fill(hidden, 0.0).sum(-1)
