"""The log normaliser of a mixture of Gaussians, and its Jensen bounds: the paper's missing appendix.   [theory 6.1]

    G = log sum_k pi_k exp g_k,  g_k = <mu_k, eta> + <eta, Sigma_k eta>/2,  r = softmax(log pi + g)
    ∇G = sum_k r_k m_k,  m_k = mu_k + Sigma_k eta
    G >= sum_k q_k (g_k + log pi_k/q_k), with gap KL(q‖r)

As Sigma_k -> 0 it is softmax attention (8.4).
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

sizes = {"seed": seeds, "k": st.integers(1, 4), "d": st.integers(1, 4)}


def mixture(seed, k, d):
    s = Source(seed)
    return s.log_simplex(k), s.normal(k, d), s.covariance(k, d), s.normal(d), s


def by_hand(log_pi, mu, Sigma):
    return lambda eta: (log_pi + mu @ eta + torch.einsum("d,kde,e->k", eta, Sigma, eta) / 2).logsumexp(-1)


@given(**sizes)
def test_components_are_gated_by_their_log_normalizers(seed, k, d):
    log_pi, mu, Sigma, eta, _ = mixture(seed, k, d)
    h, G = gz.Mixture(log_pi, gz.Gaussian(mu, Sigma)), by_hand(log_pi, mu, Sigma)
    close(h.log_normalizer(eta), G(eta), scale_of(h, eta, 0))
    close(h.mean(eta), torch.func.grad(G)(eta), scale_of(h, eta))
    close(h.covariance(eta), torch.func.hessian(G)(eta), scale_of(h, eta, 2))


@given(**sizes)
def test_mean_and_covariance_are_gated_averages(seed, k, d):
    log_pi, mu, Sigma, eta, _ = mixture(seed, k, d)
    h = gz.Mixture(log_pi, gz.Gaussian(mu, Sigma))
    m = mu + Sigma @ eta
    r = (log_pi + mu @ eta + (Sigma @ eta) @ eta / 2).softmax(-1)
    away = m - r @ m
    close(h.responsibilities(eta), r, scale_of(h, eta, 0))
    close(h.mean(eta), r @ m, scale_of(h, eta))
    close(h.covariance(eta), torch.einsum("k,kde->de", r, Sigma) + (r * away.mT) @ away, scale_of(h, eta, 2))


@given(seeds)
def test_on_the_line_it_is_the_integral_of_the_mixture_density(seed):
    log_pi, mu, Sigma, eta, _ = mixture(seed, 3, 1)
    step = 1 / 16
    x = torch.arange(-60, 60, step, dtype=torch.float64).unsqueeze(-1)
    variance = Sigma[:, 0, 0]
    density = log_pi - (x - mu[:, 0]) ** 2 / (2 * variance) - (2 * math.pi * variance).log() / 2
    h = gz.Mixture(log_pi, gz.Gaussian(mu, Sigma))
    close(h.log_normalizer(eta), (density.logsumexp(-1) + x @ eta).logsumexp(-1) + math.log(step), scale_of(h, eta, 0))


@given(**sizes)
def test_the_gap_of_the_bound_is_the_divergence_from_the_responsibilities(seed, k, d):
    log_pi, mu, Sigma, eta, s = mixture(seed, k, d)
    h, log_q = gz.Mixture(log_pi, gz.Gaussian(mu, Sigma)), s.log_simplex(k)
    g, q = mu @ eta + (Sigma @ eta) @ eta / 2, log_q.exp()
    log_r = (log_pi + g).log_softmax(-1)
    bound = h.lower_bound(eta, log_q)
    close(bound.value, q @ (g + log_pi - log_q), scale_of(h, eta, 0) * (1 + g.abs().max()))
    close(bound.gap, q @ (log_q - log_r), scale_of(h, eta, 0) * (1 + g.abs().max()))
    close(bound.mean, q @ (mu + Sigma @ eta), scale_of(h, eta) * (1 + g.abs().max()))
    close(h.log_normalizer(eta) - bound.value, q @ (log_q - log_r), scale_of(h, eta, 0) * (1 + g.abs().max()))
    close(h.lower_bound(eta, log_r).gap, torch.zeros(()).double(), scale_of(h, eta, 0) * (1 + g.abs().max()))


def test_with_fixed_weights_the_bound_is_not_the_log_normalizer():
    log_pi, mu, Sigma, eta, _ = mixture(0, 3, 2)
    assert float(gz.Mixture(log_pi, gz.Gaussian(mu, Sigma)).lower_bound(3 * eta).gap) > 0.1


@given(**sizes)
def test_without_covariances_it_is_softmax_attention(seed, k, d):
    log_pi, mu, _, eta, _ = mixture(seed, k, d)
    h = gz.Mixture(log_pi, gz.Gaussian.diagonal(mu, torch.zeros_like(mu)))
    p = (log_pi + mu @ eta).softmax(-1)
    close(h.mean(eta), p @ mu, scale_of(h, eta))
    close(h.covariance(eta), (mu - p @ mu).mT @ (p.unsqueeze(-1) * (mu - p @ mu)), scale_of(h, eta, 2))
