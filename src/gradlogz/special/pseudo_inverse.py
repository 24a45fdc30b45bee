"""Pseudo-inverse of covariances whose coordinates may differ by many orders of magnitude.

    F = S⁻¹ A S⁻¹,  S = diag(F)^(-1/2)        A has unit diagonal and does not depend on scales

A direction is null if A, not F, vanishes in it to rounding error: a coordinate of variance 1e-30 next to one of
variance 1 is not null, the normal of a plane of points is.
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
    """Orthogonal projector onto the span of these columns."""
    left, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    basis = left * (sizes > 1e-6 * sizes[..., :1].clamp(min=torch.finfo(columns.dtype).tiny)).unsqueeze(-2)
    return basis @ basis.mT


def pseudo_inverse(F: Float[Tensor, "*b d d"], null: Float[Tensor, "*b d d"] | None = None) -> Float[Tensor, "*b d d"]:
    """Pseudo-inverse F⁺ with exactly the null directions `null`, by default those of F."""
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
    """Scale diag(F)^(-1/2), 1 where a variance is 0."""
    variance = F.diagonal(dim1=-2, dim2=-1)
    return variance.where(variance > 0, 1.0).rsqrt()
