"""Two entropies: that of the attention weights falls with the scale, that of the cloud of queries grows.   [theory E15]

    weights   d/dbeta H(p_{beta q}) = -beta Var(<k, q>),   along the ascent dH = -eta^T F ∇G
    cloud     T(eta) = eta + tau ∇G(eta) changes the differential entropy by E log det(I + tau F) >= 0

The paper (3.3) says that ascending G increases "entropy": right for the cloud, wrong for p(x | eta).
"""

import math

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("E15a", "E15b")


@given(attentions(scales=(1e-3, 1.0)))
def test_along_the_ascent_the_entropy_of_the_weights_moves_by_minus_eta_fisher_gradient(attention):
    keys, eta, _ = attention
    h, p = gz.Empirical(keys), (keys @ eta).softmax(-1)
    gradient = p @ keys
    F = (keys - gradient).mT @ (p.unsqueeze(-1) * (keys - gradient))
    rate = torch.func.jvp(h.entropy, (eta,), (gradient,))[1]
    close(rate, -eta @ F @ gradient, scale_of(h, eta, 3) * (1 + eta.norm()))


def test_for_a_centred_cross_of_keys_an_ascent_step_lowers_the_entropy_of_the_weights():
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    h, eta = gz.Empirical(keys), torch.tensor([1.0, 0.5])
    assert float(h.entropy(eta + h.mean(eta))) < float(h.entropy(eta)) - 0.1


def test_but_a_runner_up_behind_the_winner_lets_it_rise():
    # <x_a, x_b> > |x_a|²: the step towards the winner a moves mass to b, so monotone decrease is no theorem either.
    h, eta = gz.Empirical(torch.tensor([[1.0, 0.0], [2.0, -3.0]])), torch.tensor([3.0, 2.0])
    assert float(h.entropy(eta + h.mean(eta))) > float(h.entropy(eta)) + 0.05


@given(seeds)
def test_a_cloud_on_the_line_gains_the_expected_log_derivative(seed):
    keys, tau, width = Source(seed).normal(5), 0.7, 1 / 16
    grid = torch.arange(-14, 14, width, dtype=torch.float64)

    def moved(eta):
        return eta + tau * (eta.unsqueeze(-1) * keys).softmax(-1) @ keys

    # The entropy of the moved cloud from its own density p(T⁻¹y) / T'(T⁻¹y) on an even grid of y, T⁻¹ by bisection.
    low, high = grid - 14, grid + 14
    for _ in range(60):
        middle = (low + high) / 2
        low, high = torch.where(moved(middle) < grid, middle, low), torch.where(moved(middle) < grid, high, middle)
    slope = torch.func.vmap(torch.func.grad(moved))(middle)
    log_density = -(middle**2) / 2 - math.log(2 * math.pi) / 2 - slope.log()
    entropy = -(log_density.exp() * log_density).sum() * width

    eta, h = grid.unsqueeze(-1), gz.Empirical(keys.unsqueeze(-1))
    mass = torch.exp(-(grid**2) / 2) * width / math.sqrt(2 * math.pi)
    gain = mass @ torch.log1p(tau * h.covariance(eta)[:, 0, 0])
    close(gain + math.log(2 * math.pi * math.e) / 2, entropy, 10.0)


@given(attentions(scales=(1e-3, 1.0)))
def test_no_query_loses_volume_and_the_rate_is_the_trace(attention):
    keys, eta, _ = attention
    h, p = gz.Empirical(keys), (keys @ eta).softmax(-1)
    trace = p @ (keys - p @ keys).square().sum(-1)

    def log_volume(tau):
        return torch.logdet(torch.eye(len(eta), dtype=torch.float64) + tau * h.covariance(eta))

    assert float(log_volume(torch.tensor(1.0))) >= -1e-12
    close(torch.func.grad(log_volume)(torch.tensor(0.0, dtype=torch.float64)), trace, scale_of(h, eta, 2))
