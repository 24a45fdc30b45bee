"""Losses of metric learning that weigh pairs by softplus of log-sum-exp: multi-similarity, circle, proxy anchor.

    multi_similarity_loss   1/a softplus(A + a base) + 1/b softplus(N - b base)         A over -a s_p, N over b s_n
    circle_loss             softplus(A + N)                                             A, N over weighted similarities
    proxy_anchor_loss       mean softplus(A + a margin) + mean softplus(N + a margin)   rows are proxies

A and N are log-sum-exp over positives and negatives. None of them is a likelihood of one family: softplus(N - b base)
is minus the log probability of a candidate with the constant logit b base among the negatives, so the first and the
third are sums of two log likelihoods with different parameters, scaled; the logits of the circle loss are quadratic in
the similarity. They have no `Likelihood`, and no temperature.

Read next: several_positives.py (likelihoods with several positives).
"""

from typing import TYPE_CHECKING

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError
from ..._typing import Float, Int, Tensor
from ...kernels.losses.logit_losses import each_row, sum_of_rows
from ...kernels.losses.pairwise_log_sum_exp import log_sum_exp
from ...kernels.losses.similarity_losses import Circle, MultiSimilarity
from ...kernels.losses.softmax_losses import softplus
from ...kernels.losses.visible_pairs import VisiblePairs
from ..distributed import announces_errors, mean_over_processes
from ..validation import (
    check_choice,
    check_indices,
    check_integers,
    check_positive,
    check_vectors,
    promoted,
    unit,
    wide,
)
from .mined_pairs import MinedPairs, visible_pairs
from .several_positives import count_members, vectors_of_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

REDUCTIONS = ("mean", "sum", "none")


@announces_errors
@without_autocast
def multi_similarity_loss(
    vectors: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    pairs: MinedPairs | None = None,
    normalize: bool = False,
    group: "ProcessGroup | None" = None,
    reduction: str = "mean",
) -> Tensor:
    """Multi-similarity loss: soft maxima of the positives below and the negatives above a similarity.   [wang19]

        loss_i = 1/alpha log(1 + sum_{p in P_i} exp(-alpha (s_ip - base)))
               + 1/beta log(1 + sum_{n in N_i} exp(beta (s_in - base)))

    Denominator: none; not a likelihood. The paper uses cosines (normalize=True). Memory is linear in the batch.

    Args:
        alpha: sharpness over positives.
        beta: sharpness over negatives.
        base: similarity that separates positives from negatives.
        pairs: indices of a miner: anchors, positives, anchors, negatives; or anchors, positives, negatives of triplets.
            Only these pairs count, in a mask of one byte for each pair of vectors.
        group: process group whose vectors are gathered, with their labels. The mean is scaled so that its average over
            processes is that of all anchors.
    """
    call = "multi_similarity_loss"
    x = _checked(call, vectors, labels, normalize, reduction)
    check_positive(call, alpha=alpha, beta=beta)
    keys, positives, negatives = _compared(call, x, labels, pairs, group)
    m = x.shape[0]
    rows = MultiSimilarity(m, positives, negatives, (alpha, beta, base))
    if reduction == "none":
        return each_row(rows, x, keys, None)
    if group is not None and reduction == "mean":
        return mean_over_processes(sum_of_rows(rows, x, keys, None, 1.0), m, x.device, group)
    return sum_of_rows(rows, x, keys, None, 1 / m if reduction == "mean" else 1.0)


@announces_errors
@without_autocast
def circle_loss(
    vectors: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    *,
    relaxation: float = 0.4,
    scale: float = 80.0,
    pairs: MinedPairs | None = None,
    normalize: bool = False,
    group: "ProcessGroup | None" = None,
    reduction: str = "mean",
) -> Tensor:
    """Circle loss: pairs weighted by how far their similarity is from its optimum.   [sun20, Eq. 4, 6]

        loss_i = log(1 + sum_{n in N_i} exp(scale u_in (s_in - r)) sum_{p in P_i} exp(-scale u_ip (s_ip - 1 + r)))
        u_in   = max(0, s_in + r),   u_ip = max(0, 1 + r - s_ip)           without gradients

    Denominator: none; not a likelihood. `relaxation` is r, `scale` the paper's gamma; the paper uses cosines
    (normalize=True). Anchors without a positive or without a negative are excluded from the mean and have loss 0 under
    "none". `pairs` and `group` are those of multi_similarity_loss.
    """
    call = "circle_loss"
    x = _checked(call, vectors, labels, normalize, reduction)
    check_positive(call, scale=scale)
    keys, positives, negatives = _compared(call, x, labels, pairs, group)
    rows = Circle(x.shape[0], positives, negatives, (relaxation, scale))
    if reduction == "none":
        return each_row(rows, x, keys, None)
    total = sum_of_rows(rows, x, keys, None, 1.0)
    if reduction == "sum":
        return total
    if positives.labels is not None:
        members = count_members(*positives.labels)
        some = (members > 1) & (members < keys.shape[0])
    else:
        assert positives.mask is not None
        assert negatives.mask is not None
        some = positives.mask.any(-1) & negatives.mask.any(-1)
    if group is not None:
        return mean_over_processes(total, int(some.sum()), x.device, group)
    return total / some.sum().clamp(min=1)


@without_autocast
def proxy_anchor_loss(
    vectors: Float[Tensor, "m d"],
    proxies: Float[Tensor, "k d"],
    labels: Int[Tensor, " m"],
    *,
    margin: float = 0.1,
    scale: float = 32.0,
    normalize: bool = False,
) -> Float[Tensor, ""]:
    """Proxy-anchor loss: each proxy against the vectors of its class and of other classes.   [kim20, Eq. 4]

        loss = mean over proxies with positives of log(1 + sum_{x in class} exp(-scale (s(x, p) - margin)))
             + mean over all proxies of log(1 + sum_{x in other classes} exp(scale (s(x, p) + margin)))

    Denominator: none; not a likelihood, while `proxy_loss` is one. `scale` is the paper's alpha; it uses cosines
    (normalize=True). The loss is one number, since the two means have different numbers of proxies.
    """
    call = "proxy_anchor_loss"
    check_vectors(call, vectors=vectors, proxies=proxies)
    check_integers(call, "labels", labels, (vectors.shape[0],), vectors)
    check_indices(call, "labels", labels, proxies.shape[0], "proxies")
    check_positive(call, scale=scale)
    x, p = (unit(t) if normalize else t for t in promoted(vectors, proxies))
    both = torch.arange(p.shape[0], device=p.device), labels
    A = log_sum_exp(-scale * p, x, None, VisiblePairs(labels=both))
    N = log_sum_exp(scale * p, x, None, VisiblePairs(labels=both, same=False))
    some = (A.detach() > -torch.inf).sum().clamp(min=1)
    return softplus(A + scale * margin).sum() / some + softplus(N + scale * margin).mean()


def _compared(
    call: str,
    x: Float[Tensor, "m d"],
    labels: Int[Tensor, " m"],
    pairs: MinedPairs | None,
    group: "ProcessGroup | None",
) -> tuple[Float[Tensor, "n d"], VisiblePairs, VisiblePairs]:
    """Vectors to compare with, of this process or of all, and the positives and negatives among them."""
    if group is None:
        return x, *visible_pairs(call, labels, pairs)
    if pairs is not None:
        problem = "pairs must not be passed with group=, whose vectors a miner does not see"
        raise InputValueError(call, "pairs", problem, "Drop one of the arguments.")
    return vectors_of_all(call, x, labels, group)


def _checked(call: str, vectors: Tensor, labels: Tensor, normalize: bool, reduction: str) -> Float[Tensor, "m d"]:
    """Vectors in float32 at least, with checked labels."""
    check_vectors(call, vectors=vectors)
    check_integers(call, "labels", labels, (vectors.shape[0],), vectors)
    check_choice(call, "reduction", reduction, REDUCTIONS)
    return unit(wide(vectors)) if normalize else wide(vectors)
