"""G - L_q = KL(q‖r) >= 0, tight at q = r; fixed gates make multi-head attention.   [theory 6.1-6.2]"""

import pytest
import torch
from hypothesis import given

import gradlogz as gz
from support.measure_agreement import longest
from support.measure_registry import NAMES, Source, case, magnitudes, query_shapes, seeds
from support.scales import TOLERANCE, close, scale_of

MIXTURES = [name for name in NAMES if name.startswith("mixture")]


def log_joint(mixture, eta):
    """log pi_k + G_k(eta), component by component, for eta [*b, m, d]."""
    G = mixture.components.log_normalizer(eta.unsqueeze(-3).expand(*mixture.components.batch_shape, *eta.shape[-2:]))
    return (mixture.log_weights.unsqueeze(-1) + G).mT


@pytest.mark.parametrize("name", MIXTURES)
@given(seed=seeds, magnitude=magnitudes)
def test_jensen_gap_is_a_relative_entropy(name, seed, magnitude):
    mixture, eta, source = case(name, seed, magnitude=magnitude)
    s, scale = log_joint(mixture, eta), scale_of(mixture, eta, 0)
    log_r = torch.log_softmax(s, -1)
    log_q = source.log_simplex(*mixture.log_weights.shape)
    bound = mixture.lower_bound(eta, log_q)
    q, log_q = log_q.exp().unsqueeze(-2), log_q.unsqueeze(-2)
    close(bound.value, (q * (s - log_q)).sum(-1), scale)
    close(bound.gap, (q * (log_q - log_r)).sum(-1), scale)
    close(mixture.log_normalizer(eta) - bound.value, bound.gap, scale)
    assert bool((bound.gap >= -TOLERANCE[eta.dtype] * scale).all())
    close(mixture.responsibilities(eta), log_r.exp(), scale)


@pytest.mark.parametrize("name", MIXTURES)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_its_mean_is_the_gradient_of_the_bound(name, seed, queries, magnitude):
    mixture, eta, source = case(name, seed, queries=queries, magnitude=magnitude)
    log_q = source.log_simplex(*mixture.log_weights.shape)
    gradient = torch.func.grad(lambda e: mixture.lower_bound(e, log_q).value.sum())(eta)
    close(mixture.lower_bound(eta, log_q).mean, gradient, scale_of(mixture, eta))


@pytest.mark.parametrize("name", MIXTURES)
@given(seed=seeds, magnitude=magnitudes)
def test_the_bound_is_tight_at_the_responsibilities(name, seed, magnitude):
    mixture, eta, _ = case(name, seed, queries=(1,), magnitude=magnitude)
    log_r = torch.log_softmax(log_joint(mixture, eta), -1).squeeze(-2)
    bound, scale = mixture.lower_bound(eta, log_r), scale_of(mixture, eta, 0)
    close(bound.value, mixture.log_normalizer(eta), scale)
    close(bound.gap, torch.zeros_like(bound.gap), scale)
    close(bound.mean, mixture.mean(eta), scale_of(mixture, eta))


@pytest.mark.parametrize("name", MIXTURES)
def test_its_own_weights_are_the_default_gates_and_a_closed_gate_drops_out(name):
    mixture, eta, source = case(name)
    default, given_ = mixture.lower_bound(eta), mixture.lower_bound(eta, mixture.log_weights)
    assert all(torch.equal(a, b) for a, b in zip(default, given_, strict=True))
    closed = source.normal(*mixture.log_weights.shape)
    closed[..., 0] = -torch.inf
    log_q = torch.log_softmax(closed, -1)
    s, q = log_joint(mixture, eta)[..., 1:], log_q[..., 1:].exp().unsqueeze(-2)
    close(mixture.lower_bound(eta, log_q).value, (q * (s - q.log())).sum(-1), scale_of(mixture, eta, 0))


@given(seed=seeds, magnitude=magnitudes)
def test_multi_head_attention_is_the_gradient_of_a_bound(seed, magnitude):
    """grad L_q = sum_k q_k W_qk^T W_kk att_k(eta) for keys W_qk^T W_kk x; the mixture gates its heads by log Z_k."""
    source = Source(seed)
    tokens, eta = source.normal(6, 4), source.normal(5, 4) * magnitude
    W_q, W_k, log_q = source.normal(3, 2, 4), source.normal(3, 2, 4), source.log_simplex(3)
    B = W_q.mT @ W_k  # [heads, 4, 4]
    keys = tokens @ B.mT
    heads = gz.Mixture(torch.full((3,), 1 / 3, dtype=eta.dtype).log(), gz.Empirical(keys))
    scores = (eta @ W_q.mT) @ (tokens @ W_k.mT).mT  # queries times keys of each head, [heads, 5, 6]
    out = torch.softmax(scores, -1) @ tokens @ B.mT
    scale = (1 + longest(eta, keys.flatten(0, 1))) * longest(keys)
    close(heads.lower_bound(eta, log_q).mean, torch.einsum("k,kmd->md", log_q.exp(), out), scale)
    gates = torch.softmax(scores.logsumexp(-1), 0)
    close(heads.mean(eta), torch.einsum("km,kmd->md", gates, out), scale)


def test_for_gaussian_components_it_is_the_formula_written_out():
    mixture, eta, source = case("mixture of gaussians")
    mu, Sigma = mixture.components.loc, mixture.components.covariance_matrix
    g = eta @ mu.mT + torch.einsum("md,kde,me->mk", eta, Sigma, eta) / 2
    log_q = source.log_simplex(4)
    bound = (log_q.exp() * (g + mixture.log_weights - log_q)).sum(-1)
    close(mixture.lower_bound(eta, log_q).value, bound, scale_of(mixture, eta, 0))
    fixed = torch.einsum("k,mkd->md", mixture.log_weights.exp(), mu + torch.einsum("kde,me->mkd", Sigma, eta))
    close(mixture.lower_bound(eta).mean, fixed, scale_of(mixture, eta))
