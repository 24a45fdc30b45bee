"""The mean lies in the hull of the support, and no direction varies more than its width allows.   [theory 3.7]"""

import pytest
import torch
from hypothesis import given, settings

from support.measure_agreement import EMPIRICAL, dot, log_weights
from support.measure_registry import BOUNDED, NAMES, case, magnitudes, query_shapes, seeds
from support.scales import TOLERANCE, scale_of


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_no_mean_lies_beyond_the_support(name, seed, queries, magnitude):
    measure, eta, source = case(name, seed, queries=queries, magnitude=magnitude)
    mean, rounding = measure.mean(eta), TOLERANCE[eta.dtype] * scale_of(measure, eta)
    for direction in (source.normal(*eta.shape), source.normal(*eta.shape), -source.positive(*eta.shape)):
        assert bool((dot(direction, mean) <= measure.support(direction) + rounding * direction.norm(dim=-1)).all())
    # In its own direction: |mean| is at most the largest |x|.
    assert bool((mean.norm(dim=-1) ** 2 <= measure.support(mean) + rounding * mean.norm(dim=-1)).all())


@pytest.mark.parametrize("name", EMPIRICAL)
@settings(max_examples=8)
@given(seed=seeds, magnitude=magnitudes)
def test_no_mean_is_longer_than_the_longest_point(name, seed, magnitude):
    measure, eta, _ = case(name, seed, magnitude=magnitude)
    lengths = measure.points.norm(dim=-1).unsqueeze(-2).masked_fill(log_weights(measure) == -torch.inf, 0.0)
    assert bool((measure.mean(eta).norm(dim=-1) <= lengths.amax(-1) * (1 + TOLERANCE[eta.dtype])).all())


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=5)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_no_variance_exceeds_a_quarter_of_the_squared_width(name, seed, queries, magnitude):
    measure, eta, _ = case(name, seed, queries=queries, magnitude=magnitude)
    values, vectors = torch.linalg.eigh(measure.covariance(eta))
    top = vectors[..., -1]
    width = measure.support(top) + measure.support(-top)
    assert bool(width.isfinite().all())
    assert bool((values[..., -1] <= width**2 / 4 + TOLERANCE[eta.dtype] * scale_of(measure, eta, 2)).all())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=seeds)
def test_support_is_the_slope_of_the_log_normalizer_at_infinity(name, seed):
    """G(t d) / t -> sup <x, d>; where that is infinite, G(t d) is infinite or grows faster than any line."""
    measure, eta, source = case(name, seed)
    direction = source.normal(*eta.shape)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    reach, t = measure.support(direction), 1e10
    bounded, legal = reach.isfinite(), measure.in_domain(t * direction)
    assert bool(legal[bounded].all())  # Z(t d) <= exp(t sup) Z(0)
    slope = measure.log_normalizer(t * torch.where(legal.unsqueeze(-1), direction, 0.0)) / t
    # The slowest of all is the inverse Gaussian, -sqrt(2 l t) / t; the others differ by log(t) / t.
    assert bool(((slope - reach)[bounded].abs() <= 10 * measure.dim / t**0.5 * (1 + reach[bounded].abs())).all())
    assert bool((slope[legal & ~bounded] > 10).all())
