"""The density exp(<x, eta> - G(eta)) integrates to one against h.   [shim22, Eq. 1; theory E1]

Printed as Z(eta) = ∫ h(x) exp(u(x)·eta) without its dx: a density is one only with respect to a measure.
"""

import math

import pytest
import torch
from hypothesis import given

import gradlogz as gz
from support.densities import LAWS, law
from support.measure_registry import seeds
from support.scales import close


@pytest.mark.parametrize("name", LAWS)
@given(seed=seeds)
def test_the_density_integrates_to_one_against_h(name, seed):
    at = law(name, seed)
    h, x, log_mass, eta = at
    total = (log_mass + h.log_density(x, eta.expand_as(x))).logsumexp(-1)
    close(total, torch.zeros_like(total), at.scale(0))


def test_without_its_measure_the_density_does_not_integrate_to_one():
    h = gz.Empirical.weighted(torch.tensor([[0.0], [1.0]]), torch.tensor([1.0, 3.0]))
    density = h.log_density(h.points, torch.zeros(2, 1)).exp()
    assert math.isclose(float(density.sum()), 0.5)
    assert math.isclose(float((h.log_weights.exp() * density).sum()), 1.0, rel_tol=1e-6)
