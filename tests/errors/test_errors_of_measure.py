"""Every method of every measure says what is wrong with its arguments, under their own names.

The shape law: eta is [*b, *m, d], the batch of the measure first; batches broadcast against size 1 only.
"""

import torch

import gradlogz as gz
from gradlogz import Empirical, Gamma, Gaussian, InverseGaussian, Measure
from support.error_form import each_of, refused

h, batch = Gaussian.diagonal(torch.zeros(3), torch.ones(3)), Gaussian.diagonal(torch.zeros(2, 3), torch.ones(2, 3))
eta, two = torch.zeros(3), torch.zeros(2)
nan, inf = torch.nan, torch.inf
points = Empirical(torch.ones(4, 3))
gamma = Gamma(torch.ones(1), torch.ones(1))
beyond = torch.tensor([2.0])
ends, dtypes = "must end in d=3, the dimension of the measure; got shape (2,).", "tensors must share one dtype; got"

TYPES_AND_SHAPES = [
    (TypeError, "Gaussian.mean: eta", "missing", lambda: h.mean()),
    (TypeError, "Gaussian.sample: eta", "missing", lambda: h.sample()),
    (TypeError, "Gaussian.covariance_product: vector", "missing", lambda: h.covariance_product(eta)),
    (TypeError, "Gaussian.mean: eta", "a tensor", lambda: h.mean([0.0, 0.0, 0.0])),
    (TypeError, "Gaussian.mean: eta", "a tensor", lambda: h.mean(None)),
    (TypeError, "Gaussian.mean: eta", "float32", lambda: h.mean(eta.long())),
    (TypeError, "Gaussian.mean: eta", "float32", lambda: h.mean(eta.half())),
    (TypeError, "Gaussian.mean: None", "share", lambda: h.mean(eta.double())),
    (
        ValueError,
        "Gaussian.mean: None",
        "device",
        lambda: h.mean(eta.to("meta")),
    ),
    (
        ValueError,
        "Gaussian.mean: eta",
        "dimension",
        lambda: h.mean(torch.zeros(())),
    ),
    # each method by its own name
    (ValueError, "Gaussian.log_normalizer: eta", "dimension", lambda: h.log_normalizer(two)),
    (ValueError, "Gaussian.mean: eta", "dimension", lambda: h.mean(two)),
    (ValueError, "Gaussian.covariance: eta", "dimension", lambda: h.covariance(two)),
    (ValueError, "Gaussian.covariance_product: eta", "dimension", lambda: h.covariance_product(two, eta)),
    (ValueError, "Gaussian.covariance_product: vector", "dimension", lambda: h.covariance_product(eta, two)),
    (ValueError, "Gaussian.support: direction", "dimension", lambda: h.support(two)),
    (ValueError, "Gaussian.sample: eta", "dimension", lambda: h.sample(two)),
    (ValueError, "Gaussian.third_cumulant: eta", "dimension", lambda: h.third_cumulant(two, eta, eta)),
    (ValueError, "Gaussian.third_cumulant: left", "dimension", lambda: h.third_cumulant(eta, two, eta)),
    (ValueError, "Gaussian.third_cumulant: right", "dimension", lambda: h.third_cumulant(eta, eta, two)),
    (ValueError, "Gaussian.relative_entropy: eta", "dimension", lambda: h.relative_entropy(two)),
    (ValueError, "Gaussian.natural_gradient: eta", "dimension", lambda: h.natural_gradient(two)),
    (ValueError, "Gaussian.kl: p", "dimension", lambda: h.kl(two, eta)),
    (ValueError, "Gaussian.kl: q", "dimension", lambda: h.kl(eta, two)),
    (ValueError, "Gaussian.log_density: x", "dimension", lambda: h.log_density(two, eta)),
    (ValueError, "Gaussian.log_density: eta", "dimension", lambda: h.log_density(eta, two)),
    (ValueError, "Gaussian.expect: eta", "dimension", lambda: h.expect(torch.sin, two, samples=5)),
    (ValueError, "Empirical.entropy: eta", "dimension", lambda: points.entropy(two)),
    (ValueError, "Empirical.probabilities: eta", "dimension", lambda: points.probabilities(two)),
    (
        TypeError,
        "Gaussian.kl: None",
        "share",
        lambda: h.kl(eta, eta.double()),
    ),
    # batches: first, all of them, and never from the right
    (
        ValueError,
        "Gaussian.mean: eta",
        "dimensions",
        lambda: batch.mean(eta),
    ),
    (
        ValueError,
        "Gaussian.mean: eta",
        "measure",
        lambda: batch.mean(torch.zeros(5, 3)),
    ),
    (
        ValueError,
        "Gaussian.kl: p and q",
        "dimensions",
        lambda: batch.kl(torch.zeros(2, 2, 3), torch.zeros(2, 3)),
    ),
    (
        ValueError,
        "Gaussian.log_density: x and eta",
        "dimensions",
        lambda: h.log_density(eta, torch.zeros(5, 3)),
    ),
    (
        ValueError,
        "Gaussian.covariance_product: eta and vector",
        "dimensions",
        lambda: h.covariance_product(torch.zeros(5, 3), eta),
    ),
    (
        ValueError,
        "Gaussian.kl: None",
        "agree",
        lambda: Gaussian.diagonal(torch.zeros(1, 3), torch.ones(1, 3)).kl(torch.zeros(4, 3), torch.zeros(5, 3)),
    ),
    (TypeError, "Gaussian.sample: shape", "tuple", lambda: h.sample(eta, 5)),
    (TypeError, "Gaussian.sample: shape", "tuple", lambda: h.sample(eta, shape=[5])),
]

VALUES = [
    (
        ValueError,
        "Gaussian.mean: eta",
        "finite",
        lambda: h.mean(eta + nan),
    ),
    (
        ValueError,
        "Gaussian.kl: q",
        "finite",
        lambda: h.kl(eta, eta + inf),
    ),
    (
        ValueError,
        "Gaussian.covariance_product: vector",
        "finite",
        lambda: h.covariance_product(eta, eta + nan),
    ),
]


def outside(call, argument="eta", rows="1 of 1"):
    return f"{call}: {argument} must lie in the domain of the measure, where Z is finite; got {rows} rows outside."


def statistic(family, *natural):
    return gz.Statistic(torch.tensor(natural), family=family)


def prior(base):
    return gz.ConjugatePrior(torch.ones(1), torch.tensor(2.0), base=base)


one, many = torch.ones(1), torch.tensor([[-1.0], [1.0], [3.0]])
mixed = gz.Mixture(torch.zeros(1), Gamma(torch.ones(1, 1), torch.ones(1, 1)))
wishart = gz.Wishart(torch.tensor(3.0), torch.eye(2))
DOMAINS = [
    (ValueError, "Gamma.log_normalizer: eta", "measure", lambda: gamma.log_normalizer(beyond)),
    (ValueError, "Gamma.mean: eta", "measure", lambda: gamma.mean(many)),  # the rate itself is outside
    (ValueError, "Gamma.covariance: eta", "measure", lambda: gamma.covariance(beyond)),
    (ValueError, "Gamma.covariance_product: eta", "measure", lambda: gamma.covariance_product(beyond, one)),
    (ValueError, "Gamma.third_cumulant: eta", "measure", lambda: gamma.third_cumulant(beyond, one, one)),
    (ValueError, "Gamma.sample: eta", "measure", lambda: gamma.sample(beyond)),
    (ValueError, "Gamma.relative_entropy: eta", "measure", lambda: gamma.relative_entropy(beyond)),
    (ValueError, "Gamma.natural_gradient: eta", "measure", lambda: gamma.natural_gradient(beyond)),
    (ValueError, "Gamma.kl: p", "measure", lambda: gamma.kl(beyond, -one)),
    (ValueError, "Gamma.kl: q", "measure", lambda: gamma.kl(-one, beyond)),
    (ValueError, "Gamma.log_density: eta", "measure", lambda: gamma.log_density(one, beyond)),
    (ValueError, "Gamma.expect: eta", "measure", lambda: gamma.expect(torch.sin, beyond, samples=3)),
    (ValueError, "InverseGaussian.mean: eta", "measure", lambda: InverseGaussian(one, one).mean(one / 2)),
    (ValueError, "Wishart.mean: eta", "measure", lambda: wishart.mean(gz.measures.svec(torch.eye(2) / 2))),
    (
        ValueError,
        "Statistic.mean: eta",
        "measure",
        lambda: statistic("normal", 0.0, -1.0).mean(torch.tensor([0.0, 1.0])),
    ),
    (
        ValueError,
        "Statistic.mean: eta",
        "measure",
        lambda: statistic("gamma", 1.0, -1.0).mean(torch.tensor([-1.0, 0.0])),
    ),
    (ValueError, "Statistic.mean: eta", "measure", lambda: statistic("beta", 1.0, 1.0).mean(torch.tensor([-1.0, 0.0]))),
    (ValueError, "Statistic.mean: eta", "measure", lambda: statistic("dirichlet", 1.0, 1.0, 1.0).mean(eta - 1)),
    (ValueError, "ConjugatePrior.mean: eta", "measure", lambda: prior("poisson").mean(-one)),
    (ValueError, "ConjugatePrior.mean: eta", "measure", lambda: prior("exponential").mean(-one)),
    (ValueError, "ConjugatePrior.mean: eta", "measure", lambda: prior("bernoulli").mean(one)),
    (ValueError, "ConjugatePrior.mean: eta", "measure", lambda: prior("categorical").mean(one)),
    (ValueError, "Mixture.mean: eta", "measure", lambda: mixed.mean(one)),
    (ValueError, "Tilted.mean: eta", "measure", lambda: gz.tilt(gamma, one / 2).mean(one / 2)),
    (ValueError, "Convolution.mean: eta", "measure", lambda: gz.convolve(gamma, gamma).mean(one)),
    (ValueError, "Sum.mean: eta", "measure", lambda: gz.add(gamma, gamma).mean(one)),
    (ValueError, "Product.mean: eta", "measure", lambda: gz.product(gamma, gamma).mean(torch.ones(2))),
    (ValueError, "Pushforward.mean: eta", "measure", lambda: gz.pushforward(gamma, 2.0).mean(one / 2)),
    (ValueError, "Reweighted.mean: eta", "measure", lambda: gz.reweight(gamma, torch.tensor(1.0)).mean(one)),
]

EXPECTATIONS = [
    (
        ValueError,
        "Empirical.expect: values",
        "points",
        lambda: points.expect(torch.ones(5, 2), eta),
    ),
    (
        ValueError,
        "Empirical.expect: values",
        "points",
        lambda: points.expect(lambda x: x.sum(-1), eta),
    ),
    (
        ValueError,
        "Empirical.expect: values",
        "points",
        lambda: points.expect(lambda x: float(x.sum()), eta),
    ),
    (
        ValueError,
        "Empirical.expect: values",
        "points",
        lambda: points.expect([1.0, 2.0, 3.0, 4.0], eta),
    ),
    (
        ValueError,
        "Gaussian.expect: values",
        "function",
        lambda: h.expect(torch.ones(4, 2), eta),
    ),
    (
        ValueError,
        "Gaussian.expect: samples",
        "finitely",
        lambda: h.expect(torch.sin, eta),
    ),
    (
        ValueError,
        "Gaussian.expect: samples",
        "least",
        lambda: h.expect(torch.sin, eta, samples=0),
    ),
]


def subclass(parent):
    return lambda: type("Sub", (parent,), {})


SUBCLASSES = [
    (TypeError, f"{parent.__name__}: None", "subclass", subclass(parent))
    for parent in (Empirical, Gaussian, gz.Mixture, gz.Sphere, Gamma, gz.Statistic, gz.ConjugatePrior, gz.Wishart)
]
ERRORS = TYPES_AND_SHAPES + VALUES + DOMAINS + EXPECTATIONS + SUBCLASSES


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)


def test_abstract_measures_may_be_subclassed():
    for parent in (Measure, gz.measures.Differentiated, gz.measures.Separable):
        assert issubclass(type("Sub", (parent,), {}), parent)


def test_support_and_domain_may_be_asked_anywhere():
    assert gamma.in_domain(many).tolist() == [True, False, False]
    assert gamma.support(beyond) == inf
