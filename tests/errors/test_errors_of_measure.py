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
    (TypeError, "Gaussian.mean: eta must be given; got nothing.", lambda: h.mean()),
    (TypeError, "Gaussian.sample: eta must be given; got nothing.", lambda: h.sample()),
    (TypeError, "Gaussian.covariance_product: vector must be given; got nothing.", lambda: h.covariance_product(eta)),
    (TypeError, "Gaussian.mean: eta must be a tensor; got list.", lambda: h.mean([0.0, 0.0, 0.0])),
    (TypeError, "Gaussian.mean: eta must be a tensor; got NoneType.", lambda: h.mean(None)),
    (TypeError, "Gaussian.mean: eta must be float32 or float64; got torch.int64.", lambda: h.mean(eta.long())),
    (TypeError, "Gaussian.mean: eta must be float32 or float64; got torch.float16.", lambda: h.mean(eta.half())),
    (TypeError, f"Gaussian.mean: {dtypes} eta torch.float64, measure torch.float32.", lambda: h.mean(eta.double())),
    (
        ValueError,
        "Gaussian.mean: tensors must be on one device; got eta on meta, measure on cpu.",
        lambda: h.mean(eta.to("meta")),
    ),
    (
        ValueError,
        "Gaussian.mean: eta must end in d=3, the dimension of the measure; got shape ().",
        lambda: h.mean(torch.zeros(())),
    ),
    # each method by its own name
    (ValueError, f"Gaussian.log_normalizer: eta {ends}", lambda: h.log_normalizer(two)),
    (ValueError, f"Gaussian.mean: eta {ends}", lambda: h.mean(two)),
    (ValueError, f"Gaussian.covariance: eta {ends}", lambda: h.covariance(two)),
    (ValueError, f"Gaussian.covariance_product: eta {ends}", lambda: h.covariance_product(two, eta)),
    (ValueError, f"Gaussian.covariance_product: vector {ends}", lambda: h.covariance_product(eta, two)),
    (ValueError, f"Gaussian.support: direction {ends}", lambda: h.support(two)),
    (ValueError, f"Gaussian.sample: eta {ends}", lambda: h.sample(two)),
    (ValueError, f"Gaussian.third_cumulant: eta {ends}", lambda: h.third_cumulant(two, eta, eta)),
    (ValueError, f"Gaussian.third_cumulant: left {ends}", lambda: h.third_cumulant(eta, two, eta)),
    (ValueError, f"Gaussian.third_cumulant: right {ends}", lambda: h.third_cumulant(eta, eta, two)),
    (ValueError, f"Gaussian.relative_entropy: eta {ends}", lambda: h.relative_entropy(two)),
    (ValueError, f"Gaussian.natural_gradient: eta {ends}", lambda: h.natural_gradient(two)),
    (ValueError, f"Gaussian.kl: p {ends}", lambda: h.kl(two, eta)),
    (ValueError, f"Gaussian.kl: q {ends}", lambda: h.kl(eta, two)),
    (ValueError, f"Gaussian.log_density: x {ends}", lambda: h.log_density(two, eta)),
    (ValueError, f"Gaussian.log_density: eta {ends}", lambda: h.log_density(eta, two)),
    (ValueError, f"Gaussian.expect: eta {ends}", lambda: h.expect(torch.sin, two, samples=5)),
    (ValueError, f"Empirical.entropy: eta {ends}", lambda: points.entropy(two)),
    (ValueError, f"Empirical.probabilities: eta {ends}", lambda: points.probabilities(two)),
    (
        TypeError,
        f"Gaussian.kl: {dtypes} p torch.float32, q torch.float64, measure torch.float32.",
        lambda: h.kl(eta, eta.double()),
    ),
    # batches: first, all of them, and never from the right
    (
        ValueError,
        "Gaussian.mean: eta must begin with the 1 batch dimensions (2,) of the measure; got shape (3,).",
        lambda: batch.mean(eta),
    ),
    (
        ValueError,
        "Gaussian.mean: eta must begin with the batch (2,) of the measure, or with 1 in its place; got shape (5, 3).",
        lambda: batch.mean(torch.zeros(5, 3)),
    ),
    (
        ValueError,
        "Gaussian.kl: p and q must have the same query dimensions; got shapes (2, 2, 3) and (2, 3).",
        lambda: batch.kl(torch.zeros(2, 2, 3), torch.zeros(2, 3)),
    ),
    (
        ValueError,
        "Gaussian.log_density: x and eta must have the same query dimensions; got shapes (3,) and (5, 3).",
        lambda: h.log_density(eta, torch.zeros(5, 3)),
    ),
    (
        ValueError,
        "Gaussian.covariance_product: eta and vector must have the same query dimensions; got shapes (5, 3) and (3,).",
        lambda: h.covariance_product(torch.zeros(5, 3), eta),
    ),
    (
        ValueError,
        "Gaussian.kl: batch dimensions must agree; got (1,) and (4,) and (5,).",
        lambda: Gaussian.diagonal(torch.zeros(1, 3), torch.ones(1, 3)).kl(torch.zeros(4, 3), torch.zeros(5, 3)),
    ),
    (TypeError, "Gaussian.sample: shape must be a tuple of sizes; got int.", lambda: h.sample(eta, 5)),
    (TypeError, "Gaussian.sample: shape must be a tuple of sizes; got list.", lambda: h.sample(eta, shape=[5])),
]

VALUES = [
    (
        ValueError,
        "Gaussian.mean: eta must be finite; got 3 of 3 entries that are NaN or infinite.",
        lambda: h.mean(eta + nan),
    ),
    (
        ValueError,
        "Gaussian.kl: q must be finite; got 3 of 3 entries that are NaN or infinite.",
        lambda: h.kl(eta, eta + inf),
    ),
    (
        ValueError,
        "Gaussian.covariance_product: vector must be finite; got 3 of 3 entries that are NaN or infinite.",
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
    (ValueError, outside("Gamma.log_normalizer"), lambda: gamma.log_normalizer(beyond)),
    (ValueError, outside("Gamma.mean", rows="2 of 3"), lambda: gamma.mean(many)),  # the rate itself is outside
    (ValueError, outside("Gamma.covariance"), lambda: gamma.covariance(beyond)),
    (ValueError, outside("Gamma.covariance_product"), lambda: gamma.covariance_product(beyond, one)),
    (ValueError, outside("Gamma.third_cumulant"), lambda: gamma.third_cumulant(beyond, one, one)),
    (ValueError, outside("Gamma.sample"), lambda: gamma.sample(beyond)),
    (ValueError, outside("Gamma.relative_entropy"), lambda: gamma.relative_entropy(beyond)),
    (ValueError, outside("Gamma.natural_gradient"), lambda: gamma.natural_gradient(beyond)),
    (ValueError, outside("Gamma.kl", "p"), lambda: gamma.kl(beyond, -one)),
    (ValueError, outside("Gamma.kl", "q"), lambda: gamma.kl(-one, beyond)),
    (ValueError, outside("Gamma.log_density"), lambda: gamma.log_density(one, beyond)),
    (ValueError, outside("Gamma.expect"), lambda: gamma.expect(torch.sin, beyond, samples=3)),
    (ValueError, outside("InverseGaussian.mean"), lambda: InverseGaussian(one, one).mean(one / 2)),
    (ValueError, outside("Wishart.mean"), lambda: wishart.mean(gz.measures.svec(torch.eye(2) / 2))),
    (ValueError, outside("Statistic.mean"), lambda: statistic("normal", 0.0, -1.0).mean(torch.tensor([0.0, 1.0]))),
    (ValueError, outside("Statistic.mean"), lambda: statistic("gamma", 1.0, -1.0).mean(torch.tensor([-1.0, 0.0]))),
    (ValueError, outside("Statistic.mean"), lambda: statistic("beta", 1.0, 1.0).mean(torch.tensor([-1.0, 0.0]))),
    (ValueError, outside("Statistic.mean"), lambda: statistic("dirichlet", 1.0, 1.0, 1.0).mean(eta - 1)),
    (ValueError, outside("ConjugatePrior.mean"), lambda: prior("poisson").mean(-one)),
    (ValueError, outside("ConjugatePrior.mean"), lambda: prior("exponential").mean(-one)),
    (ValueError, outside("ConjugatePrior.mean"), lambda: prior("bernoulli").mean(one)),
    (ValueError, outside("ConjugatePrior.mean"), lambda: prior("categorical").mean(one)),
    (ValueError, outside("Mixture.mean"), lambda: mixed.mean(one)),
    (ValueError, outside("Tilted.mean"), lambda: gz.tilt(gamma, one / 2).mean(one / 2)),
    (ValueError, outside("Convolution.mean"), lambda: gz.convolve(gamma, gamma).mean(one)),
    (ValueError, outside("Sum.mean"), lambda: gz.add(gamma, gamma).mean(one)),
    (ValueError, outside("Product.mean"), lambda: gz.product(gamma, gamma).mean(torch.ones(2))),
    (ValueError, outside("Pushforward.mean"), lambda: gz.pushforward(gamma, 2.0).mean(one / 2)),
    (ValueError, outside("Reweighted.mean"), lambda: gz.reweight(gamma, torch.tensor(1.0)).mean(one)),
]

EXPECTATIONS = [
    (
        ValueError,
        "Empirical.expect: values must have one row for each of the n=4 points; got shape (5, 2).",
        lambda: points.expect(torch.ones(5, 2), eta),
    ),
    (
        ValueError,
        "Empirical.expect: values must have one row for each of the n=4 points; got shape (4,).",
        lambda: points.expect(lambda x: x.sum(-1), eta),
    ),
    (
        ValueError,
        "Empirical.expect: values must have one row for each of the n=4 points; got float.",
        lambda: points.expect(lambda x: float(x.sum()), eta),
    ),
    (
        ValueError,
        "Empirical.expect: values must have one row for each of the n=4 points; got list.",
        lambda: points.expect([1.0, 2.0, 3.0, 4.0], eta),
    ),
    (
        ValueError,
        "Gaussian.expect: values must be a function of x; got a tensor, but no finite points.",
        lambda: h.expect(torch.ones(4, 2), eta),
    ),
    (
        ValueError,
        "Gaussian.expect: samples must be given for a measure that is not carried by finitely many points;"
        " got samples=None.",
        lambda: h.expect(torch.sin, eta),
    ),
    (
        ValueError,
        "Gaussian.expect: samples must be at least 1; got samples=0.",
        lambda: h.expect(torch.sin, eta, samples=0),
    ),
]


def subclass(parent):
    return lambda: type("Sub", (parent,), {})


SUBCLASSES = [
    (TypeError, f"{parent.__name__}: a concrete measure must stay final; got Sub.", subclass(parent))
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
