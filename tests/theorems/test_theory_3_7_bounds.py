"""Attention is beta diam(keys)²/4-Lipschitz in the query; two keys attain it; the third order of KL(p_a‖p_b).

[theory 3.7] From lambda_max(F) <= diam(keys)²/4, and KL(p_a‖p_b) = (1/2) (a - b)^T F (a - b) + O(|a - b|³).
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of

STATEMENTS = ("3.7 bounds", "3.7 KL")


def diameter(keys):
    return (keys.unsqueeze(1) - keys).norm(dim=-1).max()


@given(attentions(), st.sampled_from([0.1, 1.0, 5.0]))
def test_attention_is_lipschitz_in_the_query(attention, beta):
    keys, a, s = attention
    b, h = s.normal(len(a)), gz.Empirical(keys)
    moved = (h.mean(beta * a) - h.mean(beta * b)).norm()
    slack = 1e-12 * (scale_of(h, beta * a) + scale_of(h, beta * b))
    assert float(moved) <= float(beta * diameter(keys) ** 2 / 4 * (a - b).norm() + slack)


def test_two_keys_of_equal_weight_attain_the_bound():
    keys = torch.tensor([[1.0, 2.0], [4.0, -2.0]], dtype=torch.float64)
    F = gz.Empirical(keys).covariance(torch.zeros(2, dtype=torch.float64))
    close(torch.linalg.eigvalsh(F)[-1], diameter(keys) ** 2 / 4, 25.0)


@given(attentions(scales=(1.0,)))
def test_kl_is_half_the_fisher_form_up_to_third_order(attention):
    keys, a, s = attention
    h, step = gz.Empirical(keys), s.normal(len(a))
    p = (keys @ a).softmax(-1)
    along = keys @ step - p @ keys @ step
    second, third = p @ along**2, p @ along**3

    def remainder(t):
        return h.kl(a, a + t * step) - t**2 * second / 2

    t, size = 1e-2, 1 + along.abs().max()
    close(remainder(t) / t**3, third / 6, size**4, tolerance=2 * t)  # the next term is t/24 of a fourth cumulant
