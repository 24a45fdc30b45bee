"""How G, mean and covariance move with the keys, and how partial attentions merge.   [theory 3.8]

keys + s            mean + s, G + <eta, s>              W keys, W^-T eta    mean -> W mean, G unchanged
h1 x h2             G1 + G2                             h * N(0, S)         G + <eta, S eta>/2, mean + S eta
h1 + h2             G = log(exp G1 + exp G2), mean = r1 m1 + r2 m2, F = r1 F1 + r2 F2 + r1 r2 (m1-m2)(m1-m2)^T
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.attention_strategies import attentions
from support.measure_registry import Source, seeds
from support.scales import close, scale_of, size


def statistics(keys, eta, log_w=0.0):
    """G, mean, covariance by their definitions."""
    logits = keys @ eta + log_w
    p = logits.softmax(-1)
    mean = p @ keys
    return logits.logsumexp(-1), mean, (keys - mean).mT @ (p.unsqueeze(-1) * (keys - mean))


def agree(h, eta, expected, factor=1.0):
    x, _ = size(h, eta)
    for order, (ours, theirs) in enumerate(zip((h.log_normalizer, h.mean, h.covariance), expected, strict=True)):
        close(ours(eta), theirs, factor * (1 + eta.norm() * x) * x**order)


@given(attentions())
def test_shifting_the_keys_shifts_the_mean_and_leaves_the_weights(attention):
    keys, eta, s = attention
    shift = s.normal(len(eta))
    G, mean, F = statistics(keys, eta)
    h = gz.Empirical(keys + shift)
    agree(h, eta, (G + eta @ shift, mean + shift, F))
    close(h.probabilities(eta), (keys @ eta).softmax(-1), scale_of(h, eta, 0))


@given(attentions(scales=(1.0,)))
def test_an_invertible_map_of_keys_and_its_inverse_transpose_on_queries_map_the_mean(attention):
    keys, eta, s = attention
    W = s.normal(len(eta), len(eta)) + 3 * torch.eye(len(eta), dtype=eta.dtype)
    G, mean, F = statistics(keys, eta)
    agree(gz.Empirical(keys @ W.mT), torch.linalg.solve(W.mT, eta), (G, W @ mean, W @ F @ W.mT), torch.linalg.cond(W))


@given(attentions(), st.randoms(use_true_random=False))
def test_the_order_of_the_keys_does_not_matter(attention, random):
    keys, eta, _ = attention
    order = list(range(len(keys)))
    random.shuffle(order)
    agree(gz.Empirical(keys[order]), eta, statistics(keys, eta))


@given(attentions(scales=(1.0,)), seeds)
def test_a_product_adds_log_normalizers_and_stacks_means(attention, seed):
    keys, eta, _ = attention
    s = Source(seed)
    other, both = s.normal(4, 2), torch.cat((eta, s.normal(2)))
    # By definition: all pairs of keys.
    pairs = torch.cat((keys.repeat_interleave(4, 0), other.repeat(len(keys), 1)), -1)
    agree(gz.product(gz.Empirical(keys), gz.Empirical(other)), both, statistics(pairs, both))


@given(attentions(scales=(1.0,)))
def test_a_convolution_is_attention_over_all_sums(attention):
    keys, eta, s = attention
    other = s.normal(3, len(eta))
    sums = (keys.unsqueeze(1) + other).flatten(0, 1)
    agree(gz.convolve(gz.Empirical(keys), gz.Empirical(other)), eta, statistics(sums, eta))


@given(attentions(scales=(1.0,)))
def test_smoothing_with_a_gaussian_adds_its_form(attention):
    keys, eta, s = attention
    S = s.covariance(len(eta))
    G, mean, F = statistics(keys, eta)
    h = gz.convolve(gz.Empirical(keys), gz.Gaussian(torch.zeros_like(eta), S))
    agree(h, eta, (G + eta @ S @ eta / 2, mean + S @ eta, F + S))


@given(attentions(min_keys=2), st.data())
def test_a_sum_of_measures_is_attention_over_all_their_keys(attention, data):
    keys, eta, s = attention
    at = data.draw(st.integers(1, len(keys) - 1))
    log_w = s.normal(len(keys))
    blocks = ((keys[:at], log_w[:at]), (keys[at:], log_w[at:]))
    h = gz.add(*(gz.Empirical(*block) for block in blocks))
    agree(h, eta, statistics(keys, eta, log_w))
    # The same from partial results alone, by the formulas of the table.
    (G1, m1, F1), (G2, m2, F2) = (statistics(k, eta, w) for k, w in blocks)
    r1, r2 = torch.stack((G1, G2)).softmax(0)
    merged = r1 * F1 + r2 * F2 + r1 * r2 * torch.outer(m1 - m2, m1 - m2)
    agree(h, eta, (torch.logaddexp(G1, G2), r1 * m1 + r2 * m2, merged))


@given(attentions(min_keys=3, max_keys=3))
def test_merging_is_associative(attention):
    keys, eta, _ = attention
    G, mean, F = statistics(keys, eta)
    blocks = [gz.PartialStatistics(*statistics(k.unsqueeze(0), eta)) for k in keys]

    def join(*partials):
        return gz.merge(gz.PartialStatistics(*(torch.stack(part) for part in zip(*partials, strict=True))))

    left, right, flat = join(join(*blocks[:2]), blocks[2]), join(blocks[0], join(*blocks[1:])), join(*blocks)
    h = gz.Empirical(keys)
    for merged in (left, right, flat):
        close(merged.log_normalizer, G, scale_of(h, eta, 0))
        close(merged.mean, mean, scale_of(h, eta))
        close(merged.covariance, F, scale_of(h, eta, 2))


@given(seeds)
def test_parts_of_different_kinds_merge_too(seed):
    s = Source(seed)
    keys, mu, Sigma, eta = s.normal(5, 2), s.normal(2), s.covariance(2), s.normal(2)
    G1, m1, F1 = statistics(keys, eta)
    G2, m2 = mu @ eta + eta @ Sigma @ eta / 2, mu + Sigma @ eta
    r1, r2 = torch.stack((G1, G2)).softmax(0)
    F = r1 * F1 + r2 * Sigma + r1 * r2 * torch.outer(m1 - m2, m1 - m2)
    agree(gz.add(gz.Empirical(keys), gz.Gaussian(mu, Sigma)), eta, (torch.logaddexp(G1, G2), r1 * m1 + r2 * m2, F))
