"""Means and products of deviations of vectors, separately for eight groups of documents.

    xx = sum_i w_i (x_i - mean_x)(x_i - mean_x)ᵀ,   xy and yy likewise
    joined:     n = n_a + n_b,   d = mean_b - mean_a                                                        [chan83]
                mean = mean_a + (n_b / n) d,   xx = xx_a + xx_b + (n_a n_b / n) d dᵀ
    jackknife:  v = (1/G) sum_g (pseudo_g - centre)² / (h_g - 1),     h_g = n / n_g                         [busing99]
                pseudo_g = h_g f - (h_g - 1) f_g,   centre = G f - sum_g (1 - 1 / h_g) f_g,   f_g: f without group g
                value ± t_.975(G - 1) sqrt(v),   G groups with data
                replicate_g = f + (pseudo_g - centre) / sqrt(G (h_g - 1)),   so that v = sum_g (replicate_g - f)²

Products of a batch are computed around its own mean in the precision of the batch (at least float32); sums over batches
are float64. A batch belongs to one group, so that merging it changes one of eight and shares the others. For wide
matrices xx only the blocks on and above the diagonal are stored, which is a little more than half of them.

Read next: regression.py, sums.py (scalars), hashing.py (the groups).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Tensor
from .estimates import Estimate, interval_of
from .hashing import GROUPS
from .validation import check_alike, double, full_precision_products

BLOCKS, NARROW = 8, 64  # block rows of a wide matrix, and the minimum number of rows in each


class GroupMoments(NamedTuple):
    """Count, means and products of deviations of one set of tokens, or of v sets with a leading dimension.

    yy is [q, q], its diagonal [q] or its trace []; without y the fields mean_y, xy and yy are None. In the groups of
    `Comoments` xx may be packed: the blocks on and above its diagonal, row by row, in one dimension.
    """

    tokens: Float[Tensor, "*v"]
    mean_x: Float[Tensor, "*vh p"]
    xx: Float[Tensor, "*vh p p"]
    mean_y: Float[Tensor, "*vh q"] = None  # type: ignore[assignment]
    xy: Float[Tensor, "*vh p q"] = None  # type: ignore[assignment]
    yy: Float[Tensor, "..."] = None  # type: ignore[assignment]

    def divided(self, products: Tensor) -> Tensor:
        """Return products / n, a covariance; NaN if there are no tokens."""
        return products / self.tokens.reshape(*self.tokens.shape, *(1,) * (products.ndim - self.tokens.ndim))

    @property
    def unpacked(self) -> "GroupMoments":
        """Moments with xx as a full matrix."""
        p = self.mean_x.shape[-1]
        return self if self.xx.ndim > self.mean_x.ndim else self._replace(xx=_unpacked(self.xx, p))

    @property
    def covariance(self) -> Float[Tensor, "*vh p p"]:
        """Covariance of x, xx / n."""
        return self.divided(self.unpacked.xx)

    def merge(self, other: "GroupMoments") -> "GroupMoments":
        """Return the moments of the union; a set without tokens is neutral."""
        if self.xx.ndim != other.xx.ndim:
            return self.unpacked.merge(other.unpacked)
        check_alike("GroupMoments.merge", self, other)
        n = self.tokens + other.tokens
        part = torch.where(n > 0, other.tokens / n, 0.0)
        both = self.tokens * part
        dx = other.mean_x - self.mean_x
        between = _outer(dx, dx) if self.xx.ndim > dx.ndim else _packed(dx.unsqueeze(-2))
        moments = GroupMoments(n, self.mean_x + part * dx, (self.xx + other.xx).add_(between.mul_(both)))
        if self.mean_y is None:
            return moments
        dy = other.mean_y - self.mean_y
        squares = _squares(dy.unsqueeze(-2), self.yy.ndim - self.mean_y.ndim)
        return moments._replace(
            mean_y=self.mean_y + part * dy,
            xy=(self.xy + other.xy).add_(_outer(dx, dy).mul_(both)),
            yy=self.yy + other.yy + both * squares,
        )

    @property
    def spread_y(self) -> Float[Tensor, "..."]:
        """Trace of yy, computed from the stored part of yy."""
        part = self.yy.ndim - self.mean_y.ndim
        return self.yy.diagonal(dim1=-2, dim2=-1).sum(-1) if part == 1 else self.yy.sum(-1) if part == 0 else self.yy

    @property
    def spread_of_sum(self) -> Float[Tensor, "..."]:
        """Trace of the products of x + y, for x and y of equal size: tr yy + 2 tr xy + tr xx."""
        xx, xy = (products.diagonal(dim1=-2, dim2=-1).sum(-1) for products in (self.unpacked.xx, self.xy))
        return self.spread_y + 2 * xy + xx

    def _of(self, version: int) -> "GroupMoments":
        return GroupMoments(*(None if field is None else field[version] for field in self))  # type: ignore[arg-type]


class Comoments(NamedTuple):
    """Moments of each of the eight groups; None for a group without batches."""

    groups: tuple[GroupMoments | None, ...]

    def merge(self, other: "Comoments") -> "Comoments":
        """Return the moments of both, group by group."""
        pairs = zip(self.groups, other.groups, strict=True)
        return Comoments(tuple(b if a is None else a if b is None else a.merge(b) for a, b in pairs))

    @property
    def tokens(self) -> Float[Tensor, " g"]:
        """Number of tokens in each of the eight groups."""
        zero = torch.zeros_like(next(group.tokens for group in self.groups if group is not None))
        return torch.stack([zero if group is None else group.tokens for group in self.groups])

    def only(self, group: int) -> GroupMoments:
        """Return the moments of one group, with a count of 0 if it has no batches."""
        _check_group("Comoments.only", group)
        return self._joined([[g == group for g in range(GROUPS)]])._of(0)

    def without(self, group: int) -> GroupMoments:
        """Return the moments of all groups but one."""
        _check_group("Comoments.without", group)
        return self._joined([[g != group for g in range(GROUPS)]])._of(0)

    def unions(self, unions: Sequence[Sequence[int]]) -> GroupMoments:
        """Return the moments of several unions of groups, with a leading dimension."""
        return self._joined([[g in union for g in range(GROUPS)] for union in unions])

    def total(self) -> GroupMoments:
        """Return the moments of all groups together."""
        return self._joined([[True] * GROUPS])._of(0)

    def present(self) -> list[int]:
        """Return the groups that have tokens."""
        return [g for g, tokens in enumerate(self.tokens.tolist()) if tokens > 0]

    def versions(self) -> GroupMoments:
        """Return the moments of all groups, [0], and without each group that has tokens, [1:], if there are several."""
        present = self.present()
        several = present if len(present) > 1 else []  # without the only group no tokens remain
        return self._joined([[True] * GROUPS, *([g != left for g in range(GROUPS)] for left in several)])

    def _joined(self, unions: list[list[bool]]) -> GroupMoments:
        """Return the moments of v unions of groups: xx = sum_g xx_g + sum_g n_g (mean_g - mean)(mean_g - mean)ᵀ."""
        filled = [g for g, group in enumerate(self.groups) if group is not None]
        fields = zip(*(group for group in self.groups if group is not None), strict=True)
        stacked: list[Any] = [None if field[0] is None else torch.stack(field) for field in fields]
        n, x, xx, y, xy, yy = stacked
        member = torch.tensor(unions, dtype=n.dtype, device=n.device)[:, filled]
        weight, count = member * n, member @ n
        share = torch.where(count.unsqueeze(-1) > 0, weight / count.unsqueeze(-1), 0.0)
        fraction = n / n.sum().clamp(min=1e-300)
        mean_x, between_x = _centred(share, fraction, x)
        root = weight.sqrt().reshape(*weight.shape, *(1,) * (x.ndim - 1))
        r = (root * between_x).movedim(1, -2)  # [v, *h, g, p]
        joined = torch.tensordot(member, xx, 1)
        joined = joined if xx.ndim > x.ndim else _unpacked(joined, x.shape[-1])
        moments = GroupMoments(count, mean_x, _symmetric(joined.add_(r.mT @ r)))
        if y is None:
            return moments
        mean_y, between_y = _centred(share, fraction, y)
        s = (root * between_y).movedim(1, -2)
        yy = torch.tensordot(member, yy, 1) + _squares(s, yy.ndim - y.ndim)
        return moments._replace(mean_y=mean_y, xy=torch.tensordot(member, xy, 1) + r.mT @ s, yy=yy)


def comoments_of(
    x: Float[Tensor, "*h t p"],
    y: Float[Tensor, "*h t q"] | None = None,
    *,
    group: int,
    weights: Float[Tensor, " t"] | Bool[Tensor, " t"] | None = None,
    yy: Literal["full", "diagonal", "trace"] = "full",
) -> Comoments:
    """Return the moments of tokens of one group, computed around their mean in float32, or float64 if x is float64.

    Args:
        group: group of the tokens' document, from `group_of`.
        weights: weight of each token, or a mask; tokens of weight 0 may have any values.
        yy: part of the products of y with itself to store.
    """
    _check(x, y, group, weights, yy)
    precision = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False), full_precision_products():
        weight = torch.ones(x.shape[-2], device=x.device) if weights is None else weights
        w = weight.to(x.device, precision, non_blocking=True).unsqueeze(-1)
        count = double(w).sum()
        mask = None if weights is None else w > 0
        mean_x, r, left_x = _deviations(x.to(precision), w, mask)
        if len(_edges(x.shape[-1])) > 2:
            moments = GroupMoments(count, mean_x, double(_packed(r)) - count * _packed(left_x.unsqueeze(-2)))
        else:
            moments = GroupMoments(count, mean_x, _symmetric(_products(r, r, left_x, left_x, count)))
        if y is not None:
            mean_y, s, left_y = _deviations(y.to(precision), w, mask)
            part = ("trace", "diagonal", "full").index(yy) - 1
            squares = double(_squares(s, part)) - count * _squares(left_y.unsqueeze(-2), part)
            moments = moments._replace(mean_y=mean_y, xy=_products(r, s, left_x, left_y, count), yy=squares)
    return Comoments(tuple(moments if g == group else None for g in range(GROUPS)))


def jackknife(function: Callable[[GroupMoments], Tensor], comoments: Comoments) -> Estimate:
    """Return function(moments) with its jackknife confidence interval over groups, NaN with fewer than two groups.

    The function is called once, on the moments of all groups and of all but one: [1 + G, ...] to [1 + G, *e].
    """
    values = function(comoments.versions())
    present = comoments.present()
    present = present if len(present) > 1 else []
    return jackknifed(values[0], values[1:], comoments.tokens[present], groups=present)


def jackknifed(
    value: Float[Tensor, "*e"],
    left: Float[Tensor, "g *e"],
    tokens: Float[Tensor, " g"],
    *,
    groups: Sequence[int] | None = None,
) -> Estimate:
    """Return the jackknife confidence interval of a value.

    left: values without each group. tokens: number of tokens in each group. groups: numbers of these groups; without
        them replicates of two runs are paired only if all eight groups are present.
    """
    G = len(tokens)
    freedom = torch.full_like(value, max(G - 1, 0))
    if G < 2:
        return interval_of(value, value.new_empty(*value.shape, 0), freedom)
    h = (tokens.sum() / tokens).to(value.dtype).reshape(G, *(1,) * value.ndim)
    pseudo = h * value - (h - 1) * left
    centre = G * value - ((1 - 1 / h) * left).sum(0)
    replicates = value.unsqueeze(-1) + ((pseudo - centre) / (G * (h - 1)).sqrt()).movedim(0, -1)
    estimate = interval_of(value, replicates, freedom)
    if groups is None:
        return estimate
    placed = value.unsqueeze(-1).repeat(*(1,) * value.ndim, GROUPS)  # a group without tokens has no influence
    placed[..., list(groups)] = replicates
    return estimate._replace(replicates=placed)


def _deviations(x: Tensor, w: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, the deviations sqrt(w) (x - m) from the rounded mean m, and the rounding error mean(x - m)."""
    total = w.sum().clamp(min=torch.finfo(w.dtype).tiny)
    if mask is not None:
        x = torch.where(mask, x, 0.0)
    m = w.mT @ x / total
    deviation = x - m if mask is None else x.sub_(m)  # in place, since memory bandwidth dominates the cost
    left = (w.mT @ deviation / total).squeeze(-2)
    if mask is not None:
        deviation.mul_(w.sqrt())
    return double(m.squeeze(-2)) + double(left), deviation, double(left)


def _products(r: Tensor, s: Tensor, left_r: Tensor, left_s: Tensor, count: Tensor) -> Tensor:
    return double(r.mT @ s) - count * _outer(left_r, left_s)


def numbers_of(p: int) -> int:
    """Return how many numbers a group stores for the products of p coordinates."""
    return sum((b - a) * (p - a) for a, b in pairwise(_edges(p)))


def _edges(p: int) -> list[int]:
    """Return the first row of each block row of a p x p matrix, and p."""
    blocks = min(BLOCKS, max(p // NARROW, 1))
    return [p * i // blocks for i in range(blocks + 1)]


def _packed(r: Tensor) -> Tensor:
    """Return the blocks on and above the diagonal of rᵀr, r [..., t, p], row by row; a CPU computes no others."""
    pairs = list(pairwise(_edges(r.shape[-1])))
    if r.is_cuda:  # one large product is faster there than several small ones
        product = r.mT @ r
        return torch.cat([product[..., a:b, a:].flatten(-2) for a, b in pairs], -1)
    return torch.cat([(r[..., a:b].mT @ r[..., a:]).flatten(-2) for a, b in pairs], -1)


def _unpacked(packed: Tensor, p: int) -> Tensor:
    """Return the full matrix [..., p, p], exactly symmetric."""
    matrix = packed.new_empty(*packed.shape[:-1], p, p)
    start = 0
    for a, b in pairwise(_edges(p)):
        rows = packed[..., start : start + (b - a) * (p - a)].unflatten(-1, (b - a, p - a))
        matrix[..., a:b, a:] = rows
        matrix[..., a:b, a:b] = _symmetric(rows[..., : b - a])
        matrix[..., b:, a:b] = rows[..., b - a :].mT
        start += (b - a) * (p - a)
    return matrix


def _squares(s: Tensor, part: int) -> Tensor:
    """Return sᵀs of s [..., t, q] (part = 1), its diagonal (0) or its trace (-1)."""
    if part == 1:
        return _symmetric(s.mT @ s)
    return s.square().sum(-2) if part == 0 else s.square().sum((-2, -1))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def _symmetric(products: Tensor) -> Tensor:
    """Return the symmetric part; exactly symmetric, so that half of it can be stored."""
    return (products + products.mT).mul_(0.5)


def _centred(share: Tensor, fraction: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of each union, [v, *h, p], and the deviations of the group means from it, [v, g, *h, p]."""
    origin = torch.tensordot(fraction, means, 1)  # subtracted first, to avoid cancellation if means are large
    offsets = means - origin
    mean = torch.tensordot(share, offsets, 1)
    return origin + mean, offsets - mean.unsqueeze(1)


def _check(x: Tensor, y: Tensor | None, group: int, weights: Tensor | None, yy: str) -> None:
    if x.ndim < 2 or (y is not None and (y.ndim < 2 or y.shape[:-1] != x.shape[:-1])):
        problem = (
            f"x must have shape [*h, t, p], got {shape_of(x)}"
            if y is None
            else f"x and y must have shapes [*h, t, p] and [*h, t, q], got {shape_of(x)} and {shape_of(y)}"
        )
        raise InputValueError("comoments_of", "x", problem, "Flatten batch and position into one dimension t.")
    if weights is not None and shape_of(weights) != shape_of(x)[-2:-1]:
        problem = f"weights must have shape ({x.shape[-2]},), one for each token, got {shape_of(weights)}"
        raise InputValueError("comoments_of", "weights", problem, "Pass one vector of weights for all heads.")
    _check_group("comoments_of", group)
    if yy not in ("full", "diagonal", "trace"):
        problem = f"yy must be 'full', 'diagonal' or 'trace', got {yy!r}"
        raise InputValueError("comoments_of", "yy", problem, "Pass 'trace' if only R² is needed.")


def _check_group(call: str, group: int) -> None:
    if not 0 <= group < GROUPS:
        remedy = "Compute it with group_of(key)."
        raise InputValueError(call, "group", f"group must be between 0 and {GROUPS - 1}, got {group}", remedy)
