"""The natural gradient is F⁺ mean; for a Gaussian it is eta + Sigma⁻¹ mu.   [theory 3.6]"""

import pytest
import torch
from hypothesis import given, settings

import gradlogz as gz
from support.measure_agreement import longest
from support.measure_registry import NAMES, Source, case, magnitudes, seeds
from support.scales import close


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=seeds)
def test_natural_gradient_is_the_least_solution_for_the_mean(name, seed):
    """F v = mean as well as it can be, and no v that does it is shorter."""
    measure, eta, _ = case(name, seed)
    F, mean = measure.covariance(eta), measure.mean(eta)
    least = torch.linalg.lstsq(F, mean.unsqueeze(-1), rcond=1e-10, driver="gelsd").solution.squeeze(-1)
    values = torch.linalg.eigvalsh(F)
    condition = (values[..., -1:] / values.masked_fill(values <= 1e-10 * values[..., -1:], torch.inf)).amax()
    # Errors of F are magnified twice where mean has a part outside the range of F (Wedin).
    close(measure.natural_gradient(eta), least, (1 + condition) ** 2 * longest(least))


@given(seed=seeds, magnitude=magnitudes)
def test_for_a_gaussian_it_is_a_dilation(seed, magnitude):
    source = Source(seed)
    mu, Sigma, eta = source.normal(3), source.covariance(3), source.normal(4, 3) * magnitude
    expected = eta + torch.linalg.solve(Sigma, mu)
    close(gz.Gaussian(mu, Sigma).natural_gradient(eta), expected, torch.linalg.cond(Sigma) ** 2 * longest(expected))


@given(seed=seeds)
def test_a_step_of_it_is_a_newton_step_towards_the_least_g(seed):
    """eta - F⁻¹ grad G minimises the quadratic model of G: for a Gaussian it is -Sigma⁻¹ mu, at once."""
    source = Source(seed)
    mu, Sigma, eta = source.normal(3), source.covariance(3), source.normal(4, 3)
    h = gz.Gaussian(mu, Sigma)
    least = eta - h.natural_gradient(eta)
    close(
        h.mean(least), torch.zeros_like(eta), torch.linalg.cond(Sigma) ** 2 * longest(eta) * Sigma.norm() + longest(mu)
    )
