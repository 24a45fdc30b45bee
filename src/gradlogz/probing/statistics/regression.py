"""The best affine map from x to y, and how well it does on documents it has not seen.

    B        = xx^-1 xy,   y ≈ mean_y + (x - mean_x) B
    R²       = 1 - (tr yy - 2 <B, xy> + <B, xx B>) / tr yy                                                   in sample
    held out = 1 - sum_g E_g / sum_g S_g
    E_g      = sum over group g of |y - prediction of the fit to all other groups|²
    S_g      = sum over group g of |y - mean of all other groups|²

All from the moments of the groups; the data themselves are not needed again.

Read next: comoments.py.
"""

from typing import NamedTuple

import torch

from ..._errors import InputValueError
from ..._typing import Float, Tensor
from .comoments import Comoments, GroupMoments, jackknifed
from .estimates import Estimate

RIDGES = (0.0, 1e-8, 1e-6, 1e-4)  # relative to the variance of each coordinate
_SMALLEST = 1e-9  # share of its variance that a coordinate must have for itself, given those before it


class Fit(NamedTuple):
    """y ≈ intercept + x coefficients, with the shares of variance explained in sample and held out."""

    coefficients: Float[Tensor, "*h p q"]
    intercept: Float[Tensor, "*h q"]
    in_sample: Float[Tensor, "*h"]
    held_out: Estimate


def affine_fit(comoments: Comoments) -> Fit:
    """The least-squares map of all groups, scored in sample and on each group by the map of the others.

    The interval is that of a ratio of sums over groups, for the fits as they are; with fewer than two groups nothing
    is held out and the score is NaN. Scores may be negative: worse than predicting the mean.
    """
    if all(group is None or group.mean_y is None for group in comoments.groups):
        remedy = "Pass y to comoments_of."
        raise InputValueError(
            "affine_fit", "comoments", "comoments must have products with y, got those of x alone", remedy
        )
    total, present = comoments.total(), comoments.present()
    whole = solve(total.xx, total.xy)
    intercept = total.mean_y - (total.mean_x.unsqueeze(-2) @ whole).squeeze(-2)
    in_sample = 1 - _error(total, whole) / total.spread_y
    if len(present) < 2:
        nothing = torch.full_like(in_sample, torch.nan)
        return Fit(whole, intercept, in_sample, Estimate(nothing, nothing, nothing, 0 * nothing))
    others = GroupMoments(*(None if field is None else field[1:] for field in comoments.versions()))  # type: ignore[arg-type]
    alone = [group.whole for group in comoments.groups if group is not None and bool(group.tokens > 0)]
    own = GroupMoments(*(torch.stack(field) for field in zip(*alone, strict=True)))
    B = solve(others.xx, others.xy)
    dx, dy = own.mean_x - others.mean_x, own.mean_y - others.mean_y
    missed = dy - (dx.unsqueeze(-2) @ B).squeeze(-2)
    n = own.tokens.reshape(-1, *(1,) * (own.spread_y.ndim - 1))
    E = _error(own, B) + n * missed.square().sum(-1)
    S = own.spread_y + n * dy.square().sum(-1)
    score = 1 - E.sum(0) / S.sum(0)
    return Fit(whole, intercept, in_sample, jackknifed(score, 1 - (E.sum(0) - E) / (S.sum(0) - S), own.tokens))


def solve(xx: Float[Tensor, "*h p p"], xy: Float[Tensor, "*h p q"]) -> Float[Tensor, "*h p q"]:
    """xx^-1 xy; of a singular xx with 1e-8 of each variance added to it, and more only where that is not enough.

    Singular is an xx of which some coordinate is a sum of those before it, but for 1e-9 of its variance. The products
    of float32 batches may be wrong by more than 1e-8; then 1e-6 or 1e-4 is added. A constant coordinate gets 0.
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
    """The squared error of the map B around the means: tr yy - 2 <B, xy> + <B, xx B>."""
    return moments.spread_y + (B * (moments.xx @ B - 2 * moments.xy)).sum((-2, -1))
