"""Every attention sublayer is the gradient in omega of ONE log normaliser, with any weights.   [theory 3.9]

    heads      one key per head, drawn independently, values added: a convolution, and G adds
    residual   convolution with the Dirac at x

It is an identity for any expectation, no evidence that layers ascend: that is a statement about eta (E7).
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("3.9 heads, residual",)


def sublayer(seed, heads, D=6):
    """A torch layer with random weights, tokens, its heads as measures over what they would add, and their scale."""
    s = Source(seed)
    layer = torch.nn.MultiheadAttention(D, heads, bias=False, batch_first=True, dtype=torch.float64)
    layer.requires_grad_(False)
    layer.in_proj_weight.copy_(s.normal(3 * D, D))
    layer.out_proj.weight.copy_(s.normal(D, D))
    X, scale, measures = s.normal(5, D), 1.0, []
    q, k, v = ((X @ w.mT).chunk(heads, -1) for w in layer.in_proj_weight.chunk(3))
    for Q, K, V, Wo in zip(q, k, v, layer.out_proj.weight.chunk(heads, -1), strict=True):
        logits = Q @ K.mT / math.sqrt(D // heads)  # one row per token: the batch of the measure
        values = gz.Empirical(V.expand(len(X), -1, -1), logits.log_softmax(-1))
        measures.append(gz.pushforward(values, Wo.expand(len(X), -1, -1)))
        scale = scale + (1 + logits.abs().max()) * (1 + V.norm(dim=-1).max() * Wo.norm())
    return layer, X, measures, scale


@given(seeds, st.sampled_from([1, 2, 3]))
def test_multi_head_attention_is_the_mean_of_a_convolution(seed, heads):
    layer, X, measures, scale = sublayer(seed, heads)
    expected, a = layer(X[None], X[None], X[None], average_attn_weights=False)
    h, zero = gz.convolve(*measures), torch.zeros_like(X)
    close(h.mean(zero), expected[0], scale)
    # The covariance is the sum of those of the heads: draws of different heads are independent.
    V, Wo = X @ layer.in_proj_weight.chunk(3)[2].mT, layer.out_proj.weight
    added = torch.stack([v @ w.mT for v, w in zip(V.chunk(heads, -1), Wo.chunk(heads, -1), strict=True)])
    away = added.unsqueeze(1) - (a[0] @ added).unsqueeze(-2)
    close(h.covariance(zero), torch.einsum("hin,hind,hine->ide", a[0], away, away), scale**2)


@given(seeds)
def test_log_normalizers_of_heads_add_without_a_gap(seed):
    # All pairs of keys, one of each head, by enumeration: one softmax over their sums of values.
    layer, X, measures, scale = sublayer(seed, 2)
    omega = 0.1 * X
    (Q1, Q2), (K1, K2), (V1, V2) = ((X @ w.mT).chunk(2, -1) for w in layer.in_proj_weight.chunk(3))
    W1, W2 = layer.out_proj.weight.chunk(2, -1)
    log_a, log_b = ((Q @ K.mT / math.sqrt(3)).log_softmax(-1) for Q, K in ((Q1, K1), (Q2, K2)))
    pairs = (V1 @ W1.mT).unsqueeze(1) + V2 @ W2.mT
    log_p = log_a.unsqueeze(-1) + log_b.unsqueeze(-2)
    expected = (log_p + torch.einsum("jld,id->ijl", pairs, omega)).flatten(1).logsumexp(-1)
    close(gz.convolve(*measures).log_normalizer(omega), expected, scale * (1 + omega.norm()))


@given(seeds)
def test_the_residual_connection_is_convolution_with_the_dirac_at_the_token(seed):
    layer, X, measures, scale = sublayer(seed, 2)
    h, zero = gz.convolve(gz.Empirical(X.unsqueeze(-2)), *measures), torch.zeros_like(X)
    close(h.mean(zero), X + layer(X[None], X[None], X[None])[0][0], scale)
    close(h.covariance(zero), gz.convolve(*measures).covariance(zero), scale**2)


@given(attentions(scales=(1.0,)))
def test_convolution_with_a_centred_gaussian_changes_the_covariance_only(attention):
    values, _, s = attention
    S, zero = s.covariance(values.shape[-1]), torch.zeros(values.shape[-1], dtype=torch.float64)
    h = gz.convolve(gz.Empirical(values), gz.Gaussian(zero, S))
    close(h.mean(zero), values.mean(0), scale_of(h, zero))
    close(h.covariance(zero), torch.cov(values.mT, correction=0).reshape(S.shape) + S, scale_of(h, zero, 2))
