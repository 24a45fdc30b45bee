"""Measures from textbook densities, as nodes of a quadrature rule: the oracle of the theorems.

    ∫ f(x) h(dx) = sum_n exp(log_mass_n) f(x_n)

The rule is the trapezoidal rule on the real line, after the substitution x = exp t or x = sigmoid t if the support is
smaller. For an integrand analytic in a strip of half-width a its error is exp(-2 pi a / step), far below rounding for
every law here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import gradlogz as gz
from gradlogz import Measure
from support.measure_registry import Source, inside

STEP = 1 / 8
# Wide enough for tails like exp(-t/5), which tilts near the edge of a domain leave.
LINE = torch.arange(-400, 400, STEP, dtype=torch.float64)
HALF = torch.arange(-400, 11, STEP, dtype=torch.float64)


def softplus(t: Tensor) -> Tensor:
    """log(1 + exp t); torch.nn.functional.softplus drops exp(-t) beyond t = 20, two thousand times the tolerance."""
    return torch.logaddexp(t, torch.zeros_like(t))


class Law(NamedTuple):
    """A measure of the library, the same measure as nodes and log masses, and a natural parameter in its domain."""

    h: Measure
    x: Tensor
    log_mass: Tensor
    eta: Tensor

    def scale(self, order: int = 1) -> Tensor:
        """(1 + |eta| |x|) |x|^order with |x| the root mean square of x, at eta or at 0: scales.scale_of, from nodes."""
        squares = self.x.square().sum(-1)
        sizes = [(self.log_mass + self.x @ e).softmax(-1) @ squares for e in (self.eta, torch.zeros_like(self.eta))]
        size = torch.stack(sizes).amax().sqrt()
        return (1 + self.eta.norm() * size) * size**order


Nodes = tuple[Measure, Tensor, Tensor]


def _empirical(s: Source) -> Nodes:
    x, log_mass = s.normal(6, 3), s.normal(6)
    return gz.Empirical(x, log_mass), x, log_mass


def _gaussian(s: Source) -> Nodes:
    mu, Sigma = s.normal(2), s.covariance(2)
    t = torch.arange(-20, 20, 0.5, dtype=torch.float64)
    z = torch.cartesian_prod(t, t)
    log_mass = -(z * z).sum(-1) / 2 - math.log(2 * math.pi) + 2 * math.log(0.5)
    return gz.Gaussian(mu, Sigma), mu + z @ torch.linalg.cholesky(Sigma).mT, log_mass


def _sphere(s: Source) -> Nodes:
    r = s.positive()
    cosine, weight = map(torch.from_numpy, np.polynomial.legendre.leggauss(48))
    angle = torch.arange(96, dtype=torch.float64) * (2 * math.pi / 96)
    c, a = torch.cartesian_prod(cosine, angle).unbind(-1)
    sine = (1 - c * c).sqrt()
    x = r * torch.stack((sine * a.cos(), sine * a.sin(), c), -1)
    return gz.Sphere(3, r), x, (weight / 192).log().repeat_interleave(96)


def _circle(s: Source) -> Nodes:
    r, angle = s.positive(), torch.arange(256, dtype=torch.float64) * (2 * math.pi / 256)
    log_mass = torch.full_like(angle, -math.log(256))
    return gz.Sphere(2, r), r * torch.stack((angle.cos(), angle.sin()), -1), log_mass


def _gamma(s: Source) -> Nodes:
    k, r, x = s.positive(1), s.positive(1, low=1.0), HALF.exp()
    density = k * r.log() - torch.lgamma(k) + (k - 1) * HALF - r * x
    return gz.Gamma(k, r), x.unsqueeze(-1), density + HALF + math.log(STEP)


def _inverse_gaussian(s: Source) -> Nodes:
    m, l, x = s.positive(1), s.positive(1), HALF.exp()
    density = (l / (2 * math.pi)).log() / 2 - 1.5 * HALF - l * (x - m) ** 2 / (2 * m * m * x)
    return gz.InverseGaussian(m, l), x.unsqueeze(-1), density + HALF + math.log(STEP)


def _poisson(s: Source) -> Nodes:
    r, x = s.positive(1), torch.arange(400, dtype=torch.float64)
    return gz.Poisson(r), x.unsqueeze(-1), x * r.log() - r - torch.lgamma(x + 1)


def _spins(s: Source) -> Nodes:
    b, signs = s.normal(3), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    x = torch.cartesian_prod(signs, signs, signs)
    return gz.Spins(b), x, -softplus(-2 * b * x).sum(-1)


def _one_hot(s: Source) -> Nodes:
    log_p = s.log_simplex(4)
    return gz.OneHot(log_p), torch.eye(4, dtype=torch.float64), log_p


def _normal_statistic(s: Source) -> Nodes:
    mu, sd = s.normal(), s.positive()
    density = -((LINE - mu) ** 2) / (2 * sd**2) - (2 * math.pi * sd**2).log() / 2
    h = gz.measures.from_distribution(torch.distributions.Normal(mu, sd))
    return h, torch.stack((LINE, LINE**2), -1), density + math.log(STEP)


def _gamma_statistic(s: Source) -> Nodes:
    k, r, y = s.positive(low=1.0), s.positive(low=1.0), HALF.exp()
    density = k * r.log() - torch.lgamma(k) + (k - 1) * HALF - r * y
    h = gz.measures.from_distribution(torch.distributions.Gamma(k, r))
    return h, torch.stack((HALF, y), -1), density + HALF + math.log(STEP)


def _beta_statistic(s: Source) -> Nodes:
    a, b = s.positive(low=1.0), s.positive(low=1.0)
    log_y, log_rest = -softplus(-LINE), -softplus(LINE)  # y = sigmoid(t), dy = y (1 - y) dt
    log_mass = a * log_y + b * log_rest + torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b) + math.log(STEP)
    return gz.measures.from_distribution(torch.distributions.Beta(a, b)), torch.stack((log_y, log_rest), -1), log_mass


def _bernoulli_statistic(s: Source) -> Nodes:
    logit = s.normal()
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    h = gz.measures.from_distribution(torch.distributions.Bernoulli(logits=logit))
    return h, x, torch.stack((-softplus(logit), -softplus(-logit)))


def _prior(base: str, xi: Tensor, nu: Tensor, theta: Tensor, G0: Tensor, jacobian: Tensor | float) -> Nodes:
    """exp(<xi, theta> - nu G0(theta)), divided by its integral: A(xi, nu) by definition."""
    log_mass = xi * theta - nu * G0 + jacobian
    return gz.ConjugatePrior(xi, nu, base=base), theta.unsqueeze(-1), log_mass - log_mass.logsumexp(0)


def _exponential_prior(s: Source) -> Nodes:
    theta = -HALF.exp()
    return _prior("exponential", s.positive(1, low=1.0), s.positive(), theta, -HALF, HALF)


LAWS: dict[str, Callable[[Source], Nodes]] = {
    "empirical": _empirical,
    "gaussian": _gaussian,
    "sphere": _sphere,
    "circle": _circle,
    "gamma": _gamma,
    "inverse gaussian": _inverse_gaussian,
    "poisson": _poisson,
    "spins": _spins,
    "one hot": _one_hot,
    "normal statistic": _normal_statistic,
    "gamma statistic": _gamma_statistic,
    "beta statistic": _beta_statistic,
    "bernoulli statistic": _bernoulli_statistic,
    "gaussian prior": lambda s: _prior("gaussian", s.normal(1), s.positive(), LINE, LINE**2 / 2, 0.0),
    "poisson prior": lambda s: _prior("poisson", s.positive(1, low=1.0), s.positive(), HALF, HALF.exp(), 0.0),
    "exponential prior": _exponential_prior,
    "bernoulli prior": lambda s: _prior(
        "bernoulli", s.positive(1, low=1.0), s.positive(low=3.0, high=5.0), LINE, softplus(LINE), 0.0
    ),
}
PRIORS = [name for name in LAWS if name.endswith("prior")]


def law(name: str, seed: int = 0, magnitude: float = 1.0) -> Law:
    """The named law of this seed with eta [d] of about this length, shrunk into the domain."""
    source = Source(seed)
    h, x, log_mass = LAWS[name](source)
    return Law(h, x, log_mass, inside(h, source.normal(h.dim) * magnitude))
