"""Layer norm acts on each token over its features: LN(x) = gamma sqrt(D) P x/|P x| + b, P = I - 11^T/D.   [theory E35]

It puts every token on one (D-2)-sphere. It neither centres nor scales the SET of tokens, and makes no Gaussian of it,
as the note on exponential families says: the law it leaves is at best uniform on that sphere, a measure of its own.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import layer_norm

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close


@given(seed=seeds, n=st.integers(1, 5), D=st.integers(2, 6))
def test_it_projects_each_token_on_one_ellipsoid(seed, n, D):
    s = Source(seed)
    x, gamma, b = s.normal(n, D), s.normal(D), s.normal(D)
    P = torch.eye(D, dtype=torch.float64) - 1 / D
    centred = x @ P
    expected = gamma * math.sqrt(D) * centred / centred.norm(dim=-1, keepdim=True) + b
    # A token near a multiple of 1 has few digits left after centring.
    scale = (1 + gamma.abs().max()) * D * (x.norm(dim=-1) / centred.norm(dim=-1)).max()
    close(layer_norm(x, (D,), gamma, b, eps=0.0), expected, scale)
    close(layer_norm(x, (D,), eps=0.0).norm(dim=-1), torch.full((n,), math.sqrt(D), dtype=torch.float64), scale)


def test_it_neither_centres_nor_scales_across_tokens():
    tokens = torch.tensor([5.0, 0.0, -1.0]) + 0.1 * Source(0, torch.float32).normal(50, 3)
    normed = layer_norm(tokens, (3,))
    assert float(normed.mean(0).norm()) > 1.5  # a Gaussian with learned mean 0 would be centred
    assert float(normed.var(0).max()) < 0.1  # ... and of unit variance


def circle(n=256):
    """Directions spread evenly over the plane orthogonal to 1 in R^3, and an orthonormal basis of that plane."""
    basis = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -2.0]], dtype=torch.float64)
    basis = basis / basis.norm(dim=-1, keepdim=True)
    angle = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    return torch.stack((angle.cos(), angle.sin()), -1) @ basis, basis


@given(seeds)
def test_tokens_of_every_direction_become_the_sphere_whatever_their_length_and_offset(seed):
    s = Source(seed)
    directions, basis = circle()
    length, offset, eta = s.positive(256, 1), s.normal(256, 1), s.normal(2)
    normed = layer_norm(length * directions + offset, (3,), eps=0.0)
    log_mean = (normed @ basis.mT @ eta).logsumexp(0) - math.log(256)
    sphere = gz.Sphere(2, torch.tensor(3.0, dtype=torch.float64).sqrt())
    cancelled = 1 + (offset / length).abs().max()  # digits lost to the centring of a token
    close(sphere.log_normalizer(eta), log_mean, (1 + 3 * eta.norm()) * cancelled)


def test_the_gaussian_of_the_same_covariance_is_another_law():
    sphere = gz.Sphere(2, torch.tensor(3.0).sqrt())
    gaussian = gz.Gaussian(torch.zeros(2), sphere.covariance(torch.zeros(2)))
    eta = torch.tensor([2.0, 0.0])
    assert float(gaussian.log_normalizer(eta) - sphere.log_normalizer(eta)) > 0.5
