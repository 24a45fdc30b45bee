"""Merging: the statistics of a sum of measures from those of its parts.

    G      = log sum_k exp G_k                                      [theory 3.8]
    r_k    = exp(G_k - G)                                           the gate: each part weighted by its log normaliser
    mean   = sum_k r_k m_k
    cov    = sum_k r_k (F_k + (m_k - mean)(m_k - mean)^T)           the flash-attention merge, extended to the Fisher

Parts lie along dimension k: log normalisers [*b, m, k], means [*b, m, k, d], covariances [*b, m, k, d, d].

Read next: mixture.py and algebra.py, which use it.
"""

from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

import torch

from .._errors import InputTypeError, InputValueError, check_floats, present, shape_of
from .._typing import Float, Tensor
from ..special import log_domain


@runtime_checkable
class Joinable(Protocol):
    """Protocol: a result over a block of keys that can be joined with another of its class."""

    def joined(self, other: Any) -> Any: ...


T = TypeVar("T", bound=Joinable)


class PartialStatistics(NamedTuple):
    """Statistics of a query over a block of keys; `merge` joins them."""

    log_normalizer: Float[Tensor, "*bm"]
    mean: Float[Tensor, "*bm d"]
    covariance: Float[Tensor, "*bm d d"] | None = None

    def joined(self, other: "PartialStatistics") -> "PartialStatistics":
        """Statistics over the keys of both."""
        if self.mean.shape != other.mean.shape or (self.covariance is None) != (other.covariance is None):
            fact = f"means of shapes {shape_of(self.mean)} and {shape_of(other.mean)}"
            remedy = "Pass both with, or both without, a covariance."
            raise InputValueError(
                "merge", "other", f"both parts must have the same queries and fields, got {fact}", remedy
            )
        k = self.log_normalizer.ndim
        both = [torch.stack([a, b], k) for a, b in zip(self, other, strict=True) if a is not None and b is not None]
        return _merged(PartialStatistics(*both))


@overload
def merge(first: PartialStatistics, *others: PartialStatistics) -> PartialStatistics: ...


@overload
def merge(first: T, *others: T) -> T: ...


def merge(first: Any, *others: Any) -> Any:
    """Join results over blocks of keys exactly, as if attention had been computed over all keys.

    `merge(a, b, ...)` or `merge([a, b, ...])` joins the `Attention`s that `attend` returns, or `PartialStatistics` of
    a measure. `merge(stacked)` takes one PartialStatistics whose last query dimension counts the blocks: log_normalizer
    [*b, k], mean [*b, k, d], covariance [*b, k, d, d]. A field that one of the parts lacks is missing in the result.
    The merge is associative and commutative: ring, tree and split-key attention give the same numbers. Parts without
    mass have no effect. Law: tests/laws/test_merging_is_associative.py.

    >>> import torch
    >>> from gradlogz import Empirical, attend
    >>> q, k = torch.randn(5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    >>> parts = merge(attend(q, k[:3], k[:3]), attend(q, k[3:], k[3:]))
    >>> torch.allclose(parts.entropy, attend(q, k, k).entropy)
    True

    For a measure, with its covariance:

    >>> q, k = torch.randn(4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    >>> blocks = Empirical(k.reshape(2, 3, 4))
    >>> eta = q.expand(2, 4)
    >>> whole = merge(PartialStatistics(blocks.log_normalizer(eta), blocks.mean(eta), blocks.covariance(eta)))
    >>> torch.allclose(whole.mean, Empirical(k).mean(q))
    True
    """
    if isinstance(first, list) and first and not others:
        return merge(*first)
    for part in (first, *others):
        if not isinstance(part, Joinable) or type(part) is not type(first):
            fact = ", ".join(type(p).__name__ for p in (first, *others))
            remedy = "Wrap log normaliser, mean and covariance in PartialStatistics."
            raise InputTypeError(
                "merge", "parts", f"parts must all be PartialStatistics or all be Attention, got {fact}", remedy
            )
    if not others and isinstance(first, PartialStatistics):
        return _merged(first)
    return reduce(lambda a, b: a.joined(b), others, first)


def _merged(partials: PartialStatistics) -> PartialStatistics:
    """Join the blocks along the last query dimension."""
    G, means, covariances = partials
    check_floats("merge", log_normalizer=G, mean=means, **present(covariance=covariances))
    tails = {"mean": (means, "k, d", 1)} | ({} if covariances is None else {"covariance": (covariances, "k, d, d", 2)})
    for name, (t, ending, extra) in tails.items():
        if G.ndim == 0 or t.shape[: G.ndim] != G.shape or t.ndim != G.ndim + extra:
            condition = f"{name} must be [*b, {ending}] for log_normalizer of shape {shape_of(G)}"
            raise InputValueError("merge", name, f"{condition}, got shape {shape_of(t)}", "Expand it first.")
    r = gate(G)
    mean = gated_mean(r, means)
    covariance = None if covariances is None else gated_covariance(r, means, mean, covariances)
    return PartialStatistics(log_domain.log_sum_exp(G), mean, covariance)


def gate(G: Float[Tensor, "*bm k"]) -> Float[Tensor, "*bm k"]:
    """Gates r_k = softmax_k G_k."""
    return log_domain.softmax(G)


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
    return (r[..., None, None] * covariances).sum(-3) + gated_spread(r, means, mean)


def gated_spread(
    r: Float[Tensor, "*bm k"], means: Float[Tensor, "*bm k d"], mean: Float[Tensor, "*bm d"]
) -> Float[Tensor, "*bm d d"]:
    """Covariance between parts, sum_k r_k (m_k - mean)(m_k - mean)^T."""
    away = means - mean.unsqueeze(-2)
    return (r.unsqueeze(-1) * away).mT @ away


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
