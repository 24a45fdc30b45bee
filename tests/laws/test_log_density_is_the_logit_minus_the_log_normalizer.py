"""log dP_eta/dh = <x, eta> - G: masses sum to one, the score is x - mean.   [shim22, Eq. 1-3]"""

import pytest
import torch
from hypothesis import given, settings

from support.measure_agreement import EMPIRICAL, dot, log_weights, logits, longest
from support.measure_registry import NAMES, case, magnitudes, query_shapes, seeds
from support.scales import close, scale_of


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_log_density_is_the_logit_minus_the_log_normalizer(name, seed, queries, magnitude):
    measure, eta, source = case(name, seed, queries=queries, magnitude=magnitude)
    x = source.normal(*eta.shape)
    expected = dot(x, eta) - measure.log_normalizer(eta)
    close(measure.log_density(x, eta), expected, scale_of(measure, eta, 0) + longest(x, eta))
    score = torch.func.grad(lambda e: measure.log_density(x, e).sum())(eta)
    close(score, x - measure.mean(eta), scale_of(measure, eta) + longest(x))


@pytest.mark.parametrize("name", EMPIRICAL)
@given(seed=seeds, magnitude=magnitudes)
def test_the_masses_of_the_points_sum_to_one(name, seed, magnitude):
    measure, eta, _ = case(name, seed, magnitude=magnitude)
    p, scale = torch.softmax(logits(measure, eta), -1), scale_of(measure, eta, 0)
    n = measure.points.shape[-2]
    x, at = (
        measure.points.unsqueeze(-3).expand(*eta.shape[:-1], n, -1),
        eta.unsqueeze(-2).expand(*eta.shape[:-1], n, -1),
    )
    masses = (measure.log_density(x, at) + log_weights(measure)).exp()
    close(masses, p, scale)
    close(masses.sum(-1), torch.ones_like(eta[..., 0]), scale)
    close(measure.probabilities(eta), p, scale)
    points, probabilities = measure.atoms(eta)
    assert torch.equal(points, measure.points)
    close(probabilities, p, scale)


@pytest.mark.parametrize("name", EMPIRICAL)
def test_minus_it_is_the_contrastive_loss(name):
    """-log P(x_n) = cross entropy with the logits, for the point n of each query."""
    measure, eta, _ = case(name)
    s = logits(measure, eta)
    positive = s.argmax(-1)  # any point that has mass
    loss = torch.nn.functional.cross_entropy(s.flatten(0, -2), positive.flatten(), reduction="none")
    x = measure.points.take_along_dim(positive.unsqueeze(-1), -2)
    log_w = log_weights(measure).squeeze(-2).take_along_dim(positive, -1)
    close(-(measure.log_density(x, eta) + log_w).flatten(), loss, scale_of(measure, eta, 0))
