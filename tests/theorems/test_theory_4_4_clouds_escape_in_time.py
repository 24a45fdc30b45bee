"""A whitened Gaussian cloud of n tokens is one for log sqrt(n / 6) / log gamma_3 steps.   [theory 4.4]

Counted until the skewness is 1. From sampling noise it takes longer or shorter by what the noise happens to be; from a
departure of order 3 alone the time is known.
"""

import math

import numpy
import pytest
import torch
from scipy.stats import norm

from gradlogz import Ascent, evolve
from gradlogz.dynamics import escape_time, hermite_growth

STATEMENTS = ("E36, 4.4 growth",)

F64 = torch.float64


def skewness(d, beta, steps):
    cloud = torch.randn(8, 768, d, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = evolve(cloud, Ascent(tau=0.5, beta=beta), contraction="zca", steps=steps, observe=["skewness"])
    return found.observed["skewness"]


def test_the_times_of_theory():
    assert escape_time(768, beta=0.1, tau=0.5) == pytest.approx(171, abs=0.5)
    assert escape_time(768, beta=0.3, tau=0.5) == pytest.approx(22, abs=0.5)
    gamma = hermite_growth(3, variance=2.0, beta=0.3, tau=0.5)
    assert escape_time(100, beta=0.3, tau=0.5, variance=2.0) == pytest.approx(math.log(100 / 6) / 2 / math.log(gamma))
    assert escape_time(768, beta=0.3, tau=-0.2) == math.inf
    assert escape_time(3, beta=0.3, tau=0.5) == 0.0, "already gone"


def test_clouds_escape_in_about_this_time():
    """In two dimensions, which have four third moments in place of one, somewhat sooner: 9 to 22 steps against 22."""
    series = skewness(2, 0.3, 40)
    times = (series > 1).int().argmax(0)
    assert bool((series.amax(0) > 1).all())
    expected = escape_time(768, beta=0.3, tau=0.5)
    assert 0.3 * expected < float(times.min()) < float(times.max()) < 1.2 * expected


@pytest.mark.parametrize("beta", [0.1, 0.3])
@pytest.mark.parametrize("eps", [0.005, 0.02])
def test_the_skewness_at_the_start_says_when(beta, eps):
    """Tokens at the quantiles of N(0, 1) (1 + eps He_3): no noise, and n is 6 / skewness."""
    x = numpy.linspace(-9, 9, 200_001)
    below = norm.cdf(x) - eps * (x**2 - 1) * norm.pdf(x)
    cloud = torch.tensor(numpy.interp((numpy.arange(768) + 0.5) / 768, below, x)).unsqueeze(-1)
    found = evolve(cloud, Ascent(tau=0.5, beta=beta), contraction="zca", steps=300, observe=["skewness"])
    series = found.observed["skewness"]
    expected = escape_time(6 / float(series[0]), beta=beta, tau=0.5)
    assert int((series > 1).int().argmax()) == pytest.approx(expected, rel=0.25)
