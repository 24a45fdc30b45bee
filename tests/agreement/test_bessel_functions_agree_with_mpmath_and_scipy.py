"""Log I, the ratio of two I and the sphere's log normaliser agree with mpmath to 1e-12, relative.   [theory 3.4]

The oracle is Z(k) = 0F1(; d/2; k²/4), summed by mpmath with 60 digits; its logarithmic derivatives by
A = I_{d/2}/I_{d/2-1},  A' = 1 - A² - (d-1) A/k,  each derivative in s = k² being 2 d/ds = (1/k) d/dk.
"""

import math
from typing import NamedTuple

import mpmath as mp
import pytest
import scipy.special
import torch

from gradlogz import Sphere
from gradlogz.special.bessel import bessel_ratio, log_bessel, radial

DIMENSIONS = [2, 3, 4, 5, 8, 16, 63, 256, 1024, 4096]
LENGTHS = [1e-150, 1e-8, 1e-3, 0.3, 1.0, 7.0, 60.0, 500.0, 1e4, 1e6]


def lengths(d):
    """The grid and both sides of s = 2d, where the series hands over to the nodes."""
    switch = math.sqrt(2 * d)
    return sorted([*LENGTHS, switch * (1 - 1e-9), switch, switch * (1 + 1e-9), 1.2 * switch, 3 * switch])


class Oracle(NamedTuple):
    """g, a = 2g', b = 2a', c = 2b' in s = k², and A = k a and Var t = A'."""

    g: float
    a: float
    b: float
    c: float
    A: float
    variance: float


def oracle(d, k):
    with mp.workdps(60 + max(0, 8 * -round(math.log10(k)))):  # derivatives at small k are differences of near equals
        k = mp.mpf(k)
        Z, above = (mp.hyp0f1(mp.mpf(d) / 2 + i, k * k / 4, maxterms=10**6) for i in (0, 1))
        a = above / (Z * d)
        A, variance = k * a, 1 - (k * a) ** 2 - (d - 1) * a
        b = (variance - a) / k**2
        c = (-2 * a * variance - (d + 2) * b) / k**2
        return Oracle(*map(float, (mp.log(Z), a, b, c, A, variance)))


def relative(actual, expected):
    assert float(actual) == pytest.approx(expected, rel=1e-12, abs=0.0)


def number(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_the_log_normalizer_of_the_sphere_and_its_derivatives(d):
    for k in lengths(d)[1:]:
        truth, found = oracle(d, k), radial(number(k) ** 2, d)
        relative(found.log_normalizer, truth.g)
        relative(found.first, truth.a)
        # Beyond the switch b = (Var t - a) / s is a difference of numbers that agree in all but their first digits
        # for large d; what it is used for, b eta eta^T beside a I, is of size a.
        scale = abs(truth.b) + (truth.a / k**2 if k * k > 2 * d else 0.0)
        assert abs(float(found.second) - truth.b) <= 1e-12 * scale


@pytest.mark.parametrize("d", DIMENSIONS)
def test_the_ratio_of_bessel_functions(d):
    for k in lengths(d):
        relative(bessel_ratio(d / 2 - 1, number(k)), oracle(d, k).A)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_the_logarithm_of_a_bessel_function(d):
    nu = d / 2 - 1
    for k in lengths(d):
        terms = nu * math.log(k / 2), -math.lgamma(nu + 1), oracle(d, k).g
        # Relative to its terms: log I itself passes through zero.
        assert abs(float(log_bessel(nu, number(k))) - math.fsum(terms)) <= 1e-12 * sum(map(abs, terms))


def test_scipy_agrees_where_it_neither_underflows_nor_overflows():
    for order in (0.0, 0.5, 1.0, 3.5, 7.0, 31.0):
        for x in (0.5, 2.0, 10.0, 80.0, 700.0, 1e5):
            i, above = (scipy.special.ive(order + j, x) for j in (0, 1))
            assert float(log_bessel(order, number(x))) == pytest.approx(math.log(i) + x, rel=1e-12, abs=1e-12)
            relative(bessel_ratio(order, number(x)), above / i)


def test_in_three_dimensions_they_are_hyperbolic_functions():
    for k in (1e-3, 0.5, 3.0, 40.0):
        with mp.workdps(40):
            g, A = mp.log(mp.sinh(k) / k), mp.coth(k) - 1 / mp.mpf(k)
        relative(radial(number(k) ** 2, 3).log_normalizer, float(g))
        relative(bessel_ratio(0.5, number(k)), float(A))


def test_at_zero_every_value_is_its_limit():
    for d in DIMENSIONS:
        found = radial(number(0.0), d)
        assert float(found.log_normalizer) == 0.0
        relative(found.first, 1 / d)
        relative(found.second, -2 / (d * d * (d + 2)))
        assert float(bessel_ratio(d / 2 - 1, number(0.0))) == 0.0
        assert float(log_bessel(d / 2 - 1, number(0.0))) == (0.0 if d == 2 else -math.inf)


@pytest.mark.parametrize("d", [2, 3, 16, 1024])
def test_automatic_derivatives_in_s_are_the_next_function(d):
    functions = [lambda s, i=i: radial(s, d)[i] for i in range(3)]
    for k in lengths(d)[2:]:
        truth, s = oracle(d, k), number(k) ** 2
        relative(2 * torch.func.grad(functions[0])(s), truth.a)
        for function, order, expected in ((functions[1], 1, truth.b), (functions[2], 2, truth.c)):
            scale = abs(expected) + truth.a / max(k * k, 2 * d) ** order  # as above
            assert abs(2 * float(torch.func.grad(function)(s)) - expected) <= 1e-12 * scale
        forward = torch.func.jvp(functions[0], (s,), (torch.ones_like(s),))[1]
        relative(2 * forward, truth.a)


@pytest.mark.parametrize("d", [2, 3, 16, 64])
def test_the_gradient_and_hessian_of_the_sphere_at_zero(d):
    h, zero = Sphere(d, number(1.5)), torch.zeros(d, dtype=torch.float64)
    gradient = torch.func.grad(h.log_normalizer)(zero)
    hessian = torch.func.hessian(h.log_normalizer)(zero)
    assert torch.equal(gradient, zero)
    torch.testing.assert_close(hessian, torch.eye(d, dtype=torch.float64) * 1.5**2 / d, rtol=1e-12, atol=0.0)
    third = torch.func.jacfwd(h.covariance)(zero)
    assert torch.equal(third, torch.zeros_like(third))


@pytest.mark.parametrize("side", [1 - 1e-9, 1.0, 1 + 1e-9])
@pytest.mark.parametrize("d", [2, 3, 16])
def test_the_gradient_and_hessian_of_the_sphere_across_the_switch(d, side):
    k = math.sqrt(2 * d) * side
    truth, direction = oracle(d, k), torch.ones(d, dtype=torch.float64) / math.sqrt(d)
    h, eta = Sphere(d, number(1.0)), k * direction
    identity, outer = torch.eye(d, dtype=torch.float64), direction.outer(direction)
    hessian = truth.a * (identity - outer) + truth.variance * outer
    for actual in (torch.func.hessian(h.log_normalizer)(eta), torch.func.jacrev(h.mean)(eta), h.covariance(eta)):
        torch.testing.assert_close(actual, hessian, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(torch.func.grad(h.log_normalizer)(eta), truth.A * direction, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_the_radial_variance(d):
    for k in LENGTHS[2:]:
        axis = torch.nn.functional.one_hot(torch.tensor(0), d).double()
        variance, truth = Sphere(d, number(1.0)).covariance_product(k * axis, axis)[0], oracle(d, k)
        # a + b k² is a difference of size a, as is its transverse neighbour on the diagonal.
        assert abs(float(variance) - truth.variance) <= 1e-12 * truth.a
        assert float(variance) >= 0


def test_single_precision_keeps_its_digits():
    for d in (2, 3, 64):
        for k in (1e-3, 1.0, 20.0, 1e3):
            found, truth = radial(torch.tensor(k) ** 2, d), oracle(d, k)
            for actual, expected in zip(found, truth[:3], strict=True):
                assert float(actual) == pytest.approx(expected, rel=1e-5, abs=0.0)
