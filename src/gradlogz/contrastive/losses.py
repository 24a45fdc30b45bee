"""Contrastive losses, each defined by the likelihood of likelihood.py.

    -log p(+) = G(eta) - <eta, x_+>,   eta = anchor / temperature,   G = log sum of exp<eta, x> over the denominator

    loss                                    anchors     the denominator sums over
    info_nce                [oord18]        a           all candidates, including the positive
    n_pair                  [sohn16]        a           all candidates, including the positive
    clip_loss               [radford21]     a and b     all vectors of the other side, including the positive
    nt_xent                 [chen20]        a and b     all other vectors of both views, including the positive
    supervised_contrastive  [khosla20]      all         all other vectors, including all positives
    soft_info_nce                           a           all candidates; the numerator over all, by target
    nca                     [goldberger04]  all         all other vectors; the numerator over those of the same class
    skip_gram               [mikolov13]     center      all contexts; with negative sampling each context separately
    nce                     [gutmann10]     a           each candidate separately, against known noise
    ranking_nce             [ma18]          a           the positive and its negatives, each divided by its noise
    siglip                  [zhai23b]       a           each pair separately
    proxy_loss              [movshovitz17]  a           all proxies
    triplet_loss            [schroff15]     a           the positive and one negative, at temperature 0
    alignment_loss          [wang20]        a           no denominator
    uniformity_loss         [wang20]        all         all other vectors, with the mean over anchors in the logarithm

Logits are <anchor, candidate> / temperature, normalised only with normalize=True. The positive of anchor i is candidate
i unless `positive` is passed. Memory is linear in the batch.

Read next: likelihood.py; distributed.py and queue.py (candidates of other processes and earlier batches).
"""

import math
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from .._autocast import without_autocast
from .._errors import InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor
from ..kernels.losses.logit_losses import DENSE, each_row, is_compiled, products, sum_of_rows
from ..kernels.losses.pairwise_log_sum_exp import log_add, log_sum_exp
from ..kernels.losses.softmax_losses import BothDirections, Sigmoids, SomePositives, Targets, softplus
from ..kernels.losses.visible_pairs import VisiblePairs
from .distributed import check_started, gather_candidates, gather_rows, mean_over_processes
from .likelihood import Ids, Likelihood
from .validation import (
    REDUCTIONS,
    check_choice,
    check_device,
    check_indices,
    check_integers,
    check_precision,
    check_rows,
    check_temperature,
    check_vectors,
    promoted,
    readable,
    reduced,
    unit,
    wide,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Temperature = float | Float[Tensor, ""]

# Number of pairs up to which both directions are computed from one matrix of logits (4 MiB of float32).
ONE_MATRIX = 1 << 20
# The same for the compiled loss of a CPU (64 MiB), which computes one exponential of each pair.
COMPILED_MATRIX = 1 << 24


class InfoNCEOptions(TypedDict, total=False):
    """Keyword arguments that `n_pair` passes on to `info_nce`."""

    temperature: Temperature
    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None
    log_weights: Float[Tensor, " n"] | None
    ids: Ids | None
    mask: Bool[Tensor, "m n"] | None
    bias: Float[Tensor, "m n"] | None
    margin: float
    hard_negatives: Float[Tensor, "m k d"] | None
    decoupled: bool
    normalize: bool
    precision: torch.dtype | None
    group: "ProcessGroup | None"


class LossOptions(TypedDict, total=False):
    """Keyword arguments that `Contrastive` passes on to its loss."""

    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None
    negatives: Int[Tensor, "m k"] | Int[Tensor, " k"] | None
    log_weights: Float[Tensor, " n"] | None
    ids: Ids | None
    mask: Bool[Tensor, "m n"] | None
    bias: Float[Tensor, "m n"] | None
    noise: Float[Tensor, " n"]
    log_normalizer: float | Float[Tensor, ""] | Float[Tensor, " m"]
    offset: float | Float[Tensor, ""]
    margin: float
    hard_negatives: Float[Tensor, "m k d"] | None
    candidates: Float[Tensor, "n d"] | None
    candidate_labels: Int[Tensor, " n"] | None
    group: "ProcessGroup | None"
    denominator: str
    mean_inside_log: bool
    expected_accuracy: bool
    decoupled: bool
    normalize: bool
    precision: torch.dtype | None
    reduction: str


@without_autocast
def info_nce(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    *,
    temperature: Temperature = 1.0,
    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None = None,
    log_weights: Float[Tensor, " n"] | None = None,
    ids: Ids | None = None,
    mask: Bool[Tensor, "m n"] | None = None,
    bias: Float[Tensor, "m n"] | None = None,
    margin: float = 0.0,
    hard_negatives: Float[Tensor, "m k d"] | None = None,
    decoupled: bool = False,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    reduction: str = "mean",
) -> Tensor:
    """InfoNCE: -log of the probability of the positive among all candidates.   [oord18]

        loss_i = -log [ w_+ exp(s_i+) / sum_j w_j exp(s_ij) ],   s_ij = <a_i, x_j> / temperature

    Denominator: all candidates, including the positive; one direction. A vector passed as `positive` is an additional
    candidate of its anchor only.

    `positive`, `ids`, `mask`, `bias` and `precision` are those of `Likelihood`.

    Args:
        log_weights: log weights of the candidates, as in `Likelihood`; for candidates sampled with probability q_j,
            log_weights = -log q_j makes the denominator an unbiased estimate of the sum over all.
        margin: number subtracted from <anchor, positive>, which must exceed the negatives by it [wang18].
        hard_negatives: k further negatives of each anchor alone.
        decoupled: exclude the positive from the denominator [yeh22]; the loss may then be negative.
        group: process group whose candidates are gathered, with gradients; `positive`, `ids` and `log_weights` are
            those of this process. The mean is scaled so that its average over processes is that of all anchors.
        normalize: use cosine similarities; the zero vector has similarity 0 with every vector.
        reduction: "mean", "sum" or "none".

    An anchor without negatives has loss 0 and no gradient.

    >>> import torch
    >>> a, b = torch.randn(4, 8), torch.randn(4, 8)
    >>> torch.allclose(info_nce(a, b), torch.nn.functional.cross_entropy(a @ b.mT, torch.arange(4)))
    True
    """
    options: Any = {"positive": positive, "log_weights": log_weights, "ids": ids, "mask": mask, "bias": bias}
    options |= {"temperature": temperature, "precision": precision, "call": "info_nce", "group": group}
    options |= {"hard_negatives": hard_negatives}
    return _one_direction(anchor, candidates, normalize, margin, decoupled, reduction, **options)


def _one_direction(
    anchor: Tensor,
    candidates: Tensor,
    normalize: bool,
    margin: float,
    decoupled: bool,
    reduction: str,
    group: "ProcessGroup | None" = None,
    hard_negatives: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """info_nce in the name of another loss."""
    if normalize:
        call, names = options["call"], options.get("names", ("anchor", "candidates"))
        positive = options.get("positive")
        outside = positive if isinstance(positive, Tensor) and positive.is_floating_point() else None
        vectors = {names[0]: anchor, names[1]: candidates, "positive": outside}
        check_vectors(call, may_be_empty=None if outside is None else names[1], **vectors)
        anchor, candidates = unit(wide(anchor)), unit(wide(candidates))
        if outside is not None:
            options["positive"] = unit(wide(outside))
    if group is not None:
        candidates = _gathered(anchor, candidates, group, options)
    family = Likelihood(anchor, candidates, **options)
    check_choice(family.call, "reduction", reduction, REDUCTIONS)
    part = "sum" if group is not None and reduction == "mean" else reduction
    if hard_negatives is None:
        loss = family.loss(part, decoupled=decoupled, margin=margin)
    else:
        loss = reduced(family.call, _with_hard_negatives(family, hard_negatives, normalize, margin, decoupled), part)
    return loss if part == reduction else mean_over_processes(loss, anchor.shape[0], anchor.device, group)


def _gathered(
    anchor: Tensor, candidates: Tensor, group: "ProcessGroup", options: dict[str, Any]
) -> Float[Tensor, "n d"]:
    """Candidates of all processes; the options of a likelihood that belong to candidates are gathered in place."""
    call = options["call"]
    for name in ("mask", "bias"):
        if options.get(name) is not None:
            problem = f"{name} must not be passed with group=, since it has no columns for other processes"
            remedy = "Pass ids= or log_weights=, which are gathered, or gather_candidates before the loss."
            raise InputValueError(call, name, problem, remedy)
    check_started(call)
    positive, ids, log_weights = (options.get(name) for name in ("positive", "ids", "log_weights"))
    if positive is None:
        check_rows(call, "candidates", candidates, anchor.shape[0], "anchor")
    everything = gather_candidates(candidates, group=group)
    if positive is None:
        options["positive"] = everything.own
    elif not positive.is_floating_point():
        check_indices(call, "positive", positive, candidates.shape[0])
        options["positive"] = positive + everything.own[0]
    if ids is not None:
        of_anchors, of_candidates = ids if isinstance(ids, tuple) else (ids, ids)
        options["ids"] = (of_anchors, gather_rows(of_candidates, group))
    if log_weights is not None:
        options["log_weights"] = gather_candidates(log_weights.unsqueeze(-1), group=group).candidates.squeeze(-1)
    return everything.candidates


def _with_hard_negatives(
    family: Likelihood, hard_negatives: Float[Tensor, "m k d"], normalize: bool, margin: float, decoupled: bool
) -> Float[Tensor, " m"]:
    """Losses with further negatives of single anchors."""
    call, (m, d) = family.call, family.anchor.shape
    if hard_negatives.ndim != 3 or (hard_negatives.shape[0], hard_negatives.shape[2]) != (m, d):
        problem = f"hard_negatives must be [{m}, k, {d}], got shape {shape_of(hard_negatives)}"
        raise InputValueError(call, "hard_negatives", problem, "Pass k vectors for each anchor.")
    x = hard_negatives.to(family.anchor.dtype)
    x = unit(x.flatten(0, 1)).view_as(x) if normalize else x
    behind = -family.log_odds()
    logits = (family.eta.unsqueeze(1) * (x - family.chosen().unsqueeze(1))).sum(-1)
    weight = family.weight_of_positive()
    logits = logits if weight is None else logits - weight.unsqueeze(-1)
    behind = log_add(behind, logits.logsumexp(-1)) + margin / family.temperature
    return behind if decoupled else softplus(behind)


@without_autocast
def n_pair(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "m d"],
    *,
    reduction: str = "mean",
    **options: Unpack[InfoNCEOptions],
) -> Tensor:
    """N-pair loss log(1 + sum_{j != i} exp(<a_i, x_j> - <a_i, x_i>)): info_nce at temperature 1.   [sohn16, Eq. 6]

    Denominator: the positives of all anchors, including its own; one direction. Options are those of info_nce.
    """
    rest: Any = {**options}
    normalize, margin, decoupled = rest.pop("normalize", False), rest.pop("margin", 0.0), rest.pop("decoupled", False)
    return _one_direction(anchor, candidates, normalize, margin, decoupled, reduction, call="n_pair", **rest)


@without_autocast
def clip_loss(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    temperature: Temperature = 1.0,
    log_weights: Float[Tensor, " m"] | None = None,
    ids: Int[Tensor, " m"] | None = None,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    reduction: str = "mean",
) -> Tensor:
    """CLIP loss: the average of info_nce(a, b) and info_nce(b, a).   [radford21]

    Denominator: all vectors of the other side, including the positive; both directions. The temperature is
    exp(-logit scale) in CLIP's notation. `ids`, one for each pair, exclude pairs with the same id; `group` is that of
    info_nce.
    """
    call = "clip_loss"
    check_choice(call, "reduction", reduction, REDUCTIONS)
    check_vectors(call, a=a, b=b)
    a, b = (unit(t) if normalize else t for t in promoted(a, b))
    options: Any = {"temperature": temperature, "log_weights": log_weights, "ids": ids}
    options |= {"precision": precision, "call": call}
    if group is not None:
        sides = ((a, b, ("a", "b")), (b, a, ("b", "a")))
        losses = [
            _one_direction(x, y, False, 0.0, False, reduction, group=group, names=names, **options)
            for x, y, names in sides
        ]
        return (losses[0] + losses[1]) / 2
    one = Likelihood(a, b, names=("a", "b"), **options)
    m = a.shape[0]
    largest = COMPILED_MATRIX if is_compiled(a, b, None, precision) else ONE_MATRIX
    if reduction != "none" and log_weights is None and m * m <= largest:
        negatives = VisiblePairs() if ids is None else VisiblePairs(labels=(ids, ids), same=False)
        coefficient = 1 / m if reduction == "mean" else 1.0
        eta, factor = (one.eta, 1.0) if isinstance(temperature, Tensor) else (one.anchor, 1 / temperature)
        rows = BothDirections(negatives)
        return sum_of_rows(rows, eta, one.candidates, None, coefficient, factor=factor, precision=precision)
    other = Likelihood(b, a, names=("b", "a"), **options)
    return (one.loss(reduction) + other.loss(reduction)) / 2


@without_autocast
def nt_xent(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    temperature: Temperature = 1.0,
    ids: Int[Tensor, " m"] | None = None,
    margin: float = 0.0,
    decoupled: bool = False,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    group: "ProcessGroup | None" = None,
    reduction: str = "mean",
) -> Tensor:
    """NT-Xent, the loss of SimCLR: the positive of each view is the other view of its pair.   [chen20, Eq. 1]

        loss_i = -log [ exp(s_i+) / sum_{j != i} exp(s_ij) ],   i and j in all 2m views

    Denominator: all 2m - 1 other views, including the positive; both directions. With decoupled=True the positive is
    excluded too [yeh22]. `ids`, one for each pair, exclude views of other pairs with the same id. "none" returns 2m
    losses, those of `a` first. A single pair has loss 0. `group` as in info_nce: the views of all processes.
    """
    call = "nt_xent"
    check_vectors(call, a=a, b=b)
    check_rows(call, "b", b, a.shape[0], "a")
    a, b = promoted(a, b)
    z = torch.cat([unit(a), unit(b)] if normalize else [a, b])
    view_ids = None
    if ids is not None:
        check_integers(call, "ids", ids, (a.shape[0],), a)
        view_ids = torch.cat([ids, ids])
    positive = torch.arange(z.shape[0], device=z.device).roll(a.shape[0])
    options: Any
    if group is not None:
        check_started(call)
        views = gather_candidates(z, group=group)
        # A view is excluded by its id, which it shares with the pairs to be excluded, or with none.
        shared = (views.own, gather_rows(views.own, group))
        shared = shared if view_ids is None else (view_ids, gather_rows(view_ids, group))
        options = {"positive": views.own[positive], "ids": shared, "temperature": temperature, "precision": precision}
        family = Likelihood(z, views.candidates, call=call, **options)
        part = "sum" if reduction == "mean" else reduction
        loss = family.loss(part, decoupled=decoupled, margin=margin)
        return loss if part == reduction else mean_over_processes(loss, z.shape[0], z.device, group)
    summed = reduction != "none" and not decoupled and is_compiled(z, z, None, precision)
    if view_ids is None and z.shape[0] ** 2 > DENSE and not summed:
        check_choice(call, "reduction", reduction, REDUCTIONS)
        check_temperature(call, temperature, z)
        check_precision(call, precision)
        behind = _behind_in_large_batches(z, a.shape[0], temperature, precision) + margin / temperature
        return reduced(call, behind if decoupled else softplus(behind), reduction)
    options = {"positive": positive, "exclude_self": True, "ids": view_ids}
    options |= {"temperature": temperature, "precision": precision, "call": call}
    return Likelihood(z, z, **options).loss(reduction, decoupled=decoupled, margin=margin)


def _behind_in_large_batches(
    z: Float[Tensor, "v d"], m: int, temperature: Temperature, precision: torch.dtype | None
) -> Float[Tensor, " v"]:
    """N - s_+ of all 2m views. The negatives are all views but number i in both halves, so no masks are needed."""
    eta, x = z / temperature, z - z.detach().mean(0)
    but_itself, parts = VisiblePairs(itself=False), []
    for half, other in ((slice(None, m), slice(m, None)), (slice(m, None), slice(None, m))):
        sums = (log_sum_exp(eta[half], x[side], None, but_itself, precision=precision) for side in (half, other))
        parts.append(log_add(*sums) - (eta[half] * x[other]).sum(-1))
    return torch.cat(parts)


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
    normalize: bool = False,
    group: "ProcessGroup | None" = None,
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
        group: process group whose vectors (or candidates) are gathered, with their labels. The mean is scaled so that
            its average over processes is that of all anchors with a positive.
    """
    call = "supervised_contrastive"
    check_vectors(call, vectors=vectors, candidates=candidates)
    if (candidates is None) != (candidate_labels is None):
        problem = "candidate_labels must be passed together with candidates"
        raise InputValueError(
            call, "candidate_labels", problem, "Pass both, or none to compare vectors with each other."
        )
    check_integers(call, "labels", labels, (vectors.shape[0],), vectors)
    check_temperature(call, temperature, vectors)
    check_choice(call, "denominator", denominator, ("all", "pair"))
    check_choice(call, "reduction", reduction, ("mean", "sum", "none", "pairs"))
    if mean_inside_log and denominator == "pair":
        problem = 'denominator must be "all" with mean_inside_log=True, got "pair"'
        raise InputValueError(call, "denominator", problem, "Drop one of the two arguments.")
    z, *rest = promoted(vectors, *(() if candidates is None else (candidates,)))
    z, *rest = (unit(t) if normalize else t for t in (z, *rest))
    m = z.shape[0]
    if candidates is None or candidate_labels is None:
        x, y, itself = z, labels, torch.arange(m, device=z.device)
    else:
        check_integers(call, "candidate_labels", candidate_labels, (candidates.shape[0],), vectors)
        x, y, itself = rest[0], candidate_labels, None
    if group is not None:
        check_started(call)
        x, index = gather_candidates(x, group=group)
        y, itself = gather_rows(y, group), None if candidates is not None else index
    positives = VisiblePairs(labels=(labels, y), excluded=itself)
    kind = "mass" if mean_inside_log else "mean" if denominator == "all" else "pair"
    rows = SomePositives(m, positives, VisiblePairs(labels=(labels, y), same=False), kind)
    members = _members(labels, y) - (0 if itself is None else 1)
    some = members > 0
    # One process may have no positives, but not all: an error of one alone would leave the others waiting for it.
    everywhere = some if group is None else gather_rows(some.long(), group) > 0
    _check_some(call, "labels", everywhere, "labels are all different, so no anchor has a positive")
    # The mean over positives inside the logarithm is their probability divided by their number.
    constant = members.clamp(min=1).to(z.dtype).log() if mean_inside_log else None
    if group is not None and reduction == "mean":
        total = _of_positives(rows, z / temperature, x, None, members, "sum", constant)
        return mean_over_processes(total, int(some.sum()), z.device, group)
    return _of_positives(rows, z / temperature, x, None, members, reduction, constant)


def _of_positives(
    rows: SomePositives,
    eta: Tensor,
    x: Tensor,
    bias: Tensor | None,
    members: Int[Tensor, " m"],
    reduction: str,
    constant: Float[Tensor, " m"] | None = None,
) -> Tensor:
    """Losses of rows plus a constant; the mean is over anchors with a positive, or over all pairs of positives."""
    if reduction in ("none", "pairs"):
        losses = each_row(rows, eta, x, bias)
        losses = losses if constant is None else losses + constant
        return losses if reduction == "none" else (losses * members).sum() / members.sum().clamp(min=1)
    total = sum_of_rows(rows, eta, x, bias, 1.0)
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
        anchor, candidates = unit(wide(anchor)), unit(wide(candidates))
    options: Any = {"temperature": temperature, "log_weights": log_weights, "call": call}
    family = Likelihood(anchor, candidates, positive=torch.zeros(m, dtype=torch.long, device=anchor.device), **options)
    rows = Targets(targets.detach().to(family.anchor.dtype), VisiblePairs())
    if reduction == "none":
        return each_row(rows, family.eta, family.candidates, family.log_weights)
    coefficient = 1 / m if reduction == "mean" else 1.0
    return sum_of_rows(rows, family.eta, family.candidates, family.log_weights, coefficient)


@without_autocast
def nca(
    vectors: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    *,
    temperature: Temperature = 1.0,
    expected_accuracy: bool = False,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """NCA: -log of the probability that a stochastic neighbour has the same class.   [goldberger04; theory E21]

        p_ij = exp(-|x_i - x_j|²/T) / sum_{k != i} exp(-|x_i - x_k|²/T),   loss_i = -log sum_{j in class of i} p_ij

    Denominator: all other vectors of every class. As a family: eta = 2 x_i / T, log weights -|x_j|²/T. With
    expected_accuracy=True the loss is minus the probability, so the mean is minus the expected accuracy. Vectors with a
    unique label are excluded from the mean and have loss 0 under "none".
    """
    call = "nca"
    check_vectors(call, vectors=vectors)
    check_integers(call, "labels", labels, (vectors.shape[0],), vectors)
    check_temperature(call, temperature, vectors)
    check_choice(call, "reduction", reduction, REDUCTIONS)
    x = unit(wide(vectors)) if normalize else wide(vectors)
    members = _members(labels, labels) - 1
    some = members > 0
    _check_some(call, "labels", some, "labels are all different, so no anchor has a positive")
    x = x - x.detach().mean(0)  # distances do not change; reduces rounding errors
    log_weights = -x.square().sum(-1) / temperature
    eta = 2 * x / temperature
    positives = VisiblePairs(itself=False, labels=(labels, labels))
    rows = SomePositives(x.shape[0], positives, VisiblePairs(labels=(labels, labels), same=False), "mass")
    if not expected_accuracy:
        return _of_positives(rows, eta, x, log_weights, members, reduction)
    losses = torch.where(some, -(-each_row(rows, eta, x, log_weights)).exp(), 0.0)
    return losses.sum() / some.sum().clamp(min=1) if reduction == "mean" else reduced(call, losses, reduction)


@without_autocast
def skip_gram(
    center: Float[Tensor, "m d"],
    contexts: Float[Tensor, "n d"],
    *,
    positive: Int[Tensor, " m"],
    negatives: Int[Tensor, "m k"] | Int[Tensor, " k"] | None = None,
    temperature: Temperature = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Skip-gram: predict the context of a center word from the vectors of all contexts.   [mikolov13]

        loss_i = -log [ exp(s_i+) / sum_j exp(s_ij) ]                         all contexts: info_nce
        loss_i = -log sigmoid(s_i+) - sum_{k in negatives} log sigmoid(-s_ik)    negative sampling

    Denominator: all contexts, including the positive. Negative sampling has no denominator: it is nce with noise of
    density 1/k, and its logits converge to log p(context | word) - log noise(context) - log k.
    """
    names = ("center", "contexts")
    if negatives is None:
        options: Any = {"positive": positive, "temperature": temperature, "call": "skip_gram", "names": names}
        return Likelihood(center, contexts, **options).loss(reduction)
    positive_logit, negative_logits = _sampled("skip_gram", center, contexts, temperature, positive, negatives, names)
    return reduced("skip_gram", softplus(-positive_logit) + softplus(negative_logits).sum(-1), reduction)


@without_autocast
def nce(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    *,
    positive: Int[Tensor, " m"],
    negatives: Int[Tensor, "m k"] | Int[Tensor, " k"],
    noise: Float[Tensor, " n"],
    log_normalizer: float | Float[Tensor, ""] | Float[Tensor, " m"] = 0.0,
    temperature: Temperature = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Noise-contrastive estimation: logistic regression of data against noise.   [gutmann10]

        D_j    = s_j - log_normalizer - log k - noise_j
        loss_i = -log sigmoid(D_+) - sum_{j in negatives} log sigmoid(-D_j)

    Denominator: none; each candidate is compared with k times its known noise probability.

    Args:
        negatives: indices of negatives, [m, k] or the same [k] for all anchors.
        noise: log probability with which each candidate is drawn as a negative.
        log_normalizer: parameter that the loss drives to G(eta), one for all anchors or one for each.
    """
    positive_logit, negative_logits = _sampled("nce", anchor, candidates, temperature, positive, negatives)
    noise = _log_noise("nce", noise, candidates)
    offset = torch.as_tensor(log_normalizer, dtype=positive_logit.dtype, device=positive_logit.device).unsqueeze(-1)
    offset = offset + math.log(negative_logits.shape[-1])
    data = positive_logit - offset.squeeze(-1) - noise[positive]
    fake = negative_logits - offset - noise[negatives]
    return reduced("nce", softplus(-data) + softplus(fake).sum(-1), reduction)


@without_autocast
def ranking_nce(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    *,
    positive: Int[Tensor, " m"],
    negatives: Int[Tensor, "m k"] | Int[Tensor, " k"],
    noise: Float[Tensor, " n"],
    temperature: Temperature = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Ranking NCE: the probability of the positive among its k negatives, corrected for the noise.   [ma18]

        loss_i = -log [ exp(s_+ - noise_+) / (exp(s_+ - noise_+) + sum_{j in negatives} exp(s_j - noise_j)) ]

    Denominator: the positive and its negatives. The normaliser cancels and need not be learned.
    """
    positive_logit, negative_logits = _sampled("ranking_nce", anchor, candidates, temperature, positive, negatives)
    noise = _log_noise("ranking_nce", noise, candidates)
    data, fake = positive_logit - noise[positive], negative_logits - noise[negatives]
    return reduced("ranking_nce", softplus(fake.logsumexp(-1) - data), reduction)


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
    group: "ProcessGroup | None" = None,
    reduction: str = "mean",
) -> Tensor:
    """SigLIP loss: binary classification of every pair with a sigmoid.   [zhai23b]

        loss_i = -log sigmoid(s_i+ + offset) - sum_{j != +} log sigmoid(-s_ij - offset)

    Denominator: none. The loss is a sum over candidates and a mean over anchors. `ids` exclude false negatives and
    `group` gathers the candidates of all processes, as in info_nce.
    """
    call = "siglip"
    check_choice(call, "reduction", reduction, REDUCTIONS)
    if normalize:
        check_vectors(call, anchor=anchor, candidates=candidates)
        anchor, candidates = unit(wide(anchor)), unit(wide(candidates))
    options: Any = {"temperature": temperature, "positive": positive, "ids": ids, "call": call}
    if group is not None:
        candidates = _gathered(anchor, candidates, group, options)
        positive = options["positive"]
    family = Likelihood(anchor, candidates, **options)
    eta, x = family.eta, family.candidates
    shift = torch.as_tensor(offset, dtype=eta.dtype, device=eta.device).expand(x.shape[0])
    pairs_of_ids = family.ids if isinstance(family.ids, tuple) else None
    rows = Sigmoids(eta.shape[0], positive, VisiblePairs(labels=pairs_of_ids, same=False))
    if reduction == "none":
        return each_row(rows, eta, x, shift)
    if group is not None and reduction == "mean":
        return mean_over_processes(sum_of_rows(rows, eta, x, shift, 1.0), eta.shape[0], eta.device, group)
    return sum_of_rows(rows, eta, x, shift, 1 / eta.shape[0] if reduction == "mean" else 1.0)


@without_autocast
def proxy_loss(
    anchor: Float[Tensor, "m d"],
    proxies: Float[Tensor, "k d"],
    labels: Int[Tensor, " m"],
    *,
    temperature: Temperature = 1.0,
    margin: float = 0.0,
    decoupled: bool = False,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Proxy loss: info_nce with one candidate (proxy) for each class.   [movshovitz17]

        loss_i = -log [ exp<a_i, p_label> / sum_k exp<a_i, p_k> ],   logits over temperature

    Denominator: all proxies, including that of the label; decoupled=True excludes it, as in the original paper. On the
    unit sphere -|a - p|² differs from 2 <a, p> by a constant, so squared distances correspond to temperature 1/2. With
    normalize=True and a margin it is the large-margin cosine loss (CosFace, AM-Softmax) [wang18].
    """
    call = "proxy_loss"
    check_vectors(call, anchor=anchor, proxies=proxies)
    check_integers(call, "labels", labels, tuple(anchor.shape[:1]), anchor)
    check_indices(call, "labels", labels, proxies.shape[0], "proxies")
    options: Any = {"positive": labels, "temperature": temperature, "call": call, "names": ("anchor", "proxies")}
    return _one_direction(anchor, proxies, normalize, margin, decoupled, reduction, **options)


@without_autocast
def triplet_loss(
    anchor: Float[Tensor, "m d"],
    positive: Float[Tensor, "m d"],
    negative: Float[Tensor, "m d"],
    *,
    margin: float = 0.0,
    similarity: str = "squared_distance",
    temperature: Temperature | None = None,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Triplet loss max(0, margin + |a - x_+|² - |a - x_-|²), the limit T -> 0 of the loss below.   [schroff15]

        loss_i = T log(1 + exp((margin + s_- - s_+) / T)),   s = -|a - x|², at temperature T

    Denominator: the positive and one negative. temperature=None is the limit.

    Args:
        similarity: s is "squared_distance" -|a - x|², "distance" -|a - x| or "dot" <a, x>. On the unit sphere squared
            distances are 2 - 2 <a, x>, so margin and loss of dot products are half of those of squared distances.
    """
    check_vectors("triplet_loss", anchor=anchor, positive=positive, negative=negative)
    check_choice("triplet_loss", "similarity", similarity, ("dot", "squared_distance", "distance"))
    for name, vectors in (("positive", positive), ("negative", negative)):
        check_rows("triplet_loss", name, vectors, anchor.shape[0], "anchor")
    a, x, y = (unit(t) if normalize else t for t in promoted(anchor, positive, negative))
    if similarity == "dot":
        violation = margin + (a * (y - x)).sum(-1)
    elif similarity == "squared_distance":
        violation = margin + (a - x).square().sum(-1) - (a - y).square().sum(-1)
    else:
        violation = margin + _length(a - x) - _length(a - y)
    if temperature is None:
        return reduced("triplet_loss", violation.clamp(min=0.0), reduction)
    check_temperature("triplet_loss", temperature, anchor)
    return reduced("triplet_loss", temperature * softplus(violation / temperature), reduction)


@without_autocast
def alignment_loss(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    exponent: float = 2.0,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Alignment loss |a_i - b_i|^exponent, the distance of positive pairs.   [wang20]

    On the unit sphere with exponent 2 it is 2 - 2 <a_i, b_i>, the attractive term of info_nce. Equal vectors have
    gradient 0.
    """
    check_vectors("alignment_loss", a=a, b=b)
    check_rows("alignment_loss", "b", b, a.shape[0], "a")
    a, b = (unit(t) if normalize else t for t in promoted(a, b))
    return reduced("alignment_loss", _length(a - b, exponent), reduction)


@without_autocast
def uniformity_loss(
    vectors: Float[Tensor, "m d"], *, sharpness: float = 2.0, normalize: bool = False
) -> Float[Tensor, ""]:
    """Uniformity loss: log of the mean of exp(-sharpness |x_i - x_j|²) over all pairs.   [wang20]

    The repulsive term of info_nce. The sum is over all other vectors, with eta = 2 sharpness x_i and log weights
    -sharpness |x_j|².
    """
    check_vectors("uniformity_loss", vectors=vectors)
    m = vectors.shape[0]
    if m < 2:
        remedy = "Pass a larger batch."
        raise InputValueError(
            "uniformity_loss", "vectors", f"vectors must have at least two rows, got shape {shape_of(vectors)}", remedy
        )
    x = unit(wide(vectors)) if normalize else wide(vectors)
    x = x - x.detach().mean(0)
    log_weights = -sharpness * x.square().sum(-1)
    G = log_sum_exp(2 * sharpness * x, x, log_weights, VisiblePairs(itself=False))
    return (G + log_weights).logsumexp(0) - math.log(m) - math.log(m - 1)


# Shared functions ----------------------------------------------------------------------------------------------------


def _check_some(call: str, argument: str, some: Bool[Tensor, " m"], problem: str, *, every: bool = False) -> None:
    """Check that some anchor (or every anchor) has vectors to compare with."""
    if readable(some) and not bool(some.all() if every else some.any()):
        raise InputValueError(call, argument, problem, "Use a larger batch, or exclude fewer pairs.")


def _length(x: Float[Tensor, "m d"], exponent: float = 1.0) -> Float[Tensor, " m"]:
    """|x|^exponent with gradient 0 at x = 0, where that of an exponent below 2 does not exist."""
    square = x.square().sum(-1)
    if exponent == 2:
        return square
    some = square > 0
    return square.where(some, 1.0).pow(exponent / 2).where(some, 0.0 if exponent > 0 else 1.0)


def _members(labels: Int[Tensor, " m"], of_candidates: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
    """Number of candidates with the label of each vector, in linear memory."""
    ordered = of_candidates.sort().values
    first, last = (torch.searchsorted(ordered, labels, right=right) for right in (False, True))
    return last - first


def _sampled(
    call: str,
    anchor: Tensor,
    candidates: Tensor,
    temperature: Temperature,
    positive: Tensor,
    negatives: Tensor,
    names: tuple[str, str] = ("anchor", "candidates"),
) -> tuple[Tensor, Tensor]:
    """Logits of the positives [m] and of the negatives [m, k]."""
    family = Likelihood(anchor, candidates, temperature=temperature, positive=positive, call=call, names=names)
    m = anchor.shape[0]
    if not isinstance(negatives, Tensor) or negatives.ndim not in (1, 2) or negatives.shape[-1] == 0:
        fact = f"shape {shape_of(negatives)}" if isinstance(negatives, Tensor) else type(negatives).__name__
        remedy = "Pass k indices of candidates for each anchor, or k for all anchors."
        raise InputValueError(call, "negatives", f"negatives must be [{m}, k] or [k] with k > 0, got {fact}", remedy)
    shape = (m, negatives.shape[-1]) if negatives.ndim == 2 else tuple(negatives.shape)
    check_integers(call, "negatives", negatives, shape, anchor)
    check_indices(call, "negatives", negatives, candidates.shape[0])
    eta, drawn = family.eta, family.candidates[negatives]
    # A positive that is also drawn as a negative has the same logit twice, so both are sums of the same kind.
    negative_logits = products(eta, drawn) if negatives.ndim == 1 else (eta.unsqueeze(1) * drawn).sum(-1)
    return (eta * family.chosen()).sum(-1), negative_logits


def _log_noise(call: str, noise: Tensor, candidates: Tensor) -> Tensor:
    """The noise as float32 or float64, checked to have one log probability for each candidate."""
    if not isinstance(noise, Tensor) or tuple(noise.shape) != tuple(candidates.shape[:1]):
        fact = f"shape {shape_of(noise)}" if isinstance(noise, Tensor) else type(noise).__name__
        remedy = "Pass the log probability of each candidate under the noise."
        raise InputValueError(call, "noise", f"noise must have shape ({candidates.shape[0]},), got {fact}", remedy)
    check_device(call, candidates=candidates, noise=noise)
    return wide(noise)
