"""Attention, its masks and its gradients are those of scaled_dot_product_attention."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gradlogz import Empirical
from support.measure_registry import Source
from support.scales import close

BATCHES = [(), (2,), (2, 3)]


def keys_queries_values(seed, batch, dtype=torch.float64, *, L=5, S=7, d=8, v=4):
    s = Source(seed, dtype)
    return s.normal(*batch, L, d), s.normal(*batch, S, d), s.normal(*batch, S, v), s


def scale_of_attention(q, k, order=1):
    return (1 + (q @ k.mT).abs().max() / math.sqrt(k.shape[-1])) * k.abs().max() ** order


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_mean_is_attention_with_values_equal_to_keys(batch, dtype):
    q, k, _, _ = keys_queries_values(0, batch, dtype)
    close(Empirical(k).mean(q / math.sqrt(8)), scaled_dot_product_attention(q, k, k), scale_of_attention(q, k))


@pytest.mark.parametrize("batch", BATCHES)
def test_attention_is_the_gradient_of_root_d_times_the_log_sum_exp_of_the_logits(batch):
    q, k, _, _ = keys_queries_values(1, batch)
    gradient = torch.func.grad(lambda q: math.sqrt(8) * (q @ k.mT / math.sqrt(8)).logsumexp(-1).sum())(q)
    close(scaled_dot_product_attention(q, k, k), gradient, scale_of_attention(q, k), tolerance=1e-13)
    close(Empirical(k).mean(q / math.sqrt(8)), gradient, scale_of_attention(q, k), tolerance=1e-13)


@pytest.mark.parametrize("batch", BATCHES)
def test_expect_is_attention_with_values_of_their_own(batch):
    q, k, v, _ = keys_queries_values(2, batch)
    close(Empirical(k).expect(v, q / math.sqrt(8)), scaled_dot_product_attention(q, k, v), scale_of_attention(q, k))


@pytest.mark.parametrize("batch", BATCHES)
def test_a_bool_mask_is_a_log_weight_of_minus_infinity(batch):
    q, k, v, s = keys_queries_values(3, batch)
    mask = (s.normal(*batch, 5, 7) > 0) | torch.eye(5, 7, dtype=torch.bool)  # every row keeps a key
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    close(Empirical(k, mask).expect(v, q / math.sqrt(8)), expected, scale_of_attention(q, k))


@pytest.mark.parametrize("batch", BATCHES)
def test_a_float_mask_is_a_log_weight(batch):
    q, k, v, s = keys_queries_values(4, batch)
    bias = s.normal(*batch, 5, 7)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    close(Empirical(k, bias).expect(v, q / math.sqrt(8)), expected, scale_of_attention(q, k) + bias.abs().max())


@pytest.mark.parametrize("batch", BATCHES)
def test_the_causal_mask_is_a_triangle_of_log_weights(batch):
    q, k, v, _ = keys_queries_values(5, batch, L=6, S=6)
    triangle = torch.ones(6, 6, dtype=torch.bool).tril().expand(*batch, 6, 6)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    close(Empirical(k, triangle).expect(v, q / math.sqrt(8)), expected, scale_of_attention(q, k))


def test_a_padding_mask_is_shared_by_heads_and_queries():
    q, k, v, s = keys_queries_values(6, (2, 3))
    padding = s.normal(2, 1, 1, 7) > -0.5
    expected = scaled_dot_product_attention(q, k, v, attn_mask=padding)
    for log_weights in (padding, padding.squeeze(-2)):  # one row for all queries, or no row of queries at all
        actual = Empirical(k, log_weights).expect(v, q / math.sqrt(8))
        close(actual, expected, scale_of_attention(q, k))


def test_a_position_bias_is_shared_by_the_batch():
    q, k, v, s = keys_queries_values(7, (2, 3))
    bias = s.normal(1, 3, 5, 7)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    close(Empirical(k, bias).expect(v, q / math.sqrt(8)), expected, scale_of_attention(q, k) + bias.abs().max())


def test_grouped_queries_are_query_dimensions_of_one_measure():
    _, k, v, s = keys_queries_values(8, (2, 2))
    q = s.normal(2, 6, 5, 8)  # three heads of queries for each head of keys
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    grouped = Empirical(k).expect(v, q.reshape(2, 2, 3, 5, 8) / math.sqrt(8))
    close(grouped.reshape(2, 6, 5, 4), expected, scale_of_attention(q.reshape(2, 2, 15, 8), k))


def test_a_batch_of_one_set_of_keys_serves_every_batch_of_queries():
    q, k, v, s = keys_queries_values(9, (1, 3))
    q = s.normal(4, 3, 5, 8)
    expected = scaled_dot_product_attention(q, k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1))
    close(Empirical(k).expect(v, q / math.sqrt(8)), expected, scale_of_attention(q, k))


def test_an_unmasked_row_beside_a_fully_masked_one_keeps_its_attention():
    q, k, v, _ = keys_queries_values(10, ())
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    close(Empirical(k, mask).expect(v, q / math.sqrt(8)), expected, scale_of_attention(q, k))


@pytest.mark.parametrize("batch", BATCHES)
def test_gradients_in_query_key_value_and_mask_agree(batch):
    q, k, v, s = keys_queries_values(11, batch)
    bias, upstream = s.normal(*batch, 5, 7), s.normal(*batch, 5, 4)

    def ours(q, k, v, bias):
        return (Empirical(k, bias).expect(v, q / math.sqrt(8)) * upstream).sum()

    def theirs(q, k, v, bias):
        return (scaled_dot_product_attention(q, k, v, attn_mask=bias) * upstream).sum()

    inputs = [t.requires_grad_() for t in (q, k, v, bias)]
    scale = scale_of_attention(q, k, 2).detach() * v.detach().abs().max() * upstream.abs().max()
    for actual, expected in zip(
        torch.autograd.grad(ours(*inputs), inputs), torch.autograd.grad(theirs(*inputs), inputs), strict=True
    ):
        close(actual, expected, scale)


@pytest.mark.parametrize("batch", BATCHES)
def test_gradients_agree_where_values_are_keys(batch):
    q, k, _, s = keys_queries_values(12, batch)
    mask, upstream = s.normal(*batch, 5, 7) > -1, s.normal(*batch, 5, 8)
    q, k = q.requires_grad_(), k.requires_grad_()
    ours = (Empirical(k, mask).mean(q / math.sqrt(8)) * upstream).sum()
    theirs = (scaled_dot_product_attention(q, k, k, attn_mask=mask) * upstream).sum()
    scale = scale_of_attention(q, k, 2).detach() * upstream.abs().max()
    for actual, expected in zip(torch.autograd.grad(ours, (q, k)), torch.autograd.grad(theirs, (q, k)), strict=True):
        close(actual, expected, scale)


def test_the_jacobian_in_the_query_is_the_covariance():
    q, k, _, _ = keys_queries_values(13, (), L=1)
    jacobian = torch.func.jacrev(lambda e: scaled_dot_product_attention(e, k, k, scale=1.0))(q)
    close(Empirical(k).covariance(q), jacobian.squeeze(-2), scale_of_attention(q * math.sqrt(8), k, 2))
