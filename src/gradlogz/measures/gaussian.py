"""The Gaussian measure, whose attention is affine.

    h         = N(mu, Sigma),   Sigma = covariance_matrix + diag(cov_diag) + cov_factor cov_factor^T
    G(eta)    = <mu, eta> + <eta, Sigma eta> / 2        [shim22, Cor. 1]
    ∇G(eta)   = mu + Sigma eta                          attention over infinitely many Gaussian keys
    ∇²G(eta)  = Sigma                                   the same for every query

Parts of Sigma that are not given are zero: a diagonal or low-rank covariance becomes a d x d matrix only in
`covariance`. A singular Sigma is allowed; h is then supported on the affine subspace mu + range(Sigma).

Read next: mixture.py (mixtures of Gaussians), algebra.py (convolution with a Gaussian, which smooths the keys).
"""

import torch

from .._errors import (
    InputValueError,
    check_finite,
    check_floats,
    check_positive_semidefinite,
    has_values,
    present,
    shape_of,
)
from .._typing import Float, Tensor
from .measure import Measure, measure
from .validation import common_batch


@measure
class Gaussian(Measure):
    """N(loc, covariance) on R^d; a singular covariance is allowed.

    >>> import torch
    >>> h = Gaussian(torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    >>> h.mean(torch.tensor([1.0, 1.0]))
    tensor([4., 4.])
    """

    loc: Float[Tensor, "*#b d"]
    covariance_matrix: Float[Tensor, "*#b d d"] | None = None
    cov_diag: Float[Tensor, "*#b d"] | None = None
    cov_factor: Float[Tensor, "*#b d r"] | None = None

    def __post_init__(self) -> None:
        mu, dense, diagonal, factor = self.loc, self.covariance_matrix, self.cov_diag, self.cov_factor
        parts = present(covariance_matrix=dense, cov_diag=diagonal, cov_factor=factor)
        check_floats("Gaussian", loc=mu, **parts)
        if mu.ndim == 0:
            remedy = "Use loc.unsqueeze(0) for a Gaussian on the line."
            raise InputValueError("Gaussian", "loc", f"loc must be [*b, d], got shape {shape_of(mu)}", remedy)
        if not parts:
            remedy = "Pass one of them, or use Empirical(loc.unsqueeze(-2)) for a point mass."
            raise InputValueError(
                "Gaussian", "covariance_matrix", "covariance_matrix, cov_diag and cov_factor are all missing", remedy
            )
        d = mu.shape[-1]
        for name, part, tail in (
            ("covariance_matrix", dense, (d, d)),
            ("cov_diag", diagonal, (d,)),
            ("cov_factor", factor, (d, None)),
        ):
            if part is None:
                continue
            sizes = part.shape[mu.ndim - 1 :]
            if len(sizes) != len(tail) or any(t not in (None, f) for t, f in zip(tail, sizes, strict=True)):
                ending = ", ".join("r" if t is None else str(t) for t in tail)
                condition = f"{name} must be [*b, {ending}] for loc of shape {shape_of(mu)}"
                remedy = "Use the batch dimensions of loc, or size 1, in every field."
                raise InputValueError("Gaussian", name, f"{condition}, got shape {shape_of(part)}", remedy)
            common_batch("Gaussian", mu.shape[:-1], part.shape[: mu.ndim - 1])
        if self.validate:
            check_finite("Gaussian", loc=mu, **parts)
            if dense is not None:
                check_positive_semidefinite("Gaussian", "covariance_matrix", dense)
            if diagonal is not None and has_values(diagonal) and bool((diagonal < 0).any()):
                fact = f"{int((diagonal < 0).sum())} of {diagonal.numel()} entries are negative"
                raise InputValueError(
                    "Gaussian", "cov_diag", f"cov_diag must be nonnegative, but {fact}", "Pass variances."
                )

    @classmethod
    def diagonal(
        cls, loc: Float[Tensor, "*#b d"], cov_diag: Float[Tensor, "*#b d"], *, validate: bool = True
    ) -> "Gaussian":
        """N(loc, diag(cov_diag))."""
        return cls(loc, cov_diag=cov_diag, validate=validate)

    @classmethod
    def low_rank(
        cls,
        loc: Float[Tensor, "*#b d"],
        cov_factor: Float[Tensor, "*#b d r"],
        cov_diag: Float[Tensor, "*#b d"] | None = None,
        *,
        validate: bool = True,
    ) -> "Gaussian":
        """N(loc, cov_factor cov_factor^T + diag(cov_diag)); without cov_diag a singular Gaussian on r directions."""
        return cls(loc, cov_factor=cov_factor, cov_diag=cov_diag, validate=validate)

    @property
    def batch_shape(self) -> torch.Size:
        batch = self.loc.shape[:-1]
        parts = [p for p in (self.covariance_matrix, self.cov_diag, self.cov_factor) if p is not None]
        return common_batch("Gaussian", batch, *(p.shape[: len(batch)] for p in parts))

    @property
    def dim(self) -> int:
        return self.loc.shape[-1]

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        mu = self.loc.unsqueeze(-2)  # Shorthand
        return (mu * eta).sum(-1) + (eta * self._times(eta)).sum(-1) / 2

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return self.loc.unsqueeze(-2) + self._times(eta)

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        identity = torch.eye(self.dim, dtype=eta.dtype, device=eta.device)
        # Sigma I, row by row: the only place where a structured covariance becomes a matrix.
        Sigma = self._times(identity.expand(*self.batch_shape, -1, -1))
        return Sigma.unsqueeze(-3).expand(*eta.shape, -1)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        return self._times(vector)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        mu, variance = self.loc.unsqueeze(-2), (direction * self._times(direction)).sum(-1)
        # <d, Sigma d> is 0 to rounding error of its terms, |d_i| |d_j| sqrt(Sigma_ii Sigma_jj) at most.
        terms = (direction.abs() * self._variances().sqrt().unsqueeze(-2)).sum(-1) ** 2
        flat = variance <= 16 * torch.finfo(direction.dtype).eps * terms
        return torch.where(flat, (mu * direction).sum(-1), torch.inf)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        """Draw mean(eta) plus independent noise from each part of Sigma."""
        x = self.mean(eta).expand(*shape, *eta.shape).detach()

        def noise(size: int) -> Tensor:
            return torch.randn(*x.shape[:-1], size, dtype=x.dtype, device=x.device, generator=generator)

        if self.covariance_matrix is not None:
            values, vectors = torch.linalg.eigh(self.covariance_matrix.detach())  # Cholesky would need Sigma > 0
            x = x + noise(self.dim) @ (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).mT
        if self.cov_diag is not None:
            x = x + noise(self.dim) * self.cov_diag.detach().sqrt().unsqueeze(-2)
        if self.cov_factor is not None:
            x = x + noise(self.cov_factor.shape[-1]) @ self.cov_factor.detach().mT
        return x

    def _times(self, vector: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        """Product Sigma vector; the parts cost d², d and d r."""
        product = torch.zeros_like(vector)
        if self.covariance_matrix is not None:
            product = product + vector @ self.covariance_matrix.mT
        if self.cov_diag is not None:
            product = product + self.cov_diag.unsqueeze(-2) * vector
        if self.cov_factor is not None:
            product = product + (vector @ self.cov_factor) @ self.cov_factor.mT
        return product

    def _variances(self) -> Float[Tensor, "*b d"]:
        """Diagonal of Sigma."""
        total = torch.zeros_like(self.loc)
        if self.covariance_matrix is not None:
            total = total + self.covariance_matrix.diagonal(dim1=-2, dim2=-1)
        if self.cov_diag is not None:
            total = total + self.cov_diag
        return total if self.cov_factor is None else total + (self.cov_factor**2).sum(-1)
