"""For a sum of Diracs ∇ log ∫ exp<x, eta> h(dx) is the softmax average of the points.   [shim22, Prop. 1a]

h is a positive measure, not a function (theory E6), and its points may carry weights (theory 3.2).
"""

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions(scales=(1e-3, 1.0)))
def test_the_gradient_is_the_softmax_average(attention):
    points, eta, _ = attention
    numerator = sum(torch.exp(x @ eta) * x for x in points)
    denominator = sum(torch.exp(x @ eta) for x in points)
    h = gz.Empirical(points)
    close(h.mean(eta), numerator / denominator, scale_of(h, eta))


@given(attentions())
def test_weights_enter_as_a_bias_of_the_logits(attention):
    points, eta, s = attention
    log_w = s.normal(len(points))
    h = gz.Empirical(points, log_w)
    close(h.mean(eta), (log_w + points @ eta).softmax(-1) @ points, scale_of(h, eta))


@given(attentions())
def test_a_point_without_weight_is_not_there(attention):
    points, eta, _ = attention
    log_w = torch.zeros(len(points) + 1, dtype=points.dtype)
    log_w[-1] = -torch.inf
    h = gz.Empirical(torch.cat((points, points[:1] + 100.0)), log_w)
    close(h.mean(eta), (points @ eta).softmax(-1) @ points, scale_of(h, eta))


def test_at_logits_of_ten_thousand_the_largest_wins():
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert torch.equal(gz.Empirical(points).mean(torch.tensor([-1e4, 3.0], dtype=torch.float64)), points[2])
