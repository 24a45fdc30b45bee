"""If h = N(mu, Sigma), then ∇ log ∫ exp<x, eta> h(dx) = mu + Sigma eta.   [shim22, Cor. 1; theory 3.4]

G = <mu, eta> + <eta, Sigma eta>/2, the covariance is Sigma for every query, and a singular Sigma is allowed.
"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of


def sums(seed, d, rank):
    """mu, a root of Sigma of this rank, eta."""
    s = Source(seed)
    return s.normal(d), s.normal(d, rank), s.normal(d)


@given(seeds, st.integers(1, 5), st.integers(1, 5))
def test_attention_over_gaussian_keys_is_affine(seed, d, rank):
    mu, A, eta = sums(seed, d, rank)
    Sigma = A @ A.mT
    for h in (gz.Gaussian(mu, Sigma), gz.Gaussian.low_rank(mu, A)):
        close(h.log_normalizer(eta), mu @ eta + eta @ Sigma @ eta / 2, scale_of(h, eta, 0))
        close(h.mean(eta), mu + Sigma @ eta, scale_of(h, eta))
        close(h.covariance(eta), Sigma, scale_of(h, eta, 2))


@given(seeds)
def test_softmax_attention_over_the_nodes_of_a_gaussian_is_affine(seed):
    # Gauss-Hermite nodes are finitely many keys with weights; 60 a side integrate these tilts to rounding.
    mu, A, eta = sums(seed, 2, 2)
    A, eta = A / A.norm(), eta / eta.norm()
    node, weight = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(60))
    z, w = torch.cartesian_prod(node, node), torch.cartesian_prod(weight, weight).prod(-1) / (2 * np.pi)
    keys = gz.Empirical.weighted(mu + z @ A.mT, w)
    scale = scale_of(keys, eta)
    close(keys.mean(eta), mu + A @ A.mT @ eta, scale)
    close(keys.log_normalizer(eta), mu @ eta + (A.mT @ eta).square().sum() / 2, scale)


@given(seeds, st.integers(1, 5))
def test_the_tilted_law_is_the_gaussian_moved_by_sigma_eta(seed, d):
    s = Source(seed)
    mu, Sigma, eta, x = s.normal(d), s.covariance(d), s.normal(d), s.normal(d)
    p0, p1 = (torch.distributions.MultivariateNormal(m, Sigma) for m in (mu, mu + Sigma @ eta))
    h = gz.Gaussian(mu, Sigma)
    size = 1 + p0.log_prob(x).abs() + p1.log_prob(x).abs()
    close(h.log_density(x, eta), p1.log_prob(x) - p0.log_prob(x), size * scale_of(h, eta, 0))
