"""Losses with sampled negatives: skip-gram, noise-contrastive estimation and ranking.

Read next: one_positive.py.
"""

import math
from typing import Any

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, shape_of
from ..._typing import Float, Int, Tensor
from ...kernels.losses.logit_losses import products
from ...kernels.losses.softmax_losses import softplus
from ..likelihood import Likelihood
from ..validation import (
    check_device,
    check_indices,
    check_integers,
    reduced,
    wide,
)
from .options import Temperature


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
    data = positive_logit - offset.squeeze(-1) - noise[positive.long()]
    fake = negative_logits - offset - noise[negatives.long()]
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
    data, fake = positive_logit - noise[positive.long()], negative_logits - noise[negatives.long()]
    return reduced("ranking_nce", softplus(fake.logsumexp(-1) - data), reduction)


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
    eta, drawn = family.eta, family.candidates[negatives.long()]
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
