"""Variance of the products of every query with its visible keys.

    Var_m = sum_n p_n (s_mn - sum_n p_n s_mn)²        s_mn = scale <q_m, k_n>;  p: uniform over the visible keys of m
          = scale² q_mᵀ C_m q_m                       C_m: covariance of the visible keys

If all queries see the same keys, C_m is one matrix. If a query sees the keys up to its own, queries are read in blocks.
With n₀ keys before the block, of mean m₀ and scatter S₀ (sum of products about the mean), and n₁ visible ones in it,

    (n₀ + n₁) Var_m = qᵀ S₀ q + sum_in (s - s̄)² + n₀ n₁ / (n₀ + n₁) (<q, m₀> - s̄)²

No term is negative, so that no digits are lost. Other masks, and biases, need all products; so does a GPU, which would
have to wait for the test of the mask.

Read next: attention_rows.py (masks), ../../passes/rotated_heads.py, which uses it.
"""

from typing import NamedTuple

import torch

from ...._typing import Float, Tensor
from ...inside.events import AttentionArguments
from .attention_rows import log_weights_of_call

BLOCK = 64  # queries of a block


def product_variance(call: AttentionArguments) -> Float[Tensor, "b h m"]:
    """Return the variance of the scaled products over the visible keys, uniform or weighted by exp(bias).

    0 for a row without keys. A soft cap is not applied.

    Law: tests/laws/test_products_vary_over_the_visible_keys.py.
    """
    log_weights, biased = log_weights_of_call(call)  # [#b, #h, m, n]
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, key = call.query.to(dtype) * call.scale, call.key.to(dtype)
    key = key - key.mean(-2, keepdim=True)  # an offset would lose digits
    shown = log_weights > -torch.inf
    m, n = shown.shape[-2:]
    if not biased and shown.shape[1] == 1 and shown.device.type == "cpu":  # reading the mask would wait for a GPU
        last = shown[:, :, -1:]
        if bool((shown == last).all()):
            return _of_the_same_keys(query, key, last.to(dtype))
        if m == n and bool((shown == (last & torch.ones(m, n, device=shown.device).tril().bool())).all()):
            return _of_prefixes(query, key, last.to(dtype))
    return _of_all_products(query, key, log_weights.to(dtype).softmax(-1).nan_to_num())


class _Moments(NamedTuple):
    """Number, mean and scatter of keys of each key head."""

    number: Float[Tensor, "#b 1 1 1"]
    mean: Float[Tensor, "b hk 1 d"]
    scatter: Float[Tensor, "b hk d d"]

    def joined(self, other: "_Moments") -> "_Moments":
        """Return the moments of the keys of both."""
        count = self.number + other.number
        share, change = other.number / count.clamp(min=1), other.mean - self.mean
        between = self.number * share * (change.mT @ change)
        return _Moments(count, self.mean + share * change, self.scatter + other.scatter + between)


def _moments(key: Float[Tensor, "b hk n d"], weight: Float[Tensor, "#b 1 1 n"]) -> _Moments:
    """Return the moments of the keys of weight 1; the others have weight 0."""
    w = weight.mT
    count = w.sum(-2, keepdim=True)
    mean = (w * key).sum(-2, keepdim=True) / count.clamp(min=1)
    away = w * (key - mean)
    return _Moments(count, mean, away.mT @ away)


def _of_the_same_keys(query: Tensor, key: Tensor, weight: Float[Tensor, "#b 1 1 n"]) -> Float[Tensor, "b h m"]:
    before = _moments(key, weight)
    q = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    squares = ((q @ before.scatter) * q).sum(-1) / before.number.clamp(min=1).squeeze(-1)
    return squares.reshape(query.shape[:3])


def _of_prefixes(query: Tensor, key: Tensor, weight: Float[Tensor, "#b 1 1 n"]) -> Float[Tensor, "b h m"]:
    """Return the variances over the keys of weight 1 up to that of the query."""
    (_, h, n, _), hk = query.shape, key.shape[1]
    parts = []
    before = _moments(key[:, :, :0], weight[..., :0])
    for first in range(0, n, BLOCK):
        block = slice(first, first + BLOCK)
        k, w = key[:, :, block], weight[..., block]
        q = query[:, :, block].unflatten(1, (hk, -1))  # [b, hk, h / hk, r, d]
        p = w.expand(-1, -1, w.shape[-1], -1).tril().unsqueeze(2)
        s = q @ k.unsqueeze(2).mT
        n0, n1 = before.number.unsqueeze(2).squeeze(-1), p.sum(-1)
        mean = (p * s).sum(-1) / n1.clamp(min=1)
        inside = (p * (s - mean.unsqueeze(-1)).square()).sum(-1)
        squares = ((q @ before.scatter.unsqueeze(2)) * q).sum(-1)
        shift = (q @ before.mean.unsqueeze(2).mT).squeeze(-1) - mean
        count = (n0 + n1).clamp(min=1)
        parts.append((squares + inside + n0 * n1 / count * shift.square()) / count)
        before = before.joined(_moments(k, w))
    return torch.cat(parts, -1).reshape(len(query), h, n)


def _of_all_products(query: Tensor, key: Tensor, weights: Float[Tensor, "#b #h m n"]) -> Float[Tensor, "b h m"]:
    """Return the variances under the weights; the products of one key head are in memory at a time."""
    each = query.shape[1] // key.shape[1]
    parts = []
    for g in range(key.shape[1]):
        heads = slice(g * each, (g + 1) * each)
        p = weights if weights.shape[1] == 1 else weights[:, heads]
        s = query[:, heads] @ key[:, g : g + 1].mT
        away = s - (p * s).sum(-1, keepdim=True)
        parts.append((p * away.square()).sum(-1))
    return torch.cat(parts, 1)
