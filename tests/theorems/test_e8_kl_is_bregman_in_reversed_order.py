"""KL(p_1‖p_2) = B_G(eta_2, eta_1) = B_G*(u_1, u_2).   [theory E8]

The paper prints B_G(eta_1, eta_2), in section 3.2: that is the KL divergence the other way round.
"""

import pytest
import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.densities import LAWS, law
from support.measure_registry import inside, seeds
from support.scales import close, scale_of


def kl(log_p, log_q):
    """sum p log p/q, where p = 0 counts nothing."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


@pytest.mark.parametrize("name", LAWS)
@given(seed=seeds)
def test_kl_is_the_bregman_divergence_with_its_arguments_exchanged(name, seed):
    at = law(name, seed)
    h, x, log_mass, first = at
    second = inside(h, -0.5 * first)
    expected = kl((log_mass + x @ first).log_softmax(-1), (log_mass + x @ second).log_softmax(-1))
    scale = torch.maximum(at.scale(0), at._replace(eta=second).scale(0))
    close(h.kl(first, second), expected, scale)
    close(gz.bregman(h.log_normalizer, second, first), expected, scale)


@given(attentions(min_keys=2, scales=(1.0,)))
def test_on_the_side_of_the_means_the_order_is_kept(attention):
    keys, first, s = attention
    second, h = s.normal(len(first)), gz.Empirical(keys)
    u, v = h.mean(first), h.mean(second)
    expected = kl((keys @ first).log_softmax(-1), (keys @ second).log_softmax(-1))
    close(gz.bregman(lambda m: gz.dual(h, m).value, u, v), expected, 1 + scale_of(h, second, 0), tolerance=1e-8)


def test_the_printed_order_is_another_number():
    h = gz.Empirical(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64))
    first, second = torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    printed = gz.bregman(h.log_normalizer, first, second)
    assert abs(float(printed - h.kl(first, second))) > 0.05
    close(printed, h.kl(second, first))
