"""The law that layer norm leaves is at best uniform on a sphere, a measure of its own, and no Gaussian.   [theory E35]

It puts every token on one (D-2)-sphere: LN(x) = sqrt(D) P x/|P x|. The note on exponential families says that it makes
a Gaussian of the set of tokens.
"""

import math

import torch
from hypothesis import given
from torch.nn.functional import layer_norm

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close

STATEMENTS = ("E35",)


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
