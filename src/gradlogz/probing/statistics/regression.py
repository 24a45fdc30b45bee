"""Least-squares affine map from x to y, with in-sample and held-out R².

    B        = xx^-1 xy,   y ≈ mean_y + (x - mean_x) B
    R²       = 1 - (tr yy - 2 <B, xy> + <B, xx B>) / tr yy                                                   in sample
    held out = 1 - sum_g E_g / sum_g S_g
    E_g      = sum over group g of |y - prediction of the fit to all other groups|²
    S_g      = sum over group g of |y - mean of all other groups|²

The held-out R² is too small for few tokens: the error of a fit to n tokens exceeds that of the best affine map because
its coefficients are estimated. For n independent normal tokens and p coordinates, up to terms of order 1 / n,

    1 / E(n)     = (1 / E(∞)) (1 - p / n)

Tokens of one document are not independent and count as fewer, so that p / n becomes c / n with an unknown c. Each group
is therefore also predicted by the fit to half of the other groups, and 1 / E is extrapolated linearly in 1 / n to 0:

    1 / E(∞)     = (k / E - 1 / E_half) / (k - 1),   E = sum_g E_g,   k = n / n_half
    extrapolated = 1 - E(∞) / sum_g S_g

This is exact for independent tokens, and removes most of the bias where documents differ. If they are fewer than the
coordinates and differ strongly, a part of it remains.

The best map from x to x + y is the identity plus the best map from x to y. Its errors are therefore the same, and only
tr yy and S_g are those of x + y.

All quantities are computed from the moments of the groups, without another pass over the data.

Read next: comoments.py.
"""

from typing import NamedTuple

import torch

from ..._errors import InputValueError
from ..._typing import Float, Tensor
from .comoments import Comoments, GroupMoments, jackknifed
from .estimates import Estimate, interval_of

RIDGES = (0.0, 1e-8, 1e-6, 1e-4)  # relative to the variance of each coordinate
WIDE = 512  # coordinates from which groups are fitted one by one
_SMALLEST = 1e-9  # smallest conditional variance of a coordinate given the preceding ones, relative to its variance


class Fit(NamedTuple):
    """The map y ≈ intercept + x coefficients, with its in-sample and held-out R².

    extrapolated: held-out R² of a map that is fitted to infinitely many tokens; NaN with fewer than three groups, or if
        half of the others have fewer than 2 p tokens.
    """

    coefficients: Float[Tensor, "*h p q"]
    intercept: Float[Tensor, "*h q"]
    in_sample: Float[Tensor, "*h"]
    held_out: Estimate
    extrapolated: Estimate


def affine_fit(comoments: Comoments) -> Fit:
    """Return the least-squares map of all groups, with R² in sample and on each group for the map of the others.

    The confidence interval is that of a ratio of sums over groups, conditional on the fits. With fewer than two groups
    the held-out R² is NaN. A negative R² is worse than predicting the mean.
    """
    return _scored(_filled(comoments), _errors(comoments), comoments.present())


def affine_fits(comoments: Comoments) -> tuple[Fit, Fit]:
    """Return the `affine_fit` of y and that of x + y, for x and y of equal size, at the cost of one."""
    groups, errors, present = _filled(comoments), _errors(comoments), comoments.present()
    eye = torch.eye(errors.coefficients.shape[-1]).to(errors.coefficients)
    moved = errors._replace(coefficients=eye + errors.coefficients)
    return _scored(groups, errors, present), _scored(groups, moved, present, add_x=True)


class _Errors(NamedTuple):
    """Coefficients of the map of all groups, and squared errors: in sample, E_g, and E_g with half of the other groups.

    held_out, half, k: None with fewer than two groups. k: n / n_half of all groups, [0], and without each, [1:]; NaN if
    half of the others have too few tokens.
    """

    coefficients: Float[Tensor, "*h p q"]
    in_sample: Float[Tensor, "*h"]
    held_out: Float[Tensor, "g *h"] | None = None
    half: Float[Tensor, "g *h"] | None = None
    k: Float[Tensor, " _"] | None = None


def _errors(comoments: Comoments) -> _Errors:
    total, present = comoments.total(), comoments.present()
    coefficients = solve(total.xx, total.xy)
    in_sample = _error(total, coefficients)
    if len(present) < 2:
        return _Errors(coefficients, in_sample)
    p = total.xx.shape[-1]
    del total
    others = [[g for g in present if g != left] for left in present]
    half = [(2 * present)[i + 1 : i + len(present) : 2] for i in range(len(present))]
    # Groups one by one if matrices are wide: those of all groups at once would take several times their memory.
    size = 1 if p >= WIDE else len(present)
    spans = [slice(first, first + size) for first in range(0, len(present), size)]
    parts = [_errors_in(comoments, present[span], others[span], half[span]) for span in spans]
    held_out, held_out_half, tokens, tokens_half = (torch.cat(each) for each in zip(*parts, strict=True))
    k = _with_each_left_out(tokens) / _with_each_left_out(tokens_half)
    k = torch.where(tokens_half.min() >= 2 * p, k, torch.nan)
    return _Errors(coefficients, in_sample, held_out, held_out_half, k)


def _errors_in(
    comoments: Comoments, held: list[int], others: list[list[int]], half: list[list[int]]
) -> tuple[Float[Tensor, "g *h"], Float[Tensor, "g *h"], Float[Tensor, " g"], Float[Tensor, " g"]]:
    """Return the squared errors in groups of the maps fitted to others and to half of them, and the tokens of both."""
    moments = comoments.unions([[g] for g in held])
    errors, tokens = [], []
    for unions in (others, half):
        fitted = comoments.unions(unions)
        errors.append(_held_out_error(moments, fitted))
        tokens.append(fitted.tokens)
    return *errors, *tokens  # type: ignore[return-value]


def _scored(groups: list[GroupMoments], errors: _Errors, present: list[int], *, add_x: bool = False) -> Fit:
    """Return the fit with these coefficients and errors; R² is relative to the variation of y, or of x + y."""
    n, x, y = (torch.stack([getattr(m, name) for m in groups]) for name in ("tokens", "mean_x", "mean_y"))
    spread = torch.stack([m.spread_of_sum if add_x else m.spread_y for m in groups])
    y = x + y if add_x else y
    share = n / n.sum()
    mean_y, mean_x = (torch.tensordot(share, means, 1) for means in (y, x))
    intercept = mean_y - (mean_x.unsqueeze(-2) @ errors.coefficients).squeeze(-2)
    between = (y - mean_y).square().sum(-1)
    count = n.reshape(-1, *(1,) * (spread.ndim - 1))
    in_sample = 1 - errors.in_sample / (spread + count * between).sum(0)
    if errors.held_out is None or errors.half is None or errors.k is None:
        nothing = torch.full_like(in_sample, torch.nan)
        unknown = interval_of(nothing, nothing.new_empty(*nothing.shape, 0), torch.zeros_like(nothing))
        return Fit(errors.coefficients, intercept, in_sample, unknown, unknown)
    # The mean of a group is farther from that of the others than from that of all groups, by the factor n / (n - n_g).
    S = spread + count * between * (n.sum() / (n.sum() - count)).square()
    E, E_half, S = (_with_each_left_out(t) for t in (errors.held_out, errors.half, S))
    k = errors.k.reshape(-1, *(1,) * (E.ndim - 1))
    best = (k - 1) / (k / E - 1 / E_half)  # k = 1 if the other groups are too few to be halved
    scores = (1 - E / S, 1 - torch.where(k > 1, best, torch.nan) / S)
    estimates = (jackknifed(score[0], score[1:], n, groups=present) for score in scores)
    return Fit(errors.coefficients, intercept, in_sample, *estimates)


def _filled(comoments: Comoments) -> list[GroupMoments]:
    """Return the moments of each group that has tokens."""
    if all(group is None or group.mean_y is None for group in comoments.groups):
        problem = "comoments contain no products with y"
        raise InputValueError("affine_fit", "comoments", problem, "Pass y to comoments_of.")
    return [group.unpacked for group in comoments.groups if group is not None and bool(group.tokens > 0)]


def _with_each_left_out(terms: Float[Tensor, "g *h"]) -> Float[Tensor, "_ *h"]:
    """Return the sum over groups, [0], and the sums without each group, [1:]."""
    total = terms.sum(0, keepdim=True)
    return torch.cat((total, total - terms))


def _held_out_error(held: GroupMoments, others: GroupMoments) -> Float[Tensor, "g *h"]:
    """Return the squared error in each group of the map that is fitted to the others."""
    B = solve(others.xx, others.xy)
    dx, dy = held.mean_x - others.mean_x, held.mean_y - others.mean_y
    missed = dy - (dx.unsqueeze(-2) @ B).squeeze(-2)
    n = held.tokens.reshape(-1, *(1,) * (held.spread_y.ndim - 1))
    return _error(held, B) + n * missed.square().sum(-1)


def solve(xx: Float[Tensor, "*h p p"], xy: Float[Tensor, "*h p q"]) -> Float[Tensor, "*h p q"]:
    """Return xx^-1 xy; if xx is singular, a ridge of 1e-8, 1e-6 or 1e-4 of each variance is added.

    xx is singular if the preceding coordinates explain all but 1e-9 of a coordinate's variance. The larger ridges are
    used if the rounding errors of float32 batches exceed 1e-8. A constant coordinate has the coefficient 0.
    """
    variance = xx.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(variance > 0, variance, 1.0).sqrt().unsqueeze(-1)
    C = xx / scale / scale.mT
    C = C + torch.diag_embed((variance <= 0).to(C.dtype))
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    factor, failed = torch.linalg.cholesky_ex(C)
    for ridge in RIDGES[1:]:
        pivots = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
        singular = (failed > 0) | ~(pivots > _SMALLEST)
        if not bool(singular.any()):
            break
        again, failed_again = torch.linalg.cholesky_ex(C + ridge * eye)
        factor = torch.where(singular[..., None, None], again, factor)
        failed = torch.where(singular, failed_again, failed)
    return torch.cholesky_solve(xy / scale, factor) / scale


def _error(moments: GroupMoments, B: Tensor) -> Tensor:
    """Return the squared error of the map B around the means: tr yy - 2 <B, xy> + <B, xx B>."""
    return moments.spread_y + (B * (moments.xx @ B - 2 * moments.xy)).sum((-2, -1))
