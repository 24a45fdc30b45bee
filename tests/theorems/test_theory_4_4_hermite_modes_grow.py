"""Hermite mode n of a Gaussian cloud is multiplied by 1 + n s (beta c)^(n-1) in a step.   [theory 4.4]

The cloud has the density N(0, c) (1 + eps He_n(x / sqrt c)); the step and its standardisation are quadratures over
Gauss-Hermite nodes, the factor is the derivative in eps of the n-th coefficient after the step.
"""

import math

import numpy
import pytest
import torch
from numpy.polynomial import hermite_e

from gradlogz.dynamics import hermite_growth

STATEMENTS = ("E36, 4.4 growth",)

nodes, weights = (torch.tensor(t) for t in hermite_e.hermegauss(120))
weights = weights / weights.sum()


def hermite(n, z):
    """He_n by its recursion."""
    before, now = torch.ones_like(z), z
    if n == 0:
        return before
    for k in range(1, n):
        before, now = now, z * now - k * before
    return now


def coefficient_after(n, eps, c, beta, tau, *, whitened=True):
    """<He_n> / n! of the cloud after one step, standardised again."""
    p = weights * (1 + eps * hermite(n, nodes))
    x = math.sqrt(c) * nodes
    logits = beta * x[:, None] * x[None, :]
    shift = logits.amax(-1, keepdim=True)
    w = p * (logits - shift).exp()
    y = x + tau * (w @ x) / w.sum(-1)
    if whitened:
        mean = (p * y).sum()
        z = (y - mean) / ((p * (y - mean).square()).sum()).sqrt()
    else:
        z = y / (math.sqrt(c) * (1 + tau * beta * c))
    return (p * hermite(n, z)).sum() / math.factorial(n)


@pytest.mark.parametrize(("c", "beta", "tau"), [(1.0, 0.3, 0.5), (2.0, 0.2, 1.5), (0.7, 0.5, -0.4)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_the_factor_of_a_mode(n, c, beta, tau):
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    _, actual = torch.func.jvp(lambda e: coefficient_after(n, e, c, beta, tau, whitened=n > 2), (zero,), (one,))
    expected = hermite_growth(n, variance=c, beta=beta, tau=tau)
    assert float(actual) == pytest.approx(expected, abs=1e-8)
    assert (expected > 1) == (tau > 0), "attracting for descent alone"


def test_unequal_variances():
    """In two dimensions, mode (1, 2): against the formula written out, and equal variances give the plain one."""
    c, beta, tau = torch.tensor([0.5, 2.0], dtype=torch.float64), 0.3, 0.5
    s = [tau / (1 + tau * beta * float(v)) for v in c]
    expected = 1 + s[0] * (beta * 2.0) ** 2 + 2 * s[1] * (beta * 0.5) * (beta * 2.0)
    assert hermite_growth((1, 2), variance=c, beta=beta, tau=tau) == pytest.approx(expected, rel=1e-14)
    equal = torch.full((3,), 1.3, dtype=torch.float64)
    assert hermite_growth((1, 1, 2), variance=equal, beta=beta, tau=tau) == pytest.approx(
        hermite_growth(4, variance=1.3, beta=beta, tau=tau), rel=1e-14
    )


def test_whitening_leaves_the_third_order_as_the_first_that_grows():
    factors = numpy.array([hermite_growth(n, variance=1.0, beta=0.4, tau=0.5) for n in range(1, 8)])
    assert factors[2] == factors[2:].max()
