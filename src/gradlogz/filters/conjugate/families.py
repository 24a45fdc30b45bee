"""Conjugate families: priors and likelihoods for which the posterior stays in the family.

    prior        p(theta | eta)  = exp(<eta, T(theta)> - A(eta)) dtheta              natural parameter eta [p]
    likelihood   p(y | theta)    = h0(y) exp(<lik(y), T(theta)>)                     so that eta' = eta + lik(y)
    evidence     log p(y | eta)  = A(eta + lik(y)) - A(eta) + log h0(y)              a difference of log normalisers
    projection   ∇A(eta)         = sum_i r_i ∇A(eta_i)                              argmin_q KL(mixture‖q)  [theory 7.5]

Updating adds natural parameters; collapsing averages expectation parameters ∇A = E[T(theta)].

    family                   T(theta)                A                                              lik(y)
    GammaPoisson             log x, -x               lgamma(a) - a log b                            y, exposure
    GammaExponential         -x, log x               lgamma(n+1) - (n+1) log b                      y, 1
    BetaBinomial             log x, log(1 - x)       log B(a, b)                                    y, trials - y
    DirichletMultinomial     log x_i                 log B(a_1 ... a_c)                             y_i
    InverseWishartNormal     -X⁻¹/2, -log det X /2   log Gamma_p(n/2) - (n/2) log det(Psi/2)        y y^T, 1
    LinearGaussian           x, -x x^T/2             xi^T P xi /2 + log det(2 pi P)/2               H^T R⁻¹ y, H^T R⁻¹ H

The parametrisation is that of ../../measures/prior.py, with respect to dtheta: eta = (xi, nu), where nu counts
observations and xi/nu is their expectation. Hence eta -> lambda eta forgets without changing the expectation.

A new family is one class with these methods. Read next: conjugate_dynamics.py (maps that keep a family),
conjugate_filter.py.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, check_finite, check_floats, check_positive, has_values, shape_of
from ..._pytree import record, static_field
from ..._typing import Bool, Float, Tensor
from ...measures.prior import BASES
from ...measures.wishart import smat, svec
from ...special.digamma import concentration, digamma, digamma_gap, inverse_digamma_gap, inverse_digamma_gaps
from ...special.gamma import log_gamma
from ..moment_matching import GaussianMoments, symmetric
from ..moment_matching import collapse as collapse_gaussians
from ..scalars import Number, with_numbers

LEAST = 1e-5  # smallest count that forgetting leaves; E[log x] of the other counts hardly determines smaller ones
LEAST_SHARE = 1e-9  # smallest count relative to the largest


class NaturalLikelihood(NamedTuple):
    """Likelihood of an observation: lik(y), added to natural parameters, and log h0(y); for each mode or shared."""

    natural: Float[Tensor, "*b #k p"]
    log_base: Float[Tensor, "*b #k"]


class ConjugateFamily(ABC):
    """A family of priors with its conjugate likelihood. Natural parameters are vectors [*b, p]."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number p of natural parameters."""

    @property
    @abstractmethod
    def observation_size(self) -> int:
        """Size o of an observation."""

    @abstractmethod
    def log_normalizer(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        """Log normaliser A(eta)."""

    @abstractmethod
    def expectation(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        """Expectation parameters ∇A(eta) = E[T(theta)]."""

    @abstractmethod
    def natural(self, expectation: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        """Link: the inverse of `expectation`."""

    @abstractmethod
    def likelihood(self, observation: Float[Tensor, "*b o"], observed: Bool[Tensor, "*b o"]) -> NaturalLikelihood:
        """Return lik(y) and log h0(y), both 0 for entries that were not observed."""

    @abstractmethod
    def moments(self, natural: Float[Tensor, "*b p"]) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
        """Mean and variance of each coordinate of the parameter x."""

    @abstractmethod
    def in_domain(self, natural: Float[Tensor, "*b p"]) -> Bool[Tensor, "*b"]:
        """True where A is finite."""

    @abstractmethod
    def possible(self, observation: Float[Tensor, "*b o"]) -> Bool[Tensor, "*b o"]:
        """True where a number is in the support of the likelihood."""

    @property
    @abstractmethod
    def support(self) -> str:
        """Description of the support, for messages."""

    requires_complete = False  # whether an observation with missing entries counts as missing

    def collapse(self, share: Float[Tensor, "*b n"], natural: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b p"]:
        """Closest member of the family to a mixture, by averaging expectation parameters.

        Computed in float64, because for large counts members differ only in the last digits of their expectations.
        """
        wide = self.expectation(natural.double())
        return self.natural((share.unsqueeze(-1) * wide).sum(-2)).to(natural.dtype)

    def forgotten(self, factor: Float[Tensor, ""] | float, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        """Discounted parameters factor eta, bounded away from underflow."""
        discounted, least = factor * natural, torch.finfo(natural.dtype).tiny ** 0.5
        rest = (least / natural.abs().amax(-1, keepdim=True)).clamp(max=1)
        return torch.where(discounted.abs().amax(-1, keepdim=True) < least, rest * natural, discounted)


class _Independent(ConjugateFamily):
    """Channels that are independent given the mode; natural parameters are [*b, o, 2], flattened."""

    channels: int

    @property
    def size(self) -> int:
        return 2 * self.channels

    @property
    def observation_size(self) -> int:
        return self.channels

    def forgotten(self, factor: Float[Tensor, ""] | float, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        return super().forgotten(factor, natural.unflatten(-1, (-1, 2))).flatten(-2)

    def _pair(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        first, second = natural.unflatten(-1, (-1, 2)).unbind(-1)
        return first, second


def _counts_forgotten(factor: Tensor | float, counts: Tensor, least: float, share: float = 0.0) -> Tensor:
    """Discounted counts factor eta [*b, n], bounded away from 0 for long series without observations or of zeros.

    Below one observation in total all counts stop together, which preserves the expectation; otherwise each by itself.
    """
    discounted = factor * counts
    most, fewest = discounted.amax(-1, keepdim=True), discounted.amin(-1, keepdim=True)
    floor = (share * counts.amax(-1, keepdim=True)).clamp(min=least)
    rest = (least / counts.amin(-1, keepdim=True)).clamp(max=1)
    return torch.where(
        (most < 1) & (fewest < least), rest * counts, torch.maximum(discounted, torch.minimum(counts, floor))
    )


def _flat(first: Tensor, second: Tensor) -> Tensor:
    """Interleave two parameters of each channel to one vector."""
    return torch.stack(torch.broadcast_tensors(first, second), -1).flatten(-2)


class GammaParameters(NamedTuple):
    """Gamma distribution of each channel: density proportional to x^(shape-1) exp(-rate x)."""

    shape: Float[Tensor, "*b o"]
    rate: Float[Tensor, "*b o"]


@record
class GammaPoisson(_Independent):
    """Counts of unknown rate: x ~ Gamma(a, b), y ~ Poisson(exposure x); (a, b) -> (a + y, b + exposure).

    The predictive distribution is negative binomial. Collapsing matches E[x] and E[log x], not the variance.

    Attributes:
        exposure: factor of the rate: a number, [k] for each mode, or [k, o]; None is 1.
        channels: number o of rates, independent given the mode.

    >>> import torch
    >>> family = GammaPoisson()
    >>> slow, fast = family.prior(torch.tensor([2.0, 9.0]), torch.tensor([1.0, 2.0]))
    >>> nearest = family.collapse(torch.tensor([0.35, 0.65]), torch.stack((slow, fast)))
    >>> family.parameters(nearest).shape  # mean and variance would give 3.666
    tensor([2.6674])
    """

    exposure: float | Float[Tensor, "*#ko"] | None = None
    channels: int = static_field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _check_channels("GammaPoisson", self.channels)
        if self.exposure is None:
            return
        if isinstance(self.exposure, (int, float)):  # float64, whatever the dtype of the observations
            object.__setattr__(self, "exposure", torch.tensor(float(self.exposure), dtype=torch.float64, device="cpu"))
        e = self.exposure
        assert isinstance(e, Tensor)
        check_floats("GammaPoisson", exposure=e)
        check_finite("GammaPoisson", exposure=e)
        if e.ndim > 2 or (e.ndim == 2 and e.shape[-1] not in (1, self.channels)):
            condition = f"exposure must be a number, [k] or [k, o={self.channels}]"
            remedy = "Pass one for each mode, or one for each mode and channel."
            raise InputValueError("GammaPoisson", "exposure", f"{condition}, got shape {shape_of(e)}", remedy)
        if has_values(e) and bool((e < 0).any()):
            fact = f"{int((e < 0).sum())} of {e.numel()} below 0"
            raise InputValueError(
                "GammaPoisson",
                "exposure",
                f"exposure must be at least 0, got {fact}",
                "Use 0 for a mode without events.",
            )

    def prior(self, shape: float | Float[Tensor, "*#b"], rate: float | Float[Tensor, "*#b"]) -> Float[Tensor, "*c p"]:
        """Natural parameters of Gamma(shape, rate), for all channels [*b] or each [*b, o].

        A last dimension of size o is taken as the channels.
        """
        return _gamma_prior("GammaPoisson.prior", self.channels, shape, rate)

    def parameters(self, natural: Float[Tensor, "*b p"]) -> GammaParameters:
        """Shape and rate of each channel."""
        return GammaParameters(*self._pair(natural))

    def log_normalizer(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        a, b = self._pair(natural)
        return BASES["poisson"].prior_log_normalizer(a.unsqueeze(-1), b).sum(-1)

    def expectation(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        a, b = self._pair(natural)
        return _flat(digamma(a) - b.log(), -a / b)

    def natural(self, expectation: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        log_x, x = self._pair(expectation)
        a = inverse_digamma_gap(torch.log(-x) - log_x)
        return _flat(a, a / -x)

    def collapse(self, share: Float[Tensor, "*b n"], natural: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b p"]:
        a, b = _collapse_gammas(share, *self._pair(natural))
        return _flat(a, b)

    def forgotten(self, factor: Float[Tensor, ""] | float, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        least = torch.finfo(natural.dtype).tiny ** 0.5
        return _counts_forgotten(factor, natural.unflatten(-1, (-1, 2)), least).flatten(-2)

    def likelihood(self, observation: Float[Tensor, "*b o"], observed: Bool[Tensor, "*b o"]) -> NaturalLikelihood:
        y, observed = observation.unsqueeze(-2), observed.unsqueeze(-2)
        e = y.new_ones(()) if self.exposure is None else self.exposure
        assert isinstance(e, Tensor)  # a number was made one
        e = e.to(y) if e.ndim == 0 else e
        e = e.unsqueeze(-1) if e.ndim < 2 else e
        # With exposure 0 events have probability 0; the derivative there is masked.
        log_e = torch.where((e > 0) | (y == 0), y * torch.where(e > 0, e, 1.0).log(), -torch.inf)
        log_base = (log_e - log_gamma(y + 1)).masked_fill(~observed, 0.0)
        return NaturalLikelihood(_flat(y * observed, e * observed), log_base.sum(-1))

    def moments(self, natural: Float[Tensor, "*b p"]) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
        a, b = self._pair(natural)
        return a / b, a / b**2

    def in_domain(self, natural: Float[Tensor, "*b p"]) -> Bool[Tensor, "*b"]:
        return (natural > 0).all(-1)

    def possible(self, observation: Float[Tensor, "*b o"]) -> Bool[Tensor, "*b o"]:
        return (observation >= 0) & (observation == observation.floor())

    @property
    def support(self) -> str:
        return "integers from 0"


@record
class GammaExponential(_Independent):
    """Waiting times of unknown rate: x ~ Gamma(nu + 1, b), y ~ Exponential(x); (b, nu) -> (b + y, nu + 1).

    The predictive distribution is Lomax. Natural parameters are (b, nu): discounting preserves b/nu = E[1/x], the
    expected waiting time.

    >>> import torch
    >>> family = GammaExponential()
    >>> parameters = family.parameters(family.prior(torch.tensor(3.0), torch.tensor(2.0)))
    >>> parameters.shape, parameters.rate
    (tensor([3.]), tensor([2.]))
    """

    channels: int = static_field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _check_channels("GammaExponential", self.channels)

    def prior(self, shape: float | Float[Tensor, "*#b"], rate: float | Float[Tensor, "*#b"]) -> Float[Tensor, "*c p"]:
        """Natural parameters of Gamma(shape, rate), for all channels [*b] or each [*b, o].

        A last dimension of size o is taken as the channels.
        """
        a, b = self._pair(_gamma_prior("GammaExponential.prior", self.channels, shape, rate))
        return _flat(b, a - 1)

    def parameters(self, natural: Float[Tensor, "*b p"]) -> GammaParameters:
        """Shape and rate of each channel."""
        b, nu = self._pair(natural)
        return GammaParameters(nu + 1, b)

    def log_normalizer(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        b, nu = self._pair(natural)
        return BASES["exponential"].prior_log_normalizer(b.unsqueeze(-1), nu).sum(-1)

    def expectation(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        a, b = self.parameters(natural)
        return _flat(-a / b, digamma(a) - b.log())

    def natural(self, expectation: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        x, log_x = self._pair(expectation)
        a = inverse_digamma_gap(torch.log(-x) - log_x)
        return _flat(a / -x, a - 1)

    def collapse(self, share: Float[Tensor, "*b n"], natural: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b p"]:
        a, b = _collapse_gammas(share, *self.parameters(natural))
        return _flat(b, a - 1)

    def likelihood(self, observation: Float[Tensor, "*b o"], observed: Bool[Tensor, "*b o"]) -> NaturalLikelihood:
        y, observed = observation.unsqueeze(-2), observed.unsqueeze(-2)
        return NaturalLikelihood(_flat(y * observed, observed.to(y.dtype)), y.new_zeros(y.shape[:-1]))

    def moments(self, natural: Float[Tensor, "*b p"]) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
        a, b = self.parameters(natural)
        return a / b, a / b**2

    def in_domain(self, natural: Float[Tensor, "*b p"]) -> Bool[Tensor, "*b"]:
        a, b = self.parameters(natural)
        return ((a > 0) & (b > 0)).all(-1)

    def possible(self, observation: Float[Tensor, "*b o"]) -> Bool[Tensor, "*b o"]:
        return observation > 0

    @property
    def support(self) -> str:
        return "positive numbers"


class BetaParameters(NamedTuple):
    """Beta distribution of each channel: density proportional to x^(a-1) (1-x)^(b-1)."""

    a: Float[Tensor, "*b o"]
    b: Float[Tensor, "*b o"]


@record
class BetaBinomial(_Independent):
    """Successes in n trials of unknown probability: x ~ Beta(a, b), y ~ Binomial(n, x); (a, b) -> (a + y, b + n - y).

    Collapsing matches E[log x] and E[log(1 - x)]. If the number of trials varies between steps, pass successes and
    failures to DirichletMultinomial(2).

    >>> import torch
    >>> family = BetaBinomial(10)
    >>> family.moments(family.prior(torch.tensor(3.0), torch.tensor(1.0)))[0]
    tensor([0.7500])
    """

    trials: int = static_field(default=1)
    channels: int = static_field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _check_channels("BetaBinomial", self.channels)
        if self.trials < 1:
            raise InputValueError(
                "BetaBinomial", "trials", f"trials must be at least 1, got {self.trials}", "Use 1 for Bernoulli trials."
            )

    def prior(self, a: float | Float[Tensor, "*#b"], b: float | Float[Tensor, "*#b"]) -> Float[Tensor, "*c p"]:
        """Natural parameters of Beta(a, b), for all channels [*b] or each [*b, o].

        A last dimension of size o is taken as the channels.
        """
        values = with_numbers(a=a, b=b)
        check_floats("BetaBinomial.prior", **values)
        check_positive("BetaBinomial.prior", **values)
        return _flat(*_per_channel("BetaBinomial.prior", self.channels, **values))

    def parameters(self, natural: Float[Tensor, "*b p"]) -> BetaParameters:
        """a and b of each channel."""
        return BetaParameters(*self._pair(natural))

    def log_normalizer(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        a, b = self._pair(natural)
        return BASES["bernoulli"].prior_log_normalizer(a.unsqueeze(-1), a + b).sum(-1)

    def expectation(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        a, b = self._pair(natural)
        both = digamma(a + b)
        return _flat(digamma(a) - both, digamma(b) - both)

    def natural(self, expectation: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        return concentration(expectation.unflatten(-1, (-1, 2))).flatten(-2)

    def forgotten(self, factor: Float[Tensor, ""] | float, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        return _counts_forgotten(factor, natural.unflatten(-1, (-1, 2)), LEAST, LEAST_SHARE).flatten(-2)

    def likelihood(self, observation: Float[Tensor, "*b o"], observed: Bool[Tensor, "*b o"]) -> NaturalLikelihood:
        y, observed = observation.unsqueeze(-2), observed.unsqueeze(-2)
        n = torch.full_like(y, self.trials)
        log_base = log_gamma(n + 1) - log_gamma(y + 1) - log_gamma((n - y).clamp(min=0) + 1)
        return NaturalLikelihood(_flat(y * observed, (n - y) * observed), log_base.masked_fill(~observed, 0.0).sum(-1))

    def moments(self, natural: Float[Tensor, "*b p"]) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
        a, b = self._pair(natural)
        mean = a / (a + b)
        return mean, mean * (b / (a + b)) / (a + b + 1)

    def in_domain(self, natural: Float[Tensor, "*b p"]) -> Bool[Tensor, "*b"]:
        return (natural > 0).all(-1)

    def possible(self, observation: Float[Tensor, "*b o"]) -> Bool[Tensor, "*b o"]:
        return (observation >= 0) & (observation <= self.trials) & (observation == observation.floor())

    @property
    def support(self) -> str:
        return f"integers from 0 to trials={self.trials}"


@record
class DirichletMultinomial(ConjugateFamily):
    """Counts of c categories of unknown probabilities: x ~ Dirichlet(a), y ~ Multinomial(sum y, x); a -> a + y.

    Collapsing matches E[log x_i]. A missing count cannot be marginalised within the family, so an observation with a
    missing count is missing as a whole.

    >>> import torch
    >>> family = DirichletMultinomial(3)
    >>> family.moments(family.prior(torch.tensor([1.0, 1.0, 2.0])))[0]
    tensor([0.2500, 0.2500, 0.5000])
    """

    categories: int = static_field()
    requires_complete = True

    def __post_init__(self) -> None:
        if self.categories < 2:
            condition, remedy = "categories must be at least 2", "Pass the number of categories."
            raise InputValueError("DirichletMultinomial", "categories", f"{condition}, got {self.categories}", remedy)

    @property
    def size(self) -> int:
        return self.categories

    @property
    def observation_size(self) -> int:
        return self.categories

    def prior(self, concentration: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        """Natural parameters of Dirichlet(concentration): the concentration itself."""
        call = "DirichletMultinomial.prior"
        check_floats(call, concentration=concentration)
        if concentration.shape[-1:] != (self.categories,):
            condition, fact = f"concentration must end in c={self.categories}", f"shape {shape_of(concentration)}"
            raise InputValueError(call, "concentration", f"{condition}, got {fact}", "Pass one for each category.")
        check_positive(call, concentration=concentration)
        return concentration

    def log_normalizer(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        return BASES["categorical"].prior_log_normalizer(natural[..., 1:], natural.sum(-1))

    def expectation(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        return digamma(natural) - digamma(natural.sum(-1, keepdim=True))

    def natural(self, expectation: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        return concentration(expectation)

    def forgotten(self, factor: Float[Tensor, ""] | float, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        return _counts_forgotten(factor, natural, LEAST, LEAST_SHARE)

    def likelihood(self, observation: Float[Tensor, "*b o"], observed: Bool[Tensor, "*b o"]) -> NaturalLikelihood:
        y, observed = observation.unsqueeze(-2), observed.unsqueeze(-2)
        y = y * observed
        log_base = log_gamma(y.sum(-1) + 1) - log_gamma(y + 1).sum(-1)
        return NaturalLikelihood(y, log_base)

    def moments(self, natural: Float[Tensor, "*b p"]) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
        total = natural.sum(-1, keepdim=True)
        mean = natural / total
        return mean, mean * (1 - mean) / (total + 1)

    def in_domain(self, natural: Float[Tensor, "*b p"]) -> Bool[Tensor, "*b"]:
        return (natural > 0).all(-1)

    def possible(self, observation: Float[Tensor, "*b o"]) -> Bool[Tensor, "*b o"]:
        return (observation >= 0) & (observation == observation.floor())

    @property
    def support(self) -> str:
        return "integers from 0"


class WishartParameters(NamedTuple):
    """Inverse Wishart distribution: density proportional to det X^(-(df+p+1)/2) exp(-trace(scale X⁻¹)/2)."""

    df: Float[Tensor, "*b"]
    scale: Float[Tensor, "*b p p"]


@record
class InverseWishartNormal(ConjugateFamily):
    """Vectors of unknown covariance: X ~ InverseWishart(Psi, df), y ~ N(0, X); (Psi, nu) -> (Psi + y y^T, nu + 1).

    Natural parameters are (svec Psi, nu) with nu = df - p - 1, so that Psi/nu = E[X] where it is finite; discounting
    preserves it. Collapsing matches E[X⁻¹] and E[log det X]. Moments of X are in `svec` coordinates.

    >>> import torch
    >>> family = InverseWishartNormal(2)
    >>> smat(family.moments(family.prior(torch.tensor(5.0), torch.eye(2)))[0])
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """

    dimension: int = static_field()
    requires_complete = True

    def __post_init__(self) -> None:
        if self.dimension < 1:
            fact = f"{self.dimension}"
            raise InputValueError(
                "InverseWishartNormal",
                "dimension",
                f"dimension must be at least 1, got {fact}",
                "Pass p for a p x p X.",
            )

    @property
    def size(self) -> int:
        return self.dimension * (self.dimension + 1) // 2 + 1

    @property
    def observation_size(self) -> int:
        return self.dimension

    @without_autocast
    def prior(self, df: float | Float[Tensor, "*#b"], scale: Float[Tensor, "*#b q q"]) -> Float[Tensor, "*b p"]:
        """Natural parameters of InverseWishart(scale, df), df > p - 1."""
        call, p = "InverseWishartNormal.prior", self.dimension
        df = with_numbers(df=df, scale=scale)["df"]
        check_floats(call, df=df, scale=scale)
        if scale.shape[-2:] != (p, p) or df.ndim > scale.ndim - 2:
            fact = f"shapes {shape_of(df)} and {shape_of(scale)}"
            raise InputValueError(
                call, "scale", f"scale must be [*b, {p}, {p}] and df [*b], got {fact}", "Pass one df for each scale."
            )
        batch = torch.broadcast_shapes(df.shape, scale.shape[:-2])
        natural = torch.cat((svec(scale).expand(*batch, self.size - 1), (df - p - 1).expand(batch).unsqueeze(-1)), -1)
        if has_values(natural) and not bool(self.in_domain(natural).all()):
            problem = f"df must exceed p-1={p - 1} and scale must be positive definite, or the prior has infinite mass"
            raise InputValueError(call, "df", problem, "Use df = p + 2 and a covariance for a weak prior.")
        return natural

    @without_autocast
    def parameters(self, natural: Float[Tensor, "*b p"]) -> WishartParameters:
        """Degrees of freedom and scale."""
        return WishartParameters(natural[..., -1] + self.dimension + 1, smat(natural[..., :-1]))

    def log_normalizer(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        n, scale = self.parameters(natural)
        p = self.dimension
        return _log_gamma_of_matrices(n / 2, p) + n * p / 2 * math.log(2) - n / 2 * _log_det(scale)

    def expectation(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        n, scale = self.parameters(natural)
        p = self.dimension
        less = torch.arange(p, dtype=n.dtype, device=n.device)
        log_det = _log_det(scale) - p * math.log(2) - digamma((n.unsqueeze(-1) - less) / 2).sum(-1)
        inverse = symmetric(torch.cholesky_inverse(torch.linalg.cholesky_ex(scale).L))
        return torch.cat((-n.unsqueeze(-1) / 2 * svec(inverse), -log_det.unsqueeze(-1) / 2), -1)

    def natural(self, expectation: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        precision, log_det = -2 * smat(expectation[..., :-1]), -2 * expectation[..., -1]
        n = inverse_digamma_gaps(log_det + _log_det(precision), self.dimension)
        inverse = symmetric(torch.cholesky_inverse(torch.linalg.cholesky_ex(precision).L))
        return torch.cat((n.unsqueeze(-1) * svec(inverse), (n - self.dimension - 1).unsqueeze(-1)), -1)

    def likelihood(self, observation: Float[Tensor, "*b o"], observed: Bool[Tensor, "*b o"]) -> NaturalLikelihood:
        y = (observation * observed).unsqueeze(-2)
        once = observed.all(-1).to(y.dtype)[..., None, None]
        log_base = -self.dimension / 2 * math.log(2 * math.pi) * once.squeeze(-1)
        return NaturalLikelihood(torch.cat((svec(y.unsqueeze(-1) * y.unsqueeze(-2)), once), -1), log_base)

    def moments(self, natural: Float[Tensor, "*b p"]) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
        nu, scale = natural[..., -1:], smat(natural[..., :-1])
        diagonal = scale.diagonal(dim1=-2, dim2=-1)
        square, outer = scale**2, diagonal.unsqueeze(-1) * diagonal.unsqueeze(-2)
        count = nu.unsqueeze(-1)
        spread = ((count + 2) * square + count * outer) / ((count + 1) * count**2 * (count - 2))
        twice = 2 - torch.eye(
            self.dimension, dtype=scale.dtype, device=scale.device
        )  # svec scales off-diagonals by sqrt 2
        row, column = torch.triu_indices(self.dimension, self.dimension, device=scale.device)
        mean = torch.where(nu > 0, natural[..., :-1] / nu, torch.nan)
        return mean, torch.where(nu > 2, (twice * spread)[..., row, column], torch.inf)

    def in_domain(self, natural: Float[Tensor, "*b p"]) -> Bool[Tensor, "*b"]:
        return (natural[..., -1] > -2) & (torch.linalg.eigvalsh(smat(natural[..., :-1]))[..., 0] > 0)

    def possible(self, observation: Float[Tensor, "*b o"]) -> Bool[Tensor, "*b o"]:
        return observation.isfinite()

    @property
    def support(self) -> str:
        return "finite"


@record
class LinearGaussian(ConjugateFamily):
    """Gaussian state observed through a linear map: x ~ N(m, P), y ~ N(H x + d, R), for each mode or shared.

    The natural parameters are (P⁻¹ m, svec P⁻¹): the information form of the Kalman filter. Covariances must be
    positive definite; for singular ones use ../gaussian/switching.py.

    >>> import torch
    >>> family = LinearGaussian(torch.eye(1), torch.eye(1))
    >>> family.parameters(family.prior(torch.tensor([3.0]), 4 * torch.eye(1)))
    GaussianMoments(mean=tensor([3.]), covariance=tensor([[4.]]))
    """

    H: Float[Tensor, "*#k o s"]
    R: Float[Tensor, "*#k o o"]
    d: Float[Tensor, "*#k o"] | None = None

    def __post_init__(self) -> None:
        call, H, R = "LinearGaussian", self.H, self.R
        check_floats(call, H=H, R=R, **({} if self.d is None else {"d": self.d}))
        o = H.shape[-2] if H.ndim > 1 else 0
        if H.ndim not in (2, 3) or R.shape[-2:] != (o, o) or (self.d is not None and self.d.shape[-1:] != (o,)):
            fact = f"shapes {shape_of(H)} and {shape_of(R)}"
            remedy = "Put modes first if they differ."
            raise InputValueError(call, "H", f"H must be [o, s] or [k, o, s], R [o, o], d [o], got {fact}", remedy)
        if has_values(R) and int(torch.linalg.cholesky_ex(R.detach()).info.max()) > 0:
            remedy = "Use SwitchingModel for observations without noise."
            raise InputValueError(call, "R", "R is not positive definite", remedy)

    @property
    def size(self) -> int:
        s = self.H.shape[-1]
        return s + s * (s + 1) // 2

    @property
    def observation_size(self) -> int:
        return self.H.shape[-2]

    @without_autocast
    def prior(self, mean: Float[Tensor, "*#b s"], covariance: Float[Tensor, "*#b s s"]) -> Float[Tensor, "*b p"]:
        """Natural parameters of N(mean, covariance)."""
        call, s = "LinearGaussian.prior", self.H.shape[-1]
        check_floats(call, mean=mean, covariance=covariance)
        if mean.shape[-1:] != (s,) or covariance.shape[-2:] != (s, s):
            fact = f"shapes {shape_of(mean)} and {shape_of(covariance)}"
            raise InputValueError(
                call, "mean", f"mean must end in s={s}, covariance in s, s, got {fact}", "Match the columns of H."
            )
        L, info = torch.linalg.cholesky_ex(covariance)
        if has_values(info) and int(info.max()) > 0:
            remedy = "Use SwitchingModel for states that are known exactly."
            raise InputValueError(call, "covariance", "covariance is not positive definite", remedy)
        precision = symmetric(torch.cholesky_inverse(L))
        return self._joined((precision @ mean.unsqueeze(-1)).squeeze(-1), precision)

    @without_autocast
    def parameters(self, natural: Float[Tensor, "*b p"]) -> GaussianMoments:
        """Mean and covariance."""
        s = self.H.shape[-1]
        P = symmetric(torch.cholesky_inverse(torch.linalg.cholesky_ex(smat(natural[..., s:])).L))
        return GaussianMoments((P @ natural[..., :s].unsqueeze(-1)).squeeze(-1), P)

    def log_normalizer(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b"]:
        s = self.H.shape[-1]
        xi, precision = natural[..., :s], smat(natural[..., s:])
        L = torch.linalg.cholesky_ex(precision).L
        root = torch.linalg.solve_triangular(L, xi.unsqueeze(-1), upper=False).squeeze(-1)
        return (root**2).sum(-1) / 2 + s / 2 * math.log(2 * math.pi) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def expectation(self, natural: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        m, P = self.parameters(natural)
        return self._joined(m, -(P + m.unsqueeze(-1) * m.unsqueeze(-2)) / 2)

    def natural(self, expectation: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
        s = self.H.shape[-1]
        m = expectation[..., :s]
        return self._from(m, -2 * smat(expectation[..., s:]) - m.unsqueeze(-1) * m.unsqueeze(-2))

    def collapse(self, share: Float[Tensor, "*b n"], natural: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b p"]:
        return self._from(*collapse_gaussians(share, *self.parameters(natural)))

    def likelihood(self, observation: Float[Tensor, "*b o"], observed: Bool[Tensor, "*b o"]) -> NaturalLikelihood:
        H, R = self.H, self.R
        residual = observation if self.d is None else observation.unsqueeze(-2) - self.d
        residual = residual.unsqueeze(-2) if self.d is None else residual
        mask = observed.unsqueeze(-2).to(H.dtype)
        # Missing entries get H = 0 and unit noise, whose density is subtracted below.
        eye = torch.eye(self.observation_size, dtype=H.dtype, device=H.device)
        R = R * mask.unsqueeze(-1) * mask.unsqueeze(-2) + eye * (1 - mask).unsqueeze(-1)
        H, residual = H * mask.unsqueeze(-1), residual * mask
        L = torch.linalg.cholesky_ex(R).L
        A = torch.linalg.solve_triangular(L, H.expand(*L.shape[:-1], H.shape[-1]), upper=False)
        r = torch.linalg.solve_triangular(L, residual.unsqueeze(-1), upper=False)
        log_base = -(r.squeeze(-1) ** 2).sum(-1) / 2 - L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_base = log_base - mask.sum(-1) / 2 * math.log(2 * math.pi)
        return NaturalLikelihood(self._joined((A.mT @ r).squeeze(-1), symmetric(A.mT @ A)), log_base)

    def moments(self, natural: Float[Tensor, "*b p"]) -> tuple[Float[Tensor, "*b s"], Float[Tensor, "*b s"]]:
        m, P = self.parameters(natural)
        return m, P.diagonal(dim1=-2, dim2=-1)

    def in_domain(self, natural: Float[Tensor, "*b p"]) -> Bool[Tensor, "*b"]:
        return torch.linalg.cholesky_ex(smat(natural[..., self.H.shape[-1] :])).info == 0

    def possible(self, observation: Float[Tensor, "*b o"]) -> Bool[Tensor, "*b o"]:
        return observation.isfinite()

    @property
    def support(self) -> str:
        return "finite"

    def _joined(self, vector: Tensor, matrix: Tensor) -> Tensor:
        coordinates = svec(matrix)
        batch = torch.broadcast_shapes(vector.shape[:-1], coordinates.shape[:-1])
        return torch.cat((vector.expand(*batch, -1), coordinates.expand(*batch, -1)), -1)

    def _from(self, m: Tensor, P: Tensor) -> Tensor:
        precision = symmetric(torch.cholesky_inverse(torch.linalg.cholesky_ex(P).L))
        return self._joined((precision @ m.unsqueeze(-1)).squeeze(-1), precision)


def _check_channels(call: str, channels: int) -> None:
    if channels < 1:
        raise InputValueError(
            call, "channels", f"channels must be at least 1, got {channels}", "Pass the size of an observation."
        )


def _per_channel(call: str, channels: int, **values: Tensor) -> list[Tensor]:
    """Expand parameters shared by all channels, or given for each, to [*b, o]."""
    wide = [t if t.ndim and t.shape[-1] == channels else t.unsqueeze(-1) for t in values.values()]
    try:
        batch = torch.broadcast_shapes(*(t.shape for t in wide), (channels,))
    except RuntimeError:
        fact = " and ".join(str(shape_of(t)) for t in values.values())
        condition = f"{' and '.join(values)} must be [*b] or [*b, o={channels}]"
        raise InputValueError(
            call,
            " and ".join(values),
            f"{condition}, got shapes {fact}",
            "Pass shapes that broadcast.",
        ) from None
    return [t.expand(batch) for t in wide]


def _gamma_prior(call: str, channels: int, shape: Number, rate: Number) -> Tensor:
    values = with_numbers(shape=shape, rate=rate)
    check_floats(call, **values)
    check_positive(call, **values)
    return _flat(*_per_channel(call, channels, **values))


def _collapse_gammas(share: Tensor, shape: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Shape and rate of the Gamma distribution with the E[x] and E[log x] of a mixture [*b, n, o].

    log E[x] - E[log x] = sum_i r_i [gap(a_i) - log(m_i / m)], which avoids cancellation for large shapes.
    """
    r, means = share.unsqueeze(-1), shape / rate
    m = (r * means).sum(-2)
    off = (means - m.unsqueeze(-2)) / m.unsqueeze(-2)
    near = off.abs() < 0.5
    log_ratio = torch.where(near, torch.log1p(torch.where(near, off, 0.0)), means.log() - m.log().unsqueeze(-2))
    gap = (r * (digamma_gap(shape) - log_ratio)).sum(-2)
    a = inverse_digamma_gap(gap)
    return a, a / m


def _log_det(matrix: Tensor) -> Tensor:
    return 2 * torch.linalg.cholesky_ex(matrix).L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _log_gamma_of_matrices(x: Tensor, p: int) -> Tensor:
    """log Gamma_p(x) = p(p-1)/4 log pi + sum_{i<p} log Gamma(x - i/2)."""
    half = torch.arange(p, dtype=x.dtype, device=x.device) / 2
    return p * (p - 1) / 4 * math.log(math.pi) + log_gamma(x.unsqueeze(-1) - half).sum(-1)
