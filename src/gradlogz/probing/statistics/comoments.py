"""Means and products of deviations of vectors, kept apart for eight groups of documents.

    xx = sum_i w_i (x_i - mean_x)(x_i - mean_x)ᵀ,   xy and yy likewise
    joined:     n = n_a + n_b,   d = mean_b - mean_a                                                        [chan83]
                mean = mean_a + (n_b / n) d,   xx = xx_a + xx_b + (n_a n_b / n) d dᵀ
    jackknife:  v = (1/G) sum_g (pseudo_g - centre)² / (h_g - 1),     h_g = n / n_g                         [busing99]
                pseudo_g = h_g f - (h_g - 1) f_g,   centre = G f - sum_g (1 - 1 / h_g) f_g,   f_g: f without group g
                value ± t_.975(G - 1) sqrt(v),   G groups that have data

Products of a batch are taken around its own mean in the precision of the batch (float32 at least), sums over batches
are float64. A batch is of one group, so that joining it touches one of eight; the others are shared. Of wide matrices
xx the groups keep the blocks on and above the diagonal alone, which is a little more than half of them.

Read next: regression.py, sums.py (scalars), hashing.py (the groups).
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from ..._errors import InputValueError, shape_of
from ..._typing import Bool, Float, Tensor
from ...special.distributions import student_quantile
from .estimates import Estimate
from .hashing import GROUPS
from .validation import check_alike, double, whole_products

BLOCKS, NARROW = 8, 64  # rows of blocks of a wide matrix, and how many of its rows each has at least


class GroupMoments(NamedTuple):
    """Count, means and products of deviations of one set of tokens, or of v sets at once with a leading dimension.

    yy is [q, q], its diagonal [q] or its trace []; without y all that concerns it is None. In the groups of `Comoments`
    xx may be packed: the blocks on and above its diagonal, row after row, in one dimension.
    """

    tokens: Float[Tensor, "*v"]
    mean_x: Float[Tensor, "*vh p"]
    xx: Float[Tensor, "*vh p p"]
    mean_y: Float[Tensor, "*vh q"] = None  # type: ignore[assignment]
    xy: Float[Tensor, "*vh p q"] = None  # type: ignore[assignment]
    yy: Float[Tensor, "..."] = None  # type: ignore[assignment]

    def divided(self, products: Tensor) -> Tensor:
        """Products over the count: covariances, divided by n. NaN where there are no tokens."""
        return products / self.tokens.reshape(*self.tokens.shape, *(1,) * (products.ndim - self.tokens.ndim))

    @property
    def whole(self) -> "GroupMoments":
        """The same with xx as a matrix."""
        p = self.mean_x.shape[-1]
        return self if self.xx.ndim > self.mean_x.ndim else self._replace(xx=_unpacked(self.xx, p))

    @property
    def covariance(self) -> Float[Tensor, "*vh p p"]:
        """Of x, xx / n."""
        return self.divided(self.whole.xx)

    def merge(self, other: "GroupMoments") -> "GroupMoments":
        """The moments of both sets; a set of no tokens is neutral."""
        if self.xx.ndim != other.xx.ndim:
            return self.whole.merge(other.whole)
        check_alike("GroupMoments.merge", self, other)
        n = self.tokens + other.tokens
        part = torch.where(n > 0, other.tokens / n, 0.0)
        both = self.tokens * part
        dx = other.mean_x - self.mean_x
        between = _outer(dx, dx) if self.xx.ndim > dx.ndim else _packed(dx.unsqueeze(-2))
        found = GroupMoments(n, self.mean_x + part * dx, (self.xx + other.xx).add_(between.mul_(both)))
        if self.mean_y is None:
            return found
        dy = other.mean_y - self.mean_y
        squares = _squares(dy.unsqueeze(-2), self.yy.ndim - self.mean_y.ndim)
        return found._replace(
            mean_y=self.mean_y + part * dy,
            xy=(self.xy + other.xy).add_(_outer(dx, dy).mul_(both)),
            yy=self.yy + other.yy + both * squares,
        )

    @property
    def spread_y(self) -> Float[Tensor, "..."]:
        """The trace of yy, whichever part of it was kept."""
        kept = self.yy.ndim - self.mean_y.ndim
        return self.yy.diagonal(dim1=-2, dim2=-1).sum(-1) if kept == 1 else self.yy.sum(-1) if kept == 0 else self.yy

    def _of(self, version: int) -> "GroupMoments":
        return GroupMoments(*(None if field is None else field[version] for field in self))  # type: ignore[arg-type]


class Comoments(NamedTuple):
    """The moments of each of the eight groups; None for a group that was never met."""

    groups: tuple[GroupMoments | None, ...]

    def merge(self, other: "Comoments") -> "Comoments":
        """Group by group."""
        pairs = zip(self.groups, other.groups, strict=True)
        return Comoments(tuple(b if a is None else a if b is None else a.merge(b) for a, b in pairs))

    @property
    def tokens(self) -> Float[Tensor, " g"]:
        """Tokens of each of the eight groups."""
        zero = torch.zeros_like(next(group.tokens for group in self.groups if group is not None))
        return torch.stack([zero if group is None else group.tokens for group in self.groups])

    def only(self, group: int) -> GroupMoments:
        """The moments of one group, of no tokens if it was never met."""
        _check_group("Comoments.only", group)
        return self._joined([[g == group for g in range(GROUPS)]])._of(0)

    def without(self, group: int) -> GroupMoments:
        """The moments of all groups but one."""
        _check_group("Comoments.without", group)
        return self._joined([[g != group for g in range(GROUPS)]])._of(0)

    def total(self) -> GroupMoments:
        """The moments of all groups together."""
        return self._joined([[True] * GROUPS])._of(0)

    def present(self) -> list[int]:
        """The groups that have tokens."""
        return [g for g, tokens in enumerate(self.tokens.tolist()) if tokens > 0]

    def versions(self) -> GroupMoments:
        """The moments of all groups, [0], and of all but one, [1:], for each that has tokens, if there are several."""
        present = self.present()
        several = present if len(present) > 1 else []  # without its only group nothing is left to take moments of
        return self._joined([[True] * GROUPS, *([g != left for g in range(GROUPS)] for left in several)])

    def _joined(self, kept: list[list[bool]]) -> GroupMoments:
        """The moments of v unions of groups at once: xx = sum_g xx_g + sum_g n_g (mean_g - mean)(mean_g - mean)ᵀ."""
        met = [g for g, group in enumerate(self.groups) if group is not None]
        fields = zip(*(group for group in self.groups if group is not None), strict=True)
        stacked: list[Any] = [None if field[0] is None else torch.stack(field) for field in fields]
        n, x, xx, y, xy, yy = stacked
        keep = torch.tensor(kept, dtype=n.dtype, device=n.device)[:, met]
        weight, count = keep * n, keep @ n
        share = torch.where(count.unsqueeze(-1) > 0, weight / count.unsqueeze(-1), 0.0)
        whole = n / n.sum().clamp(min=1e-300)
        mean_x, between_x = _centred(share, whole, x)
        root = weight.sqrt().reshape(*weight.shape, *(1,) * (x.ndim - 1))
        r = (root * between_x).movedim(1, -2)  # [v, *h, g, p]
        joined = torch.tensordot(keep, xx, 1)
        joined = joined if xx.ndim > x.ndim else _unpacked(joined, x.shape[-1])
        found = GroupMoments(count, mean_x, _symmetric(joined + r.mT @ r))
        if y is None:
            return found
        mean_y, between_y = _centred(share, whole, y)
        s = (root * between_y).movedim(1, -2)
        yy = torch.tensordot(keep, yy, 1) + _squares(s, yy.ndim - y.ndim)
        return found._replace(mean_y=mean_y, xy=torch.tensordot(keep, xy, 1) + r.mT @ s, yy=yy)


def comoments_of(
    x: Float[Tensor, "*h t p"],
    y: Float[Tensor, "*h t q"] | None = None,
    *,
    group: int,
    weights: Float[Tensor, " t"] | Bool[Tensor, " t"] | None = None,
    yy: Literal["full", "diagonal", "trace"] = "full",
) -> Comoments:
    """The moments of tokens of one group, computed around their mean in float32, or float64 if x is.

    Args:
        group: that of the document of all these tokens, from `group_of`.
        weights: how often each token counts, or which count at all; the others may hold anything.
        yy: how much of the products of y with itself to keep.
    """
    _check(x, y, group, weights, yy)
    precision = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False), whole_products():
        given = torch.ones(x.shape[-2], device=x.device) if weights is None else weights
        w = given.to(x.device, precision, non_blocking=True).unsqueeze(-1)
        count = double(w).sum()
        seen = None if weights is None else w > 0
        mean_x, r, left_x = _deviations(x.to(precision), w, seen)
        if len(_edges(x.shape[-1])) > 2:
            found = GroupMoments(count, mean_x, double(_packed(r)) - count * _packed(left_x.unsqueeze(-2)))
        else:
            found = GroupMoments(count, mean_x, _symmetric(_products(r, r, left_x, left_x, count)))
        if y is not None:
            mean_y, s, left_y = _deviations(y.to(precision), w, seen)
            kept = ("trace", "diagonal", "full").index(yy) - 1
            squares = double(_squares(s, kept)) - count * _squares(left_y.unsqueeze(-2), kept)
            found = found._replace(mean_y=mean_y, xy=_products(r, s, left_x, left_y, count), yy=squares)
    return Comoments(tuple(found if g == group else None for g in range(GROUPS)))


def jackknife(function: Callable[[GroupMoments], Tensor], comoments: Comoments) -> Estimate:
    """function(moments) with the interval of the jackknife over groups, NaN with fewer than two of them.

    The function is called once, on the moments of all groups and of all but one: [1 + G, ...] to [1 + G, *e].
    """
    found = function(comoments.versions())
    present = comoments.present()
    return jackknifed(found[0], found[1:], comoments.tokens[present if len(present) > 1 else []])


def jackknifed(value: Float[Tensor, "*e"], left: Float[Tensor, "g *e"], tokens: Float[Tensor, " g"]) -> Estimate:
    """The interval of a value from those without each group, of so many tokens each."""
    G = len(tokens)
    if G < 2:
        nothing = torch.full_like(value, torch.nan)
        return Estimate(value, nothing, nothing, torch.zeros_like(value))
    h = (tokens.sum() / tokens).to(value.dtype).reshape(G, *(1,) * value.ndim)
    pseudo = h * value - (h - 1) * left
    centre = G * value - ((1 - 1 / h) * left).sum(0)
    v = ((pseudo - centre).square() / (h - 1)).mean(0)
    freedom = torch.full_like(value, G - 1)
    arm = student_quantile(freedom) * v.sqrt()
    return Estimate(value, value - arm, value + arm, freedom)


def _deviations(x: Tensor, w: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The mean; sqrt(w) (x - m), m the mean rounded; and what rounding left of the mean of x - m, all over tokens."""
    total = w.sum().clamp(min=torch.finfo(w.dtype).tiny)
    if seen is not None:
        x = torch.where(seen, x, 0.0)
    m = w.mT @ x / total
    deviation = x - m if seen is None else x.sub_(m)  # memory is what this costs
    left = (w.mT @ deviation / total).squeeze(-2)
    if seen is not None:
        deviation.mul_(w.sqrt())
    return double(m.squeeze(-2)) + double(left), deviation, double(left)


def _products(r: Tensor, s: Tensor, left_r: Tensor, left_s: Tensor, count: Tensor) -> Tensor:
    return double(r.mT @ s) - count * _outer(left_r, left_s)


def numbers_of(p: int) -> int:
    """How many numbers a group keeps of the products of p coordinates with each other."""
    return sum((b - a) * (p - a) for a, b in pairwise(_edges(p)))


def _edges(p: int) -> list[int]:
    """Where the rows of blocks of a matrix of p rows begin, and p."""
    blocks = min(BLOCKS, max(p // NARROW, 1))
    return [p * i // blocks for i in range(blocks + 1)]


def _packed(r: Tensor) -> Tensor:
    """rᵀr of [..., t, p], the blocks on and above its diagonal, row after row: nothing is computed twice on a CPU."""
    pairs = list(pairwise(_edges(r.shape[-1])))
    if r.is_cuda:  # to which one large product is less work than some small ones
        whole = r.mT @ r
        return torch.cat([whole[..., a:b, a:].flatten(-2) for a, b in pairs], -1)
    return torch.cat([(r[..., a:b].mT @ r[..., a:]).flatten(-2) for a, b in pairs], -1)


def _unpacked(packed: Tensor, p: int) -> Tensor:
    """The matrix, symmetric to the last bit."""
    found = packed.new_empty(*packed.shape[:-1], p, p)
    start = 0
    for a, b in pairwise(_edges(p)):
        rows = packed[..., start : start + (b - a) * (p - a)].unflatten(-1, (b - a, p - a))
        found[..., a:b, a:] = rows
        found[..., a:b, a:b] = _symmetric(rows[..., : b - a])
        found[..., b:, a:b] = rows[..., b - a :].mT
        start += (b - a) * (p - a)
    return found


def _squares(s: Tensor, kept: int) -> Tensor:
    """sᵀs of [..., t, q]: whole (kept = 1), its diagonal (0) or its trace (-1)."""
    if kept == 1:
        return _symmetric(s.mT @ s)
    return s.square().sum(-2) if kept == 0 else s.square().sum((-2, -1))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def _symmetric(products: Tensor) -> Tensor:
    """To the last bit, so that half of it can be stored."""
    return (products + products.mT) / 2


def _centred(share: Tensor, whole: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each union, [v, *h, p], and how far the groups are from it, [v, g, *h, p]."""
    origin = torch.tensordot(whole, means, 1)  # offsets keep the digits that large means would cost
    offsets = means - origin
    mean = torch.tensordot(share, offsets, 1)
    return origin + mean, offsets - mean.unsqueeze(1)


def _check(x: Tensor, y: Tensor | None, group: int, weights: Tensor | None, yy: str) -> None:
    if x.ndim < 2 or (y is not None and (y.ndim < 2 or y.shape[:-1] != x.shape[:-1])):
        fact = f"shape {shape_of(x)}" if y is None else f"shapes {shape_of(x)} and {shape_of(y)}"
        condition = "x must be [*h, t, p], and y [*h, t, q] if given"
        raise InputValueError(
            "comoments_of", "x", f"{condition}, got {fact}", "Flatten batch and position into one dimension t."
        )
    if weights is not None and shape_of(weights) != shape_of(x)[-2:-1]:
        condition, fact = f"weights must be one for each of the {x.shape[-2]} tokens", f"shape {shape_of(weights)}"
        raise InputValueError("comoments_of", "weights", f"{condition}, got {fact}", "All heads share them.")
    _check_group("comoments_of", group)
    if yy not in ("full", "diagonal", "trace"):
        condition = "yy must be full, diagonal or trace"
        raise InputValueError("comoments_of", "yy", f"{condition}, got {yy!r}", "The trace is enough for a score.")


def _check_group(call: str, group: int) -> None:
    if not 0 <= group < GROUPS:
        remedy = "Take it from group_of the key of the document."
        raise InputValueError(call, "group", f"group must be 0 to {GROUPS - 1}, got {group}", remedy)
