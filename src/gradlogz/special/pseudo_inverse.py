"""Inverses of covariances whose coordinates may differ by many orders of magnitude.

    F = S⁻¹ A S⁻¹,  S = diag(F)^(-1/2)        A has unit diagonal: what is small in it is small for every scale

A direction without extent is one in which A, not F, vanishes to rounding error: a coordinate of variance 1e-30 beside
one of variance 1 is kept, the normal of a plane of points is not.
"""

import torch

from .._typing import Float, Tensor

CUT = 64  # times d eps: above the rounding error of a computed covariance


def null_vectors(F: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
    """Unit vectors n with F n = 0 to rounding error, as columns; the other columns are 0."""
    scale = _scale(F)
    values, vectors = torch.linalg.eigh(F * scale.unsqueeze(-1) * scale.unsqueeze(-2))
    flat = values <= CUT * F.shape[-1] * torch.finfo(F.dtype).eps * values[..., -1:]
    columns = scale.unsqueeze(-1) * vectors
    return columns / columns.norm(dim=-2, keepdim=True) * flat.unsqueeze(-2)


def projector(columns: Float[Tensor, "*b d k"]) -> Float[Tensor, "*b d d"]:
    """The orthogonal projector on the span of these columns."""
    left, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    kept = left * (sizes > 1e-6 * sizes[..., :1].clamp(min=torch.finfo(columns.dtype).tiny)).unsqueeze(-2)
    return kept @ kept.mT


def pseudo_inverse(F: Float[Tensor, "*b d d"], null: Float[Tensor, "*b d d"] | None = None) -> Float[Tensor, "*b d d"]:
    """F⁺, with the directions in `null` (by default those of F itself) taken as flat and no others."""
    null = null_vectors(F) if null is None else null
    scale = _scale(F)
    eye = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device)
    within = eye - projector(null)
    # In the scaled coordinates the null vectors are n / scale; filling them with 1 makes the matrix regular.
    columns = null / scale.unsqueeze(-1)
    columns = columns / columns.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(F.dtype).tiny)
    filled = F * scale.unsqueeze(-1) * scale.unsqueeze(-2) + projector(columns)
    inverse = torch.linalg.pinv(filled, hermitian=True, rtol=torch.finfo(F.dtype).eps ** 2)
    return within @ (inverse * scale.unsqueeze(-1) * scale.unsqueeze(-2)) @ within


def _scale(F: Tensor) -> Tensor:
    """diag(F)^(-1/2), and 1 where a variance is 0."""
    variance = F.diagonal(dim1=-2, dim2=-1)
    return variance.where(variance > 0, 1.0).rsqrt()
