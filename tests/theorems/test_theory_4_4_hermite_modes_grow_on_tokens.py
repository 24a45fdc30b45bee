"""Hermite modes of tokens grow by the factor of theory.   [theory 4.4]

Tokens at the quantiles of N(0, 1) (1 + eps He_n): no chance in them, so that a small departure is seen as it grows.
"""

import math

import numpy
import pytest
import torch
from numpy.polynomial import hermite_e
from scipy.stats import norm

from gradlogz import Ascent, evolve
from gradlogz.dynamics import hermite_growth, hermite_mode
from support.scales import close

STATEMENTS = ("E36, 4.4 growth",)

F64 = torch.float64


def departed(n, eps, tokens):
    """Quantiles: the distribution function of the law is Phi - eps He_{n-1} phi."""
    x = numpy.linspace(-9, 9, 200_001)
    below = norm.cdf(x) - eps * hermite_e.hermeval(x, [0] * (n - 1) + [1]) * norm.pdf(x)
    return torch.tensor(numpy.interp((numpy.arange(tokens) + 0.5) / tokens, below, x)).unsqueeze(-1)


def measured_growth(n, tokens, beta, tau):
    """From the difference between a departure and its opposite: what a law without one does to tokens cancels."""
    start, end = 0.0, 0.0
    for eps in (0.002, -0.002):
        cloud = departed(n, eps, tokens)
        after = evolve(cloud, Ascent(tau=tau, beta=beta), contraction="zca", steps=1).cloud
        start, end = hermite_mode(cloud, n) - start, hermite_mode(after, n) - end
    return float(end / start)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_a_mode_is_a_mean_of_hermite_polynomials(n):
    cloud = 3.0 + 2.0 * torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(n), dtype=F64)
    z = (cloud - cloud.mean(-2, keepdim=True)) / cloud.std(-2, correction=0, keepdim=True)
    expected = torch.tensor(hermite_e.hermeval(z.numpy(), [0] * n + [1])).mean(-2) / math.factorial(n)
    close(hermite_mode(cloud, n), expected, scale=1e3)


@pytest.mark.parametrize(("n", "error"), [(3, 0.04), (4, 0.15)])
@pytest.mark.parametrize(("beta", "tau"), [(0.4, 0.5), (0.4, -0.3), (0.2, 0.5)])
def test_tokens_grow_as_the_law_does_the_more_there_are(n, error, beta, tau):
    """Tokens end where a law goes on, which higher orders feel more: 2 and 10 % of the growth at 6000 tokens."""
    growth = hermite_growth(n, variance=1.0, beta=beta, tau=tau) - 1
    few, many = (abs((measured_growth(n, tokens, beta, tau) - 1) / growth - 1) for tokens in (1500, 6000))
    assert many < error
    assert many < 0.65 * few
