"""Any exponential family of torch as a measure: the distribution of its sufficient statistic.

    p(y | theta) = c(y) exp(<T(y), theta> - A(theta))               a torch.distributions.ExponentialFamily
    h            = distribution of T(y),  y ~ p(. | theta)
    G(eta)       = A(theta + eta) - A(theta)                        [shim22, Prop. 1b]
    ∇G(eta)      = E[T(y) | theta + eta]

    family       T(y)                theta                  A(theta)
    normal       (y, y²)             (mu/s², -1/2s²)        -theta1²/(4 theta2) - log(-2 theta2)/2
    gamma        (log y, y)          (k, -rate)             lgamma(theta1) - theta1 log(-theta2)
    beta         (log y, log(1-y))   (a, b)                 lgamma(a) + lgamma(b) - lgamma(a + b)
    dirichlet    log y               concentration          sum lgamma(theta_i) - lgamma(sum theta_i)
    bernoulli    y                   logit                  log(1 + exp theta)

If T(y) = y, exponential.py has the distribution under its own name. Tilting by eta gives another member of the family,
which `to_distribution(h, eta)` in conversion.py returns.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .._errors import InputValueError, check_finite, check_floats, has_values, shape_of
from .._pytree import static_field
from .._typing import Bool, Float, Tensor
from ..special.gamma import log_gamma, log_gamma_draw
from .differentiated import Differentiated
from .measure import measure

Draw = Callable[[Tensor, torch.Generator | None], Tensor]


class Family(NamedTuple):
    """Exponential family: A, its domain, the support function of T, and a sampler of T."""

    log_normalizer: Callable[[Tensor], Tensor]
    in_domain: Callable[[Tensor], Tensor]
    support: Callable[[Tensor], Tensor]
    draw: Draw
    dim: int | None  # dimension of T; None if it is that of theta


def _everywhere(theta: Tensor) -> Tensor:
    return torch.ones(theta.shape[:-1], dtype=torch.bool, device=theta.device)


def _unless(bounded: Tensor, value: Tensor) -> Tensor:
    """Return value where the supremum is finite, +inf elsewhere."""
    return torch.where(bounded, value, torch.inf)


def _log_gamma_simplex(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    x = log_gamma_draw(concentration, generator)
    return x - x.logsumexp(-1, keepdim=True)


def _draw_normal(theta: Tensor, generator: torch.Generator | None) -> Tensor:
    variance = -0.5 / theta[..., 1]
    z = torch.randn(variance.shape, dtype=theta.dtype, device=theta.device, generator=generator)
    y = theta[..., 0] * variance + variance.sqrt() * z
    return torch.stack((y, y * y), -1)


def _draw_gamma(theta: Tensor, generator: torch.Generator | None) -> Tensor:
    log_y = log_gamma_draw(theta[..., 0], generator) - torch.log(-theta[..., 1])
    return torch.stack((log_y, log_y.exp()), -1)


def _normal_support(u: Tensor) -> Tensor:
    """Supremum of u1 y + u2 y² over y."""
    a, b = u[..., 0], u[..., 1]
    return _unless((b < 0) | ((a == 0) & (b == 0)), -a * a / (4 * b.where(b < 0, -1.0)))


def _gamma_support(u: Tensor) -> Tensor:
    """Supremum of u1 log y + u2 y over y > 0."""
    a, b = u[..., 0], u[..., 1]
    inside = (a >= 0) & (b < 0) | (a == 0) & (b == 0)
    return _unless(inside, torch.xlogy(a.clamp(min=0), a.clamp(min=0) / -b.where(b < 0, -1.0)) - a)


def _simplex_support(u: Tensor) -> Tensor:
    """Supremum of sum_i u_i log y_i over the simplex, at y proportional to u."""
    up = u.clamp(min=0)
    total = up.sum(-1, keepdim=True)
    return _unless((u >= 0).all(-1), torch.xlogy(up, up / total.where(total > 0, 1.0)).sum(-1))


DIRICHLET = Family(
    lambda t: log_gamma(t).sum(-1) - log_gamma(t.sum(-1)),
    lambda t: (t > 0).all(-1),
    _simplex_support,
    _log_gamma_simplex,
    None,
)

FAMILIES: dict[str, Family] = {
    "normal": Family(
        lambda t: -(t[..., 0] ** 2) / (4 * t[..., 1]) - torch.log(-2 * t[..., 1]) / 2,
        lambda t: t[..., 1] < 0,
        _normal_support,
        _draw_normal,
        2,
    ),
    "gamma": Family(
        lambda t: log_gamma(t[..., 0]) - t[..., 0] * torch.log(-t[..., 1]),
        lambda t: (t[..., 0] > 0) & (t[..., 1] < 0),
        _gamma_support,
        _draw_gamma,
        2,
    ),
    "beta": DIRICHLET._replace(dim=2),
    "dirichlet": DIRICHLET,
    "bernoulli": Family(
        lambda t: torch.logaddexp(t[..., 0], torch.zeros_like(t[..., 0])),  # torch's softplus drops digits beyond 20
        _everywhere,
        lambda u: u[..., 0].clamp(min=0),
        lambda t, g: torch.bernoulli(t.sigmoid(), generator=g),
        1,
    ),
}


@measure
class Statistic(Differentiated):
    """Distribution of the sufficient statistic T(y), y from the named family at natural parameter theta.

    >>> import torch
    >>> h = Statistic(torch.tensor([0.0, -0.5]), family="normal")  # (y, y²) for y ~ N(0, 1)
    >>> h.mean(torch.tensor([1.0, 0.0]))                           # y ~ N(1, 1)
    tensor([1., 2.])
    """

    natural: Float[Tensor, "*b d"]
    family: str = static_field(kw_only=True)

    def __post_init__(self) -> None:
        check_floats("Statistic", natural=self.natural)
        if self.family not in FAMILIES:
            remedy = "Build it with from_distribution from a torch distribution."
            condition = f"family must be one of {', '.join(FAMILIES)}"
            raise InputValueError("Statistic", "family", f"{condition}, got {self.family!r}", remedy)
        wanted = FAMILIES[self.family].dim
        if self.natural.ndim == 0 or (wanted is not None and self.natural.shape[-1] != wanted):
            condition = f"natural must be [*b, {wanted or 'd'}] for the {self.family} family"
            remedy = "See the table of gradlogz.measures.statistic for theta."
            raise InputValueError("Statistic", "natural", f"{condition}, got shape {shape_of(self.natural)}", remedy)
        if self.validate:
            check_finite("Statistic", natural=self.natural)
            if has_values(self.natural) and not bool(FAMILIES[self.family].in_domain(self.natural).all()):
                condition = f"natural must lie in the domain of the {self.family} family"
                remedy = "See the table of gradlogz.measures.statistic for theta."
                raise InputValueError("Statistic", "natural", f"{condition}, but some parameters are outside", remedy)

    @property
    def batch_shape(self) -> torch.Size:
        return self.natural.shape[:-1]

    @property
    def dim(self) -> int:
        return self.natural.shape[-1]

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        A, theta = FAMILIES[self.family].log_normalizer, self.natural.unsqueeze(-2)  # Shorthand
        return A(theta + eta) - A(theta)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return FAMILIES[self.family].support(direction)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return FAMILIES[self.family].in_domain(self.natural.unsqueeze(-2) + eta)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        theta = (self.natural.unsqueeze(-2) + eta).detach()
        return FAMILIES[self.family].draw(theta.expand(*shape, *theta.shape), generator)
