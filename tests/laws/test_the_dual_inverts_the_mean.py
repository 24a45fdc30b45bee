"""The conjugate has the natural parameter as its gradient, so it inverts the mean.   [shim22, Eq. 6; theory 3.5-3.6]"""

import pytest
import torch
from hypothesis import given, settings

import gradlogz as gz
from support.measure_agreement import dot, longest
from support.measure_registry import BOUNDED, NAMES, Source, case, seeds
from support.scales import close, scale_of

# Measures that extend in every direction: the link is unique, the Fisher information invertible.
FLAT = ["empirical, one point", "empirical, on a plane", "gaussian, singular", "one hot", "categorical statistic"]
MINIMAL = [name for name in NAMES if name not in [*FLAT, "empirical, masked"]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=2)
@given(seed=seeds)
def test_the_link_inverts_the_mean(name, seed):
    """Up to directions in which h does not extend, which the link leaves at 0."""
    measure, eta, _ = case(name, seed)
    u, scale = measure.mean(eta), scale_of(measure, eta)
    found = gz.measures.mean_to_natural(measure, u)
    close(measure.mean(found), u, scale, tolerance=1e-8)
    values, vectors = torch.linalg.eigh(measure.covariance(eta))
    across = vectors * (values <= 1e-10 * values[..., -1:]).unsqueeze(-2)
    expected = eta - (across @ across.mT @ eta.unsqueeze(-1)).squeeze(-1)
    # A mean known to eps |x| says no more of eta than eps |x| / lambda: the conditioning of the inverse.
    smallest = values.masked_fill(values <= 1e-10 * values[..., -1:], torch.inf).amin()
    close(found, expected, 1 + longest(eta) + 1e-6 * scale / smallest, tolerance=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_the_result_carries_its_certificate(name):
    measure, eta, _ = case(name)
    u = measure.mean(eta)
    found = gz.dual(measure, u)
    value = dot(eta, u) - measure.log_normalizer(eta)
    scale = 1 + dot(eta, u).abs().amax() + measure.log_normalizer(eta).abs().amax()
    close(found.value, value, scale, tolerance=1e-8)
    assert bool(found.converged.all())
    assert found.steps <= 100
    assert bool((found.gap <= 1e-12 * (1 + value.abs()) * (1 + 1e-6)).all())
    assert bool((found.separating == 0).all())


@pytest.mark.parametrize(("name", "seed"), [("tilted", 15), ("tilted", 25), ("spins", 6), ("poisson", 1)])
def test_newton_comes_back_from_steps_that_go_too_far(name, seed):
    """Means near the boundary, towards which a full step saturates the weights and leaves no curvature to turn by."""
    measure, eta, _ = case(name, seed, magnitude=3.0)
    close(
        measure.mean(gz.measures.mean_to_natural(measure, measure.mean(eta))),
        measure.mean(eta),
        scale_of(measure, eta),
        tolerance=1e-8,
    )


# Keys at 1e4 are known to 1e-3 in float32: no gap of a few 1e-6 can be shown there.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "empirical, far away"])
def test_the_link_inverts_the_mean_in_float32(name):
    measure, eta, _ = case(name, dtype=torch.float32)
    close(
        measure.mean(gz.measures.mean_to_natural(measure, measure.mean(eta))),
        measure.mean(eta),
        scale_of(measure, eta),
        tolerance=1e-4,
    )


@pytest.mark.parametrize("name", MINIMAL)
def test_the_conjugate_has_the_link_as_gradient_and_the_inverse_fisher_as_hessian(name):
    measure, eta, source = case(name, seed=1)
    u = measure.mean(eta).requires_grad_()
    found = gz.dual(measure, u)
    (gradient,) = torch.autograd.grad(found.value.sum(), u, create_graph=True)
    F = measure.covariance(eta)
    condition = torch.linalg.cond(F).amax()
    scale = condition * (1 + longest(eta))
    close(gradient.detach(), eta, scale, tolerance=1e-8)
    vector = source.normal(*eta.shape)
    expected = torch.linalg.solve(F, vector.unsqueeze(-1)).squeeze(-1)
    scale = condition * longest(expected)
    (curvature,) = torch.autograd.grad(dot(gradient, vector).sum(), u, retain_graph=True)
    close(curvature, expected, scale, tolerance=1e-8)
    (jacobian,) = torch.autograd.grad(dot(found.eta, vector).sum(), u)
    close(jacobian, expected, scale, tolerance=1e-8)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=3)
@given(seed=seeds)
def test_no_law_has_a_mean_outside_the_hull(name, seed):
    """There G* is infinite, and a direction proves it."""
    measure, eta, source = case(name, seed)
    direction = source.normal(*eta.shape)
    beyond = measure.support(direction) + 1 + 0.1 * measure.support(direction).abs()
    u = direction * (beyond / dot(direction, direction)).unsqueeze(-1)  # <direction, u> is beyond the support
    found = gz.dual(measure, u)
    assert bool((found.value == torch.inf).all())
    assert bool(found.converged.all())
    close(found.separating.norm(dim=-1), torch.ones(eta.shape[:-1], dtype=eta.dtype))
    assert bool((dot(found.separating, u) > measure.support(found.separating)).all())
    with pytest.raises(ValueError, match="inside the hull"):
        gz.measures.mean_to_natural(measure, u)


@pytest.mark.parametrize("name", [name for name in FLAT if name != "empirical, one point"])
def test_no_law_has_a_mean_off_the_plane_that_carries_h(name):
    measure, eta, _ = case(name)
    normal = torch.linalg.eigh(measure.covariance(eta)).eigenvectors[..., 0]
    found = gz.dual(measure, measure.mean(eta) + 0.01 * normal)
    assert bool((found.value == torch.inf).all())
    close(dot(found.separating, normal).abs(), torch.ones(eta.shape[:-1], dtype=eta.dtype), tolerance=1e-8)


@pytest.mark.parametrize("name", ["gamma", "inverse gaussian", "poisson", "wishart", "exponential prior"])
def test_no_law_on_a_cone_has_a_mean_outside_it(name):
    measure, eta, _ = case(name)
    found = gz.dual(measure, -measure.mean(eta))
    assert bool((found.value == torch.inf).all())
    assert bool((dot(found.separating, -measure.mean(eta)) > measure.support(found.separating)).all())


@pytest.mark.parametrize(
    "weights", [(0.1, 0.2, 0.3, 0.4), (0.0, 0.2, 0.3, 0.5), (0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 0.0, 1.0)]
)
def test_on_a_face_of_the_hull_the_conjugate_is_that_of_the_face(weights):
    """In a simplex G* is minus the entropy of the barycentric coordinates, up to the boundary."""
    corners, p = Source(0).normal(4, 3), torch.tensor(weights, dtype=torch.float64)
    found = gz.dual(gz.Empirical(corners), p @ corners)
    close(found.value, torch.xlogy(p, p).sum(), tolerance=1e-8)


def test_on_the_sphere_the_conjugate_is_only_approached():
    measure, eta, _ = case("sphere")
    u = measure.radius * eta / eta.norm(dim=-1, keepdim=True)
    assert not bool(gz.dual(measure, u, throw=False).converged.any())
    with pytest.raises(RuntimeError, match="boundary of the hull"):
        gz.dual(measure, u)
