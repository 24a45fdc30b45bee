"""Distribution functions and quantiles are those of scipy, and of mpmath far in the tails."""

import mpmath
import pytest
import torch
from scipy import stats

from gradlogz.special.distributions import chi_square_quantile, student_p, student_quantile
from support.scales import close

F64 = torch.float64


@pytest.mark.parametrize("freedom", [1, 1.5, 2, 7, 30, 1e3, 1e6])
def test_student_is_that_of_scipy(freedom):
    t = torch.tensor([0, 1e-3, 0.5, 0.999, 1, 1.5, 4, 30, 1e3, torch.inf], dtype=F64)
    nu = torch.full_like(t, freedom)
    expected = torch.from_numpy(2 * stats.t.sf(t.numpy(), freedom))
    close(student_p(t, nu), expected, expected, tolerance=1e-8 if freedom == 1e6 else 1e-11)
    for level in (0.2, 0.5, 0.9, 0.95, 0.99, 1 - 1e-6):
        exact = stats.t.ppf((1 + level) / 2, freedom)
        assert float(student_quantile(nu, level)[0]) == pytest.approx(exact, rel=1e-9)
    assert torch.equal(student_quantile(nu), student_quantile(nu, 0.95))


@pytest.mark.parametrize("freedom", [1, 2.5, 19, 300])
def test_student_is_that_of_mpmath_far_in_the_tails(freedom):
    for t in (40.0, 1e3, 1e6):
        with mpmath.workdps(40):
            s = mpmath.mpf(freedom) / (freedom + mpmath.mpf(t) ** 2)
            expected = float(mpmath.betainc(mpmath.mpf(freedom) / 2, 0.5, 0, s, regularized=True))
        found = float(student_p(torch.tensor(t, dtype=F64), torch.tensor(float(freedom), dtype=F64)))
        assert found == pytest.approx(expected, rel=1e-11, abs=1e-300)


def test_student_needs_a_degree_of_freedom():
    few = torch.tensor([0.0, 0.5, torch.nan, 1.0], dtype=F64)
    assert student_quantile(few).isnan().tolist() == [True, True, True, False]
    assert student_p(torch.ones(4, dtype=F64), few).isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("probability", [1e-6, 0.01, 0.025, 0.5, 0.975, 0.99, 1 - 1e-9])
def test_chi_square_is_that_of_scipy(probability):
    degrees = torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0, 30.0, 50.0, 1e3, 1e5], dtype=F64)
    expected = torch.as_tensor(stats.chi2(degrees.numpy()).ppf(probability))
    close(chi_square_quantile(probability, degrees), expected, expected, tolerance=1e-8)
    assert chi_square_quantile(probability, torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("degrees", [1, 4, 121])
def test_chi_square_is_that_of_mpmath_far_in_the_tails(degrees):
    for probability in (1e-12, 1e-3, 1 - 2.0**-40):
        q = float(chi_square_quantile(probability, torch.tensor(float(degrees), dtype=F64)))
        with mpmath.workdps(40):
            half = mpmath.mpf(degrees) / 2
            lower = mpmath.gammainc(half, 0, mpmath.mpf(q) / 2, regularized=True)
            tail, expected = (lower, probability) if probability < 0.5 else (1 - lower, 1 - mpmath.mpf(probability))
            assert float(tail / expected) == pytest.approx(1.0, rel=1e-9)
