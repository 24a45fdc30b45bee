"""KL(p‖q) = B_G(q, p) = B_G*(mean p, mean q), in this order.   [theory E8]"""

import pytest
import torch
from hypothesis import given, settings

import gradlogz as gz
from support.measure_agreement import EMPIRICAL, dot, logits, longest
from support.measure_registry import NAMES, case, inside, magnitudes, query_shapes, seeds
from support.scales import TOLERANCE, close, scale_of


def two(name, seed=0, **options):
    """A measure, two natural parameters in its domain, and the scale of their KL."""
    measure, p, source = case(name, seed, **options)
    q = inside(measure, source.normal(*p.shape) * options.get("magnitude", 1.0))
    linear = 1 + longest(measure.mean(p), q - p)
    return measure, p, q, torch.stack((scale_of(measure, p, 0), scale_of(measure, q, 0), linear)).amax()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_kl_is_the_bregman_divergence_of_the_log_normalizer(name, seed, queries, magnitude):
    measure, p, q, scale = two(name, seed, queries=queries, magnitude=magnitude)
    at = p.clone().requires_grad_()
    G_p, G_q = measure.log_normalizer(at), measure.log_normalizer(q)
    (slope,) = torch.autograd.grad(G_p.sum(), at)
    bregman = G_q - G_p.detach() - dot(slope, q - p)
    close(measure.kl(p, q), bregman, scale)
    close(gz.bregman(measure.log_normalizer, q, p), bregman, scale)
    assert bool((measure.kl(p, q) >= -TOLERANCE[p.dtype] * scale).all())
    assert bool((measure.kl(p, p) == 0).all())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=2)
@given(seed=seeds)
def test_kl_is_the_bregman_divergence_of_the_conjugate(name, seed):
    measure, p, q, scale = two(name, seed)
    u, v = measure.mean(p), measure.mean(q)
    at_u, at_v = gz.dual(measure, u), gz.dual(measure, v)
    close(at_u.value - at_v.value - dot(at_v.eta, u - v), measure.kl(p, q), scale, tolerance=1e-8)


@pytest.mark.parametrize("name", EMPIRICAL)
@given(seed=seeds, magnitude=magnitudes)
def test_kl_of_points_is_the_sum_of_p_log_p_over_q(name, seed, magnitude):
    measure, eta_p, eta_q, scale = two(name, seed, magnitude=magnitude)
    log_p, log_q = (torch.log_softmax(logits(measure, eta), -1) for eta in (eta_p, eta_q))
    ratio = torch.where(log_p == -torch.inf, 0.0, log_p - log_q)
    close(measure.kl(eta_p, eta_q), (log_p.exp() * ratio).sum(-1), scale)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3)
@given(seed=seeds)
def test_kl_vanishes_exactly_where_the_laws_agree(name, seed):
    """Directions in which h does not extend change nothing; every other one counts."""
    measure, p, q, scale = two(name, seed)
    values, vectors = torch.linalg.eigh(measure.covariance(p))
    flat = vectors * (values <= 1e-10 * values[..., -1:]).unsqueeze(-2)
    within = p + (flat @ flat.mT @ (q - p).unsqueeze(-1)).squeeze(-1)
    close(measure.kl(p, within), torch.zeros(p.shape[:-1]), scale)
    if name != "empirical, one point":
        assert bool((measure.kl(p, q) > TOLERANCE[p.dtype] * scale).all())


@pytest.mark.parametrize("name", NAMES)
def test_kl_is_half_the_squared_fisher_length_to_second_order(name):
    """At q = p its gradient vanishes and its Hessian is the Fisher information, in p as in q.   [theory 3.7]"""
    measure, eta, source = case(name)
    vector, scale = source.normal(*eta.shape), scale_of(measure, eta, 2)
    along = measure.covariance_product(eta, vector)
    for kl in (lambda e: measure.kl(eta, e).sum(), lambda e: measure.kl(e, eta).sum()):
        gradient, curvature = torch.func.jvp(torch.func.grad(kl), (eta,), (vector,))
        close(gradient, torch.zeros_like(eta), scale)
        close(curvature, along, scale * longest(vector))


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_in_float32(name):
    measure, p, q, scale = two(name, dtype=torch.float32)
    slope = torch.func.grad(lambda e: measure.log_normalizer(e).sum())(p)
    bregman = measure.log_normalizer(q) - measure.log_normalizer(p) - dot(slope, q - p)
    close(measure.kl(p, q), bregman, scale)
