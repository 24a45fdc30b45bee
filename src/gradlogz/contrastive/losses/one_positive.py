"""Losses with one positive for each anchor: InfoNCE, N-pair and proxies.

Read next: ../likelihood.py, two_views.py (both directions).
"""

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import distributed

from ..._autocast import without_autocast
from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Int, Tensor
from ...kernels.losses.pairwise_log_sum_exp import log_add
from ..distributed import announces_errors, check_started, gathered, mean_over_processes
from ..likelihood import Likelihood
from ..ring import behind_on_ring, check_ring
from ..validation import (
    REDUCTIONS,
    Ids,
    check_choice,
    check_indices,
    check_integers,
    check_vectors,
    promoted,
    reduced,
    unit,
)
from .options import InfoNCEOptions, Temperature

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@announces_errors
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
    ring: bool = False,
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
        ring: pass the candidates around a ring of the processes of `group` instead of gathering them: memory is linear
            in the batch of one process, time is that of one more product. First derivatives only.
        normalize: use cosine similarities; the zero vector has similarity 0 with every vector.
        reduction: "mean", "sum" or "none".

    An anchor without negatives has loss 0 and no gradient.

    >>> import torch
    >>> a, b = torch.randn(4, 8), torch.randn(4, 8)
    >>> torch.allclose(info_nce(a, b), torch.nn.functional.cross_entropy(a @ b.mT, torch.arange(4)))
    True
    """
    return one_direction(
        anchor,
        candidates,
        normalize,
        margin,
        decoupled,
        reduction,
        group,
        ring,
        hard_negatives,
        call="info_nce",
        positive=positive,
        temperature=temperature,
        log_weights=log_weights,
        ids=ids,
        mask=mask,
        bias=bias,
        precision=precision,
    )


def one_direction(
    anchor: Tensor,
    candidates: Tensor,
    normalize: bool,
    margin: float,
    decoupled: bool,
    reduction: str,
    group: "ProcessGroup | None" = None,
    ring: bool = False,
    hard_negatives: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """info_nce in the name of another loss."""
    check_ring(options["call"], ring, group)
    if normalize:
        call, names = options["call"], options.get("names", ("anchor", "candidates"))
        positive = options.get("positive")
        outside = positive if isinstance(positive, Tensor) and positive.is_floating_point() else None
        vectors = {names[0]: anchor, names[1]: candidates, "positive": outside}
        check_vectors(call, may_be_empty=None if outside is None else names[1], **vectors)
        anchor, candidates, *rest = (unit(t) for t in promoted(*(t for t in vectors.values() if t is not None)))
        if outside is not None:
            options["positive"] = rest[0]
    if group is not None and not ring:
        candidates = gathered(anchor, candidates, group, options)
    family = Likelihood(anchor, candidates, **options)
    check_choice(family.call, "reduction", reduction, REDUCTIONS)
    part = "sum" if group is not None and reduction == "mean" else reduction
    if hard_negatives is None and not ring:
        loss = family.loss(part, decoupled=decoupled, margin=margin)
    else:
        behind = behind_on_ring(family, group) if ring else -family.log_odds()
        if hard_negatives is not None:
            behind = log_add(behind, _hard_negatives_behind(family, hard_negatives, normalize))
        loss = family.loss_of_log_odds(-behind, part, decoupled=decoupled, margin=margin)
    return loss if part == reduction else mean_over_processes(loss, anchor.shape[0], anchor.device, group)


def _hard_negatives_behind(
    family: Likelihood, hard_negatives: Float[Tensor, "m k d"], normalize: bool
) -> Float[Tensor, " m"]:
    """Log-sum-exp of further negatives of single anchors, minus the logit of the positive."""
    call, (m, d) = family.call, family.anchor.shape
    if hard_negatives.ndim != 3 or (hard_negatives.shape[0], hard_negatives.shape[2]) != (m, d):
        problem = f"hard_negatives must be [{m}, k, {d}], got shape {shape_of(hard_negatives)}"
        raise InputValueError(call, "hard_negatives", problem, "Pass k vectors for each anchor.")
    x = hard_negatives.to(family.anchor.dtype)
    x = unit(x.flatten(0, 1)).view_as(x) if normalize else x
    logits = (family.eta.unsqueeze(1) * (x - family.chosen().unsqueeze(1))).sum(-1)
    weight = family.weight_of_positive()
    return (logits if weight is None else logits - weight.unsqueeze(-1)).logsumexp(-1)


@announces_errors
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
    return one_direction(anchor, candidates, normalize, margin, decoupled, reduction, call="n_pair", **rest)


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
    return one_direction(anchor, proxies, normalize, margin, decoupled, reduction, **options)


@without_autocast
def ring_info_nce(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "m d"],
    *,
    reduction: str = "mean",
    **options: Unpack[InfoNCEOptions],
) -> Tensor:
    """info_nce over the candidates of all processes, without gathering them: info_nce(..., group=group, ring=True).

    Denominator: as in info_nce, over the global batch. The mean is that over the anchors of this process.
    """
    call = "ring_info_nce"
    check_started(call)
    rest: Any = {**options}
    normalize, margin, decoupled = rest.pop("normalize", False), rest.pop("margin", 0.0), rest.pop("decoupled", False)
    everyone = rest.pop("group", None) or distributed.group.WORLD
    rest |= {"reduction": "none", "group": everyone, "ring": True, "call": call}
    losses = announces_errors(one_direction)(anchor, candidates, normalize, margin, decoupled, **rest)
    return reduced(call, losses, reduction)
