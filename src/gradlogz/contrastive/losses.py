"""Contrastive losses, each a few lines on one likelihood.

    -log p(+) = G(eta) - <eta, x_+>,   eta = anchor / temperature,   G = log sum of exp<eta, x> over the denominator

    loss                                    anchors     the denominator sums over
    info_nce                [oord18]        a           all candidates, the positive included
    n_pair                  [sohn16]        a           the same
    clip_loss               [radford21]     a, then b   the same; half of each direction
    nt_xent                 [chen20]        a and b     all others of both views: the positive included, the anchor not
    supervised_contrastive  [khosla20]      every one   all others, all positives included
    nca                     [goldberger04]  every one   all others; -log of what falls on the own class
    skip_gram               [mikolov13]     center      all contexts; or, sampled, each one by itself
    nce                     [gutmann10]     a           each candidate by itself, against known noise
    ranking_nce             [ma18]          a           the positive and its own negatives, noise divided out
    siglip                  [zhai23b]       a           each pair by itself
    proxy_loss              [movshovitz17]  a           all proxies
    triplet_loss            [schroff15]     a           the positive and one negative, at temperature 0
    alignment_loss          [wang20]        a           nothing
    uniformity_loss         [wang20]        every one   all others, with the mean over anchors inside the logarithm

Logits are <anchor, candidate> / temperature, with no normalisation unless normalize=True. The positive of anchor i is
candidate i unless `positive` says otherwise. Memory is linear in the batch.

Read next: likelihood.py; distributed.py and queue.py, other places that candidates come from.
"""

import math
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
from torch.nn.functional import logsigmoid

from .._errors import InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor
from ..kernels.losses.pairwise_log_sum_exp import VisiblePairs, log_sum_exp, pairs
from .likelihood import Labels, Likelihood
from .validation import (
    check_alike,
    check_choice,
    check_indices,
    check_integers,
    check_rows,
    check_temperature,
    check_vectors,
    readable,
    reduced,
    unit,
    wide,
)

Temperature = float | Float[Tensor, ""]


class InfoNCEOptions(TypedDict, total=False):
    """Arguments that `n_pair` passes on to `info_nce`."""

    temperature: Temperature
    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None
    log_weights: Float[Tensor, " n"] | None
    labels: Labels | None
    mask: Bool[Tensor, "m n"] | None
    decoupled: bool
    normalize: bool
    precision: torch.dtype | None


class LossOptions(TypedDict, total=False):
    """Arguments of the losses that `Contrastive` passes on: those of the one that it holds."""

    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None
    negatives: Int[Tensor, "m k"] | Int[Tensor, " k"] | None
    log_weights: Float[Tensor, " n"] | None
    labels: Labels | None
    mask: Bool[Tensor, "m n"] | None
    noise: Float[Tensor, " n"]
    log_normalizer: float | Float[Tensor, ""] | Float[Tensor, " m"]
    offset: float | Float[Tensor, ""]
    margin: float
    denominator: str
    mean_inside_log: bool
    expected_accuracy: bool
    decoupled: bool
    normalize: bool
    precision: torch.dtype | None
    reduction: str


def info_nce(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    *,
    temperature: Temperature = 1.0,
    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None = None,
    log_weights: Float[Tensor, " n"] | None = None,
    labels: Labels | None = None,
    mask: Bool[Tensor, "m n"] | None = None,
    decoupled: bool = False,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    reduction: str = "mean",
) -> Tensor:
    """-log of the probability of the positive among all candidates.   [oord18]

        loss_i = -log [ w_+ exp(s_i+) / sum_j w_j exp(s_ij) ],   s_ij = <a_i, x_j> / temperature

    Denominator: every candidate, the positive included; one direction. Vectors as `positive` are a candidate more for
    their anchor alone. With decoupled=True the positive leaves the denominator [yeh22]; the loss may be negative then.

    `positive`, `labels`, `mask` and `precision` are as in Likelihood.

    Args:
        log_weights: likewise; for candidates sampled with probability q_j, log_weights = -log q_j makes the sum an
            unbiased estimate of that over all.
        normalize: cosine similarity; the zero vector has similarity 0 to everything.
        reduction: "mean", "sum" or "none".

    An anchor all of whose negatives are hidden has loss 0, and no gradient.

    >>> import torch
    >>> a, b = torch.randn(4, 8), torch.randn(4, 8)
    >>> torch.allclose(info_nce(a, b), torch.nn.functional.cross_entropy(a @ b.mT, torch.arange(4)))
    True
    """
    if normalize:
        check_vectors("info_nce", anchor=anchor, candidates=candidates)
        anchor, candidates = unit(wide(anchor)), unit(wide(candidates))
        positive = unit(wide(positive)) if positive is not None and positive.is_floating_point() else positive
    options: Any = {"positive": positive, "log_weights": log_weights, "labels": labels, "mask": mask}
    options |= {"temperature": temperature, "precision": precision, "call": "info_nce"}
    family = Likelihood(anchor, candidates, **options)
    return reduced("info_nce", _loss("info_nce", family, decoupled), reduction)


def n_pair(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "m d"],
    *,
    reduction: str = "mean",
    **options: Unpack[InfoNCEOptions],
) -> Tensor:
    """log(1 + sum_{j != i} exp(<a_i, x_j> - <a_i, x_i>)): info_nce at temperature 1.   [sohn16, Eq. 6]

    Denominator: the positives of all anchors, its own included; one direction. Options are those of info_nce.
    """
    return info_nce(anchor, candidates, reduction=reduction, **options)


def clip_loss(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    temperature: Temperature = 1.0,
    log_weights: Float[Tensor, " m"] | None = None,
    labels: Int[Tensor, " m"] | None = None,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Two towers, each asked about the other: half of info_nce(a, b) and half of info_nce(b, a).   [radford21]

    Denominator: all of the other tower, the positive included; both directions. What a temperature is here, CLIP
    calls exp(-logit scale).
    """
    if normalize:
        check_vectors("clip_loss", a=a, b=b)
        a, b = unit(wide(a)), unit(wide(b))
    options: Any = {"temperature": temperature, "log_weights": log_weights, "labels": labels}
    options |= {"precision": precision, "call": "clip_loss"}
    one, other = Likelihood(a, b, **options), Likelihood(b, a, **options)
    return reduced("clip_loss", -(one.log_probability() + other.log_probability()) / 2, reduction)


def nt_xent(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    temperature: Temperature = 1.0,
    labels: Int[Tensor, " m"] | None = None,
    decoupled: bool = False,
    normalize: bool = False,
    precision: torch.dtype | None = None,
    reduction: str = "mean",
) -> Tensor:
    """SimCLR's loss: every view of a pair looks for the other among both views of the whole batch.   [chen20, Eq. 1]

        loss_i = -log [ exp(s_i+) / sum_{j != i} exp(s_ij) ],   i and j in all 2m views

    Denominator: all 2m - 1 others, the positive included, the anchor itself not; both directions. decoupled=True takes
    the positive out too [yeh22]. `labels`, one for each pair, hide views of other pairs with the same label.
    "none" gives 2m losses, those of a first. One pair alone has loss 0.
    """
    check_vectors("nt_xent", a=a, b=b)
    check_rows("nt_xent", "b", b, a.shape[0], "a")
    z = torch.cat([unit(wide(a)), unit(wide(b))] if normalize else [a, b])
    both = None
    if labels is not None:
        check_integers("nt_xent", "labels", labels, (a.shape[0],), a)
        both = torch.cat([labels, labels])
    positive = torch.arange(z.shape[0], device=z.device).roll(a.shape[0])
    options: Any = {"positive": positive, "exclude_self": True, "labels": both}
    options |= {"temperature": temperature, "precision": precision, "call": "nt_xent"}
    return reduced("nt_xent", _loss("nt_xent", Likelihood(z, z, **options), decoupled), reduction)


def supervised_contrastive(
    vectors: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    *,
    temperature: Temperature = 1.0,
    mean_inside_log: bool = False,
    denominator: str = "all",
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Every other vector of the same label is a positive.   [khosla20]

        loss_i = -1/|P_i| sum_{p in P_i} log [ exp(s_ip) / sum_{j != i} exp(s_ij) ]         L_out, Eq. 2
        loss_i = -log [ 1/|P_i| sum_{p in P_i} exp(s_ip) / sum_{j != i} exp(s_ij) ]         L_in, Eq. 3

    With mean_inside_log=True the mean over positives is inside the logarithm, L_in; otherwise outside, L_out.
    Denominator: all others, all positives included, the anchor itself not. With denominator="pair" it is the one
    positive and all vectors of other labels, as in pytorch-metric-learning's NTXentLoss.
    Vectors whose label is theirs alone have no loss and are left out of the mean; "none" gives them 0. "pairs", a
    reduction of this loss only, averages over pairs (i, p): anchors of large classes count more.
    """
    call = "supervised_contrastive"
    check_vectors(call, vectors=vectors)
    check_integers(call, "labels", labels, (vectors.shape[0],), vectors)
    check_temperature(call, temperature, vectors)
    check_choice(call, "denominator", denominator, ("all", "pair"))
    check_choice(call, "reduction", reduction, ("mean", "sum", "none", "pairs"))
    if mean_inside_log and denominator == "pair":
        condition, remedy = 'denominator must be "all" where mean_inside_log=True', "Leave one of them out."
        raise InputValueError(call, "denominator", f'{condition}, got "pair"', remedy)
    z = unit(wide(vectors)) if normalize else wide(vectors)
    x = z - z.detach().mean(0)  # candidates may move together, and digits are saved
    members, positives = _positives(x, labels)
    some = members > 0
    _check_some(call, "labels", some, "labels must name at least one pair", "a label for each vector alone")
    count = members.clamp(min=1)
    family = Likelihood(z, x, temperature=temperature, exclude_self=True, call=call)
    eta = family.eta
    if mean_inside_log:
        losses = members.to(z.dtype).clamp(min=1).log() - family.log_mass(labels)
    elif denominator == "all":
        losses = family.log_normalizer() - (eta * positives).sum(-1) / count
    else:
        negatives = log_sum_exp(eta, x, None, VisiblePairs(itself=False, labels=(labels, labels), same=False))
        losses = (
            pairs(_sum_of_softplus, eta, x, None, VisiblePairs(itself=False, labels=(labels, labels)), negatives)
            / count
        )
    losses = torch.where(some, losses, 0.0)
    if reduction == "mean":
        return losses.sum() / some.sum().clamp(min=1)
    return (
        (losses * members).sum() / members.sum().clamp(min=1)
        if reduction == "pairs"
        else reduced(call, losses, reduction)
    )


def nca(
    vectors: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    *,
    temperature: Temperature = 1.0,
    expected_accuracy: bool = False,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """-log of the probability that a vector's neighbour is of its class.   [goldberger04; theory E21]

        p_ij = exp(-|x_i - x_j|²/T) / sum_{k != i} exp(-|x_i - x_k|²/T),   loss_i = -log sum_{j in class of i} p_ij

    Denominator: all others, of every class, the vector itself not. As a family: eta = 2 x_i / T, log weights -|x_j|²/T.
    With expected_accuracy=True the loss is minus the probability itself: the mean is minus the expected accuracy.
    Vectors whose label is theirs alone have no neighbour: they are left out of the mean, "none" gives them 0.
    """
    check_vectors("nca", vectors=vectors)
    check_integers("nca", "labels", labels, (vectors.shape[0],), vectors)
    check_temperature("nca", temperature, vectors)
    check_choice("nca", "reduction", reduction, ("mean", "sum", "none"))
    x = unit(wide(vectors)) if normalize else wide(vectors)
    members, _ = _positives(x, labels)
    some = members > 0
    _check_some("nca", "labels", some, "labels must name at least one pair", "a label for each vector alone")
    x = x - x.detach().mean(0)  # distances do not change, and their digits are saved
    log_weights = -x.square().sum(-1) / temperature
    family = Likelihood(x, x, temperature=temperature / 2, log_weights=log_weights, exclude_self=True, call="nca")
    log_mass = family.log_mass(labels)
    losses = torch.where(some, -log_mass.exp() if expected_accuracy else -log_mass, 0.0)
    return losses.sum() / some.sum().clamp(min=1) if reduction == "mean" else reduced("nca", losses, reduction)


def skip_gram(
    center: Float[Tensor, "m d"],
    contexts: Float[Tensor, "n d"],
    *,
    positive: Int[Tensor, " m"],
    negatives: Int[Tensor, "m k"] | Int[Tensor, " k"] | None = None,
    temperature: Temperature = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """The word beside a word, from the vectors of all contexts.   [mikolov13]

        loss_i = -log [ exp(s_i+) / sum_j exp(s_ij) ]                         all contexts: info_nce
        loss_i = -log sigmoid(s_i+) - sum_{k in negatives} log sigmoid(-s_ik)    negative sampling

    Denominator: all contexts, the positive included. Negative sampling has none: it is nce with a noise of density 1/k,
    and its logits settle at log p(context | word) - log noise(context) - log k.
    """
    if negatives is None:
        return info_nce(center, contexts, positive=positive, temperature=temperature, reduction=reduction)
    of_positive, of_negatives = _sampled("skip_gram", center, contexts, temperature, positive, negatives)
    return reduced("skip_gram", _softplus(-of_positive) + _softplus(of_negatives).sum(-1), reduction)


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
    """Is this data or noise? A logistic regression that learns the normaliser too.   [gutmann10]

        D_j    = s_j - log_normalizer - log k - noise_j
        loss_i = -log sigmoid(D_+) - sum_{j in negatives} log sigmoid(-D_j)

    Denominator: none; the tilt of each candidate is compared with k times the known noise. log_normalizer is a
    parameter that the loss itself drives to G(eta), one for all or one for each anchor.

    Args:
        noise: the log probability with which each candidate is drawn as a negative.
        negatives: k indices for each anchor, or k for all.
    """
    of_positive, of_negatives = _sampled("nce", anchor, candidates, temperature, positive, negatives)
    noise = _log_noise("nce", noise, candidates)
    offset = torch.as_tensor(log_normalizer, dtype=of_positive.dtype, device=of_positive.device).unsqueeze(-1)
    offset = offset + math.log(of_negatives.shape[-1])
    data = of_positive - offset.squeeze(-1) - noise[positive]
    fake = of_negatives - offset - noise[negatives]
    return reduced("nce", _softplus(-data) + _softplus(fake).sum(-1), reduction)


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
    """Which of these is data? The positive among its own k negatives, with the noise divided out.   [ma18]

        loss_i = -log [ exp(s_+ - noise_+) / (exp(s_+ - noise_+) + sum_{j in negatives} exp(s_j - noise_j)) ]

    Denominator: the positive and its negatives. No normaliser has to be learned: it cancels.
    """
    of_positive, of_negatives = _sampled("ranking_nce", anchor, candidates, temperature, positive, negatives)
    noise = _log_noise("ranking_nce", noise, candidates)
    data, fake = of_positive - noise[positive], of_negatives - noise[negatives]
    return reduced("ranking_nce", _softplus(fake.logsumexp(-1) - data), reduction)


def siglip(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    *,
    temperature: Temperature = 1.0,
    offset: float | Float[Tensor, ""] = 0.0,
    positive: Int[Tensor, " m"] | None = None,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """SigLIP's loss, a sigmoid for every pair by itself: belongs together, or not.   [zhai23b]

        loss_i = -log sigmoid(s_i+ + offset) - sum_{j != +} log sigmoid(-s_ij - offset)

    Denominator: none. The mean is over anchors, of sums over candidates.
    """
    if normalize:
        check_vectors("siglip", anchor=anchor, candidates=candidates)
        anchor, candidates = unit(wide(anchor)), unit(wide(candidates))
    family = Likelihood(anchor, candidates, temperature=temperature, positive=positive, call="siglip")
    eta = family.eta
    shift = torch.as_tensor(offset, dtype=eta.dtype, device=eta.device)
    own = (eta * family.chosen()).sum(-1) + shift
    every = pairs(
        lambda s, _: _softplus(s).sum(-1),
        eta,
        family.candidates,
        shift.expand(family.candidates.shape[0]),
        VisiblePairs(),
    )
    # -log sigmoid(s) = softplus(s) - s: the positive is counted as all others are, and then corrected.
    return reduced("siglip", every - own, reduction)


def proxy_loss(
    anchor: Float[Tensor, "m d"],
    proxies: Float[Tensor, "k d"],
    labels: Int[Tensor, " m"],
    *,
    temperature: Temperature = 1.0,
    decoupled: bool = False,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """info_nce with one candidate for each class: the limit in which the vectors of a class are one.   [movshovitz17]

        loss_i = -log [ exp<a_i, p_label> / sum_k exp<a_i, p_k> ],   logits over temperature

    Denominator: all proxies, the one of the label included; decoupled=True leaves it out, as in the first paper. On the
    unit sphere -|a - p|² differs from 2 <a, p> by a constant, so that distances are temperature 1/2.
    """
    check_integers("proxy_loss", "labels", labels, tuple(anchor.shape[:1]), anchor)
    return info_nce(
        anchor,
        proxies,
        positive=labels,
        temperature=temperature,
        decoupled=decoupled,
        normalize=normalize,
        reduction=reduction,
    )


def triplet_loss(
    anchor: Float[Tensor, "m d"],
    positive: Float[Tensor, "m d"],
    negative: Float[Tensor, "m d"],
    *,
    margin: float = 0.0,
    temperature: Temperature | None = None,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """max(0, margin + <a, x_-> - <a, x_+>): T times the loss of two candidates at temperature T -> 0.   [schroff15]

        loss_i = T log(1 + exp((margin + <a, x_-> - <a, x_+>) / T)),   at temperature T

    Denominator: the positive and one negative. None as temperature is the limit. On the unit sphere squared distances
    are 2 - 2 <a, x>: margin and loss are half of theirs.
    """
    check_vectors("triplet_loss", anchor=anchor, positive=positive, negative=negative)
    for name, given in (("positive", positive), ("negative", negative)):
        check_rows("triplet_loss", name, given, anchor.shape[0], "anchor")
    a, x, y = (unit(wide(t)) if normalize else wide(t) for t in (anchor, positive, negative))
    behind = margin + (a * (y - x)).sum(-1)
    if temperature is None:
        return reduced("triplet_loss", behind.clamp(min=0.0), reduction)
    check_temperature("triplet_loss", temperature, anchor)
    return reduced("triplet_loss", temperature * _softplus(behind / temperature), reduction)


def alignment_loss(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    exponent: float = 2.0,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """|a_i - b_i|^exponent: how far positives are apart.   [wang20]

    On the unit sphere, with exponent 2, it is 2 - 2 <a_i, b_i>: what info_nce pulls at.
    """
    check_vectors("alignment_loss", a=a, b=b)
    check_rows("alignment_loss", "b", b, a.shape[0], "a")
    a, b = (unit(wide(t)) if normalize else wide(t) for t in (a, b))
    return reduced("alignment_loss", (a - b).square().sum(-1).pow(exponent / 2), reduction)


def uniformity_loss(
    vectors: Float[Tensor, "m d"], *, sharpness: float = 2.0, normalize: bool = False
) -> Float[Tensor, ""]:
    """log of the mean of exp(-sharpness |x_i - x_j|²) over all pairs: what info_nce pushes at.   [wang20]

    Sums over all others, the vector itself not: eta = 2 sharpness x_i, log weights -sharpness |x_j|².
    """
    check_vectors("uniformity_loss", vectors=vectors)
    m = vectors.shape[0]
    if m < 2:
        remedy = "Pass a larger batch."
        raise InputValueError(
            "uniformity_loss", "vectors", f"vectors must be at least two, got shape {shape_of(vectors)}", remedy
        )
    x = unit(wide(vectors)) if normalize else wide(vectors)
    x = x - x.detach().mean(0)
    log_weights = -sharpness * x.square().sum(-1)
    G = log_sum_exp(2 * sharpness * x, x, log_weights, VisiblePairs(itself=False))
    return (G + log_weights).logsumexp(0) - math.log(m) - math.log(m - 1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "info_nce": info_nce,
    "clip_loss": clip_loss,
    "nt_xent": nt_xent,
    "supervised_contrastive": supervised_contrastive,
    "nca": nca,
    "skip_gram": skip_gram,
    "nce": nce,
    "ranking_nce": ranking_nce,
    "siglip": siglip,
    "proxy_loss": proxy_loss,
    "triplet_loss": triplet_loss,
}


class Contrastive(torch.nn.Module):
    """A loss with its temperature, which may be learned: exp of a parameter, and so never 0.

    Args:
        loss: the name of one of the losses of this chapter that has a temperature, or a function like them.
        temperature: where it begins.
        learn_temperature: make its logarithm a parameter.
        minimum: a bound below which it is not used; CLIP's logit scale of at most 100 is a minimum of 0.01.
        options: arguments of every call.

    >>> import torch
    >>> loss = Contrastive("clip_loss", temperature=0.07, learn_temperature=True, minimum=0.01, normalize=True)
    >>> loss(torch.randn(4, 8), torch.randn(4, 8)).backward()
    >>> loss.log_temperature.grad is not None
    True
    """

    def __init__(
        self,
        loss: str | Callable[..., Tensor],
        temperature: float = 1.0,
        learn_temperature: bool = False,
        *,
        minimum: float = 0.0,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__()
        if isinstance(loss, str):
            check_choice("Contrastive", "loss", loss, tuple(LOSSES))
        if not 0 < temperature < math.inf:
            remedy = "Pass a positive number; small ones sharpen."
            raise InputValueError(
                "Contrastive", "temperature", f"temperature must be above 0 and finite, got {temperature}", remedy
            )
        self.loss, self.minimum = LOSSES[loss] if isinstance(loss, str) else loss, minimum
        self.options: dict[str, Any] = {**options}
        logarithm = torch.tensor(math.log(temperature))
        if learn_temperature:
            self.log_temperature = torch.nn.Parameter(logarithm)
        else:
            self.register_buffer("log_temperature", logarithm)

    @property
    def temperature(self) -> Float[Tensor, ""]:
        """What is used now."""
        return self.log_temperature.exp().clamp(min=self.minimum)

    def forward(self, *operands: Tensor, **arguments: Unpack[LossOptions]) -> Tensor:
        """The loss of these operands."""
        return self.loss(*operands, temperature=self.temperature, **self.options, **arguments)

    def extra_repr(self) -> str:
        learned = isinstance(self.log_temperature, torch.nn.Parameter)
        return f"{getattr(self.loss, '__name__', self.loss)}, learn_temperature={learned}"


# What several of them share ------------------------------------------------------------------------------------------


def _loss(call: str, family: Likelihood, decoupled: bool) -> Float[Tensor, " m"]:
    """-log p(+), or against the negatives alone."""
    if not decoupled:
        return -family.log_probability()
    odds = family.log_odds()
    _check_some(
        call,
        "candidates",
        odds.detach() != torch.inf,
        "candidates must leave a negative for each anchor",
        "none for some",
        every=True,
    )
    return -odds


def _check_some(
    call: str, argument: str, some: Bool[Tensor, " m"], condition: str, fact: str, *, every: bool = False
) -> None:
    """Something is left to compare."""
    if readable(some) and not bool(some.all() if every else some.any()):
        raise InputValueError(call, argument, f"{condition}, got {fact}", "Use a larger batch, or hide less.")


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp x); torch's own is x from 20 on, which is 2e-9 too little."""
    return -logsigmoid(-x)


def _positives(x: Float[Tensor, "m d"], labels: Int[Tensor, " m"]) -> tuple[Int[Tensor, " m"], Float[Tensor, "m d"]]:
    """How many others have the label of each vector, and their sum; from sums over classes, in linear time."""
    ordered, order = labels.sort()
    new = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    label = torch.empty_like(order).scatter(0, order, new.long().cumsum(0))
    members = torch.zeros_like(order).index_add(0, label, torch.ones_like(order))
    sums = torch.zeros_like(x).index_add(0, label, x)
    return members[label] - 1, sums[label] - x


def _sum_of_softplus(s: Tensor, _: Tensor, negatives: Tensor) -> Tensor:
    """sum_p log(1 + exp(negatives - s_p)) over the keys that are seen."""
    seen = s > -torch.inf
    return (_softplus(negatives.unsqueeze(-1) - s.masked_fill(~seen, 0.0)) * seen).sum(-1)


def _sampled(
    call: str,
    anchor: Tensor,
    candidates: Tensor,
    temperature: Temperature,
    positive: Tensor,
    negatives: Tensor,
) -> tuple[Tensor, Tensor]:
    """The logits of the positive [m] and of the negatives [m, k]."""
    family = Likelihood(anchor, candidates, temperature=temperature, positive=positive, call=call)
    m = anchor.shape[0]
    if not isinstance(negatives, Tensor) or negatives.ndim not in (1, 2) or negatives.shape[-1] == 0:
        fact = f"shape {shape_of(negatives)}" if isinstance(negatives, Tensor) else type(negatives).__name__
        remedy = "Pass indices of candidates, k for each anchor or k for all."
        raise InputValueError(call, "negatives", f"negatives must be [{m}, k] or [k] with k > 0, got {fact}", remedy)
    shape = (m, negatives.shape[-1]) if negatives.ndim == 2 else tuple(negatives.shape)
    check_integers(call, "negatives", negatives, shape, anchor)
    check_indices(call, "negatives", negatives, candidates.shape[0])
    eta, drawn = family.eta, family.candidates[negatives]
    of_negatives = eta @ drawn.mT if negatives.ndim == 1 else (drawn @ eta.unsqueeze(-1)).squeeze(-1)
    return (eta * family.chosen()).sum(-1), of_negatives


def _log_noise(call: str, noise: Tensor, candidates: Tensor) -> Tensor:
    """One log probability for each candidate."""
    if not isinstance(noise, Tensor) or tuple(noise.shape) != tuple(candidates.shape[:1]):
        fact = f"shape {shape_of(noise)}" if isinstance(noise, Tensor) else type(noise).__name__
        remedy = "Pass the log probability of each candidate under the noise."
        raise InputValueError(call, "noise", f"noise must have shape ({candidates.shape[0]},), got {fact}", remedy)
    check_alike(call, candidates=candidates, noise=noise)
    return wide(noise)
