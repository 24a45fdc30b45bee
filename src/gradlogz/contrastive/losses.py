"""Contrastive losses, each defined by the likelihood of likelihood.py.

    -log p(+) = G(eta) - <eta, x_+>,   eta = anchor / temperature,   G = log sum of exp<eta, x> over the denominator

    loss                                    anchors     the denominator sums over
    info_nce                [oord18]        a           all candidates, including the positive
    n_pair                  [sohn16]        a           all candidates, including the positive
    clip_loss               [radford21]     a and b     all vectors of the other side, including the positive
    nt_xent                 [chen20]        a and b     all other vectors of both views, including the positive
    supervised_contrastive  [khosla20]      all         all other vectors, including all positives
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
    """Keyword arguments that `n_pair` passes on to `info_nce`."""

    temperature: Temperature
    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None
    log_weights: Float[Tensor, " n"] | None
    labels: Labels | None
    mask: Bool[Tensor, "m n"] | None
    decoupled: bool
    normalize: bool
    precision: torch.dtype | None


class LossOptions(TypedDict, total=False):
    """Keyword arguments that `Contrastive` passes on to its loss."""

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
    """InfoNCE: -log of the probability of the positive among all candidates.   [oord18]

        loss_i = -log [ w_+ exp(s_i+) / sum_j w_j exp(s_ij) ],   s_ij = <a_i, x_j> / temperature

    Denominator: all candidates, including the positive; one direction. A vector passed as `positive` is an additional
    candidate of its anchor only.

    `positive`, `labels`, `mask` and `precision` are those of `Likelihood`.

    Args:
        log_weights: log weights of the candidates, as in `Likelihood`; for candidates sampled with probability q_j,
            log_weights = -log q_j makes the denominator an unbiased estimate of the sum over all.
        decoupled: exclude the positive from the denominator [yeh22]; the loss may then be negative.
        normalize: use cosine similarities; the zero vector has similarity 0 with every vector.
        reduction: "mean", "sum" or "none".

    An anchor without negatives has loss 0 and no gradient.

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
    """N-pair loss log(1 + sum_{j != i} exp(<a_i, x_j> - <a_i, x_i>)): info_nce at temperature 1.   [sohn16, Eq. 6]

    Denominator: the positives of all anchors, including its own; one direction. Options are those of info_nce.
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
    """CLIP loss: the average of info_nce(a, b) and info_nce(b, a).   [radford21]

    Denominator: all vectors of the other side, including the positive; both directions. The temperature is
    exp(-logit scale) in CLIP's notation.
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
    """NT-Xent, the loss of SimCLR: the positive of each view is the other view of its pair.   [chen20, Eq. 1]

        loss_i = -log [ exp(s_i+) / sum_{j != i} exp(s_ij) ],   i and j in all 2m views

    Denominator: all 2m - 1 other views, including the positive; both directions. With decoupled=True the positive is
    excluded too [yeh22]. `labels`, one for each pair, exclude views of other pairs with the same label. "none" returns
    2m losses, those of `a` first. A single pair has loss 0.
    """
    check_vectors("nt_xent", a=a, b=b)
    check_rows("nt_xent", "b", b, a.shape[0], "a")
    z = torch.cat([unit(wide(a)), unit(wide(b))] if normalize else [a, b])
    view_labels = None
    if labels is not None:
        check_integers("nt_xent", "labels", labels, (a.shape[0],), a)
        view_labels = torch.cat([labels, labels])
    positive = torch.arange(z.shape[0], device=z.device).roll(a.shape[0])
    options: Any = {"positive": positive, "exclude_self": True, "labels": view_labels}
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
    """Supervised contrastive loss: all other vectors with the same label are positives.   [khosla20]

        loss_i = -1/|P_i| sum_{p in P_i} log [ exp(s_ip) / sum_{j != i} exp(s_ij) ]         L_out, Eq. 2
        loss_i = -log [ 1/|P_i| sum_{p in P_i} exp(s_ip) / sum_{j != i} exp(s_ij) ]         L_in, Eq. 3

    With mean_inside_log=True the mean over positives is inside the logarithm (L_in), otherwise outside (L_out).
    Denominator: all other vectors, including all positives. With denominator="pair" it is the one positive and all
    vectors with other labels, as in pytorch-metric-learning's NTXentLoss.
    Vectors with a unique label are excluded from the mean and have loss 0 under "none". The additional reduction
    "pairs" averages over pairs (i, p), so anchors of large classes have larger weight.
    """
    call = "supervised_contrastive"
    check_vectors(call, vectors=vectors)
    check_integers(call, "labels", labels, (vectors.shape[0],), vectors)
    check_temperature(call, temperature, vectors)
    check_choice(call, "denominator", denominator, ("all", "pair"))
    check_choice(call, "reduction", reduction, ("mean", "sum", "none", "pairs"))
    if mean_inside_log and denominator == "pair":
        problem = 'denominator must be "all" with mean_inside_log=True, got "pair"'
        raise InputValueError(call, "denominator", problem, "Drop one of the two arguments.")
    z = unit(wide(vectors)) if normalize else wide(vectors)
    x = z - z.detach().mean(0)  # invariant to a common shift; reduces rounding errors
    members, positives = _positives(x, labels)
    some = members > 0
    _check_some(call, "labels", some, "labels are all different, so no anchor has a positive")
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
    """NCA: -log of the probability that a stochastic neighbour has the same class.   [goldberger04; theory E21]

        p_ij = exp(-|x_i - x_j|²/T) / sum_{k != i} exp(-|x_i - x_k|²/T),   loss_i = -log sum_{j in class of i} p_ij

    Denominator: all other vectors of every class. As a family: eta = 2 x_i / T, log weights -|x_j|²/T. With
    expected_accuracy=True the loss is minus the probability, so the mean is minus the expected accuracy. Vectors with a
    unique label are excluded from the mean and have loss 0 under "none".
    """
    check_vectors("nca", vectors=vectors)
    check_integers("nca", "labels", labels, (vectors.shape[0],), vectors)
    check_temperature("nca", temperature, vectors)
    check_choice("nca", "reduction", reduction, ("mean", "sum", "none"))
    x = unit(wide(vectors)) if normalize else wide(vectors)
    members, _ = _positives(x, labels)
    some = members > 0
    _check_some("nca", "labels", some, "labels are all different, so no anchor has a positive")
    x = x - x.detach().mean(0)  # distances do not change; reduces rounding errors
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
    """Skip-gram: predict the context of a center word from the vectors of all contexts.   [mikolov13]

        loss_i = -log [ exp(s_i+) / sum_j exp(s_ij) ]                         all contexts: info_nce
        loss_i = -log sigmoid(s_i+) - sum_{k in negatives} log sigmoid(-s_ik)    negative sampling

    Denominator: all contexts, including the positive. Negative sampling has no denominator: it is nce with noise of
    density 1/k, and its logits converge to log p(context | word) - log noise(context) - log k.
    """
    if negatives is None:
        return info_nce(center, contexts, positive=positive, temperature=temperature, reduction=reduction)
    positive_logit, negative_logits = _sampled("skip_gram", center, contexts, temperature, positive, negatives)
    return reduced("skip_gram", _softplus(-positive_logit) + _softplus(negative_logits).sum(-1), reduction)


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
    """Ranking NCE: the probability of the positive among its k negatives, corrected for the noise.   [ma18]

        loss_i = -log [ exp(s_+ - noise_+) / (exp(s_+ - noise_+) + sum_{j in negatives} exp(s_j - noise_j)) ]

    Denominator: the positive and its negatives. The normaliser cancels and need not be learned.
    """
    positive_logit, negative_logits = _sampled("ranking_nce", anchor, candidates, temperature, positive, negatives)
    noise = _log_noise("ranking_nce", noise, candidates)
    data, fake = positive_logit - noise[positive], negative_logits - noise[negatives]
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
    """SigLIP loss: binary classification of every pair with a sigmoid.   [zhai23b]

        loss_i = -log sigmoid(s_i+ + offset) - sum_{j != +} log sigmoid(-s_ij - offset)

    Denominator: none. The loss is a sum over candidates and a mean over anchors.
    """
    if normalize:
        check_vectors("siglip", anchor=anchor, candidates=candidates)
        anchor, candidates = unit(wide(anchor)), unit(wide(candidates))
    family = Likelihood(anchor, candidates, temperature=temperature, positive=positive, call="siglip")
    eta = family.eta
    shift = torch.as_tensor(offset, dtype=eta.dtype, device=eta.device)
    positive_logit = (eta * family.chosen()).sum(-1) + shift
    total = pairs(
        lambda s, _: _softplus(s).sum(-1),
        eta,
        family.candidates,
        shift.expand(family.candidates.shape[0]),
        VisiblePairs(),
    )
    # -log sigmoid(s) = softplus(s) - s: the sum treats the positive as a negative, and the last term corrects it.
    return reduced("siglip", total - positive_logit, reduction)


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
    """Proxy loss: info_nce with one candidate (proxy) for each class.   [movshovitz17]

        loss_i = -log [ exp<a_i, p_label> / sum_k exp<a_i, p_k> ],   logits over temperature

    Denominator: all proxies, including that of the label; decoupled=True excludes it, as in the original paper. On the
    unit sphere -|a - p|² differs from 2 <a, p> by a constant, so squared distances correspond to temperature 1/2.
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
    """Triplet loss max(0, margin + <a, x_-> - <a, x_+>), the limit T -> 0 of the loss below.   [schroff15]

        loss_i = T log(1 + exp((margin + <a, x_-> - <a, x_+>) / T)),   at temperature T

    Denominator: the positive and one negative. temperature=None is the limit. On the unit sphere squared distances are
    2 - 2 <a, x>, so margin and loss are half of those for squared distances.
    """
    check_vectors("triplet_loss", anchor=anchor, positive=positive, negative=negative)
    for name, vectors in (("positive", positive), ("negative", negative)):
        check_rows("triplet_loss", name, vectors, anchor.shape[0], "anchor")
    a, x, y = (unit(wide(t)) if normalize else wide(t) for t in (anchor, positive, negative))
    violation = margin + (a * (y - x)).sum(-1)
    if temperature is None:
        return reduced("triplet_loss", violation.clamp(min=0.0), reduction)
    check_temperature("triplet_loss", temperature, anchor)
    return reduced("triplet_loss", temperature * _softplus(violation / temperature), reduction)


def alignment_loss(
    a: Float[Tensor, "m d"],
    b: Float[Tensor, "m d"],
    *,
    exponent: float = 2.0,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Alignment loss |a_i - b_i|^exponent, the distance of positive pairs.   [wang20]

    On the unit sphere with exponent 2 it is 2 - 2 <a_i, b_i>, the attractive term of info_nce.
    """
    check_vectors("alignment_loss", a=a, b=b)
    check_rows("alignment_loss", "b", b, a.shape[0], "a")
    a, b = (unit(wide(t)) if normalize else wide(t) for t in (a, b))
    return reduced("alignment_loss", (a - b).square().sum(-1).pow(exponent / 2), reduction)


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
    """Module of a loss and its temperature, which can be learned as exp of a parameter.

    Args:
        loss: name of a loss of this module that has a temperature, or a function with the same signature.
        temperature: initial temperature.
        learn_temperature: make the logarithm of the temperature a parameter.
        minimum: lower bound of the temperature; CLIP's bound of 100 on the logit scale is a minimum of 0.01.
        options: keyword arguments of every call.

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
            remedy = "Pass a positive number; small values sharpen the distribution."
            raise InputValueError(
                "Contrastive", "temperature", f"temperature must be positive and finite, got {temperature}", remedy
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
        """Current temperature, at least `minimum`."""
        return self.log_temperature.exp().clamp(min=self.minimum)

    def forward(self, *operands: Tensor, **arguments: Unpack[LossOptions]) -> Tensor:
        """Loss of these operands at the current temperature."""
        return self.loss(*operands, temperature=self.temperature, **self.options, **arguments)

    def extra_repr(self) -> str:
        learned = isinstance(self.log_temperature, torch.nn.Parameter)
        return f"{getattr(self.loss, '__name__', self.loss)}, learn_temperature={learned}"


# Shared functions ----------------------------------------------------------------------------------------------------


def _loss(call: str, family: Likelihood, decoupled: bool) -> Float[Tensor, " m"]:
    """-log p(+), or minus the log odds against the negatives if decoupled."""
    if not decoupled:
        return -family.log_probability()
    odds = family.log_odds()
    has_negatives = odds.detach() != torch.inf
    _check_some(call, "candidates", has_negatives, "candidates leave some anchors without a negative", every=True)
    return -odds


def _check_some(call: str, argument: str, some: Bool[Tensor, " m"], problem: str, *, every: bool = False) -> None:
    """Check that some anchor (or every anchor) has vectors to compare with."""
    if readable(some) and not bool(some.all() if every else some.any()):
        raise InputValueError(call, argument, problem, "Use a larger batch, or exclude fewer pairs.")


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp x), accurate for large x, where torch's softplus returns x above 20 (2e-9 too small)."""
    return -logsigmoid(-x)


def _positives(x: Float[Tensor, "m d"], labels: Int[Tensor, " m"]) -> tuple[Int[Tensor, " m"], Float[Tensor, "m d"]]:
    """Number and sum of the other vectors with the label of each vector, in linear time."""
    ordered, order = labels.sort()
    new = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    label = torch.empty_like(order).scatter(0, order, new.long().cumsum(0))
    members = torch.zeros_like(order).index_add(0, label, torch.ones_like(order))
    sums = torch.zeros_like(x).index_add(0, label, x)
    return members[label] - 1, sums[label] - x


def _sum_of_softplus(s: Tensor, _: Tensor, negatives: Tensor) -> Tensor:
    """sum_p log(1 + exp(negatives - s_p)) over the visible keys p."""
    visible = s > -torch.inf
    return (_softplus(negatives.unsqueeze(-1) - s.masked_fill(~visible, 0.0)) * visible).sum(-1)


def _sampled(
    call: str,
    anchor: Tensor,
    candidates: Tensor,
    temperature: Temperature,
    positive: Tensor,
    negatives: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits of the positives [m] and of the negatives [m, k]."""
    family = Likelihood(anchor, candidates, temperature=temperature, positive=positive, call=call)
    m = anchor.shape[0]
    if not isinstance(negatives, Tensor) or negatives.ndim not in (1, 2) or negatives.shape[-1] == 0:
        fact = f"shape {shape_of(negatives)}" if isinstance(negatives, Tensor) else type(negatives).__name__
        remedy = "Pass k indices of candidates for each anchor, or k for all anchors."
        raise InputValueError(call, "negatives", f"negatives must be [{m}, k] or [k] with k > 0, got {fact}", remedy)
    shape = (m, negatives.shape[-1]) if negatives.ndim == 2 else tuple(negatives.shape)
    check_integers(call, "negatives", negatives, shape, anchor)
    check_indices(call, "negatives", negatives, candidates.shape[0])
    eta, drawn = family.eta, family.candidates[negatives]
    negative_logits = eta @ drawn.mT if negatives.ndim == 1 else (drawn @ eta.unsqueeze(-1)).squeeze(-1)
    return (eta * family.chosen()).sum(-1), negative_logits


def _log_noise(call: str, noise: Tensor, candidates: Tensor) -> Tensor:
    """The noise as float32 or float64, checked to have one log probability for each candidate."""
    if not isinstance(noise, Tensor) or tuple(noise.shape) != tuple(candidates.shape[:1]):
        fact = f"shape {shape_of(noise)}" if isinstance(noise, Tensor) else type(noise).__name__
        remedy = "Pass the log probability of each candidate under the noise."
        raise InputValueError(call, "noise", f"noise must have shape ({candidates.shape[0]},), got {fact}", remedy)
    check_alike(call, candidates=candidates, noise=noise)
    return wide(noise)
