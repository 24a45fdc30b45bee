"""Agreement of two measures, and the logits of an Empirical by definition, for the laws of measures."""

import torch

from support.measure_registry import NAMES
from support.scales import close, scale_of

EMPIRICAL = [name for name in NAMES if name.startswith("empirical")]


def dot(a, b):
    return (a * b).sum(-1)


def longest(*vectors):
    """Return the product of the largest lengths, the scale of a multilinear form."""
    return torch.stack([v.norm(dim=-1).amax() for v in vectors]).prod()


def scales(measure, eta):
    """Return the scales of a log normaliser, a mean, a covariance and a third cumulant."""
    return [scale_of(measure, eta, order) for order in range(4)]


def log_weights(measure):
    """Return log w of an Empirical as [*b, 1, n], 0 for the counting measure."""
    if measure.log_weights is None:
        return torch.zeros_like(measure.points[..., 0]).unsqueeze(-2)
    return measure.log_weights.unsqueeze(-2)


def logits(measure, eta):
    """Return <x_n, eta> + log w_n of an Empirical, by definition."""
    return eta @ measure.points.mT + log_weights(measure)


def agree(actual, expected, eta, vector, *, support=True):
    """Assert that two measures have the same statistics at eta."""
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
