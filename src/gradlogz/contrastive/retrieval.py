"""Retrieval by dot products: the rank of the positive among all candidates, in linear memory.

    rank_i    = number of candidates j with <a_i, x_j> > <a_i, x_+>      0 is the best
    recall@k  = share of anchors with rank < k

Read next: losses/, whose losses bound these ranks.
"""

import torch

from .._autocast import without_autocast
from .._errors import InputValueError
from .._typing import Float, Int, Tensor
from ..kernels.losses.pairwise_log_sum_exp import pairs
from ..kernels.losses.visible_pairs import VisiblePairs
from .likelihood import Likelihood
from .validation import promoted, unit


@without_autocast
@torch.no_grad()
def retrieval_ranks(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    *,
    positive: Int[Tensor, " m"] | None = None,
    normalize: bool = False,
) -> Int[Tensor, " m"]:
    """Rank of the positive of each anchor, the number of candidates with a larger dot product; ties are not counted.

    NaN counts as larger: the vectors of a model that has diverged have the last rank.
    """
    if normalize:
        anchor, candidates = (unit(t) for t in promoted(anchor, candidates))
    family = Likelihood(anchor, candidates, positive=positive, call="retrieval_ranks")
    index = torch.arange(anchor.shape[0], device=anchor.device) if positive is None else positive.long()

    def larger(s: Tensor, _: Tensor, of_positive: Tensor) -> Tensor:
        return (~(s <= s.gather(1, of_positive.unsqueeze(-1)))).sum(-1)  # true for NaN

    return pairs(larger, family.anchor, family.candidates, None, VisiblePairs(), index)


def recall_at(
    anchor: Float[Tensor, "m d"],
    candidates: Float[Tensor, "n d"],
    k: int | tuple[int, ...] = (1, 5, 10),
    *,
    positive: Int[Tensor, " m"] | None = None,
    normalize: bool = False,
) -> dict[int, float]:
    """Recall at each k: share of anchors whose positive is among their k nearest candidates by dot product.

    >>> import torch
    >>> recall_at(torch.eye(3), torch.eye(3), k=1)
    {1: 1.0}
    """
    numbers = (k,) if isinstance(k, int) else tuple(k)
    if not numbers or min(numbers) < 1:
        raise InputValueError("recall_at", "k", f"k must be at least 1, got {k}", "Pass numbers of candidates.")
    ranks = retrieval_ranks(anchor, candidates, positive=positive, normalize=normalize)
    return {number: float((ranks < number).double().mean()) for number in numbers}
