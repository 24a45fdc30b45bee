"""Cosine attention: softmax attention between unit vectors, whatever the size of the tokens.   [liu22]"""

import math

import pytest
import torch

from gradlogz import Empirical
from gradlogz.attention import CosineAttention
from support.scales import close

F64 = torch.float64


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def unit_heads(layer, x):
    q, k, v = (p(x).reshape(*x.shape[:-1], 2, 4).transpose(-3, -2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_layer_is_its_formula(is_causal):
    layer, x = CosineAttention(8, 2, beta=7.0, dtype=F64), drawn(0, 3, 6, 8)
    q, k, v = unit_heads(layer, x)
    logits = 7.0 * q @ k.mT
    if is_causal:
        logits = logits.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    found, heads = layer.attend(x, is_causal=is_causal)
    expected = (logits.softmax(-1) @ v).transpose(1, 2).reshape(3, 6, 8)
    close(found, layer.out_proj(expected), 10.0)
    close(heads.log_normalizer, logits.logsumexp(-1), 10.0)
    close(layer(x, is_causal=is_causal), found, 10.0)


def test_a_head_is_the_family_of_its_unit_keys():
    layer, x = CosineAttention(8, 2, beta=7.0, dtype=F64), drawn(0, 6, 8)
    q, k, _ = unit_heads(layer, x)
    _, heads = layer.attend(x, statistics="moments")
    h = Empirical(k)
    close(heads.key_mean, h.mean(7.0 * q), 100.0)
    close(heads.key_variance, h.covariance(7.0 * q).diagonal(dim1=-2, dim2=-1).sum(-1), 100.0)
    assert bool(((heads.log_normalizer - math.log(6)).abs() <= 7.0 + 1e-12).all())


def test_the_size_of_tokens_does_not_matter():
    layer, x = CosineAttention(8, 2, bias=False, dtype=F64), drawn(0, 3, 6, 8)
    heads, larger = layer.attend(x)[1], layer.attend(1e6 * x)[1]
    close(larger.log_normalizer, heads.log_normalizer, 100.0)
    close(larger.entropy, heads.entropy, 100.0)


def test_the_temperature_is_bounded_and_learned():
    layer, x = CosineAttention(8, 2, beta=5.0, largest=6.0, dtype=F64), drawn(0, 3, 6, 8)
    layer(x).square().sum().backward()
    assert bool((layer.log_beta.grad != 0).all())
    with torch.no_grad():
        layer.log_beta.fill_(100.0)
    assert bool((layer.attend(x)[1].max_logit.abs() <= 6.0 + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F64])
def test_tokens_of_length_zero_are_neutral(dtype):
    layer = CosineAttention(8, 2, bias=False, dtype=dtype)
    x = torch.zeros(4, 8, dtype=dtype, requires_grad=True)
    output, heads = layer.attend(x)
    error = 1e-12 if dtype == F64 else 1e-6  # statistics of half precision are float32
    assert heads.log_normalizer.tolist() == [pytest.approx([math.log(4)] * 4, abs=error)] * 2
    output.sum().backward()
    assert bool(x.grad.isfinite().all())
