"""Merging: the statistics of a sum of measures from those of its parts.

    G      = log sum_k exp G_k                                      [theory 3.8]
    r_k    = exp(G_k - G)                                           the gate: each part by its own log normaliser
    mean   = sum_k r_k m_k
    cov    = sum_k r_k (F_k + (m_k - mean)(m_k - mean)^T)           the flash-attention merge, extended to the Fisher

Parts lie along dimension k: log normalisers [*b, m, k], means [*b, m, k, d], covariances [*b, m, k, d, d].

Read next: mixture.py and algebra.py, the two that merge.
"""

from typing import NamedTuple

from .._errors import check_floats, present, sentence, shape_of
from .._typing import Float, Tensor
from ..kernels import reference


class Partial(NamedTuple):
    """The statistics of one query over some of the keys; `merge` joins them."""

    log_normalizer: Float[Tensor, "*bm"]
    mean: Float[Tensor, "*bm d"]
    covariance: Float[Tensor, "*bm d d"] | None = None


def merge(partials: Partial) -> Partial:
    """Join partial attentions over blocks of keys, stacked along the last query dimension, exactly.

    log_normalizer [*b, k] with mean [*b, k, d] and covariance [*b, k, d, d] become one Partial over all keys. The merge
    is associative: ring, tree and split-key attention give the same numbers. Parts without mass count nothing.
    Law: tests/laws/test_merging_is_associative.py.

    >>> import torch
    >>> from gradlogz import Empirical
    >>> q, k = torch.randn(4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    >>> blocks = Empirical(k.reshape(2, 3, 4))
    >>> eta = q.expand(2, 4)
    >>> whole = merge(Partial(blocks.log_normalizer(eta), blocks.mean(eta), blocks.covariance(eta)))
    >>> torch.allclose(whole.mean, Empirical(k).mean(q))
    True
    """
    G, means, covariances = partials
    check_floats("merge", log_normalizer=G, mean=means, **present(covariance=covariances))
    tails = {"mean": (means, "k, d", 1)} | ({} if covariances is None else {"covariance": (covariances, "k, d, d", 2)})
    for name, (t, ending, extra) in tails.items():
        if G.ndim == 0 or t.shape[: G.ndim] != G.shape or t.ndim != G.ndim + extra:
            condition = f"{name} must be [*b, {ending}] beside log_normalizer of shape {shape_of(G)}"
            raise ValueError(sentence("merge", condition, f"shape {shape_of(t)}", "Expand it first."))
    r = gate(G)
    mean = gated_mean(r, means)
    covariance = None if covariances is None else gated_covariance(r, means, mean, covariances)
    return Partial(reference.log_sum_exp(G), mean, covariance)


def gate(G: Float[Tensor, "*bm k"]) -> Float[Tensor, "*bm k"]:
    """r_k = softmax_k G_k."""
    return reference.softmax(G)


def gated_mean(r: Float[Tensor, "*bm k"], means: Float[Tensor, "*bm k d"]) -> Float[Tensor, "*bm d"]:
    """sum_k r_k m_k."""
    return (r.unsqueeze(-2) @ means).squeeze(-2)


def gated_covariance(
    r: Float[Tensor, "*bm k"],
    means: Float[Tensor, "*bm k d"],
    mean: Float[Tensor, "*bm d"],
    covariances: Float[Tensor, "*bm k d d"],
) -> Float[Tensor, "*bm d d"]:
    """sum_k r_k (F_k + (m_k - mean)(m_k - mean)^T)."""
    away = means - mean.unsqueeze(-2)
    return (r[..., None, None] * covariances).sum(-3) + (r.unsqueeze(-1) * away).mT @ away


def gated_covariance_product(
    r: Float[Tensor, "*bm k"],
    means: Float[Tensor, "*bm k d"],
    mean: Float[Tensor, "*bm d"],
    products: Float[Tensor, "*bm k d"],
    vector: Float[Tensor, "*bm d"],
) -> Float[Tensor, "*bm d"]:
    """sum_k r_k (F_k v + (m_k - mean) <m_k - mean, v>), with products F_k v."""
    away = means - mean.unsqueeze(-2)
    return gated_mean(r, products + away * (away @ vector.unsqueeze(-1)))
