"""G(eta) + G*(u) >= <eta, u> and G(eta) >= <eta, E_q x> - KL(q‖h), with equality at the tilted law.   [theory 3.5]"""

import pytest
import torch
from hypothesis import given, settings

import gradlogz as gz
from support.measure_agreement import EMPIRICAL, dot, log_weights, logits, longest
from support.measure_registry import NAMES, case, inside, magnitudes, seeds
from support.scales import TOLERANCE, close, scale_of


def divergence(q, log_reference):
    """sum q log q/r, points of no mass left out."""
    return torch.where(q > 0, q * (q.log() - log_reference), 0.0).sum(-1)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=2)
@given(seed=seeds)
def test_fenchel_and_young_differ_by_a_relative_entropy(name, seed):
    """G(eta) + G*(u) - <eta, u> = KL(P‖P_eta) for the P of mean u: 0 where u is the mean at eta, and only there."""
    measure, eta, source = case(name, seed)
    other = inside(measure, source.normal(*eta.shape))
    G, u = measure.log_normalizer(eta), measure.mean(other)
    scale = scale_of(measure, eta, 0) + scale_of(measure, other, 0) + longest(eta, u)
    surplus = G + gz.dual(measure, u).value - dot(eta, u)
    assert bool((surplus >= -1e-8 * scale).all())
    close(surplus, measure.kl(other, eta), scale, tolerance=1e-8)


@pytest.mark.parametrize("name", EMPIRICAL)
@given(seed=seeds, magnitude=magnitudes)
def test_no_law_of_the_points_beats_the_gibbs_law(name, seed, magnitude):
    """The gap is the relative entropy KL(q‖P_eta)."""
    measure, eta, source = case(name, seed, magnitude=magnitude)
    s, log_w = logits(measure, eta), log_weights(measure)
    q = torch.softmax(source.normal(*s.shape).masked_fill(log_w == -torch.inf, -torch.inf), -1)
    value = dot(eta, q @ measure.points) - divergence(q, log_w)
    gap, scale = measure.log_normalizer(eta) - value, scale_of(measure, eta, 0)
    close(gap, divergence(q, torch.log_softmax(s, -1)), scale)
    assert bool((gap >= -TOLERANCE[eta.dtype] * scale).all())


@pytest.mark.parametrize("name", ["empirical", "empirical, weighted"])
@settings(max_examples=5)
@given(seed=seeds)
def test_the_tilted_law_has_the_least_relative_entropy_of_all_with_its_mean(name, seed):
    """KL(q‖h) = KL(q‖law) + G*(u) for every q with mean u: Pythagoras."""
    measure, eta, source = case(name, seed, queries=(1,))
    points, log_w = measure.points, log_weights(measure)
    p = torch.softmax(logits(measure, eta), -1)
    # Move mass along a direction that changes neither the total nor the mean, as far as it stays positive.
    kept = torch.cat((points, torch.ones_like(points[..., :1])), -1)
    move = source.normal(*p.shape)
    move = move - (kept @ torch.linalg.lstsq(kept, move.mT).solution).mT
    q = p + 0.9 * move / (-move / p).amax(-1, keepdim=True)
    u = (q @ points).squeeze(-2)
    best, scale = gz.measures.maximum_entropy(measure, u), scale_of(measure, eta, 0)
    to_law = divergence(q, torch.log_softmax(logits(measure, best.eta.unsqueeze(-2)), -1)).squeeze(-1)
    close(divergence(q, log_w).squeeze(-1), to_law + best.relative_entropy, scale, tolerance=1e-8)
    close(best.distribution.mean(torch.zeros_like(u)), u, scale, tolerance=1e-8)
