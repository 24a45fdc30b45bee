"""G of the counting measure = G of the probability 1/n + log n; mean and covariance agree; G* moves the other way.

[theory E3] The paper counts, its companion note divides by n: "uniform discrete measure" means both.
"""

import math

import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


def probability(keys):
    return gz.Empirical(keys, torch.full(keys.shape[:1], -math.log(len(keys)), dtype=keys.dtype))


@given(attentions())
def test_log_normalizers_differ_by_log_n(attention):
    keys, eta, _ = attention
    counting = keys @ eta
    close(
        probability(keys).log_normalizer(eta),
        counting.logsumexp(-1) - math.log(len(keys)),
        scale_of(gz.Empirical(keys), eta, 0),
    )


@given(attentions())
def test_means_and_covariances_agree(attention):
    keys, eta, _ = attention
    p = (keys @ eta).softmax(-1)
    mean = p @ keys
    covariance = (keys - mean).mT @ (p.unsqueeze(-1) * (keys - mean))
    for h in (gz.Empirical(keys), probability(keys), gz.reweight(gz.Empirical(keys), torch.tensor(3.0).double())):
        close(h.mean(eta), mean, scale_of(h, eta))
        close(h.covariance(eta), covariance, scale_of(h, eta, 2))


@given(attentions(scales=(1.0,)))
def test_conjugates_differ_by_log_n_the_other_way(attention):
    keys, eta, _ = attention
    p = (keys @ eta).softmax(-1)
    negative_entropy = torch.xlogy(p, p).sum()
    close(gz.dual(gz.Empirical(keys), p @ keys).value, negative_entropy, 1 + math.log(len(keys)), tolerance=1e-8)
    close(
        gz.dual(probability(keys), p @ keys).value,
        negative_entropy + math.log(len(keys)),
        1 + math.log(len(keys)),
        tolerance=1e-8,
    )


@given(attentions())
def test_a_key_given_twice_is_a_key_of_weight_two(attention):
    keys, eta, _ = attention
    twice, weights = torch.cat((keys, keys[:1])), torch.ones(len(keys), dtype=keys.dtype)
    weights[0] = 2.0
    h = gz.Empirical.weighted(keys, weights)
    s = twice @ eta
    close(h.log_normalizer(eta), s.logsumexp(-1), scale_of(h, eta, 0))
    close(h.mean(eta), s.softmax(-1) @ twice, scale_of(h, eta))


def test_the_two_normalisations_are_not_the_same_number():
    keys, eta = torch.eye(8), torch.ones(8)
    difference = gz.Empirical(keys).log_normalizer(eta) - probability(keys).log_normalizer(eta)
    assert abs(float(difference) - math.log(8)) < 1e-6
