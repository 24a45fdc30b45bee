"""The family of a torch distribution is that of its sufficient statistic: moments, divergences, log densities, names.

theta and T are written out below, one line a family; everything else is asked of torch.   [shim22, Prop. 1b]
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import distributions as D
from torch.distributions import kl_divergence

import gradlogz as gz
from support.measure_registry import Source
from support.scales import close


class Known(NamedTuple):
    """Two members drawn from a source, the natural parameter, the statistic and its expectation."""

    member: Callable
    theta: Callable
    statistic: Callable
    expectation: Callable


def stack(*columns):
    return torch.stack(columns, -1)


def one_hot(p):
    return lambda y: torch.nn.functional.one_hot(y, p.logits.shape[-1]).double()


KNOWN = {
    "normal": Known(
        lambda s, b: D.Normal(s.normal(*b), s.positive(*b)),
        lambda p: stack(p.loc / p.scale**2, -1 / (2 * p.scale**2)),
        lambda p: lambda y: stack(y, y**2),
        lambda p: stack(p.loc, p.loc**2 + p.scale**2),
    ),
    "exponential": Known(
        lambda s, b: D.Exponential(s.positive(*b)),
        lambda p: -p.rate.unsqueeze(-1),
        lambda p: lambda y: y.unsqueeze(-1),
        lambda p: p.mean.unsqueeze(-1),
    ),
    "gamma": Known(
        lambda s, b: D.Gamma(s.positive(*b), s.positive(*b)),
        lambda p: stack(p.concentration, -p.rate),
        lambda p: lambda y: stack(y.log(), y),
        lambda p: stack(p.concentration.digamma() - p.rate.log(), p.mean),
    ),
    "beta": Known(
        lambda s, b: D.Beta(s.positive(*b), s.positive(*b)),
        lambda p: stack(p.concentration1, p.concentration0),
        lambda p: lambda y: stack(y.log(), (1 - y).log()),
        lambda p: (
            stack(p.concentration1, p.concentration0).digamma()
            - (p.concentration1 + p.concentration0).digamma().unsqueeze(-1)
        ),
    ),
    "dirichlet": Known(
        lambda s, b: D.Dirichlet(s.positive(*b, 4)),
        lambda p: p.concentration,
        lambda p: lambda y: y.log(),
        lambda p: p.concentration.digamma() - p.concentration.sum(-1, keepdim=True).digamma(),
    ),
    "bernoulli": Known(
        lambda s, b: D.Bernoulli(logits=s.normal(*b)),
        lambda p: p.logits.unsqueeze(-1),
        lambda p: lambda y: y.unsqueeze(-1),
        lambda p: p.mean.unsqueeze(-1),
    ),
    "categorical": Known(
        lambda s, b: D.Categorical(logits=s.normal(*b, 4)),
        lambda p: p.logits,
        one_hot,
        lambda p: p.probs,
    ),
    "poisson": Known(
        lambda s, b: D.Poisson(s.positive(*b)),
        lambda p: p.rate.log().unsqueeze(-1),
        lambda p: lambda y: y.unsqueeze(-1),
        lambda p: p.mean.unsqueeze(-1),
    ),
}
families = pytest.mark.parametrize("name", KNOWN)
batches = pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)


def two_members(name, batch):
    """Members p and q, the measure of p, and the eta that tilts p into q."""
    known, s = KNOWN[name], Source(len(name))
    p, q = known.member(s, batch), known.member(s, batch)
    return p, q, gz.measures.from_distribution(p), known.theta(q) - known.theta(p), known


@families
@batches
def test_the_mean_is_the_expected_statistic(name, batch):
    p, q, h, eta, known = two_members(name, batch)
    assert h.batch_shape == torch.Size(batch)
    close(h.mean(torch.zeros_like(eta)), known.expectation(p), 1 + known.expectation(p).abs().max())
    close(h.mean(eta), known.expectation(q), 1 + known.expectation(q).abs().max() * 10)


@families
@batches
def test_kl_is_that_of_torch(name, batch):
    p, q, h, eta, _ = two_members(name, batch)
    zero = torch.zeros_like(eta)
    # G_q - G_p - <mean, q - p> is measured by its terms.
    scale = (
        1 + h.log_normalizer(eta).abs().max() + (h.mean(zero).abs().max() + h.mean(eta).abs().max()) * eta.abs().max()
    )
    close(h.kl(zero, eta), kl_divergence(p, q), scale)
    close(h.kl(eta, zero), kl_divergence(q, p), scale)
    close(h.relative_entropy(eta), kl_divergence(q, p), scale)


@families
@batches
def test_the_log_density_is_the_ratio_of_two_members(name, batch):
    p, q, h, eta, known = two_members(name, batch)
    y = p.sample((5,))
    x = known.statistic(p)(y).movedim(0, len(batch))  # queries come after the batch
    log_ratio = (q.log_prob(y) - p.log_prob(y)).movedim(0, len(batch))
    close(h.log_density(x, eta.unsqueeze(-2).expand_as(x)), log_ratio, 10 * (1 + x.abs().max()))


@families
@batches
def test_the_way_there_and_back_is_the_identity(name, batch):
    p, q, h, eta, known = two_members(name, batch)
    y = p.sample((5,))
    # Laws of x and not of y: a vector of one coordinate, a one-hot vector.
    seen = known.statistic(p)(y) if name in ("exponential", "poisson", "categorical") else y
    for member, at in ((p, torch.zeros_like(eta)), (q, eta)):
        back, expected = gz.measures.to_distribution(h, at), member.log_prob(y)
        assert back.batch_shape == torch.Size(batch)
        close(back.log_prob(seen), expected, 10 * (1 + expected.abs().max() + eta.abs().max()))


@pytest.mark.parametrize("name", ["normal", "exponential", "bernoulli", "categorical"])
@batches
def test_entropy_differs_by_what_the_measure_says(name, batch):
    # Families whose carrier is constant: H(theta) = A(theta) - <theta, E T>.   [theory 3.5]
    p, q, h, eta, known = two_members(name, batch)
    theta, zero = known.theta(p), torch.zeros_like(eta)
    difference = h.log_normalizer(eta) - ((theta + eta) * h.mean(eta)).sum(-1) + (theta * h.mean(zero)).sum(-1)
    close(difference, q.entropy() - p.entropy(), 10 * (1 + difference.abs().max()))


def test_queries_beside_a_batch_of_members():
    s = Source(0)
    p = D.Normal(s.normal(2), s.positive(2))
    eta = torch.stack((s.normal(2, 3), -s.positive(2, 3)), -1)
    q = gz.measures.to_distribution(gz.measures.from_distribution(p), eta)
    assert q.batch_shape == (2, 3)
    precision = p.scale[:, None] ** -2 - 2 * eta[..., 1]
    close(q.scale**-2, precision, precision.max())
    close(q.loc, (p.loc[:, None] / p.scale[:, None] ** 2 + eta[..., 0]) / precision, 10.0)


BY_NAME = {
    "gaussian": lambda s: gz.Gaussian(s.normal(2, 3), s.covariance(2, 3)),
    "gamma": lambda s: gz.Gamma(s.positive(2, 3), s.positive(2, 3, low=3.0, high=4.0)),
    "poisson": lambda s: gz.Poisson(s.positive(2, 3)),
    "one hot": lambda s: gz.OneHot(s.log_simplex(2, 3)),
    "wishart": lambda s: gz.Wishart(s.positive(2, low=3.0, high=5.0), s.covariance(2, 2)),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_measures_by_name_become_the_law_of_x(name):
    s = Source(1)
    h = BY_NAME[name](s)
    eta = -s.positive(2, 4, 3)
    if name == "wishart":
        eta = gz.measures.svec(-s.covariance(2, 4, 2))
    law, tilted = gz.measures.to_distribution(h, torch.zeros_like(eta)), gz.measures.to_distribution(h, eta)
    assert tilted.batch_shape == (2, 4)
    y = s.covariance(2, 4, 2) if name == "wishart" else law.sample()
    x = gz.measures.svec(y) if name == "wishart" else y
    scale = 1 + law.log_prob(y).abs().max() + tilted.log_prob(y).abs().max()
    close(h.log_density(x, eta), tilted.log_prob(y) - law.log_prob(y), 10 * scale)


@pytest.mark.parametrize(
    "p",
    [
        D.Cauchy(0.0, 1.0),
        D.Laplace(0.0, 1.0),
        D.StudentT(3.0),
        D.Chi2(torch.tensor(3.0)),  # a Gamma by inheritance, with another parameter
        D.LogNormal(0.0, 1.0),
        D.HalfNormal(1.0),
        D.ContinuousBernoulli(0.3),
        D.OneHotCategorical(torch.ones(3)),
        D.Independent(D.Normal(torch.zeros(2), torch.ones(2)), 1),
    ],
    ids=lambda p: type(p).__name__,
)
def test_other_distributions_are_refused(p):
    with pytest.raises(TypeError, match=f"^from_distribution: .*{type(p).__name__}"):
        gz.measures.from_distribution(p)


@pytest.mark.parametrize("h", [gz.Sphere(3), gz.Empirical(torch.zeros(2, 3)), gz.Spins(torch.zeros(3))], ids=type)
def test_laws_that_torch_does_not_have_are_refused(h):
    with pytest.raises(TypeError, match=f"^to_distribution: .*{type(h).__name__}"):
        gz.measures.to_distribution(h, torch.zeros(3))


def test_a_query_of_size_one_serves_all_members():
    one = torch.zeros(1, 3, dtype=torch.float64)
    df, rate = torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    wishart = gz.Wishart(df, torch.eye(2, dtype=torch.float64).expand(3, 2, 2))
    close(gz.measures.to_distribution(wishart, one).mean, df[:, None, None] * torch.eye(2, dtype=torch.float64))
    gamma = gz.Gamma(df[:, None].expand(3, 3), rate)
    close(gz.measures.to_distribution(gamma, one).mean, df[:, None].expand(3, 3))
