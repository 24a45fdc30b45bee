"""Losses with several positives for each anchor, by label or by target: supervised, soft InfoNCE and NCA.

Read next: one_positive.py.
"""

from typing import TYPE_CHECKING, Any

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Int, Tensor
from ...kernels.losses.logit_losses import each_row, sum_of_rows
from ...kernels.losses.pairwise_log_sum_exp import log_sum_exp
from ...kernels.losses.pairwise_log_sum_exp import pairs as by_pairs
from ...kernels.losses.softmax_losses import SomePositives, Targets, softplus
from ...kernels.losses.visible_pairs import VisiblePairs
from ..distributed import announces_errors, candidates_of_all, check_started, gather_rows, mean_over_processes
from ..likelihood import Likelihood
from ..ring import CandidateBlock, check_ring, ring_totals
from ..validation import (
    REDUCTIONS,
    check_choice,
    check_integers,
    check_precision,
    check_temperature,
    check_vectors,
    in_dtype_of,
    promoted,
    readable,
    reduced,
    unit,
    wide,
)
from .mined_pairs import MinedPairs, visible_pairs
from .options import Temperature

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@announces_errors
@without_autocast
def supervised_contrastive(
    vectors: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    *,
    temperature: Temperature = 1.0,
    candidates: Float[Tensor, "n d"] | None = None,
    candidate_labels: Int[Tensor, " n"] | None = None,
    mean_inside_log: bool = False,
    denominator: str = "all",
    pairs: MinedPairs | None = None,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    ring: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Supervised contrastive loss: all other vectors with the same label are positives.   [khosla20]

        loss_i = -1/|P_i| sum_{p in P_i} log [ exp(s_ip) / sum_{j != i} exp(s_ij) ]         L_out, Eq. 2
        loss_i = -log [ 1/|P_i| sum_{p in P_i} exp(s_ip) / sum_{j != i} exp(s_ij) ]         L_in, Eq. 3

    With mean_inside_log=True the mean over positives is inside the logarithm (L_in), otherwise outside (L_out).
    Denominator: all other vectors, including all positives. With denominator="pair" it is the one positive and all
    vectors with other labels, as in pytorch-metric-learning's NTXentLoss.
    Vectors with a unique label are excluded from the mean and have loss 0 under "none". The additional reduction
    "pairs" averages over pairs (i, p), so anchors of large classes have larger weight.

    Args:
        candidates: other vectors to compare with, instead of the vectors themselves: a queue, or the other tower of a
            pair of encoders, in which an anchor may have several positives.
        candidate_labels: their labels; candidates with the label of an anchor are its positives.
        pairs: indices of a miner, as in multi_similarity_loss: only these positives and negatives count.
        group: process group whose vectors (or candidates) are gathered, with their labels. The mean is scaled so that
            its average over processes is that of all anchors with a positive.
        ring: pass the candidates around a ring of processes instead of gathering them, as in info_nce.
        precision: torch.bfloat16 or torch.float16 for the products of vectors, as in `Likelihood`; not with ring.
    """
    call = "supervised_contrastive"
    check_vectors(call, vectors=vectors, candidates=candidates)
    if (candidates is None) != (candidate_labels is None):
        problem = "candidate_labels must be passed together with candidates"
        raise InputValueError(
            call, "candidate_labels", problem, "Pass both, or none to compare vectors with each other."
        )
    check_integers(call, "labels", labels, (vectors.shape[0],), vectors)
    labels = labels.long()
    check_temperature(call, temperature, vectors)
    check_precision(call, precision)
    check_choice(call, "denominator", denominator, ("all", "pair"))
    check_choice(call, "reduction", reduction, ("mean", "sum", "none", "pairs"))
    if mean_inside_log and denominator == "pair":
        problem = 'denominator must be "all" with mean_inside_log=True, got "pair"'
        raise InputValueError(call, "denominator", problem, "Drop one of the two arguments.")
    z, *rest = promoted(vectors, *(() if candidates is None else (candidates,)))
    z, *rest = (unit(t) if normalize else t for t in (z, *rest))
    temperature, m = in_dtype_of(z, temperature), z.shape[0]
    if candidates is None or candidate_labels is None:
        x, y, itself = z, labels, torch.arange(m, device=z.device)
    else:
        check_integers(call, "candidate_labels", candidate_labels, (candidates.shape[0],), vectors)
        x, y, itself = rest[0], candidate_labels.long(), None
    kind = "mass" if mean_inside_log else "mean" if denominator == "all" else "pair"
    check_ring(call, ring, group)
    if pairs is not None:
        if candidates is not None or group is not None:
            problem = "pairs must not be passed with candidates= or group=, whose vectors a miner does not see"
            raise InputValueError(call, "pairs", problem, "Drop one of the arguments.")
        positives, negatives = visible_pairs(call, labels, pairs)
        members = torch.zeros_like(labels) if positives.mask is None else positives.mask.sum(-1)
        _check_some(call, "pairs", members > 0, "pairs have no positive")
        constant = members.clamp(min=1).to(z.dtype).log() if mean_inside_log else None
        return _of_positives(
            SomePositives(m, positives, negatives, kind),
            z / temperature,
            x,
            None,
            members,
            reduction,
            constant,
            precision,
        )
    if group is not None and ring:
        check_started(call)
        losses, members = _around_the_ring(z / temperature, labels, x, y, itself, kind, group)
        some = members > 0
        everywhere = gather_rows(some.long(), group) > 0
        _check_some(call, "labels", everywhere, "labels are all different, so no anchor has a positive")
        if mean_inside_log:
            losses = losses + members.clamp(min=1).to(z.dtype).log()
        if reduction == "pairs":
            return (losses * members).sum() / members.sum().clamp(min=1)
        if reduction == "mean":
            return mean_over_processes(losses.sum(), int(some.sum()), z.device, group)
        return reduced(call, losses, reduction)
    if group is not None:
        check_started(call)
        x, index = candidates_of_all(x, group)
        y, itself = gather_rows(y, group), None if candidates is not None else index
    positives = VisiblePairs(labels=(labels, y), excluded=itself)
    rows = SomePositives(m, positives, VisiblePairs(labels=(labels, y), same=False), kind)
    members = count_members(labels, y) - (0 if itself is None else 1)
    some = members > 0
    # One process may have no positives, but not all: an error of one alone would leave the others waiting for it.
    everywhere = some if group is None else gather_rows(some.long(), group) > 0
    _check_some(call, "labels", everywhere, "labels are all different, so no anchor has a positive")
    # The mean over positives inside the logarithm is their probability divided by their number.
    constant = members.clamp(min=1).to(z.dtype).log() if mean_inside_log else None
    if group is not None and reduction == "mean":
        total = _of_positives(rows, z / temperature, x, None, members, "sum", constant, precision)
        return mean_over_processes(total, int(some.sum()), z.device, group)
    return _of_positives(rows, z / temperature, x, None, members, reduction, constant, precision)


def _around_the_ring(
    eta: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    candidates: Float[Tensor, "n d"],
    candidate_labels: Int[Tensor, " n"],
    itself: Int[Tensor, " m"] | None,
    kind: str,
    group: "ProcessGroup",
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Losses of `SomePositives` over the candidates of all processes, and the number of positives of each anchor."""

    def positives(block: CandidateBlock) -> VisiblePairs:
        return VisiblePairs(labels=(labels, _labels(block)), excluded=itself if block.is_local else None)

    def sums(block: CandidateBlock, query: Tensor) -> tuple[Tensor, ...]:
        """N, A, the sum of the logits of positives, and their number."""
        x = block.candidates
        negatives = VisiblePairs(labels=(labels, _labels(block)), same=False)
        number, total = count_members(labels, _labels(block)).to(query.dtype), _sums_by_label(x, _labels(block), labels)
        if block.is_local and itself is not None:
            number, total = number - 1, total - x
        sides = (log_sum_exp(query, x, None, visible) for visible in (negatives, positives(block)))
        return *sides, (query * total).sum(-1), number

    is_log = (True, True, False, False)
    N, A, along, number = ring_totals(sums, is_log, (eta,), candidates, None, candidate_labels, group)
    number = number.detach()
    some, count = number > 0, number.clamp(min=1)
    if kind != "pair":
        mass = A.where(some, 0.0)
        losses = softplus(N - mass) if kind == "mass" else softplus(N - mass) + mass - along / count
        return losses.where(some, 0.0), number

    def softplus_of_pairs(block: CandidateBlock, query: Tensor, against: Tensor) -> tuple[Tensor]:
        return (by_pairs(_softplus_behind, query, block.candidates, None, positives(block), against),)

    rows = (eta, N.unsqueeze(-1))
    (total,) = ring_totals(softplus_of_pairs, (False,), rows, candidates, None, candidate_labels, group)
    return total / count, number


def _labels(block: CandidateBlock) -> Int[Tensor, " n"]:
    assert block.labels is not None
    return block.labels


def _softplus_behind(s: Tensor, _: Tensor, against: Float[Tensor, "r 1"]) -> Float[Tensor, " r"]:
    """Sum of softplus(N - s) over the positives, whose other logits are -inf."""
    hidden = s == -torch.inf
    return softplus(against - s.masked_fill(hidden, 0.0)).masked_fill(hidden, 0.0).sum(-1)


def _sums_by_label(
    x: Float[Tensor, "n d"], labels: Int[Tensor, " n"], wanted: Int[Tensor, " m"]
) -> Float[Tensor, "m d"]:
    """Sum of the vectors with each of the wanted labels, in linear memory."""
    known, index = labels.unique(return_inverse=True)
    sums = x.new_zeros(len(known), x.shape[1]).index_add(0, index, x)
    place = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
    return sums[place] * (known[place] == wanted).unsqueeze(-1)


def _of_positives(
    rows: SomePositives,
    eta: Tensor,
    x: Tensor,
    bias: Tensor | None,
    members: Int[Tensor, " m"],
    reduction: str,
    constant: Float[Tensor, " m"] | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    """Losses of rows plus a constant; the mean is over anchors with a positive, or over all pairs of positives."""
    if reduction in ("none", "pairs"):
        losses = each_row(rows, eta, x, bias, precision=precision)
        losses = losses if constant is None else losses + constant
        return losses if reduction == "none" else (losses * members).sum() / members.sum().clamp(min=1)
    total = sum_of_rows(rows, eta, x, bias, 1.0, precision=precision)
    total = total if constant is None else total + constant.sum()
    return total if reduction == "sum" else total / (members > 0).sum().clamp(min=1)


@without_autocast
def soft_info_nce(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    targets: Float[Tensor, "m n"],
    *,
    temperature: Temperature = 1.0,
    log_weights: Float[Tensor, " n"] | None = None,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """InfoNCE with a distribution of targets over the candidates of each anchor.

        loss_i = -sum_j t_ij log [ w_j exp(s_ij) / sum_k w_k exp(s_ik) ]

    Denominator: all candidates. One target of 1 is info_nce; equal targets on several positives are the L_out of
    supervised_contrastive; the probabilities of a teacher are distillation. Targets have no gradient.
    """
    call = "soft_info_nce"
    check_choice(call, "reduction", reduction, REDUCTIONS)
    m, n = anchor.shape[0], candidates.shape[0]
    if not isinstance(targets, Tensor) or tuple(targets.shape) != (m, n) or not targets.is_floating_point():
        fact = (
            f"{targets.dtype} of shape {shape_of(targets)}" if isinstance(targets, Tensor) else type(targets).__name__
        )
        problem = f"targets must be floating and have shape ({m}, {n}), got {fact}"
        raise InputValueError(call, "targets", problem, "Pass the probability of each candidate for each anchor.")
    if normalize:
        check_vectors(call, anchor=anchor, candidates=candidates)
        anchor, candidates = (unit(t) for t in promoted(anchor, candidates))
    options: Any = {"temperature": temperature, "log_weights": log_weights, "call": call}
    family = Likelihood(anchor, candidates, positive=torch.zeros(m, dtype=torch.long, device=anchor.device), **options)
    rows = Targets(targets.detach().to(family.anchor.dtype), VisiblePairs())
    if reduction == "none":
        return each_row(rows, family.eta, family.candidates, family.log_weights)
    coefficient = 1 / m if reduction == "mean" else 1.0
    return sum_of_rows(rows, family.eta, family.candidates, family.log_weights, coefficient)


@announces_errors
@without_autocast
def nca(
    vectors: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    *,
    temperature: Temperature = 1.0,
    expected_accuracy: bool = False,
    normalize: bool = False,
    group: "ProcessGroup | None" = None,
    reduction: str = "mean",
) -> Tensor:
    """NCA: -log of the probability that a stochastic neighbour has the same class.   [goldberger04; theory E21]

        p_ij = exp(-|x_i - x_j|²/T) / sum_{k != i} exp(-|x_i - x_k|²/T),   loss_i = -log sum_{j in class of i} p_ij

    Denominator: all other vectors of every class. As a family: eta = 2 x_i / T, log weights -|x_j|²/T. With
    expected_accuracy=True the loss is minus the probability, so the mean is minus the expected accuracy. Vectors with a
    unique label are excluded from the mean and have loss 0 under "none". `group` is that of supervised_contrastive.
    """
    call = "nca"
    check_vectors(call, vectors=vectors)
    check_integers(call, "labels", labels, (vectors.shape[0],), vectors)
    check_temperature(call, temperature, vectors)
    check_choice(call, "reduction", reduction, REDUCTIONS)
    x = unit(wide(vectors)) if normalize else wide(vectors)
    if group is None:
        keys, positives, negatives = x, *visible_pairs(call, labels, None)
    else:
        keys, positives, negatives = vectors_of_all(call, x, labels, group)
    assert positives.labels is not None
    members = count_members(*positives.labels) - 1
    some = members > 0
    everywhere = some if group is None else gather_rows(some.long(), group) > 0
    _check_some(call, "labels", everywhere, "labels are all different, so no anchor has a positive")
    temperature, centre = in_dtype_of(x, temperature), keys.detach().mean(0)
    keys = keys - centre  # distances do not change; reduces rounding errors
    x = keys if group is None else x - centre
    log_weights = -keys.square().sum(-1) / temperature
    eta = 2 * x / temperature
    rows = SomePositives(x.shape[0], positives, negatives, "mass")
    part = "sum" if group is not None and reduction == "mean" else reduction
    if not expected_accuracy:
        loss = _of_positives(rows, eta, keys, log_weights, members, part)
    else:
        losses = torch.where(some, -(-each_row(rows, eta, keys, log_weights)).exp(), 0.0)
        loss = losses.sum() / some.sum().clamp(min=1) if part == "mean" else reduced(call, losses, part)
    return loss if part == reduction else mean_over_processes(loss, int(some.sum()), x.device, group)


def vectors_of_all(
    call: str, x: Float[Tensor, "m d"], labels: Int[Tensor, " m"], group: "ProcessGroup"
) -> tuple[Float[Tensor, "n d"], VisiblePairs, VisiblePairs]:
    """Vectors of all processes, and which of them are positives and negatives of those of this process."""
    check_started(call)
    everything = candidates_of_all(x, group)
    both = labels.long(), gather_rows(labels.long(), group)
    positives = VisiblePairs(labels=both, excluded=everything.own)
    return everything.candidates, positives, VisiblePairs(labels=both, same=False)


def _check_some(call: str, argument: str, some: Bool[Tensor, " m"], problem: str, *, every: bool = False) -> None:
    """Check that some anchor (or every anchor) has vectors to compare with."""
    if readable(some) and not bool(some.all() if every else some.any()):
        raise InputValueError(call, argument, problem, "Use a larger batch, or exclude fewer pairs.")


def count_members(labels: Int[Tensor, " m"], of_candidates: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
    """Number of candidates with the label of each vector, in linear memory."""
    ordered = of_candidates.sort().values
    first, last = (torch.searchsorted(ordered, labels, right=right) for right in (False, True))
    return last - first
