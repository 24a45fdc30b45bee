"""Every family with random parameters is what the integrals of its density say.   [shim22, Eq. 1-4; theory E1, E2, 3.4]

The statements take one member of each family; here are all members, at random natural parameters.
"""

import pytest
import torch
from hypothesis import given

import gradlogz as gz
from support.densities import LAWS, law
from support.measure_registry import inside, seeds
from support.scales import close

STATEMENTS = ("Eq. 1, E1", "Eq. 2, E2", "Eq. 4", "E8", "E10", "3.4 Gamma", "3.4 sphere", "1b torch", "6.3")


@pytest.mark.parametrize("name", LAWS)
@given(seed=seeds)
def test_statistics_are_integrals_against_the_density(name, seed):
    at = law(name, seed)
    h, x, log_mass, eta = at
    logits = log_mass + x @ eta
    p = logits.softmax(-1)
    away = x - p @ x
    close(h.log_normalizer(eta), logits.logsumexp(-1), at.scale(0))
    close(h.mean(eta), p @ x, at.scale())
    close(h.covariance(eta), away.mT @ (p.unsqueeze(-1) * away), at.scale(2))
    total = (log_mass + h.log_density(x, eta.expand_as(x))).logsumexp(-1)
    close(total, torch.zeros_like(total), at.scale(0))


@pytest.mark.parametrize("name", LAWS)
@given(seed=seeds)
def test_kl_is_the_integral_of_the_log_ratio_and_a_bregman_divergence(name, seed):
    at = law(name, seed)
    h, x, log_mass, first = at
    second = inside(h, -0.5 * first)
    log_p, log_q = ((log_mass + x @ eta).log_softmax(-1) for eta in (first, second))
    expected = torch.where(log_p.exp() > 0, log_p.exp() * (log_p - log_q), 0.0).sum(-1)
    scale = torch.maximum(at.scale(0), at._replace(eta=second).scale(0))
    close(h.kl(first, second), expected, scale)
    close(gz.bregman(h.log_normalizer, second, first), expected, scale)
