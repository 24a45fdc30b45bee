"""The conjugate prior as a measure, and the posterior mean as attention.

    base      p(x | theta)     = exp(<x, theta> - G0(theta)) h0(dx)
    prior     h(dtheta)        = exp(<xi, theta> - nu G0(theta) - A(xi, nu)) dtheta
    G(y)      = A(xi + y, nu) - A(xi, nu)                           [theory 6.3]
    ∇G(y)     = E[theta | xi + y, nu]                               a Bayes update without the count
    posterior (xi + x, nu + 1):  E[theta | x] = attention over prior draws, query x, key bias -G0(theta_n)

    base         G0(theta)              theta                              A(xi, nu)
    gaussian     |theta|²/2             N(xi/nu, I/nu)                     |xi|²/2nu - (d/2) log nu
    poisson      sum exp(theta)         log Gamma(xi, nu)                  sum lgamma(xi) - xi log nu
    exponential  -sum log(-theta)       -Gamma(nu + 1, xi)                 sum lgamma(nu+1) - (nu+1) log xi
    bernoulli    sum log(1 + e^theta)   logit Beta(xi, nu - xi)            sum log B(xi, nu - xi)
    categorical  log(1 + sum e^theta)   log p_i/p_0, Dirichlet(xi, rest)   log B(xi, nu - sum xi)

xi/nu is the prior mean of the expected statistic ∇G0(theta); nu counts prior observations.

Read next: differentiated.py (mean and covariance).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._errors import InputValueError, check_finite, check_floats, check_positive, has_values, shape_of
from .._pytree import static_field
from .._typing import Bool, Float, Tensor, as_scalar_tensor
from ..special.gamma import log_gamma, log_gamma_draw
from .differentiated import Differentiated
from .measure import measure
from .validation import common_batch


class Base(NamedTuple):
    """Base family: G0(theta), A(xi, nu) and its domain, the support function of theta, and a sampler."""

    log_normalizer: Callable[[Tensor], Tensor]
    prior_log_normalizer: Callable[[Tensor, Tensor], Tensor]
    in_domain: Callable[[Tensor, Tensor], Tensor]
    support: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, torch.Generator | None], Tensor]


def _whole_space(u: Tensor) -> Tensor:
    return torch.where((u == 0).all(-1), 0.0, torch.inf).to(u.dtype)


def _negative_orthant(u: Tensor) -> Tensor:
    return torch.where((u >= 0).all(-1), 0.0, torch.inf).to(u.dtype)


BASES: dict[str, Base] = {
    "gaussian": Base(
        lambda t: (t * t).sum(-1) / 2,
        lambda xi, nu: (xi * xi).sum(-1) / (2 * nu) - xi.shape[-1] / 2 * nu.log(),
        lambda xi, nu: torch.ones_like(xi[..., 0], dtype=torch.bool),
        _whole_space,
        lambda xi, nu, g: xi / nu + torch.randn(xi.shape, dtype=xi.dtype, device=xi.device, generator=g) * nu.rsqrt(),
    ),
    "poisson": Base(
        lambda t: t.exp().sum(-1),
        lambda xi, nu: log_gamma(xi).sum(-1) - xi.sum(-1) * nu.log(),
        lambda xi, nu: (xi > 0).all(-1),
        _whole_space,
        lambda xi, nu, g: log_gamma_draw(xi, g) - nu.log(),
    ),
    "exponential": Base(
        lambda t: -torch.log(-t).sum(-1),
        lambda xi, nu: xi.shape[-1] * log_gamma(nu + 1) - (nu + 1) * xi.log().sum(-1),
        lambda xi, nu: (xi > 0).all(-1),
        _negative_orthant,
        lambda xi, nu, g: -log_gamma_draw((nu + 1).expand_as(xi), g).exp() / xi,
    ),
    "bernoulli": Base(
        lambda t: torch.logaddexp(t, torch.zeros_like(t)).sum(-1),
        lambda xi, nu: (log_gamma(xi) + log_gamma(nu.unsqueeze(-1) - xi)).sum(-1) - xi.shape[-1] * log_gamma(nu),
        lambda xi, nu: ((xi > 0) & (xi < nu.unsqueeze(-1))).all(-1),
        _whole_space,
        lambda xi, nu, g: log_gamma_draw(xi, g) - log_gamma_draw(nu - xi, g),
    ),
    "categorical": Base(
        lambda t: torch.cat((torch.zeros_like(t[..., :1]), t), -1).logsumexp(-1),
        lambda xi, nu: log_gamma(xi).sum(-1) + log_gamma(nu - xi.sum(-1)) - log_gamma(nu),
        lambda xi, nu: (xi > 0).all(-1) & (xi.sum(-1) < nu),
        _whole_space,
        lambda xi, nu, g: log_gamma_draw(xi, g) - log_gamma_draw(nu - xi.sum(-1, keepdim=True), g),
    ),
}


@measure
class ConjugatePrior(Differentiated):
    """The conjugate prior of a base family, as a measure of its natural parameter theta.

    >>> import torch
    >>> prior = ConjugatePrior(torch.tensor([2.0]), torch.tensor(4.0), base="gaussian")
    >>> prior.posterior(torch.tensor([3.0])).mean(torch.zeros(1))  # (2 + 3) / (4 + 1)
    tensor([1.])
    """

    xi: Float[Tensor, "*#b d"]
    nu: Float[Tensor, "*#b"]
    base: str = static_field(kw_only=True)

    if TYPE_CHECKING:  # convert a number to a tensor

        def __init__(self, xi: Tensor, nu: float | Tensor, *, base: str, validate: bool = True) -> None: ...

    def __post_init__(self) -> None:
        xi = self.xi
        object.__setattr__(self, "nu", as_scalar_tensor(self.nu, xi, xi.ndim - 1 if isinstance(xi, Tensor) else 0))
        nu = self.nu
        check_floats("ConjugatePrior", xi=xi, nu=nu)
        if self.base not in BASES:
            condition = f"base must be one of {', '.join(BASES)}"
            remedy = "For another family, add a row to BASES."
            raise InputValueError("ConjugatePrior", "base", f"{condition}, got {self.base!r}", remedy)
        if xi.ndim != nu.ndim + 1:
            fact = f"shapes {shape_of(xi)} and {shape_of(nu)}"
            raise InputValueError(
                "ConjugatePrior",
                "xi",
                f"xi must be [*b, d] and nu [*b], got {fact}",
                "Leave the last dimension of nu out.",
            )
        common_batch("ConjugatePrior", xi.shape[:-1], nu.shape)
        if self.validate:
            check_finite("ConjugatePrior", xi=xi, nu=nu)
            check_positive("ConjugatePrior", nu=nu)
            if has_values(xi, nu) and not bool(BASES[self.base].in_domain(xi, nu).all()):
                remedy = "Choose xi/nu inside the range of means of the statistic."
                condition = f"(xi, nu) must give a proper {self.base} prior"
                raise InputValueError("ConjugatePrior", "xi", f"{condition}, but its mass is infinite", remedy)

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("ConjugatePrior", self.xi.shape[:-1], self.nu.shape)

    @property
    def dim(self) -> int:
        return self.xi.shape[-1]

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        A, xi, nu = BASES[self.base].prior_log_normalizer, self.xi.unsqueeze(-2), self.nu.unsqueeze(-1)  # Shorthand
        return A(xi + eta, nu) - A(xi, nu)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        if self.base == "gaussian":  # constant in eta, which torch.compile cannot detect by differentiating
            return (vector / self.nu[..., None, None]).expand_as(eta).clone()
        return super().covariance_product(eta, vector)

    def base_log_normalizer(self, theta: Float[Tensor, "*bm d"]) -> Float[Tensor, "*bm"]:
        """G0(theta). With key bias -G0(theta), attention over prior draws is the posterior mean."""
        return BASES[self.base].log_normalizer(theta)

    def posterior(self, statistic: Float[Tensor, "*b d"], count: int = 1) -> "ConjugatePrior":
        """Posterior after `count` observations with this sum of statistics: (xi + statistic, nu + count)."""
        check_floats("ConjugatePrior.posterior", xi=self.xi, statistic=statistic)
        if count < 0:
            remedy = "Pass the number of observations."
            raise InputValueError(
                "ConjugatePrior.posterior", "count", f"count must be at least 0, got count={count}", remedy
            )
        if statistic.shape != self.xi.shape:
            fact = f"shapes {shape_of(statistic)} and {shape_of(self.xi)}"
            remedy = "Expand it, or sum it over the observations."
            raise InputValueError(
                "ConjugatePrior.posterior", "statistic", f"statistic must have the shape of xi, got {fact}", remedy
            )
        return ConjugatePrior(self.xi + statistic, self.nu + count, base=self.base, validate=self.validate)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return BASES[self.base].support(direction)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return BASES[self.base].in_domain(self.xi.unsqueeze(-2) + eta, self.nu.unsqueeze(-1))

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        xi = (self.xi.unsqueeze(-2) + eta).detach()
        nu = self.nu[..., None, None].expand(*xi.shape[:-1], 1).detach()
        return BASES[self.base].draw(xi.expand(*shape, *xi.shape), nu, generator)
