"""Sums, products, convolutions and tilts of measures add up as their laws do.   [theory 3.3, 3.8]"""

import functools

import pytest
import torch
from hypothesis import given, settings

import gradlogz as gz
from support.measure_agreement import agree, scales
from support.measure_registry import NAMES, Source, case, inside, magnitudes, seeds
from support.scales import close, scale_of


def blocks(seed, magnitude):
    """Nine weighted keys in three blocks, one of them partly masked; queries; a vector."""
    source = Source(seed)
    x, log_w = source.normal(9, 3), source.normal(9)
    log_w[3:5] = -torch.inf
    return x, log_w, source.normal(4, 3) * magnitude, source.normal(4, 3)


@given(seed=seeds, magnitude=magnitudes)
def test_adding_blocks_of_keys_is_attention_over_all_keys(seed, magnitude):
    x, log_w, eta, vector = blocks(seed, magnitude)
    whole = gz.Empirical(x, log_w)
    a, b, c = (gz.Empirical(x[i : i + 3], log_w[i : i + 3]) for i in (0, 3, 6))
    agree(gz.add(a, b, c), whole, eta, vector)
    agree(gz.add(gz.add(a, b), c), whole, eta, vector)
    agree(gz.add(a, gz.add(c, b)), whole, eta, vector)


def partial(h, eta):
    return gz.measures.PartialStatistics(h.log_normalizer(eta), h.mean(eta), h.covariance(eta))


def joined(*parts):
    """Partials of the same queries, merged."""
    return gz.merge(gz.measures.PartialStatistics(*(torch.stack(field, 1) for field in zip(*parts, strict=True))))


def same(actual, expected, h, eta):
    for a, e, scale in zip(actual, expected, scales(h, eta)[:3], strict=True):
        close(a, e, scale)


@given(seed=seeds, magnitude=magnitudes)
def test_merging_partial_attentions_is_associative(seed, magnitude):
    x, log_w, eta, _ = blocks(seed, magnitude)
    h = gz.Empirical(x, log_w)
    whole = partial(h, eta)
    a, b, c = (partial(gz.Empirical(x[i : i + 3], log_w[i : i + 3]), eta) for i in (0, 3, 6))
    same(joined(a, b, c), whole, h, eta)
    same(joined(joined(a, b), c), whole, h, eta)
    same(joined(a, joined(b, c)), whole, h, eta)
    ring = functools.reduce(joined, [partial(gz.Empirical(x[i : i + 1], log_w[i : i + 1]), eta) for i in range(9)])
    same(ring, whole, h, eta)
    without = gz.merge(
        gz.measures.PartialStatistics(*(torch.stack(field, 1) for field in zip(a[:2], b[:2], c[:2], strict=True)))
    )
    close(without.mean, whole.mean, scale_of(h, eta))
    assert without.covariance is None


def test_parts_without_mass_count_nothing():
    x, log_w, eta, _ = blocks(0, 1.0)
    h = gz.Empirical(x, log_w)
    nothing = partial(gz.Empirical(x, torch.full_like(log_w, -torch.inf)), eta)
    same(joined(nothing, partial(h, eta), nothing), partial(h, eta), h, eta)
    same(joined(nothing, nothing), nothing, h, eta)
    assert bool((nothing.log_normalizer == -torch.inf).all())
    assert bool((nothing.mean == 0).all())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3)
@given(seed=seeds)
def test_tilting_twice_is_tilting_by_the_sum(name, seed):
    """The cocycle: G_a(eta) = G(a + eta) - G(a), which is 0 at 0."""
    h, eta, source = case(name, seed)
    # Quarters of parameters in the domain: any three of them add up to one, by convexity.
    eta, a, b = (e / 4 for e in (eta, *(inside(h, source.normal(*h.batch_shape, 1, h.dim)) for _ in range(2))))
    tilted, scale = gz.tilt(h, a.squeeze(-2)), scales(h, eta + a)
    close(tilted.log_normalizer(eta), h.log_normalizer(eta + a) - h.log_normalizer(a), scale[0])
    close(tilted.log_normalizer(0 * eta), torch.zeros_like(eta[..., 0]), scale[0])
    close(tilted.mean(eta), h.mean(eta + a), scale[1])
    close(tilted.covariance(eta), h.covariance(eta + a), scale[2])
    agree(gz.tilt(tilted, b.squeeze(-2)), gz.tilt(h, (a + b).squeeze(-2)), eta, source.normal(*eta.shape))


@given(seed=seeds, magnitude=magnitudes)
def test_convolving_two_sets_of_points_gives_all_their_sums(seed, magnitude):
    source = Source(seed)
    x, y, log_v, log_w = source.normal(4, 3), source.normal(5, 3), source.normal(4), source.normal(5)
    sums = gz.Empirical((x.unsqueeze(1) + y).reshape(20, 3), (log_v.unsqueeze(1) + log_w).reshape(20))
    eta, vector = source.normal(4, 3) * magnitude, source.normal(4, 3)
    agree(gz.convolve(gz.Empirical(x, log_v), gz.Empirical(y, log_w)), sums, eta, vector)


@given(seed=seeds, magnitude=magnitudes)
def test_the_product_of_two_sets_of_points_is_the_set_of_pairs(seed, magnitude):
    source = Source(seed)
    x, y, log_v, log_w = source.normal(4, 2), source.normal(5, 3), source.normal(4), source.normal(5)
    pairs = torch.cat((x.unsqueeze(1).expand(4, 5, 2), y.expand(4, 5, 3)), -1).reshape(20, 5)
    eta, vector = source.normal(4, 5) * magnitude, source.normal(4, 5)
    h = gz.Empirical(pairs, (log_v.unsqueeze(1) + log_w).reshape(20))
    agree(gz.product(gz.Empirical(x, log_v), gz.Empirical(y, log_w)), h, eta, vector)


@given(seed=seeds, magnitude=magnitudes)
def test_gaussians_convolve_to_gaussians(seed, magnitude):
    source = Source(seed)
    mu, nu, S, T = source.normal(3), source.normal(3), source.covariance(3), source.covariance(3)
    eta, vector = source.normal(4, 3) * magnitude, source.normal(4, 3)
    agree(gz.convolve(gz.Gaussian(mu, S), gz.Gaussian(nu, T)), gz.Gaussian(mu + nu, S + T), eta, vector)


@given(seed=seeds, magnitude=magnitudes)
def test_convolving_with_a_dirac_is_the_residual_connection(seed, magnitude):
    source = Source(seed)
    keys, token, eta = source.normal(7, 3), source.normal(3), source.normal(4, 3) * magnitude
    residual = gz.convolve(gz.Empirical(keys), gz.Empirical(token.unsqueeze(0)))
    attention = torch.softmax(eta @ keys.mT, -1) @ keys
    close(residual.mean(eta), token + attention, scale_of(residual, eta))


@given(seed=seeds, magnitude=magnitudes)
def test_smoothing_the_keys_adds_a_linear_term(seed, magnitude):
    """Convolution with N(0, S): mean + S eta; it is the mixture of Gaussians around the keys."""
    source = Source(seed)
    keys, S, eta = source.normal(7, 3), source.covariance(3), source.normal(4, 3) * magnitude
    smooth = gz.convolve(gz.Empirical(keys), gz.Gaussian(torch.zeros(3, dtype=keys.dtype), S))
    attention = torch.softmax(eta @ keys.mT, -1) @ keys
    close(smooth.mean(eta), attention + eta @ S, scale_of(smooth, eta))
    uniform = torch.full((7,), -torch.tensor(7.0).double().log(), dtype=keys.dtype)
    mixture = gz.Mixture(uniform, gz.Gaussian(keys, S.expand(7, 3, 3)))
    agree(smooth, gz.reweight(mixture, -uniform[0]), eta, source.normal(4, 3))
