"""With the conjugate prior as intrinsic measure, attention is a Bayes update WITHOUT the count.   [theory 6.3]

    ∇G(y) = E[theta | xi + y, nu],   posterior mean given x: E[theta | xi + x, nu + 1]

The posterior mean is attention with query x over the prior, with the key bias -G0(theta).
"""

import pytest
import torch
from hypothesis import given
from scipy import special, stats

import gradlogz as gz
from support.densities import PRIORS, law
from support.measure_registry import seeds
from support.scales import close

STATEMENTS = ("6.3", "6.3 posterior")

# A possible observation of each base family.
OBSERVED = {"gaussian prior": 0.7, "poisson prior": 2.0, "exponential prior": 0.8, "bernoulli prior": 1.0}


def finite_bias(h, theta):
    """-G0, where exp(-G0) has underflowed anyhow a number instead of -inf."""
    return -h.base_log_normalizer(theta).clamp(max=1e300)


@pytest.mark.parametrize("name", PRIORS)
@given(seed=seeds)
def test_the_posterior_mean_is_attention_with_the_key_bias_minus_g0(name, seed):
    at = law(name, seed)
    x = torch.full_like(at.eta, OBSERVED[name])
    bias = finite_bias(at.h, at.x)
    expected = (at.log_mass + at.x @ x + bias).softmax(-1) @ at.x  # Bayes' rule on the nodes
    attention = gz.Empirical(at.x, at.log_mass + bias).mean(x)
    posterior = at.h.posterior(x).mean(torch.zeros_like(x))
    scale = at._replace(log_mass=at.log_mass + bias, eta=x).scale()
    close(attention, expected, scale)
    close(posterior, expected, scale)


# The law of the next observation under each prior, as scipy has it, times what h0 leaves out of p(x | theta).
PREDICTIVE = {
    "gaussian prior": lambda x, xi, nu: stats.norm(xi / nu, (1 + 1 / nu) ** 0.5).logpdf(x) - stats.norm.logpdf(x),
    "poisson prior": lambda x, xi, nu: stats.nbinom(xi, nu / (nu + 1)).logpmf(x) + special.gammaln(x + 1),
    "exponential prior": lambda x, xi, nu: stats.lomax(nu + 1, scale=xi).logpdf(x),
    "bernoulli prior": lambda x, xi, nu: stats.betabinom(1, xi, nu - xi).logpmf(x),
}


@pytest.mark.parametrize("name", PRIORS)
@given(seed=seeds)
def test_the_log_normalizer_of_that_attention_is_the_log_predictive_probability(name, seed):
    at = law(name, seed)
    x, biased = torch.full_like(at.eta, OBSERVED[name]), at.log_mass + finite_bias(at.h, at.x)
    expected = PREDICTIVE[name](*(float(t) for t in (x, at.h.xi, at.h.nu)))
    scale = at._replace(log_mass=biased, eta=x).scale(0) + abs(expected)
    close(gz.Empirical(at.x, biased).log_normalizer(x), x.new_tensor(expected), scale)


def test_draws_from_the_prior_as_keys_give_the_posterior_mean():
    prior = gz.ConjugatePrior(torch.tensor([1.5]).double(), torch.tensor(2.0).double(), base="poisson")
    x, n = torch.tensor([2.0]).double(), 40000
    theta = prior.sample(torch.zeros(1).double(), (n,), generator=torch.Generator().manual_seed(0))
    h = gz.Empirical(theta, -prior.base_log_normalizer(theta))
    exact = torch.digamma(torch.tensor(3.5).double()) - torch.tensor(3.0).double().log()
    p = h.probabilities(x)
    error = (p.square() @ (theta[:, 0] - exact).square()).sqrt()  # of self-normalised importance sampling
    assert abs(float(h.mean(x)[0] - exact)) < 5 * float(error)
    assert float(error) < 0.01
