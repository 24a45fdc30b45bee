"""A measure from its log normaliser alone: mean and covariance by automatic differentiation.

    mean                = ∇G        one reverse pass
    covariance_product  = ∇²G v     forward over reverse
    covariance          = ∇²G       d of these products at once

Define `log_normalizer`, `support` and `sample`; mean, covariance and derivatives follow. Closed forms, as
in exponential.py, are faster and keep more digits where G is a difference of large numbers.

Read next: statistic.py and prior.py, which are written this way; ../../../docs/adding_a_measure.md.
"""

import torch

from .._typing import Float, Tensor
from .measure import Measure


class Differentiated(Measure):
    """Measure whose statistics follow from `log_normalizer`, whose rows must be independent of each other."""

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return torch.func.grad(lambda e: self.log_normalizer(e).sum())(eta)

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        basis = torch.eye(self.dim, dtype=eta.dtype, device=eta.device)
        along = torch.func.vmap(lambda e: self.covariance_product(eta, e.expand_as(eta)), out_dims=-1)
        return along(basis)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        return torch.func.jvp(self.mean, (eta,), (vector,))[1]
