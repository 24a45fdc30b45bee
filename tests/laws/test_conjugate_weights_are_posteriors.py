"""Attention to natural parameters with conjugate-prior weights, against Bayes' rule with scipy's densities.   [E58]"""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from gradlogz import Empirical, Gaussian, Poisson, Sphere, Spins
from gradlogz.filters import ConjugateWeights
from support.scales import close

F64 = torch.float64


def test_counts_are_filtered_by_bayes_rule():
    """Poisson rates on a grid with a prior: probabilities, predicted counts and the density of the data."""
    rng = np.random.default_rng(0)
    rates, log_pi = rng.gamma(2.0, 3.0, size=7), special.log_softmax(rng.normal(size=7))
    counts = rng.poisson(4.0, size=(3, 9)).astype(float)
    counts[1, 4] = np.nan
    weights = ConjugateWeights(
        Poisson(torch.full((1,), 1.7, dtype=F64)),
        torch.tensor(np.log(rates / 1.7)).unsqueeze(-1),
        log_prior=torch.tensor(log_pi + 3.0),  # up to a constant
    )
    posterior = weights.filter(torch.tensor(counts).unsqueeze(-1))
    terms = np.nan_to_num(stats.poisson.logpmf(counts[..., None], rates))
    base = np.nan_to_num(stats.poisson.logpmf(counts, 1.7))
    joint = log_pi + terms.cumsum(1)
    evidence = special.logsumexp(joint, axis=-1)
    p = np.exp(joint - evidence[..., None])
    close(posterior.log_probability, torch.tensor(joint - evidence[..., None]), 100.0)
    close(posterior.log_normalizer, torch.tensor(evidence - base.cumsum(1)), 100.0)
    close(posterior.mean.squeeze(-1), torch.tensor(p @ rates), 100.0)
    close(posterior.eta.squeeze(-1), torch.tensor(p @ np.log(rates / 1.7)), 100.0)


def test_vectors_are_filtered_by_bayes_rule():
    rng = np.random.default_rng(1)
    mu, S = rng.normal(size=3), np.cov(rng.normal(size=(3, 20)))
    eta, x = rng.normal(size=(6, 3)), rng.normal(size=(5, 3))
    posterior = ConjugateWeights(Gaussian(torch.tensor(mu), torch.tensor(S)), torch.tensor(eta)).filter(torch.tensor(x))
    joint = np.array([[stats.multivariate_normal.logpdf(row, mu + S @ e, S) for e in eta] for row in x]).cumsum(0)
    close(posterior.log_probability, torch.tensor(special.log_softmax(joint, axis=-1)), 100.0)


@pytest.mark.parametrize("nu", [0.3, 1.0, 25.0])
def test_weights_fall_with_the_divergence_from_the_mean(nu):
    """exp(-nu KL(mu‖eta_i)) for independent spins, each KL a sum over the two states of each spin."""
    torch.manual_seed(2)
    eta, mu, value = torch.randn(8, 4, dtype=F64), torch.rand(5, 4, dtype=F64) * 1.8 - 0.9, torch.randn(8, 2, dtype=F64)
    weights = ConjugateWeights(Spins(torch.zeros(4, dtype=F64)), eta)
    up, given = (1 + mu.numpy()) / 2, 1 / (1 + np.exp(-2 * eta.numpy()))
    kl = (special.rel_entr(up[:, None], given) + special.rel_entr(1 - up[:, None], 1 - given)).sum(-1)
    p = torch.tensor(special.softmax(-nu * kl, axis=-1))
    close(weights.update(nu * mu, nu).log_probability.exp(), p, 1 + nu)
    close(weights.attend(mu, strength=nu, value=value), p @ value, 10.0 * (1 + nu))
    strengths = torch.full((5,), nu, dtype=F64)
    close(weights.attend(mu, strength=strengths, value=value), p @ value, 10.0 * (1 + nu))


def test_many_parameters_are_the_conjugate_prior():
    """On a fine grid of log rates the posterior mean rate is xi/nu, and log rates have the mean of a log Gamma.   [E51]

    The density exp(xi theta - nu exp(theta)) decays doubly exponentially or exponentially, so that the equidistant sum
    is exact to rounding.
    """
    theta = torch.linspace(-60.0, 6.0, 6001, dtype=F64).unsqueeze(-1)
    weights = ConjugateWeights(Poisson(torch.ones(1, dtype=F64)), theta)
    xi, nu = torch.tensor([[2.5], [7.0]], dtype=F64), torch.tensor([1.3, 4.0], dtype=F64)
    posterior = weights.update(xi, nu)
    close(posterior.mean.squeeze(-1), xi.squeeze(-1) / nu, 10.0)
    expected = special.digamma(xi.squeeze(-1).numpy()) - np.log(nu.numpy())
    close(posterior.eta.squeeze(-1), torch.tensor(expected), 100.0)


def test_with_equal_normalisers_it_is_attention_and_otherwise_it_is_not():
    """eta of one length on the sphere: G is the same for all.   [theory E58]"""
    torch.manual_seed(3)
    eta, mu = torch.randn(6, 3, dtype=F64), 0.5 * torch.randn(4, 3, dtype=F64)
    even = 2 * eta / eta.norm(dim=-1, keepdim=True)
    sphere = Sphere(3, torch.ones((), dtype=F64))
    attention = (mu @ even.mT).softmax(-1)
    close(ConjugateWeights(sphere, even).update(mu, 1.0).log_probability.exp(), attention, 10.0)
    close(ConjugateWeights(sphere, even).update(mu, 1.0).eta, Empirical(even).mean(mu), 10.0)
    off = ConjugateWeights(sphere, eta).update(mu, 1.0).log_probability.exp() - (mu @ eta.mT).softmax(-1)
    assert float(off.abs().max()) > 0.01


def test_posteriors_have_derivatives():
    torch.manual_seed(4)
    h, eta = Poisson(torch.ones(2, dtype=F64)), torch.randn(3, 2, dtype=F64, requires_grad=True)
    xi, log_pi = torch.rand(4, 2, dtype=F64, requires_grad=True), torch.randn(3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda e, x, p: tuple(ConjugateWeights(h, e, log_prior=p).update(x, 1.5)), (eta, xi, log_pi)
    )


def test_without_observations_the_prior_is_left():
    log_pi = torch.tensor([0.2, 0.3, 0.5], dtype=F64).log()
    weights = ConjugateWeights(Poisson(torch.ones(1, dtype=F64)), torch.randn(3, 1, dtype=F64), log_prior=log_pi)
    missing = torch.full((2, 1), math.nan, dtype=F64)
    close(weights.filter(missing).log_probability, log_pi.expand(2, 3))
    close(weights.filter(missing).log_normalizer, torch.zeros(2, dtype=F64))
