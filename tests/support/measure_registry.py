"""Registry of all measures: the laws of tests/laws run over every builder listed here.

A builder takes a random source and returns a measure that depends on the source. `NAMES` lists them; `case(name, ...)`
builds one with natural parameters inside its domain.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import gradlogz as gz
from gradlogz import Measure


class Source:
    """Random tensors of one dtype from one seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def positive(self, *shape: int, low: float = 0.5, high: float = 2.0) -> Tensor:
        u = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (low + (high - low) * u).to(self.dtype)

    def log_simplex(self, *shape: int) -> Tensor:
        return torch.log_softmax(self.normal(*shape), -1)

    def covariance(self, *shape: int) -> Tensor:
        a = self.normal(*shape, shape[-1])
        return a @ a.mT / shape[-1] + 0.1 * torch.eye(shape[-1], dtype=self.dtype)


def _distribution(p: torch.distributions.Distribution) -> Measure:
    return gz.measures.from_distribution(p)


BUILDERS: dict[str, Callable[[Source], Measure]] = {
    # empirical
    "empirical": lambda s: gz.Empirical(s.normal(7, 3)),
    "empirical, weighted": lambda s: gz.Empirical(s.normal(2, 6, 3), s.normal(2, 6)),
    "empirical, masked": lambda s: gz.Empirical(s.normal(6, 3), s.normal(6).masked_fill(s.normal(6) > 0.8, -torch.inf)),
    "empirical, one point": lambda s: gz.Empirical(s.normal(1, 3)),
    "empirical, on a plane": lambda s: gz.Empirical(s.normal(8, 2) @ s.normal(2, 3) + s.normal(3)),
    "empirical, far away": lambda s: gz.Empirical(s.normal(7, 3) + 1e4),
    # gaussian
    "gaussian": lambda s: gz.Gaussian(s.normal(3), s.covariance(3)),
    "gaussian, batched": lambda s: gz.Gaussian(s.normal(2, 2, 3), s.covariance(2, 2, 3)),
    "gaussian, diagonal": lambda s: gz.Gaussian.diagonal(s.normal(3), s.positive(3)),
    "gaussian, low rank": lambda s: gz.Gaussian.low_rank(s.normal(2, 4), s.normal(2, 4, 2), s.positive(2, 4)),
    "gaussian, singular": lambda s: gz.Gaussian.low_rank(s.normal(3), s.normal(3, 2)),
    # mixtures and spheres
    "mixture of gaussians": lambda s: gz.Mixture(s.log_simplex(4), gz.Gaussian(s.normal(4, 3), s.covariance(4, 3))),
    "mixture of empiricals": lambda s: gz.Mixture(s.log_simplex(2, 3), gz.Empirical(s.normal(2, 3, 5, 3))),
    "mixture of spheres": lambda s: gz.Mixture(s.log_simplex(3), gz.Sphere(3, s.positive(3))),
    "sphere": lambda s: gz.Sphere(3, s.positive()),
    "circle": lambda s: gz.Sphere(2, s.positive(2)),
    "sphere in 16 dimensions": lambda s: gz.Sphere(16, s.positive()),
    # classical families
    "gamma": lambda s: gz.Gamma(s.positive(3), s.positive(3, low=1.0)),
    "inverse gaussian": lambda s: gz.InverseGaussian(s.positive(2), s.positive(2)),
    "poisson": lambda s: gz.Poisson(s.positive(2, 3)),
    "spins": lambda s: gz.Spins(s.normal(3)),
    "one hot": lambda s: gz.OneHot(s.log_simplex(2, 4)),
    "wishart": lambda s: gz.Wishart(s.positive(low=2.5, high=6.0), s.covariance(2)),
    # torch distributions
    "normal statistic": lambda s: _distribution(torch.distributions.Normal(s.normal(), s.positive())),
    "exponential statistic": lambda s: _distribution(torch.distributions.Exponential(s.positive(2))),
    "gamma statistic": lambda s: _distribution(
        torch.distributions.Gamma(s.positive(2, low=1.0), s.positive(2, low=1.0))
    ),
    "beta statistic": lambda s: _distribution(torch.distributions.Beta(s.positive(low=1.0), s.positive(low=1.0))),
    "dirichlet statistic": lambda s: _distribution(torch.distributions.Dirichlet(s.positive(3, low=1.0))),
    "bernoulli statistic": lambda s: _distribution(torch.distributions.Bernoulli(logits=s.normal(2))),
    "categorical statistic": lambda s: _distribution(torch.distributions.Categorical(logits=s.normal(4))),
    "poisson statistic": lambda s: _distribution(torch.distributions.Poisson(s.positive())),
    # conjugate priors
    "gaussian prior": lambda s: gz.ConjugatePrior(s.normal(3), s.positive(), base="gaussian"),
    "poisson prior": lambda s: gz.ConjugatePrior(s.positive(2, low=1.0), s.positive(), base="poisson"),
    "exponential prior": lambda s: gz.ConjugatePrior(s.positive(2, 2, low=1.0), s.positive(2), base="exponential"),
    "bernoulli prior": lambda s: gz.ConjugatePrior(
        s.positive(2, low=1.0), s.positive(low=3.0, high=5.0), base="bernoulli"
    ),
    "categorical prior": lambda s: gz.ConjugatePrior(
        s.positive(2, low=1.0), s.positive(low=5.0, high=7.0), base="categorical"
    ),
    # algebra
    "tilted": lambda s: gz.tilt(gz.Empirical(s.normal(6, 3)), s.normal(3)),
    "convolution": lambda s: gz.convolve(gz.Empirical(s.normal(5, 3)), gz.Gaussian(s.normal(3), s.covariance(3))),
    "sum": lambda s: gz.add(gz.Empirical(s.normal(5, 3)), gz.Gaussian(s.normal(3), s.covariance(3))),
    "product": lambda s: gz.product(gz.Empirical(s.normal(5, 2)), gz.Gamma(s.positive(2), s.positive(2, low=1.0))),
    "pushforward": lambda s: gz.pushforward(gz.Empirical(s.normal(6, 3)), s.normal(2, 3), s.normal(2)),
    "temperature": lambda s: gz.pushforward(gz.Empirical(s.normal(2, 6, 3)), 0.25),
    "reweighted": lambda s: gz.reweight(gz.Empirical(s.normal(6, 3)), s.normal()),
    "boosting": lambda s: gz.measures.margin_measure(s.normal(9).sign(), s.normal(9, 3).sign(), s.normal(9)),
}
NAMES = list(BUILDERS)
BOUNDED = [
    name
    for name in NAMES
    if name.startswith(("empirical", "mixture of e", "mixture of s", "sphere", "circle", "spins"))
] + ["one hot", "tilted", "pushforward", "temperature", "reweighted", "boosting", "bernoulli statistic"]


class Case(NamedTuple):
    """A measure, natural parameters in its domain, and a source of further random numbers."""

    measure: Measure
    eta: Tensor
    source: Source


def case(
    name: str,
    seed: int = 0,
    *,
    queries: tuple[int, ...] = (3,),
    magnitude: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Build the named measure with this seed and eta [*b, *queries, d] of about this length, inside the domain."""
    source = Source(seed, dtype)
    measure = BUILDERS[name](source)
    return Case(
        measure, inside(measure, source.normal(*measure.batch_shape, *queries, measure.dim) * magnitude), source
    )


def inside(measure: Measure, eta: Tensor) -> Tensor:
    """Return eta with each row halved until 1.25 times the row lies in the domain."""
    for _ in range(60):
        outside = ~measure.in_domain(eta * 1.25)
        if not bool(outside.any()):
            return eta
        eta = torch.where(outside.unsqueeze(-1), eta / 2, eta)
    raise AssertionError("no natural parameter inside the domain was found")


seeds = st.integers(0, 2**32 - 1)
query_shapes = st.sampled_from([(), (1,), (3,), (2, 2)])
magnitudes = st.sampled_from([0.0, 1e-30, 1e-6, 1e-2, 0.3, 1.0, 3.0, 10.0])
