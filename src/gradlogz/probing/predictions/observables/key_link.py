"""The canonical link of the keys of a head, its best linear approximation, and the queries that it gives to tokens.

    h            uniform on N keys of a head;  G(q) = log mean_j exp <q, k_j>,  m(q) = ∇G(q)
    link         m(q) -> q, from means to natural parameters: the inverse of attention                      [theory 3.6]
    T            q ≈ m T + c, by least squares over the queries of the head                                 [theory E57]
    K, Q         covariances of keys and of queries;  P: of the own keys o of tokens;  S = E qᵀ o, centred
    cosine       <S T, K> / sqrt(<Q, K> <Tᵀ P T, K>)       correlation of the logits <q, k> with those of o T, over keys
                                                           k independent of the token

Keys are whitened over all rows first (K = I), so that squared lengths of queries are variances of logits, and no value
depends on the basis of queries and keys.

Read next: ../link.py, which judges it; visible_keys.py (the rows).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...._typing import Bool, Float, Tensor
from .visible_keys import VisibleKeys

KEYS = 2  # of each row
FEW = 1e-2  # share of the weight that must be left to keys for a sum by differences


class WhiteRows(NamedTuple):
    """Queries and own keys of rows, and keys with the rows they were drawn from, in coordinates with K = I.

    In the precision of the model, in which all logits are computed; moments are in float64.
    """

    query: Float[Tensor, "h t d"]
    own_key: Float[Tensor, "h t d"]
    key: Float[Tensor, "h n d"]
    row: Float[Tensor, " n"]


class Products(NamedTuple):
    """Second moments of versions of the rows, [v, h, d, d]."""

    K: Tensor
    Q: Tensor
    P: Tensor
    S: Tensor

    def inner(self, T: Float[Tensor, "v h d d"]) -> Float[Tensor, "v h"]:
        """<S T, K>."""
        return ((self.S @ T) * self.K).sum((-2, -1))

    def size(self, T: Float[Tensor, "v h d d"]) -> Float[Tensor, "v h"]:
        """<Tᵀ P T, K>."""
        return ((T.mT @ self.P @ T) * self.K).sum((-2, -1))

    @property
    def variance(self) -> Float[Tensor, "v h"]:
        """<Q, K>, the variance of logits."""
        return (self.Q * self.K).sum((-2, -1))

    def cosine(self, T: Float[Tensor, "v h d d"]) -> Float[Tensor, "v h"]:
        """Correlation of the logits of queries with those of own keys times T."""
        return self.inner(T) / (self.variance * self.size(T)).sqrt()

    def rotated(self, T: Float[Tensor, "v h d d"]) -> Float[Tensor, "v h"]:
        """Standard deviation of the cosine under random rotations of the queries, in coordinates with K = I."""
        d = T.shape[-1]
        return (self.S @ T).square().sum((-2, -1)).div(d * self.variance * self.size(T)).sqrt()


def whitened(rows: VisibleKeys) -> WhiteRows | None:
    """Rows in coordinates in which the keys of each head are white; None if a head's keys are in a subspace."""
    assert rows.own_key is not None  # of self-attention
    each = len(rows.query) // len(rows.visible)
    keys = rows.visible.double()
    away = keys.flatten(1, 2)
    away = away - away.mean(1, keepdim=True)
    L, failed = torch.linalg.cholesky_ex(away.mT @ away / away.shape[1])
    if bool(failed.any()):
        return None

    def coordinates(k: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(L, k.mT, upper=False).mT.repeat_interleave(each, 0)

    n = rows.visible.shape[1]
    few = keys[:, :, :KEYS].flatten(1, 2)
    query = rows.query.double() @ L.repeat_interleave(each, 0)
    q, o, k = (t.to(rows.query.dtype) for t in (query, coordinates(rows.own_key.double()), coordinates(few)))
    return WhiteRows(q, o, k, torch.arange(n).repeat_interleave(KEYS))


class HeadLink(NamedTuple):
    """Means of the keys at the queries, and least-squares maps from means to queries, for versions of the rows.

    log_normalizer: G of all keys at all queries, and mean: its gradient.
    """

    matrix: Float[Tensor, "v h d d"]
    offset: Float[Tensor, "v h d"]
    mean: Float[Tensor, "h t d"]
    log_normalizer: Float[Tensor, "h t"]


def linear_links(
    query: Float[Tensor, "h t d"], key: Float[Tensor, "h n d"], versions: Bool[Tensor, "v t"], owner: Tensor
) -> HeadLink:
    """Linear links of keys at queries, with the rows of each version (the first has all) and the keys drawn from them.

    Sums over keys are computed for the difference of each version to the first, which has few keys; where these keys
    hold nearly all weight of a query, whose difference would have no digits, for the version itself.
    """
    s = query @ key.mT
    top = s.amax(-1, keepdim=True)
    e = (s - top).exp()
    total, moved = e.sum(-1, keepdim=True), e @ key
    matrices, offsets = [], []
    for rows in versions:
        out = ~rows[owner]
        left = e[..., out]
        Z, M = total - left.sum(-1, keepdim=True), moved - left @ key[:, out]
        mean = M / Z
        for h, few in enumerate((Z < FEW * total).squeeze(-1)):
            if few.any():
                mean[h, few] = s[h, few][:, ~out].softmax(-1) @ key[h, ~out]
        mean, q = mean[:, rows].double(), query[:, rows].double()
        centre, middle = mean.mean(1, keepdim=True), q.mean(1, keepdim=True)
        T = torch.linalg.lstsq(mean - centre, q - middle).solution
        matrices.append(T)
        offsets.append((middle - centre @ T).squeeze(1))
    G = total.squeeze(-1).log() + top.squeeze(-1) - torch.tensor(float(key.shape[1])).log()
    return HeadLink(torch.stack(matrices), torch.stack(offsets), moved / total, G)


def products_of(white: WhiteRows, versions: Bool[Tensor, "v t"]) -> Products:
    """Second moments of the rows of each version, and of the keys drawn from them."""
    parts: list[Sequence[Tensor]] = []
    for rows in versions:
        q, o, k = white.query[:, rows], white.own_key[:, rows], white.key[:, rows[white.row]]
        q, o, k = (t - t.mean(1, keepdim=True) for t in (q.double(), o.double(), k.double()))
        n = q.shape[1]
        parts.append((k.mT @ k / k.shape[1], q.mT @ q / n, o.mT @ o / n, q.mT @ o / n))
    return Products(*(torch.stack(each) for each in zip(*parts, strict=True)))


def divergence(
    link: HeadLink, query: Float[Tensor, "h t d"], key: Float[Tensor, "h n d"], other: Float[Tensor, "h t d"]
) -> Float[Tensor, "h t"]:
    """KL of the attention weights of each query from those of another query, over all keys, in nats."""
    other = other.to(query.dtype)
    G = (other @ key.mT).logsumexp(-1) - torch.tensor(float(key.shape[1])).log()
    return G - link.log_normalizer - (link.mean * (other - query)).sum(-1)
