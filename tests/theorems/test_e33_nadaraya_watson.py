"""Attention is the Nadaraya-Watson estimate with the kernel exp<x, y>.   [theory E33]

It is the one with the GAUSSIAN kernel exp(-beta |x - y|²/2) iff all keys have one norm, or carry exp(-beta |x_j|²/2).
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of

betas = st.sampled_from([0.3, 1.0, 2.0])


def nadaraya_watson(kernel, values):
    return (kernel.unsqueeze(-1) * values).sum(0) / kernel.sum()


def gaussian_kernel(keys, query, beta):
    return torch.exp(-beta * (keys - query).square().sum(-1) / 2)


@given(attentions(scales=(1e-3, 1.0)), betas)
def test_attention_is_kernel_regression_with_the_exponential_kernel(attention, beta):
    keys, query, s = attention
    values, h = s.normal(len(keys), 3), gz.Empirical(keys)
    expected = nadaraya_watson(torch.exp(beta * keys @ query), values)
    close(h.expect(values, beta * query), expected, scale_of(h, beta * query, 0) * (1 + values.abs().max()))


@given(attentions(scales=(1.0,)), betas)
def test_keys_of_one_norm_make_it_the_gaussian_kernel(attention, beta):
    keys, query, s = attention
    keys = keys / keys.norm(dim=-1, keepdim=True)
    values, h = s.normal(len(keys), 3), gz.Empirical(keys)
    expected = nadaraya_watson(gaussian_kernel(keys, query, beta), values)
    close(h.expect(values, beta * query), expected, scale_of(h, beta * query, 0) * (1 + values.abs().max()))


@given(attentions(scales=(1e-3, 1.0)), betas)
def test_so_do_weights_that_take_the_norms_out(attention, beta):
    keys, query, s = attention
    values, h = s.normal(len(keys), 3), gz.Empirical(keys, -beta * keys.square().sum(-1) / 2)
    expected = nadaraya_watson(gaussian_kernel(keys, query, beta), values)
    close(h.expect(values, beta * query), expected, scale_of(h, beta * query, 0) * (1 + values.abs().max()))


def test_with_unequal_norms_the_two_kernels_disagree():
    keys, query = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64), torch.tensor([1.0, 0.0]).double()
    gaussian = nadaraya_watson(gaussian_kernel(keys, query, 1.0), keys)
    assert float((gz.Empirical(keys).mean(query) - gaussian).norm()) > 1.0
