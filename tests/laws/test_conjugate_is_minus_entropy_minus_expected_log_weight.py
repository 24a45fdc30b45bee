"""G*(mean) = KL(P_eta‖h) = -H - E log w; counting and 1/n differ by log n in G and G* alone.   [theory E3, E9]"""

import math

import pytest
import torch
from hypothesis import given, settings

import gradlogz as gz
from support.measure_agreement import EMPIRICAL, dot, log_weights, logits
from support.measure_registry import NAMES, case, magnitudes, query_shapes, seeds
from support.scales import close, scale_of


@pytest.mark.parametrize("name", EMPIRICAL)
@given(seed=seeds, magnitude=magnitudes)
def test_relative_entropy_is_minus_entropy_minus_expected_log_weight(name, seed, magnitude):
    measure, eta, _ = case(name, seed, magnitude=magnitude)
    p = torch.softmax(logits(measure, eta), -1)
    entropy = -torch.xlogy(p, p).sum(-1)
    expected = torch.where(p > 0, p * log_weights(measure), 0.0).sum(-1)
    close(measure.relative_entropy(eta), -entropy - expected, scale_of(measure, eta, 0))


@pytest.mark.parametrize("name", EMPIRICAL)
def test_so_is_the_conjugate(name):
    measure, eta, _ = case(name)
    p = torch.softmax(logits(measure, eta), -1)
    expected = torch.where(p > 0, p * (p.log() - log_weights(measure)), 0.0).sum(-1)
    close(gz.dual(measure, p @ measure.points).value, expected, scale_of(measure, eta, 0), tolerance=1e-8)


@pytest.mark.parametrize("name", ["empirical", "empirical, weighted", "empirical, on a plane"])
def test_counting_and_averaging_differ_by_log_n_in_g_and_its_conjugate_alone(name):
    counting, eta, source = case(name)
    n = counting.points.shape[-2]
    log_mass = torch.full(counting.batch_shape, -math.log(n), dtype=eta.dtype)
    averaging = gz.reweight(counting, log_mass)
    u, vector = counting.mean(eta), source.normal(*eta.shape)
    close(averaging.log_normalizer(eta), counting.log_normalizer(eta) - math.log(n), scale_of(counting, eta, 0))
    close(averaging.relative_entropy(eta), counting.relative_entropy(eta) + math.log(n), scale_of(counting, eta, 0))
    close(gz.dual(averaging, u).value, gz.dual(counting, u).value + math.log(n), tolerance=1e-8)
    assert torch.equal(averaging.mean(eta), counting.mean(eta))
    assert torch.equal(averaging.covariance(eta), counting.covariance(eta))
    assert torch.equal(averaging.covariance_product(eta, vector), counting.covariance_product(eta, vector))
    assert torch.equal(averaging.support(vector), counting.support(vector))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_relative_entropy_is_the_expected_log_density(name, seed, queries, magnitude):
    """KL(P_eta‖h) = E[log dP_eta/dh] = <eta, E x> - G, for measures of every kind, with E x by autograd."""
    measure, eta, _ = case(name, seed, queries=queries, magnitude=magnitude)
    at = eta.clone().requires_grad_()
    G = measure.log_normalizer(at)
    (mean,) = torch.autograd.grad(G.sum(), at)
    close(measure.relative_entropy(eta), dot(eta, mean) - G.detach(), scale_of(measure, eta, 0))
