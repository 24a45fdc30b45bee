"""The Wishart measure: attention over random covariance matrices.

    h         = Wishart(n, V) on symmetric p x p matrices X
    G(T)      = -(n/2) log det(I - 2 V T)                           V⁻¹ - 2T positive definite
    ∇G(T)     = n S,   S = (V⁻¹ - 2T)⁻¹
    ∇²G(T)[A] = 2 n S A S

A symmetric matrix is a vector of dimension d = p(p+1)/2 through `svec`, which scales off-diagonal entries by sqrt 2 so
that <svec A, svec B> = trace(A B): the inner product of the theory, without the redundancy of p² coordinates.
"""

import math
from typing import TYPE_CHECKING

import torch

from .._errors import (
    InputValueError,
    check_finite,
    check_floats,
    check_positive_semidefinite,
    has_values,
    shape_of,
)
from .._typing import Bool, Float, Tensor, as_scalar_tensor
from .measure import Measure, measure
from .validation import common_batch


def svec(matrix: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b d"]:
    """Coordinates p(p+1)/2 of a symmetric matrix, an isometry: <svec A, svec B> = trace(A B)."""
    check_floats("svec", matrix=matrix)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        fact = f"shape {shape_of(matrix)}"
        raise InputValueError("svec", "matrix", f"matrix must be [*b, p, p], got {fact}", "Pass symmetric matrices.")
    p = matrix.shape[-1]
    row, column = torch.triu_indices(p, p, device=matrix.device)
    off_diagonal = (row != column).to(matrix.dtype)
    return matrix[..., row, column] * (1 + (math.sqrt(2) - 1) * off_diagonal)


def smat(vector: Float[Tensor, "*b d"]) -> Float[Tensor, "*b p p"]:
    """Symmetric matrix with these coordinates: the inverse of `svec`."""
    check_floats("smat", vector=vector)
    d = vector.shape[-1] if vector.ndim else 0
    p = (math.isqrt(8 * d + 1) - 1) // 2
    if d == 0 or p * (p + 1) // 2 != d:
        condition, fact = "vector must have p(p+1)/2 entries for some p", f"shape {shape_of(vector)}"
        raise InputValueError("smat", "vector", f"{condition}, got {fact}", "Build it with svec.")
    row, column = torch.triu_indices(p, p, device=vector.device)
    # Entry (i, j) is coordinate `place`: a gather, since scatter has no vmap over its batch.
    place = torch.zeros(p, p, dtype=torch.long, device=vector.device)
    place[row, column] = place[column, row] = torch.arange(len(row), device=vector.device)
    diagonal = torch.eye(p, dtype=vector.dtype, device=vector.device)
    return vector[..., place] * (math.sqrt(0.5) + (1 - math.sqrt(0.5)) * diagonal)


@measure
class Wishart(Measure):
    """Wishart(df, covariance_matrix): sums of df outer products of N(0, covariance_matrix), in `svec` coordinates.

    >>> import torch
    >>> h = Wishart(torch.tensor(5.0), torch.eye(2))
    >>> smat(h.mean(torch.zeros(3)))
    tensor([[5., 0.],
            [0., 5.]])
    """

    df: Float[Tensor, "*#b"]
    covariance_matrix: Float[Tensor, "*#b p p"]

    if TYPE_CHECKING:  # convert a number to a tensor

        def __init__(self, df: float | Tensor, covariance_matrix: Tensor, *, validate: bool = True) -> None: ...

    def __post_init__(self) -> None:
        V = self.covariance_matrix
        object.__setattr__(self, "df", as_scalar_tensor(self.df, V, V.ndim - 2 if isinstance(V, Tensor) else 0))
        n = self.df
        check_floats("Wishart", df=n, covariance_matrix=V)
        if V.ndim != n.ndim + 2 or V.shape[-1] != V.shape[-2]:
            fact = f"shapes {shape_of(V)} and {shape_of(n)}"
            remedy = "Use the batch dimensions of covariance_matrix for df."
            raise InputValueError(
                "Wishart", "covariance_matrix", f"covariance_matrix must be [*b, p, p] and df [*b], got {fact}", remedy
            )
        common_batch("Wishart", n.shape, V.shape[:-2])
        if self.validate:
            check_finite("Wishart", df=n, covariance_matrix=V)
            check_positive_semidefinite("Wishart", "covariance_matrix", V)
            if has_values(V) and int(torch.linalg.cholesky_ex(V.detach()).info.max()) > 0:
                remedy = "Add a multiple of the identity."
                raise InputValueError(
                    "Wishart", "covariance_matrix", "covariance_matrix must be regular, but it is singular", remedy
                )
            if has_values(n) and bool((n <= V.shape[-1] - 1).any()):
                problem = f"df must exceed p-1={V.shape[-1] - 1}, got {float(n.detach().min()):.3g}"
                raise InputValueError("Wishart", "df", problem, "Increase df: smaller ones have no density.")

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("Wishart", self.df.shape, self.covariance_matrix.shape[:-2])

    @property
    def dim(self) -> int:
        p = self.covariance_matrix.shape[-1]
        return p * (p + 1) // 2

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        L = torch.linalg.cholesky(self.covariance_matrix).unsqueeze(-3)
        identity = torch.eye(L.shape[-1], dtype=eta.dtype, device=eta.device)
        # det(I - 2VT) = det(I - 2 L^T T L): symmetric, so a Cholesky factor gives the determinant.
        factor = torch.linalg.cholesky_ex(identity - 2 * L.mT @ smat(eta) @ L).L
        return -self.df.unsqueeze(-1) * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return self.df[..., None, None] * svec(self._scale(eta))

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        S = self._scale(eta).unsqueeze(-3)
        basis = smat(torch.eye(self.dim, dtype=eta.dtype, device=eta.device))
        return 2 * self.df[..., None, None, None] * svec(S @ basis @ S)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        S = self._scale(eta)
        return 2 * self.df[..., None, None] * svec(S @ smat(vector) @ S)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        top = torch.linalg.eigvalsh(smat(direction))[..., -1]
        return torch.where(top > 0, torch.inf, 0.0).to(direction.dtype)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        L = torch.linalg.cholesky(self.covariance_matrix).unsqueeze(-3)
        return 2 * torch.linalg.eigvalsh(L.mT @ smat(eta) @ L)[..., -1] < 1

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        """Bartlett's decomposition: chi variables on the diagonal, normal ones below it."""
        L = torch.linalg.cholesky(self._scale(eta).detach())
        p = L.shape[-1]
        n = self.df[..., None, None].expand(*shape, *eta.shape[:-1], 1).detach()
        halves = (n - torch.arange(p, dtype=n.dtype, device=n.device)) / 2
        chi = (2 * torch._standard_gamma(halves.contiguous(), generator=generator)).sqrt()
        normal = torch.randn(*chi.shape, p, dtype=n.dtype, device=n.device, generator=generator)
        A = L @ (normal.tril(-1) + torch.diag_embed(chi))
        return svec(A @ A.mT)

    def _scale(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m p p"]:
        """S = (V⁻¹ - 2T)⁻¹ = L (I - 2 L^T T L)⁻¹ L^T."""
        L = torch.linalg.cholesky(self.covariance_matrix).unsqueeze(-3)
        identity = torch.eye(L.shape[-1], dtype=eta.dtype, device=eta.device)
        inner = torch.linalg.inv(identity - 2 * L.mT @ smat(eta) @ L)
        return L @ ((inner + inner.mT) / 2) @ L.mT
