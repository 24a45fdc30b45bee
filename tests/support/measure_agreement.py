"""What the laws of this folder say with: two measures agree, and the points of an Empirical by their definition."""

import torch

from support.measure_registry import NAMES
from support.scales import close, scale_of

EMPIRICAL = [name for name in NAMES if name.startswith("empirical")]


def dot(a, b):
    return (a * b).sum(-1)


def longest(*vectors):
    """The product of their largest lengths: what a multilinear form is measured by."""
    return torch.stack([v.norm(dim=-1).amax() for v in vectors]).prod()


def scales(measure, eta):
    """Of a log normaliser, a mean, a covariance and a third cumulant, by their order."""
    return [scale_of(measure, eta, order) for order in range(4)]


def log_weights(measure):
    """log w of an Empirical as [*b, 1, n], 0 for the counting measure."""
    if measure.log_weights is None:
        return torch.zeros_like(measure.points[..., 0]).unsqueeze(-2)
    return measure.log_weights.unsqueeze(-2)


def logits(measure, eta):
    """<x_n, eta> + log w_n of an Empirical, by definition."""
    return eta @ measure.points.mT + log_weights(measure)


def agree(actual, expected, eta, vector, *, support=True):
    """Two measures have the same statistics at eta."""
    scale = scales(expected, eta)
    close(actual.log_normalizer(eta), expected.log_normalizer(eta), scale[0])
    close(actual.mean(eta), expected.mean(eta), scale[1])
    close(actual.covariance(eta), expected.covariance(eta), scale[2])
    product = expected.covariance_product(eta, vector)
    close(actual.covariance_product(eta, vector), product, scale[2] * longest(vector))
    if support:
        reach = expected.support(vector)
        finite = reach.where(reach.isfinite(), 0.0)
        close(actual.support(vector), reach, scale[1] * longest(vector) + finite.abs().amax())
