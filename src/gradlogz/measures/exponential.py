"""Classical families as measures: the distribution of one member generates the others.

    h         = p_0(x | eta1, eta2)
    G(eta)    = G_0(eta1 + eta, eta2) - G_0(eta1, eta2)             [shim22, Prop. 1b]
    ∇G(eta)   = E[x | eta1 + eta, eta2]                             tilting is a translation

    Gamma(k, r)            G = -k log(1 - eta/r)                    mean k / (r - eta),              eta < r
    InverseGaussian(m, l)  G = (l/m) (1 - sqrt(1 - 2 m² eta/l))     mean m / sqrt(1 - 2 m² eta/l),   eta < l / 2m²
    Poisson(r)             G = r (exp(eta) - 1)                     mean r exp(eta)
    Spins(b)               G = log cosh(b + eta) - log cosh(b)      mean tanh(b + eta)
    OneHot(log p)          G = log sum_i p_i exp(eta_i)             mean softmax(log p + eta)

The first four act on each coordinate separately: a d-dimensional one is a product of d independent distributions.
Their means are activation functions that may be applied to a query before a dot product.

Read next: statistic.py (any torch distribution), wishart.py, prior.py.
"""

from abc import abstractmethod

import torch

from .._errors import (
    InputValueError,
    check_finite,
    check_floats,
    check_logarithms,
    check_normalized,
    check_positive,
    shape_of,
)
from .._typing import Bool, Float, Tensor
from ..special import log_domain
from .measure import Measure, measure
from .validation import common_batch


class Separable(Measure):
    """Measure with independent coordinates: G(eta) = sum_i g(eta_i), defined by elementwise g, g' and g''."""

    @abstractmethod
    def _g(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        """Log normaliser of each coordinate."""

    @abstractmethod
    def _g1(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        """Derivative of the log normaliser of each coordinate, the mean."""

    @abstractmethod
    def _g2(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        """Second derivative of the log normaliser of each coordinate, the variance."""

    @property
    @abstractmethod
    def _bounds(self) -> tuple[float, float]:
        """Smallest closed interval that contains the support of a coordinate."""

    @property
    def batch_shape(self) -> torch.Size:
        fields = [getattr(self, name) for name in self._free]
        return common_batch(type(self).__name__, *(f.shape[:-1] for f in fields))

    @property
    def dim(self) -> int:
        return getattr(self, self._free[0]).shape[-1]

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return self._g(eta).sum(-1)

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return self._g1(eta)

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        return torch.diag_embed(self._g2(eta))

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        return self._g2(eta) * vector

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        low, high = self._bounds
        upward = torch.where(direction > 0, high * direction.where(direction > 0, 1.0), 0.0)
        downward = torch.where(direction < 0, low * direction.where(direction < 0, 1.0), 0.0)
        return (upward + downward).sum(-1)

    def _check_fields(self, *positive: str) -> None:
        """Check that every field is [*b, d] with one d, and that the named ones are positive."""
        name, fields = type(self).__name__, {f: getattr(self, f) for f in self._free}
        check_floats(name, **fields)
        if any(f.ndim == 0 for f in fields.values()) or len({f.shape[-1] for f in fields.values()}) > 1:
            fact = ", ".join(f"{n} {shape_of(f)}" for n, f in fields.items())
            remedy = "Use unsqueeze(-1) for a distribution on the line, and one d for all fields."
            raise InputValueError(name, "fields", f"fields must be [*b, d], got {fact}", remedy)
        common_batch(name, *(f.shape[:-1] for f in fields.values()))
        if self.validate:
            check_finite(name, **fields)
            check_positive(name, **{f: fields[f] for f in positive})


@measure
class Gamma(Separable):
    """Gamma(concentration, rate) on each coordinate; eta must stay below the rate.

    >>> import torch
    >>> Gamma(torch.tensor([3.0]), torch.tensor([2.0])).mean(torch.tensor([0.5]))
    tensor([2.])
    """

    concentration: Float[Tensor, "*#b d"]
    rate: Float[Tensor, "*#b d"]

    def __post_init__(self) -> None:
        self._check_fields("concentration", "rate")

    _bounds = (0.0, torch.inf)

    def _g(self, eta: Tensor) -> Tensor:
        return -self.concentration.unsqueeze(-2) * torch.log1p(-eta / self.rate.unsqueeze(-2))

    def _g1(self, eta: Tensor) -> Tensor:
        return self.concentration.unsqueeze(-2) / (self.rate.unsqueeze(-2) - eta)

    def _g2(self, eta: Tensor) -> Tensor:
        return self.concentration.unsqueeze(-2) / (self.rate.unsqueeze(-2) - eta) ** 2

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return (eta < self.rate.unsqueeze(-2)).all(-1)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        k = self.concentration.unsqueeze(-2).expand(*shape, *eta.shape).contiguous()
        return torch._standard_gamma(k.detach(), generator=generator) / (self.rate.unsqueeze(-2) - eta).detach()


@measure
class InverseGaussian(Separable):
    """First passage time of a Brownian motion with drift: mean loc, variance loc³ / concentration.

    >>> import torch
    >>> InverseGaussian(torch.tensor([1.0]), torch.tensor([2.0])).mean(torch.tensor([0.75]))
    tensor([2.])
    """

    loc: Float[Tensor, "*#b d"]
    concentration: Float[Tensor, "*#b d"]

    def __post_init__(self) -> None:
        self._check_fields("loc", "concentration")

    _bounds = (0.0, torch.inf)

    def _root(self, eta: Tensor) -> Tensor:
        m, l = self.loc.unsqueeze(-2), self.concentration.unsqueeze(-2)  # noqa: E741  Shorthand
        return (1 - 2 * m * m * eta / l).sqrt()

    def _g(self, eta: Tensor) -> Tensor:
        return 2 * self.loc.unsqueeze(-2) * eta / (1 + self._root(eta))  # (l/m)(1 - root), without cancellation

    def _g1(self, eta: Tensor) -> Tensor:
        return self.loc.unsqueeze(-2) / self._root(eta)

    def _g2(self, eta: Tensor) -> Tensor:
        return self._g1(eta) ** 3 / self.concentration.unsqueeze(-2)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return (2 * self.loc.unsqueeze(-2) ** 2 * eta < self.concentration.unsqueeze(-2)).all(-1)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        """Draw by choosing one of the two roots of a chi-square equation.   [michael76]"""
        m = self._g1(eta).detach().expand(*shape, *eta.shape)
        z = torch.randn(m.shape, dtype=m.dtype, device=m.device, generator=generator) ** 2
        ratio = m * z / (2 * self.concentration.detach().unsqueeze(-2))
        small = m / (1 + ratio + (ratio * (2 + ratio)).sqrt())
        u = torch.rand(m.shape, dtype=m.dtype, device=m.device, generator=generator)
        return torch.where(u * (m + small) <= m, small, m * m / small)


@measure
class Poisson(Separable):
    """Poisson(rate) on each coordinate: attention over counts.

    >>> import torch
    >>> Poisson(torch.tensor([2.0])).mean(torch.tensor([0.0]))
    tensor([2.])
    """

    rate: Float[Tensor, "*#b d"]

    def __post_init__(self) -> None:
        self._check_fields("rate")

    _bounds = (0.0, torch.inf)

    def _g(self, eta: Tensor) -> Tensor:
        return self.rate.unsqueeze(-2) * torch.expm1(eta)

    def _g1(self, eta: Tensor) -> Tensor:
        return self.rate.unsqueeze(-2) * eta.exp()

    def _g2(self, eta: Tensor) -> Tensor:
        return self.rate.unsqueeze(-2) * eta.exp()

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        return torch.poisson(self._g1(eta).detach().expand(*shape, *eta.shape), generator=generator)


@measure
class Spins(Separable):
    """Independent spins, x in {-1, 1}^d, with fields bias: the corners of the cube, 2^d keys at the cost of d.

    >>> import torch
    >>> h, eta = Spins(torch.zeros(2)), torch.tensor([0.3, -1.0])
    >>> torch.allclose(h.mean(eta), eta.tanh())
    True
    """

    bias: Float[Tensor, "*#b d"]

    def __post_init__(self) -> None:
        self._check_fields()

    _bounds = (-1.0, 1.0)

    def _g(self, eta: Tensor) -> Tensor:
        b = self.bias.unsqueeze(-2)
        # log cosh x = x + log(1 + exp(-2x)) - log 2; torch's softplus would drop digits beyond 20.
        zero = torch.zeros((), dtype=eta.dtype, device=eta.device)
        return eta + torch.logaddexp(-2 * (b + eta), zero) - torch.logaddexp(-2 * b, zero)

    def _g1(self, eta: Tensor) -> Tensor:
        return (self.bias.unsqueeze(-2) + eta).tanh()

    def _g2(self, eta: Tensor) -> Tensor:
        x = 2 * (self.bias.unsqueeze(-2) + eta)
        return 4 * x.sigmoid() * (-x).sigmoid()

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        up = (2 * (self.bias.unsqueeze(-2) + eta)).sigmoid().detach().expand(*shape, *eta.shape)
        return 2 * torch.bernoulli(up, generator=generator) - 1


@measure
class OneHot(Measure):
    """One of d categories, as a one-hot vector: the softmax itself is the mean.

    >>> import torch
    >>> h, eta = OneHot(torch.log(torch.tensor([0.2, 0.8]))), torch.tensor([1.0, 0.0])
    >>> torch.allclose(h.mean(eta), torch.softmax(h.log_probabilities + eta, -1))
    True
    """

    log_probabilities: Float[Tensor, "*b d"]

    def __post_init__(self) -> None:
        log_p = self.log_probabilities
        check_floats("OneHot", log_probabilities=log_p)
        if log_p.ndim == 0 or log_p.shape[-1] == 0:
            fact = f"shape {shape_of(log_p)}"
            raise InputValueError(
                "OneHot",
                "log_probabilities",
                f"log_probabilities must be [*b, d] with d >= 1, got {fact}",
                "Pass one for each category.",
            )
        if self.validate:
            check_logarithms("OneHot", "log_probabilities", log_p)
            check_normalized("OneHot", "exp(log_probabilities)", log_p.logsumexp(-1))

    @property
    def batch_shape(self) -> torch.Size:
        return self.log_probabilities.shape[:-1]

    @property
    def dim(self) -> int:
        return self.log_probabilities.shape[-1]

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return log_domain.log_sum_exp(self._logits(eta))

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return log_domain.softmax(self._logits(eta))

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        p = log_domain.softmax(self._logits(eta))
        others = 1 - torch.eye(self.dim, dtype=p.dtype, device=p.device)
        outer = p.unsqueeze(-1) * p.unsqueeze(-2) * others  # p_i p_j off the diagonal, whose rows sum to p_i (1 - p_i)
        return torch.diag_embed(outer.sum(-1)) - outer

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        p = log_domain.softmax(self._logits(eta))
        signed = p * (vector - (p * vector).sum(-1, keepdim=True))
        return signed - p * signed.sum(
            -1, keepdim=True
        )  # the sum is rounding error, which exceeds the entries of a saturated row

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return direction.masked_fill(self.log_probabilities.unsqueeze(-2) == -torch.inf, -torch.inf).amax(-1)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        index = log_domain.draw(self._logits(eta), shape, generator)
        return torch.nn.functional.one_hot(index, self.dim).to(eta.dtype)

    def atoms(self, eta: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor]:
        identity = torch.eye(self.dim, dtype=eta.dtype, device=eta.device)
        return identity.expand(*eta.shape[:-2], -1, -1), log_domain.softmax(self._logits(eta))

    def _logits(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return self.log_probabilities.unsqueeze(-2) + eta
