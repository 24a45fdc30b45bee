"""H = G - E[logit], between 0 and log n; scaling the queries up never raises it.   [theory 3.5, E15]"""

import math

import pytest
import torch
from hypothesis import given, settings

import gradlogz as gz
from support.measure_agreement import EMPIRICAL, dot, logits, longest, scales
from support.measure_registry import NAMES, case, magnitudes, query_shapes, seeds
from support.scales import TOLERANCE, close, scale_of

COUNTING = ["empirical", "empirical, one point", "empirical, on a plane", "empirical, far away"]
SCALES = torch.linspace(0.0, 1.0, 9, dtype=torch.float64)


@pytest.mark.parametrize("name", EMPIRICAL)
@given(seed=seeds, magnitude=magnitudes)
def test_entropy_is_log_normalizer_minus_expected_logit(name, seed, magnitude):
    measure, eta, _ = case(name, seed, magnitude=magnitude)
    s = logits(measure, eta)
    p, scale = torch.softmax(s, -1), scale_of(measure, eta, 0)
    entropy = measure.entropy(eta)
    close(entropy, -torch.xlogy(p, p).sum(-1), scale)
    expected = torch.where(p > 0, p * s, 0.0).sum(-1)
    close(entropy, measure.log_normalizer(eta) - expected, scale)
    alive = (s > -torch.inf).sum(-1)
    assert bool((entropy >= 0).all())
    assert bool((entropy <= alive.to(eta.dtype).log() + TOLERANCE[eta.dtype]).all())


@pytest.mark.parametrize("name", COUNTING)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_for_equal_weights_it_is_minus_the_relative_entropy(name, seed, queries, magnitude):
    measure, eta, _ = case(name, seed, queries=queries, magnitude=magnitude)
    close(measure.entropy(eta), -measure.relative_entropy(eta), scale_of(measure, eta, 0))


@pytest.mark.parametrize("name", COUNTING)
def test_it_is_log_n_for_the_query_zero(name):
    measure, eta, _ = case(name)
    n = measure.points.shape[-2]
    close(measure.entropy(0 * eta), torch.full(eta.shape[:-1], math.log(n), dtype=eta.dtype))


@pytest.mark.parametrize("name", COUNTING)
@given(seed=seeds, magnitude=magnitudes)
def test_sharper_queries_have_less_entropy(name, seed, magnitude):
    measure, eta, _ = case(name, seed, magnitude=magnitude)
    along = torch.stack([measure.entropy(beta * eta) for beta in SCALES])
    assert bool((along.diff(dim=0) <= TOLERANCE[eta.dtype] * scale_of(measure, eta, 0)).all())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3)
@given(seed=seeds, magnitude=magnitudes)
def test_sharper_queries_lead_further_from_the_measure(name, seed, magnitude):
    """KL(P_eta‖h) grows along rays, at the rate <eta, Fisher eta>, for measures and weights of every kind."""
    measure, eta, _ = case(name, seed, magnitude=magnitude)
    scale = scales(measure, eta)
    along = torch.stack([measure.relative_entropy(beta * eta) for beta in SCALES[::2]])
    assert bool((along.diff(dim=0) >= -TOLERANCE[eta.dtype] * scale[0]).all())
    rate = torch.func.jvp(measure.relative_entropy, (eta,), (eta,))[1]
    variance = dot(eta, measure.covariance_product(eta, eta))
    close(rate, variance, scale[2] * (1 + longest(eta)) ** 2)


def test_equal_keys_have_the_entropy_of_a_die_and_one_key_has_none():
    eta = case("empirical").eta
    for n in (1, 2, 6):
        die = gz.Empirical(torch.ones(n, 3, dtype=eta.dtype))
        close(die.entropy(eta), torch.full(eta.shape[:-1], math.log(n), dtype=eta.dtype))


@pytest.mark.parametrize("name", EMPIRICAL)
def test_it_holds_in_float32(name):
    measure, eta, _ = case(name, dtype=torch.float32)
    p = torch.softmax(logits(measure, eta), -1)
    close(measure.entropy(eta), -torch.xlogy(p, p).sum(-1), scale_of(measure, eta, 0))
